"""Shared by the tests of the benchmarks: the benchmarks' modules, and workers that call cases without timing them."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def modules_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[Any]]:
    """Imports modules of the benchmarks' folder, with that folder on the search path, as for a program in it.

    A context manager; on exit, all modules of the folder are removed from ``sys.modules``, and what SIGTERM does, which
    their programs change, is as before.
    """
    handler = signal.getsignal(signal.SIGTERM)
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


class LocalWorker:
    """Replaces a `Worker`: calls the cases in this process, and reports one second for each."""

    def __init__(self, harness: Any, cases: Mapping[str, Any]) -> None:
        self.harness, self.cases = harness, cases

    def sample(self, case: str, limit: float = 0.0) -> float:
        self.call(case)
        return 1.0

    def call(self, case: str, limit: float = 0.0) -> Any:
        if case not in self.cases:
            raise self.harness.NotMeasured(self.harness.NOT_APPLICABLE)
        return self.cases[case]()

    def restart(self) -> None:
        """Does nothing, because this process cannot have ended."""


def local_groups(
    monkeypatch: pytest.MonkeyPatch, benchmark: Any, cases: Any, columns: Mapping[str, str], variable: str, sizes: Any
) -> Callable[[str], contextlib.AbstractContextManager[dict[str, LocalWorker]]]:
    """Returns what starts local workers for a group of rows, in place of ``benchmark.start_workers``.

    Args:
        monkeypatch: the fixture.
        benchmark: the module of the benchmark.
        cases: that of its cases.
        columns: for each column, the function of that module which makes its cases.
        variable: the environment variable that has the group.
        sizes: the sizes of operands.
    """

    @contextlib.contextmanager
    def start(group: str) -> Iterator[dict[str, LocalWorker]]:
        monkeypatch.setenv(variable, group)
        yield {column: LocalWorker(benchmark.harness, getattr(cases, name)(sizes)) for column, name in columns.items()}

    return start


def rehearse(benchmark: Any, sizes: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Measures the cases of shardtensor and of NumPy once, with operands of these sizes.

    Returns:
        The table, in which every row has both figures, and the results of both libraries by the name of a row.
    """
    cases = [benchmark.shardtensor_cases(sizes), benchmark.numpy_cases(sizes)]
    local = [LocalWorker(benchmark.harness, by_name) for by_name in cases]
    workers = dict(zip((benchmark.PROJECT, benchmark.NUMPY), local, strict=True))
    table = benchmark.measure_with(benchmark.Effort(1, 1), workers)
    for row in table.rows:
        assert all(table.cell(row, column).median is not None for column in workers), row.name
    names = {row.name for row in table.rows}
    assert all(set(by_name) == names for by_name in cases)
    return table, {name: [by_name[name]() for by_name in cases] for name in names}
