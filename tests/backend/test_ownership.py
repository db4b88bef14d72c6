"""Ownership: a write happens in place if nothing else holds the value, and is visible only through views."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import exclusive_memory as counting
from shardtensor.backend.registry import load
from shardtensor.functions.placement import shard_lists, transfers
from shardtensor.interpreters.writes import write_transaction, writes
from shardtensor.spmd.maps import launch
from shardtensor.tensor import ownership, tensor
from shardtensor.tensor.storage import Storage
from tests.backend.holders import VALUE, leak, places, seen, shard_data
from tests.layouts import allocated, assert_same, everywhere, place_of, put

# -- reference counts ------------------------------------------------------------------------------


def count(held: Any) -> int:
    return sys.getrefcount(held[0]) - 1


def test_arrays_are_copied_while_the_test_of_counts_can_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(counting, "_counts", [])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert not counting.is_exclusive([np.ones(2)])
        made = st.pmap(lambda x: x + 1, [np.ones(2)])
        assert np.asarray(made[0]).tolist() == [2, 2]
    assert counting.is_exclusive([np.ones(2)])


def test_counts_are_right_on_the_interpreters_that_are_supported() -> None:
    assert counting.counts_are_right()


@pytest.mark.parametrize(
    "wrong", [lambda h: count(h) - 1, lambda h: count(h) + 1, lambda h: 1, lambda h: 2, lambda h: sys.maxsize]
)
def test_the_self_test_finds_counts_that_are_wrong(wrong: Callable[[Any], int]) -> None:
    assert not counting.counts_are_right(wrong)


@pytest.mark.parametrize("missed", [1, 2])
def test_the_self_test_finds_each_kind_of_reference_that_is_not_counted(missed: int) -> None:
    """The simulated count misses the references beyond some number, as if it ignored borrowed references."""
    assert not counting.counts_are_right(lambda held: min(count(held), missed) if count(held) > 1 else 1)


def test_the_self_test_runs_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test uses a global variable, which two concurrent self-tests would both change."""
    monkeypatch.setattr(counting, "_counts", [])
    start = threading.Barrier(8)

    def ask(_: int) -> int:
        start.wait()
        return counting.references([np.empty(2)])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {1}
    assert counting._counts == [True]


