"""NumPy's files, .npy and .npz, without pickles: `save`, `savez`, `savez_compressed` and `load`.

Arrays are written one block of rows after the other, so that the host never holds a second copy of the whole array. A
file is written under another name and renamed at the end: a process that is stopped leaves what the path had before.
A tensor of which no process has all elements is written by all processes: see `joint_writes`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, TypeAlias

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.registry import backend_of, is_remote, process_index
from shardtensor.core import call, hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.files import npy_files
from shardtensor.files.byte_ranges import read_box
from shardtensor.files.chunk_grids import Box
from shardtensor.files.joint_writes import Placed, Writers, check_path, collected, is_scattered, write_jointly
from shardtensor.files.npy_files import broken_as_error, read_elements, read_header
from shardtensor.files.tensor_reads import NamedArrays, tensor_from
from shardtensor.files.zarr_folders import ZarrGroup, load_folder
from shardtensor.host.replacement import is_special, replaced
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Where, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.nested_lists import from_lists
from shardtensor.tensor.operands import as_operand, dtype_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

File: TypeAlias = "str | os.PathLike[str] | IO[bytes]"


# -- writing ---------------------------------------------------------------------------------------


@hinted
def save(file: File, arr: ArrayLike) -> None:
    """Writes an array to a file in NumPy's format .npy, which has its dtype, its shape and its elements, no sharding.

    A file at the path is replaced at the end, so that an error leaves it as it was. It keeps its owner, group, mode,
    access control list and the symbolic links that lead to it; other hard links keep the old contents. Where its folder
    permits no new files, or this user cannot give a file that owner or group, the old file itself is written, and an
    error leaves it incomplete.

    A tensor of which no process has all elements is written by all processes of the job: they call this with the same
    path, on a file system that they share, and each writes its part of the file. An error in one of them is an error in
    all of them.

    Args:
        file: a path, to which ".npy" is appended if it does not end with it and is not that of a device or a pipe, or a
            file that is open for writing bytes.
        arr: a tensor, an array, a scalar, or nested lists of scalars.

    Raises:
        ArgumentTypeError: ``arr`` holds Python objects, which only pickles store, or ``file`` is neither a path nor a
            file that is open for writing bytes.
        ArgumentError: ``file`` is closed, or no file can have that path, or a process does not see the file that
            process 0 has made.
        NotAddressableError: no process has all elements of ``arr``, and ``file`` is an open file.
        OSError: the file cannot be written.

    >>> st.save(io := __import__("io").BytesIO(), st.arange(3))
    >>> np.load(__import__("io").BytesIO(io.getvalue()))
    array([0, 1, 2])
    """
    if isinstance(arr, (str, os.PathLike)) and not isinstance(file, (str, os.PathLike)):
        raise ArgumentTypeError(f"save: arr is the path {arr!r:.60}; the file comes first: st.save({arr!r:.60}, x)")
    x = _storable(arr, "save")
    if is_scattered(x):
        npy_files.write_header(header := io.BytesIO(), x.shape, x.dtype)
        _write_scattered(file, ".npy", header.getvalue(), x, "save")
        return
    with _opened(file, ".npy", "save") as stream:
        _write(stream, x)


def savez(file: File, *args: ArrayLike, **kwds: ArrayLike) -> None:
    """Writes arrays to a file in NumPy's format .npz: an archive of .npy files, each with a checksum.

    Where no process has all elements of one of them, all processes call this, as `save`. Process 0 writes the archive,
    and gets the elements block by block from the others.

    Args:
        file: a path, to which ".npz" is appended, or a file, as those of `save`.
        args: arrays, as those of `save`, that are called ``arr_0``, ``arr_1``, ...
        kwds: arrays by their names.

    Raises:
        ArgumentError: a name occurs twice, or archives cannot have it.
        ArgumentTypeError, NotAddressableError, OSError: see `save`.

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
    for name in named:
        _check_name(name, caller)
    known = {name: _storable(x, caller) for name, x in (arrays | dict(named)).items()}
    if any(map(is_scattered, known.values())):
        path = check_path(_path_of(file, ".npz", caller), caller)
        writers = Writers(caller, path, list(known.values()))
        with writers.together():
            if process_index() == 0:
                with _archive(path, caller, compression) as archive:
                    _write_members(archive, known, lambda x: collected(x, writers, caller))
            else:
                for x in known.values():
                    for _ in collected(x, writers, caller):
                        pass
        return
    with _archive(file, caller, compression) as archive:
        _write_members(archive, known, _blocks)


