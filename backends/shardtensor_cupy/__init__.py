"""The ``cupy`` backend: CUDA GPUs driven by CuPy. Logical devices on one GPU share its memory and its stream.

The modules of this package drive devices: streams, copies, CUDA graphs, NCCL. The functions that run on the devices are
those of `shardtensor_cupy.kernels`, which know CuPy only.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtensor.backend import (
    Backend,
    Device,
    HostArray,
    current_device,
    is_small_float,
    logical_device_count,
    own_hardware,
    references,
)
from shardtensor.errors import BackendError
from shardtensor_cupy.copies import Copier
from shardtensor_cupy.discovery import usable_cupy
from shardtensor_cupy.graphs import Graphs
from shardtensor_cupy.kernels.bfloat16_products import Products
from shardtensor_cupy.kernels.cupy_namespace import Namespace
from shardtensor_cupy.kernels.elementwise_kernel import ElementwiseKernel
from shardtensor_cupy.logical_device import Current, Launcher, LogicalDevice
from shardtensor_cupy.nccl import all_reduce

if TYPE_CHECKING:  # That engine imports this module.
    from shardtensor_cupy.nccl_engine import Arrivals

__all__ = ["CuPyBackend"]

_DTYPES = frozenset("?bBhHiIlLqQefdFD")
"""The character codes of the supported NumPy dtypes."""


_KERNEL_OPTIONS = ("--fmad=false",)
"""A product and a sum are rounded one after the other, as by CuPy's kernels for single functions."""


