"""The Fourier transform of split lines of any size, as a convolution with a chirp.

With w = exp(-pi i / n), the product 2 j k is j² + k² - (k - j)², so that the transform of a line of n elements is
(L. I. Bluestein, A linear filtering approach to the computation of the discrete Fourier transform, 1968)::

    X[k] = w^(k²) sum over j of (x[j] w^(j²)) w^-((k - j)²)

That is a convolution of the elements, times a chirp, and a filter. Where there are ``a`` elements and ``b`` of the
results are wanted, it is cyclic with a period of at least ``a + b - 1``.

The three transforms of a convolution take several times the memory of a line. Long ones are therefore computed in D
parts, of which one is in memory at a time: the elements d, d + D, d + 2 D, ... of a transform of D m elements are the
transform of m elements, which are the sums of every m-th element times powers of exp(-2 pi i d / D), times powers of
exp(-2 pi i d / (D m)) (decimation in frequency; W. M. Gentleman, G. Sande, Fast Fourier transforms: for fun and profit,
AFIPS 1966). The inverse transform is the sum over all parts, for which the same holds. Hence a device holds its share
of the elements times the chirp, of the results, and a few times 1 / D of them. The filter is computed where it is used.

The bytes are those of 3 D transforms of m elements (`shardtensor.functions.fft.transpose_fft`), and of the
elements that change devices when lines are cut into pieces of m elements, and when results are joined.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.functions.fft.roots_of_unity import along_lines, powers, roots
from shardtensor.functions.standard.creation import zeros
from shardtensor.functions.standard.elementwise import multiply, real
from shardtensor.functions.standard.joining import concat
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import P
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

PIECE = 1 << 18
"""The least number of elements of a part of a convolution: fewer take more messages, and little memory."""

_MOST = 16
"""The greatest number of parts, with which a device holds no more than three times its share."""

Transform = Callable[[ShardedTensor, float, bool], ShardedTensor]


def by_convolution(
    transform: Transform, x: ShardedTensor, n: int, count: int, scale: float, inverse: bool, *, only_real: bool = False
) -> ShardedTensor:
    """Returns the first elements of the transform of lines of n elements, times ``scale``.

    Args:
        transform: transforms complex lines whose size has two factors from the number of devices on.
        x: the first elements of the lines; the others are zero.
        n: the number of elements of the transform.
        count: the number of elements of the result.
        scale: the factor.
        inverse: whether the transform is the inverse one.
        only_real: whether only the real parts of the elements are wanted.
    """
    length, sharding = x.shape[-1], x.sharding
    chain = sharding.spec.chains_of(x.ndim)[-1]
    parts, size = _division(length + count - 1, math.prod([sharding.mesh.shape[axis] for axis in chain]))
    line = NamedSharding(sharding.mesh, P(chain), memory_kind=sharding.memory_kind)
    chirp = functools.partial(fft_chirped, n=n, inverse=inverse)
    pieces = [
        resized(chirp(x[..., begin : begin + size], begin=begin, scale=1.0), size) for begin in range(0, length, size)
    ]
    totals: list[ShardedTensor] = []
    for d in range(parts):
        window = {"size": size, "parts": parts, "number": d, "given": length, "count": count}
        kernel = chirp_filter(n, **window, inverse=inverse, dtype=pieces[0].dtype, device=line)
        kernel = transform(kernel, 1 / (parts * size), False)
        part = pieces[0]
        for j, piece in enumerate(pieces[1:], 1):
            part = fft_added(part, piece, number=d * j % parts, parts=parts, inverse=False)
        part = multiply(transform(_rotated(part, parts, d, False), 1.0, False), kernel)
        del kernel
        part = _rotated(transform(part, 1.0, True), parts, d, True)
        if not d:
            totals = [part] * -(-count // size)
            continue
        for j, total in enumerate(totals):
            totals[j] = fft_added(total, part, number=d * j % parts, parts=parts, inverse=True)
    del pieces, part
    for j, begin in enumerate(range(0, count, size)):
        totals[j] = chirp(totals[j][..., : count - begin], begin=begin, scale=scale)
        totals[j] = real(totals[j]) if only_real else totals[j]
    return concat(totals, axis=-1) if len(totals) > 1 else totals[0]


def _division(count: int, devices: int) -> tuple[int, int]:
    """Returns the number of parts of a convolution, and their size, with two factors from the number of devices on, of
    which one is a power of two.
    """
    parts = min(_MOST, max(count // max(PIECE, devices**2), 1))
    least = -(-count // parts)
    power = 1 << (max(math.isqrt(least), devices) - 1).bit_length()
    return parts, power * max(devices, -(-least // power))


def resized(x: ShardedTensor, size: int) -> ShardedTensor:
    """Returns lines cut, or padded with zeros, to the given size."""
    lacking = size - x.shape[-1]
    if lacking <= 0:
        return x if not lacking else x[..., :size]
    device = x.sharding if x.committed else None
    return concat([x, zeros((*x.shape[:-1], lacking), dtype=x.dtype, device=device)], axis=-1)


def _rotated(x: ShardedTensor, parts: int, d: int, inverse: bool) -> ShardedTensor:
    """Multiplies the elements k by exp(-2 pi i d k / n), where n is the number of elements of all parts."""
    return fft_rotated(x, n=parts * x.shape[-1], stride=d, inverse=inverse) if d else x


# -- operators -------------------------------------------------------------------------------------


def complex_like(x: Any, *others: Any, **params: Any) -> Any:
    """Returns the complex number that has the dtype of a result."""
    return np.empty((), np.result_type(x.dtype, np.complex64))


@operator("... k -> ... k", error_name="fft", dtype=complex_like, tags=("internal",))
def fft_chirped(x: ArrayLike, /, *, n: int, begin: int, scale: float, inverse: bool) -> ShardedTensor:
    """Multiplies the elements k of lines by ``scale`` exp(-pi i (begin + k)² / n); by the conjugate if ``inverse``.

    >>> from shardtensor.functions.fft.chirp_fft import fft_chirped
    >>> fft_chirped(st.asarray([1 + 0j]), n=1, begin=0, scale=2.0, inverse=False).tolist()
    [(2+0j)]
    """


@implements(fft_chirped, "kernel")
def _fft_chirped(xp: Any, context: ShardContext, x: Any, *, n: int, begin: int, scale: float, inverse: bool) -> Any:
    def factors(xp: Any, dtype: np.dtype[Any], start: int, end: int) -> Any:
        return xp.asarray(_chirp(n, inverse, dtype, np.arange(begin + start, begin + end, dtype=np.int64), scale))

    return along_lines(xp, context, _product, factors, x)


def _product(xp: Any, begin: int, factors: Any, x: Any) -> Any:
    return xp.multiply(x, factors)


def _chirp(n: int, inverse: bool, dtype: np.dtype[Any], numbers: Any, scale: float = 1.0) -> Any:
    """Returns exp(-pi i k² / n), or its inverse, for each number k."""
    return roots(numbers * numbers % (2 * n), 2 * n, inverse, dtype, scale)


@operator("... k -> ... k", error_name="fft", tags=("internal",))
def fft_rotated(x: ArrayLike, /, *, n: int, stride: int, inverse: bool) -> ShardedTensor:
    """Multiplies the elements k of complex lines by exp(-2 pi i k stride / n); by the conjugate if ``inverse``.

    >>> from shardtensor.functions.fft.chirp_fft import fft_rotated
    >>> fft_rotated(st.asarray([1 + 0j, 1 + 0j]), n=2, stride=1, inverse=False).real.tolist()
    [1.0, -1.0]
    """


@implements(fft_rotated, "kernel")
def _fft_rotated(xp: Any, context: ShardContext, x: Any, *, n: int, stride: int, inverse: bool) -> Any:
    return along_lines(xp, context, _product, functools.partial(powers, n=n, inverse=inverse, stride=stride), x)


@operator("... k, ... k -> ... k", error_name="fft", tags=("internal",))
def fft_added(x1: ArrayLike, x2: ArrayLike, /, *, number: int, parts: int, inverse: bool) -> ShardedTensor:
    """Adds to complex lines others times exp(-2 pi i number / parts), or times the conjugate if ``inverse``.

    >>> from shardtensor.functions.fft.chirp_fft import fft_added
    >>> fft_added(st.asarray([1 + 0j]), st.asarray([2 + 0j]), number=0, parts=2, inverse=False).tolist()
    [(3+0j)]
    """


@implements(fft_added, "kernel")
def _fft_added(xp: Any, context: ShardContext, x1: Any, x2: Any, *, number: int, parts: int, inverse: bool) -> Any:
    factor = xp.asarray(roots(np.asarray([number]), parts, inverse, context.dtype))
    return along_lines(xp, context, lambda xp, _, factor, x1, x2: xp.add(x1, xp.multiply(x2, factor)),
                       lambda *_: factor, x1, x2)  # fmt: skip


def _filter_rule(kinds: Any, *, n: int, size: int, dtype: Any, **others: Any) -> tuple[Shape, np.dtype[Any]]:
    return (size,), np.dtype(dtype)


@operator(_filter_rule, operands=(), error_name="fft", tags=("internal",))
def chirp_filter(
    n: int,
    /,
    *,
    size: int,
    parts: int,
    number: int,
    given: int,
    count: int,
    inverse: bool,
    dtype: Any,
    device: Any = None,
) -> ShardedTensor:
    """Returns a part of the filter of a convolution: see `shardtensor.functions.fft.chirp_fft`.

    The filter has ``parts * size`` elements: the factors conjugate to those of `fft_chirped` at k from 0 to ``count``
    and, counted from the end, at -k for k less than ``given``; the others are zero.

    Args:
        n: the number of elements of the transform.
        size: the number of elements of a part.
        parts: the number of parts.
        number: the number of the part.
        given: the number of elements of the lines.
        count: the number of elements of the result.
        inverse: whether the transform is the inverse one.
        dtype: the dtype.
        device: the sharding.

    >>> from shardtensor.functions.fft.chirp_fft import chirp_filter
    >>> window = {"parts": 1, "number": 0, "given": 1, "count": 1}
    >>> chirp_filter(1, size=2, **window, inverse=False, dtype="complex128").tolist()
    [(1+0j), 0j]
    """


@implements(chirp_filter, "kernel")
def _chirp_filter(
    xp: Any,
    context: ShardContext,
    *,
    n: int,
    size: int,
    parts: int,
    number: int,
    given: int,
    count: int,
    inverse: bool,
    dtype: Any,
) -> Any:
    whole, kind = parts * size, context.dtype

    def factors(xp: Any, dtype: np.dtype[Any], begin: int, end: int) -> Any:
        return xp.asarray(_chirp(n, not inverse, dtype, np.arange(begin, end, dtype=np.int64)))

    def part(xp: Any, begin: int, chirp: Any) -> Any:
        end, total = begin + chirp.shape[0], xp.zeros(chirp.shape, dtype=kind)
        # (k + o)² is k² + 2 k o + o², so that the chirp at k + o is the one at k times a power of a root of one.
        for j, (low, high, shift) in itertools.product(
            range(parts), [(0, count, 0), (whole - given + 1, whole, whole)]
        ):
            first, last = max(low - j * size, begin), min(high - j * size, end)
            if first < last:
                offset = j * size - shift
                some = slice(first - begin, last - begin)
                angle = roots(np.asarray([offset * offset % (2 * n)]), 2 * n, not inverse, kind)
                angle = angle * roots(np.asarray([number * j % parts]), parts, False, kind)
                turned = powers(xp, kind, first, last, n=n, inverse=not inverse, stride=offset % n)
                total[some] += xp.multiply(xp.multiply(chirp[some], turned), xp.asarray(angle))
        if not number:
            return total
        return xp.multiply(total, powers(xp, kind, begin, end, n=whole, inverse=False, stride=number))

    return along_lines(xp, context, part, factors)
