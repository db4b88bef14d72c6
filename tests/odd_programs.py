"""Every function, and random programs of all functions, with odd values, dtypes and views: NumPy's results on every way.

A case is drawn by its number, without the bookkeeping of hypothesis, so that very many run. Thresholds are changed
before the library is imported, therefore each setting has a process of its own:
``python -m tests.odd_programs calls low numpy 0 5`` runs each function of the tables five times with all thresholds low,
and ``python -m tests.odd_programs programs 17 numpy,checked 0 1000`` a thousand programs with thresholds drawn by 17.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests import thresholds

if __name__ == "__main__":
    thresholds.lower(thresholds.drawn(sys.argv[2]))

import shardtensor as st
from tests import conftest  # noqa: F401 - installs the simulated CuPy
from tests.layouts import mesh_of
from tests.numpy_calls import FFT, LINALG, MAIN, METHODS, Operands
from tests.numpy_table import leaves

if TYPE_CHECKING:
    Call = Callable[[Any], Any]

CALLS: dict[str, Call] = {
    **MAIN,
    **{f"linalg.{name}": call for name, call in LINALG.items()},
    **{f"fft.{name}": call for name, call in FFT.items()},
    **{f"x.{name}": call for name, call in METHODS.items()},
}
"""The calls of all functions by their names."""

EXACT = frozenset(
    """
    abs absolute ceil copysign fabs fix floor isfinite isinf isnan logical_not negative positive rint sign signbit
    spacing square trunc isneginf isposinf isreal iscomplex frexp modf copy ones_like zeros_like conj conjugate imag real
    divide equal floor_divide fmax fmin fmod greater greater_equal heaviside less less_equal logical_and logical_or
    logical_xor maximum minimum mod multiply nextafter not_equal remainder subtract true_divide add divmod isclose allclose
    array_equal array_equiv broadcast_arrays all any amax amin argmax argmin count_nonzero max min nanargmax nanargmin
    nanmax nanmin flip repeat sort atleast_1d atleast_2d atleast_3d diag ravel transpose matrix_transpose tril triu fliplr
    flipud rot90 squeeze asarray_chkfinite diagonal append hstack vstack concat concatenate stack column_stack dstack
    row_stack block array_split split hsplit vsplit array asanyarray asarray ascontiguousarray asfortranarray require
    nonzero argwhere flatnonzero diagflat tile resize astype broadcast_to choose clip compress copyto delete dsplit
    expand_dims extract fill_diagonal full_like insert lexsort meshgrid moveaxis nan_to_num pad permute_dims piecewise place
    put put_along_axis putmask reshape roll rollaxis searchsorted select swapaxes take take_along_axis unstack where ldexp
    flatten fill item T mT tolist view trim_zeros digitize bincount isin intersect1d union1d setdiff1d setxor1d
""".split()
)
"""The functions whose results are not rounded, or are by IEEE 754: they have NumPy's bits, but for those of NaN."""

EITHER_ZERO = "fmax fmin maximum minimum max min amax amin nanmax nanmin sort clip partition median select".split()
"""The functions that select one of equal elements: for 0 and -0 IEEE 754 does not say which, nor does NumPy."""

LEFT_OUT = """
    empty_like array2string array_repr array_str info
    datetime_as_string is_busday busday_count busday_offset frompyfunc nested_iters asmatrix bmat
    x.base x.ctypes x.data x.flat x.dumps x.dump x.byteswap x.resize x.tofile x.setfield x.setflags x.to_device
    x.view x.getfield from_dlpack linalg.eig linalg.eigvals linalg.eigh linalg.svd linalg.qr
""".split()
"""Calls whose results are not defined, are no numbers, or differ as the pages say: `docs/numpy_functions.md` lists what is
refused, the eigenvalues of general matrices are complex numbers in the array API, and the signs of vectors are free.
"""

REFUSED = ("has no arrays of", "does not compute with dtype")
"""What the errors about dtypes say that a backend lacks."""

ILL_CONDITIONED = ("cov", "corrcoef", "logspace", "geomspace")
"""Functions whose errors of rounding are large where numbers are."""

