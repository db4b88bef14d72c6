"""Reductions and products in many blocks, compared with NumPy, and bitwise with one another."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.functions.building.monoids import MONOIDS
from shardtensor.host import memory_pool, threads
from shardtensor.interpreters.execution import blocked_reduction, plan_cache, strategies
from tests import layouts
from tests.draws import all_of_them, drawn
from tests.host.test_blockwise import LAYOUTS, counted, heard, laid, poisoned, quiet, thread_counts
from tests.layouts import DTYPES, all_specs, array, assert_close, mesh_of, meshes, specs, strided

PICKS = ("max", "min", "argmax", "argmin")  # not defined for no elements
SIZES = [0, 1, 2, 3, 4, 5, 7, 9, 17]

REDUCTIONS = sorted(set(MONOIDS) - {"diagonal", "fold", "nanmax", "nanmin", "trace", "vector_norm"})
"""Those that `numpy` has, with the same arguments."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `tests.host.test_blockwise`."""
    monkeypatch.setattr(memory_pool, "empty", poisoned)


def cut(**sizes: Any) -> AbstractContextManager[None]:
    """Divides all but the smallest arrays into blocks of a few elements."""
    small: dict[str, Any] = {
        "LONG": 0.0, "_BLOCK": 7, "_CACHED": 5, "_WIDTH": 3, "_FACTORS": (2, 3, 16), "_SQUARE": (3, 3, 16), "_PLAIN": (3, 2, 16), "_DEPTH": (2, 5),
        "_BLAS_ALONE": 4, "_BLAS_ALONE_THIN": 4, **sizes,
    }  # fmt: skip
    return layouts.cut(blocked_reduction, **small)


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Divides nothing into blocks: each shard is reduced in one call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "is_long", lambda *_: False)
        patch.setattr(plan_cache, "_cached_plan", functools.lru_cache(plan_cache._cached_plan.__wrapped__))
        yield


@pytest.fixture
def _cut() -> Iterator[None]:
    with cut():
        yield


in_blocks = pytest.mark.usefixtures("_cut")


@pytest.fixture
def _cut_in_tiles() -> Iterator[None]:
    """Computes products in blocks of the result, each with its whole sum."""
    with cut(_DEPTH=(64, 64)):
        yield


def on(mesh: st.Mesh, spec: st.P, x: np.ndarray, layout: str = "C") -> st.ShardedTensor:
    """Returns a tensor with this spec, whose elements have another memory layout."""
    sharding = st.NamedSharding(mesh, spec)
    if layout == "F":
        return st.device_put(np.ascontiguousarray(x.T), sharding.with_spec(_mirrored(spec, x.ndim))).T
    if layout == "steps":
        wide = np.zeros([2 * n for n in x.shape], x.dtype)
        wide[(slice(None, None, 2),) * x.ndim] = x
        return st.device_put(wide, sharding)[(slice(None, None, 2),) * x.ndim]
    if layout == "reversed":
        return st.device_put(np.flip(x), sharding)[(slice(None, None, -1),) * x.ndim]
    return st.device_put(x, sharding)


def _mirrored(spec: st.P, ndim: int) -> st.P:
    return st.P(*spec.chains_of(ndim)[::-1])


def results(call: Callable[[], st.ShardedTensor]) -> np.ndarray:
    """Returns the result of a call, after asserting that its bits do not depend on the threads or on a log of transfers.

    The log must be that of a computation without blocks.
    """
    found = []
    for number in thread_counts(found):
        with st.set_num_threads(number), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                plan_cache, "_cached_plan", functools.lru_cache(plan_cache._cached_plan.__wrapped__)
            )  # else all are cut as for one
            found.append(np.asarray(call()))
    found.append(np.asarray(unchanged_in_the_log(call)))
    assert len({x.tobytes() for x in found}) == 1
    return found[0]


