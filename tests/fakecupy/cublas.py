"""cuBLAS's products of bfloat16, by the addresses, strides and orders that are given to it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from . import cuda, graphs, memory
from . import world as w

CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 68, -1
CUDA_R_32F, CUDA_R_16BF = 0, 14
NO_REDUCED_SUMS = 16
_modes: dict[int, int] = {}


def get_cublas_handle() -> int:
    """Returns the handle of the current device."""
    return 1 + cuda.get_device()


def getMathMode(handle: int) -> int:
    return _modes.get(handle, 0)


def setMathMode(handle: int, mode: int) -> None:
    _modes[handle] = mode


def _matrices(pointer: int, kind: int, step: int, next_one: int, shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """Returns the memory at an address, and matrices in it, which are in column-major order."""
    import ml_dtypes

    dtype = np.dtype({CUDA_R_32F: np.float32, CUDA_R_16BF: ml_dtypes.bfloat16}[kind])
    count, rows, columns = shape
    if step < rows:
        raise RuntimeError("CUBLAS_STATUS_INVALID_VALUE")
    block = memory.block_at(pointer)
    at = memory.MemoryPointer(memory.UnownedMemory(block.ptr, block.extent, None), pointer - block.ptr)
    size = dtype.itemsize
    raw = at.raw(((count - 1) * next_one + (columns - 1) * step + rows) * size)
    return at, np.ndarray(shape, dtype, raw, 0, (next_one * size, size, step * size))


def _number(pointer: int) -> float:
    return float(ctypes.c_float.from_address(pointer).value)


def gemmStridedBatchedEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_kind: int, lda: int,
    a_next: int, b: int, b_kind: int, ldb: int, b_next: int, beta: int, c: int, c_kind: int, ldc: int, c_next: int,
    count: int, compute: int, algorithm: int,
) -> None:  # fmt: skip
    graphs.check_library("cuBLAS")
    if handle != get_cublas_handle() or compute != CUBLAS_COMPUTE_32F or (_number(alpha), _number(beta)) != (1, 0):
        raise NotImplementedError("another handle, type or factor")
    if not getMathMode(handle) & NO_REDUCED_SUMS:
        raise NotImplementedError("sums in bfloat16")
    left_at, left = _matrices(a, a_kind, lda, a_next, (count, *((k, m) if transa else (m, k))))
    right_at, right = _matrices(b, b_kind, ldb, b_next, (count, *((n, k) if transb else (k, n))))
    out_at, out = _matrices(c, c_kind, ldc, c_next, (count, m, n))
    left, right = left.swapaxes(1, 2) if transa else left, right.swapaxes(1, 2) if transb else right

    def run() -> None:
        out[...] = np.matmul(left.astype(np.float32), right.astype(np.float32))

    w.world.launch("gemm of bfloat16", run, (left_at, right_at), (out_at,))


def gemmEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, a: int, a_kind: int, lda: int, b: int,
    b_kind: int, ldb: int, beta: int, c: int, c_kind: int, ldc: int, compute: int, algorithm: int,
) -> None:  # fmt: skip
    gemmStridedBatchedEx(
        handle, transa, transb, m, n, k, alpha, a, a_kind, lda, 0, b, b_kind, ldb, 0, beta, c, c_kind, ldc, 0, 1,
        compute, algorithm,
    )  # fmt: skip


_FUNCTIONS = (getMathMode, setMathMode, gemmEx, gemmStridedBatchedEx)
NAMES = {f.__name__: f for f in _FUNCTIONS} | {
    "CUBLAS_COMPUTE_32F": CUBLAS_COMPUTE_32F,
    "CUBLAS_GEMM_DEFAULT": CUBLAS_GEMM_DEFAULT,
}
RUNTIME = {"CUDA_R_32F": CUDA_R_32F, "CUDA_R_16BF": CUDA_R_16BF}
