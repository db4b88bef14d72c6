"""Test cases of the operators that sort, search and select elements of lines. Importing this module registers them."""

from __future__ import annotations

import math
import warnings
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


@case("take_along_split")
def _take_along_split(data: Any) -> Case:
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(["int32", "float64"])), seed(data))
    axis = data.draw(some.integers(0, x.ndim - 1))
    shape, n = list(x.shape), x.shape[axis]
    shape[axis] = data.draw(some.integers(0, 9)) if n else 0
    indices = np.random.default_rng(seed(data)).integers(-max(n, 1), max(n, 1), shape)
    return Case([x, indices], params={"axis": axis}, answer=np.take_along_axis(x, indices, axis))


@case("elements_of_ranks")
def _elements_of_ranks(data: Any) -> Case:
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(["int32", "float64"])), seed(data))
    axes = data.draw(some.lists(some.integers(0, x.ndim - 1), min_size=1, unique=True).map(sorted).map(tuple))
    rest = [d for d in range(x.ndim) if d not in axes]
    shape = [x.shape[d] for d in rest]
    count = math.prod([x.shape[d] for d in axes])
    ranks = data.draw(some.lists(some.integers(0, count - 1), max_size=4, unique=True).map(sorted)) if count else []
    lines = np.sort(np.transpose(x, (*rest, *axes)).reshape(*shape, count), axis=-1)
    params = {"ranks": tuple(ranks), "axes": axes}
    return Case([x], params=params, answer=np.moveaxis(lines[..., np.array(ranks, int)], -1, 0))


@case("between")
def _between(data: Any) -> Case:
    picks = np.sort(array((2, *data.draw(shapes(0, 2))), "float64", seed(data)), axis=0)
    weights = np.array(data.draw(some.lists(some.sampled_from([0.0, 0.25, 0.5, 0.75]), max_size=3)))
    places = {"lower": (0,) * len(weights), "upper": (1,) * len(weights)}
    params = {"weights": tuple(weights.tolist()), "width": "float64", **places, "method": "linear"}
    return Case([picks], params=params, answer=np.quantile(picks, weights, axis=0))


@case("nan_quantiles")
def _nan_quantiles(data: Any) -> Case:
    shape = tuple([max(n, 1) for n in data.draw(shapes(1))])  # NumPy drops the quantiles of nothing.
    x = array(shape, "float64", seed(data))
    axes = data.draw(some.lists(some.integers(0, x.ndim - 1), min_size=1, unique=True).map(sorted).map(tuple))
    q = tuple(data.draw(some.lists(some.sampled_from([0.0, 0.3, 0.5, 1.0]), min_size=1, max_size=3)))
    params = {"q": q, "width": "float64", "axes": axes, "method": "linear"}
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore")
        return Case([x], params=params, answer=np.nanquantile(x, q, axis=axes))


@case("searchsorted_split")
def _searchsorted_split(data: Any) -> Case:
    x1, x2 = [array(data.draw(shapes(1, most)), "float64", seed(data)) for most in (1, 3)]
    x1, side = np.sort(x1), data.draw(some.sampled_from(["left", "right"]))
    return Case([x2, x1], params={"side": side}, answer=np.searchsorted(x1, x2, side=side))


@case("isin_sorted")
def _isin_sorted(data: Any) -> Case:
    x1, x2 = [array(data.draw(shapes(1, most)), "int32", seed(data)) for most in (1, 3)]
    return Case([x2, np.sort(x1)], answer=np.isin(x2, x1))
