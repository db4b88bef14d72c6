"""One call of each function of NumPy's main namespace, of `numpy.linalg` and `numpy.fft`, and of each method of an array,
with the operands of `Operands`. The tables of `docs/numpy_functions.md` are measured by these calls.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[Any], Any]


class Operands:
    """The operands of the calls, which are placed when they are first used.

    Args:
        place: returns an array as an operand.
        rows, columns: the shape of matrices; vectors have as many elements as a matrix has rows.
        side: the number of rows of square matrices; by default ``rows``, but at most 16.

    Attributes:
        used: the operands that were used, by their names.
    """

    def __init__(
        self, place: Callable[[Any], Any] = lambda x: x, rows: int = 384, columns: int = 6, side: int | None = None
    ) -> None:
        self.place = place
        self.used: dict[str, Any] = {}
        self._arrays = dict(_arrays(rows, columns, min(rows, 16) if side is None else side))

    def __getattr__(self, name: str) -> Any:
        if name not in self._arrays:
            raise AttributeError(name)
        if name not in self.used:
            self.used[name] = self.place(self._arrays[name].copy())
        return self.used[name]


@functools.cache
def _arrays(rows: int, columns: int, side: int) -> dict[str, Any]:
    """Returns the arrays of operands, of which calls that write need copies."""
    rng = np.random.default_rng(rows * 100 + columns)
    matrices = {name: rng.uniform(-2, 2, (rows, columns)) for name in "xyz"}
    square = rng.uniform(-1, 1, (side, side))
    signs = np.where(matrices["x"] > 1.5, np.nan, matrices["y"])
    return matrices | {
        "c": matrices["x"] + 1j * matrices["y"],
        "f": signs,  # some of them NaN
        "g": rng.uniform(-1, 1, rows) + 1j * rng.uniform(-1, 1, rows),
        "n": rng.integers(0, 9, (rows, columns)),
        "b": rng.integers(0, 2, (rows, columns)).astype(bool),
        "v": rng.uniform(-2, 2, rows),
        "w": rng.uniform(0.5, 2, rows),
        "s": np.sort(rng.uniform(-2, 2, rows)),
        "k": rng.integers(0, 6, rows),
        "m": rng.integers(0, 2, rows).astype(bool),
        "u": rng.integers(0, 255, rows).astype(np.uint8),
        "q": square @ square.T + 4 * np.eye(side),
        "r": square + 4 * np.eye(side),
        "t": rng.uniform(-1, 1, (rows, 3)),
    }


def _same(names: str, call: Callable[[Callable[..., Any], Any], Any], module: Any = np) -> dict[str, Call]:
    """Returns the same call of several functions of a module."""
    return {name: functools.partial(call, getattr(module, name)) for name in words(names) if hasattr(module, name)}


def words(text: str) -> list[str]:
    return text.split()


def _written(call: Callable[[Any], Any], name: str) -> Call:
    """Returns a call whose result is the operand that it writes to."""

    def made(o: Any) -> Any:
        call(o)
        return getattr(o, name)

    return made


def _filed(x: Any) -> Any:
    """Returns what `tofile` writes. NumPy's needs a file of the system."""
    with tempfile.TemporaryFile() as file:
        x.tofile(file)
        file.seek(0)
        return np.fromfile(file)


def _with_side_divided(x: Any) -> Any:
    """Returns a square matrix whose rows have a square number of elements as an array of three dimensions."""
    side = math.isqrt(len(x))
    return x.reshape(side, side, len(x))


