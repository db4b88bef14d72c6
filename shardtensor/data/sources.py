"""Sources of rows: arrays, tensors, files, and objects that return one item for each number.

A source has the rows of one array or, if its items are trees, of several. It is read once for each batch.
"""

from __future__ import annotations

import abc
import os
import stat
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HostArray
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardTensorError, type_text
from shardtensor.files.array_files import NpzFile, is_archive, open_at_once
from shardtensor.files.byte_ranges import read_runs
from shardtensor.files.checksums import bytes_of
from shardtensor.files.npy_files import read_elements, read_header
from shardtensor.files.paths import read_into
from shardtensor.files.safetensors_files import entries_of
from shardtensor.files.zarr import ZarrArray, open_child, open_node
from shardtensor.files.zarr_folders import ZarrGroup
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.pytree import form_of, leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor

Numbers = npt.NDArray[np.int64]


class Kind(NamedTuple):
    """The shape of a row of an array, and its dtype in the byte order of the machine."""

    shape: Shape
    dtype: np.dtype[Any]


class Source:
    """Rows that belong together.

    Attributes:
        rows: their number.
        kinds: the kind of each array that has them.
        form: a pytree with one leaf for each of these arrays.
    """

    form: Any = 0

    def __init__(self, rows: int, *kinds: Kind) -> None:
        self.rows, self.kinds = rows, kinds


class TensorRows(Source):
    """A tensor, whose rows its devices transfer when a batch is handed out: they are not read ahead."""

    def __init__(self, x: ShardedTensor) -> None:
        super().__init__(_rows_of(x.shape), Kind(x.shape[1:], x.dtype))
        self.x = x


class ReadRows(Source, abc.ABC):
    """Rows that are read into host arrays."""

    def gather(self, rows: Numbers, outs: Sequence[HostArray]) -> None:
        """Reads rows in any order, each of which occurs once, into an array of each kind."""
        order = np.argsort(rows)
        if np.array_equal(rows, ordered := rows[order]):
            self.read(ordered, outs)
            return
        parts = [np.empty_like(out) for out in outs]
        self.read(ordered, parts)
        for out, part in zip(outs, parts, strict=True):
            out[order] = part

    @abc.abstractmethod
    def read(self, rows: Numbers, outs: Sequence[HostArray]) -> None:
        """Reads rows in ascending order."""


class ArrayRows(ReadRows):
    """An array of any library that has slices and takes arrays of indices, such as those of NumPy, HDF5 or zarr."""

    def __init__(self, x: Any) -> None:
        rows = _rows_of(x.shape)
        kind = _kind(np.asarray(x[:0]))
        super().__init__(rows, kind)
        self.x = x
        self._is_numpy = isinstance(x, np.ndarray)
        # `np.take` would first copy all elements of an array of another layout.
        self._takes = self._is_numpy and x.flags.c_contiguous and x.flags.aligned and x.dtype == kind.dtype

    def gather(self, rows: Numbers, outs: Sequence[HostArray]) -> None:
        """Reads rows in any order."""
        # Sorted rows are faster only where they are not in memory.
        if self._is_numpy and not isinstance(self.x, np.memmap):
            self.read(rows, outs)
        else:
            super().gather(rows, outs)

    def read(self, rows: Numbers, outs: Sequence[HostArray]) -> None:
        """Reads rows in ascending order."""
        (out,) = outs
        if is_run(rows):
            out[...] = np.asarray(self.x[int(rows[0]) : int(rows[-1]) + 1])
        elif self._takes:
            np.take(self.x, rows, axis=0, out=out, mode="clip")  # The mode "raise" would write by way of a copy.
        else:
            out[...] = np.asarray(self.x[rows])


class FileRows(ReadRows):
    """An array in row-major order in a file, which stays open."""

    def __init__(self, path: str, dtype: np.dtype[Any], shape: Shape, start: int) -> None:
        super().__init__(_rows_of(shape), Kind(shape[1:], dtype.newbyteorder("=")))
        self._path, self._start, self._is_native = path, start, dtype.isnative
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def read(self, rows: Numbers, outs: Sequence[HostArray]) -> None:
        """Reads rows in ascending order."""
        (out,) = outs
        memory = bytes_of(out)
        nbytes = memory.size // len(rows)
        if is_run(rows):
            read_into(self._file, memory, self._start + int(rows[0]) * nbytes, self._path)
        else:
            read_runs(self._file, self._path, self._start, rows * nbytes, nbytes, memory)
        if not self._is_native:
            out.byteswap(inplace=True)


class ZarrRows(ReadRows):
    """An array in a folder, of whose inner chunks each is read once for a batch."""

    def __init__(self, array: ZarrArray) -> None:
        metadata = array.metadata
        super().__init__(_rows_of(metadata.shape), Kind(metadata.shape[1:], metadata.dtype))
        self._array = array

    def read(self, rows: Numbers, outs: Sequence[HostArray]) -> None:
        """Reads rows in ascending order."""
        (out,) = outs
        rest = [(0, n) for n in self.kinds[0].shape]
        chunks = rows[:1] if is_run(rows) else rows // self._array.metadata.inner[0]
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(chunks)) + 1):
            first, last = int(rows[part[0]]), int(rows[part[-1]]) + 1
            if last - first == len(part):
                self._array.read(((first, last), *rest), out[part[0] : part[-1] + 1], filled=True)
            else:
                out[part] = self._array.read(((first, last), *rest), filled=True)[rows[part] - first]


