"""Arrays and groups of zarr v3 in folders: outer chunks are written from pieces of host arrays, any box is read.

A hole, which other programs leave where all elements have the value ``fill_value``, is an error unless the caller asks
for its elements: arrays that this library writes have none, so that one is a file that was deleted.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardtensor.errors import ArgumentError
from shardtensor.files.ahead import HELD, ahead
from shardtensor.files.atomic import DISK, Disk, make_folder, naming, write_file
from shardtensor.files.box_reader import Reader, missing
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
)
from shardtensor.files.metadata import HOLE, MOST, ArrayMetadata, GroupMetadata, parse, text_of_array, text_of_group
from shardtensor.files.paths import check_name, opened, read_text
from shardtensor.host import memory_pool
from shardtensor.host.summation_order import HostArray
from shardtensor.host.units import counted

_SLAB = 1 << 20
"""The bytes of a slab that is written, which fit into a cache."""

_AHEAD = 1 << 22
"""The bytes of a chunk from which on a thread copies and checks elements while those before are written."""


# -- writing ---------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A file that was written.

    Attributes:
        key: its path below the folder of the array.
        nbytes: its size.
        crc32c: the checksum of a text; of a chunk, that of the checksums of its inner chunks, in C order. (The checksum
            of all of its bytes would not depend on them, since each checksum follows what it is of.)
    """

    key: str
    nbytes: int
    crc32c: int


def write_array(folder: str, metadata: ArrayMetadata, disk: Disk = DISK) -> Written:
    """Writes the ``zarr.json`` of an array, which one process does; the folder may exist.

    Raises:
        OSError: it cannot be written; the error has its name.
    """
    return _write_text(folder, text_of_array(metadata), disk)


def write_group(folder: str, attributes: Mapping[str, Any], disk: Disk = DISK) -> Written:
    """Writes the ``zarr.json`` of a group, which one process does; the folder may exist.

    Raises:
        OSError: it cannot be written; the error has its name.
    """
    return _write_text(folder, text_of_group(attributes), disk)


def _write_text(folder: str, text: bytes, disk: Disk) -> Written:
    make_folder(folder, disk)
    return Written("zarr.json", write_file(os.path.join(folder, "zarr.json"), [text], disk), crc32c(text))


def write_chunk(
    folder: str, metadata: ArrayMetadata, index: Shape, pieces: Sequence[tuple[Box, Any]], disk: Disk = DISK
) -> Written:
    """Writes and flushes the file of an outer chunk.

    Args:
        folder: the folder of the array.
        metadata: its metadata, as `array_metadata` gives it.
        index: the index of the chunk.
        pieces: boxes of the array with their elements, which together have each element of the chunk once; they may
            reach beyond it. Their elements are arrays, or objects that return arrays when slices and an ellipsis index
            them. Where an inner chunk is contiguous in one of them, it is written without a copy.
        disk: the operations on the file system.

    Raises:
        ArgumentError: the pieces lack elements of the chunk.
        OSError: the file exists, or cannot be written; the error has its name.
    """
    key = metadata.key(index)
    parent = folder
    for name in key.split("/")[:-1]:
        parent = os.path.join(parent, name)
        make_folder(parent, disk)
    encoder = _Encoder(metadata, index, pieces)
    path = os.path.join(folder, key)
    if math.prod(metadata.chunk) * metadata.dtype.itemsize < _AHEAD:
        nbytes = write_file(path, encoder.buffers(), disk)
    else:
        with ahead(encoder.buffers()) as buffers:
            nbytes = write_file(path, buffers, disk)
    return Written(key, nbytes, encoder.checksum)


