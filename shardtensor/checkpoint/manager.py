"""`Manager`: the checkpoints of a program in one folder, by the numbers of its steps."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any

from shardtensor.checkpoint import writing
from shardtensor.checkpoint.manifest import is_checkpoint
from shardtensor.checkpoint.restoring import restored
from shardtensor.checkpoint.together import JobPart
from shardtensor.errors import ArgumentError, ShardTensorError
from shardtensor.files.atomic import DISK, find_folder, flush_folder, leftovers_in, recover, remove_folder
from shardtensor.host.limits import in_main_thread
from shardtensor.sharding.layout import Where

_DIGITS = 8
_LAST = 10**15
"""The largest number of a step."""


class Manager:
    """The checkpoints of a program, each a folder with the number of its step. It is a context manager, which waits for
    the last one at its end.

    In a job, all processes make one with the same arguments, and call its methods together. Programs that only read may
    use the folder at the same time, and no other program may write to it.

    Args:
        directory: the folder, which is created if only its parent exists.
        keep: how many of the last checkpoints are kept; None for all. The one that was just written is kept, too, if
            there are later ones.
        every: `save` writes a checkpoint only at steps that are multiples of this number.
        keep_every: checkpoints of steps that are multiples of this number are kept, too.
        memory: see `save`.
        timeout: see `save`.
        on_sigterm: whether SIGTERM, which schedulers send before they end a job, makes the next call of `save` write a
            checkpoint of its step, and then end the program as the signal does by default. In a job, each call of
            `save` then exchanges a few bytes.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is not accepted.
        OSError: the folder cannot be created or read.

    >>> folder = __import__("tempfile").mkdtemp()
    >>> with st.checkpoint.Manager(folder, keep=2) as manager:
    ...     for step in range(4):
    ...         manager.save(step, {"w": st.arange(6.0) * step}) and None
    >>> manager.steps(), manager.restore()["w"].tolist()
    ([2, 3], [0.0, 3.0, 6.0, 9.0, 12.0, 15.0])
    """

    def __init__(
        self, directory: writing.Path, *, keep: int | None = None, every: int = 1, keep_every: int | None = None,
        memory: int | None = None, timeout: float | None = None, on_sigterm: bool = False,
    ) -> None:  # fmt: skip
        name = "checkpoint.Manager"
        self.directory = writing.checked_path(directory, name)
        self._keep = None if keep is None else writing.checked_integer(keep, "keep", name, 1)
        self._every = writing.checked_integer(every, "every", name, 1)
        self._keep_every = None if keep_every is None else writing.checked_integer(keep_every, "keep_every", name, 1)
        self._memory = None if memory is None else writing.checked_integer(memory, "memory", name, 1)
        self._timeout = None if timeout is None else writing.checked_number(timeout, "timeout", name, 0.001)
        self._is_ending = False
        self._handler: Any = None
        self._is_handling = False
        self._on_sigterm = on_sigterm
        JobPart(name).together("directory", self._make_directory)
        if on_sigterm:
            if not in_main_thread():
                raise ArgumentError(f"{name}: on_sigterm=True needs the main thread, in which Python handles signals")
            self._handle_sigterm()

    def _make_directory(self) -> None:
        try:
            os.mkdir(self.directory)
        except FileExistsError:
            if not os.path.isdir(self.directory):
                raise
        else:
            flush_folder(os.path.dirname(self.directory))

    # -- writing -----------------------------------------------------------------------------------

    def save(self, step: int, tree: Any) -> bool:
        """Writes a checkpoint in the background, if the step is a multiple of ``every``.

        A save before it is completed first. When the new one is complete, checkpoints that are not to be kept are
        deleted.

        Args:
            step: the number of the step, from 0 on.
            tree: see `shardtensor.checkpoint.save`.

        Returns:
            Whether a checkpoint is written.

        Raises:
            FileExistsError: there is a checkpoint of the step.
            ArgumentError, ArgumentTypeError, DistributedError, OSError: see `shardtensor.checkpoint.save`; the errors
                of saves before are raised, too.
        """
        number = _checked_step(step, "checkpoint.Manager.save")
        writing.check()
        ends = self._on_sigterm and self._is_told_to_end()
        if number % self._every and not ends:
            return False
        with writing.LOCK:
            writing.start(
                self._path(number), tree, "checkpoint.Manager.save", timeout=self._timeout, memory=self._memory,
                before=self._clean, after=lambda: self._delete_others(number),
            )  # fmt: skip
        if ends:
            self.wait()
            self._end()
        return True

    def wait(self) -> None:
        """Waits until the save in the background is complete; see `shardtensor.checkpoint.wait`."""
        writing.finish()

    def _path(self, step: int) -> str:
        return os.path.join(self.directory, _name(step))

    def _clean(self) -> None:
        """Removes what killed programs, and saves and deletions that failed, have left in the folder."""
        for path in leftovers_in(self.directory):
            if _step_of(os.path.basename(path)) is not None:
                recover(path)

    def _delete_others(self, new: int) -> None:
        """Deletes the checkpoints that are not kept. The new one is, even if there are later ones: the program may have
        gone back to an earlier step.
        """
        if self._keep is None:
            return
        steps = _steps(self.directory)
        for step in steps[: -self._keep]:
            if step != new and (self._keep_every is None or step % self._keep_every):
                remove_folder(self._path(step), DISK)

    # -- SIGTERM -----------------------------------------------------------------------------------

    def _handle_sigterm(self) -> None:
        self._handler = signal.signal(signal.SIGTERM, self._note_sigterm)
        self._is_ending, self._is_handling = False, True

    def _note_sigterm(self, *_: object) -> None:
        self._is_ending = True
        if not self._is_handling:  # A manager that was made later has put back this handler.
            self._end()

    def _is_told_to_end(self) -> bool:
        """Whether any process was told to end."""
        texts = JobPart("checkpoint.Manager.save", self._timeout).gather("SIGTERM", "ends" if self._is_ending else "")
        return any(texts)

    def _end(self) -> None:
        """Ends the program as SIGTERM does where no handler was set, or calls the handler that was."""
        self._is_ending = False  # The end of the block does not send it again.
        self._put_back_handler()
        os.kill(os.getpid(), signal.SIGTERM)

    def _put_back_handler(self) -> None:
        self._is_handling = False
        # The handler of a manager that was made later remains: it puts back the one of this manager.
        if signal.getsignal(signal.SIGTERM) == self._note_sigterm:
            signal.signal(signal.SIGTERM, self._handler if self._handler is not None else signal.SIG_DFL)

    def __enter__(self) -> Manager:
        if self._on_sigterm and not self._is_handling:  # It was the manager of another block before.
            self._handle_sigterm()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Waits for the last save, and puts back the handler of SIGTERM."""
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"the checkpoint in the background has failed, too: {failure}")
        finally:
            was_told = self._is_ending
            self._put_back_handler()
        if was_told and error is None:
            self._end()

    # -- reading -----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order; the same in all processes."""
        job = JobPart("checkpoint.Manager.steps", self._timeout)
        found = job.together("steps", lambda: _steps(self.directory) if not job.index else [])
        text = job.gather("numbers of steps", " ".join(map(str, found)))[0]
        return [int(step) for step in text.split()]

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint; None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def restore(
        self, step: int | None = None, like: Any = None, *, only: str | Collection[str] | None = None,
        rename: Mapping[str, str] | None = None, device: Where | None = None,
    ) -> Any:  # fmt: skip
        """Returns the tree of a checkpoint, by default the last complete one; see `shardtensor.checkpoint.restore`.

        Raises:
            FileNotFoundError: there is no checkpoint of the step, or none at all.
        """
        caller = "checkpoint.Manager.restore"
        number = self.latest() if step is None else _checked_step(step, caller)
        if number is None:
            text = "there is no checkpoint yet; latest() is None then, and the program starts from the beginning"
            raise FileNotFoundError(errno.ENOENT, f"{caller}: {text}", self.directory)
        try:
            return restored(self._path(number), like, only, rename or {}, device, caller)
        except (ShardTensorError, OSError):
            # A program that writes has deleted it, because there is a later one.
            if step is not None or number in self.steps():
                raise
        return self.restore(None, like, only=only, rename=rename, device=device)


def _checked_step(step: Any, caller: str) -> int:
    number = writing.checked_integer(step, "step", caller, 0)
    if number >= _LAST:
        raise ArgumentError(f"{caller}: step is {number}; wanted a number below {_LAST}")
    return number


def _name(step: int) -> str:
    return f"{step:0{_DIGITS}d}"


def _step_of(name: str) -> int | None:
    """Returns the step whose checkpoint has a name; None for other names."""
    step = int(name) if name.isascii() and name.isdigit() and len(name) <= len(str(_LAST)) else None
    return step if step is not None and _name(step) == name else None


def _steps(directory: str) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, in order."""
    steps = set()
    for name in {*os.listdir(directory), *map(os.path.basename, leftovers_in(directory))}:
        step = _step_of(name)
        folder = find_folder(os.path.join(directory, name)) if step is not None else None
        if step is not None and folder is not None and is_checkpoint(folder):
            steps.add(step)
    return sorted(steps)
