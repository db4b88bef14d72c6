"""The simulated machine: its GPUs, their streams, the work queued on them, and the order between pieces of work.

All work of a GPU is a function in the queue of a stream. It runs when the scheduler selects it or when the host waits
for it. Vector clocks record which work is ordered before which, whether it has run or not: a program that is correct
only because work happened to run early is detected by a wrong value or by the clocks.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import CUDARuntimeError, Race

SCHEDULERS = ("random", "lazy", "eager")
NULL, BLOCKING, NON_BLOCKING = "null", "blocking", "non-blocking"


@dataclass
class Config:
    """The configuration of the machine; tests may change any attribute at any time, except the number of devices."""

    devices: int = 2
    """The number of GPUs. 0: CuPy is installed and there is no GPU."""
    peers: Any = None
    """``peers[i][j]``: whether GPU i can access the memory of GPU j. None: all can."""
    memory: int = 1 << 30
    """Bytes of memory of each GPU."""
    scheduler: str = "random"
    """"random": at each launch some streams run some of their work; "lazy": work runs only when the host waits for it;
    "eager": all work runs at once."""
    seed: int = 0
    """The seed of the random scheduler."""
    corrupt: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (source, destination) whose peer copies have wrong results without an error."""
    raise_races: bool = True
    """Whether a race, which is always recorded, also raises `Race` at the launch."""

    def peer(self, device: int, other: int) -> bool:
        return device != other and (self.peers is None or bool(self.peers[device][other]))


def learn(mine: dict[Stream, int], other: Stream, seq: int, clock: dict[Stream, int]) -> None:
    """Merges another clock into a clock, together with the work of ``other`` up to ``seq``."""
    for stream, count in (*clock.items(), (other, seq)):
        if mine.get(stream, 0) < count:
            mine[stream] = count


class Stream:
    """A queue of a device.

    `seq` counts the work that was launched, `done` the work that has run. For each other stream, `clock` has the count
    up to which its work is ordered before work launched here from now on.
    """

    __slots__ = ("__weakref__", "alive", "capture", "clock", "device", "done", "kind", "ptr", "queue", "seq")

    def __init__(self, ptr: int, device: int, kind: str) -> None:
        self.ptr, self.device, self.kind = ptr, device, kind
        self.seq = self.done = 0
        self.queue: deque[tuple[Any, Any]] = deque()
        self.clock: dict[Stream, int] = {}
        self.alive = True
        self.capture: Any = None  # what records the work in place of running it

    def __repr__(self) -> str:
        return f"{self.kind} stream {self.ptr:#x} of device {self.device}"

    def join(self, other: Stream, seq: int, clock: dict[Stream, int]) -> None:
        """Orders later work after the work of ``other`` up to ``seq``, and after the work in ``clock``."""
        learn(self.clock, other, seq, clock)
        self.clock.pop(self, None)


class Arrivals(Stream):
    """Messages of other processes that a stream waits for: a thread counts in `done` those that have come."""


