"""The threads of the library: their number, their work and their end, the threads of BLAS meanwhile, and Ctrl-C."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import itertools
import math
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some
from threadpoolctl import threadpool_info, threadpool_limits

import shardtensor as st
from shardtensor.errors import ArgumentError, BackendError
from shardtensor.host import blas_threads, blockwise, memory_pool, signals, threads
from shardtensor.host.blas_threads import Limit
from shardtensor.host.threads import each
from shardtensor.interpreters.execution import blocked_reduction, plan_cache, strategies
from shardtensor.spmd.collective_call import CollectiveCall
from shardtensor.spmd.scheduling.scheduler import run
from tests.conftest import Late
from tests.draws import drawn
from tests.layouts import strided
from tests.scripts import OPTIONS, VARIABLES, new_process, run_script
from tests.spmd.test_scheduler import (
    hard_end,  # noqa: F401 - hard_end works by being here
    in_time,
    raised_at,
    scripted,
)
from tests.timing import fixed_loop, within

LARGE = 1 << 22
"""Elements of float64 that are worth threads."""


@pytest.fixture
def four() -> Iterator[None]:
    """Four threads, however many cores there are."""
    before = list(threads._settings)
    st.set_num_threads(4)
    yield
    threads._settings[:] = before


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The number of threads is not set; there are five cores."""
    monkeypatch.delenv("SHARDTENSOR_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 5)
    monkeypatch.setattr(threads, "_settings", [])
    threads._requested_threads.cache_clear()
    yield
    threads._requested_threads.cache_clear()


def beside(*calls: Callable[[], Any], seconds: float = 10) -> list[Any]:
    """Returns the results of calls that run at once, each in a new thread."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            results[k] = calls[k]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    in_time(lambda: [thread.join() for thread in threads], seconds)
    if errors:
        raise errors[0]
    return results


def is_held(lock: Any) -> bool:
    """Whether a thread holds a reentrant lock, asked in another thread."""

    def take() -> bool:
        if taken := lock.acquire(blocking=False):
            lock.release()
        return not taken

    (held,) = beside(take)
    return bool(held)


# -- how many --------------------------------------------------------------------------------------


def test_the_default_is_the_number_of_cores(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert st.num_threads() == 5
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)  # the mask has changed
    assert st.num_threads() == 2


@pytest.mark.parametrize(("value", "wanted"), [("1", 1), ("3", 3), ("007", 7), ("128", 128)])
def test_the_environment_sets_the_number(value: str, wanted: int, unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_THREADS", value)
    assert st.num_threads() == wanted
    with st.set_num_threads(2):
        assert st.num_threads() == 2
        with st.set_num_threads(None):
            assert st.num_threads() == wanted
    st.set_num_threads(6)
    assert st.num_threads() == 6
    st.set_num_threads(None)
    assert st.num_threads() == wanted


@pytest.mark.parametrize(
    "value", ["0", "-1", "1.5", "", " ", " 2", "two", "+2", "1e3", "\u0663", "\u00b2", "0x2", "4097", "99999999999"]
)
def test_invalid_values_in_the_environment(value: str, unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTENSOR_NUM_THREADS", value)
    for _ in range(2):
        with pytest.raises(
            BackendError, match=r"^SHARDTENSOR_NUM_THREADS is .*; wanted an integer from 1 to 4,096: set it before"
        ) as caught:
            st.num_threads()
        assert repr(value) in str(caught.value)
    with pytest.raises(BackendError, match="SHARDTENSOR_NUM_THREADS"):
        st.ones(LARGE) + 1
    with st.set_num_threads(3):
        assert st.num_threads() == 3


def test_the_number_may_be_asked_for_while_others_set_it(unset: None) -> None:
    """A context manager adds a setting, and removes it when it is entered."""

    class Removed(list):
        def __bool__(self) -> bool:  # Another thread removes the only setting after the question.
            self.clear()
            return True

    settings = Removed([threads.set_num_threads(3)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "_settings", settings)
        assert st.num_threads() in (3, 5)


def test_helper_threads_keep_nothing_of_the_context_that_started_them(unset: None) -> None:
    """Threads inherit the context where there is no GIL."""
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
    pool = threads._ThreadPool()

    def start() -> weakref.ref[Any]:
        held = np.empty(3)
        variable.set(held)
        helpers = threads.Helpers()
        helpers._work, helpers._context, helpers._pool = lambda: None, contextvars.Context(), pool
        pool.submit(helpers, 2)
        helpers.dismiss()
        return weakref.ref(held)

    found = contextvars.copy_context().run(start)
    gc.collect()
    assert found() is None
    assert len(pool._threads) == 2
    pool.close()


def test_the_environment_of_a_process() -> None:
    script = "import shardtensor as st, threading\nprint(st.num_threads())\nprint(float(st.sum(st.ones(1 << 21) + 1)))\nprint(threading.active_count())"
    for value, output in [("3", "3\n4194304.0\n3\n"), ("1", "1\n4194304.0\n1\n")]:
        done = new_process("-W", "error", "-c", script, **VARIABLES, SHARDTENSOR_NUM_THREADS=value)
        assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


def test_numbers_that_are_set(unset: None) -> None:
    st.set_num_threads(3)
    assert st.num_threads() == 3
    assert beside(st.num_threads) == [3]
    with st.set_num_threads(7):
        assert st.num_threads() == 7
        inherits = getattr(sys.flags, "thread_inherit_context", False)  # as it is by default without a GIL
        assert beside(st.num_threads) == [7 if inherits else 3]  # for other threads nothing has changed
        with st.set_num_threads(2):
            assert st.num_threads() == 2
            st.set_num_threads(9)  # for the process; this context sets 2
            assert st.num_threads() == 2
            assert beside(st.num_threads) == [2 if inherits else 9]
        assert st.num_threads() == 7
        with pytest.raises(ZeroDivisionError), st.set_num_threads(4):
            1 / 0
        assert st.num_threads() == 7
        with st.set_num_threads(None):
            assert st.num_threads() == 5
        assert st.num_threads() == 7
    assert st.num_threads() == 9
    st.set_num_threads(None)
    assert st.num_threads() == 5


@pytest.mark.parametrize("number", [0, -1, 1.0, "2", True, False, np.int64(3), [1], float("nan")], ids=repr)
def test_bad_numbers(number: Any, unset: None) -> None:
    with pytest.raises(
        ArgumentError, match=r"^set_num_threads: number is .*; wanted an integer from 1 to 4,096, or None$"
    ):
        st.set_num_threads(number)
    assert st.num_threads() == 5


def test_programs_of_a_map_have_the_callers_number(unset: None) -> None:
    with st.set_num_threads(3):
        made = in_time(lambda: st.pmap(lambda x: np.full(1, st.num_threads()), [np.ones(1)] * 4))
        assert [int(np.asarray(m)[0]) for m in made] == [3] * 4

    def program(x: Any) -> Any:
        with st.set_num_threads(2):
            x = st.psum(x, "i")
            return x * st.num_threads()

    made = in_time(lambda: st.pmap(program, [np.ones(1)] * 4, axis_name="i"))
    assert [float(np.asarray(m)[0]) for m in made] == [8.0] * 4
    assert st.num_threads() == 5


def test_managers_in_threads_do_not_change_the_process(unset: None) -> None:
    one, two = st.set_num_threads(1), st.set_num_threads(2)  # as two threads may come to it
    with one, two:
        pass
    try:
        assert st.num_threads() == 5
    finally:
        st.set_num_threads(None)


STYLE: contextvars.ContextVar[Any] = contextvars.ContextVar("style", default="none")


# -- each ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 7, None])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 50])
def test_each_calls_every_number_once(count: int, threads: int | None, four: None) -> None:
    with st.set_num_threads(7):
        for _ in range(20):
            done: list[int] = []
            seen: set[int] = set()
            each(lambda k: (done.append(k), seen.add(threading.get_ident())), count, threads=threads)  # noqa: B023
            assert sorted(done) == list(range(count))
            assert len(seen) <= min(threads or 7, max(count, 1))
            if threads == 1 or count < 2:
                assert seen <= {threading.get_ident()}
                assert done == sorted(done)


@hypothesis.settings(max_examples=drawn(30))
@hypothesis.given(count=some.integers(0, 40), threads=some.integers(1, 6), seed=some.integers(0, 99))
def test_each_calls_every_number_once_at_any_speed(count: int, threads: int, seed: int) -> None:
    paces = random.Random(seed).choices([0, 0, 0, 1e-4, 1e-3], k=count)
    done: list[int] = []
    with st.set_num_threads(threads):
        each(lambda k: (time.sleep(paces[k]), done.append(k)), count)
    assert sorted(done) == list(range(count))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_that_many_threads_work_at_once(count: int, four: None) -> None:
    barrier = threading.Barrier(count)
    in_time(lambda: beside(lambda: st.set_num_threads(4) and each(lambda k: barrier.wait(5), count)))
    barrier = threading.Barrier(2)
    most, at_once = [0], [0]
    lock = threading.Lock()

    def work(k: int) -> None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.002)
        with lock:
            at_once[0] -= 1

    each(work, 20, threads=2)
    assert most == [2]


def test_threads_are_kept(four: None) -> None:
    each(lambda k: time.sleep(0.001), 8)
    before = {t.ident: t for t in threading.enumerate()}
    for _ in range(30):
        each(lambda k: None, 8)
    assert {t.ident for t in threading.enumerate()} <= set(before)
    helpers = [t for t in before.values() if t.name.startswith("shardtensor_")]
    assert len(helpers) >= 3
    assert all(t.daemon for t in helpers)


def test_short_work_wakes_no_helper(four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(threads._ThreadPool, "submit", never)
    x = st.ones(1000)
    assert float(st.sum(st.sqrt(x + x) * x)) == pytest.approx(1000 * 2**0.5)
    x += 1
    x[3:] = 2.0
    y = st.ones((50, 50))
    y @ y
    with pytest.raises(AssertionError):
        st.ones(LARGE) + 1


@pytest.mark.parametrize("where", ["caller", "helper", "anywhere"])
def test_the_error_of_one_call(where: str, four: None) -> None:
    caller = threading.get_ident()
    state = {"working": 0, "done": 0}
    lock, met = threading.Lock(), threading.Barrier(4)

    def work(k: int) -> None:
        with lock:
            state["working"] += 1
        try:
            if k < 4:
                met.wait(5)
            if k == 3 if where == "anywhere" else k < 4 and (threading.get_ident() == caller) == (where == "caller"):
                raise LookupError("of one")
            time.sleep(0.02)
        finally:
            with lock:
                state["working"] -= 1
                state["done"] += 1

    for _ in range(3):
        with pytest.raises(LookupError, match="of one"):
            each(work, 1000)
        assert state["working"] == 0  # no helper is working
        assert state["done"] < 40
        state["done"] = 0
        time.sleep(0.03)
        assert state["done"] == 0
        done: list[int] = []
        each(done.append, 9)
        assert sorted(done) == list(range(9))


def test_the_first_of_two_errors_is_the_callers(four: None) -> None:
    caller, met, failed = threading.get_ident(), threading.Barrier(2), threading.Event()

    def work(k: int) -> None:
        met.wait(5)
        if threading.get_ident() == caller:
            threading.Timer(0.02, failed.set).start()
            raise KeyError("first")
        failed.wait(5)
        raise ValueError("second")

    with pytest.raises(KeyError, match="first"):
        each(work, 2, threads=2)


def test_the_first_of_two_errors_is_a_helpers(four: None) -> None:
    caller, met, failed = threading.get_ident(), threading.Barrier(2), threading.Event()

    def work(k: int) -> None:
        met.wait(5)
        if threading.get_ident() == caller:
            failed.wait(5)
            raise ValueError("second")
        threading.Timer(0.02, failed.set).start()
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        each(work, 2, threads=2)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, MemoryError, Warning])
@pytest.mark.parametrize("threads", [1, 2])
def test_errors_of_every_kind(kind: type[BaseException], threads: int, four: None) -> None:
    caller, met = threading.get_ident(), threading.Barrier(threads)

    def work(k: int) -> None:
        met.wait(5)
        if threads == 1 or threading.get_ident() != caller:
            raise kind("this")

    with pytest.raises(kind, match="this"):
        each(work, threads, threads=threads)


class Truthless(Exception):
    def __bool__(self) -> bool:
        return False


def test_falsy_errors_are_raised(four: None) -> None:
    caller, met = threading.get_ident(), threading.Barrier(4)

    def work(k: int) -> None:
        met.wait(5)
        if threading.get_ident() != caller:
            raise Truthless

    with pytest.raises(Truthless):
        each(work, 4)


def test_arrays_are_not_kept_alive(four: None) -> None:
    """Neither threads that wait for work nor errors keep arrays alive."""
    gc.collect()
    gc.disable()
    try:
        for fails in (False, True):
            held, seen = np.zeros(10), np.zeros(10)
            refs = [weakref.ref(held), weakref.ref(seen)]

            def work(k: int, held: Any = held, fails: bool = fails) -> None:
                time.sleep(0.001)
                if fails and k > 2:
                    raise LookupError(held.size)

            context = contextvars.copy_context()
            context.run(STYLE.set, seen)
            with pytest.raises(LookupError) if fails else contextlib.nullcontext():
                context.run(each, work, 12)
            del held, seen, work, context
            deadline = time.perf_counter() + 2
            while any(ref() is not None for ref in refs) and time.perf_counter() < deadline:
                time.sleep(0.001)
                if not getattr(sys, "_is_gil_enabled", lambda: True)():
                    each(lambda k: time.sleep(0.001), 12)  # A thread frees the errors that it made when it runs again.
            assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


def test_each_in_each(four: None) -> None:
    done: Counter[tuple[int, int, int]] = Counter()
    lock = threading.Lock()

    def leaf(i: int, j: int, k: int) -> None:
        with lock:
            done[i, j, k] += 1

    in_time(lambda: beside(lambda: each(lambda i: each(lambda j: each(lambda k: leaf(i, j, k), 5), 6), 7)))
    each(lambda i: each(lambda j: each(lambda k: leaf(i, j, k), 5), 6), 7)
    assert done == dict.fromkeys(itertools.product(range(7), range(6), range(5)), 2)

    def fails(i: int, j: int) -> None:
        if (i, j) == (3, 2):
            raise LookupError("inner")

    with pytest.raises(LookupError, match="inner"):
        each(lambda i: each(lambda j: fails(i, j), 4), 50)


def test_each_in_many_threads(four: None) -> None:
    def run(number: int) -> list[int]:
        random_ = random.Random(number)
        wrong = []
        for turn in range(40):
            count, done = random_.randrange(12), list[int]()
            if random_.random() < 0.2:

                def work(k: int, number: int = number) -> None:
                    raise LookupError(number)

                try:
                    each(work, count)
                except LookupError as error:
                    if error.args != (number,):
                        wrong.append(turn)
            else:
                each(done.append, count)
                if sorted(done) != list(range(count)):
                    wrong.append(turn)
        return wrong

    assert beside(*[functools.partial(run, n) for n in range(8)], seconds=60) == [[]] * 8


def test_operators_in_many_threads(four: None) -> None:
    x = np.arange(float(LARGE))

    def run(number: int) -> bool:
        tensor = st.asarray(x)
        right = True
        for _ in range(4):
            tensor = tensor + number
            right &= float(st.max(tensor)) == LARGE - 1 + number
            tensor -= number
        return right and np.array_equal(np.asarray(tensor), x)

    assert beside(*[functools.partial(run, n) for n in range(6)], seconds=60) == [True] * 6


def test_each_in_programs(four: None) -> None:
    def program(x: Any) -> Any:
        done: list[int] = []
        each(lambda k: done.append(k), 20)
        x = st.psum(x + len(done), "i")
        y = x + st.ones(LARGE)
        return st.sum(y)

    made = in_time(lambda: st.pmap(program, [np.full(1, float(k)) for k in range(6)], axis_name="i"), 60)
    assert [float(m) for m in made] == [(15 + 120 + 1.0) * LARGE] * 6


def test_a_collective_is_divided_over_threads_while_those_of_the_map_wait(four: None) -> None:
    in_programs, in_sum = threading.Barrier(4), threading.Barrier(4)

    def work(contributions: list[Any]) -> Sequence[Any]:
        each(lambda k: in_sum.wait(5), 4)
        return [sum(contributions)] * 8

    call = CollectiveCall("a sum", "key", 8, work)

    def task(program: Any) -> Any:
        if program.number < 4:
            in_programs.wait(5)  # Each thread has one of these programs.
        return program.meet(call, program.number, 1)

    assert in_time(lambda: run([task] * 8, list("01234567"), helper_delay=0.0), 20) == [8] * 8


def test_helpers_run_in_a_copy_of_the_callers_context(four: None) -> None:
    STYLE.set("caller's")
    met = threading.Barrier(4)
    seen: list[Any] = []

    def work(k: int) -> None:
        met.wait(5)
        seen.append((STYLE.get(), np.geterr()["over"], st.num_threads(), len({*np.geterr().values()})))
        STYLE.set(f"mine {k}")  # which stays here

    with np.errstate(all="raise"), st.set_num_threads(4):
        each(work, 4)
        helpers = seen[:]
    assert helpers == [("caller's", "raise", 4, 1)] * 4
    STYLE.set("other")
    seen.clear()
    with np.errstate(over="print", under="raise"), st.set_num_threads(4):
        each(work, 4)
    assert [(style, mode) for style, mode, *_ in seen] == [("other", "print")] * 4


@pytest.mark.parametrize("mode", ["raise", "warn", "ignore", "call"])
def test_floating_point_errors_in_threads(mode: str, four: None) -> None:
    errors: list[Any] = []
    x, y = st.ones(LARGE), st.asarray(np.r_[np.ones(LARGE - 1), 0.0])
    with (
        np.errstate(divide=mode, call=lambda *error: errors.append(error)),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        if mode == "raise":
            with pytest.raises(FloatingPointError, match="divide by zero encountered in divide"):
                x / y
        else:
            assert np.isinf(np.asarray(x / y)[-1])
        assert np.geterr()["divide"] == mode
    assert [str(w.message) for w in heard] == ["divide by zero encountered in divide"] * (mode == "warn")
    assert errors == [("divide by zero", 1)] * (mode == "call")


def test_callers_do_not_wait_for_busy_helpers(four: None) -> None:
    gate, busy = threading.Event(), threading.Semaphore(0)

    def blocks(k: int) -> None:
        busy.release()
        gate.wait(20)

    other = threading.Thread(target=lambda: each(blocks, 4), daemon=True)
    other.start()
    try:
        for _ in range(4):
            assert busy.acquire(timeout=5)
        count = len([t for t in threading.enumerate() if t.name.startswith("shardtensor_")])
        blocked = threading.Thread(target=lambda: each(blocks, 4, threads=count), daemon=True)  # of those left over
        blocked.start()
        time.sleep(0.05)
        with within(5):
            seen: list[int] = []
            each(lambda k: seen.append(threading.get_ident()), 30)
            assert len(seen) == 30
            with pytest.raises(LookupError):
                each(lambda k: {}[k], 5)
            assert float(st.sum(st.ones(LARGE) + 1)) == 2 * LARGE
    finally:
        gate.set()
        other.join(5)
        blocked.join(5)


def test_idle_helpers_use_no_processor_time(four: None) -> None:
    each(lambda k: time.sleep(0.001), 12)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.2 * fixed_loop()


def test_fork_with_helper_threads() -> None:
    turns = drawn(6, fast=3)
    output = scripted(
        f"        TURNS = {turns}"
        """
        import threading
        from shardtensor.host import threads
        from shardtensor.host.blas_threads import Limit

        def works(turns):
            met = threading.Barrier(4)
            threads.each(lambda k: met.wait(10), 4)
            for _ in range(turns):
                assert float(st.sum(st.ones(1 << 20) + 1)) == 2 << 20
            y = st.ones((300, 300))
            assert float((y @ y)[1, 2]) == 300
            return st.pmap(lambda x: st.psum(x, "i"), [np.ones(2)] * 8, axis_name="i")[3].tolist() == [8.0] * 2

        st.set_num_threads(4)
        assert works(2)
        end = threading.Event()
        def busy():
            while not end.is_set():
                threads.each(lambda k: end.wait(0.001), 8)
        others = [threading.Thread(target=busy) for _ in range(2)]
        for thread in others: thread.start()
        codes = []
        for turn in range(TURNS):
            if not (child := os.fork()):
                assert st.num_threads() == 4
                ok = works(1)
                if not (grandchild := os.fork()):
                    os._exit(0 if works(1) else 1)
                os._exit(0 if ok and os.waitpid(grandchild, 0)[1] == 0 else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        end.set()
        for thread in others: thread.join()
        print(codes, works(1))
        """
    )  # fmt: skip
    assert output == f"{[0] * turns} True\n"


def test_fork_inside_of_each() -> None:
    """A helper thread forks: its child has only this thread, and operators work in it."""
    output = scripted(
        """
        from shardtensor.host import threads
        st.set_num_threads(4)
        st.sum(st.ones(1 << 20) + 1)
        codes = []
        def work(k):
            if not (child := os.fork()):
                done = []
                threads.each(done.append, 9)
                os._exit(0 if sorted(done) == list(range(9)) and float(st.sum(st.ones(1 << 20) + 1)) == 2 << 20 else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        threads.each(work, 6)
        print(codes)
        """
    )
    assert output == f"{[0] * 6}\n"


ENDS = {
    "helpers wait": "threads.each(lambda k: time.sleep(0.01), 8)",
    "an operator was the last": "x = st.ones(1 << 20) + 1",
    "an error was the last": "try: threads.each(lambda k: {}[k], 8)\nexcept KeyError: pass",
    "a daemon works": "threading.Thread(target=forever, args=(lambda: st.ones(1 << 20) + 1,), daemon=True).start()\ntime.sleep(0.2)",
    "a daemon has short work": "threading.Thread(target=forever, args=(lambda: threads.each(lambda k: None, 8),), daemon=True).start()\ntime.sleep(0.2)",
    "an operator at exit": "import atexit\natexit.register(lambda: (st.ones((500, 500)) + 1) @ st.ones((500, 500)))",
    "an operator after the last": "y = st.ones((500, 500))\nclass Last:\n    def __del__(self):\n        assert sys.is_finalizing()\n        st.sum(y @ y + 1)\n        print('done')\nst.sum(y @ y + 1)\nlast = Last()",
    "the first one after the last": "y = st.ones((500, 500))\nclass Last:\n    def __del__(self):\n        st.matmul(y, y)\n        print('done')\nlast = Last()",
    "a daemon sleeps": "threading.Thread(target=lambda: threads.each(lambda k: time.sleep(30), 8), daemon=True).start()\ntime.sleep(0.2)",
}  # fmt: skip


@pytest.mark.parametrize("name", list(ENDS))
def test_the_end_of_the_interpreter(name: str) -> None:
    head = "import gc, sys, time, threading\ngc.unfreeze()\nbegan = time.perf_counter()\nimport os, shardtensor as st\nfrom shardtensor.host import threads\n"
    head += "def forever(call):\n    while True: call()\nst.set_num_threads(5)\n"
    began = time.perf_counter()
    done = run_script(f"{head}{ENDS[name]}\nprint(time.perf_counter() - began)", **VARIABLES)
    wall = time.perf_counter() - began
    assert (done.returncode, done.stderr) == (0, "")
    seconds, *rest = done.stdout.split()
    assert wall - float(seconds) < 10
    assert rest == ["done"] * ("last" in name and "after" in name)


AT_EXIT = """
import atexit, concurrent.futures, sys, threading, time

def works(when):
    total = st.pmap(lambda a: (time.sleep(1e-3), st.psum(a, "i"))[1], [1, 2, 3], axis_name="i")
    print(when, total, float(st.sum(x + 1)), flush=True)

atexit.register(works, "before the import,")
import shardtensor as st
st.set_num_threads(3)
x = st.ones(1 << 20)
atexit.register(works, "before the first map,")
works("now,")
atexit.register(works, "after it,")
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.05), works("in a pool,")))
"""


def test_operators_and_maps_at_exit() -> None:
    """Functions at exit work in any order of registration, also after the threads have been closed."""
    done = new_process(*OPTIONS, "-c", AT_EXIT, seconds=60, **VARIABLES | {"SHARDTENSOR_NUM_DEVICES": "3"})
    assert (done.returncode, done.stderr) == (0, "")
    order = ["now", "in a pool", "after it", "before the first map", "before the import"]
    assert done.stdout.splitlines() == [f"{when}, [6, 6, 6] 2097152.0" for when in order]


def test_a_map_while_the_interpreter_ends() -> None:
    script = "import gc\ngc.unfreeze()\nclass Last:\n    def __del__(self):\n        try: st.pmap(lambda a: a, [1, 2])\n        except st.BackendError as error: print(error)\n"
    script += "import shardtensor as st\nst.pmap(lambda a: a, [1, 2])\nlast = Last()"
    done = run_script(script, **VARIABLES)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a map was called while the interpreter ends" in done.stdout


def test_helpers_end_before_the_interpreter() -> None:
    script = "import atexit, threading\natexit.register(lambda: print(threading.active_count()))\n"
    script += "import shardtensor as st\nfrom shardtensor.host import threads\nst.set_num_threads(4)\n"
    script += "for _ in range(2):\n    threads.each(lambda k: None, 8)\n    print(threading.active_count())\n    threads._pool.dissolve()\n"
    script += "    print(threading.active_count())\nthreads.each(lambda k: None, 8)\n"
    done = new_process("-W", "error", "-c", script, seconds=60, **VARIABLES)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["4", "1", "4", "1", "1"]


# -- BLAS ------------------------------------------------------------------------------------------


class Library:
    """A stand-in for a library that threadpoolctl has found."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0

    def get_num_threads(self) -> int:
        return self.number

    def set_num_threads(self, number: int) -> None:
        self.calls += 1
        time.sleep(0)
        self.number = number