PERMITTED = (
    "array type float16 is unsupported in linalg",
    "Geometric sequence cannot include zero",
    "Integers to negative integer powers are not allowed.",
)
"""Errors of NumPy for dtypes that the library has, and about elements, which it does not read."""

NOT_STABLE = ("argsort", "argpartition", "partition", "unique_values", "x.argsort", "x.argpartition", "x.partition")
"""Calls whose results NumPy defines up to an order."""

FLOATS = ("f8", "f4", "f2")
DTYPES = (*FLOATS, *FLOATS, "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "c8", "c16")
SPECIALS = ("plain", "odd", "extreme")
LAYOUTS = ("whole", "slice", "slice of a slice", "reversed", "transposed", "steps")
MODES = ("eager", "log", "jit", "jit")
MESHES = ((1,), (2,), (3,), (8,), (2, 2), (4, 2))


class Drawn(Operands):
    """The operands of a call, with drawn dtypes and values. Numbers that add up exactly are multiples of a quarter.

    Args:
        seed: all else is drawn by it.
        place: returns an array as an operand.
        special: which values are among the elements.
    """

    def __init__(self, seed: int, place: Callable[[Any], Any], special: str) -> None:
        draw = random.Random(seed)
        super().__init__(place, draw.choice([3, 5, 8, 16]), draw.choice([2, 3, 6]))
        dtype, integer = draw.choice(DTYPES), draw.choice("? i1 u1 i2 u2 i4 u4 i8 u8".split())
        rng = np.random.default_rng(seed)
        with np.errstate(invalid="ignore"):
            for name in "xyzvwsft":
                self._arrays[name] = made(np.round(self._arrays[name] * 4) / 4, dtype, special, rng)
            for name in "cg":
                self._arrays[name] = made(
                    np.round(self._arrays[name] * 4) / 4, draw.choice(["c8", "c16"]), special, rng
                )
        self._arrays["n"] = made(self._arrays["n"], integer, special, rng)
        self._arrays["k"] = self._arrays["k"].astype(integer.replace("?", "i8"))
        self._arrays["s"] = np.sort(np.nan_to_num(self._arrays["s"]))  # The points of `interp` are numbers.
        for name in "qr":
            self._arrays[name] = self._arrays[name].astype(draw.choice(FLOATS[:2]))


def made(x: np.ndarray, dtype: str, special: str, rng: np.random.Generator) -> np.ndarray:
    """Returns an array of that dtype, with some special values."""
    kind = np.dtype(dtype).kind
    x = (abs(x) if kind == "u" else x.real if kind != "c" else x).astype(dtype)
    if special != "plain" and kind != "b":
        where = rng.random(x.shape) < rng.choice([0.2, 0.6])
        values = odd(dtype) if special == "odd" else extreme(dtype)
        x[where] = rng.choice(np.asarray(values, dtype), int(where.sum()))
    return x


def odd(dtype: str) -> list[Any]:
    """Returns numbers that are not finite, and zeros; of integers the least and the greatest."""
    if np.dtype(dtype).kind in "iu":
        return extreme(dtype)
    signs = [np.inf, -np.inf, np.nan, -0.0, 0.0]
    return signs if np.dtype(dtype).kind == "f" else [complex(a, b) for a in signs for b in signs]


def extreme(dtype: str) -> list[Any]:
    """Returns the greatest and least numbers of a dtype."""
    if np.dtype(dtype).kind in "iu":
        return [np.iinfo(dtype).min, np.iinfo(dtype).max]
    limits = np.finfo(dtype)
    return [limits.max, limits.min, limits.tiny, -limits.smallest_subnormal, limits.max / 2]


def place(x: np.ndarray, layout: str, sharding: Any) -> st.ShardedTensor:
    """Places an array as a view of a larger one, or of one with other strides."""

    def put(a: np.ndarray) -> st.ShardedTensor:
        spec = sharding.spec if len(sharding.spec) <= a.ndim else st.P(*sharding.spec[: a.ndim])
        return st.device_put(a, st.NamedSharding(sharding.mesh, spec))

    if not x.ndim or layout == "whole":
        return put(x)
    wide = [(1, 2)] * x.ndim
    match layout:
        case "slice":
            return put(np.pad(x, wide))[(slice(1, -2),) * x.ndim]
        case "slice of a slice":
            return put(np.pad(x, wide))[(slice(1, None),) * x.ndim][(slice(None, -2),) * x.ndim]
        case "reversed":
            return put(x[::-1])[::-1]
        case "transposed":
            return put(x.T).T
    return put(np.repeat(x, 2, axis=-1))[..., ::2]


class Differs(AssertionError):
    """A result is not NumPy's."""


ERRORS = (ArithmeticError, AttributeError, IndexError, TypeError, ValueError)


def outcome(call: Call, operands: Any) -> Any:
    """Returns the results of a call, or its error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return leaves(call(operands))
        except ERRORS as error:
            return error


def compare(found: Any, wanted: Any, exact: bool, scale: float, either_zero: bool = False) -> None:
    """Compares a result with NumPy's: to the bit, or up to errors of rounding of numbers up to a scale."""
    if not isinstance(found, st.ShardedTensor | np.ndarray | np.generic):
        return
    found, wanted = np.asarray(found), np.asarray(wanted)
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise Differs(f"{found.shape} {found.dtype} instead of {wanted.shape} {wanted.dtype}")
    if found.dtype.kind not in "fc":
        if not np.array_equal(found, wanted):
            raise different(found, wanted)
        return
    if exact:
        either_zero |= found.dtype.kind == "c"  # Whether a product adds 0 to a part or takes it away is not defined.
        same = (found == wanted) & ((np.signbit(found.real) == np.signbit(wanted.real)) | either_zero)
        if not (same | (np.isnan(found) & np.isnan(wanted))).all():
            raise different(found, wanted)
        return
    eps = float(np.finfo(found.dtype).eps)
    if found.dtype.kind == "c":  # C leaves it open which part of a product with infinity is NaN.
        found, wanted = [np.where(np.isfinite(x), x, np.nan) for x in (found, wanted)]
    with np.errstate(all="ignore"):
        if not np.allclose(found, wanted, rtol=64 * eps, atol=64 * eps * scale, equal_nan=True):
            raise different(found, wanted)


def different(found: np.ndarray, wanted: np.ndarray) -> Differs:
    """Returns an error that shows the elements that differ."""
    where = ~(
        (found == wanted) & (np.signbit(found.real) == np.signbit(wanted.real)) | (found != found) & (wanted != wanted)
    )
    rows = [f"{i}: {a} instead of {b}" for i, a, b in zip(np.argwhere(where).tolist(), found[where], wanted[where])]
    return Differs(f"{found.shape} {found.dtype}, {len(rows)} elements: {'; '.join(rows[:4])}")


class Case:
    """A call with drawn operands, layout and way.

    Attributes:
        name: the name of the call.
        seed: all else is drawn by it.
        backend: the backend of the devices.
    """

    def __init__(self, name: str, seed: int, backend: str) -> None:
        self.name, self.seed, self.backend = name, seed, backend
        draw = random.Random(f"{name} {seed}")
        self.special = draw.choice(SPECIALS)
        if name.startswith(("fft", "linalg")) or name in ILL_CONDITIONED:
            self.special = "plain"
        if self.special == "extreme" and name.rpartition(".")[2] in ADDING:
            self.special = "odd"
        self.layout, self.mode, self.executor = (
            draw.choice(LAYOUTS),
            draw.choice(MODES),
            draw.choice(["numpy", "numpy", None]),
        )
        mesh = mesh_of(draw.choice(MESHES), backend)
        names = draw.sample([*mesh.axis_names, None], 2) if len(mesh.axis_names) > 1 else ["x", None]
        draw.shuffle(names)
        self.sharding = st.NamedSharding(mesh, st.P(*names))

    def __str__(self) -> str:
        return f"{self.name} {self.seed} on {self.backend}: {self.special}, {self.layout}, {self.mode}, {self.sharding}"

    def check(self) -> None:
        """Compares the results, and the operands after the call, with NumPy's."""
        call = CALLS[self.name]
        plain = Drawn(self.seed, np.copy, self.special)
        wanted = outcome(call, plain)
        mine = Drawn(self.seed, lambda x: place(x, self.layout, self.sharding), self.special)
        if self.mode == "jit":
            call = self._traced(call, list(plain.used))
        found = outcome(call, mine) if self.mode != "log" else self._logged(call, mine)
        self._same(found, wanted, plain, mine)

    def _traced(self, call: Call, names: list[str]) -> Call:
        traced = st.jit(
            lambda *xs: call(types.SimpleNamespace(**dict(zip(names, xs, strict=True)))), executor=self.executor
        )
        return lambda operands: traced(*[getattr(operands, name) for name in names])

    def _logged(self, call: Call, mine: Any) -> Any:
        with st.transfers():
            return outcome(call, mine)

    def _same(self, found: Any, wanted: Any, plain: Any, mine: Any) -> None:
        if isinstance(found, Exception) or isinstance(wanted, Exception):
            check_errors(found, wanted)
            return
        exact = self.name.rpartition(".")[2] in EXACT
        is_half = any(x.dtype == np.float16 for x in plain.used.values())
        scale = max(
            [
                1.0,
                *[
                    float(np.nanmax(np.abs(np.where(np.isfinite(x), x, 0)), initial=0))
                    for x in plain.used.values()
                    if x.dtype.kind in "iufc"
                ],
            ]
        )
        if len(found) != len(wanted):
            raise Differs(f"{len(found)} results instead of {len(wanted)}")
        for x, y in zip(found, wanted, strict=True):
            if self.name in NOT_STABLE and isinstance(x, st.ShardedTensor):
                x, y = self._in_order(x, plain), self._in_order(y, plain)
            # NumPy rounds factors of the transforms of float16, whose results are of complex64.
            compare(
                x,
                y,
                exact,
                scale * 2**13 * (is_half and self.name.startswith("fft")) or scale,
                self.name.rpartition(".")[2] in EITHER_ZERO,
            )
        for name, y in plain.used.items():
            if self.name != "x.partition":
                compare(mine.used[name], y, exact=True, scale=scale)

    def _in_order(self, x: Any, plain: Any) -> np.ndarray:
        """Returns what of a result NumPy defines: the elements that are selected, in order."""
        x = np.asarray(x)
        axis = -1 if self.name == "x.argsort" else 0
        elements = np.take_along_axis(plain.used["x"], x, axis) if "arg" in self.name else x
        return np.sort(elements, axis=axis)


def check_errors(found: Any, wanted: Any) -> None:
    """Compares the outcomes of a call of which at least one is an error."""
    if not isinstance(found, Exception):
        if str(wanted) not in PERMITTED:
            raise Differs(f"a result instead of {wanted!r}")
    elif not isinstance(wanted, Exception):
        refuses = isinstance(found, st.ConcretizationError) or any(words in str(found) for words in REFUSED)
        if not refuses:
            raise Differs(f"{found!r} instead of {[getattr(y, 'dtype', y) for y in wanted]}")


ADDING = frozenset(
    """
    add average convolve corrcoef correlate cov cross cumprod cumsum cumulative_prod cumulative_sum diff dot ediff1d einsum
    geomspace gradient histogram histogram2d histogramdd histogram_bin_edges inner interp kron linspace logspace matmul
    matvec mean median nancumprod nancumsum nanmean nanmedian nanpercentile nanprod nanquantile nanstd nansum nanvar
    percentile poly polyadd polydiv polyfit polyint polymul polysub polyval prod quantile roots std sum tensordot
    trace trapezoid trim_zeros unwrap var vdot vecdot vecmat apply_over_axes ptp
""".split()
)
"""The functions that add numbers: whether a sum of the greatest ones is infinite depends on the order of additions."""


VIEWS: dict[str, Call] = {
    "x[1:]": lambda x: x[1:],
    "x[:-1]": lambda x: x[:-1],
    "x[::2]": lambda x: x[::2],
    "x[::-1]": lambda x: x[::-1],
    "x[..., ::-1]": lambda x: x[..., ::-1],
    "x[..., 1:]": lambda x: x[..., 1:],
    "x[0]": lambda x: x[0],
    "x[None, 0]": lambda x: x[None, 0],
    "x.T": lambda x: x.T,
    "x.reshape(-1)": lambda x: x.reshape(-1),
    "x.ravel()": lambda x: x.ravel(),
    "x.flatten()": lambda x: x.flatten(),
    "x.reshape(-1, 1)": lambda x: x.reshape(-1, 1),
    "x.copy()": lambda x: x.copy(),
    "x.real": lambda x: x.real,
    "x[[0, -1, 0]]": lambda x: x[[0, -1, 0]],
    "x[x > 0]": lambda x: x[x.real > 0],
    "np.flip(x, 0)": lambda x: np.flip(x, 0),
    "np.array(x)": lambda x: np.array(x, copy=True),
    "np.asarray(x)": lambda x: np.asanyarray(x) if isinstance(x, np.ndarray) else x,
    "np.swapaxes(x, 0, -1)": lambda x: np.swapaxes(x, 0, -1),
    "np.atleast_2d(x)": np.atleast_2d,
}
"""Statements that make views, and copies beside them."""

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "x[...] = y": lambda x, y: x.__setitem__(..., y),
    "x[1:] = y[:-1]": lambda x, y: x.__setitem__(slice(1, None), y[:-1]),
    "x[::-1] = y": lambda x, y: x.__setitem__(slice(None, None, -1), y),
    "x[::2] = 1": lambda x, y: x.__setitem__(slice(None, None, 2), 1),
    "x[..., -1] = 0": lambda x, y: x.__setitem__((..., -1), 0),
    "x[[0, -1]] = 2": lambda x, y: x.__setitem__([0, -1], 2),
    "x[x > 0] = 1": lambda x, y: x.__setitem__(x.real > 0, 1),
    "x.flat[::2] = 1": lambda x, y: x.flat.__setitem__(slice(None, None, 2), 1),
    "x += y": lambda x, y: x.__iadd__(y),
    "x -= x[::-1]": lambda x, y: np.subtract(x, x[::-1], out=x),
    "x.T += 1": lambda x, y: np.add(x.T, 1, out=x.T),
    "x.sort(0)": lambda x, y: x.sort(axis=0),
    "x[::-1].sort(0)": lambda x, y: x[::-1].sort(axis=0),
    "x.fill(3)": lambda x, y: x.fill(3),
    "np.copyto(x.T, y.T)": lambda x, y: np.copyto(x.T, y.T),
    "np.fill_diagonal(x, 1)": lambda x, y: np.fill_diagonal(x, 1),
    "np.fill_diagonal(x.T, 2)": lambda x, y: np.fill_diagonal(x.T, 2),
    "np.put(x, [0, 1], [2, 3])": lambda x, y: np.put(x, [0, 1], [2, 3]),
    "np.place(x, x > 0, [1, 2])": lambda x, y: np.place(x, x.real > 0, [1, 2]),
    "np.putmask(x, x > 0, y)": lambda x, y: np.putmask(x, x.real > 0, y),
    "np.put_along_axis(x, 0, 1)": lambda x, y: np.put_along_axis(x, np.zeros((1,) * x.ndim, int), 1, 0),
    "np.put_along_axis(x.T, [0], 1)": lambda x, y: np.put_along_axis(x.T, np.array([0, 1]), 1, None),
    "np.add.at(x, [0, 0], 1)": lambda x, y: np.add.at(x, [0, 0], 1),
    "np.negative(x, out=x)": lambda x, y: np.negative(x, out=x),
    "np.cumsum(x, 0, out=x)": lambda x, y: np.cumsum(x, axis=0, out=x),
    "np.clip(x, 0, 1, out=x)": lambda x, y: np.clip(x, 0, 1, out=x),
}
"""Statements that write. A float that is no number does not become an integer: C leaves the value open."""

