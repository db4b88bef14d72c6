"""Groups: the operators that one kernel computes; and its bits, which are those of eager mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.interpreters.jit.c import compiler
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.grouping import groups
from shardtensor.tensor.pytree import leaves
from tests.draws import all_of_them, drawn
from tests.interpreters.jit.test_operators import agrees, assert_same_trees
from tests.interpreters.test_infer import split
from tests.layouts import MESHES, allocated, array, mesh_of, specs, strided

IN_C = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups of loops of any size."""
    monkeypatch.setattr(groups, "LEAST", 1)
    return


def sizes(f: Any, *args: Any, executor: Any = "numpy") -> list[tuple[int, int]]:
    """The numbers of equations and of results of each kernel of a function."""
    lowered = st.jit(f, executor=executor).lower(*args)
    assert lowered.as_text("groups").count("one kernel:") == len(lowered._executable.kernels)
    return [(len(k.equations), len(k.kernel.outputs)) for k in lowered._executable.kernels]


def softmax(x: Any) -> Any:
    e = st.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def logsumexp(x: Any) -> Any:
    top = x.max(axis=-1)
    return st.log(st.exp(x - top[:, None]).sum(axis=-1)) + top


def black_scholes(s: Any, k: Any, t: Any) -> Any:
    d = (st.log(s / k) + 0.5 * t) / st.sqrt(t)
    call = s * st.tanh(d) - k * st.exp(-0.02 * t) * st.tanh(d - st.sqrt(t))
    return call, st.where(call > 0, call, -call)