def unchanged_in_the_log(call: Callable[[], st.ShardedTensor]) -> st.ShardedTensor:
    """Returns the result of a call, after asserting that its transfers are, in some order, those of a call without
    blocks.
    """
    with st.transfers() as log:
        found = call()
    with whole(), st.transfers() as other:
        call()
    assert sorted(map(repr, log)) == sorted(map(repr, other))
    return found


# -- reductions ------------------------------------------------------------------------------------


@some.composite
def sums(draw: Any, name: str) -> Any:
    """Draws numbers with many ties or many digits, their layout, and the parameters of the reduction."""
    sizes = SIZES[1:] if name in PICKS else SIZES
    shape = draw(some.lists(some.sampled_from(sizes), min_size=1, max_size=4))
    while math.prod(shape) > 1500:
        shape.pop()
    x = array(tuple(shape), draw(some.sampled_from(DTYPES)), draw(some.integers(0, 999)))
    if x.dtype.kind in "fc":
        if draw(some.booleans()) and not name.startswith("arg"):
            x = x * np.asarray(1.1, x.dtype)
        if name == "prod":
            x = (1 + x / 64).astype(x.dtype)
        if x.size and draw(some.integers(0, 3)) == 0:
            for at in draw(some.lists(some.integers(0, x.size - 1), min_size=1, max_size=3)):
                x.flat[at] = np.nan
    mesh = draw(meshes("numpy"))
    spec, layout = draw(specs(mesh, x.ndim)), draw(some.sampled_from(["C", "F", "steps", "reversed"]))
    axes: list[Any] = [None, *range(-x.ndim, x.ndim)]
    if not name.startswith("arg"):
        axes += [a for n in range(x.ndim + 1) for a in itertools.combinations(range(x.ndim), n)]
    params = {"axis": draw(some.sampled_from(axes)), "keepdims": draw(some.booleans())}
    if name in ("var", "std"):
        params["correction"] = draw(some.sampled_from([0, 1, 0.5]))
    if name in ("sum", "prod") and draw(some.integers(0, 3)) == 0 and x.dtype.kind != "c":
        params["dtype"] = draw(some.sampled_from(["float64", "complex128"]))
    return x, on(mesh, spec, x, layout), params


def swept(name: str, examples: int) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(case=sums(name))
    def run(case: Any) -> None:
        x, placed, params = case
        with quiet():
            wanted = getattr(np, name)(x, **params)
            found = results(lambda: getattr(st, name)(placed, **params))
        exact = name in PICKS or (wanted.dtype.kind in "f" and not x.size)
        assert_close(found, wanted, exact)

    run()


@in_blocks
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str) -> None:
    swept(name, drawn(50, fast=16))


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [{"_BLOCK": 1, "_CACHED": 1, "_WIDTH": 1}, {"_BLOCK": 40, "_CACHED": 33}, {}], ids=str
)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_at_length(name: str, sizes: dict[str, int]) -> None:
    with cut(**sizes):
        swept(name, 200)


@in_blocks
@pytest.mark.parametrize("name", ["sum", "prod", "mean", "var", "max", "argmax", "any"])
def test_every_spec_and_axis(name: str) -> None:
    """All specs and axes of an uneven array are tested, which has fewer rows than there are devices."""
    x = array((3, 11, 5), "float64", 7) / 8
    mesh = mesh_of((2, 2), "numpy")
    axes: list[Any] = [None, 0, 1, 2] if name.startswith("arg") else [None, 0, 1, 2, (0, 1), (0, 2), (1, 2), ()]
    turns = itertools.count()
    for spec, layout in itertools.product(all_specs(mesh, 3)[::3], ["C", "F"]):
        placed = on(mesh, spec, x, layout)
        for axis in strided(axes, 3, next(turns)):
            with quiet():
                found = np.asarray(getattr(st, name)(placed, axis=axis))
                assert_close(found, getattr(np, name)(x, axis=axis), name in PICKS)


