"""`Batches`: what is read for each step, and the iterator that hands it out."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.communication.between_processes.processes import note_error
from shardtensor.core import call, hinted, innermost
from shardtensor.data.order import shuffled
from shardtensor.data.reader import Reader
from shardtensor.data.sources import Numbers, ReadRows, Source, TensorRows, is_run, sources_of
from shardtensor.errors import ArgumentError, ArgumentTypeError, DeviceMemoryError, message_of
from shardtensor.files.chunk_grids import Box, size_of
from shardtensor.files.tensor_reads import local_boxes, on_devices, tensor_of_boxes
from shardtensor.functions.random.random_keys import Key, bits_of, integer
from shardtensor.host import fork, memory_pool
from shardtensor.host.units import counted
from shardtensor.interpreters.programs.trace import Tracer
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.pytree import leaves, map_leaves, map_with_prefix, replaced
from shardtensor.tensor.value import Aval, aval

CALLER = "data.Batches"

_DRAWN = 1 << 12
"""The least number of rows that are drawn at once: NumPy's calls take most of the time of a few."""

Placed = tuple[NamedSharding, bool]
"""A sharding, and whether tensors are committed to it."""

Boxes = dict[Box, HostArray]
"""The elements of an array of a batch that this process holds."""


@functools.lru_cache(4)
def _drawn(start: int, end: int, rows: int, bits: int, epoch: int) -> Numbers:
    """Returns the rows at the places from ``start`` to ``end`` of an epoch."""
    numbers = shuffled(np.arange(start, end), rows, bits, epoch)
    numbers.flags.writeable = False
    return numbers


class _Part(NamedTuple):
    """What batches of one size have of a source.

    Attributes:
        source: the source.
        values: the aval of each array.
        places: the places in the batch of the rows that this process reads, in ascending order.
    """

    source: Source
    values: list[Aval]
    places: Numbers


