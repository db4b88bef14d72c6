"""A simulation of CuPy on several GPUs, for tests on machines without a GPU.

`install` installs modules named ``cupy`` and ``cupyx``. Arrays are NumPy buffers that belong to simulated GPUs; work is
queued on streams and runs late, in any of the orders that CUDA allows, which a scheduler selects; freed memory is
overwritten and reused; and accesses to the same memory that are not ordered are recorded in `races` and raise `Race`.
A program that lacks an event, a device context or a reference therefore fails here on every run, while on GPUs it
fails on some.

What is not modelled: real numbers of bytes in use by libraries, per-thread default streams, graphs of several streams,
kernels of the user's in more of CUDA than `kernels` says, peer access as such (operations on arrays of another device
raise), races between parts of one block (a block is one thing), and time.
"""

from __future__ import annotations

import sys
from typing import Any

from . import modules
from . import world as _world
from .errors import CUDARuntimeError, NcclError, OutOfBounds, OutOfMemoryError, Race, WrongDeviceError
from .world import Config

__all__ = [
    "CUDARuntimeError",
    "Config",
    "NcclError",
    "OutOfBounds",
    "OutOfMemoryError",
    "Race",
    "WrongDeviceError",
    "config",
    "fail",
    "free",
    "install",
    "races",
    "reset",
    "uninstall",
]

_hidden: dict[str, Any] = {}
_machines: list[Any] = []  # the earlier machines, one for each `install`
_wrappers: dict[str, Any] = {}  # array_api_compat's modules for the simulation, which it caches by the class of arrays


def _ours(name: str) -> bool:
    return name.split(".")[0] in ("cupy", "cupyx", "cupy_backends") or name.startswith("array_api_compat.cupy")


def install(**config: Any) -> Any:
    """Installs the simulation in place of CuPy, with a new machine, and returns the module ``cupy``.

    The keywords are the attributes of `Config`. If the simulation is installed already, its machine and all work queued
    on it are kept until the matching `uninstall`.
    """
    made = modules.build()
    if not _machines:
        for name in [n for n in list(sys.modules) if _ours(n)]:
            _hidden[name] = sys.modules.pop(name)
        sys.modules.update(made)
        sys.modules.update(_wrappers)
        _wrap()
    _machines.append(_world.world)
    reset(**config)
    return made["cupy"]


def uninstall() -> None:
    """Restores the modules and the machine from before the last `install`."""
    free()
    _world.world = _machines.pop()
    if _machines:
        return
    for name in [n for n in list(sys.modules) if _ours(n)]:
        module = sys.modules.pop(name)
        if name.startswith("array_api_compat."):
            _wrappers[name] = module
    sys.modules.update(_hidden)
    _wrap()
    _hidden.clear()


def _wrap() -> None:
    """Sets the attribute ``cupy`` of array_api_compat, which an import reads before it reads `sys.modules`."""
    if (package := sys.modules.get("array_api_compat")) is not None:
        vars(package).pop("cupy", None)
        if (module := sys.modules.get("array_api_compat.cupy")) is not None:
            package.cupy = module  # type: ignore[attr-defined]


def reset(**config: Any) -> None:
    """Starts a new machine, with nothing queued or allocated. Arrays and streams of the old one must not be used."""
    _world.start(Config(**config))


def free() -> None:
    """Frees the memory that the pools keep for reuse."""
    _world.world.close()


def config() -> Config:
    """Returns the configuration of the machine, which may be changed."""
    return _world.world.config


def fail(stream: Any = None, status: int = 719) -> None:
    """Queues work that fails on a stream (default: the current one): the next wait raises `CUDARuntimeError`."""

    def run() -> None:
        raise CUDARuntimeError(status)

    world = _world.world
    world.launch("a failing kernel", run, (), (), None if stream is None else world.find(stream.ptr))


def __getattr__(name: str) -> Any:
    if name == "waits":  # the number of times that the host has waited for a device
        return _world.world.waits
    if name == "live_graphs":  # the number of graphs that exist
        return len(_world.world.graphs)
    if name == "races":  # the races detected so far, after checking the memory that was freed last
        _world.world.drain()
        return _world.world.races
    raise AttributeError(name)
