"""Lanes: what a logical device is made of, and the ``with`` block in which it is current."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shardtensor.backend import Device
from shardtensor.errors import BackendError, DeviceMemoryError


class LogicalDevice:
    """A logical device: a GPU and two streams on it, both blocking ones, so that code on the null stream stays right.

    Attributes:
        device: whose lane it is.
        gpu: the GPU; several lanes may share one.
        among_others: whether there are other GPUs, so that one must be chosen.
        stream: where everything runs that computes, and copies from other lanes.
        copies: where copies to and from host memory run beside it.
    """

    __slots__ = ("_cupy", "_current_stream", "_relieve", "among_others", "copies", "device", "gpu", "stream")

    def __init__(self, cupy: Any, device: Device, gpu: int, gpus: int, relieve: Callable[[], None]) -> None:
        self._cupy = cupy
        self._relieve = relieve
        self._current_stream = cupy.cuda.get_current_stream
        self.device = device
        self.among_others = gpus > 1
        self.gpu = cupy.cuda.Device(gpu)
        with self.gpu:
            self.stream = cupy.cuda.Stream()
            self.copies = cupy.cuda.Stream()

    def record(self, stream: Any = None) -> Any:
        """An event for everything queued so far."""
        with self.gpu:  # events belong to the device that is current when they are made
            return (stream or self.stream).record(self._cupy.cuda.Event(disable_timing=True))

    def callers_stream(self) -> Any:
        """The caller's current stream on this GPU; None where CUDA orders it by itself: the null stream, and ours."""
        stream = self._current_stream(self.gpu.id)
        return None if stream.ptr in (_NULL, _LEGACY, self.stream.ptr) else stream

    def is_current(self) -> bool:
        """Whether the stream is the one that is current."""
        return self._current_stream() is self.stream

    def left(self) -> Any:
        """The stream that is current where ours should be, because code of the user's has left it so; else None."""
        stream = self._current_stream()
        return None if stream is self.stream or stream.ptr in (_NULL, _LEGACY) else stream

    def memory(self) -> tuple[int, int]:
        """Bytes that can still be allocated, those in CuPy's pool included, and bytes of the GPU."""
        with self.gpu:
            free, total = self._cupy.cuda.runtime.memGetInfo()
            return free + self._cupy.get_default_memory_pool().free_bytes(), total

    def explain(self, error: BaseException) -> None:
        """Raises what CuPy says of the device, with its name; returns for all other errors."""
        if isinstance(error, self._cupy.cuda.memory.OutOfMemoryError):
            self._relieve()
            free, total = self.memory()
            raise DeviceMemoryError(
                f"no memory is left on {self.device} ({self.device.kind}): {error} {_mib(free)} of {_mib(total)} are "
                "free. Tensors are as they were, and what was kept for copies is let go of: try once more, delete "
                "some, take more devices, or put what waits into memory kind 'pinned_host'"
            ) from error
        if isinstance(error, self._cupy.cuda.runtime.CUDARuntimeError):
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Raises a CUDA error with the device's name. Kernels run later than they are called: so do their errors."""
        raise BackendError(
            f"work on {self.device} ({self.device.kind}) failed, in this call or in one before it: {error}"
        ) from error


_NULL, _LEGACY = 0, 1  # both stand for the legacy default stream, which waits for blocking streams and they for it


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


class Current:
    """A ``with`` block in which a lane's GPU and stream are current; what was so before is so again after it.

    The stream is pushed, so that the user's own ``with stream`` inside of it comes back to ours, and what ``use()`` had
    set before it is set again: CuPy keeps the two apart.
    """

    __slots__ = ("_logical", "_saved")

    def __init__(self, logical: LogicalDevice) -> None:
        self._logical = logical

    def __enter__(self) -> None:
        logical = self._logical
        if logical.among_others:
            logical.gpu.__enter__()
        self._saved = logical._current_stream()
        if self._saved is not logical.stream:
            logical.stream.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        logical, saved = self._logical, self._saved
        try:
            if logical.among_others:
                logical.gpu.use()  # the block may have left another one
            left = logical.left()
            if left is not None:
                logical.stream.wait_event(logical.record(left))  # what it has queued there is ours, too
            if saved is not logical.stream:
                logical.stream.__exit__()
            saved.use()
        finally:
            if logical.among_others:
                logical.gpu.__exit__()
        if error is not None:
            logical.explain(error)
