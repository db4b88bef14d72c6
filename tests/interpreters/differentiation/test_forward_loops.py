"""Forward mode through loops and branches, compared with loops of Python and, in `full`, with JAX."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, put

X = np.arange(12.0).reshape(6, 2) / 10 + 0.1
D = np.random.default_rng(0).standard_normal(X.shape)


def while_loop(cond: Any, body: Any, carry: Any) -> Any:
    while bool(cond(carry)):
        carry = body(carry)
    return carry


def fori_loop(lower: int, upper: int, body: Any, carry: Any) -> Any:
    for i in range(lower, upper):
        carry = body(i, carry)
    return carry


def scan(f: Any, carry: Any, xs: Any) -> Any:
    ys = []
    for k in range(len(xs)):
        carry, y = f(carry, xs[k])
        ys.append(y)
    if ys[0] is None:
        return carry, None
    return carry, tuple([st.stack(list(column)) for column in zip(*ys, strict=True)])


PYTHON = SimpleNamespace(
    while_loop=while_loop,
    fori_loop=fori_loop,
    scan=scan,
    cond=lambda pred, yes, no, *operands: yes(*operands) if bool(pred) else no(*operands),
    map=lambda f, xs: st.stack([f(xs[k]) for k in range(len(xs))]),
)

LOOPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "while": lambda np, lax, x: lax.while_loop(
        lambda c: c[1].sum() < 100, lambda c: (c[0] + 1, c[1] * 1.5 + x), (0, x * 2)
    ),
    "fori": lambda np, lax, x: lax.fori_loop(0, 3, lambda i, c: np.sin(c) * x + i, x),
    "numbers": lambda np, lax, x: lax.fori_loop(0, 3, lambda i, c: (c[0] * 2.0, c[1] + x.sum() * i), (1.0, 0.0)),
    "scan": lambda np, lax, x: lax.scan(lambda c, r: (c * r + 1.0, (c.sum(), np.sin(r), 1.0 * r[0])), x[0], x),
    "inactive carry": lambda np, lax, x: lax.fori_loop(0, 3, lambda i, c: c + x, np.zeros((6, 2))),
    "cond": lambda np, lax, x: lax.cond(x.sum() > 0, lambda x: (x * 2, x.sum()), lambda y: (x + y, 1.0 * x.sum()), x),
    "constant": lambda np, lax, x: lax.cond(x.sum() > 0, lambda x: np.ones_like(x), lambda y: x + y, x),
    "map": lambda np, lax, x: lax.map(lambda r: np.exp(r) * x[0], x),
    "nested": lambda np, lax, x: lax.fori_loop(
        0, 2, lambda i, c: lax.scan(lambda a, r: (a * r + x[0], None), c, x)[0], x[1]
    ),
}


def numbers(tree: Any) -> list[np.ndarray]:
    """Returns the floating-point numbers of values and tangents."""
    found = [np.asarray(x) for x in st.tree.leaves(tree) if x is not None]
    return [x for x in found if x.dtype.kind == "f"]


def along(fn: Any, x: Any, d: Any) -> Any:
    return st.jvp(fn, (x,), (d,))


def assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(numbers(found), numbers(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@everywhere
@pytest.mark.parametrize("name", list(LOOPS))
def test_loops_are_those_of_python(name: str, backend: str) -> None:
    loop, x, d = LOOPS[name], put(X, backend), put(D, backend)
    wanted = along(lambda x: loop(st, PYTHON, x), x, d)
    assert_close(along(lambda x: loop(st, st, x), x, d), wanted)
    assert_close(st.jit(lambda x, d: along(lambda x: loop(st, st, x), x, d))(x, d), wanted)


@pytest.mark.parametrize("name", list(LOOPS))
def test_second_derivatives_and_inference(name: str) -> None:
    loop, x, d = LOOPS[name], put(X, "numpy"), put(D, "numpy")

    def twice(x: Any, d: Any, lax: Any = st) -> Any:
        return along(lambda x: along(lambda x: loop(st, lax, x), x, d), x, d)

    wanted = twice(x, d, PYTHON)
    assert_close(twice(x, d), wanted)
    assert_close(st.jit(twice)(x, d), wanted)
    shapes = [s.shape for s in st.tree.leaves(st.eval_shape(twice, x, d)) if np.dtype(s.dtype).kind == "f"]
    assert shapes == [x.shape for x in numbers(wanted)]


@pytest.mark.full
@pytest.mark.parametrize("name", list(LOOPS))
def test_loops_agree_with_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    loop = LOOPS[name]
    with jax.enable_x64(True):
        wanted = jax.jit(lambda x, d: jax.jvp(lambda x: loop(jax.numpy, jax.lax, x), (x,), (d,)))(X, D)
    assert_close(along(lambda x: loop(st, st, x), put(X, "numpy"), put(D, "numpy")), jax.tree.leaves(wanted))


def test_a_carry_that_begins_with_a_number_has_the_dtype_of_the_function() -> None:
    x = st.ones(3, dtype="float32")
    value, tangent = st.jvp(lambda a: st.fori_loop(0, 2, lambda i, c: c * x[0] * 3, a), (2.0,), (1.0,))
    assert (value.dtype, tangent.dtype, float(tangent)) == (np.float32, np.float32, 9.0)


def test_an_integer_of_the_initial_carry_may_become_a_differentiated_number() -> None:
    def fn(x: Any, lax: Any = st) -> Any:
        body = lambda s: (s[0] + x[1, 0], s[1] * s[0], s[2] + 1)  # noqa: E731
        return lax.while_loop(lambda s: s[2] < 3, body, (1, x, 0))

    x, d = put(X, "numpy"), put(D, "numpy")
    wanted = along(lambda x: fn(x, PYTHON), x, d)
    assert_close(along(fn, x, d), wanted)
    assert_close(st.jit(lambda x, d: along(fn, x, d))(x, d), wanted)


def test_writes_in_functions_and_what_they_close_over() -> None:
    x = put(X, "numpy")

    def fn(x: Any) -> Any:
        total = x.copy()

        def trip(i: Any, c: Any) -> Any:
            c[0] = x[1] * 2
            c *= x
            return c

        return st.fori_loop(0, 2, trip, total) + total

    g = st.vjp(lambda x: PYTHON.fori_loop(0, 2, lambda i, c: st.concat([x[1:2] * 2, c[1:]]) * x, x) + x, x)[1](X)[0]
    _, tangent = st.jvp(fn, (x,), (D,))
    assert float((tangent * X).sum()) == pytest.approx(float((g * D).sum()), rel=1e-12)


def test_a_traced_function_may_write_what_it_makes() -> None:
    """The writes to its tensors end with the function: in a program, they do not exist outside of it."""

    def made(s: Any, x: Any) -> Any:
        z = st.zeros(2)
        z[0] = s[0] * x[0]
        z[1:] = s[1:] + z[:1]
        return z

    def through(x: Any, lax: Any = st) -> Any:
        s = lax.fori_loop(0, 2, lambda i, s: made(s, x), st.ones(2))
        s = lax.while_loop(lambda s: s.sum() < 100, lambda s: made(s, x), s)
        return st.cond(s.sum() > 0, lambda s: made(s, x), lambda s: s, s)

    x = np.array([4.0, 1.0])
    wanted = along(lambda x: through(x, PYTHON), x, x)
    assert_close(along(through, x, x), wanted)
    assert_close(st.jit(lambda x: along(through, x, x))(x), wanted)

    def selects(x: Any) -> Any:  # The backward pass of a loop adds what an index selects to zeros.
        return st.fori_loop(0, 2, lambda i, s: st.stack([s[1], s[0] * x[0]]) * x, st.ones(2)).sum()

    assert_close(st.jit(st.hessian(selects))(x), st.hessian(selects)(x))

    def outside(x: Any) -> Any:
        total = st.zeros(2)

        def trip(i: Any, s: Any) -> Any:
            total[0] = s[0] * x[0]
            return s + total

        return st.fori_loop(0, 2, trip, st.ones(2))

    with pytest.raises(ValueError, match="setitem: writes into a tensor outside of the function of a loop"):
        st.jit(lambda x: along(outside, x, x))(x)
