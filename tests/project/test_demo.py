"""The demo reaches its accuracy and passes its checks on every host backend, and reports a failed check."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

import shardtensor as st
from shardtensor import cli, demo
from shardtensor.demo import DemoResult
from tests.conftest import NO_GPU, NO_TORCH
from tests.layouts import everywhere
from tests.scripts import Ended, new_process

needs_torch = pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH)


def run(steps: int, **options) -> tuple[DemoResult, list[str]]:
    """The demo's result, and the lines that it printed."""
    out = io.StringIO()
    result = demo.main(steps=steps, console=Console(file=out, width=100), **options)
    return result, out.getvalue().splitlines()


def command(variables: dict[str, str], *options: str) -> Ended:
    """``python -m shardtensor demo`` in a new process, whose output is neither a terminal nor UTF-8.

    On a machine that is busy with other tests, BLAS's threads cost a hundred times what they save.
    """
    calm = {"PYTHONIOENCODING": "ascii", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return new_process("-m", "shardtensor", "demo", *options, **calm | variables)


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({}, "numpy:0..7" if NO_GPU else "cupy:0..7"),
        ({"SHARDTENSOR_BACKEND": "checked", "SHARDTENSOR_NUM_DEVICES": "3"}, "checked:0..2"),
        pytest.param({"SHARDTENSOR_NUM_DEVICES": "3"}, "numpy:0..2", marks=pytest.mark.full),
        pytest.param({"SHARDTENSOR_BACKEND": "checked"}, "checked:0..7", marks=pytest.mark.full),
        pytest.param({"SHARDTENSOR_BACKEND": "torch"}, "torch:0..7", marks=[pytest.mark.full, needs_torch]),
    ],
)
def test_the_demo_passes_its_checks(variables, devices):
    finished = command(variables)
    assert finished.returncode == 0, finished.stderr
    assert devices in finished.stdout
    last = finished.stdout.splitlines()[-1]
    assert last.startswith("PASSED")
    assert float(re.search(r"([\d.]+)% of 350 held-out digits", last)[1]) >= 95


@everywhere
@pytest.mark.parametrize("devices", [1, 3])
def test_any_number_of_devices_works(backend, devices):
    result, lines = run(2, backend=backend, devices=devices)
    assert result.failed == []
    assert result.passed
    assert lines[-1] == str(result)
    assert sum(f"Mesh(d={devices}; " in line for line in lines) == 1


def test_one_bar_shows_the_progress_of_both_trainings():
    """It has no times: those of a network as small as this one would look like a comparison of speed."""
    _, lines = run(3, devices=2)
    bars = [line for line in lines if "━━" in line]
    assert [bar.split() for bar in bars] == [["training", "and", "check", "━" * 40, "100%"]]


def test_two_runs_are_equal():
    assert run(2)[0] == run(2)[0]


def test_a_wrong_gradient_fails_the_checks_of_the_training_and_the_exit_status(monkeypatch, capsys):
    right = demo.cross_entropy

    def without_a_row(rows, targets, weights):
        return right(rows[1:], targets[1:], weights)

    monkeypatch.setattr(demo, "cross_entropy", without_a_row)
    assert cli.main(["demo", "--steps", "3"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: training losses, trained weights (against plain NumPy);")


def test_a_wrong_product_fails_the_checks_of_the_projection(monkeypatch):
    monkeypatch.setattr(st, "mean", lambda x, **params: st.sum(x, **params) * (1 / x.shape[0] + 1e-4))
    result, lines = run(1)
    assert "projected rows" in result.failed
    assert lines[-1].startswith("FAILED")


def test_the_gradients_of_the_check_are_the_derivatives_of_the_loss():
    train, _ = demo.split_digits()
    rows, targets, weights = train.rows[:20], train.targets[:20], demo.initial_weights()
    _, *found = demo.gradients(rows, targets, weights)
    random = np.random.default_rng(1)
    directions = [random.normal(size=weight.shape) for weight in weights]

    def loss(step: float) -> float:
        moved = [weight + step * direction for weight, direction in zip(weights, directions, strict=True)]
        return demo.gradients(rows, targets, moved)[0]

    slope = sum(np.sum(gradient * direction) for gradient, direction in zip(found, directions, strict=True))
    assert (loss(1e-5) - loss(-1e-5)) / 2e-5 == pytest.approx(slope, rel=1e-6)


def test_the_digits_are_complete():
    digits = demo.load_digits()
    assert digits.rows.shape == (1797, 64)
    assert digits.images.shape == (1797, 8, 8)
    assert np.unique(digits.rows * 16).tolist() == list(range(17))
    assert np.bincount(digits.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.array_equal(digits.targets.argmax(1), digits.labels)


def test_training_and_held_out_digits_are_disjoint():
    train, test = demo.split_digits()
    assert len(train.rows) + len(test.rows) == 1797
    assert not {row.tobytes() for row in train.rows} & {row.tobytes() for row in test.rows}


@pytest.mark.parametrize(
    ("option", "value"), [("devices", 0), ("steps", 0), ("devices", 10_000), ("backend", "nonsense")]
)
def test_invalid_arguments_raise(option, value):
    with pytest.raises(st.ArgumentError):
        demo.main(**{option: value})
