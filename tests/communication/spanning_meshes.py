"""A program with tensors on meshes that leave out processes: ``spanning_meshes.py [CHECK...]``.

All processes make the same checks: also those that have no device of a mesh, and know only the layouts.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

import shardtensor as st
from shardtensor import distributed
from shardtensor.communication.between_processes.processes import JOB
from shardtensor.interpreters.jit.grouping import groups
from shardtensor.testing.layouts import all_specs, on_host
from tests.communication.connecting import connect

ROWS = np.arange(21.0).reshape(7, 3)


def mesh_of(*processes: int, names: tuple[str, ...] = ("x",), reverse: bool = False) -> st.Mesh:
    """A mesh of the devices of some processes, in two dimensions if there are two names."""
    devices = [d for k in processes for d in st.devices() if d.process_index == k]
    shape = (len(devices),) if len(names) == 1 else (len(processes), len(devices) // len(processes))
    return st.make_mesh(shape, names, devices=devices[::-1] if reverse else devices)


def first() -> st.Mesh:
    return mesh_of(0, 1)


def last() -> st.Mesh:
    n = distributed.process_count()
    return mesh_of(*range(n // 2, n)) if n > 3 else mesh_of(1, 2)


def put(array: Any, mesh: st.Mesh, *spec: Any, **options: Any) -> st.ShardedTensor:
    return st.device_put(array, st.NamedSharding(mesh, st.P(*spec), **options))


def is_here(mesh: st.Mesh) -> bool:
    return bool(mesh.local_devices)


def assert_is(x: st.ShardedTensor, wanted: Any, mesh: st.Mesh | None = None) -> None:
    """Asserts that all processes know the layout, that the shards are in the processes of the mesh, and their bits."""
    wanted = np.asarray(wanted)
    assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
    assert mesh is None or x.sharding.mesh == mesh
    assert [shard.device for shard in x.addressable_shards] == x.sharding.mesh.local_devices
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(on_host(shard.data, shard.device), wanted[shard.index])
    np.testing.assert_array_equal(distributed.process_allgather(x), wanted)


def sent(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and the bytes that all processes send to others in it."""
    job = JOB.agreement
    assert job is not None
    before = job.sent.copy()
    result = call()
    return result, int(distributed.process_allgather(np.int64(sum((job.sent - before).values()))).sum())


def lacking(x: st.ShardedTensor, target: st.NamedSharding) -> int:
    """The bytes of the elements that processes have to get: those of their devices in the target that none of their
    devices holds.
    """

    def held(sharding: st.NamedSharding) -> dict[int, Any]:
        has: dict[int, Any] = {}
        for device, index in sharding.devices_indices_map(x.shape).items():
            has.setdefault(device.process_index, np.zeros(x.shape, bool))[index] = True
        return has

    nothing, here = np.zeros(x.shape, bool), held(x.sharding)
    return sum(int(np.sum(want & ~here.get(k, nothing))) for k, want in held(target).items()) * x.itemsize


def meshes() -> list[st.Mesh]:
    """Meshes of all processes, of some, of one, and of parts of their devices."""
    n, devices = distributed.process_count(), st.devices()
    own = len(st.local_devices())
    made = [
        mesh_of(*range(n)),
        mesh_of(0, 1),
        mesh_of(0, 1, names=("x", "y")),
        mesh_of(n - 2, n - 1, reverse=True),
        mesh_of(0, n - 1),
        mesh_of(0),
        mesh_of(n - 1),
        st.make_mesh((2,), ("x",), devices=[devices[-1], devices[0]]),
        st.make_mesh((2,), ("x",), devices=[devices[own], devices[-1]] if n > 2 else [devices[0], devices[-1]]),
    ]
    return list(dict.fromkeys(made))


SHAPES = [(7, 3), (1, 5), (0, 3), (11,), ()]
"""Uneven shapes, and those of which shards are empty."""


