"""The engine over NCCL: arrays go from the memory of one GPU to that of another, without the host.

All else is done by the engine of the launcher, MPI or Gloo: it compares the calls of the processes, sends what is in
host memory, and finds out which process is lost. NCCL only sends and receives arrays. Sums add what was received along
the same tree as without NCCL, so that they have the same bits.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, NoReturn

from shardtensor.backend import Backend, Device, load
from shardtensor.engine import Bytes, Engine, LateError, Launch, LostError, load_engine
from shardtensor.errors import BackendError
from shardtensor_cupy.nccl import library

_ID = 128
"""Bytes of the name of a communicator, which process 0 makes up."""

_DIGEST = 16
"""Bytes that stand for the hardware of a GPU."""

_POLL = 0.05
"""Seconds between two looks at what is on its way."""


class NCCLEngine(Engine):
    """The engine over NCCL, on top of that of the launcher. Each process uses one GPU.

    Args:
        host: the engine of the launcher.
        nccl: the module cupy.cuda.nccl.
    """

    name = "nccl"
    launchers = frozenset({"address", "mpi", "slurm", "torchrun"})
    device_backend = "cupy"

    def __init__(self, host: Engine, nccl: Any) -> None:
        self._host = host
        self._nccl = nccl
        self._link: _Link | None = None
        self._told: dict[int, str] = {}
        self.process_index, self.process_count = host.process_index, host.process_count

    @classmethod
    def start(cls, launch: Launch | None, timeout: float) -> NCCLEngine:
        """See `Engine`. Without an address, the processes are connected by MPI."""
        nccl = library()
        if nccl is None:
            raise BackendError(
                "engine 'nccl' needs CuPy and NCCL, and CuPy finds no library of NCCL; `pip install nvidia-nccl-cu12` "
                "or `nvidia-nccl-cu13`, by the CUDA version of CuPy, or use engine 'mpi' or 'gloo'"
            )
        is_mpi = launch is None or launch.address is None
        return cls(load_engine("mpi" if is_mpi else "gloo").start(launch, timeout), nccl)

    # -- what the engine of the launcher does ------------------------------------------------------

    def agree(self, record: bytes, deadline: float) -> list[bytes]:
        """See `Engine`."""
        self._raise_failure()
        return self._host.agree(record, deadline)

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], deadline: float) -> None:
        """See `Engine`."""
        self._raise_failure()
        self._host.exchange(outgoing, incoming, deadline)

    def broadcast(self, message: Bytes, root: int, deadline: float) -> None:
        """See `Engine`."""
        self._raise_failure()
        self._host.broadcast(message, root, deadline)

    def absent(self) -> list[int]:
        """See `Engine`."""
        self._abandon()
        return self._host.absent()

    def notify(self, message: str) -> None:
        """See `Engine`."""
        self._host.notify(message)

    def notices(self) -> dict[int, str]:
        """See `Engine`."""
        self._told |= self._host.notices()
        return self._told

    def close(self, deadline: float) -> None:
        """See `Engine`. What is on its way arrives first."""
        if self._link is not None:
            self._link.close(deadline)
        self._host.close(deadline)

    def linger(self, seconds: float) -> None:
        """See `Engine`."""
        self._abandon()
        self._host.linger(seconds)

    def abort(self, status: int) -> Any:
        """See `Engine`."""
        self._abandon()
        return self._host.abort(status)

    def exit(self, status: int) -> Any:
        """See `Engine`."""
        self._abandon()
        return self._host.exit(status)

    def _raise_failure(self) -> None:
        if self._link is not None and self._link.failure is not None:
            raise self._link.failure

    def _abandon(self) -> None:
        """Ends what is on its way, which would keep the GPU busy for ever when another process has ended."""
        if self._link is not None:
            self._link.fail(LostError("the connections between the GPUs were given up after an error"))

    # -- GPUs --------------------------------------------------------------------------------------

    def join_devices(self, lose: Callable[[LateError | LostError], NoReturn], deadline: float) -> None:
        """See `Engine`."""
        backend: Any = load(self.device_backend)
        cupy: Any = importlib.import_module("cupy")
        devices = backend.devices()
        gpus = sorted({backend.memory_space(device) for device in devices})
        hardware = backend.hardware()[gpus[0]]
        record = len(gpus).to_bytes(2, "little") + hashlib.blake2b(hardware.encode(), digest_size=_DIGEST).digest()
        rows = self._host.agree(record + self._unique_id(), deadline)
        _check_gpus([(int.from_bytes(row[:2], "little"), row[2 : 2 + _DIGEST]) for row in rows])
        unique = rows[0][2 + _DIGEST :]
        if not any(unique):
            raise BackendError(
                "engine 'nccl': process 0 cannot start NCCL; set NCCL_DEBUG=INFO to see why, and look at "
                "NCCL_SOCKET_IFNAME, which selects the network"
            )
        communicator = self._communicator(unique, cupy.cuda.Device(gpus[0]), deadline)
        self._link = link = _Link(cupy.cuda, self._nccl, communicator, backend, devices[0], gpus[0])

        def check() -> None:
            if link.failure is not None:
                lose(link.failure)

        backend.arrival_checks.append(check)

    def _unique_id(self) -> bytes:
        """Returns the name of the communicator in process 0; zeros in the others, and if NCCL does not start."""
        if self.process_index:
            return bytes(_ID)
        try:
            return bytes([byte & 255 for byte in self._nccl.get_unique_id()])
        except self._nccl.NcclError:  # All processes raise an error, since they receive zeros.
            return bytes(_ID)

    def _communicator(self, unique: bytes, gpu: Any, deadline: float) -> Any:
        """Connects the GPUs, in a thread: NCCL waits for all processes without a time limit."""
        signed = tuple([byte - 256 if byte > 127 else byte for byte in unique])
        making: Future[Any] = Future()

        def make() -> None:
            try:
                with gpu:
                    making.set_result(self._nccl.NcclCommunicator(self.process_count, signed, self.process_index))
            except BaseException as error:
                making.set_exception(error)

        threading.Thread(target=make, name="shardtensor-nccl-start", daemon=True).start()
        while not wait([making], _POLL).done:
            if self.notices():
                raise LostError("another process has failed")
            if time.monotonic() > deadline:
                raise LateError("NCCL has not connected the GPUs in time; set NCCL_DEBUG=INFO to see what it waits for")
        error = making.exception()
        if isinstance(error, Exception):
            raise BackendError(
                f"engine 'nccl': process {self.process_index} cannot connect its GPU to the others: {_named(error)}; "
                "set NCCL_DEBUG=INFO to see why"
            ) from error
        return making.result()

    def exchange_arrays(
        self, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Any]], deadline: float
    ) -> None:
        """See `Engine`."""
        self._raise_failure()
        if self._link is not None and (outgoing or incoming):
            self._link.exchange(outgoing, incoming, deadline)


def _check_gpus(gpus: Sequence[tuple[int, bytes]]) -> None:
    """Checks that each process has one GPU, and no other one has the same.

    Raises:
        BackendError: in all processes.
    """
    for k, (count, hardware) in enumerate(gpus):
        if count != 1:
            raise BackendError(
                f"engine 'nccl' needs one GPU for each process, and process {k} has {count}; start one process for "
                "each GPU, or use engine 'mpi' or 'gloo'"
            )
        if (first := [own for _, own in gpus].index(hardware)) < k:
            raise BackendError(
                f"engine 'nccl': processes {first} and {k} use the same GPU, which NCCL refuses; start at most one "
                "process for each GPU, or use engine 'mpi' or 'gloo'"
            )


class _Flight:
    """Arrays that are on their way.

    Attributes:
        deadline: the time at which they must have arrived.
        event: the event after which they have; None while NCCL has not queued them.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.event: Any = None


