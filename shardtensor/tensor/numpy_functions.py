"""NumPy's other names of operators, and functions of NumPy that are composed of operators here.

`shardtensor.tensor.numpy_protocols` calls these functions where NumPy's are called with a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import call
from shardtensor.errors import ArgumentTypeError

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


def _dot(a: Any, b: Any, out: Any = None) -> Any:
    """`numpy.dot`: the product of scalars, or the sum over the last dimension of a and the second last one of b."""
    a, b = _converted(a), _converted(b)
    if not np.ndim(a) or not np.ndim(b):
        return np.multiply(a, b, out=out)
    if np.ndim(b) <= 2:
        return np.matmul(a, b, out=out)
    if out is not None:
        raise ArgumentTypeError(
            f"numpy.dot: out is given, and b has {np.ndim(b)} dimensions; wanted at most 2, or no out"
        )
    return call("tensordot", a, b, axes=([np.ndim(a) - 1], [np.ndim(b) - 2]))


def _stacked(name: str) -> Callable[..., Any]:
    """Returns `numpy.vstack` or `numpy.hstack`: the operator of that name, whose result is converted to ``dtype``."""

    def stacked(tup: Sequence[Any], *, dtype: Any = None, casting: str = "same_kind") -> Any:
        made = call(name, [_converted(x) for x in tup])
        if dtype is None:
            return made
        if not np.can_cast(made.dtype, dtype, casting):  # type: ignore[arg-type]
            given = f"{made.dtype} to {np.dtype(dtype)}"
            raise ArgumentTypeError(f"numpy.{name}: {given} is not allowed by casting={casting!r}")
        return made.astype(dtype)

    return stacked


COMPOSED: dict[str, Callable[..., Any]] = {"dot": _dot, "hstack": _stacked("hstack"), "vstack": _stacked("vstack")}
"""Functions of NumPy that are composed of operators, by their names."""
