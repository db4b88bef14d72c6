"""Reductions whose result the caller places: reduce-scatters, and partial results that are not combined."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.all_reduce import all_reduce, combine
from shardtensor.communication.array_communicator import each_array
from shardtensor.communication.between_processes import sums_across_processes
from shardtensor.core import Op, Operands
from shardtensor.functions.building.monoids import MONOIDS, Monoid
from shardtensor.host import memory_pool
from shardtensor.interpreters.execution.combination import reduction_groups
from shardtensor.interpreters.execution.one_pass import partials_in_one_pass
from shardtensor.interpreters.execution.strategies import Run, Strategies
from shardtensor.sharding.layout import NamedSharding, Where, as_sharding
from shardtensor.sharding.spec import Chain, P
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.tensor import ShardedTensor, tensor, tensor_of
from shardtensor.tensor.value import Aval, aval, stacked, whole_of


def placed_result(op: Op, value: Aval, partial_axes: Chain, layout: Where) -> Aval:
    """Returns the aval of the result of a reduction that is nearest to the layout that the caller wants: unreduced
    along the axes along which the layout is, or split by all axes that have partial results, or else ``value``.

    Args:
        op: the operator.
        value: the aval of the result, replicated along the axes that have partial results.
        partial_axes: these axes.
        layout: the layout, of any mesh.

    Raises:
        ShardingError: the layout has more dimensions than the result.
    """
    target = as_sharding(layout, value.ndim, op.error_name)
    if target.mesh != value.sharding.mesh:
        return value
    have, want = [s.spec.chains_of(value.ndim) for s in (value.sharding, target)]
    adds = op.combine is not None and MONOIDS[op.combine].adds
    sums = target.spec.unreduced.intersection(partial_axes) if adds else ()
    if sums:
        return _with_spec(value, P(*have, unreduced=sums))
    split = [_extended(h, w, partial_axes) for h, w in zip(have, want, strict=True)]
    used = {axis for chain in split for axis in chain}
    return _with_spec(value, P(*split)) if used.issuperset(partial_axes) else value


def _extended(chain: Chain, target: Chain, axes: Chain) -> Chain:
    """Returns the mesh axes that split a dimension, followed by those of ``axes`` that come next in ``target``."""
    if target[: len(chain)] != chain:
        return chain
    return (*chain, *itertools.takewhile(axes.__contains__, target[len(chain) :]))


def _with_spec(value: Aval, spec: P) -> Aval:
    sharding: NamedSharding = value.sharding.with_spec(spec)
    return aval(value.shape, value.dtype, sharding, value.committed)


def reduce_scatter(strategies: Strategies, monoid: Monoid, partial_axes: Chain, target: Aval) -> Run:
    """Returns the plan of a reduction on separate memories in which each device combines its part of the result, along
    the tree of an all-reduce.

    Args:
        strategies: the operator and its operands.
        monoid: how partial results are computed, merged and finished.
        partial_axes: the mesh axes along which partial results are combined.
        target: the aval of the result, of which these axes split dimensions.
    """
    value, backend, devices, contexts = strategies.value, strategies.backend, strategies.devices, strategies.contexts
    groups = reduction_groups(value, strategies.moves, partial_axes)
    partial = monoid.partial or strategies.kernel
    computing = sorted(k for group in groups for k in group.contributors)
    remote: list[Any] = [RemoteArray(target.grid.shape(k), target.dtype) for k in range(len(devices))]
    alone = {k for group in groups if len(group.contributors) == 1 for k in group.members}
    parts = [
        tuple([slice(begin - at, end - at) for (begin, end), (at, _) in zip(inner, outer, strict=True)])
        for inner, outer in ((target.grid.box(k), value.grid.box(k)) for k in range(len(devices)))
    ]
    ops = strategies.reduce_ops(monoid)

    def part(state: Any, j: int, k: int) -> Any:
        with backend.on(devices[j]):
            return each_array(lambda array: backend.view(array, parts[k]), state)

    def received(state: Any, j: int, k: int) -> Any:
        mine = part(state, j, k)
        return mine if j == k else ops.send(mine, j, k)

    def combined(states: dict[int, Any]) -> Iterator[tuple[int, Any]]:
        """Yields the position of each device of this process, and the combined state of its part."""
        if value.spans:
            yield from sums_across_processes.reduce_scatter_across(
                groups, states, part, ops, devices, strategies.name
            ).items()
            return
        for group in groups:
            for k in group.members:
                arrived = [received(states[j], j, k) for j in group.contributors]
                yield k, combine(group.tree, arrived.__getitem__, functools.partial(ops.merge, k))

    def run_plan(operands: Operands) -> ShardedTensor:
        rows = strategies.rows(operands)
        states = {k: strategies.run(partial, k, rows[k]) for k in computing}
        results = remote.copy()
        for k, total in combined(states):
            with backend.on(devices[k]):
                result = whole_of(monoid.finish(backend.xp, contexts[k], total, **strategies.params), target)
                # A part of a device's own state would keep the whole state alive.
                results[k] = backend.contiguous(backend.xp.asarray(result, copy=True) if k in alone else result)
        return tensor_of(target, tuple(results))

    return run_plan


def partial_results(strategies: Strategies, partial_axes: Chain, target: Aval) -> Run:
    """Returns the plan of a reduction whose partial results stay where they are: the result is unreduced.

    Args:
        strategies: the operator and its operands.
        partial_axes: the mesh axes along which partial results are combined nevertheless.
        target: the aval of the result.
    """
    op, value, backend, devices = strategies.op, strategies.value, strategies.backend, strategies.devices
    monoid = MONOIDS[op.combine or ""]
    partial = monoid.partial or strategies.kernel
    groups = reduction_groups(value, strategies.moves, partial_axes)
    partials, computing = stacked(target), sorted(k for group in groups for k in group.contributors)
    ops = strategies.reduce_ops(monoid)

    def separate(operands: Operands) -> ShardedTensor:
        rows = strategies.rows(operands)
        states = {k: strategies.run(partial, k, rows[k]) for k in computing}
        arrays: dict[int, Any] = {}
        if value.spans:
            arrays = sums_across_processes.all_reduce_across(groups, states, ops, devices, value.dtype, strategies.name)
        else:
            for group in groups:
                arrays |= all_reduce(group, states, ops)
        for k, array in arrays.items():
            with backend.on(devices[k]):
                arrays[k] = backend.xp.reshape(whole_of(array, value), partials.grid.shape(k))
        remote = {k: RemoteArray(partials.grid.shape(k), value.dtype) for k in range(len(devices)) if k not in arrays}
        return tensor_of(partials, tuple([(arrays | remote)[k] for k in range(len(devices))]))

    def shared(operands: Operands) -> ShardedTensor:
        rows = strategies.rows(operands)
        whole = memory_pool.empty(partials.shape, partials.dtype)
        merge = functools.partial(monoid.merge, backend.xp)
        numbers, done = partials.grid.linear_parts().tolist(), set()
        for group in groups:
            if numbers[group.members[0]] not in done:
                done.add(numbers[group.members[0]])
                contributors = group.contributors
                run = functools.partial(_state, strategies, partial, rows, contributors)
                total = combine(group.tree, run, merge)
                whole[partials.grid.index(group.members[0])] = total
        return tensor_of(partials, (whole,))

    run: Run = separate
    if backend.on_host:
        run = shared if partial_axes else partials_in_one_pass(strategies, monoid, partials, shared)
    return lambda operands: tensor(target, PartialSums(run(operands)))


def _state(
    strategies: Strategies, partial: Callable[..., Any], rows: Sequence[Sequence[Any]], positions: Sequence[int], n: int
) -> Any:
    """Returns the partial result of the n-th device of a group."""
    return strategies.run(partial, positions[n], rows[positions[n]])
