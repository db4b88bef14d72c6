"""Forward mode: the interpreter that computes tangents with the values, and the tangents of a recorded tape."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from shardtensor.core import OPS, Interpreter, Op, Operands, Params, bind, bind_by, call, interpreting
from shardtensor.functions.derivatives.cotangents import Call, Into, cast_to, is_inexact, whole, zeros_of
from shardtensor.functions.derivatives.forms import Derivative
from shardtensor.interpreters.differentiation.backward import Step, gathered_again, reduced_sum
from shardtensor.interpreters.differentiation.inner import root_of
from shardtensor.interpreters.differentiation.tangents_of_loops import with_tangents
from shardtensor.interpreters.differentiation.tape import Linear, Tape
from shardtensor.interpreters.differentiation.taped_values import Taped
from shardtensor.interpreters.views.views import View
from shardtensor.tensor.operands import dtype_of
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval, summed


class NeedsTape(Exception):
    """A function that is differentiated in forward mode calls a map, of which the programs have tapes only."""


class Forward(Tape):
    """Executes calls by the interpreter around it, and with each call that of its derivative in one direction.

    Nothing is recorded, so that no value is kept for longer than without derivatives, and all writes are in place.
    Values whose tangent is zero do not belong to it.
    """

    records = False

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes one call, and computes the tangents of its results.

        Raises:
            ArgumentTypeError: the operator has no derivative.
            NeedsTape: it is a map.
        """
        if op.signature.functions:
            return with_tangents(self, op, operands, params)
        if op.name == "map_shards":
            raise NeedsTape
        return super().apply(op, operands, params)

    @contextlib.contextmanager
    def within(self, root: Interpreter | None) -> Iterator[None]:
        """The same as `inside`. Where the function is traced, tensors that it makes and writes exist in its program
        only, so that the writes end with it.

        Args:
            root: what `root_of` returns outside of the function.
        """
        written = self._written
        with self.inside():
            if is_traced := root_of(self) is not root:
                self._written = {}
            try:
                yield
                if is_traced:
                    self.end_writes()
            finally:
                self._written = written

    def active(self, x: Any) -> Taped | None:
        """See `Tape.active`."""
        base = self.taped(x)
        return None if base is None or base.tangent is None else super().active(x)

    def tangent(self, x: Any) -> Any:
        """Returns the tangent of a result as a tensor of its own; None for zeros."""
        state = self.active(x)
        return None if state is None else bind_by(self.outer, OPS["copy"], (state.tangent,), ())

    def dual(self, primal: Any, tangent: Any) -> Any:
        """Returns a tensor for a value, to which no other object may refer, and for its tangent; the value itself if
        that is None.
        """
        if tangent is None:
            return primal
        if hasattr(getattr(primal, "_storage", None), "view_spec"):
            primal = bind_by(self.outer, OPS["copy"], (primal,), ())
        variable = self.variable(primal)
        variable._storage.tangent = tangent
        return variable

    def _saved(
        self,
        op: Op,
        derivative: Derivative,
        states: Sequence[Taped | None],
        operands: Operands,
        args: Operands,
        outs: Sequence[Any],
        new: Sequence[Taped | None],
    ) -> dict[str, Any]:
        """Returns what the derivative needs, which it uses at once."""
        named = dict(zip(op.operands, args, strict=False)) | {"y": outs[0] if len(outs) == 1 else outs}
        return {name: named[name] for name in derivative.saves(op, [s is not None for s in states])}

    def _update(self, base: ShardedTensor, out: ShardedTensor, op: Op, operands: Operands, params: Params) -> bool:
        """The tangent needs the old elements, so that ``x += y`` computes a new value, to which x is bound."""
        return False

    def add_call(
        self,
        op: Op,
        params: dict[str, Any],
        derivative: Derivative,
        inputs: Sequence[Taped | None],
        kinds: Sequence[Any],
        outputs: Sequence[Taped | None],
        results: Sequence[Any],
        saved: dict[str, Any],
        tree: Any = None,
    ) -> None:
        """Computes the tangents of the results of a call."""
        step = Step()
        step.op, step.params, step.derivative = op, params, derivative
        step.kinds, step.results, step.saved, step.tree = kinds, results, saved, tree
        tangents = [None if s is None else s.tangent for s in inputs]
        step.active = [t is not None for t in tangents]
        if op.name == "put" and inputs[0] is not None and inputs[0].primal is None:
            # This value exists no longer, so that its tangent may be written in place.
            inputs[0].tangent = inputs[0].views = None
        with self.outside():
            for state, t in zip(outputs, pushed(step, tangents), strict=True):
                if state is not None:
                    state.tangent = t


