"""The registry of backends: loading them by entry point, the default backend, and the functions that list devices."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardtensor.backend.device import HOST, HOST_MEMORY, Device, HostArray
from shardtensor.backend.job import ProcessBackend, SpanningBackend
from shardtensor.backend.protocol import (
    MOST_DEVICES,
    Backend,
    current_device,
    device_counts,
    requested_devices,
    starting,
)
from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, BackendError, ShardTensorError, message_of, type_text
from shardtensor.hints import of_device
from shardtensor.host import fork
from shardtensor.host.units import counted

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

ENTRY_POINTS = "shardtensor.backends"


class _Host(Backend):
    """The backend of host arrays: with it, transfers from and to the host are planned like those between devices."""

    name = "host"
    on_host = True
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
_rivals: dict[str, str] = {}  # The two plugins that are registered under one name, by that name.
_meshed: set[str] = set()
_lock = fork.lock()

after_loading: list[Callable[[], None]] = []
"""What is called when a backend has been loaded, before there is an array of it."""


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # Imported late: it takes a third of this package's import time.

    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            _rivals[point.name] = f"{other.value} and {point.value}"
    return points


def backend_names() -> list[str]:
    """Returns the names of all installed backends, usable on this machine or not, in alphabetical order.

    >>> "numpy" in st.backend_names()
    True
    """
    return sorted(_entry_points())


def load(name: str) -> Backend:
    """Returns the backend of that name; it is imported and instantiated on first use.

    Raises:
        ArgumentError: no backend of that name is installed.
        BackendError: it is installed but cannot be used; the message gives the reason.
    """
    if backend := _loaded.get(name):
        return backend
    with _lock:
        if backend := _loaded.get(name):
            return backend
        token = starting.set(name)
        try:
            requested_devices()  # An invalid number raises before the plugin imports its library.
            backend = _started(name, _plugin(name))
        finally:
            starting.reset(token)
        if (own_name := getattr(backend, "name", None)) != name:
            raise BackendError(
                f"backend {name!r} has the name {own_name!r}; its `name` must be that of the entry point"
            )
        _check_devices(backend)
        if _spanning and not backend.simulated:  # The processes have not agreed on these devices: they are local.
            own = [Device(name, d.id, _process, d.kind) for d in backend.devices()]
            backend = ProcessBackend(backend, own, _process)  # type: ignore[assignment]
        _loaded[name] = backend
        for callback in after_loading:
            callback()
        return backend


def _check_devices(backend: Backend) -> None:
    """Raises BackendError if a backend has no devices, not as many as `set_num_devices` set for it, or one twice, or
    an entry that is not a device of this backend.
    """
    devices = _started(backend.name, backend.devices)
    if not isinstance(devices, Sequence):
        raise BackendError(
            f"backend {backend.name!r}: devices() returned {type_text(devices)}; wanted a list or a tuple of "
            "devices, in order of their ids"
        )
    count = len(devices)
    if not count:
        raise BackendError(f"backend {backend.name!r} has no devices; it must have one at least, or not start")
    seen: set[Device] = set()
    for k, device in enumerate(devices):
        if not isinstance(device, Device) or device.backend != backend.name:
            raise BackendError(
                f"backend {backend.name!r}: devices()[{k}] is {device!r:.60}; wanted Device({backend.name!r}, an id)"
            )
        if device in seen:
            raise BackendError(f"backend {backend.name!r}: devices() has {device} twice; wanted an id for each device")
        seen.add(device)
    wanted = device_counts.get(backend.name, count)
    if count != wanted:
        raise BackendError(
            f"backend {backend.name!r} has {counted(count, 'device')}, and cannot have {wanted}, the number that "
            "st.set_num_devices set; leave out that call"
        )


def note_mesh(names: Iterable[str]) -> None:
    """Records that there is a mesh of devices of these backends: arrays may refer to their devices from now on."""
    _meshed.update(names)


def install(backend: Backend) -> None:
    """Registers a backend that is not a plugin, unless one of that name is in use."""
    _loaded.setdefault(backend.name, backend)


def _plugin(name: str) -> type[Backend]:
    """Imports and returns the class of the backend of that name."""
    points = _entry_points()
    if name not in points:
        hint = of_device(name) if points else "; run `pip install -e .` in the source tree"
        raise ArgumentError(f"there is no backend named {name!r}; installed are {sorted(points)}{hint}")
    if name in _rivals:
        raise BackendError(f"two distributions register backend {name!r}: {_rivals[name]}; uninstall one of them")
    plugin = _started(name, points[name].load)
    if not (isinstance(plugin, type) and issubclass(plugin, Backend)):
        raise BackendError(f"backend {name!r}: {points[name].value} is not a subclass of shardtensor.backend.Backend")
    return plugin


def _started(name: str, start: Callable[[], T]) -> T:
    """Returns the result of ``start``, which imports or instantiates the backend of that name."""
    try:
        return start()
    except BackendError:
        raise
    except (Exception, SystemExit) as error:  # A plugin may fail in any way; the message keeps the reason.
        raise BackendError(f"backend {name!r} is installed but does not start: {message_of(error)}") from error


def default_hardware() -> tuple[str, Sequence[str]]:
    """Returns the name of the backend that `default_backend` will choose, and its physical devices (see
    `Backend.hardware`); nothing is instantiated.
    """
    name = os.environ.get("SHARDTENSOR_BACKEND")
    if name:
        return name, _started(name, _plugin(name).hardware)
    for rank, name in _by_priority([]):
        if rank <= 0:
            try:
                return name, _started(name, _plugin(name).hardware)
            except BackendError:  # It is not usable here; `default_backend` reports the reason.
                continue
    return "", ()


def _by_priority(reasons: list[str]) -> list[tuple[int, str]]:
    """Returns the installed backends, that of the highest priority first, with the priority's negative. The reasons why
    others cannot be imported are added to ``reasons``.
    """
    candidates = []
    for name in backend_names():
        try:
            candidates.append((-_plugin(name).priority, name))
        except BackendError as error:
            reasons.append(f"{name}: {error}")
    return sorted(candidates)


@functools.cache
def default_backend() -> Backend:
    """Returns the default backend: ``SHARDTENSOR_BACKEND`` if it is set, else the usable backend of highest priority
    among those with a priority of at least 0.

    Raises:
        ArgumentError: ``SHARDTENSOR_BACKEND`` is not an installed backend.
        BackendError: no backend can be used, or ``SHARDTENSOR_NUM_DEVICES`` is invalid.
    """
    requested_devices()  # A value that is invalid for every backend raises once, before any is imported.
    if name := os.environ.get("SHARDTENSOR_BACKEND"):
        try:
            return load(name)
        except ShardTensorError as error:
            raise type(error)(f"{error} (SHARDTENSOR_BACKEND names it)") from None
    reasons: list[str] = []
    for rank, name in _by_priority(reasons):  # Backends of lower priority are not instantiated: that may take seconds.
        if rank > 0:
            reasons.append(f"{name}: used only if SHARDTENSOR_BACKEND names it")
            continue
        try:
            return load(name)
        except BackendError as error:  # The reason is reported if no backend is usable, and by `shardtensor info`.
            reasons.append(f"{name}: {error}")
    raise BackendError("no backend can be used: " + ("; ".join(reasons) or "none is installed"))


def backend_of(device: Device) -> Backend:
    """Returns the backend that drives ``device``."""
    if device.process_index != _process and device.backend in _spanning:
        return _spanning[device.backend]
    return _loaded.get(device.backend) or (_host if device == HOST else load(device.backend))


def current_device_of_plugin() -> Device | None:
    """Returns the device on which the enclosing mapped function runs, as the plugin that drives it numbers its devices;
    None outside of mapped functions.
    """
    here = current_device()
    if here is None or not _spanning:
        return here
    backend: Any = _loaded.get(here.backend)
    return backend.own(here) if type(backend) is ProcessBackend else here


def in_job() -> bool:
    """Whether this process belongs to a job of several processes."""
    return bool(_spanning)


def is_remote(device: Device) -> bool:
    """Whether a device belongs to another process."""
    return device.process_index != _process and device.backend in _spanning


def own_devices(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Returns those of the devices that belong to this process."""
    return tuple([d for d in devices if not is_remote(d)]) if is_spanning(devices) else devices


