"""The cells of JAX's "Introduction to parallel programming" under `st.jit`: the shardings that they print are JAX's.

https://docs.jax.dev/en/latest/sharded-computation.html
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from tests import peers
from tests.interpreters.jit.jax_tutorial import found, layout_of
from tests.layouts import everywhere, mesh_of

TABLE: dict[str, tuple[tuple[int, ...], P, str]] = {
    "arr": ((1,), P(), "device"),
    "arr_sharded": ((2, 4), P("x", "y"), "device"),
    "arr_host": ((2, 4), P("x", "y"), "pinned_host"),
    "arr_dev": ((2, 4), P("x", "y"), "device"),
    "out_host": ((2, 4), P("x", "y"), "pinned_host"),
    "out_dev": ((2, 4), P("x", "y"), "device"),
    "f_elementwise": ((2, 4), P("x", "y"), "device"),
    "f_contract": ((2, 4), P("y"), "device"),
    "add_arrays": ((2, 4), P("x", "y"), "device"),
    "f_contract_2": ((8,), P("x"), "device"),
    "f_elementwise_sharded": ((8,), P("x"), "device"),
    "sum in shard": ((8,), P("x"), "device"),
    "psum": ((8,), P(), "device"),
    "layer": ((8,), P(), "device"),
    "layer_constrained": ((8,), P(), "device"),
    "layer_sharded": ((8,), P(), "device"),
}
"""For each cell that prints an array: the mesh, the spec, and the memory kind that JAX gives it."""

OURS = SimpleNamespace(
    xp=st, P=P, NamedSharding=st.NamedSharding, device_put=st.device_put, jit=st.jit, psum=st.psum,
    with_sharding_constraint=st.with_sharding_constraint, shard_map=st.shard_map, use_mesh=st.use_mesh,
    spec_of=lambda x: [chain[0] if chain else None for chain in x.sharding.spec.chains],
)  # fmt: skip


def ours(backend: str) -> dict[str, Any]:
    grid, line = mesh_of((2, 4), backend), mesh_of((8,), backend)
    with st.use_mesh(line):  # In the tutorial, arrays that are not placed are on the devices of the mesh.
        return found(OURS, grid, line, grid, line.flat[0])


@everywhere
def test_the_shardings_of_each_cell(backend: str) -> None:
    results = ours(backend)
    assert results.pop("types") == [["x", None], [None, "y"], ["x", "y"]]
    assert results.keys() == TABLE.keys()
    for name, (sizes, spec, kind) in TABLE.items():
        shape = np.shape(results[name][2])
        wanted = st.NamedSharding(mesh_of(sizes, backend), spec).devices_indices_map(shape).items()
        assert tuple(results[name][:2]) == layout_of(kind, wanted, shape), name


JAXS = """
import jax
from types import SimpleNamespace
from tests.interpreters.jit.jax_tutorial import found as found_by
from jax.sharding import AxisType, NamedSharding, PartitionSpec
lib = SimpleNamespace(
    xp=jax.numpy, P=PartitionSpec, NamedSharding=NamedSharding, device_put=jax.device_put, jit=jax.jit,
    psum=jax.lax.psum, with_sharding_constraint=jax.lax.with_sharding_constraint, shard_map=jax.shard_map,
    use_mesh=jax.set_mesh, spec_of=lambda x: jax.typeof(x).sharding.spec,
)
meshes = [jax.make_mesh(s, n, axis_types=(t,) * len(s)) for s, n, t in (
    ((2, 4), ("x", "y"), AxisType.Auto), ((8,), ("x",), AxisType.Auto), ((2, 4), ("x", "y"), AxisType.Explicit))]
found = found_by(lib, *meshes, jax.devices()[0])
"""


@pytest.mark.full
def test_the_table_is_jaxs() -> None:
    peers.require_jax("0.10", "0.12")
    jaxs, mine = peers.run(JAXS, devices=8), ours("numpy")
    assert jaxs.keys() == mine.keys()
    assert jaxs.pop("types") == mine.pop("types")
    for name, (kind, indices, values) in jaxs.items():
        assert [kind, indices] == mine[name][:2], name
        np.testing.assert_allclose(mine[name][2], values, rtol=1e-5)
