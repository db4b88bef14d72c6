"""`Mesh`, an N-dimensional grid of devices with named axes, and the default mesh."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardtensor.backend import registry
from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.core import ABOVE, hinted
from shardtensor.errors import ArgumentTypeError, ShardingError, type_text
from shardtensor.hints import explains_attributes, of_value
from shardtensor.host.units import counted
from shardtensor.sharding.spec import Chain


@explains_attributes
class Mesh:
    """An N-dimensional grid of devices with named axes.

    Args:
        devices: an array (or nested sequence) of distinct devices, in any number of dimensions.
        axis_names: one name for each dimension of ``devices``, all different; a string is the name of a single axis.

    Attributes:
        flat: the devices in mesh order (row-major), which is the order in which shards are numbered.
        size: the number of devices.
        axis_names: the names of the axes, in order.
        axis_sizes: the sizes of the axes, in order.
        shape: a read-only mapping from the name of each axis to its size, in order.

    Raises:
        ArgumentTypeError: an element of ``devices`` is not a `Device`, or ``axis_names`` is not a name or a sequence.
        ShardingError: the number of names differs from the number of dimensions, a name or a device occurs twice, a
            name is not a non-empty string, or the grid is empty.

    Meshes are equal if their devices, the shape of the grid and the axis names are.

    >>> mesh = st.Mesh(np.array(st.devices()[:4]).reshape(2, 2), ("x", "y"))
    >>> mesh.shape
    mappingproxy({'x': 2, 'y': 2})
    """

    __slots__ = ("__weakref__", "_hash", "_key", "axis_names", "axis_sizes", "flat", "shape", "size")

    @hinted
    def __init__(self, devices: npt.ArrayLike | Sequence[Any], axis_names: str | Sequence[str]) -> None:
        grid = np.array(devices, dtype=object)
        for device in grid.flat:
            if not isinstance(device, Device):
                raise ArgumentTypeError(
                    f"Mesh: {device!r} is {type_text(device)}, not a Device; take them from st.devices()"
                )
        try:
            names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        except TypeError:
            kind = type_text(axis_names)
            raise ArgumentTypeError(f"Mesh: axis_names is {kind}; wanted a name or a sequence of names") from None
        for name in names:
            if not isinstance(name, str) or not name:
                raise ShardingError(f"Mesh: axis name {name!r} is not a non-empty string")
            if names.count(name) > 1:
                raise ShardingError(
                    f"Mesh: axis name {name!r} occurs twice in axis_names={names}; each axis needs its own"
                )
        if grid.ndim != len(names):
            raise ShardingError(
                f"Mesh: the devices form a grid of {counted(grid.ndim, 'dimension')}, shape {grid.shape}, and "
                f"axis_names={names} names {len(names)}; give one name per dimension"
            )
        flat: tuple[Device, ...] = tuple(grid.ravel().tolist())
        if not flat:
            raise ShardingError("Mesh: there are no devices; give at least one")
        if len(set(flat)) < len(flat):
            twice = next(d for d in flat if flat.count(d) > 1)
            raise ShardingError(f"Mesh: device {twice} occurs twice; a mesh holds each device once")
        self.axis_names: tuple[str, ...] = names
        self.flat = flat
        self.size = len(flat)
        self.axis_sizes: tuple[int, ...] = grid.shape
        self.shape: Mapping[str, int] = MappingProxyType(dict(zip(names, grid.shape, strict=True)))
        self._key = (flat, grid.shape, names)
        self._hash = hash(self._key)
        registry.note_mesh({device.backend for device in flat})

    @property
    def devices(self) -> npt.NDArray[Any]:
        """The devices as a read-only NumPy array with one dimension for each axis."""
        grid = np.array(self.flat, dtype=object)
        grid.flags.writeable = False
        return grid.reshape(self.axis_sizes)

    @property
    def local_devices(self) -> list[Device]:
        """The devices of the mesh that this process owns."""
        return [d for d in self.flat if d.process_index == registry.process_index()]

    @property
    def coordinates(self) -> npt.NDArray[np.int64]:
        """The index of each device along each axis: an array of shape (size, number of axes), in mesh order."""
        return np.indices(self.axis_sizes).reshape(len(self.axis_sizes), self.size).T

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mesh) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def on_known_devices(self) -> Mesh:
        """Returns an equal mesh whose devices are this process's own `Device` objects; used for unpickled meshes."""
        return Mesh(np.array(registry.known(self.flat), dtype=object).reshape(self.axis_sizes), self.axis_names)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.devices.tolist(), self.axis_names)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"Mesh({axes}; {span(self.flat)})"

    def _repr_html_(self) -> str:
        return ABOVE["mesh_html"](self)  # type: ignore[no-any-return]


