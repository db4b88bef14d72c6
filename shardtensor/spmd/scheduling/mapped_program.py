"""Programs and rendezvous: the calls of a mapped function, and the state in which they wait for each other.

A program is one call of a mapped function. It runs in a greenlet of its own, which can be suspended anywhere: where the
program needs data of other programs, it is suspended, and its thread switches to another program. See
`shardtensor.spmd.scheduling.scheduler` for the threads that run programs.
"""

from __future__ import annotations

import contextvars
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from shardtensor.communication.array_communicator import ArrayCommunicator
from shardtensor.errors import CollectiveError
from shardtensor.host.signals import hear, missed
from shardtensor.spmd.collective_call import CollectiveCall
from shardtensor.spmd.scheduling.workers import depth_of

if TYPE_CHECKING:
    from greenlet import greenlet

    from shardtensor.backend.device import Device
    from shardtensor.backend.protocol import Backend
    from shardtensor.tensor.ownership import Lent

Task = Callable[["Program"], Any]


class ExecutionContext(Protocol):
    """The state of a thread that a program needs while it runs, such as the current device.

    Programs of a thread take turns, and other code of the thread runs only after `WorkerThread.leave_block`.
    """

    def enter(self, thread: WorkerThread) -> None:
        """Sets the state at the start of the program."""

    def leave(self, thread: WorkerThread) -> None:
        """Ends the state when the program has returned."""

    def fail(self, thread: WorkerThread, error: BaseException) -> None:
        """Ends the state after an error of the program; raises another one if that says more."""

    def suspend(self, thread: WorkerThread) -> None:
        """Saves the state of the program, so that another one can run."""

    def resume(self, thread: WorkerThread) -> None:
        """Sets the state that `suspend` saved."""


class WorkerThread:
    """A thread that runs programs for a scheduler.

    Attributes:
        block: the context manager of a backend that a program has left entered for the next one; None if there is none.
        block_of: the backend of the block.
        current: returns the greenlet in which it is called.
        idle: the greenlets of earlier maps, in which programs can run.
        main: the main greenlet, to which programs switch when they are suspended.
        job: the map whose programs a worker is to start; None as soon as it does.
        ready: suspended programs of this thread that can be resumed.
        request: what the program that has just been suspended requests: a method of the scheduler, and its arguments,
            of which the first is the program.
        inside: whether user code of a program is running, as opposed to the library's: only there may signal handlers
            run, and raise, between any two instructions.
        running: the program that is running in the thread.
        root: the outermost greenlet of the thread.
    """

    __slots__ = ("block", "block_of", "current", "idle", "inside", "job", "main", "ready", "request", "root", "running")

    def __init__(self, current: Callable[[], greenlet], idle: list[greenlet]) -> None:
        self.idle = idle
        self.block: AbstractContextManager[object] | None = None
        self.block_of: Backend | None = None
        self.current = current
        self.main = current()
        self.job: MapRun | None = None
        self.ready: deque[Program] = deque()
        self.request: tuple[Callable[..., bool], tuple[Any, ...]] | None = None
        self.inside = False
        self.running: Program | None = None
        self.root = _root(self.main)

    def leave_block(self) -> None:
        """Leaves the block that a program has left entered, if there is one."""
        block, self.block = self.block, None
        if block is not None:
            block.__exit__(None, None, None)

    def is_here(self) -> bool:
        """Whether the calling thread is this one. Threads are identified by their root greenlets, not by numbers: a
        thread's number changes in the child of a fork, and where gevent has replaced ``threading.get_ident``, it is the
        number of a greenlet.
        """
        return _root(self.current()) is self.root


def _root(context: greenlet) -> greenlet:
    """Returns the outermost greenlet of the thread to which this one belongs."""
    while context.parent is not None:
        context = context.parent
    return context


