"""docs/examples/gpt.py: bytes of a step by closed formulas, and the memory of a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.device import HOST
from tests.examples.programs import GPT

VOCABULARY, LAYERS, HEADS = 67, 2, 4
"""The vocabulary is a multiple of no number of devices."""

HELD = 12
"""Bytes of a parameter and of its two moments."""

OPTIMIZER = st.optim.adamw(1e-3, weight_decay=0.1)

STEP = 16
"""Bytes for each parameter in a step: with its gradient."""


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    yield
    st.reset_peak_memory(measure=False)


class Run(NamedTuple):
    """A training of which the first step has been run."""

    trainer: Any
    params: Any
    state: Any
    rows: Any

    def step(self) -> Run:
        return self._replace(**dict(zip(("params", "state"), self.trainer.step(*self[1:])[:2], strict=True)))


def run_of(*layout: str, width: int = 16, layers: int = LAYERS, context: int = 8, batch: int = 8) -> Run:
    """A run on memories that are checked."""
    sizes = {"width": width, "layers": layers, "heads": HEADS, "context": context, "batch": batch}
    given = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    args = GPT.arguments([*given, "--vocabulary", str(VOCABULARY), *layout])
    axes = GPT.axes_of(args)
    devices = st.devices("checked")[: math.prod(axes.values())]
    trainer = GPT.Trainer(args, OPTIMIZER, st.make_mesh(tuple(axes.values()), tuple(axes), devices=devices))
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (batch, context + 1))
    params, state = trainer.start(GPT.init(st.random.key(0), args))
    return Run(trainer, params, state, st.reshard(rows, trainer.rows)).step()


def simulated_bytes(run: Run) -> int:
    """Returns the bytes of a step on devices that do not exist."""
    mesh = run.trainer.mesh
    abstract = st.AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape))

    def without_elements(x: Any) -> Any:
        return st.empty_like(x, device=st.NamedSharding(abstract, x.sharding.spec))

    trainer = GPT.Trainer(run.trainer.args, OPTIMIZER, abstract)
    params, state = trainer.start(st.tree.map(without_elements, st.reshard(run.params, run.trainer.whole)))
    return st.simulate(trainer.step, params, state, without_elements(run.rows)).bytes


def expected_bytes(run: Run) -> int:
    """Returns the bytes that a step transfers between devices, in float32.

    With the axes data, of size n, and model, of size m:

    * G bytes of parameters are on the devices along model: those that it splits once, the others m times. Data
      parallelism and ZeRO 1 and 2 transfer 2 (n - 1) G; ZeRO 3 transfers 3 (n - 1) G without the second gather of
      parameters that their derivatives do not need: of the embeddings, and of the shifts of the norms. The loss, of 4
      bytes, is added up likewise.
    * The activations of A bytes are added up twice in a block, and their cotangents twice in a block and for the
      logits: 2 (m - 1) (4 L + 1) A. The largest logit, and two sums of them, are 4 bytes for each token.
    """
    args, axes = run.trainer.args, dict(run.trainer.mesh.shape)
    n, m = axes["data"], axes.get("model", 1)
    split = 4 * sum(
        x.size
        for x, whole in zip(st.tree.leaves(run.params), st.tree.leaves(run.trainer.whole), strict=True)
        if "model" in whole.spec.axes
    )
    whole = 4 * sum(x.size for x in st.tree.leaves(run.params)) - split
    held = split + m * whole
    unneeded = m * 4 * args.width * (args.vocabulary + args.context + 2 * args.layers + 1) if args.zero == 3 else 0
    of_data = (n - 1) * ((3 if args.zero == 3 else 2) * held - unneeded + 2 * m * 4)
    tokens = 4 * args.batch * args.context
    of_model = 2 * (m - 1) * ((4 * args.layers + 1) * args.width * tokens + 3 * tokens)
    return of_data + of_model


def constants(run: Run) -> int:
    """Returns the bytes of constants, which are transferred from the host: masks, and the numbers of the vocabulary."""
    args = run.trainer.args
    return int(run.trainer.mesh.size) * (2 * args.layers * args.context**2 + 8 * args.vocabulary)


FAST = {("data=8", 3), ("data=2,model=4", 0)}


@pytest.mark.parametrize(
    ("mesh", "level"),
    [
        pytest.param(mesh, level, marks=() if (mesh, level) in FAST else pytest.mark.full)
        for mesh in ("data=1", "data=5", "data=8", "model=4", "data=2,model=4")
        for level in range(4)
    ],
)
def test_bytes_of_a_step_follow_the_formulas(mesh: str, level: int) -> None:
    run = run_of("--mesh", mesh, "--zero", str(level))
    with st.transfers() as log:
        run = run.step()
    host = sum(r.bytes for r in log if r.source == HOST)
    assert host == constants(run)
    assert log.bytes - host == expected_bytes(run) == simulated_bytes(run)


def test_data_parallelism_sends_one_message() -> None:
    run = run_of("--mesh", "data=8")
    mesh, count = run.trainer.mesh, sum(x.size for x in st.tree.leaves(run.params))
    with st.transfers() as log:
        run.step()
    # The gradients and the loss.
    one = st.device_put(np.ones((8, count + 1), "float32"), st.NamedSharding(mesh, st.P("data")))
    with st.transfers() as expected:
        one.sum(axis=0)
    assert sorted(r.bytes for r in log if r.source != HOST) == sorted(r.bytes for r in expected)


def peaks(run: Run) -> tuple[int, int]:
    """Returns the bytes that a device holds before a step, and the most that it holds in it."""
    device = run.trainer.mesh.devices.flat[-1]
    st.reset_peak_memory()
    held = st.memory_info(device).bytes_in_use
    run.step()
    return held, st.memory_info(device).peak_bytes_in_use or 0


@pytest.mark.full
def test_memory_at_zero_3_is_that_of_parts_of_the_parameters() -> None:
    n, size = 8, {"width": 96, "layers": 12, "context": 2}
    run = run_of("--mesh", f"data={n}", "--zero", "3", **size)
    count = sum(x.size for x in st.tree.leaves(run.params))
    held, peak = peaks(run)
    assert held == pytest.approx(HELD * count / n, rel=0.01)
    del run
    activations = peaks(run_of("--mesh", f"data={n}", "--zero", "3", batch=16, **size))[1] - peak  # of 8 examples
    assert peak - activations <= 1.15 * STEP * count / n


def test_the_loss_is_computed_in_another_dtype() -> None:
    layout = "--mesh", "data=8", "--zero", "3"
    wide, narrow = run_of(*layout), run_of(*layout, "--compute", "bfloat16")
    assert {x.dtype for x in st.tree.leaves(narrow.params)} == {np.dtype("float32")}
    losses = [float(run.trainer.evaluate(run.params, run.rows)) for run in (wide, narrow)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]