@in_blocks
@pytest.mark.parametrize("shape", [(8,), (2, 3), (2, 2, 2)], ids=str)
def test_more_devices_than_rows(shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape, "numpy")
    for rows in 1, 2, 3, 5:
        x = array((rows, 13), "float64", rows)
        for axis in None, 0, 1:
            for name in "sum", "var", "argmin", "all":
                found = results(lambda: getattr(st, name)(on(mesh, st.P(mesh.axis_names), x), axis=axis))  # noqa: B023
                assert_close(found, getattr(np, name)(x, axis=axis), False)


@in_blocks
def test_nan_and_ties_wherever_they_are() -> None:
    for mesh, length in (mesh_of((1,), "numpy"), 40), (mesh_of((3,), "numpy"), 23):
        for a, b in itertools.combinations(range(0, length, 3), 2):
            x = np.arange(float(length)) % 5
            x[[a, b]] = 9
            placed = on(mesh, st.P("x"), x)
            assert int(st.argmax(placed)) == a
            assert int(st.argmin(-placed)) == a
            x[[a, b]] = np.nan
            placed = on(mesh, st.P("x"), x)
            assert int(st.argmax(placed)) == int(st.argmin(placed)) == a
            for name in "sum", "prod", "mean", "var", "std", "max", "min":
                assert np.isnan(float(getattr(st, name)(placed))), name


@in_blocks
def test_the_first_index_in_every_row_and_column() -> None:
    x = np.random.default_rng(1).integers(0, 3, (19, 23))
    grids = itertools.product(((1,), (4,), (2, 2)), ["C", "F", "steps", "reversed"])
    for turn, (mesh, layout) in enumerate(grids):
        for spec in strided(all_specs(mesh_of(mesh, "numpy"), 2), 3, turn):
            placed = on(mesh_of(mesh, "numpy"), spec, x, layout)
            for name, axis in itertools.product(["argmax", "argmin"], [None, 0, 1]):
                np.testing.assert_array_equal(
                    np.asarray(getattr(st, name)(placed, axis=axis)), getattr(np, name)(x, axis=axis)
                )


@in_blocks
def test_shards_are_added_in_mesh_order() -> None:
    """1e16 + 1 + 1 - 1e16 depends on the order of the additions; the blocks of a shard come before the next shard."""
    for mesh, spec, values, wanted in [
        ((4,), st.P("x"), [1e16, 1, 1, -1e16], 0),
        ((4,), st.P("x"), [1, 1, 1e16, -1e16], 2),
        ((4,), st.P("x"), [1, 1e16, 1, -1e16], 0),
        ((2, 2), st.P(("x", "y")), [1, 1e16, 1, -1e16], 0),
        ((2, 2), st.P(("y", "x")), [1, 1e16, 1, -1e16], 2),
    ]:
        x = np.zeros((4, 30))
        x[:, 0] = values
        assert float(st.sum(on(mesh_of(mesh, "numpy"), spec, x))) == wanted
        product = st.matmul(np.ones((1, 120)), on(mesh_of(mesh, "numpy"), spec, x.ravel()))
        assert float(product[0]) == wanted


@in_blocks
def test_integers_wrap_round() -> None:
    x = np.full((50, 3), 1 << 62)
    placed = on(mesh_of((3,), "numpy"), st.P("x"), x)
    np.testing.assert_array_equal(np.asarray(st.sum(placed, axis=0)), x.sum(axis=0))
    np.testing.assert_array_equal(np.asarray(st.prod(placed, axis=0)), x.prod(axis=0))
    small = np.full((9, 9), 100, "int8")
    np.testing.assert_array_equal(np.asarray(st.matmul(st.asarray(small), small)), small @ small)


@in_blocks
def test_variances_do_not_cancel() -> None:
    x = 1e9 + np.random.default_rng(1).normal(size=1000)
    for mesh in (1,), (4,):
        placed = on(mesh_of(mesh, "numpy"), st.P("x"), x)
        np.testing.assert_allclose(float(st.var(placed)), np.var(x - 1e9), rtol=1e-7)


