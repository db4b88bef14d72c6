"""Reads and writes by any index of NumPy, in any layout, with index arrays in any layout.

Both backends return NumPy's elements, raise NumPy's errors, and transfer the same bytes between the same devices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.backend.registry import load
from shardtensor.communication import gather_scatter
from shardtensor.functions.algorithms import first_device
from shardtensor.functions.standard.indexing import setitem
from shardtensor.sharding.index import is_array
from tests.cases import array_indices, assigned, indices
from tests.draws import drawn
from tests.interpreters.test_random_programs import NEEDS_TORCH, twin
from tests.layouts import DTYPES, READ_ONLY, array, assert_same, everywhere, mesh_of, meshes, put, quiet, shapes, specs

lockstep = pytest.mark.parametrize(
    "backends",
    [
        ("numpy", "checked"),
        pytest.param(("checked", "cupy"), marks=pytest.mark.full),
        pytest.param(("numpy", "torch"), marks=NEEDS_TORCH),
    ],
    ids="-".join,
)
"""Which backends do the same things; the first one's moves are what the others' must be."""

Built = Callable[[str], Any]
"""What gives the same thing for any backend."""


# -- the same things on several backends ---------------------------------------------------------------


def on(sharding: st.NamedSharding, backend: str) -> st.NamedSharding:
    return sharding if backend == "numpy" else twin(sharding, backend)


def some_array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    return np.asarray(array(shape, dtype, seed))


def some_sharding(data: Any, ndim: int) -> st.NamedSharding:
    mesh = data.draw(meshes("numpy"))
    return st.NamedSharding(mesh, data.draw(specs(mesh, ndim)))


def some_tensor(data: Any, value: np.ndarray) -> tuple[Built, st.NamedSharding]:
    """Draws a root tensor: placed, computed, with separate shards, or with memory that another tensor shares."""
    sharding = some_sharding(data, value.ndim)
    how = data.draw(some.sampled_from(["put", "computed", "pieces", "shared"]))
    kept = []

    def build(backend: str) -> st.ShardedTensor:
        home = on(sharding, backend)
        if how == "pieces" and value.ndim:
            return st.unshard(st.pmap(lambda x: st.asarray(x, copy=True), st.shard(value, devices=home.mesh)))
        x = st.device_put(value, home)
        if how == "computed":
            return st.where(True, x, x)
        if how == "shared":
            kept.append(st.reshard(x, home))
        return x

    return build, sharding


def some_index(data: Any, shape: tuple[int, ...], home: st.NamedSharding) -> tuple[Any, Built]:
    """Draws an index for NumPy, and a function that builds the same index with lists, host arrays or tensors on any
    devices.
    """
    index = data.draw(some.one_of(array_indices(shape), array_indices(shape), indices(shape)))
    entries = index if type(index) is tuple else (index,)
    builders = [some_entry(data, e, home) if is_array(e) else lambda backend, e=e: e for e in entries]
    bare = len(entries) == 1 and (type(index) is not tuple or data.draw(some.booleans()))

    def build(backend: str) -> Any:
        built = tuple([b(backend) for b in builders])
        return built[0] if bare else built

    return entries[0] if bare else entries, build


def some_entry(data: Any, entry: Any, home: st.NamedSharding) -> Built:
    how = data.draw(some.sampled_from(["host", "list", "here", "here", "elsewhere", "other backend"]))
    if type(entry) is bool:
        return lambda backend: entry
    value = np.asarray(entry)
    if how == "host":
        turned = value.T.copy().T if data.draw(some.booleans()) else entry
        return lambda backend: turned
    if how == "list" and value.ndim and value.size:
        return lambda backend: value.tolist()
    mesh = home.mesh if how == "here" else data.draw(meshes("numpy"))
    sharding = st.NamedSharding(mesh, data.draw(specs(mesh, value.ndim)))
    if how == "other backend":
        return lambda backend: st.device_put(value, on(sharding, "checked" if backend == "numpy" else "numpy"))
    return lambda backend: st.device_put(value, on(sharding, backend))


def records(log: st.TransferLog) -> list[tuple[Any, ...]]:
    """Returns the transfers without the names of the backends."""
    return sorted((r.bytes, context(r.source), context(r.destination), r.explicit) for r in log if r.bytes)


def assert_moved_alike(backends: tuple[str, ...], moved: list[Any]) -> None:
    """Asserts that the backends made the same transfers as the first one. Views with negative strides, where a library
    lacks these, are written element by element.
    """
    for backend, found in zip(backends, moved, strict=True):
        assert found == moved[0] or not load(backend).negative_strides, backend


def context(device: st.Device) -> int:
    return -1 if device == st.HOST else device.id


def outcome(call: Callable[[], Any]) -> Any:
    """The result of a call, or the error that it raised."""
    try:
        with quiet():
            return call()
    except (IndexError, ValueError, TypeError, OverflowError) as error:
        return error


def same_error(mine: Any, wanted: Exception) -> None:
    assert isinstance(mine, type(wanted)), (mine, wanted)


# -- reading ----------------------------------------------------------------------------------------


def read(examples: int, backends: tuple[str, ...]) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        value = some_array(data.draw(shapes()), data.draw(some.sampled_from(["int32", "float64", "bool"])), 3)
        tensor, home = some_tensor(data, value)
        plain, index = some_index(data, value.shape, home)
        answer = outcome(lambda: value[plain])
        moved = []
        for backend in backends:
            x, i = tensor(backend), index(backend)
            with st.transfers() as log:
                result = outcome(lambda x=x, i=i: x[i])
                if isinstance(result, st.ShardedTensor):
                    assert result.addressable_shards
            moved.append((records(log), getattr(result, "sharding", None)))
            if isinstance(answer, Exception):
                same_error(result, answer)
            else:
                assert_same(result, answer, exact=True)
            assert_same(x, value, exact=True)
        if not isinstance(answer, Exception):
            (_, layout), *_ = moved
            assert [twin(layout, backend) for backend in backends] == [twins for _, twins in moved]
            assert all(found == moved[0][0] for found, _ in moved)

    run()


@pytest.mark.slow
@lockstep
def test_reading_matches_numpy(backends: tuple[str, ...]) -> None:
    read(drawn(600, fast=60), backends)


@pytest.mark.full
@lockstep
def test_reading_matches_numpy_at_length(backends: tuple[str, ...]) -> None:
    read(5000, backends)


# -- writing ----------------------------------------------------------------------------------------


def some_view(data: Any, x: np.ndarray) -> Callable[[Any], Any]:
    """Draws a chain of operations that return views, for NumPy's arrays and for tensors."""
    steps: list[Callable[[Any], Any]] = []
    for _ in range(data.draw(some.integers(0, 3))):
        step = some_step(data, x)
        if step is not None and isinstance(step(x), np.ndarray):
            steps.append(step)
            x = step(x)
    return lambda a: functools.reduce(lambda seen, step: step(seen), steps, a)


