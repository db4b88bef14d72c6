"""Every notebook runs from top to bottom, with the output that it shows."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import NO_TORCH

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def shown(cell: Any) -> str:
    """A cell's output as text, without colours."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", [])]
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(texts)).strip()


RESET = nbformat.v4.new_code_cell("%reset -f")
"""A cell that removes the names of the notebook before."""


@pytest.mark.filterwarnings("ignore")  # of the kernel's own machinery
def test_notebooks() -> None:
    """They run in one kernel, because its start takes as long as a notebook."""
    books = {path.stem: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
    for book in books.values():
        if NO_TORCH:
            book.cells = [cell for cell in book.cells if "needs-torch" not in cell.metadata.get("tags", ())]
    before = {name: [shown(cell) for cell in book.cells] for name, book in books.items()}
    every = nbformat.v4.new_notebook()
    every.cells = [cell for book in books.values() for cell in [copy.deepcopy(RESET), *book.cells]]
    NotebookClient(every, timeout=120, kernel_name="python3").execute()
    for name, book in books.items():
        assert [shown(cell) for cell in book.cells] == before[name], name


def test_notebooks_exist() -> None:
    assert [p.stem for p in NOTEBOOKS] == [
        "01_sharding", "02_writing", "03_parallel_tutorial", "04_training", "05_patterns", "06_gpt",
    ]  # fmt: skip
