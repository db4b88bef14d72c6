"""Plans of copies, executed by messages between devices and recorded in the log."""

from __future__ import annotations

import abc
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import HOST, Device
from shardtensor.backend.protocol import Backend, Launch
from shardtensor.backend.registry import backend_of, is_remote, is_spanning, processes_of, shared_memory
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_memories import Outgoing
from shardtensor.communication.between_processes.processes import cross, described, note, process_of
from shardtensor.communication.host_copies import Arrival, Departure, from_host, to_host
from shardtensor.communication.messages import Message, as_dtype, exchange
from shardtensor.communication.schedules import Block, flat, one_for_each_pair
from shardtensor.communication.transfer_log import Transfer, TransferBatch, TransferRecords, record_transfer
from shardtensor.host import memory_pool
from shardtensor.host.blockwise import BYTE, LONG
from shardtensor.host.fork import cached_property
from shardtensor.host.threads import each
from shardtensor.sharding.copy_plan import Piece, Region, RegionCopies
from shardtensor.sharding.layout import Grid, Shape

_FILLED = 1 << 24
"""The number of bytes of an array up to which all of it is filled where only some of it has to be."""

_BOXES = 8
"""The number of boxes up to which each is filled by a kernel of its own."""


class RecordedPlan(abc.ABC):
    """A plan whose transfers are recorded in the log.

    Attributes:
        size: the number of elements that change devices.
    """

    size: int

    @abc.abstractmethod
    def records(self, itemsize: int, copied: bool, operator: str, explicit: bool) -> Iterable[Transfer]:
        """Returns the transfers for the log."""

    def announce(self, itemsize: int, copied: bool, operator: str, explicit: bool = False) -> None:
        """Checks the transfers against the guard and records them; see `record_transfer`."""
        records = TransferRecords(self, itemsize, copied, operator, explicit)
        record_transfer(operator, self.size * itemsize, explicit, records)


def sole_backend(devices: Sequence[Device]) -> Backend | None:
    """Returns the backend of all devices, if there is only one in this process, which has other memories than the
    host's; otherwise None.
    """
    if HOST in devices or is_spanning(tuple(devices)):
        return None
    backends = list(map(backend_of, devices))
    first = backends[0]
    return None if any(b is not first for b in backends) or first.on_host or first.simulated else first


class _Part(NamedTuple):
    """A part of an operand that is copied.

    Attributes:
        operand, j: the number of the operand, and the position of the device that has the part.
        device: this device.
        index: the index into the array of the device; None for the whole.
    """

    operand: int
    j: int
    device: Device
    index: Any

    def of(self, operands: Sequence[Sequence[Any]], backend: Backend) -> Any:
        """Returns the part, a view of an array of an operand. Its device or one of the same memory is current."""
        array = operands[self.operand][self.j]
        return array if self.index is None else backend.view(array, self.index)


class _Receiver(NamedTuple):
    """A device of the result, and where it copies the parts to.

    Attributes:
        device: the device.
        shape: the shape of its array.
        here: the parts in its memory, each with its place.
        numbers, sources, places: of the parts that are sent to it the numbers, devices, and places; the place of a part
            that is the whole array is None.
        awaited: the number of one part of each of these devices.
        one: whether its array is one part.
    """

    device: Device
    shape: Shape
    here: tuple[tuple[_Part, Any], ...]
    numbers: tuple[int, ...]
    sources: tuple[Device, ...]
    places: tuple[Any, ...]
    awaited: tuple[int, ...]
    one: bool


class _Routes(NamedTuple):
    """The copies between the memories of a backend.

    Attributes:
        sent: the parts that are sent to other memories, each once; those of one device are neighbours.
        devices: the device of each of them.
        packs: for each of them a function of its array that returns the part in row-major order.
        launch: calls these functions on the devices.
        receivers: the devices of the result.
    """

    sent: tuple[_Part, ...]
    devices: tuple[Device, ...]
    packs: tuple[Callable[[Any], Any], ...]
    launch: Launch
    receivers: tuple[_Receiver, ...]


