"""NumPy's mathematical functions that are not ufuncs: interpolation, integrals, angles, NaN in place of numbers.

Elementwise ones have the shape and the sharding of their operand, and no data moves. The others say how they are
sharded.
"""

from __future__ import annotations

import math as _math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, composition, implements, operator, recorded
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.functions.numpy.comparisons import array_like, iscomplexobj
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import (
    abs,
    add,
    atan2,
    divide,
    equal,
    greater,
    imag,
    isnan,
    less,
    logical_and,
    multiply,
    real,
    remainder,
    sin,
    subtract,
    trunc,
)
from shardtensor.functions.standard.joining import concat
from shardtensor.functions.standard.manipulation import reshape
from shardtensor.functions.standard.repetition import small_on_host
from shardtensor.functions.standard.scans import cumulative_sum, diff
from shardtensor.functions.standard.searching import where
from shardtensor.functions.standard.statistical import all as _all
from shardtensor.functions.standard.statistical import sum as _sum
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_mathematical"

# -- elementwise -----------------------------------------------------------------------------------


@composition()
def angle(z: ArrayLike, deg: bool = False) -> ShardedTensor:
    """Returns the angle of each complex number, from -pi to pi.

    Args:
        z: a tensor, an array, a list or a scalar.
        deg: whether the angles are in degrees.

    >>> st.angle(st.asarray([1j, -1, 1]), deg=True).tolist()
    [90.0, 180.0, 0.0]
    """
    array = array_like(z, "angle")
    turned: ShardedTensor = atan2(imag(array), real(array)) if iscomplexobj(array) else atan2(0, array)
    return multiply(turned, 180 / _math.pi) if deg else turned


@composition()
def sinc(x: ArrayLike, /) -> ShardedTensor:
    """Computes ``sin(pi x) / (pi x)`` of each element, and 1 at zero.

    >>> st.sinc(st.asarray([0.0, 0.5])).tolist()
    [1.0, 0.6366197723675814]
    """
    array = array_like(x, "sinc")
    dtype = result_type(array)
    tiny = float(np.finfo(dtype).eps) if dtype.kind == "f" else 1e-20
    turned = multiply(_math.pi, where(equal(array, 0), tiny, array))
    return divide(sin(turned), turned)


@operator("... -> ...", dtype=lambda x: np.i0(x))
@composition()
def i0(x: ArrayLike, /) -> ShardedTensor:
    """Modified Bessel function of the first kind and order 0 of each real element.

    >>> st.i0(st.asarray([0.0, 1.0])).tolist()
    [1.0, 1.2660658777520082]"""


@implements(i0, "kernel")
def _i0(xp: Any, context: ShardContext | None, x: Any) -> Any:
    if xp is np:
        return np.reshape(np.i0(x), np.shape(x))
    dtype = result_type(x)
    return xp.i0(x if dtype.kind == "f" else xp.asarray(x, dtype=np.dtype("float64")))


@composition(fused=True)
def nan_to_num(
    x: ArrayLike,
    copy: bool = True,
    nan: ArrayLike = 0.0,
    posinf: ArrayLike | None = None,
    neginf: ArrayLike | None = None,
) -> ShardedTensor:
    """Replaces NaN and infinities by numbers.

    Args:
        x: a tensor, an array, a list or a scalar.
        copy: whether the result is a new tensor; otherwise it is written into the tensor x.
        nan: replaces NaN.
        posinf, neginf: replace the infinities; by default the greatest and the least number of the dtype.

    >>> st.nan_to_num(st.asarray([np.nan, 1.0, -np.inf]), neginf=-7.0).tolist()
    [0.0, 1.0, -7.0]
    """
    array = array_like(x, "nan_to_num")
    dtype = result_type(array)
    if not copy and isinstance(array, ShardedTensor):
        if dtype.kind in "fc":
            array[...] = nan_to_num(array, True, nan, posinf, neginf)  # One kernel on GPUs, as of other calls.
        return array
    if dtype.kind not in "fc":
        result = call("asarray", array, copy=copy)
    elif dtype.kind == "c":
        parts = [nan_to_num(part(array), True, nan, posinf, neginf) for part in (real, imag)]
        result = astype(add(parts[0], multiply(parts[1], 1j)), dtype, copy=False)
    else:
        limits = np.finfo(dtype)
        above = float(limits.max) if posinf is None else posinf
        below = float(limits.min) if neginf is None else neginf
        result = where(equal(array, -_math.inf), below, where(equal(array, _math.inf), above, array))
        result = astype(where(isnan(array), nan, result), dtype, copy=False)
    return result  # type: ignore[no-any-return]


