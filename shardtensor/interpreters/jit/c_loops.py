"""Loops whose trips C runs, without Python in between.

All nodes of the functions of such a loop are kernels on whole buffers of the host, or arithmetic of addresses and of
Python numbers. A trip is then a list of tasks: functions with the addresses of their arrays. The carry has two arrays
for each leaf, which even and odd trips read and write in turn, so that there are two lists. After each trip, the
addresses of slices and of the slots of stacked results move on. Python runs before and after the trips, and every few
milliseconds in between, where signals are delivered.

The kernels, and so the bits, are those of the loop that Python runs: where arrays have to be copied first, where one
call of a kernel is long enough to be divided over threads, and until the kernels are compiled.
"""

from __future__ import annotations

import ctypes
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HOST
from shardtensor.backend.registry import backend_of
from shardtensor.communication.transfer import whole_array
from shardtensor.core import default_interpreter, outermost
from shardtensor.errors import DeviceMemoryError
from shardtensor.host import blockwise, memory_pool
from shardtensor.host.blockwise import LONG
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.jit.c_executor import CompiledKernel, Prepared, prepared_copy
from shardtensor.interpreters.jit.expressions import has_c
from shardtensor.interpreters.jit.fused import Fused, reports_errors
from shardtensor.interpreters.jit.fused_products import FusedProduct, is_product
from shardtensor.interpreters.jit.groups import is_kernel, is_on_host
from shardtensor.interpreters.jit.kernel import HostArray
from shardtensor.interpreters.jit.operands import address
from shardtensor.interpreters.programs.program import Equation, Program, Var, kind_of, replace_vars
from shardtensor.interpreters.programs.replay import Node, Step, Values, compute, step_of
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, mark_array, tensor
from shardtensor.tensor.value import Aval

CHUNK = 5e-3
"""The seconds, about, after which Python looks for signals."""

_FIRST = 64
"""The number of trips of the first chunk."""

_NUMBERS = 1 << 10
"""The number of trips for which the values of Python numbers are stored: the most of a chunk, if there are any."""

_UNKNOWN = 1000
"""The number of trips that stands for one that a program does not know."""

_ENDLESS = 1 << 62


class Part(NamedTuple):
    """A function of a loop.

    Attributes:
        program: its program.
        nodes: what the program computes, in order.
        kernels: the kernels, by the identity of their last equation.
    """

    program: Program
    nodes: Sequence[Node]
    kernels: Mapping[int, Fused]


# -- which loops C can run -------------------------------------------------------------------------


def trips_of(equation: Equation) -> int:
    """Returns the number of trips of a loop, about; 1 for a branch."""
    if equation.op.name == "conditional_loop":
        return _UNKNOWN
    if equation.op.name != "counted_loop":
        return 1
    begin, end = equation.operands[2]
    return max(end - begin, 1) if type(begin) is type(end) is int else _UNKNOWN


def repeats_in_c(equation: Equation, programs: Sequence[Program], nodes: Sequence[Sequence[Node]]) -> bool:
    """Returns whether C may run the trips of a loop.

    Args:
        equation: the loop.
        programs: those of its functions.
        nodes: the nodes of each, where short loops have kernels, too.
    """
    if equation.op.name not in ("counted_loop", "conditional_loop"):
        return False
    if not all(_is_known(v) for program in programs for v in (*program.inputs, *program.free(), *program.outputs)):
        return False
    pairs = zip(programs, nodes, strict=True)
    return all(_is_task(node) for program, some in pairs for node in _split(program, some)[1])


def _split(program: Program, nodes: Sequence[Node]) -> tuple[list[Equation], list[Node]]:
    """Returns the equations that are computed once, before the trips, since they depend on nothing in the loop, and the
    nodes of each trip.
    """
    known = set(program.free())
    once: list[Equation] = []
    rest: list[Node] = []
    for node in nodes:
        equation = node[0]
        has_kernel = len(node) > 1 or is_kernel(node, True, True) or is_product(equation)
        if has_kernel or equation.programs or not known.issuperset(equation.reads()):
            rest.append(node)
            continue
        known.update(equation.makes())
        once.append(equation)
    return once, rest


def _is_known(v: Var) -> bool:
    """Whether a value is an array of the host or a number."""
    return not isinstance(v.kind, Aval) or is_on_host(v.kind)


def _is_task(node: Node) -> bool:
    """Whether a node is a kernel on arrays of the host, or computes only where an array is, or a Python number."""
    if not all(_is_known(v) for equation in node for v in (*equation.makes(), *equation.reads())):
        return False
    (equation, *others) = node
    if others or is_kernel(node, True, True) or is_product(equation):
        return True
    return _is_assignment(equation) if equation.writes else _is_view(equation) or _is_number(equation)


