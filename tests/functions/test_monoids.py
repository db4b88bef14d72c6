"""Monoids, which combine the results of shards: each compared with NumPy's reduction, and the order of combination."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend.registry import load
from shardtensor.communication.all_reduce import Group, ReduceOps, all_reduce, combine, reduction_tree, tree_of
from shardtensor.communication.schedules import AllReduce, sent
from shardtensor.core import OPS
from shardtensor.functions.building import monoids
from shardtensor.functions.building.monoids import MONOIDS
from shardtensor.interpreters.execution import combination, one_pass, plan_cache
from shardtensor.sharding.mesh import groups_along
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.value import cells_of
from tests.draws import drawn
from tests.layouts import (
    MESHES,
    NAMES,
    READ_ONLY,
    all_specs,
    array,
    by_tree,
    everywhere,
    mesh_of,
    meshes,
    on_host,
    quiet,
    specs,
)

Shape = tuple[int, ...]
Part = tuple[slice, ...]

PICKS = ["max", "min", "nanmax", "nanmin", "argmax", "argmin"]  # not defined for no elements
LETTERS = {"b": "bool", "i": "int8", "u": "uint8", "f": "float32", "c": "complex64"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """NumPy warns of means of nothing, overflows and NaN; so does what runs on it."""
    with quiet():
        yield


# -- monoids alone ---------------------------------------------------------------------------------


def state_of(name: str, x: np.ndarray, part: Part, axis: Any, **params: Any) -> Any:
    """Returns the state of the shard ``x[part]``."""
    box = tuple((s.start, s.stop) for s in part)
    context = ShardContext((), (box,), (), (x.shape,), answer(name, x[(slice(0, 1),) * x.ndim], axis, **params).dtype)
    partial = MONOIDS[name].partial
    if partial is None:
        return getattr(np, name)(x[part], axis=axis, **params)
    return partial(np, context, x[part], axis=axis, **params)


def finished(name: str, x: np.ndarray, state: Any, axis: Any, **params: Any) -> np.ndarray:
    dtype = answer(name, x[(slice(0, 1),) * x.ndim], axis, **params).dtype
    context = ShardContext.everywhere((), [x.shape], dtype)
    return np.asarray(MONOIDS[name].finish(np, context, state, axis=axis, **params))


def answer(name: str, x: np.ndarray, axis: Any, **params: Any) -> np.ndarray:
    return np.asarray(getattr(np, name)(x, axis=axis, **params))


def merged(name: str, states: list[Any]) -> Any:
    return by_tree(functools.partial(MONOIDS[name].merge, np), states)


def bracketed(name: str, states: list[Any], data: Any) -> Any:
    """The states in their order, merged in a tree that is drawn."""
    states = list(states)
    while len(states) > 1:
        i = data.draw(some.integers(0, len(states) - 2))
        states[i : i + 2] = [MONOIDS[name].merge(np, states[i], states[i + 1])]
    return states[0]


REDUCTIONS = sorted(set(MONOIDS) - {"diagonal", "fold", "trace", "vector_norm"})
"""Monoids of reductions with NumPy's ``axis`` and ``keepdims`` only."""


@some.composite
def cuts(draw: Any, shape: Shape, axis: Any, *, empty: bool) -> list[Part]:
    """Draws parts of the reduced dimensions, in row-major order; some are empty, if that is allowed."""
    ndim = len(shape)
    gone = range(ndim) if axis is None else [a % ndim for a in (axis if isinstance(axis, tuple) else (axis,))]
    runs = []
    for d, n in enumerate(shape):
        at = sorted(draw(some.lists(some.integers(0, n), max_size=3))) if d in gone else []
        runs.append([slice(a, b) for a, b in itertools.pairwise([0, *at, n]) if b > a or empty] or [slice(0, n)])
    return list(itertools.product(*runs))


def assert_reduced(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    if wanted.dtype.kind in "biu" or name[-3:] in ("max", "min"):
        np.testing.assert_array_equal(found, wanted)
    else:
        limit = {"float16": 4e-3, "float32": 1e-5, "complex64": 1e-5}.get(str(wanted.dtype), 1e-12)
        np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit)


@some.composite
def problems(
    draw: Any, name: str, dtypes: Any = ("bool", "int8", "uint8", "int64", "float16", "float32", "float64", "complex64")
) -> Any:
    low = 1 if name in PICKS else 0
    shape = tuple(draw(some.lists(some.integers(low, 7), min_size=1, max_size=3)))
    ndim = len(shape)
    axes: list[Any] = [None, *range(-ndim, ndim)]
    if not name.startswith("arg"):
        axes += [a for n in range(ndim + 1) for a in itertools.combinations(range(ndim), n)]
    axis = draw(some.sampled_from(axes))
    x = array(shape, draw(some.sampled_from(dtypes)), draw(some.integers(0, 999)))
    if name.endswith("prod") and x.dtype.kind in "fc":
        x = 1 + x / 64  # products that neither vanish nor overflow
    return x, axis, draw(some.booleans())


