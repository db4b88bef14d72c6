"""Gradients of small models, compared with JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.layouts import everywhere, mesh_of

jax = pytest.importorskip("jax")


def attention(np: Any, p: Any, tokens: Any, targets: Any) -> Any:
    """The cross entropy of a transformer block of two heads."""
    x = np.take(p["table"], tokens, axis=0) + p["places"]
    b, t, d = x.shape

    def norm(x: Any, scale: Any) -> Any:
        x = x - x.mean(axis=-1, keepdims=True)
        return x / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5) * scale

    def heads(x: Any) -> Any:
        return np.permute_dims(np.reshape(x, (b, t, 2, d // 2)), (0, 2, 1, 3))

    y = norm(x, p["first"])
    q, k, v = [heads(y @ p[name]) for name in ("q", "k", "v")]
    scores = q @ np.matrix_transpose(k) / (d // 2) ** 0.5
    scores = np.where(np.tril(np.ones((t, t))) > 0, scores, -1e9)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = scores / scores.sum(axis=-1, keepdims=True) @ v
    x = x + np.reshape(np.permute_dims(y, (0, 2, 1, 3)), (b, t, d)) @ p["out"]
    y = norm(x, p["second"]) @ p["up"]
    x = x + y * 0.5 * (1 + np.tanh(0.8 * (y + 0.045 * y**3))) @ p["down"]
    logits = x @ np.matrix_transpose(p["table"])
    logits = logits - logits.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (np.log(np.exp(logits).sum(axis=-1)) - picked).mean()


def parameters() -> tuple[dict[str, Any], Any, Any]:
    rng, d = np.random.default_rng(0), 8
    p: dict[str, Any] = {"table": rng.standard_normal((11, d)), "places": rng.standard_normal((6, d))}
    p |= {name: rng.standard_normal((d, d)) / 3 for name in ("q", "k", "v", "out", "up", "down")}
    p |= {name: 1 + rng.random(d) for name in ("first", "second")}
    return p, rng.integers(0, 11, (8, 6)), rng.integers(0, 11, (8, 6))


SPLIT = {"q": st.P(None, "y"), "k": st.P(None, "y"), "v": st.P(None, "y"), "out": st.P("y"), "table": st.P()}


@everywhere
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_of_a_transformer(backend: str, compiled: bool) -> None:
    p, tokens, targets = parameters()
    with jax.enable_x64(True):
        value, wanted = jax.value_and_grad(lambda p: attention(jax.numpy, p, tokens, targets))(p)
    mesh = mesh_of((2, 2), backend)
    put = {k: st.device_put(x, st.NamedSharding(mesh, SPLIT.get(k, st.P()))) for k, x in p.items()}
    data = [st.device_put(x, st.NamedSharding(mesh, st.P("x"))) for x in (tokens, targets)]
    fn = st.value_and_grad(lambda p, tokens, targets: attention(st, p, tokens, targets))
    found_value, found = (st.jit(fn) if compiled else fn)(put, *data)
    assert abs(float(found_value) - float(value)) < 1e-12
    for name, g in found.items():
        assert g.sharding == put[name].sharding
        np.testing.assert_allclose(np.asarray(g), np.asarray(wanted[name]), rtol=1e-9, atol=1e-12)


def string(np: Any, write: Any, p: Any) -> Any:
    """The energy that a string with friction has left at its ends after some steps, which are written in place."""
    u, v = p["height"] * 1.0, np.zeros_like(p["height"])
    for _ in range(12):
        pull = u[2:] - 2 * u[1:-1] + u[:-2]
        v = write(v, slice(1, -1), v[1:-1] * (1 - p["friction"]) + 0.3 * p["stiffness"] * np.sin(pull))
        u = write(u, slice(1, -1), u[1:-1] + 0.3 * v[1:-1])
        u = write(u, slice(-1, None), u[-2:-1] * 0.5)
    return (v * v).sum() + (u[:4] ** 2).sum() + (u[-4:] ** 2).sum()


def in_place(x: Any, at: Any, value: Any) -> Any:
    x[at] = value
    return x


def clusters(np: Any, _: Any, p: Any) -> Any:
    """The distances of points from the nearest of some centres, the largest tenth of which is cut off."""
    difference = p["points"][:, None, :] - p["centres"][None, :, :]
    distances = np.sqrt((difference * difference).sum(axis=-1))
    nearest = np.sort(np.sort(distances, axis=1)[:, 0])
    return nearest[: nearest.shape[0] * 9 // 10].sum() + distances.min(axis=0).max()


MODELS = {"string": string, "clusters": clusters}


def of_model(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    if name == "clusters":
        return {"points": rng.standard_normal((30, 3)), "centres": rng.standard_normal((4, 3))}
    return {"height": rng.standard_normal(21), "stiffness": np.asarray(0.7), "friction": np.asarray(0.05)}


@everywhere
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_simulations_and_clusters(name: str, compiled: bool, backend: str) -> None:
    p, model = of_model(name), MODELS[name]
    with jax.enable_x64(True):
        wanted = jax.grad(lambda p: model(jax.numpy, lambda x, at, value: x.at[at].set(value), p))(p)
    mesh = mesh_of((4,), backend)
    put = {k: st.device_put(x, st.NamedSharding(mesh, st.P("x") if x.size > 12 else st.P())) for k, x in p.items()}
    fn = st.grad(lambda p: model(st, in_place, p))
    found = (st.jit(fn) if compiled else fn)(put)
    for key, g in found.items():
        assert g.sharding == put[key].sharding
        np.testing.assert_allclose(np.asarray(g), np.asarray(wanted[key]), rtol=1e-10, atol=1e-12)