@composition()
def fix(x: ArrayLike, out: ShardedTensor | None = None) -> ShardedTensor:
    """Rounds each real element towards zero: see `trunc`.

    >>> st.fix(st.asarray([1.7, -1.7])).tolist()
    [1.0, -1.0]
    """
    result = trunc(array_like(x, "fix"))
    if out is None:
        return result
    out[...] = result
    return out


def real_if_close(a: ArrayLike, tol: float = 100) -> ShardedTensor:
    """Returns the real part of an array whose imaginary parts are all close to zero, and any other array unchanged.

    The dtype depends on the elements, so that `eval_shape` cannot infer the result.

    Args:
        a: a tensor, an array, a list or a scalar.
        tol: the greatest imaginary part, in units of the dtype's ``eps`` if it is greater than 1.

    >>> st.real_if_close(st.asarray([2.1 + 4e-14j, 5.2 + 3e-15j]), tol=1000).tolist()
    [2.1, 5.2]
    """
    array: Any = call("asarray", array_like(a, "real_if_close"))
    if not iscomplexobj(array):
        return array  # type: ignore[no-any-return]
    if tol > 1:
        tol = float(np.finfo(result_type(array)).eps) * tol
    small = small_on_host(array, array)
    close = np.all(np.abs(small[0].imag) < tol) if small else _all(less(abs(imag(array)), tol))
    return real(array) if bool(close) else array


@composition()
def sort_complex(a: ArrayLike) -> ShardedTensor:
    """Sorts numbers along the last axis as complex ones: by their real parts, and equal ones by their imaginary parts.

    It is sharded as by `sort`. The dtype is complex128, or complex64 for integers of at most 16 bits.

    >>> st.sort_complex(st.asarray([2, 1 + 2j, 1 - 1j])).tolist()
    [(1-1j), (1+2j), (2+0j)]
    """
    result: ShardedTensor = call("sort", array_like(a, "sort_complex"))
    if iscomplexobj(result):
        return result
    return astype(result, np.complex64 if result.dtype.char in "bhBH" else np.complex128)


# -- along an axis ---------------------------------------------------------------------------------


def _slices(x: Any, axis: int, *parts: Any) -> list[Any]:
    """Returns slices of an array along an axis."""
    return [call("getitem", x, (*(slice(None),) * axis, part)) for part in parts]


@composition()
def unwrap(
    p: ArrayLike, discont: float | None = None, axis: int = -1, *, period: float = 2 * _math.pi
) -> ShardedTensor:
    """Adds multiples of the period to angles, so that neighbours along an axis differ by at most half the period.

    The result has p's shape and sharding. Along a split axis, neighbouring devices exchange one element, and the
    corrections are added up by `cumulative_sum`.

    Args:
        p: a tensor, an array or a list of real numbers.
        discont: the least distance that is corrected; by default half the period, which is the least one.
        axis: the dimension.
        period: the period, an integer for integers.

    >>> st.unwrap(st.asarray([0, 1, 2, -1, 0]), period=4).tolist()
    [0, 1, 2, 3, 4]
    """
    angles: Any = array_like(p, "unwrap")
    along = normalize_axis(axis, len(shape_of(angles)))
    steps = diff(angles, axis=along)
    least = period / 2 if discont is None else discont
    dtype = np.result_type(result_type(steps), period)
    if dtype.kind in "iu":
        high, odd = divmod(int(period), 2)
        ambiguous = not odd
        low: float = -high
    else:
        ambiguous, high = True, period / 2  # type: ignore[assignment]
        low = -period / 2
    turned = add(remainder(subtract(steps, low), period), low)
    if ambiguous:
        turned = where(logical_and(equal(turned, low), greater(steps, 0)), high, turned)
    corrections = where(less(abs(steps), least), 0, subtract(turned, steps))
    first, rest = _slices(angles, along, slice(0, 1), slice(1, None))
    fixed = add(rest, cumulative_sum(corrections, axis=along))
    return astype(concat([astype(first, dtype), fixed], axis=along), dtype, copy=False)


@composition(recorded)
def trapezoid(y: ArrayLike, x: ArrayLike | None = None, dx: float = 1.0, axis: int = -1) -> ShardedTensor:
    """Integrates along an axis by the trapezoidal rule.

    Along a split axis, neighbouring devices exchange one element, and the partial sums are combined.

    Args:
        y: the values: a tensor, an array or a list.
        x: the points, of one dimension or of y's shape; by default they are ``dx`` apart.
        dx: the distance of the points.
        axis: the dimension.

    >>> st.trapezoid(st.asarray([1.0, 2.0, 3.0])).item()
    4.0
    """
    values: Any = array_like(y, "trapezoid")
    ndim = len(shape_of(values))
    along = normalize_axis(axis, ndim)
    steps: Any = dx
    if x is not None:
        points = array_like(x, "trapezoid")
        steps = diff(points, axis=0 if len(shape_of(points)) == 1 else along)
        if len(shape_of(steps)) == 1:
            steps = reshape(steps, tuple([-1 if d == along else 1 for d in range(ndim)]))
    after, before = _slices(values, along, slice(1, None), slice(None, -1))
    return _sum(divide(multiply(steps, add(after, before)), 2.0), axis=along)


