"""A line for a program that does not call `initialize`, so that each of several processes runs all of it."""

from __future__ import annotations

import atexit
import functools
import os
import sys

from shardtensor.communication.between_processes.processes import JOB

PARENT = "SHARDTENSOR_LAUNCH_PARENT"
"""The variable in which `shardtensor launch` gives process 0 of a job the number of its parent. The processes that this
one starts inherit the variable, and have another parent.
"""


@functools.cache
def remind() -> None:
    """Registers the line, which process 0 prints at its end, if it was started by ``shardtensor launch``."""
    if os.environ.get(PARENT) == str(os.getppid()):
        atexit.register(_print, os.getpid())


def _print(process: int) -> None:
    if not JOB.was_requested and process == os.getpid():
        print(
            "shardtensor: this program did not call st.distributed.initialize(), so that each process of the job ran "
            "all of it; call it first",
            file=sys.stderr,
        )
