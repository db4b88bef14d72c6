"""The manifest of a checkpoint, ``checkpoint.json``: its tree, and of each array its dtype, shape, layout and files.

The first entry of the text is the CRC-32C of the text in which eight zeros stand for it. The manifest is written last:
a folder without a valid one is no checkpoint.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardtensor.checkpoint import values
from shardtensor.checkpoint.saved_layouts import Layout, layout_from_json
from shardtensor.checkpoint.together import JobPart
from shardtensor.checkpoint.trees import Node, names_of, tree_from_json, tree_to_json
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.files.atomic import find_folder
from shardtensor.files.checksums import crc32c
from shardtensor.files.metadata import LARGEST, Object, brief, parse_json, shape_of
from shardtensor.files.paths import check_name, read_text
from shardtensor.files.zarr_types import DType, dtype_of, name_of
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape

T = TypeVar("T")

FILE = "checkpoint.json"
"""The name of the manifest in the folder."""

FORMAT = "shardtensor.checkpoint"
VERSION = 1
"""The version of the format: readers refuse later ones."""

_MOST = 1 << 28
"""The bytes that a manifest has at most."""

_TRIES = 50
"""How often a checkpoint is read that is replaced meanwhile."""

_HEAD = re.compile(rb'\{"crc32c": "([0-9a-f]{8})", ')

FileRow = tuple[int, int]
"""The size of a file, and its CRC-32C."""

Files = dict[str, FileRow]
"""Files by their paths below a folder."""


@dataclass(frozen=True)
class ArrayRecord:
    """An array of a checkpoint.

    Attributes:
        name: its name, the path of its folder.
        shape: its shape.
        dtype: its dtype.
        layout: the layout of the tensor; None for an array of NumPy.
        scalar: whether NumPy would return the tensor as a scalar, as the sum of all elements.
        files: the files below the folder of the array.
    """

    name: str
    shape: Shape
    dtype: DType
    layout: Layout | None
    scalar: bool = False
    files: Files = field(default_factory=dict, compare=False)

    def to_json(self) -> Object:
        """Returns an object of JSON."""
        data_type, attributes = name_of(self.dtype)
        return {
            "shape": list(self.shape), "data_type": data_type, **({"attributes": attributes} if attributes else {}),
            "layout": None if self.layout is None else self.layout.to_json(),
            **({"scalar": True} if self.scalar else {}),
            "files": _files_to_json(self.files),
        }  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        tree: the tree, whose leaves are objects of JSON: of arrays ``{"array": name}``, of other values see `values`.
        arrays: the arrays by their names.
        files: the files that belong to no array, the metadata of groups.
        crc32c: the checksum.
    """

    tree: Node[Object] | Object
    arrays: Mapping[str, ArrayRecord]
    files: Files
    crc32c: int = 0

    def all_files(self) -> Iterator[tuple[str, str, FileRow]]:
        """Yields the name of the array, or nothing, the path below the checkpoint, and the row of each file."""
        for key, row in self.files.items():
            yield "", key, row
        for name, record in self.arrays.items():
            for key, row in record.files.items():
                yield name, f"{name}/{key}", row


def _files_to_json(files: Files) -> Object:
    return {key: [nbytes, f"{value:08x}"] for key, (nbytes, value) in files.items()}


def manifest_text(manifest: Manifest) -> bytes:
    """Returns the text of a manifest."""
    content = {
        "crc32c": "0" * 8, "format": FORMAT, "version": VERSION, "tree": tree_to_json(manifest.tree),
        "files": _files_to_json(manifest.files),
        "arrays": {name: record.to_json() for name, record in manifest.arrays.items()},
    }  # fmt: skip
    text = json.dumps(content, allow_nan=False).encode()
    return text.replace(b"0" * 8, f"{crc32c(text):08x}".encode(), 1)


# -- reading ---------------------------------------------------------------------------------------


def is_checkpoint(folder: str) -> bool:
    """Whether a folder has a valid manifest."""
    try:
        read_manifest(folder)
    except (ArgumentError, ArgumentTypeError, OSError):
        return False
    return True


def state_of(path: str) -> object:
    """Returns a value that is another one when the checkpoint at a path is replaced, moved or deleted."""
    try:
        folder = find_folder(path)
        rows = [] if folder is None else [os.stat(folder), os.stat(os.path.join(folder, FILE))]
    except OSError:
        return None
    return [(row.st_dev, row.st_ino, row.st_ctime_ns) for row in rows]


def while_unchanged(path: str, caller: str, read: Callable[[], T], job: JobPart | None = None) -> T:
    """Returns what a function reads of a checkpoint; it is called again if another one takes its place meanwhile.

    Args:
        path: the checkpoint.
        caller: the function, for errors.
        read: reads it.
        job: the part of this process, if all processes call this together.

    Raises:
        Exception: that of ``read``.
        ArgumentError: the checkpoint is replaced all the time.
    """
    for _ in range(_TRIES):
        state, error = state_of(path), None
        try:
            result = read()
        except Exception as raised:  # It is raised below, unless it comes of the replacement.
            error = raised
        if error is not None and job is not None and job.is_broken:
            raise error
        is_changed = state != state_of(path)
        if job is not None:
            is_changed = any(job.gather("state of the folder", "changed" if is_changed else ""))
        if not is_changed:
            if error is not None:
                raise error
            return result
    raise ArgumentError(f"{caller}: {path} was replaced {_TRIES} times while it was read")