@functools.lru_cache(8192)
def processes_of(devices: tuple[Device, ...]) -> frozenset[int]:
    """Returns the processes that have some of these devices."""
    return frozenset([d.process_index if is_remote(d) else _process for d in devices])


@functools.lru_cache(8192)
def is_spanning(devices: tuple[Device, ...]) -> bool:
    """Whether some of these devices belong to other processes."""
    return bool(_spanning) and any(map(is_remote, devices))


@functools.lru_cache(8192)
def in_other_process(devices: tuple[Device, ...]) -> bool:
    """Whether all of these devices belong to one other process. It does not know whether this one makes the same calls:
    calls on devices of one process concern only that process.
    """
    return is_spanning(devices) and len(processes_of(devices)) == 1


@functools.lru_cache(8192)
def backend_of_group(devices: tuple[Device, ...]) -> Backend:
    """Returns the backend that drives all of these devices.

    Raises:
        BackendError: the devices belong to several backends, or one of them does not exist.
    """
    names = sorted({device.backend for device in devices})
    if len(names) > 1:
        raise BackendError(f"the devices belong to the backends {names}; a tensor needs devices of one backend")
    backend = _spanning[names[0]] if is_spanning(devices) else backend_of(devices[0])
    if not backend.simulated and (absent := set(devices) - set(backend.devices())):
        count = len(backend.devices())
        raise BackendError(
            f"there is no device {min(absent)}; backend {backend.name!r} has {count}, from 0 to {count - 1}; use "
            f"other devices, or {to_get_devices(max(absent).id + 1)}"
        )
    return backend


