"""Declarations of the elementwise functions (a chapter of the array API standard).

Common to all of them:

- Each result is a new tensor, except for the views that `real` and `imag` return.
- Operands broadcast against one another as in NumPy.
- The dtype of the result is NumPy's. Python scalars are weak: they take the dtype of the array operands if its kind
  can represent them. Integers wrap around on overflow.
- A real element outside a function's domain gives NaN; as a complex number it gives the principal value.
- Complex numbers are ordered by their real parts, then by their imaginary parts. Logical functions treat every
  nonzero element of any dtype as true, NaN included.
- The sharding of the result follows from the operands': if they agree, no data moves; otherwise the operands that are
  cheapest to move are transferred. A dimension of size 1 that is broadcast is not sharded.

Raises:
    ShapeError: the shapes of the operands do not broadcast.
    ArgumentTypeError: the function is not defined for the dtype of an operand: `bitwise_and` does not take floats, and
        functions of real elements do not take complex ones.
"""

from __future__ import annotations

import operator as python

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.functions.building.python_numbers import of_numbers
from shardtensor.host import blockwise
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_elementwise"


@of_numbers(python.abs)
@operator("... -> ...")
def abs(x: ArrayLike, /) -> ShardedTensor:
    """Absolute value of each element; for complex elements the modulus, which is real.

    >>> st.abs(st.asarray([-2, 0, 3])).tolist()
    [2, 0, 3]
    """


@operator("... -> ...")
def acos(x: ArrayLike, /) -> ShardedTensor:
    """Inverse cosine of each element, in radians, from 0 to pi.

    >>> st.acos(st.asarray([1.0, -1.0])).tolist()
    [0.0, 3.141592653589793]
    """


@operator("... -> ...")
def acosh(x: ArrayLike, /) -> ShardedTensor:
    """Inverse hyperbolic cosine of each element, 0 or greater; defined for real elements of at least 1.

    >>> st.acosh(st.asarray([1.0, np.inf])).tolist()
    [0.0, inf]
    """


