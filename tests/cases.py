"""What the tests take from the kit: for every operator, calls of it and NumPy's answer (see `shardtensor.testing`)."""

from __future__ import annotations

from shardtensor.testing import linear_algebra_cases, manipulation_cases, numpy_cases  # noqa: F401 - they add their cases
from shardtensor.testing.cases import (
    CASES,
    ELSEWHERE,
    Case,
    array_indices,
    assigned,
    check,
    elementwise_cases,
    indices,
    sharded_somehow,
    wanted,
)

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