def integers(argument: Any, name: str) -> list[int]:
    """Converts an argument that is an integer or a sequence of integers to a list of Python integers.

    Raises:
        ArgumentTypeError: ``argument`` is something else; the message calls it ``name``.
    """
    try:
        # Bytes, sets and dictionaries may have integers for items, but are not sequences of sizes, as for NumPy.
        several = type(argument) is tuple or (
            np.iterable(argument) and not isinstance(argument, (bytes, bytearray, Set, Mapping))
        )
        return [operator.index(n) for n in (argument if several else (argument,))]
    except TypeError:
        text = of_value(argument) or f"{argument!r:.60}"
        raise ArgumentTypeError(f"{name} is {text}; wanted an integer or a sequence of integers") from None


def _unpickle(devices: Any, axis_names: tuple[str, ...]) -> Mesh:
    return Mesh(devices, axis_names).on_known_devices()


def span(devices: Sequence[Device]) -> str:
    """Returns ``cpu:0..7`` for devices with consecutive ids, else the names of the first four."""
    first = devices[0]
    run = [Device(first.backend, first.id + i, d.process_index, d.kind) for i, d in enumerate(devices)]
    if len(devices) > 2 and run == list(devices):
        return f"{first}..{devices[-1].id}"
    return ", ".join(map(str, devices[:4])) + (", …" if len(devices) > 4 else "")


@hinted
def make_mesh(
    axis_sizes: Sequence[int], axis_names: str | Sequence[str] = (), *, devices: Sequence[Device] | None = None
) -> Mesh:
    """Creates a mesh of the given sizes over the first available devices.

    Args:
        axis_sizes: the size of each axis; one size may be -1 and is then computed from the number of devices.
        axis_names: the name of each axis; by default ``axis_0``, ``axis_1``, ….
        devices: the devices to use, in order; default: those of the default backend, ordered so that neighbours along
            the last axis have the fastest links (GPUs that are peers).

    Raises:
        ArgumentTypeError: a size is not an integer.
        ShardingError: the sizes need more devices than there are, a size is not positive, -1 does not give an integral
            size, or the numbers of sizes and names differ.

    >>> st.make_mesh((2, 2), ("data", "model")).axis_sizes
    (2, 2)
    """
    sizes = integers(axis_sizes, "make_mesh: axis_sizes")
    if isinstance(axis_names, tuple) and not axis_names:
        axis_names = [f"axis_{k}" for k in range(len(sizes))]
    pool: Sequence[Device] = registry.devices() if devices is None else list(devices)
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        if rest == 0 or len(pool) % rest:
            raise ShardingError(
                f"make_mesh: axis_sizes={tuple(sizes)} leaves no whole size for -1 with {counted(len(pool), 'device')}"
            )
        sizes[sizes.index(-1)] = len(pool) // rest
    if any(size < 1 for size in sizes):
        raise ShardingError(f"make_mesh: axis_sizes={tuple(sizes)} must be positive (one of them may be -1)")
    count = math.prod(sizes)
    if count > len(pool):
        raise ShardingError(
            f"make_mesh: axis_sizes={tuple(sizes)} needs {counted(count, 'device')} and there are {len(pool)}; "
            + (registry.to_get_devices(count) if devices is None else "give more devices, or a smaller mesh")
        )
    if devices is None:
        pool = registry.default_backend().adjacent_devices(count)
    return Mesh(np.array(pool[:count], dtype=object).reshape(sizes), axis_names)


_mesh: ContextVar[Mesh | Literal[False] | None] = ContextVar("shardtensor_mesh", default=None)
"""The mesh of this context; False for none, and None where that of the process applies."""

_settings: list[set_mesh] = []  # The last of these settings applies to the whole process.
_KEPT = 64
"""The maximum length of `_settings`, which would otherwise grow with every call."""