def controls(*libraries: Library) -> Any:
    return [(library.get_num_threads, library.set_num_threads) for library in libraries]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> tuple[Library, Library]:
    """Two, with six and two threads."""
    both = Library(6), Library(2)
    shares = blas_threads._Shares()
    shares._libraries = controls(*both)
    monkeypatch.setattr(blas_threads, "_shares", shares)
    return both


@hypothesis.given(data=some.data())
def test_the_lowest_limit_applies(data: Any) -> None:
    both = Library(6), Library(2)
    before, blas_threads._shares = blas_threads._shares, blas_threads._Shares()
    blas_threads._shares._libraries = controls(*both)
    wanted: list[tuple[int, Limit]] = []
    try:
        for _ in range(data.draw(some.integers(0, 12))):
            if wanted and data.draw(some.booleans()):
                wanted.pop(data.draw(some.integers(0, len(wanted) - 1)))[1].__exit__(None)
            else:
                number = data.draw(some.integers(1, 9))
                limit = Limit(number)
                limit.__enter__()
                wanted.append((number, limit))
            least = min([n for n, _ in wanted], default=99)
            assert [b.number for b in both] == [min(6, least), min(2, least)]
        while wanted:
            wanted.pop()[1].__exit__(None)
        assert [b.number for b in both] == [6, 2]
    finally:
        blas_threads._shares = before