class TransferPlan(RecordedPlan):
    """A result, and the regions of the operands from which its elements are copied.

    Attributes:
        regions: the regions, which do not overlap and together cover the result.
        sources: the grid of each operand, in the shapes to which the regions refer.
        result: the grid of the result, likewise.
        copies: the copies of each region; computed if not given.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        sources: Sequence[Grid],
        result: Grid,
        copies: tuple[RegionCopies, ...] | None = None,
    ) -> None:
        self.regions = tuple(regions)
        self.sources = tuple(sources)
        self.result = result
        self.copies = copies or tuple(RegionCopies(r, i, sources[r.operand], result) for i, r in enumerate(regions))
        self.size = sum(c.size for c in self.copies)

    def records(self, itemsize: int, copied: bool, operator: str, explicit: bool) -> TransferBatch:
        """See `RecordedPlan`."""
        grids = (self.result, *self.sources)
        devices = [device for grid in grids for device in grid.devices]
        first = np.cumsum([len(grid.devices) for grid in grids])
        blocks = []
        for region, copies in zip(self.regions, self.copies, strict=True):
            sources, destinations, sizes = copies.messages()
            blocks.append(Block(sources + first[region.operand], destinations, sizes * itemsize))
        messages = blocks[0] if len(blocks) == 1 else one_for_each_pair(flat(blocks))
        return TransferBatch(*messages, devices.__getitem__, operator=operator, explicit=explicit, copied=copied)

    def run(
        self, operands: Sequence[Sequence[Any]], dtype: Any, as_they_lie: bool = False, fill: Any = None
    ) -> tuple[Any, ...]:
        """Executes the plan: returns the result's arrays, one per device in mesh order, from the operands' arrays.

        The operands have the shapes to which the regions refer. The result is in row-major order, unless
        ``as_they_lie`` is true: then an array that stays on its device keeps its memory order, and need not be copied.
        ``fill`` is the value of the elements that no region covers, if there are any.
        """
        if self._backend:
            return self._run_between(self._backend, operands, dtype, as_they_lie, fill)
        positions = range(len(self.result.devices))
        if self._spans:
            return _run_across(self, operands, dtype, as_they_lie, fill)
        if self._arrivals:
            backend, arrivals = self._arrivals
            return from_host(backend, arrivals, operands, dtype, as_they_lie)
        if self._departures:
            backend, departures = self._departures
            return (to_host(backend, departures, operands, functools.partial(self.new, 0, dtype, fill)),)

        def messages_to(k: int) -> list[Message]:
            return [self.message(piece, operands, self.result.devices[k]) for piece in self.incoming[k]]

        def receive(k: int) -> Any:
            return self.receive(k, self.incoming[k], messages_to(k), dtype, as_they_lie, fill)

        if BYTE * self._elements_on_host * np.dtype(dtype).itemsize <= LONG:
            return tuple([receive(k) for k in positions])
        results: dict[int, Any] = {}
        each(lambda k: results.update({k: receive(k)}), len(positions))
        return tuple([results[k] for k in positions])

    def _run_between(
        self, backend: Backend, operands: Sequence[Sequence[Any]], dtype: Any, as_they_lie: bool, fill: Any
    ) -> tuple[Any, ...]:
        """Executes the plan between the memories of a backend; see `run`.

        See `Outgoing` for the order of the copies.
        """
        sent, sources, packs, launch, receivers = self._routes
        outgoing = Outgoing(backend, [operands[part.operand][part.j] for part in sent], sources, packs, launch)
        packed, results = outgoing.packed, []
        converts = any(backend.dtype_of(arrays[0]) != dtype for arrays in operands)
        for row in receivers:
            device = row.device
            with backend.on(device):
                outgoing.wait(device, row.awaited)
                if row.one:
                    if row.numbers:
                        array = backend.to_device(packed[row.numbers[0]], row.sources[0], device)
                    else:
                        array = row.here[0][0].of(operands, backend)
                        # Replicas must be reduced in the same order on every device.
                        array = array if as_they_lie else backend.contiguous(array)
                    results.append(as_dtype(backend, array, dtype) if converts else array)
                    continue
                out = backend.xp.empty(row.shape, dtype=dtype)
                if fill is not None:
                    out[...] = fill
                for part, to in row.here:
                    backend.store(out, to, part.of(operands, backend))
                if row.numbers:
                    arrays = [packed[number] for number in row.numbers]
                    outs = [out if to is None else backend.view(out, to) for to in row.places]
                    backend.place(arrays, row.sources, outs, device)
            results.append(out)
        return tuple(results)

    @cached_property
    def _routes(self) -> _Routes:
        """The copies between memories; parts that several devices receive are packed once."""
        assert self._backend is not None
        rows = [[self._part(piece) for piece in pieces] for pieces in self.incoming]
        far = [
            [shared_memory((part.device, device)) is None for part in row]
            for row, device in zip(rows, self.result.devices, strict=True)
        ]
        parts = {_key_of(p): p for row, away in zip(rows, far, strict=True) for p in itertools.compress(row, away)}
        sent = sorted(parts.values(), key=lambda part: part.device)
        numbers = {_key_of(part): number for number, part in enumerate(sent)}
        receivers = []
        for k, (row, away) in enumerate(zip(rows, far, strict=True)):
            pieces, shape = self.incoming[k], self.result.shape(k)
            others = list(itertools.compress(row, away))
            senders = [part.device for part in others]
            mine = [numbers[_key_of(part)] for part in others]
            receiver = _Receiver(
                device=self.result.devices[k],
                shape=shape,
                here=tuple([(part, piece.to) for part, piece, a in zip(row, pieces, away, strict=True) if not a]),
                numbers=tuple(mine),
                sources=tuple(senders),
                awaited=tuple(dict(zip(senders, mine, strict=True)).values()),
                places=tuple([_unless_whole(piece.to, shape) for piece in itertools.compress(pieces, away)]),
                one=self.is_one_piece(k) and None not in pieces[0].index,
            )
            receivers.append(receiver)
        packs = tuple([_packing(self._backend, part.index) for part in sent])
        sources = tuple([part.device for part in sent])
        return _Routes(tuple(sent), sources, packs, self._backend.launcher(sources), tuple(receivers))

    def _part(self, piece: Piece) -> _Part:
        """Returns the part of an operand that a piece copies."""
        operand = self.regions[piece.region].operand
        source = self.sources[operand]
        index = _unless_whole(piece.index, source.shape(piece.j))
        return _Part(operand, piece.j, source.devices[piece.j], index)

    def _source(self, piece: Piece) -> Device:
        return self.sources[self.regions[piece.region].operand].devices[piece.j]

    @cached_property
    def _backend(self) -> Backend | None:
        """The backend of all devices, if it has several memories that are not the host's, and each pair of its devices
        exchanges at most one piece; otherwise None.
        """
        devices = [device for grid in (self.result, *self.sources) for device in grid.devices]
        backend = sole_backend(devices)
        if backend is None or shared_memory(tuple(devices)) is not None:
            return None
        pairs = [(self._source(piece), piece.k) for pieces in self.incoming for piece in pieces]
        return backend if len(set(pairs)) == len(pairs) else None

    @cached_property
    def _arrivals(self) -> tuple[Backend, tuple[Arrival, ...]] | None:
        """The backend of the result, and what its devices receive, where each array is one part of a host array, and
        none of them is on the host; otherwise None.
        """
        backend = sole_backend(self.result.devices)
        on_host = all(grid.devices == (HOST,) for grid in self.sources)
        if backend is None or not on_host or not all(map(self.is_one_piece, range(len(self.incoming)))):
            return None
        parts = [self._part(piece) for (piece,) in self.incoming]
        return backend, tuple([Arrival(d, p.operand, p.index) for d, p in zip(self.result.devices, parts, strict=True)])

    @cached_property
    def _departures(self) -> tuple[Backend, tuple[Departure, ...]] | None:
        """The backend of the operands, and what their devices send, where several of them send the parts of one host
        array, each one part, and none of them is on the host; otherwise None.
        """
        backend = sole_backend([device for grid in self.sources for device in grid.devices])
        if backend is None or self.result.devices != (HOST,) or self.is_one_piece(0):
            return None
        parts = [(self._part(piece), piece.to) for piece in self.incoming[0]]
        departures = tuple([Departure(p.device, p.operand, p.j, p.index, to) for p, to in parts])
        return (backend, departures) if len({p.device for p, _ in parts}) == len(parts) else None

    @cached_property
    def _spans(self) -> bool:
        """Whether some of the devices belong to other processes."""
        return any(is_spanning(grid.devices) for grid in (self.result, *self.sources))

    @cached_property
    def _elements_on_host(self) -> int:
        """The number of elements that are copied, if that happens within one memory of the host, whose threads can
        share the work; otherwise 0.
        """
        grids = (self.result, *self.sources)
        on_host = all(backend_of(device).on_host for grid in grids for device in grid.devices)
        return sum(int(c.sizes.sum()) for c in self.copies) if on_host else 0

    @cached_property
    def incoming(self) -> list[list[Piece]]:
        """The pieces that each device of the result receives."""
        incoming: list[list[Piece]] = [[] for _ in self.result.devices]
        for copies in self.copies:
            for piece in copies:
                incoming[piece.k].append(piece)
        return incoming

    @cached_property
    def crossing(self) -> dict[Any, Piece]:
        """The pieces that are sent to another process, each for its first receiver there."""
        firsts: dict[Any, Piece] = {}
        for pieces in self.incoming:
            for piece in pieces:
                source = self.sources[self.regions[piece.region].operand].devices[piece.j]
                if source != HOST and process_of(source) != process_of(self.result.devices[piece.k]):
                    firsts.setdefault(_key(self, piece), piece)
        return firsts

    def receive(
        self,
        k: int,
        pieces: Sequence[Piece],
        messages: Sequence[Message],
        dtype: Any,
        as_they_lie: bool,
        fill: Any,
        out: Any = None,
    ) -> Any:
        """Returns the array of the k-th device of the result.

        Args:
            k: the position of the device.
            pieces: the pieces that it receives; of those that are in ``out`` already, none.
            messages: the messages with their elements.
            dtype, as_they_lie, fill: see `run`.
            out: the array, if it was created by `new`.
        """
        device = self.result.devices[k]
        backend = backend_of(device)
        if out is None and self.is_one_piece(k):
            (part,) = exchange(messages)
            with backend.on(device):
                # Arrays that are sent are contiguous, and replicas must be reduced in the same order on every device.
                part = part if as_they_lie else backend.contiguous(part)
                return as_dtype(backend, part, dtype)
        if out is None:
            out = self.new(k, dtype, fill)
        parts = exchange(messages)
        for piece, part in zip(pieces, parts, strict=True):
            with backend.on(device):
                backend.store(out, piece.to, part)
        return out

    def makes_new(self) -> bool:
        """Whether the result is in other memory than the operands, which are in row-major order."""
        devices = [device for grid in (self.result, *self.sources) for device in grid.devices]
        return shared_memory(tuple(devices)) is None or not all(map(self._is_view, range(len(self.result.devices))))

    def _is_view(self, k: int) -> bool:
        if not self.is_one_piece(k):
            return False
        (piece,) = self.incoming[k]
        array = np.empty(self.sources[self.regions[piece.region].operand].shape(piece.j), np.int8)  # It is not read.
        return bool(array[piece.index].flags.c_contiguous)

    def is_one_piece(self, k: int) -> bool:
        """Whether the array of the k-th device of the result is one piece."""
        pieces, shape = self.incoming[k], self.result.shape(k)
        return len(pieces) == 1 and all(s.stop - s.start == n for s, n in zip(pieces[0].to, shape, strict=True))

    def new(self, k: int, dtype: Any, fill: Any) -> Any:
        """Returns new memory for the array of the k-th device of the result."""
        device, shape = self.result.devices[k], self.result.shape(k)
        backend = backend_of(device)
        with backend.on(device):
            if not backend.on_host:
                out = backend.xp.empty(shape, dtype=dtype)
                if fill is not None:
                    # One kernel fills few elements in less time than several do.
                    boxes = self._uncovered[k] if out.nbytes > _FILLED else [...]
                    for index in boxes if len(boxes) <= _BOXES else [...]:
                        out[index] = fill
                return out
            out = memory_pool.empty(shape, dtype=dtype)
            for index in () if fill is None else self._uncovered[k]:
                out[index] = fill
        return out

    @cached_property
    def _uncovered(self) -> list[Sequence[Any]]:
        """For each device of the result indices of boxes that contain all elements which no region covers: those around
        the elements that the device receives, or the whole array, if these are not a box.
        """
        indices: list[Sequence[Any]] = []
        for k, pieces in enumerate(self.incoming):
            shape, boxes = self.result.shape(k), [piece.to for piece in pieces]
            ends = [(min(s.start for s in lines), max(s.stop for s in lines)) for lines in zip(*boxes, strict=True)]
            received = sum([math.prod([s.stop - s.start for s in box]) for box in boxes])
            if not boxes or received != math.prod([end - begin for begin, end in ends]):
                indices.append([...])
                continue
            around: list[Any] = []
            for d, ((begin, end), size) in enumerate(zip(ends, shape, strict=True)):
                within = tuple([slice(*pair) for pair in ends[:d]])
                around += [(*within, slice(*line)) for line in ((0, begin), (end, size)) if line[0] < line[1]]
            indices.append(around)
        return indices

    def message(self, piece: Piece, operands: Sequence[Sequence[Any]], destination: Device) -> Message:
        """Returns the message with the elements of one piece, a view of the operand's array."""
        source, part = self._source(piece), self._view(piece, operands)
        if source == HOST and is_remote(destination):
            part = RemoteArray(part.shape, part.dtype)
        return Message(part, source, destination)

    def _view(self, piece: Piece, operands: Sequence[Sequence[Any]]) -> Any:
        """Returns the elements of one piece, a view of the operand's array."""
        source, array = self._source(piece), operands[self.regions[piece.region].operand][piece.j]
        if _unless_whole(piece.index, array.shape) is None:
            return array
        with backend_of(source).on(source):
            return backend_of(source).view(array, piece.index)


