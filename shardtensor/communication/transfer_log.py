"""The book of moves: `transfers` counts them, `transfer_guard` judges the implicit ones.

Each move has two sizes. ``bytes`` is what machines with separate memories would send, so that a laptop shows what a
cluster would do; ``copied`` is what was really copied here (nothing, where devices share one memory and a view will
do).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HOST, Device
from shardtensor.errors import ArgumentError, TransferError
from shardtensor.host.fork import in_children

if TYPE_CHECKING:
    from shardtensor.communication.traffic_picture import Moved

logger = logging.getLogger("shardtensor")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that went from one place to another for one operator.

    Attributes:
        bytes: what machines with separate memories would send.
        copied: what was really copied here.
        source: the device they came from, or `st.HOST`.
        destination: the device they went to, or `st.HOST`.
        operator: the name of the operator that wanted them.
        explicit: whether the caller asked for the move itself (`device_put`, `reshard`, `shard`, reading to the host,
            ...) or for a reduction, whose combination is its own work; False where the library had to bring data
            together.
        axis: for a collective, the mesh axes that it ran along; else empty.
    """

    bytes: int
    copied: int
    source: Device
    destination: Device
    operator: str
    explicit: bool
    axis: str = ""


class TransferBatch:
    """Transfers of one operator, as columns: a million of them takes milliseconds. Iterating over it makes a `Transfer`
    of each.

    Args:
        sources, destinations: the ends of each transfer, as numbers from 0 on.
        sizes: the bytes of each.
        device: the device of such a number.
        copied: whether the bytes were copied here.
        operator, explicit, axis: see `Transfer`.

    Attributes:
        devices: those that occur.
        columns: the positions in it of sources and destinations, bytes, and copied bytes.

    >>> from shardtensor.communication.transfer_log import TransferBatch
    >>> batch = TransferBatch([0, 0], [1, 2], [24, 16], st.devices("numpy").__getitem__, operator="add")
    >>> [(r.source, r.destination, r.bytes, r.copied) for r in batch]
    [(Device('numpy:0'), Device('numpy:1'), 24, 0), (Device('numpy:0'), Device('numpy:2'), 16, 0)]
    """

    __slots__ = ("axis", "columns", "devices", "explicit", "operator")

    def __init__(
        self,
        sources: npt.ArrayLike,
        destinations: npt.ArrayLike,
        sizes: npt.ArrayLike,
        device: Callable[[int], Device],
        *,
        operator: str,
        explicit: bool = False,
        copied: bool = False,
        axis: str = "",
    ) -> None:
        ends = np.array((sources, destinations), np.int64)
        used = np.flatnonzero(np.bincount(ends.ravel()))
        positions = np.zeros(int(ends.max(initial=0)) + 1, np.int64)
        positions[used] = np.arange(len(used))
        nbytes = np.array(sizes, np.int64)
        self.devices = [device(number) for number in used.tolist()]
        self.columns: _Columns = (*positions[ends], nbytes, nbytes if copied else np.zeros_like(nbytes))
        self.operator = operator
        self.explicit = explicit
        self.axis = axis

    def copying(self, nbytes: int) -> TransferBatch:
        """The same transfers, of which the first ones copied so many bytes here."""
        sources, destinations, sizes, _ = self.columns
        ends = np.concatenate([[0], np.cumsum(sizes)])
        self.columns = (sources, destinations, sizes, np.diff(np.minimum(ends, nbytes)))
        return self

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[Transfer]:
        kinds = np.zeros(len(self), np.int64)
        return _each([(self.operator, self.axis, self.explicit)], self.devices, (kinds, *self.columns))


_Columns = tuple[npt.NDArray[np.int64], ...]

_Kind = tuple[str, str, bool]
"""What the lines of a log's table differ in: operator, axis, and whether it is explicit."""

_AT_A_TIME = 1 << 16
"""As many rows of columns become Python's numbers at a time."""


def _each(kinds: Sequence[_Kind], devices: Sequence[Device], columns: _Columns) -> Iterator[Transfer]:
    """The transfers of columns: the positions of kind, source and destination, bytes and copied bytes."""
    for begin in range(0, len(columns[0]), _AT_A_TIME):
        rows = [column[begin : begin + _AT_A_TIME].tolist() for column in columns]
        for kind, source, destination, nbytes, copied in zip(*rows, strict=True):
            operator, axis, explicit = kinds[kind]
            yield Transfer(nbytes, copied, devices[source], devices[destination], operator, explicit, axis)


Recorded = TransferBatch | tuple[Transfer, ...]
"""The records of one move."""


