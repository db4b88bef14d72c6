"""Distributed sorting: exact parts, stable order and the bytes of the closed formulas, on every kind of memory."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from shardtensor.functions.algorithms import first_device, requests, sample_sort
from shardtensor.functions.algorithms import ranks as algorithms_of_order
from shardtensor.functions.algorithms.distinct import SAMPLES
from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.run_selection import CANDIDATES, rounds
from shardtensor.functions.building.split_search import isin_sorted, searchsorted_split
from shardtensor.functions.standard import sorting
from shardtensor.functions.statistics import order_statistics
from shardtensor.sharding.layout import offsets
from tests.layouts import READ_ONLY, USABLE, assert_same, everywhere, mesh_of
from tests.pairs import spread

N = 9_001


def elements(dtype: str, shape: Any, different: int = 50) -> np.ndarray:
    """Ties, and NaN and zeros of both signs if the dtype has them."""
    x = np.random.default_rng(1).integers(0, different, shape).astype(dtype)
    if x.dtype.kind in "fc":
        x.flat[::7] = np.nan
        x.flat[::3] *= -1
    return x


def order_of(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    if not descending:
        return np.argsort(x, axis=axis, stable=True)
    return x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis=axis), axis=axis, stable=True), axis=axis)


SPLITS = [
    ((N,), P("x"), (3,), "float64"),
    ((N,), P(("y", "x")), (2, 2), "int64"),
    ((N, 2), P("x", "y"), (3, 2), "float64"),
    ((130, 2, 131), P("x", None, "y"), (2, 2), "float32"),
    ((2, 901), P("y", "x"), (3, 2), "uint8"),
]


@everywhere
@pytest.mark.parametrize(("shape", "spec", "mesh", "dtype"), SPLITS)
@pytest.mark.parametrize("descending", [False, True])
def test_order_along_split_dimensions(
    shape: Any, spec: P, mesh: Any, dtype: str, descending: bool, backend: str
) -> None:
    host = elements(dtype, shape)
    x = st.device_put(host, st.NamedSharding(mesh_of(mesh, backend), spec))
    for axis in range(len(shape)):
        wanted = order_of(host, axis, descending)
        with st.transfers():  # Devices that share a memory run the algorithm only where transfers are recorded.
            indices = st.argsort(x, axis=axis, descending=descending)
            ordered = st.sort(x, axis=axis, descending=descending)
        assert indices.sharding == ordered.sharding == x.sharding
        np.testing.assert_array_equal(np.asarray(indices), wanted)
        values = np.take_along_axis(host, wanted, axis)
        np.testing.assert_array_equal(np.asarray(ordered), values)
        if values.dtype.kind == "f":
            numbers = ~np.isnan(values)
            np.testing.assert_array_equal(np.signbit(np.asarray(ordered))[numbers], np.signbit(values)[numbers])


@pytest.mark.parametrize(
    "make",
    [np.zeros, np.arange, lambda n: np.arange(n)[::-1], lambda n: np.arange(n) % 2, lambda n: np.arange(n) // 2000],
)
def test_elements_that_are_equal_or_in_order_already(make: Callable[[int], np.ndarray]) -> None:
    host = make(N).astype("int64")
    x = st.device_put(host, st.NamedSharding(mesh_of((5,), "checked"), P("x")))
    np.testing.assert_array_equal(np.asarray(st.argsort(x)), np.argsort(host, stable=True))
    np.testing.assert_array_equal(np.asarray(st.sort(x, descending=True)), np.sort(host)[::-1])


def sent_by(function: Callable[[Any], Any], x: Any) -> int:
    with st.transfers() as log:
        function(x)
    return log.bytes


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_bytes_are_those_of_the_formulas(devices: int) -> None:
    mesh = mesh_of((devices,), "checked")
    n, rest, count = 24_000, 240, devices
    put = st.NamedSharding(mesh, P("x"))
    small = st.device_put(elements("float32", (n // 10,)), put)
    assert small.nbytes <= GATHERED
    assert sent_by(st.sort, small) == 2 * small.nbytes * (count - 1) // count
    assert sent_by(st.argsort, small) == (4 + 8) * small.size * (count - 1) // count
    assert st.explain(st.argsort, small).bytes == sent_by(st.argsort, small)
    lines = st.device_put(elements("float32", (rest, rest)), put)
    moved = lines.size - lines.size // count
    assert sent_by(lambda x: st.sort(x, axis=0), lines) == 2 * moved * 4
    assert sent_by(lambda x: st.argsort(x, axis=0), lines) == moved * (4 + 8)
    assert sent_by(lambda x: st.sort(x, axis=1), lines) == 0
    line = st.device_put(np.arange(n, dtype="float32"), put)  # In order already: no element moves.
    selected = count * (count - 1) * rounds([n // count] * count) * (CANDIDATES * 4 + 16)
    assert sent_by(st.sort, line) == selected
    assert sent_by(st.sort, -line) == selected + moved_in_reverse(n, count)
    assert sent_by(st.argsort, -line) == selected + 3 * moved_in_reverse(n, count)
    shared = st.device_put(np.asarray(-line), st.NamedSharding(mesh_of((devices,), "numpy"), P("x")))
    assert sent_by(st.argsort, shared) == sent_by(st.argsort, -line)


@everywhere
@pytest.mark.parametrize("axis", [0, 1])
def test_an_index_out_of_bounds_is_named_as_by_numpy(axis: int, backend: str) -> None:
    host, indices = np.zeros((8, 6)), np.zeros((8, 6), int)
    indices[5, 4] = 8
    spec = P("x") if axis == 0 else P(None, "x")
    x = st.device_put(host, st.NamedSharding(mesh_of((4,), backend), spec))
    with pytest.raises(IndexError) as wanted:
        np.take_along_axis(host, indices, axis)
    with pytest.raises(IndexError, match=f"take_along_axis: {wanted.value}"):
        st.take_along_axis(x, indices, axis=axis)


def moved_in_reverse(n: int, count: int) -> int:
    """The bytes of the elements of float32 that are not on the device in the middle, if there is one."""
    return 4 * (n - n // count * (count % 2))


@pytest.mark.parametrize("count", [32, pytest.param(1024, marks=pytest.mark.full)])
def test_bytes_on_simulated_devices(count: int) -> None:
    mesh, n = st.AbstractMesh((count,), ("x",)), 1 << 20
    x = st.empty((n,), dtype="float32", device=st.NamedSharding(mesh, P("x")))
    selected = count * (count - 1) * rounds([n // count] * count) * (CANDIDATES * 4 + 16)
    assert st.simulate(st.sort, x).bytes == selected + (n - n // count) * 4
    lines = st.empty((2048, 2048), dtype="float32", device=st.NamedSharding(mesh, P("x")))
    assert st.simulate(lambda x: st.sort(x, axis=0), lines).bytes == 2 * (1 - 1 / count) * math.prod(lines.shape) * 4


@pytest.mark.parametrize("count", [32, pytest.param(1024, marks=pytest.mark.full)])
def test_bytes_of_selections_on_simulated_devices(count: int) -> None:
    """The greatest elements, medians, requests, and searches, of which every device is assumed to have as many."""
    n, others = 1 << 20, count - 1
    put = st.NamedSharding(st.AbstractMesh((count,), ("x",)), P("x"))
    x, indices = [st.empty((n,), dtype=dtype, device=put) for dtype in ("float32", "int64")]
    elsewhere = n - n // count
    assert st.simulate(lambda x: st.topk(x, 5), x).bytes == others * count * 5 * (4 + 8)
    selected = 3 * others * rounds([n // count] * count) * (CANDIDATES * 4 + 16)
    assert st.simulate(st.median, x).bytes == selected + count * others * 3 * (4 + 8)
    assert st.simulate(lambda x, i: st.take_along_axis(x, i, axis=0), x, indices).bytes == elsewhere * (8 + 4)
    assert st.simulate(st.searchsorted, x, x).bytes == elsewhere * (4 + 8) + count * others * 4


# -- on top of it ----------------------------------------------------------------------------------


@everywhere
def test_the_greatest_elements_of_split_lines(backend: str) -> None:
    layouts = [
        ((N,), P("x"), (3,)),
        ((6001, 3), P("x", "y"), (4, 2)),
        ((60, 3), P("x", "y"), (4, 2)),
        ((3,), P("x"), (8,)),
    ]
    for shape, spec, mesh in layouts:
        host = elements("float32", shape)
        x = st.device_put(host, st.NamedSharding(mesh_of(mesh, backend), spec))
        for k in {0, 2, shape[0] // 2, shape[0]}:
            with st.transfers() as log:
                values, indices = st.topk(x, k, axis=0)
            wanted = order_of(host, 0, descending=True)[:k]
            assert values.sharding == indices.sharding == x.sharding
            assert (indices.dtype, values.dtype) == (np.int64, np.float32)
            np.testing.assert_array_equal(np.asarray(indices), wanted)
            np.testing.assert_array_equal(np.asarray(values), np.take_along_axis(host, wanted, 0))
            if shape == (6001, 3) and k == 2:
                assert log.bytes == 3 * 4 * k * 3 * (4 + 8)
            if (
                shape == (60, 3) and k == 2
            ):  # The first device receives all others' elements, and sends them their parts.
                assert log.bytes == (180 - 30) * 4 + (6 - 2) * (4 + 8)


@everywhere
@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_searches_among_few_elements_that_two_axes_split(n: int, backend: str) -> None:
    """2 elements over 2 x 3 devices lie in parts 0 and 3."""
    put = st.NamedSharding(mesh_of((2, 3), backend), P(("x", "y")))
    ordered, elements = np.arange(1.0, 2 * n, 2), np.arange(12.0)
    x, y = st.device_put(elements, put), st.device_put(ordered, put)
    for side in ("left", "right"):
        assert_same(searchsorted_split(x, y, side=side), np.searchsorted(ordered, elements, side=side))
    assert_same(isin_sorted(x, y), np.isin(elements, ordered))


@everywhere
@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_algorithms_on_few_elements_that_two_axes_split(n: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each algorithm runs on the parts, of which those that hold elements are not the first ones."""
    for module in (first_device, sample_sort, algorithms_of_order, order_statistics, sorting):
        monkeypatch.setattr(module, "GATHERED", 0)  # Otherwise the first device computes them all.
    host = np.random.default_rng(n).integers(-3, 4, n).astype("float32")
    x = st.device_put(host, st.NamedSharding(mesh_of((2, 3), backend), P(("x", "y"))))
    order = np.argsort(host, stable=True)
    with st.transfers():  # Devices that share a memory run the algorithms only where transfers are recorded.
        found = st.argsort(x)
        assert_same(found, order)
        assert_same(st.sort(x), host[order])
        assert_same(st.take_along_axis(x, found, axis=0), host[order])
        assert_same(st.cumulative_sum(x), np.cumsum(host))
        assert_same(st.median(x), np.median(host))
        assert_same(st.topk(x, 1)[0], host[order[-1:]])
        for values, wanted in zip(st.unique_all(x), np.unique_all(host), strict=True):
            assert_same(values, wanted)


