"""The compiled libraries on disk, which later processes read instead of compiling them again.

They are kept in ``$XDG_CACHE_HOME/shardtensor/kernels`` (by default in ``~/.cache``; a relative path is ignored, as the
XDG specification demands), under a key of everything that determines their contents. A library is code: it is read only
if no other user can have written or replaced it, and the bytes that were read are those that are loaded. If the folder
cannot be used, the log gives the reason once, and libraries are compiled for each process.

Each file ends with a digest of its key and its contents, which finds truncated and exchanged files; a damaged library
is compiled again. `Kernels.keep` bounds the folder: beyond `MOST_BYTES`, and after `MOST_SECONDS` without use, the
least recently used libraries are removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from shardtensor.errors import message_of
from shardtensor.host.trusted_paths import distrust, distrust_file

LOG = logging.getLogger("shardtensor.jit")

MOST_BYTES = 256 << 20
"""The size in bytes of all libraries that are kept. A library of one program has some ten KiB."""

MOST_SECONDS = 180 * 86400.0
"""The seconds without use after which a library is removed."""

_ABANDONED = 3600.0
"""The seconds after which a temporary file belongs to a process that was killed while it wrote the file."""

_DIGEST = 32
"""The size in bytes of the digest at the end of a file."""


@dataclass(frozen=True)
class Kernels:
    """The folder of the libraries.

    Attributes:
        folder: the path of the folder, which no other user can write to or replace.
    """

    folder: Path

    def read(self, key: str) -> bytes | None:
        """Returns the library of a key; None if there is none, or none that can be trusted."""
        path = self.folder / f"{key}.so"
        try:
            content = _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            LOG.info("the library %s cannot be read (%s) and is compiled again", path, message_of(error))
            return None
        if content[-_DIGEST:] == _digest(key, content[:-_DIGEST]):
            return content[:-_DIGEST]
        LOG.info("the library %s is damaged and is compiled again", path)
        return None

    def keep(self, key: str, content: bytes) -> None:
        """Writes a library, and removes those that the bounds leave no room for. Other processes see all of it or
        nothing.
        """
        path = self.folder / f"{key}.so"
        try:
            number, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.folder)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(content + _digest(key, content))
                os.replace(name, path)
            except BaseException:  # Whatever it is, it is raised again once the temporary file is removed.
                os.unlink(name)
                raise
            self._shrink(path.name)
        except OSError as error:
            _say_once(f"kernels are not kept on disk: {message_of(error)}")

    def _shrink(self, written: str) -> None:
        """Removes libraries, except the one that was written, and the files that killed processes have left.

        Several processes may do so at the same time: a file that another process has removed is skipped, and one that
        another process reads meanwhile exists until it has been read.
        """
        now, used, libraries = time.time(), 0, []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if entry.name.endswith(".so"):
                        used += status.st_size
                        libraries.append((status.st_mtime, status.st_size, entry.name))
                    elif entry.name.endswith(".tmp") and now - status.st_mtime > _ABANDONED:
                        os.unlink(entry.path)
        for last_use, size, name in sorted(libraries):
            if used <= MOST_BYTES and now - last_use <= MOST_SECONDS:
                return
            if name != written:
                (self.folder / name).unlink(missing_ok=True)
                used -= size


def find_kernels() -> Kernels | None:
    """Returns the folder of the libraries, which is created if necessary; None if it cannot be used."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")
    folder = Path(home, "shardtensor", "kernels")
    try:
        reason = distrust(str(folder), create=True)
    except OSError as error:
        reason = message_of(error)
    if reason is not None:
        _say_once(f"kernels are not kept on disk: {reason}")
        return None
    return Kernels(folder)


def _read(path: Path) -> bytes:
    """Returns the contents of a file that only the user can have written, and notes its use.

    Raises:
        OSError: it cannot be read, or it is not such a file.
    """
    # Opening a named pipe would otherwise wait for a process that writes to it; a link might lead anywhere.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if (reason := distrust_file(os.fstat(number))) is not None:
            raise PermissionError(reason)
        with contextlib.suppress(OSError):  # On a file system that is read-only, no library is removed either.
            os.utime(number)
        with os.fdopen(number, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(number)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


@functools.lru_cache(64)
def _say_once(message: str) -> None:
    LOG.info("%s", message)