COPIED = ("broadcast_to", "broadcast_arrays", "meshgrid", "diagonal", "x.diagonal", "linalg.diagonal", "ix_")
"""Functions whose results are no views, as the pages say, or share elements with themselves."""

MOST = 200
"""The most elements of a value."""


class Pool:
    """The values of a program as operands of a call: which value is which operand is drawn, or known from before."""

    def __init__(self, values: list[Any], draw: random.Random, chosen: dict[str, int]) -> None:
        self.values, self.draw, self.chosen = values, draw, chosen

    def __getattr__(self, name: str) -> Any:
        if name not in self.chosen:
            wanted = 2 if name in "xyzcfnbqrt" else 1
            fitting = [k for k, x in enumerate(self.values) if x.ndim == wanted]
            self.chosen[name] = self.draw.choice(fitting or range(len(self.values)))
        return self.values[self.chosen[name]]


def tamed(x: Any) -> Any:
    """Returns small integers in place of numbers that may have errors of rounding, and of those that are not finite."""
    rounded = np.round(x)
    return np.where(np.abs(rounded) < 100, rounded, 1)


def is_tame(x: np.ndarray) -> bool:
    """Whether sums of products of these numbers are exact, or not finite."""
    if x.dtype.kind not in "fc":
        return True
    parts = np.stack([x.real, x.imag]).astype(float)
    parts = parts[np.isfinite(parts)]
    return bool((parts * 4 == np.round(parts * 4)).all() and (abs(parts) <= 64).all())


