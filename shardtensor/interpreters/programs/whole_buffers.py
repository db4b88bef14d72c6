"""Small results of compositions that NumPy's functions do not compute with the same bits: the operators of a call are
recorded once, and their plans are run again.

The calls of a composition take several times as long as its plans on small arrays: shapes and dtypes are checked,
masks are built, and every operator is dispatched. Which plans run follows from the avals of the operands alone, if no
element is read on the way. So they are recorded for each combination of function, parameters and avals.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.communication.transfer import whole_array
from shardtensor.communication.transfer_log import recorded_by
from shardtensor.core import Function, Interpreter, Op, Operands, Params, interpreting
from shardtensor.errors import ConcretizationError
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.infer import INFER, array_operands
from shardtensor.sharding.view_spec import whole_view_spec
from shardtensor.tensor.pytree import map_items
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, mark_array, tensor, without_elements
from shardtensor.tensor.value import Aval


@dataclasses.dataclass(slots=True)
class Step:
    """A step of a composition.

    Attributes:
        run: computes a tensor, or several, given a tuple of operands.
        positions: the positions of the operands among the values so far.
        of_buffers: computes the buffer of the tensor from those of the operands, as its arguments, or returns None, so
            that ``run`` is called. None if there is no such function.
        value: the aval of the tensor, if ``of_buffers`` is given.
        is_array: whether the tensor is a 0-d array, and no scalar.
        is_new: whether ``of_buffers`` returns memory that nothing else holds.
        ignored: the floating-point errors that the composition ignores.
    """

    run: Function
    positions: tuple[int, ...]
    of_buffers: Function | None
    value: Aval | None
    is_array: bool
    is_new: bool
    ignored: dict[str, Any]


class Recording:
    """The steps of a composition.

    A step that computes whole buffers of the host gets and returns these, since making tensors of intermediate values
    takes as long as computing them.

    Attributes:
        constants: the operands of steps that are no tensors, such as scalars and index arrays.
        steps: the steps; each appends a value to the operands of the composition and the constants.
        result: the position of the result, or nested tuples and lists of positions.
    """

    def __init__(self, constants: Sequence[Any], steps: Sequence[Step], result: Any) -> None:
        self.constants = constants
        self.steps = steps
        self.result = result
        # Steps that ignore the same errors follow each other.
        self._groups = [(kinds, list(some)) for kinds, some in itertools.groupby(steps, lambda step: step.ignored)]

    def run(self, operands: Sequence[ShardedTensor]) -> Any:
        """Returns the result for other operands of the same avals."""
        values = _Values([*operands, *self.constants])
        for ignored, steps in self._groups:
            if ignored:
                with np.errstate(**ignored):
                    values.compute(steps)
            else:
                values.compute(steps)
        return map_items(values.tensor, self.result)


class _Values:
    """The values of a call so far, as tensors, as buffers, or as both.

    Args:
        given: the operands and the constants.
    """

    __slots__ = ("_buffers", "_steps", "_tensors")

    def __init__(self, given: list[Any]) -> None:
        self._tensors = given
        self._buffers: list[Any] = [None] * len(given)
        self._steps: list[Step | None] = [None] * len(given)

    def compute(self, steps: Sequence[Step]) -> None:
        """Runs steps, and appends their values."""
        tensors, buffers = self._tensors, self._buffers
        for step in steps:
            made = None
            if step.of_buffers is not None:
                arrays = []
                for i in step.positions:
                    array = buffers[i]
                    arrays.append(self._buffer(i) if array is None else array)
                made = step.of_buffers(*arrays)
            tensors.append(None if made is not None else step.run(tuple([self.tensor(i) for i in step.positions])))
            buffers.append(made)
            self._steps.append(step)

    def _buffer(self, i: int) -> Any:
        x = self._tensors[i]
        if type(x) is ShardedTensor:
            x = self._buffers[i] = whole_array(x)
        return x

    def tensor(self, i: int) -> Any:
        """Returns a value as a tensor, or a constant."""
        x = self._tensors[i]
        if x is None and (step := self._steps[i]) is not None and step.value is not None:
            x = tensor(step.value, Storage((self._buffers[i],), ([],) if step.is_new else ()))
            x = self._tensors[i] = mark_array(x) if step.is_array else x
        return x


def recording_of(function: Function, args: Any, kwargs: Any, avals: Sequence[Any]) -> Recording | None:
    """Returns the steps of a composition; None if it reads elements, or writes.

    Args:
        function: the composition.
        args, kwargs: its arguments; tensors in them, which may be nested in lists, have the ``avals``:
            those of ``kwargs`` first.

    Raises:
        ShardTensorError: the composition raises it.
    """
    operands = [without_elements(value) for value in avals]
    remaining = iter(operands)

    def stand_in(x: Any) -> Any:
        if type(x) is np.ndarray:  # The composition may read its elements.
            raise NotRecordedError
        return next(remaining) if type(x) is ShardedTensor else x

    recorder = _Recorder(operands)
    try:
        named, arrays = {name: map_items(stand_in, x) for name, x in kwargs.items()}, map_items(stand_in, args)
        with interpreting(recorder), recorded_by(), np.errstate(all="warn"):
            result = function(*arrays, **named)
            map_items(functools.partial(_check_no_view, operands), result)
            result = map_items(recorder.position, result)
    except (ConcretizationError, NotRecordedError):
        return None
    return recorder.finished(result)


def _check_no_view(operands: Sequence[ShardedTensor], x: Any) -> None:
    """Raises NotRecordedError for a view of an operand: writes to it are visible in the operand."""
    base = getattr(getattr(x, "_storage", None), "base", x)
    if any(base is operand for operand in operands):
        raise NotRecordedError


class NotRecordedError(Exception):
    """The operators of a call are not known from the avals alone, or cannot be run again one by one."""


class _Recorder(Interpreter):
    """Records the plans of operators, whose results have no elements."""

    def __init__(self, operands: Sequence[ShardedTensor]) -> None:
        self._count = len(operands)
        self._made: list[Any] = [*operands]  # Kept, so that no other tensor gets the identity of one of them.
        self._positions = {id(x): i for i, x in enumerate(operands)}
        self._constants: list[Any] = []
        self._steps: list[Step] = []

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """See `Interpreter`.

        Raises:
            NotRecordedError: the result of the operator leaves the library.
        """
        if op.composite and not (op.view_spec and type(operands[0]) is ShardedTensor):
            result = op.composite(*(operands if not op.variadic else (operands,)), *params)
            if result is not NotImplemented:
                return result
        made = INFER.apply(op, operands, params)
        of_buffers, is_new = None, False
        if op.view_spec and type(operands[0]) is ShardedTensor and hasattr(made._storage, "base"):
            operands = operands[:1]
            of_buffers = _view_of(op, operands[0], params, made._aval)
            run: Function = functools.partial(_run_view, of_buffers, made._aval)
        elif op.escapes or op.spmd:
            raise NotRecordedError
        elif op.algorithm:
            operands, run = array_operands(op, operands), functools.partial(_algorithm, op, params)
        else:
            plan, operands = planned(op, operands, params)
            run, of_buffers = plan.run, plan.of_buffers()
            is_new = op.is_ufunc or bool(plan.partial_axes)  # See `shardtensor.interpreters.execution.one_pass`.
        if not all(_is_one_buffer(x._aval) for x in (*operands, made) if type(x) is ShardedTensor):
            of_buffers = None
        self._add(run, [self._slot(x) for x in operands], made, of_buffers, is_new)
        if isinstance(made, tuple):
            for k, item in enumerate(made):
                self._add(functools.partial(_item, k), [self.position(made)], item)
        return made

    def _add(
        self, run: Function, slots: list[int], made: Any, of_buffers: Function | None = None, is_new: bool = False
    ) -> None:
        ignored = {kind: mode for kind, mode in np.geterr().items() if mode == "ignore"}
        value = made._aval if of_buffers else None
        is_array = value is not None and not value.ndim and not made._is_scalar
        self._steps.append(Step(run, tuple(slots), of_buffers, value, is_array, is_new, ignored))
        self._positions[id(made)] = -len(self._steps)
        self._made.append(made)

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Raises NotRecordedError: writes change their operands."""
        raise NotRecordedError

    def _slot(self, x: Any) -> int:
        if type(x) is ShardedTensor:
            return self.position(x)
        self._constants.append(x)
        return self._count + len(self._constants) - 1

    def position(self, x: Any) -> int:
        """Returns the position of an operand, or the negative number of the step that makes the tensor.

        Raises:
            NotRecordedError: it is another object.
        """
        try:
            return self._positions[id(x)]
        except KeyError:
            raise NotRecordedError from None

    def finished(self, result: Any) -> Recording:
        """Returns the steps, given the position of the result."""
        first = self._count + len(self._constants)

        def final(position: int) -> int:
            return position if position >= 0 else first - position - 1

        for step in self._steps:
            step.positions = tuple(map(final, step.positions))
        return Recording(self._constants, self._steps, map_items(final, result))


