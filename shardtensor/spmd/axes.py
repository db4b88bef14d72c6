"""Named axes of mapped functions, and the position of a program along them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardtensor.core import innermost
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardingError, type_text
from shardtensor.hints import similar
from shardtensor.sequences import is_iterator
from shardtensor.spmd.scheduling import mapped_program

AxisName = str | tuple[str, ...]
"""The name of an axis, or several names that form one axis, the first being the major one."""


@dataclass(frozen=True, slots=True)
class AxisPosition:
    """The position of a program among the programs that differ from it only along given axes.

    Attributes:
        key: identifies the set of these programs: equal for exactly its members.
        size: the number of these programs.
        index: the position, row-major in the order in which the axes were named.
        description: the axis names, for error messages.
        axis: the axis names as the transfer log writes them.
        sizes: the sizes of the axes, in the order in which they were named.
        at: returns the position of the program with given coordinates along all axes of the map.
    """

    key: Any
    size: int
    index: int
    description: str
    axis: str
    sizes: tuple[int, ...]
    at: Callable[[tuple[int, ...]], AxisPosition]


def axis_index(axis_name: AxisName) -> int:
    """Returns the index of the calling program along a named axis; along several axes, the row-major index in the order
    given.

    Args:
        axis_name: the name of an axis of an enclosing map or `vmap`, or a tuple of names of maps. Along an axis of
            `vmap`, the index is a tensor that differs from one example to another.

    Raises:
        ShardingError: no enclosing map has such an axis.
        ArgumentTypeError: ``axis_name`` is neither a name nor a tuple of names.

    >>> f = st.shard_map(lambda x: x + 10 * st.axis_index("i"), mesh=st.make_mesh((2,), ("i",)),
    ...                  in_specs=st.P("i"), out_specs=st.P("i"))
    >>> f(np.arange(4)).tolist()
    [0, 1, 12, 13]
    """
    if (batcher := batcher_of(axis_name)) is not None:
        index: int = batcher.index()
        return index
    return axis_position("axis_index", axis_name).index


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of programs along a named axis; along several axes, the product of their sizes.

    Args:
        axis_name: the name of an axis of an enclosing map, or a tuple of names.

    Raises:
        ShardingError: no enclosing map has such an axis.
        ArgumentTypeError: ``axis_name`` is neither a name nor a tuple of names.

    >>> st.pmap(lambda x: x + st.axis_size("i"), np.zeros(4), axis_name="i").tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    if (batcher := batcher_of(axis_name)) is not None:
        size: int = batcher.size
        return size
    return axis_position("axis_size", axis_name).size


def batcher_of(axis_name: Any) -> Any:
    """Returns the interpreter of the `vmap` around this call that has given an axis this name; None if none has."""
    interpreter: Any = innermost()
    while interpreter is not None:
        if isinstance(axis_name, str) and getattr(interpreter, "axis_name", None) == axis_name:
            return interpreter
        outer = getattr(interpreter, "outer", None)
        interpreter = None if outer is None else outer.__self__
    return None


def axis_position(
    caller: str, axis_name: Any, groups: Sequence[Sequence[int]] | None = None, *, in_mesh_order: bool = False
) -> AxisPosition:
    """Returns the position of the calling program along axes, or within its group of indices along them.

    Args:
        caller: the name of the calling function, for error messages.
        axis_name: the axes as the user named them; the first one is the major one.
        groups: lists of indices along the axes; the position is then the one in the list that contains the program.
        in_mesh_order: whether positions are counted in mesh order instead of the order of the names: axes of outer maps
            come first, then the axes of one map in the order of its mesh.

    Raises:
        ShardingError: no enclosing map has such an axis, or an axis is named twice.
        ArgumentTypeError: ``axis_name`` is neither a name nor a tuple of names; ``groups`` are not lists of indices.
        ArgumentError: the groups do not contain every index exactly once.
    """
    program = mapped_program.CURRENT.get()
    if program is None:
        raise ShardingError(
            f"{caller}: there is no mapped function around this call; it runs inside of st.shard_map, or of st.pmap "
            "and st.smap with an axis_name"
        )
    name = axis_name
    if type(name) is not str:
        name = _checked_name(caller, name)
        if in_mesh_order and isinstance(name, tuple):
            order = {axis: d for d, axis in enumerate(program.run.axes)}
            name = tuple(sorted(name, key=lambda axis: order.get(axis, -1)))
    position = program.positions.get(name)
    if position is None:
        names, axes = name if isinstance(name, tuple) else (name,), program.run.axes
        if axes != names:  # The common case is a map of one axis, or of all that are named.
            _check_names(caller, names, axes)
        position = _position(axes, program.run.extents, names, program.coordinates)
        program.positions[name] = position
    return position if groups is None else _grouped(caller, position, groups)


def _checked_name(caller: str, name: Any) -> AxisName:
    name = tuple(name) if isinstance(name, list) else name
    if not isinstance(name, str) and not (isinstance(name, tuple) and all(isinstance(n, str) for n in name)):
        raise ArgumentTypeError(f"{caller}: axis_name is {name!r:.60}; wanted the name of an axis, or a tuple of names")
    return name


def _check_names(caller: str, names: tuple[str, ...], axes: tuple[str, ...]) -> None:
    for name in names:
        if name not in axes:
            there = ", ".join([repr(n) for n in axes if not n.startswith("#")])
            bound = f"the maps around this call bind {there}" if there else "no map around this call names its axis"
            raise ShardingError(f"{caller}: no axis is called {name!r} here; {bound}{similar(name, axes)}")
        if names.count(name) > 1:
            raise ShardingError(f"{caller}: axis {name!r} occurs twice in {names!r}")


@functools.lru_cache(4096)
def _position(
    axes: tuple[str, ...], extents: tuple[int, ...], names: tuple[str, ...], coordinates: tuple[int, ...]
) -> AxisPosition:
    """Returns the position along named axes of the program with these coordinates along all axes; maps of the same axes
    share them.
    """
    along = [axes.index(name) for name in names]
    sizes, index = tuple([extents[d] for d in along]), 0
    for d, size in zip(along, sizes, strict=True):
        index = index * size + coordinates[d]
    # The extents are part of the key, since inner maps of different calls may differ in size.
    order = tuple(sorted(along))
    rest = tuple([c for d, c in enumerate(coordinates) if d not in along])
    key = (axes, order, tuple([extents[d] for d in order]), rest)
    description = repr(names[0]) if len(names) == 1 else repr(names)
    at = functools.partial(_position, axes, extents, names)
    return AxisPosition(key, math.prod(sizes), index, description, ", ".join(names), sizes, at)


def check_shared(argument: Any, caller: str, what: str) -> None:
    """Checks an argument of a collective, a sequence of numbers or of sequences.

    Raises:
        ArgumentTypeError: it is an iterator, or has one: of an iterator that programs share, the first one would leave
            nothing to the others.
    """
    nested = argument if isinstance(argument, (list, tuple)) else ()
    for item in (argument, *nested):
        if is_iterator(item):
            raise ArgumentTypeError(
                f"{caller}: {what} has {type_text(item)}, which can be read only once; wanted lists, since every "
                "program reads them"
            )


def _grouped(caller: str, ungrouped: AxisPosition, groups: Sequence[Sequence[int]]) -> AxisPosition:
    check_shared(groups, caller, "axis_index_groups")
    try:
        rows = tuple([tuple([operator.index(i) for i in row]) for row in groups])
    except TypeError:
        raise ArgumentTypeError(
            f"{caller}: axis_index_groups is {groups!r}; wanted a list of lists of indices"
        ) from None
    if sorted(i for row in rows for i in row) != list(range(ungrouped.size)):
        raise ArgumentError(
            f"{caller}: axis_index_groups is {groups!r}; every index from 0 to {ungrouped.size - 1} must occur once"
        )

    def within(position: AxisPosition) -> AxisPosition:
        number = next(n for n, row in enumerate(rows) if position.index in row)
        mine, key = rows[number], (position.key, rows, number)
        index, sizes, at = mine.index(position.index), (len(mine),), lambda there: within(position.at(there))
        return replace(position, key=key, size=len(mine), index=index, sizes=sizes, at=at)

    return within(ungrouped)