class _Plan:
    """Which rows a step has, and how they are read. The thread that reads ahead knows this only."""

    def __init__(
        self, sources: list[Source], batch: int, bits: int | None, drop_last: bool, wheres: list[Placed]
    ) -> None:
        self.batch, self.rows = batch, sources[0].rows
        self.per_epoch = self.rows // batch if drop_last else -(-self.rows // batch)
        self._bits = bits
        sizes = {batch} if drop_last else {batch, self.rows % batch or batch}
        self.parts = {size: _parts(sources, wheres, size) for size in sizes}

    def numbers(self, step: int) -> Numbers:
        """Returns the rows of a step, in the order of the batch."""
        epoch, k = divmod(step, self.per_epoch)
        start, stop = k * self.batch, min((k + 1) * self.batch, self.rows)
        if self._bits is None:
            return np.arange(start, stop)
        size = max(_DRAWN // self.batch, 1) * self.batch
        block, begin = divmod(start, size)
        drawn = _drawn(block * size, min((block + 1) * size, self.rows), self.rows, self._bits, epoch)
        return drawn[begin : begin + stop - start]

    def read(self, step: int) -> list[list[Boxes]]:
        """Reads the rows that this process needs for a step, and returns those of each array of each source. The rows
        of tensors are not read.

        Raises:
            ArgumentError: a source raises an error, which is its cause.
        """
        numbers = self.numbers(step)
        return [self._read_part(part, numbers, step) for part in self.parts[len(numbers)]]

    def _read_part(self, part: _Part, numbers: Numbers, step: int) -> list[Boxes]:
        if not isinstance(part.source, ReadRows):
            return []
        if len(part.places) < len(numbers):
            numbers = numbers[part.places]
        outs = [memory_pool.empty((len(numbers), *kind.shape), kind.dtype) for kind in part.source.kinds]
        try:
            if numbers.size:
                part.source.gather(numbers, outs)
        except DeviceMemoryError:
            raise
        except Exception as error:
            rows = ", ".join(map(str, sorted(numbers.tolist())[:8])) + (", ..." if len(numbers) > 8 else "")
            raise ArgumentError(
                f"{CALLER}: the source raised an error at step {step}, for the rows {rows}: {message_of(error)}"
            ) from error
        return [_boxes(value, part.places, out) for value, out in zip(part.values, outs, strict=True)]


def _parts(sources: list[Source], wheres: list[Placed], size: int) -> list[_Part]:
    """Returns what batches of a size have of each source, given the sharding of each array."""
    parts, placed = [], iter(wheres)
    for source in sources:
        values = [aval((size, *kind.shape), kind.dtype, *next(placed)) for kind in source.kinds]
        held = [np.arange(*box[0]) for value in values for box in _read_boxes(value) if size_of(box)]
        parts.append(_Part(source, values, np.unique(np.concatenate([np.arange(0), *held]))))
    return parts


def _read_boxes(value: Aval) -> Iterable[Box]:
    """Returns the boxes of an array that this process reads: none of a mesh without devices."""
    return () if value.backend.simulated else local_boxes(on_devices(value))


def _boxes(value: Aval, places: Numbers, rows: HostArray) -> Boxes:
    """Returns the boxes of an array that this process holds, given the rows at some places."""
    found = Boxes()
    for box in _read_boxes(value):
        shape = tuple([end - begin for begin, end in box])
        if shape == rows.shape:
            found[box] = rows
            continue
        first = int(np.searchsorted(places, box[0][0]))
        part = rows[(slice(first, first + shape[0]), *[slice(*ends) for ends in box[1:]])]
        if not part.size:
            part = np.empty(shape, rows.dtype)  # Its rows may not have been read.
        # Devices get copies of host arrays, but the arrays of NumPy's devices must not have the same memory.
        found[box] = part.copy() if value.backend.on_host else part
    return found


class Batches:
    """An iterator over batches of rows, as tensors that are sharded and read ahead.

    Which rows a batch has is a function of the key and the step, and does not depend on devices and processes: the same
    program on others gets the same batches. Every epoch has each row once, in an order of its own. The order is a
    bijection that is computed for the rows of a batch only (a Feistel network with cycle walking: Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002), so that its memory and the time of the first batch do not grow with
    the number of rows.

    Epochs follow each other in one iteration, which ends after the last one: there is one loop over batches, not one in
    each epoch, and `epoch` is the epoch of the next batch. A function of `shardtensor.jit` takes batches as
    arguments; ``next`` in it is an error.

    Each process reads the rows that its devices hold: all processes make the same calls. Arrays, files and objects are
    read in another thread, once for each batch and in ascending order, while the program uses the batches before. The
    rows of tensors are transferred by their devices, when a batch is handed out. The thread ends with the iteration,
    with an error, with `close` and the ``with`` block, and when the object is deleted.

    Args:
        source: an object with rows, or a pytree of such objects with the same number of rows:

            * an array of shape (rows, ...): of NumPy, also a memory map, or of another library whose arrays take
              slices and ascending arrays of indices, such as HDF5;
            * a tensor of shape (rows, ...);
            * the path of a file or folder: .npy, .npz, safetensors or zarr v3. One with several arrays is a dict. Of a
              .npz file, and where rows are not contiguous in a .npy file, all elements are read at the beginning. Of a
              folder, whole inner chunks are read and their checksums compared, which takes long where rows are shuffled
              and chunks have many;
            * an object with ``__len__`` and ``__getitem__``, such as a map-style dataset of PyTorch, whose items are
              arrays or pytrees of arrays. Item 0 is read at the beginning: the others have its structure, its shapes
              and its dtypes. An object with ``__getitems__`` gets a list with the rows of a batch, others one row
              after the other.
        batch: the rows of a batch, of all devices together.
        key: the key of the order; it may be left out if ``shuffle`` is False.
        shuffle: whether rows are shuffled anew in every epoch.
        epochs: the number of epochs; None for endless ones.
        drop_last: whether rows that are left at the end of an epoch are dropped if they are fewer than ``batch``. They
            are a smaller batch otherwise.
        sharding: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`) for the batches, or
            a prefix pytree of these. By default the rows are split over all axes of the default mesh, and the batches
            are not committed; where a mesh has an axis of the model, too, give ``st.P("data")``.
        prefetch: the batches that are read ahead. With 0 there is no thread.

    Attributes:
        rows: the number of rows of the source.
        batch: the rows of a batch.
        batches_per_epoch: the number of batches of an epoch.
        epochs: the number of epochs, or None.

    Raises:
        ArgumentError: the sources have no rows or different numbers of rows, ``batch`` is less than 1 or more than the
            rows, ``epochs`` or ``prefetch`` is negative, or there is no key; and at the step to which it belongs, with
            its rows, the error of a source, which is the cause of this one. The next call reads the same step again.
        ArgumentTypeError: an argument is of another type, or the elements have a dtype that tensors lack.
        ShardingError: a mesh lacks an axis of the spec, or there are more dimensions in the spec than in an array.
        OSError: a file cannot be read.

    >>> x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    >>> for batch in st.data.Batches({"x": x, "y": y}, 2, key=st.random.key(0), epochs=1):
    ...     print(batch["x"].shape, batch["y"].tolist())
    (2, 2) [1, 3]
    (2, 2) [0, 2]
    (1, 2) [4]
    """

    @hinted
    def __init__(
        self, source: Any, batch: int, *, key: Key | None = None, shuffle: bool = True, epochs: int | None = None,
        drop_last: bool = False, sharding: Any = None, prefetch: int = 2,
    ) -> None:  # fmt: skip
        self._reader: Reader | None = None
        tree = sources_of(source, CALLER)
        found: list[Source] = leaves(tree)
        self.rows, self.batch = found[0].rows, _at_least(1, batch, "batch")
        if self.batch > self.rows:
            raise ArgumentError(
                f"{CALLER}: batch is {self.batch}; wanted at most {self.rows}, the number of rows of the source"
            )
        self.epochs = None if epochs is None else _at_least(0, epochs, "epochs")
        self._ahead = _at_least(0, prefetch, "prefetch")
        self._form = map_leaves(lambda one: one.form, tree)
        wheres = _shardings(self._form, [len(kind.shape) + 1 for one in found for kind in one.kinds], sharding)
        self._key = _checked_key(key) if shuffle else None
        bits = None if self._key is None else bits_of(self._key, CALLER)
        self._plan = _Plan(found, self.batch, bits, bool(drop_last), wheres)
        self._drop_last = bool(drop_last)
        self.batches_per_epoch = self._plan.per_epoch
        self._step = 0
        self._lock = fork.lock()  # Threads that share the iterator get different batches.

    def __len__(self) -> int:
        """The number of batches of all epochs.

        Raises:
            ArgumentTypeError: it is endless.
        """
        if self.epochs is None:
            raise ArgumentTypeError(f"len: {CALLER} is endless; give epochs, or use batches_per_epoch")
        return self.epochs * self.batches_per_epoch

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Batches({counted(self.rows, 'row')}, batch={self.batch}, epochs={self.epochs}, step={self._step})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Returns the batch of the step: tensors in the structure of the source."""
        if isinstance(innermost(), Tracer):
            raise ArgumentError(
                f"{CALLER}: next is called in a function that is traced, whose program would have the same batch in "
                "all calls; call next outside of it, and pass the batch as an argument"
            )
        with self._lock:
            batch = self._batch_of(self._step)
            self._step += 1
            return batch

    def _batch_of(self, step: int) -> Any:
        if self.epochs is not None and step >= len(self):
            self.close()
            raise StopIteration
        numbers = self._plan.numbers(step)
        parts = self._plan.parts[len(numbers)]
        try:
            arrays = self._plan.read(step) if not self._ahead else self._reader_at(step).take()
        except BaseException as error:  # Raised again: other processes may not have raised it.
            self.close()
            note_error(CALLER, tuple([value.sharding for part in parts for value in part.values]), error)
            raise
        tensors = []
        for part, of_part in zip(parts, arrays, strict=True):
            if isinstance(part.source, TensorRows):
                tensors.append(_taken(part.source, numbers, part.values[0]))
                continue
            for value, boxes in zip(part.values, of_part, strict=True):
                tensors.append(tensor_of_boxes(value, boxes.__getitem__, CALLER))
        return replaced(self._form, tensors)

    def _reader_at(self, step: int) -> Reader:
        """Returns the thread that reads ahead from a step on."""
        reader = self._reader
        if reader is None or reader.next != step or reader.generation != fork.generation:
            self.close()
            end = None if self.epochs is None else len(self)
            self._reader = reader = Reader(self._plan.read, step, end, self._ahead)
            self._finalizer = weakref.finalize(self, reader.close, wait=False)
            self._finalizer.atexit = False  # The reader itself ends then.
        return reader

    def close(self) -> None:
        """Ends the thread that reads ahead. A call of ``next`` starts another one, at the same step."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._finalizer.detach()
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0 on."""
        return self._step // self.batches_per_epoch

    @property
    def state(self) -> dict[str, int]:
        """How many batches have been handed out, and what their order depends on: a few integers, which a checkpoint
        stores. Batches that have been read ahead do not count.

        >>> batches = st.data.Batches(np.arange(6), 2, key=st.random.key(0))
        >>> first, second = next(batches), next(batches)
        >>> state = batches.state
        >>> state["step"]
        2
        >>> others = st.data.Batches(np.arange(6), 2, key=st.random.key(0))
        >>> others.restore(state)
        >>> next(others).tolist() == next(batches).tolist()
        True
        """
        seed, stream = (0, 0) if self._key is None else (self._key.seed, self._key.stream)
        return {
            "step": self._step, "rows": self.rows, "batch": self.batch, "drop_last": int(self._drop_last),
            "shuffle": int(self._key is not None), "seed": seed, "stream": stream,
        }  # fmt: skip

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues at a step: the next batch is the one that followed when the state was taken.

        Args:
            state: the `state` of batches with the same key, the same size and the same number of rows, on any devices
                and processes, also as a checkpoint restores it.

        Raises:
            ArgumentError: the state is one of batches in another order. The message has the differences.
            ArgumentTypeError: it is no state.
        """
        own, caller = self.state, f"{CALLER}.restore"
        if not isinstance(state, Mapping) or state.keys() != own.keys():
            raise ArgumentTypeError(f"{caller}: state is {state!r:.100}; wanted a dict with {', '.join(own)}")
        given = {name: integer(value, caller, name) for name, value in state.items()}
        other = [name for name in own if name != "step" and given[name] != own[name]]
        if other:
            raise ArgumentError(
                f"{caller}: the state is one of batches in another order: it has "
                f"{', '.join(f'{name} {given[name]}' for name in other)}; wanted "
                f"{', '.join(f'{name} {own[name]}' for name in other)}"
            )
        step = _at_least(0, given["step"], "step")
        with self._lock:
            self._step = step


def _taken(source: TensorRows, numbers: Numbers, value: Aval) -> Any:
    """Returns the rows of a tensor in the layout of a batch."""
    if is_run(numbers):
        rows = call("copy", source.x[int(numbers[0]) : int(numbers[-1]) + 1])
    else:
        rows = call("take", source.x, numbers, axis=0)
    return call("reshard", rows, sharding=value.sharding)


def _at_least(least: int, value: Any, name: str) -> int:
    number = integer(value, CALLER, name)
    if number < least:
        raise ArgumentError(f"{CALLER}: {name} is {number}; wanted at least {least}")
    return number


def _checked_key(key: Any) -> Key:
    if key is None:
        raise ArgumentError(f"{CALLER}: there is no key; wanted key=st.random.key(0), or shuffle=False")
    if type(bits_of(key, CALLER)) is not int:
        raise ArgumentTypeError(f"{CALLER}: key is {key!r}, whose bits are not known; make the batches outside of jit")
    return key  # type: ignore[no-any-return]


def _shardings(form: Any, ndims: list[int], sharding: Any) -> list[Placed]:
    """Returns the sharding of each array of a batch, and whether it is committed."""

    def one(ndim: int, where: Any) -> Placed:
        return as_sharding(default_mesh() if where is None else where, ndim, CALLER), where is not None

    return map_with_prefix(one, replaced(form, ndims), sharding, CALLER, "sharding", "source")
