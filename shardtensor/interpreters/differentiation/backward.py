"""The backward pass: the transposes of the recorded calls, in reverse order, and the sums of their contributions.

A value that is used several times gets several contributions. They are added when the call that made the value is
reached. Where they are partial sums along the same mesh axes, they are added as these, and then reduced once.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import OPS, bind, bind_into, call, innermost, outermost
from shardtensor.dispatchers import splitter
from shardtensor.functions.derivatives.cotangents import (
    Call,
    Into,
    cast_to,
    is_unreduced,
    unbroadcast,
    whole,
    zeros_of,
)
from shardtensor.functions.derivatives.forms import Cotangents, Derivative
from shardtensor.interpreters.differentiation.left_sums import LeftSums
from shardtensor.interpreters.execution.plan_cache import planned
from shardtensor.interpreters.programs.trace import adding_gradients
from shardtensor.interpreters.views.views import View, aval_of_view
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import P
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.tensor import ShardedTensor, mark_array, tensor, without_elements
from shardtensor.tensor.value import Aval, of_cotangent, summed


class Step(Call):
    """One recorded call.

    Attributes:
        derivative: the row of the operator.
        inputs: for each leaf of the operands the number of the value, None if it has no gradient.
        outputs: likewise for each leaf of the result.
        line: the line of the user's program that made the call, where an interpreter around the tape reports it.
        targets: for each leaf of the operands, the layout in which sums are wanted: a sharding; None to leave partial
            sums; or `PLAIN`.
    """

    __slots__ = ("derivative", "inputs", "line", "outputs", "targets")

    derivative: Derivative
    inputs: Sequence[int | None]
    line: str
    outputs: Sequence[int | None]
    targets: Sequence[NamedSharding | str | None]

    def with_saved(self, saved: dict[str, Any]) -> Step:
        """Returns the same call with other values in place of those that it has saved."""
        step = Step()
        step.op, step.params, step.derivative = self.op, self.params, self.derivative
        step.inputs, step.outputs, step.active = self.inputs, self.outputs, self.active
        step.kinds, step.results, step.tree, step.line = self.kinds, self.results, self.tree, self.line
        step.saved = saved
        return step

    def add_up(self, number: int, name: str, *operands: Any, **params: Any) -> Any:
        """See `Call`."""
        target = PLAIN if number < 0 else self.targets[number]
        op = OPS[name]
        args, values = splitter(op)(*operands, **params)
        if target is PLAIN or op.placed is None or not all(_is_sum_of_tensors(x) for x in args):
            return bind(op, args, values)
        if target is None:
            plan = planned(op, tuple([without_elements(x._aval) for x in args]), values)[0]
            result = plan.result
            mesh = result.sharding.mesh
            axes = [a for a in getattr(plan, "partial_axes", ()) if mesh.shape[a] > 1]
            if not axes or type(result) is not Aval:
                return bind(op, args, values)
            spec = P(*result.sharding.spec.chains_of(result.ndim), unreduced=frozenset(axes))
            target = result.sharding.with_spec(spec)
        return bind(op.placed, args, (*values, target))


class Gathered(NamedTuple):
    """Stands for a saved value that a gather has made: the backward pass gathers it again from its source, which has
    fewer elements on each device.

    Attributes:
        source: the source.
        base: the aval of the gathered value.
        value: that of the saved value, which may be a view of it.
        view_spec: the view spec of the view.
    """

    source: ShardedTensor
    base: Aval
    value: Aval
    view_spec: ViewSpec | None

    def again(self) -> ShardedTensor:
        """Gathers the value."""
        base: ShardedTensor = call(
            "transfer_to", self.source, self.base.sharding, "grad", committed=self.base.committed
        )
        return base if self.view_spec is None else tensor(self.value, View(base, self.view_spec))


def is_gathered(source: Any, result: ShardedTensor) -> bool:
    """Whether a transfer on one mesh has made a tensor of which devices have more elements than of its source."""
    if type(source) is not ShardedTensor:
        return False
    here, there = source._aval, result._aval
    if here.sharding.mesh != there.sharding.mesh or here.sharding.memory_kind != there.sharding.memory_kind:
        return False
    return _parts(there) < _parts(here)


def _parts(value: Aval) -> int:
    """Returns the number of different shards of a value."""
    mesh, chains = value.sharding.mesh, value.sharding.spec.chains_of(value.ndim)
    return math.prod([mesh.shape[axis] for chain in chains for axis in chain])


PLAIN = "the layout that the operator's rule gives"
"""The target of sums in programs, which decide themselves where partial sums are added."""


def _is_sum_of_tensors(x: Any) -> bool:
    return type(x) is ShardedTensor and not x._aval.unreduced


class Typed(abc.ABC):
    """The types of values in a program of a map: the axes along which the programs' values may differ. Where they are
    the same value, its cotangent is the sum of those of all programs.
    """

    @abc.abstractmethod
    def contribution(self, step: Step, number: int, g: Any) -> Any:
        """Returns a contribution with the axes along which those of all programs are yet to be added."""

    @abc.abstractmethod
    def joined(self, contributions: list[Any], kind: Any) -> list[Any]:
        """Returns contributions to one value, added over programs."""

    @abc.abstractmethod
    def left(self, number: int, contributions: list[Any]) -> list[Any]:
        """Returns this program's part of the contributions to an argument, of which the caller adds the parts."""


