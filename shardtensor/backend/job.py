"""The backends of a job of several processes: their devices are numbered over all processes.

A plugin knows the devices of its own process only, numbered from 0 on. `ProcessBackend` stands for it in a job: it
translates the devices. `SpanningBackend` drives devices of several processes: the arrays of other processes are
`RemoteArray` objects, and no memory is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend, current_device
from shardtensor.backend.remote import ELSEWHERE, RemoteArray, RemoteNamespace, local


class ProcessBackend:
    """A backend in a job of several processes, for arrays of devices of this process.

    Everything that is not defined here is the plugin's own.

    Args:
        plugin: the backend of this process.
        devices: the devices of all processes.
        process: the number of this process.
    """

    def __init__(self, plugin: Backend, devices: Sequence[Device], process: int) -> None:
        own = [d for d in devices if d.process_index == process]
        self._plugin = plugin
        self._devices = tuple(devices)
        self._inner = dict(zip(own, plugin.devices(), strict=True))
        self._outer = {there: here for here, there in self._inner.items()}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._plugin, name)
        self.__dict__[name] = attribute
        return attribute

    def own(self, device: Device) -> Device:
        """Returns the plugin's device that is a device of the job."""
        return self._inner[device]

    def devices(self) -> Sequence[Device]:
        """See `Backend`: the devices of all processes."""
        return self._devices

    def adjacent_devices(self, count: int) -> Sequence[Device]:
        """See `Backend`: the devices of the first processes, in each of which neighbours have the fastest links."""
        own = len(self._inner)
        near = [list(self._plugin.devices()).index(d) for d in self._plugin.adjacent_devices(min(count, own))]
        if count <= own:
            return [self._devices[k] for k in near]
        return [self._devices[begin + k] for begin in range(0, len(self._devices), own) for k in near][:count]

    def is_on(self, device: Device) -> bool:
        """See `Backend`."""
        return self._plugin.is_on(self.own(device))

    def on(self, device: Device) -> Any:
        """See `Backend`."""
        return self._plugin.on(self._inner[device])

    def launcher(self, devices: Sequence[Device]) -> Any:
        """See `Backend`."""
        return self._plugin.launcher([self._inner[d] for d in devices])

    def memory_space(self, device: Device) -> Any:
        """See `Backend`."""
        return self._plugin.memory_space(self._inner[device])

    def memory_info(self, device: Device) -> Any:
        """See `Backend`."""
        return self._plugin.memory_info(self._inner[device]) if device in self._inner else None

    def record(self, device: Device) -> Any:
        """See `Backend`."""
        return self._plugin.record(self._inner[device]) if device in self._inner else None

    def wait(self, device: Device, token: Any) -> None:
        """See `Backend`."""
        if device in self._inner:
            self._plugin.wait(self._inner[device], token)

    def synchronize(self, device: Device) -> None:
        """See `Backend`."""
        if device in self._inner:
            self._plugin.synchronize(self._inner[device])

    def wait_for_caller(self, device: Device) -> None:
        """See `Backend`."""
        if device in self._inner:
            self._plugin.wait_for_caller(self._inner[device])

    def make_caller_wait(self, device: Device) -> None:
        """See `Backend`."""
        if device in self._inner:
            self._plugin.make_caller_wait(self._inner[device])

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """See `Backend`."""
        return self._plugin.to_device(array, self._inner[source], self._inner[destination])

    def collect(self, arrays: Sequence[Any], sources: Sequence[Device], destination: Device) -> Any:
        """See `Backend`."""
        return self._plugin.collect(arrays, [self._inner[d] for d in sources], self._inner[destination])

    def spread(self, array: Any, source: Device, destinations: Sequence[Device]) -> list[Any]:
        """See `Backend`."""
        return self._plugin.spread(array, self._inner[source], [self._inner[d] for d in destinations])

    def place(self, arrays: Sequence[Any], sources: Sequence[Device], outs: Sequence[Any], destination: Device) -> None:
        """See `Backend`."""
        self._plugin.place(arrays, [self._inner[d] for d in sources], outs, self._inner[destination])

    def fill_where(self, out: Any, mask: Any, value: Any) -> None:
        """See `Backend`; another process writes to its arrays itself."""
        if not isinstance(out, RemoteArray):
            self._plugin.fill_where(out, mask, value)

    def from_host(self, array: Any, device: Device) -> Any:
        """See `Backend`."""
        return self._plugin.from_host(array, self._inner[device])

    def to_host(self, array: Any, device: Device) -> Any:
        """See `Backend`."""
        return self._plugin.to_host(array, self._inner[device])

    def device_of(self, array: Any) -> Device:
        """See `Backend`."""
        device, here = self._plugin.device_of(array), current_device()
        if here in self._inner and self._plugin.memory_space(self._inner[here]) == self._plugin.memory_space(device):
            return here
        return self._outer[device]

    def offload(self, array: Any, device: Device) -> tuple[Any, Any]:
        """See `Backend`."""
        return self._plugin.offload(array, self._inner[device])

    def onload(self, host: Any, device: Device, after: Any) -> tuple[Any, Any]:
        """See `Backend`."""
        return self._plugin.onload(host, self._inner[device], after)

    def dlpack_device(self, device: Device) -> Any:
        """See `Backend`."""
        return self._plugin.dlpack_device(self._inner[device])

    def from_dlpack(self, x: Any, device: Device) -> Any:
        """See `Backend`."""
        return self._plugin.from_dlpack(x, self._inner[device])

    def all_reduce(self, arrays: Sequence[Any], devices: Sequence[Device], operator: str) -> list[Any] | None:
        """See `Backend`."""
        return self._plugin.all_reduce(arrays, [self._inner[d] for d in devices], operator)


