"""One write: it copies the buffers or shards that others hold, transfers operands, and then writes in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import Backend
from shardtensor.communication.between_processes.processes import described, is_common, note
from shardtensor.communication.transfer import are_joined, joined
from shardtensor.communication.transfer_log import is_recording, record_copy
from shardtensor.host import blockwise
from shardtensor.host.summation_order import empty_like
from shardtensor.interpreters.views.views import local_view, locate
from shardtensor.interpreters.writes.write_ops import WriteOp
from shardtensor.sharding.layout import Grid
from shardtensor.sharding.view_spec import ShardedBox, ViewSpec, whole_view_spec
from shardtensor.tensor.ownership import replaced, set_joined
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor, tensor_of


class WriteTransaction:
    """One write to a value that was taken out of its handle.

    Attributes:
        base: the handle.
        value: the aval of the handle.
        backend: the backend of the handle.
        device: the device to which copies of a shared buffer are attributed in the log.
        view_spec: the view spec of the elements that are written.
        storage: the storage of the old value, a `Storage`, or one without elements.
        free: for each buffer of the storage whether nothing else holds its memory; empty if none is.
        error: the exception raised after elements were written: a warning or floating-point error, as NumPy raises it.
    """

    def __init__(self, base: ShardedTensor, view_spec: ViewSpec, storage: Any, free: Sequence[bool] = ()) -> None:
        self.base = base
        self.value = base._aval
        self.backend: Backend = self.value.backend
        self.device = self.value.sharding.mesh.flat[0]
        self.view_spec = view_spec
        self.storage = storage
        self.free = free
        self.error: BaseException | None = None

    def _join(self, name: str) -> None:
        """Joins the arrays of devices that share a cell, in the storage."""
        storage, value, free = self.storage, self.value, self.free
        pieces = storage.buffers
        if not are_joined(pieces, value):
            buffers, copied = joined(pieces, value, name)
            mine = set_joined(self.base, storage, pieces, buffers, copied)  # Otherwise a reader has joined them.
            self.free = [
                (mine and nbytes > 0) or (bool(free) and all(free[k] for k in positions))
                for nbytes, positions in zip(copied, value.cells.positions, strict=True)
            ]

    def on_host(self, write_op: WriteOp) -> Storage:
        """Writes into the shared buffer, or into a copy of it, and returns the storage of the new value.

        The buffer is written in place if its ownership is exclusive.
        """
        storage, value, view_spec = self.storage, self.value, self.view_spec
        self._join(write_op.name)
        (array,) = storage.buffers
        alone = bool(self.free) and self.free[0] and self.backend.begin_write(array)
        if any(write_op.inside):
            write_op.enter(self.base, view_spec, tensor(value, storage))
        fresh = array
        if not alone or (len(view_spec.boxes) > 1 and not array.flags.c_contiguous):
            # The order in memory, on which the bits of later sums depend, must not depend on other handles.
            if self._is_all(write_op):
                fresh = empty_like(array)
            else:
                fresh = (blockwise.copied_in_order if len(view_spec.boxes) == 1 else blockwise.copied)(array)
                record_copy(write_op.name, fresh.nbytes, self.device)
        out = view_spec.of(self.backend, fresh)
        old = out if fresh is array else view_spec.of(self.backend, array)
        try:
            write_op.shared(out, old)
        except Exception as error:
            if not write_op.is_written(error):
                raise
            self.error = error
        return storage if fresh is array else Storage((fresh,), ([],))

    def infer(self, write_op: WriteOp) -> None:
        """Records the transfers of a write to a tensor without elements, if a log or a guard is active."""
        if is_recording():
            here, _, counted = self._located(write_op, self.value.grid)
            in_place = self.backend.on_host or self.backend.simulated or not self.value.cells.apart
            counted.announce(here.grid, not in_place)

    def on_devices(self, write_op: WriteOp) -> Callable[[], Storage]:
        """Returns a function that writes into the cells that hold elements of the view, or into copies, and returns the
        new value's storage. Steps that can fail are done before.

        A cell is written in place if its ownership is exclusive.
        """
        storage: Storage = self.storage
        value, backend = self.value, self.backend
        self._join(write_op.name)
        arrays, cells = storage.buffers, value.cells
        taken = tensor_of(value, arrays)
        if value.spans and is_common(self.base):
            part = self.view_spec.offset, self.view_spec.shape, self.view_spec.strides
            note(f"{write_op.name}({described(self.base)}, {part}, {write_op.described()})")
        if any(write_op.inside):
            write_op.enter(self.base, self.view_spec, taken)
        devices = cells.grid.devices
        here, self.view_spec, write_op = self._located(write_op, cells.grid)
        straight = len(self.view_spec.boxes) == 1
        touched = [(n, k) for n, k in enumerate(here.positions) if 0 not in here.grid.shape(n)]
        commit = write_op.stage(here.grid, taken)
        alone = {}
        for _, k in touched:  # After the transfers: an exclusive shard then has no pending reads by other devices.
            array = arrays[k]
            free = bool(self.free) and self.free[k]
            with backend.on(devices[k]):
                alone[k] = free and (straight or backend.is_contiguous(array)) and backend.begin_write(array)
        new = list(arrays)
        for k, mine in alone.items():
            if not mine:
                with backend.on(devices[k]):
                    if self._is_all(write_op):
                        like = empty_like if type(arrays[k]) is np.ndarray else backend.xp.empty_like
                        new[k] = like(arrays[k])
                    else:
                        copy = backend.xp.asarray(arrays[k], copy=True)
                        new[k] = copy if straight else backend.contiguous(copy)
                        record_copy(write_op.name, int(arrays[k].nbytes), devices[k])

        def written() -> Storage:
            for n, k in touched:
                with backend.on(devices[k]):
                    out = local_view(here, n, new, self.view_spec)
                    old = out if alone[k] else local_view(here, n, arrays, self.view_spec)
                    self._commit(functools.partial(commit, n, backend.xp, out, old), write_op, first=n == touched[0][0])
            if all(alone.values()):
                return storage
            return replaced(storage, tuple(new), [k for k, mine in alone.items() if not mine], backend)

        return written

    def _located(self, write_op: WriteOp, grid: Grid) -> tuple[ShardedBox, ViewSpec, WriteOp]:
        """Returns the boxes of the view within the parts of a grid, its view spec and the write op.

        If the elements in a part are not a box of the view's shape, or the backend cannot give a view of them, the
        write op is replaced by one that writes the elements one by one at their positions in the whole base.
        """
        view_spec, value = self.view_spec, self.value
        here = locate(grid, view_spec.boxes)
        if here is not None and (self.backend.negative_strides or not (view_spec.reverses or write_op.reverses)):
            return here, view_spec, write_op
        whole = whole_view_spec(value.shape, value.sharding.spec.chains_of(value.ndim)).only(view_spec.part)
        everywhere = locate(grid, whole.boxes)
        assert everywhere is not None
        return everywhere, whole, write_op.picked(view_spec.positions, value.shape)

    def _commit(self, commit: Callable[[], None], write_op: WriteOp, first: bool) -> None:
        """Writes on one device.

        If the library rejects the write, it does so on the first device, before anything is written. After that all
        devices write, even after an error, which is raised at the end: a late error is better than a value that is
        written in part.
        """
        try:
            commit()
        except BaseException as error:
            if first and isinstance(error, Exception) and not write_op.is_written(error):
                raise
            self.error = self.error or error

    def _is_all(self, write_op: WriteOp) -> bool:
        """Whether the write replaces every element of the base."""
        boxes = self.view_spec.boxes
        return write_op.overwrites and len(boxes) == 1 and boxes[0].is_whole and self.view_spec.part is None