Statement = tuple[str, str, dict[str, int], bool]
"""A kind, a name, the numbers of the values that are used, and whether the results are tamed."""


class Program:
    """Statements on values in NumPy and in the library, one after the other; then the same statements under jit.

    Attributes:
        seed: all else is drawn by it.
        backend: the backend of the devices.
        statements: those that have run without an error.
    """

    def __init__(self, seed: int, backend: str) -> None:
        self.seed, self.backend, self.draw = seed, backend, random.Random(f"{seed} program")
        self.statements: list[Statement] = []
        draw, rng = self.draw, np.random.default_rng(seed)
        mesh = mesh_of(draw.choice(MESHES), backend)
        dtypes = [draw.choice(DTYPES) for _ in range(3)]
        if backend == "torch":
            dtypes = [dtype for dtype in dtypes if dtype not in ("u2", "u4", "u8")] + ["f8"]
        special = draw.choice(SPECIALS[:2])
        rows, columns = draw.choice([3, 4, 7]), draw.choice([1, 2, 5])
        shapes = [(rows, columns), draw.choice([(rows, columns), (columns, rows)]), (draw.choice([rows, columns]),)]
        self.given = [
            made(np.round(rng.uniform(-2, 2, shape) * 4) / 4, draw.choice(dtypes), special, rng) for shape in shapes
        ]
        axes = [*mesh.axis_names, None]
        self.layouts = [(draw.choice(LAYOUTS), st.NamedSharding(mesh, st.P(*draw.sample(axes, 2)))) for _ in shapes]
        self.executor = draw.choice(["numpy"] * 30 + [None])

    def __str__(self) -> str:
        return f"program {self.seed} on {self.backend}, {self.layouts}, {[x.dtype.str for x in self.given]}, {self.statements}"

    def placed(self) -> list[Any]:
        return [place(x, *how) for x, how in zip(self.given, self.layouts, strict=True)]

    def check(self, length: int = 8, jit: bool = True) -> None:
        """Compares all values with NumPy's after every statement, and after all of them under jit."""
        plain, mine = [x.copy() for x in self.given], self.placed()
        with contextlib.ExitStack() as stack:
            if self.seed % 4 == 0:
                stack.enter_context(st.transfers())
            for _ in range(length):
                self._step(plain, mine)
        if jit and self.statements:
            self._check_jit(plain)

    def _step(self, plain: list[Any], mine: list[Any]) -> None:
        kind = self.draw.choice(["call", "call", "view", "view", "write"])
        name = self.draw.choice(sorted({"call": PROGRAM_CALLS, "view": VIEWS, "write": WRITES}[kind]))
        chosen = {} if kind == "call" else {"x": self._one(plain), "y": self._one(plain)}
        if kind == "write" and not np.can_cast(plain[chosen["y"]].dtype, plain[chosen["x"]].dtype, "same_kind"):
            chosen["y"] = chosen["x"]
        if kind == "write" and not (plain[chosen["x"]].flags.writeable and plain[chosen["x"]].size):
            return
        wanted = outcome(lambda values: execute(kind, name, Pool(values, self.draw, chosen)), plain)
        found = outcome(lambda values: execute(kind, name, Pool(values, self.draw, chosen)), mine)
        self.last = (kind, name, chosen)
        if isinstance(wanted, Exception) or isinstance(found, Exception):
            check_errors(found, wanted)
            return
        for x, y in zip(found, wanted, strict=True):
            compare(x, y, exact=False, scale=1e4)
        results = [(x, y) for x, y in zip(found, wanted, strict=True) if is_value(x, y)] if name not in COPIED else []
        tame = not all(is_tame(y) for _, y in results)
        self.statements.append((kind, name, chosen, tame))
        for x, y in results[:2]:
            if tame:
                x, y = tamed(x), tamed(y)
            if not any(np.shares_memory(y, z) for z in plain):
                y = np.ascontiguousarray(y)
            mine.append(x)
            plain.append(y)
        for x, y in zip(mine, plain, strict=True):
            compare(x, y, exact=False, scale=1)

    def _one(self, values: list[Any]) -> int:
        return self.draw.randrange(len(values))

    def _check_jit(self, plain: list[Any]) -> None:
        given = self.placed()
        self.last = ("jit", self.executor, {})
        found = outcome(lambda values: st.jit(self._replayed, executor=self.executor)(*values), given)
        if isinstance(found, Exception):
            if not isinstance(found, st.ConcretizationError):
                raise Differs(f"{found!r} under jit")
            return
        for x, y in zip([*given, *found], [*plain[:3], *plain[3:]], strict=True):
            compare(x, y, exact=False, scale=1)

    def _replayed(self, *values: Any) -> Any:
        values = list(values)
        with np.errstate(all="ignore"):
            for kind, name, chosen, tame in self.statements:
                made = leaves(execute(kind, name, Pool(values, self.draw, chosen)))
                results = [x for x in made if is_value(x, x)] if name not in COPIED else []
                values += [tamed(x) if tame else x for x in results[:2]]
        return values[3:]