def _ended() -> None:
    """A lease that has ended."""


class SpanningBackend(ProcessBackend):
    """A backend in a job of several processes, for arrays of devices of several processes."""

    on_host = False
    pinned_host = False

    def __init__(self, plugin: Backend, devices: Sequence[Device], process: int) -> None:
        super().__init__(plugin, devices, process)
        self.xp = RemoteNamespace(plugin.xp)
        self.kernel_language = "c" if plugin.on_host else plugin.kernel_language

    def on(self, device: Device) -> Any:
        """See `Backend`."""
        return local(self._plugin.on(self._inner[device])) if device in self._inner else ELSEWHERE

    def from_host(self, array: Any, device: Device) -> Any:
        """See `Backend`."""
        if device not in self._inner:
            return RemoteArray(array.shape, array.dtype)
        return super().from_host(array, device)

    def dtype_of(self, array: Any) -> Any:
        """See `Backend`."""
        return array.dtype if type(array) is RemoteArray else self._plugin.dtype_of(array)

    def view(self, array: Any, index: Any) -> Any:
        """See `Backend`."""
        return array[index] if type(array) is RemoteArray else self._plugin.view(array, index)

    def contiguous(self, array: Any) -> Any:
        """See `Backend`."""
        return array if type(array) is RemoteArray else self._plugin.contiguous(array)

    def is_contiguous(self, array: Any) -> bool:
        """See `Backend`."""
        return type(array) is RemoteArray or self._plugin.is_contiguous(array)

    def export(self, array: Any) -> Any:
        """See `Backend`."""
        return array if type(array) is RemoteArray else self._plugin.export(array)

    def lend(self, array: Any) -> Any:
        """See `Backend`."""
        return (array, _ended) if type(array) is RemoteArray else self._plugin.lend(array)

    def is_exclusive(self, held: list[Any], others: int = 0) -> bool:
        """See `Backend`."""
        return type(held[0]) is RemoteArray or self._plugin.is_exclusive(held, others)

    def memory_of(self, array: Any) -> Any:
        """See `Backend`."""
        return id(array) if type(array) is RemoteArray else self._plugin.memory_of(array)

    def begin_write(self, array: Any) -> bool:
        """See `Backend`."""
        return type(array) is RemoteArray or self._plugin.begin_write(array)

    def is_array(self, x: object) -> bool:
        """See `Backend`."""
        return type(x) is RemoteArray or self._plugin.is_array(x)

    def fuse(self, function: Any) -> Any:
        """See `Backend`: no kernel takes arrays of other processes."""
        return function

    def all_reduce(self, arrays: Sequence[Any], devices: Sequence[Device], operator: str) -> None:
        """See `Backend`: there is no library that reduces arrays of several processes."""
