"""The methods of ufuncs against NumPy: values, dtypes and errors of calls that are drawn with all of their arguments."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from shardtensor.functions.building.monoids import FOLDS
from shardtensor.functions.ufunc_protocol.ufunc_calls import _REDUCTIONS
from shardtensor.tensor.numpy_protocols import UFUNC_NAMES
from tests.draws import drawn
from tests.layouts import assert_equal, assert_same, everywhere, put

UFUNCS = [u for u in UFUNC_NAMES if u.nin == 2 and u.nout == 1 and not u.signature]
METHODS = ["reduce", "accumulate", "reduceat", "outer", "at"]
DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"]
INITIAL = [0, 1, 2.5, -1, np.float32(3), True, 1j, np.int64(5), None]
POWERS = ("power", "float_power")

Rng = np.random.Generator


class Call(NamedTuple):
    """A call of the method ``method`` of a ufunc, for an array x."""

    ufunc: np.ufunc
    method: str
    x: np.ndarray
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, x: Any) -> Any:
        """Returns the result, or a copy of x that the method wrote to."""
        target = x.copy() if self.method == "at" else x
        made = getattr(self.ufunc, self.method)(target, *self.args, **self.kwargs)
        return target if self.method == "at" else made


def array(rng: Rng, ufunc: np.ufunc, shape: tuple[int, ...]) -> np.ndarray:
    """Returns small numbers of any dtype, for which powers are defined, and not complex."""
    dtype = np.dtype(rng.choice(DTYPES))
    if ufunc.__name__ in POWERS and dtype.kind == "c":
        dtype = np.dtype("float64")
    least = 1 if ufunc.__name__ in POWERS else 0 if dtype.kind in "bu" else -3
    return rng.integers(least, 2 if dtype.kind == "b" else 6, shape).astype(dtype)


def sides(rng: Rng, most: int) -> tuple[int, ...]:
    return tuple(rng.choice([0, 1, 2, 3, 5, 9], rng.integers(most + 1)).tolist())


def draw(rng: Rng) -> Call:
    ufunc, method, shape = UFUNCS[rng.integers(len(UFUNCS))], str(rng.choice(METHODS)), sides(rng, 3)
    x, ndim, args, kwargs = array(rng, ufunc, shape), len(shape), (), {}

    def sometimes(name: str, share: float, value: Callable[[], Any]) -> None:
        if rng.random() < share:
            kwargs[name] = value()

    if method == "reduce":
        axes = [0, None, -1, 1, tuple(rng.permutation(ndim)[: rng.integers(ndim + 1)].tolist())]
        sometimes("axis", 0.8, lambda: axes[rng.integers(len(axes))])
        sometimes("keepdims", 0.4, lambda: True)
        sometimes("initial", 0.4, lambda: INITIAL[rng.integers(len(INITIAL))])
        sometimes("where", 0.4, lambda: rng.random(shape) < 0.5 if shape else bool(rng.integers(2)))
    elif method == "accumulate":
        sometimes("axis", 0.6, lambda: [0, -1, 1, None][rng.integers(4)])
    elif method == "reduceat":
        kwargs["axis"] = int(rng.integers(-1, max(ndim, 1)))
        args = (rng.integers(0, max(shape[kwargs["axis"]] if shape else 1, 1), rng.integers(4)),)
    elif method == "outer":
        args = (array(rng, ufunc, sides(rng, 2)) if rng.random() < 0.8 else [2, 1.5, True][rng.integers(3)],)
    else:
        length = shape[0] if shape else 1
        index = rng.integers(-length, length, 4) if length else np.zeros(0, int)
        args = (index, [1, 2.0, array(rng, ufunc, ())][rng.integers(3)])
    if method in ("reduce", "accumulate", "reduceat"):
        sometimes("dtype", 0.15, lambda: str(rng.choice(DTYPES)))
    return Call(ufunc, method, x, args, kwargs)


def differs(call: Call, backend: str) -> bool:
    """Whether a backend is known to differ from NumPy.

    PyTorch has no uint64, to which NumPy adds uint8, and NumPy's vectorized loops reduce by `arctan2` and `power`
    wrongly. Which exponents `ldexp` takes, the only ufunc of numbers of two kinds, depends on NumPy's method.
    """
    if call.ufunc is np.ldexp and call.method != "outer":
        return True
    if backend == "torch" and call.x.dtype == np.uint8 and call.ufunc in (np.add, np.multiply):
        return True
    return backend != "numpy" and call.ufunc in (np.arctan2, np.power) and call.method == "reduceat"


def outcome(call: Callable[[Any], Any], x: Any) -> Any:
    """Returns the result of a call as a host array, or its error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return np.asarray(call(x))  # CuPy computes it now, so that it does not warn later.
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            return error


