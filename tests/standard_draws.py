"""Operands of realistic shapes and values, drawn by hypothesis.

They have sides up to 40, up to four dimensions and all dtypes, with NaN, infinities, signed zeros, and the largest and
smallest numbers; some are empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as some

SIDES = some.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 31, 32, 33, 39, 40])
LARGEST = 1 << 14
"""The largest number of elements. Four sides of 40 would be 2.5 million elements, which cost time and test no more."""

BOOL = ("bool",)
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED
REAL_FLOATS = ("float16", "float32", "float64")
FLOATS = (*REAL_FLOATS, "complex64", "complex128")
REAL = BOOL + INTEGERS + REAL_FLOATS
ALL = BOOL + INTEGERS + FLOATS
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0)

Function = Callable[..., Any]


@dataclass
class Call:
    """A call of a namespace's function: ``function(namespace, *operands)``.

    Attributes:
        function: calls a function of NumPy's namespace, or of `shardtensor`.
        operands: the arrays.
        rtol: the relative tolerance of results with rounding errors, in units of their precision.
        scale: the absolute tolerance in the same units, for results that are much smaller than their terms.
        signs: whether zeros have NumPy's signs.
    """

    function: Function
    operands: list[np.ndarray]
    rtol: float = 8
    scale: float = 0
    signs: bool = False


class Draw:
    """Draws operands and arguments from hypothesis's data, with the dtypes that the backend has."""

    def __init__(self, data: Any, dtypes: Sequence[str]) -> None:
        self.data = data
        self.dtypes = dtypes

    def one_of(self, values: Sequence[Any]) -> Any:
        return self.data.draw(some.sampled_from(list(values)))

    def integer(self, low: int, high: int) -> int:
        return int(self.data.draw(some.integers(low, high)))

    def chance(self) -> bool:
        return bool(self.data.draw(some.booleans()))

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.integer(0, 1 << 20))

    def dtype(self, among: Sequence[str] = ALL) -> str:
        return str(self.one_of([d for d in among if d in self.dtypes]))

    def shape(self, low: int = 0, high: int = 4, least: int = 0) -> tuple[int, ...]:
        """Draws a shape of ``low`` to ``high`` dimensions; halves the longest sides down to `LARGEST` elements."""
        sides = [max(n, least) for n in self.data.draw(some.lists(SIDES, min_size=low, max_size=high))]
        while math.prod(sides) > LARGEST:
            at = sides.index(max(sides))
            sides[at] = (sides[at] + 1) // 2
        return tuple(sides)

    def array(self, low: int = 0, high: int = 4, among: Sequence[str] = ALL, **how: Any) -> np.ndarray:
        return self.filled(self.shape(low, high), self.dtype(among), **how)

    def filled(self, shape: tuple[int, ...], dtype: str, *, wide: bool = True, special: bool = True) -> np.ndarray:
        """Draws an array of a shape and dtype.

        Args:
            shape: the shape.
            dtype: the dtype.
            wide: whether elements may have any magnitude: sums of such numbers depend on the order of the terms.
            special: whether some elements may be infinities or NaN.
        """
        rng = self.rng()
        kind = np.dtype(dtype).kind
        if kind == "b":
            return np.asarray(rng.random(shape) < self.one_of([0.05, 0.5, 1]))
        if kind in "iu":
            known = np.iinfo(dtype)
            low, high = (known.min, known.max) if wide and self.chance() else (-5 if kind == "i" else 0, 6)
            return np.asarray(rng.integers(low, high, shape, dtype, endpoint=True))
        if kind == "c":
            part = "float32" if dtype == "complex64" else "float64"
            made = np.empty(shape, dtype)
            made.real = self.filled(shape, part, wide=wide, special=special)
            made.imag = self.filled(shape, part, wide=wide, special=special)
            return made
        return self._floats(rng, shape, dtype, wide, special)

    def _floats(
        self, rng: np.random.Generator, shape: tuple[int, ...], dtype: str, wide: bool, special: bool
    ) -> np.ndarray:
        made = np.asarray(rng.integers(-40, 40, shape) / 16 if self.chance() else rng.normal(size=shape)).astype(dtype)
        if wide and self.chance():
            known = np.finfo(dtype)
            exponents = rng.integers(known.minexp - known.nmant, known.maxexp, shape)
            made = np.ldexp(np.sign(made), exponents).astype(dtype)
        if special and made.size and self.chance():
            at = rng.integers(0, made.size, max(made.size // 8, 1))
            made.flat[at] = rng.choice(np.array(SPECIAL, dtype), at.size)
        return made

    def axis(self, ndim: int) -> int:
        return self.integer(-ndim, ndim - 1)

    def axes(self, ndim: int) -> Any:
        """Draws None, one axis, or a tuple of axes."""
        if not ndim or self.integer(0, 2) == 0:
            return None
        picked = self.data.draw(some.lists(some.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True))
        picked = [a - ndim if self.chance() else a for a in picked]
        return picked[0] if len(picked) == 1 and self.chance() else tuple(picked)

    def together(self, count: int) -> list[tuple[int, ...]]:
        """Draws shapes that broadcast together."""
        whole = self.shape()
        tails = [whole[self.integer(0, len(whole)) if self.chance() else 0 :] for _ in range(count)]
        return [tuple(1 if self.integer(0, 3) == 0 else n for n in tail) for tail in tails]
