"""How loops walk over arrays of several shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Shape = tuple[int, ...]


def loop_strides(x: Any, shape: Shape) -> list[int]:
    """Returns the strides of an array in a loop: 0 where it repeats. One with fewer dimensions lacks the last ones."""
    own = [0 if n == 1 else stride for n, stride in zip(x.shape, x.strides, strict=True)]
    return own + [0] * (len(shape) - len(own))


def merged(dims: Sequence[int], shape: Shape, strides: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Returns size and strides of each dimension, with those merged that are one in the memory of all arrays."""
    columns: list[tuple[int, list[int]]] = []
    for d in dims:
        n, column = shape[d], [own[d] for own in strides]
        if columns and all(s == t * n for s, t in zip(columns[-1][1], column, strict=True)):
            columns[-1] = columns[-1][0] * n, column
        elif columns and columns[-1][0] == 1:
            columns[-1] = n, column
        elif n != 1 or not columns:
            columns.append((n, column))
    return columns