@pytest.mark.parametrize("name", REDUCTIONS)
def test_against_numpy(name: str) -> None:
    @hypothesis.settings(max_examples=drawn(80))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        x, axis, keepdims = data.draw(problems(name))
        params: dict[str, Any] = {"keepdims": keepdims}
        if name in ("var", "std"):
            params["correction"] = data.draw(some.sampled_from([0.0, 1, 0.5]))
        if axis == () and name in ("mean", "var", "std"):
            axis = None
        wanted = answer(name, x, axis, **params)
        parts = data.draw(cuts(x.shape, axis, empty=name not in (*PICKS, "var", "std")))
        states = [state_of(name, x, p, axis, **params) for p in parts]
        assert_reduced(finished(name, x, merged(name, states), axis, **params), wanted, name)
        assert_reduced(finished(name, x, bracketed(name, states, data), axis, **params), wanted, name)  # associative

    run()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_exact_ones_know_no_order(name: str) -> None:
    """The result of an `exact` monoid does not depend on the grouping of the elements or on the order of the merges."""
    kinds = MONOIDS[name].exact
    if not kinds:
        assert name in ("mean", "var", "std")
        return

    @hypothesis.settings(max_examples=drawn(60))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        x, axis, keepdims = data.draw(
            problems(name, [LETTERS[k] for k in kinds if k != "f"] + ["float64"] * ("f" in kinds))
        )
        if answer(name, x, axis).dtype.kind not in kinds:
            return
        if x.dtype.kind in "fc":
            x.flat[data.draw(some.integers(0, x.size - 1))] = np.nan
        parts = data.draw(some.permutations(data.draw(cuts(x.shape, axis, empty=name not in PICKS))))
        states = [state_of(name, x, p, axis, keepdims=keepdims) for p in parts]
        found = finished(name, x, bracketed(name, states, data), axis, keepdims=keepdims)
        wanted = answer(name, x, axis, keepdims=keepdims)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)

    run()


def test_every_operator_that_combines_has_a_monoid() -> None:
    importlib.import_module(
        "shardtensor.functions.ufunc_protocol.ufunc_methods"
    )  # Its operators are declared on first use.
    assert {op.combine for op in OPS.values() if op.combine} <= set(MONOIDS)
    assert {name for name in MONOIDS if OPS[name].combine == name} == set(MONOIDS)


def test_variance_does_not_cancel() -> None:
    """The mean is 1e9 times the deviation: Σx² - (Σx)²/n would have no digit left."""
    x = 1e9 + np.random.default_rng(1).normal(size=1000)
    parts: list[Part] = [(slice(a, a + 100),) for a in range(0, 1000, 100)]
    states = [state_of("var", x, p, None) for p in parts]
    exact = np.var(x - 1e9)  # what is subtracted is exact
    np.testing.assert_allclose(finished("var", x, merged("var", states), None), exact, rtol=1e-7)


def test_mean_of_half_precision_is_summed_in_single() -> None:
    x = np.full(4096, 100, np.float16)  # the sum is beyond float16
    states = [state_of("mean", x, (slice(a, a + 1024),), None) for a in range(0, 4096, 1024)]
    found = finished("mean", x, merged("mean", states), None)
    assert found.dtype == np.float16
    assert found == 100


def test_place() -> None:
    context = ShardContext.everywhere((2, 3), [(2, 3), ()], np.dtype("f8"))
    assert context.box == ((0, 2), (0, 3))
    assert context.boxes == (((0, 2), (0, 3)), ())
    assert context.local_shape == (2, 3)
    assert ShardContext(((1, 4), (2, 2)), (), (9, 9), (), None).local_shape == (3, 0)


# -- NaN and ties, on devices ----------------------------------------------------------------------


def on(mesh: st.Mesh, spec: st.P, x: np.ndarray) -> st.ShardedTensor:
    return st.device_put(x, st.NamedSharding(mesh, spec))


