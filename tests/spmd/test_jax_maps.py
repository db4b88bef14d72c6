"""Programs of JAX's pages about pmap and xmap, of its guide from pmap to shard_map, and of Flax, Haiku and GPJax.

`jax_maps` has the programs; what they give, and which device has which block, is what JAX gives. In the fast tier they are
compared with `jax_maps.json`, in which ``python -m tests.spmd.test_jax_maps`` writes summaries of what JAX gives on the
Python of the peers, in the full tier with JAX itself. Maps in maps need JAX 0.4, the last series that has all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from shardtensor.tensor.pytree import leaves
from tests import peers
from tests.layouts import everywhere, values_of
from tests.spmd import jax_maps

TABLE = Path(__file__).with_name("jax_maps.json")
SERIES = {
    "maps": ("0.4", "0.10", "0.12"), "grids": ("0.4", "0.10", "0.12"), "nests": ("0.4",), "states": ("0.4", "0.10", "0.12"),
    "processes": ("0.4", "0.10", "0.12"), "migrated": ("0.10", "0.12"), "indexed": ("0.10", "0.12"),
}  # fmt: skip
"""The programs, and the series of JAX that run them; in `grids`, those after 0.7 run a shard_map over several axes."""

OWN_LAYOUTS = {
    # Of host arrays JAX makes arrays on the first device, and this library tensors on the default mesh.
    "the values of vmap", "a gradient of a map", "a gradient of a grid",
    # Shapes whose layout the compiler chooses; and an array of the device, which is a plain array here.
    "results are arrays", "one result",
}  # fmt: skip
"""What has the values that JAX gives in another layout."""


def lib_of(backend: str) -> SimpleNamespace:
    """The functions of this library, on the devices of a backend."""
    devices = st.devices(backend)
    names = "pmap vmap grad value_and_grad jit shard_map psum pmean pmax pmin all_gather all_to_all ppermute axis_index"
    given = {name: getattr(st, name) for name in f"{names} device_put device_get NamedSharding P".split()}
    rows = st.NamedSharding(st.Mesh(devices, ("d",)), P("d"))
    return SimpleNamespace(
        **given, xp=st, devices=devices, tree_map=st.tree.map, mesh=lambda *a: st.make_mesh(*a, devices=devices),
        put_rows=lambda a: st.device_put(a, rows), grid=grid,
    )  # fmt: skip


def grid(f: Callable[..., Any], *names: str) -> Callable[..., Any]:
    for name in reversed(names):
        f = st.pmap(f, axis_name=name)
    return f


def run(suite: str, backend: str) -> dict[str, Any]:
    with st.use_mesh(st.Mesh(st.devices(backend), ("d",))):
        return dict(getattr(jax_maps, suite)(lib_of(backend)))


def summary(tree: Any) -> list[list[Any]]:
    """The shape of each array of a tree, and a sum of its elements with weights that tell their places."""
    arrays = [np.asarray(values_of(x), "float64") for x in leaves(tree)]
    return [[list(x.shape), float(x.ravel() @ np.cos(np.arange(x.size)))] for x in arrays]


@everywhere
@pytest.mark.parametrize("suite", SERIES)
def test_programs_give_what_jax_gives(suite: str, backend: str) -> None:
    wanted = json.loads(TABLE.read_text())[suite]
    found = run(suite, backend)
    assert found.keys() == wanted.keys()
    for name, tree in found.items():
        mine = summary(tree)
        assert [shape for shape, _ in mine] == [shape for shape, _ in wanted[name]], name
        np.testing.assert_allclose([s for _, s in mine], [s for _, s in wanted[name]], 1e-9, 1e-9, err_msg=name)


# -- beside JAX ------------------------------------------------------------------------------------

JAXS = """
import functools, jax, numpy, warnings
from types import SimpleNamespace
from tests.spmd import jax_maps
warnings.simplefilter("ignore")
jax.config.update("jax_enable_x64", True)
series = tuple(map(int, jax.__version__.split(".")[:2]))
names = "psum pmean pmax pmin all_gather all_to_all ppermute axis_index"
Mesh, spec = jax.sharding.Mesh, jax.sharding.PartitionSpec
mesh = lambda shape, names: Mesh(numpy.array(jax.devices()).reshape(shape), names)
put_rows = lambda a: jax.device_put(a, jax.sharding.NamedSharding(mesh(8, ("d",)), spec("d")))

