"""Memory that other libraries hold and may write: their writes are visible only in the tensor that was exported."""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend import exclusive_memory
from shardtensor.backend.registry import load
from shardtensor.interpreters.writes import writes
from tests.layouts import everywhere, place_of, values_of

OLD = [0, 1, 2, 3, 4, 5]
WRITTEN = [42, 1, 2, 3, 4, 5]


class Unversioned:
    """A tensor for a consumer that knows no version 1.0 of DLPack, which has no flag for read-only memory."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, *, max_version: Any = None, **wishes: Any) -> Any:
        return self.x.__dlpack__(**wishes)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


class Capsule:
    """A capsule that was requested before."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **wishes: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return (1, 0)


def by_cupy(x: Any) -> Any:
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(x.__dlpack_device__()[1]):
        return cupy.from_dlpack(x)


CONSUMERS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.from_dlpack,
    "numpy, old protocol": lambda x: np.from_dlpack(Unversioned(x)),
    "torch": lambda x: pytest.importorskip("torch").from_dlpack(x),
    "torch, old protocol": lambda x: pytest.importorskip("torch").from_dlpack(Unversioned(x)),
    "jax": lambda x: pytest.importorskip("jax").dlpack.from_dlpack(x),
}

each_consumer = pytest.mark.parametrize(
    "consumer", [pytest.param(name, marks=[pytest.mark.full] * (name == "jax")) for name in CONSUMERS]
)  # JAX and what it compiles are a quarter of a GB
WRITERS = [name for name in CONSUMERS if name not in ("jax", "numpy, old protocol")]  # whose arrays can be written
each_writer = pytest.mark.parametrize("consumer", WRITERS)


def consume(consumer: str, x: Any) -> Any:
    """Returns the consumer's array of a tensor; on GPUs the consumer is always CuPy."""
    return by_cupy(x) if x.__dlpack_device__()[0] == 2 else CONSUMERS[consumer](x)


def source(backend: str) -> st.ShardedTensor:
    return st.device_put(np.arange(6, dtype="float32"), st.devices(backend)[1])


def scribble(theirs: Any, value: float = 42) -> None:
    """The consumer writes its first element."""
    with theirs.device if hasattr(theirs, "get") else contextlib.nullcontext():  # CuPy's, on its GPU
        theirs[0] = value


def seen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [seen(item) for item in x]
    if isinstance(x, st.Shard):
        return values_of(x.data).tolist()
    return np.asarray(x).tolist() if type(x).__module__.partition(".")[0] == "jaxlib" else values_of(x).tolist()


def elsewhere(x: Any) -> st.ShardedTensor:
    return st.device_put(x, st.Mesh(st.devices(x.device.backend)[:3], "x"))


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "copy": lambda x: x.copy(),
    "copy of a copy": lambda x: x.copy().copy(),
    "reshard": lambda x: st.reshard(x, x.sharding),
    "in other hands": lambda x: st.reshard(x, st.NamedSharding(x.sharding.mesh, st.P("d"))),
    "another mesh": elsewhere,
    "may_alias": lambda x: st.device_put(x, x.device, may_alias=True),
    "host array": np.asarray,
    "host array of a view": lambda x: np.asarray(x[:4]),
    "memoryview": lambda x: memoryview(np.asarray(x)),
    "list": lambda x: st.shard(x, devices=[x.device]),
    "batches": lambda x: st.to_batched_list(x, 3),
    "astype": lambda x: x.astype(x.dtype, copy=False) + 0,
    "copy of a view": lambda x: x[:3].copy(),
    "transpose": lambda x: st.reshape(x, (2, 3)).T.copy(),
    "broadcast": lambda x: st.broadcast_to(x, (2, 6)),
    "sum": lambda x: x + 0,
    "flip": lambda x: st.flip(x).copy(),
    "expanded": lambda x: st.expand_dims(x, axis=0).copy(),
    "concat": lambda x: st.concat([x]),
    "unshard": lambda x: st.unshard([x]),
    "where": lambda x: st.where(st.ones_like(x, dtype="bool"), x, x),
    "roll": lambda x: st.roll(x, 0),
    "mapped": lambda x: st.pmap(lambda a: a, [x]),
    "mapped view": lambda x: st.pmap(lambda a: a[:3], [x]),
    "setitem": lambda x: st.device_put(np.zeros(6, "float32"), x.device).__iadd__(x),
    "from_dlpack": st.from_dlpack,
    "from_dlpack, copied": lambda x: st.from_dlpack(x, copy=True),
}
HOLDS_MEMORY = ("copy", "reshard", "may_alias", "list", "in other hands")


