"""Writes: in-place operators, ``out=``, assignment with shared memory or overlapping operands, threads, errors, and the
cost of writes in place.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import gc
import importlib
import itertools
import operator
import pickle
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import HOST, current_device
from shardtensor.backend.registry import load
from shardtensor.core import OPS, bind_into
from shardtensor.interpreters.views import views as view_storages
from shardtensor.interpreters.writes import write_transaction, writes
from shardtensor.testing import CheckedArray, CheckedBackend
from shardtensor.testing.checked import _Namespace
from tests.draws import drawn
from tests.layouts import (
    READ_ONLY,
    USABLE,
    all_specs,
    allocated,
    array,
    assert_same,
    everywhere,
    in_use,
    mesh_of,
    on_host,
    place_of,
    put,
    strided,
    values_of,
)
from tests.spmd.test_scheduler import raised_at

Write = Callable[[Any], Any]


def layouts(backend: str, ndim: int, every: int = 1) -> Iterator[st.NamedSharding]:
    """Returns shardings of all kinds: one device, uneven splits, two axes on one dimension or on two, replicas."""
    for shape in ((1,), (3,), (2, 2)):
        mesh = mesh_of(shape, backend)
        for spec in all_specs(mesh, ndim)[::every]:
            yield st.NamedSharding(mesh, spec)


def some_layouts(backend: str, ndim: int, every: int = 1, *, case: int = 0) -> Sequence[st.NamedSharding]:
    """Returns these shardings, in the fast tier every third one; other numbers of cases and other backends have others."""
    return strided(layouts(backend, ndim, every), 3, case + USABLE.index(backend))


def attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Returns the result of a call, or the error that it raises."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args), None
    except Exception as error:
        return None, error


def kinds(error: BaseException) -> set[type[BaseException]]:
    """Returns the builtin classes of an error."""
    return {k for k in (IndexError, ValueError, TypeError, OverflowError, FloatingPointError) if isinstance(error, k)}


def address(x: st.ShardedTensor) -> list[int]:
    """Returns the addresses of the shards. Holds none of the arrays."""
    return [place_of(s.data) for s in x.addressable_shards]


def raises(kind: Any, backend: str) -> Any:
    """Returns the floating-point errors that NumPy raises and other libraries do not."""
    return pytest.raises(kind) if backend in READ_ONLY else contextlib.nullcontext()


def turned(p: Any) -> Any:
    """Reverses an array in a mapped function: a view, where the library has negative strides."""
    device = current_device()
    assert device is not None
    return load(device.backend).view(p, np.s_[::-1])


def kind_of(backend: str) -> type:
    """The class of a backend's arrays."""
    if backend in READ_ONLY:
        return CheckedArray if backend == "checked" else np.ndarray
    module = importlib.import_module(backend)
    return module.ndarray if backend == "cupy" else module.Tensor  # type: ignore[no-any-return]


# -- in-place operators ----------------------------------------------------------------------------

IN_PLACE = {
    f.__name__: f
    for f in (
        operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
        operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
    )
}  # fmt: skip
SCALARS = {"True": True, "2": 2, "2.5": 2.5, "1j": 1j, "-1": -1, "300": 300}


def operand_of(y: Any, kind: str, sharding: st.NamedSharding) -> Any:
    """A value as an operand: a host array, or a tensor that lies as what is written, in another layout, or elsewhere."""
    backend = sharding.mesh.flat[0].backend
    if kind == "beside it":
        return st.device_put(y, sharding)
    if kind == "elsewhere":
        return st.device_put(y, st.devices(backend)[7])
    return put(y, backend, (5,), st.P(None, "x")) if kind == "other layout" else y


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_are_numpys(name: str, backend: str) -> None:
    """For all kinds of dtypes, the elements are NumPy's, in the same handle, dtype and layout; or the error is, and
    nothing changes.
    """
    apply = IN_PLACE[name]
    dtypes = ["bool", "int8", "int64", "uint8", "float32", "float64", "complex128"]
    targets = itertools.cycle(layouts(backend, 2))
    pairs = itertools.product(dtypes, [*dtypes, *SCALARS])
    for mine, other in strided(pairs, 3, list(IN_PLACE).index(name)):
        value = array((4, 4), mine, 1)
        y = SCALARS[other] if other in SCALARS else array((4, 4), other, 2)
        if name == "ipow" and not isinstance(y, np.ndarray | float | complex) and np.dtype(mine).kind in "iu" and y < 0:
            continue  # that is a test of its own
        if name == "ipow" and isinstance(y, np.ndarray) and y.dtype.kind == "i":
            y = np.abs(y)
        if name == "imatmul" and other in SCALARS:
            continue
        wanted, refused = attempt(apply, value.copy(), y)
        for kind in ("scalar",) if other in SCALARS else ("beside it", "elsewhere", "host", "other layout"):
            sharding = next(targets)
            x = st.device_put(value, sharding)
            operand = operand_of(y, kind, sharding)
            where = (mine, other, kind, sharding)
            result, error = attempt(apply, x, operand)
            assert (error is None) == (refused is None), (*where, error, refused)
            if refused is not None:
                assert kinds(refused) <= kinds(error), (*where, error, refused)
                assert_same(x, value, exact=True)
                continue
            assert result is x, where
            assert (x.sharding, x.dtype, x.committed) == (sharding, value.dtype, True), where
            assert_same(x, wanted)


@everywhere
@pytest.mark.parametrize("all_of_it", [False, True])
def test_sums_after_a_write_do_not_depend_on_other_handles(backend: str, all_of_it: bool) -> None:
    """A write copies an array that another handle holds, and keeps the order of dimensions, in which NumPy adds."""
    x = st.asarray(np.random.default_rng(0).standard_normal((30, 170)), device=st.devices(backend)[0])
    sums = []
    for copies in (False, True):
        y = x.T * 0.5
        kept = y.copy() if copies else None
        y[... if all_of_it else slice(1, None)] = x.T[... if all_of_it else slice(1, None)] * 0.25
        sums.append(np.asarray(st.sum(y)).tobytes())
        del kept
    assert sums[0] == sums[1]


@pytest.mark.parametrize("name", sorted(set(IN_PLACE) - {"imatmul"}))
def test_in_place_operators_on_views_and_items(name: str, backend: str) -> None:
    """All forms of `x[i] ⊕= v`: a view is written, and then assigned to the part that it is a view of."""
    apply = IN_PLACE[name]
    a = np.arange(2, 26).reshape(6, 4)
    if name == "itruediv":
        a = a * 1.0
    y = np.array([1, 2, 1, 2])
    for sharding in some_layouts(backend, 2, 2, case=list(IN_PLACE).index(name)):
        for step in (
            lambda t, v: t.__setitem__(2, apply(t[2], v)),
            lambda t, v: t.__setitem__(slice(1, None, 2), apply(t[1::2], v)),
            lambda t, v: t.__setitem__((slice(None), 1), apply(t[:, 1], 2)),
            lambda t, v: t.__setitem__((3, 3), apply(t[3, 3], 2)),
            lambda t, v: t.__setitem__([5, 0], apply(t[[5, 0]], v)),
            lambda t, v: t.__setitem__(t > 9, apply(t[t > 9], 1)),
            lambda t, v: apply(t.T[:, ::-1], 3),
            lambda t, v: apply(t.reshape(-1)[5:], 1),
            lambda t, v: apply(t[4, 0, ...], 1),
        ):
            x, b = st.device_put(a, sharding), a.copy()
            step(b, y)
            step(x, y)
            assert_same(x, b, exact=True)
            assert x.sharding == sharding


def test_unknown_operands_of_in_place_operators_are_left_to_python(backend: str) -> None:
    x = put(np.arange(4.0), backend)
    for other in ("a", None, object(), {1: 2}, {}):
        for apply in IN_PLACE.values():
            with pytest.raises(TypeError):
                apply(x, other)
    assert_same(x, np.arange(4.0), exact=True)
    h = np.arange(4.0)
    h += x
    np.testing.assert_array_equal(h, np.arange(4.0) * 2)
    with pytest.raises(TypeError):
        divmod(x, "a")


@pytest.mark.parametrize(("mine", "other", "fits"), [
    ((4, 3), (3,), True), ((4, 3), (4, 1), True), ((4, 3), (), True), ((4, 3), (1, 1), True), ((4, 3), (1, 3), True),
    ((4, 3), (4,), False), ((4, 3), (1, 4, 3), False), ((1, 3), (4, 3), False), ((3,), (4, 3), False), ((), (1,), False),
    ((0, 3), (3,), True), ((0, 3), (4, 3), False), ((4, 1), (4, 3), False), ((4, 3), (0, 3), False), ((1,), (0,), False),
])  # fmt: skip
def test_operands_broadcast_to_what_is_written_and_not_the_other_way(
    mine: tuple[int, ...], other: tuple[int, ...], fits: bool, backend: str
) -> None:
    a, y = np.ones(mine), np.array(array(other, "float64", 4))
    for operand in (y, put(y, backend), st.device_put(y, st.devices(backend)[6])):
        for sharding in some_layouts(backend, len(mine), case=len(other)):
            x = st.device_put(a, sharding)
            for apply in (
                lambda t, v: operator.iadd(t, v),
                lambda t, v: operator.imul(t[...], v),
                lambda t, v: np.add(t, v, out=t),
                lambda t, v: np.subtract(v, t, out=t),
            ):
                before, b = np.array(x), np.array(x)
                wanted, refused = attempt(apply, b, y)
                assert (refused is None) == fits
                if fits:
                    apply(x, operand)
                    assert_same(x, b, exact=True)
                else:
                    with pytest.raises(ValueError, match="broadcast"):
                        apply(x, operand)
                    assert_same(x, before, exact=True)


def test_errors_in_the_middle_of_an_in_place_operator_leave_it_unchanged(backend: str) -> None:
    """NumPy's integers meet a negative power after other elements have been computed."""
    a = np.arange(2, 10)
    for position in range(8):
        powers = np.full(8, 2)
        powers[position] = -1
        for sharding in some_layouts(backend, 1, case=position):
            for write in (
                lambda t, p: operator.ipow(t, p),
                lambda t, p: operator.ipow(t[::-1], p),
                lambda t, p: np.power(t, p, out=t),
                lambda t, p: np.power(a, p, out=t.reshape(2, 4).reshape(-1)),
                lambda t, p: operator.ipow(t, p.astype("int8")),
            ):
                x = st.device_put(a, sharding)
                if backend == "cupy" and attempt(write, x, powers)[1] is None:  # it cuts off what is less than 1
                    assert np.count_nonzero(np.asarray(x) == 0) == 1
                    continue
                with pytest.raises(ValueError, match="negative"):
                    write(x, powers)
                assert_same(x, a, exact=True)


# -- out= ------------------------------------------------------------------------------------------