def _is_view(equation: Equation) -> bool:
    """Whether an equation selects elements at fixed places, or copies all."""
    if equation.op.name == "getitem":
        (index,) = equation.params
        return all(type(k) is int for k in (index if type(index) is tuple else (index,)))
    return equation.op.name in _SAME or equation.op.name in ("view", "broadcast_to", *_FILLED)


_SAME = ("copy", "transfer_to")
"""The operators whose result has the elements of the operand, in one memory at the same places."""

_FILLED = {"zeros_like": 0, "ones_like": 1}
"""The operators whose result does not depend on the elements of the operand."""


def _is_assignment(equation: Equation) -> bool:
    """Whether an equation writes an array or a number of the same dtype to the elements of a view."""
    if not equation.op.assigns or equation.into is None or equation.into.part is not None:
        return False
    _, value, index = equation.operands
    kind, dtype = kind_of(value), equation.results.kind.dtype
    if isinstance(kind, type):
        return index is Ellipsis and kind in _DTYPES and _DTYPES[kind] == dtype
    return index is Ellipsis and kind.dtype == dtype


_DTYPES = {kind: np.dtype(kind) for kind in (bool, int, float)}
"""The dtypes of Python numbers."""


def _is_number(equation: Equation) -> bool:
    return type(equation.results) is Var and isinstance(equation.results.kind, type)


def loop_of(equation: Equation, parts: Sequence[Part], dead: Sequence[int]) -> CLoop | None:
    """Returns a loop that C runs once its kernels are compiled; None if there are no kernels, or some have no C.

    Args:
        equation: the loop.
        parts: its functions: the body, after the condition if there is one.
        dead: the numbers of the values that are dropped after it.
    """
    kernels = [fused for part in parts for fused in part.kernels.values()]
    if all(type(f) is FusedProduct for f in kernels) or not all(_has_c(f) for f in kernels):
        return None
    loop = CLoop(equation, parts, kernels, dead)
    return loop if loop.fits else None


def _has_c(fused: Fused) -> bool:
    return type(fused) is FusedProduct or (type(fused) is Fused and has_c(fused.kernel) and not fused.spans)


# -- loops -----------------------------------------------------------------------------------------


class CLoop:
    """A loop that C runs; see `loop_of`.

    Attributes:
        fits: whether the body returns arrays and numbers.
    """

    def __init__(
        self, equation: Equation, parts: Sequence[Part], kernels: Sequence[Fused], dead: Sequence[int]
    ) -> None:
        self._equation = equation
        self._kernels = kernels
        self._dead = dead
        self._is_counted = equation.op.name == "counted_loop"
        self._free = list(dict.fromkeys([v for part in parts for v in part.program.free()]))
        self.body, self.condition = parts[-1], parts[0] if len(parts) > 1 else None
        self.given = [dict(zip(p.program.positions, p.program.inputs, strict=True)) for p in parts]
        first, count = int(self._is_counted), len(leaves(equation.operands[0]))
        body = self.given[-1]
        self.number = body.get(0) if self._is_counted else None
        self.carry = [body.get(first + k) for k in range(count)]
        slices = len(leaves(equation.operands[1])) if self._is_counted else 0
        self.slices = [body.get(first + count + k) for k in range(slices)]
        made, results = leaves(self.body.program.result), leaves(equation.results)
        self.after, self.ys = made[:count], made[count:] if self._is_counted else []
        self.results, self.stacked = results[:count], results[count:]
        self.fits = _are_arrays([*self.after, *self.ys], results) and _are_arrays(self.carry, self.results)
        split = [_split(part.program, part.nodes) for part in parts]
        self.nodes = [rest for _, rest in split]
        self._once = [
            step_of(equation, part.program, EAGER)
            for part, (once, _) in zip(parts, split, strict=True)
            for equation in once
        ]
        self.computed = [node[0] for rest in self.nodes for node in rest if _is_number(node[0])]
        numbers = {*([self.number] if self.number else []), *[e.results for e in self.computed]}
        read = [v for rest in self.nodes for node in rest if not _is_number(node[0]) for e in node for v in e.reads()]
        self.numbers = list(dict.fromkeys([v for v in (*read, *made) if type(v) is Var and v in numbers]))
        bases = {e.results: e.operands[0] for node in self.body.nodes for e in node if e.writes}
        self.windows = {
            k for k, v in enumerate(self.after) if v in bases and bases[v] == self.carry[k] and v not in self.after[:k]
        }

    def step(self, alone: Step) -> Step:
        """Returns the step of the loop.

        Args:
            alone: the step in which Python runs the trips.
        """
        names = [v for v in (*self.results, *self.stacked) if v is not None]

        def step(values: Values) -> None:
            made = self._made(values)
            if made is None:
                alone(values)
                return
            for v, x in zip(names, made, strict=True):
                values[v.number] = x
            for number in self._dead:
                values[number] = None

        return step

    def _made(self, values: Values) -> list[Any] | None:
        """Returns the results; None where Python has to run the loop."""
        if reports_errors() or any(fused.compiled is None for fused in self._kernels):
            return None
        if not self._is_counted and outermost() is not default_interpreter():
            return None  # Each trip records its transfers.
        init = leaves(replace_vars(self._equation.operands[0], values))
        try:
            begin, trips, xs = 0, _ENDLESS, []
            if self._is_counted:
                given, bounds = replace_vars(self._equation.operands[1:], values)
                begin, end = [operator.index(x) for x in bounds]
                trips, xs = end - begin, leaves(given)
        except TypeError:
            return None  # Python's loop raises the error.
        if trips < 1:
            return None
        self.library = next(f.compiled.library for f in self._kernels if isinstance(f.compiled, CompiledKernel))
        around = {v.number: values[v.number] for v in self._free}
        for once in self._once:
            once(around)
        around = {number: _array(x) for number, x in around.items()}
        numbers = None
        if self._is_counted:
            numbers = range(begin, begin + trips)[:: -1 if self._equation.params[1] else 1]
        try:
            run = _Run(self, numbers, around, [_array(x) for x in init], [_array(x) for x in xs])
        except _Unfit:
            return None
        run.run()
        return run.results(init)


