"""CUDA GPUs by CuPy: one array and one stream for each logical device, of which several may share a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from shardtensor.backend import FRAME, Backend, Device, HostArray, current_device, logical_device_count, references
from shardtensor.errors import BackendError
from shardtensor_cupy.copies import Copier
from shardtensor_cupy.discovery import usable_cupy
from shardtensor_cupy.logical_device import Current, LogicalDevice
from shardtensor_cupy.namespace import Namespace
from shardtensor_cupy.nccl import all_reduce

__all__ = ["CuPyBackend"]

_DTYPES = frozenset("?bBhHiIlLqQefdFD")  # NumPy's letters


class CuPyBackend(Backend):
    """Every GPU as a device, or ``SHARDTENSOR_NUM_DEVICES`` logical ones dealt over the GPUs in blocks.

    Calls return before the GPU has run them; each device runs them in order on its own stream. ``SHARDTENSOR_CUPY_P2P``
    (``auto``, ``off``) says whether GPUs may read one another where they can.
    """

    name = "cupy"
    priority = 10
    pinned_host = True
    helper_delay = 10e-3  # launching is quick; what takes this long waits for its GPU

    def __init__(self) -> None:
        self._cupy, gpus = usable_cupy()
        self._xp = Namespace(self._cupy)
        self._copier = Copier(self._cupy)
        memory = self._cupy.cuda.memory
        self._own = (memory.Memory, memory.PooledMemory)  # and not what came by DLPack, which others hold, too
        count = logical_device_count(gpus)
        home = [i if count < gpus else i * gpus // count for i in range(count)]
        models = [self._model(gpu) for gpu in range(gpus)]
        self._devices = tuple([Device(self.name, i, kind=models[gpu]) for i, gpu in enumerate(home)])
        relieve = self._copier.flights.wait
        self._logical_devices = {
            d: LogicalDevice(self._cupy, d, gpu, gpus, relieve) for d, gpu in zip(self._devices, home, strict=True)
        }

    def _model(self, gpu: int) -> str:
        name = self._cupy.cuda.runtime.getDeviceProperties(gpu)["name"]
        return name.decode() if isinstance(name, bytes) else str(name)

    def devices(self) -> Sequence[Device]:
        """All logical devices."""
        return self._devices

    @property
    def xp(self) -> Any:
        """CuPy's functions, with NumPy's semantics."""
        return self._xp

    def is_array(self, x: object) -> bool:
        """Whether ``x`` is a CuPy array."""
        return isinstance(x, self._cupy.ndarray)

    # -- devices -----------------------------------------------------------------------------------

    def on(self, device: Device) -> AbstractContextManager[object]:
        """Makes the device's GPU and stream current."""
        self._copier.flights.prune()
        return Current(self._logical_devices[device])

    def capture_modes(self) -> None:
        """There are none.

        Raises:
            BackendError: a stream of the program's own is current. CuPy keeps a stack of streams for each thread, which
                programs that take turns would pull from under one another.
        """
        device = current_device()
        if device is not None and not self._logical_devices[device].is_current():
            raise BackendError(
                f"a collective on {device}, where a stream of the program's own is current; leave its `with` block "
                "first, and let the device's stream wait for it"
            )

    def adjacent_devices(self, count: int) -> Sequence[Device]:
        """Devices such that neighbours share a GPU or are peers, as far as that goes."""
        left = list(self._devices)
        row = [left.pop(0)]
        while left and len(row) < count:
            here = self._logical_devices[row[-1]].gpu.id
            near = [d for d in left if self._copier.peers.near(here, self._logical_devices[d].gpu.id)]
            row.append(near[0] if near else left[0])
            left.remove(row[-1])
        return row[:count]

    def memory_info(self, device: Device) -> tuple[int, int]:
        """Bytes (free, total) of its GPU; what CuPy's pool keeps for others counts as free."""
        return self._logical_devices[device].memory()

    # -- order -------------------------------------------------------------------------------------

    def record(self, device: Device) -> Any:
        """An event on the device's stream."""
        return self._logical_devices[device].record()

    def wait(self, device: Device, token: Any) -> None:
        """The device's stream waits for the event."""
        self._logical_devices[device].stream.wait_event(token)

    def synchronize(self, device: Device) -> None:
        """Waits for the device's streams; what has failed on them says so now."""
        logical = self._logical_devices[device]
        try:
            logical.stream.synchronize()
            logical.copies.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            logical.fail(error)

    def wait_for_caller(self, device: Device) -> None:
        """The device's stream waits for the caller's current one."""
        logical = self._logical_devices[device]
        theirs = logical.callers_stream()
        if theirs is not None:
            logical.stream.wait_event(logical.record(theirs))

    def make_caller_wait(self, device: Device) -> None:
        """The caller's current stream waits for the device's."""
        logical = self._logical_devices[device]
        theirs = logical.callers_stream()
        if theirs is not None:
            theirs.wait_event(logical.record())

    # -- arrays ------------------------------------------------------------------------------------

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """A copy on another device's stream: straight where GPUs are peers, else through page-locked host memory."""
        return self._copier.across(array, self._logical_devices[source], self._logical_devices[destination])

    def from_host(self, array: HostArray, device: Device) -> Any:
        """A copy on the device. The host array is read before this returns."""
        host = np.ascontiguousarray(array).reshape(np.shape(array))
        pinned = self._cupy.cuda.pinned_memory.is_memory_pinned(host.ctypes.data) if host.size else False
        return self._cupy.array(host, blocking=bool(pinned))  # other memory goes by a buffer of CuPy's

    def to_host(self, array: Any, device: Device) -> HostArray:
        """A host array, once the device has computed it."""
        host: HostArray = array.get(stream=self._logical_devices[device].stream, order="C")
        return host

    def has_dtype(self, dtype: np.dtype[Any]) -> bool:
        """Bools, integers, floats and complex numbers of up to double precision; no times."""
        return dtype.char in _DTYPES

    def contiguous(self, array: Any) -> Any:
        """The array itself, or a copy in row-major order."""
        return array if array.flags.c_contiguous else array.copy(order="C")

    def device_of(self, array: Any) -> Device:
        """The device on the array's GPU on which the mapped function around this call runs, else the first."""
        gpu, here = array.data.device_id, current_device()
        if here is not None and here in self._logical_devices and self._logical_devices[here].gpu.id == gpu:
            return here
        for device, logical in self._logical_devices.items():
            if logical.gpu.id == gpu:
                return device
        raise BackendError(
            f"an array lies on GPU {gpu}, which is none of the {len(self._logical_devices)} devices here"
        )

    def export(self, array: Any) -> Any:
        """Another view of it: CuPy has no read-only arrays."""
        return array.view()

    def adopt(self, result: Any, shards: Sequence[Any]) -> tuple[Any, bool]:
        """``result`` itself where nobody else holds its memory or where it is a shard's, which nobody writes; else a
        copy.
        """
        here = self._cupy.cuda.runtime.getDevice()
        if result.data.device_id != here:
            raise BackendError(
                f"a mapped function on GPU {here} returned an array of GPU {result.data.device_id}; "
                "move it with cupy.asarray inside of the function"
            )
        device = current_device()
        if device is not None and (left := self._logical_devices[device].left()) is not None:
            # Its memory is that stream's, which does not ask ours when it gives it to the next.
            return self._copier.over(result, left, self._logical_devices[device]), True
        memory = result.data.mem
        if any(memory is shard.data.mem for shard in shards):
            return result, False
        del memory
        return (result, False) if self._alone(result, 1 + FRAME) else (result.copy(order="K"), True)

    def is_exclusive(self, array: Any, holders: int) -> bool:
        """Whether nobody else holds its memory. Other streams that still read it are waited for."""
        if not array.flags.forc:
            return False
        self._copier.flights.settle(array.data.mem)
        return self._alone(array, holders + FRAME)

    def _alone(self, array: Any, holders: int) -> bool:
        """Whether references to an array are the ``holders`` and no more, and none but its own to its memory; of an
        array that it is a view of, there must be none but the view's.
        """
        base, pointer = array.base, array.data
        if references(array) > holders + FRAME or (base is not None and references(base) > 2):
            return False
        shared = base is not None and base.data is pointer
        memory = pointer.mem
        if not isinstance(memory, self._own) or references(pointer) > 2 + shared:
            return False
        return references(memory) <= (2 if base is None or shared else 3)

    # -- other memories and libraries --------------------------------------------------------------

    def offload(self, array: Any, device: Device) -> tuple[Any, Any]:
        """A page-locked copy, made on a stream of its own."""
        return self._copier.off(array, self._logical_devices[device])

    def pin(self, host: HostArray) -> Any:
        """A page-locked copy."""
        return self._copier.pinned(host)

    def onload(self, host: Any, device: Device, after: Any) -> tuple[Any, Any]:
        """The way back, on the same stream."""
        return self._copier.on(host, self._logical_devices[device], after)

    def settle(self, token: Any) -> None:
        """Waits for the event; what has failed before it says so now."""
        event, logical = token
        try:
            event.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            logical.fail(error)

    def dlpack_device(self, device: Device) -> tuple[int, int]:
        """CUDA memory of the device's GPU."""
        return (2, self._logical_devices[device].gpu.id)

    def from_dlpack(self, x: Any, device: Device) -> Any:
        """An array of the same memory; the producer's work comes before the device's."""
        return self._cupy.from_dlpack(x)

    def all_reduce(self, arrays: Sequence[Any], devices: Sequence[Device], operator: str) -> list[Any] | None:
        """By NCCL, where every device has a GPU of its own."""
        return all_reduce(self._cupy, arrays, [self._logical_devices[d] for d in devices], operator)
