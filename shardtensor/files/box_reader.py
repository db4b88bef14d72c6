"""Reads a box of an array from the files of its outer chunks, by several threads: each reads inner chunks, into the
result itself where they are contiguous there.

C reads what it can (see `row_reads`), and Python the rest, a slab at a time. The memory beside the result is a slab for
each thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardtensor.errors import ArgumentError
from shardtensor.files.checksums import bytes_of, crc32c
from shardtensor.files.chunk_grids import (
    Box,
    Shape,
    chunk_box,
    chunks_of,
    count_of_chunks,
    intersection,
    size_of,
    slabs,
    slices,
)  # fmt: skip
from shardtensor.files.metadata import HOLE, ArrayMetadata
from shardtensor.files.paths import opened, read_into
from shardtensor.files.row_reads import is_available, read_rows, rows_of
from shardtensor.host import memory_pool
from shardtensor.host.summation_order import HostArray
from shardtensor.host.threads import each, num_threads
from shardtensor.host.units import counted

_OPEN = 64
"""The files that are open at the same time."""

_SLAB = 1 << 22
"""The bytes of a slab, where C does not read inner chunks: threads that pass the interpreter's lock on more often wait
for it longer than the memory takes.
"""

_TASK = 1 << 22
"""The bytes of inner chunks in a row that a thread reads before it takes others."""


class _File(NamedTuple):
    """The file of an outer chunk.

    Attributes:
        descriptor: the open file.
        path: its name, for errors.
        size: its size.
        begin: the position of the chunk's first element in the array.
        part: the elements that are read.
        entries: the offsets and sizes of its inner chunks; None if it has no index.
    """

    descriptor: int
    path: str
    size: int
    begin: Shape
    part: Box
    entries: HostArray | None

    @property
    def local(self) -> Box:
        """The elements that are read, by their positions in the chunk."""
        return tuple((b - o, e - o) for (b, e), o in zip(self.part, self.begin, strict=True))


class Reader:
    """Reads a box of an array; without memory for it, it only checks the sums.

    Args:
        root: the folder from which on links are not followed.
        prefix: the path of the array below the root, with ``/`` at its end if it is not empty.
        metadata: the metadata of the array.
        box: the elements that are read.
        out: an array of the shape of the box, into which they are read.
        filled: whether holes have the element ``fill_value``; otherwise they are an error.
        sums: the checksums of the checksums of the inner chunks of files, by their keys; None if they are not known.
    """

    def __init__(
        self, root: str, prefix: str, metadata: ArrayMetadata, box: Box, out: HostArray | None, filled: bool,
        sums: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._root, self._prefix, self._metadata = root, prefix, metadata
        self._box, self._out, self._filled, self._sums = box, out, filled, sums
        self._native = not metadata.elements.big or metadata.dtype.itemsize == 1
        # Asked here, so that only one thread compiles it.
        self._by_c = self._native and metadata.elements.checked and is_available()

    def read(self) -> None:
        """Reads the box.

        Raises:
            ArgumentError: a file is broken or missing, or a checksum differs; the error names the file.
            OSError: a file cannot be read; the error has its name.
        """
        indices = chunks_of(self._box, self._metadata.chunk)
        while some := list(itertools.islice(indices, _OPEN)):
            with contextlib.ExitStack() as stack:
                tasks = [task for index in some for task in self._tasks(index, stack)]
                self._run(tasks)

    def _run(self, tasks: list[tuple[_File, range]]) -> None:
        def run(k: int) -> None:
            file, numbers = tasks[order[k]]
            for position in chunks_of(file.local, self._metadata.inner, numbers):
                self._read_inner(file, position)

        # Threads begin far from each other: inner chunks in a row share pages of the result, which the system clears
        # when they are first touched, and which two threads would both clear.
        each_thread = -(-len(tasks) // num_threads())
        order = [k for first in range(each_thread) for k in range(first, len(tasks), each_thread)]
        each(run, len(tasks))

    def _tasks(self, index: Shape, stack: contextlib.ExitStack) -> list[tuple[_File, range]]:
        """Opens the file of an outer chunk, and returns it with the numbers of inner chunks, as many as a thread reads.

        The numbers are those of the inner chunks that have elements of the box, in C order.
        """
        metadata = self._metadata
        path = os.path.join(self._root, self._prefix + metadata.key(index))
        part = intersection(self._box, chunk_box(index, metadata.chunk, metadata.shape))
        assert part is not None
        try:
            descriptor = stack.enter_context(opened(self._root, self._prefix + metadata.key(index)))
        except FileNotFoundError:
            if not self._filled:
                raise missing(path) from None
            self._fill(part)
            return []
        size = os.fstat(descriptor).st_size
        begin = tuple(i * c for i, c in zip(index, metadata.chunk, strict=True))
        file = _File(descriptor, path, size, begin, part, self._index(descriptor, path, size))
        if self._sums is not None:
            self._check_sums(file, self._sums.get(metadata.key(index)))
        count, most = count_of_chunks(file.local, metadata.inner), max(_TASK // metadata.inner_nbytes, 1)
        return [(file, range(first, min(first + most, count))) for first in range(0, count, most)]

    def _index(self, descriptor: int, path: str, size: int) -> HostArray | None:
        """Returns the offsets and sizes of the inner chunks of a file; None if it has no index."""
        metadata = self._metadata
        if metadata.index is None:
            return None
        nbytes = metadata.index_nbytes
        if nbytes > size:
            raise ArgumentError(f"{path} is truncated: it has {counted(size, 'byte')}, and its index {nbytes}")
        memory_pool.reserve(nbytes)
        content = np.empty(nbytes, np.uint8)
        read_into(descriptor, content, 0 if metadata.index_first else size - nbytes, path)
        if metadata.index.checked:
            data, stored = content[:-4], content[-4:]
            _compare(crc32c(data), stored, path, "its index")
            content = data
        order = ">u8" if metadata.index.big else "<u8"
        return content.view(order).reshape(*metadata.per_chunk, 2)

    def _check_sums(self, file: _File, expected: int | None) -> None:
        """Checks that a file is the one that was written: it might be a file of another array of the same shape."""
        ends = [file.size]
        if file.entries is not None:
            ends = [int(offset) + int(nbytes) for offset, nbytes in file.entries.reshape(-1, 2) if offset != HOLE]
        sums = np.empty((len(ends), 4), np.uint8)
        for row, end in zip(sums, ends, strict=True):
            if not 4 <= end <= file.size:
                raise ArgumentError(f"{file.path} is broken: an inner chunk ends at byte {end} of {file.size}")
            read_into(file.descriptor, row, end - 4, file.path)
        if expected is None or crc32c(sums) != expected:
            raise ArgumentError(
                f"{file.path} is damaged: it is not the file that was written, or has other checksums; restore an "
                "older checkpoint, or a copy of the file"
            )

    def _read_inner(self, file: _File, position: Shape) -> None:
        """Reads an inner chunk, if the file has it."""
        metadata = self._metadata
        reach = tuple(
            (o + p * i, o + (p + 1) * i) for o, p, i in zip(file.begin, position, metadata.inner, strict=True)
        )
        both = intersection(file.part, reach)
        assert both is not None
        wanted = metadata.inner_nbytes + 4 * metadata.elements.checked
        offset, nbytes = 0, file.size
        if file.entries is not None:
            offset, nbytes = map(int, file.entries[position])
        if (offset, nbytes) == (HOLE, HOLE):
            if not self._filled:
                raise ArgumentError(f"{file.path} is broken: it lacks inner chunk {position}")
            self._fill(both)
            return
        if nbytes != wanted or offset + nbytes > file.size:
            raise ArgumentError(
                f"{file.path} is broken: inner chunk {position} begins at byte {offset} of {file.size} and has "
                f"{nbytes}; wanted {counted(wanted, 'byte')}"
            )
        value = self._read_slabs(file, offset, both, reach)
        if metadata.elements.checked:
            stored = np.empty(4, np.uint8)
            read_into(file.descriptor, stored, offset + metadata.inner_nbytes, file.path)
            _compare(value, stored, file.path, f"inner chunk {position}")

    def _read_slabs(self, file: _File, offset: int, both: Box, reach: Box) -> int:
        """Reads the elements ``both`` of an inner chunk, which begins at ``offset`` and has the elements ``reach``.

        Returns:
            The checksum of all its elements; 0 if it has none to be compared with.
        """
        if (value := self._read_by_c(file, offset, both, reach, 0)) is not None:
            return value
        value = 0
        for slab in slabs(reach, self._metadata.dtype.itemsize, _SLAB):
            part = intersection(slab, both)
            summed = self._read_by_c(file, offset, part, slab, value)
            value = self._read_slab(file, offset, part, slab, value) if summed is None else summed
            offset += size_of(slab) * self._metadata.dtype.itemsize
        return value

    def _target(self, part: Box | None) -> HostArray | None:
        return None if part is None or self._out is None else self._out[slices(part, self._box)]

    def _read_by_c(self, file: _File, offset: int, part: Box | None, box: Box, value: int) -> int | None:
        """Reads the elements ``part`` of a contiguous box, and continues a checksum; None if C cannot do it."""
        if not self._by_c:
            return None
        rows = rows_of(self._target(part), part, box)
        nbytes = size_of(box) * self._metadata.dtype.itemsize
        return None if rows is None else read_rows(file.descriptor, offset, nbytes, value, rows)

    def _read_slab(self, file: _File, offset: int, part: Box | None, slab: Box, value: int) -> int:
        """Does the same for a slab: into the result if it is contiguous there, and else by way of other memory."""
        dtype, checked = self._metadata.dtype, self._metadata.elements.checked
        target = self._target(part)
        if target is None and not checked:
            return 0
        direct = target is not None and part == slab and self._native and target.flags.c_contiguous
        data = bytes_of(target) if direct else memory_pool.empty((size_of(slab) * dtype.itemsize,), np.uint8)
        read_into(file.descriptor, data, offset, file.path)
        if target is not None and part is not None and not direct:
            elements = data.view(dtype).reshape([end - begin for begin, end in slab])
            target[...] = (elements if self._native else _swapped(elements))[slices(part, slab)]
        return crc32c(data, value) if checked else 0

    def _fill(self, box: Box) -> None:
        if self._out is not None:
            self._out[slices(box, self._box)] = self._metadata.fill


def missing(path: str) -> ArgumentError:
    """Returns the error for a chunk without a file."""
    return ArgumentError(f"{path} is missing: the file of a chunk; restore an older checkpoint, or a copy of the file")


def _swapped(elements: HostArray) -> HostArray:
    """Returns elements in the other byte order; NumPy swaps the bytes of some dtypes only (not of bfloat16)."""
    size = elements.dtype.itemsize // (2 if elements.dtype.kind == "c" else 1)
    parts = elements.reshape(-1).view(np.uint8).reshape(-1, size)
    return np.ascontiguousarray(parts[:, ::-1]).reshape(-1).view(elements.dtype).reshape(elements.shape)


def _compare(value: int, stored: HostArray, path: str, what: str) -> None:
    expected = int.from_bytes(stored.tobytes(), "little")
    if value != expected:
        raise ArgumentError(
            f"{path} is damaged: {what} has the checksum {value:#010x}, and {expected:#010x} is stored; restore an "
            "older checkpoint, or a copy of the file"
        )