@everywhere
@each_writer
def test_what_others_held_before_is_copied(consumer: str, backend: str) -> None:
    for holder, hold in HOLDERS.items():
        x = source(backend)
        held = hold(x)
        wanted = seen(held)
        theirs = consume(consumer, x)
        scribble(theirs)
        assert seen(held) == wanted, holder
        assert seen(theirs) == WRITTEN, holder
        if holder in HOLDS_MEMORY:
            assert seen(x) == OLD, holder


@everywhere
@each_writer
def test_what_others_get_afterwards_is_a_copy(consumer: str, backend: str) -> None:
    for holder, hold in HOLDERS.items():
        x = source(backend)
        theirs = consume(consumer, x)
        held = hold(x)
        wanted = seen(held)
        scribble(theirs)
        assert seen(held) == wanted, holder
        assert seen(x) == WRITTEN, holder  # it has the memory in common with the consumer
        assert seen(hold(x)) != wanted, holder


@everywhere
@each_writer
def test_writes_of_the_tensor_and_of_its_copies(consumer: str, backend: str) -> None:
    x = source(backend)
    theirs = consume(consumer, x)
    b = x.copy()
    b[0] = 7
    assert [seen(x), seen(theirs)] == [OLD, OLD]
    scribble(theirs)
    assert [seen(x), seen(b)] == [WRITTEN, [7, *OLD[1:]]]
    x[1] = 8
    assert seen(theirs) == WRITTEN
    assert seen(x) == [42, 8, *OLD[2:]]
    scribble(theirs, 50)
    assert seen(x) == [42, 8, *OLD[2:]]
    x += 1
    assert [seen(x), seen(b), seen(theirs)] == [[43, 9, 3, 4, 5, 6], [7, *OLD[1:]], [50, *OLD[1:]]]


@everywhere
@each_consumer
def test_consumers_of_one_tensor_share_it(consumer: str, backend: str) -> None:
    x = source(backend)
    first = consume("numpy", x)
    second = consume(consumer, x)
    scribble(first)
    assert seen(x) == WRITTEN
    if consumer != "jax":  # which copies what is not aligned as it likes
        assert seen(second) == WRITTEN
    del first
    assert np.asarray(x).tolist() == WRITTEN
    b = x.copy()
    if consumer in WRITERS:
        scribble(second, 9)
        assert seen(x)[0] == 9
    assert seen(b) == WRITTEN


@everywhere
@each_writer
def test_exports_end_without_reference_counts(consumer: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusive_memory, "_counts", [False])
    x = source(backend)
    here = place_of(x._storage.buffers[0])
    first, second = consume(consumer, x), consume("numpy", x)
    scribble(second)
    del second
    b = x.copy()
    scribble(first)
    del first
    assert seen(b) == WRITTEN
    x += 1
    assert (place_of(x._storage.buffers[0]), seen(x)) == (here, [43, 2, 3, 4, 5, 6])
    theirs = consume(consumer, x)
    x += 1
    assert place_of(x._storage.buffers[0]) != here
    assert seen(theirs) == [43, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("backend", ["numpy", "checked", "torch"], indirect=True)
def test_read_only_exports_end(backend: str) -> None:
    """Exported is memory that a copy shared, which has ended."""
    x = source(backend)
    here = place_of(x._storage.buffers[0])
    copy = x.copy()
    marked, capsule = np.from_dlpack(x, copy=False), x.__dlpack__(copy=False, max_version=(1, 0))
    assert place_of(marked) == here
    x += 1
    assert seen(marked) == OLD
    assert place_of(x._storage.buffers[0]) != here
    assert place_of(copy._storage.buffers[0]) == here
    copy += 1
    assert place_of(copy._storage.buffers[0]) != here
    assert seen(np.from_dlpack(Capsule(capsule))) == OLD
    copy = x.copy()
    here = place_of(x._storage.buffers[0])
    marked = np.from_dlpack(x, copy=False)
    del copy, marked
    x += 1
    assert place_of(x._storage.buffers[0]) == here


@everywhere
@each_writer
def test_it_ends_with_the_consumer(consumer: str, backend: str) -> None:
    x = source(backend)
    here = place_of(x.addressable_shards[0].data)
    theirs = consume(consumer, x)
    assert place_of(theirs) == here
    assert place_of(x.addressable_shards[0].data) != here  # a copy: it must not show what the consumer writes
    scribble(theirs)
    del theirs
    assert place_of(x.addressable_shards[0].data) == here
    x += 1
    assert (place_of(x.addressable_shards[0].data), seen(x)) == (here, [43, 2, 3, 4, 5, 6])
    b = x.copy()
    assert place_of(b.addressable_shards[0].data) == here  # until one of them is written
    theirs = consume(consumer, x)
    scribble(theirs)
    assert [seen(x), seen(b)] == [[43, 2, 3, 4, 5, 6]] * 2


VIEWS: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[0],
    "column": lambda x: x.T[:, 0],
    "reshaped": lambda x: x[:1].reshape(3),
    "gaps": lambda x: x[:1, ::2][0],
}


