"""Calls of the functions of the array API standard, with randomly drawn operands and arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as some

from shardtensor.testing.indexing_cases import array_indices, assigned, indices
from tests.standard_draws import (
    ALL,
    FLOATS,
    INTEGERS,
    REAL,
    REAL_FLOATS,
    SIDES,
    SIGNED,
    Call,
    Draw,
    Function,
)

Maker = Callable[[Draw], Call]
CALLS: dict[str, Maker] = {}


def drawn(names: str) -> Callable[[Callable[[Draw, Function], Call]], Callable[[Draw, Function], Call]]:
    """Registers a function that draws the calls of the named functions; it receives the draw, and the function to call
    with a namespace and the arguments.
    """

    def register(maker: Callable[[Draw, Function], Call]) -> Callable[[Draw, Function], Call]:
        for name in names.split():
            CALLS[name] = functools.partial(_made, maker, name)
        return maker

    return register


def _made(maker: Callable[[Draw, Function], Call], name: str, draw: Draw) -> Call:
    def function(namespace: Any, *args: Any, **params: Any) -> Any:
        for part in name.split("."):
            namespace = getattr(namespace, part)
        return namespace(*args, **params)

    return maker(draw, function)


# -- elementwise functions ---------------------------------------------------------------------------------------------

ELEMENTWISE = (
    "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert bitwise_or "
    "bitwise_right_shift bitwise_xor ceil conj copysign cos cosh divide equal exp expm1 floor floor_divide greater "
    "greater_equal hypot imag isfinite isinf isnan less less_equal log log1p log2 log10 logaddexp logical_and "
    "logical_not logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow real "
    "reciprocal remainder round sign signbit sin sinh square sqrt subtract tan tanh trunc"
)


@functools.cache
def _accepts(function: Any, dtypes: tuple[str, ...]) -> bool:
    try:
        with np.errstate(all="ignore"):
            function(*[np.ones(1, d) for d in dtypes])
    except TypeError:
        return False
    return True


def _elementwise(name: str, draw: Draw, function: Function) -> Call:
    known = getattr(np, name)
    count = getattr(known, "nin", 1)
    takes = [d for d in ALL if _accepts(known, (d,) * count)]
    dtypes = [draw.dtype(takes)] * count
    if count == 2 and draw.chance() and _accepts(known, mixed := (dtypes[0], draw.dtype(takes))):
        dtypes = list(mixed)
    complexes = any(d.startswith("c") for d in dtypes)
    # The loops of C libraries differ in the complex results for infinities and for numbers whose squares overflow.
    operands = [
        draw.filled(s, d, wide=not complexes, special=not complexes)
        for s, d in zip(draw.together(count), dtypes, strict=True)
    ]
    if name in ("bitwise_left_shift", "bitwise_right_shift", "pow") and dtypes[1] in INTEGERS:
        operands[1] = np.abs(operands[1] % np.asarray(8, dtypes[1])).astype(dtypes[1])
    if complexes and name in ("divide", "reciprocal"):  # They also differ for quotients by zero.
        operands[-1] = np.where(operands[-1] == 0, 1, operands[-1]).astype(operands[-1].dtype)
    signs = not complexes and name not in ("maximum", "minimum")  # The standard does not order 0.0 and -0.0.
    return Call(function, operands, rtol=64 if complexes else 8, scale=16 * complexes, signs=signs)


for _name in ELEMENTWISE.split():
    drawn(_name)(functools.partial(_elementwise, _name))


@drawn("clip")
def _clip(draw: Draw, function: Function) -> Call:
    dtype = draw.dtype(INTEGERS + REAL_FLOATS)
    x, low, high = [draw.filled(s, dtype) for s in draw.together(3)]
    how = draw.integer(0, 2)
    if how == 0:
        return Call(lambda xp, x, low: function(xp, x, min=low), [x, low])
    if how == 1:
        return Call(lambda xp, x, high: function(xp, x, max=high), [x, high])
    return Call(function, [x, low, high])


@drawn("where")
def _where(draw: Draw, function: Function) -> Call:
    dtype = draw.dtype()
    a, b, c = draw.together(3)
    return Call(function, [draw.filled(a, "bool"), draw.filled(b, dtype), draw.filled(c, dtype)], signs=True)


# -- creation and dtypes -----------------------------------------------------------------------------------------------


@drawn("arange")
def _arange(draw: Draw, function: Function) -> Call:
    dtype = draw.dtype(SIGNED + REAL_FLOATS)
    start, step = draw.integer(-40, 40), draw.one_of([-3, -1, 1, 2, 7])
    stop = start + step * draw.integer(-2, 40) + draw.integer(0, 2)
    return Call(lambda xp: function(xp, start, stop, step, dtype=np.dtype(dtype)), [])


@drawn("linspace")
def _linspace(draw: Draw, function: Function) -> Call:
    start, stop, count = draw.integer(-9, 9), draw.integer(-9, 9), draw.integer(0, 40)
    dtype, endpoint = np.dtype(draw.dtype(("float32", "float64"))), draw.chance()
    return Call(lambda xp: function(xp, start, stop, count, dtype=dtype, endpoint=endpoint), [], scale=9)


@drawn("eye")
def _eye(draw: Draw, function: Function) -> Call:
    rows, columns, k = draw.integer(0, 40), draw.integer(0, 40), draw.integer(-45, 45)
    dtype = np.dtype(draw.dtype())
    return Call(lambda xp: function(xp, rows, columns, k=k, dtype=dtype), [])


@drawn("ones zeros")
def _ones(draw: Draw, function: Function) -> Call:
    shape, dtype = draw.shape(), np.dtype(draw.dtype())
    return Call(lambda xp: function(xp, shape, dtype=dtype), [])


@drawn("full")
def _full(draw: Draw, function: Function) -> Call:
    shape, dtype = draw.shape(), draw.dtype()
    value = draw.filled((), dtype).item()
    return Call(lambda xp: function(xp, shape, value, dtype=np.dtype(dtype)), [], signs=True)


@drawn("ones_like zeros_like")
def _like(draw: Draw, function: Function) -> Call:
    return Call(function, [draw.array()])


@drawn("full_like")
def _full_like(draw: Draw, function: Function) -> Call:
    x = draw.array()
    value = draw.filled((), str(x.dtype)).item()
    return Call(lambda xp, x: function(xp, x, value), [x], signs=True)


@drawn("asarray")
def _asarray(draw: Draw, function: Function) -> Call:
    return Call(lambda xp, x: function(xp, x, copy=True), [draw.array()], signs=True)


@drawn("astype")
def _astype(draw: Draw, function: Function) -> Call:
    x = draw.array()
    dtype = draw.dtype(ALL if x.dtype.kind != "c" else ("complex64", "complex128", "bool"))
    if x.dtype.kind in "fc" and np.dtype(dtype).kind in "iu":  # The results for NaN and for too large numbers vary.
        x = draw.filled(x.shape, str(x.dtype), wide=False, special=False)
        x = abs(x) if np.dtype(dtype).kind == "u" else x
    return Call(lambda xp, x: function(xp, x, np.dtype(dtype)), [x], signs=True)


@drawn("meshgrid")
def _meshgrid(draw: Draw, function: Function) -> Call:
    dtype, indexing = draw.dtype(), draw.one_of(["xy", "ij"])
    sides = [min(n, 12) for n in draw.data.draw(some.lists(SIDES, max_size=3))]
    return Call(lambda xp, *xs: function(xp, *xs, indexing=indexing), [draw.filled((n,), dtype) for n in sides])


@drawn("tril triu")
def _triangle(draw: Draw, function: Function) -> Call:
    k = draw.integer(-45, 45)
    return Call(lambda xp, x: function(xp, x, k=k), [draw.array(2)])


# -- shapes ------------------------------------------------------------------------------------------------------------


@drawn("broadcast_arrays")
def _broadcast_arrays(draw: Draw, function: Function) -> Call:
    return Call(function, [draw.filled(s, draw.dtype()) for s in draw.together(draw.integer(1, 3))], signs=True)


@drawn("broadcast_to")
def _broadcast_to(draw: Draw, function: Function) -> Call:
    shape, wider = draw.together(2)
    shape = np.broadcast_shapes(shape, wider)
    tail = shape[draw.integer(0, len(shape)) :]
    x = draw.filled(tuple(1 if draw.integer(0, 3) == 0 else n for n in tail), draw.dtype())
    return Call(lambda xp, x: function(xp, x, shape), [x], signs=True)


@drawn("concat")
def _concat(draw: Draw, function: Function) -> Call:
    shape = draw.shape(1)
    axis: int | None = draw.axis(len(shape))
    dtype = draw.dtype()
    shapes = []
    for _ in range(draw.integer(1, 4)):
        other = list(shape)
        other[axis] = draw.integer(0, 9)
        shapes.append(tuple(other))
    axis = None if draw.integer(0, 4) == 0 else axis
    return Call(lambda xp, *xs: function(xp, [*xs], axis=axis), [draw.filled(s, dtype) for s in shapes], signs=True)


@drawn("stack")
def _stack(draw: Draw, function: Function) -> Call:
    shape = draw.shape(0, 3)
    axis, dtype = draw.integer(-len(shape) - 1, len(shape)), draw.dtype()
    arrays = [draw.filled(shape, dtype) for _ in range(draw.integer(1, 4))]
    return Call(lambda xp, *xs: function(xp, [*xs], axis=axis), arrays, signs=True)


@drawn("unstack")
def _unstack(draw: Draw, function: Function) -> Call:
    x = draw.array(1, 3)
    axis = draw.axis(x.ndim)
    return Call(lambda xp, x: function(xp, x, axis=axis), [x], signs=True)


@drawn("expand_dims")
def _expand_dims(draw: Draw, function: Function) -> Call:
    x = draw.array(0, 3)
    axis = draw.integer(-x.ndim - 1, x.ndim)
    return Call(lambda xp, x: function(xp, x, axis=axis), [x], signs=True)


@drawn("flip")
def _flip(draw: Draw, function: Function) -> Call:
    x = draw.array()
    axis = draw.axes(x.ndim)
    return Call(lambda xp, x: function(xp, x, axis=axis), [x], signs=True)


@drawn("moveaxis")
def _moveaxis(draw: Draw, function: Function) -> Call:
    x = draw.array(1)
    source, destination = draw.axis(x.ndim), draw.axis(x.ndim)
    return Call(lambda xp, x: function(xp, x, source, destination), [x], signs=True)


@drawn("permute_dims")
def _permute_dims(draw: Draw, function: Function) -> Call:
    x = draw.array()
    order = tuple(draw.data.draw(some.permutations(range(x.ndim))))
    return Call(lambda xp, x: function(xp, x, order), [x], signs=True)


@drawn("repeat")
def _repeat(draw: Draw, function: Function) -> Call:
    x = draw.array(1, 3)
    axis = draw.axis(x.ndim) if draw.chance() else None
    counts: Any = draw.integer(0, 3)
    if axis is not None and draw.chance():
        counts = draw.rng().integers(0, 4, x.shape[axis])
    return Call(lambda xp, x: function(xp, x, counts, axis=axis), [x], signs=True)


@drawn("reshape")
def _reshape(draw: Draw, function: Function) -> Call:
    x = draw.array()
    shape, rest = [], x.size
    while rest > 1 and len(shape) < 4:
        shape.append(draw.one_of([n for n in range(1, 41) if rest % n == 0]))
        rest //= shape[-1]
    shape.append(draw.one_of([rest, -1]) if x.size else 0)
    return Call(lambda xp, x: function(xp, x, tuple(shape)), [x], signs=True)


@drawn("roll")
def _roll(draw: Draw, function: Function) -> Call:
    x = draw.array()
    axis = draw.axes(x.ndim)
    shift: Any = draw.integer(-50, 50)
    if isinstance(axis, tuple):
        shift = tuple(draw.integer(-50, 50) for _ in axis)
    return Call(lambda xp, x: function(xp, x, shift, axis=axis), [x], signs=True)


@drawn("squeeze")
def _squeeze(draw: Draw, function: Function) -> Call:
    x = draw.array(0, 3)
    axis = draw.integer(0, x.ndim)
    x = x.reshape(*x.shape[:axis], 1, *x.shape[axis:])
    return Call(lambda xp, x: function(xp, x, axis=axis), [x], signs=True)


@drawn("tile")
def _tile(draw: Draw, function: Function) -> Call:
    x = draw.array(0, 3)
    counts = tuple(draw.data.draw(some.lists(some.integers(0, 3), max_size=4)))
    return Call(lambda xp, x: function(xp, x, counts), [x], signs=True)


# -- indices -----------------------------------------------------------------------------------------------------------


@drawn("take")
def _take(draw: Draw, function: Function) -> Call:
    x = draw.array(1)
    axis = draw.axis(x.ndim)
    n = x.shape[axis]
    at = draw.rng().integers(-n, n, draw.integer(0, 40)) if n else np.zeros(0, int)
    return Call(lambda xp, x, at: function(xp, x, at, axis=axis), [x, at], signs=True)


@drawn("take_along_axis")
def _take_along_axis(draw: Draw, function: Function) -> Call:
    x = draw.array(1)
    axis = draw.axis(x.ndim)
    shape, n = list(x.shape), x.shape[axis]
    shape[axis] = draw.integer(0, 40) if n else 0
    at = draw.rng().integers(-max(n, 1), max(n, 1), shape)
    return Call(lambda xp, x, at: function(xp, x, at, axis=axis), [x, at], signs=True)


def _index(draw: Draw, x: np.ndarray) -> Any:
    if draw.chance():
        return draw.data.draw(indices(x.shape))
    index = draw.data.draw(array_indices(x.shape))
    try:
        x[index]
    except IndexError:  # The masks and arrays do not broadcast together.
        return draw.filled(x.shape, "bool")
    return index


def getitem(draw: Draw) -> Call:
    x = draw.array()
    index = _index(draw, x)
    return Call(lambda xp, x: x[index], [x], signs=True)


def setitem(draw: Draw) -> Call:
    x = draw.array()
    index = _index(draw, x)
    value = draw.filled(np.shape(x[index]), str(x.dtype))

    def write(xp: Any, x: Any, value: Any) -> Any:
        if xp is np:
            return assigned(x, index, value)
        x = xp.asarray(x)  # Some operands are host arrays.
        x[index] = value
        return x

    return Call(write, [x, value], signs=True)


CALLS |= {"getitem": getitem, "setitem": setitem}


# -- searching, sorting, sets ------------------------------------------------------------------------------------------


@drawn("argmax argmin")
def _arg_extremum(draw: Draw, function: Function) -> Call:
    x = draw.array(among=REAL)
    axis = draw.axis(x.ndim) if x.ndim and draw.chance() else None
    keepdims = draw.chance()
    return Call(lambda xp, x: function(xp, x, axis=axis, keepdims=keepdims), [x])


@drawn("count_nonzero all any max min")
def _exact_reduction(draw: Draw, function: Function) -> Call:
    x = draw.array(among=REAL)
    axis, keepdims = draw.axes(x.ndim), draw.chance()
    return Call(lambda xp, x: function(xp, x, axis=axis, keepdims=keepdims), [x])


@drawn("nonzero")
def _nonzero(draw: Draw, function: Function) -> Call:
    return Call(function, [draw.array(1)])


@drawn("searchsorted")
def _searchsorted(draw: Draw, function: Function) -> Call:
    dtype, side = draw.dtype(INTEGERS + REAL_FLOATS), draw.one_of(["left", "right"])
    known = np.sort(draw.filled((draw.integer(0, 40),), dtype))
    return Call(lambda xp, x1, x2: function(xp, x1, x2, side=side), [known, draw.filled(draw.shape(), dtype)])


@drawn("sort")
def _sort(draw: Draw, function: Function) -> Call:
    x = draw.array(1)
    axis = draw.axis(x.ndim)
    return Call(lambda xp, x: function(xp, x, axis=axis), [x])


@drawn("argsort")
def _argsort(draw: Draw, function: Function) -> Call:
    x = draw.array(1)
    axis = draw.axis(x.ndim)
    return Call(lambda xp, x: function(xp, x, axis=axis, stable=True), [x])


@drawn("unique_counts unique_values")
def _unique(draw: Draw, function: Function) -> Call:
    def sorted_values(xp: Any, x: Any) -> Any:
        found = function(xp, x)
        return found if isinstance(found, tuple) else xp.sort(found)  # The standard leaves their order open.

    return Call(sorted_values, [draw.array()])


@drawn("unique_all unique_inverse")
def _unique_with_indices(draw: Draw, function: Function) -> Call:
    return Call(function, [draw.array(special=False)])  # Each NaN is a value of its own: their order is open, too.


@drawn("isin")
def _isin(draw: Draw, function: Function) -> Call:
    dtype, invert = draw.dtype(), draw.chance()
    arrays = [draw.filled(draw.shape(), dtype), draw.filled(draw.shape(0, 2), dtype)]
    return Call(lambda xp, x1, x2: function(xp, x1, x2, invert=invert), arrays)


# -- sums --------------------------------------------------------------------------------------------------------------


def _magnitude(x: np.ndarray) -> float:
    """Returns the sum of the magnitudes of the finite elements, to which the errors of sums are proportional."""
    finite = np.abs(x[np.isfinite(x)].astype("complex128" if x.dtype.kind == "c" else "float64"))
    return float(finite.sum())


@drawn("sum mean")
def _sum(draw: Draw, function: Function) -> Call:
    x = draw.array(wide=False)
    axis, keepdims = draw.axes(x.ndim), draw.chance()
    return Call(lambda xp, x: function(xp, x, axis=axis, keepdims=keepdims), [x], scale=_magnitude(x))


@drawn("std var")
def _spread(draw: Draw, function: Function) -> Call:
    x = draw.array(among=INTEGERS + FLOATS, wide=False)
    axis, keepdims, correction = draw.axes(x.ndim), draw.chance(), draw.one_of([0, 1, 0.5])
    return Call(
        lambda xp, x: function(xp, x, axis=axis, keepdims=keepdims, correction=correction),
        [x],
        rtol=64,
        scale=1e4,  # The standard deviation of equal numbers is the root of a rounding error.
    )


def _factors(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """Draws elements whose product neither overflows nor underflows in any order: ones, and a few other numbers."""
    dtype = draw.dtype(INTEGERS + FLOATS)
    if np.dtype(dtype).kind in "iu":
        return draw.filled(shape, dtype)
    made = np.ones(shape, dtype)
    special = (np.nan, np.inf, 0.0) if np.dtype(dtype).kind == "f" and draw.chance() else (1,)
    if made.size:
        made.flat[draw.rng().integers(0, made.size, 3)] = draw.one_of([-1, 2, 0.5, *special])
        made.flat[draw.rng().integers(0, made.size, made.size // 3)] *= -1
    return made


@drawn("prod")
def _prod(draw: Draw, function: Function) -> Call:
    x = _factors(draw, draw.shape())
    axis, keepdims = draw.axes(x.ndim), draw.chance()
    return Call(lambda xp, x: function(xp, x, axis=axis, keepdims=keepdims), [x])


@drawn("cumulative_prod")
def _cumulative_prod(draw: Draw, function: Function) -> Call:
    x = _factors(draw, draw.shape(1))
    axis, initial = draw.axis(x.ndim), draw.chance()
    return Call(lambda xp, x: function(xp, x, axis=axis, include_initial=initial), [x])


@drawn("cumulative_sum")
def _cumulative_sum(draw: Draw, function: Function) -> Call:
    x = draw.array(1, among=INTEGERS + FLOATS, wide=False)
    axis, initial = draw.axis(x.ndim), draw.chance()
    return Call(lambda xp, x: function(xp, x, axis=axis, include_initial=initial), [x], scale=_magnitude(x))


@drawn("diff")
def _diff(draw: Draw, function: Function) -> Call:
    x = draw.array(1)
    axis, n = draw.axis(x.ndim), draw.integer(0, 3)
    return Call(lambda xp, x: function(xp, x, axis=axis, n=n), [x], scale=8)


# -- linear algebra and transforms: see `tests/functions/test_linalg.py` and `test_fft.py` for bad matrices --------------


def _terms(draw: Draw, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draws operands of products, without complex infinities, for whose products libraries differ."""
    return draw.filled(shape, dtype, wide=False, special=not dtype.startswith("c"))