def grid(f, *axes):
    if series < (0, 8):
        for name in reversed(axes):
            f = jax.pmap(f, axis_name=name)
        return f
    def call(*args):  # what the guide writes in place of maps in maps
        here = mesh(args[0].shape[:len(axes)], axes) if len(axes) < 3 else Mesh(
            numpy.array(jax.devices()).reshape(2, 2, 2), axes)
        def body(*blocks):
            out = f(*[b.reshape(b.shape[len(axes):]) for b in blocks])
            return jax.tree.map(lambda a: jax.numpy.expand_dims(a, range(len(axes))), out)
        return jax.shard_map(body, mesh=here, in_specs=spec(*axes), out_specs=spec(*axes))(*args)
    return call

lib = SimpleNamespace(
    **{name: getattr(jax.lax, name) for name in names.split()}, xp=jax.numpy, pmap=jax.pmap, vmap=jax.vmap, jit=jax.jit,
    grad=jax.grad, value_and_grad=jax.value_and_grad, device_put=jax.device_put, device_get=jax.device_get,
    NamedSharding=jax.sharding.NamedSharding, P=spec, devices=jax.devices(), tree_map=jax.tree_util.tree_map, mesh=mesh,
    put_rows=put_rows, grid=grid, shard_map=getattr(jax, "shard_map", None))
results = dict(getattr(jax_maps, given)(lib))
blocks = jax_maps.layouts(results.items(), jax.tree_util.tree_leaves) if series >= (0, 8) else None
found = jax_maps.values(results, jax.tree_util.tree_map), blocks
"""


def jaxs(suite: str) -> Any:
    """What JAX gives, and its blocks, which JAX 0.4 describes in another way."""
    return peers.run(JAXS, suite, devices=8)


@pytest.mark.full
@pytest.mark.parametrize("suite", SERIES)
def test_jax_gives_the_same(suite: str) -> None:
    peers.require_jax(*SERIES[suite])
    theirs, blocks = jaxs(suite)
    mine = run(suite, "numpy")
    assert mine.keys() == theirs.keys()
    for name, tree in mine.items():
        for here, there in zip(leaves(tree), leaves(theirs[name]), strict=True):
            np.testing.assert_allclose(values_of(here), there, 1e-9, 1e-9, err_msg=name)
        if blocks and name not in OWN_LAYOUTS:
            assert [jax_maps.blocks(x) for x in leaves(tree) if hasattr(x, "sharding")] == blocks[name], name


@pytest.mark.full
def test_maps_in_maps_are_errors_of_todays_jax() -> None:
    peers.require_jax("0.10", "0.12")
    with pytest.raises(peers.peers.PeerError, match=r"The context mesh .* should match the mesh passed to shard_map"):
        jaxs("nests")


def write_table() -> None:
    """Writes what the JAX on the Python of the peers gives, of those programs that it runs."""
    found = peers.peers.versions(peers.peers.python(), ("jax",))["jax"]
    table = json.loads(TABLE.read_text())
    for suite in (suite for suite, series in SERIES.items() if found.startswith(tuple(f"{s}." for s in series))):
        table[suite] = {name: summary(tree) for name, tree in jaxs(suite)[0].items()}
    lines = [
        f"{json.dumps(suite)}: {{\n" + ",\n".join(f" {json.dumps(n)}: {json.dumps(x)}" for n, x in rows.items()) + "\n}"
        for suite, rows in table.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_table()
