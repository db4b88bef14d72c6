"""Finalizers call the library while it holds a lock: the garbage collector may call them between any two instructions."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.communication import array_communicator, offload
from shardtensor.communication.exported_storage import Exported
from shardtensor.host import blas_threads, threads
from shardtensor.spmd.scheduling import scheduler
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import write_state_of
from tests.spmd.test_scheduler import hard_end as hard_end
from tests.spmd.test_scheduler import in_time


def once(call: Callable[[], Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls ``call`` at its first use, as if a finalizer ran there, and then ``otherwise``."""
    pending = [True]

    def interrupted(*args: Any, **options: Any) -> Any:
        if pending:
            pending.clear()
            call()
        return otherwise(*args, **options)

    return interrupted


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "_pool", threads._ThreadPool())
    yield threads._pool
    threads._pool.dissolve()


def test_threads_are_started(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    start = threading.Thread.start

    def work() -> None:
        with st.set_num_threads(4):
            threads.each(done.append, 8)

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith("shardtensor_"):
            also(thread)
        else:
            start(thread)

    also = once(work, start)
    monkeypatch.setattr(threading.Thread, "start", starting)
    in_time(work)
    assert sorted(done) == sorted([*range(8)] * 2)
    assert 3 <= len(pool._threads) <= 4  # Each of the two calls may have started the last one.


def test_threads_of_blas_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = blas_threads._Shares()
    monkeypatch.setattr(blas_threads, "_shares", shares)
    counts = [8]

    def limit(number: int) -> None:
        with blas_threads.Limit(number):
            assert counts[-1] == number

    libraries = once(lambda: limit(3), lambda: [(lambda: counts[-1], counts.append)])
    monkeypatch.setattr(blas_threads, "_libraries", libraries)
    in_time(lambda: limit(2))
    assert counts == [8, 3, 8, 2, 8]
    assert not shares._wanted


def test_a_map_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> list[Any]:
        return st.pmap(lambda x: st.psum(x, "i"), [1, 2], axis_name="i")

    found: list[Any] = []
    monkeypatch.setattr(scheduler, "count_prompts", once(lambda: found.append(call()), scheduler.count_prompts))
    assert in_time(call) == [3, 3]
    assert found == [[3, 3]]
    assert not scheduler._running


def test_a_tensor_is_read_whose_memory_another_library_has() -> None:
    x = st.arange(4.0, device=st.devices("numpy")[0])
    storage = x._storage
    assert isinstance(storage, Storage)
    ended = once(lambda: exported.stored(), lambda: None)
    exported = Exported(x._aval, storage, [ended])
    assert in_time(exported.stored) is storage


def test_a_prefetched_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = st.arange(4.0, device=st.devices("checked")[0])
    (array,) = x._storage.buffers
    prefetched = offload.PrefetchedStorage(x._aval, (array,), ["a token"])
    wait = once(lambda: found.append(prefetched.stored()), lambda *_: None)
    found: list[Any] = []
    monkeypatch.setattr(x._aval.backend, "wait", wait)
    storage = in_time(prefetched.stored)
    assert storage.buffers == (array,)
    assert found == [storage]


def test_handlers_do_not_run_in_the_callbacks_of_weak_references() -> None:
    """Python only prints what they would raise there; they run between the instructions of Python functions."""
    x = st.asarray(np.arange(16.0))
    view = x[::2]
    np.asarray(view + 1)
    held: list[Any] = []
    st.pmap(lambda a: held.append(st.psum(a, "i")), [np.ones(4)] * 2, axis_name="i")
    caches = getattr(write_state_of(x), "caches", {})
    found = [
        *caches.values(),
        *array_communicator._shared.values(),
        *[own for own, _ in array_communicator._own.values()],
    ]
    for reference in found:
        assert not isinstance(reference.__callback__, types.FunctionType)
    assert found