def some_step(data: Any, x: np.ndarray) -> Callable[[Any], Any] | None:
    kind = data.draw(some.sampled_from(["index", "index", "order", "flip", "shape", "part"]))
    if kind == "index":
        index = data.draw(indices(x.shape))
        index = (*index, Ellipsis) if type(index) is tuple and Ellipsis not in index else index
        return lambda a: a[index]
    if kind == "order":
        order = data.draw(some.permutations(range(x.ndim)))
        return lambda a: a.transpose(order)
    if kind == "flip":
        return lambda a: a[(*[slice(None, None, -1)] * a.ndim, Ellipsis)]
    if kind == "shape":
        shape = data.draw(some.sampled_from([(-1,), (1, *x.shape), x.shape[::-1], (x.size, 1), (x.size // 2, 2)]))
        fits = 0 not in x.shape and (-1 in shape or np.prod(shape) == x.size)
        return (lambda a: a.reshape(shape)) if fits else None
    part = data.draw(some.sampled_from(["real", "imag"]))
    return (lambda a: getattr(a, part)) if x.dtype.kind == "c" else None


def some_value(data: Any, shape: tuple[int, ...], dtype: Any, home: st.NamedSharding) -> tuple[Any, Built]:
    """Draws a value to write, of a shape that mostly broadcasts, and of any dtype."""
    whole = len(shape)
    source = data.draw(some.one_of(some.just(str(dtype)), some.sampled_from(DTYPES)))
    shape = tuple(1 if data.draw(some.integers(0, 3)) == 0 else n for n in shape)
    shape = shape[data.draw(some.integers(0, len(shape))) :] if data.draw(some.booleans()) else shape
    if 0 not in shape and data.draw(some.integers(0, 9)) == 0:
        shape = data.draw(some.sampled_from([(1, *shape), (2, *shape), (*shape, 3), shape[1:]]))
    value = some_array(shape, source, data.draw(some.integers(0, 99)))
    if np.dtype(dtype).kind == "u" and value.dtype.kind in "fc":
        value = abs(value.real).astype(source)
    how = data.draw(some.sampled_from(["here", "here", "elsewhere", "other backend", "host", "list", "scalar"]))
    if how == "scalar":
        scalar = array((), source, 7)[()]
        scalar = abs(scalar.real) if np.dtype(dtype).kind == "u" and scalar.dtype.kind in "fc" else scalar
        scalar = scalar.item() if data.draw(some.booleans()) else scalar
        return scalar, lambda backend: scalar
    if how == "list" and 0 < len(shape) <= whole:
        return value.tolist(), lambda backend: value.tolist()
    if how in ("host", "list"):
        return value, lambda backend: value
    mesh = home.mesh if how == "here" else data.draw(meshes("numpy"))
    sharding = st.NamedSharding(mesh, data.draw(specs(mesh, value.ndim)))
    turned = value.ndim > 1 and data.draw(some.booleans())

    def build(backend: str) -> st.ShardedTensor:
        there = backend if how != "other backend" else "checked" if backend == "numpy" else "numpy"
        if not turned:
            return st.device_put(value, on(sharding, there))
        spec = st.P(*sharding.spec.chains_of(value.ndim)[::-1])
        return st.device_put(value.T, on(sharding.with_spec(spec), there)).T

    return value, build


def written(x: Any, index: Any, value: Any) -> None:
    x[index] = value


def write(examples: int, backends: tuple[str, ...]) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        start = some_array(data.draw(shapes()), data.draw(some.sampled_from(DTYPES)), 5)
        tensor, home = some_tensor(data, start)
        chain = some_view(data, start)
        seen = chain(start)
        plain, index = some_index(data, seen.shape, home)
        target = outcome(lambda: np.shape(seen[plain]))
        shape = () if isinstance(target, Exception) else target
        given, value = some_value(data, shape, seen.dtype, home)
        hypothesis.assume(shape or not np.ndim(given))  # for one element, NumPy's answer depends on the dtype

        shared = data.draw(some.booleans())
        answer = start.copy()
        shown = chain(answer)
        error = outcome(lambda: written(shown.copy(), plain, given))
        if error is None:
            with quiet():
                shown[...] = assigned(shown, plain, given)

        moved = []
        for backend in backends:
            x, i, v = tensor(backend), index(backend), value(backend)
            layout, before, view = x.sharding, np.asarray(v).copy(), chain(x)
            other = st.reshard(x, layout) if shared else None
            with st.transfers() as log:
                result = outcome(lambda view=view, i=i, v=v: written(view, i, v))
            moved.append(records(log))
            if error is not None:
                same_error(result, error)
            else:
                assert result is None
            assert_same(x, answer, exact=True)
            assert_same(view, shown, exact=True)
            if other is not None:
                assert_same(other, start, exact=True)
            np.testing.assert_array_equal(np.asarray(v), before)
            assert x.sharding == layout
        assert_moved_alike(backends, moved)

    run()


@pytest.mark.slow
@lockstep
def test_writing_matches_numpy(backends: tuple[str, ...]) -> None:
    write(drawn(1500, fast=120), backends)


@pytest.mark.full
@lockstep
def test_writing_matches_numpy_at_length(backends: tuple[str, ...]) -> None:
    write(8000, backends)


def write_from_itself(examples: int, backends: tuple[str, ...]) -> None:
    """The value has the elements of the tensor before the write, as if it had been copied first."""

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        start = some_array(data.draw(shapes(1)), data.draw(some.sampled_from(["int64", "complex64", "bool"])), 5)
        tensor, home = some_tensor(data, start)
        chain, other = some_view(data, start), some_view(data, start)
        seen = chain(start)
        plain, index = some_index(data, seen.shape, home)
        taken = outcome(lambda: np.asarray(seen[plain]))
        hypothesis.assume(not isinstance(taken, Exception) and taken.size)
        tail = other(start)
        shape = taken.shape if taken.ndim else (1,)
        try:
            cut = (*[slice(0, m) for m in shape[len(shape) - tail.ndim :]], Ellipsis)
            fits = np.broadcast_to(tail[cut], taken.shape).shape == taken.shape
        except (ValueError, IndexError):
            fits = False
        turned = (*[slice(None, None, -1)] * taken.ndim, Ellipsis)
        value = (lambda a, i: other(a)[cut]) if fits else (lambda a, i: chain(a)[i][turned])
        answer = start.copy()
        shown = chain(answer)
        given = np.array(value(answer, plain))
        error = outcome(lambda: written(shown.copy(), plain, given))
        with quiet():
            shown[...] = assigned(shown, plain, given) if error is None else shown
        moved = []
        for backend in backends:
            x, i = tensor(backend), index(backend)
            view, new = chain(x), value(x, i)
            with st.transfers() as log:
                result = outcome(lambda view=view, i=i, new=new: written(view, i, new))
            moved.append(records(log))
            assert (result is None) == (error is None), (result, error)
            assert_same(x, answer, exact=True)
            assert_same(view, shown, exact=True)
        assert_moved_alike(backends, moved)

    run()


@pytest.mark.slow
@lockstep
def test_writing_from_itself_matches_numpy(backends: tuple[str, ...]) -> None:
    write_from_itself(drawn(400, fast=40), backends)


@pytest.mark.full
@lockstep
def test_writing_from_itself_matches_numpy_at_length(backends: tuple[str, ...]) -> None:
    write_from_itself(6000, backends)


@pytest.mark.parametrize(
    "chain",
    [
        lambda a: a[::-1].reshape(-1),
        lambda a: a[1:5].reshape(4, 2, 2),
        lambda a: a[:, None, ::2].reshape(6, 2),
        lambda a: a.reshape(8, 3),
        lambda a: a.reshape(-1)[2:].reshape(11, 2),
        lambda a: a.reshape(2, 12).T[1:],
    ],
)
def test_writes_through_views_of_another_shape_count_alike(chain: Any) -> None:
    """Where the parts of the view are not the shards, elements are transferred in both directions; both backends count
    the same.
    """
    value = array((6, 4), "float64", 1)
    for new in (lambda a: 1.5, lambda a: np.full(chain(value)[1:3].shape, 2.5), lambda a: chain(a)[:2]):
        answer, moved = value.copy(), []
        chain(answer)[1:3] = new(answer)
        for backend in ("numpy", "checked"):
            x = st.device_put(value, mesh_of((4,), backend))
            given = new(x)
            with st.transfers() as log:
                chain(x)[1:3] = given
            moved.append(records(log))
            assert_same(x, answer, exact=True)
        assert moved[0] == moved[1]


@pytest.mark.parametrize(
    "chain",
    [
        lambda a: a.reshape(2, 12),
        lambda a: a.T.reshape(2, 2, 6),
        lambda a: a.reshape(8, 3),
        lambda a: a.reshape(-1)[::-1],
    ],
)
def test_scalars_through_views_of_another_shape_move_nothing(chain: Any, backend: str) -> None:
    """The device that holds an element writes it, whatever the shape of the view."""
    answer = array((6, 4), "float64", 1)
    x = st.device_put(answer, mesh_of((4,), backend))
    with st.transfers() as log:
        chain(x)[1:] = 1.5
    chain(answer)[1:] = 1.5
    assert_same(x, answer, exact=True)
    assert log.bytes == 0


# -- who moves what ---------------------------------------------------------------------------------


def moves(change: Callable[[], Any]) -> list[tuple[int, int, int]]:
    """The bytes that a change moved: from where, to where."""
    totals: dict[tuple[int, int], int] = {}
    with st.transfers() as log:
        change()
    for n, source, destination, _ in records(log):
        totals[source, destination] = totals.get((source, destination), 0) + n
    return sorted((n, a, b) for (a, b), n in totals.items())


def rows_and_columns(backend: str, shape: tuple[int, ...] = (10, 6)) -> list[st.ShardedTensor]:
    """A value in several layouts: uneven, along both dimensions, with replicas."""
    value = array(shape, "float64", 2)
    mesh = mesh_of((2, 2), backend)
    found = [
        st.P("x"),
        st.P(("y", "x")),
        st.P(None, "y"),
        st.P("x", "y"),
        st.P("y", "x"),
        st.P(),
        st.P(None, ("x", "y")),
    ]
    return [st.device_put(value, st.NamedSharding(mesh, spec)) for spec in found]


@pytest.mark.parametrize(
    "index",
    [3, np.s_[3:5], np.s_[:, 1], np.s_[::2], np.s_[::-3, 1:4], np.s_[...], np.s_[2, 3], np.s_[[0, 9, 4]],
     np.s_[[0, 9, 4], [5, 0, 5]], np.s_[:, [1, 1, 2]], np.s_[np.array([1, 8]), None, 2:], np.s_[1:, ..., np.array([True] * 3 + [False] * 3)]],
    ids=repr,
)  # fmt: skip
def test_scalars_move_nothing(index: Any, backend: str) -> None:
    for x in rows_and_columns(backend):
        answer = np.array(x)
        for number, scalar in enumerate((2, 2.5, True, np.float64(4), np.int8(1))):
            home = x.sharding
            python = number < 3
            moved = moves(lambda x=x, scalar=scalar: written(x, index, scalar))
            assert not moved or not python
            answer[index] = scalar
            assert_same(x, answer, exact=True)
            assert x.sharding == home


@pytest.mark.parametrize("scalar", [0, 1.5, np.float64(2), np.int8(3)], ids=repr)
def test_scalars_through_masks_move_nothing(scalar: Any, backend: str) -> None:
    for x in rows_and_columns(backend):
        answer = np.array(x)
        mask = x > 0.5
        assert not moves(lambda x=x, mask=mask: written(x, mask, scalar))
        answer[answer > 0.5] = scalar
        assert_same(x, answer, exact=True)
        assert not moves(lambda x=x: written(x.T, x.T < 0, scalar))
        answer[answer < 0] = scalar
        assert_same(x, answer, exact=True)


def test_negative_indices_of_small_dtypes(backend: str) -> None:
    """The dtype of the indices does not hold the size of the dimension."""
    where = np.array([83, 64, -69, -128], "int8")
    for x in rows_and_columns(backend, (300, 6)):
        answer = np.array(x)
        for index, plain in ((where, where), (st.asarray(where), where), ((where, 2), (where, 2))):
            assert_same(x[index], answer[plain], exact=True)
            x[index] = x[::-1][index]
            answer[plain] = answer[::-1][plain]
            assert_same(x, answer, exact=True)


def test_masks_of_rows_move_nothing(backend: str) -> None:
    """The mask covers the first dimensions, and has their layout."""
    for x in rows_and_columns(backend)[:3]:
        answer = np.array(x)
        rows = x[:, 0] > 0
        assert not moves(lambda x=x, rows=rows: written(x, rows, 7))
        answer[answer[:, 0] > 0] = 7
        assert_same(x, answer, exact=True)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (10, 0), (0, 0)], ids=str)
def test_empty_masks_fit_dimensions_of_any_size(shape: tuple[int, ...], backend: str) -> None:
    """The array API permits a dimension of size 0 in a mask wherever one of the size of the tensor's is permitted."""
    mask = np.zeros(shape, bool)
    for x in rows_and_columns(backend, (10, 3)):
        answer = np.array(x)
        for index in (mask, st.asarray(mask), (mask, Ellipsis)):
            found = x[index]
            assert found.dtype == x.dtype
            assert_same(found, answer[mask], exact=True)
            x[index] = 7
            x[index] = np.zeros((0, *answer.shape[mask.ndim :]))
            assert_same(x, answer, exact=True)
        if mask.ndim == 1:
            assert_same(x[:, mask], answer[:, mask], exact=True)
            assert_same(x[mask, 1], answer[mask, 1], exact=True)
            with pytest.raises(IndexError, match="index 3 is out of bounds"):
                x[mask, 3]


def test_masks_elsewhere_are_sent_to_the_owners_alone(backend: str) -> None:
    """The mask is on the host: each device gets the part for its own elements, one byte for each."""
    x = st.device_put(np.zeros((10, 3)), mesh_of((4,), backend))
    mask = array((10, 3), "bool", 1)
    assert moves(lambda: written(x, mask, 1)) == [(6, -1, 2), (6, -1, 3), (9, -1, 0), (9, -1, 1)]
    other = st.device_put(~mask, st.devices(backend)[3])
    assert moves(lambda: written(x, other, 2)) == [(6, 3, 2), (9, 3, 0), (9, 3, 1)]
    assert_same(x, np.where(mask, 1.0, 2.0), exact=True)
    beside = st.device_put(mask, x.sharding)
    assert moves(lambda: written(x[4:], beside[4:], 3)) == []
    assert_same(x[4:], np.where(mask, 3.0, 2.0)[4:], exact=True)


def test_host_values_go_to_the_owners_of_what_is_written(backend: str) -> None:
    """10 rows over 4 devices are 3, 3, 2, 2; a row is 24 bytes."""
    mesh = mesh_of((4,), backend)
    answer = array((10, 3), "float64", 1)
    x = st.device_put(answer, mesh)
    for index, wanted in [
        (np.s_[2:5], [(24, -1, 0), (48, -1, 1)]),
        (np.s_[7], [(24, -1, 2)]),
        (np.s_[::-4], [(24, -1, 0), (24, -1, 1), (24, -1, 3)]),
        (np.s_[:, 1], [(16, -1, 2), (16, -1, 3), (24, -1, 0), (24, -1, 1)]),
        (np.s_[[9, 0, 9, 1]], [(24, -1, 3), (48, -1, 0)]),
        (np.s_[np.arange(10) > 6], [(24, -1, 2), (48, -1, 3)]),
        (np.s_[[1, 7], [0, 2]], [(8, -1, 0), (8, -1, 2)]),
        (np.s_[[4, 6], 1:], [(16, -1, 1), (16, -1, 2)]),
        (np.s_[3:3], []),
    ]:
        new = array(answer[index].shape, "float64", 3)
        assert moves(lambda index=index, new=new: written(x, index, new)) == wanted, index
        answer = assigned(answer, index, new)
        assert_same(x, answer, exact=True)
    replicated = st.device_put(answer, st.NamedSharding(mesh, st.P()))
    assert moves(lambda: written(replicated, np.s_[2:4, 0], np.ones(2))) == [(16, -1, k) for k in range(4)]
    answer[2:4, 0] = 1
    assert_same(replicated, answer, exact=True)


def test_values_that_repeat_are_sent_once(backend: str) -> None:
    """A value that broadcasts is sent once, and repeated at its destination."""
    x = st.device_put(np.zeros((10, 3)), mesh_of((4,), backend))
    answer = np.zeros((10, 3))
    for index, new in [
        (np.s_[2:5], np.ones(3)),
        (np.s_[[2, 3, 4]], np.full((1, 3), 2.0)),
        (np.s_[[2, 3, 4], :2], np.full(1, 3.0)),
    ]:
        assert moves(lambda index=index, new=new: written(x, index, new)) == [
            (8 * new.size, -1, 0),
            (8 * new.size, -1, 1),
        ]
        answer[index] = new
        assert_same(x, answer, exact=True)


def test_rows_move_from_owner_to_owner(backend: str) -> None:
    """``x[j] = x[i]`` sends only from devices with row i to devices with row j that lack row i."""
    mesh = mesh_of((4,), backend)
    answer = array((10, 3), "float64", 1)
    x = st.device_put(answer, mesh)
    owner = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    for i, j in itertools.product(range(10), repeat=2):
        wanted = [(24, owner[i], owner[j])] if owner[i] != owner[j] else []
        assert moves(lambda i=i, j=j: written(x, j, x[i])) == wanted, (i, j)
        answer[j] = answer[i]
        wanted = [] if i == j else wanted
        assert moves(lambda i=i, j=j: written(x, np.s_[j : j + 1], x[i])) == wanted, (i, j)
    assert_same(x, answer, exact=True)
    assert moves(lambda: written(x, np.s_[:, 0], x[:, 2])) == []
    answer[:, 0] = answer[:, 2]
    both = x[[5, 9]]  # on the first two devices
    assert moves(lambda: written(x, np.s_[[0, 4]], both)) == []
    assert moves(lambda: written(x, np.s_[[4, 0]], both)) == [(24, 0, 1), (24, 1, 0)]
    answer[[4, 0]] = answer[[5, 9]]
    assert_same(x, answer, exact=True)


def test_a_tensor_elsewhere_moves_once_to_each_owner(backend: str) -> None:
    x = st.device_put(np.zeros((10, 3)), mesh_of((4,), backend))
    new = st.device_put(array((4, 3), "float64", 4), st.devices(backend)[6])
    assert moves(lambda: written(x, np.s_[1:5], new)) == [(48, 6, 0), (48, 6, 1)]
    assert moves(lambda: written(x, [5, 4, 8, 9], new)) == [(48, 6, 1), (48, 6, 3)]
    assert_same(x[[5, 4, 8, 9]], np.asarray(new), exact=True)
    away = st.device_put(np.arange(3.0), st.NamedSharding(mesh_of((3,), backend, 5), st.P("x")))
    assert moves(lambda: written(x, 0, away)) == [(8, 5, 0), (8, 6, 0), (8, 7, 0)]
    assert_same(x[0], np.arange(3.0), exact=True)


def test_reading_rows_sends_what_is_not_there(backend: str) -> None:
    """The first dimension of the result is split like the index array. A row is 8000 bytes."""
    x = st.device_put(array((10, 1000), "float64", 1), mesh_of((4,), backend))
    assert x.nbytes > first_device.GATHERED
    answer = np.asarray(x)
    for index, wanted in [
        ([0, 3, 6, 8], []),
        ([8, 3, 6, 0], [(8000, 0, 3), (8000, 3, 0)]),
        ([0, 0, 0, 0], [(8000, 0, 1), (8000, 0, 2), (8000, 0, 3)]),
        (np.s_[:, [2, 0]], []),
        (np.s_[[0, 9], [1, 1]], [(8, 3, 1)]),
    ]:
        assert moves(lambda index=index: x[index]) == wanted, index
        assert_same(x[index], answer[index], exact=True)
        assert x[index].sharding.spec == st.P("x")


def test_up_to_64_kib_the_first_device_selects_rows(backend: str) -> None:
    """It receives all of x, and sends the others their parts, unless each device has all rows that it selects."""
    mesh = mesh_of((4,), backend)
    x = st.device_put(array((10, 3), "float64", 1), mesh)
    answer = np.asarray(x)
    every = [(48, 2, 0), (48, 3, 0), (72, 1, 0)]
    for index, wanted in [
        ([8, 3, 6, 0], [(24, 0, 1), (24, 0, 2), (24, 0, 3), *every]),
        (np.s_[:, [2, 0]], []),
        (np.s_[[0, 9], [1, 1]], [(8, 0, 1), *every]),
        (np.s_[[9, -10, 1], None, ::-2], [(16, 0, 1), (16, 0, 2), *every]),
        (answer[:, 0] > 0, None),
        ([[0, 1], [3, 4], [6, 8], [8, 9]], [(48, 0, 1), (48, 0, 2), (48, 0, 3), *every]),
        (np.s_[[], 1:], []),
        (np.s_[:, [], None], []),
        ([0, 3, 6, 8], []),
        (np.s_[[-9, 0, 2, 5, 4, 3, 6, 7, 9, 8], ::-1], []),
        ([[0, 1], [3, 4], [6, 7], [8, 9]], []),
        (np.isin(np.arange(10), [1, 4, 6, 9]), []),
    ]:
        if wanted is not None:
            assert moves(lambda index=index: x[index]) == wanted, index
        assert_same(x[index], answer[index], exact=True)
    most = first_device.GATHERED // 8
    index = np.arange(8)[::-1]
    for size, receivers in ((most - 8, {0, 1, 2, 3}), (most - 7, {1, 2, 3})):
        y = st.device_put(np.arange(float(size)), mesh)
        assert {to for _, _, to in moves(lambda y=y: y[index])} == receivers
        assert_same(y[index], np.arange(size)[index].astype(float), exact=True)


def test_few_elements_of_views_are_selected_where_the_base_has_them(backend: str) -> None:
    x = st.device_put(array((10, 3), "float64", 1), mesh_of((4,), backend))
    assert moves(lambda: x[3:6][[0, 1]]) == [(24, 1, 0)]
    assert_same(x[3:6][[0, 1]], np.asarray(x)[3:5], exact=True)


def test_the_guard_forbids_writes_that_move(backend: str) -> None:
    x = st.device_put(np.zeros((10, 3)), mesh_of((4,), backend))
    with st.transfer_guard("disallow"):
        x[2:5] = 1
        x[x > 0] = 2
        for index in (np.s_[1:4], [1, 2], np.arange(10) > 4):
            with pytest.raises(st.TransferError, match="setitem: moves"):
                x[index] = np.ones(3)
        with pytest.raises(st.TransferError):
            x[1] = x[9]
    assert_same(x, np.repeat([0.0, 2.0, 0.0], [2, 3, 5])[:, None] * np.ones(3), exact=True)


# -- what repeats, and what is read while it is written ---------------------------------------------


@pytest.mark.parametrize("turn", [lambda a: a, lambda a: a.T, lambda a: a[::-1], lambda a: a[:, ::-1]], ids="CFRL")
def test_the_last_of_repeated_indices_wins(turn: Any, backend: str) -> None:
    """The last one in row-major order of the indices counts, whatever the memory order of indices and values."""
    rng = np.random.default_rng(3)
    mesh = mesh_of((2, 2), backend)
    for shape in [(7,), (7, 3), (3, 7, 2)]:
        start = array(shape, "int64", 1)
        for spec in (st.P("x"), st.P(("y", "x")), st.P()):
            sharding = st.NamedSharding(mesh, spec)
            rows = rng.integers(-shape[0], shape[0], (4, 5))
            index = (rows, Ellipsis) if len(shape) < 3 else (rows, 3)
            new = rng.integers(0, 1000, start[index].shape)
            answer = assigned(start, index, new)
            turned = np.ascontiguousarray(turn(rows))
            for context in (np.asarray, functools.partial(st.device_put, device=sharding)):
                x, y, z = (st.device_put(start, sharding) for _ in range(3))
                back = turn(context(turned))
                values = context(new) if new.ndim > 2 else turn(context(np.ascontiguousarray(turn(new))))
                assert np.array_equal(np.asarray(back), rows)
                x[(back, *index[1:])] = values
                assert_same(x, answer, exact=True)
                y[(rows, *index[1:])] = values
                assert_same(y, answer, exact=True)
                z[(back, *index[1:])] = new
                assert_same(z, answer, exact=True)


@everywhere
def test_a_tensor_is_written_from_itself(backend: str) -> None:
    """The result is that of a value read before the write: rows that are exchanged, shifted or reversed, and masks of
    the tensor itself.
    """
    changes: list[Callable[[Any], None]] = [
        lambda a: written(a, [0, 3], a[[3, 0]]),
        lambda a: written(a, np.s_[1:], a[:-1]),
        lambda a: written(a, np.s_[:-1], a[1:]),
        lambda a: written(a, ..., a[::-1]),
        lambda a: written(a, ..., a.T),
        lambda a: written(a, [5, 4, 3, 2, 1, 0], a),
        lambda a: written(a, ([0, 1], slice(None)), a[:, [4, 5]].T),
        lambda a: written(a, a > 0, -1),
        lambda a: written(a, a > 0, a[a > 0] + 1),
        lambda a: written(a.T, a > 1, 5),
        lambda a: written(a, a[0] > 0, a[1]),
        lambda a: written(a, np.s_[:, 0], a[3]),
        lambda a: written(a[::-1], np.s_[1:4], a[:3]),
        lambda a: written(a.reshape(-1), np.s_[::2], a.reshape(-1)[1::2]),
        lambda a: written(a.reshape(4, 9), np.s_[[0, 3]], a.reshape(4, 9)[[3, 0]]),
        lambda a: written(a, np.array([[0, 1], [2, 0]]), a[:2]),
    ]
    start = array((6, 6), "int64", 4)
    mesh = mesh_of((2, 3), backend)
    for spec in (st.P("x", "y"), st.P("y"), st.P(None, ("y", "x")), st.P()):
        x, answer = st.device_put(start, st.NamedSharding(mesh, spec)), start.copy()
        for number, change in enumerate(changes):
            change(x)
            change(answer)
            np.testing.assert_array_equal(np.asarray(x), answer, str(number))
        assert_same(x, answer, exact=True)
        assert x.sharding.spec == spec


@everywhere
def test_masks_of_the_tensor_itself_are_read_before_it_is_written(backend: str) -> None:
    x = st.device_put(np.array([True, False, True, False, True]), mesh_of((2,), backend))
    y = st.device_put(np.array([3, 0, 1, 2]), mesh_of((2,), backend))
    x[x] = False
    assert_same(x, np.zeros(5, bool))
    x[~x] = True
    x[x[::-1]] = np.array([True, False, True, True, False])
    assert_same(x, np.array([True, False, True, True, False]))
    x[x] = x[x][::-1]
    assert_same(x, np.array([True, False, True, True, False]))
    y[y] = y[::-1]
    assert_same(y, assigned(np.array([3, 0, 1, 2]), [3, 0, 1, 2], [2, 1, 0, 3]))


@everywhere
def test_one_element_the_other_way_round(backend: str) -> None:
    """A reversed view of one element has no negative strides, so that libraries without these have it, too."""
    changes: list[Callable[[Any], None]] = [
        lambda a: written(a[None], (True, slice(None, None, -1)), 1),
        lambda a: written(a[None], np.s_[::-1], 2),
        lambda a: written(a[None][::-1], [0, 0], np.array([3, 4])),
        lambda a: written(a[None, None], ([0, 0], slice(None, None, -1)), np.array([[5], [6]])),
    ]
    x, answer = st.device_put(np.array(0), mesh_of((3,), backend)), np.array(0)
    for change in changes:
        change(x)
        change(answer)
        assert_same(x, answer, exact=True)


@everywhere
def test_complex_numbers_that_become_bools(backend: str) -> None:
    """Imaginary numbers are true, too."""
    value, mesh = np.array([1.5j, 1, 0]), mesh_of((2,), backend)
    for index in (np.s_[:], [0, 1, 2], [2, 0, 1], np.array([True, True, True])):
        x, answer = st.device_put(np.zeros(3, bool), mesh), np.zeros(3, bool)
        for given in (st.device_put(value, mesh), value):
            with quiet():
                x[index] = given
                answer[index] = value
            assert_same(x, answer, exact=True)


@everywhere
def test_values_of_the_other_backend(backend: str) -> None:
    """A tensor of one backend is written into a tensor of the other; both keep their devices."""
    other = "checked" if backend == "numpy" else "numpy"
    start, new = array((9, 4), "float64", 1), array((9, 4), "float32", 2)
    x = st.device_put(start, mesh_of((2, 2), backend))
    home = x.sharding
    y = st.device_put(new, st.NamedSharding(mesh_of((3,), other), st.P(None, "x")))
    answer = start.copy()
    changes: list[tuple[Callable[[Any], Any], Any]] = [
        (lambda a: np.s_[2:7], lambda b: b[1:6]),
        (lambda a: [8, 0], lambda b: b[:2]),
        (lambda a: b_mask(a), lambda b: b[0, 1]),
        (lambda a: np.s_[..., -1], lambda b: b[:, 2]),
        (lambda a: np.s_[::-2], lambda b: b[::2]),
    ]

    def b_mask(a: Any) -> Any:
        return new > 0 if isinstance(a, np.ndarray) else y > 0

    for index, value in changes:
        x[index(x)] = value(y)
        answer[index(answer)] = value(new)
        assert_same(x, answer, exact=True)
    for view, plain in [(y[0, 1, ...], new[0, 1]), (y.T[3, 8, ...], new[8, 3]), (y[0, 1], new[0, 1])]:
        for index in ((2, 2), 4, [1], (slice(None), 1)):
            x[index] = view
            answer[index] = plain
            assert_same(x, answer, exact=True)
    assert_same(y, new, exact=True)
    assert x.sharding == home
    with st.transfers() as log:
        x[0] = y[5]
    assert log.bytes > 0
    assert {r.destination for r in log if r.bytes} <= x.devices() | {st.HOST}


# -- dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", np.array([1.9, -1.9, 2.5])),
        ("int8", np.array([300, -129, 5])),
        ("uint8", np.array([255.0, 0.5, 3])),
        ("bool", np.array([0.5, 0.0, 2])),
        ("float32", np.array([1 / 3, 1e-50, 2])),
        ("float16", np.array([1, 2, 3], "int64")),
        ("complex64", np.array([1.5, 2, 3])),
        ("float64", np.array([True, False, True])),
        ("int64", 2.9),
        ("int64", -2.9),
        ("bool", 3),
        ("complex128", 1.5),
        ("float32", np.float64(1 / 3)),
        ("int8", [1.7, 2.2, -3.9]),
        ("int8", (1, 2, 3)),
        ("float64", [np.float32(1.5), 2, True]),
    ],
)
def test_values_take_the_dtype_of_what_is_written(dtype: str, value: Any, backend: str) -> None:
    start = array((5, 3), dtype, 1)
    indices_ = [
        np.s_[1],
        np.s_[1:3],
        np.s_[[4, 0]],
        np.s_[::2],
        start.astype(bool) if not np.ndim(value) else np.s_[[0, 0]],
    ]
    for index in indices_:
        answer = start.copy()
        answer[index] = value
        values = [value]
        if isinstance(value, np.ndarray):
            values.append(st.device_put(value, mesh_of((3,), backend, 2)))
        for v in values:
            x = st.device_put(start, mesh_of((4,), backend))
            x[index] = v
            assert_same(x, answer, exact=True)


