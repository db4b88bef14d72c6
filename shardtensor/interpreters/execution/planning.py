"""The planner: it propagates shardings, plans the transfers of the operands, and selects a strategy for the operator.

An operator whose result does not depend on the split runs once on each buffer: on the whole array where devices share
one memory. Where partial results have to be combined, it runs once per shard.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST
from shardtensor.backend.functions import function_of
from shardtensor.backend.registry import backend_of, processes_of
from shardtensor.communication.offload import offloaded
from shardtensor.communication.processes import described, note
from shardtensor.communication.schedules import Move, Schedule
from shardtensor.communication.transfer import OperandTransfer, announce_reading, buffers_of, gather, operand_transfer
from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import Op, Operands, Params
from shardtensor.errors import ArgumentTypeError
from shardtensor.functions.data_movement import DataMovement
from shardtensor.functions.monoids import MONOIDS
from shardtensor.host.memory_pool import reserve
from shardtensor.interpreters.execution.combination import combination_of
from shardtensor.interpreters.execution.movement import execute_movement
from shardtensor.interpreters.execution.on_first import on_first, runs_on_first
from shardtensor.interpreters.execution.products import cheapest
from shardtensor.interpreters.execution.strategies import Moves, Named, Run, Strategies
from shardtensor.sharding.layout import NamedSharding, Shape, Where, as_sharding
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.sharding.rules import Chains, Rule, parse, propagate
from shardtensor.sharding.shard_context import Box, ShardContext
from shardtensor.sharding.spec import Chain, P
from shardtensor.tensor.operands import HostAval, host_aval, sharded_dtype
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import (
    SCALARS,
    ShardedTensor,
    check_not_donated,
    mark_array,
    shard_arrays,
    tensor,
    without_elements,
)
from shardtensor.tensor.value import Aval, aval, memory_kind, spans_hosts

Kind = Aval | HostAval | type | None
"""An operand as plans see it: its aval, or the type of a Python scalar; None for an optional operand that is absent."""

Execution = Callable[[], tuple[str, Run]]
"""Selects the strategy of a plan, and makes its function."""


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Plan:
    """How one operator runs on operands of known kinds. Plans are compared by everything but their functions.

    Attributes:
        op: the operator.
        result: the aval of the result.
        partial_axes: the mesh axes along which partial results are combined.
        transfers: the transfer of each operand to the layout that the operator needs, None for a scalar; none for a
            strategy that reads the operands where they are.
        schedules: returns the schedules of the messages that follow those of the operands: the combination of partial
            results, or the movement of the elements.
        strategy: ``"whole"`` (once on the whole buffer), ``"blocks"`` (block by block), ``"per shard"`` (once on each
            shard, or on each buffer that several devices share), ``"first"`` (once on the first device, which sends the
            result to the others), ``"reduce"`` (per shard, then combined), ``"panels"``
            (see `shardtensor.interpreters.execution.products`), ``"move"`` (a `DataMovement`), ``"create"`` or
            ``"abstract"`` (without elements).
        run: executes the plan: takes the operands and returns the result.
        of_buffers: returns the function that computes the buffer of the result from those of the operands, where they
            are whole in the memory of the host (see `shardtensor.interpreters.execution.strategies.Strategies`), or
            None.
        text: returns the text of a call, from the operands, by which processes compare it; None if it concerns one.
    """

    op: Op
    result: Aval
    partial_axes: Chain
    transfers: tuple[OperandTransfer | None, ...]
    schedules: Callable[[], Sequence[Schedule]] = dataclasses.field(compare=False, repr=False)
    execution: dataclasses.InitVar[Execution]
    of_buffers: Callable[[], Callable[..., Any] | None] = dataclasses.field(
        default=lambda: None, compare=False, repr=False
    )
    text: Callable[[Operands], str] | None = dataclasses.field(default=None, init=False, compare=False, repr=False)
    strategy: str = dataclasses.field(init=False)
    run: Run = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self, execution: Execution) -> None:
        if self.result.backend.simulated:
            self.strategy, self.run = "abstract", self.infer
        else:
            self.strategy, run = execution()
            marks = self.op.keeps_arrays or self.op.creates
            self.run = (lambda operands: self._marked(run(operands), operands)) if marks else run

    def announce(self) -> None:
        """Records the messages of the plan, if a log is active, without sending them."""
        for transfer in self.transfers:
            if transfer is not None and not transfer.stays:
                transfer.schedule(self.op.name).announce()
        for schedule in self.schedules():
            schedule.announce()

    def infer(self, operands: Operands) -> ShardedTensor:
        """Returns the result without elements, and records the messages if a log is active."""
        read = operands[1:] if self.op.prototype else operands
        check_not_donated(*read)
        if is_recording():
            for x in read:
                announce_reading(x)
            self.announce()
        return self._marked(without_elements(self.result), operands)

    def _marked(self, result: ShardedTensor, operands: Operands) -> ShardedTensor:
        """Marks a 0-d result as an array, if it is created or the operator keeps arrays and some operand is one."""
        op = self.op
        kept = op.keeps_arrays and not all(isinstance(x, ShardedTensor) and x._is_scalar for x in operands)
        return mark_array(result) if op.creates or kept else result

    @property
    def runs(self) -> str:
        """How the operator runs, and on which devices."""
        count, single = self.result.sharding.mesh.size, self.result.sharding.mesh.flat[0]
        each = f"on {single}" if count == 1 else f"on each of {count} devices"
        if self.strategy == "first":
            return f"runs on {single}, which sends the result to {count - 1} devices"
        if self.strategy in ("whole", "blocks"):
            where = f"on {single}" if count == 1 else f"on the buffer that {count} devices share"
            return f"runs {'once' if self.strategy == 'whole' else 'block by block'} {where}"
        if self.strategy == "per shard" and not self.result.unreduced and not (cells := self.result.cells).apart:
            return f"runs on each of {len(cells.positions)} buffers that {count} devices share"
        return "moves elements" if self.strategy == "move" else f"runs {each}"

    def messages(self) -> Iterator[str]:
        """Yields a description of each operand that is transferred, and of the messages that follow."""
        for name, transfer in zip(self.op.operands * len(self.transfers), self.transfers, strict=False):
            if transfer is not None and not transfer.stays:
                source = transfer.source.sharding.spec if isinstance(transfer.source, Aval) else "the host"
                if nbytes := transfer.schedule(self.op.name).bytes:
                    yield f"transfers {name} from {source} to {transfer.target.spec}: {nbytes} bytes"
        for schedule in self.schedules():
            done = (
                f"combines partial results along {', '.join(self.partial_axes)}" if self.partial_axes else "transfers"
            )
            yield f"{done}: {schedule.bytes} bytes"

    def __str__(self) -> str:
        """The operator and the result's layout on the first line, then how it runs, and what it transfers."""
        value = self.result
        head = f"{self.op.name} -> {value.dtype}{list(value.shape)} {value.sharding.spec}"
        return "\n    ".join([head, self.runs, *self.messages()])


