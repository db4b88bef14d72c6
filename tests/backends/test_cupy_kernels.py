"""What the CuPy backend computes by one kernel, on the simulated CuPy: merges along trees, collectives, `clip`."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.communication.all_reduce import combine, flat_tree, tree_of
from shardtensor.communication.merging import MERGED_AT_ONCE, merged
from shardtensor.functions.random import random_kernel
from tests import fakecupy
from tests.backends.test_cupy import ORDERS, address, launched, machine
from tests.draws import drawn
from tests.layouts import assert_equal


def parts_of(m: Any, *positions: int) -> Any:
    """Shards of rows of sizes 3, 3, …, 2 of an array that float32 cannot add exactly."""
    devices = [m.devices[k] for k in positions] or m.devices
    host = np.random.default_rng(7).random((3 * len(devices) - 1, 4)).astype(np.float32)
    return host, st.shard(host, devices=devices)


@hypothesis.given(data=some.data())
@hypothesis.settings(max_examples=drawn(15), deadline=None)
def test_merged_has_the_bits_of_single_merges(data: Any) -> None:
    sizes = tuple(data.draw(some.lists(some.integers(1, 9), min_size=1, max_size=2)))
    contributes = data.draw(some.lists(some.booleans(), min_size=int(np.prod(sizes)), max_size=int(np.prod(sizes))))
    contributes[0] = True
    tree = tree_of(tuple(contributes), sizes)
    ufunc, dtype = data.draw(
        some.sampled_from([("add", "f4"), ("multiply", "f2"), ("maximum", "f8"), ("add", "i1"), ("multiply", "c8")])
    )
    ndim = data.draw(some.sampled_from([0, 2, 30]))
    rng = np.random.default_rng(data.draw(some.integers(0, 99)))
    shape = (1,) * max(ndim - 1, 0) + (3,) * min(ndim, 1)
    arrays = [(rng.random(shape) * 9).astype(dtype) for _ in tree]
    with machine(1) as m, m.backend.on(m.devices[0]):
        on_device = [m.backend.from_host(array, m.devices[0]) for array in arrays]
        found = m.backend.to_host(merged(m.backend, ufunc, tree, on_device), m.devices[0])
    np.testing.assert_array_equal(found, combine(tree, arrays.__getitem__, getattr(np, ufunc)), strict=True)


@pytest.mark.parametrize(("count", "kernels"), [(1, 0), (2, 1), (MERGED_AT_ONCE, 1), (2 * MERGED_AT_ONCE, 3)])
def test_merges_are_few_kernels(count: int, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(1) as m, m.backend.on(m.devices[0]):
        arrays = [m.cupy.ones((2, 3)) for _ in range(count)]
        names = launched(monkeypatch)
        total = merged(m.backend, "add", flat_tree(count), arrays)
        assert len(names) == kernels
        assert m.backend.to_host(total, m.devices[0]).tolist() == [[count] * 3] * 2


def test_a_psum_on_one_gpu_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(8) as m:
        host, parts = parts_of(m, 0, 1, 2, 3)
        rows = [block[:2] for block in np.split(host, [3, 6, 9])]
        total = (rows[0] + rows[1]) + (rows[2] + rows[3])
        names = launched(monkeypatch)
        made = st.pmap(lambda a: st.psum(a[:2], "i"), parts, axis_name="i")
        assert names == ["combined"]
        assert len({address(y) for y in made}) == 1, "no program gets a copy"
        made[0] += 1
        assert_equal(made[0], total + 1)
        for y in made[1:]:
            assert_equal(y, total)
        (mean,) = {float(y.sum()) for y in st.pmap(lambda a: st.pmean(a[:2], "i"), parts, axis_name="i")}
        assert mean == pytest.approx(float(total.sum()) / 4)


def test_what_a_program_derives_from_a_shared_result_is_its_own() -> None:
    with machine(4, devices=1) as m:
        _, parts = parts_of(m)
        kept: list[Any] = []

        def work(a: Any) -> Any:
            total = st.psum(a[:2], "i")
            kept.append(total)
            return total[0], total * 2, a[0]

        made = st.pmap(work, parts, axis_name="i")
        first = np.asarray(made[0][0])
        for row, doubled, own in made:
            row += 1
            doubled += 1
            own += 1
            assert_equal(row, first + 1)
            assert_equal(doubled[0], first * 2 + 1)
        assert m.backend.to_host(kept[0], m.devices[0])[0].tolist() == first.tolist()


@pytest.mark.parametrize("order", ORDERS, ids=lambda p: "-".join(map(str, p.values())))
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_collectives_have_the_same_bits_on_every_number_of_gpus(gpus: int, order: dict[str, Any]) -> None:
    with machine(4, devices=gpus, **order) as m:
        host, parts = parts_of(m)
        rows = [block[:2] for block in np.split(host, [3, 6, 9])]

        def work(a: Any) -> Any:
            b = a[:2]
            return (
                st.psum(b, "i"), st.pmean(b, "i"), st.pmax(b, "i"), st.all_gather(a, "i", tiled=True),
                st.all_gather(b, "i", axis=1), st.all_to_all(b, "i", 1, 0, tiled=True),
                st.psum_scatter(b, "i", scatter_dimension=1, tiled=True),
            )  # fmt: skip

        total = (rows[0] + rows[1]) + (rows[2] + rows[3])
        for k, made in enumerate(st.pmap(work, parts, axis_name="i")):
            wanted = (
                total, total / 4, np.max(rows, axis=0), host, np.stack(rows, axis=1),
                np.concatenate([b[:, k : k + 1] for b in rows]), total[:, k : k + 1],
            )  # fmt: skip
            for found, value in zip(made, wanted, strict=True):
                assert_equal(found, value)


@pytest.mark.parametrize(("gpus", "launches"), [(1, 24), (2, 48)])
def test_variances_of_logical_devices(gpus: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(8, devices=gpus) as m:
        host = np.random.default_rng(1).random((37, 5)).astype(np.float32)
        x = st.device_put(host, st.NamedSharding(m.mesh(), st.P("d")))
        names = launched(monkeypatch)
        found = st.var(x), st.std(x, axis=0), st.var(x, axis=0, correction=1), st.var(x, keepdims=True)
        assert len(names) <= 4 * launches
        wanted = host.var(), host.std(axis=0), host.var(axis=0, ddof=1), host.var(keepdims=True)
        for y, value in zip(found, wanted, strict=True):
            assert (y.dtype, y.shape) == (value.dtype, value.shape)
            np.testing.assert_allclose(np.asarray(y), value, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["?", "b", "Q", "e", "f", "d"])
def test_clip_is_one_kernel(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = np.array([0, 1, 5, 100, 7]).astype(dtype)
    if dtype in "ef":
        host[2] = np.nan
    bounds = host[:1].copy(), host[3:4].copy()
    with machine(2, devices=1) as m:
        x, low, high = [st.device_put(a, m.mesh()) for a in (host, *bounds)]
        names = launched(monkeypatch)
        found = [st.clip(x, low, high)]
        assert names == ["clip"]
        if dtype != "?":
            found.append(st.clip(x, 1, 6))
            assert names == ["clip"] * 2
        wanted = [np.clip(host, *bounds), np.clip(host, 1, 6)]
        for y, value in zip(found, wanted, strict=False):
            np.testing.assert_array_equal(np.asarray(y), value, strict=True)


@pytest.mark.parametrize(("gpus", "waits"), [(1, 1), (2, 2)])
def test_a_tensor_is_read_by_one_copy_for_each_gpu(gpus: int, waits: int) -> None:
    with machine(8, devices=gpus) as m:
        host = np.arange(84.0).reshape(12, 7)
        x = st.device_put(host, st.NamedSharding(m.mesh(), st.P("d"))) * 2
        for found, value in ((lambda: x, host), (lambda: x.T, host.T), (lambda: x[1:-1:2, 3], host[1:-1:2, 3])):
            before = fakecupy.waits
            assert_equal(found(), value * 2)
            assert fakecupy.waits == before + waits
        parts = st.pmap(lambda a: a + 1, st.shard(x))
        assert_equal(st.unshard(parts), host * 2 + 1)


DRAWS: dict[str, Any] = {
    **{
        f"{name} of {dtype}": functools.partial(getattr(st.random, name), dtype=dtype)
        for name in ("uniform", "normal", "exponential")
        for dtype in ("float64", "float32")
    },
    "integers": lambda key, shape, **where: st.random.integers(key, -3, 77, shape, **where),
    "integers, one in three rejected": lambda key, shape, **where: st.random.integers(
        key, -(2**63), 2**63 - 2**62, shape, **where
    ),
    "all integers": lambda key, shape, **where: st.random.integers(key, -(2**63), 2**63, shape, **where),
    "bernoulli": lambda key, shape, **where: st.random.bernoulli(key, 0.3, shape, **where),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("gpus", [1, 2])
def test_random_numbers_are_one_kernel_for_each_gpu(name: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin within a block of words and end within one, too."""
    key, draw = st.random.key(2026), DRAWS[name]
    (kind,) = [k for k in ("uniform", "normal", "exponential", "integers", "bernoulli") if k in name]
    same_bits = kind not in ("normal", "exponential")
    with machine(8, devices=gpus) as m:
        for shape, spec in (
            ((37, 50), ()), ((37, 50), ("d",)), ((37, 50), (None, "d")), ((8, 3), ("d",)), ((5, 3, 11), (None, "d", None)),
            ((2, 5, 13), (None, None, "d")), ((), ()), ((0, 3), ()), ((21,), ("d",)), ((64,), ("d",)), ((3, 4), (None, "d")),
        ):  # fmt: skip
            wanted = np.asarray(draw(key, shape, device=st.devices("numpy")[0]))
            names = launched(monkeypatch)
            x = draw(key, shape, device=st.NamedSharding(m.mesh(), st.P(*spec)))
            kernels = [n for n in names if n.startswith("shardtensor_")]
            assert set(kernels) == ({f"shardtensor_{kind}"} if wanted.size else set())
            assert len(kernels) <= gpus
            if kind != "bernoulli" and (gpus == 1 or None not in spec):
                assert names == kernels
            found = np.asarray(x)
            assert found.dtype == wanted.dtype
            np.testing.assert_allclose(found, wanted, rtol=0 if same_bits else 1e-6 if "32" in name else 1e-14)


