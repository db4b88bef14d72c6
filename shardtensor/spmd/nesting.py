"""Nested maps: what each level cuts, how many devices the levels ask for together, and which devices each call gets."""

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
        given: the arguments, those by keyword after the others.
        positional: how many are given by position.
        static: the numbers of those that the function gets as they are.
        lists: the lists of shards among the others.

    Raises:
        ArgumentTypeError, ArgumentError: ``static_argnums`` are no numbers of arguments.
    """

    def __init__(self, given: Sequence[Any], positional: int, static_argnums: int | Sequence[int]) -> None:
        self.given = given
        self.positional = positional
        self.static = _static(static_argnums, positional)
        self.lists = [x for i, x in enumerate(given) if i not in self.static and type(x) is list]

    def item(self, number: int, static_argnums: int | Sequence[int]) -> Call:
        """What a map directly inside of a map over lists gets in one of its calls."""
        given = [x[number] if i not in self.static and type(x) is list else x for i, x in enumerate(self.given)]
        return Call(given, self.positional, static_argnums)

    def sliced(self, cuts: Sequence[Sequence[Cut]], static_argnums: int | Sequence[int]) -> Call:
        """What a map directly inside of a map over arrays gets in its calls: arrays of the right shapes."""
        given = [_sliced(x, found) if found else x for x, found in zip(self.given, cuts, strict=True)]
        return Call(given, self.positional, static_argnums)


def _sliced(argument: Any, cuts: Sequence[Cut]) -> Any:
    parts = [leaf if cut.axes[0] is None else cut.slice() for leaf, cut in zip(leaves(argument), cuts, strict=True)]
    return replaced(argument, parts)


def _static(given: int | Sequence[int], count: int) -> frozenset[int]:
    try:
        numbers = [given] if isinstance(given, int) else [n.__index__() for n in given]
    except (TypeError, AttributeError):
        raise ArgumentTypeError(
            f"pmap: static_argnums is {given!r:.60}; wanted an integer, or a sequence of them"
        ) from None
    for n in numbers:
        if not -count <= n < count:
            raise ArgumentError(f"pmap: static_argnums names argument {n}, and there are {count}")
    return frozenset(n % count for n in numbers)


@dataclass(frozen=True, slots=True)
class Cut:
    """How one leaf of an argument is cut.

    Attributes:
        array: the leaf; as an array, where it is cut.
        axes: for each level of maps, the outermost first, the axis of the array that it cuts, or None.
        path: the leaf's place among the arguments, for errors.
    """

    array: Any
    axes: Axes
    path: str

    def slice(self) -> Any:
        """An array of the shape of the outermost level's slices; its elements say nothing."""
        shape = [n for d, n in enumerate(self.array.shape) if d != self.axes[0]]
        return np.broadcast_to(np.zeros((), self.array.dtype), shape)

    def then(self, inner: Axes) -> Cut:
        """The same with the axes of the slices that the levels inside cut."""
        outer = self.axes[0]
        counted = [axis if axis is None or outer is None or axis < outer else axis + 1 for axis in inner]
        return replace(self, axes=(outer, *counted))

    def home(self) -> tuple[Device, ...]:
        """The devices of a tensor, in the order in which the levels cut what these hold, where they hold that."""
        sharding = self.array.sharding
        mesh, chains = sharding.mesh, sharding.spec.chains_of(self.array.ndim)
        order = [mesh.axis_names.index(name) for axis in self.axes if axis is not None for name in chains[axis]]
        if sorted(order) != list(range(len(mesh.axis_names))):
            return tuple(mesh.flat)
        return tuple(mesh.devices.transpose(order).ravel().tolist())

    def spec(self, names: Sequence[str]) -> PartitionSpec:
        """The layout over a grid with these axes: each splits what its level cuts; those that no level maps split the
        first dimension that no level cuts.
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
    """A map over arrays, and those that it maps directly.

    Attributes:
        sizes: how many calls each level makes, the outermost first.
        names: the levels' axis names; None for one without.
        cuts: what they cut: for each argument its leaves; nothing for an argument that is static.
    """

    sizes: tuple[int, ...]
    names: tuple[str | None, ...]
    cuts: list[list[Cut]]

    def around(self, size: int, name: str | None, cuts: Sequence[Sequence[Cut]]) -> Levels:
        """The same below another level, which makes ``size`` calls."""
        both = [
            [cut.then(inner.axes) for cut, inner in zip(mine, theirs, strict=True)] if mine and theirs else list(mine)
            for mine, theirs in zip(cuts, self.cuts, strict=True)
        ]
        return Levels((size, *self.sizes), (name, *self.names), both)


@functools.lru_cache(256)
def named(grid: Mesh, name: str | None) -> Mesh:
    """The grid with the map's axis name for its first axis, so that results show it."""
    if name is None or name in grid.axis_names:
        return grid
    return Mesh(grid.devices, (name, *grid.axis_names[1:]))


@functools.lru_cache(256)
def grid_of(devices: tuple[Device, ...], sizes: tuple[int, ...], names: tuple[str | None, ...]) -> Mesh:
    """The devices as a grid. An axis without a name, or with one that an axis before it has, gets a name of its own."""
    if len(sizes) == 1:
        return named(mesh_of(devices), names[0])
    fresh = (name for name in map("d{}".format, itertools.count()) if name not in names)
    distinct = [name if name and name not in names[:k] else next(fresh) for k, name in enumerate(names)]
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return Mesh(grid.reshape(sizes), distinct)


def groups(row: tuple[Device, ...], demands: Sequence[int]) -> list[Mesh]:
    """Devices for calls that ask for so many each, dealt out in turn. Where there are too few, the calls of the
    innermost maps are dealt out in blocks by the split rule, so that one device may serve two calls.

    >>> from shardtensor.spmd.nesting import groups
    >>> devices = tuple(st.devices())
    >>> groups(devices, [1, 3])
    [Mesh(d=1; numpy:0), Mesh(d=3; numpy:1..3)]
    >>> groups(devices[:2], [1, 3])
    [Mesh(d=1; numpy:0), Mesh(d=2; numpy:0, numpy:1)]
    """
    total = max(sum(demands), 1)
    ends = offsets(total, (min(total, len(row)),))[1:]
    made, at = [], 0
    for demand in demands:
        inside = [min(at, total - 1), min(at + max(demand, 1), total) - 1]
        first, last = np.searchsorted(ends, inside, side="right").tolist()
        made.append(mesh_of(row[first : last + 1]))
        at += demand
    return made
