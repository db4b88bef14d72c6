"""The benchmark of random numbers, rehearsed: every case, tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal import ROOT, Here, modules_of


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with modules_of(monkeypatch, "random_numbers") as (benchmark,):
        tiny = benchmark.Sizes(large=50, medium=20, small=3)
        cases = {
            benchmark.PROJECT: benchmark.shardtensor_cases(tiny),
            benchmark.NUMPY: benchmark.numpy_cases(tiny),
        }
        found: dict[str, Any] = {column: Here(benchmark.harness, made) for column, made in cases.items()}
        table = benchmark.measured(benchmark.Effort(1, 1), found)
        for row in table.rows:
            assert all(table.cell(row, column).median is not None for column in cases), row.name
            results = [made[row.name]() for made in cases.values()]
            assert results[0].shape == results[1].shape, row.name
            assert results[0].dtype == results[1].dtype, row.name
        names = {row.name for row in table.rows}
        assert all(set(made) == names for made in cases.values())
        benchmark.harness.report(table, tmp_path, "random_numbers")
        assert "uniform float64, 4 M" in (tmp_path / "random_numbers.txt").read_text()


def test_no_script_hides_a_module_of_python() -> None:
    import sys

    assert not {path.stem for path in (ROOT / "benchmarks").glob("*.py")} & set(sys.stdlib_module_names)
