"""The eager interpreter, the default: it executes each operator when it is called."""

from __future__ import annotations

import contextlib
from sys import modules
from typing import Any

from shardtensor.communication.processes import JOB, identify, note_error
from shardtensor.core import Function, Interpreter, Op, Operands, Params, set_default_interpreter
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.execution.small_floats import has_small_floats, in_wide
from shardtensor.interpreters.infer import INFER, NAMED, array_operands, raise_named
from shardtensor.interpreters.mutation.scalar_elements import ScalarElement, compute_on_owners
from shardtensor.interpreters.mutation.views import make_view
from shardtensor.interpreters.mutation.writes import write
from shardtensor.interpreters.small_results import small_call, small_result
from shardtensor.tensor.ownership import READS, is_new, reading, track
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements


class EagerInterpreter(Interpreter):
    """Executes each operator when it is called.

    Every error of an operator starts with its name, or with the name of the inner function that raised.
    """

    __slots__ = ()

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one operator and returns its result: a view of the first operand where NumPy returns one, otherwise
        an independent tensor.

        Raises:
            ShardTensorError: the operator failed.
        """
        entry: list[Any] = [operands]
        key = id(entry)
        READS[key] = entry
        try:
            if op.view_spec and type(operands[0]) is ShardedTensor:
                view = make_view(op, operands[0], params)
                if view is not None:
                    if type(view._storage) is Storage:  # A copy of a scalar.
                        track(entry, view)
                    return view
            if op.is_ufunc and type(operands[0]) is ShardedTensor and type(operands[0]._storage) is ScalarElement:
                element = compute_on_owners(op, operands)
                if element is not None:
                    return element
            if (op.composite or op.algorithm) and "ml_dtypes" in modules and has_small_floats(op, operands, params):
                return in_wide(self.apply, op, operands, params)
            if op.composite:
                if op.small and (small := small_result(op, operands, params)) is not NotImplemented:
                    return small
                result = op.composite(*(operands if not op.variadic else (operands,)), *params)
                if result is not NotImplemented:
                    return result
            if op.algorithm:
                for x in operands:
                    if type(x) is not ShardedTensor or x._aval.unreduced:
                        operands = array_operands(op, operands)
                        break
                if op.infer and any(map(lacks_elements, operands)):
                    return INFER.apply(op, operands, params)
                job = JOB.agreement
                since = job.count if job else 0
                result = op.algorithm(*operands + params)
                if job:  # Maps compare their arguments themselves.
                    name = params[op.params.index("caller")] if "caller" in op.params else op.error_name
                    identify(result, name, () if op.spmd else operands, since)
                if not op.escapes:
                    track(entry, result, new=not op.spmd)  # Maps have adopted what their functions returned.
                return result
            plan, operands = planned(op, operands, params)
            result = plan.run(operands)
            storage = result._storage
            if type(storage) is not Storage or not storage.leases:
                if type(storage) is Storage and is_new(storage, operands):
                    storage.leases = ([],)
                else:
                    track(entry, result)
            return result
        except BaseException as error:  # Raised again: other processes may not have raised it.
            self.note_error(op, operands, params, error)
            if isinstance(error, NAMED):
                raise_named(op, error)
            raise
        finally:
            READS.pop(key, None)

    def note_error(self, op: Op, operands: Operands, params: Params, error: BaseException) -> None:
        """Notes, in a job, that a call has failed: the other processes may not have raised an error."""
        if JOB.agreement is not None:
            caller = params[op.params.index("caller")] if op.spmd and "caller" in op.params else op.error_name
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
        except BaseException as error:  # See `apply`.
            self.note_error(op, (out, *operands), params, error)
            if isinstance(error, NAMED):
                raise_named(op, error)
            raise


EAGER = EagerInterpreter()
set_default_interpreter(EAGER)
