"""Files that the processes of a job write and read together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.communication.test_distributed import FULL, launch

PROGRAM = str(Path(__file__).with_name("joint_files.py"))


@pytest.mark.parametrize(
    ("engine", "processes", "count"),
    [("mpi", 2, 2), pytest.param("gloo", 2, 2, marks=FULL), pytest.param("mpi", 4, 1, marks=FULL)],
)
def test_processes_write_files_together(
    engine: str, processes: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(count))
    status, text = launch(engine, processes, PROGRAM, str(tmp_path), limit=60)
    assert status == 0, text
    assert text.count("passed") == processes * text.count("[0] passed")


@pytest.mark.full
def test_a_killed_process_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "2")
    status, text = launch("gloo", 2, PROGRAM, str(tmp_path), "a_killed_process_leaves_the_old_file", limit=60)
    assert status, text
    assert "[0] passed" in text
