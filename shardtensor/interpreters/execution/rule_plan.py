"""Plans of operators with a rule: where the operands have to be, where the result is, and how the operator runs.

An operator whose result does not depend on the split runs once on each buffer: on the whole array where devices share
one memory. Where partial results have to be combined, it runs once per shard.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from shardtensor.communication.offload import offloaded
from shardtensor.communication.schedules import Schedule
from shardtensor.communication.transfer import buffers_of, operand_transfer
from shardtensor.core import Op
from shardtensor.functions.algorithms.first_device import GATHERED, alone, is_few, to_first
from shardtensor.functions.building.monoids import MONOIDS
from shardtensor.interpreters.execution.combination import combination_of
from shardtensor.interpreters.execution.plan import Kind, Plan, contexts_of, result_dtype
from shardtensor.interpreters.execution.product_layouts import InParts, cheapest
from shardtensor.interpreters.execution.strategies import Moves, Named, Run, Strategies
from shardtensor.sharding.layout import Grid, NamedSharding, Shape, Where, as_sharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.rules import Chains, Propagated, Rule, parse, propagate
from shardtensor.sharding.shard_context import Box, ShardContext
from shardtensor.sharding.spec import Chain, P
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.tensor import ShardedTensor, shard_arrays, tensor, tensor_of
from shardtensor.tensor.value import Aval, aval, common_reduced, memory_kind, spans_hosts


def rule_plan(op: Op, kinds: Sequence[Kind], params: Named, mesh: Mesh, layout: Where | None) -> Plan:
    """Returns the plan of an operator with a rule.

    Args:
        op: the operator.
        kinds: the kinds of the operands.
        params: the operator's parameters by name.
        mesh: the mesh to which operands on other meshes are transferred.
        layout: the layout of the result that the caller has chosen; None for the one that follows from the operands'.
    """
    laid = _layouts(op, kinds, params, mesh, layout)
    if _is_on_first(op, laid):
        return _plan_on_first(op, params, laid)

    @functools.cache
    def schedules() -> Sequence[Schedule]:
        if laid.panels:
            return [laid.panels.schedule(op.name)]
        if not laid.partial_axes:
            return ()
        return [combination_of(op, laid.value, laid.target, params, laid.moves, laid.partial_axes)]

    chosen: list[Strategies] = []

    def execution() -> tuple[str, Run]:
        strategies = Strategies(op, laid.value, params, laid.moves, laid.contexts(laid.value, laid.moves))
        chosen.append(strategies)
        return _strategy(strategies, laid)

    return Plan(
        op,
        laid.target,
        laid.partial_axes,
        () if laid.panels else tuple(laid.moves),
        schedules,
        execution,
        lambda: chosen[0].of_buffers if chosen else None,
    )


# -- layouts ---------------------------------------------------------------------------------------


class _Layouts(NamedTuple):
    """The layouts of the operands and of the result.

    Attributes:
        rule: the rule.
        shapes: the shape of each operand.
        moves: the transfer of each operand into the layout that the operator needs; None for a scalar.
        value: the aval of what the kernels compute, of which devices may have partial results.
        kept: the aval of which each device keeps only its part of that.
        target: the aval of the result of the plan: ``kept``, or in the layout that the caller has chosen.
        partial_axes: the mesh axes along which partial results are combined.
        panels: how the operands of a product move part by part; None if they are transferred before.
    """

    rule: Rule
    shapes: Sequence[Shape]
    moves: Moves
    value: Aval
    kept: Aval
    target: Aval
    partial_axes: Chain
    panels: InParts | None

    def contexts(self, value: Aval, moves: Moves) -> list[ShardContext]:
        """Returns the position of each device's shards within the operands and a result."""
        return contexts_of(value, [move.target if move else None for move in moves], self.shapes)


def _is_on_first(op: Op, laid: _Layouts) -> bool:
    """Whether the first device computes the result for the others: they have few bytes of operands that are split, and
    all need the same ones; or they would combine partial results that take many kernels, and whose bits do not depend
    on how elements are grouped. All get the same result, which has few bytes, too.
    """
    value, moves = laid.value, [move for move in laid.moves if move is not None]
    if laid.panels or _is_split(value.grid) or not is_few(value) or laid.target is not laid.kept:
        return False
    if laid.partial_axes:
        if "many kernels" not in op.tags or op.combine is None or value.dtype.kind not in MONOIDS[op.combine].exact:
            return False
    elif any(_is_split(move.target.grid(move.source.shape)) for move in moves):
        return False
    gathered = any(_is_split(move.source.grid) for move in moves)
    return gathered and sum([move.source.nbytes for move in moves]) <= GATHERED


