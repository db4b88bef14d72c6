"""The benchmark of training, rehearsed: every case, with tiny operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import peers
from tests.conftest import NO_TORCH
from tests.rehearsal import LocalWorker, local_groups, modules_of


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's module."""
    with modules_of(monkeypatch, "training") as (module,):
        yield module


def measured(benchmark: Any, monkeypatch: pytest.MonkeyPatch, columns: Mapping[str, str]) -> tuple[Any, Any]:
    cases = benchmark.training_cases
    tiny = cases.Sizes(8, 3, 4, 2, 1, 4, 64, 3)

    start = local_groups(monkeypatch, benchmark, cases, columns, "TRAINING_GROUP", tiny)
    effort = benchmark.Effort(1)
    tables: tuple[Any, Any] = benchmark.make_tables(benchmark.measure(effort, start), effort)
    return tables


def test_every_case_runs(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    columns = {benchmark.OURS: "shardtensor_cases", benchmark.TRAFFIC: "traffic_cases"}
    if not NO_TORCH:
        import torch

        # The compiler of PyTorch takes seconds, and its loss is the same without it.
        monkeypatch.setattr(torch, "compile", lambda f: f)
        columns[benchmark.TORCH] = "torch_cases"
    table, _ = measured(benchmark, monkeypatch, columns)
    for row in table.rows:
        assert table.cell(row, benchmark.OURS).samples, row.name
    benchmark.harness.report(table, tmp_path, "training")
    assert "GPT, 3 layers" in (tmp_path / "training.txt").read_text()
    workers = {
        column: LocalWorker(benchmark.harness, {"step": lambda x=x: x}) for column, x in (("a", 1.0), ("b", 2.0))
    }
    with pytest.raises(AssertionError, match=r"'a': 1\.0, 'b': 2\.0"):
        benchmark.check_equal(workers)


@pytest.mark.full
def test_with_the_peers(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers.require_jax()
    effort = benchmark.Effort(1)
    for name, table in zip(
        "ab", benchmark.make_tables(benchmark.measure(effort, benchmark.start_workers), effort), strict=True
    ):
        benchmark.harness.report(table, tmp_path, name)
        for row in table.rows:
            assert table.cell(row, table.columns[0]).median is not None, row.name
    assert "Traceback" not in capsys.readouterr().err
