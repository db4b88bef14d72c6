"""The storage of unreduced tensors: partial sums along mesh axes, which are added when the elements are needed.

An unreduced tensor, of the sharding ``P(..., unreduced={"x"})``, is the sum of what the devices along mesh axis x hold.
The partial sums are the elements of another tensor, which has one more dimension, the first, that the unreduced axes
split: each device holds one index of it. Adding them is a sum over that dimension, and a linear function of the tensor
is one of the partial sums, so both are ordinary operators on this tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor.core import OPS, call, execute
from shardtensor.tensor.ownership import hold
from shardtensor.tensor.storage import DeferredStorage, NoElements, Storage


class PartialSums(DeferredStorage):
    """The storage of an unreduced tensor. Reading it adds the partial sums, once: an implicit transfer.

    Attributes:
        partials: the tensor of the partial sums, of the aval that `shardtensor.tensor.value.stacked` returns. It is
            never written.
    """

    __slots__ = ("_total", "partials")

    def __init__(self, partials: Any) -> None:
        self.partials = partials
        self._total: Any = None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The arrays of the partial sums; none of a tensor without elements."""
        storage = self.partials._storage
        if type(storage) is NoElements:
            return ()
        return storage.buffers  # type: ignore[no-any-return]

    @property
    def memory(self) -> Storage | None:  # type: ignore[override]
        """See `DeferredStorage`."""
        total = self._total
        return None if total is None or type(total._storage) is not Storage else total._storage

    def total(self, *, explicit: bool) -> Any:
        """Returns the tensor of the added partial sums, replicated along the axes.

        Args:
            explicit: whether the caller asked for the sum; otherwise `transfer_guard` can forbid the transfers.
        """
        if self._total is None:
            total = execute(OPS["add_partials"], (self.partials,), (explicit, 0, False, None))
            if type(total._storage) is Storage:
                hold(total._storage)  # Copies of the tensor share this storage, so that a write copies the memory.
            self._total = total
        return self._total

    def stored(self) -> Any:
        """Adds the partial sums, and returns the storage of the sum."""
        storage = self.total(explicit=False)._storage
        return storage if type(storage) is Storage else storage.stored()

    def announce(self) -> None:
        """Records the transfers of adding the partial sums of a tensor without elements, once."""
        if not self.parts:
            self.total(explicit=False)

    def stand_for(self, other: PartialSums, without_elements: Callable[[Any], Any]) -> None:
        """Takes over from another tensor whether its partial sums have been added."""
        if other._total is not None:
            self._total = without_elements(other._total._aval)

    def to_host(self, index: Any) -> Any:
        """Returns the sum, or the part that a basic index selects, in host memory: an explicit transfer."""
        return call("to_host", self.total(explicit=True), index=index)

    def settle(self) -> None:
        """Waits until the partial sums are computed."""
        self.partials.block_until_ready()