def _products(draw: Draw, function: Function, shapes: Sequence[tuple[int, ...]], dtype: str = "") -> Call:
    dtype = dtype or draw.dtype(INTEGERS + FLOATS)
    operands = [_terms(draw, s, dtype) for s in shapes]
    if not all(np.isfinite(x).all() for x in operands):  # BLAS may leave out products of infinities with 0.
        operands = [np.where(x == 0, np.ones((), x.dtype), x) for x in operands]
    return Call(function, operands, rtol=64, scale=1e3)


@drawn("matmul linalg.matmul")
def _matmul(draw: Draw, function: Function) -> Call:
    batch = draw.shape(0, 2)
    n, k, m = [draw.integer(0, 24) for _ in range(3)]
    return _products(draw, function, [(*batch, n, k), (*(batch if draw.chance() else ()), k, m)])


@drawn("tensordot linalg.tensordot")
def _tensordot(draw: Draw, function: Function) -> Call:
    shape = draw.shape(1, 3)
    axes = draw.integer(0, min(len(shape), 2))
    kept = (draw.integer(0, 7),)
    if axes == 0:
        shape = shape[:1]
    other = (*shape[len(shape) - axes :], *kept)
    return _products(draw, lambda xp, a, b: function(xp, a, b, axes=axes), [shape, other])


