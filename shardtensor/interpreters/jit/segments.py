"""Segments of a program: consecutive kernels, whose launches are one launch of a graph where they recur.

A segment is a run of steps that launch kernels and nothing else; views and numbers between them are no launches.
Everything else ends it: a product, which is a library's, cannot be captured in a graph. What is launched waits for the
end of the segment (see `shardtensor.interpreters.jit.launches`), unless the graph is found before any step
(`shardtensor.interpreters.jit.one_launch`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardtensor.interpreters.jit.launches import Blocks, Graphs, Waiting
from shardtensor.interpreters.jit.one_launch import Call, Launching, OneLaunch, launches_nothing, one_launch_of
from shardtensor.interpreters.programs.program import Equation, Var
from shardtensor.interpreters.programs.replay import compute, view_step

MOST_BYTES = 1 << 26
"""The size of the results of the kernels of a segment. The kernels of large results take longer than their launches."""

Step = Callable[[Any], None]
"""A step of a program: it takes the values by number."""


class Segment:
    """Consecutive nodes of a program whose launches are those of kernels.

    Attributes:
        first, last: the numbers of its first and its last node, which are kernels.
        begin: the number of the first one of the views that precede the first kernel.
        kernels: the kernels.
    """

    def __init__(self, begin: int, first: int) -> None:
        self.begin, self.first, self.last = begin, first, first
        self.kernels: list[Launching] = []
        self._bytes: dict[Any, int] = {}
        self._graphs, self._blocks = Graphs(), Blocks()
        self._one_launch: OneLaunch | None = None

    def takes(self, kernel: Launching) -> bool:
        """Whether a kernel can be its next one."""
        if not self.kernels:
            return True
        sizes = dict(self._bytes)
        for buffer in kernel.allocated():
            sizes[buffer.space] = sizes.get(buffer.space, 0) + buffer.nbytes
        return kernel.backend is self.kernels[0].backend and max(sizes.values(), default=0) <= MOST_BYTES

    def add(self, k: int, kernel: Launching) -> None:
        """Adds the kernel that is the k-th node."""
        self.last = k
        self.kernels.append(kernel)
        for buffer in kernel.allocated():
            self._bytes[buffer.space] = self._bytes.get(buffer.space, 0) + buffer.nbytes

    def plan(self, nodes: Sequence[Sequence[Equation]], last: Mapping[Var, int], bases: Collection[Var]) -> None:
        """Determines which buffers only the segment reads, and what a call needs that finds its graph.

        Args:
            nodes: what the program computes.
            last: for each value, the number of the node that reads it last.
            bases: the values that are written, whose memory has to be known as theirs.
        """
        for kernel in self.kernels:
            for buffer in kernel.allocated():
                if last[buffer.value] <= self.last and buffer.value not in bases:
                    self._blocks.add(buffer.name, buffer.space, buffer.shape, buffer.dtype)
            for scratch in kernel.scratch():
                self._blocks.add(*scratch)
        span = range(self.begin, self.last + 1)
        self._one_launch = one_launch_of(self.kernels, nodes, span, last, self._blocks, self._graphs)

    def step(self, nodes: Sequence[Sequence[Equation]], steps: Sequence[Step], slot: int) -> Step:
        """Returns the step of all of its nodes, those of the views that precede it included.

        Args:
            nodes: the nodes.
            steps: their steps.
            slot: the number of the value that has the launches that wait.
        """
        for kernel in self.kernels:
            kernel.slot = slot
        backend, graphs, blocks, one_launch = self.kernels[0].backend, self._graphs, self._blocks, self._one_launch
        equations = [node[-1] for node in nodes]

        devices = {memory: device for kernel in self.kernels for device, memory in kernel.memories.values()}
        is_one = len(devices) == 1
        launch = backend.launcher(list(devices.values()))

        def run(values: Any, waiting: Waiting | None) -> None:
            done = 0
            values[slot] = waiting
            try:
                for step in steps:
                    step(values)
                    done += 1
                if waiting is not None:
                    waiting.flush(ends=True)
            except BaseException:  # Raised again; the caller names the line.
                known = None if waiting is None else waiting.failed
                values[slot] = Failed(known or equations[min(done, len(equations) - 1)])
                raise
            values[slot] = None

        views = [] if one_launch is None else [view_step(equation, ()) for equation in one_launch.views]

        def prepared(one_launch: OneLaunch, values: Any) -> Call | None:
            for equation in one_launch.computed:
                try:
                    compute(equation, values)
                except BaseException:  # Raised again; the caller names the line.
                    values[slot] = Failed(equation)
                    raise
            return one_launch.prepare(values)

        def step(values: Any) -> None:
            waiting = None
            if backend.captures:
                if one_launch is not None and (call := prepared(one_launch, values)) is not None:
                    waiting = one_launch.launch(values, call)
                    if waiting is None:
                        for view in views:
                            view(values)
                        return
                else:
                    waiting = Waiting(graphs, backend, blocks, {}, {}, {}, is_current=is_one)
            if waiting is not None and waiting.is_current:
                launch([run], [(values, waiting)])
            else:
                run(values, waiting)

        return step


class Failed(NamedTuple):
    """Stands for the launches of a segment that has raised an error.

    Attributes:
        failed: the equation that has failed, or the last one of the kernel that has.
    """

    failed: Equation


def segments_of(
    nodes: Sequence[Sequence[Equation]], kernels: Mapping[int, Launching], last: Mapping[Var, int]
) -> list[Segment]:
    """Returns the segments of a program that have several launches.

    Args:
        nodes: what the program computes, in order.
        kernels: the kernels by the number of their node.
        last: for each value, the number of the node that reads it last.
    """
    bases = {v for node in nodes for e in node if e.writes for v in (e.operands[0], e.results)}
    made = list(_segments(nodes, kernels))
    for segment in made:
        segment.plan(nodes, last, bases)
    return made


def _segments(nodes: Sequence[Sequence[Equation]], kernels: Mapping[int, Launching]) -> Iterator[Segment]:
    made: Segment | None = None
    begin = 0  # the number of the first one of the views before a node
    for k, node in enumerate(nodes):
        kernel = kernels.get(k)
        if kernel is not None and kernel.launches:
            if made is not None and not made.takes(kernel):
                yield from _worthwhile(made)
                made = None
            made = made or Segment(begin, k)
            made.add(k, kernel)
        elif made is not None and not launches_nothing(node):
            yield from _worthwhile(made)
            made = None
        if not (len(node) == 1 and node[0].op.name == "view"):
            begin = k + 1
    yield from _worthwhile(made)


def _worthwhile(segment: Segment | None) -> Iterator[Segment]:
    if segment is not None and sum(kernel.launches for kernel in segment.kernels) > 1:
        yield segment
