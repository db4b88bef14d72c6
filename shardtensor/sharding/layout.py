"""`NamedSharding` and the split rule: which part of an array each device holds, and the index arithmetic for it.

Everything here is a pure value: no arrays are held and no devices are accessed. There is one split rule: when a
dimension of size n is split into k parts, the first ``n % k`` parts have ``n // k + 1`` elements and the others
``n // k``. If several mesh axes split one dimension, they split it one after the other, major first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HOST, MEMORY_KINDS, Device
from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import backend_of_group
from shardtensor.core import ABOVE
from shardtensor.errors import ArgumentError, ArgumentTypeError, BackendError, ShapeError, ShardingError, type_text
from shardtensor.hints import explains_attributes, of_device, similar
from shardtensor.host.fork import cached_property
from shardtensor.host.units import counted
from shardtensor.sequences import check_no_iterator
from shardtensor.sharding.mesh import Mesh, default_mesh, integers, mesh_in_use, mesh_of
from shardtensor.sharding.spec import Chain, P, PartitionSpec

Shape: TypeAlias = tuple[int, ...]
Ints: TypeAlias = npt.NDArray[np.int64]

# -- the split rule --------------------------------------------------------------------------------


@functools.lru_cache(4096)
def offsets(size: int, counts: tuple[int, ...]) -> Ints:
    """Returns the offsets of the parts of a dimension, followed by its size.

    The result has ``prod(counts) + 1`` non-decreasing integers from 0 to ``size``. ``counts`` are the sizes of the mesh
    axes that split the dimension, major first.

    >>> offsets(10, (4,)).tolist(), offsets(10, (2, 2)).tolist()
    ([0, 3, 6, 8, 10], [0, 3, 5, 8, 10])
    """
    bounds = np.array([0, size], np.int64)
    for count in counts:
        starts, sizes = bounds[:-1, None], np.diff(bounds)[:, None]
        part = np.arange(count)
        inner = starts + part * (sizes // count) + np.minimum(part, sizes % count)
        bounds = np.append(inner.ravel(), size)
    bounds.flags.writeable = False
    return bounds


# -- shardings -------------------------------------------------------------------------------------


@explains_attributes
class NamedSharding:
    """The placement of an array on devices: a mesh, and a spec that names the mesh axes that split each dimension.

    A sharding and a shape determine the index of every shard. Sizes need not be divisible by the number of parts: 10
    rows over 4 devices are split as 3, 3, 2, 2 (see `shardtensor.sharding.layout` for the split rule). The array is
    replicated along mesh axes that the spec does not contain.

    Args:
        mesh: the devices.
        spec: the `P` with the mesh axes that split each dimension.
        memory_kind: ``"device"`` or ``"pinned_host"``; None is the same as ``"device"``.

    Raises:
        ArgumentTypeError: ``mesh`` is not a Mesh, or ``spec`` not a `P`.
        ShardingError: the spec contains an axis that the mesh does not have, or the memory kind is unknown.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> st.NamedSharding(mesh, st.P("x")).devices_indices_map((10,))[mesh.flat[0]]
    (slice(0, 3, None),)
    """

    __slots__ = ("__weakref__", "_hash", "_key", "memory_kind", "mesh", "spec")

    def __init__(self, mesh: Mesh, spec: PartitionSpec, *, memory_kind: str | None = None) -> None:
        if not isinstance(mesh, Mesh):
            raise ArgumentTypeError(f"NamedSharding: mesh is {type_text(mesh)}; wanted a Mesh (see st.make_mesh)")
        if not isinstance(spec, PartitionSpec):
            raise ArgumentTypeError(f"NamedSharding: spec is {type_text(spec)}; wanted a P, such as P('x', None)")
        for axis in spec.axes:
            if axis not in mesh.shape:
                raise ShardingError(
                    f"NamedSharding: {spec} names axis {axis!r}; the mesh has {mesh.axis_names}"
                    f"{similar(axis, mesh.axis_names)}"
                )
        if memory_kind not in (None, *MEMORY_KINDS):
            raise ShardingError(f"NamedSharding: memory_kind is {memory_kind!r}; there are {MEMORY_KINDS}")
        if spec.unreduced and memory_kind == "pinned_host":
            raise ShardingError(f"NamedSharding: {spec} with memory_kind={memory_kind!r}; partial sums stay on devices")
        self.mesh = mesh
        self.spec = spec
        self.memory_kind = memory_kind or "device"
        self._key = (mesh, spec, self.memory_kind)
        self._hash = hash(self._key)

    def with_spec(self, spec: PartitionSpec) -> NamedSharding:
        """Returns the sharding with the same mesh and memory kind and another spec."""
        return NamedSharding(self.mesh, spec, memory_kind=self.memory_kind)

    def with_memory_kind(self, kind: str | None) -> NamedSharding:
        """Returns the sharding with the same mesh and spec and another memory kind."""
        return NamedSharding(self.mesh, self.spec, memory_kind=kind)

    @property
    def num_devices(self) -> int:
        """The number of devices that hold a shard."""
        return self.mesh.size

    @property
    def device_set(self) -> set[Device]:
        """The devices that hold a shard."""
        return set(self.mesh.flat)

    @property
    def addressable_devices(self) -> set[Device]:
        """The devices of the sharding that this process owns."""
        return set(self.mesh.local_devices)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process owns all devices of the sharding."""
        return len(self.mesh.local_devices) == self.mesh.size

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole array."""
        return all(self.mesh.shape[axis] == 1 or axis in self.spec.reduced for axis in self.spec.axes)

    def check_rank(self, ndim: int, caller: str) -> None:
        """Raises a ShardingError that names ``caller`` if the spec has more than ``ndim`` dimensions."""
        if len(self.spec) > ndim:
            raise ShardingError(
                f"{caller}: {self.spec} has {counted(len(self.spec), 'dimension')} and the array has {ndim}; give at "
                f"most {ndim}"
            )

    def grid(self, shape: Shape) -> Grid:
        """Returns the `Grid` of the shards of an array of that shape."""
        return _grid(self, tuple(shape))

    def shard_shape(self, shape: Sequence[int]) -> Shape:
        """Returns the shape of a shard of an array of that shape; if shards differ, the largest size in each dimension.

        >>> st.NamedSharding(st.make_mesh((4,), ("x",)), st.P("x")).shard_shape((10, 3))
        (3, 3)
        """
        grid = self.grid(checked_shape(shape, "shard_shape"))
        return tuple([int(np.diff(bounds).max()) for bounds in grid.offsets])

    def devices_indices_map(self, shape: Sequence[int]) -> dict[Device, tuple[slice, ...]]:
        """Returns the index of each device's shard: the device holds ``x[index]`` of an array ``x`` of that shape."""
        grid = self.grid(checked_shape(shape, "devices_indices_map"))
        return dict(zip(self.mesh.flat, grid.indices, strict=True))

    def is_equivalent_to(self, other: NamedSharding, ndim: int) -> bool:
        """Whether both shardings place the same elements on the same devices, in memory of the same kind, for every
        shape of ``ndim`` dimensions.

        Raises:
            ArgumentTypeError: ``other`` is not a NamedSharding.
            ShardingError: a spec has more than ``ndim`` dimensions.
        """
        if not isinstance(other, NamedSharding):
            raise ArgumentTypeError(f"is_equivalent_to: other is {type_text(other)}; wanted a NamedSharding")
        for sharding in (self, other):
            sharding.check_rank(ndim, "is_equivalent_to")
        return self.memory_kind == other.memory_kind and _placement(self, ndim) == _placement(other, ndim)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, NamedSharding) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._key

    def __repr__(self) -> str:
        kind = "" if self.memory_kind == "device" else f", memory_kind={self.memory_kind!r}"
        return f"NamedSharding({self.mesh!r}, {self.spec!r}{kind})"

    def _repr_html_(self) -> str:
        return ABOVE["sharding_html"](self)  # type: ignore[no-any-return]


