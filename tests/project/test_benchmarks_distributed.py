"""The benchmark of functions that need whole dimensions, rehearsed: every case, with tiny operands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import registry
from tests.rehearsal import LocalWorker, modules_of


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))  # One backend more, of this test.
    with modules_of(monkeypatch, "distributed", "distributed_cases") as (benchmark, cases):
        monkeypatch.setattr(cases, "SETTLING", 0.0)
        monkeypatch.setenv(cases.SIZES, cases.TINY.as_environment()[cases.SIZES])
        large: dict[str, Any] = {
            benchmark.PROJECT: LocalWorker(benchmark.harness, cases.shardtensor_cases()),
            benchmark.NUMPY: LocalWorker(benchmark.harness, cases.numpy_cases()),
        }
        tiny: dict[str, Any] = {
            benchmark.PROJECT: LocalWorker(benchmark.harness, cases.tiny_shardtensor_cases()),
            benchmark.NUMPY: LocalWorker(benchmark.harness, cases.tiny_numpy_cases()),
        }
        measured: dict[Any, Any] = {}
        for part in benchmark.PARTS:
            measured |= benchmark.measure_part(part, benchmark.Effort(1, 1, 1), tiny if part == "tiny" else large)
        table = benchmark.make_table(measured, benchmark.QUICK)
        for row in table.rows:
            assert all(table.cell(row, column).median is not None for column in large), row.name
        names = {row.name for row in table.rows}
        for found in (*large.values(), *tiny.values()):
            assert set(found.cases) <= names
        benchmark.harness.report(table, tmp_path, "distributed")
        page = (tmp_path / "distributed.txt").read_text()
        assert "x[idx], 16 Mi" in page
        assert "…" not in page  # the mark of a cell that was cut


def test_tiny_cases_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    with modules_of(monkeypatch, "distributed_cases") as (cases,):
        ours, numpys = cases.tiny_shardtensor_cases(), cases.tiny_numpy_cases()
        assert set(ours) == set(numpys)
        for name in set(ours) - {"tiny qr"}:  # whose signs are not determined
            mine, theirs = [made[name]() for made in (ours, numpys)]
            for one, other in zip(*[x if isinstance(x, tuple) else (x,) for x in (mine, theirs)], strict=True):
                np.testing.assert_allclose(np.asarray(one), other, rtol=1e-3, atol=1e-3, err_msg=name)
        x = st.asarray(np.arange(8.0), device=st.make_mesh((4,), ("x",), devices=st.devices("separate")[:4]))
        first, second = [shard.data for shard in x.addressable_shards[:2]]
        assert not np.shares_memory(first, second)
        assert np.asarray(x[1:] + 1).tolist() == list(range(2, 9))


def test_the_libraries_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with modules_of(monkeypatch, "distributed_cases") as (cases,):
        monkeypatch.setenv(cases.SIZES, cases.TINY.as_environment()[cases.SIZES])
        monkeypatch.setattr(cases, "timed", lambda call: call)
        ours, numpys = cases.shardtensor_cases(), cases.numpy_cases()
        assert set(ours) == set(numpys)
        for name in set(ours) - {"qr", "svd"}:  # whose signs are not determined
            mine, theirs = [made[name]() for made in (ours, numpys)]
            for one, other in zip(*[x if isinstance(x, tuple) else (x,) for x in (mine, theirs)], strict=True):
                np.testing.assert_allclose(np.asarray(one), other, rtol=1e-3, atol=1e-3, err_msg=name)


def test_dask_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    pytest.importorskip("dask.array")
    with modules_of(monkeypatch, "distributed_cases") as (cases,):
        monkeypatch.setenv(cases.SIZES, cases.TINY.as_environment()[cases.SIZES])
        monkeypatch.setattr(cases, "timed", lambda call: call)
        dasks, numpys = cases.dask_cases(), cases.numpy_cases()
        assert set(dasks) <= set(numpys)
        for name in set(dasks) - {"qr", "svd"}:  # whose signs are not determined
            (mine,), theirs = dasks[name](), numpys[name]()
            wanted = theirs[0] if name == "histogram" else theirs
            np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=1e-3, err_msg=name)
