"""The floating-point dtypes of 16 and 8 bits that NumPy lacks: bfloat16 and the float8 kinds, of the library ml_dtypes.

ml_dtypes registers them with NumPy when it is imported, which happens on first use. No array has one of these dtypes
before, so that programs without them never import it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentTypeError

SMALL_FLOATS = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz",
)  # fmt: skip

_FIRST_OF_USERS = 256
"""The least number of a dtype that is not NumPy's own."""


def small_float(name: str) -> np.dtype[Any]:
    """Returns one of these dtypes by its name.

    Raises:
        ArgumentTypeError: the library ml_dtypes is not installed, or lacks the dtype.

    >>> from shardtensor.backend.small_floats import small_float
    >>> small_float("bfloat16").itemsize
    2
    """
    try:
        dtype: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        return dtype
    except (ImportError, AttributeError) as error:
        raise ArgumentTypeError(
            f"dtype {name} is defined by the library ml_dtypes, which cannot be used ({error}): pip install ml_dtypes"
        ) from None


def is_small_float(dtype: Any) -> bool:
    """Whether a dtype is one of these."""
    return isinstance(dtype, np.dtype) and dtype.num >= _FIRST_OF_USERS and dtype.name in SMALL_FLOATS


def is_element(dtype: np.dtype[Any]) -> bool:
    """Whether the elements of tensors can have a dtype: bool, numbers and times."""
    return dtype.kind in "biufcmM" if dtype.num < _FIRST_OF_USERS else is_small_float(dtype)


def text_of(dtype: np.dtype[Any]) -> str:
    """Returns a text of which `numpy.dtype` makes the dtype, in a process that uses such dtypes, too."""
    return dtype.name if is_small_float(dtype) else dtype.str


def promoted(kinds: Iterable[Any], caller: str) -> np.dtype[Any] | None:
    """Returns the dtype to which operands are promoted, of which some have such a dtype, by JAX's rules; None if it is
    NumPy's for float32 in its place.

    Bools and integers, and Python's real numbers, take the small dtype; bfloat16 with a larger float or a complex
    number takes that, with float16 float32. float8 kinds are promoted to no other dtype.

    Args:
        kinds: the dtypes of the operands, and the types of Python scalars among them.
        caller: the function, for the error.

    Raises:
        ArgumentTypeError: there is no such dtype.
    """
    known = list(dict.fromkeys(kinds))
    small = [k for k in known if is_small_float(k)]
    others = [k for k in known if k is complex or (isinstance(k, np.dtype) and k.kind in "fcmMV" and k not in small)]
    if len(small) > 1 or (others and small[0].name != "bfloat16"):
        names = ", ".join([str(getattr(k, "__name__", k)) for k in (*small, *others)])
        raise ArgumentTypeError(f"{caller}: {names} have no common dtype; cast the operands with astype")
    return None if others else small[0]
