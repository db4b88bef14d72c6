"""Functions that order, search, count or select elements, against NumPy, on arrays of all kinds in all layouts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor import P
from shardtensor.functions.algorithms import first_device
from tests.layouts import assert_same, everywhere, mesh_of, meshes, put, specs
from tests.operands import values

DTYPES = ["bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64", "complex64", "complex128"]
REAL = [d for d in DTYPES if d[0] != "c"]
NUMBERS = ["int8", "int64", "float32", "float64"]


@some.composite
def arrays(draw: Any, dtypes: list[str] = DTYPES, min_dims: int = 1, max_dims: int = 4) -> np.ndarray:
    """Up to four dimensions with sides up to 40, with infinities and NaN, in any memory order."""
    sides = some.one_of(some.integers(0, 7), some.integers(0, 40))
    shape = draw(some.lists(sides, min_size=min_dims, max_size=max_dims))
    while math.prod(shape) > 20_000:
        shape[shape.index(max(shape))] //= 2
    x = values(draw(some.sampled_from(dtypes)), math.prod(shape), draw(some.integers(0, 99))).reshape(shape)
    order = draw(some.sampled_from(["C", "F", "reversed"]))
    return np.asfortranarray(x) if order == "F" else x[::-1] if order == "reversed" and shape else x


def axis_of(data: Any, x: np.ndarray) -> int:
    return data.draw(some.integers(-x.ndim, x.ndim - 1))


def axes_of(data: Any, x: np.ndarray) -> Any:
    chosen = some.lists(some.integers(0, x.ndim - 1), min_size=1, unique=True).map(tuple) if x.ndim else some.none()
    return data.draw(some.one_of(some.none(), chosen))


Check = Callable[[Any, Callable[[np.ndarray], Any]], None]
CHECKS: dict[str, Check] = {}
"""By name a function of hypothesis's data, and of a function that places an array on devices."""