def _run_across(
    plan: TransferPlan, operands: Sequence[Sequence[Any]], dtype: Any, as_they_lie: bool, fill: Any
) -> tuple[Any, ...]:
    """Executes a plan between devices of several processes; see `TransferPlan.run`.

    The pieces for other processes are sent in one exchange. A piece that several devices of a process receive is sent
    to the first of them, and copied from there.
    """
    for grid, arrays in zip(plan.sources, operands, strict=True):
        # Each process has the whole array, and takes its own elements of it. Where the result is in one process, that
        # one runs the plan as one of its own, and notes nothing; so do the others.
        if grid.devices == (HOST,) and len(processes_of(plan.result.devices)) > 1:
            note(described(arrays[0]))
    devices = plan.result.devices
    outputs = [
        None if is_remote(d) or plan.is_one_piece(k) else plan.new(k, dtype, fill) for k, d in enumerate(devices)
    ]
    away = plan.crossing
    sent = [plan.message(piece, operands, devices[piece.k]) for piece in away.values()]
    # Elements that repeat along a new dimension are sent once, and copied to their places afterwards.
    places = [_place(plan, piece, outputs[piece.k]) for piece in away.values()]
    into = [
        place if place is not None and tuple(place.shape) == tuple(array.shape) else None
        for place, (array, _, _) in zip(places, sent, strict=True)
    ]
    placed = {key for key, place in zip(away, into, strict=True) if place is not None}
    arrived = dict(zip(away, cross(sent, "transfer", into), strict=True))
    results = []
    for k, device in enumerate(devices):
        if is_remote(device):
            results.append(RemoteArray(plan.result.shape(k), dtype))
            continue
        pieces, messages = list[Piece](), list[Message]()
        for piece in plan.incoming[k]:
            key = _key(plan, piece)
            first = away.get(key)
            if first is not None and first.k == k and key in placed:
                continue
            pieces.append(piece)
            if first is None:
                messages.append(plan.message(piece, operands, device))
            else:
                messages.append(Message(arrived[key], devices[first.k], device))
        results.append(plan.receive(k, pieces, messages, dtype, as_they_lie, fill, outputs[k]))
    return tuple(results)