@everywhere
def test_elements_are_requested_of_the_devices_that_hold_them(backend: str) -> None:
    host = elements("float32", (60, 2, 5))
    for spec in (P("x", None, "y"), P(("y", "x")), P(None, "x", "y")):
        x = st.device_put(host, st.NamedSharding(mesh_of((2, 3), backend), spec))
        for axis in range(3):
            order = np.argsort(host, axis=axis, stable=True)[::-1]
            with st.transfers():
                found = st.take_along_axis(x, st.asarray(order, device=x.sharding) - host.shape[axis], axis=axis)
            np.testing.assert_array_equal(np.asarray(found), np.take_along_axis(host, order, axis))
            some = order[:, :1] if axis != 1 else order[:1]
            found = st.take_along_axis(x, some, axis=axis)
            np.testing.assert_array_equal(np.asarray(found), np.take_along_axis(host, some, axis))
            with pytest.raises(st.IndexingError, match=r"take_along_axis: .*out of bounds"):
                st.take_along_axis(x, order + 1, axis=axis)
            with pytest.raises(st.ShapeError, match="take_along_axis"):
                st.take_along_axis(x, np.zeros((7, 7, 7), int), axis=axis)


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_requests_and_replies_are_the_elements_that_are_elsewhere(devices: int) -> None:
    mesh, n = mesh_of((devices,), "checked"), 24_000
    x = st.device_put(np.arange(n, dtype="float32"), st.NamedSharding(mesh, P("x")))
    there = st.device_put(np.arange(n)[::-1].copy(), x.sharding)
    elsewhere = n - n // devices * (devices % 2)
    assert sent_by(lambda x: st.take_along_axis(x, there, axis=0), x) == elsewhere * (8 + 4)
    spec = st.eval_shape(lambda x: st.take_along_axis(x, there, axis=0), x).sharding
    assert spec == x.sharding


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_bytes_of_the_greatest_elements(devices: int) -> None:
    x = st.device_put(elements("float32", (24_000,)), st.NamedSharding(mesh_of((devices,), "checked"), P("x")))
    assert sent_by(lambda x: st.topk(x, 5), x) == (devices - 1) * devices * 5 * (4 + 8)


