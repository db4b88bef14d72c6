"""The style, as a test, so that the second command of the README runs all required checks; `test_types` runs mypy."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtensor as st
from tests.project.test_layers import trees
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
    # module and expression: why there are several, wherever it is followed by the plural
    "traffic_picture share": "one is not named",
    "distributed counts": "a text that names several numbers",
    "equations parts": "the rows are split",
    "equations _GATHERED": "a constant",
    "npy_files header.nbytes": "more bytes than fit",
    "plan count": "one device is named otherwise",
    "plan number": "one buffer is named otherwise",
    "abstract_mesh self._processes": "one process is not named",
    "rules axes": "the value of the argument",
    "pmap slices": "more slices than devices",
    "random_kernel index": "the type of CUDA's threads and blocks",
}


def counts_before_plurals(root: Path) -> Iterator[tuple[str, str]]:
    """Yields the module and the expression where an f-string has the plural of a thing after a value, and the place."""
    for path in sorted(root.rglob("*.py")):
        for text in ast.walk(trees().get(path) or ast.parse(path.read_text())):
            for value, rest in itertools.pairwise(text.values) if isinstance(text, ast.JoinedStr) else ():
                if isinstance(value, ast.FormattedValue) and isinstance(rest, ast.Constant):
                    word = rest.value[1:].replace(",", " ").replace(";", " ").replace(")", " ").partition(" ")[0]
                    if rest.value[0] == " " and word in THINGS:
                        yield f"{path.stem} {ast.unparse(value.value)}", f"{path.relative_to(root)}:{text.lineno}"


def test_printed_counts_are_in_the_singular_or_the_plural() -> None:
    """`shardtensor.host.units.counted` gives "1 device" and "2 devices"."""
    package = Path(st.__file__).parent
    roots = (package, package.parent / "backends")
    found = [found for root in roots for found in counts_before_plurals(root)]
    assert [place for expression, place in found if expression not in SEVERAL] == []
    assert {expression for expression, _ in found} == {*SEVERAL}
