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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from shardtensor.backend import HOST, Device
from shardtensor.errors import ArgumentError, TransferError
from shardtensor.host import in_children

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


class TransferLog:
    """What `transfers` counted: an iterable of `Transfer` with totals, which prints as a table.

    The table has a line for each operator, and for each axis that a collective ran along. Its last column, ``per
    device``, is the most bytes that any one device sent or received, the host aside.
    """

    def __init__(self) -> None:
        self._records: list[Transfer] = []

    def take(self, records: Callable[[], Iterable[Transfer]], made: Callable[[], tuple[Transfer, ...]]) -> None:
        """See `Book`."""
        new = made()
        with _lock:
            self._records.extend(new)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(tuple(self._records))

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes(self) -> int:
        """Total of what machines with separate memories would have sent."""
        return sum(r.bytes for r in self)

    @property
    def copied(self) -> int:
        """Total of what was really copied."""
        return sum(r.copied for r in self)

    def __repr__(self) -> str:
        return f"TransferLog({len(self)} transfers, {self.bytes} bytes, {self.copied} copied)"

    def __str__(self) -> str:
        groups: dict[tuple[str, str, bool], list[Transfer]] = {}
        for record in self:
            groups.setdefault((record.operator, record.axis, record.explicit), []).append(record)
        columns = dict.fromkeys(("operator", "axis", "explicit"), str.ljust)
        columns |= dict.fromkeys(("transfers", "bytes", "copied", "per device"), str.rjust)
        rows = [tuple(columns)]
        for (name, axis, explicit), records in groups.items():
            rows.append((name, axis, "yes" if explicit else "no", *_sums(records)))
        rows.append(("total", "", "", *_sums(tuple(self))))
        if not any(axis for _, axis, _ in groups):
            rows = [(row[0], *row[2:]) for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        places = [(columns[title], width) for title, width in zip(rows[0], widths, strict=True)]
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
        from shardtensor.traffic import sent_and_received

        return sent_and_received(_moved(self))

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
        from shardtensor.traffic import picture

        return picture(_moved(self), text=text)


def _moved(records: Iterable[Transfer]) -> dict[tuple[Device, Device], int]:
    """Bytes by (source, destination)."""
    moved: dict[tuple[Device, Device], int] = {}
    for r in records:
        if r.bytes and r.source != r.destination:
            moved[r.source, r.destination] = moved.get((r.source, r.destination), 0) + r.bytes
    return moved


def _sums(records: Sequence[Transfer]) -> list[str]:
    """The numbers in a line of the table."""
    from shardtensor.traffic import sent_and_received

    ends = sent_and_received(_moved(records))
    per_device = max((max(both) for device, both in ends.items() if device != HOST), default=0)
    sums = (len(records), sum(r.bytes for r in records), sum(r.copied for r in records), per_device)
    return [f"{n:,}" for n in sums]


class Book(Protocol):
    """What is written while it is open."""

    def take(self, records: Callable[[], Iterable[Transfer]], made: Callable[[], tuple[Transfer, ...]]) -> None:
        """A move: ``made`` makes its records, once for all books; ``records`` is what makes them."""


_open: list[Book] = []
_lock = threading.Lock()


@in_children
def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


@contextlib.contextmanager
def opened(book: Book) -> Iterator[None]:
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


def watched() -> bool:
    """Whether anybody counts or guards: if not, a move of no consequence need not be planned at all."""
    return bool(_open) or _policy.get() != "allow"


def account(operator: str, nbytes: int, explicit: bool, records: Callable[[], Iterable[Transfer]]) -> None:
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
        new = functools.cache(lambda: tuple(records()))
        with _lock:
            books = tuple(_open)
        for book in books:
            book.take(records, new)


def note_copy(operator: str, nbytes: int, device: Device) -> None:
    """Counts a copy within a device: nothing moves, and nobody judges it."""
    if nbytes:
        account(operator, 0, True, lambda: [Transfer(0, nbytes, device, device, operator, True)])
