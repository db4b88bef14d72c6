"""Odd arguments of NumPy's functions: scalars, lists, arrays without elements or dimensions, `out=` of other dtypes,
times and bools. Results, arguments that are written, and classes of errors are NumPy's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.registry import load
from tests.layouts import put

F4 = np.array([1.5, -2.25, 3.0, 0.5, -1.0], np.float32)
I1 = np.array([[3, -1, 2], [0, 5, -4]], np.int8)
DATES = np.array([3, 1, 7, 2], "M8[s]")
SPANS = np.array([3, -1, 7, 2], "m8[s]")
BOOLS = np.array([True, False, True])

NAN = np.array([3, np.nan, 1, np.nan, 3])
Z = np.array([[1 + 2j, 3 - 2j], [5, 7 + 4j]], np.complex64)

Call = Callable[[Callable[[Any], Any]], Any]
"""A call with NumPy's arrays, which its argument places on devices. It returns what is compared."""


def written(place: Callable[[Any], Any], x: np.ndarray, call: Callable[[Any], Any]) -> Any:
    """Returns a placed copy of an array after a call has written to it."""
    made = place(x.copy())
    call(made)
    return made


def into(place: Callable[[Any], Any], shape: Any, dtype: Any, call: Callable[[Any], Any]) -> Any:
    """Returns ``out`` after a call has written to it."""
    return written(place, np.zeros(shape, dtype), call)


