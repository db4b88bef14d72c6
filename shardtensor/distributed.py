"""Programs of several processes: each runs the same script, on one host or on many (JAX's multi-controller model).

`initialize` connects the processes and makes their devices known to each other, so that meshes and tensors span them.
The utilities exchange host arrays, and make tensors from what each process has. The names are those of
``jax.distributed`` and of ``jax.experimental.multihost_utils``. docs/many_processes.md explains how to start programs,
and what to look at when one hangs.

>>> st.distributed.is_initialized()
False
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from traceback import format_exception_only
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardtensor.backend import registry
from shardtensor.backend.protocol import hardware_shares
from shardtensor.backend.registry import local_devices
from shardtensor.communication.between_processes.agreement import Agreement
from shardtensor.communication.between_processes.difference import processes_text
from shardtensor.communication.between_processes.forgotten import remind
from shardtensor.communication.between_processes.launchers import engine_and_launch
from shardtensor.communication.between_processes.processes import JOB, connected
from shardtensor.communication.between_processes.rounds import as_bytes
from shardtensor.communication.engine_protocol import LateError, LostError
from shardtensor.communication.transfer import gather_across, is_one_in_all
from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, BackendError, DistributedError
from shardtensor.functions.placement.global_arrays import (
    gather_to,
    global_array_to_host_local_array,
    host_local_array_to_global_array,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
)
from shardtensor.hints import missing
from shardtensor.host.fork import in_children
from shardtensor.host.units import counted
from shardtensor.tensor.pytree import leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tracebacks import text_of

__all__ = [
    "assert_equal",
    "broadcast_one_to_all",
    "gather_to",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "initialize",
    "is_initialized",
    "local_devices",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "process_allgather",
    "process_count",
    "process_index",
    "shutdown",
    "sync_global_devices",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # Type checkers would take it for a definition of every name.

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)


T = TypeVar("T")

_DIGEST = 16
"""Bytes of the hash of an array."""

_TOGETHER = 5.0
"""Seconds that a process that ends with an error waits for the others, so that each can print its own error."""


# -- the job ---------------------------------------------------------------------------------------


@hinted
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    engine: str | None = None,
    timeout: float | None = None,
    initialization_timeout: float | None = None,
) -> None:
    """Connects this process to the others of its job. All of them call this once, at their start.

    Without arguments, the numbers are taken from the environment that the launcher has set: ``mpiexec`` and other
    launchers of MPI, ``srun``, ``torchrun``, ``shardtensor launch``, or an indexed Job of Kubernetes together with the
    variables ``SHARDTENSOR_COORDINATOR_ADDRESS`` and ``SHARDTENSOR_NUM_PROCESSES``. Where you start the processes
    yourself, give all three.

    Afterwards an exception that ends one process ends the others with an error that contains its message, and standard
    output is written line by line, so that lines of several processes are not mixed.

    Args:
        coordinator_address: ``host:port`` at which the other processes reach process 0; any free port.
        num_processes: the number of processes.
        process_id: the number of this process, from 0 on.
        engine: ``"mpi"`` (needs mpi4py), ``"gloo"`` (needs PyTorch), ``"local"`` (one process) or that of a plugin; by
            default the one that belongs to the launcher, and ``"gloo"`` for an address. ``"nccl"`` uses one of these
            two, and sends arrays from GPU to GPU itself; it needs one GPU for each process.
        timeout: seconds that each exchange waits for the other processes; by default 300, or the environment variable
            ``SHARDTENSOR_TIMEOUT``.
        initialization_timeout: seconds that this call waits for them, not counting imports; by default the same.

    Raises:
        ArgumentError: arguments are missing, or contradict each other, the environment, or those of other processes.
        BackendError: the engine's library is missing or does not belong to the launcher, or it cannot connect the GPUs.
        DistributedError: it was called before, or processes have not come in time.

    >>> st.distributed.initialize(engine="local")
    >>> st.distributed.process_index(), st.distributed.process_count()
    (0, 1)
    >>> st.distributed.shutdown()
    """
    JOB.was_requested = True
    if JOB.agreement is not None:
        if JOB.agreement.is_child:
            JOB.agreement.note("initialize")  # This raises the error.
        raise DistributedError("initialize: this process is initialized already; call it once, at the start")
    limit = _seconds("timeout", timeout)
    start_limit = _seconds("initialization_timeout", initialization_timeout)
    try:
        chosen, launch = engine_and_launch(engine, coordinator_address, num_processes, process_id)
        started = chosen.start(launch, start_limit)
    except LateError as error:
        raise DistributedError(f"initialize: {error}") from error
    except ArgumentError as error:
        raise ArgumentError(f"initialize: {error}") from None
    job = Agreement(started, limit)
    _check_alike(job)
    if started.process_count > 1:
        _agree_on_devices(job, start_limit)
    JOB.agreement = job
    atexit.register(_at_exit)
    if started.process_count > 1:
        sys.excepthook = functools.partial(_excepthook, sys.excepthook)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # PYTHONUNBUFFERED, which images of containers set, would write a line and its end separately.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)


def shutdown() -> None:
    """Disconnects this process, after all processes have called this; it is called when a process ends. A checkpoint in
    the background is completed first.

    Raises:
        DistributedError: the other processes have not called the same before, have failed, or do not come in time.
        OSError: a file of the checkpoint could not be written; this process is still connected.
    """
    if JOB.agreement is None:
        return
    for function in JOB.before_end:
        function()
    JOB.agreement.end()
    JOB.agreement = None
    atexit.unregister(_at_exit)
    hook = sys.excepthook
    if isinstance(hook, functools.partial) and hook.func is _excepthook:
        (sys.excepthook,) = hook.args


def is_initialized() -> bool:
    """Returns whether this process is connected to others, or is a job of one process."""
    return JOB.agreement is not None


def process_index() -> int:
    """Returns the number of this process, from 0 on; 0 before `initialize`.

    >>> st.process_index()
    0
    """
    if JOB.agreement is None:
        remind()
        return 0
    return JOB.agreement.engine.process_index


def process_count() -> int:
    """Returns the number of processes; 1 before `initialize`.

    >>> st.process_count()
    1
    """
    if JOB.agreement is None:
        remind()
        return 1
    return JOB.agreement.engine.process_count


# -- utilities -------------------------------------------------------------------------------------


def broadcast_one_to_all(in_tree: T, is_source: bool | None = None) -> T:
    """Returns the arrays of one process in every process.

    Args:
        in_tree: a pytree of arrays, of the same structure, shapes and dtypes in all processes.
        is_source: whether this process sends; true in exactly one process. By default, process 0 sends.

    Returns:
        A pytree of NumPy arrays.

    Raises:
        ArgumentError: no process sends, or several do.
        DistributedError: the processes call something else, or give arrays of other shapes or dtypes.

    >>> st.distributed.initialize(engine="local")
    >>> st.distributed.broadcast_one_to_all({"w": np.arange(3)})
    {'w': array([0, 1, 2])}
    >>> st.distributed.shutdown()
    """
    job = connected("broadcast_one_to_all")
    arrays = _arrays("broadcast_one_to_all", in_tree)
    root = 0
    if is_source is not None:
        flags = job.gather("broadcast_one_to_all: is_source", bytes([bool(is_source)]))
        sources = [k for k, flag in enumerate(flags) if flag[0]]
        if len(sources) != 1:
            raise ArgumentError(
                f"broadcast_one_to_all: is_source is true in {counted(len(sources), 'process', 'processes')} "
                f"{sources}; wanted exactly one"
            )
        (root,) = sources
    results = []
    for array in arrays:
        result = np.array(array, order="C")
        job.broadcast(f"broadcast_one_to_all({_described(result)})", as_bytes(result), root)
        results.append(result)
    return replaced(in_tree, results)  # type: ignore[no-any-return]


def process_allgather(in_tree: T, tiled: bool = False) -> T:
    """Returns the arrays of all processes in every process.

    Args:
        in_tree: a pytree of arrays, of the same structure, shapes and dtypes in all processes. Of a tensor whose
            devices belong to several processes, or to the same one in all processes, the result is the whole tensor.
        tiled: whether the arrays are concatenated along their first dimension, whose sizes may differ; otherwise they
            are stacked along a new one.

    Returns:
        A pytree of NumPy arrays.

    Raises:
        DistributedError: the processes call something else, or give arrays of other shapes or dtypes.

    >>> st.distributed.initialize(engine="local")
    >>> st.distributed.process_allgather(np.arange(3)), st.distributed.process_allgather(np.arange(3), tiled=True)
    (array([[0, 1, 2]]), array([0, 1, 2]))
    >>> st.distributed.shutdown()
    """
    job = connected("process_allgather")
    results = []
    for leaf, path in zip(leaves(in_tree), paths(in_tree), strict=True):
        if isinstance(leaf, ShardedTensor) and process_count() > 1 and is_one_in_all(leaf, "process_allgather"):
            results.append(gather_across(leaf, "process_allgather"))
            continue
        array = _array("process_allgather", leaf, path)
        if not tiled:
            results.append(
                _gathered(job, array[None], [1] * process_count(), f"process_allgather({_described(array)})")
            )
            continue
        rows = np.atleast_1d(array)
        call = f"process_allgather({rows.dtype}[*{''.join(f',{n}' for n in rows.shape[1:])}], tiled=True)"
        sizes = job.gather(f"{call}: sizes", len(rows).to_bytes(8, "little"))
        results.append(_gathered(job, rows, [int.from_bytes(s, "little") for s in sizes], call))
    return replaced(in_tree, results)  # type: ignore[no-any-return]


def sync_global_devices(name: str) -> None:
    """Waits until all processes have called this.

    Args:
        name: a name for the place in the program; the processes have to give the same one.

    Raises:
        DistributedError: a process gives another name, calls something else, or does not come in time.
    """
    connected("sync_global_devices").synchronize(f"sync_global_devices({name!r})")


def assert_equal(in_tree: Any, fail_message: str = "") -> None:
    """Raises AssertionError, in every process, unless the arrays have the same shapes, dtypes and bits in all of them.

    Args:
        in_tree: a pytree of arrays.
        fail_message: the start of the message of the error.

    Raises:
        AssertionError: they differ; the message names the processes and the first leaf.
        DistributedError: the processes call something else.
    """
    job = connected("assert_equal")
    arrays = _arrays("assert_equal", in_tree)
    start = fail_message or "assert_equal"
    counts = [int.from_bytes(c, "little") for c in job.gather("assert_equal", len(arrays).to_bytes(8, "little"))]
    for k, count in enumerate(counts):
        if count != counts[0]:
            raise AssertionError(f"{start}: process {k} has {counted(count, 'array')}, and process 0 has {counts[0]}")
    rows = job.gather("assert_equal: hashes of the arrays", b"".join(map(_digest, arrays)))
    for i, path in enumerate(paths(in_tree)):
        part = slice(_DIGEST * i, _DIGEST * (i + 1))
        if others := [k for k, row in enumerate(rows) if row[part] != rows[0][part]]:
            raise AssertionError(f"{start}: in_tree{path} is not the same in process 0 and in {processes_text(others)}")


# -- how it is done --------------------------------------------------------------------------------


def _seconds(name: str, value: object) -> float:
    """Returns the time limit of an argument, or of the environment if it is None."""
    if value is None:
        name, value = "SHARDTENSOR_TIMEOUT", os.environ.get("SHARDTENSOR_TIMEOUT", "300")
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(f"initialize: {name} is {value!r}; wanted a positive number of seconds")
    return seconds


def _check_alike(job: Agreement) -> None:
    """Raises an error in all processes if they have other versions of the library."""
    version = importlib.metadata.version("shardtensor")
    versions = [v.rstrip(b"\0").decode() for v in job.gather("initialize", version.encode()[:64].ljust(64, b"\0"))]
    for k, other in enumerate(versions):
        if other != versions[0]:
            _leave(job)
            raise ArgumentError(
                f"initialize: process {k} has version {other} of shardtensor, and process 0 has {versions[0]}; install "
                "the same version on all hosts"
            )


def _leave(job: Agreement) -> None:
    """Disconnects this process, before an error that all processes raise: Gloo may abort a process whose peers end."""
    with contextlib.suppress(LateError, LostError):  # The error that follows is the reason.
        job.engine.close(time.monotonic() + _TOGETHER)


_DEVICE = 96
"""Bytes of the description of a device that processes exchange."""


def _agree_on_devices(job: Agreement, limit: float) -> None:
    """Makes the devices of the default backend in all processes known to each of them.

    Raises:
        DistributedError: devices are in use already.
        ArgumentError: the processes have other backends, or other numbers of devices.
    """
    known = registry.in_use()
    _divide_hardware(job)
    backend = registry.default_backend()
    devices = backend.devices()
    rows = job.gather(
        "initialize: devices", f"{backend.name} {len(devices)} {' '.join(known)}".encode()[:_DEVICE].ljust(_DEVICE)
    )
    heads = [row.decode().split() for row in rows]
    for k, (name, count, *used) in enumerate(heads):
        if [name, count] != heads[0][:2]:
            _leave(job)
            raise ArgumentError(
                f"initialize: process {k} has {counted(int(count), 'device')} of backend {name!r}, and process 0 has "
                f"{heads[0][1]} of {heads[0][0]!r}; set SHARDTENSOR_BACKEND and SHARDTENSOR_NUM_DEVICES to the same in "
                "all processes"
            )
        if used:
            _leave(job)
            raise DistributedError(
                f"initialize: process {k} has used devices of {', '.join(used)} already; call it before the first use "
                "of a device, a mesh or a tensor"
            )
    own = [[device.kind, memory] for device, memory in zip(devices, registry.memories_here(backend), strict=True)]
    kinds = [json.loads(text) for text in job.gather_texts("initialize: kinds of devices", json.dumps(own))]
    if job.device_engine:
        _join_devices(job, backend.name, job.device_engine.device_backend, limit)
    registry.join_processes(job.engine.process_index, backend.name, kinds)


def _join_devices(job: Agreement, name: str, wanted: str, limit: float) -> None:
    """Connects the devices of the processes by the engine, which does so for those of one backend.

    Raises:
        ArgumentError: the default backend is another one.
        BackendError: the devices cannot be connected.
    """
    if name != wanted:
        _leave(job)
        raise ArgumentError(
            f"initialize: engine {job.engine.name!r} sends arrays between devices of backend {wanted!r}, and the "
            f"default backend is {name!r}; set SHARDTENSOR_BACKEND={wanted} in all processes, or use another engine"
        )
    try:
        job.join_devices(limit)
    except BackendError:
        _leave(job)
        raise


def _divide_hardware(job: Agreement) -> None:
    """Gives each process its part of the GPUs that several processes of a host see.

    Raises:
        ArgumentError: they cannot be divided, so that processes would share them.
    """
    name, own = registry.default_hardware()
    if os.environ.get("SHARDTENSOR_SHARE_GPUS"):
        own = ()
    rows = [json.loads(text) for text in job.gather_texts("initialize: GPUs", json.dumps(own))]
    for unit in sorted({unit for row in rows for unit in row}):
        users = [k for k, row in enumerate(rows) if unit in row]
        if any(rows[k] != rows[users[0]] for k in users) or len(rows[users[0]]) % len(users):
            them, counts = ", ".join(map(str, users)), " and ".join(str(len(rows[k])) for k in users)
            raise ArgumentError(
                f"initialize: the processes {them} would share GPU {unit}: they see {counts} GPUs of this host, which "
                "cannot be divided; start as many processes as there are GPUs, or a divisor of that, set "
                "CUDA_VISIBLE_DEVICES to other GPUs in each process, or SHARDTENSOR_SHARE_GPUS=1 to share them"
            )
    here = job.engine.process_index
    if own:
        users = [k for k, row in enumerate(rows) if row == rows[here]]
        share = len(own) // len(users)
        first = users.index(here) * share
        hardware_shares[name] = list(range(first, first + share))


def _arrays(caller: str, tree: Any) -> list[npt.NDArray[Any]]:
    return [_array(caller, leaf, path) for leaf, path in zip(leaves(tree), paths(tree), strict=True)]


def _array(caller: str, leaf: Any, path: str) -> npt.NDArray[Any]:
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise ArgumentTypeError(f"{caller}: in_tree{path} is an array of objects; wanted numbers, bools or dates")
    return array


def _described(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _gathered(job: Agreement, rows: npt.NDArray[Any], sizes: Sequence[int], call: str) -> npt.NDArray[Any]:
    """Concatenates the rows of all processes, of which the numbers are known."""
    result = np.empty((sum(sizes), *rows.shape[1:]), rows.dtype)
    ends = np.cumsum(sizes)
    parts = [result[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    own = process_index()
    parts[own][...] = rows
    others = [k for k in range(len(sizes)) if k != own]
    message = as_bytes(parts[own])
    job.exchange(call, dict.fromkeys(others, message), {k: as_bytes(parts[k]) for k in others})
    return result


def _digest(array: npt.NDArray[Any]) -> bytes:
    text = _described(array).encode()
    return hashlib.blake2b(text + np.ascontiguousarray(array).tobytes(), digest_size=_DIGEST).digest()


def _excepthook(
    replaced: object, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Prints an exception that ends this process, and tells the other processes; it replaces another hook."""
    try:
        # As one text, so that lines of several processes are not mixed.
        sys.stderr.write(text_of(error, traceback))
        sys.stderr.flush()
    finally:  # Methods of the exception may raise errors.
        if JOB.agreement is not None and (told := JOB.agreement.fail(error)):
            _say(DistributedError(told))


def _say(error: DistributedError) -> None:
    """Prints the error that the others raise, as their tracebacks end, so that `shardtensor launch` prints it once."""
    sys.stderr.write("".join(format_exception_only(error)))
    sys.stderr.flush()


@in_children
def _leave_to_parent() -> None:
    """In the child of a fork: the job is the parent's, and the child takes no part in it, also when it ends."""
    job = JOB.agreement
    if job is None or job.engine.process_count == 1:
        return
    job.leave()
    atexit.unregister(_at_exit)
    # The destructors of engines wait for threads and processes: the engine is never deallocated.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(job.engine))


def _at_exit() -> None:
    """Leaves the job when the process ends. If the processes did not agree, all of them end with exit status 1."""
    job = JOB.agreement
    if job is None:
        return
    known = bool(job.broken)  # The error that ended this process, or that the program has handled, was printed.
    try:
        shutdown()
        return
    except DistributedError as error:
        if not known:
            _say(error)
    sys.stdout.flush()
    sys.stderr.flush()
    job.abort(_TOGETHER)
