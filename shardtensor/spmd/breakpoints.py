"""Counts debugger prompts while maps run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def count_prompts() -> Callable[[], int]:
    """Wraps `sys.breakpointhook` by a counter, until `restore_hook` is called, and returns a function that returns the
    number of prompts since this call.

    Once a program has stopped in a debugger, the scheduler starts no helper threads, since the prompts of programs in
    several threads would read the terminal's input at the same time.

    The wrapper is `functools.lru_cache` with ``maxsize=0``. That is a counter without a Python frame of its own, which
    matters because debuggers stop in the frame that called the hook.
    """
    counter: Any = sys.breakpointhook
    if not hasattr(counter, _MARK):  # Maps in other threads share the counter.
        counter = sys.breakpointhook = functools.lru_cache(maxsize=0)(counter)
        setattr(counter, _MARK, True)
    before = counter.cache_info().misses
    return lambda: counter.cache_info().misses - before


def restore_hook() -> None:
    """Removes the counter. A hook that user code has set meanwhile stays."""
    counter: Any = sys.breakpointhook
    if hasattr(counter, _MARK):
        sys.breakpointhook = counter.__wrapped__


_MARK = "_counts_prompts_of_shardtensor"