@dataclass
class _Encoder:
    """Makes the bytes of an outer chunk, of which no copy is in memory but those of few slabs.

    A slab fits into a cache, so that its copy, its checksum and the write read the elements once from memory.
    """

    metadata: ArrayMetadata
    index: Shape
    pieces: Sequence[tuple[Box, Any]]
    sums: list[int] = field(default_factory=list)
    scratch: list[HostArray | None] = field(default_factory=lambda: [None] * HELD)

    def buffers(self) -> Generator[HostArray | bytes]:
        """Yields the bytes of the file, each part to be written before the next one is asked for."""
        metadata = self.metadata
        whole = chunk_box(self.index, metadata.chunk, metadata.shape)
        begin = tuple(i * c for i, c in zip(self.index, metadata.chunk, strict=True))
        for (one, _), (other, _) in itertools.combinations(self.pieces, 2):
            if (both := intersection(one, other)) is not None and intersection(both, whole) is not None:
                raise self._error(both)
        entries = np.full((math.prod(metadata.per_chunk), 2), HOLE, "<u8")
        offset = 0
        for number, position in enumerate(np.ndindex(*metadata.per_chunk)):
            starts = [b + p * i for b, p, i in zip(begin, position, metadata.inner, strict=True)]
            reach = tuple((s, s + i) for s, i in zip(starts, metadata.inner, strict=True))
            box = intersection(reach, whole)
            if box is None:  # It is beyond the end of the array.
                continue
            value = nbytes = 0
            for slab in slabs(reach, metadata.dtype.itemsize, _SLAB):
                data = bytes_of(self._elements(slab, intersection(slab, box)))
                value = crc32c(data, value)
                nbytes += data.size
                yield data
            entries[number] = offset, nbytes + 4
            offset += nbytes + 4
            self.sums.append(value)
            yield value.to_bytes(4, "little")
        if metadata.index is not None:
            table = bytes_of(entries)
            yield table
            yield crc32c(table).to_bytes(4, "little")

    @property
    def checksum(self) -> int:
        """The checksum of those of the inner chunks."""
        return crc32c(np.array(self.sums, "<u4"))

    def _elements(self, slab: Box, box: Box | None) -> HostArray:
        """Returns the elements of a slab, of which the array has those of ``box``, as a contiguous array."""
        dtype = self.metadata.dtype
        parts = [] if box is None else [
            (both, has, array) for has, array in self.pieces if (both := intersection(box, has)) is not None
        ]  # fmt: skip
        if sum(size_of(both) for both, _, _ in parts) != (0 if box is None else size_of(box)):
            raise self._error(box)
        if len(parts) == 1 and box == slab:
            both, has, array = parts[0]
            part: HostArray = array[slices(both, has)]
            if part.flags.c_contiguous and part.dtype == dtype:
                return part
        size = size_of(slab)
        memory = self.scratch.pop(0)
        if memory is None or memory.size < size:
            memory = np.empty(size, dtype)
        self.scratch.append(memory)
        elements = memory[:size].reshape([end - begin for begin, end in slab])
        if box != slab:
            bytes_of(elements)[:] = 0
        for both, has, array in parts:
            elements[slices(both, slab)] = array[slices(both, has)]
        return elements

    def _error(self, box: Box | None) -> ArgumentError:
        return ArgumentError(
            f"chunk {self.index} of an array of shape {self.metadata.shape}: the pieces do not have each element of "
            f"{box} once"
        )


# -- reading ---------------------------------------------------------------------------------------


def open_node(folder: str) -> ZarrArray | GroupMetadata:
    """Opens an array, or returns the attributes of a group.

    Raises:
        ArgumentError: its metadata is broken.
        ArgumentTypeError: it has what is not read.
        OSError: it cannot be read; the error has the name of the file.
    """
    node = parse(read_text(folder, "zarr.json", MOST), os.path.join(folder, "zarr.json"))
    return ZarrArray(folder, node) if isinstance(node, ArrayMetadata) else node


def open_child(folder: str, path: str) -> ZarrArray | GroupMetadata:
    """Opens a node below a group by its path of names, which ``/`` separates. Links are not followed.

    Raises:
        ArgumentError: the path climbs or has links, or the metadata is broken.
        ArgumentTypeError: it has what is not read.
        OSError: it cannot be read; the error has the name of the file.
    """
    for name in path.split("/"):
        check_name(name, folder)
    node = parse(read_text(folder, f"{path}/zarr.json", MOST), os.path.join(folder, path, "zarr.json"))
    return ZarrArray(folder, node, f"{path}/") if isinstance(node, ArrayMetadata) else node


