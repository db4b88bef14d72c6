"""The aval of a tensor (`Aval`: its shape, dtype and sharding), and the buffer that holds the elements of a value."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import (
    backend_of,
    backend_of_group,
    in_other_process,
    is_remote,
    is_spanning,
    load,
    memory_space,
    shared_memory,
)
from shardtensor.backend.remote import RemoteArray
from shardtensor.errors import ArgumentTypeError
from shardtensor.host import fork, memory_pool
from shardtensor.host.blockwise import copy_into
from shardtensor.sharding.cells import Cells, Part, cells
from shardtensor.sharding.layout import Grid, NamedSharding, Shape
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.spec import Chain, P


class Aval:
    """The shape, dtype and sharding of a value without its elements, and whether it was placed explicitly.

    A value that is ``unreduced`` along mesh axes is the sum of what the devices along these axes hold (see
    `shardtensor.tensor.partial_sum_storage`).

    Avals are created by `aval`, which returns the same object for the same arguments, so that avals are compared and
    hashed by identity: that keeps a look-up in the plan cache under a microsecond.
    """

    __slots__ = (
        "__weakref__", "backend", "committed", "dtype", "memory", "nbytes", "ndim", "offloaded", "shape", "sharding",
        "size", "spans", "unreduced",
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
        self.offloaded = is_offloaded(sharding)
        self.memory = memory_of_all(sharding)
        if not self.backend.has_dtype(dtype):
            raise ArgumentTypeError(
                f"backend {self.backend.name!r} has no arrays of {dtype}; convert with astype, pass another "
                "dtype=, or use another backend"
            )

    @property
    def grid(self) -> Grid:
        """The grid of the shards."""
        return self.sharding.grid(self.shape)

    @property
    def cells(self) -> Cells:
        """The cells: the boxes that are one buffer each, as soon as an operator needs them whole."""
        return cells_of(self.sharding, self.shape)


@functools.lru_cache(1024)
def cells_of(sharding: NamedSharding, shape: Shape) -> Cells:
    """Returns the cells of an array with that sharding and shape."""
    return cells(sharding.grid(shape), memories_of(sharding))


def memories_of(sharding: NamedSharding) -> tuple[Hashable, ...]:
    """Returns what identifies the memory of each device; each has its own where tensors are offloaded, also where they
    are in another process.
    """
    devices = sharding.mesh.flat
    away = sharding.memory_kind == "pinned_host" and in_other_process(devices) and load(devices[0].backend).pinned_host
    return devices if away or is_offloaded(sharding) else tuple(map(memory_space, devices))


def memory_of_all(sharding: NamedSharding) -> Hashable | None:
    """Returns what identifies the memory that all devices share, in which a tensor has one cell; None if there are
    several.
    """
    return None if is_offloaded(sharding) else shared_memory(sharding.mesh.flat)


def is_offloaded(sharding: NamedSharding) -> bool:
    """Whether the storage is an `OffloadedStorage`: on some backends host memory and device memory are the same."""
    return sharding.memory_kind == "pinned_host" and backend_of_group(sharding.mesh.flat).pinned_host


def spans_hosts(value: Aval) -> bool:
    """Whether the arrays of a tensor are NumPy's arrays of several processes."""
    return value.spans and load(value.backend.name).on_host


@functools.lru_cache(8192)
def aval(shape: Shape, dtype: np.dtype[Any], sharding: NamedSharding, committed: bool) -> Aval:
    """Returns the `Aval` with that shape, dtype and sharding; the same object for the same arguments."""
    value = Aval(shape, dtype, sharding, committed)
    # The cache may have dropped one that is still in use, and two threads may get here at the same time.
    with _AVALS_LOCK:
        key = shape, dtype, sharding, committed
        known = reference() if (reference := _AVALS.get(key)) is not None else None
        if known is not None:
            return known
        if (n := len(_AVALS)) >= _FEW and not n & (n - 1):
            for other, held in list(_AVALS.items()):  # A list: a finalizer that runs meanwhile may add one.
                if held() is None and _AVALS.get(other) is held:  # The finalizer may remove some, too.
                    del _AVALS[other]
        _AVALS[key] = weakref.ref(value)
        return value


_AVALS: dict[Any, weakref.ref[Aval]] = {}
"""The avals in use. Those that are not are removed when there are twice as many: a `WeakValueDictionary` would call a
Python function for each, in which an exception of a signal handler would be lost.
"""