class set_mesh:  # noqa: N801 - used like a function
    """Makes ``mesh`` the mesh in use.

    Arrays that are created without ``device=`` are placed on it, with their first dimension split over all of its axes.
    Maps without ``devices=`` or ``mesh=`` run on it. A bare `P` stands for the `NamedSharding` of that spec on it,
    wherever a sharding is accepted. Inside a mapped function, the devices that the call owns form the mesh in use.

    A call sets the mesh for the whole process. As a context manager, it sets the mesh inside the ``with``, in this
    thread and in the maps that it starts, and takes precedence there. (Other threads may use the mesh between the call
    and the ``with``; with `use_mesh` they never do.)

    Args:
        mesh: the mesh; None for no mesh: arrays are then placed on all devices of the default backend.

    Raises:
        ArgumentTypeError: ``mesh`` is neither a Mesh nor None.

    >>> with st.set_mesh(st.make_mesh((2, 2), ("X", "Y"))):
    ...     st.zeros((4, 3), device=st.P(None, "Y")).sharding.spec
    P(None, 'Y')
    """

    def __init__(self, mesh: Mesh | None) -> None:
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ArgumentTypeError(f"set_mesh: mesh is {type_text(mesh)}; wanted a Mesh (see st.make_mesh), or None")
        self.mesh = mesh
        _settings.append(self)
        del _settings[:-_KEPT]

    def __enter__(self) -> Mesh | None:
        with contextlib.suppress(ValueError):  # A context manager does not set the mesh for the process.
            _settings.remove(self)
        self._token = _mesh.set(self.mesh or False)
        return self.mesh

    def __exit__(self, *error: object) -> None:
        _mesh.reset(self._token)


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Makes ``mesh`` the mesh in use of this thread inside the ``with`` block: see `set_mesh`.

    A thread that is started in the block uses the mesh only if threads inherit context variables, as they do by default
    on a Python without a GIL.

    >>> with st.use_mesh(st.make_mesh((2,), ("x",))):
    ...     st.zeros((4, 3)).sharding.spec
    P('x')
    """
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError(f"use_mesh: mesh is {type_text(mesh)}; wanted a Mesh")
    token = _mesh.set(mesh)
    try:
        yield mesh
    finally:
        _mesh.reset(token)


def mesh_in_use() -> Mesh | None:
    """Returns the mesh of the innermost `use_mesh`, or of `set_mesh`, or inside a mapped function that of the devices
    that the call owns; None if there is none.
    """
    mesh = _mesh.get()
    if mesh is None:
        last = _settings[-1:]  # in one step: another thread may remove it
        return last[0].mesh if last else None
    return mesh or None


settle_on = _mesh.set
"""Makes a mesh the mesh in use for the rest of the current context (see `contextvars`)."""


def default_mesh() -> Mesh:
    """Returns the default mesh, on which arrays without ``device=`` are created: the mesh in use, or if there is none,
    all devices of the default backend along the axis ``d``.
    """
    return mesh_in_use() or _all_devices(registry.default_backend())


def get_mesh() -> Mesh:
    """Returns the mesh on which arrays without ``device=`` are created, and maps without ``devices=`` run.

    It is the mesh of `set_mesh` or `use_mesh`. Inside a mapped function, it is the mesh of the devices that the call
    owns. Otherwise, it has all devices of the default backend, along the axis ``d``.

    >>> with st.set_mesh(st.make_mesh((2, 2), ("X", "Y"))):
    ...     st.get_mesh()
    Mesh(X=2, Y=2; numpy:0..3)
    """
    return default_mesh()


@functools.cache
def _all_devices(backend: Backend) -> Mesh:
    return mesh_of(tuple(backend.devices()))


@functools.lru_cache(8192)
def mesh_of(devices: tuple[Device, ...]) -> Mesh:
    """Returns the one-dimensional mesh of these devices, with the axis ``d``."""
    return Mesh(devices, ("d",))


@functools.lru_cache(1024)
def shares(devices: tuple[Device, ...], count: int) -> tuple[Mesh, ...]:
    """Distributes the devices over ``count`` calls, at most one call for each device.

    Call k owns every ``count``-th device from the k-th one on, so that calls that use one device each run on the first
    ``count`` devices.

    >>> from shardtensor.sharding.mesh import shares
    >>> shares(tuple(st.devices()[:5]), 2)
    (Mesh(d=3; numpy:0, numpy:2, numpy:4), Mesh(d=2; numpy:1, numpy:3))
    """
    return tuple([mesh_of(devices[k::count]) for k in range(count)])


def submesh(mesh: Mesh, positions: Sequence[int], axes: Sequence[str]) -> Mesh:
    """Returns the devices of a mesh at the given positions, which differ only along ``axes``, as a mesh of these axes.

    Without axes, the result is the mesh of the single device along the axis ``d``.
    """
    row = tuple([mesh.flat[k] for k in positions])
    return Mesh(np.reshape(np.array(row, object), [mesh.shape[name] for name in axes]), axes) if axes else mesh_of(row)


def groups_along(mesh: Mesh, axes: Chain) -> list[list[int]]:
    """Returns the positions of the devices in groups that differ only along the given mesh axes, each in mesh order.

    >>> from shardtensor.sharding.mesh import groups_along
    >>> groups_along(st.make_mesh((2, 2), ("x", "y")), ("x",))
    [[0, 2], [1, 3]]
    """
    positions = np.arange(mesh.size).reshape(mesh.axis_sizes)
    inner = [mesh.axis_names.index(axis) for axis in mesh.axis_names if axis in axes]
    outer = [d for d in range(positions.ndim) if d not in inner]
    count = math.prod(mesh.axis_sizes[d] for d in inner)
    return positions.transpose(outer + inner).reshape(-1, count).tolist()


@functools.lru_cache(1024)
def submeshes_along(mesh: Mesh, axes: Chain) -> tuple[tuple[tuple[int, ...], Mesh], ...]:
    """Returns the positions of each group of devices that differ only along the given mesh axes, and its submesh.

    The groups are in mesh order of the other axes. Without axes, each device is a group.
    """
    return tuple([(tuple(group), submesh(mesh, group, axes)) for group in groups_along(mesh, axes)])
