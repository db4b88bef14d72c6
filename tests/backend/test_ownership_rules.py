"""The rules of ownership, each tested separately, because random sequences of calls rarely detect a fault in them."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import shardtensor_numpy

import shardtensor as st
from shardtensor.backend import exclusive_memory as counting
from shardtensor.backend.registry import load
from shardtensor.communication import transfer
from shardtensor.functions.placement import transfers
from shardtensor.host import memory_pool
from shardtensor.interpreters.writes import write_transaction, writes
from shardtensor.tensor import ownership
from shardtensor.tensor.operands import on_one_device
from shardtensor.tensor.storage import PendingWrite, Storage
from shardtensor.tensor.tensor import mark_donated, shard_arrays, tensor, without_elements, write_state_of
from tests.backend.holders import VALUE, places, seen, shard_data
from tests.layouts import assert_same, everywhere, mesh_of, put, values_of

# -- who holds a storage ---------------------------------------------------------------------------


def test_one_shared_array_makes_a_storage_shared() -> None:
    x = put(VALUE, "checked")
    y = x.copy()
    assert ownership.is_shared(x._storage)
    x[0, 0] = 5
    assert ownership.is_shared(x._storage)
    x[2:] = 5
    assert not ownership.is_shared(x._storage)
    assert_same(y, VALUE)
    assert ownership.is_shared(Storage((VALUE,)))  # Nothing is known of its memory.


def test_a_written_shard_is_alone_on_both_sides() -> None:
    x = put(VALUE, "checked")
    y = x.copy()
    x[0, 0] = 5
    before = places(y)
    y[0, 0] = 9
    assert places(y) == before
    y[7, 2] = 9
    assert places(y)[:-1] == before[:-1]
    assert places(y)[-1] != before[-1]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("take", [np.asarray, lambda x: np.asarray(x[1:]), shard_data], ids=["whole", "view", "shards"])
def test_an_export_holds_the_storage_that_it_was_read_from(
    take: Any, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may write to the tensor in the meantime, while a copy of the tensor still has the storage."""
    x = put(VALUE, "numpy")
    if split:  # One buffer for each shard, which the first reader of the whole joins.
        x = st.concat(st.shard(x))
    y = x.copy()

    holders = (ownership, transfers, shardtensor_numpy.NumPyBackend)

    def lend(array: Any, real: Any = counting.lend) -> Any:
        made = real(array)
        for holder in holders:
            monkeypatch.setattr(holder, "lend", staticmethod(real))
        x[0, 0] = 5
        return made

    for holder in holders:
        monkeypatch.setattr(holder, "lend", staticmethod(lend))
    held = take(x)
    assert x[0, 0] == 5
    before = np.array(held)
    y[...] = 7
    assert np.array_equal(held, before)


@pytest.mark.parametrize("backend", ["checked", "cupy"], indirect=True)
def test_a_copy_in_host_memory_holds_nothing(backend: str) -> None:
    x = put(VALUE, backend)
    x += 1
    before, held = places(x), np.asarray(x)
    x += 1
    assert places(x) == before
    np.testing.assert_array_equal(held, VALUE + 1)


def test_an_export_holds_one_shard() -> None:
    x = put(VALUE, "checked")
    x += 1
    before, held = places(x), x.addressable_shards[1].data
    x += 1
    assert [a == b for a, b in zip(places(x), before, strict=True)] == [True, False, True, True]
    np.testing.assert_array_equal(values_of(held), VALUE[2:4] + 1)


def test_an_export_of_a_view_holds_all_shards_of_its_base() -> None:
    """A view may lie on its devices in other parts than its base."""
    x = put(VALUE, "checked")
    x += 1
    held = x[:, 1:].addressable_shards[1].data
    assert all(any(lease() is not None for lease in leases) for leases in x._storage.leases)
    del held
    before = places(x)
    x += 1
    assert places(x) == before