def rows(dtype: str = "float32", spec: Any = ("x",)) -> Any:
    mesh = mesh_of((4,), "numpy")
    return st.device_put(np.abs(array((10, 6), dtype, 1)) + 1, st.NamedSharding(mesh, st.P(*spec)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_chains_and_rows(dtype: str) -> None:
    x = rows(dtype)
    agrees(softmax, x)
    agrees(logsumexp, x)
    agrees(black_scholes, x, x + 1, x + 2)
    agrees(lambda x, a: (x * a + x[0] - x[:, :1]) / x.mean(axis=1, keepdims=True), x, 0.5)
    agrees(lambda x: x - x.sum(axis=-1, keepdims=True) + st.asarray(np.float32(2)), x)


def test_what_is_one_kernel() -> None:
    x = rows()
    assert sizes(softmax, x) == [(5, 1)]
    assert sizes(black_scholes, x, x, x) == [(19, 2)]
    assert sizes(lambda x: st.sort(x * 2 + 1, axis=1) * 2 + 1, x) == [(2, 1), (2, 1)]
    assert sizes(lambda x: (x * 2 + 1).sum() * x * 2, x) == [(2, 1), (2, 1)]
    assert sizes(lambda x, a: softmax(x * a), x, 2.0) == [(6, 1)]
    assert sizes(lambda x, a: x * a - x.max(axis=1, keepdims=True), x, 2.0) == [(3, 1)]
    assert sizes(softmax, rows(spec=(None, "x"))) == [(2, 1)]  # The rows are split.


def layer_norm(x: Any) -> Any:
    weight, bias = np.linspace(1, 2, x.shape[-1], dtype=x.dtype), np.ones(x.shape[-1:], x.dtype)
    variance = x.var(axis=-1, keepdims=True)
    return (x - x.mean(axis=-1, keepdims=True)) / st.sqrt(variance + 1e-5) * weight + bias


@pytest.mark.parametrize("executor", ["numpy", pytest.param("c", marks=IN_C)])
def test_few_elements_of_each_row_are_computed_with_the_rows(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LEAST", 1 << 14)
    mesh = mesh_of((4,), "numpy")
    x = st.device_put(array((20, 1000), "float32", 1), st.NamedSharding(mesh, st.P("x")))
    few = lambda x: st.sqrt(st.log(x[:, :1] + 5) * 2)  # noqa: E731
    assert sizes(layer_norm, x, executor=executor) == [(8, 1)]
    assert sizes(lambda x: (x - x.mean(axis=1, keepdims=True)) * few(x), x, executor=executor) == [(3, 1)]
    assert sizes(few, x, executor=executor) == []
    flat = lambda x: x.sum(axis=-1) * np.arange(20.0) + np.ones(1)  # noqa: E731
    with_output = lambda x: (x - x.max(axis=-1, keepdims=True) * 2, x.max(axis=-1, keepdims=True) * 2)  # noqa: E731
    for f in (layer_norm, flat, with_output):
        found, wanted = st.jit(f, executor=executor)(x), f(x)
        if executor == "numpy":
            assert_same_trees(found, wanted)
        for a, b in zip(leaves(found), leaves(wanted), strict=True):
            assert (a.sharding, a.dtype) == (b.sharding, b.dtype)
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def test_host_arrays_are_operands_of_kernels() -> None:
    x, column = rows(), np.arange(10.0)[:, None]
    assert sizes(lambda x: x * column + np.ones(6, "float32") - column, x) == [(3, 1)]
    swapped = column.astype(">f8")
    agrees(lambda x: (x * column + np.ones(6, "float32") - column, np.float32(2) * x + np.array(1.5) - swapped), x)
    agrees(lambda x: (x.sum(axis=1) * column[:, 0] + np.ones(1)) * x.mean(axis=1), x)
    agrees(lambda x, y: x * y - swapped + y, x, swapped)


def test_constants_of_kernels_are_compared_to_the_bit() -> None:
    agrees(lambda x: (st.copysign(x, 0.0) * st.copysign(x, -0.0), x + 1 - x * 1.0 + st.where(x > 0, True, 1)), rows())


@IN_C
def test_recorded_and_guarded_calls_have_the_bits_of_others() -> None:
    f = lambda x, y: (softmax(x), st.exp(x) + y, (x.T @ x) * 2 + x.T @ y)  # noqa: E731
    x, y = rows(), rows(spec=(None, "x"))
    traced = st.jit(f, executor="c")
    found = [traced(x, y)]
    with st.transfers() as log:
        found.append(traced(x, y))
    assert log.bytes == traced.lower(x, y).cost().bytes > 0
    with st.transfer_guard("log"):
        found.append(traced(x, y))
    assert len({tuple([np.asarray(r).tobytes() for r in results]) for results in found}) == 1
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match=r"moves \d+ bytes implicitly") as error:
        traced(x, y)
    assert "test_groups.py" in error.value.__notes__[0]


@IN_C
def test_what_is_one_kernel_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows()
    assert sizes(lambda x: (x * 2 + 1).sum() * x * 2, x, executor=None) == [(5, 1)]
    assert sizes(softmax, rows(spec=(None, "x")), executor=None) == [(5, 1)]
    assert sizes(lambda x: (x + 1, st.sin(x), st.sort(x, axis=1).mean()), x, executor=None) == [(1, 1), (1, 1)]
    assert sizes(lambda x: (x * 2 + 1).sum(), rows("float16"), executor=None) == [(2, 1)]  # float16 is no type of C.
    monkeypatch.setenv("SHARDTENSOR_CC", "no-such-compiler")
    assert sizes(lambda x: (x * 2 + 1).sum() * x * 2, x, executor=None) == [(2, 1), (2, 1)]


REDUCTIONS = ["sum", "prod", "max", "min", "any", "all", "mean", "var", "std"]
ELEMENTS = ["float16", "float32", "float64", "int8", "uint32", "int64", "bool", "complex64"]


def reductions(name: str, dtype: str) -> Callable[[Any], Any]:
    """All of a tensor, its rows, and further steps before and after."""
    by = {name: getattr(st, name) for name in REDUCTIONS}[name]
    more = {"correction": 1} if name in ("var", "std") else {}

    def f(x: Any) -> Any:
        doubled = x + x
        whole, part = by(doubled), by(x, axis=(1, 2), **more)
        return whole, part, by(x, axis=-1, keepdims=True), x * by(x), part + part, st.logical_not(by(x, axis=-1)[0])

    return f


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_have_the_bits_of_eager_mode_with_numpy(name: str, dtype: str) -> None:
    with np.errstate(all="ignore"):
        cases = [(), ("x",), (None, "x"), (None, None, "x")]
        for spec in strided(cases, 2, REDUCTIONS.index(name) + ELEMENTS.index(dtype)):
            x = operand(dtype, spec)
            try:
                wanted = reductions(name, dtype)(x)
            except TypeError:
                return
            assert_same_trees(st.jit(reductions(name, dtype), executor="numpy")(x), wanted)
            assert_same_trees(st.jit(reductions(name, dtype))(x), wanted)  # Its kernels are not compiled yet.


@pytest.mark.parametrize("shape", [(40, 700), (4000, 5), (2000, 33), (20000, 33)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_variances_of_short_and_long_arrays_have_the_bits_of_eager_mode(dtype: str, shape: tuple[int, int]) -> None:
    def f(x: Any) -> Any:
        return x * x.var(axis=1, keepdims=True), x.std(axis=1) + 1

    x = st.asarray((np.random.default_rng(0).random(shape) * 50).astype(dtype))
    assert st.jit(f, executor="numpy").lower(x)._executable.kernels
    assert_same_trees(st.jit(f, executor="numpy")(x), f(x))


@IN_C
def test_reductions_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not all_of_them:  # The compiler takes most of the time.
        monkeypatch.setattr(compiler, "FLAGS", tuple("-O0" if flag == "-O2" else flag for flag in compiler.FLAGS))
    dtypes = ["float32", "float64", "int8", "uint32", "bool"]
    for turn, spec in enumerate(((), (None, "x"))):
        pairs = strided(itertools.product(REDUCTIONS, dtypes), 3, turn)

        def every(xs: dict[str, Any], pairs: Any = pairs) -> dict[Any, Any]:
            with np.errstate(all="ignore"):
                return {pair: reductions(*pair)(xs[pair[1]]) for pair in pairs}

        xs = {dtype: operand(dtype, spec) for dtype in dtypes}
        f = st.jit(every, executor="c")
        assert sum(k.compiled is not None for k in f.lower(xs)._executable.kernels) >= len(pairs) * 4 // 3
        made, wanted = f(xs), every(xs)
        assert list(made) == list(wanted)
        for pair in wanted:
            for a, b in zip(made[pair], wanted[pair], strict=True):
                assert (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding)
                np.testing.assert_allclose(a, b, rtol=2e-6 if "float32" in pair else 1e-14, err_msg=str(pair))


def operand(dtype: str, spec: Any) -> Any:
    elements = array((6, 5, 7), dtype, 1)
    elements = elements if np.dtype(dtype).kind in "bc" else elements % 5
    return st.device_put(elements, st.NamedSharding(mesh_of((4,), "numpy"), st.P(*spec)))


@pytest.mark.parametrize("copies", [False, True])
def test_windows_written_by_kernels_keep_the_order_of_dimensions_in_memory(copies: bool) -> None:
    """NumPy adds elements in this order: other bits of sums would show where a kernel wrote a new array."""

    def step(x: Any) -> Any:
        y = x.T * 0.5 - 1
        out = y.copy() if copies else y
        out[::2, 2:] = np.tanh(y[::2, 2:] * 0.5) + 23
        return out, st.sum(out)

    x = st.asarray(np.random.default_rng(0).standard_normal((30, 170)))
    eager, found = step(x), st.jit(step, executor="numpy")(x)
    assert_same_trees(found, eager)
    assert np.asarray(found[0]).strides == np.asarray(eager[0]).strides


def test_integers_that_do_not_fit_raise_as_in_eager_mode() -> None:
    x = st.ones((4, 4), dtype="uint8")
    f = st.jit(lambda x, n: x * 2 + n)
    assert f(x, 3).dtype == "uint8"
    with pytest.raises(OverflowError):
        f(x, 300)


def test_floating_point_errors_are_reported() -> None:
    x = st.zeros((4, 4))
    f = st.jit(lambda x: (x + 1) / x * 2)
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        f(x)
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        f(x)


def test_other_memories_and_dtypes_run_one_by_one(backend: str) -> None:
    x = split(backend)
    agrees(lambda x: st.tanh(x * 2) + 1, x)
    assert bool(sizes(lambda x: st.tanh(x * 2) + 1, x)) == (backend == "numpy")
    agrees(lambda t: (t + np.timedelta64(1, "s")) - np.timedelta64(2, "s"), st.asarray(np.arange(3).astype("M8[s]")))


UNARY = ["tanh", "exp", "negative", "abs", "floor", "isnan", "sign", "square"]
BINARY = ["add", "subtract", "multiply", "divide", "maximum", "less", "logaddexp", "atan2"]
ROWS = ["sum", "max", "min", "mean", "prod", "var", "std", "any"]


@pytest.mark.parametrize("examples", [drawn(40, fast=12), pytest.param(3000, marks=pytest.mark.full)])
def test_random_groups(examples: int) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        shape = data.draw(some.tuples(some.integers(1, 5), some.integers(1, 5)))
        mesh = mesh_of(data.draw(some.sampled_from(MESHES)), "numpy")
        shapes = [shape, shape, (1, shape[1]), (shape[1],), (shape[0], 1), ()]
        given = [
            st.device_put(
                array(
                    data.draw(some.sampled_from(shapes)),
                    data.draw(some.sampled_from(["float32", "float64", "int32", "bool"])),
                    k,
                ),
                st.NamedSharding(mesh, data.draw(specs(mesh, 0))),
            )
            for k in range(3)
        ]
        plan = [
            (
                data.draw(some.sampled_from([*UNARY, *BINARY, *ROWS])),
                *[data.draw(some.integers(0, 20)) for _ in range(2)],
                data.draw(some.booleans()),
            )
            for _ in range(8)
        ]

        def program(*xs: Any) -> Any:
            values = [x * 1.5 for x in xs]
            for name, i, j, keepdims in plan:
                x, y = values[i % len(values)], values[j % len(values)]
                if name in ROWS:
                    values.append(getattr(st, name)(x, axis=-1 if i % 3 else None, keepdims=keepdims) * 1.0)
                elif name in UNARY:
                    made = getattr(st, name)(x)
                    values.append(made * 1.0)
                elif np.broadcast_shapes((1,), x.shape, y.shape) == shape or x.shape == y.shape:
                    values.append(getattr(st, name)(x, y) * 1.0)
            return values[3:]

        with np.errstate(all="ignore"):
            try:
                program(*given)
            except ValueError:
                return
            agrees(program, *given, times=1)
            assert_same_trees(st.jit(program, executor="numpy")(*given), program(*given))

    run()


@IN_C
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_that_are_other_functions(dtype: str) -> None:
    x = np.asarray([-np.inf, -2.0, -0.0, 0.0, 0.3, 3.0, 1e30, np.inf, np.nan], dtype)

    def f(x: Any) -> Any:
        y = x.copy()
        y **= 2
        return x**2 + 0, x**0.5 + 0, st.pow(x, -1) + 0, x**2.0 * 1, y + 0, x**3 + 0

    with np.errstate(all="ignore"):
        wanted = f(st.asarray(x))
        lowered = st.jit(f, executor="c").lower(st.asarray(x))
        found = lowered.compile()(st.asarray(x))
        assert lowered.as_text("c").count("= pow v") == 1
        for a, b in zip(wanted[:5], found, strict=False):
            np.testing.assert_array_equal(np.asarray(b), np.asarray(a))
            np.testing.assert_array_equal(np.signbit(np.asarray(b)), np.signbit(np.asarray(a)))
        np.testing.assert_allclose(np.asarray(found[5]), np.asarray(wanted[5]), rtol=1e-6)


def test_results_need_no_scratch_memory() -> None:
    def chain(x: Any) -> list[Any]:
        found = [x]
        for _ in range(20):
            found.append(np.tanh(found[-1]) * 0.9)
        return found[1:]

    x = st.zeros(1 << 17, device=mesh_of((4,), "numpy"))
    fn = st.jit(chain, executor="numpy")
    fn(x)
    st.free_cache()
    with allocated("numpy") as peak:
        found = fn(x)
    results = sum(y.nbytes for y in found)
    assert results <= peak[0] < 1.25 * results
