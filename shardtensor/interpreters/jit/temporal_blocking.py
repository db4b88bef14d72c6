"""Temporal blocking: several steps of a loop for some rows, while these are in the caches, before the next rows.

The steps are kernels, each of which writes a function of slices of the value of the step before into one window of it,
as those of Jacobi's method. One by one, each step reads and writes the whole array in memory. Here, the rows are
divided into chunks, and a few steps are computed in each: at every step, fewer rows at those ends where another chunk
begins, since their neighbours are not known yet (trapezoids, as in Frigo & Strumpen, Cache oblivious stencil
computations, 2005). Then the rows between the chunks are computed. Two arrays hold the values of all steps alternately:
a value is overwritten after all values that read it have been computed.

On a GPU, whose kernels are launched for whole windows, the two arrays save the copies of what is outside of the window.

The kernels are those of single steps, so that the bits are, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtensor.communication.transfer import whole_array
from shardtensor.host import memory_pool
from shardtensor.host.threads import num_threads
from shardtensor.interpreters.jit.c_executor import run_steps
from shardtensor.interpreters.jit.fused import Fused, reports_errors
from shardtensor.interpreters.jit.fused_devices import FusedOnDevices
from shardtensor.interpreters.jit.stencils import corner_of
from shardtensor.interpreters.jit.window_writes import copy_rest
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import tensor

LEAST_BYTES = 1 << 24
"""The size of a window from which on two arrays do not fit into caches."""

ROWS = 128
"""The number of rows, for each thread and row of reach, from which on all threads have chunks of rows."""

Nodes = Sequence[Sequence[Equation]]


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel that writes a function of slices of a base into a window of the base.

    Attributes:
        number: the number of its node.
        fused: the kernel.
        write: the equation that writes.
        views: the views of the base that it reads, by the number of their value.
        reach: the largest distance, in rows, of an element that it reads from the element that it writes.
    """

    number: int
    fused: Fused
    write: Equation
    views: Mapping[int, ViewSpec]
    reach: int

    @property
    def base(self) -> Var:
        """The value of which it replaces elements."""
        return self.write.operands[0]  # type: ignore[no-any-return]


class TimeSteps:
    """Steps, each of the value of the one before, of which nothing else uses the value.

    Attributes:
        first, last: the numbers of the first and the last node.
        result: the value of the last step.
        outside: the numbers of the nodes between that are views of other values than those of the steps.
    """

    def __init__(self, steps: Sequence[Step], outside: Sequence[int]) -> None:
        self._steps = steps
        self.first, self.last = steps[0].number, steps[-1].number
        self.result: Var = steps[-1].write.results
        self.outside = outside

    def run(self, values: Any) -> None:
        """Computes all steps, if the kernels are compiled."""
        fused = self._steps[0].fused
        if any(step.fused.compiled is None for step in self._steps):
            return
        if isinstance(fused, FusedOnDevices):
            array = fused.launch(lambda: self._alternate(fused, values))
            values[self.result.number] = tensor(self.result.kind, Storage((array,), ([],)))  # type: ignore[arg-type]
            return
        if reports_errors():
            return
        rows, reach = self._steps[0].fused.shape[0], max(step.reach for step in self._steps)
        if rows < num_threads() * ROWS * max(reach, 1):
            return
        write = self._steps[0].write
        kind, window = write.results.kind, write.into
        assert window is not None
        before = whole_array(values[write.operands[0].number], "jit")
        arrays = [memory_pool.empty(kind.shape, kind.dtype) for _ in self._steps[:2]]
        calls = []
        for k, step in enumerate(self._steps):
            target = arrays[k % 2]
            views = {n: view.of(kind.backend, arrays[k % 2 - 1]) for n, view in step.views.items()} if k else {}
            inputs = step.fused.arrays(values, views)
            call = step.fused.compiled.prepared(step.fused.shape, inputs, [window.of(kind.backend, target)])  # type: ignore[union-attr]
            if call is None or not call.geometry.is_row_major:
                return
            calls.append(call)
        for array in arrays:
            copy_rest(array, before, window)
        run_steps(calls, self._steps[0].fused.shape, reach)
        values[self.result.number] = tensor(kind, Storage((arrays[(len(calls) - 1) % 2],), ([],)))

    def _alternate(self, fused: FusedOnDevices, values: Any) -> Any:
        """Computes one step after the other, on the current device, into two arrays alternately. Returns the last one.

        A step by itself would copy the elements outside of its window, and with them the whole array.
        """
        write = self._steps[0].write
        backend, window = write.results.kind.backend, write.into
        assert window is not None
        before = fused.buffer_of(values[write.operands[0].number], "setitem")
        fused.flush(values)  # The copies read what waits.
        arrays = [backend.contiguous(backend.xp.asarray(before, copy=True)) for _ in self._steps[:2]]
        targets = [window.of(backend, array) for array in arrays]
        given = [step.fused.operands(values, step.views if k else ()) for k, step in enumerate(self._steps)]

        def launch() -> None:
            for k, step in enumerate(self._steps):
                views = {n: view.of(backend, arrays[k % 2 - 1]) for n, view in step.views.items()} if k else {}
                step.fused.compiled.run(fused.shape, step.fused.arrays(given[k], views), [targets[k % 2]])  # type: ignore[union-attr]

        queue = fused.queue(values)
        if queue is None:
            launch()
        else:  # All else is the same in each call.
            operands = [*arrays, *[x for operands in given for x in operands.values()]]
            queue(self, operands, launch, len(self._steps))
        return arrays[(len(self._steps) - 1) % 2]