@in_blocks
def test_the_operand_is_as_before() -> None:
    """Variances are computed in the memory of a temporary array, and not in that of the operand."""
    x = array((20, 30), "float64", 1)
    for layout in LAYOUTS:
        placed = laid(x, layout)
        for name in REDUCTIONS:
            getattr(st, name)(placed, axis=0)
        np.testing.assert_array_equal(np.asarray(placed), x)


# -- products --------------------------------------------------------------------------------------


@some.composite
def products(draw: Any) -> Any:
    """The name of a product, two arrays, where they lie, and the parameters."""
    name = draw(some.sampled_from(["matmul", "matmul", "tensordot", "vecdot"]))
    size = some.sampled_from([0, 1, 2, 3, 5, 9, 13])
    n, k, m = draw(size), draw(size), draw(size)
    params: dict[str, Any] = {}
    batch = [
        draw(some.sampled_from(b)) for b in ([(), (), (2,), (3, 2), (1, 2), (3, 1)], [(), (), (2,), (1, 1), (3, 2)])
    ]
    if name == "matmul":
        left = (k,) if draw(some.integers(0, 3)) == 0 else (*batch[0], n, k)
        right = (k,) if draw(some.integers(0, 3)) == 0 else (*batch[1], k, m)
    elif name == "vecdot":
        left, right = (*batch[0], k), (*batch[1], k)
    else:
        shared = draw(some.sampled_from([(), (k,), (k, 3), (2, k)]))
        left, right = (n, *shared), (*shared, m)
        params["axes"] = len(shared)
        if len(shared) == 2 and draw(some.booleans()):
            left, right = (shared[0], n, shared[1]), (m, shared[1], shared[0])
            params["axes"] = ([0, 2], [2, 1])
    dtype = draw(
        some.sampled_from(["int64", "int8", "bool", "float16", "float32", "float64", "complex64", "complex128"])
    )
    other = draw(some.sampled_from([dtype, dtype, "float64"]))
    mesh = draw(meshes("numpy"))
    arrays, tensors = [], []
    for shape, kind in (left, dtype), (right, other):
        arrays.append(array(shape, kind, draw(some.integers(0, 999))))
        layout = draw(some.sampled_from(["C", "F", "steps", "reversed"]))
        tensors.append(on(mesh, draw(specs(mesh, len(shape))), arrays[-1], layout))
    return name, arrays, tensors, params


def multiplied(examples: int) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(case=products())
    def run(case: Any) -> None:
        name, arrays, tensors, params = case
        with quiet():
            wanted = getattr(np, name)(*arrays, **params)
            found = results(lambda: getattr(st, name)(*tensors, **params))
        assert_close(found, wanted, False)

    run()


@pytest.mark.parametrize("how", ["_cut", "_cut_in_tiles"])
def test_product(how: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(how)
    multiplied(drawn(100, fast=30))


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [{}, {"_FACTORS": (1, 1, 16), "_DEPTH": (1, 1)}, {"_FACTORS": (2, 3, 1000), "_DEPTH": (4, 100)}], ids=str
)
def test_product_at_length(sizes: dict[str, Any]) -> None:
    with cut(**sizes):
        multiplied(600)


@in_blocks
def test_dot() -> None:
    for length, mesh in itertools.product((5, 17), ((1,), (3,), (2, 2))):
        x, y = array((length,), "float64", 1), array((length,), "float64", 2)
        for a, b in itertools.product(all_specs(mesh_of(mesh, "numpy"), 1), repeat=2):
            left, right = on(mesh_of(mesh, "numpy"), a, x), on(mesh_of(mesh, "numpy"), b, y)
            assert_close(results(lambda: st.matmul(left, right)), x @ y, False)  # noqa: B023


