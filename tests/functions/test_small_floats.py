"""bfloat16 and the float8 kinds: operators compute in float32, and round the result once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import hypothesis.strategies as some
import numpy as np
import pytest
from hypothesis import given, settings

import shardtensor as st
from shardtensor.backend.registry import load
from shardtensor.backend.small_floats import SMALL_FLOATS, small_float
from tests import peers
from tests.conftest import NO_TORCH
from tests.draws import drawn
from tests.layouts import assert_rounded, put

pytest.importorskip("ml_dtypes")

BFLOAT16 = small_float("bfloat16")
KINDS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
SOME = [KINDS[0], *[pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:]]]
BACKENDS = [
    "numpy", "checked", "grouped", "cupy",
    pytest.param("torch", marks=pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH)),
]  # fmt: skip
everywhere = pytest.mark.parametrize("backend", BACKENDS)


def mesh_on(backend: str, count: int = 4) -> st.Mesh:
    return st.Mesh(np.array(st.devices(backend)[:count], dtype=object), ("x",))


def rounded(value: Any, backend: str, dtype: Any = BFLOAT16, spec: Any = ("x",), count: int = 4) -> st.ShardedTensor:
    """The value in a small dtype, which a backend has, on devices of it."""
    if not load(backend).has_dtype(np.dtype(dtype)):
        pytest.skip(f"{backend} has no {dtype}")
    return put(np.asarray(value).astype(dtype), backend, (count,), st.P(*spec))


ROWS = np.array([[0.5, -1, 2], [3, 0.25, -0.75], [1, 1.5, 8], [-4, 6, 0], [7, -2.5, 0.125]], np.float32)
"""Exact in all of these dtypes."""

OPERATORS: dict[str, Any] = {
    "add": lambda xp, x: xp.add(x, x),
    "multiply by a number": lambda xp, x: x * 1.5,
    "exp": lambda xp, x: xp.exp(x),
    "power": lambda xp, x: x**2,
    "maximum": lambda xp, x: xp.maximum(x, 1),
    "clip": lambda xp, x: xp.clip(x, 0, 2),
    "where": lambda xp, x: xp.where(x > 1, x, 0),
    "sum": lambda xp, x: xp.sum(x),
    "sum of rows": lambda xp, x: xp.sum(x, axis=1),
    "mean": lambda xp, x: xp.mean(x, axis=0),
    "max": lambda xp, x: xp.max(x, axis=0),
    "matmul": lambda xp, x: xp.matmul(x, xp.matrix_transpose(x)),
    "sort": lambda xp, x: xp.sort(x, axis=0),
    "cumulative_sum": lambda xp, x: xp.cumulative_sum(x, axis=0),
    "concat": lambda xp, x: xp.concat([x, x]),
    "roll": lambda xp, x: xp.roll(x, 1, axis=0),
    "reshape": lambda xp, x: xp.reshape(x, (3, 5)),
    "transpose": lambda xp, x: x.T,
    "slice": lambda xp, x: x[1::2, ::-1],
    "mask": lambda xp, x: x[x > 0],
    "indices": lambda xp, x: x[[3, 0]],
    "take": lambda xp, x: xp.take(x, xp.asarray([1, 2]), axis=0),
    "unique": lambda xp, x: xp.unique_values(x),
    "median": lambda xp, x: xp.median(x),
    "tile": lambda xp, x: xp.tile(x, (2, 1)),
}


@everywhere
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compute_in_float32(name: str, kind: str, backend: str) -> None:
    dtype, apply = small_float(kind), OPERATORS[name]
    x = rounded(ROWS, backend, dtype)
    assert_rounded(apply(st, x), apply(np, ROWS), dtype)
    assert st.eval_shape(lambda a: apply(st, a), x).dtype == dtype if name not in ("mask", "unique") else True


@everywhere
def test_results_of_other_kinds_keep_their_dtypes(backend: str) -> None:
    x = rounded(ROWS, backend)
    assert (x > 1).dtype == np.bool_
    assert st.argmax(x).item() == 8
    assert st.argsort(x, axis=0).dtype == np.int64
    assert [a.tolist() for a in st.nonzero(x)] == [a.tolist() for a in np.nonzero(ROWS)]
    assert st.sum(x, dtype="float32").dtype == np.float32
    assert np.asarray(x.astype("int32")).tolist() == ROWS.astype("int32").tolist()


@everywhere
def test_sums_accumulate_in_float32(backend: str) -> None:
    """In bfloat16, 256 + 1 is 256."""
    assert st.sum(rounded(np.ones(1000), backend)).item() == 1000
    assert float(st.cumulative_sum(rounded(np.ones(512), backend))[-1]) == 512


@everywhere
def test_writes_are_rounded(backend: str) -> None:
    x, wanted = rounded(ROWS, backend), ROWS.copy()
    view = x[1:3]
    x[0, 1], wanted[0, 1] = 1.3, np.float32(1.3).astype(BFLOAT16)
    x[2:4], wanted[2:4] = 7, 7
    x[x > 5], wanted[wanted > 5] = 0, 0
    x += 1
    wanted += 1
    x[4] = np.arange(3, dtype=np.float64)
    wanted[4] = np.arange(3)
    assert_rounded(x, wanted)
    assert_rounded(view, wanted[1:3])


@everywhere
@pytest.mark.parametrize("kind", KINDS)
def test_scalars_are_written_where_a_mask_is_true(kind: str, backend: str) -> None:
    x, host = rounded(ROWS, backend, small_float(kind)), ROWS.copy()
    for mask, value in ((ROWS > 1, 3), (ROWS < 0, -0.5), (ROWS == 0, np.float32(1.03))):
        x[mask] = value
        host[mask] = value
        assert_rounded(x, host, small_float(kind))
    x.T[:, 1:][ROWS.T[:, 1:] > 1] = 0.5
    host.T[:, 1:][ROWS.T[:, 1:] > 1] = 0.5
    assert_rounded(x, host, small_float(kind))


@everywhere
def test_creation(backend: str) -> None:
    if not load(backend).has_dtype(BFLOAT16):
        pytest.skip("no bfloat16")
    mesh = mesh_on(backend)
    assert_rounded(st.zeros((5, 3), dtype="bfloat16", device=mesh), np.zeros((5, 3)))
    assert_rounded(st.full(5, 1.3, dtype=st.bfloat16, device=mesh), np.full(5, np.float32(1.3)))
    assert_rounded(st.arange(9, dtype=st.bfloat16, device=mesh), np.arange(9))
    assert_rounded(st.linspace(0, 1, 5, dtype=st.bfloat16, device=mesh), np.linspace(0, 1, 5))
    x = rounded(ROWS, backend)
    assert_rounded(st.ones_like(x), np.ones_like(ROWS))
    assert_rounded(st.zeros_like(x), np.zeros_like(ROWS))
    assert st.ones_like(x).sharding == x.sharding


@everywhere
def test_copies_between_layouts_and_dtypes(backend: str) -> None:
    x = rounded(ROWS, backend)
    mesh = x.sharding.mesh
    assert_rounded(st.reshard(x, st.NamedSharding(mesh, st.P(None, "x"))), ROWS)
    assert_rounded(st.device_put(x, mesh.flat[1]), ROWS)
    assert_rounded(copy.copy(x), ROWS)
    assert_rounded(pickle.loads(pickle.dumps(x)), ROWS)
    assert_rounded(x.astype("float64").astype(st.bfloat16), ROWS)
    assert_rounded(st.asarray(np.asarray(x)), ROWS)
    assert_rounded(x.view("int16").view(st.bfloat16), ROWS)
    assert x.tolist() == ROWS.tolist()
    assert "bfloat16" in repr(x)
    with st.transfers() as log:
        st.device_put(x, st.NamedSharding(mesh, st.P()))
    assert log.bytes == 3 * ROWS.size * 2


@everywhere
def test_maps_get_arrays_of_the_library(backend: str) -> None:
    x = rounded(ROWS[:4], backend)

    def double(block: Any) -> Any:
        assert load(backend).dtype_of(block) == BFLOAT16
        return st.astype(st.astype(block, "float32") * 2, BFLOAT16)

    spec = st.P("x")
    assert_rounded(st.shard_map(double, mesh=x.sharding.mesh, in_specs=spec, out_specs=spec)(x), ROWS[:4] * 2)


@everywhere
def test_collectives(backend: str) -> None:
    if backend == "cupy":
        pytest.skip("the double has no kernels of bfloat16, which CuPy has")
    x = rounded(ROWS[:4], backend)
    total = st.shard_map(lambda b: st.psum(b, "x"), mesh=x.sharding.mesh, in_specs=st.P("x"), out_specs=st.P())(x)
    assert_rounded(total, ROWS[:4].sum(axis=0, keepdims=True))


@pytest.mark.parametrize("kind", KINDS)
def test_jit_computes_the_same(kind: str) -> None:
    x = rounded(np.resize(ROWS, (64, 32)), "numpy", small_float(kind))

    def f(a: Any) -> Any:
        return st.exp(a / 8) * 2 + a, st.sum(a * a, axis=1)

    for found, wanted in zip(st.jit(f)(x), f(x), strict=True):
        assert_rounded(found, wanted, small_float(kind))


# -- promotion -------------------------------------------------------------------------------------

OTHERS = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", *KINDS)


PYTHONS = {"a bool": True, "an int": 1, "a float": 1.0}
"""Numbers of Python."""

WIDER = {"float16": "float32", "float32": "float32", "float64": "float64", "complex64": "complex64"}

PROMOTED = """
import jax, numpy
found = {}
with jax.enable_x64(True):
    for kind, name, number in given:
        x = jax.ShapeDtypeStruct((4,), kind)
        operands = (x,) if number is not None else (x, jax.ShapeDtypeStruct((4,), name))
        try:
            found[kind, name] = str(jax.eval_shape(lambda x, y=number: x + y, *operands).dtype)
        except ValueError:  # TypePromotionError, which has no public name
            found[kind, name] = None
