"""The selection of tests: the slices together are all tests marked `full`, and one line counts those not run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import slice_of, sliced

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_fast(n):
    if n == 2:
        pytest.skip("out of luck: today")

@pytest.mark.full
@pytest.mark.parametrize("n", range(5))
def test_full(n): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.skip(reason="out of luck: always")
def test_dropped(): ...
"""

FAST, FULL, SLOW = [f"test_fast[{n}]" for n in range(2)], [f"test_full[{n}]" for n in range(5)], ["test_slow"]


@pytest.mark.parametrize(
    ("options", "passed", "said"),
    [
        (["-n2"], FAST + SLOW, "5 marked full; 2 out of luck"),
        (["--full"], FAST + FULL + SLOW, "2 out of luck"),
        (["--quick"], FAST[:1], "5 marked full; 3 not quick; 1 out of luck"),
        (["--full", "--slice=2/3"], FULL[1::3], "5 not marked full; 3 in other slices"),
    ],
    ids=["workers", "full", "quick", "slice"],
)
def test_options(options: list[str], passed: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n    slow\n")
    plugin = ["-p", "tests.selection", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-q", "-rp", *options, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(re.findall(r"^PASSED .*::(.*)", done.stdout, re.MULTILINE)) == passed
    assert f"\nnot run: {said}\n" in done.stdout


def test_slices_together_are_all() -> None:
    tests = list(range(5171))
    parts = [sliced(tests, *slice_of(f"{k}/37")) for k in range(1, 38)]
    assert sorted(n for part in parts for n in part) == tests
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/2/3", "a/b", ""])
def test_what_is_no_slice(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        slice_of(text)
