"""What the README promises is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readmes_second_command() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    checks = "\nassert total.item() == 22.5 and scaled.shape == (2, 3, 8) and y.shape == (999, 7)\n"
    checks += "assert np.allclose(np.asarray(h), np.tanh(np.asarray(x) @ np.asarray(w)))\n"
    checks += "assert np.allclose(np.asarray(p), np.arange(1, 5) / 10)\n"
    out = subprocess.run([sys.executable, "-c", code + checks], capture_output=True, text=True, check=True).stdout
    assert "getitem" in out


def test_version_is_the_same_everywhere() -> None:
    import shardtensor

    assert f'version = "{shardtensor.__version__}"' in (ROOT / "pyproject.toml").read_text()
