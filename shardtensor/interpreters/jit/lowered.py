"""Programs before they run: their text and their costs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardtensor.communication.transfer_log import TransferLog, recorded_by, transfer_lines
from shardtensor.core import ABOVE
from shardtensor.errors import ArgumentError
from shardtensor.hints import explains_attributes
from shardtensor.host.units import counted
from shardtensor.interpreters.jit.c.c_source import c_source
from shardtensor.interpreters.jit.c.compiler import vectorized_functions
from shardtensor.interpreters.jit.cuda.cuda_source import cuda_source
from shardtensor.interpreters.jit.cuda.segments import Segment
from shardtensor.interpreters.jit.executable import Executable
from shardtensor.interpreters.jit.kernels.expressions import has_c
from shardtensor.interpreters.jit.kernels.kernel import Kernel
from shardtensor.interpreters.programs.program import Equation, Program, Var, vars_of
from shardtensor.interpreters.programs.replay import inferred, last_uses
from shardtensor.interpreters.views.views import snapshot, stand_in

Units = Callable[[Sequence[Any], Mapping[str, Any]], list[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What one call of a program costs.

    Attributes:
        transfers: the bytes by operator and mesh axis: dicts from ``(operator, axis)``, where the axis is that of a
            collective or empty.
        bytes: the bytes of all transfers, as `st.transfers` counts them.
        read, written: the bytes that calls read and write, each operand and each result counted once for each
            call; views are free.
        peak: the largest sum of the bytes of values that are needed at the same time, the inputs included.
        kernels: the number of calls that compute elements: of kernels, and of operators outside of kernels.
        executor: what runs the program.
        launches: the same number, where the kernels that one CUDA graph launches count once. It is the number from the
            call on in which the addresses of an earlier one come again.
    """

    transfers: Mapping[tuple[str, str], int]
    bytes: int
    read: int
    written: int
    peak: int
    kernels: int
    executor: str
    launches: int

    def __str__(self) -> str:
        lines = [
            f"{name}{f' along {axis}' if axis else ''}: {counted(n, 'byte', spec=',')}"
            for (name, axis), n in self.transfers.items()
        ]
        lines.append(f"{counted(self.bytes, 'byte is', 'bytes are', spec=',')} transferred")
        lines.append(
            f"{counted(self.read, 'byte is', 'bytes are', spec=',')} read and {self.written:,} written, by "
            f"{counted(self.kernels, 'kernel')}"
        )
        if self.launches < self.kernels:
            lines.append(f"{counted(self.launches, 'launch', 'launches')}, with CUDA graphs")
        lines.append(
            f"{counted(self.peak, 'byte is', 'bytes are', spec=',')} needed at the same time; executor "
            f"{self.executor!r}"
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return ABOVE["text_html"](str(self))  # type: ignore[no-any-return]


@explains_attributes
class Lowered:
    """A traced function that does not run yet; ``jit(f).lower(*args)`` returns it.

    Attributes:
        program: what it computes.
    """

    def __init__(self, executable: Executable, units: Sequence[Any], units_of: Units) -> None:
        self._executable = executable
        self._inputs = [stand_in(snapshot(x)) for x in (*units, *executable.captured)]
        self._units_of = units_of
        self.program: Program = executable.program

    def as_text(self, stage: str = "program") -> str:
        """Returns the program as text.

        Args:
            stage: ``"program"``, the equations after all passes; ``"layouts"``, those that transfer least, and what
                each transfers; ``"groups"``, the equations with the kernels that compute several of them; ``"c"``, the
                text of those kernels that C can compute; or ``"cuda"``, that of the kernels on GPUs.

        Raises:
            ArgumentError: there is no such stage.
        """
        if stage == "program":
            return str(self.program)
        if stage == "layouts":
            return "\n".join(self._layouts())
        if stage == "groups":
            return "\n".join(self._groups())
        if stage == "c":
            kernels = [kernel for kernel in self._kernels("c") if isinstance(kernel, Kernel) and has_c(kernel)]
            return c_source(kernels, vectorized_functions()) if kernels else ""
        if stage == "cuda":
            return "\n".join([cuda_source(kernel) for kernel in self._kernels("cuda")])
        raise ArgumentError(f'as_text: stage is {stage!r}; wanted "program", "layouts", "groups", "c" or "cuda"')

    def _kernels(self, language: str) -> list[Kernel]:
        # All calls of a map have the same kernels.
        return list(dict.fromkeys([f.kernel for f in self._executable.kernels if f.language == language]))

    def __str__(self) -> str:
        return self.as_text()

    def _repr_html_(self) -> str:
        return ABOVE["text_html"](str(self))  # type: ignore[no-any-return]

    def _groups(self) -> Iterator[str]:
        kernels = {id(fused.equations): fused.kernel for fused in self._executable.kernels}
        graphs = {segment.first: segment for segment in self._graphs()}
        for k, node in enumerate(self._executable.nodes):
            if k in graphs:
                yield f"one CUDA graph, from here on, of {counted(len(graphs[k].kernels), 'kernel')}:"
            kernel = kernels.get(id(node))
            if kernel is None:
                yield from node[0].lines()
                continue
            yield "one kernel:"
            for equation in node:
                yield from (f"    {line}" for line in equation.lines())
            yield from (f"    {line}" for line in str(kernel).splitlines())

    def _graphs(self) -> list[Segment]:
        """Returns the segments whose launches the backend captures."""
        return [segment for segment in self._executable.segments if segment.backend.captures]

    def _layouts(self) -> Iterator[str]:
        logs = self._logs()
        for equation, log in zip(self._executable.laid_out.equations, logs, strict=True):
            yield from equation.lines()
            yield from (f"    {line}" for line in transfer_lines(log))
        yield f"{counted(sum(log.bytes for log in logs), 'byte is', 'bytes are')} transferred"

    def _logs(self) -> list[TransferLog]:
        """Returns the transfers of each equation."""
        logs: list[TransferLog] = []

        @contextlib.contextmanager
        def logged(_: Equation) -> Iterator[None]:
            logs.append(TransferLog())
            with recorded_by(logs[-1]):
                yield

        inferred(self._executable.laid_out, self._inputs, logged)
        return logs

    def cost(self) -> Cost:
        """Returns what one call costs, without running it."""
        transfers: dict[tuple[str, str], int] = {}
        total = 0
        for log in self._logs():
            total += log.bytes
            for record in log:
                if record.bytes:
                    key = record.operator, record.axis
                    transfers[key] = transfers.get(key, 0) + record.bytes
        nodes = self._executable.nodes
        last = last_uses(self.program, nodes)
        work = [node for node in nodes if node[0].op.name != "view"]
        read = written = 0
        for k, node in enumerate(nodes):
            inside = {v for e in node for v in e.makes()}
            if node[0].op.name != "view":
                read += sum(_nbytes(v) for v in {v for e in node for v in vars_of(e.operands)} - inside)
                written += _written(node[0]) if len(node) == 1 else sum(_nbytes(v) for v in inside if last[v] > k)
        launches = len(work) - sum(len(segment.kernels) - 1 for segment in self._graphs())
        peak = _peak(self.program, nodes)
        return Cost(transfers, total, read, written, peak, len(work), self._executable.runs_on, launches)

    def compile(self) -> Compiled:
        """Returns the program as a function of arguments of these types, after its kernels have been compiled."""
        self._executable.compile()
        return Compiled(self._executable, self._units_of)


@explains_attributes
class Compiled:
    """A program that runs for arguments of the types for which it was lowered; ``lowered.compile()`` returns it."""

    def __init__(self, executable: Executable, units_of: Units) -> None:
        self._executable = executable
        self._units_of = units_of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program.

        Raises:
            ArgumentTypeError: the program is one for arguments of other types.
        """
        return self._executable(self._units_of(args, kwargs))


def _nbytes(v: Var) -> int:
    return 0 if isinstance(v.kind, type) else v.kind.nbytes


def _written(equation: Equation) -> int:
    if equation.writes:
        assert equation.window is not None
        return equation.window.nbytes
    return sum(map(_nbytes, equation.makes()))


def _peak(program: Program, nodes: Sequence[Sequence[Equation]]) -> int:
    """Returns the largest sum of the bytes of values that are needed at the same time. Views and copies share memory
    until one of them is written.
    """
    last, roots = last_uses(program, nodes), dict[Var, Var]()
    for node in nodes:
        if (source := _shared_by(node)) is not None:
            roots |= dict.fromkeys(node[0].makes(), roots.get(source, source))
    for v, root in roots.items():
        last[root] = max(last.get(root, 0), last[v])
    held = {*program.inputs, *program.captured}
    live = {v: _nbytes(v) for v in held}
    most = sum(live.values())
    for k, node in enumerate(nodes):
        results = {v: _nbytes(v) for e in node for v in e.makes() if v not in roots and (len(node) == 1 or last[v] > k)}
        base = node[0].operands[0] if node[0].writes else None
        base = roots.get(base, base) if isinstance(base, Var) else None
        in_place = base is not None and last.get(base) == k and base not in held
        most = max(most, sum(live.values()) + (0 if in_place else sum(results.values())))
        live |= results
        for v in [v for v in live if last.get(v) == k and v not in held]:
            del live[v]
    return most


def _shared_by(node: Sequence[Equation]) -> Var | None:
    """Returns the operand of which an equation makes a view, a copy, or a tensor in the same layout; else None."""
    equation = node[0]
    if len(node) > 1 or equation.writes:
        return None
    if equation.op.name != "view" and "same elements" not in equation.op.tags:
        return None
    source, result = equation.operands[0], equation.results
    if not isinstance(source, Var) or not isinstance(result, Var):
        return None
    if equation.op.name == "transfer_to" and getattr(source.kind, "sharding", 0) != getattr(result.kind, "sharding", 1):
        return None
    return source
