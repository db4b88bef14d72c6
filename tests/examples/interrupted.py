"""docs/examples/gpt.py, on a short text, killed after one of its steps.

Arguments: the step after which the processes of the job are killed, or 0, and the arguments of the program.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import shardtensor as st
from tests.examples.programs import GPT
from tests.scripts import ROOT


def text() -> np.ndarray:
    """A text that is read faster than the docstrings."""
    return np.frombuffer((ROOT / "LICENSE").read_bytes(), "uint8")


def run(killed_at: int, *arguments: str) -> None:
    """Runs the program."""
    prepare = GPT.Trainer.__init__

    def with_kill(trainer: Any, *values: Any) -> None:
        prepare(trainer, *values)
        step: Callable[..., Any] = trainer.step

        def counted(params: Any, state: Any, rows: Any) -> Any:
            result = step(params, state, rows)
            nonlocal calls
            calls += 1
            if calls == killed_at:
                st.checkpoint.wait()  # The checkpoints before this step are complete.
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        trainer.step = counted

    calls = 0
    GPT.docstrings, GPT.Trainer.__init__ = text, with_kill
    GPT.main(arguments)


if __name__ == "__main__":
    run(int(sys.argv[1]), *sys.argv[2:])
