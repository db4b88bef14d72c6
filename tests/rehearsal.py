"""What tests of the benchmarks share: their modules, and workers that measure nothing."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def modules_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[Any]]:
    """Modules of the benchmarks' folder, where each program finds its own; gone at the end, with all from there."""
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


class Here:
    """A worker in this process."""

    def __init__(self, harness: Any, cases: Mapping[str, Any]) -> None:
        self.harness, self.cases = harness, cases

    def sample(self, case: str) -> float:
        self.call(case)
        return 1.0

    def call(self, case: str, limit: float = 0.0) -> Any:
        if case not in self.cases:
            raise self.harness.NoFigure(self.harness.NOT_APPLICABLE)
        return self.cases[case]()

    def again(self) -> None:
        """It has not ended."""


def rehearse(benchmark: Any, tiny: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Measures the cases of the library and of NumPy once, with tiny operands.

    Returns:
        The table, and by the name of a row the results of both; every row has a figure of both.
    """
    made = benchmark.shardtensor_cases(tiny), benchmark.numpy_cases(tiny)
    workers = [Here(benchmark.harness, cases) for cases in made]
    found = dict(zip((benchmark.PROJECT, benchmark.NUMPY), workers, strict=True))
    table = benchmark.measured(benchmark.Effort(1, 1), found)
    for row in table.rows:
        assert all(table.cell(row, column).median is not None for column in found), row.name
    names = {row.name for row in table.rows}
    assert all(set(cases) == names for cases in made)
    return table, {name: [cases[name]() for cases in made] for name in names}
