"""A program with tensors that span its processes; all processes make the same checks: ``spanning.py [CHECK...]``."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import math
import pickle
import re
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import shardtensor as st
from shardtensor import distributed
from shardtensor.backend.registry import backend_of
from shardtensor.communication import array_communicator
from shardtensor.communication.between_processes import freight, processes, sums_across_processes
from shardtensor.communication.between_processes.agreement import Agreement
from shardtensor.communication.between_processes.processes import JOB
from shardtensor.functions.algorithms import requests
from shardtensor.functions.fft import chirp_fft, transpose_fft
from shardtensor.functions.linalg import panels
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.grouping import groups
from shardtensor.interpreters.jit.grouping.fused_devices import FusedInProcesses
from shardtensor.testing.layouts import on_host
from tests.communication.connecting import connect
from tests.exchanges import Exchange, some_exchange

ROWS = np.arange(21.0).reshape(7, 3)


def everything() -> st.Mesh:
    return st.make_mesh((len(st.devices()),), ("x",))


def tensor(array: Any = ROWS, *spec: Any) -> st.ShardedTensor:
    return st.device_put(array, st.NamedSharding(everything(), st.P(*(spec or ("x",)))))


def assert_gathered(x: Any, wanted: Any) -> None:
    found = distributed.process_allgather(x)
    assert found.dtype == np.asarray(wanted).dtype
    np.testing.assert_array_equal(found, wanted)
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(on_host(shard.data, shard.device), np.asarray(wanted)[shard.index])


def devices_are_numbered_over_all_processes() -> None:
    own, count = st.local_devices(), distributed.process_count()
    assert len(st.devices()) == count * len(own) == st.device_count() == len(set(st.devices()))
    assert [d.id for d in st.devices()] == list(range(st.device_count()))
    assert {d.process_index for d in own} == {distributed.process_index()}
    assert st.zeros(3).sharding.mesh.flat == tuple(st.devices())
    assert everything().local_devices == own == distributed.local_devices()


def a_tensor_knows_what_is_here() -> None:
    x = tensor()
    assert not x.is_fully_addressable
    assert not x.is_fully_replicated
    assert [s.device for s in x.addressable_shards] == st.local_devices()
    assert repr(x).startswith("ShardedTensor(shape=(7, 3), dtype=float64, sharding=P('x') on Mesh(x=")
    assert len(repr(x).splitlines()) >= len(st.local_devices())
    assert repr(x[1:]) == str(x[1:])  # Printing in one process reads nothing from others.
    everywhere = tensor(ROWS, None)
    assert everywhere.is_fully_replicated
    np.testing.assert_array_equal(everywhere, ROWS)
    assert float(tensor().sum()) == ROWS.sum()


def reads_of_what_is_elsewhere_are_errors() -> None:
    x, reads = tensor(), dict[str, Callable[[], Any]]()
    reads["asarray"] = lambda: np.asarray(x)
    reads["tolist"] = x.tolist
    reads["iteration"] = lambda: [float(row.sum(axis=0)[0].item()) for row in [x.T.copy()[0]] if row.tolist()]
    for name, read in reads.items():
        what = "this process does not hold all elements.*process_allgather.*gather_to.*addressable_shards"
        with pytest.raises(st.NotAddressableError, match=("" if name == "iteration" else f"^{name}: ") + what):
            read()
    for convert in (float, int, bool, complex, round, math.floor, lambda e: e.item(), lambda e: f"{e:.1f}"):
        name = {"<lambda>": "item"}.get(convert.__name__, convert.__name__)
        with pytest.raises(st.NotAddressableError, match=rf"^{name}: this process does not hold the element \(\d, 0\)"):
            [convert(x[k, 0]) for k in range(7)]
    with pytest.raises(st.NotAddressableError):
        [float(x[k, 0]) for k in range(7)]  # Some of them are elsewhere.


def memory_is_a_share() -> None:
    x = st.ones((1000 * st.device_count(), 8), device=everything())
    held = sum(s.data.nbytes for s in (x + 1).addressable_shards)
    assert held * distributed.process_count() == x.nbytes


def tensors_are_made_of_parts() -> None:
    mesh, sharding = everything(), st.NamedSharding(everything(), st.P("x"))
    called = []
    x = distributed.make_array_from_callback((7, 3), sharding, lambda index: called.append(index) or ROWS[index])
    assert len(called) == len(st.local_devices())
    assert_gathered(x, ROWS)
    part = distributed.global_array_to_host_local_array(x, mesh, st.P("x"))
    assert part.shape[1] == 3
    assert_gathered(distributed.make_array_from_process_local_data(sharding, part), ROWS)
    assert_gathered(distributed.make_array_from_process_local_data(sharding, part, (7, 3)), ROWS)
    assert_gathered(distributed.host_local_array_to_global_array({"a": part}, mesh, st.P("x"))["a"], ROWS)
    whole = st.NamedSharding(mesh, st.P())
    tree = st.device_put({"a": ROWS, "b": [ROWS, None]}, {"a": sharding, "b": whole})
    assert (tree["a"].sharding, tree["b"][0].sharding, tree["b"][1]) == (sharding, whole, None)
    assert_gathered(tree["a"], ROWS)
    parts = distributed.global_array_to_host_local_array(tree["b"][:1], mesh, [st.P("x")])
    assert_gathered(distributed.host_local_array_to_global_array({"c": parts}, mesh, {"c": st.P("x")})["c"][0], ROWS)
    own = [st.asarray(np.array([float(d.id)]), device=d) for d in st.local_devices()]
    n = st.device_count()
    assert_gathered(distributed.make_array_from_single_device_arrays((n,), sharding, own), np.arange(float(n)))
    with st.set_mesh(mesh):
        assert_gathered(st.make_array_from_single_device_arrays((n,), st.P("x"), own, dtype=float), np.arange(float(n)))
        assert_gathered(st.make_array_from_callback((7, 3), st.P("x"), ROWS.__getitem__, "float32"), ROWS.astype("f4"))
        batch = st.make_array_from_process_local_data(st.P("x"), {"a": part, "b": (part,)}, {"a": (7, 3), "b": None})
        assert_gathered(batch["a"], ROWS)
        assert_gathered(batch["b"][0], ROWS)
    assert distributed.host_local_array_to_global_array({"a": x}, mesh, st.P("x"))["a"] is x
    for root in range(distributed.process_count()):
        found = distributed.gather_to(x, root)
        assert (found is None) == (distributed.process_index() != root)
        assert found is None or np.array_equal(found, ROWS)


def transfers_move_what_is_needed() -> None:
    x = tensor()
    for spec in (st.P(None, "x"), st.P(), st.P("x")):
        y = st.reshard(x, st.NamedSharding(everything(), spec))
        assert_gathered(y, ROWS)
        x = y
    assert_gathered(st.reshard(x, everything().flat[-1]).reshard(everything()), ROWS)


def replicas_are_sent_once() -> None:
    count, n = distributed.process_count(), st.device_count()
    whole = np.arange(24.0 * n).reshape(n, 24)
    x = tensor(whole)
    for spec, wanted in ((st.P(), x.nbytes // count), (st.P(None, "x"), x.nbytes // count // count)):
        before = JOB.agreement.sent.copy()
        y = st.reshard(x, st.NamedSharding(everything(), spec))
        assert set((JOB.agreement.sent - before).values()) == {wanted}
        assert_gathered(y, whole)
    everywhere = tensor(ROWS, None)
    before = JOB.agreement.sent.copy()
    assert_gathered(st.reshard(everywhere, st.NamedSharding(everything(), st.P("x"))) + 0, ROWS)
    st.reshard(everywhere, everything().flat[-1])
    distributed.sync_global_devices("moved")
    assert (JOB.agreement.sent - before).total() <= ROWS.nbytes, "only to gather the result"


def memory_of_transfers_is_limited() -> None:
    if JOB.agreement.device_engine:
        return  # Arrays are sent from where they lie. The double of NCCL copies them to host memory.
    whole, most = np.arange(1 << 20, dtype=np.float64).reshape(1024, 1024), 1 << 19
    with limited_messages(most):
        x, rows, column = tensor(whole), tensor(whole.reshape(8, -1)), st.NamedSharding(everything(), st.P(None, "x"))
        moves = {
            "columns": lambda: st.reshard(x, column),
            "rolled": lambda: st.roll(x, 700, axis=0),
            "gathered": lambda: distributed.gather_to(x, 0),
            "sum": lambda: st.sum(rows, axis=0),
        }
        share, wanted = whole.nbytes // distributed.process_count(), dict[str, Any]()
        wanted["columns"] = whole
        wanted["rolled"] = np.roll(whole, 700, axis=0)
        on_host = backend_of(st.local_devices()[0]).on_host  # Elsewhere, parts of messages are copied by the host, too.
        # Each device has a partial sum of its rows, of which the process combines those of two halves at a time.
        results = {"gathered": whole.nbytes, "sum": share + 3 * whole.nbytes // 8}
        for name, move in moves.items():
            move()
            st.free_cache()
            gc.collect()
            tracemalloc.start()
            made = move()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < results.get(name, share) + (1 if on_host else 3) * most + (1 << 18), (name, peak)
            if name in wanted:
                assert_gathered(made, wanted[name])


@contextlib.contextmanager
def limited_messages(most: int) -> Iterator[None]:
    """Limits the bytes of the messages that a process holds at a time; a context manager."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "MOST", most)
        patch.setattr(freight, "MOST", most)
        yield


