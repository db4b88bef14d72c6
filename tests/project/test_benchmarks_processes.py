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


@pytest.mark.parametrize("answer", ["exit 3", 'echo \'{"Python": "3.99", "jax": "not installed", "numpy": "2"}\''])
def test_the_figures_are_kept_without_those_of_jax(
    answer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "python").chmod(0o755)
    with modules_of(monkeypatch, "processes") as (benchmark,):
        monkeypatch.setenv(benchmark.peers.VARIABLE, str(tmp_path / "python"))
        monkeypatch.setattr(benchmark, "_measure_launched", lambda rounds: {f"add {benchmark.PROJECT}": [3e-6]})
        monkeypatch.setattr(benchmark, "_start_seconds", lambda: 0.5)
        table = benchmark.measure(benchmark.QUICK)
    fails = answer == "exit 3"
    assert table.cells["add", benchmark.PROJECT].median == 3e-6
    assert table.cells["all-reduce", benchmark.JAX].problem == ("failed" if fails else "not installed")
    assert table.environment["peers' Python"] == ("unknown" if fails else "3.99")
    assert ("has ended with the status 3" in capsys.readouterr().err) == fails