@in_blocks
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["matmul", "tensordot", "vecdot"])
def test_every_pair_of_specs(name: str, mesh: tuple[int, ...]) -> None:
    """Rows, columns and the contracted dimension are split by one mesh axis or by two; the transfers are those without
    blocks.
    """
    grid = mesh_of(mesh, "numpy")
    shapes = ((5, 7), (5, 7)) if name == "vecdot" else ((5, 7), (7, 4))
    x, y = (array(s, "float64", k) * 1.1 for k, s in enumerate(shapes))
    wanted = getattr(np, name)(x, y, **({"axes": 1} if name == "tensordot" else {}))
    pairs = itertools.product(all_specs(grid, 2), repeat=2)
    for a, b in strided(pairs, 4, ["matmul", "tensordot", "vecdot"].index(name)):
        left, right = on(grid, a, x), on(grid, b, y, "F")

        def call() -> Any:
            return getattr(st, name)(left, right, **({"axes": 1} if name == "tensordot" else {}))  # noqa: B023

        assert_close(np.asarray(unchanged_in_the_log(call)), wanted, False)


@in_blocks
def test_batches_are_broadcast() -> None:
    mesh = mesh_of((2, 2), "numpy")
    for left, right in [
        ((4, 3, 5), (5, 6)),
        ((1, 3, 5), (4, 5, 6)),
        ((3, 5), (2, 4, 5, 6)),
        ((4, 1, 3, 5), (1, 2, 5, 1)),
    ]:
        x, y = array(left, "float64", 1), array(right, "float64", 2)
        pairs = zip(all_specs(mesh, len(left)), all_specs(mesh, len(right))[::-1], strict=False)
        for a, b in strided(pairs, 3, len(left)):
            assert_close(results(lambda: st.matmul(on(mesh, a, x), on(mesh, b, y))), x @ y, False)  # noqa: B023


@pytest.mark.usefixtures("_cut_in_tiles")
@pytest.mark.parametrize("dtype", ["float64", "int8", "complex64", "bool"])
def test_a_matrix_by_its_own_transpose(dtype: str) -> None:
    """Such a product is symmetric, and only half of it is computed."""
    for rows, columns in (9, 13), (13, 9), (1, 20), (20, 1), (7, 7):
        x = array((rows, columns), dtype, 3)
        for mesh in (1,), (3,), (2, 2):
            grid = mesh_of(mesh, "numpy")
            ways = itertools.product(all_specs(grid, 2), ["C", "F", "steps", "reversed"])
            for spec, layout in strided(ways, 7, rows + len(dtype)):
                placed = on(grid, spec, x, layout)
                assert_close(np.asarray(placed @ placed.T), x @ x.T, False)
                assert_close(np.asarray(placed.T @ placed), x.T @ x, False)
        placed = st.asarray(x)
        other = array((columns, rows), dtype, 5)
        for call, wanted in [
            (lambda z: z @ z.T, x @ x.T),
            (lambda z: st.tensordot(z, z, axes=([1], [1])), np.tensordot(x, x, ([1], [1]))),
            (lambda z: st.tensordot(z, z, axes=([0], [0])), np.tensordot(x, x, ([0], [0]))),
            (lambda z: z @ st.asarray(x.T), x @ x.T),  # noqa: B023
            (lambda z: z @ st.asarray(other), x @ other),  # noqa: B023
        ]:
            assert_close(results(functools.partial(call, placed)), wanted, False)


@pytest.mark.usefixtures("_cut_in_tiles")
def test_what_is_nearly_a_matrix_by_its_own_transpose() -> None:
    a = array((12, 12), "int64", 3)
    for x in (st.asarray(a), on(mesh_of((1,), "numpy"), st.P(), a)):
        assert_close(np.asarray(x @ x), a @ a, False)
        assert_close(np.asarray(x[:6] @ x.T), a[:6] @ a.T, False)
        assert_close(np.asarray(x @ x[:6].T), a @ a[:6].T, False)
        assert_close(np.asarray(x[::-1] @ x.T), a[::-1] @ a.T, False)
        assert_close(np.asarray(x[:6] @ x[6:].T), a[:6] @ a[6:].T, False)
        assert_close(np.asarray(x[::2, :5] @ x[:6, :5].T), a[::2, :5] @ a[:6, :5].T, False)
    c = array((12, 12), "complex128", 3)
    z = st.asarray(c)
    assert_close(np.asarray(z.real @ z.imag.T), c.real @ c.imag.T, False)
    assert_close(np.asarray(z @ z.real.T), c @ c.real.T, False)
    alone = on(mesh_of((1,), "numpy"), st.P(), c)
    assert_close(results(lambda: alone @ alone.T), c @ c.T, False)
    assert_close(results(lambda: st.conj(alone) @ alone.T), c.conj() @ c.T, False)


