"""The simulation equals a real run: on eight devices its log agrees link by link, on thousands with closed formulas."""

from __future__ import annotations

import collections
import itertools
import math
import pickle
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import P
from shardtensor.communication.all_reduce import CHUNKED_FROM, binomial_tree
from shardtensor.communication.schedules import AllReduce, Broadcast, sent
from shardtensor.core import OPS
from shardtensor.sharding.copy_plan import RegionCopies
from shardtensor.tensor.pytree import leaves
from tests.cases import CASES
from tests.draws import drawn
from tests.layouts import DTYPES, MESHES, array, everywhere, mesh_of, shapes, specs

N = st.NamedSharding
Function = Callable[[Any, N], Any]

Moved = dict[tuple[str, str, str, str], int]


def named(device: st.Device) -> str:
    return "host" if device == st.HOST else str(device.id)


def moved(log: st.TransferLog) -> Moved:
    """Bytes by operator, axis, source and destination."""
    total: Moved = collections.Counter()
    for r in log:
        if r.bytes and r.source != r.destination:
            total[r.operator, r.axis, named(r.source), named(r.destination)] += r.bytes
    return dict(total)


def links(found: Moved, n: int = 8) -> np.ndarray:
    table = np.zeros((n, n), np.int64)
    for (_, _, source, destination), size in found.items():
        if "host" not in (source, destination):
            table[int(source), int(destination)] += size
    return table


def kinds(result: Any) -> list[Any]:
    return [(x.shape, x.dtype, x.sharding.spec) for x in leaves(result) if isinstance(x, st.ShardedTensor)]


def agree(run: Callable[[st.Mesh], tuple[Callable[..., Any], tuple[Any, ...]]], real: st.Mesh) -> Moved:
    """Asserts that ``run(mesh)``, a function and its arguments, sends the same on real and on simulated devices;
    returns the bytes.
    """
    fn, args = run(real)
    with st.transfers() as log:
        wanted = fn(*args)
    there = moved(log)
    abstract = st.AbstractMesh(real.axis_sizes, real.axis_names)
    fn, args = run(abstract)
    with st.transfers() as log:
        found = fn(*args)
    assert moved(log) == there
    assert kinds(found) == kinds(wanted)
    report = st.simulate(fn, *args)
    assert np.array_equal(report.link_bytes(), links(there))
    assert report.bytes == links(there).sum()
    ends = report.total.by_device()
    assert np.array_equal(ends, [links(there).sum(axis=1), links(there).sum(axis=0)])
    for row in report.operators:
        mine = {k: n for k, n in there.items() if k[:2] == (row.operator, row.axis)}
        assert row.bytes == links(mine).sum()
        assert row.from_host == sum(n for k, n in mine.items() if k[2] == "host")
    assert {(row.operator, row.axis) for row in report.operators} == {k[:2] for k in there}
    assert kinds(report.result) == kinds(wanted)
    return there


# -- operators -------------------------------------------------------------------------------------


def written(x: Any, s: N) -> Any:
    x = x.copy()
    x[2:5] = x[:3]
    x[1:] += x[:-1]
    x[:, 2] = np.ones(x.shape[0], "float32")
    return x


def chunked(x: Any, s: N) -> Any:
    x = x.copy()
    x[[1, 4]] = x[[2, 3]]
    x[0, 0] += 1
    x[x > 0] = 1
    np.add(x, x, out=x)
    x.T[3:] += 1
    return x


OPERATORS: dict[str, Function] = {
    "sum over rows": lambda x, s: x.sum(axis=0),
    "sum over columns": lambda x, s: x.sum(axis=1),
    "sum of all": lambda x, s: x.sum(),
    "mean": lambda x, s: x.mean(axis=0),
    "var": lambda x, s: st.var(x, axis=1, keepdims=True),
    "argmax": lambda x, s: st.argmax(x),
    "argmin": lambda x, s: st.argmin(x, axis=1),
    "any": lambda x, s: (x > 0).any(axis=0),
    "x @ x.T": lambda x, s: x @ x.T,
    "x.T @ x": lambda x, s: x.T @ x,
    "x @ host": lambda x, s: x @ np.ones((x.shape[1], 3), "float32"),
    "tensordot": lambda x, s: st.tensordot(x, x, axes=((0, 1), (0, 1))),
    "differences": lambda x, s: x[1:] - x[:-1],
    "reversed": lambda x, s: x[::-1] + 1,
    "strides": lambda x, s: x[::2, 3:] * 2,
    "a row": lambda x, s: x[5] + 1,
    "elements": lambda x, s: x + (x[5, 3] + x[0, 0]),
    "views of elements": lambda x, s: [x[5, 3].T * x, st.real(x[0, 0]) + x, x[1, 1][...].T * x[2, 2][None]],
    "written elements": lambda x, s: x[5, 3][...].__iadd__(1) + x,
    "transposed": lambda x, s: x[:10, :10] + x[:10, :10].T,
    "concat": lambda x, s: st.concat([x, x[:3], x]),
    "concat columns": lambda x, s: st.concat([x, x], axis=1),
    "stack": lambda x, s: st.stack([x, x + 1]),
    "roll": lambda x, s: st.roll(x, (1, -2), axis=(0, 1)),
    "roll flat": lambda x, s: st.roll(x, 5),
    "flat": lambda x, s: x.reshape(-1) + 1,
    "reshape": lambda x, s: st.reshape(x, (x.shape[1], x.shape[0]), copy=True),
    "where": lambda x, s: st.where(x > 0, x, x[0]),
    "to columns": lambda x, s: st.reshard(x, N(s.mesh, P(None, "x"))),
    "to all": lambda x, s: st.reshard(x, N(s.mesh, P())),
    "to one": lambda x, s: st.device_put(x, s.mesh.flat[3]),
    "from the host": lambda x, s: st.device_put(np.ones((9, 4)), s),
    "index arrays": lambda x, s: x[[5, 0, 5, 7]] + x[np.array([1, 3, 1, 2]), 2][:, None],
    "host mask": lambda x, s: x[np.arange(x.shape[0]) % 2 == 0],
    "list": lambda x, s: st.unshard(st.shard(x, devices=s.mesh.flat[:5])) + 1,
    "batches": lambda x, s: [b + 1 for b in st.to_batched_list(x, 4)],
    "written": written,
    "chunked": chunked,
}

