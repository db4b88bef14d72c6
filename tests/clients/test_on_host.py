"""The programs of clients whose results are on the host: a page names them, with the reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.clients import test_array_api_extra, test_scipy, test_sklearn, test_xarray
from tests.clients.programs import Program, devices, lazily
from tests.clients_table import PAGE, leaves

ON_HOST = {
    # program: the reason, as the page says it
    "`stats.kendalltau`": "SciPy computes them in compiled code, which returns numbers of NumPy",
    "`stats.linregress`": "SciPy computes them in compiled code, which returns numbers of NumPy",
    "`ndimage.label`": "the number of objects is an integer; the labels are a tensor",
    "`to the host`": "the program asks for host arrays: `d.values`, `d.to_dataframe()`",
    "`display`": "text",
    "`equality`": "`d.equals(e)` is true or false",
    "`metadata`": "sizes, and an element as a number",
    "`sizes`": "sizes, and what is true or false",
}

METRICS = "mean_squared_error mean_absolute_error r2_score explained_variance_score max_error accuracy_score f1_score "
METRICS += "precision_score recall_score zero_one_loss jaccard_score log_loss confusion_matrix"
"""Metrics that return numbers of Python, for NumPy's arrays as well, and one of which the program makes a list."""


def programs() -> dict[str, tuple[Program, ...]]:
    """The programs of SciPy, scikit-learn, xarray and array-api-extra."""
    fitted, x, y = test_sklearn.run, test_sklearn.X, test_sklearn.Y

    def with_labels(estimator: Any, labels: np.ndarray) -> tuple[Program, ...]:
        return (lambda xp, x, y: fitted(estimator, x, y)), x, labels

    def of_metric(metric: Callable[..., Any], *arrays: np.ndarray) -> tuple[Program, ...]:
        return (lambda xp, *xs: metric(*xs)), *arrays

    def of_array(program: Program) -> tuple[Program, ...]:
        return (lambda xp, x: test_xarray.data_of(program(test_xarray.made(x)))), test_xarray.VALUE

    return {
        **test_scipy.PROGRAMS,
        **{name: with_labels(one, y) for name, one in test_sklearn.REGRESSION.items()},
        **{name: with_labels(one, test_sklearn.CLASSES) for name, one in test_sklearn.CLASSIFICATION.items()},
        **{n: ((lambda xp, x, one=one: fitted(one, x)), x) for n, one in test_sklearn.UNSUPERVISED.items()},
        **{name: of_metric(*one) for name, one in test_sklearn.METRICS.items()},
        **{name: of_array(program) for name, program in test_xarray.PROGRAMS.items()},
        **{f"xpx.{name}": program for name, program in test_array_api_extra.PROGRAMS.items()},
    }


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
def test_the_page_names_the_programs_whose_results_are_on_the_host() -> None:
    on_host, every = set(), programs()
    with lazily("sklearn", title="scikit-learn").config_context(array_api_dispatch=True), devices(3):
        for name, (program, *arrays) in every.items():
            found = program(st, *map(st.asarray, arrays))
            items = leaves([*found.values()] if isinstance(found, dict) else found)
            if not all(isinstance(x, (st.ShardedTensor, dict)) for x in items):
                on_host.add(f"`{name.removeprefix('xpx.')}`")
    assert on_host == {*ON_HOST, *[f"`{name}`" for name in METRICS.split()]}
    text = PAGE.read_text()
    assert f"{len(ON_HOST)} of the {len(every)} programs" in text
    for reason in set(ON_HOST.values()):
        names = ", ".join(name for name, why in ON_HOST.items() if why == reason)
        assert f"| {names} | {reason} |" in text
