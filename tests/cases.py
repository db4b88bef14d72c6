"""What the tests take from the kit: for every operator, calls of it and NumPy's answer (see `shardtensor.testing`)."""

from __future__ import annotations

from shardtensor.testing import (  # noqa: F401 - they add their cases
    linear_algebra_cases,
    manipulation_cases,
    numpy_cases,
    sorting_cases,
    statistical_cases,
    ufunc_cases,
)
from shardtensor.testing.cases import (
    CASES,
    ELSEWHERE,
    Case,
    check,
    elementwise_cases,
    sharded_somehow,
    wanted,
)
from shardtensor.testing.indexing_cases import array_indices, assigned, indices

__all__ = [
    "CASES",
    "ELSEWHERE",
    "Case",
    "array_indices",
    "assigned",
    "check",
    "elementwise_cases",
    "indices",
    "sharded_somehow",
    "wanted",
]