class TransferLog:
    """What `transfers` counted: an iterable of `Transfer` with totals, which prints as a table.

    The table has a line for each operator, and for each axis that a collective ran along. Its last column, ``per
    device``, is the most bytes that any one device sent or received, the host aside. A record takes 28 bytes of memory.
    """

    def __init__(self) -> None:
        self._kinds: dict[_Kind, int] = {}
        self._devices: dict[Device, int] = {}
        self._columns = tuple([array(code) for code in "iiiqq"])  # as `_each` takes them

    def take(self, records: Callable[[], Iterable[Transfer]], made: Callable[[], Recorded]) -> None:
        """See `TransferListener`."""
        new = made()
        with _lock:
            if isinstance(new, TransferBatch):
                if len(new):  # else the table would have a line for an operator that moved nothing
                    self._append(new)
            else:
                for r in new:
                    row = (self._kind(r), self._device(r.source), self._device(r.destination), r.bytes, r.copied)
                    for column, value in zip(self._columns, row, strict=True):
                        column.append(value)

    def _append(self, batch: TransferBatch) -> None:
        devices = np.array([self._device(device) for device in batch.devices], np.int64)
        sources, destinations, nbytes, copied = batch.columns
        kinds = np.full(len(batch), self._kind(batch))
        rows = (kinds, devices[sources], devices[destinations], nbytes, copied)
        for column, values in zip(self._columns, rows, strict=True):
            column.frombytes(values.astype(column.typecode).tobytes())

    def _kind(self, record: Transfer | TransferBatch) -> int:
        return self._kinds.setdefault((record.operator, record.axis, record.explicit), len(self._kinds))

    def _device(self, device: Device) -> int:
        return self._devices.setdefault(device, len(self._devices))

    def _snapshot(self) -> tuple[list[_Kind], list[Device], _Columns]:
        """What there is now: other threads may go on counting."""
        with _lock:
            return (
                list(self._kinds),
                list(self._devices),
                tuple([np.array(column, np.int64) for column in self._columns]),
            )

    def __iter__(self) -> Iterator[Transfer]:
        return _each(*self._snapshot())

    def __len__(self) -> int:
        return len(self._columns[-1])

    @property
    def bytes(self) -> int:
        """Total of what machines with separate memories would have sent."""
        return _total(self._snapshot()[-1][3])

    @property
    def copied(self) -> int:
        """Total of what was really copied."""
        return _total(self._snapshot()[-1][4])

    def __repr__(self) -> str:
        return f"TransferLog({len(self)} transfers, {self.bytes} bytes, {self.copied} copied)"

    def __str__(self) -> str:
        groups, devices, columns = self._snapshot()
        titles = dict.fromkeys(("operator", "axis", "explicit"), str.ljust)
        titles |= dict.fromkeys(("transfers", "bytes", "copied", "per device"), str.rjust)
        rows = [tuple(titles)]
        *figures, total = _figures(len(groups), devices, columns)
        for (name, axis, explicit), line in zip(groups, figures, strict=True):
            rows.append((name, axis, "yes" if explicit else "no", *[f"{n:,}" for n in line]))
        rows.append(("total", "", "", *[f"{n:,}" for n in total]))
        if not any(axis for _, axis, _ in groups):
            rows = [(row[0], *row[2:]) for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        places = [(titles[title], width) for title, width in zip(rows[0], widths, strict=True)]
        lines = ["  ".join([put(cell, width) for cell, (put, width) in zip(row, places, strict=True)]) for row in rows]
        rule = "─" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def by_device(self) -> dict[Device, tuple[int, int]]:
        """How many bytes each device sent and received: those that took part, in order, and `st.HOST` last.

        >>> x = st.zeros((8, 2), dtype="float32", device=st.make_mesh((4,), ("x",)))
        >>> with st.transfers() as log:
        ...     y = x[1:] + 1
        >>> log.by_device()[st.devices()[1]]
        (8, 8)
        """
        return self._moved().sent_and_received()

    def picture(self, *, text: bool = False) -> Any:
        """Who talked to whom: the bytes from each device to each other one.

        Args:
            text: whether it shall be text even if matplotlib is installed.

        Returns:
            A ``matplotlib.figure.Figure`` with a heat map; or, without matplotlib, an object that prints as a table,
            with shades for numbers where there are more than about twelve devices.

        >>> x = st.zeros((8, 2), dtype="float32", device=st.make_mesh((4,), ("x",), devices=st.devices("numpy")[:4]))
        >>> with st.transfers() as log:
        ...     y = x[1:] + 1
        >>> print(log.picture(text=True))
        24 B from rows to columns
                   0    1    2    3  sent  received
        numpy:0    ·    ·    ·    ·   0 B       8 B
        numpy:1  8 B    ·    ·    ·   8 B       8 B
        numpy:2    ·  8 B    ·    ·   8 B       8 B
        numpy:3    ·    ·  8 B    ·   8 B       0 B
        """
        from shardtensor.communication.traffic_picture import picture

        return picture(self._moved(), text=text)

    def _moved(self) -> Moved:
        from shardtensor.communication.traffic_picture import Moved

        _, devices, (_, sources, destinations, nbytes, _) = self._snapshot()
        away = sources != destinations
        return Moved(devices, sources[away], destinations[away], nbytes[away])


def _figures(count: int, devices: Sequence[Device], columns: _Columns) -> list[list[int]]:
    """The numbers in the lines of the table, of the first ``count`` kinds and in all."""
    kinds, sources, destinations, nbytes, copied = columns
    away = np.where(sources != destinations, nbytes, 0)
    ends = np.zeros((count, 2, len(devices)), np.int64)
    for way, end in enumerate((sources, destinations)):
        np.add.at(ends.reshape(-1), (2 * kinds + way) * len(devices) + end, away)
    ends[:, :, [k for k, device in enumerate(devices) if device == HOST]] = 0
    transfers = np.bincount(kinds, minlength=count).tolist()
    order = np.argsort(kinds, kind="stable")
    parts = np.split(order, np.cumsum(transfers)[:-1]) if count else []
    lines = [
        [n, _total(nbytes[part]), _total(copied[part]), int(both.max(initial=0))]
        for n, part, both in zip(transfers, parts, ends, strict=True)
    ]
    per_device = int(ends.sum(axis=0).max(initial=0))
    return [*lines, [len(kinds), _total(nbytes), _total(copied), per_device]]


def _total(column: npt.NDArray[np.int64]) -> int:
    """The sum of a column, exact where it is beyond 64 bits."""
    return (int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum())


class TransferListener(Protocol):
    """What is written while it is open."""

    def take(self, records: Callable[[], Iterable[Transfer]], made: Callable[[], Recorded]) -> None:
        """A move: ``made`` makes its records, once for all books; ``records`` is what makes them."""


_open: list[TransferListener] = []
_lock = threading.Lock()


@in_children
def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


@contextlib.contextmanager
def opened(book: TransferListener) -> Iterator[None]:
    """Writes into a book what the whole process moves while the ``with`` block is open."""
    with _lock:
        _open.append(book)
    try:
        yield
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not book]


