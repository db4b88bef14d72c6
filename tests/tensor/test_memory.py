"""`st.memory_info`: the bytes that tensors use on each device, and their peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.device import HOST
from tests.layouts import everywhere, mesh_of, put

N = 4


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    yield
    st.reset_peak_memory(measure=False)


class Change:
    """The bytes that each device has got since this object was made."""

    def __init__(self, backend: str) -> None:
        self.devices = list(mesh_of((N,), backend).flat)
        self.before = [st.memory_info(d) for d in self.devices]

    def in_use(self) -> list[int]:
        return [st.memory_info(d).bytes_in_use - b.bytes_in_use for d, b in zip(self.devices, self.before, strict=True)]

    def peak(self) -> list[int]:
        found = [st.memory_info(d).peak_bytes_in_use for d in self.devices]
        return [int(n or 0) - b.bytes_in_use for n, b in zip(found, self.before, strict=True)]


@everywhere
def test_shards_count_on_their_devices_until_the_last_reference_goes(backend: str) -> None:
    change = Change(backend)
    x = put(np.zeros((10, 3)), backend)
    assert change.in_use() == [3 * 24, 3 * 24, 2 * 24, 2 * 24]
    other = x.copy(), x[2:5], x.T
    assert change.in_use() == [72, 72, 48, 48]
    del x
    assert change.in_use() == [72, 72, 48, 48]
    del other
    assert change.in_use() == [0] * N


@everywhere
def test_replicated_elements_count_as_often_as_they_are_in_memory(backend: str) -> None:
    change = Change(backend)
    x = put(np.zeros(N), backend, spec=st.P())
    shared = x._aval.memory is not None
    assert change.in_use() == [8 if shared else 8 * N] * N


@everywhere
def test_the_peak(backend: str) -> None:
    x = put(np.zeros((N, 100)), backend)
    st.reset_peak_memory()
    change = Change(backend)
    y = (x + 1) * 2
    assert (change.in_use(), change.peak()) == ([800] * N, [1600] * N)
    y += 1
    z = y.copy()
    assert (change.in_use(), change.peak()) == ([800] * N, [1600] * N)
    z[0, 0] = 1  # A write copies what another tensor shares.
    assert sum(change.in_use()) >= 800 * N + 800
    del y, z
    assert (change.in_use()) == [0] * N
    st.reset_peak_memory()
    assert change.peak() == [0] * N


def test_without_a_reset_nothing_is_noted() -> None:
    assert type(st.ShardedTensor._storage).__name__ == "member_descriptor"
    x = st.ones(3)
    info = st.memory_info()
    assert set(info) >= set(st.devices())
    assert info[st.devices()[0]].peak_bytes_in_use is None
    st.reset_peak_memory()
    assert (x + 1).tolist() == [2, 2, 2]
    assert st.memory_info(st.devices()[0]).peak_bytes_in_use is not None


@everywhere
def test_programs(backend: str) -> None:
    fn = st.jit(lambda x: st.roll(st.sort(x, axis=1) + 1, 1, axis=1) * 2, executor="numpy")
    x = put(np.ones((N, 1000)), backend)
    fn(x)
    st.reset_peak_memory()
    change = Change(backend)
    y = fn(x)
    assert change.in_use() == [8000] * N
    assert all(8000 < n <= 3 * 8000 for n in change.peak())
    del y
    assert change.in_use() == [0] * N


@pytest.mark.parametrize("backend", ["checked", "numpy"])
def test_offloaded_tensors(backend: str) -> None:
    mesh = mesh_of((N,), backend)
    st.reset_peak_memory()
    host = st.memory_info(HOST).bytes_in_use
    change = Change(backend)
    x = st.device_put(np.zeros(100 * N), st.NamedSharding(mesh, st.P("x"), memory_kind="pinned_host"))
    if x._aval.offloaded:
        assert (change.in_use(), st.memory_info(HOST).bytes_in_use - host) == ([0] * N, 800 * N)
        assert HOST in st.memory_info()
    else:
        assert change.in_use() == [800] * N


@everywhere
def test_lists_and_maps(backend: str) -> None:
    x = put(np.zeros((10, 3)), backend)
    change = Change(backend)
    parts = x.shard(devices=change.devices)
    assert sum(change.in_use()) == 0
    del x
    assert change.in_use() == [0] * N
    made: Any = st.pmap(lambda part: part + 1, parts)
    assert change.in_use() == [72, 72, 48, 48]
    del made, parts
    assert sum(change.in_use()) == -240


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"memory_info: device is an? str; wanted a device"):
        st.memory_info("numpy")  # type: ignore[arg-type]
