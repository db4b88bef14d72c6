"""Every notebook runs from top to bottom, with the output that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def shown(cell: Any) -> str:
    """A cell's output as text, without colours."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", [])]
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(texts)).strip()


@pytest.mark.filterwarnings("ignore")  # of the kernel's own machinery
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    before = [shown(cell) for cell in book.cells]
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    assert [shown(cell) for cell in book.cells] == before


def test_notebooks_exist() -> None:
    assert [p.stem for p in NOTEBOOKS] == [
        "01_sharding", "02_writing", "03_parallel_tutorial", "04_training", "05_patterns",
    ]  # fmt: skip
