"""`remat`: functions that are called again in the backward pass, in place of saving what their derivatives need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardtensor.core import OPS, Interpreter, Op, Operands, Params, bind_by, bind_into, call, innermost, interpreting
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.interpreters.differentiation.tape import WRITES_OUTSIDE, Tape
from shardtensor.interpreters.differentiation.values import Taped, number_of
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import ShardedTensor


class _Noting(Interpreter):
    """Executes calls outside of a tape, and notes the values of the tape that the function closes over."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.found: dict[Taped, None] = {}

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call."""
        return bind_by(self._tape.outer, op, map_leaves(self._noted, operands), params)

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Executes a write to a tensor that the function has made."""
        if self._tape.taped(out) is not None:
            raise ArgumentError(WRITES_OUTSIDE)
        with self._tape.outside():
            bind_into(out, op, map_leaves(self._noted, operands), params)

    def _noted(self, x: Any) -> Any:
        base = self._tape.taped(x)
        if base is not None:
            self.found[base] = None
        return self._tape.constant(x)


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
    kept = [_copied(tape, x) for x in leaves(tree)]
    noting = _Noting(tape)
    with interpreting(noting):
        given, named = replaced(tree, list(map(_own, kept)))
        result = fun(*given, **named)
    closed = list(noting.found)
    if not closed and not any(states):
        return result
    values = [state.primal for state in closed]

    def backward(g: Any, _: Any) -> list[Any]:
        sub = Tape()
        boxes = [x if s is None else sub.variable(_own(x)) for x, s in zip(kept, states, strict=True)]
        outside = [sub.variable(_own(x)) for x in values]
        sub.known_as = {state: box._storage for state, box in zip(closed, outside, strict=True)}
        variables = [b for b, s in zip(boxes, states, strict=True) if s is not None] + outside
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

    return replaced(result, tape.add_function(backward, [*states, *closed], leaves(result), {}))


def _copied(tape: Tape, x: Any) -> Any:
    """Returns a leaf of the arguments without the tape, which later writes do not change."""
    x = tape.constant(x)
    return bind_by(tape.outer, OPS["copy"], (x,), ()) if type(x) is ShardedTensor else x


def _own(x: Any) -> Any:
    """Returns a leaf for one call of the function, which may write it."""
    return call("copy", x) if type(x) is ShardedTensor else x
