"""The versions of Python in the project's files: the classifiers, the requirement, and ruff's target agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def test_classifiers_and_requires_python_agree() -> None:
    names = PROJECT["project"]["classifiers"]
    minors = [
        int(found[1]) for name in names if (found := re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", name))
    ]
    lowest = re.fullmatch(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert lowest is not None
    assert minors == list(range(int(lowest[1]), int(lowest[1]) + len(minors)))
    assert minors
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py3{lowest[1]}"
    assert names == sorted(
        names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )
