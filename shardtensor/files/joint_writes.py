"""Files that all processes of a job write together, because no process has all elements of a tensor.

Process 0 makes the file under another name, all processes write their parts, and process 0 renames it. Before each step
the processes tell each other their errors: an error in one process is an error in all of them, and then the path has
what it had before.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import backend_of, is_remote, process_index
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_processes.freight import host_copies
from shardtensor.communication.between_processes.processes import (
    described,
    everywhere,
    gather_texts,
    is_common,
    note,
    process_of,
)
from shardtensor.core import call
from shardtensor.errors import ArgumentError, DistributedError, NotAddressableError, ShardTensorError, message_of
from shardtensor.files.atomic import naming
from shardtensor.files.byte_ranges import contiguous_from, write_box
from shardtensor.files.chunk_grids import Box, cut_over_replicas, intersection, size_of, slices
from shardtensor.files.npy_files import blocks
from shardtensor.host.replacement import replaced, target_of
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.spec import P
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, shard_arrays
from shardtensor.tensor.value import Aval, summed

_ROUND = 1 << 30
"""The bytes that each process writes before the processes tell each other how it goes: within the time limit of the
job, also on slow disks.
"""

_LEAST_RUN = 256
"""The bytes of a row of a shard below which a tensor is split along another dimension first: each row is one call of
the system.
"""


class Placed(NamedTuple):
    """A tensor or host array, and the offset in the file at which it begins."""

    start: int
    array: Any


def is_scattered(x: Any) -> bool:
    """Whether an operand is a tensor of which some process lacks elements, which is the same in all processes."""
    if not is_common(x):
        return False
    source = getattr(getattr(x._storage, "base", None), "_aval", None)  # Of a view, what it reads; of an element, too.
    (source, *_) = getattr(x._storage, "origin", (source,))
    return any(value.unreduced or _is_split(value) for value in (x._aval, source or x._aval))


def _is_split(value: Aval) -> bool:
    """Whether some process with devices of a value lacks elements of it."""
    grid, held = value.grid, dict[int, set[int]]()
    parts = grid.linear_parts().tolist()
    for part, device in zip(parts, grid.devices, strict=True):
        held.setdefault(process_of(device), set()).add(part)
    return any(len(own) < len({*parts}) for own in held.values())


def check_path(path: str | None, caller: str) -> str:
    """Returns the path of a file that all processes write.

    Raises:
        NotAddressableError: it is an open file, of which other processes know nothing.
    """
    if path is None:
        raise NotAddressableError(
            f"{caller}: no process holds all elements of the tensor, and the file is an open one of this process; give "
            "a path on a file system that all processes share, or write what st.distributed.gather_to(x, 0) returns "
            "(st.distributed.process_allgather(x) in all processes)"
        )
    return path


# -- agreement -------------------------------------------------------------------------------------


class Writers:
    """The processes that write a file; all of them make the same calls of it.

    Args:
        caller: the function.
        path: the path, which is the same in all processes.
        arrays: what they write.

    Raises:
        NotAddressableError: a mapped function calls this, in which a process runs several programs.
    """

    def __init__(self, caller: str, path: str, arrays: Sequence[Any]) -> None:
        if current_device() is not None:
            raise NotAddressableError(
                f"{caller}: a tensor of several processes is written outside of mapped functions, which run once for "
                "each device; save what the map returns"
            )
        self._caller, self._path = caller, path
        self._call = f"{caller}: how it goes"
        self._is_over = False
        note(f"{caller}({path!r}, {', '.join(map(described, arrays))})")

    def agree(self, text: str = "", error: Exception | None = None) -> list[str]:
        """Returns the texts of all processes.

        Raises:
            OSError, ArgumentError: there is such an error in a process.
            DistributedError: there is another one in another process.
        """
        told = json.dumps([text, None if error is None else _told(error)])
        rows = [json.loads(row) for row in gather_texts(self._call, told)]
        for process, (_, failure) in enumerate(rows):
            if failure is not None:
                self._is_over = True
                raise self._raised(process, error, *failure) from error
        return [row[0] for row in rows]

    def _raised(self, process: int, own: Exception | None, kind: str, number: int | None, text: str) -> Exception:
        if kind == "OSError":
            told = f"process {process}: {text}"
            return OSError(f"{told}: {self._path!r}") if number is None else OSError(number, told, self._path)
        if kind == "ArgumentError":
            return ArgumentError(text)
        return own or DistributedError(f"{self._caller}: process {process} has not written {self._path}: {text}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A context in which an error of this process is one of all processes; they come to its end together.

        Raises:
            OSError, ArgumentError, DistributedError: see `agree`.
        """
        try:
            yield
            self.agree()
        except Exception as error:  # Of any kind: the other processes wait for this one in `agree`.
            if not self._is_over and not isinstance(error, DistributedError):
                self.agree(error=error)
            raise


