"""Operands of elementwise functions: numbers of all kinds that a dtype has."""

from __future__ import annotations

import numpy as np

from shardtensor.core import OPS

UNARY = sorted(n for n, op in OPS.items() if op.is_ufunc and len(op.operands) == 1)
BINARY = sorted(n for n, op in OPS.items() if op.is_ufunc and len(op.operands) == 2)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 2.5, 3.0, np.nan, np.inf, -np.inf, 7.0, -7.0, 1e-3]


def values(dtype: str, count: int = 14, seed: int = 0) -> np.ndarray:
    """Numbers of all kinds that a dtype has."""
    known, rng = np.dtype(dtype), np.random.default_rng(seed)
    if known.kind == "b":
        return rng.random(count) < 0.5
    if known.kind in "iu":
        ends = np.iinfo(known)
        pool = np.array(
            [0, 1, 2, 3, 5, 7, ends.max, ends.min, ends.max // 3] + [-1, -2, -7] * (known.kind == "i"), known
        )
        return rng.choice(pool, count)
    parts = [rng.permutation(np.resize(np.array(SPECIAL), count)) for _ in range(2)]
    with np.errstate(all="ignore"):
        return (parts[0] + 1j * np.nan_to_num(parts[1], posinf=4, neginf=-4) if known.kind == "c" else parts[0]).astype(
            known
        )


def tamed(name: str, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Operands without what NumPy refuses or C leaves open: negative shifts, complex powers of or to the infinite."""
    if name in ("pow", "bitwise_left_shift", "bitwise_right_shift") and y.dtype.kind == "i":
        y = np.abs(y % 13).astype(y.dtype)
    if name in ("pow", "float_power") and "c" in (x.dtype.kind, y.dtype.kind):
        x, y = [np.where(np.abs(z) < 9, z, z.dtype.type(1)) for z in (x, y)]
        x = np.where(x == 0, x.dtype.type(1), x)
    return x, y
