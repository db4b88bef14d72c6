"""Gradients compared with central differences."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor.tensor.pytree import leaves

DOMAINS = {
    "acos": (-0.9, 0.9), "asin": (-0.9, 0.9), "atanh": (-0.9, 0.9), "acosh": (1.2, 3.0), "sqrt": (0.3, 3.0),
    "log": (0.3, 3.0), "log2": (0.3, 3.0), "log10": (0.3, 3.0), "log1p": (-0.5, 3.0), "pow": (0.5, 2.0),
    "float_power": (0.5, 2.0), "reciprocal": (0.5, 2.0), "divide": (0.5, 2.0), "remainder": (0.5, 2.0),
    "fmod": (0.5, 2.0), "tan": (-1.2, 1.2), "cbrt": (0.3, 3.0), "mantissa": (0.55, 0.95),
}  # fmt: skip
"""Where the derivatives of operators are finite and their values are small."""


def in_domain(name: str, number: int, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns numbers in float64 or complex128 that are near those of an operand, of which none are equal to others,
    also to those of another operand, or zero. Numbers of `array` are multiples of 1/16.
    """
    if name in DOMAINS:
        low, high = DOMAINS[name]
        return rng.uniform(low, high, x.shape)
    noise = 0.005 + 0.02 * (number % 3) + 0.015 * np.asarray(rng.permutation(x.size) / max(x.size, 1)).reshape(x.shape)
    return x + noise + (0.5j * noise if x.dtype.kind == "c" else 0)


HERMITIAN = ("cholesky", "eigh", "eigvalsh")
"""The operators of which the operand counts as the mean of x and of its conjugate transpose, but a triangle is read."""


def taken(name: str, xs: Sequence[Any]) -> list[Any]:
    """Returns the operands of an operator that are given to it in place of others."""
    return [(x + st.conj(st.matrix_transpose(x))) / 2 if name in HERMITIAN else x for x in xs]


def direction(x: Any, rng: np.random.Generator) -> np.ndarray:
    made = np.asarray(rng.standard_normal(np.shape(x)))
    return np.asarray(made + 1j * rng.standard_normal(np.shape(x))) if np.asarray(x).dtype.kind == "c" else made


def weighted(fn: Callable[..., Any], seed: int = 0, *, single: bool = False) -> Callable[..., Any]:
    """Returns the function that adds up the results of another one, each times a fixed number: those in double
    precision, or with ``single`` those in single precision, too.
    """
    dtypes = ("float64", "complex128", *(("float32", "complex64") if single else ()))

    def total(*xs: Any) -> Any:
        rng, found = np.random.default_rng(seed), 0.0
        for y in leaves(fn(*xs)):
            if isinstance(y, st.ShardedTensor) and y.dtype in dtypes:
                weight = direction(np.empty(y.shape, y.dtype), rng)
                found = found + st.real(y * weight).sum()
        return found

    return total


def slope(fn: Callable[..., Any], xs: Sequence[Any], ds: Sequence[Any], step: float = 2e-6) -> float:
    """Returns the derivative of a function in a direction, as a central difference of fourth order."""

    def at(t: float) -> float:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return float(fn(*[x if d is None else _moved(x, t * d) for x, d in zip(xs, ds, strict=True)]))

    near, far = at(step) - at(-step), at(2 * step) - at(-2 * step)
    return (8 * near - far) / (12 * step)


def _moved(x: Any, by: np.ndarray) -> Any:
    if not isinstance(x, st.ShardedTensor):
        return x + by
    return st.device_put(np.asarray(x) + by, x.sharding)


def check_gradients(
    fn: Callable[..., Any], xs: Sequence[Any], argnums: Sequence[int], *, seed: int = 0, limit: float = 1e-6
) -> Any:
    """Asserts that the gradients of a function that returns a number agree with central differences, and that they have
    the shapes, dtypes and layouts of the arguments. Returns them.
    """
    rng = np.random.default_rng(seed)
    ds = [direction(x, rng) if k in argnums else None for k, x in enumerate(xs)]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        copies = [x.copy() if isinstance(x, st.ShardedTensor) and x.ndim else x for x in xs]
        gradients = st.grad(fn, argnums=tuple(argnums))(*copies)
    for k, g in zip(argnums, gradients, strict=True):
        assert (g.shape, g.dtype) == (np.shape(xs[k]), xs[k].dtype)
        if isinstance(xs[k], st.ShardedTensor):
            assert (g.sharding, g.committed) == (xs[k].sharding, xs[k].committed)
    wanted = slope(fn, xs, ds)
    # By JAX's convention, the gradient of a real function of complex numbers is conjugated.
    found = sum(float(np.sum(np.asarray(g) * ds[k]).real) for k, g in zip(argnums, gradients, strict=True))
    scale = 1 + abs(wanted) + sum(float(np.sum(np.abs(np.asarray(g)))) for g in gradients)
    assert np.isfinite(found) or not np.isfinite(wanted)
    if np.isfinite(wanted):
        assert abs(found - wanted) <= limit * scale, (found, wanted)
    return gradients


def check_tangents(fn: Callable[..., Any], xs: Sequence[Any], argnums: Sequence[int], gradients: Sequence[Any]) -> None:
    """Asserts that forward mode and the linearized function agree with gradients: ⟨g, J v⟩ = ⟨Jᵀ g, v⟩, where fn adds up
    the results times g.
    """
    rng = np.random.default_rng(1)
    ds = tuple([direction(xs[k], rng) for k in argnums])

    def of_some(*given: Any) -> Any:
        every = list(xs)
        for k, x in zip(argnums, given, strict=True):
            every[k] = x
        return fn(*every)

    primals = tuple([xs[k].copy() if isinstance(xs[k], st.ShardedTensor) and xs[k].ndim else xs[k] for k in argnums])
    wanted = sum(float(np.sum(np.asarray(g) * d).real) for g, d in zip(gradients, ds, strict=True))
    scale = 1 + sum(float(np.sum(np.abs(np.asarray(g) * d))) for g, d in zip(gradients, ds, strict=True))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        value, tangent = st.jvp(of_some, primals, ds)
        again, push = st.linearize(of_some, *primals)
        pushed = push(*ds)
        np.testing.assert_allclose([float(value), float(again)], float(of_some(*primals)), rtol=1e-12)
    for found in (tangent, pushed):
        assert found.dtype == np.float64
        assert abs(float(found) - wanted) <= 1e-10 * scale or not np.isfinite(wanted), (float(found), wanted)
