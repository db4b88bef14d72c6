"""Files below a folder that is not trusted: their names do not leave the folder, and links are not followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from shardtensor.errors import ArgumentError
from shardtensor.files.atomic import naming
from shardtensor.host.summation_order import HostArray
from shardtensor.host.units import counted

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Without the last flag, opening a pipe would wait for its writer."""

_BLOCK = 1 << 30
"""The bytes that are read at once."""


def check_name(name: str, what: str) -> None:
    """Checks a part of a path: it has characters, names no other folder, and is none that zarr reserves.

    Raises:
        ArgumentError: it is no such name.
    """
    broken = not name or name.strip(".") == "" or name.startswith("__") or "/" in name or "\0" in name
    if broken or name == "zarr.json" or len(name.encode(errors="surrogatepass")) > 255:
        raise ArgumentError(
            f"{what}: the name {name[:60]!r} is not accepted; wanted at most 255 bytes without '/' and NUL, that are "
            "not dots only, do not begin with '__', and are not 'zarr.json'"
        )


@contextlib.contextmanager
def opened(root: str, key: str) -> Iterator[int]:
    """Opens the regular file with a key, names that ``/`` separates, below a folder, for reading.

    Raises:
        ArgumentError: the key climbs, a part of it is a link, or it is no regular file.
        FileNotFoundError: there is no file.
        OSError: it cannot be opened; the error has its name.
    """
    path = os.path.join(root, key)
    parts = key.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ArgumentError(f"{root}: the path {key[:200]!r} in it is not accepted: it leaves the folder")
    try:
        os.fsencode(key)
    except UnicodeEncodeError:
        raise ArgumentError(f"{root}: the path {key[:200]!r} in it is not accepted: it has surrogates") from None
    with naming(path):
        at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                try:
                    child = os.open(part, _FLAGS, dir_fd=at)
                except OSError as error:
                    error.filename = path
                    if error.errno == errno.ELOOP:
                        raise ArgumentError(f"{path}: {part!r} is a link, which is not followed") from None
                    raise
                os.close(at)
                at = child
            if not stat.S_ISREG(os.fstat(at).st_mode):
                raise ArgumentError(f"{path} is not a regular file")
            yield at
        finally:
            os.close(at)


def read_into(descriptor: int, memory: HostArray, offset: int, path: str) -> None:
    """Fills memory with the bytes of a file from an offset on.

    Raises:
        ArgumentError: the file ends before.
    """
    done = 0
    while done < memory.size:
        with naming(path):
            count = os.preadv(descriptor, [memory[done : done + _BLOCK].data], offset + done)
        if not count:
            raise ArgumentError(
                f"{path} is truncated: its last {counted(memory.size - done, 'byte')} of a part"
                f" with {memory.size} are missing"
            )
        done += count


def read_text(root: str, key: str, most: int) -> bytes:
    """Returns the content of a small file below a folder.

    Raises:
        ArgumentError: the file has more than ``most`` bytes, or is none that `opened` opens.
        OSError: it cannot be read; the error has its name.
    """
    path = os.path.join(root, key)
    with opened(root, key) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise ArgumentError(f"{path} has {counted(size, 'byte')}; wanted at most {most}")
        with naming(path), os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(size)
