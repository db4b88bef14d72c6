"""Test cases of the operators that sort and search. Importing this module registers them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as some

from shardtensor.backend import HostArray
from shardtensor.testing.cases import Case, case, seed
from shardtensor.testing.layouts import DTYPES, array, shapes


def lines(data: Any, dtypes: list[str] = DTYPES) -> tuple[HostArray, int]:
    """Draws an array of at least one dimension, with NaN if its dtype has it, and an axis."""
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(dtypes)), seed(data))
    if x.dtype.kind in "fc" and x.size and data.draw(some.booleans()):
        x.flat[data.draw(some.integers(0, x.size - 1))] = np.nan
    return x, data.draw(some.integers(-x.ndim, x.ndim - 1))


@case("sort")
def _sort(data: Any) -> Case:
    x, axis = lines(data)
    descending = data.draw(some.booleans())
    answer = np.sort(x, axis=axis)
    answer = np.flip(answer, axis=axis) if descending else answer
    return Case([x], params={"axis": axis, "descending": descending}, answer=answer)


@case("argsort")
def _argsort(data: Any) -> Case:
    x, axis = lines(data)
    if data.draw(some.booleans()):
        return Case([x], params={"axis": axis, "stable": True})
    answer = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis=axis), axis=axis, stable=True), axis=axis)
    return Case([x], params={"axis": axis, "descending": True}, answer=answer)


@case("searchsorted")
def _searchsorted(data: Any) -> Case:
    dtype = data.draw(some.sampled_from(["int32", "float32", "float64", "complex128"]))
    x1 = np.sort(array((data.draw(some.integers(0, 20)),), dtype, seed(data)))
    x2 = array(data.draw(shapes()), dtype, seed(data))
    return Case([x1, x2], params={"side": data.draw(some.sampled_from(["left", "right"]))})


@case("isin")
def _isin(data: Any) -> Case:
    x1, x2 = [array(data.draw(shapes()), data.draw(some.sampled_from(DTYPES)), seed(data)) for _ in range(2)]
    return Case([x1, x2], params={"invert": data.draw(some.booleans())})
