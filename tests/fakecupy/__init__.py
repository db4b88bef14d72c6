"""A package that poses as CuPy where there is no GPU, for tests of code that uses CuPy on several.

`install` puts modules named ``cupy`` and ``cupyx`` in place. Arrays are NumPy buffers that belong to GPUs which do not
exist; work is queued on streams and runs late, in an order that a scheduler picks among all that are allowed; memory
that is freed is overwritten and handed out again; and whatever nothing orders is written down in `races` and raises
`Race`. So a program that has forgotten an event, a device context or a reference fails here on every run, where on
GPUs it fails on some.

What is not modelled: real numbers of bytes in use by libraries, per-thread default streams, graphs, kernels of the
user's in more of CUDA than `kernels` says, peer access as such (operations on arrays of another device raise), races between parts of one block (a block
is one thing), and time.
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
_machines: list[Any] = []  # those that were there before, one for each `install`
_wrappers: dict[str, Any] = {}  # array_api_compat's modules on top, which remembers them by the class of arrays


def _ours(name: str) -> bool:
    return name.split(".")[0] in ("cupy", "cupyx", "cupy_backends") or name.startswith("array_api_compat.cupy")


def install(**config: Any) -> Any:
    """Puts the double in place of CuPy, with a new machine, and returns the module ``cupy``.

    The keywords are the attributes of `Config`. Where the double is in place already, its machine is put aside until
    the matching `uninstall`, with all that is queued on it.
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
    """Puts back what was there before the last `install`."""
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
    """``from array_api_compat import cupy`` looks at the package first."""
    if (package := sys.modules.get("array_api_compat")) is not None:
        vars(package).pop("cupy", None)
        if (module := sys.modules.get("array_api_compat.cupy")) is not None:
            package.cupy = module  # type: ignore[attr-defined]


def reset(**config: Any) -> None:
    """A new machine, with nothing queued or allocated. Arrays and streams of the old one must not be used with it."""
    _world.start(Config(**config))


def free() -> None:
    """Gives back the memory that waits to be used again."""
    _world.world.close()


def config() -> Config:
    """What the machine is like, to look at and to change."""
    return _world.world.config


def fail(stream: Any = None, status: int = 719) -> None:
    """Queues work that fails on a stream (default: the current one): the next wait raises `CUDARuntimeError`."""

    def run() -> None:
        raise CUDARuntimeError(status)

    world = _world.world
    world.launch("a failing kernel", run, (), (), None if stream is None else world.find(stream.ptr))


def __getattr__(name: str) -> Any:
    if name == "waits":  # how often the host has waited for a device
        return _world.world.waits
    if name == "races":  # what has been found; what was freed a moment ago is looked at first
        _world.world.drain()
        return _world.world.races
    raise AttributeError(name)
