"""The interpreter that is outermost while a log of transfers is open, or a guard is active.

Each call is inferred first: the inference records its transfers, and raises what the guard forbids before anything is
computed. Then the call is executed, which records nothing but what it copies. Execution therefore does not depend on
whether a log is open. What follows from elements cannot be inferred: such calls announce their transfers as they run.
"""

from __future__ import annotations

import functools
from typing import Any

from shardtensor.communication.transfer_log import announced, is_recording, observed_by
from shardtensor.core import Function, Op, Operands, Params, executing, set_outermost
from shardtensor.interpreters.calls import CallInterpreter
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.infer import INFER, inferring, stand_ins
from shardtensor.interpreters.views.views import stand_in
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements


class RecordingInterpreter(CallInterpreter):
    """Infers each call while the transfers are recorded, and then executes it."""

    __slots__ = ()

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of ``op``, as the eager interpreter does, after its transfers have been recorded.

        Raises:
            TransferError: a guard forbids one of the transfers; nothing has been computed.
            ShardTensorError: the operator failed.
        """
        return super().apply(op, operands, params) if is_recording() else EAGER.apply(op, operands, params)

    def planned(self, op: Op, operands: Operands, params: Params, *_: Any) -> Any:
        """Infers and executes a call."""
        if _announces_itself(op, operands):
            return EAGER.apply(_announcing(op) if op.parts.announcing else op, operands, params)
        with inferring():
            INFER.apply(op, stand_ins(op, operands, {}), params)
        with announced(), executing():
            return EAGER.apply(op, operands, params)

    element = algorithm = planned
    note_error = EAGER.note_error

    def write(self, out: ShardedTensor, op: Op, operands: Operands, params: Params, /) -> None:
        """Writes the result of ``op`` into ``out``, after the transfers have been recorded.

        Raises:
            TransferError: a guard forbids one of the transfers; nothing has been written.
            ShardTensorError: the operator failed. The value of ``out`` is then unchanged.
        """
        if not is_recording() or _announces_itself(op, (out, *operands)):
            EAGER.write(out, op, operands, params)
            return
        try:
            known: dict[int, ShardedTensor] = {}
            with inferring():
                INFER.write(stand_in(out, known), op, stand_ins(op, operands, known), params)
        except BaseException as error:
            self.note_error(op, (out, *operands), params, error)
            raise
        with announced(), executing():
            EAGER.write(out, op, operands, params)

    def run(self, program: Any, inputs: Any, /) -> Any:
        """Runs a program after its transfers have been recorded."""
        if not is_recording():
            return program.execute(inputs)
        with inferring():
            program.infer(inputs)
        with announced(), executing():
            return program.execute(inputs)

    def compose(self, function: Function, host: Function, fused: bool, args: Any, kwargs: Any, /) -> Any:
        """Calls a function that is composed of operators, each of which is recorded."""
        if not is_recording():
            return EAGER.compose(function, host, fused, args, kwargs)
        return function(*args, **kwargs)


@functools.cache
def _announcing(op: Op) -> Op:
    """Returns an operator with the algorithm that records its transfers as it runs."""
    return op.changed(parts=op.parts.changed(algorithm=op.parts.announcing))


def _announces_itself(op: Op, operands: Operands) -> bool:
    """Whether the transfers of a call are recorded as it runs: they follow from elements or from what programs do, or
    there are no elements, and running the call is inferring it.
    """
    return (
        "escapes" in op.tags
        or "spmd" in op.tags
        or op.parts.announcing is not None
        or any(map(lacks_elements, leaves(operands)))
    )


RECORDING = RecordingInterpreter()
observed_by(lambda is_observed: set_outermost(RECORDING if is_observed else None))
