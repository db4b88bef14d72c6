"""The functions of CuPy's ufuncs whose results differ from NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np


def power(x: Any, y: Any, out: Any = None, **kwargs: Any) -> Any:
    """Computes powers as CuPy does, which truncates negative integer powers of integers instead of raising an error."""
    if not all(np.asarray(a).dtype.kind in "iu" for a in (x, y)) or np.min(y, initial=0) >= 0:
        return np.power(x, y, out=out, **kwargs)
    small = np.where(np.equal(x, 1), 1, np.where(np.equal(x, -1), 1 - 2 * (y & 1), 0))
    powers = np.power(x, abs(y))
    made = np.where(np.less(y, 0), small, powers).astype(powers.dtype)
    if out is None:
        return made
    np.copyto(out[0], made, casting="same_kind", **kwargs)
    return out[0]


def logical_and(x: Any, y: Any, out: Any = None, **kwargs: Any) -> Any:
    """Computes ``logical_and`` as CuPy does: for signed and unsigned operands, negative numbers are false."""
    if {x.dtype.kind, y.dtype.kind} == {"i", "u"}:
        x, y = [np.maximum(a, 0) for a in (x, y)]
    return np.logical_and(x, y, out=out, **kwargs)


def where(condition: Any, x: Any, y: Any, out: Any = None) -> Any:
    made = np.where(condition, x, y)
    if out is not None:
        np.copyto(out[0], made)
    return made


def divide(x: Any, y: Any, out: Any = None, **kwargs: Any) -> Any:
    """Divides as CuPy does, by whose method quotients of complex numbers by 0 are NaN."""
    zero = np.equal(y, 0)
    made = np.asarray(np.divide(x, y, out=out, **kwargs))
    if made.dtype.kind == "c":
        np.copyto(made, complex(np.nan, np.nan), where=zero)
    return made


def reciprocal(x: Any, out: Any = None, **kwargs: Any) -> Any:
    """Computes reciprocals as CuPy does: that of the integer 0 is 0."""
    zero = np.equal(x, 0)
    made = np.asarray(np.reciprocal(x, out=out, **kwargs))
    if made.dtype.kind in "iu":
        np.copyto(made, 0, where=zero)
    return made


def float_power(x: Any, y: Any, out: Any = None, **kwargs: Any) -> Any:
    """Computes powers as CuPy does: of complex64 in that precision."""
    if x.dtype == np.complex64:
        made = np.power(x, y).astype(np.complex128)
        if out is None:
            return made
        np.copyto(out[0], made)
        return out[0]
    return np.float_power(x, y, out=out, **kwargs)


KERNELS: dict[str, Any] = {
    "divide": divide,
    "float_power": float_power,
    "logical_and": logical_and,
    "power": power,
    "reciprocal": reciprocal,
    "where": where,
}
"""The functions for ufuncs whose results in CuPy differ from NumPy's, or which are no ufuncs in NumPy."""

for _name, _kernel in KERNELS.items():
    _kernel.__name__ = _name
