"""The pages in docs: their blocks run, one after the other, and print the output that is shown."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.forks import Ended, Program, run_each

DOCS = Path(__file__).parents[2] / "docs"

ELSEWHERE = {
    "adding_an_operator": "project/test_declarations.py",
    "from_cupy": "backends/test_gpu.py",
    "from_pmap_and_xmap": "project/test_docs_xmap.py",
    "gpus": "backends/test_gpu.py",
    "simulate": "communication/test_simulation.py",
    "writing_a_backend": "testing/test_kit.py",
    "writing_an_engine": "communication/test_engines.py",
}
"""Pages with a test of their own: their blocks are no program, or need another backend, or a comparison."""

PAGES = sorted(page.stem for page in DOCS.glob("*.md") if "\n```python" in page.read_text())


def program(page: str) -> tuple[str, str]:
    """The code of a page, and what it prints: the comments after ``# ->``, and the blocks of text after it."""
    code, printed = [], []
    for language, block in re.findall(r"^```(python|text)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            code.append(block)
            printed += [f"{line}\n" for line in re.findall(r"# -> (.*)", block)]
        else:
            printed.append(block)
    return "\n".join(code), "".join(printed)


HERE = [name for name in PAGES if name not in ELSEWHERE]


@functools.cache
def ended() -> dict[str, Ended]:
    """How the pages have ended, each of them on eight logical devices."""
    codes = [program((DOCS / f"{name}.md").read_text())[0] for name in HERE]
    devices = {"SHARDTENSOR_NUM_DEVICES": "8"}
    return dict(zip(HERE, run_each([Program(code, devices) for code in codes]), strict=True))


@pytest.mark.parametrize("name", HERE)
def test_the_page_runs(name: str) -> None:
    _, printed = program((DOCS / f"{name}.md").read_text())
    assert printed
    status, out, err = ended()[name]
    assert (status, out) == (0, printed), err


def test_every_other_page_has_a_test() -> None:
    assert set(ELSEWHERE) <= set(PAGES)
    for name, test in ELSEWHERE.items():
        assert f"{name}.md" in (DOCS.parent / "tests" / test).read_text()
