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
* Of real numbers of an odd count n1 n2, only the rows k1 up to (n1 - 1) / 2 of Y are computed, since the columns of A
  are real. The elements k1 + n1 k2 of the first half of X with other k1 are the conjugates of those at n1 - k1 and
  n2 - 1 - k2. The inverse transform takes the same steps in reverse order.
* A size n without two factors that are at least P is transformed by a convolution with a chirp; see
  `shardtensor.functions.fft.chirp_fft`.

Everything is composed of operators: nothing here depends on memories, simulations or inference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.functions.fft.chirp_fft import by_convolution, complex_like, resized
from shardtensor.functions.fft.roots_of_unity import THREADED, along_lines, powers, roots
from shardtensor.functions.standard.data_types import astype
from shardtensor.functions.standard.elementwise import conj, multiply, real, subtract
from shardtensor.functions.standard.joining import concat
from shardtensor.functions.standard.manipulation import flip, moveaxis, reshape
from shardtensor.host import fourier
from shardtensor.host.threads import each
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.shard_context import ShardContext
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
    is_real = name in ("rfft", "ihfft") or (name in ("irfft", "hfft") and x.dtype.kind != "c")
    kind = (number.real if is_real else number).dtype
    size = n if name not in ("irfft", "hfft") else n // 2 + 1
    # No name refers to the lines, so that their memory is free as soon as the next step has read them.
    function, flag = _BY_NAME[name]
    result = function(_as(resized(moveaxis(x, axis, -1), size), kind), n, scale, flag)
    return moveaxis(_as(result, dtype), -1, axis)


def _as(x: ShardedTensor, dtype: np.dtype[Any]) -> ShardedTensor:
    """Returns a tensor of the dtype, without a copy if it has that already."""
    return x if x.dtype == dtype else astype(x, dtype)


# -- complex lines ---------------------------------------------------------------------------------