def test_casts_warn_as_in_numpy(backend: str) -> None:
    """The warning of a discarded imaginary part precedes the write; that of NaN as an integer follows it."""
    if backend not in READ_ONLY:
        pytest.skip(f"what is lost in a cast the library of backend {backend!r} tells in its own way, or not at all")
    x = st.device_put(np.arange(6.0), mesh_of((3,), backend))
    for index in (np.s_[1:4], [0, 1, 5], np.arange(6) % 2 > 0):
        with pytest.warns(np.exceptions.ComplexWarning):
            x[index] = np.array([1 + 1j, 2, 3])
        np.testing.assert_array_equal(np.asarray(x)[index], [1, 2, 3])
        with pytest.raises(np.exceptions.ComplexWarning):
            x[index] = np.array([7 + 1j, 7, 7])
        np.testing.assert_array_equal(np.asarray(x)[index], [1, 2, 3])
    i = st.device_put(np.arange(6), mesh_of((3,), backend))
    for index in (np.s_[1:4], [0, 1, 5]):
        with pytest.warns(RuntimeWarning, match="invalid value"):
            i[index] = np.array([np.nan, 2, 3])
        np.testing.assert_array_equal(np.asarray(i)[index][1:], [2, 3])


# -- what is refused --------------------------------------------------------------------------------

