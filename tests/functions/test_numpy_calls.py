"""NumPy's functions under drawn layouts and sizes: results and errors are NumPy's, and results remain sharded."""

from __future__ import annotations

import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from tests.draws import drawn
from tests.layouts import meshes, specs
from tests.numpy_calls import MAIN, Operands
from tests.numpy_table import leaves

DRAWN = sorted(
    {*st.core.OPS.chapters} & {*MAIN}
    - {"lexsort", "partition", "argpartition", "unique_values", "block", "row_stack", "polyfit", "info", "from_dlpack"}
)  # fmt: skip
"""Functions of modules that are imported on first use, except those whose results are not determined by the elements,
and ``from_dlpack``, which returns NumPy's arrays.
"""


def outcome(call: Any, operands: Operands) -> tuple[list[Any], type[Exception] | None]:
    """The results of a call, or the class of its error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return leaves(call(operands)), None
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            return [], type(error)


def check_call(name: str, data: Any, backend: str) -> None:
    rows, columns = data.draw(some.integers(0, 9), "rows"), data.draw(some.integers(0, 5), "columns")
    mesh = data.draw(meshes(backend), "mesh")

    def place(x: np.ndarray) -> st.ShardedTensor:
        return st.device_put(x, st.NamedSharding(mesh, data.draw(specs(mesh, x.ndim))))

    wanted, error = outcome(MAIN[name], Operands(rows=rows, columns=columns))
    found, mine = outcome(MAIN[name], Operands(place, rows=rows, columns=columns))
    if name in ("poly", "roots") and not rows:
        return  # NumPy looks for the function of the elements, of which there are none.
    if error in (ZeroDivisionError, IndexError) and not rows * columns:
        return  # NumPy's averages and quantiles raise even where the result has no elements.
    if error is not None:
        assert mine is not None
        assert issubclass(mine, (error, *(ValueError, IndexError) * issubclass(error, (ValueError, IndexError)))), mine
        return
    assert mine is None
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        if not isinstance(y, (np.ndarray, np.generic)):
            assert x == y
            continue
        assert isinstance(x, st.ShardedTensor)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("backend", ["numpy", "checked"], indirect=True)
def test_drawn_functions(backend: str) -> None:
    @hypothesis.settings(max_examples=drawn(80))
    @hypothesis.given(name=some.sampled_from(DRAWN), data=some.data())
    def run(name: str, data: Any) -> None:
        check_call(name, data, backend)

    run()


@pytest.mark.full
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("backend", ["numpy", "checked"], indirect=True)
def test_every_function(name: str, backend: str) -> None:
    @hypothesis.settings(max_examples=drawn(12))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        check_call(name, data, backend)

    run()
