"""Functions that run in the child process after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_children(function: Callable[[], None]) -> Callable[[], None]:
    """Has a function called in the child of every fork: of the parent's threads none is there but the one that forked,
    and what the others held, such as locks, nobody will ever release.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function