class SingleDeviceSharding(NamedSharding):
    """The sharding of an array on a single device; equal to the `NamedSharding` with the same placement.

    >>> st.SingleDeviceSharding(st.devices()[0]).shard_shape((10, 3))
    (10, 3)
    """

    __slots__ = ()

    def __init__(self, device: Device, *, memory_kind: str | None = None) -> None:
        if not isinstance(device, Device):
            raise ArgumentTypeError(f"SingleDeviceSharding: device is {type_text(device)}; take one from st.devices()")
        super().__init__(mesh_of((device,)), P(), memory_kind=memory_kind)


def _rebuild(mesh: Mesh, spec: PartitionSpec, memory_kind: str) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _placement(sharding: NamedSharding, ndim: int) -> tuple[Any, ...]:
    """Returns the placement that holds for every shape: each dimension's split counts and each device's parts."""
    mesh = sharding.mesh
    chains = [tuple([a for a in chain if mesh.shape[a] > 1]) for chain in sharding.spec.chains_of(ndim)]
    counts = [[mesh.shape[a] for a in chain] for chain in chains]
    sums = {axis for axis in sharding.spec.unreduced if mesh.shape[axis] > 1}
    return counts, sums, dict(zip(mesh.flat, _parts(mesh, chains).tolist(), strict=True))


