"""Checks that no other user can replace what a path names, before code is loaded from there."""

from __future__ import annotations

import contextlib
import os
import stat

_MOST_LINKS = 40
"""The number of symbolic links of a path after which Linux, too, gives up."""


def distrust(folder: str, create: bool = False) -> str | None:
    """Returns why other users may replace what a folder contains; None if only the user and root can.

    Every component of the path, from the root on and also of the targets of symbolic links, has to belong to the user
    or to root, and no other user may write to a folder on the way: as an exception, to one with the sticky bit, such as
    /tmp, where only the owner of an entry can replace it. The folder itself has to belong to the user.

    Args:
        folder: the path.
        create: whether folders that are missing are created, for the user only, in those that have been checked.

    Raises:
        OSError: a component does not exist, or cannot be created or cannot be examined.
    """
    if not hasattr(os, "geteuid"):
        return "this operating system has no owners of files"
    if not os.path.isabs(folder):
        return f"{folder!r} is not an absolute path"
    user = os.geteuid()
    pending = [name for name in reversed(folder.split("/")) if name not in ("", ".")]
    path, links = "/", 0
    while True:
        found = _status(path, create)
        if found.st_uid not in (user, 0):
            return f"{path} belongs to another user (number {found.st_uid})"
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MOST_LINKS:
                return f"{folder} has too many symbolic links"
            target = os.readlink(path)
            pending += [name for name in reversed(target.split("/")) if name not in ("", ".")]
            path = "/" if os.path.isabs(target) else os.path.dirname(path)
            continue  # The folder of the link is examined again, which is harmless.
        if not stat.S_ISDIR(found.st_mode):
            return f"{path} is no folder"
        if _others_write(found) and not (pending and found.st_mode & stat.S_ISVTX):
            return f"other users may write to {path}"
        if not pending:
            return None if found.st_uid == user else f"{path} belongs to another user (number {found.st_uid})"
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


def distrust_file(found: os.stat_result) -> str | None:
    """Returns why an open file is not one that only the user can have written; None if it is."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid != os.geteuid():
        return f"it belongs to another user (number {found.st_uid})"
    return "other users may write to it" if _others_write(found) else None


def _others_write(found: os.stat_result) -> bool:
    return bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