def _place(plan: TransferPlan, piece: Piece, out: Any) -> Any:
    """Returns the part of the result of a device that a piece is copied to; None if there is no memory for it yet."""
    if out is None:
        return None
    device = plan.result.devices[piece.k]
    with backend_of(device).on(device):
        return backend_of(device).view(out, piece.to)


def _key(plan: TransferPlan, piece: Piece) -> Any:
    """Identifies the elements of a piece, and the process that receives them."""
    return piece.region, piece.j, _hashable(piece.index), process_of(plan.result.devices[piece.k])


def _unless_whole(index: tuple[Any, ...], shape: Shape) -> Any:
    """Returns an index; None if it selects all elements of an array of that shape, in order."""
    lines = tuple([(i.start, i.stop, i.step or 1) if isinstance(i, slice) else i for i in index])
    return None if lines == tuple([(0, n, 1) for n in shape]) else index


def _packing(backend: Backend, index: Any) -> Callable[[Any], Any]:
    """Returns a function of an array that returns a part of it in row-major order."""
    if index is None:
        return backend.contiguous
    return lambda array: backend.contiguous(backend.view(array, index))


def _key_of(part: _Part) -> Any:
    """Identifies a part of the operands."""
    return part.operand, part.j, None if part.index is None else _hashable(part.index)


def _hashable(index: Sequence[Any]) -> Any:
    return tuple([(i.start, i.stop, i.step) if isinstance(i, slice) else i for i in index])
