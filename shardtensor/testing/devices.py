"""The tests of the backend's devices and of the current device."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import Backend, Device
from shardtensor.backend.registry import load
from shardtensor.testing.base import Kit

DEVICES = "Backend.devices: all devices, in order of their ids; never empty; the same each time"
ON = "Backend.on: makes the device current in this thread, and restores the previous one, also after an error"


class DeviceTests(Kit):
    """Devices are values; `Backend.on` makes one current and restores the previous one afterwards."""

    def test_it_is_loaded_once_under_its_name(self) -> None:
        """The backend is one instance per process, and `name` is the name of its entry point."""
        self.must(isinstance(self.it, Backend), "a backend is a subclass of Backend", type(self.it))
        self.must(load(self.backend) is self.it, "a backend is instantiated once per process", "two instances")
        self.must(self.it.name == self.backend, "Backend.name: the name under which it is registered", self.it.name)

    def test_devices_are_values(self) -> None:
        """The devices are distinct, in order of their ids, and equal at each call."""
        devices = list(self.it.devices())
        self.must(bool(devices), DEVICES, devices)
        self.must(all(type(d) is Device and d.backend == self.backend for d in devices), DEVICES, devices)
        self.must(devices == sorted(set(devices), key=lambda d: d.id), DEVICES, devices)
        self.must(len({d.id for d in devices}) == len(devices), DEVICES, devices)
        self.must(devices == list(self.it.devices()) == st.devices(self.backend), DEVICES, "others at a second call")
        self.must(all(isinstance(d.kind, str) and d.kind for d in devices), "Device.kind: a description", devices)

    def test_adjacent_devices(self) -> None:
        """`adjacent_devices` returns the requested number of distinct devices."""
        for count in range(1, len(self.it.devices()) + 1):
            devices = list(self.it.adjacent_devices(count))
            fits = len(devices) == len(set(devices)) == count and set(devices) <= set(self.it.devices())
            self.must(fits, f"Backend.adjacent_devices: {count} distinct devices", devices)

    def test_memory_info(self) -> None:
        """`memory_info` returns free and total bytes, or None."""
        for device in self.devices:
            info = self.it.memory_info(device)
            fits = info is None or (len(info) == 2 and 0 <= info[0] <= info[1])
            self.must(fits, "Backend.memory_info: bytes (free, total), or None if they are unknown", info)

    def test_current_inside_on(self) -> None:
        """New arrays are created on the current device."""
        for device in self.devices:
            with self.it.on(device):
                ones, copy = (
                    self.it.xp.ones((3,), dtype=np.dtype(self.dtype)),
                    self.it.from_host(np.ones(3, self.dtype), device),
                )
                places = self.it.device_of(ones), self.it.device_of(copy)
            self.must(places[0] == places[1], "Backend.xp runs on the current device", f"{places} on {device}")
            self.same(self.get(ones, device), np.ones(3, self.dtype), "Backend.xp runs on the current device")

    def test_on_nests(self) -> None:
        """Nested `on` blocks restore the previous device, also for the same device twice."""
        seen = self._current_on()
        before = self.current()
        for a in self.devices:
            for b in self.devices:
                with self.it.on(a):
                    with self.it.on(b):
                        self.must(
                            self.current() == seen[b], ON, f"{self.current()} inside of on({b}) inside of on({a})"
                        )
                    self.must(self.current() == seen[a], ON, f"{self.current()} after on({b}) inside of on({a})")
                self.must(self.current() == before, ON, f"{self.current()} after on({a}), where it was {before}")

    @pytest.mark.parametrize("kind", [ZeroDivisionError, RuntimeError, KeyboardInterrupt])
    def test_on_is_left_after_an_error(self, kind: type[BaseException]) -> None:
        """An error propagates unchanged out of `on`, which restores the previous device."""
        seen, before = self._current_on(), self.current()
        for a in self.devices:
            for b in self.devices:
                with self.it.on(a):
                    error, caught = kind("on purpose"), None
                    try:
                        with self.it.on(b):
                            raise error
                    except kind as other:
                        caught = other
                    self.must(caught is error, "Backend.on propagates errors unchanged", repr(caught))
                    self.must(self.current() == seen[a], ON, f"{self.current()} after an error in on({b}) in on({a})")
                self.must(self.current() == before, ON, f"{self.current()} after on({a}), where it was {before}")

    def test_on_accepts_equal_devices(self) -> None:
        """Devices are compared by value and not by identity: an unpickled device is accepted."""
        for device in self.devices:
            again = pickle.loads(pickle.dumps(device))
            x = self.put(self.numbers(5), again)
            self.same(self.get(x, again), self.numbers(5), "Device: a value, not a handle; it can be pickled")

    def test_current_device_of_each_thread(self) -> None:
        """`on` in one thread does not affect the current device of another."""
        seen, errors, before = self._current_on(), list[BaseException](), self.current()
        gate = threading.Barrier(len(self.devices))  # fork: only this call has it.

        def work(device: Device) -> None:
            try:
                with self.it.on(device):
                    for _ in range(5):
                        gate.wait(10)
                        current = self.current()
                        self.must(current == seen[device], ON, f"{current} in on({device}), beside another thread's on")
            except BaseException as error:  # The calling thread raises it.
                gate.abort()
                errors.append(error)

        threads = [threading.Thread(target=work, args=(d,)) for d in self.devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        self.must(self.current() == before, ON, f"{self.current()} after other threads' on, where it was {before}")

    def test_synchronize(self) -> None:
        """`synchronize` returns, with and without queued work, inside and outside `on`."""
        for device in self.devices:
            self.it.synchronize(device)
            x, answer = self.worked(device, self.numbers())
            self.it.synchronize(device)
            with self.it.on(device):
                self.it.synchronize(device)
            self.same(self.get(x, device), answer, "Backend.synchronize changes nothing")

    def test_wait_for_caller(self) -> None:
        """`wait_for_caller` and `make_caller_wait` change neither the current device nor any array."""
        before = self.current()
        for device in self.devices:
            x, answer = self.worked(device, self.numbers())
            self.it.wait_for_caller(device)
            self.it.make_caller_wait(device)
            self.must(
                self.current() == before,
                "Backend.wait_for_caller and make_caller_wait make no device current",
                self.current(),
            )
            self.same(self.get(x, device), answer, "Backend.wait_for_caller and make_caller_wait change no array")

    def test_device_that_does_not_exist(self) -> None:
        """A device that does not exist raises a BackendError and leaves the current device unchanged."""
        absent = Device(self.backend, max(d.id for d in self.it.devices()) + 1000)
        with pytest.raises(st.BackendError, match="there is no device"):
            st.device_put(np.ones(3, self.dtype), absent)

    def _current_on(self) -> dict[Device, object]:
        """Returns the result of `current` inside an `on` block of each device."""
        seen = {}
        for device in self.devices:
            with self.it.on(device):
                seen[device] = self.current()
        return seen
