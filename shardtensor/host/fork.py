"""Registration of functions that reset a module's state in the child process after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_children(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a function to be called in the child process after every fork, and returns the function.

    Only the thread that called fork exists in the child: locks that other threads of the parent held are never
    released there.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function
