"""Layouts: the choice of layouts with which a program moves fewer bytes than eager mode.

Eager mode combines the partial results of a reduction at once, so that every device gets all of them. Where the result
is next transferred to a layout that splits it, each device combines only its part, which is a reduce-scatter. Eager's
layouts are always a candidate, and the bytes are those of the inference of both, so that a program never moves more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.communication.transfer_log import TransferLog, recorded_by
from shardtensor.core import interpreting
from shardtensor.errors import ShardTensorError
from shardtensor.interpreters.infer import INFER
from shardtensor.interpreters.jit.program import Equation, Program, ValueKind, Var
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.tensor import ShardedTensor, without_elements
from shardtensor.tensor.value import Aval


def with_layouts(program: Program, count: int) -> Program:
    """Returns a program with the same results, in which partial results are combined directly into the layout to which
    they are transferred, where that moves fewer bytes.

    Args:
        program: the program.
        count: the number from which on numbers of values are free.
    """
    uses: dict[Var, int] = {}
    for v in [*program.outputs, *program.writes.values(), *[v for e in program.equations for v in e.reads()]]:
        uses[v] = uses.get(v, 0) + 1
    made = {e.results: k for k, e in enumerate(program.equations) if type(e.results) is Var}
    equations = list(program.equations)
    for k, transfer in enumerate(equations):
        x = transfer.operands[0] if transfer.op.name == "transfer_to" else None
        if type(x) is not Var or uses.get(x) != 1 or x not in made:
            continue
        changed = _scattered(equations[made[x]], transfer, count)
        if changed is not None:
            equations[made[x]], equations[k] = changed
            count += 1
    return dataclasses.replace(program, equations=equations)


def _scattered(reduction: Equation, transfer: Equation, number: int) -> tuple[Equation, Equation] | None:
    """Returns a reduction into the layout of the transfer of its result, and that transfer; None if the operator has no
    such form, or if eager's moves as few bytes.
    """
    op = reduction.op
    placed = None if op.params[-1:] == ("layout",) or reduction.writes or reduction.programs else op.placed
    if placed is None or reduction.into is not None or transfer.params[0].spec.unreduced:
        return None
    params = (*reduction.params, transfer.params[0])
    given = [_stand_in(x) for x in reduction.operands]
    try:
        before, _ = _inferred([(reduction, given, reduction.params), (transfer, None, transfer.params)])
        after, results = _inferred(
            [(dataclasses.replace(reduction, op=placed), given, params), (transfer, None, transfer.params)]
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
        for equation, given, params in calls:
            operands = results[-1:] if given is None else given
            results.append(INFER.apply(equation.op, tuple(operands), params))
    return log.bytes, results


def _stand_in(x: Any) -> Any:
    """Returns what inference takes for an operand."""
    if type(x) is not Var:
        return x
    kind: ValueKind = x.kind
    if isinstance(kind, Aval):
        return without_elements(kind)
    return np.empty(kind.shape, kind.dtype) if isinstance(kind, HostAval) else kind(1)