@composition()
def ediff1d(ary: ArrayLike, to_end: ArrayLike | None = None, to_begin: ArrayLike | None = None) -> ShardedTensor:
    """Returns the differences of neighbours in the flattened array, with other numbers before and after them.

    Args:
        ary: a tensor, an array or a list.
        to_end, to_begin: numbers that follow and precede the differences; they must be castable to ary's dtype.

    Raises:
        ArgumentTypeError: they are not.

    >>> st.ediff1d(st.asarray([1, 2, 4]), to_begin=0).tolist()
    [0, 1, 2]
    """
    flat = reshape(array_like(ary, "ediff1d"), (-1,))
    dtype = result_type(flat)
    later, earlier = _slices(flat, 0, slice(1, None), slice(None, -1))
    parts: list[Any] = [subtract(later, earlier)]
    for name, extra in (("to_begin", to_begin), ("to_end", to_end)):
        if extra is None:
            continue
        numbers = reshape(array_like(extra, "ediff1d"), (-1,))
        kind = extra if isinstance(extra, (int, float, complex)) else result_type(numbers)
        if not np.can_cast(np.result_type(kind, dtype), dtype, "same_kind"):
            raise ArgumentTypeError(
                f"ediff1d: {name} has dtype {np.result_type(kind)}, which cannot be cast to {dtype}"
            )
        parts.insert(0 if name == "to_begin" else len(parts), astype(numbers, dtype, copy=False))
    return concat(parts)


# -- interpolation ---------------------------------------------------------------------------------


def _interp_rule(shapes: Sequence[Shape], **params: Any) -> str:
    for name, shape in zip(("xp", "fp"), shapes[1:], strict=True):
        if len(shape) != 1:
            raise ShapeError(f"{name} has {counted(len(shape), 'dimension')}; wanted one")
    if shapes[1] != shapes[2]:
        raise ShapeError(f"xp has {counted(shapes[1][0], 'element')} and fp has {shapes[2][0]}; wanted as many")
    if not shapes[1][0]:
        raise ShapeError("xp has no elements; wanted at least one point")
    return "..., k!, k! -> ..."


def _interp_dtype(x: Any, xp: Any, fp: Any, **params: Any) -> Any:
    return np.empty(1, np.complex128 if np.asarray(fp).dtype.kind == "c" else np.float64)


@operator(
    _interp_rule,
    operands=("x", "xp", "fp"),
    dtype=_interp_dtype,
    error_name="interp",
    gathers="every device gets the points between which values are interpolated",
    tags=("internal",),
)
def interpolated(x: ArrayLike, xp: ArrayLike, fp: ArrayLike, /, left: Any, right: Any) -> ShardedTensor:
    """Returns `interp` of points without a period; ``left`` and ``right`` are tuples of a number and its text, or None.

    >>> from shardtensor.functions.numpy.mathematical import interpolated
    >>> interpolated(st.asarray([0.5]), st.asarray([0.0, 1.0]), st.asarray([0.0, 10.0]), None, None).tolist()
    [5.0]
    """


@implements(interpolated, "kernel")
def _interpolated(namespace: Any, context: ShardContext, x: Any, xp: Any, fp: Any, *, left: Any, right: Any) -> Any:
    left, right = [end and end[0] for end in (left, right)]
    if namespace is np:
        return np.asarray(np.interp(x, xp, fp, left, right))
    lib, is_complex = namespace, context.dtype.kind == "c"
    if not is_complex and (values := own_kernel(lib, "interpolated", x, xp, fp, left, right)) is not None:
        return values
    x, xp = [lib.asarray(a, dtype=np.dtype("float64")) for a in (x, xp)]
    if not is_complex:
        return _between_points(lib, x, xp, lib.asarray(fp, dtype=context.dtype), left, right)
    fp, result = lib.asarray(fp, dtype=context.dtype), lib.zeros(x.shape, dtype=context.dtype)
    ends = [None if end is None else complex(end) for end in (left, right)]
    for part in ("real", "imag"):  # As in NumPy, a part that is infinite or NaN does not change the other.
        before, behind = [None if end is None else getattr(end, part) for end in ends]
        values = _between_points(lib, x, xp, getattr(lib, part)(fp), before, behind, inverse=True)
        if part == "imag":
            values = lib.where(lib.isnan(x), 0.0, values) if xp.shape[0] > 1 else values
        getattr(lib, part)(result)[...] = values
    return result


