"""Calls of every function, and what is known of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import shardtensor as st
from tests.numpy_calls import FFT, LINALG, MAIN, METHODS, words

Call = Callable[[Any], Any]


def _either(mine: Call, numpys: Call) -> Call:
    """Returns a call of the library for tensors, and another one for NumPy's arrays."""
    return lambda o: (mine if isinstance(o.x, st.ShardedTensor) else numpys)(o)


CALLS: dict[str, Call] = {
    **MAIN,
    **{f"linalg.{name}": call for name, call in LINALG.items()},
    **{f"fft.{name}": call for name, call in FFT.items()},
    **{f"x.{name}": call for name, call in METHODS.items()},
    **{
        f"{name}.{method}": functools.partial(call, getattr(np, name))
        for name in words("add multiply maximum minimum logical_and logical_or bitwise_xor subtract hypot logaddexp")
        for method, call in {
            "reduce": lambda f, o: f.reduce(o.x, axis=0),
            "accumulate": lambda f, o: f.accumulate(o.x, axis=0),
            "reduceat": lambda f, o: f.reduceat(o.x, [0, 2, 1], axis=0),
            "outer": lambda f, o: f.outer(o.v, o.w),
            "at": lambda f, o: (f.at(o.x, [0, 2, 0], o.x.dtype.type(1)), o.x)[1],
        }.items()
    },
    "st.topk": _either(
        lambda o: st.topk(o.x, min(2, len(o.x)), axis=0)[0],
        lambda o: np.sort(o.x, axis=0)[: -min(3, len(o.x) + 1) : -1],
    ),
    "st.logcumsumexp": _either(lambda o: st.logcumsumexp(o.x, axis=0), lambda o: np.logaddexp.accumulate(o.x, axis=0)),
    "st.linspace": _either(lambda o: st.linspace(-1, 1, 3 * len(o.x)), lambda o: np.linspace(-1, 1, 3 * len(o.x))),
    "st.arange": _either(lambda o: st.arange(5, 9 * len(o.x), 2), lambda o: np.arange(5, 9 * len(o.x), 2)),
}
"""The calls of all functions by their names, of methods of ufuncs, and of some functions that NumPy lacks."""

EXACT = frozenset(words("""
    abs absolute ceil copysign fabs fix floor isfinite isinf isnan logical_not negative positive rint sign signbit
    spacing square trunc isneginf isposinf isreal iscomplex frexp modf copy ones_like zeros_like conj conjugate imag
    real divide equal floor_divide fmax fmin fmod greater greater_equal heaviside less less_equal logical_and
    logical_or logical_xor maximum minimum mod multiply nextafter not_equal remainder subtract true_divide add divmod
    isclose allclose array_equal array_equiv broadcast_arrays all any amax amin argmax argmin count_nonzero max min
    nanargmax nanargmin nanmax nanmin flip repeat sort atleast_1d atleast_2d atleast_3d diag ravel transpose
    matrix_transpose tril triu fliplr flipud rot90 squeeze asarray_chkfinite diagonal append hstack vstack concat
    concatenate stack column_stack dstack row_stack block array_split split hsplit vsplit array asanyarray asarray
    ascontiguousarray asfortranarray require nonzero argwhere flatnonzero diagflat tile resize astype broadcast_to
    choose clip compress copyto delete dsplit expand_dims extract fill_diagonal full_like insert lexsort meshgrid
    moveaxis nan_to_num pad permute_dims piecewise place put put_along_axis putmask reshape roll rollaxis searchsorted
    select swapaxes take take_along_axis unstack where ldexp flatten fill item T mT tolist view trim_zeros digitize
    bincount round around unique isin intersect1d union1d setdiff1d setxor1d
"""))  # fmt: skip
"""The functions whose results are not rounded, or are by IEEE 754: they have NumPy's bits, but for those of NaN."""

ADDING = frozenset(words("""
    add average convolve corrcoef correlate cov cross cumprod cumsum cumulative_prod cumulative_sum diff dot ediff1d
    einsum geomspace gradient histogram histogram2d histogramdd histogram_bin_edges inner interp kron linspace
    logaddexp logcumsumexp logspace matmul matvec mean median nancumprod nancumsum nanmean nanmedian
    nanpercentile nanprod nanquantile nanstd
    nansum nanvar percentile poly polyadd polydiv polyfit polyint polymul polysub polyval prod quantile roots std sum
    tensordot trace trapezoid trim_zeros unwrap var vdot vecdot vecmat apply_over_axes ptp reduce accumulate reduceat
"""))  # fmt: skip
"""The functions that add numbers: whether a sum of the greatest ones is infinite depends on the order of additions."""

