"""Scalars and nested lists of scalars, which become host arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentError, ArgumentTypeError, RangeError, ShapeError
from shardtensor.tensor.handle import Handle


def from_lists(x: list[Any] | tuple[Any, ...], caller: str) -> np.ndarray[Any, Any]:
    """Converts nested lists of numbers to a host array, as `numpy.asarray` does.

    Raises:
        ArgumentTypeError: the lists contain tensors with dimensions.
        ShapeError: the lists differ in length.
    """
    check_leaves(x, caller)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ShapeError(f"{caller}: nested lists of different lengths ({error})") from None


def tensors_in(x: list[Any] | tuple[Any, ...]) -> Iterator[Handle]:
    """Yields the tensors in nested lists."""
    kinds = set(map(type, x))  # Lists of many scalars are looked through at the speed of C.
    if any(issubclass(kind, (list, tuple, Handle)) for kind in kinds):
        for item in x:
            if isinstance(item, (list, tuple)):
                yield from tensors_in(item)
            elif isinstance(item, Handle):
                yield item


def check_leaves(x: list[Any] | tuple[Any, ...], caller: str) -> None:
    """Raises ArgumentTypeError if nested lists contain tensors with dimensions, which must be joined explicitly."""
    if any(item.ndim for item in tensors_in(x)):
        raise ArgumentTypeError(
            f"{caller}: a list of tensors is not one array; join them with st.stack, st.concat or st.unshard"
        )


def converted(value: Any, dtype: np.dtype[Any], name: str = "value") -> Any:
    """Converts scalars, and nested lists of scalars, to a dtype, one by one as NumPy's assignment does.

    Nested lists become a host array, and a scalar becomes a NumPy scalar. Errors name the argument ``name``.

    Raises:
        ArgumentTypeError, ArgumentError, ShapeError, RangeError: NumPy would not convert the value.
    """
    listed = isinstance(value, (list, tuple))
    array = np.empty((), dtype)
    try:
        if listed:
            return np.array(value, dtype=dtype)
        array[()] = value
    except OverflowError as error:
        raise RangeError(f"{error}; use a dtype that holds it, or give an array, which is cast") from None
    except TypeError as error:
        raise ArgumentTypeError(f"{name} {value!r:.60} for elements of {dtype}: {error}") from None
    except ValueError as error:
        if listed and "inhomogeneous" in str(error):
            raise ShapeError(f"{name} has nested lists of different lengths ({error})") from None
        raise ArgumentError(f"{name} {value!r:.60} for elements of {dtype}: {error}") from None
    return array[()]


def check_indices_fit(indices: np.ndarray[Any, Any], caller: str) -> None:
    """Raises RangeError if a host array has indices beyond the range of int64, through which they would wrap. NumPy
    makes floats of a list of small and of such integers.
    """
    if (indices.dtype == np.uint64 or indices.dtype.kind == "f") and (beyond := indices >= 2.0**63).any():
        first = indices[beyond][0]
        index = int(first) if np.isfinite(first) else first
        raise RangeError(f"{caller}: index {index} is out of range; wanted indices below 2**63, those of int64")
