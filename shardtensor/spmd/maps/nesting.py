"""Nested maps: the axes that each level maps, the number of devices that all levels together require, and the devices
of each call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.sharding.layout import offsets
from shardtensor.sharding.mesh import Mesh, mesh_of
from shardtensor.sharding.spec import Chain, P, PartitionSpec
from shardtensor.tensor.pytree import leaves, replaced

Axes = tuple[int | None, ...]


class Call:
    """The arguments of one call of a mapped function.

    Attributes:
        arguments: the arguments, keyword arguments after the positional ones.
        positional: the number of positional arguments.
        static: the numbers of the arguments that the function receives unchanged.
        lists: the lists of shards among the other arguments.

    Raises:
        ArgumentTypeError: ``static_argnums`` is neither an integer nor a sequence of integers.
        ArgumentError: ``static_argnums`` contains a number that no positional argument has.
    """

    def __init__(self, arguments: Sequence[Any], positional: int, static_argnums: int | Sequence[int]) -> None:
        self.arguments = arguments
        self.positional = positional
        static = self.static = _static(static_argnums, positional)
        self.lists = [x for i, x in enumerate(arguments) if type(x) is list and i not in static]

    def item(self, number: int, static_argnums: int | Sequence[int]) -> Call:
        """Returns the arguments that call ``number`` of a map over lists passes to a map nested directly in it."""
        arguments = [x[number] if i not in self.static and type(x) is list else x for i, x in enumerate(self.arguments)]
        return Call(arguments, self.positional, static_argnums)

    def sliced(self, cuts: Sequence[Sequence[Cut]], static_argnums: int | Sequence[int]) -> Call:
        """Returns the arguments that the calls of a map over arrays pass to a map nested directly in it: arrays of the
        right shapes.
        """
        arguments = [_sliced(x, x_cuts) if x_cuts else x for x, x_cuts in zip(self.arguments, cuts, strict=True)]
        return Call(arguments, self.positional, static_argnums)


def _sliced(argument: Any, cuts: Sequence[Cut]) -> Any:
    parts = [leaf if cut.axes[0] is None else cut.slice() for leaf, cut in zip(leaves(argument), cuts, strict=True)]
    return replaced(argument, parts)


def _static(argnums: int | Sequence[int], count: int) -> frozenset[int]:
    if type(argnums) is tuple and not argnums:  # The default.
        return frozenset()
    try:
        numbers = [argnums] if isinstance(argnums, int) else [n.__index__() for n in argnums]
    except (TypeError, AttributeError):
        raise ArgumentTypeError(
            f"pmap: static_argnums is {argnums!r:.60}; wanted an integer, or a sequence of them"
        ) from None
    for n in numbers:
        if not -count <= n < count:
            raise ArgumentError(f"pmap: static_argnums names argument {n}, and there are {count}")
    return frozenset(n % count for n in numbers)


@dataclass(frozen=True, slots=True)
class Cut:
    """The axes along which the levels of nested maps slice one leaf of an argument.

    Attributes:
        array: the leaf; converted to an array where it is mapped.
        axes: for each level, the outermost first, the mapped axis of the array, or None.
        path: the path of the leaf within the arguments, for error messages.
    """

    array: Any
    axes: Axes
    path: str

    def slice(self) -> Any:
        """Returns an array of zeros, of the shape and dtype of the outermost level's slices."""
        shape = [n for d, n in enumerate(self.array.shape) if d != self.axes[0]]
        return np.broadcast_to(np.zeros((), self.array.dtype), shape)

    def then(self, inner: Axes) -> Cut:
        """Returns this cut extended by the axes that inner levels map, which they count in the slices of this one."""
        outer = self.axes[0]
        counted = [axis if axis is None or outer is None or axis < outer else axis + 1 for axis in inner]
        return replace(self, axes=(outer, *counted))

    def devices(self) -> tuple[Device, ...]:
        """Returns the devices of the tensor, in the order in which the levels slice the shards, if the mapped axes use
        every mesh axis of the tensor once; otherwise in mesh order.
        """
        sharding = self.array.sharding
        mesh, chains = sharding.mesh, sharding.spec.chains_of(self.array.ndim)
        order = [mesh.axis_names.index(name) for axis in self.axes if axis is not None for name in chains[axis]]
        if sorted(order) != list(range(len(mesh.axis_names))):
            return tuple(mesh.flat)
        return tuple(mesh.devices.transpose(order).ravel().tolist())

    def spec(self, names: Sequence[str]) -> PartitionSpec:
        """Returns the partition spec over a grid with these axis names: each level's grid axis splits the array axis
        that the level maps; the remaining grid axes split the first unmapped dimension.
        """
        chains: list[Chain] = [()] * self.array.ndim
        for name, axis in zip(names, self.axes, strict=False):
            if axis is not None:
                chains[axis] = (name,)
        rest = tuple(names[len(self.axes) :])
        if rest and () in chains:
            chains[chains.index(())] = rest
        return P(*chains)


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of a map over arrays: the map and those that are nested directly in it.

    Attributes:
        sizes: the number of calls of each level, the outermost first.
        names: the axis name of each level; None for a level without one.
        cuts: for each argument, the cuts of its leaves; empty for a static argument.
    """

    sizes: tuple[int, ...]
    names: tuple[str | None, ...]
    cuts: list[list[Cut]]

    def around(self, size: int, name: str | None, cuts: Sequence[Sequence[Cut]]) -> Levels:
        """Returns these levels nested in one more level, which makes ``size`` calls."""
        both = [
            [cut.then(inner.axes) for cut, inner in zip(mine, theirs, strict=True)] if mine and theirs else list(mine)
            for mine, theirs in zip(cuts, self.cuts, strict=True)
        ]
        return Levels((size, *self.sizes), (name, *self.names), both)


@functools.lru_cache(256)
def named(grid: Mesh, name: str | None) -> Mesh:
    """Returns the grid with its first axis renamed to the map's axis name, so that the shardings of results show it."""
    if name is None or name in grid.axis_names:
        return grid
    return Mesh(grid.devices, (name, *grid.axis_names[1:]))


