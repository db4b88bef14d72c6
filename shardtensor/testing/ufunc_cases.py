"""Test cases of the operators that implement the methods of NumPy's ufuncs. Importing this module registers them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as some

import shardtensor.functions.numpy.number_parts
import shardtensor.functions.ufunc_protocol.ufunc_calls  # noqa: F401 - it declares its operators
from shardtensor.backend import HostArray
from shardtensor.testing.cases import Case, axes, case, seed, some_array
from shardtensor.testing.layouts import array, shapes


@case("mantissa", "exponent")
def _number_part(data: Any) -> Case:
    x = some_array(data, dtypes=["float16", "float32", "float64"])
    return Case([x], answer=lambda name: np.frexp(x)[name == "exponent"])


@case("bitcast")
def _bitcast(data: Any) -> Case:
    x = some_array(data, dtypes=["int32", "float32"])
    dtype = np.dtype(data.draw(some.sampled_from(["int32", "float32"])))
    return Case([x], (dtype,), answer=np.array(x.view(dtype)))


@case("fold")
def _fold(data: Any) -> Case:
    kinds = {"int32": ["bitwise_and", "bitwise_or", "bitwise_xor", "gcd"], "float64": ["hypot", "logaddexp"]}
    dtype = data.draw(some.sampled_from(["bool", "int32", "float64"]))
    name = data.draw(some.sampled_from([*kinds.get(dtype, []), "logical_xor"]))
    x = some_array(data, dtypes=[dtype])
    params = {"axis": axes(data, x.ndim), "keepdims": data.draw(some.booleans())}
    return Case([x], params={"ufunc": name, **params}, answer=getattr(np, name).reduce(x, **params))


def _line(data: Any) -> tuple[HostArray, int]:
    x = some_array(data, 1, dtypes=["int32", "float64"])
    return x, data.draw(some.integers(0, x.ndim - 1))


@case("running")
def _running(data: Any) -> Case:
    dtype = data.draw(some.sampled_from(["bool", "int32", "float32", "float64"]))
    x = some_array(data, 1, dtypes=[dtype])
    axis = data.draw(some.integers(0, x.ndim - 1))
    names = {"int32": ["gcd", "bitwise_and", "bitwise_xor"], "bool": ["logical_or", "logical_and"]}
    name = data.draw(some.sampled_from([*names.get(dtype, ["logaddexp", "logical_or", "fmin"]), "maximum", "minimum"]))
    return Case([x], params={"ufunc": name, "axis": axis}, answer=getattr(np, name).accumulate(x, axis=axis))


@case("accumulated")
def _accumulated(data: Any) -> Case:
    x, axis = _line(data)
    name = data.draw(some.sampled_from(["subtract", "add"]))
    return Case([x], params={"ufunc": name, "axis": axis}, answer=getattr(np, name).accumulate(x, axis=axis))


@case("segments")
def _segments(data: Any) -> Case:
    x, axis = _line(data)
    name, size = data.draw(some.sampled_from(["maximum", "subtract", "add"])), x.shape[axis]
    starts = tuple(data.draw(some.lists(some.integers(0, size - 1), max_size=4))) if size else ()
    answer = getattr(np, name).reduceat(x, np.asarray(starts, np.intp), axis=axis)
    return Case([x], params={"ufunc": name, "starts": starts, "axis": axis}, answer=answer)


@case("updated")
def _updated(data: Any) -> Case:
    x = array(
        tuple([n or 1 for n in data.draw(shapes(1))]), data.draw(some.sampled_from(["int32", "float64"])), seed(data)
    )
    count, numbers = data.draw(some.integers(0, 6)), np.random.default_rng(seed(data))
    places = np.array([numbers.integers(0, n, count) for n in x.shape], np.int64)
    values = array((count,), x.dtype.name, seed(data))
    name, answer = data.draw(some.sampled_from(["add", "subtract", "maximum"])), x.copy()
    getattr(np, name).at(answer, tuple(places), values)
    return Case([x, places, values], params={"ufunc": name}, answer=answer)