class Gpu:
    """A device: its streams, its memory pool, and the last error of its work."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.null = Stream(0, index, NULL)
        self.blocking: list[Stream] = []
        self.error: BaseException | None = None
        self.pool: Any = None


class Recorded:
    """The position of a stream when an event was recorded on it."""

    __slots__ = ("capture", "clock", "seq", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream, self.seq, self.clock = stream, stream.seq, dict(stream.clock)
        self.capture = stream.capture


class World:
    """A simulated machine, created by `install` or `reset`."""

    def __init__(self, config: Config) -> None:
        if config.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler is {config.scheduler!r}; it must be one of {SCHEDULERS}")
        self.config = config
        self.rng = random.Random(config.seed)
        self.lock = threading.Lock()
        self.arrival = threading.Condition(self.lock)
        self.gpus = [Gpu(i) for i in range(config.devices)]
        self.streams: list[Stream] = [gpu.null for gpu in self.gpus]
        self.by_ptr: dict[int, Stream] = {}
        self.events: dict[int, tuple[int, Recorded | None]] = {}
        self.next_ptr = 0x1000
        self.host: dict[Stream, int] = {}  # the work for which the host has waited: ordered before all later launches
        self.races: list[str] = []
        self.waits = 0  # the number of times that the host has waited for a device
        self.freed: deque[Any] = deque()
        self.tls = threading.local()
        self.blocks: dict[int, Any] = {}
        self.captures: list[Any] = []
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def close(self) -> None:
        """Frees the memory that the pools keep for reuse, because cached plans may hold the machine forever."""
        for gpu in self.gpus:
            if gpu.pool is not None:
                gpu.pool.free_all_blocks()

    # -- the current device and stream ---------------------------------------------------------------

    def current(self) -> int:
        """Returns the current device of this thread."""
        return getattr(self.tls, "device", 0)

    def stream(self) -> Stream:
        """Returns the current stream of the current device in this thread."""
        device = getattr(self.tls, "device", 0)
        streams = getattr(self.tls, "streams", None)
        ptr = streams[device].ptr if streams is not None else 0
        return self.gpus[device].null if ptr < 16 else self.by_ptr[ptr]

    def find(self, ptr: int) -> Stream | None:
        """Returns the stream with a handle; small numbers are CUDA's names for the default stream."""
        return self.gpus[self.current()].null if ptr < 16 else self.by_ptr.get(ptr)

    # -- streams and events --------------------------------------------------------------------------

    def handle(self) -> int:
        with self.lock:
            self.next_ptr += 16
            return self.next_ptr

    def create_stream(self, kind: str) -> Stream:
        made = Stream(self.handle(), self.current(), kind)
        with self.lock:
            self.by_ptr[made.ptr] = made
            self.streams.append(made)
            if kind == BLOCKING:
                self.gpus[made.device].blocking.append(made)
        return made

    def destroy_stream(self, ptr: int) -> None:
        """Destroys a stream. Its queued work still runs, and the null stream remains ordered after it."""
        if not self.lock.acquire(blocking=False):
            return  # A garbage collection interrupted a method that holds the lock: the stream remains, idle.
        try:
            stream = self.by_ptr.pop(ptr, None)
            if stream is None:
                return
            stream.alive = False
            if stream.kind == BLOCKING:
                null = self.gpus[stream.device].null
                self._append(null, None, self._enter(null))
                self.gpus[stream.device].blocking.remove(stream)
        finally:
            self.lock.release()

    def record(self, stream: Stream) -> Recorded:
        with self.lock:
            self._drain()
            if stream.kind != NON_BLOCKING and stream.capture is None:
                self._append(stream, None, self._enter(stream))
            return Recorded(stream)

    def wait(self, stream: Stream, point: Recorded) -> None:
        if point.capture is not stream.capture:
            if stream.capture is None:
                raise NotImplementedError("the double has no captures of several streams")
            stream.capture.refuse(905)
        if stream.capture is not None:
            return
        with self.lock:
            self._drain()
            deps = self._enter(stream)
            if point.stream is not stream:
                if point.stream.done < point.seq:
                    deps = (*deps, (point.stream, point.seq))
                stream.join(point.stream, point.seq, point.clock)
            self._append(stream, None, deps)

    # -- launching -----------------------------------------------------------------------------------

    def launch(self, name: str, run: Any, reads: Any, writes: Any, stream: Stream | None = None) -> Stream:
        """Queues ``run``, which accesses the memory of ``reads`` and ``writes``.

        The default of ``stream`` is the current stream. ``run`` must not refer to the arrays: as on a GPU, queued work
        keeps no memory alive.
        """
        with self.lock:
            if self.freed:
                self._drain()
            s = self.stream() if stream is None else stream
            if s.capture is not None:
                s.capture.add(name, run, reads, writes)
                return s
            for capture in self.captures if s.kind is NULL else ():
                if capture.stream.kind is BLOCKING and capture.stream.device == s.device:
                    capture.refuse(906)
            deps = self._enter(s) if s.kind is not NON_BLOCKING else ()
            trouble: list[str] = []
            for a in reads:
                block = a.data.mem.block
                if block is not None and block.write is not None and block.write[0] is not s:
                    self._check(s, name, "reads", a, block.write, trouble)
            for a in writes:
                block = a.data.mem.block
                if block is None:
                    continue
                if block.write is not None and block.write[0] is not s and not trouble:
                    self._check(s, name, "writes", a, block.write, trouble)
                for other in block.reads.values():
                    if other[0] is not s:
                        self._check(s, name, "writes", a, other, trouble)
            if trouble:
                self.races.extend(trouble)
                if self.config.raise_races:
                    raise Race("; ".join(trouble))
            self._append(s, run, deps)
            access = (s, s.seq, name)
            for a in reads:
                if (block := a.data.mem.block) is not None:
                    block.reads[s] = access
            for a in writes:
                if (block := a.data.mem.block) is not None:
                    block.write = access
                    block.reads.clear()
            self._advance(s)
        return s

    def _check(self, s: Stream, name: str, verb: str, what: Any, earlier: Any, trouble: list[str]) -> None:
        other, seq, by = earlier
        if seq <= s.clock.get(other, 0) or seq <= self.host.get(other, 0):
            return
        trouble.append(
            f"{name} on {s} {verb} {what.describe()} and is not ordered after {by} on {other}, "
            "which uses the same memory"
        )

    def _enter(self, s: Stream) -> tuple[Any, ...]:
        """Adds CUDA's implicit order: the null stream and the blocking streams of a device wait for each other.

        Returns:
            The work that has to run before the next work of the stream.
        """
        if s.kind is NON_BLOCKING:
            return ()
        gpu = self.gpus[s.device]
        deps = []
        for other in gpu.blocking if s.kind is NULL else (gpu.null,):
            if other.seq > s.clock.get(other, 0):
                s.join(other, other.seq, other.clock)
                if other.done < other.seq:
                    deps.append((other, other.seq))
        return tuple(deps)

    def _append(self, s: Stream, run: Any, deps: tuple[Any, ...]) -> None:
        s.seq += 1
        if run is None and not deps and not s.queue:
            s.done = s.seq
        else:
            s.queue.append((run, deps))

    # -- freeing -------------------------------------------------------------------------------------

    def free(self, block: Any) -> None:
        """Returns a block to its arena. Destructors may call this while another method holds the lock."""
        block.extent = 0
        self.freed.append(block)
        if self.lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self.lock.release()

    def drain(self) -> None:
        with self.lock:
            self._drain()

    def _drain(self) -> None:
        while self.freed:
            block = self.freed.popleft()
            s = block.stream
            trouble: list[str] = []
            deps = self._enter(s)
            for other in (block.write, *block.reads.values()):
                if other is not None and other[0] is not s:
                    self._check(s, "freed too early: its reuse", "overwrites", block, other, trouble)
            self.races.extend(trouble)  # not raised, because a destructor may have called this
            self._append(s, block.poison, deps)
            block.write = (s, s.seq, "the reuse of freed memory")
            block.reads.clear()
            block.pool.give_back(block)
            if self.config.scheduler == "eager":
                self._catch_up(s, s.seq)

    # -- running -------------------------------------------------------------------------------------

    def _advance(self, s: Stream) -> None:
        """Lets the scheduler run queued work after a launch."""
        mode = self.config.scheduler
        if mode == "random":
            r = self.rng.random()
            if r < 0.5:
                self._step(self.streams[int(2 * r * len(self.streams))], 1 + self.rng.getrandbits(2))
        elif mode == "eager":
            self._run(s, s.seq)

    def _step(self, s: Stream, steps: int) -> None:
        """Runs up to ``steps`` pieces of the work queued on ``s``, until one has to wait for another stream."""
        queue = s.queue
        if not queue:
            if not s.alive:
                self.streams.remove(s)
            return
        with np.errstate(all="ignore"):
            while steps and queue and all(other.done >= n for other, n in queue[0][1]):
                self._pop(s)
                steps -= 1

    def _run(self, stream: Stream, seq: int) -> None:
        """Runs all work that must run before ``stream`` has done ``seq``."""
        if stream.done < seq:
            with np.errstate(all="ignore"):
                self._catch_up(stream, seq)

    def _catch_up(self, stream: Stream, seq: int) -> None:
        """Does the same as `_run` without setting a context variable.

        A destructor must not set one, because Python 3.11 crashes if the destructor interrupts the setting of another.
        """
        stack = [(stream, seq)]
        while stack:
            s, n = stack[-1]
            if isinstance(s, Arrivals):
                self.arrival.wait_for(lambda s=s, n=n: s.done >= n)  # type: ignore[misc]
                del stack[1:]  # Other threads may have run some of the work meanwhile.
                continue
            if s.done >= n:
                stack.pop()
                continue
            first = next((d for d in s.queue[0][1] if d[0].done < d[1]), None)
            if first is not None:
                stack.append(first)
            else:
                self._pop(s)

    def _pop(self, s: Stream) -> None:
        run = s.queue.popleft()[0]
        s.done += 1
        if run is not None:
            try:
                run()
            except Exception as error:  # reported at the next wait, as on a GPU
                self.gpus[s.device].error = error

    # -- messages of other processes -----------------------------------------------------------------

    def run_alone(self, stream: Stream) -> None:
        """Runs the work that a stream has now, as a GPU does without the host."""

        def run(seq: int = stream.seq) -> None:
            with self.lock:
                self._run(stream, seq)

        threading.Thread(target=run, daemon=True).start()

    def expect(self, stream: Stream) -> Arrivals:
        """Makes later work of a stream wait for messages that have not come yet."""
        with self.lock:
            arrivals = Arrivals(0, stream.device, NON_BLOCKING)
            arrivals.seq = 1
            self._append(stream, None, (*self._enter(stream), (arrivals, 1)))
            return arrivals

    def arrived(self, arrivals: Arrivals) -> None:
        """Tells that the messages have come."""
        with self.lock:
            arrivals.done = 1
            self.arrival.notify_all()

    # -- waiting -------------------------------------------------------------------------------------

    def synchronize(self, stream: Stream) -> None:
        """Makes the host wait until the stream has run all its work."""
        if stream.capture is not None:
            stream.capture.refuse()
        with self.lock:
            self.waits += 1
            self._synchronize(stream)
        self._raise(stream.device)

    def _synchronize(self, stream: Stream) -> None:
        self._drain()
        if stream.kind is not NON_BLOCKING:
            self._append(stream, None, self._enter(stream))
        self._run(stream, stream.seq)
        self._seen(stream, stream.seq, stream.clock)
        stream.clock.clear()

    def synchronize_device(self, device: int) -> None:
        for capture in list(self.captures):
            if capture.stream.device == device:
                capture.refuse()
        with self.lock:
            self.waits += 1
            for stream in list(self.streams):
                if stream.device == device:
                    self._synchronize(stream)
                    if not stream.alive:
                        self.streams.remove(stream)
        self._raise(device)

    def synchronize_point(self, point: Recorded) -> None:
        if point.capture is not None:
            point.capture.refuse(907)
        with self.lock:
            self.waits += 1
            self._drain()
            self._run(point.stream, point.seq)
            self._seen(point.stream, point.seq, point.clock)
        self._raise(point.stream.device)

    def reached(self, stream: Stream, seq: int, clock: dict[Stream, int]) -> bool:
        """Whether the stream has done ``seq``. If not, some work runs, so that a loop that polls ends."""
        with self.lock:
            self._drain()
            if stream.done >= seq:
                self._seen(stream, seq, clock)
                return True
            s, n = stream, seq
            while (first := next((d for d in s.queue[0][1] if d[0].done < d[1]), None)) is not None:
                s, n = first
                if isinstance(s, Arrivals):
                    return False
            with np.errstate(all="ignore"):
                self._pop(s)
            return False

    def _seen(self, stream: Stream, seq: int, clock: dict[Stream, int]) -> None:
        learn(self.host, stream, seq, clock)

    def _raise(self, device: int) -> None:
        error, self.gpus[device].error = self.gpus[device].error, None
        if isinstance(error, CUDARuntimeError):
            raise error
        if error is not None:
            raise CUDARuntimeError(719) from error


world = World(Config(devices=0))


def start(config: Config) -> World:
    """Starts a new machine. Objects of the old one refer to it, so that their destructors still work."""
    global world
    world = World(config)
    return world
