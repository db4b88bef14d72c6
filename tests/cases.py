"""For every operator, calls of it and NumPy's results; imported from the kit `shardtensor.testing`."""

from __future__ import annotations

from shardtensor.testing import (  # noqa: F401 - importing them registers their cases
    linear_algebra_cases,
    manipulation_cases,
    numpy_cases,
    sorting_cases,
    statistical_cases,
    ufunc_cases,
)
from shardtensor.testing.cases import (
    CASES,
    Case,
    check,
    elementwise_cases,
    sharded_somehow,
    wanted,
)
from shardtensor.testing.indexing_cases import array_indices, assigned, indices

__all__ = [
    "CASES",
    "Case",
    "array_indices",
    "assigned",
    "check",
    "elementwise_cases",
    "indices",
    "sharded_somehow",
    "wanted",
]