class CuPyBackend(Backend):
    """One device per GPU, or as many logical devices as `st.set_num_devices` sets, assigned to the GPUs in blocks.

    Execution is asynchronous: calls return before the GPU has finished, and each GPU executes them in order on one
    stream of the library. The logical devices of a GPU therefore share arrays without events: a tensor on them is one
    array, and an operator that does not depend on the split is one launch. The environment variable
    ``SHARDTENSOR_CUPY_P2P`` controls direct copies between GPUs: with ``auto`` (the default) they are used between
    peers, with ``off`` never. ``SHARDTENSOR_CUPY_GRAPHS`` controls CUDA graphs likewise.
    """

    name = "cupy"
    priority = 10
    pinned_host = True
    shares_blocks = True
    kernel_language = "cuda"
    helper_delay = 10e-3  # A call that takes longer than a launch is waiting for its GPU.

    def __init__(self) -> None:
        self.arrivals: Arrivals | None = None  # What other processes send by NCCL, if they do.
        self._cupy, visible = usable_cupy()
        self._xp = Namespace(self._cupy)
        self._copier = Copier(self._cupy)
        self._graphs = Graphs(self._cupy)
        self.captures = self._graphs.is_on
        self._products = Products(self._cupy, visible)
        self.multiplies_bfloat16 = self._products.are_fast
        memory = self._cupy.cuda.memory
        self._lent: Any = type("LentMemory", (memory.UnownedMemory,), {})
        self._array: Any = self._cupy.ndarray
        self._pointer, self._gpu = self._cupy.cuda.MemoryPointer, self._cupy.cuda.runtime.getDevice
        self._own = (memory.Memory, memory.PooledMemory)  # Memory imported by DLPack has another type.
        gpus = own_hardware(visible)
        count = logical_device_count(len(gpus))
        gpu_of = [gpus[i if count < len(gpus) else i * len(gpus) // count] for i in range(count)]
        models = {gpu: self._model(gpu) for gpu in gpus}
        self._devices = tuple([Device(self.name, i, kind=models[gpu]) for i, gpu in enumerate(gpu_of)])
        wait = self._copier.flights.wait
        first = self._on_gpu = dict[int, LogicalDevice]()  # the first device of each GPU
        self._logical_devices: dict[Device, LogicalDevice] = {}
        for device, gpu in zip(self._devices, gpu_of, strict=True):
            logical = LogicalDevice(self._cupy, device, gpu, visible, wait, first.get(gpu))
            self._logical_devices[device] = logical
            first.setdefault(gpu, logical)

    @classmethod
    def hardware(cls) -> Sequence[str]:
        """Returns the host and the bus of each visible GPU, and its UUID, which differs for the parts of one GPU."""
        cupy, visible = usable_cupy()
        runtime, names = cupy.cuda.runtime, []
        for gpu in range(visible):
            uuid = bytes(runtime.getDeviceProperties(gpu).get("uuid", b"")).hex()
            names.append(f"{socket.gethostname()}/{runtime.deviceGetPCIBusId(gpu)}/{uuid}")
        return names

    def _model(self, gpu: int) -> str:
        name = self._cupy.cuda.runtime.getDeviceProperties(gpu)["name"]
        return name.decode() if isinstance(name, bytes) else str(name)

    def devices(self) -> Sequence[Device]:
        """All logical devices, in order of their ids."""
        return self._devices

    @property
    def xp(self) -> Any:
        """The array-API namespace: CuPy's functions with NumPy's semantics."""
        return self._xp

    def is_array(self, x: object) -> bool:
        """Whether ``x`` is a CuPy array."""
        return isinstance(x, self._array)

    # -- devices -----------------------------------------------------------------------------------

    def on(self, device: Device) -> AbstractContextManager[object]:
        """Returns a context manager in which the device's GPU and stream are current."""
        self._copier.flights.prune()
        return Current(self._logical_devices[device])

    def is_on(self, device: Device) -> bool:
        """Whether the device's stream is that of the current GPU; no two GPUs have the same."""
        return self._logical_devices[device].is_current()  # safeguard: a program begins on its GPU

    def launcher(self, devices: Sequence[Device]) -> Launcher:
        """Returns what calls the library's own functions on devices; see `Launcher`."""
        return Launcher(self._cupy, [self._logical_devices[d] for d in devices], self._copier.flights.prune)

    def allocates(self, name: str) -> bool:
        """Whether it is a ufunc of CuPy's own: they return new arrays."""
        return isinstance(getattr(self._cupy, name, None), self._cupy.ufunc)

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as one kernel; see `Namespace.fuse`."""
        return self._xp.fuse(function)

    def adds_everywhere(self, shape: Sequence[int], axes: Sequence[int], dtype: np.dtype[Any]) -> bool:
        """Whether `Reductions` adds such arrays."""
        return self._xp.adds_everywhere(shape, axes, dtype)

    def capture_modes(self) -> None:
        """Returns None: CuPy has no modes to restore.

        Raises:
            BackendError: the mapped function has made another stream current. CuPy keeps one stack of streams per
                thread, so programs that are interleaved in a thread would pop each other's streams.
        """
        device = current_device()
        if device is not None and not self._logical_devices[device].is_current():
            raise BackendError(
                f"a collective on {device} while the program has made another stream current; leave its `with` block "
                "first, and make the device's stream wait for it"
            )

    def adjacent_devices(self, count: int) -> Sequence[Device]:
        """Returns ``count`` devices, ordered greedily so that neighbours share a GPU or are peers where possible."""
        left = list(self._devices)
        row = [left.pop(0)]
        while left and len(row) < count:
            here = self._logical_devices[row[-1]].gpu.id
            near = [d for d in left if self._copier.peers.near(here, self._logical_devices[d].gpu.id)]
            row.append(near[0] if near else left[0])
            left.remove(row[-1])
        return row[:count]

    def memory_space(self, device: Device) -> int:
        """Returns the number of the GPU."""
        return int(self._logical_devices[device].gpu.id)

    def memory_info(self, device: Device) -> tuple[int, int]:
        """Returns the bytes (free, total) of the device's GPU; unused blocks in CuPy's memory pool count as free."""
        return self._logical_devices[device].memory()

    # -- order -------------------------------------------------------------------------------------

    def record(self, device: Device) -> Any:
        """Records and returns an event on the stream of the device's GPU."""
        return self._logical_devices[device].record()

    def wait(self, device: Device, token: Any) -> None:
        """Makes the device's stream wait for the event ``token``."""
        self._logical_devices[device].stream.wait_event(token)  # safeguard: a copy waits for its source

    def synchronize(self, device: Device) -> None:
        """Blocks until the device's streams are idle; raises a `BackendError` if queued work has failed."""
        logical = self._logical_devices[device]
        if self.arrivals:
            self.arrivals.wait()
        try:
            logical.stream.synchronize()
            logical.copies.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            logical.fail(error)

    def wait_for_caller(self, device: Device) -> None:
        """Makes the device's stream wait for the caller's current stream."""
        logical = self._logical_devices[device]
        theirs = logical.callers_stream()
        if theirs is not None:
            logical.stream.wait_event(logical.record(theirs))  # safeguard: imported arrays are awaited

    def make_caller_wait(self, device: Device) -> None:
        """Makes the caller's current stream wait for the device's stream."""
        logical = self._logical_devices[device]
        theirs = logical.callers_stream()
        if theirs is not None:
            theirs.wait_event(logical.record())  # safeguard: exported arrays are awaited

    # -- arrays ------------------------------------------------------------------------------------

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """Copies an array to another device, directly between peers and otherwise through page-locked host memory."""
        return self._copier.d2d(array, self._logical_devices[source], self._logical_devices[destination])

    def collect(self, arrays: Sequence[Any], sources: Sequence[Device], destination: Device) -> Any:
        """Copies arrays of several devices to rows of one, each by one copy."""
        places = self._logical_devices
        return self._copier.collect(arrays, [places[d] for d in sources], places[destination])

    def spread(self, array: Any, source: Device, destinations: Sequence[Device]) -> list[Any]:
        """Copies an array to several devices, each of which waits for the same event."""
        here = self._logical_devices[source]
        others = [self._logical_devices[d] for d in destinations]
        event = here.record()

        def copy(there: LogicalDevice) -> Any:
            there.stream.wait_event(event)  # safeguard: broadcast arrays are awaited
            return self._copier.d2d(array, here, there)

        return self.launcher(destinations)([copy] * len(others), [(there,) for there in others])

    def place(self, arrays: Sequence[Any], sources: Sequence[Device], outs: Sequence[Any], destination: Device) -> None:
        """Copies arrays of other devices into views of arrays of one, directly where these are in row-major order."""
        places = self._logical_devices
        self._copier.place(arrays, [places[d] for d in sources], outs, places[destination])

    def from_host(self, array: HostArray, device: Device) -> Any:
        """Copies a host array to the device. The host array has been read when this returns."""
        host = np.ascontiguousarray(array).reshape(np.shape(array))
        pinned = self._cupy.cuda.pinned_memory.is_memory_pinned(host.ctypes.data) if host.size else False
        return self._cupy.array(host, blocking=bool(pinned))  # CuPy copies pageable memory to a buffer first.

    def to_host(self, array: Any, device: Device) -> HostArray:
        """Copies an array to the host in row-major order, after the work queued on the device's stream."""
        if self.arrivals:
            self.arrivals.wait()
        # Without `out`, CuPy may return the GPU's own memory (CUPY_ENABLE_UMP=1).
        host: HostArray = np.empty(array.shape, array.dtype)
        array.get(stream=self._logical_devices[device].stream, out=host)
        if self.arrivals:
            self.arrivals.check()
        return host

    def has_dtype(self, dtype: np.dtype[Any]) -> bool:
        """Whether ``dtype`` is bool, integer, floating-point or complex, of up to double precision, or bfloat16.

        CuPy stores float8 kinds, but has no kernel that takes them, not even a cast.
        """
        return dtype.name == "bfloat16" if is_small_float(dtype) else dtype.char in _DTYPES

    def fill_where(self, out: Any, mask: Any, value: Any) -> None:
        """Writes a scalar by one kernel. CuPy's assignment to a mask waits for the number of elements."""
        self._cupy.copyto(out, value, casting="unsafe", where=mask)

    def contiguous(self, array: Any) -> Any:
        """Returns the array itself if it is in row-major order, else a copy that is."""
        if array.flags.c_contiguous:  # safeguard: sent arrays are contiguous
            return array
        return self._xp.in_rows(array)

    def store(self, out: Any, index: Any, array: Any) -> None:
        """Writes an array to elements of another one; between large arrays by a kernel of `Casts`."""
        self._xp.store(out, index, array)

    def device_of(self, array: Any) -> Device:
        """Returns the device that holds an array.

        On a GPU with several logical devices that is the current device of the mapped function if it is on that GPU,
        otherwise the first.

        Raises:
            BackendError: no device is on the array's GPU.
        """
        gpu, here = array.data.device_id, current_device()
        if here is not None and here in self._logical_devices and self._logical_devices[here].gpu.id == gpu:
            return here
        for device, logical in self._logical_devices.items():
            if logical.gpu.id == gpu:
                return device
        raise BackendError(f"an array is on GPU {gpu}, which no device of the backend uses")

    def export(self, array: Any) -> Any:
        """Returns a view of the array. It is writable: CuPy has no read-only arrays."""
        return array.view()

    def lend(self, array: Any) -> tuple[Any, Callable[[], object] | None]:
        """Returns a view of the array in memory that is lent: it exists as long as any array or pointer that refers to
        it.
        """
        if not array.size:  # There is no memory that could be written.
            exported = array.view()
            return exported, weakref.ref(exported)
        data = array.data
        memory = data.mem
        if type(memory) is self._lent:
            memory = memory.source
        begin = memory.ptr
        lent = self._lent(begin, memory.size, array, data.device_id)
        lent.source = memory
        pointer = self._pointer(lent, data.ptr - begin)
        return self._array(array.shape, array.dtype, pointer, array.strides), weakref.ref(lent)

    def owns(self, array: Any) -> bool:
        """Whether the array is not a view, and its memory is CuPy's and not lent."""
        return array.base is None and isinstance(array.data.mem, self._own)

    def adopt(self, held: list[Any], shards: Sequence[Any]) -> tuple[Any, bool]:
        """Returns the array itself if it is exclusive or shares its memory with one of ``shards`` (which are not
        written), otherwise a copy; and whether it was copied.

        Raises:
            BackendError: the array is on another GPU than the mapped function.
        """
        exclusive = self.is_exclusive(held)
        result = held[0]
        if result.data.device_id != (here := self._gpu()):
            raise BackendError(
                f"a mapped function on GPU {here} returned an array of GPU {result.data.device_id}; "
                "move it with cupy.asarray inside of the function"
            )
        logical = self._on_gpu[here]
        # safeguard: memory of a stream that is left is copied
        if (left := logical.left()) is not None and current_device() is not None:
            # CuPy's pool returns the block to the other stream, which would reuse it without waiting for ours.
            return self._copier.from_stream(result, left, logical), True
        if exclusive:
            return result, False
        memory = self.memory_of(result)
        if memory is not None and any(memory == self.memory_of(shard) for shard in shards):
            return result, False
        return result.copy(order="K"), True

    def is_exclusive(self, held: list[Any], others: int = 0) -> bool:
        """Whether only the list and the ``others`` refer to the array, and the array, or for a view its base, which
        only the view refers to, is the only one that refers to the memory.
        """
        if not isinstance(held[0].data.mem, self._own):
            return False
        view = held[0].base is not None
        if not view and references([held[0].data.mem]) <= 2 and references([held[0].data]) <= 2:
            return references(held) <= 1 + others
        # Copies to other devices that have not read the array yet hold references to it, too.
        if not self.begin_write(held[0]):
            return False
        if references(held) > 1 + others or (view and references([held[0].base]) > 2):
            return False
        shared = view and held[0].base.data is held[0].data
        if references([held[0].data]) > 2 + shared:
            return False
        return references([held[0].data.mem]) <= (3 if view and not shared else 2)

    def memory_of(self, array: Any) -> int | None:
        """Identifies the memory of an array; None if another library allocated it."""
        memory = array.data.mem
        if type(memory) is self._lent:
            memory = memory.source
        return id(memory) if isinstance(memory, self._own) else None

    def is_whole(self, view: Any, array: Any) -> bool:
        """Whether a view has all elements of an array, in the same order."""
        return (view.shape, view.strides, view.dtype) == (array.shape, array.strides, array.dtype)

    def begin_write(self, array: Any) -> bool:
        """Makes the device's stream wait for other streams that still read the memory; False if the array is not
        contiguous.
        """
        if not array.flags.forc:
            return False
        self._copier.flights.settle(array.data.mem)  # safeguard: a writer lets go of readers
        return True

    def product_of_bfloat16(self, x1: Any, x2: Any, dtype: np.dtype[Any]) -> Any:
        """Returns a matrix product; see `Products`."""
        return self._products(x1, x2, dtype)

    # -- kernels of jit ----------------------------------------------------------------------------

    def elementwise_kernel(self, inputs: str, outputs: str, operation: str, name: str, preamble: str) -> Any:
        """Returns an `ElementwiseKernel`, which compiles at its first call for each combination of layouts."""
        return ElementwiseKernel(self._cupy, inputs, outputs, operation, name, preamble, _KERNEL_OPTIONS)

    def raw_kernel(self, text: str, name: str) -> Callable[[int, tuple[int, int, int], Sequence[Any]], None]:
        """Returns a function that launches a `RawKernel`, which compiles at its first call on each GPU."""
        kernel = self._cupy.RawKernel(text, name, options=_KERNEL_OPTIONS)

        def launch(blocks: int, threads: tuple[int, int, int], args: Sequence[Any]) -> None:
            kernel((blocks,), threads, tuple(args))

        return launch

    def arrays_in(self, block: Any, parts: Sequence[tuple[int, tuple[int, ...], np.dtype[Any]]]) -> list[Any]:
        """Returns arrays in the memory of another one."""
        return [self._cupy.ndarray(shape, dtype, block.data + begin) for begin, shape, dtype in parts]

    def address_of(self, array: Any) -> tuple[int, tuple[int, ...]]:
        """Returns the address and the strides of an array."""
        return array.data.ptr, array.strides

    def capture(self, launch: Callable[[], None]) -> Callable[[], None] | None:
        """Returns the launches of a function as a CUDA graph; see `Graphs`."""
        return self._graphs.capture(launch)

    # -- other memories and libraries --------------------------------------------------------------

    def offload(self, array: Any, device: Device) -> tuple[Any, Any]:
        """Returns a copy in page-locked host memory, made on the device's copy stream, and a completion token."""
        return self._copier.d2h(array, self._logical_devices[device])

    def pin(self, host: HostArray) -> Any:
        """Returns a copy of a host array in page-locked memory."""
        return self._copier.pinned(host)

    def onload(self, host: Any, device: Device, after: Any) -> tuple[Any, Any]:
        """Copies offloaded data back to the device on its copy stream; returns the array and a completion event."""
        return self._copier.h2d(host, self._logical_devices[device], after)

    def settle(self, token: Any) -> None:
        """Blocks until an `offload` is complete; raises a `BackendError` if it has failed."""
        event, logical = token
        if self.arrivals:
            self.arrivals.wait()
        try:
            event.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            logical.fail(error)
        if self.arrivals:
            self.arrivals.check()

    def dlpack_device(self, device: Device) -> tuple[int, int]:
        """Returns the DLPack device: type 2 (CUDA) and the number of the GPU."""
        return (2, self._logical_devices[device].gpu.id)

    def from_dlpack(self, x: Any, device: Device) -> Any:
        """Returns an array that shares the memory of ``x``; the device's stream is ordered after the producer's."""
        return self._cupy.from_dlpack(x)

    def all_reduce(self, arrays: Sequence[Any], devices: Sequence[Device], operator: str) -> list[Any] | None:
        """Combines integer arrays by NCCL if every device has a different GPU; returns None if NCCL is unusable."""
        return all_reduce(self._cupy, arrays, [self._logical_devices[d] for d in devices], operator)
