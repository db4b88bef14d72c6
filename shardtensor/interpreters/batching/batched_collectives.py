"""Collectives over the examples of a batch, along the axis that `vmap` has named."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardtensor.core import Op, Operands, bind, call
from shardtensor.errors import ArgumentError, ShapeError
from shardtensor.interpreters.batching.batcher import Batcher, names_of, special
from shardtensor.interpreters.program_arrays import tensor_here
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import SCALARS


def _called(batcher: Batcher, op: Op, operands: Operands, params: dict[str, Any]) -> Any:
    """Returns the result of a collective, of which the axes may be the examples, or those of maps around them.

    Raises:
        ArgumentError: groups of indices, or several axes of a collective that is not a reduction.
        ShapeError: a dimension does not have the size that the collective splits.
    """
    names, x = names_of(params["axis_name"]), operands[0]
    if batcher.axis_name not in names:
        return _of_each(batcher, op, x, params)
    if params.get("axis_index_groups") is not None:
        raise ArgumentError(f"{op.name}: axis_index_groups of {batcher.axis_name!r}, an axis of vmap; wanted none")
    rest = tuple([name for name in names if name != batcher.axis_name])
    rule = _RULES[op.name]
    if rest and not rule.reduces:
        raise ArgumentError(
            f"{op.name}: {names!r} names an axis of vmap and others; wanted one collective for each of them"
        )
    result = replaced(x, [_along(batcher, op, y, rule, params) for y in leaves(x)])
    if not rest:
        return result
    return bind(op, (result,), tuple((params | {"axis_name": rest}).values()))


def _of_each(batcher: Batcher, op: Op, x: Any, params: dict[str, Any]) -> Any:
    """Calls a collective over other axes for all examples: axes of arrays count the leading dimension, too."""
    flags = list(map(batcher.differs, leaves(x)))
    with batcher.outside():
        if all(flags):
            return batcher.boxed(_shifted(batcher, op, x, params, flags), flags)
        new_leaves = [_shifted(batcher, op, y, params, [f]) for y, f in zip(leaves(x), flags, strict=True)]
        return batcher.boxed(replaced(x, new_leaves), flags)


def _shifted(batcher: Batcher, op: Op, x: Any, params: dict[str, Any], flags: Sequence[bool]) -> Any:
    examples = replaced(x, list(map(batcher.examples, leaves(x))))
    if not any(flags):
        return bind(op, (examples,), tuple(params.values()))
    moved = {name: value + 1 if name in _AXES and value >= 0 else value for name, value in params.items()}
    return map_leaves(tensor_here, bind(op, (examples,), tuple(moved.values())))


_AXES = frozenset(("axis", "split_axis", "concat_axis", "scatter_dimension"))
"""The parameters of collectives that are dimensions of an array."""


class _Rule(NamedTuple):
    """How a collective over the examples is called.

    Attributes:
        function: it returns the result of an array, of which the examples are the first dimension, given the name of
            the collective and those of its parameters that are `_USED`.
        is_same: whether all examples have the same result. Otherwise they are its first dimension.
        reduces: whether it is a reduction, which may be over other axes, too.
        of_number: for a Python number that all examples have in common, the function of it and of the number of
            examples; by default it is an array.
    """

    function: Callable[..., Any]
    is_same: bool = False
    reduces: bool = False
    of_number: Callable[[Any, int], Any] | None = None


def _along(batcher: Batcher, op: Op, y: Any, rule: _Rule, params: dict[str, Any]) -> Any:
    """Returns the result of a leaf: the same for all examples, or one for each."""
    if not batcher.differs(y) and type(y) in SCALARS and rule.of_number:
        return rule.of_number(y, batcher.size)
    with batcher.outside():
        x = batcher.examples(y)
        if not batcher.differs(y):
            x = call("asarray", x)
            x = call("broadcast_to", x, (batcher.size, *x.shape))
        result = rule.function(x, op.name, **{name: value for name, value in params.items() if name in _USED})
        return result if rule.is_same else batcher.value(result)


_USED = _AXES | {"tiled", "perm", "source"}


def _reduction(name: str, of_number: Callable[[Any, int], Any] | None = None) -> _Rule:
    return _Rule(lambda x, _: call(name, x, axis=0), is_same=True, reduces=True, of_number=of_number)


def _gathered(x: Any, name: str, axis: int, tiled: bool) -> Any:
    axis = normalize_axis(axis, x.ndim - (1 if tiled else 0))
    array = call("moveaxis", x, 0, axis)
    if not tiled:
        return call("copy", array)
    return call("reshape", array, (*x.shape[1 : axis + 1], x.shape[0] * x.shape[axis + 1], *x.shape[axis + 2 :]))


def _scattered(x: Any, name: str, scatter_dimension: int, tiled: bool) -> Any:
    """Each example gets its part of the sum."""
    return _parts(call("sum", x, axis=0), name, x.shape[0], scatter_dimension, tiled, "scatter_dimension")


def _parts(x: Any, name: str, n: int, axis: int, tiled: bool, what: str) -> Any:
    """Returns the n parts of x along an axis, along a first dimension."""
    axis = normalize_axis(axis, x.ndim)
    size = x.shape[axis]
    if size % n if tiled else size != n:
        raise ShapeError(
            f"{name}: x has size {size} along {what} {axis}; wanted {'a multiple of ' if tiled else ''}the number of "
            f"examples, {n}"
        )
    if tiled:
        x = call("reshape", x, (*x.shape[:axis], n, size // n, *x.shape[axis + 1 :]))
    return call("copy", call("moveaxis", x, axis, 0))


def _exchanged(x: Any, name: str, split_axis: int, concat_axis: int, tiled: bool) -> Any:
    """Example i gets part i of each, joined along the other axis."""
    n, ndim = x.shape[0], x.ndim - 1
    split = normalize_axis(split_axis, ndim)
    parts = _parts(x, name, n, split + 1, tiled, "split_axis")  # (part, example, ...)
    if not tiled:
        return call("copy", call("moveaxis", parts, 1, normalize_axis(concat_axis, ndim) + 1))
    axis = normalize_axis(concat_axis, ndim) + 1
    array = call("moveaxis", parts, 1, axis)  # (part, ..., example, size, ...)
    return call("reshape", array, (*array.shape[:axis], n * array.shape[axis + 1], *array.shape[axis + 2 :]))


def _swapped(x: Any, name: str, axis: int) -> Any:
    return _exchanged(x, name, axis, axis, False)


def _permuted(x: Any, name: str, perm: Any) -> Any:
    """Examples to which nothing is sent get zeros."""
    n = x.shape[0]
    pairs = [(operator.index(a), operator.index(b)) for a, b in perm]
    source = {b: a for a, b in pairs}
    if len(source) != len(pairs) or len({a for a, _ in pairs}) != len(pairs):
        raise ArgumentError(f"{name}: perm is {perm!r}; every index may occur once as a source and as a destination")
    if any(not 0 <= k < n for pair in pairs for k in pair):
        raise ArgumentError(f"{name}: perm is {perm!r}; wanted indices from 0 to {n - 1}")
    rows = x[[source.get(k, 0) for k in range(n)]]
    lacking = [k for k in range(n) if k not in source]
    if lacking:
        rows[lacking] = 0
    return rows


def _shuffled(x: Any, name: str, perm: Any) -> Any:
    numbers = [operator.index(k) for k in perm]
    if sorted(numbers) != list(range(x.shape[0])):
        raise ArgumentError(f"{name}: perm is {perm!r}; wanted a permutation of the indices below {x.shape[0]}")
    return x[numbers]


def _broadcast(x: Any, name: str, source: int) -> Any:
    return call("copy", x[operator.index(source)])


_RULES: dict[str, _Rule] = {
    "psum": _reduction("sum", operator.mul),
    "pmean": _reduction("mean"),
    "pmax": _reduction("max"),
    "pmin": _reduction("min"),
    "pprod": _reduction("prod", operator.pow),
    "all_gather": _Rule(_gathered, is_same=True),
    "psum_scatter": _Rule(_scattered),
    "all_to_all": _Rule(_exchanged),
    "pswapaxes": _Rule(_swapped),
    "ppermute": _Rule(_permuted),
    "pshuffle": _Rule(_shuffled),
    "pbroadcast": _Rule(_broadcast, is_same=True),
}
"""The rules of the collectives, whose names are those of the package above."""


def _cast(batcher: Batcher, op: Op, operands: Operands, params: dict[str, Any]) -> Any:
    """Returns the result of `pcast`; examples need no declaration."""
    rest = tuple([name for name in names_of(params["axis_name"]) if name != batcher.axis_name])
    return _of_each(batcher, op, operands[0], params | {"axis_name": rest}) if rest else operands[0]


special(pcast=_cast, **dict.fromkeys(_RULES, _called))
