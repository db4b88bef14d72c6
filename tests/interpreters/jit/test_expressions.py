"""The table of expressions: each function in C, compared with NumPy's, for every dtype and for special values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from shardtensor.core import OPS
from shardtensor.errors import ArgumentTypeError
from shardtensor.interpreters.jit.c import c_executor
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.kernels.expressions import (
    _ALIASES,
    BINARY_FUNCTIONS,
    C_TYPES,
    EXPRESSIONS,
    UNARY_FUNCTIONS,
    has_c,
)
from shardtensor.interpreters.jit.kernels.kernel import Kernel, KernelBuilder
from tests.draws import drawn
from tests.interpreters.jit.random_kernels import assert_same, special
from tests.layouts import strided

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler"),
]

ULP = 4
TABLE = sorted({*EXPRESSIONS, *_ALIASES} - {"astype", "clip_to_scalars"})
FUNCTIONS = {*UNARY_FUNCTIONS, *BINARY_FUNCTIONS} | {a for a, n in _ALIASES.items() if n in {*UNARY_FUNCTIONS, "atan2"}}
INEXACT = {*FUNCTIONS, "logaddexp"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def arity(name: str) -> int:
    return {"where": 3, "clip": 3}.get(name) or int(getattr(np, name).nin)


def operands(name: str, dtype: str, size: int = 4096) -> list[np.ndarray]:
    """Pairs of special values, and others."""
    made = [special(dtype, size, np.random.default_rng(k)) for k in range(arity(name))]
    if name == "where":
        made[0] = np.arange(size) % 3 == 0
    if name == "clip":
        made[1] = np.abs(made[1]) if dtype[0] == "f" else made[1]
    return made


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=[pytest.mark.full] if d in ("u1", "i2", "u2", "u4") else []) for d in C_TYPES]
)
def test_functions_equal_numpy_to_the_bit(dtype: str) -> None:
    names = [name for name in TABLE if name not in INEXACT and has_c_for(name, dtype)]
    if dtype[0] in "iu":
        names = strided(names, 2, list(C_TYPES).index(dtype) // 2)
    tested = [names[k : k + 8] for k in range(0, len(names), 8)]
    kernels = [kernel_of(some, dtype) for some in tested]
    made = c_executor.compile_kernels(kernels)
    flags = np.arange(4096) % 3 == 0
    for names, kernel in zip(tested, kernels, strict=True):
        xs = operands("where", dtype)
        xs[0] = special(dtype, 4096, np.random.default_rng(0))
        outs = [np.empty(4096, kernel.dtype(out.value)) for out in kernel.outputs]
        made[kernel].run((4096,), [*xs, flags], outs)
        for name, out in zip(names, outs, strict=True):
            given = [flags, *xs[1:]] if name == "where" else xs[: arity(name)]
            wanted = getattr(np, name)(*given)
            if name in ("fmax", "fmin", "clip"):  # NumPy itself gives a zero of either sign, by the position.
                wanted, out = wanted + 0, out + 0
            assert_same(out, wanted, (name, dtype, given))


def kernel_of(names: Sequence[str], dtype: str) -> Kernel:
    """A kernel that applies each function to three operands, or to a condition and two of them."""
    builder = KernelBuilder(1)
    xs = [builder.input(dtype, (True,)) for _ in range(3)]
    flag = builder.input("b1", (True,))
    for name in names:
        builder.output(builder.call(name, *([flag, *xs[1:]] if name == "where" else xs[: arity(name)])))
    return builder.build()


def has_c_for(name: str, dtype: str) -> bool:
    try:
        return has_c(kernel_of([name], dtype))
    except ArgumentTypeError:
        return False


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_functions_are_within_a_few_ulp(dtype: str) -> None:
    names = sorted(FUNCTIONS)
    kernels = []
    for name in names:
        builder = KernelBuilder(1)
        xs = [builder.input(dtype, (True,)) for _ in range(arity(name))]
        builder.output(builder.astype(builder.call(name, *xs), dtype))
        kernels.append(builder.build())
    made = c_executor.compile_kernels(kernels)
    rng = np.random.default_rng(7)
    info = np.finfo(dtype)
    edges = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1,
        -1,
        2,
        -2,
        0.5,
        -0.5,
        3,
        -3,
        88.7,
        89,
        -103.9,
        -104,
        709.7,
        710,
        -745,
    ]
    edges += [info.max, -info.max, info.tiny, -info.tiny, info.smallest_subnormal, -info.smallest_subnormal]
    edges += [
        info.tiny / 2,
        1 - info.epsneg,
        1 + info.eps,
        1e5,
        -1e5,
        1e10,
        1023.5,
        1024,
        -1074,
        -1075,
        127.9,
        128,
        -149,
    ]
    with np.errstate(all="ignore"):
        count = drawn(4000, fast=800)
        parts = [rng.normal(size=count), rng.random(count) * 2 - 1, rng.normal(size=count) * 50]
        some = np.concatenate([*parts, 10 ** rng.uniform(-38, 38, count)])
        pairs = np.array(list(itertools.product(edges, edges))).T
    for name, kernel in zip(names, kernels, strict=True):
        xs = [np.concatenate([p, some if not k else some[::-1]]).astype(dtype) for k, p in enumerate(pairs)]
        xs = xs[: arity(name)]
        out = np.empty_like(xs[0])
        made[kernel].run(out.shape, xs, [out])
        check_function(name, xs, out)


def check_function(name: str, xs: list[np.ndarray], out: np.ndarray) -> None:
    """Against the function in a greater precision; NaN, infinities and zeros as NumPy's."""
    dtype = out.dtype
    wanted = getattr(np, name)(*xs).astype(dtype)
    exact = getattr(np, name)(*[x.astype("g") for x in xs])
    assert np.array_equal(np.isnan(out), np.isnan(wanted)), (name, [x[np.isnan(out) != np.isnan(wanted)] for x in xs])
    numbers = ~np.isnan(wanted)
    finite = numbers & np.isfinite(wanted) & np.isfinite(out)
    with np.errstate(all="ignore"):
        distance = np.abs(out.astype("g") - exact) / np.spacing(np.maximum(np.abs(wanted), np.finfo(dtype).tiny * 0))
    worst = np.argmax(np.where(finite, distance, 0))
    assert distance[worst] <= ULP or not finite[worst], (
        name,
        dtype,
        float(distance[worst]),
        [x[worst] for x in xs],
        out[worst],
        wanted[worst],
    )
    unlike = numbers & (np.isinf(out) != np.isinf(wanted))
    assert not unlike.any(), (name, dtype, [x[unlike] for x in xs], out[unlike], wanted[unlike])
    zero = numbers & (wanted == 0)
    unlike = zero & ((out != 0) | (np.signbit(out) != np.signbit(wanted)))
    assert not unlike.any(), (name, dtype, [x[unlike] for x in xs], out[unlike], wanted[unlike])


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_logaddexp_is_as_accurate_as_its_terms(dtype: str) -> None:
    builder = KernelBuilder(1)
    a, b = [builder.input(dtype, (True,)) for _ in range(2)]
    builder.output(builder.call("logaddexp", a, b))
    xs = operands("logaddexp", dtype)
    out = np.empty_like(xs[0])
    c_executor.compile_kernels([builder.build()])[builder.build()].run(out.shape, xs, [out])
    np.testing.assert_allclose(out, np.logaddexp(*xs), rtol=4 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)


