"""The layouts of products on meshes of several axes: the planner takes the one that transfers the fewest bytes.

Where both operands of a product need the same mesh axis for different dimensions, one of them moves and partial results
are added (either operand can be the one that stays), or both move and the result stays (`summa`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.communication.schedules import Schedule
from shardtensor.communication.transfer_log import recorded_by
from shardtensor.core import Op, Operands
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards, shards_of
from shardtensor.functions.algorithms.summa import Contraction, schedule, summa
from shardtensor.interpreters.execution.strategies import Run, Strategies
from shardtensor.sharding.layout import Grid, NamedSharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.rules import Chains, Propagated, Rule, propagate
from shardtensor.sharding.spec import P
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
        return _run(self, strategies)


def cheapest(
    op: Op, kinds: Sequence[Any], rule: Rule, mesh: Mesh, given: Propagated
) -> tuple[Propagated, Panelled | None]:
    """Returns the layout of a product that transfers the fewest bytes, and how its operands move panel by panel, if
    they do. ``given`` is the layout in which the larger operand stays; it is returned for everything but products of
    two tensors that several mesh axes split, of which one has to move.
    """
    if not op.product or not all(isinstance(k, Aval) and k.size for k in kinds):
        return given, None
    a, b = kinds
    if not a.sharding.mesh == b.sharding.mesh == mesh or a.committed != b.committed or a.offloaded or b.offloaded:
        return given, None
    used = {axis for k in kinds for chain in k.sharding.spec.chains for axis in chain if mesh.shape[axis] > 1}
    if len(used) < 2:
        return given, None
    layouts = [k.sharding.spec.chains_of(k.ndim) for k in kinds]
    if _stays(given, layouts, mesh):
        return given, None
    shapes = [k.shape for k in kinds]
    weights = (0, 1) if a.nbytes >= b.nbytes else (1, 0)
    other = propagate(rule, shapes, layouts, weights, mesh.shape, combines=True)
    choices: list[tuple[Propagated, Panelled | None]] = [(given, None), (other, None)]
    if panelled := _panelled(rule, (a, b), layouts, given):
        choices.append(panelled)
    return min(choices, key=lambda choice: _bytes(choice[0], kinds, mesh))


def _stays(laid: Propagated, layouts: Sequence[Chains], mesh: Mesh) -> bool:
    """Whether no operand moves."""
    return all(
        [axis for axis in chain if mesh.shape[axis] > 1] == [axis for axis in wanted if mesh.shape[axis] > 1]
        for now, then in zip(layouts, laid.operands, strict=True)
        for chain, wanted in zip(now, then, strict=True)
    )


def _panelled(
    rule: Rule, kinds: tuple[Aval, Aval], layouts: Sequence[Chains], given: Propagated
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
    own = [name for name in rule.operands[0] if name in rule.result and name not in rule.operands[1]]
    rows = (rule.operands[0].index(own[0]), rule.result.index(own[0])) if own else None
    wanted = [tuple([chains[n][1] if n in chains else () for n in names]) for names in rule.operands]
    result = tuple([chains[n][1] for n in rule.result])
    laid = Propagated(tuple(wanted), result, given.shape, (), result)
    numbers = [names.index(inner) for names in rule.operands]
    return laid, Panelled(kinds, Contraction((numbers[0], numbers[1]), rows))


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
    held = int(_volumes(_ends(grid)).sum())
    # Each of the groups of ``count`` devices sends 2 (count - 1) results, and its members hold ``count``.
    return moved + 2 * (count - 1) * held // count * np.result_type(*[k.dtype for k in kinds]).itemsize


def _missing(source: Grid, target: Grid) -> int:
    """Returns the number of elements that the devices of a grid lack of their parts in another one."""
    (begins, ends), (wanted, until) = _ends(source), _ends(target)
    overlap = np.maximum(begins, wanted), np.minimum(ends, until)
    return int(_volumes((wanted, until)).sum() - _volumes(overlap).sum())


def _ends(grid: Grid) -> tuple[Any, Any]:
    """Returns begin and end of the part of each device, of shape (devices, dimensions)."""
    pairs = list(zip(grid.offsets, grid.parts.T, strict=True))
    return np.array([o[p] for o, p in pairs]).T, np.array([o[p + 1] for o, p in pairs]).T


def _volumes(ends: tuple[Any, Any]) -> Any:
    begin, end = ends
    return np.maximum(end - begin, 0).prod(axis=-1)


def _run(plan: Panelled, strategies: Strategies) -> Run:
    value, contexts, params = strategies.value, strategies.contexts, strategies.params
    communicators = [
        MeshCommunicator.of_arrays(strategies.name, x, d)
        for x, d in zip(plan.operands, plan.dimensions.inner, strict=True)
    ]

    def multiply(xp: Any, k: int, left: Any, right: Any) -> Any:
        return whole_of(strategies.kernel(xp, contexts[k], left, right, **params), value)

    def run_plan(operands: Operands) -> ShardedTensor:
        made = Shards.empty(value)
        strategies.announce()
        shards = [shards_of(v, shard_arrays(x)) for v, x in zip(plan.operands, operands, strict=True)]
        with recorded_by():  # The whole schedule is recorded already.
            summa(
                (shards[0], shards[1]),
                (communicators[0], communicators[1]),
                plan.dimensions,
                multiply,
                made,
            )
        return made.tensor()

    return run_plan
