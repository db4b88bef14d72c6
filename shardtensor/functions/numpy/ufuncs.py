"""NumPy's ufuncs that the array API standard lacks: elementwise functions, and products of vectors and matrices.

The result of an elementwise function has the broadcast shape of the operands and their sharding, and no data moves if
they are sharded alike. The dtypes and the values at special numbers are those of NumPy's ufunc of the same name.

Raises:
    ShapeError: the shapes do not broadcast.
    ArgumentTypeError: the function is not defined for the dtypes.
"""

from __future__ import annotations

import math as _math
from typing import Any

from shardtensor.core import implements, operator
from shardtensor.errors import ShapeError
from shardtensor.functions.numpy.comparisons import iscomplexobj
from shardtensor.functions.standard.elementwise import (
    abs,
    add,
    bitwise_and,
    bitwise_right_shift,
    conj,
    divide,
    equal,
    greater_equal,
    isinf,
    isnan,
    less,
    log1p,
    logical_and,
    maximum,
    minimum,
    multiply,
    negative,
    nextafter,
    not_equal,
    pow,
    remainder,
    round,
    subtract,
)
from shardtensor.functions.standard.joining import reshape_operand
from shardtensor.functions.standard.linear_algebra import matmul
from shardtensor.functions.standard.manipulation import squeeze
from shardtensor.functions.standard.searching import where
from shardtensor.host.units import counted
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

# -- angles ----------------------------------------------------------------------------------------


@operator("... -> ...", composed=lambda x: multiply(x, 180 / _math.pi))
def degrees(x: ArrayLike, /) -> ShardedTensor:
    """Each real element, an angle in radians, converted to degrees.

    >>> st.degrees(st.asarray([0.0, np.pi])).tolist()
    [0.0, 180.0]"""


@operator("... -> ...", composed=lambda x: multiply(x, 180 / _math.pi))
def rad2deg(x: ArrayLike, /) -> ShardedTensor:
    """Each real element, an angle in radians, converted to degrees: `degrees`.

    >>> st.rad2deg(st.asarray([0.0, np.pi])).tolist()
    [0.0, 180.0]"""


@operator("... -> ...", composed=lambda x: multiply(x, _math.pi / 180))
def radians(x: ArrayLike, /) -> ShardedTensor:
    """Each real element, an angle in degrees, converted to radians.

    >>> st.radians(st.asarray([0.0, 180.0])).tolist()
    [0.0, 3.141592653589793]"""


@operator("... -> ...", composed=lambda x: multiply(x, _math.pi / 180))
def deg2rad(x: ArrayLike, /) -> ShardedTensor:
    """Each real element, an angle in degrees, converted to radians: `radians`.

    >>> st.deg2rad(st.asarray([0.0, 180.0])).tolist()
    [0.0, 3.141592653589793]"""


# -- floating-point numbers ------------------------------------------------------------------------


@operator("... -> ...", composed=lambda x: round(x))
def rint(x: ArrayLike, /) -> ShardedTensor:
    """Each element rounded to the nearest integer, halves to the even one, as a floating-point number.

    >>> st.rint(st.asarray([0.5, 1.5, -2.7])).tolist()
    [0.0, 2.0, -3.0]"""


@operator("... -> ...", composed=lambda x: abs(x))
def fabs(x: ArrayLike, /) -> ShardedTensor:
    """Absolute value of each real element, as a floating-point number.

    >>> st.fabs(st.asarray([-1, 2])).tolist()
    [1.0, 2.0]"""


@operator("... -> ...", composed=lambda x: pow(2.0, x))
def exp2(x: ArrayLike, /) -> ShardedTensor:
    """Two to the power of each element.

    >>> st.exp2(st.asarray([3.0, -1.0])).tolist()
    [8.0, 0.5]"""


def _logaddexp2(x1: Any, x2: Any) -> Any:
    ratio = pow(2.0, negative(abs(subtract(x1, x2))))  # Of the smaller term to the greater one.
    total = add(maximum(x1, x2), divide(log1p(ratio), _math.log(2)))
    return where(equal(x1, x2), add(x1, 1), total)  # Also for equal infinities, which have no difference.


