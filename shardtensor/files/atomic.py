"""Files and folders that are written as a whole or not at all, and that survive a loss of power once they are visible.

A folder is written under a name of its own beside its final one, each file in it is flushed, the folder is renamed, and
its parent is flushed. Where it replaces another one, the old one is moved aside first and deleted last, so that
`find_folder` finds one of both at every moment. Names of unfinished, moved and deleted folders have a
form that no user chooses, by which the next write removes what a process has left that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

Buffer = Any
"""An object with contiguous bytes: ``bytes``, a ``memoryview``, a contiguous array."""

_LONGEST = 180
"""The bytes of a name from which on names beside it have its digest: file systems limit names to 255 bytes."""

_BLOCK = 1 << 26
"""The bytes that are written at once, after which signals are handled."""


_BEGUN = 1 << 22
"""The bytes that are written until the disk begins to work on them, while the next ones are written."""


class Disk:
    """The operations on the file system. Tests pass subclasses whose operations fail."""

    def create(self, path: str) -> int:
        """Creates a file that does not exist, and returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Writes bytes, and returns how many were written."""
        return os.write(descriptor, data)

    def begin_flush(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Lets the system begin to write bytes of a file to the disk, and does not wait."""
        if hasattr(os, "posix_fadvise"):  # Only some operating systems have it.
            # Linux begins to write such bytes. It drops only those that are on the disk, of which there are none yet.
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def flush(self, descriptor: int) -> None:
        """Writes what the system holds of a file or folder to the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Closes a file; network file systems report errors of writes here."""
        os.close(descriptor)

    def make_folder(self, path: str) -> None:
        """Creates a folder that does not exist."""
        os.mkdir(path)

    def rename(self, path: str, new: str) -> None:
        """Renames a file or folder."""
        os.rename(path, new)

    def remove_file(self, path: str) -> None:
        """Removes a file or a link."""
        os.unlink(path)

    def remove_empty_folder(self, path: str) -> None:
        """Removes a folder that has no entries."""
        os.rmdir(path)


DISK = Disk()
"""The file system itself."""


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Gives the errors of the operating system in the ``with`` block, which may lack one, the name of a file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


# -- files -----------------------------------------------------------------------------------------


def write_file(path: str, pieces: Iterable[Buffer], disk: Disk = DISK) -> int:
    """Writes and flushes a new file, and returns its size. An error removes what was written.

    The entry in its folder is on the disk only after `flush_folder`, which `commit_folder` calls for all folders.

    Raises:
        OSError: the file exists, or cannot be written; the error has its name.
    """
    with naming(path):
        descriptor = disk.create(path)
        try:
            try:
                size = begun = 0
                for piece in pieces:
                    size += _write_all(descriptor, piece, disk)
                    if size - begun >= _BEGUN:
                        disk.begin_flush(descriptor, begun, size - begun)
                        begun = size
                disk.flush(descriptor)
            finally:
                disk.close(descriptor)
        except BaseException as error:  # Also of Ctrl-C, which passes on: only the unfinished file is removed.
            clean(error, path, lambda: disk.remove_file(path))
            raise
    return size


def _write_all(descriptor: int, piece: Buffer, disk: Disk) -> int:
    """Writes all bytes of a piece, and returns their number."""
    view = memoryview(piece).cast("B")
    done = 0
    while done < len(view):
        count = disk.write(descriptor, view[done : done + _BLOCK])
        if count <= 0:  # POSIX gives no reason for it.
            raise OSError(errno.EIO, "no bytes could be written")
        done += count
    return done


def replace_file(path: str, pieces: Iterable[Buffer], disk: Disk = DISK) -> int:
    """Writes a file under another name in its folder, flushes it, renames it to ``path``, and flushes the folder.

    Raises:
        OSError: it cannot be written. The error has the name of a file, and ``path`` has what it had before, except
            where the last flush fails: then it may have either.
    """
    beside = name_beside(path, "new")
    size = write_file(beside, pieces, disk)
    try:
        with naming(path):
            disk.rename(beside, path)
    except BaseException as error:
        clean(error, beside, lambda: disk.remove_file(beside))
        raise
    flush_folder(os.path.dirname(path) or ".", disk)
    return size


def make_folder(path: str, disk: Disk = DISK) -> None:
    """Creates a folder unless there is one: several processes may create it at the same time.

    Raises:
        OSError: it cannot be created, or there is something else; the error has its name.
    """
    try:
        with naming(path):
            disk.make_folder(path)
    except FileExistsError:
        if not os.path.isdir(path) or os.path.islink(path):
            raise


