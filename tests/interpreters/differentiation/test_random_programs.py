"""Random programs of views, writes in place, masks, reductions, products, changes of layout and saved values: their
gradients agree with differences of NumPy's runs of the same programs, in every layout, under jit, recomputed and of
second order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.draws import drawn
from tests.interpreters.differentiation.numeric import slope
from tests.layouts import put

SHAPE = (7, 5)
SPECS = [st.P("x"), st.P(None, "x"), st.P()]


def moved(x: Any, number: int) -> Any:
    """Returns a copy of a tensor in another layout."""
    return x.copy() if isinstance(x, np.ndarray) else st.reshard(x, x.sharding.with_spec(SPECS[number])).copy()


def masked(x: Any, mask: Any, y: Any, kind: int) -> Any:
    """Writes the elements of a matrix that a mask selects, in one of three ways; returns a matrix."""
    if kind == 0:
        x[mask] = 0.4
    elif kind == 1:
        np.multiply(x, 0.8, out=x, where=mask)
    return np.where(mask, x, y)


def reduced(x: Any, y: Any, kind: int) -> Any:
    """Returns a matrix that depends on sums, means, deviations or running sums."""
    if kind == 0:
        return x - y.mean(axis=0)
    if kind == 1:
        return x / (1 + (y * y).sum(axis=1, keepdims=True))
    if kind == 2:
        return x * np.std(y + 0.1, axis=0) + np.linalg.norm(y)
    return np.cumsum(x, axis=int(kind == 4)) * 0.5 - y.sum() * 0.1


def joined(x: Any, y: Any, kind: int) -> Any:
    """Returns a matrix that has been made of parts of others."""
    if kind == 0:
        return np.concatenate([x[:3], y[3:]])
    if kind == 1:
        return np.roll(x, 2, axis=0) * np.flip(y)
    return np.tanh(x @ y.T @ x * 0.2)


def drawn_slice(rng: np.random.Generator, n: int, count: int) -> slice:
    """Returns a slice of ``count`` of n indices, with any step."""
    step = int(rng.integers(1, (n - 1) // max(count - 1, 1) + 1)) if count > 1 else 1
    first = int(rng.integers(0, n - (count - 1) * step))
    last = first + (count - 1) * step
    return slice(first, last + 1, step) if rng.random() < 0.7 else slice(last, first - 1 if first else None, -step)


def drawn_index(rng: np.random.Generator, shape: tuple[int, ...], counts: tuple[int, ...]) -> Any:
    return tuple([drawn_slice(rng, n, count) for n, count in zip(shape, counts, strict=True)])


def drawn_view(rng: np.random.Generator, x: Any) -> Any:
    kind = int(rng.integers(0, 6))
    if kind == 0:
        return x.T
    if kind == 1:
        return x.reshape(-1)[2:-3].reshape(-1, 1) if x.size > 8 else x[None][0]
    if kind == 2 and x.ndim == 2:
        return x[int(rng.integers(0, x.shape[0]))]
    counts = tuple([int(rng.integers(1, n + 1)) for n in x.shape])
    return x[drawn_index(rng, x.shape, counts)]


def program(seed: int, length: int) -> Callable[[Any], Any]:
    """Returns a random function of a matrix, a tensor or an array of NumPy, that returns a number."""

    def run(x: Any) -> Any:
        rng = np.random.default_rng(seed)
        whole, views, total = [x.copy(), x * 0.5], [], 0.0
        mask: Any = rng.random(SHAPE) < 0.4
        if rng.random() < 0.7 and not isinstance(x, np.ndarray):
            mask = st.device_put(mask, x.sharding)
        for _ in range(length):
            kind = int(rng.integers(0, 16))
            a, b = [whole[int(rng.integers(0, len(whole)))] for _ in range(2)]
            counts = tuple([int(rng.integers(1, n + 1)) for n in SHAPE])
            at, of = drawn_index(rng, SHAPE, counts), drawn_index(rng, SHAPE, counts)
            v = views[int(rng.integers(0, len(views)))] if views else a
            w = views[int(rng.integers(0, len(views)))] if views else b
            if kind == 0:
                whole.append(np.sin(a) * b)
            elif kind == 1:
                a *= b
                np.sin(a, out=a)
            elif kind == 2:
                a += b * 0.5
            elif kind == 3:
                a[at] = b[of] * 0.7
            elif kind == 4:
                a[at] -= b[of]
            elif kind in (5, 6):
                views.append(drawn_view(rng, v if rng.random() < 0.5 else a))
            elif kind == 7:
                v *= 0.9
            elif kind == 8:
                v[...] = w if v.shape == w.shape else 0.3
            elif kind == 9:
                np.tanh(v, out=v)
            elif kind == 10:
                a[[0, 3]] = b[[2, 2]] * 0.5
            elif kind == 11:
                whole.append(masked(a, mask, b, int(rng.integers(0, 3))))
            elif kind == 12:
                whole.append(reduced(a, b, int(rng.integers(0, 5))))
            elif kind == 13:
                whole.append(moved(a, int(rng.integers(0, 3))))
            elif kind == 14:
                whole.append(joined(a, b, int(rng.integers(0, 3))))
            total = total + (v * w).sum() * 0.1 if v.shape == w.shape else total + np.cos(v).sum() * 0.1
        return total + sum([(a * (k + 1)).sum() for k, a in enumerate(whole)])

    return run


COUNT = drawn(10000, fast=80)


@pytest.mark.parametrize("part", range(8))
def test_random_programs(part: int) -> None:
    for seed in range(part, COUNT, 8):
        rng = np.random.default_rng(seed)
        values, d = rng.uniform(-1, 1, SHAPE), rng.standard_normal(SHAPE)
        fn = program(seed, int(rng.integers(3, 14)))
        wanted = slope(lambda x, fn=fn: fn(x), [values], [d], 1e-3)
        x = put(values, "numpy", spec=SPECS[seed % 3])
        np.testing.assert_allclose(float(fn(x.copy())), fn(values), rtol=1e-9, err_msg=str(seed))
        g = st.grad(fn)(x.copy())
        assert g.sharding == x.sharding
        found = np.asarray(g)
        scale = 1 + abs(wanted) + np.abs(found).sum()
        assert abs((found * d).sum() - wanted) < 1e-7 * scale, seed
        if seed % 5 == 0:
            others = [st.jit(st.grad(fn))(x.copy()), st.grad(st.remat(fn))(x.copy())]
            others.append(
                st.grad(st.remat(fn, policy=lambda op, *_, s=seed, **__: (len(op.name) + s) % 2 == 0))(x.copy())
            )
            others.append(st.grad(lambda x, fn=fn: st.jvp(fn, (x,), (st.zeros_like(x),))[0])(x.copy()))
            others += [st.grad(fn)(put(values, "numpy", spec=spec)) for spec in SPECS]
            for other in others:
                np.testing.assert_allclose(np.asarray(other), found, rtol=1e-11, atol=1e-11 * scale, err_msg=str(seed))
