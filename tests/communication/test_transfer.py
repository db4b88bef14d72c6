"""Every transfer is counted, and `transfer_guard` controls the implicit ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.registry import load, shared_memory
from shardtensor.functions.building.halos import with_halos
from tests.conftest import Logged
from tests.layouts import THREADS_INHERIT, USABLE, assert_same, everywhere, mesh_of


def sharded(backend: str, spec: st.P, shape: tuple[int, ...] = (8, 8)) -> st.ShardedTensor:
    return st.ones(shape, dtype="float32", device=st.NamedSharding(mesh_of((4,), backend), spec))


def test_slices_send_one_row_for_each_boundary(backend: str) -> None:
    x = sharded(backend, st.P("x"), (16, 2))
    with st.transfers() as log:
        y = x[1:]
        assert len(log) == 0  # nothing is transferred before it is read
        y.block_until_ready()
    assert log.bytes == 3 * 8
    assert {(r.operator, r.explicit) for r in log} == {("getitem", False)}
    assert [(str(r.source), str(r.destination)) for r in log] == [
        (f"{backend}:{k + 1}", f"{backend}:{k}") for k in range(3)
    ]
    assert log.copied == (0 if shared_memory(x.sharding.mesh.flat) else 24)
    assert y.sharding == x.sharding


def test_reversed_slices_are_copied_but_on_the_host(backend: str) -> None:
    x = sharded(backend, st.P("x"), (16, 2))
    with st.transfers() as log:
        x[::-1].block_until_ready()
    assert log.bytes == 16 * 8
    views = load(backend).on_host and shared_memory(x.sharding.mesh.flat)
    assert log.copied == (0 if views else log.bytes)


def test_what_agrees_moves_nothing(backend: str) -> None:
    x, y = sharded(backend, st.P("x")), sharded(backend, st.P())
    with st.transfers() as log, st.transfer_guard("disallow"):
        _ = x + x * 2 - st.exp(x)
        _ = x + y  # a replicated operand is cut where it is
        _ = x.T @ st.ones((8, 3), dtype="float32", device=x.sharding)
        _ = st.sum(x, axis=1)
        for view in (x[:, 2:5], x[:, ::-1], x[None], x.reshape(8, 2, 4), x.reshape(64)):
            view.block_until_ready()
        _ = x + 1.0
    assert {r.operator for r in log} == {"matmul"}  # whose combination is its own work
    assert all(r.explicit for r in log)


@everywhere
def test_reshard_counts_the_minimum(backend: str) -> None:
    x = sharded(backend, st.P("x"))
    columns = x.sharding.with_spec(st.P(None, "x"))
    with st.transfers() as log:
        y = st.reshard(x, columns)
    assert log.bytes == 48 * 4
    assert all(r.explicit and r.operator == "reshard" for r in log)
    assert log.copied == (0 if shared_memory(x.sharding.mesh.flat) else 48 * 4)
    with st.transfers() as log:
        st.reshard(y, x.sharding.with_spec(st.P()))
    assert log.bytes == 3 * 64 * 4
    with st.transfers() as log:
        st.with_sharding_constraint(y, columns)
    assert len(log) == 0


@everywhere
def test_host_arrays_are_counted_where_they_go(backend: str) -> None:
    x = sharded(backend, st.P("x"))
    value = np.ones((8, 8), "float32")
    with st.transfers() as log:
        y = x + value
    assert log.bytes == 256
    assert {r.source for r in log} == {st.HOST}
    assert not any(r.explicit for r in log)
    assert y.sharding == x.sharding
    with st.transfers() as log:
        st.device_put(value, x.sharding)
    assert (log.bytes, log.copied) == (256, 256)
    assert all(r.explicit for r in log)
    with st.transfers() as log:
        np.asarray(y)
    assert log.bytes == 256
    assert {(str(r.destination), r.explicit) for r in log} == {("host", True)}
    with st.transfers() as log:
        float(y[3, 3])
    assert {r.operator for r in log} >= {"to_host"}


def test_aliases_are_reported_as_aliases() -> None:
    value = np.ones((8, 8), "float32")
    with st.transfers() as log:
        x = st.device_put(value, mesh_of((4,), "numpy"), may_alias=True)
    assert (log.bytes, log.copied) == (256, 0)
    assert np.shares_memory(np.asarray(x), value)
    value[0, 0] = 5  # still the caller's to write
    y = st.device_put(value, mesh_of((4,), "numpy"))
    assert not np.shares_memory(np.asarray(y), value)


def test_reductions_count_their_combination(backend: str) -> None:
    x = sharded(backend, st.P("x"))
    with st.transfers() as log, st.transfer_guard("disallow"):
        st.sum(x, axis=0)
    assert log.bytes == 2 * 3 * 32  # three partial results to the first device, three results back
    with st.transfers() as log:
        st.max(x)
    assert log.bytes == 2 * 3 * 4
    with st.transfers() as log:
        st.sum(x, axis=1)
    assert log.bytes == 0


def test_the_heavier_operand_stays(backend: str) -> None:
    d = st.devices(backend)
    big, small = st.ones((100,), device=d[1]), st.ones((1,), device=d[2])
    for made in (small + big, big + small):
        assert made.device == d[1]
    left, right = st.ones((4,), device=d[3]), st.ones((4,), device=d[2])
    assert (left + right).device == d[3]
    assert (right + left).device == d[2]
    free = st.ones((1000,))
    assert not free.committed
    assert (free[:4] + left).device == d[3]
    assert (left + free[:4]).device == d[3]
    assert (free + 1).committed is False
    assert st.device_put(free, d[0]).committed


def test_what_was_not_placed_yields_on_the_same_mesh(backend: str) -> None:
    with st.use_mesh(mesh_of((4,), backend)) as mesh:
        free = st.ones((8, 8), dtype="float64")
    columns = st.ones((8, 8), dtype="float32", device=st.NamedSharding(mesh, st.P(None, "x")))
    assert free.sharding.spec == st.P("x")
    for made in (free + columns, columns + free):
        assert made.sharding == columns.sharding


def test_the_choice_is_the_same_on_every_backend() -> None:
    made = []
    for name in USABLE:
        d = st.devices(name)
        x = st.ones((6, 6), device=st.NamedSharding(mesh_of((2, 2), name), st.P("y", "x")))
        y = st.ones((6, 6), device=mesh_of((3,), name, 4))
        with st.transfers() as log:
            z = (x + y) @ st.ones((6, 9), device=d[7])
        made.append((repr(z.sharding.spec), [(r.bytes, r.source.id, r.destination.id, r.operator) for r in log]))
    assert all(one == made[0] for one in made)


@pytest.mark.parametrize("other", [name for name in USABLE if name != "numpy"])
def test_tensors_of_different_backends_meet(other: str) -> None:
    a = st.ones((10,), device=mesh_of((4,), "numpy"))
    b = st.ones((10, 10), device=mesh_of((3,), other))
    for left, right in ((a, b), (b, a)):
        with st.transfers() as log:
            made = left + right
        assert made.device == b.device
        assert log.bytes == 240
        assert_same(made, np.full((10, 10), 2.0))
    assert_same(st.device_put(b, a.device), np.ones((10, 10)))
    assert_same(st.concat([a, a, b[0]]), np.ones(30))


@everywhere
def test_guard_disallows_before_anything_moves(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    x, y = st.ones((8,), device=mesh), st.ones((8,), device=st.devices(backend)[5])
    with st.transfer_guard("disallow"):
        with st.transfers() as log, pytest.raises(st.TransferError, match=r"add: moves 64 bytes implicitly"):
            x + y
        assert len(log) == 0
        with pytest.raises(st.TransferError, match="getitem"):
            x[1:] + 1
        with pytest.raises(st.TransferError, match="pmap"):
            st.pmap(lambda a, b: a, st.shard(x, devices=mesh), y)
        with st.transfer_guard("allow"):
            assert_same(x + y, np.full(8, 2.0))
        st.device_put(y, mesh)
        st.sum(x)
        repr(x)
    assert_same(x + y, np.full(8, 2.0))


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "apply_along_axis": lambda x: np.apply_along_axis(np.sort, 0, x),
        "accumulate": np.subtract.accumulate,
        "reduceat": lambda x: np.subtract.reduceat(x, [0, 2]),
        "packbits": lambda x: np.packbits(x > 3),
        "fft": st.fft.fft,
    }.items(),
)
def test_the_guard_names_the_function_that_was_called(name: str, call: Callable[[Any], Any]) -> None:
    """And not the internal operator that it calls, which a user cannot look up."""
    x = st.device_put(np.arange(40.0), mesh_of((4,), "checked"))
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match=f"^{name}: moves"):
        call(x)


def test_guard_logs(backend: str, logged: Logged) -> None:
    x = st.ones((8,), device=mesh_of((4,), backend))
    with logged.at_level(logging.WARNING, "shardtensor"), st.transfer_guard("log"):
        x + np.ones(8)
    assert "add: moves 64 bytes implicitly" in logged.messages


def test_guard_holds_in_its_thread_and_in_the_maps_it_starts(backend: str) -> None:
    x, y = st.ones((8,), device=mesh_of((4,), backend)), st.ones((8,), device=st.devices(backend)[0])
    outcome: list[object] = []

    def other() -> None:
        try:
            outcome.append(x + y)
        except st.TransferError as error:
            outcome.append(error)

    with st.transfer_guard("disallow"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(st.TransferError) as caught:
            st.pmap(lambda a: x + y, [1, 2, 3])
    assert isinstance(outcome[0], st.TransferError if THREADS_INHERIT else st.ShardedTensor)
    assert "shard 0" in caught.value.__notes__[0]


def test_log_counts_the_whole_process_and_only_while_open(backend: str) -> None:
    x = sharded(backend, st.P("x"))
    with st.transfers() as outer:
        thread = threading.Thread(target=lambda: x[1:] + 1)
        thread.start()
        thread.join()
        with st.transfers() as inner:
            x[1:] + 1
        x[1:] + 1
    x[1:] + 1
    assert (outer.bytes, inner.bytes) == (3 * inner.bytes, 3 * 32)


def test_log_prints_as_a_table(backend: str) -> None:
    x = sharded(backend, st.P("x"))
    with st.transfers() as log:
        x[1:] + 1
        st.reshard(x, x.sharding.with_spec(st.P()))
    text = str(log)
    assert [line.split()[0] for line in text.splitlines() if not line.startswith("─")] == [
        "operator",
        "getitem",
        "reshard",
        "total",
    ]
    assert "768" in text
    assert repr(log).startswith("TransferLog(")


def test_bad_policy() -> None:
    with pytest.raises(st.ArgumentError, match="policy is 'never'"), st.transfer_guard("never"):
        pass


def test_devices_with_the_same_elements_have_them_in_the_same_order() -> None:
    """Otherwise the same sum would have other bits on another device, because a part that stays is a view, and one that
    is sent a compact copy.
    """
    mesh = mesh_of((2, 2), "checked")
    x = st.ones((6, 8), dtype="float32", device=st.NamedSharding(mesh, st.P("x"))).T
    deep = st.ones((4, 6, 1), device=st.NamedSharding(mesh, st.P(None, None, "y")))  # one device of two has a part
    sums = st.sum(st.permute_dims(deep, (1, 0, 2)), axis=2)
    for made in (sums, x[:, 1:5], st.reshard(x, st.NamedSharding(mesh, st.P(None, "y"))), x[::2, 2:4], x[1:].T):
        orders = {(s.index[0].start, s.index[1].start, s.data.strides) for s in made.addressable_shards}
        places = {order[:2] for order in orders}
        assert len(orders) == len(places)


def test_short_pieces_for_one_device_are_sent_as_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, sends = load("checked"), []
    send = checked.to_device
    monkeypatch.setattr(checked, "to_device", lambda a, *ends: sends.append(ends) or send(a, *ends))
    for width, messages_of_a_pair in ((4, 1), (40_000, 3)):
        x = np.arange(8 * width, dtype="float64").reshape(8, width)
        placed = st.device_put(x, st.NamedSharding(mesh_of((4,), "checked"), st.P("x")))
        sends.clear()
        with st.transfers() as log:
            parts = with_halos(placed, (1, 1), "periodic")
        wanted = np.pad(x, 1, mode="wrap")
        for k, part in enumerate(parts):
            np.testing.assert_array_equal(np.asarray(part), wanted[2 * k : 2 * k + 4])
        pairs = {(r.source, r.destination) for r in log}
        assert len(pairs) == len(log) == 8
        assert set(sends) == pairs
        # The rows of a halo are in three pieces, of which the two at the ends are short.
        assert len(sends) == len(pairs) * min(messages_of_a_pair, 2)


@everywhere
@pytest.mark.parametrize("shape", [(11, 3), (2, 5), (0, 4), (7,), ()])
@pytest.mark.parametrize("spec", [st.P(), st.P("x"), st.P(None, "x")])
def test_host_arrays_arrive_in_row_major_order_and_return(shape: tuple[int, ...], spec: st.P, backend: str) -> None:
    """Of any memory order and dtype; the arrays on the devices do not change with the host array."""
    sharding = st.NamedSharding(mesh_of((4,), backend), st.P(*[*spec][: len(shape)]))
    values = np.arange(float(np.prod(shape))).reshape(shape)
    wide = np.zeros([2 * n for n in shape])
    apart = wide[(*[slice(None, None, 2)] * len(shape), ...)]
    apart[...] = values
    for host in (values.copy(), np.array(values, order="F"), apart):
        x = st.device_put(host, sharding)
        whole = np.asarray(x)
        host[...] = -1
        separate = shared_memory(sharding.mesh.flat) is None  # Otherwise, shards are views.
        for shard in x.addressable_shards if separate else ():
            with load(backend).on(shard.device):
                assert load(backend).is_contiguous(shard.data)
        np.testing.assert_array_equal(np.asarray(x), values)
        np.testing.assert_array_equal(whole, values)
        np.testing.assert_array_equal(np.asarray(x + host.astype("float32")), values - 1)