class _Link:
    """The connection of this process's GPU to those of the others.

    Arrays are sent and received on the stream of all computations. Memory that was allocated on that stream may
    therefore be released at once: what reuses it comes later on the stream. NCCL waits for the other processes on the
    GPU, without a time limit, so that a thread watches what is on its way, and aborts the communicator if that fails or
    is late.

    Args:
        cuda, nccl: the modules cupy.cuda and cupy.cuda.nccl.
        communicator: NCCL's communicator of all processes.
        backend, device: the backend, and a device of the GPU.
        gpu: the number of the GPU.

    Attributes:
        failure: why nothing arrives any more; what has not arrived has no defined elements.
    """

    def __init__(self, cuda: Any, nccl: Any, communicator: Any, backend: Backend, device: Device, gpu: int) -> None:
        self._cuda, self._nccl = cuda, nccl
        self._communicator = communicator
        self._backend, self._device, self._gpu = backend, device, gpu
        self.failure: LateError | LostError | None = None
        self._aborting = threading.Lock()  # fork: no job in children
        self._flights: SimpleQueue[_Flight | None] = SimpleQueue()  # fork: no job in children
        self._watcher = threading.Thread(target=self._watch, name="shardtensor-nccl", daemon=True)
        self._watcher.start()

    def exchange(
        self, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Any]], deadline: float
    ) -> None:
        """Queues the messages as one group, in which NCCL sends and receives at the same time."""
        flight, cuda, nccl = _Flight(deadline), self._cuda, self._nccl
        self._flights.put(flight)  # Before the calls, which wait until the GPUs are connected to each other.
        try:
            with self._backend.on(self._device):
                stream = cuda.get_current_stream()
                nccl.groupStart()
                try:
                    for send, messages in ((self._communicator.send, outgoing), (self._communicator.recv, incoming)):
                        for process, arrays in messages.items():
                            for array in arrays:
                                send(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, process, stream.ptr)
                finally:
                    nccl.groupEnd()
                event = cuda.Event(disable_timing=True)
                event.record(stream)
        except Exception as error:
            self.fail(LostError(f"NCCL: {_named(error)}"))
            assert self.failure is not None
            raise self.failure from error
        flight.event = event

    def fail(self, failure: LateError | LostError) -> None:
        """Aborts the communicator, so that the GPU goes on; what has failed first is kept."""
        with self._aborting:
            if self.failure is None:
                self.failure = failure
                self._communicator.abort()

    def close(self, deadline: float) -> None:
        """Waits until everything has arrived, and disconnects the GPU.

        Raises:
            LateError, LostError: something has not arrived.
        """
        self._flights.put(None)
        self._watcher.join(max(deadline - time.monotonic(), 0))
        if self.failure is not None:
            raise self.failure
        if self._watcher.is_alive():
            raise LateError("arrays have not arrived in time")
        self._communicator.destroy()

    def _watch(self) -> None:
        """Aborts the communicator if arrays are late, or NCCL reports an error."""
        try:
            with self._cuda.Device(self._gpu):
                while self.failure is None and (flight := self._flights.get()) is not None:
                    while flight.event is None or not flight.event.done:
                        with self._aborting:
                            if self.failure is not None:
                                return
                            self._communicator.check_async_error()
                        if time.monotonic() > flight.deadline:
                            raise LateError("arrays have not arrived in time")
                        time.sleep(_POLL)
        except LateError as error:
            self.fail(error)
        except Exception as error:
            self.fail(LostError(f"NCCL: {_named(error)}"))


def _named(error: Exception) -> str:
    """Returns the message of an error of NCCL. CuPy raises a KeyError for numbers that it does not know."""
    return f"error {error}" if isinstance(error, KeyError) else str(error)
