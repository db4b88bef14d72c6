"""The executor of kernels that runs compiled C on the arrays of one device or host buffer.

`compile_kernels` compiles all kernels of a program at once; `submit` does so in the background.
Calls release the GIL and divide long loops over the thread team. Floating-point errors are not reported.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from shardtensor.backend.strides import loop_strides, merged
from shardtensor.errors import BackendError, DeviceMemoryError
from shardtensor.host import memory_pool
from shardtensor.host.blockwise import BYTE, LONG
from shardtensor.host.threads import each, num_threads
from shardtensor.interpreters.jit.c.c_loop_library import (
    FUNCTIONS,
    LOOPS,
    PRODUCTS,
    LoopFunctions,
    ProductGeometry,
    loop_source,
)
from shardtensor.interpreters.jit.c.c_source import SEGMENT, c_source
from shardtensor.interpreters.jit.c.compiler import Compiler, find_compiler, load, vectorized_functions
from shardtensor.interpreters.jit.kernels.expressions import EXPENSIVE, has_c
from shardtensor.interpreters.jit.kernels.kernel import HostArray, Kernel, Shape, dtype_name
from shardtensor.interpreters.jit.kernels.kernel_operands import address, checked, separated
from shardtensor.interpreters.jit.kernels.row_schedule import row_schedule

Result = TypeVar("Result")

_FUNCTION = 1e-9
"""The seconds that an expensive function takes for one element."""

_PIECE = 2e-3
"""The seconds of work after which a thread looks for signals."""

_LAST_PIECE = 50e-6
"""The seconds of work of the last pieces of a loop, at least: taking one from the others takes a few microseconds."""

_ALIGNED = 1 << 12
"""The pieces of a loop begin at multiples of this number of elements, so that threads write different cache lines."""


_LONG_ROW = 1 << 16
"""The number of elements from which a row is divided over threads if there are few rows."""

STEPS = 8
"""The number of steps that are computed for some rows before the next rows."""

_BAND = 1 << 14
"""The number of elements that one call computes then: those of all steps stay in the cache."""

_CHUNK = 1e-2
"""The estimated seconds of work of a chunk of rows, after which a thread looks for signals."""

_WIDTH = 8
"""The number of rows of a chunk, at least, for each by which it narrows: the rows between chunks, at most a quarter of
all, are read again. It is at least two, since a chunk narrows at both ends.
"""

_COPIED = (1, 2, 4, 8)
"""The sizes in bytes of the elements that libraries have functions to copy."""

_LAYOUTS = 64
"""The number of shapes and strides that a kernel keeps."""


class CompiledKernel:
    """A kernel that has been compiled.

    Attributes:
        kernel: the kernel.
        library: its library.
    """

    def __init__(self, kernel: Kernel, library: ctypes.CDLL, number: int) -> None:
        self.kernel = kernel
        self.library = library
        self._function = library[f"kernel_{number}"]
        self._function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong)
        self._line = None if kernel.row_ndim else library[f"kernel_{number}_line"]
        if kernel.row_ndim:
            self._part = library[f"kernel_{number}_part"]
            pointer, integer = ctypes.c_void_p, ctypes.c_longlong
            self._part.argtypes = (ctypes.c_int, integer, pointer, pointer, pointer, pointer, integer, integer)
            self._part.restype = None
        expensive = sum(node.name in EXPENSIVE for node in kernel.nodes)
        self._seconds = expensive * _FUNCTION + len(kernel.nodes) * 1e-10
        self._geometries: dict[Any, _Geometry] = {}
        self._pointers = ctypes.c_void_p * (len(kernel.inputs) + len(kernel.outputs))

    def run(self, shape: Shape, inputs: Sequence[Any], outputs: Sequence[HostArray]) -> None:
        """Runs the kernel; see `shardtensor.interpreters.jit.kernels.kernel` for the arguments.

        Raises:
            DeviceMemoryError: the memory for intermediate results cannot be allocated.
        """
        arrays, _ = separated(checked(self.kernel, shape, inputs, outputs), outputs)
        arrays = [x if x.flags.aligned else x.copy() for x in arrays]
        targets = [out if out.flags.aligned else np.empty(out.shape, out.dtype) for out in outputs]
        operands = [*arrays, *targets]
        key = (shape, *[x.shape for x in arrays], *[x.strides for x in operands])
        geometry = self._geometries.get(key)
        if geometry is None:
            geometry = self._add_geometry(key, shape, operands)
        if not geometry.rows:
            return
        # The arrays are held by this frame until the last thread has returned.
        self._divide(geometry, self._pointers(*[address(x) for x in operands]))
        for out, target in zip(outputs, targets, strict=True):
            if target is not out:
                np.copyto(out, target)

    def prepared(self, shape: Shape, inputs: Sequence[Any], outputs: Sequence[HostArray]) -> Prepared | None:
        """Returns a call of the kernel on these arrays; None if an array has to be copied."""
        originals = checked(self.kernel, shape, inputs, outputs)
        arrays, _ = separated(list(originals), outputs)
        operands = [*arrays, *outputs]
        if any(x is not y for x, y in zip(arrays, originals, strict=True)) or not all(
            x.flags.aligned for x in operands
        ):
            return None
        key = (shape, *[x.shape for x in arrays], *[x.strides for x in operands])
        geometry = self._geometries.get(key) or self._add_geometry(key, shape, operands)
        pointers = self._pointers(*[address(x) for x in operands])
        return Prepared(self.library, self._function, geometry, pointers, operands, self._line)

    def _add_geometry(self, key: Any, shape: Shape, operands: Sequence[HostArray]) -> _Geometry:
        geometry = _Geometry(self.kernel, shape, [loop_strides(x, shape) for x in operands])
        geometry.seconds = math.prod(shape) * self._seconds + BYTE * sum([x.nbytes for x in operands])
        if len(self._geometries) >= _LAYOUTS:
            self._geometries.clear()
        self._geometries[key] = geometry
        return geometry

    def _divide(self, geometry: _Geometry, pointers: Any) -> None:
        """Runs the function for all elements or rows, in several threads if it takes long."""
        rows = geometry.rows
        if geometry.seconds < LONG:
            self._call(geometry.array, pointers, 0, rows)
            return
        if geometry.row_size >= _LONG_ROW and rows < 4 * num_threads():
            self._divide_rows(geometry, pointers)
            return
        ends = _pieces(rows, 1 if self.kernel.row_ndim else _ALIGNED, geometry.seconds, num_threads())
        each(lambda k: self._call(geometry.array, pointers, ends[k], ends[k + 1]), len(ends) - 1)

    def _divide_rows(self, geometry: _Geometry, pointers: Any) -> None:
        """Runs the function for a few long rows, each of which is divided over threads."""
        n = geometry.row_size
        schedule = row_schedule(self.kernel, stores=True)
        steps, stored, reductions = 2 * len(schedule.stages) - 1, len(schedule.stored), len(schedule.totals)
        room = -(-(n * 8) // 64) * 64 + 64
        # The threads write into these arrays, which this frame holds until the last one has returned.
        scratch = memory_pool.empty((stored * room + 64,), np.dtype("u1"))
        segments = -(-n // SEGMENT)
        totals = np.empty(reductions + reductions * segments, np.int64)
        memory = address(scratch), address(totals), address(totals) + 8 * reductions
        ends = _pieces(segments, 1, geometry.seconds, num_threads())
        for offsets in geometry.offsets():
            places = self._pointers(*[p + offset for p, offset in zip(pointers, offsets, strict=True)])

            def part(step: int, begin: int, end: int, places: Any = places) -> None:
                self._part(step, n, places, *memory, begin, end)

            for step in range(steps):
                unit = SEGMENT if step == steps - 1 else 1
                if step % 2:
                    part(step, 0, 0)
                    continue

                def work(k: int, step: int = step, unit: int = unit) -> None:
                    part(step, ends[k] * unit, min(ends[k + 1] * unit, n))

                each(work, len(ends) - 1)

    def _call(self, geometry: Any, pointers: Any, begin: int, end: int) -> None:
        if self._function(geometry, pointers, begin, end):
            raise DeviceMemoryError(f"jit: no memory for the intermediate results of a row of {self.kernel}")


@functools.lru_cache(1024)
def _pieces(count: int, unit: int, seconds: float, threads: int) -> tuple[int, ...]:
    """Returns where the pieces of a loop begin, and where the last one ends. Threads take one after the other, and the
    later ones are shorter, so that all threads end at about the same time also where one of them starts late or shares
    its core.

    Args:
        count: the number of steps of the loop, such as elements or rows.
        unit: the number of which each piece but the last one has a multiple.
        seconds: the estimated time of all steps in one thread.
        threads: the number of threads.
    """
    most, least = count * _PIECE / seconds, count * _LAST_PIECE / seconds
    ends = [0]
    while ends[-1] < count:
        size = min(max((count - ends[-1]) / (2 * threads), least), most)
        ends.append(min(ends[-1] + max(math.ceil(size / unit), 1) * unit, count))
    return tuple(ends)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call of a kernel that has not been made.

    Attributes:
        library: the library of the kernel.
        function: the kernel.
        geometry: shape and strides.
        pointers: the addresses of the arrays.
        operands: the arrays, which it keeps alive.
        line: the function that computes contiguous elements, if there is one.
    """

    library: ctypes.CDLL
    function: Any
    geometry: Any
    pointers: Any
    operands: Sequence[HostArray]
    line: Any = None

    def task(self) -> tuple[int, int, int, int, int]:
        """Returns the call as a task of ``run_trips``."""
        if self.line is not None and self.geometry.is_flat:
            function = ctypes.cast(self.line, ctypes.c_void_p).value or 0
            return function, 0, ctypes.addressof(self.pointers), 0, self.geometry.rows
        return *self.addresses(), 0, self.geometry.rows

    def addresses(self) -> tuple[int, int, int]:
        """Returns the addresses of the function and of its first two arguments."""
        function = ctypes.cast(self.function, ctypes.c_void_p).value or 0
        return function, ctypes.addressof(self.geometry.array), ctypes.addressof(self.pointers)

    def __call__(self) -> None:
        """Makes the call, in this thread."""
        if self.geometry.rows and self.function(self.geometry.array, self.pointers, 0, self.geometry.rows):
            raise DeviceMemoryError("jit: no memory for the intermediate results of a row")

    def pointer(self, k: int) -> int:
        """Returns the address of the pointer to an operand."""
        return ctypes.addressof(self.pointers) + k * ctypes.sizeof(ctypes.c_void_p)


