"""NumPy's spellings: its names of arguments, its other names of functions, and its functions that are composed here."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import OPS
from shardtensor.functions.numpy import translated_calls
from shardtensor.functions.numpy.function_table import NUMPY_NAMES
from tests.layouts import assert_same, mesh_of, put

A = np.array([[1.25, -2.375, 3.5], [np.pi, 5.0, -0.5], [100.125, 8.5, 1e-3], [2.5, 3.5, 0.125]])


def assert_near(found: Any, wanted: Any) -> None:
    """Asserts that a tensor equals a NumPy array but for a few roundings."""
    assert_same(found, wanted)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)


# -- integers that do not fit ----------------------------------------------------------------------

TOO_LARGE: dict[str, Callable[[Any, Any], Any]] = {
    "copyto": lambda x, m: np.copyto(x, 300),
    "copyto of some": lambda x, m: np.copyto(x, 300, where=m),
    "copyto with any cast": lambda x, m: np.copyto(x, -129, casting="unsafe", where=m),
    "putmask": lambda x, m: np.putmask(x, m, 300),
    "place": lambda x, m: np.place(x, m, [300]),
    "fill_diagonal": lambda x, m: np.fill_diagonal(x, 300),
    "insert": lambda x, m: np.insert(x, 0, 300),
    "piecewise": lambda x, m: np.piecewise(x, [m], [300]),
    "max": lambda x, m: np.max(x, initial=300),
    "put": lambda x, m: np.put(x, [0], 300),
    "fill": lambda x, m: x.fill(300),
}
"""Writes of Python integers to elements of int8, and to those of a mask, which NumPy refuses."""


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.parametrize("rows", [2, 2000])
def test_integers_that_do_not_fit_are_errors_and_nothing_is_written(name: str, rows: int, backend: str) -> None:
    value = np.arange(2 * rows, dtype="int8").reshape(rows, 2)
    mask = value % 3 == 1
    with pytest.raises(OverflowError):
        TOO_LARGE[name](value.copy(), mask)
    x = put(value, backend, (2,))
    called = {"fill": "setitem"}.get(name, name.partition(" ")[0])
    with pytest.raises(st.RangeError, match=rf"^{called}: Python integer -?\d+ out of bounds for int8; use a dtype"):
        TOO_LARGE[name](x, mask)
    assert_same(x, value, exact=True)


def test_lists_are_copied_into_tensors(backend: str) -> None:
    value, mask = np.zeros((2, 3), "int8"), np.array([True, False, True])
    x = put(value, backend, (2,))
    for into in (value, x):
        np.copyto(into, [1, 2, 3], where=mask)
        np.copyto(into[1], [4, 5, 6])
    assert_same(x, value, exact=True)


# -- arguments by position, and NumPy's arguments of methods ---------------------------------------

BY_POSITION: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda m, x: m.sum(x, 0),
    "sum of a dtype": lambda m, x: m.sum(x, 1, np.float32),
    "prod": lambda m, x: m.prod(x, 1),
    "mean": lambda m, x: m.mean(x, 0, np.float32),
    "max": lambda m, x: m.max(x, 0),
    "argmin": lambda m, x: m.argmin(x, 0),
    "var": lambda m, x: m.var(x, 0),
    "any": lambda m, x: m.any(x > 3, 1),
    "stack": lambda m, x: m.stack([x, x], 1),
    "concat": lambda m, x: m.concat([x, x], 1),
    "expand_dims": lambda m, x: m.expand_dims(x, 1),
    "flip": lambda m, x: m.flip(x, 0),
    "roll": lambda m, x: m.roll(x, 1, 0),
    "round": lambda m, x: m.round(x, 2),
    "asarray": lambda m, x: m.asarray(x, np.float32),
    "zeros_like": lambda m, x: m.zeros_like(x, np.int8),
    "full_like": lambda m, x: m.full_like(x, 3, np.int8),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_arguments_by_position(name: str, backend: str) -> None:
    call = BY_POSITION[name]
    assert_near(call(st, put(A, backend, (2,))), call(np, A))


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.zeros((2, 2), float),
        lambda m: m.ones(3, "int8"),
        lambda m: m.full((2,), 1, float),
        lambda m: m.arange(1, 10, 2, float),
        lambda m: m.arange(2, dtype=bool),
        lambda m: m.eye(3, 4, 1, "int8"),
    ],
)
def test_creation_by_position(call: Callable[[Any], Any], backend: str) -> None:
    with st.use_mesh(mesh_of((2,), backend)):
        assert_same(call(st), call(np), exact=True)
        (inside,) = st.pmap(lambda _: call(st), [0], devices=st.devices(backend)[:1])
    assert_same(inside, call(np), exact=True)


def test_items_by_position() -> None:
    first, second, _ = st.unstack(put(A, "numpy", (2,)), 1)
    assert_near(second, A[:, 1])
    assert st.empty((2, 2), "int8").dtype == np.int8


METHODS: dict[str, Callable[[Any], Any]] = {
    "std(ddof=1)": lambda x: x.std(ddof=1),
    "var(0, ddof=1)": lambda x: x.var(0, ddof=1),
    "mean(dtype=)": lambda x: x.mean(dtype=np.float32),
    "mean(0, 'f4')": lambda x: x.mean(0, "f4"),
    "mean(dtype=int)": lambda x: x.mean(dtype=int),
    "mean(axis=1, dtype=int)": lambda x: x.mean(axis=1, dtype=int),
    "round(2)": lambda x: x.round(2),
    "round(decimals=1)": lambda x: x.round(decimals=1),
    "round(-1)": lambda x: x.round(-1),
    "conjugate()": lambda x: x.conjugate(),
    "x * [1, 2, 3]": lambda x: x * [1, 2, 3],
    "[1, 2, 3] - x": lambda x: [1, 2, 3] - x,
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
@pytest.mark.parametrize("spec", [st.P("x"), st.P(None, "x"), st.P()], ids=str)
def test_methods(name: str, dtype: str, spec: st.P, backend: str) -> None:
    call, a = METHODS[name], A.astype(dtype)
    if dtype == "complex128":
        if "mean" in name:
            pytest.skip("NumPy warns that the imaginary parts are lost")
        a = a + 1j * A[::-1]
    assert_near(call(put(a, backend, (2,), spec)), call(a))


@pytest.mark.parametrize("dtype", ["int8", "bool", "float16"])
def test_means_in_narrow_dtypes(dtype: str, backend: str) -> None:
    """The sum is computed in the dtype, and wraps around where NumPy's does."""
    a = np.full(300, 100).astype(dtype)
    for wanted in ("int8", "float32", "float64"):
        assert_near(put(a, backend, (2,)).mean(dtype=wanted), a.mean(dtype=wanted))


