"""The format safetensors, in which programs exchange weights: `save_safetensors` and `load_safetensors`.

A file is a number of 8 bytes, a header of so many bytes in JSON, and the elements of the arrays, one after the other.
All sizes in the header are compared with each other and with the size of the file before memory is allocated.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.files.array_files import as_array, open_at_once, path_of, write_elements
from shardtensor.files.byte_ranges import read_box
from shardtensor.files.chunk_grids import Box
from shardtensor.files.joint_writes import Placed, is_scattered, write_jointly
from shardtensor.files.metadata import DIMENSIONS
from shardtensor.files.paths import read_into
from shardtensor.files.tensor_reads import naming_caller, tensor_from
from shardtensor.host.replacement import replaced
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape, Where
from shardtensor.tensor.operands import dtype_of, sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

Layout: TypeAlias = (
    "Where | Mapping[str, Where | None] | Callable[[str, Shape, np.dtype[Any]], Where | None]"
)  # fmt: skip
"""Where `load_safetensors` puts arrays: all of them, by their names, or a function of name, shape and dtype."""

_MOST = 100_000_000
"""The bytes that a header has at most, as in the library safetensors."""

_INDEX = ".safetensors.index.json"
"""The end of the name of a file that says which of several files has which array."""

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""The dtypes of the format that tensors have, and their names here."""


class Entry(NamedTuple):
    """An array in a file: ``start`` is the offset of its first byte in the file."""

    dtype: np.dtype[Any]
    shape: Shape
    start: int


# -- writing ---------------------------------------------------------------------------------------


