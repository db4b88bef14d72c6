"""NumPy's ufuncs on tensors: their arguments, several outputs, and their methods, against NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.draws import drawn
from tests.layouts import allocated, assert_equal, assert_same, everywhere, mesh_of, put

SPECS = [st.P("x"), st.P(None, "x")]
INTS = np.random.default_rng(0).integers(-4, 5, (5, 4))
FLOATS = INTS / 2
MASK = INTS > 0


def placed(backend: str, spec: st.P) -> Callable[[Any], st.ShardedTensor]:
    mesh = mesh_of((3,), backend)
    return lambda a: st.device_put(a, st.NamedSharding(mesh, spec))


RESULTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "reduce": (np.add.reduce, (FLOATS,)),
    "reduce axes": (lambda x: np.add.reduce(x, axis=(0, 1), keepdims=True), (FLOATS,)),
    "reduce all": (lambda x: np.add.reduce(x, axis=None), (INTS,)),
    "reduce to a dtype": (lambda x: np.multiply.reduce(x, axis=0, dtype="f4"), (INTS,)),
    "maximum to a dtype": (lambda x: np.maximum.reduce(x, dtype="f4"), (INTS,)),
    "reduce where": (lambda x, m: np.maximum.reduce(x, axis=1, where=m, initial=-9), (FLOATS, MASK)),
    "logical_and": (lambda x: np.logical_and.reduce(x, axis=1), (INTS,)),
    "logical_or": (lambda x: np.logical_or.reduce(x, axis=1, initial=True), (INTS,)),
    "logical_xor": (np.logical_xor.reduce, (INTS,)),
    "bitwise_xor": (lambda x: np.bitwise_xor.reduce(x, axis=1), (INTS,)),
    "bitwise_and where": (lambda x, m: np.bitwise_and.reduce(x, axis=0, where=m, initial=7), (INTS, MASK)),
    "bitwise_and unsigned": (lambda x, m: np.bitwise_and.reduce(x, where=m), (np.abs(INTS).astype("u1"), MASK)),
    "bitwise_xor of nothing": (lambda x: np.bitwise_xor.reduce(x[:0]), (INTS,)),
    "logaddexp": (np.logaddexp.reduce, (FLOATS,)),
    "hypot": (lambda x, m: np.hypot.reduce(x, axis=(0, 1), where=m), (FLOATS, MASK)),
    "maximum of nothing": (lambda x: np.maximum.reduce(x[:0], initial=3), (FLOATS,)),
    "reduce a scalar": (lambda x: np.add.reduce(x.sum()), (FLOATS,)),
    "accumulate": (lambda x: np.add.accumulate(x, axis=1), (INTS,)),
    "maximum.accumulate": (np.maximum.accumulate, (FLOATS,)),
    "subtract.accumulate": (lambda x: np.subtract.accumulate(x, axis=1), (FLOATS,)),
    "outer": (lambda x: np.multiply.outer(x, np.arange(3)), (FLOATS,)),
    "outer of a number": (lambda x: np.less.outer(2, x), (FLOATS,)),
    "outer of tensors": (lambda x: np.add.outer(x[:, 0], x[0]), (FLOATS,)),
    "reduceat": (lambda x: np.add.reduceat(x, [0, 3, 1, 2]), (FLOATS,)),
    "reduceat of rows": (lambda x: np.subtract.reduceat(x, [0, 2], axis=1), (FLOATS,)),
    "reduceat of bytes": (lambda x: np.add.reduceat(x, [0, 2], axis=1), (INTS.astype("i1"),)),
    "dtype": (lambda x: np.add(x, 1, dtype="f4"), (INTS,)),
    "signature": (lambda x: np.add(x, x, signature="ff->f"), (FLOATS,)),
    "matmul of a dtype": (lambda x: np.matmul(x, x.T, dtype="f4"), (INTS,)),
    "divmod": (lambda x: np.divmod(x, 3), (INTS,)),
    "divmod of floats": (lambda x: divmod(x, 1.5), (FLOATS,)),
    "modf": (np.modf, (np.array([[-np.inf, -0.0], [-2.5, np.nan]]),)),
    "frexp": (np.frexp, (FLOATS,)),
    "frexp of integers": (np.frexp, (INTS,)),
    "modf into two": (lambda x, o, p: np.modf(x, out=(o, p)), (FLOATS, FLOATS * 0, FLOATS * 0)),
    "modf of some into two": (
        lambda x, o, p, m: np.modf(x, out=(o, p), where=m),
        (FLOATS, FLOATS * 0, FLOATS * 0, MASK),
    ),
}

WRITES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "out": (lambda o, x: np.add(x, 1, out=o), (FLOATS * 0, FLOATS)),
    "out of another dtype": (lambda o, x: np.add(x, 1, out=o, casting="unsafe"), (INTS * 0, FLOATS)),
    "out where": (lambda o, x, m: np.divide(1, x, out=o, where=m), (FLOATS * 0 - 7, FLOATS, MASK)),
    "narrow out where": (lambda o, x, m: np.sqrt(x, o, where=m), ((FLOATS * 0 - 7).astype("f4"), FLOATS, MASK)),
    "arctanh where": (lambda o, x, m: np.arctanh(x, out=o, where=m), (FLOATS * 0, FLOATS / 9, MASK)),
    "bytes and a number where": (
        lambda o, x, m: np.multiply(x, 2, out=o, where=m),
        (np.zeros((5, 4), "u1"), np.abs(INTS).astype("u1"), MASK),
    ),
    "a half and a number where": (
        lambda o, x, m: np.divide(0.5, x, out=o, where=m),
        (np.zeros((5, 4), "f2"), INTS.astype("f2"), MASK & (INTS != 0)),
    ),
    "integer power where": (lambda o, x, m: np.power(2, x, out=o, where=m), (INTS * 0, INTS, MASK)),
    "reduce out": (lambda o, x: np.add.reduce(x, axis=0, out=o[0]), (FLOATS * 0, FLOATS)),
    "at": (lambda x: np.add.at(x, [0, 0, 3], 1.5), (FLOATS,)),
    "at places": (lambda x: np.add.at(x, ([0, 0, 3], [1, 1, 2]), [1.0, 2.0, 3.0]), (FLOATS,)),
    "at different places": (lambda x: np.multiply.at(x, [4, 0], 2), (INTS,)),
    "at of one operand": (lambda x: np.negative.at(x, [0, 0, 1]), (FLOATS,)),
    "at a slice": (lambda x: np.add.at(x, slice(1, 3), 1), (INTS,)),
    "at with rows": (lambda x: np.maximum.at(x, [0, 0, 0], [[1.0], [2], [0]]), (FLOATS,)),
}

ERRORS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "where without initial": (lambda x: np.maximum.reduce(x, where=x > 0), ValueError, "where needs initial"),
    "maximum of nothing": (lambda x: np.maximum.reduce(x[:0]), ValueError, "no elements"),
    "reduce by subtract": (np.subtract.reduce, TypeError, "numpy.subtract.reduce: has no sharded form"),
    "a mask of integers": (lambda x: np.add(x, 1, where=np.ones(4, int)), TypeError, "where has dtype int64"),
    "casting": (lambda x: np.add(x, 1, dtype="f4", casting="no"), TypeError, "casting rule 'no'"),
    "a lossy dtype": (lambda x: np.add(x, 1.5, dtype="i4"), TypeError, "Cannot cast"),
    "a lossy out": (lambda x: np.modf(x, out=(x, st.zeros((5, 4), dtype="i4"))), TypeError, "does not allow out"),
    "accumulate one operand": (np.sin.accumulate, ValueError, "binary functions"),
    "accumulate along no axis": (lambda x: np.add.accumulate(x, axis=2), st.AxisError, "axis 2"),
    "reduceat out of bounds": (lambda x: np.add.reduceat(x, [9]), IndexError, "index 9 is out of bounds"),
    "at out of bounds": (lambda x: np.add.at(x, [9], 1), IndexError, "out of bounds"),
    "at with too many indices": (lambda x: np.add.at(x, ([0], [0], [0]), 1), IndexError, "too many indices"),
    "at with a mask of another shape": (lambda x: np.add.at(x, np.ones(4, bool), 1), IndexError, "mask of shape"),
    "at with floats": (lambda x: np.add.at(x, [0.5], 1), IndexError, "wanted integers"),
    "at with too many values": (lambda x: np.add.at(x, [0, 1], np.ones(3)), ValueError, "values|broadcast|mismatch"),
    "an option without a form": (lambda x: np.add(x, 1, extobj=[]), TypeError, "extobj"),
}


@everywhere
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_numpys(name: str, spec: st.P, backend: str) -> None:
    call, arrays = RESULTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, found = call(*[a.copy() for a in arrays]), call(*map(placed(backend, spec), arrays))
    for a, b in zip(*[x if isinstance(x, tuple) else (x,) for x in (found, wanted)], strict=True):
        assert isinstance(a, st.ShardedTensor)
        assert_same(a, b)


def test_ufuncs_are_not_known_by_their_names() -> None:
    """Those of Numba's ``vectorize`` are named after any function, such as ``mean`` or ``sign``."""
    foreign = pytest.importorskip("numpy._core._rational_tests", reason="this NumPy has no ufuncs for tests")
    x = st.asarray(np.arange(6))
    assert (foreign.gcd.__name__, foreign.gcd is np.gcd) == ("gcd", False)
    for apply in (lambda: foreign.gcd(x, 4), lambda: foreign.gcd(x, 4, out=x), lambda: foreign.gcd.reduce(x)):
        with pytest.raises(TypeError, match=r"^gcd.*: is not a ufunc of NumPy, and has no sharded form here"):
            apply()
    assert_same(np.gcd(x, 4), np.gcd(np.arange(6), 4))


