"""Batches of several processes: the same ones as in one process, of which each reads the rows of its own devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.communication.test_distributed import FULL, launch
from tests.draws import all_of_them

PROGRAM = str(Path(__file__).with_name("spanning_batches.py"))


@pytest.mark.parametrize(("engine", "processes", "count"), [
    ("mpi", 2, 2), *[pytest.param(*job, marks=FULL) for job in (("gloo", 2, 2), ("gloo", 1, 8), ("mpi", 2, 4), ("gloo", 4, 2), ("mpi", 3, 1))],
])  # fmt: skip
def test_the_same_batches_in_several_processes(
    engine: str, processes: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(count))
    status, text = launch(engine, processes, PROGRAM, "alike", str(tmp_path / "x.npy"), "1" if all_of_them else "4")
    assert (status, text.count("passed")) == (0, processes), text


@pytest.mark.full
@pytest.mark.parametrize("engine", ["gloo", "mpi"])
def test_an_error_of_a_source_in_one_process(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "2")
    _, text = launch(engine, 2, PROGRAM, "fails")
    assert text.count("passed") == 2, text
