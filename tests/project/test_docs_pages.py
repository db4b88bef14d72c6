"""The pages in docs: their blocks run, one after the other, and print the output that is shown."""

from __future__ import annotations

import re

import pytest

from tests.scripts import ROOT, output_of, run_script

DOCS = ROOT / "docs"

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


@pytest.mark.parametrize("name", [name for name in PAGES if name not in ELSEWHERE])
def test_the_page_runs(name: str) -> None:
    code, printed = program((DOCS / f"{name}.md").read_text())
    assert printed
    assert output_of(run_script(code, seconds=300, SHARDTENSOR_NUM_DEVICES="8")) == printed


def test_every_other_page_has_a_test() -> None:
    assert set(ELSEWHERE) <= set(PAGES)
    for name, test in ELSEWHERE.items():
        assert f"{name}.md" in (DOCS.parent / "tests" / test).read_text()
