"""`Agreement`: checks that the processes of a job call the same, before they exchange bytes.

Each process notes its calls that concern other processes, in a running hash. Before an exchange, the processes compare
a small header: how many calls there were, their hash, and whether this process has failed or ended. Where the headers
differ, nothing is exchanged, and every process raises an error that names the first call that differs. A process that
does not come within the time limit is an error in all others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from shardtensor.communication.between_processes.difference import (
    DETAIL,
    Header,
    Report,
    State,
    compared,
    difference,
    function_of,
    processes_text,
)
from shardtensor.communication.engine_protocol import (
    ArrivalError,
    Bytes,
    DeviceEngine,
    Engine,
    LateError,
    LostError,
)
from shardtensor.errors import DistributedError, message_of
from shardtensor.host.units import counted
from shardtensor.places import Place, place_of, user_call, user_place

T = TypeVar("T")

Messages = tuple[Mapping[int, Bytes], Mapping[int, Bytes]]
"""The messages to other processes, and the memory for the messages from them, by the numbers of the processes."""

_HEADER = struct.Struct("<QQ16sB7x")
_KEPT = 64
"""How many of the last calls are kept, to find the first that differs."""

SHORT = 472
"""Bytes of a record that are sent with the header, so that they take no exchange of their own."""

_MESSAGE = 400
"""Characters of the message of an error."""

_MOMENT = 0.5
"""Seconds in which another process may tell why it has not sent arrays."""

_MORE, _NO_MORE = b"1", b"0"
"""Whether another exchange of an accompanied call follows."""


class _Window(NamedTuple):
    """Some successive calls; windows begin at multiples of `_KEPT`, in all processes.

    Attributes:
        begin: how many calls there were before.
        digest: the hash of these.
        calls: the calls.
    """

    begin: int
    digest: bytes
    calls: list[str]


class Agreement:
    """The calls of this process, and the exchanges of bytes with the other processes of a job.

    Args:
        engine: transports the bytes.
        timeout: seconds within which the other processes have to come to each exchange.

    Attributes:
        device_engine: the engine, if it sends arrays between devices.
        broken: why no exchange is possible any more; empty as long as there was no error.
        is_child: whether this process was forked from one of the job, and does not belong to it.
        sent: the bytes that were sent to each other process, without those of broadcasts and headers.
    """

    def __init__(self, engine: Engine, timeout: float) -> None:
        self.engine = engine
        self.device_engine = engine if isinstance(engine, DeviceEngine) else None
        self.timeout = timeout
        self.broken = ""
        self.is_child = False
        self.sent: Counter[int] = Counter()
        self._sequence = 0
        self._in_step = True  # Whether the processes made the same calls of the engine.
        self._calls = 0
        self._noted: list[str] = []  # The last calls, which the hash does not contain yet.
        self._errors: deque[str] = deque()  # Errors after these calls; any thread may add some at any time.
        self._hash = hashlib.blake2b(digest_size=16)  # Of all calls.
        self._windows = deque([_Window(0, b"", [])], maxlen=2)
        self._lock = threading.Lock()  # fork: nothing waits for it, and `leave` breaks the job.
        self._thread: int | None = None  # The only one that may make calls meanwhile, if there is one.
        self._accompanied = ""
        self._are_others_running = False  # When this process has failed.
        self._is_settled = False  # Whether the processes know what they exchange next.
        self._is_notifier = False  # Whether this process has told the others that it makes no more exchanges.

    # -- calls -------------------------------------------------------------------------------------

    def note(self, call: str) -> int:
        """Adds a call, which all processes have to make in the same order, to the running hash, and returns its number.

        Args:
            call: the operator with whatever has to be the same in all processes, as a user would read it.

        Raises:
            DistributedError: there was an error before, or another thread is in such a call.
        """
        if self.broken or self._is_others() or not self._lock.acquire(blocking=False):
            self._refuse(call)
        # The hash is computed at the next exchange: most calls move nothing between processes, and are short.
        self._append(call)
        if len(self._noted) >= _KEPT:
            self._hash_noted()
        number = self._calls + len(self._noted)
        self._lock.release()
        return number

    @property
    def count(self) -> int:
        """The number of calls so far."""
        return self._calls + len(self._noted)

    def note_error(self, call: str, error: BaseException) -> None:
        """Adds an error that a call has raised in this process. If it is raised in all processes, they go on; otherwise
        the next exchange raises an error in all of them. After an error of the job, this has no effect.

        While another thread is in a call that concerns several processes, the error comes after that call.
        """
        kind, _, message = " ".join(message_of(error).split())[:_MESSAGE].partition(": ")
        self._errors.append(f"{kind} in {call}{DETAIL}{_shown(place_of(error) or user_place())}{DETAIL}{message}")

    def _append(self, *calls: str) -> None:
        """Adds calls after the errors that came before. The lock is held."""
        while self._errors:
            self._noted.append(self._errors.popleft())
        self._noted += calls

    def _hash_noted(self) -> None:
        self._append()
        noted, self._noted = self._noted, []
        while noted:
            window = self._windows[-1].calls
            some, noted = noted[: _KEPT - len(window)], noted[_KEPT - len(window) :]
            window += some
            self._calls += len(some)
            text = "\n".join([*some, ""])
            self._hash.update((text if DETAIL not in text else "\n".join([*map(compared, some), ""])).encode())
            if len(window) == _KEPT:
                self._windows.append(_Window(self._calls, self._hash.digest(), []))

    def _last_calls(self) -> list[tuple[int, bytes, str]]:
        """Returns the last calls: their numbers, a hash of each and of all before it, and their texts."""
        self._hash_noted()
        history = []
        for begin, before, calls in self._windows:
            for number, call in enumerate(calls, begin + 1):
                before = hashlib.blake2b(before + compared(call).encode(), digest_size=4).digest()
                history.append((number, before, call))
        return history[-_KEPT:]

    def _last_call(self) -> tuple[int, bytes, str]:
        return (self._last_calls() or [(0, b"", "initialize")])[-1]

    def _function(self) -> str:
        return function_of(self._last_call()[2])

    # -- exchanges ---------------------------------------------------------------------------------

    def gather(self, call: str, record: bytes) -> list[bytes]:
        """Returns the records of all processes, in order. They have the same length, which follows from the call.

        Raises:
            DistributedError: the processes do not agree, one of them has failed, ended or not come in time.
        """
        self._acquire(call)  # Not by `_exclusive`: a generator takes longer than the rest of this method.
        try:
            if len(record) <= SHORT:
                return self._agree(call, record)
            self._agree(call)
            return self._engine_call(lambda deadline: self.engine.agree(record, deadline))
        finally:
            self._lock.release()

    def gather_texts(self, call: str, text: str) -> list[str]:
        """Returns the texts of all processes, in order.

        Raises:
            DistributedError: see `gather`.
        """
        data = text.encode()
        first = self.gather(call, (len(data).to_bytes(8, "little") + data)[:SHORT].ljust(SHORT, b"\0"))
        sizes = [int.from_bytes(row[:8], "little") for row in first]
        rows = [row[8:] for row in first]
        if max(sizes) > SHORT - 8:
            rows = self.gather(f"{call}: {counted(max(sizes), 'byte')}", data.ljust(max(sizes), b"\0"))
        return [row[:size].decode() for row, size in zip(rows, sizes, strict=True)]

    def exchange(self, call: str, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes]) -> None:
        """Sends and receives messages; see `Engine.exchange`. Messages without bytes are left out.

        Raises:
            DistributedError: see `gather`.
        """
        self.stream(call, [[(outgoing, incoming)]])

    def stream(self, call: str, rounds: Iterable[Iterable[Messages]]) -> None:
        """Sends and receives messages, one round after the other; the processes agree on the call once.

        Args:
            call: the call.
            rounds: yields for each round what is sent and received, and continues when it has arrived.

        Raises:
            DistributedError: see `gather`.
        """
        with self._in_exchange(call):
            for messages in rounds:
                for outgoing, incoming in messages:
                    self._engine_call(functools.partial(self._exchange, outgoing, incoming))

    def exchange_arrays(
        self, call: str, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Any]]
    ) -> None:
        """Sends and receives arrays of devices by an engine that does; see `DeviceEngine.exchange_arrays`.

        Raises:
            DistributedError: see `gather`. Elements that do not arrive later are an error where the host reads some.
        """
        assert self.device_engine is not None
        with self._in_exchange(call):
            for k, arrays in outgoing.items():
                self.sent[k] += sum([array.nbytes for array in arrays])
            self._engine_call(functools.partial(self.device_engine.exchange_arrays, outgoing, incoming))

    @contextlib.contextmanager
    def _in_exchange(self, call: str) -> Iterator[None]:
        """A context for the messages of a call, on which the processes agree first."""
        if self._accompanied and not self._is_others():
            call = self._accompanied
            self.gather(call, _MORE)
        with self._exclusive(call):
            if self._is_settled:
                self._append(call)
            else:
                self._agree(call)
            with self._in_the_middle():
                yield

    @contextlib.contextmanager
    def accompanied(self, call: str) -> Iterator[None]:
        """A context whose exchanges the processes that make another call go along with, in `accompany`."""
        with self._held(call):
            self._accompanied = call
            try:
                yield
            finally:
                self._accompanied = ""
            self.gather(call, _NO_MORE)

    @contextlib.contextmanager
    def settled(self, call: str) -> Iterator[None]:
        """A context whose exchanges follow from what the processes have told each other just before: they send messages
        without a header, and the next header compares them, too.
        """
        with self._held(call):
            self._is_settled = True
            try:
                yield
            finally:
                self._is_settled = False

    @property
    def sends_short(self) -> bool:
        """Whether arrays of few bytes may be sent by `gather`, in which processes that only go along take no part."""
        return not self._accompanied

    def accompany(self, call: str) -> None:
        """Takes part in the exchanges of a call that other processes make (see `accompanied`), with no messages."""
        while _MORE in self.gather(call, _NO_MORE):
            self.exchange(call, {}, {})

    def _exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], deadline: float) -> None:
        sent, received = ({k: m for k, m in messages.items() if m.size} for messages in (outgoing, incoming))
        for k, message in sent.items():
            self.sent[k] += message.size
        self.engine.exchange(sent, received, deadline)

    def broadcast(self, call: str, message: Bytes, root: int) -> None:
        """Copies the message of process ``root`` into that of the others.

        Raises:
            DistributedError: see `gather`.
        """
        with self._exclusive(call):
            self._agree(call)
            if message.size:
                self._engine_call(lambda deadline: self.engine.broadcast(message, root, deadline))

    def synchronize(self, call: str) -> None:
        """Waits until all processes have come to this call.

        Raises:
            DistributedError: see `gather`.
        """
        with self._exclusive(call):
            self._agree(call)

    def _agree(self, call: str, record: bytes = b"") -> list[bytes]:
        """Compares the headers, and returns the short records that all processes send with them."""
        self._append(call)
        return self._compare(State.RUNNING, record=record)

    def join_devices(self, timeout: float) -> None:
        """Connects the devices of the processes by an engine that does; see `DeviceEngine.join_devices`.

        Raises:
            BackendError: they cannot be connected.
            DistributedError: a process has failed, or does not come within so many seconds.
        """
        assert self.device_engine is not None
        with self._exclusive("initialize: devices"):
            try:
                self.device_engine.join_devices(self._lose, self._told, time.monotonic() + timeout)
            except (LateError, LostError) as error:
                told = self.engine.notices()
                self._in_step = False
                self.broken = f"initialize: {self._lost(told, [], False) if told else error}"
                raise DistributedError(self.broken) from error
            except BaseException as error:  # Raised again: NCCL has not connected the devices of this process.
                self._interrupted(error)
                raise

    def _lose(self, error: ArrivalError) -> NoReturn:
        """Raises the error that arrays have not arrived, where a thread reads some. It tells the other processes,
        unless a thread is in an exchange, which then meets the error itself: an engine has one caller at a time.
        """
        reason = str(error)
        if self._lock.acquire(blocking=False):
            try:
                reason = self._not_arrived(error)
            finally:
                self._lock.release()
        raise DistributedError(f"{reason}; restart all processes") from error

    def _told(self) -> str:
        """Returns what other processes have told, unless a thread is in an exchange, in which it finds that out."""
        if self.broken or not self._lock.acquire(blocking=False):
            return ""
        try:
            told = self.engine.notices()
            return self._lost(told, [], False) if told else ""
        finally:
            self._lock.release()

    def _not_arrived(self, error: ArrivalError) -> str:
        """Tells the other processes that arrays have not arrived, and returns why: what another process tells within a
        moment, or else the error.
        """
        if self.broken:
            return self.broken
        deadline = time.monotonic() + _MOMENT
        while not (told := self.engine.notices()) and time.monotonic() < deadline:
            time.sleep(_MOMENT / 20)
        self._interrupted(error, self._lost(told, [], False) if told else str(error))
        return self.broken

    # -- ends --------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> str:
        """Tells the other processes that this one has failed, at their next exchange; they raise an error that has the
        message of ``error``. Afterwards, this process exchanges nothing more.

        Returns:
            The message of their error, which says where they are; empty if all have failed, or this is not known.
        """
        if self.broken:
            return ""
        with contextlib.suppress(DistributedError), self._exclusive("exit"):
            self._compare(State.FAILED, error)
        self.broken = self.broken or "this process has failed"
        return self.broken if self._are_others_running else ""

    def end(self) -> None:
        """Leaves the job, once all processes want to.

        Raises:
            DistributedError: the other processes are still running, or called something else before they ended.
        """
        with self._exclusive("st.distributed.shutdown()"):
            self._compare(State.ENDED)
            self._engine_call(self.engine.close)
            self.broken = "st.distributed.shutdown() has ended the job"

    def leave(self) -> None:
        """In the child of a fork: exchanges nothing more. The connections are the parent's, and are not closed here."""
        self.is_child = True
        self.broken = (
            f"this process was forked from process {self.engine.process_index} of a job, and does not belong to the "
            "job; make calls that concern several processes in the parent, and use local devices here"
        )

    def abort(self, seconds: float) -> None:
        """Ends this process with exit status 1, after the others have come to the same point, or after some seconds."""
        try:
            if self._in_step:
                self.engine.agree(b"\0", time.monotonic() + seconds)
                self.engine.exit(1)
            else:
                if self._is_notifier:  # The others learn of it where they wait, and print it before this ends them.
                    self.engine.absent()
                self.engine.linger(seconds)
        except (ArrivalError, LateError, LostError):
            pass  # The others still compute, or have ended: this process does not wait for them.
        self.engine.abort(1)

    # -- the comparison ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self, call: str) -> Iterator[None]:
        self._acquire(call)
        try:
            yield
        finally:
            self._lock.release()

    def _acquire(self, call: str) -> None:
        """Acquires the lock for a call, or refuses the call."""
        if self.broken or self._is_others() or not self._lock.acquire(blocking=False):
            self._refuse(call)

    def _is_others(self) -> bool:
        """Whether another thread is in a call of several exchanges."""
        return self._thread is not None and self._thread != threading.get_ident()

    @contextlib.contextmanager
    def _held(self, call: str) -> Iterator[None]:
        """A context in which other threads make no calls, also not between the exchanges of this one."""
        with self._exclusive(call):
            self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def _refuse(self, call: str) -> NoReturn:
        if self.broken:
            raise DistributedError(f"{call}: {self.broken}{'' if self.is_child else '; restart all processes'}")
        raise DistributedError(
            f"{call}: another thread is in a call that concerns several processes; their order has to be the same "
            "in all processes, so make such calls in one thread"
        )

    def _compare(self, state: State, failure: BaseException | None = None, record: bytes = b"") -> list[bytes]:
        """Compares the headers of all processes, and returns the records that follow them.

        Raises:
            DistributedError: they differ, or do not all come in time.
        """
        self._hash_noted()
        self._sequence += 1
        packed = _HEADER.pack(self._sequence, self._calls, self._hash.digest(), state)
        sent = packed + record.ljust(SHORT, b"\0")
        rows = self._engine_call(lambda deadline: self.engine.agree(sent, deadline))
        packed_headers = [row[: _HEADER.size] for row in rows]
        if packed_headers.count(packed) == len(rows) and state is not State.FAILED:
            end = _HEADER.size + len(record)
            return [row[_HEADER.size : end] for row in rows]
        place, function = (place_of(failure), "") if failure else user_call()
        calls = {n: (digest.hex(), text) for n, digest, text in self._last_calls()}
        report = Report(
            _one_line(failure) if failure else "", _shown(place), function or self._function(), calls
        ).packed()
        reports = self._engine_call(lambda deadline: self.engine.agree(report, deadline))
        headers = [Header(*_HEADER.unpack(header)) for header in packed_headers]
        self._are_others_running = any(header.state != State.FAILED for header in headers)
        self.broken, details = difference(headers, list(map(Report.unpacked, reports)))
        raise DistributedError(self.broken, self._detailed(details))

    def _engine_call(self, function: Callable[[float], T]) -> T:
        """Returns the result of a call of the engine. After an error, the engine is not used again."""
        try:
            return function(time.monotonic() + self.timeout)
        except (LateError, LostError) as error:
            self._in_step = False
            told, absent = self.engine.notices(), self.engine.absent()
            self.broken = self._lost(told, absent, isinstance(error, LateError))
            raise DistributedError(self.broken, self._detailed(str(error))) from error
        except ArrivalError as error:
            reason = self._not_arrived(error)
            raise DistributedError(f"{reason}; restart all processes", self._detailed(str(error))) from error
        except BaseException as error:  # Ctrl-C, for example: what the other processes have received is not known.
            self._interrupted(error)
            raise

    def _lost(self, told: Mapping[int, str], absent: Sequence[int], late: bool) -> str:
        """Returns why an exchange is not possible: what other processes have told, or which of them do not answer."""
        if told:
            first = min(told)
            place, _, message = told[first].rpartition(DETAIL)
            return f"process {first} failed{f' at {place}' if place else ''}, in an exchange: {message}"
        them = processes_text(absent) if absent else "another process"
        if late:
            here, function = user_call()
            to = f"{_shown(here)} {function or self._function()}".strip()
            return f"{them} did not reach {to} within {self.timeout:g} s"
        return f"{them} {'has' if len(absent) < 2 else 'have'} ended or cannot be reached (killed, or the host is down)"

    @contextlib.contextmanager
    def _in_the_middle(self) -> Iterator[None]:
        """A context between the messages of an exchange: after an error in it, the others do not get their messages."""
        try:
            yield
        except BaseException as error:  # Raised again: later calls must not take messages of this exchange as theirs.
            self._interrupted(error)
            raise

    def _interrupted(self, error: BaseException, reason: str = "an exchange between processes was interrupted") -> None:
        """Tells the other processes that this one has left an exchange."""
        if self.broken:
            return
        self._in_step = False
        self._is_notifier = True
        self.broken = reason
        self.engine.notify(f"{_shown(place_of(error) or user_place())}{DETAIL}{_one_line(error)}")

    def _detailed(self, details: str) -> str:
        number, _, text = self._last_call()
        return f"process {self.engine.process_index}, call {number}, {text.replace(DETAIL, ': ')}: {details}"


def _one_line(error: BaseException) -> str:
    return " ".join(message_of(error).split())[:_MESSAGE]


def _shown(place: Place | None) -> str:
    return str(place) if place else ""