def test_limits_of_threads(libraries: tuple[Library, Library]) -> None:
    high: list[int] = []

    def run(seed: int) -> None:
        random_ = random.Random(seed)
        for _ in range(60):
            number = random_.randint(1, 5)
            with contextlib.suppress(LookupError), Limit(number):
                high.extend([b.number for b in libraries if b.number > number])
                time.sleep(random_.choice([0, 1e-4]))
                with Limit(number + 1):
                    high.extend([b.number for b in libraries if b.number > number])
                if random_.random() < 0.3:
                    raise LookupError

    beside(*[functools.partial(run, n) for n in range(8)], seconds=60)
    assert not high
    assert [b.number for b in libraries] == [6, 2]
    assert blas_threads._shares._wanted == []


def blas_thread_counts() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


@pytest.fixture
def three_in_blas() -> Iterator[None]:
    with threadpool_limits(3, "blas"):
        assert blas_thread_counts() == {3}
        yield
        assert blas_thread_counts() == {3}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[int]]]:
    """The thread of each product of matrices that is computed, and how many BLAS may use meanwhile."""
    found: list[tuple[int, set[int]]] = []
    matmul = np.matmul

    @functools.wraps(matmul)
    def watched(*args: Any, **options: Any) -> Any:
        if args[0].size > 1:  # otherwise the dtype is inferred
            found.append((threading.get_ident(), blas_thread_counts()))
        return matmul(*args, **options)

    monkeypatch.setattr(np, "matmul", watched)
    monkeypatch.setattr(blocked_reduction, "_FACTORS", (64, 64, 1 << 26))
    plan_cache._cached_plan.cache_clear()
    yield found
    plan_cache._cached_plan.cache_clear()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_kernels_of_algorithms_share_the_cores(
    threads: int, three_in_blas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BLAS has so many threads in each kernel that all have as many as there are cores."""
    factorize, found = np.linalg.qr, set[int]()

    @functools.wraps(factorize)
    def watched(*args: Any, **options: Any) -> Any:
        found.update(blas_thread_counts())
        return factorize(*args, **options)

    monkeypatch.setattr(np.linalg, "qr", watched)
    x = np.random.default_rng(0).random((1 << 16, 16))
    with st.set_num_threads(threads):
        q, r = st.linalg.qr(st.asarray(x, device=st.make_mesh((4,), ("x",))))
    assert found == {max(threads // 4, 1)}
    np.testing.assert_allclose(np.asarray(q @ r), x, atol=1e-12)
    assert blas_thread_counts() == {3}


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_products_have_one_thread_of_blas_in_each(threads: int, products: list[Any], three_in_blas: None) -> None:
    x = np.arange(300.0 * 300).reshape(300, 300)
    with st.set_num_threads(threads):
        made = np.asarray(st.asarray(x) @ st.asarray(x))
    assert len(products) >= 25
    assert {tuple(numbers) for _, numbers in products} == {(1,)}
    assert len({thread for thread, _ in products}) <= threads
    np.testing.assert_allclose(made, x @ x, rtol=1e-12)
    assert blas_thread_counts() == {3}


def test_the_number_of_blas_threads_is_restored_after_errors(
    three_in_blas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = st.ones((300, 300))
    x @ x

    def fails(*args: Any, **options: Any) -> Any:
        raise LookupError

    for count in (1, 4):
        with monkeypatch.context() as patch, st.set_num_threads(count):
            patch.setattr(np, "matmul", fails)
            with pytest.raises(LookupError):
                x @ x
        assert blas_thread_counts() == {3}
        assert blas_threads._shares._wanted == []
    assert float((x @ x)[0, 0]) == 300


def test_maps_and_products_restore_the_number_of_blas_threads(three_in_blas: None, four: None) -> None:
    def program(x: Any) -> Any:
        return st.psum(st.ones((300, 300)) @ np.full((300, 300), x), "i")

    made = in_time(lambda: st.pmap(program, [np.float64(k) for k in range(4)], axis_name="i"), 30)
    assert float(np.asarray(made[0])[0, 0]) == 1800
    assert blas_thread_counts() == {3}
    with pytest.raises(LookupError):
        st.pmap(lambda x: {}[x], [1, 2, 3])
    assert blas_thread_counts() == {3}


def test_limits_of_users_are_respected(products: list[Any]) -> None:
    x = st.ones((300, 300))
    before = blas_thread_counts()
    with threadpool_limits(2, "blas"):
        x @ x
        assert blas_thread_counts() == {2}
        with threadpool_limits(1, "blas"):
            x @ x
            assert blas_thread_counts() == {1}
        x @ x
        assert blas_thread_counts() == {2}
    assert blas_thread_counts() == before
    assert {tuple(numbers) for _, numbers in products} == {(1,)}


def test_limits_overlap_in_threads(three_in_blas: None, four: None) -> None:
    x = st.ones((300, 300))
    beside(*[lambda: [x @ x for _ in range(10)]] * 4, seconds=60)
    assert blas_thread_counts() == {3}
    assert blas_threads._shares._wanted == []


def test_fork_inside_of_a_limit() -> None:
    output = scripted(
        """
        from shardtensor.host.blas_threads import Limit
        from threadpoolctl import threadpool_info, threadpool_limits
        threads = lambda: [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]
        with threadpool_limits(3, "blas"):
            with Limit(1):
                if not (child := os.fork()):
                    with Limit(2):
                        pass
                    print(threads(), flush=True)
                    os._exit(0)
                os.waitpid(child, 0)
            print(threads())
        """
    )
    assert output == "[3]\n[3]\n"


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes many small blocks, each of which takes some hundredths of a second."""
    plan_cache._cached_plan.cache_clear()
    monkeypatch.setattr(blockwise, "_BLOCK", 1 << 12)
    monkeypatch.setattr(blockwise, "_LEAST", 1 << 12)
    monkeypatch.setattr(blockwise, "LONG", 1e-9)
    monkeypatch.setattr(blocked_reduction, "LONG", 1e-9)
    monkeypatch.setattr(blocked_reduction, "_BLOCK", 1 << 12)
    monkeypatch.setattr(blocked_reduction, "_FACTORS", (32, 32, 1 << 26))
    monkeypatch.setattr(blocked_reduction, "_BLAS_ALONE", 1 << 12)
    for module in (memory_pool, strategies):
        monkeypatch.setattr(module, "POOLED_FROM", 1 << 12)
    yield
    plan_cache._cached_plan.cache_clear()


def slowed(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float = 0.03) -> list[int]:
    """Slows a function of NumPy down. Returns a list that grows by one item with each call."""
    function, calls = getattr(np, name), list[int]()

    def slow(*args: Any, **options: Any) -> Any:
        calls.append(threading.get_ident())
        time.sleep(seconds)
        return function(*args, **options)

    slow.__name__ = name
    monkeypatch.setattr(np, name, slow)
    plan_cache._cached_plan.cache_clear()
    return calls


def interrupted(call: Callable[[], Any], after: float = 0.1, calls: Sequence[int] | None = None) -> float | None:
    """Sends SIGINT some time after a call has begun, or, for a `slowed` function, after the second of its ``calls``.
    Returns the seconds until the interrupt was raised; None if nothing was raised.
    """
    pressed: list[float] = []
    ended, over = threading.Event(), threading.Event()

    def press() -> None:
        while calls is not None and len(calls) < 2 and not ended.is_set():
            time.sleep(1e-3)
        if not over.wait(after):
            pressed.append(time.perf_counter())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    handler = signal.getsignal(signal.SIGINT)
    gc.disable()  # what is raised in callbacks of weak references is lost
    try:
        presser.start()
        call()
        ended.set()
        presser.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        return time.perf_counter() - pressed[0]
    finally:
        over.set()
        presser.join()
        gc.enable()
        assert signal.getsignal(signal.SIGINT) is handler
    return None


def all_is_well() -> None:
    """Asserts that no helper thread is working, BLAS is not limited, the floating-point error state is restored, and
    operators work.
    """
    met = threading.Barrier(3)
    with st.set_num_threads(3):
        in_time(lambda: each(lambda k: met.wait(5), 3))
    assert blas_threads._shares._wanted == []
    assert np.geterr() == MODES
    assert (np.asarray(st.ones(50_000) + 1) == 2).all()
    assert float(st.sum(st.ones(50_000))) == 50_000


MODES = np.geterr()
SIZE = 60_000
LONG: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sin": lambda x, y: st.sin(x),
    "sum": lambda x, y: st.sum(x),
    "max": lambda x, y: st.max(x),
    "matmul": lambda x, y: st.reshape(x, (300, 200)) @ st.reshape(y, (200, 300)),
    "where": lambda x, y: st.where(x > 5, x, y),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", LONG)
def test_ctrl_c_in_long_operators(name: str, threads: int, blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = st.asarray(np.arange(float(SIZE))), st.asarray(np.arange(float(SIZE)))
    wanted = np.array(LONG[name](x, y))
    with monkeypatch.context() as patch, st.set_num_threads(threads):
        calls = slowed(patch, name, 0.05)
        result: Any = "nothing"

        def call() -> None:
            nonlocal result
            result = LONG[name](x, y)

        took = interrupted(call, 0.05, calls)
        assert took is not None
        assert took < 2
        assert result == "nothing"
        count = len(calls)
        assert 2 <= count <= 9 * threads
        time.sleep(0.06)
        assert len(calls) == count
    plan_cache._cached_plan.cache_clear()
    np.testing.assert_array_equal(np.asarray(x), np.arange(float(SIZE)))
    np.testing.assert_array_equal(np.asarray(y), np.arange(float(SIZE)))
    np.testing.assert_array_equal(np.asarray(LONG[name](x, y)), wanted)
    all_is_well()


REAL: dict[str, Callable[[], Callable[[], Any]]] = {
    "pow": lambda: functools.partial(st.pow, *[st.asarray(np.full(1 << 23, 1.5 + 2j))] * 2),
    "matmul": lambda: functools.partial(st.matmul, *[st.ones((2600, 2600))] * 2),
    "matmul of integers": lambda: lambda: st.ones((1024, 4096), dtype="int64") @ np.ones((4096, 512), np.int64),
    "add": lambda: functools.partial(repeated, functools.partial(st.add, *[st.ones(1 << 22)] * 2)),
    "sum": lambda: functools.partial(repeated, functools.partial(st.sum, st.ones(1 << 23))),
}


def repeated(call: Callable[[], Any]) -> None:
    end = time.perf_counter() + 3
    while time.perf_counter() < end:
        call()


@pytest.mark.parametrize("threads", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", REAL)
def test_ctrl_c_at_real_sizes(name: str, threads: int) -> None:
    shortest = math.inf
    for _ in range(3):  # what another process takes of the CPU adds to one of the times
        with st.set_num_threads(threads):
            took = interrupted(REAL[name]())
        assert took is not None
        shortest = min(shortest, took)
        all_is_well()
        if shortest < 0.5:
            break
    assert shortest < 0.5


UPDATES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("add", lambda x, y: x.__iadd__(y)),
    "into": ("add", lambda x, y: ADD(y, y, out=x)),
    "part": ("add", lambda x, y: x[5000:].__iadd__(y[5000:])),
    "assign": ("copyto", lambda x, y: x.__setitem__(slice(None), y)),
    "assign part": ("copyto", lambda x, y: x.__setitem__(slice(7, 50_000), y[9 : 50_000 + 2])),
    "assign number": ("copyto", lambda x, y: x.__setitem__(slice(7, 50_000), 3.0)),
}
ADD = np.add


@pytest.mark.parametrize("exclusive", [True, False], ids=["exclusive", "shared"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", UPDATES)
def test_ctrl_c_in_writes(
    name: str, threads: int, exclusive: bool, blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, write = UPDATES[name]
    old = np.arange(float(SIZE))
    x, y = st.asarray(old) * 1, st.asarray(old[::-1].copy())
    export = None if exclusive else np.asarray(x)
    new = old.copy()
    write(new, old[::-1].copy())
    with monkeypatch.context() as patch, st.set_num_threads(threads):
        calls = slowed(patch, slow, 0.015)
        took = interrupted(lambda: write(x, y), 0.01, calls)
    plan_cache._cached_plan.cache_clear()
    assert calls
    assert took is not None
    found = np.asarray(x)
    assert np.array_equal(found, old) or np.array_equal(found, new)
    if exclusive:
        np.testing.assert_array_equal(found, new)
    else:
        np.testing.assert_array_equal(export, old)
    np.testing.assert_array_equal(np.asarray(y), old[::-1])
    del found, export
    x[...] = y
    np.testing.assert_array_equal(np.asarray(x), old[::-1])
    all_is_well()


@contextlib.contextmanager
def handled(handler: Any) -> Iterator[None]:
    """Installs a handler of SIGINT for the duration of a context."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        now = signal.signal(signal.SIGINT, before)
        assert now == handler


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", LONG)
def test_handlers_that_do_not_raise(name: str, threads: int, blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = st.asarray(np.arange(float(SIZE))), st.asarray(np.arange(float(SIZE)))
    wanted, heard = np.array(LONG[name](x, y)), list[tuple[int, bool]]()
    with (
        monkeypatch.context() as patch,
        handled(lambda number, frame: heard.append((number, True))),
        st.set_num_threads(threads),
    ):
        calls = slowed(patch, name, 0.005)
        found: list[Any] = []
        assert interrupted(lambda: found.append(LONG[name](x, y)), 0.01, calls) is None
    plan_cache._cached_plan.cache_clear()
    np.testing.assert_array_equal(np.asarray(found[0]), wanted)
    assert heard == [(signal.SIGINT, True)]
    all_is_well()


def test_an_error_while_handlers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals that were deferred before the error are handled at once, and not inside the next context."""
    replace = signals._set_handler

    def interrupted(number: int, handler: Any) -> None:
        if number == signal.SIGALRM and signal.getsignal(number) is late:  # SIGINT is deferred already.
            signal.raise_signal(signal.SIGALRM)
        replace(number, handler)

    def late(number: int, frame: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(signals, "_set_handler", interrupted)
            with pytest.raises(KeyboardInterrupt), signals.Interrupts():
                pass
        assert not signals.missed
        assert signal.getsignal(signal.SIGALRM) is late
    finally:
        signal.signal(signal.SIGALRM, before)
    all_is_well()


def test_signals_without_handlers(four: None) -> None:
    done: list[int] = []

    def work(k: int) -> None:
        if k == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.002)
        done.append(k)

    with handled(signal.SIG_IGN):
        each(work, 12)
    assert sorted(done) == list(range(12))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, Late)])
def test_signals_are_deferred_to_the_end(threads: int, number: int, error: type[BaseException], late: None) -> None:
    done: list[int] = []

    def work(k: int) -> None:
        if k == 3:
            signal.raise_signal(number)
        time.sleep(0.002)
        done.append(k)

    handler = signal.getsignal(number)
    with pytest.raises(error), st.set_num_threads(threads):
        each(work, 40, breaks=False)
    assert sorted(done) == list(range(40))
    done.clear()
    with pytest.raises(error), st.set_num_threads(threads):
        each(work, 40)
    assert 3 in done
    assert len(done) < 15
    assert signal.getsignal(number) is handler
    all_is_well()


def test_deferred_signals_run_in_order_and_once(four: None, late: None) -> None:
    """Signals of several numbers are handled in order; several signals of one number count once, as in the kernel."""
    heard: list[Any] = []

    def note(number: int, frame: Any) -> None:
        heard.append((number, frame.f_code.co_filename))

    with handled(note):
        signal.signal(signal.SIGUSR1, note)
        try:
            with signals.Interrupts() as held:
                for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1):
                    signal.raise_signal(number)
                assert heard == []
                held.deliver()
                assert [number for number, _ in heard] == [signal.SIGUSR1, signal.SIGINT]
                assert {name for _, name in heard} == {__file__}
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGALRM)
                with pytest.raises(Late):
                    held.deliver()
                signal.raise_signal(signal.SIGUSR1)
            assert [number for number, _ in heard[2:]] == [signal.SIGINT, signal.SIGUSR1]
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_handlers_set_by_handlers_are_deferred_and_kept() -> None:
    """An example is a first Ctrl-C whose handler asks for a second one."""

    def first(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, first)
    done: list[int] = []
    try:
        with pytest.raises(KeyboardInterrupt), signals.Interrupts() as held:  # noqa: PT012 - it comes at the end
            signal.raise_signal(signal.SIGINT)
            held.deliver()
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_saved_wrapper_of_a_handler_works_later(late: None) -> None:
    with signals.Interrupts():
        saved = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    signal.signal(signal.SIGALRM, saved)
    with pytest.raises(Late):
        signal.raise_signal(signal.SIGALRM)
    with signals.Interrupts() as held:
        signal.raise_signal(signal.SIGALRM)
        with pytest.raises(Late):
            held.deliver()


