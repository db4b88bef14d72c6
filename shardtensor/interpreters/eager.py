"""The eager interpreter, the default: it executes each operator when it is called."""

from __future__ import annotations

from typing import Any

from shardtensor.core import Op, Operands, Params, raise_in_the_name_of, set_default_interpreter
from shardtensor.errors import RangeError, ShardTensorError
from shardtensor.host.memory_pool import out_of_memory
from shardtensor.interpreters.execution.plan_cache import run
from shardtensor.interpreters.mutation.views import ScalarElement, compute_on_owners, make_view
from shardtensor.interpreters.mutation.writes import write
from shardtensor.tensor.tensor import ShardedTensor


def apply(op: Op, operands: Operands, params: Params) -> Any:
    """Executes one operator and returns its result: a view of the first operand where NumPy returns one, otherwise an
    independent tensor.

    Raises:
        ShardTensorError: the operator failed; the message starts with its name, or with the name of the inner function
            that raised.
    """
    try:
        if op.view_spec and type(operands[0]) is ShardedTensor:
            view = make_view(op, operands[0], params)
            if view is not None:
                return view
        if op.is_ufunc and type(operands[0]) is ShardedTensor and type(operands[0]._storage) is ScalarElement:
            element = compute_on_owners(op, operands)
            if element is not None:
                return element
        if op.composite:
            result = op.composite(*(operands if not op.variadic else (operands,)), *params)
            if result is not NotImplemented:
                return result
        return run(op, operands, params)
    except ShardTensorError as error:
        raise_in_the_name_of(op, error)
    except OverflowError as error:
        raise _out_of_range(op, error) from None
    except MemoryError as error:
        raise out_of_memory(op.error_name, error) from None


def into(out: ShardedTensor, op: Op, operands: Operands, params: Params) -> None:
    """Executes one operator and writes its result into the tensor ``out``.

    Raises:
        ShardTensorError: as `apply` does. The value of ``out`` is then unchanged.
    """
    try:
        write(out, op, operands, params, apply)
    except ShardTensorError as error:
        raise_in_the_name_of(op, error)
    except OverflowError as error:
        raise _out_of_range(op, error) from None
    except MemoryError as error:
        raise out_of_memory(op.error_name, error) from None


def _out_of_range(op: Op, error: OverflowError) -> RangeError:
    """Converts NumPy's error for a Python number that a dtype cannot hold to an error with the operator's name."""
    return RangeError(f"{op.error_name}: {error}; use a dtype that holds it, or give an array, which is cast")


set_default_interpreter(apply, into)