@everywhere
@each_writer
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_exported_with_their_base(view: str, consumer: str, backend: str) -> None:
    x = st.reshape(source(backend), (2, 3)).copy()
    seen_by = VIEWS[view](x)
    theirs = consume(consumer, seen_by)
    other = x.copy()
    scribble(theirs)
    assert [seen(v)[0] for v in (seen_by, VIEWS[view](x), x)] == [42, 42, [42, 1, 2]]
    assert seen(other) == [[0, 1, 2], [3, 4, 5]]
    x[1, 0] = 8
    scribble(theirs, 50)
    assert seen(x) == [[42, 1, 2], [8, 4, 5]]
    assert seen(theirs)[0] == 50
    other = x.copy()
    scribble(consume(consumer, seen_by))
    scribble(consume(consumer, x[1]))
    assert [seen(x), seen(other)] == [[[42, 1, 2], [8, 4, 5]]] * 2


@everywhere
def test_the_value_that_a_view_has_read_is_not_kept_while_it_may_change(backend: str) -> None:
    x = source(backend)
    view = x[:3]
    theirs = consume("numpy", x)
    assert seen(view + 0) == [0, 1, 2]
    scribble(theirs)
    assert seen(view + 0) == [42, 1, 2]


@everywhere
@each_writer
def test_scalars_do_not_change(consumer: str, backend: str) -> None:
    total = source(backend).sum()
    theirs = consume(consumer, total)
    theirs[...] = 42
    assert float(total) == 15
    array = total.copy()
    consume(consumer, array)[...] = 42
    assert float(total) == 15


def sources_that_are_read_only() -> dict[str, Callable[[], tuple[Any, st.ShardedTensor]]]:
    def frozen() -> np.ndarray:
        a = np.arange(6, dtype="float32")
        a.flags.writeable = False
        return a

    def made(of: Callable[[], Any], to: Callable[[Any], st.ShardedTensor]) -> Callable[[], Any]:
        def make() -> tuple[Any, st.ShardedTensor]:
            a = of()
            return a, to(a)

        return make

    device = st.devices()[1]
    arrays: dict[str, Callable[[], Any]] = {
        "a frozen array": frozen,
        "bytes": lambda: np.frombuffer(np.arange(6, dtype="float32").tobytes(), "float32"),
        "an array": lambda: np.arange(6, dtype="float32"),
    }
    ways: dict[str, Callable[[Any], st.ShardedTensor]] = {
        "from_dlpack": lambda a: st.from_dlpack(a, device=device),
        "from_dlpack, copy=False": lambda a: st.from_dlpack(a, device=device, copy=False),
        "a list": lambda a: st.from_dlpack([a]),
        "asarray": lambda a: st.asarray(a, copy=False, device=device),
        "may_alias": lambda a: st.device_put(a, device, may_alias=True),
    }
    return {f"{way} of {name}": made(of, to) for name, of in arrays.items() for way, to in ways.items()}


@each_writer
@pytest.mark.parametrize("way", sources_that_are_read_only())
def test_memory_of_others_is_not_passed_on(way: str, consumer: str) -> None:
    theirs, x = sources_that_are_read_only()[way]()
    passed = consume(consumer, x)
    scribble(passed)
    assert [seen(theirs), seen(x)] == [OLD, OLD]
    with pytest.raises(BufferError, match="copy=False"):
        x.__dlpack__(copy=False)
    marked = np.from_dlpack(x, copy=False)
    assert np.shares_memory(marked, theirs)
    assert not marked.flags.writeable


def test_memory_of_a_backend_that_shares_it_is_not_passed_on() -> None:
    a = np.arange(6, dtype="float32")
    a.flags.writeable = False
    pytest.importorskip("torch")
    x = st.from_dlpack(a, device=st.devices("torch")[0])
    for consumer in WRITERS:
        scribble(consume(consumer, x))
    assert [seen(x), a.tolist()] == [OLD, OLD]