def _parts(mesh: Mesh, chains: Sequence[Chain]) -> Ints:
    """Returns the number of the part that each device holds in each dimension, of shape (devices, dimensions)."""
    coordinates = mesh.coordinates
    parts = np.zeros((mesh.size, len(chains)), np.int64)
    for dimension, chain in enumerate(chains):
        for axis in chain:
            parts[:, dimension] *= mesh.shape[axis]
            parts[:, dimension] += coordinates[:, mesh.axis_names.index(axis)]
    return parts


def checked_shape(shape: Any, caller: str = "") -> Shape:
    """Converts a ``shape=`` argument, an integer or a sequence of integers, to a tuple of Python integers.

    Raises:
        ArgumentTypeError: ``shape`` is something else. Messages name ``caller``, which operators leave to dispatch.
        ShapeError: a size is negative.
    """
    name = f"{caller}: shape" if caller else "shape"
    check_no_iterator(shape, name)
    sizes = tuple(integers(shape, name))
    if min(sizes, default=0) < 0:
        raise ShapeError(f"{name} {sizes} has a negative size")
    if max(sizes, default=0) > sys.maxsize:
        raise ShapeError(f"{name} {sizes} has a size above {sys.maxsize}, for which no machine has memory")
    return sizes


Where: TypeAlias = Device | Mesh | NamedSharding | PartitionSpec
"""What ``device=`` arguments accept; a bare spec refers to the mesh in use."""


def with_mesh(where: Any, caller: str) -> Any:
    """Returns a ``device=`` argument with a bare spec replaced by the sharding of that spec on the mesh in use.

    Raises:
        ShardingError: no mesh is in use, or it lacks an axis of the spec.
    """
    if not isinstance(where, PartitionSpec):
        return where
    mesh = mesh_in_use()
    if mesh is None:
        raise ShardingError(
            f"{caller}: {where} is a spec without a mesh, and no mesh is in use; call st.set_mesh(mesh) first, or give "
            f"st.NamedSharding(mesh, st.{where})"
        )
    for axis in where.axes:
        if axis not in mesh.shape:
            inside = " (inside a mapped function, that of the devices of the call)" if current_device() else ""
            raise ShardingError(
                f"{caller}: {where} names axis {axis!r}; the mesh in use{inside} has {mesh.axis_names}"
                f"{similar(axis, mesh.axis_names)}"
            )
    return NamedSharding(mesh, where)


def chosen(device: Where | None, out_sharding: Where | None, caller: str) -> Where | None:
    """Returns the one that is given of the arguments ``device`` and ``out_sharding`` of a function that creates arrays.

    Raises:
        ArgumentError: both are given.
    """
    if device is not None and out_sharding is not None:
        raise ArgumentError(f"{caller}: both device and out_sharding are given; wanted one of them")
    return device if out_sharding is None else out_sharding


def as_sharding(where: Where, ndim: int, caller: str) -> NamedSharding:
    """Converts a ``device=`` argument to the sharding of an array of ``ndim`` dimensions.

    A device gives the sharding on that single device. A mesh gives the sharding that splits the first dimension over
    all mesh axes, major first, and replicates 0-d arrays. A spec gives the sharding of that spec on the mesh in use. A
    sharding is returned unchanged.

    Raises:
        ArgumentTypeError: ``where`` is none of these.
        ShardingError: the spec has more than ``ndim`` dimensions, the device is the host, or a bare spec is given and
            no mesh is in use.
    """
    where = with_mesh(where, caller)
    if isinstance(where, NamedSharding):
        where.check_rank(ndim, caller)
        return where
    if isinstance(where, Mesh):
        return _first_split(where, ndim > 0)
    if isinstance(where, Device):
        if where == HOST:
            raise ShardingError(f"{caller}: tensors cannot be on the host; np.asarray(x) returns a host array")
        return _single(where)
    raise ArgumentTypeError(
        f"{caller}: {where!r} is {type_text(where)}; wanted a Device, a Mesh, a NamedSharding or a P{of_device(where)}"
    )


