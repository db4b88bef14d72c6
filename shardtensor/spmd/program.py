"""Programs and their meetings: what the calls of a mapped function are, and what passes between them.

A program is one call of a mapped function. It runs in a context of its own (a greenlet), which can be left in the
middle: where it needs something of others, it waits there, and its thread goes on with another program. See
`shardtensor.spmd.scheduler` for who serves them.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shardtensor.errors import CollectiveError, ShardTensorError
from shardtensor.host.fork import in_children
from shardtensor.host.signals import hear

if TYPE_CHECKING:
    from types import FrameType

    from greenlet import greenlet

    from shardtensor.backend.device import Device

Task = Callable[["Program"], Any]
Work = Callable[[list[Any]], Sequence[Any]]


class ExecutionContext(Protocol):
    """What a program stands on in its thread, such as a current device: put aside while other programs run there.

    Attributes:
        devices: those that the program has.
    """

    devices: tuple[Device, ...]

    def suspend(self) -> None:
        """Leaves the thread as the program found it."""

    def resume(self) -> None:
        """Makes it again what it was when the program stepped off."""


class WorkerThread:
    """A thread's part in a world.

    Attributes:
        current: what gives the context in which it is called.
        hub: the context to which programs give the thread back.
        idle: workers (greenlets) that have no program and can run those of another inner map.
        job: the map whose programs the worker that is switched to next starts; None ends an idle worker.
        ready: its programs that can go on.
        inside: whether a program's own code is running, and not the machinery.
        running: the program that has the thread.
        root: the context in which the thread began.
    """

    __slots__ = ("current", "idle", "inside", "job", "main", "ready", "root", "running")

    def __init__(self, current: Callable[[], greenlet]) -> None:
        self.current = current
        self.main = current()
        self.idle: list[greenlet] = []
        self.job: MapRun | None = None
        self.ready: deque[Program] = deque()
        self.inside = False
        self.running: Program | None = None
        self.root = _root(self.main)

    def is_here(self) -> bool:
        """Whether this is its thread. It is known by its greenlets: a thread's number changes in the child of a fork,
        and where gevent has replaced ``threading.get_ident``, it is the number of a greenlet.
        """
        return _root(self.current()) is self.root


def _root(context: greenlet) -> greenlet:
    """The greenlet in which the thread of this one began."""
    while context.parent is not None:
        context = context.parent
    return context


class SchedulerProtocol(Protocol):
    """What programs ask of their world; see `shardtensor.spmd.scheduler.Scheduler`. With the lock held, but for
    `withdraw`.
    """

    lock: threading.Lock
    meetings: dict[Hashable, Rendezvous]

    def open(self, group: MapRun) -> None:
        """A map is there to be served."""

    def resume(self, program: Program, result: Any) -> None:
        """A program can go on."""

    def release(self, program: Program, error: BaseException) -> None:
        """A program goes on with an error."""

    def fail(self, group: MapRun, why: str) -> None:
        """Nobody in a map shall wait any more."""

    def withdraw(self, program: Program, why: str) -> None:
        """A program does not wait any more."""

    def abandon(self) -> bool:
        """In the child of a fork: gives up if programs ran in several threads, and answers whether they did."""


def secondary(message: str) -> CollectiveError:
    """The error of a program that did nothing wrong itself."""
    error = CollectiveError(message)
    error.secondary = True
    return error


class Failed(Exception):
    """The number of the program that failed, and how."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__(number, error)
        self.number = number
        self.error = error


_current: contextvars.ContextVar[Program | None] = contextvars.ContextVar("shardtensor_program", default=None)


def current() -> Program | None:
    """The program around this call, None outside of all."""
    return _current.get()


def around() -> Program | None:
    """The program that a map called here is inside of. A thread with a copy of the program's context has none."""
    program = _current.get()
    return program if program is not None and program.is_running() else None


def enter(program: Program) -> None:
    """From now on in this context, it is the one around."""
    _current.set(program)


@in_children
def _leave_maps() -> None:
    """In the child of a fork: a program whose map runs in several threads is outside of all maps, since the others are
    not there. The child can run operators and maps of its own, and gets an error if it goes on with the parent's map.
    """
    global _current
    program = _current.get()
    world = getattr(program.group, "world", None) if program is not None else None  # none after the map's end
    if world is not None and world.abandon():
        _current = contextvars.ContextVar(_current.name, default=None)


_ROOM = 20
"""More frames than the scheduler puts on the stack, not counting those of mapped functions and of collectives."""


def check_room(left: int = _ROOM) -> None:
    """Raises RecursionError if the interpreter would raise it while the scheduler changes its state: a map that is left
    there never ends. The check makes as many calls as the scheduler does, since frames cannot be counted instead:
    before Python 3.12, the limit includes calls of C functions.
    """
    if left:
        check_room(left - 1)


def _depth(frame: FrameType | None) -> int:
    """The number of frames from this one to the outermost one of its stack."""
    count = 0
    while frame is not None:
        frame = frame.f_back
        count += 1
    return count


