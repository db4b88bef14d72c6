"""DLPack between arrays of the simulation. Other libraries cannot import them, because there is no GPU memory."""

from __future__ import annotations

from typing import Any

from . import cuda, launch, memory


class Capsule:
    """The object that an array exports by DLPack. Only `from_dlpack` of the simulation accepts it."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array: Any | None = array

    def consume(self) -> Any:
        """Returns the array, once.

        Raises:
            ValueError: it was consumed before.
        """
        array, self.array = self.array, None
        if array is None:
            raise ValueError("A DLPack tensor object cannot be consumed multiple times")
        return array


def export(array: Any, stream: Any, max_version: Any, dl_device: Any, copy: bool | None) -> Any:
    """Implements ``ndarray.__dlpack__``: the consumer's stream waits for the current one; to the host, it is a copy."""
    if dl_device is None or tuple(dl_device) == array.__dlpack_device__():
        if copy is True:
            raise BufferError("copy=True only supported for copy to CPU.")
    elif tuple(dl_device) == (1, 0):
        if copy is False:
            raise ValueError("GPU memory cannot be exported to CPU without copy.")
        return array.get().__dlpack__(**({} if max_version is None else {"max_version": max_version}))
    else:
        raise BufferError("unsupported device requested.")
    consumer = 1 if stream is None else stream
    if consumer < -1:
        raise ValueError(f"On CUDA, the valid stream for the DLPack protocol is -1, 1, 2, or larger, not {stream}")
    current = cuda.get_current_stream()
    if consumer >= 0 and (consumer or 1) != (current.ptr or 1):
        event = current.record()
        cuda._BaseStream(consumer, -1).wait_event(event)
    return Capsule(array)


def from_dlpack(array: Any, *, device: Any = None, copy: bool | None = None) -> Any:
    """Returns an array with the device and memory of another array of the simulation."""
    if not hasattr(array, "__dlpack_device__"):
        return _adopt(array)
    kind, index = array.__dlpack_device__()
    if device is not None:
        raise NotImplementedError("from_dlpack() does not support device yet.")
    if kind == 1:
        raise TypeError(
            "CPU arrays cannot be directly imported to CuPy. Use `cupy.array(numpy.from_dlpack(input))` instead."
        )
    if kind not in (2, 13):
        raise TypeError(f"Unsupported array type: {kind}")
    before = cuda.get_device()
    try:
        cuda.set_device(index)
        capsule = array.__dlpack__(stream=cuda.get_current_stream().ptr or 1, max_version=(1, 2), copy=copy)
    finally:
        cuda.set_device(before)
    return _adopt(capsule)


class DLPackMemory(memory.BaseMemory):
    """Memory that belongs to the exported array."""

    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        mem = owner.data.mem
        super().__init__(mem.ptr, mem.size, mem.device_id, mem.block)
        self.owner = owner


def _adopt(capsule: Any) -> Any:
    if not isinstance(capsule, Capsule):
        raise TypeError("the capsule is from another library; the simulation has no GPU memory to share with others")
    source = capsule.consume()
    mem = DLPackMemory(source)
    memptr = memory.MemoryPointer(mem, source.data.ptr - mem.ptr)
    return launch._array(source.shape, source.dtype, memptr, source.strides)
