"""What the parts of the suite share: the backend, arrays in and out of it, and failures that name the broken rule."""

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
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],  # explaining a failure takes minutes
    suppress_health_check=list(hypothesis.HealthCheck),
)


class Kit:
    """One backend, and what the tests of it are made with. See `BackendTests` for the attributes."""

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
        """Some of its devices: what is tested of all is tested of at most four."""
        return list(self.it.devices())[:4]

    @property
    def pairs(self) -> list[tuple[Device, Device]]:
        """All pairs of two of them."""
        found = [(a, b) for a in self.devices for b in self.devices if a != b]
        if not found:
            pytest.skip(f"backend {self.backend!r} has one device here, and this needs two")
        return found

    @property
    def dtype(self) -> str:
        """One that it has, for arrays of small numbers."""
        return next(d for d in ("int64", "int32", "float32", "float64") if self.it.has_dtype(np.dtype(d)))

    @property
    def dtypes(self) -> list[str]:
        """Those of the suite that it has."""
        return [d for d in DTYPES if self.it.has_dtype(np.dtype(d))]

    def current(self) -> Any:
        """Which device is current: where the backend's own functions put a new array, as far as that can be told.
        Override it where the library underneath knows better (``return mylib.current_device()``).
        """
        try:
            return self.it.device_of(self.it.xp.zeros((1,), dtype=np.dtype(self.dtype)))
        except Exception as error:  # what the library says where no device is current
            return type(error).__name__

    # -- arrays in and out -------------------------------------------------------------------------

    def numbers(self, size: int | None = None, first: int = 1) -> HostArray:
        """``first``, ``first + 1``, ... on the host: small, and none of them 0, which is what fresh memory may hold."""
        return (np.arange(self.size if size is None else size) % 97 + first).astype(self.dtype)

    def put(self, value: Any, device: Device) -> Any:
        """An array of the backend."""
        with self.it.on(device):
            return self.it.from_host(np.asarray(value), device)

    def get(self, array: Any, device: Device) -> HostArray:
        """Its values now, in memory of their own."""
        with self.it.on(device):
            return np.array(self.it.to_host(array, device))

    def write(self, array: Any, value: Any, device: Device) -> None:
        """Sets all elements of an array of at least one dimension."""
        with self.it.on(device):
            array[(slice(None),) * array.ndim] = value

    def send(self, array: Any, source: Device, destination: Device) -> Any:
        """A copy on another device, as the library makes it."""
        it = self.it
        with it.on(source):
            array = it.contiguous(array)
        it.wait(destination, it.record(source))
        with it.on(destination):
            return it.to_device(array, source, destination)

    def worked(self, device: Device, value: HostArray, times: int | None = None) -> tuple[Any, HostArray]:
        """An array at the end of a chain of work, which may be still to do; and what it is then."""
        times = self.chain if times is None else times
        x = self.put(value, device)
        with self.it.on(device):
            for _ in range(times):
                x = self.it.xp.add(x, 1)
        return x, value + np.asarray(times, value.dtype)

    # -- judging -----------------------------------------------------------------------------------

    def must(self, holds: bool, rule: str, found: object) -> None:
        """Fails where a rule does not hold, and says which, and what was found."""
        __tracebackhide__ = True
        if not holds:
            raise AssertionError(f"backend {self.backend!r} breaks a rule.\n  rule: {rule}\n  found: {found}")

    def same(self, found: HostArray, wanted: Any, rule: str, where: object = "") -> None:
        """Fails where values, shape or dtype are not those that a rule wants."""
        __tracebackhide__ = True
        wanted = np.asarray(wanted)
        if (
            found.shape == wanted.shape
            and found.dtype == wanted.dtype
            and np.array_equal(found, wanted, equal_nan=_nan(wanted))
        ):
            return
        said = "; wanted ".join(f"{x!r:.200} of shape {x.shape}, {x.dtype}" for x in (found, wanted))
        self.must(False, rule, f"{where}: {said}" if where != "" else said)

    def sweep(self, body: Callable[[Any], None], examples: int | None = None) -> None:
        """Runs ``body(data)`` with what hypothesis draws."""

        @hypothesis.settings(PROFILE, max_examples=examples or self.examples)
        @hypothesis.given(data=some.data())
        def run(data: Any) -> None:
            body(data)

        run()

    @pytest.fixture(autouse=True)
    def _nothing_is_left_behind(self) -> Any:
        before = self._state()
        yield
        after = self._state()
        self.must(before == after, "what is changed for the length of a call is put back", f"{before}, then {after}")

    def _state(self) -> Any:
        return self.current(), st.current_device(), np.geterr(), np.geterrcall()


def _nan(x: HostArray) -> bool:
    return x.dtype.kind in "fc"
