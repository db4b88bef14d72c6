"""`save` and `wait`: one checkpoint at a time is written, in the background or not."""

from __future__ import annotations

import atexit
import errno
import operator
import os
from collections.abc import Callable
from typing import Any

from shardtensor.checkpoint.manifest import FILE
from shardtensor.checkpoint.pieces import BLOCK
from shardtensor.checkpoint.plans import divide_by_owners, exchange_borders, plan_save
from shardtensor.checkpoint.saving import Save
from shardtensor.checkpoint.together import JobPart
from shardtensor.communication.between_processes.processes import JOB
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardTensorError, type_text
from shardtensor.files.atomic import DISK, Disk, clean, discard, new_folder, recover
from shardtensor.host import fork

Path = str | os.PathLike[str]


def save(
    path: Path, tree: Any, *, overwrite: bool = False, wait: bool = True, timeout: float | None = None,
    memory: int | None = None,
) -> None:  # fmt: skip
    """Writes a pytree to a new folder, as a whole or not at all.

    The folder is a group of zarr v3 with an array for each tensor, which other programs can read, and the manifest
    ``checkpoint.json``. Everything is written and flushed to the disk under another name, then the folder is renamed: a
    program that is killed at any moment leaves no checkpoint, or a complete one. The next save to the path removes what
    was left.

    In a job, all processes call this with the same path on a file system that they share. Each writes the elements that
    it holds, replicas are divided, and an error of one process is raised in all of them. Arrays of NumPy, numbers and
    tensors on local devices have to be equal in all processes; a tensor that is on devices of the same process in all
    of them is written by that process.

    Args:
        path: the folder, whose parent exists.
        tree: a pytree of tensors of any dtype and sharding, arrays of NumPy, numbers, text, bytes, None, keys of
            `st.random`, and generators of NumPy and Python. The keys of dicts are text or integers.
        overwrite: whether a checkpoint at the path is replaced. The old one is moved aside before and deleted after the
            new one is there.
        wait: whether to return only when the checkpoint is complete. Otherwise a thread writes it. Later writes to the
            tensors do not change what is saved: they copy elements that are not written yet. An error is raised by the
            next call of `save` or `wait`, or when the program ends.
        timeout: seconds that each process of a job waits for the others; by default that of the job.
        memory: the bytes of host memory for copies of elements of other devices; by default 64 MiB.

    Raises:
        ArgumentTypeError: a leaf or a key cannot be stored so that it comes back exactly; the error has its name.
        ArgumentError: the tree is nested too deeply, or there is something else at the path than a checkpoint.
        FileExistsError: there is something at the path, and ``overwrite`` is False.
        OSError: a file cannot be written; the error has its name, and nothing is left.
        DistributedError: another process has failed or does not come in time, gives other values, or does not see the
            files of the others; or an earlier save in the background failed in another process.

    >>> folder = __import__("tempfile").mkdtemp()
    >>> st.checkpoint.save(f"{folder}/first", {"w": st.arange(6.0), "step": 3})
    >>> st.checkpoint.restore(f"{folder}/first")["w"].tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    with LOCK:
        start(path, tree, "checkpoint.save", overwrite=overwrite, timeout=timeout, memory=memory)
        if wait:
            finish()


def wait() -> None:
    """Waits until the save in the background is complete. In a job, all processes call this.

    Raises:
        OSError: a file could not be written.
        DistributedError: another process has failed, or does not come in time.

    >>> st.checkpoint.wait()
    """
    finish()


LOCK = fork.lock()
"""Held by the thread that starts or finishes a save: others wait, and theirs is the next one."""


class _Background:
    """The save that is being written, if there is one."""

    save: Save | None = None


@fork.in_children
def _forget() -> None:
    _Background.save = None  # The thread that writes is the parent's.


def finish() -> None:
    """Waits for the save that is being written; its error is raised once."""
    with LOCK:
        current, _Background.save = _Background.save, None
        if current is not None:
            current.finish()


def check() -> None:
    """Raises the error of a save in the background that has failed; otherwise does not wait. In a job it does nothing:
    the other processes do not know of the error before all of them wait.
    """
    current = _Background.save  # Another thread may finish it meanwhile.
    if current is not None and current.error is not None and current.is_alone:
        finish()


def complete() -> None:
    """Completes the save before the job or the program ends; Python prints its error at the end of the program."""
    if _Background.save is not None and not _Background.save.is_abandoned:
        finish()


JOB.before_end.append(complete)


def start(
    path: Path, tree: Any, caller: str, *, overwrite: bool = False, timeout: float | None = None,
    memory: int | None = None, disk: Disk = DISK, before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Starts to write a checkpoint, after the one before is complete; see `save`. The lock is held.

    Args:
        path, tree, overwrite, timeout, memory: see `save`.
        caller: the function, for errors.
        disk: the operations on the file system.
        before: what process 0 does before it makes the folder.
        after: what process 0 does when the checkpoint is complete.
    """
    finish()
    name = checked_path(path, caller)
    most = BLOCK if memory is None else checked_integer(memory, "memory", caller, 1)
    job = JobPart(caller, None if timeout is None else checked_number(timeout, "timeout", caller, 0.001))

    def planned() -> Any:
        try:
            return plan_save(tree, job.count, most)
        except ShardTensorError as error:
            raise type(error)(f"{caller}: {error}") from None

    plan = job.together("tree", planned)
    if job.count > 1:
        divide_by_owners(plan.arrays, job)
        advice = "wanted the same path and tree, and equal arrays of NumPy, numbers and local tensors, in all processes"
        job.check_same([f"the path {name}, overwrite={overwrite}", *plan.rows()], advice)
    folder = _folder(job, name, overwrite, disk, before)
    save = Save(plan, folder, name, overwrite, job, disk, after)
    with save.removing():
        job.together("folder", lambda: _check_visible(folder))
        if job.count > 1:
            exchange_borders(plan.arrays, caller)
        atexit.unregister(complete)  # It is registered last, to be called before the job ends, which began meanwhile.
        atexit.register(complete)
        save.start()
        _Background.save = save


