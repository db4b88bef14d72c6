"""The trips of a loop as tasks of C: functions with the addresses of their arrays.

The carry has two arrays for each leaf, which even and odd trips read and write in turn, so that there are two lists of
tasks. After each trip, the addresses of slices and of the slots of stacked results move on. Python's numbers, such as
that of the trip, are stored for some trips at a time, as Python computes them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HOST
from shardtensor.backend.registry import backend_of
from shardtensor.errors import DeviceMemoryError
from shardtensor.host import blockwise, memory_pool
from shardtensor.host.blockwise import LONG
from shardtensor.interpreters.jit.c.c_executor import CompiledLoops, Prepared
from shardtensor.interpreters.jit.grouping.fused import Fused
from shardtensor.interpreters.jit.kernels.kernel import HostArray
from shardtensor.interpreters.jit.kernels.kernel_operands import address
from shardtensor.interpreters.programs.program import Equation, Program, Var, shape_of
from shardtensor.interpreters.programs.replay import Node, compute
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import SCALARS, mark_array, tensor
from shardtensor.tensor.value import Aval

CHUNK = 5e-3
"""The seconds, about, after which Python looks for signals."""

_FIRST = 64
"""The number of trips of the first chunk."""

_GROWTH = 16
"""The most by which a chunk is longer than the one before."""

_NUMBERS = 1 << 10
"""The number of trips for which the values of Python numbers are stored: the most of a chunk, if there are any."""

ENDLESS = 1 << 62
"""The number of trips of a loop with a condition, at most."""

FILLED = {"zeros_like": 0, "ones_like": 1}
"""The operators whose result does not depend on the elements of the operand, with its elements."""

WINDOWS = ("view", "broadcast_to")
"""The operators whose result is where the elements of the operand are, besides selections of elements."""


class Unfit(Exception):
    """C cannot run a loop on these arrays."""


class Part(NamedTuple):
    """A function of a loop.

    Attributes:
        program: its program.
        nodes: what each trip computes, in order.
        kernels: the kernels, by the identity of their last equation.
    """

    program: Program
    nodes: Sequence[Node]
    kernels: Mapping[int, Fused]


def is_number(equation: Equation) -> bool:
    """Whether an equation computes a Python number."""
    return type(equation.results) is Var and isinstance(equation.results.kind, type)


COPIES = ("concat", "stack", "roll")
"""The operators whose result consists of parts of the operands."""


def copies_of(equation: Equation) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the operands of one of `COPIES`, and the indices of the parts that are copied and of where they go to."""
    name, params = equation.op.name, dict(zip(equation.op.params, equation.params, strict=True))
    shape = equation.results.kind.shape
    if name == "roll":
        (x,) = equation.operands
        axes = params["axis"] if type(params["axis"]) is tuple else (params["axis"],)
        shifts = params["shift"] if type(params["shift"]) is tuple else (params["shift"],)
        (axis,), (shift,) = axes, shifts
        before, k = (slice(None),) * (axis % len(shape)), shift % max(shape[axis], 1)
        yield x, (*before, slice(shape[axis] - k)), (*before, slice(k, None))
        yield x, (*before, slice(shape[axis] - k, None)), (*before, slice(k))
        return
    axis = params["axis"] % len(shape)
    before, at = (slice(None),) * axis, 0
    for x in leaves(equation.operands):
        if name == "stack":
            yield x, ..., (*before, at)
            at += 1
        else:
            n = shape_of(x)[axis] if type(x) is Var else x.shape[axis]
            yield x, ..., (*before, slice(at, at + n))
            at += n


