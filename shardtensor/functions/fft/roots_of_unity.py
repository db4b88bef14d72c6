"""Roots of one, and kernels that multiply the elements of split lines by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.host import memory_pool
from shardtensor.host.threads import each
from shardtensor.sharding.shard_context import ShardContext

THREADED = 1 << 18
"""Bytes from which an elementwise loop of the host is divided over threads."""

_PARTS = 16
"""The number of parts of a line that a device other than the host computes one after the other."""


def roots(exponents: Any, n: int, inverse: bool, dtype: np.dtype[Any], scale: float = 1.0) -> Any:
    """Returns powers of exp(-2 pi i / n), or of its inverse, times ``scale``.

    The exponents are reduced as integers, so that angles are at most pi and the result is accurate to the last digits.
    """
    wide = np.result_type(dtype.type(0).real, np.float64).type
    angles = ((exponents + n // 2) % n - n // 2) * (wide(2 if inverse else -2) * wide(np.pi) / wide(n))
    result = np.empty(angles.shape, dtype)
    result.real, result.imag = np.cos(angles) * scale, np.sin(angles) * scale
    return result


def powers(xp: Any, dtype: np.dtype[Any], begin: int, end: int, *, n: int, inverse: bool, stride: int = 1) -> Any:
    """Returns the powers k * stride, for k from ``begin`` to ``end``, of exp(-2 pi i / n), or of its inverse, as
    products of the items of two short tables.
    """
    step = math.isqrt(max(end - begin - 1, 0)) + 1
    high = xp.asarray(roots(np.arange(begin, end, step) * stride % n, n, inverse, dtype))
    low = xp.asarray(roots(np.arange(step) * stride % n, n, inverse, dtype))
    return xp.reshape(xp.multiply(high[:, None], low), (-1,))[: end - begin]


def along_lines(
    xp: Any, context: ShardContext, function: Callable[..., Any], factors: Callable[..., Any], *arrays: Any
) -> Any:
    """Returns ``function(xp, begin, factors(xp, dtype, begin, end), *parts)`` of parts of lines, whose elements have
    the numbers from ``begin`` to ``end`` in the whole line. Parts are short, so that what is computed from them is
    small.
    """
    begin, end = context.box[-1]
    if xp is np:
        out = memory_pool.empty(context.local_shape, context.dtype)
        step = max(1, THREADED * (end - begin) // max(out.nbytes, 1))
    else:
        out, step = xp.empty(context.local_shape, dtype=context.dtype), -(-(end - begin) // _PARTS) or 1

    def work(k: int) -> None:
        part = slice(k * step, min((k + 1) * step, end - begin))
        here = factors(xp, context.dtype, begin + part.start, begin + part.stop)
        out[..., part] = function(xp, begin + part.start, here, *[a[..., part] for a in arrays])

    each(work, -(-(end - begin) // step), threads=None if xp is np else 1)
    return out
