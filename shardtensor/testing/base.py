"""The base class of the suite: access to the backend, transfers to and from it, and assertions that name a rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend import Backend, Device, HostArray
from shardtensor.backend.registry import load
from shardtensor.testing.layouts import DTYPES

PROFILE = hypothesis.settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],  # The explain phase takes minutes.
    suppress_health_check=list(hypothesis.HealthCheck),
)


class Kit:
    """The backend under test, and helpers for its tests. See `BackendTests` for the attributes."""

    backend: str = ""
    examples: int = 20
    chain: int = 20
    size: int = 1 << 12
    unclaimed: Collection[str] = frozenset()

    @property
    def it(self) -> Backend:
        """The backend."""
        return load(self.backend)

    @property
    def devices(self) -> Sequence[Device]:
        """The devices used by the tests: the first four, or all if there are fewer."""
        return list(self.it.devices())[:4]

    @property
    def pairs(self) -> list[tuple[Device, Device]]:
        """All ordered pairs of different devices; skips the test if there is only one device."""
        pairs = [(a, b) for a in self.devices for b in self.devices if a != b]
        if not pairs:
            pytest.skip(f"backend {self.backend!r} has one device here, and this needs two")
        return pairs

    @property
    def dtype(self) -> str:
        """A numeric dtype of the backend, suitable for small integers."""
        return next(d for d in ("int64", "int32", "float32", "float64") if self.it.has_dtype(np.dtype(d)))

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the suite that the backend has."""
        return [d for d in DTYPES if self.it.has_dtype(np.dtype(d))]

    def current(self) -> Any:
        """Returns the device that is current, determined from where the backend's functions create a new array.

        Override it if the underlying library reports this directly (``return mylib.current_device()``).
        """
        try:
            return self.it.device_of(self.it.xp.zeros((1,), dtype=np.dtype(self.dtype)))
        except Exception as error:  # Libraries raise different errors if no device is current.
            return type(error).__name__

    # -- arrays in and out -------------------------------------------------------------------------

    def numbers(self, size: int | None = None, first: int = 1) -> HostArray:
        """Returns the host array ``first``, ``first + 1``, ... (period 97), without 0, which fresh memory may hold."""
        return (np.arange(self.size if size is None else size) % 97 + first).astype(self.dtype)

    def put(self, value: Any, device: Device) -> Any:
        """Copies a host value to a device."""
        with self.it.on(device):
            return self.it.from_host(np.asarray(value), device)

    def get(self, array: Any, device: Device) -> HostArray:
        """Copies an array to the host, into new memory."""
        with self.it.on(device):
            return np.array(self.it.to_host(array, device))

    def write(self, array: Any, value: Any, device: Device) -> None:
        """Sets all elements of an array of at least one dimension, in place."""
        with self.it.on(device):
            array[(slice(None),) * array.ndim] = value

    def send(self, array: Any, source: Device, destination: Device) -> Any:
        """Copies an array to another device by the same calls as the library."""
        it = self.it
        with it.on(source):
            array = it.contiguous(array)
        it.wait(destination, it.record(source))
        with it.on(destination):
            return it.to_device(array, source, destination)

    def worked(self, device: Device, value: HostArray, times: int | None = None) -> tuple[Any, HostArray]:
        """Queues ``times`` additions of 1 (default: `chain`); returns the array and its final value."""
        times = self.chain if times is None else times
        x = self.put(value, device)
        with self.it.on(device):
            for _ in range(times):
                x = self.it.xp.add(x, 1)
        return x, value + np.asarray(times, value.dtype)

    # -- assertions --------------------------------------------------------------------------------

    def must(self, holds: bool, rule: str, found: object) -> None:
        """Raises an AssertionError that names the rule and the values found, unless ``holds``."""
        __tracebackhide__ = True
        if not holds:
            raise AssertionError(f"backend {self.backend!r} breaks a rule.\n  rule: {rule}\n  found: {found}")

    def same(self, found: HostArray, wanted: Any, rule: str, where: object = "") -> None:
        """Raises an AssertionError that names the rule, unless values, shape and dtype are equal."""
        __tracebackhide__ = True
        wanted = np.asarray(wanted)
        if (
            found.shape == wanted.shape
            and found.dtype == wanted.dtype
            and np.array_equal(found, wanted, equal_nan=_nan(wanted))
        ):
            return
        values = "; wanted ".join(f"{x!r:.200} of shape {x.shape}, {x.dtype}" for x in (found, wanted))
        self.must(False, rule, f"{where}: {values}" if where != "" else values)

    def sweep(self, body: Callable[[Any], None], examples: int | None = None) -> None:
        """Runs ``body(data)`` for a number of examples (default: `examples`) drawn by hypothesis."""

        @hypothesis.settings(PROFILE, max_examples=examples or self.examples)
        @hypothesis.given(data=some.data())
        def run(data: Any) -> None:
            body(data)

        run()

    @pytest.fixture(autouse=True)
    def _state_is_restored(self) -> Any:
        before = self._state()
        yield
        after = self._state()
        self.must(before == after, "state that is changed during a call is restored", f"{before}, then {after}")

    def _state(self) -> Any:
        return self.current(), st.current_device(), np.geterr(), np.geterrcall()


def _nan(x: HostArray) -> bool:
    return x.dtype.kind in "fc"
