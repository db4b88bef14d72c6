"""The layouts of products: the planner takes the one that transfers the fewest bytes.

Where both operands of a product need the same mesh axis for different dimensions, one of them moves and partial results
are added (either operand can be the one that stays), or both move and the result stays (`summa`). An operand that is
read whole along a dimension moves part by part (`ring_product`), unless it is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.communication.schedules import Schedule
from shardtensor.core import Op, Operands
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards, shards_of
from shardtensor.functions.linalg.ring_product import Ring, ring_product, ring_schedule
from shardtensor.functions.linalg.summa import Contraction, Multiply, schedule, summa
from shardtensor.interpreters.execution.strategies import Run, Strategies
from shardtensor.sharding.layout import Grid, NamedSharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.rules import Chains, Propagated, Rule, propagate
from shardtensor.sharding.spec import Chain, P
from shardtensor.tensor.tensor import ShardedTensor, shard_arrays
from shardtensor.tensor.value import Aval, whole_of


class Panelled(NamedTuple):
    """A product whose operands move panel by panel.

    Attributes:
        operands: the avals of the operands, which stay in their layouts.
        dimensions: the dimensions of the operands and of the result.
    """

    operands: tuple[Aval, Aval]
    dimensions: Contraction

    def schedule(self, operator: str) -> Schedule:
        """Returns the messages."""
        return schedule(self.operands, self.dimensions.inner, operator)

    def run(self, strategies: Strategies) -> Run:
        """Returns the plan on separate memories."""
        first, second = [
            MeshCommunicator.of_arrays(strategies.name, x, d)
            for x, d in zip(self.operands, self.dimensions.inner, strict=True)
        ]

        def product(shards: tuple[Shards, Shards], multiply: Multiply, result: Shards) -> Shards:
            return summa(shards, (first, second), self.dimensions, multiply, result)

        return _run(strategies, self.operands, product)


class Rotated(NamedTuple):
    """A product of which the parts of one operand go around rings of devices.

    Attributes:
        operands: the avals of the operands, which stay in their layouts.
        dimensions: the operand that moves, and the dimensions of the operands and of the result.
    """

    operands: tuple[Aval, Aval]
    dimensions: Ring

    def schedule(self, operator: str) -> Schedule:
        """Returns the messages."""
        return ring_schedule(self.operands[self.dimensions.moving], self.dimensions.split, operator)

    def run(self, strategies: Strategies) -> Run:
        """Returns the plan on separate memories."""
        moving = self.operands[self.dimensions.moving]
        along = MeshCommunicator.of_arrays(strategies.name, moving, self.dimensions.split)

        def product(shards: tuple[Shards, Shards], multiply: Multiply, result: Shards) -> Shards:
            return ring_product(shards, along, self.dimensions, multiply, result)

        return _run(strategies, self.operands, product)


InParts = Panelled | Rotated
"""How the operands of a product move part by part."""

GATHERED = 1 << 20
"""Bytes of an operand up to which it moves at once: the messages of a ring take longer."""


def cheapest(
    op: Op, kinds: Sequence[Any], rule: Rule, mesh: Mesh, default: Propagated
) -> tuple[Propagated, InParts | None]:
    """Returns the layout of a product that transfers the fewest bytes, and how its operands move part by part, if they
    do. ``default`` is the layout in which the larger operand stays; it is returned for everything but products of two
    tensors of which one has to move, and that several mesh axes split.
    """
    if "product" not in op.tags or not all(isinstance(k, Aval) and k.size for k in kinds):
        return default, None
    a, b = kinds
    if not a.sharding.mesh == b.sharding.mesh == mesh or a.committed != b.committed or a.offloaded or b.offloaded:
        return default, None
    layouts = [k.sharding.spec.chains_of(k.ndim) for k in kinds]
    if not _changed(default, layouts, mesh):
        return default, None
    used = {axis for chains in layouts for chain in chains for axis in _splitting(chain, mesh)}
    choices: list[tuple[Propagated, InParts | None]] = [(default, None)]
    if len(used) > 1:
        weights = (0, 1) if a.nbytes >= b.nbytes else (1, 0)
        other = propagate(rule, [k.shape for k in kinds], layouts, weights, mesh.shape, combines=True)
        choices.append((other, None))
        if panelled := _panelled(rule, (a, b), layouts, default):
            choices.append(panelled)
    laid, how = min(choices, key=lambda choice: _bytes(choice[0], kinds, mesh))
    return laid, how or _rotated(rule, (a, b), layouts, laid, mesh)


def _splitting(chain: Chain, mesh: Mesh) -> list[str]:
    """Returns the axes of several devices."""
    return [axis for axis in chain if mesh.shape[axis] > 1]


def _changed(laid: Propagated, layouts: Sequence[Chains], mesh: Mesh) -> list[tuple[int, int]]:
    """Returns the numbers of the operands and the dimensions that other axes split in a layout than now."""
    return [
        (i, d)
        for i, (now, then) in enumerate(zip(layouts, laid.operands, strict=True))
        for d, (chain, target) in enumerate(zip(now, then, strict=True))
        if _splitting(chain, mesh) != _splitting(target, mesh)
    ]


def _panelled(
    rule: Rule, kinds: tuple[Aval, Aval], layouts: Sequence[Chains], default: Propagated
) -> tuple[Propagated, Panelled] | None:
    """Returns the layout of a product whose result is split as the rows of one operand and the columns of the other;
    None if both need the same mesh axis, or several contracted dimensions are split.
    """
    chains: dict[str, Any] = {}
    split: set[str] = set()
    for names, shape, layout in zip(rule.operands, (k.shape for k in kinds), layouts, strict=True):
        for name, size, chain in zip(names, shape, layout, strict=True):
            if name not in rule.result:
                split |= {name} if chain else set()
            elif name in chains and chains[name] != (size, chain):
                return None
            else:
                chains[name] = (size, chain)
    axes = [axis for _, chain in chains.values() for axis in chain]
    if len(split) != 1 or len(axes) != len(set(axes)):
        return None
    (inner,) = split
    operands = [tuple([chains[n][1] if n in chains else () for n in names]) for names in rule.operands]
    result = tuple([chains[n][1] for n in rule.result])
    laid = Propagated(tuple(operands), result, default.shape, (), result)
    numbers = [names.index(inner) for names in rule.operands]
    return laid, Panelled(kinds, Contraction((numbers[0], numbers[1]), _rows(rule)))


def _rows(rule: Rule) -> tuple[int, int] | None:
    """Returns a dimension of the first operand that the result has and the second one lacks, and its number in the
    result; None if there is none.
    """
    own = [name for name in rule.operands[0] if name in rule.result and name not in rule.operands[1]]
    return (rule.operands[0].index(own[0]), rule.result.index(own[0])) if own else None


def _rotated(
    rule: Rule, kinds: tuple[Aval, Aval], layouts: Sequence[Chains], laid: Propagated, mesh: Mesh
) -> Rotated | None:
    """Returns how one operand moves part by part to a layout in which nothing splits one of its dimensions.

    None if anything else changes, if partial results are added, or if the operand is small: `GATHERED`, or no more than
    twice what a device has of operands and result, so that it holds three times its share at most.
    """
    changed = _changed(laid, layouts, mesh)
    if len(changed) != 1 or laid.partial_axes or laid.kept != laid.result:
        return None
    ((moving, d),) = changed
    value, chains, name = kinds[moving], laid.operands[moving], rule.operands[moving][d]
    size = value.shape[d]
    if _splitting(chains[d], mesh) or size == 1 or any(names.count(name) > 1 for names in rule.operands):
        return None
    along = [
        names.index(name) if name in names and kind.shape[names.index(name)] == size else None
        for names, kind in zip(rule.operands, kinds, strict=True)
    ]
    shares = _share(NamedSharding(mesh, P(*laid.result)).grid(laid.shape)) * _itemsize(kinds)
    shares += sum([_share(k.grid) * k.dtype.itemsize for k in kinds])
    whole = _share(NamedSharding(mesh, P(*chains)).grid(value.shape)) * value.dtype.itemsize
    if whole <= max(GATHERED, 2 * shares):
        return None
    result = rule.result.index(name) if name in rule.result else None
    return Rotated(kinds, Ring(moving, (along[0], along[1]), result, _rows(rule)))


def _bytes(laid: Propagated, kinds: Sequence[Aval], mesh: Mesh) -> int:
    """Returns the bytes that operands and partial results need."""
    moved = sum(
        _missing(k.grid, NamedSharding(mesh, P(*chains)).grid(k.shape)) * k.dtype.itemsize
        for k, chains in zip(kinds, laid.operands, strict=True)
    )
    count = math.prod([mesh.shape[axis] for axis in laid.partial_axes])
    if count == 1:
        return moved
    grid = NamedSharding(mesh, P(*laid.result)).grid(laid.shape)
    held = _total(_ends(grid))
    # Each of the groups of ``count`` devices sends 2 (count - 1) results, and its members hold ``count``.
    return moved + 2 * (count - 1) * held // count * _itemsize(kinds)


def _itemsize(kinds: Sequence[Aval]) -> int:
    """Returns the bytes of an element of the result. A duration times a number is a duration."""
    dtypes = [k.dtype for k in kinds]
    durations = [dtype for dtype in dtypes if dtype.kind == "m"]
    return np.result_type(*(durations or dtypes)).itemsize


def _missing(source: Grid, target: Grid) -> int:
    """Returns the number of elements that the devices of a grid lack of their parts in another one."""
    (begins, ends), (target_begins, target_ends) = _ends(source), _ends(target)
    overlap = np.maximum(begins, target_begins), np.minimum(ends, target_ends)
    return _total((target_begins, target_ends)) - _total(overlap)


def _ends(grid: Grid) -> tuple[Any, Any]:
    """Returns begin and end of the part of each device, of shape (devices, dimensions)."""
    pairs = list(zip(grid.offsets, grid.parts.T, strict=True))
    return np.array([o[p] for o, p in pairs]).T, np.array([o[p + 1] for o, p in pairs]).T


def _share(grid: Grid) -> int:
    """Returns the most elements that a device of a grid has."""
    return int(np.maximum.reduce(_volumes(_ends(grid))))


def _total(ends: tuple[Any, Any]) -> int:
    return int(np.add.reduce(_volumes(ends)))


# Methods of NumPy's arrays, such as `prod`, import a module, which the end of the interpreter does not permit.
def _volumes(ends: tuple[Any, Any]) -> Any:
    begin, end = ends
    return np.multiply.reduce(np.maximum(end - begin, 0), axis=-1)


def _run(
    strategies: Strategies,
    operands: tuple[Aval, Aval],
    product: Callable[[tuple[Shards, Shards], Multiply, Shards], Shards],
) -> Run:
    """Returns the plan of a product: ``product(operands, multiply, result)`` computes it into ``result``."""
    value, contexts, params = strategies.value, strategies.contexts, strategies.params

    def multiply(xp: Any, k: int, left: Any, right: Any) -> Any:
        return whole_of(strategies.kernel(xp, contexts[k], left, right, **params), value)

    def run_plan(tensors: Operands) -> ShardedTensor:
        result = Shards.empty(value)
        first, second = [shards_of(v, shard_arrays(x)) for v, x in zip(operands, tensors, strict=True)]
        product((first, second), multiply, result)
        return result.tensor()

    return run_plan
