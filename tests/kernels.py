"""Users' raw kernels and memory hooks for the simulated CuPy; tests for GPUs use them.

A raw kernel that C compilers do not take is simulated by a Python function with its name, whose operations are queued
like a kernel of CuPy.
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
    """Simulates ``cupy.RawKernel`` of one of these functions."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        assert f"void {name}(" in code
        self._body = _BODIES[name]

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert all(isinstance(n, int) for n in (*grid, *block))
        self._body(*args)


class MemoryHook:
    """Simulates ``cupy.cuda.MemoryHook``; it is never called."""

    name = "MemoryHook"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def install(patch: pytest.MonkeyPatch, cupy: Any) -> None:
    """Adds the kernels and hooks to the simulated CuPy."""
    compiled = cupy.RawKernel

    def raw_kernel(code: str, name: str, options: tuple[str, ...] = ()) -> Any:
        return RawKernel(code, name, options) if name in _BODIES else compiled(code, name, options)

    patch.setattr(cupy, "RawKernel", raw_kernel)
    patch.setattr(cupy.cuda, "MemoryHook", MemoryHook, raising=False)
