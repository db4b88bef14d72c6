"""The execution contexts of programs on backends that have a current device, or modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.errors import BackendError
from shardtensor.sharding.mesh import Mesh

if TYPE_CHECKING:
    from shardtensor.spmd.scheduling.mapped_program import WorkerThread


class DeviceBlock:
    """Makes the device of a program current, on a backend without modes; see
    `shardtensor.spmd.scheduling.mapped_program`.

    The block in which it is current stays entered in the thread when the program ends or is suspended. The next program
    of the thread runs in it if nothing has to change for its device, which most often has the same GPU and stream.
    """

    __slots__ = ("_backend", "_device")

    def __init__(self, backend: Backend, device: Device) -> None:
        self._backend = backend
        self._device = device

    def enter(self, thread: WorkerThread) -> None:
        """Makes the device current."""
        backend = self._backend
        if thread.block is not None:
            if thread.block_of is backend and backend.is_on(self._device):
                return
            thread.leave_block()
        block = backend.on(self._device)
        block.__enter__()
        thread.block, thread.block_of = block, backend

    resume = enter

    def suspend(self, thread: WorkerThread) -> None:
        """Checks that the program can be suspended."""
        self._backend.capture_modes()

    def leave(self, thread: WorkerThread) -> None:
        """Does nothing: the block stays entered."""

    def fail(self, thread: WorkerThread, error: BaseException) -> None:
        """Leaves the block after an error, which it may replace by one that names the device."""
        thread.leave_block()
        with self._backend.on(self._device):
            raise error


def block_of(backend: Backend, device: Device) -> DeviceBlock | None:
    """Returns the block of a device; None if its backend has modes, or blocks that programs cannot share."""
    return DeviceBlock(backend, device) if backend.shares_blocks else None


class DeviceContext:
    """Makes the device of a program current, if it has only one, and sets the modes of its library, which are the
    caller's at first; see `shardtensor.spmd.scheduling.mapped_program.ExecutionContext`.
    """

    __slots__ = ("_backend", "_before", "_devices", "_modes", "_on")

    def __init__(self, backend: Backend, submesh: Mesh, modes: Callable[[], None] | None) -> None:
        self._devices = submesh.flat
        self._backend = backend
        self._modes = modes

    def enter(self, thread: WorkerThread) -> None:
        """Makes the device current, and sets the modes of the program."""
        thread.leave_block()
        self._on = self._backend.on(self._devices[0]) if len(self._devices) == 1 else contextlib.nullcontext()
        self._before = modes_of(self._backend) if self._modes else None
        self._on.__enter__()
        if self._modes:
            self._modes()

    resume = enter

    def leave(self, thread: WorkerThread) -> None:
        """Restores the device and the modes that the thread had before."""
        self._exit(None)

    def fail(self, thread: WorkerThread, error: BaseException) -> None:
        """Does what `leave` does after an error, which the backend may replace by one that names the device."""
        self._exit(error)

    def suspend(self, thread: WorkerThread) -> None:
        """Saves the modes of the program, and restores the device and the modes that the thread had before."""
        self._modes = self._backend.capture_modes()
        self._exit(None)

    def _exit(self, error: BaseException | None) -> None:
        if self._before:
            self._before()
        self._on.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def modes_of(backend: Backend) -> Callable[[], None] | None:
    """Returns a function that restores the current modes of the library, or None where that is not possible."""
    try:
        return backend.capture_modes()
    except BackendError:  # The caller's block of modes cannot be suspended, and need not be: it stays entered.
        return None
