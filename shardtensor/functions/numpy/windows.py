"""NumPy's windows, which smooth the ends of a signal: 1-d arrays of float64, created on the devices that hold them.

Common to all functions:

- ``M`` is the number of elements; the result is empty if it is less than 1.
- ``device`` is a Device, Mesh or NamedSharding (see `shardtensor.functions.standard.creation`); the default mesh by
  default.
"""

from __future__ import annotations

import math as _math
from typing import Any

import numpy as np

from shardtensor.functions.numpy.mathematical import i0
from shardtensor.functions.standard.creation import arange, ones, zeros
from shardtensor.functions.standard.elementwise import add, cos, divide, less_equal, multiply, sqrt, subtract
from shardtensor.functions.standard.searching import where
from shardtensor.sharding.layout import Where
from shardtensor.tensor.tensor import ShardedTensor


def _odd(M: float, device: Where | None) -> Any:
    """Returns the numbers ``1 - M, 3 - M, ..., M - 1``."""
    return arange(1 - M, M, 2, dtype=np.float64, device=device)


def _cosines(M: float, device: Where | None, *coefficients: float) -> ShardedTensor:
    """Returns the sum of the cosines of multiples of an angle from -pi to pi, times the coefficients."""
    if M < 1:
        return zeros(0, device=device)
    if M == 1:
        return ones(1, device=device)
    n = _odd(M, device)
    total: Any = coefficients[0]
    for k, value in enumerate(coefficients[1:], 1):
        total = add(total, multiply(value, cos(divide(multiply(k * _math.pi, n), M - 1))))
    return total  # type: ignore[no-any-return]


def blackman(M: float, *, device: Where | None = None) -> ShardedTensor:
    """Creates the Blackman window.

    >>> st.blackman(3).round(3).tolist()
    [-0.0, 1.0, -0.0]
    """
    return _cosines(M, device, 0.42, 0.5, 0.08)


def hamming(M: float, *, device: Where | None = None) -> ShardedTensor:
    """Creates the Hamming window.

    >>> st.hamming(3).round(3).tolist()
    [0.08, 1.0, 0.08]
    """
    return _cosines(M, device, 0.54, 0.46)


def hanning(M: float, *, device: Where | None = None) -> ShardedTensor:
    """Creates the Hann window.

    >>> st.hanning(5).tolist()
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return _cosines(M, device, 0.5, 0.5)


def bartlett(M: float, *, device: Where | None = None) -> ShardedTensor:
    """Creates the Bartlett window, a triangle.

    >>> st.bartlett(5).tolist()
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if M < 1:
        return zeros(0, device=device)
    if M == 1:
        return ones(1, device=device)
    n = _odd(M, device)
    slope = divide(n, M - 1)
    return where(less_equal(n, 0), add(1, slope), subtract(1, slope))


def kaiser(M: float, beta: float, *, device: Where | None = None) -> ShardedTensor:
    """Creates the Kaiser window.

    Args:
        M: the number of elements.
        beta: the shape: 0 is a rectangle, and 14 a good start.
        device: see `shardtensor.functions.numpy.windows`.

    >>> st.kaiser(3, 14).round(6).tolist()
    [8e-06, 1.0, 8e-06]
    """
    if M == 1:
        return ones(1, device=device)
    half = (M - 1) / 2.0
    position = divide(subtract(arange(0, M, dtype=np.float64, device=device), half), half)
    return divide(i0(multiply(beta, sqrt(subtract(1, multiply(position, position))))), float(np.i0(beta)))
