"""The derivatives of branches.

Where the branch is known, only that one runs, on the tape. In a program each branch also returns what its derivatives
have saved, with zeros in place of what only others save, and the backward pass is a branch of the same index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardtensor.core import OPS, Interpreter, Op, Operands, Params, bind_by, call
from shardtensor.functions.derivatives.cotangents import Call, zeros_of
from shardtensor.functions.derivatives.forms import Recording
from shardtensor.interpreters.control_flow.operators import converted
from shardtensor.interpreters.differentiation.backward import gradient, or_zeros
from shardtensor.interpreters.differentiation.inner import (
    InnerCall,
    by_trips,
    handle_on,
    has_gradient,
    held,
    inferred_call,
    is_inside,
    key_of,
    knows_no_elements,
    root_of,
)
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.differentiation.taped_values import Taped
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements
from shardtensor.tensor.value import Aval, summed


class Branch(Recording):
    """The derivative of `cond` and `switch`."""

    def record(self, tape: Tape, op: Op, operands: Operands, params: Params, /) -> Any:
        """See `Recording`."""
        # A condition that differs between the examples of a batch calls all branches.
        if not knows_no_elements(tape, operands[:1]) and not lacks_elements(operands[0]):
            return by_trips(tape, op, operands, params)
        return _Branches(tape, operands, params).run(op)


class _Branches:
    """A call of `branch` that is traced or inferred.

    Args:
        tape: the tape.
        operands, params: the call.
    """

    def __init__(self, tape: Tape, operands: Operands, params: Params) -> None:
        self._tape = tape
        self._index, self._operands = operands
        self._functions, self._caller = params
        self._states = [tape.active(x) for x in leaves(self._operands)]
        self._root: Interpreter | None = None
        self._calls: dict[int, InnerCall] = {}
        self._sources: dict[int, _Sources] = {}
        self._slots: list[Aval] = []
        self._places: dict[int, list[int]] = {}

    def run(self, op: Op) -> Any:
        """Executes the branch, and records it."""
        tape = self._tape
        self._root = root_of(tape)
        index, args = tape.constants((self._index, self._operands))
        functions = tuple([self._forward(k) for k in range(len(self._functions))])
        result, slots = bind_by(tape.outer, op, (index, args), (functions, self._caller))
        order = range(len(functions))
        calls, sources, places = [self._calls[k] for k in order], [self._sources[k] for k in order], self._places
        active = [any(n is not None for n in column) for column in zip(*[c.outputs for c in calls], strict=True)]
        if not any(active):
            return result
        closed = dict.fromkeys([state for c in calls for state, _, _ in c.closed])
        with tape.outside():
            saved = {
                "index": handle_on(index),
                "slots": slots,
                "args": [handle_on(x) if self._is_used(k) else None for k, x in enumerate(leaves(args))],
                "outside": [[held(tape, x) for x in s.outside] for s in sources],
            }
        results = leaves(result)
        backward = _Backward(calls, sources, places, list(closed), self._caller)
        taped = tape.add_function(backward, [*self._states, *closed], results, saved=saved, name=op.name)
        return replaced(result, [t if a else y for t, y, a in zip(taped, results, active, strict=True)])

    def _is_used(self, number: int) -> bool:
        return any(number in sources.args for sources in self._sources.values())

    def _forward(self, k: int) -> Callable[..., Any]:
        """Returns the function of a branch, which also returns what its derivatives have saved."""

        def forward(*args: Any) -> Any:
            if k == 0:  # The functions are called in their order, and maybe again.
                self._set_slots(args)
            self._calls[k] = inner = InnerCall(self._tape, self._functions[k], args, self._active(args))
            self._sources[k] = sources = _Sources(inner, args, self._root)
            values: list[Any] = [None] * len(self._slots)
            self._places[k] = list(_places(sources.stacked, self._slots))
            for at, x in zip(self._places[k], sources.stacked, strict=True):
                values[at] = converted(x)
            full = [zeros_of(kind) if x is None else x for x, kind in zip(values, self._slots, strict=True)]
            return map_leaves(converted, inner.result), full

        return forward

    def _active(self, args: Any) -> list[bool]:
        return [s is not None and has_gradient(x) for s, x in zip(self._states, leaves(args), strict=True)]

    def _set_slots(self, args: Any) -> None:
        """Finds what the branches save, by inference: each returns as many arrays of a kind as the one with most."""
        self._slots = []
        for k in range(len(self._functions)):
            trial = inferred_call(self._tape, self._functions[k], args, self._active(args))
            for _ in _places(_Sources(trial, trial.args).stacked, self._slots, grows=True):
                pass


def _places(saved: Sequence[Any], slots: list[Aval], *, grows: bool = False) -> Iterator[int]:
    """Yields for each saved tensor the first free slot of its kind."""
    free = list(range(len(slots)))
    for x in saved:
        kind = summed(x._aval)
        form = kind.shape, kind.dtype, kind.sharding
        at = next((k for k in free if (slots[k].shape, slots[k].dtype, slots[k].sharding) == form), None)
        if at is None:
            assert grows, f"a branch saves {kind}, which its inference does not"
            at = len(slots)
            slots.append(kind)
        else:
            free.remove(at)
        yield at


class _Sources:
    """Where the saved tensors of a branch come from.

    Attributes:
        stacked: those that it returns.
        outside: those that it closes over.
        args: the numbers of the arguments that are among them.
    """

    def __init__(self, inner: InnerCall, args: Any, root: Interpreter | None = None) -> None:
        # Where a condition of vmap differs between examples, each function is a part of the program around it.
        is_part = inner.tracer is not None and inner.tracer is root
        self.stacked: list[Any] = []
        self.outside: list[Any] = []
        self._origins: list[tuple[str, int]] = []
        known = {key_of(x): k for k, x in enumerate(leaves(args)) if type(x) is ShardedTensor}
        for x in inner.saved:
            if key_of(x) in known:
                self._origins.append(("args", known[key_of(x)]))
                continue
            is_returned = not is_part and is_inside(x, inner.tracer)
            name, tensors = ("slots", self.stacked) if is_returned else ("outside", self.outside)
            self._origins.append((name, len(tensors)))
            tensors.append(x)
        self.args = {k for name, k in self._origins if name == "args"}

    def saved(self, values: dict[str, Any]) -> list[Any]:
        """Returns the saved tensors, given those of each kind."""
        return [values[name][k] for name, k in self._origins]


class _Backward:
    """The derivative of a branch.

    Args:
        calls: those of the functions.
        sources: where the tensors that they have saved come from.
        places: for each function, the places of those that it has returned.
        closed: the values of the tape that they close over.
        caller: the function that the user called.
    """

    def __init__(
        self,
        calls: Sequence[InnerCall],
        sources: Sequence[_Sources],
        places: Mapping[int, Sequence[int]],
        closed: Sequence[Taped],
        caller: str,
    ) -> None:
        self._calls, self._sources, self._places = calls, sources, places
        self._closed = closed
        self._caller = caller

    def __call__(self, g: Any, recorded: Call) -> list[Any]:
        """Returns the cotangents of the operands and of what the functions close over."""
        cotangents = g if isinstance(g, list) else [g]
        pairs = zip(cotangents, recorded.results, strict=True)
        cotangents = [None if one is None else gradient([one], kind) for one, kind in pairs]
        saved = recorded.saved
        functions = tuple([self._function(k, saved["outside"][k], recorded) for k in range(len(self._calls))])
        gradients: list[Any] = call(
            "branch", saved["index"], (saved["slots"], saved["args"], cotangents), functions, self._caller
        )
        remaining = iter(gradients)
        return [next(remaining) if is_active else None for is_active in recorded.active]

    def _function(self, k: int, outside: Sequence[Any], recorded: Call) -> Callable[..., Any]:
        inner, sources, places = self._calls[k], self._sources[k], self._places[k]
        count = len(inner.inputs)
        where = {state: count + n for n, (state, _, _) in enumerate(inner.closed)}

        def backward(slots: Any, args: Any, g: Any) -> list[Any]:
            values = {"slots": [slots[at] for at in places], "args": args, "outside": outside}
            gradients = inner.pulled(g, [None] * len(inner.closed), sources.saved(values))
            gradients = [*gradients[:count], *[gradients[where[s]] if s in where else None for s in self._closed]]
            pairs = zip(gradients, recorded.kinds, recorded.active, strict=True)
            return [or_zeros(one, kind) for one, kind, is_active in pairs if is_active]

        return backward


OPS["branch"].parts.derivative = Branch()