class SchedulerProtocol(Protocol):
    """The methods of the scheduler that programs request, and `withdraw`; see
    `shardtensor.spmd.scheduling.scheduler.Scheduler`. A request returns whether the program continues at once.
    """

    def arrive(self, program: Program, call: CollectiveCall, position: int, contribution: Any) -> bool:
        """Adds the contribution of a program to a rendezvous."""

    def complete(self, program: Program, rendezvous: Rendezvous, results: Sequence[Any]) -> bool:
        """Resumes the programs of a rendezvous with the results that a program has computed."""

    def cancel(self, program: Program, rendezvous: Rendezvous, error: BaseException) -> bool:
        """Resumes the programs of a rendezvous with an error that one of them has raised."""

    def open(self, program: Program, run: MapRun) -> bool:
        """Adds a map whose programs are to be started, and for which a program waits."""

    def withdraw(self, program: Program, why: str) -> None:
        """Removes a program from the rendezvous in which it waits."""


def secondary(message: str) -> CollectiveError:
    """Returns an error for a program that did not fail itself, but depends on one that did."""
    error = CollectiveError(message)
    error.secondary = True
    return error


class Failed(Exception):
    """Carries the number of the program that failed, and its error."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__(number, error)
        self.number = number
        self.error = error


CURRENT: contextvars.ContextVar[Program | None] = contextvars.ContextVar("shardtensor_program", default=None)
"""The program of the context. Where a call of `current` would take too long, it is read here, as an attribute of the
module, since `leave_maps` replaces it.
"""


def current() -> Program | None:
    """Returns the program in whose context this is called; None outside of mapped functions."""
    return CURRENT.get()


def around() -> Program | None:
    """Returns the program that encloses a map called here; None outside of mapped functions, and in a thread that has
    only a copy of a program's context.
    """
    program = CURRENT.get()
    return program if program is not None and program.is_running() else None


def leave_maps(scheduler: SchedulerProtocol) -> None:
    """Leaves all maps, in all contexts, if this is called in a program of the scheduler."""
    global CURRENT
    program = CURRENT.get()
    # The scheduler deletes the attribute at the end of the map.
    if program is not None and getattr(program.run, "scheduler", None) is scheduler:
        CURRENT = contextvars.ContextVar(CURRENT.name, default=None)


class Assistant(Protocol):
    """A thread that calls a function for a program, which waits for it; see `shardtensor.spmd.scheduling.assistant`."""

    def is_here(self) -> bool:
        """Whether the calling thread is this one."""

    def ask(self, request: Callable[[], Any]) -> Any:
        """Has the program call a function, and returns its result or raises its error."""


class MapRun:
    """The programs of one map.

    Attributes:
        parent: the program that called the map; None for an outermost map.
        depth: the number of frames on the stack of the map's call and of the maps around it; 0 for an outermost map.
        axes: the names of the axes of the maps around this one and of this one, outermost first.
        extents: the sizes of these axes.
        failed: the reason why the programs must not wait any more; None while there is none.
        devices: the devices of each program, if some of them are in other processes.
        unstarted: the number of programs that have not been started.
        left: the number of programs that have not ended.
    """

    axes: tuple[str, ...] = ()
    extents: tuple[int, ...] = ()
    depth = 0
    devices: tuple[tuple[Device, ...], ...] = ()
    failed: str | None = None
    scheduler: SchedulerProtocol

    def __init__(
        self,
        tasks: Sequence[Task],
        labels: Sequence[str],
        names: Sequence[str],
        sizes: Sequence[int],
        parent: Program | None,
    ) -> None:
        if parent:
            self.axes, self.extents = parent.run.axes, parent.run.extents
        self.axes += tuple(names or [f"#{len(self.axes)}"])
        self.extents += tuple(sizes)
        self.tasks = tasks
        self.labels = labels
        self.sizes = sizes
        self.parent = parent
        self.context = contextvars.copy_context()
        self.results: list[Any] = [None] * len(tasks)
        self.errors: list[tuple[bool, int, BaseException]] = []
        self.left = self.unstarted = len(tasks)
        self.live: dict[int, Program] = {}

    def coordinates(self, number: int) -> tuple[int, ...]:
        """Returns the position of a program along the axes of this map and of those around it."""
        at = []
        for size in reversed(self.sizes):
            number, index = divmod(number, size)
            at.append(index)
        return (*(self.parent.coordinates if self.parent else ()), *reversed(at))

    def drop(self) -> None:
        """Discards the programs that have not been started. The scheduler's lock is held."""
        self.left -= self.unstarted
        self.unstarted = 0

    def outcome(self) -> list[Any]:
        """Returns the results of all programs.

        Raises:
            Failed: a program failed.
        """
        if not self.errors and not self.failed:
            return self.results
        if not self.errors:  # The programs have caught the errors with which they were released.
            raise Failed(0, secondary(str(self.failed)))
        _, number, error = min(self.errors, key=lambda e: e[:2])
        self.errors.clear()  # The error's traceback refers to this frame: a cycle would keep all arguments alive.
        raise Failed(number, error)


