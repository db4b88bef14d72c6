"""The executor of kernels that is always available: NumPy's functions, block by block.

Each function of the kernel is applied to one block before the next block begins, and intermediate results are written
into scratch memory that stays in the cache of a core. Threads take different blocks. The results have the bits of
NumPy's functions applied to whole arrays, and floating-point errors are reported as by those.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shardtensor.functions.building.monoids import sum_of_squares
from shardtensor.host import blockwise, memory_pool
from shardtensor.host.blockwise import Blocks
from shardtensor.host.fp_errors import FloatingPointErrors, Step
from shardtensor.host.signals import Interrupts
from shardtensor.host.threads import each
from shardtensor.interpreters.jit.kernels.kernel import HostArray, Kernel, Node, Shape, Value
from shardtensor.interpreters.jit.kernels.kernel_operands import checked, separated

BLOCK = 1 << 17
"""The maximum number of elements of a block, of 4 bytes or more: its arrays stay in the caches, and a call of NumPy
takes much longer than its overhead, of some microseconds. Blocks of smaller elements have as many bytes.
"""

_LEAST = 1 << 15
"""The number of elements, of 8 bytes, of a block in loops that are too short for several tasks of longer blocks. Blocks
of smaller elements have as many bytes.
"""

MOST_ROW = 1 << 19
"""The maximum number of elements of a row. Eager mode divides the sums of longer ones."""

_TASK = 1 << 19
"""The number of elements of a task in long loops. Scratch memory is allocated once for each task."""

_TASKS = 16
"""The number of tasks that a loop should have at least, so that threads have about the same to do."""

_ORDERED = ("sum", "prod", "mean", "sum_of_squares")
"""The reductions whose bits depend on the order in which elements are added."""


def is_exact(kernel: Kernel, shape: Shape, inputs: Sequence[Any]) -> bool:
    """Returns whether `run` gives the bits of NumPy's functions on whole arrays.

    NumPy adds in the order of the memory, so that rows have to be contiguous where floats are added.
    """
    ordered = [n for n in kernel.nodes if n.reduces and n.name in _ORDERED and n.dtype[0] in "fc"]
    if not ordered:
        return True
    row = shape[kernel.ndim - kernel.row_ndim :]
    if math.prod(row) > MOST_ROW or not all(all(kernel.varies(n.operands[0])) for n in ordered):
        return False
    whole = [x for x, operand in zip(inputs, kernel.inputs, strict=True) if all(operand.varies)]
    return bool(whole) and all(x.shape == shape and x.flags.c_contiguous for x in whole)


def run(kernel: Kernel, shape: Shape, inputs: Sequence[Any], outputs: Sequence[HostArray]) -> None:
    """Runs a kernel; see `shardtensor.interpreters.jit.kernels.kernel` for the arguments.

    Raises:
        FloatingPointError: see `numpy.errstate`. Outputs may be partly written then, as after any exception.
        DeviceMemoryError: the memory for intermediate results cannot be allocated.
    """
    arrays = checked(kernel, shape, inputs, outputs)
    outer = shape[: kernel.ndim - kernel.row_ndim]
    if 0 in outer:
        return
    program = _program(kernel)
    itemsize = _itemsize(kernel)
    longest = min(BLOCK * 4 // min(itemsize, 4), max(_LEAST * 8 // min(itemsize, 8), math.prod(shape) // _TASKS))
    if math.prod(shape) <= longest:
        _store(
            program, program.evaluate(arrays, shape[len(outer) :] if kernel.row_ndim else (), None, {}, None), outputs
        )
        return
    arrays, in_place = separated(arrays, outputs)
    program = _program(kernel, in_place)
    arrays, targets, outer, inner = _in_memory_order(kernel, shape, arrays, outputs)
    size = max(longest // max(math.prod(inner), 1), 1)
    sides = [1] * len(outer)
    for d in reversed(range(len(outer))):
        sides[d] = max(min(outer[d], size), 1)
        size //= sides[d]
    blocks = Blocks(outer, sides)
    elements = math.prod(sides) * math.prod(inner)
    per_task = max(min(_TASK // elements, len(blocks) // _TASKS), 1)
    names = [_error_name(node) for node in kernel.nodes] or ["cast"]

    def task(k: int) -> None:
        scratch = _Scratch(program.slots, elements)
        with errors.step() as step:
            for b in range(k * per_task, min((k + 1) * per_task, len(blocks))):
                _block(program, blocks[b], inner, arrays, targets, scratch, step, fixed)

    with Interrupts(), FloatingPointErrors(*names) as errors:
        with errors.step() as first:
            fixed = program.fixed(arrays, first)
        each(task, -(-len(blocks) // per_task))


def _block(
    program: _Program, here: tuple[slice, ...], row: Shape, arrays: Sequence[HostArray],
    targets: Sequence[HostArray], scratch: _Scratch, step: Step, fixed: dict[Value, HostArray],
) -> None:  # fmt: skip
    """Computes one block."""
    kernel = program.kernel
    parts = [
        x[tuple([s if n > 1 else slice(None) for s, n in zip(here, x.shape, strict=False)])] for x in arrays
    ]  # fmt: skip
    index: Any = (*here, ...)  # The ellipsis makes a 0-d block an array.
    outs = [out[index] for out in targets]
    direct = {o.value: out for out, o in zip(outs, kernel.outputs, strict=True) if o.value in program.direct}
    _store(program, program.evaluate(parts, row, scratch, direct, step, fixed), outs)


def _store(program: _Program, values: Sequence[HostArray], outs: Sequence[HostArray]) -> None:
    """Writes the outputs that are not written yet."""
    kernel = program.kernel
    for out, output in zip(outs, kernel.outputs, strict=True):
        value = values[output.value]
        if value is not out:
            rows = value.shape[: kernel.ndim - kernel.row_ndim]
            np.copyto(out, value.reshape(rows) if output.per_row else value)


def _in_memory_order(
    kernel: Kernel, shape: Shape, arrays: list[HostArray], outputs: Sequence[HostArray]
) -> tuple[list[HostArray], list[HostArray], Shape, Shape]:
    """Returns the arrays with the loop dimensions in the order of the first output's memory, as one dimension where all
    of them are contiguous, then the dimensions that are divided into blocks and those that are not.
    """
    if kernel.row_ndim:
        at = kernel.ndim - kernel.row_ndim
        return arrays, list(outputs), shape[:at], shape[at:]
    strides = outputs[0].strides
    order = sorted(range(kernel.ndim), key=lambda d: -abs(strides[d]))
    arrays = [x.transpose(order) for x in arrays]
    targets = [out.transpose(order) for out in outputs]
    whole = [x for x in arrays if x.size > 1] + targets
    if all(x.flags.c_contiguous and x.size == targets[0].size for x in whole):
        arrays = [x.reshape(-1) for x in arrays]
        targets = [out.reshape(-1) for out in targets]
        return arrays, targets, targets[0].shape, ()
    return arrays, targets, tuple([shape[d] for d in order]), ()


@functools.lru_cache(1 << 8)
def _itemsize(kernel: Kernel) -> int:
    """Returns the size in bytes of the largest elements of a kernel."""
    sizes = [np.dtype(kernel.dtype(v)).itemsize for v in range(kernel.values) if any(kernel.varies(v))]
    return max(sizes, default=8)


def _error_name(node: Node) -> str:
    """Returns the name that NumPy's floating-point errors give a step."""
    if node.reduces:
        return "reduce"
    return "cast" if node.name == "astype" else str(getattr(getattr(np, node.name), "__name__", node.name))


