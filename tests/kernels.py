"""Users' kernels and memory hooks for the simulated CuPy, which has none of its own; tests for GPUs use them.

A raw kernel is simulated by a Python function with its name, whose operations are queued like a kernel of CuPy; the
operation of an elementwise kernel must be valid both in C and in Python.
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
    """Simulates ``cupy.RawKernel``."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        assert f"void {name}(" in code
        self._body = _BODIES[name]

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        assert all(isinstance(n, int) for n in (*grid, *block))
        self._body(*args)


class ElementwiseKernel:
    """Simulates ``cupy.ElementwiseKernel``."""

    def __init__(self, in_params: str, out_params: str, operation: str, name: str = "kernel") -> None:
        self._names = [p.split()[1] for p in in_params.split(",")]
        self._out, self._operation = out_params.split()[1], operation

    def __call__(self, *args: Any) -> Any:
        values = dict(zip(self._names, args, strict=True))
        exec(self._operation, {}, values)
        return values[self._out]


class MemoryHook:
    """Simulates ``cupy.cuda.MemoryHook``; it is never called."""

    name = "MemoryHook"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def install(patch: pytest.MonkeyPatch, cupy: Any) -> None:
    """Adds the kernels and hooks to the simulated CuPy."""
    patch.setattr(cupy, "RawKernel", RawKernel, raising=False)
    patch.setattr(cupy, "ElementwiseKernel", ElementwiseKernel, raising=False)
    patch.setattr(cupy.cuda, "MemoryHook", MemoryHook, raising=False)
