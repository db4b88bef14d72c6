"""The order of rows: a bijection for every number of rows, uniform, and another one for each key and epoch."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from shardtensor.data.order import shuffled
from tests.draws import all_of_them, drawn

KEYS = some.integers(0, 2**128 - 1)


@settings(max_examples=drawn(300), deadline=None)
@given(rows=some.integers(1, 5000), key=KEYS, epoch=some.integers(0, 2**40))
def test_an_epoch_has_each_row_once(rows: int, key: int, epoch: int) -> None:
    order = shuffled(np.arange(rows), rows, key, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(rows))


@settings(max_examples=drawn(200), deadline=None)
@given(rows=some.integers(1, 2**62), key=KEYS, data=some.data())
def test_some_places_of_any_number_of_rows(rows: int, key: int, data: some.DataObject) -> None:
    """Places give the same rows in any order and company, and different places different rows."""
    places = np.array(data.draw(some.lists(some.integers(0, rows - 1), min_size=1, max_size=9, unique=True)))
    order = shuffled(places, rows, key, 3)
    assert ((order >= 0) & (order < rows)).all()
    assert len({*order.tolist()}) == len(places)
    assert np.array_equal(shuffled(places[::-1].copy(), rows, key, 3)[::-1], order)
    assert shuffled(places[:1], rows, key, 3) == order[:1]


def test_the_numbers_do_not_change() -> None:
    """A program that is restored by a later version gets the same rows."""
    assert shuffled(np.arange(10), 10, 7, 0).tolist() == [5, 3, 8, 0, 4, 6, 9, 2, 7, 1]
    assert shuffled(np.arange(3), 10**15, 7 | 5 << 64, 2**33).tolist() == [
        618899277115010,
        489064231399315,
        814743419931620,
    ]


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6, 7] if all_of_them else [3, 5])
def test_small_orders_are_equally_likely(rows: int) -> None:
    count, mean = math.factorial(rows), 20
    found = Counter(tuple(shuffled(np.arange(rows), rows, 1234, epoch).tolist()) for epoch in range(count * mean))
    assert len(found) == count
    deviation = sum((n - mean) ** 2 / mean for n in found.values())
    assert abs(deviation - (count - 1)) < 8 * math.sqrt(2 * (count - 1)), (rows, deviation)


@pytest.mark.parametrize("rows", [1000, 1024, 65537])
def test_rows_are_uniform_at_each_place_and_independent_of_neighbours(rows: int) -> None:
    """The rows of two successive places, of many keys, in 8 × 8 classes; and their correlation along an epoch."""
    count = 4000 if all_of_them else 800
    pairs = np.array([shuffled(np.array([5, 6]), rows, key, 0) for key in range(count)]) * 8 // rows
    table = np.zeros((8, 8))
    np.add.at(table, (pairs[:, 0], pairs[:, 1]), 1)
    deviation = float(((table - count / 64) ** 2 / (count / 64)).sum())
    assert abs(deviation - 63) < 6 * math.sqrt(2 * 63)
    order = shuffled(np.arange(rows), rows, 99, 1)
    for lag in (1, 2, rows // 2):
        assert abs(np.corrcoef(order[lag:], order[:-lag])[0, 1]) < 6 / math.sqrt(rows - lag)
    assert np.sum(order == np.arange(rows)) < 12  # fixed points, of which there is one on average


def test_epochs_and_keys_have_different_orders() -> None:
    orders = [shuffled(np.arange(64), 64, key, epoch) for key in (0, 1, 1 << 64) for epoch in range(4)]
    assert len({order.tobytes() for order in orders}) == len(orders)