def _told(error: Exception) -> tuple[str, int | None, str]:
    """Returns the kind of an error, its number and its text."""
    if isinstance(error, OSError):
        return "OSError", error.errno, error.strerror or message_of(error)
    return "ArgumentError" if isinstance(error, ArgumentError) else "", None, _text(error)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ShardTensorError) else message_of(error)


# -- one file of all processes ---------------------------------------------------------------------


def write_jointly(path: str, header: bytes, size: int, arrays: Sequence[Placed], caller: str) -> None:
    """Writes a file that consists of a header and of arrays in row-major order; all processes call this.

    Each element is written by one process, replicas by all that hold them. A host array, and a tensor that does not
    span processes, are written by the first process that has them. Elements are copied to the host in blocks.

    Args:
        path: the path of a regular file on a file system that all processes share.
        header: its first bytes.
        size: its size.
        arrays: the arrays.
        caller: the function.

    Raises:
        OSError, ArgumentError, DistributedError: there is an error in a process; it is raised in all of them.
    """
    writers = Writers(caller, path, [array for _, array in arrays])
    sources = [_Source(start, *_held(_with_long_runs(array))) for start, array in arrays]
    with writers.together(), contextlib.ExitStack() as stack:
        name, inode, descriptor = "", 0, -1
        if process_index() == 0:
            stream = stack.enter_context(_created(path, header, size, caller))
            name, descriptor = stream.name, stream.fileno()
            if name == os.path.basename(target_of(path) or ""):  # The old file is written, of which the name is known.
                inode = os.fstat(descriptor).st_ino
        has = [_is_here(source.array) for source in sources]
        rows = [json.loads(text) for text in writers.agree(json.dumps([name, inode, has]))]
        opened = stack.enter_context(contextlib.ExitStack())
        if process_index() != 0:
            descriptor = opened.enter_context(_joined(path, rows[0][0], rows[0][1], size, caller))
        first = [next((k for k, row in enumerate(rows) if row[2][n]), 0) for n in range(len(sources))]
        parts, more = _parts(sources, first), True
        while "more" in writers.agree("more" if more else ""):
            if more:
                more = _write_round(descriptor, path, parts)
            if not more:
                opened.close()  # Network file systems report errors here.


class _Source(NamedTuple):
    """An array that is written, and of a tensor that spans processes the arrays of its devices."""

    start: int
    array: Any
    shards: Sequence[Any] | None


def _held(x: Any) -> tuple[Any, Sequence[Any] | None]:
    """Returns an operand, and the arrays of its devices if it spans processes, without partial sums."""
    if lacks_elements(x):
        call("to_host", x)  # It raises the error.
    if not is_common(x):
        return x, None
    if x._aval.unreduced:
        x = call("reshard", x, sharding=summed(x._aval).sharding)
    return x, shard_arrays(x)


def _with_long_runs(x: Any) -> Any:
    """Returns an operand, split along another dimension if the runs of its shards are short."""
    if not is_common(x) or lacks_elements(x) or x._aval.unreduced:
        return x
    shape, grid, itemsize = x.shape, x._aval.grid, x.dtype.itemsize
    boxes = [box for k in grid.owners() if size_of(box := grid.box(k))]
    splits = [(contiguous_from(shape, box), box) for box in boxes]
    if all(not split or size_of(box[split:]) * itemsize >= _LEAST_RUN for split, box in splits):
        return x
    longest = max(range(len(shape) - 1), key=lambda d: shape[d])
    mesh = x.sharding.mesh
    return call("reshard", x, sharding=NamedSharding(mesh, P(*[None] * longest, mesh.axis_names)))


def _is_here(x: Any) -> bool:
    """Whether this process has some elements of an operand: all of them if it does not span processes."""
    return type(x) is not ShardedTensor or not all(map(is_remote, x._aval.sharding.mesh.flat))


@contextlib.contextmanager
def _created(path: str, header: bytes, size: int, caller: str) -> Iterator[IO[bytes]]:
    """Opens the file in process 0, with its header and its size; it replaces the one at the path at the end."""
    if target_of(path) is None:
        raise ArgumentError(f"{caller}: {path} is no regular file, and several processes write only those together")
    with replaced(path) as stream:
        stream.write(header)
        stream.flush()
        stream.truncate(size)
        yield stream


