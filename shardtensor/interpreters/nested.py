"""The base of interpreters that pass calls on to the interpreter around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from shardtensor.backend.device import Device
from shardtensor.core import Interpreter, innermost, interpreted_by, interpreting, outermost
from shardtensor.interpreters.program_arrays import program_of


class Nested(Interpreter):
    """An interpreter that executes its calls by the one around it.

    Attributes:
        outer: the method ``apply`` of the interpreter around it; None for the outermost one.
        device: in a program of a map, its device (see `shardtensor.backend.protocol.current_device`).
        in_program: in a program of a map, the interpreter of its device, whose arrays are not tensors.
    """

    def __init__(self) -> None:
        interpreter = innermost()
        self.outer: Callable[..., Any] | None = None if interpreter is None else interpreter.apply
        self.device: Device | None = getattr(interpreter, "device", None)
        self.in_program = program_of(interpreter)

    @property
    def only_infers(self) -> bool:  # type: ignore[override]
        """See `Interpreter`."""
        return bool(innermost_of(self.outer).only_infers)

    def line_of_call(self) -> str:
        """See `Interpreter`."""
        return str(innermost_of(self.outer).line_of_call())

    def outside(self) -> contextlib.AbstractContextManager[None]:
        """Makes the interpreter around this one the innermost one in the context."""
        return interpreted_by(self.outer)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Makes this the innermost interpreter in the context, around which is the one that was, such as that which
        executes or traces the function of a loop or of a branch.
        """
        before, interpreter = self.outer, innermost()
        self.outer = None if interpreter is None else interpreter.apply
        try:
            with interpreting(self):
                yield
        finally:
            self.outer = before


def innermost_of(apply: Callable[..., Any] | None) -> Any:
    """Returns the interpreter that has the method ``apply``; for None the outermost one."""
    return outermost() if apply is None else apply.__self__  # type: ignore[attr-defined]
