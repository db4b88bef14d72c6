"""The description of an operator that only moves elements: the regions of its result and their sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardtensor.sharding.copy_plan import Region
from shardtensor.sharding.layout import Grid, NamedSharding, Shape


@dataclass(slots=True, eq=False)
class DataMovement:
    """The result of an operator's ``movement`` function: the layout of the operator's result and the source of its
    elements.

    Attributes:
        shape: the shape of the result.
        sharding: the sharding of the result.
        regions: the boxes of the result, each with the operand that it is copied from (see
            `shardtensor.sharding.copy_plan`).
        whole: computes the result from whole host arrays, ``whole(*arrays)``; used where devices share one memory.
        copies: whether ``whole`` returns a new array (False: a view of its argument).
        explicit: whether the caller requested the transfer, which `transfer_guard` then permits.
        note: a message that is logged on every call that transfers elements between devices, or None.
        as_pieces: if each operand is exactly one shard of the result, the function that turns the operand's array into
            the array of that shard; otherwise None.
        target: the sharding to which the operand must be transferred first, or None.
        flat: the grids of operand and result with merged dimensions, if ``regions`` refer to those (reshape);
            otherwise None.
    """

    shape: Shape
    sharding: NamedSharding
    regions: Sequence[Region]
    whole: Callable[..., Any]
    copies: bool = False
    explicit: bool = False
    note: str | None = None
    as_pieces: Callable[[Any], Any] | None = None
    target: NamedSharding | None = None
    flat: tuple[Grid, Grid] | None = None