def save_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, ArrayLike], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays to a file in the format safetensors, in which programs exchange weights.

    The file has the dtypes, shapes and elements, and no shardings. A file at the path is replaced at the end, as by
    `st.save`. Where no process has all elements of one of the tensors, all processes of the job call this with the same
    path, on a file system that they share, and each writes its part of the file.

    Args:
        path: the path, which usually ends with ".safetensors".
        tensors: tensors or arrays by their names, in one dict.
        metadata: texts by their names, which the file has, too.

    Raises:
        ArgumentTypeError: an array has a dtype that the format lacks, or an argument or a name is of another type.
        ArgumentError: the format cannot have a name, or a process does not see the file that process 0 has made.
        OSError: the file cannot be written.

    >>> path = __import__("tempfile").mkdtemp() + "/model.safetensors"
    >>> st.save_safetensors(path, {"w": st.ones((2, 3)), "b": st.zeros(3)})
    >>> st.load_safetensors(path)["w"].shape
    (2, 3)
    """
    caller = "save_safetensors"
    target = _path(path, caller)
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"{caller}: tensors is {type_text(tensors)}; wanted a dict of arrays by their names")
    arrays = {_checked_name(name, caller): _storable(x, name, caller) for name, x in tensors.items()}
    # The largest elements come first, so that all are aligned; other programs order them like this, too.
    ordered = sorted(arrays, key=lambda name: (-dtype_of(arrays[name]).itemsize, name))
    entries, end = dict[str, Any](), 0
    if metadata is not None:
        entries["__metadata__"] = _checked_metadata(metadata, caller)
    for name in ordered:
        x = arrays[name]
        begin, end = end, end + math.prod(x.shape) * x.dtype.itemsize
        entries[name] = {"dtype": _name_of(x.dtype), "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST:
        raise ArgumentError(f"{caller}: the names and shapes take {counted(len(text), 'byte')}; the format has {_MOST}")
    header = len(text).to_bytes(8, "little") + text
    if any(map(is_scattered, arrays.values())):
        placed = [Placed(len(header) + entries[name]["data_offsets"][0], arrays[name]) for name in ordered]
        write_jointly(target, header, len(header) + end, placed, caller)
        return
    with replaced(target) as stream:
        stream.write(header)
        for name in ordered:
            write_elements(stream, arrays[name])


def _checked_name(name: Any, caller: str) -> str:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{caller}: {name!r:.60} is the name of an array; wanted text, such as 'layers.0.w'")
    if name == "__metadata__" or name.encode(errors="replace") != name.encode(errors="surrogatepass"):
        raise ArgumentError(f"{caller}: the format has no arrays of the name {name!r:.60}; wanted another one")
    return name


def _checked_metadata(metadata: Any, caller: str) -> dict[str, str]:
    if not isinstance(metadata, Mapping) or not all(
        isinstance(text, str) for pair in metadata.items() for text in pair
    ):
        raise ArgumentTypeError(f"{caller}: metadata is {metadata!r:.60}; wanted a dict of texts by their names")
    return dict(metadata)


def _storable(x: Any, name: str, caller: str) -> Any:
    """Returns an array as a tensor or a host array.

    Raises:
        ArgumentTypeError: the format has no such arrays.
    """
    if isinstance(x, Mapping):
        raise ArgumentTypeError(
            f"{caller}: {name!r:.60} is {type_text(x)}; wanted an array: the format has one level, with names such as "
            f"'{name[:30]}.w'"
        )
    array = as_array(x, f"{caller}: {name!r:.60}")
    dtype = dtype_of(array)
    if _name_of(dtype) is None:
        instead = {"c": "x.view('float64'), its parts", "m": "x.view('int64')", "M": "x.view('int64')"}.get(dtype.kind)
        instead = "x.astype('complex64')" if dtype.char == "G" else instead or "x.astype('float32')"
        raise ArgumentTypeError(f"{caller}: {name!r:.60} has dtype {dtype}, which the format lacks; write {instead}")
    return array if dtype.isnative or isinstance(array, ShardedTensor) else array.astype(dtype.newbyteorder("="))


def _name_of(dtype: np.dtype[Any]) -> str | None:
    return next((known for known, name in _NAMES.items() if name == dtype.name), None)


# -- reading ---------------------------------------------------------------------------------------


def load_safetensors(path: str | os.PathLike[str], shardings: Layout | None = None) -> dict[str, ShardedTensor]:
    """Reads a file in the format safetensors: each device gets its part of each array, and no other process reads it.

    Args:
        path: the path of a file; of an index, ``model.safetensors.index.json``, of the files into which large models
            are divided; or of a folder that has one of both.
        shardings: the layout of all arrays, a Device, Mesh, NamedSharding or P (see
            `shardtensor.functions.standard.creation`); or a dict of these by the names of arrays, or a function that
            returns one for a name, a shape and a dtype. By default, also for names that the dict lacks and where the
            function returns None, arrays are sharded over the default mesh, and not committed.

    Returns:
        The tensors by their names, in the order of the file.

    Raises:
        ArgumentError: the file has another format, is broken or truncated, or is not a regular file; or ``shardings``
            has a name that the file lacks.
        ArgumentTypeError: an array has a dtype that tensors lack, or ``path`` is not a path.
        DeviceMemoryError: the host has not enough memory for an array.
        OSError: the file cannot be read.

    >>> path = __import__("tempfile").mkdtemp() + "/model.safetensors"
    >>> st.save_safetensors(path, {"w": np.ones((8, 3)), "b": np.zeros(3)})
    >>> mesh = st.make_mesh((4,), ("x",))
    >>> weights = st.load_safetensors(path, {"w": st.NamedSharding(mesh, st.P("x"))})
    >>> weights["w"].sharding.spec, weights["w"].addressable_shards[0].data.shape
    (P('x'), (2, 3))
    """
    caller = "load_safetensors"
    with naming_caller(caller):
        headers = entries_of(path, caller)
        layout = _layout(shardings, [name for entries in headers.values() for name in entries])
        return {
            name: x for file, entries in headers.items() for name, x in _tensors(file, entries, layout, caller)
        }  # fmt: skip


def entries_of(path: str | os.PathLike[str], caller: str) -> dict[str, dict[str, Entry]]:
    """Returns the arrays of each of the files that a path leads to, by their names, from their headers.

    Raises:
        ArgumentError, ArgumentTypeError, OSError: see `load_safetensors`.
    """
    return {file: _header(file, names) for file, names in _files(_path(path, caller)).items()}


def _tensors(file: str, entries: Mapping[str, Entry], layout: Any, caller: str) -> Iterator[tuple[str, ShardedTensor]]:
    """Reads the arrays of a file."""
    with open(file, "rb", buffering=0, opener=open_at_once) as stream:
        for name, entry in entries.items():
            where = layout(name, entry.shape, entry.dtype)

            def read(box: Box, out: HostArray, entry: Entry = entry) -> None:
                read_box(stream.fileno(), file, entry.start, entry.shape, box, out)

            yield name, tensor_from(entry.shape, entry.dtype, where, read, caller)


def _layout(shardings: Any, names: Sequence[str]) -> Callable[[str, Shape, np.dtype[Any]], Where | None]:
    """Returns the argument ``shardings`` as a function.

    Raises:
        ArgumentError: it has a name that is not that of an array.
    """
    if isinstance(shardings, Mapping):
        if unknown := [name for name in shardings if name not in names]:
            raise ArgumentError(
                f"shardings has {unknown[0]!r:.60}, and the file has no array of this name; it has {_some(names)}"
            )
        return lambda name, shape, dtype: shardings.get(name)
    return shardings if callable(shardings) else lambda name, shape, dtype: shardings


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"{name:.60}" for name in names[:5]) + (", ..." if len(names) > 5 else "")


def _path(path: Any, caller: str) -> str:
    target = path_of(path, caller)
    if target is None:
        raise ArgumentTypeError(f"{caller}: path is {path!r:.60}, {type_text(path)}; wanted text or a pathlib.Path")
    return target


def _files(path: str) -> dict[str, set[str] | None]:
    """Returns the files that a path leads to, and the names of the arrays that are read of each; None for all.

    Raises:
        ArgumentError: it is a folder without such a file, or an index that is broken.
    """
    if os.path.isdir(path):
        path = os.path.join(path, _only(path))
    if not path.endswith(".json"):
        return {path: None}
    with _opened(path) as (descriptor, size):
        if size > _MOST:
            raise ArgumentError(f"{path} has {counted(size, 'byte')}; wanted at most {_MOST}")
        index = _parsed(_content(descriptor, size, 0, path), path)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict):
        raise ArgumentError(f"{path} is broken or of another kind: it has no weight_map, a dict")
    files: dict[str, set[str] | None] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise ArgumentError(f"{path} is broken: {name!r:.60} is in {file!r:.60}; wanted a file in the same folder")
        names = files.setdefault(os.path.join(os.path.dirname(path), file), set())
        assert names is not None
        names.add(name)
    return files


def _only(folder: str) -> str:
    """Returns the name of the index in a folder, or of the only file of the format if there is none."""
    names = sorted(os.listdir(folder))
    for suffix in (_INDEX, ".safetensors"):
        fitting = [name for name in names if name.endswith(suffix)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise ArgumentError(f"the folder {folder} has {_some(fitting)}; give the path of one of them")
    raise ArgumentError(f"the folder {folder} has no file whose name ends with .safetensors or {_INDEX}")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """Opens a regular file for reading, and gives its descriptor and its size."""
    with open(path, "rb", buffering=0, opener=open_at_once) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ArgumentError(f"{path} is not a regular file")
        yield stream.fileno(), status.st_size


def _content(descriptor: int, size: int, start: int, path: str) -> bytes:
    memory = np.empty(size, np.uint8)
    read_into(descriptor, memory, start, path)
    return memory.tobytes()


def _header(path: str, names: set[str] | None) -> dict[str, Entry]:
    """Reads the header of a file, checks it, and returns the arrays of these names.

    Raises:
        ArgumentError: the file is broken, or lacks a name.
        ArgumentTypeError: tensors lack the dtype of one of the arrays.
    """
    with _opened(path) as (descriptor, size):
        length = int.from_bytes(_content(descriptor, 8, 0, path), "little") if size >= 8 else 0
        if size < 8 or length > min(_MOST, size - 8):
            raise ArgumentError(
                f"{path} is not a file in the format safetensors, or a broken one: it has {counted(size, 'byte')}, and "
                f"its header would have {length}; wanted at most {min(_MOST, max(size - 8, 0))}"
            )
        header = _parsed(_content(descriptor, length, 8, path), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ArgumentError(f"{path} is broken: its metadata is {metadata!r:.60}; wanted texts")
    arrays = {name: _checked(entry, f"{name!r:.60} of {path}") for name, entry in header.items()}
    end = 0
    for name, (_, shape, itemsize, begin, stop) in sorted(arrays.items(), key=lambda pair: pair[1][3:]):
        if begin != end or stop - begin != math.prod(shape) * itemsize or stop > size - 8 - length:
            raise ArgumentError(
                f"{path} is broken: {name!r:.60} has the bytes from {begin} to {stop} of {size - 8 - length}; wanted "
                f"{math.prod(shape) * itemsize} from {end} on, for shape {shape}"
            )
        end = stop
    if end != size - 8 - length:
        raise ArgumentError(f"{path} is broken: {size - 8 - length - end} of its bytes belong to no array")
    if names is not None and (missing := names - arrays.keys()):
        raise ArgumentError(f"{path} lacks {min(missing)!r:.60}, which the index says that it has")
    return {
        name: Entry(sharded_dtype(_NAMES[known]), shape, 8 + length + begin)
        for name, (known, shape, _, begin, _) in arrays.items()
        if names is None or name in names
    }


def _parsed(text: bytes, path: str) -> dict[str, Any]:
    """Returns the dict that a text in JSON is.

    Raises:
        ArgumentError: it is none, or has a name twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(value := dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice")
        return value

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is broken: its JSON cannot be read: {error!s:.100}") from None
    if not isinstance(value, dict):
        raise ArgumentError(f"{path} is broken: its JSON is {value!r:.60}; wanted a dict")
    return value


def _checked(entry: Any, name: str) -> tuple[str, Shape, int, int, int]:
    """Returns the dtype, the shape, the bytes of an element, and begin and end of an array, as a header states them.

    Raises:
        ArgumentError: they are of another kind.
        ArgumentTypeError: tensors lack the dtype.
    """
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
        is_valid = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= DIMENSIONS
    except (LookupError, TypeError, ValueError):
        is_valid = False
    if not is_valid or not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
        raise ArgumentError(f"{name} is broken: its header has {entry!r:.100}")
    if dtype not in _NAMES:
        raise ArgumentTypeError(f"{name} has dtype {dtype:.60}, which tensors lack; they have {', '.join(_NAMES)}")
    return dtype, tuple(shape), sharded_dtype(_NAMES[dtype]).itemsize, begin, end
