"""The ``torch`` backend: PyTorch tensors on logical devices, of which several may share the host or a GPU."""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.backend import (
    Backend,
    Device,
    HostArray,
    current_device,
    is_small_float,
    logical_device_count,
    read_only,
    references,
)
from shardtensor.errors import BackendError, DeviceMemoryError
from shardtensor_torch.modules import replicate

__all__ = ["TorchBackend", "replicate"]


class TorchBackend(Backend):
    """Logical devices (see `st.set_num_devices`), on the GPUs if PyTorch can use any, otherwise on the host.

    On GPUs, each device has its own stream, the devices are assigned to the GPUs in contiguous blocks, and the default
    is one device per GPU.

    Supported dtypes are bool, uint8, int8 to int64, float16 to float64, complex64 and complex128. Tensors are stored
    detached, so automatic differentiation is confined to the inside of a mapped function.
    """

    name = "torch"
    priority = -2
    negative_strides = False

    def __init__(self) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._dtypes: Any = importlib.import_module("shardtensor_torch.elementwise")
            namespace = importlib.import_module("shardtensor_torch.namespace")
            self._gradients: Any = importlib.import_module("shardtensor_torch.gradients")
        except ModuleNotFoundError as error:
            name = {"torch": "torch", "array_api_compat": "array-api-compat"}.get(str(error.name).partition(".")[0])
            if name is None:
                raise BackendError(f"torch does not start: {error}") from error
            raise BackendError(f"{name} is not installed; pip install 'shardtensor[torch]'") from None
        except Exception as error:  # A broken installation can raise any exception.
            raise BackendError(f"torch does not start: {error!r}") from error
        cuda = self._torch.cuda
        gpus = cuda.device_count() if cuda.is_available() else 0
        count = logical_device_count(gpus or None)
        self._kind = "cuda" if gpus else "cpu"
        self.kernel_language = None if gpus else "c"
        kinds = [cuda.get_device_name(i) for i in range(gpus)] or ["cpu"]
        self._gpus = [i if count < gpus else i * gpus // count for i in range(count)] if gpus else []
        self._devices = tuple(Device(self.name, i, kind=kinds[gpu]) for i, gpu in enumerate(self._gpus or [0] * count))
        self._streams = [cuda.Stream(device=gpu) for gpu in self._gpus]
        if gpus:
            self.helper_delay = 10e-3  # Calls are asynchronous but launch many kernels.
            self.pinned_host = True
        self._gradients.install()
        self.records = self._torch.Tensor
        self._xp = namespace.Namespace(self._kind)
        self._uses = getattr(self._torch._C, "_storage_Use_Count", None)
        self._weak = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
        self._own_uses = self._storage_uses(self._torch.empty(1))
        self._exclusive_counts = self._counts([self._torch.empty(1)])

    def devices(self) -> Sequence[Device]:
        """All logical devices, in order of their ids."""
        return self._devices

    @property
    def xp(self) -> Any:
        """The array-API namespace: PyTorch's functions with NumPy's semantics."""
        return self._xp

    # -- devices and their order -------------------------------------------------------------------

    def on(self, device: Device) -> _On:
        """Returns a context manager in which the device's GPU and stream are current."""
        return _On(self._torch, device, self._streams[device.id] if self._streams else None)

    def capture_modes(self) -> Callable[[], None]:
        """Returns a function that restores the current modes: of gradients, of saved tensors, and of autocast.

        Raises:
            BackendError: another stream, `torch.inference_mode` or a `torch.func` transformation is active. None of
                them can be suspended and resumed. (A collective of a transformed function leaves the transformation.)
        """
        torch, device = self._torch, current_device()
        if device is not None and self._streams:
            ours = self._streams[device.id]
            if torch.cuda.current_stream(self._gpus[device.id]) != ours:
                raise BackendError(f"a collective on {device} while another stream is current; leave its `with` block")
        if torch.is_inference_mode_enabled():
            raise BackendError(
                "a collective inside torch.inference_mode(), which would affect other devices; use no_grad()"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise BackendError(
                "a collective inside torch.func.grad or torch.func.vmap, which do not support it; apply it to results"
            )
        return self._gradients.modes()  # type: ignore[no-any-return]

    def memory_info(self, device: Device) -> tuple[int, int] | None:
        """Returns the bytes (free, total) of the device's GPU, or None on the host."""
        return tuple(self._torch.cuda.mem_get_info(self._gpus[device.id])) if self._gpus else None

    def record(self, device: Device) -> Any:
        """Records and returns an event on the device's stream; None on the host, where execution is synchronous."""
        return self._streams[device.id].record_event() if self._streams else None

    def wait(self, device: Device, token: Any) -> None:
        """Makes the device's stream wait for the event ``token``."""
        if token is not None:
            self._streams[device.id].wait_event(token)

    def synchronize(self, device: Device) -> None:
        """Blocks until the device's stream is idle."""
        if self._streams:
            with self.on(device):  # Errors are re-raised with the name of the device.
                self._streams[device.id].synchronize()

    def wait_for_caller(self, device: Device) -> None:
        """Makes the device's stream wait for the caller's current stream."""
        if self._streams:
            self._streams[device.id].wait_stream(self._torch.cuda.current_stream(self._gpus[device.id]))

    def make_caller_wait(self, device: Device) -> None:
        """Makes the caller's current stream wait for the device's stream."""
        if self._streams:
            self._torch.cuda.current_stream(self._gpus[device.id]).wait_stream(self._streams[device.id])

    # -- arrays ------------------------------------------------------------------------------------

    def is_array(self, x: object) -> bool:
        """Whether ``x`` is a dense tensor in the memory of this backend's devices."""
        torch = self._torch
        return isinstance(x, torch.Tensor) and x.device.type == self._kind and x.layout is torch.strided

    def asarray(self, x: Any) -> Any:
        """Returns the tensor as a detached plain tensor without pending conjugation or negation."""
        if type(x) is not self._torch.Tensor or x.requires_grad:
            x = x.detach().as_subclass(self._torch.Tensor)
        return self._dtypes.resolved(x)

    def contribution(self, x: Any) -> Any:
        """Returns what `asarray` does.

        Raises:
            BackendError: the gradient of ``x`` is recorded, in a call that is not (see `record_call`).
        """
        if x.requires_grad and self._torch.is_grad_enabled():
            raise BackendError("x requires a gradient, which would be lost; give x.detach(), which has none")
        return self.asarray(x)

    # -- gradients ---------------------------------------------------------------------------------

    def is_recorded(self, leaves: Sequence[Any]) -> bool:
        """Whether PyTorch records a gradient of one of the leaves, or one has a tangent.

        In a `torch.func` transformation the answer is always True: only recorded calls leave it.
        """
        return self._gradients.is_recorded(leaves)  # type: ignore[no-any-return]

    def record_call(
        self,
        function: Callable[..., Sequence[Any]],
        transpose: Callable[..., Mapping[int, Any]],
        leaves: Sequence[Any],
        *,
        number: int,
        saves: bool,
    ) -> Sequence[Any]:
        """See `Backend`."""
        return self._gradients.record_call(function, transpose, leaves, number, saves)  # type: ignore[no-any-return]

    def vjp(self, function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, Callable[..., Sequence[Any]]]:
        """See `Backend`."""
        return self._gradients.vjp(function, arrays)  # type: ignore[no-any-return]

    def dtype_of(self, array: Any) -> np.dtype[Any]:
        """The NumPy dtype that corresponds to the tensor's."""
        return self._dtypes.dtype_of(array)  # type: ignore[no-any-return]

    def has_dtype(self, dtype: np.dtype[Any]) -> bool:
        """Whether the backend supports ``dtype``, a NumPy dtype."""
        if is_small_float(dtype):
            self._dtypes.add_small_floats()
        return dtype in self._dtypes.TORCH

    def view(self, array: Any, index: Any) -> Any:
        """Returns the elements at a basic index: a view, or a copy if a slice has a negative step."""
        entries = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(e, slice) and e.step is not None and e.step < 0 for e in entries):
            return array[index]
        return self._flipped(array, entries)

    def _flipped(self, array: Any, entries: tuple[Any, ...]) -> Any:
        """Indexes with negative steps, which PyTorch does not support: slices forward, then flips the result."""
        rest = sum(e is not None and e is not Ellipsis for e in entries)
        forward: list[Any] = []
        flipped: list[int] = []
        at = dimension = 0  # The current dimension of the array and of the result.
        for e in entries:
            if e is Ellipsis:
                skipped = array.ndim - rest
                at, dimension = at + skipped, dimension + skipped
            elif e is None:
                dimension += 1
            else:
                if isinstance(e, slice):
                    selected = range(*e.indices(array.shape[at]))
                    if selected.step < 0:
                        flipped += [dimension] * (len(selected) > 1)
                        e = slice(selected[-1], selected[0] + 1, -selected.step) if selected else slice(0, 0)
                    dimension += 1
                at += 1
            forward.append(e)
        taken = array[tuple(forward)]
        return self._dtypes.flip(taken, flipped) if flipped else taken

    def fill_where(self, out: Any, mask: Any, value: Any) -> None:
        """Writes a scalar to the elements of ``out`` where a mask of its shape is true."""
        self._dtypes.fill_where(out, mask, value)

    def contiguous(self, array: Any) -> Any:
        """Returns the tensor in row-major order without pending conjugation or negation; a copy if necessary."""
        return self._dtypes.resolved(array).contiguous()

    def is_contiguous(self, array: Any) -> bool:
        """Whether the tensor is in row-major order."""
        return bool(array.is_contiguous())

    def device_of(self, array: Any) -> Device:
        """Returns the device that holds a tensor.

        Where several logical devices share the tensor's GPU (or the host), that is the current device of the mapped
        function if it is one of them, otherwise the first.

        Raises:
            BackendError: no logical device is on the tensor's GPU.
        """
        here = current_device()
        if here is not None and here in self._devices and (not self._gpus or self._gpus[here.id] == array.device.index):
            return here
        if not self._gpus:
            return self._devices[0]
        if array.device.index not in self._gpus:
            raise BackendError(
                f"a tensor is on {array.device}, which no device of the backend uses; move it, or set a larger "
                "number by st.set_num_devices"
            )
        return self._devices[self._gpus.index(array.device.index)]

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """Copies a tensor to another device, on the destination's stream.

        The source's stream then waits for the copy, because it may overwrite the tensor next.
        """
        torch = self._torch
        array = self._dtypes.resolved(array)
        if not self._gpus:
            return array.clone(memory_format=torch.contiguous_format)
        copy = torch.empty(tuple(array.shape), dtype=array.dtype, device=f"cuda:{self._gpus[destination.id]}")
        copy.copy_(array, non_blocking=True)
        array.record_stream(
            self._streams[destination.id]
        )  # Another stream of the program may have allocated the memory.
        self.wait(source, self.record(destination))
        return copy

    def from_host(self, array: HostArray, device: Device) -> Any:
        """Returns a copy of a host array on the current device."""
        return self._xp.asarray(array)

    def to_host(self, array: Any, device: Device) -> HostArray:
        """Returns a read-only host array: a view of the same memory on the host, a copy from a GPU."""
        # DLPack is used because after `numpy()` PyTorch considers the memory shared with NumPy even when no NumPy array
        # is left.
        held = self._dtypes.resolved(array.detach()).cpu()
        known = self._dtypes.dtype_of(held)
        if is_small_float(known):  # NumPy's DLPack has no such dtypes.
            return read_only(np.from_dlpack(held.view(self._dtypes.to_torch(f"i{known.itemsize}"))).view(known))
        return read_only(np.from_dlpack(held))

    def export(self, array: Any) -> Any:
        """Returns a detached tensor that shares the memory, which stays allocated while the caller's stream uses it.

        The tensor is writable: PyTorch has no read-only tensors.
        """
        if self._gpus:
            array.record_stream(self._torch.cuda.current_stream(array.device))
        return array.detach()

    def lend(self, array: Any) -> tuple[Any, Callable[[], object] | None]:
        """Returns what `export` does. The lease ends when only ``array`` and the tensor of which it is a view use the
        storage, or nothing does.

        The use counts of the storage are asked, since nothing else knows all of its users: ``detach`` makes a tensor
        that has no reference to the one it was made of, so that a weak reference to the exported tensor ends too early.
        A storage of its own for each export, by DLPack, would take a hundred times as long to make, could not have
        pending conjugation, and would not be resizable, as memory is that only this library and its users hold.
        """
        # A view may end before the tensor does, and the other way round.
        lenders = [weakref.ref(x) for x in (array, array._base) if x is not None]
        storage = self._weak(array.untyped_storage())

        def lease() -> object:
            mine = [x for lender in lenders if (x := lender()) is not None]
            ended = self._storage_uses(mine[0]) == self._uses_by(len(mine)) if mine else storage.expired()
            return None if ended else self

        return self.export(array), lease if self._own_uses is not None else None

    def host_view(self, array: Any) -> HostArray:
        """Returns a writable NumPy array that has the memory of a tensor on the host.

        It is made from the address: after `torch.Tensor.numpy`, PyTorch for ever considers the memory shared.
        """
        return np.asarray(_HostView(self._dtypes.resolved(array), self._dtypes.dtype_of(array)))

    # -- ownership ---------------------------------------------------------------------------------

    def _storage_uses(self, array: Any) -> tuple[int, int] | None:
        """Returns the reference counts of a tensor's storage, and of the storage's Python object.

        None if this version of PyTorch does not expose the first, or the interpreter has no counts.
        """
        memory = [array.untyped_storage()]
        objects = references(memory)
        return None if self._uses is None or objects == sys.maxsize else (self._uses(memory[0]._cdata), objects)

    def _uses_by(self, tensors: int) -> tuple[int, int] | None:
        """Returns what `_storage_uses` does where so many tensors, and nothing else, use a storage."""
        return None if self._own_uses is None else (self._own_uses[0] + tensors - 1, self._own_uses[1])

    def _counts(self, held: list[Any]) -> tuple[tuple[int, int], int] | None:
        """Returns the reference counts of a tensor's storage and of the tensor itself; None if they are not exposed."""
        uses, storage_uses = getattr(held[0], "_use_count", None), self._storage_uses(held[0])
        return None if storage_uses is None or uses is None else (storage_uses, uses())

    def adopt(self, held: list[Any], shards: Sequence[Any]) -> tuple[Any, bool]:
        """Returns the tensor itself if it is exclusive or a view of a shard, else a copy; and whether it copied."""
        storage = held[0].untyped_storage()._cdata
        if any(s.untyped_storage()._cdata == storage for s in shards) or self.is_exclusive(held):
            return held[0], False
        return self._xp.asarray(held[0], copy=True), True

    def is_exclusive(self, held: list[Any], others: int = 0) -> bool:
        """Whether only the list and the ``others`` refer to the tensor and its memory.

        Other variables, views, tensors saved for a gradient and other libraries (NumPy, DLPack, shared memory) count.
        False if PyTorch does not expose its reference counts.
        """
        if self._exclusive_counts is None or references(held) > 1 + others or not self.begin_write(held[0]):
            return False
        return self._counts(held) == self._exclusive_counts

    def memory_of(self, array: Any) -> int | None:
        """Identifies the storage of a tensor; None if another library or process shares it."""
        memory = array.untyped_storage()
        foreign = not memory.resizable() or (self._kind == "cpu" and memory.is_shared())
        return None if foreign else memory._cdata

    def is_whole(self, view: Any, array: Any) -> bool:
        """Whether a view has all elements of a tensor, in the same order."""
        forms = [(x.shape, x.stride(), x.dtype, x.data_ptr()) for x in (view, array)]
        return forms[0] == forms[1]

    def begin_write(self, array: Any) -> bool:
        """Whether a tensor can be written in place: its memory is PyTorch's, and no two elements share an address."""
        return self.memory_of(array) is not None and not array.is_inference() and _is_dense(array)

    # -- other libraries ---------------------------------------------------------------------------

    def to_dlpack(self, array: Any) -> Any:
        """Returns the detached tensor without pending conjugation or negation."""
        return self._dtypes.resolved(array.detach())

    def dlpack_device(self, device: Device) -> tuple[int, int]:
        """Returns the DLPack device: type 2 (CUDA) and the number of the GPU, or (1, 0) for the host."""
        return (2, self._gpus[device.id]) if self._gpus else (1, 0)

    def from_dlpack(self, x: Any, device: Device) -> Any:
        """Returns a tensor that shares the memory of ``x``."""
        return self._torch.from_dlpack(x)


class _HostView:
    """The memory of a tensor by NumPy's array interface, which keeps the tensor as long as an array refers to it."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": dtype.str,
            "data": (tensor.data_ptr(), False),
            "strides": tuple([step * dtype.itemsize for step in tensor.stride()]),
        }


def _is_dense(array: Any) -> bool:
    """Whether the tensor is contiguous in some order of its dimensions, so that no elements alias."""
    order = sorted(range(array.ndim), key=array.stride, reverse=True)
    return bool(array.is_contiguous() or array.permute(order).is_contiguous())


class _On:
    """A context manager in which a device's GPU and stream are current.

    Raises:
        DeviceMemoryError: PyTorch ran out of memory in the block.
        BackendError: a CUDA error was raised in the block.
    """

    __slots__ = ("_device", "_stream", "_torch")

    def __init__(self, torch: Any, device: Device, stream: Any) -> None:
        self._torch = torch
        self._device = device
        self._stream = None if stream is None else torch.cuda.stream(stream)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, trace)
        if not isinstance(error, RuntimeError):
            return
        if isinstance(error, self._torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise DeviceMemoryError(f"{self._device} ({self._device.kind}): {error}") from error
        # PyTorch versions without `torch.AcceleratorError` raise a RuntimeError that only its message identifies.
        if isinstance(error, getattr(self._torch, "AcceleratorError", ())) or str(error).startswith("CUDA error"):
            raise BackendError(f"{self._device} ({self._device.kind}): {error}") from error
