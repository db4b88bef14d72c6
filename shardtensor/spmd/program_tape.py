"""The tape of one program of a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.core import OPS, Op, Operands, Params, bind_by
from shardtensor.functions.derivatives.forms import Derivative
from shardtensor.host import fork
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.differentiation.taped_values import Taped
from shardtensor.spmd.scheduling.mapped_program import current
from shardtensor.tensor.ownership import Lent
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor

_capturing = fork.lock()
"""Programs that run in several threads note in the tape around them what they close over."""


class ProgramTape(Tape):
    """The tape of one program of a map.

    Attributes:
        recorder: the tape that records the map.
        inputs: the numbers of the arguments that depend on differentiated ones, and their avals.
        outs: likewise of the leaves of the result; None for those that do not.
        known: of arguments without a gradient, the axes along which those of the programs may differ, by identity.
        constant_types: for the numbers of steps, which operands are such arguments, with these axes.
        closed_numbers: the numbers of the values that any program closes over; None for one that this one does not.
    """

    writes_outside = (
        "map: the function writes a differentiated tensor that it closes over, once for each program; return the new "
        "value"
    )

    def __init__(self, recorder: Tape) -> None:
        super().__init__()
        self.gathers_again = False  # Saved arrays are results of the map.
        self.recorder = recorder
        self._captured: dict[Taped, tuple[Taped, Taped]] = {}
        self.inputs: list[tuple[int, Any]] = []
        self.outs: list[tuple[int, Any] | None] = []
        self.known: dict[int, tuple[Any, frozenset[str]]] = {}
        self.constant_types: dict[int, dict[int, frozenset[str]]] = {}
        self.closed_numbers: list[int | None] = []
        program = current()
        assert program is not None
        self._lent: Sequence[Lent] = program.lent

    def from_outside(self, state: Taped) -> Taped | None:
        """See `Tape`. A value that depends on a differentiated argument, and that the function closes over, becomes one
        of this tape.
        """
        if state in self._captured:
            return self._captured[state][1]
        recorder = self.recorder
        if recorder.ended:
            return None
        with _capturing:
            source = state if state.tape is recorder else recorder.from_outside(state)
        if source is None:
            return None
        source.save()
        variable: Taped = self.variable(source.primal)._storage
        variable.save()
        self._captured[state] = source, variable
        return variable

    def adopted(self, x: Any) -> Any:
        """See `Tape`. A tensor of an argument shares the storage of that."""
        here = self.in_program
        if here is not None and type(x) is not ShardedTensor:
            for one in self._lent:
                if one.exported is x and here.backend.is_whole(x, one.array):
                    value = here.aval_of(x)
                    assert value is not None
                    return tensor(value, one.storage_of(one.array))
        return super().adopted(x)

    def is_lent(self, x: Any) -> bool:
        """See `Tape`."""
        storage = x._storage
        return type(storage) is Storage and any(one.array is storage.buffers[0] for one in self._lent)

    def recorded(
        self, op: Op, operands: Operands, params: Params, derivative: Derivative, *, depends: bool = False
    ) -> Any:
        """See `Tape`."""
        before = len(self.steps)
        result = super().recorded(op, operands, params, derivative, depends=depends)
        if self.known and len(self.steps) > before:
            inputs = leaves(operands) if op.signature.variadic or op.signature.trees else operands
            if types := {k: self.known[id(x)][1] for k, x in enumerate(inputs) if id(x) in self.known}:
                self.constant_types[len(self.steps) - 1] = types
        return result

    def closed(self) -> dict[Taped, int]:
        """Returns the values of the recorder that the function closes over, with their numbers on this tape."""
        return {state: variable.number for state, variable in self._captured.values()}

    def returned(self, x: Any) -> Any:
        """Returns a leaf of the result of the program without the tape; a view as a tensor of its own."""
        x = self.constant(x)
        is_view = type(x) is ShardedTensor and hasattr(x._storage, "view_spec")
        return bind_by(self.outer, OPS["copy"], (x,), ()) if is_view else x

    def close(self) -> None:
        """Drops what keeps values that no derivative needs."""
        self.known.clear()
        self._lent = ()

    def take_saved(self) -> list[Any]:
        """Returns the arrays that the derivatives have saved, each once, and leaves their numbers in their places."""
        kept: list[Any] = []
        numbers: dict[int, Saved] = {}

        def taken(x: Any) -> Any:
            x = self.adopted(x)
            if type(x) is not ShardedTensor:
                return x
            if id(x) not in numbers:
                numbers[id(x)] = Saved(len(kept))
                kept.append(x)
            return numbers[id(x)]

        for step in self.steps:
            for name in step.saved:
                step.saved[name] = map_leaves(taken, step.saved[name])
        return kept


class Saved:
    """The number of an array that a derivative has saved, in place of it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number
