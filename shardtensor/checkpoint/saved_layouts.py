"""The layouts of tensors in a checkpoint: meshes by the numbers of their devices, so that they exist on other machines.

A layout never decides where an element is in a file. It is read only to place a tensor that no other layout is given
for.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from shardtensor.backend.device import MEMORY_KINDS, Device
from shardtensor.backend.registry import devices, is_remote, load, local_devices, processes_of
from shardtensor.errors import ArgumentError, BackendError, ShardTensorError
from shardtensor.files.metadata import DIMENSIONS, Object, brief
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.mesh import Mesh, default_mesh, mesh_in_use
from shardtensor.sharding.spec import Chain, P


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor.

    Attributes:
        axes: the names and sizes of the axes of its mesh.
        backend: the name of the backend.
        numbers: the numbers of the devices, among all devices of the backend in `st.devices`.
        local: whether each process had a tensor of its own, on its own devices, of which these are the numbers.
        chains: the mesh axes that split each dimension.
        memory_kind: the memory kind.
        committed: whether the tensor was placed explicitly.
        reduced: the mesh axes along which its gradients are partial sums.
    """

    axes: tuple[tuple[str, int], ...]
    backend: str
    numbers: tuple[int, ...]
    local: bool
    chains: tuple[Chain, ...]
    memory_kind: str
    committed: bool
    reduced: Chain = ()

    @property
    def spec(self) -> P:
        """The spec of the tensor."""
        return P(*self.chains, reduced=self.reduced)

    def to_json(self) -> Object:
        """Returns an object of JSON."""
        return {
            "mesh": [[name, size] for name, size in self.axes], "spec": [list(chain) for chain in self.chains],
            "backend": self.backend, "devices": list(self.numbers), "local": self.local,
            "memory_kind": self.memory_kind, "committed": self.committed, "reduced": list(self.reduced),
        }  # fmt: skip

    def __str__(self) -> str:
        mesh = " x ".join(f"{name}={size}" for name, size in self.axes)
        return f"{self.spec} on {mesh}{'' if self.memory_kind == 'device' else f', {self.memory_kind}'}"


def layout_of(sharding: NamedSharding, committed: bool, spans: bool, in_job: bool) -> Layout:
    """Returns the layout of a tensor.

    Args:
        sharding: its sharding.
        committed: whether it was placed explicitly.
        spans: whether its devices belong to several processes.
        in_job: whether there are several processes.
    """
    mesh = sharding.mesh
    backend = mesh.flat[0].backend
    local = in_job and not spans and not any(map(is_remote, mesh.flat))
    return Layout(
        tuple(mesh.shape.items()), backend, _numbers(mesh, local), local, sharding.spec.chains, sharding.memory_kind,
        committed, tuple(sorted(sharding.spec.reduced)),
    )  # fmt: skip


@functools.lru_cache(256)
def _numbers(mesh: Mesh, local: bool) -> tuple[int, ...]:
    backend = mesh.flat[0].backend
    known = {device: k for k, device in enumerate((local_devices if local else devices)(backend))}
    return tuple([known[device] for device in mesh.flat])


def layout_from_json(content: Object, ndim: int, name: str) -> Layout:
    """Returns the layout of a tensor of ``ndim`` dimensions that an object of JSON has.

    Raises:
        ArgumentError: it is broken.
    """
    try:
        axes = tuple([(str(axis), _size(size)) for axis, size in content["mesh"]])
        numbers = tuple(map(_size, content["devices"]))
        chains = tuple([tuple(map(str, chain)) for chain in content["spec"]])
        reduced = tuple(map(str, content.get("reduced", ())))  # Earlier versions did not write it.
        sizes = dict(axes)
        spec = P(*chains, reduced=reduced)
        if (
            len(sizes) != len(axes) or len({*numbers}) != len(numbers) or not numbers
            or math.prod(sizes.values()) != len(numbers) or len(chains) > ndim or len(axes) > DIMENSIONS
            or any(axis not in sizes for axis in spec.axes)
            or content["memory_kind"] not in MEMORY_KINDS
        ):  # fmt: skip
            raise ValueError("its parts do not fit")
        return Layout(
            axes, str(content["backend"]), numbers, bool(content["local"]), chains, content["memory_kind"],
            bool(content["committed"]), reduced,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ShardTensorError) as error:
        raise ArgumentError(f"{name}: its layout {brief(content)} is broken ({error})") from None


def _size(n: object) -> int:
    if type(n) is not int or not 0 <= n < 1 << 31:
        raise ValueError(n)
    return n


def placed(layout: Layout, ndim: int) -> tuple[NamedSharding, bool]:
    """Returns the sharding of a tensor with a layout on the devices that exist, and whether it is committed to it.

    It is that of the spec on the mesh in use, if this has all axes of the mesh of the layout, and else the layout
    itself where the devices exist, in a job some in each process. Otherwise the default mesh splits the first dimension
    of tensors that were not replicated, and the tensor is not committed, because no caller chose the mesh.
    """
    used = mesh_in_use()
    is_single = len(layout.numbers) == 1  # Each single device is a mesh of its own.
    if used is not None and not is_single and all(axis in used.shape for axis, _ in layout.axes):
        return NamedSharding(used, layout.spec, memory_kind=layout.memory_kind), layout.committed
    if (known := _mesh(layout)) is not None:
        return NamedSharding(known, layout.spec, memory_kind=layout.memory_kind), layout.committed
    mesh = default_mesh()
    if not layout.chains and not is_single:
        return NamedSharding(mesh, P(), memory_kind=layout.memory_kind), False
    return as_sharding(mesh, ndim, "restore").with_memory_kind(layout.memory_kind), False


def _mesh(layout: Layout) -> Mesh | None:
    """Returns the mesh of a layout; None if this machine lacks devices of it, or one process of a job has all of them,
    as those of a program without a job: the others would have no part of the tensor.
    """
    try:
        load(layout.backend)
    except (ArgumentError, BackendError):  # It is not installed, or cannot be used here.
        there = (local_devices if layout.local else devices)()
    else:
        there = (local_devices if layout.local else devices)(layout.backend)
    if max(layout.numbers) >= len(there):
        return None
    chosen = tuple([there[k] for k in layout.numbers])
    if processes_of(chosen) != processes_of(tuple(there)):  # Some of the processes would have nothing of the tensor.
        return None
    return _mesh_of(layout.axes, chosen)


@functools.lru_cache(256)
def _mesh_of(axes: tuple[tuple[str, int], ...], chosen: tuple[Device, ...]) -> Mesh:
    grid = np.empty(len(chosen), object)
    grid[:] = chosen
    return Mesh(grid.reshape([size for _, size in axes]), tuple([name for name, _ in axes]))
