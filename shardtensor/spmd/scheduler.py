"""The world of programs: who serves them, on few threads, so that they meet and never wait in vain.

One thread can serve any number of programs that need one another, and switching costs a fraction of what waking
threads does. Programs that wait for nobody run one after the other in one context.

The caller's thread begins. When that has taken a while, helper threads take programs that are not started yet; a
program stays in the thread that started it. When every thread has nothing to do but wait, no program can ever go on:
that moment is known at once, without a time limit, and becomes an error that says who waits for what.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shardtensor.errors import BackendError, CollectiveError
from shardtensor.host import signals as interrupts
from shardtensor.host import threads as team
from shardtensor.host.blas_threads import Limit
from shardtensor.spmd import breakpoints
from shardtensor.spmd.program import MapRun, Program, Rendezvous, Task, WorkerThread, around, check_room, enter, listed

if TYPE_CHECKING:
    from greenlet import greenlet

_LOOK = 0.05
"""Seconds after which a thread that waits looks whether somebody has pressed Ctrl-C meanwhile."""


def run(
    tasks: Sequence[Task], labels: Sequence[str], *, names: Sequence[str] = (), sizes: Sequence[int] = (),
    helper_delay: float = 200e-6, text: Hashable = None,
) -> list[Any]:  # fmt: skip
    """The results of all tasks, in order; each runs as a program.

    Inside of another program, the new ones join it: they see its axes, too, and it waits for them.

    Args:
        tasks: what the programs do.
        labels: what they are called in errors.
        names: the named axes along which they are numbered, row-major; without, they are numbered along an axis that
            nobody can name.
        sizes: the sizes of those axes.
        patience: seconds of the caller's work after which helper threads take part (waking one costs about 50 µs).
        text: what the programs have in common. Those that took long the last time have helpers from the start.

    Raises:
        Failed: a program failed; of several, the first in order that was not merely told of another's failure.
    """
    parent = around()
    group = MapRun(tasks, labels, names, sizes or (len(tasks),), parent)
    if not tasks:
        return []
    if sys.is_finalizing():
        raise BackendError(
            "a map was called while the interpreter ends, such as by a __del__, when greenlets can no longer switch; "
            "call it earlier, at the latest in a function registered with atexit.register"
        )
    if parent is not None:
        parent.await_group(group)
        return group.outcome()
    check_room()
    world = Scheduler(group, 0.0 if text in _long and math.isfinite(helper_delay) else helper_delay)
    try:
        world.run()
        if not world.was_looked_at:
            _note(text, time.perf_counter() - world.started > _LONG * helper_delay)
        return group.outcome()
    finally:  # a helper thread may hold the world a moment longer; and the two would keep each other, and all results
        del group.world, world.root


_LONG = 4
"""How many times the patience a map must take for the next one like it to have helpers from the start."""

_long: dict[Hashable, None] = {}
_TEXTS_KEPT = 1024


def _note(text: Hashable, is_long: bool) -> None:
    if not is_long:
        _long.pop(text, None)
    elif text is not None and text not in _long:
        while len(_long) >= _TEXTS_KEPT:
            _long.pop(next(iter(_long)), None)
        _long[text] = None


@functools.cache
def _greenlets() -> Any:
    """The library of contexts, loaded by the first map."""
    return importlib.import_module("greenlet")


class Scheduler:
    """All programs under one outermost map, and the threads that serve them."""

    def __init__(self, root: MapRun, helper_delay: float) -> None:
        self.lock = threading.Lock()
        self._changed: threading.Condition | None = None  # nobody waits before there are helpers
        self.root = root
        self.groups = [root]
        self.meetings: dict[Hashable, Rendezvous] = {}
        self._busy = 0  # threads that do not wait
        self._ready = 0  # programs that can go on, once their threads see it
        self._helper_delay = helper_delay
        self._helpers: _Helpers | None = None
        self._is_over = False  # whether all threads stop, since the scheduler failed in one, or this is a fork's child
        root.world = self

    def run(self) -> None:
        """Serves until the outermost map is done."""
        self.started = time.perf_counter()
        server = WorkerThread(_greenlets().getcurrent)
        with _Interrupts(server) as self._interrupts, breakpoints.prompts() as self._prompts:
            self._prompts_before = self._prompts.count
            try:
                if not self._helper_delay:
                    self._call_for_help()
                self._serve(server)
            finally:
                if self._helpers:
                    self._helpers.dismiss()

    def _help(self) -> None:
        self._serve(WorkerThread(_greenlets().getcurrent))

    @property
    def was_looked_at(self) -> bool:
        """Whether somebody looked at a program in a debugger."""
        return self._prompts.count > self._prompts_before

    # -- threads -----------------------------------------------------------------------------------

    def _serve(self, server: WorkerThread) -> None:
        """What every thread does: goes on with a program of its own that can, else starts one, else waits."""
        with self.lock:
            self._busy += 1
        try:
            # Every switch to a worker is a call from this loop in C, so that the frames below a worker's first one are
            # the same whenever it runs: the interpreter calls from another depth while a profiler is installed.
            deque(map(_greenlets().greenlet.switch, self._steps(server)), maxlen=0)
        except BaseException:  # of the scheduler itself: the other threads must not wait for this one
            self._is_over = True
            raise
        with self.lock:
            self._busy -= 1

    def _steps(self, server: WorkerThread) -> Iterator[greenlet]:
        """The workers to which the thread switches, in order, until all programs have ended."""
        while True:
            with self.lock:
                worker = self._next(server)
            if worker is None:
                return
            yield worker
            self._call_for_help()

    def _hear(self, server: WorkerThread) -> None:
        """Runs the handlers of signals that were held back, in the thread that gets them. What one raises is the map's
        error, and all programs end before it is raised. The lock is held, but not while a handler runs.
        """
        if not self._interrupts.are_due(server):
            return
        self.lock.release()
        error: BaseException | None = None
        try:
            self._interrupts.deliver_to_caller()
        except BaseException as raised:  # carried to the caller, who raises it
            error = raised
        self.lock.acquire()
        if error is not None:
            self.root.errors.append((False, -1, error))
            self.fail(self.root, f"the caller was interrupted: {error!r}")
            del error  # else it and this frame would keep each other alive

    def _next(self, server: WorkerThread) -> greenlet | None:
        """The worker to which the thread switches next; None when all programs have ended. The lock is held."""
        while True:
            self._hear(server)
            if self._is_over:
                return None
            if server.ready:
                self._ready -= 1
                return server.ready.popleft().thread
            if not self.root.left:
                self._notify()
                return server.idle.pop() if server.idle else None
            for group in reversed(self.groups):  # inner maps first: their callers wait for them
                if group.unstarted:
                    return self._worker(group, server)
            self._busy -= 1
            try:
                if not self._busy and not self._ready:
                    self._release_all()
                elif self._changed:
                    self._changed.wait(_LOOK)
            finally:
                self._busy += 1

    def _worker(self, group: MapRun, server: WorkerThread) -> greenlet:
        """A greenlet that starts programs of a map, in the context of the map's caller.

        Workers end with the outermost map, although creating a greenlet costs more than a switch to one: the first
        frame of a worker returns to a frame of the hub that created it. A stack trace taken by C code (torch takes one
        for each error; profilers and debuggers do) follows this return address, and reads invalid addresses if the hub
        has returned meanwhile.
        """
        worker: greenlet = server.idle.pop() if server.idle else _greenlets().greenlet(partial(self._work, server))
        worker.gr_context = group.context.copy()
        server.job = group
        return worker

    def _work(self, server: WorkerThread) -> None:
        """The function of a worker: starts the programs of one map after the other."""
        worker = server.current()
        while (group := server.job) is not None:
            server.job = None
            self.start(group, server)
            worker.gr_context = None  # it holds the program, which holds the worker and all results of the map
            if group is self.root:  # inner maps reuse one another's workers, and need no more
                return
            del group
            server.idle.append(worker)
            server.main.switch()

    def start(self, group: MapRun, server: WorkerThread) -> None:
        """Runs programs of a map that are not started yet, one after the other, in the context around this call."""
        program: Program | None = None
        error: BaseException | None = None
        while True:
            with self.lock:
                if program is not None:
                    self._end(program, error)
                program = error = server.running = None
                server.inside = False
                number = group.take()
                if number is None:
                    return
                program = group.live[number] = server.running = Program(group, number, server)
            enter(program)
            try:
                group.results[number] = group.tasks[number](program)
            except BaseException as raised:  # carried to the caller, who raises it
                error = raised
            if self._helpers is None:
                self._call_for_help()

    def _call_for_help(self) -> None:
        """Wakes helper threads, once, if there is work for them and the caller has had enough."""
        if self._helpers is not None or time.perf_counter() - self.started < self._helper_delay:
            return
        with self.lock:
            count = sum(g.unstarted for g in self.groups)
            if count < 2 or self._helpers is not None or self.was_looked_at:
                return
            self._changed = threading.Condition(self.lock)
            self._helpers = _Helpers(count)
        self._helpers.call(self._help, count - 1, self.root.context)

    def abandon(self) -> bool:
        """In the child of a fork: gives up if programs ran in several threads, and answers whether they did. Of these,
        and of those who had the locks, only the thread is there that forked.
        """
        if self._helpers is None or not self.groups:  # all maps are done
            return False
        self.lock, self._changed = threading.Lock(), None
        self._helpers.abandon()
        self._is_over = True
        self.meetings.clear()
        for group in self.groups:
            group.drop()
        self.groups.clear()
        self.root.errors = [(False, -1, CollectiveError(_FORKED))]
        return True

    # -- programs (all but `withdraw`: the lock is held) ---------------------------------------------------------------

    def _end(self, program: Program, error: BaseException | None) -> None:
        group = program.group
        del group.live[program.number]
        group.left -= 1
        if error is not None:
            told = isinstance(error, CollectiveError) and error.secondary
            group.errors.append((told, program.number, error))
            if not group.failed:
                self.fail(group, f"{program} raised {type(error).__name__}: {error}")
        if not group.left:
            self._close(group)

    def _close(self, group: MapRun) -> None:
        """A map is done: its caller can go on."""
        if group not in self.groups:
            return
        self.groups.remove(group)
        if group.parent:
            self.resume(group.parent, None)
        else:
            self._notify()

    def open(self, group: MapRun) -> None:
        """A map of a program's is there to be served."""
        self.groups.append(group)
        self._notify()

    def _notify(self) -> None:
        """Threads that wait look again."""
        if self._changed:
            self._changed.notify_all()

    def resume(self, program: Program, result: Any) -> None:
        """A program can go on."""
        program.pending = None
        program.result = result
        program.server.ready.append(program)
        self._ready += 1
        self._notify()

    def release(self, program: Program, error: BaseException) -> None:
        """A program goes on with an error."""
        program.error = error
        if isinstance(error, CollectiveError):
            error.secondary = True
        self.resume(program, None)

    def withdraw(self, program: Program, why: str) -> None:
        """A program does not wait any more; those with whom it was to meet are told."""
        with self.lock:
            if program in program.server.ready:
                program.server.ready.remove(program)
                self._ready -= 1
            elif isinstance(program.pending, Rendezvous):
                self._dissolve(program.pending, why, but=program)
            program.pending = None

    def _dissolve(self, meeting: Rendezvous, why: str, but: Program | None = None) -> None:
        if self.meetings.pop(meeting.key, None):
            for member in meeting.members:
                if member is not None and member is not but:
                    self.release(member, CollectiveError(f"{meeting.call.said}: {why}"))

    def fail(self, group: MapRun, why: str) -> None:
        """Nobody in a map shall wait any more, nor those who wait for them."""
        if group.failed:
            return
        group.failed = why
        group.drop()
        for program in list(group.live.values()):
            waits = program.pending
            if isinstance(waits, MapRun):
                self.fail(waits, why)
            elif waits is not None:
                self._dissolve(waits, why)
        if not group.left:
            self._close(group)

    def _release_all(self) -> None:
        """Every program waits: none can ever go on, so that all are told who waits for what."""
        meetings, self.meetings = self.meetings, {}
        assert meetings, "no program is ready, none waits for another, and not all are done"
        waiting: dict[str, list[str]] = {}
        for meeting in meetings.values():
            waiting.setdefault(meeting.call.said, []).extend([str(p) for p in meeting.members if p is not None])
        gone = list(dict.fromkeys(label for meeting in meetings.values() for label in _returned(meeting, self.groups)))
        said = [f"{listed(labels)} called {call}" for call, labels in waiting.items()]
        said += [f"{listed(gone)} returned without such a call"] * bool(gone)
        why = (
            "; ".join(said)
            + ": no two of these can meet; all devices along an axis must make the same calls in the same order"
        )
        for meeting in meetings.values():
            for program in meeting.members:
                if program is not None:
                    program.group.failed = program.group.failed or why
                    self.release(program, CollectiveError(f"{meeting.call.said}: {why}"))