@pytest.mark.parametrize("dtype", ["f8", "M8[s]", "m8[ns]"])
def test_exports_cannot_be_made_writable(dtype: str) -> None:
    x = st.device_put(np.ones(6, dtype), st.devices("numpy")[0])
    for held in (np.asarray(x), shard_data(x)[0], np.asarray(x)[1:]):
        assert not held.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            held.flags.writeable = True


def test_many_leases_are_looked_through_seldom() -> None:
    """Each lease is examined a few times while others are added, and not once for each lease that is added."""
    x, calls = put(VALUE, "numpy"), []

    def held() -> bool:
        calls.append(0)
        return True

    for _ in range(1024):
        ownership.lease(x._storage, functools.partial(held))
    assert len(calls) <= 2048


def test_a_tensor_that_is_used_often_has_few_leases(backend: str) -> None:
    """The number of leases does not grow with the number of uses of a tensor."""
    parts = st.shard(put(VALUE, backend))
    for _ in range(100):
        for x in st.pmap(lambda a: a, parts) + [st.device_put(x, x.sharding) for x in parts]:
            assert x.shape[1:] == VALUE.shape[1:]
        ownership.hold(parts[0]._storage)
    assert max(len(leases or ()) for x in parts for leases in x._storage.leases) <= 64


def bases(array: Any) -> int:
    """The length of the chain of objects on which the memory of a host array depends."""
    count = 0
    while (array := array.base if isinstance(array, np.ndarray) else getattr(array, "obj", None)) is not None:
        count += 1
    return count


MAPS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "an argument": lambda x: st.pmap(lambda p: p, x),
    "a view": lambda x: st.pmap(lambda p: p[:], x),
    "a transposed view": lambda x: st.pmap(lambda p: p.T, x),
    "the result of a collective": lambda x: st.pmap(lambda p: st.pmax(p, "i"), x, axis_name="i"),
    "a gathered array": lambda x: st.pmap(lambda p: st.all_gather(p, "i", tiled=True)[: len(p)], x, axis_name="i"),
    "an export": lambda x: [st.device_put(np.asarray(p), p.device, may_alias=True) for p in x],
}


@pytest.mark.parametrize("dtype", ["f8", "M8[s]"])
@pytest.mark.parametrize("returned", MAPS)
def test_chains_of_maps_do_not_lengthen_chains_of_bases(returned: str, dtype: str) -> None:
    """NumPy deallocates a chain of bases by recursion, which overflows the stack where it is long."""
    x, lengths = st.shard(np.arange(8).astype(dtype).reshape(4, 2), devices=st.devices("numpy")[:2]), set()
    for _ in range(30):
        x = MAPS[returned](x)
        lengths.add(max(bases(p._storage.buffers[0]) for p in x))
    assert max(lengths) <= 5


def test_many_maps_in_a_program_make_no_chain_of_bases() -> None:
    (x,) = st.pmap(lambda p: p[:], [put(VALUE, "numpy", (1,))])

    def fn(p: Any) -> Any:
        (y,) = st.pmap(lambda q: q[:], [x])
        for _ in range(3000):
            (y,) = st.pmap(lambda q: q[:], [y])
        assert bases(y._storage.buffers[0]) <= 5
        return p

    st.pmap(fn, [x])


@everywhere
def test_a_result_that_is_an_argument_is_the_shard_itself(backend: str) -> None:
    """It is written in place once nothing else holds its memory."""
    x = put(VALUE, backend, (1,))
    before = places(x)
    y, z = st.pmap(lambda p: (p, p), [x])[0]
    assert places(y) == places(z) == before
    z += 1
    assert_same(x, VALUE)
    assert_same(y, VALUE)
    del x
    y += 2
    assert places(y) == before
    assert_same(y, VALUE + 2)
    assert_same(z, VALUE + 1)