def _folder(job: JobPart, path: str, overwrite: bool, disk: Disk, before: Callable[[], None]) -> str:
    """Returns the folder in which the checkpoint is written, which process 0 makes."""

    folder = ""

    def make() -> None:
        nonlocal folder
        if job.index:
            return
        before()
        recover(path, disk)
        if os.path.lexists(path):
            _check_replaceable(path, overwrite, job.caller)
        folder = new_folder(path, disk)

    try:
        job.together("new folder", make)
        return job.gather("name of the folder", folder)[0]
    except BaseException as error:  # It passes on: also after Ctrl-C or an error of another process, no folder is left.
        if folder:
            clean(error, folder, lambda: discard(folder, disk))
        raise


def _check_replaceable(path: str, overwrite: bool, caller: str) -> None:
    """Raises an error unless what is at a path is a checkpoint, whole or not, that is to be replaced, or is empty."""
    if not overwrite:
        raise FileExistsError(errno.EEXIST, "the checkpoint exists, and overwrite=True was not passed", path)
    if os.path.islink(path) or not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder, and is not replaced", path)
    if not os.path.lexists(os.path.join(path, FILE)) and os.listdir(path):
        raise ArgumentError(
            f"{caller}: {path} has files, and none is {FILE}: only checkpoints and empty folders are replaced"
        )


def _check_visible(folder: str) -> None:
    if not os.path.isdir(folder):
        raise ArgumentError(
            f"this process does not see the folder {folder}, which process 0 has made: the processes need a file "
            "system that all of them share"
        )


# -- arguments -------------------------------------------------------------------------------------


def checked_path(path: Any, caller: str) -> str:
    """Returns a path as text, without a separator at its end.

    Raises:
        ArgumentTypeError, ArgumentError: it is not a path.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{caller}: path is {path!r:.60}, {type_text(path)}; wanted text or a pathlib.Path")
    try:
        valid = b"\0" not in os.fsencode(text) and bool(text)
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise ArgumentError(f"{caller}: path is {text!r:.60}; wanted a path without NUL and surrogates")
    return os.path.abspath(text)


def checked_number(value: Any, name: str, caller: str, least: float) -> float:
    """Returns a number, which has to be at least ``least``.

    Raises:
        ArgumentTypeError, ArgumentError: it is not a number, or is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{caller}: {name} is {value!r:.60}, {type_text(value)}; wanted a number")
    if not least <= value < float("inf"):
        raise ArgumentError(f"{caller}: {name} is {value}; wanted a number from {least}")
    return value


def checked_integer(value: Any, name: str, caller: str, least: int) -> int:
    """Returns an integer, which has to be at least ``least``.

    Raises:
        ArgumentTypeError, ArgumentError: it is not an integer, or is smaller.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ArgumentTypeError(f"{caller}: {name} is {value!r:.60}, {type_text(value)}; wanted an integer")
    return int(checked_number(number, name, caller, least))
