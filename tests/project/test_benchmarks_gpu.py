"""The benchmark for GPUs, rehearsed: every case once, with tiny operands, on the simulated CuPy and on the host."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import kernels
from tests.conftest import NO_GPU
from tests.rehearsal import LocalWorker, modules_of
from tests.scripts import new_process

pytestmark = pytest.mark.skipif(not NO_GPU, reason="there is a GPU: run benchmarks/gpu.py --quick")


OF_PEERS = ("jitted@1", "matmultf32@1")
"""The rows that only PyTorch and JAX have."""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The benchmark's two modules, with the simulated CuPy as the GPU."""
    kernels.install(monkeypatch, importlib.import_module("cupy"))
    monkeypatch.setenv("BENCHMARK_LOGICAL", "1,3,8")
    with modules_of(monkeypatch, "gpu", "gpu_cases") as (gpu, cases):
        yield gpu, cases


@contextlib.contextmanager
def some_workers(gpu: Any, cases: Any, sizes: Any, peers: bool) -> Iterator[dict[str, Any]]:
    """Workers as `gpu.start_workers` starts them, those on the simulated CuPy in this process."""
    found = {
        gpu.PROJECT: cases.shardtensor_cases(sizes),
        gpu.CUPY: cases.cupy_cases(sizes),
        gpu.COPY: cases.copy_cases(sizes),
    }
    rehearsed = cases.rehearsed(sizes) | gpu.harness.virtual_devices(1)
    columns = {gpu.TORCH: ("torch", "gpu_cases:torch_cases"), gpu.JAX: ("jax", "gpu_cases:jax_cases")} if peers else {}
    with gpu.harness.start_workers({c: (*library, rehearsed) for c, library in columns.items()}) as workers:
        yield {column: LocalWorker(gpu.harness, made) for column, made in found.items()} | workers


@pytest.mark.parametrize(
    "peers",
    [False, pytest.param(True, marks=pytest.mark.full)],  # starts their processes
    ids=["alone", "with PyTorch and JAX"],
)
def test_every_case_runs(
    peers: bool, modules: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, cases = modules
    sizes = cases.Sizes(arrays=(4096, 8192), moved=1 << 16, side=24, queued=3, spin=1, steps=10)
    with some_workers(gpu, cases, sizes, peers) as workers:
        table = gpu.measure(gpu.Effort(1), (1, 3, 8), workers, sizes)
    gpu.harness.report(table, tmp_path, "gpu")
    output = capsys.readouterr()
    assert "Traceback" not in output.err, output.err
    assert table.environment["GPU"].startswith("Fake GPU")
    for row in table.rows:
        assert row.name in OF_PEERS or table.cell(row, gpu.PROJECT).median is not None, row.name
        alone = row.name in (*cases.ONCE, *OF_PEERS, "matmulbfloat16@1")
        assert alone or table.cell(row, gpu.CUPY).median is not None, row.name
    names = {row.name for row in table.rows}
    for column, worker in workers.items():  # a case without a row would never be measured
        measured = {name for name in worker.cases if name.endswith(("@1", "@8")) and "reshard" not in name}
        assert measured <= names, column
        figure = table.cells["add4096@1", column]
        assert figure.median is not None or figure.problem == "not installed", (column, figure)
    text = (tmp_path / "gpu.txt").read_text()
    assert "x + y, tiny, on 8 " in text
    assert "…" not in text  # the mark of a line that was too long


def test_other_cases_run_after_a_failure(modules: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    gpu, cases = modules

    def fail() -> float:
        raise ZeroDivisionError("on purpose")

    worker = LocalWorker(gpu.harness, cases.guarded({"bad": fail, "good": lambda: 1.5}))
    with pytest.raises(gpu.NotMeasured, match="failed"):
        gpu.call_case(worker, "bad")
    assert "on purpose" in capsys.readouterr().err
    assert gpu.call_case(worker, "good") == 1.5


def test_logical_devices_are_numbers(modules: tuple[Any, Any]) -> None:
    gpu, _ = modules
    assert gpu.device_counts("8,1,2,2") == (1, 2, 8)
    with pytest.raises(ValueError, match="0"):
        gpu.device_counts("0,1")


def test_the_message_without_a_gpu() -> None:
    done = new_process("benchmarks/gpu.py", "--quick")
    assert done.returncode == 1
    assert done.stderr.startswith("gpu.py: there is no usable GPU: ")
    assert "Traceback" not in done.stderr


def test_a_run_that_is_stopped_at_its_end_keeps_its_times(modules: tuple[Any, Any]) -> None:
    gpu, _ = modules

    class Stopped:
        def call(self, case: str, limit: float = 0) -> Any:
            if case == "growth":
                raise KeyboardInterrupt
            return {"GPU": "one"} if case == "machine" else 1e-3

    table = gpu.measure(gpu.Effort(1), (1,), {gpu.PROJECT: Stopped()})
    cells = {row.name: table.cell(row, gpu.PROJECT) for row in table.rows}
    assert cells["dispatch@1"].median == 1e-3
    assert cells["used"].problem == "stopped"


@pytest.mark.full
def test_functions_beside_cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels.install(monkeypatch, importlib.import_module("cupy"))
    monkeypatch.setattr(importlib.import_module("cupy").random, "default_rng", _Generator, raising=False)
    with modules_of(monkeypatch, "gpu_functions", "gpu_cases") as (functions, _):
        table = functions.measure(1, 1 << 12)
        assert len(table.rows) > 80
        assert [row.name for row in table.rows if table.cell(row, functions.PROJECT).median is None] == []
        functions.harness.report(table, tmp_path, "gpu_functions")


class _Generator:
    """Random arrays of the simulated CuPy."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def random(self, shape: Any, dtype: str = "float64") -> Any:
        return importlib.import_module("cupy").asarray(self._rng.random(shape).astype(dtype))

    def integers(self, low: int, high: int, size: int, dtype: str = "int64") -> Any:
        return importlib.import_module("cupy").asarray(self._rng.integers(low, high, size).astype(dtype))
