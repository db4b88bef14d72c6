"""Detection of CuPy and its GPUs, with errors that explain what is missing and how to install it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import sys
from typing import Any

from shardtensor.errors import BackendError

_REASONS = {
    35: "there is no NVIDIA driver, or it is older than CuPy's CUDA; install a newer one",
    100: "the driver sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES",
}
"""The reasons for the CUDA errors cudaErrorInsufficientDriver and cudaErrorNoDevice."""

_WHEELS = "`pip install cupy-cuda12x` or `cupy-cuda13x`, by the CUDA version that nvidia-smi shows"


def usable_cupy() -> tuple[Any, int]:
    """Returns the module cupy and the number of GPUs it can use.

    Raises:
        BackendError: CuPy is not installed or cannot be imported, the CUDA driver is missing or too old, or there is no
            GPU.
    """
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        raise BackendError(f"CuPy is not installed; {_WHEELS}")
    # Importing CuPy takes longer than the rest of a program's start.
    if "cupy" not in sys.modules and not _has_driver():
        raise BackendError(f"CuPy is installed, but {_REASONS[35]}")
    try:
        cupy: Any = importlib.import_module("cupy")
        importlib.import_module("array_api_compat")
    except Exception as error:  # Wheels for another CUDA version, or two of them at once, fail in many ways.
        raise BackendError(
            f"CuPy is installed but cannot be imported: {error!r}; uninstall every cupy package, then {_WHEELS}, "
            "and array-api-compat"
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = _REASONS.get(getattr(error, "status", 0), "the CUDA runtime does not start; look at nvidia-smi")
        raise BackendError(f"CuPy {cupy.__version__} is installed, but {reason} ({error})") from None
    if not count:
        raise BackendError(
            f"CuPy {cupy.__version__} is installed, but there is no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return cupy, count


_DRIVERS = ("libcuda.so.1", "nvcuda.dll", "libamdhip64.so")
"""The libraries of which CuPy needs one: those of NVIDIA's driver on Linux and Windows, and that of ROCm."""


def _has_driver() -> bool:
    """Whether the library of a driver can be loaded."""
    for name in _DRIVERS:
        with contextlib.suppress(OSError):  # It is missing, or belongs to another platform.
            ctypes.CDLL(name)
            return True
    return False
