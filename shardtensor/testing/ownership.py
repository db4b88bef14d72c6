"""The tests of ownership: a write is never visible through any other reference to the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardtensor.backend import Backend, Device
from shardtensor.testing.base import Kit

SOLE = "Backend.is_exclusive: True only where nothing but its holder reaches the memory (False is always right)"
WRITABLE = "Backend.is_exclusive: an exclusive array is made writable"
ADOPT = "Backend.adopt: an array that nobody outside can write, from one that a mapped function returned"
COPIED = "Backend.adopt and release say whether they copied: a copy is of its own memory"
RELEASE = "Backend.release: an array that its only holder may write"

HOLDS: dict[str, Callable[[Backend, Any, Device], Any]] = {
    "another variable": lambda it, x, device: x,
    "a list": lambda it, x, device: [x],
    "a part of it": lambda it, x, device: it.view(x, slice(1, None)),
    "a part of a part of it": lambda it, x, device: it.view(it.view(x, slice(1, None)), slice(None, 5)),
    "what a user sees of it": lambda it, x, device: it.export(x),
    "a reshaped view": lambda it, x, device: it.xp.reshape(x, (2, -1)),
    "a host read of it": lambda it, x, device: it.to_host(x, device),
    "what was lent by DLPack": lambda it, x, device: it.from_dlpack(it.to_dlpack(x), device),
}


class OwnershipTests(Kit):
    """`is_exclusive`, `adopt` and `release`: only exclusive memory is written in place."""

    @pytest.mark.parametrize("holder", HOLDS)
    def test_sole_sees_who_else_holds_it(self, holder: str) -> None:
        """If `is_exclusive` is true despite another holder, the array is written, and the holder detects the change."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            other = self._hold(holder, x, device)
            before = self._values(other, device)
            with self.it.on(device):
                alone = self.it.is_exclusive(x, 1)
            if alone:
                self.write(x, 0, device)
            self.same(self._values(other, device), before, SOLE, f"held by {holder}, after it was written")

    @pytest.mark.parametrize("holder", HOLDS)
    def test_sole_of_the_part_that_is_left(self, holder: str) -> None:
        """A view reaches the memory of its base: neither of two holders of one memory is exclusive."""
        device = self.devices[0]
        x = self.put(self.numbers(12), device)
        other = self._hold(holder, x, device)
        if not self.it.is_array(other) or (self.it.shared_memory and holder == "a host read of it"):
            pytest.skip(f"{holder} is no array that could be written")
        with self.it.on(device):
            alone = self.it.is_exclusive(other, 1)
        if alone:
            self.write(other, 0, device)
        self.same(self.get(x, device), self.numbers(12), SOLE, f"an array after {holder} was written")

    def test_sole_arrays_are_writable(self) -> None:
        """If `is_exclusive` is true, the array can be written, even if a read-only view of it existed before."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            with self.it.on(device):
                self.it.export(x)
                alone = self.it.is_exclusive(x, 1)
            if alone:
                self.write(x, 3, device)
                self.same(self.get(x, device), np.full(12, 3, self.dtype), WRITABLE)

    def test_sole_of_elements_that_share_a_place(self) -> None:
        """A broadcast array is never exclusive, because its elements alias each other."""
        device = self.devices[0]
        with self.it.on(device):
            try:
                x = self.it.xp.broadcast_to(self.it.from_host(self.numbers(4), device), (3, 4))
            except AttributeError:
                pytest.skip("its namespace has no broadcast_to")
            alone = self.it.is_exclusive(x, 1)
            if alone:
                x[0:1] = 0
        if alone:
            wanted = np.array(np.broadcast_to(self.numbers(4), (3, 4)))
            wanted[0] = 0
            self.same(self.get(x, device), wanted, "Backend.is_exclusive: no two elements share a place")

    @pytest.mark.parametrize("holder", HOLDS)
    def test_adopted_arrays_are_nobody_elses(self, holder: str) -> None:
        """A mapped function that keeps its result and writes to it later does not change the adopted array."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            other = self._hold(holder, x, device)
            with self.it.on(device):
                made, _ = self.it.adopt(x, ())
            del x
            self.same(self.get(made, device), self.numbers(12), ADOPT)
            self._scribble(other, device)
            self.same(self.get(made, device), self.numbers(12), ADOPT, f"{holder} was kept, and written afterwards")

    def test_adopted_fresh_arrays(self) -> None:
        """Adopting an exclusive array, or a view of it, preserves the values."""
        for device in self.devices:
            for cut in (slice(None), slice(2, 9), slice(None, None, 2)):
                x, wanted = self.worked(device, self.numbers(12))
                with self.it.on(device):
                    part = self.it.view(x, cut)
                    del x
                    made, _ = self.it.adopt(part, ())
                self.same(self.get(made, device), wanted[cut], ADOPT, f"a view [{cut}] of a fresh array")

    def test_adopted_shards(self) -> None:
        """Adopting a shard or a view of it preserves the values, and a later write does not change the shard."""
        for device in self.devices:
            shard = self.put(self.numbers(12), device)
            with self.it.on(device):
                seen = self.it.export(shard)
                made = [self.it.adopt(x, [shard])[0] for x in (seen, self.it.view(seen, slice(3, 7)))]
            self.same(self.get(made[0], device), self.numbers(12), ADOPT, "the shard itself")
            self.same(self.get(made[1], device), self.numbers(12)[3:7], ADOPT, "a part of the shard")
            for x in made:
                with self.it.on(device):
                    alone = self.it.is_exclusive(x, 2)
                if alone:
                    self.write(x, 0, device)
            self.same(self.get(shard, device), self.numbers(12), SOLE, "the shard, after what was adopted was written")

    def test_copies_are_told_truly(self) -> None:
        """The second result of `adopt` and `release` is True only for a copy, which has its own memory."""
        for device in self.devices:
            for way in ("adopt", "release"):
                x = self.put(self.numbers(12), device)
                kept = x
                with self.it.on(device):
                    made, copied = self.it.adopt(x, ()) if way == "adopt" else self.it.release(x)
                self.must(isinstance(copied, bool), COPIED, repr(copied))
                self.must(copied or made is x, COPIED, f"{way} gave another array and says it is no copy")
                if copied and way == "release":
                    self.write(made, 0, device)
                self.same(self.get(kept, device), self.numbers(12), COPIED, f"what was given, after {way} and a write")

    @pytest.mark.parametrize("holder", HOLDS)
    def test_released_arrays_can_be_written(self, holder: str) -> None:
        """A released array can be written, and the writes are not visible to other holders."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            other = self._hold(holder, x, device)
            before = self._values(other, device)
            with self.it.on(device):
                made, _ = self.it.release(x)
            self.same(self.get(made, device), self.numbers(12), RELEASE)
            self.write(made, 0, device)
            self.same(self._values(other, device), before, RELEASE, f"held by {holder}, after it was written")
            self.same(self.get(made, device), np.zeros(12, self.dtype), RELEASE, "what was written")

    def _hold(self, holder: str, x: Any, device: Device) -> Any:
        if "DLPack" in holder:
            with self.it.on(device):
                if not hasattr(self.it.to_dlpack(x), "__dlpack__"):
                    pytest.skip(f"backend {self.backend!r} lends nothing by DLPack")
        with self.it.on(device):
            return HOLDS[holder](self.it, x, device)

    def _values(self, held: Any, device: Device) -> Any:
        """Returns the current values seen by a holder."""
        held = held[0] if isinstance(held, list) else held
        return self.get(held, device) if self.it.is_array(held) else np.array(held)

    def _scribble(self, held: Any, device: Device) -> None:
        """Overwrites the array through a holder, if it is writable."""
        held = held[0] if isinstance(held, list) else held
        with self.it.on(device):
            try:
                held[(slice(None),) * held.ndim] = 0
            except (ValueError, RuntimeError, TypeError):  # it is read-only
                return
