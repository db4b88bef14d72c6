"""Folders in the format zarr v3 as tensors: what `st.load` returns for them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from typing import Any

from shardtensor.files.chunk_grids import Box
from shardtensor.files.metadata import GroupMetadata
from shardtensor.files.tensor_reads import naming_caller, tensor_from
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
        return _loaded(open_node(path), path, "", where, caller)


def _loaded(
    node: ZarrArray | GroupMetadata, root: str, prefix: str, where: Where | None, caller: str
) -> ShardedTensor | ZarrGroup:
    if not isinstance(node, ZarrArray):
        return ZarrGroup(root, prefix, node, where)

    def read(box: Box, out: HostArray) -> None:
        node.read(box, out, filled=True)

    return tensor_from(node.metadata.shape, node.metadata.dtype, where, read, caller)


class ZarrGroup(Mapping[str, "ShardedTensor | ZarrGroup"]):
    """A group of arrays and groups in a folder: a mapping from names to tensors, which are read when they are looked
    up, and groups. Each device gets the chunks that have its elements.

    Attributes:
        attrs: what the group says of itself, a dict.
    """

    def __init__(self, root: str, prefix: str, attrs: Mapping[str, Any], device: Where | None) -> None:
        self._root, self._prefix, self._device = root, prefix, device
        self.attrs = dict(attrs)

    def __getitem__(self, name: str) -> ShardedTensor | ZarrGroup:
        if name not in self:
            raise KeyError(f"{name!r} is neither an array nor a group of {self._path}; it has {', '.join(self)}")
        with naming_caller("load"):
            node = open_child(self._root, self._prefix + name)
            return _loaded(node, self._root, f"{self._prefix}{name}/", self._device, "load")

    def __contains__(self, name: object) -> bool:
        return name in [*self]

    def __repr__(self) -> str:
        names = [*self]
        return f"ZarrGroup {self._path!r} with keys: {', '.join(names[:5])}{'...' if len(names) > 5 else ''}"

    def __iter__(self) -> Iterator[str]:
        return iter(children(self._path))

    def __len__(self) -> int:
        return len(children(self._path))

    @property
    def _path(self) -> str:
        return os.path.join(self._root, self._prefix).rstrip("/")
