"""docs/examples/gpt.py is killed, and computes the same bits when it is started again."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

import shardtensor as st
from tests.checkpoint.trees import bits
from tests.communication.test_distributed import launch
from tests.examples import interrupted
from tests.scripts import output_of, run_script

PROGRAM = str(Path(interrupted.__file__))
SIZES = ("--width", "16", "--layers", "1", "--heads", "4", "--context", "12", "--batch", "6", "--sample", "0")


def check_same(folder: Path, step: int) -> None:
    """Compares parameters, state and batches of the run that was resumed with those of the one that was not killed."""
    through, resumed = (st.checkpoint.restore(folder / name / f"{step:08d}") for name in ("through", "killed"))
    assert through["step"] == step
    assert bits(through) == bits(resumed)


def test_a_program_that_is_killed_and_started_again_has_the_same_bits(tmp_path: Path) -> None:
    script = "import sys; from tests.examples import interrupted; interrupted.run(int(sys.argv[1]), *sys.argv[2:])"
    arguments = (*SIZES, "--mesh", "data=8", "--zero", "3", "--steps", "12", "--every", "4", "--evaluate", "12")
    killed, through = str(tmp_path / "killed"), str(tmp_path / "through")
    output_of(run_script(script, "0", *arguments, "--folder", through))
    assert run_script(script, "7", *arguments, "--folder", killed).returncode == -signal.SIGKILL
    assert "goes on after step 4\n" in output_of(run_script(script, "0", *arguments, "--folder", killed))
    check_same(tmp_path, 12)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        ("data=8",),
        ("data=2,model=4",),
        ("data=8", "--zero", "2"),
        ("data=8", "--zero", "3"),
        ("data=2,model=4", "--zero", "1"),
    ],
)
def test_a_job_that_is_killed_and_goes_on_in_other_processes_has_the_same_bits(
    layout: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = (*SIZES, "--steps", "100", "--every", "20", "--evaluate", "100", "--mesh", *layout)

    def job(processes: int, killed_at: int, name: str) -> tuple[int, str]:
        more = ("--processes", str(processes), "--folder", str(tmp_path / name))
        return launch("gloo", processes, PROGRAM, str(killed_at), *arguments, *more, limit=240)

    assert job(4, 0, "through")[0] == 0
    status, text = job(4, 50, "stopped")
    assert status == 128 + signal.SIGKILL or "SIGKILL" in text, text
    for processes in (1, 2):
        shutil.copytree(tmp_path / "stopped", tmp_path / "killed", dirs_exist_ok=True)
        status, text = job(processes, 0, "killed")
        assert status == 0, text
        assert "goes on after step 40" in text
        check_same(tmp_path, 100)
        shutil.rmtree(tmp_path / "killed")