def test_casts_equal_numpy_where_the_dtype_has_the_value() -> None:
    kernels, pairs = [], list(itertools.product(C_TYPES, C_TYPES))
    for given in C_TYPES:
        builder = KernelBuilder(1)
        x = builder.input(given, (True,))
        for wanted in C_TYPES:
            if wanted != given:
                builder.output(builder.astype(x, wanted))
        kernels.append(builder.build())
    made = c_executor.compile_kernels(kernels)
    for kernel in kernels:
        given = kernel.inputs[0].dtype
        x = special(given, 1000, np.random.default_rng(0))
        if given[0] == "f":
            x = np.trunc(np.nan_to_num(x)) % 100 + np.dtype(given).type(0.25)
        outs = [np.empty(1000, out_dtype) for out_dtype in [kernel.dtype(out.value) for out in kernel.outputs]]
        made[kernel].run((1000,), [x], outs)
        for out in outs:
            assert_same(out, x.astype(out.dtype), (given, out.dtype))
    assert pairs


def test_clip_to_scalars_keeps_zeros_as_numpy_does() -> None:
    builder = KernelBuilder(1)
    x, low, high = builder.input("f4", (True,)), builder.input(float), builder.input(float)
    builder.output(builder.call("clip", x, low, high))
    kernel = builder.build()
    a = special("f4", 1000, np.random.default_rng(0))
    for bounds in [(0.0, 1.0), (-0.0, 0.0), (-1.0, 1.0), (2.0, 1.0), (np.nan, 1.0), (-np.inf, 0.5)]:
        out = np.empty_like(a)
        c_executor.compile_kernels([kernel])[kernel].run(a.shape, [a, *bounds], [out])
        assert_same(out, np.clip(a, *[np.float32(b) for b in bounds]), bounds)


def test_every_function_of_the_table_is_an_operator_or_numpys_name_of_one() -> None:
    import shardtensor as st

    assert all(hasattr(st, name) for name in TABLE)
    assert {"add", "exp", "where"} <= set(OPS)