class Loop:
    """What C has to know of a loop.

    Args:
        equation: the loop.
        parts: its functions: the body, after the condition if there is one.

    Attributes:
        is_counted: whether the number of trips is known before them.
        body, condition: the functions.
        number: the number of the trip in the body; None if it has none.
        inputs: what the condition, and the body, get of the carry: its leaves, None for one that is not an array.
        carry: that of the body.
        slices: the slices in the body.
        after: the leaves of the next carry.
        ys: the results of a trip that are stacked.
        results, stacked: the results of the loop.
        computed: the equations of Python numbers.
        numbers: the Python numbers that tasks read.
        windows: the numbers of the leaves of which each trip writes a part, so that the rest stays.
    """

    def __init__(self, equation: Equation, parts: Sequence[Part]) -> None:
        self.is_counted = equation.op.name == "counted_loop"
        self.body, self.condition = parts[-1], parts[0] if len(parts) > 1 else None
        first, count = int(self.is_counted), len(leaves(equation.operands[0]))
        by_position = [dict(zip(p.program.positions, p.program.inputs, strict=True)) for p in parts]
        self.inputs = [[values.get(first + k) for k in range(count)] for values in by_position]
        self.carry = self.inputs[-1]
        self.number = by_position[-1].get(0) if self.is_counted else None
        slices = len(leaves(equation.operands[1])) if self.is_counted else 0
        self.slices = [by_position[-1].get(first + count + k) for k in range(slices)]
        outputs, results = leaves(self.body.program.result), leaves(equation.results)
        self.after, self.ys = outputs[:count], outputs[count:]
        self.results, self.stacked = results[:count], results[count:]
        nodes = [node for part in parts for node in part.nodes]
        self.computed = [node[0] for node in nodes if is_number(node[0])]
        known = {self.number, *[e.results for e in self.computed]}
        read = [v for node in nodes if not is_number(node[0]) for e in node for v in e.reads()]
        returned = [v for v in outputs if type(v) is Var]
        self.numbers = [v for v in dict.fromkeys([*read, *returned]) if v in known]
        bases = {e.results: e.operands[0] for node in self.body.nodes for e in node if e.writes}
        self.windows = {
            k for k, v in enumerate(self.after) if v in bases and bases[v] == self.carry[k] and v not in self.after[:k]
        }

    @property
    def returns_arrays(self) -> bool:
        """Whether the body returns an array or a number for each result, and None where there is none."""
        outputs, results = [*self.after, *self.ys], [*self.results, *self.stacked]
        if len(outputs) != len(results) or not all(v is None or type(v) is Var for v in results):
            return False
        pairs = zip([*outputs, *self.carry], [*results, *self.results], strict=True)
        return all(type(x) is Var or type(x) in SCALARS if v is not None else x is None for x, v in pairs)