def test_contexts_end_in_any_order(late: None) -> None:
    """The contexts of greenlets end in any order."""
    first, second = signals.Interrupts(), signals.Interrupts()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    signal.raise_signal(signal.SIGALRM)
    with pytest.raises(Late):
        second.__exit__()
    with pytest.raises(Late):
        signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("threads", [1, 3])
def test_ctrl_c_in_each_in_each(threads: int) -> None:
    done: list[tuple[int, int]] = []

    def work(i: int, j: int) -> None:
        if (i, j) == (1, 1):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.004)  # the caller's thread hears it, also on a busy machine
        done.append((i, j))

    def run(**options: bool) -> None:
        done.clear()
        with pytest.raises(KeyboardInterrupt), st.set_num_threads(threads):
            each(lambda i: each(lambda j: work(i, j), 6, **options), 8, **options)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    run()
    assert len(done) < 40
    run(breaks=False)
    assert sorted(done) == list(itertools.product(range(8), range(6)))
    all_is_well()


AROUND: dict[str, Callable[[Callable[[], None]], Any]] = {
    "each": lambda call: call(),
    "each in each": lambda call: each(lambda k: call(), 1),
    "each in a map": lambda call: st.pmap(lambda x: call(), [1]),
}


@pytest.mark.parametrize("name", AROUND)
def test_signals_between_the_calls_of_the_caller(name: str, four: None, late: None) -> None:
    """The handler runs although the call in the helper thread does not end before it has run."""
    started, handled, ended = threading.Barrier(2), threading.Event(), list[bool]()

    def handler(number: int, frame: Any) -> None:
        handled.set()
        raise Late

    def work(k: int) -> None:
        if k < 2:
            started.wait(5)
        if threading.current_thread() is threading.main_thread():
            time.sleep(1e-3)  # ten seconds in all
        elif k < 2:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            ended.append(handled.wait(5))

    signal.signal(signal.SIGALRM, handler)
    with pytest.raises(Late):
        AROUND[name](lambda: each(work, 10_000, threads=2))
    assert ended == [True]
    all_is_well()


