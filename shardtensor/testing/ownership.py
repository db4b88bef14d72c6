"""The tests of ownership: a write is never visible through any other reference to the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardtensor.backend import Backend, Device
from shardtensor.testing.base import Kit

EXCLUSIVE = "Backend.is_exclusive: True only if no other reference reaches the memory (False is always correct)"
WRITABLE = "Backend.is_exclusive: an exclusive array is made writable"
ADOPT = "Backend.adopt: an array that cannot be written from outside, from the result of a mapped function"
COPIED = "Backend.adopt and release return whether they copied: a copy has its own memory"
RELEASE = "Backend.release: an exclusive, writable array"

HOLDERS: dict[str, Callable[[Backend, Any, Device], Any]] = {
    "another variable": lambda it, x, device: x,
    "a list": lambda it, x, device: [x],
    "a view": lambda it, x, device: it.view(x, slice(1, None)),
    "a view of a view": lambda it, x, device: it.view(it.view(x, slice(1, None)), slice(None, 5)),
    "an exported view": lambda it, x, device: it.export(x),
    "a reshaped view": lambda it, x, device: it.xp.reshape(x, (2, -1)),
    "a host read": lambda it, x, device: it.to_host(x, device),
    "a DLPack export": lambda it, x, device: it.from_dlpack(it.to_dlpack(x), device),
}


class OwnershipTests(Kit):
    """`is_exclusive`, `adopt` and `release`: only exclusive memory is written in place."""

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_is_exclusive_detects_holders(self, holder: str) -> None:
        """If `is_exclusive` is true despite another holder, the array is written, and the holder detects the change."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            other = self._hold(holder, x, device)
            before = self._values(other, device)
            with self.it.on(device):
                exclusive = self.it.is_exclusive(x, 1)
            if exclusive:
                self.write(x, 0, device)
            self.same(self._values(other, device), before, EXCLUSIVE, f"held by {holder}, after it was written")

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_holders_are_not_exclusive(self, holder: str) -> None:
        """A view reaches the memory of its base: neither of two holders of one memory is exclusive."""
        device = self.devices[0]
        x = self.put(self.numbers(12), device)
        other = self._hold(holder, x, device)
        if not self.it.is_array(other) or (self.it.shared_memory and holder == "a host read"):
            pytest.skip(f"{holder} is not an array that could be written")
        with self.it.on(device):
            exclusive = self.it.is_exclusive(other, 1)
        if exclusive:
            self.write(other, 0, device)
        self.same(self.get(x, device), self.numbers(12), EXCLUSIVE, f"an array after {holder} was written")

    def test_exclusive_arrays_are_writable(self) -> None:
        """If `is_exclusive` is true, the array can be written, even if a read-only view of it existed before."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            with self.it.on(device):
                self.it.export(x)
                exclusive = self.it.is_exclusive(x, 1)
            if exclusive:
                self.write(x, 3, device)
                self.same(self.get(x, device), np.full(12, 3, self.dtype), WRITABLE)

    def test_aliased_elements_are_not_exclusive(self) -> None:
        """A broadcast array is never exclusive, because its elements alias each other."""
        device = self.devices[0]
        with self.it.on(device):
            try:
                x = self.it.xp.broadcast_to(self.it.from_host(self.numbers(4), device), (3, 4))
            except AttributeError:
                pytest.skip("its namespace has no broadcast_to")
            exclusive = self.it.is_exclusive(x, 1)
            if exclusive:
                x[0:1] = 0
        if exclusive:
            wanted = np.array(np.broadcast_to(self.numbers(4), (3, 4)))
            wanted[0] = 0
            self.same(self.get(x, device), wanted, "Backend.is_exclusive: no two elements have the same address")

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_adopted_arrays_are_independent(self, holder: str) -> None:
        """A mapped function that keeps its result and writes to it later does not change the adopted array."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            other = self._hold(holder, x, device)
            with self.it.on(device):
                made, _ = self.it.adopt(x, ())
            del x
            self.same(self.get(made, device), self.numbers(12), ADOPT)
            self._overwrite(other, device)
            self.same(self.get(made, device), self.numbers(12), ADOPT, f"after {holder} was written")

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
            self.same(self.get(made[1], device), self.numbers(12)[3:7], ADOPT, "a view of the shard")
            for x in made:
                with self.it.on(device):
                    exclusive = self.it.is_exclusive(x, 2)
                if exclusive:
                    self.write(x, 0, device)
            self.same(
                self.get(shard, device), self.numbers(12), EXCLUSIVE, "the shard, after a write to the adopted array"
            )

    def test_copies_are_reported(self) -> None:
        """The second result of `adopt` and `release` is True only for a copy, which has its own memory."""
        for device in self.devices:
            for method in ("adopt", "release"):
                x = self.put(self.numbers(12), device)
                kept = x
                with self.it.on(device):
                    made, copied = self.it.adopt(x, ()) if method == "adopt" else self.it.release(x)
                self.must(isinstance(copied, bool), COPIED, repr(copied))
                self.must(copied or made is x, COPIED, f"{method} returned another array and reports no copy")
                if copied and method == "release":
                    self.write(made, 0, device)
                self.same(self.get(kept, device), self.numbers(12), COPIED, f"the argument, after {method} and a write")

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_released_arrays_are_writable(self, holder: str) -> None:
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
            self.same(self.get(made, device), np.zeros(12, self.dtype), RELEASE, "the array, after it was written")

    def _hold(self, holder: str, x: Any, device: Device) -> Any:
        if "DLPack" in holder:
            with self.it.on(device):
                if not hasattr(self.it.to_dlpack(x), "__dlpack__"):
                    pytest.skip(f"backend {self.backend!r} does not export by DLPack")
        with self.it.on(device):
            return HOLDERS[holder](self.it, x, device)

    def _values(self, held: Any, device: Device) -> Any:
        """Returns the current values seen by a holder."""
        held = held[0] if isinstance(held, list) else held
        return self.get(held, device) if self.it.is_array(held) else np.array(held)

    def _overwrite(self, held: Any, device: Device) -> None:
        """Overwrites the array through a holder, if it is writable."""
        held = held[0] if isinstance(held, list) else held
        with self.it.on(device):
            try:
                held[(slice(None),) * held.ndim] = 0
            except (ValueError, RuntimeError, TypeError):  # The array is read-only.
                return
