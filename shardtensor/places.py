"""Places in the program of the user: the innermost line that calls this package, directly or by another library."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

_PACKAGE = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<operator ", "<frozen ")
"""How the names of the files of this package begin, those of the functions that it generates, and Python's own."""

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed libraries."""

_STANDARD = os.path.dirname(os.__file__) + os.sep
"""The folder of the standard library."""


_PUBLIC = ["shardtensor"] + [
    f"shardtensor.{name}" for name in ("distributed", "linalg", "fft", "random", "lib", "einops")
]
"""The modules whose public names users call."""


class Place(NamedTuple):
    """A place in a program.

    Attributes:
        file: the path of the file, as in tracebacks.
        line: the number of the line.
        name: the name of the function that contains the line, or ``<module>``.
    """

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """Returns ``file:line``. The path is relative to the current folder, or to that of the program."""
        return f"{_shown(self.file)}:{self.line}"


def user_place(frame: FrameType | None = None) -> Place | None:
    """Returns the place of the innermost call in the program of the user, or None if there is none on this stack, such
    as in a thread of this package.

    That is the innermost frame which is neither in this package nor in an installed library; where all frames are in
    libraries, the innermost one outside of this package.

    Args:
        frame: the innermost frame of a stack; by default that of the caller.
    """
    return _innermost(_frames(frame or sys._getframe(1)))


def user_call() -> tuple[Place | None, str]:
    """Returns the place of `user_place`, and the public function of this package that is called there; empty for an
    operator of Python or a method that only this package calls.
    """
    place, frame, function = user_place(), sys._getframe(1), ""
    public = {name for module in _PUBLIC for name in getattr(sys.modules.get(module), "__all__", ())}
    for code, line in _frames(frame):
        if place == Place(code.co_filename, line, code.co_name):
            break
        if is_in_package(code.co_filename):  # The outermost one is what the user calls.
            names = code.co_name, Path(code.co_filename).stem  # shard_map.py has what `st.shard_map` returns.
            function = next((name for name in names if name in public), function)
    return place, function


def place_of(error: BaseException) -> Place | None:
    """Returns the place in the program of the user where an exception was raised, or from where the library that raised
    it was called; None for an exception without such a frame in its traceback.
    """
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _innermost(reversed(frames))


def is_in_package(file: str) -> bool:
    """Whether a file, or the name of generated code, belongs to this package."""
    return file.startswith(_PACKAGE)


def is_in_library(file: str) -> bool:
    """Whether a file belongs to an installed library or to the standard library."""
    return any(part in file for part in _INSTALLED) or file.startswith(_STANDARD)


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """Yields the code and the line of a frame and of those that called it."""
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _innermost(frames: Iterator[tuple[CodeType, int]]) -> Place | None:
    """Returns the place of the user's frame among frames, of which the innermost comes first; see `user_place`."""
    found = None
    for code, line in frames:
        if is_in_package(code.co_filename):
            continue
        place = Place(code.co_filename, line, code.co_name)
        if not is_in_library(code.co_filename):
            return place
        found = found or place
    return found


def _shown(file: str) -> str:
    """Returns a path relative to the current folder, or to that of the program, if the file is in one of these."""
    for folder in (".", *sys.path[:1]):
        try:
            base = os.path.join(os.path.abspath(folder), "")
        except FileNotFoundError:  # The current folder has been removed.
            continue
        if file.startswith(base):
            return file[len(base) :]
    return file
