"""The attributes and methods that tensors share with NumPy's arrays."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from tests.cases import indices
from tests.draws import drawn
from tests.layouts import assert_same, everywhere, mesh_of, meshes, put, shapes, specs

A = np.arange(20.0).reshape(5, 4)[:, ::-1].copy()


RESULTS: dict[str, Callable[[Any], Any]] = {
    "dot": lambda x: x.dot(x.T),
    "trace": lambda x: x.trace(1),
    "diagonal": lambda x: x.diagonal(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(),
    "argsort": lambda x: x.argsort(kind="stable"),
    "np.sort": lambda x: np.sort(x, kind="mergesort"),
    "argpartition": lambda x: np.sort(x.argpartition(2)[:, :2]),
    "astype": lambda x: x.astype(int, "C", "unsafe"),
    "sum": lambda x: x.sum(where=x > 2, axis=0),
    "max": lambda x: x.max(initial=99),
    "mean": lambda x: x.mean(1, where=x > 1),
    "transpose": lambda x: x.transpose(),
    "transpose by nothing": lambda x: x.transpose(None),
    "transpose by axes": lambda x: x.transpose(1, 0),
    "transpose by a sequence": lambda x: x.transpose((1, 0)),
    "transpose by an array": lambda x: x.transpose(np.array([1, 0])),
    "reshape by an array": lambda x: x.reshape(np.array([2, -1])),
    "view": lambda x: x.view("int64"),
    "view of a class": lambda x: x.view(type(x)),
    "view of a scalar": lambda x: x[2, 1].view("u8"),
}


@everywhere
@pytest.mark.parametrize("name", RESULTS)
def test_methods_give_numpys_results(name: str, backend: str) -> None:
    if backend == "torch" and "scalar" in name:
        pytest.skip("torch has no such unsigned integers")
    found = RESULTS[name](put(A, backend, (3,)))
    assert isinstance(found, st.ShardedTensor)
    assert_same(found, RESULTS[name](A))


WRITES: dict[str, Callable[[Any], Any]] = {
    "put": lambda x: x.put([0, -1], [7, 8]),
    "put wraps": lambda x: x.put([23, 2], [5], "wrap"),
    "put clips": lambda x: x.put([99, 3, 3], [1, 2, 3], mode="clip"),
    "np.put": lambda x: np.put(x, [1], [4.5]),
    "sort": lambda x: x.sort(0),
    "sort by kind": lambda x: x.sort(kind="stable"),
    "partition": lambda x: x.partition(0),
    "fill": lambda x: x.fill(3),
    "cumsum": lambda x: x.cumsum(1, out=x),
    "flat": lambda x: x.flat.__setitem__(slice(2, 9, 3), 1),
}


@everywhere
@pytest.mark.parametrize("name", WRITES)
def test_methods_write_as_numpys(name: str, backend: str) -> None:
    wanted, x = A[:, :2].copy() if name == "partition" else A.copy(), put(A, backend, (3,))
    x = x[:, :2].copy() if name == "partition" else x
    WRITES[name](wanted)
    WRITES[name](x)
    assert_same(x, wanted)


@everywhere
@hypothesis.settings(max_examples=drawn(15))
@hypothesis.given(data=some.data())
def test_views_in_another_dtype_alias_the_base(backend: str, data: Any) -> None:
    """Reading sees writes to the base, writing is visible in it, and chains of views stay views."""
    a = np.random.default_rng(data.draw(some.integers(0, 99))).normal(size=data.draw(shapes(1)))
    mesh = data.draw(meshes(backend))
    x = st.device_put(a, st.NamedSharding(mesh, data.draw(specs(mesh, a.ndim))))
    index = data.draw(indices(a.shape))
    mine, its = x[index].view("int64"), a[index]
    its = np.asarray(its).view("int64") if np.ndim(its) else np.array(its).view("int64")
    assert_same(mine, its)
    if mine.ndim and mine.size:
        mine[...] = 5
        its[...] = 5
        assert mine.base is x
        mine += 2
        its += 2
        assert_same(mine[::-1].view(float), its[::-1].view(float))
        np.testing.assert_array_equal(np.asarray(x), a)
        x[...] = 0
        assert not np.asarray(mine).any()


def test_views_of_bits_move_nothing() -> None:
    x = st.device_put(A, st.NamedSharding(mesh_of((4,), "numpy"), st.P(None, "x")))
    with st.transfer_guard("disallow"), st.transfers() as log:
        v = x.view("int64")
        v &= -2
        assert v.sharding == x.sharding
    assert log.bytes == log.copied == 0
    assert np.shares_memory(np.asarray(v), np.asarray(x))


def test_memory_is_described_as_numpys(backend: str) -> None:
    x, a = put(A, backend, (3,)), A.copy()
    for mine, its in ((x, a), (x.T, a.T), (x[::2, ::-1], a[::2, ::-1]), (x[1:], a[1:]), (x[:, 1], a[:, 1])):
        assert mine.strides == its.strides
        for name in ("C", "F", "W", "OWNDATA"):
            assert mine.flags[name] == its.flags[name], name
        assert (mine.flags.contiguous, mine.flags.forc) == (its.flags.contiguous, its.flags.forc)
        assert np.isfortran(mine) == np.isfortran(its)
        assert (mine.base is None) == (its.base is None)
    assert x.T[1:].base is x
    assert not x.sum().flags.writeable
    x.setflags(write=True)
    assert (x.real.strides, put(A + 1j, backend, (3,)).real.strides) == (A.strides, (A + 1j).real.strides)


def test_addresses_that_are_computed_of_strides_are_those_of_the_elements() -> None:
    """Matplotlib does so. The buffer of a broadcast tensor has strides of 0, and that of a sum NumPy's."""
    x, a = put(A, "numpy", (3,)), A.copy()
    for make in (
        lambda y: np.broadcast_to(y[:, :1], (5, 6)),
        lambda y: np.broadcast_to(y[:, :1], (5, 6))[1:, ::2],
        lambda y: y.T + 1,
        lambda y: (y.T + 1)[1:, :-1],
        lambda y: (y.T + 1)[::2].reshape(-1),
    ):
        mine, its = make(x), make(a)
        assert mine.strides == np.asarray(mine).strides
        np.testing.assert_array_equal(np.lib.stride_tricks.as_strided(mine, mine.shape, mine.strides), its)