def checks(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@checks
def sort(data: Any, put: Any) -> None:
    x = data.draw(arrays())
    axis, stable = axis_of(data, x), data.draw(some.booleans())
    ordered = np.sort(x, axis=axis, stable=True)
    assert_same(st.sort(put(x), axis=axis, stable=stable), ordered, exact=True)
    assert_same(st.sort(put(x), axis=axis, descending=True), np.flip(ordered, axis=axis), exact=True)
    assert_same(st.sort(put(x), axis=None), np.sort(x, axis=None, stable=True), exact=True)
    signs = np.signbit(np.sort(x, axis=axis, stable=True)) if x.dtype.kind == "f" else None
    if signs is not None:
        numbers = ~np.isnan(ordered)
        np.testing.assert_array_equal(np.signbit(st.sort(put(x), axis=axis))[numbers], signs[numbers])


@checks
def argsort(data: Any, put: Any) -> None:
    x = data.draw(arrays())
    axis = axis_of(data, x)
    assert_same(st.argsort(put(x), axis=axis), np.argsort(x, axis=axis, stable=True), exact=True)
    last = x.shape[axis] - 1
    wanted = last - np.flip(np.argsort(np.flip(x, axis=axis), axis=axis, stable=True), axis=axis)
    assert_same(st.argsort(put(x), axis=axis, descending=True), wanted, exact=True)
    assert_same(st.argsort(put(x), axis=None), np.argsort(x, axis=None, stable=True), exact=True)


@checks
def topk(data: Any, put: Any) -> None:
    x = data.draw(arrays())
    axis = axis_of(data, x)
    k = data.draw(some.integers(0, x.shape[axis]))
    order = st.argsort(x, axis=axis, descending=True)
    wanted = np.take(np.asarray(order), range(k), axis=axis)
    found, indices = st.topk(put(x), k, axis=axis)
    assert_same(indices, wanted, exact=True)
    assert_same(found, np.take_along_axis(x, wanted, axis), exact=True)


@checks
def partition(data: Any, put: Any) -> None:
    x = data.draw(arrays(REAL))
    axis = axis_of(data, x)
    if not x.shape[axis]:
        return
    k = data.draw(some.integers(0, x.shape[axis] - 1))
    ordered = np.sort(x, axis=axis)
    for found in (
        st.partition(put(x), k, axis=axis),
        st.take_along_axis(put(x), st.argpartition(put(x), k, axis=axis), axis=axis),
    ):
        assert_same(st.sort(found, axis=axis), ordered, exact=True)
        assert_same(st.take(found, k, axis=axis), np.take(ordered, k, axis=axis), exact=True)
        rows = np.moveaxis(np.asarray(found), axis, -1)
        kth = rows[..., k : k + 1]
        assert not (rows[..., :k] > kth).any()
        assert not (rows[..., k:] < kth).any()


@checks
def lexsort(data: Any, put: Any) -> None:
    x = data.draw(arrays(["int8", "float32"]))
    axis = axis_of(data, x)
    keys = [x, np.flip(x), x % 3]
    assert_same(st.lexsort([put(key) for key in keys], axis=axis), np.lexsort(keys, axis=axis), exact=True)


@checks
def searchsorted(data: Any, put: Any) -> None:
    dtype = data.draw(some.sampled_from(DTYPES))
    x = np.sort(data.draw(arrays([dtype])), axis=None)
    v = data.draw(arrays([dtype], 0))
    for side in ("left", "right"):
        assert_same(st.searchsorted(put(x), put(v), side=side), np.searchsorted(x, v, side=side), exact=True)
    mixed = np.random.default_rng(0).permutation(x)
    order = np.argsort(mixed, stable=True)
    assert_same(
        st.searchsorted(put(mixed), put(v), sorter=put(order)), np.searchsorted(mixed, v, sorter=order), exact=True
    )


@checks
def isin(data: Any, put: Any) -> None:
    x, y = data.draw(arrays(min_dims=0)), data.draw(arrays(min_dims=0, max_dims=2))
    assert_same(st.isin(put(x), put(y)), np.isin(x, y), exact=True)
    assert_same(st.isin(put(x), y, invert=True), np.isin(x, y, invert=True), exact=True)


@checks
def unique(data: Any, put: Any) -> None:
    x = data.draw(arrays([d for d in DTYPES if d != "float16"], 0))  # NumPy sorts long arrays of them wrongly.
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(some.booleans()):
            patch.setattr(first_device, "GATHERED", 0)
        unique_of(x, data, put)


def unique_of(x: Any, data: Any, put: Any) -> None:
    for found, wanted in zip(st.unique_all(put(x)), np.unique_all(x), strict=True):
        assert_same(found, wanted, exact=True)
    for found, wanted in zip(st.unique_counts(put(x)), np.unique_counts(x), strict=True):
        assert_same(found, wanted, exact=True)
    numbers = np.nan_to_num(x)  # The order of several NaN is unspecified, and so are their indices.
    for found, wanted in zip(st.unique_inverse(put(numbers)), np.unique_inverse(numbers), strict=True):
        assert_same(found, wanted, exact=True)
    assert_same(st.unique_values(put(x)), np.unique(x, equal_nan=False), exact=True)
    flags = [data.draw(some.booleans()) for _ in range(3)]
    found, wanted = st.unique(put(x), *flags), np.unique(x, *flags)
    for one, other in zip(*[a if any(flags) else (a,) for a in (found, wanted)], strict=True):
        assert_same(one, other, exact=True)


@checks
def nonzero(data: Any, put: Any) -> None:
    x = data.draw(arrays())
    for found, wanted in zip(st.nonzero(put(x)), np.nonzero(x), strict=True):
        assert_same(found, wanted, exact=True)
    assert_same(st.argwhere(put(x)), np.argwhere(x), exact=True)
    assert_same(st.flatnonzero(put(x)), np.flatnonzero(x), exact=True)
    axis = axes_of(data, x)
    assert_same(
        st.count_nonzero(put(x), axis=axis, keepdims=True), np.count_nonzero(x, axis=axis, keepdims=True), exact=True
    )


@checks
def take(data: Any, put: Any) -> None:
    x = data.draw(arrays())
    axis = axis_of(data, x)
    n = x.shape[axis]
    shape = data.draw(some.lists(some.integers(0, 5), max_size=2)) if n else [0]
    indices = np.random.default_rng(data.draw(some.integers(0, 9))).integers(-max(n, 1), max(n, 1), shape)
    assert_same(st.take(put(x), put(indices), axis=axis), np.take(x, indices, axis=axis), exact=True)
    if n:
        for mode in ("wrap", "clip"):
            assert_same(
                st.take(put(x), indices * 3, axis=axis, mode=mode),
                np.take(x, indices * 3, axis=axis, mode=mode),
                exact=True,
            )
    if x.size:
        assert_same(st.take(put(x), indices % x.size), np.take(x, indices % x.size), exact=True)
    order = np.argsort(x, axis=axis)
    assert_same(st.take_along_axis(put(x), put(order - n), axis=axis), np.take_along_axis(x, order, axis), exact=True)


@checks
def diff(data: Any, put: Any) -> None:
    x = data.draw(arrays(["bool", "uint16", "int64", "float32", "complex128"]))
    axis, n = axis_of(data, x), data.draw(some.integers(0, 3))
    with np.errstate(all="ignore"):
        assert_same(st.diff(put(x), axis=axis, n=n), np.diff(x, axis=axis, n=n), exact=True)
        if x.dtype.kind != "b":
            ends = {"prepend": put(x), "append": 1}
            assert_same(
                st.diff(put(x), axis=axis, n=n, **ends), np.diff(x, axis=axis, n=n, prepend=x, append=1), exact=True
            )


@checks
def quantiles(data: Any, put: Any) -> None:
    x = np.clip(data.draw(arrays(NUMBERS)), -100, 100)  # Between infinities, interpolation depends on its formula.
    axis, keepdims = axes_of(data, x), data.draw(some.booleans())
    if 0 in x.shape:
        return
    for name in ("median", "nanmedian"):
        found = getattr(st, name)(put(x), axis=axis, keepdims=keepdims)
        assert_same(found, getattr(np, name)(x, axis=axis, keepdims=keepdims))
    q: Any = data.draw(some.sampled_from([0.3, [0.25, 0.5, 1], np.array([[0.1, 0], [0.7, 0.9]])]))
    method = data.draw(some.sampled_from(METHODS))
    params = {"axis": axis, "keepdims": keepdims, "method": method}
    assert_same(st.quantile(put(x), q, **params), np.quantile(x, q, **params))
    q = np.multiply(np.ravel(q), 100)
    assert_same(st.percentile(put(x), q, **params), np.percentile(x, q, **params))
    assert_same(st.nanpercentile(put(x), q, **params), np.nanpercentile(x, q, **params))


METHODS = [
    "linear", "lower", "higher", "midpoint", "nearest", "inverted_cdf", "averaged_inverted_cdf", "closest_observation",
    "interpolated_inverted_cdf", "hazen", "weibull", "median_unbiased", "normal_unbiased",
]  # fmt: skip


@checks
def nan_reductions(data: Any, put: Any) -> None:
    x = data.draw(arrays(["bool", "int64", "float32", "float64"]))
    x = np.where(np.isinf(x), 1, x % 100 if x.dtype.kind == "i" else x).astype(x.dtype)  # Huge integers cancel out.
    axis, keepdims = axes_of(data, x), data.draw(some.booleans())
    for name in ("nansum", "nanprod", "nanmean", "nanvar", "nanstd", "nanmax", "nanmin"):
        if name in ("nanmax", "nanmin") and 0 in x.shape:
            continue
        found = getattr(st, name)(put(x), axis=axis, keepdims=keepdims)
        assert_same(found, getattr(np, name)(x, axis=axis, keepdims=keepdims))
    single = {"axis": axis, "dtype": "float32"}
    for name, params in (("nanmean", {}), ("nanvar", {"ddof": 1}), ("nanstd", {"correction": 2})):
        assert_same(getattr(st, name)(put(x), **single, **params), getattr(np, name)(x, **single, **params))
    along = axis_of(data, x)
    assert_same(st.nancumsum(put(x), axis=along), np.nancumsum(x, axis=along))
    assert_same(st.nancumprod(put(x)), np.nancumprod(x))
    if x.size and not np.isnan(x).all(axis=along).any():
        assert_same(st.nanargmax(put(x), axis=along), np.nanargmax(x, axis=along), exact=True)
        assert_same(st.nanargmin(put(x), axis=along), np.nanargmin(x, axis=along), exact=True)


@checks
def histograms(data: Any, put: Any) -> None:
    x = data.draw(arrays(NUMBERS, 0, 2))
    x = x % 100 if x.dtype.kind == "i" else x  # Between huge integers there are no numbers.
    weights = values("float32", x.size, 5).reshape(x.shape)
    weights = np.nan_to_num(weights, posinf=1, neginf=-1)
    calls: list[dict[str, Any]] = [
        {"bins": [-3, -1, 0.5, 8]}, {"range": (-3, 8)}, {"bins": 5, "range": (0, 7), "density": True},
        {"bins": np.array([-2.0, 0, 1]), "weights": weights},
    ]  # fmt: skip
    if np.isfinite(x).all():
        calls.append({"bins": 7})
    for params in calls:
        mine = {**params, **({"weights": put(weights)} if "weights" in params else {})}
        for found, wanted in zip(st.histogram(put(x), **mine), np.histogram(x, **params), strict=True):
            assert_same(found, wanted)
    for bins, right in ((np.array([-3.0, 0, 2]), True), (np.array([2, 0, -3]), False)):
        assert_same(st.digitize(put(x), bins, right=right), np.digitize(x, bins, right=right), exact=True)
    if x.dtype.kind == "i":
        counted = np.abs(x.ravel().astype("int64")) % 11
        assert_same(st.bincount(put(counted), minlength=3), np.bincount(counted, minlength=3), exact=True)
        assert_same(st.bincount(put(counted), put(weights.ravel())), np.bincount(counted, weights.ravel()))


def sweep(name: str, backend: str, examples: int) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        mesh = data.draw(meshes(backend))
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            CHECKS[name](data, lambda x: st.device_put(x, st.NamedSharding(mesh, data.draw(specs(mesh, x.ndim)))))

    run()


@pytest.mark.parametrize("backend", ["numpy", "checked"])
@pytest.mark.parametrize("name", CHECKS)
def test_as_numpy(name: str, backend: str) -> None:
    sweep(name, backend, 6)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["numpy", "checked"])
