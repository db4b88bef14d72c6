"""The array-API namespace of CuPy's arrays: CuPy's ufuncs, corrected where their semantics differ from NumPy's.

Functions that are neither ufuncs nor defined here come from `array_api_compat.cupy`.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentError
from shardtensor_cupy.elementwise import TYPES, ElementwiseKernel
from shardtensor_cupy.reductions import LEAST, Reductions, axes_of
from shardtensor_cupy.ufuncs import LARGE, LargeUfuncs

__all__ = ["Namespace"]

_C_TYPES = frozenset([name for name in TYPES if "complex" not in name and name not in ("float16", "bfloat16")])
"""The dtypes whose types in a kernel need no headers."""

_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


class Namespace:
    """The array-API namespace; its functions run on the current GPU.

    Ufuncs are CuPy's own, because some of array-api-compat's wrappers take no ``out=`` or cast differently.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._compat: Any = importlib.import_module("array_api_compat.cupy")
        self._large = LargeUfuncs(cupy)
        self._reductions = Reductions(cupy)
        self._choices: dict[str, ElementwiseKernel] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cupy, name, None)
        if isinstance(found, self._cupy.ufunc):
            found = functools.partial(_call, found, name in _COMPARISONS, self._large)
        else:
            found = getattr(self._compat, name)
        setattr(self, name, found)
        return found

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls ufuncs only as one kernel, which CuPy composes of their code.

        It is compiled for each number of dimensions and dtype at first use, under the name of the function.
        """
        fused: Callable[..., Any] = self._cupy.fuse(function)
        return fused

    # -- truth -------------------------------------------------------------------------------------

    def _truth(self, x: Any) -> Any:
        """Returns the truth value of each element: a bool array for an array, a bool for a number."""
        if not isinstance(x, self._cupy.ndarray):
            return bool(x)
        return x if x.dtype == np.bool_ else self._cupy.not_equal(x, 0)

    def _logical(self, name: str, x1: Any, x2: Any, out: Any) -> Any:
        """Applies a logical function to two operands.

        Only operands of one real dtype are passed unchanged: CuPy's logical functions take no complex numbers, and its
        `logical_and` of a signed and an unsigned integer treats negative numbers as false.
        """
        alike = isinstance(x1, self._cupy.ndarray) and isinstance(x2, self._cupy.ndarray) and x1.dtype == x2.dtype
        if not alike or x1.dtype.kind == "c":
            x1, x2 = self._truth(x1), self._truth(x2)
        return getattr(self._cupy, name)(x1, x2, out=out)

    def logical_and(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        return self._logical("logical_and", x1, x2, out)

    def logical_or(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        return self._logical("logical_or", x1, x2, out)

    def logical_xor(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        return self._logical("logical_xor", x1, x2, out)

    def logical_not(self, x: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        if x.dtype.kind == "c":  # CuPy has no logical_not of complex numbers.
            return self._cupy.equal(x, 0, out=out)
        return self._cupy.logical_not(x, out=out)

    # -- reductions --------------------------------------------------------------------------------

    def sum(self, x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        if x.size >= LEAST:
            result = x.dtype if dtype is None else np.dtype(dtype)
            total = _TOTALS.get((x.dtype.char, result.char))
            made = None if total is None else self._reductions("sum", x, axis, keepdims, total, result)
            if made is not None:
                return made
        return self._cupy.sum(x, axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(self, x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        made = self._mean(x, axis, keepdims, _result(x)) if dtype is None or x.dtype == dtype else None
        return self._compat.mean(x, axis=axis, dtype=dtype, keepdims=keepdims) if made is None else made

    def _mean(self, x: Any, axis: Any, keepdims: bool, result: Any) -> Any:
        total = _TOTALS.get((_result(x).char, result.char))
        if total is None:
            return None
        return self._reductions("sum", x, axis, keepdims, total, result, divisor=_count(x, axis))

    def squared_deviations(self, x: Any, means: Any, /, *, axis: Any, keepdims: bool) -> Any:
        """Returns the sums of the squared deviations from means of the dtype in which they are computed, by kernels
        that read x once; None where there are no such kernels.
        """
        total = _TOTALS.get((_result(x).char, means.dtype.char))
        if total is None or total != means.dtype or not means.flags.c_contiguous:
            return None
        return self._reductions("squares", x, axis, keepdims, total, total, means=means)

    def var(self, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
        """See NumPy."""
        result = _result(x)
        total = _TOTALS.get((result.char, result.char))
        means = None if total is None else self._mean(x, axis, True, total)
        if total is None or means is None:
            return self._compat.var(x, axis=axis, correction=correction, keepdims=keepdims)
        freedom = max(_count(x, axis) - correction, 0.0)
        if means.flags.c_contiguous:
            made = self._reductions("squares", x, axis, keepdims, total, result, divisor=freedom, means=means)
            if made is not None:
                return made
        deviations = self.subtract(x, means)
        return self._compat.astype(
            self.divide(self.sum(self.multiply(deviations, deviations), axis=axis, keepdims=keepdims), freedom),
            result,
            copy=False,
        )

    def std(self, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self.sqrt(self.var(x, axis=axis, correction=correction, keepdims=keepdims))

    def max(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._extremum("max", x, axis, keepdims)

    def min(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._extremum("min", x, axis, keepdims)

    def _extremum(self, name: str, x: Any, axis: Any, keepdims: bool) -> Any:
        if x.size >= LEAST and x.dtype.char in "fd":
            made = self._reductions(name, x, axis, keepdims, x.dtype, x.dtype)
            if made is not None:
                return made
        return getattr(self._cupy, name)(x, axis=axis, keepdims=keepdims)

    def adds_everywhere(self, shape: Sequence[int], axes: Sequence[int], dtype: Any) -> bool:
        """See `Backend.adds_everywhere`."""
        return dtype.char in "efd" and self._reductions.takes(shape, axes)

    # -- other functions ---------------------------------------------------------------------------

    def where(self, condition: Any, x1: Any, x2: Any, /) -> Any:
        """See NumPy. The condition may be a number; integers out of range wrap around."""
        if not isinstance(condition, self._cupy.ndarray):
            condition = self._cupy.asarray(bool(condition))
        dtype = np.result_type(*[getattr(x, "dtype", x) for x in (x1, x2)])
        # NumPy converts Python integers, because CuPy raises OverflowError for those out of range.
        x1, x2 = [np.asarray(x).astype(dtype)[()] if type(x) is int else x for x in (x1, x2)]
        made = self._chosen(condition, x1, x2, dtype)
        return self._cupy.where(condition, x1, x2) if made is None else made

    def _chosen(self, condition: Any, x1: Any, x2: Any, dtype: np.dtype[Any]) -> Any:
        """Returns `where` of large arrays; None for small ones, and where operands are converted."""
        arrays = [x for x in (condition, x1, x2) if isinstance(x, self._cupy.ndarray)]
        if max([x.size for x in arrays]) < LARGE or dtype.name not in _C_TYPES:
            return None
        if condition.dtype != np.bool_ or any(x.dtype != dtype for x in arrays[1:]):
            return None
        if any(not x.flags.c_contiguous and x.flags.f_contiguous for x in arrays):
            return None  # CuPy's result has the memory order of the operands.
        name = dtype.name
        if name not in self._choices:
            self._choices[name] = ElementwiseKernel(
                self._cupy, f"bool condition, {name} yes, {name} no", f"{name} made", "made = condition ? yes : no",
                "shardtensor_where", "", (),
            )  # fmt: skip
        made = self._cupy.empty(np.broadcast_shapes(*[x.shape for x in arrays]), dtype)
        self._choices[name](condition, x1, x2, made)
        return made

    def clip(self, x: Any, /, min: Any = None, max: Any = None, *, out: Any = None) -> Any:
        """See NumPy. The bounds take part in type promotion, and a NaN bound gives NaN."""
        if x.dtype.kind in "iu":  # An integer beyond the dtype's range has no effect, and cannot be converted.
            known = np.iinfo(x.dtype)
            min = None if type(min) is int and min <= known.min else min
            max = None if type(max) is int and max >= known.max else max
        given = [x, *[bound for bound in (min, max) if bound is not None]]
        dtype = np.result_type(*[getattr(a, "dtype", a) for a in given])
        x, min, max = [a.astype(dtype, copy=False) if hasattr(a, "dtype") else a for a in (x, min, max)]
        if min is not None and max is not None:
            if out is None and x.dtype == dtype:
                return self._between(x, *[_element(bound, dtype) for bound in (min, max)])
            return self.minimum(self.maximum(x, min), max, out=out)
        if min is not None:
            return self.maximum(x, min, out=out)
        if max is not None:
            return self.minimum(x, max, out=out)
        if out is None:
            return x.copy()
        out[...] = x
        return out

    @functools.cached_property
    def _between(self) -> Any:
        """`clip` of operands of one dtype as one kernel."""
        minimum, maximum = self._cupy.minimum, self._cupy.maximum

        @self.fuse
        def clip(x: Any, low: Any, high: Any) -> Any:
            return minimum(maximum(x, low), high)

        return clip

    def vecdot(self, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
        """See NumPy. For bools the result is whether any pair of elements is true in both operands."""
        if x1.dtype == x2.dtype == np.bool_:  # array-api-compat sums them as int8, in which 256 true pairs are 0.
            if x1.shape[axis] != x2.shape[axis]:
                raise ArgumentError(
                    f"vecdot: x1 has {x1.shape[axis]} elements along axis {axis}, and x2 has {x2.shape[axis]}"
                )
            pairs = [self._cupy.moveaxis(x, axis, -1) for x in (x1, x2)]
            return self._cupy.logical_and(*pairs).any(axis=-1)
        return self._compat.vecdot(x1, x2, axis=axis)


_TOTALS = {(x, result): np.dtype(total) for x, result, total in ("eef", "eff", "edd", "fff", "fdd", "ddd")}
"""The dtypes in which floats of a dtype are added, for results of a dtype, where these kernels add them."""


def _result(x: Any) -> np.dtype[Any]:
    """Returns the dtype of the mean of an array."""
    return np.dtype(np.float64) if x.dtype.kind in "biu" else x.dtype


def _count(x: Any, axis: Any) -> int:
    """Returns the number of elements of which each element of a reduction is made."""
    return math.prod([x.shape[d] for d in axes_of(axis, x.ndim)])


def _call(ufunc: Any, compares: bool, large: LargeUfuncs, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a ufunc with operands that may include Python integers of any size.

    CuPy raises OverflowError for integers that do not fit into 64 bits or into the dtype of the selected loop. NumPy
    compares them with any operand, and converts them to floats if the loop computes in floats. Beside bools, NumPy
    takes them for int64, where CuPy lets them wrap around.
    """
    for x in args:
        if type(x) is int and not -(2**63) <= x < 2**63:
            if (compares or "ll->l" in ufunc.types) and all(type(y) is int or _is_bool(y) for y in args):
                raise OverflowError(f"Python integer {x} out of bounds for int64")
            break
    try:
        if any(getattr(x, "size", 0) >= LARGE for x in args) and (not kwargs or tuple(kwargs) == ("out",)):
            result = large(ufunc, args, kwargs.get("out"))
            if result is not NotImplemented:
                return result
        return ufunc(*args, **kwargs)
    except OverflowError:
        inexact = any(getattr(x, "dtype", np.dtype(bool)).kind in "fc" for x in args)
        if not (compares or inexact or "ll->l" not in ufunc.types):
            raise
        infinite = compares and not inexact
        return ufunc(*[_as_float(x, infinite) if type(x) is int else x for x in args], **kwargs)


def _is_bool(x: Any) -> bool:
    return type(x) is bool or getattr(x, "dtype", None) == np.bool_


def _element(bound: Any, dtype: Any) -> Any:
    """Returns an array or a Python number as an operand of a fused kernel, in which Python numbers have dtypes of their
    own.

    Raises:
        OverflowError: the number is an integer out of the range of the dtype.
    """
    if hasattr(bound, "dtype"):
        return bound
    return np.asarray(bound if dtype.kind in "iu" or type(bound) is not int else float(bound), dtype)[()]


def _as_float(x: int, infinite: bool) -> float:
    """Returns a Python integer as a float, or as an infinity of its sign if ``infinite``.

    An infinity compares with 64-bit integers as an integer of more than 64 bits does.
    """
    return math.copysign(math.inf, x) if infinite else float(x)
