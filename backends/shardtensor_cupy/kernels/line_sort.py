"""Sorts of the lines of arrays as one line of wider numbers, for which CuPy has a radix sort.

Its sort of several lines compares their elements, and takes ten times as long.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardtensor_cupy.kernels.elementwise_kernel import ElementwiseKernel

__all__ = ["LineSort"]

_KEYS = {
    "uint32": ("k = x", "y = k"),
    "int32": ("k = x ^ 0x80000000u", "y = k ^ 0x80000000u"),
    "float32": (  # All NaN are one, the greatest.
        "k = (x & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : x & 0x80000000u ? ~x : x | 0x80000000u",
        "y = k & 0x80000000u ? k ^ 0x80000000u : ~k",
    ),
}
"""For each dtype how its bits become an integer of the same order, and back."""


class LineSort:
    """Sorts lines.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    @staticmethod
    def takes(dtype: np.dtype[Any], stable: bool) -> bool:
        """Whether arrays of that dtype can be sorted; not floats in stable order, as -0 equals 0."""
        return dtype.name in _KEYS and not (stable and dtype.kind == "f")

    def __call__(self, lines: Any) -> Any:
        """Returns an array in row-major order with its lines along the last dimension sorted, of which there are fewer
        than integers of 32 bits.
        """
        length = lines.shape[-1]
        pack, unpack = self._kernels(lines.dtype.name)
        keys, out = self._cupy.empty((lines.size,), np.uint64), self._cupy.empty_like(lines)
        pack(lines.view(np.uint32).reshape(-1), np.uint32(length), keys)
        keys.sort()
        unpack(keys, out.view(np.uint32).reshape(-1))
        return out

    @functools.cache  # noqa: B019 - there is one for each process
    def _kernels(self, dtype: str) -> tuple[ElementwiseKernel, ElementwiseKernel]:
        key, value = _KEYS[dtype]
        pack = f"unsigned int k;\n{key};\ny = (unsigned long long)(i / length) << 32 | k"
        unpack = f"const unsigned int k = (unsigned int)x;\n{value}"
        return (
            ElementwiseKernel(
                self._cupy, "uint32 x, uint32 length", "uint64 y", pack, f"shardtensor_sort_keys_{dtype}", "", ()
            ),
            ElementwiseKernel(self._cupy, "uint64 x", "uint32 y", unpack, f"shardtensor_sorted_{dtype}", "", ()),
        )
