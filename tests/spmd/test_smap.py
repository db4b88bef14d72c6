"""pmap and smap: any Python function on every device."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import re
import threading
import time
import tracemalloc
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend.registry import backend_of
from shardtensor.host import threads
from shardtensor.spmd.maps.smap import even_factors
from tests.draws import drawn
from tests.layouts import READ_ONLY, USABLE, array, assert_same, everywhere, in_use, mesh_of, place_of, shapes


def row(backend: str, count: int = 4) -> list[st.Device]:
    return st.devices(backend)[:count]


def test_results_stay_and_chains_move_nothing(backend: str) -> None:
    value = array((10, 3), "float64", 1)
    parts = st.shard(value, devices=row(backend))
    with st.transfers() as log, st.transfer_guard("disallow"):
        made = st.pmap(lambda x: x.sum(axis=0), st.pmap(lambda x: x * 2, parts))
    assert log.bytes == 0
    assert [m.device for m in made] == row(backend)
    assert_same(st.stack(made), np.stack([p.sum(axis=0) * 2 for p in np.array_split(value, 4)]))


def test_numpy_backend_copies_nothing_either() -> None:
    parts = st.shard(np.arange(10.0), devices=row("numpy"))
    with st.transfers() as log:
        made = st.pmap(lambda x: (x, x[1:], x * 2, (x * 2).reshape(-1, 1)), parts)
        whole = st.unshard([m[0] for m in made])
    assert (log.bytes, log.copied) == (0, 0)
    assert np.shares_memory(np.asarray(whole), np.asarray(parts[0]))


def test_host_items_are_distributed_in_blocks(backend: str) -> None:
    devices = row(backend)
    made = st.pmap(lambda i: st.full((2,), i), list(range(10)), devices=devices)
    assert [m.device for m in made] == [devices[k] for k, n in enumerate([3, 3, 2, 2]) for _ in range(n)]
    with st.transfers() as log:
        x = st.stack(made)
    assert log.bytes == 0
    assert_same(x, np.stack([np.full((2,), i) for i in range(10)]))
    with st.use_mesh(mesh_of((2,), backend)) as mesh:
        made = st.pmap(lambda x: x + 1, [np.zeros(2), np.ones(2), np.ones(2)])
    assert [m.device for m in made] == [mesh.flat[0], mesh.flat[0], mesh.flat[1]]


@everywhere
def test_tensors_stay_on_their_devices_and_others_are_transferred(backend: str) -> None:
    d = st.devices(backend)
    first = [st.ones((2,), device=d[5]), 3.0, st.ones((2,), device=d[1])]
    second = [st.ones((2,), device=d[0]), st.ones((2,), device=d[6]), np.ones(2)]
    with st.transfers() as log:
        made = st.pmap(lambda a, b: a + b, first, second)
    assert [m.device for m in made] == [d[5], d[6], d[1]]
    assert sorted((str(r.source), str(r.destination)) for r in log if r.bytes) == sorted(
        [(f"{backend}:0", f"{backend}:5"), ("host", f"{backend}:1")]
    )
    made = st.pmap(lambda a, b: a + b, first, second, devices=[d[7]])
    assert {m.device for m in made} == {d[7]}


def test_whole_arguments_are_sent_to_each_device_once(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    w = st.ones((6,), dtype="float32", device=mesh)
    items = [float(i) for i in range(8)]
    with st.transfers() as log:
        made = st.pmap(
            lambda x, w, extra: x * w.sum() + extra["bias"], items, w, {"bias": 1.0, "name": "b"}, devices=mesh
        )
    assert log.bytes == 4 * 24 - 24  # each device has its own part already
    assert [m.item() for m in made] == [6.0 * i + 1 for i in items]


def test_pytrees_shapes_dtypes_and_other_leaves(backend: str) -> None:
    pair = namedtuple("pair", "a b")
    items = [{"x": np.full(n, n, "float32"), "k": [n, "s"]} for n in (1, 3, 0)]

    def fn(item: Any) -> Any:
        assert item["k"][1] == "s"
        return pair((item["x"], st.astype(item["x"], "int32" if item["k"][0] > 1 else "float64")), [None, item["k"][0]])

    made = st.pmap(fn, items, devices=row(backend))
    for m, n in zip(made, (1, 3, 0), strict=True):
        assert type(m) is pair
        assert m.b == [None, n]
        assert_same(m.a[0], np.full(n, n, "float32"))
        assert m.a[1].dtype == np.dtype("int32" if n > 1 else "float64")


def test_text_and_objects_are_leaves_like_any_other(backend: str) -> None:
    names, things = np.array(["a", "b"]), np.array([None, {}], dtype=object)
    made = st.pmap(lambda n, t: (n, t, t), [names], {"t": things}, devices=row(backend))
    assert made[0][0] is names
    assert made[0][1]["t"] is made[0][2]["t"] is things


@everywhere
def test_functions_of_the_library_run_on_the_device(backend: str) -> None:
    seen: list[st.Device | None] = []

    def fn(x: Any) -> Any:
        seen.append(st.backend.current_device())
        assert not isinstance(x, st.ShardedTensor)
        y = st.exp(x) + st.arange(3, dtype="float64") + st.full_like(x, 2) + st.eye(3)[1] + st.asarray([1.0, 2.0, 3.0])
        y = st.concat([y, st.zeros(1)]) @ st.ones((4, 2))
        y = st.where(y > 0, st.reshape(y, (1, -1)), 0)
        z = st.stack([st.flip(y), st.roll(y, 1), st.broadcast_to(st.sum(y), y.shape)])
        assert not isinstance(z, st.ShardedTensor)
        return (
            st.clip(st.moveaxis(st.squeeze(z), 0, 1), None, 50.0),
            st.astype(st.mean(z), "float32"),
            st.result_type(z, 1),
        )

    value = array((4, 3), "float64", 1)
    with st.set_num_threads(1):  # which begins one after the other
        (made, mean, kind) = zip(*st.pmap(lambda x: fn(x[0]), st.shard(value, devices=row(backend))), strict=True)
    assert seen == row(backend)
    assert st.backend.current_device() is None
    for v, m, a, k in zip(value, made, mean, kind, strict=True):
        y = np.exp(v) + np.arange(3) + 2 + np.eye(3)[1] + [1, 2, 3]
        y = np.concatenate([y, [0]]) @ np.ones((4, 2))
        y = np.where(y > 0, y.reshape(1, -1), 0)
        z = np.stack([np.flip(y), np.roll(y, 1), np.broadcast_to(y.sum(), y.shape)])
        assert_same(m, np.clip(np.moveaxis(z.squeeze(), 0, 1), None, 50.0))
        assert_same(a, np.float32(z.mean()))
        assert k == np.dtype("float64")


def test_tensors_of_enclosing_scopes_in_a_mapped_function(backend: str) -> None:
    w = st.ones((4,), device=mesh_of((2,), backend))
    made = st.pmap(lambda x: (w + 1, st.zeros((2,), device=w.device)), [1, 2], devices=row(backend))
    for a, b in made:
        assert_same(a, np.full(4, 2.0))
        assert a.device == b.device == w.device


@pytest.mark.parametrize("backend", READ_ONLY)
def test_shards_are_read_only_where_that_can_be_enforced(backend: str) -> None:
    value = array((8,), "float64", 1)

    def fn(x: Any) -> None:
        x[0] = 5

    for run in (
        lambda: st.pmap(fn, st.shard(value, devices=row(backend))),
        lambda: st.smap(fn, value, devices=row(backend)),
        lambda: st.pmap(lambda x: st.pmap(fn, x), value.reshape(4, 1, 2), devices=row(backend)),
    ):
        with pytest.raises(ValueError, match="read-only") as caught:
            run()
        (note,) = [note for note in caught.value.__notes__ if "read-only" in note]
        assert "x = x.copy()" in note
        assert "donate=True" in note


def test_other_errors_about_read_only_objects_have_no_note_about_arguments() -> None:
    """NumPy's are ValueErrors."""

    def fn(x: Any) -> None:
        raise TypeError("the attribute is read-only")

    with pytest.raises(TypeError, match="read-only") as caught:
        st.pmap(fn, st.shard(np.zeros(4), devices=row("numpy")))
    assert len(caught.value.__notes__) == 1