@drawn("vecdot linalg.vecdot")
def _vecdot(draw: Draw, function: Function) -> Call:
    shape = draw.shape(1)
    return _products(draw, function, [shape, shape])


@drawn("linalg.outer")
def _outer(draw: Draw, function: Function) -> Call:
    return _products(draw, function, [draw.shape(1, 1), draw.shape(1, 1)])


@drawn("linalg.cross")
def _cross(draw: Draw, function: Function) -> Call:
    shape = (*draw.shape(0, 3), 3)
    dtype = draw.dtype((*SIGNED, "float32", "float64"))
    return _products(draw, function, [shape, shape], dtype)


@drawn("matrix_transpose linalg.matrix_transpose")
def _matrix_transpose(draw: Draw, function: Function) -> Call:
    return Call(function, [draw.array(2)], signs=True)


@drawn("linalg.diagonal")
def _diagonal(draw: Draw, function: Function) -> Call:
    offset = draw.integer(-9, 9)
    return Call(lambda xp, x: function(xp, x, offset=offset), [draw.array(2)], signs=True)


@drawn("linalg.trace")
def _trace(draw: Draw, function: Function) -> Call:
    x, offset = draw.array(2, among=INTEGERS + FLOATS, wide=False), draw.integer(-9, 9)
    return Call(lambda xp, x: function(xp, x, offset=offset), [x], scale=_magnitude(x))