RESULTS: dict[str, Call] = {
    # Python's scalars are arrays to NumPy's products, and to the outer form of ufuncs.
    "dot of a scalar": lambda p: np.dot(p(F4), 2),
    "x.dot(scalar)": lambda p: p(F4).dot(1.5),
    "inner of a scalar": lambda p: np.inner(2, p(F4)),
    "inner of a list": lambda p: np.inner([[1.0] * 5], p(F4)),
    "outer of a scalar": lambda p: np.outer(p(F4), 2),
    "kron of a scalar": lambda p: np.kron(2, p(F4)),
    "add.outer of a scalar": lambda p: np.add.outer(p(F4), 2),
    "outer of durations": lambda p: np.outer(p(SPANS), p(F4)),
    "einsum sums an ellipsis over": lambda p: np.einsum("i...->i", p(I1), optimize=True),
    "einsum sums an ellipsis of two operands over": lambda p: np.einsum("i...,...->i", p(I1), p(I1[0]), optimize="greedy"),
    # NaN.
    "unique slices of a vector with NaN": lambda p: np.unique(p(np.array([3, np.nan, 1, np.nan])), axis=0),
    "unique slices of a vector, NaN differ": lambda p: np.unique(p(NAN), True, True, True, axis=0, equal_nan=False)[0],
    "counts of the slices of a vector with NaN": lambda p: np.unique(p(NAN), return_counts=True, axis=-1)[1],
    "unique rows with NaN": lambda p: np.unique(p(np.array([[3, np.nan], [3, np.nan], [1, 2]])), axis=0),
    "unique dates with NaT": lambda p: np.unique(p(np.array([3, "NaT", 1, "NaT"], "M8[s]"))),
    "counts of durations with NaT": lambda p: np.unique(p(np.array([3, "NaT", "NaT"], "m8[s]")), return_counts=True)[1],
    # Axes.
    "roll by one shift along two axes": lambda p: np.roll(p(I1), (1,), axis=(0, 1)),
    "roll by two shifts along one axis": lambda p: np.roll(p(I1), (1, 2), axis=1),
    "roll by two shifts of the flattened array": lambda p: np.roll(p(I1), (1, 3)),
    "accumulate along all axes of a vector": lambda p: np.maximum.accumulate(p(F4), axis=None),
    "insert at positions out of order": lambda p: np.insert(p(F4), [2, 0, 1], [10, 20, 30]),
    "insert at positions from the end": lambda p: np.insert(p(I1), [-1, 0], [[7], [8]], axis=1),
    "insert rows at positions out of order": lambda p: np.insert(p(I1), np.array([1, 1, 0]), [[7], [8], [9]], axis=0),
    "insert lists in more lists": lambda p: np.insert(p(F4), [0], [[4]]),
    "insert floats in lists among integers": lambda p: np.insert(p(I1), 1, [2.5, -2.5], axis=1),
    "sum of floats into integers": lambda p: into(p, (), "i4", lambda out: np.sum(p(F4 * 3), out=out)),
    "prod of integers into bools": lambda p: into(p, 2, "?", lambda out: np.prod(p(I1), axis=1, out=out)),
    "reduceat along a tuple of one axis": lambda p: np.add.reduceat(p(F4), [0, 2], axis=(0,)),
    "cumulative_sum of a 0-d array": lambda p: np.cumulative_sum(p(np.array(3)), include_initial=True),
    # Dtypes.
    "cumsum of durations": lambda p: np.cumsum(p(SPANS)),
    "cumsum of durations in rows": lambda p: p(SPANS.reshape(2, 2)).cumsum(axis=0),
    "cumsum as bools": lambda p: np.cumsum(p(I1), axis=1, dtype=bool),
    "var in complex64": lambda p: np.var(p(F4), dtype=np.complex64),
    "std of complex numbers in complex128": lambda p: np.std(p(F4 + 1j * F4[::-1]), dtype=complex),
    "x.std of integers in complex128, where": lambda p: p(I1).std(axis=1, dtype=complex, where=p(I1 > 0)),
    "std of complex numbers in float64": lambda p: np.std(p(Z), dtype="float64"),
    "var of complex numbers in float32, along rows": lambda p: np.var(p(Z), axis=1, dtype="f4", ddof=1),
    "var of complex numbers in float64, where": lambda p: np.var(p(Z), dtype=float, where=p(Z.real > 2)),
    "nanvar of complex numbers in float64": lambda p: np.nanvar(p(Z), dtype=float),
    "nanmean of complex numbers in float64": lambda p: np.nanmean(p(Z), axis=0, dtype=float),
    "nanvar of integers in complex128": lambda p: np.nanvar(p(I1), axis=0, dtype=complex),
    "var of a dtype": lambda p: np.var(p(F4), dtype=np.float64, ddof=1),
    "x.std of a dtype, where": lambda p: p(F4).std(dtype=np.float64, where=p(F4 > 0)),
    "gradient of dates": lambda p: np.gradient(p(DATES)),
    "gradient of months": lambda p: np.gradient(p(np.array([3, 1, 7, 2], "M8[M]"))),
    "histogram2d of a number of bins without dimensions": lambda p: np.histogram2d(p(F4), p(F4), np.array(3)),
    "histogramdd of a number of bins without dimensions": lambda p: np.histogramdd(p(I1), np.array(2))[0],
    "histogram2d of two dtypes": lambda p: np.histogram2d(p(F4.astype("f2")), p(np.arange(5)), 2),
    "histogram2d of edges of two lengths": lambda p: np.histogram2d(p(F4), p(F4), [[-3, 0, 3], [0, 2]]),
    "hstack of a dtype": lambda p: np.hstack([p(I1[0]), p(np.arange(3, dtype="u8"))], dtype=int),
    "conjugate of bools": lambda p: p(BOOLS).conjugate(),
    "dates are no numbers": lambda p: p(DATES) == p(np.arange(4)),
    "dates differ from a number": lambda p: p(DATES) != 1,
    "array_equal of dates and numbers": lambda p: np.array_equal(p(DATES), p(np.arange(4))),
    "array_equal of durations and integers": lambda p: np.array_equal(p(SPANS), p(SPANS.astype(int))),
    "array_equal of durations and floats": lambda p: np.array_equal(p(SPANS), p(SPANS.astype(float))),
    "array_equiv of dates and numbers": lambda p: np.array_equiv(p(DATES), 3),
    "min_scalar_type": lambda p: np.min_scalar_type(p(np.array(300.0))),
    "subtract.at of dates": lambda p: written(p, DATES, lambda x: np.subtract.at(x, [0, 0], 1)),
    "argmax of dates, the last of them NaT": lambda p: np.argmax(p(np.array([3, 9, 1, "NaT"], "M8[s]"))),
    "argmin of dates in rows": lambda p: np.argmin(p(np.array([[3, 9], [1, 2], ["NaT", 0]], "M8[s]")), axis=0),
    "count_nonzero of durations": lambda p: np.count_nonzero(p(SPANS)),
    # Elements that are missing.
    "partition by an array": lambda p: np.partition(p(np.array([[3, 1, 2]])), np.array([0, 1, 2]), axis=1),
    "partition of nothing": lambda p: np.partition(p(np.zeros(0)), 5),
    "take of nothing": lambda p: np.take(p(F4), []),
    "take by bools": lambda p: np.take(p(F4), [True, False]),
    "delete nothing": lambda p: np.delete(p(F4), []),
    "insert nothing": lambda p: np.insert(p(F4), [], 7),
    "put nothing": lambda p: written(p, F4, lambda x: np.put(x, [0, 1], [])),
    "put into a 0-d array": lambda p: written(p, np.array(1.5), lambda x: np.put(x, [0, 0], [2, 3])),
    "pad no dimension": lambda p: np.pad(p(np.zeros((0, 3))), ((0, 0), (1, 1)), "minimum"),
    "pad by medians": lambda p: np.pad(p(I1), 1, "median"),
    "pad by statistics of the ends": lambda p: np.pad(p(F4), (2, 1), "maximum", stat_length=(2, 3)),
    "pad by means of the ends of rows": lambda p: np.pad(p(I1), ((0, 0), (1, 2)), "mean", stat_length=2),
    "pad bools by means": lambda p: np.pad(p(BOOLS), (1, 2), "mean", stat_length=1),
    "pad by even reflections": lambda p: np.pad(p(F4), 2, "reflect", reflect_type="even"),
    "insert several values at one position in a list": lambda p: np.insert(p(I1), [1], [[7], [8]], axis=1),
    "insert several values where a mask is true": lambda p: np.insert(p(F4), F4 == 3, [7, 8]),
    "insert several values at a slice of one position": lambda p: np.insert(p(F4), slice(0, 1), [7, 8]),
    "percentile of durations": lambda p: np.percentile(p(SPANS), 50),
    "unique columns of no rows": lambda p: np.unique(p(np.zeros((0, 3))), axis=1),
    "where with one argument": lambda p: np.where(p(BOOLS)),
    # Arguments of NumPy only.
    "zeros_like of a shape": lambda p: np.zeros_like(p(F4), shape=(2, 2)),
    "ones_like of a shape and a dtype": lambda p: np.ones_like(p(F4), int, shape=3),
    "full_like of an array": lambda p: np.full_like(p(I1), p(np.array([1, 2, 3]))),
    "full_like of a shape": lambda p: np.full_like(p(F4), 7, shape=()),
    "isin, unique and sorted": lambda p: np.isin(p(F4), p(F4[:2]), assume_unique=True, kind="sort"),
    "clip with dtype=None": lambda p: np.clip(p(F4), 0, 1, dtype=None),
    "qr without Q": lambda p: np.abs(np.linalg.qr(p(np.eye(3) + 1), mode="r")),
    "cond of a singular matrix": lambda p: np.linalg.cond(p(np.ones((2, 2))), 1),
    "cond of one singular matrix of two": lambda p: np.linalg.cond(p(np.array([[[1.0, 1], [1, 1]], [[2, 0], [0, 1]]])), 1),
    # What reductions write.
    "sum into integers": lambda p: into(p, (), int, lambda out: np.sum(p(F4), out=out)),
    "sum of float32 into float64": lambda p: into(p, (), float, lambda out: np.sum(p(F4 + 1e-8), out=out)),
    "max into float32": lambda p: into(p, (3,), "f4", lambda out: np.max(p(I1), axis=0, out=out)),
    "any into numbers": lambda p: into(p, (2,), float, lambda out: np.any(p(I1), axis=1, out=out)),
    "mean of integers into integers": lambda p: into(p, (), int, lambda out: np.mean(p(I1), out=out)),
    "cumulative_sum of float16 into float64": lambda p: into(
        p, 3, float, lambda out: np.cumulative_sum(p(np.full(3, 0.1, "f2")), out=out)
    ),
    "multiply.accumulate into float64": lambda p: into(
        p, 3, float, lambda out: np.multiply.accumulate(p(np.full(3, 0.1, "f2")), out=out)
    ),
    "add.accumulate of floats into integers": lambda p: into(p, 5, int, lambda out: np.add.accumulate(p(F4), out=out)),
    "add.reduce of floats into integers": lambda p: into(
        p, (), int, lambda out: np.add.reduce(p(np.full(4, 0.5)), out=out)
    ),
    "cumsum of floats into integers": lambda p: into(p, 5, int, lambda out: np.cumsum(p(F4), out=out)),
    "cumprod of an array into integers": lambda p: into(p, 5, int, lambda out: np.cumprod(F4, out=out)),
    "cumsum in float32 into integers": lambda p: into(p, 5, int, lambda out: np.cumsum(p(F4), dtype="f4", out=out)),
    "cumsum of float64 into float32": lambda p: into(p, 3, "f4", lambda out: np.cumsum(p(np.array([1e8, 1, -1e8])), out=out)),
    "sum of float64 into float32": lambda p: into(p, (), "f4", lambda out: np.sum(p(np.array([1e8, 1, -1e8])), out=out)),
    "cumsum of a list into integers": lambda p: into(p, 3, int, lambda out: np.cumsum([1.5, 2.5, 1], out=out)),
    "cumsum of truth values into such": lambda p: into(p, 5, bool, lambda out: np.cumsum(p(F4 > 0), out=out)),
    "add.reduce of durations into integers": lambda p: into(
        p, (), int, lambda out: np.add.reduce(p(np.array([1, 2], "m8[s]")), out=out)
    ),
    "reshape by an array": lambda p: p(F4[:4]).reshape(np.array([2, 2])),
    "transpose by an array": lambda p: p(I1).transpose(np.array([1, 0])),
    "piecewise with as many values as elements": lambda p: np.piecewise(p(F4), [p(F4 < 0), p(F4 >= 0)], [[4, 5], 7]),
}  # fmt: skip

