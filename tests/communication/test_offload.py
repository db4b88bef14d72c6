"""Memory kinds: tensors in page-locked host memory.

On numpy and torch the kind is only a label; on checked memories and GPUs it is a separate memory.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import registry
from shardtensor.communication.offload import OffloadedStorage, PrefetchedStorage
from shardtensor.errors import BackendError
from tests import fakecupy
from tests.conftest import Logged
from tests.layouts import assert_equal, mesh_of

NAMES = ("numpy", "checked", "cupy", "torch")


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """All four backends are in the fast tier."""
    try:
        registry.load(request.param)
    except BackendError as error:
        pytest.skip(str(error))
    return str(request.param)


HOST = np.arange(35.0).reshape(7, 5)
SPECS = (st.P("x"), st.P(None, "x"), st.P())


def kinds(backend: str, spec: st.P = SPECS[0]) -> tuple[st.NamedSharding, st.NamedSharding]:
    """A sharding over three devices in device memory, and in host memory."""
    here = st.NamedSharding(mesh_of((3,), backend=backend), spec)
    return here, here.with_memory_kind("pinned_host")


def apart(backend: str) -> bool:
    """Returns whether the kind is a separate memory on a backend."""
    return registry.load(backend).pinned_host


def is_parked(x: st.ShardedTensor) -> bool:
    return isinstance(x._storage, OffloadedStorage)


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_there_and_back(backend: str, spec: st.P) -> None:
    here, away = kinds(backend, spec)
    assert away == st.NamedSharding(here.mesh, spec, memory_kind="pinned_host")
    for host in (HOST, HOST[:1], HOST[:0], HOST.astype("int32"), HOST > 3, HOST[::-2, ::2]):
        for x in (st.device_put(host, away), st.device_put(st.device_put(host, here), away)):
            assert x.sharding == away
            assert is_parked(x) == apart(backend)
            assert_equal(x, host)
            y = st.device_put(x, here)
            assert (y.sharding, y.dtype, y.shape) == (here, host.dtype, host.shape)
            assert not is_parked(y)
            assert_equal(y, host)
            assert_equal(st.reshard(x, away), host)
    scalar = st.device_put(2.5, st.NamedSharding(here.mesh, st.P(), memory_kind="pinned_host"))
    assert (float(scalar), scalar.sharding.memory_kind) == (2.5, "pinned_host")


def test_between_shardings(backend: str) -> None:
    """Tensors are transferred from every spec and kind to every other, and to another mesh."""
    all_kinds = [s for spec in SPECS for s in kinds(backend, spec)]
    all_kinds.append(st.NamedSharding(mesh_of((2,), backend=backend), st.P("x"), memory_kind="pinned_host"))
    for a in all_kinds:
        x = st.device_put(HOST, a)
        for b in all_kinds:
            y = st.device_put(x, b)
            assert y.sharding == b
            assert_equal(y, HOST)


def test_between_backends(backend: str) -> None:
    _, away = kinds(backend)
    there = st.NamedSharding(mesh_of((2,), backend="checked"), st.P("x"), memory_kind="pinned_host")
    x = st.device_put(HOST, away)
    y = st.device_put(x, there)
    assert y.sharding == there
    assert_equal(y, HOST)
    assert_equal(st.device_put(y, away), HOST)


# -- operators -------------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda xp, x: x + 1,
    "unary": lambda xp, x: xp.sqrt(x),
    "sum": lambda xp, x: xp.sum(x, axis=0),
    "matmul": lambda xp, x: xp.matmul(x, x.T),
    "slice": lambda xp, x: x[1:6:2, 1:],
    "mask": lambda xp, x: x[x[:, 0] > 8],
    "reshape": lambda xp, x: xp.reshape(x, (5, 7)),
    "concat": lambda xp, x: (np.concatenate if xp is np else st.concat)([x, x]),
    "where": lambda xp, x: xp.where(x > 4, x, -x),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(backend: str, name: str) -> None:
    """Results lie in host memory where all operands do."""
    wanted = OPERATORS[name](np, HOST)
    for spec in SPECS:
        here, away = kinds(backend, spec)
        for sharding in (here, away):
            made = OPERATORS[name](st, st.device_put(HOST, sharding))
            assert made.sharding.memory_kind == sharding.memory_kind
            np.testing.assert_allclose(np.asarray(made), wanted)


def test_mixed_kinds(backend: str) -> None:
    here, away = kinds(backend)
    x, y = st.device_put(HOST, here), st.device_put(HOST, away)
    for made in (x + y, y + x, st.where(y > 3, x, y)):
        assert made.sharding.memory_kind == "device"
    assert_equal(x + y, HOST * 2)
    assert (y * 2 + HOST).sharding.memory_kind == "pinned_host"
    assert_equal(st.concat([y, x]), np.concatenate([HOST, HOST]))


def test_mapped_functions(backend: str) -> None:
    device = mesh_of((3,), backend=backend).flat[1]
    x = st.device_put(np.arange(5.0), st.SingleDeviceSharding(device, memory_kind="pinned_host"))
    (y,) = st.pmap(lambda a: a * 2, [x])
    assert y.device == device
    assert_equal(y, np.arange(5.0) * 2)
    assert_equal(
        st.smap(lambda a: a + 1, st.device_put(HOST, kinds(backend)[1]), axes=[0], devices=kinds(backend)[0].mesh),
        HOST + 1,
    )


# -- writes, views, copies -------------------------------------------------------------------------


def test_writes(backend: str) -> None:
    for spec in SPECS:
        _, away = kinds(backend, spec)
        x, host = st.device_put(HOST, away), HOST.copy()
        before, other = x.copy(), st.device_put(x, away)
        view, row = x[1:3], x[4]
        for a in (x, host):
            a += 1
            a[2:] = 7
            a[a > 8] *= 2
            a[0, 1] = -1
        view *= 3
        host[1:3] *= 3
        row[...] = np.arange(5)
        host[4] = np.arange(5)
        x += 1
        host += 1
        assert x.sharding == away
        assert is_parked(x) == apart(backend)
        assert_equal(x, host)
        assert_equal(view, host[1:3])
        assert_equal(row, host[4])
        assert_equal(before, HOST)
        assert_equal(other, HOST)
        x.fill(0)
        assert_equal(view, np.zeros((2, 5)))


def test_what_was_read_stays(backend: str) -> None:
    _, away = kinds(backend)
    x = st.device_put(HOST, away)
    whole, part, shards = np.asarray(x), np.asarray(x[2:4]), [np.asarray(s.data) for s in x.addressable_shards]
    if apart(backend):
        assert not whole.flags.writeable
        assert not any(s.flags.writeable for s in shards)
    kept = [s.copy() for s in shards]
    x[...] = 0
    assert_equal(whole, HOST)
    assert_equal(part, HOST[2:4])
    for shard, wanted in zip(shards, kept, strict=True):
        assert_equal(shard, wanted)


def test_the_callers_array_is_his(backend: str) -> None:
    _, away = kinds(backend)
    mine = HOST.copy()
    x = st.device_put(mine, away)
    mine[...] = 0
    assert_equal(x, HOST)


def test_a_write_that_fails_changes_nothing(backend: str) -> None:
    _, away = kinds(backend)
    x = st.device_put(HOST, away)
    for wrong in (lambda: x.__setitem__(0, np.zeros(3)), lambda: x.__setitem__(9, 1), lambda: x.__iadd__(1j)):
        with pytest.raises((ValueError, IndexError, TypeError)):
            wrong()
        assert_equal(x, HOST)
        assert is_parked(x) == apart(backend)
    x += 1
    assert_equal(x, HOST + 1)


def test_copies_and_pickles(backend: str) -> None:
    for spec in SPECS:
        _, away = kinds(backend, spec)
        x = st.device_put(HOST, away)
        for made in (x.copy(), copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), st.asarray(x, copy=True)):
            assert (made.sharding, made.committed) == (away, True)
            assert is_parked(made) == apart(backend)
            made[0] = -5
            assert float(made[0, 0]) == -5
            assert_equal(x, HOST)
        assert pickle.loads(pickle.dumps(away)) == away


def test_repr_says_so(backend: str) -> None:
    here, away = kinds(backend)
    x = st.device_put(HOST, away)
    said = repr(x)
    assert said.splitlines()[0].endswith(", pinned_host)")
    assert str(HOST) in said
    assert "memory_kind='pinned_host'" in repr(away)
    assert "pinned_host" not in repr(st.device_put(x, here))


def test_donation(backend: str) -> None:
    here, away = kinds(backend)
    for a, b in ((here, away), (away, here), (away, away)):
        x = st.device_put(HOST, a)
        y = st.device_put(x, b, donate=True)
        assert_equal(y, HOST)
        assert x.is_donated
        with pytest.raises(st.DonatedError, match="device_put"):
            np.asarray(x)
        y += 1
        assert_equal(y, HOST + 1)


def test_waiting(backend: str) -> None:
    here, away = kinds(backend)
    x = st.device_put(st.device_put(HOST, here) * 2, away)
    assert x.block_until_ready() is x
    assert_equal(x, HOST * 2)


# -- what moves ------------------------------------------------------------------------------------


def test_moves_are_counted(backend: str) -> None:
    here, away = kinds(backend)
    x = st.device_put(HOST, here)
    real = apart(backend)
    with st.transfers() as log:
        y = st.device_put(x, away)
    assert [(r.source, r.destination, r.explicit, r.operator) for r in log] == [
        (d, st.HOST, True, "device_put") for d in here.mesh.flat
    ]
    assert (log.bytes, log.copied) == (HOST.nbytes, HOST.nbytes if real else 0)
    with st.transfers() as log:
        st.device_put(y, here)
    assert {r.source for r in log} == {st.HOST}
    assert (log.bytes, log.copied, all(r.explicit for r in log)) == (HOST.nbytes, HOST.nbytes if real else 0, True)
    with st.transfers() as log:
        np.asarray(y)
    assert log.copied == 0 or not real  # it is there already
    with st.transfers() as log:
        float(y[3, 2])
    assert log.copied <= 16
    with st.transfers() as log:
        st.device_put(y, away)
        y.copy()
    assert log.copied == 0
    with st.transfers() as log:
        y + 1
    back = [(r.bytes, r.explicit, r.operator) for r in log if r.source == st.HOST]
    assert sum(n for n, _, _ in back) == (HOST.nbytes if real else 0)
    assert {(explicit, who) for _, explicit, who in back} == ({(False, "pinned_host")} if real else set())


def test_the_guard(backend: str, logged: Logged) -> None:
    here, away = kinds(backend)
    x = st.device_put(HOST, away)
    with st.transfer_guard("disallow"):
        assert_equal(st.device_put(x, here), HOST)
        assert_equal(st.device_put(st.device_put(x, here), away), HOST)
        if apart(backend):
            with pytest.raises(st.TransferError, match="pinned_host: moves 280 bytes implicitly"):
                x + 1
            with pytest.raises(st.TransferError, match="pinned_host"):
                x += 1
        else:
            assert_equal(x + 1, HOST + 1)
    assert_equal(x, HOST)
    with st.transfer_guard("log"), logged.at_level(logging.WARNING, "shardtensor"):
        x + 1
    assert logged.messages == ["pinned_host: moves 280 bytes implicitly"] * apart(backend)


def test_replicas_share_one_copy(backend: str) -> None:
    if not apart(backend):
        pytest.skip(f"{backend} has one memory")
    mesh = st.Mesh(np.array(mesh_of((4,), backend=backend).flat, object).reshape(2, 2), ("x", "y"))
    for spec, count in ((st.P(), 1), (st.P("x"), 2), (st.P("x", "y"), 4)):
        here = st.NamedSharding(mesh, spec)
        for x in (st.device_put(HOST, here), HOST):
            with st.transfers() as log:
                y = st.device_put(x, here.with_memory_kind("pinned_host"))
            assert len(y._storage.hosts) == count
            assert sum(h.nbytes for h in y._storage.hosts.values()) == HOST.nbytes
            if x is not HOST:
                assert log.copied == HOST.nbytes
            shards = [s.data for s in y.addressable_shards]
            assert len({s.__array_interface__["data"][0] for s in shards}) == count
            assert [s.replica_id for s in y.addressable_shards].count(0) == count
            assert_equal(st.device_put(y, here), HOST)


def test_nothing_is_kept_on_the_devices(backend: str) -> None:
    """A read on the host copies nothing to the devices."""
    if not apart(backend):
        pytest.skip(f"{backend} has one memory")
    _, away = kinds(backend)
    x = st.device_put(HOST, away)
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*args: Any) -> Any:
            raise AssertionError("a device was asked")

        for name in ("onload", "to_device"):
            patch.setattr(registry.load(backend), name, refuse)
        assert_equal(x, HOST)
        assert_equal(x[2:5, ::2], HOST[2:5, ::2])
        assert float(x[6, 4]) == 34
        assert str(HOST) in repr(x)
        assert_equal(pickle.loads(pickle.dumps(x)), HOST)
        assert_equal(st.device_put(HOST, away), HOST)


# -- on GPUs ---------------------------------------------------------------------------------------


@pytest.fixture(params=["random", "lazy", "eager"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two simulated GPUs with 1 MiB each, and a device on each."""
    pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")
    fakecupy.install(devices=2, memory=1 << 20, scheduler=request.param)
    try:
        monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "2")
        kind = importlib.import_module("shardtensor_cupy").CuPyBackend
        backend = type("Small", (kind,), {"name": f"small_{request.param}_{os.urandom(3).hex()}"})()
        monkeypatch.setitem(registry._loaded, backend.name, backend)
        yield backend
        races = list(fakecupy.races)
        assert races == []
    finally:
        fakecupy.uninstall()


