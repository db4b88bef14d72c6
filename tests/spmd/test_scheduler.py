"""Concurrent programs and their rendezvous: the scheduler of mapped functions, by itself and under maps."""

from __future__ import annotations

import contextvars
import ctypes
import faulthandler
import functools
import gc
import itertools
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
import tracemalloc
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import greenlet
import hypothesis
import numpy as np
import pytest
import shardtensor_numpy
from hypothesis import strategies as some
from threadpoolctl import threadpool_info, threadpool_limits

import shardtensor as st
from shardtensor.communication import array_communicator
from shardtensor.host import blas_threads, signals, threads
from shardtensor.spmd.collective_call import CollectiveCall
from shardtensor.spmd.maps import launch
from shardtensor.spmd.scheduling import helper_delays, scheduler
from shardtensor.spmd.scheduling import mapped_program as programs
from shardtensor.tensor import ownership
from tests.conftest import Late
from tests.draws import all_of_them, drawn
from tests.layouts import array
from tests.scripts import VARIABLES, new_process, output_of, run_script

Task = Callable[[programs.Program], Any]

_hanging: list[threading.Thread] = []


@pytest.fixture(scope="session", autouse=True)
def hard_end() -> Iterator[None]:
    """Ends the process after the tests were reported, even if a thread hangs."""
    yield
    if _hanging:
        faulthandler.dump_traceback_later(30, exit=True)


def in_time(call: Callable[[], Any], seconds: float = 10) -> Any:
    """Returns the result of a call in a thread of its own, or raises its error. If the call takes longer, the test
    fails with the stacks of all threads, and the process is ended by `hard_end`.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
        _hanging.append(thread)
        pytest.fail(f"still running after {seconds} s:\n" + "\n".join(stacks), pytrace=False)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()
    return results[0]


def scripted(text: str, stdin: str = "", seconds: float = 60) -> str:
    """Returns the output of a script in a process of its own, which must end successfully and in time."""
    head = "import os\nimport shardtensor as st\nimport numpy as np\n"
    done = run_script(head + textwrap.dedent(text), stdin=stdin, seconds=seconds, **VARIABLES)
    assert not done.stderr.strip(), done.stderr
    return output_of(done)


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three helper threads, however many cores there are; they join after the first turn of work."""
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "_pool", threads._ThreadPool())
    monkeypatch.setattr(helper_delays, "_delays", {})  # No earlier map, whose tasks had the same code, took long.
    yield
    threads._pool.dissolve()


def meets(
    program: programs.Program, offer: Any, work: Any = None, *, said: str = "sum", key: Any = "all", size: int = 0
) -> Any:
    """Calls a rendezvous of the map; all programs receive the sum of their contributions."""
    group, work = program.run, work or (lambda offers: [sum(offers)] * len(offers))
    call = CollectiveCall(said, (id(group), key), size or len(group.tasks), work)
    return program.meet(call, program.number, offer)


def labels(count: int) -> list[str]:
    return [f"p{k}" for k in range(count)]


def outcome_of(tasks: list[Any], seconds: float = 10, **options: Any) -> Any:
    """Results, or the number of the program that failed and its error."""
    try:
        return in_time(lambda: scheduler.run(tasks, labels(len(tasks)), **options), seconds)
    except programs.Failed as failure:
        return failure.number, failure.error


def total_works(devices: Any = None) -> None:
    """A plain map with a sum over eight devices."""
    items = [np.full(2, float(k)) for k in range(8)]
    made = in_time(lambda: st.pmap(lambda x: st.psum(x, "i"), items, axis_name="i", devices=devices))
    assert [m.tolist() for m in made] == [[28.0, 28.0]] * 8
    assert st.current_device() is None
    assert programs.current() is None


def test_results_come_in_order() -> None:
    def task(k: int) -> Any:
        return lambda program: (k, program.coordinates, str(program), programs.current() is program)

    made = scheduler.run([task(k) for k in range(6)], labels(6), names=("i", "j"), sizes=(2, 3))
    assert made == [(k, divmod(k, 3), f"p{k}", True) for k in range(6)]
    assert scheduler.run([], []) == []
    assert programs.current() is None


def test_programs_start_in_order_and_without_others_never_switch() -> None:
    order: list[int] = []
    scheduler.run([lambda program, k=k: order.append(k) for k in range(20)], labels(20), helper_delay=9.0)
    assert order == list(range(20))


def test_a_rendezvous_on_one_thread() -> None:
    threads = set()

    def task(program: programs.Program) -> Any:
        threads.add(threading.get_ident())
        return [meets(program, program.number + 10 * turn, key=turn % 2) for turn in range(5)]

    assert outcome_of([task] * 7, helper_delay=9.0) == [[21 + 70 * turn for turn in range(5)]] * 7
    assert len(threads) == 1


