"""Segments of a program: consecutive kernels, whose launches are one launch of a CUDA graph where they recur.

A segment is a run of steps that launch kernels and nothing else; views and numbers between them are not launches.
Everything else ends it: a product, which is a library's, cannot be captured in a graph, nor can a copy of something
that the segment computes.

All addresses of a call are therefore known before its first launch: those of what the segment reads from before it, of
the windows that it writes, of its results, and of the block of everything between. They and the values of numbers are
the key of the launches. A call takes the operands, allocates the rest, and looks for the graph with that key. Only if
there is none, the kernels are prepared and launched, and when the same key comes for the second time, the launches are
captured (`Backend.capture`).

Each call allocates its results and holds its operands as if there were no graphs, so that a graph holds no memory, and
the results of earlier calls may be in use. In loops, memory pools return the same addresses after one call, or after a
few.

Memory that is freed between two launches of a segment may be given to another thread, whose launches would come
first. Therefore all arrays exist until the segment ends, and the results of the kernels of a segment are limited in
size.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardtensor.backend.device import Device
from shardtensor.backend.registry import in_job
from shardtensor.communication.transfer import buffers_of
from shardtensor.interpreters.jit.c.temporal_blocking import time_steps_in
from shardtensor.interpreters.jit.cuda.graphs import Block, Buffer, Graphs, Part, key_of
from shardtensor.interpreters.jit.grouping.fused_devices import FusedOnDevices
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.interpreters.programs.replay import compute, last_uses, view_step
from shardtensor.interpreters.views.views import reads_buffers
from shardtensor.tensor.identity import with_identity
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import tensor, tensor_of
from shardtensor.tensor.value import Aval

MOST_BYTES = 1 << 26
"""The size of the results of the kernels of a segment. The kernels of large results take longer than their launches."""

Step = Callable[[Any], None]
"""A step of a program: it takes the values by number."""

Nodes = Sequence[Sequence[Equation]]

Launch = tuple[Equation, Callable[[], None]]
"""A function that launches, and the equation that an error names."""


class Started(NamedTuple):
    """What a call has in one memory.

    Attributes:
        key: the key of its launches.
        block: the memory of what only the segment reads; None if there is none.
        results: the other buffers.
        targets: the storages of the results of writes; see `Part`.
        is_launched: whether nothing is left to be launched.
    """

    key: Hashable
    block: Any
    results: list[Any]
    targets: dict[Var, Sequence[Storage]]
    is_launched: bool


class Memory:
    """What a segment reads, makes and launches in one memory.

    Args:
        segment: the segment.
        device: a device of the memory.
        space: the memory.

    Attributes:
        launches: the number of launches of a call, 2 for any number of several of a kernel.
        reads: the buffers that are read from before the segment: the number of the tensor, and of the buffer.
        writes: the writes of tensors from before the segment: the part, the result, the number of the value that is
            written, and the numbers of the tensors that the part reads.
        results: the buffers that are allocated one by one.
        block: the other ones, which only the segment reads.
    """

    def __init__(self, segment: Segment, device: Device, space: Hashable) -> None:
        self.device, self.launches = device, 0
        self.reads: dict[tuple[int, int], None] = {}
        self.writes: list[tuple[Part, Var, int, list[int]]] = []
        self.results: list[Buffer] = []
        self.block = Block()
        self._space, self._backend, self._graphs = space, segment.backend, segment.graphs
        self._alike: list[list[int]] = []

    def close(self) -> None:
        """Finds the results that are alike. Pools return their memory in an order that changes from call to call; in
        the order of addresses, the same addresses are the same key.
        """
        groups: dict[Hashable, list[int]] = {}
        for n, buffer in enumerate(self.results):
            groups.setdefault((buffer.shape, buffer.dtype), []).append(n)
        self._alike = [positions for positions in groups.values() if len(positions) > 1]

    def start(self, values: Any, columns: Sequence[Sequence[Any]], numbers: Hashable) -> Started:
        """Allocates what a call makes, on the device, which is current, and launches the graph if there is one.

        Args:
            values: the values of the program by number.
            columns: the buffers of each tensor that is read.
            numbers: what a graph has of the numbers.
        """
        backend = self._backend
        empty, address_of = backend.xp.empty, backend.address_of
        block = self.block.allocate(backend) if self.block.parts else None
        results = [empty(b.shape, dtype=b.dtype) for b in self.results]
        for positions in self._alike:
            ordered = sorted([results[n] for n in positions], key=address_of)
            for n, array in zip(positions, ordered, strict=True):
                results[n] = array
        arrays = [*[columns[n][k] for n, k in self.reads], *results]
        if block is not None:
            arrays.append(block)
        targets: dict[Var, Sequence[Storage]] = {}
        for part, v, base, read in self.writes:
            values[-1] = part.equation
            targets[v] = part.targets(v, values[base], [columns[n][0] for n in read])
            values[-1] = None
            arrays += [storage.buffers[0] for storage in targets[v]]
        key = self._space, numbers, *map(address_of, arrays)
        graph = self._graphs.find(key) if self.launches > 1 else None
        if graph is not None:
            graph()
        return Started(key, block, results, targets, graph is not None or not self.launches)

    def arrays(self, started: Started) -> dict[Hashable, Any]:
        """Returns what a call has allocated, by name."""
        pairs = zip([b.name for b in self.results], started.results, strict=True)
        return {**dict(pairs), **self.block.arrays(self._backend, started.block)}

    def run(self, values: Any, key: Hashable, launches: Sequence[Launch]) -> None:
        """Launches a call on the device, which is current, or captures the launches and launches their graph."""

        def launch() -> None:
            for equation, one in launches:
                values[-1] = equation
                one()

        graph = None
        if self.launches > 1:
            graph = self._graphs.find(key, lambda: self._backend.capture(launch))
        (launch if graph is None else graph)()


class Segment:
    """Consecutive nodes of a program whose launches are those of kernels.

    Args:
        run: the nodes.
        last: for each value, the number of the node that reads it last.
        kernels: the kernels.

    Attributes:
        begin: the number of the first one of the views that precede the first kernel.
        first, last: the numbers of its first and its last node, which are kernels.
        kernels: the kernels.
        backend: the backend of its arrays.
        graphs: its graphs.
        launches: the number of launches of a call in the memory that has most.
    """

    def __init__(self, run: Run, last: Mapping[Var, int], kernels: Sequence[FusedOnDevices]) -> None:
        self.kernels = kernels
        self.begin, self.first, self.last, self.backend = run.begin, run.first, run.last, run.parts[0].backend
        self.graphs = Graphs()
        self._parts = run.parts
        devices = {space: device for part in run.parts for device, space in part.memories.values()}
        self._memories = {space: Memory(self, device, space) for space, device in devices.items()}
        self._sources: dict[Var, int] = {}
        self._add_reads(run)
        self._roots: dict[Var, Var] = {}
        self._add_writes(run)
        outliving = {v for v, use in last.items() if use > run.last}
        self._add_buffers({*outliving, *self._roots.values()})
        self._results = [v for v in run.results if v in outliving]
        nothing = [equation for equation, part in run.nodes if part is None]
        copied = {v for source in self._sources for v in run.chain(source)}
        self._computed = [e for e in nothing if e.op.name != "view"]
        self._copies = [e for e in nothing if e.results in copied]
        self._nodes = [(e, part) for e, part in run.nodes if e.results not in copied]
        views = [e for e, part in self._nodes if part is None and e.op.name == "view"]
        self._views = [e for e in views if e.results in outliving]
        span, inside = range(run.begin, run.last + 1), {*run.results, *[e.results for e in views]}
        self._dropped = [v.number for v, use in last.items() if use in span and v not in inside]

    def _add_reads(self, run: Run) -> None:
        """Adds what is read from before the segment: tensors, views of them whose elements are copied, and numbers."""
        read = [(part, v) for part in self._parts for v in part.reads]
        self._numbers = list(dict.fromkeys([v.number for _, v in read if isinstance(v.kind, type)]))
        for part, v in read:
            if isinstance(v.kind, Aval) and (source := run.source(v)) not in run.results:
                n = self._sources.setdefault(source, len(self._sources))
                for k, (_, space) in part.memories.items():
                    self._memories[space].reads[n, k] = None

    def _add_writes(self, run: Run) -> None:
        """Adds the results of writes, which have the memory of another result, of a tensor from before the segment, or
        of its copy.
        """
        writes = [(part, v) for part in self._parts for v in part.writes]
        for part, v in writes:
            base = part.writes[v].equation.operands[0]
            self._roots[v] = self._roots.get(base, base) if base in run.results else v
            if self._roots[v] is v:
                read = [self._sources[w] for w in map(run.source, part.reads) if w in self._sources]
                (_, space) = part.memories[0]
                self._memories[space].writes.append((part, v, base.number, read))

    def _add_buffers(self, kept: Collection[Var]) -> None:
        """Adds what a call allocates: the buffers of some values, and those that only the segment reads."""
        for part in self._parts:
            for k, (_, space) in part.memories.items():
                self._memories[space].launches += part.launches[k]
            for b in part.buffers:
                memory = self._memories[b.space]
                (memory.results.append if b.value in kept else memory.block.add)(b)
        for memory in self._memories.values():
            memory.close()
        self.launches = max([memory.launches for memory in self._memories.values()], default=0)

    # -- calls -------------------------------------------------------------------------------------

    def step(self, equations: Sequence[Equation], steps: Sequence[Step]) -> Step:
        """Returns the step of all of its nodes, those of the views that precede it included.

        Until it has ended, the last one of the values is the equation that an error names.

        Args:
            equations: the last equation of each node.
            steps: the steps of the nodes, for calls without graphs.
        """
        backend, memories = self.backend, list(self._memories.values())
        launch, starts = backend.launcher([m.device for m in memories]), [m.start for m in memories]
        sources = [(v.number, len(v.kind.cells.positions)) for v in self._sources]  # type: ignore[union-attr]
        copies, views = [[view_step(e, ()) for e in some] for some in (self._copies, self._views)]
        prepares = any(part.spans for part in self._parts)
        computed, numbers, dropped, bind = self._computed, self._numbers, self._dropped, self._binding()

        def step(values: Any) -> None:
            if not backend.captures:
                for equation, alone in zip(equations, steps, strict=True):
                    values[-1] = equation
                    alone(values)
                values[-1] = None
                return
            for equation in computed:
                values[-1] = equation
                compute(equation, values)
            values[-1] = None
            for copy in copies:
                copy(values)
            columns = []
            for number, count in sources:
                storage = values[number]._storage
                buffers = storage.buffers if type(storage) is Storage else ()
                columns.append(buffers if len(buffers) == count else buffers_of(values[number], "jit"))
            key = tuple([key_of(values[number]) for number in numbers])
            started = launch(starts, [(values, columns, key)] * len(starts))
            if prepares or any(not own.is_launched for own in started):
                if len(starts) == 1:  # Its device is current once, and not again for each view.
                    launch([self._prepare], [(values, columns, started)])
                else:
                    self._prepare(values, columns, started)
            else:
                bind(values, started)
            del started  # Memory is freed in the order in which the next call allocates it again, as far as possible.
            for view in views:
                view(values)
            for number in dropped:
                values[number] = None

        return step

    def _binding(self) -> Callable[[Any, Sequence[Started]], None]:
        """Returns what adds the results of a call to the values, where all that is launched are graphs."""
        places: dict[Var | None, list[tuple[int, int]]] = {}
        for m, memory in enumerate(self._memories.values()):
            for n, b in enumerate(memory.results):
                places.setdefault(b.value, []).append((m, n))
        roots = [(v, self._roots.get(v, v)) for v in self._results]
        allocated = [(v, places[root]) for v, root in roots if root in places]
        written = [(v, root) for v, root in roots if root not in places]

        def bind(values: Any, started: Sequence[Started]) -> None:
            for v, at in allocated:
                arrays = tuple([started[m].results[n] for m, n in at])
                values[v.number] = tensor_of(v.kind, arrays, tuple([[] for _ in arrays]))  # type: ignore[arg-type]
            for v, root in written:
                ((storage, *_),) = [own.targets[root] for own in started if root in own.targets]
                values[v.number] = tensor(v.kind, storage)  # type: ignore[arg-type]

        return bind

    def _prepare(self, values: Any, columns: Sequence[Any], started: Sequence[Started]) -> None:
        """Prepares the kernels of a call, launches what no graph has launched, and adds the results to the values. If
        the segment has one memory, its device is current.
        """
        memories, inside = self._memories, self._inside(values, columns)
        arrays: dict[Hashable, Any] = {}
        targets: dict[Var, Sequence[Storage]] = {}
        for memory, own in zip(memories.values(), started, strict=True):
            arrays.update(memory.arrays(own))
            targets.update(own.targets)
        for v, root in self._roots.items():
            if v is not root:
                targets[v] = targets[root] if root in targets else [Storage((arrays[root.number, 0],), ([],))]
        launches: dict[Hashable, list[Launch]] = {space: [] for space in memories}
        for equation, part in self._nodes:
            values[-1] = equation
            if part is not None:
                for space, launch in part.prepare(inside, arrays, targets):
                    launches[space].append((equation, launch))
            elif equation.op.name == "view":
                view_step(equation, ())(inside)
        every = zip(memories.values(), started, launches.values(), strict=True)
        left = [(memory, (values, own.key, own_launches)) for memory, own, own_launches in every if not own.is_launched]
        if len(memories) > 1:
            launch_all = self.backend.launcher([memory.device for memory, _ in left])
            launch_all([memory.run for memory, _ in left], [row for _, row in left])
        for memory, row in left if len(memories) == 1 else ():
            memory.run(*row)
        values[-1] = None
        for v in self._results:
            values[v.number] = inside[v.number]

    def _inside(self, values: Any, columns: Sequence[Any]) -> list[Any]:
        """Returns the values of a call, of which those that the kernels read have the arrays of its key."""
        inside = list(values)
        for v, buffers in zip(self._sources, columns, strict=True):
            x = inside[v.number]
            if type(x._storage) is not Storage or x._storage.buffers is not buffers:
                value = tensor_of(x._aval, tuple(buffers))
                inside[v.number] = with_identity(value, x) if in_job() else value
        return inside


# -- which nodes are segments ------------------------------------------------------------------------


class Run:
    """Nodes of a program that may be a segment.

    Args:
        begin: the number of the first one.
        views: the views of the program, by their results.

    Attributes:
        begin, first, last: see `Segment`.
        parts: the parts.
        nodes: the last equation of each part with it, and the views and the numbers between them.
        results: the results of the parts.
    """

    def __init__(self, begin: int, first: int, views: Mapping[Var, Equation]) -> None:
        self.begin, self.first, self.last = begin, first, first
        self.parts: list[Part] = []
        self.nodes: list[tuple[Equation, Part | None]] = []
        self.results: dict[Var, None] = {}
        self._views = views

    def source(self, v: Var) -> Var:
        """Returns the value whose buffers are read with a value: the base of a view, or a view that may copy elements
        itself.
        """
        view = self._views.get(v)
        if view is None:
            return v
        (base,) = view.operands
        assert view.into is not None
        is_plain = base not in self._views and isinstance(base.kind, Aval) and reads_buffers(base.kind, view.into)
        return base if is_plain else v

    def chain(self, v: Var) -> list[Var]:
        """Returns a value, its base if it is a view, and so on."""
        links = [v]
        while links[-1] in self._views:
            (base,) = self._views[links[-1]].operands
            links.append(base)
        return links

    def takes(self, part: Part) -> bool:
        """Whether a part can be the next one: nothing that the run computes has to be copied for it."""
        sources = {self.source(v) for v in part.reads if isinstance(v.kind, Aval)}
        if any(v in self._views and self.chain(v)[-1] in self.results for v in sources):
            return False
        for write in part.writes.values():
            base = write.equation.operands[0]
            if base in self.results and (base in sources or not write.in_place):
                return False
        sizes: collections.Counter[Hashable] = collections.Counter()
        for other in (*self.parts, part):
            for b in other.buffers:
                sizes[b.space] += math.prod(b.shape) * b.dtype.itemsize
            for v, write in other.writes.items():
                sizes[other.memories[0][1]] += 0 if write.in_place else v.kind.nbytes  # type: ignore[union-attr]
        return part.backend is self.parts[0].backend and max(sizes.values(), default=0) <= MOST_BYTES

    def add(self, part: Part, between: Sequence[Equation], last: int) -> None:
        """Adds a part.

        Args:
            part: the part.
            between: the views and the numbers before it.
            last: the number of its last node.
        """
        self.last = last
        self.parts.append(part)
        self.nodes += [(equation, None) for equation in between] + [(part.equation, part)]
        self.results.update(
            dict.fromkeys([v for v in [*[b.value for b in part.buffers], *part.writes] if v is not None])
        )


def segments_of(program: Program, nodes: Nodes, kernels: Mapping[int, FusedOnDevices]) -> list[Segment]:
    """Returns the segments of a program that have several launches.

    Args:
        program: the program.
        nodes: what it computes, in order.
        kernels: the kernels by the number of their node.
    """
    if not kernels:
        return []
    runs, last = _runs(program, nodes, kernels), last_uses(program, nodes)
    segments = [
        Segment(run, last, [kernels[k] for k in range(run.first, run.last + 1) if k in kernels]) for run in runs
    ]
    return [segment for segment in segments if segment.launches > 1]


def _runs(program: Program, nodes: Nodes, kernels: Mapping[int, FusedOnDevices]) -> Iterator[Run]:
    views = {node[0].results: node[0] for node in nodes if node[0].op.name == "view"}
    parts = {k: part for k, kernel in kernels.items() if (part := kernel.part()) is not None}
    loops = {}
    for several in time_steps_in(program, nodes, kernels):
        if (part := several.part()) is not None:
            loops[several.first], parts[several.first] = several, part
    run: Run | None = None
    between: list[Equation] = []
    k = 0
    while k < len(nodes):
        part, loop = parts.get(k), loops.get(k)
        if part is not None:
            if run is not None and not run.takes(part):
                yield run
                run = None
            if run is None:
                between = [*itertools.takewhile(lambda e: e.op.name == "view", reversed(between))][::-1]
                run = Run(k - len(between), k, views)
            if loop is not None:
                k = loop.last
                between += [nodes[j][0] for j in loop.outside]
            run.add(part, between, k)
            between = []
        elif launches_nothing(nodes[k]):
            between.append(nodes[k][0])
        else:
            if run is not None:
                yield run
            run, between = None, []
        k += 1
    if run is not None:
        yield run


def launches_nothing(node: Sequence[Equation]) -> bool:
    """Whether a node is a view, or computes a Python number of others."""
    (equation, *others) = node
    if others or equation.programs or equation.writes:
        return False
    return equation.op.name == "view" or isinstance(getattr(equation.results, "kind", None), type)