def device_arrays_are_sent_from_pinned_memory() -> None:
    plugin = backend_of(st.local_devices()[0])._plugin
    if plugin.name != "cupy":
        return
    x, offload, sent = tensor(), plugin.offload, []

    def counted(array: Any, device: st.Device) -> Any:
        host, token = offload(array, device)
        sent.append(host)
        return host, token

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "offload", counted)
        moved = st.reshard(x, st.NamedSharding(everything(), st.P(None, "x")))
        assert bool(sent) != bool(JOB.agreement.device_engine)  # NCCL reads the memory of the GPUs.
        assert_gathered(moved, ROWS)
    import cupy

    assert sent
    assert all(cupy.cuda.pinned_memory.is_memory_pinned(host.ctypes.data) for host in sent if host.size)


def reductions_and_products() -> None:
    x = tensor()
    for name in ("sum", "mean", "max", "min", "prod", "std", "argmax"):
        for axis in (None, 0, 1):
            found, wanted = getattr(st, name)(x, axis=axis), getattr(np, name)(ROWS, axis=axis)
            np.testing.assert_allclose(distributed.process_allgather(found), wanted, rtol=1e-14)
    long, most = np.arange(6 * ((1 << 17) + 7), dtype=np.float64).reshape(6, -1), 1 << 17
    blocks = (
        mock.patch.object(sums_across_processes, "_BLOCK", 8 * most),
        mock.patch.object(array_communicator, "_BLOCK", most),
    )
    with limited_messages(most), blocks[0], blocks[1]:
        for dtype in (np.float32, np.int64):  # Each process combines a part of the result, block by block.
            assert_gathered(tensor(long.astype(dtype)).max(axis=0), long.astype(dtype).max(axis=0))
        assert_gathered(tensor(long).sum(axis=0), long.sum(axis=0))
        assert_gathered(tensor(long).argmax(axis=0), long.argmax(axis=0))
    np.testing.assert_allclose(distributed.process_allgather(x @ x.T), ROWS @ ROWS.T)
    y = tensor(ROWS.T.copy(), None, "x")
    np.testing.assert_allclose(distributed.process_allgather(y @ x), ROWS.T @ ROWS)


def medians_where_a_process_has_no_lines() -> None:
    lines = np.random.default_rng(0).normal(size=(1, 4, 5))
    for name, args in (("median", ()), ("nanmedian", ()), ("quantile", (0.3,)), ("nanquantile", ([0.1, 0.3],))):
        assert_gathered(
            getattr(st, name)(tensor(lines), *args, axis=(1, 2)), getattr(np, name)(lines, *args, axis=(1, 2))
        )


def placed_reductions_take_one_exchange() -> None:
    rng, n = np.random.default_rng(0), st.device_count()
    host, job = rng.normal(size=(4 * n + 1, 6 * n)), JOB.agreement
    x, rows = tensor(host), st.NamedSharding(everything(), st.P("x"))
    summed = st.sum(x, axis=0)
    sums = {
        "sum": lambda a, to: st.sum(a, axis=0, out_sharding=to),
        "std": lambda a, to: st.std(a, axis=0, out_sharding=to),
        "argmax": lambda a, to: st.argmax(a, axis=0, out_sharding=to),
        "matmul": lambda a, to: st.matmul(a.T, a, out_sharding=to),
    }
    abstract = st.AbstractMesh((n,), ("x",), processes=distributed.process_count())
    a, to = (st.empty_like(x, device=st.NamedSharding(abstract, st.P("x"))), st.NamedSharding(abstract, st.P("x")))
    for name, call in sums.items():
        exchanges, before = job._sequence, job.sent.copy()
        found = call(x, rows)
        assert job._sequence == exchanges + 1, name
        assert found.sharding == rows, name
        simulated = st.simulate(call, a, to, mesh=abstract).process_bytes()[distributed.process_index()]
        assert [job.sent[k] - before[k] for k in range(distributed.process_count())] == simulated.tolist(), name
        assert_gathered(found, np.asarray(call(x, None)))
    pending = st.sum(x, axis=0, out_sharding=st.NamedSharding(everything(), st.P(unreduced={"x"})))
    assert_gathered(pending + 0, np.asarray(summed))


