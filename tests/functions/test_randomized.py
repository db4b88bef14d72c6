"""Randomized singular value decompositions of matrices with known, decaying singular values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from tests.layouts import everywhere, mesh_of


def decaying(shape: tuple[int, ...], dtype: str, base: float = 0.7) -> tuple[Any, Any]:
    """Returns matrices and their singular values, the powers of a number."""
    generator, least = np.random.default_rng(0), min(shape[-2:])
    left, right = [
        np.linalg.qr(generator.normal(size=(*shape[:-2], n, least)) + 0j * (dtype[0] == "c")).Q for n in shape[-2:]
    ]
    if dtype[0] == "c":
        left = left * np.exp(1j * generator.random((*shape[:-2], 1, least)))
    values = base ** np.arange(least)
    made = (left * values) @ np.swapaxes(right, -1, -2).conj()
    return (made if dtype[0] == "c" else made.real).astype(dtype), values


LAYOUTS = [
    ((300, 45), P(("x", "y")), "float64", P(("x", "y")), P()),
    ((45, 300), P(None, ("x", "y")), "complex128", P(), P(None, ("x", "y"))),
    ((101, 90), P("x", "y"), "float32", P("x"), P(None, "y")),
    ((3, 50, 40), P("x"), "float64", P("x"), P("x")),
]


@everywhere
@pytest.mark.parametrize(("shape", "spec", "dtype", "left", "right"), LAYOUTS, ids=str)
def test_the_best_approximation_of_a_rank(shape: Any, spec: P, dtype: str, left: P, right: P, backend: str) -> None:
    host, values = decaying(shape, dtype)
    x = st.device_put(host, st.NamedSharding(mesh_of((2, 3), backend), spec))
    found = st.linalg.randomized_svd(x, 6, key=st.random.key(1))
    u, s, vh = [np.asarray(one) for one in found]
    eps = np.finfo(dtype).eps * 100
    assert (u.shape, s.shape, vh.shape) == ((*shape[:-1], 6), (*shape[:-2], 6), (*shape[:-2], 6, shape[-1]))
    assert (u.dtype, s.dtype, vh.dtype) == (host.dtype, host.real.dtype, host.dtype)
    np.testing.assert_allclose(s, np.broadcast_to(values[:6], s.shape), atol=eps)
    error = np.linalg.norm(host - (u * s[..., None, :]) @ vh, 2, axis=(-2, -1))
    assert np.all(error <= values[6] * 1.001 + eps)  # No approximation of this rank is closer than values[6].
    for one in (u, np.swapaxes(vh, -1, -2)):
        np.testing.assert_allclose(
            np.swapaxes(one.conj(), -1, -2) @ one, np.broadcast_to(np.eye(6), (*s.shape, 6)), atol=eps
        )
    assert (found.U.sharding.spec, found.Vh.sharding.spec) == (left, right)


def test_iterations_improve_slowly_decreasing_values() -> None:
    host, values = decaying((120, 100), "float64", 0.98)

    def error(steps: int) -> Any:
        u, s, vh = st.linalg.randomized_svd(host, 10, n_oversamples=5, n_iter=steps, key=st.random.key(3))
        return np.linalg.norm(host - np.asarray(u * s @ vh), 2)

    errors = [error(steps) for steps in (0, 2, 8)]
    assert errors[0] > errors[1] > errors[2] >= values[10]
    assert errors[2] < 1.02 * values[10]


def test_a_key_determines_the_bits() -> None:
    host, _ = decaying((60, 20), "float64", 0.98)
    x = st.device_put(host, st.NamedSharding(mesh_of((4,), "numpy"), P("x")))
    first, same, other = [st.linalg.randomized_svd(x, 3, n_iter=0, key=st.random.key(k)).U for k in (0, 0, 1)]
    np.testing.assert_array_equal(np.asarray(first), np.asarray(same))
    assert not np.array_equal(np.asarray(first), np.asarray(other))


def test_integers_and_errors() -> None:
    x, key = st.asarray(np.diag([3, 5, 1])), st.random.key(0)
    np.testing.assert_allclose(np.asarray(st.linalg.randomized_svd(x, 3, key=key).S), [5, 3, 1])
    with pytest.raises(st.ArgumentError, match="randomized_svd: n_components is 4; wanted at most 3"):
        st.linalg.randomized_svd(x, 4, key=key)
    with pytest.raises(st.ArgumentError, match="n_components is 0"):
        st.linalg.randomized_svd(x, 0, key=key)
    with pytest.raises(st.ArgumentError, match="n_iter is -1"):
        st.linalg.randomized_svd(x, 1, n_iter=-1, key=key)
    with pytest.raises(st.linalg.LinAlgError, match="randomized_svd: x has shape"):
        st.linalg.randomized_svd(x[0], 1, key=key)
