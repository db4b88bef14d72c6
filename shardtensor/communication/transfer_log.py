"""The log of transfers: `transfers` records them, `transfer_guard` controls the implicit ones.

Each transfer has two sizes: ``bytes`` is what machines with separate memories would send, so that a laptop shows what a
cluster would do; ``copied`` is what was copied here (0 where devices share a memory and a view suffices).
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HOST, Device
from shardtensor.core import ABOVE
from shardtensor.errors import ArgumentError, TransferError
from shardtensor.host import fork
from shardtensor.host.units import counted
from shardtensor.sharding.mesh import span

if TYPE_CHECKING:
    from logging import Logger


_T = TypeVar("_T")


def logger() -> Logger:
    """Returns the logger ``shardtensor``."""
    import logging  # Imported late: it takes a twentieth of this package's import time.

    return logging.getLogger("shardtensor")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes transferred from one device to another for one operator.

    Attributes:
        bytes: what machines with separate memories would send.
        copied: what was copied here.
        source: the source device, or `st.HOST`.
        destination: the destination device, or `st.HOST`.
        operator: the name of the operator that required the transfer.
        explicit: whether the call itself requests the transfer (`device_put`, `reshard`, `shard`, a read to the host,
            ...), or it combines the partial results of a reduction; False where the library transfers operands
            implicitly.
        axis: for a collective, the mesh axes that it ran along; otherwise empty.
    """

    bytes: int
    copied: int
    source: Device
    destination: Device
    operator: str
    explicit: bool
    axis: str = ""


@dataclass(frozen=True, slots=True)
class TransferRecords:
    """The transfers of a plan, which are computed when it is called.

    Attributes:
        plan: the plan.
        itemsize: the bytes of one element.
        copied: whether the bytes are copied here.
        operator, explicit: see `Transfer`.
    """

    plan: Any
    itemsize: int
    copied: bool
    operator: str
    explicit: bool

    def __call__(self) -> Iterable[Transfer]:
        """Returns the transfers."""
        transfers: Iterable[Transfer] = self.plan.records(self.itemsize, self.copied, self.operator, self.explicit)
        return transfers


class TransferBatch:
    """The transfers of one operator, as columns: recording a million of them takes milliseconds.

    Iteration yields a `Transfer` for each.

    Args:
        sources, destinations: the ends of each transfer, as numbers from 0 on.
        sizes: the bytes of each transfer.
        device: returns the device of such a number.
        copied: whether the bytes were copied here.
        operator, explicit, axis: see `Transfer`.

    Attributes:
        devices: the devices that occur.
        columns: the positions of sources and destinations in ``devices``, bytes, and copied bytes.

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
        """Sets the copied bytes to ``nbytes`` in all, assigned to the first transfers, and returns the batch."""
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
"""The key of a line of the log's table: operator, axis, and whether the transfer is explicit."""

_AT_A_TIME = 1 << 16
"""The number of rows that are converted to Python's numbers at a time."""


def _each(kinds: Sequence[_Kind], devices: Sequence[Device], columns: _Columns) -> Iterator[Transfer]:
    """Yields the transfers of columns: the positions of kind, source and destination, bytes, and copied bytes."""
    for begin in range(0, len(columns[0]), _AT_A_TIME):
        rows = [column[begin : begin + _AT_A_TIME].tolist() for column in columns]
        for kind, source, destination, nbytes, copied in zip(*rows, strict=True):
            operator, axis, explicit = kinds[kind]
            yield Transfer(nbytes, copied, devices[source], devices[destination], operator, explicit, axis)


_FIELDS = ("kind", "source", "destination", "bytes", "copied")  # in the order that `_each` expects
_ROW = np.dtype(list(zip(_FIELDS, ("i4", "i4", "i4", "i8", "i8"), strict=True)))
"""A row of a log."""

_packed = struct.Struct("=iiiqq").pack  # a row


def _kind(record: Transfer | TransferBatch) -> _Kind:
    return record.operator, record.axis, record.explicit


class _Numbers(Generic[_T]):
    """Numbers objects from 0 on.

    Attributes:
        items: the objects by number. If several threads add equal ones at once, all but the first remain unused.
    """

    def __init__(self) -> None:
        self.items: list[_T] = []
        self._known: dict[_T, int] = {}

    def number(self, item: _T) -> int:
        """Returns the number of an object, and adds it if it is new."""
        number = self._known.get(item)
        if number is None:
            self.items.append(item)
            number = self._known[item] = self.items.index(item)
        return number


Recorded = TransferBatch | tuple[Transfer, ...]
"""The records of one call of `record_transfer`."""