def test_keys_are_not_split() -> None:
    devices, key = row("numpy"), st.random.key(0)
    mesh, x = st.Mesh(devices, ("i",)), np.zeros(8)
    fold_in = r"st\.random\.fold_in\(key, st\.axis_index\(name\)\).*st\.pmap\(f, st\.random\.split"
    for run in (
        lambda: st.shard_map(print, mesh=mesh, in_specs=st.P("i"), out_specs=st.P("i"))(x, st.random.split(key, 4)),
        lambda: st.shard_map(print, mesh=mesh, in_specs=st.P(), out_specs=st.P())(x, key),
        lambda: st.pmap(print, devices=devices)(x, key),
        lambda: st.smap(print, x, key, devices=devices),
        lambda: st.smap(print, x, st.random.split(key, 8), devices=devices),
    ):
        with pytest.raises(st.ArgumentTypeError, match=rf"argument 1.* is a Key, which has no elements.*{fold_in}"):
            run()


@everywhere
def test_results_with_other_references_are_copied(backend: str) -> None:
    kept: list[Any] = []

    def fn(x: Any) -> Any:
        y = x + 1
        kept.append(y)
        return y, y

    made = st.pmap(fn, st.shard(np.arange(4.0), devices=row(backend, 2)))
    with backend_of(row(backend)[0]).on(row(backend)[0]):
        kept[0][...] = 99
    for first, second in made[:1]:
        assert_same(first, np.array([1.0, 2.0]))
        assert_same(second, np.array([1.0, 2.0]))