@functools.lru_cache(8192)
def shared_memory(devices: tuple[Device, ...]) -> Hashable | None:
    """Identifies the memory that all of these devices share; None if they have several memories, or if one of them
    belongs to another process.
    """
    if is_spanning(devices):
        return None
    spaces = set(map(memory_space, devices))
    return spaces.pop() if len(spaces) == 1 else None


@functools.lru_cache(8192)
def backends_of(devices: tuple[Device, ...]) -> tuple[Sequence[Backend], bool, bool]:
    """Returns the backends of devices, whether they are all on the host, and whether the devices share a memory."""
    backends = [backend_of(device) for device in devices]
    return backends, all(backend.on_host for backend in backends), shared_memory(devices) is not None


@functools.lru_cache(8192)
def memory_space(device: Device) -> Hashable:
    """Identifies the memory of a device; that of every device on the host of this process is the same."""
    if is_remote(device):
        return _memories[device]
    backend = backend_of(device)
    if backend.simulated and device.process_index:
        return backend.name, device.process_index
    return HOST_MEMORY if backend.on_host else (backend.name, backend.memory_space(device))


def known(devices: Sequence[Device]) -> list[Device]:
    """Returns for each device the equal `Device` of a backend in use, which has the kind of this machine's device; if
    there is none, the device itself.
    """
    names = {device.backend for device in devices} & set(_loaded)
    ours = {device: device for name in names if not _loaded[name].simulated for device in _loaded[name].devices()}
    return [ours.get(device, device) for device in devices]


def array_backend(x: object) -> Backend | None:
    """Returns the backend in use to which the array ``x`` belongs; None for host arrays and for other objects."""
    for backend in _loaded.values():
        if not backend.on_host and backend.is_array(x):
            return backend
    return None


# -- the number of devices -------------------------------------------------------------------------


