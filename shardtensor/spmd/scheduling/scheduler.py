"""The scheduler of programs: runs the programs of nested maps on few threads, and detects deadlocks.

One thread can run any number of programs that depend on each other, and switching between greenlets costs a fraction of
waking a thread. Programs that never wait run one after the other in one greenlet.

The caller's thread begins. After a delay, helper threads start programs that have not been started yet; a program stays
in the thread that started it. When no thread has a program that can continue or be started, every program is waiting,
which is a deadlock. It is detected at once, without a timeout, and raises an error that names each device and the call
in which it waits.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardtensor.backend.registry import is_remote
from shardtensor.errors import BackendError, CollectiveError, message_of
from shardtensor.host import fork, signals, threads
from shardtensor.host.blas_threads import Limit
from shardtensor.spmd.collective_call import CollectiveCall
from shardtensor.spmd.scheduling import helper_delays
from shardtensor.spmd.scheduling.breakpoints import count_prompts, restore_hook
from shardtensor.spmd.scheduling.collective_errors import deadlock, disagreement, error_for
from shardtensor.spmd.scheduling.mapped_program import (
    MapRun,
    Program,
    Rendezvous,
    WorkerThread,
    around,
    leave_maps,
    secondary,
)
from shardtensor.spmd.scheduling.workers import greenlets, idle, worker

if TYPE_CHECKING:
    from greenlet import greenlet

    from shardtensor.backend.device import Device
    from shardtensor.spmd.scheduling.mapped_program import Task

_POLL = 0.05
"""Seconds after which a waiting thread checks for signals, such as Ctrl-C."""


def run(
    tasks: Sequence[Task], labels: Sequence[str], *, names: Sequence[str] = (), sizes: Sequence[int] = (),
    helper_delay: float = 200e-6, code: int = 0, devices: tuple[tuple[Device, ...], ...] = (),
) -> list[Any]:  # fmt: skip
    """Runs each task as a program, and returns the results of all tasks, in order.

    Inside of another program, the new ones become programs of an inner map: they see the outer program's axes, too, and
    it is suspended until they are done.

    Args:
        tasks: the tasks.
        labels: the names of the programs in error messages.
        names: the named axes along which the programs are numbered, row-major; without them, the programs are numbered
            along one axis that has no public name.
        sizes: the sizes of those axes.
        helper_delay: seconds of the caller's work after which helper threads take part (waking one costs about 50 µs).
        code: the identity of the code of the programs. If a map of the same code took long the last time, helper
            threads take part from the start; if it took a short time, they wait longer, since it will soon be done.
        devices: the devices of each program, if some of them are in other processes.

    Returns:
        The list of results.

    Raises:
        Failed: a program failed; of several, the first in order whose error was not caused by the failure of another.
    """
    parent = around()
    map_run = MapRun(tasks, labels, names, sizes or (len(tasks),), parent)
    map_run.devices = devices
    if not tasks:
        return []
    if sys.is_finalizing():
        raise BackendError(
            "a map was called while the interpreter ends, such as by a __del__, when greenlets can no longer switch; "
            "call it earlier, at the latest in a function registered with atexit.register"
        )
    if parent is not None:
        parent.await_run(map_run)
        return map_run.outcome()
    _check_room()
    if devices and not _may_have_helpers(devices):
        helper_delay = math.inf
    scheduler = Scheduler(map_run, helper_delays.delay_of(code, helper_delay))
    try:
        scheduler.run()
        if not scheduler.prompts():
            helper_delays.note(code, scheduler.seconds, helper_delay)
        return map_run.outcome()
    finally:
        # The two refer to each other, and a helper thread may refer to the scheduler for a moment longer; either would
        # keep all results alive.
        del map_run.scheduler, scheduler.root


_ROOM = 16
"""More frames than the scheduler puts on the stack of the caller, not counting those of mapped functions."""


def _check_room(left: int = _ROOM) -> None:
    """Raises RecursionError if the interpreter would raise it while the scheduler changes its state, since a map that
    is interrupted there never ends. The check makes as many calls as the scheduler does instead of counting frames,
    because the limit includes calls of C functions before Python 3.12.
    """
    if left:
        _check_room(left - 1)


def _may_have_helpers(devices: Sequence[tuple[Device, ...]]) -> bool:
    """Returns whether helper threads may run programs on these devices, some of which are in other processes."""
    here = [own for own in devices if not all(map(is_remote, own))]
    # Programs of several processes make the same calls in the same order in each of them.
    in_several = any(map(is_remote, here[0])) if here else True
    # A single program on one device needs one thread.
    return not in_several and (len(here) > 1 or len(here[0]) > 1)


class Scheduler:
    """Runs all programs under one outermost map, on the caller's thread and on helper threads.

    Attributes:
        seconds: how long the programs took. The time in which helper threads were woken and dismissed is not counted:
            it can be longer than a short map, which would then have helper threads every time.
    """

    seconds = 0.0

    def __init__(self, root: MapRun, helper_delay: float) -> None:
        self.lock = threading.Lock()  # fork: `abandon` replaces it if helper threads may hold it.
        # Waiting threads look for programs again when it is notified; it is created together with the helpers.
        self._changed: threading.Condition | None = None
        self.root = root
        self.runs = [root]
        self.pending_rendezvous: dict[Hashable, Rendezvous] = {}
        self._busy = 0  # The number of threads that are not waiting.
        self._ready = 0  # The number of suspended programs that can be resumed, of all threads.
        self._helper_delay = helper_delay
        self._helpers: _Helpers | None = None
        self._is_over = False  # Set if the scheduler failed in a thread, and in the child of a fork: all threads stop.
        root.scheduler = self

    def run(self) -> None:
        """Runs programs in the caller's thread until the outermost map is done."""
        self.started = time.perf_counter()
        thread = worker_thread()
        with _Interrupts(thread) as self._interrupts:
            with _lock:
                self.prompts = count_prompts()
                _running.append(self)
            try:
                if not self._helper_delay:
                    self._call_for_help()
                self._serve(thread)
                self.seconds = time.perf_counter() - self.started
            finally:
                with _lock:
                    _running.remove(self)
                    if not _running:
                        restore_hook()
                if self._helpers:
                    self._helpers.dismiss()

    def _help(self) -> None:
        self._serve(worker_thread())

    # -- threads -----------------------------------------------------------------------------------

    def _serve(self, thread: WorkerThread) -> None:
        """The loop of every thread: resumes a ready program of its own, otherwise starts one, otherwise waits."""
        with self.lock:
            self._busy += 1
        try:
            # Every switch to a worker is a call from this loop in C, so that the frames below a worker's first one are
            # the same whenever it runs: the interpreter calls from another depth while a profiler is installed.
            deque(map(greenlets().greenlet.switch, self._steps(thread)), maxlen=0)
            if thread.block is not None:
                thread.leave_block()
        except BaseException:  # The scheduler itself failed; the other threads must not wait for this one.
            self._is_over = True
            raise
        with self.lock:
            self._busy -= 1

    def _steps(self, thread: WorkerThread) -> Iterator[greenlet]:
        """Yields the workers to which the thread switches, in order, until all programs have ended."""
        while True:
            with self.lock:
                following = self._next(thread)
            if following is None:
                return
            is_due = self._helpers is None and time.perf_counter() - self.started >= self._helper_delay
            if is_due and thread.running is not None:  # A program has been suspended.
                self._call_for_help()
            yield following
            thread.job = None  # A worker may have ended instead of starting programs; another one will start them.

    def _hear(self, thread: WorkerThread) -> None:
        """Runs the handlers of deferred signals, in the thread that receives signals. An exception that a handler
        raises becomes the map's error, raised after all programs have ended. The lock is held, except while a handler
        runs.
        """
        if thread is not self._interrupts.thread or not self._interrupts.are_missed():
            return
        lock = self.lock
        lock.release()
        error: BaseException | None = None
        thread.inside = True
        try:
            thread.leave_block()
            self._interrupts.deliver()
        except BaseException as raised:  # Raised again in the caller of the map.
            error = raised
        thread.inside = False
        # If the handler forked, the thread that held the lock may not be in the child.
        lock.acquire(blocking=not self._is_over)
        if error is not None:
            self.root.errors.append((False, -1, error))
            self.fail(self.root, f"the caller was interrupted: {message_of(error)}")
            del error  # A cycle of the error and this frame would keep both alive.

    def _next(self, thread: WorkerThread) -> greenlet | None:
        """Returns the worker to which the thread switches next; None when all programs have ended. The lock is held."""
        if thread.request is not None:
            (method, args), thread.request = thread.request, None
            program: Program = args[0]
            try:
                if method(*args):
                    return program.suspended
            except BaseException as error:  # Raised again in the program.
                program.error = error
                return program.suspended
        while True:
            if signals.missed:
                self._hear(thread)
            if self._is_over:
                return None
            if thread.ready:
                self._ready -= 1
                return thread.ready.popleft().suspended
            if not self.root.left:
                return None
            for run in reversed(self.runs):  # Inner maps go first, since their callers wait for them.
                if run.unstarted:
                    thread.job = run
                    return worker(thread.main, thread.idle, functools.partial(self.start, thread))
            self._busy -= 1
            try:
                if not self._busy and not self._ready:  # All programs wait: a deadlock, unless other processes answer.
                    if not self._meet_processes():
                        self._release_all()
                elif self._changed:
                    self._changed.wait(_POLL)
            finally:
                self._busy += 1

    def start(self, thread: WorkerThread) -> None:
        """Starts the remaining programs of the thread's job in the calling worker, one after the other."""
        run, thread.job = thread.job, None
        assert run is not None
        tasks, results = run.tasks, run.results
        program: Program | None = None
        error: BaseException | None = None
        while True:
            with self.lock:
                if program is not None:
                    del run.live[program.number]
                    run.left -= 1
                    if error is not None:
                        self._note(program, error)
                    if not run.left:
                        self._close(run)
                error = None
                thread.inside = False
                program = thread.running = Program(run, thread) if run.unstarted else None
                if program is None:
                    return
            try:
                results[program.number] = tasks[program.number](program)
            except BaseException as raised:  # Raised again in the caller of the map.
                error = raised
            if self._helpers is None and time.perf_counter() - self.started >= self._helper_delay:
                self._call_for_help()

    def _call_for_help(self) -> None:
        """Wakes helper threads, once, if several programs are not started. It is called after the helper delay."""
        now = time.perf_counter()
        with self.lock:
            count = sum([run.unstarted for run in self.runs])
            if count < 2 or self._helpers is not None or self.prompts():
                return
            self._changed = threading.Condition(self.lock)  # fork: see `abandon`.
            self._helpers = _Helpers(count)
        self._helpers.call(self._help, count - 1, self.root.context)
        self.started += time.perf_counter() - now

    def abandon(self) -> None:
        """In the child of a fork: stops all maps, and leaves them, if programs ran in several threads. Only the forking
        thread exists in the child; other threads may have held the locks, which are replaced.
        """
        if self._helpers is None or not self.runs:  # Without runs, all maps are done.
            return
        self.lock, self._changed = threading.Lock(), None  # fork: this is the child.
        self._helpers.abandon()
        self._is_over = True
        self.pending_rendezvous.clear()
        for run in self.runs:
            run.drop()
        self.runs.clear()
        self.root.errors = [(False, -1, CollectiveError(_FORKED))]
        leave_maps(self)

    # -- requests of programs (the lock is held); each returns whether the program continues at once -------------------

    def arrive(self, program: Program, call: CollectiveCall, position: int, contribution: Any) -> bool:
        """Adds the contribution of a program to a rendezvous. The last one to arrive continues with the rendezvous as
        its result, and computes the results of all; see `Program.meet`.

        Raises:
            CollectiveError: the program made another call than those that have arrived, or its map has failed.
        """
        if program.run.failed:
            raise secondary(f"{call.description}: {program.run.failed}")
        rendezvous = self.pending_rendezvous.get(call.key)
        if rendezvous is None:
            rendezvous = self.pending_rendezvous[call.key] = Rendezvous(call)
        elif call.details != rendezvous.call.details or call.description != rendezvous.call.description:
            raise CollectiveError(disagreement(program, call, rendezvous))
        rendezvous.members[position] = program
        rendezvous.contributions[position] = contribution
        rendezvous.missing -= 1
        # The scheduler meets other processes when all programs wait, so that they meet in the same order there.
        if rendezvous.missing or call.across:
            program.pending = rendezvous
            return False
        del self.pending_rendezvous[call.key]
        program.result = rendezvous
        return True

    def complete(self, program: Program, rendezvous: Rendezvous, results: Sequence[Any]) -> bool:
        """Resumes the programs of a rendezvous with the results that a program has computed."""
        for member, result in zip(rendezvous.arrived, results, strict=True):
            if member is not program:
                self._mark_ready(member, result)
        if self._changed:
            self._changed.notify_all()
        program.result = results
        return True

    def cancel(self, program: Program, rendezvous: Rendezvous, error: BaseException) -> bool:
        """Resumes the programs of a rendezvous with an error that one of them has raised."""
        for member in rendezvous.arrived:
            if member is not program:
                self.release(member, error_for(error, rendezvous.call, program))
        return True

    def open(self, program: Program, run: MapRun) -> bool:
        """Adds an inner map whose programs are to be started, and for which a program waits."""
        self.runs.append(run)
        program.pending = run
        if self._changed:
            self._changed.notify_all()
        if program.run.failed:
            self.fail(run, program.run.failed)
        return False

    # -- programs (the lock is held in all methods but `withdraw`) -----------------------------------------------------

    def _note(self, program: Program, error: BaseException) -> None:
        """Notes the error with which a program has ended; with the first one, its map fails."""
        run, is_secondary = program.run, isinstance(error, CollectiveError) and error.secondary
        run.errors.append((is_secondary, program.number, error))
        if not run.failed:
            self.fail(run, f"{program} raised {message_of(error)}")

    def _close(self, run: MapRun) -> None:
        """Ends a map, so that its caller can continue."""
        if run not in self.runs:
            return
        self.runs.remove(run)
        if run.parent:
            self.resume(run.parent, None)
        elif self._changed:
            self._changed.notify_all()

    def resume(self, program: Program, result: Any) -> None:
        """Marks a suspended program as ready to continue with a result, and wakes the threads that wait."""
        self._mark_ready(program, result)
        if self._changed:
            self._changed.notify_all()

    def _mark_ready(self, program: Program, result: Any) -> None:
        program.pending = None
        program.result = result
        program.thread.ready.append(program)
        self._ready += 1

    def release(self, program: Program, error: BaseException) -> None:
        """Marks a suspended program as ready to continue with an error, which becomes secondary."""
        program.error = error
        if isinstance(error, CollectiveError):
            error.secondary = True
        self.resume(program, None)

    def withdraw(self, program: Program, why: str) -> None:
        """Stops the wait of a program, and releases the other programs of its rendezvous with an error."""
        with self.lock:
            if program in program.thread.ready:
                program.thread.ready.remove(program)
                self._ready -= 1
            elif isinstance(program.pending, Rendezvous):
                self._dissolve(program.pending, why, but=program)
            program.pending = None

    def _dissolve(self, rendezvous: Rendezvous, why: str, but: Program | None = None) -> None:
        if self.pending_rendezvous.pop(rendezvous.call.key, None):
            for member in rendezvous.arrived:
                if member is not but:
                    self.release(member, CollectiveError(f"{rendezvous.call.description}: {why}"))

    def fail(self, run: MapRun, why: str) -> None:
        """Releases every waiting program of a map, of its inner maps, and of their rendezvous with an error, and starts
        no more programs of these maps.
        """
        if run.failed:
            return
        run.failed = why
        run.drop()
        for program in list(run.live.values()):
            pending = program.pending
            if isinstance(pending, MapRun):
                self.fail(pending, why)
            elif pending is not None:
                self._dissolve(pending, why)
        if not run.left:
            self._close(run)

    def _meet_processes(self) -> bool:
        """Executes the collectives with programs of other processes in which all programs have arrived, if some wait in
        such collectives, and returns whether it did. The lock is held.
        """
        pending = [rendezvous for rendezvous in self.pending_rendezvous.values() if rendezvous.numbers]
        if not pending:
            return False
        from shardtensor.spmd.maps.maps_across_processes import met  # Few programs need it.

        try:
            results = met(pending)
        except BaseException as error:
            for rendezvous in pending:
                del self.pending_rendezvous[rendezvous.call.key]
                for member in rendezvous.arrived:
                    self.release(member, error_for(error, rendezvous.call, member))
            return True
        for rendezvous, values in results:
            del self.pending_rendezvous[rendezvous.call.key]
            for waiting, result in zip(rendezvous.members, values, strict=True):
                if waiting is not None:
                    self.resume(waiting, result)
        return True

    def _release_all(self) -> None:
        """Resolves a deadlock: releases every waiting program with an error that names each device and the call in
        which it waits.
        """
        # In the order of the programs, which the timing of the threads does not change.
        pending = sorted(self.pending_rendezvous.values(), key=lambda r: r.arrived[0].coordinates)
        assert pending, "no program is ready, none waits for another, and not all are done"
        why = deadlock(pending, self.runs)
        for rendezvous in pending:
            for program in rendezvous.arrived:
                program.run.failed = program.run.failed or why
            self._dissolve(rendezvous, why)


