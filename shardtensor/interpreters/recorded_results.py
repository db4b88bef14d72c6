"""Small results of compositions that NumPy's functions do not compute with the same bits: the operators of a call are
recorded once, and their plans are run again.

The calls of a composition take several times as long as its plans on small arrays: shapes and dtypes are checked,
masks are built, and every operator is dispatched. Which plans run follows from the avals of the operands alone, if no
element is read on the way. So they are recorded for each combination of function, parameters and avals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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

Step = tuple[Callable[..., Any], tuple[int, ...]]
"""A function that computes a tensor, and the positions of its operands among the values so far."""


class Recording:
    """The steps of a composition.

    Attributes:
        constants: the operands of steps that are no tensors, such as scalars and index arrays.
        steps: the steps; each appends a value to the operands of the composition and the constants.
        result: the position of the result, or nested tuples and lists of positions.
    """

    def __init__(self, constants: Sequence[Any], steps: Sequence[Step], result: Any) -> None:
        self.constants = constants
        self.steps = steps
        self.result = result

    def run(self, operands: Sequence[ShardedTensor]) -> Any:
        """Returns the result for other operands of the same avals."""
        values = [*operands, *self.constants]
        for function, positions in self.steps:
            values.append(function(tuple([values[i] for i in positions])))
        return map_items(values.__getitem__, self.result)


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
        self._steps: list[tuple[Callable[..., Any], list[int]]] = []

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
        if op.view_spec and type(operands[0]) is ShardedTensor and hasattr(made._storage, "base"):
            operands = operands[:1]
            run: Callable[..., Any] = _view_of(op, operands[0], params, made._aval)
        elif op.escapes or op.spmd:
            raise NotRecordedError
        elif op.algorithm:
            operands, run = array_operands(op, operands), functools.partial(_algorithm, op, params)
        else:
            plan, operands = planned(op, operands, params)
            run = functools.partial(_planned, plan)
        ignored = {kind: mode for kind, mode in np.geterr().items() if mode == "ignore"}
        self._add(functools.partial(_quiet, run, ignored) if ignored else run, [self._slot(x) for x in operands], made)
        if isinstance(made, tuple):
            for k, item in enumerate(made):
                self._add(functools.partial(_item, k), [self.position(made)], item)
        return made

    def _add(self, run: Callable[..., Any], slots: list[int], made: Any) -> None:
        self._steps.append((run, slots))
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

        steps = [(run, tuple(map(final, positions))) for run, positions in self._steps]
        return Recording(self._constants, steps, map_items(final, result))


def _view_of(op: Op, x: ShardedTensor, params: Params, value: Aval) -> Callable[..., Any]:
    """Returns the function that computes a view of an operand like ``x``, as a tensor that shares its buffer. Nothing
    writes to it: it is an operand of further steps, or a result that shares memory with no operand of the composition.
    """
    assert op.view_spec is not None
    spec = op.view_spec(whole_view_spec(x.shape, x.sharding.spec.chains_of(x.ndim)), *params)
    spec = spec if x.dtype.kind == "c" or not isinstance(spec.part, str) else spec.only(None)
    sample, backend = np.empty(x.shape, x.dtype), value.backend
    view = spec.of(backend, sample)
    offset = view.__array_interface__["data"][0] - sample.__array_interface__["data"][0]
    shape, dtype, strides = view.shape, view.dtype, view.strides

    def run(operands: Operands) -> Any:
        whole = whole_array(operands[0])
        in_order = whole.flags.c_contiguous
        array = np.ndarray(shape, dtype, whole, offset, strides) if in_order else spec.of(backend, whole)
        return mark_array(tensor(value, Storage((array,))))  # Views are no scalars.

    return run


def _planned(plan: Any, operands: Operands) -> Any:
    return plan.run(operands)


def _item(number: int, operands: Operands) -> Any:
    return operands[0][number]


def _algorithm(op: Op, params: Params, operands: Operands) -> Any:
    assert op.algorithm is not None
    return op.algorithm(*operands, *params)


def _quiet(run: Callable[..., Any], ignored: dict[str, Any], operands: Operands) -> Any:
    """Runs a plan where the composition ignores floating-point errors."""
    with np.errstate(**ignored):
        return run(operands)