def test_a_callers_array_never_becomes_a_tensors_memory() -> None:
    mine = np.zeros(3)
    frozen = mine.view()
    frozen.flags.writeable = False
    made = st.pmap(
        lambda i: (mine, mine[1:], frozen, memoryview(mine)[:1] and np.frombuffer(mine)), [0], devices=row("numpy")
    )
    mine[:] = 7
    for result in made[0]:
        assert not np.asarray(result).any()


@everywhere
def test_donation(backend: str) -> None:
    def fn(x: Any) -> Any:
        x += 1
        return x

    own = [st.device_put(np.zeros(3), d) for d in row(backend)]
    shared = st.shard(np.zeros(8), devices=row(backend))
    for items in (own, shared):
        made = st.pmap(fn, items, donate=True)
        for m in made:
            assert not (np.asarray(m) != 1).any()
        for x in items:
            assert x.is_donated
            for use in (
                lambda x=x: x + 1,
                lambda x=x: np.asarray(x),
                lambda x=x: x.block_until_ready(),
                lambda x=x: st.pmap(fn, [x]),
            ):
                with pytest.raises(st.DonatedError, match="pmap"):
                    use()
            assert "donated" in repr(x)


@everywhere
def test_a_tensor_is_donated_once(backend: str) -> None:
    """Otherwise the first of its calls would have lost it when the error is raised."""
    x, y = [st.device_put(np.zeros(4), d) for d in row(backend)[:2]]
    calls = [
        ([x, x],),
        ([x, y], [y, x]),
        ([x, y], [x[:2], y]),
        ([y[1:], y],),
        ([{"a": x}, {"a": (y, x.reshape(2, 2))}],),
        ([x, y], x),
        ([x, y], {"a": y[1:]}),
    ]
    for given in calls:
        with pytest.raises(st.ArgumentError, match=r"pmap: donate=True .* is (the same tensor as|a view of) lists\["):
            st.pmap(lambda *given: None, *given, donate=True)
        assert not x.is_donated
        assert not y.is_donated
    made = st.pmap(lambda a, b: a.sum() + b, [x[:2], x[2:]], y[0], donate=True)
    assert [float(m) for m in made] == [0, 0]
    assert_same(x, np.zeros(4))


