"""Elementwise functions: the standard's chapter of that name, declared.

What holds for all of them:

- Operands broadcast against one another as in NumPy.
- The dtype of the result is NumPy's. Python scalars are weak: they take the dtype of the array beside them if
  its kind can hold them. Integers wrap around where they overflow.
- A real element outside a function's domain gives NaN; as a complex number it gives the principal value.
- Complex numbers are ordered by real part, then by imaginary part. Where truth is asked for, every element of
  any dtype that is not zero is true, NaN included.
- The layout of the result follows the operands', so that nothing moves when they agree; where they do not,
  the cheaper one is moved. A dimension of size 1 that is broadcast is kept whole.

Raises:
    ShapeError: the operands' shapes do not broadcast.
    TypeError: the function does not take the dtype of an operand: `bitwise_and` takes no floats, and a
        function that asks for real elements no complex ones.
"""

from __future__ import annotations

from shardtensor.core import implements, operator
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


@operator("... -> ...")
def abs(x: ArrayLike, /) -> ShardedTensor:
    """Absolute value of each element; of a complex one its modulus, as a real number.

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
    """Inverse hyperbolic cosine of each element, 0 or greater; defined on real numbers from 1 on.

    >>> st.acosh(st.asarray([1.0, np.inf])).tolist()
    [0.0, inf]
    """


@operator("..., ... -> ...")
def add(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Sum of each pair of elements, ``x1 + x2``; of two bools, whether either is true.

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
    """Inverse hyperbolic sine of each element: log(x + sqrt(x**2 + 1)), an odd function of all real numbers.

    >>> st.asinh(st.asarray([0.0, -np.inf])).tolist()
    [0.0, -inf]
    """


@operator("... -> ...")
def atan(x: ArrayLike, /) -> ShardedTensor:
    """Inverse tangent of each element, in radians, from -pi/2 to pi/2, which the infinities reach.

    >>> st.atan(st.asarray([0.0, np.inf])).tolist()
    [0.0, 1.5707963267948966]
    """


@operator("..., ... -> ...")
def atan2(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Angle, in radians from -pi to pi, of the point with real coordinates (x2, x1); signs of zeros count.

    >>> st.atan2(st.asarray([0.0, 1.0]), st.asarray([-1.0, 0.0])).tolist()
    [3.141592653589793, 1.5707963267948966]
    """


@operator("... -> ...")
def atanh(x: ArrayLike, /) -> ShardedTensor:
    """Inverse hyperbolic tangent of each element: defined on real numbers from -1 to 1; infinite at both.

    >>> st.atanh(st.asarray([0.0, -0.0])).tolist()
    [0.0, -0.0]
    """