@contextlib.contextmanager
def _archive(file: File, caller: str, compression: int) -> Iterator[zipfile.ZipFile]:
    with _opened(file, ".npz", caller) as stream, zipfile.ZipFile(stream, "w", compression, allowZip64=True) as archive:
        yield archive


def _write_members(
    archive: zipfile.ZipFile, arrays: Mapping[str, Any], blocks: Callable[[Any], Iterable[HostArray | None]]
) -> None:
    for name, x in arrays.items():
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
            npy_files.write_header(member, x.shape, x.dtype)
            for block in blocks(x):
                member.write(_bytes_of(block))


def _check_name(name: str, caller: str) -> None:
    """Checks that an array in an archive can have a name: archives end names at NUL, and store them as UTF-8.

    Raises:
        ArgumentError: it cannot.
    """
    encoded = name.encode(errors="replace")
    if "\0" in name or encoded != name.encode(errors="surrogatepass") or len(encoded) > 65_000:
        raise ArgumentError(
            f"{caller}: {name!r:.60} is the name of an array; wanted text without NUL and surrogates, of at most "
            "65,000 bytes"
        )


def _storable(x: Any, caller: str) -> Any:
    """Returns an array as a tensor or a host array.

    Raises:
        ArgumentTypeError: it holds Python objects, text or records, or a dtype that NumPy lacks.
    """
    array = as_array(x, caller)
    npy_files.check_dtype(dtype_of(array), caller)
    return array


def as_array(x: Any, caller: str) -> Any:
    """Returns an array, a scalar or nested lists as a tensor or a host array."""
    array = from_lists(x, caller) if isinstance(x, (list, tuple)) else as_operand(x, caller)
    return array if isinstance(array, ShardedTensor) else np.asarray(array)


def _write(stream: IO[bytes], x: Any) -> None:
    npy_files.write_header(stream, x.shape, x.dtype)
    write_elements(stream, x)


def write_elements(file: File, x: Any) -> None:
    """Writes the bytes of the elements of a tensor or host array in row-major order, one block after the other."""
    if is_scattered(x):
        _write_scattered(file, "", b"", x, "tofile")
        return
    with _opened(file, "", "tofile") as stream:
        for block in _blocks(x):
            stream.write(_bytes_of(block))


def _write_scattered(file: File, suffix: str, header: bytes, x: ShardedTensor, caller: str) -> None:
    path = check_path(_path_of(file, suffix, caller), caller)
    write_jointly(path, header, len(header) + x.nbytes, [Placed(len(header), x)], caller)


def _blocks(x: Any) -> Iterator[HostArray]:
    for index in npy_files.blocks(x.shape, x.dtype.itemsize):
        yield call("to_host", x, index=index) if isinstance(x, ShardedTensor) else x[index]


def _bytes_of(block: Any) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def _opened(file: File, suffix: str, caller: str) -> Iterator[IO[bytes]]:
    """Opens a file for writing: one that replaces the one at a path at the end unless there is an error.

    Raises:
        ArgumentTypeError, ArgumentError: it is neither a path nor a file that is open for writing bytes.
    """
    path = _path_of(file, suffix, caller)
    if path is not None:
        with replaced(path) as stream:
            yield stream
    elif isinstance(file, io.RawIOBase):
        yield _WholeWrites(file)  # type: ignore[misc]
    else:
        yield file  # type: ignore[misc]


