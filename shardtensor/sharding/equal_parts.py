"""Runs of parts of equal size, so that the partial results of all parts are computed by one call for each run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from shardtensor.sharding.layout import Grid

Runs = list[tuple[int, int, int]]
"""(begin, end, number of parts) for each run of consecutive non-empty parts of equal size."""


def equal_runs(grid: Grid, dimension: int) -> Runs | None:
    """Returns the runs of parts of a dimension; None if other dimensions are split, too, or if mesh order, in which
    partial results are numbered, is not the order of the parts.
    """
    parts = grid.parts[grid.owners(), dimension]
    if any(count != 1 for d, count in enumerate(grid.counts) if d != dimension) or not np.all(np.diff(parts) > 0):
        return None
    return runs_between(grid.offsets[dimension].tolist())


def runs_between(bounds: Sequence[int]) -> Runs:
    """Returns the runs of the parts between bounds.

    Sizes of parts along one mesh axis differ by at most one, so that there are at most two runs.
    """
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    runs, begin = [], 0
    for size, group in itertools.groupby(sizes):
        number = len(list(group))
        if size:
            runs.append((begin, begin + size * number, number))
        begin += size * number
    return runs