def _is_split(grid: Grid) -> bool:
    return max(grid.counts, default=1) > 1


def _layouts(op: Op, kinds: Sequence[Kind], params: Named, mesh: Mesh, layout: Where | None) -> _Layouts:
    shapes = [k.shape if isinstance(k, (Aval, HostAval)) else () for k in kinds]
    rule_and_shape = op.rule(shapes, **params) if callable(op.rule) else op.rule
    text, shape = (rule_and_shape, None) if isinstance(rule_and_shape, str) else rule_and_shape
    rule = parse(text, tuple(map(len, shapes)), op.operands)
    propagated, panels = _propagated(op, kinds, shapes, rule, mesh), None
    if "product" in op.tags and (layout is None or (isinstance(layout, NamedSharding) and not layout.spec.unreduced)):
        propagated, panels = cheapest(op, kinds, rule, mesh, propagated)

    tensors = [k for k in kinds if isinstance(k, Aval)]
    memory, committed = memory_kind(tensors), any(k.committed for k in tensors)
    moves = [
        operand_transfer(k, NamedSharding(mesh, P(*chains), memory_kind=memory))
        if isinstance(k, (Aval, HostAval))
        else None
        for k, chains in zip(kinds, propagated.operands, strict=True)
    ]
    reduced = common_reduced(tensors, mesh)
    sharding = NamedSharding(mesh, P(*propagated.result, reduced=reduced), memory_kind=memory)
    shape = propagated.shape if shape is None else shape
    value = aval(shape, result_dtype(op, kinds, params), sharding, committed)
    kept = target = aval(shape, value.dtype, sharding.with_spec(P(*propagated.kept, reduced=reduced)), committed)
    partial_axes = propagated.partial_axes if op.combine else ()
    if layout is not None and partial_axes:
        from shardtensor.interpreters.execution.placed_results import placed_result  # Few programs choose layouts.

        target = placed_result(op, value, partial_axes, layout)
    if target.unreduced:
        partial_axes = tuple([axis for axis in partial_axes if axis not in target.unreduced])
    if value.memory is not None:  # The whole product is one call, which reads the operands where they are.
        panels = None
    return _Layouts(rule, shapes, moves, value, kept, target, partial_axes, panels)


def _propagated(op: Op, kinds: Sequence[Kind], shapes: Sequence[Shape], rule: Rule, mesh: Mesh) -> Propagated:
    """Returns the layouts that follow from those of the operands."""
    tensors = [k for k in kinds if isinstance(k, Aval)]
    committed = any(k.committed for k in tensors)
    layouts = [
        k.sharding.spec.chains_of(k.ndim) if isinstance(k, Aval) and k.sharding.mesh == mesh else None for k in kinds
    ]
    weights = [k.nbytes if isinstance(k, Aval) and k.committed == committed else 0 for k in kinds]
    if not tensors:  # The largest host array is split in the same way as the result of a creation function.
        big = max(range(len(kinds)), key=lambda i: getattr(kinds[i], "nbytes", -1))
        layouts[big] = as_sharding(mesh, len(shapes[big]), op.name).spec.chains_of(len(shapes[big]))
    # Nothing is transferred to join the empty parts of an operand, so there are no partial results to combine. The axes
    # that would have them do not split the result: its layout is the same as that of operands with elements.
    nothing = any(0 in shape for shape in shapes)
    if nothing and op.combine:
        layouts = [laid and _kept_chains(names, laid, rule) for names, laid in zip(rule.operands, layouts, strict=True)]
    combines = op.combine is not None and not nothing
    return propagate(rule, shapes, layouts, weights, mesh.shape, combines=combines)


def _kept_chains(names: Sequence[str], chains: Chains, rule: Rule) -> Chains:
    """Returns the chains of an operand without those of the dimensions that the result lacks."""
    return tuple([chain if name in rule.result else () for name, chain in zip(names, chains, strict=True)])


# -- execution -------------------------------------------------------------------------------------


