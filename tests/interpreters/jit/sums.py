"""Kernels of several lengths, for tests of the compiler; child processes import this module and nothing of pytest."""

from __future__ import annotations

import numpy as np

from shardtensor.interpreters.jit.c import c_executor
from shardtensor.interpreters.jit.kernels.kernel import Kernel, KernelBuilder


def plus(count: int) -> Kernel:
    """x + x + x …"""
    k = KernelBuilder(1)
    x = value = k.input("f4", (True,))
    for _ in range(count):
        value = k.call("add", value, x)
    k.output(value)
    return k.build()


def run(kernel: Kernel) -> float:
    """Compiles a kernel anew, as a new process would, and runs it on ones."""
    c_executor._known.pop(kernel, None)
    out = np.empty(3, "f4")
    c_executor.compile_kernels([kernel])[kernel].run((3,), [np.ones(3, "f4")], [out])
    return float(out[1])
