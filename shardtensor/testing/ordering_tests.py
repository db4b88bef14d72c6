"""The tests of ordering: asynchronous execution, copies between devices, and memory that is freed immediately. Missing
synchronization shows as wrong values.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor.backend import Device, HostArray
from shardtensor.testing.base import Kit
from shardtensor.testing.layouts import array

COMPUTED = "Backend.to_host: the values after they have been computed"
COPY = "Backend.to_device: an exclusive copy on the destination"
ORDERED = "Backend.record and wait: work queued on a device after wait(device, token) runs after the token"
NOT_REUSED = "Backend.to_device: the memory of the source is not reused before it has been read"
IN_ORDER = "Backend.begin_write: the write is ordered after copies that still read the array"
OFFLOAD = "Backend.offload and onload: a copy in host memory, and a copy of it on the device"


class OrderTests(Kit):
    """Each device executes calls in order; `record` and `wait` order calls on different devices."""

    def test_reading_waits_for_queued_operations(self) -> None:
        """A host read after a chain of queued operations returns their final result."""
        for device in self.devices:
            for times in (1, self.chain, 4 * self.chain):
                x, answer = self.worked(device, self.numbers(), times)
                self.same(self.get(x, device), answer, COMPUTED, f"after {times} additions on {device}")

    def test_host_arrays_do_not_change(self) -> None:
        """A host array does not change when further work is queued or another array is read."""
        device = self.devices[0]
        x, answer = self.worked(device, self.numbers())
        with self.it.on(device):
            host = self.it.to_host(x, device)
            x = self.it.xp.multiply(x, 0)
            later = self.it.to_host(x, device)
        self.same(np.asarray(host), answer, COMPUTED, "a host array, after another array was read")
        self.same(np.asarray(later), answer * 0, COMPUTED)

    def test_copies_between_all_devices(self) -> None:
        """Copies between all pairs of devices (equal ones included) are correct for shapes and dtypes of all kinds."""
        for source in self.devices:
            for destination in self.devices:
                for shape, dtype in [((), 0), ((0, 3), 0), ((5,), -1), ((3, 4, 5), 0), ((2, 3), -1)]:
                    host = array(shape, self.dtypes[dtype], 5)
                    copy = self.send(self.put(host, source), source, destination)
                    self.must(self.it.is_array(copy), COPY, type(copy))
                    self.same(self.get(copy, destination), host, COPY, f"from {source} to {destination}")

    def test_copies_are_independent(self) -> None:
        """The source and the copy are independent: writes to one are not visible in the other."""
        for source in self.devices:
            for destination in self.devices:
                x = self.put(self.numbers(), source)
                y = self.send(x, source, destination)
                self.write(y, 0, destination)
                where = f"from {source} to {destination}"
                self.same(self.get(x, source), self.numbers(), COPY, f"the source, after the copy was written, {where}")
                y = self.send(x, source, destination)
                self.get(y, destination)
                self.write(x, 0, source)
                self.same(self.get(y, destination), self.numbers(), COPY, f"the copy, after the source was, {where}")

    def test_copies_wait_for_their_source(self) -> None:
        """A copy contains the result of work queued on its source, and work on the copy follows it."""
        for source, destination in self.pairs:
            x, answer = self.worked(source, self.numbers())
            y = self.send(x, source, destination)
            with self.it.on(destination):
                y = self.it.xp.multiply(y, 2)
            self.same(self.get(y, destination), answer * 2, ORDERED, f"a copy from {source} to {destination}")

    def test_copies_in_a_ring(self) -> None:
        """A chain of copies and operations around all devices, several times, is executed in order."""
        x, answer = self.worked(self.devices[0], self.numbers())
        ring = [*self.devices, self.devices[0]] * 3
        for source, destination in itertools.pairwise(ring):
            x = self.send(x, source, destination)
            with self.it.on(destination):
                x = self.it.xp.add(x, 1)
            answer = answer + np.asarray(1, answer.dtype)
        self.same(self.get(x, ring[-1]), answer, ORDERED, f"after {len(ring) - 1} copies in a ring")

    def test_devices_that_wait_for_each_other(self) -> None:
        """Two devices that wait for each other's tokens do not deadlock: a token covers only work queued before it."""
        for a, b in self.pairs:
            (x, of_x), (y, of_y) = self.worked(a, self.numbers()), self.worked(b, self.numbers())
            first, second = self.it.record(a), self.it.record(b)
            self.it.wait(b, first)
            self.it.wait(a, second)
            x, y = self.send(x, a, b), self.send(y, b, a)
            self.same(self.get(x, b), of_x, ORDERED)
            self.same(self.get(y, a), of_y, ORDERED)

    def test_sources_may_be_deleted_at_once(self) -> None:
        """A source whose last reference is dropped right after `to_device` is not reused before it has been read."""
        for source, destination in self.pairs:
            copies = []
            for n in range(8):
                x, answer = self.worked(source, self.numbers(first=n + 1))
                copies.append((self.send(x, source, destination), answer))
                del x
                with self.it.on(source):
                    again = [self.it.xp.zeros((self.size,), dtype=np.dtype(self.dtype)) for _ in range(4)]
                del again
            for y, answer in copies:
                self.same(self.get(y, destination), answer, NOT_REUSED, f"from {source} to {destination}")

    def test_sources_are_not_written_before_they_are_read(self) -> None:
        """Overwriting a source for which `begin_write` is true right after `to_device` does not affect the copy."""
        for source, destination in self.pairs:
            x, answer = self.worked(source, self.numbers())
            y = self.send(x, source, destination)
            with self.it.on(source):
                writable = self.it.memory_of(x) is not None and self.it.begin_write(x)
            if writable:
                self.write(x, 0, source)
                self.get(x, source)
            self.same(self.get(y, destination), answer, IN_ORDER, f"from {source} to {destination}")

    def test_random_traffic(self) -> None:
        """Operations, copies, writes to exclusive arrays and deletions in random order on all devices are correct."""
        for seed in range(4):
            _Traffic(self, seed).run(10 * self.examples)

    def test_traffic_in_threads(self) -> None:
        """Random traffic from several threads at once is correct."""
        with ThreadPoolExecutor(4) as pool:  # fork: only this call has it.
            for _ in pool.map(lambda seed: _Traffic(self, seed).run(4 * self.examples), range(100, 104)):
                pass  # Iterating re-raises the errors of the threads.

    # -- pinned host memory ------------------------------------------------------------------------

    def test_offload_and_back(self) -> None:
        """`offload` and `onload` preserve values on all devices, with and without `settle` in between."""
        for device in self.devices:
            for host in (
                self.numbers(),
                self.numbers(0),
                np.asarray(self.numbers(1)[0]),
                self.numbers(24).reshape(4, 6),
            ):
                for settled in (True, False):
                    x, answer = self.worked(device, host)
                    self.same(self._back(x, device, settled), answer, OFFLOAD, f"of shape {host.shape} on {device}")

    def test_pin(self) -> None:
        """`pin` copies a host array, which may be overwritten afterwards."""
        device, host = self.devices[0], self.numbers()
        pinned = self.it.pin(host)
        host[...] = 0
        with self.it.on(device):
            x, token = self.it.onload(pinned, device, None)
        if token is not None:
            self.it.wait(device, token)
        self.same(self.get(x, device), self.numbers(), "Backend.pin: a copy of a host array, which may be written")

    def test_memory_kind_pinned_host(self) -> None:
        """An offloaded tensor has the same values in host memory and on the devices, unaffected by later writes."""
        mesh = st.make_mesh((len(self.devices),), ("x",), devices=list(self.devices))
        host = self.numbers(41)
        there = st.device_put(host, st.NamedSharding(mesh, st.P("x"), memory_kind="pinned_host"))
        self.must(there.sharding.memory_kind == "pinned_host", "memory kinds are kept", there.sharding)
        self.same(np.asarray(there), host, OFFLOAD, "read on the host")
        back = st.device_put(there, st.NamedSharding(mesh, st.P("x")))
        self.same(np.asarray(back + 1), host + 1, OFFLOAD, "back on the devices")
        away = st.device_put(back, there.sharding)
        back[:] = 0
        self.same(np.asarray(away), host, OFFLOAD, "after the source tensor was written")

    def _back(self, x: Any, device: Device, settled: bool) -> HostArray:
        with self.it.on(device):
            there, token = self.it.offload(x, device)
        del x
        if settled and token is not None:
            self.it.settle(token)
        with self.it.on(device):
            self.it.xp.zeros((self.size,), dtype=np.dtype(self.dtype))
            back, after = self.it.onload(there, device, token)
        if after is not None:
            self.it.wait(device, after)
        return self.get(back, device)