@everywhere
def test_results_of_nested_maps_share_the_leases_of_their_arguments(backend: str) -> None:
    """A write is visible neither in the result of a nested map nor in its argument."""
    x = put(VALUE, backend)
    kept: list[Any] = []

    def fn(p: Any) -> Any:
        kept.extend(st.pmap(lambda q: q, st.shard(x, devices=x.sharding.mesh)))
        kept.extend(st.pmap(lambda q: q.T, st.shard(x, devices=x.sharding.mesh)))
        return 0

    st.pmap(fn, st.shard(x, devices=x.sharding.mesh)[:1])
    x += 1
    x[0, 0] = 7
    assert_same(st.unshard(kept[:4]), VALUE)
    assert_same(st.concat(kept[4:], axis=1), VALUE.T)
    kept[0] += 5
    assert_same(x[1:2], VALUE[1:2] + 1)
    assert_same(kept[4].T, VALUE[:2])


def test_what_a_nested_map_gathers_without_a_copy_is_held() -> None:
    x = put(VALUE, "numpy")

    def fn(p: Any) -> Any:
        whole = st.pmap(
            lambda q: st.all_gather(q, "j", tiled=True), st.shard(x, devices=x.sharding.mesh), axis_name="j"
        )
        x[...] = -1
        return np.asarray(whole[0]).copy()

    (result,) = st.pmap(fn, [put(VALUE, "numpy", (1,))])
    np.testing.assert_array_equal(np.asarray(result), VALUE)


def test_a_nested_map_may_return_what_is_written_then() -> None:
    x = put(VALUE, "numpy", (1,))

    def fn(a: Any) -> Any:
        (same,) = st.pmap(lambda b: b, [x])
        x[0, 0] = -1
        return np.asarray(same).copy()

    (result,) = st.pmap(fn, [put(VALUE, "numpy", (1,))])
    np.testing.assert_array_equal(np.asarray(result), VALUE)


@pytest.mark.parametrize("dtype", ["f8", "M8[s]"])
def test_an_export_that_has_ended_is_forgotten(dtype: str) -> None:
    x = st.device_put(np.ones(6, dtype), st.devices("numpy")[0])
    x[0] = np.zeros((), dtype)
    before = places(x)
    np.asarray(x)
    x[0] = np.zeros((), dtype)
    assert places(x) == before


def test_exports_of_what_user_code_made_read_only_can_be_written() -> None:
    """The tensor has the memory for itself, so its consumer may write to it."""

    def fn(p: Any) -> Any:
        made = p + 1
        made.flags.writeable = False
        return made

    (x,) = st.pmap(fn, [put(VALUE, "numpy", (1,))])
    before = places(x)
    theirs = np.from_dlpack(x)
    theirs[0, 0] = 7
    assert theirs.ctypes.data == before[0]
    assert float(x[0, 0]) == 7


# -- arrays of user code -----------------------------------------------------------------------------


class Subclass(np.ndarray):
    """A subclass of NumPy's array, such as a memory map or a masked array: more than its elements may depend on the
    array.
    """


_OWNS_DATA = 0x4
"""NumPy's NPY_ARRAY_OWNDATA, in the flags that follow six pointers in the array object."""


def test_exclusive_arrays() -> None:
    base = np.ones(4)
    assert counting.is_exclusive([np.ones(4)])
    assert counting.is_exclusive([np.ones(4)[1:]])
    assert counting.is_exclusive([base], 1)
    assert not counting.is_exclusive([base])
    assert not counting.is_exclusive([base[1:]])
    assert not counting.is_exclusive([np.frombuffer(bytearray(32))])
    assert not counting.is_exclusive([np.frombuffer(bytearray(32))[1:]])
    assert not counting.is_exclusive([Subclass(4)])
    foreign = [np.ones(4)]
    # Extension modules make arrays of memory that neither the array nor a base of it owns.
    flags = ctypes.c_int.from_address(id(foreign[0]) + object.__basicsize__ + 48)
    flags.value ^= _OWNS_DATA
    try:
        assert not foreign[0].flags.owndata
        assert not counting.is_exclusive(foreign)
    finally:
        flags.value ^= _OWNS_DATA
    assert counting.is_exclusive(foreign)


