"""Temporal blocking: several steps of a loop for some rows, before the next rows, with the bits of single steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.interpreters.jit.c import c_executor, temporal_blocking
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.grouping import groups
from tests.layouts import array, mesh_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of any size, in bands of few rows and many chunks."""
    monkeypatch.setattr(groups, "LEAST", 1)
    monkeypatch.setattr(temporal_blocking, "LEAST_BYTES", 0)
    monkeypatch.setattr(temporal_blocking, "ROWS", 0)
    monkeypatch.setattr(c_executor, "_BAND", 8)
    monkeypatch.setattr(c_executor, "_CHUNK", 1e-9)
    monkeypatch.setattr(c_executor, "_WIDTH", 2)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of steps that were computed together."""
    counts: list[int] = []
    plain = temporal_blocking.run_steps

    def counting(calls: Any, *args: Any) -> None:
        counts.append(len(calls))
        plain(calls, *args)

    monkeypatch.setattr(temporal_blocking, "run_steps", counting)
    return counts


def jacobi(u: Any, steps: int) -> Any:
    for _ in range(steps):
        u[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
    return u


def check_writes(f: Callable[..., Any], *arrays: Any) -> None:
    """Checks a function of arrays, which it writes, under jit against NumPy, to the bit."""
    given = [np.array(a) for a in arrays]
    mine = [st.asarray(a) for a in arrays]
    found, wanted = st.jit(f, executor="c")(*mine), f(*given)
    for a, b in zip([*leaves(found), *mine], [*leaves(wanted), *given], strict=True):
        assert np.asarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def leaves(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple) else [x]


@pytest.mark.parametrize("steps", [1, 2, 9, 21])
@pytest.mark.parametrize("shape", [(3, 3), (131, 5)])
def test_jacobi(shape: tuple[int, int], steps: int, ran: list[int]) -> None:
    check_writes(lambda u: jacobi(u, steps), array(shape, "float64" if steps % 2 else "float32", 1))
    assert ran == [steps] * (steps > 1)


def line(u: Any) -> Any:
    for k in range(5):
        u[2:-3] = (u[:-5] - u[5:]) * 0.5 - k
    return u


def with_a_source(u: Any, f: Any) -> Any:
    for _ in range(7):
        u[1:-1, 1:-1] += 0.125 * (u[:-2, 1:-1] + u[2:, 1:-1] - 2 * u[1:-1, 1:-1] + f[1:-1, 2:] + f[1:-1, 1:2])
    return u


def columns(u: Any) -> Any:
    for _ in range(4):
        u[:, 1:] = u[:, :-1] * 0.5 + u[:, 1:]
    return u


def cube(u: Any) -> Any:
    for _ in range(6):
        u[1:-1, 1:-1, 2:] = u[:-2, 1:-1, 2:] + 0.5 * u[2:, 2:, 1:-1] - u[1:-1, :-2, :-2]
    return u


def of_the_first(u: Any) -> Any:
    old = u.copy()
    for _ in range(5):
        u[1:-1] = 0.5 * (u[:-2] + u[2:]) + old[1:-1]
    return u, old


@pytest.mark.parametrize(
    ("f", "arrays", "steps"),
    [
        (line, [array(200, "float64", 1)], 5),
        (with_a_source, [array((30, 9), "float64", 1), array((30, 9), "float64", 2)], 7),
        (columns, [array((20, 12), "float32", 1)], 4),
        (cube, [array((17, 6, 8), "float64", 1)], 6),
        (of_the_first, [array((60, 4), "float64", 1)], 5),
    ],
    ids=["line", "with a source", "columns", "cube", "of the first"],
)
def test_other_steps(f: Any, arrays: Any, steps: int, ran: list[int]) -> None:
    check_writes(f, *arrays)
    assert ran == [steps]


def seen_between(u: Any) -> Any:
    sums = []
    for _ in range(3):
        jacobi(u, 2)
        sums.append(u[0].copy() + u[2])
    return (*sums, u)


def other_windows(u: Any) -> Any:
    for k in range(4):
        u[1 + k : -1] = u[: -2 - k] * 0.5
    return u


def of_two_steps(u: Any) -> Any:
    before = u.copy()
    for _ in range(4):
        now = u.copy()
        u[1:-1] = u[:-2] + u[2:] - before[1:-1]
        before = now
    return u


def reversed_rows(u: Any) -> Any:
    for _ in range(3):
        u[1:-1] = u[::-1][1:-1] * 0.5 + u[2:]
    return u


@pytest.mark.parametrize(
    ("f", "chains"), [(seen_between, [2, 2, 2]), (other_windows, []), (of_two_steps, [2]), (reversed_rows, [])]
)
def test_values_that_something_else_reads_are_computed(f: Any, chains: list[int], ran: list[int]) -> None:
    check_writes(f, array((30, 8), "float64", 1))
    assert ran == chains


def test_where_the_steps_run_one_by_one(ran: list[int]) -> None:
    a = array((40, 7), "float64", 1)
    f = st.jit(lambda u: jacobi(u, 4), executor="c")
    wanted = f(st.asarray(a))
    assert ran == [4]
    with st.transfers() as log:
        recorded = f(st.asarray(a))
    assert ran == [4, 4]  # A log does not change what runs.
    with np.errstate(over="raise"):
        raising = f(st.asarray(a))
    numpys = st.jit(lambda u: jacobi(u, 4), executor="numpy")(st.asarray(a))
    assert ran == [4, 4]
    assert log.bytes > 0
    for x in (recorded, raising, numpys):
        assert np.asarray(x).tobytes() == np.asarray(wanted).tobytes()


def test_arguments_are_whole_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x = st.asarray(array((40, 7), "float64", 1))
    before = x.copy()

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(temporal_blocking, "run_steps", fail)
    with pytest.raises(KeyboardInterrupt):
        st.jit(lambda u: jacobi(u, 4), executor="c")(x)
    np.testing.assert_array_equal(x, before)


def test_small_windows_are_not_blocked(monkeypatch: pytest.MonkeyPatch, ran: list[int]) -> None:
    monkeypatch.setattr(temporal_blocking, "LEAST_BYTES", 1 << 24)
    check_writes(lambda u: jacobi(u, 3), array((40, 7), "float64", 1))
    assert ran == []


def test_windows_of_few_rows_are_not_blocked(monkeypatch: pytest.MonkeyPatch, ran: list[int]) -> None:
    monkeypatch.setattr(temporal_blocking, "ROWS", 128)
    check_writes(lambda u: jacobi(u, 3), array((40, 7), "float64", 1))
    assert ran == []


def test_arrays_of_other_orders(ran: list[int]) -> None:
    def f(u: Any) -> Any:
        return jacobi(u.T, 3)

    check_writes(f, array((40, 7), "float64", 1))
    assert ran == []


@pytest.mark.parametrize("examples", [8, pytest.param(1000, marks=pytest.mark.full)])
def test_any_offsets(examples: int) -> None:
    @hypothesis.settings(max_examples=examples, deadline=None)
    @hypothesis.given(
        rows=some.integers(1, 70),
        width=some.integers(1, 5),
        low=some.integers(0, 3),
        high=some.integers(0, 3),
        steps=some.integers(2, 12),
        band=some.sampled_from([1, 8, 64]),
        mesh=some.sampled_from([(1,), (3,), (2, 2)]),
    )
    def run(rows: int, width: int, low: int, high: int, steps: int, band: int, mesh: Any) -> None:
        c_executor._BAND = band
        n = rows + low + high
        a = array((n, width), "float32", 1)

        def f(u: Any) -> Any:
            for _ in range(steps):
                u[low : n - high] = u[:rows] * 0.5 - u[low + high : n] + u[low : n - high]
            return u

        placed = st.device_put(a, st.NamedSharding(made := mesh_of(mesh, "numpy"), st.P(made.axis_names[0])))
        found, wanted = st.jit(f, executor="c")(placed), f(a.copy())
        np.testing.assert_array_equal(np.asarray(found), wanted)

    run()
