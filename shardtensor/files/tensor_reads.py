"""Tensors of files: each process reads what its devices hold."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from shardtensor.backend.device import HOST, HostArray
from shardtensor.backend.registry import backend_of, is_remote, processes_of
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_processes.processes import note, note_error
from shardtensor.communication.messages import send
from shardtensor.communication.transfer import operand_transfer
from shardtensor.core import call
from shardtensor.errors import ArgumentError, ArgumentTypeError, DeviceMemoryError
from shardtensor.files.chunk_grids import Box
from shardtensor.host import memory_pool
from shardtensor.sharding.layout import Shape, Where, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.operands import host_aval
from shardtensor.tensor.tensor import ShardedTensor, mark_array, tensor_of, without_elements
from shardtensor.tensor.value import Aval, aval, summed

Read: TypeAlias = Callable[[Box, HostArray], object]
"""Fills an array with the elements of a box."""

Arrays: TypeAlias = Callable[[Box], HostArray]
"""Returns the elements of a box, in an array that nothing else holds."""


def tensor_from(shape: Shape, dtype: np.dtype[Any], where: Where | None, read: Read, caller: str) -> ShardedTensor:
    """Returns a tensor whose elements are read from a file: those of each memory of this process at once.

    Args:
        shape: its shape.
        dtype: its dtype, in the byte order of the machine.
        where: its layout; by default it is sharded over the default mesh, and not committed.
        read: reads the elements of a box.
        caller: the function.

    Raises:
        ArgumentError, ArgumentTypeError: those of ``read``, which name the caller then.
        DeviceMemoryError: the host has not enough memory.
    """
    target = as_sharding(default_mesh() if where is None else where, len(shape), caller)
    value = aval(shape, dtype, target, where is not None)
    return tensor_of_boxes(value, lambda box: _filled(value, read, box), caller)


def tensor_of_boxes(value: Aval, array_of: Arrays, caller: str) -> ShardedTensor:
    """Returns a tensor of which this process has the elements that its devices hold, as host arrays.

    Args:
        value: its aval.
        array_of: returns the elements of each of the `local_boxes`.
        caller: the function.

    Raises:
        ArgumentError, ArgumentTypeError: those of ``array_of``, which name the caller then.
        DeviceMemoryError: a memory is full.
    """
    if value.backend.simulated:
        return without_elements(value)
    if (plain := on_devices(value)) is not value:
        x: ShardedTensor = call("reshard", tensor_of_boxes(plain, array_of, caller), sharding=value.sharding)
        return x
    spans = len(processes_of(value.sharding.mesh.flat)) > 1
    number = note(f"{caller}({value.dtype}{list(value.shape)} {value.sharding.spec})") if spans else 0
    try:
        with naming_caller(caller):
            result = mark_array(_placed(value, array_of, caller))
    except BaseException as error:  # Raised again: other processes may not have raised it.
        note_error(caller, (value.sharding,), error)
        raise
    if spans:
        result._identity = number
    return result


def on_devices(value: Aval) -> Aval:
    """Returns the value in memories of devices and without partial sums, as which its elements are read."""
    if not value.unreduced and not value.offloaded:
        return value
    return aval(value.shape, value.dtype, summed(value).sharding.with_memory_kind("device"), True)


def local_boxes(value: Aval) -> dict[Box, list[int]]:
    """Returns the boxes that the devices of this process hold, and the numbers of the cells that have each."""
    grid, holders = value.cells.grid, dict[Box, list[int]]()
    for n, device in enumerate(grid.devices):
        if not is_remote(device):
            holders.setdefault(grid.box(n), []).append(n)
    return holders


def read_tensor(
    value: Aval, read: Read, caller: str, check: Callable[[Box], object] = lambda box: None
) -> ShardedTensor:
    """Returns a tensor in the memories of its devices, of which this process reads the elements that its devices hold.

    Args:
        value: its aval.
        read: reads the elements of a box.
        caller: the function, for the log of transfers.
        check: raises an error if a box cannot be read, before there is memory for any of them.
    """
    for box in local_boxes(value):
        check(box)
    return _placed(value, lambda box: _filled(value, read, box), caller)


def _filled(value: Aval, read: Read, box: Box) -> HostArray:
    out = memory_pool.empty(tuple([end - begin for begin, end in box]), value.dtype)
    read(box, out)
    return out


def _placed(value: Aval, array_of: Arrays, caller: str) -> ShardedTensor:
    """Returns the tensor of arrays; what several of its cells hold is read once."""
    operand_transfer(host_aval(value.shape, value.dtype), value.sharding).infer(caller, explicit=True)
    grid = value.cells.grid
    buffers: list[Any] = [RemoteArray(grid.shape(n), value.dtype) for n in range(len(grid.devices))]
    for box, numbers in local_boxes(value).items():
        out = array_of(box)
        for n in numbers:
            device = grid.devices[n]
            buffers[n] = out if backend_of(device).on_host else send(out, HOST, device)
        del out  # Before the next one is allocated.
    return tensor_of(value, tuple(buffers), tuple([[] for _ in buffers]))


class NamedArrays(Mapping[str, ShardedTensor]):
    """The arrays of a file or folder: a mapping from names to tensors, which are read when they are looked up. It is a
    context manager that closes the file.

    Attributes:
        files: the names of the arrays.
    """

    _kind: ClassVar = "file"

    def __init__(self, path: str, names: Iterable[str]) -> None:
        self._path = path
        self.files = list(dict.fromkeys(names))
        self._known = frozenset(self.files)

    def __getitem__(self, name: str) -> ShardedTensor:
        if name not in self:
            raise KeyError(f"{name!r} is not an array of the {self._kind}; it has {', '.join(self.files)}")
        return self._read(name)

    @abc.abstractmethod
    def _read(self, name: str) -> ShardedTensor:
        """Reads an array."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._known

    def __repr__(self) -> str:
        """As in NumPy, of more than five names the first ones."""
        names = ", ".join(self.files[:5]) + ("..." if len(self.files) > 5 else "")
        return f"{type(self).__name__} {self._path!r} with keys: {names}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file, if it is open while nothing is read."""


@contextlib.contextmanager
def naming_caller(caller: str) -> Iterator[None]:
    """Begins the errors about files in the ``with`` block with the name of a function."""
    try:
        yield
    except (ArgumentError, ArgumentTypeError, DeviceMemoryError) as error:
        if str(error).startswith(f"{caller}: "):
            raise
        raise type(error)(f"{caller}: {error}") from None
