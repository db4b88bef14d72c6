"""Numerical derivatives, compared with NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draws

import shardtensor as st
from shardtensor import P
from tests.draws import drawn
from tests.layouts import READ_ONLY, USABLE, mesh_of


def _each(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


@settings(max_examples=drawn(400, fast=48))
@given(data=draws.data())
def test_gradients(data: Any) -> None:
    backend = data.draw(draws.sampled_from([*READ_ONLY, *USABLE]), "backend")
    order = data.draw(draws.sampled_from([1, 2]), "edge_order")
    shape = tuple(data.draw(draws.lists(draws.integers(order + 1, 7), min_size=1, max_size=3), "shape"))
    rng = np.random.default_rng(sum(shape))
    x = rng.integers(-9, 9, shape).astype(data.draw(draws.sampled_from(["int32", "float32", "complex128"]), "dtype"))
    split = data.draw(draws.permutations(["x", *[None] * (len(shape) - 1)]), "spec")
    coordinates = [np.cumsum(rng.uniform(0.5, 2, n)) for n in shape]
    spacings = data.draw(draws.sampled_from([[], [0.5], list(range(1, len(shape) + 1)), coordinates]), "spacings")
    found = st.gradient(
        st.device_put(x, st.NamedSharding(mesh_of((3,), backend), P(*split))), *spacings, edge_order=order
    )
    wanted = np.gradient(x, *spacings, edge_order=order)
    assert isinstance(found, tuple) == isinstance(wanted, tuple)
    for mine, numpys in zip(_each(found), _each(wanted), strict=True):
        assert mine.dtype == numpys.dtype
        np.testing.assert_allclose(np.asarray(mine), numpys, rtol=2e-5, atol=1e-5)


def test_axes_and_inference() -> None:
    x = st.device_put(np.arange(24.0).reshape(4, 6) ** 2, st.NamedSharding(mesh_of((3,), "numpy"), P("x")))
    for axis in (0, -1, (1, 0)):
        found, wanted = st.gradient(x, axis=axis), np.gradient(np.asarray(x), axis=axis)
        np.testing.assert_allclose(np.asarray(found[0]), wanted[0])
    np.testing.assert_allclose(np.asarray(np.gradient(x, 2.0, axis=1)), np.gradient(np.asarray(x), 2.0, axis=1))
    assert (
        np.convolve(x[0], np.ones(2), "valid").tolist() == np.convolve(np.asarray(x[0]), np.ones(2), "valid").tolist()
    )
    made = st.eval_shape(lambda x: st.gradient(x, axis=0), x)
    assert (made.shape, made.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize(
    ("arguments", "named", "error", "text"),
    [
        ((1.0, 2.0, 3.0), {}, st.ArgumentError, "3 spacings for 2 axes"),
        ((), {"edge_order": 3}, st.ArgumentError, "edge_order is 3"),
        ((), {"axis": 2}, st.AxisError, "axis 2 is out of range"),
        ((np.arange(3.0), 1.0), {}, st.ShapeError, "coordinates of axis 0"),
        (("far",), {}, st.ArgumentTypeError, "spacing of axis 0 is 'far'"),
        ((), {"axis": 1, "edge_order": 2}, st.ShapeError, "axis 1 has 2 elements; wanted at least 3"),
    ],
)
def test_errors(arguments: Any, named: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        st.gradient(st.ones((4, 2)), *arguments, **named)
