"""`st.remat`: policies, names, offloading, closures, nesting, and the second call's agreement with the first one."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import interpreting
from shardtensor.interpreters.eager import EAGER
from shardtensor.testing.layouts import mesh_of
from tests.layouts import assert_equal, everywhere, put

policies = st.checkpoint_policies

X = np.linspace(0.1, 1, 32).reshape(8, 4)
W = np.linspace(-1, 1, 16).reshape(4, 4)


def layer(w: Any, x: Any) -> Any:
    h = st.checkpoint_name(st.tanh(x @ w), "h")
    return st.sin(st.checkpoint_name(h @ w, "y")) * h


def loss(w: Any, x: Any, **options: Any) -> Any:
    for _ in range(2):
        x = st.remat(layer, **options)(w, x)
    return (x * x).sum()


def plain(w: Any, x: Any) -> Any:
    for _ in range(2):
        x = layer(w, x)
    return (x * x).sum()


class Counting(type(EAGER)):  # type: ignore[misc]
    """Executes calls, and counts them by operator."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def apply(self, op: Any, operands: Any, params: Any, /) -> Any:
        self.counts[op.name] += 1
        return EAGER.apply(op, operands, params)


def counts(fn: Any, *args: Any) -> Counter[str]:
    counting = Counting()
    with interpreting(counting):
        fn(*args)
    return counting.counts


def offloading(saved: list[str], offloaded: list[str]) -> Any:
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved, names_which_can_be_offloaded=offloaded,
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip


POLICIES: dict[str, tuple[Any, int, int]] = {
    # How many of the matmul, tanh and sin calls of one layer are made again: 2 matmuls, and 2 functions.
    "none": (None, 2, 2),
    "nothing": (policies.nothing_saveable, 2, 2),
    "everything": (policies.everything_saveable, 0, 0),
    "dots": (policies.dots_saveable, 0, 2),
    "checkpoint_dots": (policies.checkpoint_dots, 0, 2),
    "dots without batches": (policies.dots_with_no_batch_dims_saveable, 0, 2),
    "names": (policies.save_only_these_names("y"), 1, 2),
    "other names": (policies.save_any_names_but_these("h"), 1, 2),
    "all except names": (policies.save_anything_except_these_names("h"), 0, 0),
    "both": (policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("h")), 0, 1),
    "offloaded names": (offloading(["h"], ["y"]), 1, 1),
    "offloaded dots": (policies.offload_dot_with_no_batch_dims("device", "pinned_host"), 0, 2),
    "own": (lambda op, *operands, **_: op.name == "tanh" and operands[0].shape == (8, 4), 2, 1),
}


@pytest.mark.parametrize("name", list(POLICIES))
def test_policies_choose_what_is_computed_again(name: str) -> None:
    policy, matmuls, functions = POLICIES[name]
    w, x = put(W, "numpy", spec=st.P()), put(X, "numpy")
    wanted = st.grad(plain, argnums=(0, 1))(w, x)
    found = st.grad(lambda w, x: loss(w, x, policy=policy), argnums=(0, 1))(w, x)
    jitted = st.jit(st.grad(lambda w, x: loss(w, x, policy=policy), argnums=(0, 1)))(w, x)
    for g, h, k in zip(found, wanted, jitted, strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(h), rtol=1e-13)
        np.testing.assert_allclose(np.asarray(k), np.asarray(h), rtol=1e-13)
        assert g.sharding == h.sharding == k.sharding
    base = counts(st.grad(plain), w, x)
    made = counts(st.grad(lambda w, x: loss(w, x, policy=policy)), w, x)
    assert made["matmul"] - base["matmul"] == 2 * matmuls
    assert made["tanh"] + made["sin"] - base["tanh"] - base["sin"] == 2 * functions


@everywhere
def test_offloaded_values(backend: str) -> None:
    w, x = put(W, backend, spec=st.P()), put(X, backend)
    value, g = st.value_and_grad(lambda w: loss(w, x, policy=offloading(["y"], ["h"])))(w)
    wanted = st.grad(lambda w: plain(w, x))(w)
    np.testing.assert_allclose(np.asarray(g), np.asarray(wanted), rtol=1e-12)
    assert g.sharding == w.sharding
    assert float(value) == pytest.approx(float(plain(w, x)))


