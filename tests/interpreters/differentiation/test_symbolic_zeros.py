"""Rules with ``symbolic_zeros=True``: what they get and may return, in all modes, next to JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.custom_derivatives import CustomVJPPrimal, SymbolicZero, zero_from_primal
from tests.layouts import assert_equal, everywhere, put

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]) / 10
N = np.array([[1, 2], [3, 4], [5, 6], [7, 8]])


def text_of(x: Any) -> Any:
    """What a rule gets, without elements: the same text for JAX and for this library."""
    if type(x).__name__ == "CustomVJPPrimal":
        return f"{np.shape(x.value)} {x.perturbed}"
    if type(x).__name__ != "SymbolicZero":
        return f"{np.shape(x)}"
    name = "float0" if x.dtype == np.dtype([("float0", np.void, 0)]) else x.dtype.name
    return f"zero {name} {tuple(x.shape)}"


def texts_of(*trees: Any) -> list[Any]:
    return [
        {name: text_of(x) for name, x in tree.items()} if isinstance(tree, dict) else text_of(tree) for tree in trees
    ]


def is_zero(x: Any) -> bool:
    return type(x).__name__ == "SymbolicZero"


def by_vjp(lib: Any, np: Any, seen: list[Any]) -> Any:
    """A function of a tree, of an array and of integers, with 3 times the right derivative."""

    @lib.custom_vjp
    def f(tree: Any, y: Any, n: Any) -> Any:
        return {"product": tree["a"] * y, "sin": np.sin(tree["b"]) * n, "n": n}

    def fwd(tree: Any, y: Any, n: Any) -> Any:
        seen.append(texts_of(tree, y, n))
        values = {name: x.value for name, x in tree.items()}
        return f(values, y.value, n.value), (values, y.value, n.value)

    def bwd(saved: Any, g: Any) -> Any:
        seen.append(texts_of(g))
        tree, y, n = saved
        of_product, of_sin = g["product"], g["sin"]
        of_b = of_sin if is_zero(of_sin) else 3 * of_sin * n * np.cos(tree["b"])
        if is_zero(of_product):
            return {"a": None, "b": of_b}, None, None
        return {"a": 3 * of_product * y, "b": of_b}, 3 * of_product * tree["a"], None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


def by_jvp(lib: Any, np: Any, seen: list[Any]) -> Any:
    @lib.custom_jvp
    def f(tree: Any, y: Any, n: Any) -> Any:
        return {"product": tree["a"] * y, "sin": np.sin(tree["b"]) * n, "n": n}

    def rule(primals: Any, tangents: Any) -> Any:
        (tree, y, n), (ts, ty, tn) = primals, tangents
        seen.append(texts_of(*tangents))
        terms = [t * x for t, x in ((ts["a"], y), (ty, tree["a"])) if not is_zero(t)]
        product = 3 * sum(terms[1:], terms[0]) if terms else ts["a"]
        sin = ts["b"] if is_zero(ts["b"]) else 3 * np.cos(tree["b"]) * n * ts["b"]
        return f(*primals), {"product": product, "sin": sin, "n": tn}

    f.defjvp(rule, symbolic_zeros=True)
    return f


def plain(x: Any, y: Any, n: Any) -> Any:
    """The same function as those with rules."""
    made = {"product": x["a"] * y, "sin": st.sin(x["b"]) * n}
    return {name: 3 * z - 2 * st.stop_gradient(z) for name, z in made.items()} | {"n": n}


LOSSES: list[Callable[..., Any]] = [
    lambda f, x, y, n: f({"a": x, "b": y}, y, n)["product"].sum(),
    lambda f, x, y, n: (f({"a": x, "b": x * 2}, y, n)["sin"] * y).sum(),
    lambda f, x, y, n: f({"a": y, "b": y}, x, n)["product"].sum(),
    lambda f, x, y, n: sum(z.sum() for k, z in f({"a": x, "b": y}, x, n).items() if k != "n"),
    lambda f, x, y, n: (f({"a": y, "b": x}, y, n)["product"] * x).sum(),
]
"""Functions of x, in which some arguments depend on x, and some results are used."""


def derivatives(lib: Any, make: Any, np: Any, x: Any, y: Any, n: Any) -> tuple[list[Any], list[Any]]:
    """Returns derivatives of the losses of first and of second order, and what the rules have got."""
    seen: list[Any] = []
    f = make(lib, np, seen)
    found = []
    for loss in LOSSES:
        seen.append("grad")
        found.append(lib.grad(lambda x, loss=loss: loss(f, x, y, n))(x))
        seen.append("vjp")
        found.append(lib.vjp(lambda x, loss=loss: loss(f, x, y, n), x)[1](np.ones(()))[0])
        if make is by_jvp:
            seen.append("jvp")
            found.append(lib.jvp(lambda x, loss=loss: loss(f, x, y, n), (x,), (y,))[1])
            seen.append("linearize")
            found.append(lib.linearize(lambda x, loss=loss: loss(f, x, y, n), x)[1](y))
    return found, seen


def second(lib: Any, make: Any, np: Any, x: Any, y: Any, n: Any) -> list[Any]:
    f = make(lib, np, [])
    return [
        lib.grad(lambda x, loss=loss: (lib.grad(lambda x: loss(f, x, y, n))(x) * y).sum())(x) for loss in LOSSES[:4]
    ]


def assert_close(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-11, atol=1e-11)


def arguments() -> tuple[Any, Any, Any]:
    return put(X, "numpy"), put(X + 1, "numpy"), put(N, "numpy")


@pytest.mark.full
@pytest.mark.parametrize("make", [by_vjp, by_jvp])
def test_rules_get_and_return_the_same_as_in_jax(make: Any) -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x) for x in (X, X + 1, N)]
        wanted, theirs = derivatives(jax, make, jax.numpy, *given)
        wanted += second(jax, make, jax.numpy, *given)
    found, ours = derivatives(st, make, st, *arguments())
    assert ours == theirs
    assert_close(found + second(st, make, st, *arguments()), wanted)


@pytest.mark.parametrize("make", [by_vjp, by_jvp])
def test_derivatives_in_all_transformations(make: Any) -> None:
    x, y, n = arguments()
    rows = st.make_mesh((4,), ("rows",))
    split = {"mesh": rows, "in_specs": (st.P("rows"),) * 3, "out_specs": st.P("rows")}

    def ways(f: Any, loss: Any) -> list[Any]:
        def gradient(x: Any, y: Any, n: Any) -> Any:
            return st.grad(lambda x: loss(f, x, y, n))(x)

        def called(x: Any, y: Any, n: Any) -> Any:
            return loss(f, x, y, n)

        return [
            gradient(x, y, n),
            st.jit(gradient)(x, y, n),
            st.grad(st.jit(called))(x, y, n),
            st.grad(st.remat(called))(x, y, n),
            st.vmap(gradient)(x, y, n),
            st.grad(lambda x: st.vmap(called)(x, y, n).sum())(x),
            st.grad(lambda x: st.vmap(called, (0, 0, None))(x, y, n[0]).sum())(x),
            st.grad(lambda x: st.scan(lambda c, r: (c, called(*r)), 0, (x, y, n))[1].sum())(x),
            st.grad(lambda x: st.cond(n[0, 0] == 1, called, lambda x, y, n: x.sum(), x, y, n))(x),
            st.shard_map(gradient, **split)(x, y, n),
            st.grad(lambda x: st.shard_map(lambda *a: called(*a)[None], **split)(x, y, n).sum())(x),
            st.unshard(st.pmap(gradient, *map(st.shard, (x, y, n)))),
            st.jvp(lambda x: called(x, y, n), (x,), (y,))[1],
            st.jvp(lambda x: st.vmap(called)(x, y, n), (x,), (y,))[1],
            st.linearize(lambda x: called(x, y, n), x)[1](y),
        ]

    f = make(st, st, [])
    for loss in LOSSES:
        assert_close(ways(f, loss), ways(plain, loss))
    assert_close(second(st, make, st, x, y, n), second(st, lambda *_: plain, st, x, y, n))


@everywhere
def test_what_rules_get(backend: str) -> None:
    """Attributes of symbolic zeros; arguments that are not differentiated, None and numbers among the arguments."""
    seen: list[Any] = []

    def fun(scale: Any, x: Any, none: Any, name: str) -> Any:
        return x * scale, x + 1

    def fwd(scale: Any, x: Any, none: Any, name: str) -> Any:
        seen.extend([scale, x, none, name])
        return (x.value * scale.value, x.value + 1), scale.value

    def bwd(name: str, scale: Any, g: Any) -> Any:
        seen.extend([name, g[1]])
        return None, g[0] * scale, None

    f = st.custom_vjp(fun, nondiff_argnums=(3,))
    f.defvjp(fwd, bwd, symbolic_zeros=True)
    x = put(X, backend)
    gradient = st.grad(lambda x: f(2.0, x, None, "name")[0].sum())(x)
    assert_equal(gradient, np.full_like(X, 2))
    scale, of_x, none, name, again, zero = seen
    assert (scale.value, scale.perturbed, of_x.perturbed, none, name, again) == (2.0, False, True, None, "name", "name")
    assert type(of_x) is CustomVJPPrimal
    assert type(zero) is SymbolicZero
    assert (zero.shape, zero.dtype, zero.ndim, zero.sharding) == (x.shape, x.dtype, 2, x.sharding)
    assert zero.aval == st.typeof(x)
    assert repr(scale) == "CustomVJPPrimal(value=2.0, perturbed=False)"


def test_what_rules_of_tangents_get() -> None:
    """The same in both modes, and in a gradient of a gradient."""
    seen: list[Any] = []
    f, (x, y, n) = by_jvp(st, st, seen), arguments()
    wanted = [{"a": "(4, 2)", "b": "zero float64 (4, 2)"}, "zero float64 (4, 2)", "zero float0 (4, 2)"]

    def gradient(x: Any) -> Any:
        return st.grad(lambda x: f({"a": x, "b": y}, y, n)["product"].sum())(x)

    st.jvp(lambda x: f({"a": x, "b": y}, y, n)["product"], (x,), (x,))
    gradient(x)
    st.grad(lambda x: gradient(x).sum())(x)
    assert seen == [wanted] * 4  # In the gradient of the gradient, the rule calls f, and with it the rule.


def test_defjvp_is_a_decorator_with_options_and_defjvps_gets_arrays() -> None:
    @st.custom_jvp
    def f(x: Any, y: Any) -> Any:
        return x * y

    f.defjvp(lambda p, t: (p[0] * p[1], t[0] * 5), symbolic_zeros=True)
    assert float(st.grad(f)(2.0, 3.0)) == 5
    f.defjvps(lambda t, z, x, y: t * y, lambda t, z, x, y: t * x)
    assert float(st.grad(f)(2.0, 3.0)) == 3
    assert [float(g) for g in st.grad(f, (0, 1))(2.0, 3.0)] == [3, 2]


def test_rules_with_arrays_may_return_symbolic_zeros() -> None:
    f = st.custom_vjp(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x * y, y), lambda y, g: (g * y, SymbolicZero.from_primal_value(y)))
    x = st.asarray([2.0, 3.0])
    assert [g.tolist() for g in st.grad(lambda x, y: f(x, y).sum(), (0, 1))(x, x + 1)] == [[3, 4], [0, 0]]
    h = st.custom_jvp(lambda x: x * 2)
    h.defjvp(lambda p, t: (p[0] * 2, zero_from_primal(p[0], symbolic_zeros=True)))
    assert st.grad(lambda x: h(x).sum())(x).tolist() == [0, 0]
    assert st.jvp(h, (x,), (x,))[1].tolist() == [0, 0]
    assert st.linearize(h, x)[1](x).tolist() == [0, 0]


def test_symbolic_zeros_are_tangents_and_cotangents() -> None:
    """A rule can pass on what it gets."""
    f = st.custom_jvp(lambda x, y: x * y)
    f.defjvp(lambda p, t: st.jvp(lambda x, y: 3 * x * y, p, t), symbolic_zeros=True)
    assert float(st.jvp(lambda x: f(x, 2.0), (5.0,), (1.0,))[1]) == 6
    value, pull = st.vjp(lambda x: (x * 2, x * 3), st.ones(2))
    zero = zero_from_primal(value[0], symbolic_zeros=True)
    assert pull((zero, st.ones(2)))[0].tolist() == [3, 3]


def test_zeros_from_primals() -> None:
    tree = {"x": st.ones((2, 3)), "n": st.arange(3), "none": None, "number": 2.0}
    arrays, zeros = zero_from_primal(tree), zero_from_primal(tree, symbolic_zeros=True)
    assert arrays["x"].tolist() == [[0, 0, 0]] * 2
    assert (arrays["n"].dtype.names, arrays["none"], float(arrays["number"])) == (("float0",), None, 0)
    assert {name: None if z is None else text_of(z) for name, z in zeros.items()} == {
        "x": "zero float64 (2, 3)", "n": "zero float0 (3,)", "none": None, "number": "zero float64 ()"
    }  # fmt: skip
    assert st.custom_derivatives.SymbolicZero is SymbolicZero
