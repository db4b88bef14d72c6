"""Fourier transforms of host arrays, divided over threads.

Long transforms are those of SciPy where it is installed (the extra ``fft``), whose loops transform several lines at a
time; otherwise NumPy transforms a block of lines in each thread.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from shardtensor.host import memory_pool
from shardtensor.host.threads import each, num_threads

_LONG = 1 << 15
"""The number of elements from which on a transform takes longer than starting to run in a waiting thread."""

_BLOCK = 1 << 16
"""Elements of the lines that a thread of NumPy transforms at a time, which stay in its cache."""


def transform(
    name: str, x: Any, shape: tuple[int, ...], dtype: Any, *, n: int | None = None, axis: int, norm: str | None
) -> Any:
    """Computes the transform of the given name in ``numpy.fft``; returns a new array of the given shape and dtype."""
    if x.size < _LONG:
        return in_one_thread(name, x, n, axis, norm)
    library = scipy_fft()
    if library is not None:
        return getattr(library, name)(x, n=n, axis=axis, norm=norm, workers=num_threads())
    return _by_numpy(name, x, shape, dtype, n, axis, norm)


def in_one_thread(name: str, x: Any, n: int | None, axis: int, norm: str | None) -> Any:
    """Calls the function of ``numpy.fft``. Numbers of float16 are converted to float32 first, as other libraries do:
    NumPy would round the factor of the norm to float16. Real results are of float16 again, as NumPy's.
    """
    if x.dtype != np.float16:
        return getattr(np.fft, name)(x, n, axis, norm)
    result = getattr(np.fft, name)(x.astype(np.float32), n, axis, norm)
    return result if result.dtype.kind == "c" else result.astype(np.float16)


@functools.cache
def scipy_fft() -> Any:
    """Returns the module ``scipy.fft``, or None if SciPy is not installed."""
    try:
        return importlib.import_module("scipy.fft")
    except ImportError:
        return None


def _by_numpy(name: str, x: Any, shape: tuple[int, ...], dtype: Any, n: int | None, axis: int, norm: str | None) -> Any:
    """Transforms blocks of lines in threads. Each block is copied with its lines in rows, which NumPy's loops need:
    they take three times as long for the columns of long rows.
    """
    if x.ndim == 1:
        return in_one_thread(name, x, n, axis, norm)
    out = memory_pool.empty(shape, dtype)
    lines, results = np.moveaxis(x, axis, -1), np.moveaxis(out, axis, -1)
    along = max(range(lines.ndim - 1), key=lines.shape.__getitem__)
    lines, results = np.moveaxis(lines, along, 0), np.moveaxis(results, along, 0)
    step = max(1, _BLOCK * len(lines) // x.size)

    def work(k: int) -> None:
        part = slice(k * step, (k + 1) * step)
        results[part] = in_one_thread(name, np.ascontiguousarray(lines[part]), n, -1, norm)

    each(work, -(-len(lines) // step))
    return out


def transposed(x: Any) -> Any:
    """Returns a copy of matrices with the last two dimensions exchanged."""
    *stack, rows, columns = x.shape
    if x.size < _LONG:
        return np.ascontiguousarray(np.swapaxes(x, -1, -2))
    out = memory_pool.empty((*stack, columns, rows), x.dtype)
    count = -(-columns // _STRIP)

    def work(k: int) -> None:
        begin, first = k % count * _STRIP, k // count * _STRIP
        end = begin + _STRIP
        for at in range(first, min(first + _STRIP, rows), _ROWS):
            np.copyto(out[..., begin:end, at : at + _ROWS], np.swapaxes(x[..., at : at + _ROWS, begin:end], -1, -2))

    each(work, count * -(-rows // _STRIP))
    return out


_STRIP = 256
"""Rows and columns of the tiles of a transposition: those of one tile stay in the cache."""

_ROWS = 32
"""Rows of a tile that are transposed at a time. The addresses of columns often differ by powers of two, so that few of
them stay in the first cache.
"""