@pytest.mark.parametrize("name", ["dots", "names", "offloaded names", "everything"])
def test_second_order_and_shapes(name: str) -> None:
    policy = POLICIES[name][0]
    w, x = put(W, "numpy", spec=st.P()), put(X, "numpy")

    def along(fn: Any) -> Any:
        return lambda w: (st.grad(lambda w: fn(w, x))(w) * W).sum()

    wanted = st.grad(along(plain))(w)
    found = st.grad(along(lambda w, x: loss(w, x, policy=policy)))(w)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-11, atol=1e-12)
    value, tangent = st.jvp(lambda w: loss(w, x, policy=policy), (w,), (w,))
    np.testing.assert_allclose(float(tangent), float(st.jvp(lambda w: plain(w, x), (w,), (w,))[1]), rtol=1e-12)
    shape = st.eval_shape(st.grad(lambda w: loss(w, x, policy=policy)), w)
    assert (shape.shape, shape.sharding) == (w.shape, w.sharding)


def test_nested_functions_and_closures() -> None:
    w, x = put(W, "numpy", spec=st.P()), put(X, "numpy")
    dots = policies.dots_saveable

    def nested(w: Any, x: Any) -> Any:
        y = w * 2

        @st.remat
        def outer(x: Any) -> Any:
            inner = st.remat(lambda x: layer(y, x), policy=dots)
            return inner(inner(x)) * y[0, 0]

        return (outer(x) * w[0]).sum()

    def same(w: Any, x: Any) -> Any:
        y = w * 2
        return (layer(y, layer(y, x)) * y[0, 0] * w[0]).sum()

    for wrap in (lambda f: f, st.jit):
        found, wanted = [wrap(st.grad(f, argnums=(0, 1)))(w, x) for f in (nested, same)]
        for g, h in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(g), np.asarray(h), rtol=1e-12)


def test_a_function_that_is_pulled_back_several_times() -> None:
    x = put(X, "numpy")
    f = st.remat(lambda x: st.sin(st.tanh(x)), policy=policies.everything_saveable)
    _, pull = st.vjp(f, x)
    wanted = np.cos(np.tanh(X)) * (1 - np.tanh(X) ** 2)
    for _ in range(2):
        np.testing.assert_allclose(np.asarray(pull(np.ones_like(X))[0]), wanted, rtol=1e-13)


@pytest.mark.parametrize("policy", [None, policies.everything_saveable], ids=["none", "everything"])
def test_random_draws_are_the_same(policy: Any) -> None:
    x, key = put(X, "numpy"), st.random.key(3)

    def dropped(x: Any) -> Any:
        kept = st.random.bernoulli(key, 0.5, x.shape)
        return st.where(kept, st.sin(x), 0) * st.random.normal(st.random.fold_in(key, 1), x.shape)

    wanted = st.grad(lambda x: dropped(x).sum())(x)
    assert_equal(st.grad(lambda x: st.remat(dropped, policy=policy)(x).sum())(x), np.asarray(wanted))
    jitted = st.jit(st.grad(lambda x: st.remat(dropped, policy=policy)(x).sum()))(x)
    np.testing.assert_allclose(np.asarray(jitted), np.asarray(wanted), rtol=1e-13)


def test_writes_in_place() -> None:
    x = put(X, "numpy")

    def written(x: Any) -> Any:
        y = x * 1
        y *= 2
        z = st.tanh(y)
        y[0] = z[1] * y[2]
        y += z
        return y * x

    wanted = st.grad(lambda x: written(x).sum())(x)
    for policy in (None, policies.everything_saveable, lambda op, *_, **__: op.name == "tanh"):
        assert_equal(st.grad(lambda x, p=policy: st.remat(written, policy=p)(x).sum())(x), np.asarray(wanted))


def test_names_of_values_that_are_written_between() -> None:
    x, all_names = put(X, "numpy"), policies.save_any_names_but_these()

    def written(x: Any) -> Any:
        y = st.sin(x)
        y += x
        z = st.checkpoint_name(y, "y") * y
        y[1:] *= 2
        return st.checkpoint_name(y[:2], "view") * z[:2]

    wanted = st.grad(lambda x: written(x).sum())(x)
    for wrap in (lambda f: f, st.jit):
        found = wrap(st.grad(lambda x: st.remat(written, policy=all_names)(x).sum()))(x)
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-13)


