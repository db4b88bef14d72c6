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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtensor.communication.transfer import whole_array
from shardtensor.host import memory_pool
from shardtensor.host.threads import num_threads
from shardtensor.interpreters.jit.c.c_executor import run_steps
from shardtensor.interpreters.jit.cuda.graphs import Arrays, Part, Targets
from shardtensor.interpreters.jit.grouping.fused import Fused, reports_errors
from shardtensor.interpreters.jit.grouping.fused_devices import FusedOnDevices
from shardtensor.interpreters.jit.grouping.stencil_writes import corner_of
from shardtensor.interpreters.jit.grouping.window_writes import WindowWrite, copy_rest
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor, tensor_of

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
            base = values[self._steps[0].base.number]
            fused.launch(lambda: self.prepare(values, {}, {self.result: self.targets(self.result, base)})[0][1]())
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
        values[self.result.number] = tensor_of(kind, (arrays[(len(calls) - 1) % 2],), ([],))

    # -- on a GPU ------------------------------------------------------------------------------------

    def part(self) -> Part | None:
        """Returns what a segment needs of the steps; None if they cannot be a part of one."""
        kernels = [step.fused for step in self._steps if isinstance(step.fused, FusedOnDevices)]
        parts = [part for kernel in kernels if (part := kernel.part()) is not None]
        if len(parts) < len(self._steps):
            return None
        inside = {number for step in self._steps[1:] for number in step.views}
        reads = [v for part in parts for v in part.reads if v.number not in inside]
        launches = {0: sum([part.launches[0] for part in parts])}
        writes = {self.result: WindowWrite(self._steps[0].write, in_place=False)}
        return parts[0]._replace(
            launches=launches, reads=reads, buffers=(), writes=writes, targets=self.targets, prepare=self.prepare
        )

    def targets(self, v: Var, base: ShardedTensor, operands: Sequence[Any] = ()) -> list[Storage]:
        """Returns two copies of the base, the first of which is to have the result.

        A step by itself would copy the elements outside of its window, and with them the whole array.
        """
        array, backend = self._steps[0].fused.buffer_of(base, "setitem"), base._aval.backend
        copies = [backend.contiguous(backend.xp.asarray(array, copy=True)) for _ in self._steps[:2]]
        return [Storage((copy,), ([],)) for copy in sorted(copies, key=backend.address_of)]

    def prepare(self, values: Any, arrays: Arrays, targets: Targets) -> list[tuple[Hashable, Callable[[], None]]]:
        """Adds the result to the values. Returns what computes one step after the other, into two arrays alternately,
        and the memory on whose device.
        """
        write, fused, last = self._steps[0].write, self._steps[0].fused, len(self._steps) - 1
        backend, window = write.results.kind.backend, write.into
        assert window is not None
        assert isinstance(fused, FusedOnDevices)
        copies = [storage.buffers[0] for storage in targets[self.result]]
        windows = [window.of(backend, array) for array in copies]
        operands = [step.fused.operands(values, step.views if k else ()) for k, step in enumerate(self._steps)]

        def launch() -> None:
            for k, step in enumerate(self._steps):
                before = copies[(last - k) % 2 - 1]
                views = {n: view.of(backend, before) for n, view in step.views.items()} if k else {}
                step.fused.compiled.run(fused.shape, step.fused.arrays(operands[k], views), [windows[(last - k) % 2]])  # type: ignore[union-attr]

        values[self.result.number] = tensor(self.result.kind, targets[self.result][0])  # type: ignore[arg-type]
        return [(fused.memories[0][1], launch)]


def time_steps_in(program: Program, nodes: Nodes, kernels: Mapping[int, Fused]) -> Iterator[TimeSteps]:
    """Yields the steps of loops that a program contains.

    Args:
        program: the program.
        nodes: what it computes, in order.
        kernels: the kernels, by the number of their node.
    """
    if not kernels:
        return
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
        yield from _time_steps(chain, views)
        chain = [step] if step is not None else []
    yield from _time_steps(chain, views)


def _time_steps(chain: Sequence[Step], views: Mapping[Var, int]) -> Iterator[TimeSteps]:
    if len(chain) > 1:
        read = {number for step in chain[1:] for number in step.views}
        between = range(chain[0].number, chain[-1].number)
        yield TimeSteps(chain, [k for v, k in views.items() if k in between and v.number not in read])


def _step_of(k: int, nodes: Nodes, kernels: Mapping[int, Fused], views: Mapping[Var, int]) -> Step | None:
    """Returns a node as a step; None if it is not a step."""
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
