"""Tracebacks and warnings that name the lines of the user's program, without the frames of this package.

Exceptions are not changed, so that debuggers have all frames: frames are left out where a traceback is printed.
`install` sets the hooks of Python and of IPython, unless the program has set its own. The environment variable
``SHARDTENSOR_TRACEBACK=full`` shows all frames.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from shardtensor.places import is_in_package, is_inside, user_frame

if TYPE_CHECKING:
    from traceback import TracebackException

_CALLED = sys.stdlib_module_names | {"cupy", "greenlet", "mpi4py", "numpy", "optree", "threadpoolctl", "torch"}
"""The packages whose frames are hidden where the library calls them."""

_HIDING = "__tracebackhide__"
"""The variable, of a frame or of its module, from which pytest and IPython's debugger know that a frame is hidden."""


def shows_all() -> bool:
    """Returns whether the user has asked for whole tracebacks."""
    return os.environ.get("SHARDTENSOR_TRACEBACK") == "full"


# -- exceptions ------------------------------------------------------------------------------------


def text_of(error: BaseException, traceback: TracebackType | None) -> str:
    """Returns what Python prints of an exception, without the frames of this package; a line says how many.

    Args:
        error: the exception, which is printed with those that led to it.
        traceback: its traceback.
    """
    return _text(*_short_report(error, traceback))


def _text(report: TracebackException, hidden: int) -> str:
    """Returns the text of a report, with the number of hidden frames before the message: that stays the last line."""
    lines = list(report.format())
    if hidden:
        after = 0 if report.exceptions else len(list(report.format_exception_only()))  # Groups have boxes below.
        lines.insert(len(lines) - after, f"  {_note(hidden)}\n")
    return "".join(lines)


def _short_report(error: BaseException, traceback: TracebackType | None) -> tuple[TracebackException, int]:
    """Returns the report of an exception without the frames of this package, and the number of these."""
    from traceback import TracebackException  # Imported late: programs without errors do without it.

    main = TracebackException(type(error), error, traceback, compact=True)
    count, pending = 0, [] if shows_all() else [(main, error, traceback)]
    while pending:
        report, error, traceback = pending.pop()
        hidden = [hides for _, hides in _entries(traceback)]
        if len(hidden) == len(report.stack) and not all(hidden):  # `sys.tracebacklimit` may have made it shorter.
            report.stack[:] = [line for line, hides in zip(report.stack, hidden, strict=True) if not hides]
            count += sum(hidden)
        group = zip(report.exceptions or (), getattr(error, "exceptions", ()), strict=False)
        others = [(report.__cause__, error.__cause__), (report.__context__, error.__context__), *group]
        pending += [(r, e, e.__traceback__) for r, e in others if r is not None and e is not None]
    return main, count


def _note(hidden: int) -> str:
    frames, them = ("frame of shardtensor is", "it") if hidden == 1 else ("frames of shardtensor are", "them")
    return f"[{hidden} {frames} hidden; set SHARDTENSOR_TRACEBACK=full to see {them}]"


def _entries(traceback: TracebackType | None) -> Iterator[tuple[TracebackType, bool]]:
    """Yields the entries of a traceback, and whether they are hidden: frames of this package, and of what it calls."""
    hides = False
    while traceback is not None:
        frame = traceback.tb_frame
        hides = is_inside(frame) or (hides and (frame.f_globals.get("__name__") or "").partition(".")[0] in _CALLED)
        yield traceback, hides
        traceback = traceback.tb_next


def _print_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Prints an exception that ends the program: Python's hook does, unless frames are hidden."""
    if (text := _short_text(error, traceback)) is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        sys.stderr.write(text)


def _print_thread_exception(args: Any) -> None:
    """Prints an exception that ends a thread, as `_print_exception` does."""
    if (text := _short_text(args.exc_value, args.exc_traceback)) is None:
        threading.__excepthook__(args)
    else:
        thread = args.thread.name if args.thread is not None else threading.get_ident()
        sys.stderr.write(f"Exception in thread {thread}:\n{text}")


def _short_text(error: BaseException | None, traceback: TracebackType | None) -> str | None:
    """Returns the text of an exception without hidden frames; None where Python prints it: if no frames are hidden, or
    if there is no exception or no place to print it.
    """
    if sys.stderr is None or error is None:
        return None
    try:
        report, hidden = _short_report(error, traceback)
        return _text(report, hidden) if hidden else None
    except Exception:  # Raised by methods of the exception. It is printed as if this package were not there.
        return None


