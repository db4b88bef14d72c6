"""The tests of ownership: a write is never visible through any other reference to the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardtensor.backend import Backend, Device
from shardtensor.testing.base import Kit

EXCLUSIVE = "Backend.is_exclusive: True only if no other reference reaches the memory (False is always correct)"
MEMORY = "Backend.memory_of: equal for arrays that share memory, and different for others (None is always correct)"
WRITABLE = "Backend.begin_write: True only if the array can be written (False is always correct)"
LEASES = "Backend.lend: the lease lasts as long as the exported array and whatever is derived from it"
ADOPT = "Backend.adopt: an array that cannot be written from outside, from the result of a mapped function"
COPIED = "Backend.adopt returns whether it copied: a copy has its own memory"

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
    """`memory_of`, `begin_write`, `is_exclusive` and `adopt`: only exclusive memory is written in place."""

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_is_exclusive_detects_holders(self, holder: str) -> None:
        """If `is_exclusive` is true despite another holder, the array is written, and the holder detects the change."""
        for device in self.devices:
            held = [self.put(self.numbers(12), device)]
            other = self._hold(holder, held[0], device)
            before = self._values(other, device)
            self._write_if_exclusive(held, device)
            self.same(self._values(other, device), before, EXCLUSIVE, f"held by {holder}, after it was written")

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_holders_are_not_exclusive(self, holder: str) -> None:
        """A view reaches the memory of its base: neither of two holders of one memory is exclusive."""
        device = self.devices[0]
        x = self.put(self.numbers(12), device)
        held = [self._hold(holder, x, device)]
        if not self.it.is_array(held[0]) or (self.it.on_host and holder == "a host read"):
            pytest.skip(f"{holder} is not an array that could be written")
        self._write_if_exclusive(held, device)
        self.same(self.get(x, device), self.numbers(12), EXCLUSIVE, f"an array after {holder} was written")

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_memory_of_views(self, holder: str) -> None:
        """An array that shares memory with another one has the same `memory_of`."""
        for device in self.devices:
            x, y = self.put(self.numbers(12), device), self.put(self.numbers(12), device)
            other = self._hold(holder, x, device)
            other = other[0] if isinstance(other, list) else other
            with self.it.on(device):
                mine, its = self.it.memory_of(x), self.it.memory_of(y)
                if mine is None:
                    continue
                self.must(mine != its, MEMORY, f"two arrays have the memory {mine!r}")
                if self.it.is_array(other) and holder != "a host read" and "DLPack" not in holder:
                    self.must(self.it.memory_of(other) == mine, MEMORY, f"{holder} has {self.it.memory_of(other)!r}")

    def test_exclusive_arrays_are_writable(self) -> None:
        """If `begin_write` is true, the array can be written, even if a read-only view of it existed before."""
        for device in self.devices:
            held = [self.put(self.numbers(12), device)]
            with self.it.on(device):
                self.it.export(held[0])
                writable = self.it.begin_write(held[0])
            if writable:
                self.write(held[0], 3, device)
                self.same(self.get(held[0], device), np.full(12, 3, self.dtype), WRITABLE)

    def test_aliased_elements_are_not_written(self) -> None:
        """A broadcast array is never written, because its elements alias each other."""
        device = self.devices[0]
        with self.it.on(device):
            try:
                x = self.it.xp.broadcast_to(self.it.from_host(self.numbers(4), device), (3, 4))
            except AttributeError:
                pytest.skip("its namespace has no broadcast_to")
            writable = self.it.memory_of(x) is not None and self.it.begin_write(x)
            if writable:
                x[0:1] = 0
        if writable:
            answer = np.array(np.broadcast_to(self.numbers(4), (3, 4)))
            answer[0] = 0
            self.same(self.get(x, device), answer, "Backend.begin_write: no two elements have the same address")

    def test_leases(self) -> None:
        """A lease lasts as long as the exported array, a view of it, or a view of that; and no longer."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            with self.it.on(device):
                exported, lease = self.it.lend(x)
                if lease is None:
                    pytest.skip("its exports have no leases")
                self.must(lease() is not None, LEASES, "a lease that ended before the exported array")
                view = self.it.view(exported, slice(1, None))
                derived = self.it.xp.reshape(self.it.view(view, slice(1, 7)), (2, 3))
                del exported, view
                self.must(lease() is not None, LEASES, "a lease that ended before a view of a view")
                del derived
                self.must(lease() is None, LEASES, "a lease that lasts although nothing refers to the memory")

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_adopted_arrays_are_independent(self, holder: str) -> None:
        """A mapped function that keeps its result and writes to it later does not change the adopted array."""
        for device in self.devices:
            held = [self.put(self.numbers(12), device)]
            other = self._hold(holder, held[0], device)
            with self.it.on(device):
                result, _ = self.it.adopt(held, ())
            held.clear()
            self.same(self.get(result, device), self.numbers(12), ADOPT)
            self._overwrite(other, device)
            self.same(self.get(result, device), self.numbers(12), ADOPT, f"after {holder} was written")

    def test_adopted_fresh_arrays(self) -> None:
        """Adopting an exclusive array, or a view of it, preserves the values."""
        for device in self.devices:
            for cut in (slice(None), slice(2, 9), slice(None, None, 2)):
                x, answer = self.worked(device, self.numbers(12))
                with self.it.on(device):
                    held = [self.it.view(x, cut)]
                    del x
                    result, _ = self.it.adopt(held, ())
                self.same(self.get(result, device), answer[cut], ADOPT, f"a view [{cut}] of a fresh array")

    def test_adopted_shards(self) -> None:
        """Adopting a shard or a view of it preserves the values, and a later write does not change the shard."""
        for device in self.devices:
            shard = self.put(self.numbers(12), device)
            with self.it.on(device):
                seen = self.it.export(shard)
                views = [seen, self.it.view(seen, slice(3, 7))]
                results = [[self.it.adopt([x], [shard])[0]] for x in views]
                del views
            self.same(self.get(results[0][0], device), self.numbers(12), ADOPT, "the shard itself")
            self.same(self.get(results[1][0], device), self.numbers(12)[3:7], ADOPT, "a view of the shard")
            for held in results:
                self._write_if_exclusive(held, device)
            self.same(
                self.get(shard, device), self.numbers(12), EXCLUSIVE, "the shard, after a write to the adopted array"
            )

    def test_copies_are_reported(self) -> None:
        """The second result of `adopt` is True only for a copy, which has its own memory."""
        for device in self.devices:
            x = self.put(self.numbers(12), device)
            with self.it.on(device):
                result, copied = self.it.adopt([x], ())
            self.must(isinstance(copied, bool), COPIED, repr(copied))
            self.must(copied or result is x, COPIED, "adopt returned another array and reports no copy")
            if copied:
                self.write(result, 0, device)
            self.same(self.get(x, device), self.numbers(12), COPIED, "the argument, after adopt and a write")

    def _write_if_exclusive(self, held: list[Any], device: Device) -> None:
        """Overwrites the array in a list, if the library would write it in place."""
        with self.it.on(device):
            exclusive = self.it.is_exclusive(held) and self.it.begin_write(held[0])
        if exclusive:
            self.write(held[0], 0, device)

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
