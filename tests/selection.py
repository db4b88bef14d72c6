"""Which tests a run selects, in how many processes they run, and one line about those that did not run.

The fast tier is every test that is not marked `full`. ``--full`` adds the marked ones; ``--slice 3/20`` runs the third
of twenty parts of the marked ones and nothing else, so that twenty short runs are all of them; ``--quick`` runs the
first case of each test function that is not marked `slow`.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

from shardtensor.host.limits import usable_cores

WORKERS = 8  # at most, of `-n auto`: each takes a few hundred MB
KINDS = 4  # of reasons that the line names; `-rs` lists all

LEFT_OUT = pytest.StashKey[Counter[str]]()
"""How many tests were dropped after the collection, by reason."""


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
    """``"3/20"`` as (3, 20)."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"{text}: K is a number from 1 to N")
    return number, count


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops tests rather than skipping them: they are many, and a dropped one costs neither time nor memory."""
    for item in items:
        if " at 0x" in item.nodeid:  # the workers of pytest-xdist must collect the same tests
            raise pytest.UsageError(f"{item.nodeid}: an address is no name of a test; give the parameter an id")
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
    kept.sort(key=lambda item: item.path.parent.name != "project")  # these start others, so let them be small still
    items[:] = sliced(kept, *part) if part else kept
    left_out["in other slices"] += len(kept) - len(items)


def sliced(items: list[Any], number: int, count: int) -> list[Any]:
    """One of ``count`` parts. Neighbours are cases of one test, which take about equally long: each goes to another part."""
    return items[number - 1 :: count]


def pytest_collection_finish() -> None:
    """The tests themselves are millions of objects, through which every collection of garbage would go again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Reports are kept to the end, three of each test."""
    if report.passed:
        report.keywords = {}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return min(usable_cores(), WORKERS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells its controller, which collects nothing itself."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if hasattr(node, "workeroutput"):  # unless it crashed
        node.config.stash[LEFT_OUT] = Counter(node.workeroutput["left_out"])


def kind(reason: str) -> str:
    """A reason without its details, which follow a colon."""
    return reason.partition(":")[0]


def summary(reasons: Counter[str]) -> str:
    """The commonest reasons with their numbers."""
    named = reasons.most_common(KINDS)
    said = [f"{number} {reason}" for reason, number in named]
    if others := reasons.total() - sum(number for _, number in named):
        said.append(f"{others} for {len(reasons) - KINDS} other reasons (-rs)")
    return "; ".join(said)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = config.stash.get(LEFT_OUT, Counter()).copy()
    for report in terminalreporter.stats.get("skipped", []):
        *_, reason = report.longrepr
        reasons[kind(reason.removeprefix("Skipped: "))] += 1
    if reasons := +reasons:
        terminalreporter.write_line(f"not run: {summary(reasons)}")
