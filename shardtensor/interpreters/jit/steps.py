"""The steps of programs in which kernels compute groups of equations; all other steps are those of a plain replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import is_remote
from shardtensor.core import Interpreter
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.jit.c.c_loops import loop_of, repeats_in_c, trips_of
from shardtensor.interpreters.jit.c.c_trips import Part
from shardtensor.interpreters.jit.c.temporal_blocking import TimeSteps, time_steps_in
from shardtensor.interpreters.jit.grouping.fused import Fused
from shardtensor.interpreters.jit.grouping.fused_alone import alone_of, is_alone
from shardtensor.interpreters.jit.grouping.fused_devices import fused_of
from shardtensor.interpreters.jit.grouping.fused_in_maps import (
    COMPILED,
    FusedInMap,
    is_large_product,
    may_join,
    product,
)
from shardtensor.interpreters.jit.grouping.groups import grouped, is_kernel
from shardtensor.interpreters.jit.grouping.window_writes import WindowWrite, is_whole
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.interpreters.programs.replay import (
    BOUND,
    OWN_STEPS,
    Node,
    Step,
    Values,
    dropped_after,
    functions_step,
    getter,
    is_in_place,
    last_uses,
    map_step,
    step_of,
)


def steps_with_kernels(
    program: Program,
    interpreter: Interpreter,
    fused: Callable[[Fused], None],
    wide: bool,
    repeated: bool = False,
) -> tuple[Sequence[Node], list[Step]]:
    """Returns the nodes of a program, and a step for each.

    Each of them takes the values, adds its results, and drops those that no later step uses.

    Args:
        program: the program.
        interpreter: `EAGER`; or `BOUND`, in a map.
        fused: gets the kernel of each step that is one.
        wide: whether kernels may run as C (see `grouped`).
        repeated: whether C repeats the program (see `grouped`).
    """
    allowed = may_join if interpreter is BOUND else _any
    nodes = grouped(program, wide, allowed, repeated)
    last, made = last_uses(program, nodes), set(program.made())
    dropped = dropped_after(last, nodes)
    steps: list[Step] = []
    kernels: dict[int, Fused] = {}
    for k, node in enumerate(nodes):
        dead = dropped[k]
        if repeated and len(node) == 1 and is_alone(node[0]):
            alone = alone_of(node[0])
            fused(alone)
            steps.append(_ignoring(node, _fused(alone, program, EAGER, (), dead)))
            continue
        if not is_kernel(node, wide, repeated) or not all(map(allowed, node)):
            (equation,) = node
            in_place = is_in_place(equation, made, dead)
            steps.append(_ignoring(node, _alone(equation, program, interpreter, dead, in_place, fused, wide)))
            continue
        kept = [v for e in node for v in e.makes() if last[v] > k]
        if interpreter is BOUND:
            in_map = FusedInMap(node, kept)
            fused(in_map)
            steps.append(_ignoring(node, _fused(in_map, program, BOUND, (), dead)))
            continue
        in_places = {e.results for e in node if is_in_place(e, made, dead)}
        writes = {e.results: WindowWrite(e, e.results in in_places) for e in node if e.writes and not is_whole(e)}
        kernel = kernels[k] = fused_of(node, kept, writes)
        fused(kernel)
        steps.append(_ignoring(node, _fused(kernel, program, EAGER, in_places, dead)))
    for several in time_steps_in(program, nodes, kernels) if wide else ():
        _block_in_time(several, steps, dropped)
    return nodes, steps


def _ignoring(node: Node, alone: Step) -> Step:
    """Returns the step of a node that ignores the floating-point errors that all its equations ignore."""
    if not all(equation.ignored for equation in node):
        return alone
    ignored = dict(set.intersection(*[set(equation.ignored) for equation in node]))
    if not ignored:
        return alone

    def step(values: Values) -> None:
        with np.errstate(**ignored):
            alone(values)

    return step


def _any(_: Equation) -> bool:
    return True


def _alone(
    equation: Equation,
    program: Program,
    interpreter: Interpreter,
    dead: Sequence[int],
    in_place: bool,
    fused: Callable[[Fused], None],
    wide: bool,
) -> Step:
    """Returns the step of an equation that no kernel computes; maps and their products have kernels inside."""
    if equation.op.signature.functions:
        return _with_functions(equation, interpreter, dead, fused, wide)
    if equation.programs and equation.op not in OWN_STEPS:
        return _map(equation, interpreter, dead, fused, wide)
    if interpreter is BOUND and is_large_product(equation):
        return _product_in_map(equation, program, dead)
    return step_of(equation, program, interpreter, dead, in_place)


def _with_functions(
    equation: Equation, interpreter: Interpreter, dead: Sequence[int], fused: Callable[[Fused], None], wide: bool
) -> Step:
    """Returns the step of a loop or a branch: C runs the trips of a loop where it can."""
    programs = [program for _, program in sorted(equation.programs.items())]
    repeated = wide and interpreter is EAGER
    repeated = repeated and repeats_in_c(equation, programs, [grouped(p, wide, _any, True) for p in programs])
    parts: list[Part] = []

    def body_steps(program: Program) -> Sequence[Step]:
        kernels: list[Fused] = []

        def add_kernel(kernel: Fused) -> None:
            kernel.repeats *= trips_of(equation)
            kernels.append(kernel)
            fused(kernel)

        nodes, steps = steps_with_kernels(program, interpreter, add_kernel, wide, repeated)
        parts.append(Part(program, nodes, {id(k.equations[-1]): k for k in kernels if k.equations}))
        return steps

    alone = functions_step(equation, interpreter, dead, body_steps)
    loop = loop_of(equation, parts, dead) if repeated else None
    if loop is None:
        return alone
    fused(loop.trips)
    return loop.step(alone)


def _fused(
    kernel: Fused, program: Program, interpreter: Interpreter, in_place: Collection[Var], dead: Sequence[int]
) -> Step:
    """Returns the step of a kernel; where it does not run, its equations do."""
    alone = functools.cache(
        lambda: [step_of(e, program, interpreter, (), e.results in in_place) for e in kernel.equations]
    )

    def step(values: Values) -> None:
        if not kernel(values):
            for one in alone():
                one(values)
        for number in dead:
            values[number] = None

    return step


def _block_in_time(several: TimeSteps, steps: list[Step], dropped: Sequence[Sequence[int]]) -> None:
    """Replaces the steps of a loop: the first one computes all where it can, and the others nothing then."""
    result = several.result.number
    outside = [steps[k] for k in several.outside]

    def is_done(values: Values, k: int) -> bool:
        if values[result] is None and k == several.first:
            for view in outside:
                view(values)
            several.run(values)
        return values[result] is not None

    def replaced(k: int, alone: Step) -> Step:
        def step(values: Values) -> None:
            if not is_done(values, k):
                alone(values)
                return
            for number in dropped[k]:
                values[number] = None

        return step

    for k in range(several.first, several.last + 1):
        steps[k] = replaced(k, steps[k])


def _map(
    equation: Equation, interpreter: Interpreter, dead: Sequence[int], fused: Callable[[Fused], None], wide: bool
) -> Step:
    """Returns the step of a map, whose calls share the compiled kernels."""
    kernels: list[Fused] = []
    spans = any(is_remote(device) for submesh in equation.params[1] for device in submesh.flat)

    def add_kernel(kernel: Fused) -> None:
        kernel.spans = kernel.spans or spans
        kernels.append(kernel)
        fused(kernel)

    def compiled() -> dict[int, Any]:
        return {COMPILED: {kernel.kernel: kernel.compiled for kernel in kernels if kernel.compiled is not None}}

    return map_step(
        equation, interpreter, dead, lambda body: steps_with_kernels(body, BOUND, add_kernel, wide)[1], compiled
    )


def _product_in_map(equation: Equation, program: Program, dead: Sequence[int]) -> Step:
    """Returns the step of a product whose memory is that of the pool, of which pages are not cleared in each call."""
    get, alone, v = getter(equation.operands), step_of(equation, program, BOUND, dead), equation.results

    def step(values: Values) -> None:
        x1, x2 = get(values)
        result = product(x1, x2, v.kind)
        if result is None:
            alone(values)
            return
        values[v.number] = result
        for number in dead:
            values[number] = None

    return step
