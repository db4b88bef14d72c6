"""Gathers elements of a sharded array by index arrays that differ from device to device.

A `GatherPlan` is the counterpart of the copy plans of `shardtensor.sharding.copy_plan`, with lists of indices instead
of boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import HOST, Device
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import backend_of, is_remote, is_spanning
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_memories import Outgoing
from shardtensor.communication.between_processes.processes import cross, process_of
from shardtensor.communication.messages import Message, as_dtype, exchange
from shardtensor.communication.transfer_log import Transfer
from shardtensor.communication.transfer_plan import RecordedPlan, sole_backend
from shardtensor.sharding.layout import Grid, Ints, Shape


class GatherRequest(NamedTuple):
    """The elements that one device needs of an array.

    These are rows, each given by its index in every gathered dimension, over a range of indices of each other
    dimension.

    Attributes:
        device: the device, or `st.HOST`.
        rows: the number of rows.
        coordinates: for each gathered dimension, the indices of the rows.
        rest: for each other dimension, begin and end of the range.
    """

    device: Device
    rows: int
    coordinates: Sequence[Ints]
    rest: Sequence[tuple[int, int]]

    @property
    def shape(self) -> Shape:
        """The shape of the requested array, in which rows are the first dimension."""
        return (self.rows, *[b - a for a, b in self.rest])


class _Piece(NamedTuple):
    """Rows that a device receives from device ``j`` of the array.

    Attributes:
        rows: the positions of the rows in the request.
        indices, runs: the indices in the gathered dimensions, and the ranges in the others, of the source's array.
        to: these ranges in the requested array.
        size: the number of elements.
    """

    j: int
    rows: Ints
    indices: list[Ints]
    runs: tuple[slice, ...]
    to: tuple[slice, ...]
    size: int


class GatherPlan(RecordedPlan):
    """The plan by which devices receive the rows of an array that they requested.

    Args:
        source: the grid of the array.
        dims: its dimensions that are gathered by index arrays.
        wants: the requests, each with its device.
    """

    def __init__(self, source: Grid, dims: Sequence[int], wants: Sequence[GatherRequest]) -> None:
        self.source = source
        self.wants = wants
        self.dims = tuple(dims)
        self.others = tuple(d for d in range(len(source.offsets)) if d not in dims)
        self.holders: dict[tuple[int, ...], list[int]] = {}
        for j, parts in enumerate(source.parts.tolist()):
            self.holders.setdefault(tuple(parts), []).append(j)
        self._incoming = [list(self._pieces(k, want)) for k, want in enumerate(wants)]
        self.size = sum(size for size, _, _ in self._sent())

    def _pieces(self, k: int, want: GatherRequest) -> Iterator[_Piece]:
        if not math.prod(want.shape):
            return
        offsets = self.source.offsets
        parts = [offsets[d].searchsorted(c, "right") - 1 for d, c in zip(self.dims, want.coordinates, strict=True)]
        sizes = [len(offsets[d]) - 1 for d in self.dims]
        keys = parts[0] if len(parts) == 1 else np.ravel_multi_index(tuple(parts), sizes)
        order = keys.argsort(kind="stable")
        ordered = keys[order]
        cuts = (np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist()
        runs = [_overlaps(offsets[d], a, b) for d, (a, b) in zip(self.others, want.rest, strict=True)]
        firsts = order[[0, *cuts]]
        holding = list(zip(*[part[firsts].tolist() for part in parts], strict=True))
        local = [(c - offsets[d][part])[order] for d, c, part in zip(self.dims, want.coordinates, parts, strict=True)]
        for held, begin, end in zip(holding, [0, *cuts], [*cuts, len(order)], strict=True):
            rows, mine = order[begin:end], dict(zip(self.dims, held, strict=True))
            index = [indices[begin:end] for indices in local]
            for combination in itertools.product(*runs):
                for d, (part, *_) in zip(self.others, combination, strict=True):
                    mine[d] = part
                candidates = self.holders[tuple(mine[d] for d in range(len(offsets)))]
                j = self._source_for(k, want.device, candidates)
                runs_here = tuple([slice(a, b) for _, a, b, _ in combination])
                to = tuple([slice(at, at + b - a) for _, a, b, at in combination])
                size = len(rows) * math.prod(b - a for _, a, b, _ in combination)
                yield _Piece(j, rows, index, runs_here, to, size)

    def _source_for(self, k: int, device: Device, candidates: Sequence[int]) -> int:
        """Returns which of the devices that hold elements sends them to the device of the k-th request: itself, or one
        of its process, where there is one.
        """
        if len(candidates) == 1:
            return candidates[0]
        devices = self.source.devices
        if in_place := [j for j in candidates if devices[j] == device]:
            return in_place[0]
        processes = sorted({devices[j].process_index for j in candidates})
        process = device.process_index
        giver = process if process in processes else processes[process % len(processes)]
        own = [j for j in candidates if devices[j].process_index == giver]
        return own[k % len(own)] if giver == process else own[0]

    def records(self, itemsize: int, copied: bool, operator: str, explicit: bool) -> Iterator[Transfer]:
        """See `RecordedPlan`."""
        for size, source, destination in self._sent():
            n = size * itemsize
            yield Transfer(n, n if copied else 0, source, destination, operator, explicit)

    def _sent(self) -> Iterator[tuple[int, Device, Device]]:
        """Yields number of elements, source and destination of each transfer."""
        for want, pieces in zip(self.wants, self._incoming, strict=True):
            for p in pieces:
                if self.source.devices[p.j] != want.device:
                    yield p.size, self.source.devices[p.j], want.device

    def run(self, arrays: Sequence[Any], dtype: Any) -> list[Any]:
        """Executes the plan: returns one array of `GatherRequest.shape` for each request."""
        itemsize = np.dtype(dtype).itemsize
        if (backend := self._backend_of_rows(itemsize)) is not None:
            return self._run_at_once(backend, arrays, dtype)
        batches = [_batches(pieces, itemsize) for pieces in self._incoming]
        outs = [self._new(want, dtype) for want in self.wants]
        if is_spanning((*self.source.devices, *[want.device for want in self.wants])):
            for batch in itertools.zip_longest(*batches, fillvalue=()):
                self._receive_across(batch, arrays, outs)
            return outs
        for want, out, own in zip(self.wants, outs, batches, strict=True):
            for some in own:
                self._store(want, out, some, [self._message(p, arrays[p.j], want.device) for p in some])
        return outs

    def _backend_of_rows(self, itemsize: int) -> Backend | None:
        """Returns the backend of all devices, where each has a memory of its own, few bytes are requested, and all
        pieces are whole rows; otherwise None.
        """
        backend = sole_backend([*self.source.devices, *[want.device for want in self.wants]])
        if backend is None or itemsize * sum([math.prod(want.shape) for want in self.wants]) > AT_ONCE:
            return None
        for want, pieces in zip(self.wants, self._incoming, strict=True):
            row = math.prod([end - begin for begin, end in want.rest])
            if any(piece.size != len(piece.rows) * row for piece in pieces):
                return None
        return backend

    def _run_at_once(self, backend: Backend, arrays: Sequence[Any], dtype: Any) -> list[Any]:
        """Executes the plan by one selection on each device that sends rows, and one on each that receives them.

        A source selects the rows for all devices one after the other; each destination puts those that it receives into
        one array, and selects from it in the order of its request.
        """
        groups: dict[Any, list[tuple[int, _Piece]]] = {}  # the requests and pieces that a source selects at once
        for k, pieces in enumerate(self._incoming):
            for piece in pieces:
                groups.setdefault((piece.j, *[(run.start, run.stop) for run in piece.runs]), []).append((k, piece))
        sent: list[Any] = []
        sources: list[Device] = []
        received: list[list[tuple[_Piece, int]]] = [[] for _ in self.wants]
        for key in sorted(groups):
            group, source, array = groups[key], self.source.devices[key[0]], arrays[key[0]]
            pieces = [piece for _, piece in group]
            indices = [np.concatenate(some) for some in zip(*[piece.indices for piece in pieces], strict=True)]
            ends = itertools.accumulate([len(piece.rows) for piece in pieces], initial=0)
            with backend.on(source):
                array = backend.xp.permute_dims(array, (*self.dims, *self.others))
                rows = array[(*[backend.from_host(i, source) for i in indices], *pieces[0].runs)]
                for (k, piece), part in zip(group, itertools.pairwise(ends), strict=True):
                    received[k].append((piece, len(sent)))
                    sent.append(backend.view(rows, slice(*part)))
                    sources.append(source)
        outgoing = Outgoing(backend, sent, sources)
        return [
            self._received(backend, want, pieces_of, outgoing, dtype)
            for want, pieces_of in zip(self.wants, received, strict=True)
        ]

    @staticmethod
    def _received(
        backend: Backend, want: GatherRequest, pieces: Sequence[tuple[_Piece, int]], outgoing: Outgoing, dtype: Any
    ) -> Any:
        """Returns the rows of a request, given its pieces, each with the number of its array of those that are sent."""
        with backend.on(want.device):
            out = backend.xp.empty(want.shape, dtype=dtype)
            if not pieces:
                return out
            ends = list(itertools.accumulate([len(p.rows) for p, _ in pieces], initial=0))
            outs = [backend.view(out, slice(*pair)) for pair in itertools.pairwise(ends)]
            outgoing.place([number for _, number in pieces], outs, want.device)
            if len(pieces) == 1:
                return out  # They are in the order of the request.
            back = np.empty(want.rows, np.intp)
            back[np.concatenate([p.rows for p, _ in pieces])] = np.arange(want.rows)
            return out[backend.from_host(back, want.device)]

    @staticmethod
    def _new(want: GatherRequest, dtype: Any) -> Any:
        if is_remote(want.device):
            return RemoteArray(want.shape, np.dtype(dtype))
        backend = backend_of(want.device)
        with backend.on(want.device):
            return backend.xp.empty(want.shape, dtype=dtype)

    @staticmethod
    def _store(want: GatherRequest, out: Any, pieces: Sequence[_Piece], messages: Sequence[Message]) -> None:
        """Copies the elements of messages to where they belong in the array of a request."""
        backend = backend_of(want.device)
        for p, part in zip(pieces, exchange(messages), strict=True):
            with backend.on(want.device):
                # The rows of one source are in the order of the request, so a slice suffices if it has them all.
                rows = slice(None) if len(p.rows) == want.rows else on_device(p.rows, want.device)
                out[(rows, *p.to)] = as_dtype(backend, part, backend.dtype_of(out))

    def _receive_across(self, batch: Sequence[Sequence[_Piece]], arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        """Receives pieces of each request; those of other processes in one exchange, and each of them once in a
        process.
        """
        away = self._away(batch)
        crossing = [self._message(p, arrays[p.j], self.wants[k].device) for k, p in away.values()]
        arrived = dict(zip(away, cross(crossing, "gather"), strict=True))
        for want, pieces, out in zip(self.wants, batch, outs, strict=True):
            if is_remote(want.device):
                continue
            messages = []
            for p in pieces:
                if (key := self._key(p, want.device)) in away:
                    messages.append(Message(arrived[key], self.wants[away[key][0]].device, want.device))
                else:
                    messages.append(self._message(p, arrays[p.j], want.device))
            self._store(want, out, pieces, messages)

    def _away(self, batch: Sequence[Sequence[_Piece]]) -> dict[Any, tuple[int, _Piece]]:
        """Returns the pieces that are sent to another process, each with the first request there that has it."""
        firsts: dict[Any, tuple[int, _Piece]] = {}
        for k, (want, pieces) in enumerate(zip(self.wants, batch, strict=True)):
            for p in pieces:
                source = self.source.devices[p.j]
                if source != HOST and process_of(source) != process_of(want.device):
                    firsts.setdefault(self._key(p, want.device), (k, p))
        return firsts

    @staticmethod
    def _key(piece: _Piece, device: Device) -> Any:
        """Identifies the elements of a piece, and the process that receives them."""
        runs = tuple([(run.start, run.stop) for run in piece.runs])
        return piece.j, tuple([i.tobytes() for i in piece.indices]), runs, process_of(device)

    def between_processes(self) -> Iterator[tuple[int, int, int]]:
        """Yields the messages that processes send: the one that sends, the one that receives, and how many elements."""
        for k, p in self._away(self._incoming).values():
            yield process_of(self.source.devices[p.j]), process_of(self.wants[k].device), p.size

    def _message(self, piece: _Piece, array: Any, destination: Device) -> Message:
        source = self.source.devices[piece.j]
        backend = backend_of(source)
        with backend.on(source):
            array = backend.xp.permute_dims(array, (*self.dims, *self.others))
            part = array[(*[on_device(i, source) for i in piece.indices], *piece.runs)]
        return Message(part, source, destination)


AT_ONCE = 1 << 24
"""The bytes of received rows that a device holds besides the requested array, if a row is not larger."""


def _batches(pieces: Sequence[_Piece], itemsize: int) -> Iterator[list[_Piece]]:
    """Yields the pieces in batches of at most `AT_ONCE` bytes; larger pieces are divided by rows."""
    batch: list[_Piece] = []
    held = 0
    for piece in pieces:
        for part in _divided(piece, itemsize):
            if batch and held + part.size * itemsize > AT_ONCE:
                yield batch
                batch, held = [], 0
            batch.append(part)
            held += part.size * itemsize
    if batch:
        yield batch


def _divided(piece: _Piece, itemsize: int) -> Iterator[_Piece]:
    count, row = len(piece.rows), piece.size // len(piece.rows)
    step = max(AT_ONCE // max(row * itemsize, 1), 1)
    if step >= count:
        yield piece
        return
    for begin in range(0, count, step):
        some = slice(begin, begin + step)
        rows = piece.rows[some]
        yield piece._replace(rows=rows, indices=[i[some] for i in piece.indices], size=row * len(rows))


def _overlaps(offsets: Ints, begin: int, end: int) -> list[tuple[int, int, int, int]]:
    """Returns the parts of a dimension that a range overlaps.

    Each is a tuple of the part, begin and end within the part, and the position of that begin within the range.
    """
    out = []
    for part, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
        low, high = max(a, begin), min(b, end)
        if low < high:
            out.append((part, low - a, high - a, low - begin))
    return out


def on_device(index: Ints, device: Device) -> Any:
    """Returns an index array on the device of the array that it indexes; that device is current."""
    return index if device == HOST else backend_of(device).from_host(index, device)


def last_of_each(coordinates: Sequence[Ints], sizes: Sequence[int]) -> Ints | None:
    """Returns the positions of the last occurrence of each index tuple; None if no tuple occurs twice."""
    key = np.ravel_multi_index(tuple(coordinates), tuple(sizes))
    targets, last = np.unique(key[::-1], return_index=True)
    return None if len(targets) == len(key) else np.sort(len(key) - 1 - last)
