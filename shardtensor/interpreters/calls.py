"""What a call of an operator is: a view, an element, a composition of other operators, an algorithm, or a plan.

Interpreters whose operands are sharded tensors are classes of `CallInterpreter`, with a method for each of these kinds.
"""

from __future__ import annotations

import abc
from sys import modules
from typing import Any, NoReturn

import numpy as np

from shardtensor.core import Interpreter, Op, Operands, Params, raise_in_the_name_of
from shardtensor.errors import LinearAlgebraError, RangeError, ShardTensorError
from shardtensor.host.memory_pool import out_of_memory
from shardtensor.interpreters.execution.small_float_calls import has_small_floats, in_wide
from shardtensor.interpreters.views.views import View, infer_view
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.operands import as_operand
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval, summed

InferredView = tuple[ShardedTensor, ViewSpec, Aval, bool]
"""A base, the view spec of an element or of a scalar, its aval, and whether it is an element (see `infer_view`)."""


class CallInterpreter(Interpreter):
    """An interpreter with a method for each kind of call.

    A class defines the methods `element`, `algorithm` and `planned`, of which several may be the same function.
    """

    __slots__ = ()

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of one call by the method of its kind; a view where NumPy returns one.

        Every error of an operator starts with its name, or with the name of the inner function that raised.

        Raises:
            ShardTensorError: the operator failed.
        """
        parts = op.parts
        try:
            if parts.view_spec and type(operands[0]) is ShardedTensor:
                view = infer_view(op, operands[0], params)
                if view is not None:
                    base, view_spec, value, is_element = view
                    if is_element or operands[0]._is_scalar:
                        return self.element(op, operands, params, view)
                    return tensor(value, View(base, view_spec))
            if parts.composite or parts.algorithm:
                if "ml_dtypes" in modules and has_small_floats(op, operands, params):
                    return in_wide(self.apply, op, operands, params)
                if parts.composite:
                    result = self.composed(op, operands, params)
                    if result is not NotImplemented:
                        return result
                if parts.algorithm:
                    return self.algorithm(op, operands, params)
            return self.planned(op, operands, params)
        except BaseException as error:
            self.note_error(op, operands, params, error)
            if isinstance(error, NAMED):
                raise_named(op, error)
            raise

    @abc.abstractmethod
    def element(self, op: Op, operands: Operands, params: Params, view: InferredView, /) -> Any:
        """Returns a copy of an element, or of a scalar: neither is ever written, so that no view is needed.

        Raises:
            ShardTensorError: the operator failed.
        """

    def composed(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of an operator that is composed of others, which it calls; NotImplemented if the operator
        itself has to run.

        Raises:
            ShardTensorError: the operator failed.
        """
        return composed(op, operands, params)

    @abc.abstractmethod
    def algorithm(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of an operator that has a distributed algorithm.

        Raises:
            ShardTensorError: the operator failed.
        """

    @abc.abstractmethod
    def planned(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Returns the result of an operator whose rule determines the plan.

        Raises:
            ShardTensorError: the operator failed.
        """

    def note_error(self, op: Op, operands: Operands, params: Params, error: BaseException, /) -> None:
        """Notes that a call has failed, before the error is raised in the name of the operator."""


def composed(op: Op, operands: Operands, params: Params) -> Any:
    """Calls the function that composes an operator of others. It returns NotImplemented if the operator itself has to
    run.
    """
    return op.parts.composite(*((operands,) if op.signature.variadic else operands), *params)  # type: ignore[misc]


def array_operands(op: Op, operands: Operands) -> Operands:
    """Returns the operands of an operator with an algorithm, of which those that are not pytrees are converted to
    arrays or scalars.
    """
    if op.signature.variadic:
        return operands
    arrays = list(operands)
    for k, x in enumerate(arrays):
        if type(x) is not ShardedTensor or x._aval.unreduced:
            arrays[k] = x if op.operands[k] in op.signature.trees else _added(op, as_operand(x, op.error_name))
    return tuple(arrays)


def _added(op: Op, x: Any) -> Any:
    """Returns an unreduced operand with the aval of the sum, to which reading it adds the partial sums."""
    if type(x) is ShardedTensor and x._aval.unreduced and "takes partial sums" not in op.tags:
        return tensor(summed(x._aval), x._storage)
    return x


NAMED = (ShardTensorError, OverflowError, MemoryError, np.linalg.LinAlgError)
"""The errors that get the name of the operator."""


def raise_named(op: Op, error: ShardTensorError | OverflowError | MemoryError | np.linalg.LinAlgError) -> NoReturn:
    """Raises an error of the library or of NumPy as an error that names the operator, unless a program raised it."""
    try:
        if "spmd" in op.tags:
            raise error
        if isinstance(error, ShardTensorError):
            raise_in_the_name_of(op, error)
        if isinstance(error, MemoryError):
            raise out_of_memory(op.error_name, error) from None
        if isinstance(error, np.linalg.LinAlgError):
            raise LinearAlgebraError(f"{op.error_name}: {error}") from None
        raise RangeError(
            f"{op.error_name}: {error}; use a dtype that holds it, or give an array, which is cast"
        ) from None
    finally:
        del error  # The reference cycle of the error and this frame would keep the operands alive.
