"""CuPy's ufuncs of large arrays as kernels of `ElementwiseKernel`: CuPy selects the loop, and has the code of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor_cupy.kernels.elementwise_kernel import TYPES, ElementwiseKernel

__all__ = ["LARGE", "LargeUfuncs", "in_columns", "is_apart"]

LARGE = 1 << 20
"""The number of elements from which on a kernel takes about as long as its launch."""

_OPTIONS = ("--std=c++17",)
"""Those of CuPy's kernels for ufuncs, so that arrays of all sizes have the same bits."""

_HEADERS = ("complex.cuh", "carray.cuh", "math_constants.h")
_OWN_HEADERS = {"float16": "float16.cuh", "bfloat16": "bfloat16.cuh"}

_CONVERTED_TO = {float: "fc", int: "iufc"}
"""The kinds of the dtypes to which Python numbers are converted."""

_CONVERTED_FROM = "biuf"
"""The kinds of dtypes between which C converts."""


class _LoopKernel(NamedTuple):
    kernel: ElementwiseKernel
    dtype: np.dtype[Any]


class LargeUfuncs:
    """Calls ufuncs of large arrays.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._array: Any = cupy.ndarray
        self._kernels: dict[Hashable, _LoopKernel | None] = {}

    def __call__(self, ufunc: Any, args: Sequence[Any], out: Any) -> Any:
        """Returns the result of a ufunc; NotImplemented where CuPy's own kernel has to compute it: for ufuncs with
        several results, dtypes without a type in C, and outputs that overlap with operands.

        Raises:
            OverflowError: a Python integer is out of the range of the dtype.
        """
        kinds = [x.dtype if isinstance(x, self._array) else type(x) for x in args]
        key = (ufunc.name, *kinds)
        if key not in self._kernels:
            self._kernels[key] = self._kernel(ufunc, kinds)
        loop = self._kernels[key]
        if loop is None:
            return NotImplemented
        arrays = [x for x in args if isinstance(x, self._array)]
        if out is None and in_columns(arrays):
            result = self(ufunc, [x.T if isinstance(x, self._array) else x for x in args], None)  # as CuPy
            return result if result is NotImplemented else result.T
        shape = arrays[0].shape if len(arrays) == 1 else np.broadcast_shapes(*[x.shape for x in arrays])
        if out is None:
            out = self._cupy.empty(shape, loop.dtype)
        elif out.shape != shape or out.dtype != loop.dtype or not all(is_apart(x, out) for x in arrays):
            return NotImplemented
        loop.kernel(*args, out)
        return out

    def _kernel(self, ufunc: Any, kinds: Sequence[Any]) -> _LoopKernel | None:
        """Returns the kernel of a ufunc for operands of these dtypes, and types of Python numbers."""
        dtypes = [kind for kind in kinds if isinstance(kind, np.dtype)]
        weak = [False if isinstance(kind, np.dtype) else kind for kind in kinds]
        loops = getattr(ufunc, "_ops", None)
        if loops is None or ufunc.nout != 1 or len(kinds) != ufunc.nin or ufunc._loop_prep:
            return None
        if any(
            kind not in _CONVERTED_TO or any(d.kind not in _CONVERTED_TO[kind] for d in dtypes) for kind in weak if kind
        ):
            return None
        loop = loops._guess_routine_from_in_types(tuple(map(np.dtype, kinds)), tuple(weak) if any(weak) else None)
        if loop is None or loop.error_func or loop._resolution_func or not isinstance(loop.routine, str):
            return None
        inputs, (output,) = list(map(np.dtype, loop.in_types)), map(np.dtype, loop.out_types)
        operands = [dtype if w else kind for kind, w, dtype in zip(kinds, weak, inputs, strict=True)]
        if not {dtype.name for dtype in (*operands, *inputs, output)} <= set(TYPES):
            return None
        return self._compiled(ufunc, loop.routine, operands, inputs, output)

    def _compiled(
        self, ufunc: Any, routine: str, operands: Sequence[Any], inputs: Sequence[Any], output: Any
    ) -> _LoopKernel | None:
        """Returns the kernel of a loop, whose code has variables ``in0``, ``out0`` and types ``in0_type``."""
        names, conversions = [], []
        for k, (own, dtype) in enumerate(zip(operands, inputs, strict=True)):
            names.append(f"{own.name} in{k}")
            if own != dtype:
                if own.kind not in _CONVERTED_FROM or dtype.kind not in _CONVERTED_FROM or "float16" in (own, dtype):
                    return None
                names[-1] = f"{own.name} given{k}"
                conversions.append(f"const in{k}_type in{k} = (in{k}_type)given{k};")
        types = {f"in{k}_type": dtype for k, dtype in enumerate(inputs)} | {"out0_type": output}
        preamble = "".join([f"typedef {TYPES[dtype.name]} {name};\n" for name, dtype in types.items()])
        operation = "\n".join([*conversions, routine])
        name = f"shardtensor_{ufunc.name.removeprefix('cupy_')}"
        outputs = f"{output.name} out0"
        used = [_OWN_HEADERS[dtype.name] for dtype in types.values() if dtype.name in _OWN_HEADERS]
        text = "".join([f"#include <cupy/{header}>\n" for header in (*_HEADERS, *used)]) + preamble + ufunc._preamble
        return _LoopKernel(
            ElementwiseKernel(self._cupy, ", ".join(names), outputs, operation, name, text, _OPTIONS), output
        )


def in_columns(arrays: Sequence[Any]) -> bool:
    """Whether all arrays are in column-major order only, with one number of dimensions: then they broadcast as their
    transposed arrays do.
    """
    if any(x.flags.c_contiguous or not x.flags.f_contiguous for x in arrays):
        return False
    return len({x.ndim for x in arrays}) == 1


def is_apart(x: Any, out: Any) -> bool:
    """Whether an operand and an output have no memory in common, or are the same array."""
    if x.data.ptr == out.data.ptr and x.shape == out.shape and x.strides == out.strides:
        return True
    begin, end, begins, ends = *_bounds(x), *_bounds(out)
    return bool(end <= begins or ends <= begin)


def _bounds(x: Any) -> tuple[int, int]:
    """Returns the address of the first byte of an array, and that after its last one."""
    reach = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
    begin = x.data.ptr + sum([step for step in reach if step < 0])
    return begin, x.data.ptr + sum([step for step in reach if step > 0]) + x.dtype.itemsize
