"""Memories as DLPack names them, by the type of device and its number; and which devices use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from shardtensor.backend.device import HOST_MEMORY, Device
from shardtensor.backend.registry import backend_names, backend_of, devices
from shardtensor.errors import ArgumentTypeError, BackendError, InterchangeError, ShardingError
from shardtensor.sharding.mesh import default_mesh

Memory: TypeAlias = tuple[int, int]
"""A memory as DLPack names it: the type of device, and its number."""

_ON_HOST = (1, 3, 11)  # plain host memory, and what CUDA and ROCm have pinned of it
_CUDA, _CUDA_MANAGED = 2, 13  # managed memory is used like the GPU's own


def memory_of(x: Any, what: str) -> Memory:
    """Where an array lies.

    Raises:
        ArgumentTypeError: it is no array that can be shared.
    """
    if isinstance(x, type) or not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        raise ArgumentTypeError(
            f"from_dlpack: {what} is a {type(x).__name__} without __dlpack__ and __dlpack_device__; wanted an array of "
            "a library that has them, or a list of such arrays (st.asarray takes what NumPy does)"
        )
    if getattr(x, "is_neg", bool)():
        raise InterchangeError(
            f"from_dlpack: {what} is a tensor that is yet to be negated, which DLPack cannot say; give x.resolve_neg()"
        )
    return as_memory(x.__dlpack_device__(), "from_dlpack", f"{what}.__dlpack_device__()")


def as_memory(given: Any, caller: str, what: str) -> Memory:
    """What ``__dlpack_device__`` gave, or a caller asks for, as the memory that it stands for.

    Raises:
        ArgumentTypeError: it is no pair of numbers.
    """
    try:
        kind, number = [int(n) for n in given]
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{caller}: {what} is {given!r:.60}; wanted a device type and a number") from None
    return HOST_MEMORY if kind in _ON_HOST else (_CUDA if kind == _CUDA_MANAGED else kind, number)


def described(memory: Memory) -> str:
    """A memory in words."""
    kinds = {1: "host memory", _CUDA: "the memory of CUDA GPU", 10: "the memory of ROCm GPU"}
    kind = kinds.get(memory[0], f"the memory of DLPack's device type {memory[0]}, number")
    return kind if memory == HOST_MEMORY else f"{kind} {memory[1]}"


def _rows() -> Iterator[Sequence[Device]]:
    """The devices among which a memory's is looked for. Backends are started as far as need be."""
    yield default_mesh().flat
    for name in sorted(backend_names(), key=lambda name: name != "numpy"):
        try:
            row = devices(name)
        except BackendError:
            continue
        yield row


def assign_devices(memories: Sequence[Memory], row: Sequence[Device]) -> tuple[Device, ...] | None:
    """For each memory the next device of a row that uses it; None if there is none."""
    free, dealt = list(row), []
    for memory in memories:
        here = next((d for d in free if backend_of(d).dlpack_device(d) == memory), None)
        if here is None:
            return None
        free.remove(here)
        dealt.append(here)
    return tuple(dealt)


def devices_for(memories: Sequence[Memory]) -> tuple[Device, ...] | None:
    """For each memory a device of one backend that uses it; None if no backend has them."""
    return next(filter(None, (assign_devices(memories, row) for row in _rows())), None)


def row_for(memories: Sequence[Memory]) -> tuple[Device, ...]:
    """A device for each array of a list.

    Raises:
        InterchangeError: no backend drives them all.
        ShardingError: one does, and has not that many devices.
    """
    if row := devices_for(memories):
        return row
    names = ", ".join([described(m) for m in dict.fromkeys(memories)])
    if not devices_for(list(dict.fromkeys(memories))):
        raise InterchangeError(
            f"from_dlpack: the arrays of x lie in {names}, and no usable backend drives all of that "
            "(`shardtensor info` says which are usable); copy them where one does"
        )
    raise ShardingError(
        f"from_dlpack: x is a list of {len(memories)} arrays in {names}, and no backend has that many devices there; "
        f"for logical ones set SHARDTENSOR_NUM_DEVICES={len(memories)} before the first use, or join some of them first"
    )
