"""The API reference has one entry for each public name; `docs/conf.py` builds it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import shardtensor as st

SPEC = importlib.util.spec_from_file_location(
    "chapters", Path(__file__).parents[2] / "docs" / "extensions" / "chapters.py"
)
assert SPEC is not None
assert SPEC.loader is not None
CHAPTERS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CHAPTERS)


def test_every_public_name_is_on_one_page() -> None:
    found = CHAPTERS.pages_of_names()
    assert {name: pages for name, pages in found.items() if len(pages) != 1} == {}, "see docs/reference"
    assert sorted(found) == sorted(set(st.__all__) - CHAPTERS.NUMPYS)
    assert {"float32", "bool", "pi", "newaxis"} < CHAPTERS.NUMPYS


def test_every_module_on_a_page_has_a_public_name() -> None:
    arguments = [
        argument
        for page in CHAPTERS.REFERENCE.glob("*.md")
        for argument in " ".join(CHAPTERS.DIRECTIVE.findall(page.read_text())).split()
    ]
    assert len(arguments) > 20
    assert [argument for argument in arguments if not CHAPTERS.names_in(argument)] == []
