"""Test cases of the operators that read and write by indices. Importing this module registers them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as some

from shardtensor.backend import HostArray
from shardtensor.sharding.index import is_array
from shardtensor.testing.cases import Case, case, seed, some_array
from shardtensor.testing.layouts import array
from shardtensor.testing.sorting_cases import lines


@case("take")
def _take(data: Any) -> Case:
    x, axis = lines(data, ["int32", "float64"])
    n = x.shape[axis]
    indices = some.lists(some.integers(-n, n - 1), max_size=5) if n else some.just([])
    return Case([x], (np.array(data.draw(indices), np.int64),), {"axis": axis})


@case("take_along_axis")
def _take_along_axis(data: Any) -> Case:
    x, axis = lines(data, ["int32", "float64"])
    shape, n = list(x.shape), x.shape[axis]
    shape[axis] = data.draw(some.integers(0, 5)) if n else 0
    indices = np.random.default_rng(seed(data)).integers(-max(n, 1), max(n, 1), shape)
    if indices.ndim > 1 and data.draw(some.booleans()):
        other = (axis + 1) % x.ndim
        indices = indices[(slice(None),) * other + (slice(1),)]
    return Case([x, indices], params={"axis": axis})


@some.composite
def indices(draw: Any, shape: tuple[int, ...]) -> Any:
    """Draws a basic index: integers, slices with any step, at most one ellipsis, None."""
    out: list[Any] = []
    for n in shape[: draw(some.integers(0, len(shape)))]:
        if n and draw(some.integers(0, 3)) == 0:
            out.append(draw(some.integers(-n, n - 1)))
        else:
            bound = some.one_of(some.none(), some.integers(-n - 2, n + 2))
            step = draw(some.sampled_from([None, 1, 2, 3, -1, -2, -5]))
            out.append(slice(draw(bound), draw(bound), step))
    for extra in draw(some.lists(some.just(None), max_size=2)):
        out.insert(draw(some.integers(0, len(out))), extra)
    if draw(some.booleans()):
        taken = sum(1 for e in out if e is not None)
        at = draw(some.integers(0, len(out)))
        after = sum(1 for e in out[at:] if e is not None)
        tail = shape[len(shape) - after :] if after else ()
        if all(
            not isinstance(e, int) or -n <= e < n
            for e, n in zip([e for e in out[at:] if e is not None], tail, strict=True)
        ):
            out.insert(at, Ellipsis)
        assert taken <= len(shape)
    return out[0] if len(out) == 1 and draw(some.booleans()) else tuple(out)


@case("getitem")
def _getitem(data: Any) -> Case:
    x = some_array(data, dtypes=["int32", "float64"])
    index = data.draw(indices(x.shape))
    return Case([x], (index,), answer=x[index])


def _run(draw: Any, sizes: tuple[int, ...], block: tuple[int, ...]) -> list[Any]:
    """Draws index entries for dimensions of given sizes: arrays broadcastable to ``block``, masks, integers, slices."""
    out: list[Any] = []
    while sizes:
        n = sizes[0]
        kind = draw(some.sampled_from(["array", "array", "mask", "mask", "integer", "slice", "slice"]))
        width = 1
        if kind == "mask":
            width = draw(some.integers(1, min(2, len(sizes))))
            count = block[-1] if block else draw(some.integers(0, 3))
            mask = np.zeros(sizes[:width], bool)
            mask.flat[np.random.default_rng(draw(some.integers(0, 99))).permutation(mask.size)[:count]] = True
            if not count:  # An empty mask fits dimensions of any size.
                mask = mask[tuple(slice(draw(some.sampled_from([n, 0]))) for n in mask.shape)]
            out.append(mask)
        elif kind == "array":
            shape = tuple(1 if draw(some.integers(0, 4)) == 0 else m for m in block)
            shape = shape[draw(some.integers(0, len(shape))) :]
            if n or 0 in shape:
                bound = max(n, 1)
                out.append(np.random.default_rng(draw(some.integers(0, 99))).integers(-bound, bound, shape))
            else:
                out.append(slice(None))
        elif kind == "integer" and n:
            i = draw(some.integers(-n, n - 1))
            out.append(draw(some.sampled_from([i, np.int64(i), np.int16(i)])))
        else:
            bounds = some.one_of(some.none(), some.integers(-n - 2, n + 2))
            out.append(slice(draw(bounds), draw(bounds), draw(some.sampled_from([None, 1, 2, -1, -3]))))
        sizes = sizes[width:]
    return out


@some.composite
def array_indices(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draws an index that usually contains integer arrays and masks; some of these are invalid in NumPy."""
    block = draw(some.lists(some.sampled_from([0, 1, 2, 2, 3, 5]), max_size=2))
    left = draw(some.integers(0, len(shape)))
    right = draw(some.integers(0, len(shape) - left))
    out = _run(draw, shape[:left], tuple(block))
    if right or draw(some.booleans()):
        out.append(Ellipsis)
    out += _run(draw, shape[len(shape) - right :], tuple(block))
    for extra in draw(some.lists(some.sampled_from([None, None, None, True, np.array(True), False]), max_size=2)):
        out.insert(draw(some.integers(0, len(out))), extra)
    return tuple(out)


def _valid_index(data: Any, x: HostArray) -> Any:
    index = data.draw(array_indices(x.shape))
    try:
        x[index]
    except IndexError:  # The masks and arrays do not broadcast together.
        return np.array(True)
    return index if any(is_array(e) for e in index) else (*index, True)


@case("gather")
def _gather(data: Any) -> Case:
    x = some_array(data, dtypes=["int32", "float64"])
    index = _valid_index(data, x)
    return Case([x], (index,), answer=x[index])


@case("setitem")
def _setitem(data: Any) -> Case:
    x = some_array(data, dtypes=["int32", "float64"])
    index = _valid_index(data, x) if data.draw(some.booleans()) else data.draw(indices(x.shape))
    answer = x.copy()
    value = array(np.shape(x[index]), "int32", seed(data))
    if value.size:
        value = value[(slice(0, 1),) * data.draw(some.integers(0, value.ndim))]
    return Case([x, value], (index,), answer=assigned(answer, index, value))


def assigned(x: HostArray, index: Any, value: Any) -> HostArray:
    """Returns x after ``x[index] = value``, where the last value wins if an element is indexed several times."""
    positions = np.arange(x.size).reshape(x.shape)[index]
    values = np.asarray(value)
    values = values.reshape(values.shape[max(values.ndim - positions.ndim, 0) :]).astype(x.dtype)
    new = x.flatten()
    for position, v in zip(positions.ravel(), np.broadcast_to(values, positions.shape).ravel(), strict=True):
        new[position] = v
    return new.reshape(x.shape)