@pytest.mark.parametrize("backend", ["numpy", "cupy", "torch"], indirect=True)
def test_donated_memory_is_used_in_place(backend: str) -> None:
    """The checked backend copies every result."""
    item = st.device_put(np.zeros(1000), row(backend)[0])
    address = place_of(item.addressable_shards[0].data)

    def fn(x: Any) -> Any:
        x += 1
        return x

    with st.transfers() as log:
        (made,) = st.pmap(fn, [item], donate=True)
    assert log.copied == 0
    assert place_of(made.addressable_shards[0].data) == address
    assert_same(made, np.ones(1000))


@everywhere
def test_donating_a_view_leaves_the_others_alone(backend: str) -> None:
    x = st.device_put(np.zeros(8), mesh_of((4,), backend))
    parts = st.shard(x, devices=x.device)

    def fn(x: Any) -> None:
        x += 1

    st.pmap(fn, parts, donate=True)
    assert_same(x, np.zeros(8))


@everywhere
def test_errors_are_raised_unchanged_with_a_note(backend: str) -> None:
    ran: list[int] = []

    class Mine(Exception):
        pass

    def fn(i: int) -> None:
        ran.append(i)
        if i >= 2:
            raise Mine(f"item {i}")

    with pytest.raises(Mine, match="item 2") as caught:
        st.pmap(fn, list(range(8)), devices=row(backend))
    assert caught.value.__notes__ == [f"pmap: raised for shard 2 on {backend}:1"]
    assert ran == [0, 1, 2]
    assert caught.value.__context__ is None
    assert st.backend.current_device() is None


def test_of_several_errors_the_first_shards_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    together = threading.Barrier(2)

    def fn(i: int) -> int:
        if i == 0:
            time.sleep(0.002)
            return 0
        together.wait(5)
        if i == 1:
            time.sleep(0.02)
        raise ValueError(f"item {i}")

    with pytest.raises(ValueError, match="item 1"):
        st.pmap(fn, list(range(3)), devices=row("numpy"))


def test_programs_not_started_when_a_shard_failed_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    ran: list[int] = []

    def fn(i: int) -> None:
        ran.append(i)
        time.sleep(0.002)
        if i == 3:
            raise ValueError("item 3")

    with pytest.raises(ValueError, match="item 3"):
        st.pmap(fn, list(range(40)), devices=row("numpy"))
    assert len(ran) < 10


def test_long_work_runs_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    workers = set()

    def fn(i: int) -> int:
        workers.add(threading.get_ident())
        time.sleep(0.02)
        with np.errstate(divide="raise"):
            return i

    with np.errstate(divide="ignore"):
        assert st.pmap(fn, list(range(6)), devices=row("numpy")) == list(range(6))
    assert len(workers) == 2


def test_helpers_see_the_callers_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)

    def fn(i: int) -> Any:
        time.sleep(0.005)
        return st.backend.current_device(), np.geterr()["over"], np.float32(3e38) * np.float32(10)

    with np.errstate(over="ignore"):
        made = st.pmap(fn, list(range(6)), devices=row("numpy", 3))
    assert [m[0] for m in made] == [d for d in row("numpy", 3) for _ in range(2)]
    assert {m[1] for m in made} == {"ignore"}


@everywhere
def test_maps_in_maps(backend: str) -> None:
    inner = row(backend, 2)
    made = st.pmap(
        lambda i: st.stack(st.pmap(lambda j: st.asarray(float(i * j)), [1, 2, 3], devices=inner)),
        [1, 2],
        devices=row(backend),
    )
    assert [m.tolist() for m in made] == [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]


def test_an_item_over_several_devices_reaches_the_function_as_a_tensor(backend: str) -> None:
    value = array((4, 3), "float64", 1)
    x = st.device_put(value, mesh_of((2,), backend))
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        seen.append((type(x), x.device, st.backend.current_device()))
        return x + 1

    (made,) = st.pmap(fn, [x])
    assert seen == [(st.ShardedTensor, x.device, None)]
    assert made.sharding == x.sharding
    assert_same(made, value + 1)


