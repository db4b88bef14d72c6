"""The benchmark of checkpoints, rehearsed: every case that can run here, with a small array."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.rehearsal import LocalWorker, modules_of


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with modules_of(monkeypatch, "checkpoint") as (benchmark,):
        monkeypatch.setenv(benchmark.SIZE, "1")
        workers = {}
        for column in (
            benchmark.PROJECT,
            benchmark.PLAIN,
            benchmark.TENSORSTORE,
            benchmark.ZARR,
            benchmark.SAFETENSORS,
        ):
            package, function, _ = benchmark.LIBRARIES[column]
            if importlib.util.find_spec(package) is not None:
                (tmp_path / column).mkdir()
                monkeypatch.setenv(benchmark.FOLDER, str(tmp_path / column))
                workers[column] = LocalWorker(benchmark.harness, getattr(benchmark, function)())
        table = benchmark.measure_with(benchmark.Effort(1, 1), workers)
        for column in workers:
            for row in (benchmark.WRITE, benchmark.READ, benchmark.RESHARD):
                assert table.cell(row, column).median > 0
        benchmark.harness.report(table, tmp_path, "checkpoint")
        assert "write and flush" in (tmp_path / "checkpoint.txt").read_text()
