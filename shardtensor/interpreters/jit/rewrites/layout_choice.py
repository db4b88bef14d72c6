"""Layouts: the choice of layouts with which a program moves fewer bytes than eager mode.

Eager mode combines the partial results of a reduction at once, so that every device gets all of them. Where the result
is next transferred to a layout that splits it, each device combines only its part, which is a reduce-scatter. A write
of a function of slices is a stencil (see `shardtensor.interpreters.jit.grouping.stencil_writes`). An operand that
several equations need in another layout is transferred once, and partial sums that do not depend on one another are
added in one message. Eager's layouts are always a candidate, and the bytes are those of the inference of both, so that
a program never moves more. Each of these rewrites is a pass (see `shardtensor.interpreters.programs.passes`).
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
from shardtensor.interpreters.jit.grouping.stencil_writes import StencilPlan, stencils_in
from shardtensor.interpreters.jit.rewrites.common_sums import with_common_sums
from shardtensor.interpreters.jit.rewrites.common_transfers import with_common_transfers
from shardtensor.interpreters.jit.rewrites.copies import without_copies
from shardtensor.interpreters.jit.rewrites.deferred_sums import with_deferred_sums
from shardtensor.interpreters.programs.passes import PASSES, Setting, saving_transfers
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.interpreters.programs.replay import bytes_of, stand_in_of
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


def with_stencils(program: Program, _: Setting) -> Program:
    """Returns a program in which the writes that move fewer bytes as stencils are stencils."""
    equations: dict[int, Equation] = dict(enumerate(program.equations))
    changes = 0
    known: dict[Any, bool] = {}
    views = {e.results: e for e in program.equations if e.op.name == "view" and type(e.results) is Var}
    for k, inside, stencil in stencils_in(program):
        eager = [program.equations[i] for i in (*inside, k)]
        read = [views[v] for v in dict.fromkeys([v for e in eager for v in e.reads()]) if v in views]
        key = _form_of([*read, *eager])
        if key not in known:
            known[key] = StencilPlan(stencil, program).size < bytes_of([*read, *eager])
        if known[key]:
            equations[k] = stencil
            changes += 1
            for i in inside:
                del equations[i]
    return dataclasses.replace(program, equations=list(equations.values())) if changes else program


def _form_of(equations: Sequence[Equation]) -> Any:
    """Returns what the transfers of equations depend on, which is equal for the steps of a loop."""
    numbers: dict[Var, int] = {}

    def form(x: Any) -> Any:
        if type(x) is Var:
            return numbers.setdefault(x, len(numbers)), x.kind
        return id(x) if isinstance(x, np.ndarray) else (type(x), x)

    forms = []
    for e in equations:
        where = e.params if e.into is None else (e.into.boxes, e.into.chains)
        forms.append((e.op.name, where, e.writes, form(e.results), *map(form, e.operands)))
    return tuple(forms)


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


PASSES += [
    ("copies", without_copies),
    ("scattered sums", saving_transfers(with_scattered_sums)),
    ("deferred sums", saving_transfers(with_deferred_sums)),
    ("stencils", saving_transfers(with_stencils)),
    ("common transfers", saving_transfers(with_common_transfers)),
    ("common sums", saving_transfers(with_common_sums)),
]