@pytest.mark.parametrize("name", CHECKS)
def test_as_numpy_at_length(name: str, backend: str) -> None:
    sweep(name, backend, 300)


# -- layouts and transfers -------------------------------------------------------------------------


X = np.array([[3.0, np.nan, 1.0], [2.0, 0.0, 3.0], [-0.0, 5.0, 2.0], [0.0, 7.0, 7.0]])

LAYOUTS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "sort": (lambda x: st.sort(x, axis=1), P("x")),
    "sort along a split dimension": (lambda x: st.sort(x, axis=0), P("x")),
    "sort of a split line": (lambda x: st.sort(x[:, 1], descending=True), P("x")),
    "argsort of a flat array": (lambda x: st.argsort(x, axis=None), P("x")),
    "topk": (lambda x: st.topk(x, 2)[1], P("x")),
    "median": (lambda x: st.median(x, axis=1), P("x")),
    "median along a split dimension": (lambda x: st.median(x, axis=0), P("x")),
    "quantile": (lambda x: st.quantile(x, [0.1, 0.2], axis=1), P(None, "x")),
    "searchsorted of a split array": (lambda x: st.searchsorted(x[:, 1], np.ones(2)), P()),
    "searchsorted of split values": (lambda x: st.searchsorted(np.arange(3.0), x), P("x")),
    "isin": (lambda x: st.isin(x, np.arange(3.0)), P("x")),
    "nonzero": (lambda x: st.nonzero(x)[0], P("x")),
    "unique": (lambda x: st.unique(x), P("x")),
    "inverse": (lambda x: st.unique_inverse(x)[1], P("x")),
    "take": (lambda x: st.take(x, [0, 2], axis=1), P("x")),
    "take of rows": (lambda x: st.take(x, [0, 2], axis=0), P("x")),
    "diff": (lambda x: st.diff(x, axis=0), P("x")),
    "count_nonzero": (lambda x: st.count_nonzero(x, axis=0), P()),
    "histogram": (lambda x: st.histogram(x, range=(0, 3))[0], P()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sharding_and_transfers_are_those_of_separate_memories(name: str) -> None:
    function, spec = LAYOUTS[name]
    sent = []
    for backend in ("numpy", "checked"):
        with st.transfers() as log:
            assert function(put(X, backend, (2, 3), P("x"))).sharding.spec == spec
        sent.append(log.bytes)
    assert sent[0] == sent[1]


def test_dimensions_that_are_not_split_move_nothing(backend: str) -> None:
    x = put(X, backend, (2, 3), P("x"))
    with st.transfer_guard("disallow"):
        for function in (st.sort, st.argsort, st.median, st.nanmax, st.diff):
            function(x, axis=1)
        st.take_along_axis(x, st.argsort(x, axis=1), axis=1)
        st.isin(x, 3.0)
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="sort"):
        st.sort(st.reshape(x, (-1,)))