def test_ctrl_c_does_not_reach_callers_in_other_threads(four: None) -> None:
    done: list[int] = []
    both = threading.Barrier(2)

    def other() -> None:
        both.wait(5)
        each(lambda k: (time.sleep(0.002), done.append(k)), 60)

    thread = threading.Thread(target=other)
    thread.start()
    assert interrupted(lambda: (both.wait(5), time.sleep(1)), 0.03) is not None
    thread.join()
    assert sorted(done) == list(range(60))


def test_handlers_set_meanwhile_are_kept(four: None) -> None:
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    def work(k: int) -> None:
        if k == 2:
            signal.signal(signal.SIGINT, mine)
        if k == 4:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    try:
        each(work, 6, threads=1)
        assert signal.getsignal(signal.SIGINT) is mine
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_an_operator_in_a_map(blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [np.arange(float(SIZE))] * 3
    with monkeypatch.context() as patch:
        calls = slowed(patch, "add", 0.05)
        took = interrupted(lambda: st.pmap(lambda x: st.psum(x + x, "i"), items, axis_name="i"), calls=calls)
    plan_cache._cached_plan.cache_clear()
    assert took is not None
    assert took < 2
    made = in_time(lambda: st.pmap(lambda x: st.psum(x + x, "i"), items, axis_name="i"))
    np.testing.assert_array_equal(np.asarray(made[1]), np.arange(float(SIZE)) * 6)
    all_is_well()


def test_interrupts_between_two_contexts() -> None:
    """A signal between two contexts of `Interrupts` is raised immediately."""
    with signals.Interrupts() as held:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.deliver()
        held.deliver()  # once
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), signals.Interrupts():
        done.append(signal.raise_signal(signal.SIGINT) or 1)
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