@pytest.mark.parametrize("name", ["max", "min", "mean", "sum", "var", "std", "prod"])
def test_nan_is_never_lost(name: str, backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    for spec in all_specs(mesh, 1):
        for at in range(7):
            x = np.arange(7.0)
            x[at] = np.nan
            assert np.isnan(float(getattr(st, name)(on(mesh, spec, x)))), (spec, at)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_first_nan_wins(name: str, backend: str) -> None:
    """The parts have any layout; P(('y', 'x')) assigns later parts to earlier devices of the mesh."""
    mesh = mesh_of((2, 2), backend)
    for spec in all_specs(mesh, 1):
        for a, b in itertools.combinations(range(7), 2):
            x = np.array([3.0, -9, 9, 0, -9, 9, 1])
            x[[a, b]] = np.nan
            assert int(getattr(st, name)(on(mesh, spec, x))) == a


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", ["int64", "float64", "bool", "complex128"])
def test_the_first_tie_wins(name: str, dtype: str, backend: str) -> None:
    mesh = mesh_of((2, 3), backend)
    rng = np.random.default_rng(5)
    x = rng.integers(0, 2, (5, 7)).astype(dtype)
    for spec in all_specs(mesh, 2):
        placed = on(mesh, spec, x)
        for axis, keepdims in itertools.product([None, 0, 1, -1], [False, True]):
            found = getattr(st, name)(placed, axis=axis, keepdims=keepdims)
            wanted = getattr(np, name)(x, axis=axis, keepdims=keepdims)
            np.testing.assert_array_equal(np.asarray(found), wanted)
            assert found.dtype == wanted.dtype
    constant = on(mesh, st.P(("y", "x")), np.zeros(11))
    assert int(getattr(st, name)(constant)) == 0


@pytest.mark.parametrize("name", REDUCTIONS)
def test_parts_without_elements(name: str, backend: str) -> None:
    """There are more devices than rows, or the array is empty and NumPy has a result."""
    mesh = mesh_of((8,), backend)
    for shape in [(1,), (3,), (2, 5), (5, 1, 2), (0,), (0, 3), (3, 0), (2, 0, 3)]:
        x = array(shape, "float64", 3)
        for axis, d in itertools.product([None, *range(len(shape))], range(len(shape))):
            placed = on(mesh, st.P(*[None] * d, "x"), x)
            try:
                wanted = answer(name, x, axis)
            except ValueError:
                with pytest.raises(st.ShapeError, match=name):
                    getattr(st, name)(placed, axis=axis)
            else:
                assert_reduced(np.asarray(getattr(st, name)(placed, axis=axis)), wanted, name)


# -- the order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_groups_along(shape: Shape) -> None:
    mesh = mesh_of(shape, "numpy")
    places = list(np.ndindex(*shape))
    for count in range(len(shape) + 1):
        for axes in itertools.permutations(mesh.axis_names, count):
            kept = [d for d, name in enumerate(mesh.axis_names) if name not in axes]
            wanted: dict[Shape, list[int]] = {}
            for position, context in enumerate(places):
                wanted.setdefault(tuple(context[d] for d in kept), []).append(position)
            assert groups_along(mesh, axes) == list(wanted.values())


class Watched:
    """Reduction operators on lists of strings, which record the merges and the messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, int]] = []

    def send(self, state: list[str], source: int, destination: int) -> list[str]:
        if source != destination:
            self.sent.append((source, destination, len(state)))
        return state

    @property
    def ways(self) -> ReduceOps:
        return ReduceOps(
            self.send,
            lambda k, a, b: [f"({x}{y}@{k})" for x, y in zip(a, b, strict=True)],
            lambda k, state: [f"{x}." for x in state],
            lambda k, state, begin, end: state[begin:end],
            lambda k, parts: [x for part in parts for x in part],
        )


def group_of(members: list[int], contributors: list[int], size: int, chunked: bool) -> Group:
    return Group(members, tuple([k in contributors for k in members]), (len(members),), size, chunked)


def test_groups_are_reduced_along_the_tree() -> None:
    watched, states = Watched(), [[c] for c in "abcdef"]
    for members, text in ([0, 2, 4], "((ac@0)e@0)."), ([1, 3, 5], "((bd@1)f@1)."), ([3], "d."):
        found = all_reduce(group_of(members, members, 1, False), states, watched.ways)
        assert found == {k: [text] for k in members}
    assert watched.sent == [(2, 0, 1), (4, 0, 1), (0, 2, 1), (0, 4, 1), (3, 1, 1), (5, 1, 1), (1, 3, 1), (1, 5, 1)]
    assert states == [[c] for c in "abcdef"]
    found = all_reduce(group_of([*range(6)], [0, 2, 3, 4, 5], 1, False), states, watched.ways)
    assert found[0] == ["((a(cd@2)@0)(ef@4)@0)."]


def test_large_results_are_combined_in_chunks_along_the_same_tree() -> None:
    watched, states = Watched(), [[f"{c}{i}" for i in range(5)] for c in "abcd"]
    found = all_reduce(group_of([0, 1, 2, 3], [0, 1, 3], 5, True), states, watched.ways)
    wanted = [f"((a{i}b{i}@{k})d{i}@{k})." for i, k in enumerate([0, 0, 1, 1, 3])]
    assert found == dict.fromkeys(range(4), wanted)


@some.composite
def grids(draw: Any) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    sizes = tuple(draw(some.lists(some.integers(1, 6), min_size=1, max_size=3)))
    return sizes, tuple(draw(some.lists(some.booleans(), min_size=math.prod(sizes), max_size=math.prod(sizes))))


@hypothesis.given(drawn=grids())
def test_the_tree_has_the_largest_power_of_two_on_the_left(drawn: Any) -> None:
    sizes, contributes = drawn
    merge = lambda a, b: b if a is None else a if b is None else (a, b)  # noqa: E731
    wanted = by_tree(merge, [k if here else None for k, here in enumerate(contributes)], sizes)
    if not any(contributes):
        return
    contributors = [k for k, here in enumerate(contributes) if here]
    tree = tree_of(contributes, sizes)
    assert combine(tree, contributors.__getitem__, lambda a, b: (a, b)) == wanted
    held: dict[int, Any] = {k: k for k in contributors}
    for merges in reduction_tree(contributes, sizes):
        ends = [k for pair in merges for k in pair]
        assert len(set(ends)) == len(ends)  # In a round a device sends or receives one state.
        for left, right in merges:
            held[left] = (held[left], held.pop(right))
    assert list(held.values()) == [wanted]
    assert list(held) == contributors[:1]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("group", "contributors"), [([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([5, 2, 7], [2, 7]), ([1, 3, 4], [1, 3, 4])]
)
def test_messages_are_what_is_sent(group: list[int], contributors: list[int], chunked: bool) -> None:
    watched, states = Watched(), [["x"] * 7] * 8
    made = group_of(group, contributors, 7, chunked)
    all_reduce(made, states, watched.ways)
    schedule = AllReduce(np.array(group), made.contributes, made.axes, chunked, 7, 7, "sum")
    wanted = sorted(
        m for phase in schedule.phases() for block in phase for m in zip(*map(list, sent(block)), strict=True)
    )
    assert sorted(watched.sent) == wanted
    n, m = len(contributors), len(group)
    assert sum(size for *_, size in wanted) == 7 * (n - 1 + m - 1)
    if chunked and n == m:  # no device sends or receives more than 2 (n - 1) / n of the result, but for whole elements
        for k in group:
            assert sum(size for a, *_, size in wanted if a == k) <= 2 * (n - 1) * -(-7 // n)


@pytest.mark.parametrize("name", ["sum", "mean", "var", "argmax", "prod", "max"])
def test_large_results_have_the_bits_of_small_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are combined in chunks, or on the first device; one of the shards is empty."""
    mesh = st.make_mesh((3, 2), ("x", "y"), devices=st.devices("checked"))
    x = np.random.default_rng(0).standard_normal((2, 5, 4)).astype("float32")
    for spec in st.P(("x", "y")), st.P("y", "x"), st.P(None, ("y", "x")):
        given = st.device_put(x, st.NamedSharding(mesh, spec))
        found = []
        for limit in 1, 1 << 30:
            monkeypatch.setattr(combination, "CHUNKED_FROM", limit)
            plan_cache._cached_plan.cache_clear()
            with st.transfers() as log:
                found.append(getattr(st, name)(given, axis=(0, 1) if name in ("sum", "max") else 0))
            if limit == 1:
                first = log.bytes
            assert log.bytes == first == log.copied
        few, many = found
        assert_same_bits(few, many)


def assert_same_bits(a: st.ShardedTensor, b: st.ShardedTensor) -> None:
    for left, right in zip(a.addressable_shards, b.addressable_shards, strict=True):
        assert on_host(left.data, left.device).tobytes() == on_host(right.data, right.device).tobytes()


def computed(device: st.Device, name: str, *args: Any, **params: Any) -> Any:
    """Returns the exact result of a function of host arrays on a device, because libraries add in different orders."""
    if device.backend in READ_ONLY:
        return getattr(np, name)(*args, **params)
    backend = load(device.backend)
    with backend.on(device):
        arrays = [x if isinstance(x, int) else backend.from_host(x, device) for x in args]
        return backend.to_host(getattr(backend.xp, name)(*arrays, **params), device)


def tree_fold(x: np.ndarray, sharding: st.NamedSharding, axis: Any, keepdims: bool, name: str) -> dict[Any, np.ndarray]:
    """Returns the result that each device must have: the sums of the parts, combined along the tree of each mesh axis.
    Where nothing is combined, it is a slice of the sums of the cell, which is in one memory: NumPy adds a single column
    in another order than one of several columns.
    """
    mesh = sharding.mesh
    gone = range(x.ndim) if axis is None else [a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,))]
    partial_axes = {axis for d in gone for axis in sharding.spec.chains_of(x.ndim)[d]}
    kept = [d for d, axis in enumerate(mesh.axis_names) if axis not in partial_axes]
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    index = sharding.devices_indices_map(x.shape)
    merge, reduce = ("multiply", "prod") if name == "prod" else ("add", "sum")
    out: dict[Any, Any] = {}
    if all(sizes[a] == 1 for a in partial_axes):
        held = cells_of(sharding, x.shape)
        boxes = [tuple([slice(*ends) for ends in held.grid.box(n)]) for n in range(len(held.positions))]
        totals = [computed(mesh.flat[0], reduce, x[box], axis=axis, keepdims=True) for box in boxes]
        for device, (n, within) in zip(mesh.flat, held.shards, strict=True):
            cut = tuple([slice(None) if k in gone or within is None else within[k] for k in range(x.ndim)])
            out[device] = totals[n][cut] if keepdims else totals[n][cut].squeeze(tuple(gone))
    for here in [] if out else np.ndindex(*mesh.axis_sizes):
        device, states = mesh.devices[here], []
        for there in np.ndindex(*mesh.axis_sizes):
            if all(here[d] == there[d] for d in kept):
                part = x[index[mesh.devices[there]]]
                states.append(computed(device, reduce, part, axis=axis, keepdims=keepdims) if part.size else None)

        def merged_on(a: Any, b: Any, device: Any = device) -> Any:
            return b if a is None else a if b is None else computed(device, merge, a, b)

        along = [n for axis, n in sizes.items() if axis in partial_axes]
        total = by_tree(merged_on, states, along)
        if total is not None:
            out[device] = total
    if name == "mean":
        count = math.prod(x.shape[d] for d in gone)
        out = {device: computed(device, "divide", total, count) for device, total in out.items()}
    return out


