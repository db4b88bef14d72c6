"""The job of this process, and the exchanges of arrays between its processes.

Each exchange is one call of the engine, in which the arrays of each pair of processes are one message. All processes
know the shapes and dtypes of all arrays, so that they know which messages there are, and their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtensor.backend.device import HOST, Device, HostArray
from shardtensor.backend.registry import array_backend, backend_of, is_remote, process_index
from shardtensor.backend.remote import RemoteArray
from shardtensor.backend.small_floats import text_of
from shardtensor.errors import DistributedError
from shardtensor.host import memory_pool
from shardtensor.sharding.layout import NamedSharding

if TYPE_CHECKING:  # Programs of one process need none of it.
    from shardtensor.communication.agreement import Agreement

_ALIGNED = 64
"""Arrays in a message begin at a multiple of this number of bytes."""


class _Job:
    """The connection to the other processes, if there is one."""

    agreement: Agreement | None = None


JOB = _Job()


def connected(caller: str) -> Agreement:
    """Returns the connection to the other processes.

    Raises:
        DistributedError: this process is not connected.
    """
    if JOB.agreement is None:
        raise DistributedError(f"{caller}: call st.distributed.initialize first")
    return JOB.agreement


def note(call: str) -> None:
    """Adds a call, which all processes have to make in the same order, to what the next exchange compares."""
    connected(call).note(call)


def described(x: Any) -> str:
    """Returns a text of an operand or a parameter that is the same in all processes exactly if they give the same: of a
    tensor its aval, of a host array a checksum of its elements, or of some of them if there are many.
    """
    if isinstance(x, np.ndarray):
        return f"host array {x.dtype}{list(x.shape)} with checksum {_checksum(x):08x}"
    if isinstance(x, tuple):
        return f"({', '.join(map(described, x))})"
    if x is None or x is Ellipsis or isinstance(x, (*_EXACT, np.generic, np.dtype)):
        return repr(x)
    if hasattr(x, "sharding"):
        return f"{x.dtype}{list(x.shape)} {x.sharding.spec}"
    return x.__name__ if isinstance(x, type) else type(x).__name__


_EXACT = (bool, int, float, complex, str, slice, NamedSharding)

_SAMPLED_FROM = 1 << 16
"""Bytes of a host array from which on only some of its elements are compared between processes."""

_SAMPLE = 1 << 11
"""About as many of them are compared."""


def _checksum(array: HostArray) -> int:
    import zlib  # Programs of one process do not need it.

    if array.nbytes >= _SAMPLED_FROM:
        array = array.flat[:: -(-array.size // _SAMPLE)]
    if array.dtype.char in "gG":  # Some of their bytes are padding.
        array = array.astype(np.complex128)
    return zlib.crc32(array.tobytes())


def gather_texts(call: str, text: str) -> list[str]:
    """Returns the texts of all processes, in order."""
    job, data = connected(call), text.encode()
    sizes = [int.from_bytes(size, "little") for size in job.gather(call, len(data).to_bytes(8, "little"))]
    rows = job.gather(f"{call}: {max(sizes)} bytes", data.ljust(max(sizes), b"\0"))
    return [row[:size].decode() for row, size in zip(rows, sizes, strict=True)]


def completed(results: Sequence[Any], devices: Sequence[Device], caller: str) -> list[Any]:
    """Returns what kernels computed on all devices: of other processes, the shapes and dtypes, which the processes
    exchange.

    Args:
        results: for each device of this process an array, None, or a tuple of them; anything for the others.
        devices: the devices.
        caller: the name of the operator.
    """
    import json  # Programs of one process do not need it.

    own = {k: _layout(results[k]) for k, device in enumerate(devices) if not is_remote(device)}
    made = list(results)
    for text in gather_texts(f"{caller}: shapes", json.dumps(own)):
        for k, layout in json.loads(text).items():
            if int(k) not in own:
                made[int(k)] = _remote_of(layout)
    return made


def _layout(x: Any) -> Any:
    if x is None:
        return None
    return {"parts": [_layout(part) for part in x]} if isinstance(x, tuple) else [text_of(_dtype(x)), list(x.shape)]


def _remote_of(layout: Any) -> Any:
    if layout is None:
        return None
    if isinstance(layout, dict):
        return tuple(map(_remote_of, layout["parts"]))
    return RemoteArray(layout[1], np.dtype(layout[0]))


def process_of(device: Device) -> int:
    """Returns the number of the process of a device; of the host, that of this process."""
    return process_index() if device.backend == HOST.backend else device.process_index


def cross(messages: Sequence[tuple[Any, Device, Device]], caller: str) -> list[Any]:
    """Sends arrays between devices of different processes, in one exchange, if any of them has to be sent.

    Args:
        messages: an array, or a `RemoteArray` in all processes but one, the device that has it, and the device that
            receives it. All processes give the same messages. Each process has host arrays itself.
        caller: the name of the operator.

    Returns:
        The arrays: on the destination, where that is in this process; otherwise their shapes and dtypes. An array whose
        destination is in the same process is returned as it is.

    Raises:
        DistributedError: the processes do not call the same.
    """
    here, results = process_index(), [m[0] for m in messages]
    pairs: dict[tuple[int, int], list[int]] = {}
    for n, (_, source, destination) in enumerate(messages):
        if source.backend == HOST.backend and is_remote(destination):
            results[n] = RemoteArray(results[n].shape, _dtype(results[n]))
        ends = process_of(source), process_of(destination)
        if ends[0] != ends[1] and HOST.backend not in (source.backend, destination.backend):
            pairs.setdefault(ends, []).append(n)
    if not pairs:
        return results
    outgoing, incoming, sizes = {}, {}, []
    for (sender, receiver), numbers in pairs.items():
        begins = _begins([results[n] for n in numbers])
        sizes.append((sender, receiver, begins[-1]))
        if sender == here:
            outgoing[receiver] = _packed([messages[n][:2] for n in numbers], begins)
        elif receiver == here:
            incoming[sender] = memory_pool.empty((begins[-1],), np.dtype(np.uint8))
    connected(caller).exchange(_described(caller, sizes), outgoing, incoming)
    for (sender, receiver), numbers in pairs.items():
        begins = _begins([results[n] for n in numbers])
        for n, begin in zip(numbers, begins, strict=False):
            if receiver == here:
                results[n] = _received(incoming[sender], begin, results[n], messages[n][2])
            elif sender == here:
                results[n] = RemoteArray(results[n].shape, _dtype(results[n]))
    return results


def everywhere(
    arrays: Sequence[Any], devices: Sequence[Device], caller: str, root: int | None = None
) -> list[HostArray]:
    """Returns arrays, each of which one process has on a device, as host arrays in all processes, or in one.

    Args:
        arrays: the arrays; those of other processes are `RemoteArray` objects.
        devices: the device of each array.
        caller: the name of the function.
        root: the process that receives them; None for all. The result of the others is empty.
    """
    here, numbers = process_index(), dict[int, list[int]]()
    for n, device in enumerate(devices):
        numbers.setdefault(process_of(device), []).append(n)
    begins = {k: _begins([arrays[n] for n in some]) for k, some in numbers.items()}
    own = numbers.get(here, [])
    packed = _packed([(arrays[n], devices[n]) for n in own], begins.get(here, [0]))
    job, receives = connected(caller), root in (None, here)
    messages = {
        k: memory_pool.empty((ends[-1],), np.dtype(np.uint8)) for k, ends in begins.items() if k != here and receives
    }
    others = [k for k in range(job.engine.process_count) if k != here and root in (None, k)]
    sizes = [(k, -1 if root is None else root, ends[-1]) for k, ends in begins.items()]
    job.exchange(_described(caller, sizes), dict.fromkeys(others, packed), messages)
    if not receives:
        return []
    messages[here] = packed
    results: list[Any] = [None] * len(arrays)
    for k, some in numbers.items():
        for n, begin in zip(some, begins[k], strict=False):
            results[n] = _received(messages[k], begin, arrays[n], HOST)
    return results


_LISTED = 2
"""The number of messages up to which the text of an exchange lists them."""


def _described(caller: str, sizes: Sequence[tuple[int, int, int]]) -> str:
    """Returns the text of an exchange, which the processes compare: which process sends how many bytes to which, or a
    hash of that.
    """
    if len(sizes) <= _LISTED:
        ends = [(f"{n} bytes from process {i}", "all" if k < 0 else f"process {k}") for i, k, n in sizes]
        return f"{caller}: {', '.join([' to '.join(pair) for pair in ends])}"
    return f"{caller}: {sum(n for _, _, n in sizes)} bytes in {len(sizes)} messages ({hash(tuple(sizes)) % 2**32:x})"


def _dtype(array: Any) -> np.dtype[Any]:
    if type(array) is RemoteArray or isinstance(array, (np.ndarray, np.generic)):
        return array.dtype
    backend = array_backend(array)
    assert backend is not None
    return backend.dtype_of(array)


def _begins(arrays: Sequence[Any]) -> list[int]:
    """Returns at which byte of a message each array begins, and the number of bytes of the message."""
    ends = [0]
    for array in arrays:
        nbytes = math.prod(array.shape) * _dtype(array).itemsize
        ends.append(ends[-1] + -(-nbytes // _ALIGNED) * _ALIGNED)
    return ends


def _packed(parts: Sequence[Any], begins: Sequence[int]) -> Any:
    """Returns the message that consists of the arrays of this process."""
    message = memory_pool.empty((begins[-1],), np.dtype(np.uint8))
    for (array, device), begin in zip(parts, begins, strict=False):
        host = _on_host(array, device)
        if host.size:
            into = message[begin : begin + host.nbytes].view(host.dtype).reshape(host.shape)
            into[...] = host
    return message


def _on_host(array: Any, device: Device) -> HostArray:
    if type(array) is np.ndarray:
        return array
    backend = backend_of(device)
    with backend.on(device):
        return np.asarray(backend.to_host(array, device))


def _received(message: Any, begin: int, known: Any, device: Device) -> Any:
    """Returns the array of a message on its destination, or on the host."""
    dtype = _dtype(known)
    nbytes = math.prod(known.shape) * dtype.itemsize
    host = message[begin : begin + nbytes].view(dtype).reshape(known.shape)
    backend = backend_of(device)
    if backend.on_host:
        return host
    with backend.on(device):
        return backend.from_host(host, device)
