"""Calls of every function, and what is known of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.numpy_calls import FFT, LINALG, MAIN, METHODS, words

Call = Callable[[Any], Any]

CALLS: dict[str, Call] = {
    **MAIN,
    **{f"linalg.{name}": call for name, call in LINALG.items()},
    **{f"fft.{name}": call for name, call in FFT.items()},
    **{f"x.{name}": call for name, call in METHODS.items()},
}
"""The calls of all functions by their names."""

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
    bincount isin intersect1d union1d setdiff1d setxor1d
"""))  # fmt: skip
"""The functions whose results are not rounded, or are by IEEE 754: they have NumPy's bits, but for those of NaN."""

ADDING = frozenset(words("""
    add average convolve corrcoef correlate cov cross cumprod cumsum cumulative_prod cumulative_sum diff dot ediff1d
    einsum geomspace gradient histogram histogram2d histogramdd histogram_bin_edges inner interp kron linspace
    logspace matmul matvec mean median nancumprod nancumsum nanmean nanmedian nanpercentile nanprod nanquantile nanstd
    nansum nanvar percentile poly polyadd polydiv polyfit polyint polymul polysub polyval prod quantile roots std sum
    tensordot trace trapezoid trim_zeros unwrap var vdot vecdot vecmat apply_over_axes ptp
"""))  # fmt: skip
"""The functions that add numbers: whether a sum of the greatest ones is infinite depends on the order of additions."""

EITHER_ZERO = words("""
    fmax fmin maximum minimum max min amax amin nanmax nanmin sort clip partition median select
""")
"""The functions that select one of equal elements: for 0 and -0 IEEE 754 does not say which, nor does NumPy."""

LEFT_OUT = words("""
    empty_like array2string array_repr array_str info datetime_as_string is_busday busday_count busday_offset
    frompyfunc nested_iters asmatrix bmat x.base x.ctypes x.data x.flat x.dumps x.dump x.byteswap x.resize x.tofile
    x.setfield x.setflags x.to_device x.view x.getfield from_dlpack linalg.eig linalg.eigvals linalg.eigh linalg.svd
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

SIGNALS = ("fmax", "fmin")
"""Functions that do not select the number beside a signaling NaN, which NumPy's sort of float16 leaves."""

PROGRAM_CALLS = sorted(
    name
    for name in CALLS
    if name not in (*LEFT_OUT, *NOT_STABLE, *ILL_CONDITIONED, *UNSORTED, *SIGNALS)
    and not name.startswith(("fft", "linalg"))
)
"""The functions of random programs."""

REFUSED = ("has no arrays of", "does not compute with dtype", "is of bool; wanted integers", "wanted 3")
"""What the errors say about dtypes that a backend lacks, and about bools as indices, and vectors of two numbers in `cross`."""

PERMITTED = (
    "array type float16 is unsupported in linalg",
    "Geometric sequence cannot include zero",
    "Integers to negative integer powers are not allowed.",
    "according to the rule 'safe'",  # of `putmask`
    "array is read-only",  # the imaginary parts of real numbers
    "assignment destination is read-only",  # of `put_along_axis` with an array that is not contiguous
)
"""Errors of NumPy for dtypes that the library has, and about elements, which it does not read."""