class ItemRows(ReadRows):
    """An object that returns an item, an array or a pytree of arrays, for each number below its length.

    One with a method ``__getitems__``, as in PyTorch, gets the numbers of a batch in one list.
    """

    def __init__(self, x: Any) -> None:
        if not len(x):
            raise ArgumentError("it has no rows: its length is 0")
        self._x, self._many = x, getattr(x, "__getitems__", None)
        self.form = x[0]
        super().__init__(len(x), *[_kind(np.asarray(leaf), 0) for leaf in leaves(self.form)])
        self._form = form_of(self.form)

    def read(self, rows: Numbers, outs: Sequence[HostArray]) -> None:
        """Reads rows in ascending order."""
        numbers = rows.tolist()
        items = self._many(numbers) if self._many is not None else [self._x[row] for row in numbers]
        if len(items) != len(numbers):
            raise ArgumentError(
                f"__getitems__ returned {counted(len(items), 'item')} for {counted(len(numbers), 'row')}"
            )
        for n, (row, item) in enumerate(zip(numbers, items, strict=True)):
            if form_of(item) != self._form:
                raise ArgumentError(f"row {row} is {item!r:.60}; wanted the structure of row 0, {self.form!r:.60}")
            for part, out in zip(leaves(item), outs, strict=True):
                array = np.asarray(part)
                if array.shape != out.shape[1:] or not np.can_cast(array.dtype, out.dtype):
                    raise ArgumentError(
                        f"row {row} has shape {array.shape} and dtype {array.dtype}; wanted those of row 0, "
                        f"{out.shape[1:]} and {out.dtype}"
                    )
                out[n] = array


def _rows_of(shape: Sequence[int]) -> int:
    if 0 in shape[:1] or not shape:
        raise ArgumentError(f"it has no rows: its shape is {tuple(shape)}")
    return shape[0]


def is_run(rows: Numbers) -> bool:
    """Whether rows follow each other."""
    return bool(rows[-1] - rows[0] == len(rows) - 1 and np.all(np.diff(rows) == 1))


def _kind(array: HostArray, first: int = 1) -> Kind:
    return Kind(array.shape[first:], sharded_dtype(array.dtype).newbyteorder("="))


# -- arguments of users ----------------------------------------------------------------------------


def sources_of(tree: Any, caller: str) -> Any:
    """Returns the pytree of sources for a pytree of arrays, tensors, paths and objects with items.

    Raises:
        ArgumentTypeError: a leaf is none of these, or has a dtype that tensors lack.
        ArgumentError: a source has no rows, two have different numbers of rows, or a file is broken.
        OSError: a file cannot be read.
    """
    found = []
    for path, leaf in zip(paths(tree, "source"), leaves(tree), strict=True):
        try:
            found.append(_opened(leaf))
        except ShardTensorError as error:
            raise type(error)(f"{caller}: {path}: {str(error).removeprefix('load: ')}") from None
    sources = replaced(tree, found)
    lengths = dict(zip(paths(sources, "source"), [source.rows for source in leaves(sources)], strict=True))
    if len({*lengths.values()}) != 1:
        text = ", ".join(f"{path} has {rows}" for path, rows in lengths.items()) or "there is none"
        raise ArgumentError(f"{caller}: wanted sources with the same number of rows: {text}")
    return sources


def _opened(x: Any) -> Any:
    """Returns the source that a leaf is, or a dict of the sources in it."""
    if isinstance(x, (str, os.PathLike)):
        return _of_path(os.fspath(x))
    if isinstance(x, Mapping):
        return {name: _opened(array) for name, array in x.items()}
    if hasattr(x, "iloc"):
        raise ArgumentTypeError(f"it is {type_text(x)}, whose indices are labels; write x.to_numpy()")
    is_array = hasattr(x, "shape") and hasattr(x, "dtype")
    if not hasattr(x, "__getitem__") or not (is_array or hasattr(x, "__len__")):
        raise ArgumentTypeError(
            f"it is {type_text(x)}; wanted an array, a tensor, a path, or an object with __len__ and __getitem__"
        )
    return TensorRows(x) if isinstance(x, ShardedTensor) else ArrayRows(x) if is_array else ItemRows(x)


def _of_path(path: str) -> Any:
    """Returns the sources in a file or a folder."""
    if os.path.lexists(os.path.join(path, "zarr.json")):
        node = open_node(path)
        if isinstance(node, ZarrArray):
            return ZarrRows(node)
        nodes = {name: open_child(path, name) for name in ZarrGroup(path, node, None).files}
        return {name: ZarrRows(child) for name, child in nodes.items() if isinstance(child, ZarrArray)}
    if os.path.isdir(path) or path.endswith((".safetensors", ".safetensors.index.json")):
        return {
            name: FileRows(file, *entry)
            for file, entries in entries_of(path, "load").items()
            for name, entry in entries.items()
        }
    with open(path, "rb", buffering=0, opener=open_at_once) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ArgumentError(f"{path} is not a regular file")
        if is_archive(stream.read(4)):
            with NpzFile(path, None, path) as archive:
                return {name: _opened(archive.elements(name)) for name in archive.files}
        stream.seek(0)
        header = read_header(stream, path, status.st_size)
        if header.fortran:  # Its rows are not contiguous.
            return _opened(read_elements(stream, header, path))
        return FileRows(path, header.dtype, header.shape, header.length)
