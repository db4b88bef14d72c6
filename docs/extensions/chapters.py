"""The chapters of the API reference: which public names the pages of `docs/reference` show.

A page lists modules in a directive, ``.. public:: module …``, and shows each name of ``shardtensor.__all__`` that is
defined in them, so that a new public name of these modules appears by itself. This module does not import Sphinx,
because the tests use it without.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

import shardtensor as st
from shardtensor.backend.small_floats import SMALL_FLOATS

NUMPYS = {name for name in st.__all__ if hasattr(np, name) and getattr(np, name) is getattr(st, name)} | {*SMALL_FLOATS}
"""The public names of NumPy's and ml_dtypes' own objects, which have no entries: data types and constants."""

REFERENCE = Path(__file__).parents[1] / "reference"
DIRECTIVE = re.compile(r"^\.\. public:: (.*)$", re.MULTILINE)


def names_in(argument: str) -> list[str]:
    """The public names of an argument of the directive: a module, a package with all its modules, or one name."""
    module, _, name = argument.rpartition(".")
    if name in st.__all__ and getattr(importlib.import_module(module), name, None) is getattr(st, name):
        return [name]
    importlib.import_module(argument)
    return [
        name for name in st.__all__ if f"{getattr(getattr(st, name), '__module__', '')}.".startswith(f"{argument}.")
    ]


def pages_of_names() -> dict[str, list[str]]:
    """For each public name that is not NumPy's, the pages that show it, once for each time that they do."""
    pages = defaultdict(list)
    for page in sorted(REFERENCE.glob("*.md")):
        for argument in " ".join(DIRECTIVE.findall(page.read_text())).split():
            for name in names_in(argument):
                pages[name].append(page.stem)
    return {name: pages[name] for name in st.__all__ if name not in NUMPYS}
