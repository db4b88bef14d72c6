"""`st.custom_vjp` and `st.custom_jvp`: rules in all modes and orders, opaque code, arguments, and errors."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.custom_derivatives import SymbolicZero
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.testing import check_grads
from tests.layouts import assert_equal, everywhere, put

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]) / 10
D = np.array([[1.0, -1.0], [0.5, 2.0], [0.0, 3.0], [1.0, 1.0]])


def by_vjp(lib: Any, np: Any) -> Any:
    """A function with a wrong derivative, 3 times the right one, which shows whether the rule is used."""

    @lib.custom_vjp
    def f(x: Any, y: Any) -> Any:
        return {"sin": np.sin(x) * y, "square": x * x}

    def fwd(x: Any, y: Any) -> Any:
        return f(x, y), (x, y)

    def bwd(saved: Any, g: Any) -> Any:
        x, y = saved
        gx = np.cos(x) * y * g["sin"] + 2 * x * g["square"]
        return 3 * gx, 3 * np.sin(x) * g["sin"]

    f.defvjp(fwd, bwd)
    return f


def by_jvp(lib: Any, np: Any) -> Any:
    @lib.custom_jvp
    def f(x: Any, y: Any) -> Any:
        return {"sin": np.sin(x) * y, "square": x * x}

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x, y), (tx, ty) = primals, tangents
        t = {"sin": 3 * (np.cos(x) * y * tx + np.sin(x) * ty), "square": 3 * (2 * x * tx)}
        return f(x, y), t

    return f


def by_jvps(lib: Any, np: Any) -> Any:
    @lib.custom_jvp
    def sin(x: Any, y: Any) -> Any:
        return np.sin(x) * y

    sin.defjvps(lambda t, z, x, y: 3 * t * np.cos(x) * y, lambda t, z, x, y: 3 * t * np.sin(x))

    @lib.custom_jvp
    def square(x: Any, y: Any) -> Any:
        return x * x + 0 * y

    square.defjvps(lambda t, z, x, y: 3 * (2 * x * t), None)
    return lambda x, y: {"sin": sin(x, y), "square": square(x, y)}


def loss(f: Any, x: Any, y: Any) -> Any:
    made = f(x * 2, y)
    return (made["sin"] * made["square"] * x).sum()


def derivatives(lib: Any, f: Any, x: Any, y: Any, d: Any, *, forward: bool) -> list[Any]:
    """Returns derivatives of the first and of the second order, by JAX or by this library."""

    def gradient(x: Any, y: Any) -> Any:
        return lib.grad(lambda x, y: loss(f, x, y), argnums=(0, 1))(x, y)

    def along(x: Any, y: Any) -> Any:
        gx, gy = gradient(x, y)
        return (gx * d).sum() + (gy * d).sum()

    found = [*gradient(x, y), *lib.grad(along, argnums=(0, 1))(x, y)]
    found += lib.jvp(gradient, (x, y), (d, d))[1] if forward else []
    if forward:
        found += lib.jvp(lambda x, y: loss(f, x, y), (x, y), (d, d))
        found += lib.jvp(lambda x: lib.jvp(lambda x: loss(f, x, y), (x,), (d,))[1], (x,), (d,))
        found += [lib.grad(lambda x: lib.jvp(lambda x: loss(f, x, y), (x,), (d,))[1])(x)]
        found += [lib.linearize(lambda x, y: loss(f, x, y), x, y)[1](d, d)]
    return found


def by_constants(x: Any, y: Any) -> Any:
    """The same function as those with rules."""
    made = {"sin": st.sin(x) * y, "square": x * x}
    return {name: 3 * z - 2 * st.stop_gradient(z) for name, z in made.items()}


MAKERS = [by_vjp, by_jvp, by_jvps]


@pytest.mark.parametrize("make", MAKERS)
def test_derivatives_of_all_kinds(make: Any) -> None:
    f, x, y, d = make(st, st), put(X, "numpy"), put(X + 1, "numpy"), put(D, "numpy")
    wanted = derivatives(st, by_constants, x, y, d, forward=True)
    ways = [
        derivatives(st, f, x, y, d, forward=True),
        st.jit(lambda x, y, d: derivatives(st, f, x, y, d, forward=True))(x, y, d),
        derivatives(st, st.remat(f), x, y, d, forward=True),
        derivatives(st, st.jit(f), x, y, d, forward=True),
    ]
    for found in ways:
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-11, atol=1e-11)
    assert [g.sharding for g in ways[0][:4]] == [x.sharding] * 4
    shapes = st.eval_shape(lambda x, y, d: derivatives(st, f, x, y, d, forward=True), x, y, d)
    assert [s.shape for s in shapes] == [np.shape(one) for one in wanted]


@pytest.mark.full
@pytest.mark.parametrize("make", MAKERS)
def test_derivatives_of_all_kinds_agree_with_jax(make: Any) -> None:
    jax = pytest.importorskip("jax")
    forward = make is not by_vjp  # JAX refuses those.
    with jax.enable_x64(True):
        jy, jd = jax.numpy.asarray(X + 1), jax.numpy.asarray(D)
        wanted = derivatives(jax, make(jax, jax.numpy), jax.numpy.asarray(X), jy, jd, forward=forward)
    found = derivatives(st, make(st, st), put(X, "numpy"), put(X + 1, "numpy"), put(D, "numpy"), forward=forward)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-11, atol=1e-11)


def test_a_backward_rule_of_operators_serves_forward_mode() -> None:
    f, x, y = by_vjp(st, st), put(X, "numpy"), put(X + 1, "numpy")
    g = st.grad(lambda x: loss(f, x, y))(x)
    for tangent in (st.jvp(lambda x: loss(f, x, y), (x,), (D,))[1], st.linearize(lambda x: loss(f, x, y), x)[1](D)):
        assert float(tangent) == pytest.approx(float((g * D).sum()), rel=1e-12)


@everywhere
def test_opaque_code(backend: str) -> None:
    """The rules get what a function gets outside of differentiation, so that they may leave the library."""
    calls = []

    @st.custom_vjp
    def total(x: Any, n: int) -> Any:
        calls.append("fun")
        return float(np.sum(np.asarray(x) ** n))

    def fwd(x: Any, n: int) -> Any:
        host = np.asarray(x)
        calls.append("fwd")
        return np.asarray(np.sum(host**n)), (host, n)

    def bwd(saved: Any, g: Any) -> Any:
        host, n = saved
        return np.asarray(g) * n * host ** (n - 1), None

    total.defvjp(fwd, bwd)
    x = put(X, backend)
    assert total(x, 3) == pytest.approx((X**3).sum())
    g = st.grad(lambda x: total(x * 2, 3) * x[0, 0] + total(st.ones(2), 2))(x)
    wanted = 3 * (2 * X) ** 2 * 2 * X[0, 0]
    wanted[0, 0] += ((2 * X) ** 3).sum()
    np.testing.assert_allclose(np.asarray(g), wanted, rtol=1e-12)
    assert (g.sharding, g.dtype) == (x.sharding, x.dtype)
    assert calls == ["fun", "fwd", "fun"]
    for derivative in (
        lambda: st.jvp(lambda x: total(x, 3), (x,), (x,)),
        lambda: st.linearize(lambda x: total(x, 3), x)[1](x),
    ):
        with pytest.raises(st.ConcretizationError, match="custom_vjp total: forward mode and second derivatives diff"):
            derivative()
    assert repr(total) == "<custom_vjp of total>"


def test_tangents_are_not_read() -> None:
    """In a gradient, zeros stand for the tangents of a rule, which is transposed."""

    @st.custom_jvp
    def f(x: Any) -> Any:
        return x * x

    f.defjvps(lambda t, y, x: 2 * x * float(t))
    assert float(st.jvp(f, (3.0,), (1.0,))[1]) == 6
    with pytest.raises(st.ConcretizationError, match="a differentiated function depends on it"):
        st.grad(f)(3.0)


def test_arguments() -> None:
    """Keywords, defaults, functions, integers and trees."""
    seen = []

    @st.custom_vjp
    def f(tree: Any, at: Any, scale: float = 2.0) -> Any:
        return tree["x"][at] * scale, tree["w"][0] * 1, at

    def bwd(saved: Any, g: Any) -> Any:
        seen.append(g)
        return {"x": saved * g[0].sum(), "w": [None, None]}, None, g[0].sum()

    f.defvjp(lambda tree, at, scale: (f(tree, at, scale), st.ones_like(tree["x"])), bwd)
    x, at = st.arange(4.0), st.asarray([1, 3])
    gx, gs = st.grad(lambda x, s: f(tree={"x": x, "w": (x, x)[0:1] and [x, x]}, scale=s, at=at)[0].sum(), (0, 1))(
        x, 3.0
    )
    assert (gx.tolist(), float(gs)) == ([2.0] * 4, 2.0)
    g = seen[0]
    assert (g[0].tolist(), g[1].tolist(), g[2].dtype.names) == ([1, 1], [0, 0, 0, 0], ("float0",))
    assert st.grad(lambda x: f({"x": x, "w": [x, x]}, at)[0].sum())(x).tolist() == [2.0] * 4


@pytest.mark.parametrize("given", [{"nondiff_argnums": (0, 2)}, {"nondiff_argnames": ("fn", "n")}])
def test_arguments_that_are_not_differentiated(given: Any) -> None:
    def by(fn: Any, x: Any, n: int) -> Any:
        return fn(x) * n

    f = st.custom_vjp(by, **given)
    f.defvjp(lambda fn, x, n: (f(fn, x, n), x), lambda fn, n, x, g: (g * fn(x) * n * 10,))
    assert float(st.grad(lambda x: f(st.sin, x, 3))(0.5)) == pytest.approx(np.sin(0.5) * 30)
    h = st.custom_jvp(by, **given)

    @h.defjvp
    def rule(fn: Any, n: int, primals: Any, tangents: Any) -> Any:
        return h(fn, primals[0], n), tangents[0] * fn(primals[0]) * n * 10

    assert float(st.grad(lambda x: h(st.sin, x, n=3))(0.5)) == pytest.approx(np.sin(0.5) * 30)
    assert float(st.jvp(lambda x: h(st.sin, x, 3), (0.5,), (2.0,))[1]) == pytest.approx(np.sin(0.5) * 60)


def test_arguments_that_are_not_differentiated_are_constants_in_forward_rules() -> None:
    h = st.custom_jvp(lambda x, y: x * y, nondiff_argnums=(1,))
    h.defjvp(lambda y, primals, tangents: (h(primals[0], y), tangents[0] * y))
    assert float(st.grad(lambda x: h(x, x))(3.0)) == 3
    assert float(st.grad(lambda x: h(1.0, x) * x)(3.0)) == 3


def test_methods() -> None:
    class Layer:
        scale = 3.0

        @st.custom_jvp
        def apply(self, x: Any) -> Any:
            """Scales."""
            return x * self.scale

        @apply.defjvp
        def rule(primals: Any, tangents: Any) -> Any:  # noqa: N805
            self, x = primals
            return self.apply(x), tangents[1] * 7

    assert float(st.grad(Layer().apply)(2.0)) == 7
    assert (Layer.apply.__name__, Layer.apply.__doc__) == ("apply", "Scales.")


def test_what_rules_save_and_return_is_their_own() -> None:
    x, w, buffer = put(X, "numpy"), put(X, "numpy"), np.zeros_like(X)

    @st.custom_vjp
    def f(x: Any) -> Any:
        return x

    def fwd(x: Any) -> Any:
        buffer[...] = 5
        return x, (w, buffer, x)

    f.defvjp(fwd, lambda saved, g: (g * saved[0] * saved[1] * saved[2],))

    def written(x: Any) -> Any:
        y = f(x)
        y *= 2
        x[...] = 0
        return y * 1

    value, pull = st.vjp(written, x.copy())
    w[...], buffer[...] = 0, 0
    assert_equal(value, 2 * X)
    assert_equal(pull(np.ones_like(X))[0], 10 * X * X)


def test_rules_in_the_functions_of_maps() -> None:
    f, rows = by_vjp(st, np), st.shard(put(X, "numpy"))
    found = st.pmap(lambda r: f(r, r)["sin"], rows)
    assert_equal(st.unshard(found), np.sin(X) * X)


def test_integers_and_zeros_in_forward_mode() -> None:
    seen = []

    @st.custom_jvp
    def f(x: Any, n: Any, y: Any) -> Any:
        return x * n, n

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        seen.append(tangents)
        x, n, _ = primals
        return (x * n, n), (tangents[0] * n, tangents[1])

    x, n = st.arange(3.0), st.asarray([1, 2, 3])
    for _ in range(2):
        (value, _), (tangent, of_n) = st.jvp(lambda x: f(x, n, x * 0 + st.stop_gradient(x)), (x,), (st.ones(3),))
        assert (value.tolist(), tangent.tolist(), of_n.dtype.names) == ([0, 2, 6], [1, 2, 3], ("float0",))
    assert st.grad(lambda x: f(x, n, st.ones(2))[0].sum())(x).tolist() == [1, 2, 3]
    assert seen[0][1].dtype.names == ("float0",)
    assert seen[-1][2].tolist() == [0, 0]


def test_stop_gradient_in_rules() -> None:
    @st.custom_jvp
    def f(x: Any) -> Any:
        return x * st.stop_gradient(x)

    f.defjvps(lambda t, z, x: t * st.stop_gradient(x))
    x = st.asarray([2.0, 3.0])
    assert st.grad(lambda x: f(x).sum())(x).tolist() == [2, 3]
    assert st.grad(lambda x: (st.grad(lambda x: f(x).sum())(x) * x).sum())(x).tolist() == [2, 3]


def test_check_grads_of_custom_functions() -> None:
    @st.custom_jvp
    def log1pexp(x: Any) -> Any:
        return st.log(1 + st.exp(x))

    log1pexp.defjvps(lambda t, y, x: t * (1 - st.exp(-y)))
    check_grads(log1pexp, (put(X, "numpy"),), 3, modes=("fwd", "rev", "lin"))


def custom(fwd: Any, bwd: Any, **options: Any) -> Any:
    @st.custom_vjp
    def f(x: Any) -> Any:
        return x * 2

    f.defvjp(fwd, bwd, **options)
    return lambda x: st.grad(lambda x: f(x).sum())(x)


def custom_j(rule: Any) -> Any:
    @st.custom_jvp
    def f(x: Any) -> Any:
        return x * 2

    f.defjvp(rule)
    return lambda x: st.jvp(f, (x,), (D,))


def closing(kind: Any) -> Any:
    """Returns a gradient of a function that closes over a differentiated tensor."""

    def outer(x: Any) -> Any:
        f = kind(lambda y: y * x)
        if kind is st.custom_vjp:
            f.defvjp(lambda y: (f(y) * x, y), lambda y, g: (g,))
        else:
            f.defjvps(lambda t, z, y: t * x)
        return f(x + 1).sum()

    return st.grad(outer)


def writing(x: Any) -> Any:
    """Calls a function that writes a differentiated tensor that it closes over."""

    def outer(x: Any) -> Any:
        @st.custom_vjp
        def f(y: Any) -> Any:
            z[0] = 1
            return y

        z = x * 1
        f.defvjp(lambda y: (f(y), None), lambda _, g: (g,))
        return f(x).sum()

    return st.grad(outer)(x)


def without_rule(kind: Any) -> Any:
    @kind
    def f(x: Any) -> Any:
        return x

    return f


def undifferentiated(x: Any) -> Any:
    f = st.custom_vjp(lambda x, y: x * y, nondiff_argnums=(1,))
    f.defvjp(lambda x, y: (x * y, None), lambda y, _, g: (g * y,))
    return st.grad(lambda x: f(1.0, x).sum())(x)


ERRORS: list[tuple[Any, str]] = [
    (custom(lambda x: x, lambda r, g: (g,)), r"custom_vjp f: the rule fwd returns .*; wanted the pair \(result, resid"),
    (custom(lambda x: (x, 0), lambda r, g: g), "custom_vjp f: the rule bwd returns .*; wanted a tuple of 1 cotangent"),
    (custom(lambda x: (x, 0), lambda r, g: (g, g)), "the rule bwd returns 2 items; wanted a tuple of 1 cotangent, one"),
    (
        custom(lambda x: (x, 0), lambda r, g: (g[0],)),
        r"custom_vjp f: the cotangent of argument 0 from the rule bwd has shape \(2,\); wanted that of the argument, \(4",
    ),
    (
        custom(lambda x: (x, 0), lambda r, g: (st.astype(g, "float32"),)),
        "the cotangent of argument 0 from the rule bwd has dtype float32; wanted that of the argument, float64",
    ),
    (
        custom(lambda x: (x, 0), lambda r, g: ("text",)),
        "the cotangent of argument 0 from the rule bwd is a str; wanted",
    ),
    (
        custom(lambda x: (x, 0), lambda r, g: ([g],)),
        r"a cotangent from the rule bwd .*|the cotangent of argument 0 .* list",
    ),
    (custom_j(lambda p, t: p[0]), r"custom_jvp f: the rule returns .*; wanted the pair \(result, tangent\)"),
    (
        custom_j(lambda p, t: (p[0], [t[0]])),
        r"custom_jvp f: the tangent from the rule has the structure \[\*\]; wanted",
    ),
    (
        custom_j(lambda p, t: (p[0], t[0][0])),
        r"custom_jvp f: the tangent from the rule has shape \(2,\); wanted that of",
    ),
    (
        custom_j(lambda p, t: (p[0], t[0] * 1j)),
        "the tangent from the rule has dtype complex128; wanted that of the resul",
    ),
    (
        closing(st.custom_vjp),
        "custom_vjp <lambda>: the function closes over a differentiated tensor, of which its rule",
    ),
    (
        closing(st.custom_jvp),
        "custom_jvp <lambda>: the function closes over a differentiated tensor, of which its rule",
    ),
    (writing, "custom_vjp f: the function closes over a differentiated tensor, of which its rule"),
    (without_rule(st.custom_vjp), r"custom_vjp f: it has no rules; give them by its method defvjp\(fwd, bwd\)"),
    (without_rule(st.custom_jvp), "custom_jvp f: it has no rule; give it by its method defjvp"),
    (undifferentiated, "custom_vjp <lambda>: an argument of nondiff_argnums is a differentiated tensor"),
    (lambda x: custom_j(lambda p, t: p)(x, x), "takes 1 positional argument"),
    (
        custom(lambda x: (x.value, x), lambda r, g: (g,), symbolic_zeros=True),
        "the rule fwd returns a CustomVJPPrimal; r",
    ),
    (custom(lambda x: (x, None), lambda r, g: (g,), symbolic_zeros=True), "the rule fwd returns a CustomVJPPrimal; r"),
    (
        custom(lambda x: (x, 0), lambda r, g: (SymbolicZero(st.typeof(g[0])),)),
        r"the cotangent of argument 0 from the rule bwd has shape \(2,\); wanted that of the argument, \(4, 2\)",
    ),
    (
        custom_j(lambda p, t: (p[0], SymbolicZero.from_primal_value(p[0] > 0))),
        "the tangent from the rule has dtype .*float0.*; wanted that of the result, float64",
    ),
    (
        custom(lambda x: (x.value + x, 0), lambda r, g: (g,), symbolic_zeros=True),
        r"unsupported operand type\(s\) for \+: 'ShardedTensor' and 'CustomVJPPrimal'",
    ),
    (
        lambda x: st.custom_vjp(lambda x: x, nondiff_argnames="y"),
        r"nondiff_argnames has 'y'; wanted names among \['x'\]",
    ),
    (lambda x: st.custom_vjp(lambda x: x, nondiff_argnums=-1), "nondiff_argnums is -1; wanted positions, from 0 on"),
    (
        lambda x: st.custom_jvp(lambda x: x, nondiff_argnums=0).defjvps(None),
        "defjvps is not possible with nondiff_argn",
    ),
    (lambda x: st.custom_vjp(3), "custom_vjp: fun is an? int; wanted a function"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors_name_the_function(number: int) -> None:
    run, message = ERRORS[number]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        run(put(X, "numpy"))
    assert isinstance(caught.value, st.ShardTensorError) or re.search(
        "positional argument|unsupported operand", message
    )


def test_calls_by_wrong_names_and_numbers_of_functions() -> None:
    f = without_rule(st.custom_jvp)
    f.defjvps(None, None)
    with pytest.raises(st.ArgumentTypeError, match="custom_jvp f: missing a required argument: 'x'"):
        f()
    with pytest.raises(st.ArgumentTypeError, match="defjvps got 2 functions; wanted one for each of 1 argument"):
        st.grad(f)(2.0)
    f.defjvps(None)
    assert float(st.grad(f)(2.0)) == 0


# -- functions that vmap calls for all examples, in a differentiated function --------------------------


def losses_of_batches(lib: Any, f: Any, x: Any, y: Any, d: Any) -> list[Any]:
    """Returns derivatives with respect to x and y of functions that call one of an example, by vmap."""

    def one(x: Any, y: Any) -> Any:
        made = f(x * 2, y)
        return (made["sin"] * x).sum() + (made["square"] * y).sum()

    def shared(x: Any, y: Any) -> Any:
        return lib.vmap(one, (0, None))(x, y[0]).sum()

    def constant(x: Any, y: Any) -> Any:
        return lib.vmap(lambda r: (f(y, y)["square"] * r).sum())(x).sum()

    def nested(x: Any, y: Any) -> Any:
        return lib.vmap(lambda r, s: lib.vmap(lambda a: one(a, s[0]))(r).sum())(x, y).sum()

    def inner(x: Any, y: Any) -> Any:
        return lib.vmap(lambda r, s: (lib.grad(lambda r: one(r, s))(r) * s).sum())(x, y).sum()

    losses = [lambda x, y: lib.vmap(one)(x, y).sum(), shared, constant, nested, inner]
    found: list[Any] = []
    for loss in losses:
        found += lib.grad(loss, (0, 1))(x, y)
        found.append(lib.grad(lambda x, loss=loss: (lib.grad(loss)(x, y) * d).sum())(x))
    return found


@pytest.mark.full
@pytest.mark.parametrize("make", MAKERS)
def test_rules_of_examples_agree_with_jax(make: Any) -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        wanted = losses_of_batches(jax, make(jax, jax.numpy), *map(jax.numpy.asarray, (X, X + 1, D)))
    found = losses_of_batches(st, make(st, st), *[put(x, "numpy") for x in (X, X + 1, D)])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("make", MAKERS)
def test_rules_of_examples(make: Any) -> None:
    """The derivatives are those of the same function without rules, and keep the layouts of the arguments."""
    given = [put(x, "numpy") for x in (X, X + 1, D)]
    f = make(st, st)
    wanted = losses_of_batches(st, by_constants, *given)
    for found in (losses_of_batches(st, f, *given), st.jit(lambda *a: losses_of_batches(st, f, *a))(*given)):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-11, atol=1e-11)
            assert one.sharding == given[0].sharding
    x, y, d = given
    forward = [
        st.jvp(lambda x, y, g=g: st.vmap(lambda r, s: g(r, s)["sin"] * r)(x, y), (x, y), (d, x))[1]
        for g in (f, by_constants)
    ]
    np.testing.assert_allclose(np.asarray(forward[0]), np.asarray(forward[1]), rtol=1e-11)


def test_rules_of_examples_with_other_arguments() -> None:
    """Functions, None, integers, numbers and residuals that are no tensors; results that all examples share."""
    f = st.custom_vjp(lambda fn, tree, n, none: (fn(tree["x"]) * n, 2.0, none, n), nondiff_argnums=(0,))
    f.defvjp(
        lambda fn, tree, n, none: ((fn(tree["x"]) * n, 2.0, none, n), {"tree": tree, "name": "text", "n": n}),
        lambda fn, saved, g: ({"x": 10 * fn(saved["tree"]["x"]) * g[0] * saved["n"], "w": 1.0}, None, None),
    )
    x, n = st.asarray([1.0, 2.0, 3.0]), st.asarray([1, 2, 3])

    def loss(x: Any, w: Any) -> Any:
        made = st.vmap(lambda r, n: f(lambda v: v * 2, {"x": r, "w": w}, n, None)[0])(x, n)
        return made.sum()

    gx, gw = st.grad(loss, (0, 1))(x, st.asarray(1.0))
    assert gx.tolist() == (10 * np.array([2.0, 4.0, 6.0]) * [1, 2, 3]).tolist()
    assert float(gw) == 1
    h = st.custom_vjp(lambda x, y: x * y)
    h.defvjp(lambda x, y: (x * y, None), lambda saved, g: (g,))
    with pytest.raises(st.ArgumentTypeError, match="bwd returns 1 item; wanted a tuple of 2 cotangents"):
        st.grad(lambda x: st.vmap(h)(x, x).sum())(x)


@pytest.mark.parametrize("make", MAKERS)
def test_what_rules_refer_to_is_freed_at_once(make: Any) -> None:
    f, x = make(st, st), put(X, "numpy")
    gc.collect()
    gc.disable()
    try:
        st.grad(lambda x: st.vmap(f)(x, x)["sin"].sum())(x)
        st.linearize(lambda x: f(x, x), x)
        st.vjp(lambda x: f(x, x), x)
        assert not [found for found in gc.get_objects() if isinstance(found, Tape)]
    finally:
        gc.enable()


def test_stop_gradient_of_examples() -> None:
    x = put(X[:, 0].copy(), "numpy")
    for found, wanted in (
        (st.grad(lambda x: st.vmap(lambda r: r * st.stop_gradient(r))(x).sum())(x), X[:, 0]),
        (st.grad(lambda x: st.vmap(lambda r: r * st.stop_gradient(x[:2]).sum())(x).sum())(x), [0.4] * 4),
        (st.grad(lambda x: st.vmap(st.grad(lambda r: r * r * st.stop_gradient(r)))(x).sum())(x), 2 * X[:, 0]),
        (st.jvp(lambda x: st.vmap(lambda r: r * st.stop_gradient(r))(x), (x,), (x,))[1], X[:, 0] ** 2),
        (st.vmap(lambda r: r * st.stop_gradient(r))(x), X[:, 0] ** 2),
    ):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)


def test_numbers_that_are_not_differentiated_in_forward_mode() -> None:
    assert float(st.jvp(lambda x, y: 3 * x * y, (5.0, 2.0), (1.0, None))[1]) == 6
