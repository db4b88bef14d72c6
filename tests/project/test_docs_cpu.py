"""The pages on the CPU, on explicit sharding and on programs: their blocks run, one after the other, and print the
output that they show.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["cpu", "explicit_sharding", "programs"])
def test_the_page_runs(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    wanted = re.findall(r"print\(.*# -> (.*)", code)
    assert len(wanted) >= 5
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert out.splitlines() == wanted