def _returned(meeting: Rendezvous, groups: Sequence[MapRun]) -> list[str]:
    """The programs that were to come to a meeting and have returned, or have called the maps in which others were to
    come and have returned. The rest of those that are missing wait elsewhere, or in maps that have not been called.
    """
    key_at = meeting.call.key_at
    waiting = [member for member in meeting.members if member is not None]
    axes = waiting[0].group.axes
    found = []
    for group in groups:
        depth = len(group.axes)
        if group.axes != axes[:depth]:
            continue
        inner = dict.fromkeys([member.place[depth:] for member in waiting])
        found += [
            group.labels[number]
            for number in range(len(group.tasks))
            if number not in group.live
            and (key_at is None or any(key_at(group.place(number) + place) == meeting.key for place in inner))
        ]
    return found


_FORKED = (
    "the process was forked inside of a mapped function that runs in several threads, and the others are not in the "
    "child; end the child with os._exit, or fork outside of maps"
)


class _Helpers(team.Helpers):
    """Helper threads of a map. BLAS has its share of the cores in each thread: else every call would start as many
    threads as there are cores.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._share = Limit(max(team.num_threads() // min(team.num_threads(), count), 1))
        self._share.__enter__()

    def dismiss(self) -> None:
        """See `shardtensor.host.threads.Helpers`."""
        try:
            super().dismiss()
        finally:
            self._share.__exit__()


class _Interrupts(interrupts.Interrupts):
    """Handlers of signals run in the own code of the caller's programs, or where the caller has none to go on with."""

    __slots__ = ("_server",)

    def __init__(self, server: WorkerThread) -> None:
        self._server = server

    def passes(self) -> bool:
        """Whether a program's own code is running."""
        return self._server.inside

    permits = passes

    def are_due(self, server: WorkerThread) -> bool:
        """Whether there are any to run in this thread."""
        return server is self._server and self.are_missed()

    def deliver_to_caller(self) -> None:
        """Runs them while no program's own code is running."""
        self._server.inside = True
        try:
            self.deliver()
        finally:
            self._server.inside = False
