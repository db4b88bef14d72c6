"""Options that select tests, the number of processes, and a summary line of the tests that did not run.

The fast tier is every test that is not marked `full`. ``--full`` adds the marked ones; ``--slice 3/20`` runs only the
third of twenty parts of the marked ones, so that twenty short runs cover all of them; ``--quick`` runs the first case
of each test function that is not marked `slow`.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

from shardtensor.host.limits import usable_cores

WORKERS = 8
"""The largest number of processes with `-n auto`; each takes a few hundred MB."""

KINDS = 4
"""The number of reasons that the summary line names; `-rs` lists all."""

LEFT_OUT = pytest.StashKey[Counter[str]]()
"""The numbers of tests that were dropped after the collection, by reason."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")
    parser.addoption("--quick", action="store_true", help="run the first case of each test that is not slow")
    parser.addoption(
        "--slice",
        metavar="K/N",
        type=slice_of,
        help="run the K-th of N parts of the tests marked `full`, and no others; the N parts together are all of them",
    )


def slice_of(text: str) -> tuple[int, int]:
    """Returns ``"3/20"`` as (3, 20)."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"{text}: K must be a number from 1 to N")
    return number, count


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops tests rather than skipping them: they are many, and a dropped one costs neither time nor memory."""
    for item in items:
        if " at 0x" in item.nodeid:  # The workers of pytest-xdist must collect tests with equal names.
            raise pytest.UsageError(f"{item.nodeid}: the name contains an address; give the parameter an id")
    left_out = config.stash[LEFT_OUT] = Counter()
    part, seen, kept = config.getoption("slice"), set(), []
    for item in items:
        marked, function = item.get_closest_marker("full") is not None, item.nodeid.partition("[")[0]
        if part and not marked:
            left_out["not marked full"] += 1
        elif marked and not (part or config.getoption("full")):
            left_out["marked full"] += 1
        elif skip := item.get_closest_marker("skip"):
            left_out[kind(skip.kwargs["reason"])] += 1
        elif config.getoption("quick") and (function in seen or item.get_closest_marker("slow")):
            left_out["not quick"] += 1
        else:
            kept.append(item)
            seen.add(function)
    # Tests of the project come first: they start processes, which is cheaper while this process is still small.
    kept.sort(key=lambda item: item.path.parent.name != "project")
    items[:] = sliced(kept, *part) if part else kept
    left_out["in other slices"] += len(kept) - len(items)


def sliced(items: list[Any], number: int, count: int) -> list[Any]:
    """Returns one of ``count`` parts: every ``count``-th item, because neighbours are cases of one test and take about
    equally long.
    """
    return items[number - 1 :: count]


def pytest_collection_finish() -> None:
    """Excludes the tests, which are millions of objects, from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Empties the keywords of passed reports: pytest keeps three reports of each test until the end."""
    if report.passed:
        report.keywords = {}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return min(usable_cores(), WORKERS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends the numbers from a worker of pytest-xdist to its controller, which collects no tests itself."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if hasattr(node, "workeroutput"):  # A worker that crashed has none.
        node.config.stash[LEFT_OUT] = Counter(node.workeroutput["left_out"])


def kind(reason: str) -> str:
    """Returns a reason without its details, which follow a colon."""
    return reason.partition(":")[0]


def summary(reasons: Counter[str]) -> str:
    """Returns the most frequent reasons with their numbers."""
    named = reasons.most_common(KINDS)
    parts = [f"{number} {reason}" for reason, number in named]
    if others := reasons.total() - sum(number for _, number in named):
        parts.append(f"{others} for {len(reasons) - KINDS} other reasons (-rs)")
    return "; ".join(parts)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = config.stash.get(LEFT_OUT, Counter()).copy()
    for report in terminalreporter.stats.get("skipped", []):
        *_, reason = report.longrepr
        reasons[kind(reason.removeprefix("Skipped: "))] += 1
    if reasons := +reasons:
        terminalreporter.write_line(f"not run: {summary(reasons)}")
