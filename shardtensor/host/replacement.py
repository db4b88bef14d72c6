"""Files that are written as a whole or not at all: under another name in the same folder, flushed, and renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from typing import IO

_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def replaced(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for writing, which replaces the one at a path at the end of the ``with`` block, unless there is an
    error: then the path has what it had before.

    The new file has the owner, the group, the mode, the access control list and the other extended attributes of the
    old one. A symbolic link remains, and its target is replaced; other hard links keep the old contents. The old file
    itself is written, so that an error leaves it incomplete, where there is no other way: its folder permits no new
    files, or a new file cannot get its owner, group or attributes. So are devices, pipes and open descriptors
    (``/dev/fd/3``). The name of the stream is that of the file that is written, in the folder of `target_of`.

    Raises:
        OSError: the file cannot be written.
    """
    target = target_of(path)
    if target is None:
        with open(path, "wb") as stream:
            yield stream
        return
    folder, name = os.path.split(target)
    with contextlib.ExitStack() as opened:
        at = opened.enter_context(_closed(os.open(folder or ".", getattr(os, "O_PATH", os.O_RDONLY) | _FOLDER)))
        # The name is short, whatever the length of the other, which may have as many bytes as a name can have.
        beside = f".{uuid.uuid4().hex}.part"
        try:
            old = opened.enter_context(_old(name, at))
            new = _created(beside, at, old)
            if new is None:
                assert old is not None
                os.ftruncate(old, 0)
            written = os.dup(old) if new is None else new  # type: ignore[arg-type]
            with open(name if new is None else beside, "wb", opener=lambda *_: written) as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            if new is not None:
                os.replace(beside, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException as error:  # Also of Ctrl-C, which passes on: only the unfinished file is removed.
            with contextlib.suppress(OSError):  # There is none, or the file system is read-only.
                os.unlink(beside, dir_fd=at)
            if isinstance(error, OSError) and error.filename in (beside, name):
                error.filename, error.filename2 = path, None
            raise
        _flush_folder(at)


def is_special(path: str) -> bool:
    """Whether a path leads to a device, a pipe or a socket."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # Opening the path raises the error.
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def target_of(path: str) -> str | None:
    """Returns the path of the regular file that a path leads to, or would create. None if it leads to anything else, or
    to the open file of a process (``/dev/stdout``), of which the name can be used for nothing else.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        return None
    while os.path.islink(path):
        folder = os.path.dirname(path)
        if os.path.realpath(folder).startswith("/proc/"):
            return None
        if _is_planted(path, folder or "."):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        path = os.path.join(folder, os.readlink(path))
    return path


def _is_planted(link: str, folder: str) -> bool:
    """Whether another user has made a link in a folder that all users share, such as /tmp. Linux does not follow such a
    link either, but it may be made after `os.stat` has followed the path.
    """
    shared = os.stat(folder)
    is_shared = shared.st_mode & stat.S_ISVTX and shared.st_mode & stat.S_IWOTH
    return bool(is_shared) and os.lstat(link).st_uid not in (os.geteuid(), shared.st_uid)


@contextlib.contextmanager
def _closed(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _old(name: str, at: int) -> Iterator[int | None]:
    """Opens the old file for writing, so that one that is read-only is an error; None if there is none."""
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=at)
    except FileNotFoundError:
        yield None
        return
    with _closed(descriptor):
        yield descriptor


def _created(name: str, at: int, old: int | None) -> int | None:
    """Creates a file with the attributes of an old one; None if that is impossible."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if old is None:
        return os.open(name, flags, 0o666, dir_fd=at)
    try:
        new = os.open(name, flags, 0o600, dir_fd=at)  # No other user may read it before it has the old mode.
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return None
        raise
    try:
        _copy_attributes(old, new)
    except OSError:  # The old file is written, which raises the error again if it is not about attributes.
        os.close(new)
        os.unlink(name, dir_fd=at)
        return None
    except BaseException:  # Such as Ctrl-C, which passes on: the caller removes the new file, and the old one is whole.
        os.close(new)
        raise
    return new


def _copy_attributes(old: int, new: int) -> None:
    was, now = os.fstat(old), os.fstat(new)
    if (was.st_uid, was.st_gid) != (now.st_uid, now.st_gid):
        os.fchown(new, was.st_uid, was.st_gid)
    old_attributes, new_attributes = _extended_attributes(old), _extended_attributes(new)
    for name in new_attributes.keys() - old_attributes.keys():  # A folder may give its files an access control list.
        os.removexattr(new, name)
    for name, value in old_attributes.items():
        if new_attributes.get(name) != value:
            os.setxattr(new, name, value)
    os.fchmod(new, stat.S_IMODE(was.st_mode))


def _extended_attributes(descriptor: int) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(descriptor, name) for name in os.listxattr(descriptor)}
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise


def _flush_folder(at: int) -> None:
    """Makes a new name in a folder durable, where the folder may be read and the file system can."""
    try:
        descriptor = os.open(".", os.O_RDONLY | _FOLDER, dir_fd=at)
    except PermissionError:
        return
    with _closed(descriptor):
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
