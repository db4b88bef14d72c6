"""The benchmark of collectives, rehearsed: every case, with tiny operands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import peers
from tests.rehearsal import LocalWorker, modules_of


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's module."""
    with modules_of(monkeypatch, "collectives") as (module,):
        yield module


def tiny(benchmark: Any) -> Any:
    return benchmark.Sizes(side=64, batch=40, row=2000, queued=5)


def test_every_case_runs(benchmark: Any) -> None:
    cases = {
        benchmark.PROJECT: benchmark.shardtensor_cases(tiny(benchmark)),
        benchmark.NUMPY: benchmark.numpy_cases(tiny(benchmark)),
    }
    workers = {column: LocalWorker(benchmark.harness, by_name) for column, by_name in cases.items()}
    table = benchmark.measure_with(benchmark.Effort(1, 1, 1), workers)
    for row in table.rows:
        ours = row not in (benchmark.COPY_WARM, benchmark.COPY_NEW)
        assert (table.cell(row, benchmark.PROJECT).median is not None) == ours, row.name
    names = {row.name for row in table.rows}
    for column, by_name in cases.items():  # a case without a row would never be measured
        assert set(by_name) - {"checksums", "blas"} <= names, column
    assert table.cell(benchmark.IN_A_ROW, benchmark.PROJECT).median > 0
    # Both libraries compute the same checksums, and a library with another result is reported.
    sums = cases[benchmark.PROJECT]["checksums"]()
    assert set(sums) == set(cases[benchmark.NUMPY]["checksums"]())
    with pytest.raises(ValueError, match=r"psum: the result of shardtensor has"):
        benchmark.check_equal({benchmark.NUMPY: sums, benchmark.PROJECT: sums | {"psum": sums["psum"] + 1}})


@pytest.mark.full
def test_with_the_peers(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers.require_jax()
    with benchmark.start_workers(benchmark.Sizes(side=64, batch=40, row=50, queued=3)) as workers:
        table = benchmark.measure_with(benchmark.Effort(1, 1, 1), workers)
    benchmark.harness.report(table, tmp_path, "collectives")
    assert "Traceback" not in capsys.readouterr().err
    for row in (*benchmark.SMALL[:2], *benchmark.MOVES[2:], *benchmark.STEPS, benchmark.IN_A_ROW):
        assert table.cell(row, benchmark.JIT).median is not None, row.name
    assert table.cell(benchmark.SMALL[0], benchmark.EAGER).median is not None
    assert "…" not in (tmp_path / "collectives.txt").read_text().replace("… growth", "")
