"""The planner: it chooses the mesh of an operator, and makes the plan of one with a rule, a movement or a creation."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import processes_of
from shardtensor.communication.between_processes.processes import described, note
from shardtensor.communication.schedules import Move, Schedule
from shardtensor.communication.transfer import gather, operand_transfer
from shardtensor.core import Op, Operands, Params
from shardtensor.errors import ArgumentTypeError
from shardtensor.functions.building.data_movement import DataMovement
from shardtensor.host.memory_pool import reserve
from shardtensor.interpreters.execution.movement import copies, execute_movement
from shardtensor.interpreters.execution.plan import Kind, Plan, contexts_of
from shardtensor.interpreters.execution.rule_plan import rule_plan
from shardtensor.interpreters.execution.strategies import Named, Run, Strategies
from shardtensor.sharding.layout import as_sharding
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.tensor.identity import identity_of
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.tensor import (
    SCALARS,
    ShardedTensor,
)
from shardtensor.tensor.value import Aval, aval


def make_plan(op: Op, kinds: Sequence[Kind], params: Params) -> Plan:
    """Returns the plan of an operator, whose calls all processes compare if it concerns several; see `_plan`."""
    plan = _plan(op, kinds, params)
    known = [k.sharding.mesh.flat for k in (plan.result, *kinds) if isinstance(k, Aval)]
    if len(processes_of(tuple(itertools.chain.from_iterable(known)))) > 1:
        run = plan.run
        text = plan.text = _text_of_calls(op, kinds, params)

        def noted(operands: Operands) -> Any:
            number = note(text(operands))
            result = run(operands)
            result._identity = number
            return result

        plan.run = noted
    return plan


def _text_of_calls(op: Op, kinds: Sequence[Kind], params: Params) -> Callable[[Operands], str]:
    """Returns the function that gives the text of a call from its operands, of which it reads the Python scalars, and
    the identities of tensors; an identity may also be given itself.
    """
    texts = [described(x).replace("%", "%%") for x in (*kinds, *params)]
    read = [n for n, kind in enumerate(kinds) if isinstance(kind, (type, Aval))]
    for n in read:
        texts[n] = "%s" if isinstance(kinds[n], type) else f"{texts[n]} #%s"
    form = f"{op.name}({', '.join(texts)})"
    numbered = form.replace("#%s", "#%d")

    def text(operands: Operands) -> str:
        return form % tuple([_text_of_operand(operands[n]) for n in read])

    def text_of_tensors(operands: Operands) -> str:
        try:
            return numbered % tuple(map(_known_identity, operands))
        except (AttributeError, TypeError):  # An identity is not a number: the tensor is a view or a copy, for example.
            return text(operands)

    return text_of_tensors if all(isinstance(kind, Aval) for kind in kinds) else text


_known_identity = operator.attrgetter("_identity")


def _text_of_operand(x: Any) -> Any:
    """Returns the identity of a tensor, which may also be given itself, and the text of a scalar."""
    if type(x) is ShardedTensor:
        return identity_of(x)
    return x if type(x) is str else repr(x)


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
    if not op.signature.variadic:
        for name, kind in zip(op.operands, kinds, strict=True):
            if kind is None and name not in op.signature.optional:
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
    return _movement_plan(op, kinds, named, mesh) if op.parts.movement else rule_plan(op, kinds, named, mesh, layout)


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


def check_integers(op: Op, operands: Operands) -> None:
    """Raises OverflowError if a Python int does not fit the dtype of the other operand of a ufunc, as NumPy does."""
    if any(type(x) is int for x in operands):
        getattr(np, op.name)(*[x if type(x) in SCALARS else np.empty(0, x.dtype) for x in operands])


# -- operators that only move data -----------------------------------------------------------------


def _movement_plan(op: Op, kinds: Sequence[Kind], params: Named, mesh: Mesh) -> Plan:
    assert op.parts.movement is not None
    arrays = [k if isinstance(k, (Aval, HostAval)) else _as_array(k) for k in kinds]
    moved: DataMovement = op.parts.movement(arrays, mesh, **params)
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

    def copied() -> bool:
        return copies(moved, value, schedule, [first.cells] if first else [a.cells for a in arrays])

    schedules: Callable[[], Sequence[Schedule]] = lambda: () if stays else (schedule,)  # noqa: E731
    return Plan(op, value, (), (first,) if first else (), schedules, execution, copied=copied)


# -- creation functions ----------------------------------------------------------------------------


def _creation_plan(op: Op, kinds: Sequence[Kind], params: Named) -> Plan:
    device = params.pop("device")
    shape, dtype = op.rule(kinds, **params)
    committed = device is not None
    if "prototype" in op.tags and device is None and isinstance(kinds[0], Aval):
        device, committed = kinds[0].sharding, kinds[0].committed
    sharding = as_sharding(default_mesh() if device is None else device, len(shape), op.name)
    value = aval(shape, dtype, sharding, committed)
    nothing = [None] * len(kinds)

    def execution() -> tuple[str, Run]:
        strategies = Strategies(op, value, params, nothing, contexts_of(value, nothing, [()] * len(kinds)))
        fill = strategies.whole() if value.backend.on_host else strategies.per_cell()
        hosted = value.nbytes if value.backend.on_host else 0

        def run(operands: Operands) -> ShardedTensor:
            reserve(hosted)
            fills = operands[1:] if "prototype" in op.tags else operands
            values = tuple([x if type(x) in SCALARS else gather(x, op.name)[()] for x in fills])
            return fill((None, *values) if "prototype" in op.tags else values)  # type: ignore[no-any-return]

        return "create", run

    return Plan(op, value, (), (), tuple, execution)