def pairs() -> Iterator[tuple[np.ndarray, st.NamedSharding, st.NamedSharding]]:
    """Arrays and pairs of layouts, some of the products of all meshes and specs."""
    for number, ((a, b), shape) in enumerate(itertools.product(itertools.product(meshes(), repeat=2), SHAPES)):
        array = np.arange(math.prod(shape), dtype=["float64", "int16", "complex64"][number % 3]).reshape(shape)
        specs = [all_specs(mesh, array.ndim) for mesh in (a, b)]
        for k in range(2):
            one, other = (options[(number * (3 + k) + k) % len(options)] for options in specs)
            yield array, st.NamedSharding(a, one), st.NamedSharding(b, other)


def some_pairs(step: int = 1) -> Iterator[Any]:
    """Each of so many of the `pairs`, or fewer, as the environment says."""
    return itertools.islice(pairs(), 0, None, max(step, int(os.environ.get("SPANNING_STEP", "1"))))


def transfers_move_what_processes_lack() -> None:
    for number, (array, source, target) in enumerate(some_pairs()):
        x = st.device_put(array, source)
        way = [st.device_put, st.reshard, lambda x, s: x.to_device(s)][number % 3]
        y, found = sent(lambda x=x, way=way, target=target: way(x, target))
        assert found == lacking(x, target), (source, target, array.shape)
        assert y.sharding == target
        assert_is(y, array)
        assert_is(x, array)


def counted_bytes_are_those_of_devices() -> None:
    """A log has what devices with memories of their own would send, in each process the same."""
    for array, source, target in some_pairs(7):
        x = st.device_put(array, source)
        there, wanted = source.devices_indices_map(array.shape), 0
        for device, index in target.devices_indices_map(array.shape).items():
            need, has = np.zeros(array.shape, bool), np.zeros(array.shape, bool)
            need[index] = True
            if device in there:
                has[there[device]] = True
            wanted += int(np.sum(need & ~has)) * array.itemsize
        with st.transfers() as log:
            st.device_put(x, target)
        assert log.bytes == wanted, (source, target, array.shape)
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError):  # In all processes.
        put(ROWS, first(), "x") + put(ROWS, last(), "x")


def moved_and_doubled(x: Any, target: st.NamedSharding) -> Any:
    return st.device_put(x, target) * 2


def simulated_bytes_are_those_that_are_sent() -> None:
    n, own = distributed.process_count(), len(st.local_devices())
    whole = st.AbstractMesh((n * own,), ("x",), processes=n)
    known = dict(zip(st.devices(), whole.flat, strict=True))

    def abstract(s: st.NamedSharding) -> st.NamedSharding:
        devices = np.array([known[d] for d in s.mesh.flat], object).reshape(s.mesh.axis_sizes)
        return st.NamedSharding(st.Mesh(devices, s.mesh.axis_names), s.spec)

    for array, source, target in some_pairs(5):
        x = st.empty(array.shape, dtype=array.dtype, device=abstract(source))
        report = st.simulate(moved_and_doubled, x, abstract(target), mesh=whole)
        y, found = sent(functools.partial(moved_and_doubled, st.device_put(array, source), target))
        assert int(report.process_bytes().sum()) == found, (source, target, array.shape)
        assert_is(y, array * 2)


def what_is_elsewhere_cannot_be_read() -> None:
    for mesh in (first(), last(), mesh_of(1)):
        x = put(ROWS, mesh)
        total, here = x.sum(), is_here(mesh)
        assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes, len(x)) == ((7, 3), np.float64, 2, 21, 168, 7)
        assert x.sharding == st.NamedSharding(mesh, st.P())
        assert x.is_fully_replicated
        assert x.is_fully_addressable == ({*mesh.flat} <= {*st.local_devices()})
        assert len(x.addressable_shards) == len(mesh.local_devices)
        assert repr(x).startswith("ShardedTensor(")
        assert str(x[1:])
        reads: dict[str, Callable[[], Any]] = {
            "float": lambda t=total: float(t), "bool": lambda t=total: bool(t), "item": total.item,
            "asarray": lambda x=x: np.asarray(x), "tolist": x.tolist,
        }  # fmt: skip
        for name, read in reads.items():
            if here:
                found, wanted = read(), {"bool": True, "asarray": ROWS, "tolist": ROWS}.get(name, ROWS.sum())
                np.testing.assert_array_equal(found, wanted)
                continue
            with pytest.raises(
                st.NotAddressableError, match=f"^{name}: .*process_allgather.*gather_to.*addressable_sh"
            ):
                read()
        np.testing.assert_array_equal(distributed.process_allgather(x), ROWS)
        for root in range(distributed.process_count()):
            found = distributed.gather_to(x[1:], root)
            assert np.array_equal(found, ROWS[1:]) if distributed.process_index() == root else found is None
    # Each process has a tensor of its own.
    k, n = distributed.process_index(), distributed.process_count()
    own = st.device_put(np.arange(3.0) + k, st.local_devices()[0])
    np.testing.assert_array_equal(distributed.process_allgather(own), np.arange(3.0) + np.arange(n)[:, None])
    found = distributed.gather_to(own, 0)
    assert found is None if k else found.tolist() == [0, 1, 2]


