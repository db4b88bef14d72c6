"""`restore`: a checkpoint as a tree, on any devices and processes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.registry import processes_of
from shardtensor.checkpoint import values
from shardtensor.checkpoint.manifest import FILE, ArrayRecord, Manifest, open_checkpoint, while_unchanged
from shardtensor.checkpoint.pieces import divided
from shardtensor.checkpoint.saved_layouts import placed
from shardtensor.checkpoint.together import JobPart
from shardtensor.checkpoint.trees import Key, Node, mapped, names_of, python_tree, renamed, selected, shown
from shardtensor.checkpoint.writing import Path, checked_path
from shardtensor.communication.between_processes.processes import is_common, note
from shardtensor.core import call
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardTensorError, type_text
from shardtensor.files.checksums import crc32c
from shardtensor.files.metadata import MOST, ArrayMetadata, Object, parse
from shardtensor.files.paths import read_text
from shardtensor.files.tensor_reads import read_tensor
from shardtensor.files.zarr import ZarrArray
from shardtensor.interpreters.infer import ShapeDtypeStruct
from shardtensor.sharding.layout import NamedSharding, Where, as_sharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.spec import PartitionSpec
from shardtensor.tensor.pytree import keys_of, replaced
from shardtensor.tensor.tensor import ShardedTensor, mark_array, tensor
from shardtensor.tensor.value import Aval, aval, on_devices

_LAYOUTS = (Device, Mesh, NamedSharding, PartitionSpec)


def restore(
    path: Path, like: Any = None, *, only: str | Collection[str] | None = None, rename: Mapping[str, str] | None = None,
    device: Where | None = None,
) -> Any:  # fmt: skip
    """Returns the tree of a checkpoint, on any mesh and number of processes.

    Each process reads only the parts of files that its devices need, straight into the memory of the shards, and
    compares their checksums. If another program replaces the checkpoint meanwhile, the new one is read. In a job, all
    processes call this with the same arguments.

    Args:
        path: the folder.
        like: a pytree of the structure of the result, or a prefix of it. Its tensors and `ShapeDtypeStruct` objects
            have the shapes, dtypes and layouts of the result, its arrays of NumPy shapes and dtypes. Devices, meshes,
            shardings and specs are layouts of all tensors below them; None stands for the saved ones. The result has
            its containers, such as named tuples, whose saved entries are found by their keys and the names of fields.
            Without it, objects of classes come back as dicts.
        only: names of leaves, such as ``"params/w"``, or what they begin with, such as ``"params"``; others are not
            read. Lists that lack items come back as dicts by their indices.
        rename: new names of leaves by their names in the checkpoint; the parts of names that they begin with, too.
        device: a Device, Mesh, NamedSharding or P for all tensors, instead of ``like``. By default, a tensor has the
            layout that it was saved with: on the mesh in use, if this has all axes of the saved mesh, else on the saved
            devices where they exist (in a job, some of them in each process). Otherwise it is on the default mesh,
            replicated if it was, and else sharded.

    Returns:
        The tree.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ArgumentError: there is no checkpoint there, it is damaged or incomplete, or ``like`` does not fit: one error
            lists all leaves that are missing, extra, or of another shape, dtype or type.
        ArgumentTypeError: an argument or a dtype has a type that is not accepted.
        DeviceMemoryError: there is not enough memory for a tensor.
        DistributedError: another process has failed, does not come in time, or gives other arguments.
        OSError: a file cannot be read; the error has its name.

    >>> folder = __import__("tempfile").mkdtemp()
    >>> st.checkpoint.save(f"{folder}/first", {"w": st.arange(6.0), "step": 3})
    >>> mesh = st.make_mesh((3,), ("x",))
    >>> state = st.checkpoint.restore(f"{folder}/first", {"w": st.NamedSharding(mesh, st.P("x")), "step": 0})
    >>> state["w"].sharding.spec, state["step"]
    (P('x'), 3)
    """
    return restored(checked_path(path, "checkpoint.restore"), like, only, rename or {}, device, "checkpoint.restore")


def restored(
    path: str,
    like: Any,
    only: str | Collection[str] | None,
    rename: Mapping[str, str],
    device: Where | None,
    caller: str,
) -> Any:
    """Returns the tree of a checkpoint; see `restore`."""
    job = JobPart(caller)

    def prepared() -> tuple[str, Manifest, list[_Wanted]]:
        folder, manifest = open_checkpoint(path, caller)
        try:
            return folder, manifest, _wanted(manifest, like, only, rename, device)
        except ShardTensorError as error:
            raise type(error)(f"{caller}: {path}: {error}") from None

    def read() -> list[Any]:
        folder, manifest, wanted = job.together("manifest", prepared)
        if job.count > 1:
            rows = [f"a checkpoint with the checksum {manifest.crc32c:08x}", *[one.text() for one in wanted]]
            job.check_same(rows, "wanted the same path and arguments in all processes")
        return job.together("elements", lambda: [one.read(folder, manifest, caller) for one in wanted])

    trees = while_unchanged(path, caller, read, job)
    # Only now: after an error of one process in reading, the others must not wait for it in an exchange.
    results = [python_tree(mapped(tree, lambda _, leaf: _in_layout(leaf, caller))) for tree in trees]
    return results[0] if like is None else replaced(like, results)


# -- what is wanted --------------------------------------------------------------------------------


@dataclass
class _Wanted:
    """A leaf of ``like``, and what the checkpoint has in its place.

    Attributes:
        node: the part of the tree.
        like: the leaf of ``like``: a layout, None, or what the result is like.
    """

    node: Node[Object] | Object
    like: Any

    def text(self) -> str:
        """Returns a text that is the same in all processes if they want the same."""
        like = self.like
        if isinstance(like, (ShardedTensor, ShapeDtypeStruct)):
            like = like.sharding
        mesh = like.mesh if isinstance(like, NamedSharding) else like
        devices = mesh.flat if isinstance(mesh, Mesh) else (mesh,) if isinstance(mesh, Device) else ()
        if devices and len(processes_of(devices)) == 1:  # Each process may have its own.
            like = f"local {like.spec if isinstance(like, NamedSharding) else ''}"
        is_layout = isinstance(like, (str, *_LAYOUTS))
        return f"in like {like if is_layout else type(like).__name__} for {python_tree(self.node)}"

    def read(self, folder: str, manifest: Manifest, caller: str) -> Node[Any] | Any:
        """Reads it: of a tensor, what it returns is for `_in_layout`."""
        return mapped(self.node, lambda name, record: self._leaf(folder, manifest, name, record, caller))

    def _leaf(self, folder: str, manifest: Manifest, name: str, record: Object, caller: str) -> Any:
        if "array" not in record:
            return values.read(record, f"{os.path.join(folder, FILE)}: {name}")
        array = manifest.arrays[record["array"]]
        try:
            return _read_array(folder, array, self.like, caller)
        except (ShardTensorError, OSError) as error:
            if isinstance(error, ShardTensorError):
                raise type(error)(f"{caller}: {array.name}: {error}") from None
            error.add_note(f"{caller}: it belongs to the leaf {array.name}")
            raise


def _wanted(
    manifest: Manifest, like: Any, only: str | Collection[str] | None, rename: Mapping[str, str], device: Where | None
) -> list[_Wanted]:
    tree = manifest.tree
    if only is not None:
        names = [only] if isinstance(only, str) else only
        if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError(f"only is {only!r:.60}, {type_text(only)}; wanted names of leaves")
        tree = selected(tree, names)
    if not isinstance(rename, Mapping) or not all(isinstance(name, str) for pair in rename.items() for name in pair):
        raise ArgumentTypeError(f"rename is {rename!r:.60}, {type_text(rename)}; wanted new names by old names")
    tree = renamed(tree, rename)
    if device is not None:
        if like is not None:
            raise ArgumentError("device and like are given; wanted one of them")
        if not isinstance(device, _LAYOUTS):
            raise ArgumentTypeError(
                f"device is {device!r:.60}, {type_text(device)}; wanted a Device, Mesh, NamedSharding or P"
            )
        like = device
    problems: list[str] = []
    pairs = _paired(like, tree, (), problems)
    for one, node, path in pairs:
        _compare(one, node, path, manifest, problems)
    if problems:
        more = len(problems) - 50
        raise ArgumentError(
            "the checkpoint does not fit like: "
            + "; ".join(problems[:50])
            + (f"; and {more} more" if more > 0 else "")
            + ". Restore a part of it with only=, or other names with rename=; st.checkpoint.inspect shows what it has"
        )
    return [_Wanted(node, one) for one, node, _ in pairs]


def _paired(
    like: Any, node: Node[Object] | Object, path: tuple[Key, ...], problems: list[str]
) -> list[tuple[Any, Node[Object] | Object, tuple[Key, ...]]]:
    """Returns the leaves of ``like``, from left to right, each with the part of a checkpoint that it covers."""
    items = keys_of(like)
    if items is None:
        return [(like, node, path)]
    if not isinstance(node, Node):
        problems.append(f"{shown(path) or 'the tree'} is a leaf, and like has {type_text(like)} there")
        return []
    keys = {key for key, _ in items}
    problems += [f"{shown((*path, key))} is missing in the checkpoint" for key, _ in items if key not in node.entries]
    problems += [f"{shown((*path, key))} is extra: like does not have it" for key in node.entries if key not in keys]
    pairs = []
    for key, child in items:
        if key in node.entries:
            pairs += _paired(child, node.entries[key], (*path, key), problems)
    return pairs


def _compare(
    like: Any, node: Node[Object] | Object, path: tuple[Key, ...], manifest: Manifest, problems: list[str]
) -> None:
    """Notes in what a leaf of ``like`` differs from what the checkpoint has."""
    if like is None or isinstance(like, _LAYOUTS):
        for _, _, record in names_of(node):
            if isinstance(like, (NamedSharding, PartitionSpec)) and "array" in record:
                array = manifest.arrays[record["array"]]
                spec = like.spec if isinstance(like, NamedSharding) else like
                if array.layout is not None and len(spec) > len(array.shape):
                    problems.append(f"{record['array']} has shape {array.shape}, and its layout in like is {spec}")
        return
    name = shown(path) or "the tree"
    if isinstance(node, Node):
        problems.append(f"{name} is a {node.kind} in the checkpoint, and like has {type_text(like)} there")
        return
    if isinstance(like, (ShardedTensor, ShapeDtypeStruct, np.ndarray)):
        if "array" not in node:
            problems.append(f"{name} is of type {values.type_of(node)} in the checkpoint, and an array in like")
            return
        array = manifest.arrays[node["array"]]
        if (array.shape, array.dtype) != (tuple(like.shape), like.dtype):
            problems.append(
                f"{name} has shape {array.shape} and dtype {array.dtype} in the checkpoint, and {tuple(like.shape)} "
                f"and {like.dtype} in like"
            )
        return
    saved = "array" if "array" in node else values.type_of(node)
    wanted = f"scalar of dtype {like.dtype}" if isinstance(like, np.generic) else type(like).__name__
    if saved != wanted:
        problems.append(f"{name} is of type {saved} in the checkpoint, and {wanted} in like")


# -- reading ---------------------------------------------------------------------------------------


class _Read(NamedTuple):
    """A tensor that was read, and the aval that it gets."""

    x: ShardedTensor
    target: Aval


def _read_array(folder: str, array: ArrayRecord, like: Any, caller: str) -> _Read | HostArray:
    stored = open_array(folder, array)
    target = _target(array, like)
    if target is None:
        return stored.read()
    x = read_tensor(on_devices(divided(target)), stored.read, caller, stored.check_sizes)
    return _Read(x if array.scalar else mark_array(x), target)


def _in_layout(leaf: Any, caller: str) -> Any:
    """Returns a leaf in its layout: what processes have divided to read it is sent."""
    if not isinstance(leaf, _Read):
        return leaf
    x, target = leaf
    if is_common(x):
        x._identity = note(f"{caller}: {x.dtype}{list(x.shape)} {x.sharding.spec}")
    if x._aval is target:
        return x
    return mark_array(tensor(target, call("reshard", x, sharding=target.sharding)._storage))


def open_array(folder: str, array: ArrayRecord) -> ZarrArray:
    """Returns an array of a checkpoint, whose metadata is what the manifest has.

    Raises:
        ArgumentError: it is not.
        OSError: it cannot be read.
    """
    key = f"{array.name}/zarr.json"
    path = os.path.join(folder, key)
    text = read_text(folder, key, MOST)
    nbytes, checksum = array.files.get("zarr.json", (0, 0))
    if len(text) != nbytes or crc32c(text) != checksum:
        raise ArgumentError(
            f"{path} is damaged: it is not the file that was written; restore an older checkpoint, or a copy of the "
            "file"
        )
    metadata = parse(text, path)
    if not isinstance(metadata, ArrayMetadata) or (metadata.shape, metadata.dtype) != (array.shape, array.dtype):
        raise ArgumentError(f"{path} is broken: it does not have the shape and dtype of the manifest")
    return ZarrArray(folder, metadata, f"{array.name}/", {key: value for key, (_, value) in array.files.items()})


def _target(array: ArrayRecord, like: Any) -> Aval | None:
    """Returns the aval of the tensor that is restored; None for an array of NumPy."""
    shape, dtype = array.shape, array.dtype
    if isinstance(like, np.ndarray):
        return None
    if isinstance(like, (ShardedTensor, ShapeDtypeStruct)):
        if like.sharding.spec.unreduced:
            raise ArgumentTypeError("its layout in like is unreduced; wanted one without unreduced axes")
        return aval(shape, dtype, like.sharding, like.committed)
    if array.layout is None:
        return None
    if like is None:
        sharding, committed = placed(array.layout, len(shape))
        return aval(shape, dtype, sharding, committed)
    return aval(shape, dtype, as_sharding(like, len(shape), "restore"), True)
