"""The arrays of one call of a kernel: checked, broadcast, and separated where results would overwrite operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentTypeError, ShapeError
from shardtensor.interpreters.jit.kernel import HostArray, Kernel, Shape


def prepare(
    kernel: Kernel, shape: Shape, inputs: Sequence[Any], outputs: Sequence[HostArray]
) -> tuple[list[HostArray], bool]:
    """Returns the inputs as arrays of ``kernel.ndim`` dimensions, each of the size of the loop or 1, and whether an
    output is one of them.

    An input that shares memory with an output is copied, except where it is the same array: each of its elements is
    then read before it is overwritten.

    Raises:
        ArgumentTypeError: the number or dtype of the arrays is not that of the kernel.
        ShapeError: the shape of an array does not fit.
    """
    if len(inputs) != len(kernel.inputs) or len(outputs) != len(kernel.outputs) or len(shape) != kernel.ndim:
        raise ArgumentTypeError(f"kernel: got {len(inputs)} inputs, {len(outputs)} outputs, shape {shape} for {kernel}")
    arrays = [_input(kernel, k, shape, x) for k, x in enumerate(inputs)]
    in_place = False
    for out, given in zip(outputs, kernel.outputs, strict=True):
        wanted = shape[: kernel.ndim - kernel.row_ndim] if given.per_row else shape
        if out.shape != wanted or out.dtype != kernel.dtype(given.value) or not out.flags.writeable:
            raise ShapeError(
                f"kernel: output v{given.value} is {out.dtype}{out.shape}, writable: {out.flags.writeable}; "
                f"wanted a writable {kernel.dtype(given.value)}{wanted}"
            )
        for k, x in enumerate(arrays):
            if np.may_share_memory(out, x):
                if _is_same(out, x):
                    in_place = True
                else:
                    arrays[k] = x.copy()
    return arrays, in_place


def _input(kernel: Kernel, k: int, shape: Shape, x: Any) -> HostArray:
    given = kernel.inputs[k]
    dtype = np.dtype(given.dtype)
    if getattr(x, "ndim", 0) == 0 and not any(given.varies):
        scalar: HostArray = np.asarray(x, dtype).reshape((1,) * kernel.ndim)
        return scalar
    if not isinstance(x, np.ndarray) or x.dtype != dtype:
        raise ArgumentTypeError(f"kernel: input v{k} is {type(x).__name__} {getattr(x, 'dtype', '')}; wanted {dtype}")
    if x.ndim != kernel.ndim:
        raise ShapeError(f"kernel: input v{k} has shape {x.shape}; wanted {kernel.ndim} dimensions")
    for d, (n, m) in enumerate(zip(x.shape, shape, strict=True)):
        if n == m:
            if n > 1 and not given.varies[d]:
                if x.strides[d]:
                    raise ShapeError(
                        f"kernel: input v{k} of shape {x.shape} varies along d{d}, which {kernel} excludes"
                    )
                x = x[(slice(None),) * d + (slice(1),)]
        elif n != 1:
            raise ShapeError(f"kernel: input v{k} has shape {x.shape}; wanted one that broadcasts to {shape}")
    checked: HostArray = x
    return checked


def _is_same(out: HostArray, x: HostArray) -> bool:
    """Returns whether two arrays consist of the same elements in the same order."""
    mine, its = out.__array_interface__, x.__array_interface__
    return bool(mine["data"][0] == its["data"][0] and out.shape == x.shape and out.strides == x.strides)