def run_steps(calls: Sequence[Prepared], shape: Shape, reach: int) -> None:
    """Makes calls of which each reads what the one before writes, in blocks; see `temporal_blocking`.

    The calls write two arrays alternately, and those after the first one read the array that they do not write.

    Args:
        calls: the calls, in order.
        shape: the shape of the loop of all calls.
        reach: the largest distance, in rows, between an element that is written and one that is read for it.
    """
    rows, inner = shape[0], math.prod(shape[1:])
    run = calls[0].library["run_tasks"]
    run.argtypes, run.restype = (ctypes.c_longlong, ctypes.c_void_p), None
    for begin in range(0, len(calls), STEPS):
        several = calls[begin : begin + STEPS]
        narrowing = reach * (len(several) - 1)
        seconds = sum(call.geometry.seconds for call in several)
        ideal = max(2 * num_threads(), int(seconds / _CHUNK))
        chunks = max(min(ideal, rows // (_WIDTH * narrowing + max(_BAND // inner, 1))), 1)
        ends = np.linspace(0, rows, chunks + 1).astype(np.int64).tolist()
        tables = [_tasks(several, inner, reach, a, b, rows) for a, b in itertools.pairwise(ends)]
        tables += [_between(several, inner, reach, end) for end in ends[1:-1]]

        def work(k: int, tables: Any = tables) -> None:
            run(len(tables[k]), address(tables[k]))

        each(work, chunks)
        each(lambda k, work=work, first=chunks: work(first + k), chunks - 1)  # type: ignore[misc]


def _tasks(calls: Sequence[Prepared], inner: int, reach: int, begin: int, end: int, rows: int) -> npt.NDArray[np.int64]:
    """Returns the calls for a chunk of rows, in bands: a step follows two bands behind the step before.

    Each has the addresses of a function and its arguments, and the first and the last element.
    """
    band = max(_BAND // inner, reach, 1)
    steps, bands = np.divmod(np.arange(len(calls) * -(-(end - begin) // band)), -(-(end - begin) // band))
    first = np.maximum(begin + bands * band, begin + steps * reach * (begin > 0))
    last = np.minimum(np.minimum(begin + bands * band + band, end), end - steps * reach * (end < rows))
    order = np.argsort(bands + 2 * steps, kind="stable")
    order = order[first[order] < last[order]]
    called = np.array([call.addresses() for call in calls], np.int64)
    return np.column_stack([called[steps[order]], first[order] * inner, last[order] * inner])


def _between(calls: Sequence[Prepared], inner: int, reach: int, end: int) -> npt.NDArray[np.int64]:
    """Returns the calls for the rows between two chunks, of which the first one ends there."""
    rows = [
        (*call.addresses(), (end - k * reach) * inner, (end + k * reach) * inner) for k, call in enumerate(calls) if k
    ]
    return np.array(rows, np.int64).reshape(-1, 5)


class _Geometry:
    """The shape and strides of a call, with as few dimensions as possible.

    Attributes:
        array: what the compiled function reads.
        rows: the number of rows, or of elements if the kernel reduces nothing.
        is_row_major: whether elements are computed in row-major order of the loop.
        is_flat: whether it is one line without reductions, in which each array is either contiguous or one element.
        row_size: the number of elements of a row, if all rows are contiguous; otherwise 0.
        seconds: the estimated time in one thread.
    """

    def __init__(self, kernel: Kernel, shape: Shape, strides: Sequence[Sequence[int]]) -> None:
        dims = list(range(kernel.ndim))
        outer = kernel.ndim - kernel.row_ndim
        self.rows = math.prod(shape[:outer] if kernel.row_ndim else shape)
        self.seconds = 0.0
        self._shape, self._strides = shape, strides
        order = [] if kernel.row_ndim else self._order(kernel)
        self.is_row_major = order == sorted(order)
        if kernel.row_ndim:
            first, last = merged(dims[:outer], shape, strides), merged(dims[outer:], shape, strides)
        else:
            first, last = merged(order, shape, strides), []
        self._outer = first
        self.is_flat = not kernel.row_ndim and (self.rows == 1 or self._is_flat(kernel, first))
        self.row_size = self._contiguous(kernel, last)
        columns = [*first, *last] or [(1, [0] * len(strides))]
        numbers = [len(columns), len(last), *[n for n, _ in columns]]
        for k in range(len(strides)):
            numbers += [column[k] for _, column in columns]
        self.array = (ctypes.c_longlong * len(numbers))(*numbers)

    @staticmethod
    def _is_flat(kernel: Kernel, columns: Sequence[tuple[int, list[int]]]) -> bool:
        if len(columns) != 1:
            return False
        moving = [operand.varies[-1] for operand in kernel.inputs] + [True] * len(kernel.outputs)
        dtypes = [dtype for dtype, _ in (*kernel.operands, *kernel.results)]
        strides = [dtype.itemsize if m else 0 for m, dtype in zip(moving, dtypes, strict=True)]
        return columns[0][1] == strides

    @staticmethod
    def _contiguous(kernel: Kernel, last: Sequence[tuple[int, list[int]]]) -> int:
        if len(last) != 1:
            return 0
        n, column = last[0]
        moving = [not kernel.is_row(v) for v in range(len(kernel.inputs))] + [not out.per_row for out in kernel.outputs]
        values = [*range(len(kernel.inputs)), *[out.value for out in kernel.outputs]]
        sizes = [np.dtype(kernel.dtype(v)).itemsize for v in values]
        fit = [not m or s == size for m, s, size in zip(moving, column, sizes, strict=True)]
        return n if all(fit) else 0

    def offsets(self) -> Iterator[list[int]]:
        """Yields, for each row, the offsets of the arrays in bytes."""
        for index in itertools.product(*[range(n) for n, _ in self._outer]):
            columns = [[i * s for s in column] for i, (_, column) in zip(index, self._outer, strict=True)]
            yield [sum(offsets) for offsets in zip(*columns, strict=True)] or [0] * len(self._strides)

    def _order(self, kernel: Kernel) -> list[int]:
        """Returns the dimensions in the order of the first output's memory. The last one has to be one along which the
        same inputs vary as along the kernel's last one.
        """
        if not kernel.ndim:
            return []
        out = self._strides[len(kernel.inputs)]
        pattern = [operand.varies[-1] for operand in kernel.inputs]
        alike = [d for d in range(kernel.ndim) if [operand.varies[d] for operand in kernel.inputs] == pattern]
        long = [d for d in alike if self._shape[d] > 1] or [kernel.ndim - 1]
        inner = min(reversed(long), key=lambda d: abs(out[d]))
        others = [d for d in range(kernel.ndim) if d != inner and self._shape[d] > 1]
        return [*sorted(others, key=lambda d: -abs(out[d])), inner]


class _CopyGeometry:
    """The shape and strides of a copy; see `_Geometry`."""

    def __init__(self, size: int, shape: Shape, strides: Sequence[Sequence[int]]) -> None:
        columns = merged(range(len(shape)), shape, strides) or [(1, [0, 0])]
        numbers = [len(columns), size, *[n for n, _ in columns]]
        numbers += [column[k] for k in (0, 1) for _, column in columns]
        self.array = (ctypes.c_longlong * len(numbers))(*numbers)
        self.rows = math.prod(shape)
        self.seconds = 2 * BYTE * size * self.rows


class CompiledLoops:
    """The compiled functions of loops.

    Args:
        library: their library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        pointer, integer = ctypes.c_void_p, ctypes.c_longlong
        for name in ("copy_elements", *PRODUCTS.values()):
            library[name].argtypes = (pointer, pointer, integer, integer)
        self.run_trips = library["run_trips"]
        self.run_trips.argtypes, self.run_trips.restype = (integer, integer, pointer, pointer), integer

    def product(self, x: HostArray, y: HostArray, out: HostArray) -> Prepared | None:
        """Returns a call that computes a product of matrices; None if an array is not aligned."""
        operands = (x, y, out)
        if not all(array.flags.aligned for array in operands):
            return None
        return self._prepared(PRODUCTS[dtype_name(out.dtype)], ProductGeometry(x, y, out), operands)

    def copy(self, source: HostArray, target: HostArray) -> Prepared | None:
        """Returns a call that copies an array, which broadcasts to the other one; None if the elements have another
        dtype or size than those that it copies, or an array is not aligned.
        """
        size, shape = target.itemsize, target.shape
        if source.dtype != target.dtype or size not in _COPIED or not (source.flags.aligned and target.flags.aligned):
            return None
        operands = (np.broadcast_to(source, shape), target)
        geometry = _CopyGeometry(size, shape, [loop_strides(x, shape) for x in operands])
        return self._prepared("copy_elements", geometry, operands)

    def _prepared(self, name: str, geometry: Any, operands: Sequence[HostArray]) -> Prepared:
        pointers = (ctypes.c_void_p * len(operands))(*[address(x) for x in operands])
        return Prepared(self._library, self._library[name], geometry, pointers, operands)


# -- compilation -----------------------------------------------------------------------------------

_MOST = 1 << 10
"""The number of compiled kernels that are kept for other programs."""

_known: dict[Kernel, CompiledKernel] = {}

_HALVES = 4
"""The number of kernels from which on two processes compile them, each a half."""


Compiled: TypeAlias = "dict[Kernel | LoopFunctions, Any]"
"""The compiled functions of kernels: a `CompiledKernel`, or `CompiledLoops`."""


def compile_kernels(kernels: Sequence[Kernel | LoopFunctions]) -> Compiled:
    """Compiles kernels in one run of the compiler, or two at the same time. Those without expressions in C are missing
    in the result.

    Raises:
        BackendError: there is no compiler, or it fails.
    """
    compiled: Compiled = {LOOPS: _compiled_loops()} if LOOPS in kernels else {}
    return compiled | _compiled_kernels([kernel for kernel in kernels if isinstance(kernel, Kernel)])


@functools.cache
def _compiled_loops() -> CompiledLoops:
    return CompiledLoops(load(_compiler(), loop_source(), FUNCTIONS))


def _compiler() -> Compiler:
    compiler = find_compiler()
    if compiler is None:
        raise BackendError("jit: there is no C compiler; install one, or set SHARDTENSOR_CC to its command")
    return compiler


def _compiled_kernels(kernels: Sequence[Kernel]) -> Compiled:
    """Returns the compiled kernels, without those that have no expressions in C."""
    in_c = [kernel for kernel in dict.fromkeys(kernels) if has_c(kernel)]
    compiled = {kernel: known for kernel in in_c if (known := _known.get(kernel)) is not None}
    missing = [kernel for kernel in in_c if kernel not in compiled]
    if missing:
        new = _compiled(missing)
        compiled |= new
        if len(_known) + len(new) > _MOST:
            _known.clear()
        _known.update(new)
    return {kernel: compiled[kernel] for kernel in in_c}


def _compiled(kernels: Sequence[Kernel]) -> dict[Kernel, CompiledKernel]:
    compiler = _compiler()
    parts = [kernels[::2], kernels[1::2]] if len(kernels) >= _HALVES else [kernels]

    def library(part: Sequence[Kernel]) -> ctypes.CDLL:
        names = [name for k, kernel in enumerate(part) for name in _functions(kernel, k)]
        return load(compiler, c_source(part, vectorized_functions()), [*names, "run_tasks"])

    others = [_started(functools.partial(library, part)) for part in parts[1:]]
    libraries = [library(parts[0]), *[other.result() for other in others]]
    return {
        kernel: CompiledKernel(kernel, loaded, k)
        for part, loaded in zip(parts, libraries, strict=True)
        for k, kernel in enumerate(part)
    }


def _functions(kernel: Kernel, number: int) -> list[str]:
    """Returns the names of the functions of a kernel in its library."""
    return [f"kernel_{number}", f"kernel_{number}_part" if kernel.row_ndim else f"kernel_{number}_line"]


def submit(kernels: Sequence[Kernel | LoopFunctions]) -> Future[Compiled]:
    """Starts `compile_kernels` in another thread and returns its future. In the child of a fork it never completes.

    Where no thread can be started, it is complete when it is returned.
    """
    return _started(functools.partial(compile_kernels, kernels))


def _started(work: Callable[[], Result]) -> Future[Result]:
    """Starts work in a thread for which the end of the interpreter does not wait; where no thread can be started, the
    calling thread does the work.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="shardtensor_compile", daemon=True).start()
    except RuntimeError:  # The system's limit is reached.
        run()
        error = future.exception()
        if error is not None and not isinstance(error, Exception):  # A signal's handler raised it in this thread.
            raise error from None
    return future
