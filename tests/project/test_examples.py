"""The assertions of the notebooks hold on every backend: on separate memories and on GPUs as on a laptop."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from shardtensor.backend import registry
from tests.conftest import SLOW

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("backend", ["checked", *SLOW], indirect=True)
@pytest.mark.parametrize("name", ["03_parallel_tutorial", "04_training", "05_patterns"])
def test_notebook_on(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "default_backend", lambda: registry.load(backend))
    space: dict[str, object] = {}
    for number, cell in enumerate(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{name}, cell {number}", "exec"), space)
    assert space["st"].devices()[0].backend == backend
