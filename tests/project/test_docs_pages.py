"""The pages in docs: their blocks run, one after the other, and print the output that is shown."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.scripts import LAPTOP, ROOT, WITHOUT_PLUGINS, new_process, output_of, run_script

DOCS = ROOT / "docs"

ELSEWHERE = {
    "adding_an_operator": "project/test_declarations.py",
    "from_cupy": "backends/test_gpu.py",
    "from_pmap_and_xmap": "project/test_docs_xmap.py",
    "gpus": "backends/test_gpu.py",
    "pytorch": "backends/test_torch_gradients.py",
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
    """On two cores, without a variable that chooses devices."""
    code, printed = program((DOCS / f"{name}.md").read_text())
    assert printed
    assert output_of(run_script(LAPTOP + code, seconds=300)) == printed


def test_the_code_of_the_tables_for_readers_of_nx_runs() -> None:
    """Each row of its last two tables of functions, with tensors of the size that the page says."""
    page = (DOCS / "from_nx.md").read_text().partition("## Compiled functions")[2].partition("## What else")[0]
    rows = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| `")]
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    for code in codes:
        x = st.asarray(np.eye(4) + np.arange(16.0).reshape(4, 4))
        known: dict[str, Any] = {"st": st, "np": np, "pickle": pickle, "x": x, "y": x + 1, "v": 2.0, "indices": [0, 1]}
        known |= {"f": lambda x: 2 * x, "batch": np.ones((8, 2)), "key": st.random.key(0), "b": bytes(8)}
        known["path"] = io.BytesIO()
        if code == "st.load(path)":
            st.save(known["path"], x)
            known["path"].seek(0)
        if code not in ("//", "%"):
            exec(code, known)
    assert len(codes) > 80


def test_every_other_page_has_a_test() -> None:
    assert set(ELSEWHERE) <= set(PAGES)
    for name, test in ELSEWHERE.items():
        assert f"{name}.md" in (DOCS.parent / "tests" / test).read_text()


def test_the_navigation_has_four_groups() -> None:
    captions = re.findall(r"^:caption: (.*)$", (DOCS / "contents.txt").read_text(), re.MULTILINE)
    assert captions == ["Tutorials", "How-to guides", "Reference", "Explanation"]
    readme = (ROOT / "README.md").read_text().partition("\n## Documentation\n")[2]
    assert re.findall(r"^\* \*\*(.*?):\*\*", readme, re.MULTILINE) == captions


FAILS = """
import numpy as np
import shardtensor as st


def inverse(part):
    if (part == 0).any():
        raise ZeroDivisionError("a row has a zero")
    return 1 / part


def test_inverse():
    st.pmap(inverse, st.shard(np.arange(3.0) - 1))


if __name__ == "__main__":
    test_inverse()
"""
"""A program, and a test, whose mapped function raises an error; `docs/debugging.md` says where debuggers stop."""


def test_debuggers_open_in_the_mapped_function_that_raised(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(FAILS)
    for command, typed in (
        (["pytest", "--pdb", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)], "p part.tolist()\nq\n"),
        (["pdb"], "c\np part.tolist()\nq\nq\n"),
    ):
        shown = new_process(
            "-m", *command, str(file), stdin=typed, SHARDTENSOR_NUM_DEVICES="3", **WITHOUT_PLUGINS
        ).stdout
        assert f"{file.name}(8)inverse()" in shown, shown
        assert "(Pdb) [0.0]" in shown, shown


REFUSED = """
import shardtensor as st


def product(x, factor):
    return x @ factor


product(st.ones((4, 2)), st.ones((3, 2)))
"""
"""A program of which an operator raises an error; `docs/debugging.md` says how to get from there to its frames."""


def test_the_note_of_a_traceback_says_how_far_up_the_frame_of_the_program_is(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(REFUSED)
    (hidden,) = re.findall(r"\[(\d+) frames of shardtensor are hidden", new_process(str(file)).stderr)
    shown = new_process("-m", "pdb", str(file), stdin=f"c\nu {hidden}\np factor.shape\nq\nq\n").stdout
    assert f"> {file}(6)product()" in shown, shown
    assert "(Pdb) (3, 2)" in shown, shown