class Rendezvous:
    """The programs that have made one collective call, and their contributions; complete when none is missing.

    Attributes:
        call: the call of the first program.
        members: the programs that have arrived, at their positions; the others are None.
        missing: how many programs of this process have not arrived.
        numbers: the numbers of all programs, if some of them run in other processes: they have to meet, too.
    """

    __slots__ = ("call", "contributions", "members", "missing", "numbers")

    def __init__(self, call: CollectiveCall) -> None:
        self.call = call
        self.members: list[Program | None] = [None] * call.size
        self.contributions: list[Any] = [None] * call.size
        self.missing = call.across.here if call.across else call.size
        self.numbers: tuple[int, ...] = call.across.numbers if call.across else ()

    @property
    def arrived(self) -> list[Program]:
        """The programs that have made the call."""
        return [member for member in self.members if member is not None]


class Program:
    """One call of a mapped function.

    Attributes:
        devices: its devices.
        execution_context: the state of the thread that it needs, suspended together with it; None if it needs none.
        lent: the arrays of tensors that it received as arguments.
        arguments: the specs of the leaves of its arguments, if they are blocks, and the arguments.
        noted: the types of arrays, by identity (see `shardtensor.spmd.manual_types`).
        communicator: the class of the communicators of its collectives.
        positions: cached axis positions, by axis names.
        thread: the thread in which it runs.
        suspended: the greenlet in which it is suspended.
        pending: the rendezvous or the inner map for which it waits.
        result, error: the result of that, or the error with which it is resumed.
        assistant: the thread that calls a function for the program; None if there is none.
        recorded: how many of its collectives the array library has recorded for gradients.
        recorded_along: the same for each set of programs that meet.
    """

    devices: tuple[Device, ...] = ()
    execution_context: ExecutionContext | None = None
    lent: Sequence[Lent] = ()
    arguments: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    communicator: Any = ArrayCommunicator
    suspended: greenlet
    pending: Rendezvous | MapRun | None = None
    result: Any = None
    error: BaseException | None = None
    assistant: Assistant | None = None
    recorded = 0
    recorded_along: dict[Any, int] | None = None

    def __init__(self, run: MapRun, thread: WorkerThread) -> None:
        """Starts the next program of a map in the calling greenlet, as the current one of a context of its own. The
        scheduler's lock is held.
        """
        self.run = run
        self.number = len(run.tasks) - run.unstarted
        self.thread = thread
        self.positions: dict[Any, Any] = {}
        self.noted: dict[int, Any] = {}
        run.unstarted -= 1
        run.live[self.number] = self
        thread.current().gr_context = run.context.copy()
        CURRENT.set(self)

    def __str__(self) -> str:
        return self.run.labels[self.number]

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The position of the program along ``run.axes``."""
        run = self.run
        return (self.number,) if run.parent is None and len(run.sizes) == 1 else run.coordinates(self.number)

    def is_running(self) -> bool:
        """Whether the caller is the program itself; False in another thread that has a copy of its context, and after
        the program's end.
        """
        thread = self.thread
        if thread.running is not self:
            return False
        # All workers are greenlets of the thread's main one; the program may have started others.
        return thread.current().parent is thread.main or thread.is_here()

    # -- operations --------------------------------------------------------------------------------

    def meet(self, call: CollectiveCall, position: int, contribution: Any) -> Any:
        """Contributes to a collective, waits until all programs that meet in it have contributed, and returns the
        result of this program.

        Args:
            call: the collective call, which must be equal for all programs.
            position: the index of this program among them.
            contribution: the item of this program in the argument of ``call.work``.

        Raises:
            CollectiveError: a program made another call, or cannot arrive any more.
            ShardTensorError: ``call.work`` failed; every program gets the error.
        """
        if not self.is_running():
            if self.assistant is not None and self.assistant.is_here():
                return self.assistant.ask(lambda: self.meet(call, position, contribution))
            raise CollectiveError(
                f"{call.description}: called beside {self}, in a copy of its context: in another thread, or "
                "after its end; only a program itself can call collectives"
            )
        scheduler, context = self.run.scheduler, self.execution_context
        self.thread.inside = False
        try:
            result = self._pause(context, scheduler.arrive, call, position, contribution)
            if type(result) is Rendezvous:  # This program is the last to arrive.
                try:
                    if context is not None:
                        context.resume(self.thread)
                    results = call.work(result.contributions)
                except BaseException as error:
                    self._pause(None, scheduler.cancel, result, error)
                    raise
                result = self._pause(None, scheduler.complete, result, results)[position]
        finally:
            self.thread.inside = True
        if missed:
            hear()
        return result

    def await_run(self, run: MapRun) -> None:
        """Suspends the program until the programs of a map that it called are done.

        Raises:
            RecursionError: the frames of this call and of the maps around it exceed the recursion limit. The
                interpreter does not add them up, since each program begins near the bottom of a stack.
        """
        run.depth = depth_of(sys._getframe()) + (self.run.depth or depth_of(self.thread.main.gr_frame))
        if run.depth > sys.getrecursionlimit():
            raise RecursionError(
                f"maximum recursion depth exceeded: a map inside of maps, called by {self}, is {run.depth} frames "
                f"deep, and sys.getrecursionlimit() is {sys.getrecursionlimit()}"
            )
        run.scheduler = self.run.scheduler
        self.thread.inside = False
        try:
            self._pause(self.execution_context, run.scheduler.open, run)
        finally:
            self.thread.inside = True

    def _pause(self, context: ExecutionContext | None, method: Callable[..., bool], *args: Any) -> Any:
        """Suspends the program, has the scheduler call one of its methods with the program and further arguments, and
        waits until it resumes the program; returns the result or raises the error of the wait.

        The ``context`` is suspended meanwhile; that of a program that continues with a rendezvous stays suspended.

        The scheduler changes its state on the stack of its own greenlet only. On that of the program, an error between
        any two instructions, such as a RecursionError, would leave the state half changed, and the map would never end.
        """
        thread = self.thread
        if context is not None:
            context.suspend(thread)
        self.suspended = thread.current()
        request = thread.request = method, (self, *args)
        try:
            thread.main.switch()
        except BaseException as raised:
            if thread.request is request:  # It has not switched.
                thread.request = None
                raise
            if isinstance(self.pending, Rendezvous):
                raised.add_note(f"in {self.pending.call.description}")
            self.run.scheduler.withdraw(self, f"{self} failed there: {raised!r}")
            raise
        del request, args  # They may contain an error, whose traceback refers to this frame.
        thread.running = self
        error, result, self.error, self.result = self.error, self.result, None, None
        if context is not None and type(result) is not Rendezvous:
            context.resume(thread)
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # A cycle of the error and this frame would keep both alive.
