"""The benchmark of gradients, rehearsed: every case, with tiny operands."""

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
    with modules_of(monkeypatch, "gradients") as (module,):
        yield module


def measured(benchmark: Any, monkeypatch: pytest.MonkeyPatch, columns: Mapping[str, str]) -> tuple[Any, Any]:
    cases = benchmark.gradient_cases
    tiny = cases.Sizes((10, 4), (8, 4), (2, 3, 4, 2), (7, 4, 16), (3, 2, 20), 64)
    monkeypatch.setattr(cases, "OPERATORS", 3)
    monkeypatch.setattr(cases, "LINKS", 5)

    start = local_groups(monkeypatch, benchmark, cases, columns, "GRADIENTS_GROUP", tiny)
    effort = benchmark.Effort(1, 1)
    tables: tuple[Any, Any] = benchmark.make_tables(benchmark.measure(effort, start), effort)
    return tables


def test_every_case_runs(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    columns = {benchmark.EAGER: "eager_cases", benchmark.JIT: "jit_cases", benchmark.NUMPY: "numpy_cases"}
    columns |= {benchmark.TORCH: "torch_cases"} if not NO_TORCH else {}
    for table in measured(benchmark, monkeypatch, columns):
        for row in table.rows:
            if table.columns[0] == benchmark.EAGER or "recording" not in row.name:
                assert table.cell(row, table.columns[0]).samples, row.name
        benchmark.harness.report(table, tmp_path, "gradients")
        assert "transformer block" in (tmp_path / "gradients.txt").read_text()
    sums = {"a": {"checksum large": lambda: 1.0}, "b": {"checksum large": lambda: 2.0}}
    workers = {column: LocalWorker(benchmark.harness, by_name) for column, by_name in sums.items()}
    with pytest.raises(AssertionError, match="large"):
        benchmark.check_equal("large", workers)


@pytest.mark.full
def test_with_the_peers(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers.require_jax()
    effort = benchmark.Effort(1, 1)
    for name, table in zip(
        "ab", benchmark.make_tables(benchmark.measure(effort, benchmark.start_workers), effort), strict=True
    ):
        benchmark.harness.report(table, tmp_path, name)
        for row in table.rows:
            assert table.cell(row, table.columns[0]).median is not None, row.name
    assert "Traceback" not in capsys.readouterr().err
