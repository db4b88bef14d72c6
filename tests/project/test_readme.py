"""The statements and the code of the README are true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import cupy" not in block]
"""The blocks for machines without a GPU; `tests/backends/test_gpu.py` runs the one for GPUs."""

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


def test_ci_runs_the_readmes_second_command() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_ci_builds_the_site_by_the_readmes_command() -> None:
    (command,) = re.findall(r"`pip install -e '\.\[docs\]' && (sphinx-build .*?)`", README)
    assert command in (ROOT / ".ci" / "run").read_text()


def test_there_is_a_block_for_each_world() -> None:
    assert len(BLOCKS) == 2
    assert README.count("```python\n") == 3


@pytest.mark.parametrize("code", BLOCKS, ids=["logical devices", "simulated mesh"])
def test_each_block_runs_as_pasted_and_prints_its_comments(code: str) -> None:
    assert pasted(code).splitlines() == re.findall(r"# -> (.*)", code)


def test_the_first_block_computes_what_it_says() -> None:
    checks = "\nassert y.sharding.spec == st.P('data', 'model')\n"
    checks += "assert [len(s) for s in shards] == [2, 2, 1, 1, 1, 1, 1, 1]\n"
    checks += "assert np.allclose(np.asarray(h), np.tanh(np.asarray(x) @ np.asarray(w)))\n"
    pasted(BLOCKS[0] + checks)


def test_version_is_the_same_everywhere() -> None:
    import shardtensor

    assert f'version = "{shardtensor.__version__}"' in (ROOT / "pyproject.toml").read_text()