def time_steps_in(program: Program, nodes: Nodes, kernels: Mapping[int, Fused]) -> Iterator[TimeSteps]:
    """Yields the steps of loops that a program contains.

    Args:
        program: the program.
        nodes: what it computes, in order.
        kernels: the kernels, by the number of their node.
    """
    users: dict[Var, set[int]] = {v: {-1} for v in (*program.outputs, *program.writes.values())}
    for k, node in enumerate(nodes):
        for v in {v for e in node for v in e.reads()}:
            users.setdefault(v, set()).add(k)
    views = {node[0].results: k for k, node in enumerate(nodes) if node[0].op.name == "view"}
    chain: list[Step] = []
    for k in [k for k in range(len(nodes)) if nodes[k][0].op.name != "view"]:
        step = _step_of(k, nodes, kernels, views)
        if step is not None and chain and _follows(step, chain[-1], users, views):
            chain.append(step)
            continue
        yield from _made(chain, views)
        chain = [step] if step is not None else []
    yield from _made(chain, views)


def _made(chain: Sequence[Step], views: Mapping[Var, int]) -> Iterator[TimeSteps]:
    if len(chain) > 1:
        read = {number for step in chain[1:] for number in step.views}
        between = range(chain[0].number, chain[-1].number)
        yield TimeSteps(chain, [k for v, k in views.items() if k in between and v.number not in read])


def _step_of(k: int, nodes: Nodes, kernels: Mapping[int, Fused], views: Mapping[Var, int]) -> Step | None:
    """Returns a node as a step; None if it is none."""
    fused = kernels.get(k)
    write = nodes[k][-1]
    if fused is None or fused.kernel.row_ndim or not fused.shape or fused.written() != [write.results]:
        return None
    corner, base = corner_of(write.into), write.operands[0]
    is_small = math.prod(fused.shape) * write.results.kind.dtype.itemsize < LEAST_BYTES
    if corner is None or (is_small and type(fused) is Fused):
        return None
    read, reach = {}, 0
    for v in fused.reads():
        view = nodes[views[v]][0] if v in views else None
        if v == base:
            return None
        if view is not None and view.operands[0] == base:
            other = corner_of(view.into)
            if other is None or view.into is None or v.kind.shape != fused.shape:  # type: ignore[union-attr]
                return None
            read[v.number] = view.into
            reach = max(reach, abs(other[0] - corner[0]))
    return Step(k, fused, write, read, reach)


def _follows(step: Step, before: Step, users: Mapping[Var, set[int]], views: Mapping[Var, int]) -> bool:
    """Whether a step is one of the value of another, in the same window, and nothing else uses that value."""
    base = before.write.results
    if step.base != base or step.write.results.kind != base.kind:
        return False
    if step.write.into.boxes != before.write.into.boxes or step.fused.shape != before.fused.shape:  # type: ignore[union-attr]
        return False
    inside = {k for v, k in views.items() if v.number in step.views and users[v] == {step.number}}
    return users[base] <= {step.number, *inside}