def test_writable_arrays() -> None:
    array = np.ones(4)
    array.flags.writeable = False
    assert counting.make_writable(array)
    assert array.flags.writeable
    lent = counting.read_only(array)
    assert not counting.make_writable(lent)
    assert not counting.make_writable(lent[1:])
    assert not counting.make_writable(np.frombuffer(b"12345678"))
    view = array[1:]
    array.flags.writeable = view.flags.writeable = False
    assert counting.make_writable(view)
    assert view.flags.writeable


def test_the_memory_of_arrays() -> None:
    array = np.ones(4)
    assert counting.memory_of(array) == counting.memory_of(array[1:][:2]) is not None
    assert counting.memory_of(array) != counting.memory_of(np.ones(4))
    pooled = memory_pool.empty((1 << 16,), np.dtype("f8"))
    assert counting.memory_of(pooled) == counting.memory_of(pooled[1:]) is not None
    assert counting.memory_of(np.frombuffer(bytearray(32))) is None
    assert counting.memory_of(np.frombuffer(bytearray(32))[1:]) is None


# -- writes to memory of which nothing is known ------------------------------------------------------


def test_unknown_memory_is_copied_by_every_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that does not define `memory_of` has arrays of unknown memory."""
    monkeypatch.setattr(type(load("checked")), "memory_of", lambda self, array: None)
    x = put(VALUE, "checked")
    for _ in range(2):
        before, kept = places(x), shard_arrays(x)  # so that no memory is used again
        x[0, 0] += 1
        assert places(x)[0] != before[0]
        x += 1
        assert not set(places(x)) & set(before)
        del kept


def test_unknown_memory_that_was_joined_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(load("numpy")), "memory_of", lambda self, array: None)
    parts = [st.device_put(row, device) for row, device in zip(VALUE, st.devices("numpy"), strict=True)]
    x = st.stack(st.pmap(lambda p: p + 1, parts))
    st.sum(x)  # An operator joins them.
    before = x._storage.buffers[0]
    x += 1
    assert x._storage.buffers[0] is not before
    np.testing.assert_array_equal(before, VALUE + 1)
    assert_same(x, VALUE + 2)


# -- joined arrays -----------------------------------------------------------------------------------


def test_arrays_that_others_hold_stay_held_when_they_are_joined() -> None:
    """Arrays in one buffer that have leases of their own: the others learn that the buffer refers to all of them."""
    x = st.device_put(VALUE, st.NamedSharding(st.make_mesh((2,), ("x",)), st.P("x")))
    whole = VALUE.copy()
    leases: list[Any] = [[], []]
    storage = Storage((whole[:4], whole[4:]), tuple(leases))
    others = [Storage((part,), (lease,)) for part, lease in zip((whole[:4], whole[4:]), leases, strict=True)]
    ownership.set_joined(x, storage, storage.buffers, (whole,), [0])
    assert storage.buffers[0] is whole
    assert ownership.is_shared(storage)
    assert all(map(ownership.is_shared, others))


def test_arrays_that_are_read_while_they_are_joined_stay_shared() -> None:
    """An operator returns an array that another tensor shares, after the storage has replaced it by a part of a joined
    buffer.
    """
    x = st.device_put(VALUE, st.NamedSharding(st.make_mesh((2,), ("x",)), st.P("x")))
    parts, leases = [VALUE[:4].copy(), VALUE[4:].copy()], ([], [])
    x._storage = Storage(tuple(parts), leases)
    other = Storage((parts[0],), leases[:1])
    leases[0].append(weakref.ref(other))
    entry: list[Any] = [(x,)]
    ownership.READS[id(entry)] = entry
    ownership.set_joined(x, x._storage, x._storage.buffers, (VALUE.copy(),), [VALUE.nbytes])
    del ownership.READS[id(entry)]
    made = put(parts[0], "numpy")
    made._storage = Storage((parts[0],))
    ownership.track(entry, made)
    assert ownership.is_shared(made._storage)
    assert ownership.is_shared(other)
    assert not ownership.is_shared(x._storage)


def test_arrays_with_the_same_leases_keep_them_when_they_are_joined() -> None:
    x = st.device_put(VALUE, st.NamedSharding(st.make_mesh((2,), ("x",)), st.P("x")))
    whole, leases = VALUE.copy(), []
    storage = Storage((whole[:4], whole[4:]), (leases, leases))
    ownership.set_joined(x, storage, storage.buffers, (whole,), [0])
    assert not ownership.is_shared(storage)
    leases.append(lambda: x)
    assert ownership.is_shared(storage)


# -- results of operators ----------------------------------------------------------------------------


def test_an_array_of_an_operand_is_not_new() -> None:
    x = put(VALUE, "numpy")
    array = x._storage.buffers[0]
    assert ownership.is_new(Storage((np.empty(2),)), [x])
    assert not ownership.is_new(Storage((array,)), [x])
    assert not ownership.is_new(Storage((array,)), [x[:]])
    assert not ownership.is_new(Storage((array,)), [1.0, array])
    assert not ownership.is_new(Storage((array[:],)), [])


def test_an_operand_of_unknown_memory_may_have_made_a_result() -> None:
    x = put(VALUE, "numpy")
    assert not ownership.is_new(Storage((np.empty(2),)), [without_elements(x._aval)])


def of_arrays(arrays: tuple[Any, ...], *operands: Any) -> Storage:
    """Returns the storage of the result of an operator that returned these arrays."""
    made = put(VALUE, "checked")
    made._storage = Storage(arrays)
    ownership.track([operands], made)
    return made._storage


def test_each_array_of_a_result_is_new_unless_an_operand_has_its_memory() -> None:
    x, base = put(VALUE, "checked"), put(VALUE, "checked")
    new = put(VALUE, "checked")._storage.buffers
    assert len(new) > 1
    for operands in ((x,), (x[1:],), (x, 1.0, VALUE), ()):
        storage = of_arrays(new, *operands)
        assert storage.leases == ([],) * len(new)
        assert len(set(map(id, storage.leases))) == len(new)
    for operand, owner in ((x, x), (base[1:], base)):
        assert not ownership.is_shared(owner._storage)
        storage = of_arrays((*new[:-1], owner._storage.buffers[-1].view()), operand)
        assert ownership.is_shared(storage)
        assert ownership.is_shared(owner._storage)
        assert storage.leases[-1] is owner._storage.leases[-1]
        assert storage.leases[:-1] == ([],) * (len(new) - 1)
    storage = of_arrays((*new[:-1], new[0].view()))
    assert storage.leases[0] is storage.leases[-1]
    assert not ownership.is_shared(of_arrays(new, x))
    assert ownership.is_shared(of_arrays(x._storage.buffers, x))


def test_several_results_have_memories_of_their_own() -> None:
    x, y, z = [put(VALUE, "checked") for _ in range(3)]
    y._storage, z._storage = [Storage(a._storage.buffers) for a in (y, z)]
    ownership.track([(x,)], [y, z])
    assert not ownership.is_shared(y._storage)
    assert not ownership.is_shared(z._storage)
    y._storage, z._storage = Storage(y._storage.buffers), Storage((y._storage.buffers[0], *z._storage.buffers[1:]))
    ownership.track([(x,)], [y, z])
    assert y._storage.leases[0] is z._storage.leases[0]


def test_arrays_of_unknown_memory_have_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    x, new = put(VALUE, "checked"), put(VALUE, "checked")._storage.buffers
    known = x._storage.leases
    monkeypatch.setattr(type(x._aval.backend), "memory_of", lambda self, array: None)
    assert ownership.is_shared(of_arrays(new, x))  # Any of the arrays may be the operand's.
    assert any(known)
    x._storage.leases = ()
    assert of_arrays(new, x).leases == (None,) * len(new)
    y = put(VALUE, "checked")
    y._storage = x._storage
    ownership.track([(x,)], y)
    assert y._storage is not x._storage


def test_results_that_are_known_keep_their_leases() -> None:
    x = put(VALUE, "numpy")
    held = np.asarray(x)
    ownership.track([()], [x])
    x += 1
    np.testing.assert_array_equal(held, VALUE)


@everywhere
def test_what_was_donated_meanwhile_may_be_held(backend: str) -> None:
    """An operator reads a view of a tensor, which is donated meanwhile; a third tensor shares the memory."""
    x = put(VALUE, backend)
    third, view, storage = x.copy(), x[1:], x._storage
    value = x._aval
    for operand in (x, view):
        entry = [(operand,)]
        mark_donated(x, "a test")
        made = tensor(value, Storage(storage.buffers))
        ownership.track(entry, made)
        made += 1
        assert_same(third, VALUE)


@everywhere
def test_what_only_one_tensor_donated_becomes_the_results(backend: str) -> None:
    x = put(VALUE, backend)
    storage, value, entry = x._storage, x._aval, [(x,)]
    mark_donated(x, "a test")
    made = tensor(value, Storage(storage.buffers))
    ownership.track(entry, made)
    del storage
    before = places(made)
    made += 1
    assert places(made) == before


@everywhere
def test_a_view_that_is_read_may_share_what_it_had_cached(backend: str) -> None:
    """A write to the base empties the cache of a view while it is read; users hold views of the cached arrays."""
    x = put(VALUE, backend)
    view = x[1:]
    held, entry = shard_data(view), [(view,)]
    ownership.READS[id(entry)] = entry
    buffers = (x._storage.buffers[0][1:],) if len(x._storage.buffers) == 1 else shard_arrays(view)
    x += 1
    del ownership.READS[id(entry)]
    made = tensor(view._aval, Storage(tuple(buffers)))
    ownership.track(entry, made)
    made += 1
    np.testing.assert_array_equal(np.concatenate(seen(held)), VALUE[1:])


def test_results_that_share_new_memory_know_of_one_another() -> None:
    x = put(VALUE, "numpy")
    made = [tensor(x._aval, Storage((array,))) for array in [VALUE.copy()] * 2]
    ownership.track([()], made)
    made[0] += 1
    assert_same(made[1], VALUE)
    made[1] += 1
    assert_same(made[0], VALUE + 1)


@everywhere
def test_a_result_in_the_memory_of_an_operand_is_not_exclusive(backend: str) -> None:
    """The operand may be an array of a library, or a tensor of which only partial sums are stored."""
    x = put(VALUE, backend)
    unreduced = st.matmul(x.T, x, out_sharding=st.NamedSharding(x.sharding.mesh, st.P(unreduced={"x"})))
    whole = put(VALUE, backend, (1,))._storage.buffers[0]
    for operand, array in ((whole, whole), (unreduced, unreduced._storage.parts[0])):
        made, before = on_one_device(array, VALUE.dtype, st.devices(backend)[0]), seen([array])
        ownership.track([(operand,)], made)
        made += 1
        np.testing.assert_array_equal(seen([array]), before)


def test_two_handles_never_have_one_storage() -> None:
    x = put(VALUE, "numpy")
    made = tensor(x._aval, x._storage)
    ownership.track([(x,)], made)
    assert made._storage is not x._storage
    made += 1
    assert_same(x, VALUE)


def test_known_holders_of_a_memory_count_more_than_unknown_ones() -> None:
    x = put(VALUE, "numpy")
    known, unknown = x._storage, Storage((x._storage.buffers[0],))
    for order in ((known, unknown), (unknown, known)):
        found: ownership.Sources = {}
        for storage in order:
            ownership._note(found, storage, x._aval.backend)
        assert list(found.values()) == [[known, known.leases[0]]]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "permute_dims": lambda array: st.permute_dims(array, (1, 0)),
    "reshape": lambda array: st.reshape(array, (4, 6)),
    "expand_dims": lambda array: st.expand_dims(array, axis=1),
    "from_dlpack": lambda array: st.from_dlpack(array, copy=False),
}


@everywhere
@pytest.mark.parametrize("view", VIEWS)
def test_arrays_that_were_given_are_never_written(view: str, backend: str) -> None:
    """Operators on arrays of a library may return views of them."""
    library = load(backend)
    device = library.devices()[0]
    with library.on(device):
        given = library.xp.asarray(VALUE if backend != "checked" else VALUE.copy())
        if view == "from_dlpack" and backend == "checked":
            given = VALUE.copy()
        x = VIEWS[view](given)
    wanted = np.array(x)
    for _ in range(2):
        x += 1
    np.testing.assert_array_equal(np.asarray(x), wanted + 2)
    np.testing.assert_array_equal(values_of(given), VALUE)


@everywhere
@pytest.mark.parametrize("count", [1, 2])
def test_partial_sums_stay_as_they_are(count: int, backend: str) -> None:
    """The sum of a single part may share its memory."""
    x = st.device_put(VALUE, st.NamedSharding(mesh_of((count,), backend), st.P("x")))
    mesh = x.sharding.mesh
    unreduced = st.matmul(x.T, x, out_sharding=st.NamedSharding(mesh, st.P(unreduced={"x"})))
    shards = seen(shard_data(unreduced))
    for made in (
        st.reshard(unreduced, st.NamedSharding(mesh, st.P())),
        st.reshard(unreduced, st.NamedSharding(mesh, st.P("x"))),
        unreduced.copy(),
        unreduced + 0,
        st.unshard(st.shard(unreduced, devices=mesh)),
    ):
        made += 1
        made[0] = 7
        np.testing.assert_array_equal(seen(shard_data(unreduced)), shards)
    np.testing.assert_array_equal(np.asarray(unreduced), VALUE.T @ VALUE)


@everywhere
def test_a_write_takes_the_value_out_of_its_handle(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is taken out before holders are looked for, so that no reader can get a reference to it after that."""
    x, seen_by = put(VALUE, backend), []
    look = writes.exclusive_arrays

    def looks(base: Any, storage: Any) -> Any:
        seen_by.append(type(base._storage))
        return look(base, storage)

    monkeypatch.setattr(writes, "exclusive_arrays", looks)
    x += 1
    x[0, 0] = 7
    x[[0, 3]] = 8
    assert seen_by == [PendingWrite] * 3


