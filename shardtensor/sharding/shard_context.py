"""The position of a shard within its array, which kernels and monoids receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardtensor.sharding.layout import Shape

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece of work stands in the whole.

    Attributes:
        box: begin and end of this device's part of the result, per dimension.
        boxes: the same of each operand.
        shape: the result's whole shape.
        shapes: the operands' whole shapes.
        dtype: the result's dtype.
    """

    box: Box
    boxes: tuple[Box, ...]
    shape: Shape
    shapes: tuple[Shape, ...]
    dtype: Any

    @classmethod
    def everywhere(cls, shape: Shape, shapes: Sequence[Shape], dtype: Any) -> Place:
        """The place of work on whole arrays."""
        boxes = tuple([tuple([(0, n) for n in s]) for s in shapes])
        return cls(tuple([(0, n) for n in shape]), boxes, shape, tuple(shapes), dtype)

    @property
    def local_shape(self) -> Shape:
        """The shape of this device's part of the result."""
        return tuple(end - begin for begin, end in self.box)