LAYOUTS: dict[str, tuple[tuple[int, ...], str, P]] = {
    "rows": ((8,), "x", P("x")),
    "columns": ((8,), "x", P(None, "x")),
    "blocks": ((2, 4), "xy", P("x", "y")),
    "blocks, turned": ((4, 2), "xy", P("y", "x")),
    "rows over both": ((2, 4), "xy", P(("x", "y"))),
    "copies of rows": ((2, 4), "xy", P("y")),
    "copies": ((2, 4), "xy", P()),
}


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_send_what_the_log_says(layout: str, backend: str) -> None:
    sizes, names, spec = LAYOUTS[layout]
    real = st.make_mesh(sizes, tuple(names), devices=st.devices(backend))
    sizes_of_x = [(16, 16), (11, 13)] if backend in ("numpy", "checked") else [(11, 13)]
    sending = 0
    for shape in sizes_of_x:
        for f in OPERATORS.values():

            def run(mesh: st.Mesh, f: Function = f, shape: tuple[int, ...] = shape) -> Any:
                sharding = N(mesh, spec)
                x = st.ones(shape, dtype="float32", device=sharding)
                return lambda x: f(x, sharding), (x,)

            sending += bool(agree(run, real))
    assert sending >= 3 * len(sizes_of_x)


WITHOUT_ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "concat": lambda x: st.concat([x, x]),
    "concat columns": lambda x: st.concat([x, x[:, :1]], axis=1),
    "concat flat": lambda x: st.concat([x, np.ones((0, 2))], axis=None),
    "unshard": lambda x: st.unshard([x, x], axis=1),
    "stack": lambda x: st.stack([x, x]),
    "roll": lambda x: st.roll(x, (1, 2), axis=(0, 1)),
    "flip": lambda x: st.flip(x, axis=0) + 1,
    "reshape": lambda x: st.reshape(x, (3, 0), copy=True),
    "reshard": lambda x: st.reshard(x, N(x.sharding.mesh, P(None, "x"))),
    "sum": lambda x: x.sum(axis=0),
    "host array": lambda x: x + np.ones((1, 3)),
}


@pytest.mark.parametrize("name", WITHOUT_ELEMENTS)
def test_operators_on_tensors_without_elements(name: str, backend: str) -> None:
    """Regions without elements send nothing, whatever their number."""
    real = st.make_mesh((8,), ("x",), devices=st.devices(backend))
    for spec in (P("x"), P(None, "x"), P()):
        agree(lambda mesh, spec=spec: (WITHOUT_ELEMENTS[name], (st.zeros((0, 3), device=N(mesh, spec)),)), real)


ELEMENTS = {
    "counts_between",
    "counts_of_integers",
    "pow",
    "take_along_axis",
    "cholesky",
    "cond",
    "eigvalsh",
    "inv",
    "mapped_lines",
    "matrix_rank",
    "pinv",
    "solve",
    "svdvals",
    "elements_of_ranks",
    "nan_quantiles",
    "isin_sorted",
    "searchsorted_split",
    "packed",
    "take_along_split",
    "unpacked",
    "updated",
}
"""Operators whose errors depend on the elements, and internal ones, of which the callers check the operands."""


@pytest.mark.parametrize("name", sorted(set(CASES) - ELEMENTS - {"reshard"}))
def test_every_operator_is_planned_as_it_runs(name: str) -> None:
    """Results, transfers and errors are those of the numpy backend, for shapes that fit and for others."""

    @hypothesis.settings(max_examples=drawn(4, fast=2))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        if data.draw(some.integers(0, 2)) == 0:
            made.operands = [array(data.draw(shapes()), data.draw(some.sampled_from(DTYPES)), 1) for _ in made.operands]
        real = mesh_of(data.draw(some.sampled_from(MESHES)), "numpy")
        layouts = [data.draw(specs(real, x.ndim)) for x in made.operands]
        placed = [not k or data.draw(some.integers(0, 3)) > 0 for k in range(len(layouts))]
        found = []
        for mesh in (real, st.AbstractMesh(real.axis_sizes, real.axis_names)):
            operands = [
                st.empty_like(x, device=N(mesh, spec)) if on_mesh else x
                for x, spec, on_mesh in zip(made.operands, layouts, placed, strict=True)
            ]
            found.append(outcome(lambda operands=operands: made.run(OPS[name].dispatch, operands)))
        assert found[1] == found[0]
        if placed and not isinstance(found[1], str):
            report = st.simulate(lambda *xs: made.run(OPS[name].dispatch, list(xs)), *operands)
            assert kinds(report.result) == found[0][0]
            assert report.link_bytes().sum() == report.bytes

    run()


def outcome(call: Callable[[], Any]) -> Any:
    """Returns the result and the bytes of a call, or the error that it raises."""
    with st.transfers() as log, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            result = call()
        except st.ShardTensorError as error:
            return f"{type(error).__name__}: {error}"
    return kinds(result), moved(log)


