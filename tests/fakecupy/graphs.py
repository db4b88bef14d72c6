"""CUDA graphs: the capture of a stream, and what real CuPy and CUDA refuse meanwhile.

A captured piece of work does not run: it is recorded with the blocks of memory that it accesses. A graph is launched as
one piece of work, which accesses these blocks again. A graph keeps addresses and no memory: its launch is an error if
one of its blocks is free then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from . import world as w
from .errors import CUDARuntimeError, Race, WrongDeviceError

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
UNSUPPORTED, INVALIDATED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 900, 901, 905, 906, 907, 908


class Access:
    """The access of a piece of work to a block, in the form of an array for `World.launch`."""

    def __init__(self, block: Any, description: str) -> None:
        self.block, self.description = block, description
        self.data = self.mem = self

    def describe(self) -> str:
        return self.description


class Capture:
    """The work that a stream has recorded since `begin`."""

    def __init__(self, stream: w.Stream, mode: int) -> None:
        self.stream, self.mode = stream, mode
        self.thread = threading.get_ident()
        self.work: list[tuple[str, Any, list[Access], list[Access]]] = []
        self.is_valid = True

    def add(self, name: str, run: Any, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Records work in place of running it."""
        if not self.is_valid:
            raise CUDARuntimeError(INVALIDATED)
        self.work.append((name, run, *[[_access(a) for a in arrays] for arrays in (reads, writes)]))

    def refuse(self, status: int = UNSUPPORTED) -> None:
        """Raises what CUDA reports for a call that a capture does not allow, which makes the capture invalid."""
        self.is_valid = False
        raise CUDARuntimeError(status)


def _access(a: Any) -> Access:
    return Access(a.data.mem.block, a.describe())


def begin(stream: w.Stream, mode: int) -> None:
    """Begins a capture, as ``cudaStreamBeginCapture``."""
    world = w.world
    with world.lock:
        if stream.capture is not None:
            raise CUDARuntimeError(401)
        stream.capture = Capture(stream, mode)
        world.captures.append(stream.capture)


def end(stream: w.Stream) -> Graph:
    """Ends a capture, also an invalid one, and returns its graph."""
    world, capture = w.world, stream.capture
    if capture is None:
        raise CUDARuntimeError(401)
    if capture.mode != RELAXED and capture.thread != threading.get_ident():
        raise CUDARuntimeError(WRONG_THREAD)
    with world.lock:
        stream.capture = None
        world.captures.remove(capture)
    if not capture.is_valid:
        raise CUDARuntimeError(INVALIDATED)
    made = Graph.__new__(Graph)
    made._work, made._device = capture.work, stream.device
    world.graphs.add(made)
    return made


def is_capturing(stream: w.Stream) -> bool:
    """Whether a stream is captured, as CuPy asks."""
    if stream.capture is not None and not stream.capture.is_valid:
        raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
    return stream.capture is not None


def check_unsafe_call() -> None:
    """Refuses what allocates or frees memory of a device besides the streams, unless all captures allow it."""
    for capture in list(w.world.captures):
        if capture.mode == GLOBAL or (capture.mode == THREAD_LOCAL and capture.thread == threading.get_ident()):
            capture.refuse()


def check_library(name: str) -> None:
    """Refuses calls of a library, as CuPy does where it hands its stream to the library."""
    if is_capturing(w.world.stream()):
        raise NotImplementedError(f"calling {name} API during stream capture is currently unsupported")


def check_copy(stream: w.Stream, what: str) -> None:
    """Refuses copies to and from the host while a stream is captured, as CuPy does, also those of pinned memory."""
    if stream.kind is w.NULL and is_capturing(w.world.stream()):
        raise RuntimeError("the current stream is capturing, so synchronous API calls are disallowed")
    if is_capturing(stream):
        raise RuntimeError(f"the current stream is capturing, so {what} transfers are disallowed")


class Graph:
    """CuPy's."""

    _work: list[tuple[str, Any, list[Access], list[Access]]]
    _device: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "currently this class cannot be initiated by the user and must be created via stream capture"
        )

    def launch(self, stream: Any = None) -> None:
        """Queues the work, as one piece, on a stream (default: the current one)."""
        world = w.world
        s = world.stream() if stream is None else world.find(stream.ptr)
        if s is None:
            raise CUDARuntimeError(400)
        if s.device != self._device:
            raise WrongDeviceError(f"a graph of device {self._device} is launched on {s}")
        work = list(self._work)
        reads = [a for _, _, accesses, _ in work for a in accesses]
        writes = [a for _, _, _, accesses in work for a in accesses]
        for access in (*reads, *writes):
            block = access.block
            if block is not None and (not block.extent or world.blocks.get(block.ptr) is not block):
                world.races.append(f"a graph is launched that uses freed memory, {access.describe()}")
                raise Race(world.races[-1])

        def run() -> None:
            for _, one, _, _ in work:
                one()

        world.launch(f"a graph of {len(work)}", run, reads, writes, s)

    def upload(self, stream: Any = None) -> None:
        """Prepares the launch: nothing is to be done."""
