"""Collection of floating-point errors from several threads, reported once by the calling thread."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager
from typing import Any

import numpy as np


class FloatingPointErrors(AbstractContextManager["FloatingPointErrors"]):
    """A context manager that collects the floating-point errors of the NumPy calls inside it and reports each kind once
    at its end, as `numpy.errstate` specifies, as if there had been one call.

    Calls in other threads are collected where they run in a copy of the caller's context.

    Args:
        name: the name of the function in the messages.

    Raises:
        FloatingPointError: an error occurred for which the mode is ``"raise"``.
        NameError: an error occurred for which the mode is ``"call"`` or ``"log"``, and no callback or log is set.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._errors: dict[str, int] = {}

    def __enter__(self) -> FloatingPointErrors:
        self._modes: Any = np.geterr()
        self._call: Any = np.geterrcall()
        kinds: Any = {kind: "ignore" if mode == "ignore" else "call" for kind, mode in self._modes.items()}
        self._state = np.errstate(**kinds, call=self._errors.__setitem__)
        self._state.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._state.__exit__(None, None, None)
        if error[0] is not None:
            return
        for kind in ("divide", "over", "under", "invalid"):
            text = _TEXTS[kind]
            if text in self._errors:
                self._report(self._modes[kind], text, self._errors[text])

    def _report(self, mode: str, text: str, flag: int) -> None:
        message = f"{text} encountered in {self._name}"
        if mode == "warn":
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        elif mode == "raise":
            raise FloatingPointError(message)
        elif mode == "print":
            print(f"Warning: {message}", file=sys.stderr)
        elif mode == "call":
            if self._call is None:
                raise NameError(f"python callback specified for {text} (in  {self._name}) but no function found.")
            self._call(text, flag)
        elif mode == "log":
            if self._call is None:
                raise NameError(f"log specified for {text} (in {self._name}) but no object with write method found.")
            self._call.write(f"Warning: {message}\n")


_TEXTS = {"divide": "divide by zero", "over": "overflow", "under": "underflow", "invalid": "invalid value"}