class _Traffic:
    """Random operations on arrays on devices, each stored with its expected value."""

    def __init__(self, kit: Kit, seed: int) -> None:
        self.kit = kit
        self.random = np.random.default_rng(seed)
        self.held: list[tuple[Any, Device, HostArray]] = []

    def run(self, steps: int) -> None:
        for step in range(steps):
            actions = [self._make, self._work, self._work, self._copy, self._copy, self._copy, self._write, self._drop]
            actions[self.random.integers(len(actions)) if len(self.held) > 2 else 0]()
            if step % 16 == 15:
                self._read(self._pick())
        for one in self.held:
            self._read(one)

    def _pick(self) -> tuple[Any, Device, HostArray]:
        return self.held[self.random.integers(len(self.held))]

    def _some_device(self) -> Device:
        return self.kit.devices[int(self.random.integers(len(self.kit.devices)))]

    def _make(self) -> None:
        device, value = self._some_device(), self.kit.numbers(first=int(self.random.integers(1, 50)))
        self.held.append((self.kit.put(value, device), device, value))

    def _work(self) -> None:
        x, device, value = self._pick()
        xp = self.kit.it.xp
        with self.kit.it.on(device):
            for _ in range(self.kit.chain // 4):
                x = xp.subtract(101, x)
                value = np.asarray(101, value.dtype) - value
        self.held.append((x, device, value))

    def _copy(self) -> None:
        x, device, value = self._pick()
        destination = self._some_device()
        self.held.append((self.kit.send(x, device, destination), destination, value))
        if self.random.random() < 0.5:
            self._drop()

    def _write(self) -> None:
        at = self.random.integers(len(self.held))
        x, device, value = self.held.pop(at)
        with self.kit.it.on(device):
            writable = self.kit.it.memory_of(x) is not None and self.kit.it.begin_write(x)
        if writable:
            self.kit.write(x, 7, device)
            value = np.full_like(value, 7)
        self.held.append((x, device, value))

    def _drop(self) -> None:
        self.held.pop(self.random.integers(len(self.held)))
        if not self.held:
            self._make()

    def _read(self, one: tuple[Any, Device, HostArray]) -> None:
        x, device, value = one
        self.kit.same(self.kit.get(x, device), value, f"{ORDERED}; {IN_ORDER}", "random traffic between devices")
