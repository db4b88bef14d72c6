"""The benchmark of NumPy's functions on tiny arrays, rehearsed: some cases, with figures that were not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal import LocalWorker, modules_of


class Slower(LocalWorker):
    """A worker whose calls of one function take longer."""

    def sample(self, case: str, limit: float = 0.0) -> float:
        return super().sample(case) + (3e-5 if case == "median" else 1e-5)


def test_the_table_has_the_functions_that_take_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with modules_of(monkeypatch, "tiny_functions") as (benchmark,):
        kept = {name: benchmark.CALLS[name] for name in ("add", "median", "fft.fft", "linalg.inv", "is_busday")}
        monkeypatch.setattr(benchmark, "CALLS", kept)
        workers: dict[str, Any] = {
            benchmark.PROJECT: Slower(benchmark.harness, benchmark.shardtensor_cases()),
            benchmark.NUMPY: LocalWorker(benchmark.harness, benchmark.numpy_cases()),
        }
        table = benchmark.measure_with(benchmark.Effort(1), workers)
        assert [row.name for row in table.rows] == ["count", "median"]
        assert table.environment["functions"] == "4 measured"
        assert table.cell(table.rows[0], benchmark.PROJECT).median == 1
        benchmark.harness.report(table, tmp_path, "tiny_functions")
        assert "median" in (tmp_path / "tiny_functions.txt").read_text()
