"""Common transfers: a value that several equations need in the same other layout is transferred once.

Eager mode transfers an operand for each operator that needs it elsewhere. The copy is kept until the last of the
equations that read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from shardtensor.communication.transfer import announce_reading, operand_transfer
from shardtensor.core import declared
from shardtensor.interpreters.programs.passes import Setting
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.interpreters.programs.replay import bytes_of, plan_of, result_of, with_operands
from shardtensor.sharding.layout import NamedSharding
from shardtensor.tensor.tensor import ShardedTensor, tensor_of
from shardtensor.tensor.value import Aval, aval


def common_transfer(x: Any, /, sharding: NamedSharding) -> None:
    """Transfers a value to the layout in which several equations need it, implicitly, as each of them would."""


COMMON_TRANSFER = declared(common_transfer, operands=("x",), error_name="jit")
"""The operator of common transfers. It is not in OPS, since only rewritten programs have it."""


def _infer(x: ShardedTensor, sharding: NamedSharding) -> Aval:
    announce_reading(x)
    operand_transfer(x._aval, sharding).infer("common_transfer")
    return aval(x.shape, x.dtype, sharding, x._aval.committed)


def _transfer(x: ShardedTensor, sharding: NamedSharding) -> ShardedTensor:
    value = aval(x.shape, x.dtype, sharding, x._aval.committed)
    return tensor_of(value, tuple(operand_transfer(x._aval, sharding).buffers(x, "common_transfer")))


COMMON_TRANSFER.parts.infer, COMMON_TRANSFER.parts.algorithm = _infer, _transfer


def with_common_transfers(program: Program, _: Setting) -> Program:
    """Returns a program in which no value is transferred to one layout for several equations."""
    count = program.next_number()
    users_of: dict[tuple[Var, NamedSharding], list[int]] = {}
    for k, equation in enumerate(program.equations):
        for key in _transferred(equation):
            users_of.setdefault(key, []).append(k)
    equations = list(program.equations)
    before: dict[int, list[Equation]] = {}
    for (v, target), users in users_of.items():
        if len(users) < 2 or any(sum(x == v for x, _ in _transferred(equations[k])) != 1 for k in users):
            continue
        assert isinstance(v.kind, Aval)
        moved = Var(count, aval(v.kind.shape, v.kind.dtype, target, v.kind.committed))
        changed = {k: with_operands(equations[k], {v: moved}) for k in users}
        if any(result_of(e) != e.results.kind for e in changed.values()):
            continue
        once = Equation(COMMON_TRANSFER, (v,), (target,), moved)
        # With an operand in another layout, a plan may add partial sums of more devices.
        if bytes_of([once, *changed.values()]) >= bytes_of([equations[k] for k in users]):
            continue
        count += 1
        before.setdefault(users[0], []).append(once)
        for k, e in changed.items():
            equations[k] = e
    new_equations = [e for k, equation in enumerate(equations) for e in (*before.get(k, ()), equation)]
    return dataclasses.replace(program, equations=new_equations) if before else program


def _transferred(equation: Equation) -> list[tuple[Var, NamedSharding]]:
    """Returns the tensors that an equation transfers between devices, each with the layout in which it needs them."""
    if equation.writes or equation.programs or equation.op.name == "view":
        return []
    plan = plan_of(equation)
    if plan is None or plan.result.spans or plan.result.unreduced:
        return []
    pairs = zip(equation.operands, plan.transfers, strict=False)
    moved = [
        (x, transfer.target)
        for x, transfer in pairs
        if type(x) is Var
        and isinstance(x.kind, Aval)
        and not x.kind.offloaded
        and transfer is not None
        and not transfer.stays
        and transfer.movement.size
    ]
    return list(dict.fromkeys(moved))