def _complex(x: ShardedTensor, scale: float, inverse: bool) -> ShardedTensor:
    """Returns the transform of complex lines, times ``scale``."""
    n = x.shape[-1]
    rows = _factor(n)
    if rows < _parts(x):
        return by_convolution(_complex, x, n, n, scale, inverse)
    y = fft_columns(reshape(x, (*x.shape[:-1], rows, n // rows)), n=n, scale=scale, inverse=inverse)
    y = call("ifft" if inverse else "fft", y, axis=-1, norm="forward" if inverse else "backward")
    return reshape(fft_transposed(y), x.shape)


@functools.lru_cache(1024)
def _factor(n: int) -> int:
    """Returns the largest factor of n up to its root."""
    numbers = np.arange(1, math.isqrt(n) + 1)
    return int(numbers[n % numbers == 0][-1])


@operator("... a! b -> ... a b", error_name="fft", tags=("internal",))
def fft_columns(x: ArrayLike, /, *, n: int, scale: float, inverse: bool) -> ShardedTensor:
    """Transforms the columns of complex matrices, and multiplies element (k, j) by ``scale`` w^(k j), where w is the
    n-th root of one.

    >>> from shardtensor.functions.fft.transpose_fft import fft_columns
    >>> fft_columns(st.asarray([[1.0 + 0j], [1.0 + 0j]]), n=2, scale=0.5, inverse=False).tolist()
    [[(1+0j)], [0j]]
    """


def _half_rule(shapes: Sequence[Shape], **params: Any) -> tuple[str, Shape]:
    *stack, rows, columns = shapes[0]
    return "... a! b -> ... h b", (*stack, rows // 2 + 1, columns)


@operator(_half_rule, operands=("x",), error_name="rfft", dtype=complex_like, tags=("internal",))
def fft_real_columns(x: ArrayLike, /, *, n: int, scale: float, inverse: bool) -> ShardedTensor:
    """Returns the first half of the rows of `fft_columns` of real matrices.

    >>> from shardtensor.functions.fft.transpose_fft import fft_real_columns
    >>> fft_real_columns(st.asarray([[1.0], [1.0], [1.0]]), n=3, scale=1.0, inverse=False).tolist()
    [[(3+0j)], [0j]]
    """


@implements(fft_columns, "kernel")
def _fft_columns(xp: Any, context: ShardContext, x: Any, **params: Any) -> Any:
    return _columns(xp, context, x, "ifft" if params["inverse"] else "fft", **params)


@implements(fft_real_columns, "kernel")
def _fft_real_columns(xp: Any, context: ShardContext, x: Any, **params: Any) -> Any:
    return _columns(xp, context, x, "ihfft" if params["inverse"] else "rfft", **params)


def _columns(xp: Any, context: ShardContext, x: Any, name: str, *, n: int, scale: float, inverse: bool) -> Any:
    """Returns the transforms of columns of the given name, times powers of a root of one."""
    if 0 in x.shape:
        return xp.zeros(context.local_shape, dtype=context.dtype)
    norm = "forward" if inverse else "backward"
    high, low = _twiddle_factors(n, context, scale, inverse)
    if xp is np:
        y = fourier.transform(name, x, context.local_shape, context.dtype, axis=-2, norm=norm)
    else:
        y = getattr(xp.fft, name)(x, n=None, axis=-2, norm=norm)
        high, low = xp.asarray(high), xp.asarray(low)

    def work(k: int) -> None:
        part = y[..., k * low.shape[0] : (k + 1) * low.shape[0], :]
        part *= (low * high[k])[: part.shape[-2]]

    each(work, high.shape[0], threads=None if xp is np and y.nbytes > THREADED else 1)
    return y


def _twiddle_factors(n: int, context: ShardContext, scale: float, inverse: bool) -> tuple[Any, Any]:
    """Returns two tables with the columns of the device, from which the factors of row k are computed: the first one at
    ``k // len(second)`` times the second one at ``k % len(second)``.
    """
    rows = context.shape[-2]
    step = math.isqrt(rows - 1) + 1
    columns = np.arange(*context.box[-1], dtype=np.int64)
    high, low = [np.arange(*part, dtype=np.int64)[:, None] * columns for part in ((0, rows, step), (step,))]
    return roots(high, n, inverse, context.dtype, scale), roots(low, n, inverse, context.dtype)


@operator("... a! b -> ... b a", error_name="fft", tags=("internal",))
def fft_transposed(x: ArrayLike, /) -> ShardedTensor:
    """Returns a copy of matrices, transposed, whose rows are whole.

    >>> from shardtensor.functions.fft.transpose_fft import fft_transposed
    >>> fft_transposed(st.asarray([[1, 2], [3, 4]])).tolist()
    [[1, 3], [2, 4]]
    """


@implements(fft_transposed, "kernel")
def _fft_transposed(xp: Any, context: ShardContext, x: Any) -> Any:
    return fourier.transposed(x) if xp is np else xp.asarray(xp.matrix_transpose(x), copy=True)


# -- real lines ------------------------------------------------------------------------------------


def _real(x: ShardedTensor, n: int, scale: float, inverse: bool) -> ShardedTensor:
    """Returns the first half of the spectrum of real lines; its conjugate if ``inverse``."""
    if n % 2:
        if not _has_odd_factors(n, _parts(x)):
            return by_convolution(_complex, x, n, n // 2 + 1, scale, inverse)
        return _odd_real(x, n, scale, inverse)
    spectrum = _complex(fft_packed(reshape(x, (*x.shape[:-1], n // 2, 2))), scale, False)
    spectrum = concat([spectrum, spectrum[..., :1]], axis=-1)
    half = fft_of_real(spectrum, flip(spectrum, axis=-1))
    return conj(half) if inverse else half


def _hermitian(x: ShardedTensor, n: int, scale: float, inverse: bool) -> ShardedTensor:
    """Returns the real lines whose spectrum has the given first half; unless ``inverse``, the real spectrum of lines
    with Hermitian symmetry, of which the first half is given.
    """
    if n % 2:
        if not _has_odd_factors(n, _parts(x)):
            # The elements that are not given are the conjugates of those that are, except for the first one.
            half = by_convolution(_complex, x, n, n, 2 * scale, inverse, only_real=True)
            return subtract(half, multiply(real(x[..., :1]), scale))
        return _odd_hermitian(_as(x, np.result_type(x.dtype, np.complex64)), n, scale, inverse)
    x = fft_to_real(x[..., :-1], flip(x[..., 1:], axis=-1), inverse=inverse)
    return reshape(fft_unpacked(_complex(x, scale, inverse)), (*x.shape[:-1], n))


def _has_odd_factors(n: int, parts: int) -> bool:
    """Whether an odd number has a factor for the columns of a real matrix, and one for half of its rows."""
    return _factor(n) >= parts and n // _factor(n) // 2 + 1 >= parts


def _odd_real(x: ShardedTensor, n: int, scale: float, inverse: bool) -> ShardedTensor:
    """Returns the first half of the spectrum of an odd number of real elements; its conjugate if ``inverse``."""
    columns = _factor(n)
    rows, half = n // columns, (columns + 1) // 2
    z = fft_real_columns(reshape(x, (*x.shape[:-1], rows, columns)), n=n, scale=scale, inverse=inverse)
    z = call("ifft" if inverse else "fft", z, axis=-1, norm="forward" if inverse else "backward")
    z = fft_transposed(z)
    others = conj(flip(z[..., half - 1 :, 1:], axis=(-2, -1)))
    z = concat([z[..., :half, :], others], axis=-1)
    return reshape(z, (*x.shape[:-1], half * rows))[..., : n // 2 + 1]


def _odd_hermitian(x: ShardedTensor, n: int, scale: float, inverse: bool) -> ShardedTensor:
    """Returns `_hermitian` of an odd number of elements, of which the first half is given."""
    columns = _factor(n)
    rows, half, stack = n // columns, (columns + 1) // 2, x.shape[:-1]
    z = reshape(resized(x, half * rows), (*stack, half, rows))
    first, others = z[..., 1:, :1], z[..., :-1, rows // 2 + 1 :]
    others = concat([flip(first, axis=-2), flip(others, axis=(-2, -1))], axis=-1)
    z = concat([z[..., : rows // 2 + 1], conj(others)], axis=-2)
    z = fft_columns(z, n=n, scale=scale, inverse=inverse)
    z = call("irfft" if inverse else "hfft", z, n=rows, axis=-1, norm="forward" if inverse else "backward")
    return reshape(fft_transposed(z), (*stack, n))


@operator("... k p! -> ... k", error_name="rfft", dtype=complex_like, tags=("internal",))
def fft_packed(x: ArrayLike, /) -> ShardedTensor:
    """Returns pairs of real numbers as complex numbers.

    >>> from shardtensor.functions.fft.transpose_fft import fft_packed
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


@operator(_unpacked_rule, operands=("x",), error_name="irfft", dtype=lambda x: x.real, tags=("internal",))
def fft_unpacked(x: ArrayLike, /) -> ShardedTensor:
    """Returns complex numbers as pairs of real numbers: the inverse of `fft_packed`.

    >>> from shardtensor.functions.fft.transpose_fft import fft_unpacked
    >>> fft_unpacked(st.asarray([1.0 + 2j])).tolist()
    [[1.0, 2.0]]
    """


@implements(fft_unpacked, "kernel")
def _fft_unpacked(xp: Any, context: ShardContext, x: Any) -> Any:
    if xp is np:
        return np.array(x).view(context.dtype).reshape(context.local_shape)
    return xp.stack([xp.real(x), xp.imag(x)], axis=-1)


@operator("... k, ... k -> ... k", error_name="rfft", tags=("internal",))
def fft_of_real(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """Returns the first half of the spectrum of real lines, given that of their pairs, and that in the opposite order.

    >>> from shardtensor.functions.fft.transpose_fft import fft_of_real
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

    return along_lines(xp, context, combined, functools.partial(powers, n=n, inverse=False), x1, x2)


@operator("... k, ... k -> ... k", error_name="irfft", dtype=complex_like, tags=("internal",))
def fft_to_real(x1: ArrayLike, x2: ArrayLike, /, *, inverse: bool) -> ShardedTensor:
    """Returns the spectrum of the pairs of real lines, given the elements k of the first half of theirs, and the
    elements n / 2 - k. The first of each are real. The spectrum is that of the inverse transform unless ``inverse``.

    >>> from shardtensor.functions.fft.transpose_fft import fft_to_real
    >>> fft_to_real(st.asarray([3 + 0j]), st.asarray([-1 + 0j]), inverse=True).tolist()
    [(2+4j)]
    """


@implements(fft_to_real, "kernel")
def _fft_to_real(xp: Any, context: ShardContext, x1: Any, x2: Any, *, inverse: bool) -> Any:
    n = 2 * context.shape[-1]

    def combined(xp: Any, begin: int, roots: Any, z: Any, mirrored: Any) -> Any:
        if not xp.isdtype(z.dtype, "complex floating"):
            z, mirrored = xp.asarray(z, dtype=context.dtype), xp.asarray(mirrored, dtype=context.dtype)
        if not begin:
            first = xp.arange(z.shape[-1]) == 0
            z, mirrored = [xp.where(first, xp.asarray(xp.real(a), dtype=a.dtype), a) for a in (z, mirrored)]
        mirrored = xp.conj(mirrored)
        return xp.add(xp.add(z, mirrored), xp.multiply(xp.multiply(roots, 1j), xp.subtract(z, mirrored)))

    return along_lines(xp, context, combined, functools.partial(powers, n=n, inverse=inverse), x1, x2)


def _of_complex(x: ShardedTensor, n: int, scale: float, inverse: bool) -> ShardedTensor:
    return _complex(x, scale, inverse)


_BY_NAME: dict[str, tuple[Callable[[ShardedTensor, int, float, bool], ShardedTensor], bool]] = {
    "fft": (_of_complex, False),
    "ifft": (_of_complex, True),
    "rfft": (_real, False),
    "ihfft": (_real, True),
    "irfft": (_hermitian, True),
    "hfft": (_hermitian, False),
}