@pytest.mark.parametrize("name", ["uniform of float32", "integers, one in three rejected"])
def test_random_numbers_of_arrays_beyond_32_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_kernel, "_NARROW", 0)
    wanted = np.asarray(DRAWS[name](st.random.key(1), (7, 15), device=st.devices("numpy")[0]))
    with machine(4, devices=2) as m:
        for spec in (("d",), (None, "d")):
            x = DRAWS[name](st.random.key(1), (7, 15), device=st.NamedSharding(m.mesh(), st.P(*spec)))
            np.testing.assert_array_equal(np.asarray(x), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_probabilities_are_read_where_they_are(dtype: str) -> None:
    p = np.linspace(0, 1, 60).reshape(12, 5).astype(dtype)
    key = st.random.key(7)
    wanted = np.asarray(st.random.bernoulli(key, p))
    with machine(8, devices=2) as m:
        for spec in (("d",), (None, "d"), ()):
            x = st.device_put(p, st.NamedSharding(m.mesh(), st.P(*spec)))
            assert_equal(st.random.bernoulli(key, x), wanted)
        assert_equal(st.random.bernoulli(key, st.device_put(np.ascontiguousarray(p.T), m.mesh()).T), wanted)


def test_random_words_are_one_kernel_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    key, shape = st.random.key(2026), (37, 50)
    draws = [
        functools.partial(st.random.uniform, dtype="float16"),
        lambda key, shape, **where: st.random.gamma(key, 0.5, shape, **where),
    ]
    wanted = [np.asarray(draw(key, shape, device=st.devices("numpy")[0])) for draw in draws]
    with machine(8, devices=2) as m:
        for spec in ((), ("d",), (None, "d")):
            where = st.NamedSharding(m.mesh(), st.P(*spec))
            for draw, value in zip(draws, wanted, strict=True):
                names = launched(monkeypatch)
                x = draw(key, shape, device=where)
                assert names.count("shardtensor_philox") == 2 or draw is draws[-1], "only that rejects elements"
                np.testing.assert_allclose(np.asarray(x), value, rtol=1e-14)


@pytest.mark.parametrize("gpus", [1, 2])
def test_elementwise_compositions_are_one_kernel_for_each_gpu(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = np.array([[0.0, -0.0, 1.0, np.inf], [-np.inf, np.nan, 1e300, -3.5]] * 3)
    other = np.where(np.arange(24).reshape(6, 4) % 5 == 0, host, host * (1 + 1e-6))
    with machine(4, devices=gpus) as m:
        x, y = [st.device_put(a, st.NamedSharding(m.mesh(), st.P("d"))) for a in (host, other)]
        calls: list[Any] = [
            lambda np, x, y: np.isclose(x, y),
            lambda np, x, y: np.isclose(x, y, 1e-7, atol=0.0, equal_nan=True),
            lambda np, x, y: np.isneginf(x),
            lambda np, x, y: np.isposinf(x),
            lambda np, x, y: np.nan_to_num(x, nan=3.0),
            lambda np, x, y: np.nan_to_num(y, neginf=-7.0),
        ]
        for call in calls:
            for _ in range(3):
                names = launched(monkeypatch)
                found = call(st, x, y)
                assert names == ["shardtensor_kernel"] * gpus
                np.testing.assert_array_equal(np.asarray(found), call(np, host, other), strict=True)
        assert st.allclose(x, x, equal_nan=True)
        assert not st.allclose(x, y, 1e-7, equal_nan=True)
        assert st.nan_to_num(y, copy=False) is y
        assert_equal(y, np.nan_to_num(other))
        with st.transfers():  # By its operators, whose transfers are recorded.
            assert_equal(st.isclose(x, x), np.isclose(host, host))
        names = launched(monkeypatch)
        with st.disable_jit():  # By its operators, which are called while it runs.
            assert_equal(st.isclose(x, x), np.isclose(host, host))
        assert len(names) > gpus
        with pytest.raises(st.ShapeError, match="isclose"):
            st.isclose(x, y[:, :3])


@pytest.mark.parametrize(("shape", "launches"), [((24, 5), 5), ((21, 5), 9), ((24,), 5)], ids=str)
@pytest.mark.parametrize("function", ["cumulative_sum", "cumulative_prod"])
def test_cumulative_functions_are_few_kernels(
    function: str, shape: tuple[int, ...], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = np.random.default_rng(3).random(shape).astype(np.float32) + 0.5
    call, wanted = getattr(st, function), getattr(np, function)
    with machine(8, devices=1) as m:
        x = st.device_put(host, st.NamedSharding(m.mesh(), st.P("d")))
        names = launched(monkeypatch)
        found = call(x, axis=0)
        assert len(names) <= launches, "of 8 shards"
        np.testing.assert_allclose(np.asarray(found), wanted(host, axis=0), rtol=1e-5)
        with st.transfers() as log:
            again = call(x, axis=0)
        assert (log.bytes > 0, log.copied) == (True, 0)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(found))
        assert_equal(call(x.astype(np.int64), axis=0), wanted(host.astype(np.int64), axis=0))


@pytest.mark.parametrize(("gpus", "sums"), [(1, 3), (2, 7)])
def test_views_of_columns_are_read_where_they_are(gpus: int, sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators read them as they lie; reductions copy each buffer at most once, in place of a kernel for each shard."""
    host = np.random.default_rng(5).random((40, 6))
    with machine(8, devices=gpus) as m:
        x = st.device_put(host, st.NamedSharding(m.mesh(), st.P("d")))
        float(x.sum())  # The first copy between GPUs is tested.
        views: list[Any] = [lambda x: x.T, lambda x: x[:, 1:], lambda x: x.T[::2], lambda x: x[:, ::-1].T[:, :, None]]
        for view in views:
            part, wanted = view(x), view(host)
            names = launched(monkeypatch)
            found = part * 2
            assert names == ["multiply"] * gpus
            assert_equal(found, wanted * 2)
            names = launched(monkeypatch)
            total = part.sum()
            assert len([name for name in names if "copy" not in name]) <= sums, names
            np.testing.assert_allclose(float(total), wanted.sum(), rtol=1e-14)
            names = launched(monkeypatch)
            np.testing.assert_allclose(float(part.var()), wanted.var(), rtol=1e-14)
            assert len(names) <= 14 or gpus > 1
        turned = x.T + 0
        kept = x.T.copy()
        x[3:] = 7
        assert_equal(turned, host.T)
        assert_equal(kept, host.T)
        host[3:] = 7
        assert_equal(x.T, host.T)
        assert_equal(x[:, 2:], host[:, 2:])


PRODUCTS: dict[str, Any] = {
    "rows": lambda np, x, y, v: x.T @ y,
    "vectors": lambda np, x, y, v: v @ v,
    "a vector and rows": lambda np, x, y, v: v @ x,
    "all elements": lambda np, x, y, v: np.tensordot(x, y),
    "einsum": lambda np, x, y, v: np.einsum("ki,kj->ji", x, y),
    "a batch": lambda np, x, y, v: np.einsum("kib,kb->bi", x[:, :, None] * y[:, None, :], y),
    "a batch of one operand": lambda np, x, y, v: v[None, None] @ (x[None] * y[None]),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i8"])
def test_products_of_short_shards_are_few_kernels(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    host = [(rng.random(shape) * 9).astype(dtype) for shape in ((40, 6), (40, 6), (40,))]
    if dtype == "c8":
        host[0] = host[0] * (1 + 2j)
    with machine(8, devices=1) as m:
        x, y, v = [st.device_put(a, st.NamedSharding(m.mesh(), st.P("d"))) for a in host]
        call = PRODUCTS[name]
        names = launched(monkeypatch)
        found = call(st, x, y, v)
        assert len(names) <= (6 if "batch" in name else 3) or dtype == "i8", names
        wanted = call(np, *host)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5)
        with st.transfers() as log:
            again = call(st, x, y, v)
        assert log.copied == 0
        np.testing.assert_array_equal(np.asarray(again), np.asarray(found))
        uneven = [st.device_put(a[:37], st.NamedSharding(m.mesh(), st.P("d"))) for a in host]
        np.testing.assert_allclose(np.asarray(call(st, *uneven)), call(np, *[a[:37] for a in host]), rtol=1e-5)