def make_plan(op: Op, kinds: Sequence[Kind], params: Params) -> Plan:
    """Returns the plan of an operator, whose calls all processes compare if it concerns several; see `_plan`."""
    plan = _plan(op, kinds, params)
    known = [k.sharding.mesh.flat for k in (plan.result, *kinds) if isinstance(k, Aval)]
    if len(processes_of(tuple(itertools.chain.from_iterable(known)))) > 1:
        run = plan.run
        text = plan.text = _text_of_calls(op, kinds, params)

        def noted(operands: Operands) -> Any:
            note(text(operands))
            return run(operands)

        plan.run = noted
    return plan


def _text_of_calls(op: Op, kinds: Sequence[Kind], params: Params) -> Callable[[Operands], str]:
    """Returns the function that gives the text of a call from its operands, of which it reads the Python scalars."""
    texts = [described(x) for x in (*kinds, *params)]
    scalars = [n for n, kind in enumerate(kinds) if isinstance(kind, type)]
    always = f"{op.name}({', '.join(texts)})"

    def text(operands: Operands) -> str:
        given = texts.copy()
        for n in scalars:
            given[n] = repr(operands[n])
        return f"{op.name}({', '.join(given)})"

    return text if scalars else lambda _: always


def _plan(op: Op, kinds: Sequence[Kind], params: Params) -> Plan:
    """Returns the plan of an operator for operands of these kinds.

    The mesh of the plan is that of the `anchor` operand, or the default mesh if no operand is a tensor. Operands on
    other meshes are transferred to it.

    Args:
        op: the operator.
        kinds: the kinds of the operands.
        params: the values of the other parameters, in the order of ``op.params``.

    Raises:
        ShardTensorError: the operator does not accept the shapes, dtypes or parameters.
    """
    named = dict(zip(op.params, params, strict=True))
    layout = named.pop("layout", None)
    if not op.variadic:
        for name, kind in zip(op.operands, kinds, strict=True):
            if kind is None and name not in op.optional:
                raise ArgumentTypeError(f"{op.name}: {name} is None; wanted a tensor, an array or a scalar")
    if op.operands and all(isinstance(k, type) for k in kinds if k is not None) and not op.creates:
        kinds = [k if k is None else _as_array(k) for k in kinds]  # If all operands are scalars, the result is 0-d.
    if op.creates:
        return _creation_plan(op, kinds, named)
    tensors = [k for k in kinds if isinstance(k, Aval)]
    if len({k.backend.simulated for k in tensors}) > 1:
        raise ArgumentTypeError(
            f"{op.name}: a simulated tensor beside one with elements; give st.empty_like(x, device=...) of that one on "
            "the AbstractMesh"
        )
    mesh = anchor(tensors).sharding.mesh if tensors else default_mesh()
    return _movement_plan(op, kinds, named, mesh) if op.movement else _rule_plan(op, kinds, named, mesh, layout)


