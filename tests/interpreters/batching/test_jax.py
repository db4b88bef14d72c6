"""Sixty functions of one example, called by `st.vmap` and by `jax.vmap`."""

from __future__ import annotations

import numpy as np
import pytest

import shardtensor as st
from tests.draws import all_of_them
from tests.layouts import put

jax = pytest.importorskip("jax")

PROGRAMS = """
np.sin(a) + np.cos(a) * 2
np.exp(-a * a).sum()
a.mean(axis=0) - a.max(axis=0)
a.min() + a.std() + a.var(axis=1).sum()
np.prod(a, axis=1)
a @ a.T
a @ v
v @ a.T @ a
np.einsum('ij,kj->ik', a, a)
np.einsum('ij,jk,k->i', a, a.T @ a, v)
np.tensordot(a, a, axes=((0,), (0,)))
np.vecdot(a, v)
np.outer(v, v) + a.sum()
np.kron(v, v)
np.linalg.norm(a)
np.linalg.norm(a, axis=1)
np.linalg.inv(a.T @ a + np.eye(3))
np.linalg.solve(a.T @ a + np.eye(3), v)
np.linalg.solve(a.T @ a + np.eye(3), a.T)
np.linalg.cholesky(a.T @ a + np.eye(3))
np.linalg.det(a.T @ a + np.eye(3))
np.linalg.slogdet(a.T @ a + np.eye(3))[1]
np.linalg.eigvalsh(a.T @ a)
np.linalg.svd(a, compute_uv=False) if np is jax.numpy else np.linalg.svdvals(a)
np.linalg.pinv(a)
np.trace(a) + np.diagonal(a).sum()
np.fft.fft(a, axis=0)
np.fft.rfft(v)
np.sort(a, axis=0)
np.argsort(v)
np.argmax(a) + np.argmin(a, axis=1)
np.take_along_axis(a, np.argsort(a, axis=1), axis=1)
np.cumsum(a, axis=0)
np.cumprod(a, axis=1)
np.concatenate([a, a * 2], axis=1)
np.stack([v, v + 1], axis=-1)
np.reshape(a, (-1, 2))
a.T[::-1, 1:]
np.transpose(a)
np.expand_dims(v, 0) * a
np.squeeze(a[:, :1]) * 3
np.broadcast_to(v, (2, 3))
np.tile(v, 3)
np.repeat(v, 2)
np.roll(a, 1, axis=0)
np.flip(a, axis=1)
np.pad(a, ((1, 0), (0, 2)))
np.where(a > 0, a, -a * 0.5)
np.clip(a, -0.5, 0.5)
np.maximum(a, v) - np.minimum(a, 0.1)
np.tril(a) + np.triu(a, k=1)
np.quantile(a, 0.3)
np.median(a, axis=0)
np.interp(v, np.asarray([-2.0, 0.0, 2.0]), np.asarray([1.0, 3.0, 0.0]))
np.searchsorted(np.sort(v), v)
np.diff(a, axis=0)
np.cross(v, a)
np.meshgrid(v, v)[0]
np.exp(a) / np.exp(a).sum(axis=-1, keepdims=True)
np.logaddexp(a, v).sum(axis=0)
np.isfinite(a).all() & (a > -9).any()
a[np.asarray([0, 2, 2])] * a[1, 2]
""".strip().splitlines()


def test_there_are_sixty() -> None:
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("text", PROGRAMS if all_of_them else PROGRAMS[::8])
def test_programs(text: str) -> None:
    rng = np.random.default_rng(0)
    a, v = rng.standard_normal((5, 4, 3)), rng.standard_normal((5, 3))
    fn = eval(f"lambda np, a, v: {text}", {"jax": jax})
    with jax.enable_x64(True):
        wanted = np.asarray(jax.jit(jax.vmap(lambda a, v: fn(jax.numpy, a, v)))(a, v))
    found = st.vmap(lambda a, v: fn(st, a, v))(put(a, "numpy"), put(v, "numpy"))
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-9, atol=1e-12)
