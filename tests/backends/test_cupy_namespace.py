"""The namespace of the CuPy backend, compared with NumPy, on the simulated CuPy, whose ufuncs have CuPy's loops."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardtensor.core import OPS
from tests import fakecupy
from tests.fakecupy.names import ALIASES, UFUNCS
from tests.operands import BINARY as ALL_BINARY
from tests.operands import UNARY as ALL_UNARY
from tests.operands import defined_operands, values
from tests.pairs import spread

pytest.importorskip("array_api_compat", reason="array-api-compat is not installed")

from shardtensor_cupy.namespace import Namespace

# Without the operators that CuPy lacks, which are composed of others.
UNARY, BINARY = [
    [name for name in names if not OPS[name].parts.composed or ALIASES.get(name, name) in UFUNCS]
    for names in (ALL_UNARY, ALL_BINARY)
]
DTYPES = [*"?bHlLefdFD"]
BOUNDS = [None, True, 0, 0.5, np.nan, 2**70, -(2**70)]


@pytest.fixture(scope="module")
def xp() -> Iterator[Any]:
    cupy = fakecupy.install(scheduler="eager")
    yield Namespace(cupy)
    fakecupy.uninstall()


def check_namespace(xp: Any, name: str, *operands: Any, **params: Any) -> None:
    """That a function gives NumPy's elements and dtype. What NumPy refuses never gets here."""
    given = [xp.asarray(x) if isinstance(x, np.ndarray) else x for x in operands]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = np.asarray(getattr(np, name)(*operands, **params))
        except (TypeError, OverflowError, ValueError):
            return
        found = getattr(xp, name)(*given, **params)
        assert found.dtype == wanted.dtype, operands
        np.testing.assert_array_equal(found.get(), wanted, str(operands))


@pytest.mark.parametrize("name", [*UNARY, "round", "real", "imag"])
def test_unary_functions_of_every_dtype(name: str, xp: Any) -> None:
    for dtype in DTYPES:
        check_namespace(xp, name, values(dtype, 30))


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_of_every_pair_of_dtypes(name: str, xp: Any) -> None:
    for left, right in spread(itertools.product(DTYPES, repeat=2), 3, BINARY.index(name)):
        check_namespace(xp, name, *defined_operands(name, values(left, 30, 1), values(right, 30, 2)))


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_arrays_and_numbers(name: str, xp: Any) -> None:
    calls = itertools.product([True, 3, 2.5, 1 + 2j, 300, 2**63], DTYPES)
    for number, dtype in spread(calls, 7, BINARY.index(name)):
        x = defined_operands(name, values(dtype), values(dtype))[1]
        check_namespace(xp, name, x, number)
        check_namespace(xp, name, number, x)


@pytest.mark.parametrize("number", [2**63, 2**64, 2**70, -(2**63) - 1, -(2**70)])
def test_integers_of_more_than_64_bits(number: int, xp: Any) -> None:
    """NumPy compares them with integers, and makes floats of them beside floats; CuPy's ufuncs refuse them."""
    for name, dtype in itertools.product(["less", "greater_equal", "equal", "not_equal"], DTYPES):
        check_namespace(xp, name, values(dtype), number)
        check_namespace(xp, name, number, values(dtype))
    for name, dtype in itertools.product(["add", "divide", "maximum", "hypot"], "efd"):
        check_namespace(xp, name, values(dtype), number)
        check_namespace(xp, name, number, values(dtype))
    check_namespace(xp, "divide", values("l"), number)


@pytest.mark.parametrize("name", ["add", "multiply", "maximum", "bitwise_or"])
def test_integers_out_of_range_raise(name: str, xp: Any) -> None:
    for number, dtype in ((300, "int8"), (-1, "uint8"), (2**63, "int64"), (2**70, "uint64")):
        with pytest.raises(OverflowError):
            getattr(xp, name)(xp.asarray(values(dtype)), number)


def test_where(xp: Any) -> None:
    for mask, left, right in itertools.product("?D", DTYPES, DTYPES):
        check_namespace(xp, "where", values(mask), values(left, 14, 1), values(right, 14, 2))
    for number, dtype in itertools.product([True, 0, 0.5, -1, np.nan, 1j, 300, 2**70], DTYPES):
        check_namespace(xp, "where", values("?"), number, values(dtype))
        check_namespace(xp, "where", values("?"), values(dtype), number)
        check_namespace(xp, "where", True, values(dtype), number)
        check_namespace(xp, "where", 0.0, values(dtype), number)


