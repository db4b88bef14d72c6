"""CuPy's binary search: kernels in C++ that compare operands of two dtypes as C does, or are not compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import launch
from .kernels import CompileException


def _compared(x: Any, y: Any) -> Any:
    """Returns the dtype in which C compares numbers of two dtypes.

    Raises:
        CompileException: one of them is complex, and the other one is not of the same dtype.
    """
    x, y = [np.dtype(np.float32) if t == np.float16 else t for t in (x, y)]
    if "c" in (x.kind, y.kind):
        if x != y:
            raise CompileException(f"no operator '<' matches these operands: {x} < {y}")
        return x
    for kind in ("float64", "float32"):
        if np.dtype(kind) in (x, y):
            return np.dtype(kind)
    x, y = [np.dtype(np.int32) if t.itemsize < 4 else t for t in (x, y)]
    return max(x, y, key=lambda t: (t.itemsize, t.kind == "u"))


def _less(a: Any, b: Any) -> bool:
    """CuPy's comparison of complex numbers."""
    return bool(a != b and (a.real < b.real or (a.real == b.real and a.imag < b.imag)))


def _found(ordered: Any, x: Any, right: bool) -> Any:
    """Returns the result of CuPy's kernel for complex numbers, whose order is not total where parts are NaN."""
    made = np.empty(x.shape, np.int64)
    for at, element in np.ndenumerate(x):
        low, high = 0, len(ordered) - 1
        if element != element:
            low = len(ordered)
            while not right and low > 0 and ordered[low - 1] != ordered[low - 1]:
                low -= 1
        elif _less(ordered[-1], element) or (right and element == ordered[-1]):
            low = len(ordered)
        else:
            while low < high:
                middle = low + (high - low) // 2
                if _less(ordered[middle], element) or (right and ordered[middle] == element):
                    low = middle + 1
                else:
                    high = middle
        made[at] = low
    return made


def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    if not isinstance(v, launch._array):
        v = launch.from_host(np.asarray(v))
    if (a.dtype.kind == "c") != (v.dtype.kind == "c"):
        a, v = (a, v.astype(a.dtype)) if a.dtype.kind == "c" else (a.astype(v.dtype), v)
    dtype = _compared(a.dtype, v.dtype)

    def kernel(a: Any, v: Any, side: str, sorter: Any = None) -> Any:
        a, v = a.astype(dtype), v.astype(dtype)
        if dtype.kind == "c" and a.size:
            return _found(a if sorter is None else a[sorter], v, side == "right")
        return np.asarray(np.searchsorted(a, v, side, sorter))

    return launch.call("searchsorted", kernel, (a, v, side, *([] if sorter is None else [sorter])), {})


def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    if x.dtype.kind == "c":
        raise TypeError("x may not be complex")
    dtype = _compared(x.dtype, bins.dtype)
    return launch.call(
        "digitize", lambda x, bins: np.digitize(x.astype(dtype), bins.astype(dtype), right), (x, bins), {}
    )


def isin(element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False) -> Any:
    dtype = _compared(element.dtype, test_elements.dtype)

    def kernel(x: Any, elements: Any) -> Any:
        ordered = np.sort(elements, axis=None).astype(dtype)
        x = x.astype(dtype)
        if dtype.kind != "c" or not ordered.size:
            return np.isin(x, ordered, invert=invert)
        at = _found(ordered, x, False)
        return ((at < len(ordered)) & (ordered[np.minimum(at, len(ordered) - 1)] == x)) ^ invert

    return launch.call("isin", kernel, (element, test_elements), {})


NAMES = {f.__name__: f for f in (searchsorted, digitize, isin)}
