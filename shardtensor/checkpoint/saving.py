"""How a checkpoint is written: each process its files, then one of them the manifest, then the folder is renamed.

A thread writes the files, so that a program can go on meanwhile (`Save.start`); `Save.finish` waits for it, and raises
the error of any process in all of them. Process 0 learns what the others have written from files that they leave in the
folder: it can complete a checkpoint while the programs compute and exchange nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from shardtensor.checkpoint.manifest import FILE, Files, Manifest, manifest_text
from shardtensor.checkpoint.plans import ArrayPlan, Plan
from shardtensor.checkpoint.together import JobPart
from shardtensor.errors import DistributedError
from shardtensor.files.atomic import (
    DISK,
    Disk,
    clean,
    commit_folder,
    discard,
    flush_folder,
    make_folder,
    name_beside,
    naming,
    write_file,
)
from shardtensor.files.metadata import parse_json
from shardtensor.files.paths import read_text
from shardtensor.files.zarr import Written, write_array, write_chunk, write_group
from shardtensor.host.units import counted

T = TypeVar("T")
U = TypeVar("U")

_SMALL = 1 << 22
"""The bytes of an array from which on writing it takes longer than flushing its files."""

_THREADS = 4
"""The threads that write small arrays."""

_POLL = 0.01
"""Seconds between two looks at the folder, in which other processes leave what they have written."""

_PATIENCE = 5.0
"""Seconds after which a network file system shows a file that another process has written."""

_MOST = 1 << 28
"""The bytes of such a file."""


class Save:
    """A checkpoint that is being written.

    Args:
        plan: what is written.
        folder: the folder in which it is written, which exists.
        path: the name that the folder gets at the end.
        overwrite: whether it replaces another one there.
        job: the part of this process.
        disk: the operations on the file system.
        after: what process 0 does when the checkpoint is complete.

    Attributes:
        error: the error of this process; None if there is none.
    """

    def __init__(
        self, plan: Plan, folder: str, path: str, overwrite: bool, job: JobPart, disk: Disk = DISK,
        after: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.path = path
        self.error: BaseException | None = None
        self._plan, self._folder, self._overwrite = plan, folder, overwrite
        self._job, self._disk, self._after = job, disk, after
        self._files: dict[str, Files] = {}
        self._is_complete = False
        self._written = threading.Event()  # fork: the child forgets the save, of which it has no thread.
        self._is_finishing = threading.Event()  # fork: see above.
        self._is_stopped = threading.Event()  # fork: see above.
        # No daemon: at its end, the interpreter waits until the files are written, and then calls `finish`.
        self._thread = threading.Thread(target=self._run, name="shardtensor-checkpoint", daemon=False)

    def start(self) -> None:
        """Starts to write, in a thread."""
        self._thread.start()

    @property
    def is_abandoned(self) -> bool:
        """Whether the processes cannot complete the checkpoint, for a reason that is raised elsewhere."""
        return self.error is None and not self._is_complete and self._job.is_broken

    @property
    def is_alone(self) -> bool:
        """Whether no other process writes a part of it."""
        return self._job.count == 1

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._files = self._write()
            if self._job.index:
                self._tell_files()
            self._written.set()
            if not self._job.index and self._waits_for_others():
                self._complete()
        except BaseException as error:  # It is raised in the thread that finishes the save.
            self.error = error
        finally:
            self._written.set()

    def _tell_files(self) -> None:
        """Leaves a list of the files of this process in the folder, as the last thing that it does there: process 0 may
        rename the folder at once.
        """
        path = self._list_of(self._job.index)
        beside = name_beside(path, "new")
        write_file(beside, [json.dumps(self._files).encode()], self._disk)
        with naming(path):
            self._disk.rename(beside, path)

    def _write(self) -> dict[str, Files]:
        """Writes the files of this process, and returns them by the names of their arrays."""
        files: dict[str, Files] = {}
        first = not self._job.index
        for group in self._plan.groups:
            folder = os.path.join(self._folder, group)
            make_folder(folder, self._disk)
            if first:
                row = write_group(folder, {}, self._disk)
                files.setdefault("", {})[os.path.join(group, row.key)] = row.nbytes, row.crc32c
        arrays = self._plan.arrays
        small = [a for a in arrays if a.nbytes < _SMALL]
        # The disk flushes files that several threads have written at about the same time together.
        rows = in_threads(self._write_array, small, _THREADS)
        large = [a for a in arrays if a.nbytes >= _SMALL]
        rows += [*map(self._write_array, large)]
        for array, some in zip(small + large, rows, strict=True):
            if some:
                files[array.record.name] = {row.key: (row.nbytes, row.crc32c) for row in some}
        return files

    def _write_array(self, array: ArrayPlan) -> list[Written]:
        """Writes the files of an array that this process writes."""
        folder = os.path.join(self._folder, array.record.name)
        rows = [] if self._job.index else [write_array(folder, array.metadata, self._disk)]
        for index in array.chunks(self._job.index):
            if self._is_stopped.is_set():
                raise _StoppedError
            make_folder(folder, self._disk)
            rows.append(write_chunk(folder, array.metadata, index, array.pieces_of(index), self._disk))
        array.free()
        # Now, and not by process 0 for all of them: the other processes wait for it.
        for parent in {os.path.dirname(os.path.join(folder, row.key)): None for row in reversed(rows)}:
            flush_folder(parent, self._disk)
        return rows

    def _waits_for_others(self) -> bool:
        """Waits until the other processes have written their files, as long as the program runs and none has failed."""
        missing = [*range(1, self._job.count)]
        while missing and not self._is_finishing.is_set() and not self._job.is_broken:
            if not threading.main_thread().is_alive():
                break
            missing = [k for k in missing if not os.path.exists(self._list_of(k))]
            if missing:
                self._is_finishing.wait(_POLL)
        return not missing

    def _complete(self) -> None:
        """Completes the checkpoint, in process 0, after all others have written their files."""
        if self._is_stopped.is_set():
            raise _StoppedError
        files, self._is_complete = self._files, True
        for process in range(1, self._job.count):
            for name, rows in self._files_of(process).items():
                files.setdefault(name, {}).update(rows)
        arrays = {}
        for array in self._plan.arrays:
            record = array.record
            record.files.update(sorted(files.get(record.name, {}).items()))
            arrays[record.name] = record
        manifest = Manifest(self._plan.tree, arrays, files[""])
        self._check_sizes(manifest)
        write_file(os.path.join(self._folder, FILE), [manifest_text(manifest)], self._disk)
        commit_folder(self._folder, self.path, overwrite=self._overwrite, disk=self._disk)
        self._after()

    def _list_of(self, process: int) -> str:
        return os.path.join(self._folder, f"__files.{process}")  # No array has such a name.

    def _files_of(self, process: int) -> dict[str, Files]:
        """Returns the files that another process has written."""
        path, deadline = self._list_of(process), time.monotonic() + min(_PATIENCE, self._job.timeout / 2)
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(_POLL)
        try:
            content = read_text(self._folder, os.path.basename(path), _MOST)
        except FileNotFoundError:
            raise DistributedError(
                f"checkpoint: process 0 does not see {path}, which process {process} has written: the processes need a "
                "file system that all of them share"
            ) from None
        with naming(path):
            self._disk.remove_file(path)
        files: dict[str, Files] = parse_json(content, path)
        return files

    def _check_sizes(self, manifest: Manifest) -> None:
        """Checks that this process sees the files of all processes, with their sizes."""
        if self._job.count == 1:
            return
        for _, key, (nbytes, _) in manifest.all_files():
            path = os.path.join(self._folder, key)
            with naming(path):
                size = os.stat(path).st_size
            if size != nbytes:
                raise DistributedError(
                    f"checkpoint: process 0 sees {counted(size, 'byte')} of {path}, and another process has written "
                    f"{nbytes}: the processes need a file system that all of them share"
                )

    # -- in the program ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits until the checkpoint is complete.

        Raises:
            BaseException: the error of this process.
            DistributedError: another process has raised an error, or does not come in time.
        """
        with self.removing():
            self._written.wait()
            self._job.agree("files written", self.error)
            self._is_finishing.set()
            self._thread.join()
            if not self._job.index and not self._is_complete:
                try:
                    self._complete()
                except BaseException as error:  # It is raised below, when all processes know of it.
                    self.error = error
            self._job.agree("folder renamed", self.error)

    @contextlib.contextmanager
    def removing(self) -> Iterator[None]:
        """After an error in the ``with`` block, writes no more, and removes what was written."""
        try:
            yield
        except BaseException as error:  # It passes on: also after Ctrl-C, no folder is left.
            self._is_stopped.set()
            self._is_finishing.set()
            if self._thread.ident is not None:
                self._thread.join()
            if not self._job.index and os.path.lexists(self._folder):
                clean(error, self._folder, lambda: discard(self._folder, self._disk))
            raise


def in_threads(function: Callable[[T], U], items: Sequence[T], count: int) -> list[U]:
    """Returns the results of a function of items, which several threads compute; an error ends all of them.

    They wait for the disk, so that more of them than cores are of use (`shardtensor.host.threads.each` has as many as
    cores). Unlike those of `concurrent.futures`, they may also be started while the interpreter waits for its last
    threads.
    """
    numbers, results, errors = iter(range(len(items))), dict[int, U](), list[BaseException]()
    lock = threading.Lock()  # fork: the threads and the lock end with this call, in the process that made them.

    def run() -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = function(items[number])
            except BaseException as error:  # It is raised below.
                errors.append(error)

    others = [threading.Thread(target=run, name="shardtensor-checkpoint") for _ in range(min(count, len(items)) - 1)]
    started = 0
    try:
        for thread in others:
            thread.start()
            started += 1
        run()
    except RuntimeError as error:  # No thread can be started; those that run have to end before files are removed.
        errors.append(error)
    for thread in others[:started]:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


class _StoppedError(Exception):
    """The save was stopped, for a reason that is raised elsewhere."""