@some.composite
def sums(draw: Any, backend: str, dtypes: Any = ("float32", "float64", "complex64", "complex128", "float16")) -> Any:
    """Numbers of very different sizes, so that the order shows in the last bits; a sharding; axes."""
    shape = tuple(draw(some.lists(some.integers(1, 13), min_size=1, max_size=3)))
    rng = np.random.default_rng(draw(some.integers(0, 10**6)))
    x = rng.normal(size=shape) * 10 ** rng.uniform(-2, 2, shape)
    dtype = np.dtype(draw(some.sampled_from(dtypes)))
    if dtype.kind == "c":
        x = x + 1j * rng.normal(size=shape)
    mesh = draw(meshes(backend))
    sharding = st.NamedSharding(mesh, draw(specs(mesh, len(shape))))
    axes = [None, *[a for n in range(1, len(shape) + 1) for a in itertools.combinations(range(len(shape)), n)]]
    return x.astype(dtype), sharding, draw(some.sampled_from(axes)), draw(some.booleans())


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("name", ["sum", "prod", "mean"])
def test_sums_are_combined_along_the_tree(name: str, watched: bool, backend: str) -> None:
    """The bits are compared on every device, except for means of float16 and complex numbers, which NumPy rounds
    differently.
    """

    @hypothesis.settings(max_examples=drawn(150))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        dtypes = ["float32", "float64"] + ["float16", "complex64", "complex128"] * (name != "mean")
        x, sharding, axis, keepdims = data.draw(sums(backend, dtypes))
        placed = st.device_put(x, sharding)
        if watched:
            with st.transfers():
                found = getattr(st, name)(placed, axis=axis, keepdims=keepdims)
        else:
            found = getattr(st, name)(placed, axis=axis, keepdims=keepdims)
        wanted = tree_fold(x, sharding, axis, keepdims, name)
        kept = set(range(x.ndim)) - set(range(x.ndim) if axis is None else axis)
        for shard in found.addressable_shards:
            if any(
                x.shape[d] and not len(range(*s.indices(x.shape[d]))) for d, s in _box(sharding, shard.device, x, kept)
            ):
                continue  # it holds nothing of the result
            right = np.asarray(wanted[shard.device])
            left = on_host(shard.data, shard.device)
            assert left.shape == right.shape
            assert left.dtype == right.dtype == x.dtype
            assert left.tobytes() == right.tobytes(), (x.tolist(), sharding, axis)

    run()