ERRORS: dict[str, tuple[type[Exception], Call]] = {
    "take of an empty axis, clipped": (
        IndexError,
        lambda p: np.take(p(np.zeros((2, 0))), p(np.array([0, 1])), axis=1, mode="clip"),
    ),
    "take of an empty axis, wrapped": (IndexError, lambda p: np.take(p(np.zeros((2, 0))), [0], axis=1, mode="wrap")),
    "take of an empty array": (IndexError, lambda p: np.take(p(np.zeros((2, 0))), [0], mode="clip")),
    "ravel_multi_index of an empty array": (
        ValueError,
        lambda p: np.ravel_multi_index((p(np.array([0])), p(np.array([0]))), (0, 2), mode="clip"),
    ),
    "einsum without the ellipsis": (ValueError, lambda p: np.einsum("i...->i", p(I1))),
    "accumulate along all axes": (ValueError, lambda p: np.add.accumulate(p(I1), axis=None)),
    "accumulate in a dtype without a loop": (TypeError, lambda p: np.hypot.accumulate(p(F4), dtype=bool)),
    "reduce into another shape": (ValueError, lambda p: np.add.reduce(p(I1[0]), out=p(np.zeros(2, "i1")))),
    "sum of numbers into durations": (TypeError, lambda p: np.sum(p(F4), out=p(np.array(0, "m8[s]")))),
    "sum of durations into numbers": (TypeError, lambda p: np.sum(p(SPANS), out=p(np.array(0.0)))),
    "add.reduce of numbers into durations": (TypeError, lambda p: np.add.reduce(p(F4), out=p(np.array(0, "m8[s]")))),
    "max into another shape": (ValueError, lambda p: np.max(p(I1[0]), out=p(np.zeros(2, "i1")))),
    "std of integers into integers": (TypeError, lambda p: np.std(p(I1), out=p(np.array(0)))),
    "a nested list for a slice": (ValueError, lambda p: p(F4).__setitem__(slice(1), [[4]])),
    "a list for one element": (ValueError, lambda p: p(F4.copy()).__setitem__((0, ...), [4])),
    "piecewise with a nested list": (TypeError, lambda p: np.piecewise(p(F4), [p(F4 < 0)], [[[4]], 7])),
    "piecewise with complex numbers": (TypeError, lambda p: np.piecewise(p(I1), [p(I1 > 0)], [4j, 7])),
    "piecewise with too many values": (ValueError, lambda p: np.piecewise(p(F4), [p(F4 < 0)], [F4, 7])),
    "putmask of large integers in a list": (OverflowError, lambda p: np.putmask(p(I1.copy()), p(I1 > 0), [300])),
    "put of large integers in a list": (OverflowError, lambda p: np.put(p(I1.copy()), [1], [300])),
    "insert of large integers in a list": (OverflowError, lambda p: np.insert(p(I1[0]), [0], [300])),
    "put_along_axis of large integers in a list": (
        OverflowError,
        lambda p: np.put_along_axis(p(I1.copy()), p(np.array([[0], [1]])), [[300]], 1),
    ),
    "item with too few indices": (ValueError, lambda p: p(np.zeros((2, 2, 2))).item(0, 1)),
    "int of a complex number": (TypeError, lambda p: int(p(np.array(1j)))),
    "conjugate of dates": (TypeError, lambda p: p(DATES).conj()),
    "partition by an empty list": (TypeError, lambda p: np.partition(p(F4), [])),
    "argpartition by an empty array of floats": (TypeError, lambda p: np.argpartition(p(F4), np.zeros(0))),
    "fill with a list": (ValueError, lambda p: p(F4.copy()).fill([1.0])),
    "fill with an array of one element": (ValueError, lambda p: p(F4.copy()).fill(np.ones(1))),
    "argpartition by a float": (TypeError, lambda p: np.argpartition(p(F4), 1.0)),
    "isposinf of dates": (TypeError, lambda p: np.isposinf(p(DATES))),
    "gradient of bools": (TypeError, lambda p: np.gradient(p(BOOLS))),
    "where with two arguments": (ValueError, lambda p: np.where(p(BOOLS), 1)),
    "pad by statistics of nothing": (ValueError, lambda p: np.pad(p(F4), 1, "maximum", stat_length=0)),
    "bincount with complex weights": (TypeError, lambda p: np.bincount(p(np.arange(3)), p(np.ones(3, complex)))),
    "polymul of matrices": (ValueError, lambda p: np.polymul(p(I1), [1, 2])),
    "polyfit of two lengths": (TypeError, lambda p: np.polyfit(p(F4), p(F4[:3]), 1)),
    "vander of a negative number": (ValueError, lambda p: np.vander(p(F4), -1)),
    "concatenate without casts": (TypeError, lambda p: np.concatenate([p(F4), p(I1[0])], casting="no")),
    "zeros_like of an unknown order": (ValueError, lambda p: np.zeros_like(p(F4), order="X")),
}