def kind_of(x: Any) -> Kind:
    """Returns the kind of an operand: a tensor, a host array, a Python scalar or None."""
    if type(x) is ShardedTensor:
        return x._aval
    return type(x) if type(x) in SCALARS else None if x is None else host_aval(x.shape, x.dtype)


def _as_array(kind: Kind) -> HostAval:
    """Returns the aval of a Python scalar as a host array."""
    assert isinstance(kind, type)
    return host_aval((), np.asarray(kind(1)).dtype)


def anchor(tensors: Sequence[Aval]) -> Aval:
    """Returns the operand to whose mesh the others are transferred.

    It is the one with the most bytes among the committed operands (those that were placed explicitly), or among all if
    none is committed. Of equals it is the leftmost.
    """
    return max(tensors, key=lambda a: (a.committed, a.nbytes))


# -- operators with a rule -------------------------------------------------------------------------


def _rule_plan(op: Op, kinds: Sequence[Kind], params: Named, mesh: Mesh, layout: Where | None) -> Plan:
    shapes = [k.shape if isinstance(k, (Aval, HostAval)) else () for k in kinds]
    rule_and_shape = op.rule(shapes, **params) if callable(op.rule) else op.rule
    text, given_shape = (rule_and_shape, None) if isinstance(rule_and_shape, str) else rule_and_shape
    tensors = [k for k in kinds if isinstance(k, Aval)]
    committed = any(k.committed for k in tensors)
    layouts = [
        k.sharding.spec.chains_of(k.ndim) if isinstance(k, Aval) and k.sharding.mesh == mesh else None for k in kinds
    ]
    weights = [k.nbytes if isinstance(k, Aval) and k.committed == committed else 0 for k in kinds]
    if not tensors:  # The largest host array is split in the same way as the result of a creation function.
        big = max(range(len(kinds)), key=lambda i: getattr(kinds[i], "nbytes", -1))
        layouts[big] = as_sharding(mesh, len(shapes[big]), op.name).spec.chains_of(len(shapes[big]))
    rule = parse(text, tuple(map(len, shapes)), op.operands)
    # Nothing is transferred to join the empty parts of an operand, so there are no partial results to combine. The axes
    # that would have them do not split the result: its layout is the same as that of operands with elements.
    nothing = any(0 in shape for shape in shapes)
    if nothing and op.combine:
        layouts = [laid and _kept_chains(names, laid, rule) for names, laid in zip(rule.operands, layouts, strict=True)]
    propagated = propagate(
        rule,
        shapes,
        layouts,
        weights,
        mesh.shape,
        combines=op.combine is not None and not nothing,
    )
    panelled = None
    if op.product and (layout is None or (isinstance(layout, NamedSharding) and not layout.spec.unreduced)):
        propagated, panelled = cheapest(op, kinds, rule, mesh, propagated)
    memory = memory_kind(tensors)
    targets = [
        NamedSharding(mesh, P(*chains), memory_kind=memory) if isinstance(k, (Aval, HostAval)) else None
        for k, chains in zip(kinds, propagated.operands, strict=True)
    ]
    sharding = NamedSharding(mesh, P(*propagated.result), memory_kind=memory)
    shape = propagated.shape if given_shape is None else given_shape
    value = aval(shape, result_dtype(op, kinds, params), sharding, committed)
    kept = aval(shape, value.dtype, sharding.with_spec(P(*propagated.kept)), committed)
    moves = [
        operand_transfer(k, t) if isinstance(k, (Aval, HostAval)) and t else None
        for k, t in zip(kinds, targets, strict=True)
    ]
    partial_axes = propagated.partial_axes if op.combine else ()
    target = kept
    if layout is not None and partial_axes:
        from shardtensor.interpreters.execution.placed_results import placed_result  # Few programs choose layouts.

        target = placed_result(op, value, partial_axes, layout)
    if target.unreduced:
        partial_axes = tuple([axis for axis in partial_axes if axis not in target.unreduced])
    if value.memory is not None:  # The whole product is one call, which reads the operands where they are.
        panelled = None
    if not panelled and not partial_axes and runs_on_first(value, moves):

        def strategy(value: Aval, moves: Moves) -> Run:
            contexts = _contexts(value, [m.target if m else None for m in moves], shapes)
            strategies = Strategies(op, value, params, moves, contexts)
            return strategies.whole() if value.backend.on_host else strategies.per_cell()

        def everywhere() -> Run:
            return _in_parts(strategy(value, moves), value, kept)

        return Plan(op, kept, (), *on_first(op.name, value, kept, moves, strategy, everywhere))

    @functools.cache
    def schedules() -> Sequence[Schedule]:
        if panelled:
            return [panelled.schedule(op.name)]
        return [combination_of(op, value, target, params, moves, partial_axes)] if partial_axes else ()

    chosen: list[Strategies] = []

    def execution() -> tuple[str, Run]:
        strategies = Strategies(op, value, params, moves, _contexts(value, targets, shapes), schedules)
        chosen.append(strategies)
        on_host, shared = value.backend.on_host, value.memory is not None
        if spans_hosts(value) and not target.unreduced:
            strategies.divide(rule)
        if on_host and not target.unreduced and (in_blocks := strategies.in_blocks(rule, partial_axes)):
            return "blocks", _in_parts(in_blocks, value, target)
        if panelled:
            return "panels", panelled.run(strategies)
        if target.unreduced:
            from shardtensor.interpreters.execution.placed_results import partial_results

            return "per shard", partial_results(strategies, partial_axes, target)
        if not partial_axes or not op.combine:
            run = strategies.whole() if on_host else strategies.per_cell()
            return "whole" if shared else "per shard", _in_parts(run, value, kept)
        monoid = MONOIDS[op.combine]
        if not shared and target is not kept:
            from shardtensor.interpreters.execution.placed_results import reduce_scatter

            return "reduce", reduce_scatter(strategies, monoid, partial_axes, target)
        reduce = strategies.reduce(monoid, partial_axes)
        # The partial result of every shard is needed only if a listener records the bytes of their combination.
        if shared and value.dtype.kind in monoid.exact:
            fast = strategies.whole() if on_host else strategies.per_cell()
        elif on_host:
            from shardtensor.interpreters.execution.one_pass import in_one_pass  # Importing the package needs none.

            fast = in_one_pass(strategies, monoid, partial_axes, reduce)
        elif op.product:
            # Programs on hosts do without it, and without the next one.
            from shardtensor.interpreters.execution.cell_products import product_by_cells

            return "reduce", _in_parts(product_by_cells(strategies, rule, partial_axes, reduce), value, target)
        else:
            from shardtensor.interpreters.execution.cell_reduction import reduce_by_cells

            return "reduce", _in_parts(reduce_by_cells(strategies, monoid, partial_axes, reduce), value, target)
        return "reduce", _in_parts(lambda operands: (reduce if is_recording() else fast)(operands), value, target)

    transfers = () if panelled else tuple(moves)
    return Plan(
        op, target, partial_axes, transfers, schedules, execution, lambda: chosen[0].of_buffers if chosen else None
    )