INTO: dict[str, Callable[[Any, Any, Any], Any]] = {
    "np.add": lambda x, y, z: np.add(x, y, out=z),
    "np.add, in a tuple": lambda x, y, z: np.add(x, y, out=(z,)),
    "np.add, of a scalar": lambda x, y, z: np.add(x, 2, out=z),
    "np.multiply, of a row": lambda x, y, z: np.multiply(x, y[0], out=z),
    "np.sqrt": lambda x, y, z: np.sqrt(np.abs(x), out=z),
    "np.negative": lambda x, y, z: np.negative(x, out=z),
    "np.arctan2": lambda x, y, z: np.arctan2(x, y, out=z),
    "np.maximum": lambda x, y, z: np.maximum(x, y, out=z),
    "np.less": lambda x, y, z: np.less(x, y, out=z),
    "np.sign of one row": lambda x, y, z: np.sign(y[2], out=z),
    "np.conj": lambda x, y, z: np.conj(x, out=z),
    "np.clip": lambda x, y, z: np.clip(x, -1, 1, out=z),
    "np.matmul": lambda x, y, z: np.matmul(x, y, out=z),
    "np.matmul, transposed": lambda x, y, z: np.matmul(x.T, y.T, out=z),
    "np.concatenate": lambda x, y, z: np.concatenate([x[:2], y[:2]], out=z),
    "np.stack": lambda x, y, z: np.stack([x[0], y[0], x[1], y[1]], out=z),
    "np.copyto": lambda x, y, z: np.copyto(z, x),
    "np.copyto, of a scalar": lambda x, y, z: np.copyto(z, 3),
    "np.copyto, of a float": lambda x, y, z: np.copyto(z, 2.5),
    "np.copyto, where": lambda x, y, z: np.copyto(z, x, where=y > 0),
    "None": lambda x, y, z: np.add(x, y, out=None),
}
REDUCED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "np.sum": lambda x, y, z: np.sum(x, axis=0, keepdims=True, out=z[1:2]),
    "x.sum": lambda x, y, z: x.sum(axis=0, out=z[1]),
    "x.sum, of an axis by position": lambda x, y, z: x.sum(1, out=z[:, 0]),
    "x.sum, of all": lambda x, y, z: x.sum(out=z[3, 3, ...]),
    "x.sum, in a tuple": lambda x, y, z: np.sum(x, axis=1, out=z[0]),
    "x.max": lambda x, y, z: x.max(axis=1, out=z.T[2]),
    "np.mean": lambda x, y, z: np.mean(x, axis=0, out=z[::-1][0]),
    "np.prod": lambda x, y, z: np.prod(x, axis=1, out=z[0]),
    "np.var": lambda x, y, z: np.var(x, axis=1, out=z[0]),
    "x.std": lambda x, y, z: x.std(axis=0, out=z[0]),
    "x.any": lambda x, y, z: x.any(axis=0, out=z[0]),
    "np.all": lambda x, y, z: np.all(x > y, axis=0, out=z[0]),
    "x.clip": lambda x, y, z: x.clip(y, 2, out=z),
    "x.round": lambda x, y, z: x.round(out=z),
}


def into_all_kinds(
    into: Callable[[Any, Any, Any], Any], dtypes: Sequence[str], sources: Sequence[str], backend: str, case: int
) -> None:
    """Writes into tensors and views of several dtypes and layouts. The elements are NumPy's, or the error is and
    nothing changes. In the fast tier, a case has a part of the combinations, with all dtypes, views and sources.
    """
    a, b = array((4, 4), "float64", 1), array((4, 4), "float64", 2)
    targets, contexts = itertools.cycle(layouts(backend, 2)), itertools.cycle(layouts(backend, 2, 3))
    looks = (
        lambda t: t,
        lambda t: t.T,
        lambda t: t[::-1],
        lambda t: t.reshape(2, 8).reshape(4, 4),
        lambda t: t[..., None].squeeze(-1),
    )
    for dtype, look, source in strided(itertools.product(dtypes, looks, sources), 5 - len(sources), case):
        c = np.ones((4, 4), dtype)
        z = st.device_put(c, next(targets))
        sharding, target = z.sharding, look(z)
        x = a if source == "host" else st.device_put(a, next(contexts))
        y = st.device_put(b, next(contexts)) if source == "tensors" else b
        wanted, refused = attempt(into, a, b, look(c))
        found, error = attempt(into, x, y, target)
        where = (dtype, source, sharding, error, refused)
        assert (error is None) == (refused is None), where
        if refused is not None:
            assert kinds(refused) <= kinds(error), where
            assert_same(z, np.ones((4, 4), dtype), exact=True)
            continue
        assert_same(z, c)
        assert (z.sharding, z.dtype) == (sharding, np.dtype(dtype))
        if isinstance(found, st.ShardedTensor):
            assert_same(found, wanted)


@pytest.mark.parametrize("into", INTO)
def test_out_is_numpys(into: str, backend: str) -> None:
    dtypes = ("float64", "float32", "complex128", "int64", "bool")
    into_all_kinds(INTO[into], dtypes, ("tensors", "tensor and host", "host"), backend, list(INTO).index(into))


@pytest.mark.parametrize("into", REDUCED)
def test_out_of_reductions_and_methods_is_numpys(into: str, backend: str) -> None:
    """The dtypes are those in which ``out`` does not change the result, since NumPy reduces in the dtype of ``out``."""
    dtypes, sources = ("float64", "float32", "complex128"), ("tensors", "tensor and host")
    into_all_kinds(REDUCED[into], dtypes, sources, backend, list(REDUCED).index(into))


def test_out_of_whole_numbers(backend: str) -> None:
    a = array((6, 4), "int64", 1)
    for sharding in some_layouts(backend, 2):
        x, z, b = st.device_put(a, sharding), put(np.zeros(4, int), backend), np.zeros(4, int)
        for reduce in (
            lambda t, o: np.sum(t, axis=0, out=o), lambda t, o: t.max(axis=0, out=o), lambda t, o: t.prod(axis=0, out=o),
            lambda t, o: t.argmax(axis=0, out=o), lambda t, o: np.argmin(t, axis=0, out=o), lambda t, o: t.any(axis=0, out=o),
        ):  # fmt: skip
            reduce(x, z)
            reduce(a, b)
            assert_same(z, b, exact=True)
        narrow = put(np.zeros(4, "int8"), backend)
        x.sum(axis=0, out=narrow)
        assert_same(narrow, a.sum(0).astype("int8"), exact=True)


def test_out_is_what_comes_back(backend: str) -> None:
    x, y = put(np.arange(4.0), backend), put(np.ones(4), backend)
    z, view = put(np.zeros(4), backend), put(np.zeros((2, 4)), backend)[1]
    host = np.zeros(4)
    for out in (z, view, host):
        assert np.add(x, y, out=out) is out
        assert np.add(x, y, out=(out,)) is out
        assert np.add(x, y, out) is out
        assert np.sum(put(np.ones((3, 4)), backend), axis=0, out=out) is out
        assert put(np.ones((3, 4)), backend).sum(axis=0, out=out) is out
        np.testing.assert_array_equal(np.asarray(out), np.full(4, 3.0))
    assert np.add(x, y, out=None) is not x
    assert np.add(np.arange(4.0), 1, out=z) is z
    assert_same(z, np.arange(1.0, 5), exact=True)


@everywhere
def test_out_is_wider_than_what_is_computed(backend: str) -> None:
    """The operands have fewer elements, or none; ``out`` has another dtype, or cannot be a view in the library."""
    row, column, turns = array((4,), "float32", 1), array((4, 1), "float64", 2), itertools.count(USABLE.index(backend))
    for into in (
        lambda t, p: np.sign(p(row), out=t),
        lambda t, p: np.add(p(row), p(column), out=t),
        lambda t, p: np.multiply(p(row), 2, out=t[1:]),
        lambda t, p: np.add(1, 2.5, out=t.T),
        lambda t, p: np.negative(True + 1, out=t[0]),
        lambda t, p: np.subtract(p(row), p(column), out=t[::-1]),
        lambda t, p: np.add(p(row), 1, out=t[::-2, ::-1]),
        lambda t, p: t.__setitem__(np.s_[::-1], p(row)),
        lambda t, p: t.reshape(-1).__setitem__([15, 0, 3, 3], p(row)),
    ):
        for sharding in layouts(backend, 2, 3):
            for dtype in strided(("float32", "complex128"), 2, next(turns)):
                x, b = st.device_put(np.ones((4, 4), dtype), sharding), np.ones((4, 4), dtype)
                into(b, lambda v: v)
                into(x, lambda v: put(v, backend, (3,)))
                assert_same(x, b)


def test_out_of_other_kinds_is_refused(backend: str) -> None:
    x, z = put(np.arange(4.0), backend), put(np.zeros(4), backend)
    for out in ([0.0] * 4, "a", 3, (z, z), ()):
        with pytest.raises((TypeError, ValueError)):
            np.add(x, x, out=out)
        with pytest.raises((TypeError, ValueError)):
            x.sum(axis=0, out=out)
    with pytest.raises(TypeError, match=r"not of the same kind as|Cannot cast"):
        np.add(x, x, out=z, dtype="complex64")
    with pytest.raises(ValueError, match="shape"):
        np.sum(put(np.ones((4, 3)), backend), axis=0, out=z)
    with pytest.raises(ValueError, match="shape"):
        np.matmul(put(np.ones((4, 3)), backend), np.ones((3, 2)), out=z)
    assert_same(z, np.zeros(4), exact=True)


def test_host_arrays_as_out(backend: str) -> None:
    """``out`` may be a view of a host array; results are cast and broadcast as in NumPy."""
    a, b = array((4, 3), "float64", 1), array((4, 3), "float64", 2)
    x, y = put(a, backend), put(b, backend)
    for dtype in ("float64", "float32", "complex64"):
        for look in (lambda t: t, lambda t: t[::-1], lambda t: t.T.copy().T):
            mine, his = np.zeros((4, 3), dtype), np.zeros((4, 3), dtype)
            np.add(x, y, out=look(mine))
            np.add(a, b, out=look(his))
            np.testing.assert_array_equal(mine, his)
    wide = np.zeros((2, 4, 3))
    np.add(x, y, out=wide)
    np.testing.assert_array_equal(wide, np.stack([a + b, a + b]))
    for out, kind in ((np.zeros((4, 3), int), TypeError), (np.zeros((3, 4)), ValueError), (np.zeros(3), ValueError)):
        with pytest.raises(kind):
            np.add(x, y, out=out)
        assert not out.any()
    fixed = np.zeros((4, 3))
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        np.add(x, y, out=fixed)
    with pytest.raises(ValueError, match="read-only"):
        np.add(x, y, out=np.asarray(x))
    assert_same(x, a, exact=True)


@everywhere
def test_out_that_is_read_too(backend: str) -> None:
    a = np.arange(16.0).reshape(4, 4)
    for sharding in some_layouts(backend, 2):
        for into in (
            lambda t: np.matmul(t, t, out=t),
            lambda t: np.matmul(t.T, t, out=t),
            lambda t: np.matmul(t, t, out=t.T),
            lambda t: np.sum(t, axis=0, out=t[0]),
            lambda t: t.sum(axis=1, out=t[:, 2]),
            lambda t: t.max(axis=0, keepdims=True, out=t[1:2]),
            lambda t: np.clip(t, 3, 9, out=t),
            lambda t: np.clip(t[1:], t[:-1] - 1, 9, out=t[:-1]),
            lambda t: np.add(t, t.T, out=t),
            lambda t: np.subtract(t[::-1], t, out=t[::-1]),
            lambda t: np.add(t[0], t, out=t),
            lambda t: np.copyto(t, t.T),
            lambda t: np.copyto(t, t[::-1], where=t > 5),
            lambda t: np.multiply(t.reshape(-1)[1:], t.reshape(-1)[:-1], out=t.reshape(-1)[1:]),
        ):
            x, b = st.device_put(a, sharding), a.copy()
            into(b)
            into(x)
            assert_same(x, b)


# -- operands that overlap what is written ---------------------------------------------------------