def operators_run_where_the_shards_are() -> None:
    for mesh in (first(), last(), mesh_of(1)):
        x, y = put(ROWS, mesh, "x"), put(ROWS + 1, mesh, None, "x")
        assert_is(x + y, ROWS * 2 + 1, mesh)
        assert_is(st.square(x).sum(axis=0), (ROWS * ROWS).sum(axis=0), mesh)
        assert_is(x.T @ y, ROWS.T @ (ROWS + 1), mesh)
        assert_is(x[1:6:2].T, ROWS[1:6:2].T, mesh)
        assert_is(st.sort(x, axis=0, descending=True), ROWS[::-1], mesh)
        assert_is(np.concatenate([x, y]), np.concatenate([ROWS, ROWS + 1]), mesh)
        assert_is(x[np.array([6, 0, 3])], ROWS[[6, 0, 3]], mesh)
        assert_is(st.cumulative_sum(x, axis=0), ROWS.cumsum(axis=0), mesh)
        assert_is(st.argmax(x, axis=1), ROWS.argmax(axis=1), mesh)
        assert_is(st.vmap(lambda r: r / r.sum())(x + 1), (ROWS + 1) / (ROWS + 1).sum(axis=1, keepdims=True), mesh)
        x[2:5] = 0
        x[:, 1] += 1
        x[x > 17] = -1
        wanted = ROWS.copy()
        wanted[2:5] = 0
        wanted[:, 1] += 1
        wanted[wanted > 17] = -1
        assert_is(x, wanted, mesh)
        np.multiply(x, 2, out=y)
        assert_is(y, wanted * 2, mesh)
        drawn = st.random.normal(st.random.key(3), (9,), device=st.NamedSharding(mesh, st.P("x")))
        everywhere = st.random.normal(st.random.key(3), (9,), device=st.NamedSharding(everything(), st.P()))
        assert_is(drawn, np.asarray(everywhere), mesh)


