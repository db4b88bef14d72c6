"""The notebooks compute the same on every backend: on separate memories and on GPUs as on a laptop."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import nbformat
import pytest

from shardtensor.backend import registry
from tests.conftest import NO_TORCH, SLOW
from tests.notebook_checks import CHECKS

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("backend", ["checked", *SLOW], indirect=True)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name in ("04_training", "06_gpt") else name for name in CHECKS],
)
def test_notebook_on(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "default_backend", lambda: registry.load(backend))
    space: dict[str, object] = {}
    checked = set()
    for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type != "code" or (NO_TORCH and "needs-torch" in cell.metadata.get("tags", ())):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell.source, f"{name}, {cell.id}", "exec"), space)
        if code := CHECKS[name].get(cell.id):
            exec(compile(code, f"the check after {name}, {cell.id}", "exec"), space | {"printed": printed.getvalue()})
            checked.add(cell.id)
    assert space["st"].devices()[0].backend == backend
    assert NO_TORCH or checked == set(CHECKS[name])


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_cells_show_results_and_assert_nothing(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if "assert " in cell.source or "os.environ" in cell.source] == []
