"""Places in the program of the user: the innermost line that calls this package, directly or by another library."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import NamedTuple

_PACKAGES = frozenset(("shardtensor", "shardtensor_numpy", "shardtensor_cupy", "shardtensor_torch"))
"""This package and those of its backends."""

_PROGRAMS = frozenset(("cli", "demo", "launcher", "testing"))
"""The modules of this package that call the library as programs of the user do."""

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed libraries."""

_STANDARD = os.path.dirname(os.__file__) + os.sep
"""The folder of the standard library."""

_PUBLIC = ["shardtensor"] + [
    f"shardtensor.{name}" for name in ("distributed", "linalg", "fft", "random", "optim", "lib", "tree", "einops")
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


@functools.lru_cache(1024)  # Tracing asks for each frame of the stack at each call of an operator.
def is_in_package(name: str) -> bool:
    """Whether a module of this name belongs to this package, and not to the user."""
    package, _, rest = name.partition(".")
    return package in _PACKAGES and rest.partition(".")[0] not in _PROGRAMS


def is_inside(frame: FrameType) -> bool:
    """Whether a frame belongs to this package."""
    return is_in_package(frame.f_globals.get("__name__") or "")


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the innermost call in the program of the user, or None if there is none on this stack, such
    as in a thread of this package.

    That is the innermost frame which is neither in this package nor in an installed library; where all frames are in
    libraries, the innermost one outside of this package.

    Args:
        frame: the innermost frame of a stack.
    """
    return next(_of_user(_stack(frame)), None)


def user_place(frame: FrameType | None = None) -> Place | None:
    """Returns the place of `user_frame`, by default on the stack of the caller."""
    found = user_frame(frame or sys._getframe(1))
    return None if found is None else _place(found, found.f_lineno)


_caller = threading.local()


@contextlib.contextmanager
def calling_from(frame: FrameType | None) -> Iterator[None]:
    """Makes `user_call` return the call on the stack of a frame, such as that of a suspended program for which this
    thread works, while the ``with`` block runs.
    """
    _caller.frame = frame
    try:
        yield
    finally:
        _caller.frame = None


def user_call() -> tuple[Place | None, str]:
    """Returns the place of `user_place`, and the public function of this package that is called there; empty for an
    operator of Python or a method that only this package calls.
    """
    inner, function = getattr(_caller, "frame", None) or sys._getframe(1), ""
    user = user_frame(inner)
    public = {name for module in _PUBLIC for name in getattr(sys.modules.get(module), "__all__", ())}
    for frame in _stack(inner):
        if frame is user:
            break
        if is_inside(frame):  # The outermost one is what the user calls.
            module, _ = os.path.splitext(os.path.basename(frame.f_code.co_filename))
            names = frame.f_code.co_name, module  # shard_map.py has the function that it returns.
            function = next((name for name in names if name in public), function)
    return user_place(inner), function


def place_of(error: BaseException) -> Place | None:
    """Returns the place in the program of the user where an exception was raised, or from where the library that raised
    it was called; None for an exception without such a frame in its traceback.
    """
    entries, traceback = [], error.__traceback__
    while traceback is not None:
        entries.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    lines = dict(entries)  # That of the innermost entry, where the traceback has a frame more than once.
    found = next(_of_user(dict.fromkeys([frame for frame, _ in reversed(entries)])), None)
    return None if found is None else _place(found, lines[found])


def _place(frame: FrameType, line: int) -> Place:
    return Place(frame.f_code.co_filename, line, frame.f_code.co_name)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_user(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Yields the frames outside of this package, of which the innermost come first: those of the user's program, or
    those of libraries if there are no others.
    """
    outside, has_user = [], False
    for frame in frames:
        if is_inside(frame):
            continue
        file = frame.f_code.co_filename
        # Code that a library has generated has no file of its own.
        if _is_in_library(frame.f_globals.get("__file__") or file if file[0] == "<" else file):
            outside.append(frame)
        else:
            has_user = True
            yield frame
    if not has_user:
        yield from outside


@functools.cache
def _is_in_library(file: str) -> bool:
    """Whether a file belongs to an installed library or to Python."""
    return any(part in file for part in _INSTALLED) or file.startswith((_STANDARD, "<frozen "))


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