def shapes_that_follow_from_elements() -> None:
    """All processes learn them of tensors of several processes; of one, only that process knows them."""
    calls: list[Callable[[Any, Any], Any]] = [
        lambda xp, a: xp.nonzero(a > 4)[0], lambda xp, a: a[a > 4], lambda xp, a: xp.unique(a // 2),
    ]  # fmt: skip
    for call in calls:
        assert_is(call(st, put(ROWS, first(), "x")), call(np, ROWS))
    x = put(ROWS, mesh_of(1), "x")
    for call in calls:
        if is_here(mesh_of(1)):
            result = call(st, x)
        else:
            with pytest.raises(st.NotAddressableError, match=r"what process 1 computes.*st\.empty.*several processes"):
                call(st, x)
            result = st.empty(call(np, ROWS).shape, dtype=call(np, ROWS).dtype, device=x.sharding.mesh)
        assert_is(st.device_put(result, st.NamedSharding(first(), st.P("x"))), call(np, ROWS))


def operands_on_other_meshes_are_transferred() -> None:
    a, b, alone = put(ROWS, first(), "x"), put(ROWS + 1, last(), None, "x"), put(ROWS[0], mesh_of(1))
    assert_is(a + b, ROWS * 2 + 1, first())
    assert_is(b - a, ROWS * 0 + 1, last())
    assert_is(a.T @ b, ROWS.T @ (ROWS + 1))
    assert_is(a * alone, ROWS * ROWS[0], first())
    assert_is(st.where(b > 5, b, alone), np.where(ROWS + 1 > 5, ROWS + 1, ROWS[0]), last())
    assert_is(st.concat([a, b]), np.concatenate([ROWS, ROWS + 1]))
    assert_is(st.stack([alone, b[0]]), np.stack([ROWS[0], ROWS[0] + 1]))
    wanted = ROWS.copy()
    a[1:4], wanted[1:4] = b[2:5], (ROWS + 1)[2:5]
    assert_is(a, wanted, first())
    a += b
    assert_is(a, wanted + ROWS + 1, first())
    scalar = put(np.float64(3), mesh_of(distributed.process_count() - 1))
    assert_is(a * scalar, (wanted + ROWS + 1) * 3, first())


def layouts_of_partial_sums() -> None:
    for a, b in itertools.permutations([first(), last(), mesh_of(1), mesh_of(*range(distributed.process_count()))], 2):
        x = st.reshard(put(ROWS, a), st.NamedSharding(a, st.P(unreduced={"x"})))
        assert_is(st.device_put(x, st.NamedSharding(b, st.P("x"))), ROWS, b)
        y = st.reshard(put(ROWS, a, "x"), st.NamedSharding(b, st.P(unreduced={"x"})))
        assert y.sharding.spec.unreduced == {"x"}
        assert_is(st.reshard(y, st.NamedSharding(a, st.P(None, "x"))), ROWS, a)


def trees_memory_kinds_and_donation() -> None:
    tree = {"w": [put(ROWS, first(), "x"), None], "b": put(ROWS[0], first())}
    there = st.NamedSharding(last(), st.P())
    moved = st.device_put(tree, there)
    assert_is(moved["w"][0], ROWS, last())
    assert_is(moved["b"], ROWS[0], last())
    assert moved["w"][1] is None
    moved = st.device_put(tree, {"w": st.NamedSharding(mesh_of(1), st.P("x")), "b": there})
    assert_is(moved["w"][0], ROWS, mesh_of(1))
    moved = st.device_put(tree["w"][0], there, donate=True)
    assert_is(moved, ROWS, last())
    with pytest.raises(st.DonatedError):
        tree["w"][0] + 1
    hosted = put(ROWS, first(), "x", memory_kind="pinned_host")
    there = st.NamedSharding(last(), st.P(None, "x"), memory_kind="pinned_host")
    moved = st.device_put(hosted, there)
    assert moved.sharding.memory_kind == "pinned_host"
    assert_is(moved, ROWS, last())
    assert_is(st.device_put(moved, st.NamedSharding(first(), st.P("x"))) + 1, ROWS + 1, first())


def several_in_a_row_among_other_calls() -> None:
    """The calls of the processes of other meshes are in between, and all processes agree on the order."""
    x = wanted = None
    ways = [first(), mesh_of(1), last(), mesh_of(*range(distributed.process_count())), mesh_of(0), last()]
    x, wanted = put(ROWS, ways[0], "x"), ROWS
    for mesh in [*ways, *ways[::-1]]:
        other = put(ROWS, first(), "x")
        x = st.device_put(x, st.NamedSharding(mesh, st.P("x"))) * 2
        wanted = wanted * 2
        total, mean = other.sum(), st.mean(put(ROWS, last(), "x"), axis=0)
        distributed.sync_global_devices("between")
        x, wanted = x + 1, wanted + 1
        assert_is(total, ROWS.sum(), first())
        assert_is(mean, ROWS.mean(axis=0), last())
    assert_is(x, wanted, ways[0])


def compiled_functions_on_the_devices_of_one_process() -> None:
    """The processes without a device of the mesh call the kernels, too, and compute nothing."""

    def f(x: Any) -> Any:
        x[1:] = x[1:] + 1
        return (x * 2 + 1) / 4

    for mesh in (mesh_of(0), mesh_of(1)):
        for executor in (None, "numpy"):
            with mock.patch.object(groups, "LEAST", 0):
                compiled, x = st.jit(f, executor=executor), put(ROWS, mesh, "x")
                for k in range(3):
                    wanted = np.vstack([ROWS[:1], ROWS[1:] + k + 1])
                    assert_is(compiled(x), (wanted * 2 + 1) / 4, mesh)
                    assert_is(x, wanted, mesh)


def loops_and_branches() -> None:
    for mesh in (first(), last()):
        x = put(ROWS, mesh, "x")

        def doubled(x: Any) -> Any:
            return st.while_loop(lambda c: c.sum() < 2000, lambda c: c * 2, x)

        def chosen(x: Any) -> Any:
            return st.cond(x.sum() > 3, lambda x: x + 1, lambda x: -x, x)

        def counted(x: Any) -> Any:
            return st.fori_loop(0, st.astype(x[1, 0], "int64"), lambda i, c: c + i, x)

        for call, wanted in ((doubled, ROWS * 16), (chosen, ROWS + 1), (counted, ROWS + 3)):
            assert_is(call(x), wanted, mesh)
            assert_is(st.jit(call)(x), wanted, mesh)
        rows = st.scan(lambda c, row: (c + row, c.sum()), st.zeros(3, device=mesh), x)[0]
        assert_is(rows, ROWS.sum(axis=0))
    x = put(ROWS, mesh_of(1), "x")
    if is_here(mesh_of(1)):
        assert_is_local = st.while_loop(lambda c: c.sum() < 2000, lambda c: c * 2, x)
        np.testing.assert_array_equal(assert_is_local, ROWS * 16)
    else:
        with pytest.raises(st.NotAddressableError, match="bool: this process does not hold"):
            st.while_loop(lambda c: c.sum() < 2000, lambda c: c * 2, x)


class Two(NamedTuple):
    """A pytree that other processes can make."""

    a: Any
    b: Any


def maps_run_in_the_processes_of_their_devices() -> None:
    for mesh in (everything(), first(), last(), mesh_of(0, distributed.process_count() - 1)):
        x, called, split = put(ROWS, mesh, "x"), [], functools.partial(st.shard_map, mesh=mesh, in_specs=st.P("x"))

        def total(rows: Any, called: list[Any] = called) -> Any:
            called.append(st.axis_index("x"))
            return st.psum(rows.sum(axis=0), "x")

        assert_is(split(total, out_specs=st.P())(x), ROWS.sum(axis=0), mesh)
        assert sorted(called) == [mesh.flat.index(d) for d in mesh.local_devices]
        assert_is(split(lambda r: st.all_gather(r, "x", tiled=True) + 1, out_specs=st.P())(x), ROWS + 1, mesh)
        turned = split(lambda r: st.ppermute(r.sum(axis=0, keepdims=True), "x", [(0, 1)]), out_specs=st.P("x"))(x)
        assert_is(turned[1], ROWS[x.sharding.devices_indices_map(x.shape)[mesh.flat[0]]].sum(axis=0))
        assert_is(st.jit(split(total, out_specs=st.P()))(x), ROWS.sum(axis=0), mesh)
        tree = split(lambda r: {"b": [r, (r + 1, 3.0)], 2: Two(r * 2, [])} if r is None else Two([r], {"k": (r * 2,)}),
                     out_specs=st.P("x"))(x)  # fmt: skip
        assert type(tree) is Two
        assert_is(tree.b["k"][0], ROWS * 2, mesh)
        parts = st.pmap(lambda r: r.sum(), st.shard(x, devices=mesh.flat))
        assert [part.sharding.mesh.flat for part in parts] == [(d,) for d in mesh.flat]
        assert float(st.device_put(st.stack(parts).sum(), st.NamedSharding(everything(), st.P()))) == 210
        assert_is(st.vmap(split(total, out_specs=st.P()), in_axes=2)(st.stack([x, x * 2], axis=2)),
                  np.stack([ROWS.sum(axis=0), 2 * ROWS.sum(axis=0)]))  # fmt: skip


def everything() -> st.Mesh:
    return mesh_of(*range(distributed.process_count()))


def maps_that_other_processes_cannot_know() -> None:
    mesh = first()
    if not is_here(mesh_of(1)):
        with pytest.raises(st.NotAddressableError, match=r"^shard_map: .* process 1 computes.*st\.empty"):
            st.shard_map(lambda r: r, mesh=mesh_of(1), in_specs=st.P("x"), out_specs=st.P("x"))(
                put(ROWS, mesh_of(1), "x")
            )
    if len(st.local_devices()) > 1:  # A call has devices of both processes.
        rows = st.make_mesh(
            (2, mesh.size // 2), ("x", "y"), devices=np.array(mesh.flat).reshape(2, -1).T.ravel().tolist()
        )
        with pytest.raises(st.BackendError, match=r"a call of the function has devices of 2 of (3|4)"):
            st.shard_map(lambda r: r, mesh=rows, in_specs=st.P("x"), out_specs=st.P("x"), axis_names={"x"})(
                put(ROWS, rows)
            )


def gradients() -> None:
    """The derivative of a transfer is the transfer back, also where a map is on one of the sides."""
    n = distributed.process_count()
    w, v = np.arange(9.0).reshape(3, 3) / 9, np.arange(6.0).reshape(3, 2) / 6

    def two_stages(a: st.Mesh, b: st.Mesh, mapped: bool, w: Any, v: Any, x: Any) -> Any:
        h = st.tanh(st.device_put(x, st.NamedSharding(a, st.P("x"))) @ w)
        h = st.device_put(h, st.NamedSharding(b, st.P("x")))
        if not mapped:
            return ((h @ v) ** 2).sum()
        stage = st.shard_map(
            lambda v, h: st.psum(((h @ v) ** 2).sum(), "x"), mesh=b, in_specs=(st.P(), st.P("x")), out_specs=st.P()
        )
        return stage(v, h)

    h = np.tanh(ROWS / 9 @ w)
    gv = 2 * h.T @ (h @ v)
    gw = (ROWS / 9).T @ ((2 * (h @ v) @ v.T) * (1 - h * h))
    for a, b in [
        (first(), last()),
        (last(), first()),
        (mesh_of(0), last()),
        (mesh_of(0), mesh_of(n - 1)),
        (everything(), mesh_of(1)),
    ]:
        for mapped in [False, True] if {d.process_index for d in b.flat} > {1} and b.size > 1 else [False]:
            loss = functools.partial(two_stages, a, b, mapped)
            for grad in (st.grad(loss, argnums=(0, 1)), st.jit(st.grad(loss, argnums=(0, 1)))):
                found = grad(put(w, a), put(v, b), ROWS / 9)
                for g, wanted, mesh in zip(found, (gw, gv), (a, b), strict=True):
                    assert g.sharding == st.NamedSharding(mesh, st.P())
                    np.testing.assert_allclose(distributed.process_allgather(g), wanted, rtol=1e-12)
            tangent = st.jvp(loss, (put(w, a), put(v, b), ROWS / 9), (put(w * 0 + 1, a), put(v * 0, b), ROWS * 0))[1]
            np.testing.assert_allclose(distributed.process_allgather(tangent), gw.sum(), rtol=1e-12)


def compiled_functions_may_have_several_meshes() -> None:
    @st.jit
    def step(x: Any) -> Any:
        y = st.device_put(x * 2, st.NamedSharding(last(), st.P(None, "x"))) + 1
        return y, st.reshard(y, st.NamedSharding(first(), st.P("x"))) - x, y.sum()

    for _ in range(2):
        y, z, total = step(put(ROWS, first(), "x"))
        assert_is(y, ROWS * 2 + 1, last())
        assert_is(z, ROWS + 1, first())
        assert_is(total, (ROWS * 2 + 1).sum(), last())


def files_have_all_elements() -> None:
    folder = distributed.broadcast_one_to_all(np.frombuffer(tempfile.mkdtemp().encode().ljust(200), np.uint8))
    path = Path(bytes(folder).decode().strip())
    n = distributed.process_count()
    tree = {
        "first": put(ROWS, first(), "x"), "last": put(ROWS + 1, last()), "one": put(ROWS + 2, mesh_of(1), "x"),
        "end": put(ROWS + 3, mesh_of(n - 1)), "all": put(ROWS + 4, everything(), "x"),
        "own": st.device_put(ROWS + 5, st.local_devices()[0]),
    }  # fmt: skip
    st.checkpoint.save(path / "tree", tree)
    restored = st.checkpoint.restore(path / "tree", like=tree)
    for k, name in enumerate(["first", "last", "one", "end", "all"]):
        assert restored[name].sharding == tree[name].sharding
        assert_is(restored[name], ROWS + k)
    np.testing.assert_array_equal(restored["own"], ROWS + 5)
    everywhere = st.checkpoint.restore(path / "tree", device=st.NamedSharding(everything(), st.P("x")))
    assert_is(everywhere["one"], ROWS + 2, everything())
    assert_is(st.checkpoint.restore(path / "tree")["end"], ROWS + 3)
    st.save(path / "first.npy", tree["first"])
    np.testing.assert_array_equal(np.load(path / "first.npy"), ROWS)
    distributed.sync_global_devices("read")
    if is_here(mesh_of(1)):
        st.save(path / "one.npy", tree["one"])
    else:
        with pytest.raises(st.NotAddressableError, match="does not hold all elements"):
            st.save(path / "one.npy", tree["one"])
    x = st.load(path / "first.npy", device=st.NamedSharding(last(), st.P("x")))
    assert_is(x, ROWS, last())


def tensors_of_parts() -> None:
    for mesh in (first(), last(), mesh_of(1)):
        rows = st.NamedSharding(mesh, st.P("x"))
        indices = {d: i for d, i in rows.devices_indices_map((7, 3)).items() if d in st.local_devices()}
        made = distributed.make_array_from_callback((7, 3), rows, lambda index: ROWS[index], dtype=ROWS.dtype)
        assert_is(made, ROWS, mesh)
        own = [st.device_put(ROWS[i], d) for d, i in indices.items()]
        make = distributed.make_array_from_single_device_arrays
        assert_is(make((7, 3), rows, own, dtype=ROWS.dtype), ROWS, mesh)
        begins = [i[0].start for i in indices.values()]
        part = ROWS[min(begins) : max(i[0].stop for i in indices.values())] if indices else ROWS[:0]
        for shape in ((7, 3), None):
            if shape is None and mesh == mesh_of(1) and not indices:
                with pytest.raises(st.ArgumentError, match=r"all devices .* in another process; give global_shape"):
                    distributed.make_array_from_process_local_data(rows, part)
                continue
            made = distributed.make_array_from_process_local_data(rows, part, shape)
            if shape is not None or mesh != mesh_of(1):
                assert_is(made, ROWS, mesh)
        if not indices and mesh == mesh_of(1):
            for call in (make, distributed.make_array_from_callback):
                with pytest.raises(st.ArgumentError, match="no device of the sharding is in this process; give dtype"):
                    call((7, 3), rows, [])


CHECKS = [
    transfers_move_what_processes_lack, counted_bytes_are_those_of_devices, simulated_bytes_are_those_that_are_sent,
    what_is_elsewhere_cannot_be_read, operators_run_where_the_shards_are, shapes_that_follow_from_elements,
    operands_on_other_meshes_are_transferred, layouts_of_partial_sums, trees_memory_kinds_and_donation,
    several_in_a_row_among_other_calls, compiled_functions_on_the_devices_of_one_process, loops_and_branches, maps_run_in_the_processes_of_their_devices,
    maps_that_other_processes_cannot_know, gradients, compiled_functions_may_have_several_meshes,
    files_have_all_elements, tensors_of_parts,
]  # fmt: skip

if __name__ == "__main__":
    connect()
    for check in CHECKS:
        if not sys.argv[1:] or check.__name__ in sys.argv[1:]:
            check()
            print("passed", check.__name__)
    distributed.shutdown()