# -- one at a time ---------------------------------------------------------------------------------


@everywhere
def test_methods_are_those_of_arrays(backend: str) -> None:
    host, order = X.copy(), np.argsort(X[:, 1])
    x = put(X, backend, (2, 3), P("x", "y"))
    assert_same(x.argsort(axis=0), host.argsort(axis=0, kind="stable"), exact=True)
    assert_same(x.take([1, 0], axis=1), host.take([1, 0], axis=1), exact=True)
    for found, wanted in zip(x.nonzero(), host.nonzero(), strict=True):
        assert_same(found, wanted, exact=True)
    assert_same(
        x[:, 1].searchsorted(st.asarray([2.0, 9.0]), sorter=order),
        host[:, 1].searchsorted([2.0, 9.0], sorter=order),
        exact=True,
    )
    view = x[1:]
    x.sort(axis=0)
    host.sort(axis=0)
    assert_same(x, host, exact=True)
    assert_same(view, host[1:], exact=True)
    view.sort()
    host[1:].sort()
    assert_same(x, host, exact=True)


def test_numpys_functions_take_tensors(backend: str) -> None:
    x = put(X, backend, (2, 3), P("x"))
    for function in (
        lambda x: np.sort(x, 0), lambda x: np.argsort(x, axis=1), lambda x: np.take(x, [0, 1], 1),
        lambda x: np.nonzero(x)[1], lambda x: np.count_nonzero(x, axis=0), lambda x: np.searchsorted(x[1:, 1], 5.0),
        lambda x: np.unique(x), lambda x: np.unique_counts(x)[1], lambda x: np.isin(x, [3, 2]), lambda x: np.diff(x, 1, 0),
        lambda x: (np if x is X else st).diff(x, 2, 0),
        lambda x: np.median(x, 0), lambda x: np.percentile(x, [10, 20], 1), lambda x: np.nanmax(x, 1),
        lambda x: np.nanvar(x, 0, None, None, 1), lambda x: np.histogram(x, 4, (0, 3))[0],
        lambda x: np.histogram(x, range=(0, 3), weights=x)[0], lambda x: np.digitize(x, [0, 2]),
        lambda x: np.bincount(np.nan_to_num(np.asarray(x)).astype(int).ravel()) if x is X else np.bincount(
            st.astype(st.where(st.isnan(x), 0, x), int).reshape(-1)),
        lambda x: np.lexsort((x[0], x[1])), lambda x: np.argwhere(x), lambda x: np.flatnonzero(x),
        lambda x: np.take_along_axis(x, np.argsort(x, axis=1), 1), lambda x: np.nancumsum(x, axis=0),
    ):  # fmt: skip
        assert_same(function(x), function(X))