@pytest.mark.parametrize("backend", ["numpy", "checked", "torch"], indirect=True)
def test_without_a_copy(backend: str) -> None:
    x = source(backend)
    theirs = np.from_dlpack(x, copy=False)
    assert theirs.flags.writeable
    again = np.from_dlpack(x, copy=False)
    assert np.shares_memory(again, theirs)
    del theirs, again
    b = x.copy()
    marked = np.from_dlpack(x, copy=False)
    assert not marked.flags.writeable
    with pytest.raises(
        st.InterchangeError,
        match=r"^__dlpack__: copy=False, and the tensor's memory is shared.*DLPack marks.*max_version.*Use copy=None or",
    ):
        np.from_dlpack(Unversioned(x), copy=False)
    x += 1
    assert [marked.tolist(), seen(b)] == [OLD, OLD]
    assert '"dltensor"' in repr(b.__dlpack__())
    assert '"dltensor_versioned"' in repr(x.__dlpack__(max_version=(1, 0)))


def test_without_a_copy_on_gpus() -> None:
    x = source("cupy")
    b = x.copy()
    for wishes in ({}, {"max_version": (1, 0)}):
        with pytest.raises(st.InterchangeError, match=r"copy=False, and the tensor's memory is shared.*DLPack marks"):
            x.__dlpack__(copy=False, **wishes)
    del b
    x.__dlpack__(copy=False)


@everywhere
@each_writer
def test_copies_are_the_consumers(consumer: str, backend: str) -> None:
    x = source(backend)

    class Copying(Unversioned):
        def __dlpack__(self, **wishes: Any) -> Any:
            return self.x.__dlpack__(**{**wishes, "copy": True})

    with st.transfers() as log:
        theirs = consume(consumer, Copying(x))
    assert [(r.bytes, r.copied, r.operator, r.explicit) for r in log] == [(0, 24, "to_dlpack", True)]
    scribble(theirs)
    assert seen(x) == OLD
    held = x.copy()
    with st.transfers() as log:
        consume(consumer, x)
    assert [(r.bytes, r.copied, r.operator, r.explicit) for r in log] == [(0, 24, "to_dlpack", True)]
    del held
    with st.transfers() as log:
        theirs = consume(consumer, x)
    assert len(log) == 0
    with st.transfers() as log:
        x.copy()
    assert [(r.bytes, r.copied, r.explicit) for r in log] == [(0, 24, True)]


@everywhere
def test_what_is_given_away_stays_with_the_consumer(backend: str) -> None:
    x = source(backend)
    theirs = consume("numpy", x)
    (y,) = st.pmap(lambda a: a.__iadd__(1), [x], donate=True)
    assert seen(y) == [1, 2, 3, 4, 5, 6]
    assert seen(theirs) == OLD
    scribble(theirs)
    assert seen(y) == [1, 2, 3, 4, 5, 6]


@everywhere
@each_writer
def test_writes_copy_what_they_leave(consumer: str, backend: str) -> None:
    x = source(backend)
    theirs = consume(consumer, x)
    with st.transfers() as log:
        x[:2] = 7
    assert log.copied == 24
    with st.transfers() as log:
        x[1:] = 8
    assert log.copied == 0
    theirs = [theirs, consume(consumer, x)]
    with st.transfers() as log:
        x[...] = 9  # nothing is left that would have to be copied
    assert log.copied == 0
    assert [seen(x), seen(theirs)] == [[9] * 6, [OLD, [7] + [8] * 5]]


def test_a_part_is_read_without_a_copy_of_the_whole() -> None:
    x = st.device_put(np.arange(1000.0), st.devices("numpy")[1])
    theirs = consume("numpy", x)
    scribble(theirs)
    for read, size in {
        lambda: float(x[0]): 0,
        lambda: x[0] + 1: 0,
        lambda: np.asarray(x[:3]): 3,
        lambda: x[:3].sum(): 3,
        lambda: x[:3].copy(): 3,
        lambda: x.block_until_ready(): 0,
        lambda: x.sum(): 1000,
    }.items():
        with st.transfers() as log:
            read()
        assert sum(r.copied for r in log if r.operator == "to_dlpack") in (8 * size, 16 * size)


@everywhere
def test_elements_are_read_as_they_are(backend: str) -> None:
    x = source(backend)
    theirs = consume("numpy", x)
    first = x[0]
    scribble(theirs)
    assert [float(first), float(x[0])] == [0, 42]