PROGRAM_CALLS = sorted(
    name
    for name in CALLS
    if name not in (*LEFT_OUT, *NOT_STABLE, *ILL_CONDITIONED) and not name.startswith(("fft", "linalg"))
)


def execute(kind: str, name: str, pool: Pool) -> Any:
    """Runs a statement."""
    if kind == "call":
        return CALLS[name](pool)
    if kind == "view":
        return VIEWS[name](pool.x)
    WRITES[name](pool.x, pool.y)
    return []


def is_value(x: Any, y: Any) -> bool:
    """Whether a result becomes a value of the program."""
    return (
        isinstance(x, st.ShardedTensor)
        and isinstance(y, np.ndarray | st.ShardedTensor)
        and 1 <= x.ndim <= 2
        and 0 < x.size <= MOST
    )


def run_programs(backends: list[str], first: int, count: int) -> Iterator[str]:
    """Checks the programs of a range of seeds, and yields what is wrong."""
    for seed in range(first, first + count):
        program = Program(seed, backends[seed % len(backends)])
        try:
            program.check(jit=seed % 4 == 1)
        except Differs as error:
            yield f"{program} {program.last}: {error}"
        except Exception as error:
            yield f"{program} {program.last}: raised {error!r}"


def run_calls(backends: list[str], first: int, count: int) -> Iterator[str]:
    """Checks each call with operands of several seeds, and yields what is wrong."""
    for name in [name for name in CALLS if name not in LEFT_OUT]:
        for seed in range(first, first + count):
            for backend in backends:
                case = Case(name, seed, backend)
                try:
                    case.check()
                except Differs as error:
                    yield f"{case}: {error}"
                except Exception as error:
                    yield f"{case}: raised {error!r}"


def main(kind: str, setting: str, backends: str, first: str, count: str) -> None:
    """Runs calls or programs, prints what is wrong, and ends with the status 1 if anything is."""
    found = {"calls": run_calls, "programs": run_programs}[kind](backends.split(","), int(first), int(count))
    status = 0
    for status, line in enumerate(found, 1):
        print(line[:1500], flush=True)
    sys.exit(bool(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
