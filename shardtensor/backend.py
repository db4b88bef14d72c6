"""What drives devices: `Device`, the `Backend` that a plugin implements, and how plugins are found.

A plugin is a class with a handful of methods, registered by its distribution under the entry-point group
``shardtensor.backends``; the in-tree ones are found by the same road. Nothing is imported or asked for a device
before somebody names the backend or needs a default one.

Writing one
-----------
Subclass `Backend`, implement the abstract members, and register it::

    [project.entry-points."shardtensor.backends"]
    mine = "my_package:MyBackend"

The class is instantiated once per process, without arguments. If its devices cannot be used here, raise
`BackendError` in ``__init__`` saying why and what to do; ``shardtensor info`` and ``st.devices("mine")`` show it.
Arrays of a backend are its own; the library touches them through `Backend.xp` and the methods below, always inside
``with backend.on(device)``. Which device an array belongs to is known to the tensor that holds it, never asked of
the array, so that several logical devices may share a physical one.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardtensor.core import innermost
from shardtensor.errors import ArgumentError, BackendError, ShardTensorError
from shardtensor.team import usable_cores

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "shardtensor.backends"
MEMORY_KINDS = ("device", "pinned_host")

HostArray: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One place that holds arrays and computes: a GPU, or a logical share of the host.

    A value, not a handle: it can be hashed, compared, pickled and sent to another process.

    Attributes:
        backend: name of the backend that drives it.
        id: number among that backend's devices, over all processes.
        process_index: the process that owns it.
        kind: what it is, for people ("cpu", a GPU's model, ...).

    >>> st.devices("numpy")[0]
    Device('numpy:0')
    """

    backend: str
    id: int
    process_index: int = 0
    kind: str = "cpu"

    def __str__(self) -> str:
        return "host" if self == HOST else f"{self.backend}:{self.id}"

    def __repr__(self) -> str:
        return f"Device('{self}')"


HOST = Device("host", 0, 0, "host memory")
"""Where host arrays live: the other end of a move from or to one. No tensor lives there."""


class Backend(abc.ABC):
    """What a plugin implements to bring devices of one kind.

    Required: `name`, `devices`, `xp`, `is_array`, `to_device`, `from_host`, `to_host`. The rest has defaults that
    hold for memory that is synchronous and private to each device.
    """

    name: str
    """The name under which it is registered."""

    priority: int = 0
    """The default backend is the usable one of highest priority (numpy: 0; checked: negative)."""

    one_memory: bool = False
    """All devices share the host's memory and arrays are NumPy's: a tensor is then one buffer cut into views."""

    threads: bool = True
    """Calls block the thread that makes them, so that devices run at once only in several threads."""

    @abc.abstractmethod
    def devices(self) -> Sequence[Device]:
        """All devices, in order of their ids; never empty."""

    @property
    @abc.abstractmethod
    def xp(self) -> Any:
        """The array-API namespace that works on this backend's arrays (on the device that is current)."""

    @abc.abstractmethod
    def is_array(self, x: object) -> bool:
        """Whether ``x`` is one of this backend's arrays (or array scalars)."""

    @abc.abstractmethod
    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """A copy of ``array``, which lives on ``source``, on ``destination``: contiguous, and nobody else's.

        The only call that crosses devices. The caller has ordered ``destination`` after what ``source`` had queued
        (`record`, `wait`), and ``destination`` is current.
        """

    @abc.abstractmethod
    def from_host(self, array: HostArray, device: Device) -> Any:
        """A copy of a host array on ``device``, which is current."""

    @abc.abstractmethod
    def to_host(self, array: Any, device: Device) -> HostArray:
        """The values of ``array``, which lives on ``device``, as a host array, once they are computed."""

    def on(self, device: Device) -> AbstractContextManager[object]:
        """Makes ``device`` current in this thread, and what was current before again at the end, also on an error."""
        return contextlib.nullcontext()

    def asarray(self, x: Any) -> Any:
        """An array of this backend from what `is_array` accepts (array scalars become 0-d arrays)."""
        return x

    def contiguous(self, array: Any) -> Any:
        """``array`` in row-major order: itself if it is, else a copy on the current device."""
        return self.xp.reshape(self.xp.reshape(array, (-1,)), array.shape)

    def is_contiguous(self, array: Any) -> bool:
        """Whether ``array`` is in row-major order, so that in another shape it is a view."""
        return bool(array.flags.c_contiguous)

    def device_of(self, array: Any) -> Device:
        """Where an array that comes from outside lives, as far as the array itself can tell."""
        return self.devices()[0]

    def record(self, device: Device) -> Any:
        """A token for everything queued on ``device`` so far. None where calls are synchronous."""
        return None

    def wait(self, device: Device, token: Any) -> None:  # noqa: B027 - calls that are synchronous are ordered
        """What is queued on ``device`` from now on runs after ``token``."""

    def synchronize(self, device: Device) -> None:  # noqa: B027 - likewise
        """Returns when ``device`` has nothing left to do."""

    def export(self, array: Any) -> Any:
        """The view of a shard that a user may hold: read-only where the library can enforce it."""
        return array

    def adopt(self, result: Any, shards: Sequence[Any]) -> tuple[Any, bool]:
        """An array that nobody outside can write, from one that a mapped function returned; and whether it is a copy.

        ``shards`` are the arrays that the function was given. The caller holds one reference to ``result``.
        """
        return self.xp.asarray(result, copy=True), True

    def sole(self, array: Any, holders: int) -> bool:
        """Whether nothing reaches the memory of ``array`` but the ``holders`` references that the caller knows of (its
        variables included, see `references`), and no two of its elements share a place. It is then made writable.
        False is always right: what is not alone is copied before it is written.
        """
        return False

    def release(self, array: Any, holders: int = 1) -> tuple[Any, bool]:
        """An array that its only holder may write, from one that was given up; and whether it is a copy."""
        if self.sole(array, holders + FRAME):
            return array, False
        return self.xp.asarray(array, copy=True), True

    def memory_info(self, device: Device) -> tuple[int, int] | None:
        """Bytes (free, total) of the memory that ``device`` allocates from; None where nobody knows."""
        return None


