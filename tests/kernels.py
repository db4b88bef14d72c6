"""What the double of CuPy leaves out and tests for GPUs use: kernels of the user's, and hooks on the memory pool.

On the double a raw kernel is a Python function of its name, queued where CuPy would queue it; the operation of an
elementwise kernel must be both C and Python.
"""

from __future__ import annotations

from typing import Any

import pytest

TWICE = r"""
extern "C" __global__ void twice(const double* x, double* out, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2 * x[i];
}
"""


def _twice(x: Any, out: Any, n: Any) -> None:
    out[...] = x * 2


_BODIES = {"twice": _twice, "spin": lambda nanoseconds: None}


class RawKernel:
    """As ``cupy.RawKernel``."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        assert f"void {name}(" in code
        self._body = _BODIES[name]

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert all(isinstance(n, int) for n in (*grid, *block))
        self._body(*args)


class ElementwiseKernel:
    """As ``cupy.ElementwiseKernel``."""

    def __init__(self, in_params: str, out_params: str, operation: str, name: str = "kernel") -> None:
        self._names = [p.split()[1] for p in in_params.split(",")]
        self._out, self._operation = out_params.split()[1], operation

    def __call__(self, *args: Any) -> Any:
        values = dict(zip(self._names, args, strict=True))
        exec(self._operation, {}, values)
        return values[self._out]


class MemoryHook:
    """As ``cupy.cuda.MemoryHook``; nobody calls it."""

    name = "MemoryHook"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def install(patch: pytest.MonkeyPatch, cupy: Any) -> None:
    """Puts them into the double."""
    patch.setattr(cupy, "RawKernel", RawKernel, raising=False)
    patch.setattr(cupy, "ElementwiseKernel", ElementwiseKernel, raising=False)
    patch.setattr(cupy.cuda, "MemoryHook", MemoryHook, raising=False)
