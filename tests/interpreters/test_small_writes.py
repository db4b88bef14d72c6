"""NumPy's functions that write into an array: into small tensors, views and duplicates of them, and recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from tests.draws import drawn
from tests.layouts import everywhere, mesh_of, values_of

WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "put": lambda x, m, v: np.put(x, [1, -2, 1], [7, 8.5, 9]),
    "put of one value": lambda x, m, v: np.put(x, [[0, 3], [2, 1]], 4),
    "put clipped": lambda x, m, v: np.put(x, [100, -100], [5], mode="clip"),
    "place": lambda x, m, v: np.place(x, m, [1, 2, 3]),
    "place of a tensor": lambda x, m, v: np.place(x, m, v),
    "putmask": lambda x, m, v: np.putmask(x, m, v),
    "putmask, short": lambda x, m, v: np.putmask(x, m, [1, 2, 3]),
    "fill_diagonal": lambda x, m, v: np.fill_diagonal(x, 7),
    "fill_diagonal, values": lambda x, m, v: np.fill_diagonal(x, [1, 2], wrap=True),
    "put_along_axis": lambda x, m, v: np.put_along_axis(x, np.array([[2], [0], [1], [0], [2]]), 9, axis=1),
    "put_along_axis, rows": lambda x, m, v: np.put_along_axis(x, np.array([[4, 0, 2]]), v[:1], axis=0),
    "copyto": lambda x, m, v: np.copyto(x, v),
    "mask": lambda x, m, v: x.__setitem__(m, 3),
    "index arrays": lambda x, m, v: x.__setitem__((np.array([0, 0, 4]), np.array([1, 1, -1])), np.array([1.0, 2, 3])),
}


def operands(backend: str, dtype: str, split: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    arrays = [
        rng.integers(-9, 9, (5, 3)).astype(dtype),
        rng.random((5, 3)) < 0.5,
        rng.integers(-9, 9, (5, 3)).astype(dtype),
    ]
    sharding = st.NamedSharding(mesh_of((4,), backend), st.P(*[None] * split, "x"))
    return arrays, [st.device_put(x, sharding) for x in arrays]


@everywhere
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_numpys(name: str, backend: str) -> None:
    for dtype, split, as_view in (("float64", 0, False), ("int32", 1, False), ("float32", 0, True)):
        wanted, given = operands(backend, dtype, split)
        target = given[0] if not as_view else st.concat([given[0], given[0]])[:5]
        WRITES[name](wanted[0], *wanted[1:])
        kept = given[0].copy()
        assert WRITES[name](target, *given[1:]) is None
        np.testing.assert_array_equal(values_of(target), wanted[0])
        np.testing.assert_array_equal(values_of(given[2]), wanted[2])
        np.testing.assert_array_equal(values_of(kept), operands(backend, dtype, split)[0][0])


@pytest.mark.parametrize("name", WRITES)
def test_duplicates_keep_their_elements(name: str) -> None:
    _, (x, mask, values) = operands("numpy", "float64", 0)
    shares, before = st.reshard(x, x.sharding), np.array(x)
    WRITES[name](x, mask, values)
    np.testing.assert_array_equal(shares, before)
    after = np.array(x)
    _, (y, mask, values) = operands("numpy", "float64", 0)
    with st.transfers():
        WRITES[name](y, mask, values)
    np.testing.assert_array_equal(y, after)


@hypothesis.settings(max_examples=drawn(80))
@hypothesis.given(data=some.data())
def test_index_arrays_write_as_numpys(data: Any) -> None:
    shape = tuple(data.draw(some.lists(some.integers(1, 5), min_size=1, max_size=3)))
    wanted = np.arange(np.prod(shape), dtype=float).reshape(shape)
    x = st.device_put(wanted, st.NamedSharding(mesh_of((3,), "numpy"), st.P("x")))
    entries: list[Any] = []
    for n in shape[: data.draw(some.integers(1, len(shape)))]:
        positions = some.lists(some.integers(-n, n - 1), min_size=2, max_size=2).map(np.array)
        kinds = [some.integers(-n, n - 1), some.just(slice(None)), some.just(slice(1, None)), positions]
        entries.append(data.draw(some.one_of(kinds)))
    index = tuple(entries)
    size = wanted[index].shape
    value = data.draw(some.sampled_from([-1, np.full(size, 2.5), np.arange(np.prod(size)).reshape(size)]))
    wanted[index] = value
    x[index] = value
    np.testing.assert_array_equal(x, wanted)


def test_wrong_indices_leave_the_tensor_unchanged() -> None:
    _, (x, _, _) = operands("numpy", "float64", 0)
    before = np.array(x)
    for index in ((np.array([0, 5]),), (np.array([True, False]),), (np.array([0, 1]), np.array([0, 1, 2]))):
        with pytest.raises(IndexError):
            x[index] = 1
    with pytest.raises(ValueError, match="shape"):
        x[np.array([0, 1])] = np.ones((3, 3))
    with pytest.raises(IndexError):
        np.put(x, [0, 99], 1)
    np.testing.assert_array_equal(x, before)


def test_threads_that_write_other_elements_lose_no_update() -> None:
    x = st.device_put(np.zeros(64), st.NamedSharding(mesh_of((4,), "numpy"), st.P("x")))

    def write(k: int) -> None:
        for n in range(200):
            np.put(x, [k], n)
            x[np.array([k + 32])] = n

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.asarray(x)[[0, 1, 2, 3, 32, 33, 34, 35]].tolist() == [199.0] * 8


@pytest.mark.parametrize("size", [5, 5000])
def test_errors_of_small_and_of_large_tensors_are_the_same(size: int) -> None:
    x, everything = st.arange(size), np.ones(size, bool)
    for write in (st.place, st.putmask):
        with pytest.raises(st.ShapeError):
            write(x, np.ones(3, bool), [1])
        for wrong in (np.full(size, "a"), np.full(size, None)):
            with pytest.raises(st.ArgumentTypeError, match="cannot be sharded"):
                write(x, everything, wrong)
    with pytest.raises(st.ArgumentError, match="vals has no elements"):
        st.place(x, everything, [])
    np.testing.assert_array_equal(np.asarray(x), np.arange(size))
