"""What a save writes: which process writes which file from which pieces, the same in all processes."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.registry import backend_of, is_remote, processes_of
from shardtensor.backend.remote import RemoteArray
from shardtensor.checkpoint import values
from shardtensor.checkpoint.manifest import ArrayRecord
from shardtensor.checkpoint.pieces import Source, local_pieces
from shardtensor.checkpoint.saved_layouts import layout_of
from shardtensor.checkpoint.together import JobPart
from shardtensor.checkpoint.trees import Node, mapped, names_of, tree_of
from shardtensor.communication.between_processes.processes import cross
from shardtensor.errors import ArgumentTypeError, ConcretizationError, ShardTensorError
from shardtensor.files.checksums import crc32c
from shardtensor.files.chunk_grids import (
    Box,
    Grid,
    Shape,
    chunk_box,
    difference,
    intersection,
    plan_grid,
    slabs,
    slices,
)
from shardtensor.files.metadata import ArrayMetadata, Object, array_metadata
from shardtensor.files.zarr_types import name_of
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements

Piece = tuple[Box, Source]

_metadata = functools.lru_cache(256)(array_metadata)  # Models have many arrays of few shapes.


_SUMMED = 1 << 24
"""The bytes of a piece that are summed at once."""


@dataclass
class ArrayPlan:
    """An array of a save.

    Attributes:
        record: what the manifest has of it, but for its files.
        metadata: the metadata of zarr.
        grid: its chunks.
        processes: the process of each owner of the grid.
        boxes: the box of each owner.
        pieces: the boxes that this process holds. It keeps the values: a write to a tensor copies them before.
        kept: the handle on the value of a tensor.
    """

    record: ArrayRecord
    metadata: ArrayMetadata
    grid: Grid
    processes: Sequence[int]
    boxes: Sequence[Box]
    pieces: list[Piece]
    kept: Any = None

    def free(self) -> None:
        """Frees the values."""
        self.pieces.clear()
        self.kept = None

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.record.shape) * self.record.dtype.itemsize

    def chunks(self, process: int) -> list[Shape]:
        """Returns the indices of the chunks that a process writes."""
        owners = [owner for owner, k in enumerate(self.processes) if k == process]
        return [index for owner in owners for index in self.grid.written_by(owner)]

    def pieces_of(self, index: Shape) -> list[Piece]:
        """Returns the pieces that have elements of a chunk."""
        box = chunk_box(index, self.grid.chunk, self.grid.shape)
        return [piece for piece in self.pieces if not box or intersection(piece[0], box) is not None]

    def text(self) -> str:
        """Returns a text of it that is the same in all processes exactly if they save the same."""
        record = self.record
        text = f"{record.dtype}{list(record.shape)} {record.layout or 'array of NumPy'}"
        if record.layout is not None and not record.layout.local:
            return text
        return f"{text} with the checksums {[self._checksum(*piece) for piece in self.pieces]}"

    def _checksum(self, box: Box, source: Source) -> int:
        value = 0
        for slab in slabs(box, self.record.dtype.itemsize, _SUMMED):
            value = crc32c(np.ascontiguousarray(source[slices(slab, box)]), value)
        return value

    def moves(self) -> list[tuple[int, int, Box]]:
        """Returns what the processes that write chunks lack of them: the owner that sends, the one that receives, and a
        box of the elements.
        """
        moves = []
        for index, pieces in self.grid.pieces.items():
            writer = self.grid.owner(index)
            here = [self.boxes[k] for k, process in enumerate(self.processes) if process == self.processes[writer]]
            for piece in pieces:
                lacking = [piece.box]
                if self.processes[piece.owner] == self.processes[writer]:
                    continue
                for box in here:
                    lacking = [rest for part in lacking for rest in difference(part, box)]
                moves += [(piece.owner, writer, box) for box in lacking]
        return moves


@dataclass
class Plan:
    """A save.

    Attributes:
        tree: the tree of the manifest.
        arrays: its arrays.
        groups: the paths of the containers of arrays, the outermost one first.
    """

    tree: Node[Object] | Object
    arrays: list[ArrayPlan]
    groups: list[str]

    def rows(self) -> list[str]:
        """Returns texts that are the same in all processes exactly if they save the same: one for each leaf."""
        arrays = {array.record.name: array for array in self.arrays}
        rows = []
        for name, _, leaf in names_of(self.tree):
            array = arrays.get(leaf.get("array", ""))
            rows.append(f"the leaf {name}: {leaf if array is None else array.text()}")
        return [*rows, f"the tree {self.tree}"]


def plan_save(tree: Any, count: int, most: int) -> Plan:
    """Plans a save.

    Args:
        tree: the pytree.
        count: the number of processes.
        most: the bytes of host memory for elements of a device.

    Raises:
        ArgumentTypeError: a leaf or a key cannot be stored.
        ShardTensorError: the elements of a tensor are not known, or are partial sums.
    """
    arrays: list[ArrayPlan] = []

    def record_of(name: str, leaf: Any) -> Object:
        try:
            if not isinstance(leaf, (ShardedTensor, np.ndarray)):
                return values.written(leaf)
            arrays.append(_array_plan(name, leaf, len(arrays), count, most))
        except ShardTensorError as error:
            raise type(error)(f"tree: {name}: {error}") from None
        return {"array": name}

    records = mapped(tree_of(tree), record_of)
    groups = {"": None}
    for array in arrays:
        parts = array.record.name.split("/")[:-1]
        groups |= {"/".join(parts[: k + 1]): None for k in range(len(parts))}
    return Plan(records, arrays, list(groups))


def _array_plan(name: str, x: ShardedTensor | HostArray, turn: int, count: int, most: int) -> ArrayPlan:
    return (
        _tensor_plan(name, x, turn, count, most) if isinstance(x, ShardedTensor) else _host_plan(name, x, turn, count)
    )


def _tensor_plan(name: str, x: ShardedTensor, turn: int, count: int, most: int) -> ArrayPlan:
    value = x._aval
    if lacks_elements(x):
        raise ConcretizationError(
            "the elements of the tensor are not known; save what a function returns, outside of it"
        )
    if value.unreduced:
        raise ArgumentTypeError(
            f"the tensor is unreduced along {', '.join(value.unreduced)}: its devices hold partial sums; save "
            "st.reshard(x, P()), or another layout without unreduced axes"
        )
    kept = x.copy()
    in_job = count > 1
    record = ArrayRecord(
        name, value.shape, value.dtype, layout_of(value.sharding, value.committed, value.spans, in_job), x._is_scalar
    )
    cells = value.cells.grid
    boxes = [cells.box(k) for k in range(len(cells.devices))]
    pieces = local_pieces(kept, most)
    processes = [device.process_index if value.spans else turn % count for device in cells.devices]
    return _plan(record, boxes, processes, pieces, turn, kept)


def _host_plan(name: str, x: HostArray, turn: int, count: int) -> ArrayPlan:
    if type(x) not in (np.ndarray, np.memmap):
        raise ArgumentTypeError(
            f"it is {type(x).__module__}.{type(x).__qualname__}, a subclass of numpy.ndarray, of which only the "
            "elements could be stored; wanted np.asarray of it"
        )
    name_of(x.dtype)
    if not x.dtype.isnative:
        raise ArgumentTypeError(
            f"it has dtype {x.dtype.str}, in the byte order of other machines; wanted "
            "x.astype(x.dtype.newbyteorder('='))"
        )
    box = tuple((0, n) for n in x.shape)
    # A copy: the program may write to the array while it is saved.
    kept = np.array(x, order="C", subok=False)
    return _plan(ArrayRecord(name, x.shape, x.dtype, None), [box], [turn % count], [(box, kept)], turn, kept)


def _plan(
    record: ArrayRecord, boxes: list[Box], processes: list[int], pieces: list[Piece], turn: int, kept: Any
) -> ArrayPlan:
    grid = plan_grid(record.shape, record.dtype.itemsize, boxes, turn)
    metadata = _metadata(record.shape, record.dtype, grid.chunk, grid.inner)
    return ArrayPlan(record, metadata, grid, processes, boxes, pieces, kept)


def divide_by_owners(plans: Sequence[ArrayPlan], job: JobPart) -> None:
    """Lets one process write a tensor that is on its devices in all processes. Where each process has such a tensor of
    its own instead, they have to be equal.

    Raises:
        DistributedError: the processes do not call the same.
    """
    own = [_owner(plan.kept) for plan in plans]
    rows = [json.loads(row) for row in job.gather("processes of tensors", json.dumps(own))]
    for plan, first, *others in zip(
        plans, *rows, strict=False
    ):  # If they save different trees, the comparison says so.
        if first is not None and {first} == {first, *others}:
            value = plan.kept._aval
            plan.record = replace(plan.record, layout=layout_of(value.sharding, value.committed, True, True))
            plan.processes = [first] * len(plan.processes)


def _owner(kept: Any) -> int | None:
    """Returns the process of a tensor on devices of one process."""
    processes = processes_of(kept._aval.sharding.mesh.flat) if isinstance(kept, ShardedTensor) else ()
    return min(processes) if len(processes) == 1 else None


def exchange_borders(plans: Sequence[ArrayPlan], caller: str) -> None:
    """Sends the elements that the processes which write chunks lack of them, in one exchange, to these processes.

    Raises:
        DistributedError: the processes do not call the same.
    """
    messages, receivers = [], []
    for plan in plans:
        if not isinstance(plan.kept, ShardedTensor) or not plan.kept._aval.spans:
            continue
        devices = plan.kept._aval.cells.grid.devices
        for sender, receiver, box in plan.moves():
            shape = tuple(end - begin for begin, end in box)
            array: Any = RemoteArray(shape, plan.record.dtype)
            if not is_remote(devices[sender]):
                array = _elements(plan.pieces, box, plan.record.dtype)
                with backend_of(devices[sender]).on(devices[sender]):
                    array = backend_of(devices[sender]).from_host(array, devices[sender])
            messages.append((array, devices[sender], devices[receiver]))
            receivers.append((plan, box, devices[receiver]))
    for (plan, box, device), array in zip(receivers, cross(messages, caller), strict=True):
        if not is_remote(device):
            with backend_of(device).on(device):
                plan.pieces.append((box, np.asarray(backend_of(device).to_host(array, device))))


def _elements(pieces: Sequence[Piece], box: Box, dtype: np.dtype[Any]) -> HostArray:
    """Returns the elements of a box, of which each is in one piece."""
    out = np.empty([end - begin for begin, end in box], dtype)
    for has, source in pieces:
        if (both := intersection(has, box)) is not None:
            out[slices(both, box)] = source[slices(both, has)]
    return out