def worker_thread() -> WorkerThread:
    """Returns the calling thread as one that runs programs."""
    current = greenlets().getcurrent
    return WorkerThread(current, idle.of(current()))


_running: list[Scheduler] = []
"""Of all threads."""

_lock = fork.lock()
"""Held while `_running` changes, and with it the debugger's hook. It is reentrant, since finalizers may call maps."""


@fork.in_children
def _abandon() -> None:
    """In the child of a fork, which has only the forking thread: gives up the maps with helper threads. The child can
    run operators and maps of its own, and gets an error if it continues such a map.
    """
    restore_hook()
    for scheduler in _running:
        scheduler.abandon()
    _running[:] = [scheduler for scheduler in _running if scheduler._interrupts.thread.is_here()]


_FORKED = (
    "the process was forked inside of a mapped function that runs in several threads, and the others are not in the "
    "child; end the child with os._exit, or fork outside of maps"
)


class _Helpers(threads.Helpers):
    """The helper threads of a map. Each thread gets its share of the cores for BLAS; otherwise every BLAS call would
    start as many threads as there are cores.
    """

    waits = True

    def __init__(self, count: int) -> None:
        super().__init__()
        self._share = Limit(max(threads.num_threads() // min(threads.num_threads(), count), 1))
        self._share.__enter__()

    def dismiss(self) -> None:
        """Waits for the helper threads, and lifts the limit on BLAS threads."""
        try:
            super().dismiss()
        finally:
            self._share.__exit__()


class _Interrupts(signals.Interrupts):
    """Runs signal handlers in user code of the caller's programs, or when the caller has no program to continue.

    Attributes:
        thread: the caller's thread.
    """

    __slots__ = ("thread",)

    def __init__(self, thread: WorkerThread) -> None:
        self.thread = thread

    def passes(self) -> bool:
        """Whether user code of a program is running, where a handler may run."""
        return self.thread.inside

    permits = passes
