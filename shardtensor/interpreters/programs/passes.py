"""The passes: rewrites that every program goes through before it runs, on every memory.

A pass takes a program and returns one with the same results: the values of its inputs, of what it captures, of its
outputs and of its writes stay, and values that it adds have numbers from `Program.next_number` on. It is added to the
list by its name::

    PASSES.append(("double negatives", without_double_negatives))
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from shardtensor.interpreters.programs.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """How the program will run.

    Attributes:
        moves: whether transfers move elements. They do not where all devices share one memory.
        exact: whether results keep the bits of eager mode.
    """

    moves: bool
    exact: bool = True


Pass = Callable[[Program, Setting], Program]

PASSES: list[tuple[str, Pass]] = []
"""The passes in their order, each with its name."""


def rewritten(program: Program, setting: Setting) -> Program:
    """Returns a program after all passes. An error in one of them has a note that names it."""
    for name, rewrite in PASSES:
        try:
            program = rewrite(program, setting)
        except Exception as error:
            error.add_note(f"in the rewrite of programs {name!r}")
            raise
    return program


def saving_transfers(rewrite: Pass) -> Pass:
    """Returns a pass that does nothing where no transfer moves elements: there, it only changes the order of sums."""

    @functools.wraps(rewrite)
    def where_elements_move(program: Program, setting: Setting) -> Program:
        return rewrite(program, setting) if setting.moves else program

    return where_elements_move


def is_on_one_memory(program: Program) -> bool:
    """Whether all tensors of a program are in one memory, that of the host or of a GPU, which all devices share."""
    avals = program.avals()
    memories = {kind.memory for kind in avals}
    return len(memories) < 2 and None not in memories and not any(kind.backend.simulated for kind in avals)
