"""Finding plugins: backends by entry point, the default one, and what users ask about devices."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtensor.backend.device import HOST, Device, HostArray
from shardtensor.backend.protocol import Backend, requested_devices
from shardtensor.errors import ArgumentError, BackendError, ShardTensorError
from shardtensor.host.fork import in_children

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "shardtensor.backends"


class _Host(Backend):
    """Host arrays, so that a move from or to one is a move like any other."""

    name = "host"
    shared_memory = True
    xp = np

    def devices(self) -> Sequence[Device]:
        return (HOST,)

    def is_array(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        return np.array(array)

    def from_host(self, array: HostArray, device: Device) -> Any:
        return np.array(array)

    def to_host(self, array: Any, device: Device) -> HostArray:
        return array  # type: ignore[no-any-return]


_host = _Host()
_loaded: dict[str, Backend] = {}
_rivals: dict[str, str] = {}  # by name, the plugins that both claim it
_lock = threading.RLock()


@in_children
def _unlock() -> None:
    global _lock
    _lock = threading.RLock()


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # a third of this package's import time, and wanted once

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            _rivals[point.name] = f"{other.value} and {point.value}"
    return found


def backend_names() -> list[str]:
    """The names of all installed backends, usable here or not, in alphabetical order.

    >>> "numpy" in st.backend_names()
    True
    """
    return sorted(_entry_points())


def load(name: str) -> Backend:
    """The backend of that name, imported and started on first use.

    Raises:
        ArgumentError: no such backend is installed.
        BackendError: it is installed and cannot be used here; the message says why.
    """
    if backend := _loaded.get(name):
        return backend
    with _lock:
        if backend := _loaded.get(name):
            return backend
        requested_devices()  # a wrong number is an error before the plugin imports its library
        plugin = _plugin(name)
        try:
            backend = plugin()
        except BackendError:
            raise
        except Exception as error:  # a plugin may fail in any way: said, with its reason, not hidden
            raise BackendError(f"backend {name!r} is installed but does not start: {error!r}") from error
        if (said := getattr(backend, "name", None)) != name:
            raise BackendError(f"backend {name!r} calls itself {said!r}; its `name` must be the entry point's")
        _loaded[name] = backend
        return backend


def install(backend: Backend) -> None:
    """Brings a backend that is no plugin."""
    _loaded.setdefault(backend.name, backend)


def _plugin(name: str) -> type[Backend]:
    """The class of that backend, imported."""
    points = _entry_points()
    if name not in points:
        hint = "; run `pip install -e .` in the source tree" if not points else ""
        raise ArgumentError(f"there is no backend named {name!r}; installed are {sorted(points)}{hint}")
    if name in _rivals:
        raise BackendError(f"two distributions bring a backend named {name!r}: {_rivals[name]}; uninstall one of them")
    try:
        plugin = points[name].load()
    except Exception as error:  # likewise
        raise BackendError(f"backend {name!r} is installed but does not start: {error!r}") from error
    if not (isinstance(plugin, type) and issubclass(plugin, Backend)):
        raise BackendError(f"backend {name!r}: {points[name].value} is no subclass of shardtensor.backend.Backend")
    return plugin


@functools.cache
def default_backend() -> Backend:
    """The backend where none is named: ``SHARDTENSOR_BACKEND``, else the usable one of highest priority, of 0 or more.

    Raises:
        ArgumentError: ``SHARDTENSOR_BACKEND`` is no backend that is installed.
        BackendError: none can be used here, or ``SHARDTENSOR_NUM_DEVICES`` is no number of devices.
    """
    requested_devices()  # what is wrong for every backend is one error, and none of them is imported for it
    if name := os.environ.get("SHARDTENSOR_BACKEND"):
        try:
            return load(name)
        except ShardTensorError as error:
            raise type(error)(f"{error} (SHARDTENSOR_BACKEND names it)") from None
    candidates, reasons = [], []
    for name in backend_names():
        try:
            candidates.append((-_plugin(name).priority, name))
        except BackendError as error:
            reasons.append(f"{name}: {error}")
    for rank, name in sorted(candidates):  # those of lower priority are not even started: it may cost seconds
        if rank > 0:
            reasons.append(f"{name}: used only where SHARDTENSOR_BACKEND names it")
            continue
        try:
            return load(name)
        except BackendError as error:  # no candidate; why, is said if nothing else is one, and by `shardtensor info`
            reasons.append(f"{name}: {error}")
    raise BackendError("no backend can be used here: " + ("; ".join(reasons) or "none is installed"))


def backend_of(device: Device) -> Backend:
    """The backend that drives ``device``."""
    return _loaded.get(device.backend) or (_host if device == HOST else load(device.backend))


@functools.lru_cache(8192)
def backend_of_group(devices: tuple[Device, ...]) -> Backend:
    """The backend that drives all of these devices.

    Raises:
        BackendError: they are of several backends, or one of them is not there.
    """
    names = sorted({device.backend for device in devices})
    if len(names) > 1:
        raise BackendError(f"the devices belong to the backends {names}; a tensor lives on devices of one")
    backend = backend_of(devices[0])
    if not backend.simulated and (absent := set(devices) - set(backend.devices())):
        there = len(backend.devices())
        raise BackendError(
            f"there is no device {min(absent)}; backend {backend.name!r} has {there}, from 0 to {there - 1}; take "
            f"other devices, or set SHARDTENSOR_NUM_DEVICES={max(absent).id + 1} before the first use (logical ones)"
        )
    return backend


def known(devices: Sequence[Device]) -> list[Device]:
    """For each device the equal one of a backend in use, whose kind is that of this machine; else the device itself."""
    names = {device.backend for device in devices} & set(_loaded)
    ours = {device: device for name in names if not _loaded[name].simulated for device in _loaded[name].devices()}
    return [ours.get(device, device) for device in devices]


def owner_of(x: object) -> Backend | None:
    """The backend among those in use whose array ``x`` is; None for host arrays and for strangers."""
    for backend in _loaded.values():
        if not backend.shared_memory and backend.is_array(x):
            return backend
    return None


# -- what users ask --------------------------------------------------------------------------------


def devices(backend: str | None = None) -> list[Device]:
    """All devices of a backend (of the default one without an argument), those of other processes included.

    Raises:
        ArgumentError: no backend of that name is installed.
        BackendError: it cannot be used here; the message says why.

    >>> len(st.devices()) == st.device_count()
    True
    """
    return list((load(backend) if backend is not None else default_backend()).devices())


def local_devices(backend: str | None = None) -> list[Device]:
    """The devices of a backend that this process owns."""
    return [d for d in devices(backend) if d.process_index == process_index()]


def device_count(backend: str | None = None) -> int:
    """How many devices a backend has, over all processes."""
    return len(devices(backend))


def num_shards(backend: str | None = None) -> int:
    """How many shards a backend supports at once here: Nx's name for the number of this process's devices."""
    return len(local_devices(backend))


def process_index() -> int:
    """The number of this process among all that share the program."""
    return 0