def on_existing_devices(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Returns the sharding for an unpickled array of ``ndim`` dimensions: the pickled sharding if its devices exist in
    this process, else a sharding over the default mesh.
    """
    mesh = sharding.mesh
    try:
        backend_of_group(mesh.flat)
    except (ArgumentError, BackendError) as error:  # The backend is not installed, unusable, or has fewer devices.
        return _substitute(sharding, ndim, default_mesh(), str(error))
    return NamedSharding(mesh.on_known_devices(), sharding.spec, memory_kind=sharding.memory_kind)


@functools.lru_cache(1024)
def _substitute(sharding: NamedSharding, ndim: int, default: Mesh, reason: str) -> NamedSharding:
    """Returns the sharding over ``default`` that replaces one whose devices do not exist.

    It has the same spec if ``default`` has the axes in it, else it is the sharding of ``device=default``. A sharding on
    a single device becomes one on a single device of ``default``. The cache makes each replacement log only once.
    """
    mesh, spec = sharding.mesh, sharding.spec
    where: Mesh | NamedSharding | Device = default
    if mesh.size == 1:  # Tensors that were on different devices stay on different devices if possible.
        where = default.flat[mesh.flat[0].id % default.size]
    elif all(axis in default.shape for axis in spec.axes):
        where = NamedSharding(default, spec)
    target = as_sharding(where, ndim, "unpickle").with_memory_kind(sharding.memory_kind)
    import logging  # Few programs load tensors on other devices.

    logging.getLogger("shardtensor").warning("unpickle: tensors of %r are loaded on %r: %s", mesh, target.mesh, reason)
    return target


@functools.lru_cache(1024)
def _first_split(mesh: Mesh, split: bool) -> NamedSharding:
    return NamedSharding(mesh, P(mesh.axis_names) if split else P())


@functools.lru_cache(8192)
def _single(device: Device) -> NamedSharding:
    return SingleDeviceSharding(device)


# -- shards as index arithmetic --------------------------------------------------------------------


@dataclass(eq=False)
class Grid:
    """The shards of an array as index arithmetic, for copy plans and interpreters.

    Attributes:
        devices: the devices that hold a shard, in mesh order; the k-th is called holder k.
        offsets: for each dimension, the offsets of its parts followed by its size.
        parts: the number of each holder's part in each dimension, of shape (holders, dimensions).
    """

    devices: tuple[Device, ...]
    offsets: tuple[Ints, ...]
    parts: Ints

    @cached_property
    def indices(self) -> list[tuple[slice, ...]]:
        """The index of each holder's shard."""
        return [self.index(k) for k in range(len(self.devices))]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of parts of each dimension."""
        return tuple(len(bounds) - 1 for bounds in self.offsets)

    def box(self, k: int) -> tuple[tuple[int, int], ...]:
        """Returns begin and end of holder ``k``'s shard in each dimension."""
        return tuple((int(o[p]), int(o[p + 1])) for o, p in zip(self.offsets, self.parts[k], strict=True))

    def index(self, k: int) -> tuple[slice, ...]:
        """Returns the index of holder ``k``'s shard in the array."""
        return tuple([slice(*ends) for ends in self.box(k)])

    def shape(self, k: int) -> Shape:
        """Returns the shape of holder ``k``'s shard."""
        shape = self._shapes.get(k)
        if shape is None:
            shape = self._shapes[k] = tuple([end - begin for begin, end in self.box(k)])
        return shape

    @cached_property
    def _shapes(self) -> dict[int, Shape]:
        """The shapes that have been asked for: a grid may have more holders than a call needs."""
        return {}

    def linear_parts(self) -> Ints:
        """Returns each holder's parts as one row-major number; holders of the same elements have equal numbers."""
        numbers = np.zeros(len(self.devices), np.int64)
        for dimension, count in enumerate(self.counts):
            numbers = numbers * count + self.parts[:, dimension]
        return numbers

    def owners(self) -> list[int]:
        """Returns one holder of each distinct shard, the first in mesh order."""
        return sorted(np.unique(self.linear_parts(), return_index=True)[1].tolist())

    def same(self, other: Grid) -> bool:
        """Whether both grids have the same devices in the same order with the same elements."""
        return self is other or (
            self.devices == other.devices
            and all(np.array_equal(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
            and np.array_equal(self.parts, other.parts)
        )


@functools.lru_cache(1024)
def _grid(sharding: NamedSharding, shape: Shape) -> Grid:
    sharding.check_rank(len(shape), "sharding")
    mesh, chains = sharding.mesh, sharding.spec.chains_of(len(shape))
    counts = [tuple([mesh.shape[axis] for axis in chain]) for chain in chains]
    return Grid(mesh.flat, tuple(map(offsets, shape, counts)), _parts(mesh, chains))
