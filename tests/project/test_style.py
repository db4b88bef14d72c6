"""The style, as a test, so that the second command of the README runs all required checks; `test_types` runs mypy."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtensor as st
from tests.scripts import new_process, output_of


@pytest.mark.parametrize("tool", [["ruff", "check"], ["ruff", "format", "--check"]], ids=["ruff", "format"])
def test_tool_reports_nothing(tool: list[str]) -> None:
    output_of(new_process("-m", *tool))


THINGS = frozenset(
    [
        "GPUs",
        "arguments",
        "arrays",
        "axes",
        "blocks",
        "buffers",
        "bytes",
        "calls",
        "columns",
        "cores",
        "devices",
        "dimensions",
        "elements",
        "entries",
        "files",
        "hosts",
        "indices",
        "kernels",
        "launches",
        "messages",
        "operands",
        "parts",
        "processes",
        "programs",
        "rows",
        "shards",
        "slices",
        "steps",
        "threads",
        "transfers",
    ]
)

SEVERAL = {
    # expression: why there are several, wherever it is followed by the plural
    "share": "only several are named",
    "counts": "a text that names several numbers",
    "parts": "the rows are split",
    "_GATHERED": "a constant",
    "header.nbytes": "more bytes than fit",
    "number": "one buffer is named otherwise",
    "self._processes": "one process is not named",
    "count": "one device is named otherwise",
    "axes": "the value of the argument",
    "slices": "more slices than devices",
    "index": "the type of CUDA's threads and blocks",
}


def counts_before_plurals(root: Path) -> Iterator[tuple[str, str]]:
    """Yields the expressions in f-strings after which the plural of a thing stands, with the file and the line."""
    for path in sorted(root.rglob("*.py")):
        for text in ast.walk(ast.parse(path.read_text())):
            for value, rest in itertools.pairwise(text.values) if isinstance(text, ast.JoinedStr) else ():
                if isinstance(value, ast.FormattedValue) and isinstance(rest, ast.Constant):
                    word = rest.value[1:].replace(",", " ").replace(";", " ").replace(")", " ").partition(" ")[0]
                    if rest.value[0] == " " and word in THINGS:
                        yield ast.unparse(value.value), f"{path.relative_to(root)}:{text.lineno}"


def test_printed_counts_are_in_the_singular_or_the_plural() -> None:
    """`shardtensor.host.units.counted` gives "1 device" and "2 devices"."""
    package = Path(st.__file__).parent
    roots = (package, package.parent / "backends")
    found = [place for root in roots for expression, place in counts_before_plurals(root) if expression not in SEVERAL]
    assert not found
