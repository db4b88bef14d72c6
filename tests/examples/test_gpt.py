"""docs/examples/gpt.py: its losses are those of the same model in PyTorch, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.communication.test_distributed import launch

pytest.importorskip("torch")

from tests.examples.training import LAYOUTS, OPTIMIZERS, check, losses  # It imports PyTorch.

PROGRAM = str(Path(__file__).parent / "losses.py")
FAST = {("data-model", "sgd", "float32"), ("zero3", "adamw", "float64")}


@pytest.mark.parametrize(
    ("layout", "optimizer", "dtype"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.full)
        for layout in LAYOUTS
        for optimizer in OPTIMIZERS
        for dtype in ("float64", "float32")
        for case in [(layout, optimizer, dtype)]
    ],
)
def test_losses_are_those_of_pytorch(layout: str, optimizer: str, dtype: str) -> None:
    check(losses(optimizer, dtype, *LAYOUTS[layout]), optimizer, dtype)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["data", "zero2", "zero3", "data-model", "data-model-zero1"])
def test_losses_in_four_processes_are_those_of_pytorch(layout: str) -> None:
    status, text = launch("gloo", 4, PROGRAM, layout, limit=240)
    assert status == 0, text
