"""Tensors whose devices share a memory that is not the host's: one buffer, of which all shards and replicas are views.

Four checked devices share each memory; a mesh of eight has two of them.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.registry import shared_memory
from shardtensor.tensor.tensor import shard_arrays
from shardtensor.testing.checked import CheckedArray
from tests.layouts import buffers, mesh_of, put

HOST = np.arange(42.0).reshape(7, 6)
SPECS = [st.P("x"), st.P(None, "x"), st.P()]


def test_memory_is_asked_of_a_group_of_devices() -> None:
    devices = st.devices("grouped")
    assert shared_memory(tuple(devices[:4])) == shared_memory((devices[2],)) != shared_memory((devices[4],))
    assert shared_memory(tuple(devices[3:5])) is None
    assert shared_memory(tuple(st.devices("numpy"))) == shared_memory((st.HOST,))
    assert shared_memory(tuple(st.devices("checked")[:2])) is None


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shards_are_views_of_one_buffer(spec: st.P) -> None:
    x = put(HOST, "grouped", (4,), spec)
    made = [x, x + 1, st.exp(x), x.T, st.reshape(x, (6, 7)), st.concat([x, x]), x @ x.T]
    assert [buffers(y) for y in made] == [1] * len(made)
    assert all(type(array) is CheckedArray for array in shard_arrays(x))
    assert buffers(put(HOST, "grouped", (8,), spec)) > 1, "which are in two memories"


@pytest.mark.parametrize("target", SPECS, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_reshard_moves_nothing_and_is_counted(spec: st.P, target: st.P) -> None:
    x = put(HOST, "grouped", (4,), spec)
    with st.transfers() as log:
        y = st.reshard(x, x.sharding.with_spec(target))
    with st.transfers() as apart:
        z = st.device_put(HOST, st.NamedSharding(mesh_of((4,), "checked"), spec))
        apart_before = apart.bytes
        st.reshard(z, z.sharding.with_spec(target))
    assert (log.bytes, log.copied) == (apart.bytes - apart_before, 0)
    assert buffers(x, y) == 1
    y[2] = 0
    np.testing.assert_array_equal(np.asarray(x), HOST)


def test_views_read_the_buffer_and_writes_to_them_show_in_it() -> None:
    x, host = put(HOST, "grouped", (4,), st.P("x")), HOST.copy()
    part = x[1:6:2, ::-1].T
    assert buffers(x, part) == 1
    part += 1
    host[1:6:2] += 1
    x[x > 30] = 0
    host[host > 30] = 0
    x[[0, 3]] = x[[3, 0]]
    host[[0, 3]] = host[[3, 0]]
    np.testing.assert_array_equal(np.asarray(x), host)
    np.testing.assert_array_equal(np.asarray(part), host[1:6:2, ::-1].T)


def test_a_write_in_place_copies_nothing() -> None:
    x, y = put(HOST, "grouped", (4,), st.P("x")) + 0, put(HOST, "grouped", (4,), st.P(None, "x"))
    place = shard_arrays(x)[0].ctypes.data
    with st.transfers() as log:
        x += y
        x[2:5] = 7
    assert shard_arrays(x)[0].ctypes.data == place
    assert log.copied == 0
    assert log.bytes > 0, "what separate memories would send"


@pytest.mark.parametrize("start", [0, 2])
def test_bits_are_those_of_separate_memories(start: int) -> None:
    """In one memory, in two, and where every device has its own."""
    host = np.random.default_rng(5).random((37, 3)).astype(np.float32)
    for names in (("grouped", "checked"), ("numpy", "checked")):
        found = []
        for backend in names:
            x = st.device_put(host, mesh_of((4,), backend, start=start))
            made = [st.sum(x, axis=0), st.var(x, axis=0), st.prod(x, axis=0), st.cumulative_sum(x, axis=0)]
            made += [
                st.shard_map(
                    lambda a: st.psum(a.sum(), "x"), mesh=x.sharding.mesh, in_specs=st.P("x"), out_specs=st.P()
                )(x)
            ]
            found.append([np.asarray(y).tobytes() for y in made])
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["psum", "all_gather", "all_to_all", "psum_scatter", "ppermute", "pbroadcast"])
@pytest.mark.parametrize("start", [0, 2])
def test_collectives(name: str, start: int) -> None:
    """Of one memory, and of devices of two."""
    calls = {
        "psum": lambda a: st.psum(a, "x"),
        "all_gather": lambda a: st.all_gather(a, "x", tiled=True),
        "all_to_all": lambda a: st.all_to_all(a, "x", 1, 0, tiled=True),
        "psum_scatter": lambda a: st.psum_scatter(a, "x", scatter_dimension=1, tiled=True),
        "ppermute": lambda a: st.ppermute(a, "x", [(0, 1), (1, 3), (3, 0)]),
        "pbroadcast": lambda a: st.pbroadcast(a, "x", 2),
    }
    found = []
    for backend in ("grouped", "checked"):
        mesh = mesh_of((4,), backend, start=start)
        x = st.device_put(np.arange(64.0).reshape(8, 8), mesh)
        found.append(np.asarray(st.shard_map(calls[name], mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(x)))
    np.testing.assert_array_equal(*found)
