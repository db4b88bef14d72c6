"""NumPy's names that CuPy 14.2 has, too, grouped by the way in which they run; copied from the real package."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


HOST = _words("""
    bool_ byte cdouble common_type complex128 complex64 complexfloating csingle double dtype e euler_gamma finfo
    float16 float32 float64 floating generic half iinfo index_exp inexact inf int16 int32 int64 int8 int_ intc integer
    intp isdtype isscalar issubdtype iterable long longlong nan ndindex newaxis number pi promote_types s_ short
    signedinteger single typename ubyte uint uint16 uint32 uint64 uint8 uintc uintp ulong ulonglong unsignedinteger
    ushort broadcast_shapes base_repr binary_repr
""")
"""Constants, dtypes, and functions without arrays, which are NumPy's own."""

UFUNCS = _words("""
    absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_count bitwise_or bitwise_xor
    cbrt ceil conjugate copysign cos cosh deg2rad degrees divide divmod equal exp exp2 expm1 fabs float_power floor
    floor_divide fmax fmin fmod frexp gcd greater greater_equal heaviside hypot invert isfinite isinf isnan lcm ldexp
    left_shift less less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
    matmul maximum minimum mod modf multiply negative nextafter not_equal positive power rad2deg radians reciprocal
    remainder right_shift rint sign signbit sin sinh sqrt square subtract tan tanh true_divide trunc
""")

ALIASES = {
    "abs": "absolute",
    "acos": "arccos",
    "acosh": "arccosh",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "atan2": "arctan2",
    "atanh": "arctanh",
    "bitwise_invert": "invert",
    "bitwise_left_shift": "left_shift",
    "bitwise_not": "invert",
    "bitwise_right_shift": "right_shift",
    "concat": "concatenate",
    "conj": "conjugate",
    "pow": "power",
    "round_": "round",
}

GENERIC = _words("""
    all allclose amax amin angle any append argmax argmin argpartition argsort around array_equal array_equiv average
    choose clip column_stack concatenate convolve corrcoef correlate count_nonzero cov cross cumprod cumsum
    cumulative_prod cumulative_sum diag diagflat diff dot dstack ediff1d einsum fix gradient histogram hstack
    i0 inner interp isclose iscomplex isneginf isposinf isreal kron lexsort max mean median min
    nan_to_num nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar
    outer packbits pad partition percentile polyval prod ptp quantile ravel_multi_index
    repeat resize roll round select sinc sort sort_complex stack std sum take_along_axis tensordot
    tile trace trapezoid tril triu unpackbits unravel_index unwrap vander var vdot vstack
""")
"""Functions whose results have shapes that do not depend on values."""

VIEWS = _words("""
    array_split atleast_1d atleast_2d atleast_3d broadcast_arrays broadcast_to diagonal dsplit expand_dims flip fliplr
    flipud hsplit imag matrix_transpose moveaxis permute_dims ravel real reshape rollaxis rot90 split squeeze swapaxes
    transpose vsplit
""")
"""Functions that return views of their argument where NumPy's do."""

SYNCHRONOUS = _words("""
    argwhere bincount compress delete extract flatnonzero intersect1d nonzero setdiff1d setxor1d trim_zeros union1d
    unique unique_all unique_counts unique_inverse unique_values roots
""")
"""Functions whose results have shapes that depend on values, so that the host waits."""

IN_PLACE = _words("fill_diagonal place put put_along_axis putmask")

ATTRIBUTES = _words("iscomplexobj isfortran isrealobj may_share_memory ndim shape shares_memory size")
"""Functions that read properties of arrays, but no elements."""

LINALG = _words("""
    cholesky cond cross det eig eigh eigvals eigvalsh inv lstsq matmul matrix_power matrix_rank matrix_transpose norm
    pinv qr slogdet solve svd tensorinv tensorsolve
""")

FFT = _words("""
    fft fft2 fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftn
""")

FFT_CREATION = _words("fftfreq rfftfreq")
CREATION = _words("arange linspace logspace hamming hanning blackman bartlett kaiser identity eye tri indices")
"""Functions that create an array on the host and copy it."""

LACKS = {
    **dict.fromkeys(_words("amax amin max min nanmax nanmin nanprod nansum prod sum"), "initial where"),
    **dict.fromkeys(_words("nanstd nanvar std var"), "where mean correction"),
    **dict.fromkeys(_words("all any mean nanmean"), "where"),
    **dict.fromkeys(_words("argsort sort"), "order stable"),
    **dict.fromkeys(_words("argpartition partition"), "kind order"),
    **dict.fromkeys(_words("percentile quantile"), "weights"),
    **dict.fromkeys(_words("broadcast_arrays broadcast_to"), "subok"),
    **dict.fromkeys(_words("flip fliplr flipud rot90 cov"), "m"),
    **dict.fromkeys(_words("intersect1d union1d"), "ar1 ar2"),
    **dict.fromkeys([f"fft.{name}" for name in FFT if "shift" not in name], "out"),
    "clip": "min max",
    "corrcoef": "x",
    "count_nonzero": "keepdims",
    "ediff1d": "ary",
    "histogram": "a",
    "lexsort": "axis",
    "stack": "arrays",
    "take": "mode",
    "take_along_axis": "arr",
    "unpackbits": "count",
    "unravel_index": "shape",
    "reshape": "shape",
    "delete": "obj",
    "extract": "arr",
    "trim_zeros": "axis",
    "unique": "sorted",
    "linalg.cholesky": "upper",
    "linalg.matrix_power": "a",
    "linalg.matrix_rank": "A hermitian rtol",
    "linalg.pinv": "hermitian rtol",
    "linalg.svd": "hermitian",
}
"""The keywords of NumPy's functions that CuPy's lack."""
