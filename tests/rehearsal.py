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
