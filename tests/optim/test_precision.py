"""Losses in narrow dtypes, and the scale of their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from shardtensor.errors import ArgumentError, ArgumentTypeError
from tests.optim.steps import layouts
from tests.scripts import new_process, output_of


def arrays(sharding: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w = st.device_put(rng.standard_normal((5, 3)).astype("float32"), st.NamedSharding(sharding.mesh, P()))
    return w, st.device_put(rng.standard_normal((21, 5)), sharding)


@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("jit", [False, True])
def test_the_loss_computes_in_the_dtype_and_gradients_keep_theirs(compute: str, jit: bool) -> None:
    seen = []

    def loss(params: Any, x: Any, *, scale: Any, ids: Any) -> Any:
        seen.append((params["w"].dtype, x.dtype, ids.dtype, type(scale)))
        return {"loss": ((x @ params["w"]) ** 2).mean() * scale, "count": ids.sum()}

    for sharding in layouts():
        w, x = arrays(sharding)
        mixed = st.mixed_precision(compute)(loss)
        given = {"scale": 2.0, "ids": np.arange(3)}

        def both(w: Any, mixed: Any = mixed, x: Any = x, given: Any = given) -> Any:
            result = mixed({"w": w}, x, **given)
            return result["loss"], result["count"]

        run = st.value_and_grad(both, has_aux=True)
        (value, count), gradient = (st.jit(run) if jit else run)(w)
        assert (value.dtype, gradient.dtype, gradient.sharding) == (np.float32, np.float32, w.sharding)
        assert count.dtype == np.int64
        assert int(count) == 3
        assert seen[-1][:3] == (np.dtype(compute), np.dtype(compute), np.int64)
        assert seen[-1][3] is float
        expected = st.grad(lambda w, x=x: ((x @ w) ** 2).mean() * 2)(w)
        tolerance = {"bfloat16": 0.06, "float16": 5e-3, "float64": 1e-6}[compute]
        np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance)


def test_params_of_another_dtype_are_an_error() -> None:
    loss = st.mixed_precision()(lambda params, x: params["w"][0].sum())
    with pytest.raises(ArgumentTypeError, match=r"params\['w'\]\[0\] has the dtype float64; wanted float32"):
        loss({"w": [st.ones(3, dtype="float64")]}, st.ones(3))
    free = st.mixed_precision("float16", params=None, output=None)(lambda w: w.sum())
    assert free(st.ones(3)).dtype == np.float16


def test_the_default_needs_no_import_of_ml_dtypes() -> None:
    text = "import shardtensor as st; st.mixed_precision(params=None)(lambda w: print(w.dtype))(st.ones(3))"
    assert output_of(new_process("-c", text)).strip() == "bfloat16"


def test_wrong_dtypes_and_functions() -> None:
    for given in ({"compute": "int8"}, {"params": "bool"}, {"output": "no dtype"}, {"compute": None}):
        (name,) = given
        with pytest.raises(ArgumentTypeError, match=f"mixed_precision: {name} is .*; wanted a dtype of floating-point"):
            st.mixed_precision(**given)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"compute is a function; .*: st.mixed_precision\('bfloat16'\)\(loss\)"):
        st.mixed_precision(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="the decorated object is an int; wanted a function"):
        st.mixed_precision()(3)  # type: ignore[arg-type]


def test_a_step_with_infinite_gradients_changes_nothing_but_the_scale() -> None:
    for sharding in layouts():
        optimizer = st.optim.dynamic_loss_scaling(st.optim.adam(0.1), initial_scale=8.0, period=2)
        plain = st.optim.adam(0.1)
        w, _ = arrays(sharding)
        state, reference = optimizer.init({"w": w}), plain.init({"w": w})
        params, expected = {"w": w}, {"w": w}
        update = st.jit(optimizer.update)
        scales = []
        for step, bad in enumerate([None, np.inf, None, None, np.nan, -np.inf, None]):
            g = st.device_put(np.full(w.shape, step + 1, "float32"), w.sharding)
            grads = {"w": g * state.scale if bad is None else st.where(np.eye(5, 3, dtype=bool), np.float32(bad), g)}
            updates, state = update(grads, state, params)
            params = st.optim.apply_updates(params, updates)
            if bad is None:
                updates, reference = plain.update({"w": g}, reference, expected)
                expected = st.optim.apply_updates(expected, updates)
            scales.append(float(state.scale))
            np.testing.assert_array_equal(params["w"], expected["w"])
            np.testing.assert_array_equal(state.inner_state[0].nu["w"], reference[0].nu["w"])
            assert int(state.inner_state[0].count) == int(reference[0].count)
        assert scales == [8, 4, 4, 8, 4, 2, 2]
        assert int(state.skipped) == 3
        assert state.scale.sharding.mesh == w.sharding.mesh


def test_float16_underflows_without_the_scale() -> None:
    tiny = np.float32(1e-6)
    x = st.asarray(np.full((4, 2), 1e-3, "float32"))

    @st.mixed_precision("float16")
    def loss(w: Any, x: Any, scale: Any) -> Any:
        return (x @ w).mean() * tiny * scale

    w = st.ones(2, dtype="float32")
    optimizer = st.optim.dynamic_loss_scaling(st.optim.sgd(1.0))
    state = optimizer.init(w)
    assert float(abs(st.grad(loss)(w, x, 1.0)).max()) == 0
    updates, state = optimizer.update(st.grad(loss)(w, x, state.scale), state, w)
    np.testing.assert_allclose(updates, -1e-9, rtol=2e-2)


def test_the_scale_stays_between_one_and_its_limit() -> None:
    optimizer = st.optim.dynamic_loss_scaling(st.optim.sgd(0.1), initial_scale=2.0**23, period=1, factor=4.0)
    state = optimizer.init(st.ones(2))
    for _ in range(2):
        _, state = optimizer.update(st.ones(2), state)
    assert float(state.scale) == 2.0**24
    for _ in range(14):
        _, state = optimizer.update(st.asarray([np.inf, 1.0]), state)
    assert float(state.scale) == 1.0


def test_errors_of_the_scale() -> None:
    for given in ({"factor": 1.0}, {"period": 0}, {"initial_scale": 0.5}, {"factor": float("nan")}):
        with pytest.raises(ArgumentError, match=r"dynamic_loss_scaling: initial_scale is .*; wanted at least 1"):
            st.optim.dynamic_loss_scaling(st.optim.sgd(0.1), **given)
    with pytest.raises(ArgumentTypeError, match="inner is a float; wanted a GradientTransformation"):
        st.optim.dynamic_loss_scaling(0.1)  # type: ignore[arg-type]
    optimizer = st.optim.dynamic_loss_scaling(st.optim.sgd(0.1))
    with pytest.raises(ArgumentTypeError, match=r"state is a tuple; wanted the LossScaleState that init"):
        optimizer.update(st.ones(2), st.optim.sgd(0.1).init(st.ones(2)))
