"""The aval of a tensor (`Aval`: its shape, dtype and sharding), and the buffer that holds the elements of a value."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import backend_of_group, is_spanning, shared_memory
from shardtensor.errors import ArgumentTypeError
from shardtensor.host import memory_pool
from shardtensor.host.blockwise import copy_into
from shardtensor.sharding.layout import Grid, NamedSharding, Shape
from shardtensor.sharding.spec import Chain, P


class Aval:
    """The shape, dtype and sharding of a value without its elements, and whether it was placed explicitly.

    A value that is ``unreduced`` along mesh axes is the sum of what the devices along these axes hold (see
    `shardtensor.tensor.partial_sums`).

    Avals are created by `aval`, which returns the same object for the same arguments, so that avals are compared and
    hashed by identity: that keeps a look-up in the plan cache under a microsecond.
    """

    __slots__ = (
        "backend", "committed", "dtype", "memory", "nbytes", "ndim", "offloaded", "shape", "sharding", "size",
        "spans", "unreduced",
    )  # fmt: skip

    def __init__(self, shape: Shape, dtype: np.dtype[Any], sharding: NamedSharding, committed: bool) -> None:
        sharding.check_rank(len(shape), "sharding")
        self.shape = shape
        self.dtype = dtype
        self.sharding = sharding
        self.committed = committed
        unreduced = sharding.spec.unreduced
        self.unreduced: Chain = tuple([a for a in sharding.mesh.axis_names if a in unreduced]) if unreduced else ()
        self.ndim = len(shape)
        self.size = math.prod(shape)
        self.nbytes = self.size * dtype.itemsize
        self.backend: Backend = backend_of_group(sharding.mesh.flat)
        # Whether some devices belong to other processes: the arrays of these devices are `RemoteArray` objects.
        self.spans = is_spanning(sharding.mesh.flat)
        # Whether the storage is an `OffloadedStorage`: on some backends host memory and device memory are the same.
        self.offloaded = self.backend.pinned_host and sharding.memory_kind == "pinned_host"
        # The memory that all devices share, in which the elements are one buffer as soon as an operator needs them
        # whole; None if there are several.
        self.memory = None if self.offloaded else shared_memory(sharding.mesh.flat)
        if not self.backend.has_dtype(dtype):
            raise ArgumentTypeError(
                f"backend {self.backend.name!r} has no arrays of {dtype}; convert with astype, pass another "
                "dtype=, or use another backend"
            )

    @property
    def grid(self) -> Grid:
        """The grid of the shards."""
        return self.sharding.grid(self.shape)


@functools.lru_cache(8192)
def aval(shape: Shape, dtype: np.dtype[Any], sharding: NamedSharding, committed: bool) -> Aval:
    """Returns the `Aval` with that shape, dtype and sharding; the same object for the same arguments."""
    return Aval(shape, dtype, sharding, committed)


@functools.lru_cache(1024)
def reduced(value: Aval) -> Aval:
    """Returns the aval of an unreduced value once its partial sums are added: replicated where it was unreduced."""
    sharding = value.sharding.with_spec(P(*value.sharding.spec.chains))
    return aval(value.shape, value.dtype, sharding, value.committed)


@functools.lru_cache(1024)
def stacked(value: Aval) -> Aval:
    """Returns the aval of the partial sums of an unreduced value: along a first dimension, of which each device along
    the unreduced axes holds one index.
    """
    mesh, axes = value.sharding.mesh, value.unreduced
    count = math.prod([mesh.shape[a] for a in axes])
    sharding = NamedSharding(mesh, P(axes, *value.sharding.spec.chains))
    return aval((count, *value.shape), value.dtype, sharding, value.committed)


def memory_kind(values: Iterable[Aval]) -> str | None:
    """Returns the memory kind of an operator's result: that of the operands if all have the same, otherwise None."""
    kinds = {value.sharding.memory_kind for value in values}
    return kinds.pop() if len(kinds) == 1 else None


def on_devices(value: Aval) -> Aval:
    """Returns the aval of the same value in device memory."""
    if not value.offloaded:
        return value
    return aval(value.shape, value.dtype, value.sharding.with_memory_kind("device"), value.committed)


def whole_of(array: Any, value: Aval) -> Any:
    """Converts the result of a kernel to an array of the dtype of the aval, since libraries differ in their type
    promotion; its device is current.

    A buffer of the host stays writable, because NumPy copies read-only arrays before some reductions (argmax). What
    leaves the library is a read-only view of it.
    """
    if type(array) is np.ndarray and array.dtype == value.dtype:
        return array
    backend = value.backend
    if isinstance(array, np.generic) or not hasattr(array, "dtype") or backend.dtype_of(array) != value.dtype:
        return backend.xp.asarray(array, dtype=value.dtype)
    return array


def join(pieces: Sequence[Any], value: Aval) -> tuple[Any, int]:
    """Joins the pieces of a value, whose devices share a memory, into one array, and returns it with the number of
    bytes copied.

    Nothing is copied where the pieces are parts of one buffer of the host in the layout of the result.
    """
    grid, backend = value.grid, value.backend
    owners = [k for k in grid.owners() if 0 not in pieces[k].shape]
    if len(owners) == 1 and tuple(pieces[owners[0]].shape) == value.shape:
        return pieces[owners[0]], 0
    if backend.on_host:
        whole = in_place([pieces[k] for k in owners], [[b for b, _ in grid.box(k)] for k in owners], value.shape)
        if whole is not None:
            return whole, 0
        array: Any = memory_pool.empty(value.shape, value.dtype)
        for k in owners:
            copy_into(array[grid.index(k)], pieces[k], breaks=True)
        return array, value.nbytes
    with backend.on(grid.devices[0]):
        array = backend.xp.empty(value.shape, dtype=value.dtype)
        for k in owners:
            array[grid.index(k)] = pieces[k]
    return array, value.nbytes


def in_place(pieces: Sequence[HostArray], begins: Sequence[Sequence[int]], shape: Shape) -> HostArray | None:
    """Returns the array of that shape whose parts are the pieces, if they are adjacent in one contiguous buffer.

    ``begins`` are the first indices of the pieces in the array, and the first piece begins at its origin. The result is
    a view of the buffer; it is None where the strides or addresses of the pieces do not fit.
    """
    first = pieces[0] if pieces else None
    if first is None or first.base is None or any(begins[0]):
        return None
    base, start = memory_pool.owner_of(first), _address(first)
    aligned = all(
        memory_pool.owner_of(piece) is base
        and piece.strides == first.strides
        and _address(piece) - start == sum(b * stride for b, stride in zip(begin, first.strides, strict=True))
        for piece, begin in zip(pieces, begins, strict=True)
    )
    if not aligned or not isinstance(base, np.ndarray) or not base.flags.c_contiguous:
        return None
    return np.ndarray(shape, first.dtype, base, start - _address(base), first.strides)


def _address(array: HostArray) -> int:
    return int(array.__array_interface__["data"][0])
