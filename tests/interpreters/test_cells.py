"""Tensors on eight devices of which every four share a memory, which has one buffer for the box that its shards tile.

Checked devices with separate memories are the reference for elements, layouts and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.tensor.tensor import shard_arrays
from tests.layouts import buffers, put

HOST = np.arange(19 * 6.0).reshape(19, 6)
TILED = [st.P(("x", "y")), st.P("x", "y"), st.P(None, ("x", "y")), st.P("x"), st.P("y"), st.P("y", "x"), st.P()]
APART = st.P(("y", "x"))
"""The shards of one memory are not neighbours."""


def computed(spec: st.P, backend: str = "grouped") -> st.ShardedTensor:
    return put(HOST, backend, (2, 4), spec) + 0


@pytest.mark.parametrize("spec", TILED, ids=str)
def test_each_memory_has_one_buffer(spec: st.P) -> None:
    x = computed(spec)
    made = [x, x + 1, st.exp(x), x.T + 0, st.concat([x, x]), st.flip(x), st.sum(x), x[3:17:2] + 0, st.zeros_like(x)]
    made += [x[3, 4] + x, st.where(x > 3, x, 0)]
    assert [buffers(y) for y in made] == [2] * len(made)
    assert buffers(computed(APART)) == 8


def test_replicas_in_one_memory_are_one_buffer() -> None:
    x = computed(st.P("x", None))
    places = [array.ctypes.data for array in shard_arrays(x)]
    assert places[:4] == places[:1] * 4
    assert places[4:] == places[4:5] * 4 != places[:4]


@pytest.mark.parametrize("target", TILED, ids=str)
@pytest.mark.parametrize("spec", [*TILED, APART], ids=str)
def test_a_reshard_moves_what_separate_memories_move(spec: st.P, target: st.P) -> None:
    found = []
    for backend in ("grouped", "checked"):
        x = computed(spec, backend)
        with st.transfers() as log:
            y = st.reshard(x, x.sharding.with_spec(target))
        found.append((log.bytes, {(r.source.id, r.destination.id): r.bytes for r in log}))
        if backend == "grouped" and x._aval.cells.grid.same(y._aval.cells.grid):
            assert (log.copied, buffers(x, y)) == (0, 2), "nothing is copied within a memory"
        y[2] = 0
        np.testing.assert_array_equal(np.asarray(x), HOST)
    assert found[0] == found[1]


WRITES: dict[str, Callable[[Any], Any]] = {
    "an element": lambda x: x.__setitem__((3, 4), 1),
    "rows": lambda x: x.__setitem__(slice(2, 15), 7),
    "rows by their numbers": lambda x: x.__setitem__([0, 13], x[[13, 0]]),
    "by a mask": lambda x: x.__setitem__(x > 30, 0),
    "through a view": lambda x: x[1:16:2, ::-1].T.__iadd__(1),
    "through a flat view": lambda x: x.reshape(-1).__setitem__(slice(5, 80, 7), 3),
    "itself": lambda x: x.__iadd__(x),
    "another layout": lambda x: x.__iadd__(x + 1 if isinstance(x, np.ndarray) else turned(x) + 1),
}


def turned(x: st.ShardedTensor) -> st.ShardedTensor:
    return st.reshard(x, x.sharding.with_spec(st.P("y", "x")))


@pytest.mark.parametrize("spec", [*TILED, APART], ids=str)
@pytest.mark.parametrize("what", WRITES)
def test_writes_are_in_place_and_show_in_views(what: str, spec: st.P) -> None:
    sent, host = [], HOST.copy()
    WRITES[what](host)
    for backend in ("grouped", "checked"):
        x = computed(spec, backend)
        place, part = shard_arrays(x)[0].ctypes.data, x[2:9].T
        with st.transfers() as log:
            WRITES[what](x)
        sent.append(log.bytes)
        assert shard_arrays(x)[0].ctypes.data == place
        np.testing.assert_array_equal(np.asarray(x), host)
        np.testing.assert_array_equal(np.asarray(part), host[2:9].T)
    assert sent[0] == sent[1]


def test_results_of_maps_stay_separate_until_they_are_needed_whole() -> None:
    x = computed(st.P(("x", "y")))
    doubled = st.shard_map(lambda a: a * 2, mesh=x.sharding.mesh, in_specs=st.P(("x", "y")), out_specs=st.P(("x", "y")))
    y = doubled(x)
    assert buffers(y) == 8
    np.testing.assert_array_equal(np.asarray(y), 2 * HOST)
    assert buffers(y + 1) == 2
    assert buffers(y) == 2, "the buffers that were joined are kept"
    y[3] = 0
    np.testing.assert_array_equal(np.asarray(y)[:4], [*(2 * HOST)[:3], [0] * 6])


def test_donated_shards_do_not_change_the_tensor_that_they_were_of() -> None:
    x = computed(st.P(("x", "y")))

    def double(a: Any) -> Any:
        a *= 2
        return a

    parts = st.pmap(double, st.shard(x, devices=x.sharding.mesh), donate=True)
    np.testing.assert_array_equal(np.concatenate([np.asarray(part) for part in parts]), 2 * HOST)
    np.testing.assert_array_equal(np.asarray(x), HOST)


def test_exports_of_one_memory_do_not_hold_the_other() -> None:
    x = computed(st.P(("x", "y")))
    places = [array.ctypes.data for array in shard_arrays(x)]
    kept = x.addressable_shards[5].data
    x += 1
    now = [array.ctypes.data for array in shard_arrays(x)]
    assert now[:4] == places[:4]
    assert now[4] != places[4], "the exported shard keeps its elements"
    np.testing.assert_array_equal(kept.view(np.ndarray), HOST[x._aval.grid.index(5)])
