"""The benchmark of two processes, rehearsed: the table, with figures that were not measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rehearsal import modules_of


def test_the_table_compares_the_figures_that_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with modules_of(monkeypatch, "processes") as (benchmark,):
        figures = {f"add {benchmark.PROJECT}": [3e-6], f"add {benchmark.ALONE}": [2.5e-6]}
        figures |= {f"step {benchmark.PROJECT}": [3.0], f"step {benchmark.BY_HAND}": [1.0]}
        monkeypatch.setattr(benchmark, "_measure_launched", lambda rounds: figures)
        monkeypatch.setattr(benchmark, "_measure_jax", lambda rounds: {f"all-reduce {benchmark.JAX}": [1.0]})
        monkeypatch.setattr(benchmark, "_start_seconds", lambda: 0.5)
        table = benchmark.measure(benchmark.QUICK)
        met = {row.name: [table.meets(row, target) for target in row.targets] for row in table.rows}
        assert met["add"] == met["start"] == [True]
        assert met["step"] == [False]
        assert met["sum"] == [None]
        benchmark.harness.report(table, tmp_path, "processes")
        text = (tmp_path / "processes.txt").read_text()
        assert "data-parallel step" in text
        assert "…" not in text  # the mark of a line that was too long