def pulled_back(
    steps: list[Step],
    uses: dict[int, int],
    cotangents: dict[int, list[Any]],
    inputs: Sequence[tuple[int, Any]],
    typed: Typed | None = None,
    *,
    own: bool = True,
    left: LeftSums | None = None,
) -> list[Any]:
    """Returns the cotangents of inputs, each in the layout and dtype of its value; None for those that have none.

    Args:
        steps: the recorded calls, which are removed from the list once their transposes have been called: then what
            they have saved is freed.
        uses: for the number of each value, how many operands of these calls it is.
        cotangents: contributions to the cotangents of values, by number.
        inputs: the numbers of the inputs and their avals; a Python scalar stands for itself.
        typed: in a program of a map, along which axes values differ, if that is known.
        own: whether the cotangents have to be tensors of their own.
        left: takes the cotangents that are left as partial sums; None if all of them are added.
    """
    _set_targets(steps, uses, inputs if left is None else ())
    transpose = (innermost() or outermost()).transpose
    while steps:
        step = steps.pop()
        gradients = [cotangents.pop(n, None) if n is not None else None for n in step.outputs]
        if not any(gradients) and not step.derivative.meets:
            continue
        for k, contributions in enumerate(gradients):
            if contributions is not None:
                contributions = contributions if typed is None else typed.joined(contributions, step.results[k])
                gradients[k] = added(contributions, step.results[k])
        del contributions
        if not step.derivative.takes_partial_sums:
            gradients = [reduced_sum(g, kind) for g, kind in zip(gradients, step.results, strict=True)]
        with gathered_again(step):
            operand_gradients: Any = transpose(step)(gradients.pop() if len(gradients) == 1 else gradients, step)
        for n, g, kind in zip(step.inputs, operand_gradients, step.kinds, strict=True):
            if n is not None and g is not None:
                g = g if type(g) is Into else cast_to(g, kind)
                cotangents.setdefault(n, []).append(g if typed is None else typed.contribution(step, n, g))
        operand_gradients = g = None  # The next transpose may take long: a cotangent that it has used is freed at once.
    gradients = []
    for n, kind in inputs:
        contributions = cotangents.pop(n, [])
        contributions = contributions if typed is None else typed.left(n, contributions)
        gradients.append(gradient(contributions, kind, own=own, left=left) if contributions else None)
    return gradients


@contextlib.contextmanager
def gathered_again(step: Step) -> Iterator[None]:
    """Gathers saved values of a call again in the context. The function that `vjp` returns uses their sources again."""
    saved = step.saved
    if any(type(x) is Gathered for x in saved.values()):
        step.saved = {name: x.again() if type(x) is Gathered else x for name, x in saved.items()}
    try:
        yield
    finally:
        step.saved = saved


def _set_targets(steps: Sequence[Step], uses: dict[int, int], inputs: Sequence[tuple[int, Any]]) -> None:
    """Decides in which layouts sums are computed. One that is all of the gradient of an argument is computed in its
    layout; others leave partial sums, since several of them are added. A program decides that later, for all of it.
    """
    if innermost() is not None:
        for step in steps:
            step.targets = [PLAIN] * len(step.inputs)
        return
    layouts: dict[int, Any] = {n: of_cotangent(kind) for n, kind in inputs if isinstance(kind, Aval)}
    for step in steps:
        number = step.inputs[0] if step.inputs else None
        moves = "same elements" in step.op.tags and step.derivative.takes_partial_sums  # Functions of the user do not.
        if moves and number in layouts and uses.get(number) == 1 and step.outputs[0] is not None:
            layouts[step.outputs[0]] = layouts[number]
        step.targets = [None if n is None or uses.get(n) != 1 else layouts.get(n) for n in step.inputs]