def test_a_short_map_after_a_long_one_goes_without_helpers(helped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper threads may take any time to wake up; otherwise they would be woken for every map."""

    class Slow(blas_threads.Limit):
        def __enter__(self) -> None:
            time.sleep(0.2)
            super().__enter__()

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            time.sleep(0.2)

    monkeypatch.setattr(scheduler, "Limit", Slow)
    code = id(monkeypatch)
    scheduler.run([lambda program: time.sleep(0.2)] * 3, labels(3), helper_delay=0.04, code=code)
    assert helper_delays.delay_of(code, 0.04) == 0.0
    scheduler.run([lambda program: None] * 3, labels(3), helper_delay=0.04, code=code)
    assert helper_delays.delay_of(code, 0.04) == 0.16
    scheduler.run([lambda program: time.sleep(0.11)], labels(1), helper_delay=0.04, code=code)
    assert helper_delays.delay_of(code, 0.04) in (0.0, 0.04)  # neither short nor, unless the machine is busy, long
    assert helper_delays.delay_of(id(code), 0.04) == 0.04  # unknown code


def test_a_rendezvous_across_threads(helped: None) -> None:
    threads = set()

    def task(program: programs.Program) -> Any:
        totals = []
        for turn in range(5):
            time.sleep(0.001 * ((program.number + turn) % 3))
            totals.append(meets(program, program.number + 10 * turn))
            threads.add((program.number, threading.get_ident()))
        return totals

    assert outcome_of([task] * 9, helper_delay=0.0) == [[36 + 90 * turn for turn in range(5)]] * 9
    assert len(threads) == 9  # each stays in its thread
    assert len({thread for _, thread in threads}) > 1
    total_works()


@pytest.mark.skipif(getattr(sys, "_is_gil_enabled", lambda: True)(), reason="this Python has a GIL")
def test_programs_run_at_the_same_time_without_a_gil(helped: None) -> None:
    """Each waits for the other in bytecode. With a GIL, the first would wait to the end, since no thread is switched."""
    begun = [False, False]

    def task(program: programs.Program) -> bool:
        begun[program.number] = True
        end = time.perf_counter() + 5
        while not all(begun) and time.perf_counter() < end:
            pass
        return all(begun)

    before = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    try:
        assert outcome_of([task] * 2, helper_delay=0.0) == [True, True]
    finally:
        sys.setswitchinterval(before)
    assert not sys._is_gil_enabled()  # type: ignore[attr-defined]


@pytest.fixture
def unpolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting threads continue only when they are woken: a missing wake-up takes longer than the test may."""
    monkeypatch.setattr(scheduler, "_POLL", 10.0)


def until_others_wait(program: programs.Program) -> None:
    """Returns as soon as no other thread of the program's maps has anything to do."""
    scheduler: Any = program.run.scheduler
    while scheduler._busy > 1:
        time.sleep(1e-4)


def in_helper() -> bool:
    """Whether the calling thread is a helper thread."""
    return threading.current_thread().name.startswith("shardtensor_")


def divided(callers: Task, *helpers: Task) -> Task:
    """A task for as many programs as there are functions: the caller's thread runs the first function, and each helper
    thread one of the others.
    """
    started, rest = threading.Barrier(1 + len(helpers)), iter(helpers)

    def task(program: programs.Program) -> Any:
        started.wait(5)
        return next(rest)(program) if in_helper() else callers(program)

    return task


def map_inside(program: programs.Program) -> list[bool]:
    """Maps three programs, each in a thread of its own; one that is not in the caller's thread ends last."""
    started, here, ends_last = threading.Barrier(3), threading.get_ident(), [False, True]

    def inner(program: programs.Program) -> bool:
        started.wait(5)
        if threading.get_ident() != here and ends_last.pop():
            until_others_wait(program)
        return threading.get_ident() != here

    return sorted(scheduler.run([inner] * 3, labels(3)))


WAKES: dict[str, tuple[Task, Task, Any]] = {
    "a rendezvous": (lambda program: meets(program, 1), lambda program: meets(program, 1), [3, 3, 3]),
    "an error": (lambda program: meets(program, 1), lambda program: {}[1], KeyError),
    "a deadlock": (lambda program: meets(program, 1), lambda program: None, st.CollectiveError),
    "an inner map": (lambda program: None, map_inside, [None, None, [False, True, True]]),
    "the end": (lambda program: None, lambda program: None, [None] * 3),
}


@pytest.mark.parametrize("last", ["caller", "helper"])
@pytest.mark.parametrize("name", WAKES)
def test_waiting_threads_are_woken(name: str, last: str, helped: None, unpolled: None) -> None:
    first, then, wanted = WAKES[name]

    def late(program: programs.Program) -> Any:
        until_others_wait(program)
        return then(program)

    task = divided(first, first, late) if last == "helper" else divided(late, first, first)
    made = outcome_of([task] * 3, seconds=5, helper_delay=0.0)
    assert (type(made[1]) if isinstance(made, tuple) else sorted(made, key=str)) == wanted


def test_of_several_errors_the_first_programs_is_raised(helped: None) -> None:
    first = threading.Event()

    def early(program: programs.Program) -> None:
        first.wait(5)
        time.sleep(0.005)
        raise KeyError("early in order")

    def late(program: programs.Program) -> None:
        first.set()
        raise ValueError("early in time")

    number, error = outcome_of([lambda program: time.sleep(0.002), early, late], helper_delay=0.0)
    assert (number, type(error)) == (1, KeyError)


@pytest.mark.parametrize("helper_delay", [0.0, 9.0])
def test_secondary_errors_are_not_raised(helper_delay: float, helped: None) -> None:
    """Programs that wait for a failed program end with errors, too, but the map raises the original error."""

    def waits(program: programs.Program) -> Any:
        time.sleep(0.001)
        return meets(program, 1)

    def fails(program: programs.Program) -> Any:
        time.sleep(0.003)
        raise LookupError("mine")

    number, error = outcome_of([waits, waits, fails, waits], helper_delay=helper_delay)
    assert (number, type(error), str(error)) == (2, LookupError, "mine")


@pytest.mark.parametrize("helper_delay", [0.0, 9.0])
def test_errors_name_the_programs_that_returned_early(helper_delay: float, helped: None) -> None:
    def task(program: programs.Program) -> Any:
        time.sleep(0.001)
        return None if program.number in (1, 4) else meets(program, 1)

    number, error = outcome_of([task] * 5, helper_delay=helper_delay)
    assert type(error) is st.CollectiveError
    assert "p0, p2, p3 called sum; p1, p4 returned without such a call" in str(error).replace("p2, p0", "p0, p2")
    assert number == 0


@pytest.mark.parametrize("helper_delay", [0.0, 9.0])
def test_different_calls_are_an_error_immediately(helper_delay: float, helped: None) -> None:
    def task(program: programs.Program) -> Any:
        time.sleep(0.001 * program.number)
        return meets(program, 1, said="max" if program.number == 1 else "sum")

    _, error = outcome_of([task] * 3, helper_delay=helper_delay)
    assert type(error) is st.CollectiveError
    assert "p1 called max" in str(error)
    first = "p0" if helper_delay else "(p0|p2|p0 and p2)"  # of several threads any may be the first
    assert re.search(f"{first} called sum", str(error))


@pytest.mark.parametrize("helper_delay", [0.0, 9.0])
def test_cyclic_waits_are_a_deadlock(helper_delay: float, helped: None) -> None:
    """Two groups each wait for a program that waits in the other."""

    def task(program: programs.Program) -> Any:
        time.sleep(0.001)
        k = program.number
        meets_with = [(0, 1), (1, 2), (2, 0)][k]
        return program.meet(CollectiveCall(f"pair {meets_with}", meets_with, 2, lambda offers: offers), 0, k)

    _, error = outcome_of([task] * 3, helper_delay=helper_delay)
    assert type(error) is st.CollectiveError
    for k, pair in enumerate([(0, 1), (1, 2), (2, 0)]):
        assert f"p{k} called pair {pair}" in str(error)


def test_a_program_may_catch_a_secondary_error_but_the_map_fails() -> None:
    """The other programs have ended without it, so that its result cannot be used."""
    after: list[Any] = []

    def catches(program: programs.Program) -> Any:
        try:
            meets(program, 1)
        except st.CollectiveError:
            after.append("went on")
        with pytest.raises(st.CollectiveError, match=r"^sum: p"):
            meets(program, 2)
        return "kept to itself"

    number, error = outcome_of([catches, catches, lambda program: None])
    assert after == ["went on"] * 2
    assert type(error) is st.CollectiveError
    assert "p2 returned without such a call" in str(error)

    def fails(program: programs.Program) -> Any:
        raise LookupError("mine")

    number, error = outcome_of([catches, fails, fails])
    assert (number, type(error)) == (1, LookupError)


@pytest.mark.parametrize("helper_delay", [0.0, 9.0])
def test_an_error_in_the_work_of_a_rendezvous(helper_delay: float, helped: None) -> None:
    """All programs receive the error, whichever of them executes the work; errors of the library's classes are copied
    for each.
    """
    errors: list[BaseException] = []

    def work(offers: list[Any]) -> Any:
        raise st.ShapeError("sum: these do not fit")

    def task(program: programs.Program) -> Any:
        time.sleep(0.001)
        try:
            meets(program, 1, work)
        except st.ShapeError as error:
            errors.append(error)
            raise

    number, error = outcome_of([task] * 4, helper_delay=helper_delay)
    assert (type(error), str(error)) == (st.ShapeError, "sum: these do not fit")
    assert len(set(map(id, errors))) == 4

    def breaks(offers: list[Any]) -> Any:
        raise OSError("broken")

    _, error = outcome_of([lambda program: meets(program, 1, breaks)] * 4)
    assert type(error) is OSError


def test_maps_in_programs() -> None:
    def inner(program: programs.Program) -> Any:
        assert program.run.axes == ("i", "j")
        assert program.run.extents == (3, 2)
        mine = 2 * program.coordinates[0] + program.coordinates[1]
        total = program.meet(CollectiveCall("sum", "everybody", 6, lambda offers: [sum(offers)] * 6), mine, mine)
        return program.coordinates, total, meets(program, mine)

    def outer(program: programs.Program) -> Any:
        made = scheduler.run([inner, inner], [f"{program}.{k}" for k in range(2)], names=("j",))
        assert programs.current() is program
        return made, meets(program, program.number)

    made = outcome_of([outer] * 3, names=("i",))
    assert [row for row, _ in made] == [[((i, j), 15, 4 * i + 1) for j in range(2)] for i in range(3)]
    assert [total for _, total in made] == [3, 3, 3]


@pytest.mark.parametrize("helper_delay", [0.0, 9.0])
def test_errors_of_an_inner_map_are_raised_by_its_call(helper_delay: float, helped: None) -> None:
    """The caller of a map may catch the errors of its programs, and continue with the others."""

    def inner(program: programs.Program) -> Any:
        time.sleep(0.001)
        if program.coordinates == (1, 1):
            raise LookupError("mine")
        return meets(program, 1)

    def outer(program: programs.Program) -> Any:
        try:
            made = scheduler.run([inner] * 3, [f"{program}.{k}" for k in range(3)], names=("j",))
        except programs.Failed as failure:
            made = [failure.number, type(failure.error)]
        return made, meets(program, program.number)

    made = outcome_of([outer] * 3, helper_delay=helper_delay)
    assert made == [([3] * 3, 3), ([1, LookupError], 3), ([3] * 3, 3)]


@pytest.mark.parametrize("helper_delay", [0.0, 9.0])
def test_maps_inside_end_when_one_around_them_fails(helper_delay: float, helped: None) -> None:
    ends: list[Any] = []

    def inner(program: programs.Program) -> Any:
        try:
            call = CollectiveCall("sum", "everybody", 6, lambda offers: offers)
            program.meet(call, 3 * program.coordinates[0] + program.number, 1)
        finally:
            ends.append(program.coordinates)

    def outer(program: programs.Program) -> Any:
        if program.number == 1:
            time.sleep(0.002)
            raise LookupError("mine")
        try:
            return scheduler.run([inner] * 3, labels(3))
        except programs.Failed as failure:
            raise failure.error from None

    number, error = outcome_of([outer] * 2, helper_delay=helper_delay)
    assert (number, type(error)) == (1, LookupError)
    assert sorted(ends) == [(0, 0), (0, 1), (0, 2)]


# -- random schedules ------------------------------------------------------------------------------

AXES: list[Any] = ["x", "y", ("x", "y"), ("y", "x")]
KINDS = ["psum", "pmax", "all_gather", "ppermute"]
STEPS = some.lists(some.tuples(some.sampled_from(KINDS), some.sampled_from(AXES)), min_size=1, max_size=6)


def called(kind: str, axes: Any, x: Any) -> Any:
    """Executes one step of a schedule."""
    if kind == "all_gather":
        return sum(x * (k + 1) for k, x in enumerate(st.all_gather(x, axes))) / 8
    if kind == "ppermute":
        size = st.axis_size(axes)
        return st.ppermute(x, axes, [(k, (k + 1) % size) for k in range(size)])
    return {"psum": lambda: st.psum(x, axes) / 4, "pmax": lambda: st.pmax(x, axes) - 1}[kind]()


def answered(kind: str, axes: Any, grid: np.ndarray) -> np.ndarray:
    """The same for all programs, by NumPy."""
    made = np.empty_like(grid)
    for i, j in np.ndindex(2, 3):
        group = {
            "x": [(a, j) for a in range(2)],
            "y": [(i, b) for b in range(3)],
            ("x", "y"): [(a, b) for a in range(2) for b in range(3)],
            ("y", "x"): [(a, b) for b in range(3) for a in range(2)],
        }[axes]
        held = [grid[at] for at in group]
        made[i, j] = {
            "psum": lambda held=held: sum(held) / 4,
            "pmax": lambda held=held: np.max(held, axis=0) - 1,
            "all_gather": lambda held=held: sum(x * (k + 1) for k, x in enumerate(held)) / 8,
            "ppermute": lambda held=held, group=group, i=i, j=j: held[group.index((i, j)) - 1],
        }[kind]()
    return made


def schedule(data: Any) -> tuple[Any, list[list[float]]]:
    """Calls, and how long each program sleeps before each (0: not at all)."""
    steps = data.draw(STEPS)
    naps = some.lists(some.sampled_from([0, 0, 0, 0.0003, 0.001]), min_size=len(steps), max_size=len(steps))
    return steps, [data.draw(naps) for _ in range(6)]


@hypothesis.settings(max_examples=drawn(30))
@hypothesis.given(data=some.data())
def test_random_schedules(backend: str, helped: None, data: Any) -> None:
    steps, naps = schedule(data)
    mesh = st.make_mesh((2, 3), ("x", "y"), devices=st.devices(backend))

    @st.shard_map(mesh=mesh, in_specs=st.P("x", "y"), out_specs=st.P("x", "y"))
    def mapped(x: Any) -> Any:
        me = st.axis_index(("x", "y"))
        for (kind, axes), nap in zip(steps, naps[me], strict=True):
            if nap:
                time.sleep(nap)
            x = called(kind, axes, x)
        return x

    value = array((2, 3, 2), "float64", 1)
    answer = value
    for kind, axes in steps:
        answer = answered(kind, axes, answer)
    made = in_time(lambda: mapped(value))
    np.testing.assert_allclose(np.asarray(made), answer, rtol=1e-12, atol=1e-12)


@hypothesis.settings(max_examples=drawn(60))
@hypothesis.given(data=some.data())
def test_random_schedules_with_one_fault_terminate(backend: str, helped: None, data: Any) -> None:
    """One program differs at one step: the map raises the right error in time, and no state of it remains."""
    steps, naps = schedule(data)
    culprit, place = data.draw(some.integers(0, 5)), data.draw(some.integers(0, len(steps) - 1))
    fault = data.draw(some.sampled_from(["skip", "repeat", "kind", "axes", "dtype", "raise", "return", "catch"]))
    kind, axes = steps[place]
    other_kind = data.draw(some.sampled_from([k for k in KINDS if k != kind]))
    other_axes = data.draw(some.sampled_from([a for a in AXES if a != axes]))
    mesh = st.make_mesh((2, 3), ("x", "y"), devices=st.devices(backend))

    @st.shard_map(mesh=mesh, in_specs=st.P("x", "y"), out_specs=st.P("x", "y"))
    def mapped(x: Any) -> Any:
        me = st.axis_index(("x", "y"))
        for k, ((kind, axes), nap) in enumerate(zip(steps, naps[me], strict=True)):
            if nap:
                time.sleep(nap)
            here = (me, k) == (culprit, place)
            if here and fault == "raise":
                raise LookupError("mine")
            if here and fault == "return":
                return x
            if here and fault == "repeat":
                called(kind, axes, x)
            if here and fault in ("skip", "catch"):
                continue
            called_as = (
                other_kind if here and fault == "kind" else kind,
                other_axes if here and fault == "axes" else axes,
            )
            try:
                x = called(*called_as, st.astype(x, "float32") if here and fault == "dtype" else x)
            except st.CollectiveError:
                if fault != "catch":
                    raise
        return x

    value = array((2, 3, 2), "float64", 1)
    errors: list[Exception] = []
    try:
        in_time(lambda: mapped(value))
    except (LookupError, st.CollectiveError) as error:
        errors.append(error)
    if fault == "raise":
        assert type(errors[0]) is LookupError
        assert errors[0].__notes__ == [f"shard_map: raised for shard {culprit} on {backend}:{culprit}"]
    elif errors or fault != "catch":  # there, who was told of the difference goes on, and so may meet
        assert type(errors[0]) is st.CollectiveError
        assert f"{backend}:" in str(errors[0])
        assert "all devices along an axis must " in str(errors[0])
    total_works()


# -- what surrounds programs -----------------------------------------------------------------------


def raised_at(line: int, engine: Collection[str], call: Callable[[], Any], number: int = signal.SIGINT) -> str:
    """Raises a signal before the given line that the caller's thread executes in the scheduler's files. Returns the
    line; "" if there are fewer lines.
    """
    count, place, caller = 0, "", threading.current_thread()

    def in_line(frame: Any, event: str, _: Any) -> Any:
        nonlocal count, place
        if event == "line" and threading.current_thread() is caller:
            count += 1
            if count == line:
                place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                signal.raise_signal(number)
        return in_line

    def trace(frame: Any, event: str, _: Any) -> Any:
        return in_line if frame.f_code.co_filename in engine else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except (KeyboardInterrupt, Late):
        pass
    finally:
        sys.settrace(before)
    return place


ENGINE = [str(module.__file__) for module in (blas_threads, signals, programs, launch, threads, scheduler)]


@pytest.mark.parametrize("helpers", [0, 1])
@pytest.mark.parametrize("nested", [False, True])
def test_signals_at_every_line(nested: bool, helpers: int, late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception of an alarm's handler is raised by the map, and no state of the map remains."""
    monkeypatch.setattr(shardtensor_numpy.NumPyBackend, "helper_delay", 0.0 if helpers else 9.0)

    def inner(x: Any) -> Any:
        return st.psum(x, ("i", "j"))

    def fn(x: Any) -> Any:
        if helpers:
            time.sleep(1e-4)
        total = st.psum(x, "i")
        return st.pmap(inner, [1, 2], axis_name="j")[0] if nested else total

    def call() -> Any:
        return st.pmap(fn, [1, 2], axis_name="i", devices=st.devices("numpy")[:2])

    wanted = [6, 6] if nested else [3, 3]
    assert call() == wanted
    handler, hook, places, wrong = signal.getsignal(signal.SIGALRM), sys.breakpointhook, set(), []
    step = (7 if nested else 1) * (1 if all_of_them or not (nested or helpers) else 2)
    for line in itertools.count(1, step):
        with st.set_num_threads(1 + helpers):
            place = raised_at(line, ENGINE, call, signal.SIGALRM)
        if not place:
            break
        places.add(place.split(",")[0])
        found = {
            "handler": signal.getsignal(signal.SIGALRM) is not handler,
            "held": bool(signals._active or signals._held or signals.missed),
            "limits": bool(blas_threads._shares._wanted),
            "hook": sys.breakpointhook is not hook,
            "device": st.current_device() is not None,
        }
        wrong += [(what, place) for what, is_so in found.items() if is_so]
        assert call() == wanted, place
    if not nested and not helpers:  # with helpers, the caller may come to fewer
        assert places >= {"Program._pause", "Scheduler._next", "Scheduler.start", "Interrupts._leave", "_Map.call"}
    ownership.READS.clear()  # The tracer also raises at the line of a `finally`, where no handler of a signal runs.
    assert not wrong, "\n".join(map(str, wrong))


def test_locks_of_programs_in_one_thread() -> None:
    """An RLock admits all programs of its owner's thread; a lock that is released before each collective works."""
    again, lock = threading.RLock(), threading.Lock()
    inside: list[int] = []
    most: list[int] = []

    def fn(x: Any) -> Any:
        with lock:
            x = x + 1
        with again:
            inside.append(x)
            most.append(len(inside))
            total = st.psum(x, "i")
            inside.remove(x)
        with lock:
            return total

    with st.set_num_threads(1):
        assert in_time(lambda: st.pmap(fn, [1, 2, 3], axis_name="i")) == [9] * 3
    assert max(most) == 3


def test_signals_in_the_work_of_a_rendezvous(late: None) -> None:
    """The handler runs when the work is complete, and not only when the program that did it is suspended again."""
    done: list[int] = []
    after: list[int] = []

    def step(k: int) -> None:
        signal.raise_signal(signal.SIGALRM)
        done.append(k)

    def work(offers: list[Any]) -> list[Any]:
        threads.each(step, 3, threads=1)
        return offers

    def task(program: programs.Program) -> None:
        meets(program, 1, work)
        after.append(program.number)

    with pytest.raises(programs.Failed) as failed:
        scheduler.run([task] * 3, labels(3), helper_delay=9.0)
    assert (failed.value.number, type(failed.value.error)) == (2, Late)
    assert done == [0, 1, 2]
    assert 2 not in after


WAITS: dict[str, Task] = {
    "for helper threads": lambda program: None,
    "in a rendezvous": lambda program: meets(program, 1),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Late])
@pytest.mark.parametrize("wait", WAITS)
def test_signals_while_the_caller_waits(
    wait: str, kind: type[BaseException], nested: bool, helped: None, late: None
) -> None:
    """The handler runs although the program in the helper thread does not end before it has run."""
    handled, ended = threading.Event(), list[bool]()

    def handler(number: int, frame: Any) -> None:
        handled.set()
        raise kind

    def blocked(program: programs.Program) -> Any:
        until_others_wait(program)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        ended.append(handled.wait(5))
        return meets(program, 1)

    def inner(program: programs.Program) -> Any:
        return scheduler.run([task] * 2, labels(2))

    signal.signal(signal.SIGALRM, handler)
    task = divided(WAITS[wait], blocked)
    tasks = [inner] if nested else [task] * 2
    with pytest.raises((programs.Failed, kind)) as caught:
        scheduler.run(tasks, labels(len(tasks)), helper_delay=0.0)
    assert isinstance(caught.value, programs.Failed)
    assert (ended, type(caught.value.error)) == ([True], kind)
    total_works()


BEFORE: dict[str, Callable[[Any], Any]] = {
    "the start": lambda x: None,
    "a rendezvous": lambda x: st.psum(x, "i"),
    "an inner map": lambda x: st.pmap(lambda y: st.psum(y, ("i", "j")), [x, x], axis_name="j"),
}


@pytest.mark.parametrize("step", BEFORE)
def test_signals_in_mapped_functions_are_handled_immediately(step: str, late: None) -> None:
    def fn(x: Any) -> Any:
        BEFORE[step](x)
        with pytest.raises(Late):
            signal.raise_signal(signal.SIGALRM)
        return x

    with st.set_num_threads(1):
        assert st.pmap(fn, [1, 2, 3], axis_name="i") == [1, 2, 3]


@pytest.mark.parametrize(
    ("cores", "helper_delay", "raised"), [(1, 9.0, "Ctrl-C"), (3, 1e-4, "Ctrl-C"), (1, 9.0, "Late"), (2, 0.0, "Late")]
)
def test_interrupts_at_any_moment(cores: int, helper_delay: float, raised: str) -> None:
    """This includes moments between the scheduler's own steps, at which no program is active."""
    turns = drawn(40, fast=16)
    said = scripted(f"""
        import faulthandler, random, signal, sys
        import shardtensor_numpy
        from threadpoolctl import threadpool_info
        sys.unraisablehook = lambda *args: None  # the signal may come in a callback of a weak reference
        st.set_num_threads({cores})
        shardtensor_numpy.NumPyBackend.helper_delay = {helper_delay}

        class Late(BaseException):
            pass

        def interrupt(number, frame):
            if {raised == "Ctrl-C"}:
                signal.raise_signal(signal.SIGINT)
            raise Late

        def work(x):
            for _ in range(50):
                x = st.psum(x, "i") / 8
            st.pmap(lambda y: st.psum(y, ("i", "j")), [x, x], axis_name="j")
            return x

        def blas():
            return [x["num_threads"] for x in threadpool_info()]

        signal.signal(signal.SIGALRM, interrupt)
        random.seed(1)
        items = [np.ones(3)] * 8
        st.pmap(work, items, axis_name="i")
        hits, threads, hook = 0, blas(), sys.breakpointhook
        for _ in range({turns}):
            faulthandler.dump_traceback_later(10, exit=True)
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 8e-3))
                st.pmap(work, items, axis_name="i")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except (KeyboardInterrupt, Late):
                hits += 1
            made = st.pmap(lambda x: st.psum(x, "i"), items, axis_name="i")
            assert [m.tolist() for m in made] == [[8.0] * 3] * 8
            assert signal.getsignal(signal.SIGALRM) is interrupt
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert (blas(), sys.breakpointhook, st.current_device()) == (threads, hook, None)
        print(hits > {turns} // 8)
    """)
    assert said == "True\n"


def test_breakpoint_calls_the_callers_hook(helped: None) -> None:
    stops: list[Any] = []

    def fn(x: Any) -> Any:
        breakpoint()
        x = st.psum(x, "i")
        breakpoint()
        return x

    def hook(*args: Any) -> None:
        stops.append((st.current_device(), sys._getframe(1).f_code.co_name, threading.get_ident()))
        time.sleep(0.002)  # a user inspects a value; no helper thread starts meanwhile

    mesh = st.make_mesh((4,), ("i",), devices=st.devices("numpy"))
    before = sys.breakpointhook
    sys.breakpointhook = hook
    try:
        mapped = st.shard_map(fn, mesh=mesh, in_specs=st.P("i"), out_specs=st.P())
        for _ in range(2):  # time spent in the debugger does not count: the next map starts no helpers
            assert mapped(np.arange(4.0)).tolist() == [6.0]
        assert sys.breakpointhook is hook
        with pytest.raises(LookupError):
            st.pmap(lambda x: {}[x], [1, 2])
        assert sys.breakpointhook is hook
    finally:
        sys.breakpointhook = before
    assert sorted(str(device) for device, _, _ in stops) == sorted([f"numpy:{k}" for k in range(4)] * 4)
    assert {name for _, name, _ in stops} == {"fn"}
    assert len({thread for _, _, thread in stops}) == 1


def test_a_map_that_starts_while_another_ends_counts_and_restores_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, started, hooks = threading.Event(), threading.Event(), [sys.breakpointhook]
    restore_hook = scheduler.restore_hook

    def slow() -> None:
        ending.set()
        started.wait(0.1)  # It ends only without a lock.
        restore_hook()

    def fn(x: int) -> None:
        started.set()
        ended.result(10)
        hooks.append(sys.breakpointhook)

    monkeypatch.setattr(scheduler, "restore_hook", slow)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(st.pmap, lambda x: x, [1])
        assert ending.wait(10)
        st.pmap(fn, [1])
    hook, inside = hooks
    assert inside is not hook
    assert sys.breakpointhook is hook


def test_a_hook_that_a_program_sets_stays() -> None:
    before = sys.breakpointhook
    try:
        st.pmap(lambda x: setattr(sys, "breakpointhook", print), [1])
        assert sys.breakpointhook is print
    finally:
        sys.breakpointhook = before


@pytest.mark.parametrize("make", [lambda hook: Mock(), lambda hook: functools.wraps(hook)(lambda: hook())])
def test_a_hook_with_attributes_of_the_counter_is_a_users_hook(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock has any attribute, and a hook that wraps the counter has copies of the counter's attributes."""
    mine: list[Any] = []
    st.pmap(lambda x: mine.append(make(sys.breakpointhook)), [1])
    monkeypatch.setattr(sys, "breakpointhook", mine[0])
    inside: list[Any] = []
    assert st.pmap(lambda x: inside.append(sys.breakpointhook) or x + 1, [1]) == [2]
    assert inside[0] is not mine[0]
    assert sys.breakpointhook is mine[0]


@pytest.mark.parametrize("is_partial", [False, True])
def test_maps_that_took_long_start_in_several_threads(is_partial: bool, helped: None) -> None:
    barrier = threading.Barrier(2)

    def fn(x: Any, wait: Callable[..., Any] = time.sleep, seconds: float = 0.01) -> None:
        wait(seconds)

    def mapped(*args: Any) -> Any:
        return functools.partial(fn, wait=args[0], seconds=args[1]) if is_partial else lambda x: fn(x, *args)

    st.pmap(mapped(time.sleep, 0.01), [1, 2])
    st.pmap(mapped(barrier.wait, 5), [1, 2])  # It breaks unless both programs run at the same time.


def test_pdb_in_a_mapped_function() -> None:
    """The debugger is used interactively: it prints values and stops inside of the mapped function."""
    said = scripted(
        """
        mesh = st.make_mesh((3,), ("i",), devices=st.devices()[:3])

        def summed(x):
            doubled = x * 2
            breakpoint()
            total = st.psum(doubled, "i")
            return total

        made = st.shard_map(summed, mesh=mesh, in_specs=st.P("i"), out_specs=st.P())(np.arange(3.0))
        print("made", made.tolist())
        """,
        # Over the collective, by steps: other programs have their turns meanwhile.
        stdin="p doubled.tolist()\nc\np doubled.tolist(), st.axis_index('i')\nw\nc\np str(st.current_device())\nc\n",
    )
    assert "[0.0]" in said
    assert "([2.0], 1)" in said
    assert "summed()" in said
    assert "'numpy:2'" in said
    assert said.endswith("made [6.0]\n")


def test_stepping_over_a_collective() -> None:
    said = scripted(
        """
        def summed(x):
            if st.axis_index("i") == 1:
                breakpoint()
            total = st.psum(x, "i")
            twice = total * 2
            return twice

        print("made", st.pmap(summed, np.arange(3.0), axis_name="i").tolist())
        """,
        stdin="n\nn\np 'total', total.item()\nc\n",
    )
    assert "('total', 3.0)" in said
    assert said.endswith("made [6.0, 6.0, 6.0]\n")


def test_print_in_a_mapped_function(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> None:
        print("before", x, st.current_device())
        print("after", st.psum(x, "i"))

    st.pmap(fn, [1, 2, 3], axis_name="i", devices=st.devices("numpy")[:3])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["after 6"] * 3 + [f"before {k + 1} numpy:{k}" for k in range(3)]


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="default")


def test_context_is_the_callers_and_stays_a_programs_own(helped: None, backend: str) -> None:
    seen: list[Any] = []

    def look(index: int, turn: int) -> None:
        seen.append((index, turn, VARIABLE.get(), np.geterr()["divide"]))

    def fn(x: Any) -> Any:
        index = st.axis_index("i")
        time.sleep(0.001)
        look(index, 0)
        if index == 1:
            VARIABLE.set("of program 1")
            with np.errstate(divide="raise"):
                st.psum(1, "i")
                look(index, 1)
        else:
            st.psum(1, "i")
            look(index, 1)
        st.psum(1, "i")
        look(index, 2)
        return st.pmap(lambda _: VARIABLE.get(), [0, 0])

    VARIABLE.set("the caller's")
    with np.errstate(divide="call"):
        made = st.pmap(fn, list(range(6)), axis_name="i", devices=st.devices(backend)[:6])
    assert VARIABLE.get() == "the caller's"
    for index, turn, value, divide in seen:
        assert value == ("of program 1" if index == 1 and turn else "the caller's")
        assert divide == ("raise" if (index, turn) == (1, 1) else "call")
    assert len(seen) == 18
    assert made == [["of program 1" if k == 1 else "the caller's"] * 2 for k in range(6)]


def test_context_of_a_program_that_waits_for_nothing_stays_its_own() -> None:
    def fn(x: Any) -> Any:
        VARIABLE.set(VARIABLE.get() + str(x))
        np.seterr(divide="raise" if x == 1 else "call")
        return VARIABLE.get(), np.geterr()["divide"]

    VARIABLE.set("of the caller ")
    made = st.pmap(fn, [1, 2, 3])
    assert made == [("of the caller 1", "raise"), ("of the caller 2", "call"), ("of the caller 3", "call")]
    assert VARIABLE.get() == "of the caller "


def test_profilers_see_the_programs_of_maps_after_others() -> None:
    """The worker threads are kept from one map to the next, and a greenlet keeps the profiler with which it was
    started.
    """
    calls: list[str] = []

    def fn(x: Any) -> Any:
        return st.psum(x, "i")

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is fn.__code__:
            calls.append("fn")

    def mapped() -> None:
        assert st.pmap(fn, [1, 2, 3], axis_name="i") == [6] * 3

    for _ in range(2):
        with st.set_num_threads(1):
            mapped()
            before = len(calls)
            sys.setprofile(profile)
            try:
                mapped()
            finally:
                sys.setprofile(None)
            assert len(calls) == before + 3
            mapped()
            assert len(calls) == before + 3


def test_workers_of_a_map_keep_nothing_of_it() -> None:
    class Result:
        pass

    def fn(x: Any) -> Any:
        st.psum(1, "i")
        found.append(weakref.ref(result := Result()))
        return result

    found: list[Any] = []
    made = st.pmap(fn, [1, 2, 3], axis_name="i")
    assert all(type(result) is Result for result in made)
    del made
    assert [reference() for reference in found] == [None] * 3


def test_blas_threads_are_put_back(helped: None) -> None:
    def counts() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    inside: list[Any] = []

    def fn(k: int) -> Any:
        time.sleep(0.003)
        inside.append((threading.get_ident(), counts()))
        if k == 5:
            raise LookupError("mine")
        return st.psum(1, "i") if k >= 0 else None

    with threadpool_limits(3, "blas"):
        before = counts()
        assert before
        assert set(before) == {3}
        st.pmap(fn, [-1] * 8)
        assert counts() == before
        assert len({thread for thread, _ in inside}) > 1
        assert 1 in {n for _, found in inside for n in found}
        with pytest.raises(LookupError):
            st.pmap(fn, list(range(8)), axis_name="i")
        assert counts() == before
        with pytest.raises(st.CollectiveError):
            st.pmap(fn, [-1, 1, 1, 1, 1, 1, 1, -1], axis_name="i")
        assert counts() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_maps_in_the_child_of_a_fork() -> None:
    said = scripted("""
        import time, threading, warnings
        from shardtensor.host import threads as team
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: what is tested here
        team.usable_cores = lambda: 4

        def fn(x):
            time.sleep(0.003)
            threads.add(threading.get_ident())
            return st.psum(x, "i")

        def works():
            threads.clear()
            assert st.pmap(fn, [1.0] * 8, axis_name="i") == [8.0] * 8
            return len(threads) > 1

        threads = set()
        print("parent", works(), flush=True)
        child = os.fork()
        if not child:
            print("child", works(), flush=True)
            os._exit(0)
        print(os.waitpid(child, 0)[1], works())
    """)
    assert said == "parent True\nchild True\n0 True\n"


FORKED = """
import faulthandler, signal, sys, threading, time, warnings
import shardtensor_numpy
warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: what is tested here
main, parent = threading.main_thread(), os.getpid()
sys.breakpointhook = hook = lambda: None
todo = []
st.set_num_threads(3)

def summed(x):
    time.sleep(1e-3)
    return st.psum(x, "inner")

def works():
    x, m = st.ones(1 << 20), st.ones((200, 200))
    assert float(st.sum(x + 1)) == 2 << 20
    assert np.asarray(m @ m)[1, 2] == 200
    for _ in range(2):
        assert st.pmap(summed, [1, 2, 3, 4, 5], axis_name="inner") == [15] * 5
    nested = lambda x: sum(st.pmap(lambda y: st.psum(x * y, "j"), [1, 2], axis_name="j"))
    assert st.pmap(nested, [1, 2, 3]) == [6, 12, 18]
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return
    raise AssertionError("Ctrl-C is lost")

def forked(leaves):
    if not (child := os.fork()):
        works()
        breakpoint()
        works()
        if not leaves:
            return "child"
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def fn(x, forks_in, depth, leaves):
    time.sleep(2e-3)
    st.psum(x, "i")
    code = None
    if (threading.current_thread() is main) == (forks_in == "caller") and todo:
        todo.clear()
        code = max(st.pmap(lambda y: y and forked(leaves), [0, 1])) if depth else forked(leaves)
    return st.psum(x, "i") and code

def run(forks_in, helper_delay, depth=0, leaves=True):
    shardtensor_numpy.NumPyBackend.helper_delay = helper_delay
    todo[:] = [1]
    try:
        codes = st.pmap(lambda x: fn(x, forks_in, depth, leaves), [1, 2, 3, 4], axis_name="i")
        assert sys.breakpointhook is hook
    except st.CollectiveError as error:
        assert os.getpid() != parent and "forked inside of a mapped function" in str(error)
        works()
        os._exit(3)
    if os.getpid() != parent:
        os._exit(4)
    return set(codes) - {None}
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("forks_in", ["caller", "helper"])
def test_forks_in_programs(forks_in: str) -> None:
    """The child of a program can run operators and maps, whatever threads its parent had."""
    said = scripted(f"""
        {textwrap.indent(FORKED, " " * 8).strip()}
        print(run({forks_in!r}, 0.0), run({forks_in!r}, 0.0, depth=1))
        print(run({forks_in!r}, 0.0, leaves=False))
    """)
    assert said == f"{{0}} {{0}}\n{{{3 if forks_in == 'caller' else 1}}}\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forks_in_programs_of_one_thread() -> None:
    """The child has all programs of the map, and continues it."""
    said = scripted(f"""
        {textwrap.indent(FORKED, " " * 8).strip()}
        print(run("caller", 9.0), run("caller", 9.0, depth=1), flush=True)  # A child would print it, too.

        def fn(x):
            child = os.fork() if x == 2 else None
            total = st.psum(x, "i")
            if child:
                assert os.waitpid(child, 0)[1] == 0
            return total

        print(st.pmap(fn, [1, 2, 3], axis_name="i"), flush=True)
        if os.getpid() != parent:
            os._exit(0)
        print(st.pmap(fn, [1, 2, 3], axis_name="i") if os.getpid() == parent else "", flush=True)
        os._exit(0)
    """)
    assert said == "{0} {0}\n" + "[6, 6, 6]\n" * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_in_another_thread_during_a_map() -> None:
    """In its child, no state of the map is left: neither deferred signals nor the debugger's counter."""
    said = scripted(f"""
        {textwrap.indent(FORKED, " " * 8).strip()}
        inside, codes = threading.Event(), []

        def fork():
            inside.wait(5)
            if not (child := os.fork()):
                clean = sys.breakpointhook is hook and signal.getsignal(signal.SIGINT) is signal.default_int_handler
                works()
                os._exit(0 if clean else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        thread = threading.Thread(target=fork)
        thread.start()
        print(st.pmap(lambda x: (inside.set(), thread.join(), st.psum(x, "i"))[2], [1, 2, 3], axis_name="i"), codes)
    """)
    assert said == "[6, 6, 6] [0]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_in_the_context_of_a_program_that_has_ended() -> None:
    """The child has no map to end."""
    step = 1 if all_of_them else 3
    done = scripted(f"""
        {textwrap.indent(FORKED, " " * 8).strip()}
        import contextvars
        errors = []
        sys.unraisablehook = lambda error: errors.append(error.exc_value)

        def code():
            if not (child := os.fork()):
                works()
                os._exit(len(errors))
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def fn(x):
            st.pmap(lambda y: contexts.append(contextvars.copy_context()), [x, x])
            contexts.append(contextvars.copy_context())
            return st.psum(x, "i")

        for helper_delay in (0.0, 9.0):
            contexts = []
            shardtensor_numpy.NumPyBackend.helper_delay = helper_delay
            assert st.pmap(fn, [1, 2, 3], axis_name="i") == [6, 6, 6]
            print([context.run(code) for context in contexts[::{step}]])
    """)
    assert done == f"{[0] * (9 // step)}\n" * 2


def many_collectives(count: int) -> None:
    """Runs this many collectives in one map; returns the memory after the first ones, and at the end."""
    memory: list[int] = []

    def fn(x: Any) -> Any:
        first = st.axis_index("i") == 0
        for turn in range(count):
            x = st.psum(x, "i") / 4
            if first and turn in (count // 4, count - 1):
                gc.collect()
                memory.append(tracemalloc.get_traced_memory()[0])
                memory.append(len(array_communicator._shared))
        return x

    items = [np.full(50, float(k)) for k in range(4)]
    shared = len(array_communicator._shared)
    tracemalloc.start()
    try:
        made = in_time(lambda: st.pmap(fn, items, axis_name="i"), seconds=600)
    finally:
        tracemalloc.stop()
    assert [m.tolist() for m in made] == [[1.5] * 50] * 4
    assert memory[2] - memory[0] < 20_000
    assert memory[3] <= memory[1]
    del made
    gc.collect()
    assert len(array_communicator._shared) <= shared


@pytest.mark.slow
def test_many_collectives_in_flat_memory() -> None:
    many_collectives(drawn(5000, fast=1500))


@pytest.mark.full
def test_a_hundred_thousand_collectives() -> None:
    many_collectives(100_000)


@pytest.mark.parametrize("delay", [None, 0.0], ids=["late", "early"])
@pytest.mark.parametrize("how", ["raise", "leave", "differ", "work", "nested"])
def test_errors_keep_no_operand_alive(
    how: str, delay: float | None, helped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if delay is not None:  # Helper threads run programs from the start.
        monkeypatch.setattr(shardtensor_numpy.NumPyBackend, "helper_delay", delay)
    monkeypatch.setattr(threads, "_SHUTDOWN_WAIT", 60.0)
    references: list[Any] = []

    def fn(x: Any) -> Any:
        index = st.axis_index("i")
        mine = x + np.zeros(1000)
        references.append(weakref.ref(mine))
        if how == "nested":
            return st.pmap(lambda y: y if index else st.psum(y + mine, "i"), [mine, mine])
        if index == 2 and how == "raise":
            raise LookupError("mine")
        if index == 2 and how == "leave":
            return mine
        if how == "work":
            return st.all_gather(mine[:index], "i")
        return st.psum(mine[:index] if how == "differ" else mine, "i")

    before = len(array_communicator._shared)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # a second one, lest the first one's error be kept for the next
            try:
                st.pmap(fn, [1.0, 2.0, 3.0, 4.0], axis_name="i")
            except (st.ShardTensorError, LookupError):
                pass
            else:
                pytest.fail("no error")
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            # Without a GIL, CPython frees what one thread has made and another one drops when the first one runs again
            # or ends. Garbage is not collected, so that a cycle of references would still be found.
            threads._pool.dissolve()
        assert [r for r in references if r() is not None] == []
        assert len(array_communicator._shared) == before
    finally:
        gc.enable()
    assert len(references) >= 4


def test_overlapping_maps(helped: None, backend: str) -> None:
    """Maps in several threads of the user's code use the same axis names, and are independent."""
    devices = st.devices(backend)

    def user(k: int) -> Any:
        rng = np.random.default_rng(k)
        for turn in range(10):

            def fn(x: Any) -> Any:
                time.sleep(float(rng.random()) * 1e-3)
                return st.psum(x, "i") + st.axis_index("i") * 0

            if k == 1 and turn % 2:
                with pytest.raises(st.CollectiveError):
                    st.pmap(lambda x: x if st.axis_index("i") else st.psum(x, "i"), [1, 2], axis_name="i")
            made = st.pmap(fn, [np.full(2, k + turn + j) for j in range(5)], axis_name="i", devices=devices[:5])
            assert [m.tolist() for m in made] == [[5 * (k + turn) + 10] * 2] * 5
        return k

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(user, k) for k in range(4)]
        assert [in_time(lambda f=f: f.result(60), 70) for f in futures] == [0, 1, 2, 3]


def test_in_a_greenlet_of_the_users() -> None:
    def mapped() -> Any:
        return st.pmap(lambda x: st.psum(x, "i"), [1, 2, 3], axis_name="i")

    first, second = greenlet.greenlet(mapped), greenlet.greenlet(mapped)
    assert [first.switch(), second.switch(), mapped()] == [[6] * 3] * 3
    assert first.dead
    del first, second
    assert in_time(lambda: [greenlet.greenlet(mapped).switch() for _ in range(5)]) == [[6] * 3] * 5
    total_works()


PATCHES = {
    "double": """
        import _thread, greenlet, threading
        _thread.get_ident = threading.get_ident = lambda: id(greenlet.getcurrent())
        threading.main_thread()._ident = threading.get_ident()
    """,
    "gevent": "from gevent import monkey; monkey.patch_all()",
}


@pytest.mark.skipif(
    (3, 13) <= sys.version_info < (3, 13, 3),
    reason="this Python prints an error at its end once any thread had such a number: python/cpython#130522",
)
@pytest.mark.parametrize("patch", PATCHES)
def test_threads_whose_numbers_are_those_of_greenlets(patch: str) -> None:
    """gevent makes such threads, for modules that are imported before this library and after."""
    if patch == "gevent":
        pytest.importorskip("gevent")
    script = f"{textwrap.dedent(PATCHES[patch])}\n{textwrap.dedent(PATCHED)}"
    done = new_process("-X", "faulthandler", "-c", script, seconds=60, **VARIABLES | {"SHARDTENSOR_NUM_DEVICES": "4"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n") == ["[6, 6, 6]"] * 2 + ["caught True 2097152.0"] * 2 + [""]


PATCHED = """
    import greenlet, signal, time
    import shardtensor as st

    class Late(Exception):
        pass

    def late(number, frame):
        raise Late

    def mapped():
        return st.pmap(lambda x: (time.sleep(1e-3), st.psum(x, "i"))[1], [1, 2, 3], axis_name="i")

    def interrupted():
        x = st.ones(1 << 20)
        try:
            with interrupts.Interrupts():
                signal.raise_signal(signal.SIGALRM)
                held = True
        except Late:
            return f"caught {held} {float(st.sum(x + 1))}"

    from shardtensor.host import signals as interrupts
    signal.signal(signal.SIGALRM, late)
    print(mapped())
    print(greenlet.greenlet(mapped).switch())
    print(interrupted())
    print(greenlet.greenlet(interrupted).switch())
"""


def test_threads_of_the_users_in_a_program() -> None:
    """They do not belong to a map, even with a copy of the program's context: maps in them are independent."""
    mesh = st.make_mesh((3,), ("i",))

    def fn(x: Any) -> Any:
        made: list[Any] = []

        def beside() -> None:
            made.append(st.pmap(lambda y: st.psum(y, "i"), [x, x], axis_name="i"))
            over_mesh = st.shard_map(lambda y: st.psum(y, "i"), mesh=mesh, in_specs=st.P("i"), out_specs=st.P())
            assert over_mesh(np.arange(3)).tolist() == [3]
            with pytest.raises(st.CollectiveError, match="called beside"):
                st.psum(x, "i")

        thread = threading.Thread(target=contextvars.copy_context().run, args=(beside,))
        thread.start()
        thread.join()
        return made[0][0] + st.psum(x, "i")

    assert in_time(lambda: st.pmap(fn, [1, 2, 3], axis_name="i")) == [8, 10, 12]
    total_works()


def test_greenlets_of_the_users_in_a_program() -> None:
    """A greenlet with the program's context belongs to the map; one without it does not."""

    def fn(x: Any) -> Any:
        with pytest.raises(st.ShardingError, match="no mapped function around this call"):
            greenlet.greenlet(lambda: st.psum(x, "i")).switch()
        inside = greenlet.greenlet(lambda: st.psum(x, "i"))
        inside.gr_context = contextvars.copy_context()
        return inside.switch() + st.psum(x, "i")

    assert in_time(lambda: st.pmap(fn, [1, 2, 3], axis_name="i")) == [12] * 3


def test_generators_of_the_users_in_a_program() -> None:
    def parts(x: Any) -> Iterator[Any]:
        yield st.psum(x, "i")
        yield st.pmax(x, "i")

    assert st.pmap(lambda x: list(parts(x)), [1, 2, 3], axis_name="i") == [[6, 3]] * 3
    made = st.pmap(parts, [1, 2, 3], axis_name="i")
    with pytest.raises(st.ShardingError, match="no mapped function around this call"):
        next(made[0])


# -- stacks ----------------------------------------------------------------------------------------


@pytest.mark.skipif(
    os.name != "posix" or not hasattr(ctypes.CDLL(None), "backtrace"), reason="this C library has no backtrace()"
)
def test_c_stacks_of_programs_end_in_those_of_their_callers() -> None:
    """Torch's errors, profilers and debuggers read C stacks. A stack that an earlier map has left there crashes the
    process.
    """
    seeds = drawn(40, fast=12)
    scripted(
        f"    SEEDS = {seeds}"
        """
    import ctypes, functools, random, sys, threading, time

    unwind = ctypes.CDLL(None).backtrace
    unwind.argtypes = ctypes.c_void_p, ctypes.c_int
    main = threading.main_thread()

    def trace():
        "Return addresses on the C stack, the outermost first."
        addresses = (ctypes.c_void_p * 1024)()  # of this call only: other threads run while C code does
        return addresses[: unwind(addresses, len(addresses))][::-1]

    INNER = 10  # more than the frames of ctypes, and of the interpreter's loop that calls it

    def check():
        here, outer = trace(), around[:-INNER] if threading.current_thread() is main else bottom
        assert here[: len(outer)] == outer, (len(here), len(outer))
        helped.append(outer is bottom)

    class Operand:
        def __init__(self, then):
            self.then = then

        def __lt__(self, other):
            return bool(self.then())

        def __add__(self, other):
            return self.then()

    ways = [
        lambda then: list(map(lambda _: then(), [0])),
        lambda then: sorted([Operand(then), Operand(lambda: None)], reverse=True),
        lambda then: functools.reduce(lambda x, y: then(), [0, 0]),
        lambda then: Operand(then) + 1,
        lambda then: eval("then()", {"then": then}),
        lambda then: np.vectorize(lambda _: bool(then()), otypes=[bool])([0]),
    ]

    def deep(then, seed):
        "Calls it from Python functions that C functions call, a number of times on top of one another."
        chosen = random.Random(seed)

        def called(depth):
            global around
            if depth:
                return chosen.choice(ways)(lambda: called(depth - 1))
            around = trace()
            then()

        called(chosen.randrange(20))

    def collective(x):
        for _ in range(3):
            check()
            list(map(lambda _: st.psum(x, "i"), [0]))  # not always from the same depth
            check()
            st.psum(x, "i")

    def inner(x):
        check()
        st.psum(x, ("i", "j"))
        check()

    def nested(x):
        for count in (1, 3):
            ways[0](lambda: st.pmap(inner, [x] * count, axis_name="j"))
            check()

    def failing(x):
        check()
        if x == 6:
            raise LookupError
        st.psum(x, "i")

    def profiled(x):
        if x == 3:
            sys.setprofile(lambda *event: None)  # calls in the interpreter take another way on the C stack now
        check()
        st.psum(x, "i")
        check()
        if x == 5:
            sys.setprofile(None)

    def slow(x):
        check()
        time.sleep(0.002)  # until helper threads have their share
        st.psum(x, "i")
        check()

    def mapped(fn):
        try:
            st.pmap(fn, list(range(8)), axis_name="i")
        except LookupError:
            assert fn is failing
        check()

    helped = []
    bottoms = []
    thread = threading.Thread(target=lambda: bottoms.append(trace()))
    thread.start()
    thread.join()
    bottom = bottoms[0][:3]
    with st.set_num_threads(1):
        for fn in (lambda x: check(), collective, nested, failing, profiled):
            for seed in range(SEEDS):
                deep(lambda: [mapped(fn) for _ in range(2)], seed)  # the second one has the workers of the first
    assert len(helped) > 300 * SEEDS and not any(helped)
    with st.set_num_threads(4):
        for seed in range(10):
            deep(lambda: mapped(slow), seed)
    assert sum(helped) > 40
    """
    )


def test_threads_that_map_once_leave_nothing() -> None:
    """Servers start many such threads."""
    scripted(
        f"    COUNT = {drawn(100, fast=40)}"
        """
    import gc, sys, threading, tracemalloc

    # The cache of attributes of types keeps their names, as many as have other addresses than those before.
    clear = sys._clear_internal_caches if hasattr(sys, "_clear_internal_caches") else sys._clear_type_cache

    def nested(x):
        return st.pmap(lambda y: st.psum(y, ("i", "j")), [x, x], axis_name="j")

    def maps():
        st.pmap(lambda x: x, [1, 2, 3])
        assert st.pmap(nested, [1, 2, 3], axis_name="i") == [[12, 12]] * 3
        try:
            st.pmap(lambda x: {}[st.psum(x, "i")], [1, 2, 3], axis_name="i")
        except LookupError:
            pass

    def kept(threads):
        "Objects and bytes that there are after that many threads."
        for _ in range(threads):
            thread = threading.Thread(target=maps)
            thread.start()
            thread.join()
        maps()
        clear()
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    st.set_num_threads(1)  # helper threads stay, and each keeps its greenlet
    kept(5)
    tracemalloc.start()
    objects, size = kept(5)
    more_objects, more_size = kept(COUNT)
    assert more_objects - objects < 5, more_objects - objects  # greenlet lets go of the last thread's a bit later
    assert more_size - size < COUNT * 200, more_size - size
    """
    )


# -- recursion -------------------------------------------------------------------------------------


@pytest.fixture
def shallow() -> Iterator[int]:
    """Sets a low recursion limit."""
    limit = sys.getrecursionlimit()
    lower = len(traceback.extract_stack()) + 200
    sys.setrecursionlimit(lower)
    yield lower
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize("threads", [1, 3])
def test_maps_that_never_end_are_a_recursion_error(backend: str, threads: int, shallow: int) -> None:
    devices = st.devices(backend)[:3]
    calls = 0

    def fn(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return st.pmap(fn, [x] * 3, devices=devices[:1])

    with st.set_num_threads(threads), pytest.raises(RecursionError, match="a map inside of maps") as caught:
        in_time(lambda: st.pmap(fn, [1.0, 2.0, 3.0], devices=devices))
    assert calls > 10
    assert calls < 100 or threads > 1
    assert caught.value.__notes__ == list(dict.fromkeys(caught.value.__notes__))
    total_works(devices)


def test_maps_below_the_recursion_limit_are_none(shallow: int) -> None:
    """Frames between the maps count, and those of maps that have ended do not."""

    def fn(depth: int) -> int:
        return 1 + sum(st.pmap(fn, [depth - 1])) if depth else 0

    assert in_time(lambda: [st.pmap(fn, [10]) for _ in range(10)]) == [[10]] * 10

    def between(depth: int, frames: int) -> Any:
        return between(depth, frames - 1) if frames else st.pmap(lambda x: between(depth - 1, 80), [0]) if depth else 0

    assert in_time(lambda: between(1, 80)) == [0]
    with pytest.raises(RecursionError):
        in_time(lambda: between(4, 80))
    total_works()


def test_maps_deep_in_a_recursion_leave_later_ones_all_frames() -> None:
    """The greenlets of programs, which stay for the next map, keep the recursion depth at which they began."""

    def deep(depth: int) -> Any:
        return deep(depth - 1) if depth else st.pmap(lambda x: x + 1, [1, 2])

    def down(depth: int) -> int:
        return down(depth - 1) if depth else 0

    free = sys.getrecursionlimit() - len(traceback.extract_stack())
    assert deep(free - 100) == [2, 3]
    assert st.pmap(lambda x: down(free // 2), [1, 2]) == [0, 0]


class Unresumable:
    """An execution context that cannot be resumed the first time."""

    fails = True

    def suspend(self, thread: Any) -> None:
        pass

    def resume(self, thread: Any) -> None:
        if self.fails:
            self.fails = False
            raise LookupError("mine")


@pytest.mark.parametrize("number", [0, 2])
def test_a_program_that_cannot_be_resumed_ends_its_collective(number: int) -> None:
    """Number 2 is the last to arrive, and computes the results of the others."""

    def task(program: programs.Program) -> Any:
        if program.number == number:
            program.execution_context = Unresumable()
            with pytest.raises(LookupError, match="mine"):
                meets(program, 1)
        elif number == 2:
            with pytest.raises(st.CollectiveError, match="LookupError"):
                meets(program, 1)
        else:
            assert meets(program, 1) == 3
        return meets(program, program.number, key="next")

    assert outcome_of([task] * 3, helper_delay=9.0) == [3, 3, 3]


@pytest.mark.parametrize("kind", ["psum", "pmap", "after"])
@pytest.mark.parametrize("inside", [True, False])
def test_recursion_errors_at_any_depth_leave_no_map_in_the_middle(kind: str, inside: bool, shallow: int) -> None:
    """Where the interpreter has no frames left for the scheduler, the map has not begun."""

    def mapped(x: Any) -> Any:
        return st.pmap(lambda y: st.psum(y, "j"), [x, x], axis_name="j")

    def rendezvous(x: Any) -> Any:
        return st.psum(x, "i")

    act = mapped if kind == "pmap" or not inside else rendezvous

    def endless(x: Any) -> Any:
        try:
            if kind != "after":
                act(x)
            return endless(x)
        finally:
            if kind == "after":  # at each depth, from the deepest one on
                act(x)

    def attempt() -> Any:
        return st.pmap(endless, [1, 2, 3], axis_name="i") if inside else endless(1)

    with pytest.raises(RecursionError):
        in_time(attempt)
    total_works()


# -- work that threads divide ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["psum", "pmax", "psum_scatter"])
def test_threads_change_no_bit_of_a_reduction(name: str, helped: None) -> None:
    parts = st.shard(array((8, 1 << 19), "float64", 1).reshape(-1), devices=st.devices("numpy"))
    options = {"tiled": True} if name == "psum_scatter" else {}
    seen = []
    for number in (1, 3):
        with st.set_num_threads(number):
            made = st.pmap(lambda x: getattr(st, name)(x, "i", **options), parts, axis_name="i")
        seen.append(b"".join(np.asarray(m).tobytes() for m in made[:: 1 if options else 8]))
    assert seen[0] == seen[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_in_a_signal_handler_while_the_caller_waits() -> None:
    """The map continues in the parent; in the child, which has no helper threads, it raises an error."""
    said = scripted("""
        import signal, threading, time, warnings
        import shardtensor_numpy
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: what is tested here
        shardtensor_numpy.NumPyBackend.helper_delay = 0.0
        st.set_num_threads(3)
        main, parent, children = threading.main_thread(), os.getpid(), []
        started, forked = threading.Event(), threading.Event()

        def fork(number, frame):
            if not forked.is_set():
                children.append(os.fork())
                forked.set()

        def fn(x):
            if threading.current_thread() is main:
                started.wait(10)
            else:
                started.set()
                time.sleep(0.1)  # the caller waits for this program meanwhile
                os.kill(parent, signal.SIGUSR1)
                forked.wait(10)
            return st.psum(x, "i")

        signal.signal(signal.SIGUSR1, fork)
        try:
            made = st.pmap(fn, [1, 2, 3], axis_name="i")
        except st.CollectiveError as error:
            made = "forked" in str(error)
        if not children[0]:
            assert st.pmap(lambda x: x + 1, [1, 2, 3]) == [2, 3, 4]
            os._exit(7 if made is True else 1)
        print(made, os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
    """)
    assert said == "[6, 6, 6] 7\n"