def set_num_devices(n: int, backend: str | None = None) -> None:
    """Sets the number of logical devices of a backend, or of all backends. It must be called before there is a mesh or
    an array of them.

    The number takes precedence over the environment variable ``SHARDTENSOR_NUM_DEVICES``. If neither is set, the
    ``numpy`` backend has one device for each usable core, and a backend for GPUs one for each GPU. Logical devices
    share the cores, or the GPUs: programs for eight devices can be run and tested on any machine.

    Args:
        n: an integer from 1 to 65,536.
        backend: the name of a backend; None sets the number of all backends that have none of their own.

    Raises:
        ArgumentError: ``n`` is not such an integer, or no backend of that name is installed.
        BackendError: a backend that the call concerns has another number of devices, and there is a mesh or an array of
            them.

    >>> st.set_num_devices(8)
    >>> st.device_count()
    8
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 1 <= n <= MOST_DEVICES:
        raise ArgumentError(f"set_num_devices: n is {n!r:.60}; wanted an integer from 1 to {MOST_DEVICES:,}")
    if backend is not None and backend not in _entry_points():
        raise ArgumentError(f"set_num_devices: there is no backend named {backend!r}; installed are {backend_names()}")
    with _lock:
        stale = []
        for name, used in _loaded.items():
            concerned = backend == name or (backend is None and name not in device_counts)
            if not concerned or used.simulated or len(used.devices()) == n:
                continue
            stale.append(name)
            if name in _meshed or _spanning:
                raise BackendError(
                    f"set_num_devices: backend {name!r} is in use already, with "
                    f"{counted(len(used.devices()), 'device')}, and its number of devices cannot change to {n}; call "
                    "st.set_num_devices at the start of the program, before the first mesh or array "
                    "(in a notebook, restart the kernel first)"
                )
        device_counts[backend] = int(n)
        for name in stale:  # Its devices have been counted, or listed, only: it starts again with others.
            del _loaded[name]
        if stale:
            _forget_devices()


def to_get_devices(count: int) -> str:
    """Returns the part of an error message that says how to get as many logical devices."""
    return (
        f"call st.set_num_devices({count}) before the first mesh or array (the devices are logical; in a notebook, "
        f"after a restart of the kernel), or set SHARDTENSOR_NUM_DEVICES={count}"
    )


# -- listing devices -------------------------------------------------------------------------------


@hinted
def devices(backend: str | None = None) -> list[Device]:
    """Returns all devices of a backend (of the default one without an argument), including those of other processes.

    Raises:
        ArgumentError: no backend of that name is installed.
        BackendError: the backend cannot be used; the message gives the reason.

    >>> len(st.devices()) == st.device_count()
    True
    """
    return list((load(backend) if backend is not None else default_backend()).devices())


@hinted
def local_devices(backend: str | None = None) -> list[Device]:
    """Returns the devices of a backend that this process owns."""
    return [d for d in devices(backend) if d.process_index == process_index()]


def device_count(backend: str | None = None) -> int:
    """Returns the number of devices of a backend, over all processes."""
    return len(devices(backend))


def local_device_count(backend: str | None = None) -> int:
    """Returns the number of devices of a backend that this process owns.

    >>> st.local_device_count() == len(st.local_devices())
    True
    """
    return len(local_devices(backend))


@hinted
def num_shards(backend: str | None = None) -> int:
    """Returns `local_device_count`, the number of items of the list that `shard` returns where no mesh is set. The name
    is that of the proposal for Nx.

    >>> len(st.shard(np.arange(3))) == st.num_shards()
    True
    """
    return local_device_count(backend)


def process_index() -> int:
    """Returns the index of this process among those that run the program; 0 before `st.distributed.initialize`."""
    return _process


# -- the devices of a job of several processes -----------------------------------------------------

_process = 0
_spanning: dict[str, Backend] = {}
"""The backends of devices of other processes, by name, in a job of several processes."""

_memories: dict[Device, Hashable] = {}
"""The identity of the memory of each device of another process."""


def in_use() -> list[str]:
    """Returns the names of the backends whose devices exist already."""
    return sorted(name for name, backend in _loaded.items() if not backend.simulated)


def memories_here(backend: Backend) -> list[int]:
    """Returns the number of the memory of each device of a backend, equal for devices that share one."""
    spaces = [backend.memory_space(device) for device in backend.devices()]
    return [spaces.index(space) for space in spaces]


def join_processes(process: int, name: str, devices: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Makes the devices of a backend in all processes known, numbered over all processes.

    Args:
        process: the number of this process.
        name: the name of the backend.
        devices: for each process, the kind of each of its devices, and the number of its memory (see `memories_here`).
    """
    global _process
    every = [(k, kind, memory) for k, row in enumerate(devices) for kind, memory in row]
    numbered = [Device(name, number, k, kind) for number, (k, kind, _) in enumerate(every)]
    _memories.update({device: (name, k, memory) for device, (k, _, memory) in zip(numbered, every, strict=True)})
    plugin = load(name)
    with _lock:
        _process = process
        _spanning[name] = SpanningBackend(plugin, numbered, process)  # type: ignore[assignment]
        _loaded[name] = ProcessBackend(plugin, numbered, process)  # type: ignore[assignment]
    _forget_devices()


def _forget_devices() -> None:
    """Clears what is known of devices: they have changed."""
    for cached in (
        default_backend, backend_of_group, backends_of, shared_memory, memory_space, is_spanning, processes_of,
        in_other_process,
    ):  # fmt: skip
        cached.cache_clear()
