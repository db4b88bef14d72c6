"""The book of moves: `transfers` counts them, `transfer_guard` judges the implicit ones.

Each move has two sizes. ``bytes`` is what machines with separate memories would send, so that a laptop shows what a
cluster would do; ``copied`` is what was really copied here (nothing, where devices share one memory and a view will
do).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from shardtensor.backend import Device
from shardtensor.errors import ArgumentError, TransferError

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
    """

    bytes: int
    copied: int
    source: Device
    destination: Device
    operator: str
    explicit: bool


class TransferLog:
    """What `transfers` counted: an iterable of `Transfer` with totals, which prints as a table."""

    def __init__(self) -> None:
        self._records: list[Transfer] = []

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
        groups: dict[tuple[str, bool], list[Transfer]] = {}
        for record in self:
            groups.setdefault((record.operator, record.explicit), []).append(record)
        rows: list[tuple[str, ...]] = [("operator", "explicit", "transfers", "bytes", "copied")]
        for (name, explicit), records in groups.items():
            sums = (len(records), sum(r.bytes for r in records), sum(r.copied for r in records))
            rows.append((name, "yes" if explicit else "no", *(f"{n:,}" for n in sums)))
        rows.append(("total", "", f"{len(self):,}", f"{self.bytes:,}", f"{self.copied:,}"))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        rule = "─" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


_open: list[TransferLog] = []
_lock = threading.Lock()


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
    with _lock:
        _open.append(log)
    try:
        yield log
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not log]


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
        new = tuple(records())
        with _lock:
            for log in _open:
                log._records.extend(new)


def note_copy(operator: str, nbytes: int, device: Device) -> None:
    """Counts a copy within a device: nothing moves, and nobody judges it."""
    if nbytes:
        account(operator, 0, True, lambda: [Transfer(0, nbytes, device, device, operator, True)])