def _are_arrays(values: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether there is an array for each result that is one, and None for each other."""
    if len(values) != len(results):
        return False
    pairs = zip(values, results, strict=True)
    return all(v is None if x is None else type(v) is Var and isinstance(v.kind, Aval) for x, v in pairs)


class _Unfit(Exception):
    """C cannot run a loop on these arrays."""


def _array(x: Any) -> Any:
    """Returns the buffer of a tensor; host arrays and numbers unchanged."""
    return whole_array(x, "jit") if type(x) is ShardedTensor else x


# -- runs ------------------------------------------------------------------------------------------


class _Run:
    """One run of a loop.

    Args:
        loop: the loop.
        numbers: the number that the body gets in each trip; None for a loop with a condition.
        around: what the functions read of the program around the loop, by number.
        init: the leaves of the first carry.
        xs: the arrays of which each trip gets a slice.

    Attributes:
        around: what the functions read of the program around the loop, by number.
        numbers: the numbers.
        buffers: the arrays of each leaf of the carry, which even and odd trips read, and the others write.
        stacks: the stacked results.
        tables: the values of Python numbers in the trips of a chunk.
    """

    def __init__(
        self, loop: CLoop, numbers: range | None, around: dict[int, Any], init: Sequence[Any], xs: Sequence[Any]
    ) -> None:
        self.loop, self.numbers, self.around, self.xs = loop, numbers, around, xs
        self._made: dict[Var, HostArray] = {}
        self.buffers = [self._buffers(k, x) for k, x in enumerate(init)]
        self.stacks = [None if v is None else memory_pool.empty(v.kind.shape, v.kind.dtype) for v in loop.stacked]
        self.tables = {v: np.empty(_NUMBERS, v.kind) for v in loop.numbers}
        self._trips = _ENDLESS if numbers is None else len(numbers)
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
            raise _Unfit
        if self.loop.after[k] == v:
            return x, x
        made = [memory_pool.empty(kind.shape, kind.dtype) for _ in (0, 1)]
        for array in made if k in self.loop.windows else made[:1]:
            blockwise.copy_into(array, x)
        return made

    def array_of(self, v: Var) -> HostArray:
        """Returns the array of a value that every trip computes anew."""
        found = self._made.get(v)
        if found is None:
            assert isinstance(v.kind, Aval)
            found = self._made[v] = memory_pool.empty(v.kind.shape, v.kind.dtype)
        return found

    @property
    def library(self) -> ctypes.CDLL:
        """A library with the functions that run trips."""
        return self.loop.library

    def run(self) -> None:
        """Runs all trips.

        Raises:
            DeviceMemoryError: the memory for intermediate results cannot be allocated.
        """
        run = self.library["run_trips"]
        run.argtypes, run.restype = (ctypes.c_longlong, ctypes.c_longlong, *[ctypes.c_void_p] * 2), ctypes.c_longlong
        tables = [variant.table() for variant in self._variants]
        even, odd = [address(t) for t in (tables[0], tables[-1])]
        at, count = 0, _FIRST
        while True:
            count = min(count, _NUMBERS) if self.tables else count
            stop = min(at + count, self._trips)
            self._store_numbers(at, stop)
            begin = time.perf_counter()
            done = run(at, stop, even, odd)
            if done < 0:
                raise DeviceMemoryError("jit: no memory for the intermediate results of a row in a loop")
            if done < stop or stop == self._trips:
                self.done = done
                return
            seconds, at = time.perf_counter() - begin, stop
            count = 2 * count if seconds < CHUNK else max(count // 2, 1)

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
        made = []
        for k, v in enumerate(self.loop.results):
            if v is None:
                continue
            array = self.buffers[k][self.done % 2]
            if self.loop.after[k] == self.loop.carry[k]:
                array = blockwise.copied(array)
            x = tensor(v.kind, Storage((array,), ([],)))
            made.append(mark_array(x) if not v.kind.ndim and self._is_array(k, init) else x)
        return made + [
            tensor(v.kind, Storage((array,), ([],)))
            for v, array in zip(self.loop.stacked, self.stacks, strict=True)
            if v is not None
        ]

    def _is_array(self, k: int, init: Sequence[Any]) -> bool:
        """Whether a leaf of the last carry is one of the first carry, unchanged, that is an array without dimensions:
        what kernels compute are scalars.
        """
        after, carry = self.loop.after, self.loop.carry
        if isinstance(after[k].kind, type):
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

    def __init__(self, run: _Run, parity: int) -> None:
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
            self._add(loop.condition, loop.nodes[0])
            self._flag = self._flag_of(loop.condition.program.result)
        self._condition_count = len(self._calls)
        outs = [
            (x, buffers[1 - parity], 0) for x, buffers in zip(loop.after, run.buffers, strict=True) if x is not None
        ]
        outs += [(y, *self._slot(array)) for y, array in zip(loop.ys, run.stacks, strict=True) if array is not None]
        for x, array, step in outs:
            if type(x) is Var:
                self._targets.setdefault(x, (array, step))
        self._add(loop.body, loop.nodes[-1])
        for x, array, step in outs:
            self._assign(x, array, step)
        if any(call.geometry.seconds >= LONG for call in self._calls):
            raise _Unfit

    def _slot(self, array: HostArray) -> tuple[HostArray, int]:
        """Returns the slice of the first one of the trips, and the bytes from there to that of the next one."""
        numbers = self._run.numbers
        assert numbers is not None
        k = numbers[self._parity] - min(numbers[0], numbers[-1])
        return array[k, ...], 2 * numbers.step * array.strides[0]

    def _add_inputs(self, loop: CLoop) -> None:
        for given in loop.given[:-1]:
            for k, v in given.items():
                self._arrays[v.number] = self._run.buffers[k][self._parity]
        for leaf, buffers in zip(loop.carry, self._run.buffers, strict=True):
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
            raise _Unfit
        array = self._arrays[result.number]
        if not isinstance(array, np.ndarray) or array.shape or array.dtype != bool:
            raise _Unfit
        return address(array)

    # -- tasks ---------------------------------------------------------------------------------------

    def _add(self, part: Part, nodes: Sequence[Node]) -> None:
        """Adds the tasks of a function."""
        for node in nodes:
            fused = part.kernels.get(id(node[-1]))
            if fused is not None:
                self._add_kernel(fused)
            elif node[0].writes:
                self._add_assignment(node[0])
            elif not _is_number(node[0]):
                self._add_view(node[0])

    def _add_view(self, equation: Equation) -> None:
        """Adds the array of a result, which is where that of the operand is."""
        name, kind, x = equation.op.name, equation.results.kind, equation.operands[0]
        number = equation.results.number
        if name in _FILLED:
            self._arrays[number] = np.broadcast_to(np.array(_FILLED[name], kind.dtype), kind.shape)
            return
        whole = self._arrays[x.number] if type(x) is Var else x
        if not isinstance(whole, np.ndarray) or (type(x) is Var and x.number in self._numbered):
            raise _Unfit
        array = whole
        if name == "getitem":
            (index,) = equation.params
            array = whole[(*(index if type(index) is tuple else (index,)), ...)]
        elif name == "broadcast_to":
            array = np.broadcast_to(whole, kind.shape)
        elif equation.into is not None:
            array = equation.into.of(kind.backend if isinstance(kind, Aval) else backend_of(HOST), whole)
        if array.shape != kind.shape or array.dtype != kind.dtype or not np.may_share_memory(array, whole):
            raise _Unfit
        self._arrays[number], self._steps[number] = array, self._steps.get(x.number, 0) if type(x) is Var else 0

    def _add_kernel(self, fused: Fused) -> None:
        call = fused.prepared(self._arrays, self._target)
        if call is None:
            raise _Unfit
        self._append(call, fused.pointers())

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

    def _copy(self, x: Any, target: HostArray, step: int) -> None:
        number = x.number if type(x) is Var else -1
        source = self._arrays[number] if number >= 0 else x
        if not isinstance(source, np.ndarray):
            source = np.asarray(source, target.dtype)
        call = prepared_copy(self._run.library, source, target)
        if call is None:
            raise _Unfit
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
    made = [(*call.addresses(), 0, call.geometry.rows) for call in calls if call.geometry.rows]
    return np.array(made, np.int64).reshape(-1, 5)