@drawn("linalg.vector_norm")
def _vector_norm(draw: Draw, function: Function) -> Call:
    x = draw.array(among=FLOATS[1:], wide=False)
    axis, keepdims, order = draw.axes(x.ndim), draw.chance(), draw.one_of([2, 1, 0, np.inf, -np.inf, 3])
    return Call(
        lambda xp, x: function(xp, x, axis=axis, keepdims=keepdims, ord=order), [x], rtol=64, scale=_magnitude(x)
    )


@drawn("linalg.matrix_norm")
def _matrix_norm(draw: Draw, function: Function) -> Call:
    x = draw.filled(draw.shape(2, least=1), draw.dtype(FLOATS[1:]), wide=False)
    keepdims, order = draw.chance(), draw.one_of(["fro", 1, -1, np.inf, -np.inf])
    return Call(lambda xp, x: function(xp, x, keepdims=keepdims, ord=order), [x], rtol=64, scale=_magnitude(x))


def _square(draw: Draw, definite: bool = False) -> np.ndarray:
    """Draws well-conditioned matrices: diagonally dominant ones, and symmetric ones."""
    shape, n = draw.shape(0, 2), draw.integer(0, 12)
    shape = tuple(min(side, 7) for side in shape)
    made = draw.filled(
        (*shape, n, n), draw.dtype(("float32", "float64", "complex64", "complex128")), wide=False, special=False
    )
    made = made / 4 + 2 * n * np.eye(n)
    return np.asarray(made + made.conj().swapaxes(-1, -2) if definite else made).astype(made.dtype)


