"""How NumPy's functions are called with tensors: those that the package has under the same name, those that NumPy
computes itself, and the reasons why the others are refused.

`shardtensor.tensor.numpy_protocols` also calls every operator that has the name of a function of NumPy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

SAME_ARGUMENTS = frozenset((
    "allclose", "angle", "apply_along_axis", "apply_over_axes", "array_equal", "array_equiv", "block",
    "can_cast", "choose", "common_type", "compress", "corrcoef", "cov", "diag_indices_from", "ediff1d",
    "extract", "fill_diagonal", "fix", "histogram2d", "histogram_bin_edges", "histogramdd", "i0", "interp",
    "intersect1d", "isclose", "iscomplex", "iscomplexobj", "isreal", "isrealobj", "ix_", "min_scalar_type",
    "nan_to_num", "packbits", "piecewise", "place", "polyadd", "polyder", "polyint", "polymul", "polysub",
    "polyval", "put_along_axis", "putmask", "ravel_multi_index", "real_if_close", "select", "setdiff1d",
    "setxor1d", "sinc", "sort_complex", "trapezoid", "tril_indices_from", "trim_zeros", "triu_indices_from",
    "union1d", "unpackbits", "unravel_index", "unwrap", "vander",
))  # fmt: skip
"""Functions that have NumPy's arguments here, by position and by name."""

BY_NAME = frozenset(["average", "isneginf", "isposinf", "polyfit", "ptp"])
"""Functions that lack some of NumPy's arguments here, or have them in another order."""


def _on_host(x: Any) -> Any:
    """Returns an argument with each tensor in it, also in lists, as a host array."""
    if isinstance(x, (list, tuple)):
        return type(x)(map(_on_host, x))
    return np.asarray(x) if hasattr(type(x), "__array_function__") else x


def _computed_on_host(name: str) -> Callable[..., Any]:
    """Returns NumPy's function of host copies of its arguments."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(np, name)(*map(_on_host, args), **{key: _on_host(value) for key, value in kwargs.items()})

    return function


def _without_elements(name: str) -> Callable[..., Any]:
    """Returns NumPy's function of arrays of the same shapes and dtypes, which occupy the memory of one element."""

    def stand_in(x: Any) -> Any:
        tensor = hasattr(type(x), "__array_function__") and not isinstance(x, np.ndarray)
        return np.broadcast_to(np.empty((), x.dtype), x.shape) if tensor else x

    return lambda *args, **kwargs: getattr(np, name)(*map(stand_in, args), **kwargs)


def _between(name: str) -> Callable[..., Any]:
    """Returns the function for ranges between the elements of arrays, which is imported on first use."""
    return lambda *args, **kwargs: getattr(importlib.import_module("shardtensor.functions.grids"), f"{name}_between")(
        *args, **kwargs
    )


COMPUTED: dict[str, Callable[..., Any]] = {
    **{name: _computed_on_host(name) for name in ("array2string", "array_repr", "array_str", "savetxt")},
    "einsum_path": _without_elements("einsum_path"),
    **{name: _between(name) for name in ("geomspace", "linspace", "logspace")},
}
"""Functions whose results are text, files or plans, which NumPy makes of the elements on the host or without them; and
those of arrays that have another name than those of numbers.
"""

_DATES = "calendars are on the host only"

_REASONS = {
    "busday_count": _DATES,
    "busday_offset": _DATES,
    "is_busday": _DATES,
    "datetime_as_string": "tensors have no text",
    "poly": "the coefficients of a polynomial are few, and computed one after the other",
    "polydiv": "the coefficients of a polynomial are few, and computed one after the other",
    "roots": "the coefficients of a polynomial are few, and its roots are complex or real as the elements decide",
}


def refusal(name: str) -> str:
    """Returns the message of the error for a function of NumPy that is not called with tensors."""
    reason = f", since {_REASONS[name]}" if name in _REASONS else ""
    return f"numpy.{name}: has no sharded form here{reason}; np.asarray(x) gives the whole array on the host"