@everywhere
def test_inside_of_maps(backend: str) -> None:
    host = np.array([5, 3, 3, 1, 9, 3, 1, 1])
    devices = st.devices(backend)[:2]

    def body(x: Any) -> tuple[Any, ...]:
        found = st.unique_all(x)
        return (
            st.sort(x), st.argsort(x), st.topk(x, 2)[0], st.searchsorted(st.sort(x), x), st.isin(x, x[:1]),
            st.nonzero(x - 3)[0], *found, st.take(x, st.argsort(x)), st.take_along_axis(x, st.argsort(x)), st.diff(x),
            st.median(x), st.quantile(x, 0.5), st.nanmax(x), st.nanvar(st.divide(x, 2)), st.bincount(x),
            st.histogram(x, 3)[0], st.count_nonzero(x), st.lexsort([x, x]),
        )  # fmt: skip

    for part, results in zip(np.split(host, 2), st.pmap(body, st.shard(host, devices=devices)), strict=True):
        for found, wanted in zip(results, body(st.device_put(part, devices[0])), strict=True):
            assert_same(found, np.asarray(wanted))
    x = st.device_put(host.reshape(4, 2), st.NamedSharding(mesh_of((2,), backend), P("x")))
    mapped = st.shard_map(lambda x: st.sort(x, axis=1), mesh=x.sharding.mesh, in_specs=P("x"), out_specs=P("x"))
    assert_same(mapped(x), np.sort(host.reshape(4, 2), axis=1), exact=True)


