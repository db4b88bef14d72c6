"""Interpreters that execute the calls of a function outside of the tape that records it as one step."""

from __future__ import annotations

import abc
import copy
from typing import Any

from shardtensor.core import (
    Function,
    Op,
    Operands,
    Params,
    bind_by,
    bind_into,
)
from shardtensor.interpreters.differentiation.inner import with_functions
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.nested import Nested
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import ShardedTensor


class Outside(Nested):
    """Executes calls by the interpreter around a tape.

    Attributes:
        tape: the tape.
        outer: the method ``apply`` of the interpreter that executes them; None for the outermost one.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.outer = tape.outer

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call. In a program of a map, results of collectives of tensors are tensors, as on a tape."""
        if op.signature.functions:
            params = with_functions(op, params, self._noting)
        result = bind_by(self.outer, op, map_leaves(self.noted, operands), params)
        are_tensors = "spmd" in op.tags and any(type(x) is ShardedTensor for x in leaves(operands))
        return map_leaves(self.tape.adopted, result) if are_tensors else result

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes a write to a tensor that the function has made."""
        with self.outside():
            bind_into(out, op, map_leaves(self.noted, operands), params)

    def _noting(self, function: Function) -> Function:
        """Returns the function of a loop or of a branch that notes its operands, too."""

        def called(*args: Any) -> Any:
            inner = copy.copy(self)
            with inner.inside():
                return map_leaves(inner.noted, function(*args))

        return called

    @abc.abstractmethod
    def noted(self, x: Any) -> Any:
        """Returns what the interpreter around the tape takes for an operand."""
