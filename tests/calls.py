"""Counts the Python functions that a call calls: they take most of the time of small calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_of(fn: Callable[[], Any]) -> int:
    """Returns how many functions a call calls at least: caches are empty the first time, and finalizers run in some."""
    return min(len(calls) for calls in _recorded(fn))


def hops_of(fn: Callable[[], Any]) -> int:
    """Returns how many of the functions of the library that a call calls are called from another module."""
    return min(sum(a != b for a, b in calls if b.startswith("shardtensor")) for calls in _recorded(fn))


def _recorded(fn: Callable[[], Any]) -> list[list[tuple[str, str]]]:
    """Returns the modules of the caller and of the called function, of each call of a function in several runs."""
    runs: list[list[tuple[str, str]]] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            frames = frame.f_back, frame
            runs[-1].append(tuple([f.f_globals.get("__name__", "") if f else "" for f in frames]))  # type: ignore[arg-type]

    before = sys.getprofile()
    for _ in range(6):
        runs.append([])
        sys.setprofile(profile)
        try:
            fn()
        finally:
            sys.setprofile(before)
    return runs