@contextlib.contextmanager
def _joined(path: str, name: str, inode: int, size: int, caller: str) -> Iterator[int]:
    """Opens in another process the file that process 0 has made.

    Raises:
        ArgumentError: this process does not see it.
        OSError: it cannot be opened; the error has the path.
    """
    beside = os.path.join(os.path.dirname(target_of(path) or ""), name)
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise _unseen(path, caller) from None
    except OSError as error:
        error.filename = path
        raise
    try:
        status = os.fstat(descriptor)
        if status.st_size != size or inode not in (0, status.st_ino):
            raise _unseen(path, caller)
        yield descriptor
    finally:
        os.close(descriptor)


def _unseen(path: str, caller: str) -> ArgumentError:
    return ArgumentError(
        f"{caller}: process {process_index()} does not see the file that process 0 has made for {path}; wanted a path "
        "on a file system that all processes share"
    )


def _parts(sources: Sequence[_Source], first: Sequence[int]) -> Iterator[tuple[int, Shape, Box, HostArray]]:
    """Yields what this process writes: where an array begins, its shape, a box of it, and the elements."""
    here = process_index()
    for turn, (start, x, shards) in enumerate(sources):
        shape, itemsize = tuple(x.shape), x.dtype.itemsize
        if shards is None:
            for box in boxes_of(tuple((0, n) for n in shape), itemsize) if first[turn] == here else ():
                yield start, shape, box, block_of(x, box)
            continue
        grid = x._aval.grid
        held = [grid.box(k) for k in range(len(grid.devices))]
        for k, own in cut_over_replicas(held, itemsize, turn).items():
            for box in boxes_of(own, itemsize) if not is_remote(grid.devices[k]) else ():
                (elements,) = host_copies([(shards[k], grid.devices[k], slices(box, held[k]))])
                yield start, shape, box, elements


def _write_round(descriptor: int, path: str, parts: Iterator[tuple[int, Shape, Box, HostArray]]) -> bool:
    """Writes the next parts to the disk, some `_ROUND` bytes; returns whether there may be more."""
    written = 0
    for start, shape, box, elements in parts:
        write_box(descriptor, path, start, shape, box, elements)
        written += elements.nbytes
        if written >= _ROUND:
            break
    with naming(path):
        os.fsync(descriptor)
    return written >= _ROUND


# -- one writer of elements of all processes -------------------------------------------------------


def collected(x: Any, writers: Writers, caller: str) -> Iterator[HostArray | None]:
    """Yields the elements of an operand in row-major order, block by block, in process 0, and None in the others, which
    send what they hold of the block.

    Raises:
        OSError, ArgumentError, DistributedError: process 0 has not written a block; it is raised in all processes.
    """
    if is_common(x):
        writers.agree()
    x, shards = _held(x)
    shape, itemsize = tuple(x.shape), x.dtype.itemsize
    for box in boxes_of(tuple((0, n) for n in shape), itemsize):
        if shards is None:
            yield block_of(x, box) if process_index() == 0 else None
            continue
        writers.agree()
        yield _collected(x, shards, box, caller)


def _collected(x: ShardedTensor, shards: Sequence[Any], box: Box, caller: str) -> HostArray | None:
    grid, arrays, devices, places = x._aval.grid, list[Any](), list[Device](), list[Any]()
    for k in grid.owners():
        held, device = grid.box(k), grid.devices[k]
        if (both := intersection(held, box)) is None:
            continue
        if is_remote(device):
            arrays.append(RemoteArray(tuple(e - b for b, e in both), x.dtype))
        else:
            backend, index = backend_of(device), slices(both, held)
            with backend.on(device):
                arrays.append(backend.view(shards[k], index) if index else shards[k])
        devices.append(device)
        places.append(slices(both, box))
    parts = everywhere(arrays, devices, caller, 0)
    if process_index() != 0:
        return None
    out = np.empty([e - b for b, e in box], x.dtype)
    for place, part in zip(places, parts, strict=True):
        out[place] = part
    return out


# -- blocks ----------------------------------------------------------------------------------------


def boxes_of(box: Box, itemsize: int) -> Iterator[Box]:
    """Yields the boxes that make up a box in row-major order, each of at most the bytes of a block."""
    for index in blocks(tuple(e - b for b, e in box), itemsize):
        part = [(b + i, b + i + 1) if isinstance(i, int) else (b + i.start, min(b + i.stop, e)) for i, (b, e) in
                zip(index, box, strict=False)]  # fmt: skip
        yield (*part, *box[len(index) :])


def block_of(x: Any, box: Box) -> HostArray:
    """Returns the elements of a box of a tensor that is here, or of a host array, as a host array."""
    index = tuple([slice(*ends) for ends in box])
    block: HostArray = call("to_host", x, index=index) if isinstance(x, ShardedTensor) else x[index]
    return np.asarray(block)