def open_checkpoint(path: str, caller: str) -> tuple[str, Manifest]:
    """Returns the folder in which a checkpoint is, and its manifest.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ArgumentError: there is something else at the path, or it is broken.
        OSError: it cannot be read.
    """
    folder = find_folder(path)
    if folder is None or not os.path.lexists(os.path.join(folder, FILE)):
        if folder is None and not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, f"{caller}: there is no checkpoint", path)
        raise ArgumentError(
            f"{caller}: there is no checkpoint at {path}: it is "
            f"{'a file' if folder is None else f'a folder without {FILE}'}{_checkpoints_in(folder)}"
        )
    try:
        return folder, read_manifest(folder)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{caller}: {error}") from None


def _checkpoints_in(folder: str | None) -> str:
    """Returns the end of an error about a folder that has no manifest, but checkpoints in it."""
    if folder is None or not os.path.isdir(folder):
        return ""
    names = sorted(entry.name for entry in os.scandir(folder) if os.path.lexists(os.path.join(entry.path, FILE)))
    few = ", ".join(names[-5:])
    return f"; it has {counted(len(names), 'checkpoint')}, the last ones are {few}" if names else ""


def read_manifest(folder: str) -> Manifest:
    """Returns the manifest in a folder, whose every entry has been checked.

    Raises:
        ArgumentError: it is broken, or of a later version.
        ArgumentTypeError: it has what this machine does not have.
        OSError: it cannot be read.
    """
    name = os.path.join(folder, FILE)
    text = read_text(folder, FILE, _MOST)
    head = _HEAD.match(text)
    if head is None:
        raise ArgumentError(f"{name} is broken: it does not begin with a checksum")
    begin, end = head.span(1)
    checksum = crc32c(text[:begin] + b"0" * 8 + text[end:])
    if checksum != int(head[1], 16):
        raise ArgumentError(
            f"{name} is damaged: it has the checksum {checksum:08x}, and {head[1].decode()} is stored; restore an "
            "older checkpoint, or a copy of the file"
        )
    try:
        return _manifest_from_json(parse_json(text, name), checksum, name)
    except RecursionError:
        raise ArgumentError(f"{name} is broken: it is nested too deeply") from None


def _manifest_from_json(content: Any, checksum: int, name: str) -> Manifest:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArgumentError(f"{name} is not the manifest of a checkpoint")
    if content.get("version") != VERSION:
        raise ArgumentError(
            f"{name} has version {str(content.get('version'))[:20]} of the format; this version of shardtensor reads "
            f"version {VERSION}"
        )
    rows = content.get("arrays")
    if not isinstance(rows, dict):
        raise ArgumentError(f"{name} is broken: it has no arrays")
    arrays = {key: _array_from_json(key, row, name) for key, row in rows.items()}
    tree = tree_from_json(content.get("tree"), name, _is_leaf)
    named = [leaf["array"] for _, _, leaf in names_of(tree) if "array" in leaf]
    if sorted(named, key=str) != sorted(arrays):
        raise ArgumentError(f"{name} is broken: the arrays of its tree are not those that it describes")
    return Manifest(tree, arrays, _files_from_json(content.get("files"), name), checksum)


def _is_leaf(record: Object) -> bool:
    return (len(record) == 1 and isinstance(record.get("array"), str)) or values.is_value(record)


def _array_from_json(key: str, row: Any, name: str) -> ArrayRecord:
    label = f"{name}: {key[:200]}"
    for part in key.split("/"):
        check_name(part, name)
    if not isinstance(row, dict):
        raise ArgumentError(f"{label} is broken: it is {brief(row)}")
    shape = shape_of(row.get("shape"), "shape", 0, label)
    attributes = row.get("attributes", {})
    if not isinstance(attributes, dict):
        raise ArgumentError(f"{label} is broken: its attributes are {brief(attributes)}")
    dtype = dtype_of(row.get("data_type"), attributes, label)
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize > LARGEST:
        raise ArgumentError(f"{label} is broken: {dtype} of shape {shape} is too large")
    layout = row.get("layout")
    return ArrayRecord(
        key, shape, dtype, None if layout is None else layout_from_json(layout, len(shape), label),
        row.get("scalar") is True, _files_from_json(row.get("files"), label),
    )  # fmt: skip


def _files_from_json(rows: Any, name: str) -> Files:
    if not isinstance(rows, dict):
        raise ArgumentError(f"{name} is broken: its files are {brief(rows)}")
    files = {}
    for key, row in rows.items():
        if any(part in ("", ".", "..") for part in key.split("/")) or not (key.isascii() and key.isprintable()):
            raise ArgumentError(f"{name} is broken: the name {key[:80]!r} of a file is not accepted")
        valid = isinstance(row, list) and len(row) == 2 and type(row[0]) is int and row[0] >= 0
        if not valid or not isinstance(row[1], str) or not re.fullmatch("[0-9a-f]{8}", row[1]):
            raise ArgumentError(f"{name} is broken: of its file {key[:80]!r} it has {brief(row)}")
        files[key] = row[0], int(row[1], 16)
    return files