def test_ufuncs_of_scipy_are_operators() -> None:
    special = pytest.importorskip("scipy.special", reason="SciPy is not installed: see the extra `test`")
    host = np.linspace(0.1, 2.5, 7)
    for function in (special.expm1, special.log1p, special.round):
        found = function(st.asarray(host))
        assert isinstance(found, st.ShardedTensor)
        np.testing.assert_allclose(np.asarray(found), function(host), rtol=1e-15)


@everywhere
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_numpys(name: str, spec: st.P, backend: str) -> None:
    write, (array, *others) = WRITES[name]
    wanted, found = array.copy(), placed(backend, spec)(array)
    with np.errstate(all="raise"):  # What where= does not select is not computed.
        write(wanted, *others)
        write(found, *map(placed(backend, spec), others))
    assert_same(found, wanted)
    assert found.sharding.spec == spec


FEW: dict[str, Callable[[Any], None]] = {
    "the same element twice": lambda x: np.add.at(x, [5, 5], 1),
    "different elements": lambda x: np.add.at(x, [5, 6], 1),
    "of one operand": lambda x: np.negative.at(x, [5, -5, 5]),
    "maximum": lambda x: np.maximum.at(x, np.array([[5, 7], [5, 9]]), [[3], [2]]),
    "a slice": lambda x: np.subtract.at(x, slice(3, 9), 1),
    "a view": lambda x: np.add.at(x[::2], [5, 5], 1),
    "backwards": lambda x: np.add.at(x[::-1], [5, 5], 1),
    "columns": lambda x: np.add.at(x.reshape(2, -1), ([1, 1], [4, 4]), 1),
    "a column": lambda x: np.add.at(x.reshape(2, -1).T, ([4, 4], [1, 1]), 1),
    "rows of a column": lambda x: np.add.at(x.reshape(-1, 2), ([4, 4], slice(None)), 1),
}
"""Calls of `numpy.ufunc.at` of few elements."""

