"""The exceptions: CuPy's, with its names and messages, and those of the simulation."""

from __future__ import annotations

from typing import Any

STATUS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    35: ("cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    401: ("cudaErrorIllegalState", "the operation cannot be performed in the present state"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    905: ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    906: (
        "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream",
    ),
    907: ("cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"),
    908: (
        "cudaErrorStreamCaptureWrongThread",
        "attempt to terminate a thread-local capture sequence from another thread",
    ),
}


class Race(Exception):
    """Two streams access the same memory, one of them writes, and the accesses are not ordered."""


class WrongDeviceError(ValueError):
    """An operand is on a device that is not current. CuPy would warn, or use peer access."""


class OutOfBounds(Exception):
    """An operation on an address and a size accesses memory outside of the bytes that were requested there.

    A GPU does not report this as long as the address belongs to the process.
    """


class CUDARuntimeError(RuntimeError):
    """Simulates ``cupy.cuda.runtime.CUDARuntimeError``."""

    def __init__(self, status: int) -> None:
        self.status = status
        name, text = STATUS.get(status, ("cudaErrorUnknown", "unknown error"))
        super().__init__(f"{name}: {text}")

    def __reduce__(self) -> Any:
        return type(self), (self.status,)


class OutOfMemoryError(MemoryError):
    """Simulates ``cupy.cuda.memory.OutOfMemoryError``."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        self._size, self._total, self._limit = size, total, limit
        so_far = f"allocated so far: {total:,} bytes"
        if limit:
            so_far += f", limit set to: {limit:,} bytes"
        super().__init__(f"Out of memory allocating {size:,} bytes ({so_far}).")

    def __reduce__(self) -> Any:
        return type(self), (self._size, self._total, self._limit)


class NcclError(RuntimeError):
    """Simulates ``cupy.cuda.nccl.NcclError``."""

    NAMES = {  # noqa: RUF012 - constant
        1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
        4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
        5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    }

    def __init__(self, status: int, why: str = "") -> None:
        self.status = status
        super().__init__(self.NAMES[status] + (f" ({why})" if why else ""))