def _box(sharding: st.NamedSharding, device: Any, x: np.ndarray, kept: set[int]) -> list[tuple[int, slice]]:
    index = sharding.devices_indices_map(x.shape)[device]
    return [(d, index[d]) for d in sorted(kept)]


@everywhere
def test_the_tree_by_hand(backend: str) -> None:
    """1e16 + 1 + 1 - 1e16 depends on the order: it is 0 if the large number comes first, and 2 if it comes last."""
    mesh = mesh_of((4,), backend)
    for x, wanted in [
        ([1e16, 1, 1, -1e16], 0),
        ([1, 1, 1e16, -1e16], 2),
        ([1e16, -1e16, 1, 1], 2),
        ([1, 1e16, 1, -1e16], 0),
    ]:
        assert float(st.sum(on(mesh, st.P("x"), np.array(x)))) == wanted
    # The devices of P(('y', 'x')) hold parts 0, 2, 1, 3 in mesh order.
    square = mesh_of((2, 2), backend)
    x = np.array([1, 1e16, 1, -1e16])
    assert float(st.sum(on(square, st.P(("x", "y")), x))) == 0
    assert float(st.sum(on(square, st.P(("y", "x")), x))) == 2
    with st.transfers():
        assert float(st.sum(on(square, st.P(("y", "x")), x))) == 2