class MapRun:
    """The programs of one map.

    Attributes:
        parent: the program that called it.
        depth: the number of frames on the stack of its call and of the maps around it; 0 for an outermost map.
        axes: the names by which a program's place is given, from the outermost map to this one.
        extents: their sizes.
        failed: why its programs must not wait for anybody any more.
        known: what has been found out about axes, by the names as they were given.
    """

    __slots__ = (
        "_next", "axes", "context", "depth", "errors", "extents", "failed", "known", "labels", "left", "live", "parent",
        "results", "sizes", "tasks", "world",
    )  # fmt: skip

    def __init__(
        self,
        tasks: Sequence[Task],
        labels: Sequence[str],
        names: Sequence[str],
        sizes: Sequence[int],
        parent: Program | None,
    ) -> None:
        outer = parent.group.axes if parent else ()
        self.extents: tuple[int, ...] = (*(parent.group.extents if parent else ()), *sizes)
        self.tasks = tasks
        self.labels = labels
        self.sizes = tuple(sizes)
        self.parent = parent
        self.depth = 0
        self.axes: tuple[str, ...] = (*outer, *(names or [f"#{len(outer)}"]))
        self.context = contextvars.copy_context()
        self.results: list[Any] = [None] * len(tasks)
        self.errors: list[tuple[bool, int, BaseException]] = []
        self.failed: str | None = None
        self.left = len(tasks)
        self.live: dict[int, Program] = {}
        self.known: dict[Any, Any] = {}
        self.world: SchedulerProtocol
        self._next = 0

    def place(self, number: int) -> tuple[int, ...]:
        """Where a program stands along the axes of this map and of those around it."""
        at = []
        for size in reversed(self.sizes):
            number, index = divmod(number, size)
            at.append(index)
        return (*(self.parent.place if self.parent else ()), *reversed(at))

    @property
    def unstarted(self) -> int:
        """How many programs wait for whoever comes."""
        return len(self.tasks) - self._next

    def take(self) -> int | None:
        """The next program that is not started. The world's lock is held."""
        if self._next == len(self.tasks):
            return None
        self._next += 1
        return self._next - 1

    def drop(self) -> None:
        """Gives up what is not started. The world's lock is held."""
        self.left -= len(self.tasks) - self._next
        self._next = len(self.tasks)

    def outcome(self) -> list[Any]:
        """The results.

        Raises:
            Failed: there are errors.
        """
        if not self.errors and not self.failed:
            return self.results
        if not self.errors:  # the programs have kept to themselves that they were told
            raise Failed(0, secondary(str(self.failed)))
        _, number, error = min(self.errors, key=lambda e: e[:2])
        self.errors.clear()  # the error's traceback ends here: the two would keep each other, and all arguments, alive
        raise Failed(number, error)


class Rendezvous:
    """Programs that wait until all of them have called the same."""

    __slots__ = ("call", "contributions", "key", "members", "missing")

    def __init__(self, key: Hashable, call: CollectiveCall, size: int) -> None:
        self.key = key
        self.call = call
        self.members: list[Program | None] = [None] * size
        self.contributions: list[Any] = [None] * size
        self.missing = size


class CollectiveCall:
    """What a program calls in a meeting; calls that meet must be equal.

    Attributes:
        said: for people, such as ``psum over 'x'``.
        details: everything else in which calls may differ: pairs of a name and a value.
        key_at: the key under which the program at a place meets others, for errors; it is not compared.
    """

    __slots__ = ("details", "key_at", "said")

    def __init__(
        self,
        said: str,
        details: tuple[tuple[str, Any], ...] = (),
        key_at: Callable[[tuple[int, ...]], Any] | None = None,
    ) -> None:
        self.said = said
        self.details = details
        self.key_at = key_at

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveCall) and (self.said, self.details) == (other.said, other.details)

    __hash__ = None  # type: ignore[assignment]

    def beside(self, other: CollectiveCall) -> tuple[str, str]:
        """How to say what the two differ in."""
        if self.said != other.said:
            return self.said, other.said
        (name, mine), (_, theirs) = next((a, b) for a, b in zip(self.details, other.details, strict=True) if a != b)
        return f"{self.said} with {name} = {mine}", f"{other.said} with {name} = {theirs}"