"""


def promoted(kind: str, other: str) -> str | None:
    """Returns the common dtype of a small float and another kind of number, or None if there is none."""
    if other in KINDS:
        return kind if other == kind else None
    if other in WIDER:
        return WIDER[other] if kind == "bfloat16" else None
    return kind


@pytest.mark.full
def test_promotion_is_that_of_jax() -> None:
    peers.require_jax()
    pairs = [(kind, name, PYTHONS.get(name)) for kind in KINDS for name in (*OTHERS, *PYTHONS)]
    assert dict(peers.run(PROMOTED, pairs)) == {(kind, name): promoted(kind, name) for kind, name, _ in pairs}


@pytest.mark.parametrize("other", [*OTHERS, *PYTHONS])
@pytest.mark.parametrize("kind", KINDS)
def test_promotion(kind: str, other: str) -> None:
    """It is that of JAX, with which the test above compares the table."""
    name = promoted(kind, other)
    wanted = None if name is None else small_float(name) if name in KINDS else np.dtype(name)
    x, python = rounded(np.ones(4), "numpy", small_float(kind)), PYTHONS.get(other)
    y = python if python is not None else rounded(np.ones(4), "numpy", small_float(other) if other in KINDS else other)
    if wanted is None:
        for call in (lambda: x + y, lambda: st.result_type(x, y)):
            with pytest.raises(st.ArgumentTypeError, match="no common dtype; cast"):
                call()
    else:
        assert (x + y).dtype == st.result_type(x, y) == wanted


def test_concat_promotes() -> None:
    x = rounded(ROWS, "numpy")
    assert st.concat([x, x.astype("float32")]).dtype == np.float32
    with pytest.raises(st.ArgumentTypeError, match="no common dtype"):
        st.concat([x, x.astype(st.float8_e5m2)])


@settings(max_examples=drawn(60))
@given(some.data())
def test_random_layouts(data: Any) -> None:
    """Reductions and products of any shape and layout have the values of float32."""
    backend = data.draw(some.sampled_from(["numpy", "checked"]))
    kind = small_float(data.draw(some.sampled_from(KINDS)))
    shape = tuple(data.draw(some.lists(some.integers(0, 9), min_size=1, max_size=2)))
    spec = data.draw(some.sampled_from([("x",), (None, "x"), ()]))[: len(shape)]
    value = np.asarray(data.draw(some.lists(some.integers(-6, 6), min_size=1))).astype(np.float32)
    x, value = (
        rounded(np.resize(value, shape), backend, kind, spec, data.draw(some.integers(1, 5))),
        np.resize(value, shape),
    )
    axis = data.draw(some.sampled_from([None, 0, -1]))
    with np.errstate(all="ignore"):
        assert_rounded(st.sum(x, axis=axis), np.sum(value, axis=axis), kind)
        assert_rounded(x * x, value * value, kind)
        assert_rounded(x[::-1], value[::-1], kind)


# -- what they are ---------------------------------------------------------------------------------


def test_names() -> None:
    for name in SMALL_FLOATS:
        assert np.dtype(getattr(st, name)) == small_float(name)
        assert st.isdtype(small_float(name), "real floating")
        assert st.isdtype(small_float(name), ("integral", "numeric"))
        assert not st.isdtype(small_float(name), ("integral", st.float32))
    assert st.isdtype(BFLOAT16, st.bfloat16)
    assert (st.finfo(st.bfloat16).bits, st.finfo(st.bfloat16).eps) == (16, 2**-7)
    assert st.can_cast(st.bfloat16, "float32")
    assert not st.can_cast("float32", st.bfloat16)
    with pytest.raises(st.ArgumentError):
        st.isdtype(BFLOAT16, "small")


@everywhere
def test_least_squares_and_randomized_decompositions(backend: str) -> None:
    x = rounded(ROWS, backend)
    wide = x.astype("float32")
    key = st.random.key(0)
    for found, wanted in (
        (st.linalg.randomized_svd(x, 2, key=key), st.linalg.randomized_svd(wide, 2, key=key)),
        (st.linalg.lstsq(x, x[:, 0]), st.linalg.lstsq(wide, wide[:, 0])),
    ):
        for one, other in zip(found, wanted, strict=True):
            if isinstance(one, int):
                assert one == other
            else:
                assert_rounded(one, other)
    solution, _, _, values = st.linalg.lstsq(x, wide[:, 0])
    assert (solution.dtype, values.dtype) == (np.float32, np.float32)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(st.ArgumentTypeError, match="pip install ml_dtypes"):
        st.zeros(3, dtype="float8_e5m2")
    with pytest.raises(st.ArgumentTypeError, match="pip install ml_dtypes"):
        _ = st.bfloat16


def test_backends_that_lack_a_dtype_say_so() -> None:
    with pytest.raises(st.ArgumentTypeError, match="'cupy' has no arrays of float8_e4m3fn"):
        st.device_put(ROWS.astype(st.float8_e4m3fn), st.devices("cupy")[0])


def test_dlpack_says_what_to_export() -> None:
    x = rounded(ROWS, "numpy", count=1)
    with pytest.raises(st.InterchangeError, match=r"no bfloat16; export x.view\('int16'\)"):
        x.__dlpack__()
    bits = np.from_dlpack(x.view("int16"))
    np.testing.assert_array_equal(bits.view(BFLOAT16).astype(np.float32), ROWS)


def test_files_have_the_bits(tmp_path: Any) -> None:
    x = rounded(ROWS, "numpy")
    with pytest.raises(st.ArgumentTypeError, match=r"no bfloat16; write x.view\('int16'\)"):
        st.save(tmp_path / "x.npy", x)
    st.save(tmp_path / "x.npy", x.view("int16"))
    assert_rounded(st.load(tmp_path / "x.npy").view(st.bfloat16), ROWS)


@pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH)
def test_tensors_of_torch_are_operands() -> None:
    import torch

    x = rounded(ROWS, "torch")
    assert_rounded(x + torch.ones(3, dtype=torch.bfloat16), ROWS + 1)
    assert_rounded(st.asarray(torch.ones(3, dtype=torch.bfloat16)), np.ones(3))
    assert load("torch").dtype_of(torch.zeros(1, dtype=torch.float8_e5m2)) == small_float("float8_e5m2")
