"""Products of parameters: whole in the full tier, and in the fast tier few rows in which every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tests import draws


def pairwise(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns the product of some sequences with ``--full``, else rows of it that contain every pair of values of two
    sequences.
    """
    if draws.all_of_them:
        return list(itertools.product(*dimensions))
    return [
        tuple([values[i] for values, i in zip(dimensions, row, strict=True)]) for row in rows(*map(len, dimensions))
    ]


def rows(*counts: int) -> list[tuple[int, ...]]:
    """Returns rows of indices below ``counts`` that contain every pair of indices of two columns."""
    left = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(range(len(counts)), 2)
        for i, j in itertools.product(range(counts[a]), range(counts[b]))
    }
    found = [(i,) for i in range(counts[0])] if len(counts) == 1 else []
    while left:
        row = dict(next(iter(left)))
        for d in sorted(set(range(len(counts))) - set(row), key=lambda d: -counts[d]):
            row[d] = max(range(counts[d]), key=lambda i: (_new(left, row, d, i), -_uses(found, d, i)))
        for pair in itertools.combinations(sorted(row.items()), 2):
            left.pop(pair, None)
        found.append(tuple([row[d] for d in range(len(counts))]))
    return found


def _new(left: dict[Any, None], row: dict[int, int], column: int, index: int) -> int:
    """Returns how many pairs an index of a column adds to a row."""
    return sum(tuple(sorted((item, (column, index)))) in left for item in row.items())


def _uses(found: list[tuple[int, ...]], column: int, index: int) -> int:
    """Returns how often an index of a column occurs."""
    return sum(row[column] == index for row in found)


def spread(values: Iterable[Any], step: int, start: int = 0) -> list[Any]:
    """Returns all values with ``--full``, else every ``step``-th.

    Of a product, these contain every value, and most groups of values, if ``step`` and its lengths have no common divisor.
    """
    return list(values) if draws.all_of_them else list(itertools.islice(values, start % step, None, step))