@functools.lru_cache(256)
def grid_of(devices: tuple[Device, ...], sizes: tuple[int, ...], names: tuple[str | None, ...]) -> Mesh:
    """Returns the devices as a grid of these sizes. An axis without a name, or with the name of an earlier axis, gets a
    fresh name.
    """
    if len(sizes) == 1:
        return named(mesh_of(devices), names[0])
    fresh = (name for name in map("d{}".format, itertools.count()) if name not in names)
    distinct = [name if name and name not in names[:k] else next(fresh) for k, name in enumerate(names)]
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return Mesh(grid.reshape(sizes), distinct)


def assigned(row: tuple[Device, ...], demands: Sequence[int]) -> list[Mesh]:
    """Returns the devices of each call: consecutive ones, as many as the call demands. If there are too few devices,
    the calls of the innermost maps are distributed over them in blocks by the split rule, so that one device may serve
    two calls.

    >>> from shardtensor.spmd.maps.nesting import assigned
    >>> devices = tuple(st.devices())
    >>> assigned(devices, [1, 3])
    [Mesh(d=1; numpy:0), Mesh(d=3; numpy:1..3)]
    >>> assigned(devices[:2], [1, 3])
    [Mesh(d=1; numpy:0), Mesh(d=2; numpy:0, numpy:1)]
    """
    total = max(sum(demands), 1)
    ends = offsets(total, (min(total, len(row)),))[1:]
    meshes, at = [], 0
    for demand in demands:
        inside = [min(at, total - 1), min(at + max(demand, 1), total) - 1]
        first, last = np.searchsorted(ends, inside, side="right").tolist()
        meshes.append(mesh_of(row[first : last + 1]))
        at += demand
    return meshes
