"""The Fourier transform of lines that are split over devices, by transpositions.

A line of n = n1 n2 elements is a matrix A of n1 rows. Its transform is, with w = exp(-2 pi i / n)::

    Y[k1, j2] = w^(k1 j2) sum over j1 of A[j1, j2] w^(n2 j1 k1)        columns, and a twiddle factor for each element
    X[k1 + n1 k2] = sum over j2 of Y[k1, j2] w^(n1 j2 k2)               rows

The columns are whole where the matrix is split by columns, the rows where it is split by rows, and the result is in
order once its transpose is split by rows. That makes three all-to-alls, in each of which a device keeps the elements
that are in its part both before and after (D. H. Bailey, FFTs in external or hierarchical memory, The Journal of
Supercomputing 4, 1990)::

    bytes = itemsize (3 n - sum over devices of (c r + c r + r c)),  r and c: the rows and columns of the device

of complex numbers, plus the boundaries of parts where n1 or n2 is not a multiple of the number of devices P; that is
3 n itemsize (1 - 1/P) if both are.

* Real numbers of an even count are transformed as half as many complex ones, whose spectrum determines theirs.
* A size n without two factors that are at least P is transformed by a convolution with a chirp: three transforms of at
  least 2 n - 1 elements (L. I. Bluestein, A linear filtering approach to the computation of the discrete Fourier
  transform, 1968). A device then holds up to twelve times its share of the operand and the result; otherwise, no more
  than three times.

Everything is composed of operators: nothing here knows of memories, simulations or inference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.functions.creation import zeros
from shardtensor.functions.data_types import astype
from shardtensor.functions.elementwise import conj, multiply, real
from shardtensor.functions.joining import concat
from shardtensor.functions.manipulation import flip, moveaxis, reshape
from shardtensor.host import fourier, memory_pool
from shardtensor.host.threads import each
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import P
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_GATHERED = 1 << 14
"""Elements up to which a split line is gathered: three all-to-alls of so few take longer than one all-gather."""


def needs_transposition(x: Any, n: int, axis: int) -> bool:
    """Whether lines of x along ``axis``, which is not negative, stay split for a transform of ``n`` elements.

    They do not where another dimension can take the split, which is one all-to-all, nor where they are short: up to
    16,384 elements, or 2 P² elements over P devices, which hardly have two factors from P on.
    """
    if not isinstance(x, ShardedTensor):
        return False
    chains = x.sharding.spec.chains_of(x.ndim)
    parts = _parts(x, axis)
    if parts == 1 or n <= max(_GATHERED, 2 * parts**2):
        return False
    return all(chains[d] or size < parts for d, size in enumerate(x.shape) if d != axis)


def _parts(x: ShardedTensor, axis: int = -1) -> int:
    """Returns the number of parts into which a dimension is split."""
    return math.prod([x.sharding.mesh.shape[a] for a in x.sharding.spec.chains_of(x.ndim)[axis]])


def transform(name: str, x: ShardedTensor, n: int, axis: int, norm: str | None, dtype: np.dtype[Any]) -> ShardedTensor:
    """Returns the transform of split lines.

    Args:
        name: the name of the transform in `shardtensor.fft`.
        x: the tensor; `needs_transposition` holds.
        n: the number of elements of the transform.
        axis: the dimension of the lines.
        norm: see `shardtensor.fft`.
        dtype: the dtype of the result.
    """
    inverse = name.startswith("i")
    scale = {"ortho": 1 / math.sqrt(n), "forward" if not inverse else "backward": 1 / n}.get(norm or "backward", 1.0)
    number = np.result_type(dtype, np.complex64).type(0)
    kind = (number.real if name in ("rfft", "ihfft") else number).dtype
    size = n if name not in ("irfft", "hfft") else n // 2 + 1
    # No name refers to the lines, so that their memory is free as soon as the next step has read them.
    result = _BY_NAME[name](astype(_resized(moveaxis(x, axis, -1), size), kind), n, scale)
    return moveaxis(astype(result, dtype), -1, axis)


def _resized(x: ShardedTensor, size: int) -> ShardedTensor:
    """Returns lines cut, or padded with zeros, to the given size."""
    lacking = size - x.shape[-1]
    if lacking <= 0:
        return x if not lacking else x[..., :size]
    device = x.sharding if x.committed else None
    return concat([x, zeros((*x.shape[:-1], lacking), dtype=x.dtype, device=device)], axis=-1)


# -- complex lines ---------------------------------------------------------------------------------


def _complex(x: ShardedTensor, scale: float, inverse: bool) -> ShardedTensor:
    """Returns the transform of complex lines, times ``scale``."""
    n = x.shape[-1]
    rows = _factor(n)
    if rows < _parts(x):
        return _by_convolution(x, scale, inverse)
    y = fft_columns(reshape(x, (*x.shape[:-1], rows, n // rows)), scale=scale, inverse=inverse)
    y = call("ifft" if inverse else "fft", y, axis=-1, norm="forward" if inverse else "backward")
    return reshape(fft_transposed(y), x.shape)


@functools.lru_cache(1024)
def _factor(n: int) -> int:
    """Returns the largest factor of n up to its root."""
    numbers = np.arange(1, math.isqrt(n) + 1)
    return int(numbers[n % numbers == 0][-1])


@operator("... a! b -> ... a b", error_name="fft")
def fft_columns(x: ArrayLike, /, *, scale: float, inverse: bool) -> ShardedTensor:
    """Transforms the columns of complex matrices of n elements, and multiplies element (k, j) by ``scale`` w^(k j),
    where w is the n-th root of one.

    >>> from shardtensor.functions.algorithms.transpose_fft import fft_columns
    >>> fft_columns(st.asarray([[1.0 + 0j], [1.0 + 0j]]), scale=0.5, inverse=False).tolist()
    [[(1+0j)], [0j]]
    """


@implements(fft_columns, "kernel")
def _fft_columns(xp: Any, context: ShardContext, x: Any, *, scale: float, inverse: bool) -> Any:
    if 0 in x.shape:
        return xp.zeros(context.local_shape, dtype=context.dtype)
    name, norm = ("ifft", "forward") if inverse else ("fft", "backward")
    high, low = _twiddle_factors(x.shape[-2], context, scale, inverse)
    if xp is np:
        y = fourier.transform(name, x, context.local_shape, context.dtype, axis=-2, norm=norm)
    else:
        y = getattr(xp.fft, name)(x, n=None, axis=-2, norm=norm)
        high, low = xp.asarray(high), xp.asarray(low)

    def work(k: int) -> None:
        part = y[..., k * low.shape[0] : (k + 1) * low.shape[0], :]
        part *= (low * high[k])[: part.shape[-2]]

    each(work, high.shape[0], threads=None if xp is np and y.nbytes > _THREADED else 1)
    return y


def _twiddle_factors(rows: int, context: ShardContext, scale: float, inverse: bool) -> tuple[Any, Any]:
    """Returns two tables with the columns of the device, from which the factors of row k are computed: the first one at
    ``k // len(second)`` times the second one at ``k % len(second)``.
    """
    n, step = rows * context.shape[-1], math.isqrt(rows - 1) + 1
    columns = np.arange(*context.box[-1], dtype=np.int64)
    high, low = [np.arange(*part, dtype=np.int64)[:, None] * columns for part in ((0, rows, step), (step,))]
    return _roots(high, n, inverse, context.dtype, scale), _roots(low, n, inverse, context.dtype)


def _roots(exponents: Any, n: int, inverse: bool, dtype: np.dtype[Any], scale: float = 1.0) -> Any:
    """Returns powers of exp(-2 pi i / n), or of its inverse, times ``scale``.

    The exponents are reduced as integers, so that angles are at most pi and the result is accurate to the last digits.
    """
    wide = np.result_type(dtype.type(0).real, np.float64).type
    angles = ((exponents + n // 2) % n - n // 2) * (wide(2 if inverse else -2) * wide(np.pi) / wide(n))
    result = np.empty(angles.shape, dtype)
    result.real, result.imag = np.cos(angles) * scale, np.sin(angles) * scale
    return result


_THREADED = 1 << 18
"""Bytes from which an elementwise loop of the host is divided over threads."""


@operator("... a! b -> ... b a", error_name="fft")
def fft_transposed(x: ArrayLike, /) -> ShardedTensor:
    """Returns a copy of matrices, transposed, whose rows are whole.

    >>> from shardtensor.functions.algorithms.transpose_fft import fft_transposed
    >>> fft_transposed(st.asarray([[1, 2], [3, 4]])).tolist()
    [[1, 3], [2, 4]]
    """


@implements(fft_transposed, "kernel")
def _fft_transposed(xp: Any, context: ShardContext, x: Any) -> Any:
    return fourier.transposed(x) if xp is np else xp.asarray(xp.matrix_transpose(x), copy=True)


# -- real lines ------------------------------------------------------------------------------------


def _real(x: ShardedTensor, n: int, scale: float, inverse: bool = False) -> ShardedTensor:
    """Returns the first half of the spectrum of real lines; its conjugate if ``inverse``."""
    if n % 2:
        x = astype(x, np.result_type(x.dtype, np.complex64))
        return _complex(x, scale, inverse)[..., : n // 2 + 1]
    spectrum = _complex(fft_packed(reshape(x, (*x.shape[:-1], n // 2, 2))), scale, False)
    spectrum = concat([spectrum, spectrum[..., :1]], axis=-1)
    half = fft_of_real(spectrum, flip(spectrum, axis=-1))
    return conj(half) if inverse else half


def _hermitian(x: ShardedTensor, n: int, scale: float, inverse: bool = True) -> ShardedTensor:
    """Returns the real lines whose spectrum has the given first half; unless ``inverse``, the real spectrum of lines
    with Hermitian symmetry, of which the first half is given.
    """
    if n % 2:
        rest = x[..., 1:]
        return real(_complex(concat([x, conj(flip(rest, axis=-1))], axis=-1), scale, inverse))
    packed = fft_to_real(x[..., :-1], flip(x[..., 1:], axis=-1), inverse=inverse)
    return reshape(fft_unpacked(_complex(packed, scale, inverse)), (*x.shape[:-1], n))


@operator("... k p! -> ... k", error_name="rfft", dtype=lambda x: np.empty((), np.result_type(x.dtype, np.complex64)))
def fft_packed(x: ArrayLike, /) -> ShardedTensor:
    """Returns pairs of real numbers as complex numbers.

    >>> from shardtensor.functions.algorithms.transpose_fft import fft_packed
    >>> fft_packed(st.asarray([[1.0, 2.0]])).tolist()
    [(1+2j)]
    """


@implements(fft_packed, "kernel")
def _fft_packed(xp: Any, context: ShardContext, x: Any) -> Any:
    if xp is np:
        return np.array(np.ascontiguousarray(x).view(context.dtype)[..., 0])
    return xp.asarray(xp.add(x[..., 0], xp.multiply(x[..., 1], 1j)), dtype=context.dtype)


def _unpacked_rule(shapes: Sequence[Shape]) -> tuple[str, Shape]:
    return "... k -> ... k p", (*shapes[0], 2)


@operator(_unpacked_rule, operands=("x",), error_name="irfft", dtype=lambda x: x.real)
def fft_unpacked(x: ArrayLike, /) -> ShardedTensor:
    """Returns complex numbers as pairs of real numbers: the inverse of `fft_packed`.

    >>> from shardtensor.functions.algorithms.transpose_fft import fft_unpacked
    >>> fft_unpacked(st.asarray([1.0 + 2j])).tolist()
    [[1.0, 2.0]]
    """


@implements(fft_unpacked, "kernel")
def _fft_unpacked(xp: Any, context: ShardContext, x: Any) -> Any:
    if xp is np:
        return np.array(x).view(context.dtype).reshape(context.local_shape)
    return xp.stack([xp.real(x), xp.imag(x)], axis=-1)


@operator("... k, ... k -> ... k", error_name="rfft")
def fft_of_real(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Returns the first half of the spectrum of real lines, given that of their pairs, and that in the opposite order.

    >>> from shardtensor.functions.algorithms.transpose_fft import fft_of_real
    >>> fft_of_real(st.asarray([1 + 2j, 1 + 2j]), st.asarray([1 + 2j, 1 + 2j])).round(6).tolist()
    [(3+0j), (-1+0j)]
    """