# -- warnings --------------------------------------------------------------------------------------


def warn_caller(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Gives a warning at the line of the user's program that called the package."""
    _warn_at(user_frame(sys._getframe()), message, category)


def _warn_at(frame: FrameType | None, message: Warning | str, category: type[Warning], source: object = None) -> None:
    """Gives a warning at the line of a frame, as `warnings.warn` does at that of its caller."""
    # A thread that runs a function of the package has no other frame: Python names the module sys then, too.
    place = (frame.f_code.co_filename, frame.f_lineno) if frame else ("sys", 1)
    scope = frame.f_globals if frame else vars(sys)
    registry = scope.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, *place, scope.get("__name__") or "<string>", registry, source=source)


def _show_warning(show: Callable[[Any], None], message: warnings.WarningMessage) -> None:
    """Shows a warning. One that a call from this package gives, such as those of NumPy, is given again at the line of
    the user's program, where the filters are applied again.
    """
    frames = []
    frame, user = sys._getframe(1), user_frame(sys._getframe(1))
    while user is not None and frame is not user and frame.f_back is not None:
        frames.append(frame)
        frame = frame.f_back
    origin = next((frame for frame in frames if frame.f_code.co_filename == message.filename), None)
    if origin is None or not any(map(is_inside, frames)):
        show(message)
        return
    # Python has noted the line of the package: it would not show the next warning there, from another line of the user.
    seen = origin.f_globals.get("__warningregistry__") or {}
    seen.pop((str(message.message), message.category, message.lineno), None)
    _warn_at(user, message.message, message.category, message.source)


# -- hooks -----------------------------------------------------------------------------------------


def install() -> None:
    """Sets the hooks that print exceptions and warnings, once."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_exception
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_thread_exception
    # Python calls it before `warnings.showwarning`, which programs and `warnings.catch_warnings` replace, and which
    # does not get the source of a ResourceWarning.
    show = vars(warnings).get("_showwarnmsg")
    if show is not None and getattr(show, "func", None) is not _show_warning:
        vars(warnings)["_showwarnmsg"] = functools.partial(_show_warning, show)
    if "_pytest" in sys.modules:
        for name, module in list(sys.modules.items()):
            if is_in_package(name):
                hide_from_pytest(module)
    if (ipython := sys.modules.get("IPython")) and (shell := ipython.get_ipython()):
        tracebacks = shell.InteractiveTB
        if getattr(tracebacks.structured_traceback, "func", None) is not _structured:
            tracebacks.structured_traceback = functools.partial(_structured, tracebacks.structured_traceback)


def _structured(
    structure: Callable[..., list[str]], kind: Any, error: Any, traceback: Any = None, *args: Any, **kwargs: Any
) -> list[str]:
    """Returns the lines of an exception in IPython. ``%tb``, which shows it again, shows all frames; the debugger of
    ``%debug`` steps over those that are hidden.
    """
    is_first = sys.exc_info()[1] is not None
    if isinstance(error, BaseException):
        _mark_frames(error, is_first and not shows_all())
    entries = list(_entries(traceback))
    kept = [entry for entry, hides in entries if not hides]
    if shows_all() or not is_first or not kept or len(kept) == len(entries):
        return structure(kind, error, traceback, *args, **kwargs)
    short = None
    for entry in reversed(kept):
        short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return [*structure(kind, error, short, *args, **kwargs), _note(len(entries) - len(kept))]


def hide_from_pytest(module: ModuleType) -> None:
    """Makes pytest hide the frames of a module of this package."""
    if "_pytest" in sys.modules:
        vars(module)[_HIDING] = _is_hidden


def _is_hidden(info: Any) -> bool:
    """Returns whether pytest hides a frame. Pytest calls it with the exception, whose frames of modules that were
    imported later are marked now; its debugger begins at the innermost frame without the mark.
    """
    if info is not None:
        _mark_frames(info.value, not shows_all())
    return not shows_all()


GENERATED = {"__name__": __name__, _HIDING: _is_hidden}
"""The global variables by which the frames of functions that this package generates are hidden."""


def _mark_frames(error: BaseException, hidden: bool) -> None:
    """Marks the frames of this package as hidden or not, for the debuggers of IPython and pytest: those of an exception
    and of those that led to it.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        e = pending.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        for entry, hides in _entries(e.__traceback__):
            if hides:
                entry.tb_frame.f_locals[_HIDING] = hidden
        pending += [e.__cause__, e.__context__, *getattr(e, "exceptions", ())]
