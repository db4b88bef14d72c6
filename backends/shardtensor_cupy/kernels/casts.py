"""Copies of large arrays, to other dtypes and layouts: CuPy's kernel for them reaches half of the bandwidth of the
memory, and a small part of it where rows become columns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor_cupy.kernels.elementwise_kernel import TYPES, ElementwiseKernel, merged_dimensions
from shardtensor_cupy.kernels.large_ufuncs import in_columns, is_apart

__all__ = ["OF_SIZE", "Casts"]

OF_SIZE = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
"""The dtypes as which elements are copied that are not cast."""

_CAST = "biuf"
"""The kinds of dtypes that C converts as CuPy does."""

_TILE = 32
"""The number of rows and columns that a block of threads transposes."""

_ROWS = 8
"""The number of rows of threads of such a block."""

_FEW = 8
"""The least number of rows and columns of which tiles are transposed."""


class Casts:
    """Writes arrays into others of the same shape.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._array: Any = cupy.ndarray

    def copy(self, x: Any, dtype: np.dtype[Any], order: str = "K") -> Any:
        """Returns a copy of a large array in a dtype, or None if CuPy has to make it."""
        if self._types(x, dtype) is None:
            return None
        if x.dtype == dtype and (x.flags.c_contiguous or (x.flags.f_contiguous and order == "K")):
            out = self._cupy.empty_like(x)
            out.data.copy_from_device_async(x.data, x.nbytes)
            return out
        out = self._cupy.empty_like(x, dtype=dtype, order=order)
        self._run(x, out)
        return out

    def into(self, out: Any, x: Any) -> bool:
        """Writes an array into another one on the current device; returns False if CuPy has to do so: for
        overlapping arrays, host arrays, and dtypes without a type in C.
        """
        if not isinstance(x, self._array) or self._types(x, out.dtype) is None:
            return False
        if x.ndim > out.ndim or any(
            n not in (1, m) for n, m in zip(reversed(x.shape), reversed(out.shape), strict=False)
        ):
            return False
        if x.data.device_id != out.data.device_id or not is_apart(x, out):
            return False
        if x.dtype == out.dtype and x.size == out.size and x.flags.c_contiguous and out.flags.c_contiguous:
            out.data.copy_from_device_async(x.data, x.nbytes)
        else:
            self._run(x, out)
        return True

    def where(self, condition: Any, x1: Any, x2: Any, dtype: np.dtype[Any]) -> Any:
        """Returns `where` of a condition of bools, and of arrays or numbers; None if CuPy has to compute it."""
        arrays = [x for x in (condition, x1, x2) if isinstance(x, self._array)]
        operands = [x for x in (x1, x2) if isinstance(x, self._array)]  # One of them may be the condition itself.
        types = [self._types(x, dtype) for x in operands]
        if condition.dtype != np.bool_ or None in types:
            return None
        cast = any(x.dtype != dtype for x in operands) or not operands
        if cast and (dtype.kind not in _CAST or dtype == np.float16):
            return None
        if in_columns(arrays):
            condition, x1, x2 = [x.T if isinstance(x, self._array) else x for x in (condition, x1, x2)]
            transposed = self.where(condition, x1, x2, dtype)
            return transposed.T
        own = dtype if cast else np.dtype(OF_SIZE[dtype.itemsize])
        x1, x2 = [x if isinstance(x, self._array) else _number(x, dtype).view(own) for x in (x1, x2)]
        names = [(x.dtype if cast or not isinstance(x, self._array) else own).name for x in (x1, x2)]
        out = self._cupy.empty(np.broadcast_shapes(*[x.shape for x in arrays]), dtype)
        self._choosing(*names, own.name)(condition, x1, x2, out)
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _choosing(self, x1: str, x2: str, target: str) -> ElementwiseKernel:
        inputs, operation = f"bool c, {x1} x1, {x2} x2", f"y = c ? ({TYPES[target]})x1 : ({TYPES[target]})x2"
        return ElementwiseKernel(
            self._cupy, inputs, f"{target} y", operation, f"shardtensor_where_{x1}_{x2}_{target}", "", ()
        )

    def _types(self, x: Any, dtype: np.dtype[Any]) -> tuple[str, str] | None:
        """Returns the dtypes of a kernel that copies an array to a dtype."""
        if x.dtype == dtype:
            name = OF_SIZE.get(dtype.itemsize)
            return None if name is None else (name, name)
        known = all(d.kind in _CAST and d.name in TYPES and d != np.float16 for d in (x.dtype, dtype))
        return (x.dtype.name, dtype.name) if known else None

    def _run(self, x: Any, out: Any) -> None:
        types = self._types(x, out.dtype)
        assert types is not None
        if x.shape != out.shape:
            x = self._cupy.broadcast_to(x, out.shape)
        order = sorted(range(out.ndim), key=lambda d: -abs(out.strides[d]))
        x, out = x.transpose(order), out.transpose(order)
        columns = merged_dimensions(out.shape, (x, out))
        down = _other_dimension(columns, x.dtype.itemsize, out.dtype.itemsize) if columns else None
        if down is None:
            self._elementwise(*types)(x, out)
        else:
            self._transpose(types, columns, down, x, out)

    @functools.cache  # noqa: B019 - there is one for each process
    def _elementwise(self, source: str, target: str) -> ElementwiseKernel:
        operation = f"y = ({TYPES[target]})x"
        name = f"shardtensor_copy_{source}_{target}"
        return ElementwiseKernel(self._cupy, f"{source} x", f"{target} y", operation, name, "", ())

    def _transpose(
        self, types: tuple[str, str], columns: list[tuple[int, list[int]]], down: int, x: Any, out: Any
    ) -> None:
        """Copies an array whose elements follow each other along dimension ``down``, and those of ``out`` along the
        last one.
        """
        *others, (across_size, (across, _)) = columns
        down_size, (_, step) = others.pop(down)
        tiles = [-(-n // _TILE) for n in (down_size, across_size)]
        blocks = tiles[0] * tiles[1]
        sizes: list[int] = [down_size, across_size, across, step, *tiles]
        for n, strides in others:
            sizes += [n, *strides]
            blocks *= n
        kernel = self._transposing(*types, len(others))
        kernel((blocks,), (_TILE, _ROWS), (x, out, *map(np.int64, sizes)))

    @functools.cache  # noqa: B019 - there is one for each process
    def _transposing(self, source: str, target: str, others: int) -> Any:
        return self._cupy.RawKernel(_transposing_text(TYPES[source], TYPES[target], others), "shardtensor_transpose")


def _number(x: Any, dtype: np.dtype[Any]) -> Any:
    return np.asarray(x).astype(dtype)[()]


def _other_dimension(columns: Sequence[tuple[int, list[int]]], itemsize: int, out_itemsize: int) -> int | None:
    """Returns the dimension along which the elements of an array follow each other, if those that they are copied to
    follow each other along the last one, and both have enough elements for tiles.
    """
    *others, (count, (stride, last)) = columns
    if count < _FEW or last != out_itemsize or abs(stride) <= itemsize:
        return None
    dimensions = [d for d, (n, (own, _)) in enumerate(others) if own == itemsize and n >= _FEW]
    return dimensions[0] if dimensions else None


def _transposing_text(source: str, target: str, others: int) -> str:
    parameters = ["const char *x", "char *y"]
    names = ["down", "across", "x_across", "y_down", "tiles_down", "tiles_across"]
    names += list(itertools.chain(*[(f"n{d}", f"x{d}", f"y{d}") for d in range(others)]))
    parameters += [f"long long {name}" for name in names]
    walk = []
    for d in reversed(range(others)):
        walk += [f"x += left % n{d} * x{d};", f"y += left % n{d} * y{d};", f"left /= n{d};"]
    lines = [
        f'extern "C" __global__ void shardtensor_transpose({", ".join(parameters)}) {{',
        f"    __shared__ {target} tile[{_TILE}][{_TILE + 1}];",
        f"    const long long column = (long long)blockIdx.x % tiles_across * {_TILE};",
        "    long long left = (long long)blockIdx.x / tiles_across;",
        f"    const long long row = left % tiles_down * {_TILE};",
        "    left /= tiles_down;",
        *[f"    {line}" for line in walk],
        f"    x += (row + threadIdx.x) * sizeof({source}) + column * x_across;",
        f"    y += (column + threadIdx.x) * sizeof({target}) + row * y_down;",
        "#pragma unroll",
        f"    for (int k = threadIdx.y; k < {_TILE}; k += {_ROWS})",
        "        if (row + threadIdx.x < down && column + k < across)",
        f"            tile[k][threadIdx.x] = ({target})*(const {source} *)(x + k * x_across);",
        "    __syncthreads();",
        "#pragma unroll",
        f"    for (int k = threadIdx.y; k < {_TILE}; k += {_ROWS})",
        "        if (column + threadIdx.x < across && row + k < down)",
        f"            *({target} *)(y + k * y_down) = tile[threadIdx.x][k];",
        "}",
    ]
    return "\n".join(lines)
