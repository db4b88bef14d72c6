"""The execution context of programs on backends that have a current device, or modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from shardtensor.backend.protocol import Backend
from shardtensor.errors import BackendError
from shardtensor.sharding.mesh import Mesh


class DeviceContext:
    """Makes the device of a program current, if it has only one, and sets the modes of its library, which are the
    caller's at first; see `shardtensor.spmd.program.ExecutionContext`.
    """

    __slots__ = ("_backend", "_before", "_first", "_modes", "_on", "devices")

    def __init__(self, backend: Backend, submesh: Mesh, modes: Callable[[], None] | None) -> None:
        self.devices = submesh.flat
        self._backend = backend
        self._modes = modes

    def __enter__(self) -> None:
        self._first = self.devices
        self._on = self._backend.on(self.devices[0]) if len(self.devices) == 1 else contextlib.nullcontext()
        self._before = modes_of(self._backend) if self._modes else None
        self._on.__enter__()
        if self._modes:
            self._modes()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        if self._before:
            self._before()
        if error is not None and self.devices is not self._first:  # The error names the device of the program.
            self._on.__exit__(None, None, None)
            self._on = self._backend.on(self.devices[0])
            self._on.__enter__()
        return self._on.__exit__(kind, error, trace)

    def pass_on(self, backend: Backend, submesh: Mesh) -> bool:
        """Makes it the context of the next program, on the devices of ``submesh``, if it has no modes and has to change
        nothing for it; returns whether it did.
        """
        devices = submesh.flat
        if self._modes or backend is not self._backend or len(devices) > 1 or not backend.is_on(devices[0]):
            return False
        self.devices = devices
        return True

    def suspend(self) -> None:
        """Saves the modes of the program, and restores the device and the modes that the thread had before."""
        self._modes = self._backend.capture_modes()
        self.__exit__(None, None, None)

    def resume(self) -> None:
        """Makes the device current again, and restores the modes of the program."""
        self.__enter__()


def modes_of(backend: Backend) -> Callable[[], None] | None:
    """Returns a function that restores the current modes of the library, or None where that is not possible."""
    try:
        return backend.capture_modes()
    except BackendError:  # The caller's block of modes cannot be suspended, and need not be: it stays entered.
        return None