BAD_INDICES: list[tuple[Any, str]] = [
    (5, "5"),
    (-6, "-6"),
    ((0, 3), "3"),
    ((0, 0, 0), "3 indices"),
    (([0], 0, 0), "3 indices"),
    ((Ellipsis, Ellipsis), "ellipsis"),
    (([0], Ellipsis, Ellipsis), "ellipsis"),
    (1.0, "float"),
    (1j, "complex"),
    ("a", "str"),
    (b"a", "bytes"),
    ({1}, "set"),
    ({}, "dict"),
    (2**70, "1180591620717411303424"),
    (np.float64(1), "float64"),
    (np.array(1.0), "float64"),
    (np.array([1.0]), "float64"),
    (np.array([]), "float64"),
    ([1.0], "float64"),
    (["a"], "<U1"),
    ([None], "object"),
    (np.array([0], object), "object"),
    ([1, slice(2)], ""),
    ([[0], [1, 2]], ""),
    ([0, 5], "5"),
    ([0, -6], "-6"),
    ((slice(None), [3]), "3"),
    (([0, 1], [0, 1, 2]), "(2,), (3,)"),
    ((np.zeros((2, 1), int), np.zeros((3, 2), int)), "(2, 1), (3, 2)"),
    (np.zeros(4, bool), "(4,)"),
    (np.zeros((5, 2), bool), "(5, 2)"),
    (np.zeros((0, 2), bool), "(0, 2)"),
    (np.zeros((2, 0), bool), "(2, 0)"),
    (np.zeros((5, 3, 1), bool), "3 indices"),
    ([True, False], "(2,)"),
    ((slice(None), np.zeros(5, bool)), "(5,)"),
    ((np.array([1, 1, 0, 0, 0], bool), [0, 1, 2]), "(2,), (3,)"),
    ((True, [0, 1], False), ""),
    (slice(None, None, 0), "step"),
    (slice(1.0), "slice"),
    (slice("a", None), "slice"),
    ((slice(None, None, 0), [0]), "step"),
    ((slice(1.0), [0]), "slice"),
]


