"""What the README promises is what runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readmes_second_command() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

LAPTOP = "import os, sys; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]); exec(sys.stdin.read(), {})"
"""A program that is given on its standard input, on two cores."""


def pasted(code: str) -> str:
    """What code prints in a fresh process on two cores, without a variable that chooses devices."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SHARDTENSOR")}
    done = subprocess.run(
        [sys.executable, "-c", LAPTOP], input=code, capture_output=True, text=True, env=env, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[0])
def test_each_block_runs_as_pasted(code: str) -> None:
    pasted(code)


def test_the_first_block_computes_what_its_comments_say() -> None:
    code = BLOCKS[0]
    checks = "\nassert total.item() == 22.5 and scaled.shape == (2, 3, 8) and y.shape == (999, 7)\n"
    checks += "assert np.allclose(np.asarray(h), np.tanh(np.asarray(x) @ np.asarray(w)))\n"
    checks += "assert np.allclose(np.asarray(p), np.arange(1, 5) / 10)\n"
    assert "getitem" in pasted(code + checks)


def test_version_is_the_same_everywhere() -> None:
    import shardtensor

    assert f'version = "{shardtensor.__version__}"' in (ROOT / "pyproject.toml").read_text()