def _between_points(
    lib: Any, x: Any, xp: Any, fp: Any, left: float | None, right: float | None, inverse: bool = False
) -> Any:
    """Interpolates real values; with ``inverse``, slopes are products by inverse distances, as NumPy's complex ones."""
    n = xp.shape[0]
    outside = [end if value is None else value for end, value in ((fp[0], left), (fp[-1], right))]
    result = lib.where(lib.greater(x, xp[-1]), outside[1], fp[-1])
    if n > 1:
        result = lib.where(lib.isnan(x), _math.nan, result)  # NumPy gives NaN the value of a single point.
        at = lib.clip(lib.subtract(lib.searchsorted(xp, x, side="right"), 1), 0, n - 2)
        rise, run = lib.subtract(fp[1:], fp[:-1]), lib.subtract(xp[1:], xp[:-1])
        slope = lib.multiply(rise, lib.divide(1.0, run)) if inverse else lib.divide(rise, run)
        # As NumPy does: at a point, and beside points that are not finite.
        inside = lib.add(lib.multiply(slope[at], lib.subtract(x, xp[at])), fp[at])
        behind = lib.add(lib.multiply(slope[at], lib.subtract(x, xp[1:][at])), fp[1:][at])
        inside = lib.where(lib.isnan(inside), behind, inside)
        level = lib.logical_and(lib.isnan(inside), lib.equal(fp[at], fp[1:][at]))
        inside = lib.where(lib.logical_or(level, lib.equal(x, xp[at])), fp[at], inside)
        result = lib.where(lib.less(x, xp[-1]), inside, result)
    return lib.where(lib.less(x, xp[0]), outside[0], result)


@composition()
def interp(
    x: ArrayLike,
    xp: ArrayLike,
    fp: ArrayLike,
    left: complex | None = None,
    right: complex | None = None,
    period: float | None = None,
) -> ShardedTensor:
    """Interpolates linearly between points: returns the value at each element of x.

    The result has x's shape and sharding, and dtype float64, or complex128 if ``fp`` is complex. Every device gets all
    points.

    Args:
        x: a tensor, an array, a list or a scalar of real numbers.
        xp: the coordinates of the points, of one dimension and in ascending order, unless there is a period.
        fp: the values at the points.
        left, right: the values before the first and after the last point; by default those of these points.
        period: the period of the coordinates; ``left`` and ``right`` are then not used.

    Raises:
        ShapeError: the points have more than one dimension, or there are none, or not as many values.
        ArgumentError: the period is 0.
        ArgumentTypeError: ``left`` or ``right`` is complex, and ``fp`` is not.

    >>> st.interp(st.asarray([0.0, 1.5, 9.0]), [1.0, 2.0, 3.0], [3.0, 2.0, 0.0]).tolist()
    [3.0, 2.5, 0.0]
    """
    positions, points, values = [array_like(a, "interp") for a in (x, xp, fp)]
    if period is not None:
        if period == 0:
            raise ArgumentError("interp: period is 0; wanted another number")
        _interp_rule([(), shape_of(points), shape_of(values)])
        size, left, right = _math.fabs(period), None, None
        positions, points = [remainder(astype(a, np.float64, copy=False), size) for a in (positions, points)]
        order = call("argsort", points)
        points, values = [call("take", a, order) for a in (points, values)]
        ends = [_slices(a, 0, slice(-1, None), slice(0, 1)) for a in (points, values)]
        points = concat([subtract(ends[0][0], size), points, add(ends[0][1], size)])
        values = concat([ends[1][0], values, ends[1][1]])
    number = complex if iscomplexobj(values) else float
    for name, end in (("left", left), ("right", right)):
        if end is not None and (np.ndim(end) or np.asarray(end).dtype.kind not in "biufc"):
            raise ArgumentTypeError(f"interp: {name} is {end!r:.60}; wanted a number")
        if end is not None and np.iscomplexobj(end) and number is float:
            raise ArgumentTypeError(f"interp: {name} is {end}, and fp is real; wanted a real number")
    # Plans are kept for parameters, among which 0.0 and -0.0 are equal.
    first, last = [None if end is None else (number(end), str(number(end))) for end in (left, right)]  # type: ignore[arg-type]
    return interpolated(positions, points, values, first, last)
