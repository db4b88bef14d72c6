"""`Engine`: the protocol of the plugins that transport bytes between the processes of a job.

An engine moves bytes and knows nothing else: no dtype, no tensor, no mesh. One may also move arrays between devices.
What the processes call, and whether they call the same, is checked above it, by
`shardtensor.communication.between_processes.agreement`.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""A contiguous array of bytes: memory that a message is read from or written to."""


class Launch(NamedTuple):
    """What is known of a process before its engine starts.

    Attributes:
        process_index: the number of this process, from 0 on.
        process_count: the number of processes.
        address: ``host:port`` on which process 0 can be reached; None where the launcher connects the processes.
        source: where this was found, for error messages.
    """

    process_index: int
    process_count: int
    address: str | None
    source: str


class LateError(TimeoutError):
    """Processes have not come before the deadline of a call of an engine. Only engines raise it, so that it differs
    from the `TimeoutError` of a signal handler that runs while an engine waits.
    """


class LostError(ConnectionError):
    """The connection to a process is lost, or a process has told by `Engine.notify` that it comes no more. Only engines
    raise it, so that it differs from the `ConnectionError` of a signal handler.
    """


class ArrivalError(ConnectionError):
    """Arrays that `DeviceEngine.exchange_arrays` sends or receives do not arrive, as this process finds out by itself:
    the other processes do not know of it yet. Only engines raise it.
    """


class Engine(abc.ABC):
    """Transports bytes between the processes of a job.

    Every method but `abort`, `absent`, `linger`, `notify` and `notices` is called by all processes in the same order,
    by one thread at a time. Most of them have a deadline, a time of `time.monotonic`. After an error the engine is not
    used again, but for these five. Errors of other code, such as those of signal handlers, are passed on unchanged.

    An implementation imports `shardtensor.engine` and `shardtensor.errors` only, and is registered in the entry-point
    group ``shardtensor.engines``. The tests in `shardtensor.testing.EngineTests` are its specification.

    Attributes:
        name: the name of the entry point.
        launchers: the launchers whose processes this engine can connect; see
            `shardtensor.communication.between_processes.launchers`.
        process_index: the number of this process.
        process_count: the number of processes.
    """

    name: ClassVar[str]
    launchers: ClassVar[frozenset[str]] = frozenset()
    process_index: int
    process_count: int

    @classmethod
    @abc.abstractmethod
    def start(cls, launch: Launch | None, timeout: float) -> Engine:
        """Connects this process to the others and returns the engine.

        Args:
            launch: the number of this process and of all; None if the engine has to find out.
            timeout: seconds within which all processes have to be connected, once the engine's library is imported.

        Raises:
            BackendError: a library is missing, or does not belong to the launcher.
            ArgumentError: an address cannot be used, or numbers of processes contradict each other.
            LateError: some processes have not started in time; the message names them.
        """

    @abc.abstractmethod
    def agree(self, record: bytes, deadline: float) -> list[bytes]:
        """Returns the records of all processes, in order. They all have the same length, which is not 0.

        Raises:
            LateError: a process has not called this before the deadline.
            LostError: the connection to a process is lost, or it has called `notify`.
        """

    @abc.abstractmethod
    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], deadline: float) -> None:
        """Sends a message to each process in ``outgoing``, and receives one from each in ``incoming``.

        Both sides know the size of each message; it is not 0, and no process sends to itself.

        Args:
            outgoing: the messages by the number of the process that receives them.
            incoming: the memory to receive into, by the number of the process that sends.

        Raises:
            LateError, LostError: see `agree`.
        """

    @abc.abstractmethod
    def broadcast(self, message: Bytes, root: int, deadline: float) -> None:
        """Copies the message of process ``root`` into the memory that the other processes give.

        Raises:
            LateError, LostError: see `agree`.
        """

    @abc.abstractmethod
    def absent(self) -> list[int]:
        """Returns the processes that do not answer within a few seconds, after an error of this engine.

        The others call this too, at about the same time. It may be that nothing can be found out; then the result is
        empty.
        """

    def notify(self, message: str) -> None:  # noqa: B027  An engine may have no way to do it.
        """Tells the other processes, without waiting for them, why this one makes no more calls: an error was raised
        while an exchange was under way. A process that waits for this one, or comes to wait, then soon raises
        `LostError`.

        By default this has no effect, and the others raise an error without the message when this process ends.
        """

    def notices(self) -> dict[int, str]:
        """Returns what other processes have told by `notify`, by their numbers. By default this is empty."""
        return {}

    @abc.abstractmethod
    def close(self, deadline: float) -> None:
        """Disconnects this process, after all have agreed to end."""

    def linger(self, seconds: float) -> None:
        """Waits before this process ends after an error, at most that long, while others may need it to find out which
        processes are missing. By default, process 0 ends last.
        """
        time.sleep(seconds if self.process_index == 0 else min(seconds, 1))

    @abc.abstractmethod
    def abort(self, status: int) -> Any:
        """Ends this process at once with an exit status, and the others if the engine can; it does not return."""

    def exit(self, status: int) -> Any:
        """Ends this process with an exit status, after all have agreed to end; it does not return.

        By default this is `abort`. An engine whose launcher loses the output of processes that abort overrides it.
        """
        self.abort(status)


class DeviceEngine(Engine):
    """An engine that also sends arrays from the devices of a process to those of another one. Without such an engine,
    arrays are copied to host memory, and sent from there.

    Attributes:
        device_backend: the name of the backend of the devices.
    """

    device_backend: ClassVar[str]

    @abc.abstractmethod
    def join_devices(self, lose: Callable[[ArrivalError], NoReturn], told: Callable[[], str], deadline: float) -> None:
        """Connects the devices of the processes. It is called once, when each process knows its own devices, and before
        `exchange_arrays`.

        Args:
            lose: raises the error of the job for an `ArrivalError`. An engine whose `exchange_arrays` returns before
                the arrays have arrived has the backend call it where the host reads elements that have not.
            told: returns what other processes have told by `notify`, or an empty text. A thread that waits for arrays
                may call it.
            deadline: see `Engine`.

        Raises:
            BackendError: the devices cannot be connected; it is raised in all processes.
            LateError, LostError: see `Engine.agree`.
        """

    @abc.abstractmethod
    def exchange_arrays(
        self, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Any]], deadline: float
    ) -> None:
        """Sends arrays to each process in ``outgoing``, and receives arrays from each in ``incoming``, in order.

        The arrays are on devices, in row-major order, and have elements. Both sides know their shapes and dtypes. The
        engine orders this after the work on the devices so far, and later work on the devices after it, so that it may
        return before the elements have arrived. If they do not, later calls of the engine raise `ArrivalError`.

        Args:
            outgoing: the arrays by the number of the process that receives them.
            incoming: the arrays that receive the elements, by the number of the process that sends.
            deadline: the time at which the elements must have arrived.

        Raises:
            ArrivalError: see above.
            LateError, LostError: see `Engine.agree`.
        """