def algorithms_whose_parts_differ() -> None:
    """Distinct elements, requests in rounds, panels, and convolutions: each process knows the shapes of all parts."""
    values = np.random.default_rng(0).integers(0, 40, 301).astype("float64")
    x = tensor(values)
    for found, wanted in zip(st.unique_all(x), np.unique_all(values), strict=True):
        assert_gathered(found, wanted)
    assert_gathered(st.unique(x), np.unique(values))
    assert_gathered(st.unique_counts(x).counts, np.unique_counts(values).counts)
    small = {(requests, "ROUND"): 64, (panels, "GATHERED"): 0, (panels, "PANEL"): 3}
    small |= {(transpose_fft, "_GATHERED"): 16, (chirp_fft, "PIECE"): 200}
    with contextlib.ExitStack() as stack:
        for (module, name), size in small.items():
            stack.enter_context(mock.patch.object(module, name, size))
        assert_gathered(st.take_along_axis(x, tensor(np.argsort(values)), axis=0), np.sort(values))
        q, r = st.linalg.qr(tensor(ROWS[:, :2] @ ROWS[:2, :] + np.eye(7, 3)), mode="complete")
        left, right = distributed.process_allgather(q), distributed.process_allgather(r)
        np.testing.assert_allclose(left @ right, ROWS[:, :2] @ ROWS[:2, :] + np.eye(7, 3), atol=1e-10)
        np.testing.assert_allclose(left.T @ left, np.eye(7), atol=1e-12)
        for size in (60, 3000):  # Few elements, and more than one device would take.
            tall = np.random.default_rng(0).standard_normal((size, 3)).astype(np.float32)
            q, r = st.linalg.qr(tensor(tall))
            np.testing.assert_allclose(
                distributed.process_allgather(q) @ distributed.process_allgather(r), tall, atol=1e-5
            )
            found = distributed.process_allgather(st.linalg.svdvals(tensor(tall)))
            np.testing.assert_allclose(found, np.linalg.svd(tall, compute_uv=False), rtol=1e-5)
        spectrum = distributed.process_allgather(st.fft.rfft(tensor(values[:293])))
        np.testing.assert_allclose(spectrum, np.fft.rfft(values[:293]), atol=1e-9)


def meshes_may_leave_out_processes() -> None:
    """Processes without a device of the mesh know the shapes of what the others compute."""
    ends = st.make_mesh((2,), ("x",), devices=[st.devices()[0], st.devices()[-1]])
    x = st.device_put(ROWS[:, :2], st.NamedSharding(ends, st.P("x")))
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "svdvals": lambda xp, a: xp.linalg.svdvals(a) if xp is st else np.linalg.svd(a, compute_uv=False),
        "qr": lambda xp, a: abs(xp.linalg.qr(a)[1]),
        "unique": lambda xp, a: xp.unique(a),
        "sort": lambda xp, a: xp.sort(a, axis=0),
        "nonzero": lambda xp, a: xp.nonzero(a)[0],
        "placed": lambda xp, a: st.sum(a, axis=0, out_sharding=st.P("x")) if xp is st else a.sum(axis=0),
    }
    for name, call in calls.items():
        with st.use_mesh(ends):
            found = distributed.process_allgather(call(st, x))
        np.testing.assert_allclose(found, call(np, ROWS[:, :2]), rtol=1e-12, err_msg=name)


def views_and_writes() -> None:
    x, wanted = tensor(), ROWS.copy()
    assert_gathered(x[1:6:2], wanted[1:6:2])
    for index, value in (
        ((slice(2, 4),), 5.0),
        ((0, 1), 7.0),
        ((slice(None, None, 2),), wanted[::2] * 2),
        ((np.array([1, 3, 5]),), np.ones(3)),
        ((wanted > 3,), 0.5),
    ):
        x[index], wanted[index] = value, value
        assert_gathered(x, wanted)
    x += 1
    wanted += 1
    column = x.T[1]
    column[:] = np.arange(7)
    wanted[:, 1] = np.arange(7)
    assert_gathered(x, wanted)
    assert_gathered(x[np.array([6, 0, 3])], wanted[[6, 0, 3]])
    base, held = x, x.copy()
    base[0] = 0
    assert_gathered(held, wanted)
    x, wanted = tensor(ROWS, "x"), ROWS.copy()
    x[x % 2 == 0] = x.sum()  # a tensor without dimensions
    wanted[wanted % 2 == 0] = ROWS.sum()
    assert_gathered(x, wanted)


def values_that_repeat_are_sent_once() -> None:
    """Along a new dimension, and in messages that are longer than one exchange, too."""
    for rows, columns, most in ((3, 8, 1 << 20), (700, 50, 1 << 12)):
        value = np.arange(float(rows)).reshape(1, rows, 1, 1)
        split = tensor(value, None, "x")
        for spec in ((None,), ("x",), (None, "x")):
            x, wanted = tensor(np.zeros((rows, 3, columns)), *spec), np.zeros((rows, 3, columns))
            with limited_messages(most):
                x[None] = split
            wanted[None] = value
            assert_gathered(x, wanted)
            assert_gathered(
                st.broadcast_to(split, (2, rows, 3, columns)) + x * 0, np.broadcast_to(value, (2, rows, 3, columns))
            )


def random_numbers_do_not_depend_on_the_processes() -> None:
    key, alone = st.random.key(3), st.local_devices()[0]
    for draw in (st.random.uniform, st.random.normal):
        assert_gathered(draw(key, (50,), device=everything()), np.asarray(draw(key, (50,), device=alone)))