def _printed(o: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        np.info(o.x)
    return text.getvalue()


def _filled(x: Any) -> Any:
    """Fills an array whose elements are undefined."""
    x[...] = 1
    return x


MAIN: dict[str, Call] = {
    **_same(
        "abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh cbrt ceil cos cosh "
        "deg2rad degrees exp exp2 expm1 fabs fix floor isfinite isinf isnan log log10 log1p log2 logical_not nan_to_num "
        "negative positive rad2deg radians reciprocal rint sign signbit sin sinc sinh spacing sqrt square tan tanh trunc "
        "isneginf isposinf isreal iscomplex i0 modf frexp around round copy ones_like zeros_like unwrap "
        "shape size ndim iscomplexobj isrealobj isfortran min_scalar_type common_type",
        lambda f, o: f(o.x),
    ),
    **_same("empty_like", lambda f, o: _filled(f(o.x))),
    **_same("angle conj conjugate imag real real_if_close sort_complex", lambda f, o: f(o.c)),
    **_same("bitwise_count bitwise_invert bitwise_not invert", lambda f, o: f(o.n)),
    **_same(
        "add arctan2 atan2 copysign divide divmod equal float_power floor_divide fmax fmin fmod greater greater_equal "
        "heaviside hypot less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum mod "
        "multiply nextafter not_equal pow power remainder subtract true_divide isclose allclose array_equal array_equiv "
        "broadcast_arrays result_type vecdot shares_memory may_share_memory",
        lambda f, o: f(o.x, o.y),
    ),
    **_same(
        "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm left_shift right_shift ldexp",
        lambda f, o: f(o.n, o.n),
    ),
    **_same(
        "all any amax amin argmax argmin count_nonzero cumprod cumsum max mean median min nanargmax nanargmin nancumprod "
        "nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar prod ptp std sum var average diff flip "
        "repeat sort argsort trapezoid cumulative_sum cumulative_prod apply_over_axes",
        lambda f, o: f(o.x, axis=0),
    ),
    **_same("percentile nanpercentile", lambda f, o: f(o.x, 30, axis=0)),
    **_same("quantile nanquantile", lambda f, o: f(o.x, 0.3, axis=0)),
    **_same("partition argpartition", lambda f, o: f(o.x, 3, axis=0)),
    **_same(
        "atleast_1d atleast_2d atleast_3d diag ravel transpose matrix_transpose tril triu fliplr flipud rot90 "
        "squeeze asarray_chkfinite trim_zeros gradient cov corrcoef trace diagonal",
        lambda f, o: f(o.x),
    ),
    **_same("unique unique_all unique_counts unique_inverse unique_values bincount", lambda f, o: f(o.k)),
    **_same("append hstack vstack concat concatenate stack column_stack dstack row_stack block", lambda f, o: f([o.x, o.y])),
    **_same("dot inner outer kron convolve correlate vdot", lambda f, o: f(o.v, o.w)),
    **_same("intersect1d union1d setdiff1d setxor1d isin", lambda f, o: f(o.k, o.n)),
    **_same("array_split split", lambda f, o: f(o.x, 2)),
    **_same("polyadd polysub", lambda f, o: f(o.v, o.w)),
    **_same("hsplit vsplit", lambda f, o: f(o.x, 2)),
    **_same("diag_indices_from tril_indices_from triu_indices_from", lambda f, o: f(o.q)),
    **_same(
        "array asanyarray asarray ascontiguousarray asfortranarray asmatrix require iterable isscalar",
        lambda f, o: f(o.x),
    ),
    **_same("array2string array_repr array_str", lambda f, o: f(o.x)),
    **_same("nonzero argwhere flatnonzero", lambda f, o: f(o.b)),
    **_same("roots poly ediff1d diagflat", lambda f, o: f(o.v)),
    **_same("tile resize", lambda f, o: f(o.x, (2, 3))),
    **_same("savetxt", lambda f, o: f(io.StringIO(), o.x)),
    **_same("save savez savez_compressed", lambda f, o: f(io.BytesIO(), o.x)),
    **_same("datetime_as_string isnat", lambda f, o: f(o.n.astype("datetime64[D]"))),
    **_same("is_busday", lambda f, o: f(o.n.astype("datetime64[D]"))),
    "busday_count": lambda o: np.busday_count(o.n.astype("datetime64[D]"), np.datetime64("2020-01-01")),
    "busday_offset": lambda o: np.busday_offset(o.n.astype("datetime64[D]"), 1, "forward"),
    "append": lambda o: np.append(o.x, o.y, axis=0),
    "apply_along_axis": lambda o: np.apply_along_axis(lambda line: line * 2, 0, o.x),
    "apply_over_axes": lambda o: np.apply_over_axes(np.sum, o.x, [0, 1]),
    "array_split": lambda o: np.array_split(o.x, 5),
    "astype": lambda o: np.astype(o.x, np.float32),
    "bmat": lambda o: np.bmat([[o.x, o.y]]),
    "block": lambda o: np.block([[o.x, o.y], [o.y, o.x]]),
    "broadcast_to": lambda o: np.broadcast_to(o.x, (3, *o.x.shape)),
    "can_cast": lambda o: np.can_cast(o.x, np.float32),
    "choose": lambda o: np.choose(o.k, [o.v, o.w, o.s, o.v, o.w, o.s]),
    "clip": lambda o: np.clip(o.x, -1, 1),
    "compress": lambda o: np.compress(o.m, o.x, axis=0),
    "copyto": _written(lambda o: np.copyto(o.x, o.y), "x"),
    "corrcoef": lambda o: np.corrcoef(o.x, rowvar=False),
    "cov": lambda o: np.cov(o.x, rowvar=False),
    "cross": lambda o: np.cross(o.t, o.t[::-1]),
    "delete": lambda o: np.delete(o.x, 3, axis=0),
    "digitize": lambda o: np.digitize(o.x, [-1, 0, 1]),
    "dsplit": lambda o: np.dsplit(o.x[None], 2),
    "einsum": lambda o: np.einsum("ij,ij->j", o.x, o.y),
    "einsum_path": lambda o: np.einsum_path("ij,ij->j", o.x, o.y),
    "expand_dims": lambda o: np.expand_dims(o.x, 0),
    "extract": lambda o: np.extract(o.b, o.x),
    "fill_diagonal": _written(lambda o: np.fill_diagonal(o.x, 7), "x"),
    "frompyfunc": lambda o: np.frompyfunc(abs, 1, 1)(o.x),
    "from_dlpack": lambda o: np.from_dlpack(o.x),
    "full_like": lambda o: np.full_like(o.x, 7),
    "geomspace": lambda o: np.geomspace(o.w, o.w + 1, 4),
    "histogram": lambda o: np.histogram(o.x, 5),
    "histogram2d": lambda o: np.histogram2d(o.v, o.w, 5),
    "histogram_bin_edges": lambda o: np.histogram_bin_edges(o.x, 5),
    "histogramdd": lambda o: np.histogramdd(o.t, 3),
    "info": _printed,
    "insert": lambda o: np.insert(o.x, 3, 7, axis=0),
    "interp": lambda o: np.interp(o.x, o.s, o.v),
    "ix_": lambda o: np.ix_(o.k, o.k),
    "lexsort": lambda o: np.lexsort((o.v, o.k)),
    "linspace": lambda o: np.linspace(o.v, o.w, 4),
    "logspace": lambda o: np.logspace(o.v, o.w, 4),
    "matmul": lambda o: np.matmul(o.x.T, o.y),
    "matvec": lambda o: np.matvec(o.x.T, o.v),
    "meshgrid": lambda o: np.meshgrid(o.v, o.w),
    "moveaxis": lambda o: np.moveaxis(o.x, 0, 1),
    "nested_iters": lambda o: np.nested_iters(o.x, [[0], [1]]),
    "pad": lambda o: np.pad(o.x, 1),
    "permute_dims": lambda o: np.permute_dims(o.x, (1, 0)),
    "piecewise": lambda o: np.piecewise(o.x, [o.x < 0], [lambda v: -v, 1]),
    "place": _written(lambda o: np.place(o.x, o.b, [1, 2]), "x"),
    "polyder": lambda o: np.polyder(o.v),
    "polydiv": lambda o: np.polydiv(o.v, [1.0, 2.0]),
    "polyfit": lambda o: np.polyfit(o.v, o.w, 2),
    "polyint": lambda o: np.polyint(o.v),
    "polymul": lambda o: np.polymul(o.v, [1.0, 2.0]),
    "polyval": lambda o: np.polyval([1.0, 2.0, 3.0], o.x),
    "put": _written(lambda o: np.put(o.x, [1, 2], [7, 8]), "x"),
    "put_along_axis": _written(lambda o: np.put_along_axis(o.x, np.zeros((1, 1), int), 7, axis=0), "x"),
    "putmask": _written(lambda o: np.putmask(o.x, o.b, [1, 2]), "x"),
    "ravel_multi_index": lambda o: np.ravel_multi_index((o.k, o.k), (6, 6)),
    "repeat": lambda o: np.repeat(o.x, 2, axis=0),
    "reshape": lambda o: np.reshape(o.x, (-1,)),
    "roll": lambda o: np.roll(o.x, 1, axis=0),
    "rollaxis": lambda o: np.rollaxis(o.x, 1),
    "searchsorted": lambda o: np.searchsorted(o.s, o.x),
    "select": lambda o: np.select([o.x < 0, o.y < 0], [o.x, o.y]),
    "swapaxes": lambda o: np.swapaxes(o.x, 0, 1),
    "take": lambda o: np.take(o.x, [1, 0], axis=0),
    "take_along_axis": lambda o: np.take_along_axis(o.x, np.zeros((1, 6), int), axis=0),
    "tensordot": lambda o: np.tensordot(o.x, o.y, axes=([0], [0])),
    "unpackbits": lambda o: np.unpackbits(o.u),
    "packbits": lambda o: np.packbits(o.m),
    "unravel_index": lambda o: np.unravel_index(o.k, (2, 3)),
    "unstack": lambda o: np.unstack(o.x, axis=1),
    "vander": lambda o: np.vander(o.v, 4),
    "vecmat": lambda o: np.vecmat(o.v, o.x),
    "where": lambda o: np.where(o.b, o.x, o.y),
}  # fmt: skip

NO_ARRAYS = frozenset(words(
    "arange bartlett base_repr binary_repr blackman broadcast_shapes datetime_data diag_indices empty eye "
    "format_float_positional format_float_scientific frombuffer fromfile fromfunction fromiter fromregex fromstring full "
    "genfromtxt get_include get_printoptions getbufsize geterr geterrcall hamming hanning identity indices "
    "isdtype issubdtype kaiser load loadtxt mask_indices mintypecode ones printoptions promote_types set_printoptions "
    "setbufsize seterr seterrcall show_config show_runtime test tri tril_indices triu_indices typename zeros fftfreq "
    "rfftfreq"
))  # fmt: skip
"""The functions that take no arrays."""

LINALG: dict[str, Call] = {
    **_same(
        "cholesky eigvalsh eigh det inv pinv slogdet svd svdvals qr cond matrix_rank trace diagonal matrix_transpose "
        "matrix_norm norm vector_norm eig eigvals",
        lambda f, o: f(o.q),
        np.linalg,
    ),
    **_same("matmul", lambda f, o: f(o.q, o.r), np.linalg),
    "cross": lambda o: np.linalg.cross(o.t, o.t[::-1]),
    "lstsq": lambda o: np.linalg.lstsq(o.x, o.v),
    "matrix_power": lambda o: np.linalg.matrix_power(o.q, 3),
    "multi_dot": lambda o: np.linalg.multi_dot([o.q, o.r, o.q]),
    "outer": lambda o: np.linalg.outer(o.v, o.w),
    "solve": lambda o: np.linalg.solve(o.q, o.r),
    "tensordot": lambda o: np.linalg.tensordot(o.x, o.y, axes=([0], [0])),
    "tensorinv": lambda o: np.linalg.tensorinv(_with_side_divided(o.q)),
    "tensorsolve": lambda o: np.linalg.tensorsolve(
        x := _with_side_divided(o.q), o.v[: x.shape[2]].reshape(x.shape[:2])
    ),
    "vecdot": lambda o: np.linalg.vecdot(o.x, o.y),
}

FFT: dict[str, Call] = {
    **_same("fft ifft rfft irfft hfft ihfft", lambda f, o: f(o.x, axis=0), np.fft),
    **_same("fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn fftshift ifftshift", lambda f, o: f(o.x), np.fft),
}

METHODS: dict[str, Call] = {
    **{
        name: lambda o, name=name: getattr(o.x, name)
        for name in words(
            "T base ctypes data device dtype flags flat imag itemsize mT nbytes ndim real shape size strides"
        )
    },
    **{
        name: lambda o, name=name: getattr(o.x, name)()
        for name in words(
            "all any argmax argmin conj conjugate copy cumprod cumsum diagonal dumps flatten max mean min nonzero prod "
            "ravel round squeeze std sum tobytes tolist trace transpose var argsort byteswap"
        )
    },
    "argpartition": lambda o: o.x.argpartition(3, axis=0),
    "astype": lambda o: o.x.astype(np.float32),
    "choose": lambda o: o.k.choose([o.v, o.w, o.s, o.v, o.w, o.s]),
    "clip": lambda o: o.x.clip(-1, 1),
    "compress": lambda o: o.x.compress([True, False, True], axis=0),
    "dot": lambda o: o.x.T.dot(o.y),
    "dump": lambda o: o.x.dump(io.BytesIO()),
    "fill": _written(lambda o: o.x.fill(7), "x"),
    "getfield": lambda o: o.x.getfield(np.float64),
    "item": lambda o: o.x.item(5),
    "partition": _written(lambda o: o.x.partition(3, axis=0), "x"),
    "put": _written(lambda o: o.x.put([1, 2], [7, 8]), "x"),
    "repeat": lambda o: o.x.repeat(2, axis=0),
    "reshape": lambda o: o.x.reshape(-1),
    "resize": lambda o: o.x.resize((2, 2), refcheck=False),
    "searchsorted": lambda o: o.s.searchsorted(o.x),
    "setfield": _written(lambda o: o.x.setfield(1.0, np.float64), "x"),
    "setflags": lambda o: o.x.setflags(write=True),
    "sort": _written(lambda o: o.x.sort(axis=0), "x"),
    "swapaxes": lambda o: o.x.swapaxes(0, 1),
    "take": lambda o: o.x.take([1, 0], axis=0),
    "to_device": lambda o: o.x.to_device(o.x.device),
    "tofile": lambda o: _filed(o.x),
    "view": lambda o: o.x.view(np.int64),
}


def functions_of(module: Any) -> list[str]:
    """Returns the names of ``module.__all__`` that are functions, in alphabetic order."""
    found = [name for name in module.__all__ if callable(getattr(module, name))]
    return sorted(name for name in found if not isinstance(getattr(module, name), type))


MODULES: dict[str, tuple[Any, dict[str, Call]]] = {
    "numpy": (np, MAIN), "numpy.linalg": (np.linalg, LINALG), "numpy.fft": (np.fft, FFT),
}  # fmt: skip