def test_elements_are_found_and_converted(backend: str) -> None:
    x = put(A, backend, (3,))
    assert 3 in x
    assert 77 not in x
    for index in ((3,), (-1,), (1, 2), ((1, 2),), (np.int64(7),)):
        assert x.item(*index) == A.item(*index)


ERRORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "another itemsize": (lambda x: x.view("f4"), TypeError, "wanted a number, bool or time of 8 bytes"),
    "objects": (lambda x: x.view(object), TypeError, "view: object for elements of float64"),
    "another class": (lambda x: x.view(type=np.ndarray), TypeError, "wanted ShardedTensor"),
    "put": (lambda x: x.put([0, 99], 1), IndexError, "out of bounds for 20 elements"),
    "put by a mode": (lambda x: x.put([0], 1, "up"), ValueError, "wanted 'raise', 'wrap' or 'clip'"),
    "item": (lambda x: x.item(99), IndexError, "position 99 is out of bounds"),
    "item of too few": (lambda x: x[None].item(0, 1), ValueError, "2 indices for 3 dimensions"),
    "setflags": (lambda x: x.setflags(write=False), ValueError, "the flags of a tensor cannot change"),
    "astype": (lambda x: x.astype(int, casting="safe"), TypeError, "not allowed by casting='safe'"),
    "sort": (lambda x: x.sort(kind="bogo"), ValueError, "NumPy's kinds"),
    "flags": (lambda x: x.flags["Z"], ValueError, "'Z' is not a flag"),
    "resize": (lambda x: x.resize(3), AttributeError, "st.resize"),
    "at": (lambda x: x.at[0].set(1), AttributeError, r"x\[i\] = v"),
    "ctypes": (lambda x: x.ctypes, AttributeError, r"np\.asarray\(x\)\.ctypes"),
    "data": (lambda x: x.data, AttributeError, "addressable_shards"),
    "nonsense": (lambda x: x.nonsense, AttributeError, "has no attribute 'nonsense'$"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_tensors_lack_is_refused_with_the_reason(name: str, backend: str) -> None:
    call, kind, words = ERRORS[name]
    x = put(A, backend, (3,))
    with pytest.raises(kind, match=words):
        call(x)
    assert_same(x, A)


def test_every_attribute_of_numpys_arrays_is_there_or_refused() -> None:
    x = st.asarray(A)
    missing = {n for n in dir(np.ndarray) if not n.startswith("_") and not hasattr(x, n)}
    refused = {"byteswap", "ctypes", "data", "dump", "dumps", "getfield", "resize", "setfield"}
    assert missing == refused
    for name in refused:
        with pytest.raises(AttributeError, match=rf"{name}': \w+"):
            getattr(x, name)


def test_views_are_pickled_and_copied_as_independent_tensors(backend: str) -> None:
    x = put(A, backend, (3,))
    view = x.view("int64")[1:]
    for made in (pickle.loads(pickle.dumps(view)), copy.copy(view), copy.deepcopy(view)):
        assert_same(made, A.view("int64")[1:])
        assert made.base is None


def test_files_of_bytes_are_numpys(tmp_path: Path, backend: str) -> None:
    x = put(A, backend, (3,))
    x[:, 1:].tofile(tmp_path / "mine")
    A[:, 1:].tofile(tmp_path / "its")
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "its").read_bytes()
    x.tofile(tmp_path / "text", sep=",", format="%.2f")
    np.testing.assert_array_equal(np.fromfile(tmp_path / "text", sep=",").reshape(5, 4), A)
    assert x[:, 1:].tobytes() == A[:, 1:].tobytes()


def test_errors_inside_of_properties_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st.ShardedTensor, "devices", property(lambda self: self.sharding.no_such_name))
    with pytest.raises(AttributeError, match="no_such_name"):
        st.ones(3).devices
