"""The derivative of halos: what was copied is added back, for all boundaries, sizes and layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.functions.building.halos import with_halos
from tests.interpreters.differentiation.numeric import direction
from tests.layouts import everywhere, mesh_of

LAYOUTS = [
    ((4,), st.P("x")),
    ((2, 2), st.P("x", "y")),
    ((2, 2), st.P("y")),
    ((2, 2), st.P()),
    ((3, 2), st.P(("x", "y"))),
]


def linear_and_squares(x: Any, depth: tuple[int, ...], boundary: Any, weights: Any) -> Any:
    """Returns the weighted sum of the parts with their halos and of their squares, one number on all devices."""
    everywhere = st.NamedSharding(x.sharding.mesh, st.P())
    sums = [(p * w).sum() + (p * p * w).sum() for p, w in zip(with_halos(x, depth, boundary), weights, strict=True)]
    return sum([st.device_put(s, everywhere) for s in sums])


@everywhere
@pytest.mark.parametrize("boundary", ["periodic", "reflect", "nearest", 0.7])
def test_halos(backend: str, boundary: Any) -> None:
    rng = np.random.default_rng(0)
    for axes, spec in LAYOUTS:
        for shape, depth in (((9, 5), (1, 1)), ((3, 4), (3, 0)), ((7, 6), (2, 4))):
            x = st.device_put(rng.standard_normal(shape), st.NamedSharding(mesh_of(axes, backend), spec))
            parts = with_halos(x, depth, boundary)
            weights, d = [rng.standard_normal(p.shape) for p in parts], direction(x, rng)
            g = st.grad(lambda x: linear_and_squares(x, depth, boundary, weights))(x)  # noqa: B023
            assert (g.sharding, g.dtype) == (x.sharding, x.dtype)
            moved = with_halos(st.device_put(d, x.sharding), depth, 0.0 if boundary == 0.7 else boundary)
            wanted = [
                float((np.asarray(w) * (1 + 2 * np.asarray(p)) * np.asarray(t)).sum())
                for w, p, t in zip(weights, parts, moved, strict=True)
            ]
            np.testing.assert_allclose(float((np.asarray(g) * d).sum()), sum(wanted), rtol=1e-10, atol=1e-10)
    traced = st.jit(st.grad(lambda x: linear_and_squares(x, depth, boundary, weights)))(x)
    np.testing.assert_allclose(np.asarray(traced), np.asarray(g), rtol=1e-12, atol=1e-12)


def test_halos_are_added_by_as_many_bytes_as_they_were_copied() -> None:
    mesh = mesh_of((4,), "numpy")
    x = st.device_put(np.arange(64.0).reshape(16, 4), st.NamedSharding(mesh, st.P("x")))
    with st.transfers() as forward:
        parts = with_halos(x, (1, 0), "periodic")
    value, pull = st.vjp(lambda x: with_halos(x, (1, 0), "periodic"), x)
    assert [p.shape for p in value] == [p.shape for p in parts]
    with st.transfers() as backward:
        (g,) = pull([st.ones(p.shape, device=p.device) for p in parts])
    assert backward.bytes == forward.bytes == 4 * 2 * 4 * 8
    assert np.asarray(g)[:, 0].tolist() == [2.0, 1.0, 1.0, 2.0] * 4
