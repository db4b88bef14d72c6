"""NumPy's other names of operators, and functions of NumPy that are composed of operators here.

`shardtensor.tensor.numpy_protocols` calls these functions where NumPy's are called with a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import call

NUMPY_NAMES = {
    "absolute": "abs", "amax": "max", "amin": "min", "around": "round",
    "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "bitwise_not": "bitwise_invert", "concatenate": "concat",
    "conjugate": "conj", "invert": "bitwise_invert", "left_shift": "bitwise_left_shift", "mod": "remainder",
    "power": "pow", "right_shift": "bitwise_right_shift", "true_divide": "divide",
}  # fmt: skip
"""NumPy's names of functions that have the array API standard's names here. NumPy's protocols call functions by them,
and the package has them as attributes that `dir` does not list.
"""


def _converted(x: Any) -> Any:
    """Returns an operand as a tensor, a host array or a Python scalar; lists are converted to host arrays."""
    if isinstance(x, (list, tuple)):
        return np.asarray(x)
    return call("asarray", x) if array_backend(x) is not None else x


def _isclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    """`numpy.isclose`: whether ``|a - b| <= atol + rtol |b|``, or both are equal; element by element."""
    a, b = _converted(a), _converted(b)
    if isinstance(b, int):
        b = float(b)
    elif hasattr(b, "dtype") and b.dtype.kind in "biu":  # The least integer has no absolute value in its dtype.
        b = b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.less_equal(np.abs(a - b), atol + rtol * np.abs(b)) & np.isfinite(b) | np.equal(a, b)
        return near | (np.isnan(a) & np.isnan(b)) if equal_nan else near


def _allclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> bool:
    """`numpy.allclose`: whether all elements are close, as by `_isclose`."""
    return bool(np.all(_isclose(a, b, rtol, atol, equal_nan)))


def _array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """`numpy.array_equal`: whether two arrays have the same shape and the same elements."""
    a1, a2 = _converted(a1), _converted(a2)
    if np.shape(a1) != np.shape(a2):
        return False
    same = np.equal(a1, a2)
    return bool(np.all(same | (np.isnan(a1) & np.isnan(a2)) if equal_nan else same))


COMPOSED: dict[str, Callable[..., Any]] = {
    "allclose": _allclose, "array_equal": _array_equal, "isclose": _isclose,
}  # fmt: skip
"""Functions of NumPy that are composed of operators, by their names."""
