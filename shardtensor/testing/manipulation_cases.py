"""Test cases of the operators that repeat, pad, join and rearrange elements. Importing this module registers them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as some

from shardtensor.backend import HostArray
from shardtensor.testing.cases import Case, axes, case, seed, some_array
from shardtensor.testing.layouts import array, broadcastable, shapes


def _axis(data: Any, x: HostArray) -> int:
    return int(data.draw(some.integers(-x.ndim, x.ndim - 1)))


@case("tril", "triu")
def _triangle(data: Any) -> Case:
    return Case([some_array(data, 1)], params={"k": data.draw(some.integers(-9, 9))})


@case("diag")
def _diag(data: Any) -> Case:
    return Case([some_array(data, 1, 2)], (data.draw(some.integers(-4, 4)),))


@case("diagflat")
def _diagflat(data: Any) -> Case:
    x = some_array(data, 0, 2)
    return Case([x[:3] if x.ndim else x], (data.draw(some.integers(-4, 4)),))


@case("tile")
def _tile(data: Any) -> Case:
    x = some_array(data)
    return Case([x], (tuple(data.draw(some.lists(some.sampled_from([0, 1, 1, 2, 3]), max_size=4))),))


@case("repeat")
def _repeat(data: Any) -> Case:
    x = some_array(data)
    axis = None if not x.ndim or data.draw(some.integers(0, 3)) == 0 else _axis(data, x)
    count: Any = data.draw(some.integers(0, 3))
    if axis is not None and data.draw(some.booleans()):
        count = np.random.default_rng(seed(data)).integers(0, 4, x.shape[axis])
    return Case([x], (count,), {"axis": axis}, answer=np.repeat(x, count, axis=axis))


@case("resize")
def _resize(data: Any) -> Case:
    return Case([some_array(data)], (data.draw(shapes(0, 2)),))


@case("pad")
def _pad(data: Any) -> Case:
    x = some_array(data)
    widths = tuple(data.draw(some.tuples(some.integers(0, 4), some.integers(0, 4))) for _ in x.shape) or 0
    modes = ["edge", "reflect", "symmetric", "wrap", "maximum", "minimum"] if x.size and x.dtype != bool else []
    return Case([x], (widths, data.draw(some.sampled_from(["constant", *modes]))))


@case("ravel")
def _ravel(data: Any) -> Case:
    return Case([some_array(data)], (data.draw(some.sampled_from("CF")),))


@case("rot90")
def _rot90(data: Any) -> Case:
    x = some_array(data, 2)
    return Case([x], (data.draw(some.integers(-4, 4)), tuple(data.draw(some.permutations(range(x.ndim)))[:2])))


@case("hstack", "vstack", "dstack", "column_stack")
def _joined(data: Any) -> Case:
    x = some_array(data, 1)
    return Case([x] * data.draw(some.integers(1, 3)), listed=True)


@case("append")
def _append(data: Any) -> Case:
    x = some_array(data, 1)
    return Case([x, x], (data.draw(some.sampled_from([None, *range(-x.ndim, x.ndim)])),))


def _positions(data: Any, n: int) -> Any:
    kinds: list[Any] = [slice(None, None, data.draw(some.sampled_from([1, 2, -3])))]
    if n:
        kinds += [data.draw(some.integers(-n, n - 1)), data.draw(some.lists(some.integers(-n, n - 1), min_size=1))]
    return data.draw(some.sampled_from(kinds))


@case("delete")
def _delete(data: Any) -> Case:
    x = some_array(data, 1)
    axis = data.draw(some.sampled_from([None, *range(x.ndim)]))
    return Case([x], (_positions(data, x.size if axis is None else x.shape[axis]), axis))


@case("insert")
def _insert(data: Any) -> Case:
    x = some_array(data, 1)
    axis = _axis(data, x)
    where, value = _positions(data, x.shape[axis]), array((), "int32", seed(data))
    answer = np.insert(x, where, value, axis)
    return Case([x], (where, value, axis), answer=answer)


@case("permute_dims")
def _permute(data: Any) -> Case:
    x = some_array(data)
    return Case([x], (tuple(data.draw(some.permutations(range(x.ndim)))),))


@case("matrix_transpose")
def _matrix_transpose(data: Any) -> Case:
    return Case([some_array(data, 2)])


@case("moveaxis")
def _moveaxis(data: Any) -> Case:
    x = some_array(data, 1)
    return Case([x], (data.draw(some.integers(0, x.ndim - 1)), data.draw(some.integers(-x.ndim, x.ndim - 1))))


@case("squeeze")
def _squeeze(data: Any) -> Case:
    x = some_array(data)
    ones = [a for a, n in enumerate(x.shape) if n == 1]
    axis = tuple(data.draw(some.lists(some.sampled_from(ones), unique=True))) if ones else None
    return Case([x], (axis,))


@case("expand_dims")
def _expand(data: Any) -> Case:
    x = some_array(data)
    return Case([x], params={"axis": data.draw(some.integers(-x.ndim - 1, x.ndim))})


@case("broadcast_to")
def _broadcast(data: Any) -> Case:
    narrow, wide = data.draw(broadcastable(2))
    return Case([array(narrow, "int32", seed(data))], (np.broadcast_shapes(narrow, wide),))


@case("reshape")
def _reshape(data: Any) -> Case:
    """Draws the old and the new shape by merging adjacent factors of one list in two ways."""
    factors = data.draw(some.lists(some.sampled_from([1, 2, 2, 3, 3, 5, 0]), max_size=4))
    old, new = _merged(data, factors), _merged(data, factors)
    if new and 0 not in new and data.draw(some.booleans()):
        new = list(new)
        new[data.draw(some.integers(0, len(new) - 1))] = -1
    return Case([array(tuple(old), "int32", seed(data))], (tuple(new),))


def _merged(data: Any, factors: list[int]) -> list[int]:
    out: list[int] = []
    for f in factors:
        if out and data.draw(some.booleans()):
            out[-1] *= f
        else:
            out.append(f)
    return out


@case("flip")
def _flip(data: Any) -> Case:
    x = some_array(data)
    return Case([x], params={"axis": axes(data, x.ndim)})


@case("roll")
def _roll(data: Any) -> Case:
    x = some_array(data)
    axis = axes(data, x.ndim)
    shift: Any = data.draw(some.integers(-20, 20))
    if isinstance(axis, tuple) and data.draw(some.booleans()):
        shift = tuple(data.draw(some.integers(-20, 20)) for _ in axis)
    return Case([x], (shift,), {"axis": axis})


def _joinable(data: Any, along: int, base: tuple[int, ...]) -> list[HostArray]:
    out = []
    for _ in range(data.draw(some.integers(1, 4))):
        shape = list(base)
        shape[along] = data.draw(some.sampled_from([0, 1, 2, 5]))
        out.append(array(tuple(shape), data.draw(some.sampled_from(["int32", "float64"])), seed(data)))
    return out


@case("concat")
def _concat(data: Any) -> Case:
    base = data.draw(shapes(1))
    along = data.draw(some.integers(0, len(base) - 1))
    flat = data.draw(some.integers(0, 4)) == 0
    return Case(_joinable(data, along, base), params={"axis": None if flat else along}, listed=True)


@case("unshard")
def _unshard(data: Any) -> Case:
    base = data.draw(shapes(1))
    along = data.draw(some.integers(0, len(base) - 1))
    arrays = _joinable(data, along, base)
    return Case(arrays, (along,), answer=np.concatenate(arrays, axis=along), listed=True)


@case("stack")
def _stack(data: Any) -> Case:
    shape = data.draw(shapes())
    arrays = [array(shape, "int32", seed(data)) for _ in range(data.draw(some.integers(1, 9)))]
    return Case(arrays, params={"axis": data.draw(some.integers(-len(shape) - 1, len(shape)))}, listed=True)