@implements(fft_of_real, "kernel")
def _fft_of_real(xp: Any, context: ShardContext, x1: Any, x2: Any) -> Any:
    n = 2 * (context.shape[-1] - 1)

    def combined(xp: Any, begin: int, roots: Any, z: Any, mirrored: Any) -> Any:
        mirrored = xp.conj(mirrored)
        return xp.multiply(
            xp.add(xp.add(z, mirrored), xp.multiply(xp.multiply(roots, -1j), xp.subtract(z, mirrored))), 0.5
        )

    return _along_lines(xp, context, combined, functools.partial(_powers, n, False), x1, x2)


@operator("... k, ... k -> ... k", error_name="irfft")
def fft_to_real(x1: ArrayLike, x2: ArrayLike, /, *, inverse: bool) -> ShardedTensor:
    """Returns the spectrum of the pairs of real lines, given the elements k of the first half of theirs, and the
    elements n / 2 - k. The first of each are real. The spectrum is that of the inverse transform unless ``inverse``.

    >>> from shardtensor.functions.algorithms.transpose_fft import fft_to_real
    >>> fft_to_real(st.asarray([3 + 0j]), st.asarray([-1 + 0j]), inverse=True).tolist()
    [(2+4j)]
    """


@implements(fft_to_real, "kernel")
def _fft_to_real(xp: Any, context: ShardContext, x1: Any, x2: Any, *, inverse: bool) -> Any:
    n = 2 * context.shape[-1]

    def combined(xp: Any, begin: int, roots: Any, z: Any, mirrored: Any) -> Any:
        if not begin:
            first = xp.arange(z.shape[-1]) == 0
            z, mirrored = [xp.where(first, xp.asarray(xp.real(a), dtype=a.dtype), a) for a in (z, mirrored)]
        mirrored = xp.conj(mirrored)
        return xp.add(xp.add(z, mirrored), xp.multiply(xp.multiply(roots, 1j), xp.subtract(z, mirrored)))

    return _along_lines(xp, context, combined, functools.partial(_powers, n, inverse), x1, x2)