def bytes_of_distinct(parts: list[Any], pair: int) -> int:
    """Returns the formula of `shardtensor.functions.algorithms.distinct`.

    Args:
        parts: the distinct elements of each device.
        pair: the bytes of an element, and of what is sent with it.
    """
    count, itemsize = len(parts), parts[0].dtype.itemsize
    step = max(sum(map(len, parts)) // (SAMPLES * count * count), 1)
    samples = np.sort(np.concatenate([part[step - 1 :: step] for part in parts]))
    splitters = samples[[len(samples) * k // count for k in range(1, count)]]
    ranges = [np.split(part, np.searchsorted(part, splitters)) for part in parts]
    sent = sum(len(ranges[i][k]) for i in range(count) for k in range(count) if i != k)
    merged = [len(np.unique(np.concatenate(column))) for column in zip(*ranges, strict=True)]
    now, then = [np.repeat(np.arange(count), sizes) for sizes in (merged, np.diff(offsets(sum(merged), (count,))))]
    return (count - 1) * len(samples) * itemsize + (sent + int((now != then).sum())) * pair


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_the_first_device_finds_the_distinct_elements_of_short_arrays(devices: int) -> None:
    host = np.random.default_rng(2).permutation(np.repeat(np.arange(48.0), 2))
    sharding = st.NamedSharding(mesh_of((devices,), "checked"), P("x"))
    x = st.device_put(host, sharding)
    with st.transfers() as log:
        values, inverse = st.unique_inverse(x)
    assert (values.sharding, inverse.sharding) == (sharding, sharding)
    np.testing.assert_array_equal(np.asarray(values), np.arange(48.0))
    np.testing.assert_array_equal(np.asarray(inverse), host)
    assert log.bytes == (96 + 48 + 96) * 8 * (devices - 1) // devices
    assert not any(t.explicit for t in log)
    shared = st.device_put(host, st.NamedSharding(mesh_of((devices,), "numpy"), P("x")))
    assert sent_by(st.unique_inverse, shared) == log.bytes


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_bytes_of_distinct_elements(devices: int) -> None:
    """They are sent to the device of their range, and from there to that of their place in the result."""
    host = np.random.default_rng(2).permutation(np.repeat(np.arange(12_000.0), 2))
    x = st.device_put(host, st.NamedSharding(mesh_of((devices,), "checked"), P("x")))
    local = [np.unique(np.asarray(shard.data)) for shard in x.addressable_shards]
    assert sent_by(st.unique, x) == bytes_of_distinct(local, 8)
    assert sent_by(st.unique_counts, x) == bytes_of_distinct(local, 16)
    assert bytes_of_distinct(local, 8) < (sum(map(len, local)) + 12_000) * 8 + 8 * devices**3 * 2 * 8
    found = st.unique_all(x)
    for made, wanted in zip(found, np.unique_all(host), strict=True):
        np.testing.assert_array_equal(np.asarray(made), wanted)
    assert found.inverse_indices.sharding == x.sharding


QUANTILES = [(0.3, "linear"), ([0, 0.25, 1], "hazen"), (0.5, "nearest"), (np.array([[0.2], [0.9]]), "midpoint")]


@pytest.mark.parametrize("backend", ["numpy", "checked", "torch"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_quantiles_of_split_lines_are_selected(dtype: str, backend: str) -> None:
    for shape, spec, axis in [
        ((20_001,), P(("x", "y")), None),
        ((9001, 2), P("x", "y"), 0),
        ((90, 201), P("x", "y"), 1),
    ]:
        host = np.random.default_rng(3).integers(0, 10_000, shape).astype(dtype)
        if dtype == "float32":
            host.flat[5] = np.nan if axis == 1 else np.inf
        x = st.device_put(host, st.NamedSharding(mesh_of((3, 2), backend), spec))
        with st.transfers() as log, np.errstate(invalid="ignore"):
            for q, method in QUANTILES:
                found, wanted = (
                    st.quantile(x, q, axis=axis, method=method),
                    np.quantile(host, q, axis=axis, method=method),
                )
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6)
            assert_same(st.median(x, axis=axis, keepdims=True), np.median(host, axis=axis, keepdims=True))
        if axis is None:
            assert log.bytes < 5 * x.nbytes
    spec = st.eval_shape(lambda x: st.median(x, axis=1), x).sharding.spec
    assert st.median(x, axis=1).sharding.spec == spec == P("x")


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_bytes_of_a_median(devices: int) -> None:
    n, mesh = 24_000, mesh_of((devices,), "checked")
    x = st.device_put(np.arange(n, dtype="float32"), st.NamedSharding(mesh, P("x")))
    ranks, others = 3, devices - 1  # The two in the middle and the greatest one.
    selected = ranks * others * rounds([n // devices] * devices) * (CANDIDATES * 4 + 16)
    assert sent_by(st.median, x) == selected + devices * others * ranks * (4 + 8)


@everywhere
def test_both_results_of_topk_have_the_same_layout(backend: str) -> None:
    """Of few and most elements, gathered ones and those of sorted lines."""
    layouts = [((6,), P("x")), ((2, 3), P(("y", "x"))), ((2, 3), P("y"))]
    counts = [(5, 2), (9_000, 0), (9_000, 3), (9_000, 5_000), (9_000, 9_000)]
    for (mesh, spec), (n, k) in spread(itertools.product(layouts, counts), 2, USABLE.index(backend)):
        x = st.device_put(np.arange(n) % 1000 * 1.0, st.NamedSharding(mesh_of(mesh, backend), spec))
        found = st.topk(x, k)
        inferred = st.eval_shape(lambda x, k=k: tuple(st.topk(x, k)), x)
        assert {one.sharding for one in (*found, *inferred)} == {x.sharding}


@pytest.mark.parametrize("backend", ["numpy", "checked", "grouped", "torch", "cupy"], indirect=True)
def test_quantiles_that_skip_nan_are_selected(backend: str) -> None:
    """Lines with different numbers of NaN, one of nothing but NaN, fewer and more lines than devices."""
    cases: list[Any] = [
        ((20_001,), (3, 2), P(("x", "y")), None),
        ((3, 9001), (2, 3), P("x", "y"), 1),
        ((9001, 2), (2, 1), P("x", "y"), 0),
        ((12, 3001), (2, 3), P("x", "y"), 1),
    ]
    for shape, mesh, spec, axis in spread(cases, 1 if backend in READ_ONLY else 3, len(backend)):
        generator = np.random.default_rng(3)
        host = generator.integers(0, 10_000, shape).astype("float32")
        host[generator.random(shape) < 0.3] = np.nan
        if host.ndim > 1:
            host[:, 0], host[0 if axis else slice(None), slice(None) if axis else 0] = np.inf, np.nan
        x = st.device_put(host, st.NamedSharding(mesh_of(mesh, backend), spec))
        with st.transfers() as log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = st.nanmedian(x, axis=axis, keepdims=True)
            assert_same(found, np.nanmedian(host, axis=axis, keepdims=True))
            for q, method in [(0.3, "linear"), (np.array([0.25, 1, 0]), "weibull"), ([0.5, 0.9], "nearest")]:
                made, wanted = [one.nanquantile(a, q, axis=axis, method=method) for one, a in ((st, x), (np, host))]
                assert made.shape == wanted.shape
                # NumPy's dtype is that of the first line, which is another one if all its elements are NaN.
                assert made.dtype == np.quantile(host[:1], q, axis=axis, method=method).dtype
                np.testing.assert_allclose(np.asarray(made), wanted, rtol=1e-6)
        if axis is None:
            assert log.bytes < 6 * x.nbytes
        inferred = st.eval_shape(lambda x, axis=axis: st.nanmedian(x, axis=axis, keepdims=True), x)
        assert inferred.sharding == found.sharding


@pytest.mark.parametrize("backend", ["numpy", "checked", "grouped", "torch", "cupy"], indirect=True)
def test_elements_are_found_where_both_operands_are_split(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rounds, ties over several parts, elements outside of the range, and operands that other axes split, too."""
    monkeypatch.setattr(requests, "ROUND", 1 << 13)
    cases: list[Any] = [
        (20_001, (9_003, 3), P(("x", "y")), "float64"),
        (20_001, (70, 301), P("x", "y"), "int32"),
        (9_000, (20_001,), P("y"), "int64"),
    ]
    for count, shape, spec, dtype in spread(cases, 1 if backend in READ_ONLY else 3, len(backend)):
        mesh, generator = mesh_of((3, 2), backend), np.random.default_rng(4)
        table, wanted = [generator.integers(-300, 300, size).astype(dtype) * 2 for size in (count, shape)]
        table, wanted = np.sort(table), wanted + (wanted % 3 == 0).astype(dtype)
        wanted.flat[:3] = -10_000, 10_000, table[count // 3]
        x1, x2 = [
            st.device_put(a, st.NamedSharding(mesh, at)) for a, at in ((table, P(("x", "y"))), (wanted, spec))
        ]  # fmt: skip
        with st.transfers() as log:
            for side in ("left", "right"):
                found = st.searchsorted(x1, x2, side=side)
                assert_same(found, np.searchsorted(table, wanted, side=side))
                assert found.sharding == x2.sharding
        assert log.bytes < 2 * 3 * (x2.size * (x2.dtype.itemsize + 8) + x1.nbytes)
        shuffled = st.device_put(generator.permutation(table), x1.sharding)
        for invert in (False, True):
            found = st.isin(x2, shuffled, invert=invert)
            assert_same(found, np.isin(wanted, table, invert=invert))
            assert found.sharding == x2.sharding


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_elements_found_are_sent_once(devices: int) -> None:
    x = st.device_put(np.arange(24_000.0), st.NamedSharding(mesh_of((devices,), "checked"), P("x")))
    wanted = st.device_put(np.arange(24_000.0)[::-1].copy(), x.sharding)
    elsewhere = x.size - x.size // devices * (devices % 2)
    assert sent_by(lambda x: st.searchsorted(x, wanted), x) == elsewhere * (8 + 8) + devices * (devices - 1) * 8


def test_permutations_do_not_depend_on_the_devices(backend: str) -> None:
    n = N + 1
    assert n * 8 > GATHERED
    found = [np.asarray(st.random.permutation(st.random.key(7), n, device=mesh_of((k,), backend))) for k in (1, 3)]
    with st.transfers():
        found.append(np.asarray(st.random.permutation(st.random.key(7), n, device=mesh_of((4,), "numpy"))))
    np.testing.assert_array_equal(np.sort(found[0]), np.arange(n))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    np.testing.assert_array_equal(np.asarray(st.random.choice(st.random.key(7), n, (5,), replace=False)), found[0][:5])


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32"])
def test_indices_of_long_lines_of_the_host(dtype: str) -> None:
    for different in (3, 1 << 40):
        host = np.random.default_rng(4).integers(-different, different, (3, 70_000)).astype(dtype)
        if dtype[0] == "f":
            host[:, ::5] = np.nan
            host[host == 0] = -0.0
        lines = [(host, 0), (host, 1), (host.T, 0), (host.T, 1), (host[0], 0)]
        for (x, axis), descending in spread(itertools.product(lines, (False, True)), 3, len(dtype) + (different > 3)):
            wanted = order_of(x, axis, descending)
            found = st.argsort(st.asarray(x), axis=axis, descending=descending)
            np.testing.assert_array_equal(np.asarray(found), wanted)