def test_results_whose_shape_depends_on_elements_are_not_inferred() -> None:
    x = st.ShapeDtypeStruct((8,), "int64")
    for function in (st.nonzero, st.argwhere, st.unique, st.unique_all, st.unique_values, st.bincount):
        with pytest.raises(st.ConcretizationError):
            st.eval_shape(function, x)
    assert st.eval_shape(lambda x: st.histogram(x, 5, (0, 1))[0], x).shape == (5,)
    assert [leaf.shape for leaf in st.eval_shape(lambda x: st.topk(x, 3), x)] == [(3,), (3,)]
    known = st.asarray([0, 3, 0, 2])
    assert st.eval_shape(lambda: st.nonzero(known)[0].tolist()) == [1, 3]


def test_results_are_independent() -> None:
    x = put(np.array([3, 1, 2]), "numpy", (2, 3), P("x"))
    first, kept = st.take(x, 0), st.unique(x)
    x[...] = 0
    assert first.item() == 3
    assert kept.tolist() == [1, 2, 3]


ERRORS: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda x: st.sort(x, axis=2), st.AxisError, "sort: axis 2 is out of range for 2 dimensions"),
    (lambda x: st.argsort(x[0, 0]), st.AxisError, "argsort: axis -1"),
    (lambda x: st.topk(x, 4), st.ArgumentError, "topk: k is 4; wanted 0 to 3"),
    (lambda x: st.partition(x, 3), st.ArgumentError, "partition: kth 3 is out of bounds for 3 elements"),
    (lambda x: st.lexsort([]), st.ShapeError, "lexsort: keys"),
    (lambda x: st.lexsort([x, x[0]]), st.ShapeError, "lexsort: keys"),
    (lambda x: st.searchsorted(x, 1.0), st.ShapeError, "searchsorted: x1 has 2 dimensions; wanted one"),
    (lambda x: st.searchsorted(x[0], 1.0, side="middle"), st.ArgumentError, "searchsorted: side is 'middle'"),
    (lambda x: st.nonzero(x[0, 0]), st.ShapeError, "nonzero: x is 0-d"),
    (lambda x: st.take(x, [3], axis=1), st.IndexingError, "index 3 is out of bounds"),
    (lambda x: st.take(x, [0.5], axis=1), st.ArgumentTypeError, "take: indices have dtype float64; wanted integers"),
    (lambda x: st.take(x, [0], axis=1, mode="no"), st.ArgumentError, "take: mode is 'no'"),
    (lambda x: st.take_along_axis(x, np.array([[3]])), st.IndexingError, "take_along_axis: .*out of bounds"),
    (lambda x: st.take_along_axis(x, np.array([0])), st.ShapeError, "take_along_axis: x has 2 dimensions and indices"),
    (lambda x: st.take_along_axis(x, x), st.ArgumentTypeError, "take_along_axis: indices have dtype float64"),
    (lambda x: st.diff(x, n=-1), st.ArgumentError, "diff: n is -1"),
    (lambda x: st.diff(x[0, 0]), st.ShapeError, "diff: x is 0-d"),
    (lambda x: st.quantile(x, 1.5), st.ArgumentError, r"quantile: q is 1.5; wanted numbers from 0 to 1"),
    (lambda x: st.percentile(x, [50, 101]), st.ArgumentError, r"percentile: q is \[50, 101\]"),
    (lambda x: st.quantile(x, 0.5, method="no"), st.ArgumentError, "quantile: method is 'no'"),
    (lambda x: st.quantile(x * 1j, 0.5), st.ArgumentTypeError, "quantile: does not take complex128"),
    (lambda x: st.var(x, ddof=1, correction=1), st.ArgumentError, "^var: ddof=1 and correction=1 are the same"),
    (lambda x: st.std(x, ddof="1"), st.ArgumentTypeError, "^std: correction is '1'; wanted a real number"),
    (lambda x: st.nanvar(x, ddof=1, correction=1), st.ArgumentError, "nanvar: ddof=1 and correction=1 are the same"),
    (lambda x: st.nanmean(x, dtype="int8"), st.ArgumentTypeError, "nanmean: dtype is int8 for elements of float64"),
    (lambda x: st.nanargmax(x * math.nan), st.ArgumentError, "nanargmax: all elements along axis None are NaN"),
    (lambda x: st.nanmax(x[:0], axis=0), st.ShapeError, "max: x has shape"),
    (lambda x: st.bincount(x), st.ShapeError, "bincount: x has 2 dimensions"),
    (lambda x: st.bincount(x[0]), st.ArgumentTypeError, "bincount: x has dtype float64; wanted integers"),
    (lambda x: st.bincount(st.asarray([1, -1])), st.ArgumentError, "bincount: x has negative elements"),
    (lambda x: st.bincount(st.asarray([1]), np.ones(2)), st.ShapeError, "bincount: weights has shape"),
    (lambda x: st.histogram(x), st.ArgumentError, "histogram: the range .* is not finite"),
    (lambda x: st.histogram(x, 0, (0, 1)), st.ArgumentError, "histogram: bins is 0"),
    (lambda x: st.histogram(x, "auto"), st.ArgumentError, "histogram: bins='auto'"),
    (lambda x: st.histogram(x, [2, 1]), st.ArgumentError, "histogram: bins are edges that do not increase"),
    (lambda x: st.digitize(x, np.array([0, 2, 1])), st.ArgumentError, "digitize: bins neither increase nor decrease"),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS)
def test_errors_name_the_function(call: Any, kind: Any, words: str, backend: str) -> None:
    with pytest.raises(kind, match=words):
        call(put(X, backend, (2, 3), P("x")))


@everywhere
def test_long_arrays_of_half_precision(backend: str) -> None:
    """NumPy's default algorithm does not sort them correctly on some processors."""
    host = values("float16", 7128, 3)
    wide = host.astype("float32")
    x = put(host, backend, (2, 3), P("x"))
    assert_same(st.sort(x), np.sort(wide).astype("float16"), exact=True)
    assert_same(st.unique_values(x), np.unique(wide, equal_nan=False).astype("float16"), exact=True)
    for found, wanted in zip(st.unique(x, True, True, True), np.unique(wide, True, True, True), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_stable_sort_keeps_the_order_of_zeros() -> None:
    host = np.array([[0.0, -1, -0.0, 2, 0.0, -0.0], [-0.0, 0.0, 3, np.nan, -0.0, 1]])
    for axis in (0, 1):
        found = np.asarray(st.sort(put(host, "numpy", (2, 3), P(None, "x")), axis=axis))
        np.testing.assert_array_equal(np.signbit(found), np.signbit(np.sort(host, axis=axis, stable=True)))