def test_mapped_function_keeps_its_name_and_works_twice(backend: str) -> None:
    @st.pmap
    def double(x: Any) -> Any:
        """Twice."""
        return x * 2

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    parts = st.shard(np.arange(4.0), devices=row(backend))
    assert [m.tolist() for m in double(double(parts))] == [[0.0], [4.0], [8.0], [12.0]]


def test_empty_list(backend: str) -> None:
    assert st.pmap(lambda x: x, []) == []


def test_without_axes_the_first_axis_of_each_argument_is_split(backend: str) -> None:
    a, b = np.arange(10.0).reshape(5, 2), np.arange(5.0)
    with st.use_mesh(mesh_of((4,), backend)):
        made = st.smap(lambda x, y: x * y[:, None], a, b)
        assert made.sharding.spec == st.P(made.sharding.mesh.axis_names[0])
        np.testing.assert_array_equal(np.asarray(made), a * b[:, None])
        np.testing.assert_array_equal(np.asarray(st.smap(lambda x, y: x + y, a, a, axes=1)), a + a)
        with pytest.raises(st.ShapeError, match=r"argument 1 has no dimension to split; give None for it in axes"):
            st.smap(lambda x, y: x * y, a, 3)
        with pytest.raises(st.ArgumentTypeError, match=r"smap: argument 0: axis True is a bool"):
            st.smap(lambda x: x, a, axes=True)


@pytest.mark.parametrize(
    ("axes", "out_axes", "shape"),
    [
        (0, None, (2,)),
        (1, None, (4,)),
        (-1, None, (4,)),
        (1, 0, (4,)),
        (1, 1, (4,)),
        ([0, 1], None, (2, 2)),
        ([1, 0], None, (2, 2)),
        ([0, 1], (0, 1), (2, 2)),
        ([0, 1], (1, 0), (2, 2)),
    ],
)
def test_results_without_dimensions_are_stacked(axes: Any, out_axes: Any, shape: Any, backend: str) -> None:
    a = np.arange(8.0).reshape(2, 4)
    with st.use_mesh(mesh_of((4,), backend)):
        made = st.smap(lambda x: x.sum(), a, axes=axes, out_axes=out_axes)
    order = axes if isinstance(axes, list) else [axes % 2]
    counts = [2, 2] if len(order) == 2 else [shape[0]]
    parts = a.reshape(2, 4) if len(order) == 2 else a
    sums = parts.reshape(2, 1, 2, 2).sum((1, 3)) if len(order) == 2 else parts.sum(1 - order[0])
    wanted = sums.T if out_axes == (1, 0) else sums
    assert made.shape == shape == tuple(counts)
    np.testing.assert_array_equal(np.asarray(made), wanted)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda x: st.pmap(lambda a: a, 3.0), st.AxisError, "pmap: argument 0: axis 0 is out of range"),
    (lambda x: st.pmap(3, [1]), st.ArgumentTypeError, "fn is an int"),
    (lambda x: st.pmap(lambda a, b: a, [1, 2], [1]), st.ShapeError, "lists of 2 and of 1 shard"),
    (lambda x: st.pmap(lambda a: a, x, devices=x.device), st.ShapeError, "4 slices for 2 devices"),
    (lambda x: st.pmap(lambda a: a, [1], devices=[]), st.ShardingError, "devices is empty"),
    (lambda x: st.pmap(lambda a: a, [1], devices=["cpu"]), st.ArgumentTypeError, "not a Device"),
    (lambda x: st.smap(lambda a: a, x, axes=[5]), st.AxisError, "argument 0: axis 5"),
    (lambda x: st.smap(lambda a: a, x, axes=[None]), st.ArgumentError, "no argument is split"),
    (lambda x: st.smap(lambda a, b: a, x, x, axes=[0]), st.ArgumentError, "1 entry for 2 arguments"),
    (lambda x: st.smap(lambda a, b: a, x, x, axes=[0, 1]), st.ShapeError, "argument 1 has 3 elements along axis 1"),
    (lambda x: st.smap(lambda a, b: a, x, x, axes=[(0, 1), (0, None, 1)]), st.ArgumentError, "each names every grid axis"),
    (lambda x: st.smap(lambda a, b: a, x, x, axes=[(0, 1), 0]), st.ArgumentError, "is not an entry of axes"),
    (lambda x: st.smap(lambda a: a.sum(axis=0), x, axes=[1], out_axes=1), st.ShapeError, "no axis 1"),
    (lambda x: st.smap(lambda a: a[0], x, axes=[1]), st.ShapeError, "give out_axes"),
    (lambda x: st.smap(lambda a: a, axes=[0]), st.ArgumentError, "no argument to split"),
    (lambda x: st.smap(lambda a: a, x, axes="0"), st.ArgumentTypeError, "axes is a str"),
    (lambda x: st.smap(lambda a: a, x, axes=[0], out_axes=(None,)), st.ShapeError, "it differs"),
])  # fmt: skip
def test_errors(call: Any, kind: type[Exception], words: str, backend: str) -> None:
    value = array((4, 3), "float64", 1)
    x = st.device_put(value, mesh_of((2,), backend))
    with pytest.raises(kind) as caught, st.use_mesh(mesh_of((4,), backend)):
        call(x)
    assert words in str(caught.value)
    assert_same(x, value, exact=True)


