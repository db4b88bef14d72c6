"""The engine over MPI, by mpi4py: processes are started by ``mpiexec``, ``srun`` or another launcher of MPI."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardtensor.communication.engine_protocol import Bytes, Engine, LateError, Launch, LostError
from shardtensor.errors import BackendError
from shardtensor.host.units import counted

if TYPE_CHECKING:
    from mpi4py.MPI import Request

_CHUNK = 1 << 30
"""Bytes of one message of MPI, whose counts are limited to 31 bits in some implementations."""

_SPINS = 100
"""How often a process that waits tests at once, before it passes its core on: about 50 µs, as long as processes that
call the same are apart.
"""

_YIELDS = 4000
"""How often a process that waits passes its core on before it sleeps: about as long as a message of 1 MiB takes."""

_LONGEST = 1024
"""Bytes of a notice: few enough that it is sent before the other process receives it."""

_SIGNS = 3.0
"""Seconds within which the other processes give a sign of life."""

_FINALIZES = 5
"""Seconds that finalizing MPI may take when the job ends after an error."""

_TASKS = "SLURM_STEP_NUM_TASKS"
"""The variable in which srun tells a process how many it has started."""

_WITHOUT_MPI = 'st.distributed.initialize(engine="gloo"), which needs PyTorch instead of MPI'

_DATA, _PRESENT, _NOTICE = 1, 2, 3
"""The tags of messages, and after an error of signs of life and of notices."""


class MPIEngine(Engine):
    """The engine over MPI.

    Nothing blocks inside MPI: every operation is started and then tested until it is complete, so that a deadline and
    Ctrl-C take effect. Records of `agree` use a communicator of their own. MPI is initialized for calls by one thread
    at a time, which is what all implementations do well.
    """

    name = "mpi"
    launchers = frozenset({"mpi", "slurm"})

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        world = mpi.COMM_WORLD
        self.process_index = world.Get_rank()
        self.process_count = world.Get_size()
        self._records = world.Dup()
        self._data = world.Dup()
        _unlink_shared_memory()
        self._notified: list[Any] = []  # Notices on their way, kept because MPI still reads them.
        self._given_up: Callable[[], bool] | None = None  # Tests the operation that was not complete: likewise.

    @classmethod
    def start(cls, launch: Launch | None, timeout: float) -> MPIEngine:
        """See `Engine`."""
        try:
            import mpi4py  # It may be missing.
        except ImportError:
            raise BackendError(
                "engine 'mpi' needs mpi4py: `pip install 'shardtensor[mpi]'` for the MPI of this site, or "
                "'shardtensor[mpi-local]', which brings one"
            ) from None
        mpi4py.rc.thread_level = "serialized"
        mpi4py.rc.finalize = False  # It would finalize MPI in forked children, too, which ends the parent's job.
        is_ours = "mpi4py.MPI" not in sys.modules
        try:
            from mpi4py import MPI  # It initializes MPI, as set above.
        except (ImportError, RuntimeError) as error:  # mpi4py looks for the library of MPI when it is imported.
            otherwise = f"; {_WITHOUT_MPI}" if _TASKS in os.environ else ""
            raise BackendError(f"engine 'mpi': mpi4py finds no library of MPI: {error}{otherwise}") from error
        if is_ours:
            atexit.register(_finalize, MPI, os.getpid())
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED and MPI.COMM_WORLD.Get_size() > 1:
            raise BackendError(
                "engine 'mpi': MPI was initialized for one thread only; call st.distributed.initialize before "
                "`from mpi4py import MPI`, or set mpi4py.rc.thread_level = 'serialized' before that import"
            )
        size = MPI.COMM_WORLD.Get_size()
        if launch is not None and launch.process_count != size:
            raise BackendError(_mismatch(launch, MPI.get_vendor()[0], size, os.environ))
        return cls(MPI)

    def agree(self, record: bytes, deadline: float) -> list[bytes]:
        """See `Engine`."""
        size = len(record)
        records = bytearray(self.process_count * size)  # It takes less time than an array of NumPy.
        request = self._records.Iallgather(record, records)
        self._wait(request.Test, deadline)
        return [bytes(records[k : k + size]) for k in range(0, len(records), size)]

    def exchange(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], deadline: float) -> None:
        """See `Engine`."""
        requests: list[Request] = []
        for source, message in incoming.items():
            requests += [self._data.Irecv(part, source, _DATA) for part in _chunks(message)]
        for destination, message in outgoing.items():
            requests += [self._data.Isend(part, destination, _DATA) for part in _chunks(message)]
        if requests:
            self._wait(lambda: self._mpi.Request.Testall(requests), deadline)

    def broadcast(self, message: Bytes, root: int, deadline: float) -> None:
        """See `Engine`."""
        for part in _chunks(message):
            self._wait(self._data.Ibcast(part, root).Test, deadline)

    def absent(self) -> list[int]:
        """See `Engine`."""
        others = {k for k in range(self.process_count) if k != self.process_index}
        sign = np.zeros(1, np.uint8)
        self._signs = [sign, [self._records.Isend(sign, k, _PRESENT) for k in others]]  # Kept: MPI still reads it.
        deadline = time.monotonic() + _SIGNS
        while others and time.monotonic() < deadline:
            status = self._mpi.Status()
            if self._records.Iprobe(self._mpi.ANY_SOURCE, _PRESENT, status):
                self._records.Recv(np.empty(1, np.uint8), status.Get_source(), _PRESENT)
                others.discard(status.Get_source())
            else:
                time.sleep(1e-3)
        return sorted(others)

    def notify(self, message: str) -> None:
        """See `Engine`."""
        text = np.frombuffer(message.encode()[:_LONGEST], np.uint8)
        others = [k for k in range(self.process_count) if k != self.process_index]
        self._notified.append((text, [self._records.Isend(text, k, _NOTICE) for k in others]))

    def notices(self) -> dict[int, str]:
        """See `Engine`."""
        texts, status = {}, self._mpi.Status()
        while self._records.Iprobe(self._mpi.ANY_SOURCE, _NOTICE, status):
            text = np.empty(status.Get_count(), np.uint8)
            self._records.Recv(text, status.Get_source(), _NOTICE)
            texts[status.Get_source()] = text.tobytes().decode(errors="replace")
        return texts

    def close(self, deadline: float) -> None:
        """See `Engine`. MPI itself is finalized when the process ends."""
        self._records.Free()
        self._data.Free()

    def abort(self, status: int) -> NoReturn:
        """See `Engine`."""
        self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    def exit(self, status: int) -> NoReturn:
        """See `Engine`. MPI is finalized first: mpiexec drops the output that it has not read when a process aborts."""
        # MPI waits for messages of the program's own. The default action of this signal then ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_FINALIZES)
        self._mpi.Finalize()
        os._exit(status)

    def _wait(self, is_complete: Callable[[], bool], deadline: float) -> None:
        """Tests an operation until it is complete. After an error, its memory is kept: MPI may still write there."""
        self._given_up = is_complete
        tests = 0
        while not is_complete():
            tests += 1
            if tests < _SPINS:
                continue
            if tests < _YIELDS:
                os.sched_yield()
                if tests % 64:
                    continue
            else:
                time.sleep(1e-4)
            if self._records.Iprobe(self._mpi.ANY_SOURCE, _NOTICE):
                raise LostError
            if time.monotonic() > deadline:
                raise LateError
        self._given_up = None


def _mismatch(launch: Launch, library: str, size: int, environ: Mapping[str, str]) -> str:
    """Returns the message of an error: the library of MPI knows another number of processes than the launcher."""
    started = counted(launch.process_count, "process", "processes")
    if _TASKS in environ:
        return (
            f"engine 'mpi': srun has started {started}, and {library}, the library of MPI that mpi4py uses, knows "
            f"{size}, because srun does not pass the numbers in the form (PMI) that this library reads; use "
            "`srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for most builds of MPICH and Intel MPI "
            f"(`srun --mpi=list` shows which there are), or {_WITHOUT_MPI}"
        )
    return (
        f"engine 'mpi': {launch.source} says that there are {started}, and {library}, the library of MPI that mpi4py "
        f"uses, has started {size}; the launcher belongs to another MPI: use the mpiexec that is installed with this "
        "library"
    )


def _finalize(mpi: Any, process: int) -> None:
    """Finalizes MPI at the end of this process, not of its forked children."""
    if os.getpid() == process and not mpi.Is_finalized():
        mpi.Finalize()


def _unlink_shared_memory() -> None:
    """Removes the names of MPICH's shared memory, once all processes of this host have mapped it: a process that is
    killed or aborts leaves the name, and with it the memory, until the host is restarted. It stays mapped.
    """
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:  # Not Linux.
        return
    for path in {line.split()[-1] for line in mapped.splitlines() if "/dev/shm/mpich_shm" in line}:
        Path(path).unlink(missing_ok=True)  # Another process may have removed it.


def _chunks(message: Bytes) -> Sequence[Bytes]:
    return [message[k : k + _CHUNK] for k in range(0, len(message), _CHUNK)]
