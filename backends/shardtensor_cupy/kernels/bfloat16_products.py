"""Matrix products of bfloat16 by cuBLAS, whose sums are float32.

CuPy's own `matmul` takes matrices of bfloat16, but no stacks of them, and returns bfloat16 only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_NO_REDUCED_SUMS = 16
"""cuBLAS's ``CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION``: where several blocks add up one element, its partial
sums are not rounded to the dtype of the result.
"""

_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


class Products:
    """The products of one CuPy.

    Attributes:
        are_fast: whether all GPUs multiply bfloat16, which those of compute capability 8.0 and more do.
    """

    def __init__(self, cupy: Any, gpus: int) -> None:
        self._cupy = cupy
        self.are_fast = all(int(cupy.cuda.Device(k).compute_capability) >= 80 for k in range(gpus))

    def __call__(self, x1: Any, x2: Any, dtype: np.dtype[Any]) -> Any:
        """Returns the product of arrays of bfloat16 of two or more dimensions, as bfloat16 or float32.

        Args:
            x1, x2: the arrays, of any strides, on the current GPU.
            dtype: the dtype of the result, to which the sums are rounded once.
        """
        batch = np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        (rows, inner), columns = x1.shape[-2:], x2.shape[-1]
        shape = (*batch, rows, columns)
        if not inner or 0 in shape:
            return self._cupy.zeros(shape, dtype)
        if batch and x1.shape[:-2] == batch and math.prod(x2.shape[:-2]) == 1 and x1.flags.c_contiguous:
            x1, x2 = x1.reshape(-1, inner), x2.reshape(inner, columns)
            batch, rows = (), math.prod(shape[:-1])  # One product of all rows.
        out = self._cupy.empty(shape, dtype)
        count = math.prod(batch)
        left, right = [self._laid(self._stacked(x, batch)) for x in (x1, x2)]
        cublas, handle = self._cupy.cuda.cublas, self._cupy.cuda.device.get_cublas_handle()
        runtime = self._cupy.cuda.runtime
        small, wide = runtime.CUDA_R_16BF, runtime.CUDA_R_32F
        kind = wide if dtype == np.float32 else small
        # The matrices of cuBLAS are in column-major order: it computes the transposed product of the transposed ones.
        numbers = int(right[1]), int(left[1]), columns, rows, inner, _ONE.ctypes.data
        (a, _, a_step, a_next), (b, _, b_step, b_next) = right, left
        compute, algorithm = cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT
        mode = cublas.getMathMode(handle)
        cublas.setMathMode(handle, mode | _NO_REDUCED_SUMS)
        try:
            if count == 1:
                cublas.gemmEx(
                    handle, *numbers, a.data.ptr, small, a_step, b.data.ptr, small, b_step, _ZERO.ctypes.data,
                    out.data.ptr, kind, columns, compute, algorithm,
                )  # fmt: skip
            else:
                cublas.gemmStridedBatchedEx(
                    handle, *numbers, a.data.ptr, small, a_step, a_next, b.data.ptr, small, b_step, b_next,
                    _ZERO.ctypes.data, out.data.ptr, kind, columns, rows * columns, count, compute, algorithm,
                )  # fmt: skip
        finally:
            cublas.setMathMode(handle, mode)
        return out

    def _stacked(self, x: Any, batch: tuple[int, ...]) -> Any:
        """Returns an operand with one dimension before those of its matrices: of all matrices, or of the only one."""
        if math.prod(x.shape[:-2]) > 1 and x.shape[:-2] != batch:
            x = self._cupy.broadcast_to(x, (*batch, *x.shape[-2:]))
        return x if x.ndim == 3 else x.reshape(-1, *x.shape[-2:])

    def _laid(self, x: Any) -> tuple[Any, bool, int, int]:
        """Returns a stack of matrices that cuBLAS can read, whether they are in column-major order, and the elements
        from one row (column) to the next, and from one matrix to the next.
        """
        count, rows, columns = x.shape
        size, (next_one, down, across) = x.itemsize, x.strides
        next_one = next_one if count > 1 else 0
        for turned, n, step, m, one in ((False, rows, down, columns, across), (True, columns, across, rows, down)):
            fits = n == 1 or (step % size == 0 and step >= m * size)
            if fits and (m == 1 or one == size) and next_one >= 0 and next_one % size == 0:
                return x, turned, step // size if n > 1 else m, next_one // size
        return self._cupy.ascontiguousarray(x), False, columns, rows * columns if count > 1 else 0