def current_device() -> Device | None:
    """The device that the mapped function around this call runs on, or None outside of one."""
    device: Device | None = getattr(innermost(), "device", None)
    return device


def read_only(array: HostArray) -> HostArray:
    """A view of a host array through which nobody can write."""
    view = np.asanyarray(array).view()  # one element may have become a scalar
    view.flags.writeable = False
    return view


def references(x: object) -> int:
    """How many references there are to an object that a variable of the caller's holds, that one included. Without end
    where counts mean nothing (no reference counting, no GIL).
    """
    return sys.getrefcount(x) - _ASKING


def _measure() -> tuple[int, int]:
    """What asking for a count adds to it, and what one more function that an object is handed through adds. Measured
    rather than assumed: versions of Python differ.
    """
    if not hasattr(sys, "getrefcount") or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return -sys.maxsize, 0
    probe = object()

    def through(x: object) -> int:
        return references(x)

    return references(probe) - 1, through(probe) - references(probe)


_ASKING = 0
_ASKING, FRAME = _measure()
"""`FRAME`: how many references a function's parameter adds to those that its caller has."""


class _Host(Backend):
    """Host arrays, so that a move from or to one is a move like any other."""

    name = "host"
    one_memory = True
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


# -- finding them ----------------------------------------------------------------------------------

_host = _Host()
_loaded: dict[str, Backend] = {}
_rivals: dict[str, str] = {}  # by name, the plugins that both claim it
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
        points = _entry_points()
        if name not in points:
            hint = "; run `pip install -e .` in the source tree" if not points else ""
            raise ArgumentError(f"there is no backend named {name!r}; installed are {sorted(points)}{hint}")
        if name in _rivals:
            raise BackendError(
                f"two distributions bring a backend named {name!r}: {_rivals[name]}; uninstall one of them"
            )
        try:
            backend = points[name].load()()
        except BackendError:
            raise
        except Exception as error:  # a plugin's import may fail in any way: said, with its reason, not hidden
            raise BackendError(f"backend {name!r} is installed but does not start: {error!r}") from error
        if not isinstance(backend, Backend):
            raise BackendError(f"backend {name!r}: {points[name].value} is no subclass of shardtensor.backend.Backend")
        if (said := getattr(backend, "name", None)) != name:
            raise BackendError(f"backend {name!r} calls itself {said!r}; its `name` must be the entry point's")
        _loaded[name] = backend
        return backend


@functools.cache
def default_backend() -> Backend:
    """The backend where none is named: ``SHARDTENSOR_BACKEND``, else the usable one of highest priority."""
    if name := os.environ.get("SHARDTENSOR_BACKEND"):
        try:
            return load(name)
        except ShardTensorError as error:
            raise type(error)(f"{error} (it is SHARDTENSOR_BACKEND that says so)") from None
    usable, reasons = [], []
    for name in backend_names():
        try:
            usable.append(load(name))
        except BackendError as error:  # no candidate; why, is said if nothing else is one, and by `shardtensor info`
            reasons.append(f"{name}: {error}")
    if not usable:
        raise BackendError("no backend can be used here: " + ("; ".join(reasons) or "none is installed"))
    return max(usable, key=lambda b: b.priority)


def backend_of(device: Device) -> Backend:
    """The backend that drives ``device``."""
    return _loaded.get(device.backend) or (_host if device == HOST else load(device.backend))


@functools.lru_cache(1024)
def backend_of_group(devices: tuple[Device, ...]) -> Backend:
    """The backend that drives all of these devices.

    Raises:
        BackendError: they are of several backends, or one of them is not there.
    """
    names = sorted({device.backend for device in devices})
    if len(names) > 1:
        raise BackendError(f"the devices belong to the backends {names}; a tensor lives on devices of one")
    backend = backend_of(devices[0])
    if absent := set(devices) - set(backend.devices()):
        there = len(backend.devices())
        raise BackendError(
            f"there is no device {min(absent)}; backend {backend.name!r} has {there}, from 0 to {there - 1}"
        )
    return backend


def owner_of(x: object) -> Backend | None:
    """The backend among those in use whose array ``x`` is; None for host arrays and for strangers."""
    for backend in _loaded.values():
        if not backend.one_memory and backend.is_array(x):
            return backend
    return None


def logical_device_count() -> int:
    """How many devices a backend with logical devices offers: ``SHARDTENSOR_NUM_DEVICES``, else the usable cores."""
    given = os.environ.get("SHARDTENSOR_NUM_DEVICES")
    if given is None:
        return usable_cores()
    if not given.isascii() or not given.isdigit() or int(given) < 1:
        raise BackendError(f"SHARDTENSOR_NUM_DEVICES is {given!r}; it must be a whole number of at least 1")
    return int(given)


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