def test_clip(xp: Any) -> None:
    for x, low, high in itertools.product("?bLedF", repeat=3):
        check_namespace(xp, "clip", values(x), values(low, 14, 1), values(high, 14, 2))
    for dtype, low, high in itertools.product(DTYPES, BOUNDS, BOUNDS):
        check_namespace(xp, "clip", values(dtype), low, high)
    check_namespace(xp, "clip", values("l", 14).reshape(7, 2), values("f", 14).reshape(7, 2)[:, :1], None)
    check_namespace(xp, "clip", values("l", 2), None, values("f", 14).reshape(7, 2))


@pytest.mark.parametrize("name", [*UNARY, *BINARY, "clip"])
def test_out(name: str, xp: Any) -> None:
    """Into a view, and into an operand."""
    for dtype in "?ilefdF":
        count = 1 if name in UNARY else 3 if name == "clip" else 2
        operands = [values(dtype, 24, seed).reshape(4, 6) for seed in range(count)]
        if count == 2:
            operands = list(defined_operands(name, *operands))
        with np.errstate(all="ignore"):
            try:
                wanted = getattr(np, name)(*operands)
            except TypeError:
                continue
            out = xp.zeros((4, 12), dtype=wanted.dtype)[:, 3:9]  # NumPy 2.4 writes some wrong bools with a stride
            assert getattr(xp, name)(*map(xp.asarray, operands), out=out) is out
            np.testing.assert_array_equal(out.get(), wanted)
            if wanted.dtype == dtype:
                first, *others = map(xp.asarray, operands)
                getattr(xp, name)(first, *others, out=first)
                np.testing.assert_array_equal(first.get(), wanted)


def test_elements_of_any_dtype_are_searched(xp: Any) -> None:
    """CuPy's kernel compares operands of two dtypes as C does, or is not compiled."""
    for left, right in itertools.product(DTYPES, repeat=2):
        ordered, x = np.sort(values(left, 30, 1)), values(right, 30, 2)
        check_namespace(xp, "isin", x, values(left, 5, 1))
        check_namespace(xp, "isin", x.reshape(5, 6), values(left, 6, 1).reshape(2, 3), invert=True)
        if "c" in (ordered.dtype.kind, x.dtype.kind):  # Those that are NaN are in no order that CuPy has.
            x = np.where(np.isnan(x), x.dtype.type(1), x)
        for side in ("left", "right"):
            check_namespace(xp, "searchsorted", ordered, x, side=side)


def test_a_part_that_is_nan_hides_no_complex_number(xp: Any) -> None:
    x = np.array([5, complex(1, np.nan), 2], np.complex64)
    check_namespace(xp, "isin", np.array([5, 2, 3], np.complex64), x)
    check_namespace(xp, "searchsorted", np.sort(x), np.array([5, 2, 7, -1], np.complex64))


def test_quotients_by_complex_zeros(xp: Any) -> None:
    parts = [0.0, -0.0, 1.5, -np.inf, np.nan]
    x = np.array([complex(a, b) for a in parts for b in parts])
    for dtype, zero in itertools.product("FD", [0, False, 0.0, -0.0, complex(-0.0, 0.0)]):
        check_namespace(xp, "divide", x.astype(dtype), zero)
        check_namespace(xp, "divide", x.astype(dtype), np.array(zero))


def test_clip_without_bounds_is_a_copy(xp: Any) -> None:
    x, out = xp.asarray(values("f")), xp.zeros(14, dtype=np.float32)
    made = xp.clip(x)
    assert made.data.ptr != x.data.ptr
    assert xp.clip(x, out=out) is out
    for copy in (made, out):
        np.testing.assert_array_equal(copy.get(), values("f"))


@pytest.mark.parametrize("size", [0, 1, 255, 256, 512])
def test_vecdot_of_bools_does_not_wrap(size: int, xp: Any) -> None:
    check_namespace(xp, "vecdot", np.ones((2, size), bool), np.ones(size, bool))
    check_namespace(xp, "vecdot", np.ones((size, 2), bool), np.ones((size, 2), bool), axis=0)
    check_namespace(xp, "vecdot", np.ones(size, bool), np.ones(size, "int8"))


def test_vecdot_of_incompatible_shapes(xp: Any) -> None:
    for dtype in ("bool", "float32"):
        with pytest.raises(ValueError, match="x1"):
            xp.vecdot(xp.ones(3, dtype=dtype), xp.ones(1, dtype=dtype))
