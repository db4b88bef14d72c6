"""Python's functions for operators of Python scalars: their results are Python scalars, too, so that they stay weak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor.core import OPS, Body, Op

PYTHON: dict[Op, Callable[..., Any]] = {}
"""The functions, by operator. Programs and gradients call them for operands that are all Python scalars."""


def of_numbers(function: Callable[..., Any]) -> Callable[[Body], Body]:
    """Declares Python's function for the declared operator below, which has the same operands and no parameters."""

    def declare(declared: Body) -> Body:
        PYTHON[OPS[declared.__name__]] = function
        return declared

    return declare
