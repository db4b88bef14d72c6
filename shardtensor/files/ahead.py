"""Items that another thread computes ahead of their use, such as the checksums of what is written next."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")

HELD = 3
"""The items that exist at the same time: one that is used, one that is ready, and one that is computed."""


@contextlib.contextmanager
def ahead(items: Generator[T]) -> Iterator[Iterator[T]]:
    """Computes items in another thread, which has ended when the ``with`` block ends, whatever ends it.

    An error of the computation is raised where its item would be. An item may be overwritten when `HELD` more have been
    computed.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(1)  # fork: a child does not use it.
    stopped = threading.Event()  # fork: likewise.

    def compute() -> None:
        try:
            for item in items:
                ready.put((item, None, False))
                if stopped.is_set():
                    break
            ready.put((None, None, True))
        except BaseException as error:  # It is raised in the thread that uses the items.
            ready.put((None, error, True))

    def use() -> Iterator[T]:
        while True:
            item, error, last = ready.get()
            if last:
                ended.set()
            if error is not None:
                raise error
            if last:
                return
            yield item  # type: ignore[misc]

    ended = threading.Event()  # fork: likewise.
    thread = threading.Thread(target=compute, name="shardtensor-ahead", daemon=True)
    thread.start()
    try:
        yield use()
    finally:
        stopped.set()
        while not ended.is_set():  # The thread may be about to put an item for which there is no room.
            if ready.get()[2]:
                ended.set()
        thread.join()
        items.close()
