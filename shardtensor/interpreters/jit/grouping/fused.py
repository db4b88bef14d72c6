"""Groups of equations that run as one kernel, on whole buffers of host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shardtensor.communication.transfer import whole_array
from shardtensor.host import memory_pool
from shardtensor.interpreters.jit.c.c_executor import CompiledKernel, Prepared
from shardtensor.interpreters.jit.cuda.cuda_executor import CudaKernel
from shardtensor.interpreters.jit.grouping import groups
from shardtensor.interpreters.jit.grouping.groups import Group, function_of
from shardtensor.interpreters.jit.grouping.kernel_reductions import (
    add_reduction,
    divisor,
    is_reduction,
    is_wide,
    outer_shape,
)
from shardtensor.interpreters.jit.grouping.window_writes import WindowWrite, computed_aval, function_operands
from shardtensor.interpreters.jit.kernels import numpy_executor
from shardtensor.interpreters.jit.kernels.kernel import HostArray, Kernel, KernelBuilder
from shardtensor.interpreters.programs.program import Equation, Var, exact_key, kind_of, shape_of, vars_of
from shardtensor.interpreters.programs.replay import plan_of
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.tensor import ShardedTensor, tensor_of
from shardtensor.tensor.value import Aval, spans_hosts

_EMPTY: Mapping[Var, WindowWrite] = MappingProxyType({})


class Fused:
    """A group with its kernel.

    Args:
        equations: the equations, in order.
        kept: their results that are used outside of the group.
        writes: the equations that write into windows, by their results, of those that are kept.

    Attributes:
        kernel: what computes the group.
        shape: the shape of its loop.
        language: the language of compiled kernels of its memory: ``"c"`` or ``"cuda"``.
        compiled: the kernel as compiled code, once there is one.
        spans: whether the tensors are those of several processes.
        repeats: how often a call runs it, about: the number of trips of the loops around it.
    """

    language = "c"
    spans = False
    repeats = 1

    def __init__(
        self, equations: Sequence[Equation], kept: Sequence[Var], writes: Mapping[Var, WindowWrite] = _EMPTY
    ) -> None:
        reductions = [e for e in equations if is_reduction(e)]
        self.equations = equations
        self.compiled: CompiledKernel | CudaKernel | None = None
        if reductions:
            self.shape: Shape = reductions[0].operands[0].kind.shape
            row_ndim = len(self.shape) - len(outer_shape(reductions[0], self.shape))
        else:
            self.shape, row_ndim = computed_aval(equations[0]).shape, 0
        self._writes = writes
        self._group = Group(self.shape)
        self._group.row_ndim = row_ndim
        self._builder = KernelBuilder(len(self.shape), row_ndim)
        self._inputs: list[tuple[int, Any, Any]] = []
        self._values: dict[Any, int] = {}
        self._add_inputs()
        for equation in equations:
            self._add(equation)
        self._kept = [(v, v.kind, self._add_output(v)) for v in kept if isinstance(v.kind, Aval)]
        self.kernel: Kernel = self._builder.build()
        self._ordered = bool(row_ndim)
        is_short = math.prod(self.shape) < groups.LEAST
        self._needs_c = len(equations) == 1 or is_short or any(is_wide(e) for e in reductions)

    def _add_inputs(self) -> None:
        """Adds the operands that the group does not compute. An input is a number of a value, or -1 for a constant; the
        constant; and the index that gives it the dimensions of the loop.
        """
        results = {e.results for e in self.equations}
        for equation in self.equations:
            flat = self._is_flat(equation)
            for x in (*function_operands(equation), *self._constants(equation)):
                key = _key(x, flat)
                if key in self._values or (type(x) is Var and x in results):
                    continue
                kind, index, varies = kind_of(x), None, None
                if not isinstance(kind, type):
                    kind, shape = kind.dtype.str, kind.shape
                    after = self._group.row_ndim * flat
                    own = self.shape[len(self.shape) - after - len(shape) : len(self.shape) - after]
                    varies = [n == m for n, m in zip(shape, own, strict=True)] + [False] * after
                    varies = [False] * (len(self.shape) - len(varies)) + varies
                    index = None if len(shape) in (0, len(self.shape)) else _expanding(shape, self, flat)
                self._values[key] = self._builder.input(kind, varies)
                self._inputs.append((x.number, None, index) if type(x) is Var else (-1, x, index))

    def _is_flat(self, equation: Equation) -> bool:
        """Returns whether the operands of an equation lack the reduced dimensions."""
        flat = self._group.role(computed_aval(equation).shape) == "flat" and len(self.shape) > 1
        return flat and not is_reduction(equation)

    @staticmethod
    def _constants(equation: Equation) -> tuple[float, ...]:
        """Returns the numbers that an equation uses besides its operands."""
        number = divisor(equation) if is_reduction(equation) else None
        return () if number is None else (number,)

    def _add(self, equation: Equation) -> None:
        flat = self._is_flat(equation)
        taken = []
        for x in function_operands(equation):
            known = self._values.get(x) if type(x) is Var else None
            taken.append(known if known is not None else self._values[_key(x, flat)])
        if is_reduction(equation):
            constants = [self._values[_key(number, flat)] for number in self._constants(equation)]
            plan, value = plan_of(equation), equation.results.kind
            on_numpy = value.backend.on_host or spans_hosts(value)
            in_blocks = not on_numpy or plan is None or plan.strategy == "blocks"
            result = add_reduction(self._builder, equation, taken[0], *constants, in_blocks=in_blocks)
        elif equation.writes and "assigns" in equation.op.tags:
            result = taken[0]
        elif equation.op.name == "astype":
            result = self._builder.astype(taken[0], equation.results.kind.dtype)
        else:
            result = self._builder.call(function_of(equation) or "", *taken)
        if equation.writes:
            result = self._builder.astype(result, equation.results.kind.dtype)
        self._values[equation.results] = result

    def _add_output(self, v: Var) -> Any:
        """Makes a value a result; returns the index that gives its array the dimensions of the loop."""
        role = "full" if v in self._writes else self._group.role(shape_of(v))
        self._builder.output(self._values[v], per_row=role in ("row", "flat"))
        return (..., *(0,) * self._group.row_ndim) if role == "row" else None

    def reads(self) -> list[Var]:
        """Returns the values that the group reads."""
        results = {e.results for e in self.equations}
        return [
            v
            for v in dict.fromkeys([v for e in self.equations for v in vars_of(function_operands(e))])
            if v not in results
        ]

    def written(self) -> list[Var]:
        """Returns the results, if all of them are bases with a window that the group writes; otherwise none."""
        return [v for v, _, _ in self._kept] if all(v in self._writes for v, _, _ in self._kept) else []

    def operands(self, values: Any, without: Collection[int] = ()) -> dict[int, Any]:
        """Returns the arrays and numbers that the kernel reads, by the numbers of their values, but for some."""
        inputs = {number: values[number] for number, _, _ in self._inputs if number >= 0 and number not in without}
        return {n: self.buffer_of(x, "jit") if type(x) is ShardedTensor else x for n, x in inputs.items()}

    def arrays(self, values: Any, others: Mapping[int, Any] = MappingProxyType({})) -> list[Any]:
        """Returns what the kernel reads.

        Args:
            values: the values of the program by number.
            others: arrays in place of some of them.
        """
        inputs = []
        for number, constant, index in self._inputs:
            x = constant if number < 0 else others[number] if number in others else values[number]
            if type(x) is ShardedTensor:
                x = self.buffer_of(x, "jit")
            inputs.append(x if index is None else x[index])
        return inputs

    def pointers(self) -> list[int]:
        """Returns the number of the value of each operand and each result of the kernel; -1 for a constant."""
        return [number for number, _, _ in self._inputs] + [v.number for v, _, _ in self._kept]

    def prepared(self, values: Any, target: Callable[[Var, Var | None], HostArray]) -> Prepared | None:
        """Returns a call of the compiled kernel; None where an array has to be copied.

        Args:
            values: arrays and numbers, by the numbers of the values of the program.
            target: returns the array of a result, given the base whose elements it has outside of the window that the
                kernel writes, if it writes one.
        """
        assert isinstance(self.compiled, CompiledKernel)
        targets = []
        for v, kind, index in self._kept:
            write = self._writes.get(v)
            array = target(v, None if write is None else write.equation.operands[0])
            if write is not None:
                assert write.equation.into is not None
                array = write.equation.into.of(kind.backend, array)
            targets.append(array if index is None else array[index])
        return self.compiled.prepared(self.shape, self.arrays(values), targets)

    def buffer_of(self, x: ShardedTensor, caller: str) -> Any:
        """Returns the one buffer of a tensor."""
        return whole_array(x, caller)

    def __call__(self, values: Any) -> bool:
        """Computes the group; returns whether it did: not where the bits would not be those of eager mode."""
        compiled = self._compiled_for(values)
        if compiled is None and self._needs_c:
            return False
        inputs = self.arrays(values)
        if compiled is None and not self._is_exact(inputs):
            return False
        results, targets = [], []
        for v, kind, index in self._kept:
            write = self._writes.get(v)
            if write is not None:
                result, out = write.target(values, inputs)
            else:
                array = memory_pool.empty(kind.shape, kind.dtype)
                result, out = self._result(kind, array), array if index is None else array[index]
            results.append(result)
            targets.append(out)
        if compiled is not None:
            compiled.run(self.shape, inputs, targets)
        else:
            numpy_executor.run(self.kernel, self.shape, inputs, targets)
        for (v, _, _), result in zip(self._kept, results, strict=True):
            values[v.number] = result
        return True

    def _compiled_for(self, values: Any) -> CompiledKernel | CudaKernel | None:
        """Returns the compiled kernel, if it computes the group in a call with these values."""
        return None if reports_errors() else self.compiled

    def _is_exact(self, inputs: Sequence[Any]) -> bool:
        """Whether NumPy's functions on blocks of the operands have the bits of eager mode, now and later: NumPy's
        results have the order of their operands in memory, on which the bits of later sums depend.
        """
        ordered = not self._ordered or numpy_executor.is_exact(self.kernel, self.shape, inputs)
        return ordered and all(map(is_row_major, inputs))

    def _result(self, kind: Aval, array: np.ndarray[Any, Any]) -> Any:
        """Returns the value of the program that an array, which is to be written, is."""
        return tensor_of(kind, (array,), ([],))


def _key(x: Any, flat: bool) -> Any:
    """Returns what an operand that a group does not compute is found by."""
    if type(x) is Var:
        return x, flat
    return (id(x), flat) if isinstance(x, np.ndarray) else exact_key(x)


def _expanding(shape: Shape, fused: Fused, flat: bool) -> Any:
    """Returns the index that gives an array of that shape the dimensions of the loop."""
    after = (None,) * fused._group.row_ndim if flat else ()
    return ((None,) * (len(fused.shape) - len(shape) - len(after)) + (...,) + after) if shape else None


def is_row_major(x: Any) -> bool:
    """Whether NumPy gives results of an operand row-major order: its strides decrease."""
    if not isinstance(x, np.ndarray) or x.ndim < 2 or x.flags.c_contiguous:
        return True
    strides = [abs(step) for step, n in zip(x.strides, x.shape, strict=True) if n > 1 and step]
    return strides == sorted(strides, reverse=True)


def reports_errors() -> bool:
    """Whether floating-point errors raise or call a function, which compiled code does not."""
    return any(what in ("raise", "call") for what in np.geterr().values())


_CALL = 1 << 10
"""The number of elements whose computation takes as long as calling a kernel from Python."""


def work_of(fused: Fused) -> int:
    """Returns the number of elements that the functions of a group compute in a call of the program. In a loop, the
    call of each trip counts, too.
    """
    elements = math.prod(fused.shape) * len(fused.equations)
    return elements if fused.repeats == 1 else fused.repeats * (elements + _CALL)
