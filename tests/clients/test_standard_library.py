"""Programs of the standard library, NumPy's testing functions, and matplotlib."""

from __future__ import annotations

import copy
import json
import math
import pickle
import statistics
from typing import Any

import numpy as np
import pytest

from tests.clients.programs import Program, compared, numbers, on_meshes

VECTOR, OTHER, TABLE = numbers(37), numbers(37, seed=2), numbers(19, 7)


def asserted(xp: Any, x: Any) -> bool:
    for check in (np.testing.assert_allclose, np.testing.assert_array_equal, np.testing.assert_array_almost_equal):
        check(x, x + 0)
        with pytest.raises(AssertionError):
            check(x, x + 1)
    np.testing.assert_array_less(x, x + 1)
    np.testing.assert_array_max_ulp(x, x)
    return True


PROGRAMS: dict[str, tuple[Program, ...]] = {
    "copy": (lambda xp, x: [copy.copy(x), copy.deepcopy(x), copy.deepcopy({"a": x, "b": [x]})], TABLE),
    "pickle": (lambda xp, x: [pickle.loads(pickle.dumps(x, k)) for k in range(pickle.HIGHEST_PROTOCOL + 1)], TABLE),
    "testing": (asserted, TABLE),
    "math": (lambda xp, x: [math.sqrt(abs(x[0])), float(x[1]), complex(x[2]), round(float(x[3]), 2)], VECTOR),
    "builtins": (lambda xp, x: [float(f(x)) for f in (sum, max, min)] + [float(v) for v in sorted(x)[:3]], VECTOR),
    "json": (lambda xp, x: json.dumps(x.tolist()), VECTOR),
    "statistics": (lambda xp, x: statistics.fmean(x), VECTOR),
    "format": (lambda xp, x: f"{x[0]:.3f} {x.mean():.2f}", VECTOR),
}


@on_meshes
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_numpys_and_tensors(name: str, count: int) -> None:
    compared(*PROGRAMS[name], count=count)


DRAWN: dict[str, tuple[Any, ...]] = {
    "plot": (lambda ax, x: ax.plot(x)[0].get_ydata().tolist(), VECTOR),
    "plot columns": (lambda ax, x: [line.get_ydata().tolist() for line in ax.plot(x)], TABLE),
    "scatter": (lambda ax, x, y: np.asarray(ax.scatter(x, y, c=y, s=abs(x)).get_offsets()).tolist(), VECTOR, OTHER),
    "imshow": (lambda ax, x: np.asarray(ax.imshow(x).get_array()).tolist(), TABLE),
    "hist": (lambda ax, x: ax.hist(x, bins=5)[0].tolist(), VECTOR),
    "boxplot": (lambda ax, x: len(ax.boxplot(x)["boxes"]), TABLE),
    "contourf": (lambda ax, x: ax.contourf(x).levels.tolist(), TABLE),
    "fill_between": (lambda ax, x, y: len(ax.fill_between(np.arange(37), x, y).get_paths()), VECTOR, OTHER),
    "limits": (lambda ax, x: (ax.set_xlim(x.min(), x.max()), ax.axhline(x.mean()))[0], VECTOR),
}


@pytest.mark.parametrize("name", DRAWN)
def test_matplotlib_draws_tensors_as_arrays(name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: see the extra `plot`")
    matplotlib.use("agg")
    from matplotlib import pyplot

    program, *arrays = DRAWN[name]

    def drawn(xp: Any, *xs: Any) -> Any:
        figure, ax = pyplot.subplots()
        try:
            return program(ax, *xs)
        finally:
            pyplot.close(figure)

    compared(drawn, *arrays, count=3)