OVERLAPS: dict[str, Write] = {
    "x[1:] += x[:-1]": lambda x: operator.iadd(x[1:], x[:-1]),
    "x[:-1] += x[1:]": lambda x: operator.iadd(x[:-1], x[1:]),
    "x *= x[::-1]": lambda x: operator.imul(x, x[::-1]),
    "x[::-1] -= x": lambda x: operator.isub(x[::-1], x),
    "x[:] = x.T": lambda x: x.__setitem__(slice(None), x.T),
    "x[...] = x[::-1]": lambda x: x.__setitem__(..., x[::-1]),
    "x.T[...] = x": lambda x: x.T.__setitem__(..., x),
    "x += x.T": lambda x: operator.iadd(x, x.T),
    "x.T += x": lambda x: operator.iadd(x.T, x),
    "x += x": lambda x: operator.iadd(x, x),
    "x -= x[0]": lambda x: operator.isub(x, x[0]),
    "x -= x[:, :1]": lambda x: operator.isub(x, x[:, :1]),
    "x -= x[2, 3, ...]": lambda x: operator.isub(x, x[2, 3, ...]),
    "x *= x[1, 1]": lambda x: operator.imul(x, x[1, 1]),
    "x[2] = x[3]": lambda x: x.__setitem__(2, x[3]),
    "x[:, 0] = x[0]": lambda x: x.__setitem__((slice(None), 0), x[0]),
    "x[::2] = x[1::2]": lambda x: x.__setitem__(slice(None, None, 2), x[1::2]),
    "x[1:, 1:] = x[:-1, :-1]": lambda x: x.__setitem__((slice(1, None), slice(1, None)), x[:-1, :-1]),
    "np.add(x[:-1], x[1:], out=x[:-1])": lambda x: np.add(x[:-1], x[1:], out=x[:-1]),
    "np.add(x[:-1], x[1:], out=x[1:])": lambda x: np.add(x[:-1], x[1:], out=x[1:]),
    "flat, one further": lambda x: operator.iadd(x.reshape(-1)[1:], x.reshape(-1)[:-1]),
    "flat, from another shape": lambda x: x.reshape(-1).__setitem__(slice(0, 4), x[:, 2]),
    "flat, backwards": lambda x: x.__setitem__(..., x.reshape(-1)[::-1].reshape(x.shape)),
    "by index arrays": lambda x: x.__setitem__([0, 1, 2, 3], x[::-1]),
    "by index arrays, itself": lambda x: x.__setitem__([3, 2, 1, 0], x),
    "by index arrays, a view of itself": lambda x: x.T.__setitem__([3, 2, 1, 0], x.T),
    "by index arrays, repeated": lambda x: x.__setitem__([1, 1, 1, 1], x),
    "by index arrays, one row": lambda x: x.__setitem__([1, 2], x[0]),
    "by an index array of two dimensions": lambda x: x.__setitem__((slice(None), np.array([[3, 1], [0, 2]])), x.reshape(4, 2, 2)),
    "by a mask": lambda x: x.__setitem__(x > 5, x[x > 5][::-1]),
    "by a mask of another view": lambda x: x.__setitem__(x.T > 5, 0),
    "by a mask of rows": lambda x: x.__setitem__(x[:, 0] > 3, x[0]),
    "by what it holds": lambda x: x.__setitem__(x[0].real.astype(int) % 4, x),
    "by reading by index arrays": lambda x: x.__setitem__(..., x[[3, 0, 1, 2]]),
    "both parts of a sum": lambda x: x.__setitem__(slice(1, 3), x[0:2] + x[2:4]),
    "a reduction": lambda x: operator.isub(x, x.sum(axis=0, keepdims=True)),
    "a row of a diagonal": lambda x: operator.iadd(x.reshape(-1)[::5], x[1]),
    "new dimensions": lambda x: x[None].__setitem__(0, x.T[None][0]),
    "st.flip": lambda x: x.__setitem__(..., (np if isinstance(x, np.ndarray) else st).flip(x, axis=1)),
}  # fmt: skip


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_operands_that_overlap_what_is_written(overlap: str, backend: str) -> None:
    a, case = np.arange(16.0).reshape(4, 4), list(OVERLAPS).index(overlap)
    for number, sharding in enumerate(some_layouts(backend, 2, case=case)):
        for dtype in strided(("float64", "int64"), 2, number + case // 2):
            x, b = st.device_put(a.astype(dtype), sharding), a.astype(dtype)
            OVERLAPS[overlap](b)
            OVERLAPS[overlap](x)
            assert_same(x, b, exact=True)
            OVERLAPS[overlap](x[...])
            OVERLAPS[overlap](b[...])
            assert_same(x, b, exact=True)


@pytest.mark.full
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_operands_that_overlap_what_is_written_everywhere(overlap: str, backend: str) -> None:
    a = np.arange(16.0).reshape(4, 4)
    for shape in ((8,), (4, 2), (1, 3), (2, 2, 2)):
        mesh = mesh_of(shape, backend)
        for spec in all_specs(mesh, 2):
            for dtype in ("float64", "int8", "complex64"):
                x, b = st.device_put(a.astype(dtype), st.NamedSharding(mesh, spec)), a.astype(dtype)
                for _ in range(2):
                    OVERLAPS[overlap](b)
                    OVERLAPS[overlap](x)
                np.testing.assert_array_equal(np.asarray(x), b)


def test_masks_that_are_what_is_written(backend: str) -> None:
    a = np.array([[True, False, True], [False, False, True]])
    for sharding in some_layouts(backend, 2):
        for step in (
            lambda t: t.__setitem__(t, False),
            lambda t: t.__setitem__(t[:, ::-1], True),
            lambda t: t.__setitem__(t[:, 1:2].reshape(-1), True),
            lambda t: t.__setitem__([1, 0], t),
            lambda t: operator.ixor(t, t[::-1]),
            lambda t: t.T.__setitem__(t.T, ~t[t]),
        ):
            x, b = st.device_put(a, sharding), a.copy()
            step(b)
            step(x)
            assert_same(x, b, exact=True)


# -- values that several handles share -------------------------------------------------------------

KEPT: list[Any] = []


def keep(x: Any) -> Any:
    KEPT.append(x)
    return x


def mapped(function: Callable[..., Any]) -> Callable[[st.ShardedTensor], list[Any]]:
    def share(x: st.ShardedTensor) -> list[Any]:
        parts = st.shard(x, devices=x.sharding.mesh)
        results = st.pmap(function, parts)
        flat = [r for result in results for r in (result if isinstance(result, tuple) else (result,))]
        return [*parts, *flat]

    return share


def unsharded(x: st.ShardedTensor) -> list[Any]:
    parts = st.pmap(lambda p: p + 0, st.shard(x, devices=x.sharding.mesh))
    return [
        *parts,
        st.unshard(parts),
        st.unshard(parts),
        st.concat(parts),
        st.unshard(st.shard(x, devices=x.sharding.mesh)),
    ]


SHARED: dict[str, Callable[[st.ShardedTensor], list[Any]]] = {
    "reshard": lambda x: [st.reshard(x, x.sharding), x.reshard(x.sharding)],
    "reshard, to another layout": lambda x: [st.reshard(x, x.sharding.with_spec(st.P())), st.reshard(x, x.sharding.with_spec(st.P(None, "x")))],
    "reshard, there and back": lambda x: [st.reshard(st.reshard(x, x.sharding.with_spec(st.P())), x.sharding)],
    "device_put": lambda x: [st.device_put(x, x.sharding), x.to_device(x.sharding)],
    "device_put(may_alias=True)": lambda x: [st.device_put(x, x.sharding, may_alias=True)],
    "device_put(may_alias=False)": lambda x: [st.device_put(x, x.sharding, may_alias=False)],
    "device_put(donate=True)": lambda x: [st.device_put(st.reshard(x, x.sharding), x.sharding, donate=True)],
    "with_sharding_constraint": lambda x: [st.with_sharding_constraint(x, x.sharding)],
    "shard": lambda x: [*st.shard(x, devices=x.sharding.mesh), *st.shard(x, 1, devices=x.sharding.mesh), *x.shard()],
    "unshard": unsharded,
    "smap": lambda x: [st.smap(lambda p: p, x, axes=[0], devices=x.sharding.mesh)],
    "copy": lambda x: [x.copy(), x.copy().copy(), copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))],
    "asarray": lambda x: [st.asarray(x, copy=True), st.asarray(np.asarray(x), device=x.sharding)],
    "asarray(np.asarray(x), copy=False)": lambda x: [
        st.asarray(np.asarray(x), device=x.sharding, copy=x.sharding.mesh.flat[0].backend != "numpy"),
        st.device_put(np.asarray(x), x.sharding, may_alias=True),
        st.device_put(np.asarray(x), x.sharding, may_alias=True),
    ],
    "np.asarray": lambda x: [np.asarray(x), np.asarray(x).T, np.asarray(x[1:]), np.asarray(x.T), memoryview(np.asarray(x))],
    "shards": lambda x: [s.data for s in x.addressable_shards],
    "astype": lambda x: [x.astype(x.dtype), x.astype("int64")],
    "to_batched_list": lambda x: st.to_batched_list(x, 3, leftover="repeat"),
    "operators that need not copy": lambda x: [
        +x, x + 0, st.conj(x), st.concat([x]), st.roll(x, 0), st.broadcast_to(x, x.shape), x.clip(-99), x.round(), st.where(True, x, x),
        x.sum(axis=()), st.stack([x])[0], x.flatten(), st.reshape(x, x.shape, copy=True), x[[*range(len(x))]], x[x == x],
        st.real(x.astype("complex128")), st.tensordot(x, 1.0 * st.ones(()), axes=0),
    ],
    "elements and sums": lambda x: [x[1, 1], x.sum(), x.max(), x[0].sum(), x[0, 0, ...].copy()],
    "a map that returns its shard": mapped(lambda p: p),
    "a map that returns views of its shard": mapped(lambda p: (p.T, turned(p), p.reshape(-1), p[:1])),
    "a map that returns it twice": mapped(lambda p: [q := p + 0, (q, q, q[:1])][1]),
    "a map that keeps it": mapped(lambda p: keep(p + 0)),
    "a map that keeps a view of it": mapped(lambda p: [q := p + 0, keep(q[:1])][0]),
    "a map that returns a view of what it keeps": mapped(lambda p: keep(p + 0)[:1]),
    "a map of one thing for all": lambda x: st.pmap(lambda i, w: w, list(range(5)), x),
    "a map that returns one thing": lambda x: st.pmap(lambda i, w: (w, w[:1]), [0, 1], st.reshard(x, x.sharding.mesh.flat[0]))[0],
}  # fmt: skip

WRITES: dict[str, Write] = {
    "x += 1": lambda x: operator.iadd(x, 1),
    "x[...] = 7": lambda x: x.__setitem__(..., 7),
    "x[0] = 7": lambda x: x.__setitem__(0, 7),
    "x[::-1] -= 5": lambda x: operator.isub(x[::-1], 5),
    "x.T[...] = 3": lambda x: x.T.__setitem__(..., 3),
    "x[[0]] = 9": lambda x: x.__setitem__([0], 9),
    "x[x == x] = 4": lambda x: x.__setitem__(x == x, 4),
    "np.add": lambda x: np.add(x, 1, out=x),
    "reshape": lambda x: operator.imul(x.reshape(-1), 3),
    "setitem of all": lambda x: x.__setitem__(slice(None), np.asarray(x) + 1),
}


