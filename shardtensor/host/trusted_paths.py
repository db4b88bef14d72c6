"""Checks that no other user can replace what a path names, before code is loaded from there."""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
from pathlib import Path

_MOST_LINKS = 40
"""The number of symbolic links of a path after which Linux, too, gives up."""


def distrust(folder: str, create: bool = False) -> str | None:
    """Returns why other users may replace what a folder contains; None if only the user and root can.

    Every component of the path, from the root on and also of the targets of symbolic links, has to belong to the user
    or to root, and no other user may write to a folder on the way: as an exception, to one with the sticky bit, such as
    /tmp, where only the owner of an entry can replace it. The user's private group may, to which folders belong where
    the umask is 002. The folder itself has to belong to the user.

    Args:
        folder: the path.
        create: whether folders that are missing are created, for the user only, in those that have been checked.

    Raises:
        OSError: a component does not exist, or cannot be created or cannot be examined.
    """
    if not os.path.isabs(folder):
        return f"{folder!r} is not an absolute path"
    user, root = os.geteuid(), _root()
    pending = [name for name in reversed(folder.split("/")) if name not in ("", ".")]
    path, links = "/", 0
    while True:
        status = _status(path, create)
        if status.st_uid not in (user, root):
            return f"{path} belongs to another user (number {status.st_uid})"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                return f"{folder} has too many symbolic links"
            target = os.readlink(path)
            pending += [name for name in reversed(target.split("/")) if name not in ("", ".")]
            path = "/" if os.path.isabs(target) else os.path.dirname(path)
            continue  # The folder of the link is examined again, which is harmless.
        if not stat.S_ISDIR(status.st_mode):
            return f"{path} is not a folder"
        if _others_write(status, path) and not (pending and status.st_mode & stat.S_ISVTX):
            return f"other users may write to {path}"
        if not pending:
            return None if status.st_uid == user else f"{path} belongs to another user (number {status.st_uid})"
        name = pending.pop()
        # No link is left in the path, so that its parent is the one of its text.
        path = os.path.dirname(path) if name == ".." else os.path.join(path, name)


def _status(path: str, create: bool) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):  # Another process creates it, too.
        os.mkdir(path, 0o700)
    return os.lstat(path)


def distrust_file(status: os.stat_result) -> str | None:
    """Returns why an open file is not one that only the user can have written; None if it is."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid != os.geteuid():
        return f"it belongs to another user (number {status.st_uid})"
    return "other users may write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _others_write(status: os.stat_result, path: str) -> bool:
    if status.st_mode & stat.S_IWGRP:
        # In an access control list, the group's bits are the most that any of its users has.
        return bool(status.st_mode & stat.S_IWOTH) or not _is_private(status.st_gid) or _has_list(path)
    return bool(status.st_mode & stat.S_IWOTH)


def _is_private(group: int) -> bool:
    """Whether a group has only the user: it has the user's name, by convention, and no other member."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # Containers run programs under numbers that have no names.
        return False
    return entry.gr_name == user.pw_name and group == user.pw_gid and {user.pw_name}.issuperset(entry.gr_mem)


def _has_list(path: str) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return False
        raise


@functools.cache
def _root() -> int:
    """Returns the number of root. Containers without privileges often run in a name space of users that has only one
    user: root's files then have the number of files whose owner has none.
    """
    try:
        ranges = Path("/proc/self/uid_map").read_text("utf-8").splitlines()
        if any(int(line.split()[0]) == 0 for line in ranges):
            return 0
        return int(Path("/proc/sys/kernel/overflowuid").read_text("utf-8"))
    except OSError:
        return 0
