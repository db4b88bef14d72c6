"""The executor of kernels on arrays of a GPU: each call is one launch, or a few where long rows are divided."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import Backend, RawKernel
from shardtensor.interpreters.jit.cuda_source import MOST_THREADS, RowSource, elementwise_source, row_source
from shardtensor.interpreters.jit.kernel import Kernel, Shape
from shardtensor.interpreters.jit.operands import loop_strides, merged

SEGMENT = 1 << 13
"""The minimum number of elements of a segment of a row."""

BLOCKS = 1 << 10
"""The number of blocks from which on rows are not divided: several for each multiprocessor of a large GPU."""

_BLOCK = 256
"""The number of threads of a block, unless rows are long: several short rows are in one block."""

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

    def run(self, shape: Shape, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Runs the kernel on the current device; see `shardtensor.interpreters.jit.kernel` for the arguments. No output
        shares memory with an input, unless both are the same array.
        """
        if 0 in shape:
            return
        if self.kernel.row_ndim:
            _Rows(self, shape, inputs, outputs).run()
        else:
            self._elementwise(*inputs, *outputs)

    @functools.cached_property
    def _elementwise(self) -> Any:
        text = elementwise_source(self.kernel)
        return self._backend.elementwise_kernel(*text[:3], name="shardtensor_kernel", preamble=text.preamble)

    def function(self, source: RowSource, name: str) -> RawKernel:
        """Returns a function of the text of a kernel with reductions."""
        known = self._functions.get((source.key, name))
        if known is None:
            text = source.whole if name == "rows" else source.divided
            known = self._functions[source.key, name] = self._backend.raw_kernel(text, name)
        return known

    def is_array(self, x: Any) -> bool:
        """Whether an input is an array, not a number."""
        return self._backend.is_array(x)

    def empty(self, size: int) -> Any:
        """Returns memory of ``size`` times 8 bytes on the current device."""
        return self._backend.xp.empty((size,), dtype=np.dtype(np.int64))


class _Rows:
    """One call of a kernel with reductions."""

    def __init__(self, made: CudaKernel, shape: Shape, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        kernel = made.kernel
        at = kernel.ndim - kernel.row_ndim
        scalars = frozenset([k for k, x in enumerate(inputs) if not made.is_array(x)])
        arrays = [x for k, x in enumerate(inputs) if k not in scalars] + list(outputs)
        strides = [loop_strides(x, shape) for x in arrays]
        outer = merged(range(at), shape, strides) or [(1, [0] * len(arrays))]
        inner = merged(range(at, kernel.ndim), shape, strides)
        self._rows, self._n = math.prod(shape[:at]), math.prod(shape[at:])
        self._made = made
        self._source = row_source(kernel, len(outer), len(inner), scalars)
        self._sizes = [np.int64(n) for n, _ in (*outer, *inner)]
        self._arguments: list[Any] = []
        numbers = iter(range(len(arrays)))
        for k, x in enumerate(inputs):
            if k in scalars:
                self._arguments.append(kernel.operands[k][0].type(x))
            else:
                self._arguments += self._array(x, next(numbers), outer, inner)
        for x, out in zip(outputs, kernel.outputs, strict=True):
            self._arguments += self._array(x, next(numbers), outer, [] if out.per_row else inner)

    def _array(self, x: Any, number: int, outer: Any, inner: Any) -> Iterator[Any]:
        yield x
        for _, strides in (*outer, *inner):
            yield np.int64(strides[number])

    def run(self) -> None:
        """Launches one function for all rows, or two for each stage and one at the end where rows are divided."""
        rows, n, source = self._rows, self._n, self._source
        segments = min(-(-n // SEGMENT), BLOCKS // rows)
        if segments < 2:
            threads = min(MOST_THREADS if n >= SEGMENT else _BLOCK, _power_of_two(n))
            together = min(max(_BLOCK // threads, 1), _power_of_two(rows))
            self._launch("rows", -(-rows // together), (threads, together, 1), 1, n, 0, 0)
            return
        length = -(-n // segments)
        segments = -(-n // length)
        count = len(source.reductions)
        totals, parts = self._made.empty(rows * count), self._made.empty(rows * segments * count)
        divided, whole = (_BLOCK, 1, 1), (min(_BLOCK, _power_of_two(segments)), 1, 1)
        for stage in range(source.stages):
            self._launch(f"part_{stage}", rows * segments, divided, segments, length, totals, parts)
            self._launch(f"join_{stage}", rows, whole, segments, length, totals, parts)
        if source.writes_elements:
            self._launch("finish", rows * segments, divided, segments, length, totals, parts)

    def _launch(
        self, name: str, blocks: int, threads: tuple[int, int, int], segments: int, length: int, totals: Any, parts: Any
    ) -> None:
        numbers = [np.int64(x) for x in (self._rows, self._n, segments, length)]
        memory = [np.int64(x) if type(x) is int else x for x in (totals, parts)]
        self._made.function(self._source, name)(blocks, threads, [*numbers, *memory, *self._sizes, *self._arguments])


def _power_of_two(n: int) -> int:
    """Returns the smallest power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()
