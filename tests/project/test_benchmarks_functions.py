"""The benchmark of functions of NumPy on large arrays, rehearsed: every case, with tiny operands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.rehearsal import modules_of, rehearse


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with modules_of(monkeypatch, "functions") as (benchmark,):
        table, results = rehearse(benchmark, benchmark.Sizes(side=16, large=64))
        for pair in results.values():
            for mine, theirs in zip(*[x if isinstance(x, tuple) else (x,) for x in pair], strict=True):
                np.testing.assert_allclose(mine, theirs)
        benchmark.harness.report(table, tmp_path, "functions")
        assert "median, 16 M" in (tmp_path / "functions.txt").read_text()
