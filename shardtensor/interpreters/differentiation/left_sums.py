"""Gradients that are left as partial sums, so that those of several batches are added up before they are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from shardtensor.core import call, innermost
from shardtensor.sharding.layout import NamedSharding
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import summed


class LeftSums:
    """The gradients that are left as partial sums, each with the layout of its argument, in which it is to be added."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[ShardedTensor, NamedSharding, bool]] = {}

    def taken(self, g: ShardedTensor, sharding: NamedSharding, committed: bool) -> ShardedTensor:
        """Takes a gradient, and returns it."""
        self._taken[id(g)] = g, sharding, committed  # The tensor is held, so that no other one gets its identity.
        return g

    def layout(self, g: Any) -> tuple[NamedSharding, bool] | None:
        """Returns the layout in which a leaf of the result is to be added, and whether it is committed: that of the
        argument for a gradient that was left, a replicated one for partial sums that a function made of it, such as
        ``-g``. None for any other leaf.
        """
        known = self._taken.get(id(g))
        if known is not None:
            return known[1:]
        if not self._taken or type(g) is not ShardedTensor or not g._aval.unreduced:
            return None
        return summed(g._aval).sharding, g._aval.committed


_leaving: ContextVar[LeftSums | None] = ContextVar("shardtensor_left_sums", default=None)


@contextlib.contextmanager
def leaving_sums() -> Iterator[LeftSums]:
    """Leaves gradients as partial sums in the context."""
    left = LeftSums()
    token = _leaving.set(left)
    try:
        yield left
    finally:
        _leaving.reset(token)


def left_sums() -> LeftSums | None:
    """Returns what takes the gradients that are left as partial sums; None if all of them are added: outside of the
    context, and in programs, which decide themselves where partial sums are added.
    """
    return _leaving.get() if innermost() is None else None


def added_up(total: ShardedTensor, layout: tuple[NamedSharding, bool]) -> Any:
    """Returns the sum of partial sums in a layout."""
    sharding, committed = layout
    return call("transfer_to", total, sharding, "grad", committed=committed)