@pytest.mark.parametrize(("index", "words"), BAD_INDICES, ids=lambda x: repr(x)[:40])
def test_bad_indices(index: Any, words: str, backend: str) -> None:
    value = array((5, 3), "float64", 1)
    x = st.device_put(value, mesh_of((4,), backend))
    for call in (lambda a: a[index], lambda a: written(a, index, 1), lambda a: written(a, index, np.ones(3))):
        wanted = outcome(lambda call=call: call(value.copy()))
        if not isinstance(wanted, Exception):
            continue  # NumPy takes it, since it selects nothing
        with pytest.raises(type(wanted)) as caught:
            call(x)
        assert isinstance(caught.value, st.ShardTensorError)
        assert words in str(caught.value)
        assert_same(x, value, exact=True)


@pytest.mark.parametrize(
    "index",
    [[0, 5], [0, -6], np.zeros(4, bool), np.array([1.0]), np.zeros((5, 3, 1), bool)],
    ids=lambda x: repr(x)[:40],
)
def test_bad_tensors_as_indices(index: Any, backend: str) -> None:
    value = array((5, 3), "float64", 1)
    x = st.device_put(value, mesh_of((4,), backend))
    i = st.device_put(np.asarray(index), mesh_of((2,), backend, 3))
    for call in (lambda: x[i], lambda: written(x, i, 1), lambda: written(x, i, np.ones(3))):
        with pytest.raises(IndexError) as caught:
            call()
        assert isinstance(caught.value, st.IndexingError)
        assert_same(x, value, exact=True)


