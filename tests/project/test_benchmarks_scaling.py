"""The curves of costs, rehearsed: every case, with tiny operands; and their exponents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.project.test_benchmarks_cpu import start_local
from tests.rehearsal import modules_of


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, Any]]:
    """The benchmark, its cases, and tiny sizes."""
    with modules_of(monkeypatch, "scaling", "scaling_cases", "cpu_cases") as (scaling, cases, cpu_cases):
        for name, value in cpu_cases.TINY.as_environment().items():
            monkeypatch.setenv(name, value)
        yield scaling, cases, cpu_cases.TINY


@pytest.mark.slow
def test_every_case_runs(modules: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling, cases, sizes = modules
    made = {scaling.PROJECT: cases.shardtensor_cases(), scaling.NUMPY: cases.numpy_cases()}
    jobs: list[int] = []
    monkeypatch.setattr(scaling, "_job", lambda count, rounds: jobs.append(count) or scaling.Cell((1.0,)))
    points, growth = scaling.measure(scaling.QUICK, sizes, start_local(scaling, made))
    assert jobs == list(sizes.processes)
    for row in points.rows:
        assert points.cell(row, scaling.PROJECT).median is not None, row.name
    marks = {mark.row: mark for curve in scaling.curves(sizes) for mark in curve.marks}
    assert [row.name for row in points.rows] == list(marks)  # Curves that have a case in common have rows of their own.
    assert {mark.case for mark in marks.values()} == {*made[scaling.PROJECT], *[f"processes {n}" for n in jobs]}
    divided = next(mark for mark in marks.values() if mark.row != mark.case and mark.case in marks)
    assert points.cells[divided.row, scaling.PROJECT].median < points.cells[divided.case, scaling.PROJECT].median
    assert set(made[scaling.NUMPY]) < set(made[scaling.PROJECT])
    for name, case in made[scaling.NUMPY].items():
        np.testing.assert_allclose(np.asarray(made[scaling.PROJECT][name]()), case(), rtol=1e-4)
    scaling.harness.report(points, tmp_path, "scaling")
    assert "x @ y, contraction split, 4 KiB, 8 logical devices" in (tmp_path / "scaling.txt").read_text()
    assert len(growth.rows) == len(scaling.curves(sizes))
    pytest.importorskip("matplotlib")
    scaling.draw(points, tmp_path / "curves.svg", scaling.curves(sizes))
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_exponents(modules: tuple[Any, Any, Any]) -> None:
    scaling, _, _ = modules
    marks = tuple([scaling.Mark(n, f"f {n}", n, n) for n in (1, 2, 4, 8, 16, 32)])
    curve = scaling.Curve("f", "things", marks)

    def table(seconds: Any) -> Any:
        cells = {(m.row, scaling.PROJECT): scaling.Cell((seconds(m.x) / m.units,)) for m in marks}
        return scaling.Table("", {}, (scaling.PROJECT, scaling.NUMPY), (), cells)

    assert curve.exponent(table(lambda n: 3.0 * n**1.5), scaling.PROJECT) == pytest.approx(1.5)
    assert curve.exponent(table(lambda n: 5.0 if n < 8 else 5.0 * n / 8), scaling.PROJECT) == pytest.approx(1.0)
    assert curve.exponent(table(lambda n: 1.0), scaling.NUMPY) is None
    growth = scaling.exponents(table(lambda n: n**2), [curve])
    assert (growth.verdicts(), growth.peers) == ([False], ())


@pytest.mark.full
def test_the_program(modules: tuple[Any, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaling, _, sizes = modules
    scaling.main(["--quick", "--out", str(tmp_path), "--label", "tiny"], sizes)
    assert "Traceback" not in capsys.readouterr().err
    assert "failed" not in (tmp_path / "scaling-tiny.txt").read_text()
    assert {path.name for path in tmp_path.iterdir()} >= {"growth-tiny.json", "scaling-tiny-curves.svg"}