# -- blocks ----------------------------------------------------------------------------------------


@in_blocks
def test_all_operands_are_split_into_blocks() -> None:
    """Otherwise the tests above would compare NumPy with itself."""
    x = on(mesh_of((2,), "numpy"), st.P("x"), array((20, 30), "float64", 1))
    for name in REDUCTIONS:
        for axis in None, 0, 1:
            with counted(blocked_reduction) as found:
                getattr(st, name)(x, axis=axis)
            assert max(found) > 10, (name, axis)
    calls = {
        "matmul": lambda: x @ x.T,
        "vector": lambda: x @ np.ones(30),
        "tensordot": lambda: st.tensordot(x, x, axes=2),
        "vecdot": lambda: st.vecdot(x, x),
    }
    for name, call in calls.items():
        with counted(blocked_reduction) as found:
            call()
        assert max(found) > 5, name


def test_short_ones_are_not() -> None:
    x = st.ones((300, 300))
    with counted(blocked_reduction) as found:
        st.sum(x), st.var(x, axis=0), st.argmax(x), x[:30] @ x[:, :20]
    assert found == []


@pytest.mark.parametrize("layout", ["C", "F"])
def test_blocks_are_neither_long_nor_short(layout: str) -> None:
    """In blocks that are too short, the calls take time; blocks that are too long exceed the cache, and cannot be
    divided over threads.
    """
    for name, shape, axes in [
        ("sum", (10**7,), [None]),
        ("sum", (2000, 3000), [None, 0, 1]),
        ("sum", (3, 2 * 10**6), [None, 0, 1]),
        ("max", (2 * 10**6, 3), [None, 0, 1]),
        ("any", (200, 100, 300), [None, 0, 1, 2, (0, 2)]),
        ("var", (2000, 3000), [None, 0, 1]),
        ("var", (200, 100, 300), [None, 1, (0, 2)]),
    ]:
        x = laid(np.ones(shape, "float32"), layout)
        block = blocked_reduction._CACHED if MONOIDS[name].several else blocked_reduction._BLOCK
        for axis in axes:
            with counted(blocked_reduction) as found:
                getattr(st, name)(x, axis=axis)
            assert x.size / block / 8 <= max(found) <= 16 * x.size / block, (name, shape, axis)


# -- real sizes ------------------------------------------------------------------------------------


LARGE_ONES = ["sum", "mean", "var", "max", "argmin", "prod"]


@pytest.mark.parametrize("name", LARGE_ONES)
def test_large_reductions(name: str) -> None:
    x = np.random.default_rng(1).normal(size=(1500, 2100)).astype("float32")
    x = 1 + x / 4096 if name == "prod" else x
    ways = itertools.product([((1,), "C"), ((3,), "F"), ((2, 2), "C")], [None, 0, 1])
    for (mesh, layout), axis in strided(ways, 4, LARGE_ONES.index(name)):
        grid = mesh_of(mesh, "numpy")
        placed = on(grid, st.P(*grid.axis_names), x, layout)
        with counted(blocked_reduction) as found:
            result = results(lambda: getattr(st, name)(placed, axis=axis))  # noqa: B023
        assert max(found) > 1
        wanted = getattr(np, name)(x if name in PICKS else x.astype("float64"), axis=axis)
        np.testing.assert_allclose(result, wanted, rtol=0 if name in PICKS else 1e-4, atol=2e-4)


