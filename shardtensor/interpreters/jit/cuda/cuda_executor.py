"""The executor of kernels on arrays of a GPU: each call is one launch, or a few where long rows are divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import Backend, RawKernel
from shardtensor.backend.strides import loop_strides, merged
from shardtensor.host.fork import cached_property
from shardtensor.interpreters.jit.cuda.cuda_source import MOST_THREADS, elementwise_source, row_source
from shardtensor.interpreters.jit.kernels.kernel import Kernel, Shape

SEGMENT = 1 << 13
"""The minimum number of elements of a segment of a row."""

BLOCKS = 1 << 10
"""The number of blocks from which on rows are not divided: several for each multiprocessor of a large GPU."""

_BLOCK = 256
"""The number of threads of a block, unless rows are long: several short rows are in one block."""

_LAYOUTS = 64
"""The number of shapes and strides that a kernel keeps."""

PARTS = np.dtype(np.int64)
"""The dtype of the memory of the parts of rows."""

_PARAMETERS = 4000
"""The maximum size in bytes of the parameters of a kernel, of which CUDA takes 4096."""


def fits(kernel: Kernel) -> bool:
    """Returns whether the parameters of a kernel fit into those of a launch."""
    arrays = len(kernel.inputs) + len(kernel.outputs)
    return arrays * (16 + 16 * max(kernel.ndim, 1)) <= _PARAMETERS


class CudaKernel:
    """A kernel on the GPUs of a backend. CUDA compiles it at the first call on each GPU.

    Attributes:
        kernel: the kernel.
    """

    def __init__(self, kernel: Kernel, backend: Backend) -> None:
        self.kernel = kernel
        self._backend = backend
        self._functions: dict[Any, RawKernel] = {}
        self._layouts: dict[Any, _Layout] = {}

    def run(
        self,
        shape: Shape,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        memory: Sequence[Any] | None = None,
    ) -> None:
        """Runs the kernel on the current device; see `shardtensor.interpreters.jit.kernels.kernel` for the arguments.
        No output shares memory with an input, unless both are the same array.

        Args:
            shape, inputs, outputs: see there.
            memory: arrays of the sizes and the dtype of `memory`; None: they are allocated.
        """
        if 0 in shape:
            return
        if self.kernel.row_ndim:
            layout, scalars = self._layout(shape, inputs, outputs)
            if memory is None:
                memory = [self._backend.xp.empty((size,), dtype=PARTS) for size in self.memory(shape)]
            self._rows(layout, scalars, (*inputs, *outputs), memory)
        else:
            self._elementwise(*inputs, *outputs)

    def launches(self, shape: Shape) -> int:
        """Returns the number of launches of a call with loops of a shape; 2 for any number of several."""
        return 2 if self.memory(shape) else 1

    def memory(self, shape: Shape) -> tuple[int, ...]:
        """Returns the numbers of elements of the memory of the parts of rows; nothing if rows are not divided."""
        reductions = sum(node.reduces for node in self.kernel.nodes)
        if not reductions or 0 in shape:
            return ()
        at = len(shape) - self.kernel.row_ndim
        rows, n = math.prod(shape[:at]), math.prod(shape[at:])
        segments, _ = divided(rows, n)
        return (rows * reductions, rows * reductions * segments) if segments > 1 else ()

    @cached_property
    def _elementwise(self) -> Any:
        text = elementwise_source(self.kernel)
        return self._backend.elementwise_kernel(*text[:3], name="shardtensor_kernel", preamble=text.preamble)

    def _layout(self, shape: Shape, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[_Layout, tuple[int, ...]]:
        """Returns how it walks over arrays, and the positions of the inputs that are numbers."""
        scalars = tuple([k for k, x in enumerate(inputs) if not self._backend.is_array(x)])
        arrays = [x for k, x in enumerate(inputs) if k not in scalars] + list(outputs)
        key = shape, scalars, *[(x.shape, x.strides) for x in arrays]
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = _Layout(self.kernel, shape, frozenset(scalars), arrays)
        return layout, scalars

    def _rows(self, layout: _Layout, scalars: Sequence[int], operands: Sequence[Any], memory: Sequence[Any]) -> None:
        """Launches one function for all rows, or two for each stage and one at the end where rows are divided."""
        arguments: list[Any] = []
        strides = iter(layout.strides)
        for k, x in enumerate(operands):
            if k in scalars:
                arguments.append(self.kernel.operands[k][0].type(x))
            else:
                arguments += [x, *next(strides)]
        nothing = np.int64(0)
        if layout.segments < 2:
            self._launch(layout, "rows", layout.blocks, layout.threads, (nothing, nothing), arguments)
            return
        rows, segments, source = layout.rows, layout.segments, layout.source
        for stage in range(source.stages):
            self._launch(layout, f"part_{stage}", rows * segments, (_BLOCK, 1, 1), memory, arguments)
            self._launch(layout, f"join_{stage}", rows, layout.threads, memory, arguments)
        if source.writes_elements:
            self._launch(layout, "finish", rows * segments, (_BLOCK, 1, 1), memory, arguments)

    def _launch(
        self, layout: _Layout, name: str, blocks: int, threads: tuple[int, int, int], memory: Any, arguments: Any
    ) -> None:
        source = layout.source
        function = self._functions.get((source.key, name))
        if function is None:
            text = source.whole if name == "rows" else source.divided
            function = self._functions[source.key, name] = self._backend.raw_kernel(text, name)
        function(blocks, threads, [*layout.numbers, *memory, *layout.sizes, *arguments])


class _Layout:
    """How a kernel with reductions walks over arrays of certain shapes and strides.

    Attributes:
        source: the text for them.
        rows: the number of rows.
        segments: the number of parts of a row; 1 if rows are not divided.
        blocks: the number of blocks that compute all rows, if they are not divided.
        threads: those of a block that computes rows or joins parts.
        numbers, sizes: the arguments of all launches before and after the memory of the parts.
        strides: those of each array, along the merged dimensions.
    """

    def __init__(self, kernel: Kernel, shape: Shape, scalars: frozenset[int], arrays: Sequence[Any]) -> None:
        at = kernel.ndim - kernel.row_ndim
        strides = [loop_strides(x, shape) for x in arrays]
        outer = merged(range(at), shape, strides) or [(1, [0] * len(arrays))]
        inner = merged(range(at, kernel.ndim), shape, strides)
        self.source = row_source(kernel, len(outer), len(inner), scalars)
        self.rows, n = math.prod(shape[:at]), math.prod(shape[at:])
        per_row = [False] * (len(arrays) - len(kernel.outputs)) + [out.per_row for out in kernel.outputs]
        self.strides = [
            [np.int64(column[k]) for _, column in (outer if once else [*outer, *inner])]
            for k, once in enumerate(per_row)
        ]
        self.sizes = [np.int64(size) for size, _ in (*outer, *inner)]
        # Without reductions there is nothing to join, and the values of each row are written at once.
        self.segments, length = divided(self.rows, n) if self.source.stages else (1, n)
        threads = min(MOST_THREADS if n >= SEGMENT else _BLOCK, _power_of_two(n))
        together = min(max(_BLOCK // threads, 1), _power_of_two(self.rows))
        if self.segments > 1:
            threads, together = min(_BLOCK, _power_of_two(self.segments)), 1
        self.blocks, self.threads = -(-self.rows // together), (threads, together, 1)
        self.numbers = [np.int64(number) for number in (self.rows, n, self.segments, length)]


def divided(rows: int, n: int) -> tuple[int, int]:
    """Returns the number of parts of a row of n elements, and their length; 1 if rows are not divided."""
    segments = min(-(-n // SEGMENT), BLOCKS // max(rows, 1))
    if segments < 2:
        return 1, n
    length = -(-n // segments)
    return -(-n // length), length


def _power_of_two(n: int) -> int:
    """Returns the smallest power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()