@operator("..., ... -> ...", composed=_logaddexp2)
def logaddexp2(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Binary logarithm of the sum of two to the power of each real element of x1 and of x2, without overflow.

    >>> st.logaddexp2(st.asarray([3.0, 1000.0]), st.asarray([3.0, 1000.0])).tolist()
    [4.0, 1001.0]"""


@operator("..., ... -> ...", composed=lambda x1, x2: pow(x1, x2))
def float_power(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Each element of x1 to the power of that of x2, computed in float64 or complex128.

    >>> st.float_power(st.asarray([2, 4]), st.asarray([-1, 2])).tolist()
    [0.5, 16.0]"""


def _ldexp(x1: Any, x2: Any) -> Any:
    # Three factors, since 2**x2 can overflow or underflow where the product does not. Each is a normal number. If a
    # product is so small that it is rounded, then the next factor is at most 2**-54, and the result is zero, so that no
    # result is rounded twice. (FreeBSD's and musl's scalbn)
    rest = minimum(maximum(x2, -2100), 2100)
    for _ in range(3):
        exponent = where(less(rest, -1022), -969, minimum(rest, 1023))
        x1, rest = multiply(x1, pow(2.0, exponent)), subtract(rest, exponent)
    return x1


@operator("..., ... -> ...", composed=_ldexp)
def ldexp(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Each real element of x1 multiplied by two to the power of the integer in x2.

    >>> st.ldexp(st.asarray([0.5, 3.0]), st.asarray([4, -1])).tolist()
    [8.0, 1.5]"""


def _spacing(x: Any) -> Any:
    if x.itemsize == 2:  # For float16, NumPy's spacing is the distance to the next greater number.
        return where(isinf(x), _math.nan, subtract(nextafter(x, _math.inf), x))
    size = abs(x)
    distance = subtract(nextafter(size, _math.inf), size)
    return where(less(x, 0), negative(distance), distance)


@operator("... -> ...", composed=_spacing)
def spacing(x: ArrayLike, /) -> ShardedTensor:
    """Distance from each real element to the next floating-point number away from zero.

    >>> st.spacing(st.asarray([1.0, -4.0])).tolist()
    [2.220446049250313e-16, -8.881784197001252e-16]"""


def _heaviside(x1: Any, x2: Any) -> Any:
    return where(isnan(x1), x1, where(equal(x1, 0), x2, where(less(x1, 0), 0.0, 1.0)))


@operator("..., ... -> ...", composed=_heaviside)
def heaviside(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Step function of each real element of x1: 0 if it is negative, 1 if positive, and the element of x2 if it is 0.

    >>> st.heaviside(st.asarray([-1.5, 0.0, 2.0]), 0.5).tolist()
    [0.0, 0.5, 1.0]"""


# -- extrema and remainders ------------------------------------------------------------------------


@operator("..., ... -> ...", composed=lambda x1, x2: where(isnan(x1), x2, where(isnan(x2), x1, maximum(x1, x2))))
def fmax(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Greater one of each pair of elements; if one of them is NaN, the other one.

    >>> st.fmax(st.asarray([1.0, np.nan]), st.asarray([3.0, 2.0])).tolist()
    [3.0, 2.0]"""


@operator("..., ... -> ...", composed=lambda x1, x2: where(isnan(x1), x2, where(isnan(x2), x1, minimum(x1, x2))))
def fmin(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Lesser one of each pair of elements; if one of them is NaN, the other one.

    >>> st.fmin(st.asarray([1.0, np.nan]), st.asarray([3.0, 2.0])).tolist()
    [1.0, 2.0]"""


def _fmod(x1: Any, x2: Any) -> Any:
    # `remainder` has the sign of the divisor, which is therefore given the sign of x1.
    x2 = where(not_equal(less(x1, 0), less(x2, 0)), negative(x2), x2)
    # The negative of the least integer overflows to itself. Its magnitude is greater than that of any x1 >= 0.
    rest = where(logical_and(less(x2, 0), greater_equal(x1, 0)), x1, remainder(x1, x2))
    return where(equal(rest, 0), multiply(x1, 0), rest)  # A zero has the sign of x1.


@operator("..., ... -> ...", composed=_fmod)
def fmod(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Remainder of each division, with the sign of the dividend x1; `remainder` has the sign of the divisor.

    >>> st.fmod(st.asarray([-7, 7]), st.asarray([3, -3])).tolist()
    [-1, 1]"""


@operator("..., ... -> ...")
def gcd(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Greatest common divisor of each pair of integers.

    >>> st.gcd(st.asarray([12, 0]), st.asarray([20, 5])).tolist()
    [4, 5]"""


@operator("..., ... -> ...")
def lcm(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Least common multiple of each pair of integers.

    >>> st.lcm(st.asarray([12, 0]), st.asarray([20, 5])).tolist()
    [60, 0]"""


def _bitwise_count(x: Any) -> Any:
    bits = [bitwise_and(bitwise_right_shift(x, k), 1) for k in range(8 * x.itemsize)]
    total = bits[0]
    for bit in bits[1:]:
        total = add(total, bit)
    return total


@operator("... -> ...", composed=lambda x: _bitwise_count(abs(x)))
def bitwise_count(x: ArrayLike, /) -> ShardedTensor:
    """Number of one-bits in the absolute value of each integer.

    >>> st.bitwise_count(st.asarray([255, -3])).tolist()
    [8, 2]"""


# -- products --------------------------------------------------------------------------------------


@operator(operands=("a", "b"))
def vdot(a: ArrayLike, b: ArrayLike, /) -> ShardedTensor:
    """Returns the sum of the products of the elements of a, conjugated, and b; both are flattened.

    Where they are sharded, each device adds its products, and the sums are combined.

    Raises:
        ShapeError: they have different numbers of elements.

    >>> st.vdot(st.asarray([1 + 2j, 3j]), st.asarray([1j, 2])).item()
    (2-5j)
    """


@implements(vdot, "composite")
def _vdot(a: Any, b: Any) -> Any:
    sizes = [_math.prod(shape_of(x)) for x in (a, b)]
    if sizes[0] != sizes[1]:
        raise ShapeError(f"a has {counted(sizes[0], 'element')} and b has {sizes[1]}; wanted as many")
    x, y = [x if len(shape_of(x)) == 1 else reshape_operand(x, (-1,)) for x in (a, b)]
    return matmul(conj(x) if iscomplexobj(x) else x, y)


@operator(operands=("x1", "x2"))
def matvec(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Returns the products of matrices, the last two dimensions of x1, and vectors, the last dimension of x2.

    The other dimensions broadcast; the sharding is that of `matmul`.

    Raises:
        ShapeError: an operand has too few dimensions, or the sizes do not agree.

    >>> st.matvec(st.asarray([[1, 2], [3, 4]]), st.asarray([1, 10])).tolist()
    [21, 43]
    """


@operator(operands=("x1", "x2"))
def vecmat(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Returns the products of vectors, the last dimension of x1, conjugated, and matrices, those of x2: see `matvec`.

    >>> st.vecmat(st.asarray([1, 10]), st.asarray([[1, 2], [3, 4]])).tolist()
    [31, 42]
    """


def _check_dims(**operands: tuple[Any, int]) -> None:
    for name, (x, least) in operands.items():
        if len(shape_of(x)) < least:
            raise ShapeError(f"{name} has {counted(len(shape_of(x)), 'dimension')}; wanted at least {least}")


@implements(matvec, "composite")
def _matvec(x1: Any, x2: Any) -> Any:
    _check_dims(x1=(x1, 2), x2=(x2, 1))
    if len(shape_of(x2)) == 1:
        return matmul(x1, x2)
    return squeeze(matmul(x1, reshape_operand(x2, (*shape_of(x2), 1))), axis=-1)


@implements(vecmat, "composite")
def _vecmat(x1: Any, x2: Any) -> Any:
    _check_dims(x1=(x1, 1), x2=(x2, 2))
    if len(shape_of(x1)) == 1:
        return matmul(conj(x1) if iscomplexobj(x1) else x1, x2)
    row = reshape_operand(x1, (*shape_of(x1)[:-1], 1, shape_of(x1)[-1]))
    return squeeze(matmul(conj(row) if iscomplexobj(row) else row, x2), axis=-2)