def leaves(x: Any) -> list[Any]:
    return [y for item in x for y in leaves(item)] if isinstance(x, (tuple, list)) else [x]


def skip_without(backend: str, dtype: Any) -> None:
    if dtype is not None and not load(backend).has_dtype(np.dtype(dtype)):
        pytest.skip(f"{backend} has no arrays of {dtype}")


def on(backend: str, x: np.ndarray) -> st.ShardedTensor:
    skip_without(backend, x.dtype)
    return put(x, backend, (3,))


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_those_of_numpy(name: str, backend: str) -> None:
    call = RESULTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A singular matrix has none, and casts lose parts.
        wanted = leaves(call(np.asarray))
        for y in wanted:
            skip_without(backend, getattr(y, "dtype", None))
        found = leaves(call(lambda x: on(backend, np.asarray(x))))
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        if isinstance(y, (bool, np.dtype)):
            assert x == y
            continue
        assert isinstance(x, st.ShardedTensor)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        number = complex if y.dtype.kind == "c" else float
        np.testing.assert_allclose(np.asarray(x).astype(number), y.astype(number), rtol=1e-12)


def test_functions_of_lines_that_differ_are_called(backend: str) -> None:
    """The layout of small results is kept for all functions whose results have one shape and dtype."""
    x = on(backend, I1)
    for factor in (2, 3, 5, 7):
        for axis in (0, 1):
            found = np.apply_along_axis(lambda line, factor=factor: line * factor, axis, x)
            np.testing.assert_array_equal(np.asarray(found), I1 * factor)
            assert (
                np.apply_along_axis(lambda line, factor=factor: line.sum() * factor, axis, x).tolist()
                == (I1.sum(axis=axis) * factor).tolist()
            )
    with pytest.raises(ZeroDivisionError):
        np.apply_along_axis(lambda line: 1 // 0, 0, x)


@pytest.mark.parametrize("length", [5, 5000])
def test_cumulative_sums_of_durations_as_numbers_are_those_of_the_numbers(length: int, backend: str) -> None:
    """NumPy's are durations, whatever the dtype, or a TypeError for long arrays."""
    x = on(backend, np.arange(length).astype("m8[s]"))
    for dtype in (float, int):
        found = st.cumulative_sum(x, dtype=dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), np.arange(length).cumsum())


