"""The benchmark of functions of NumPy on large arrays, rehearsed: every case, tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rehearsal import Here, modules_of


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with modules_of(monkeypatch, "functions") as (benchmark,):
        tiny = benchmark.Sizes(side=16, large=64)
        cases = {
            benchmark.PROJECT: benchmark.shardtensor_cases(tiny),
            benchmark.NUMPY: benchmark.numpy_cases(tiny),
        }
        found: dict[str, Any] = {column: Here(benchmark.harness, made) for column, made in cases.items()}
        table = benchmark.measured(benchmark.Effort(1, 1), found)
        for row in table.rows:
            assert all(table.cell(row, column).median is not None for column in cases), row.name
            results = [made[row.name]() for made in cases.values()]
            for mine, theirs in zip(*[x if isinstance(x, tuple) else (x,) for x in results], strict=True):
                np.testing.assert_allclose(mine, theirs)
        benchmark.harness.report(table, tmp_path, "functions")
        assert "median, 16 M" in (tmp_path / "functions.txt").read_text()
