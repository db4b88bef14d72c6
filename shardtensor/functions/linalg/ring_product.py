"""Products of two operands of which one stays and the parts of the other one go around a ring of devices.

Source: the loop of shifted parts in Wang et al., "Overlap communication with dependent computation via decomposition in
large deep learning models" (ASPLOS 2023). Where both operands of a product need the same mesh axis for different
dimensions, one of them has to be read whole along a dimension. It moves in as many steps as it has parts: in each step
a device multiplies its part of the operand that stays by the part that it holds of the other one, and then sends that
part to the previous device of its ring. If the dimension is contracted, the products are added, otherwise each is a
part of the result. A device holds its shares of the operands, its part of the result, two parts of the operand that
moves, and a product that is no larger than the parts that are multiplied.

Every part is sent to all other devices of its ring: with P devices in a ring, and an operand of which the rings
together hold B bytes, all devices together send B (P - 1), as in a gather, however the sizes divide.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.communication.schedules import Beside, InTurn, Permute, Schedule, ids_of
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.functions.linalg.summa import Multiply, add_product, on_each
from shardtensor.sharding.mesh import groups_along
from shardtensor.tensor.value import Aval


class Ring(NamedTuple):
    """The dimensions of a product of two operands.

    Attributes:
        moving: the number of the operand that moves.
        along: the number in each operand of the dimension that splits it into the parts; None for an operand that lacks
            it.
        result: its number in the result; None if it is contracted.
        rows: a dimension of the first operand that the result has, and its number in the result; None if there is none.
    """

    moving: int
    along: tuple[int | None, int | None]
    result: int | None
    rows: tuple[int, int] | None

    @property
    def split(self) -> int:
        """The number of the dimension in the operand that moves."""
        d = self.along[self.moving]
        assert d is not None
        return d


def ring_schedule(value: Aval, d: int, operator: str) -> Schedule:
    """Returns the messages of `ring_product` for an operand whose dimension ``d`` is split: in each step, a permutation
    in each ring.
    """
    grid, axes = value.grid, value.sharding.spec.chains_of(value.ndim)[d]
    shapes = np.array([grid.shape(k) for k in range(len(grid.devices))], np.int64)
    sizes = shapes.prod(axis=1) * value.dtype.itemsize
    rings = [
        np.array(sorted(group, key=lambda k: int(grid.parts[k, d])))
        for group in groups_along(value.sharding.mesh, axes)
    ]
    ids, here = ids_of(grid.devices), np.arange(len(rings[0]))

    def shift(ring: Any, step: int) -> Permute:
        sources, held = (here + 1) % len(here), (here + step) % len(here)
        permute = Permute(ids[ring], sources, here, sizes[ring][held], operator, ", ".join(axes))
        permute.explicit = False  # The operand is transferred because it does not fit the other one.
        return permute

    return InTurn([Beside([shift(ring, step) for ring in rings]) for step in range(1, len(here))], operator)


def ring_product(
    operands: tuple[Shards, Shards], along: MeshCommunicator, dimensions: Ring, multiply: Multiply, result: Shards
) -> Shards:
    """Computes a product of two operands.

    Args:
        operands: the shards of the operands.
        along: the communicator of the operand that moves, along the mesh axes that split it into the parts.
        dimensions: the dimensions.
        multiply: computes the product of two parts.
        result: the shards of the result, of which no element is set yet.
    """
    moving = dimensions.moving
    bounds = list(itertools.pairwise(operands[moving].value.grid.offsets[dimensions.split].tolist()))
    held: Sequence[Any] = operands[moving].arrays
    for step in range(along.size):
        if step:
            held = along.permute(operands[moving].of(held), [(k + 1) % along.size for k in range(along.size)])
        parts = [slice(*bounds[(k + step) % along.size]) for k in along.index]
        left, right = [
            held if i == moving else _cut(x, x.arrays, d, parts)
            for i, (x, d) in enumerate(zip(operands, dimensions.along, strict=True))
        ]
        is_first = not step or dimensions.result is not None
        add = functools.partial(add_product, multiply, dimensions.rows, is_first)
        on_each(result, add, _cut(result, result.arrays, dimensions.result, parts), left, right)
    return result


def _cut(x: Shards, arrays: Sequence[Any], d: int | None, parts: Sequence[slice]) -> Sequence[Any]:
    """Returns a part of the array of each device along a dimension; the arrays, if that is None."""
    if d is None:
        return arrays
    views, before = [], (slice(None),) * d
    for device, array, part in zip(x.devices, arrays, parts, strict=True):
        with x.value.backend.on(device):
            views.append(x.value.backend.view(array, (*before, part, Ellipsis)))
    return views