@everywhere
def test_without_reference_counts_what_user_code_made_is_copied(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reference counts cannot be used, arrays that user code made are copied; writes give the same results."""
    monkeypatch.setattr(counting, "_counts", [False])
    x = put(VALUE, backend)
    before = places(x)
    x += 1
    assert places(x) == before or backend == "torch"  # whose leases count references to the storage's object
    with st.transfers() as log:
        parts = st.pmap(lambda p: p + 1, st.shard(x, devices=x.sharding.mesh))
        assert sum(record.copied for record in log) >= x.nbytes
        assert_same(st.unshard(parts), VALUE + 2)
        given = x.copy()
        del x
        parts = st.pmap(lambda p: p, st.shard(given, devices=given.sharding.mesh), donate=True)
    assert_same(st.unshard(parts), VALUE + 1)


# -- in place --------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], Any]] = {
    "x += 1": lambda x: x.__iadd__(1),
    "x[3, 1] = 7": lambda x: x.__setitem__((3, 1), 7),
    "x[1:5] = 7": lambda x: x.__setitem__(slice(1, 5), 7),
    "x[[1, 6]] = 7": lambda x: x.__setitem__([1, 6], 7),
    "x[x > 3] = 7": lambda x: x.__setitem__(x > 3, 7),
    "x.T[0] = 7": lambda x: x.T.__setitem__(0, 7),
    "np.abs(x, out=x)": lambda x: np.abs(x, out=x),
}


def mapped(x: Any) -> Any:
    """Where memory is shared, the results of a map become one buffer when they are read first."""
    y = st.unshard(st.pmap(lambda p: p * 2, st.shard(x, devices=x.sharding.mesh)))
    st.sum(y)
    return y


MADE: dict[str, Callable[[Any], Any]] = {
    "a host array": lambda x: x,
    "an operator": lambda x: x + 1,
    "a reduction": lambda x: st.sum(st.stack([x, x]), axis=0),
    "creation": lambda x: st.zeros(x.shape, device=x.sharding),
    "a map": lambda x: mapped(x),
    "a write": lambda x: x.__setitem__(0, 1) or x,
    "a copy, after the original": lambda x: x.copy(),
    "a transfer": lambda x: st.device_put(x, st.NamedSharding(x.sharding.mesh, st.P(None, "x"))),
    "shards that were joined": lambda x: st.unshard(st.shard(x, devices=x.sharding.mesh)),
    "an algorithm": lambda x: st.cumulative_sum(x, axis=1),
}


@everywhere
@pytest.mark.parametrize("made", MADE)
def test_writes_happen_in_place(made: str, backend: str) -> None:
    """Where only one tensor holds a value, whatever made it, a write neither moves it nor allocates its size."""
    x = MADE[made](put(VALUE, backend))
    x + 0  # An operator joins the arrays of devices that share a memory.
    before = places(x)
    for name, write in WRITES.items():
        write(x)
        assert places(x) == before, name


@everywhere
def test_writes_in_place_allocate_nothing(backend: str) -> None:
    x = put(np.zeros((1024, 256)), backend)
    x[3, 4] = 1
    with allocated(backend) as peak:
        x[3, 4] = 1
        x[1] = 2
        np.asarray(x[:1])
        x[3, 4] = 3
    assert peak[0] < x.nbytes / 4


# -- never visible elsewhere -----------------------------------------------------------------------


def views_of_shards(x: Any) -> list[Any]:
    views = []
    for shard in x.addressable_shards:
        library = load(shard.device.backend)
        with library.on(shard.device):
            views.append(library.view(shard.data, np.s_[..., 1:]))
    return views


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "np.asarray": np.asarray,
    "a slice of np.asarray": lambda x: np.asarray(x)[1:],
    "np.asarray of a view": lambda x: np.asarray(x[2:]),
    "np.asarray of a reshaped view": lambda x: np.asarray(x.reshape(-1)[3:9]),
    "shard.data": shard_data,
    "views of shard.data": views_of_shards,
    "shard.data of a view": lambda x: shard_data(x[2:]),
    "shard.data of a transposed view": lambda x: shard_data(x.T),
    "arguments that leaked": leak,
    "shards gathered in a map": lambda x: leak(x, lambda p: st.all_gather(p, "i", tiled=True)),
    "a copy": lambda x: x.copy(),
    "a copy of a view": lambda x: x[1:].copy(),
    "shards": lambda x: st.shard(x, devices=x.sharding.mesh),
    "a transfer": lambda x: st.device_put(x, x.sharding),
    "results that are views of arguments": lambda x: st.pmap(
        lambda p: p[..., 1:], st.shard(x, devices=x.sharding.mesh)
    ),
    "results that are arguments": lambda x: st.pmap(lambda p: p, st.shard(x, devices=x.sharding.mesh)),
    "shards that were joined": lambda x: st.unshard(st.shard(x, devices=x.sharding.mesh)),
    "np.asarray of a copy": lambda x: np.asarray(x.copy()),
    "np.asarray of what were shards": lambda x: [np.asarray(p) for p in st.shard(x, devices=x.sharding.mesh)],
    "a list of rows": lambda x: st.to_batched_list(x, 2),
}


def check_holder(holder: str, backend: str) -> None:
    """A write is not visible to a holder, and happens in place when the holder is gone."""
    for name, write in WRITES.items():
        x = put(VALUE, backend)
        held = HOLDERS[holder](x)
        before = seen(held)
        write(x)
        after, wanted = seen(held), before
        for a, b in zip(
            after if isinstance(after, list) else [after], wanted if isinstance(wanted, list) else [wanted], strict=True
        ):
            np.testing.assert_array_equal(a, b, name)
        del held
        there = places(x)
        write(x)
        assert places(x) == there, name


@everywhere
@pytest.mark.parametrize("holder", HOLDERS)
def test_writes_are_visible_to_no_holder(holder: str, backend: str) -> None:
    check_holder(holder, backend)


@everywhere
@pytest.mark.parametrize(
    "holder", [h for h in HOLDERS if h != "shards gathered in a map"]
)  # whose end cannot be observed
def test_what_has_ended_is_written_in_place(holder: str, backend: str) -> None:
    """No copy is needed once the holder is gone, not even one."""
    x = put(VALUE, backend)
    x += 1
    before = places(x)
    held = HOLDERS[holder](x)
    del held
    x += 1
    assert places(x) == before


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[ns]", "c16", "?"])
def test_writes_are_visible_to_no_view_of_an_export(dtype: str) -> None:
    """NumPy shortens chains of views, so that a view may outlive the view that it was made of."""
    for export in (np.asarray, lambda x: shard_data(x)[0]):
        x = st.device_put(np.ones(6, dtype), st.devices("numpy")[0])
        held = export(x)[1:][1:].reshape(2, 2).view(np.ndarray)
        before = held.copy()
        x[...] = np.zeros(6, dtype)
        np.testing.assert_array_equal(held, before)


@everywhere
def test_writes_to_a_holder_are_not_visible_either(backend: str) -> None:
    x = put(VALUE, backend)
    for make in (
        lambda: x.copy(),
        lambda: st.device_put(x, x.sharding),
        lambda: st.unshard(st.shard(x, devices=x.sharding.mesh)),
    ):
        y = make()
        y += 1
        y[0] = 5
        assert_same(x, VALUE)


@everywhere
def test_a_chain_of_holders_is_one(backend: str) -> None:
    """The original is gone, and two tensors that share its memory know of one another."""
    x = put(VALUE, backend)
    y = x.copy()
    z = st.shard(y, devices=y.sharding.mesh)
    del x
    kept = np.asarray(y)
    del y
    w = st.unshard(z)
    del z
    w += 1
    np.testing.assert_array_equal(kept, VALUE)
    assert_same(w, VALUE + 1)


@everywhere
@pytest.mark.parametrize("export", ["np.asarray", "shard.data", "arguments that leaked"])
def test_one_export_in_ten_writes_costs_one_copy_in_ten(export: str, backend: str) -> None:
    """Each export exists until the next one is made."""
    x = put(VALUE, backend, (1,))
    moves, held, there = 0, None, None
    for k in range(50):
        if k % 10 == 0:
            held = HOLDERS[export](x)
        x += 1
        now = x._storage.buffers[0]
        moves += place_of(now) != there
        there = place_of(now)
        del now
    assert moves <= 6
    del held


@pytest.mark.parametrize("backend", ["numpy", "torch"], indirect=True)
@pytest.mark.parametrize("consumer", ["numpy", "torch"])
def test_dlpack_consumers_never_see_a_write(consumer: str, backend: str) -> None:
    x = st.device_put(VALUE, st.devices(backend)[0])
    take = np.from_dlpack if consumer == "numpy" else pytest.importorskip("torch").from_dlpack
    theirs = take(x)
    here = place_of(theirs)
    x += 1
    np.testing.assert_array_equal(np.asarray(theirs), VALUE)
    assert_same(x, VALUE + 1)
    del theirs
    y = st.device_put(VALUE, st.devices(backend)[0])
    theirs = take(y)
    here = place_of(theirs)
    del theirs
    y += 1
    assert places(y) == [here]


def test_exports_end_in_any_thread_and_in_garbage_collections() -> None:
    x = put(VALUE, "numpy")
    before = places(x)
    ring: list[Any] = [np.asarray(x)]
    ring.append(ring)
    thread = threading.Thread(target=ring.clear)
    thread.start()
    thread.join()
    x += 1
    assert places(x) == before
    ring = [np.asarray(x)]
    ring.append(ring)
    del ring
    gc.collect()
    x += 1
    assert places(x) == before


def test_exports_without_a_lease_count_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that does not define `lend` has exports whose end is unknown, so that they count for good."""
    backend = load("numpy")
    monkeypatch.setattr(type(backend), "lend", lambda self, array: (self.export(array), None))
    x = put(VALUE, "numpy")
    before = place_of(x.addressable_shards[0].data)
    x += 1
    assert place_of(x._storage.buffers[0]) != before


def test_an_array_that_a_storage_has_twice_is_not_exclusive() -> None:
    """A write in place would be executed once for each device that holds the array."""
    x = put(VALUE, "checked")
    array = x._storage.buffers[0]
    storage = type(x._storage)((array, array))
    ownership.track([()], tensor.tensor(x._aval, storage))
    assert ownership.is_shared(storage)
    storage = type(x._storage)(x._storage.buffers)
    ownership.track([()], tensor.tensor(x._aval, storage))
    assert not ownership.is_shared(storage)


def test_many_exports_do_not_accumulate() -> None:
    x = put(VALUE, "numpy")
    for _ in range(1000):
        np.asarray(x)
    assert len(x._storage.leases[0]) < 16
    kept = [np.asarray(x) for _ in range(100)]
    assert 100 <= len(x._storage.leases[0]) < 256
    del kept


def test_a_lease_that_is_removed_meanwhile_hides_no_other() -> None:
    """Another thread removes an ended lease while a writer iterates over the leases."""
    x, other = put(VALUE, "numpy"), np.empty(1)
    (leases,) = x._storage.leases

    def ended() -> None:
        leases.remove(ended)

    leases += [ended, lambda: other]
    assert ownership.is_shared(x._storage)
    assert ended not in leases


def test_leases_may_be_added_while_others_are_removed() -> None:
    """Finalizers remove leases during the iteration of the same thread and of other threads."""
    x = put(VALUE, "numpy")
    (leases,) = x._storage.leases
    held = np.empty(1)

    def adds() -> None:
        while len(leases) < 64:
            ownership.lease(x._storage, lambda: held)

    for _ in range(7):
        leases.append(adds)
    thread = threading.Thread(target=lambda: ownership.lease(x._storage, lambda: held), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()  # A finalizer that waited for the removal around it would never end.
    assert adds not in leases
    assert len(leases) >= 57
    leases.clear()
    with ThreadPoolExecutor(8) as pool:
        kept = list(pool.map(lambda k: [np.asarray(x) for _ in range(200)][::20], range(8)))
    assert sum(lease() is not None for lease in leases) == sum(map(len, kept))


def test_no_lease_is_lost_that_a_finalizer_adds_while_others_are_removed() -> None:
    leases: list[Any] = []
    added: list[Any] = []

    def adds() -> bool:
        while len(added) < 8:  # At a length of 16 it would remove those that have ended itself.
            added.append(functools.partial(bool, 1))
            ownership._add(leases, added[-1])
        return True

    for lease in (adds, *[lambda: None] * 6, lambda: True):
        ownership._add(leases, lease)
    assert all(lease in leases for lease in added)


def test_views_may_end_while_a_write_empties_their_caches() -> None:
    x = put(VALUE, "checked")
    views = [x[k:] for k in range(4)]
    for view in views:
        np.asarray(view + 0)
    state = x._write_state
    assert state is not None
    assert len(state.caches) == 4
    order = [id(view._storage) for view in views]
    last = views.pop()._storage

    class Ending:
        def forget(self) -> None:
            state.caches.pop(order[-1], None)
            caches.pop(order[-1], None)

    caches = state.caches
    ending = Ending()
    caches[order[0]] = lambda: ending
    state.forget()
    assert order[-1] not in caches
    assert last._cache is None


# -- operators in progress -------------------------------------------------------------------------


def test_a_writer_copies_what_an_operator_in_progress_reads() -> None:
    x = put(VALUE, "numpy")
    view, other = x[1:], put(VALUE, "numpy")
    for operands in ((x,), (view,), ([other, x],), ((1, {"a": view}),)):
        before = places(x)
        with ownership.reading(operands):
            kept = x._storage.buffers[0]
            x += 1
            assert x._storage.buffers[0] is not kept
            elsewhere = places(x)
            x += 1
        assert before != elsewhere
        del kept
        before = places(x)
        x += 1
        assert places(x) == before
        with ownership.reading((other,)):
            x += 1
        assert places(x) == before
    assert not ownership.READS


def test_what_an_operator_in_progress_reads_stays_shared() -> None:
    """An operator reads a tensor, which is written meanwhile; a third tensor shares the memory that it reads."""
    x = put(VALUE, "numpy")
    third = x.copy()
    with ownership.reading((x,)):
        memory = x._storage.buffers[0]
        x += 1
        third += 1
        np.testing.assert_array_equal(memory, VALUE)


def test_operators_withdraw_their_operands() -> None:
    x = put(VALUE, "numpy")
    with pytest.raises(st.ShapeError):
        x + np.zeros(5)
    with pytest.raises(ZeroDivisionError):
        st.pmap(lambda p: 1 // 0, st.shard(x, devices=x.sharding.mesh))
    with pytest.raises(st.ShapeError):
        x[:] = put(np.zeros((3, 3)), "numpy")
    assert not ownership.READS


# -- mutants ---------------------------------------------------------------------------------------

MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "leases are not recorded": (transfers, "lease", lambda storage, new: None, lambda: check_holder("np.asarray", "numpy")),
    "leases of exports are not recorded": (ownership, "lease", lambda *_: None, lambda: check_holder("shard.data", "numpy")),
    "leases of shards are not recorded": (tensor, "export", lambda x, a, k: x._aval.backend.export(a), lambda: check_holder("shard.data", "numpy")),
    "storages do not share leases": (ownership, "_link", lambda made, *_: setattr(made, "leases", ([],)), lambda: check_holder("a copy", "numpy")),
    "results of maps do not share leases": (ownership.Lent, "storage_of", lambda lent, result: Storage((result,), ([],)), lambda: check_holder("results that are arguments", "numpy")),
    "what maps lend has no lease": (launch, "lend_storages", lambda storages, backend: [ownership.Lent(backend.export(s.buffers[0]), s.buffers[0]) for s in storages], lambda: check_holder("arguments that leaked", "numpy")),
    "parts of a storage do not share leases": (shard_lists, "link_parts", lambda storage, parts: [setattr(x._storage, "leases", ([],)) for x in parts], lambda: check_holder("shards", "numpy")),
    "parts of several arrays do not share leases": (shard_lists, "link_parts", lambda storage, parts: [setattr(x._storage, "leases", ([],)) for x in parts], lambda: check_holder("shards", "checked")),
    "every lease has ended": (ownership, "_is_only_holder", lambda storage, leases: True, lambda: check_holder("shard.data", "checked")),
    "no lease ends": (ownership, "_is_only_holder", lambda storage, leases: leases == [], lambda: check_holder("np.asarray", "numpy")),
    "operators in progress do not count": (ownership, "keep_while_read", lambda x, storage: 0, test_a_writer_copies_what_an_operator_in_progress_reads),
    "old storages are not kept": (ownership, "keep_while_read", lambda x, storage: sum(x is y for entry in ownership.READS.values() for y in entry[0]), test_what_an_operator_in_progress_reads_stays_shared),
    "all arrays are exclusive": (writes, "exclusive_arrays", lambda x, storage: [True] * 8, lambda: check_holder("a copy", "checked")),
    "no array is exclusive": (writes, "exclusive_arrays", lambda x, storage: (), lambda: check_holder("a copy", "numpy")),
    "copied shards stay linked": (write_transaction, "replaced", lambda storage, arrays, new, _: type(storage)(arrays, storage.leases), lambda: check_linked()),
}  # fmt: skip


def check_linked() -> None:
    """What a write to one shard leaves shared."""
    x = put(VALUE, "checked")
    y = x.copy()
    x[0, 0] = 5
    y[7, 2] = 9
    assert_same(x, np.where(np.arange(24).reshape(8, 3) == 0, 5, VALUE))


def test_shards_that_a_write_left_alone_stay_shared() -> None:
    check_linked()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_killed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong, guarantee = MUTANTS[mutant]
    guarantee()
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(AssertionError):
        guarantee()