class _WholeWrites:
    """An unbuffered file, each of whose writes may write fewer bytes than it is given: before the disk is full, too."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        """Writes all bytes."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            count = self._file.write(rest)
            if count is None:
                raise BlockingIOError(errno.EAGAIN, "the file is not blocking, and accepts no bytes now")
            rest = rest[count:]
        return size


def _path_of(file: Any, suffix: str, caller: str) -> str | None:
    """Returns the path of a file that is written, with its suffix; None if it is one that is open for writing bytes.

    Raises:
        ArgumentTypeError, ArgumentError: it is neither.
    """
    path = path_of(file, caller, "write")
    return path if path is None or path.endswith(suffix) or is_special(path) else path + suffix


def path_of(file: Any, caller: str, *methods: str) -> str | None:
    """Returns the path that ``file`` is; None if it is a file that is open for bytes, and has these methods.

    Raises:
        ArgumentTypeError, ArgumentError: it is neither.
    """
    path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else None
    if isinstance(path, str):
        try:
            if b"\0" not in os.fsencode(path):
                return path
        except UnicodeEncodeError:
            pass
        raise ArgumentError(f"{caller}: file is {path!r:.60}; wanted a path without NUL and surrogates")
    if (
        path is not None
        or isinstance(file, io.TextIOBase)
        or not all(callable(getattr(file, m, None)) for m in methods)
    ):
        raise ArgumentTypeError(
            f"{caller}: file is {file!r:.60}, {type_text(file)}; wanted a path as text or a pathlib.Path, or a "
            f"file that is open for bytes, with {', '.join(methods)}"
        )
    if getattr(file, "closed", False) is True:
        raise ArgumentError(f"{caller}: file is {file!r:.60}, which is closed; wanted an open file")
    return None


# -- reading ---------------------------------------------------------------------------------------


class NpzFile(NamedArrays):
    """An open .npz file: a mapping from names to tensors, which are read when they are looked up.

    It is a context manager that closes the file. Every look-up reads the array anew, as a whole, and compares its
    checksum. If two arrays have a name, the last one counts, as in NumPy.

    Attributes:
        files: the names of the arrays.
    """

    def __init__(self, file: Any, device: Where | None, name: str = "file") -> None:
        with broken_as_error(name):
            self._archive = zipfile.ZipFile(file)
        self._device = device
        self._members = {info.filename.removesuffix(".npy"): info for info in self._archive.infolist()}
        super().__init__(name, self._members)

    def _read(self, name: str) -> ShardedTensor:
        return _placed(self.elements(name), self._device)

    def elements(self, name: str) -> HostArray:
        """Reads an array of that name as a host array."""
        info, label = self._members[name], f"{name!r} of {self._path}"
        with broken_as_error(label):
            _check_sizes(info, label)
            with self._archive.open(info) as member:
                header = read_header(member, label, info.file_size)
                if header.length + header.nbytes != info.file_size:
                    raise ArgumentError(
                        f"load: {label} has {counted(info.file_size, 'byte')}; wanted {header.length + header.nbytes}, "
                        f"those of {header.dtype} of shape {header.shape}"
                    )
                return read_elements(member, header, label)  # At the end of the member its checksum is compared.

    def close(self) -> None:
        """Closes the file."""
        self._archive.close()


def _check_sizes(info: zipfile.ZipInfo, name: str) -> None:
    """Checks that a member of an archive can have the size that the archive states, for which memory is allocated.

    Raises:
        ArgumentError: it cannot.
    """
    most = {zipfile.ZIP_STORED: info.compress_size, zipfile.ZIP_DEFLATED: 1032 * info.compress_size}
    if info.file_size > most.get(info.compress_type, info.file_size):
        raise ArgumentError(
            f"load: {name} is broken: {counted(info.file_size, 'byte')} cannot be stored in {info.compress_size} by "
            f"method {info.compress_type}"
        )


