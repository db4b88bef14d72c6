"""Which storage may be written in place: leases of memory, and operators in progress.

An array of a storage may be written in place if only this storage holds its memory, and no operator in progress reads
it. Both are known from what the library itself hands out:

* Each array has a list of *leases*, which storages that share its memory have in common: weak references to these
  storages, and the leases of views that were exported to users (`Backend.lend`). A lease ends with the object that it
  refers to, in any thread, without a lock or a call. An array of which the library does not know what else holds the
  memory has no list, and is copied before it is written.
* An operator publishes its operands in `READS` before it reads any of them. A writer takes the storage out of its
  handle before it looks there, so either the writer finds the operand, or the reader finds the new value.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.backend.exclusive_memory import lend, memory_of
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import array_backend
from shardtensor.host import fork
from shardtensor.sharding.cells import Cells
from shardtensor.tensor.storage import Donated, Lease, Leases, PendingWrite, Storage
from shardtensor.tensor.value import Aval

READS: dict[int, list[Any]] = {}
"""The operators in progress: the ``id`` of a list, and the list. Its first item is the operands; the others are pairs
of a storage that an operand had before it was replaced, which the operator may still read, and its backend.
"""

Source = list[Any]
"""A storage that has an array in a memory, or None if there is none or it is among the leases; and the leases of the
array, or None if it is unknown what holds the memory.
"""

Sources = dict[Hashable, Source]
"""The sources of the memories of operands."""

_linking = fork.lock()
"""Held while storages are linked, never while a lease ends. It is reentrant, since finalizers may call the library."""

_removing = fork.lock()
"""Held while ended leases are removed. A call that finds it held removes none: waiting for it in a finalizer could
deadlock, and a finalizer that the removal itself runs would change the list. They are removed the next time.
"""


@fork.in_children
def _reset() -> None:
    READS.clear()


class reading:  # noqa: N801 - a context manager
    """Publishes operands that are read inside of the ``with`` block, and returns their entry in `READS`."""

    __slots__ = ("_entry",)

    def __init__(self, operands: Any) -> None:
        self._entry = [operands]

    def __enter__(self) -> list[Any]:
        READS[id(self._entry)] = self._entry
        return self._entry

    def __exit__(self, *_: object) -> None:
        READS.pop(id(self._entry), None)


def keep_while_read(x: Any, storage: Storage) -> int:
    """Returns the number of operators in progress that may read a tensor, whose storage is about to be replaced; the
    storage then exists until they have ended.
    """
    count = 0
    for entry in list(READS.values()):
        handles = [y for y in _tensors(entry[0]) if y is x or getattr(y._storage, "base", y) is x]
        if handles:
            count += 1
            entry.append((storage, x._aval.backend))
            entry.extend([(cached, x._aval.backend) for y in handles if (cached := _cached(y))])
    return count


def _tensors(tree: Any) -> list[Any]:
    """Returns the tensors in a container, and in containers in it, in any order."""
    return [x for x in _items(tree) if hasattr(x, "_storage")]


def _items(tree: Any) -> list[Any]:
    """Returns the objects in a container, and in containers in it, in any order."""
    items = []
    for x in list(tree.values()) if type(tree) is dict else tree:
        if isinstance(x, (tuple, list, dict)):
            items += _items(x)
        else:
            items.append(x)
    return items


def exclusive_arrays(x: Any, storage: Storage, readers: int = 0) -> Sequence[bool]:
    """Returns for each array of a storage, which was taken out of the handle ``x``, whether only the storage holds its
    memory and no operator reads it, except as many as the caller knows of; or nothing if none is exclusive.
    """
    # READS is iterated even where it is empty: that takes its lock where there is no GIL, which orders this thread
    # after the operators that have published their operands.
    if not storage.leases or keep_while_read(x, storage) > readers:
        return ()
    return [_is_only_holder(storage, leases) for leases in storage.leases]


def is_shared(storage: Storage) -> bool:
    """Whether other objects may hold the memory of a storage."""
    return not storage.leases or not all(_is_only_holder(storage, leases) for leases in storage.leases)


def _is_only_holder(storage: Storage, leases: Leases | None) -> bool:
    if not leases:
        return leases is not None
    for lease in list(leases):  # Others may remove leases from the list meanwhile, which would hide one of the rest.
        holder = lease()
        if holder is not None and holder is not storage:
            return False
    return True


def _base_of(x: Any) -> Any:
    """Returns the base of a tensor: the tensor itself if it is not a view. None for other objects."""
    storage = getattr(x, "_storage", None)
    return None if storage is None else getattr(storage, "base", x)


def _cached(x: Any) -> Storage | None:
    """Returns the arrays that a view has cached, of which it is unknown what else holds them."""
    arrays = (getattr(x._storage, "_cache", None) or (0, None))[1]
    return None if arrays is None else Storage(arrays)


def storage_of(x: Any) -> Storage | None:
    """Returns the storage that holds the memory of a tensor, of its base if it is a view; None if it has none, or if
    its memory is never written in place.
    """
    storage = x._storage
    if type(storage) is Storage:
        return storage
    storage = getattr(storage, "base", x)._storage
    if type(storage) is PendingWrite:
        storage = storage.stored()
    return storage if type(storage) is Storage else getattr(storage, "memory", None)


# -- handing out -----------------------------------------------------------------------------------


def lease(
    storage: Storage | None, new: Callable[[], object], position: int | None = None, cells: Cells | None = None
) -> None:
    """Records that the memory of a storage has been handed out until ``new`` returns None.

    The caller publishes the operand that has the storage (see `reading`) until this is recorded.

    Args:
        storage: the storage; None if the memory is never written in place.
        new: the lease.
        position: the position of the device whose array was handed out; None if it is unknown.
        cells: the cells of the tensor, if the position is known.
    """
    if storage is None:
        return
    parts = storage.leases
    if position is not None and cells is not None and len(parts) > 1:
        number = position if len(parts) == len(cells.shards) else cells.shards[position][0]
        parts = parts[number : number + 1]
    for leases in parts:
        if leases is not None:
            leases.append(new)
            n = len(leases)
            if n >= 8 and not n & (n - 1):
                _remove_ended(leases)


def lease_of(x: Any, new: Lease, position: int | None = None) -> None:
    """Records that memory of a tensor that the caller has published (see `reading`) has been handed out; see `lease`.

    Another thread may have replaced the storage since the memory was read, while copies of the tensor still have it.
    """
    storage = x._storage
    if type(storage) is not Storage:
        storage, position = storage_of(x), None
    lease(storage, new, position, None if position is None else x._aval.cells)
    for entry in list(READS.values()):
        if len(entry) > 1 and any(_base_of(y) is _base_of(x) for y in _tensors(entry[0])):
            for former, _ in entry[1:]:
                lease(former, new)


def hold(storage: Storage | None) -> None:
    """Records that the memory of a storage has been handed out, and that its return cannot be observed."""
    lease(storage, never_ends)


def hold_memory(backend: Backend, array: Any) -> None:
    """Records that the memory of an array was handed out that operands of operators in progress may have, too."""
    memory = backend.memory_of(array)
    for entry in list(READS.values()):
        _, leases = (_sources(entry) or {}).get(memory, [None, None])
        if leases is not None:
            leases.append(never_ends)


class Lent(NamedTuple):
    """An array of a tensor that was handed to a mapped function.

    Attributes:
        exported: the view that the function received.
        array: the array of the storage of which it is a view; if it has no storage of its own, another such view. User
            code has no reference to it.
        storage: the storage; None if it is unknown what holds the memory.
        leases: the leases of the array; None likewise.
    """

    exported: Any
    array: Any
    storage: Storage | None = None
    leases: Leases | None = None

    def storage_of(self, result: Any) -> Storage:
        """Returns a new storage of an array that is the lent one or a view of it."""
        storage = _new(Storage)
        storage.buffers = (result,)
        storage.leases = (self.leases,)
        if self.leases is not None and self.storage is not None:
            with _linking:
                _add(self.leases, weakref.ref(self.storage), weakref.ref(storage))
        return storage


def lend_storages(storages: Sequence[Storage], backend: Backend) -> list[Lent]:
    """Hands the arrays of storages that have only one each to mapped functions, and records their leases.

    The caller publishes the tensors (see `reading`) until the results of the functions have storages.
    """
    lend, result = backend.lend, []
    for storage in storages:
        (array,) = storage.buffers
        exported, its_lease = lend(array)
        leases = storage.leases[0] if storage.leases else None
        if leases is None:
            result.append(_lent((exported, array, None, None)))
            continue
        leases.append(its_lease or never_ends)
        n = len(leases)
        if n >= 8 and not n & (n - 1):
            _remove_ended(leases)
        result.append(_lent((exported, array, storage, leases)))
    return result


_new: Callable[[type[Storage]], Storage] = object.__new__

_lent: Callable[[tuple[Any, ...]], Lent] = functools.partial(tuple.__new__, Lent)
"""Makes a `Lent` of its fields, for each shard of a map, without a call of a Python function."""


def export(x: Any, array: Any, position: int | None = None) -> Any:
    """Returns the view of an array of a tensor that is handed to users, and records its lease; see `lease`."""
    exported, its_lease = x._aval.backend.lend(array)
    lease_of(x, its_lease or never_ends, position)
    return exported


def lent(x: Any, array: HostArray) -> HostArray:
    """Returns a read-only view of a host array that may share the memory of a tensor, and records its lease."""
    exported, its_lease = lend(array)
    if x._aval.backend.on_host or memory_of(exported) is None:
        lease_of(x, its_lease)
    return exported


def never_ends() -> bool:
    """A lease that never ends."""
    return True


def _add(leases: Leases, *new: Lease) -> None:
    """Adds leases; see `_remove_ended`."""
    leases += new
    n = len(leases)
    if n >= 8 and n.bit_length() > (n - len(new)).bit_length():
        _remove_ended(leases)


def _remove_ended(leases: Leases) -> None:
    """Removes the leases that have ended, and all but one of those that are the same object. It is called whenever the
    length reaches a power of two from 8 on.
    """
    if not fork.is_mine(_removing) and _removing.acquire(blocking=False):
        try:
            n = len(leases)  # Others may add leases at the end at the same time, which does not move the rest.
            leases[:n] = {id(one): one for one in leases[:n] if one() is not None}.values()
        finally:
            _removing.release()


# -- new storages ----------------------------------------------------------------------------------


def replaced(storage: Storage, arrays: tuple[Any, ...], new: Collection[int], backend: Backend) -> Storage:
    """Returns a storage with the buffers of another one, except those at the positions ``new``, which a write made."""
    before = storage.leases or (None,) * len(arrays)
    parts = [
        leases if k not in new else [] if backend.memory_of(arrays[k]) is not None else None
        for k, leases in enumerate(before)
    ]
    new_storage = Storage(arrays, tuple(parts))
    with _linking:
        for k, leases in enumerate(before):
            if leases is not None and k not in new:
                _add(leases, weakref.ref(new_storage))
    return new_storage


def shared(storage: Storage) -> Storage:
    """Returns another storage of the arrays of a storage: the first write to either of them copies."""
    twin = Storage(storage.buffers, storage.leases)
    refs = weakref.ref(storage), weakref.ref(twin)
    with _linking:
        for leases in storage.leases:
            if leases is not None:
                _add(leases, *refs)
    return twin


def set_joined(
    x: Any, storage: Storage, pieces: tuple[Any, ...], buffers: tuple[Any, ...], copied: Sequence[int]
) -> bool:
    """Replaces ``pieces``, the arrays that the devices have of ``x`` in a storage, by the buffers of the cells, for
    each of which so many bytes were copied. Returns False if another thread has already done that with its buffers.
    """
    joined, backend = list[Leases | None](), x._aval.backend
    with _linking:
        if storage.buffers is not pieces:
            return False
        parts = storage.leases
        if any(copied):
            keep_while_read(x, Storage(pieces, parts))
        for array, nbytes, positions in zip(buffers, copied, x._aval.cells.positions, strict=True):
            mine = [parts[k] for k in positions] if parts else [None]
            if nbytes:
                joined.append([] if backend.memory_of(array) is not None else None)
            elif all(leases is mine[0] for leases in mine) and not any(leases is mine[0] for leases in joined):
                joined.append(mine[0])
            else:
                for leases in mine:
                    if leases is not None:
                        _add(leases, never_ends)
                joined.append(None)
        # Readers look at the buffers before they look at the leases.
        storage.leases = tuple(joined)
        storage.buffers = buffers
    return True


# -- results of operators --------------------------------------------------------------------------


def is_new(result: Storage, operands: Sequence[Any]) -> bool:
    """Whether the result of an operator is one host array with memory of its own, and not the array of an operand. The
    memory of a view is its own if its leases are known.
    """
    buffers = result.buffers
    array = buffers[0] if len(buffers) == 1 else None
    if type(array) is not np.ndarray or (array.base is not None and not result.leases):
        return False
    for x in operands:
        if x is array:
            return False
        storage = getattr(x, "_storage", None)
        if storage is not None:
            if type(storage) is not Storage:
                storage = storage_of(x)
            if storage is None:
                return False
            for mine in storage.buffers:
                if mine is array:
                    return False
    return True


def link_parts(storage: Any, tensors: Sequence[Any]) -> None:
    """Records that new tensors of one array each have parts of the memory of a storage: of its only array, or each of
    them that of one device, in mesh order.

    The caller publishes the tensor that has the storage. Where it is unknown what holds the memory, `track` records it.
    """
    if type(storage) is not Storage or len(storage.leases) not in (1, len(tensors)):
        return
    storages, origin = [x._storage for x in tensors], weakref.ref(storage)
    with _linking:
        if len(storage.leases) == 1:
            for part in storages:
                part.leases = storage.leases
            if (leases := storage.leases[0]) is not None:
                _add(leases, origin, *map(weakref.ref, storages))
            return
        for part, leases in zip(storages, storage.leases, strict=True):
            part.leases = (leases,)
            if leases is not None:
                _add(leases, origin, weakref.ref(part))


def track(entry: list[Any], result: Any) -> None:
    """Records which storages of a result share memory with the operands of an operator, or with one another. All other
    memory of the result was allocated by the operator, and is held by nothing else.

    Args:
        entry: the operands of the operator, published in `READS`.
        result: a tensor, or a pytree of tensors and other objects.
    """
    results = [result] if hasattr(result, "_storage") else _tensors((result,))
    if len(results) > 1 and _are_linked(results, entry[0]):  # For one result, what follows takes fewer calls.
        return
    # The common case. A write that replaces the storage of an operand adds the old one to the entry before.
    if len(entry) == 1 and (new := _new_leases(results, _items(entry[0]))) and len(entry) == 1:
        for x, leases in zip(results, new, strict=True):
            x._storage.leases = x._storage.leases or leases
        return
    stored = [x for x in results if type(x._storage) is Storage]
    if not stored:
        return
    bases = [getattr(x._storage, "base", x) for x in _tensors(entry[0])]
    used = {id(base._storage): base for base in bases}
    unknown = []
    for x in stored:
        storage = x._storage
        if used.get(id(storage), x) is not x:  # Each handle has a storage of its own.
            x._storage = Storage(storage.buffers)
            unknown.append(x)
        elif not storage.leases:
            unknown.append(x)
    if not unknown:
        return
    held, arrays = [base._storage for base in bases], dict[int, Source]()
    for storage in held:
        if type(storage) is Storage and len(storage.buffers) == 1 == len(storage.leases):  # The common case.
            arrays[id(storage.buffers[0])] = [storage, storage.leases[0]]
        else:
            arrays |= {id(array): source for array, source in _arrays_of(storage)}
    sources: Sources | None = None
    for x in unknown:
        storage = x._storage
        origins = [arrays.get(id(array)) for array in storage.buffers]
        if None in origins:  # Not all buffers are arrays of operands, but their memories may be.
            if sources is None and (sources := _sources(entry)) is None:
                return
            memory_of_array = x._aval.backend.memory_of
            origins = [_source(sources, memory_of_array(array), storage) for array in storage.buffers]
        _link(storage, x._aval, origins)


def _are_linked(results: Sequence[Any], operands: Any) -> bool:
    """Whether each result has a storage of its own, for which the operator has recorded already what it shares."""
    storages = [x._storage for x in results]
    for storage in storages:
        if type(storage) is not Storage or not storage.leases:
            return False
    known = {id(getattr(x._storage, "base", x)._storage) for x in _tensors(operands)}
    return len(known.union(map(id, storages))) == len(known) + len(storages)


def _new_leases(results: Sequence[Any], operands: Sequence[Any]) -> list[tuple[Leases | None, ...]]:
    """Returns the leases of each result, if it is certain that each array has memory of its own, not that of another
    one or of an operand; otherwise nothing. An array of unknown memory has no leases.
    """
    if len(results) == 1 and type(storage := results[0]._storage) is Storage and is_new(storage, operands):
        return [([],)]
    columns: list[list[Hashable | None]] = []
    for x in results:
        if type(x._storage) is not Storage:
            return []
        columns.append(list(map(x._aval.backend.memory_of, x._storage.buffers)))
    memories = [memory for column in columns for memory in column if memory is not None]
    known, count = set(memories), sum(map(len, columns))
    storages = [x._storage for x in results] if len(memories) < count else ()
    if len(known) < len(memories) or not _have_others(operands, known, storages):
        return []
    return [tuple([None if memory is None else [] for memory in column]) for column in columns]


def _have_others(operands: Sequence[Any], memories: set[Hashable], storages: Sequence[Storage]) -> bool:
    """Whether operands have none of these memories; and, if there are storages with arrays of unknown memory, whether
    they are not those of operands, and nothing would have to be recorded if their arrays were the same.
    """
    for x in operands:
        held = getattr(x, "_storage", None)
        if held is None:
            if hasattr(x, "dtype") and (type(x) is not np.ndarray or memory_of(x) in memories):
                return False
            continue
        for own in (held,) if type(held) is Storage else (getattr(held, "base", x)._storage, _cached(x)):
            if own is None:
                continue
            if type(own) is not Storage or not memories.isdisjoint(map(x._aval.backend.memory_of, own.buffers)):
                return False
            if own in storages or (storages and any(leases is not None for leases in own.leases)):
                return False
    return True


def _arrays_of(storage: Any) -> list[tuple[Any, Source]]:
    """Returns the arrays of a storage, each with its source; none while the elements are not stored."""
    if type(storage) is not Storage:
        return []
    arrays, parts = storage.buffers, storage.leases
    if len(arrays) == 1 == len(parts):
        return [(arrays[0], [storage, parts[0]])]
    if len(parts) != len(arrays):
        parts = (None,) * len(arrays)
    return [(array, [storage, leases]) for array, leases in zip(arrays, parts, strict=True)]


def _sources(entry: list[Any]) -> Sources | None:
    """Returns the memories of the operands. Returns None if a donated operand shared its memory."""
    sources: Sources = {}
    for x in _items(entry[0]):
        if type(storage := getattr(x, "_storage", None)) is Storage:  # The common case.
            _note(sources, storage, x._aval.backend)
        elif (base := _base_of(x)) is not None:
            backend = base._aval.backend
            if type(base._storage) is Donated and not base._storage.exclusive:
                return None
            _note(sources, _cached(x), backend)
            _note(sources, storage_of(x), backend)
            for array in getattr(base._storage, "parts", ()):
                sources[backend.memory_of(array)] = [None, None]
        elif (owner := array_backend(x)) is not None:  # Its arrays may be NumPy's, too.
            sources[owner.memory_of(x)] = [None, None]
        elif isinstance(x, np.ndarray):
            sources[memory_of(x)] = [None, None]
    for storage, backend in entry[1:]:
        _note(sources, storage, backend)
    return sources


def _note(sources: Sources, storage: Storage | None, backend: Backend) -> None:
    """Adds the memories of a storage; where several storages have one, one with leases is kept."""
    for array, source in _arrays_of(storage):
        memory = backend.memory_of(array)
        if source[1] is not None or memory not in sources:
            sources[memory] = source


def _source(sources: Sources, memory: Hashable, storage: Storage) -> Source:
    """Returns the source of a memory; where no operand has it, ``storage`` becomes the source of what follows."""
    return sources.setdefault(memory, [storage, [] if memory is not None else None])


def _link(storage: Storage, value: Aval, sources: Sequence[Any]) -> None:
    """Sets the leases of the storage of a result, the memories of whose buffers have these sources."""
    lists: dict[int, tuple[Leases, list[Lease]]] = {}
    repeated = []
    with _linking:
        for source in sources:
            origin, leases = source
            if leases is None:
                continue
            if id(leases) in lists:
                repeated.append(leases)
            _, new = lists.setdefault(id(leases), (leases, [] if origin is storage else [weakref.ref(storage)]))
            if origin is not storage and origin is not None:  # It is among the leases from now on.
                new.append(weakref.ref(origin))
                source[0] = None
        for leases, new in lists.values():
            _add(leases, *new)
        # A write would be repeated for each of the buffers.
        if repeated and (value.cells.apart or len(storage.buffers) == len(value.cells.positions)):
            for leases in repeated:
                leases.append(never_ends)
    storage.leases = tuple([leases for _, leases in sources])