def pushed(step: Step, tangents: list[Any]) -> Sequence[Any]:
    """Returns the tangents of the results of a call, each with the shape, dtype and layout of its value, given those of
    its operands; None for zeros.
    """
    if all(t is None for t in tangents):
        return [None] * len(step.results)
    if step.op.name == "view":
        return [tensor(summed(step.results[0]), View(tangents[0], step.params["view_spec"]))]
    out = step.derivative.pushed(tangents, step)
    if out is NotImplemented:
        out = _transposed_twice(step, tangents)
    outs = out if isinstance(out, list) else [out]
    return [like(t, kind) for t, kind in zip(outs, step.results, strict=True)]


def like(t: Any, kind: Any) -> Any:
    """Returns a tangent with the shape, dtype and layout of its value, as a tensor that is not a view."""
    if t is None or not is_inexact(dtype_of(kind)):
        return None
    t = reduced_sum(cast_to(whole(t, kind), kind), kind)
    if isinstance(kind, Aval):
        sharding = summed(kind).sharding
        if t.sharding != sharding or t.committed != kind.committed:
            t = call("transfer_to", t, sharding, "jvp", committed=kind.committed)
    return bind(OPS["copy"], (t,), ()) if hasattr(t._storage, "view_spec") else t


def _transposed_twice(step: Step, tangents: Sequence[Any]) -> list[Any]:
    """Returns the tangents of results by the function that pulls cotangents of them back: it is linear in these, so
    that the transpose of it pushes tangents forward.
    """
    tape, recorded = Linear(), Call()
    for name in Call.__slots__:
        setattr(recorded, name, getattr(step, name))
    kinds = step.results
    cotangents = [tape.variable(zeros_of(kind)) if is_inexact(dtype_of(kind)) else None for kind in kinds]
    with interpreting(tape):
        gradients = step.derivative.transposed(cotangents[0] if len(kinds) == 1 else list(cotangents), recorded)
        start: dict[int, list[Any]] = {}
        for g, t, kind in zip(gradients, tangents, step.kinds, strict=True):
            if g is None or t is None:
                continue
            assert type(g) is not Into
            state = tape.active(cast_to(whole(g, kind), kind))
            if state is not None:
                start.setdefault(state.number, []).append(t)
    tape.end()
    inputs = [(x._storage.number, x._aval) for x in cotangents if x is not None]
    out_tangents = iter(tape.pull(start, inputs, keep=False))
    return [None if x is None else next(out_tangents) for x in cotangents]


def pushed_forward(steps: Sequence[Step], tangents: dict[int, Any], outputs: Sequence[int | None]) -> list[Any]:
    """Returns the tangents of values of recorded calls, given those of the inputs.

    Args:
        steps: the calls.
        tangents: the tangents of the inputs, by number, which are removed once they are not needed.
        outputs: the numbers of the values.
    """
    left = collections.Counter([n for step in steps for n in step.inputs])
    left.update(outputs)
    for step in steps:
        in_tangents = [None if n is None else tangents.get(n) for n in step.inputs]
        for n in step.inputs:
            if n is not None:
                left[n] -= 1
                if not left[n]:
                    tangents.pop(n, None)
        with gathered_again(step):
            out_tangents = pushed(step, in_tangents)
        for n, t in zip(step.outputs, out_tangents, strict=True):
            if n is not None and t is not None and left.get(n):
                tangents[n] = t
    return [None if n is None else tangents.get(n) for n in outputs]