@pytest.mark.parametrize("way", SHARED)
def test_writes_never_show_in_other_handles(way: str, backend: str) -> None:
    """A write to any of the tensors that share a value is visible in none of the others, neither the first time, nor
    the second, when each has memory of its own.
    """
    a = np.arange(24.0).reshape(6, 4) + 1
    rows = st.NamedSharding(mesh_of((4,), backend), st.P("x"))
    both = st.NamedSharding(mesh_of((2, 2), backend), st.P(("y", "x")))
    cases = itertools.product((rows, both), WRITES.items())
    for sharding, (name, write) in strided(cases, 3, list(SHARED).index(way)):
        KEPT.clear()
        x = st.device_put(a, sharding)
        others = SHARED[way](x)
        everything = [x, *others, *KEPT]
        values = [values_of(t) for t in everything]
        writable = [i for i, t in enumerate(everything) if isinstance(t, st.ShardedTensor) and t.size]
        for i in itertools.chain(writable, writable[:1]):
            target = everything[i]
            if not target.ndim:
                target = target[...]
            if not target.ndim and name not in ("x += 1", "x[...] = 7"):
                continue
            wanted = np.array(values[i], order="C")  # as every tensor counts
            (write if target.ndim else WRITES["x[...] = 7"])(target)
            (write if target.ndim else WRITES["x[...] = 7"])(wanted)
            values[i] = wanted if target is everything[i] else values_of(everything[i])
            for t, value in zip(everything, values, strict=True):
                np.testing.assert_array_equal(values_of(t), value, f"{name} to number {i} of {len(everything)}")
    KEPT.clear()


@everywhere
def test_a_mapped_function_that_writes_to_what_it_returned(backend: str) -> None:
    """The function keeps the array. Its later writes are visible nowhere, and writes to the tensor are not visible in
    the array.
    """
    KEPT.clear()
    contexts = []

    def add(p: Any) -> Any:
        contexts.append(current_device())
        return keep(p + 1)

    parts = st.pmap(add, st.shard(np.arange(8.0), devices=st.devices(backend)[:4]))
    whole = st.unshard(parts)
    for k, device in zip(KEPT, contexts, strict=True):
        with load(backend).on(device):
            k[...] = -1
    assert_same(whole, np.arange(1.0, 9), exact=True)
    for part in parts:
        part += 10
    assert all((values_of(k) == -1).all() for k in KEPT)
    assert_same(whole, np.arange(1.0, 9), exact=True)
    KEPT.clear()


HOSTED: dict[str, Callable[[np.ndarray], tuple[Any, np.ndarray]]] = {
    "an array": lambda a: (a, a),
    "a view": lambda a: (a, a[1:]),
    "a view whose owner was dropped": lambda a: (lambda b: (b[:], b[1:]))(a.copy()),
    "a transpose": lambda a: (a, a.T),
    "every other row": lambda a: (a, a[::2]),
    "a read-only array": lambda a: (a, np.lib.stride_tricks.as_strided(a, writeable=False)),
    "a column-major array": lambda a: (f := np.asfortranarray(a), f),
    "a buffer": lambda a: (lambda b: (np.frombuffer(b).reshape(a.shape), np.frombuffer(b).reshape(a.shape)))(
        bytearray(a.tobytes())
    ),
    "a memoryview": lambda a: (memoryview(a), a),
    "a list with it": lambda a: ([a], a),
    "a broadcast array": lambda a: (a[0], np.broadcast_to(a[0], a.shape)),
}


@pytest.mark.parametrize("kind", HOSTED)
def test_the_users_host_array_does_not_change(kind: str, backend: str) -> None:
    """A tensor may share the memory of the array; a write to the tensor is not visible there."""
    makes: tuple[Callable[[Any], Any], ...] = (
        lambda h: put(h, backend),
        lambda h: st.device_put(h, mesh_of((4,), backend), may_alias=True),
        lambda h: st.device_put(h, st.devices(backend)[2], may_alias=True),
        lambda h: st.asarray(h, device=mesh_of((4,), backend), copy=False if backend == "numpy" else None),
        lambda h: st.reshard(h, mesh_of((4,), backend), may_alias=True),
        lambda h: st.shard(st.device_put(h, mesh_of((4,), backend), may_alias=True), devices=mesh_of((4,), backend))[0],
        lambda h: st.device_put(h, mesh_of((4,), backend), may_alias=True)[...],
        lambda h: st.pmap(lambda i, w: w, [0], h)[0],
        lambda h: st.pmap(lambda p: p, [h], devices=st.devices(backend)[:1])[0],
    )
    for make, write in strided(itertools.product(makes, WRITES.values()), 3, list(HOSTED).index(kind)):
        held, given = HOSTED[kind](np.arange(24.0).reshape(6, 4))
        x = make(given)
        del given
        before, wanted = np.array(held), np.array(x, order="C")
        for _ in range(2):
            write(x)
            write(wanted)
        assert_same(x, wanted, exact=True)
        np.testing.assert_array_equal(np.asarray(held), before)


@everywhere
def test_donated_values_that_others_share(backend: str) -> None:
    a = np.arange(8.0)

    def zero(p: Any) -> Any:
        p[...] = 0
        return p

    for share in (
        lambda x: x.copy(), lambda x: st.reshard(x, x.sharding), np.asarray, lambda x: x.addressable_shards[0].data,
        lambda x: st.pmap(lambda p: p, [x])[0], lambda x: st.pmap(turned, [x])[0][::-1], lambda x: x[:],
    ):  # fmt: skip
        for give in (lambda x: st.pmap(zero, [x], donate=True)[0], lambda x: st.device_put(x, x.sharding, donate=True)):
            x = st.device_put(a, st.devices(backend)[3])
            other = share(x)
            view = isinstance(other, st.ShardedTensor) and np.may_share_memory(other, x)
            new = give(x)
            with pytest.raises(st.DonatedError):
                x += 1
            with pytest.raises(st.DonatedError):
                x[0] = 1
            with pytest.raises(st.DonatedError):
                np.add(a, a, out=x)
            new += 5
            new[1] = -1
            if view:
                assert other.is_donated
            else:
                np.testing.assert_array_equal(values_of(other), a)


# -- what is kept, and what moves ------------------------------------------------------------------


@everywhere
def test_a_write_keeps_what_the_handle_is(backend: str) -> None:
    """The handle keeps its layout, dtype and commitment: the value is transferred to the layout of the handle, never
    the reverse.
    """
    far = put(np.arange(12.0).reshape(6, 2), backend, (3,), st.P(None, "x"))
    free, placed = st.zeros((6, 2)), put(np.zeros((6, 2), "float32"), backend)
    for x in (free, placed, placed[...], placed.T.T):
        sharding, committed, dtype = x.sharding, x.committed, x.dtype
        x += far
        x[...] = far
        x[1:] = far[:5]
        np.multiply(far, far, out=x)
        np.sum(st.stack([far, far]), axis=0, out=x)
        x[[0, 5]] = far[[1, 2]]
        x[far > 3] = 1
        x[far > 5] = far[far > 5]
        assert (x.sharding, x.committed, x.dtype) == (sharding, committed, dtype)
        assert x.devices() == set(sharding.mesh.flat)
    assert not free.committed
    assert not (free + 1).committed
    pinned = st.reshard(placed, placed.sharding.with_memory_kind("pinned_host"))
    pinned += far
    pinned[0] = 1
    assert pinned.sharding.memory_kind == "pinned_host"


def moved(function: Callable[[], Any]) -> list[tuple[int, int, bool]]:
    """Returns (bytes, destination, explicit) of each transfer."""
    with st.transfers() as log:
        function()
    return sorted((r.bytes, r.destination.id, r.explicit) for r in log if r.bytes)


@everywhere
def test_only_what_must_move_moves(backend: str) -> None:
    """12 rows over 4 devices. A host value is sent to the owners of the written elements, and to no other device."""
    x = put(np.arange(48.0).reshape(12, 4), backend)
    y = put(np.ones((12, 4)), backend)
    rows = np.ones((2, 4))
    assert moved(lambda: x.__setitem__(slice(3, 5), rows)) == [(64, 1, False)]
    assert moved(lambda: x.__setitem__(slice(2, 4), rows)) == [(32, 0, False), (32, 1, False)]
    assert moved(lambda: x.__setitem__((slice(None), 1), np.ones(12))) == [(24, k, False) for k in range(4)]
    assert moved(lambda: x.__setitem__((11, 3), np.float64(3))) in ([], [(8, 3, False)])
    assert moved(lambda: x.__setitem__([11, 4, 5], np.ones((3, 4)))) == [(32, 3, False), (64, 1, False)]
    assert moved(lambda: x.__setitem__([4, 4, 4], np.ones((3, 4)))) == [(32, 1, False)]
    assert moved(lambda: x.__setitem__(slice(3, 5), 7)) == []
    assert moved(lambda: x.__setitem__((slice(None), 1), 7)) == []
    assert moved(lambda: operator.iadd(x[3:5], 1)) == []
    assert moved(lambda: operator.imul(x[:, 1:], y[:, 1:])) == []
    assert moved(lambda: operator.iadd(x, y)) == []
    assert moved(lambda: np.add(x, y, out=x)) == []
    assert moved(lambda: x.__setitem__(slice(3, 9), y[3:9])) == []
    assert moved(lambda: x.__setitem__(slice(4, 9), y[3:8])) == [(32, 2, False)]
    assert moved(lambda: x.T.__setitem__(0, 1)) == []
    assert moved(lambda: operator.iadd(x[7, 2, ...], 1)) == []
    assert moved(lambda: x.__setitem__(y > 0, 3)) == []
    assert moved(lambda: x.__setitem__((slice(None), [0, 2]), y[:, [1, 3]])) == []
    assert moved(lambda: operator.iadd(x, y[0])) == [(32, k, False) for k in (1, 2, 3)]
    replicated = put(np.zeros((12, 4)), backend, spec=st.P())
    assert moved(lambda: replicated.__setitem__(slice(3, 5), rows)) == [(64, k, False) for k in range(4)]
    assert moved(lambda: operator.iadd(replicated, 1)) == []
    assert moved(lambda: replicated.__setitem__(..., y)) == [(96, k, False) for k in range(4) for _ in range(3)]


# -- in place is in place --------------------------------------------------------------------------

N = 250_000  # elements: two megabytes

CHEAP: dict[str, tuple[Callable[[Any, Any, Any], Any], float]] = {
    "x += y": (lambda x, y, m: operator.iadd(x, y), 0.1),
    "x += 1": (lambda x, y, m: operator.iadd(x, 1), 0.1),
    "x *= x": (lambda x, y, m: operator.imul(x, x), 0.1),
    "x[...] = y": (lambda x, y, m: x.__setitem__(..., y), 0.1),
    "x[...] = 3": (lambda x, y, m: x.__setitem__(..., 3), 0.1),
    "x[a:b] = 3": (lambda x, y, m: x.__setitem__(slice(1000, -1000), 3), 0.1),
    "x[a:b] = y[a:b]": (lambda x, y, m: x.__setitem__(slice(1000, -1000), y[1000:-1000]), 0.1),
    "x[5] = 3": (lambda x, y, m: x.__setitem__(5, 3), 0.1),
    "np.add(x, y, out=x)": (lambda x, y, m: np.add(x, y, out=x), 0.1),
    "np.add(y, y, out=x)": (lambda x, y, m: np.add(y, y, out=x), 0.1),
    "np.sqrt(y, out=x)": (lambda x, y, m: np.sqrt(y, out=x), 0.1),
    "x[mask] = 0": (lambda x, y, m: x.__setitem__(m, 0), 0.3),
    "x[[1, 2]] = 0": (lambda x, y, m: x.__setitem__([1, 2], 0), 0.1),
    "x[::-1] *= 2": (lambda x, y, m: operator.imul(x[::-1], 2), 0.1),
    "x[1:] *= 2": (lambda x, y, m: operator.imul(x[1:], 2), 0.1),
    "x.reshape(500, -1).T *= 2": (lambda x, y, m: operator.imul(x.reshape(500, -1).T, 2), 0.1),
    "x.reshape(500, -1)[:, 3] = 1": (lambda x, y, m: x.reshape(500, -1).__setitem__((slice(None), 3), 1), 0.1),
    "x.fill(2)": (lambda x, y, m: x.fill(2), 0.1),
    "y.sum(out=x[3, ...])": (lambda x, y, m: y.sum(out=x[3, ...]), 0.1),
    "iteration": (lambda x, y, m: [operator.iadd(row, 1) for row in x.reshape(100, -1)], 0.1),
}  # fmt: skip