_FEW = 1 << 10
"""The number of avals from which on those that are not in use are removed."""

_AVALS_LOCK = fork.lock()  # A finalizer that the garbage collector calls may need an aval, too.


@functools.lru_cache(1024)
def summed(value: Aval) -> Aval:
    """Returns the aval of a value once its partial sums are added: replicated where it was unreduced, or reduced."""
    sharding = value.sharding.with_spec(P(*value.sharding.spec.chains))
    return aval(value.shape, value.dtype, sharding, value.committed)


@functools.lru_cache(1024)
def of_cotangent(value: Aval) -> NamedSharding:
    """Returns the sharding of the gradient of a value: unreduced where it is reduced, and reduced where it is
    unreduced.
    """
    return value.sharding.with_spec(value.sharding.spec.of_cotangent)


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


def common_reduced(values: Sequence[Aval], mesh: Mesh) -> frozenset[str]:
    """Returns the axes of a mesh along which an operator's result is reduced: those along which all operands are."""
    axes = [value.sharding.spec.reduced if value.sharding.mesh == mesh else frozenset[str]() for value in values]
    return frozenset.intersection(*axes) if axes else frozenset()


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


def join(pieces: Sequence[Any], value: Aval, number: int) -> tuple[Any, int]:
    """Joins the pieces that the devices of a cell have into one array, and returns it with the number of bytes copied.

    Nothing is copied where one piece is the whole cell, or the pieces are parts of one buffer of the host in the layout
    of the result.

    Args:
        pieces: the array of each device.
        value: the aval of the tensor.
        number: the number of the cell.
    """
    cells, device = value.cells, value.cells.grid.devices[number]
    positions, shape = cells.positions[number], cells.grid.shape(number)
    if cells.shards[positions[0]][1] is None:
        return pieces[positions[0]], 0
    if value.spans and is_remote(device):
        return RemoteArray(shape, value.dtype), 0
    backend = backend_of(device)
    parts: dict[Any, Any] = {}  # of replicas the first
    for k in positions:
        index = cells.shards[k][1] or ()
        if 0 not in pieces[k].shape:
            parts.setdefault(tuple([(s.start, s.stop) for s in index]), (pieces[k], index))
    if len(parts) == 1 and tuple((only := next(iter(parts.values())))[0].shape) == shape:
        return only[0], 0
    nbytes = math.prod(shape) * value.dtype.itemsize
    if backend.on_host:
        whole = in_place([p for p, _ in parts.values()], [[b for b, _ in box] for box in parts], shape)
        if whole is not None:
            return whole, 0
    array = _empty(device, shape, value.dtype)
    with backend.on(device):
        for piece, index in parts.values():
            if backend.on_host:
                copy_into(array[index], piece, breaks=True)
            else:
                array[index] = piece
    return array, nbytes


def views(backend: Backend, devices: Sequence[Device], buffers: Sequence[Any], parts: Sequence[Part]) -> list[Any]:
    """Returns the view of a buffer that each device has: the part at its position."""
    arrays: list[Any] = []
    for number, group in itertools.groupby(zip(devices, parts, strict=True), lambda pair: pair[1][0]):
        (device, *_), places = zip(*group, strict=True)
        buffer, indices = buffers[number], [index for _, index in places]
        if all(index is None for index in indices):
            arrays += [buffer] * len(indices)
            continue
        with backend.on(device):  # All devices that have a part of a buffer share its memory.
            arrays += [buffer if index is None else backend.view(buffer, index) for index in indices]
    return arrays


def new_buffers(value: Aval) -> tuple[tuple[Any, ...], list[Any]]:
    """Returns new buffers for the cells of a value, and for each device the view of them that is its shard."""
    grid, backend = value.cells.grid, value.backend
    buffers = tuple([_empty(device, grid.shape(n), value.dtype) for n, device in enumerate(grid.devices)])
    return buffers, views(backend, value.grid.devices, buffers, value.cells.shards)


def _empty(device: Device, shape: Shape, dtype: np.dtype[Any]) -> Any:
    if is_remote(device):
        return RemoteArray(shape, dtype)
    backend = backend_of(device)
    if backend.on_host:
        return memory_pool.empty(shape, dtype)
    with backend.on(device):
        return backend.xp.empty(shape, dtype=dtype)


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