def _is_one_buffer(value: Aval) -> bool:
    """Whether the elements are one buffer of the host."""
    return value.memory is not None and value.backend.on_host and not value.offloaded and not value.unreduced


def _view_of(op: Op, x: ShardedTensor, params: Params, value: Aval) -> Function:
    """Returns the function that computes a view of the buffer of an operand like ``x``. Nothing writes to it: it is an
    operand of further steps, or a result that shares memory with no operand of the composition.
    """
    assert op.view_spec is not None
    spec = op.view_spec(whole_view_spec(x.shape, x.sharding.spec.chains_of(x.ndim)), *params)
    spec = spec if x.dtype.kind == "c" or not isinstance(spec.part, str) else spec.only(None)
    sample, backend = np.empty(x.shape, x.dtype), value.backend
    view = spec.of(backend, sample)
    offset = view.__array_interface__["data"][0] - sample.__array_interface__["data"][0]
    shape, dtype, strides = view.shape, view.dtype, view.strides

    def of_buffer(whole: Any) -> Any:
        in_order = whole.flags.c_contiguous
        return np.ndarray(shape, dtype, whole, offset, strides) if in_order else spec.of(backend, whole)

    return of_buffer


def _run_view(of_buffer: Function, value: Aval, operands: Operands) -> Any:
    return mark_array(tensor(value, Storage((of_buffer(whole_array(operands[0])),))))  # Views are no scalars.


def _item(number: int, operands: Operands) -> Any:
    return operands[0][number]


def _algorithm(op: Op, params: Params, operands: Operands) -> Any:
    assert op.algorithm is not None
    return op.algorithm(*operands, *params)
