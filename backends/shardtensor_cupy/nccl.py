"""All-reduce by NCCL, if NCCL is available and every shard is on a different GPU."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from shardtensor.backend import lock
from shardtensor_cupy.logical_device import LogicalDevice

# Floats are missing: NCCL does not specify the order of summation, and sums must be reproducible.
_TYPES = {"b": "INT8", "B": "UINT8", "i": "INT32", "I": "UINT32", "l": "INT64", "L": "UINT64"}
_lock = lock()  # All GPUs must get the calls in one order, and a communicator serves one thread at a time.
_OPERATORS = {"add": "SUM", "multiply": "PROD", "maximum": "MAX", "minimum": "MIN"}


@functools.cache
def library() -> Any:
    """Returns the module cupy.cuda.nccl, or None if it is unavailable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns if the library is missing.
        try:
            nccl: Any = importlib.import_module("cupy.cuda.nccl")
        except ImportError:
            return None
    return nccl if getattr(nccl, "available", True) else None


@functools.lru_cache(16)
def _communicators(gpus: tuple[int, ...]) -> Any:
    return library().NcclCommunicator.initAll(list(gpus))


def all_reduce(cupy: Any, arrays: Sequence[Any], devices: Sequence[LogicalDevice], operator: str) -> list[Any] | None:
    """Combines integer arrays of equal shapes and dtypes by NCCL.

    Args:
        cupy: the module cupy.
        arrays: one array per logical device.
        devices: the logical devices.
        operator: ``"add"``, ``"multiply"``, ``"maximum"`` or ``"minimum"``.

    Returns:
        The combined array on each logical device. None if NCCL is not available or does not apply: the dtype is not
        supported, there are no elements, fewer than two GPUs, or several logical devices on one GPU.
    """
    gpus = tuple([logical.gpu.id for logical in devices])
    first = arrays[0]
    if len(gpus) < 2 or len(set(gpus)) < len(gpus) or first.dtype.char not in _TYPES or not first.nbytes:
        return None
    nccl = library()
    if nccl is None:
        return None
    sources, out = [], []
    # All arrays are allocated before the NCCL group starts, because a CUDA call inside it may block on another rank.
    for logical, array in zip(devices, arrays, strict=True):
        with logical.gpu, logical.stream:
            sources.append(cupy.ascontiguousarray(array))  # NCCL takes an address and a count, but no strides.
            out.append(cupy.empty(first.shape, first.dtype))
    dtype, op = [getattr(nccl, f"NCCL_{n}") for n in (_TYPES[first.dtype.char], _OPERATORS[operator])]
    with _lock:
        communicators = _communicators(gpus)
        nccl.groupStart()
        try:
            for communicator, logical, array, result in zip(communicators, devices, sources, out, strict=True):
                communicator.allReduce(array.data.ptr, result.data.ptr, array.size, dtype, op, logical.stream.ptr)
        finally:
            nccl.groupEnd()
    return out
