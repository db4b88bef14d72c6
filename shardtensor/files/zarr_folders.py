"""Folders in the format zarr v3 as tensors: what `st.load` returns for them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from typing import Any

from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.files.chunk_grids import Box
from shardtensor.files.tensor_reads import NamedArrays, naming_caller, tensor_from
from shardtensor.files.zarr import ZarrArray, children, open_child, open_node
from shardtensor.host.summation_order import HostArray
from shardtensor.sharding.layout import Where
from shardtensor.tensor.tensor import ShardedTensor


def load_folder(path: str, where: Where | None, caller: str) -> ShardedTensor | ZarrGroup:
    """Returns the array in a folder as a tensor, or the group in it.

    Raises:
        ArgumentError: a file is broken.
        ArgumentTypeError: tensors lack its dtype, or its chunks are compressed.
        OSError: the folder has neither (an IsADirectoryError), or a file cannot be read.
    """
    with naming_caller(caller):
        if not os.path.lexists(os.path.join(path, "zarr.json")):
            old = any(os.path.lexists(os.path.join(path, name)) for name in (".zarray", ".zgroup"))
            kind = "in the format zarr v2" if old else "without zarr.json"
            text = f"{caller}: a folder {kind}; wanted a file, or an array or a group in the format zarr v3"
            raise IsADirectoryError(errno.EISDIR, text, path)
        node = open_node(path)
        return _tensor(node, where, caller) if isinstance(node, ZarrArray) else ZarrGroup(path, node, where)


def _tensor(array: ZarrArray, where: Where | None, caller: str) -> ShardedTensor:
    def read(box: Box, out: HostArray) -> None:
        array.read(box, out, filled=True)

    return tensor_from(array.metadata.shape, array.metadata.dtype, where, read, caller)


class ZarrGroup(NamedArrays):
    """A group of arrays in a folder: a mapping from names to tensors, which are read when they are looked up.

    Attributes:
        files: the names of the arrays, also of those in groups below it, such as ``layers/0/w``.
        attrs: what the group says of itself, a dict.
    """

    _kind = "folder"

    def __init__(self, path: str, attrs: Mapping[str, Any], device: Where | None) -> None:
        super().__init__(path, _arrays(path, ""))
        self.attrs = dict(attrs)
        self._device = device

    def _read(self, name: str) -> ShardedTensor:
        with naming_caller("load"):
            node = open_child(self._path, name)
            if not isinstance(node, ZarrArray):
                raise ArgumentError(f"{os.path.join(self._path, name)} has become a group since it was opened")
            return _tensor(node, self._device, "load")


def _arrays(root: str, prefix: str) -> Iterator[str]:
    """Yields the names of the arrays in a group and below it. Those that cannot be read are errors when looked up."""
    for child in children(os.path.join(root, prefix)):
        name = prefix + child
        try:
            is_array = isinstance(open_child(root, name), ZarrArray)
        except (ArgumentError, ArgumentTypeError):
            is_array = True
        if is_array:
            yield name
        else:
            yield from _arrays(root, f"{name}/")
