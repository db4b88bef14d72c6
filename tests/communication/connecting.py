"""The start of programs in several processes, by the environment: on the simulated CuPy, or by another engine."""

from __future__ import annotations

import os

from shardtensor import distributed
from tests import fakecupy


def connect() -> None:
    """Connects the processes, after the simulated CuPy is installed if the test wants it."""
    if gpus := os.environ.get("CUPY_DOUBLE"):
        fakecupy.install(devices=int(gpus))
    distributed.initialize(engine=os.environ.get("SPANNING_ENGINE"), timeout=20)