@pytest.mark.parametrize("length", [5, 150])
def test_iteration_reads_elements_as_they_are_when_they_are_reached(length: int, backend: str) -> None:
    a, x = np.arange(float(length)), on(backend, np.arange(float(length)))
    read: list[list[float]] = []
    for target in (a, x):
        read.append([])
        for i, element in enumerate(target):
            read[-1].append(float(element))
            if i % 3 == 0 and i + 1 < length:
                target[i + 1] = 2 * element
    assert read[0] == read[1]
    elements = list(x)
    x += 1
    assert [float(e) for e in elements] == a.tolist()
    for e, single in zip(elements, (x - 1), strict=True):
        assert (e.shape, e.dtype, e.sharding) == (single.shape, single.dtype, single.sharding)
    elements[0] += 1  # It is a value of its own.
    assert float(x[0]) == a[0] + 1


def test_nanquantiles_of_nothing_have_the_shape_of_the_quantiles(backend: str) -> None:
    """NumPy's have that of one quantile."""
    for x in (np.zeros((0, 3)), np.zeros((0, 3), int)):
        found = np.nanquantile(on(backend, x), np.full((2, 2), 0.5))
        assert found.shape == (2, 2)
        assert np.isnan(np.asarray(found)).all()


@pytest.mark.parametrize("function", [np.std, np.var])
def test_spreads_of_float16_into_float32_are_not_rounded_to_float16(function: Any, backend: str) -> None:
    """NumPy rounds the mean to float16 only."""
    out = on(backend, np.zeros((), np.float32))
    function(on(backend, F4.astype(np.float16)), out=out)
    np.testing.assert_allclose(np.asarray(out), function(F4), rtol=1e-6)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_numpy(name: str, backend: str) -> None:
    error, call = ERRORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error):
            call(np.asarray)
        with pytest.raises(error):
            call(lambda x: on(backend, np.asarray(x)))


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (300, 300)])
def test_a_diagonal_filled_with_no_values_is_unchanged(shape: tuple[int, int]) -> None:
    values = np.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    for none in ([], np.zeros((0, 2)), st.zeros(0)):
        x = put(values.copy(), "numpy")
        np.fill_diagonal(x, none)
        np.fill_diagonal(x.T, none, wrap=True)
        np.testing.assert_array_equal(x, values)

        @st.jit
        def filled(a: Any, none: Any = none) -> Any:
            copy = a + 0
            np.fill_diagonal(copy, none)
            return copy

        np.testing.assert_array_equal(filled(x), values)