def test_rounding_of_a_large_array_in_blocks() -> None:
    a = np.linspace(-1000, 1000, 300_001)
    assert_same(put(a, "numpy", (2,)).round(2), a.round(2), exact=True)
    x = put(a, "numpy", (2,))
    np.round(x, 1, out=x)
    assert_same(x, a.round(1), exact=True)


def test_writing_an_array_of_one_element(backend: str) -> None:
    x = put(np.zeros(4), backend, (2,))
    x[0] = np.array([5])
    x[1] = put(np.array([[6.0]]), backend, (2,))
    x[2:3] = [7]
    assert x.tolist() == [5, 6, 7, 0]
    for value in (np.array([1, 2]), [1]):
        with pytest.raises(st.ShapeError, match=r"value has shape \(\d,\), and one element is written; give a scalar"):
            x[0] = value


# -- NumPy's other names ---------------------------------------------------------------------------


def test_numpys_other_names_are_found_and_not_listed() -> None:
    for name, standard in NUMPY_NAMES.items():
        assert getattr(st, name) is getattr(st, standard) is OPS[standard].dispatch
        assert name not in dir(st)
        assert hasattr(np, name)
    assert set(NUMPY_NAMES) & set(OPS) == set()
    assert_near(st.concatenate([A, A], 0), np.concatenate([A, A]))
    assert_near(st.power(np.arange(4.0), 2), np.arange(4.0) ** 2)
    from shardtensor import absolute, arctan2

    assert_near(absolute(A), np.absolute(A))
    assert_near(arctan2(A, A), np.arctan2(A, A))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = st.nonsense


# -- NumPy's functions -----------------------------------------------------------------------------

B = np.array([1.0, np.nan, np.inf, -np.inf, 0.0, 1e-9, 1000.0])
C = np.array([1.0 + 1e-9, np.nan, np.inf, np.inf, 1e-9, 0.0, 1000.1])

FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "amax": lambda a, b, c: np.amax(a, 0),
    "amin": lambda a, b, c: np.amin(a),
    "vstack": lambda a, b, c: np.vstack([a, a]),
    "vstack of vectors": lambda a, b, c: np.vstack([b, c]),
    "vstack of a list": lambda a, b, c: np.vstack([a, [1, 2, 3]]),
    "vstack of a dtype": lambda a, b, c: np.vstack([a, a], dtype="f4"),
    "hstack": lambda a, b, c: np.hstack([a, a]),
    "hstack of vectors": lambda a, b, c: np.hstack((b, c, 1.0)),
    "isclose": lambda a, b, c: np.isclose(b, c),
    "isclose, NaN too": lambda a, b, c: np.isclose(b, c, equal_nan=True),
    "isclose to a number": lambda a, b, c: np.isclose(a, 5),
    "isclose from a number": lambda a, b, c: np.isclose(5.0, a, rtol=1e-3, atol=1),
    "isclose to a list": lambda a, b, c: np.isclose(a, [1, 5, -0.5]),
    "isclose of integers": lambda a, b, c: np.isclose(a.astype("int8"), np.array([-128, 5, 3], "int8"), rtol=0.1),
    "dot of vectors": lambda a, b, c: np.dot(a[0], a[1]),
    "dot of matrices": lambda a, b, c: np.dot(a, a.T),
    "dot of a matrix and a vector": lambda a, b, c: np.dot(a, a[0]),
    "dot of a number": lambda a, b, c: np.dot(a, 2),
    "dot of three dimensions": lambda a, b, c: np.dot(a, a.T.reshape(2, 3, 2)),
    "dot of a list": lambda a, b, c: np.dot(a, [1.0, 2.0, 3.0]),
    "round": lambda a, b, c: np.round(a, 2),
    "around": lambda a, b, c: np.around(a),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_numpy(name: str, backend: str) -> None:
    call = FUNCTIONS[name]
    assert_near(call(*[put(x, backend, (2,)) for x in (A, B, C)]), call(A, B, C))


ANSWERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "array_equal": lambda a, b, c: np.array_equal(a, a),
    "array_equal of other shapes": lambda a, b, c: np.array_equal(a, a[0]),
    "array_equal, NaN": lambda a, b, c: np.array_equal(b, b),
    "array_equal, NaN too": lambda a, b, c: np.array_equal(b, b, equal_nan=True),
    "array_equal of a list": lambda a, b, c: np.array_equal(a[0], [1.25, -2.375, 3.5]),
    "allclose": lambda a, b, c: np.allclose(a, a * (1 + 1e-9)),
    "not allclose": lambda a, b, c: np.allclose(b, c, equal_nan=True),
    "allclose to a number": lambda a, b, c: np.allclose(a * 0, False),
    "size": lambda a, b, c: (np.size(a), np.size(a, 0), np.size(a, 1)),
    "result_type": lambda a, b, c: (np.result_type(a, 1), np.result_type(a.astype("f4"), 1.5, np.int8)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_functions_of_numpy_that_answer_at_once(name: str, backend: str) -> None:
    call = ANSWERS[name]
    found, wanted = call(*[put(x, backend, (2,)) for x in (A, B, C)]), call(A, B, C)
    assert type(found) is type(wanted)
    assert found == wanted


def test_a_host_array_may_be_the_first_operand(backend: str) -> None:
    x = put(A, backend, (2,))
    assert np.array_equal(A, x)
    assert np.allclose(A, x)
    assert_near(np.dot(A.T, x), A.T @ A)
    assert_near(np.vstack([A[0], x]), np.vstack([A[0], A]))


def test_out_of_dot_and_dtypes_of_stacks() -> None:
    x, out = put(A, "numpy", (2,)), put(np.empty((4, 4)), "numpy", (2,))
    assert np.dot(x, x.T, out=out) is out
    assert_near(out, A @ A.T)
    cube = put(np.empty((4, 2, 2)), "numpy", (2,))
    assert np.dot(x, x.T.reshape(2, 3, 2), out=cube) is cube
    assert_near(cube, np.dot(A, A.T.reshape(2, 3, 2)))
    assert_near(np.concatenate([x, [[1, 2, 3]]], dtype="f4"), np.concatenate([A, [[1, 2, 3]]], dtype="f4"))
    with pytest.raises(st.ArgumentTypeError, match=r"numpy\.hstack: float64 to int64 is not allowed by casting"):
        np.hstack([x, x], dtype=int)


def test_arguments_of_functions_whose_signature_numpy_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before NumPy 2.4, `inspect.signature` cannot read its functions in C."""

    def signature(function):
        if function in (np.dot, np.empty_like, np.concatenate):
            raise ValueError("no signature found")
        return inspect.signature(function)

    monkeypatch.setattr(
        translated_calls, "inspect", types.SimpleNamespace(signature=signature, Parameter=inspect.Parameter)
    )
    caches = translated_calls._counterpart, translated_calls._direct_call
    for cache in caches:
        cache.cache_clear()
    try:
        x, out = put(A, "numpy", (2,)), put(np.empty((4, 4)), "numpy", (2,))
        assert np.dot(x, x.T, out=out) is out
        assert np.empty_like(x, shape=(2, 3)).shape == (2, 3)
        assert_near(np.concatenate([x, x], 1, dtype="f4"), np.concatenate([A, A], 1, dtype="f4"))
    finally:
        for cache in caches:
            cache.cache_clear()


def test_functions_of_other_modules_with_known_names_are_refused() -> None:
    """They compute something else: `numpy.emath.sqrt` of a negative number is complex."""
    x = put(A, "numpy", (2,))
    for function in (np.emath.sqrt, np.emath.log2):
        with pytest.raises(st.ArgumentTypeError, match=rf"{function.__module__}.{function.__name__}: has no sharded"):
            function(x)


def test_functions_of_numpy_move_no_more_than_operators(backend: str) -> None:
    x = put(A, backend, (2,))
    with st.transfer_guard("disallow"):
        assert np.isclose(x, x + 0).sharding == x.sharding
        assert np.round(x, 1).sharding == x.sharding
