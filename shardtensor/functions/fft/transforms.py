"""Declarations of the Fourier transform extension of the array API standard: `shardtensor.fft`.

Common to all transforms:

- Each line along ``axis`` is transformed by one device: a split of ``axis`` moves to another dimension (an all-to-all),
  where it stays. Where no other dimension can take it, as in a 1-d operand, ``axis`` stays split: lines of up to 16,384
  elements are gathered, and each device keeps its part of the result; longer ones are transposed three times (see
  `shardtensor.functions.fft.transpose_fft`). All other dimensions keep their sharding. A transform of several
  dimensions is one of each after the other, those that are not split first, so that each split moves once.
- ``n`` is the number of elements that are transformed: the operand is cut, or padded with zeros, along ``axis``.
- ``norm`` is "backward" (the inverse transform divides by n), "ortho" (both divide by its root) or "forward".
- The result has the precision of the operand: float32 gives complex64. Integers and bools are transformed as float64.

Raises:
    AxisError: x has no such axis.
    ArgumentError: ``n`` is less than one, or there is no such ``norm``.
    ArgumentTypeError: the transform does not take the dtype: `rfft` and `ihfft` take real numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.core import OPS, composition, implements, named, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError
from shardtensor.functions.fft.transpose_fft import needs_transposition, transform
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.manipulation import roll
from shardtensor.host import fourier
from shardtensor.host.units import counted
from shardtensor.sequences import as_tuple
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axes, normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import integer_from, shape_of, sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_transforms"

_NORMS = ("backward", "ortho", "forward")


def _declared(length: Callable[[int], int], count: Callable[[int], int]) -> Callable[..., Any]:
    """Returns the rule of a transform.

    Args:
        length: returns the size of the result along the axis, given ``n``.
        count: returns the default of ``n``, given the size of the operand along the axis.
    """

    def rule(shapes: Sequence[Shape], *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Any:
        shape = shapes[0]
        along = normalize_axis(axis, len(shape))
        if norm not in (*_NORMS, None):
            raise ArgumentError(f"norm is {norm!r}; wanted 'backward', 'ortho' or 'forward'")
        where = f" for x of shape {shape} along axis {axis}"
        size = integer_from(1, count(shape[along]) if n is None else n, "n", where)
        names = [f"d{d}" for d in range(len(shape))]
        left, right = [" ".join([*names[:along], name, *names[along + 1 :]]) for name in ("k!", "k")]
        return f"{left} -> {right}", (*shape[:along], length(size), *shape[along + 1 :])

    return rule


def _dtype(name: str) -> Callable[..., Any]:
    """Returns the function that determines the dtype of a transform: that of NumPy's function."""
    # The transform of zeros: NumPy's irfft of an empty array reads uninitialized memory, and may warn about its values.
    return lambda x, **params: getattr(np.fft, name)(np.zeros(2, np.asarray(x).dtype), 2)


def _same(n: int) -> int:
    return n


def _half(n: int) -> int:
    return n // 2 + 1


def _twice(n: int) -> int:
    return 2 * (n - 1)


@operator(_declared(_same, _same), dtype=_dtype("fft"))
def fft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> ShardedTensor:
    """Computes the discrete Fourier transform along ``axis``.

    >>> st.fft.fft(st.asarray([1.0, 0.0, 0.0, 0.0])).tolist()
    [(1+0j), (1+0j), (1+0j), (1+0j)]
    """


@operator(_declared(_same, _same), dtype=_dtype("ifft"))
def ifft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> ShardedTensor:
    """Computes the inverse of `fft`.

    >>> st.fft.ifft(st.asarray([4.0, 0.0, 0.0, 0.0])).tolist()
    [(1+0j), (1+0j), (1+0j), (1+0j)]
    """


@operator(_declared(_half, _same), dtype=_dtype("rfft"))
def rfft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> ShardedTensor:
    """Computes the first n // 2 + 1 elements of the `fft` of real numbers, which determine the others.

    >>> st.fft.rfft(st.asarray([1.0, 0.0, 0.0, 0.0])).tolist()
    [(1+0j), (1+0j), (1+0j)]
    """


@operator(_declared(_same, _twice), dtype=_dtype("irfft"))
def irfft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> ShardedTensor:
    """Computes the inverse of `rfft`: ``n`` real numbers, by default 2 (m - 1) for m elements.

    >>> st.fft.irfft(st.asarray([4.0, 0.0, 0.0])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """


@operator(_declared(_same, _twice), dtype=_dtype("hfft"))
def hfft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> ShardedTensor:
    """Computes the `fft`, which is real, of ``n`` elements that have Hermitian symmetry, given the first half of them.

    >>> st.fft.hfft(st.asarray([1.0, 0.0, 0.0])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """


@operator(_declared(_half, _same), dtype=_dtype("ihfft"))
def ihfft(x: ArrayLike, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> ShardedTensor:
    """Computes the inverse of `hfft`: the first n // 2 + 1 elements.

    >>> st.fft.ihfft(st.asarray([4.0, 0.0, 0.0, 0.0])).tolist()
    [(1-0j), (1-0j), (1-0j)]
    """


def _of_library(function: Callable[..., Any], count: Callable[[int], int]) -> None:
    """Implements a transform by the function of its name in the extension of a backend's namespace, and of long lines
    that are split by `shardtensor.functions.fft.transpose_fft`; ``count`` is that of `_declared`.
    """
    name = function.__name__

    @implements(function, "kernel")
    def kernel(xp: Any, context: ShardContext, x: Any, *, n: int | None, axis: int, norm: str | None) -> Any:
        if 0 in x.shape:  # Not every library transforms no elements; the transform of zeros is zero.
            return xp.zeros(context.local_shape, dtype=context.dtype)
        norm = norm or "backward"
        if xp is np:
            return fourier.transform(name, x, context.local_shape, context.dtype, n=n, axis=axis, norm=norm)
        return getattr(xp.fft, name)(x, n=n, axis=axis, norm=norm)

    implements(function, "small")(lambda x, n, axis, norm: fourier.in_one_thread(name, x, n, axis, norm))

    @implements(function, "composite")
    def split_lines(x: Any, n: int | None, axis: int, norm: str | None) -> Any:
        """Transforms long lines that are split without gathering them."""
        if not isinstance(x, ShardedTensor) or not any(x.sharding.spec):
            return NotImplemented
        along = normalize_axis(axis, x.ndim)
        if not x.sharding.spec.chains_of(x.ndim)[along]:
            return NotImplemented
        op = OPS[name]
        op.rule([x.shape], n=n, axis=along, norm=norm)  # It raises the errors.
        try:
            dtype = op.dtype(np.empty(0, x.dtype)).dtype
        except TypeError:  # The plan of the operator raises the error.
            return NotImplemented
        size = count(x.shape[along]) if n is None else integer_from(1, n, "n")
        needed = size if count is _same else _half(size)
        if needed < x.shape[along]:
            x = x[(*[slice(None)] * along, slice(needed))]
        elif not needs_transposition(x, size, along):
            return NotImplemented
        if not needs_transposition(x, size, along):
            return function(x, n, along, norm)
        return transform(name, x, size, along, norm, dtype)


for _function in (fft, ifft, rfft, ihfft):
    _of_library(_function, _same)
for _function in (irfft, hfft):
    _of_library(_function, _twice)


# -- several dimensions ----------------------------------------------------------------------------


@named
def fftn(
    x: ArrayLike, /, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str | None = "backward"
) -> ShardedTensor:
    """Computes the discrete Fourier transform along several dimensions.

    Args:
        x: a tensor or an array.
        s: the number of elements to transform along each of ``axes``; -1 means all.
        axes: the dimensions; None means all, or the last ``len(s)``.
        norm: see `fft`.

    Raises:
        ArgumentError: ``s`` and ``axes`` have different lengths.

    >>> st.fft.fftn(st.ones((2, 2))).tolist()
    [[(4+0j), 0j], [0j, 0j]]
    """
    return _several(fft, x, *_cooked("fftn", x, s, axes), norm)


@named
def ifftn(
    x: ArrayLike, /, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str | None = "backward"
) -> ShardedTensor:
    """Computes the inverse of `fftn`, with the same arguments.

    >>> st.fft.ifftn(st.ones((2, 2))).tolist()
    [[(1+0j), 0j], [0j, 0j]]
    """
    return _several(ifft, x, *_cooked("ifftn", x, s, axes), norm)


@named
def rfftn(
    x: ArrayLike, /, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str | None = "backward"
) -> ShardedTensor:
    """Computes the `fftn` of real numbers: `rfft` along the last of ``axes``, then `fft` along the others.

    >>> st.fft.rfftn(st.ones((2, 2))).tolist()
    [[(4+0j), 0j], [0j, 0j]]
    """
    sizes, along = _cooked("rfftn", x, s, axes)
    _check_some("rfftn", along)
    first: tuple[_Step, ...] = (("rfft", sizes[-1], along[-1]),)
    if isinstance(x, ShardedTensor) and x.sharding.spec.chains_of(x.ndim)[along[-1]]:
        x, first = _transformed(x, first, norm), ()  # Its layout decides the order of the others.
    return _transformed(x, first + _steps(fft, x, sizes[:-1], along[:-1]), norm)  # type: ignore[no-any-return]


@named
def irfftn(
    x: ArrayLike, /, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str | None = "backward"
) -> ShardedTensor:
    """Computes the inverse of `rfftn`: `ifft` along all of ``axes`` but the last one, then `irfft`.

    >>> st.fft.irfftn(st.asarray([[4.0, 0.0], [0.0, 0.0]])).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    sizes, along = _cooked("irfftn", x, s, axes)
    _check_some("irfftn", along)
    last = ("irfft", sizes[-1], along[-1])
    return _transformed(x, (*_steps(ifft, x, sizes[:-1], along[:-1]), last), norm)  # type: ignore[no-any-return]


@named
def fft2(
    x: ArrayLike, /, s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1), norm: str | None = "backward"
) -> ShardedTensor:
    """Computes `fftn` along two dimensions, by default the last two.

    >>> st.fft.fft2(st.ones((2, 2))).tolist()
    [[(4+0j), 0j], [0j, 0j]]
    """
    return fftn(x, s, axes, norm)


@named
def ifft2(
    x: ArrayLike, /, s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1), norm: str | None = "backward"
) -> ShardedTensor:
    """Computes `ifftn` along two dimensions, by default the last two.

    >>> st.fft.ifft2(st.ones((2, 2))).tolist()
    [[(1+0j), 0j], [0j, 0j]]
    """
    return ifftn(x, s, axes, norm)


@named
def rfft2(
    x: ArrayLike, /, s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1), norm: str | None = "backward"
) -> ShardedTensor:
    """Computes `rfftn` along two dimensions, by default the last two.

    >>> st.fft.rfft2(st.ones((2, 2))).tolist()
    [[(4+0j), 0j], [0j, 0j]]
    """
    return rfftn(x, s, axes, norm)


@named
def irfft2(
    x: ArrayLike, /, s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1), norm: str | None = "backward"
) -> ShardedTensor:
    """Computes `irfftn` along two dimensions, by default the last two.

    >>> st.fft.irfft2(st.asarray([[4.0, 0.0], [0.0, 0.0]])).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return irfftn(x, s, axes, norm)


def _check_some(name: str, axes: Sequence[int]) -> None:
    if not axes:
        raise AxisError(f"{name}: axes is empty; wanted at least one")


def _cooked(
    name: str, x: Any, s: Sequence[int] | None, axes: Sequence[int] | None
) -> tuple[list[int | None], tuple[int, ...]]:
    """Returns the number of elements, or None, and the dimension of each transform.

    Raises:
        AxisError: x has no such dimension.
        ArgumentError: ``s`` and ``axes`` have different lengths.
    """
    shape, s, axes = shape_of(x), as_tuple(s), as_tuple(axes)
    if axes is None:
        along = tuple(range(len(shape)))[len(shape) - len(s) if s is not None else 0 :]
    else:
        along = tuple([normalize_axis(a, len(shape)) for a in axes])
    if s is None:
        return [None] * len(along), along
    if len(s) != len(along):
        raise ArgumentError(
            f"{name}: s has {counted(len(s), 'size')} and axes {counted(len(along), 'dimension')}; wanted as many of "
            "each"
        )
    sizes: list[int | None] = [shape[a] if n == -1 else n for n, a in zip(s, along, strict=True)]
    return sizes, along


def _several(
    function: Callable[..., Any], x: Any, sizes: Sequence[int | None], axes: Sequence[int], norm: str | None
) -> ShardedTensor:
    steps = _steps(function, x, sizes, axes)
    result: ShardedTensor = _transformed(x, steps, norm) if steps else astype(x, function(np.ones(1, x.dtype)).dtype)
    return result


_Step = tuple[str, int | None, int]
"""A transform: its name, ``n`` and ``axis``."""


def _steps(function: Callable[..., Any], x: Any, sizes: Sequence[int | None], axes: Sequence[int]) -> tuple[_Step, ...]:
    """Returns the transforms in their order: from the last dimension to the first as NumPy, but those split last."""
    split = x.sharding.spec.chains_of(x.ndim) if isinstance(x, ShardedTensor) else [()] * len(shape_of(x))
    order = sorted(range(len(axes)), key=lambda k: (bool(split[axes[k]]), -k))
    return tuple([(function.__name__, sizes[k], axes[k]) for k in order])


def _transformed_by_numpy(x: Any, steps: tuple[_Step, ...], norm: str | None) -> Any:
    for name, n, axis in steps:
        x = fourier.in_one_thread(name, x, n, axis, norm)
    return x


@composition(_transformed_by_numpy)
def _transformed(x: Any, steps: tuple[_Step, ...], norm: str | None) -> Any:
    """Transforms one dimension after the other."""
    for name, n, axis in steps:
        x = OPS[name].dispatch(x, n, axis, norm)
    return x


# -- frequencies and shifts ------------------------------------------------------------------------


def _frequencies(count: Callable[[int], int]) -> Callable[..., tuple[Shape, np.dtype[Any]]]:
    """Returns the rule of a creation function, given the number of frequencies of ``n`` elements."""

    def rule(kinds: Any, *, n: Any, d: float = 1.0, dtype: Any = None) -> tuple[Shape, np.dtype[Any]]:
        result_dtype = np.dtype(float) if dtype is None else sharded_dtype(dtype)
        if result_dtype.kind != "f":
            raise ArgumentTypeError(f"dtype is {result_dtype}; wanted a floating-point dtype")
        return (count(integer_from(1, n, "n")),), result_dtype

    return rule


@operator(_frequencies(_same), operands=())
def fftfreq(n: int, /, d: float = 1.0, *, dtype: npt.DTypeLike | None = None, device: Any = None) -> ShardedTensor:
    """Returns the frequencies of the elements of an `fft` of ``n`` elements: 0, 1, ..., -2, -1, divided by n d.

    Args:
        n: the number of elements.
        d: the distance of the samples.
        dtype: a floating-point dtype; float64 by default.
        device: the device, mesh or sharding of the result; see `arange`.

    Raises:
        ArgumentTypeError: ``n`` is not an integer, or ``dtype`` is not a floating-point one.

    >>> st.fft.fftfreq(4).tolist()
    [0.0, 0.25, -0.5, -0.25]
    """


@operator(_frequencies(_half), operands=())
def rfftfreq(n: int, /, d: float = 1.0, *, dtype: npt.DTypeLike | None = None, device: Any = None) -> ShardedTensor:
    """Returns the frequencies of the elements of an `rfft` of ``n`` elements: 0, 1, ..., n // 2, divided by n d.

    Arguments and errors are those of `fftfreq`.

    >>> st.fft.rfftfreq(4).tolist()
    [0.0, 0.25, 0.5]
    """


@implements(fftfreq, "kernel")
def _fftfreq(xp: Any, context: ShardContext, *, n: int, d: float, dtype: Any) -> Any:
    ((begin, end),) = context.box
    middle = min(max((n + 1) // 2, begin), end)  # From there on, frequencies are negative.
    numbers = xp.concat([xp.arange(begin, middle), xp.arange(middle - n, end - n)])
    return xp.asarray(xp.multiply(numbers, 1.0 / (n * d)), dtype=context.dtype)


@implements(rfftfreq, "kernel")
def _rfftfreq(xp: Any, context: ShardContext, *, n: int, d: float, dtype: Any) -> Any:
    ((begin, end),) = context.box
    return xp.asarray(xp.multiply(xp.arange(begin, end), 1.0 / (n * d)), dtype=context.dtype)


@named
def fftshift(x: ArrayLike, /, axes: int | Sequence[int] | None = None) -> ShardedTensor:
    """Moves the frequency zero to the middle of each of ``axes``, by `roll`. The sharding is that of x.

    Raises:
        AxisError: x has no such axis.

    >>> st.fft.fftshift(st.asarray([0, 1, 2, -2, -1])).tolist()
    [-2, -1, 0, 1, 2]
    """
    return _shifted(x, axes, 1)


@named
def ifftshift(x: ArrayLike, /, axes: int | Sequence[int] | None = None) -> ShardedTensor:
    """Moves the frequency zero from the middle of each of ``axes`` back to the beginning; the inverse of `fftshift`.

    >>> st.fft.ifftshift(st.asarray([-2, -1, 0, 1, 2])).tolist()
    [0, 1, 2, -2, -1]
    """
    return _shifted(x, axes, -1)


def _shifted(x: Any, axes: Any, sign: int) -> ShardedTensor:
    shape = shape_of(x)
    along = normalize_axes(tuple(range(len(shape))) if axes is None else axes, len(shape))
    return roll(x, tuple([sign * (shape[a] // 2) for a in along]), axis=along)
