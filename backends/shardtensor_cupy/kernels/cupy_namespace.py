"""The array-API namespace of CuPy's arrays: CuPy's ufuncs, corrected where their semantics differ from NumPy's.

Functions that are neither ufuncs nor defined here come from `array_api_compat.cupy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor_cupy.kernels import large_ufuncs
from shardtensor_cupy.kernels.elementwise_kernel import TYPES, ElementwiseKernel
from shardtensor_cupy.kernels.number_sequences import Sequences
from shardtensor_cupy.kernels.ordering_functions import OrderingFunctions
from shardtensor_cupy.kernels.reducing_functions import ReducingFunctions

__all__ = ["Namespace"]


class Namespace(ReducingFunctions, OrderingFunctions):
    """The array-API namespace; its functions run on the current GPU.

    Ufuncs are CuPy's own, because some of array-api-compat's wrappers take no ``out=`` or cast differently.
    """

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        self._sequences = Sequences(cupy)
        self._quotients = {char: _quotient(cupy, char) for char in "FD"}
        self._between = self.fuse(_between(cupy))

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

    # -- quotients and powers ----------------------------------------------------------------------

    def divide(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy. Complex numbers are divided by NumPy's method: CuPy's gives NaN for quotients by 0."""
        if not any(_is_complex(x) for x in (x1, x2)):
            return self._ufunc("divide", x1, x2, out=out)
        dtype = np.result_type(*[getattr(x, "dtype", x) for x in (x1, x2)])
        parts = [part for x in (x1, x2) for part in self._parts(x, dtype)]
        quotients = self._cupy.empty(np.broadcast_shapes(*[getattr(x, "shape", ()) for x in (x1, x2)]), dtype)
        self._quotients[dtype.char](*parts, quotients.real, quotients.imag)
        if out is None:
            return quotients
        out[...] = quotients
        return out

    def _parts(self, x: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        """Returns the real and the imaginary part of an operand as an operand of a complex dtype."""
        real = np.empty(0, dtype).real.dtype
        if not isinstance(x, self._cupy.ndarray):
            x = np.asarray(x, dtype)[()]
        elif x.dtype.kind != "c":
            return x.astype(real, copy=False), real.type(0)
        else:
            x = x.astype(dtype, copy=False)
        return x.real, x.imag

    def float_power(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy. CuPy's function computes complex powers of single precision where it can."""
        if not any(_is_complex(x) for x in (x1, x2)):
            return self._ufunc("float_power", x1, x2, out=out)
        return self._cupy.power(*[_as_complex(x) for x in (x1, x2)], out=out, dtype=np.complex128)

    def reciprocal(self, x: Any, /, *, out: Any = None) -> Any:
        """See NumPy. That of the integer 0, for which CuPy gives 0, is the one that NumPy has on this host."""
        if x.dtype.kind not in "biu":
            return self._ufunc("reciprocal", x, out=out)
        zero = self._cupy.equal(x, 0)
        result = self._cupy.reciprocal(x, out=out)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._cupy.copyto(result, np.reciprocal(np.zeros(1, result.dtype))[0], where=zero)
        return result

    # -- sequences and matrices --------------------------------------------------------------------

    def ramp(self, begin: int, end: int, step: Any, first: Any, dtype: Any, computed: Any) -> Any:
        """Returns ``i * step + first`` for a range of integers; see `Sequences.ramp`. None for short ranges."""
        if end - begin < large_ufuncs.LARGE:
            return None
        return self._sequences.ramp(begin, end, step, first, dtype, computed)

    def convolved(self, a: Any, v: Any, before: int, count: int) -> Any:
        """Returns a part of a convolution; see `Sequences.convolve`."""
        return self._sequences.convolve(self._in_rows(a), self._in_rows(v), before, count)

    def difference_quotient(self, x1: Any, x2: Any, distance: float, out: Any) -> None:
        """Writes the differences of floats, divided by a number; by one kernel for numbers in C."""
        if not self._sequences.difference_quotient(x1, x2, distance, out):
            self._cupy.subtract(x1, x2, out=out)
            self._cupy.true_divide(out, distance, out=out)

    def triangle(self, x: Any, below: int, lower: bool) -> Any:
        """Returns matrices with zeros beyond a diagonal; None for small ones, and for some sizes and dtypes."""
        return self._sequences.triangle(self._in_rows(x), below, lower) if x.size >= large_ufuncs.LARGE else None

    def cross_products(self, a: Sequence[Any], b: Sequence[Any], axis: int, dtype: Any) -> Any:
        """Returns the cross products of vectors, given their parts; None for some dtypes."""
        return self._sequences.cross_products(a, b, axis, dtype)

    # -- other functions ---------------------------------------------------------------------------

    def clip(self, x: Any, /, min: Any = None, max: Any = None, *, out: Any = None) -> Any:
        """See NumPy. The bounds take part in type promotion, and a NaN bound gives NaN."""
        if x.dtype.kind in "iu":  # An integer beyond the dtype's range has no effect, and cannot be converted.
            known = np.iinfo(x.dtype)
            min = None if type(min) is int and min <= known.min else min
            max = None if type(max) is int and max >= known.max else max
        operands = [x, *[bound for bound in (min, max) if bound is not None]]
        dtype = np.result_type(*[getattr(a, "dtype", a) for a in operands])
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

    def vecdot(self, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
        """See NumPy. For bools the result is whether any pair of elements is true in both operands."""
        if x1.dtype == x2.dtype == np.bool_:  # array-api-compat sums them as int8, in which 256 true pairs are 0.
            if x1.shape[axis] != x2.shape[axis]:
                raise ValueError(f"vecdot: x1 has size {x1.shape[axis]} along axis {axis}, and x2 has {x2.shape[axis]}")
            pairs = [self._cupy.moveaxis(x, axis, -1) for x in (x1, x2)]
            return self._cupy.logical_and(*pairs).any(axis=-1)
        return self._compat.vecdot(x1, x2, axis=axis)

    def maximum_at(self, x: Any, indices: Any, values: Any) -> None:
        """Writes the maximum of an element of x and of the values whose index it has, as NumPy's ``maximum.at``."""
        self._cupy.maximum.at(x, indices, values)


_QUOTIENT = """
const real u = fabs(c), v = fabs(d);
if (u >= v) {
    if (u == 0 && v == 0) {
        e = a / u;
        f = b / u;
    } else {
        const real ratio = d / c, scale = (real)1 / (c + d * ratio);
        e = (a + b * ratio) * scale;
        f = (b - a * ratio) * scale;
    }
} else {
    const real ratio = c / d, scale = (real)1 / (d + c * ratio);
    e = (a * ratio + b) * scale;
    f = (b * ratio - a) * scale;
}
"""
"""The text of (a, b) / (c, d) -> (e, f), as NumPy computes it."""


def _quotient(cupy: Any, char: str) -> ElementwiseKernel:
    """Returns the kernel that divides complex numbers of a dtype."""
    real = np.dtype(char).type().real.dtype.name
    inputs, outputs = [", ".join([f"{real} {name}" for name in names]) for names in ("abcd", "ef")]
    operation = _QUOTIENT.replace("real", TYPES[real])
    return ElementwiseKernel(cupy, inputs, outputs, operation, f"shardtensor_divide_{char}", "", ("--fmad=false",))


def _between(cupy: Any) -> Callable[..., Any]:
    """Returns `clip` of operands of one dtype as a composition of ufuncs."""
    minimum, maximum = cupy.minimum, cupy.maximum

    def clip(x: Any, low: Any, high: Any) -> Any:
        return minimum(maximum(x, low), high)

    return clip


def _is_complex(x: Any) -> bool:
    return isinstance(x, complex) or getattr(x, "dtype", np.dtype(bool)).kind == "c"


def _as_complex(x: Any) -> Any:
    """Returns a Python number as one that has the dtype complex128 as an operand."""
    return x if hasattr(x, "dtype") else np.complex128(x)


def _element(bound: Any, dtype: Any) -> Any:
    """Returns an array or a Python number as an operand of a fused kernel, in which Python numbers have dtypes of their
    own.

    Raises:
        OverflowError: the number is an integer out of the range of the dtype.
    """
    if hasattr(bound, "dtype"):
        return bound
    return np.asarray(bound if dtype.kind in "iu" or type(bound) is not int else float(bound), dtype)[()]
