"""Gradients of small models, compared with JAX."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.functions.linalg import panels
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


@functools.cache
def attention_by_jax() -> Any:
    """The value and the gradient of the block: compiled once, because JAX takes a second for it."""
    p, tokens, targets = parameters()
    with jax.enable_x64(True):
        return jax.jit(jax.value_and_grad(lambda p: attention(jax.numpy, p, tokens, targets)))(p)


@everywhere
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_of_a_transformer(backend: str, compiled: bool) -> None:
    p, tokens, targets = parameters()
    value, wanted = attention_by_jax()
    mesh = mesh_of((2, 2), backend)
    put = {k: st.device_put(x, st.NamedSharding(mesh, SPLIT.get(k, st.P()))) for k, x in p.items()}
    data = [st.device_put(x, st.NamedSharding(mesh, st.P("x"))) for x in (tokens, targets)]
    fn = st.value_and_grad(lambda p, tokens, targets: attention(st, p, tokens, targets))
    found_value, found = (st.jit(fn) if compiled else fn)(put, *data)
    assert abs(float(found_value) - float(value)) < 1e-12
    for name, g in found.items():
        assert g.sharding == put[name].sharding
        np.testing.assert_allclose(np.asarray(g), np.asarray(wanted[name]), rtol=1e-9, atol=1e-12)


# -- a convolutional network -----------------------------------------------------------------------


def convolution(np: Any, x: Any, w: Any, depth: int = 1) -> Any:
    """The sums of products of each element and its neighbours, of images with channels in the last dimension: those of
    a block with a halo, without the halo.
    """
    height, width = x.shape[0] - 2 * depth, x.shape[1] - 2 * depth
    taps = [x[i : i + height, j : j + width] @ w[i, j] for i in range(2 * depth + 1) for j in range(2 * depth + 1)]
    total = taps[0]
    for tap in taps[1:]:
        total = total + tap
    return np.maximum(total, 0)


def images() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 3, 2, 2)) / 3, rng.standard_normal((9, 7, 2))


BOUNDARIES = {"periodic": "wrap", "reflect": "symmetric", "nearest": "edge", 0.5: "constant"}
"""The boundaries of `map_overlap`, and the modes of padding that repeat the same elements."""


def sharded_network(p: Any, x: Any, boundary: Any) -> Any:
    for w in (p["first"], p["second"]):
        x = st.map_overlap(lambda block, w=w: convolution(st, block, w), x, depth=(1, 1, 0), boundary=boundary)
    return (x * x).mean()


def network(p: Any, x: Any, boundary: Any) -> Any:
    more = {"constant_values": boundary} if not isinstance(boundary, str) else {}
    for w in (p["first"], p["second"]):
        padded = jax.numpy.pad(x, ((1, 1), (1, 1), (0, 0)), BOUNDARIES[boundary], **more)
        x = convolution(jax.numpy, padded, w)
    return (x * x).mean()


@pytest.mark.parametrize(
    "boundary", ["periodic", *[pytest.param(b, marks=pytest.mark.full) for b in list(BOUNDARIES)[1:]]]
)
def test_a_convolutional_network_by_map_overlap(boundary: Any) -> None:
    w, x = images()
    p = {"first": w, "second": w[::-1] + 0.1}
    with jax.enable_x64(True):
        wanted = jax.jit(jax.grad(lambda p, x: network(p, x, boundary), argnums=(0, 1)))(p, x)
    for axes, spec in (((2, 2), st.P("x", "y")), ((4,), st.P("x"))):
        mesh = mesh_of(axes, "numpy")
        put = {k: st.device_put(v, st.NamedSharding(mesh, st.P())) for k, v in p.items()}
        image = st.device_put(x, st.NamedSharding(mesh, spec))
        fn = st.grad(lambda p, x: sharded_network(p, x, boundary), argnums=(0, 1))
        for found in (fn(put, image), st.jit(fn)(put, image)):
            assert found[1].sharding == image.sharding
            for g, h in ((found[0]["first"], wanted[0]["first"]), (found[0]["second"], wanted[0]["second"])):
                np.testing.assert_allclose(np.asarray(g), np.asarray(h), rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(np.asarray(found[1]), np.asarray(wanted[1]), rtol=1e-10, atol=1e-12)


def log_likelihood(np: Any, p: Any, x: Any, y: Any) -> Any:
    """The log marginal likelihood of a Gaussian process with one length scale for each dimension."""
    scaled = x * np.exp(p["scales"])
    squares = (scaled**2).sum(axis=-1)
    distances = squares[:, None] + squares - 2 * scaled @ np.matrix_transpose(scaled)
    kernel = np.exp(2 * p["size"] - distances / 2) + np.exp(2 * p["noise"]) * np.eye(len(y))
    half = np.linalg.solve(np.linalg.cholesky(kernel), y - p["mean"])
    found = np.linalg.solve(kernel, y - p["mean"])
    fits = 0.25 * (half @ half) + 0.25 * ((y - p["mean"]) @ found)
    return -fits - 0.5 * np.linalg.slogdet(kernel)[1] - 0.5 * len(y) * math.log(2 * math.pi)


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_gaussian_process(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.setattr(panels, "GATHERED", 16)  # The kernel matrix is factorized panel by panel.
    monkeypatch.setattr(panels, "PANEL", 5)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((48, 3))
    y = np.sin(x.sum(axis=-1)) + 0.1 * rng.standard_normal(48)
    p = {"scales": np.asarray([0.1, -0.2, 0.3]), "size": 0.2, "noise": -1.0, "mean": 0.1}
    with jax.enable_x64(True):
        theirs = jax.jit(jax.value_and_grad(lambda *args: log_likelihood(jax.numpy, *args), argnums=(0, 1)))
        value, wanted = theirs(p, x, y)
    mesh = mesh_of((8,), "numpy")
    data = [st.device_put(a, st.NamedSharding(mesh, st.P("x"))) for a in (x, y)]
    put = {k: st.device_put(np.asarray(v), st.NamedSharding(mesh, st.P())) for k, v in p.items()}
    fn = st.value_and_grad(lambda *args: log_likelihood(st, *args), argnums=(0, 1))
    found_value, found = (st.jit(fn) if compiled else fn)(put, *data)
    assert abs(float(found_value) - float(value)) < 1e-10 * abs(float(value))
    for name, g in found[0].items():
        assert g.sharding == put[name].sharding
        np.testing.assert_allclose(np.asarray(g), np.asarray(wanted[0][name]), rtol=1e-10, atol=1e-10)
    assert found[1].sharding == data[0].sharding
    np.testing.assert_allclose(np.asarray(found[1]), np.asarray(wanted[1]), rtol=1e-10, atol=1e-10)


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


@functools.cache
def gradient_by_jax(name: str) -> Any:
    model = MODELS[name]
    with jax.enable_x64(True):
        return jax.jit(jax.grad(lambda p: model(jax.numpy, lambda x, at, value: x.at[at].set(value), p)))(
            of_model(name)
        )


@everywhere
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_simulations_and_clusters(name: str, compiled: bool, backend: str) -> None:
    p, model, wanted = of_model(name), MODELS[name], gradient_by_jax(name)
    mesh = mesh_of((4,), backend)
    put = {k: st.device_put(x, st.NamedSharding(mesh, st.P("x") if x.size > 12 else st.P())) for k, x in p.items()}
    fn = st.grad(lambda p: model(st, in_place, p))
    found = (st.jit(fn) if compiled else fn)(put)
    for key, g in found.items():
        assert g.sharding == put[key].sharding
        np.testing.assert_allclose(np.asarray(g), np.asarray(wanted[key]), rtol=1e-10, atol=1e-12)
