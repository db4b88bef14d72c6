"""The pictures of the README and of the pages are those that `docs/pictures/draw.py` draws."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from tests.scripts import output_of, run_script

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_pictures_are_drawn_by_the_code_beside_them() -> None:
    """In a process of its own, because the README's block sets the number of devices."""
    code = f"import json, runpy; made = runpy.run_path({str(PICTURES / 'draw.py')!r})['PICTURES']; "
    code += "print(json.dumps({name: draw() for name, draw in made.items()}))"
    drawn = json.loads(output_of(run_script(code)).splitlines()[-1])  # The block prints, too.
    assert drawn == {path.stem: path.read_text() for path in PICTURES.glob("*.svg")}


def test_the_packages_are_those_of_the_architecture() -> None:
    names = ", ".join(name for name, *_ in runpy.run_path(str(PICTURES / "draw.py"))["LAYERS"]).split(", ")
    package = PICTURES.parents[1] / "shardtensor"
    folders = {path.parent.name for path in package.glob("*/__init__.py") if len([*path.parent.rglob("*.py")]) > 1}
    folders -= {"lib", "testing"}
    assert set(names) == folders | {"shardtensor", "core", "errors"}