ENGINE = [str(module.__file__) for module in (blas_threads, blocked_reduction, signals, blockwise, threads)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("name", "number"), [("add", 2), ("update", 2), ("product", 2), ("sum", 2), ("update", 14), ("product", 14)]
)
def test_signals_at_every_line(name: str, number: int, threads: int, blocks: None, late: None, four: None) -> None:
    x, y, m = st.ones(SIZE) + 0, st.ones(SIZE), st.ones((70, 70))
    calls = {
        "add": lambda: x + y, "update": lambda: ADD(x, y, out=x), "product": lambda: m @ m, "sum": lambda: st.sum(y),
    }  # fmt: skip
    calls[name]()  # plans are made
    handler, wrong = signal.getsignal(number), []
    gc.disable()
    try:
        for line in strided(range(1, 10_000), 3, len(name) + number // 2 + threads):
            with st.set_num_threads(threads):
                place = raised_at(line, ENGINE, calls[name], number)
            if not place:
                break
            found = {
                "errstate": np.geterr() != MODES,
                "limits": bool(blas_threads._shares._wanted),
                "lock": is_held(blas_threads._shares._lock),
                "handler": signal.getsignal(number) is not handler,
                "held": bool(signals._active or signals._held or signals.missed),
                "half": len(np.unique(np.asarray(x))) > 1,
            }
            wrong += [(what, place) for what, is_so in found.items() if is_so]
            np.seterr(**MODES)
            signal.signal(number, handler)
            if found["limits"] or found["lock"]:
                blas_threads._shares._set(sys.maxsize)
                blas_threads._shares = blas_threads._Shares()
    finally:
        gc.enable()
    assert line > 5
    all_is_well()
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("threads", [1, 3])
def test_ctrl_c_at_any_moment(threads: int) -> None:
    """Nothing hangs, and no value is written in part."""
    turns = drawn(400, fast=120)
    scripted(
        f"""
        import faulthandler, random, signal, sys, threading, time
        from shardtensor.host import blockwise, threads
        from shardtensor.interpreters.execution import blocked_reduction
        sys.unraisablehook = lambda *args: None  # the signal may come in the callback of a weak reference
        blockwise._BLOCK = blockwise._LEAST = 1 << 14
        blocked_reduction._FACTORS = (64, 64, 1 << 26)
        def alarm(number, frame):
            signal.raise_signal(signal.SIGINT)

        handler = signal.getsignal(signal.SIGINT)
        random.seed(1)
        st.set_num_threads({threads})
        x, y = st.ones(1 << 19) + 0, st.ones(1 << 19)
        m = st.ones((200, 200))

        def add():
            return x + y

        def update():
            global x
            x += y

        def product():
            return m @ m

        def total():
            return st.sum(st.sqrt(y))

        for call in (add, update, product, total):
            call()  # which imports
        hits = 0
        for turn in range({turns}):
            faulthandler.dump_traceback_later(20, exit=True)
            call = (add, update, product, total)[turn % 4]
            signal.signal(signal.SIGALRM, alarm)
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 2e-3))
                    call()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    # A signal that came while memory was freed comes once more.
                    while any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
                        time.sleep(1e-4)
                finally:  # The kernel may give the alarm to a helper thread, which reports it later.
                    signal.signal(signal.SIGALRM, signal.SIG_IGN)
            except KeyboardInterrupt:
                hits += 1
            here = np.asarray(x)
            assert here.min() == here.max(), turn
            del here
            assert signal.getsignal(signal.SIGINT) is handler, turn
        met = threading.Barrier({threads})
        threads.each(lambda k: met.wait(5), {threads})
        assert hits > {turns // 10}, hits
        """
    )