class TransferLog:
    """The transfers that `transfers` recorded: an iterable of `Transfer` with totals, which prints as a table.

    The table has a line for each operator, and for each axis that a collective ran along. Its last column, ``per
    device``, is the most bytes that any one device, other than the host, sent or received. A record takes 28 bytes of
    memory.
    """

    # There is no lock: a finalizer that the garbage collector calls while the lock is held would wait for ever. Each
    # addition is one call of a built-in type, which no other thread and no finalizer can see half done.

    def __init__(self) -> None:
        self._kinds, self._devices = _Numbers[_Kind](), _Numbers[Device]()
        self._records = bytearray()  # Rows of the dtype `_ROW`.

    def record(self, records: Callable[[], Iterable[Transfer]], cached: Callable[[], Recorded]) -> None:
        """See `TransferListener`."""
        new = cached()
        kind, device = self._kinds.number, self._devices.number
        if not isinstance(new, TransferBatch):
            for r in new:
                self._records += _packed(kind(_kind(r)), device(r.source), device(r.destination), r.bytes, r.copied)
        elif len(new):  # otherwise the table would list an operator without transfers
            sources, destinations, *sizes = new.columns
            devices = np.array([device(d) for d in new.devices])
            rows = np.empty(len(new), _ROW)
            columns = kind(_kind(new)), devices[sources], devices[destinations], *sizes
            for name, column in zip(_FIELDS, columns, strict=True):
                rows[name] = column
            self._records += rows.tobytes()

    def _snapshot(self) -> tuple[list[_Kind], list[Device], _Columns]:
        """Returns copies of kinds, devices and columns, as other threads may record further transfers."""
        rows = np.frombuffer(self._records[:], _ROW)  # Taken first: whatever has a number in it is listed by then.
        columns = tuple([rows[name].astype(np.int64) for name in _FIELDS])
        return self._kinds.items[:], self._devices.items[:], columns

    def __iter__(self) -> Iterator[Transfer]:
        return _each(*self._snapshot())

    def __len__(self) -> int:
        return len(self._records) // _ROW.itemsize

    @property
    def bytes(self) -> int:
        """The total bytes that machines with separate memories would have sent."""
        return _total(self._snapshot()[-1][3])

    @property
    def copied(self) -> int:
        """The total bytes that were copied here."""
        return _total(self._snapshot()[-1][4])

    def __repr__(self) -> str:
        return f"TransferLog({counted(len(self), 'transfer')}, {counted(self.bytes, 'byte')}, {self.copied} copied)"

    def __str__(self) -> str:
        return "\n".join(table(self._rows()))

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[Sequence[str]]:
        """Returns the cells of the table: the titles, a line for each kind of transfer, and the total."""
        groups, devices, columns = self._snapshot()
        heads = [(name, axis, "yes" if explicit else "no") for name, axis, explicit in groups]
        rows: list[Sequence[str]] = [("operator", "axis", "explicit", "transfers", "bytes", "copied", "per device")]
        *lines, total = _figures(len(groups), devices, columns)
        used = [(head, line) for head, line in zip(heads, lines, strict=True) if line[0]]
        for head, line in [*used, (("total", "", ""), total)]:
            rows.append((*head, *[f"{n:,}" for n in line]))
        return rows

    def by_operator(self) -> Iterator[tuple[str, str, int, int, str, str]]:
        """Yields for each operator, and each axis of a collective, its name, the axis, the number of transfers between
        devices, their bytes, and the names of the sources and of the destinations.
        """
        kinds, devices, (of, sources, destinations, nbytes, _) = self._snapshot()
        for k, (operator, axis, _) in enumerate(kinds):
            rows = (of == k) & (sources != destinations)
            if rows.any():
                ends = [span(sorted({devices[i] for i in np.unique(end[rows])})) for end in (sources, destinations)]
                yield operator, axis, int(rows.sum()), _total(nbytes[rows]), ends[0], ends[1]

    def by_device(self) -> dict[Device, tuple[int, int]]:
        """Returns the bytes that each device sent and received: a dict in the order of devices, with `st.HOST` last.

        Devices without transfers are not in it.

        >>> x = st.zeros((8, 2), dtype="float32", device=st.make_mesh((4,), ("x",)))
        >>> with st.transfers() as log:
        ...     y = x[1:] + 1
        >>> log.by_device()[st.devices()[1]]
        (8, 8)
        """
        return self._moved().sent_and_received()  # type: ignore[no-any-return]

    def picture(self, *, text: bool = False) -> Any:
        """Draws the bytes from each device to each other device.

        Args:
            text: whether to return text even if matplotlib is installed.

        Returns:
            A ``matplotlib.figure.Figure`` with a heat map; or, without matplotlib, an object that prints as a table,
                with shades instead of numbers where there are more than about twelve devices.

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
        return ABOVE["traffic_picture"](self._moved(), text=text)

    def _moved(self) -> Any:
        """Returns the bytes as a picture shows them, a `shardtensor.pictures.traffic_picture.Moved`."""
        _, devices, (_, sources, destinations, nbytes, _) = self._snapshot()
        away = sources != destinations
        return ABOVE["Moved"](devices, sources[away], destinations[away], nbytes[away])


def transfer_lines(log: TransferLog, beside: str = "") -> Iterator[str]:
    """Yields a line for each operator, and axis of a collective, in a log, except for the operator ``beside``."""
    for operator, axis, count, nbytes, sources, destinations in log.by_operator():
        if operator != beside:
            name = f"{operator} along {axis}" if axis else operator
            yield f"{name}: {counted(nbytes, 'byte')} from {sources} to {destinations} (transfers: {count})"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats the rows of a table, titles first and the total last, as lines."""
    columns = []
    for column in _shown(rows):
        put = str.ljust if column[0] in ("operator", "axis", "explicit") else str.rjust
        columns.append([put(cell, max(map(len, column))) for cell in column])
    title, *lines, total = ["  ".join(cells) for cells in zip(*columns, strict=True)]
    rule = "─" * len(title)
    return [title, rule, *lines, rule, total]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Formats the rows of a table, titles first and the total last, as HTML for notebooks."""
    return ABOVE["table_html"](list(zip(*_shown(rows), strict=True)))  # type: ignore[no-any-return]


def _shown(rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns the columns of a table, without the columns ``axis``, ``host`` and ``seconds`` where these are empty."""
    return [c for c in zip(*rows, strict=True) if c[0] not in ("axis", "host", "seconds") or any(c[1:])]