BAD_VALUES: list[tuple[str, Any, Any, str]] = [
    ("float64", np.s_[1:3], np.ones(2), "(2,)"),
    ("float64", np.s_[1:3], np.ones((3, 3)), "(3, 3)"),
    ("float64", np.s_[1:3], np.ones((2, 1, 3)), "(2, 1, 3)"),
    ("float64", np.s_[...], np.ones(0), "(0,)"),
    ("float64", np.s_[1:3], [1.0, 2.0], "(2,)"),
    ("float64", np.s_[1:3], [[1.0], [1.0, 2.0]], "different lengths"),
    ("float64", np.s_[0, 0], [1.0], "(1,)"),
    ("float64", np.s_[0, 0], [[1.0]], "(1, 1)"),
    ("float64", np.s_[[0, 1]], np.ones((2, 2)), "(2, 2)"),
    ("float64", np.s_[[0, 1]], np.ones((2, 2, 3)), "(2, 2, 3)"),
    ("float64", np.s_[[0, 1], [0, 1]], np.ones(3), "(3,)"),
    ("float64", np.s_[[]], np.ones((2, 3)), "(2, 3)"),
    ("float64", np.s_[0:0], np.ones((2, 3)), "(2, 3)"),
    ("float64", np.eye(5, 3, dtype=bool), np.ones(2), "(2,)"),
    ("float64", np.eye(5, 3, dtype=bool), np.ones((1, 3)), "2 dimensions"),
    ("float64", np.zeros((5, 3), bool), np.ones(2), "(2,)"),
    pytest.param("float64", np.s_[0], object(), "object", id="an object"),
    ("float64", np.s_[0], {}, "dict"),
    ("float64", np.s_[0], 1j, "1j"),
    ("float64", np.s_[0, 0], 1j, "1j"),
    ("float64", np.s_[[0]], 1j, "1j"),
    ("float64", np.eye(5, 3, dtype=bool), 1j, "1j"),
    ("float64", np.s_[0], [1j, 2, 3], ""),
    ("float64", np.s_[[0]], [1j, 2, 3], ""),
    ("int8", np.s_[0], 300, "300"),
    ("int8", np.s_[0, 0], -129, "-129"),
    ("int8", np.s_[[0, 1]], 300, "300"),
    ("int8", np.eye(5, 3, dtype=bool), 300, "300"),
    ("int8", np.s_[0], [1, 300, 2], "300"),
    ("int8", np.s_[[0]], [1, 300, 2], "300"),
    ("uint8", np.s_[1:3], -1, "-1"),
    ("int64", np.s_[0], 2**64, ""),
    ("int32", np.s_[0], float("nan"), "nan"),
    ("int32", np.s_[0], float("inf"), "inf"),
    ("int32", np.s_[[0]], float("nan"), "nan"),
    ("int32", np.s_[0], [float("nan"), 1, 2], ""),
    ("int32", np.s_[0], 1j, "1j"),
]


