"""Groups of equations inside of maps that run as one kernel, on the NumPy arrays of one device.

A call of a mapped function on one device computes with arrays in place of tensors. All calls of a map run their kernels
in the same way, as C or as NumPy's functions, so that equal operands have equal results on all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.host import memory_pool
from shardtensor.interpreters.jit.c.c_executor import CompiledKernel
from shardtensor.interpreters.jit.cuda.cuda_executor import CudaKernel
from shardtensor.interpreters.jit.grouping.fused import Fused, reports_errors
from shardtensor.interpreters.jit.grouping.groups import is_on_host
from shardtensor.interpreters.programs.program import Equation, Var, vars_of
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval

COMPILED = -1
"""The number under which the values of a call have its compiled kernels: a mapping. It is the same for all calls."""


def may_join(equation: Equation) -> bool:
    """Returns whether a kernel in a map may compute an equation: one of numbers and of NumPy's arrays of one device.

    A host array that the function closes over is not one of them, since its transfer to the device is recorded.
    """
    if any(isinstance(x, np.ndarray) for x in equation.operands):
        return False
    return all(_is_of_one_device(v) for v in (*vars_of(equation.operands), *equation.makes()))


def _is_of_one_device(v: Var) -> bool:
    kind = v.kind
    return isinstance(kind, type) or (isinstance(kind, Aval) and is_on_host(kind) and kind.sharding.mesh.size == 1)


class FusedInMap(Fused):
    """A group with its kernel, in the program of one call of a map. Its values are arrays in place of tensors."""

    def __call__(self, values: Any) -> bool:
        """Computes the group; returns whether it did: not where an operand is a tensor, which the function closes over,
        nor where the bits would not be those of eager mode.
        """
        if any(number >= 0 and type(values[number]) is ShardedTensor for number, _, _ in self._inputs):
            return False
        if not super().__call__(values):
            return False
        for v, kind, _ in self._kept:
            if not kind.ndim:
                values[v.number] = values[v.number][()]  # NumPy's functions return scalars.
        return True

    def _compiled_for(self, values: Any) -> CompiledKernel | CudaKernel | None:
        return None if reports_errors() else values[COMPILED].get(self.kernel)

    def _is_exact(self, inputs: Sequence[Any]) -> bool:
        """See `Fused`. Sums of arrays in maps are those of NumPy, which eager mode does not divide into blocks."""
        return not self._ordered and super()._is_exact(inputs)

    def _result(self, kind: Aval, array: np.ndarray[Any, Any]) -> Any:
        return array


def is_large_product(equation: Equation) -> bool:
    """Returns whether an equation in a map is a matrix product of arrays of one device whose memory the pool has."""
    v = equation.results
    if equation.op.name != "matmul" or any(p is not None for p in equation.params) or not may_join(equation):
        return False
    return isinstance(v.kind, Aval) and v.kind.nbytes >= memory_pool.POOLED_FROM


def product(x1: Any, x2: Any, kind: Aval) -> Any:
    """Returns the matrix product of two arrays; None if one of them is a tensor, which the function closes over."""
    if type(x1) is ShardedTensor or type(x2) is ShardedTensor:
        return None
    return np.matmul(x1, x2, out=memory_pool.empty(kind.shape, kind.dtype))