def test_data_larger_than_the_devices(small: Any) -> None:
    mesh = st.Mesh(small.devices(), "x")
    host = np.arange(1 << 19, dtype="float64").reshape(-1, 64)  # 4 MiB
    away = st.NamedSharding(mesh, st.P("x"), memory_kind="pinned_host")
    x = st.device_put(host, away)
    assert_equal(x, host)
    assert_equal(x[100:7000:999], host[100:7000:999])
    assert float(x[-1, -1]) == host.size - 1
    with pytest.raises(st.DeviceMemoryError, match="no memory is left"):
        x + 1
    with pytest.raises(st.DeviceMemoryError):
        x += 1
    assert_equal(x, host)
    rows = [float(st.device_put(np.asarray(x[i : i + 512]), mesh.flat[0]).sum()) for i in range(0, len(host), 512)]
    assert sum(rows) == host.sum()


def test_layers_come_one_after_the_other(small: Any) -> None:
    """The weights do not fit on the devices; each is prefetched while the previous one is used."""
    here = st.NamedSharding(st.Mesh(small.devices(), "x"), st.P("x"))
    weights = [np.full((64, 512), k, "float64") for k in range(8)]  # 256 KiB each, half of it on each GPU
    offloaded = [st.device_put(w, here.with_memory_kind("pinned_host")) for w in weights]
    total, coming = st.zeros((64, 512), device=here), st.device_put(offloaded[0], here)
    for k in range(8):
        layer = coming
        if k < 7:
            coming = st.device_put(offloaded[k + 1], here)
        total += layer * 2
        del layer
    assert_equal(total, sum(weights) * 2)


def test_threads_that_read_a_prefetched_tensor_get_one_storage() -> None:
    """The first thread takes the prefetched arrays; the second one must find the storage."""
    entered = threading.Semaphore(0)
    waiting: list[int] = []

    def wait(device: Any, token: Any) -> None:
        waiting.append(threading.get_ident())
        if len(waiting) == 1:
            entered.acquire(timeout=0.2)  # times out where a lock keeps the other thread out
        else:
            entered.release()
            while storage._storage is None:
                time.sleep(0.001)

    value: Any = SimpleNamespace(grid=SimpleNamespace(devices=[None]), backend=SimpleNamespace(wait=wait))
    storage = PrefetchedStorage(value, (np.ones(2),), [object()])
    with ThreadPoolExecutor(2) as pool:
        first, second = [f.result(10) for f in [pool.submit(storage.stored) for _ in range(2)]]
    assert first is second
    assert len(first.buffers) == 1