def _plan_on_first(op: Op, params: Named, laid: _Layouts) -> Plan:
    """Returns the plan of an operator that the first device runs; all of them together, where they share a memory."""
    kept, caller, sharding = laid.kept, op.name, laid.value.sharding
    gathers = [move and to_first(move.source, sharding, caller) for move in laid.moves]
    on_first = alone(laid.value, caller)
    back = operand_transfer(on_first, kept.sharding)

    chosen: list[Strategies] = []

    def strategies(value: Aval, moves: Moves) -> Strategies:
        return Strategies(op, value, params, moves, laid.contexts(value, moves))

    def execution() -> tuple[str, Run]:
        if kept.memory is not None:
            chosen.append(strategies(laid.value, laid.moves))
            return "whole", _in_parts(_at_once(chosen[0]), laid.value, kept)
        run = _at_once(strategies(on_first, gathers))
        return "first", lambda operands: tensor_of(kept, tuple(back.buffers(run(operands), caller)))

    return Plan(
        op,
        kept,
        (),
        tuple(gathers),
        lambda: (back.schedule(caller),),
        execution,
        lambda: chosen[0].of_buffers if chosen else None,
        copied=lambda: back.copied,
    )


def _strategy(strategies: Strategies, laid: _Layouts) -> tuple[str, Run]:
    """Selects a strategy, and returns its name (see `Plan.strategy`) and the function that runs it."""
    value, target, axes = laid.value, laid.target, laid.partial_axes
    if target.unreduced or spans_hosts(value):
        strategies.divide(laid.rule)
    if not target.unreduced and value.backend.on_host and (in_blocks := strategies.in_blocks(laid.rule, axes)):
        return "blocks", _in_parts(in_blocks, value, target)
    if laid.panels:
        return "panels", laid.panels.run(strategies)
    if target.unreduced:
        from shardtensor.interpreters.execution.placed_results import partial_results  # Few programs keep partial sums.

        return "per shard", partial_results(strategies, axes, target)
    if axes and strategies.op.combine:
        return "reduce", _reduction(strategies, laid)
    return "per shard" if value.memory is None else "whole", _in_parts(_at_once(strategies), value, laid.kept)


def _at_once(strategies: Strategies) -> Run:
    """Returns a function that runs the operator once on each buffer."""
    return strategies.whole() if strategies.backend.on_host else strategies.per_cell()


def _reduction(strategies: Strategies, laid: _Layouts) -> Run:
    """Returns a function that combines partial results."""
    op, value, target, axes = strategies.op, laid.value, laid.target, laid.partial_axes
    assert op.combine is not None
    monoid, on_host, shared = MONOIDS[op.combine], value.backend.on_host, value.memory is not None
    if not shared and target is not laid.kept:
        from shardtensor.interpreters.execution.placed_results import reduce_scatter  # Few programs choose layouts.

        return reduce_scatter(strategies, monoid, axes, target)
    reduce = strategies.reduce(monoid, axes)
    exact = shared and value.dtype.kind in monoid.exact
    if exact or on_host:
        from shardtensor.interpreters.execution.one_pass import in_one_pass  # GPUs do without it.

        # The partial result of every shard is not needed.
        run: Run = _at_once(strategies) if exact else in_one_pass(strategies, monoid, axes, reduce)
    elif "product" in op.tags:
        from shardtensor.interpreters.execution.cell_products import product_by_cells  # The host does without it.

        run = product_by_cells(strategies, laid.rule, axes, reduce)
    else:
        from shardtensor.interpreters.execution.cell_reduction import reduce_by_cells  # See above.

        run = reduce_by_cells(strategies, monoid, axes, reduce)
    return _in_parts(run, value, target)


def _in_parts(run: Run, value: Aval, target: Aval) -> Run:
    """Returns a plan whose result, of the aval ``value``, is split further, as in ``target``."""
    if target is value:
        return run
    if target.cells.grid.same(value.cells.grid):
        return lambda operands: tensor_of(target, buffers_of(run(operands)))
    return lambda operands: _parts_of(run(operands), target)


def _parts_of(x: ShardedTensor, value: Aval) -> ShardedTensor:
    """Returns a tensor that is replicated along mesh axes in the sharding of ``value``, which these axes split."""
    backend, grid = value.backend, value.grid
    arrays = []
    for k, array in enumerate(shard_arrays(x)):
        with backend.on(grid.devices[k]):
            index = tuple([slice(*ends) for ends in _within(grid.box(k), x._aval.grid.box(k))])
            arrays.append(backend.xp.asarray(backend.view(array, index), copy=True))
    return tensor(value, offloaded(value, arrays))


def _within(box: Box, outer: Box) -> Box:
    """Returns a box relative to the origin of a box that contains it."""
    return tuple([(begin - origin, end - origin) for (begin, end), (origin, _) in zip(box, outer, strict=True)])
