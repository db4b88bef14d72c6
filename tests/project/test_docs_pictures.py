"""The pictures of the README and of the pages are those that `docs/pictures/draw.py` draws."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.mark.parametrize("name", [path.stem for path in sorted(PICTURES.glob("*.svg"))])
def test_the_picture_is_drawn_by_the_code_beside_it(name: str) -> None:
    drawn = runpy.run_path(str(PICTURES / "draw.py"))["PICTURES"][name]()
    assert drawn == (PICTURES / f"{name}.svg").read_text()


def test_the_packages_are_those_of_the_architecture() -> None:
    names = ", ".join(name for name, *_ in runpy.run_path(str(PICTURES / "draw.py"))["LAYERS"]).split(", ")
    package = PICTURES.parents[1] / "shardtensor"
    folders = {path.parent.name for path in package.glob("*/__init__.py")} - {"testing"}
    assert set(names) == folders | {"shardtensor", "core", "errors"}
