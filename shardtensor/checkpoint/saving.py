"""How a checkpoint is written: each process its files, then one of them the manifest, then the folder is renamed.

A thread writes the files, so that a program can go on meanwhile (`Save.start`); `Save.finish` waits for it, and raises
the error of any process in all of them. Process 0 learns what the others have written from files that they leave in the
folder: it can complete a checkpoint while the programs compute and exchange nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

from shardtensor.checkpoint.manifest import FILE, Files, Manifest, manifest_text
from shardtensor.checkpoint.plans import Plan
from shardtensor.checkpoint.together import JobPart
from shardtensor.errors import DistributedError
from shardtensor.files.atomic import (
    DISK,
    Disk,
    commit_folder,
    discard,
    make_folder,
    naming,
    replace_file,
    write_file,
)
from shardtensor.files.metadata import parse_json
from shardtensor.files.paths import read_text
from shardtensor.files.zarr import Written, write_array, write_chunk, write_group
from shardtensor.host.units import counted

_POLL = 0.01
"""Seconds between two looks at the folder, in which other processes leave what they have written."""

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
        self._written = threading.Event()
        self._is_stopped = threading.Event()
        self._deadline = math.inf  # It is set when all processes have written their files.
        # A daemon, for which the interpreter does not wait at its end: `finish` is called there, which can stop it.
        self._thread = threading.Thread(target=self._run, name="shardtensor-checkpoint", daemon=True)

    def start(self) -> None:
        """Starts to write, in a thread."""
        self._thread.start()

    @property
    def is_alone(self) -> bool:
        """Whether no other process writes a part of it."""
        return self._job.count == 1

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            files = self._write()
            if self._job.index:
                replace_file(self._list_of(self._job.index), [json.dumps(files).encode()], self._disk)
            self._written.set()
            if not self._job.index:
                self._complete(files)
        except BaseException as error:  # It is raised in the thread that finishes the save.
            self.error = error
        finally:
            self._written.set()
            self._plan.arrays.clear()  # The values are free to be overwritten.

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
        for array in self._plan.arrays:
            folder = os.path.join(self._folder, array.record.name)
            rows: list[Written] = []
            if first:
                rows.append(write_array(folder, array.metadata, self._disk))
            for index in array.chunks(self._job.index):
                if self._is_stopped.is_set():
                    raise _StoppedError
                make_folder(folder, self._disk)
                rows.append(write_chunk(folder, array.metadata, index, array.pieces_of(index), self._disk))
            if rows:
                files[array.record.name] = {row.key: (row.nbytes, row.crc32c) for row in rows}
        return files

    def _complete(self, files: dict[str, Files]) -> None:
        """Completes the checkpoint, in process 0, when all others have written their files."""
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
        """Waits until another process has written its files, and returns them."""
        path = self._list_of(process)
        while True:
            if self._is_stopped.is_set() or self._job.is_broken:
                raise _StoppedError
            with contextlib.suppress(FileNotFoundError):
                content = read_text(self._folder, os.path.basename(path), _MOST)
                break
            if time.monotonic() > self._deadline:
                raise DistributedError(
                    f"checkpoint: process 0 has not seen {path}, which process {process} has written, within "
                    f"{self._job.timeout / 2:g} s: the processes need a file system that all of them share"
                )
            time.sleep(_POLL)
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
            self._deadline = time.monotonic() + self._job.timeout / 2  # Before the others stop waiting for this one.
            self._thread.join()
            self._job.agree("folder renamed", self.error)

    @contextlib.contextmanager
    def removing(self) -> Iterator[None]:
        """After an error in the ``with`` block, writes no more, and removes what was written."""
        try:
            yield
        except BaseException as error:  # It passes on: also after Ctrl-C, no folder is left.
            self._is_stopped.set()
            if self._thread.ident is not None:
                self._thread.join()
            if not self._job.index and os.path.lexists(self._folder):
                try:
                    discard(self._folder, self._disk)
                except OSError as another:
                    error.add_note(f"{self._folder} could not be removed: {another}")
            raise


class _StoppedError(Exception):
    """The save was stopped, for a reason that is raised elsewhere."""