def added(contributions: list[Any], kind: Any) -> Any:
    """Returns the sum of contributions to the cotangent of a value. The list is emptied."""
    if len(contributions) == 1 and type(contributions[0]) is not Into:
        return contributions.pop()
    parts = [g for g in contributions if type(g) is Into]
    groups: dict[Any, Any] = {}
    for g in contributions:
        if type(g) is Into:
            continue
        axes = g._aval.unreduced if is_unreduced(g) else ()
        g = whole(g, kind) if axes else g
        groups[axes] = g if axes not in groups else _sum(groups[axes], g)
    contributions.clear()
    if len(groups) > 1 and not parts and isinstance(kind, Aval) and kind.sharding.spec.reduced:
        groups = {axes: call("reshard", whole(g, kind), of_cotangent(kind)) for axes, g in groups.items()}
    elif len(groups) > 1 or parts:
        groups = {axes: reduced_sum(g, kind) for axes, g in groups.items()}
    total = None
    for axes in list(groups):
        g = groups.pop(axes)
        total = g if total is None else _sum(total, g)
        del g  # If nothing else holds it, the sum may be written in place.
    if not parts:
        return total
    total = zeros_of(kind) if total is None else _in_layout(cast_to(whole(total, kind), kind), kind)
    total = mark_array(call("copy", total))
    for part in parts:
        target = window(total, part.view_spec)
        # By JAX's convention, the cotangent of the imaginary part counts as negative.
        op = OPS["subtract" if part.view_spec.part == "imag" else "add"]
        bind_into(target, op, (target, cast_to(part.g, target._aval)), ())
    return total


def _sum(x: Any, y: Any) -> Any:
    if innermost() is None:
        return call("add", x, y)
    with adding_gradients():
        return call("add", x, y)


def window(base: ShardedTensor, view_spec: ViewSpec) -> ShardedTensor:
    """Returns a view of a tensor that is not a view itself."""
    value = aval_of_view(base._aval, view_spec.chains, view_spec.shape, view_spec.part)
    return mark_array(tensor(value, View(base, view_spec)))


class Written(Derivative):
    """The derivative of a write: the written elements have the cotangent of the value, and the old ones none.

    The cotangent is written in place if nothing else holds it, so that many small writes cost the sum of their sizes.
    """

    def transposed(self, g: Any, call: Call) -> Cotangents:
        """Returns the cotangents of the base and of the value."""
        spec = call.params["view_spec"]
        g = bind(OPS["copy"], (_in_layout(whole(g, call.results[0]), call.results[0]),), ())
        of_value = None
        if call.active[1]:
            of_value = unbroadcast(bind(OPS["copy"], (window(g, spec),), ()), call, 1, spec.shape)
            of_value = -of_value if spec.part == "imag" else of_value
        if not call.active[0]:
            return [None, of_value]
        target = window(mark_array(g), spec)
        bind_into(target, OPS["setitem"], (target, 0, ...), ())
        return [g, of_value]

    def pushed(self, tangents: Sequence[Any], call: Call) -> Any:
        """Returns the tangent of the base with that of the value in it: in place if nothing else holds it."""
        assert isinstance(tangents, list)
        value, g = tangents.pop(), tangents.pop()
        value, g = 0 if value is None else value, zeros_of(call.kinds[0]) if g is None else g
        g = mark_array(bind(OPS["copy"], (g,), ()))
        target = window(g, call.params["view_spec"])
        bind_into(target, OPS["setitem"], (target, value, ...), ())
        return g


WRITTEN = Written()


def reduced_sum(g: Any, kind: Any) -> Any:
    """Returns a cotangent of which the partial sums are added, by a reduce-scatter if its value is split."""
    if g is None or not is_unreduced(g):
        return g
    fits = isinstance(kind, Aval) and g.shape == kind.shape
    return call("reshard", g, summed(kind).sharding if fits else g.sharding.with_spec(P()))


def _in_layout(g: Any, kind: Any) -> Any:
    if isinstance(kind, Aval) and g.sharding != summed(kind).sharding:
        return call("reshard", g, summed(kind).sharding)
    return g


def gradient(contributions: list[Any], kind: Any, *, own: bool = True, left: LeftSums | None = None) -> Any:
    """Returns the gradient of an argument, from its contributions: in the layout that the argument's gives gradients,
    and, if ``own``, a tensor of its own. That of a Python number is replicated.
    """
    g = cast_to(whole(added(contributions, kind), kind), kind)
    if not isinstance(kind, Aval):
        return reduced_sum(g, kind)
    target = of_cotangent(kind)
    if left is not None and is_unreduced(g) and not target.spec.unreduced:
        return left.taken(g, target, kind.committed)
    if not own and g.sharding == target:
        return g
    return call("transfer_to", g, target, "grad", committed=kind.committed)


def or_zeros(g: Any, kind: Any) -> Any:
    """Returns the gradient of a value, or zeros in its layout, if it is None."""
    if g is not None:
        return g
    if not hasattr(kind, "sharding"):
        return call("zeros", (), dtype=np.asarray(kind).dtype)
    sharding = of_cotangent(kind)
    zeros = call("zeros", kind.shape, dtype=kind.dtype, device=summed(kind).sharding)
    if kind.committed and zeros.sharding == sharding:
        return zeros
    return call("transfer_to", zeros, sharding, "grad", committed=kind.committed)
