"""Counts debugger prompts while maps run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def _wrapped(hook: Any) -> Any:
    """Returns the hook with a counter."""
    counter: Any = functools.lru_cache(maxsize=0)(hook)
    counter.counter = counter
    return counter


def _is_counter(hook: Any) -> bool:
    """Whether a hook is one that `_wrapped` returned. A hook that wraps one may have copied its attributes, and a mock
    has any attribute.
    """
    return getattr(hook, "counter", None) is hook


_counter = _wrapped(sys.breakpointhook)


def count_prompts() -> Callable[[], int]:
    """Wraps `sys.breakpointhook` by a counter, until `restore_hook` is called, and returns a function that returns the
    number of prompts since this call.

    Once a program has stopped in a debugger, the scheduler starts no helper threads, since the prompts of programs in
    several threads would read the terminal's input at the same time.

    The wrapper is `functools.lru_cache` with ``maxsize=0``. That is a counter without a Python frame of its own, which
    matters because debuggers stop in the frame that called the hook.
    """
    global _counter
    counter: Any = sys.breakpointhook
    if not _is_counter(counter):  # Otherwise a map in another thread has wrapped the hook.
        if _counter.__wrapped__ is not counter:
            _counter = _wrapped(counter)
        counter = sys.breakpointhook = _counter
    before = counter.cache_info().misses
    return lambda: counter.cache_info().misses - before


def restore_hook() -> None:
    """Removes the counter. A hook that user code has set meanwhile stays."""
    counter: Any = sys.breakpointhook
    if _is_counter(counter):
        sys.breakpointhook = counter.__wrapped__