def _kept_chains(names: Sequence[str], chains: Chains, rule: Rule) -> Chains:
    """Returns the chains of an operand without those of the dimensions that the result lacks."""
    return tuple([chain if name in rule.result else () for name, chain in zip(names, chains, strict=True)])


def _in_parts(run: Run, value: Aval, target: Aval) -> Run:
    """Returns a plan whose result, of the aval ``value``, is split further, as in ``target``."""
    if target is value:
        return run
    if target.cells.grid.same(value.cells.grid):
        return lambda operands: tensor(target, Storage(buffers_of(run(operands))))
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


def result_dtype(op: Op, kinds: Sequence[Kind], params: Named) -> np.dtype[Any]:
    """Returns the dtype of the result, inferred by NumPy's function of that name, or by the composition that stands for
    it, from arrays with one element.

    An operator can declare its dtype. Otherwise, that of an operator with its own kernel and no combination is its
    ``dtype`` parameter, or that of its first array.

    Raises:
        ArgumentTypeError: the operator does not accept the dtypes.
    """
    wanted = None if params.get("dtype") is None else sharded_dtype(params["dtype"])
    if op.dtype is not None and not callable(op.dtype):
        declared: np.dtype[Any] = np.dtype(op.dtype)
        return declared
    if op.kernel and op.combine is None and op.dtype is None:
        if wanted is not None:
            return wanted
        return next(k.dtype for k in kinds if isinstance(k, (Aval, HostAval)))
    samples = [k if k is None else k(1) if isinstance(k, type) else np.ones((1,) * k.ndim, k.dtype) for k in kinds]
    # NumPy warns about a `correction` of 1 or more for one element.
    harmless = {name: value for name, value in params.items() if name != "correction"}
    try:
        with np.errstate(all="ignore"):
            return np.dtype(
                np.asarray((op.dtype or function_of(backend_of(HOST), op.name))(*samples, **harmless)).dtype
            )
    except (TypeError, ValueError) as error:
        dtypes = " and ".join(k.__name__ if isinstance(k, type) else str(k.dtype) for k in kinds if k is not None)
        raise ArgumentTypeError(f"{op.name}: does not take {dtypes} ({error})") from None


