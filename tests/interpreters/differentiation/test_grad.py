"""`st.grad` and its relatives: arguments, results, pytrees, dtypes, errors, and what may leave a function."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import OPS
from shardtensor.functions.derivatives import load_all
from shardtensor.functions.derivatives.forms import ROWS
from tests.layouts import assert_equal, everywhere, put

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])


class Layer(NamedTuple):
    w: Any
    b: Any


def squares(x: Any) -> Any:
    return (x * x).sum()


@everywhere
def test_values_and_gradients(backend: str) -> None:
    x = put(X, backend)
    value, g = st.value_and_grad(squares)(x)
    assert float(value) == float((X * X).sum())
    assert_equal(g, 2 * X)
    assert (g.sharding, g.dtype, g.committed) == (x.sharding, x.dtype, True)


def test_several_arguments_trees_and_auxiliary_results() -> None:
    x = put(X, "numpy")
    layers = {"first": Layer(st.ones((2, 3)), 0.5), "second": [np.ones(3)]}

    def loss(params: Any, x: Any, *, scale: float = 1.0) -> Any:
        layer = params["first"]
        y = (x @ layer.w + layer.b) @ params["second"][0]
        return y.sum() * scale, {"y": y, "name": "loss"}

    grads, aux = st.grad(loss, argnums=(0, -1), has_aux=True)(layers, x, scale=2.0)
    assert type(grads[0]["first"]) is Layer
    assert_equal(grads[0]["first"].w, np.repeat(2 * X.sum(axis=0)[:, None], 3, axis=1))
    assert float(grads[0]["first"].b) == 2 * 4 * 3
    assert_equal(grads[0]["second"][0], np.full(3, 2 * (X.sum() + 4 * 0.5)))
    assert_equal(grads[1], np.full_like(X, 6.0))
    assert aux["name"] == "loss"
    assert_equal(aux["y"], (X @ np.ones((2, 3)) + 0.5) @ np.ones(3))
    value, _ = st.value_and_grad(loss, has_aux=True)(layers, x)
    assert float(value[0]) == float(np.asarray(aux["y"]).sum())


def test_decorators_and_names() -> None:
    @st.grad
    def cube(x: Any) -> Any:
        """The third power."""
        return x**3

    assert (cube.__name__, cube.__doc__) == ("cube", "The third power.")
    assert float(cube(2.0)) == 12


def test_python_numbers_do_not_promote() -> None:
    x = st.ones(3, dtype="float32")
    g = st.grad(lambda a, x: (a * a * x).sum(), argnums=(0, 1))(3.0, x)
    assert (g[0].dtype, g[1].dtype) == (np.float64, np.float32)
    assert (float(g[0]), g[1].tolist()) == (18.0, [9.0] * 3)
    assert float(st.grad(lambda a: st.asarray(a).reshape(1)[0] * a)(3.0)) == 6


def test_the_gradient_of_a_number_is_replicated() -> None:
    x = put(X, "numpy")
    for g in (st.grad(lambda a: (a * x).sum())(2.0), st.vjp(lambda a: a * x, 2.0)[1](st.ones_like(x))[0]):
        assert (g.sharding.spec, float(g)) == (st.P(), pytest.approx(X.sum()))

    assert float(st.jit(st.grad(lambda a: a * a * a))(2.0)) == 12
    assert float(st.jit(lambda a: st.jvp(lambda a: a * a * a, (a,), (a,))[1])(2.0)) == 24

    def written(a: Any) -> Any:
        b = st.asarray(a, copy=True)
        b[...] = b * a
        return b * a

    assert float(st.grad(written)(3.0)) == 27


def test_a_function_that_does_not_depend_on_an_argument() -> None:
    x = put(X, "numpy")
    assert_equal(st.grad(lambda x: 1.0)(x), np.zeros_like(X))
    assert_equal(st.grad(lambda x: (x > 1).sum() * 1.0)(x), np.zeros_like(X))
    unplaced = st.ones(3)
    assert not st.grad(lambda x: 2.0)(unplaced).committed


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "complex64"])
def test_gradients_have_the_dtype_of_the_argument(dtype: str) -> None:
    x = put(X.astype(getattr(st, dtype)), "numpy")
    g = st.grad(lambda x: st.real(x * st.conj(x)).astype("float32").sum() + st.abs(x[0, 0]))(x)
    assert (g.dtype, g.sharding) == (x.dtype, x.sharding)
    wanted = 2 * X
    wanted[0, 0] += 1
    np.testing.assert_allclose(np.asarray(g).astype(complex).real, wanted, rtol=1e-2)


def test_complex_numbers_follow_the_convention_of_jax() -> None:
    jax = pytest.importorskip("jax")
    z = np.array([1 + 2j, -3 + 0.5j, 0.25 - 1j])

    def real(np: Any, z: Any) -> Any:
        return (np.abs(z) * np.imag(z * z) + np.real(np.exp(z) / z) + np.angle(z)).sum()

    def holomorphic(np: Any, z: Any) -> Any:
        return (np.sin(z) * z**3 + np.log(z)).sum()

    with jax.enable_x64(True):
        for fn, more in ((real, {}), (holomorphic, {"holomorphic": True})):
            wanted = jax.jit(jax.grad(lambda z, fn=fn: fn(jax.numpy, z), **more))(z)
            found = st.grad(lambda z, fn=fn: fn(st, z), **more)(st.asarray(z))
            np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-12)


@pytest.mark.parametrize("part", ["real", "imag"])
def test_parts_of_complex_numbers_that_are_written(part: str) -> None:
    def f(x: Any) -> Any:
        z = st.full(2, 1 + 2j)
        getattr(z, part)[...] = x
        getattr(z, part)[:] -= 3 * x
        return st.real(z * z * (1 + 1j)).sum()

    x = st.asarray([1.5, -2.0])
    x2, other = -2 * np.asarray(x), 2 if part == "real" else 1
    value, g = st.value_and_grad(f)(x)
    squares = x2**2 - other**2 if part == "real" else other**2 - x2**2
    np.testing.assert_allclose(float(value), (squares - 2 * x2 * other).sum())
    np.testing.assert_allclose(np.asarray(g), -2 * ((1 if part == "real" else -1) * 2 * x2 - 2 * other))


def test_integers() -> None:
    def loss(tree: Any) -> Any:
        return (tree["x"][tree["at"]] ** 2).sum()

    tree = {"x": st.arange(4.0), "at": st.asarray([1, 3])}
    with pytest.raises(TypeError, match=r"grad: argument 0\['at'\] has dtype int64, which has no gradient.*allow_int"):
        st.grad(loss)(tree)
    found = st.grad(loss, allow_int=True)(tree)
    assert found["x"].tolist() == [0, 2, 0, 6]
    assert (found["at"].shape, found["at"].dtype.names) == ((2,), ("float0",))


def test_vjp_is_linear_and_can_be_called_several_times() -> None:
    x = put(X, "numpy")
    value, pull, aux = st.vjp(lambda x, a: ((x * a, x.sum()), "aux"), x, 2.0, has_aux=True)
    value[0][...] = 0  # What is returned may be written.
    assert aux == "aux"
    for _ in range(2):
        gx, ga = pull((np.ones_like(X), 3.0))
        assert_equal(gx, np.full_like(X, 5.0))
        assert float(ga) == X.sum()
    gx[...] = 1
    assert_equal(pull((np.zeros_like(X), 1.0))[0], np.ones_like(X))
    with pytest.raises(
        ValueError, match=r"vjp: the cotangent\[0\] has shape \(2,\); wanted that of the result, \(4, 2\)"
    ):
        pull((np.ones(2), 1.0))
    with pytest.raises(TypeError, match="differ in structure"):
        pull(np.ones(2))


def test_results_that_the_function_has_made_and_written() -> None:
    x = put(X, "numpy")

    def filled(x: Any) -> Any:
        y, z = st.zeros(X.shape, device=x.sharding), x * 1
        y[1:] = x[:-1] * 3
        z[0] = 7
        return {"y": y, "view": y[1:3], "z": z, "x": x, "part": x[2]}

    value, pull = st.vjp(filled, x)
    shifted = np.concatenate([np.zeros((1, 2)), 3 * X[:-1]])
    assert_equal(value["y"], shifted)
    assert_equal(value["view"], shifted[1:3])
    (g,) = pull({k: np.ones(v.shape) for k, v in value.items()})
    assert g.tolist() == [[7, 7], [8, 8], [6, 6], [2, 2]]
    assert_equal(st.jvp(lambda x: filled(x)["y"], (x,), (x,))[1], shifted)


def test_gradients_are_tensors_of_their_own() -> None:
    a, b = put(X, "numpy"), put(X, "numpy")
    ga, gb = st.grad(lambda a, b: (a + b).sum(), argnums=(0, 1))(a, b)
    ga[...] = 5
    assert_equal(gb, np.ones_like(X))
    ct = put(X, "numpy")
    (g,) = st.vjp(lambda x: x, a)[1](ct)
    g[...] = 0
    assert_equal(ct, X)


def test_later_writes_do_not_change_what_was_saved() -> None:
    x, w, host = put(X, "numpy"), put(X, "numpy"), X.copy()
    _, pull = st.vjp(lambda x: x * x * w * host, x)
    x[...], w[...], host[...] = 0, 0, 0
    assert_equal(pull(np.ones_like(X))[0], 2 * X * X * X)


def test_a_scalar_that_is_written_later() -> None:
    x = put(X, "numpy")
    a, b = x.sum(), x.max()
    _, pull = st.vjp(lambda a: a * a * b, a)
    np.add(a, 1, out=a)
    np.add(b, 1, out=b)
    assert float(pull(1.0)[0]) == 2 * 36 * 8


def test_an_argument_and_a_tensor_from_outside_are_written_for_the_caller() -> None:
    x, seen = put(X, "numpy"), put(np.zeros_like(X), "numpy")

    def loss(x: Any) -> Any:
        x[0] = x[1] * 2
        seen[...] = x
        return (seen * x).sum()

    g = st.grad(loss)(x)
    assert_equal(x, np.concatenate([X[1:2] * 2, X[1:]]))
    assert_equal(seen, np.asarray(x))
    wanted = 2 * X
    wanted[0], wanted[1] = 0, 10 * X[1]
    assert_equal(g, wanted)
    before = np.array(seen)

    def failing(x: Any) -> Any:
        seen[0] = x[0] * 0
        raise KeyError

    with pytest.raises(KeyError):
        st.grad(failing)(x)
    before[0] = 0
    assert_equal(seen, before)


def test_higher_orders_do_not_confuse_perturbations() -> None:
    # d/dx (x d/dy (x + y)) = 1; confused tapes give 2.
    assert float(st.grad(lambda x: x * st.grad(lambda y: x + y)(1.0))(1.0)) == 1
    assert float(st.grad(st.grad(lambda x: x**5))(2.0)) == 160


def test_stop_gradient_of_all_orders() -> None:
    x = st.asarray([2.0, 3.0])

    def f(x: Any) -> Any:
        return (st.stop_gradient({"x": x, "n": 1})["x"] * x * x).sum()

    assert st.grad(f)(x).tolist() == [8, 18]
    assert st.grad(lambda x: st.grad(f)(x).sum())(x).tolist() == [4, 6]
    kept = st.stop_gradient(x)
    assert kept is x


def test_values_that_leave_raise() -> None:
    x, kept = put(X, "numpy"), []
    for leave in (
        np.asarray,
        lambda x: x.tolist(),
        lambda x: x.addressable_shards,
        np.from_dlpack,
        lambda x: x.to_numpy(),
    ):
        with pytest.raises(st.ConcretizationError, match=r"st\.stop_gradient\(x\)"):
            st.grad(lambda x, leave=leave: (leave(x * 2), squares(x))[1])(x)
    assert_equal(st.grad(lambda x: (np.asarray(st.stop_gradient(x)), squares(x))[1])(x), 2 * X)
    st.grad(lambda x: (kept.append(x * 2), squares(x))[1])(x)
    for use in (lambda y: y + 1, np.asarray, lambda y: st.grad(lambda x: (x * y).sum())(x)):
        with pytest.raises(st.ConcretizationError, match="left a differentiated function"):
            use(kept[0])
    repr(kept[0])


def test_errors_name_the_way_out() -> None:
    x = put(X, "numpy")
    cases: list[tuple[Any, Any, str]] = [
        (st.grad(lambda x: x * 2), (x,), r"grad: the function returns an array of shape \(4, 2\); wanted one number"),
        (st.grad(lambda x: (x.sum(), 1)), (x,), "grad: the function returns a tuple.*wanted one number"),
        (st.grad(lambda x: {"loss": x.sum()}), (x,), "grad: the function returns a dict; wanted one number"),
        (
            st.grad(lambda x: None),
            (x,),
            "grad: the function returns None, as one without a return.*; wanted one number",
        ),
        (
            st.jit(st.value_and_grad(lambda p: p["w"].sum())),
            ({"w": x, "layers": [{"step": 3}]},),
            r"value_and_grad: argument 0\['layers'\]\[0\]\['step'\] has dtype int64.*others may hold integers",
        ),
        (
            st.jit(st.value_and_grad(lambda p: p["w"] * 2)),
            ({"w": x},),
            r"an array of shape \(4, 2\); wanted one number",
        ),
        (st.grad(lambda x: (x > 0).sum()), (x,), "grad: the function returns dtype int64; wanted a floating-point"),
        (st.grad(lambda x: x.sum() * 1j), (x,), r"dtype complex128; wanted a real number \(holomorphic=True"),
        (st.grad(squares, holomorphic=True), (x,), "has dtype float64; wanted complex numbers"),
        (st.grad(squares), ("text",), "grad: argument 0 is a str; wanted arrays and numbers"),
        (st.grad(squares, argnums=1), (x,), "grad: argnums is 1, and the function is called with 1 positional"),
        (st.grad(squares, argnums=True), (x,), "grad: argnums is True; wanted an integer"),
        (st.grad(squares, argnums=(0, -1)), (x,), r"grad: argnums is \(0, -1\), which names argument 0 twice"),
        (st.jacrev(squares, argnums=(0, 0)), (x,), r"jacrev: argnums is \(0, 0\), which names argument 0 twice"),
        (st.grad(squares, has_aux=True), (x,), r"grad: the function returns .*; wanted the pair \(result, aux\)"),
        (st.grad(lambda x: st.unique(x).sum()), (x,), "unique: the elements of a tensor are taken out|no derivative"),
        (st.grad(lambda x: x.view("complex64").real.sum()), (x,), "view: it has no derivative: bits are no numbers"),
        (lambda: st.grad(1), (), "grad: fun is an? int; wanted a function"),
        (lambda: st.jvp(squares, x, x), (), "jvp: primals is .*; wanted a tuple"),
    ]
    for fn, args, message in cases:
        with pytest.raises((TypeError, ValueError), match=message) as caught:
            fn(*args)
        assert isinstance(caught.value, st.ShardTensorError)


def test_an_operator_without_a_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_all()
    monkeypatch.delitem(ROWS, "inv")
    monkeypatch.setattr(OPS["inv"].parts, "derivative", None)
    with pytest.raises(TypeError, match=r"inv: it has no derivative: none is defined yet; use .*st\.stop_gradient"):
        st.grad(lambda x: st.linalg.inv(x[:2, :2]).sum())(put(X, "numpy"))


def test_donated_arguments() -> None:
    x = put(X, "numpy")
    st.device_put(x, x.sharding, donate=True)
    with pytest.raises(st.DonatedError):
        st.grad(squares)(x)
    y = put(X, "numpy")
    g = st.grad(lambda y: squares(st.device_put(y * 1, y.sharding, donate=True)))(y)
    assert_equal(g, 2 * X)


def test_recomputed_functions_that_write_what_they_close_over_raise() -> None:
    x = put(X, "numpy")

    def loss(x: Any) -> Any:
        y = x * 1

        def write() -> Any:
            y[0] = 0
            return y.sum()

        return st.remat(write)()

    with pytest.raises(ValueError, match="remat: the function writes a tensor that it closes over"):
        st.grad(loss)(x)


def test_a_recomputed_function_saves_its_arguments_only() -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(1)
        return st.sin(st.sin(st.sin(x)))

    x = put(X, "numpy")
    wanted = st.grad(lambda x: f(x).sum())(x)
    calls.clear()
    assert_equal(st.grad(lambda x: st.remat(f)(x).sum())(x), wanted)
    assert len(calls) == 2
    assert_equal(st.remat(f)(x), f(x))


def test_simulated_devices() -> None:
    mesh = st.AbstractMesh((512,), ("data",))
    report = st.simulate(
        st.grad(lambda w, x: squares(st.tanh(x @ w))),
        st.empty((64, 64), dtype="float32", device=st.NamedSharding(mesh, st.P())),
        st.empty((1024, 64), dtype="float32", device=st.NamedSharding(mesh, st.P("data"))),
    )
    assert report.bytes == 2 * 511 * 64 * 64 * 4 + 2 * 511 * 4


def test_writes_to_arguments_that_share_elements_raise() -> None:
    def loss(a: Any, b: Any, **named: Any) -> Any:
        a[0] = 5.0
        return (a[:2] * b[:2]).sum()

    x = put(X, "numpy")
    for args, named, argnums, message in [
        ((x, x), {}, 0, "grad: the function writes argument 0, which shares its elements with argument 1, and"),
        ((x, x), {}, 1, "grad: the function writes argument 0, which shares its elements with argument 1, and"),
        ((x, x[:3]), {}, (0, 1), "the function writes argument 0, which shares its elements with argument 1"),
        ((x[1:], [x][0]), {}, (0, 1), "the function writes argument 0, which shares its elements with argument 1"),
        ((x, X.copy()), {"c": {"d": x}}, 0, r"shares its elements with argument c\['d'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            st.grad(loss, argnums=argnums)(*args, **named)
        assert_equal(x, X)
    y = put(X, "numpy")
    assert_equal(st.grad(lambda a, b: (a * b).sum(), argnums=1)(y, y), X)
    assert_equal(st.grad(loss)(y, y.copy())[1], X[1])


def storage_of(x: Any) -> Any:
    """Returns the address of the buffer of a tensor of a tape."""
    return x._base_and_view()[0]._storage.primal._storage.buffers[0].ctypes.data


def test_writes_by_index_arrays_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    at, mask = np.array([3, 0, 3]), st.asarray([True, False, True, False])

    def refused(*args: Any) -> Any:
        raise AssertionError("the whole value is computed")

    def loss(x: Any) -> Any:
        y = x * 2
        begin = storage_of(y)
        y[at] = x[:3]
        y[1:][[0, 1]] = x[0]
        y[mask] = x[0, 0]
        y[:, at % 2] = 3.0
        assert storage_of(y) == begin
        return y.sum()

    x = put(X, "numpy")
    wanted = st.grad(loss)(x)
    copied = OPS["setitem"].parts.algorithm
    monkeypatch.setattr(
        OPS["setitem"].parts, "algorithm", lambda x, *rest: (copied if x.ndim == 1 else refused)(x, *rest)
    )
    monkeypatch.setattr(OPS["put"].parts, "algorithm", refused)
    found = st.grad(loss)(put(X, "numpy"))
    assert_equal(found, np.asarray(wanted))


def test_the_result_of_remat_has_a_layout_of_its_own() -> None:
    """The cotangent of a function is not computed in the layout of its argument."""
    w = put(np.ones((3, 8)), "numpy", spec=st.P(None, "x"))
    x = put(X, "numpy", spec=st.P("x"))
    f = st.remat(lambda w: w.sum(axis=1)[:2])
    assert_equal(st.grad(lambda w: (f(w) * x).sum())(w)[:2], np.repeat(X.sum(axis=0)[:, None], 8, axis=1))


def test_numbers_under_jit() -> None:
    x = put(X, "numpy")
    fn = lambda a, x: (a * x * a).sum()  # noqa: E731
    assert float(st.jit(st.grad(fn))(3.0, x)) == 6 * X.sum()


def test_none_in_a_tree_stays_none() -> None:
    x = put(X, "numpy")
    g = st.grad(lambda p: (p["w"] ** 2).sum())({"w": x, "b": None})
    assert_equal(g["w"], 2 * X)
    assert g["b"] is None
    assert st.vjp(lambda p: p["w"] * 2, {"w": x, "b": None})[1](x)[0]["b"] is None


def test_a_number_of_elements_that_were_read_has_no_gradient() -> None:
    for fn in (lambda x: math.sin(x[0, 0]), lambda x: float(x.sum()) ** 2, lambda x: x[0, 1].item()):
        with pytest.raises(TypeError, match=r"returns the Python number .*which have no gradient; wanted a tensor"):
            st.grad(fn)(put(X, "numpy"))
    assert float(st.grad(lambda x: x if float(x) > 0 else -x)(st.asarray(3.0))) == 1