@pytest.mark.parametrize("backend", ["checked", "torch"], indirect=True)
def test_a_write_empties_the_caches_of_views(backend: str) -> None:
    """The cached arrays would occupy memory until the views are read again."""
    x = put(VALUE, backend)
    view = x[1:]
    view + 0
    x += 1
    assert view._storage._cache is None
    assert not write_state_of(x).caches


def test_a_direct_write_empties_the_caches_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reversed view caches a copy where a library has no negative strides."""
    monkeypatch.setattr(load("numpy"), "negative_strides", False)
    x = put(VALUE, "numpy", (1,))
    view = x[::-1]
    view + 0
    assert view._storage._cache is not None
    x[0, 0] = 7
    assert view._storage._cache is None


@pytest.mark.parametrize("backend", ["numpy", "checked", "torch"], indirect=True)
def test_an_export_empties_the_caches_of_views(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer may write to the memory, and cached copies would not contain its writes."""
    monkeypatch.setattr(load(backend), "negative_strides", False)
    x = put(VALUE, backend, (1,))
    view = x[::-1]
    view + 0
    theirs = np.from_dlpack(x)
    theirs[0, 0] = 42
    assert float((view + 0)[-1, 0]) == 42


@everywhere
def test_a_write_never_happens_in_place_where_elements_share_an_address(backend: str) -> None:
    """The result of an operator may be one row that is repeated with stride 0."""
    for write in (lambda x: x.__setitem__((2, 0), 7), lambda x: x.__setitem__([2], 7), lambda x: x.__iadd__(VALUE)):
        row = put(VALUE[:1], backend, (1,))
        x, wanted = st.broadcast_to(row, VALUE.shape), np.broadcast_to(VALUE[:1], VALUE.shape).copy()
        if type(x._storage) is not Storage:
            x = tensor(x._aval, Storage(shard_arrays(x), ([],)))
        del row
        write(x)
        write(wanted)
        assert_same(x, wanted)