@pytest.mark.parametrize("nbytes", [CHUNKED_FROM - 4, CHUNKED_FROM, 4 * CHUNKED_FROM])
@pytest.mark.parametrize("spec", [P("x", "y"), P(("x", "y")), P("y")], ids=str)
def test_large_reductions_are_scattered_as_they_run(spec: P, nbytes: int) -> None:
    def run(mesh: st.Mesh) -> Any:
        x = st.ones((5, nbytes // 4 * (4 if spec == P("x", "y") else 1)), dtype="float32", device=N(mesh, spec))
        return lambda x: (x.sum(axis=0), x.mean(axis=0)), (x,)

    assert agree(run, st.make_mesh((2, 4), ("x", "y")))


# -- programs --------------------------------------------------------------------------------------


def size(axis: Any) -> int:
    return st.axis_size(axis)


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "psum": st.psum,
    "psum of a tree": lambda x, a: st.psum({"a": x, "b": (x[:1], 1)}, a)["a"],
    "psum of bools": lambda x, a: st.psum(x > 0, a),
    "psum in groups": lambda x, a: st.psum(x, a, axis_index_groups=[[*range(0, size(a), 2)], [*range(1, size(a), 2)]]),
    "pmean": st.pmean,
    "pmax": st.pmax,
    "pmin": st.pmin,
    "pprod": st.pprod,
    "a large psum": lambda x, a: st.psum(st.zeros((70001,), dtype="float32"), a),
    "psum_scatter": lambda x, a: st.psum_scatter(x, a, scatter_dimension=1, tiled=True),
    "psum_scatter of as many": lambda x, a: st.psum_scatter(st.zeros((size(a), 3), dtype="float32"), a),
    "all_gather": lambda x, a: st.all_gather(x, a, axis=1),
    "all_gather, tiled": lambda x, a: st.all_gather(x, a, tiled=True),
    "all_to_all": lambda x, a: st.all_to_all(st.ones((size(a), 2, 3)), a, 0, 2),
    "all_to_all, tiled": lambda x, a: st.all_to_all(x, a, 1, 0, tiled=True),
    "all_to_all within": lambda x, a: st.all_to_all(st.ones((11, 2)), a, 0, 0, tiled=True)[:1],
    "ring": lambda x, a: st.ppermute(x, a, [(i, (i + 1) % size(a)) for i in range(size(a))]),
    "one to one": lambda x, a: st.ppermute(x, a, [(0, 1)]),
    "pshuffle": lambda x, a: st.pshuffle(x, a, list(range(size(a)))[::-1]),
    "pswapaxes": lambda x, a: st.pswapaxes(st.ones((2, size(a))), a, 1),
    "pbroadcast": lambda x, a: st.pbroadcast(x, a, 1),
    "a layer": lambda x, a: st.psum(st.sum(st.maximum(x * 2, 0.0), axis=0), a),
    "three in a row": lambda x, a: sum(st.sum(st.psum(x[:1] + i, a)) for i in range(3)),
    "places": lambda x, a: x * st.axis_index(a) + st.psum(1, a),
}

GRIDS: dict[str, tuple[tuple[int, ...], str, P, Any]] = {
    "x": ((8,), "x", P("x"), "x"),
    "x of two": ((2, 4), "xy", P("x", "y"), "x"),
    "y of two": ((2, 4), "xy", P("x", "y"), "y"),
    "both": ((4, 2), "xy", P(("x", "y")), ("x", "y")),
    "both, turned": ((2, 4), "xy", P(("x", "y")), ("y", "x")),
}


@everywhere
@pytest.mark.parametrize("grid", GRIDS)
def test_programs_send_what_the_log_says(grid: str, backend: str) -> None:
    sizes, names, spec, axis = GRIDS[grid]
    real = st.make_mesh(sizes, tuple(names), devices=st.devices(backend))
    for f in PROGRAMS.values():

        def run(mesh: st.Mesh, f: Any = f) -> Any:
            mapped = st.shard_map(
                lambda x: st.reshape(f(x, axis), (1, -1)), mesh=mesh, in_specs=spec, out_specs=P(tuple(names))
            )
            return mapped, (st.ones((16, 32), dtype="float32", device=N(mesh, spec)),)

        there = agree(run, real)
        said = {axis} if isinstance(axis, str) else {", ".join(axis), ", ".join(names)}  # permutations: in mesh order
        assert {k[1] for k in there} <= said


@everywhere
def test_uneven_blocks_send_what_the_log_says(backend: str) -> None:
    real = st.make_mesh((8,), ("x",), devices=st.devices(backend))

    def program(x: Any) -> Any:
        rows = st.all_gather(x, "x", tiled=True)
        moved = st.all_to_all(x, "x", 1, 0, tiled=True)
        within = st.all_to_all(x, "x", 0, 0, tiled=True)  # each cuts its own number of rows
        turned = st.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)])
        return rows[:2], moved.T, st.sum(within, axis=0, dtype="int16")[None] + turned[:1]

    def run(mesh: st.Mesh) -> Any:
        mapped = st.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=(P(), P("x"), P("x")))
        return mapped, (st.ones((11, 19), dtype="int16", device=N(mesh, P("x"))),)

    there = agree(run, real)
    assert {k[0] for k in there} == {"all_gather", "all_to_all", "ppermute", "shard_map"}  # outputs are compared


@everywhere
def test_other_maps_send_what_the_log_says(backend: str) -> None:
    real = st.make_mesh((2, 4), ("x", "y"), devices=st.devices(backend))

    def arrays(mesh: st.Mesh) -> Any:
        f = st.pmap(lambda x, w: (st.psum(x @ w, "i"), x.sum()), axis_name="i", in_axes=(1, None), devices=mesh.flat)
        return f, (st.ones((6, 8, 3), device=N(mesh, P("x", "y"))), st.ones((3, 2), device=mesh.flat[2]))

    def lists(mesh: st.Mesh) -> Any:
        def f(x: Any) -> Any:
            parts = st.shard(x, devices=mesh.flat)
            return st.stack(st.pmap(lambda a, b: st.pmax((a * b).sum(), "i"), parts, parts[::-1], axis_name="i"))

        return f, (st.ones((16, 3), device=N(mesh, P("x"))),)

    def split(mesh: st.Mesh) -> Any:
        def f(x: Any, y: Any) -> Any:
            return st.smap(
                lambda a, b: st.psum(a, "j") + b, x, y, axes=[(0, 1), (0, None)], devices=mesh, axis_name=("i", "j")
            )

        return f, (st.ones((9, 8), device=N(mesh, P("y"))), st.ones((9, 1), device=N(mesh, P())))

    def nested(mesh: st.Mesh) -> Any:
        def inner(b: Any) -> Any:
            return st.psum(b, "y") + st.psum(b, ("x", "y"))

        def outer(a: Any) -> Any:
            return st.shard_map(inner, mesh=mesh, in_specs=P(None, "y"), out_specs=P(None, "y"))(a) + st.psum(a, "x")

        f = st.shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names=("x",))
        return f, (st.ones((6, 8), device=N(mesh, P("x", "y"))),)

    def levels(mesh: st.Mesh) -> Any:
        def f(x: Any) -> Any:
            with st.use_mesh(mesh):
                return st.pmap(st.pmap(lambda a: st.psum(a, ("i", "j")), axis_name="j"), x, axis_name="i")

        return f, (st.ones((2, 4, 3), device=N(mesh, P("x"))),)

    def shares(mesh: st.Mesh) -> Any:
        def f(x: Any) -> Any:
            with st.use_mesh(mesh):
                return st.pmap(lambda row: st.pmap(lambda a: st.psum(a, "j"), row, axis_name="j"), x)

        return f, (st.ones((2, 4, 3), device=N(mesh, P("x"))),)

    for run in (arrays, lists, split, nested, levels, shares):
        assert agree(run, real), run


# -- schedules -------------------------------------------------------------------------------------


def listed(schedule: Any) -> list[list[tuple[int, int, int]]]:
    """The messages of each phase."""
    phases = []
    for phase in schedule.phases():
        blocks = [sent(block) for block in phase]
        phases.append([m for b in blocks for m in zip(*[column.tolist() for column in b], strict=True)])
    return phases