@drawn("linalg.det linalg.slogdet linalg.inv linalg.pinv linalg.svdvals linalg.matrix_rank")
def _of_square(draw: Draw, function: Function) -> Call:
    return Call(function, [_square(draw)], rtol=1e3, scale=1e3)


@drawn("linalg.cholesky linalg.eigvalsh")
def _of_definite(draw: Draw, function: Function) -> Call:
    return Call(function, [_square(draw, definite=True)], rtol=1e3, scale=1e3)


@drawn("linalg.matrix_power")
def _matrix_power(draw: Draw, function: Function) -> Call:
    n = draw.integer(-2, 3)
    return Call(lambda xp, x: function(xp, x, n), [_square(draw)], rtol=1e4, scale=1e4)


@drawn("linalg.solve")
def _solve(draw: Draw, function: Function) -> Call:
    a = _square(draw)
    b = draw.filled((*a.shape[:-1], draw.integer(0, 9)), str(a.dtype), wide=False, special=False)
    return Call(function, [a, b], rtol=1e3, scale=1e3)


@drawn("fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft")
def _transform(draw: Draw, function: Function) -> Call:
    return _transformed(draw, function, several=False)


@drawn("fft.fftn fft.ifftn fft.rfftn fft.irfftn")
def _transforms(draw: Draw, function: Function) -> Call:
    return _transformed(draw, function, several=True)


def _transformed(draw: Draw, function: Function, several: bool) -> Call:
    x = draw.filled(draw.shape(1, 3, least=2), draw.dtype(("float32", "float64")), wide=False, special=False)
    norm = draw.one_of(["backward", "ortho", "forward"])
    axis = draw.axis(x.ndim)
    where = {"axes": (axis,) if draw.chance() else tuple(range(x.ndim))} if several else {"axis": axis}
    return Call(lambda xp, x: function(xp, x, norm=norm, **where), [x], rtol=64, scale=_magnitude(x))


@drawn("fft.fftshift fft.ifftshift")
def _shift(draw: Draw, function: Function) -> Call:
    x = draw.array(1)
    axes = draw.axes(x.ndim)
    return Call(lambda xp, x: function(xp, x, axes=axes), [x], signs=True)


@drawn("fft.fftfreq fft.rfftfreq")
def _frequencies(draw: Draw, function: Function) -> Call:
    n, d = draw.integer(1, 40), draw.one_of([1.0, 0.5, 3.0])
    return Call(lambda xp: function(xp, n, d=d), [])
