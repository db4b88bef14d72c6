"""A hundred steps of each optimizer and option in float64, against PyTorch, or a few lines of it where it has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.optim.steps import gradients, layouts, start, trained

torch = pytest.importorskip("torch")
o = st.optim


class Lion:
    """The steps of Lion in PyTorch, which has no such optimizer."""

    def __init__(self, params: Any, lr: float, b1: float, b2: float, decay: float) -> None:
        self.params, self.numbers = params, (lr, b1, b2, decay)
        self.means = [torch.zeros_like(p) for p in params]

    def step(self) -> None:
        lr, b1, b2, decay = self.numbers
        for p, m in zip(self.params, self.means, strict=True):
            p.sub_(lr * (torch.sign(b1 * m + (1 - b1) * p.grad) + decay * p))
            m.mul_(b2).add_((1 - b2) * p.grad)


class Muon:
    """The steps of Muon for matrices, in float64; PyTorch's own multiplies in bfloat16."""

    def __init__(self, params: Any, lr: float, beta: float, nesterov: bool, decay: float, coeffs: Any) -> None:
        self.params, self.numbers, self.count = [p for p in params if p.ndim == 2], (lr, beta, nesterov, decay), 0
        self.coeffs, self.means = coeffs, [torch.zeros_like(p) for p in self.params]
        self.others = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=lr, weight_decay=0.0)

    def step(self) -> None:
        lr, beta, nesterov, decay = self.numbers
        self.others.step()
        self.count += 1
        for p, m in zip(self.params, self.means, strict=True):
            m.mul_(beta).add_((1 - beta) * p.grad)
            x = m / (1 - beta ** (self.count + nesterov))
            if nesterov:
                x = beta * x + (1 - beta) * p.grad / (1 - beta**self.count)
            x = x.T if p.shape[0] > p.shape[1] else x
            x = x / (x.norm() + 1e-8)
            for a, b, c in self.coeffs:
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            x = x.T if p.shape[0] > p.shape[1] else x
            p.sub_(lr * (max(1, p.shape[1] / p.shape[0]) ** 0.5 * x + decay * p))


class Clipped:
    """An optimizer of PyTorch after a change of the gradients."""

    def __init__(self, change: Callable[[Any], None], one: Any) -> None:
        self.change, self.one = change, one

    def step(self) -> None:
        self.change(self.one.param_groups[0]["params"])
        self.one.step()


def to_norm(params: Any) -> None:
    norm = torch.sqrt(sum((p.grad**2).sum() for p in params))
    for p in params:
        p.grad *= min(1.0, 2.0 / norm)


def scheduled(one: Any, rate: Callable[[int], float]) -> Any:
    """An optimizer of PyTorch with a schedule."""

    class Scheduled:
        count = 0

        def step(self) -> None:
            one.param_groups[0]["lr"] = rate(self.count)
            one.step()
            self.count += 1

    return Scheduled()


def cosine(count: int) -> float:
    return 0.1 * count / 10 if count < 10 else 0.1 * 0.5 * (1 + math.cos(math.pi * (count - 10) / 70))


STANDARD = (3.4445, -4.7750, 2.0315)
DION = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
t = torch.optim
PAIRS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "sgd": (o.sgd(0.1), lambda p: t.SGD(p, lr=0.1)),
    "sgd momentum": (o.sgd(0.1, momentum=0.9), lambda p: t.SGD(p, lr=0.1, momentum=0.9)),
    "sgd nesterov": (o.sgd(0.1, 0.9, nesterov=True), lambda p: t.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "sgd decay": (
        o.chain(o.add_decayed_weights(0.1), o.sgd(0.1, 0.5)), lambda p: t.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1)
    ),
    "sgd upward": (o.chain(o.scale(-1.0), o.sgd(0.01)), lambda p: t.SGD(p, lr=0.01, maximize=True)),
    "sgd schedule": (
        o.sgd(o.warmup_cosine_decay_schedule(0.0, 0.1, 10, 80)), lambda p: scheduled(t.SGD(p, lr=0.1), lambda c: cosine(min(c, 80)))
    ),
    "sgd norm": (o.chain(o.clip_by_global_norm(2.0), o.sgd(0.1)), lambda p: Clipped(to_norm, t.SGD(p, lr=0.1))),
    "sgd clip": (
        o.chain(o.clip(0.5), o.sgd(0.1)),
        lambda p: Clipped(lambda p: torch.nn.utils.clip_grad_value_(p, 0.5), t.SGD(p, lr=0.1)),
    ),
    "adam": (o.adam(0.1), lambda p: t.Adam(p, lr=0.1)),
    "adam betas": (o.adam(0.1, 0.8, 0.9, 1e-3), lambda p: t.Adam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3)),
    "adam decay": (o.chain(o.add_decayed_weights(0.1), o.adam(0.1)), lambda p: t.Adam(p, lr=0.1, weight_decay=0.1)),
    "adamw": (o.adamw(0.1, weight_decay=0.01), lambda p: t.AdamW(p, lr=0.1, weight_decay=0.01)),
    "adamw betas": (
        o.adamw(0.1, 0.8, 0.9, 1e-3, weight_decay=0.3),
        lambda p: t.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3),
    ),
    "adamw mask": (
        o.adamw(0.1, weight_decay=0.3, mask=lambda p: st.tree.map(lambda x: x.ndim == 2, p)),
        lambda p: t.AdamW(
            [{"params": [x for x in p if x.ndim == 2]}, {"params": [x for x in p if x.ndim != 2], "weight_decay": 0.0}],
            lr=0.1, weight_decay=0.3,
        ),
    ),
    "lion": (o.lion(0.01), lambda p: Lion(p, 0.01, 0.9, 0.99, 1e-3)),
    "lion betas": (o.lion(0.01, 0.8, 0.95, weight_decay=0.2), lambda p: Lion(p, 0.01, 0.8, 0.95, 0.2)),
    "adafactor": (
        o.adafactor(lambda c: st.minimum(0.05, (c + 1.0) ** -0.5), min_dim_size_to_factor=1),
        lambda p: t.Adafactor(p, lr=0.05),
    ),
    "adafactor options": (
        o.adafactor(
            lambda c: st.minimum(0.05, (c + 1.0) ** -0.5), min_dim_size_to_factor=1, decay_rate=0.7,
            clipping_threshold=1.1,
        ),
        lambda p: t.Adafactor(p, lr=0.05, beta2_decay=-0.7, d=1.1),
    ),
    "muon": (o.muon(0.02), lambda p: Muon(p, 0.02, 0.95, True, 0.0, [STANDARD] * 5)),
    "muon options": (
        o.muon(0.02, DION, beta=0.9, nesterov=False, weight_decay=0.1),
        lambda p: Muon(p, 0.02, 0.9, False, 0.1, DION),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_hundred_steps(name: str) -> None:
    optimizer, of_torch = PAIRS[name]
    ours, _ = trained(optimizer, layouts()[2])
    theirs = {key: torch.tensor(x) for key, x in start().items()}
    other = of_torch(list(theirs.values()))
    with torch.no_grad():
        for noise in gradients():
            for key, p in theirs.items():
                p.grad = torch.tensor(noise[key]) + 0.1 * p
            other.step()
    for key, p in theirs.items():
        if name == "muon" and p.ndim != 2:
            continue  # PyTorch has no Adam with this momentum; `test_optax_steps` compares it.
        # Each step of Newton and Schulz multiplies differences of small singular values by more than 3.
        np.testing.assert_allclose(np.asarray(ours[key]), p.numpy(), rtol=0, atol=1e-9 if "muon" in name else 2e-12)