EITHER_ZERO = words("""
    fmax fmin maximum minimum max min amax amin nanmax nanmin sort clip partition median nanmedian select
""")
"""The functions that select one of equal elements: for 0 and -0 IEEE 754 does not say which, nor does NumPy."""

LEFT_OUT = words("""
    empty_like array2string array_repr array_str info datetime_as_string is_busday busday_count busday_offset
    frompyfunc nested_iters asmatrix bmat x.base x.ctypes x.data x.flat x.dumps x.dump x.byteswap x.resize x.tofile
    x.setfield x.setflags x.strides isfortran x.to_device x.getfield from_dlpack
    linalg.eig linalg.eigvals linalg.eigh linalg.svd
    linalg.qr
""")
"""Calls whose results are not defined, are no numbers, or differ as the pages say: `docs/numpy_functions.md` lists what is
refused, the eigenvalues of general matrices are complex numbers in the array API, and the signs of vectors are free.
"""

NOT_STABLE = ("argsort", "argpartition", "partition", "unique_values", "x.argsort", "x.argpartition", "x.partition")
"""Calls whose results NumPy defines up to an order."""

QUOTIENTS = ("mod", "remainder", "fmod", "divmod", "floor_divide")
"""Functions of which PyTorch's loops divide first: where a quotient is infinite, the remainder is NaN."""

POWERS = ("pow", "power", "float_power")
"""Functions of which the simulated GPU fails where NumPy raises an error: for negative powers of integers."""

EXCEPT_ON = {"torch": QUOTIENTS, "cupy": POWERS}
"""Functions that have plain numbers only on a backend."""

DECOMPOSITIONS = words("""
    linalg.cholesky linalg.eigvalsh linalg.det linalg.inv linalg.pinv linalg.slogdet linalg.svdvals linalg.cond
    linalg.matrix_rank linalg.matrix_norm linalg.norm linalg.vector_norm linalg.lstsq linalg.matrix_power
    linalg.multi_dot linalg.solve linalg.tensorinv linalg.tensorsolve
""")
"""Functions of which each result depends on all elements, by steps that no standard defines."""

ILL_CONDITIONED = ("cov", "corrcoef", "logspace", "geomspace", "polyfit")
"""Functions whose errors of rounding are large where numbers are."""

UNSORTED = (
    "searchsorted",
    "x.searchsorted",
    "interp",
    "digitize",
    "polyfit",
    "bincount",
    "unique_all",
    "unique_inverse",
)
"""Functions of points that have to be in order, or to differ, of numbers that are counted up to the greatest, and of
numbers of which several NaN are in any order.
"""

COPIED = (
    "apply_along_axis",
    "broadcast_to",
    "broadcast_arrays",
    "meshgrid",
    "diag",
    "diagonal",
    "x.diagonal",
    "linalg.diagonal",
    "ix_",
)
"""Functions whose results are no views, as the pages say, or share elements with themselves."""

BLAS = ("dot", "inner", "matmul", "matvec", "tensordot", "vdot", "vecdot", "vecmat", "x.dot")
"""Functions of which BLAS may leave out products with 0, also those of infinities."""

SIGNALS = ("fmax", "fmin")
"""Functions that do not select the number beside a signaling NaN, which NumPy's sort of float16 leaves."""

PROGRAM_CALLS = sorted(
    name
    for name in CALLS
    if name not in (*LEFT_OUT, *NOT_STABLE, *ILL_CONDITIONED, *UNSORTED, *SIGNALS, *BLAS)
    and not name.startswith(("fft", "linalg"))
)
"""The functions of random programs."""

REFUSED = (
    "has no arrays of",
    "does not compute with dtype",
    "has dtype bool; wanted integers",
    "wanted 3",
    "wanted a number, bool or time of",
    "has no sharded form",
)
"""What the errors say about dtypes that a backend lacks, bools as indices, and what the pages say that there is not."""

PERMITTED = (
    "array type float16 is unsupported in linalg",
    "Geometric sequence cannot include zero",
    "Integers to negative integer powers are not allowed.",
    "according to the rule 'safe'",  # of `putmask`
    "is read-only",  # of the imaginary parts of real numbers, and in `put_along_axis` of what is not contiguous
)
"""Errors of NumPy for dtypes that the library has, and about elements, which it does not read."""
