"""Gradients of loops and branches: eager and traced, of drawn programs, and as those of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtensor as st
from tests.draws import drawn
from tests.interpreters.differentiation.numeric import check_gradients
from tests.interpreters.loops import Jaxs, Ours, draw_program
from tests.layouts import everywhere, mesh_of

RNG = np.random.default_rng(0)
C, XS = 0.5 * RNG.standard_normal((4, 2)), 0.5 * RNG.standard_normal((3, 4, 2))


def total(ns: Any, result: Any) -> Any:
    """The sum of all results, each times a number."""
    found = [y for y in st.tree.leaves(result) if y is not None and y.dtype in (np.float32, np.float64)]
    return sum([ns.sum(y * y) * (k + 1) + ns.sum(y) for k, y in enumerate(found)])


def ours(seed: int, backend: str = "numpy") -> Ours:
    return Ours(mesh_of((2, 2), backend), [st.P("x"), st.P(), st.P(("x", "y"))][seed % 3])


def check(found: Any, wanted: Any, like: Any, rtol: float = 1e-11) -> None:
    for a, b, x in zip(found, wanted, like, strict=True):
        assert (a.shape, a.dtype, a.sharding, a.committed) == (x.shape, x.dtype, x.sharding, x.committed)
        scale = np.abs(np.asarray(b)).max(initial=1e-3)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=rtol * scale)


# -- programs that are drawn -----------------------------------------------------------------------


def differentiated(program: Any, ns: Any) -> Callable[[Any, Any], Any]:
    return lambda c, xs: total(ns, program(ns, c, xs))


def drawn_program(seed: int) -> Any:
    """A program that is no `while_loop`, with its arrays."""
    for k in range(seed, seed + 100):
        program, given = draw_program(k)
        if program.__name__ != "loop":
            return program, given
    raise AssertionError


@settings(max_examples=drawn(200, fast=8), deadline=None)
@given(seed=some.integers(0, 10**6))
def test_gradients_of_drawn_programs_are_those_of_jax(seed: int) -> None:
    jax = pytest.importorskip("jax")
    program, arrays = drawn_program(seed)
    ns, jaxs = ours(seed), Jaxs()
    given = ns.put(arrays[0]), ns.put(arrays[1], rows=True)
    wanted = jax.jit(jax.grad(differentiated(program, jaxs), argnums=(0, 1)))(*map(jaxs.put, arrays))
    f = st.grad(differentiated(program, ns), argnums=(0, 1))
    rtol = 1e-10 if arrays[0].dtype == "f8" else 1e-3
    check(f(*given), wanted, given, rtol)
    check(st.jit(f, executor="numpy")(*given), wanted, given, rtol)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(seed=some.integers(0, 10**6))
def test_second_derivatives_of_drawn_programs_are_those_of_jax(seed: int) -> None:
    jax = pytest.importorskip("jax")
    program, arrays = drawn_program(seed)
    if arrays[0].dtype != "f8":
        return
    ns, jaxs = ours(seed), Jaxs()
    given = ns.put(arrays[0]), ns.put(arrays[1], rows=True)
    d = np.random.default_rng(seed).standard_normal(arrays[0].shape)

    def second(grad: Any, ns: Any) -> Any:
        first = grad(differentiated(program, ns))
        return grad(lambda c, xs: ns.sum(first(c, xs) * d), argnums=(0, 1))

    wanted = jax.jit(second(jax.grad, jaxs))(*map(jaxs.put, arrays))
    f = second(st.grad, ns)
    check(f(*given), wanted, given, 1e-8)
    check(st.jit(f, executor="numpy")(*given), wanted, given, 1e-8)


# -- kinds of loops --------------------------------------------------------------------------------

CASES: dict[str, Callable[[Any, Any, Any], Any]] = {}


def case(f: Any) -> Any:
    CASES[f.__name__] = f
    return f


@case
def a_recurrent_network(ns: Any, c: Any, xs: Any) -> Any:
    w = c[:2] * 0.5

    def step(h: Any, x: Any) -> Any:
        h = ns.tanh(h @ w + x)
        return h, ns.sum(h, axis=1)

    return ns.lax.scan(step, ns.zeros_like(c), xs)


@case
def trees(ns: Any, c: Any, xs: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        h = carry["h"] * ns.sin(x["a"]) + x["b"][0]
        return {"h": h, "n": carry["n"] + 1, "none": None}, (h, carry["n"], None)

    init = {"h": c, "n": ns.asarray(0), "none": None}
    return ns.lax.scan(step, init, {"a": xs, "b": [xs * 2]}, reverse=True)


@case
def integers_and_numbers(ns: Any, c: Any, xs: Any) -> Any:
    at = ns.asarray(np.array([1, 0, 1]))
    total, _ = ns.lax.scan(lambda t, x: (t + ns.sum(x[0] * x[1]) * 0.5, None), 0.0, (xs, at))
    return total, ns.lax.fori_loop(1, 4, lambda i, y: ns.sin(y) * i + c / i, c * 0 + 1)


@case
def numbers_of_trips(ns: Any, c: Any, xs: Any) -> Any:
    taken = lambda i, y: y * 0.5 + ns.take(xs, i, axis=0)[0] * ns.take(c, i, axis=0)  # noqa: E731
    return ns.lax.fori_loop(0, 3, taken, c)


@case
def no_slices(ns: Any, c: Any, xs: Any) -> Any:
    return ns.lax.scan(lambda y, _: (y * y + xs[0], y), c, None, length=3)


@case
def no_trips(ns: Any, c: Any, xs: Any) -> Any:
    first = ns.lax.scan(lambda y, x: (y * x, y * c), c, xs[:0])
    return first, ns.lax.fori_loop(2, 1, lambda i, y: y * c, c)


@case
def a_carry_that_is_passed_on(ns: Any, c: Any, xs: Any) -> Any:
    return ns.lax.scan(lambda y, x: ((y[1], y[0], xs[0]), y[0] * x), (c, c * 2, xs[1]), xs)


@case
def what_does_not_depend_on_arguments(ns: Any, c: Any, xs: Any) -> Any:
    ones = ns.zeros_like(c) + 1

    def step(carry: Any, x: Any) -> Any:
        time, y = carry
        return (time * 0.5, y * time + ns.floor(x)), ns.sum(time)

    time, _ = ns.lax.scan(lambda t, _: (t * 0.5 + 1, None), ones, None, length=3)
    return ns.lax.scan(step, (ones, c), xs), time * c


@case
def mapped(ns: Any, c: Any, xs: Any) -> Any:
    return ns.lax.map(lambda x: {"a": ns.sum(x * c, axis=0), "b": x[0] * x[0]}, xs)


@case
def branches(ns: Any, c: Any, xs: Any) -> Any:
    fs = [lambda y, x: ns.sin(y) * x * c, lambda y, x: y * y, lambda y, x: ns.exp(-x) * ns.tanh(y)[:1]]

    def step(y: Any, x: Any) -> Any:
        chosen = ns.lax.cond(ns.sum(x) > 0, lambda y: ns.like(y * c, y), lambda y: ns.like(ns.cos(y), y), y)
        n = ns.asarray((ns.sum(y) > 0) * 1 + (ns.sum(x) > 0.5) * 1)
        return ns.lax.switch(n, [lambda y, x, f=f: ns.like(f(y, x), y) for f in fs], chosen, x), None

    first = ns.lax.cond(True, lambda y: y * 2, lambda y: y, c)
    return ns.lax.scan(step, first, xs)[0]


@case
def nested(ns: Any, c: Any, xs: Any) -> Any:
    def outer(y: Any, x: Any) -> Any:
        k = y * 0.5
        y = ns.lax.fori_loop(0, 2, lambda i, z: ns.like(ns.sin(z * x) + k * c * (i + 1), z), y)
        return y, ns.lax.scan(lambda a, row: (a + row * row, None), ns.zeros_like(x[0]), x * y)[0]

    return ns.lax.scan(outer, c, xs)


@case
def slices_and_writes(ns: Any, c: Any, xs: Any) -> Any:
    def step(y: Any, x: Any) -> Any:
        if isinstance(ns, Ours):
            y[1:] = y[:-1] * x[1:]
            x *= 2
        else:
            y, x = y.at[1:].set(y[:-1] * x[1:]), x * 2
        return y, x[:2] * y[2:]

    return ns.lax.scan(step, c, xs)


@case
def scanned_associatively(ns: Any, c: Any, xs: Any) -> Any:
    combined = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])  # noqa: E731
    return ns.lax.associative_scan(combined, (xs, xs * c), reverse=True), ns.lax.associative_scan(
        ns.multiply, c, axis=1
    )


@case
def recomputed(ns: Any, c: Any, xs: Any) -> Any:
    remat = st.remat if isinstance(ns, Ours) else __import__("jax").checkpoint

    def step(y: Any, x: Any) -> Any:
        mask, k = (x > 0) * 1.0, ns.like(y * 2, y)
        again = remat(lambda y: ns.lax.fori_loop(0, 2, lambda i, z: ns.like(ns.sin(z * mask + k) * x, z), y))
        return again(y), ns.sum(y)

    y, a = remat(lambda y: ns.lax.scan(step, y, xs))(c)
    return ns.lax.scan(remat(step), y, xs), a


@pytest.mark.parametrize("name", CASES)
def test_loops_have_the_gradients_of_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    jaxs = Jaxs()
    wanted = jax.jit(jax.grad(differentiated(CASES[name], jaxs), argnums=(0, 1)))(jaxs.put(C), jaxs.put(XS))
    ns = ours(len(name))
    given = ns.put(C), ns.put(XS, rows=True)
    f = st.grad(differentiated(CASES[name], ns), argnums=(0, 1))
    check(f(*given), wanted, given)
    check(st.jit(f, executor="numpy")(*given), wanted, given)
    inferred = st.eval_shape(f, *given)
    assert [(x.shape, x.sharding) for x in inferred] == [(x.shape, x.sharding) for x in given]


QUICK = ("branches", "numbers_of_trips")
"""Cases of which the second derivatives are those of compiled functions only."""


@pytest.mark.parametrize(
    "name", [n if n == "numbers_of_trips" else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
def test_second_derivatives(name: str) -> None:
    jax = pytest.importorskip("jax")
    ns, jaxs = ours(0), Jaxs()

    def second(grad: Any, ns: Any) -> Any:
        first = grad(differentiated(CASES[name], ns))
        return grad(lambda c, xs: ns.sum(first(c, xs) * C), argnums=(0, 1))

    wanted, given = jax.jit(second(jax.grad, jaxs))(jaxs.put(C), jaxs.put(XS)), (ns.put(C), ns.put(XS, rows=True))
    check(st.jit(second(st.grad, ns), executor="numpy")(*given), wanted, given)
    if name not in QUICK:
        check(second(st.grad, ns)(*given), wanted, given)


@everywhere
def test_all_backends(backend: str) -> None:
    ns = ours(0, backend)
    given = ns.put(C), ns.put(XS, rows=True)
    for name in ("a_recurrent_network", "branches"):
        f = differentiated(CASES[name], ns)
        found = check_gradients(f, given, (0, 1))
        check(st.jit(st.grad(f, argnums=(0, 1)), executor="numpy")(*given), found, given)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_in_a_direction(name: str) -> None:
    ns = ours(0)
    c, xs = ns.put(C), ns.put(XS, rows=True)
    f = differentiated(CASES[name], ns)
    along = lambda c, xs: st.jvp(f, (c, xs), (c * 2, xs))[1]  # noqa: E731
    g = st.grad(f, argnums=(0, 1))(c, xs)
    wanted = float((g[0] * c * 2).sum() + (g[1] * xs).sum())
    for how in (along, st.jit(along, executor="numpy")):
        np.testing.assert_allclose(float(how(c, xs)), wanted, rtol=1e-10)


# -- functions that are called again, and functions with rules, in functions of loops --------------


@st.custom_vjp
def by_vjp(x: Any) -> Any:
    return st.sin(x)


by_vjp.defvjp(
    lambda x: (st.fori_loop(0, 2, lambda i, y: y * 1.0, st.sin(x)), x),
    lambda x, g: (st.fori_loop(0, 2, lambda i, g: g * 1.0, g * st.cos(x)),),
)


@st.custom_jvp
def by_jvp(x: Any) -> Any:
    return st.sin(x)


by_jvp.defjvps(lambda t, y, x: st.fori_loop(0, 2, lambda i, t: t * 1.0, t * st.cos(everywhere_of(x))))


def everywhere_of(x: Any) -> Any:
    """The value on all devices, of which a derivative saves the source."""
    return st.reshard(x, st.NamedSharding(x.sharding.mesh, st.P()))


def written(y: Any) -> Any:
    y = st.tanh(y)
    y[st.asarray([0, 2])] = y[st.asarray([1, 3])] * 2
    y[st.asarray([0, 2])] += 1.0
    return y * y


DOTS, EVERYTHING = st.checkpoint_policies.dots_saveable, st.checkpoint_policies.everything_saveable
BODIES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "arguments": lambda i, c, w: st.remat(lambda c, w: st.tanh(st.sin(c) @ w), policy=DOTS)(c, w),
    "closed over": lambda i, c, w: st.remat(lambda: st.tanh(st.sin(c) @ w) * (i + 1), policy=EVERYTHING)(),
    "in another one": lambda i, c, w: st.remat(
        lambda c: st.remat(lambda d: st.tanh(d @ w) * (i + 1), policy=DOTS)(st.sin(c))
    )(c),
    "around a loop": lambda i, c, w: st.remat(
        lambda c: st.fori_loop(0, 2, lambda j, c: st.remat(lambda c: st.tanh(c @ w) * (i + 1) + j)(c), c) * c,
        policy=EVERYTHING,
    )(c),
    "in a branch": lambda i, c, w: st.cond(
        i > 0, lambda c: st.remat(lambda c: st.tanh(c @ w) * i)(c), lambda c: c * 2, c
    ),
    "rules": lambda i, c, w: by_vjp(c @ w) * (i + 1) + by_jvp(c @ w),
    "rules called again": lambda i, c, w: st.remat(lambda c: by_jvp(by_vjp(c @ w) * (i + 1)))(c),
    "gathers": lambda i, c, w: st.tanh(c @ everywhere_of(w)) @ everywhere_of(w),
    "writes": lambda i, c, w: st.remat(lambda c: written(c @ w) * (i + 1))(written(c)),
}


def of_python(lower: int, upper: int, body: Any, c: Any) -> Any:
    for i in range(lower, upper):
        c = body(i, c)
    return c


RARE = ("arguments", "in another one", "around a loop", "rules called again", "writes")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in RARE else n for n in BODIES])
def test_functions_of_loops(name: str) -> None:
    """Each loop has the derivatives of the same one of Python, by all ways to compute them."""
    mesh, body = mesh_of((2, 2), "numpy"), BODIES[name]
    w = st.device_put(0.3 * RNG.standard_normal((2, 2)), st.NamedSharding(mesh, st.P("x")))
    c, d = st.device_put(C, st.NamedSharding(mesh, st.P("y"))), st.ones((2, 2), device=w.sharding)

    def f(w: Any, loop: Any = st.fori_loop) -> Any:
        return (loop(0, 3, lambda i, c: body(i, c, w), c) ** 2).sum()

    def twice(w: Any, f: Any = f) -> Any:
        return st.grad(lambda w: (st.grad(f)(w) * d).sum())(w)

    again = functools.partial(f, loop=of_python)
    wanted, second = st.grad(again)(w), twice(w, again)
    check([st.grad(f)(w), st.jit(st.grad(f))(w)], [wanted] * 2, [w] * 2)
    check([st.jit(twice)(w)], [second], [w])
    check([st.jit(lambda w: st.jvp(st.grad(f), (w,), (d,))[1])(w)], [second], [w])
    along = st.jit(lambda w: st.linearize(f, w)[1](d))(w)
    np.testing.assert_allclose(float(along), float((wanted * d).sum()), rtol=1e-10)
    assert st.eval_shape(twice, w).sharding == w.sharding


# -- what programs consist of ----------------------------------------------------------------------


def loops_of(f: Any, *args: Any) -> list[str]:
    """The lines of the loops of a program."""
    return [line for line in st.jit(f).lower(*args).as_text().splitlines() if "= counted_loop" in line]


def network(w: Any, c: Any, xs: Any, remat: Any = lambda f: f) -> Any:
    def step(h: Any, x: Any) -> Any:
        return st.tanh(st.tanh(h @ w) @ w + x), None

    return (st.scan(remat(step), c, xs)[0] ** 2).sum()


def test_programs_do_not_grow_with_trips() -> None:
    texts = []
    for n in (911, 91100):
        text = st.jit(st.grad(network)).lower(st.ones((2, 2)), st.ones((4, 2)), st.ones((n, 4, 2))).as_text()
        texts.append(text.replace(str(n), "n"))
    assert texts[0] == texts[1]


def test_what_a_trip_saves() -> None:
    """Slices, results and what the function closes over are not stacked; a function that is recomputed saves its carry
    only.
    """
    args = st.ones((2, 2)), st.ones((4, 2)), st.ones((3, 4, 2))
    forward, backward = loops_of(st.grad(network), *args)
    assert forward.count("f8[3,4,2]") == 3  # The carry and two results of tanh, of which one is the next carry.
    forward, backward = loops_of(st.grad(functools.partial(network, remat=st.remat)), *args)
    assert forward.count("f8[3,4,2]") == 1
    assert (forward + backward).count("f8[3,2,2]") == 0
    forward, backward = loops_of(st.grad(lambda c, xs: (st.map(lambda x: x * c, xs) ** 2).sum(), argnums=0), *args[1:])
    assert forward.count("f8[3,4,2]") == 1  # The results. The slices are those of the argument.


def test_nothing_is_gathered() -> None:
    """A gradient has the layout of its argument, and the bytes that are inferred are those that are transferred."""
    mesh = mesh_of((4,), "numpy")
    w = st.device_put(np.full((2, 2), 0.5), st.NamedSharding(mesh, st.P()))
    c = st.device_put(np.ones((8, 2)), st.NamedSharding(mesh, st.P("x")))
    xs = st.device_put(np.ones((5, 8, 2)), st.NamedSharding(mesh, st.P(None, "x")))
    f = st.grad(network, argnums=(1, 2))
    for how in (f, st.jit(f, executor="numpy")):
        with st.transfers() as log:
            found = how(w, c, xs)
        assert [g.sharding for g in found] == [c.sharding, xs.sharding]
        assert log.bytes in (0, 2 * 3 * 8)  # The sum of the squares, which a program does not compute.
    g = st.jit(st.grad(network), executor="numpy")
    with st.transfers() as log:
        g(w, c, xs)
    where = st.AbstractMesh((4,), ("x",))
    abstract = [st.empty_like(x, device=st.NamedSharding(where, x.sharding.spec)) for x in (w, c, xs)]
    assert log.bytes == st.simulate(g, *abstract).bytes > 0
    assert st.simulate(st.grad(network), *abstract).bytes == log.bytes + 2 * 3 * 8


def test_devices_that_do_not_exist() -> None:
    mesh = st.AbstractMesh((512,), ("data",))
    put = lambda spec, *shape: st.empty(shape, dtype="float32", device=st.NamedSharding(mesh, spec))  # noqa: E731
    args = put(st.P(), 16, 16), put(st.P("data"), 1024, 16), put(st.P(None, "data"), 5, 1024, 16)
    found = st.eval_shape(st.grad(network, argnums=(0, 1, 2)), *args)
    assert [g.sharding for g in found] == [x.sharding for x in args]
    bounded = lambda w, n: (st.fori_loop(0, n, lambda i, y: st.tanh(y @ w), w) ** 2).sum()  # noqa: E731
    assert st.eval_shape(st.grad(bounded), args[0], put(st.P()).astype("int64")).shape == (16, 16)


def test_c_runs_the_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtensor.interpreters.jit.c import c_trips
    from shardtensor.interpreters.jit.c.compiler import find_compiler

    if find_compiler() is None:
        pytest.skip("no C compiler")
    trips: list[int] = []
    plain = c_trips.Run.run

    def counting(self: Any) -> None:
        plain(self)
        trips.append(self.done)

    monkeypatch.setattr(c_trips.Run, "run", counting)
    w = st.asarray(RNG.standard_normal((2, 2)))
    for args in ((w, st.asarray(C), st.asarray(XS)), (w, st.asarray(C[0]), st.asarray(XS[:, 0]))):
        found = st.jit(st.grad(network, argnums=(0, 1, 2)), executor="c")(*args)
        check(found, st.grad(network, argnums=(0, 1, 2))(*args), args)
    assert trips == [3, 3, 3, 3]


# -- errors ----------------------------------------------------------------------------------------


def test_loops_of_an_unknown_number_of_trips_have_no_gradient() -> None:
    x, n = st.ones(3), st.asarray(3)

    def doubled(x: Any, scale: Any = 2) -> Any:
        return st.while_loop(lambda y: y.sum() < 20, lambda y: y * scale, x).sum()

    closed = st.grad(lambda s: doubled(x, s))
    for how, arg in ((st.grad(doubled), x), (st.jit(st.grad(doubled)), x), (closed, 2.0), (st.jit(closed), 2.0)):
        with pytest.raises(TypeError, match=r"while_loop: it has no gradient: .*st\.fori_loop or st\.scan"):
            how(arg)
    bounded = lambda x, n: st.fori_loop(0, n, lambda i, y: y * x, x).sum()  # noqa: E731
    assert st.grad(bounded)(x, n).tolist() == [4, 4, 4]
    with pytest.raises(TypeError, match=r"fori_loop: it has no gradient here: upper depends on an argument of st\.jit"):
        st.jit(st.grad(bounded))(x, n)


def test_loops_that_do_not_depend_on_arguments_may_be_any() -> None:
    x, n = st.ones(3), st.asarray(3)

    def f(x: Any, n: Any) -> Any:
        k = st.while_loop(lambda k: k < 7, lambda k: k + st.asarray((x > 0).sum()), n)
        scale = st.fori_loop(0, n, lambda i, s: s * 2 + (x[0] > 0), st.ones(3))
        return (x * k * scale).sum()

    for how in (st.grad(f), st.jit(st.grad(f))):
        assert how(x, n).tolist() == [9 * 15] * 3


def test_writes_to_what_functions_close_over_are_an_error_in_programs() -> None:
    def f(x: Any) -> Any:
        y = x * 2

        def body(i: Any, c: Any) -> Any:
            y[0] = c[0]
            return c * y

        return st.fori_loop(0, 2, body, x).sum()

    assert st.grad(f)(st.ones(2)).tolist() == [4, 12]
    with pytest.raises(ValueError, match=r"setitem: writes a tensor that .* closes over; make it a part of the carry"):
        st.jit(st.grad(f))(st.ones(2))


def test_errors_of_elements_name_the_arguments() -> None:
    x = st.ones(2)
    loop = lambda x: st.scan(lambda c, _: (c * float(x[0]), None), st.zeros(2), None, length=2)[0].sum()  # noqa: E731
    branch = lambda x: st.cond(x.sum() > 0, lambda x: x * float(x[0]), lambda x: x, x).sum()  # noqa: E731
    for f in (loop, branch):
        assert st.grad(f)(x).shape == (2,)
        with pytest.raises(st.ConcretizationError, match="float: needs the elements of a tensor, and jit traces"):
            st.jit(st.grad(f))(x)


def test_later_writes_do_not_change_what_loops_have_saved() -> None:
    def f(c: Any, xs: Any) -> Any:
        k = st.ones_like(c) * 3
        last, ys = st.scan(lambda y, x: (st.sin(y * x * k), y * c), c, xs)
        first = (ys * ys).sum() + last.sum()
        ys[...], k[...], xs[...], c[...] = 0, 0, 0, 1
        last *= 2
        return first + (last * c).sum() + st.scan(lambda y, x: (y * x, None), c, xs + c)[0].sum()

    args = st.asarray(C), st.asarray(XS)
    wanted = [np.asarray(g) for g in st.grad(f, argnums=(0, 1))(args[0].copy(), args[1].copy())]
    check(st.jit(st.grad(f, argnums=(0, 1)))(args[0].copy(), args[1].copy()), wanted, args)


def test_random_numbers_of_trips() -> None:
    def f(c: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            key, y = carry
            key, k = st.random.split(key)
            kept = st.random.uniform(k, y.shape) > 0.3
            return (key, st.where(kept, st.sin(y * 2), 0)), None

        def numbered(i: Any, y: Any) -> Any:
            again = st.remat(lambda y: st.sin(y) * st.random.normal(st.random.fold_in(key, i), y.shape))
            return again(y)

        key = st.random.key(3)
        return (st.scan(step, (key, c), None, length=4)[0][1] * st.fori_loop(2, 5, numbered, c)).sum()

    c = st.asarray(C)
    np.testing.assert_allclose(np.asarray(st.jit(st.grad(f))(c)), np.asarray(st.grad(f)(c)), rtol=1e-12)
    check_gradients(f, [c], [0])

    def recomputed(draw: Any) -> Any:
        step = lambda carry, _: ((st.random.split(carry[0])[0], draw(*carry)), None)  # noqa: E731
        return lambda c: st.scan(step, (st.random.key(3), c), None, length=4)[0][1].sum()

    drawn = lambda key, y: y * st.random.normal(key, y.shape)  # noqa: E731
    closed_over = lambda key, y: st.remat(functools.partial(drawn, key))(y)  # noqa: E731
    for draw in (st.remat(drawn), closed_over, lambda *given: st.cond(c.sum() < 9, closed_over, drawn, *given)):
        st.grad(recomputed(draw))(c)
        with pytest.raises(TypeError, match=r"remat: .* a key of the carry.*st\.random\.fold_in\(key, i\)"):
            st.jit(st.grad(recomputed(draw)))(c)
