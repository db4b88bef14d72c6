"""NumPy's files, .npy and .npz, without pickles: `save`, `savez`, `savez_compressed` and `load`.

Arrays are written one block of rows after the other, so that the host never holds a second copy of the whole array. A
file is written beside its path and renamed at the end: a process that is stopped leaves what the path had before.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, TypeAlias

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.small_floats import is_small_float
from shardtensor.core import call
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.sharding.layout import Shape, Where
from shardtensor.tensor.nested_lists import from_lists
from shardtensor.tensor.operands import as_operand, dtype_of, sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_npy = np.lib.format

File: TypeAlias = "str | os.PathLike[str] | IO[bytes]"

_BLOCK = 1 << 24
"""The bytes of a block that is written at once."""


# -- writing ---------------------------------------------------------------------------------------


def save(file: File, arr: ArrayLike) -> None:
    """Writes an array to a file in NumPy's format .npy, which has its dtype, its shape and its elements, no sharding.

    Args:
        file: a path, to which ".npy" is appended if it does not end with it, or a file that is open for writing bytes.
        arr: a tensor, an array, a scalar, or nested lists of scalars.

    Raises:
        ArgumentTypeError: ``arr`` holds Python objects, which only pickles store.
        OSError: the file cannot be written.

    >>> st.save(io := __import__("io").BytesIO(), st.arange(3))
    >>> np.load(__import__("io").BytesIO(io.getvalue()))
    array([0, 1, 2])
    """
    x = _storable(arr, "save")
    with _opened(file, ".npy") as stream:
        _write(stream, x)


def savez(file: File, *args: ArrayLike, **kwds: ArrayLike) -> None:
    """Writes arrays to a file in NumPy's format .npz: an archive of .npy files, which `load` reads without copying
    them first.

    Args:
        file: a path, to which ".npz" is appended if it does not end with it, or a file that is open for writing bytes.
        args: arrays, as those of `save`, that are called ``arr_0``, ``arr_1``, ...
        kwds: arrays by their names.

    Raises:
        ArgumentError: a name occurs twice.
        ArgumentTypeError, OSError: see `save`.

    >>> st.savez(io := __import__("io").BytesIO(), st.arange(3), b=st.ones(2))
    >>> sorted(np.load(__import__("io").BytesIO(io.getvalue())))
    ['arr_0', 'b']
    """
    _write_archive(file, args, kwds, "savez", zipfile.ZIP_STORED)


def savez_compressed(file: File, *args: ArrayLike, **kwds: ArrayLike) -> None:
    """Writes arrays to a compressed file in NumPy's format .npz: see `savez`.

    >>> st.savez_compressed(io := __import__("io").BytesIO(), x=st.arange(3))
    >>> np.load(__import__("io").BytesIO(io.getvalue()))["x"]
    array([0, 1, 2])
    """
    _write_archive(file, args, kwds, "savez_compressed", zipfile.ZIP_DEFLATED)


def _write_archive(file: File, args: tuple[Any, ...], named: Mapping[str, Any], caller: str, compression: int) -> None:
    arrays = {f"arr_{k}": x for k, x in enumerate(args)}
    if twice := sorted(arrays.keys() & named.keys()):
        raise ArgumentError(f"{caller}: {twice[0]} is the name of an array without one, too; wanted another name")
    known = {name: _storable(x, caller) for name, x in (arrays | dict(named)).items()}
    with _opened(file, ".npz") as stream, zipfile.ZipFile(stream, "w", compression, allowZip64=True) as archive:
        for name, x in known.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write(member, x)


def _storable(x: Any, caller: str) -> Any:
    """Returns an array as a tensor or a host array.

    Raises:
        ArgumentTypeError: it holds Python objects, text or records, or a dtype that NumPy lacks.
    """
    found = from_lists(x, caller) if isinstance(x, (list, tuple)) else as_operand(x, caller)
    found = found if isinstance(found, ShardedTensor) else np.asarray(found)
    if is_small_float(dtype_of(found)):
        bits = f"int{8 * dtype_of(found).itemsize}"
        raise ArgumentTypeError(f"{caller}: NumPy's files have no {dtype_of(found)}; write x.view({bits!r}), its bits")
    try:
        sharded_dtype(dtype_of(found))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{caller}: {error}; pickles, which store objects, are not written") from None
    return found


def _write(stream: IO[bytes], x: Any) -> None:
    header = {"descr": _npy.dtype_to_descr(x.dtype), "fortran_order": False, "shape": tuple(x.shape)}
    _npy.write_array_header_1_0(stream, header)
    write_elements(stream, x)


def write_elements(file: File, x: Any) -> None:
    """Writes the bytes of the elements of a tensor or host array in row-major order, one block after the other."""
    with _opened(file, "") as stream:
        for index in _blocks(x.shape, x.dtype.itemsize):
            block = call("to_host", x, index=index) if isinstance(x, ShardedTensor) else x[index]
            stream.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)


def _blocks(shape: Shape, itemsize: int) -> Iterator[tuple[Any, ...]]:
    """Yields basic indices that select an array in row-major order, in parts of at most `_BLOCK` bytes."""
    if 0 in shape:
        return
    split = 0
    while split < len(shape) - 1 and math.prod(shape[split + 1 :]) * itemsize > _BLOCK:
        split += 1
    if not shape:
        yield ()
        return
    rows = max(_BLOCK // (math.prod(shape[split + 1 :]) * itemsize), 1)
    for outer in itertools.product(*map(range, shape[:split])):
        for start in range(0, shape[split], rows):
            yield (*outer, slice(start, start + rows))


@contextlib.contextmanager
def _opened(file: File, suffix: str) -> Iterator[IO[bytes]]:
    """Opens a file for writing: a new one beside a path, which replaces it at the end unless there is an error."""
    if not isinstance(file, (str, os.PathLike)):
        yield file
        return
    path = os.fspath(file)
    path = path if path.endswith(suffix) else path + suffix
    beside = f"{path}.{uuid.uuid4().hex}.part"
    try:
        with open(beside, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except BaseException:  # Also of Ctrl-C, which passes on: only the unfinished file is removed.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise


# -- reading ---------------------------------------------------------------------------------------


class NpzFile(Mapping[str, ShardedTensor]):
    """An open .npz file: a mapping from names to tensors, which are read when they are looked up.

    It is a context manager that closes the file. Every look-up reads the array anew.

    Attributes:
        files: the names of the arrays.
    """

    def __init__(self, file: Any, device: Where | None) -> None:
        self._path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else None
        self._archive = zipfile.ZipFile(file)
        self._device = device
        self.files = [name.removesuffix(".npy") for name in self._archive.namelist()]

    def __getitem__(self, name: str) -> ShardedTensor:
        if name not in self.files:
            raise KeyError(f"{name!r} is no array of the file; it has {', '.join(self.files)}")
        info = self._archive.getinfo(f"{name}.npy")
        with self._archive.open(info) as member:
            if self._path is not None and info.compress_type == zipfile.ZIP_STORED:
                array = _mapped(self._path, member, _begin(self._path, info), info.file_size, name)
            else:
                array = _read(member, name)
        return _placed(array, self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._archive.close()


def load(file: File, *, device: Where | None = None) -> ShardedTensor | NpzFile:
    """Reads a file in NumPy's formats .npy or .npz.

    An array in a file at a path, unless it is compressed, is mapped into memory, and each device reads its part only.

    Args:
        file: a path, or a file that is open for reading bytes, which is read as a whole.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.creation`) for the arrays; by default
            they are sharded over the default mesh, and not committed.

    Returns:
        The tensor; for a .npz file a mapping from names to tensors, which is a context manager: see `NpzFile`.

    Raises:
        ArgumentError: the file has another format, or is truncated.
        ArgumentTypeError: an array holds Python objects, text or records.
        OSError: the file cannot be read.

    >>> np.save(io := __import__("io").BytesIO(), np.arange(3))
    >>> io.seek(0), st.load(io).tolist()
    (0, [0, 1, 2])
    """
    if not isinstance(file, (str, os.PathLike)):
        start = file.tell()
        archive = zipfile.is_zipfile(file)
        file.seek(start)
        return NpzFile(file, device) if archive else _placed(_read(file, "file"), device)
    path = os.fspath(file)
    with open(path, "rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            stream.seek(0)
            return _placed(_mapped(path, stream, 0, os.path.getsize(path), path), device)
    try:
        return NpzFile(path, device)
    except zipfile.BadZipFile as error:
        raise ArgumentError(f"load: {path} is a broken .npz file: {error}") from None


def _placed(array: HostArray, device: Where | None) -> ShardedTensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return call("asarray", native, device=device)  # type: ignore[no-any-return]


def _header(stream: IO[bytes], name: str) -> tuple[Shape, bool, np.dtype[Any]]:
    """Reads the header of a .npy file: the shape, whether the elements are in column-major order, and the dtype.

    Raises:
        ArgumentError: it is none.
        ArgumentTypeError: tensors cannot have the dtype.
    """
    try:
        version = _npy.read_magic(stream)
        read = _npy.read_array_header_1_0 if version == (1, 0) else _npy.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except ValueError as error:
        raise ArgumentError(f"load: {name} is no .npy or .npz file, or a broken one: {error}") from None
    try:
        sharded_dtype(dtype)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"load: {name}: {error}; pickles are not read") from None
    return shape, fortran, dtype


def _mapped(path: str, stream: IO[bytes], begin: int, size: int, name: str) -> HostArray:
    """Maps an array of a file into memory.

    Args:
        path: the path of the file.
        stream: the .npy file in it.
        begin, size: where that begins in the file, and its bytes.
        name: what errors call it.

    Raises:
        ArgumentError: the file is truncated.
    """
    shape, fortran, dtype = _header(stream, name)
    offset = stream.tell()
    if size - offset < math.prod(shape) * dtype.itemsize:
        raise ArgumentError(f"load: {name} is truncated: it has {size} bytes, too few for {dtype} of shape {shape}")
    if 0 in shape:
        return np.empty(shape, dtype)
    mapped = np.memmap(path, dtype, "r", begin + offset, shape, "F" if fortran else "C")
    return np.asarray(mapped)


def _begin(path: str, info: zipfile.ZipInfo) -> int:
    """Returns where a stored member of an archive begins: after its local header, whose lengths may differ from those
    of the directory.
    """
    with open(path, "rb") as stream:
        stream.seek(info.header_offset + 26)
        name, extra = int.from_bytes(stream.read(2), "little"), int.from_bytes(stream.read(2), "little")
    return info.header_offset + 30 + name + extra


def _read(stream: IO[bytes], name: str) -> HostArray:
    """Reads an array that cannot be mapped.

    Raises:
        ArgumentError: the file is truncated.
    """
    shape, fortran, dtype = _header(stream, name)
    wanted = math.prod(shape) * dtype.itemsize
    array, got = np.empty(wanted, np.uint8), 0
    while got < wanted:
        part = stream.read(min(wanted - got, _BLOCK))
        if not part:
            raise ArgumentError(f"load: {name} is truncated: {wanted - got} of {wanted} bytes are missing")
        array[got : got + len(part)] = np.frombuffer(part, np.uint8)
        got += len(part)
    return array.view(dtype).reshape(shape, order="F" if fortran else "C")
