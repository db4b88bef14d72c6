"""Measures of the machine: the time of a fixed loop, to which other times are compared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

TYPICAL = 0.2
"""The seconds of `fixed_loop` on a slow machine that does nothing else."""


def fixed_loop(clock: Callable[[], float] = time.process_time) -> float:
    """Returns the seconds of a fixed loop of Python's integers and of small NumPy arrays, by a clock."""
    start, total, x = clock(), 0, np.arange(64.0)
    for n in range(400_000):
        total += n * n % 7
    for _ in range(200_000):
        x = x + 1.0
    return clock() - start


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Asserts that a block takes at most so many seconds, times how much slower than a slow machine this one is now.

    A context manager. The fixed loop is run before and after the block, in a process that may compete with others.
    """
    before, start = fixed_loop(time.perf_counter), time.perf_counter()
    yield
    taken = time.perf_counter() - start
    slow = max(before, fixed_loop(time.perf_counter)) / TYPICAL
    assert taken < seconds * max(1.0, slow), f"{taken:.1f} s; a fixed loop takes {slow:.1f} times as long as usual"