# -- programs: the steps of a kernel and the scratch memory of their results -----------------------


class _Scratch:
    """The scratch memory of one task: slots, each for one array of a block."""

    def __init__(self, slots: Sequence[int], elements: int) -> None:
        starts = [0]
        for itemsize in slots:
            starts.append(starts[-1] + -(-itemsize * elements // 64) * 64)
        memory = memory_pool.empty((starts[-1],), np.dtype("u1"))
        self._slots = [memory[a:b] for a, b in itertools.pairwise(starts)]

    def array(self, slot: int, shape: Shape, dtype: np.dtype[Any]) -> HostArray:
        """Returns the memory of a slot as an array."""
        size = math.prod(shape) * dtype.itemsize
        array: HostArray = self._slots[slot][:size].view(dtype).reshape(shape)
        return array


class _Program:
    """The functions of a kernel's nodes.

    Attributes:
        kernel: the kernel.
        direct: the values that are computed into outputs. Others may be read after an output that shares memory with an
            input has been written.
        slots: the item sizes of the slots of scratch memory.
    """

    def __init__(self, kernel: Kernel, in_place: bool) -> None:
        self.kernel = kernel
        last = kernel.values - 1
        self.direct = {
            out.value
            for out in kernel.outputs
            if not out.per_row and kernel.is_whole[out.value] and (out.value == last or not in_place)
        }
        self.slots: list[int] = []
        self._functions = [_function(node, kernel.row_ndim) for node in kernel.nodes]
        self._slot_of = self._assign()

    def _assign(self) -> list[int]:
        """Returns the slot of each node's result, -1 for one that is computed into an output. A slot is used again
        after the last use of its value.
        """
        kernel, first = self.kernel, len(self.kernel.inputs)
        last = {v: k for k, node in enumerate(kernel.nodes) for v in node.operands}
        last |= dict.fromkeys([out.value for out in kernel.outputs], len(kernel.nodes))
        free: list[int] = []
        slot_of: list[int] = []
        for k, node in enumerate(kernel.nodes):
            itemsize = np.dtype(node.dtype).itemsize
            dying = [v for v in set(node.operands) if v >= first and last[v] == k]
            if first + k in self.direct:
                slot_of.append(-1)
                free += [slot_of[v - first] for v in dying]
                continue
            # A function of whole blocks may overwrite its operand; `where` and `astype` read it in another order.
            if not node.reduces and node.name not in ("where", "astype") and kernel.is_whole[first + k]:
                kept = [v for v in dying if kernel.is_whole[v] and kernel.dtype(v) == node.dtype]
                free += [slot_of[v - first] for v in kept[:1]]
                dying = [v for v in dying if v not in kept[:1]]
            fitting = [s for s in reversed(free) if self.slots[s] == itemsize]
            if fitting:
                free.remove(fitting[0])
                slot_of.append(fitting[0])
            else:
                slot_of.append(len(self.slots))
                self.slots.append(itemsize)
            free += [slot_of[v - first] for v in dying]
            if first + k not in last:  # Nothing uses the result.
                free.append(slot_of[-1])
        return slot_of

    def fixed(self, inputs: Sequence[HostArray], step: Step) -> dict[Value, HostArray]:
        """Returns the values of nodes that are the same in all blocks: those of scalars, and not of reductions."""
        kernel, values = self.kernel, dict(enumerate(inputs))
        first = len(inputs)
        for k, node in enumerate(kernel.nodes):
            if not node.reduces and not any(kernel.varies(first + k)) and values.keys() >= set(node.operands):
                step.at = k
                values[first + k] = self._functions[k](*[values[v] for v in node.operands], out=None)
        return {v: x for v, x in values.items() if v >= first}

    def evaluate(
        self, inputs: Sequence[HostArray], row: Shape, scratch: _Scratch | None, direct: dict[Value, HostArray],
        step: Step | None, fixed: Mapping[Value, HostArray] = MappingProxyType({}),
    ) -> list[HostArray]:  # fmt: skip
        """Returns all values for one block.

        Args:
            inputs: the inputs of the block.
            row: the shape of a row.
            scratch: the memory for intermediate results; None if NumPy allocates them.
            direct: the arrays into which values are written, by value.
            step: is told which function runs.
            fixed: the values that are known already.
        """
        values = list(inputs)
        for k, (function, node) in enumerate(zip(self._functions, self.kernel.nodes, strict=True)):
            if len(values) in fixed:
                values.append(fixed[len(values)])
                continue
            operands = [values[v] for v in node.operands]
            if node.reduces and operands[0].shape[-len(row) :] != row:
                operands = [np.broadcast_to(operands[0], operands[0].shape[: -len(row)] + row)]
            out = None
            if scratch is not None and step is not None:
                step.at = k
                out = direct.get(len(values))
                if out is None:
                    shape = self._shape(node, operands)
                    out = scratch.array(self._slot_of[k], shape, np.dtype(node.dtype))
            values.append(function(*operands, out=out))
        return values

    def _shape(self, node: Node, operands: Sequence[HostArray]) -> Shape:
        if node.reduces:
            outer = operands[0].ndim - self.kernel.row_ndim
            return operands[0].shape[:outer] + (1,) * self.kernel.row_ndim
        first, *others = [x.shape for x in operands]
        if all(shape == first or not shape for shape in others):  # `broadcast_shapes` takes long.
            return first
        return np.broadcast_shapes(first, *others)


@functools.lru_cache(1 << 8)
def _program(kernel: Kernel, in_place: bool = False) -> _Program:
    return _Program(kernel, in_place)


# -- functions: of arrays and ``out=``, an array or None -------------------------------------------


def _function(node: Node, row_ndim: int) -> Callable[..., HostArray]:
    axes = tuple(range(-row_ndim, 0))
    if node.reduces and node.name == "mean":
        return functools.partial(_mean, axes=axes)
    if node.reduces and node.name == "sum_of_squares":
        return functools.partial(_sum_of_squares, axes=axes)
    if node.reduces:
        dtype = np.dtype(node.dtype) if node.name in ("sum", "prod") else None
        return functools.partial(_REDUCING[node.name].reduce, axis=axes, keepdims=True, dtype=dtype)
    if node.name == "astype":
        return functools.partial(_astype, dtype=np.dtype(node.dtype))
    if node.name == "where":
        return _where
    function: Callable[..., HostArray] = getattr(np, node.name)
    return function


_REDUCING: dict[str, np.ufunc] = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "any": np.logical_or,
    "all": np.logical_and,
}  # fmt: skip


def _mean(x: HostArray, *, out: HostArray | None, axes: tuple[int, ...]) -> HostArray:
    total = np.add.reduce(x, axis=axes, keepdims=True, out=out)
    count = math.prod([x.shape[d] for d in axes])
    mean: HostArray = np.true_divide(total, count, out=total)
    return mean


def _sum_of_squares(x: HostArray, *, out: HostArray | None, axes: tuple[int, ...]) -> HostArray:
    total: HostArray = sum_of_squares(x, tuple([x.ndim + d for d in axes]))
    if out is None:
        return total
    np.copyto(out, total)
    return out


def _astype(x: HostArray, *, out: HostArray | None, dtype: np.dtype[Any]) -> HostArray:
    out = np.empty_like(x, dtype) if out is None else out
    np.copyto(out, x, casting="unsafe")
    return out


def _where(condition: HostArray, x1: HostArray, x2: HostArray, *, out: HostArray | None) -> HostArray:
    if out is None:
        return np.where(condition, x1, x2)
    blockwise.where(condition, x1, x2, out=out)
    return out
