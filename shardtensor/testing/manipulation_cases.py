"""Test cases of the operators that repeat, pad, join and rearrange elements. Importing this module registers them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as some

from shardtensor.backend import HostArray
from shardtensor.testing.cases import Case, case, seed
from shardtensor.testing.layouts import DTYPES, array, shapes


def _some_array(data: Any, min_dims: int = 0, max_dims: int = 3) -> HostArray:
    dtype = data.draw(some.sampled_from(DTYPES))
    return array(data.draw(shapes(min_dims, max_dims)), dtype, seed(data))


def _axis(data: Any, x: HostArray) -> int:
    return int(data.draw(some.integers(-x.ndim, x.ndim - 1)))


@case("tril", "triu")
def _triangle(data: Any) -> Case:
    return Case([_some_array(data, 1)], params={"k": data.draw(some.integers(-9, 9))})


@case("diag")
def _diag(data: Any) -> Case:
    return Case([_some_array(data, 1, 2)], (data.draw(some.integers(-4, 4)),))


@case("diagflat")
def _diagflat(data: Any) -> Case:
    x = _some_array(data, 0, 2)
    return Case([x[:3] if x.ndim else x], (data.draw(some.integers(-4, 4)),))


@case("tile")
def _tile(data: Any) -> Case:
    x = _some_array(data)
    return Case([x], (tuple(data.draw(some.lists(some.sampled_from([0, 1, 1, 2, 3]), max_size=4))),))


@case("repeat")
def _repeat(data: Any) -> Case:
    x = _some_array(data)
    axis = None if not x.ndim or data.draw(some.integers(0, 3)) == 0 else _axis(data, x)
    count: Any = data.draw(some.integers(0, 3))
    if axis is not None and data.draw(some.booleans()):
        count = np.random.default_rng(seed(data)).integers(0, 4, x.shape[axis])
    return Case([x], (count,), {"axis": axis}, answer=np.repeat(x, count, axis=axis))


@case("resize")
def _resize(data: Any) -> Case:
    return Case([_some_array(data)], (data.draw(shapes(0, 2)),))


@case("pad")
def _pad(data: Any) -> Case:
    x = _some_array(data)
    widths = tuple(data.draw(some.tuples(some.integers(0, 4), some.integers(0, 4))) for _ in x.shape) or 0
    modes = ["edge", "reflect", "symmetric", "wrap", "maximum", "minimum"] if x.size and x.dtype != bool else []
    return Case([x], (widths, data.draw(some.sampled_from(["constant", *modes]))))


@case("ravel")
def _ravel(data: Any) -> Case:
    return Case([_some_array(data)], (data.draw(some.sampled_from("CF")),))


@case("rot90")
def _rot90(data: Any) -> Case:
    x = _some_array(data, 2)
    return Case([x], (data.draw(some.integers(-4, 4)), tuple(data.draw(some.permutations(range(x.ndim)))[:2])))


@case("hstack", "vstack", "dstack", "column_stack")
def _joined(data: Any) -> Case:
    x = _some_array(data, 1)
    return Case([x] * data.draw(some.integers(1, 3)), listed=True)


@case("append")
def _append(data: Any) -> Case:
    x = _some_array(data, 1)
    return Case([x, x], (data.draw(some.sampled_from([None, *range(-x.ndim, x.ndim)])),))


def _positions(data: Any, n: int) -> Any:
    kinds: list[Any] = [slice(None, None, data.draw(some.sampled_from([1, 2, -3])))]
    if n:
        kinds += [data.draw(some.integers(-n, n - 1)), data.draw(some.lists(some.integers(-n, n - 1), min_size=1))]
    return data.draw(some.sampled_from(kinds))


@case("delete")
def _delete(data: Any) -> Case:
    x = _some_array(data, 1)
    axis = data.draw(some.sampled_from([None, *range(x.ndim)]))
    return Case([x], (_positions(data, x.size if axis is None else x.shape[axis]), axis))


@case("insert")
def _insert(data: Any) -> Case:
    x = _some_array(data, 1)
    axis = _axis(data, x)
    where, value = _positions(data, x.shape[axis]), array((), "int32", seed(data))
    answer = np.insert(x, where, value, axis)
    return Case([x], (where, value, axis), answer=answer)
