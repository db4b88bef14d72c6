"""Collection of floating-point errors from several threads, reported once by the calling thread."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from shardtensor.tracebacks import warn_caller


class FloatingPointErrors(AbstractContextManager["FloatingPointErrors"]):
    """A context manager that collects the floating-point errors of the NumPy calls inside it and reports each kind once
    at its end, as `numpy.errstate` specifies, as if there had been one call.

    Calls in other threads are collected where they run in a copy of the caller's context.

    Args:
        names: the name of the function in the messages. Where several functions run, block by block, the names of all
            of them; `step` then tells which of them runs, and errors are reported in the order of the names.

    Raises:
        FloatingPointError: an error occurred for which the mode is ``"raise"``.
        NameError: an error occurred for which the mode is ``"call"`` or ``"log"``, and no callback or log is set.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._errors: list[dict[str, int]] = [{} for _ in names]

    def __enter__(self) -> FloatingPointErrors:
        self._state = np.errstate(all="call", call=self._errors[0].__setitem__)
        self._state.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._state.__exit__(None, None, None)
        if error[0] is not None or not any(self._errors):
            return
        modes: Any = np.geterr()
        for name, errors in zip(self._names, self._errors, strict=True):
            for kind in ("divide", "over", "under", "invalid"):
                text = _TEXTS[kind]
                if text in errors:
                    _report(modes[kind], name, text, errors[text])

    def step(self) -> Step:
        """Returns the context of a thread that runs several of the functions."""
        return Step(self._errors)


class Step(AbstractContextManager["Step"]):
    """A context manager inside `FloatingPointErrors` that attributes errors of the calling thread to one function.

    Attributes:
        at: the position of the function that runs now among the names.
    """

    __slots__ = ("_errors", "_state", "at")

    def __init__(self, errors: list[dict[str, int]]) -> None:
        self._errors = errors
        self.at = 0

    def __enter__(self) -> Step:
        self._state = np.errstate(call=self._note)
        self._state.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._state.__exit__(None, None, None)

    def _note(self, text: str, flag: int) -> None:
        self._errors[self.at][text] = flag


def _report(mode: str, name: str, text: str, flag: int) -> None:
    call: Any = np.geterrcall()
    message = f"{text} encountered in {name}"
    if mode == "warn":
        warn_caller(message)
    elif mode == "raise":
        raise FloatingPointError(message)
    elif mode == "print":
        print(f"Warning: {message}", file=sys.stderr)
    elif mode == "call":
        if call is None:
            raise NameError(f"python callback specified for {text} (in  {name}) but no function found.")
        call(text, flag)
    elif mode == "log":
        if call is None:
            raise NameError(f"log specified for {text} (in {name}) but no object with write method found.")
        call.write(f"Warning: {message}\n")


_TEXTS = {"divide": "divide by zero", "over": "overflow", "under": "underflow", "invalid": "invalid value"}
