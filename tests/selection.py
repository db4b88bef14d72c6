"""The tiers of tests, the number of processes, and two lines at the end: what did not run, and the processor time.

The fast tier draws from the tests that ``--full`` runs: it leaves out those marked `full`, takes a test with the
parameter `backend` and other parameters on one backend for each of its cases, in turn, and has fewer examples of
hypothesis (`tests.draws`). ``--slice 3/20`` runs the third of twenty parts of what ``--full`` runs, so that twenty short runs
are a full one. ``--quick`` runs the first case of each test function that is not marked `slow`.
"""

from __future__ import annotations

import gc
from collections import Counter
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import pytest

from shardtensor.host.limits import usable_cores
from tests import draws
from tests.timing import fixed_loop

WORKERS = 8
"""The largest number of processes with `-n auto`; each takes a few hundred MB."""

KINDS = 4
"""The number of reasons that the summary line names; `-rs` lists all."""

LEFT_OUT = pytest.StashKey[Counter[str]]()
"""The numbers of tests that were dropped after the collection, by reason."""


PROCESSOR_TIME = pytest.StashKey[float]()
"""The seconds of processor time of the workers of pytest-xdist that have ended, with their child processes."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Sets the tier before the modules of tests, which ask for their number of examples, are imported."""
    draws.all_of_them = complete(config)


def complete(config: pytest.Config) -> bool:
    """Returns whether the tests are those of the full tier, or a slice of them."""
    return bool(config.getoption("full") or config.getoption("slice"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all tests on all backends, with all of their examples")
    parser.addoption("--quick", action="store_true", help="run the first case of each test that is not slow")
    parser.addoption(
        "--slice",
        metavar="K/N",
        type=slice_of,
        help="run the K-th of N parts of what --full runs",
    )


def slice_of(text: str) -> tuple[int, int]:
    """Returns ``"3/20"`` as (3, 20)."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"{text}: K must be a number from 1 to N")
    return number, count


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Stops collections of garbage until the tests, which are millions of objects and no garbage, are collected."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Drops the cases that do not run in this tier before they are made: most tests have more of them than others."""
    config, calls = metafunc.config, metafunc._calls
    if complete(config) or any("[" in argument for argument in config.args) or len(calls) < 2:
        return  # A case that is named on the command line is one of those that exist.
    left_out = config.stash.setdefault(LEFT_OUT, Counter())
    marks = [*metafunc.definition.iter_markers("full")]
    kept = [call for call in calls if not marks and all(mark.name != "full" for mark in call.marks)]
    left_out["marked full"] += len(calls) - len(kept or calls[:1])
    turns = in_turn([(call, call.params) for call in kept]) if kept else calls[:1]
    left_out["on other backends"] += len(kept or turns) - len(turns)
    calls[:] = turns  # One remains, because a test without cases is another one; it is dropped below.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops tests rather than skipping them: they are many, and a dropped one costs neither time nor memory."""
    for item in items:
        if " at 0x" in item.nodeid:  # The workers of pytest-xdist must collect tests with equal names.
            raise pytest.UsageError(f"{item.nodeid}: the name contains an address; give the parameter an id")
    left_out = config.stash.setdefault(LEFT_OUT, Counter())
    every, seen, kept = complete(config), set[str](), []
    for item in items:
        function = item.nodeid.partition("[")[0]
        if not every and item.get_closest_marker("full"):
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
    items[:] = sliced(kept, *part) if (part := config.getoption("slice")) else kept
    left_out["in other slices"] += len(kept) - len(items)


def in_turn(tests: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """Returns the tests of the fast tier, of those of one function with their parameters.

    A test with the parameter `backend` and others runs on one backend for each of its cases, in turn, and each backend
    has a case. The turn is the sum of the positions of the other parameters' values, so that no value of one parameter
    is always on the same backend. A test with one case runs on every backend.
    """
    cases: dict[tuple[tuple[str, int], ...], dict[str, Any]] = {}
    for test, params in tests:
        others = tuple((name, id(value)) for name, value in params.items() if name != "backend")
        if not others or not params.get("backend"):
            return [test for test, _ in tests]
        cases.setdefault(others, {})[params["backend"]] = test
    if len(cases) == 1 or sum(map(len, cases.values())) < len(tests):  # The backend may be a column of a table.
        return [test for test, _ in tests]
    columns = set()  # Parameters of one table have equal columns, and count once.
    for values in zip(*cases, strict=True):
        known = {value: position for position, value in enumerate(dict.fromkeys(values))}
        columns.add(tuple([known[value] for value in values]))
    found = [
        [*named.items()][sum(positions) % len(named)]
        for named, positions in zip(cases.values(), zip(*columns, strict=True), strict=True)
    ]
    reached = {backend for backend, _ in found}
    for turn, backend in enumerate(dict.fromkeys(name for named in cases.values() for name in named)):
        if backend not in reached:
            rows = [named[backend] for named in cases.values() if backend in named]
            found.append((backend, rows[turn % len(rows)]))
    return [test for _, test in found]


def sliced(items: list[Any], number: int, count: int) -> list[Any]:
    """Returns one of ``count`` parts: every ``count``-th item, because neighbours are cases of one test and take about
    equally long.
    """
    return items[number - 1 :: count]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Excludes the tests from later collections of garbage, which become rarer: they take a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


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
        session.config.workeroutput["processor_time"] = processor_time()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if hasattr(node, "workeroutput"):  # A worker that crashed has none.
        stash = node.config.stash
        stash[LEFT_OUT] = Counter(node.workeroutput["left_out"])
        stash[PROCESSOR_TIME] = stash.get(PROCESSOR_TIME, 0.0) + node.workeroutput["processor_time"]


def processor_time() -> float:
    """Returns the seconds of processor time of this process and of its child processes that have ended."""
    return sum(time for who in (RUSAGE_SELF, RUSAGE_CHILDREN) for time in getrusage(who)[:2])


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
    workers = config.stash.get(PROCESSOR_TIME, 0.0)
    seconds, loop = workers or processor_time(), min(fixed_loop() for _ in range(3))
    terminalreporter.write_line(f"processor time: {seconds:.0f} s, {seconds / loop:.0f} times a fixed loop")