def test_indices_beyond_int64_are_out_of_range() -> None:
    values = np.arange(6).reshape(2, 3)
    for x in (st.asarray(values), put(values.copy(), "numpy", (2,))):
        for mode in ("raise", "clip", "wrap"):
            for index in (2**63, [1, 2**63], 2**64 - 1):
                most = index[1] if isinstance(index, list) else index
                with pytest.raises(OverflowError, match=f"put: index {most} is out of range"):
                    np.put(x, index, 9, mode=mode)
                with pytest.raises(OverflowError, match=f"take: index {most} is out of range"):
                    np.take(x, index, mode=mode)
                with pytest.raises(OverflowError, match=f"take: index {most} is out of range"):
                    np.take(x, index, axis=1, mode=mode)
            with pytest.raises(OverflowError, match=f"choose: index {2**63} is out of range"):
                np.choose([2**63], [x[0], x[1]], mode=mode)
        np.testing.assert_array_equal(x, values)
        assert int(np.take(x, np.array(4, "uint64"))) == 4


def test_iterators_and_ends_that_are_no_numbers_are_named() -> None:
    x = st.asarray(F4)
    calls: dict[str, Callable[[], Any]] = {
        "polyval: p is a list_iterator": lambda: st.polyval(iter([1, 2]), x),
        "average: weights is a list_iterator": lambda: np.average(x, axis=0, weights=iter([1, 2])),
        "tensordot: axes has an iterator": lambda: np.tensordot(x, x, axes=[iter([0]), iter([0])]),  # type: ignore
        "interp: left is 'a'; wanted a number": lambda: np.interp(x, [0, 1], [2, 3], left="a"),
        r"interp: right is \[1\]; wanted a number": lambda: np.interp(x, [0, 1], [2, 3], right=[1]),
    }
    for message, call in calls.items():
        with pytest.raises(st.ArgumentTypeError, match=message):
            call()