def turns(backend: str) -> bool:
    """Returns whether views of a backend's arrays may have negative strides."""
    return load(backend).negative_strides


@pytest.mark.parametrize("what", CHEAP)
def test_in_place_is_in_place(what: str, backend: str) -> None:
    """If nothing else holds the memory, no memory of its size is allocated, and its address does not change."""
    if "::-1" in what and not turns(backend):
        pytest.skip(f"backend {backend!r} writes one by one what its views cannot reach: backwards")
    write, limit = CHEAP[what]
    for spec in (st.P("x"), st.P()):
        mesh = st.NamedSharding(mesh_of((4,), backend), spec)
        x, y = st.zeros((N,), device=mesh), st.ones((N,), device=mesh)
        mask = st.arange(N, device=mesh) % 2 > 0
        for _ in range(2):
            write(x, y, mask)
        before = address(x)
        with allocated(backend) as peak:
            for _ in range(2):
                write(x, y, mask)
        assert peak[0] < limit * x.nbytes * (4 if backend != "numpy" and spec == st.P() else 1)
        assert address(x) == before


def test_operands_that_lie_beside_what_is_written_are_not_copied(backend: str) -> None:
    """The operands may have any strides."""
    mesh = mesh_of((4,), backend)
    x, y = st.zeros((N,), device=mesh), st.ones((N,), device=mesh)
    for look in (
        lambda t: t[::2],
        lambda t: t[::-1],
        lambda t: t.reshape(500, -1).T,
        lambda t: t.reshape(500, -1)[:, ::2],
    ):
        view = look(x)
        backwards = look(np.zeros(N)).strides == (-8,)  # that is one by one, where no view goes so
        if look(y).sharding != view.sharding or (backwards and (backend == "checked" or not turns(backend))):
            continue
        view += look(y)
        with allocated(backend) as peak:
            view += look(y)
        assert peak[0] < 0.1 * x.nbytes


FRESH: dict[str, Callable[[st.NamedSharding], st.ShardedTensor]] = {
    "created": lambda s: st.zeros((N,), device=s),
    "put": lambda s: st.device_put(np.zeros(N), s),
    "computed": lambda s: st.zeros((N,), device=s) + 1,
    "computed, moved": lambda s: st.reshard(st.zeros((N,), device=s.mesh.flat[0]) + 1, s),
    "a copy, its original gone": lambda s: st.zeros((N,), device=s).copy(),
    "resharded, its original gone": lambda s: st.reshard(st.zeros((N,), device=s), s),
    "results of a map": lambda s: st.unshard(
        st.pmap(
            lambda i: np.zeros(N // 4) if s.mesh.flat[0].backend == "numpy" else st.zeros(N // 4),
            [0, 1, 2, 3],
            devices=s.mesh,
        )
    ),
    "a reduction": lambda s: st.ones((3, N), device=s.with_spec(st.P(None, "x"))).sum(axis=0),
    "what index arrays select": lambda s: st.zeros((2, N), device=s.with_spec(st.P(None, "x")))[[1]].squeeze(0).copy(),
    "donated": lambda s: st.device_put(st.zeros((N,), device=s), s, donate=True),
    "unpickled": lambda s: pickle.loads(pickle.dumps(st.zeros((N,), device=s))),
}


@pytest.mark.parametrize("source", FRESH)
def test_whatever_made_a_tensor_it_is_written_in_place(source: str, backend: str) -> None:
    """Writes are in place from the second one on, and from the first one on if nothing else holds the memory."""
    x = FRESH[source](st.NamedSharding(mesh_of((4,), backend), st.P("x")))
    x += 1
    before = address(x)
    with allocated(backend) as peak:
        x += 1
        x[5:-5] = 3
        x[[3, 4]] = 1
    assert peak[0] < 200_000
    assert address(x) == before


@everywhere
@pytest.mark.parametrize(
    "source", ["created", "put", "computed", "donated", "resharded, its original gone", "a copy, its original gone"]
)
def test_the_first_write_is_in_place_too(source: str, backend: str) -> None:
    x = FRESH[source](st.NamedSharding(mesh_of((4,), backend), st.P("x")))
    before = address(x)
    with st.transfers() as log:
        x += 1
    assert log.copied == 0
    assert address(x) == before


def viewed(shard: Any) -> Any:
    """Returns a view of the shard's array."""
    backend = load(shard.device.backend)
    with backend.on(shard.device):
        return backend.view(shard.data, ...)


HOLDERS: dict[str, Callable[[st.ShardedTensor], Any]] = {
    "its shards": lambda x: [s.data for s in x.addressable_shards],
    "views of its shards": lambda x: [viewed(s) for s in x.addressable_shards],
    "a copy": lambda x: x.copy(),
    "the same elsewhere": lambda x: st.reshard(x, x.sharding),
    "its parts": lambda x: st.shard(x, devices=x.sharding.mesh),
    "results of a map": lambda x: st.pmap(lambda p: p, st.shard(x, devices=x.sharding.mesh)),
    "the result of an operator that copies": lambda x: x + 0,
    "nothing": lambda x: np.asarray(x).sum(),
}


@everywhere
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_somebody_holds_is_copied_once(holder: str, backend: str) -> None:
    """The first write while it is held copies, and later writes do not. If it is released before the first write,
    nothing is copied.
    """
    x = st.ones((N,), device=mesh_of((4,), backend))
    held, before = HOLDERS[holder](x), address(x)
    copies = holder not in ("nothing", "the result of an operator that copies")
    with st.transfers() as log:
        x[1:-1] += 1
    assert log.copied == (x.nbytes if copies else 0)
    after = address(x)
    assert not (set(after) & set(before) if copies else set(after) ^ set(before))
    for _ in range(2):
        with st.transfers() as log:
            x += 1
            x[3:] = 5
            x[::2] *= 2
        assert log.copied == 0
        assert address(x) == after
        held = None
    held = HOLDERS[holder](x)
    del held
    with st.transfers() as log:
        x[1:-1] += 1
    assert log.copied == 0
    assert address(x) == after


def test_what_was_read_on_the_host_is_copied_once() -> None:
    x = st.ones((N,), device=mesh_of((4,), "numpy"))
    for read in (
        np.asarray, lambda t: np.asarray(t)[5:], lambda t: memoryview(np.asarray(t)), lambda t: np.asarray(t[7:]),
        lambda t: iter(np.asarray(t)), lambda t: np.asarray(t.reshape(500, -1).T), lambda t: [t.addressable_shards[2].data[:3]],
    ):  # fmt: skip
        kept, before = read(x), address(x)
        with st.transfers() as log:
            x[1:] += 1
        assert log.copied == x.nbytes
        assert address(x) != before
        before = address(x)
        with st.transfers() as log:
            x[1:] += 1
            kept = None
            x[...] = 1
        assert log.copied == 0
        assert address(x) == before


def test_a_shard_that_is_held_is_the_only_one_copied() -> None:
    """On separate memories, only the shards that a write changes can be copied."""
    x = st.ones((N,), device=mesh_of((4,), "checked"))
    held, before = x.addressable_shards[2].data, address(x)
    with st.transfers() as log:
        x[1:] += 1
    assert log.copied == x.nbytes // 4
    assert [a == b for a, b in zip(address(x), before, strict=True)] == [True, True, False, True]
    held = [s.data for s in x.addressable_shards]
    before = address(x)
    x[:5] = 0
    assert [a == b for a, b in zip(address(x), before, strict=True)] == [False, True, True, True]
    np.testing.assert_array_equal(np.asarray(held[0])[:5], [1.0, 2, 2, 2, 2])


def test_a_write_of_all_does_not_copy_the_old_value(backend: str) -> None:
    x = st.ones((N,), device=mesh_of((4,), backend))
    kept = [s.data for s in x.addressable_shards]
    with st.transfers() as log:
        x[...] = 3
    assert log.copied == 0
    assert all((values_of(k) == 1).all() for k in kept)
    assert_same(x, np.full(N, 3.0))


def random_writes(x: st.ShardedTensor, a: np.ndarray, count: int, rng: np.random.Generator) -> None:
    n, m = a.shape
    other, small = put(np.ones((n, m)), x.sharding.mesh.flat[0].backend), np.ones(m)
    for k in rng.integers(0, 12, count):
        i, j = int(rng.integers(0, n)), int(rng.integers(0, m))
        for t, o in ((x, other), (a, np.asarray(other))):
            if k == 0:
                t += 1
            elif k == 1:
                t[i] = j
            elif k == 2:
                t[:, j] = small[0]
            elif k == 3:
                t[i:] -= o[i:]
            elif k == 4:
                t.T[j, ::-1] = 2
            elif k == 5:
                t[[i, 0, i]] = small
            elif k == 6:
                t[t > 50] = 0
            elif k == 7:
                np.multiply(t, o, out=t)
            elif k == 8:
                t[i, j] += 1
            elif k == 9:
                t.reshape(-1)[j::3] = i
            elif k == 10:
                t[1:] = t[:-1]
            else:
                t.sum(axis=0, out=t[i])
                t[...] %= 7


def flat_memory(backend: str, count: int) -> None:
    rng = np.random.default_rng(3)
    a = np.arange(64.0).reshape(16, 4)
    x = put(a, backend)
    random_writes(x, a, drawn(5000, fast=100), rng)  # The caches of plans are filled.
    tracemalloc.start()
    random_writes(x, a, 100, rng)
    gc.collect()  # which empties Python's lists of free objects, too
    before = tracemalloc.get_traced_memory()[0], in_use(backend)
    random_writes(x, a, count, rng)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0], in_use(backend)
    tracemalloc.stop()
    assert_same(x, a)
    assert max(now - then for now, then in zip(after, before, strict=True)) < 250_000


def test_memory_is_flat_under_many_writes(backend: str) -> None:
    flat_memory(backend, drawn(4000, fast=600) if backend == "numpy" else drawn(800, fast=300))


@pytest.mark.full
def test_memory_is_flat_under_a_hundred_thousand_writes(backend: str) -> None:
    flat_memory(backend, 100_000 if backend == "numpy" else 30_000)


# -- errors ----------------------------------------------------------------------------------------


