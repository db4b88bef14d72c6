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
from typing import Any, NoReturn

from shardtensor.backend import load
from shardtensor.engine import ArrivalError, Bytes, DeviceEngine, Engine, LateError, Launch, LostError, default_engine
from shardtensor.errors import BackendError
from shardtensor_cupy import CuPyBackend
from shardtensor_cupy.discovery import usable_cupy
from shardtensor_cupy.nccl import library
from shardtensor_cupy.nccl_link import LATE, Link, group, named

_ID = 128
"""Bytes of the name of a communicator, which process 0 makes up."""

_DIGEST = 16
"""Bytes that stand for the hardware of a GPU."""

_OLDEST = 21900
"""The oldest NCCL, 2.19: older ones cannot abort while another thread uses them."""

_LOOK = 0.5
"""Seconds between two looks at what other processes tell, while the host waits for arrays."""

_POLL = 0.05
"""Seconds between two looks at whether the GPUs are connected."""


class NCCLEngine(DeviceEngine):
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
        self._link: Link | None = None
        self._backend: CuPyBackend | None = None
        self._told: dict[int, str] = {}
        self.process_index, self.process_count = host.process_index, host.process_count

    @classmethod
    def start(cls, launch: Launch | None, timeout: float) -> NCCLEngine:
        """See `Engine`."""
        usable_cupy()
        nccl = library()
        if nccl is None:
            raise BackendError(
                "engine 'nccl': CuPy finds no library of NCCL; `pip install nvidia-nccl-cu12` or `nvidia-nccl-cu13`, "
                "by the CUDA version of CuPy, or use engine 'mpi' or 'gloo'"
            )
        if (version := nccl.get_version()) < _OLDEST:
            raise BackendError(
                f"engine 'nccl' needs NCCL 2.19 or newer, and finds version {version}; install a newer one"
            )
        return cls(default_engine(launch).start(launch, timeout), nccl)

    # -- what the engine of the launcher does ------------------------------------------------------

    def agree(self, record: bytes, deadline: float) -> list[bytes]:
        """See `Engine`."""
        self._check()
        return self._host.agree(record, deadline)

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], deadline: float) -> None:
        """See `Engine`."""
        self._check()
        self._host.exchange(outgoing, incoming, deadline)

    def broadcast(self, message: Bytes, root: int, deadline: float) -> None:
        """See `Engine`."""
        self._check()
        self._host.broadcast(message, root, deadline)

    def absent(self) -> list[int]:
        """See `Engine`. What is on its way is given up, so that it does not keep the GPU busy for ever."""
        if self._link is not None:
            self._link.give_up(f"{LATE}: another process is lost")
        return self._host.absent()

    def notify(self, message: str) -> None:
        """See `Engine`."""
        self._host.notify(message)

    def notices(self) -> dict[int, str]:
        """See `Engine`."""
        self._told |= self._host.notices()
        return self._told

    def close(self, deadline: float) -> None:
        """See `Engine`. What is on its way arrives first, in all processes, however long their GPUs compute before."""
        if self._link is not None:
            assert self._backend is not None
            seconds, over = deadline - time.monotonic(), False
            while not over:
                is_over = self._link.wait(seconds / 2)
                self._check()
                deadline = time.monotonic() + seconds
                over = all(map(any, self._host.agree(bytes([is_over]), deadline)))
            self._link.disconnect(deadline)
            self._backend.arrivals = None
        self._host.close(deadline)

    def linger(self, seconds: float) -> None:
        """See `Engine`."""
        self._host.linger(seconds)

    def abort(self, status: int) -> Any:
        """See `Engine`."""
        return self._host.abort(status)

    def exit(self, status: int) -> Any:
        """See `Engine`."""
        return self._host.exit(status)

    def _check(self) -> None:
        if self._link is not None and self._link.failure:
            raise ArrivalError(self._link.failure)

    # -- GPUs --------------------------------------------------------------------------------------

    def join_devices(self, lose: Callable[[ArrivalError], NoReturn], told: Callable[[], str], deadline: float) -> None:
        """See `DeviceEngine`."""
        backend = load(self.device_backend)
        assert isinstance(backend, CuPyBackend)
        cuda: Any = importlib.import_module("cupy.cuda")
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
        communicator = self._connected(unique, cuda, gpus[0], deadline)
        self._backend = backend
        self._link = Link(cuda, self._nccl, communicator, backend, devices[0], gpus[0])
        backend.arrivals = Arrivals(self._link, lose, told)

    def _unique_id(self) -> bytes:
        """Returns the name of the communicator in process 0; zeros in the others, and if NCCL does not start."""
        if self.process_index:
            return bytes(_ID)
        try:
            return bytes([byte & 255 for byte in self._nccl.get_unique_id()])
        except (self._nccl.NcclError, KeyError):  # All processes raise an error, since they receive zeros.
            return bytes(_ID)

    def _connected(self, unique: bytes, cuda: Any, gpu: int, deadline: float) -> Any:
        """Connects the GPU to all others, in a thread: NCCL waits for the other processes without a time limit."""
        making: Future[Any] = Future()

        def make() -> None:
            try:
                cuda.Device(gpu).use()  # It stays current: to make GPU 0 current again would use its memory.
                communicator = self._communicator(unique)
                self._greet(communicator, cuda)
                making.set_result(communicator)
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
                f"engine 'nccl': process {self.process_index} cannot connect its GPU to the others: {named(error)}; "
                "set NCCL_DEBUG=INFO to see why"
            ) from error
        return making.result()

    def _communicator(self, unique: bytes) -> Any:
        create, count, own = self._nccl.NcclCommunicator, self.process_count, self.process_index
        try:
            return create(count, tuple([byte - 256 if byte > 127 else byte for byte in unique]), own)
        except OverflowError:  # CuPy takes the characters of C, which have no sign on some CPUs.
            return create(count, tuple(unique), own)

    def _greet(self, communicator: Any, cuda: Any) -> None:
        """Sends a byte to every process and receives one, so that NCCL connects all pairs of GPUs now: later calls
        then only queue messages.
        """
        nccl, stream = self._nccl, cuda.Stream(non_blocking=True)
        with stream:
            sent, received = cuda.alloc(1), cuda.alloc(self.process_count)
            with group(nccl):
                for process in range(self.process_count):
                    if process != self.process_index:
                        communicator.send(sent.ptr, 1, nccl.NCCL_UINT8, process, stream.ptr)
                        communicator.recv(received.ptr + process, 1, nccl.NCCL_UINT8, process, stream.ptr)
            stream.synchronize()

    def exchange_arrays(
        self, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Any]], deadline: float
    ) -> None:
        """See `DeviceEngine`. The time limit counts from when the GPU has come to the messages."""
        self._check()
        if self._link is not None and (outgoing or incoming):
            self._link.exchange(outgoing, incoming, deadline - time.monotonic())


class Arrivals:
    """What the backend asks before the host reads elements.

    Args:
        link: the connections of the GPU.
        lose, told: see `DeviceEngine.join_devices`.
    """

    def __init__(self, link: Link, lose: Callable[[ArrivalError], NoReturn], told: Callable[[], str]) -> None:
        self._link = link
        self._lose = lose
        self._told = told

    def wait(self) -> None:
        """Waits until what is on its way has arrived. Signals are handled meanwhile, as CUDA's own waits do not."""
        while not self._link.wait(_LOOK):
            if reason := self._told():
                self._link.give_up(reason)
        self.check()

    def check(self) -> None:
        """Raises the error, if arrays will not arrive."""
        if self._link.is_incomplete:
            self._lose(ArrivalError(self._link.failure))


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
