"""Trainings of a small model by docs/examples/gpt.py, and by PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

import shardtensor as st
from tests.draws import drawn
from tests.examples.programs import GPT
from tests.examples.reference import losses_of

VOCABULARY = 67
BATCH = 6
STEPS = drawn(100, fast=40)
"""Neither the vocabulary nor the batch is a multiple of 4 or of 8."""


def given(*more: str) -> Any:
    return GPT.arguments([
        "--width", "16", "--layers", "2", "--heads", "4", "--context", "12", "--vocabulary", str(VOCABULARY),
        "--batch", str(BATCH), *more,
    ])  # fmt: skip


@functools.cache
def batches() -> list[np.ndarray]:
    """Rows whose next token mostly follows from the one before."""
    rng, args = np.random.default_rng(0), given()
    rows = rng.integers(0, VOCABULARY, (STEPS, BATCH, args.context + 1))
    for k in range(args.context):
        rows[..., k + 1] = np.where(rng.random(rows.shape[:2]) < 0.8, rows[..., k] * 5 % VOCABULARY, rows[..., k + 1])
    return list(rows)


@functools.cache
def start() -> Any:
    """The first parameters, in float32, so that they are the same in both dtypes."""
    with st.use_mesh(st.make_mesh((1,), ("one",), devices=st.local_devices()[:1])):
        params = GPT.init(st.random.key(0), given())
    return st.tree.map(lambda x: 3 * np.asarray(x), params)


@functools.cache
def wanted(optimizer: str, dtype: str) -> np.ndarray:
    """The losses of PyTorch."""
    chosen = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
        "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1, foreach=False),
    }
    return losses_of(start(), batches(), given().heads, dtype, chosen[optimizer])


OPTIMIZERS = {"sgd": lambda: st.optim.sgd(0.1), "adamw": lambda: st.optim.adamw(3e-3, weight_decay=0.1)}


def losses(optimizer: str, dtype: str, *layout: str) -> np.ndarray:
    """The losses of the program."""
    trainer = GPT.Trainer(given("--dtype", dtype, *layout), OPTIMIZERS[optimizer]())
    params, state = trainer.start(st.tree.map(lambda x: x.astype(dtype), start()))
    found = []
    for rows in batches():
        params, state, loss = trainer.step(params, state, st.reshard(rows, trainer.rows))
        found.append(loss)
    return np.array([float(x) for x in found])


def check(found: np.ndarray, optimizer: str, dtype: str) -> None:
    """Compares losses with those of PyTorch."""
    exact = wanted(optimizer, "float64")
    assert exact[-10:].mean() < exact[:10].mean() - 0.1  # It learns.
    distance = np.abs(found - exact).max()
    theirs = np.abs(wanted(optimizer, "float32") - exact).max()
    print(f"{optimizer}, {dtype}: {distance:.1e} from PyTorch in float64; PyTorch in float32: {theirs:.1e}")
    assert distance <= {"float64": 1e-10, "float32": 2e-6 if optimizer == "sgd" else 2 * theirs}[dtype]


LAYOUTS = {
    "one": ("--mesh", "data=1"),
    "data": ("--mesh", "data=8"),
    "zero1": ("--mesh", "data=8", "--zero", "1"),
    "zero2": ("--mesh", "data=8", "--zero", "2"),
    "zero3": ("--mesh", "data=8", "--zero", "3"),
    "model": ("--mesh", "model=4"),
    "data-model": ("--mesh", "data=2,model=4"),
    "data-model-zero1": ("--mesh", "data=2,model=4", "--zero", "1"),
    "data-model-zero2": ("--mesh", "data=2,model=4", "--zero", "2"),
    "data-model-zero3": ("--mesh", "data=2,model=4", "--zero", "3"),
}