class Fault(Exception):
    """An error that a backend raises by itself, such as a lack of memory or a lost device."""


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[list[int]]:
    """Makes the checked backend fail at its ``number``-th copy or allocation."""
    calls = [0]

    def guard(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise Fault(f"{name}, call {number}")
            return real(self, *args, **kwargs)

        patch.setattr(owner, name, method)

    with monkeypatch.context() as patch:
        for name in ("to_device", "from_host", "to_host", "contiguous"):
            guard(CheckedBackend, name)
        guard(_Namespace, "asarray")
        patch.setattr(_Namespace, "empty", lambda self, *a, **k: real_empty(calls, number, *a, **k), raising=False)
        yield calls


def real_empty(calls: list[int], number: int, *args: Any, **kwargs: Any) -> Any:
    calls[0] += 1
    if calls[0] == number:
        raise Fault(f"empty, call {number}")
    return load("checked").xp.zeros(*args, **kwargs)


FRAGILE: dict[str, Callable[[Any, Any], Any]] = {
    "x += y": lambda x, y: operator.iadd(x, y),
    "x += host": lambda x, y: operator.iadd(x, np.asarray(y)),
    "x[1:] += x[:-1]": lambda x, y: operator.iadd(x[1:], x[:-1]),
    "x[...] = y": lambda x, y: x.__setitem__(..., y),
    "x[2:9] = y[1:8]": lambda x, y: x.__setitem__(slice(2, 9), y[1:8]),
    "x.T[...] = y.T": lambda x, y: x.T.__setitem__(..., y.T),
    "x[rows] = y[rows]": lambda x, y: x.__setitem__([9, 3, 3, 0], y[2:6]),
    "x[rows, :] = host": lambda x, y: x.__setitem__(([7, 1], slice(None)), np.ones((2, 4))),
    "x[mask] = 0": lambda x, y: x.__setitem__(y > 5, 0),
    "x[mask] = values": lambda x, y: x.__setitem__(y > 5, y[y > 5]),
    "x[mask of rows] = y[0]": lambda x, y: x.__setitem__(y[:, 0] > 5, y[0]),
    "np.multiply(y, y, out=x)": lambda x, y: np.multiply(y, y, out=x),
    "np.matmul(x, w, out=x)": lambda x, y: np.matmul(x, y[:4], out=x),
    "y.sum(axis=0, out=x[1])": lambda x, y: y.sum(axis=0, out=x[1]),
    "x[::-1] = x": lambda x, y: x.__setitem__(slice(None, None, -1), x),
    "x.reshape(8, 5)[1:] += 1": lambda x, y: operator.iadd(x.reshape(8, 5)[1:], 1),
    "x.reshape(8, 5)[1:] = y": lambda x, y: x.reshape(8, 5).__setitem__(slice(1, None), y.reshape(8, 5)[:-1]),
    "x *= 2": lambda x, y: operator.imul(x, 2),
    "x.fill(2)": lambda x, y: x.fill(2),
}  # fmt: skip


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("write", ["x += y", "x[2:9] = y[1:8]", "x[rows] = y[rows]", "x *= 2"])
def test_ctrl_c_at_any_line_leaves_a_whole_value(write: str, held: bool, backend: str) -> None:
    """The value is the old one or the new one, also where each device writes a shard in its own memory, and where one
    shard, which is held, is replaced by a copy. The tensor can be read and written afterwards.
    """
    a, b = np.arange(40.0).reshape(10, 4), array((10, 4), "float64", 7) * 4
    wanted, found = a.copy(), set()
    FRAGILE[write](wanted, b)
    for line in strided(range(1, 10_000), 2, held):
        x, y = put(a, backend, (4,)), put(b, backend, (4,))
        kept = x.addressable_shards[1].data if held else None
        # A signal between the last line of a block and `__exit__`, which Python may deliver, leaves its device current.
        call = functools.partial(contextvars.copy_context().run, FRAGILE[write], x, y)
        place = raised_at(line, [str(write_transaction.__file__), str(writes.__file__)], call)
        if not place:
            break
        now = np.asarray(x)
        assert np.array_equal(now, a) or np.array_equal(now, wanted), place
        found.add(bool(np.array_equal(now, wanted)))
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(on_host(shard.data, shard.device), now[shard.index])
        if held:
            np.testing.assert_array_equal(on_host(kept, st.devices(backend)[1]), a[3:6])
        x[...] = 1
        assert x.tolist() == np.ones((10, 4)).tolist(), place
    assert False in found


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("write", FRAGILE)
def test_a_fault_in_the_middle_changes_nothing(write: str, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever copy fails, the tensor and its readers are unchanged, and the next write works."""
    a, b = np.arange(40.0).reshape(10, 4), array((10, 4), "float64", 7) * 4
    wanted = a.copy()
    FRAGILE[write](wanted, b)
    specs = (st.P("x"), st.P(None, ("y", "x")), st.P())
    for spec in strided(specs, 3, list(FRAGILE).index(write) + 2 * held):
        for number in strided(range(1, 200), 2, held):
            x, y = put(a, "checked", (2, 2), spec), put(b, "checked", (3,))
            view = x[1:]
            view + 1
            kept = [s.data for s in x.addressable_shards] if held else None
            with failing(monkeypatch, number) as calls, contextlib.suppress(Fault):
                FRAGILE[write](x, y)
            if calls[0] < number:
                assert_same(x, wanted)
                break
            value = np.asarray(x)
            np.testing.assert_array_equal(value, a, f"{spec}, call {number}")
            assert_same(view, a[1:], exact=True)
            FRAGILE[write](x, y)
            assert_same(x, wanted)
            assert_same(view, wanted[1:])
            del kept
        else:
            raise AssertionError("more copies than this test thinks of")


REFUSED: list[tuple[Callable[[Any], Any], type[Exception]]] = [
    (lambda x: x.__setitem__(10, 1), IndexError),
    (lambda x: x.__setitem__((0, 0, 0), 1), IndexError),
    (lambda x: x.__setitem__("a", 1), IndexError),
    (lambda x: x.__setitem__([0, 10], 1), IndexError),
    (lambda x: x.__setitem__([-11], 1), IndexError),
    (lambda x: x.__setitem__(1.0, 1), IndexError),
    (lambda x: x.__setitem__([0.5], 1), IndexError),
    (lambda x: x.__setitem__(np.ones(9, bool), 1), IndexError),
    (lambda x: x.__setitem__(np.ones((10, 3), bool), 1), IndexError),
    (lambda x: x.__setitem__(([0, 1], [0, 1, 2]), 1), IndexError),
    (lambda x: x.__setitem__((..., ...), 1), IndexError),
    (lambda x: x.__setitem__(slice(None), np.ones(3)), ValueError),
    (lambda x: x.__setitem__(slice(0, 2), np.ones((3, 4))), ValueError),
    (lambda x: x.__setitem__((0, 0), np.ones(2)), ValueError),
    (lambda x: x.__setitem__((0, 0), [1, 2]), (ValueError, TypeError)),
    (lambda x: x.__setitem__([0, 1], np.ones((3, 4))), ValueError),
    (lambda x: x.__setitem__(np.ones((10, 4), bool), np.ones(39)), ValueError),
    (lambda x: x.__setitem__(slice(None), [[1, 2], [3]]), ValueError),
    (lambda x: x.__setitem__(0, "a"), (ValueError, TypeError)),
    (lambda x: x.__setitem__(0, None), TypeError),
    (lambda x: x.__setitem__(0, object()), TypeError),
    (lambda x: x.__setitem__(0, 1j), TypeError),
    (lambda x: x.__setitem__(0, 2**70), OverflowError),
    (lambda x: x.__setitem__(slice(None), float("nan")), ValueError),
    (lambda x: x.__setitem__(slice(None), float("inf")), OverflowError),
    (lambda x: x.__setitem__([0], 2**70), OverflowError),
    (lambda x: x.__setitem__(np.ones((10, 4), bool), 2**70), OverflowError),
    (lambda x: x.__setitem__(slice(None), np.array(["a"])), (ValueError, TypeError)),
    (lambda x: operator.iadd(x, 0.5), TypeError),
    (lambda x: operator.iadd(x, np.ones((10, 4))), TypeError),
    (lambda x: operator.itruediv(x, 2), TypeError),
    (lambda x: operator.iadd(x, 2**70), OverflowError),
    (lambda x: operator.iadd(x, np.ones((9, 4), int)), ValueError),
    (lambda x: operator.iand(x, 1.0), TypeError),
    (lambda x: np.add(x, 0.5, out=x), TypeError),
    (lambda x: np.sqrt(x, out=x), TypeError),
    (lambda x: np.argmax(x, axis=0, out=x[:, 0]), ValueError),
    (lambda x: np.sum(x, axis=0, out=x), ValueError),
    (lambda x: np.matmul(x, x, out=x), ValueError),
    (lambda x: np.sum(x, axis=5, out=x[0]), ValueError),
    (lambda x: np.copyto(x, 0.5 * np.ones((10, 4))), TypeError),
    (lambda x: np.copyto(x, np.ones(3, int)), ValueError),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_as_numpy_does(number: int, backend: str) -> None:
    """The error has NumPy's class, and nothing is written."""
    write, kind = REFUSED[number]
    a = np.arange(40).reshape(10, 4)
    with pytest.raises(kind):
        write(a.copy())
    for sharding in some_layouts(backend, 2, 3, case=number):
        x = st.device_put(a, sharding)
        for target in (x, x[...], x.T.T):
            with pytest.raises(kind):
                write(target)
            assert_same(x, a, exact=True)


RAISING: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "x /= y": (lambda x, y: operator.itruediv(x, y), "float64"),
    "x[::-1] /= y": (lambda x, y: operator.itruediv(x[::-1], y), "float64"),
    "x += y, cast": (lambda x, y: operator.iadd(x, 1e300 / (y + 1e-3)), "float32"),
    "x[...] = y, cast": (lambda x, y: x.__setitem__(..., 1e300 / (y + 1e-3)), "float32"),
    "x[::-1] = y, cast": (lambda x, y: x.__setitem__(slice(None, None, -1), 1e300 / (y + 1e-3)), "float32"),
    "x[rows] = y, cast": (lambda x, y: x.__setitem__(np.arange(len(x)), 1e300 / (y + 1e-3)), "float32"),
    "x[mask] = y, cast": (lambda x, y: x.__setitem__(x > 0, 1e300 / (y + 1e-3)), "float32"),
    "np.log(y, out=x)": (lambda x, y: np.log(y, out=x), "float64"),
    "np.divide(x, y, out=x)": (lambda x, y: np.divide(x, y, out=x), "float64"),
    "np.multiply(y, y, out=x)": (lambda x, y: np.multiply(y * 1e200, y * 1e200, out=x), "float64"),
    "np.sum(..., out=x)": (lambda x, y: np.sum(st.stack([y * 1e308, y * 1e308]), axis=0, out=x), "float64"),
    "x //= y": (lambda x, y: operator.ifloordiv(x, y.astype(int)), "int64"),
}


@pytest.mark.parametrize("write", RAISING)
@pytest.mark.parametrize("how", ["errstate", "warnings"])
def test_floating_point_errors_leave_a_whole_value(write: str, how: str, backend: str) -> None:
    """The value is the old one or the new one on every device, whichever element raises the error, also beyond the size
    of NumPy's buffers.
    """
    n = 20_000
    change, dtype = RAISING[write]
    for zero_at in (0, 3, n // 2, n - 1):
        y = np.full(n, 4.0)
        y[zero_at] = 0
        for sharding in some_layouts(backend, 1, 2, case=min(zero_at, 5)):
            x, divisor = st.device_put(np.full(n, 9, dtype), sharding), st.device_put(y, sharding)
            with warnings.catch_warnings(), np.errstate(all="raise" if how == "errstate" else "warn"):
                warnings.simplefilter("error" if how == "warnings" else "ignore")
                with raises(FloatingPointError if how == "errstate" else RuntimeWarning, backend):
                    change(x, divisor)
            value = np.asarray(x)
            old = value == 9
            assert old.all() or not old.any(), (sharding, zero_at, int(old.sum()))
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(on_host(shard.data, shard.device), value[shard.index])
            x[...] = 1
            assert_same(x, np.ones(n, dtype), exact=True)


def test_errors_of_a_users_own_leave_a_whole_value(backend: str) -> None:
    """The handler of floating-point errors may raise any exception."""
    x = put(np.ones(8), backend)
    with raises(KeyError, backend), np.errstate(divide="call", call=lambda *a: {}["no"]):
        x /= 0
    value = np.asarray(x)
    assert np.isinf(value).all() or (value == 1).all()


def test_errors_of_others_are_not_swallowed(backend: str) -> None:
    x = put(np.ones(8), backend)

    class Bad:
        def __index__(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        x[Bad()] = 1
    x[...] = 2
    assert_same(x, np.full(8, 2.0))


# -- guards ----------------------------------------------------------------------------------------

GUARDED: dict[str, Callable[[Any, Any], Any]] = {
    "x += y": lambda x, y: operator.iadd(x, y),
    "x += host": lambda x, y: operator.iadd(x, np.ones((8, 4))),
    "x[...] = y": lambda x, y: x.__setitem__(..., y),
    "x[...] = host": lambda x, y: x.__setitem__(..., np.ones((8, 4))),
    "x[1:] = x[:-1]": lambda x, y: x.__setitem__(slice(1, None), x[:-1]),
    "x[:] = x.T": lambda x, y: x[:4].__setitem__(..., x[:4].T),
    "x[rows] = y": lambda x, y: x.__setitem__([0, 7], y[:2]),
    "x[rows] = host": lambda x, y: x.__setitem__([0, 7], np.ones((2, 4))),
    "x[mask] = 1": lambda x, y: x.__setitem__(y > 0, 1),
    "x[host mask] = 1": lambda x, y: x.__setitem__(np.ones((8, 4), bool), 1),
    "out=": lambda x, y: np.add(y, 1, out=x),
    "out= of two": lambda x, y: np.add(x, y, out=x),
    "matmul": lambda x, y: np.matmul(x, y[:4], out=x),
}


@everywhere
@pytest.mark.parametrize("write", GUARDED)
def test_the_guard_refuses_before_anything_changes(write: str, backend: str) -> None:
    a = np.arange(32.0).reshape(8, 4)
    x, y = put(a, backend), st.device_put(a + 1, st.devices(backend)[7])
    kept = address(x)
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError):
        GUARDED[write](x, y)
    assert_same(x, a, exact=True)
    assert address(x) == kept
    b = a.copy()
    GUARDED[write](b, a + 1)
    GUARDED[write](x, y)
    assert_same(x, b, exact=True)


def test_the_guard_lets_writes_pass_that_move_nothing(backend: str) -> None:
    x, y = put(np.ones((8, 4)), backend), put(np.ones((8, 4)), backend)
    with st.transfer_guard("disallow"):
        x += y
        x *= 2
        x[3:5] = 1
        x[:, 1] = y[:, 0]
        x[[0, 1]] = 7
        x[x > 3] = 1
        x[5, 2] = 1
        x.T[0] -= 1
        np.add(x, y, out=x)
        np.exp(y, out=x[...])
        x.fill(3)
        x[2, 2, ...] = 5
        x[2, 2, ...] += 1
    wanted = np.full((8, 4), 3.0)
    wanted[2, 2] = 6
    assert_same(x, wanted, exact=True)


# -- numbers and arrays of no dimensions -----------------------------------------------------------

NUMBERS: dict[str, Callable[[Any], Any]] = {
    "x.sum()": lambda x: x.sum(),
    "x.max()": lambda x: x.max(),
    "x[1]": lambda x: x[1],
    "x[1] + 0": lambda x: x[1] + 0,
    "-x[1]": lambda x: -x[1],
    "x @ x": lambda x: x @ x,
    "list(x)[1]": lambda x: list(x)[1],
    "x.sum().astype": lambda x: x.sum().astype("float32"),
    "x.any()": lambda x: x.mean() * 1,
    "x[1:2].sum() / 3": lambda x: x[1:2].sum() / 3,
    "st.where": lambda x: (np if isinstance(x, np.ndarray) else st).where(True, x[0], x[1]) * 1,
    "x[0, ...] + 0": lambda x: x[0, ...] + 0,
    "x.sum(axis=0)": lambda x: x.sum(axis=0),
    "x.sum()[()]": lambda x: x.sum()[()],
    "x.sum().T": lambda x: x.sum().T,
    "x[1].real": lambda x: x[1].real,
    "x.sum().squeeze()": lambda x: x.sum().squeeze(),
    "x[0, ...][()]": lambda x: x[0, ...][()],
}
LOOKED: dict[str, Callable[[Any], Any]] = {
    "not": lambda s: None,
    "on the host": lambda s: float(s),
    "a view": lambda s: s.reshape(1) + 1,
    "a view, counted": lambda s: [np.asarray(s[...] if hasattr(s, "addressable_shards") else s), s.reshape(1, 1) * 2],
    "shards": lambda s: s.addressable_shards if hasattr(s, "addressable_shards") else None,
    "a copy": lambda s: copy.copy(s),
    "repr": repr,
    "an operand": lambda s: s + s,
}


@pytest.mark.parametrize("look", LOOKED)
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_never_change_under_another_name(number: str, look: str, backend: str) -> None:
    """`s = x.sum(); t = s; s += 1` does not change t, whatever was done with s before: as in NumPy, where s is a
    number.
    """
    a = np.arange(1.0, 5)
    x = put(a, backend)
    s = t = NUMBERS[number](x)
    value = float(NUMBERS[number](a))
    with st.transfers() if "counted" in look else contextlib.nullcontext():
        LOOKED[look](s)
    s += 1
    assert (float(s), float(t)) == (value + 1, value)
    s *= 2
    s -= np.float64(1)
    assert (float(s), float(t)) == (2 * value + 1, value)
    assert_same(x, a, exact=True)


@pytest.mark.parametrize("number", NUMBERS)
def test_only_numbers_that_were_computed_are_written(number: str, backend: str) -> None:
    """NumPy's numbers take neither item assignment nor ``out=``. Here, as in the array API, results do; copies that were
    made before keep the number, and an element that was read is never written.
    """
    a = np.arange(1.0, 5)
    s = NUMBERS[number](put(a, backend))
    value, is_element = float(s), hasattr(s._storage, "origin")
    t = s if is_element else copy.copy(s)
    for write in (
        lambda: s.__setitem__(..., 5), lambda: s.__setitem__((), 5), lambda: np.add(1, 1, out=s), lambda: s.fill(5),
        lambda: s[...].__setitem__(..., 5), lambda: operator.iadd(s.reshape(1), 1),
    ):  # fmt: skip
        attempt(write)
        assert float(t) == value


ARRAYS: dict[str, Callable[[str], st.ShardedTensor]] = {
    "zeros": lambda backend: st.zeros((), device=mesh_of((4,), backend)),
    "asarray": lambda backend: st.asarray(3.0, device=mesh_of((4,), backend)),
    "device_put": lambda backend: st.device_put(np.array(3.0), mesh_of((4,), backend)),
    "device_put of a number": lambda backend: st.device_put(2.5, st.devices(backend)[1]),
    "full": lambda backend: st.full((), 2.0, device=mesh_of((4,), backend)),
    "zeros_like": lambda backend: st.zeros_like(st.ones((3,), device=mesh_of((3,), backend)).sum()),
    "a view": lambda backend: put(np.arange(4.0), backend)[2, ...],
    "a view of a view": lambda backend: put(np.arange(4.0), backend)[1:][2, ...],
    "a reshaped one": lambda backend: put(np.arange(1.0), backend).reshape(()),
    "a squeezed one": lambda backend: put(np.ones((1, 1)), backend).squeeze(),
    "a copy of an array": lambda backend: st.zeros((), device=mesh_of((4,), backend)).copy(),
}


@everywhere
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_no_dimensions_are_written_in_place(kind: str, backend: str) -> None:
    x = y = ARRAYS[kind](backend)
    value = float(x)
    x += 1
    assert x is y
    assert float(y) == value + 1
    x[...] = 7
    assert float(y) == 7
    x[()] *= 2
    assert float(y) == 14
    np.add(x, x, out=x)
    assert float(y) == 28
    x[x > 3] = 5
    x[None, None] += 1
    assert float(y) == 6
    st.ones((3,), device=x.device).sum(out=x)
    assert float(y) == 3
    for shard in y.addressable_shards:
        assert float(on_host(shard.data, shard.device)) == 3


# -- inside of maps --------------------------------------------------------------------------------


@everywhere
def test_a_mapped_function_writes_to_tensors_that_it_finds_outside(backend: str) -> None:
    devices = st.devices(backend)[:4]
    total, rows, context = (
        st.zeros((), device=devices[0]),
        st.zeros((8, 3), device=mesh_of((4,), backend)),
        st.zeros((4,)),
    )

    def step(i: int, p: Any) -> Any:
        with st.transfer_guard("allow"):
            total.__iadd__(p.sum())
            rows[2 * i : 2 * i + 2] = p
            rows[2 * i] += 1
            rows[:, 0] += 1
            context[[i]] = i
            np.add(context[i : i + 1], 1, out=context[i : i + 1])
        return p * 2

    parts = np.arange(24.0).reshape(8, 3)
    out = st.pmap(step, list(range(4)), st.shard(parts, devices=devices))
    assert float(total) == parts.sum()
    wanted = parts.copy()
    wanted[::2] += 1
    np.testing.assert_array_equal(np.asarray(rows)[:, 1:], wanted[:, 1:])
    assert_same(context, np.arange(1.0, 5))
    assert_same(st.unshard(out), parts * 2)


def test_mapped_functions_get_the_backends_own_arrays(backend: str) -> None:
    """They get views of the shards, of the backend's class, and read-only where the backend has read-only arrays."""
    kind = kind_of(backend)

    def seen(p: Any) -> tuple[str, bool]:
        return type(p).__name__, bool(p.flags.writeable) if backend in READ_ONLY else False

    x = put(np.arange(8.0), backend)
    assert [type(s.data) for s in x.addressable_shards] == [kind] * 4
    assert st.pmap(seen, st.shard(x, devices=x.device)) == [(kind.__name__, False)] * 4
    parts = st.shard(x, devices=x.device)
    assert st.pmap(lambda p, w: seen(w), parts, np.ones(2)) == [(kind.__name__, False)] * 4


def test_writes_inside_of_maps_to_arrays_of_the_function(backend: str) -> None:
    """A function may write to arrays that it made itself, as in its library; its arguments are read-only."""

    def own(p: Any) -> Any:
        q = st.zeros(p.shape)
        q[...] = p
        q[1:] += 1
        q *= 2
        return q

    def foreign(p: Any) -> Any:
        p += 1
        return p

    parts = st.shard(np.arange(8.0), devices=st.devices(backend)[:4])
    wanted = np.arange(8.0)
    wanted[1::2] += 1
    assert_same(st.unshard(st.pmap(own, parts)), wanted * 2)
    if backend in READ_ONLY:  # others have no arrays that cannot be written
        with pytest.raises((ValueError, st.BackendError)):
            st.pmap(foreign, parts)
    assert_same(st.unshard(parts), np.arange(8.0))


# -- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def hasty() -> Iterator[None]:
    """Makes Python switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*tasks: Callable[[], Any], limit: float = 60) -> None:
    """Runs tasks concurrently; raises the first error, or an error if a task does not end."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(tasks))

    def work(task: Callable[[], Any]) -> None:
        try:
            start.wait(limit)
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "deadlock"


@everywhere
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", ["rows", "views", "columns", "items", "index arrays", "masks", "out=", "flat"])
def test_writers_of_disjoint_parts_lose_nothing(kind: str, backend: str) -> None:
    count, rounds = 6, drawn(40, fast=25)
    x = put(np.zeros((12, 6)), backend)
    masks = [np.arange(12)[:, None] % count == k for k in range(count)]

    def writer(k: int) -> Callable[[], None]:
        def write() -> None:
            mine, mask = x[2 * k : 2 * k + 2], np.broadcast_to(masks[k], (12, 6))
            for i in range(rounds):
                if kind == "rows":
                    x[2 * k : 2 * k + 2] += 1
                elif kind == "views":
                    operator.iadd(mine, 1)
                elif kind == "columns":
                    x[:, k] += 1
                elif kind == "items":
                    x[k, k] += 1
                elif kind == "index arrays":
                    x[[k, k + 6]] = i + 1
                elif kind == "masks":
                    x[mask] = i + 1
                elif kind == "out=":
                    np.add(x[2 * k : 2 * k + 2], 1, out=x[2 * k : 2 * k + 2])
                else:
                    x.reshape(-1)[k::count] += 1

        return write

    together(*[writer(k) for k in range(count)])
    wanted = np.zeros((12, 6)) if kind == "items" else np.full((12, 6), float(rounds))
    if kind == "items":
        np.fill_diagonal(wanted[:6], rounds)
    assert_same(x, wanted, exact=True)


@everywhere
@pytest.mark.usefixtures("hasty")
def test_additions_to_the_same_elements_lose_nothing(backend: str) -> None:
    x = put(np.zeros(16), backend)
    view, turned = x[...], x[::-1]
    together(*[lambda t=t: [operator.iadd(t, 1) for _ in range(50)] for t in (x, view, turned, x, view)])
    assert_same(x, np.full(16, 250.0), exact=True)


READERS: dict[str, Callable[[Any], Any]] = {
    "np.asarray": np.asarray,
    "np.array": np.array,
    "a view": lambda x: np.asarray(x[5:]),
    "a reverse": lambda x: np.asarray(x[::-1] + 0),
    "a copy": lambda x: np.asarray(x.copy()),
    "an operator": lambda x: np.asarray(x * 2),
    "a reduction": lambda x: np.asarray(st.stack([x.max(), x.min()])),
    "reshard": lambda x: np.asarray(st.reshard(x, x.sharding)),
    "shards": lambda x: np.asarray(st.unshard(st.shard(x, devices=x.sharding.mesh))),
    "index arrays": lambda x: np.asarray(x[[0, 30_000, 59_999]]),
    "pickle": lambda x: np.asarray(pickle.loads(pickle.dumps(x))),
    "shard by shard": lambda x: np.concatenate([on_host(s.data, s.device) for s in x.addressable_shards]),
}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("read", READERS)
def test_readers_beside_a_writer_see_a_whole_value(read: str, backend: str) -> None:
    """A reader sees the old value or the new one, never a mixture."""
    x = put(np.zeros(60_000), backend)
    done = threading.Event()

    def write() -> None:
        try:
            for i in range(60):
                if i % 3 == 0:
                    x[...] = i
                elif i % 3 == 1:
                    operator.iadd(x, 1)
                else:
                    np.add(x, 1, out=x[...])
        finally:
            done.set()

    def look() -> None:
        previous = -1.0
        while not done.is_set():
            value = READERS[read](x)
            if read == "a reduction":  # two readings
                continue
            assert value.min() == value.max()
            assert value[0] >= previous
            previous = value[0]

    together(write, look, look)


@pytest.mark.usefixtures("hasty")
def test_views_that_are_read_while_the_base_is_written(backend: str) -> None:
    x = put(np.zeros(60_000), backend)
    views = [x[7:], x[::-2], x.reshape(300, 200).T, x.reshape(-1, 100)[3], x[41_234, ...]]
    done = threading.Event()

    def write() -> None:
        try:
            for i in range(1, 60):
                x[...] = i
        finally:
            done.set()

    def look(view: st.ShardedTensor) -> Callable[[], None]:
        def run() -> None:
            while not done.is_set():
                value = np.asarray(view + 0) if view.ndim else np.asarray(view)
                assert value.min() == value.max()

        return run

    together(write, *[look(v) for v in views])
    for view in views:
        assert_same(view, np.full(view.shape, 59.0), exact=True)


@everywhere
@pytest.mark.usefixtures("hasty")
def test_what_was_read_does_not_change_under_a_writer(backend: str) -> None:
    x = put(np.zeros(60_000), backend)
    done = threading.Event()

    def write() -> None:
        try:
            for i in range(1, 80):
                x[...] = i
                operator.iadd(x[100:], 0)
        finally:
            done.set()

    def look() -> None:
        while not done.is_set():
            kept = np.asarray(x)
            first = kept.copy()
            shards = [(s.data, s.device) for s in x.addressable_shards]
            copies = [on_host(*s) for s in shards]
            assert first.min() == first.max()
            np.testing.assert_array_equal(kept, first)
            for shard, before in zip(shards, copies, strict=True):
                np.testing.assert_array_equal(on_host(*shard), before)

    together(write, look, look)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", ["operators", "views", "setitem", "out=", "three", "index arrays", "with itself"])
def test_writers_that_read_one_another_do_not_wait_for_ever(kind: str, backend: str) -> None:
    x, y, z = (put(np.ones((8, 4)), backend) for _ in range(3))
    steps: dict[str, list[Callable[[], Any]]] = {
        "operators": [lambda: operator.iadd(x, y), lambda: operator.iadd(y, x)],
        "views": [lambda: operator.iadd(x[1:], y[:-1]), lambda: operator.iadd(y[1:], x[:-1]), lambda: operator.isub(x[:-1], x[1:])],
        "setitem": [lambda: x.__setitem__(..., y), lambda: y.__setitem__(..., x[::-1])],
        "out=": [lambda: np.subtract(x, y, out=x), lambda: np.subtract(y, x, out=y), lambda: np.add(x, y, out=z)],
        "three": [lambda: operator.iadd(x, y), lambda: operator.iadd(y, z), lambda: operator.iadd(z, x)],
        "index arrays": [lambda: x.__setitem__([0, 7], y[[1, 2]]), lambda: y.__setitem__(x > 0, 1), lambda: x.__setitem__(y[:, 0] > 0, y[0])],
        "with itself": [lambda: operator.iadd(x, x.T.T), lambda: x.__setitem__(..., x[::-1])],
    }  # fmt: skip

    def repeat(step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with np.errstate(all="ignore"):
                for _ in range(40):
                    step()

        return run

    together(*[repeat(step) for step in (*steps[kind], lambda: np.asarray(x[1:] + y[1:]))])
    assert np.asarray(x).shape == (8, 4)


def add_to_rows(x: st.ShardedTensor, k: int) -> None:
    rows = x[k : k + 2]
    rows += 1


@pytest.mark.usefixtures("hasty")
def test_many_threads_look_at_one_new_tensor(backend: str) -> None:
    """The state that writes need is made at first use, here by several threads at once."""
    for _ in range(30):
        x = put(np.zeros(8), backend)
        together(*[functools.partial(add_to_rows, x, k) for k in range(0, 8, 2)] * 2)
        assert_same(x, np.full(8, 2.0), exact=True)


def test_a_write_while_the_buffer_is_brought_to_row_major_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x = st.asarray(np.zeros((3, 4))).T + 0
    view = st.reshape(x, (12,))
    assert not x._storage.buffers[0].flags.c_contiguous
    copying, written, copied = threading.Event(), threading.Event(), view_storages.copied

    def slow(array: Any) -> Any:
        made = copied(array)
        copying.set()
        written.wait(0.1)  # It ends only without a lock.
        return made

    monkeypatch.setattr(view_storages, "copied", slow)
    reader = threading.Thread(target=st.sum, args=(view,))
    reader.start()
    assert copying.wait(10)
    x[0, 0] = 7
    written.set()
    reader.join(10)
    assert float(x[0, 0]) == float(view[0]) == 7


@pytest.mark.full
@pytest.mark.usefixtures("hasty")
def test_many_threads_for_long(backend: str) -> None:
    """Writers, readers, copiers and donors at once on a few tensors; each reading is of one value."""
    tensors = [put(np.zeros(4000), backend) for _ in range(3)]
    done = threading.Event()

    def copy_of(x: st.ShardedTensor, y: st.ShardedTensor) -> None:
        x[...] = y

    def fill(x: st.ShardedTensor, y: st.ShardedTensor) -> None:
        x[...] = int(y.size % 50)

    changes = [copy_of, fill, lambda x, y: np.minimum(x, y, out=x), lambda x, y: operator.imul(x, 1)]

    def write(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(2000):
                x, y = (tensors[k] for k in rng.integers(0, 3, 2))
                changes[rng.integers(0, 4)](x, y)
        finally:
            done.set()

    def look(seed: int) -> None:
        rng = np.random.default_rng(seed)
        reads = list(READERS.values())[:6]
        while not done.is_set():
            value = reads[rng.integers(0, 6)](tensors[rng.integers(0, 3)])
            assert value.min() == value.max()

    together(*[lambda s=s: write(s) for s in range(3)], *[lambda s=s: look(s) for s in range(3)], limit=300)


# -- the operator behind it ------------------------------------------------------------------------


def test_setitem_as_an_operator_is_pure(backend: str) -> None:
    """The result of the operator is the value of x after `x[index] = value`; x itself is unchanged."""
    a = np.arange(12.0).reshape(4, 3)
    x = put(a, backend)
    for index, value in (
        (slice(1, 3), 7),
        ((..., 1), np.arange(4.0)),
        ([3, 0, 3], np.arange(9.0).reshape(3, 3)),
        (a > 5, 0),
    ):
        new, wanted = OPS["setitem"].dispatch(x, value, index), a.copy()
        wanted[index] = value
        assert_same(new, wanted, exact=True)
        assert new.sharding == x.sharding
        assert_same(x, a, exact=True)
        view = OPS["setitem"].dispatch(x[...], value, index)
        assert_same(view, wanted, exact=True)
        assert_same(x, a, exact=True)
    bind_into(x, OPS["add"], (x, 1), ())
    assert_same(x, a + 1, exact=True)
    assert {HOST} == {r.source for r in _records(lambda: x.__setitem__(0, np.ones(3))) if r.bytes}


def _records(function: Callable[[], Any]) -> list[Any]:
    with st.transfers() as log:
        function()
    return list(log)


def test_an_in_place_operator_on_an_item_is_one_write(backend: str) -> None:
    """Python ends ``x[i] += v`` with ``x[i] = x[i]``, which writes nothing."""
    x = put(np.arange(12.0).reshape(4, 3), backend)
    for n, index in enumerate((np.s_[1:3], np.s_[:, 1], np.s_[0, ...]), start=1):
        x[index] += 1
        assert x._write_state is not None
        assert x._write_state.version == n


@pytest.mark.parametrize("count", [1, 3])
def test_repeated_writes_are_planned_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = [put(np.arange(40.0).reshape(10, 4), "checked", (count,)) for _ in range(2)]
    planned: list[Any] = []
    plan = importlib.import_module("shardtensor.interpreters.writes.write_ops").TransferPlan
    monkeypatch.setattr(
        plan, "__init__", lambda self, *args, init=plan.__init__: (planned.append(args), init(self, *args))[1]
    )
    for _ in range(3):
        planned.clear()
        x[x > 5] = 0
        x[2:9] += y[1:8]
        x += y
    assert not planned