class Program:
    """One call of a mapped function.

    Attributes:
        footing: what it stands on in its thread.
        given: arrays that it was given and nobody writes.
        seats: what it has found out about groups of axes, kept for the next time.
        server: its thread.
        thread: the context in which it pauses.
        pending: what it waits for.
        result, error: with what it goes on.
    """

    execution_context: ExecutionContext | None = None
    given: Sequence[Any] = ()
    thread: greenlet
    pending: Rendezvous | MapRun | None = None
    result: Any = None
    error: BaseException | None = None

    def __init__(self, group: MapRun, number: int, server: WorkerThread) -> None:
        self.group = group
        self.number = number
        self.server = server
        self.positions: dict[Any, Any] = {}

    def __str__(self) -> str:
        return self.group.labels[self.number]

    @property
    def place(self) -> tuple[int, ...]:
        """Its position along ``group.axes``."""
        return self.group.place(self.number)

    def is_running(self) -> bool:
        """Whether this call is the program's own, and not one beside it: in another thread that has a copy of its
        context, or after its end.
        """
        return self.server.running is self and self.server.is_here()

    # -- what it does ------------------------------------------------------------------------------

    def call(self, fn: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Calls the program's own code: only there, handlers of signals may run, and raise, at any moment."""
        self.server.inside = True
        try:
            return fn(*arguments)
        finally:
            self.server.inside = False

    def meet(self, key: Hashable, call: CollectiveCall, size: int, seat: int, contribution: Any, work: Work) -> Any:
        """What ``work`` makes for this program of the offers of all ``size`` programs that meet under ``key``.

        The last one to come does the work for all.

        Raises:
            CollectiveError: one of them called something else, or cannot come any more.
            ShardTensorError: the work failed; every one of them gets the error.
        """
        check_room()
        if not self.is_running():
            raise CollectiveError(
                f"{call.said}: called beside {self}, in a copy of its context: in another thread, or after its end; "
                "only a program itself can meet others"
            )
        self.server.inside = False
        try:
            result = self._meet(key, call, size, seat, contribution, work)
        finally:
            self.server.inside = True
        hear()
        return result

    def _meet(self, key: Hashable, call: CollectiveCall, size: int, seat: int, contribution: Any, work: Work) -> Any:
        world = self.group.world
        with world.lock:
            if self.group.failed:
                raise secondary(f"{call.said}: {self.group.failed}")
            meeting = world.meetings.get(key)
            if meeting is None:
                meeting = world.meetings[key] = Rendezvous(key, call, size)
            elif call != meeting.call:
                raise CollectiveError(_disagreement(self, call, meeting))
            meeting.members[seat] = self
            meeting.contributions[seat] = contribution
            meeting.missing -= 1
            last = not meeting.missing  # asked under the lock: the others come in other threads
            if last:
                del world.meetings[key]
            else:
                self.pending = meeting
        if not last:
            return self._pause()
        try:
            results = work(meeting.contributions)
        except BaseException as error:
            with world.lock:
                for member in meeting.members:
                    if member is not self and member is not None:
                        world.release(member, _copy(error, call, self))
            raise
        with world.lock:
            for other, result in enumerate(results):
                if other != seat:
                    world.resume(meeting.members[other], result)  # type: ignore[arg-type]
        return results[seat]

    def await_group(self, group: MapRun) -> None:
        """Waits until the programs of a map that this one called are done.

        Raises:
            RecursionError: the frames of this call and of the maps around it exceed the recursion limit. The
                interpreter does not add them up, since each program begins near the bottom of a stack.
        """
        check_room()
        group.depth = _depth(sys._getframe()) + (self.group.depth or _depth(self.server.main.gr_frame))
        if group.depth > sys.getrecursionlimit():
            raise RecursionError(
                f"maximum recursion depth exceeded: a map inside of maps, called by {self}, is {group.depth} frames "
                f"deep, and sys.getrecursionlimit() is {sys.getrecursionlimit()}"
            )
        world = group.world = self.group.world
        self.server.inside = False
        with world.lock:
            world.open(group)
            self.pending = group
            if self.group.failed:
                world.fail(group, self.group.failed)
        try:
            self._pause()
        finally:
            self.server.inside = True

    def _pause(self) -> Any:
        """Lets other programs have the thread until this one is resumed."""
        self.thread = self.server.current()
        try:
            if self.execution_context is not None:
                self.execution_context.suspend()
            self.server.main.switch()
            self.server.running = self
        except BaseException as raised:
            if isinstance(self.pending, Rendezvous):
                raised.add_note(f"in {self.pending.call.said}")
            self.group.world.withdraw(self, f"{self} failed there: {raised!r}")
            raise
        if self.execution_context is not None:
            self.execution_context.resume()
        error, result, self.error, self.result = self.error, self.result, None, None
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # else it and this frame would keep each other alive


def _disagreement(program: Program, call: CollectiveCall, meeting: Rendezvous) -> str:
    there = [str(m) for m in meeting.members if m is not None]
    mine, theirs = call.beside(meeting.call)
    return (
        f"{call.said}: {program} called {mine}, and {listed(there)} called {theirs}; all devices along an axis must "
        "make the same calls in the same order"
    )


def _copy(error: BaseException, call: CollectiveCall, program: Program) -> BaseException:
    """The same error for another program: an exception that is raised twice would mix up its tracebacks."""
    if isinstance(error, ShardTensorError):
        return type(error)(str(error))
    return CollectiveError(f"{call.said}: it failed on {program}: {error!r}")


def listed(labels: Sequence[str], limit: int = 6) -> str:
    """Labels in a row, the first few of many."""
    more = f" and {len(labels) - limit} more" if len(labels) > limit else ""
    return ", ".join(labels[:limit]) + more
