"""Nested lists of scalars, which become one host array."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.errors import ArgumentTypeError, ShapeError
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


def check_leaves(x: list[Any] | tuple[Any, ...], caller: str) -> None:
    """Raises ArgumentTypeError if nested lists contain tensors with dimensions, which must be joined explicitly."""
    for item in x:
        if isinstance(item, (list, tuple)):
            check_leaves(item, caller)
        elif isinstance(item, Handle) and item.ndim:
            raise ArgumentTypeError(
                f"{caller}: a list of tensors is not one array; join them with st.stack, st.concat or st.unshard"
            )
