"""The benchmark for CPUs, rehearsed: every case, with tiny operands."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rehearsal import LocalWorker, modules_of


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The benchmark and its cases, with tiny sizes."""
    with modules_of(monkeypatch, "cpu", "cpu_cases") as (cpu, cases):
        for name, value in cases.TINY.as_environment().items():
            monkeypatch.setenv(name, value)
        yield cpu, cases


def start_local(cpu: Any, cases: Mapping[str, Any]) -> Any:
    """Returns a function that starts workers in this process."""
    workers = {column: LocalWorker(cpu.harness, made) for column, made in cases.items()}
    return lambda sizes: contextlib.nullcontext(workers)


def test_every_case_runs(modules: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cases = modules
    monkeypatch.setattr(cases.time, "sleep", lambda seconds: None)
    made = {
        cpu.PROJECT: cases.shardtensor_cases(),
        cpu.LIMIT: cases.limit_cases(),
        cpu.NUMPY: cases.numpy_cases(),
    }
    table = cpu.measure(cpu.QUICK, cases.TINY, start_local(cpu, made))
    for row in table.rows:
        assert table.cell(row, cpu.PROJECT).median is not None, row.name
    names = {row.name for row in table.rows}
    for column, found in made.items():  # a case without a row would never be measured
        assert set(found) - {"checksums", "blas"} <= names, column
    # Targets for which only JAX has figures are not checked.
    assert sum(verdict is None for verdict in table.verdicts()) == 8
    cpu.harness.report(table, tmp_path, "cpu")
    text = (tmp_path / "cpu.txt").read_text()
    assert "≤ 1.05 × best peer" in text
    assert "BLAS: " in text
    assert "…" not in text  # the mark of a line that was too long
    # The results of all cases are compared.
    results = {column: made[column]["checksums"]() for column in (cpu.PROJECT, cpu.NUMPY)}
    assert set(results[cpu.PROJECT]) == set(results[cpu.NUMPY]) == set(cases.GROUP)
    with pytest.raises(ValueError, match=r"sum: the result of shardtensor has"):
        cpu.check_equal(results | {cpu.PROJECT: results[cpu.PROJECT] | {"sum": 0.0}})


def test_operands_of_one_group_are_held(modules: tuple[Any, Any]) -> None:
    _, cases = modules
    made: list[str] = []

    def make(group: str) -> list[Any]:
        made.append(group)
        return [np.ones(3)]

    found = cases.Cases({"a": np.sum, "b": np.max, "c": np.min}, {"a": 0, "b": 0, "c": 1}.get, make, {})
    assert [float(found[name]()) for name in ("a", "b", "a", "c", "a")] == [3, 1, 3, 1, 3]
    assert made == [0, 1, 0]


def test_targets_refer_to_the_best_peer(modules: tuple[Any, Any]) -> None:
    cpu, _ = modules
    figures = {cpu.PROJECT: 2.0, cpu.LIMIT: 0.5, cpu.NUMPY: 4.0, cpu.TORCH: 1.0, cpu.DASK: None}
    cells = {("sum", c): cpu.harness.Cell(() if figure is None else (figure,)) for c, figure in figures.items()}
    table = cpu.Table("", {}, tuple(figures), cpu.ROWS, cells)
    row = next(row for row in cpu.ROWS if row.name == "sum")
    assert table.least(row, cpu.PEERS) == (1.0, cpu.TORCH)
    assert table.meets(row, cpu.Target(2, cpu.PEER)) is True
    assert table.meets(row, cpu.Target(1.9, cpu.PEER)) is False
    assert table.meets(row, cpu.Target(1, cpu.JAX)) is None


def test_a_worker_starts_again_after_its_process_has_ended(modules: tuple[Any, Any]) -> None:
    cpu, _ = modules
    with cpu.harness.Worker("numpy", "cpu_cases:numpy_cases", warm_up=0.2) as worker:
        assert worker.call("blas", 60)
        worker.sample("sum")  # makes the operands, and determines the number of calls
        began = time.perf_counter()
        assert 0 < worker.sample("sum") < time.perf_counter() - began - 0.2
        with pytest.raises(cpu.harness.NotMeasured, match="none in 0 s"):
            worker.call("idle", 1e-9)
        with pytest.raises(cpu.harness.NotMeasured, match="none in 0 s"):
            worker.call("blas", 60)
        worker.restart()
        assert worker.call("blas", 60)
    with cpu.harness.Worker("no_such_library", "cpu_cases:numpy_cases") as worker:
        worker.restart()
        with pytest.raises(cpu.harness.NotMeasured, match="not installed"):
            worker.call("blas", 60)


@pytest.mark.full
def test_the_program(modules: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu, cases = modules
    cpu.main(["--quick", "--out", str(tmp_path), "--label", "tiny"], cases.TINY)
    assert "Traceback" not in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"cpu-tiny.txt", "cpu-tiny.json"}
    text = (tmp_path / "cpu-tiny.txt").read_text()
    assert "failed" not in text
    if cpu.harness.peers.is_installed("jax"):
        assert "not checked" not in text.replace("0 not checked", "")