@operator("..., ... -> ...")
def bitwise_and(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Bits set in both elements of each pair of integers (negative ones in two's complement) or bools.

    >>> st.bitwise_and(st.asarray([12, 5]), st.asarray([10, -1])).tolist()
    [8, 5]
    """


@operator("... -> ...")
def bitwise_invert(x: ArrayLike, /) -> ShardedTensor:
    """All bits flipped in each integer, which makes a signed x into -x - 1; of a bool, its negation.

    >>> st.bitwise_invert(st.asarray([0, 5])).tolist()
    [-1, -6]
    """


@operator("..., ... -> ...")
def bitwise_left_shift(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Bits of each integer moved up by x2 >= 0 places: x1 * 2**x2 without the bits that leave its width.

    >>> st.bitwise_left_shift(st.asarray([1, -3]), st.asarray([4, 1])).tolist()
    [16, -6]
    """


@operator("..., ... -> ...")
def bitwise_or(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Bits set in either element of each pair of integers (negative ones in two's complement) or bools.

    >>> st.bitwise_or(st.asarray([12, 5]), st.asarray([10, 0])).tolist()
    [14, 5]
    """


@operator("..., ... -> ...")
def bitwise_right_shift(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Bits of each integer moved down by x2 >= 0 places, the sign kept: x1 // 2**x2.

    >>> st.bitwise_right_shift(st.asarray([16, -5]), st.asarray([4, 1])).tolist()
    [1, -3]
    """


@operator("..., ... -> ...")
def bitwise_xor(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Bits set in exactly one element of each pair of integers (negative ones in two's complement) or bools.

    >>> st.bitwise_xor(st.asarray([12, 5]), st.asarray([10, 5])).tolist()
    [6, 0]
    """


@operator("... -> ...")
def ceil(x: ArrayLike, /) -> ShardedTensor:
    """Least whole number that is not below each real element; floats stay floats.

    >>> st.ceil(st.asarray([1.2, -1.2, 3.0])).tolist()
    [2.0, -1.0, 3.0]
    """


@operator("..., ..., ... -> ...")
def clip(x: ArrayLike, /, min: ArrayLike | None = None, max: ArrayLike | None = None) -> ShardedTensor:
    """Each element brought into [min, max], where None is no bound; max wins over a greater min; NaN stays.

    >>> st.clip(st.asarray([-5, 2, 9]), 0, 4).tolist()
    [0, 2, 4]
    """


@operator("... -> ...")
def conj(x: ArrayLike, /) -> ShardedTensor:
    """Complex conjugate of each element: the sign of its imaginary part flipped; real numbers are unchanged.

    >>> st.conj(st.asarray([1 + 2j, 3j])).tolist()
    [(1-2j), -3j]
    """


@operator("..., ... -> ...")
def copysign(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Magnitude of each real x1 with the sign of x2, where -0.0 counts as negative; always floating-point.

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


@operator("..., ... -> ...")
def divide(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """True quotient of each pair, ``x1 / x2``: a floating-point number, of integers and bools too.

    >>> st.divide(st.asarray([7, -7]), 2).tolist()
    [3.5, -3.5]
    """


@operator("..., ... -> ...")
def equal(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether the elements of each pair have the same value, as bools; NaN equals nothing, itself included.

    >>> st.equal(st.asarray([1.0, 2.0, np.nan]), st.asarray([1.0, 3.0, np.nan])).tolist()
    [True, False, False]
    """


@operator("... -> ...")
def exp(x: ArrayLike, /) -> ShardedTensor:
    """e to the power of each element.

    >>> st.exp(st.asarray([0.0, -np.inf])).tolist()
    [1.0, 0.0]
    """


@operator("... -> ...")
def expm1(x: ArrayLike, /) -> ShardedTensor:
    """exp(x) - 1 of each element, accurate where x is so near 0 that the subtraction would cancel.

    >>> st.expm1(st.asarray([0.0, 1e-20])).tolist()
    [0.0, 1e-20]
    """


@operator("... -> ...")
def floor(x: ArrayLike, /) -> ShardedTensor:
    """Greatest whole number that is not above each real element; floats stay floats.

    >>> st.floor(st.asarray([1.8, -1.2, 3.0])).tolist()
    [1.0, -2.0, 3.0]
    """


@operator("..., ... -> ...")
def floor_divide(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Quotient of each real pair, rounded towards -infinity, ``x1 // x2``; an integer divided by 0 gives 0.

    >>> st.floor_divide(st.asarray([7, -7]), 2).tolist()
    [3, -4]
    """


@operator("..., ... -> ...")
def greater(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether x1 > x2 in each pair, as bools; false where either is NaN.

    >>> st.greater(st.asarray([1, 2, 3]), 2).tolist()
    [False, False, True]
    """


@operator("..., ... -> ...")
def greater_equal(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether x1 >= x2 in each pair, as bools; false where either is NaN.

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
    """Imaginary part of each element, as a real number; zero for real ones. A view, where x is complex.

    >>> st.imag(st.asarray([1 + 2j, 3j])).tolist()
    [2.0, 3.0]
    """


@implements(imag, "window")
def _imag_window(window: ViewSpec) -> ViewSpec | None:
    return None if window.part else window.only("imag")


@operator("... -> ...")
def isfinite(x: ArrayLike, /) -> ShardedTensor:
    """Whether each element is neither infinite nor NaN, as bools; of a complex one, both parts.

    >>> st.isfinite(st.asarray([1.0, np.inf, np.nan])).tolist()
    [True, False, False]
    """


@operator("... -> ...")
def isinf(x: ArrayLike, /) -> ShardedTensor:
    """Whether each element is infinite, of either sign, as bools; of a complex one, whether either part is.

    >>> st.isinf(st.asarray([1.0, -np.inf, np.nan])).tolist()
    [False, True, False]
    """


@operator("... -> ...")
def isnan(x: ArrayLike, /) -> ShardedTensor:
    """Whether each element is NaN, as bools; of a complex one, whether either part is.

    >>> st.isnan(st.asarray([1.0, np.inf, np.nan])).tolist()
    [False, False, True]
    """


@operator("..., ... -> ...")
def less(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether x1 < x2 in each pair, as bools; false where either is NaN.

    >>> st.less(st.asarray([1, 2, 3]), 2).tolist()
    [True, False, False]
    """


@operator("..., ... -> ...")
def less_equal(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether x1 <= x2 in each pair, as bools; false where either is NaN.

    >>> st.less_equal(st.asarray([1, 2, 3]), 2).tolist()
    [True, True, False]
    """


@operator("... -> ...")
def log(x: ArrayLike, /) -> ShardedTensor:
    """Natural logarithm of each element; of a complex one, with an imaginary part from -pi to pi.

    >>> st.log(st.asarray([1.0, np.inf])).tolist()
    [0.0, inf]
    """


@operator("... -> ...")
def log10(x: ArrayLike, /) -> ShardedTensor:
    """Logarithm to base 10 of each element; of a complex one, the principal log(x) / log(10).

    >>> st.log10(st.asarray([1.0, 100.0])).tolist()
    [0.0, 2.0]
    """


@operator("... -> ...")
def log1p(x: ArrayLike, /) -> ShardedTensor:
    """log(1 + x) of each element, accurate where x is so near 0 that the sum would be rounded to 1.

    >>> st.log1p(st.asarray([0.0, 1e-20])).tolist()
    [0.0, 1e-20]
    """


@operator("... -> ...")
def log2(x: ArrayLike, /) -> ShardedTensor:
    """Logarithm to base 2 of each element; of a complex one, the principal log(x) / log(2).

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
    """Whether both elements of each pair are true, as bools.

    >>> st.logical_and(st.asarray([0, 1, 2]), st.asarray([True, False, True])).tolist()
    [False, False, True]
    """


@operator("... -> ...")
def logical_not(x: ArrayLike, /) -> ShardedTensor:
    """Whether each element is not true, as bools: whether it is zero.

    >>> st.logical_not(st.asarray([0.0, 0.5, np.nan])).tolist()
    [True, False, False]
    """


@operator("..., ... -> ...")
def logical_or(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether either element of each pair is true, as bools.

    >>> st.logical_or(st.asarray([0, 0, 2]), st.asarray([True, False, True])).tolist()
    [True, False, True]
    """


@operator("..., ... -> ...")
def logical_xor(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether exactly one element of each pair is true, as bools.

    >>> st.logical_xor(st.asarray([0, 0, 2]), st.asarray([True, False, True])).tolist()
    [True, False, False]
    """


@operator("..., ... -> ...")
def maximum(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Greater element of each pair, NaN where either is NaN.

    >>> st.maximum(st.asarray([1.0, 5.0, np.nan]), 3.0).tolist()
    [3.0, 5.0, nan]
    """


@operator("..., ... -> ...")
def minimum(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Lesser element of each pair, NaN where either is NaN.

    >>> st.minimum(st.asarray([1.0, 5.0, np.nan]), 3.0).tolist()
    [1.0, 3.0, nan]
    """


@operator("..., ... -> ...")
def multiply(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Product of each pair of elements, ``x1 * x2``; of two bools, whether both are true.

    >>> st.multiply(st.asarray([[1], [2]]), st.asarray([10, 20])).tolist()
    [[10, 20], [20, 40]]
    """


@operator("... -> ...")
def negative(x: ArrayLike, /) -> ShardedTensor:
    """Each element with its sign flipped, ``-x``; unsigned integers wrap around below 0; bools are refused.

    >>> st.negative(st.asarray([1, -2])).tolist()
    [-1, 2]
    """


@operator("..., ... -> ...")
def nextafter(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Floating-point number next to each real x1 in the direction of x2; x2 itself where the two are equal.

    >>> st.nextafter(st.asarray([1.0, 0.0]), st.asarray([2.0, 0.0])).tolist()
    [1.0000000000000002, 0.0]
    """


@operator("..., ... -> ...")
def not_equal(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Whether the elements of each pair differ in value, as bools; NaN differs from all, itself included.

    >>> st.not_equal(st.asarray([1.0, 2.0, np.nan]), st.asarray([1.0, 3.0, np.nan])).tolist()
    [False, True, True]
    """


@operator("... -> ...")
def positive(x: ArrayLike, /) -> ShardedTensor:
    """Each element unchanged, ``+x``; bools are refused.

    >>> st.positive(st.asarray([1, -2])).tolist()
    [1, -2]
    """


@operator("..., ... -> ...")
def pow(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """x1 to the power of x2, ``x1**x2``, with 0**0 = 1; integers give integers, so that x2 must be >= 0.

    >>> st.pow(st.asarray([2, -3]), st.asarray([10, 3])).tolist()
    [1024, -27]
    """


@operator("... -> ...")
def real(x: ArrayLike, /) -> ShardedTensor:
    """Real part of each element, as a real number; real ones are unchanged. A view.

    >>> st.real(st.asarray([1 + 2j, 3j])).tolist()
    [1.0, 0.0]
    """


@implements(real, "window")
def _real_window(window: ViewSpec) -> ViewSpec:
    return window if window.part else window.only("real")


@operator("... -> ...")
def reciprocal(x: ArrayLike, /) -> ShardedTensor:
    """1 / x of each element; an integer's is an integer, truncated, which is 0 beyond -1 and 1.

    >>> st.reciprocal(st.asarray([2.0, -4.0])).tolist()
    [0.5, -0.25]
    """


@operator("..., ... -> ...")
def remainder(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """What `floor_divide` leaves of each real pair, ``x1 % x2``, with the sign of x2; an integer's by 0 is 0.

    >>> st.remainder(st.asarray([7, -7, 7]), st.asarray([3, 3, -3])).tolist()
    [1, 2, -2]
    """


@operator("... -> ...")
def round(x: ArrayLike, /) -> ShardedTensor:
    """Whole number nearest to each element, the even one of two; of a complex one, both parts are rounded.

    >>> st.round(st.asarray([0.5, 1.5, 2.6])).tolist()
    [0.0, 2.0, 3.0]
    """


@operator("... -> ...")
def sign(x: ArrayLike, /) -> ShardedTensor:
    """-1, 0 or 1 by the sign of each element, NaN for NaN; of a complex one x / abs(x), or 0; no bools.

    >>> st.sign(st.asarray([-2.5, 0.0, 3.0])).tolist()
    [-1.0, 0.0, 1.0]
    """


@operator("... -> ...")
def signbit(x: ArrayLike, /) -> ShardedTensor:
    """Whether each real element has a negative sign, as bools; -0.0 has one.

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
    """Square root of each element, 0 or greater; of a complex one, the root whose real part is not negative.

    >>> st.sqrt(st.asarray([0.0, 2.25])).tolist()
    [0.0, 1.5]
    """


@operator("... -> ...")
def square(x: ArrayLike, /) -> ShardedTensor:
    """x * x of each element; of a complex one its complex square, not that of its modulus.

    >>> st.square(st.asarray([3.0, -4.0])).tolist()
    [9.0, 16.0]
    """


@operator("..., ... -> ...")
def subtract(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Difference of each pair, ``x1 - x2``; unsigned integers wrap around below 0, and two bools are refused.

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
    """Hyperbolic tangent of each element: sinh(x) / cosh(x), from -1 to 1 on real numbers.

    >>> st.tanh(st.asarray([0.0, -np.inf])).tolist()
    [0.0, -1.0]
    """


@operator("... -> ...")
def trunc(x: ArrayLike, /) -> ShardedTensor:
    """Each real element without its fraction, which rounds it towards 0; floats stay floats.

    >>> st.trunc(st.asarray([1.8, -1.8])).tolist()
    [1.0, -1.0]
    """
