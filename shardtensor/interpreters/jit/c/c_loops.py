"""Loops whose trips C runs, without Python in between.

All nodes of the functions of such a loop are kernels on whole buffers of the host, or arithmetic of addresses and of
Python numbers. Python runs before and after the trips (see `shardtensor.interpreters.jit.c.c_trips`), and every few
milliseconds in between, where signals are delivered. Equations that depend on nothing in the loop are computed once,
before them.

The kernels, and so the bits, are those of the loop that Python runs: where arrays have to be copied first, where one
call of a kernel is long enough to be divided over threads, and until the kernels are compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from shardtensor.backend.registry import in_job
from shardtensor.communication.transfer import whole_array
from shardtensor.core import default_interpreter, outermost
from shardtensor.functions.random.random_keys import SymbolicKey
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.jit.c.c_executor import CompiledLoops
from shardtensor.interpreters.jit.c.c_trips import COPIES, ENDLESS, FILLED, WINDOWS, Loop, Part, Run, Unfit, is_number
from shardtensor.interpreters.jit.grouping.fused import Fused, reports_errors
from shardtensor.interpreters.jit.grouping.fused_alone import FusedProduct, FusedReduction, FusedTrips, is_alone
from shardtensor.interpreters.jit.grouping.groups import is_kernel, is_on_host
from shardtensor.interpreters.jit.kernels.expressions import has_c
from shardtensor.interpreters.programs.program import Equation, Program, Var, kind_of, replace_vars
from shardtensor.interpreters.programs.replay import Node, Step, Values, step_of
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval

_UNKNOWN = 1 << 11
"""The number of trips that stands for one that a program does not know."""

# -- which loops C can run -------------------------------------------------------------------------


def trips_of(equation: Equation) -> int:
    """Returns the number of trips of a loop, about; 1 for a branch."""
    if equation.op.name == "conditional_loop":
        return _UNKNOWN
    if equation.op.name != "counted_loop":
        return 1
    begin, end = equation.operands[2]
    return max(end - begin, 1) if type(begin) is type(end) is int else _UNKNOWN


def repeats_in_c(equation: Equation, programs: Sequence[Program], nodes: Sequence[Sequence[Node]]) -> bool:
    """Returns whether C may run the trips of a loop.

    Args:
        equation: the loop.
        programs: those of its functions.
        nodes: the nodes of each, where short loops have kernels, too.
    """
    if "loop" not in equation.op.tags:
        return False
    if not all(_is_known(v) for program in programs for v in (*program.inputs, *program.free(), *program.outputs)):
        return False
    pairs = zip(programs, nodes, strict=True)
    return all(_is_task(node) for program, some in pairs for node in _split(program, some)[1])


def _split(program: Program, nodes: Sequence[Node]) -> tuple[list[Equation], list[Node]]:
    """Returns the equations that are computed once, before the trips, since they depend on nothing in the loop, and the
    nodes of each trip.
    """
    known = set(program.free())
    once: list[Equation] = []
    rest: list[Node] = []
    for node in nodes:
        equation = node[0]
        has_kernel = len(node) > 1 or is_kernel(node, True, True) or is_alone(equation)
        if has_kernel or equation.programs or not known.issuperset(equation.reads()):
            rest.append(node)
            continue
        known.update(equation.makes())
        once.append(equation)
    return once, rest


def _is_known(v: Var) -> bool:
    """Whether a value is an array of the host or a number."""
    return not isinstance(v.kind, Aval) or is_on_host(v.kind)


def _is_task(node: Node) -> bool:
    """Whether a node is a kernel on arrays of the host, or computes only where an array is, or a Python number."""
    if not all(_is_known(v) for equation in node for v in (*equation.makes(), *equation.reads())):
        return False
    (equation, *others) = node
    if others or is_kernel(node, True, True) or is_alone(equation):
        return True
    if equation.writes:
        return _is_assignment(equation)
    return _is_view(equation) or _is_copy(equation) or is_number(equation)


def _is_view(equation: Equation) -> bool:
    """Whether an equation selects elements at fixed places, or copies all."""
    if equation.op.name == "getitem":
        (index,) = equation.params
        return all(type(k) is int for k in (index if type(index) is tuple else (index,)))
    return "same elements" in equation.op.tags or equation.op.name in WINDOWS or equation.op.name in FILLED


def _is_assignment(equation: Equation) -> bool:
    """Whether an equation writes an array or a number of the same dtype to the elements of a view."""
    if "assigns" not in equation.op.tags or equation.into is None or equation.into.part is not None:
        return False
    _, value, index = equation.operands
    kind, dtype = kind_of(value), equation.results.kind.dtype
    if isinstance(kind, type):
        return index is Ellipsis and kind in _DTYPES and _DTYPES[kind] == dtype
    return index is Ellipsis and kind.dtype == dtype


def _is_copy(equation: Equation) -> bool:
    """Whether an equation copies parts of operands of the same dtype, at fixed places, into its result."""
    if equation.op.name not in COPIES or not isinstance(equation.results.kind, Aval) or equation.params[-1] is None:
        return False
    if equation.op.name == "roll" and any(type(p) is tuple and len(p) != 1 for p in equation.params):
        return False
    dtypes = [getattr(kind_of(x), "dtype", None) for x in leaves(equation.operands)]
    return all(dtype == equation.results.kind.dtype for dtype in dtypes)


_DTYPES = {kind: np.dtype(kind) for kind in (bool, int, float)}
"""The dtypes of Python numbers."""


def loop_of(equation: Equation, parts: Sequence[Part], dead: Sequence[int]) -> CLoop | None:
    """Returns a loop that C runs once its kernels are compiled; None if some of them have no C.

    Args:
        equation: the loop.
        parts: its functions: the body, after the condition if there is one.
        dead: the numbers of the values that are dropped after it.
    """
    kernels = [fused for part in parts for fused in part.kernels.values()]
    passed = leaves((equation.operands, *[part.program.result for part in parts]))
    if not all(map(_has_c, kernels)) or any(type(x) is SymbolicKey for x in passed):
        return None
    loop = CLoop(equation, parts, kernels, dead)
    return loop if loop.fits else None


def _has_c(fused: Fused) -> bool:
    if type(fused) is FusedProduct:
        return True
    return type(fused) in (Fused, FusedReduction) and has_c(fused.kernel) and not fused.spans


# -- loops -----------------------------------------------------------------------------------------


class CLoop:
    """A loop that C runs; see `loop_of`.

    Attributes:
        fits: whether the body returns arrays and numbers.
        trips: stands for the functions that run trips.
    """

    def __init__(
        self, equation: Equation, parts: Sequence[Part], kernels: Sequence[Fused], dead: Sequence[int]
    ) -> None:
        self._equation = equation
        self.trips = FusedTrips()
        self._kernels = [*kernels, self.trips]
        self._dead = dead
        self._free = list(dict.fromkeys([v for part in parts for v in part.program.free()]))
        split = [_split(part.program, part.nodes) for part in parts]
        both = zip(parts, split, strict=True)
        self._once = [step_of(e, part.program, EAGER) for part, (once, _) in both for e in once]
        self._loop = Loop(equation, [part._replace(nodes=rest) for part, (_, rest) in zip(parts, split, strict=True)])
        self.fits = self._loop.returns_arrays

    def step(self, alone: Step) -> Step:
        """Returns the step of the loop.

        Args:
            alone: the step in which Python runs the trips.
        """
        names = [v for v in (*self._loop.results, *self._loop.stacked) if v is not None]

        def step(values: Values) -> None:
            results = self._results(values)
            if results is None:
                alone(values)
                return
            for v, x in zip(names, results, strict=True):
                values[v.number] = x
            for number in self._dead:
                values[number] = None

        return step

    def _results(self, values: Values) -> list[Any] | None:
        """Returns the results; None where Python has to run the loop."""
        if reports_errors() or in_job() or any(fused.compiled is None for fused in self._kernels):
            return None  # In a job, processes compare the calls of each trip.
        if not self._loop.is_counted and outermost() is not default_interpreter():
            return None  # Each trip records its transfers.
        init = leaves(replace_vars(self._equation.operands[0], values))
        try:
            begin, trips, xs = 0, ENDLESS, []
            if self._loop.is_counted:
                sequences, bounds = replace_vars(self._equation.operands[1:], values)
                begin, end = [operator.index(x) for x in bounds]
                trips, xs = end - begin, leaves(sequences)
        except TypeError:
            return None  # Python's loop raises the error.
        if trips < 1:
            return None
        loops = cast(CompiledLoops, self.trips.compiled)
        around = {v.number: values[v.number] for v in self._free}
        for once in self._once:
            once(around)
        around = {number: _array(x) for number, x in around.items()}
        numbers = None
        if self._loop.is_counted:
            numbers = range(begin, begin + trips)[:: -1 if self._equation.params[1] else 1]
        try:
            run = Run(self._loop, loops, numbers, around, [_array(x) for x in init], [_array(x) for x in xs])
        except Unfit:
            return None
        run.run()
        return run.results(init)


def _array(x: Any) -> Any:
    """Returns the buffer of a tensor; host arrays and numbers unchanged."""
    return whole_array(x, "jit") if type(x) is ShardedTensor else x
