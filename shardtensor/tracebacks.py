"""Tracebacks and warnings that name the lines of the user's program, without the frames of this package.

An exception keeps its whole traceback, so that debuggers can go to every frame: frames are hidden where a traceback is
printed. `install` sets the hooks of Python and of IPython, and marks the modules of the package for pytest. The
environment variable ``SHARDTENSOR_TRACEBACK=full`` shows all frames.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType, TracebackType
from typing import Any

from shardtensor.places import is_in_package, is_inside, user_frame

_CALLED = sys.stdlib_module_names | {"cupy", "greenlet", "mpi4py", "numpy", "optree", "threadpoolctl", "torch"}
"""The packages whose frames are hidden where the library calls them."""


def _is_called(frame: FrameType) -> bool:
    return (frame.f_globals.get("__name__") or "").partition(".")[0] in _CALLED


def shows_all() -> bool:
    """Returns whether the user has asked for whole tracebacks."""
    return os.environ.get("SHARDTENSOR_TRACEBACK") == "full"


@contextlib.contextmanager
def shortened(error: BaseException | None) -> Iterator[None]:
    """Hides the frames of this package in the tracebacks of an exception and of those that led to it.

    A note says how many are hidden. After the ``with`` block the tracebacks are whole again. (Programs may call the
    hooks of Python without an exception, and so does Python when the memory is full.)
    """
    whole = [] if shows_all() else [(e, e.__traceback__) for e in _printed(error)]
    hidden = 0
    for e, traceback in whole:
        e.__traceback__, count = _without_hidden(traceback)
        hidden += count
    if error is not None and hidden:
        frames, them = ("frame of shardtensor is", "it") if hidden == 1 else ("frames of shardtensor are", "them")
        error.add_note(f"({hidden} {frames} hidden; set SHARDTENSOR_TRACEBACK=full to see {them})")
    try:
        yield
    finally:
        for e, traceback in whole:
            e.__traceback__ = traceback
        if error is not None and hidden:
            error.__notes__.pop()


def _printed(error: BaseException | None) -> list[BaseException]:
    """Returns the exceptions that Python prints with one: itself, what led to it, and the members of groups."""
    found: dict[int, BaseException] = {}
    pending = [error]
    while pending:
        e = pending.pop()
        if e is not None and id(e) not in found:
            found[id(e)] = e
            pending.append(e.__cause__ if e.__suppress_context__ else e.__context__)
            pending += e.exceptions if isinstance(e, BaseExceptionGroup) else ()
    return list(found.values())


def _without_hidden(traceback: TracebackType | None) -> tuple[TracebackType | None, int]:
    """Returns a traceback without the frames of this package and of what it calls, and the number of these frames.

    A traceback that has no other frames stays whole.
    """
    kept, count, hides = [], 0, False
    entry = traceback
    while entry is not None:
        hides = is_inside(entry.tb_frame) or (hides and _is_called(entry.tb_frame))
        if hides:
            count += 1
        else:
            kept.append(entry)
        entry = entry.tb_next
    if not kept or not count:
        return traceback, 0
    for one in reversed(kept):
        entry = TracebackType(entry, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return entry, count


def warn_caller(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Gives a warning at the line of the user's program that called the package."""
    _warn_at(user_frame(sys._getframe()), message, category)


def _warn_at(frame: FrameType | None, message: Warning | str, category: type[Warning], source: object = None) -> None:
    """Gives a warning at the line of a frame, as `warnings.warn` does at that of its caller."""
    # A thread that runs a function of the package has no other frame: Python names the module sys then, too.
    place = (frame.f_code.co_filename, frame.f_lineno) if frame else ("sys", 1)
    scope = frame.f_globals if frame else vars(sys)
    registry = scope.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, *place, scope.get("__name__"), registry, source=source)


def install() -> None:
    """Sets the hooks that print exceptions and warnings; those that a program has set before are called by them."""
    sys.excepthook = functools.partial(_print_exception, sys.excepthook)
    threading.excepthook = functools.partial(_print_thread_exception, threading.excepthook)
    # Python calls it before `warnings.showwarning`, which programs and `warnings.catch_warnings` replace, and which
    # does not get the source of a ResourceWarning.
    vars(warnings)["_showwarnmsg"] = functools.partial(_show_warning, vars(warnings)["_showwarnmsg"])
    if "_pytest" in sys.modules:
        _hide_from_pytest()
    if (ipython := sys.modules.get("IPython")) and (shell := ipython.get_ipython()):
        shell.showtraceback = functools.partial(_show_in_ipython, shell.showtraceback)


def _print_exception(
    print_it: Any, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    with shortened(error):
        print_it(kind, error, traceback if error is None else error.__traceback__)


def _print_thread_exception(print_it: Any, args: Any) -> None:
    error = args.exc_value
    with shortened(error):
        traceback = args.exc_traceback if error is None else error.__traceback__
        print_it(threading.ExceptHookArgs((args.exc_type, error, traceback, args.thread)))


def _show_in_ipython(show: Any, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
    """Shows an exception in IPython, where ``%debug`` then has all frames."""
    error = (exc_tuple or sys.exc_info())[1]
    if error is None:  # The last one, which ``%tb`` shows with all frames.
        show(exc_tuple, *args, **kwargs)
    else:
        with shortened(error):
            show((type(error), error, error.__traceback__), *args, **kwargs)
        sys.last_traceback = error.__traceback__


def _show_warning(show: Any, message: warnings.WarningMessage) -> None:
    """Shows a warning that NumPy gave in a call from this package, at the line of the user's program instead.

    Python has looked for the line of the package among those that have warned already: the next warning of that module
    must be shown, too, if it comes from another line of the user. The filters are applied again, to the user's line.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in ("warnings", "_py_warnings", __name__):
        frame = frame.f_back
    user = user_frame(frame)
    if frame is None or user is None or not is_inside(frame) or frame.f_code.co_filename != message.filename:
        show(message)
    else:
        frame.f_globals["__warningregistry__"] = None
        _warn_at(user, message.message, message.category, message.source)


class _Hidden:
    """A finder of the package's modules that marks them for pytest before they are executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not is_in_package(name):
            return None
        others = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next(filter(None, others), None)
        if spec and spec.loader:
            spec.loader.exec_module = functools.partial(_execute_hidden, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute_hidden(execute: Any, module: ModuleType) -> None:
    vars(module)[HIDING] = is_hidden
    execute(module)


HIDING = "__tracebackhide__"
"""The global variable with which a module tells pytest whether to hide its frames."""


def is_hidden(info: object) -> bool:
    """Returns whether pytest hides the frames of the package; it calls this with the exception."""
    return not shows_all()


def _hide_from_pytest() -> None:
    for name, module in list(sys.modules.items()):
        if is_in_package(name):
            vars(module)[HIDING] = is_hidden
    sys.meta_path.insert(0, _Hidden())
