"""`remat`: functions that are called again in the backward pass, in place of saving what their derivatives need."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from shardtensor.core import (
    Function,
    Interpreter,
    Op,
    Operands,
    Params,
    bind_by,
    bind_into,
    call,
    innermost,
    interpreted_by,
    interpreting,
)
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.derivatives.cotangents import Call
from shardtensor.functions.random_keys import SymbolicKey
from shardtensor.interpreters.differentiation.inner import (
    Inner,
    handle_on,
    number_in,
    numbers_around,
    storage_of,
    with_functions,
)
from shardtensor.interpreters.differentiation.tape import WRITES_OUTSIDE, Tape, innermost_of
from shardtensor.interpreters.differentiation.values import Taped, number_of
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import ShardedTensor

_KEY = (
    "remat: the function takes a key of the carry, or one that a trip has made, in a program, and keys are not kept "
    "for the backward pass; draw the numbers outside of st.remat, or make the key in it, of the number of the trip: "
    "st.random.fold_in(key, i)"
)


class Outside(Interpreter):
    """Executes calls of a function outside of a tape, and notes the values of the tape that it closes over.

    Attributes:
        tape: the tape.
        outer: the interpreter that executes the calls, as in `Tape`.
        known: in the function of a loop or of a branch, the numbers of values so far of the interpreters around it.
        found: the values of the tape, in the order of their use.
        others: other values of the function of a loop or of a branch that it closes over, by their storages.
    """

    writes = WRITES_OUTSIDE
    """The message of the error if the function writes such a value."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.outer = tape.outer
        self.known = numbers_around(tape) if isinstance(tape, Inner) else {}
        self.found: dict[Taped, None] = {}
        self.others: dict[Any, ShardedTensor] = {}

    @property
    def only_infers(self) -> bool:  # type: ignore[override]
        """See `Interpreter`."""
        return bool(innermost_of(self.outer).only_infers)

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call."""
        if op.functions:
            params = with_functions(op, params, self._noting)
        return bind_by(self.outer, op, map_leaves(self.noted, operands), params)

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes a write to a tensor that the function has made."""
        if self.tape.taped(out) is not None:
            raise ArgumentError(self.writes)
        with interpreted_by(self.outer):
            bind_into(out, op, map_leaves(self.noted, operands), params)

    def _noting(self, function: Function) -> Function:
        """Returns the function of a loop or of a branch that notes values, too."""

        def called(*args: Any) -> Any:
            inner, found = copy.copy(self), innermost()
            inner.outer = None if found is None else found.apply
            with interpreting(inner):
                return map_leaves(inner.noted, function(*args))

        return called

    def noted(self, x: Any) -> Any:
        """Returns a value as the interpreter around the tape takes it.

        Raises:
            ArgumentTypeError: it is a key that the second call would not find.
        """
        if type(x) is SymbolicKey and number_in(storage_of(x.bits))[0] in self.known:
            raise ArgumentTypeError(_KEY)
        if type(x) is not ShardedTensor:
            return x
        base = self.tape.taped(x)
        if base is not None:
            self.found[base] = None
            return self.tape.constant(x)
        storage = storage_of(x)
        maker, number = number_in(storage)
        if maker in self.known and number < self.known[maker]:
            self.others[storage] = x._base_and_view()[0]
        return x


class _Again(Inner):
    """The tape of the second call of a function."""

    _kept = Tape._kept


def remat(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the same results that saves its arguments only: the gradient calls it again.

    The second call must do what the first one did: the function must not depend on what changes meanwhile, nor write
    tensors that it closes over. The gradients of tensors that it closes over are computed, too.

    Args:
        fun: the function; its arguments and results are pytrees.

    >>> f = st.remat(lambda x: st.sin(st.sin(x)))
    >>> st.grad(lambda x: f(x).sum())(st.zeros(2)).tolist()
    [1.0, 1.0]
    """
    if not callable(fun):
        raise ArgumentTypeError(f"remat: fun is {type_text(fun)}; wanted a function")

    @functools.wraps(fun)
    def computed(*args: Any, **kwargs: Any) -> Any:
        tape = innermost()
        return _recorded(tape, fun, args, kwargs) if isinstance(tape, Tape) else fun(*args, **kwargs)

    return computed


def _recorded(tape: Tape, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function outside of a tape, and records the call as one step."""
    tree = args, kwargs
    states = [tape.active(x) for x in leaves(tree)]
    outside = Outside(tape)
    with tape.outside():
        kept = [handle_on(tape.constant(x)) for x in leaves(tree)]
    map_leaves(lambda x: outside.noted(x) if type(x) is SymbolicKey else x, tree)
    with interpreting(outside):
        given, named = replaced(tree, list(map(_own, kept)))
        result = map_leaves(outside.noted, fun(*given, **named))
    closed, others = list(outside.found), outside.others
    if not closed and not any(states):
        return result
    with tape.outside():
        saved = {
            "kept": kept,
            "closed": [state.primal for state in closed],
            "others": list(map(handle_on, others.values())),
        }

    def backward(g: Any, recorded: Call) -> list[Any]:
        kept, values = recorded.saved["kept"], recorded.saved["closed"]
        sub = _Again(tape)
        sub.now = dict(zip(others, recorded.saved["others"], strict=True))
        boxes = [x if s is None else sub.variable(_own(x)) for x, s in zip(kept, states, strict=True)]
        closed_over = [sub.variable(_own(x)) for x in values]
        sub.known_as = {state: box._storage for state, box in zip(closed, closed_over, strict=True)}
        variables = [b for b, s in zip(boxes, states, strict=True) if s is not None] + closed_over
        inputs = [(b._storage.number, b._aval) for b in variables]
        given, named = replaced(tree, boxes)
        try:
            with interpreting(sub):
                again = leaves(fun(*given, **named))
            numbers = [number_of(state) for state in map(sub.active, again)]
        finally:
            sub.end()
        start: dict[int, list[Any]] = {}
        for n, one in zip(numbers, g if isinstance(g, list) else [g], strict=True):
            if n is not None and one is not None:
                start.setdefault(n, []).append(one)
        found = iter(sub.pull(start, inputs, keep=False))
        return [None if s is None else next(found) for s in states] + list(found)

    return replaced(result, tape.add_function(backward, [*states, *closed], leaves(result), saved=saved))


def _own(x: Any) -> Any:
    """Returns a leaf for one call of the function, which may write it."""
    return call("copy", x) if type(x) is ShardedTensor else x
