"""`inspect` and `verify`: what a checkpoint has, and whether its files are what was written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.checkpoint import values
from shardtensor.checkpoint.manifest import FILE, ArrayRecord, FileRow, Manifest, open_checkpoint, while_unchanged
from shardtensor.checkpoint.restoring import open_array
from shardtensor.checkpoint.saved_layouts import Layout, placed
from shardtensor.checkpoint.trees import Node, mapped, names_of, python_tree
from shardtensor.checkpoint.writing import Path, checked_path
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.files.atomic import raise_error
from shardtensor.files.checksums import crc32c
from shardtensor.files.metadata import MOST, Object
from shardtensor.files.paths import opened, read_text
from shardtensor.host.units import counted, readable
from shardtensor.interpreters.infer import ShapeDtypeStruct
from shardtensor.sharding.layout import Shape


@dataclass(frozen=True)
class Leaf:
    """A leaf of a checkpoint.

    Attributes:
        name: its name, the path of keys to it.
        type: ``"tensor"``, ``"array"`` for an array of NumPy, or the name of the type of another value.
        shape: the shape of a tensor or an array; None for other values.
        dtype: its dtype; None likewise.
        nbytes: the bytes of its elements; 0 for other values.
        layout: the layout of a tensor, as text; None likewise.
        files: the number of its files.
    """

    name: str
    type: str
    shape: Shape | None = None
    dtype: np.dtype[Any] | None = None
    nbytes: int = 0
    layout: Layout | None = None
    files: int = 0


@dataclass(frozen=True)
class Info:
    """What a checkpoint has, without its elements. Its text is a table.

    Attributes:
        path: the folder.
        leaves: the leaves by their names.
        classes: the names of the classes of containers that come back as dicts or lists without ``like=``, by the
            names of the containers.
        nbytes: the bytes of all elements.
        stored: the bytes of all files but the manifest.
        tree: the tree, with a `ShapeDtypeStruct` in place of each tensor, in the layout that `restore` gives it, an
            empty one in place of each array of NumPy, and the other values. It can be given to `restore` as ``like``.
    """

    path: str
    leaves: Mapping[str, Leaf]
    classes: Mapping[str, str]
    nbytes: int
    stored: int
    tree: Any

    def __str__(self) -> str:
        rows = [("leaf", "type", "dtype", "shape", "size", "layout")]
        for leaf in self.leaves.values():
            is_array = leaf.shape is not None
            rows.append((
                leaf.name, leaf.type, str(leaf.dtype) if is_array else "", str(leaf.shape) if is_array else "",
                readable(leaf.nbytes) if is_array else "", "" if leaf.layout is None else str(leaf.layout),
            ))  # fmt: skip
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        table = [
            "  ".join([text.ljust(width) for text, width in zip(row, widths, strict=True)]).rstrip() for row in rows
        ]
        arrays = sum(leaf.shape is not None for leaf in self.leaves.values())
        head = (
            f"{self.path}: {counted(len(self.leaves), 'leaf', 'leaves')}, {counted(arrays, 'array')}, "
            f"{readable(self.nbytes)} of elements"
        )
        notes = [
            f"{name or 'the tree'} was a {kind}: without like=, it is restored as a dict or a list"
            for name, kind in self.classes.items()
        ]
        return "\n".join(map(_printable, [head, *table, *notes]))


def _printable(line: str) -> str:
    """Returns a line without control characters, which names in a hostile checkpoint may have."""
    return line if line.isprintable() else "".join([c if c.isprintable() else ascii(c)[1:-1] for c in line])


def inspect(path: Path) -> Info:
    """Returns what a checkpoint has: its tree, shapes, dtypes, layouts and sizes. No elements are read.

    Args:
        path: the folder.

    Raises:
        ArgumentError: there is no checkpoint, or its manifest is damaged.
        ArgumentTypeError: it has a dtype that this machine does not have.
        OSError: it cannot be read.

    >>> folder = __import__("tempfile").mkdtemp()
    >>> st.checkpoint.save(f"{folder}/first", {"w": st.arange(6.0), "step": 3})
    >>> info = st.checkpoint.inspect(f"{folder}/first")
    >>> info.leaves["w"].shape, info.leaves["w"].dtype, info.nbytes
    ((6,), dtype('float64'), 48)
    """
    name = checked_path(path, "checkpoint.inspect")
    return while_unchanged(name, "checkpoint.inspect", lambda: _inspected(name))


def _inspected(path: str) -> Info:
    folder, manifest = open_checkpoint(path, "checkpoint.inspect")
    leaves = {name: _leaf(name, record, manifest) for name, _, record in names_of(manifest.tree)}
    tree = python_tree(mapped(manifest.tree, lambda name, record: _like(name, record, manifest, folder)))
    stored = sum(nbytes for _, _, (nbytes, _) in manifest.all_files())
    classes = dict(_classes(manifest.tree, ""))
    return Info(folder, leaves, classes, sum(leaf.nbytes for leaf in leaves.values()), stored, tree)


def _leaf(name: str, record: Object, manifest: Manifest) -> Leaf:
    if "array" not in record:
        return Leaf(name, values.type_of(record))
    array = manifest.arrays[record["array"]]
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    kind = "array" if array.layout is None else "tensor"
    return Leaf(name, kind, array.shape, array.dtype, nbytes, array.layout, len(array.files))


def _like(name: str, record: Object, manifest: Manifest, folder: str) -> Any:
    if "array" not in record:
        return values.read(record, f"{os.path.join(folder, FILE)}: {name}")
    array = manifest.arrays[record["array"]]
    if array.layout is None:
        return _without_elements(array.shape, array.dtype)
    sharding, _ = placed(array.layout, len(array.shape))
    return ShapeDtypeStruct(array.shape, array.dtype, sharding)


def _without_elements(shape: Shape, dtype: np.dtype[Any]) -> HostArray:
    """Returns an array of a shape whose elements are all the same one in memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _classes(node: Node[Object] | Object, name: str) -> list[tuple[str, str]]:
    if not isinstance(node, Node):
        return []
    here = [(name, node.type_name)] if node.type_name else []
    for key, child in node.entries.items():
        here += _classes(child, f"{name}/{key}" if name else str(key))
    return here


