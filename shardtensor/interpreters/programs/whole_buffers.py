"""Small programs on the host: steps that compute whole buffers, without tensors of intermediate values.

Making a tensor takes as long as computing a few elements. A step whose operands and result are one buffer each gets
and returns buffers; any other step gets and returns tensors.
"""

from __future__ import annotations

import functools
import itertools
import operator as python
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.exclusive_memory import memory_of
from shardtensor.communication.transfer import whole_array
from shardtensor.core import Op, Operands, Params
from shardtensor.interpreters.calls import array_operands
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.infer import INFER
from shardtensor.interpreters.programs.program import Equation, Program, Var, vars_of
from shardtensor.interpreters.programs.replay import stand_in_of, view_of
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.ownership import READS, track
from shardtensor.tensor.pytree import leaves, map_items
from shardtensor.tensor.tensor import ShardedTensor, mark_array, tensor_of
from shardtensor.tensor.value import Aval


class _Step(NamedTuple):
    """A step of a program, whose values are in slots: the inputs, the constants, and the results.

    Attributes:
        of_buffers: computes the buffer of the result from those of the operands, as its arguments, or returns None, so
            that ``run`` is called. None if there is no such function.
        get: takes the buffers of several operands from a list; None for one operand.
        first: the slot of the first operand.
        slot: the slot of the result.
        run: computes the result, or a tuple of results, from a tuple of tensors and constants.
        operands: the slots of the operands.
        results: the slots of the results, if they are several.
        ignored: the floating-point errors that the function ignores.
    """

    of_buffers: Callable[..., Any] | None
    get: Callable[[list[Any]], tuple[Any, ...]] | None
    first: int
    slot: int
    run: Callable[[Operands], Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    ignored: tuple[tuple[str, Any], ...]


class _Made(NamedTuple):
    """The kind of a buffer that a step computes.

    Attributes:
        value: the aval of its tensor.
        is_array: whether the tensor is a 0-d array, not a scalar.
        is_new: whether nothing else holds the memory.
    """

    value: Aval
    is_array: bool
    is_new: bool


class BufferProgram:
    """A program that runs on whole buffers.

    Args:
        program: the program, which neither writes nor captures.
        result: its result: a value, or nested tuples and lists of values.

    Attributes:
        constants: the operands of equations that are not values of the program, such as scalars and index arrays.
    """

    def __init__(self, program: Program, result: Any) -> None:
        values = [*program.inputs, *program.made()]
        self.constants: list[Any] = []
        self._results = [None] * (len(values) - len(program.inputs))
        self._slots = {v: k for k, v in enumerate(values)}
        self._stand_ins = {v: stand_in_of(v) for v in program.inputs}
        self._made: dict[int, _Made] = {}
        steps = [self._step(equation) for equation in program.equations]
        ignored = itertools.groupby(steps, lambda step: step.ignored)  # Steps that ignore the same errors.
        self._groups = [(dict(kinds), list(some)) for kinds, some in ignored]
        self._read = {k for step in steps if step.of_buffers for k in step.operands if k < len(values)}
        self._inputs = sorted(k for k in self._read if k < len(program.inputs))
        self._buffers = [*[None] * len(values), *self.constants]
        self._result = map_items(self._slots.__getitem__, result)
        # Where steps get no other memory than that of the buffers of inputs, and of constants, any other is new.
        are_read = len(self._inputs) == len(program.inputs) and all(step.of_buffers for step in steps)
        self._knows_memory = are_read and not any(type(x) is ShardedTensor for x in self.constants)

    @staticmethod
    def takes(program: Program) -> bool:
        """Whether all values are tensors, of which no operand is a container."""
        results = [x for equation in program.equations for x in leaves(equation.results)]
        containers = [
            x for equation in program.equations for x in equation.operands if isinstance(x, (tuple, list, dict))
        ]
        return not any(map(vars_of, containers)) and all(type(v) is Var and isinstance(v.kind, Aval) for v in results)

    def _step(self, equation: Equation) -> _Step:
        """Returns the step of an equation."""
        op, params, stand_ins = equation.op, equation.params, self._stand_ins
        inputs = tuple([stand_ins[x] if type(x) is Var else x for x in equation.operands])
        result = INFER.apply(op, inputs, params)
        names = leaves(equation.results)
        stand_ins.update(zip(names, leaves(result), strict=True))
        of_buffers, is_new = None, False
        if equation.into is not None:
            value = equation.window
            assert isinstance(value, Aval)
            of_buffers = _view_of(inputs[0]._aval, equation.into)
            run: Callable[[Operands], Any] = functools.partial(_view, equation.into, value)
        elif op.parts.algorithm:
            inputs, run = array_operands(op, inputs), functools.partial(_algorithm, op, params)
        else:
            plan, inputs = planned(op, inputs, params)
            run, of_buffers = plan.run, plan.of_buffers()
            is_new = op.is_ufunc or bool(plan.partial_axes)  # See `shardtensor.interpreters.execution.one_pass`.
        if not inputs or not all(_is_one_buffer(x._aval) for x in (*inputs, result) if type(x) is ShardedTensor):
            of_buffers = None
        slot, *_ = slots = tuple([self._slots[v] for v in names])
        if of_buffers is not None:
            self._made[slot] = _Made(result._aval, not result.ndim and not result._is_scalar, is_new)
        named = {id(x): v for v, x in stand_ins.items()}
        operands = tuple([self._slots[named[id(x)]] if id(x) in named else self._constant(x) for x in inputs])
        get = python.itemgetter(*operands) if len(operands) > 1 else None
        results = () if type(equation.results) is Var else slots
        return _Step(of_buffers, get, operands[0] if operands else -1, slot, run, operands, results, equation.ignored)

    def _constant(self, x: Any) -> int:
        """Returns the slot of a constant, after those of all values."""
        self.constants.append(x)
        return len(self._slots) + len(self.constants) - 1

    def __call__(self, inputs: Sequence[ShardedTensor]) -> Any:
        """Returns the result for other inputs of the same avals. It may share memory with the constants."""
        entry: list[Any] = [(*inputs, *self.constants)]
        READS[id(entry)] = entry
        try:
            result = self._run(inputs)
            if type(result) is not ShardedTensor or not result._storage.leases:
                track(entry, result)
            return result
        finally:
            READS.pop(id(entry), None)

    def _run(self, inputs: Sequence[ShardedTensor]) -> Any:
        tensors, buffers = [*inputs, *self._results, *self.constants], self._buffers.copy()
        for k in self._inputs:
            buffers[k] = whole_array(inputs[k])
        for ignored, steps in self._groups:
            if ignored:
                with np.errstate(**ignored):
                    self._compute(steps, tensors, buffers)
            else:
                self._compute(steps, tensors, buffers)
        result = self._result
        if type(result) is not int:
            return map_items(lambda k: self._tensor(tensors, buffers, k), result)
        is_made = tensors[result] is None
        x = self._tensor(tensors, buffers, result)
        if is_made and self._knows_memory and not x._storage.leases and self._is_new(buffers[result], buffers):
            x._storage.leases = ([],)
        return x

    def _is_new(self, array: Any, buffers: Sequence[Any]) -> bool:
        """Whether the memory of an array is neither that of an input nor that of a constant, as `track` would find."""
        held = [*[buffers[k] for k in self._inputs], *self.constants]
        if array.base is None and array.flags.owndata and all(x.base is None for x in held if type(x) is np.ndarray):
            return all(x is not array for x in held)
        memory = memory_of(array)
        if memory is None:
            return False
        return all(type(x) is not np.ndarray or memory_of(x) != memory for x in held)

    def _compute(self, steps: Sequence[_Step], tensors: list[Any], buffers: list[Any]) -> None:
        """Runs steps, which add their results to the tensors or to the buffers."""
        for of_buffers, get, first, slot, run, operands, results, _ in steps:
            if of_buffers is not None:
                output = of_buffers(buffers[first]) if get is None else of_buffers(*get(buffers))
                if output is not None:
                    buffers[slot] = output
                    continue
            output = run(tuple([self._tensor(tensors, buffers, k) for k in operands]))
            for k, x in zip(results, leaves(output), strict=True) if results else ((slot, output),):
                tensors[k] = x
                if k in self._read:
                    buffers[k] = whole_array(x)

    def _tensor(self, tensors: list[Any], buffers: list[Any], k: int) -> Any:
        """Returns a value as a tensor, or a constant."""
        x = tensors[k]
        if x is None and k in self._made:
            value, is_array, is_new = self._made[k]
            x = tensor_of(value, (buffers[k],), ([],) if is_new else ())
            x = tensors[k] = mark_array(x) if is_array else x
        return x


def _is_one_buffer(value: Aval) -> bool:
    """Whether the elements are one buffer of the host."""
    return value.memory is not None and value.backend.on_host and not value.offloaded and not value.unreduced


def _view_of(base: Aval, spec: ViewSpec) -> Callable[[Any], Any]:
    """Returns the function that computes a view of the buffer of a value. Nothing writes to it: it is an operand of
    further steps, or a result that shares memory with no input.
    """
    spec = spec if base.dtype.kind == "c" or not isinstance(spec.part, str) else spec.only(None)
    sample, backend = np.empty(base.shape, base.dtype), base.backend
    view = spec.of(backend, sample)
    offset = view.__array_interface__["data"][0] - sample.__array_interface__["data"][0]
    shape, dtype, strides = view.shape, view.dtype, view.strides

    def of_buffer(whole: Any) -> Any:
        in_order = whole.flags.c_contiguous
        return np.ndarray(shape, dtype, whole, offset, strides) if in_order else spec.of(backend, whole)

    return of_buffer


def _view(spec: ViewSpec, value: Aval, operands: Operands) -> Any:
    return view_of(operands[0], spec, value)


def _algorithm(op: Op, params: Params, operands: Operands) -> Any:
    assert op.parts.algorithm is not None
    return op.parts.algorithm(*operands, *params)
