"""All calls pass through one dispatch point: a recording interpreter records every operator, and its traces replay."""

from __future__ import annotations

import functools
import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import demo
from shardtensor.communication.transfer_log import recorded_by
from shardtensor.core import OPS, innermost
from shardtensor.functions.building import halos, unsplit_lines
from shardtensor.functions.building.scatter import scatter_add
from shardtensor.functions.fft import chirp_fft, transpose_fft
from shardtensor.functions.linalg import blocked_factorizations, blocked_qr, tsqr
from shardtensor.sharding.copy_plan import Line
from shardtensor.spmd.ragged_exchange import ragged_return
from shardtensor.tensor.pytree import leaves
from tests.cases import CASES, sharded_somehow
from tests.interpreters.recording import Trace, jacobi, write_views
from tests.interpreters.test_infer import layouts, split, step
from tests.layouts import array, everywhere, mesh_of

ESCAPES = {name for name, op in OPS.items() if "escapes" in op.tags}


def replays(fn: Callable[..., Any], *args: Any) -> Trace:
    """Traces a function, and compares what the trace returns and writes with what the function returns and writes."""
    mine, its = ([x.copy() if isinstance(x, st.ShardedTensor) else x for x in args] for _ in range(2))
    trace = Trace(fn, *args)
    wanted, found = fn(*mine), trace(*its)
    assert layouts(found) == layouts(wanted)
    for a, b in zip(leaves([found, its]), leaves([wanted, mine]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)
    return trace


@pytest.mark.full  # In the fast tier, jit records every operator.
@everywhere
@pytest.mark.parametrize("name", sorted(set(CASES) - ESCAPES))
def test_every_operator_replays(name: str, backend: str) -> None:
    @hypothesis.settings(max_examples=4)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        operands = sharded_somehow(data, made, backend)

        def call(*xs: Any) -> Any:
            return made.run(OPS[name].dispatch, list(xs))

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                call(*operands)
            except st.ShardTensorError as error:
                with pytest.raises(type(error)):
                    Trace(call, *operands)
                return
            replays(call, *operands)

    run()


@everywhere
def test_programs_with_views_and_writes_replay(backend: str) -> None:
    trace = replays(lambda x, w: {**step(x, w), "text": 0}, split(backend), split(backend, (6, 4)))
    assert any(" = put('v" in line for line in trace.lines(trace.steps))


@everywhere
def test_numpys_jacobi_in_place_replays(backend: str) -> None:
    trace = replays(functools.partial(jacobi, 50), split(backend, (9, 7), "float64"))
    assert sum(s[0].name == "setitem" for s in trace.steps) == 50


def test_an_argument_and_its_views_are_written_once(backend: str) -> None:
    replays(write_views, split(backend, (6, 5), "complex64"))


@everywhere
def test_the_training_step_of_the_demo_replays(backend: str) -> None:
    digits = demo.load_digits()
    mesh = mesh_of((4,), backend)
    rows, targets = st.device_put((digits.rows[:50], digits.targets[:50]), st.NamedSharding(mesh, st.P("x")))

    def train(rows: Any, targets: Any, *weights: Any) -> Any:
        loss, *sums = demo.sharded_gradients(rows, targets, weights)
        return [loss, *[w - 0.5 / 50 * s for w, s in zip(weights, sums, strict=True)]]

    weights = st.device_put(demo.initial_weights(), st.NamedSharding(mesh, st.P()))
    trace = replays(train, rows, targets, *weights)
    lines = list(trace.lines(trace.steps))
    assert sum("matmul" in line or "contract" in line for line in lines) == 5  # two forward, three backward


def slices() -> list[np.ndarray]:
    """Returns the offsets and sizes with which each of four devices sends a row, none, two, and one to the others."""
    sizes, k = np.array([1, 0, 2, 1]), st.axis_index("x")
    return [np.array([0, 0, 1, 3]), sizes, sizes * k, np.repeat(sizes[k], 4)]


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "pcast": lambda b: st.pcast(b, "x", to="unreduced"),
    "psum": lambda b: st.psum({"a": b, "n": b.shape[0]}, "x")["a"],
    "pmean": lambda b: st.pmean(b, "x"),
    "pmax": lambda b: st.pmax(b, "x"),
    "pmin": lambda b: st.pmin(b, "x"),
    "pprod": lambda b: st.pprod(b, "x"),
    "psum_scatter": lambda b: st.psum_scatter(b, "x", tiled=True),
    "all_gather": lambda b: st.all_gather(b, "x", tiled=True, axis=1),
    "all_to_all": lambda b: st.all_to_all(b, "x", 1, 0, tiled=True),
    "pswapaxes": lambda b: st.pswapaxes(b[:4], "x", 0),
    "ppermute": lambda b: st.ppermute(b, "x", [(0, 1), (1, 2)]),
    "pshuffle": lambda b: st.pshuffle(b, "x", [1, 2, 3, 0]),
    "pbroadcast": lambda b: st.pbroadcast(b * st.axis_index("x"), "x", 2),
    "ragged_all_to_all": lambda b: st.ragged_all_to_all(b, st.concat([b, b * 3]), *slices(), axis_name="x"),
    "ragged_return": lambda b: ragged_return(st.concat([b, b * 3]), b, *slices(), axis_name="x"),
}