def _powers(n: int, inverse: bool, dtype: np.dtype[Any], begin: int, end: int) -> Any:
    """Returns consecutive powers of exp(-2 pi i / n), or of its inverse."""
    step = math.isqrt(max(end - begin - 1, 0)) + 1
    high = _roots(np.arange(begin, end, step), n, inverse, dtype)
    low = _roots(np.arange(step), n, inverse, dtype)
    return (high[:, None] * low).reshape(-1)[: end - begin]


def _along_lines(
    xp: Any, context: ShardContext, function: Callable[..., Any], factors: Callable[..., Any], *arrays: Any
) -> Any:
    """Returns ``function(xp, begin, factors, *parts)`` of parts of lines, whose first element is number ``begin`` of
    the whole line, and of the factors of their elements. Parts are short, so that what is computed from them is small.
    """
    begin, end = context.box[-1]
    if xp is np:
        out = memory_pool.empty(context.local_shape, context.dtype)
        step = max(1, _THREADED * (end - begin) // max(out.nbytes, 1))
    else:
        out, step = xp.empty(context.local_shape, dtype=context.dtype), -(-(end - begin) // _PARTS) or 1

    def work(k: int) -> None:
        part = slice(k * step, min((k + 1) * step, end - begin))
        here = xp.asarray(factors(context.dtype, begin + part.start, begin + part.stop))
        out[..., part] = function(xp, begin + part.start, here, *[a[..., part] for a in arrays])

    each(work, -(-(end - begin) // step), threads=None if xp is np else 1)
    return out


_PARTS = 16
"""The number of parts of a line that a device other than the host computes one after the other."""


# -- sizes without factors -------------------------------------------------------------------------


def _by_convolution(x: ShardedTensor, scale: float, inverse: bool) -> ShardedTensor:
    """Returns the transform of complex lines of any size, times ``scale``, by Bluestein's algorithm."""
    n, parts, sharding = x.shape[-1], _parts(x), x.sharding
    size = _convolution_size(n, parts)
    line = NamedSharding(sharding.mesh, P(sharding.spec.chains_of(x.ndim)[-1]), memory_kind=sharding.memory_kind)
    kernel = _complex(chirp_filter(n, size=size, inverse=inverse, dtype=x.dtype, device=line), 1 / size, False)
    spectrum = _complex(_resized(fft_chirped(x, scale=1.0, inverse=inverse), size), 1.0, False)
    return fft_chirped(_complex(multiply(spectrum, kernel), 1.0, True)[..., :n], scale=scale, inverse=inverse)


def _convolution_size(n: int, parts: int) -> int:
    """Returns a size from 2 n - 1 on with two factors from ``parts`` on, of which one is a power of two."""
    power = 1 << max(math.isqrt(2 * n), parts - 1).bit_length()
    other = max(parts, -(-(2 * n - 1) // power))
    return power * other


def _chirp(n: int, inverse: bool, dtype: np.dtype[Any], numbers: Any, scale: float = 1.0) -> Any:
    """Returns exp(-pi i k² / n), or its inverse, for each number k."""
    return _roots(numbers * numbers % (2 * n), 2 * n, inverse, dtype, scale)


@operator("... k -> ... k", error_name="fft")
def fft_chirped(x: ArrayLike, /, *, scale: float, inverse: bool) -> ShardedTensor:
    """Multiplies the elements k of lines of n by ``scale`` exp(-pi i k² / n); by the conjugate if ``inverse``.

    >>> from shardtensor.functions.algorithms.transpose_fft import fft_chirped
    >>> fft_chirped(st.asarray([1 + 0j]), scale=2.0, inverse=False).tolist()
    [(2+0j)]
    """


@implements(fft_chirped, "kernel")
def _fft_chirped(xp: Any, context: ShardContext, x: Any, *, scale: float, inverse: bool) -> Any:
    def factors(dtype: np.dtype[Any], begin: int, end: int) -> Any:
        return _chirp(context.shape[-1], inverse, dtype, np.arange(begin, end, dtype=np.int64), scale)

    return _along_lines(xp, context, lambda xp, begin, factors, x: xp.multiply(x, factors), factors, x)


def _filter_rule(kinds: Any, *, n: int, size: int, inverse: bool, dtype: Any) -> tuple[Shape, np.dtype[Any]]:
    return (size,), np.dtype(dtype)


@operator(_filter_rule, operands=(), error_name="fft")
def chirp_filter(n: int, /, *, size: int, inverse: bool, dtype: Any, device: Any = None) -> ShardedTensor:
    """Returns the factors conjugate to those of `fft_chirped` at k and, counted from the end, at -k, for k less than n.

    >>> from shardtensor.functions.algorithms.transpose_fft import chirp_filter
    >>> chirp_filter(1, size=2, inverse=False, dtype="complex128").tolist()
    [(1+0j), 0j]
    """


@implements(chirp_filter, "kernel")
def _chirp_filter(xp: Any, context: ShardContext, *, n: int, size: int, inverse: bool, dtype: Any) -> Any:
    numbers = np.arange(*context.box[0], dtype=np.int64)
    numbers = np.minimum(numbers, size - numbers)
    return xp.asarray(np.where(numbers < n, _chirp(n, not inverse, context.dtype, numbers), 0))


_BY_NAME: dict[str, Callable[[ShardedTensor, int, float], ShardedTensor]] = {
    "fft": lambda x, n, scale: _complex(x, scale, False),
    "ifft": lambda x, n, scale: _complex(x, scale, True),
    "rfft": _real,
    "ihfft": functools.partial(_real, inverse=True),
    "irfft": _hermitian,
    "hfft": functools.partial(_hermitian, inverse=False),
}
