"""The benchmark of collectives, rehearsed: every case, tiny."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal import Here, modules_of


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
    found = {column: Here(benchmark.harness, made) for column, made in cases.items()}
    table = benchmark.measured(benchmark.Effort(1, 1, 1), found)
    for row in table.rows:
        ours = row not in (benchmark.COPY_WARM, benchmark.COPY_NEW)
        assert (table.cell(row, benchmark.PROJECT).median is not None) == ours, row.name
    names = {row.name for row in table.rows}
    for column, made in cases.items():  # a case that no row asks for would never be seen
        assert set(made) - {"answers", "blas"} <= names, column
    assert table.cell(benchmark.IN_A_ROW, benchmark.PROJECT).median > 0
    # What is compared is not nothing, and a library that computes something else does not get through.
    results = cases[benchmark.PROJECT]["answers"]()
    assert set(results) == set(cases[benchmark.NUMPY]["answers"]())
    with pytest.raises(ValueError, match=r"psum: shardtensor has"):
        benchmark.agree({benchmark.NUMPY: results, benchmark.PROJECT: results | {"psum": results["psum"] + 1}})


@pytest.mark.full
def test_with_the_peers(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    with benchmark.workers(benchmark.Sizes(side=64, batch=40, row=50, queued=3)) as found:
        table = benchmark.measured(benchmark.Effort(1, 1, 1), found)
    benchmark.harness.report(table, tmp_path, "collectives")
    assert "Traceback" not in capsys.readouterr().err
    for row in (*benchmark.SMALL[:2], *benchmark.MOVES[2:], *benchmark.STEPS, benchmark.IN_A_ROW):
        assert table.cell(row, benchmark.JIT).median is not None, row.name
    assert table.cell(benchmark.SMALL[0], benchmark.EAGER).median is not None
    assert "…" not in (tmp_path / "collectives.txt").read_text().replace("… growth", "")
