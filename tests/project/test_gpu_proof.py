"""The program that runs everything on a GPU: its steps exist, and none stops the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import gpu_proof
from tests.gpu_proof import ROOT, Step


def test_files_of_the_steps_exist(tmp_path: Path) -> None:
    named = [
        part for step in gpu_proof.steps(tmp_path) for part in step.arguments if part.startswith(("tests/", "bench"))
    ]
    assert len(named) == 4
    assert all((ROOT / part).exists() for part in named)


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_proof, "SECONDS_TO_END", 0.2)
    hangs = "import os, subprocess, sys, time, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + (
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid); time.sleep(600)"
    )
    todo = [
        Step("fails", ["-c", "raise SystemExit(3)"], 1),
        Step("hangs", ["-c", hangs], 3 / 60),
        Step("reads", ["-c", "import os; print(os.environ['GIVEN'])"], 1, (("GIVEN", "seven"),)),
    ]
    assert not gpu_proof.prove(todo, tmp_path, 5)
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split(" s  ")[1] for line in lines] == ["exit status 3", "took too long", "succeeded"]
    assert capsys.readouterr().out.splitlines() == lines
    assert (tmp_path / "reads.log").read_text() == "seven\n"
    child = int((tmp_path / "hangs.log").read_text())
    assert wait_for_end(child)


def wait_for_end(pid: int) -> bool:
    """Whether a process ends within some seconds. A parent that does not wait for it keeps it as a zombie."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_steps_without_time_left_are_named(tmp_path: Path) -> None:
    assert not gpu_proof.prove([Step("late", ["-c", "pass"], 1)], tmp_path, 0)
    assert (tmp_path / "summary.txt").read_text().endswith("not run: no time was left\n")


def test_only_known_steps_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_proof.main(["--only", "tests,nothing", "--out", str(tmp_path)])
    assert "there is no step ['nothing']" in capsys.readouterr().err