def children(folder: str) -> list[str]:
    """Returns the names of the arrays and groups in a group, in order; links are passed over.

    Raises:
        OSError: the folder cannot be read.
    """
    with naming(folder), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(name for name in names if os.path.isfile(os.path.join(folder, name, "zarr.json")))


@dataclass(frozen=True)
class ZarrArray:
    """An array in a folder.

    Attributes:
        root: the folder from which on links are not followed.
        metadata: its metadata.
        prefix: the path of the array below the root, with ``/`` at its end if it is not empty.
        sums: the checksums (see `Written`) that files have by their keys; None if they are not known.
    """

    root: str
    metadata: ArrayMetadata
    prefix: str = ""
    sums: Mapping[str, int] | None = None

    def read(self, box: Box | None = None, out: HostArray | None = None, *, filled: bool = False) -> HostArray:
        """Reads the elements of a box; of files, it reads the inner chunks that have some, and checks their sums.

        Args:
            box: a pair of begin and end for each dimension; by default, the whole array.
            out: an array of the shape of the box, into which they are read.
            filled: whether holes have the element ``fill_value``; otherwise they are an error.

        Raises:
            ArgumentError: a file is broken or missing, or a checksum differs; the error names the file.
            DeviceMemoryError: the host has not enough memory.
            OSError: a file cannot be read; the error has its name.
        """
        metadata = self.metadata
        box = tuple((0, n) for n in metadata.shape) if box is None else box
        if not all(0 <= b <= e <= n for (b, e), n in zip(box, metadata.shape, strict=True)):
            raise ArgumentError(f"{self._path('')}: the box {box} is not in an array of shape {metadata.shape}")
        if not filled:
            self.check_sizes(box)
        shape = tuple(e - b for b, e in box)
        if out is None:
            try:
                memory_pool.reserve(size_of(box) * metadata.dtype.itemsize)
                out = np.empty(shape, metadata.dtype)
            except MemoryError as error:
                raise memory_pool.out_of_memory(self._path(""), error) from None
        elif out.shape != shape or out.dtype != metadata.dtype:
            raise ArgumentError(f"out has shape {out.shape} and dtype {out.dtype}; wanted {shape}, {metadata.dtype}")
        elif not out.flags.writeable:
            raise ArgumentError("out is read-only; wanted an array that can be written")
        Reader(self.root, self.prefix, metadata, box, out, filled, self.sums).read()
        return out

    def verify(self, index: Shape, *, filled: bool = False) -> None:
        """Checks all sums of an outer chunk, with the memory of a slab for each thread.

        Raises:
            ArgumentError: the file is broken or missing, or a checksum differs; the error names the file.
            OSError: it cannot be read; the error has its name.
        """
        box = chunk_box(index, self.metadata.chunk, self.metadata.shape)
        Reader(self.root, self.prefix, self.metadata, box, None, filled, self.sums).read()

    def chunks(self) -> Iterable[Shape]:
        """Returns the indices of all outer chunks, in C order."""
        return chunks_of(tuple((0, n) for n in self.metadata.shape), self.metadata.chunk)

    def _path(self, key: str) -> str:
        return os.path.join(self.root, self.prefix + key)

    def check_sizes(self, box: Box) -> None:
        """Checks that files have as many bytes as the elements of a box need, before memory is allocated for these."""
        metadata = self.metadata
        for index in chunks_of(box, metadata.chunk):
            key = metadata.key(index)
            try:
                with opened(self.root, self.prefix + key) as descriptor:
                    size = os.fstat(descriptor).st_size
            except FileNotFoundError:
                raise missing(self._path(key)) from None
            part = intersection(box, chunk_box(index, metadata.chunk, metadata.shape))
            assert part is not None
            count = count_of_chunks(part, metadata.inner)
            least = metadata.index_nbytes + count * (metadata.inner_nbytes + 4 * metadata.elements.checked)
            if size < least:
                raise ArgumentError(
                    f"{self._path(key)} is truncated: it has {counted(size, 'byte')}; wanted at least {least}"
                )