def _figures(count: int, devices: Sequence[Device], columns: _Columns) -> list[list[int]]:
    """Returns the numbers in the lines of the table: one line for each of the first ``count`` kinds, and the total."""
    kinds, sources, destinations, nbytes, copied = columns
    away = np.where(sources != destinations, nbytes, 0)
    ends = np.zeros((count, 2, len(devices)), np.int64)
    for direction, end in enumerate((sources, destinations)):
        np.add.at(ends.reshape(-1), (2 * kinds + direction) * len(devices) + end, away)
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
    """Returns the sum of a column, exact even beyond 64 bits."""
    return (int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum())


class TransferListener(Protocol):
    """An object that receives transfers while it is registered by `opened`."""

    def record(self, records: Callable[[], Iterable[Transfer]], cached: Callable[[], Recorded]) -> None:
        """Receives one call of `record_transfer`.

        ``cached`` returns its records, which are created once for all listeners; ``records`` is the function that
        creates them.
        """


_open: dict[object, TransferListener] = {}  # The keys are of one `with` block each.

_observing: set[object] = set()  # One object for each `with` block of a log or of a guard.
_switching = fork.lock()
_switch: Callable[[bool], object] = bool  # until `observed_by` is called


def observed_by(switch: Callable[[bool], object]) -> None:
    """Sets the function that is called with whether a log or a guard is active, in any context, when that changes."""
    global _switch
    _switch = switch


@contextlib.contextmanager
def _observed() -> Iterator[None]:
    """Counts as a log or a guard that is active, while the ``with`` block runs."""
    block = object()
    with _switching:  # Otherwise another thread could switch between the change and the call.
        _observing.add(block)
        _switch(True)
    try:
        yield
    finally:
        with _switching:
            _observing.discard(block)
            _switch(bool(_observing))


@contextlib.contextmanager
def opened(listener: TransferListener) -> Iterator[None]:
    """Registers a listener for the transfers of the whole process, while the ``with`` block runs."""
    block = object()
    with _observed():
        _open[block] = listener
        try:
            yield
        finally:
            del _open[block]


