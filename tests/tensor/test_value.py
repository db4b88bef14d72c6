"""Avals: one object for the same shape, dtype, sharding and placement, as long as it is in use."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import P
from shardtensor.tensor import value
from shardtensor.tensor.value import Aval, aval
from tests.layouts import mesh_of

FLOAT = np.dtype("float64")


def test_an_aval_in_use_stays_the_same_object() -> None:
    sharding = NamedSharding(mesh_of((2,), "numpy"), P("x"))
    kept = aval((1 << 20,), FLOAT, sharding, True)
    most = aval.cache_info().maxsize
    assert most
    for n in range(most + 1):
        aval((n,), FLOAT, sharding, True)
    assert aval((1 << 20,), FLOAT, sharding, True) is kept
    assert aval((1 << 20,), FLOAT, sharding, False) is not kept


def test_an_aval_that_nothing_uses_is_dropped() -> None:
    sharding = NamedSharding(mesh_of((2,), "numpy"), P("x"))
    known = weakref.ref(aval((1 << 21,), FLOAT, sharding, True))
    for n in range(aval.cache_info().maxsize or 0):
        aval((n,), FLOAT, sharding, True)
    gc.collect()
    assert known() is None


def test_avals_that_nothing_uses_are_removed_from_the_table() -> None:
    sharding, most = NamedSharding(mesh_of((2,), "numpy"), P("x")), aval.cache_info().maxsize
    assert most
    for n in range(5 * most):
        aval((n, 1), FLOAT, sharding, True)
    gc.collect()
    used = sum(held() is not None for held in value._AVALS.values())
    assert len(value._AVALS) <= 4 * max(used, value._FEW)


def test_a_finalizer_may_remove_avals_while_others_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    sharding, ended = NamedSharding(mesh_of((2,), "numpy"), P("x")), lambda: None

    class Ending:
        def __call__(self) -> None:  # As the removal of a finalizer that the garbage collector calls here.
            table.pop("last", None)

    table: dict[Any, Any] = {"first": Ending(), **dict.fromkeys(range(value._FEW - 2), ended), "last": ended}
    monkeypatch.setattr(value, "_AVALS", table)
    made = aval((1 << 24, 3), FLOAT, sharding, True)
    assert [held() for held in table.values()] == [made]


def test_threads_get_the_same_object() -> None:
    sharding, count = NamedSharding(mesh_of((2,), "numpy"), P("x")), 200
    found: list[list[Aval]] = []
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait()
        found.append([aval((1 << 22, n), FLOAT, sharding, True) for n in range(count)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({id(avals[n]) for avals in found}) == 1 for n in range(count))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_child_of_a_fork_makes_avals_although_another_thread_was_making_one() -> None:
    sharding = NamedSharding(mesh_of((2,), "numpy"), P("x"))
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with value._AVALS_LOCK:
            held.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(20)  # It ends a child that waits for the lock.
            code = 0 if aval((1 << 23,), FLOAT, sharding, True).size == 1 << 23 else 2
        finally:
            os._exit(code)
    end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
