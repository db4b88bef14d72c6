"""Forks beside other threads: no lock of the library is held in the child, and half-written tensors are errors."""

from __future__ import annotations

import os
import re
import textwrap

import pytest

from tests.draws import all_of_them
from tests.scripts import ROOT, VARIABLES, output_of, run_script

MADE = re.compile(
    r"\b(?:R?Lock|Condition|Event|(?:Bounded)?Semaphore|Barrier|(?:Simple|Lifo|Priority)?Queue|ThreadPoolExecutor|allocate_lock)\(|threading\.RLock\b"
    r"|functools\.cached_property"
)
NOT_LOCKS = re.compile(r"cuda\.Event\(|Queue\(self\._graphs|class |``|`")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.mark.parametrize("folder", ["shardtensor", "backends"])
def test_every_lock_has_an_answer(folder: str) -> None:
    unanswered = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != ROOT / "shardtensor/host/fork.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MADE.search(line) and "# fork:" not in line and not NOT_LOCKS.search(line)
    ]
    assert not unanswered, "use shardtensor.host.fork, or say why not in a comment `# fork: ...`"


HEAD = """
import faulthandler, functools, gc, os, signal, sys, threading, time, warnings
import numpy as np
import shardtensor as st
from shardtensor.host import fork
faulthandler.register(signal.SIGALRM, chain=True)  # a watchdog thread of faulthandler would itself hang in grandchildren
warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads are what is tested

def outcome(work, seconds=10):  # of a child that does some work; -SIGALRM, with all stacks, if it hangs
    if not (child := os.fork()):
        code = 1
        try:
            signal.alarm(seconds)
            code = work() or 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def beside(work):  # starts work(stop) in a thread, and waits until that calls stop; `stop` then waits for `end`
    there, end = threading.Event(), threading.Event()
    def stop():
        there.set()
        end.wait()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    assert there.wait(10)
    def finish():
        end.set()
        thread.join()
    return finish

def program():
    x = st.arange(24.0).reshape(4, 6)
    x[1:3] += 1
    assert float(x.sum()) == 288
    view = x[1]
    view[...] = 0
    assert np.asarray(x)[1].tolist() == [0] * 6
    assert np.from_dlpack(x.copy()).shape == (4, 6)
    assert st.jit(lambda a: a * 2 + 1)(st.ones(3)).tolist() == [3, 3, 3]
    assert st.pmap(lambda a: st.psum(a, "i"), [1, 2, 3], axis_name="i") == [6, 6, 6]
    assert float((st.ones((20, 20)) @ st.ones((20, 20)))[3, 4]) == 20
    assert st.random.uniform(st.random.key(1), (9,)).shape == (9,)
    y = st.zeros(7, device=st.make_mesh((2,), ("c",), devices=st.devices("checked")[:2]))
    assert (y + 1).tolist() == [1] * 7

program()
"""


def scripted(text: str, seconds: float = 60) -> str:
    """Returns the output of a script in a process of its own: pytest's has threads, beside which it must not fork."""
    return output_of(run_script(HEAD + textwrap.dedent(text), seconds=seconds, **VARIABLES))


def test_no_lock_is_held_in_the_child() -> None:
    """Another thread holds every lock that exists; the child, and its child, run operators of all kinds."""
    output = scripted(
        """
        def hold(stop):
            held = list(fork._locks)
            for lock in held:
                lock.acquire()
            stop()
            for lock in held:
                lock.release()

        def deeper():
            program()
            return outcome(program)

        finish = beside(hold)
        print(len(fork._locks) > 10, outcome(deeper))
        finish()
        program()
        """
    )
    assert output == "True 0\n"


def test_the_forking_thread_keeps_its_locks() -> None:
    output = scripted(
        """
        lock = fork.lock()
        x = st.ones(8)
        x[0] = 2
        def child():
            assert fork.is_mine(lock)
            x[1] = 3
            lock.release()
            assert float(x.sum()) == 11
        with lock, x._write_state.lock:
            print(outcome(child))
        """
    )
    assert output == "0\n"


def test_a_half_written_tensor_is_an_error_in_the_child() -> None:
    """A write stops in its middle: of elements, of a view, and by an export; other tensors work in the child."""
    output = scripted(
        f"        STEP = {1 if all_of_them else 4}"
        """
        from shardtensor.host import blockwise
        from shardtensor.functions.interchange import dlpack_export
        from shardtensor.interpreters.writes import writes
        x, y = st.arange(8.0), st.arange(8.0)
        x[0] = y[0] = 1
        view = x[2:]
        real = writes.exclusive_arrays
        uses = (
            lambda: float(x.sum()), lambda: x.__setitem__(3, 1), lambda: x.__setitem__(..., 1), lambda: view.tolist(),
            lambda: view.__setitem__(0, 1), lambda: np.from_dlpack(x), lambda: x.copy(), lambda: x + y, lambda: x[3].item(),
            lambda: st.jit(lambda a: a + 1)(x), lambda: x.__iadd__(1),
        )
        def child(first):  # Each use is the first one in some child.
            for use in (first, *uses):
                try:
                    use()
                except st.ForkError as error:
                    assert "another thread was writing this tensor" in str(error)
                else:
                    raise AssertionError("no error")
            y[1] = 5
            assert float(y.sum()) == 33
        def last():
            child(uses[0])
            program()
        def write(stop, index, value):
            def stopping(*args):
                writes.exclusive_arrays = real
                stop()
                return real(*args)
            writes.exclusive_arrays = stopping
            x[index] = value
        for turn, (index, value) in enumerate(((0, 7), (slice(0, 8), np.ones(8)), (slice(0, 4), y[:4]), (x > 3, 0))):
            some = uses[turn % STEP :: STEP]
            finish = beside(functools.partial(write, index=index, value=value))
            print({outcome(work) for work in (last, *[functools.partial(child, use) for use in some])}, end=" ")
            finish()
            x.tolist()
        """
    )
    assert output == "{0} {0} {0} {0} "


