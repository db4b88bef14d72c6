"""Calls of `numpy.linalg`, `numpy.fft` and NumPy's products with tensors: the functions of the same names in
`shardtensor.linalg`, `shardtensor.fft` and `shardtensor`. The extensions are imported on first use.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.errors import ArgumentTypeError
from shardtensor.tensor.numpy_compositions import BY_NAME, SAME_ARGUMENTS

_MODULES = {
    "numpy": "shardtensor", "numpy.fft": "shardtensor.fft", "numpy.linalg": "shardtensor.linalg",
    "numpy.lib.stride_tricks": "shardtensor.lib.stride_tricks",
}  # fmt: skip
"""NumPy's modules, and those that have their functions for tensors."""

_COMPOSED = {"einsum", "inner", "kron", "outer"} | BY_NAME
"""Functions of NumPy's main namespace that are not operators here, but composed of operators."""

_SAME = {"convolve", "correlate", "gradient", "sliding_window_view"} | SAME_ARGUMENTS
"""Functions that have the same arguments here, by position and by name."""

_OTHER_NAMES = {("pinv", "rcond"): "rtol"}
"""NumPy's names of parameters that have the standard's name here."""

_DEFAULTS = {"pinv": {"rtol": 1e-15}}
"""NumPy's defaults where they are not the standard's."""


def has_extension(function: Callable[..., Any]) -> bool:
    """Whether `call_extension` calls a function of NumPy for tensors."""
    return function.__name__ in _COMPOSED | _SAME or function.__module__ in ("numpy.linalg", "numpy.fft")


def call_extension(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls the function for tensors that has the name of a function of NumPy, with the same arguments.

    Raises:
        ArgumentTypeError: there is no such function, or it lacks an argument that differs from NumPy's default.
    """
    name = function.__name__
    if name in _SAME:
        return _form(function, name)[0](*args, **kwargs)
    if name == "einsum":  # Its operands have no names.
        defaults = {"out": None, "optimize": False, "order": "K", "casting": "safe", "dtype": None}
        given = {key: value for key, value in kwargs.items() if value is not defaults.get(key)}
        if others := sorted({*given} - {"optimize", "dtype"}):
            raise ArgumentTypeError(f"numpy.einsum: has no sharded form here with {others[0]}=; leave it out")
        return _form(function, name)[0](*args, **given)
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    if name == "svd" and given.pop("compute_uv", True) is False:
        name = "svdvals"
        given.pop("full_matrices", None)
    ours, arrays, rest = _form(function, name)
    params = dict(_DEFAULTS.get(name, {}))
    for key, value in given.items():
        theirs = inspect.signature(function).parameters[key].default
        if key in arrays or value is theirs or (type(value) is type(theirs) in (bool, str) and value == theirs):
            continue
        known = _OTHER_NAMES.get((name, key), key)
        if known not in rest:
            raise ArgumentTypeError(
                f"{function.__module__}.{name}: has no sharded form here with {key}={value!r:.60}; leave {key} out, or "
                "take the whole array on the host with np.asarray(x)"
            )
        params[known] = value
    return ours(*[given[key] for key in arrays if key in given], **params)


@functools.cache
def _form(function: Callable[..., Any], name: str) -> tuple[Callable[..., Any], tuple[str, ...], frozenset[str]]:
    """Returns the function for tensors, NumPy's names of its positional-only arguments, and its other arguments.

    Raises:
        ArgumentTypeError: there is no such function.
    """
    ours = getattr(importlib.import_module(_MODULES[function.__module__]), name, None)
    if ours is None:
        raise ArgumentTypeError(
            f"{function.__module__}.{name}: has no sharded form here; np.asarray(x) gives the whole array on the host"
        )
    parameters = inspect.signature(ours).parameters.values()
    count = sum(p.kind is p.POSITIONAL_ONLY for p in parameters)
    rest = frozenset([p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY])
    return ours, tuple(inspect.signature(function).parameters)[:count], rest
