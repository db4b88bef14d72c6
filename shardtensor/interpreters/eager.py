"""The eager interpreter, the default: it executes each operator when it is called."""

from __future__ import annotations

import contextlib
from typing import Any

from shardtensor.communication.between_processes.processes import JOB, identify, note_error
from shardtensor.core import Function, Op, Operands, Params, set_default_interpreter
from shardtensor.interpreters.calls import NAMED, CallInterpreter, InferredView, array_operands, composed, raise_named
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.infer import INFER
from shardtensor.interpreters.small_results import small_call, small_result
from shardtensor.interpreters.views.scalar_elements import ScalarElement, compute_on_owners
from shardtensor.interpreters.views.views import copied_scalar
from shardtensor.interpreters.writes.writes import write
from shardtensor.tensor.ownership import READS, is_new, reading, track
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements


class EagerInterpreter(CallInterpreter):
    """Executes each operator when it is called."""

    __slots__ = ()

    def element(self, op: Op, operands: Operands, params: Params, view: InferredView, /) -> Any:
        """Returns an independent copy of an element, or of a scalar."""
        entry: list[Any] = [operands]  # As `reading` does, in less time.
        key = id(entry)
        READS[key] = entry
        try:
            copy = copied_scalar(operands[0], view)
            if type(copy._storage) is Storage:
                track(entry, copy)
            return copy
        finally:
            READS.pop(key, None)

    def composed(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of an operator that is composed of others: from whole host arrays if they are small."""
        if op.parts.small and (result := small_result(op, operands, params)) is not NotImplemented:
            return result
        return composed(op, operands, params)

    def algorithm(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Runs a distributed algorithm."""
        entry: list[Any] = [operands]
        key = id(entry)
        READS[key] = entry
        try:
            are_arrays = True
            for x in operands:
                if type(x) is not ShardedTensor:
                    are_arrays = False
                elif type(x._storage) is not Storage:
                    if op.parts.infer and lacks_elements(x):
                        return INFER.apply(op, operands, params)
                    are_arrays = are_arrays and not x._aval.unreduced
            if not are_arrays:
                operands = array_operands(op, operands)
            job = JOB.agreement
            since = job.count if job else 0
            result = op.parts.algorithm(*operands + params)  # type: ignore[misc]
            if job:  # Maps compare their arguments themselves.
                name = params[op.params.index("caller")] if "caller" in op.params else op.error_name
                identify(result, name, () if "spmd" in op.tags else operands, since)
            if "escapes" not in op.tags and "spmd" not in op.tags:  # Maps have adopted what their functions returned.
                track(entry, result)
            return result
        finally:
            READS.pop(key, None)

    def planned(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Runs a plan; its result is an independent tensor."""
        if op.is_ufunc and type(operands[0]) is ShardedTensor and type(operands[0]._storage) is ScalarElement:
            element = compute_on_owners(op, operands)
            if element is not None:
                return element
        entry: list[Any] = [operands]
        key = id(entry)
        READS[key] = entry
        try:
            plan, operands = planned(op, operands, params)
            result = plan.run(operands)
            storage = result._storage
            if type(storage) is not Storage or not storage.leases:
                if type(storage) is Storage and is_new(storage, operands):
                    storage.leases = ([],)
                else:
                    track(entry, result)
            return result
        finally:
            READS.pop(key, None)

    def note_error(self, op: Op, operands: Operands, params: Params, error: BaseException, /) -> None:
        """Notes, in a job, that a call has failed: the other processes may not have raised an error."""
        if JOB.agreement is not None:
            caller = params[op.params.index("caller")] if "spmd" in op.tags and "caller" in op.params else op.error_name
            note_error(caller, (operands, params), error)

    def compose(self, function: Function, host: Function, fused: bool, args: Any, kwargs: Any, /) -> Any:
        """Calls a function that is composed of operators; a small call is one of ``host``, or a program."""
        result = small_call(function, host, args, kwargs, fused=fused)
        return function(*args, **kwargs) if result is NotImplemented else result

    def write(self, out: ShardedTensor, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes one operator and writes its result into the tensor ``out``, in place where possible.

        Raises:
            ShardTensorError: the operator failed. The value of ``out`` is then unchanged.
        """
        try:
            # The base is not among them: the write itself holds its lock, and takes its value out of the handle.
            others = [x for x in operands if type(x) is ShardedTensor and x is not out]
            if others:
                base = out._base_and_view()[0]
                others = [x for x in others if getattr(x._storage, "base", x) is not base]
            with reading(others) if others else contextlib.nullcontext():
                write(out, op, operands, params, self.apply)
        except BaseException as error:
            self.note_error(op, (out, *operands), params, error)
            if isinstance(error, NAMED):
                raise_named(op, error)
            raise


EAGER = EagerInterpreter()
set_default_interpreter(EAGER)