def test_a_large_matrix_by_its_own_transpose() -> None:
    for shape in (700, 400), (400, 700):
        x = np.random.default_rng(1).normal(size=shape)
        for mesh in (1,), (3,), (2, 2):
            grid = mesh_of(mesh, "numpy")
            placed = on(grid, st.P(*grid.axis_names), x)
            np.testing.assert_allclose(np.asarray(placed @ placed.T), x @ x.T, atol=1e-9)
            np.testing.assert_allclose(np.asarray(placed.T @ placed), x.T @ x, atol=1e-9)


@pytest.mark.parametrize("shape", [(10**7,), (1000, 10**4), (10**6, 10), (10, 10**6)], ids=str)
def test_sums_of_single_precision_are_precise(shape: tuple[int, ...]) -> None:
    """The error is that of pairwise summation."""
    x = np.random.default_rng(1).random(shape, "float32")
    wanted = x.sum(dtype="float64")
    turned = np.ascontiguousarray(x.T)
    for placed in st.asarray(x), st.asarray(turned).T, on(mesh_of((1,), "numpy"), st.P(), x):
        assert abs(float(st.sum(placed)) / wanted - 1) <= 1e-6
        assert abs(float(st.mean(placed)) / (wanted / x.size) - 1) <= 1e-6


@pytest.mark.parametrize("shape", [(1000, 10**4), (10**4, 1000)], ids=str)
def test_sums_of_rows_and_columns_are_precise(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).random(shape, "float32")
    for axis in 0, 1:
        wanted = x.sum(axis=axis, dtype="float64")
        assert np.abs(np.asarray(st.sum(st.asarray(x), axis=axis)) / wanted - 1).max() <= 1e-6


LARGE = """
import hashlib, json, sys
import numpy as np, threadpoolctl
import shardtensor as st
from shardtensor.interpreters.execution import plan_cache as running

rng = np.random.default_rng(0)
a, b = rng.normal(size=(2, 1000, 1000))
flat, long = rng.normal(size=(300, 20000)), rng.normal(size=20000)
p, q = rng.normal(size=(2, 10**6))
mesh = st.make_mesh((4,), ("x",))
summed = st.device_put(a, st.NamedSharding(mesh, st.P(None, "x"))), st.device_put(b, st.NamedSharding(mesh, st.P("x")))
calls = {
    "square": (lambda: st.matmul(st.asarray(a), st.asarray(b)), a @ b),
    "shares": (lambda: st.matmul(*summed), a @ b),
    "matrix by vector": (lambda: st.matmul(st.asarray(flat), st.asarray(long)), flat @ long),
    "transposed": (lambda: st.matmul(st.asarray(flat.T.copy()).T, st.asarray(long)), flat @ long),
    "vecdot": (lambda: st.vecdot(st.asarray(p), st.asarray(q)), p @ q),
    "tensordot": (lambda: st.tensordot(st.asarray(flat), st.asarray(flat), axes=2), (flat * flat).sum()),
    "short vecdot": (lambda: st.vecdot(st.asarray(p[:100_000]), st.asarray(q[:100_000])), p[:100_000] @ q[:100_000]),
    "short matrix": (lambda: st.matmul(st.asarray(flat[:2]), st.asarray(long)), flat[:2] @ long),
    "dot": (lambda: st.matmul(st.asarray(p), st.asarray(q)), p @ q),
}
seen = {}
for name, (call, wanted) in calls.items():
    for number, blas in json.loads(sys.argv[1]):
        with st.set_num_threads(number), threadpoolctl.threadpool_limits(blas):
            running._cached_plan.cache_clear()
            try:
                found = np.asarray(call())
                np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
                said = hashlib.sha256(found.tobytes()).hexdigest()
            except (TypeError, AssertionError) as error:
                said = str(error)
        seen.setdefault(name, []).append([number, blas, said])
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def large() -> dict[str, list[Any]]:
    """Returns, for each product, the numbers of threads of the library and of BLAS, and the result; computed in a
    process of its own, where BLAS has its default number of threads.
    """
    env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")} | {"SHARDTENSOR_NUM_DEVICES": "4"}
    few = [(1, None), (7, None), (3, 4)]
    pairs = list(itertools.product((1, 2, 3, 7), (None, 1, 4))) if all_of_them else few
    code = [sys.executable, "-c", LARGE, json.dumps(pairs)]
    done = subprocess.run(code, capture_output=True, text=True, env=env, timeout=200, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *["square", "shares", "matrix by vector", "transposed", "vecdot", "tensordot", "short matrix"],
        "short vecdot",
        "dot",
    ],
)
def test_large_products_do_not_depend_on_threads(name: str, large: dict[str, list[Any]]) -> None:
    """The result depends neither on the number of the library's threads nor on that of BLAS."""
    assert len({said for number, blas, said in large[name]}) == 1, large[name]
    assert len(large[name][0][-1]) == 64


