"""Elements of given ranks of rows against NumPy's sort, by samples, by partitions, and where samples mislead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.host import host_selection
from tests.draws import drawn
from tests.host.test_sorting import LINES

RANDOM = np.random.default_rng(0)

LOW = {
    "_SELECTED_FROM": 64,
    "_INTEGERS_FROM": 64,
    "_BLOCK": 1000,
    "_ROWS": 3000,
    "_SORTED_UP_TO": 4,
    "_REPEATED_FROM": 128,
    "_SAMPLE": 16,
}

HARD: dict[str, Callable[[int], Any]] = {
    **{name: lambda n, line=line: line(n, 2) for name, line in LINES.items()},
    "sorted": lambda n: np.arange(n),
    "rises and falls": lambda n: np.minimum(np.arange(n), n - np.arange(n)),
    "infinite": lambda n: np.where(RANDOM.random(n) < 0.6, np.inf, RANDOM.standard_normal(n)),
    "-infinite": lambda n: np.where(RANDOM.random(n) < 0.6, -np.inf, RANDOM.standard_normal(n)),
    "one nan": lambda n: np.where(np.arange(n) == n // 3, np.nan, RANDOM.random(n)),
    "few numbers": lambda n: np.where(np.arange(n) % 50 == 0, 1.0, np.nan),
    "one number": lambda n: np.where(np.arange(n) == n // 3, 1.0, np.nan),
    "both zeros": lambda n: np.where(RANDOM.random(n) < 0.5, 0.0, -0.0),
    "ten values": lambda n: np.floor(RANDOM.random(n) * 10),
    "one outlier": lambda n: np.where(np.arange(n) == n // 3, 99, 5),
    "powers": lambda n: np.exp(9 * RANDOM.standard_normal(n)),
    **{f"period {p}": lambda n, p=p: np.arange(n) % p for p in (3, 10, 11, 22, 256)},
    "period of the sample": lambda n: np.arange(n) % max(round(n ** (1 / 3)), 1),
}
"""Lines of hard cases by their length."""


def low(monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    for name, value in (LOW | others).items():
        monkeypatch.setattr(host_selection, name, value)


def ranks_of(n: int) -> list[list[int]]:
    """Returns ranks: one, neighbours, those of percentiles, the least and the greatest, and many."""
    some_ranks = [[0], [n // 2], [n - 1], [n // 2, n // 2 + 1, n - 1], [0, 1, 2, n - 2, n - 1], list(range(0, n, 5))]
    return [*some_ranks, sorted({n * k // 20 + j for k in (1, 10, 19) for j in (0, 1)} | {n - 1})]


def assert_selected(lines: Any, ranks: list[int]) -> None:
    found = host_selection.elements_of_ranks(lines, ranks)
    np.testing.assert_array_equal(found, np.sort(lines, axis=1, stable=True)[:, ranks], strict=True)


DTYPES = ["int8", "uint8", "int16", "int32", "uint64", "float16", "float32", "float64", "longdouble"]


@pytest.mark.parametrize("name", HARD)
def test_elements_of_hard_lines_are_selected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each dtype that has the numbers, in order, reversed, and with steps in memory; in one thread and in several."""
    low(monkeypatch)
    for n, dtype in itertools.product((63, 1000, 4099), DTYPES):
        line = HARD[name](n)
        if np.dtype(dtype).kind != "f":
            line = np.nan_to_num(line, posinf=99, neginf=0).astype(np.int64)
        with np.errstate(over="ignore"):
            line = line.astype(dtype)
        spread = np.zeros(3 * n, dtype)
        spread[::3] = line
        for x, threads in ((line, 1), (line[::-1], 3), (spread[::3], 2)):
            with st.set_num_threads(threads):
                for ranks in ranks_of(n):
                    assert_selected(x[None], ranks)


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "complex64", "m8[s]"])
@pytest.mark.parametrize("size", [1, 4, 5, 40, 200])
def test_elements_of_rows_in_any_layout_are_selected(dtype: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    low(monkeypatch)
    numbers = RANDOM.integers(0, 100, (70, size)).astype("int64" if dtype == "m8[s]" else dtype).astype(dtype)
    if numbers.dtype.kind in "fm":
        numbers[RANDOM.random(numbers.shape) < 0.1] = "NaT" if dtype == "m8[s]" else np.nan
    for lines in (numbers, np.asfortranarray(numbers), np.repeat(numbers, 2, 1)[::-1, ::2], numbers[:0]):
        for ranks in ([0], [size - 1], sorted({size // 2, size // 2 - 1, size - 1} - {-1}), []):
            assert_selected(lines, ranks)


@pytest.mark.parametrize("name", HARD)
def test_samples_suffice(name: str) -> None:
    """No partition of a whole line follows: the bounds are right, and few elements are copied, also where one that is
    repeated often is next to those of the ranks.
    """
    n = 1 << 17
    line = HARD[name](n).astype("float64")
    for ranks in ([n // 2, n // 2 + 1, n - 1], ranks_of(n)[-1]):
        out = np.empty(len(ranks))
        assert host_selection._select(line, ranks, out)
        np.testing.assert_array_equal(out, np.sort(line)[ranks])


@pytest.mark.parametrize("places", ["first", "all the same", "last"])
def test_samples_that_mislead_cost_a_pass(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are in front of all bounds, behind them, or between too many elements."""
    low(monkeypatch)
    wrong = {
        "first": lambda size, count: np.arange(count),
        "all the same": lambda size, count: np.full(count, size // 3),
        "last": lambda size, count: size - 1 - np.arange(count),
    }
    monkeypatch.setattr(host_selection, "_places", wrong[places])
    n, taken = 4099, []
    select = host_selection._select
    monkeypatch.setattr(host_selection, "_select", lambda *args: taken.append(select(*args)) or taken[-1])
    for line in (np.arange(n), np.arange(n)[::-1], RANDOM.random(n), np.where(np.arange(n) < 999, np.nan, 1.0)):
        for ranks in ranks_of(n):
            assert_selected(line[None], ranks)
    assert False in taken
    assert True in taken


def test_too_many_ranks_are_partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    line = RANDOM.random(1 << 18)
    ranks = [line.size * k // 5 for k in range(1, 5)]
    assert host_selection._select(line, ranks, np.empty(4))
    # Windows of so many ranks are most of a short line.
    assert not host_selection._select(line[:2000], [rank // 200 for rank in ranks], np.empty(4))
    monkeypatch.setattr(host_selection, "_WINDOWS", 3)
    assert not host_selection._select(line, ranks, np.empty(4))


def test_results_depend_on_neither_threads_nor_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the signs of zeros, of which a window has both."""
    low(monkeypatch)
    line = np.where(RANDOM.random(4099) < 0.5, 0.0, -0.0) * (RANDOM.random(4099) < 0.7) + (RANDOM.random(4099) < 0.2)
    bits = set()
    for threads in (1, 2, 5):
        np.random.seed(threads)
        state = np.random.get_state()[1].tobytes()  # type: ignore[index]
        with st.set_num_threads(threads):
            bits.add(host_selection.elements_of_ranks(line[None], [100, 2000, 2001, 4000]).tobytes())
        assert np.random.get_state()[1].tobytes() == state  # type: ignore[index]
    assert len(bits) == 1


BITS = some.one_of(some.integers(0, (1 << 64) - 1), some.sampled_from([0, 1, 1 << 63, (1 << 64) - 1, 0x7FF0 << 48]))


@hypothesis.settings(max_examples=drawn(300, fast=60))
@hypothesis.given(
    numbers=some.lists(BITS, min_size=1, max_size=30),
    copies=some.integers(1, 60),
    dtype=some.sampled_from(["u8", "i8", "f8", "u4", "i4", "f4", "f2", "i1"]),
    is_shuffled=some.booleans(),
    data=some.data(),
)
def test_elements_of_any_bits_are_selected(
    numbers: list[int], copies: int, dtype: str, is_shuffled: bool, data: Any
) -> None:
    """Numbers that are repeated, infinities, NaN of any bits and subnormal numbers, in lines of all lengths."""
    with pytest.MonkeyPatch.context() as monkeypatch, np.errstate(invalid="ignore"):
        low(monkeypatch, _SELECTED_FROM=1, _INTEGERS_FROM=1, _BLOCK=data.draw(some.sampled_from([1, 64, 1000])))
        line = np.tile(np.array(numbers, np.uint64).view(dtype), copies)
        if is_shuffled:
            line = np.random.default_rng(copies).permutation(line)
        drawn_ranks = data.draw(some.lists(some.integers(0, line.size - 1), min_size=1, max_size=6, unique=True))
        assert_selected(line[None], sorted(drawn_ranks))
