"""The statements and the code of the README are true."""

from __future__ import annotations

import re

from tests.scripts import LAPTOP, ROOT, output_of, run_script

README = (ROOT / "README.md").read_text()

BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import cupy" not in block]
"""The blocks for machines without a GPU; `tests/backends/test_gpu.py` runs the one for GPUs."""

CHECKS = """
assert y.sharding.spec == st.P('data', 'model')
assert [len(s) for s in shards] == [2, 2, 1, 1, 1, 1, 1, 1]
assert np.allclose(np.asarray(h), np.tanh(np.asarray(x) @ np.asarray(w)))
"""


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


def test_each_block_runs_as_pasted_and_prints_its_comments() -> None:
    """On two cores, without a variable that chooses devices; and the first block computes what it says."""
    for code, checks in zip(BLOCKS, (CHECKS, ""), strict=True):
        out = output_of(run_script(LAPTOP + code + checks))
        assert out.splitlines() == re.findall(r"# -> (.*)", code)


def test_version_is_the_same_everywhere() -> None:
    import shardtensor

    assert f'version = "{shardtensor.__version__}"' in (ROOT / "pyproject.toml").read_text()