@contextlib.contextmanager
def transfers() -> Iterator[TransferLog]:
    """Counts what the whole process moves while the ``with`` block is open.

    >>> x = st.zeros((8, 2), dtype="float32", device=st.make_mesh((4,), ("x",)))
    >>> with st.transfers() as log:
    ...     y = x[1:] + 1  # one row crosses each boundary
    >>> log.bytes
    24
    """
    log = TransferLog()
    with opened(log):
        yield log


_policy: ContextVar[str] = ContextVar("shardtensor_transfer_guard", default="allow")


@contextlib.contextmanager
def transfer_guard(policy: str) -> Iterator[None]:
    """Says what happens on an implicit move, in this thread and in the maps that it starts.

    Args:
        policy: ``"allow"``; ``"log"``, which writes each to the logger ``shardtensor``; or ``"disallow"``, which
            raises `TransferError` before anything is moved. Judged by ``bytes``: by what separate memories would
            send.

    Explicit moves (see `Transfer`) are never judged.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> x, y = st.ones((4,), device=mesh), st.ones((4,), device=st.devices()[0])
    >>> with st.transfer_guard("disallow"):
    ...     x + y
    Traceback (most recent call last):
    shardtensor.errors.TransferError: add: moves 24 bytes implicitly, which transfer_guard("disallow") forbids; ...
    """
    if policy not in ("allow", "log", "disallow"):
        raise ArgumentError(f'transfer_guard: policy is {policy!r}; wanted "allow", "log" or "disallow"')
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def guarded() -> bool:
    """Whether implicit moves are judged."""
    return _policy.get() != "allow"


def is_recording() -> bool:
    """Whether anybody counts or guards: if not, a move of no consequence need not be planned at all."""
    return bool(_open) or _policy.get() != "allow"


def record_transfer(operator: str, nbytes: int, explicit: bool, records: Callable[[], Iterable[Transfer]]) -> None:
    """Judges a move of ``nbytes`` that is about to happen, and writes its records down if somebody counts.

    ``records`` is asked only then: most of the time nobody does, and a move costs two look-ups here.

    Raises:
        TransferError: the move is implicit and the guard forbids it.
    """
    if not explicit and nbytes and (policy := _policy.get()) != "allow":
        if policy == "disallow":
            raise TransferError(
                f'{operator}: moves {nbytes} bytes implicitly, which transfer_guard("disallow") forbids; '
                "move the operand yourself with st.device_put or st.reshard, or create it where it is needed"
            )
        logger.warning("%s: moves %d bytes implicitly", operator, nbytes)
    if _open:
        new = functools.cache(lambda: _recorded(records()))
        with _lock:
            books = tuple(_open)
        for book in books:
            book.take(records, new)


def _recorded(records: Iterable[Transfer]) -> Recorded:
    return records if isinstance(records, TransferBatch) else tuple(records)


def record_copy(operator: str, nbytes: int, device: Device) -> None:
    """Counts a copy within a device: nothing moves, and nobody judges it."""
    if nbytes:
        record_transfer(operator, 0, True, lambda: [Transfer(0, nbytes, device, device, operator, True)])
