"""Traced values, and what the tracers of a function share: its arguments, what it closes over, and errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from shardtensor.core import Op, Operands
from shardtensor.errors import ConcretizationError
from shardtensor.interpreters.programs.program import ValueKind, Var
from shardtensor.places import user_place
from shardtensor.tensor.storage import NoElements
from shardtensor.tensor.tensor import ShardedTensor


class Traced(NoElements):
    """The storage of a traced value.

    Attributes:
        value: the value of the program.
        tracer: the `Tracer` that recorded it.
        stand_in: what inference takes for it: a tensor without elements; for a host array, an array of that shape and
            dtype; for a Python scalar, a number of that type.
    """

    __slots__ = ("stand_in", "tracer", "value")

    def __init__(self, value: Var, tracer: Any, stand_in: Any) -> None:
        self.value = value
        self.tracer = tracer
        self.stand_in = stand_in

    def stored(self) -> NoReturn:
        """Raises ConcretizationError: the elements are not known while the function is traced, or the tensor has left
        the function.
        """
        self.is_lacking()
        raise self.tracer.trace.needs_elements("reading a shard", [self.value])

    def is_lacking(self) -> bool:
        """Returns True.

        Raises:
            ConcretizationError: the tensor has left the function.
        """
        if self.tracer.trace.ended:
            raise ConcretizationError(self.tracer.trace.left())
        return True


@dataclasses.dataclass(slots=True, eq=False)
class Captured:
    """A tensor that the function closes over.

    Attributes:
        source: the tensor, which is never a view.
        value: its value at the beginning of a call.
        now: its value at this point of the trace.
    """

    source: ShardedTensor
    value: Var
    now: Traced


class Trace:
    """The state that the tracers of a function and of the maps in it share.

    Attributes:
        name: the name of the function.
        where: its file and line.
        arguments: the access paths of the inputs.
        captured: the tensors that it closes over, by identity.
        roots: the traced inputs for tensors that the function closes over as well, by identity of the tensor.
        copied: for traced inputs that are views with strides, by identity, the tags of operators that may copy them
            (see `shardtensor.interpreters.jit.arguments.copied_by`): traced code takes the inputs for new arrays.
        copies_argument: whether one of these operators is called.
        copies: the values that they return, which may be views of the arguments in eager mode.
        ended: whether the function has returned.
        count: the number of values so far.
        errors: how floating-point errors are handled where the function is called.
    """

    def __init__(self, name: str, where: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.where = where
        self.arguments = arguments
        self.captured: dict[int, Captured] = {}
        self.roots: dict[int, ShardedTensor] = {}
        self.copied: dict[int, Sequence[str]] = {}
        self.copies_argument = False
        self.copies: set[Var] = set()
        self.ended = False
        self.count = 0
        self.errors = dict(np.geterr())
        self._depends: dict[int, int] = {}

    def new(self, kind: ValueKind, depends: int) -> Var:
        """Returns a new value, which depends on the inputs that the bits of ``depends`` give."""
        value = Var(self.count, kind)
        self.count += 1
        self._depends[value.number] = depends
        return value

    def depends(self, values: Sequence[Var]) -> int:
        """Returns the inputs that values depend on, as bits."""
        bits = 0
        for v in values:
            bits |= self._depends[v.number]
        return bits

    def names(self, values: Sequence[Var]) -> str:
        """Returns the arguments that values depend on."""
        bits = self.depends(values)
        return ", ".join([name for k, name in enumerate(self.arguments) if bits >> k & 1])

    def note_copy(self, op: Op, operands: Operands, result: Any) -> None:
        """Records the result of an operator that is called with an input that it may copy, or with a view of one."""
        if not self.copied or not operands or type(x := operands[0]) is not ShardedTensor:
            return
        if not op.tags.isdisjoint(self.copied.get(id(x._base_and_view()[0]), ())):
            self.copies_argument = True
            if is_traced(result):
                self.copies.add(result._storage.value)

    def needs_elements(self, caller: str, values: Sequence[Var]) -> ConcretizationError:
        """Returns the error for a call that needs the elements of values."""
        names = self.names(values)
        on = (
            f"depend on {names}"
            if names
            else "are those of a tensor that the function closes over, or the number of a trip"
        )
        where = f"needs the elements of a tensor, and jit traces {self.name} without elements ({user_line()})"
        message_for = functools.partial(_needs_elements, f"{where}. They {on}")
        error = ConcretizationError(message_for(caller))
        error.message_for = message_for
        return error

    def left(self) -> str:
        """Returns the message for a traced value that is used after the function has returned."""
        return (
            f"a traced value left the function {self.name} ({self.where}), which jit traced, and has no elements; "
            "return it from the function, in place of storing it in a global variable, a container or an object"
        )


_SIZE = "Sizes must be known: make the argument static (static_argnames)"
_INDEX = (
    "Make the argument static (static_argnames) if it is a size, use st.fori_loop for a number of iterations, "
    "st.take(x, i, axis=0) to read what an index selects, and x[st.reshape(i, 1)] = y to write it"
)
_SELECTION = "The shape of the result depends on them: use st.where(condition, x, 0), which keeps the shape"
_ADVICE = {
    "bool": (
        "Use st.where or st.cond in place of a branch, st.while_loop in place of a loop, or make the argument static "
        "(static_argnames)"
    ),
    **dict.fromkeys(["arange", "linspace", "zeros", "ones", "full", "empty", "eye", "reshape"], _SIZE),
    **dict.fromkeys(
        [
            "getitem",
            "nonzero",
            "flatnonzero",
            "argwhere",
            "extract",
            "compress",
            "unique",
            "unique_all",
            "unique_counts",
            "unique_inverse",
            "unique_values",
        ],
        _SELECTION,
    ),
    "index": _INDEX,
    "fold_in": (
        "Split the key and keep a part of it in the carry, or fold in a Python number: an argument, or the number of a "
        "trip of st.fori_loop"
    ),
    "asarray": "Use the functions of shardtensor in place of those that need host arrays, which jit does not trace",
}
"""What to do in place of a call, by its name."""

_OTHERWISE = (
    "Leave it a tensor, which the functions of shardtensor take, make the argument static (static_argnames) if it is a "
    "Python value"
)


def _needs_elements(what: str, caller: str) -> str:
    """Returns the message for the call ``caller``, which needs elements as ``what`` says."""
    return (
        f"{caller}: {what}. {_ADVICE.get(caller, _OTHERWISE)}, or call this outside of jit; with st.disable_jit() it "
        "runs, to be debugged"
    )


def is_traced(x: Any) -> bool:
    """Whether an object is a tensor that has a traced value."""
    return type(x) is ShardedTensor and type(x._storage) is Traced


def user_line() -> str:
    """Returns file and line of the innermost call in the program of the user."""
    place = user_place()
    return f"{place.file}:{place.line}" if place else "no line of Python"