def check_integers(op: Op, operands: Operands) -> None:
    """Raises OverflowError if a Python int does not fit the dtype of the other operand of a ufunc, as NumPy does."""
    if any(type(x) is int for x in operands):
        getattr(np, op.name)(*[x if type(x) in SCALARS else np.empty(0, x.dtype) for x in operands])


def _contexts(value: Aval, targets: Sequence[NamedSharding | None], shapes: Sequence[Shape]) -> list[ShardContext]:
    grids = [None if t is None else t.grid(s) for t, s in zip(targets, shapes, strict=True)]
    grid = value.grid
    return [
        ShardContext(
            grid.box(k), tuple([() if g is None else g.box(k) for g in grids]), value.shape, tuple(shapes), value.dtype
        )
        for k in range(len(grid.devices))
    ]


# -- operators that only move data -----------------------------------------------------------------


def _movement_plan(op: Op, kinds: Sequence[Kind], params: Named, mesh: Mesh) -> Plan:
    assert op.movement is not None
    arrays = [k if isinstance(k, (Aval, HostAval)) else _as_array(k) for k in kinds]
    moved: DataMovement = op.movement(arrays, mesh, **params)
    dtype = np.result_type(*[k.dtype for k in arrays])
    value = aval(moved.shape, dtype, moved.sharding, any(k.committed for k in arrays if isinstance(k, Aval)))
    first = operand_transfer(arrays[0], moved.target) if moved.target else None
    sources, result = ([a.grid for a in arrays], value.grid) if moved.flat is None else ([moved.flat[0]], moved.flat[1])
    stays = moved.as_pieces or {d for grid in (*sources, result) for d in grid.devices[:2]} == {result.devices[0]}
    itemsizes = [k.dtype.itemsize for k in arrays]
    schedule = Move(moved.regions, sources, result, itemsizes, op.name, moved.explicit)

    def execution() -> tuple[str, Run]:
        held = [first.cells] if first else [a.cells for a in arrays]
        return "move", execute_movement(op, moved, value, first, schedule, held)

    return Plan(op, value, (), (first,) if first else (), lambda: () if stays else (schedule,), execution)


# -- creation functions ----------------------------------------------------------------------------


def _creation_plan(op: Op, kinds: Sequence[Kind], params: Named) -> Plan:
    device = params.pop("device")
    shape, dtype = op.rule(kinds, **params)
    committed = device is not None
    if op.prototype and device is None and isinstance(kinds[0], Aval):
        device, committed = kinds[0].sharding, kinds[0].committed
    sharding = as_sharding(default_mesh() if device is None else device, len(shape), op.name)
    value = aval(shape, dtype, sharding, committed)
    nothing = [None] * len(kinds)

    def execution() -> tuple[str, Run]:
        strategies = Strategies(op, value, params, nothing, _contexts(value, nothing, [()] * len(kinds)))
        fill = strategies.whole() if value.backend.on_host else strategies.per_cell()
        hosted = value.nbytes if value.backend.on_host else 0

        def run(operands: Operands) -> ShardedTensor:
            reserve(hosted)
            fills = operands[1:] if op.prototype else operands
            values = tuple([x if type(x) in SCALARS else gather(x, op.name)[()] for x in fills])
            return fill((None, *values) if op.prototype else values)  # type: ignore[no-any-return]

        return "create", run

    return Plan(op, value, (), (), tuple, execution)