# -- smap ------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=drawn(80, fast=10))
@hypothesis.given(data=some.data())
@pytest.mark.parametrize("name", USABLE)
def test_smap_of_an_elementwise_function_is_the_function(name: str, data: Any) -> None:
    value = array(data.draw(shapes(1, 3)), "float64", 3)
    rank = data.draw(some.integers(1, 3))
    axes = tuple(data.draw(some.one_of(some.none(), some.integers(-value.ndim, value.ndim - 1))) for _ in range(rank))
    if all(a is None for a in axes):
        axes = (0, *axes[1:])
    count = data.draw(some.integers(1, 8))
    given = list(axes) if rank > 1 and data.draw(some.booleans()) else [axes if rank > 1 else axes[0]]
    made = st.smap(lambda x: x * 2, value, axes=given, devices=st.devices(name)[:count])
    assert_same(made, value * 2, exact=True)


def test_smap_of_two_arguments(backend: str) -> None:
    x, y = array((2, 3, 9), "float64", 1), array((9,), "float64", 2)
    with st.use_mesh(mesh_of((4,), backend)):
        made = st.smap(lambda x, y: x * y, x, y, axes=[2, 0])
        assert made.sharding.shard_shape(made.shape) == (2, 3, 3)
        assert_same(made, x * y)
        made = st.smap(lambda x, y, k: (x @ y) * k, x, y, axes=[0, None], k=2)
        assert_same(made, (x @ y) * 2)
        made = st.smap(lambda x, y: (x * y).sum(axis=0), x, st.asarray(y), axes=[-1, -1], out_axes=-1)
        assert_same(made, (x * y).sum(axis=0))


def test_smap_over_a_grid(backend: str) -> None:
    a, b = array((10, 4), "float64", 1), array((4, 7), "float64", 2)
    devices = st.devices(backend)
    made = st.smap(lambda a, b: a @ b, a, b, axes=[(0, None), (None, 1)], out_axes=(0, 1), devices=devices)
    assert_same(made, a @ b)
    assert made.sharding.mesh.axis_sizes == (4, 2)
    assert made.sharding.shard_shape(made.shape) == (3, 4)


def test_smap_results(backend: str) -> None:
    x = array((10,), "float64", 1)
    devices = row(backend)
    sums = st.smap(lambda x: x.sum(), x, axes=[0], devices=devices)
    assert_same(sums, np.array([p.sum() for p in np.array_split(x, 4)]))
    grid = st.smap(lambda x: x.max(), array((4, 6), "float64", 1), axes=[1, 0], devices=devices)
    assert grid.shape == (2, 2)
    ragged = st.smap(lambda x: x[x > 0], x, axes=[0], devices=devices)
    assert_same(ragged, x[x > 0])
    same = st.smap(lambda x, n: st.full((3,), n), x, 5, axes=[0, None], out_axes=(None,), devices=devices)
    assert_same(same, np.full((3,), 5))
    tree = st.smap(lambda x: {"twice": x * 2, "ends": (x[:1], x[-1:])}, x, axes=[0], devices=devices)
    assert_same(tree["twice"], x * 2)
    assert tree["ends"][0].shape == (4,)


