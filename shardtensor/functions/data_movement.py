"""Operators that only move elements: their regions and where these come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.sharding.copy_plan import Region
from shardtensor.sharding.layout import Grid, NamedSharding, Shape


class DataMovement:
    """What a mover says: where the result lies, and where its elements come from.

    Attributes:
        shape: of the result.
        sharding: of the result.
        regions: the boxes of the result and where they come from (see `shardtensor.sharding.copy_plan`).
        whole: the same on whole host arrays, ``whole(*arrays)``.
        copies: whether ``whole`` copies (False: it gives a view).
        explicit: whether the caller asked for the move.
        note: what the logger is told each time if elements change their device.
        as_pieces: where each operand is one shard of the result as it stands, what makes the shard of it.
        target: the sharding into which the operand must be brought first, if any.
        flat: the grids of operand and result with dimensions merged, where the regions speak of those (reshape).
    """

    __slots__ = ("as_pieces", "copies", "explicit", "flat", "note", "regions", "shape", "sharding", "target", "whole")

    def __init__(
        self,
        shape: Shape,
        sharding: NamedSharding,
        regions: Sequence[Region],
        whole: Callable[..., Any],
        *,
        copies: bool = False,
        explicit: bool = False,
        as_pieces: Callable[[Any], Any] | None = None,
        target: NamedSharding | None = None,
        flat: tuple[Grid, Grid] | None = None,
    ) -> None:
        self.shape = shape
        self.sharding = sharding
        self.regions = regions
        self.whole = whole
        self.copies = copies
        self.explicit = explicit
        self.as_pieces = as_pieces
        self.target = target
        self.flat = flat
        self.note: str | None = None
