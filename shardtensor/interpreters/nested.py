"""What interpreters of functions share that pass calls on: the interpreter around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from shardtensor.core import Interpreter, innermost, interpreted_by, interpreting, outermost


class Nested(Interpreter):
    """An interpreter that executes its calls by the one around it.

    Attributes:
        outer: the method ``apply`` of the interpreter around it; None for the outermost one.
    """

    def __init__(self) -> None:
        self.outer = _apply_here()

    @property
    def only_infers(self) -> bool:  # type: ignore[override]
        """See `Interpreter`."""
        return bool(innermost_of(self.outer).only_infers)

    def outside(self) -> contextlib.AbstractContextManager[None]:
        """Makes the interpreter around this one the innermost one in the context."""
        return interpreted_by(self.outer)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Makes this the innermost interpreter in the context, around which is the one that was, such as that which
        executes or traces the function of a loop or of a branch.
        """
        before, self.outer = self.outer, _apply_here()
        try:
            with interpreting(self):
                yield
        finally:
            self.outer = before


def _apply_here() -> Callable[..., Any] | None:
    """Returns the method ``apply`` of the innermost interpreter; None for the outermost one."""
    found = innermost()
    return None if found is None else found.apply


def innermost_of(apply: Callable[..., Any] | None) -> Any:
    """Returns the interpreter that has the method ``apply``; for None the outermost one."""
    return outermost() if apply is None else apply.__self__  # type: ignore[attr-defined]