def test_a_fork_in_a_write_of_the_forking_thread_continues_it() -> None:
    output = scripted(
        """
        from shardtensor.interpreters.writes import writes
        x, children, real = st.arange(8.0), [], writes.exclusive_arrays
        x[0] = 1
        def forking(*args):
            writes.exclusive_arrays = real
            children.append(os.fork())
            try:
                x.tolist()
            except st.ShardTensorError as error:
                assert "a write to a tensor reads the same tensor" in str(error)
            return real(*args)
        writes.exclusive_arrays = forking
        x[0:8] = np.ones(8)
        x[1] = 2
        assert float(x.sum()) == 9
        if not children[0]:
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
        """
    )
    assert output == "0\n"


def test_a_lock_of_a_tensor_that_is_not_being_written_is_free() -> None:
    output = scripted(
        """
        x = st.arange(8.0)
        x[0] = 1
        def hold(stop):
            with x._write_state.lock:
                stop()
        finish = beside(hold)
        def child():
            x[1] = 5
            assert x.tolist() == [1, 5, 2, 3, 4, 5, 6, 7]
        print(outcome(child))
        finish()
        """
    )
    assert output == "0\n"


def test_traces_and_cached_properties_of_other_threads() -> None:
    output = scripted(
        """
        @st.jit
        def traced(a):
            if threading.current_thread() is not threading.main_thread():
                stopped[0]()
            return a + 1
        class Slow:
            @fork.cached_property
            def value(self):
                if threading.current_thread() is not threading.main_thread():
                    stopped[0]()
                return 3
        slow, stopped = Slow(), [None]
        def run(work):
            def other(stop):
                stopped[0] = stop
                work()
            finish = beside(other)
            print(outcome(lambda: (work(), 0)[1]), end=" ")
            finish()
        run(lambda: traced(st.ones(3)))
        run(lambda: slow.value)
        """
    )
    assert output == "0 0 "


def test_a_fork_while_helper_threads_compute_is_an_error_in_the_child() -> None:
    output = scripted(
        """
        from shardtensor.host import threads
        st.set_num_threads(3)
        main, met, end = threading.main_thread(), threading.Barrier(2), threading.Event()
        child = []
        def work(k):
            if threading.current_thread() is main and not child:
                met.wait(10)
                child.append(os.fork())
                if not child[0]:
                    signal.alarm(10)
                end.set()
            elif not child:
                met.wait(10)
                end.wait(10)
        try:
            threads.each(work, 2)
            failed = False
        except st.ForkError:
            failed = True
        if not child[0]:
            program()
            os._exit(7 if failed else 1)
        print(failed, os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]))
        """
    )
    assert output == "False 7\n"


@pytest.mark.full
def test_many_forks_beside_random_work() -> None:
    output = scripted(
        """
        import random
        over, x = threading.Event(), st.arange(64.0)
        def busy(seed):
            chosen = random.Random(seed)
            actions = [
                lambda: x.__setitem__(chosen.randrange(64), 1), lambda: x.__setitem__(slice(3, 40), np.zeros(37)),
                lambda: np.asarray(x), lambda: np.from_dlpack(st.ones(9)), lambda: st.jit(lambda a: a + seed)(st.ones(4)),
                lambda: st.pmap(lambda a: st.psum(a, "i"), [1, 2], axis_name="i"), lambda: x.copy() + x[::-1],
                lambda: st.random.uniform(st.random.key(seed), (50,)), lambda: st.device_put(x, st.devices()[0]),
                lambda: x[1:9].__iadd__(1), lambda: st.ones((200, 200)) @ st.ones((200, 200)),
            ]
            for action in actions:
                action()
            ready.release()
            while not over.is_set():
                chosen.choice(actions)()
        ready = threading.Semaphore(0)
        threads = [threading.Thread(target=busy, args=(k,)) for k in range(4)]
        for thread in threads: thread.start()
        for thread in threads: ready.acquire()
        def child():
            program()
            try:
                x[0] = 1
                assert x.shape == np.asarray(x).shape
            except st.ForkError:
                pass
        try:
            codes = [outcome(child) for _ in range(200)]
        finally:
            over.set()
            for thread in threads: thread.join()
        print(set(codes))
        """,
        seconds=300,
    )
    assert output == "{0}\n"