@contextlib.contextmanager
def transfers() -> Iterator[TransferLog]:
    """Records the transfers of the whole process while the ``with`` block runs, in a `TransferLog`.

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
    """Sets the policy for implicit transfers, in this thread and in the maps that it starts.

    A thread that is started in the block has the policy only if threads inherit context variables, as they do by
    default on a Python without a GIL.

    Args:
        policy: ``"allow"``; ``"log"``, which logs each one to the logger ``shardtensor``; or ``"disallow"``, which
            raises `TransferError` before any data is moved. The policy applies to transfers with ``bytes`` above 0,
            which separate memories would send.

    Explicit transfers (see `Transfer`) are always allowed.

    >>> mesh = st.make_mesh((4,), ("x",))
    >>> x, y = st.ones((4,), device=mesh), st.ones((4,), device=st.devices()[0])
    >>> with st.transfer_guard("disallow"):
    ...     x + y
    Traceback (most recent call last):
    shardtensor.errors.TransferError: add: moves 24 bytes implicitly, which transfer_guard("disallow") forbids; ...
    """
    if policy not in ("allow", "log", "disallow"):
        raise ArgumentError(f'transfer_guard: policy is {policy!r}; wanted "allow", "log" or "disallow"')
    with _observed() if policy != "allow" else contextlib.nullcontext():
        token = _policy.set(policy)
        try:
            yield
        finally:
            _policy.reset(token)


def guarded() -> bool:
    """Whether a policy other than ``"allow"`` applies to implicit transfers."""
    return _policy.get() != "allow"


class _Own(NamedTuple):
    """The listeners of a context, and, in `announced`, the listeners and the policy of the guard around it."""

    listeners: tuple[TransferListener, ...]
    around: tuple[_Own | None, str] | None = None


_own: ContextVar[_Own | None] = ContextVar("shardtensor_listeners", default=None)
_owners: list[object] = []


@contextlib.contextmanager
def recorded_by(*listeners: TransferListener) -> Iterator[None]:
    """Records the transfers of this context, and of maps in it, by these listeners only, and applies no guard to them,
    while the ``with`` block runs.
    """
    with _observed() if listeners else contextlib.nullcontext(), _owned(_Own(listeners)):
        yield


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Records only copies within a device while the ``with`` block runs: the transfers have been recorded by an
    inference, and the guard has been applied to them.
    """
    with _owned(_Own((), (_own.get(), _policy.get()))):
        yield


@contextlib.contextmanager
def announcing() -> Iterator[None]:
    """Records the transfers of the ``with`` block as around the block of `announced` that it is in, if it is in one:
    they have not been inferred.
    """
    own = _own.get()
    with _owned(*own.around) if own is not None and own.around is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _owned(own: _Own | None, policy: str = "allow") -> Iterator[None]:
    token, before = _own.set(own), _policy.set(policy)
    _owners.append(token)
    try:
        yield
    finally:
        _owners.remove(token)
        _policy.reset(before)
        _own.reset(token)


def _listeners(own: _Own | None) -> Sequence[TransferListener]:
    # Other threads may open and close some meanwhile.
    return tuple(_open.copy().values()) if own is None else own.listeners


def is_recording() -> bool:
    """Whether a listener or a guard is active. If not, transfers between devices that share a memory need no plan."""
    return bool((_open or _owners) and _listeners(_own.get())) or _policy.get() != "allow"


def announce(storage: Any) -> None:
    """Calls ``announce`` of a storage, which records the transfers of a read, if a log or a guard is active."""
    if ((_open or _owners) and _listeners(_own.get())) or _policy.get() != "allow":  # as `is_recording`
        storage.announce()


def record_transfer(operator: str, nbytes: int, explicit: bool, records: Callable[[], Iterable[Transfer]]) -> None:
    """Checks a transfer of ``nbytes`` against the guard before it starts, and passes its records to the listeners.

    ``records`` is called only if there are listeners: usually there are none, and the call costs two look-ups.

    Raises:
        TransferError: the transfer is implicit and the guard forbids it.
    """
    if not explicit and nbytes and (policy := _policy.get()) != "allow":
        if policy == "disallow":
            raise TransferError(
                f'{operator}: moves {counted(nbytes, "byte")} implicitly, which transfer_guard("disallow") forbids; '
                "move the operand yourself with st.device_put or st.reshard, or create it where it is needed"
            )
        logger().warning("%s: moves %d bytes implicitly", operator, nbytes)
    if (_open or _owners) and (listeners := _listeners(_own.get())):
        _record(listeners, records)


UNKNOWN_TRIPS: ContextVar[int] = ContextVar("shardtensor_unknown_trips", default=1)
"""The number of trips for which transfers of loops are inferred whose number of trips depends on elements."""


def record_copy(operator: str, nbytes: int, device: Device) -> None:
    """Records a copy within a device, to which the guard does not apply. It follows from ownership, so that it is
    recorded when it is made, and not by the inference of a call.
    """
    if nbytes and (_open or _owners):
        own = _own.get()
        while own is not None and own.around is not None:
            own = own.around[0]
        if listeners := _listeners(own):
            _record(listeners, lambda: [Transfer(0, nbytes, device, device, operator, True)])


def _record(listeners: Sequence[TransferListener], records: Callable[[], Iterable[Transfer]]) -> None:
    cached = functools.cache(lambda: new if isinstance(new := records(), TransferBatch) else tuple(new))
    for listener in listeners:
        listener.record(records, cached)
