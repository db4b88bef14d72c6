"""SUMMA: products of two operands that are both split along the contracted dimension, panel by panel.

Source: van de Geijn & Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997). The result stays where
its rows and columns are: for a matrix A split over the mesh axes (X, Y) and B split over (X, Y), the device at (x, y)
computes the rows x and the columns y of A @ B. The contracted dimension is divided into panels, at the boundaries of
both operands. In turn, for each panel, the devices that hold it of A send it along Y, those that hold it of B send it
along X, and every device adds the product of the two panels to its part of the result. A device holds its shares of the
operands, its part of the result, one panel of each operand, and a product that is no larger than the panels.

Every element of A is sent to the Y - 1 other devices of its row, and every element of B to the X - 1 other ones of its
column, so that all devices together send bytes(A) (Y - 1) + bytes(B) (X - 1), however the sizes divide.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.registry import backend_of, is_remote
from shardtensor.communication.schedules import Beside, Broadcast, InTurn, Schedule, ids_of
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.sharding.layout import Grid
from shardtensor.sharding.mesh import groups_along
from shardtensor.tensor.value import Aval

Multiply = Callable[[Any, int, Any, Any], Any]
"""``multiply(xp, k, left, right)`` returns the product of two panels on the device at position k."""


class Panel(NamedTuple):
    """A part of the contracted dimension that one part of each operand contains.

    Attributes:
        begin, end: the panel.
        owners: the number of the part of each operand that contains it.
    """

    begin: int
    end: int
    owners: tuple[int, int]


class Contraction(NamedTuple):
    """The dimensions of a product of two operands.

    Attributes:
        inner: the contracted dimension of each operand that is split.
        rows: a dimension of the first operand that the result has, and its number in the result; None if there is none.
    """

    inner: tuple[int, int]
    rows: tuple[int, int] | None


def panels(values: tuple[Aval, Aval], inner: tuple[int, int]) -> list[Panel]:
    """Returns the panels of the contracted dimension, whose number is ``inner[i]`` in operand i, without empty ones.

    >>> from shardtensor.functions.linalg.summa import panels
    >>> mesh = st.make_mesh((2, 3), ("x", "y"))
    >>> a = st.zeros((4, 7), device=st.NamedSharding(mesh, st.P("x", "y")))
    >>> [(p.begin, p.end) for p in panels((a._aval, a.T._aval), (1, 0))]
    [(0, 3), (3, 5), (5, 7)]
    >>> b = st.zeros((7, 4), device=st.NamedSharding(mesh, st.P("x", "y")))
    >>> [(p.begin, p.end) for p in panels((a._aval, b._aval), (1, 0))]
    [(0, 3), (3, 4), (4, 5), (5, 7)]
    """
    bounds = [value.grid.offsets[d] for value, d in zip(values, inner, strict=True)]
    ends = np.unique(np.concatenate(bounds)).tolist()
    return [
        Panel(begin, end, tuple([int(np.searchsorted(o, begin, "right")) - 1 for o in bounds]))  # type: ignore[arg-type]
        for begin, end in itertools.pairwise(ends)
    ]


def schedule(values: tuple[Aval, Aval], inner: tuple[int, int], operator: str) -> Schedule:
    """Returns the messages of `summa`: for each panel, a broadcast in each row of devices, and one in each column."""
    steps: list[Schedule] = []
    for panel in panels(values, inner):
        for value, d, owner in zip(values, inner, panel.owners, strict=True):
            axes = value.sharding.spec.chains_of(value.ndim)[d]
            groups = groups_along(value.sharding.mesh, axes) if axes else []
            broadcasts = [_broadcast(value, group, d, owner, panel, operator, ", ".join(axes)) for group in groups]
            steps += [Beside(broadcasts)] if broadcasts else []
    return InTurn(steps, operator)


def _broadcast(
    value: Aval, group: Sequence[int], d: int, owner: int, panel: Panel, operator: str, axis: str
) -> Broadcast:
    grid: Grid = value.grid
    order = sorted(group, key=lambda k: int(grid.parts[k, d]))
    shape = grid.shape(order[owner])
    size = int(np.prod([panel.end - panel.begin if i == d else n for i, n in enumerate(shape)], dtype=np.int64))
    broadcast = Broadcast(ids_of([grid.devices[k] for k in order]), owner, size * value.dtype.itemsize, operator, axis)
    broadcast.explicit = False  # The operands are transferred because they do not fit each other.
    return broadcast


def summa(
    operands: tuple[Shards, Shards],
    along: tuple[MeshCommunicator, MeshCommunicator],
    dimensions: Contraction,
    multiply: Multiply,
    result: Shards,
) -> Shards:
    """Computes a product of two operands.

    Args:
        operands: the shards of the operands, of which those dimensions that the result has are split as in the result.
        along: the communicator of each operand along the mesh axes that split its contracted dimension.
        dimensions: the dimensions.
        multiply: computes the product of two panels.
        result: the shards of the result, of which no element is set yet.
    """
    a, b = operands
    parts = panels((a.value, b.value), dimensions.inner)
    for panel in parts:
        left, right = [
            communicator.broadcast(_cut(x, d, owner, panel), owner)
            for x, communicator, d, owner in zip(operands, along, dimensions.inner, panel.owners, strict=True)
        ]
        add = functools.partial(add_product, multiply, dimensions.rows, panel is parts[0])
        on_each(result, add, result.arrays, left, right)
    return result


def _cut(x: Shards, d: int, owner: int, panel: Panel) -> list[Any]:
    """Returns the panel of the shards that contain it, and None for the other devices."""
    value = x.value
    begin = int(value.grid.offsets[d][owner])
    index = (*[slice(None)] * d, slice(panel.begin - begin, panel.end - begin))
    views: list[Any] = []
    for device, array, part in zip(x.devices, x.arrays, value.grid.parts[:, d].tolist(), strict=True):
        with value.backend.on(device):
            views.append(value.backend.view(array, (*index, Ellipsis)) if part == owner else None)
    return views


def on_each(result: Shards, add: Callable[..., None], *columns: Sequence[Any]) -> None:
    """Calls ``add(xp, k, *items)`` on each device k that holds a part of a result, with an item of each column."""
    parts, shards = result.value.grid.parts.tolist(), result.value.cells.shards
    # Replicas in one memory are one array, to which a product is added once.
    first = {(shards[k][0], *parts[k]): k for k in reversed(range(len(parts)))}
    for k in sorted(first.values()):
        device = result.devices[k]
        if is_remote(device):
            continue
        backend = backend_of(device)
        with backend.on(device):
            add(backend.xp, k, *[column[k] for column in columns])


def add_product(
    multiply: Multiply, rows: tuple[int, int] | None, first: bool, xp: Any, k: int, out: Any, left: Any, right: Any
) -> None:
    """Adds the product of two panels to a part of the result, or sets it, some rows at a time: no more than that their
    product is as large as the panels.
    """
    size = [int(np.prod(x.shape, dtype=np.int64)) for x in (out, left, right)]
    count = out.shape[rows[1]] if rows else 1
    step = max(count * (size[1] + size[2]) // max(size[0], 1), 1) if rows else 1
    for begin in range(0, count, step):
        part, mine = left, out
        if rows and step < count:
            part = left[(*[slice(None)] * rows[0], slice(begin, begin + step))]
            mine = out[(*[slice(None)] * rows[1], slice(begin, begin + step))]
        product = multiply(xp, k, part, right)
        mine[...] = product if first else xp.add(mine, product)