@everywhere
def test_writes_are_counted(backend: str) -> None:
    """Readers that have begun before a write find that the value is another one."""
    x = put(VALUE, backend)
    for k in range(1, 4):
        x += 1
        x[0, 0] = 7
        assert write_state_of(x).version == 2 * k


def test_arrays_that_a_write_joins_are_copied_once() -> None:
    for write in (lambda x: x.__iadd__(1), lambda x: x.__setitem__(0, 7), lambda x: x.__setitem__([0, 5], 7)):
        x = put(VALUE, "numpy")
        parts = st.pmap(lambda p: p + 1, st.shard(x, devices=x.sharding.mesh))
        x = st.unshard(parts)
        with st.transfers() as log:
            write(x)
        assert sum(record.copied for record in log) <= x.nbytes
        assert_same(st.unshard(parts), VALUE + 1)


def test_arrays_that_two_readers_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = put(VALUE, "numpy")
    x = st.unshard(st.pmap(lambda p: p + 1, st.shard(x, devices=x.sharding.mesh)))
    join = transfer.set_joined

    def late(*arguments: Any) -> bool:
        monkeypatch.undo()
        assert_same(x * 2, (VALUE + 1) * 2)
        return join(*arguments)

    monkeypatch.setattr(transfer, "set_joined", late)
    assert_same(x * 2, (VALUE + 1) * 2)
    x += 1
    assert_same(x, VALUE + 2)


