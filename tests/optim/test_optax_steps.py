"""A hundred steps of each optimizer and option in float64, against optax: the same text makes both optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests import peers
from tests.optim.steps import gradients, layouts, start, trained

OPTIMIZERS = """
    o.sgd(0.1)
    o.sgd(0.1, momentum=0.9)
    o.sgd(0.1, momentum=0.9, nesterov=True)
    o.sgd(0.1, 0.9, accumulator_dtype="float32")
    o.sgd(o.constant_schedule(0.1))
    o.sgd(o.linear_schedule(0.1, 0.01, 50, 20))
    o.sgd(o.cosine_decay_schedule(0.1, 70, 0.1, 2.0))
    o.sgd(o.warmup_cosine_decay_schedule(0.0, 0.1, 10, 80, 0.01, 1.5))
    o.sgd(o.warmup_cosine_decay_schedule(0.0, 0.1, 0, 80))
    o.sgd(o.piecewise_constant_schedule(0.1, {30: 0.5, 60: 0.1}))
    o.sgd(o.exponential_decay(0.1, 20, 0.5))
    o.sgd(o.exponential_decay(0.1, 20, 0.5, 10, True, 0.03))
    o.adam(0.1)
    o.adam(0.1, 0.8, 0.95, 1e-4, 1e-3)
    o.adam(0.1, nesterov=True)
    o.adam(0.1, mu_dtype="float32")
    o.adamw(0.1)
    o.adamw(0.1, weight_decay=0.2, nesterov=True)
    o.adamw(0.1, weight_decay=o.linear_schedule(0.2, 0.0, 50))
    o.adamw(0.1, weight_decay=0.2, mask=matrices)
    o.adamw(0.1, weight_decay=0.2, mask={"b": False, "m": True, "s": False, "w": True})
    o.lion(0.01)
    o.lion(0.01, 0.8, 0.95, weight_decay=0.2, mask=matrices)
    o.lion(0.01, mu_dtype="float32")
    o.adafactor()
    o.adafactor(0.05, min_dim_size_to_factor=1)
    o.adafactor(0.05, 1, 0.7, -3, False, None, 0.9, "float64", 0.01, 1e-3, True, matrices)
    o.adafactor(0.05, factored=False, clipping_threshold=0.5)
    o.muon(0.02)
    o.muon(0.02, ns_steps=3, beta=0.9, weight_decay=0.1, nesterov=False, consistent_rms=0.2)
    o.muon(0.02, adaptive=True, mu_dtype="float64", adam_b1=0.8, adam_b2=0.9, adam_eps_root=1e-3)
    o.muon(0.02, adam_weight_decay=0.1, adam_learning_rate=0.01, ns_coeffs=((4.0, -6.9, 2.9), (2.9, -3.1, 1.2)), ns_steps=2)
    o.chain(o.clip_by_global_norm(2.0), o.adam(0.1))
    o.chain(o.clip(0.5), o.trace(0.9), o.scale(-0.1))
    o.chain(o.scale_by_adam(), o.scale_by_schedule(lambda count: -0.1 / (1 + count)))
    o.chain(o.ema(0.9), o.scale_by_learning_rate(0.1))
    o.chain(o.identity(), o.scale_by_factored_rms(min_dim_size_to_factor=2), o.scale_by_learning_rate(0.01))
    o.chain(o.masked(o.clip(0.5), matrices), o.add_decayed_weights(0.1, {"b": False, "m": True, "s": True, "w": False}), o.sgd(0.1))
    o.multi_transform({"x": o.adam(0.1), "y": o.set_to_zero(), "z": o.lion(0.01)}, {"b": "y", "m": "x", "s": "z", "w": "z"})
""".strip().split("\n")  # fmt: skip

THEIRS = """
import jax
jax.config.update("jax_enable_x64", True)
import optax, types

o = types.SimpleNamespace(**vars(optax), muon=optax.contrib.muon)
matrices = lambda params: jax.tree.map(lambda x: x.ndim == 2, params)
params, noises, texts = given
found = {}
for text in texts:
    optimizer = eval(text)

    @jax.jit
    def step(params, state, noise):
        grads = jax.tree.map(lambda g, p: g + 0.1 * p, noise, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    new = jax.tree.map(jax.numpy.asarray, params)
    state = optimizer.init(new)
    for noise in noises:
        new, state = step(new, state, noise)
    found[text] = jax.device_get(new)
"""

IN_FLOAT32 = ("float32", "adafactor", "factored", "muon", "linear_schedule", "warmup", "exponential_decay")
"""Options with arithmetic of float32, in optax also the quotients of counts, and those that enlarge rounding errors."""


@pytest.mark.full
def test_a_hundred_steps() -> None:
    peers.require_jax()
    if peers.peers.versions(peers.peers.python(), ("optax",))["optax"] == peers.peers.MISSING:
        pytest.skip("optax is not installed on the Python of the peers")
    texts = [text.strip() for text in OPTIMIZERS]
    theirs = peers.run(THEIRS, (start(), list(gradients()), texts))
    names = {"o": st.optim, "matrices": lambda params: st.tree.map(lambda x: x.ndim == 2, params)}
    wrong = {}
    for text in texts:
        ours, _ = trained(eval(text, names), layouts()[2])
        limit = 2e-6 if any(word in text for word in IN_FLOAT32) else 2e-12
        wrong[text] = distance(ours, theirs[text]) / limit
    assert {text: ratio for text, ratio in wrong.items() if not ratio < 1} == {}


def distance(ours: Any, theirs: Any) -> float:
    return max(float(np.max(np.abs(np.asarray(ours[name]) - x))) for name, x in theirs.items())