@pytest.mark.parametrize(("dtype", "index", "value", "words"), BAD_VALUES, ids=lambda x: repr(x)[:40])
def test_bad_values(dtype: str, index: Any, value: Any, words: str, backend: str) -> None:
    start = array((5, 3), dtype, 1)
    x = st.device_put(start, mesh_of((4,), backend))
    other = st.reshard(x, x.sharding)
    values = [value]
    if isinstance(value, np.ndarray):
        values.append(st.device_put(value, mesh_of((2,), backend, 5)))
    with pytest.raises((ValueError, TypeError, OverflowError)) as wanted:
        written(start.copy(), index, value)
    for v in values:
        for view, at in ((x, index), (x.T.T, index), (x[None], (0, *(index if type(index) is tuple else (index,))))):
            if view.ndim == 3 and isinstance(index, np.ndarray):
                continue  # no longer one mask for all
            with pytest.raises(wanted.type) as caught:
                written(view, at, v)
            assert words in str(caught.value)
            assert_same(x, start, exact=True)
            assert_same(other, start, exact=True)


def test_a_tensor_that_was_given_away_is_not_written(backend: str) -> None:
    x = st.device_put(np.arange(4.0), mesh_of((2,), backend))
    view = x[1:]
    y = st.device_put(x, st.devices(backend)[0], donate=True)
    for call in (lambda: written(x, 0, 1), lambda: written(x, [0], 1), lambda: written(view, 0, 1), lambda: view[[0]]):
        with pytest.raises(st.DonatedError):
            call()
    with pytest.raises(st.DonatedError):
        y[...] = x
    assert_same(y, np.arange(4.0))


# -- the operators by their names -------------------------------------------------------------------


@everywhere
def test_setitem_leaves_its_operand_alone(backend: str) -> None:
    """The result is a new value in x's layout and dtype, also where the write replaces all elements, or none."""
    start = array((5, 4), "float32", 1)
    for spec in (st.P("x"), st.P("y", "x"), st.P()):
        x = st.device_put(start, st.NamedSharding(mesh_of((2, 2), backend), spec))
        for index, value in [
            (np.s_[1:3], 7),
            (np.s_[...], np.zeros((5, 4))),
            (np.s_[0:0], 1),
            (np.s_[[4, 4], 0], np.array([1, 2])),
            (start > 0, 0.5),
            (np.s_[::-1], x),
        ]:
            for operand, wanted in ((x, start), (x.T.T, start), (x[::-1], start[::-1])):
                new = setitem(operand, value, index)
                answer = wanted.copy()
                answer[index] = np.asarray(value)
                assert_same(new, answer, exact=True)
                assert new.sharding == operand.sharding
                new[0] = 99
                assert_same(x, start, exact=True)
                x[0, 0] = -1
                answer[0] = 99
                assert_same(new, answer, exact=True)
                x[0, 0] = start[0, 0]
    with pytest.raises(ValueError, match="setitem: a value of shape"):
        setitem(x, np.ones(7), 0)
    with pytest.raises(IndexError, match="9"):
        setitem(x, 1, 9)
    assert_same(setitem(np.zeros(3), st.ones(2), np.s_[1:]), np.array([0.0, 1, 1]))
    assert_same(x, start, exact=True)


@everywhere
def test_setitem_in_a_map_leaves_its_operand_alone(backend: str) -> None:
    """The operand is an array that the mapped function has made, and may write to."""

    def replaced(x: Any) -> tuple[Any, Any]:
        made = x + 1
        return setitem(made, 9, np.s_[1:]), made

    mesh = mesh_of((2,), backend)
    x = st.device_put(np.arange(6.0), st.NamedSharding(mesh, st.P("x")))
    new, made = st.shard_map(replaced, mesh=mesh, in_specs=st.P("x"), out_specs=(st.P("x"), st.P("x")))(x)
    assert_same(new, np.array([1.0, 9, 9, 4, 9, 9]), exact=True)
    assert_same(made, np.arange(1.0, 7), exact=True)


def test_setitem_takes_lists(backend: str) -> None:
    x = st.device_put(np.zeros((3, 2)), mesh_of((2,), backend))
    assert_same(setitem(x, [1, 2], 1), np.array([[0.0, 0], [1, 2], [0, 0]]))
    assert_same(setitem(x, [[1], [2]], [2, 0]), np.array([[2.0, 2], [0, 0], [1, 1]]))


@everywhere
def test_unstack_gives_views(backend: str) -> None:
    for shape, spec in [
        ((4, 3), st.P("x")),
        ((3, 5), st.P("y", "x")),
        ((0, 3), st.P()),
        ((2, 1, 3), st.P(None, None, "x")),
    ]:
        start = array(shape, "float64", 3)
        x = st.device_put(start, st.NamedSharding(mesh_of((2, 2), backend), spec))
        for axis in range(-len(shape), len(shape)):
            parts = st.unstack(x, axis=axis)
            answers = tuple(np.moveaxis(start, axis, 0))
            assert isinstance(parts, tuple)
            assert len(parts) == len(answers)
            for part, answer in zip(parts, answers, strict=True):
                assert_same(part, answer, exact=True)
            if start.size:
                parts[-1][...] = 7
                answers[-1][...] = 7
                assert_same(x, start, exact=True)
                x[...] = 5
                start[...] = 5
                assert_same(parts[0], answers[0], exact=True)
    with pytest.raises(st.AxisError, match="unstack: axis 4"):
        st.unstack(x, axis=4)
    with pytest.raises(ValueError, match="unstack: x has no dimensions"):
        st.unstack(x[0, 0, 0])
    assert [p.tolist() for p in st.unstack(st.device_put(np.arange(2), mesh_of((2,), backend)))] == [0, 1]


@everywhere
def test_what_arrays_select_is_a_copy(backend: str) -> None:
    """Writes to either are not visible in the other, also where the index selects all elements in order."""
    start = array((4, 3), "float64", 1)
    x = st.device_put(start, mesh_of((2,), backend))
    for index in (
        [0, 1, 2, 3],
        np.ones((4, 3), bool),
        np.array(True),
        True,
        (slice(None), [0, 1, 2]),
        np.arange(4),
        (0, [1]),
        np.array(1),
        ([],),
    ):
        taken, answer = x[index], start[index]
        taken[...] = 9
        assert_same(x, start, exact=True)
        taken = x[index]
        x[...] = 0
        assert_same(taken, answer, exact=True)
        x[...] = start


def test_arrays_without_dimensions_index_like_integers(backend: str) -> None:
    start = array((4, 3), "float64", 1)
    x = st.device_put(start, mesh_of((2,), backend))
    for i in (
        2,
        -1,
        np.int64(2),
        np.uint8(3),
        np.array(-2),
        st.asarray(1),
        st.device_put(np.int32(3), st.devices(backend)[7]),
    ):
        plain = np.asarray(i)
        for index, answer in [
            (i, start[plain]),
            ((slice(1, 3), i % 3), start[1:3, plain % 3]),
            ((i, 0), start[plain, 0]),
            ((i, [0, 2]), start[plain, [0, 2]]),
            ((..., i % 3, None), start[..., plain % 3, None]),
        ]:
            assert_same(x[index], answer, exact=True)
        y = x.copy()
        y[i] = 7
        y[i, 0] = 8
        answer = start.copy()
        answer[plain] = [8, 7, 7]
        assert_same(y, answer, exact=True)


