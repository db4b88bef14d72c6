"""The job of this process, and the exchanges of arrays between its processes.

In each exchange, the arrays of each pair of processes are one message, or several if it would be long. All processes
know the shapes and dtypes of all arrays, so that they know which messages there are, and their sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import numpy as np

from shardtensor.backend.device import HOST, Device, HostArray
from shardtensor.backend.registry import (
    in_other_process,
    is_remote,
    process_index,
    processes_of,
)
from shardtensor.backend.remote import RemoteArray
from shardtensor.backend.small_floats import text_of
from shardtensor.communication.between_processes.freight import Freight, host_copies, numpy_dtype
from shardtensor.communication.between_processes.rounds import MOST, Parcel, boxes
from shardtensor.errors import DistributedError, NotAddressableError
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.sharding.spec import PartitionSpec
from shardtensor.tensor.identity import derived_identity, identity_of
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import ShardedTensor

if TYPE_CHECKING:  # Programs of one process need none of it.
    from shardtensor.communication.between_processes.agreement import Agreement

Params = ParamSpec("Params")
T = TypeVar("T")


class _Job:
    """The connection to the other processes, if there is one, whether the program has called `initialize`, and what is
    called before the connection ends.
    """

    agreement: Agreement | None = None
    was_requested = False
    before_end: ClassVar[list[Callable[[], None]]] = []


JOB = _Job()


def connected(caller: str) -> Agreement:
    """Returns the connection to the other processes.

    Raises:
        DistributedError: this process is not connected.
    """
    if JOB.agreement is None:
        raise DistributedError(f"{caller}: call st.distributed.initialize first")
    return JOB.agreement


def note(call: str) -> int:
    """Adds a call, which all processes have to make in the same order, to what the next exchange compares, and returns
    its number.
    """
    job = JOB.agreement
    return (job or connected(call)).note(call)


def identify(result: Any, name: str, operands: Iterable[Any], since: int) -> None:
    """Identifies the tensors of several processes, among the result of an operator, that have no identity yet; see
    `shardtensor.tensor.identity`. If the processes have compared calls in it, such as a transfer, whose text names no
    tensor, they compare the operands, too.

    Args:
        result: the result, a pytree.
        name: the operator.
        operands: its operands.
        since: the number of calls before it. Where processes have compared none since, which they need not make alike,
            the identity follows from those of the operands.
    """
    job = connected(name)
    is_compared = job.count > since
    if is_compared and (texts := [described(x) for x in leaves(operands) if is_common(x)]):
        job.note(f"{name}({', '.join(texts)})")
    for k, x in enumerate(leaves(result)):
        if not is_common(x) or identity_of(x):
            continue
        if is_compared:
            x._identity = f"{job.count}.{k}" if k else job.count
        elif identity := derived_identity(f"{name}[{k}]" if k else name, operands):
            x._identity = identity


def is_common(x: Any) -> bool:
    """Whether an object is a tensor on devices of several processes."""
    if JOB.agreement is None or type(x) is not ShardedTensor:
        return False
    return len(processes_of(x._aval.sharding.mesh.flat)) > 1


def leaves_out(devices: tuple[Device, ...]) -> bool:
    """Whether there are processes without any of these devices, while several have some of them."""
    return 1 < len(processes_of(devices)) < connected("leaves_out").engine.process_count


def note_error(call: str, values: Any, error: BaseException) -> None:
    """Adds an error of a call on values, some of which concern several processes, to what the next exchange compares.

    An error that depends on elements, on memory or on a signal is raised in one process only. The next exchange then
    raises an error in all of them. Errors that all processes raise leave them in step.
    """
    job = JOB.agreement
    if job is None or isinstance(error, (DistributedError, NotAddressableError)):
        return  # All processes know of the former; the latter depends on the process by definition.
    if len(processes_of(tuple(_devices_of(values)) or default_mesh().flat)) > 1:
        job.note_error(call, error)


def notes_errors(function: Callable[Params, T]) -> Callable[Params, T]:
    """Returns a function that adds its errors to what the next exchange compares; see `note_error`."""

    @functools.wraps(function)
    def noted(*args: Params.args, **kwargs: Params.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # Raised again: other processes may not have raised it.
            note_error(function.__name__, (*args, *kwargs.values()), error)
            raise

    return noted


def _devices_of(x: Any) -> Iterator[Device]:
    """Yields the devices of the tensors, layouts and meshes among values."""
    if isinstance(x, (tuple, list)):
        for part in x:
            yield from _devices_of(part)
    elif isinstance(x, dict):
        yield from _devices_of(list(x.values()))
    elif isinstance(x, Device):
        yield x
    elif isinstance(x, Mesh):
        yield from x.flat
    elif isinstance(x, PartitionSpec):
        yield from default_mesh().flat
    elif isinstance(sharding := getattr(x, "sharding", x), NamedSharding):
        yield from sharding.mesh.flat


def described(x: Any) -> str:
    """Returns a text of an operand or a parameter that is the same in all processes exactly if they give the same: of a
    tensor its aval and its identity, of a host array a checksum of its elements, or of some of them if there are many.
    """
    if isinstance(x, np.ndarray):
        return described_array(x, compared(x))
    if isinstance(x, tuple):
        return f"({', '.join(map(described, x))})"
    if x is None or x is Ellipsis or isinstance(x, (*_EXACT, np.generic, np.dtype)):
        return repr(x)
    if hasattr(x, "sharding"):
        text = f"{x.dtype}{list(x.shape)} {x.sharding.spec}"
        return f"{text} #{identity_of(x)}" if type(x) is ShardedTensor else text
    return x.__name__ if isinstance(x, type) else type(x).__name__


_EXACT = (bool, int, float, complex, str, slice, NamedSharding)

_SAMPLED_FROM = 1 << 16
"""Bytes of a host array from which on only some of its elements are compared between processes."""

_SAMPLE = 1 << 11
"""About as many of them are compared."""


def compared(array: HostArray) -> HostArray:
    """Returns the elements of a host array that are compared between processes: all, or some of them if there are
    many.
    """
    return array if array.nbytes < _SAMPLED_FROM else array.flat[:: -(-array.size // _SAMPLE)]


def described_array(array: HostArray, elements: HostArray) -> str:
    """Returns a text of a host array with a checksum of these elements."""
    import zlib  # Programs of one process do not need it.

    if elements.dtype.char in "gG":  # Some of their bytes are padding.
        elements = elements.astype(np.complex128)
    return f"host array {array.dtype}{list(array.shape)} with checksum {zlib.crc32(elements.tobytes()):08x}"


def gather_texts(call: str, text: str) -> list[str]:
    """Returns the texts of all processes, in order."""
    return connected(call).gather_texts(call, text)


def completed(results: Sequence[Any], devices: Sequence[Device], caller: str) -> list[Any]:
    """Returns what kernels computed on all devices: of other processes, the shapes and dtypes, which the processes
    exchange.

    Args:
        results: for each device of this process an array, None, or a tuple of them; anything for the others.
        devices: the devices.
        caller: the name of the operator.

    Raises:
        NotAddressableError: all devices are in one other process.
    """
    import json  # Programs of one process do not need it.

    if in_other_process(tuple(devices)):
        raise elsewhere(devices)
    own = {k: _layout(results[k]) for k, device in enumerate(devices) if not is_remote(device)}
    arrays = list(results)
    for text in gather_texts(f"{caller}: shapes", json.dumps(own)):
        for k, layout in json.loads(text).items():
            if int(k) not in own:
                arrays[int(k)] = _remote_of(layout)
    return arrays


def _layout(x: Any) -> Any:
    if x is None:
        return None
    return (
        {"parts": [_layout(part) for part in x]} if isinstance(x, tuple) else [text_of(numpy_dtype(x)), list(x.shape)]
    )


def _remote_of(layout: Any) -> Any:
    if layout is None:
        return None
    if isinstance(layout, dict):
        return tuple(map(_remote_of, layout["parts"]))
    return RemoteArray(layout[1], np.dtype(layout[0]))


def elsewhere(devices: Sequence[Device], caller: str = "") -> NotAddressableError:
    """Returns the error of a call whose result has a shape, or a form, that follows from what devices compute; see
    `in_other_process`.
    """
    (process,) = processes_of(tuple(devices))
    return NotAddressableError(
        f"{caller}{': ' if caller else ''}shape and form of the result follow from what process {process} computes, "
        "and calls on devices of one process concern only that process; make this call there, and let st.empty(shape, "
        "dtype=dtype, device=sharding) stand for the result here, or use a mesh of several processes"
    )


def process_of(device: Device) -> int:
    """Returns the number of the process of a device; of the host, that of this process."""
    return process_index() if device.backend == HOST.backend else device.process_index


def cross(messages: Sequence[tuple[Any, Device, Device]], caller: str, into: Sequence[Any] | None = None) -> list[Any]:
    """Sends arrays between devices of different processes, in one exchange, if any of them has to be sent.

    Args:
        messages: an array, or a `RemoteArray` in all processes but one, the device that has it, and the device that
            receives it. All processes give the same messages. Each process has host arrays itself.
        caller: the name of the operator.
        into: for each message an array on its destination that receives the elements, or None.

    Returns:
        The arrays: on the destination, where that is in this process; otherwise their shapes and dtypes. An array whose
        destination is in the same process is returned as it is.

    Raises:
        DistributedError: the processes do not call the same.
    """
    results, numbers, parcels = [m[0] for m in messages], list[int](), list[Parcel]()
    for n, (array, source, destination) in enumerate(messages):
        if HOST.backend in (source.backend, destination.backend):
            if is_remote(destination):
                results[n] = RemoteArray(array.shape, numpy_dtype(array))
        elif (sender := process_of(source)) != (receiver := process_of(destination)):
            numbers.append(n)
            parcels.append(Parcel(sender, receiver, tuple(array.shape), numpy_dtype(array)))
    if not parcels:
        return results
    freight = Freight(parcels, [messages[n] for n in numbers], [into[n] if into else None for n in numbers])
    for n, array in zip(numbers, freight.carried(connected(caller), caller), strict=True):
        results[n] = array
    return results


def everywhere(
    arrays: Sequence[Any],
    devices: Sequence[Device],
    caller: str,
    root: int | None = None,
    into: Sequence[HostArray] | None = None,
) -> list[HostArray]:
    """Returns arrays, each of which one process has on a device, as host arrays in all processes, or in one.

    Args:
        arrays: the arrays; those of other processes are `RemoteArray` objects.
        devices: the device of each array.
        caller: the name of the function.
        root: the process that receives them; None for all. The result of the others is empty.
        into: host arrays that receive the elements, in the processes that do.
    """
    here, job = process_index(), connected(caller)
    receives = root in (None, here)
    results: list[Any] = []
    for n, (array, device) in enumerate(zip(arrays, devices, strict=True)):
        if process_of(device) != here or not receives:
            results.append(into[n] if into else None)
            continue
        if into is None:
            results += host_copies([(array, device, None)])
            continue
        for box, _ in boxes(tuple(array.shape), MOST // max(numpy_dtype(array).itemsize, 1)):
            index: Any = (*box, ...)
            (into[n][index],) = host_copies([(array, device, box)])
        results.append(into[n])
    numbers, parcels, messages = [], [], []
    for receiver in range(job.engine.process_count) if root is None else (root,):
        for n, (array, device) in enumerate(zip(arrays, devices, strict=True)):
            if (sender := process_of(device)) != receiver:
                numbers.append(n)
                parcels.append(Parcel(sender, receiver, tuple(array.shape), numpy_dtype(array)))
                messages.append((array, device, HOST))
    if parcels:
        targets = [results[n] if p.receiver == here else None for n, p in zip(numbers, parcels, strict=True)]
        for n, parcel, array in zip(
            numbers, parcels, Freight(parcels, messages, targets).carried(job, caller), strict=True
        ):
            if parcel.receiver == here:
                results[n] = array
    return results if receives else []