@everywhere
def test_what_comes_back_from_host_memory_is_exported(backend: str) -> None:
    away = st.device_put(source(backend), st.SingleDeviceSharding(st.devices(backend)[1], memory_kind="pinned_host"))
    x = st.device_put(away, st.devices(backend)[1])
    theirs = consume("numpy", x)
    scribble(theirs)
    assert [seen(x), seen(away)] == [WRITTEN if load(backend).pinned_host else OLD, OLD]
    part = consume("numpy", away[:3])
    scribble(part)
    assert [seen(away), seen(away[:3])] == [OLD, OLD[:3]]


@everywhere
def test_a_write_that_fails_changes_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = source(backend)
    theirs = consume("numpy", x)
    with pytest.raises(st.ShapeError):
        x[:2] = np.arange(3)

    def fails(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(writes.WriteTransaction, "on_host", fails)
        patch.setattr(writes.WriteTransaction, "on_devices", fails)
        with pytest.raises(st.DeviceMemoryError):
            x += 1
    b = x.copy()
    scribble(theirs)
    assert [seen(x), seen(b)] == [WRITTEN, OLD]


def test_tensors_by_dlpack_of_tensors() -> None:
    x = source("numpy")
    y = st.from_dlpack(x, copy=False)
    z = st.from_dlpack(x)
    scribble(consume("torch", y))
    assert [seen(y), seen(z)] == [OLD, OLD]
    x[0] = 9
    y[1] = 8
    assert [seen(v)[:2] for v in (x, y, z)] == [[9, 1], [0, 8], [0, 1]]
    held = x.copy()
    with st.transfers() as log:
        same = st.from_dlpack(x, copy=False)  # marked as read-only, as any other consumer's
    assert len(log) == 0
    same[2] = 7
    assert [seen(v)[2] for v in (x, held, same)] == [2, 2, 7]


@pytest.mark.parametrize("backend", ["checked", "cupy"], indirect=True)
def test_offloaded_memory(backend: str) -> None:
    there = st.SingleDeviceSharding(st.devices(backend)[0], memory_kind="pinned_host")
    x = st.device_put(np.arange(6, dtype="float32"), there)
    held = x.copy()
    for consumer in WRITERS:
        scribble(consume(consumer, x))
    assert [seen(x), seen(held)] == [OLD, OLD]
    with pytest.raises(st.InterchangeError, match="DLPack marks"):
        x.__dlpack__(copy=False)
    assert not np.from_dlpack(x, copy=False).flags.writeable


@everywhere
def test_host_reads_cannot_be_written(backend: str) -> None:
    x = source(backend)
    for read in (np.asarray(x), np.asarray(x[1:])):
        assert not read.flags.writeable
        assert read.__array_interface__["data"][1]
        assert memoryview(read).readonly
        with pytest.raises(BufferError):
            read.__dlpack__()
    for name in ("__array_interface__", "__array_struct__", "__cuda_array_interface__", "__buffer__"):
        assert not hasattr(x, name)  # they could not say who holds the memory


@pytest.mark.parametrize("read", ["stored", "read"])
def test_an_export_while_the_last_consumer_releases_the_memory(read: str) -> None:
    """A reader in another thread must not share the memory that the new consumer gets."""
    x = source("numpy")
    theirs = np.from_dlpack(x)
    storage: Any = x._storage
    exporting, done = threading.Event(), threading.Event()

    def slow(array: Any) -> Any:
        exporting.set()
        done.wait(0.1)  # It ends only without a lock.
        made = array.view()
        return made, weakref.ref(made)

    with ThreadPoolExecutor(1) as pool:
        export = pool.submit(storage.export, slow)
        assert exporting.wait(10)
        del theirs
        array = storage.stored().buffers[0] if read == "stored" else storage.read(lambda array: array)
        done.set()
        held, consumers = export.result(10)
    assert held
    assert not np.shares_memory(array, consumers)


def test_many_threads() -> None:
    x = source("numpy")

    def task(k: int) -> bool:
        if k % 3 == 0:
            theirs = np.from_dlpack(x)
            theirs[0] = 0
            return theirs.tolist() == OLD
        if k % 3 == 1:
            b = x.copy()
            b += 1
            return seen(b) == [1, 2, 3, 4, 5, 6]
        return seen(np.asarray(x)) == OLD

    with ThreadPoolExecutor(4) as team:
        assert all(team.map(task, range(300)))
    here = place_of(x.addressable_shards[0].data)
    x += 1
    assert place_of(x.addressable_shards[0].data) == here
    assert load("numpy").is_exclusive([np.arange(3)])