def assert_as_numpy(call: Call, found: Any) -> None:
    """Asserts that a result is NumPy's, up to the order of additions, or an error if NumPy's is one."""
    wanted, told = outcome(call, call.x), f"{call.ufunc.__name__}.{call}"
    if isinstance(found, Exception) and "no sharded form" in str(found):
        assert call.method == "reduce", told
        assert call.ufunc.__name__ not in (*FOLDS, *_REDUCTIONS), told
    elif isinstance(wanted, Exception) or isinstance(found, Exception):
        assert isinstance(wanted, Exception), f"{told}: {found!r}"
        assert isinstance(found, Exception), f"{told}: {wanted!r}"
    elif np.asarray(wanted).dtype.kind in "fc":
        found, wanted = np.asarray(found), np.asarray(wanted)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), told
        limit = {"float16": 4e-3, "float32": 2e-5, "complex64": 2e-5}.get(str(wanted.dtype), 1e-10)
        wide = "complex128" if wanted.dtype.kind == "c" else "float64"
        np.testing.assert_allclose(found.astype(wide), wanted.astype(wide), limit, limit, err_msg=told)
    else:
        assert_equal(found, wanted)


@everywhere
@pytest.mark.parametrize("part", range(4))
def test_methods_are_numpys(backend: str, part: int) -> None:
    rng = np.random.default_rng(part)
    for number in range(drawn(2000, fast=150)):
        call = draw(rng)
        spec = P("x") if call.x.ndim and number % 3 else P(*[None] * (call.x.ndim - 1), "x") if call.x.ndim else P()
        if differs(call, backend):
            continue
        x = put(call.x, backend, spec=spec)
        with st.transfers() if number % 5 == 0 else contextlib.nullcontext():
            assert_as_numpy(call, outcome(call, x))
        if number % 5 == 1 and call.method != "at":
            assert_as_numpy(call, outcome(st.jit(call.__call__), x))


@everywhere
@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint8", "float32"])
@np.errstate(all="ignore")
def test_neutral_elements_are_those_of_the_dtype_of_the_result(dtype: str, backend: str) -> None:
    x = np.arange(8).reshape(4, 2).astype(dtype)
    mask = np.array([[True, False], [False, False], [True, False], [True, False]])
    for ufunc in (np.logaddexp, np.logaddexp2, np.hypot):
        for kwargs in (
            {"where": mask}, {"initial": 2.5}, {"initial": 2, "where": mask, "keepdims": True}, {"axis": (0, 1)}
        ):  # fmt: skip
            call = Call(ufunc, "reduce", x, (), kwargs)
            assert_as_numpy(call, outcome(call, put(x, backend)))
        call = Call(ufunc, "reduce", x[:0], (), {})
        assert_as_numpy(call, outcome(call, put(x[:0], backend)))


def test_initial_none_states_that_there_is_no_neutral_element() -> None:
    for x in (np.zeros(0), np.ones(3)):
        for kwargs in ({"initial": None}, {"initial": None, "where": np.ones(x.shape, bool)}):
            call = Call(np.add, "reduce", x, (), kwargs)
            assert_as_numpy(call, outcome(call, put(x, "numpy")))


@everywhere
def test_initial_is_the_result_where_nothing_is_reduced(backend: str) -> None:
    numbers = np.arange(1, 17, dtype="int64").reshape(4, 4)
    mask = numbers % 4 == 0
    for x, kwargs in (
        (np.zeros((3, 0), "int64"), {"axis": -1}),
        (numbers, {"axis": (), "where": False}),
        (numbers, {"axis": (), "where": mask}),
        (numbers, {"axis": 1, "where": mask.T}),
        (numbers, {"axis": None, "where": mask & False, "keepdims": True}),
    ):
        for name, dtype in (("gcd", "int64"), ("hypot", "float64"), ("bitwise_xor", "int64")):
            a = x.astype(dtype)
            y = put(a, backend, spec=P() if 0 in a.shape else P("x"))
            wanted = getattr(np, name).reduce(a, initial=-1, **kwargs)
            assert_same(getattr(np, name).reduce(y, initial=-1, **kwargs), wanted)
            assert_same(st.jit(lambda v, n=name, k=kwargs: getattr(np, n).reduce(v, initial=-1, **k))(y), wanted)


def test_a_refused_reduction_gives_no_untrue_reason() -> None:
    with pytest.raises(st.ArgumentTypeError, match=r"numpy.lcm.reduce: has no sharded form here; wanted one of add"):
        np.lcm.reduce(st.asarray([4, 6]))


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("order", ["<", ">"])
def test_bounds_of_indices_in_any_byte_order(order: str, count: int) -> None:
    """As bytes in the other order, 2**24 is 1, which would be within bounds. Few indices are sorted, many are not."""
    x, y = st.zeros(64), np.zeros(64)
    with pytest.raises(st.IndexingError, match="index 16777216 is out of bounds"):
        np.add.at(x, np.full(count, 2**24, f"{order}i4"), 1.0)
    index = np.resize(np.array([1, -1, 3], f"{order}i4"), count)
    for z in (x, y):
        np.add.at(z, index, 1.0)
    np.testing.assert_array_equal(np.asarray(x), y)