def test_repetitions_beyond_the_address_space_are_a_memory_error() -> None:
    x = st.asarray(np.arange(6).reshape(2, 3))
    for repeats, axis in ((10**19, None), (10**19, 0), ([2**62, 2**62], 0), (2**62, 1)):
        with pytest.raises(st.DeviceMemoryError, match="repeat: the result needs"):
            np.repeat(x, repeats, axis=axis)


def test_the_indices_of_a_diagonal_are_one_array_as_in_numpy(backend: str) -> None:
    x = put(np.zeros((4, 4)), backend, (2,))
    for index, *others in (st.diag_indices(4, 3), np.diag_indices_from(x), st.diag_indices_from(np.zeros((4, 4)))):
        index[0] = 3
        assert [y.tolist() for y in others] == [[3, 1, 2, 3]] * len(others)


@pytest.mark.parametrize("number", [True, 2, 1.5, 2j])
@pytest.mark.parametrize("name", ["zeros_like", "ones_like", "empty_like", "full_like"])
def test_numbers_are_prototypes(name: str, number: Any) -> None:
    def like(x: Any, xp: Any) -> Any:
        return xp.full_like(x, 1) if name == "full_like" else getattr(xp, name)(x)

    wanted = like(number, np)
    for found in (like(number, st), st.jit(lambda x: like(x, st))(number)):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert name == "empty_like" or found.item() == wanted.item()
