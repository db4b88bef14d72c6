"""Hypothesis strategies for shapes, arrays, meshes and shardings, and the comparison with NumPy.

Importing this module loads hypothesis.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend import Device, HostArray
from shardtensor.backend.registry import backend_of

MESHES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 3), (4, 2), (1, 3), (2, 2, 2)]
NAMES = ("x", "y", "z")
FLOATS = ["float32", "float64"]
DTYPES = ["bool", "int8", "int32", "int64", "uint8", "float16", "float32", "float64", "complex64", "complex128"]
PLACES = some.sampled_from(["mesh", "mesh", "mesh", "other", "host", "unplaced"])
STRIDES = some.sampled_from(["C", "C", "F", "reversed", "pieces"])
SIZES = some.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 16])


def mesh_of(shape: tuple[int, ...], backend: str, start: int = 0) -> st.Mesh:
    """Returns a mesh of that shape, of the backend's devices from index ``start`` on."""
    return st.make_mesh(shape, NAMES[: len(shape)], devices=st.devices(backend)[start:])


def all_specs(mesh: st.Mesh, ndim: int) -> list[st.P]:
    """Returns all specs of an ``ndim``-dimensional array on a mesh, with axes on one dimension in every order."""
    specs = set()
    axes = list(mesh.axis_names)
    for dims in itertools.product(range(-1, ndim), repeat=len(axes)):
        for order in itertools.permutations(range(len(axes))):
            parts = [tuple(axes[i] for i in order if dims[i] == d) for d in range(ndim)]
            specs.add(st.P(*parts))
    return sorted(specs, key=repr)


@functools.cache
@some.composite
def meshes(draw: Any, backend: str) -> st.Mesh:
    """Draws a mesh of up to three axes over some of the devices, in any order."""
    known = st.devices(backend)
    mesh_shapes, orders = _meshes_of(len(known))
    shape, order = draw(mesh_shapes), draw(orders)
    count = math.prod(shape)
    grid = np.empty(count, object)
    grid[:] = [known[i] for i in order[:count]]
    return st.Mesh(grid.reshape(shape), NAMES[: len(shape)])


@functools.cache
def _meshes_of(count: int) -> tuple[Any, Any]:
    """Returns the strategies of the shapes of meshes of at most ``count`` devices, and of the order of the devices."""
    fitting = some.sampled_from([s for s in MESHES if math.prod(s) <= count])
    return fitting, some.one_of(some.just(list(range(count))), some.permutations(range(count)))


@some.composite
def specs(draw: Any, mesh: st.Mesh, ndim: int) -> st.P:
    """Draws a spec: each mesh axis is assigned to a dimension or to none."""
    parts: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw(some.permutations(mesh.axis_names)):
        dim = draw(some.integers(-1, ndim - 1))
        if dim >= 0:
            parts[dim].append(axis)
    return st.P(*[tuple(p) for p in parts])


@functools.cache
@some.composite
def shapes(draw: Any, min_dims: int = 0, max_dims: int = 3) -> tuple[int, ...]:
    """Draws a shape, including sizes 0 and 1 and sizes that no mesh divides."""
    return tuple(draw(some.lists(SIZES, min_size=min_dims, max_size=max_dims)))


@functools.cache
@some.composite
def broadcastable(draw: Any, count: int) -> list[tuple[int, ...]]:
    """Draws shapes that broadcast together: trailing parts of one shape, with some sizes replaced by 1."""
    whole = draw(shapes())
    out = []
    for _ in range(count):
        tail = whole[draw(some.integers(0, len(whole))) :]
        out.append(tuple(1 if draw(some.booleans()) and draw(some.booleans()) else n for n in tail))
    return out


def array(shape: tuple[int, ...], dtype: str, seed: int) -> HostArray:
    """Returns an array of small pseudo-random numbers of that dtype, with repetitions and, if signed, negative ones."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    if kind in "iu":
        return np.asarray(rng.integers(0 if kind == "u" else -5, 6, shape)).astype(dtype)
    values = np.asarray(rng.integers(-40, 40, shape) / 16)
    if kind == "c":
        values = values + 1j * np.asarray(rng.integers(-40, 40, shape) / 16)
    return values.astype(dtype)


def placed(data: Any, value: HostArray, backend: str, mesh: st.Mesh | None) -> Any:
    """Draws an operand of that value: sharded on ``mesh`` or on another mesh, not placed explicitly, or a host array.

    Without ``mesh``, the operand is sharded on a drawn mesh.
    """
    how = data.draw(PLACES) if mesh else "mesh"
    if how == "host":
        return value
    if how == "unplaced":
        return st.asarray(value)
    if how != "mesh" or mesh is None:
        mesh = data.draw(meshes(backend))
    sharding = st.NamedSharding(mesh, data.draw(specs(mesh, value.ndim)))
    strides = data.draw(STRIDES) if value.ndim else "C"
    if strides == "F":
        return st.device_put(value.T, sharding.with_spec(st.P(*sharding.spec.chains_of(value.ndim)[::-1]))).T
    if strides == "reversed":
        return st.device_put(value[::-1], sharding)[::-1]
    if strides == "pieces":  # Results of `pmap` are separate buffers.
        return st.unshard(st.pmap(lambda x: st.asarray(x, copy=True), st.shard(value, devices=mesh)))
    return st.device_put(value, sharding)


def assert_same(result: Any, wanted: Any, *, exact: bool = False) -> None:
    """Asserts that a tensor equals a NumPy array in shape, dtype and values, and that every shard is correct."""
    wanted = np.asarray(wanted)
    assert isinstance(result, st.ShardedTensor), type(result)
    assert result.shape == wanted.shape
    assert result.dtype == wanted.dtype
    _close(np.asarray(result), wanted, exact)
    seen = {}
    for shard in result.addressable_shards:
        assert shard.index == result.sharding.devices_indices_map(result.shape)[shard.device]
        _close(on_host(shard.data, shard.device), wanted[shard.index], exact)
        seen[shard.device] = shard
    assert set(seen) == result.devices()


def on_host(array: Any, device: Device) -> HostArray:
    """Copies a backend's array, which is on ``device``, to the host; also one that is offloaded to it."""
    if type(array) is np.ndarray:
        return np.array(array)
    backend = backend_of(device)
    with backend.on(device):
        return np.array(backend.to_host(array, device))


def _close(left: HostArray, right: HostArray, exact: bool) -> None:
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    if exact or right.dtype.kind in "biu":
        np.testing.assert_array_equal(left, right)
        return
    limit = {"float16": 2e-2, "float32": 2e-5, "complex64": 2e-5}.get(str(right.dtype), 1e-11)
    np.testing.assert_allclose(left, right, rtol=limit, atol=limit)