@hinted
def load(file: File, *, device: Where | None = None) -> ShardedTensor | NpzFile | ZarrGroup:
    """Reads a file in NumPy's formats .npy or .npz, or a folder in the format zarr v3. Pickles are never read.

    The sizes in the file are compared with its length before memory is allocated, and the checksums of a .npz file with
    its elements. The format .npy has no checksums: changed elements are not noticed.

    On devices of this process an array is read, not mapped: a file that another process truncates meanwhile is an
    error. On a mesh that spans processes, each process reads its part of a .npy file at a path only. Arrays of a .npz
    file are read as a whole in each process. Of a folder, each process reads the chunks that have its elements, and
    compares their checksums, where there are some; chunks must not be compressed.

    Args:
        file: a path of a regular file, or of a folder with an array or a group; or a file that is open for reading
            bytes, and can be positioned.
        device: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`) for the arrays; by
            default they are sharded over the default mesh, and not committed.

    Returns:
        The tensor; for a .npz file and for a group in a folder a mapping from names to tensors, which is a context
        manager: see `NpzFile` and `ZarrGroup`. Look-ups raise the same errors.

    Raises:
        ArgumentError: the file has another format, is broken, truncated or encrypted, is not a regular file, or is
            closed.
        ArgumentTypeError: an array holds Python objects, text or records, or ``file`` is neither a path nor a file.
        DeviceMemoryError: the host has not enough memory for an array.
        OSError: the file cannot be read.

    >>> np.save(io := __import__("io").BytesIO(), np.arange(3))
    >>> io.seek(0), st.load(io).tolist()
    (0, [0, 1, 2])
    """
    path = path_of(file, "load", "read", "seek", "tell")
    if path is None:
        return _load_stream(file, device)
    if os.path.isdir(path):
        return load_folder(path, device, "load")
    with open(path, "rb", buffering=0, opener=open_at_once) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ArgumentError(f"load: {path} is not a regular file; wanted one, or the contents in an io.BytesIO")
        if not is_archive(stream.read(4)):
            stream.seek(0)
            header = read_header(stream, path, status.st_size)
            return _placed_file(stream, header, path, device)
    return NpzFile(path, device, path)


def open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for a process that writes to it, as the system does for pipes."""
    return os.open(path, flags | os.O_NONBLOCK)


def is_archive(begin: bytes) -> bool:
    """Whether a file that begins with these bytes is an archive, with or without members."""
    return begin in (b"PK\x03\x04", b"PK\x05\x06")


def _load_stream(file: Any, device: Where | None) -> ShardedTensor | NpzFile:
    with broken_as_error("file"):
        start = file.tell()
        begin = file.read(4)
        file.seek(0, os.SEEK_END)
        size = file.tell() - start
        file.seek(start)
        if is_archive(begin):
            return NpzFile(file, device)
        header = read_header(file, "file", size)
        return _placed(read_elements(file, header, "file"), device)


def _placed_file(stream: Any, header: npy_files.Header, path: str, device: Where | None) -> ShardedTensor:
    """Returns the array of a .npy file at a path as a tensor."""
    target = as_sharding(default_mesh() if device is None else device, len(header.shape), "load")
    if any(map(is_remote, target.mesh.flat)):

        def read(box: Box, out: HostArray) -> None:
            shape, into = (header.shape[::-1], out.T) if header.fortran else (header.shape, out)
            box = box[::-1] if header.fortran else box
            read_box(stream.fileno(), path, header.length, shape, box, into)
            if not header.dtype.isnative:
                out.byteswap(inplace=True)

        return tensor_from(header.shape, header.dtype.newbyteorder("="), device, read, "load")
    return _placed(read_elements(stream, header, path), device)


def _placed(array: HostArray, device: Where | None) -> ShardedTensor:
    """Returns a host array that nothing else holds as a tensor."""
    mesh = as_sharding(default_mesh() if device is None else device, array.ndim, "load").mesh
    is_own = not any(map(is_remote, mesh.flat)) and backend_of(mesh.flat[0]).on_host
    return call("asarray", array, device=device, copy=False if is_own else None)  # type: ignore[no-any-return]
