"""Finalizers call the library while it holds a lock: the garbage collector may call them between any two instructions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import shardtensor as st
from shardtensor.communication import offload
from shardtensor.communication.exported_storage import Exported
from shardtensor.host import blas_threads, threads
from shardtensor.spmd import scheduler
from shardtensor.tensor.storage import Storage
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
