"""Numerical derivatives, composed of other operators, and the local part of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import composition, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.functions.building.unsplit_lines import are_whole, central_differences
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.joining import concat
from shardtensor.host import memory_pool
from shardtensor.host.units import counted
from shardtensor.sequences import as_tuple
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axes
from shardtensor.tensor.operands import host_array
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_products"


def _overlaps(shapes: Sequence[Shape], *, before: int = 0, behind: int = 0) -> tuple[str, Shape]:
    (n,), (m,) = shapes
    return "n!, m! -> k", (max(before + n + behind - m + 1, 0),)


@operator(_overlaps, operands=("a", "v"), error_name="convolve", tags=("internal",))
def convolve_part(a: ArrayLike, v: ArrayLike, /, *, before: int = 0, behind: int = 0) -> ShardedTensor:
    """Returns the convolution of two arrays of one dimension and dtype where they overlap completely, and where some
    elements of v overlap none of a.

    It equals the convolution of a between zeros, but nothing is multiplied by the zeros: NaN and infinite elements of v
    appear only in sums that have them in NumPy.

    Args:
        a: the longer array, or a part of it, which may be shorter than v, but has at least one element.
        v: the other array.
        before, behind: how many elements are absent before and behind a, at most ``len(v) - 1``.

    >>> from shardtensor.functions.numpy.differences import convolve_part
    >>> convolve_part(np.asarray([1, 2, 3]), np.asarray([1, 1])).tolist()
    [3, 5]
    >>> convolve_part(np.asarray([1, 2, 3]), np.asarray([1, 1]), before=1).tolist()
    [1, 3, 5]
    """


@implements(convolve_part, "kernel")
def _convolve_on_device(xp: Any, context: Any, a: Any, v: Any, *, before: int, behind: int) -> Any:
    n, m = a.shape[0], v.shape[0]
    count = before + n + behind - m + 1
    if count <= 0:
        return a[:0]
    if xp is np:
        return _convolve_blocks(a, v, before, behind, count)
    if (result := own_kernel(xp, "convolved", a, v, before, count)) is not None:
        return result
    if m > _FEW:
        return _convolve_windows(xp, a, v, before, count)
    total = xp.zeros(count, dtype=a.dtype)
    for k in range(m):
        # Result i has the product of element i + first of a, if there is one.
        first = m - 1 - k - before
        begin, end = max(-first, 0), min(n - first, count)
        if begin < end:
            part, products = total[begin:end], a[begin + first : end + first] * v[k]
            if xp.isdtype(a.dtype, "bool"):
                part |= products
            else:
                part += products
    return total


@operator(operands=("a", "v"), error_name="convolve", tags=("internal",))
def convolved(a: ArrayLike, v: ArrayLike, /, mode: str) -> ShardedTensor:
    """Returns the convolution of an array of one dimension and one that is not longer, of the same dtype: see
    `shardtensor.spmd.maps.stencils.convolve`, which composes it.

    >>> import shardtensor.spmd.maps.stencils
    >>> from shardtensor.functions.numpy.differences import convolved
    >>> convolved(st.asarray([1, 2, 3]), np.asarray([1, 1]), "valid").tolist()
    [3, 5]
    """


def windows_of_convolution(n: int, m: int, mode: str) -> tuple[int, int]:
    """Returns the number of results of a convolution of arrays of sizes n and m, and how many elements are absent
    before the longer array in the first of them.
    """
    return {"full": (n + m - 1, m - 1), "same": (n, m // 2), "valid": (n - m + 1, 0)}[mode]


_BLOCK = 1 << 15
"""The sums that NumPy computes at a time: their memory is used again, and they are copied within the cache."""


def _convolve_blocks(a: Any, v: Any, before: int, behind: int, count: int) -> Any:
    """Computes `convolve_part` on the host, to ``count`` results."""
    n, m = a.shape[0], v.shape[0]
    if n < m:
        return _convolve_ends(a, v, before, count)
    if count <= _BLOCK:
        if not before and not behind:
            return np.convolve(a, v, "valid")
        return np.convolve(a, v, "full")[m - 1 - before : n + behind]
    out = memory_pool.empty((count,), a.dtype)
    if before:
        out[:before] = np.convolve(a[: m - 1], v, "full")[m - 1 - before : m - 1]
    if behind:
        out[count - behind :] = np.convolve(a[n - m + 1 :], v, "full")[m - 1 : m - 1 + behind]
    for begin in range(0, n - m + 1, _BLOCK):
        end = min(begin + _BLOCK, n - m + 1)
        out[before + begin : before + end] = np.convolve(a[begin : end + m - 1], v, "valid")
    return out


def _convolve_ends(a: Any, v: Any, before: int, count: int) -> Any:
    """Computes `convolve_part` on the host for a part that is shorter than v.

    NumPy's function would exchange the two, and add the products in another order than for the whole array.
    """
    a, reverse = np.ascontiguousarray(a), np.ascontiguousarray(v[::-1])
    out = memory_pool.empty((count,), a.dtype)
    for k in range(count):
        begin = k - before
        first, last = max(begin, 0), min(begin + reverse.shape[0], a.shape[0])
        out[k] = np.dot(a[first:last], reverse[first - begin : last - begin])
    if out.dtype.kind in "fc":
        out += 0  # Sums of NumPy's function begin with 0, so that none is -0.0.
    return out


_FEW = 16
"""The most elements of a kernel for each of which a few calls compute one term of every result."""

_PRODUCTS = 1 << 22
"""The most products that are computed at a time for longer kernels."""


def _convolve_windows(xp: Any, a: Any, v: Any, before: int, count: int) -> Any:
    """Multiplies the windows of an array by another one, as many at a time as need little memory.

    Returns the sums of ``count`` windows, of which the first begins ``before`` elements before the array.
    """
    n, m = a.shape[0], v.shape[0]
    reverse, step = xp.flip(v), max(_PRODUCTS // m, 1)
    parts = []
    for begin in range(-before, count - before, step):
        rows = min(step, count - before - begin)
        within = xp.reshape(xp.reshape(xp.arange(begin, begin + rows), (-1, 1)) + xp.arange(m), (-1,))
        inside = None
        if begin < 0 or begin + rows - 1 + m > n:
            inside = (within >= 0) & (within < n)
            within = xp.where(inside, within, 0)
        products = xp.multiply(xp.reshape(a[within], (rows, m)), reverse)
        if inside is not None:
            products = xp.where(xp.reshape(inside, (rows, m)), products, xp.zeros_like(products))
        if xp.isdtype(products.dtype, "bool"):
            parts.append(xp.any(products, axis=1))
        else:
            parts.append(xp.sum(products, axis=1, dtype=products.dtype))
    return xp.concat(parts)


@composition()
def gradient(
    f: ArrayLike, *varargs: Any, axis: int | Sequence[int] | None = None, edge_order: int = 1
) -> ShardedTensor | tuple[ShardedTensor, ...]:
    """Computes the gradient by second-order central differences, and by one-sided differences at both ends.

    The method and the formulas are those of `numpy.gradient`. Each derivative has f's shape, and the sharding to which
    slices of f along the axis are moved. The dtype is f's, or float64 for integers.

    Args:
        f: an array of real or complex numbers.
        *varargs: the spacing: nothing (1), one number, or for each axis a number or the 1-d coordinates of the points.
        axis: the axis or axes along which to differentiate; None means all of them.
        edge_order: the order of the differences at the ends, 1 or 2.

    Returns:
        A tensor if there is one axis, else a tuple with one for each.

    Raises:
        ArgumentError: the number of spacings is not the number of axes, or ``edge_order`` is neither 1 nor 2.
        ArgumentTypeError: f has bools.
        AxisError: f has no such axis, or an axis occurs twice.
        ShapeError: an axis has at most ``edge_order`` elements, or its coordinates another number than it has.

    >>> st.gradient(st.asarray([1.0, 2.0, 4.0, 7.0])).tolist()
    [1.0, 1.5, 2.5, 3.0]
    """
    x: Any = host_array(f, "gradient")
    axes = (
        tuple(range(x.ndim)) if axis is None else normalize_axes(tuple(np.atleast_1d(as_tuple(axis)).tolist()), x.ndim)
    )
    if edge_order not in (1, 2):
        raise ArgumentError(f"gradient: edge_order is {edge_order!r}; wanted 1 or 2")
    if x.dtype.kind == "b":
        raise ArgumentTypeError("gradient: f has bools; wanted numbers, such as f.astype(int)")
    if x.dtype.kind in "iu":
        x = astype(x, np.float64) if isinstance(x, ShardedTensor) else x.astype(np.float64)
    results = [_derivative(x, a, h, edge_order) for a, h in zip(axes, _spacings(varargs, x.shape, axes), strict=True)]
    return results[0] if len(results) == 1 else tuple(results)


def _spacings(spacings: Sequence[Any], shape: Shape, axes: Sequence[int]) -> list[Any]:
    """Returns for each axis its spacing: one number, or an array with the distances of neighbouring points."""
    if len(spacings) not in (0, 1, len(axes)):
        raise ArgumentError(
            f"gradient: {counted(len(spacings), 'spacing')} for {counted(len(axes), 'axis', 'axes')}; give one for "
            "all, or one for each"
        )
    result: list[Any] = []
    each = spacings if len(spacings) == len(axes) else [spacings[0] if spacings else 1.0] * len(axes)
    for a, h in zip(axes, each, strict=True):
        points = np.asarray(h)
        if points.dtype.kind not in "biuf":
            raise ArgumentTypeError(f"gradient: the spacing of axis {a} is {h!r:.60}; wanted a number or coordinates")
        if points.ndim > 1 or (points.ndim and len(points) != shape[a]):
            raise ShapeError(
                f"gradient: the coordinates of axis {a} have shape {points.shape}; wanted ({shape[a]},) or a number"
            )
        if not points.ndim:
            result.append(h if isinstance(h, (int, float)) else points[()])  # Python's numbers keep the dtype of f.
            continue
        steps = np.diff(points if points.dtype.kind == "f" else points.astype(np.float64))
        result.append(steps[0] if len(steps) and (steps == steps[0]).all() else steps)
    return result


def _derivative(x: Any, axis: int, h: Any, edge_order: int) -> ShardedTensor:
    n = x.shape[axis]
    if n <= edge_order:
        raise ShapeError(f"gradient: axis {axis} has {counted(n, 'element')}; wanted at least {edge_order + 1}")

    if edge_order == 1 and type(h) in (int, float) and h != 0 and x.dtype.kind == "f" and are_whole(x, (axis,)):
        return central_differences(x, axis=axis, spacing=float(h))

    def part(begin: int, end: int) -> Any:
        return x[(slice(None),) * axis + (slice(begin, end),)]

    def at(i: int) -> Any:
        return part(i % n, i % n + 1)

    if np.ndim(h):
        before, after = [s.reshape((-1,) + (1,) * (x.ndim - axis - 1)) for s in (h[:-1], h[1:])]
        left, middle = -after / (before * (before + after)), (after - before) / (before * after)
        right = before / (after * (before + after))
        inner = _weighted((left, middle, right), part(0, n - 2), part(1, n - 1), part(2, n))
        first, last = h[:2], h[-2:]
    else:
        inner = (part(2, n) - part(0, n - 2)) / (2.0 * h)
        first = last = (h,)
    if edge_order == 1:
        edges = [(at(1) - at(0)) / first[0], (at(-1) - at(-2)) / last[-1]]
    else:
        edges = [
            _weighted(_at_the_begin(*first), at(0), at(1), at(2)),
            _weighted(_at_the_end(*last), at(-3), at(-2), at(-1)),
        ]
    result = concat([edges[0], inner, edges[1]], axis=axis)
    dtype = x.dtype if x.dtype.kind != "M" else np.dtype(x.dtype.str.replace("M8", "m8"))  # differences of dates
    return result if result.dtype == dtype else astype(result, dtype)


def _weighted(weights: Sequence[Any], x0: Any, x1: Any, x2: Any) -> Any:
    """Returns the weighted sum of three parts, in NumPy's order."""
    a, b, c = weights
    return a * x0 + b * x1 + c * x2


def _at_the_begin(a: Any, b: Any = None) -> tuple[Any, Any, Any]:
    """Returns the weights of the first three points, at these distances or at one, in the second-order difference."""
    if b is None:
        return -1.5 / a, 2.0 / a, -0.5 / a
    return -(2.0 * a + b) / (a * (a + b)), (a + b) / (a * b), -a / (b * (a + b))


def _at_the_end(a: Any, b: Any = None) -> tuple[Any, Any, Any]:
    """Returns the weights of the last three points, likewise."""
    if b is None:
        return 0.5 / a, -2.0 / a, 1.5 / a
    return b / (a * (a + b)), -(b + a) / (a * b), (2.0 * b + a) / (b * (a + b))


def same_dtype(a: Any, v: Any) -> tuple[Any, Any]:
    """Converts two arrays to the dtype to which they are promoted."""
    dtype = result_type(a, v)
    return a if a.dtype == dtype else astype(a, dtype), v if v.dtype == dtype else astype(v, dtype)
