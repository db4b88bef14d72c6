"""Maps of differentiated functions: each program has a tape, and the gradient is another map.

The first map calls the function on the tapes of its programs, and returns, besides the results, what the derivatives
have saved. The second one gets that, with the cotangents of the results, and transposes what each program has done.
Both are calls of `map_shards` for the interpreter around the tape, be it the eager one, that of a jit, an inference, or
another tape.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.backend.registry import is_spanning
from shardtensor.core import Op, Operands, Params, bind_by, call, interpreting
from shardtensor.errors import ArgumentError
from shardtensor.functions.derivatives.cotangents import Call, whole, zeros_of
from shardtensor.functions.derivatives.forms import Recording, vjp
from shardtensor.interpreters.differentiation.backward import Step, pulled_back
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.differentiation.taped_values import Taped, kind_of, number_of
from shardtensor.interpreters.program_arrays import tensor_here
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.mesh import mesh_of
from shardtensor.sharding.spec import P
from shardtensor.spmd.maps.launch import MappedArgument, Unmapped
from shardtensor.spmd.program_tape import ProgramTape, Saved
from shardtensor.spmd.scheduling.mapped_program import current
from shardtensor.spmd.value_types import Axes, Types, axes_of, checksum_of, groups_of, types_of
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.value import Aval


class _Map:
    """One recorded map.

    Attributes:
        params: the parameters of the call, the function excepted.
        columns: its arguments, without the tape.
        marks: for each column and program, the positions of leaves that depend on differentiated arguments.
        inputs: the program and the value of each of these; None in place of a program where all of them share it.
        closed: the avals of the values that the function closes over.
        types: the types of the values in each program, if they are known.
        tapes: the tapes of the programs of this process.
    """

    def __init__(self, tape: Tape, columns: Sequence[MappedArgument], params: Params) -> None:
        self.tape = tape
        _, self.submeshes, *_, self.names, self.sizes = params
        self.params = params[1:]
        self.caller = params[3]
        self.axes: Axes = frozenset(self.names)
        self.count = len(self.submeshes)
        self.tapes: dict[int, ProgramTape] = {}
        self.types: Types | None = None
        self._arrays: dict[int, list[Any]] = {}
        self._is_spanning = is_spanning(tuple(itertools.chain.from_iterable([mesh.flat for mesh in self.submeshes])))
        self.columns: list[MappedArgument] = []
        self.marks: list[list[list[int]]] = []
        self.inputs: list[tuple[int | None, Taped]] = []
        self._input_axes: list[list[Axes]] = [[] for _ in range(self.count)]
        self._constants: list[list[Axes | None]] = []
        for column in columns:
            self._take(column)
        tape.split.clear()

    def _take(self, column: MappedArgument) -> None:
        items, each, donated = column
        if type(items) is Unmapped:
            self.columns.append(column)
            self.marks.append([[]] * self.count)
            self._constants.append([])
            return
        constants, marks = [], []
        every = items if each else [items]
        rows = [[self.tape.active(x) for x in leaves(item)] for item in every]
        types = [_differ(self.tape, column, self.axes) if each else frozenset() for column in _columns(rows)]
        self._constants.append([self._type_of(leaf, each) for leaf in _columns(list(map(leaves, every)))])
        for i, (item, states) in enumerate(zip(every, rows, strict=True)):
            where = [k for k, s in enumerate(states) if s is not None]
            if where and donated:
                raise ArgumentError(
                    f"{self.caller}: donate=True gives away the memory of an argument that is differentiated, and its "
                    "gradient needs it; leave out donate"
                )
            for k in where:
                state = states[k]
                assert state is not None
                state.save()
                self.inputs.append((i if each else None, state))
                for axes in [self._input_axes[i]] if each else self._input_axes:
                    axes.append(types[k])
            constants.append(map_leaves(self.tape.constant, item))
            marks.append(where)
        self.columns.append(MappedArgument(constants if each else constants[0], each, donated))
        self.marks.append(marks if each else marks * self.count)

    def _type_of(self, column: Sequence[Any], each: bool) -> Axes | None:
        """Returns the axes along which the items of an argument differ that is not differentiated; None if that is not
        known.
        """
        if not each:
            return frozenset()
        for parts, x, axes in self.tape.split:
            if len(parts) == len(column) and all(map(operator.is_, parts, column)) and self.axes == {*axes}:
                return _split_by(x._aval) & self.axes
        return None

    # -- forwards ----------------------------------------------------------------------------------

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls the function in a program. Returns its result, what derivatives have saved, and what other processes
        know of it: the numbers of the leaves of the result that depend on differentiated arguments, a checksum of what
        it does, and for processes that run no program the axes along which these leaves differ, as the bits of a number
        for each, and the number of values that it closes over.
        """
        program = current()
        assert program is not None
        tape = ProgramTape(self.tape)
        boxed = []
        for argument, marks, types in zip(args, self.marks, self._constants, strict=True):
            if any(t is not None for t in types):
                tape.known |= {id(x): (x, t) for x, t in zip(leaves(argument), types, strict=False) if t is not None}
            values = leaves(argument) if marks[program.number] else []
            for k in marks[program.number]:
                values[k] = tape.variable(tape.adopted(values[k]))
                values[k]._storage.save()
                tape.inputs.append((values[k]._storage.number, values[k]._aval))
            boxed.append(replaced(argument, values) if values else argument)
        try:
            with interpreting(tape):
                result = fn(*boxed)
            states = [tape.active(x) for x in leaves(result)]
            tape.outs = [None if s is None else (s.number, kind_of(s.primal)) for s in states]
            value = map_leaves(tape.returned, result)
        finally:
            tape.end()
        self.tapes[program.number] = tape
        known = self._known(tape, self._input_axes[program.number]) if self._is_spanning else None
        arrays = tape.take_saved()
        if self.tape.outer is not None:
            return value, arrays, known
        self._arrays[program.number] = arrays  # Nothing around has to know them, and programs may save different ones.
        return value, [], known

    def record(self, op: Op, fn: Callable[..., Any]) -> Any:
        """Calls the first map, and records it."""
        tape = self.tape
        outcomes = bind_by(tape.outer, op, (self.columns,), (functools.partial(self.forward, fn), *self.params))
        tapes = [self.tapes[i] for i in sorted(self.tapes)]
        closed = list(dict.fromkeys([state for t in tapes for state in t.closed()]))
        if not tapes and any(count for *_, (*_, count) in outcomes):
            raise ArgumentError(
                f"{self.caller}: the function closes over values that are differentiated, and the map has no device of "
                "this process, which cannot know them; pass them as arguments"
            )
        if not self.inputs and not closed:
            return [result for result, *_ in outcomes]
        if not self._is_spanning or len({known[1] for *_, known in outcomes}) == 1:
            self.types = types_of(tapes, self.axes, self._input_axes) if tapes else self._types_of(*outcomes[0][2])
        self.closed = [kind_of(state.primal) for state in closed]
        for t in tapes:
            numbers = t.closed()
            t.closed_numbers = [numbers.get(state) for state in closed]
            t.close()
        results, outputs, totals, kinds = [], list[Any](), list[Any](), list[Any]()
        for i, (result, _, known) in enumerate(outcomes):
            values = leaves(result)
            outs = known[0] if known is not None else _numbers(self.tapes[i])
            for k in range(len(values)):
                if outs[k] is None:
                    outputs.append(None)
                    totals.append(None)
                else:
                    values[k] = tape.variable(values[k])
                    values[k]._storage.save()  # A derivative may have saved it, too.
                    outputs.append(values[k]._storage)
                    totals.append(self._one_value(values[k]._storage.number, outs[k]))
                kinds.append(kind_of(values[k]))
            results.append(replaced(result, values))
        self._counts = [len(leaves(result)) for result in results]
        states = [*[s for _, s in self.inputs], *closed]
        saved = {"arrays": [self._arrays.pop(i, arrays) for i, (_, arrays, _) in enumerate(outcomes)]}
        of_states = [None if s is None else kind_of(s.primal) for s in states]
        step = len(tape.steps)
        tape.add_call(op, {}, vjp(self.backward), states, of_states, outputs, [*kinds, *kinds], saved)
        for recorded in tape.steps[step:]:  # The first call of `remat` records nothing.
            recorded.outputs = [*map(number_of, outputs), *totals]
        self._owners = [i for i, _ in self.inputs]
        del self.tape, self.columns, self.inputs  # The step keeps this object, and what it has saved, nothing else.
        return results

    def _known(self, tape: ProgramTape, inputs: Sequence[Axes]) -> tuple[list[int | None], int, list[int], int]:
        """Returns what other processes know of a program; see `forward`."""
        numbers, types = _numbers(tape), types_of([tape], self.axes, [inputs])
        assert types is not None  # One program does the same as itself.
        axes = [0 if n is None else sum(1 << self.names.index(name) for name in types.differ[n]) for n in numbers]
        return numbers, checksum_of(tape), axes, len(tape.closed())

    def _types_of(self, numbers: Sequence[int | None], _: int, axes: Sequence[int], __: int) -> Types | None:
        """Returns the types of the results, in a process that runs no program, from what it knows of one of them."""
        if any(row != self._input_axes[0] for row in self._input_axes):
            return None
        types = Types(self.axes)
        for n, bits in zip(numbers, axes, strict=True):
            if n is not None:
                types.differ[n] = frozenset([name for k, name in enumerate(self.names) if bits >> k & 1])
        return types

    def _one_value(self, number: int, out: int | None) -> int | None:
        """Notes that a result is one value of all programs along some axes. Returns the number for its cotangent."""
        if self.types is None or out is None or not (one := self.axes - self.types.differ[out]):
            return None
        total = self.tape.next_number
        self.tape.next_number += 1
        self.tape.one_value[number] = total, one
        return total

    # -- backwards ---------------------------------------------------------------------------------

    def backward(self, g: Any, recorded: Call) -> list[Any]:
        """Returns the cotangents of the inputs, by the second map."""
        cotangents = g if type(g) is list else [g]
        half, at = len(cotangents) // 2, 0
        parts, totals = list[Any](), list[Any]()
        for i in range(self.count):
            n = self._counts[i]
            kinds = recorded.results[at : at + n]
            for rows, first in ((parts, at), (totals, half + at)):
                rows.append(
                    [x if x is None else whole(x, k) for x, k in zip(cotangents[first : first + n], kinds, strict=True)]
                )
            at += n
        used = [any(x is not None for x in column) for column in _columns(parts)]
        columns = [
            MappedArgument(parts, True),
            MappedArgument(totals, True),
            MappedArgument(recorded.saved["arrays"], True),
        ]
        pulled = call("map_shards", columns, functools.partial(self._pulled, used), *self.params)
        return self._gradients(pulled, recorded)

    def _pulled(self, used: Sequence[bool], parts: Sequence[Any], totals: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Transposes what one program has done."""
        program = current()
        assert program is not None
        tape = self.tapes[program.number]
        types = self.types
        arrays = list(map(tensor_here, arrays))
        cotangents: dict[int, list[Any]] = {}
        for k, out in enumerate(tape.outs):
            if out is None:
                continue
            g = tensor_here(parts[k])
            if g is None and used[k]:
                g = zeros_of(out[1])
            if g is not None:
                g = g if types is None else types.partial(g, out[0])
                cotangents.setdefault(out[0], []).append(g)
            if totals[k] is not None:
                cotangents.setdefault(out[0], []).append(tensor_here(totals[k]))
        steps = [_restored(step, arrays, types) for step in tape.steps]
        closed = list(zip(tape.closed_numbers, self.closed, strict=True))
        inputs = [*tape.inputs, *[(n, kind) for n, kind in closed if n is not None]]
        pulled = iter(pulled_back(steps, tape.uses, cotangents, inputs, types, own=False))
        mine = [next(pulled) for _ in tape.inputs]
        return mine, [None if n is None else next(pulled) for n, _ in closed]

    def _gradients(self, pulled: Sequence[Any], recorded: Call) -> list[Any]:
        """Returns the cotangents of the inputs: of one that programs share, the sum of those of all programs."""
        rows = [iter(mine) for mine, _ in pulled]
        gradients: list[Any] = []
        for n, i in enumerate(self._owners):
            gradients.append(next(rows[i]) if i is not None else _sum([next(row) for row in rows], recorded, n))
        first = len(self._owners)
        columns = _columns([closed for _, closed in pulled])
        return [*gradients, *[_sum(column, recorded, first + n) for n, column in enumerate(columns)]]


class MapDerivative(Recording):
    """The derivative of a map."""

    def record(self, tape: Tape, op: Op, operands: Operands, params: Params, /) -> Any:
        """Calls a map, and records it."""
        return _Map(tape, operands[0], params).record(op, params[0])


def _numbers(tape: ProgramTape) -> list[int | None]:
    """Returns the numbers of the results of a program; None for those without a derivative."""
    return [out and out[0] for out in tape.outs]


def _columns(rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return list(itertools.zip_longest(*rows))


def _restored(step: Step, arrays: Sequence[Any], types: Types | None) -> Step:
    """Returns a copy of a step, with the arrays that its derivative has saved."""

    def restored(x: Any) -> Any:
        return arrays[x.number] if type(x) is Saved else x

    copy = step.with_saved(
        {name: restored(x) if type(x) is Saved else map_leaves(restored, x) for name, x in step.saved.items()}
    )
    if types is not None and (axes := axes_of(step)) and axes <= types.axes:
        copy.derivative = step.derivative.with_types(groups_of(step) is None)  # type: ignore[attr-defined]
    return copy


def _differ(tape: Tape, items: Sequence[Taped | None], axes: Axes) -> Axes:
    """Returns the axes along which the items of an argument may differ: those that split the tensor of which they are
    the parts along the axes of the map, if they are that.
    """
    numbers = list(map(number_of, items))
    for step in reversed(tape.steps):
        is_split = step.op.name == "split_over"
        if not is_split and "same elements" not in step.op.tags:
            break
        if is_split and step.outputs == numbers and axes == {*step.params["axes"]}:
            return axes & _split_by(step.kinds[0])
    return axes


def _split_by(value: Aval) -> Axes:
    return frozenset([axis for chain in value.sharding.spec.chains for axis in chain])


def _sum(cotangents: Sequence[Any], recorded: Any, number: int) -> Any:
    """Returns the sum of the cotangents of programs, of a value that they share: they are partial sums of its own."""
    gs = [g for g in cotangents if g is not None]
    if len(gs) < 2:
        return gs[0] if gs else None
    kind = recorded.kinds[number]
    devices = [g.sharding.mesh.flat for g in gs]
    if len({*devices}) == len(gs) and all(len(own) == 1 for own in devices):
        row = tuple([device for (device,) in devices])
        mesh = kind.sharding.mesh if isinstance(kind, Aval) and kind.sharding.mesh.flat == row else mesh_of(row)
        parts = call("assemble", [call("unsqueeze", g, axis=0) for g in gs], mesh, P(mesh.axis_names))
        target = recorded.targets[number]
        fits = not isinstance(target, NamedSharding) or target.mesh == mesh
        return recorded.add_up(number if fits else -1, "sum", parts, axis=0)
    where = kind.sharding if isinstance(kind, Aval) else gs[0].sharding
    moved = [call("transfer_to", g, where, "grad", committed=True) for g in gs]
    return functools.reduce(lambda a, b: call("add", a, b), moved)
