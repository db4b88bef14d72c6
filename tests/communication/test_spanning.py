"""Meshes and tensors that span processes: programs that run in several processes, and their results' bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import CASES
from tests.communication.test_distributed import FULL, launch
from tests.conftest import NO_GPU, NO_TORCH

HERE = Path(__file__).parent
CHECKS, OPERATORS = str(HERE / "spanning.py"), str(HERE / "spanning_operators.py")

SLICE = ["add", "argmax", "cumulative_sum", "getitem", "matmul", "reshape", "reshard", "sort", "sum", "take", "where"]
"""Operators of every kind: elementwise, reductions, products, movements, algorithms."""

JOBS = [
    pytest.param("mpi", 2, 4),
    pytest.param("mpi", 3, 1, marks=FULL),
    pytest.param("gloo", 2, 2, marks=FULL),
    pytest.param("gloo", 4, 1, marks=FULL),
]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """The number of devices of each process."""
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(count))
    return count


@pytest.mark.parametrize(("engine", "processes", "count"), JOBS)
def test_tensors_span_processes(engine: str, processes: int, devices: int) -> None:
    status, text = launch(engine, processes, CHECKS, limit=120)
    assert status == 0, text
    assert text.count("passed") == processes * text.count("[0] passed")


@pytest.mark.full
@pytest.mark.parametrize("count", [2])
@pytest.mark.parametrize("backend", ["checked", "cupy", "torch"])
def test_tensors_of_separate_memories_span_processes(
    backend: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torch" and NO_TORCH:
        pytest.skip(NO_TORCH)
    monkeypatch.setenv("SHARDTENSOR_BACKEND", backend)
    if backend == "cupy" and NO_GPU:
        monkeypatch.setenv("CUPY_DOUBLE", "1")
    status, text = launch("mpi", 2, CHECKS, limit=120)
    assert status == 0, text


def lines_of(path: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in path.read_text().splitlines())


def alone(path: Path, examples: int, names: list[str], devices: int, backend: str) -> dict[str, str]:
    """What the program writes if one process has all devices, in memories of their own."""
    environ = {**os.environ, "SHARDTENSOR_ALONE": "1", "SHARDTENSOR_NUM_DEVICES": str(devices)}
    environ |= {"SHARDTENSOR_BACKEND": backend, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, OPERATORS, str(path), str(examples), *names], env=environ, check=True)
    return lines_of(path)


@pytest.mark.parametrize(
    ("processes", "count", "examples", "names"),
    [
        pytest.param(2, 4, 2, SLICE, id="slice"),
        pytest.param(2, 4, 10, sorted(CASES), id="all-2x4", marks=FULL),
        pytest.param(3, 1, 10, sorted(CASES), id="all-3x1", marks=FULL),
    ],
)
def test_operators_have_the_bits_of_one_process(
    processes: int, devices: int, examples: int, names: list[str], tmp_path: Path
) -> None:
    spanning = tmp_path / "spanning.txt"
    status, text = launch("mpi", processes, OPERATORS, str(spanning), str(examples), *names, limit=900)
    assert status == 0, text
    found = lines_of(spanning)
    errors = [f"{name}: {line}" for name, line in found.items() if len(line) != 16]
    assert not errors
    assert found == alone(tmp_path / "alone.txt", examples, names, processes * devices, "checked")
