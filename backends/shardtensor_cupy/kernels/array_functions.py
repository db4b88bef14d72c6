"""The part of the namespace on which the others are built: ufuncs, copies and casts."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor_cupy.kernels import large_ufuncs
from shardtensor_cupy.kernels.casts import Casts
from shardtensor_cupy.kernels.cupy_ufuncs import call_ufunc

__all__ = ["ArrayFunctions"]

_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


class ArrayFunctions:
    """Functions of CuPy and array-api-compat by name, which subclasses replace.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._compat: Any = importlib.import_module("array_api_compat.cupy")
        self._large = large_ufuncs.LargeUfuncs(cupy)
        self._casts = Casts(cupy)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._cupy, name, None)
        if isinstance(attribute, self._cupy.ufunc):
            attribute = functools.partial(call_ufunc, attribute, name in _COMPARISONS, self._large)
        else:
            attribute = getattr(self._compat, name)
        setattr(self, name, attribute)
        return attribute

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls ufuncs only as one kernel, which CuPy composes of their code.

        It is compiled for each number of dimensions and dtype at first use, under the name of the function.
        """
        fused: Callable[..., Any] = self._cupy.fuse(function)
        return fused

    def _ufunc(self, name: str, *args: Any, out: Any = None) -> Any:
        """Calls a ufunc of CuPy that is not a comparison."""
        return call_ufunc(getattr(self._cupy, name), False, self._large, *args, out=out)

    # -- copies ------------------------------------------------------------------------------------

    def asarray(self, x: Any, /, *, dtype: Any = None, copy: bool | None = None, **kwargs: Any) -> Any:
        """See NumPy."""
        if isinstance(x, self._cupy.ndarray) and x.size >= large_ufuncs.LARGE and copy is not False and not kwargs:
            result = self._copied(x, x.dtype if dtype is None else np.dtype(dtype), bool(copy))
            if result is not None:
                return result
        return self._compat.asarray(x, dtype=dtype, copy=copy, **kwargs)

    def astype(self, x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
        """See NumPy."""
        if x.size >= large_ufuncs.LARGE and device is None:
            result = self._copied(x, np.dtype(dtype), copy)
            if result is not None:
                return result
        return self._compat.astype(x, dtype, copy=copy, device=device)

    def reshape(self, x: Any, /, shape: Any, *, copy: bool | None = None, **kwargs: Any) -> Any:
        """See NumPy."""
        if x.size >= large_ufuncs.LARGE and not x.flags.c_contiguous and not kwargs and copy is not False:
            view = None if copy else _viewed(x, shape)
            return self.in_rows(x).reshape(shape) if view is None else view
        return self._compat.reshape(x, shape, copy=copy, **kwargs)

    def in_rows(self, x: Any) -> Any:
        """Returns a copy in row-major order."""
        result = self._copied(x, x.dtype, True, "C") if x.size >= large_ufuncs.LARGE else None
        return x.copy(order="C") if result is None else result

    def _in_rows(self, x: Any) -> Any:
        return x if x.flags.c_contiguous else self.in_rows(x)

    def _copied(self, x: Any, dtype: Any, copy: bool, order: str = "K") -> Any:
        """Returns a large array in a dtype; a copy if ``copy``, or the dtype differs. None if CuPy has to cast it."""
        if not copy and x.dtype == dtype:
            return x
        if x.data.device_id != self._cupy.cuda.runtime.getDevice():
            return None
        return self._casts.copy(x, dtype, order)

    def store(self, out: Any, index: Any, x: Any) -> None:
        """Writes an array to the elements of another one that a basic index selects."""
        if out.size < large_ufuncs.LARGE:
            out[index] = x
        else:
            part = out[index]
            if part.size < large_ufuncs.LARGE or not self._casts.into(part, x):
                part[...] = x

    def where(self, condition: Any, x1: Any, x2: Any, /) -> Any:
        """See NumPy. The condition may be a number; integers out of range wrap around."""
        if not isinstance(condition, self._cupy.ndarray):
            condition = self._cupy.asarray(bool(condition))
        dtype = np.result_type(*[getattr(x, "dtype", x) for x in (x1, x2)])
        # NumPy converts Python integers, because CuPy raises OverflowError for those out of range.
        x1, x2 = [np.asarray(x).astype(dtype)[()] if type(x) is int else x for x in (x1, x2)]
        if any(getattr(x, "size", 0) >= large_ufuncs.LARGE for x in (condition, x1, x2)):
            result = self._casts.where(condition, x1, x2, dtype)
            if result is not None:
                return result
        return self._cupy.where(condition, x1, x2)


def _viewed(x: Any, shape: Any) -> Any:
    """Returns a view of an array in another shape, or None if it would have to be copied."""
    view = x.view()
    try:
        view.shape = shape
    except (AttributeError, ValueError):  # of CuPy and of NumPy
        return None
    return view
