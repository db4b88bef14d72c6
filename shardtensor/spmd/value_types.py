"""The types of values in the programs of a map: the axes along which they may differ.

They are inferred from what the programs have done: the result of a sum over an axis is one value of all programs along
it, and a result computed of such values, and of the same numbers, is one value, too. Arrays that are not differentiated
may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.functions.derivatives import derivative_of
from shardtensor.functions.derivatives.cotangents import whole
from shardtensor.interpreters.differentiation.backward import WRITTEN, Step, Typed, added
from shardtensor.interpreters.program_arrays import tensor_here
from shardtensor.sharding.layout import NamedSharding
from shardtensor.spmd.axes import axis_index
from shardtensor.spmd.program_tape import ProgramTape
from shardtensor.tensor.tensor import SCALARS

Axes = frozenset[str]


class Partial:
    """A contribution of one program to a value of all programs along axes: those of all are yet to be added."""

    __slots__ = ("axes", "g")

    def __init__(self, g: Any, axes: Axes) -> None:
        self.g = g
        self.axes = axes


class Types(Typed):
    """The types of the values of programs that all do the same.

    Attributes:
        axes: the axes of the map.
        differ: for the number of each value, the axes along which those of the programs may differ.
        before: for the first result of each call, those along which the operands may differ.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.differ: dict[int, Axes] = {}
        self.before: dict[int, Axes] = {}

    def note(self, step: Step, constants: Mapping[int, Axes]) -> None:
        """Infers the types of the results of a call: they may differ where operands do, and the results of sums over an
        axis do not. Of some ``constants`` the type is known.
        """
        before: Axes = frozenset()
        for k, (n, kind) in enumerate(zip(step.inputs, step.kinds, strict=True)):
            if n is not None:
                before |= self.differ[n]
            elif k in constants:
                before |= constants[k]
            elif not _is_number(kind):  # Arrays that are not followed.
                before = self.axes
        if axes := axes_of(step):
            before |= axes & self.axes
            joins = step.derivative.joins and axes <= self.axes and groups_of(step) is None  # type: ignore[attr-defined]
            after = before - axes if joins else before
        else:
            is_row = step.derivative is WRITTEN or step.derivative is derivative_of(step.op)
            after = before = before if is_row else self.axes
        for n in step.outputs:
            if n is not None:
                self.differ[n] = after
                self.before.setdefault(_first(step), before)

    def contribution(self, step: Step, number: int, g: Any) -> Any:
        """See `Typed`."""
        axes = self.before[_first(step)] - self.differ[number]
        return Partial(g, axes) if axes else g

    def partial(self, g: Any, number: int) -> Any:
        """Returns the cotangent of the result of one program as a contribution."""
        axes = self.axes - self.differ[number]
        return Partial(g, axes) if axes else g

    def joined(self, cotangents: list[Any], kind: Any) -> list[Any]:
        """See `Typed`."""
        groups: dict[Axes, list[Any]] = {}
        parts = []
        for g in cotangents:
            if type(g) is Partial:
                groups.setdefault(g.axes, []).append(g.g)
            else:
                parts.append(g)
        for axes, gs in groups.items():
            parts.append(tensor_here(call("psum", whole(added(gs, kind), kind), tuple(sorted(axes)))))
        return parts

    def left(self, number: int, cotangents: list[Any]) -> list[Any]:
        """See `Typed`. The first program returns the cotangents that all have in common."""
        parts = []
        for g in cotangents:
            axes = g.axes if type(g) is Partial else frozenset()
            if not any(axis_index(axis) for axis in self.axes - self.differ[number] - axes):
                parts.append(g.g if type(g) is Partial else g)
        return parts


def _first(step: Step) -> int:
    return next(n for n in step.outputs if n is not None)


def _is_number(kind: Any) -> bool:
    return type(kind) in SCALARS or isinstance(kind, np.generic) or not hasattr(kind, "shape")


def types_of(tapes: Sequence[ProgramTape], axes: Axes, inputs: Sequence[Sequence[Axes]]) -> Types | None:
    """Returns the types of the values of all programs; None if these do not do the same.

    Args:
        tapes: the tapes of the programs of this process.
        axes: the axes of the map.
        inputs: for each program the axes along which its arguments may differ.
    """
    first = tapes[0]
    if any(row != inputs[0] for row in inputs) or not all(_alike(first, other) for other in tapes[1:]):
        return None
    types = Types(axes)
    for (n, _), differ in zip(first.inputs, inputs[0], strict=True):
        types.differ[n] = differ
    types.differ.update(dict.fromkeys(first.closed().values(), frozenset()))
    for k, step in enumerate(first.steps):
        types.note(step, first.constant_types.get(k, {}))
    return types


def _alike(a: ProgramTape, b: ProgramTape) -> bool:
    """Whether two programs have made the same calls, with the same numbers."""
    if len(a.steps) != len(b.steps) or a.closed() != b.closed() or a.constant_types != b.constant_types:
        return False
    if [n for n, _ in a.inputs] != [n for n, _ in b.inputs]:
        return False
    if [out and out[0] for out in a.outs] != [out and out[0] for out in b.outs]:
        return False
    return all(map(_same_call, a.steps, b.steps))


def _same_call(a: Step, b: Step) -> bool:
    if a.op is not b.op or a.inputs != b.inputs or a.outputs != b.outputs or not _same(a.params, b.params):
        return False
    pairs = zip(a.inputs, a.kinds, b.kinds, strict=True)
    return all(n is not None or not (_is_number(x) or _is_number(y)) or _same(x, y) for n, x, y in pairs)


def _same(a: Any, b: Any) -> bool:
    """Whether parameters of two calls are known to be equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, NamedSharding) and a.mesh.size == b.mesh.size == 1:
        return True  # Each is on the device of its program.
    return isinstance(a == b, (bool, np.bool_)) and bool(a == b)


def checksum_of(tape: ProgramTape) -> int:
    """Returns a checksum of what `_alike` compares, for programs of several processes."""
    import zlib  # Programs of one process do not need it.

    ends = [n for n, _ in tape.inputs], [out and out[0] for out in tape.outs], list(tape.closed().values())
    constants = {k: {n: sorted(axes) for n, axes in types.items()} for k, types in tape.constant_types.items()}
    calls = [
        (step.op.name, step.inputs, step.outputs, _text(step.params), [_text(k) for k in step.kinds if _is_number(k)])
        for step in tape.steps
    ]
    return zlib.crc32(repr([ends, constants, calls]).encode())


def _text(x: Any) -> str:
    if isinstance(x, (tuple, list)):
        return f"{type(x).__name__}{list(map(_text, x))}"
    if isinstance(x, dict):
        return str({name: _text(value) for name, value in x.items()})
    if isinstance(x, NamedSharding) and x.mesh.size == 1:
        return "here"
    return f"{type(x).__name__} {x!r}" if _is_number(x) else f"an array {id(x)}"


def axes_of(step: Step) -> Axes:
    """Returns the axes of a collective; none of another call."""
    if "spmd" not in step.op.tags or "axis_name" not in step.params:
        return frozenset()
    names = step.params["axis_name"]
    return frozenset((names,) if isinstance(names, str) else names)


def groups_of(step: Step) -> Any:
    """Returns the groups of programs in which a collective is executed; None for all of them."""
    return step.params.get("axis_index_groups")
