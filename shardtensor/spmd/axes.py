"""The named axes along which mapped functions run, and where a program stands along them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardingError
from shardtensor.spmd.program import MapRun, Program, current

AxisName = str | tuple[str, ...]
"""A name, or several: they stand for one axis, the first of them being the major one."""


@dataclass(frozen=True, slots=True)
class AxisPosition:
    """A program's place among those that differ from it along some axes alone.

    Attributes:
        key: what those programs have in common, and no others.
        size: how many they are.
        index: the place, row-major in the order in which the axes were named.
        said: the names, for people.
        axis: the same as the log writes them.
        key_at: the key of the program at any place along all axes of the map.
    """

    key: Any
    size: int
    index: int
    said: str
    axis: str
    key_at: Callable[[tuple[int, ...]], Any]


def axis_index(axis_name: AxisName) -> int:
    """Where the program around this call stands along an axis; along several, row-major in the order given.

    Args:
        axis_name: the name of an axis of a map around this call, or a tuple of them.

    Raises:
        ShardingError: no map around this call has such an axis.

    >>> f = st.shard_map(lambda x: x + 10 * st.axis_index("i"), mesh=st.make_mesh((2,), ("i",)),
    ...                  in_specs=st.P("i"), out_specs=st.P("i"))
    >>> f(np.arange(4)).tolist()
    [0, 1, 12, 13]
    """
    return axis_position("axis_index", axis_name).index


def axis_size(axis_name: AxisName) -> int:
    """How many programs there are along an axis; along several, the product.

    Args:
        axis_name: the name of an axis of a map around this call, or a tuple of them.

    Raises:
        ShardingError: no map around this call has such an axis.

    >>> st.pmap(lambda x: x + st.axis_size("i"), np.zeros(4), axis_name="i").tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    return axis_position("axis_size", axis_name).size


def axis_position(
    caller: str, axis_name: Any, groups: Sequence[Sequence[int]] | None = None, *, in_mesh_order: bool = False
) -> AxisPosition:
    """The place of the program around this call along axes, or in its group of indices along them.

    Args:
        caller: the function that asks, for errors.
        axis_name: the axes as they were named; the first one is the major one.
        groups: lists of indices.
        in_mesh_order: whether places are counted in mesh order, whatever the order of the names: maps around others
            come first, then the axes of one map in the order of its mesh.

    Raises:
        ShardingError: no such axis.
        ArgumentError: groups that do not have every index once.
    """
    program = current()
    if program is None:
        raise ShardingError(
            f"{caller}: there is no mapped function around this call; it runs inside of st.shard_map, or of st.pmap "
            "and st.smap with an axis_name"
        )
    name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    if not isinstance(name, str) and not (isinstance(name, tuple) and all(isinstance(n, str) for n in name)):
        raise ArgumentTypeError(f"{caller}: axis_name is {name!r:.60}; wanted the name of an axis, or a tuple of names")
    if in_mesh_order and isinstance(name, tuple):
        order = {axis: d for d, axis in enumerate(program.group.axes)}
        name = tuple(sorted(name, key=lambda axis: order.get(axis, -1)))
    found = program.positions.get(name) or _find(caller, program, name)
    return found if groups is None else _grouped(caller, program.group.known[name], found, groups)


def _find(caller: str, program: Program, axis_name: Any) -> AxisPosition:
    group = program.group
    axes = group.known.get(axis_name) or _look_up(caller, group, axis_name)
    place = program.place
    found = AxisPosition(axes.key_at(place), axes.size, axes.index_at(place), axes.said, axes.axis, axes.key_at)
    program.positions[axis_name] = found
    return found


class _Axes:
    """Axes of a map and of those around it, as they were named: what all its programs know of them.

    Attributes:
        at: where each stands among the map's axes.
        others: where the rest stand.
        size: the product of their sizes.
        said: the names, for people.
        axis: the same as the log writes them.
    """

    __slots__ = ("_common", "_extents", "at", "axis", "others", "said", "size")

    def __init__(self, group: MapRun, names: tuple[str, ...]) -> None:
        self.at = tuple([group.axes.index(name) for name in names])
        self.others = tuple([d for d in range(len(group.axes)) if d not in self.at])
        self.size = math.prod(group.extents[d] for d in self.at)
        self.said = repr(names[0]) if len(names) == 1 else repr(names)
        self.axis = ", ".join(names)
        self._extents = group.extents
        # Programs that meet have these in common. Maps inside of others may differ in size.
        order = tuple(sorted(self.at))
        self._common = (group.axes, order, tuple([group.extents[d] for d in order]))

    def index_at(self, place: tuple[int, ...]) -> int:
        """The index along these axes, row-major in the order in which they were named."""
        index = 0
        for d in self.at:
            index = index * self._extents[d] + place[d]
        return index

    def key_at(self, place: tuple[int, ...]) -> Any:
        """What the program at a place has in common with those that differ from it along these axes only."""
        return (*self._common, tuple([place[d] for d in self.others]))


def _look_up(caller: str, group: MapRun, axis_name: Any) -> _Axes:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    for name in names:
        if name not in group.axes:
            there = ", ".join([repr(n) for n in group.axes if not n.startswith("#")])
            raise ShardingError(
                f"{caller}: no axis is called {name!r} here; "
                + (f"the maps around this call bind {there}" if there else "no map around this call names its axis")
            )
        if names.count(name) > 1:
            raise ShardingError(f"{caller}: axis {name!r} occurs twice in {axis_name!r}")
    found = group.known[axis_name] = _Axes(group, names)
    return found


def _grouped(caller: str, axes: _Axes, found: AxisPosition, groups: Sequence[Sequence[int]]) -> AxisPosition:
    try:
        lists = [[operator.index(i) for i in group] for group in groups]
    except TypeError:
        raise ArgumentTypeError(
            f"{caller}: axis_index_groups is {groups!r}; wanted a list of lists of indices"
        ) from None
    if sorted(i for group in lists for i in group) != list(range(found.size)):
        raise ArgumentError(
            f"{caller}: axis_index_groups is {groups!r}; every index from 0 to {found.size - 1} must occur once"
        )
    rows = tuple(map(tuple, lists))

    def number_of(index: int) -> int:
        return next(n for n, row in enumerate(rows) if index in row)

    def key_at(place: tuple[int, ...]) -> Any:
        return axes.key_at(place), rows, number_of(axes.index_at(place))

    number = number_of(found.index)
    mine = rows[number]
    return AxisPosition((found.key, rows, number), len(mine), mine.index(found.index), found.said, found.axis, key_at)
