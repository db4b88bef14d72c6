"""Copies are independent, views alias their base, and writes arrive: as in NumPy, eagerly and under jit.

The tables of functions and operands are in `tests.interpreters.aliases`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.interpreters.aliases import OPERANDS, RESULTS, WRITES, Call
from tests.layouts import mesh_of, strided

SHAPES = {"small": (6, 10), "64 KiB": (96, 130), "512 KiB": (260, 270)}
"""Bases: below the threshold of small results, and above each. No stride is 64 bytes, with which NumPy 2.4 negates
wrongly in place.
"""

LAYOUTS: dict[str, Callable[[], Any]] = {
    "one device": lambda: st.devices("numpy")[0],
    "rows": lambda: st.NamedSharding(mesh_of((8,), "numpy"), st.P("x")),
    "rows and columns": lambda: st.NamedSharding(mesh_of((4, 2), "numpy"), st.P("x", "y")),
    "separate memories": lambda: st.NamedSharding(mesh_of((2, 2), "checked"), st.P("x", "y")),
}

MODES = ("eager", "jit", "jit of the base")

Case = tuple[str, str]

_RESULTS = list(itertools.product(RESULTS, OPERANDS))
_WRITES = [case for case in itertools.product(WRITES, OPERANDS) if case[1] != "broadcast"]

_CASES = list(itertools.product(SHAPES, LAYOUTS, MODES))

_STEPS = {"small": 1, "64 KiB": 5, "512 KiB": 23}
"""Large arrays take longer, so that each layout and mode has a part of the cases, another one each."""

_FAST = {("small", "rows", "eager"): 7, ("small", "rows", "jit"): 29, ("small", "separate memories", "eager"): 41}
"""What runs in the fast tier, of which cases one in so many."""

def base_of(shape: tuple[int, ...], operand: str) -> np.ndarray:
    """Returns a base whose elements are different, and in no order."""
    size = np.prod(shape)
    base = (np.arange(size) * 7919 % size).reshape(shape).astype(float)
    return base + 1j * (base + 1) if operand.startswith(("real", "imag")) else base


def outcome(call: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Returns the result of a call, or the error that it raises."""
    try:
        return call(*args), None
    except Exception as error:
        return None, error


def aliasing(result: Any, base: Any) -> tuple[Any, bool]:
    """Returns whether a write to a result arrives in its base, None if it is read-only, and whether a write to the base
    arrives in the result. The base is written.
    """
    before = np.array(result)
    base[...] = base * 0 - 7.5
    seen = not np.array_equal(np.array(result), before)
    try:
        result[...] = 9
    except ValueError:
        return None, seen
    return bool((np.array(base) != -7.5).any()), seen


def called(mode: str, function: Call, operand: Callable[[Any], Any], base: Any) -> Any:
    """Calls a function of a view of a tensor, eagerly or under jit, where the view is an argument or made inside."""
    if mode == "eager":
        return function(st, operand(base))
    if mode == "jit":
        return st.jit(lambda x: function(st, x))(operand(base))
    return st.jit(lambda b: function(st, operand(b)))(base)


def difference(case: Case, shape: tuple[int, ...], layout: Any, mode: str) -> str | None:
    """Returns how the call of a function that returns an array differs from NumPy's; None if it does not."""
    function, operand = RESULTS[case[0]], OPERANDS[case[1]]
    host = base_of(shape, case[1])
    base = st.device_put(host.copy(), layout)
    wanted, refused = outcome(function, np, operand(host))
    if refused is not None or not isinstance(wanted, np.ndarray):
        return None
    found, error = outcome(called, mode, function, operand, base)
    if error is not None:
        return None if isinstance(error, st.ConcretizationError) else repr(error)
    now = np.array(found)
    if now.shape != wanted.shape or now.dtype != wanted.dtype or not np.allclose(now, wanted, equal_nan=True):
        return f"{now!r:.80}, not {wanted!r:.80}"
    if not wanted.size:
        return None
    its, mine = aliasing(found, base), aliasing(wanted, host)
    if case[1] == "broadcast":  # NumPy's is read-only, and the library's an independent tensor.
        return None if not any(its) else f"aliases {its}"
    return None if its == mine else f"aliases {its}, not {mine}"


def lost(case: Case, shape: tuple[int, ...], layout: Any, mode: str) -> str | None:
    """Returns how a base differs from NumPy's after a function has written to a view of it; None if it does not."""
    function, operand = WRITES[case[0]], OPERANDS[case[1]]
    if "bits" in case[1] and ("out=" in case[0] or "nan" in case[0]):  # integers, of which NumPy's rules are others
        return None
    host = base_of(shape, case[1])
    base = st.device_put(host.copy(), layout)
    before = host.copy()

    def written(xp: Any, x: Any) -> None:
        function(xp, x)

    _, refused = outcome(written, np, operand(host))
    if refused is not None:
        return None
    _, error = outcome(called, mode, written, operand, base)
    if error is not None:
        return None if isinstance(error, st.ConcretizationError) else repr(error)
    now = np.array(base)
    if np.allclose(now, host, equal_nan=True):
        return None
    return "is lost" if np.array_equal(now, before) else f"{now!r:.80}, not {host!r:.80}"


def _cases() -> list[Any]:
    """Returns sizes, layouts and modes, each with a number; those that take long are marked `full`."""
    made = []
    for number, case in enumerate(_CASES):
        marks = () if case in _FAST else (pytest.mark.full,)
        made.append(pytest.param(number, *case, marks=marks, id=", ".join(case)))
    return made


def _drawn(cases: list[Case], number: int, size: str, *where: str) -> list[Case]:
    """Returns the cases of a test: in the fast tier a few, and of large arrays a part, each time another one."""
    step = _STEPS[size]
    return list(strided(cases[number % step :: step], _FAST.get((size, *where), 1), number))


@pytest.mark.parametrize(("number", "size", "layout", "mode"), _cases())
def test_copies_and_views_are_those_of_numpy(number: int, size: str, layout: str, mode: str) -> None:
    found = {
        case: words
        for case in _drawn(_RESULTS, number, size, layout, mode)
        if (words := difference(case, SHAPES[size], LAYOUTS[layout](), mode))
    }
    assert not found


@pytest.mark.parametrize(("number", "size", "layout", "mode"), _cases())
def test_writes_arrive_as_in_numpy(number: int, size: str, layout: str, mode: str) -> None:
    found = {
        case: words
        for case in _drawn(_WRITES, number, size, layout, mode)
        if (words := lost(case, SHAPES[size], LAYOUTS[layout](), mode))
    }
    assert not found