def maps_and_their_collectives() -> None:
    n, x = st.device_count(), np.arange(4.0 * st.device_count()).reshape(4, -1)
    mesh = everything()
    over = st.shard_map(
        lambda b: (b * 2, st.psum(b.sum(), "x"), st.all_gather(b, "x", tiled=True), st.psum(1, "x")),
        mesh=mesh,
        in_specs=st.P("x"),
        out_specs=(st.P("x"), st.P(), st.P(), st.P()),
    )
    doubled, total, whole, count = over(np.arange(21.0))
    assert_gathered(doubled, np.arange(21.0) * 2)
    assert (float(total), int(count)) == (210, n)
    np.testing.assert_array_equal(whole, np.arange(21.0))
    columns = st.shard_map(
        lambda b: (
            st.psum_scatter(b, "x", scatter_dimension=0, tiled=True),
            st.all_to_all(b, "x", split_axis=0, concat_axis=1, tiled=True),
            st.ppermute(b, "x", [(k, (k + 1) % n) for k in range(n)]),
            st.pmax(b, "x"),
        ),
        mesh=mesh,
        in_specs=st.P(None, "x"),
        out_specs=(st.P("x"), st.P("x"), st.P(None, "x"), st.P()),
    )
    scattered, turned, moved, greatest = columns(x)
    assert_gathered(scattered, x.sum(axis=1, keepdims=True))
    assert_gathered(turned, x)
    assert_gathered(moved, np.roll(x, 1, axis=1))
    np.testing.assert_array_equal(greatest, x.max(axis=1, keepdims=True))
    if n % 2 == 0:
        grid = st.make_mesh((2, n // 2), ("y", "z"))
        sums = st.shard_map(
            lambda b: (st.psum(b, "y"), st.psum(b, "z"), st.pmean(b, ("z", "y")), b + st.axis_index("z")),
            mesh=grid,
            in_specs=st.P("y", "z"),
            out_specs=(st.P(None, "z"), st.P("y"), st.P(), st.P("y", "z")),
        )
        by_y, by_z, mean, added = sums(x)
        assert_gathered(by_y, x[:2] + x[2:])
        assert_gathered(by_z, x.reshape(4, n // 2, -1).sum(axis=1))
        np.testing.assert_array_equal(mean, (x[:2] + x[2:]).reshape(2, n // 2, -1).sum(axis=1) / n)
        assert_gathered(added, x + np.arange(n // 2).repeat(2))
    assert_gathered(
        st.pmap(lambda a: st.psum(a, "i"), np.arange(n), axis_name="i", devices=mesh), np.full(n, n * (n - 1) // 2)
    )
    # Python's numbers, complex ones too, are exchanged as they are.
    numbers = [complex(k, -0.5) for k in range(n)]
    total = sum(numbers)
    made = st.pmap(
        lambda k: (st.psum(numbers[int(k)], "i"), numbers[int(k)]), np.arange(n), axis_name="i", devices=mesh
    )
    assert_gathered(made[0], np.full(n, total))
    assert_gathered(made[1], np.array(numbers))


def rows_of_any_numbers_are_exchanged() -> None:
    n = st.device_count()
    for seed in range(3):
        exchange = some_exchange(seed, n, 1 + seed, tail=(2,) * (seed % 2), dtype="float32" if seed else "int16")
        found = exchanged(exchange)
        assert set(found) == {k for k, device in enumerate(st.devices()) if device in st.local_devices()}
        for k, result in found.items():
            np.testing.assert_array_equal(result, exchange.answer()[k])
    # Rows are sent in two groups, and in several processes; the others wait for a sum meanwhile.
    groups = [[k for k in range(n) if k != n // 2], [n // 2]]
    of_group = [some_exchange(5 + len(group), len(group), 2) for group in groups]

    def body() -> None:
        k = st.axis_index("x")
        number, at = next((g, group.index(k)) for g, group in enumerate(groups) if k in group)
        arguments = map(st.asarray, of_group[number].of(at))
        result = st.ragged_all_to_all(*arguments, axis_name="x", axis_index_groups=groups)
        np.testing.assert_array_equal(on_host(result, st.current_device()), of_group[number].answer()[at])
        assert st.psum(1, "x") == n

    for _ in range(2):
        st.shard_map(body, mesh=everything(), in_specs=(), out_specs=st.P())()


def exchanged(exchange: Exchange) -> dict[int, np.ndarray]:
    """Returns what the programs of this process receive."""
    found = dict[int, np.ndarray]()

    def body() -> None:
        k = st.axis_index("x")
        result = st.ragged_all_to_all(*map(st.asarray, exchange.of(k)), axis_name="x")
        found[k] = on_host(result, st.current_device())

    st.shard_map(body, mesh=everything(), in_specs=(), out_specs=st.P())()
    return found


def rows_that_do_not_fit_are_an_error_of_all() -> None:
    """Also where one process has the wrong argument only, and the programs go on afterwards."""
    n, at = st.device_count(), st.device_count() - 1
    messages: list[str] = []

    def body(change: Callable[[Any], None], kind: type[Exception]) -> None:
        k = st.axis_index("x")
        arguments = [np.ones((n, 2)), np.zeros((n, 2)), np.arange(n), np.ones(n, int), np.full(n, k), np.ones(n, int)]
        if k == at:
            change(arguments)
        with pytest.raises(kind) as caught:
            st.ragged_all_to_all(*map(st.asarray, arguments), axis_name="x")
        messages.append(str(caught.value))

    def run(kind: type[Exception], number: int, value: Any, words: str) -> None:
        messages.clear()
        st.shard_map(
            functools.partial(body, lambda a: a.__setitem__(number, value), kind), mesh=everything(), in_specs=(),
            out_specs=st.P(),
        )()  # fmt: skip
        assert len(messages) == len(st.local_devices())
        (message,) = {*messages}
        assert {*distributed_texts(message)} == {message}
        assert words.format(st.devices()[at]) in message

    run(st.CollectiveError, 3, np.full(n, 2), "send_sizes[0] of {} is 2, and recv_sizes")
    run(
        st.CollectiveError,
        2,
        np.full(n, n),
        f"input_offsets[0] of {{}} is {n}, send_sizes[0] is 1, and operand has {n}",
    )
    run(st.CollectiveError, 4, np.full(n, 0 if at else 5), "of its output from")
    run(st.ArgumentTypeError, 2, np.ones(n), "input_offsets of {} has dtype float64; wanted integers")
    run(st.ShapeError, 2, np.ones(n + 1, int), f"input_offsets of {{}} has shape ({n + 1},); wanted one dimension")
    run(st.ShapeError, 0, np.ones((n, 3)), f"operand of {{}} has shape ({n}, 3), and operand of")
    exchange = some_exchange(9, n)
    for k, result in exchanged(exchange).items():
        np.testing.assert_array_equal(result, exchange.answer()[k])


def distributed_texts(text: str) -> list[str]:
    return processes.gather_texts("messages of a test", text)


def maps_in_maps() -> None:
    """The outer map is over processes, so that its calls have the devices of one, or over the devices of each."""
    p, n = distributed.process_count(), len(st.local_devices())
    mesh = st.make_mesh((p, n), ("h", "d"))
    values = np.arange(4.0 * p * n * n).reshape(2 * p, 2 * n * n)
    x = st.device_put(values, st.NamedSharding(mesh, st.P("h", "d")))

    def outer(f: Any, axis: str, out: st.P) -> Any:
        spec = st.P("h") if axis == "h" else st.P(None, "d")
        return st.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out, axis_names={axis})(x)

    def inside(f: Any, axis: str, out: st.P) -> Any:
        spec = st.P("h") if axis == "h" else st.P(None, "d")
        return lambda b: st.shard_map(f, in_specs=spec, out_specs=out)(b)

    by_rows, by_columns = values.reshape(p, 2, -1), values.reshape(2 * p, n, -1)
    assert_gathered(
        outer(lambda b: b * 2 + b.sum(axis=1, keepdims=True), "h", st.P("h")), values * 2 + values.sum(1)[:, None]
    )
    assert_gathered(outer(lambda b: b * 2 + b.sum(axis=0), "d", st.P(None, "d")), values * 2 + values.sum(axis=0))
    assert_gathered(outer(lambda b: st.psum(b, "h"), "h", st.P()), by_rows.sum(axis=0))
    assert_gathered(outer(lambda b: st.psum(b, "d"), "d", st.P()), by_columns.sum(axis=1))
    for axes in (("h", "d"), ("d", "h")):
        both = inside(lambda c, axes=axes: st.psum(c, axes), axes[1], st.P())
        assert_gathered(outer(both, axes[0], st.P()), values.reshape(p, 2, n, -1).sum(axis=(0, 2)))
    assert_gathered(outer(inside(lambda c: st.psum(c, "h"), "d", st.P(None, "d")), "h", st.P()), by_rows.sum(axis=0))
    assert_gathered(outer(inside(lambda c: st.psum(c, "d"), "h", st.P("h")), "d", st.P()), by_columns.sum(axis=1))
    numbered = inside(lambda c: c * 0 + st.axis_index(("d", "h")), "d", st.P(None, "d"))
    assert_gathered(outer(numbered, "h", st.P("h")), np.kron(np.arange(p * n).reshape(n, p).T, np.ones((2, 2 * n))))
    pairs = st.pmap(st.pmap(lambda v: st.pmax(v, ("a", "b")), axis_name="b"), np.arange(p * n).reshape(p, n),
                    axis_name="a", devices=mesh)  # fmt: skip
    assert_gathered(pairs, np.full((p, n), p * n - 1))
    if n > 1:
        reverse = st.make_mesh((n,), ("d",), devices=st.local_devices()[::-1])

        def backward(b: Any) -> Any:
            total = lambda: st.psum(st.axis_index("d"), ("h", "d"))  # noqa: E731
            return st.shard_map(total, mesh=reverse, in_specs=(), out_specs=st.P())()

        with pytest.raises(st.BackendError, match=r"other processes expect it on .*give the inner maps all devices"):
            outer(backward, "h", st.P())


def lists_are_of_this_process() -> None:
    parts = st.pmap(lambda a: a + 1, st.shard(np.arange(10)))
    assert [part.device for part in parts] == st.local_devices() or st.num_shards() > 10
    assert st.unshard(parts).tolist() == list(range(1, 11))


def lists_of_compiled_functions_have_an_item_for_each_device() -> None:
    """Each process holds the items of its own devices; the others are tensors that it knows of."""
    mesh, value = st.make_mesh((st.device_count(),)), np.arange(20.0).reshape(10, 2)
    run = st.shard_jit(lambda x, w: (x * w, x.sum(axis=0)), mesh, input_shardings=[{0: 0}, {}])
    with st.transfer_guard("disallow"):
        rows = run([[part, 2] for part in st.shard(value, devices=mesh)])
    assert [x.device for pair in rows for x in pair] == [device for device in mesh.flat for _ in range(2)]
    for device, (part, total), wanted in zip(mesh.flat, rows, np.array_split(2 * value, mesh.size), strict=True):
        if device in st.local_devices():
            assert np.array_equal(part, wanted)
            assert np.array_equal(total, value.sum(axis=0))
    assert_gathered(st.unshard([part for part, _ in rows]), 2 * value)


def maps_over_arrays_say_whose_devices_they_use() -> None:
    count, own = st.device_count(), st.local_devices()
    here = np.ones(len(own)) * (1 + distributed.process_index())

    def total(v: Any) -> Any:
        return st.psum(v, "i")

    for array in (here, np.ones(count)):
        with pytest.raises(st.ShardingError, match=r"a job of several processes.*local_data.*devices=st.local_devices"):
            st.pmap(total, array, axis_name="i")
    assert st.pmap(total, here, axis_name="i", devices=own).tolist() == [here.sum()] * len(own)
    with st.use_mesh(st.make_mesh((len(own),), ("m",), devices=own)):
        assert st.pmap(total, here, axis_name="i").tolist() == [here.sum()] * len(own)
    assert_gathered(st.pmap(total, np.ones(count), axis_name="i", devices=st.devices()), np.full(count, float(count)))
    assert_gathered(st.pmap(total, st.ones(count), axis_name="i"), np.full(count, float(count)))
    rows = st.distributed.make_array_from_process_local_data(st.NamedSharding(everything(), st.P("x")), here)
    wanted = distributed.process_allgather(here).sum()
    sums = st.pmap(total, rows, axis_name="i")
    assert_gathered(sums, np.full(count, wanted))
    assert_gathered(st.pmap(lambda v: v / count, sums), np.full(count, wanted / count))


def calls_that_differ_are_errors() -> None:
    first = distributed.process_index() == 0
    over = st.shard_map(
        lambda b: st.psum(b, "x") if first else st.pmax(b, "x"),
        mesh=everything(),
        in_specs=st.P("x"),
        out_specs=st.P(),
    )
    at = r"\S*spanning\.py:\d+"
    named = rf"different collectives.*process 0: {at} psum over 'x'; process(es)? [\d-]+: {at} pmax over 'x'"
    with pytest.raises(st.CollectiveError, match=named):
        over(np.arange(st.device_count()))
    early = st.shard_map(
        lambda b: b if first else st.pmax(b, "x"), mesh=everything(), in_specs=st.P("x"), out_specs=st.P("x")
    )
    with pytest.raises(st.CollectiveError, match=rf"process 0: no collective; process(es)? [\d-]+: {at} pmax over 'x'"):
        early(np.arange(st.device_count()))


def shifted(u: Any, a: Any) -> None:
    u[1:-1] = a * (u[:-2] + u[2:])


def what_differs(k: int) -> dict[str, Callable[[st.ShardedTensor], object]]:
    """Returns calls with values that differ in each process ``k``, by the text of their errors."""
    sharding, long = st.NamedSharding(everything(), st.P("x")), np.full((300, 100), float(k))
    return {
        r"multiply\(float64\[7, 3\] P\('x'\) #\d+, 1.5": lambda x: x * (k + 0.5),
        r"host array float64\[3\] with checksum": lambda x: x + np.full(3, float(k)),
        r"host array float64\[7, 3\] with": lambda x: st.device_put(ROWS * k, sharding),
        r"host array float64\[300, 100\]": lambda x: st.asarray(long),
        r"setitem\(float64\[7, 3\] P\('x'\) #\d+, \(3, ": lambda x: x.__setitem__(k, 1.0),
        r"setitem\(.*np.float64\(1.0\)\) in": lambda x: x.__setitem__(0, float(k)),
        r"setitem\(.*, \(host array": lambda x: x.__setitem__(np.array([k, 3]), 1.0),
        r"setitem\(.*, host array bool": lambda x: x.__setitem__(k < ROWS, 1.0),
        r"getitem\(.*, \(host array": lambda x: x[np.array([k, 3])],
        r"full\(1, 8": lambda x: st.full(8, k, device=sharding),
        r"normal\(1, \(8\)": lambda x: st.random.normal(st.random.key(k), (8,), device=sharding),
        r"quantile\(.*, 0.25": lambda x: st.quantile(x, k / 4),
        r"multiply\(.*, 1\.0": lambda x: st.jit(lambda a: a * float(k))(x),
        r"multiply\(.*, 2\.0": lambda x: st.jit(lambda a, s: a * s + 1, executor="numpy")(x, float(2 * k)),
        r"stencil\(.*, 1\.0": lambda x: st.jit(shifted)(tensor(np.ones((26, 3))), float(k)),
    }


def which_tensor_differs(k: int) -> dict[str, Callable[..., object]]:
    """Returns calls that take another tensor of the same aval in each process ``k``, by the text of their errors."""
    mesh = everything()

    def mapped(fn: Callable[..., Any], *args: Any, specs: Any = None) -> Any:
        return st.shard_map(fn, mesh=mesh, in_specs=specs or st.P("x"), out_specs=st.P("x"))(*args)

    def mapped_over(array: Any, shared: Any) -> Any:
        return st.pmap(lambda v, w: v * (v * 0 + w).sum(), array, shared, in_axes=(0, None), devices=mesh)

    def loop(x: Any, y: Any) -> None:
        grads = {"b": y, "w": x}
        for name in sorted(grads, reverse=k > 0):  # As `set(grads)` is ordered: by hashes that differ.
            grads[name].max()

    def written(x: Any, y: Any) -> None:
        (x, y)[k][0] = 1.0

    def added(x: Any, y: Any) -> None:
        z = x + y
        z += (x, y)[k]

    def assigned(x: Any, y: Any) -> None:
        z = x + y
        z[1:3] = (x, y)[k][2:4]

    def copied_and_written(x: Any, y: Any) -> None:
        copies = x.copy(), x.copy()
        copies[1][0] = 1.0
        copies[k].max()

    def compiled_and_copied(x: Any, y: Any) -> None:
        copies = st.jit(lambda a: (a.copy(), a.copy()))(x)
        copies[1][0] = 1.0
        copies[k].max()

    def compiled_write(x: Any, y: Any) -> None:
        def f(a: Any) -> None:
            a[0] = 1.0

        st.jit(f)((x, y)[k])

    return {
        r"subtract\(.* #2, .* #1\)": lambda x, y: x - y if k else y - x,
        r"max\(float64\[7, 3\] P\('x'\) #2, None": loop,
        r"setitem\(float64\[7, 3\] P\('x'\) #2, ": written,
        r"add\(.*, float64\[7, 3\] P\('x'\) #2\)": added,
        r"setitem\(.*, float64\[2, 3\] P\('x'\) #2\[6, \(3, 1\)\]": assigned,
        r"negative\(float64\[2, 3\] P\('x'\) #1\[3, \(3, 1\)\]": lambda x, y: -x[k : k + 2],
        r"negative\(float64\[3, 7\] P\(None, 'x'\) #2\[0": lambda x, y: -(x, y)[k].T,
        r"multiply\(.* #1\[1\]": lambda x, y: y * x[0, k],
        r"multiply\(.* #add\(1\[1\], 1": lambda x, y: y * (x[0, k] + 1),
        r"negative\(.*\]\.imag": lambda x, y: -((x + 1j).imag if k else (x + 1j).real),
        r"negative\(float64\[7, 7\] P\(None, 'x'\) #\d\) in process 0": lambda x, y: -st.meshgrid(x[:, 0], x[:, 0])[k],
        r"negative\(.* #\d+.2\)": lambda x, y: -st.linalg.svd(x[:3])[::2][k],
        r"sort\(float64\[7, 3\] P\('x'\) #2, ": lambda x, y: st.sort((x, y)[k], axis=0),
        r"where\(.* #2, .* #1\)": lambda x, y: st.where(x > 3, *((x, y), (y, x))[k]),
        r"getitem\(.*bool\[7, 3\] P\('x'\) #4": lambda x, y: x[(x > 1, y > 1)[k]],
        r"negative\(.* #copy\(2": lambda x, y: -(x, y)[k].copy(),
        r"max\(.* #copy\(1\) after 1 writes, None": copied_and_written,
        r"max\(.* after 1 writes, None": compiled_and_copied,
        r"reshard\(float64\[7, 3\] P\('x'\) #2\)": lambda x, y: st.reshard((x, y)[k], st.NamedSharding(mesh, st.P())),
        r"unique\w*\(float64\[7, 3\] P\('x'\) #2\)": lambda x, y: st.unique((x, y)[k]),
        r"add\(.* #2": lambda x, y: np.add(x, 1, out=(x, y)[k]),
        r"process_allgather\(.* #2": lambda x, y: distributed.process_allgather((x, y)[k]),
        r"gather_to\(.* #2": lambda x, y: distributed.gather_to((x, y)[k]),
        r"subtract\(.* #2, .* #1\) in": lambda x, y: st.jit(lambda a, b: a - b)(*((x, y), (y, x))[k]),
        r"subtract\(.* #1, .* #2\) in": lambda x, y: st.jit((lambda a, b: a - b, lambda a, b: b - a)[k])(x, y),
        r"add\(.* #1, .* #2\)": lambda x, y: st.jit(lambda a: a + (x, y)[k])(x),
        r"jit\(.*, executor='numpy'": lambda x, y: st.jit(lambda a: a * 2, executor=(None, "numpy")[k])(x),
        r"setitem\(.* #copy\(2\), ": compiled_write,
        r"shard_map\(#2; #1\)": lambda x, y: mapped(lambda a, b: a - b, *((x, y), (y, x))[k]),
        r"shard_map\(.* with y=float64.* #2 in": lambda x, y: mapped(
            functools.partial(lambda a, y: a * y.ndim, y=(x, y)[k]), x
        ),
        r"shard_map\(.* with factor=1.5": lambda x, y: mapped(st.jit(lambda a, factor=k + 0.5: a * factor), x),
        r"shard_map\(.* with by_name\['s'\]=1.5": lambda x, y: mapped(
            (lambda by_name: lambda a: a * by_name["s"])(OrderedDict(s=k + 0.5)), x
        ),
        r"shard_map\(.*; 1\.5\) in": lambda x, y: mapped(
            lambda a, s: a * s["rate"], x, {"rate": k + 0.5}, specs=(st.P("x"), st.P())
        ),
        r"pmap\(.*; 1\.5\) in": lambda x, y: mapped_over(np.arange(mesh.size), k + 0.5),
        r"pmap\(.*; host array": lambda x, y: mapped_over(np.arange(mesh.size), np.full(3, k)),
        r"shard_map\(.* with scale=1.5": lambda x, y: mapped(lambda a, scale=k + 0.5: a * scale, x),
        r"shard_map\(.* of a function with weights=host": lambda x, y: mapped(
            (lambda weights: lambda a: helper(a, weights))(np.ones(3) * k), x
        ),
        r"shard_map\(.* with GLOBAL=": lambda x, y: mapped(uses_global, x),
    }


GLOBAL: Any = None


def helper(a: Any, weights: Any) -> Any:
    return a * float(weights.sum())


def uses_global(a: Any) -> Any:
    return indirectly(a)


def indirectly(a: Any) -> Any:
    return a * float(GLOBAL.sum())


DIFFERENCE = (
    r"^the processes .* different .*: process 0: .*spanning\.py:\d+ .*; process(es)? [\d-]*: .*spanning\.py:\d+ "
)
"""What an error says first, the same in all processes: no numbers of calls, identities or checksums."""


def values_that_differ_are_errors() -> None:
    global GLOBAL
    engine, k = JOB.agreement.engine, distributed.process_index()
    GLOBAL = k * np.ones(3)

    def until_next_exchange(call: Callable[..., object], count: int) -> None:
        given = [tensor() for _ in range(count)]
        call(*given)
        given[0].sum()

    for count, calls in ((1, what_differs(k)), (2, which_tensor_differs(min(k, 1)))):
        for text, call in calls.items():
            JOB.agreement = Agreement(engine, 20)
            with mock.patch.object(groups, "LEAST", 0), pytest.raises(st.DistributedError) as raised:
                until_next_exchange(call, count)
            assert re.search(text, raised.value.details), raised.value.details
            assert re.search(DIFFERENCE, str(raised.value)), raised.value
    JOB.agreement = Agreement(engine, 20)


def what_differs_by_right_is_no_error() -> None:
    k = distributed.process_index()
    mesh = st.make_mesh((len(st.local_devices()),), ("x",), devices=st.local_devices())
    x, y = tensor(), tensor(ROWS + 1)
    total = x.sum()
    if k == 0:  # What process 0 reads or prints, and what it does on its own devices.
        print(repr(x), f"{total} {float(total)}", x.shape, np.asarray(total), x.addressable_shards, file=io.StringIO())
        views = x[2:], x.T, x[0], x[1, 1], y[::-1][2, 0] + 1
        local = st.arange(10.0, device=mesh)
        local[3:] = st.jit(lambda a: a * 2 + len(views))(local)[3:]
        st.pmap(lambda a: a + k, local.shard())
        st.shard_map(lambda a: st.psum(a, "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P())(
            np.arange(len(mesh.flat))
        )
    rank, name, mine = k, f"process {k}", st.arange(3.0, device=st.local_devices()[0])
    files, by_rank, seconds, weight = [f"{name}/{n}" for n in range(250 - 200 * k)], {k: 0.5}, 0.0, 0.5
    by_name = {letter: ord(letter) / 2 for letter in ("ab" if k else "ba")}
    losses: list[Any] = []

    def body(a: Any, own: Any) -> Any:
        nonlocal seconds
        seconds += k / 3
        losses.extend([k / 3, np.full(2, k / 3)])
        if rank == 0 and name and k in own and mine.ndim and (files, by_rank, by_name, weight):
            print("", end="")
        return st.psum(a, "x")

    over = st.shard_map(body, mesh=everything(), in_specs=(st.P("x"), None), out_specs=st.P())
    for _ in range(2):
        found = over(st.arange(float(st.device_count())), {k: np.full(3, k), -1: k / 3})
        assert_gathered(found, np.full(1, sum(range(st.device_count())), float))
    assert_gathered(x + y * total, ROWS + (ROWS + 1) * ROWS.sum())


def writes_on_one_device_are_no_calls_of_all() -> None:
    """All processes may write a tensor on one device: only the one that has it does more than to know its shape."""
    x = st.device_put(np.arange(6.0), st.devices()[0])
    y = x + 0
    y[:2] += x[4:]
    y[np.array([3, 5])] = 1
    y *= 2
    pairs = x[np.array([[1, 2], [3, 4]])]
    gradient = st.grad(lambda v: (v[:3] * v[3:]).sum())(x)
    for found, wanted in ((y, [8, 12, 4, 2, 8, 2]), (pairs, [[1, 2], [3, 4]]), (gradient, [3, 4, 5, 0, 1, 2])):
        assert_gathered(st.reshard(found, everything()), np.array(wanted, float))


def jit_has_the_bits_of_eager_mode() -> None:
    def step(w: Any, a: Any) -> Any:
        error = st.exp(-a) @ w - a.sum(axis=1, keepdims=True)
        a[1:3] = error[1:3, :1]
        return w - (a.T @ error) / 7, error.std()

    rows = np.linspace(0, 1, 21).reshape(7, 3)
    w, x, y = tensor(np.ones((3, 3)), None), tensor(rows), tensor(rows)
    # Functions in CUDA have other bits on the double.
    compiled = st.jit(step, executor="numpy" if backend_of(st.local_devices()[0]).kernel_language == "cuda" else None)
    for _ in range(3):
        for found, wanted in zip((*compiled(w, x), x), (*step(w, y), y), strict=True):
            assert_gathered(found, distributed.process_allgather(wanted))
            assert found.sharding == wanted.sharding


def gradients_are_added_in_one_message() -> None:
    def step(x: Any, w: Any, b: Any) -> Any:
        error = st.tanh(x @ w) - b
        return w - x.T @ error, b - error.sum(axis=0), (error * error).sum()

    x, w, b = tensor(np.linspace(0, 1, 48).reshape(16, 3)), tensor(np.ones((3, 3)), None), tensor(np.ones(3), None)
    compiled = st.jit(step, executor="numpy")
    with st.transfers() as once:
        found = compiled(x, w, b)
    with st.transfers() as each:
        wanted = step(x, w, b)
    assert once.bytes == each.bytes
    assert 3 * len(once) == len(each) > 0
    for one, other in zip(found, wanted, strict=True):
        assert_gathered(one, distributed.process_allgather(other))


def kernels_run_in_each_process() -> None:
    def f(x: Any, b: Any, w: Any, a: Any) -> Any:
        y = st.where(x > 3, st.tanh(x * a) + b, x)
        rows = y - y.max(axis=1, keepdims=True)
        return rows, (rows * rows).sum(axis=1), y.sum(axis=0) * 2 + 1, (w * a + 1) / 2, y * y.var(axis=1, keepdims=True)

    given = tensor(), tensor(np.linspace(0, 1, 3), None), tensor(ROWS + 1, None), 0.5
    own = backend_of(st.local_devices()[0])
    with mock.patch.object(groups, "LEAST", 0):
        for executor in ["numpy", *["c"] * bool(find_compiler())]:
            compiled = st.jit(f, executor=executor)
            kernels = compiled.lower(*given)._executable.kernels
            assert (len(kernels) > 1) == (own.on_host or (executor == "c" and own.kernel_language is not None))
            segments = compiled.lower(*given)._executable.segments
            assert bool(segments) == (executor == "c" and own.captures)
            for _ in range(9 * bool(segments)):
                compiled(*given)  # Nothing else is allocated between, so that addresses come again.
            for _ in range(2):
                for found, wanted in zip(compiled(*given), f(*given), strict=True):
                    assert found.sharding == wanted.sharding
                    mine, its = distributed.process_allgather(found), distributed.process_allgather(wanted)
                    np.testing.assert_allclose(mine, its, rtol=1e-13 * (executor == "c"))
            assert all(segment.graphs._graphs for segment in segments), "no addresses came again"
            with mock.patch.object(own, "captures", own.captures and distributed.process_index() > 0):
                for _ in range(20 * bool(segments)):
                    compiled(*given)  # Those that launch graphs make the same calls as those that do not.
                assert_gathered(compiled(*given)[3], distributed.process_allgather(f(*given)[3]))
            with np.errstate(divide="raise"):
                assert_gathered(compiled(*given)[3], distributed.process_allgather(f(*given)[3]))


def compiled_functions_write_in_place() -> None:
    def f(x: Any, a: Any) -> Any:
        y = x * a + 1
        x *= y
        x[1:] = y[1:]
        return (x + y) / 3

    mine, its = tensor(), tensor()
    with mock.patch.object(groups, "LEAST", 0):
        assert_gathered(st.jit(f, executor="numpy")(mine, 0.5), distributed.process_allgather(f(its, 0.5)))
    assert_gathered(mine, distributed.process_allgather(its))


def a_kernel_that_one_process_does_not_run_makes_the_same_calls() -> None:
    refuses = mock.patch.object(FusedInProcesses, "__call__", return_value=False)
    first = distributed.process_index() == 0
    with mock.patch.object(groups, "LEAST", 0), refuses if first else contextlib.nullcontext():
        step = st.jit(lambda x, a: (x * a + 1) / 2, executor="numpy")
        for k in range(3):
            assert_gathered(step(tensor(), float(k)), (ROWS * k + 1) / 2)
            tensor().sum()


def stencils_exchange_halos() -> None:
    def steps(u: Any, a: Any) -> None:
        for _ in range(4):
            shifted(u, a)

    compiled, rows = st.jit(steps), np.arange(78.0).reshape(26, 3) ** 2
    mine, its = tensor(rows), tensor(rows)
    for _ in range(2):
        with st.transfers() as halos:
            compiled(mine, 0.5)
        with st.transfers() as slices:
            steps(its, 0.5)
        assert_gathered(mine, distributed.process_allgather(its))
        assert halos.bytes == 4 * 2 * (st.device_count() - 1) * 24 < slices.bytes  # A row from each neighbour.


def what_needs_one_array_is_an_error() -> None:
    x = tensor()
    unreduced = st.sum(x, axis=0, out_sharding=st.NamedSharding(everything(), st.P(unreduced={"x"})))
    if distributed.process_index() == 0:
        assert "unreduced" in repr(unreduced)
        with pytest.raises(st.NotAddressableError, match="partial sums"):
            np.asarray(unreduced)
    assert_gathered(unreduced + 0, ROWS.sum(axis=0))
    with pytest.raises(st.NotAddressableError, match="process_allgather"):
        pickle.dumps(x)
    with pytest.raises(st.NotAddressableError, match="process_allgather"):
        st.save(io.BytesIO(), x)
    with pytest.raises(st.InterchangeError, match=r"spans processes.*addressable_shards.*process_allgather"):
        np.from_dlpack(x)
    with pytest.raises(st.ArgumentError, match="shard: x spans processes"):
        st.shard(x)
    assert_gathered(x, ROWS)


def derivatives_in_a_direction_and_rules() -> None:
    @st.custom_vjp
    def by_vjp(x: Any) -> Any:
        return st.sin(x)

    by_vjp.defvjp(lambda x: (by_vjp(x), x), lambda x, g: (3 * st.cos(x) * g,))

    @st.custom_jvp
    def by_jvp(x: Any) -> Any:
        return st.sin(x)

    by_jvp.defjvps(lambda t, y, x: 3 * t * st.cos(x))
    x = st.device_put(ROWS / 10, st.NamedSharding(everything(), st.P("x")))
    wanted = 3 * (np.cos(ROWS / 10) * ROWS / 10 * 2 * (np.sin(ROWS / 10))).sum()
    for f in (by_vjp, by_jvp):

        def loss(x: Any, f: Any = f) -> Any:
            return (f(x) ** 2).sum()

        found = [(st.grad(loss)(x) * x).sum(), st.linearize(loss, x)[1](x), st.jvp(loss, (x,), (x,))[1]]
        found.append(st.jit(lambda x, loss=loss: st.jvp(loss, (x,), (x,))[1])(x))
        np.testing.assert_allclose([float(y) for y in found], wanted, rtol=1e-12)
    st.testing.check_grads(lambda x: st.sin(x) @ x.T, (x,), 2)
    with pytest.raises(AssertionError, match=r"check_grads: jvp of by_vjp: the tangent\[\d, \d\] is"):
        st.testing.check_grads(by_vjp, (x,), 1)


def local_tensors_concern_nobody_else() -> None:
    if distributed.process_index() == 0:  # The others do not call this.
        mesh = st.make_mesh((len(st.local_devices()),), ("x",), devices=st.local_devices())
        x = st.arange(10.0, device=mesh)
        x[2:4] += 1
        assert (x * 2).sum().item() == 94.0
        assert st.sort(x, descending=True).tolist()[0] == 9.0


def memory_is_counted_for_local_devices() -> None:
    own, count = st.local_devices(), st.device_count()
    st.reset_peak_memory()
    before = st.memory_info()
    assert set(own) <= set(before)
    assert not any(d in before for d in set(st.devices()) - set(own))
    w = tensor(np.ones((8 * count, 8)))
    layout, batch = st.NamedSharding(everything(), st.P()), tensor(np.ones((8 * count, 8 * count)))

    def layer(w: Any) -> Any:
        return st.tanh(batch @ st.reshard(w, layout))

    found = {d: m.bytes_in_use - before[d].bytes_in_use for d, m in st.memory_info().items()}
    assert [found[d] for d in own] == [8 * 8 * 8 + 8 * 8 * count * 8] * len(own)
    g = st.grad(lambda w: layer(w).sum())(w)
    again = st.grad(lambda w: st.remat(layer, policy=st.checkpoint_policies.dots_saveable)(w).sum())(w)
    assert g.sharding == again.sharding == w.sharding
    assert_gathered(again, distributed.process_allgather(g))
    st.reset_peak_memory(measure=False)


CHECKS = [
    devices_are_numbered_over_all_processes, a_tensor_knows_what_is_here, reads_of_what_is_elsewhere_are_errors,
    memory_is_a_share, tensors_are_made_of_parts, transfers_move_what_is_needed, replicas_are_sent_once,
    device_arrays_are_sent_from_pinned_memory, memory_of_transfers_is_limited, reductions_and_products,
    medians_where_a_process_has_no_lines, placed_reductions_take_one_exchange, algorithms_whose_parts_differ,
    meshes_may_leave_out_processes,
    views_and_writes, values_that_repeat_are_sent_once, random_numbers_do_not_depend_on_the_processes,
    writes_on_one_device_are_no_calls_of_all,
    maps_and_their_collectives, rows_of_any_numbers_are_exchanged, rows_that_do_not_fit_are_an_error_of_all, maps_in_maps, lists_are_of_this_process,
    lists_of_compiled_functions_have_an_item_for_each_device, maps_over_arrays_say_whose_devices_they_use, jit_has_the_bits_of_eager_mode,
    gradients_are_added_in_one_message, kernels_run_in_each_process, compiled_functions_write_in_place,
    a_kernel_that_one_process_does_not_run_makes_the_same_calls, stencils_exchange_halos,
    what_needs_one_array_is_an_error, what_differs_by_right_is_no_error, values_that_differ_are_errors, calls_that_differ_are_errors,
    derivatives_in_a_direction_and_rules, local_tensors_concern_nobody_else, memory_is_counted_for_local_devices,
]  # fmt: skip

if __name__ == "__main__":
    connect()
    for check in CHECKS:
        if not sys.argv[1:] or check.__name__ in sys.argv[1:]:
            check()
            print("passed", check.__name__)
    distributed.shutdown()
