"""Scattered sums: reductions that leave their results in the layouts to which they are next transferred.

Eager mode combines the partial results of a reduction at once, so that every device gets all of them. Where the result
is next transferred to a layout that splits it, each device combines only its part, which is a reduce-scatter. Eager's
layouts are always a candidate, and the bytes are those of the inference of both, so that a program never moves more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from shardtensor.communication.transfer_log import TransferLog, recorded_by
from shardtensor.core import interpreting
from shardtensor.errors import ShardTensorError
from shardtensor.interpreters.infer import INFER
from shardtensor.interpreters.programs.passes import Setting
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.interpreters.programs.replay import stand_in_of
from shardtensor.tensor.tensor import ShardedTensor


def with_scattered_sums(program: Program, _: Setting) -> Program:
    """Returns a program whose reductions leave their results in the layouts to which they are next transferred, where
    that moves fewer bytes; the program itself if there are none.
    """
    count = program.next_number()
    users, makers = program.users(), program.makers()
    equations = list(program.equations)
    changes = 0
    for k, transfer in enumerate(equations):
        x = transfer.operands[0] if transfer.op.name == "transfer_to" else None
        if type(x) is not Var or len(users[x]) != 1 or x not in makers:
            continue
        changed = _scattered(equations[makers[x]], transfer, count + changes)
        if changed is not None:
            equations[makers[x]], equations[k] = changed
            changes += 1
    return dataclasses.replace(program, equations=equations) if changes else program


def _scattered(reduction: Equation, transfer: Equation, number: int) -> tuple[Equation, Equation] | None:
    """Returns a reduction into the layout of the transfer of its result, and that transfer; None if the operator has no
    such form, or if eager's moves as few bytes.
    """
    op = reduction.op
    placed = None if op.params[-1:] == ("layout",) or reduction.writes or reduction.programs else op.placed
    if placed is None or reduction.into is not None or transfer.params[0].spec.unreduced:
        return None
    params = (*reduction.params, transfer.params[0])
    operands = [stand_in_of(x) if type(x) is Var else x for x in reduction.operands]
    try:
        before, _ = _inferred([(reduction, operands, reduction.params), (transfer, None, transfer.params)])
        after, results = _inferred(
            [(dataclasses.replace(reduction, op=placed), operands, params), (transfer, None, transfer.params)]
        )
    except ShardTensorError:
        return None  # The layout does not fit the result: the transfer itself raises the error.
    if after >= before:
        return None
    value = Var(number, results[0]._aval)
    first = dataclasses.replace(reduction, op=placed, params=params, results=value)
    return first, dataclasses.replace(transfer, operands=(value, *transfer.operands[1:]))


def _inferred(calls: Sequence[tuple[Equation, Any, Any]]) -> tuple[int, list[ShardedTensor]]:
    """Returns the bytes of calls, of which each takes the result of the one before it unless operands are given, and
    their results.
    """
    log = TransferLog()
    results: list[Any] = []
    with interpreting(INFER), recorded_by(log):
        for equation, inputs, params in calls:
            operands = results[-1:] if inputs is None else inputs
            results.append(INFER.apply(equation.op, tuple(operands), params))
    return log.bytes, results
