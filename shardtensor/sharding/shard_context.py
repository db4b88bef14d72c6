"""`ShardContext`: the boxes of the shards that a kernel or monoid works on, which it receives as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardtensor.sharding.layout import Shape

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ShardContext:
    """The boxes of one device's shards within the result and the operands of an operator.

    Attributes:
        box: begin and end of this device's shard of the result in each dimension.
        boxes: the same for each operand.
        shape: the global shape of the result.
        shapes: the global shapes of the operands.
        dtype: the dtype of the result.
    """

    box: Box
    boxes: tuple[Box, ...]
    shape: Shape
    shapes: tuple[Shape, ...]
    dtype: Any

    @classmethod
    def everywhere(cls, shape: Shape, shapes: Sequence[Shape], dtype: Any) -> ShardContext:
        """Returns the context of a computation on unsplit arrays."""
        boxes = tuple([tuple([(0, n) for n in s]) for s in shapes])
        return cls(tuple([(0, n) for n in shape]), boxes, shape, tuple(shapes), dtype)

    @property
    def local_shape(self) -> Shape:
        """The shape of this device's shard of the result."""
        return tuple(end - begin for begin, end in self.box)