class ShardContext(NamedTuple):
    row: Any
    column: Any


def test_named_tuples_are_tuples(backend: str) -> None:
    start = array((4, 3), "float64", 1)
    x = st.device_put(start, mesh_of((2,), backend))
    for context in (
        ShardContext(1, 2),
        ShardContext(slice(1, 3), 0),
        ShardContext([0, 3], slice(None)),
        ShardContext(None, Ellipsis),
    ):
        assert_same(x[context], start[context], exact=True)
        y, answer = x.copy(), start.copy()
        y[context] = 5
        answer[context] = 5
        assert_same(y, answer, exact=True)


def test_elements_of_tensors_without_dimensions(backend: str) -> None:
    """``x[()]``, ``x[...]``, ``x[True]``, ``x[None]`` and what they write."""
    for value in (np.array(2.5), np.array(3), np.array(True)):
        for index in ((), ..., True, False, np.array(True), None, (None, ...), (True, True), (None, True)):
            x = st.device_put(value, mesh_of((3,), backend))
            assert_same(x[index], value[index], exact=True)
            x[index] = 0
            answer = value.copy()
            answer[index] = 0
            assert_same(x, answer, exact=True)
        with pytest.raises(IndexError):
            x[0]
        with pytest.raises(IndexError):
            x[[0]] = 1
        with pytest.raises(IndexError):
            x[:] = 1


@pytest.mark.parametrize("backend", ["checked", "cupy"])
def test_rows_are_received_in_batches_of_limited_size(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def exchanged(messages: Sequence[Any]) -> Any:
        sizes.append(sum(int(m.array.size) * 8 for m in messages))
        return exchange(messages)

    exchange = gather_scatter.exchange
    value = np.arange(40.0).reshape(10, 4)
    rows = np.random.default_rng(0).integers(0, 10, 50)
    x = st.device_put(value, st.NamedSharding(mesh_of((3,), backend), st.P("x")))
    whole, y = np.asarray(x[rows]), x.copy()
    monkeypatch.setattr(gather_scatter, "exchange", exchanged)
    monkeypatch.setattr(gather_scatter, "AT_ONCE", 3 * 4 * 8)
    np.testing.assert_array_equal(np.asarray(x[rows]), whole)
    np.testing.assert_array_equal(whole, value[rows])
    y[rows] = x[rows] * 2
    expected = value.copy()
    expected[rows] = value[rows] * 2
    np.testing.assert_array_equal(np.asarray(y), expected)
    assert 0 < max(sizes) <= 3 * 4 * 8


# -- rows of a table -------------------------------------------------------------------------------


@everywhere
def test_indices_that_are_split_select_rows_without_transfers(backend: str) -> None:
    """As in an embedding: the batch stays split, and a table that is split by columns keeps them."""
    mesh = mesh_of((2, 2), backend)
    numbers, at = np.arange(30.0).reshape(10, 3), np.array([[3, -1], [0, 9], [5, 5], [-10, 2]], "int8")
    for of_table, of_indices, spec in [
        (st.P(), st.P("x"), st.P("x")),
        (st.P(), st.P(), st.P()),
        (st.P(), st.P("x", "y"), st.P("x", "y")),
        (st.P(None, "y"), st.P("x"), st.P("x", None, "y")),
    ]:
        table = st.device_put(numbers, st.NamedSharding(mesh, of_table))
        indices = st.device_put(at, st.NamedSharding(mesh, of_indices))
        for select in (lambda t, i: t[i], lambda t, i: st.take(t, i, axis=0)):
            for found in (select, st.jit(select)):
                found(table, indices)
                with st.transfers() as log:
                    rows = found(table, indices)
                assert (rows.sharding.spec, log.bytes) == (spec, 0)
                assert_same(rows, numbers[at])
            assert st.eval_shape(select, table, indices).sharding == rows.sharding
    with pytest.raises(st.IndexingError, match="getitem: index 10 is out of bounds for axis 0 with size 10"):
        table[st.device_put(np.array([10, 0, 0, 0]), st.NamedSharding(mesh, st.P("x")))]


@everywhere
def test_the_result_is_split_as_the_indices(backend: str) -> None:
    mesh = mesh_of((2, 2), backend)
    numbers, at = np.arange(60.0).reshape(10, 6), np.array([[3, -1], [0, 9], [5, 5], [-10, 2]])
    for of_table, of_indices, spec in [
        (st.P("y"), st.P("x"), st.P("x")),
        (st.P("y"), st.P(), st.P("y")),
        (st.P("x", "y"), st.P(None, "x"), st.P(None, "x", "y")),
        (st.P("x", "y"), st.P("y"), st.P("x", None, "y")),
    ]:
        table = st.device_put(numbers, st.NamedSharding(mesh, of_table))
        indices = st.device_put(at, st.NamedSharding(mesh, of_indices))
        rows = table[indices]
        assert rows.sharding.spec == spec
        assert rows.sharding == st.eval_shape(lambda t, i: t[i], table, indices).sharding
        assert_same(rows, numbers[at])
    both = st.device_put(numbers, st.NamedSharding(mesh, st.P()))
    labels = st.device_put(np.arange(6), st.NamedSharding(mesh, st.P("x")))
    assert both[np.arange(6), labels].sharding.spec == st.P("x")
    assert_same(both[np.arange(6), labels], numbers[np.arange(6), np.arange(6)])


@everywhere
def test_a_tensor_without_dimensions_through_a_mask(backend: str) -> None:
    """It is one value, as a scalar: the elements of the mask are not needed to write it, so that jit records it."""
    start, rows = np.arange(12.0).reshape(6, 2), np.arange(6) % 2 == 1
    for mask in (rows, start > 4):
        for value in (np.array(7.5), np.array(3, "int32"), None):
            wanted = start.copy()
            wanted[mask] = start[5, 1] if value is None else value

            def written(x: Any, mask: Any, value: Any) -> Any:
                x = x * 1
                x[mask] = x[5, 1] if value is None else value
                return x

            given = put(start, backend), put(mask, backend), None if value is None else put(value, backend)
            assert_same(written(*given), wanted)
            assert_same(st.jit(written)(*given), wanted)
            with st.transfers() as log:
                st.eval_shape(written, *given)
                if value is not None:
                    written(*given)
            assert log.bytes == 0


@everywhere
@pytest.mark.parametrize("at_once", [16, gather_scatter.AT_ONCE])
def test_rows_are_the_same_in_one_selection_and_in_pieces(
    at_once: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On separate memories, few rows are selected at once on each device; the messages are the same."""
    monkeypatch.setattr(gather_scatter, "AT_ONCE", at_once)
    mesh, rng = mesh_of((2, 3), backend), np.random.default_rng(0)
    host = rng.normal(size=(11, 5, 2))
    index, other = rng.integers(-11, 11, (3, 5)), rng.integers(0, 5, 5)
    for spec in (st.P("x"), st.P(("x", "y")), st.P("x", "y"), st.P(None, "x"), st.P()):
        x = st.device_put(host, st.NamedSharding(mesh, spec))
        placed = st.device_put(index, st.NamedSharding(mesh, st.P(None, "y")))
        for at in (
            (index,),
            (placed,),
            (index, other),
            (slice(2, None), other),
            (index[:, :0],),
            (placed, 1, slice(3)),
        ):
            with st.transfers() as log:
                rows = x[at]
            np.testing.assert_array_equal(np.asarray(rows), host[tuple([index if i is placed else i for i in at])])
            sent = [(r.source, r.destination) for r in log if r.operator == "getitem" and r.bytes]
            assert all(source != destination for source, destination in sent)
