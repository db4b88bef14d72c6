"""Memories as DLPack identifies them, by a device type and a device number, and the devices that use each memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from shardtensor.backend.device import HOST_MEMORY, Device
from shardtensor.backend.registry import backend_names, backend_of, devices, to_get_devices
from shardtensor.communication.messages import copied
from shardtensor.communication.transfer_log import record_copy
from shardtensor.errors import ArgumentTypeError, BackendError, InterchangeError, ShardingError, type_text
from shardtensor.host.units import counted
from shardtensor.sharding.mesh import Mesh, default_mesh

Memory: TypeAlias = tuple[int, int]
"""A memory as DLPack identifies it: the device type and the device number."""

_ON_HOST = (1, 3, 11)  # DLPack's types of pageable host memory, and of host memory pinned by CUDA and by ROCm.
_CUDA, _CUDA_MANAGED = 2, 13  # Managed memory is used like the memory of the GPU.


def memory_of(x: Any, what: str) -> Memory:
    """Returns the memory of an array of any library; ``what`` names the array in errors.

    Raises:
        ArgumentTypeError: x has no DLPack methods.
        InterchangeError: x is a PyTorch tensor with a pending negation, which DLPack cannot represent.
    """
    if isinstance(x, type) or not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        raise ArgumentTypeError(
            f"from_dlpack: {what} is {type_text(x)} without __dlpack__ and __dlpack_device__; wanted an array of "
            "a library that has them, or a list of such arrays (st.asarray converts whatever NumPy does)"
        )
    if getattr(x, "is_neg", bool)():
        raise InterchangeError(
            f"from_dlpack: {what} is a tensor with a pending negation, which DLPack does not support; "
            "give x.resolve_neg()"
        )
    return as_memory(x.__dlpack_device__(), "from_dlpack", f"{what}.__dlpack_device__()")


def as_memory(pair: Any, caller: str, what: str) -> Memory:
    """Converts the result of ``__dlpack_device__`` or a ``dl_device=`` argument to a memory. Pinned host memory becomes
    host memory, and managed memory the memory of its GPU.

    Raises:
        ArgumentTypeError: ``given`` is not a pair of numbers.
    """
    try:
        kind, number = [int(n) for n in pair]
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{caller}: {what} is {pair!r:.60}; wanted a device type and a number") from None
    return HOST_MEMORY if kind in _ON_HOST else (_CUDA if kind == _CUDA_MANAGED else kind, number)


def described(memory: Memory) -> str:
    """Returns a description of a memory for error messages."""
    kinds = {1: "host memory", _CUDA: "the memory of CUDA GPU", 10: "the memory of ROCm GPU"}
    kind = kinds.get(memory[0], f"the memory of DLPack's device type {memory[0]}, number")
    return kind if memory == HOST_MEMORY else f"{kind} {memory[1]}"


def _rows() -> Iterator[Sequence[Device]]:
    """Yields the sequences of devices to search for a memory: those of the default mesh, then those of each backend,
    NumPy's first. Each backend is started only when the search reaches it; unusable ones are skipped.
    """
    yield default_mesh().flat
    for name in sorted(backend_names(), key=lambda name: name != "numpy"):
        with contextlib.suppress(BackendError):
            yield devices(name)


def _assigned(memories: Sequence[Memory], row: Sequence[Device]) -> tuple[Device, ...] | None:
    """Returns for each memory the next unassigned device of ``row`` that uses it; None if there are too few."""
    users = {m: iter([d for d in row if backend_of(d).dlpack_device(d) == m]) for m in set(memories)}
    devices = [d for d in [next(users[m], None) for m in memories] if d]
    return tuple(devices) if len(devices) == len(memories) else None


def devices_for(memories: Sequence[Memory], mesh: Mesh | None = None) -> tuple[Device, ...] | None:
    """Returns for each memory a device that uses it, all from the mesh; without a mesh, all from the default mesh or
    all of one backend. Returns None if these have too few.
    """
    return next(filter(None, (_assigned(memories, row) for row in ([mesh.flat] if mesh else _rows()))), None)


def row_for(memories: Sequence[Memory]) -> tuple[Device, ...]:
    """Returns for each memory, of one array of a list, a device that uses it.

    Raises:
        InterchangeError: no backend drives devices of all these memories.
        ShardingError: a backend does, but has too few devices.
    """
    if row := devices_for(memories):
        return row
    names = ", ".join([described(m) for m in dict.fromkeys(memories)])
    if not devices_for(list(dict.fromkeys(memories))):
        raise InterchangeError(
            f"from_dlpack: the arrays of x lie in {names}, and no usable backend drives all of that "
            "(`shardtensor info` shows which are usable); copy them to memories of one backend"
        )
    raise ShardingError(
        f"from_dlpack: x is a list of {counted(len(memories), 'array')} in {names}, and no backend has that many "
        f"devices there; join some of them first, or {to_get_devices(len(memories))}"
    )


def is_reversed(array: Any) -> bool:
    """Returns whether an array is in host memory and has a negative stride, which some libraries do not accept."""
    return isinstance(array, np.ndarray) and any(n < 0 for n in array.strides)


def recorded_copy(array: Any, device: Device, caller: str) -> Any:
    """Copies an array on its device, and records the copy."""
    array = np.array(array) if type(array) is np.ndarray else copied(array, device)
    record_copy(caller, int(array.nbytes), device)
    return array