OF_VIEWS = frozenset(["a view", "backwards", "columns", "a column", "rows of a column"])
"""Those of elements of views, of which index arrays select by a copy where devices have memories of their own."""


@everywhere
@pytest.mark.parametrize("name", FEW)
def test_at_takes_memory_in_proportion_to_the_index(name: str, backend: str) -> None:
    if name in OF_VIEWS and backend != "numpy":
        pytest.skip(f"index arrays copy views on {backend}")
    host = (np.arange(1 << 20) % 120).astype(np.int8)
    mesh = mesh_of((3,), backend)
    for spec in (st.P("x"), st.P()):
        x, wanted = st.device_put(host, st.NamedSharding(mesh, spec)), host.copy()
        for _ in range(2):
            with allocated(backend) as peak:
                FEW[name](x)
            FEW[name](wanted)
        assert peak[0] < host.nbytes / 4, (spec, peak)
        assert_equal(x, wanted)


def test_at_in_a_program_takes_no_more_memory_than_a_write() -> None:
    x, peaks = st.device_put(np.zeros(1 << 20, np.int8), mesh_of((2,), "numpy")), []

    def write(x: Any) -> Any:
        x = x * 2
        x[[5, 6]] = 1
        return x

    def update(x: Any) -> Any:
        x = x * 2
        np.add.at(x, [5, 5], 1)
        return x

    for f in map(st.jit, (write, update)):
        f(x)
        with allocated("numpy") as peak:
            f(x)
        peaks += peak
    assert peaks[1] < peaks[0] + (1 << 16)


def any_index(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Any, ...]:
    """Draws an index with arrays, masks, slices, integers, new dimensions and an ellipsis."""
    index: list[Any] = []
    d = 0
    while d < len(shape):
        n, kind = shape[d], rng.integers(9)
        if kind < 3:
            index.append(rng.integers(-n, n, [(3,), (2, 3), (2, 1), (0,)][rng.integers(4)]))
        elif kind == 3:
            index.append(rng.integers(-n, n).item())
        elif kind == 4:
            index.append(slice(None, None, int(rng.choice([-2, -1, 1, 2]))))
        elif kind == 5:
            index.append(rng.random(n) < 0.5)
        elif kind == 6 and d + 1 < len(shape):
            index.append(rng.random(shape[d : d + 2]) < 0.4)
            d += 1
        elif kind == 7:
            index.append(None)
            continue
        elif Ellipsis not in [e for e in index if e is Ellipsis]:
            index.append(...)
            break
        else:
            continue
        d += 1
    return tuple(index)


