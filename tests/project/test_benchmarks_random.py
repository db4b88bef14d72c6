"""The benchmark of random numbers, rehearsed: every case, with tiny operands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rehearsal import ROOT, modules_of, rehearse


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with modules_of(monkeypatch, "random_numbers") as (benchmark,):
        table, results = rehearse(benchmark, benchmark.Sizes(large=50, medium=20, small=3))
        for name, (mine, theirs) in results.items():
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        benchmark.harness.report(table, tmp_path, "random_numbers")
        assert "uniform float64, 4 M" in (tmp_path / "random_numbers.txt").read_text()


def test_no_script_hides_a_module_of_python() -> None:
    import sys

    assert not {path.stem for path in (ROOT / "benchmarks").glob("*.py")} & set(sys.stdlib_module_names)
