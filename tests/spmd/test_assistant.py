"""Functions that programs have called in threads beside them, from which they call collectives."""

from __future__ import annotations

import contextvars
import os
import threading
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import beside_program, current_device

COUNT = 4


def summed(x: Any) -> Any:
    return beside_program(lambda: st.psum(st.psum(x, "i") + x, "i"))


def test_the_program_makes_the_collective_calls() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    def fn(x: Any) -> Any:
        here, device = threading.current_thread(), current_device()
        variable.set(st.axis_index("i"))

        def beside() -> Any:
            assert threading.current_thread() is not here
            assert (current_device(), variable.get()) == (device, st.axis_index("i"))
            assert beside_program(threading.current_thread) is threading.current_thread()
            return st.psum(st.psum(x, "i") + x, "i")

        first, second = beside_program(beside), summed(x)
        assert first == second
        return first

    for threads in (1, 2):
        with st.set_num_threads(threads):
            found = st.pmap(fn, np.arange(float(COUNT)), axis_name="i")
        total = sum(range(COUNT))
        assert found.tolist() == [COUNT * total + total] * COUNT
    assert beside_program(threading.current_thread) is threading.current_thread()


def test_errors_pass_both_ways() -> None:
    def fails(x: Any) -> Any:
        def beside() -> Any:
            y = st.psum(x, "i")
            return 1 / 0 if st.axis_index("i") == 1 else st.psum(y, "i")

        return beside_program(beside)

    def differs(x: Any) -> Any:
        return beside_program(lambda: st.psum(x, "i") if st.axis_index("i") else st.pmax(x, "i"))

    for fn, error, match in ((fails, ZeroDivisionError, "division"), (differs, st.CollectiveError, "pmax")):
        with pytest.raises(error, match=match):
            st.pmap(fn, np.ones(COUNT), axis_name="i")
    assert st.pmap(summed, np.ones(COUNT), axis_name="i").tolist() == [COUNT * COUNT + COUNT] * COUNT


def test_other_threads_still_cannot_call_collectives() -> None:
    def fn(x: Any) -> Any:
        def beside() -> Any:
            caught: list[BaseException] = []

            def work() -> None:
                try:
                    st.psum(x, "i")
                except st.CollectiveError as error:
                    caught.append(error)

            other = threading.Thread(target=contextvars.copy_context().run, args=(work,))
            other.start()
            other.join()
            return caught

        assert len(beside_program(beside)) == 1

    st.pmap(fn, [1.0, 2.0], axis_name="i")


def test_threads_are_used_again_but_not_in_the_child_of_a_fork() -> None:
    st.pmap(summed, np.ones(COUNT), axis_name="i")
    before = threading.active_count()
    for _ in range(5):
        st.pmap(summed, np.ones(COUNT), axis_name="i")
    assert threading.active_count() <= before + COUNT
    pid = os.fork()
    if not pid:
        made = None
        try:
            with st.set_num_threads(1):
                made = st.pmap(summed, np.ones(COUNT), axis_name="i").tolist()
        finally:
            os._exit(made != [COUNT * COUNT + COUNT] * COUNT)
    assert os.waitpid(pid, 0)[1] == 0
