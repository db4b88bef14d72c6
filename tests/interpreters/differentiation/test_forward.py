"""Forward mode: `st.jvp`, `st.linearize`, their combinations with gradients, and `st.testing.check_grads`."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.interpreters.differentiation.grad import transposed_twice
from shardtensor.interpreters.differentiation.run import Run
from shardtensor.testing import check_grads
from tests.interpreters.differentiation.numeric import slope
from tests.interpreters.differentiation.programs import PROGRAMS
from tests.interpreters.differentiation.test_programs import SPECS, TRACED, gradient, matrix
from tests.interpreters.differentiation.test_random_programs import SHAPE, program
from tests.layouts import assert_equal, everywhere, put

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
D = np.array([[1.0, -1.0], [0.5, 2.0], [0.0, 3.0], [1.0, 1.0]])


@everywhere
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs(name: str, backend: str) -> None:
    """The derivative in a direction is the product of the gradient and the direction, also of linearized functions."""
    fn, x = PROGRAMS[name], matrix(backend)
    d = np.random.default_rng(3).standard_normal(x.shape)
    wanted = float((gradient(fn, x) * d).sum())
    for value, tangent in (st.jvp(fn, (x.copy(),), (d,)), linearized(fn, x.copy(), d)):
        assert float(value) == pytest.approx(float(fn(x.copy())), rel=1e-14)
        assert abs(float(tangent) - wanted) <= 1e-10 * (1 + abs(wanted))


def linearized(fn: Any, x: Any, d: Any) -> tuple[Any, Any]:
    value, push = st.linearize(fn, x)
    first = push(d)
    assert float(push(np.zeros(d.shape))) == 0
    assert float(push(d)) == float(first)
    return value, first


@pytest.mark.parametrize("name", TRACED)
def test_programs_under_jit_and_inferred(name: str) -> None:
    fn, x = PROGRAMS[name], matrix("numpy")
    d = put(np.random.default_rng(3).standard_normal(x.shape), "numpy")

    def both(x: Any, d: Any) -> Any:
        value, push = st.linearize(fn, x.copy())
        return st.jvp(fn, (x.copy(),), (d,)), (value, push(d))

    wanted = [float(y) for pair in both(x, d) for y in pair]
    found = [float(y) for pair in st.jit(both)(x, d) for y in pair]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert [y.shape for pair in st.eval_shape(both, x, d) for y in pair] == [()] * 4


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_second_derivatives_in_all_orders(name: str) -> None:
    fn, x = PROGRAMS[name], matrix("numpy")
    d = np.random.default_rng(2).standard_normal(x.shape)
    forward_over_reverse = np.asarray(st.jvp(st.grad(fn), (x.copy(),), (d,))[1])
    reverse_over_forward = np.asarray(st.grad(lambda x: st.jvp(fn, (x,), (d,))[1])(x.copy()))
    forward_twice = float(st.jvp(lambda x: st.jvp(fn, (x,), (d,))[1], (x.copy(),), (d,))[1])
    scale = 1 + np.abs(forward_over_reverse).sum()
    np.testing.assert_allclose(reverse_over_forward, forward_over_reverse, rtol=1e-9, atol=1e-9 * scale)
    assert abs((forward_over_reverse * d).sum() - forward_twice) <= 1e-9 * scale
    wanted = slope(lambda x: (st.grad(fn)(x) * d).sum(), [x], [d], 1e-5)
    assert abs(forward_twice - wanted) <= 1e-5 * scale


@pytest.mark.parametrize("part", range(2))
def test_random_programs(part: int) -> None:
    for seed in range(part, 20, 2):
        rng = np.random.default_rng(seed)
        values, d = rng.uniform(-1, 1, SHAPE), rng.standard_normal(SHAPE)
        fn = program(seed, int(rng.integers(3, 14)))
        x = put(values, "numpy", spec=list(SPECS.values())[seed % 3])
        g = np.asarray(st.grad(fn)(x.copy()))
        scale = 1 + np.abs(g).sum()
        value, tangent = st.jvp(fn, (x.copy(),), (d,))
        assert abs(float(value) - float(fn(x.copy()))) < 1e-12 * scale, seed
        _, push = st.linearize(fn, x.copy())
        for found in (tangent, push(d)):
            assert abs(float(found) - (g * d).sum()) < 1e-11 * scale, seed


def test_tangents_have_the_layout_and_dtype_of_values() -> None:
    x, w = put(X.astype("float32"), "numpy"), st.ones((2, 3), dtype="float32")

    def layer(x: Any, w: Any) -> Any:
        y = x @ w
        return {"y": y, "part": y[1:], "sum": y.sum(), "rows": y.mean(axis=1), "n": y.shape[0], "constant": 1.5}

    for value, tangent in (
        st.jvp(layer, (x, w), (D, w)),
        (lambda value, push: (value, push(D, w)))(*st.linearize(layer, x, w)),
    ):
        for name in ("y", "part", "sum", "rows"):
            v, t = value[name], tangent[name]
            assert (t.shape, t.dtype, t.sharding, t.committed) == (v.shape, v.dtype, v.sharding, v.committed)
        np.testing.assert_allclose(np.asarray(tangent["y"]), D @ np.ones((2, 3)) + X @ np.ones((2, 3)), rtol=1e-6)
        assert tangent["n"].dtype.names == ("float0",)
        assert float(tangent["constant"]) == 0


def test_trees_auxiliary_results_and_integers() -> None:
    x = put(X, "numpy")

    def fn(tree: Any, scale: Any) -> Any:
        return {"y": tree["x"] * scale * tree["n"]}, "aux"

    value, tangent, aux = st.jvp(fn, ({"x": x, "n": 3}, 2.0), ({"x": D, "n": None}, 0.5), has_aux=True)
    assert aux == "aux"
    assert_equal(value["y"], X * 6)
    assert_equal(tangent["y"], D * 6 + X * 1.5)
    value, push, aux = st.linearize(fn, {"x": x, "n": 3}, 2.0, has_aux=True)
    assert aux == "aux"
    assert_equal(push({"x": D, "n": None}, 0.5)["y"], D * 6 + X * 1.5)
    value["y"][...] = 0  # What is returned may be written.
    assert_equal(push({"x": D, "n": None}, 0)["y"], D * 6)


def test_complex_numbers_agree_with_jax() -> None:
    jax = pytest.importorskip("jax")
    z = np.array([1 + 2j, -3 + 0.5j, 0.25 - 1j])
    d = np.array([0.5 - 1j, 2 + 1j, 1j])

    def fn(np: Any, z: Any) -> Any:
        return np.abs(z) * np.sin(z), np.real(z * np.conj(z)), np.angle(z), np.var(z), np.imag(z)

    with jax.enable_x64(True):
        wanted = jax.jit(lambda z, d: jax.jvp(lambda z: fn(jax.numpy, z), (z,), (d,)))(z, d)
    for found in (st.jvp(lambda z: fn(st, z), (st.asarray(z),), (d,))[1], st.linearize(lambda z: fn(st, z), z)[1](d)):
        for t, one in zip(found, wanted[1], strict=True):
            assert t.dtype == one.dtype
            np.testing.assert_allclose(np.asarray(t), np.asarray(one), rtol=1e-12)


def test_linearized_functions_by_transposition() -> None:
    """Maps are pushed forward in this way."""
    x = put(X, "numpy")

    def fn(x: Any, a: Any) -> Any:
        return {"y": st.sin(x) * a, "n": 3, "sum": (x * x).sum(), "constant": 1.0}

    run = Run("linearize", fn, (x, 2.0), {}, (0, 1), has_aux=False)
    for t in (0.5, None):
        directions = [put(D, "numpy"), t if t is None else st.asarray(t)]
        found, wanted = transposed_twice(run, directions), run.pushed(directions)
        assert found["y"].sharding == x.sharding
        for name in ("y", "sum", "constant"):
            np.testing.assert_allclose(np.asarray(found[name]), np.asarray(wanted[name]), rtol=1e-12)


def test_control_flow_on_values() -> None:
    def fn(x: Any) -> Any:
        y = x.sum()
        while float(y) < 100:
            y = y * 2
        return y if bool(y > 0) else -y

    value, tangent = st.jvp(fn, (put(X, "numpy"),), (D,))
    assert (float(value), float(tangent)) == (144, D.sum() * 4)


def test_forward_mode_keeps_no_intermediate_values_and_writes_in_place() -> None:
    kept: list[Any] = []

    def fn(x: Any) -> Any:
        for _ in range(5):
            x = st.sin(x)
            kept.extend([weakref.ref(x._storage.primal), weakref.ref(x._storage.tangent)])
        assert [ref() for ref in kept[:-2]] == [None] * 8
        addresses = [address(x._storage.primal), address(x._storage.tangent)]
        x[1:3] = x[0] * 2
        x[:2] = 3
        assert [address(x._storage.primal), address(x._storage.tangent)] == addresses
        return x

    st.jvp(fn, (put(X, "numpy"),), (D,))


def address(x: Any) -> int:
    return int(x._storage.buffers[0].ctypes.data)


def test_arguments_that_are_written() -> None:
    def fn(x: Any) -> Any:
        x[0] = x[1] * 2
        return x * 1

    x, d = put(X, "numpy"), put(D, "numpy")
    _, tangent = st.jvp(fn, (x,), (d,))
    assert_equal(x, np.concatenate([X[1:2] * 2, X[1:]]))
    assert_equal(d, D)
    assert_equal(tangent, np.concatenate([D[1:2] * 2, D[1:]]))


def test_stop_gradient_remat_and_perturbations() -> None:
    x = st.asarray([2.0, 3.0])
    assert st.jvp(lambda x: x * st.stop_gradient(x), (x,), (st.ones(2),))[1].tolist() == [2, 3]
    assert st.jvp(st.remat(lambda x: x * x), (x,), (st.ones(2),))[1].tolist() == [4, 6]
    # d/dx (x d/dy (x + y)) = 1; confused perturbations give 2.
    assert float(st.jvp(lambda x: x * st.jvp(lambda y: x + y, (1.0,), (1.0,))[1], (1.0,), (1.0,))[1]) == 1
    assert float(st.jvp(lambda x: x * st.grad(lambda y: x + y)(1.0), (1.0,), (1.0,))[1]) == 1
    second = st.grad(lambda x: st.remat(lambda x: st.stop_gradient(x) * x)(x).sum())
    assert st.grad(lambda x: (second(x) * x).sum())(x).tolist() == [2, 3]


def smoothed(x: Any) -> Any:
    return st.smap(lambda row: row * 2, x, axes=[0])


def test_functions_that_call_maps() -> None:
    x, d = put(X, "numpy"), put(D, "numpy")
    value, tangent = st.jvp(smoothed, (x,), (d,))
    wanted, push = st.linearize(smoothed, x)
    np.testing.assert_array_equal(np.asarray(value), np.asarray(wanted))
    np.testing.assert_allclose(np.asarray(tangent), np.asarray(push(d)), rtol=1e-13)


def test_errors() -> None:
    x = put(X, "numpy")
    cases: list[tuple[Any, str]] = [
        (lambda: st.jvp(st.sin, (x,), (D, D)), "jvp: tangents and primals differ in structure"),
        (
            lambda: st.jvp(st.sin, (x,), (D[0],)),
            r"jvp: tangents\[0\] has shape \(2,\); wanted that of primals, \(4, 2\)",
        ),
        (lambda: st.jvp(st.sin, (x,), (D * 1j,)), r"jvp: tangents\[0\] has dtype complex128; wanted that of primals"),
        (lambda: st.linearize(st.sin, x)[1](D, D), "linearize: tangents and primals differ in structure"),
        (lambda: st.linearize(1), "linearize: fun is an? int; wanted a function"),
        (lambda: st.jvp(lambda x: np.asarray(x * 2), (x,), (D,)), r"st\.stop_gradient\(x\)"),
        (lambda: st.jvp(lambda x: st.unique(x * 2), (x,), (D,)), "unique: the elements|no derivative"),
    ]
    for run, message in cases:
        with pytest.raises((TypeError, ValueError), match=message) as caught:
            run()
        assert isinstance(caught.value, st.ShardTensorError)


# -- check_grads -----------------------------------------------------------------------------------


def test_check_grads_accepts_what_is_right() -> None:
    x = put(X / 10, "numpy")
    check_grads(lambda x: st.sin(x) @ x.T, (x,), 2, modes=("fwd", "rev", "lin"))
    check_grads(lambda z: (st.exp(z) * st.conj(z), st.abs(z), st.sign(z)), (x + 1j * x[::-1] + 0.5,), 1)

    def of_tree(tree: Any, scale: Any) -> Any:
        return {"y": tree["w"] * tree["n"] * scale, "n": tree["n"]}

    check_grads(of_tree, ({"w": st.astype(x, "float32"), "n": 3}, 1.5), 2)
    check_grads(lambda x: x * x, (np.ones(3, "float16"),), 1, atol={"float16": 0.1}, rtol=0.1)


def test_check_grads_names_what_is_wrong() -> None:
    @st.custom_vjp
    def half(x: Any) -> Any:
        return x * x

    half.defvjp(lambda x: (x * x, x), lambda x, g: (g * x,))

    def wrong(x: Any) -> Any:
        return {"y": half(x)}

    x = put(X, "numpy")
    with pytest.raises(
        AssertionError, match=r"check_grads: jvp of wrong: the tangent\['y'\]\[\d, \d\] is .* by finite"
    ):
        check_grads(wrong, (x,), 1)
    with pytest.raises(
        AssertionError, match="check_grads: vjp of wrong: the product of the gradient and a direction is"
    ):
        check_grads(wrong, (x,), 1, modes=("rev",))
    with pytest.raises(AssertionError, match=r"check_grads: .* of vjp of cube: "):
        check_grads(cube_with_a_wrong_second_derivative(), (x,), 2, modes=("rev",))
    with pytest.raises(AssertionError, match=r"is nan, and"), np.errstate(all="ignore"):
        check_grads(lambda x: st.where(x > 9, x, st.sqrt(x - x)), (x,), 1, modes=("fwd",))
    with pytest.raises(ValueError, match=r"check_grads: modes has \['forward'\]; wanted 'fwd', 'rev' and 'lin'"):
        check_grads(half, (x,), 1, modes=("forward",))


def cube_with_a_wrong_second_derivative() -> Any:
    @st.custom_vjp
    def cube(x: Any) -> Any:
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * g * x * st.stop_gradient(x),))
    return cube
