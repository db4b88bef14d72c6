"""Test cases of reductions, cumulative functions and counts. Importing this module registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as some

from shardtensor.backend import HostArray
from shardtensor.testing.cases import Case, axes, case, seed
from shardtensor.testing.layouts import DTYPES, array, shapes


@case("prod")
def _prod(data: Any) -> Case:
    """Draws factors near 1, because infinities in complex products depend on the order of multiplication."""
    example = _reduction(data)
    x = example.operands[0]
    example.operands = [x if x.dtype.kind in "biu" else (1 + x / 64).astype(x.dtype)]
    return example


@case("sum", "mean", "var", "std", "any", "all")
def _reduction(data: Any) -> Case:
    x = array(data.draw(shapes()), data.draw(some.sampled_from(DTYPES)), seed(data))
    return Case([x], params={"axis": axes(data, x.ndim), "keepdims": data.draw(some.booleans())})


@case("max", "min", "nanmax", "nanmin")
def _extremum(data: Any) -> Case:
    example = _reduction(data)
    x = example.operands[0]
    example.operands = [
        np.ones([n or 1 for n in x.shape], x.dtype) * x if x.size else np.ones([n or 1 for n in x.shape], x.dtype)
    ]
    if example.operands[0].dtype.kind in "fc" and example.operands[0].size and data.draw(some.booleans()):
        example.operands[0].flat[data.draw(some.integers(0, example.operands[0].size - 1))] = np.nan
    return example


@case("cumulative_sum")
def _cumulative_sum(data: Any) -> Case:
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(DTYPES)), seed(data))
    return _cumulative(data, x, np.cumsum, 0)


@case("cumulative_prod")
def _cumulative_prod(data: Any) -> Case:
    return _cumulative(data, _prod(data).operands[0], np.cumprod, 1)


def _cumulative(data: Any, x: HostArray, function: Callable[..., Any], initial: int) -> Case:
    x = x.astype("int64") if x.dtype.kind == "u" else x  # Not every backend has the uint64 of their sums.
    x = x if x.ndim else x.reshape(1)
    axis = data.draw(some.integers(-x.ndim, x.ndim - 1))
    with np.errstate(all="ignore"):
        answer = function(x, axis=axis)
    if include := data.draw(some.booleans()):
        first = [1 if d == axis % x.ndim else n for d, n in enumerate(x.shape)]
        answer = np.concatenate([np.full(first, initial, answer.dtype), answer], axis=axis)
    return Case([x], params={"axis": axis, "include_initial": include}, answer=answer)


@case("argmax", "argmin")
def _arg(data: Any) -> Case:
    example = _extremum(data)
    example.params["axis"] = axes(data, example.operands[0].ndim, one=True)
    return example


@case("count_nonzero")
def _count_nonzero(data: Any) -> Case:
    example = _reduction(data)
    example.answer = np.count_nonzero(example.operands[0], **example.params)
    return example


def _numbers(data: Any, dtypes: list[str]) -> tuple[HostArray, Any]:
    """Draws an array with elements, perhaps NaN, and an axis argument."""
    x = array(tuple([n or 1 for n in data.draw(shapes())]), data.draw(some.sampled_from(dtypes)), seed(data))
    if x.dtype.kind in "fc" and data.draw(some.booleans()):
        x.flat[data.draw(some.integers(0, x.size - 1))] = np.nan
    return x, axes(data, x.ndim)


@case("median")
def _median(data: Any) -> Case:
    x, axis = _numbers(data, ["int8", "int64", "uint8", "float16", "float32", "float64"])
    return Case([x], params={"axis": axis, "keepdims": data.draw(some.booleans())})


@case("quantile")
def _quantile(data: Any) -> Case:
    x, axis = _numbers(data, ["int8", "int64", "float32", "float64"])
    q = data.draw(some.sampled_from([0.25, 1.0, [0.1, 0.5], [0.0, 0.7, 1.0]]))
    return Case([x], (q,), {"axis": axis, "keepdims": data.draw(some.booleans())})


@case("counts_of_integers")
def _counts_of_integers(data: Any) -> Case:
    x = np.abs(array((data.draw(some.integers(0, 20)),), "int64", seed(data)))
    if data.draw(some.booleans()):
        return Case([x], params={"length": 6}, answer=np.bincount(x, minlength=6))
    weights = array(x.shape, "float64", seed(data))
    return Case([x, weights], params={"length": 6}, answer=np.bincount(x, weights, 6).astype("float64"))


@case("counts_between")
def _counts_between(data: Any) -> Case:
    x = array(data.draw(shapes(1)), data.draw(some.sampled_from(["int32", "float64"])), seed(data))
    edges = np.array([-2.0, -1.0, 0.5, 2.0])
    return Case([x, edges], answer=np.histogram(x, edges)[0])
