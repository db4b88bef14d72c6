"""The benchmark of what is slower than in NumPy, rehearsed; and the page that shows its figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.rehearsal import ROOT, modules_of, rehearse

DRAWN = {"draws", "uniform", "integers", "gamma", "permutation"}
"""The cases whose results are other numbers than NumPy's."""


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with modules_of(monkeypatch, "slower") as (benchmark,):
        tiny = benchmark.Sizes(rows=10, draws=3, large=40, medium=30, crossing=(1, 2, 3, 4), grouped=40, side=5)
        table, results = rehearse(benchmark, tiny)
        other = benchmark.instead_cases(tiny)
        for name, (mine, numpys) in results.items():
            if name not in DRAWN:
                np.testing.assert_allclose(np.abs(mine), np.abs(numpys), atol=1e-12, err_msg=name)
            if name in other and name not in {"mask", "argsort", "writes"}:
                assert np.shape(other[name]()) == np.shape(numpys), name
            if name in {"scatter", "groups", "rolling", "blur"}:
                np.testing.assert_allclose(other[name](), numpys, atol=1e-12, err_msg=name)
        benchmark.harness.report(table, tmp_path, "slower")
        assert "argsort, 4 M" in (tmp_path / "slower.txt").read_text()


def test_the_page_has_the_figures_of_the_committed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "slower.json").read_text("utf-8"))
    page = (ROOT / "docs" / "performance.md").read_text()
    with modules_of(monkeypatch, "slower") as (benchmark,):
        for table in benchmark.page_tables(found):
            assert table in page, "run python benchmarks/slower.py --page"
