"""Operands of elementwise functions: ordinary and special numbers of every dtype."""

from __future__ import annotations

import numpy as np

from shardtensor.core import OPS

UNARY = sorted(n for n, op in OPS.items() if op.is_ufunc and len(op.operands) == 1)
BINARY = sorted(n for n, op in OPS.items() if op.is_ufunc and len(op.operands) == 2)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 2.5, 3.0, np.nan, np.inf, -np.inf, 7.0, -7.0, 1e-3]


def values(dtype: str, count: int = 14, seed: int = 0) -> np.ndarray:
    """Returns ``count`` numbers of a dtype, special values and the limits of integers among them."""
    kind, rng = np.dtype(dtype).kind, np.random.default_rng(seed)
    if kind == "b":
        return rng.random(count) < 0.5
    if kind in "iu":
        limits = np.iinfo(dtype)
        pool = np.array(
            [0, 1, 2, 3, 5, 7, limits.max, limits.min, limits.max // 3] + [-1, -2, -7] * (kind == "i"), dtype
        )
        return rng.choice(pool, count)
    parts = [rng.permutation(np.resize(np.array(SPECIAL), count)) for _ in range(2)]
    with np.errstate(all="ignore"):
        numbers = parts[0] + 1j * np.nan_to_num(parts[1], posinf=4, neginf=-4) if kind == "c" else parts[0]
        return numbers.astype(dtype)


def defined_operands(name: str, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replaces operands for which NumPy raises an error or C defines no result.

    These are negative exponents and shifts of integers, and zero, infinite or NaN operands of complex powers.
    """
    if name in ("pow", "bitwise_left_shift", "bitwise_right_shift") and y.dtype.kind == "i":
        y = np.abs(y % 13).astype(y.dtype)
    if name in ("pow", "float_power") and "c" in (x.dtype.kind, y.dtype.kind):
        x, y = [np.where(np.abs(z) < 9, z, z.dtype.type(1)) for z in (x, y)]
        x = np.where(x == 0, x.dtype.type(1), x)
    return x, y
