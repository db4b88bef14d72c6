"""Loops and branches in forward mode: each trip computes the tangents of its results with these.

The carry of such a loop consists of that of the function and of its tangents. Nothing is saved, so that the number of
trips need not be known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.core import Function, Op, Operands, Params, bind_by, interpreting
from shardtensor.functions.derivatives.cotangents import zeros_of
from shardtensor.interpreters.control_flow.operators import converted
from shardtensor.interpreters.differentiation.inner import (
    Inner,
    by_trips,
    handle_on,
    has_gradient,
    kept_of,
    knows_no_elements,
    with_functions,
)
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.differentiation.values import Taped
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import SCALARS


def is_forward(tape: Tape) -> bool:
    """Whether an interpreter computes tangents, in place of recording calls."""
    return hasattr(tape, "dual")


def pushed(tape: Any, op: Op, operands: Operands, params: Params) -> Any:
    """Executes a loop or a branch with tangents."""
    if not knows_no_elements(tape, operands[:1] if op.name == "branch" else operands):
        return by_trips(tape, op, operands, params)
    return _PUSHED[op.name](tape, op, operands, params)


@functools.cache
def _inner_class(kind: type[Tape]) -> Any:
    """Returns the class of the interpreters of inner functions, given that of the interpreter around them."""

    class InnerForward(Inner, kind):  # type: ignore[misc, valid-type]
        def closed_over(self, state: Taped) -> Taped:
            made = super().closed_over(state)
            made.tangent = state.tangent  # type: ignore[attr-defined]
            return made

    return InnerForward


def _called(tape: Any, function: Function, args: Any, tangents: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the result of a function, and the tangents of its leaves; None for zeros."""
    kind: Any = type(tape)
    inner = _inner_class(kind)(tape)
    given = [inner.dual(handle_on(x), t) for x, t in zip(leaves(args), tangents, strict=True)]
    try:
        with interpreting(inner):
            result = function(*replaced(args, given))
        made = list(map(inner.tangent, leaves(result)))
        return map_leaves(inner.constant, result), made
    finally:
        inner.end()


def _split(tape: Any, tree: Any) -> tuple[Any, list[Any]]:
    """Returns values without the interpreter, and their tangents; None for zeros."""
    return tape.constants(tree), list(map(tape.tangent, leaves(tree)))


def _joined(tape: Any, tree: Any, tangents: Sequence[Any]) -> Any:
    made = [tape.dual(x, t if has_gradient(x) else None) for x, t in zip(leaves(tree), tangents, strict=True)]
    return replaced(tree, made)


def _zeros(x: Any, t: Any, before: Any = None) -> Any:
    """Returns the tangent of a leaf of a carry, which is an array also if it is zero. A number has one, since it may
    become an array of floating-point numbers.
    """
    if t is not None:
        return t
    if type(x) in SCALARS:
        return 0.0
    return zeros_of(kept_of(x)) if has_gradient(x) else before


def _first(tape: Any, init: Any) -> tuple[Any, list[Any]]:
    """Returns an initial carry and its tangents."""
    values, tangents = _split(tape, init)
    with tape.outside():
        return values, list(map(_zeros, leaves(values), tangents))


def _next(tape: Any, function: Function, carry: Any, before: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the next carry and its tangents."""
    tangents = [t if has_gradient(x) else None for x, t in zip(leaves(carry), before, strict=True)]
    after, made = _called(tape, function, (carry,), tangents)
    return after, list(map(_zeros, leaves(after), made, before))


def _counted(tape: Any, op: Op, operands: Operands, params: Params) -> Any:
    body, reverse, caller = params
    init, count = _first(tape, operands[0]), len(leaves(operands[0]))

    def pair(i: Any, carry: Any, x: Any) -> Any:
        (values, before), (slices, more) = carry, x
        tangents = [t if has_gradient(v) else None for v, t in zip(leaves(values), before, strict=True)]
        (after, y), made = _called(tape, lambda c, x: body(i, c, x), (values, slices), [*tangents, *more])
        return (after, list(map(_zeros, leaves(after), made[:count], before))), (y, made[count:])

    given = init, _split(tape, operands[1]), tape.constants(operands[2])
    (carry, tangents), (ys, more) = bind_by(tape.outer, op, given, (pair, reverse, caller))
    return _joined(tape, carry, tangents), _joined(tape, ys, more)


def _conditional(tape: Any, op: Op, operands: Operands, params: Params) -> Any:
    condition, body, caller = params

    def is_true(carry: Any) -> Any:
        values = carry[0]
        return _called(tape, condition, (values,), [None] * len(leaves(values)))[0]

    given = (_first(tape, operands[0]),)
    functions = is_true, lambda carry: _next(tape, body, *carry), caller
    carry, tangents = bind_by(tape.outer, op, given, functions)
    return _joined(tape, carry, tangents)


def _branch(tape: Any, op: Op, operands: Operands, params: Params) -> Any:
    def around(function: Function) -> Callable[..., Any]:
        def called(values: Any, tangents: Sequence[Any]) -> Any:
            result, made = _called(tape, function, values, tangents)
            result = map_leaves(converted, result)
            return result, list(map(_zeros, leaves(result), made))

        return called

    given = tape.constant(operands[0]), _split(tape, operands[1])
    result, tangents = bind_by(tape.outer, op, given, with_functions(op, params, around))
    return _joined(tape, result, tangents)


_PUSHED = {"counted_loop": _counted, "conditional_loop": _conditional, "branch": _branch}