@everywhere
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_collectives_in_shard_map_replay(name: str, backend: str) -> None:
    mesh = mesh_of((4,), backend)
    f = st.shard_map(lambda b: COLLECTIVES[name](b * 2) + 1, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
    x = st.device_put(array((16, 8), "float32", 1), st.NamedSharding(mesh, st.P("x")))
    trace = replays(f, x)
    (programs,) = [params[0] for op, _, params, _ in trace.steps if op.name == "map_shards"]
    assert [[op.name for op, *_ in steps].count(name) for steps, *_ in programs.values()] == [1] * 4
    assert layouts(st.eval_shape(f, x)) == layouts(f(x))


MAPS: dict[str, Callable[[Any, Any], Any]] = {
    "lists": lambda x, d: st.pmap(lambda a, b: (a + b, a.sum()), st.shard(x, devices=d), x[0]),
    "arrays": lambda x, d: st.pmap(lambda a: a * a, x, in_axes=1, out_axes=-1),
    "an equal result": lambda x, d: st.pmap(lambda a: st.psum(a, "i"), x[:2], axis_name="i", out_axes=None),
    "a map of a map": lambda x, d: st.pmap(st.pmap(lambda a: a + 1), x[:2, :3]),
    "a map in a map": lambda x, d: st.pmap(lambda a: st.pmap(lambda b: b * 2, a), x[:2, :2], devices=np.array([d[:2], d[2:4]])),
    "smap": lambda x, d: st.smap(lambda a, b: a @ b, x, x.T, axes=[(0, None), (None, 1)], out_axes=(0, 1)),
    "replicated": lambda x, d: st.shard_map(lambda a: st.psum(a.sum(axis=0), "x"), mesh=mesh_of((4,), d[0].backend), in_specs=st.P("x"), out_specs=st.P())(x),
    "an unreduced result": lambda x, d: st.shard_map(lambda a: a * 2, mesh=mesh_of((4,), d[0].backend), in_specs=st.P("x"), out_specs=st.P(unreduced={"x"}))(x[:4]).sum(),
    "one of two axes": lambda x, d: st.shard_map(lambda a: a + a.sum(), mesh=mesh_of((2, 2), d[0].backend), in_specs=st.P("x"), out_specs=st.P("x"), axis_names={"x"})(x),
    "donated": lambda x, d: st.pmap(lambda a: a.__iadd__(1), st.shard(x + 1, devices=d), donate=True),
    "a closure": lambda x, d: st.pmap(lambda a: a + x.sum(), st.shard(x, devices=d)),
    "views and scalars": lambda x, d: [st.pmap(lambda a, s: (a[1:], a[0] * s), st.shard(x, devices=d[:3]), 3.0), x[2, 2]],
    "copies": lambda x, d: [x.copy(), x.T.copy(), st.device_put({"a": x.T, "b": 1}, d[1]), st.reshard(x, d[0])],
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("name", list(MAPS))
def test_maps_replay(name: str, backend: str) -> None:
    f = functools.partial(MAPS[name], d=st.devices(backend))
    x = split(backend, (6, 6))
    if name == "an equal result":
        x = st.device_put(np.asarray(x), st.devices(backend)[0])
    with st.use_mesh(st.make_mesh((8,), ("i",), devices=st.devices(backend)[:8])):
        replays(f, x)
        assert layouts(st.eval_shape(f, x)) == layouts(f(x))


def others(x: Any) -> Any:
    """Calls operators that have no cases."""
    made = [
        st.asarray([1, 2]), st.asarray(x, dtype="int8"), st.from_dlpack(np.ones(2)), st.arange(3), st.eye(2), st.full(2, 7),
        st.zeros(2), st.ones(2), st.zeros_like(x), st.ones_like(x), st.full_like(x, 2), st.shard(x), x.copy(), x[1:] + 1,
        st.reshard(x, x.device), st.device_put(x, x.device), x[[0]], st.unshard(st.shard(x)), st.empty(0), st.empty_like(x[:0]),
        st.map_overlap(lambda block: block, x, depth=1, boundary="nearest"), OPS["convolve_part"].dispatch(x[:, 0], x[:2, 0]),
        st.convolve(x[:, 0], x[:2, 0]), st.partition(x[:, 0], 1), st.argpartition(x[:, 0], 1),
        st.linalg.svd(x), st.linalg.qr(x), st.linalg.eigh(x[:2]), st.linalg.eig(x[:2]), st.linalg.eigvals(x[:2]),
        st.linalg.slogdet(x[:2]), st.fft.fftfreq(5), st.fft.rfftfreq(5),
        st.linspace(0, 1, 3), st.indices((2, 3)), st.meshgrid(x[0], x[1]), st.nanmedian(x), drawn(st.random.key(1), x),
        steps(x), x[st.asarray([1, 0], device=x.sharding.mesh)], scatter_add(st.asarray([1, 0]), x[:2], size=3),
    ]  # fmt: skip
    x[1:] = 0
    return [made, st.to_batched_list(x, 4), OPS["assemble"].dispatch([x[:1]], x.sharding.mesh, st.P())]


def chirps(z: Any) -> Any:
    """Calls the steps of a convolution with a chirp."""
    window = {"parts": 2, "number": 1, "given": 2, "count": 2}
    return [
        chirp_fft.fft_chirped(z, n=4, begin=1, scale=1.0, inverse=False),
        chirp_fft.fft_rotated(z, n=4, stride=1, inverse=False),
        chirp_fft.fft_added(z, z, number=1, parts=2, inverse=False),
        chirp_fft.chirp_filter(2, size=4, **window, inverse=False, dtype="complex128"),
    ]


def steps(x: Any) -> Any:
    """Calls the steps of distributed algorithms."""
    z = st.astype(x, "complex128")
    return [
        transpose_fft.fft_columns(z, n=4, scale=1.0, inverse=False), transpose_fft.fft_transposed(z), transpose_fft.fft_packed(x),
        transpose_fft.fft_real_columns(x, n=4, scale=1.0, inverse=False),
        transpose_fft.fft_unpacked(z), transpose_fft.fft_of_real(z, z), transpose_fft.fft_to_real(z, z, inverse=True),
        *chirps(z), tsqr.tall_qr(x), tsqr.tall_r(x),
        blocked_factorizations.blocked_cholesky(st.eye(2)), blocked_factorizations.blocked_inv(st.eye(2)), blocked_factorizations.blocked_slogdet(x[:2]),
        blocked_factorizations.blocked_solve(st.eye(2), x[:2]), blocked_qr.blocked_qr(x, complete=False),
        unsplit_lines.padded(x, widths=((0, 1), (2, 0)), value=np.float64(7).tobytes()),
        unsplit_lines.central_differences(x, axis=0, spacing=1.0),
        halos.lines_copied((x[:2], x), 0, (Line(1, 2, 0, 0),)),
    ]  # fmt: skip


def drawn(key: st.random.Key, x: Any) -> Any:
    """Calls functions that draw random numbers."""
    draw = st.random
    return [
        draw.uniform(key, (3,)), draw.normal(key, (3,)), draw.integers(key, 0, 9, (3,)), draw.permutation(key, 4),
        draw.permutation(key, 9000),
        draw.permutation(key, 9000, device=st.make_mesh((2,), ("d",), devices=st.devices("checked")[:2])),
        draw.gamma(key, 2, (3,)),
        *st.topk(x, 1, axis=0),
        draw.exponential(key, (3,)), draw.gamma(key, x[0] + 2), draw.poisson(key, x[0] + 2), draw.binomial(key, 3, x[0] / 2),
        draw.categorical(key, x),
    ]  # fmt: skip


def test_the_tests_see_every_operator() -> None:
    x = st.device_put(np.ones((6, 2)), st.devices("numpy")[0])
    traces = [replays(others, x), replays(functools.partial(MAPS["arrays"], d=None), st.ones((4, 2)))]
    traces.append(replays(functools.partial(MAPS["an equal result"], d=None), x))
    traces.append(replays(functools.partial(MAPS["an unreduced result"], d=st.devices("numpy")), split("numpy")))
    seen = {op.name for trace in traces for op, *_ in trace.steps}
    composed = {name for name, op in OPS.items() if op.parts.composite and not op.parts.algorithm}
    inside = {"add_partials", "partial_sums"}  # Storages and transfers call them while an operator runs.
    loops = {name for name, op in OPS.items() if op.signature.functions}  # See `tests.interpreters.test_control_flow`.
    of_transforms = {"bessel_i1", "draws_of_examples", "gamma_slope", "mills_ratio", "rows_at", "scatter_add_each"}
    assert set(OPS) - ESCAPES - loops - of_transforms == seen | set(CASES) | set(COLLECTIVES) | composed | inside


UNSEEN: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: float(x.sum()),
    "NumPy array": lambda x: np.asarray(x),
    "mask": lambda x: x[x > 0],
    "shards": lambda x: x.addressable_shards,
    "an element in a program": lambda x: st.pmap(lambda a: float(a.sum()), st.shard(x)),
}


@pytest.mark.parametrize("name", list(UNSEEN))
def test_what_the_interpreter_cannot_see_raises(name: str, backend: str) -> None:
    with pytest.raises(st.ConcretizationError, match="needs the elements of a tensor"):
        Trace(UNSEEN[name], split(backend))


def test_tensors_that_the_function_closes_over(backend: str) -> None:
    known = split(backend)
    replays(lambda x: x + known[1:3].sum() + float(np.asarray(known).sum()), split(backend))
    before = np.array(known)
    for write in (lambda x: known.__setitem__(0, x[0]), lambda x: known.__iadd__(x), lambda x: known.T.__imul__(2)):
        with pytest.raises(st.ConcretizationError, match="closes over is written"):
            Trace(write, split(backend))
    np.testing.assert_array_equal(known, before)


# -- notebooks -------------------------------------------------------------------------------------


class Notebook:
    """Runs the cells of a notebook; every map that they call is traced and replayed, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traced: dict[Any, int] = {}
        self.unseen: list[str] = []
        self.maps = {name: getattr(st, name) for name in ("pmap", "smap", "shard_map")}
        for name in self.maps:
            monkeypatch.setattr(st, name, functools.partial(self.map, name))

    def map(self, name: str, *args: Any, **options: Any) -> Any:
        fn = self.maps[name]
        if innermost() is not None:
            return fn(*args, **options)
        if not args:
            return lambda f: self.map(name, f, **options)
        if len(args) == 1:
            mapped = fn(args[0], **options)
            return lambda *arrays, **more: self.call(args[0], functools.partial(mapped, **more), *arrays)
        return self.call(args[0], lambda *arrays: fn(args[0], *arrays, **options), *args[1:])

    def call(self, fn: Any, mapped: Callable[..., Any], *args: Any) -> Any:
        result = mapped(*args)
        code = getattr(fn, "__code__", fn)
        self.traced[code] = self.traced.get(code, 0) + 1
        if self.traced[code] > 2 or innermost() is not None:
            return result
        with recorded_by():  # The cells count their transfers.
            try:
                trace = Trace(mapped, *args)
            except (AttributeError, TypeError, ValueError):
                self.unseen.append(fn.__name__)
                return result
            found = trace(*args)
        for a, b in zip(leaves(found), leaves(result), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)
        return result


HAS_TORCH = importlib.util.find_spec("torch") is not None  # One cell maps a function of PyTorch, where it is installed.


@pytest.mark.parametrize(
    ("name", "traced", "unseen"),
    [
        ("01_sharding", 6, []), ("02_writing", 0, []), ("03_parallel_tutorial", 6, []),
        pytest.param("04_training", 4 + HAS_TORCH, ["by_library"] * HAS_TORCH, marks=pytest.mark.full),
        pytest.param("05_patterns", 6, [], marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_the_maps_of_the_notebooks_replay(
    name: str, traced: int, unseen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = Notebook(monkeypatch)
    path = Path(__file__).parents[2] / "notebooks" / f"{name}.ipynb"
    cells = json.loads(path.read_text())["cells"]
    scope: dict[str, Any] = {"__name__": "notebook", "display": print}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), scope)
    assert (len(notebook.traced), notebook.unseen) == (traced, unseen)
