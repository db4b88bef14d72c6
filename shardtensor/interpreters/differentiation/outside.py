"""Interpreters that execute the calls of a function outside of the tape that records it as one step."""

from __future__ import annotations

import abc
from typing import Any

from shardtensor.core import Interpreter, Op, Operands, Params, bind_by, bind_into
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import ShardedTensor


class Outside(Interpreter):
    """Executes calls by the interpreter around a tape.

    Attributes:
        tape: the tape.
        in_program, device: those of the tape.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.in_program = tape.in_program
        self.device = tape.device

    @property
    def only_infers(self) -> bool:  # type: ignore[override]
        """See `Interpreter`."""
        return self.tape.only_infers

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call. In a program of a map, results of collectives of tensors are tensors, as on a tape."""
        result = bind_by(self.tape.outer, op, map_leaves(self.noted, operands), params)
        are_tensors = op.spmd and any(type(x) is ShardedTensor for x in leaves(operands))
        return map_leaves(self.tape.adopted, result) if are_tensors else result

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes a write to a tensor that the function has made."""
        with self.tape.outside():
            bind_into(out, op, map_leaves(self.noted, operands), params)

    @abc.abstractmethod
    def noted(self, x: Any) -> Any:
        """Returns what the interpreter around the tape takes for an operand."""