def test_arrays_that_a_reader_and_a_write_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = put(VALUE, "numpy")
    x = st.unshard(st.pmap(lambda p: p + 1, st.shard(x, devices=x.sharding.mesh)))
    readers = []

    def late(base: Any, storage: Storage, pieces: Any, buffers: Any, copied: Any) -> bool:
        readers.append(buffers[0].copy())
        assert ownership.set_joined(base, storage, pieces, tuple(readers), copied)
        return ownership.set_joined(base, storage, pieces, buffers, copied)

    monkeypatch.setattr(write_transaction, "set_joined", late)
    monkeypatch.setattr(writes, "exclusive_arrays", lambda *_: ())  # The reader is in progress.
    x += 1
    np.testing.assert_array_equal(readers[0], VALUE + 1)
    assert_same(x, VALUE + 2)


def test_arrays_that_user_code_made_read_only_can_be_written() -> None:
    def fn(p: Any) -> Any:
        made = p + 1
        made.flags.writeable = False
        return made

    for write in (lambda x: x.__setitem__((0, 0), 7), lambda x: x.__iadd__(1)):
        (x,) = st.pmap(fn, [put(VALUE, "numpy", (1,))])
        before = x._storage.buffers[0]
        write(x)
        assert x._storage.buffers[0] is before


@everywhere
def test_results_of_collectives_that_leaked_stay_as_they_are(backend: str) -> None:
    """A mapped function keeps what it returns, which all of its calls share."""
    kept: list[Any] = []

    def fn(p: Any) -> Any:
        kept.append(st.psum(p, "i"))
        return kept[-1]

    x = put(VALUE, backend)
    parts = st.pmap(fn, st.shard(x, devices=x.sharding.mesh), axis_name="i")
    before = seen(kept)
    for part in parts:
        part += 1
        part[0, 0] = 7
    np.testing.assert_array_equal(seen(kept), before)
    np.testing.assert_array_equal(np.asarray(parts[0])[1:], before[0][1:] + 1)


def test_the_storage_of_a_write_in_progress_is_that_of_the_new_value() -> None:
    x = put(VALUE, "numpy")
    state, storage = write_state_of(x), x._storage
    found: list[Any] = []
    with state.lock:
        x._storage = writing = PendingWrite(state)
        thread = threading.Thread(target=lambda: found.append(ownership.storage_of(x)))
        thread.start()
        assert not found
        x._storage = writing.storage = storage
    thread.join()
    assert found == [storage]
    assert seen(x).tolist() == VALUE.tolist()
