"""Checkpoints that several processes save, restored on other numbers of processes and devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardtensor as st
from tests.communication.test_distributed import FULL, launch
from tests.draws import all_of_them
from tests.scripts import new_process

PROGRAM = str(Path(__file__).parent / "spanning_checkpoints.py")


@pytest.mark.parametrize(("engine", "processes", "count"), [
    ("mpi", 2, 3), *[pytest.param(*job, marks=FULL) for job in (("gloo", 4, 2), ("mpi", 4, 2), ("gloo", 3, 1))],
])  # fmt: skip
def test_other_processes_and_devices_restore_what_was_saved(
    engine: str, processes: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(count))
    status, text = launch(engine, processes, PROGRAM, "save", str(tmp_path))
    assert (status, text.count("passed")) == (0, processes), text
    for number in (0, 1, 2):
        st.checkpoint.verify(tmp_path / str(number))
    for devices in (1, 2, 3, 8) if all_of_them else (4,):
        done = new_process(PROGRAM, "restore", str(tmp_path), str(devices))
        assert done.stdout == "passed\n", done.stderr
    for jobs, each in ((2, 3), (4, 1), (3, 2)) if all_of_them else ():
        monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", str(each))
        status, text = launch(engine, jobs, PROGRAM, "restore", str(tmp_path))
        assert (status, text.count("passed")) == (0, jobs), text


@pytest.mark.parametrize(("engine", "how"), [
    ("mpi", "shutdown"), *[pytest.param("gloo", how, marks=FULL) for how in ("shutdown", "exit")],
])  # fmt: skip
def test_a_save_in_the_background_is_completed_before_the_job_ends(
    engine: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_DEVICES", "2")
    status, text = launch(engine, 2, str(Path(__file__).with_name("jobs.py")), "ends", str(tmp_path), how)
    assert (status, text) == (0, ""), text
    st.checkpoint.verify(tmp_path / "last")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
