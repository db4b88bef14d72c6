"""The extensions ``linalg`` and ``fft`` of PyTorch's array-API namespace: PyTorch's functions with NumPy's dtypes and
errors. Importing this module imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor_torch.elementwise import is_int, torch

__all__ = ["FFT", "Linalg"]


class Linalg:
    """The functions of ``torch.linalg``. Integers and bools are computed as float64."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch.linalg, name)
        wrapper = functools.partial(_solved, function)
        setattr(self, name, wrapper)
        return wrapper


def _solved(function: Callable[..., Any], /, *arrays: Any, **params: Any) -> Any:
    """Calls a function of ``torch.linalg`` with tensors of one dtype.

    Raises:
        LinAlgError: that of NumPy, where PyTorch raises its own.
    """
    common = functools.reduce(torch.promote_types, [torch.float64 if is_int(x) else x.dtype for x in arrays])
    try:
        return function(*[x.to(common) for x in arrays], **params)
    except torch.linalg.LinAlgError as error:
        raise np.linalg.LinAlgError(str(error).partition(": ")[2]) from None  # without "linalg.inv: "


class FFT:
    """The functions of ``torch.fft``. Integers and bools are computed as float64, float16 in float32."""

    def __getattr__(self, name: str) -> Any:
        wrapper = functools.partial(_transformed, getattr(torch.fft, name))
        setattr(self, name, wrapper)
        return wrapper


def _transformed(function: Callable[..., Any], x: Any, /, *, n: int | None, axis: int, norm: str) -> Any:
    half = x.dtype is torch.float16
    result = function(x.double() if is_int(x) else x.float() if half else x, n, axis, norm)
    return result.half() if half and not result.dtype.is_complex else result  # As NumPy's inverse transforms.