def test_smap_returns_no_empty_part_of_a_nonempty_array(backend: str) -> None:
    made = st.smap(lambda x: st.max(x, keepdims=True), array((3,), "float64", 1), axes=[0], devices=st.devices(backend))
    assert_same(made, array((3,), "float64", 1))
    assert_same(st.smap(lambda x: x * 2, np.zeros((0, 2)), axes=[0], devices=st.devices(backend)), np.zeros((0, 2)))


def test_smap_moves_nothing_that_is_in_place(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    x = st.ones((8, 3), device=mesh)
    with st.transfers() as log:
        y = st.smap(lambda x: x + 1, x, axes=[0], devices=mesh)
    assert log.bytes == 0
    assert y.sharding.is_equivalent_to(x.sharding, 2)


@pytest.mark.parametrize("count", range(1, 25))
def test_factors_are_as_even_as_can_be(count: int) -> None:
    for rank in (1, 2, 3):
        factors = even_factors(count, rank)
        assert np.prod(factors) == count
        assert list(factors) == sorted(factors, reverse=True)
    for rank in (2, 3):
        every = (f for f in itertools.product(range(1, count + 1), repeat=rank) if math.prod(f) == count)
        assert max(even_factors(count, rank)) == min(max(f) for f in every)


def test_memory_is_flat_over_many_maps(backend: str) -> None:
    parts = st.shard(np.zeros(1000), devices=row(backend, 2))

    def turn() -> None:
        nonlocal parts
        parts = st.pmap(lambda x: x + 1, parts)

    used = []
    tracemalloc.start()
    more = drawn(300, fast=120)
    for count in (2 * more, more, more, more):  # What lives on, and what Python keeps, is counted from the start.
        for _ in range(count):
            turn()
        gc.collect()
        used.append(in_use(backend))
    tracemalloc.stop()
    # What leaks is there after each time; other threads of the process allocate at one time or another.
    assert min(after - before for before, after in itertools.pairwise(used)) < 100 * more


@everywhere
def test_0d_results_are_stacked_whatever_the_axis(backend: str) -> None:
    x = np.arange(48).reshape(2, 3, 8)
    made = st.smap(lambda x: (x.sum(), None), x, axes=2, devices=st.devices(backend)[:2])[0]
    assert made.tolist() == [x[..., :4].sum(), x[..., 4:].sum()]
    made = st.smap(lambda x: x.sum(), x, axes=(2, 1), devices=st.devices(backend)[:4])
    assert made.tolist() == [
        [x[:, :2, c].sum() for c in (slice(0, 4), slice(4, 8))],
        [x[:, 2:, c].sum() for c in (slice(0, 4), slice(4, 8))],
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda: st.smap(len, in_axes=0, out_axes=0, axis_name="x"),
        lambda: st.smap(len, out_axes=0, axis_name="x"),
        lambda: st.smap(in_axes=0, out_axes=0, axis_name="x"),
        lambda: st.smap(out_axes=0, axis_name="x"),
        lambda: st.smap(len, np.ones(4), in_axes=0, out_axes=0),
        lambda: functools.partial(st.smap, in_axes=None, out_axes=None, axis_name="x")(len),
    ],
)
def test_calls_of_jaxs_smap_say_what_to_write(call: Callable[[], Any]) -> None:
    with pytest.raises(st.ShardTensorError, match=r"^smap: .* where (jax.smap\(.*\)) returns a function, ") as caught:
        call()
    here, over_mesh = re.findall(r"\bst\.s\w+\((?:[^()]|\([^()]*\))*\)", str(caught.value))
    with st.set_mesh(mesh_of((8,), "numpy")):
        known = {"st": st, "f": lambda part: part + st.axis_index("x"), "x": np.arange(8.0)}
        assert eval(here, known).tolist() == eval(over_mesh, known)(known["x"]).tolist() == [2.0 * k for k in range(8)]
