"""The page on the CPU: its blocks run, one after the other, and print what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parent.parent / "docs" / "cpu.md").read_text()


def test_the_page_runs() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    said = re.findall(r"print\(.*# -> (.*)", code)
    assert len(said) >= 6
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert out.splitlines() == said