def test_at_with_any_index_is_numpys() -> None:
    """Against the same elements one after the other: NumPy reads beyond values that it broadcasts to index arrays."""
    compared = 0
    for seed in range(drawn(4000, fast=150)):
        rng = np.random.default_rng(seed)
        shape = [(7,), (100,), (3, 4), (20, 30), (2, 3, 4), (6, 5, 10)][seed % 6]
        host, index = rng.integers(1, 50, shape), any_index(shape, rng)
        name = ("add", "multiply", "maximum", "subtract", "negative")[rng.integers(5)]
        ufunc, x = getattr(np, name), put(host, ("numpy", "checked")[seed % 2], (2,))
        places = np.arange(host.size).reshape(shape)
        try:
            places = places[index]
        except IndexError:
            with pytest.raises(st.IndexingError):
                ufunc.at(x, index, *(() if name == "negative" else (1,)))
            continue
        values = rng.integers(1, 5, [places.shape, (), places.shape[-1:]][rng.integers(3)])
        spread = np.broadcast_to(values, places.shape).ravel().tolist()
        for at, value in zip(np.ravel(places).tolist(), spread, strict=True):
            host.flat[at] = ufunc(host.flat[at], *(() if name == "negative" else (value,)))
        ufunc.at(x, index, *(() if name == "negative" else (values,)))
        assert_equal(x, host)
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do_and_leave_the_tensor_as_it_was(name: str, backend: str) -> None:
    call, kind, words = ERRORS[name]
    x = placed(backend, st.P("x"))(FLOATS)
    with pytest.raises(kind, match=words):
        call(x)
    assert_same(x, FLOATS)


def test_host_arrays_are_written_too() -> None:
    x, out = st.device_put(FLOATS, mesh_of((2,), "numpy")), FLOATS * 0
    assert np.add(x, 1, out=out, where=MASK) is out
    np.testing.assert_array_equal(out, np.where(MASK, FLOATS + 1, 0))
    assert np.add.reduce(x, axis=0, out=out[0]) is not None
    np.testing.assert_array_equal(out[0], FLOATS.sum(0))


def test_methods_keep_data_sharded() -> None:
    """`at` moves no element of the tensor; what needs a whole dimension moves the split to another one."""
    x = st.device_put(FLOATS, st.NamedSharding(mesh_of((4,), "numpy"), st.P("x")))
    with st.transfer_guard("disallow"):
        assert np.maximum.accumulate(x, axis=1).sharding == x.sharding
        assert np.add.reduceat(x, [0, 2], axis=1).sharding == x.sharding
    assert np.maximum.accumulate(x, axis=0).sharding == x.sharding
    assert np.subtract.accumulate(x, axis=0).sharding.spec == st.P(None, "x")


def test_inference_and_maps() -> None:
    x = st.device_put(FLOATS, mesh_of((2,), "numpy"))
    assert st.eval_shape(lambda x: np.hypot.reduce(x, axis=1), x).shape == (5,)
    found = st.smap(lambda a: st.sum(a, axis=1, where=a > 0), x, axes=[0])
    np.testing.assert_array_equal(np.asarray(found), FLOATS.sum(1, where=FLOATS > 0))


@everywhere
@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8", "float16", "float32", "float64", "complex128"])
def test_powers_are_those_of_numpys_operator(backend: str, dtype: str) -> None:
    """NumPy's ``**`` calls other functions for some exponents, which differ from `np.power` in dtypes and zeros."""
    values = [0.0, 1.0, 0.25, 3.0] if dtype != "float64" else [-np.inf, -2.0, -0.0, 0.0, 0.3, 3.0, np.inf, np.nan]
    x = np.asarray(values).astype(dtype)
    if dtype == "complex128":
        x = x + 1j * np.arange(x.size)
    placed = st.device_put(x, mesh_of((3,), backend))
    exact = backend in ("numpy", "checked")
    for exponent in (2, 0.5, -1, 2.0, 3):
        with np.errstate(all="ignore"):
            if x.dtype.kind in "biu" and (exponent == -1 or (dtype == "bool" and backend == "torch")):
                continue
            found, expected = np.asarray(placed**exponent), x**exponent
        assert found.dtype == expected.dtype
        if exact:
            assert found.tobytes() == expected.tobytes()
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-2 if dtype == "float16" else 1e-5)
    with np.errstate(all="ignore"):
        placed = st.device_put(x, mesh_of((3,), backend))
        if dtype != "bool":
            view = placed[1:]
            view **= 2
            np.testing.assert_allclose(np.asarray(placed)[1:], x[1:] ** 2)
            np.testing.assert_array_equal(np.asarray(placed)[:1], x[:1])
