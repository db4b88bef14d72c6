"""The arrays of one call of a kernel: checked, broadcast, and separated where results would overwrite operands."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentTypeError, ShapeError
from shardtensor.host.units import counted
from shardtensor.interpreters.jit.kernels.kernel import HostArray, Kernel, Shape


def checked(kernel: Kernel, shape: Shape, inputs: Sequence[Any], outputs: Sequence[HostArray]) -> list[HostArray]:
    """Returns the inputs as arrays of ``kernel.ndim`` dimensions, each of the size of the loop or 1.

    Raises:
        ArgumentTypeError: the number or dtype of the arrays is not that of the kernel.
        ShapeError: the shape of an array does not fit.
    """
    if len(inputs) != len(kernel.inputs) or len(outputs) != len(kernel.outputs) or len(shape) != kernel.ndim:
        raise ArgumentTypeError(
            f"kernel: got {counted(len(inputs), 'input')}, {counted(len(outputs), 'output')}, shape {shape} for "
            f"{kernel}"
        )
    for out, (dtype, per_row) in zip(outputs, kernel.results, strict=True):
        out_shape = shape[: kernel.ndim - kernel.row_ndim] if per_row else shape
        if out.shape != out_shape or out.dtype != dtype or not out.flags.writeable:
            raise ShapeError(
                f"kernel: an output is {out.dtype}{out.shape}, writable: {out.flags.writeable}; "
                f"wanted a writable {dtype}{out_shape}"
            )
    return [_input(kernel, k, shape, x) for k, x in enumerate(inputs)]


def _input(kernel: Kernel, k: int, shape: Shape, x: Any) -> HostArray:
    dtype, is_scalar = kernel.operands[k]
    if is_scalar and getattr(x, "ndim", 0) == 0:
        scalar: HostArray = np.asarray(x, dtype).reshape((1,) * kernel.ndim)
        return scalar
    if not isinstance(x, np.ndarray) or x.dtype != dtype:
        raise ArgumentTypeError(f"kernel: input v{k} is {type(x).__name__} {getattr(x, 'dtype', '')}; wanted {dtype}")
    array: HostArray = x
    if array.shape == shape and kernel.is_whole[k]:
        return array
    if array.ndim != kernel.ndim or any(n not in (1, m) for n, m in zip(array.shape, shape, strict=True)):
        raise ShapeError(f"kernel: input v{k} has shape {array.shape}; wanted one that broadcasts to {shape}")
    for d, n in enumerate(array.shape):
        if n > 1 and not kernel.inputs[k].varies[d]:
            if array.strides[d]:
                raise ShapeError(f"kernel: input v{k} of shape {array.shape} varies along d{d}, unlike in {kernel}")
            array = array[(slice(None),) * d + (slice(1),)]
    return array


_WORK: Any = 1000
"""The effort of deciding whether two arrays have an element in common; beyond it, they are taken to have one."""


def separated(arrays: list[HostArray], outputs: Sequence[HostArray]) -> tuple[list[HostArray], bool]:
    """Returns the inputs, those copied that an output would overwrite, and whether an output is one of them.

    An input may be an output if both are the same array: each of its elements is read before it is overwritten.
    """
    in_place = False
    for out in outputs:
        for k, x in enumerate(arrays):
            if np.may_share_memory(out, x) and _overlap(out, x):
                if address(out) == address(x) and out.shape == x.shape and out.strides == x.strides:
                    in_place = True
                else:
                    arrays[k] = x.copy()
    return arrays, in_place


def _overlap(x: HostArray, y: HostArray) -> bool:
    """Returns whether two arrays have an element in common, or that takes long to decide: windows of one buffer, such
    as its columns, may lie between one another.
    """
    try:
        return np.shares_memory(x, y, max_work=_WORK)
    except np.exceptions.TooHardError:
        return True


_byte_of: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


def address(x: HostArray) -> int:
    """Returns the address of the first element."""
    if x.size and x.flags.c_contiguous and x.flags.writeable:  # Much faster than the array interface.
        return ctypes.addressof(_byte_of(x))
    return int(x.__array_interface__["data"][0])
