"""Kernels on tensors of PyTorch and on GPUs: what is fused, in how many launches, and that eager mode's results come out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend.registry import load
from shardtensor.core import OPS
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.cuda import cuda_executor
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import shard_arrays
from tests import fakecupy
from tests.cases import CASES, sharded_somehow
from tests.conftest import NO_GPU, NO_TORCH
from tests.fakecupy import world
from tests.interpreters.jit.random_programs import run_seeds
from tests.interpreters.jit.test_groups import black_scholes, logsumexp, softmax
from tests.interpreters.jit.test_operators import ESCAPES, copied
from tests.interpreters.test_infer import layouts, split
from tests.layouts import MESHES, array, mesh_of, specs

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler, which also stands for NVRTC"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

BACKENDS = [
    pytest.param("torch", marks=pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH or "torch")),
    "cupy",
]
on_the_double = pytest.mark.skipif(not NO_GPU, reason="looks into the double")
on_devices = pytest.mark.parametrize("backend", BACKENDS)


def near(found: Any, wanted: Any) -> None:
    """Compares results with those of eager mode, and their layouts."""
    assert layouts(found) == layouts(wanted)
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        if isinstance(b, (st.ShardedTensor, np.ndarray)):
            x, y = np.asarray(a), np.asarray(b)
            assert x.dtype == y.dtype
            if x.dtype.kind in "fc":
                small = 1e-3 if x.dtype == np.float16 else 1e-5 if x.dtype.name in ("float32", "complex64") else 1e-11
                scale = np.abs(y[np.isfinite(y)]).max(initial=0)
                np.testing.assert_allclose(x, y, rtol=small, atol=small * scale)
            else:
                np.testing.assert_array_equal(x, y)


def agrees(fn: Callable[..., Any], *args: Any, kernels: int | None = None) -> Any:
    """Compares a function with its compiled program, which has that many kernels, each of which runs."""
    traced = st.jit(fn, executor="c")
    for _ in range(2):
        mine, its = copied(args), copied(args)
        near(traced(*its), fn(*mine))
        near(its, mine)
    if kernels is not None:
        executable = traced.lower(*args)._executable
        assert len(executable.kernels) == kernels
        assert all(fused.compiled is not None for fused in executable.kernels)
    return traced


@on_devices
@pytest.mark.parametrize(
    ("count", "dtype"),
    [(8, "float32"), *[pytest.param(n, "float64", marks=pytest.mark.full) for n in (1, 3, 8)]],
)
def test_chains_and_rows_are_one_kernel(backend: str, count: int, dtype: str) -> None:
    mesh = mesh_of((count,), backend)
    x = st.device_put(np.abs(array((10, 6), dtype, 1)) + 1, st.NamedSharding(mesh, st.P("x")))
    agrees(softmax, x, kernels=1)
    agrees(logsumexp, x, kernels=1)  # The view ends the group of the maximum, which is no kernel alone.
    agrees(black_scholes, x, x + 1, x + 2, kernels=1)
    agrees(lambda x, a: (x * a + 3 - x[:, :1]) / x.mean(axis=1, keepdims=True), x, 0.5, kernels=1)
    agrees(lambda x: (x.var(axis=1), x.std(axis=-1, keepdims=True) * 2, st.where(x > 2, x, 0)), x, kernels=2)


@on_devices
def test_operands_that_are_split_otherwise_are_no_part(backend: str) -> None:
    mesh = mesh_of((2, 4), backend)  # Two GPUs have four devices each.
    rows, columns = (st.device_put(array((8, 8), "float32", k), st.NamedSharding(mesh, st.P(*spec)))
                     for k, spec in enumerate([("x",), (None, "y")]))  # fmt: skip
    agrees(lambda a, b: (a * 2 + 1, b * 2 + 1, (a + b) * 2), rows, columns)
    agrees(lambda a: a - a.sum(axis=1, keepdims=True), columns)
    agrees(
        lambda a, b: (st.tanh((a @ b) * 2) + 1, st.squeeze(a[None] * 2, 0), st.take(a * 2, [1, 0], axis=0)), rows, rows
    )
    agrees(lambda a, b: st.tanh(a * 2) + b.mean(axis=0), rows, columns)


@on_the_double
def test_one_launch_on_the_logical_devices_of_a_gpu() -> None:
    x = st.device_put(np.ones((40, 3), "f4"), st.NamedSharding(mesh_of((4,), "cupy"), st.P("x")))

    def ten(x: Any) -> Any:
        for k in range(5):
            x = (x + k) * x
        return x

    def launches(fn: Any) -> int:
        fn(x)
        before = len(counted)
        fn(x)
        return len(counted) - before

    counted: list[str] = []
    launch = world.World.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load("cupy"), "captures", False)  # The launches that a graph would join.
        patch.setattr(
            world.World, "launch", lambda self, name, *a, **k: (counted.append(name), launch(self, name, *a, **k))[1]
        )
        assert launches(st.jit(ten)) == 1
        assert launches(ten) == 10
        assert launches(st.jit(softmax)) == 1
        assert launches(st.jit(lambda x: ((x - 1) ** 2).mean())) == 1
        assert launches(st.jit(smoothed)) == 2 + 6  # Two copies, of which the steps write one and read the other.
        patch.setattr(cuda_executor, "SEGMENT", 16)
        assert launches(st.jit(lambda x: ((x - 1) ** 2).mean())) == 2


def smoothed(u: Any) -> Any:
    u = u.copy()
    for _ in range(6):
        u[1:-1] = 0.5 * (u[:-2] + u[2:])
    return u


def test_windows_on_one_gpu_are_kernels() -> None:
    def jacobi(u: Any) -> None:
        for _ in range(3):
            u[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])

    def fill(u: Any, v: Any) -> Any:
        new = u * 2
        new[1:3] = st.exp(v[1:3]) + 1
        new[:, ::2] *= 2
        new += 1
        return new

    u = split("cupy", (9, 7), "float64")
    agrees(jacobi, u, kernels=3)
    agrees(lambda u, v: (jacobi(u), u.sum(), jacobi(v)), u, split("cupy", (9, 7), "float64"))
    agrees(fill, u, split("cupy", (9, 7), "float64"))


@on_devices
@pytest.mark.parametrize(
    "dtype",
    ["int8", *[pytest.param(d, marks=pytest.mark.full) for d in ("bool", "uint8", "int64", "float16", "complex64")]],
)
def test_other_dtypes(backend: str, dtype: str) -> None:
    x = split(backend, (7, 5), dtype)

    def f(x: Any) -> Any:
        y = st.where(x != 0, x, x) if dtype == "bool" else x * x + x
        sums = () if (backend, dtype) == ("torch", "uint8") else (x.sum(axis=1), (y + y).sum())  # torch lacks uint64.
        return y, y == x, st.logical_not(y), y.astype("float32"), x.any(axis=-1), sums

    agrees(f, x)


@on_devices
def test_numbers_empty_shards_and_broadcasts(backend: str) -> None:
    for shape in ((3, 4), (1, 4), (0, 4), (2, 0)):
        x = split(backend, shape)
        agrees(lambda x, a, n: (x * a + n, st.tanh(x[:1] * 2) + 1, -(x.T + 1), (x + 1).sum(axis=0)), x, 0.5, 3)
    scalar = st.device_put(np.float32(3), st.devices(backend)[0])
    agrees(lambda s: (s * 2 + 1, st.exp(s) - 1), scalar)
    x = st.device_put(array((6, 4), "float32", 1), st.devices(backend)[0])
    agrees(lambda x, s: (x * s + 1) / (s + 1), x, scalar, kernels=1)


@on_devices
def test_numpy_is_no_executor_of_these_kernels(backend: str) -> None:
    x = split(backend)
    lowered = st.jit(softmax, executor="numpy").lower(x)
    assert not lowered._executable.kernels
    np.testing.assert_array_equal(np.asarray(st.jit(softmax, executor="numpy")(x)), np.asarray(softmax(x)))


def test_texts_and_costs() -> None:
    columns = st.NamedSharding(mesh_of((8,), "cupy"), st.P(None, "x"))
    lowered = st.jit(softmax).lower(st.device_put(np.ones((8, 4), "f4"), columns))
    row_text = st.jit(softmax).lower(st.device_put(np.ones((8, 4), "f4"), st.devices("cupy")[0]))
    assert lowered.as_text("groups").count("reduce") == 0  # Rows that are split over GPUs are no kernel.
    assert "__syncthreads" in row_text.as_text("cuda")
    assert row_text.as_text("c") == ""
    assert row_text.cost().executor == "cuda"
    assert row_text.cost().kernels == 1
    assert "ElementwiseKernel" in st.jit(lambda x: x * 2 + 1).lower(split("cupy", (8, 4))).as_text("cuda")


@pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH or "torch")
def test_tensors_of_torch_are_torchs_own() -> None:
    import torch

    x = split("torch")
    y = st.jit(lambda x: st.exp(x) * 2 + 1, executor="c")(x)
    assert all(isinstance(shard, torch.Tensor) for shard in shard_arrays(y))
    places = [shard.data_ptr() for shard in shard_arrays(y)]
    y += 1  # Nothing else holds the memory.
    assert [shard.data_ptr() for shard in shard_arrays(y)] == places
    bare = torch.arange(12.0).reshape(3, 4)
    turned = st.asarray(bare.T, device=st.devices("torch")[0])
    agrees(lambda x: x * 2 + x, turned, kernels=1)


@pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH or "torch")
def test_bfloat16_of_torch_runs_one_by_one() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = st.device_put(np.ones((4, 3), ml_dtypes.bfloat16), st.devices("torch")[0])
    traced = st.jit(lambda x: x * 2 + 1, executor="c")
    assert not traced.lower(x)._executable.kernels
    assert np.asarray(traced(x)).tolist() == [[3.0] * 3] * 4


@on_the_double
def test_an_error_of_a_launch_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x = st.device_put(np.ones((4, 3), "f4"), st.devices("cupy")[0])
    kept = np.asarray(x).copy()

    def write(x: Any) -> None:
        x[:] = st.exp(x) + 1

    traced = st.jit(write)

    def fails(self: Any, *args: Any) -> None:
        raise fakecupy.CUDARuntimeError(700)

    monkeypatch.setattr(cuda_executor.CudaKernel, "run", fails)
    with pytest.raises(st.BackendError, match="cupy"):
        traced(x)
    np.testing.assert_array_equal(np.asarray(x), kept)


# -- random programs and all operators -------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("count", [pytest.param(4), pytest.param(1000, marks=pytest.mark.full)])
def test_random_programs(backend: str, count: int) -> None:
    run_seeds("c", 0, count, backend)


@on_devices
@pytest.mark.parametrize("examples", [pytest.param(3), pytest.param(300, marks=pytest.mark.full)])
def test_random_layouts(backend: str, examples: int) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        mesh = mesh_of(data.draw(some.sampled_from(MESHES)), backend)
        shape = data.draw(some.sampled_from([(5, 5), (8, 2), (1, 6), (7, 1)]))
        shardings = [st.NamedSharding(mesh, data.draw(specs(mesh, 2))) for _ in range(2)]
        x, y = (st.device_put(array(shape, "float32", k), s) for k, s in enumerate(shardings))
        agrees(chains, x, y)

    run()


def chains(x: Any, y: Any) -> Any:
    a = st.tanh(x * 2) + y
    b = a - a.sum(axis=1, keepdims=True)
    return a, b, (b * b).mean(axis=-1), x.max(axis=0) + 1, st.where(b > 0, y, a[:1]) + y[:, :1], (y * y).sum()


@on_devices
@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(CASES) - ESCAPES))
def test_every_operator_before_a_chain(name: str, backend: str) -> None:
    @hypothesis.settings(max_examples=3)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        operands = sharded_somehow(data, made, backend)
        chain = functools.partial(
            map_leaves, lambda x: st.where(x == x, x, x) if isinstance(x, st.ShardedTensor) else x
        )

        def call(*xs: Any) -> Any:
            return chain(made.run(OPS[name].dispatch, list(xs)))

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                call(*copied(operands))
            except st.ShardTensorError:
                return
            agrees(call, *operands)

    run()
