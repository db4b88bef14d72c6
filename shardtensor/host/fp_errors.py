"""Floating-point errors of several threads, reported once by the calling thread."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager
from typing import Any

import numpy as np


class Complaints(AbstractContextManager["Complaints"]):
    """Collects the floating-point errors of the calls inside of the ``with``, in whatever thread, and does once at its
    end what `numpy.errstate` says of each: as if there had been one call.

    Args:
        name: the function that NumPy would name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._heard: dict[str, int] = {}

    def __enter__(self) -> Complaints:
        self._modes: Any = np.geterr()
        self._call: Any = np.geterrcall()
        kinds: Any = {kind: "ignore" if mode == "ignore" else "call" for kind, mode in self._modes.items()}
        self._state = np.errstate(**kinds, call=self._heard.__setitem__)
        self._state.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._state.__exit__(None, None, None)
        if error[0] is not None:
            return
        for kind in ("divide", "over", "under", "invalid"):
            text = _TEXTS[kind]
            if text in self._heard:
                self._say(self._modes[kind], text, self._heard[text])

    def _say(self, mode: str, text: str, flag: int) -> None:
        said = f"{text} encountered in {self._name}"
        if mode == "warn":
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        elif mode == "raise":
            raise FloatingPointError(said)
        elif mode == "print":
            print(f"Warning: {said}", file=sys.stderr)
        elif mode == "call":
            if self._call is None:
                raise NameError(f"python callback specified for {text} (in  {self._name}) but no function found.")
            self._call(text, flag)
        elif mode == "log":
            if self._call is None:
                raise NameError(f"log specified for {text} (in {self._name}) but no object with write method found.")
            self._call.write(f"Warning: {said}\n")


_TEXTS = {"divide": "divide by zero", "over": "overflow", "under": "underflow", "invalid": "invalid value"}