def test_static_arguments_and_trees() -> None:
    class Setting:
        scale = 3.0

    x = put(X, "numpy")

    def f(setting: Any, tree: Any, n: int, *, more: Any = 0.0, modes: Any) -> Any:
        assert type(setting) is Setting
        assert modes is kinds
        assert type(n) is int
        return {"y": tree["x"] * setting.scale * n + more, "n": n}

    kinds = ["fast", "exact"]
    fn = st.remat(f, static_argnums=(0, -1), static_argnames="modes")
    g = st.grad(lambda x: fn(Setting(), {"x": x}, 2, more=x, modes=kinds)["y"].sum())(x)
    assert_equal(g, np.full_like(X, 7.0))
    with pytest.raises(ValueError, match="remat: static_argnums is 3, and the function is called with 1 positional"):
        st.grad(lambda x: st.remat(st.sin, static_argnums=3)(x).sum())(x)


def test_a_second_call_that_differs_raises() -> None:
    x, calls = put(X, "numpy"), []

    def first(x: Any) -> Any:
        calls.append(1)
        return st.sin(x) if len(calls) % 2 else st.cos(x)

    def shorter(x: Any) -> Any:
        calls.append(1)
        return st.sin(x) * 2 if len(calls) % 2 else st.sin(x)

    def other(x: Any) -> Any:
        calls.append(1)
        return st.sin(x) if len(calls) % 2 else st.sin(x[:1])

    everything = policies.everything_saveable
    for f, policy, message in (
        (first, everything, r"call 1 is cos\(float64\[8, 4\]\), and it was sin\(float64\[8, 4\]\)"),
        (shorter, policies.dots_saveable, "it calls 1 operators in place of 2"),
        (other, None, "it returns other arrays"),
    ):
        calls.clear()
        with pytest.raises(st.ArgumentError, match=f"remat: the second call .* the first one: {message}; the function"):
            st.grad(lambda x, f=f, p=policy: st.remat(f, policy=p)(x).sum())(x)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"remat: policy is an? str; wanted a function, such as st\.checkpoint_pol"):
        st.remat(st.sin, policy="dots")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"remat: static_argnums is \('x',\); wanted an integer"):
        st.remat(st.sin, static_argnums=("x",))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offload_dst is 'disk'; wanted one of"):
        policies.offload_dot_with_no_batch_dims("device", "disk")
    with pytest.raises(ValueError, match=r"\['a'\] are in both lists"):
        offloading(["a"], ["a"])


def test_names_outside_of_remat() -> None:
    x = put(X, "numpy")
    tree = st.checkpoint_name({"x": x, "n": 3, "host": X}, "a")
    assert_equal(tree["x"], X)
    assert tree["n"] == 3
    assert tree["host"] is X
    assert_equal(st.grad(lambda x: (st.checkpoint_name(x, "a") * x).sum())(x), 2 * X)
    assert_equal(st.jit(lambda x: st.checkpoint_name(x, "a") + 1)(x), X + 1)


def test_policies_agree_with_jax(capsys: Any) -> None:
    jax = pytest.importorskip("jax")
    theirs, w, x = jax.checkpoint_policies, jax.numpy.ones((4, 4)), jax.numpy.ones((8, 4))
    public = {name for name in dir(theirs) if name[0] != "_"}
    assert public <= set(policies.__all__)
    # The number of saved residuals of JAX's layer, apart from the arguments.
    from jax.ad_checkpoint import checkpoint_name

    def of_jax(w: Any, x: Any) -> Any:
        h = checkpoint_name(jax.numpy.tanh(x @ w), "h")
        return jax.numpy.sin(checkpoint_name(h @ w, "y")) * h

    mesh = mesh_of((1,), "numpy")
    for name in ("dots_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable"):
        jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(of_jax, policy=getattr(theirs, name)), w, x)
        count = sum("argument" not in line for line in capsys.readouterr().out.splitlines())
        chosen: list[bool] = []

        def policy(chosen: list[bool], rule: Any, op: Any, *operands: Any, **params: Any) -> bool:
            chosen.append(rule(op, *operands, **params))
            return chosen[-1]

        observed = functools.partial(policy, chosen, getattr(policies, name))
        st.vjp(st.remat(layer, policy=observed), st.ones((4, 4), device=mesh), st.ones((8, 4), device=mesh))
        assert sum(chosen) == count, name