# -- where devices share one memory: all partial sums in one pass ----------------------------------

LENGTHS = some.sampled_from([1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 130, 200, 257])
ROWS = some.one_of(LENGTHS, some.integers(1, 1100))


@some.composite
def row_sums(draw: Any) -> Any:
    rest = draw(some.lists(LENGTHS, max_size=2))
    while math.prod(rest) > 2000:
        rest.pop()
    shape = (min(draw(ROWS), 40_000 // math.prod(rest)), *rest)
    rng = np.random.default_rng(draw(some.integers(0, 10**6)))
    x = rng.normal(size=shape) * 10 ** rng.uniform(-3, 3, shape)
    axis = draw(
        some.sampled_from([a for a in (None, 0, (0, 1), (0, 2), (0, 1, 2)) if a in (None, 0) or max(a) < len(shape)])
    )
    grid = draw(some.sampled_from(MESHES))
    axes = draw(some.lists(some.sampled_from(NAMES[: len(grid)]), unique=True, min_size=1))
    split = draw(some.integers(0, x.ndim - 1))  # The dimension that was first, and is reduced, may be another one.
    if split:
        axis = axis if axis is None or axis == tuple(range(x.ndim)) else split
    return np.moveaxis(x, 0, split), axis, draw(some.booleans()), grid, st.P(*[None] * split, tuple(axes))


def bits(x: st.ShardedTensor) -> list[bytes]:
    return [on_host(s.data, s.device).tobytes() for s in x.addressable_shards]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["sum", "mean", "prod", "var", "std"], ["float32", "float64"]),
        *itertools.product(["var"], ["float16", "int16", "bool"]),
    ],
)
def test_fast_path_gives_the_bits_of_the_general_way(name: str, dtype: str) -> None:
    @hypothesis.settings(max_examples=drawn(120))
    @hypothesis.given(case=row_sums())
    def run(case: Any) -> None:
        x, axis, keepdims, grid, spec = case
        x = np.clip(x / 8 + 1, 0.5, 1.5).astype(dtype) if name == "prod" else x.astype(dtype)
        fast, general = (on(mesh_of(grid, backend), spec, x) for backend in ("numpy", "checked"))
        function = getattr(st, name)
        found = function(fast, axis=axis, keepdims=keepdims)
        wanted = function(general, axis=axis, keepdims=keepdims)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert found.sharding.spec == wanted.sharding.spec
        with st.transfers():  # Transfers are recorded, so that the general plan runs.
            assert bits(function(fast, axis=axis, keepdims=keepdims)) == bits(found)
        with st.transfers():
            counted = function(fast.T, axis=None)
        assert bits(function(fast.T, axis=None)) == bits(counted)
        if spec[0]:  # NumPy adds strided shards in another order than copies.
            assert bits(found) == bits(wanted)

    run()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_fast_products_give_the_bits_of_the_general_way(dtype: str) -> None:
    @hypothesis.settings(max_examples=drawn(60))
    @hypothesis.given(
        depth=some.integers(1, 40),
        sides=some.tuples(*[some.sampled_from([0, 1, 2, 5, 9])] * 2),
        lead=some.sampled_from([(), (2,), (2, 1)]),
        flat=some.sampled_from(["", "left", "right", "both"]),
        grid=some.sampled_from(MESHES),
        seed=some.integers(0, 100),
    )
    def run(depth: int, sides: Any, lead: Any, flat: str, grid: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lead = lead if not flat else ()
        x, y = [
            (rng.normal(size=s) * 10 ** rng.uniform(-3, 3, s)).astype(dtype)
            for s in ((*lead, sides[0], depth), (*lead, depth, sides[1]))
        ]
        x = x[..., 0, :] if flat in ("left", "both") and sides[0] else x
        y = y[..., 0].copy() if flat in ("right", "both") and sides[1] else y
        subscripts = f"...{'k' if x.ndim == 1 else 'ik'},...{'k' if y.ndim == 1 else 'kj'}"
        axis = tuple(NAMES[: len(grid)])
        split = [st.P(*[None] * (x.ndim - 1), axis), st.P(*[None] * max(y.ndim - 2, 0), axis)]
        for kept in (split, [st.P(), split[1]]):
            operands = [on(mesh_of(grid, "numpy"), spec, z) for spec, z in zip(kept, (x, y), strict=True)]
            functions = [st.matmul, functools.partial(st.einsum, subscripts)]
            for function in functions if lead else [*functions, functools.partial(st.tensordot, axes=1)]:
                fast = function(*operands)
                with st.transfers():  # Transfers are recorded, so that the general plan runs.
                    general = function(*operands)
                assert (fast.shape, fast.dtype, fast.sharding) == (general.shape, general.dtype, general.sharding)
                assert bits(fast) == bits(general)

    run()


def test_fast_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare the general path with itself."""
    taken = []

    in_one_pass = one_pass.in_one_pass

    def spy(strategies: Any, monoid: Any, partial_axes: Any, general: Any) -> Any:
        plan = in_one_pass(strategies, monoid, partial_axes, general)
        taken.append((strategies.name, plan is not general))
        return plan

    monkeypatch.setattr(one_pass, "in_one_pass", spy)
    monkeypatch.setattr(
        plan_cache, "_cached_plan", functools.lru_cache(plan_cache._cached_plan.__wrapped__)
    )  # of other tests
    mesh = mesh_of((4,), "numpy")
    x = on(mesh, st.P("x"), np.ones((13, 3)))
    st.sum(x)
    st.mean(x, axis=0)
    st.prod(x, axis=(0, 1), keepdims=True)
    st.var(x, axis=0)
    st.std(x, keepdims=True)
    st.matmul(x.T, x)
    assert taken == [(name, True) for name in ("sum", "mean", "prod", "var", "std", "matmul")]
    taken.clear()
    st.sum(on(mesh_of((2, 2), "numpy"), st.P("x", "y"), np.ones((13, 5))))
    st.var(on(mesh, st.P("x"), np.ones((13, 3), complex)), axis=0)
    assert [fast for _, fast in taken] == [False, False]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_who_counts_changes_no_bit(name: str, backend: str) -> None:
    """Under `st.transfers` reductions use the general path; the bits on one mesh are the same."""

    @hypothesis.settings(max_examples=drawn(60))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        x, sharding, axis, keepdims = data.draw(sums(backend))
        if name.startswith("arg"):
            axis = None if axis is None else axis[0]
        placed = st.device_put(x, sharding)
        alone = getattr(st, name)(placed, axis=axis, keepdims=keepdims)
        with st.transfers():
            counted = getattr(st, name)(placed, axis=axis, keepdims=keepdims)
        assert counted.sharding == alone.sharding
        assert bits(counted) == bits(alone)

    run()


@pytest.mark.parametrize("name", ["max", "min"])
def test_who_counts_does_not_change_the_sign_of_zero(name: str) -> None:
    """0.0 and -0.0 are equal, and which of them NumPy takes depends on how the elements are grouped."""
    mesh = mesh_of((2,), "numpy")
    for seed in range(40):
        x = on(mesh, st.P("x"), np.where(np.random.default_rng(seed).random(25) < 0.5, -0.0, 0.0))
        alone = getattr(st, name)(x)
        with st.transfers():
            counted = getattr(st, name)(x)
        assert np.signbit(float(alone)) == np.signbit(float(counted)), seed


@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_same_bits_every_time(name: str, backend: str) -> None:
    mesh = mesh_of((2, 3), backend)
    x = np.random.default_rng(3).normal(size=(37, 5)).astype("float32")
    placed = [on(mesh, st.P(("y", "x")), x) for _ in range(5)]
    assert len({tuple(bits(getattr(st, name)(p, axis=0))) for p in placed}) == 1


def fresh_plans() -> Any:
    """Returns the cache of plans, without those of other tests."""
    return functools.lru_cache(plan_cache._cached_plan.__wrapped__)


@pytest.mark.parametrize("name", ["sum", "prod", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_memory_orders_give_the_bits_of_the_general_way(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums along one dimension are computed in one pass in any order of the dimensions; others are not."""
    fast, general = fresh_plans(), fresh_plans()
    in_one_pass = one_pass.in_one_pass

    @hypothesis.settings(max_examples=drawn(60))
    @hypothesis.given(
        shape=some.lists(some.sampled_from([1, 2, 3, 5, 8, 13, 40]), min_size=2, max_size=3).map(tuple),
        axis=some.integers(0, 2),
        keepdims=some.booleans(),
        grid=some.sampled_from([(4,), (8,), (2, 2), (3, 2)]),
        split=some.integers(0, 2),
        every=some.booleans(),
        seed=some.integers(0, 100),
    )
    def run(shape: Shape, axis: int, keepdims: bool, grid: Any, split: int, every: bool, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x = (1 + rng.normal(size=shape) / 9 * 10 ** rng.uniform(-3, 0, shape)).astype(dtype)
        axes: list[Any] = [None] * len(shape)
        axes[split % len(shape)] = tuple(NAMES[: len(grid)])
        order = rng.permutation(len(shape)).tolist()
        found = []
        for cache, function in ((fast, in_one_pass), (general, lambda s, m, p, general: general)):
            monkeypatch.setattr(plan_cache, "_cached_plan", cache)
            monkeypatch.setattr(one_pass, "in_one_pass", function)
            turned = st.permute_dims(on(mesh_of(grid, "numpy"), st.P(*axes), x), tuple(order))
            found.append(getattr(st, name)(turned, axis=None if every else axis % len(shape), keepdims=keepdims))
        assert found[0].sharding == found[1].sharding
        assert bits(found[0]) == bits(found[1])

    run()


def test_which_memory_orders_are_dense() -> None:
    assert one_pass._are_dense((8, 16), (2, 3), 8)
    assert one_pass._are_dense((24, 8, 8), (2, 1, 3), 8)
    assert not one_pass._are_dense((8, 32), (2, 3), 8)
    assert not one_pass._are_dense((0, 8), (2, 3), 8)
    assert not one_pass._are_dense((-24, 8), (2, 3), 8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 4, 5, 8, 23])
def test_squares_are_added_in_rows(dtype: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are shorter than those added at once, that consist of them, and that have a rest."""
    monkeypatch.setattr(monoids, "_ROW", 4)
    x = np.random.default_rng(columns).integers(-9, 9, (3, 2, columns)).astype(dtype)  # whose sums are exact
    for axes in ((2,), (1, 2), (0, 1, 2), (0,), (0, 2)):
        for keepdims in (False, True):
            found = monoids._sums_in_one_pass(x, axes, keepdims)
            if axes in ((2,), (1, 2), (0, 1, 2)):
                np.testing.assert_array_equal(found, np.sum(x * x, axis=axes, keepdims=keepdims), strict=True)
            else:
                assert found is None
    assert monoids._sums_in_one_pass(x[:0], (2,), False) is None
    strided = x[..., ::2]
    np.testing.assert_array_equal(monoids._sums_in_one_pass(strided, (2,), False), np.sum(strided * strided, axis=2))
    scalar = x[0, 0, 0].reshape(())
    for keepdims in (False, True):
        found = monoids._sums_in_one_pass(scalar, (), keepdims)
        np.testing.assert_array_equal(found, np.multiply(scalar, scalar), strict=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_of_views_have_the_bits_of_copies(dtype: str) -> None:
    """Shards are views where devices share a memory, and arrays of their own in separate memories and processes."""
    x = np.random.default_rng(5).normal(size=(30, 40, 211)).astype(dtype)
    views = [x[0, :, 28:156], x[0, :, ::3], x[0].T, x[::2, 0], x[:, 1:5, 2:190], x[0, 0, 3:], x[0, :, 7:8]]
    for view in views:
        for axis in (-1, tuple(range(view.ndim)), (view.ndim - 2, view.ndim - 1) if view.ndim > 1 else 0):
            context = ShardContext.everywhere((), [view.shape], view.dtype)
            parts = [
                monoids.norm_partial(np, context, a, axis=axis, keepdims=False, ord=2) for a in (view, view.copy())
            ]
            np.testing.assert_array_equal(*[sums for _, sums in parts], strict=True)
