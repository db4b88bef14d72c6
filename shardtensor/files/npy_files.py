"""The format .npy: headers and elements, written in blocks, and read with checks that come before any memory is used.

A header states how many elements follow. They are compared with the bytes that the file has before memory is allocated.
NumPy's own function reads the text of the header, since it knows all versions of the format, and no pickles are read.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import itertools
import lzma
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.small_floats import is_small_float
from shardtensor.errors import ArgumentError, ArgumentTypeError, DeviceMemoryError, ShardTensorError
from shardtensor.host import memory_pool
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.operands import sharded_dtype

_npy = np.lib.format

_BLOCK = 1 << 24
"""The bytes of a block that is written or read at once."""

_LENGTHS = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}
"""The bytes of the number that states how long a header is, in each version of the format."""

_LONGEST_HEADER = 10_000
"""The most characters of a header, as in NumPy; those of arrays of numbers have fewer than 2000."""


def _zstandard_errors() -> tuple[type[Exception], ...]:
    """Returns the error of Zstandard, whose archives are read from Python 3.14 on."""
    try:
        return (importlib.import_module("compression.zstd").ZstdError,)
    except ImportError:  # Python is older, or was built without it.
        return ()


_BROKEN: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ValueError,
    EOFError,
    RuntimeError,
    LookupError,
    OSError,
    *_zstandard_errors(),
)
"""The errors that Python's readers of archives raise for broken and for encrypted files, and for those of unknown
versions (NotImplementedError is a RuntimeError).
"""


class Header(NamedTuple):
    """The header of a .npy file. ``nbytes`` is the size of the elements, ``length`` that of the header."""

    shape: Shape
    fortran: bool
    dtype: np.dtype[Any]
    nbytes: int
    length: int


@contextlib.contextmanager
def broken_as_error(name: str) -> Iterator[None]:
    """Raises ArgumentError for what Python's readers of archives raise for broken ones."""
    try:
        yield
    except (ShardTensorError, io.UnsupportedOperation):
        raise
    except _BROKEN as error:
        # These readers raise OSError without a number, or position the file before its beginning.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ArgumentError(f"load: {name} is broken or of an unknown kind: {type(error).__name__}: {error}") from None


# -- writing ---------------------------------------------------------------------------------------


def write_header(stream: IO[bytes], shape: Shape, dtype: np.dtype[Any]) -> None:
    """Writes the header of an array in row-major order."""
    header = {"descr": _npy.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
    _npy.write_array_header_1_0(stream, header)


def check_dtype(dtype: np.dtype[Any], caller: str) -> None:
    """Checks that files have a dtype.

    Raises:
        ArgumentTypeError: it is one of Python objects, text or records, or NumPy lacks it.
    """
    if is_small_float(dtype):
        bits = f"int{8 * dtype.itemsize}"
        raise ArgumentTypeError(f"{caller}: NumPy's files have no {dtype}; write x.view({bits!r}), its bits")
    try:
        sharded_dtype(dtype)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{caller}: {error}; pickles, which store objects, are not written") from None


def blocks(shape: Shape, itemsize: int) -> Iterator[tuple[Any, ...]]:
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


# -- reading ---------------------------------------------------------------------------------------


def read_header(stream: IO[bytes], name: str, size: int) -> Header:
    """Reads the header of a .npy file that has ``size`` bytes.

    Raises:
        ArgumentError: it is none, or the file is too short for the elements.
        ArgumentTypeError: tensors cannot have the dtype.
    """
    begin = _prefix(stream, 8, name)
    digits = _LENGTHS.get(begin[6:], 0)
    if begin[:6] != b"\x93NUMPY" or not digits:
        hint = ""
        if name.endswith(".safetensors"):
            hint = "; st.load_safetensors(path) reads the format safetensors"
        elif begin.startswith(b"PAR1"):
            hint = "; st.asarray(pandas.read_parquet(path)) reads tables of Parquet"
        elif re.sub(rb"\s", b"", begin).decode("latin1").isprintable():
            hint = "; st.asarray(np.loadtxt(path)) reads text, with delimiter=',' between numbers and commas"
        raise ArgumentError(f"load: {name} is not a .npy or .npz file, or a broken one: it begins with {begin!r}{hint}")
    number = _prefix(stream, digits, name)
    length = int.from_bytes(number, "little")
    if length > _LONGEST_HEADER:
        raise ArgumentError(
            f"load: {name} is broken: its header has {counted(length, 'byte')}; wanted at most {_LONGEST_HEADER}"
        )
    text = io.BytesIO(number + _prefix(stream, length, name))
    try:
        shape, fortran, dtype = (_npy.read_array_header_1_0 if digits == 2 else _npy.read_array_header_2_0)(text)
    except Exception as error:  # The parser of Python literals raises many kinds, and even MemoryError.
        raise ArgumentError(f"load: {name} has a broken header: {type(error).__name__}: {error}") from None
    try:
        dtype = sharded_dtype(dtype)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"load: {name}: {error}; pickles are not read") from None
    if any(n is True or n is False or n < 0 for n in shape):
        raise ArgumentError(f"load: {name} has a broken header: shape {shape}; wanted sizes from 0")
    header = Header(shape, fortran, dtype, math.prod(shape) * dtype.itemsize, 8 + digits + length)
    if size - header.length < header.nbytes:
        raise ArgumentError(
            f"load: {name} is truncated: it has {counted(size, 'byte')}, too few for {dtype} of shape {header.shape}"
        )
    return header


def read_elements(stream: IO[bytes], header: Header, name: str) -> HostArray:
    """Reads the elements that follow a header, as an array in the byte order of the machine.

    Raises:
        ArgumentError: the file ends before them, or NumPy has no arrays of the shape.
        DeviceMemoryError: the host has not enough memory.
    """
    try:
        memory_pool.reserve(header.nbytes)
        memory = np.empty(header.nbytes, np.uint8)
        array = memory.view(header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
    except MemoryError:
        raise DeviceMemoryError(
            f"load: {name} needs {header.nbytes} bytes of host memory, which are not free"
        ) from None
    except ValueError as error:
        raise ArgumentError(f"load: {name} has a broken header: shape {header.shape}: {error}") from None
    got = 0
    while got < header.nbytes:
        count = _read_into(stream, memory[got : got + _BLOCK], name)
        if not count:
            raise ArgumentError(
                f"load: {name} is truncated: {header.nbytes - got} of {header.nbytes} bytes are missing"
            )
        got += count
    return array if header.dtype.isnative else array.byteswap(inplace=True).view(header.dtype.newbyteorder("="))


def _prefix(stream: IO[bytes], size: int, name: str) -> bytes:
    """Reads bytes of the header.

    Raises:
        ArgumentError: the file has fewer.
    """
    memory, got = np.empty(size, np.uint8), 0
    while got < size:
        count = _read_into(stream, memory[got:], name)
        if not count:
            raise ArgumentError(f"load: {name} is not a .npy or .npz file, or a broken one: it ends in the header")
        got += count
    return memory.tobytes()


def _read_into(stream: Any, memory: HostArray, name: str) -> int:
    """Reads bytes into memory; returns how many. Files of other classes than Python's may have only ``read``."""
    if hasattr(stream, "readinto"):
        return stream.readinto(memory) or 0
    part = stream.read(len(memory))
    if not isinstance(part, (bytes, bytearray, memoryview)) or len(part) > len(memory):
        raise ArgumentTypeError(
            f"load: read({len(memory)}) of {name} returned {part!r:.60}; wanted at most so many bytes"
        )
    memory[: len(part)] = np.frombuffer(part, np.uint8)
    return len(part)
