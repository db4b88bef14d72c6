"""A logical device (a GPU and its two streams), and the context manager that makes it current."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from shardtensor.backend import Device
from shardtensor.errors import BackendError, DeviceMemoryError


class LogicalDevice:
    """A GPU and two streams on it. Both are blocking streams, so that they are ordered with code on the null stream.

    The logical devices of one GPU have the same streams. With a stream for each of them, every access to an array of
    another one would need events, also those that CuPy's memory pool makes: it gives a block that one stream has
    released to the stream that allocated it, which would not wait for the first.

    Args:
        cupy: the module.
        device: the `Device` that it implements.
        gpu: the number of the GPU.
        gpus: the number of GPUs of the machine.
        wait: blocks until the copies in flight are complete.
        beside: another logical device of the GPU, if there is one.

    Attributes:
        device: the `Device` that it implements.
        gpu: the GPU; several logical devices may share one.
        has_others: whether the machine has other GPUs, so that ``gpu`` must be made current explicitly.
        stream: the stream of all computations and of copies from other logical devices.
        copies: the stream of copies to and from host memory, which overlap with ``stream``.
        order: the event of ``stream`` after which others continue.
        spare: the events of ``stream`` that no copy in flight uses.
    """

    __slots__ = (
        "_cupy", "_current_stream", "_wait_for_copies", "copies", "device", "gpu", "has_others", "order", "spare",
        "stream",
    )  # fmt: skip

    def __init__(
        self,
        cupy: Any,
        device: Device,
        gpu: int,
        gpus: int,
        wait: Callable[[], None],
        beside: LogicalDevice | None = None,
    ) -> None:
        self._cupy = cupy
        self._wait_for_copies = wait
        self._current_stream = cupy.cuda.get_current_stream
        self.device = device
        self.has_others = gpus > 1
        self.gpu = cupy.cuda.Device(gpu)
        with self.gpu:
            self.stream: Any = beside.stream if beside else cupy.cuda.Stream()  # safeguard: streams are blocking
            self.copies: Any = beside.copies if beside else cupy.cuda.Stream()
            self.order: Any = beside.order if beside else cupy.cuda.Event(disable_timing=True)
        self.spare: list[Any] = beside.spare if beside else []

    def record(self, stream: Any = None) -> Any:
        """Records an event on ``stream`` (default: the device's stream) and returns it.

        That of the device's stream is one event, recorded again each time. A stream that is told later to wait for it
        waits for more. One that waits already does not: CUDA reads the event when the wait is queued.
        """
        if stream is None:
            self.order.record(self.stream)
            return self.order
        with self.gpu:  # An event belongs to the GPU that is current when it is created.
            return stream.record(self._cupy.cuda.Event(disable_timing=True))

    def landing(self) -> Any:
        """Records an event on the device's stream for `InFlight`, which returns it to ``spare`` when it is complete."""
        try:
            event = self.spare.pop()
        except IndexError:
            with self.gpu:
                event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def callers_stream(self) -> Any:
        """Returns the caller's current stream on this GPU, or None if no explicit ordering is needed.

        CUDA itself orders the null stream with the device's stream, and the device's stream with itself.
        """
        stream = self._current_stream(self.gpu.id)
        return None if stream.ptr in (*_LEGACY, self.stream.ptr) else stream

    def is_current(self) -> bool:
        """Whether the device's stream is current."""
        return self._current_stream() is self.stream

    def left(self) -> Any:
        """Returns the stream that user code has left current instead of the device's, or None."""
        stream = self._current_stream()
        return None if stream is self.stream or stream.ptr in _LEGACY else stream

    def memory(self) -> tuple[int, int]:
        """Returns the bytes that can still be allocated (unused blocks of CuPy's pool included) and the GPU's total."""
        with self.gpu:
            free, total = self._cupy.cuda.runtime.memGetInfo()
            return free + self._cupy.get_default_memory_pool().free_bytes(), total

    def explain(self, error: BaseException) -> None:
        """Re-raises an error of CuPy with the name of the device; returns if ``error`` is any other error.

        Raises:
            DeviceMemoryError: the GPU is out of memory. The memory held for copies in flight has been released.
            BackendError: any other CUDA error.
        """
        if isinstance(error, self._cupy.cuda.memory.OutOfMemoryError):
            self._wait_for_copies()
            free, total = self.memory()
            raise DeviceMemoryError(
                f"no memory is left on {self.device} ({self.device.kind}): {error} {_mib(free)} of {_mib(total)} are "
                "free. Existing tensors stay valid, and memory that was kept for copies has been released: try again, "
                "delete tensors, use more devices, or offload tensors to memory kind 'pinned_host'"
            ) from error
        if isinstance(error, self._cupy.cuda.runtime.CUDARuntimeError):
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Raises a `BackendError` that names the device. The error may come from an earlier, asynchronous call."""
        raise BackendError(
            f"an operation on {self.device} ({self.device.kind}) failed, in this call or an earlier one: {error}"
        ) from error


class Launcher:
    """Calls functions of the library on logical devices, while the GPU and the stream of each one are current.

    Only what was current before the first call is restored, once for each run of devices with the same stream, because
    these functions make nothing else current. Code of users runs in `Current`.

    Args:
        cupy: the module.
        devices: the device of each call.
        prepare: is called before each launch.
    """

    __slots__ = ("_current_stream", "_devices", "_gpu", "_prepare", "_set_gpu")

    def __init__(self, cupy: Any, devices: Sequence[LogicalDevice], prepare: Callable[[], None]) -> None:
        self._devices = devices
        self._prepare = prepare
        self._gpu, self._set_gpu = cupy.cuda.runtime.getDevice, cupy.cuda.runtime.setDevice
        self._current_stream = cupy.cuda.get_current_stream

    def __call__(self, functions: Iterable[Callable[..., Any]], rows: Iterable[Sequence[Any]]) -> list[Any]:
        """Calls each function with a row of arguments, and returns the results."""
        self._prepare()
        results = []
        before = here = self._gpu()
        used: Any = None
        saved: Any = None
        logical: LogicalDevice | None = None
        try:
            for logical, function, row in zip(self._devices, functions, rows, strict=True):
                stream = logical.stream
                if stream is not used:
                    if saved is not used:
                        saved.use()
                    gpu = logical.gpu.id
                    if gpu != here:
                        self._set_gpu(gpu)  # safeguard: a launch is on its GPU
                        here = gpu
                    used, saved = stream, self._current_stream(gpu)
                    if saved is not stream:
                        stream.use()  # safeguard: a launch is on its stream
                results.append(function(*row))
        except BaseException as error:
            if logical is not None:
                logical.explain(error)
            raise
        finally:
            if saved is not used:
                saved.use()  # safeguard: a launch restores the stream
            if here != before:
                self._set_gpu(before)  # safeguard: a launch restores the GPU
        return results


_LEGACY = (0, 1)
"""The handles of the legacy default stream, which CUDA orders with all blocking streams."""


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


class Current:
    """A context manager in which a logical device's GPU and stream are current; it restores the previous ones.

    The stream is pushed on CuPy's stack, so that leaving a nested ``with stream`` block returns to it. The stream that
    was current before is also restored by ``use()``, because CuPy tracks the two kinds of current stream separately.
    """

    __slots__ = ("_logical", "_saved")

    def __init__(self, logical: LogicalDevice) -> None:
        self._logical = logical

    def __enter__(self) -> None:
        logical = self._logical
        if logical.has_others:
            logical.gpu.__enter__()  # safeguard: the GPU is current
        self._saved = logical._current_stream()
        if self._saved is not logical.stream:
            logical.stream.__enter__()  # safeguard: the stream is current

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        logical, saved = self._logical, self._saved  # safeguard: everything is restored after errors
        try:
            if logical.has_others:
                # safeguard: a GPU that is left is left
                logical.gpu.use()  # The block may have made another GPU current.
            stream = logical.stream
            left = None if logical._current_stream() is stream else logical.left()
            if left is not None:
                # safeguard: a stream that is left is awaited
                stream.wait_event(logical.record(left))  # The block's work there belongs to the device.
            if saved is not stream:
                stream.__exit__()
            saved.use()  # safeguard: the stream of the caller is restored
        finally:
            if logical.has_others:
                logical.gpu.__exit__()  # safeguard: the GPU is restored
        if error is not None:
            logical.explain(error)