class Run:
    """One run of a loop.

    Args:
        loop: the loop.
        functions: the functions of loops.
        numbers: the number that the body gets in each trip; None for a loop with a condition.
        around: what the functions read of the program around the loop, by number.
        init: the leaves of the first carry.
        xs: the arrays of which each trip gets a slice.

    Raises:
        Unfit: arrays have to be copied, or a call of a kernel is long enough for several threads.

    Attributes:
        loop, functions, numbers, around, xs: the arguments.
        buffers: the arrays of each leaf of the carry, which even and odd trips read, and the others write.
        stacks: the stacked results.
        tables: the values of Python numbers in the trips of a chunk.
    """

    def __init__(
        self,
        loop: Loop,
        functions: CompiledLoops,
        numbers: range | None,
        around: Mapping[int, Any],
        init: Sequence[Any],
        xs: Sequence[Any],
    ) -> None:
        self.loop, self.functions, self.numbers, self.around, self.xs = loop, functions, numbers, around, xs
        self._computed: dict[Var, HostArray] = {}
        self.buffers = [self._buffers(k, x) for k, x in enumerate(init)]
        self.stacks = [None if v is None else memory_pool.empty(v.kind.shape, v.kind.dtype) for v in loop.stacked]
        self.tables = {v: np.empty(_NUMBERS, v.kind) for v in loop.numbers}
        self._trips = ENDLESS if numbers is None else len(numbers)
        self._variants = [_Variant(self, parity) for parity in range(min(self._trips, 2))]

    def _buffers(self, k: int, x: Any) -> Sequence[HostArray]:
        """Returns the two arrays of a leaf; that which is given if no trip changes it."""
        v = self.loop.carry[k]
        if v is None:
            return ()
        kind = v.kind
        assert isinstance(kind, Aval)
        x = x if isinstance(x, np.ndarray) else np.asarray(x, kind.dtype)
        if x.shape != kind.shape or x.dtype != kind.dtype:
            raise Unfit
        if self.loop.after[k] == v:
            return x, x
        pair = [memory_pool.empty(kind.shape, kind.dtype) for _ in (0, 1)]
        for array in pair if k in self.loop.windows else pair[:1]:
            blockwise.copy_into(array, x)
        return pair

    def array_of(self, v: Var) -> HostArray:
        """Returns the array of a value that every trip computes anew."""
        array = self._computed.get(v)
        if array is None:
            assert isinstance(v.kind, Aval)
            array = self._computed[v] = memory_pool.empty(v.kind.shape, v.kind.dtype)
        return array

    def run(self) -> None:
        """Runs all trips.

        Raises:
            DeviceMemoryError: the memory for intermediate results cannot be allocated.
        """
        tables = [variant.table() for variant in self._variants]
        even, odd = [address(t) for t in (tables[0], tables[-1])]
        at, count = 0, _FIRST
        while True:
            count = min(count, _NUMBERS) if self.tables else count
            stop = min(at + count, self._trips)
            self._store_numbers(at, stop)
            begin = time.perf_counter()
            done = self.functions.run_trips(at, stop, even, odd)
            if done < 0:
                raise DeviceMemoryError("jit: no memory for the intermediate results of a row in a loop")
            if done < stop or stop == self._trips:
                self.done = done
                return
            seconds, at = time.perf_counter() - begin, stop
            count = max(int(count * min(CHUNK / max(seconds, 1e-9), _GROWTH)), 1)

    def _store_numbers(self, at: int, stop: int) -> None:
        """Computes the Python numbers of some trips, as Python's loop does."""
        if not self.tables:
            return
        loop, count = self.loop, stop - at
        for parity, variant in enumerate(self._variants):
            variant.rewind((at + parity) % 2)
        numbers = None if self.numbers is None else self.numbers[at:stop]
        if numbers is not None and loop.number in self.tables:
            self.tables[loop.number][:count] = np.arange(numbers.start, numbers.stop, numbers.step)
        tables = [(v.number, table) for v, table in self.tables.items() if v != loop.number]
        if not tables:
            return
        values = dict(self.around)
        for k in range(count):
            if numbers is not None and loop.number is not None:
                values[loop.number.number] = numbers[k]
            for equation in loop.computed:
                compute(equation, values)
            for number, table in tables:
                table[k] = values[number]

    def results(self, init: Sequence[Any]) -> list[Any]:
        """Returns the last carry and the stacked results."""
        tensors = []
        for k, v in enumerate(self.loop.results):
            if v is None:
                continue
            array = self.buffers[k][self.done % 2]
            if self.loop.after[k] == self.loop.carry[k]:
                array = blockwise.copied(array)
            x = tensor(v.kind, Storage((array,), ([],)))
            tensors.append(mark_array(x) if not v.kind.ndim and self._is_array(k, init) else x)
        return tensors + [
            tensor(v.kind, Storage((array,), ([],)))
            for v, array in zip(self.loop.stacked, self.stacks, strict=True)
            if v is not None
        ]

    def _is_array(self, k: int, init: Sequence[Any]) -> bool:
        """Whether a leaf of the last carry is one of the first carry, unchanged, that is an array without dimensions:
        the results of kernels are scalars.
        """
        after, carry = self.loop.after, self.loop.carry
        if type(after[k]) is not Var or isinstance(after[k].kind, type):
            return True  # Python's numbers become arrays.
        for _ in range(min(self.done, len(carry))):
            if after[k] not in carry:
                return False
            k = carry.index(after[k])
        return type(init[k]) in SCALARS or not init[k]._is_scalar


