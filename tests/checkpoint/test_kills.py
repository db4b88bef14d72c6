"""Programs that are killed at any moment leave the last complete checkpoint, and the next one removes the rest."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

import shardtensor as st
from tests.checkpoint import kills
from tests.checkpoint.disks import is_leftover
from tests.checkpoint.kills import KINDS
from tests.checkpoint.trees import bits
from tests.communication.test_distributed import launch
from tests.draws import drawn
from tests.scripts import run_script

PROGRAM = str(Path(kills.__file__))


def check(folder: Path, kind: str) -> None:
    """Checks what a killed program has left, and saves the next checkpoint."""
    with open(folder / "log", encoding="ascii") as log:
        logged = max([int(line) for line in log.read().splitlines()], default=0)
    step, restored = kills.latest(str(folder))
    assert logged <= step <= logged + 2  # The last ones may be complete before the program logs it.
    if step:
        assert bits(restored) == bits(kills.tree(step))
    for name in [name for name in os.listdir(folder) if not is_leftover(name) and name != "log"]:
        st.checkpoint.verify(folder / name)
    before = {name for name in os.listdir(folder) if not is_leftover(name)}
    for at in {step, step + 1} if kind in ("save", "background") else {step + 1}:  # The path that was not complete.
        if at > step or not (folder / f"{at:08d}").exists():
            manager = st.checkpoint.Manager(folder, keep=1) if kind == "manager" else None
            kills.save(str(folder), kind, at, manager)
            st.checkpoint.wait()
    names = set(os.listdir(folder))
    assert not any(map(is_leftover, names)), names
    if kind == "manager":
        assert names == {"log", f"{step + 1:08d}"}
    elif kind != "overwrite":
        assert names == before | {f"{step + 1:08d}"}
    assert kills.latest(str(folder))[0] == step + 1
    with open(folder / "log", "a", encoding="ascii") as log:
        log.write(f"{step + 1}\n")


LONGEST = {"save": 120, "background": 120, "overwrite": 180, "manager": 150}
"""The operations of the file system of two saves."""

SCRIPT = "import sys; from tests.checkpoint import kills; kills.run(*sys.argv[1:])"


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_is_killed(kind: str, tmp_path: Path) -> None:
    """The folder is the same for all kills: each goes on where the last one was killed."""
    draw = random.Random(kind)
    for number in range(drawn(40, fast=2)):
        when = f"{draw.uniform(0, 30):.2f}ms" if number % 2 else str(draw.randrange(LONGEST[kind]))
        ended = run_script(SCRIPT, str(tmp_path), kind, when)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        check(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "processes", "kind", "process"),
    [
        ("mpi", 2, "background", "1"),
        ("gloo", 2, "manager", "0"),
        *[
            pytest.param(engine, count, kind, process, marks=pytest.mark.full)
            for engine, count in (("mpi", 2), ("gloo", 2), ("mpi", 4))
            for kind in KINDS
            for process in ("0", "1", "all")
        ],
    ],
)
def test_a_job_of_which_processes_are_killed(
    engine: str, processes: int, kind: str, process: str, tmp_path: Path
) -> None:
    draw = random.Random(f"{processes} {kind} {process}")
    for number in range(drawn(2, fast=1)):
        when = f"{draw.uniform(0, 50):.2f}ms" if number % 2 else str(draw.randrange(50))
        status, text = launch(engine, processes, PROGRAM, str(tmp_path), kind, when, process)
        assert status == 128 + signal.SIGKILL or (status and "SIGKILL" in text), (
            text
        )  # The first that the launcher sees.
        check(tmp_path, kind)
