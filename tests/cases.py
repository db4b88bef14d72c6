"""What the tests take from the kit: for every operator, calls of it and NumPy's answer (see `shardtensor.testing`)."""

from __future__ import annotations

import shardtensor.testing.linear_algebra_cases  # noqa: F401 - it adds its cases
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