@of_numbers(python.add)
@operator("..., ... -> ...", tags=("linear",))
def add(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Sum of each pair of elements, ``x1 + x2``; for two bools, their logical OR.

    >>> st.add(st.asarray([[1], [2]]), st.asarray([10, 20])).tolist()
    [[11, 21], [12, 22]]
    """


@operator("... -> ...")
def asin(x: ArrayLike, /) -> ShardedTensor:
    """Inverse sine of each element, in radians, from -pi/2 to pi/2.

    >>> st.asin(st.asarray([0.0, 1.0])).tolist()
    [0.0, 1.5707963267948966]
    """


@operator("... -> ...")
def asinh(x: ArrayLike, /) -> ShardedTensor:
    """Inverse hyperbolic sine of each element: log(x + sqrt(x**2 + 1)), defined for all real elements.

    >>> st.asinh(st.asarray([0.0, -np.inf])).tolist()
    [0.0, -inf]
    """


@operator("... -> ...")
def atan(x: ArrayLike, /) -> ShardedTensor:
    """Inverse tangent of each element, in radians, from -pi/2 to pi/2, the values at the infinities.

    >>> st.atan(st.asarray([0.0, np.inf])).tolist()
    [0.0, 1.5707963267948966]
    """


@operator("..., ... -> ...")
def atan2(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Angle, in radians from -pi to pi, of the point with the real coordinates (x2, x1); signs of zeros count.

    >>> st.atan2(st.asarray([0.0, 1.0]), st.asarray([-1.0, 0.0])).tolist()
    [3.141592653589793, 1.5707963267948966]
    """


@operator("... -> ...")
def atanh(x: ArrayLike, /) -> ShardedTensor:
    """Inverse hyperbolic tangent of each element; defined for real elements from -1 to 1, infinite at both ends.

    >>> st.atanh(st.asarray([0.0, -0.0])).tolist()
    [0.0, -0.0]
    """


@operator("..., ... -> ...")
def bitwise_and(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Bitwise AND of each pair of integers (negative ones in two's complement) or bools.

    >>> st.bitwise_and(st.asarray([12, 5]), st.asarray([10, -1])).tolist()
    [8, 5]
    """


@operator("... -> ...")
def bitwise_invert(x: ArrayLike, /) -> ShardedTensor:
    """Bitwise NOT of each integer, which is -x - 1 for a signed x; for bools, the logical NOT.

    >>> st.bitwise_invert(st.asarray([0, 5])).tolist()
    [-1, -6]
    """


@operator("..., ... -> ...")
def bitwise_left_shift(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Each integer x1 shifted left by x2 >= 0 bits: x1 * 2**x2 without the bits that leave its width.

    >>> st.bitwise_left_shift(st.asarray([1, -3]), st.asarray([4, 1])).tolist()
    [16, -6]
    """


@operator("..., ... -> ...")
def bitwise_or(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Bitwise OR of each pair of integers (negative ones in two's complement) or bools.

    >>> st.bitwise_or(st.asarray([12, 5]), st.asarray([10, 0])).tolist()
    [14, 5]
    """


@operator("..., ... -> ...")
def bitwise_right_shift(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Each integer x1 shifted right by x2 >= 0 bits, preserving the sign: x1 // 2**x2.

    >>> st.bitwise_right_shift(st.asarray([16, -5]), st.asarray([4, 1])).tolist()
    [1, -3]
    """


@operator("..., ... -> ...")
def bitwise_xor(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Bitwise exclusive OR of each pair of integers (negative ones in two's complement) or bools.

    >>> st.bitwise_xor(st.asarray([12, 5]), st.asarray([10, 5])).tolist()
    [6, 0]
    """


@operator("... -> ...", composed=lambda x: copysign(multiply(pow(a := abs(x), 341 / 1024), pow(a, 1 / 3072)), x))
def cbrt(x: ArrayLike, /) -> ShardedTensor:
    """Cube root of each real element, which has the sign of the element.

    >>> st.cbrt(st.asarray([8.0, -27.0])).round(12).tolist()
    [2.0, -3.0]"""


@operator("... -> ...")
def ceil(x: ArrayLike, /) -> ShardedTensor:
    """Least integer not less than each real element; floats remain floats.

    >>> st.ceil(st.asarray([1.2, -1.2, 3.0])).tolist()
    [2.0, -1.0, 3.0]
    """


@operator("..., ..., ... -> ...", tags=("in kernels",))
def clip(x: ArrayLike, /, min: ArrayLike | None = None, max: ArrayLike | None = None) -> ShardedTensor:
    """Each element limited to [min, max], where None means no bound; max is used where min > max; NaN remains NaN.

    >>> st.clip(st.asarray([-5, 2, 9]), 0, 4).tolist()
    [0, 2, 4]
    """


@operator("... -> ...", tags=("linear",))
def conj(x: ArrayLike, /) -> ShardedTensor:
    """Complex conjugate of each element; real elements are unchanged.

    >>> st.conj(st.asarray([1 + 2j, 3j])).tolist()
    [(1-2j), -3j]
    """


@operator("..., ... -> ...")
def copysign(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Magnitude of each real x1 with the sign of x2, where -0.0 is negative; the result is floating-point.

    >>> st.copysign(st.asarray([1.0, -2.0]), st.asarray([-0.0, 3.0])).tolist()
    [-1.0, 2.0]
    """


@operator("... -> ...")
def cos(x: ArrayLike, /) -> ShardedTensor:
    """Cosine of each element, an angle in radians.

    >>> st.cos(st.asarray([0.0, np.pi])).tolist()
    [1.0, -1.0]
    """


@operator("... -> ...")
def cosh(x: ArrayLike, /) -> ShardedTensor:
    """Hyperbolic cosine of each element: (exp(x) + exp(-x)) / 2.

    >>> st.cosh(st.asarray([0.0, -np.inf])).tolist()
    [1.0, inf]
    """


@of_numbers(python.truediv)
@operator("..., ... -> ...", tags=("linear in the first",))
def divide(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """True quotient of each pair, ``x1 / x2``; floating-point also for integers and bools.

    >>> st.divide(st.asarray([7, -7]), 2).tolist()
    [3.5, -3.5]
    """


@of_numbers(python.eq)
@operator("..., ... -> ...")
def equal(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether the elements of each pair are equal, as bools; NaN is not equal to anything, itself included.

    >>> st.equal(st.asarray([1.0, 2.0, np.nan]), st.asarray([1.0, 3.0, np.nan])).tolist()
    [True, False, False]
    """


@operator("... -> ...")
def exp(x: ArrayLike, /) -> ShardedTensor:
    """Exponential of each element: e to the power of x.

    >>> st.exp(st.asarray([0.0, -np.inf])).tolist()
    [1.0, 0.0]
    """


@operator("... -> ...")
def expm1(x: ArrayLike, /) -> ShardedTensor:
    """exp(x) - 1 of each element, accurate also near 0, where the subtraction would cancel.

    >>> st.expm1(st.asarray([0.0, 1e-20])).tolist()
    [0.0, 1e-20]
    """


@operator("... -> ...")
def floor(x: ArrayLike, /) -> ShardedTensor:
    """Greatest integer not greater than each real element; floats remain floats.

    >>> st.floor(st.asarray([1.8, -1.2, 3.0])).tolist()
    [1.0, -2.0, 3.0]
    """


@of_numbers(python.floordiv)
@operator("..., ... -> ...")
def floor_divide(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Quotient of each real pair, rounded towards -infinity, ``x1 // x2``; an integer divided by 0 gives 0.

    >>> st.floor_divide(st.asarray([7, -7]), 2).tolist()
    [3, -4]
    """


@of_numbers(python.gt)
@operator("..., ... -> ...")
def greater(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether x1 > x2 for each pair, as bools; False if either element is NaN.

    >>> st.greater(st.asarray([1, 2, 3]), 2).tolist()
    [False, False, True]
    """


@of_numbers(python.ge)
@operator("..., ... -> ...")
def greater_equal(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether x1 >= x2 for each pair, as bools; False if either element is NaN.

    >>> st.greater_equal(st.asarray([1, 2, 3]), 2).tolist()
    [False, True, True]
    """


@operator("..., ... -> ...")
def hypot(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """sqrt(x1**2 + x2**2) of each real pair, without overflow or underflow of the squares.

    >>> st.hypot(st.asarray([3.0, 5.0]), st.asarray([4.0, 12.0])).tolist()
    [5.0, 13.0]
    """


@operator("... -> ...")
def imag(x: ArrayLike, /) -> ShardedTensor:
    """Imaginary part of each element, which is real: a view of a complex x; zeros for a real x.

    >>> st.imag(st.asarray([1 + 2j, 3j])).tolist()
    [2.0, 3.0]
    """


@implements(imag, "view_spec")
def _imag_view(view_spec: ViewSpec) -> ViewSpec | None:
    return view_spec.real_or_imag("imag")


@operator("... -> ...")
def isfinite(x: ArrayLike, /) -> ShardedTensor:
    """Whether each element is neither infinite nor NaN, as bools; for complex elements, whether both parts are finite.

    >>> st.isfinite(st.asarray([1.0, np.inf, np.nan])).tolist()
    [True, False, False]
    """


@operator("... -> ...")
def isinf(x: ArrayLike, /) -> ShardedTensor:
    """Whether each element is infinite, of either sign, as bools; for complex elements, whether either part is.

    >>> st.isinf(st.asarray([1.0, -np.inf, np.nan])).tolist()
    [False, True, False]
    """


@operator("... -> ...")
def isnan(x: ArrayLike, /) -> ShardedTensor:
    """Whether each element is NaN, as bools; for complex elements, whether either part is.

    >>> st.isnan(st.asarray([1.0, np.inf, np.nan])).tolist()
    [False, False, True]
    """


@of_numbers(python.lt)
@operator("..., ... -> ...")
def less(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether x1 < x2 for each pair, as bools; False if either element is NaN.

    >>> st.less(st.asarray([1, 2, 3]), 2).tolist()
    [True, False, False]
    """


@of_numbers(python.le)
@operator("..., ... -> ...")
def less_equal(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether x1 <= x2 for each pair, as bools; False if either element is NaN.

    >>> st.less_equal(st.asarray([1, 2, 3]), 2).tolist()
    [True, True, False]
    """


@operator("... -> ...")
def log(x: ArrayLike, /) -> ShardedTensor:
    """Natural logarithm of each element; for complex elements, with an imaginary part from -pi to pi.

    >>> st.log(st.asarray([1.0, np.inf])).tolist()
    [0.0, inf]
    """


@operator("... -> ...")
def log10(x: ArrayLike, /) -> ShardedTensor:
    """Logarithm to base 10 of each element; for complex elements, the principal log(x) / log(10).

    >>> st.log10(st.asarray([1.0, 100.0])).tolist()
    [0.0, 2.0]
    """


@operator("... -> ...")
def log1p(x: ArrayLike, /) -> ShardedTensor:
    """log(1 + x) of each element, accurate also near 0, where the sum would be rounded to 1.

    >>> st.log1p(st.asarray([0.0, 1e-20])).tolist()
    [0.0, 1e-20]
    """


@operator("... -> ...")
def log2(x: ArrayLike, /) -> ShardedTensor:
    """Logarithm to base 2 of each element; for complex elements, the principal log(x) / log(2).

    >>> st.log2(st.asarray([1.0, 8.0])).tolist()
    [0.0, 3.0]
    """


@operator("..., ... -> ...")
def logaddexp(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """log(exp(x1) + exp(x2)) of each real pair, without overflow or underflow of the exponentials.

    >>> st.logaddexp(st.asarray([1000.0, 0.0]), st.asarray([0.0, -np.inf])).tolist()
    [1000.0, 0.0]
    """


@operator("..., ... -> ...")
def logical_and(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Logical AND of each pair of elements, as bools.

    >>> st.logical_and(st.asarray([0, 1, 2]), st.asarray([True, False, True])).tolist()
    [False, False, True]
    """


@operator("... -> ...")
def logical_not(x: ArrayLike, /) -> ShardedTensor:
    """Logical NOT of each element, as bools: whether it is zero.

    >>> st.logical_not(st.asarray([0.0, 0.5, np.nan])).tolist()
    [True, False, False]
    """


@operator("..., ... -> ...")
def logical_or(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Logical OR of each pair of elements, as bools.

    >>> st.logical_or(st.asarray([0, 0, 2]), st.asarray([True, False, True])).tolist()
    [True, False, True]
    """


@operator("..., ... -> ...")
def logical_xor(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Logical exclusive OR of each pair of elements, as bools.

    >>> st.logical_xor(st.asarray([0, 0, 2]), st.asarray([True, False, True])).tolist()
    [True, False, False]
    """


@operator("..., ... -> ...")
def maximum(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Greater element of each pair; NaN if either is NaN.

    >>> st.maximum(st.asarray([1.0, 5.0, np.nan]), 3.0).tolist()
    [3.0, 5.0, nan]
    """


@operator("..., ... -> ...")
def minimum(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Lesser element of each pair; NaN if either is NaN.

    >>> st.minimum(st.asarray([1.0, 5.0, np.nan]), 3.0).tolist()
    [1.0, 3.0, nan]
    """


@of_numbers(python.mul)
@operator("..., ... -> ...", tags=("linear in each",))
def multiply(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Product of each pair of elements, ``x1 * x2``; for two bools, their logical AND.

    >>> st.multiply(st.asarray([[1], [2]]), st.asarray([10, 20])).tolist()
    [[10, 20], [20, 40]]
    """


@of_numbers(python.neg)
@operator("... -> ...", tags=("exact", "linear"))
def negative(x: ArrayLike, /) -> ShardedTensor:
    """Each element negated, ``-x``; unsigned integers wrap around below 0; bools raise ArgumentTypeError.

    >>> st.negative(st.asarray([1, -2])).tolist()
    [-1, 2]
    """


@operator("..., ... -> ...")
def nextafter(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Next floating-point number after each real x1 in the direction of x2; x2 itself if the two are equal.

    >>> st.nextafter(st.asarray([1.0, 0.0]), st.asarray([2.0, 0.0])).tolist()
    [1.0000000000000002, 0.0]
    """


@of_numbers(python.ne)
@operator("..., ... -> ...")
def not_equal(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether the elements of each pair differ, as bools; NaN differs from everything, itself included.

    >>> st.not_equal(st.asarray([1.0, 2.0, np.nan]), st.asarray([1.0, 3.0, np.nan])).tolist()
    [False, True, True]
    """


@of_numbers(python.pos)
@operator("... -> ...", tags=("linear",))
def positive(x: ArrayLike, /) -> ShardedTensor:
    """Each element unchanged, ``+x``; bools raise ArgumentTypeError.

    >>> st.positive(st.asarray([1, -2])).tolist()
    [1, -2]
    """


@of_numbers(python.pow)
@operator("..., ... -> ...", tags=("fails late",))
def pow(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """x1 to the power of x2, ``x1**x2``, with 0**0 = 1; for two integers an integer, which requires x2 >= 0.

    >>> st.pow(st.asarray([2, -3]), st.asarray([10, 3])).tolist()
    [1024, -27]
    """


@operator("... -> ...")
def real(x: ArrayLike, /) -> ShardedTensor:
    """Real part of each element: a view of x, also if x is real.

    >>> st.real(st.asarray([1 + 2j, 3j])).tolist()
    [1.0, 0.0]
    """


@implements(real, "view_spec")
def _real_view(view_spec: ViewSpec) -> ViewSpec | None:
    return view_spec.real_or_imag("real")


@operator("... -> ...")
def reciprocal(x: ArrayLike, /) -> ShardedTensor:
    """1 / x of each element; for integers truncated to an integer, which is 0 for abs(x) > 1.

    >>> st.reciprocal(st.asarray([2.0, -4.0])).tolist()
    [0.5, -0.25]
    """


@of_numbers(python.mod)
@operator("..., ... -> ...")
def remainder(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Remainder of `floor_divide` for each real pair, ``x1 % x2``, with the sign of x2; 0 for an integer divided by 0.

    >>> st.remainder(st.asarray([7, -7, 7]), st.asarray([3, 3, -3])).tolist()
    [1, 2, -2]
    """


@operator("... -> ...")
def round(x: ArrayLike, /, decimals: int = 0) -> ShardedTensor:
    """Each element rounded to ``decimals`` decimal places, to the even digit on a tie; complex ones in both parts.

    >>> st.round(st.asarray([0.5, 1.5, 2.6])).tolist(), st.round(st.asarray([3.14159, 271.8]), 2).tolist()
    ([0.0, 2.0, 3.0], [3.14, 271.8])
    """


@operator("... -> ...")
def sign(x: ArrayLike, /) -> ShardedTensor:
    """Sign of each element: -1, 0 or 1, NaN for NaN, and x / abs(x) or 0 if complex; bools raise ArgumentTypeError.

    >>> st.sign(st.asarray([-2.5, 0.0, 3.0])).tolist()
    [-1.0, 0.0, 1.0]
    """


@operator("... -> ...")
def signbit(x: ArrayLike, /) -> ShardedTensor:
    """Whether the sign bit of each real element is set, as bools; it is set for -0.0.

    >>> st.signbit(st.asarray([1.0, -0.0, -np.inf])).tolist()
    [False, True, True]
    """


@operator("... -> ...")
def sin(x: ArrayLike, /) -> ShardedTensor:
    """Sine of each element, an angle in radians.

    >>> st.sin(st.asarray([0.0, np.pi / 2])).tolist()
    [0.0, 1.0]
    """


@operator("... -> ...")
def sinh(x: ArrayLike, /) -> ShardedTensor:
    """Hyperbolic sine of each element: (exp(x) - exp(-x)) / 2.

    >>> st.sinh(st.asarray([0.0, -np.inf])).tolist()
    [0.0, -inf]
    """


@operator("... -> ...")
def sqrt(x: ArrayLike, /) -> ShardedTensor:
    """Nonnegative square root of each element; for complex elements, the root whose real part is not negative.

    >>> st.sqrt(st.asarray([0.0, 2.25])).tolist()
    [0.0, 1.5]
    """


@operator("... -> ...")
def square(x: ArrayLike, /) -> ShardedTensor:
    """Square of each element: x * x, also for complex elements.

    >>> st.square(st.asarray([3.0, -4.0])).tolist()
    [9.0, 16.0]
    """


@of_numbers(python.sub)
@operator("..., ... -> ...", tags=("linear",))
def subtract(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Difference of each pair, ``x1 - x2``; unsigned integers wrap around below 0; two bools raise ArgumentTypeError.

    >>> st.subtract(st.asarray([[1], [2]]), st.asarray([10, 20])).tolist()
    [[-9, -19], [-8, -18]]
    """


@operator("... -> ...")
def tan(x: ArrayLike, /) -> ShardedTensor:
    """Tangent of each element, an angle in radians.

    >>> st.tan(st.asarray([0.0, -0.0])).tolist()
    [0.0, -0.0]
    """


@operator("... -> ...")
def tanh(x: ArrayLike, /) -> ShardedTensor:
    """Hyperbolic tangent of each element: sinh(x) / cosh(x), from -1 to 1 for real elements.

    >>> st.tanh(st.asarray([0.0, -np.inf])).tolist()
    [0.0, -1.0]
    """


@operator("... -> ...")
def trunc(x: ArrayLike, /) -> ShardedTensor:
    """Each real element truncated towards 0 to an integer; floats remain floats.

    >>> st.trunc(st.asarray([1.8, -1.8])).tolist()
    [1.0, -1.0]
    """


implements(clip, "blockwise")(np.clip)
implements(round, "blockwise")(blockwise.round)
