"""Calls of CuPy's ufuncs with NumPy's semantics for Python integers, and by other kernels for large arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardtensor_cupy.kernels import large_ufuncs

__all__ = ["call_ufunc"]


def call_ufunc(ufunc: Any, compares: bool, large: large_ufuncs.LargeUfuncs, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a ufunc with operands that may include Python integers of any size.

    CuPy raises OverflowError for integers that do not fit into 64 bits or into the dtype of the selected loop. NumPy
    compares them with any operand, and converts them to floats if the loop computes in floats. Beside bools, NumPy
    takes them for int64, where CuPy lets them wrap around.
    """
    for x in args:
        if type(x) is int and not -(2**63) <= x < 2**63:
            if (compares or "ll->l" in ufunc.types) and all(type(y) is int or _is_bool(y) for y in args):
                raise OverflowError(f"Python integer {x} out of bounds for int64")
            break
    try:
        if _is_large(args) and (not kwargs or tuple(kwargs) == ("out",)):
            result = large(ufunc, args, kwargs.get("out"))
            if result is not NotImplemented:
                return result
        return ufunc(*args, **kwargs)
    except OverflowError:
        inexact = any(getattr(x, "dtype", np.dtype(bool)).kind in "fc" for x in args)
        if not (compares or inexact or "ll->l" not in ufunc.types):
            raise
        infinite = compares and not inexact
        return ufunc(*[_as_float(x, infinite) if type(x) is int else x for x in args], **kwargs)


def _is_large(args: Any) -> bool:
    """Whether an operand of a ufunc is large, or its result. Variables of a fused kernel have no sizes."""
    sizes = [getattr(x, "size", 0) for x in args]
    if any(size >= large_ufuncs.LARGE for size in sizes):
        return True
    if len(args) != 2 or sizes[0] * sizes[1] < large_ufuncs.LARGE:
        return False
    x, y = args
    return x.shape != y.shape and _broadcast_size(x.shape, y.shape) >= large_ufuncs.LARGE


def _broadcast_size(*shapes: tuple[int, ...]) -> int:
    """Returns the number of elements of a result; 0 for shapes that do not broadcast."""
    try:
        return math.prod(np.broadcast_shapes(*shapes))
    except ValueError:
        return 0


def _is_bool(x: Any) -> bool:
    return type(x) is bool or getattr(x, "dtype", None) == np.bool_


def _as_float(x: int, infinite: bool) -> float:
    """Returns a Python integer as a float, or as an infinity of its sign if ``infinite``.

    An infinity compares with 64-bit integers as an integer of more than 64 bits does.
    """
    return math.copysign(math.inf, x) if infinite else float(x)