def flush_folder(path: str, disk: Disk = DISK) -> None:
    """Writes the entries of a folder to the disk.

    Raises:
        OSError: it cannot be flushed.
    """
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            disk.flush(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some network file systems cannot, and need not.
                raise
        finally:
            os.close(descriptor)


def clean(error: BaseException, path: str, remove: Any) -> None:
    """Removes what an error leaves; where that fails, too, the error says so."""
    try:
        remove()
    except FileNotFoundError:
        return
    except OSError as another:
        error.add_note(f"{path} could not be removed: {another}")


# -- names -----------------------------------------------------------------------------------------

_KINDS = ("new", "old", "gone")
"""What a name beside another one means: not yet complete; moved aside for a new one; being deleted."""


def name_beside(path: str, kind: str) -> str:
    """Returns a new name in the folder of a path, which `leftovers` recognizes."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{_short(name)}.{uuid.uuid4().hex}.{kind}")


def _short(name: str) -> str:
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST else hashlib.sha256(encoded).hexdigest()


BESIDE = re.compile(rf"\.(.+)\.[0-9a-f]{{32}}\.({'|'.join(_KINDS)})", re.DOTALL)
"""The form of the names that `name_beside` gives."""


def leftovers(path: str, *kinds: str) -> list[str]:
    """Returns the names beside a path, of these kinds or of all, the newest first.

    Raises:
        OSError: the folder cannot be read.
    """
    folder, name = os.path.split(path)
    names = []
    with naming(folder or "."), os.scandir(folder or ".") as entries:
        for entry in entries:
            match = BESIDE.fullmatch(entry.name)
            if match and match[1] == _short(name) and match[2] in (kinds or _KINDS):
                with contextlib.suppress(FileNotFoundError):  # Another process has renamed it meanwhile.
                    names.append((entry.stat(follow_symlinks=False).st_mtime_ns, os.path.join(folder, entry.name)))
    return [name for _, name in sorted(names, reverse=True)]


def leftovers_in(folder: str) -> list[str]:
    """Returns the paths in a folder beside which there are names that `name_beside` gives.

    Raises:
        OSError: the folder cannot be read.
    """
    with naming(folder), os.scandir(folder) as entries:
        names = {match[1] for entry in entries if (match := BESIDE.fullmatch(entry.name))}
    return [os.path.join(folder, name) for name in sorted(names)]


# -- folders ---------------------------------------------------------------------------------------


def new_folder(path: str, disk: Disk = DISK) -> str:
    """Creates the folder in which the contents of ``path`` are written until `commit_folder`, and returns its name.

    Raises:
        OSError: it cannot be created.
    """
    beside = name_beside(path, "new")
    with naming(beside):
        disk.make_folder(beside)
    return beside


def commit_folder(new: str, path: str, *, overwrite: bool = False, disk: Disk = DISK) -> None:
    """Flushes all folders in a folder whose files have been flushed, renames it to ``path``, and flushes its parent.

    Raises:
        FileExistsError: there is something at ``path``, and ``overwrite`` is False.
        OSError: it cannot be done. The error has the name of a file. What was at ``path`` is there, or `find_folder`
            finds it; where only the deletion of the old folder fails, it is the new one, and a leftover remains.
    """
    for folder, _, _ in os.walk(new, topdown=False, onerror=raise_error):
        flush_folder(folder, disk)
    parent = os.path.dirname(path) or "."
    old = None
    if os.path.lexists(path):
        if not overwrite:
            raise FileExistsError(errno.EEXIST, "the folder exists, and overwrite=True was not passed", path)
        old = name_beside(path, "old")
        with naming(path):
            disk.rename(path, old)
    try:
        with naming(path):
            disk.rename(new, path)
    except BaseException as error:
        if old is not None:
            clean(error, old, lambda: disk.rename(old, path))
        raise
    flush_folder(parent, disk)
    if old is not None:
        discard(old, disk)


def find_folder(path: str) -> str | None:
    """Returns the folder that a reader of ``path`` takes: the one there, else the newest that was moved aside for one
    that never came; None if there is neither.

    Raises:
        OSError: the parent cannot be read.
    """
    # A write may rename between the looks: it moves the old one aside, then the new one to the path.
    for _ in range(2):
        if os.path.isdir(path):
            return path
        try:
            moved = [name for name in leftovers(path, "old") if os.path.isdir(name)]
        except FileNotFoundError:
            return None
        if moved:
            return moved[0]
    return None


def recover(path: str, disk: Disk = DISK) -> None:
    """Moves back what `find_folder` finds, and removes all leftovers of ``path``. A process calls it before it writes.

    Raises:
        OSError: it cannot be done.
    """
    taken = find_folder(path)
    if taken is not None and taken != path:
        with naming(taken):
            disk.rename(taken, path)
        flush_folder(os.path.dirname(path) or ".", disk)
    remove_leftovers(path, disk)


def remove_leftovers(path: str, disk: Disk = DISK) -> None:
    """Removes the folders and files beside a path that processes have left that were killed.

    Raises:
        OSError: one of them cannot be removed.
    """
    for name in leftovers(path):
        discard(name, disk)


def remove_folder(path: str, disk: Disk = DISK) -> None:
    """Removes a folder: it is renamed first, so that no reader finds a part of it.

    Raises:
        OSError: it cannot be renamed, or not all of it can be removed. In the latter case a leftover remains.
    """
    gone = name_beside(path, "gone")
    with naming(path):
        disk.rename(path, gone)
    flush_folder(os.path.dirname(path) or ".", disk)
    _delete(gone, disk)


def discard(path: str, disk: Disk = DISK) -> None:
    """Removes what `name_beside` has named. It is renamed first where that is possible: no reader takes a part of it,
    and processes that still write to it fail.

    Raises:
        OSError: not all of it can be removed: a leftover remains.
    """
    gone = f"{path.rpartition('.')[0]}.gone"
    with contextlib.suppress(OSError):  # It may be removed without.
        if path != gone:
            disk.rename(path, gone)
            path = gone
    _delete(path, disk)


def _delete(path: str, disk: Disk) -> None:
    """Removes a folder with a name that no reader takes, or a file. Links are removed and not followed."""
    if os.path.islink(path) or not os.path.isdir(path):
        with naming(path), contextlib.suppress(FileNotFoundError):
            disk.remove_file(path)
        return
    for folder, folders, files in os.walk(path, topdown=False, onerror=raise_error):
        for name in files:
            with naming(os.path.join(folder, name)):
                disk.remove_file(os.path.join(folder, name))
        for name in folders:
            child = os.path.join(folder, name)
            with naming(child):
                if stat.S_ISLNK(os.lstat(child).st_mode):
                    disk.remove_file(child)
                else:
                    disk.remove_empty_folder(child)
    with naming(path):
        disk.remove_empty_folder(path)


def raise_error(error: OSError) -> None:
    """Raises the errors of `os.walk`, which otherwise passes over folders that it cannot read."""
    raise error