class _Variant:
    """The tasks of even or of odd trips.

    Args:
        run: the run.
        parity: the number of the first one of these trips.
    """

    def __init__(self, run: Run, parity: int) -> None:
        self._run, self._parity = run, parity
        self._arrays: dict[int, Any] = dict(run.around)
        self._steps: dict[int, int] = {}
        self._targets: dict[Var, tuple[HostArray, int]] = {}
        self._calls: list[Prepared] = []
        self._moves: list[tuple[int, int]] = []
        self._numbered: dict[int, HostArray] = {v.number: table for v, table in run.tables.items()}
        self._rewound: list[tuple[int, int, int]] = []
        self._flag = 0
        loop = run.loop
        self._add_inputs(loop)
        if loop.condition is not None:
            self._add(loop.condition)
            self._flag = self._flag_of(loop.condition.program.result)
        self._condition_count = len(self._calls)
        outs = [
            (x, buffers[1 - parity], 0) for x, buffers in zip(loop.after, run.buffers, strict=True) if x is not None
        ]
        outs += [(y, *self._slot(array)) for y, array in zip(loop.ys, run.stacks, strict=True) if array is not None]
        for x, array, step in outs:
            if type(x) is Var:
                self._targets.setdefault(x, (array, step))
        self._add(loop.body)
        for x, array, step in outs:
            self._assign(x, array, step)
        if any(call.geometry.seconds >= LONG for call in self._calls):
            raise Unfit
        del self._run, self._arrays, self._targets  # A cycle would hold the memory until it is found.

    def _slot(self, array: HostArray) -> tuple[HostArray, int]:
        """Returns the slice of the first one of the trips, and the bytes from there to that of the next one."""
        numbers = self._run.numbers
        assert numbers is not None
        if not array.flags.aligned:
            raise Unfit
        k = numbers[self._parity] - min(numbers[0], numbers[-1])
        return array[k, ...], 2 * numbers.step * array.strides[0]

    def _add_inputs(self, loop: Loop) -> None:
        for part_inputs in loop.inputs:
            for leaf, buffers in zip(part_inputs, self._run.buffers, strict=True):
                if leaf is not None:
                    self._arrays[leaf.number] = buffers[self._parity]
        for leaf, x in zip(loop.slices, self._run.xs, strict=True):
            if leaf is not None:
                self._arrays[leaf.number], self._steps[leaf.number] = self._slot(x)
        for number, table in self._numbered.items():
            self._arrays[number], self._steps[number] = table[0, ...], 2 * table.itemsize

    def _flag_of(self, result: Any) -> int:
        """Returns the address of the bool that a condition returns."""
        if type(result) is not Var or self._steps.get(result.number):
            raise Unfit
        array = self._arrays[result.number]
        if not isinstance(array, np.ndarray) or array.shape or array.dtype != bool:
            raise Unfit
        return address(array)

    # -- tasks ---------------------------------------------------------------------------------------

    def _add(self, part: Part) -> None:
        """Adds the tasks of a function."""
        for node in part.nodes:
            fused = part.kernels.get(id(node[-1]))
            if fused is not None:
                self._add_kernel(fused)
            elif node[0].writes:
                self._add_assignment(node[0])
            elif node[0].op.name in COPIES:
                self._add_copies(node[0])
            elif not is_number(node[0]):
                self._add_view(node[0])

    def _add_view(self, equation: Equation) -> None:
        """Adds the array of a result, which is where that of the operand is."""
        name, kind, x = equation.op.name, equation.results.kind, equation.operands[0]
        number = equation.results.number
        if name in FILLED:
            self._arrays[number] = np.broadcast_to(np.array(FILLED[name], kind.dtype), kind.shape)
            return
        whole = self._arrays[x.number] if type(x) is Var else x
        if not isinstance(whole, np.ndarray) or (type(x) is Var and x.number in self._numbered):
            raise Unfit
        array = whole
        if name == "getitem":
            (index,) = equation.params
            array = whole[(*(index if type(index) is tuple else (index,)), ...)]
        elif name == "broadcast_to":
            array = np.broadcast_to(whole, kind.shape)
        elif equation.into is not None:
            array = equation.into.of(kind.backend if isinstance(kind, Aval) else backend_of(HOST), whole)
        if array.shape != kind.shape or array.dtype != kind.dtype or not np.may_share_memory(array, whole):
            raise Unfit
        self._arrays[number], self._steps[number] = array, self._steps.get(x.number, 0) if type(x) is Var else 0

    def _add_kernel(self, fused: Fused) -> None:
        call = fused.prepared(self._arrays, self._target)
        if call is None:
            raise Unfit
        self._append(call, fused.pointers())

    def _add_copies(self, equation: Equation) -> None:
        """Adds the copies of operands into the parts of a result."""
        out = self._target(equation.results, None)
        step = self._steps[equation.results.number]
        for x, source, target in copies_of(equation):
            array = self._arrays[x.number] if type(x) is Var else x
            if not isinstance(array, np.ndarray):
                raise Unfit
            self._copy(x, out[target], step, array[source])

    def _add_assignment(self, equation: Equation) -> None:
        """Adds the copy of a value into elements of an array."""
        assert equation.into is not None
        whole = self._target(equation.results, equation.operands[0])
        window = equation.into.of(equation.results.kind.backend, whole)
        self._copy(equation.operands[1], window, self._steps.get(equation.results.number, 0))

    def _target(self, v: Var, base: Var | None) -> HostArray:
        """Returns the array of a result; that of a write has the elements of the base."""
        array, step = self._targets.get(v) or (self._run.array_of(v), 0)
        if base is not None and not any(v == self._run.loop.after[k] for k in self._run.loop.windows):
            self._copy(base, array, step)
        self._arrays[v.number], self._steps[v.number] = array, step
        return array

    def _assign(self, x: Any, array: HostArray, step: int) -> None:
        """Adds the copy of a result of the body into its array, unless a kernel has written it there."""
        if type(x) is not Var or self._arrays[x.number] is not array:
            self._copy(x, array, step)

    def _copy(self, x: Any, target: HostArray, step: int, source: Any = None) -> None:
        """Adds the copy of a value, or of a part of it."""
        number = x.number if type(x) is Var else -1
        if source is None:
            source = self._arrays[number] if number >= 0 else x
        if not isinstance(source, np.ndarray):
            source = np.asarray(source, target.dtype)
        call = self._run.functions.copy(source, target)
        if call is None:
            raise Unfit
        self._append(call, [number])
        if step:
            self._moves.append((call.pointer(1), step))

    def _append(self, call: Prepared, numbers: Sequence[int]) -> None:
        """Adds a task, of which some pointers are those of values with these numbers."""
        self._calls.append(call)
        for k, number in enumerate(numbers):
            if step := self._steps.get(number):
                self._moves.append((call.pointer(k), step))
            if (table := self._numbered.get(number)) is not None:
                self._rewound.append((call.pointer(k), address(table), table.itemsize))

    # -- tables --------------------------------------------------------------------------------------

    def rewind(self, k: int) -> None:
        """Sets the pointers to Python numbers to those of the first trips of a chunk, which begins k trips before."""
        for pointer, first, size in self._rewound:
            ctypes.c_void_p.from_address(pointer).value = first + k * size

    def table(self) -> npt.NDArray[np.int64]:
        """Returns what ``run_trips`` reads."""
        calls = self._calls
        lists = [_tasks(calls[: self._condition_count]), _tasks(calls[self._condition_count :])]
        self._lists = [*lists, np.array(self._moves, np.int64).reshape(-1, 2)]
        (a, b, moves) = [(len(x), address(x)) for x in self._lists]
        return np.array([*a, self._flag, *b, *moves], np.int64)


def _tasks(calls: Sequence[Prepared]) -> npt.NDArray[np.int64]:
    """Returns calls as tasks, but for those of no elements."""
    tasks = [call.task() for call in calls if call.geometry.rows]
    return np.array(tasks, np.int64).reshape(-1, 5)