@pytest.mark.parametrize("chunked", [False, True])
def test_a_reductions_schedule_sends_one_message_at_a_time(chunked: bool) -> None:
    for n in range(1, 20):
        for contributors in ([*range(n)], [*range(n // 2, n)], [n - 1]):
            contributes = tuple([k in contributors for k in range(n)])
            found = listed(AllReduce(7 * np.arange(n), contributes, (n,), chunked, 24, 8, "sum"))
            for phase in found:
                assert len({m[:2] for m in phase}) == len(phase)
            if not chunked:
                assert len(found) <= 2 * math.ceil(math.log2(n))
                assert sum(len(phase) for phase in found) == len(contributors) - 1 + n - 1


@pytest.mark.parametrize("doublings", [9, pytest.param(12, marks=pytest.mark.full)])
def test_a_scalar_takes_two_rounds_for_each_doubling_of_the_devices(doublings: int) -> None:
    mesh = st.AbstractMesh((2**doublings,), ("x",))
    f = st.shard_map(lambda b: st.psum(b.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    assert st.simulate(f, st.zeros((mesh.size,), device=mesh)).rounds == 2 * doublings


def test_a_broadcasts_phases_are_those_of_the_tree() -> None:
    for n in range(1, 40):
        for root in {0, n // 2, n - 1}:
            phases = listed(Broadcast(np.arange(n), root, 5, "pbroadcast", "x"))
            assert [m[:2] for phase in phases for m in phase] == binomial_tree(root, range(n))
            assert len(phases) == math.ceil(math.log2(n))
            have = {root}
            for phase in phases:  # a device sends only data that it has received, and one message at a time
                assert {a for a, _, _ in phase} <= have
                assert len({a for a, _, _ in phase}) == len({b for _, b, _ in phase}) == len(phase)
                have |= {b for _, b, _ in phase}


@pytest.mark.parametrize("target", [P(None, "x"), P("y", "x"), P(), P(("x", "y"))], ids=str)
def test_a_plan_in_parts_is_the_whole_plan(target: P) -> None:
    mesh = st.AbstractMesh((3, 4), ("x", "y"))
    source, result = N(mesh, P("x", "y")).grid((13, 11)), N(mesh, target).grid((13, 11))
    from shardtensor.sharding.copy_plan import identity, pieces_in

    region = identity((13, 11))
    pieces, receivers = pieces_in(region, source, result)
    whole = RegionCopies(region, 0, source, result)
    assert len(whole) == pieces * receivers
    cuts = [0, 1, 1, pieces // 2, pieces]
    parts = [RegionCopies(region, 0, source, result, ends) for ends in itertools.pairwise(cuts)]
    for name in ("source", "destination", "sizes", "local"):
        assert np.array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name))


def brute(schedule: Any, mesh: st.Mesh, alpha: dict[str, float], rate: dict[str, float]) -> tuple[int, float]:
    """Returns the rounds and the seconds of a schedule, computed message by message."""
    rounds, seconds = 0, 0.0
    at = mesh.coordinates.tolist()
    for phase in listed(schedule):
        counts, times = collections.Counter[Any](), collections.Counter[Any]()
        for i, k, n in phase:
            apart = [a for a, p, q in zip(mesh.axis_names, at[i], at[k], strict=True) if p != q]
            time = max(alpha[a] + n / rate[a] for a in apart)
            for end in (("out", i), ("in", k)):
                counts[end] += 1
                times[end] += time
        rounds += max(counts.values(), default=0)
        seconds += max(times.values(), default=0.0)
    return rounds, seconds


@pytest.mark.parametrize("name", ["to columns", "sum over rows", "x @ x.T", "roll", "concat", "var"])
def test_times_are_those_of_the_messages_one_by_one(name: str) -> None:
    mesh = st.AbstractMesh((2, 3, 2), ("x", "y", "z"))
    alpha, rate = {"x": 1e-3, "y": 2e-5, "z": 1e-6}, {"x": 1e3, "y": 7e4, "z": 1e6}
    sharding = N(mesh, P("x", ("z", "y")))
    x = st.ones((24, 26), dtype="float32", device=sharding)
    report = st.simulate(OPERATORS[name], x, sharding, latency=alpha, bandwidth=rate)
    wanted = []
    for schedule, _ in report._schedules.values():  # its parts run at the same time
        parts = [brute(p, mesh, alpha, rate) for p in schedule.parts()]
        rounds = max(r for r, _ in parts)
        if rounds:  # the others send nothing between devices, and are no steps
            wanted.append((rounds, max(t for _, t in parts)))
    assert [row.rounds for row in report.steps] == [r for r, _ in wanted]
    assert [row.seconds for row in report.steps] == pytest.approx([t for _, t in wanted])
    assert report.rounds == sum(r for r, _ in wanted) > 0
    assert report.seconds == pytest.approx(sum(t for _, t in wanted))


# -- closed formulas -------------------------------------------------------------------------------


def program(mesh: st.Mesh, f: Callable[..., Any], *axes: str) -> Any:
    spec = P(*(axes or ("x",)))
    return st.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


ALPHA, RATE = 1e-5, 1e9


@pytest.mark.parametrize("n", [2, 8, 64, 256])
def test_volumes_and_times_of_collectives(n: int) -> None:
    mesh = st.AbstractMesh((n,), ("x",))
    b = 4 * CHUNKED_FROM  # bytes of a device's block
    x = st.zeros((n * n, b // 4 // n), dtype="float32", device=N(mesh, P("x")))

    def of(f: Callable[..., Any]) -> Any:
        report = st.simulate(program(mesh, f), x, latency=ALPHA, bandwidth=RATE)
        (row,) = report.operators
        return row

    share = (n - 1) / n
    row = of(lambda x: st.psum(x, "x"))
    if n > 2:  # a reduce-scatter and an all-gather
        assert row.sent == row.received == 2 * share * b
        assert (row.rounds, row.messages) == (2 * (n - 1), 2 * n * (n - 1))
        assert row.seconds == pytest.approx(2 * (n - 1) * ALPHA + 2 * share * b / RATE)
    row = of(lambda x: st.psum_scatter(x, "x", tiled=True))
    assert (row.sent, row.received, row.rounds, row.link) == (share * b, share * b, n - 1, b // n)
    row = of(lambda x: st.all_gather(x, "x", tiled=True))
    assert (row.sent, row.received, row.link) == (share * b * n, share * b * n, b)
    assert row.seconds == pytest.approx((n - 1) * (ALPHA + b / RATE))
    row = of(lambda x: st.all_to_all(x, "x", 1, 0, tiled=True))
    assert (row.sent, row.received, row.bytes, row.rounds) == (share * b, share * b, n * share * b, n - 1)
    assert row.seconds == pytest.approx((n - 1) * ALPHA + share * b / RATE)
    row = of(lambda x: st.pbroadcast(x, "x", 0))
    assert (row.rounds, row.messages, row.bytes) == (math.ceil(math.log2(n)), n - 1, (n - 1) * b)
    assert row.seconds == pytest.approx(math.ceil(math.log2(n)) * (ALPHA + b / RATE))
    row = of(lambda x: st.ppermute(x, "x", [(i, (i + 1) % n) for i in range(n)]))
    assert (row.rounds, row.messages, row.sent, row.seconds) == (1, n, b, pytest.approx(ALPHA + b / RATE))
    row = of(lambda x: st.psum(x[:1, :1], "x"))  # One tree combines, another one broadcasts.
    assert (row.rounds, row.messages) == (2 * math.ceil(math.log2(n)), 2 * (n - 1))


@pytest.mark.parametrize("n", [2, 7, 64, 1000])
def test_volumes_of_operators(n: int) -> None:
    mesh = st.AbstractMesh((n,), ("x",))
    rows = N(mesh, P("x"))
    x = st.zeros((n * 4, n * 100), dtype="float32", device=rows)
    row = 4 * x.shape[1]
    report = st.simulate(lambda x: x[1:] - x[:-1], x, latency=ALPHA, bandwidth=RATE)
    assert (report.total.sent, report.bytes, report.rounds) == (row, (n - 1) * row, 1)
    assert report.seconds == pytest.approx(ALPHA + row / RATE)
    report = st.simulate(lambda x: st.roll(x, 1, axis=0) + st.roll(x, -1, axis=0), x)
    assert (report.total.sent, report.total.received, report.bytes) == (2 * row, 2 * row, 2 * n * row)
    report = st.simulate(lambda x: st.reshard(x, N(mesh, P(None, "x"))), x)
    assert report.total.sent == report.total.received == x.nbytes // n * (n - 1) // n
    report = st.simulate(lambda x: st.reshard(x, N(mesh, P())), x)
    assert (report.total.received, report.messages) == (x.nbytes // n * (n - 1), n * (n - 1))
    report = st.simulate(lambda x: x.T @ x, x)  # partial products, combined in chunks
    if n > 2:
        product = 4 * x.shape[1] ** 2
        assert report.total.sent == pytest.approx(2 * (n - 1) / n * product, rel=1e-3)


def test_a_halo_exchange_by_programs() -> None:
    mesh = st.AbstractMesh((16,), ("x",))

    def step(x: Any) -> Any:
        up = st.ppermute(x[-1:], "x", [(i, i + 1) for i in range(15)])
        down = st.ppermute(x[:1], "x", [(i + 1, i) for i in range(15)])
        padded = st.concat([up, x, down])
        return padded[2:] - 2 * padded[1:-1] + padded[:-2]

    x = st.zeros((160, 1000), dtype="float64", device=N(mesh, P("x")))
    report = st.simulate(program(mesh, step), x, latency=ALPHA, bandwidth=RATE)
    assert report.shardings == N(mesh, P("x"))
    assert report.result.shape == (160, 1000)
    assert (report.total.sent, report.total.received) == (2 * 8000, 2 * 8000)
    assert report.seconds == pytest.approx(2 * (ALPHA + 8000 / RATE))
    table = report.link_bytes()
    assert np.array_equal(table, 8000 * (np.eye(16, k=1) + np.eye(16, k=-1)))


def test_networks_of_several_levels() -> None:
    mesh = st.AbstractMesh((4, 8), ("node", "gpu"))
    alpha, rate = {"node": 1e-4, "gpu": 1e-6}, {"node": 1e9, "gpu": 1e11}
    b = 8 * 1000

    def seconds(f: Callable[..., Any]) -> float:
        x = st.zeros((4 * 1000, 8), dtype="float64", device=N(mesh, P("node", "gpu")))
        report = st.simulate(program(mesh, f, "node", "gpu"), x, latency=alpha, bandwidth=rate)
        return report.seconds

    def ring(n: int) -> list[tuple[int, int]]:
        return [(i, (i + 1) % n) for i in range(n)]

    assert seconds(lambda x: st.ppermute(x, "gpu", ring(8))) == pytest.approx(1e-6 + b / 1e11)
    assert seconds(lambda x: st.ppermute(x, "node", ring(4))) == pytest.approx(1e-4 + b / 1e9)
    both = seconds(lambda x: st.ppermute(x, ("node", "gpu"), ring(32)))  # the last of a node to the first of the next
    assert both == pytest.approx(1e-4 + b / 1e9)
    assert seconds(lambda x: st.all_gather(x, "gpu")) == pytest.approx(7 * (1e-6 + b / 1e11))  # all nodes at once
    near, far = 1e-6 + b / 1e11, 1e-4 + b / 1e9
    assert seconds(lambda x: st.all_gather(x, ("node", "gpu"))) == pytest.approx(7 * near + 24 * far)
    slow = st.simulate(
        program(mesh, lambda x: st.ppermute(x, "gpu", ring(8)), "node", "gpu"),
        st.zeros((4, 8), device=N(mesh, P("node", "gpu"))),
        latency=1e-3,
        bandwidth={"node": 1.0, "gpu": 8.0},
    )
    assert slow.seconds == pytest.approx(1e-3 + 1)
    one = st.AbstractMesh((8, 1), ("x", "y"))  # an axis of one device has no links
    x = st.zeros((8,), device=N(one, P("x")))
    assert st.simulate(lambda x: x.sum(), x, latency={"x": 1.0}, bandwidth={"x": 1e9}).seconds == pytest.approx(6)


def test_groups_run_at_the_same_time_and_calls_one_after_the_other() -> None:
    mesh = st.AbstractMesh((3, 5), ("x", "y"))
    x = st.zeros((3, 5), device=N(mesh, P("x", "y")))

    def twice(x: Any) -> Any:
        return st.psum(st.psum(x, "y") + 1, "y") + st.psum(x, "x")

    report = st.simulate(program(mesh, twice, "x", "y"), x, latency=1.0, bandwidth=1e30)
    assert [(s.operator, s.axis, s.calls) for s in report.steps] == [("psum", "y", 1)] * 2 + [("psum", "x", 1)]
    assert [(r.axis, r.calls, r.messages) for r in report.operators] == [("y", 2, 48), ("x", 1, 20)]
    assert [s.seconds for s in report.steps] == pytest.approx([3 + 3, 3 + 3, 2 + 2])
    assert [r.seconds for r in report.operators] == pytest.approx([12, 4])
    assert report.seconds == pytest.approx(16)
    eager = st.simulate(lambda x: [x.sum(axis=1) for _ in range(3)], x, latency=1.0, bandwidth=1e30)
    (row,) = eager.operators
    assert (row.calls, row.messages, row.seconds, row.link) == (3, 3 * 24, pytest.approx(18), 8)
    assert eager.link_bytes().sum() == eager.bytes == 3 * 24 * 8


# -- thousands of devices --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "loops"), [(24, 12), pytest.param(64, 150, marks=[pytest.mark.slow, pytest.mark.full])]
)  # Typical are 6 and 70 loops.
def test_thousands_of_devices_take_seconds(side: int, loops: float) -> None:
    mesh = st.AbstractMesh((side, side), ("data", "model"))
    n = mesh.size
    begin = time.process_time()  # the machine may be busy with other tests
    links = {"latency": {"data": 1e-5, "model": 1e-6}, "bandwidth": {"data": 1e10, "model": 1e11}}
    rows = 4 * n
    x = st.zeros((rows, rows), dtype="float32", device=N(mesh, P(("data", "model"))))
    report = st.simulate(lambda x: st.reshard(x, N(mesh, P(None, ("data", "model")))), x, **links)
    assert (report.messages, report.total.sent) == (n * (n - 1), x.nbytes // n * (n - 1) // n)
    size = x.nbytes // n // n
    near, far = 1e-6 + size / 1e11, 1e-5 + size / 1e10
    assert report.seconds == pytest.approx((side - 1) * near + (n - side) * far)

    w = st.zeros((rows, n), dtype="float32", device=N(mesh, P("model", None)))
    report = st.simulate(lambda x, w: x @ w, x, w, **links)
    assert report.result.sharding.mesh == mesh

    def step(x: Any, w: Any) -> Any:
        y = st.maximum(st.psum(x @ w, "model"), 0)
        gradient = st.psum_scatter(x.T @ y, "data", tiled=True)
        return st.all_gather(gradient, "data", tiled=True)

    mapped = st.shard_map(
        step, mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("model"), check_vma=False
    )
    report = st.simulate(mapped, x, w, **links)
    assert report.result.shape == w.shape
    assert [(r.operator, r.axis) for r in report.operators[-3:]] == [
        ("psum", "model"), ("psum_scatter", "data"), ("all_gather", "data"),
    ]  # fmt: skip
    gradient = w.nbytes // side
    assert [r.sent for r in report.operators[-2:]] == [gradient * (side - 1) // side] * 2
    taken, begin = time.process_time() - begin, time.process_time()
    for _ in range(10**7):
        pass
    assert taken < loops * (time.process_time() - begin), taken / (time.process_time() - begin)


@pytest.mark.full
def test_memory_of_4096_devices_stays_small() -> None:
    import tracemalloc

    mesh = st.AbstractMesh((4096,), ("x",))
    x = st.zeros((2**13, 2**13), device=N(mesh, P("x")))
    tracemalloc.start()
    report = st.simulate(lambda x: st.reshard(x, N(mesh, P(None, "x"))), x, latency=0, bandwidth=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    table = report.link_bytes()
    assert table.shape == (4096, 4096)
    assert table.sum() == report.bytes
    assert not table.diagonal().any()


def test_nothing_is_allocated() -> None:
    mesh = st.AbstractMesh((8,), ("x",))
    x = st.zeros((10**9, 10**6), device=N(mesh, P("x")))  # eight petabytes
    y = st.exp(x + x.T[:1].T) @ st.ones((10**6, 10), device=x.device)
    y[3:] = st.full((10**9 - 3, 10), 7.0, device=x.device)
    y += 1
    assert (y.shape, y.nbytes) == ((10**9, 10), 8 * 10**10)
    assert st.simulate(lambda y: st.concat([y, y.copy()]).reshape(-1), y).result.shape == (2 * 10**10,)


# -- what it is ------------------------------------------------------------------------------------


def test_abstract_meshes_are_meshes() -> None:
    mesh = st.AbstractMesh((2, 3), ("x", "y"))
    assert isinstance(mesh, st.Mesh)
    assert repr(mesh) == "AbstractMesh(x=2, y=3)"
    assert (mesh.size, mesh.axis_sizes, dict(mesh.shape)) == (6, (2, 3), {"x": 2, "y": 3})
    assert mesh == st.AbstractMesh((2, 3), ("x", "y")) != st.AbstractMesh((3, 2), ("x", "y"))
    assert mesh.flat == st.AbstractMesh((6,), "z").flat
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert hash(pickle.loads(pickle.dumps(mesh))) == hash(mesh)
    sub = st.Mesh(mesh.devices[1], ("y",))  # some of them
    assert st.zeros((6,), device=sub).devices() == set(mesh.flat[3:])
    assert "simulated" not in st.backend_names()
    with st.use_mesh(mesh):
        assert st.zeros((6, 2)).sharding == N(mesh, P(("x", "y")))
        assert st.smap(lambda a: a, st.zeros((12,)), axes=[0]).device.flat == mesh.flat


def test_simulated_tensors_show_what_they_are() -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    x = st.arange(10, device=mesh)
    assert repr(x) == "ShardedTensor(shape=(10,), dtype=int64, sharding=P('x') on AbstractMesh(x=4))"
    assert repr(x[0]).startswith("ShardedTensor(shape=()")
    assert x.block_until_ready() is x
    assert st.empty_like(st.ones((3,)), device=mesh).sharding == N(mesh, P("x"))
    z = st.zeros((4, 2), dtype="complex64", device=mesh)
    assert (z.real + 1).dtype == np.float32
    z.imag = 3
    assert (z.shape, z.T.shape, z.mT.sharding.spec) == ((4, 2), (2, 4), P(None, "x"))


READS: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: 1 if x.any() else 0,
    "int index": lambda x: [0, 1][st.argmax(x[:2])],
    "item": lambda x: x.max().item(),
    "tolist": lambda x: x.tolist(),
    "asarray": lambda x: np.asarray(x),
    "asarray of a view": lambda x: np.asarray(x[::2]),
    "mask": lambda x: x[x > 0],
    "index tensor": lambda x: x[st.argmax(x, keepdims=True)],
    "written index": lambda x: x.__setitem__(st.argmax(x, keepdims=True), 1),
    "shards": lambda x: x.addressable_shards,
    "pickle": lambda x: pickle.dumps(x),
    "dlpack": lambda x: np.from_dlpack(st.device_put(x, x.sharding.mesh.flat[0])),
    "copyto": lambda x: np.copyto(np.zeros(8), x),
    "to real devices": lambda x: st.device_put(x, st.devices()[0]),
    "to checked devices": lambda x: st.device_put(x, st.devices("checked")[0]),
    "range": lambda x: range(x[0].astype("int64")),
}


@pytest.mark.parametrize("how", READS)
def test_elements_cannot_be_read(how: str) -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    x = st.ones((8,), device=mesh)
    if "index" not in how or how == "int index":  # Transfers depend on the elements of an index, shapes do not.
        with pytest.raises(TypeError, match="simulated tensors have no elements"):
            READS[how](x)
    with pytest.raises(TypeError, match="simulated tensors have no elements"):
        st.simulate(READS[how], x)
    f = st.shard_map(lambda b: READS[how](b) and b, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(TypeError, match="simulated tensors have no elements"):
        st.simulate(f, st.ones((32,), device=mesh))


def test_programs_know_where_they_are() -> None:
    mesh = st.AbstractMesh((3,), ("x",))
    seen = []

    def program(b: Any, scale: Any) -> Any:
        seen.append((st.current_device(), b.device, st.axis_index("x"), st.zeros(2).device))
        b += np.ones(b.shape[0])  # host arrays are beside it, as in every mapped function
        return b * scale + st.asarray([1.0])

    f = st.shard_map(program, mesh=mesh, in_specs=(P("x"), None), out_specs=P("x"))
    report = st.simulate(f, st.zeros((7,), device=mesh), 2.0)
    assert sorted(seen, key=lambda s: s[2]) == [(d, d, k, d) for k, d in enumerate(mesh.flat)]
    assert (report.result.shape, report.bytes, report.operators) == ((7,), 0, [])
    error = pytest.raises(st.CollectiveError, match="psum")
    with error:
        g = st.shard_map(
            lambda b: st.psum(b, "x") if st.axis_index("x") else b, mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )
        st.simulate(g, st.zeros((6,), device=mesh))


def test_operators_inside_of_programs_are_those_outside() -> None:
    """A plan that one device has made is used for the same call on other devices, and for no other call."""
    mesh = st.AbstractMesh((4,), ("x",))

    def program(b: Any) -> Any:
        a = [
            b + 1,
            b + 1.0,
            b + True,
            b * b[:1],
            st.sum(b, axis=0),
            st.sum(b, axis=1),
            st.sum(b, axis=1, keepdims=True),
        ]
        a += [b.sum(axis=(0, 1)), b.astype("float32"), b @ b.T, st.where(b > 0, b, 0.5), st.clip(b, 0, 5), b / 2]
        return [(x.shape, x.dtype) for x in a]

    real = st.make_mesh((4,), ("x",))
    found = []
    for m in (real, mesh, mesh):
        for dtype in ("int32", "float64", "uint8"):
            parts = st.shard(st.ones((10, 5), dtype=dtype, device=N(m, P("x"))), devices=m.flat)
            found.append(st.pmap(program, parts))
    assert found[:3] == found[3:6] == found[6:]


def test_what_a_program_finds_outside_comes_to_it() -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    outside = st.ones((5,), dtype="float32", device=mesh.flat[0])

    def program(b: Any) -> Any:
        return (b + b) + (b + outside)  # of the same shapes

    f = st.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    for _ in range(2):
        report = st.simulate(f, st.zeros((20,), dtype="float32", device=N(mesh, P("x"))))
        (row,) = report.operators
        assert (row.operator, row.messages, row.sent, row.received) == ("add", 3, 60, 20)


def test_the_report_prints_as_a_table() -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    x = st.zeros((8, 10), dtype="float32", device=N(mesh, P("x")))
    f = st.shard_map(lambda b: st.psum(b, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())

    def fn(x: Any) -> Any:
        return f(st.roll(x, 1, axis=0) + np.ones(10, "float32"))

    report = st.simulate(fn, x, latency=1e-6, bandwidth=8e7)
    assert str(report).splitlines() == [
        "AbstractMesh(x=4)",
        "operator   axis  calls  messages  bytes  sent  received  link  rounds  host   seconds",
        "─────────────────────────────────────────────────────────────────────────────────────",
        "roll                 1         4    160    40        40    40       1         1.5e-06",
        "add                  1         0      0     0         0     0       0   160         0",
        "psum       x         1         6    480   160       160    80       4           8e-06",
        "shard_map            1         3    240    80       240    80       3           6e-06",
        "─────────────────────────────────────────────────────────────────────────────────────",
        "total                4        13    880   280       440    80       8   160  1.55e-05",
    ]
    assert repr(report) == "SimulationReport(13 messages, 880 bytes on AbstractMesh(x=4))"
    plain = str(st.simulate(lambda x: x.sum(), x))
    for title in ("axis", "host", "seconds"):
        assert title not in plain


def test_results_of_any_form() -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    x = st.zeros((8, 2), device=mesh)
    report = st.simulate(lambda t: {"a": t["x"].T, "b": [t["n"], None]}, {"x": x, "n": 3})
    assert report.result["b"] == [3, None]
    assert report.shardings == {"a": N(mesh, P(None, "x")), "b": [None, None]}
    assert report.total.messages == report.bytes == report.rounds == 0
    assert report.seconds is None
    assert not report.link_bytes().any()
    timed = st.simulate(lambda x: x + 1, x, latency=0, bandwidth=1)
    assert timed.seconds == 0
    made = st.simulate(lambda: st.zeros((8,)).sum(), mesh=mesh)
    assert made.messages == 6
    assert made.result.sharding.mesh == mesh


def test_the_host_is_apart() -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    x = st.zeros((8,), dtype="float32", device=mesh)
    report = st.simulate(lambda x, h: x + h, x, np.ones(8, "float32"), latency=1.0, bandwidth=1.0)
    (row,) = report.operators
    assert (row.from_host, row.to_host, row.messages, row.bytes, row.seconds) == (32, 0, 0, 0, 0)
    assert not report.link_bytes().any()


def test_what_others_move_meanwhile_does_not_count() -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    real = st.ones((8,), device=st.make_mesh((4,), ("x",)))
    report = st.simulate(lambda x: (x.sum(), real[::-1].sum()), st.zeros((8,), device=mesh))
    assert [r.operator for r in report.operators] == ["sum"]
    assert report.messages == 6


def test_the_guard_judges_what_would_move() -> None:
    x = st.zeros((8,), device=st.AbstractMesh((4,), ("x",)))
    with st.transfer_guard("disallow"):
        assert st.sum(x).shape == ()
        with pytest.raises(st.TransferError, match="getitem: moves 24 bytes"):
            x[1:] + 1


BAD: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "no function": (TypeError, "fn is an int", lambda x: st.simulate(3, x)),
    "a tensor with elements": (
        TypeError, "tensor on Mesh.* which has elements", lambda x: st.simulate(lambda x, y: x, x, st.ones((8,)))
    ),
    "a tensor with elements in a tree": (
        TypeError, "has elements", lambda x: st.simulate(lambda t: t, {"a": [st.ones((8,))]})
    ),
    "a tensor with elements in the function": (
        TypeError, "add: a simulated tensor beside one with elements", lambda x: st.simulate(lambda x: x + st.ones((8,), device=st.devices()[0]), x)
    ),
    "a tensor with elements onto it": (
        TypeError, "cannot go to simulated devices", lambda x: st.device_put(st.ones((8,)), x.sharding)
    ),
    "a tensor with elements in a program": (
        TypeError, "cannot go to simulated devices",
        lambda x: st.pmap(lambda a, b: a, st.shard(x, devices=x.sharding.mesh.flat), st.ones((8,))),
    ),
    "no simulated tensor": (ValueError, "there is no simulated tensor among", lambda x: st.simulate(lambda: 1)),
    "a mesh that exists": (
        ValueError, "has devices that exist", lambda x: st.simulate(lambda: 1, mesh=st.make_mesh((2,), ("x",)))
    ),
    "no mesh": (TypeError, "mesh is a str", lambda x: st.simulate(lambda: 1, mesh="x")),
    "latency alone": (ValueError, "latency is given and bandwidth is not", lambda x: st.simulate(abs, x, latency=1)),
    "bandwidth alone": (
        ValueError, "bandwidth is given and latency is not", lambda x: st.simulate(abs, x, bandwidth=1)
    ),
    "a missing axis": (
        ValueError, "latency has no entry for axis 'y'", lambda x: st.simulate(abs, x, latency={"x": 1}, bandwidth=1)
    ),
    "an unknown axis": (
        ValueError, "bandwidth has an entry for axis 'z'",
        lambda x: st.simulate(abs, x, latency=1, bandwidth={"x": 1, "y": 1, "z": 1}),
    ),
    "no bandwidth": (ValueError, "bandwidth is 0; .* above 0", lambda x: st.simulate(abs, x, latency=1, bandwidth=0)),
    "a negative latency": (ValueError, "latency is -1", lambda x: st.simulate(abs, x, latency=-1, bandwidth=1)),
    "nan": (ValueError, "bandwidth is nan", lambda x: st.simulate(abs, x, latency=1, bandwidth=math.nan)),
    "infinite": (ValueError, "finite", lambda x: st.simulate(abs, x, latency=math.inf, bandwidth=1)),
    "text": (TypeError, "latency is 'fast'", lambda x: st.simulate(abs, x, latency="fast", bandwidth=1)),
    "a bool": (TypeError, "latency is True", lambda x: st.simulate(abs, x, latency=True, bandwidth=1)),
    "text by axis": (
        TypeError, "bandwidth is", lambda x: st.simulate(abs, x, latency=1, bandwidth={"x": 1, "y": "1"})
    ),
    "another mesh": (
        ValueError, "simulated:10 is not in AbstractMesh.x=2, y=4.; give mesh=",
        lambda x: st.simulate(lambda x: st.zeros((20,), device=st.AbstractMesh((20,), ("z",)))[10:].sum(), x),
    ),
    "no sizes": (TypeError, "axis_sizes is 'ab'", lambda x: st.AbstractMesh("ab", ("x",))),
    "no devices": (ValueError, "must be positive", lambda x: st.AbstractMesh((2, 0), ("x", "y"))),
    "too many names": (ValueError, "names 2", lambda x: st.AbstractMesh((2,), ("x", "y"))),
    "one name twice": (ValueError, "occurs twice", lambda x: st.AbstractMesh((2, 2), ("x", "x"))),
    "shapes": (ValueError, "matmul", lambda x: st.simulate(lambda x: x @ st.zeros((3, 3)), x)),
    "an axis": (ValueError, "axis", lambda x: st.simulate(lambda x: x.sum(axis=4), x)),
    "an index": (IndexError, "out of bounds", lambda x: st.simulate(lambda x: x[[99]], x)),
    "a dtype": (TypeError, "bitwise_and", lambda x: st.simulate(lambda x: x & 1, x)),
    "what fn raises": (ZeroDivisionError, "division", lambda x: st.simulate(lambda x: 1 / 0, x)),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_said(what: str) -> None:
    kind, text, call = BAD[what]
    x = st.zeros((8,), device=st.AbstractMesh((2, 4), ("x", "y")))
    with pytest.raises(kind, match=text):
        call(x)
    with st.transfers() as log:  # nothing is left open
        st.sum(x)
    assert len(log) == 14


# -- processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_logs_and_reports_name_the_devices_of_all_processes(processes: int) -> None:
    """Devices of several meshes have the same ids, and belong to other processes."""
    sizes, names = (4, 2), ("host", "gpu")
    alone, mesh = st.AbstractMesh(sizes, names), st.AbstractMesh(sizes, names, processes=processes)

    def call(on: st.Mesh) -> st.ShardedTensor:
        x = st.zeros((16, 2048), device=st.NamedSharding(on, st.P(names)))  # Few bytes go to the first device.
        y = st.shard_map(lambda b: st.psum(b, "gpu"), mesh=on, in_specs=st.P(names), out_specs=st.P("host"))(x)
        return st.sum(st.reshard(x[1:], st.NamedSharding(on, st.P())), axis=0) + y[[3]]

    for on in (alone, mesh, alone):
        with st.transfers() as log:
            call(on)
        assert list(log.by_device()) == list(on.flat)
        ends = {device.id: device.process_index for r in log for device in (r.source, r.destination)}
        assert ends == {device.id: device.process_index for device in on.flat}
    reports = [st.simulate(lambda on=on: call(on), mesh=on) for on in (alone, mesh)]
    assert reports[0].link_bytes().sum() == reports[1].link_bytes().sum() == reports[0].bytes
    assert reports[0].process_bytes().shape == (1, 1)
    assert reports[1].process_bytes().sum() > 0
    with pytest.raises(st.ShardingError, match=r"simulated:\d+ is not in AbstractMesh"):
        st.simulate(lambda: call(mesh), mesh=alone)


# -- the page --------------------------------------------------------------------------------------


def test_notebooks_show_the_report():
    mesh = st.AbstractMesh((64,), ("x",))
    report = st.simulate(lambda x: x - x.mean(), st.zeros((2**20,), device=mesh), latency=1e-6, bandwidth=1e9)
    shown = re.sub(r"<[^>]*>", " ", report._repr_html_()).split()
    assert shown == [word for word in str(report).split() if "─" not in word]