@pytest.mark.parametrize("name", ["short vecdot", "short matrix"])
def test_short_products_do_not_depend_on_our_threads(name: str, large: dict[str, list[Any]]) -> None:
    assert len({said for number, blas, said in large[name] if blas is None}) == 1


# -- floating-point errors -------------------------------------------------------------------------

BIG = np.full(50, 3e38, "float32")
SQUARE = np.full((9, 9), 3e38, "float32")
COMPLAINTS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda xp, x: xp.sum(x),
    "sum of rows": lambda xp, x: xp.sum(x.reshape(5, 10), axis=0),
    "prod": lambda xp, x: xp.prod(x),
    "mean": lambda xp, x: xp.mean(x),
    "max": lambda xp, x: xp.max(x),
    "matmul": lambda xp, x: xp.matmul(x.reshape(5, 10), x.reshape(10, 5)),
}


@in_blocks
@pytest.mark.parametrize("mode", ["warn", "raise", "call", "log", "ignore"])
@pytest.mark.parametrize("name", COMPLAINTS)
def test_floating_point_errors_are_reported_as_by_numpy(name: str, mode: str) -> None:
    """There is one report for each call, whatever the number of blocks."""
    x, function = st.asarray(BIG), COMPLAINTS[name]
    wanted = heard(lambda: function(np, BIG), mode)
    for number in 1, 2, 7:
        with st.set_num_threads(number):
            assert heard(lambda: function(st, x), mode) == wanted


@in_blocks
@pytest.mark.parametrize("name", ["vecdot", "tensordot"])
def test_products_have_their_names(name: str) -> None:
    params = {"axes": 1} if name == "tensordot" else {}
    x = st.asarray(SQUARE)
    wanted = heard(lambda: getattr(np, name)(SQUARE, SQUARE, **params), "warn")
    assert heard(lambda: getattr(st, name)(x, x, **params), "warn") == wanted


@in_blocks
def test_variances_complain_once() -> None:
    x = st.asarray(BIG)
    assert heard(lambda: st.var(x), "warn") == heard(lambda: np.var(BIG), "warn")


@in_blocks
def test_warnings_are_errors_where_they_are() -> None:
    x = st.asarray(BIG)
    for number in 1, 3:
        with st.set_num_threads(number), warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="overflow encountered in reduce"):
                st.sum(x)
            assert float(st.max(x)) == BIG[0]


@in_blocks
@pytest.mark.parametrize("number", [1, 3])
def test_an_error_in_a_block_comes_through(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on the threads of BLAS is restored."""
    x = st.asarray(array((40, 30), "float64", 1))
    before, calls, original = st.cache_info().used, itertools.count(), np.mean

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls) == 5:
            raise ZeroDivisionError("here")
        return original(*args, **options)

    with st.set_num_threads(number):
        monkeypatch.setattr(np, "mean", fail)
        with pytest.raises(ZeroDivisionError, match="here"):
            st.var(x)
        monkeypatch.undo()
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            # What a helper thread has made and the caller drops is freed when that thread runs again or ends.
            threads._pool.dissolve()
        assert st.cache_info().used == before
        np.testing.assert_allclose(float(st.var(x)), np.var(np.asarray(x)))
