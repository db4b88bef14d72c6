"""Stencils: writes of functions of slices, for which every device receives, of each tensor, one block with a halo.

Eager mode computes each operator in the layout of its result, which the split rule gives: slices of ``n - 2`` of ``n``
rows are split at other rows than the tensor, so that each of them is transferred by itself, and so is the value that is
written. A stencil computes the written elements where the base has them. Of each tensor that is read, a device needs
the block that contains its elements of all slices; it receives the part of the block that it does not hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.registry import is_remote
from shardtensor.communication.between_processes.processes import described, note
from shardtensor.communication.messages import as_dtype
from shardtensor.communication.transfer import announce_reading
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.core import Interpreter, declared
from shardtensor.functions.algorithms.shards import shards_of
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.jit.grouping.window_writes import function_operands, has_function
from shardtensor.interpreters.programs.passes import Setting
from shardtensor.interpreters.programs.program import Equation, Program, Var, vars_of
from shardtensor.interpreters.programs.replay import OWN_STEPS, Step, Values, bytes_of, plan_of, step_of
from shardtensor.sharding.copy_plan import Line, Region
from shardtensor.sharding.layout import Grid, Shape, as_sharding
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.tensor import ShardedTensor, shard_arrays, tensor_of, without_elements
from shardtensor.tensor.value import Aval, aval

Corner = tuple[int, ...]


def stencil(tensors: Any, /) -> None:
    """Writes a function of slices of tensors into a slice of the first one; see the module."""


STENCIL = declared(stencil, operands=("tensors",), variadic=True, error_name="jit")
"""The operator of stencils. It is not in OPS, since only rewritten programs have it. Its operands are the base and
the tensors that are read; its program is that of the slices, of which the last equation is the write.
"""


class Slice(NamedTuple):
    """A value that a stencil reads.

    Attributes:
        source: the tensor of which it is a slice.
        corner: the index of its first element in the tensor.
    """

    source: Var
    corner: Corner


# -- their steps -----------------------------------------------------------------------------------


def _step(equation: Equation, program: Program, interpreter: Interpreter, dead: Sequence[int]) -> Step:
    """Returns the step of a stencil. Where devices share a memory, its equations run one by one, as in eager mode."""
    plan, result = StencilPlan(equation, program), equation.results.number
    *inside, _ = equation.programs[0].made()
    backend = equation.results.kind.backend
    runs = interpreter is EAGER and not backend.simulated
    alone = functools.cache(lambda: [step_of(e, equation.programs[0], EAGER) for e in equation.programs[0].equations])

    def step(values: Values) -> None:
        if runs and backend.on_host:
            for one in alone():
                one(values)
            for v in inside:
                values[v.number] = None
        else:
            values[result] = (plan.run if runs else plan.infer)(values)
        for number in dead:
            values[number] = None

    return step


OWN_STEPS[STENCIL] = _step

# -- finding them ----------------------------------------------------------------------------------


def with_stencils(program: Program, _: Setting) -> Program:
    """Returns a program in which the writes that move fewer bytes as stencils are stencils."""
    equations: dict[int, Equation] = dict(enumerate(program.equations))
    changes = 0
    known: dict[Any, bool] = {}
    views = {e.results: e for e in program.equations if e.op.name == "view" and type(e.results) is Var}
    for k, inside, stencil in stencils_in(program):
        eager = [program.equations[i] for i in (*inside, k)]
        read = [views[v] for v in dict.fromkeys([v for e in eager for v in e.reads()]) if v in views]
        key = _form_of([*read, *eager])
        if key not in known:
            known[key] = StencilPlan(stencil, program).size < bytes_of([*read, *eager])
        if known[key]:
            equations[k] = stencil
            changes += 1
            for i in inside:
                del equations[i]
    return dataclasses.replace(program, equations=list(equations.values())) if changes else program


def _form_of(equations: Sequence[Equation]) -> Any:
    """Returns what the transfers of equations depend on, which is equal for the steps of a loop."""
    numbers: dict[Var, int] = {}

    def form(x: Any) -> Any:
        if type(x) is Var:
            return numbers.setdefault(x, len(numbers)), x.kind
        return id(x) if isinstance(x, np.ndarray) else (type(x), x)

    forms = []
    for e in equations:
        where = e.params if e.into is None else (e.into.boxes, e.into.chains)
        forms.append((e.op.name, where, e.writes, form(e.results), *map(form, e.operands)))
    return tuple(forms)


def stencils_in(program: Program) -> Iterator[tuple[int, list[int], Equation]]:
    """Yields the stencils that a program contains: the number of the write, the numbers of the equations that compute
    what it writes, and the stencil that stands for all of them.
    """
    makers, users = program.makers(), program.users()
    for k, write in enumerate(program.equations):
        corner = _written_corner(write)
        if corner is None:
            continue
        inside = _chain(program, k, makers, users)
        body = [program.equations[i] for i in inside]
        slices = _slices(program, [*body, write], makers)
        if slices is None or not any(type(s.source) is Var for s in slices.values()):
            continue
        base = write.operands[0]
        sources = [v for v in dict.fromkeys(s.source for s in slices.values()) if v != base]
        inner = Program((), (), (*body, write), (write.results,))
        stencil = Equation(
            STENCIL, (base, *sources), (), write.results, write.into, write.window, True, {0: inner}, write.source
        )
        yield k, inside, stencil


def _written_corner(write: Equation) -> Corner | None:
    """Returns the index of the first element that a write replaces, if it is one of a function to a box of a tensor."""
    if not write.writes or write.programs or not has_function(write) or not isinstance(write.results.kind, Aval):
        return None
    value = write.results.kind
    if value.sharding.mesh.size == 1 or value.unreduced or value.offloaded or not value.ndim:
        return None
    return corner_of(write.into)


def corner_of(view_spec: ViewSpec | None) -> Corner | None:
    """Returns the first index of a view that is a box of its base with all of its dimensions; None of another view."""
    if view_spec is None or view_spec.part is not None or len(view_spec.boxes) != 1:
        return None
    box = view_spec.boxes[0]
    ranges = [e for e in box.entries if type(e) is tuple and (e[2] == 1 or e[1] < 2)]
    if box.order != tuple(range(len(box.over))) or len(ranges) < len(box.entries):
        return None
    return tuple([first for first, _, _ in ranges])


def _chain(
    program: Program, k: int, makers: Mapping[Var, int], users: Mapping[Var, Sequence[int]]
) -> list[int]:  # fmt: skip
    """Returns the numbers of the elementwise equations whose results only the k-th equation and one another use.

    The base that is written is not among them: the elements that the write keeps are needed whole.
    """
    write = program.equations[k]
    shape = write.window.shape  # type: ignore[union-attr]
    inside: set[int] = set()
    open_ = [v for v in vars_of(function_operands(write)) if v in makers]
    while open_:
        v = open_.pop()
        equation = program.equations[makers[v]]
        if v == write.operands[0] or makers[v] in inside:
            continue
        if not {*inside, k}.issuperset(users[v]) or not _is_elementwise(equation, shape):
            continue
        inside.add(makers[v])
        # Another use of its operands may have been found outside before this equation was.
        open_ += [x for i in (*inside, k) for x in vars_of(function_operands(program.equations[i])) if x in makers]
        open_ = [x for x in dict.fromkeys(open_) if makers[x] not in inside]
    return sorted(inside)


def _is_elementwise(equation: Equation, shape: Shape) -> bool:
    op = equation.op
    if equation.writes or type(equation.results) is not Var or not isinstance(equation.results.kind, Aval):
        return False
    return (
        (op.is_ufunc or op.name == "where") and equation.results.kind.shape == shape and plan_of(equation) is not None
    )


def _slices(program: Program, equations: Sequence[Equation], makers: Mapping[Var, int]) -> dict[Var, Slice] | None:
    """Returns the values that equations read from outside; None if an array does not have the shape of the
    window, or is a host array: devices have no part of it.
    """
    write = equations[-1]
    value, shape = write.results.kind, write.window.shape  # type: ignore[union-attr]
    results = {e.results for e in equations}
    slices: dict[Var, Slice] = {}
    if any(isinstance(x, np.ndarray) and x.ndim for e in equations for x in function_operands(e)):
        return None
    for v in dict.fromkeys([v for e in equations for v in vars_of(function_operands(e))]):
        if v in results or isinstance(v.kind, type):
            continue
        if not isinstance(v.kind, Aval) or v.kind.shape != shape or v.kind.unreduced or v.kind.offloaded:
            return None
        if v.kind.sharding.mesh != value.sharding.mesh:
            return None
        view = program.equations[makers[v]] if v in makers else None
        if view is not None and view.op.name == "view":
            corner = corner_of(view.into)
            if corner is None or not isinstance(view.operands[0].kind, Aval):
                return None
            slices[v] = Slice(view.operands[0], corner)
        else:
            slices[v] = Slice(v, (0,) * len(shape))
    return slices


# -- layouts ---------------------------------------------------------------------------------------


class StencilPlan:
    """Which block of each tensor a device receives, and what it computes with it.

    Args:
        equation: the stencil.
        program: the program around it, which has its slices.

    Attributes:
        size: the number of bytes that are sent between devices.
    """

    def __init__(self, equation: Equation, program: Program) -> None:
        *self._body, self._write = equation.programs[0].equations
        slices = _slices(program, [*self._body, self._write], program.makers())
        assert slices is not None
        self._value: Aval = equation.results.kind
        self._window: Shape = self._write.window.shape  # type: ignore[union-attr]
        self._corner = corner_of(equation.into) or ()
        self._base = equation.operands[0].number
        self._slices = slices
        read = [x for e in (*self._body, self._write) for x in function_operands(e)]
        self._numbers = [x for x in read if type(x) is not Var or isinstance(x.kind, type)]
        self._blocks: dict[Var, tuple[Corner, Corner]] = {}
        for s in slices.values():
            low, high = self._blocks.get(s.source, (s.corner, s.corner))
            self._blocks[s.source] = tuple(map(min, low, s.corner)), tuple(map(max, high, s.corner))
        self._plans = {
            source: _block_plan(self._value, self._corner, self._window, source.kind, *block)
            for source, block in self._blocks.items()
        }
        self.size = sum([plan.size * _itemsize(source) for source, plan in self._plans.items()])

    def infer(self, values: Any) -> ShardedTensor:
        """Records the transfers, if a log is active, and returns the result without elements."""
        for number in dict.fromkeys([self._base, *[s.number for s in self._plans]]):
            announce_reading(values[number])
        copied = not (self._value.backend.on_host or self._value.backend.simulated)
        for source, plan in self._plans.items():
            plan.announce(_itemsize(source), copied, "stencil")
        return without_elements(self._value)

    def run(self, values: Any) -> ShardedTensor:
        """Returns the new value of the base, on devices with separate memories."""
        value, backend = self._value, self._value.backend
        if value.spans:
            numbers = [values[x.number] if type(x) is Var else x for x in self._numbers]
            note(f"stencil({', '.join(map(described, (value, *numbers)))})")
        blocks = {
            source: plan.run((shard_arrays(values[source.number]),), source.kind.dtype)  # type: ignore[union-attr]
            for source, plan in self._plans.items()
        }
        arrays = list(shard_arrays(values[self._base]))
        for k, device in enumerate(value.grid.devices):
            if is_remote(device):
                continue
            parts = value.grid.parts[k].tolist()
            part = [_written(value, self._corner, self._window, d, p) for d, p in enumerate(parts)]
            with backend.on(device):
                arrays[k] = backend.contiguous(backend.xp.asarray(arrays[k], copy=True))
            if any(first == last for first, last in part):
                continue
            elements = self._local(k, part, {source: arrays_of[k] for source, arrays_of in blocks.items()}, values)
            begins = [begin for begin, _ in value.grid.box(k)]
            here = tuple([slice(a + c - b, z + c - b) for (a, z), c, b in zip(part, self._corner, begins, strict=True)])
            with backend.on(device):
                arrays[k][here] = as_dtype(backend, elements, value.dtype)
        return shards_of(value, arrays).assembled(value).tensor()

    def _local(self, k: int, part: Sequence[tuple[int, int]], blocks: Mapping[Var, Any], values: Any) -> Any:
        """Returns the elements that are written on the k-th device, as an array."""
        backend, device = self._value.backend, self._value.grid.devices[k]
        sizes = tuple([last - first for first, last in part])
        layout = as_sharding(device, len(sizes), "jit")
        local: dict[int, Any] = {}
        for v, (source, corner) in self._slices.items():
            low, _ = self._blocks[source]
            index = tuple([slice(c - a, c - a + n) for c, a, n in zip(corner, low, sizes, strict=True)])
            with backend.on(device):
                array = backend.view(blocks[source], index)
            local[v.number] = tensor_of(aval(sizes, v.kind.dtype, layout, True), (array,))  # type: ignore[union-attr]
        get = functools.partial(_known, local, values)
        for equation in self._body:
            operands = map_leaves(get, equation.operands)
            local[equation.results.number] = EAGER.apply(equation.op, operands, equation.params)
        operands = tuple([get(x) for x in function_operands(self._write)])
        op = self._write.op
        result = operands[0] if "assigns" in op.tags else EAGER.apply(op, operands, self._write.params)
        return shard_arrays(result)[0]


def _written(value: Aval, corner: Corner, window: Shape, d: int, part: int) -> tuple[int, int]:
    """Returns the indices of a window of a base along a dimension that a part of the base has."""
    begin, end = value.grid.offsets[d][part : part + 2].tolist()
    first = min(max(begin - corner[d], 0), window[d])
    return first, max(min(end - corner[d], window[d]), first)


@functools.lru_cache(256)
def _block_plan(value: Aval, corner: Corner, window: Shape, source: Aval, low: Corner, high: Corner) -> TransferPlan:
    """Returns the transfer of the blocks of a tensor, which follow one another in each dimension.

    Args:
        value: the aval of the base that is written.
        corner, window: the first index and the shape of the window.
        source: the aval of the tensor.
        low, high: the least and the greatest first index of its slices.
    """
    grid = value.grid
    lines: list[list[Line]] = []
    bounds = []
    for d in range(len(window)):
        at, ends, row = 0, [0], []
        for part in range(grid.counts[d]):
            first, last = _written(value, corner, window, d, part)
            size = last - first + high[d] - low[d] if last > first else 0
            row.append(Line(at, at + size, d, low[d] + first))
            at += size
            ends.append(at)
        lines.append([line for line in row if line.end > line.begin])
        bounds.append(np.array(ends, np.int64))
    blocks = Grid(grid.devices, tuple(bounds), grid.parts)
    return TransferPlan([Region(0, row) for row in itertools.product(*lines)], (source.grid,), blocks)


def _itemsize(v: Var) -> int:
    assert isinstance(v.kind, Aval)
    return v.kind.dtype.itemsize


def _known(local: Mapping[int, Any], values: Any, x: Any) -> Any:
    if type(x) is not Var:
        return x
    return local[x.number] if x.number in local else values[x.number]
