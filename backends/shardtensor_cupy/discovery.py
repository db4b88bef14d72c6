"""Detection of CuPy and its GPUs, with errors that explain what is missing and how to install it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from shardtensor.errors import BackendError

_OLD_DRIVER, _NO_DEVICE = 35, 100  # cudaErrorInsufficientDriver, cudaErrorNoDevice
_WHEELS = "`pip install cupy-cuda12x` or `cupy-cuda13x`, by the CUDA version that nvidia-smi shows"


def usable_cupy() -> tuple[Any, int]:
    """Returns the module cupy and the number of GPUs it can use.

    Raises:
        BackendError: CuPy is not installed or cannot be imported, the CUDA driver is missing or too old, or there is no
            GPU.
    """
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        raise BackendError(f"CuPy is not installed; {_WHEELS}")
    try:
        cupy: Any = importlib.import_module("cupy")
        importlib.import_module("array_api_compat")
    except Exception as error:  # a wheel for another CUDA version, two of them at once, a library that is not there
        raise BackendError(
            f"CuPy is installed and does not import: {error!r}; uninstall every cupy package, then {_WHEELS}, "
            "and array-api-compat"
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        status = getattr(error, "status", None)
        if status == _OLD_DRIVER:
            said = "there is no NVIDIA driver, or it is older than CuPy's CUDA; install a newer one"
        elif status == _NO_DEVICE:
            said = "the driver sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        else:
            said = "the CUDA runtime does not start; look at nvidia-smi"
        raise BackendError(f"CuPy {cupy.__version__} is installed, and {said} ({error})") from None
    if not count:
        raise BackendError(
            f"CuPy {cupy.__version__} is installed, and there is no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return cupy, count