def verify(path: Path) -> None:
    """Reads all files of a checkpoint and compares their sizes and checksums with those that were written.

    Args:
        path: the folder.

    Raises:
        ArgumentError: a file is missing, damaged, or none of the checkpoint; the error names each leaf and file.
        OSError: a file cannot be read.

    >>> folder = __import__("tempfile").mkdtemp()
    >>> st.checkpoint.save(f"{folder}/first", {"w": st.arange(6.0), "step": 3})
    >>> st.checkpoint.verify(f"{folder}/first")
    """
    name = checked_path(path, "checkpoint.verify")
    while_unchanged(name, "checkpoint.verify", lambda: _verify(name))


def _verify(path: str) -> None:
    folder, manifest = open_checkpoint(path, "checkpoint.verify")
    problems = [problem for key, row in manifest.files.items() if (problem := _problem_of_text(folder, key, row))]
    for name, array in manifest.arrays.items():
        problems += [f"leaf {name}: {problem}" for problem in _problems_of_array(folder, array)]
    expected = {FILE, *[key for _, key, _ in manifest.all_files()]}
    for where, folders, names in os.walk(folder, onerror=raise_error):
        for one in [*names, *[one for one in folders if os.path.islink(os.path.join(where, one))]]:
            key = os.path.relpath(os.path.join(where, one), folder)
            if key not in expected:
                problems.append(f"{os.path.join(folder, key)} is not a file of the checkpoint")
    if problems:
        more = len(problems) - 20
        raise ArgumentError(
            f"checkpoint.verify: {'; '.join(problems[:20])}{f'; and {more} more' if more > 0 else ''}; restore an "
            "older checkpoint, or a copy of these files"
        )


def _problem_of_text(folder: str, key: str, row: FileRow) -> str:
    """Returns what is wrong with the metadata of a group; nothing if it is what was written."""
    path = os.path.join(folder, key)
    try:
        text = read_text(folder, key, MOST)
    except FileNotFoundError:
        return f"{path} is missing"
    except ArgumentError as error:
        return str(error)
    return "" if (len(text), crc32c(text)) == row else f"{path} is damaged: it is not the file that was written"


def _problems_of_array(folder: str, array: ArrayRecord) -> Iterator[str]:
    """Yields what is wrong with the files of an array."""
    try:
        stored = open_array(folder, array)
        keys = (stored.metadata.key(index) for index in stored.chunks())  # There may be any number of them.
        if (lacking := next((key for key in keys if key not in array.files), None)) is not None:
            yield f"the manifest does not have the file {lacking}"
            return
    except FileNotFoundError as error:
        yield f"{error.filename} is missing"
        return
    except (ArgumentError, ArgumentTypeError) as error:
        yield str(error)
        return
    chunks = {stored.metadata.key(index) for index in stored.chunks()}
    yield from (f"the manifest has the file {key}" for key in sorted(array.files.keys() - chunks - {"zarr.json"}))
    for index in stored.chunks():
        key = f"{array.name}/{stored.metadata.key(index)}"
        try:
            with opened(folder, key) as descriptor:
                size, written = os.fstat(descriptor).st_size, array.files[stored.metadata.key(index)][0]
            if size != written:
                yield f"{os.path.join(folder, key)} has {counted(size, 'byte')}, and {written} were written"
            else:
                stored.verify(index)
        except FileNotFoundError:
            yield f"{os.path.join(folder, key)} is missing"
        except ArgumentError as error:
            yield str(error)
