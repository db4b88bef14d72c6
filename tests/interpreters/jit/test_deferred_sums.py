"""Deferred sums: partial sums are added once, late, and into the layout in which they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from tests.layouts import array, everywhere, mesh_of

X, Y = array((16, 6), "float32", 1), array((16, 4), "float32", 2)
W = array((6, 4), "float32", 3)
ALL_REDUCE = 2 * 3 * 6 * 4 * 4  # the product to one of four devices, and the sum back


def given(backend: str) -> Any:
    mesh = mesh_of((4,), backend)
    x, y = (st.device_put(a, st.NamedSharding(mesh, P("x"))) for a in (X, Y))
    return mesh, x, y, st.device_put(W, st.NamedSharding(mesh, P()))


def gradients(x: Any, y: Any, w: Any) -> Any:
    """A step whose gradient is that of two batches."""
    half = x[:8], x[8:], y[:8], y[8:]
    a, b, c, d = half
    g = a.T @ (a @ w - c) + b.T @ (b @ w - d)
    return w - 0.1 * (g / 16)


@everywhere
def test_the_gradients_of_batches_are_added_once(backend: str) -> None:
    mesh, x, y, w = given(backend)
    f = lambda x, y, w: w - 0.1 * ((x.T @ y + x.T @ (x @ w)) / 16)  # noqa: E731
    traced = st.jit(f)
    with st.transfers() as sent:
        found = traced(x, y, w)
    assert sent.bytes == ALL_REDUCE == traced.lower(x, y, w).cost().bytes
    with st.transfers() as eager:
        wanted = f(x, y, w)
    assert eager.bytes == 2 * ALL_REDUCE
    assert found.sharding == wanted.sharding
    np.testing.assert_allclose(np.asarray(found), f(X, Y, W), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(traced(x, y, w)), np.asarray(found), rtol=1e-5, atol=1e-6)


@everywhere
def test_sums_are_added_into_the_layout_of_what_uses_them(backend: str) -> None:
    mesh, x, y, _ = given(backend)
    w = st.device_put(W, st.NamedSharding(mesh, P(None, "x")))
    f = lambda x, y, w: w - (x.T @ y) / 16  # noqa: E731
    with st.transfers() as sent:
        found = st.jit(f)(x, y, w)
    with st.transfers() as eager:
        wanted = f(x, y, w)
    assert (sent.bytes, eager.bytes) == (ALL_REDUCE // 2, ALL_REDUCE)
    assert found.sharding == wanted.sharding
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5)


@everywhere
def test_the_bits_of_eager_mode_are_kept(backend: str) -> None:
    mesh, x, y, w = given(backend)
    f = lambda x, y, w: (st.reshard(-(x.T @ y).T, st.NamedSharding(mesh, P("x"))), (x.T @ y + x.T @ y) - w)  # noqa: E731
    traced = st.jit(f, executor="numpy")
    with st.transfers() as sent:
        found = traced(x, y, w)
    with st.transfers() as eager:
        wanted = f(x, y, w)
    for a, b in zip(found, wanted, strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert sent.bytes < eager.bytes


CASES: dict[str, Callable[..., Any]] = {
    "an output": lambda x, y, w: x.T @ y,
    "twice": lambda x, y, w: (x.T @ y, x.T @ y + w),
    "not linear": lambda x, y, w: st.exp(x.T @ y) + (x.T @ y) * (x.T @ y),
    "a view": lambda x, y, w: (x.T @ y)[1:3] + w[1:3],
    "a view and all": lambda x, y, w: ((x.T @ y)[1:3] * 2, st.tanh(x.T @ y)),
    "a sum of a sum": lambda x, y, w: (x.T @ y).sum(axis=0) + y.sum(axis=0),
    "a product": lambda x, y, w: w.T @ (x.T @ y) + (x.T @ y)[:4],
    "a write": lambda x, y, w: _written(x.T @ y, y.sum(axis=0)),
    "a reduction of both": lambda x, y, w: st.sum(x, axis=0)[:, None] * w + x.T @ y,
    "a concatenation": lambda x, y, w: st.concat([x.T @ y, x.T @ y * 2]).sum(axis=1),
    "another mesh axis": lambda x, y, w: st.reshard(x.T @ y, st.NamedSharding(x.sharding.mesh, P("x"))).sum(axis=0),
}


def _written(x: Any, y: Any) -> Any:
    x[2] = y * 2
    x += 1
    return x


@everywhere
@pytest.mark.parametrize("executor", ["numpy", None])
@pytest.mark.parametrize("name", CASES)
def test_programs_with_sums(name: str, executor: str | None, backend: str) -> None:
    _, x, y, w = given(backend)
    f = CASES[name]
    traced = st.jit(f, executor=executor)
    with st.transfers() as eager:
        wanted = f(x, y, w)
    with st.transfers() as sent:
        found = traced(x, y, w)
    again = traced(x, y, w)
    for a, b, c in zip(*[r if isinstance(r, tuple) else (r,) for r in (found, wanted, again)], strict=True):
        assert a.sharding == b.sharding == c.sharding
        assert a.committed == b.committed
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.asarray(c), np.asarray(b), rtol=1e-4, atol=1e-4)
        if executor == "numpy":
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert traced.lower(x, y, w).cost().bytes == sent.bytes <= eager.bytes


@everywhere
def test_sums_of_tensors_in_pinned_memory_are_not_deferred(backend: str) -> None:
    sharding = st.NamedSharding(mesh_of((4,), backend), P(None, "x"), memory_kind="pinned_host")
    x = st.device_put(X, sharding)
    found = st.jit(lambda x: st.sum(x * x, axis=-1) - 1)(x)
    assert found.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(np.asarray(found), (X * X).sum(axis=-1) - 1, rtol=1e-6)
