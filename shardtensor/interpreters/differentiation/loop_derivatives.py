"""The derivatives of loops.

Where the number of trips is known and elements exist, the trips run one after the other on the tape. A program has one
loop more: the loop of the function also returns what the derivatives of each trip have saved, stacked, and the backward
pass is a loop over that in reverse. Its carry consists of the cotangent of the carry, and of the sums of the cotangents
of what the function closes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.communication.transfer_log import UNKNOWN_TRIPS
from shardtensor.core import OPS, Function, Op, Operands, Params, bind_by, call
from shardtensor.errors import ArgumentTypeError
from shardtensor.functions.derivatives.cotangents import Call
from shardtensor.functions.derivatives.forms import Recording
from shardtensor.interpreters.control_flow.operators import converted, integer
from shardtensor.interpreters.differentiation.backward import gradient, or_zeros
from shardtensor.interpreters.differentiation.inner import (
    InnerCall,
    argument,
    by_trips,
    handle_on,
    has_gradient,
    held,
    inferred_call,
    is_inside,
    key_of,
    knows_no_elements,
    storage_of,
    with_functions,
)
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.views.views import View
from shardtensor.tensor.pytree import leaves, replaced
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, tensor


class CountedLoop(Recording):
    """The derivative of `scan`, `fori_loop` and `map`."""

    def record(self, tape: Tape, op: Op, operands: Operands, params: Params, /) -> Any:
        """See `Recording`."""
        if not knows_no_elements(tape, operands):
            return by_trips(tape, op, operands, params)
        return _Loop(tape, operands, params).run(op)


class _Loop:
    """A call of `counted_loop` that is traced or inferred.

    Args:
        tape: the tape.
        operands, params: the call.
    """

    def __init__(self, tape: Tape, operands: Operands, params: Params) -> None:
        self._tape = tape
        self._init, self._xs, self._bounds = operands
        self._body, self._reverse, self._caller = params
        self._states = [tape.active(x) for x in leaves((self._init, self._xs))]
        self._count = len(leaves(self._init))
        self._active = [s is not None for s in self._states]

    def run(self, op: Op) -> Any:
        """Executes the loop, and records it."""
        tape = self._tape
        operands = tape.constants((self._init, self._xs, self._bounds))
        params = self._forward, self._reverse, self._caller
        carry, (ys, stacks) = bind_by(tape.outer, op, operands, params)
        trip, sources = self._trip, self._sources
        if not any(n is not None for n in trip.outputs):
            return carry, ys
        begin, n = self._trips(operands[2])
        results = leaves((carry, ys))
        with tape.outside():
            saved = {
                "stacks": stacks,
                "xs": [handle_on(x) if k in sources.xs else None for k, x in enumerate(leaves(operands[1]))],
                "ys": [handle_on(y) if k in sources.ys else None for k, y in enumerate(results[self._count :])],
                "outside": [held(tape, x) for x in sources.outside],
            }
        states = [*self._states, *[state for state, _, _ in trip.closed]]
        taped = tape.add_function(_Backward(self, begin, n), states, results, saved=saved, name=op.name)
        chosen = [t if n is not None else y for t, y, n in zip(taped, results, trip.outputs, strict=True)]
        return replaced((carry, ys), chosen)

    def _forward(self, i: Any, carry: Any, x: Any) -> Any:
        """Calls the function for one trip, and returns what it does and what the derivatives have saved."""
        args = carry, x
        may_be = [a and has_gradient(leaf) for a, leaf in zip(self._active_leaves(i, args), leaves(args), strict=True)]
        self._trip = trip = InnerCall(self._tape, self._call_with(i), args, may_be)
        after, y = trip.result
        self._sources = sources = _Sources(trip, i, leaves(x), leaves(y))
        return after, (y, [converted(one) for one in sources.stacked])

    def _call_with(self, i: Any) -> Function:
        return lambda carry, x: self._body(i, carry, x)

    def _active_leaves(self, i: Any, args: Any) -> list[bool]:
        """Returns which leaves of the carry and of the slices depend on a differentiated argument. Those of the carry
        do if they depend on it after a trip.
        """
        values = leaves(args)
        count = self._count
        while not all(a or not has_gradient(x) for a, x in zip(self._active[:count], values[:count], strict=True)):
            active = [a and has_gradient(x) for a, x in zip(self._active, values, strict=True)]
            trial = inferred_call(self._tape, self._call_with(argument(i)), args, active)
            after = [a or n is not None for a, n in zip(self._active[:count], trial.outputs[:count], strict=True)]
            if after == self._active[:count]:
                break
            self._active[:count] = after
        return self._active

    def _trips(self, bounds: Any) -> tuple[int, int]:
        """Returns the first number and the number of trips.

        Raises:
            ArgumentTypeError: a bound is traced.
        """
        names = ("lower", "upper")
        for name, x in zip(names, bounds, strict=True):
            if lacks_elements(x):
                if self._trip.tracer is None:
                    return 0, UNKNOWN_TRIPS.get()
                raise ArgumentTypeError(
                    f"{self._caller}: it has no gradient here: {name} depends on an argument of st.jit, so that the "
                    "number of trips is unknown, and what they save has no place; make the argument static "
                    "(static_argnames), or use st.stop_gradient(x) where no gradient is wanted"
                )
        begin, end = [integer(self._caller, name, x) for name, x in zip(names, bounds, strict=True)]
        return begin, max(end - begin, 0)


class _Sources:
    """Where the saved tensors of a trip come from.

    Attributes:
        stacked: those that are stacked.
        outside: those that are the same in all trips.
        xs, ys: the numbers of the slices and of the results of the trip that are among them.
    """

    def __init__(self, trip: InnerCall, i: Any, xs: Sequence[Any], ys: Sequence[Any]) -> None:
        self.stacked: list[Any] = []
        self.outside: list[Any] = []
        self._origins: list[tuple[str, int, Any]] = []
        known = {key_of(y): ("ys", k) for k, y in enumerate(ys) if _is_array(y)}
        known |= {key_of(x): ("xs", k) for k, x in enumerate(xs) if _is_array(x)}
        if type(i) is ShardedTensor:
            known[key_of(i)] = "trip", 0
        for x in trip.saved:
            name, k = known.get(storage_of(x), ("", 0))
            if name:
                self._origins.append((name, k, x if hasattr(x._storage, "view_spec") else None))
                continue
            name, tensors = ("stacks", self.stacked) if is_inside(x, trip.tracer) else ("outside", self.outside)
            self._origins.append((name, len(tensors), None))
            tensors.append(x)
        self.xs = {k for name, k, _ in self._origins if name == "xs"}
        self.ys = {k for name, k, _ in self._origins if name == "ys"}

    def saved(self, values: dict[str, Any]) -> list[Any]:
        """Returns the saved tensors of a trip, given what it has of each kind."""
        tensors = []
        for name, k, view in self._origins:
            x = values[name][k]
            tensors.append(x if view is None else tensor(view._aval, View(x, view._base_and_view()[1])))
        return tensors


def _is_array(x: Any) -> bool:
    return type(x) is ShardedTensor and not hasattr(x._storage, "view_spec")


class _Backward:
    """The derivative of a loop."""

    def __init__(self, loop: _Loop, begin: int, n: int) -> None:
        self._trip, self._sources, self._count = loop._trip, loop._sources, loop._count
        self._begin, self._n = begin, n
        self._reverse, self._caller = loop._reverse, loop._caller

    def __call__(self, g: Any, recorded: Call) -> list[Any]:
        """Returns the cotangents of the initial carry, of the slices, and of what the function closes over."""
        trip, count, sources = self._trip, self._count, self._sources
        cotangents = g if isinstance(g, list) else [g]
        kinds = recorded.results
        carried = [
            None if known is None else or_zeros(None if one is None else gradient([one], kind), kind)
            for known, one, kind in zip(trip.inputs[:count], cotangents[:count], kinds[:count], strict=True)
        ]
        stacked = [
            None if one is None else gradient([one], kind)
            for one, kind in zip(cotangents[count:], kinds[count:], strict=True)
        ]
        saved = recorded.saved
        slices = {"stacks": saved["stacks"], "xs": saved["xs"], "ys": saved["ys"], "g": stacked}

        def backward(i: Any, carry: Any, x: Any) -> Any:
            after, sums = carry
            number = i + self._begin if self._begin else i
            values = sources.saved({**x, "outside": saved["outside"], "trip": [number]})
            gradients = trip.pulled([*after, *x["g"]], sums, values)
            before = [
                one if known is None else or_zeros(one, known[1])
                for known, one in zip(trip.inputs[:count], gradients[:count], strict=True)
            ]
            at = len(trip.inputs)
            return (before, gradients[at:]), gradients[count:at]

        init = carried, [or_zeros(None, kind) for _, _, kind in trip.closed]
        (before, sums), xs = call("counted_loop", init, slices, (0, self._n), backward, not self._reverse, self._caller)
        return [*before, *xs, *sums]


class ConditionalLoop(Recording):
    """Stands for the derivative of `while_loop`, which has none in reverse mode."""

    def record(self, tape: Tape, op: Op, operands: Operands, params: Params, /) -> Any:
        """See `Recording`."""
        if any(tape.active(x) for x in leaves(operands)):
            raise self._refused(params)
        body = params[1]
        is_run = not knows_no_elements(tape, operands)

        def around(function: Function) -> Function:
            def called(*args: Any) -> Any:
                if is_run:
                    result = function(*args)
                    depends = any(map(tape.active, leaves(result)))
                else:
                    inner = InnerCall(tape, function, args, [False] * len(leaves(args)))
                    result, depends = inner.result, any(n is not None for n in inner.outputs)
                if depends and function is body:
                    raise self._refused(params)
                return result

            return called

        params = with_functions(op, params, around)
        return (
            by_trips(tape, op, operands, params)
            if is_run
            else bind_by(tape.outer, op, tape.constants(operands), params)
        )

    def _refused(self, params: Params) -> ArgumentTypeError:
        return ArgumentTypeError(
            f"{params[-1]}: it has no gradient: the number of trips is unknown before them, and what they save has no "
            "place; use st.fori_loop or st.scan with a number of trips that is known, a loop of Python outside of "
            "st.jit, or st.stop_gradient(x) where no gradient is wanted"
        )


OPS["counted_loop"].parts.derivative = CountedLoop()
OPS["conditional_loop"].parts.derivative = ConditionalLoop()
