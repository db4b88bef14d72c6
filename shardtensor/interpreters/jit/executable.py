"""Traced functions that run: a program, its steps, and what it returns and writes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import shardtensor.interpreters.jit.rewrites  # noqa: F401 - its passes are added to the list
from shardtensor.backend.registry import in_job, processes_of
from shardtensor.communication.between_processes.processes import JOB, connected, identify, note, note_error
from shardtensor.communication.transfer_log import logger
from shardtensor.core import OPS, outermost
from shardtensor.errors import BackendError
from shardtensor.host.fork import cached_property
from shardtensor.interpreters.calls import NAMED, raise_named
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.jit.c.c_executor import Compiled, compile_kernels, submit
from shardtensor.interpreters.jit.c.compiler import find_compiler
from shardtensor.interpreters.jit.cuda.segments import segments_of
from shardtensor.interpreters.jit.grouping.device_groups import language_of
from shardtensor.interpreters.jit.grouping.fused import Fused, work_of
from shardtensor.interpreters.jit.grouping.fused_devices import FusedOnDevices
from shardtensor.interpreters.jit.steps import steps_with_kernels
from shardtensor.interpreters.programs.passes import Setting, is_on_one_memory, rewritten
from shardtensor.interpreters.programs.program import Program, Var
from shardtensor.interpreters.programs.replay import Node, Step, Values, inference_of, view_of
from shardtensor.interpreters.views.views import snapshot, stand_in
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.identity import identity_of, with_identity
from shardtensor.tensor.ownership import READS, keep_while_read, storage_of
from shardtensor.tensor.pytree import replaced
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import (
    ShardedTensor,
    mark_array,
    mark_donated,
    tensor,
    without_elements,
    write_state_of,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A leaf of the result.

    Attributes:
        value: the value of the program that it is or of which it is a view; None for a source or a constant.
        source: the number of the argument or captured tensor that it is, or of which it is a view; -1 for none.
        view_spec: for a view, its view spec.
        aval: for a view, its aval.
        constant: makes the leaf, where it is the same in all calls.
        makes: makes the leaf of the value, where the value is not a leaf itself.
    """

    value: Var | None = None
    source: int = -1
    view_spec: ViewSpec | None = None
    aval: Any = None
    constant: Callable[[], Any] | None = None
    makes: Callable[[Any], Any] | None = None


class Executable:
    """A traced function.

    Args:
        name: the name of the function.
        program: what it computes, as it was traced.
        captured: the tensors that it closes over, in the order of ``program.captured``.
        outputs: the leaves of its result.
        tree: the structure of the result: a pytree with any leaves.
        donated: the numbers of inputs whose memory is donated.
        executor: what runs kernels: ``"numpy"``; ``"c"``, on GPUs CUDA; or None, for CUDA on GPUs, and otherwise NumPy
            until a compiler has compiled them in the background.

    Attributes:
        traced: what it computes, as it was traced.
        program: what it computes, after all passes.
        nodes: the equations of each step: one, or those of a kernel.
        kernels: the groups of equations that are one kernel.
        segments: the runs of steps whose launches are one where they recur.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        captured: Sequence[Any],
        outputs: Sequence[Output],
        tree: Any,
        donated: Sequence[int],
        executor: str | None,
    ) -> None:
        self.name = name
        self.traced = program
        self.captured = list(captured)
        self.outputs = outputs
        self.tree = tree
        self.donated = donated
        self.kernels: list[Fused] = []
        self._setting = Setting(moves=not is_on_one_memory(program), exact=executor == "numpy")
        self.program = program = rewritten(program, self._setting)
        may_compile = executor == "c" or (
            executor is None and (has_cuda_kernels(program) or find_compiler() is not None)
        )
        self.nodes, steps = steps_with_kernels(program, EAGER, self.kernels.append, may_compile)
        self._size = program.next_number() + 1  # The last one is the equation that a segment computes.
        numbers = {id(node): k for k, node in enumerate(self.nodes)}
        outside = [f for f in self.kernels if id(f.equations) in numbers]  # The others are in loops and branches.
        kernels = {numbers[id(f.equations)]: f for f in outside if isinstance(f, FusedOnDevices)}
        self.segments = segments_of(program, self.nodes, kernels)
        self._nodes, self._steps = self._with_segments(steps)
        self.executor = executor
        if executor == "c":
            self._compile()
        self._waits = executor is None and any(work_of(k) >= _LARGE for k in self._in_c())
        sources = [*program.inputs, *program.captured]
        self._numbers = [v.number for v in sources]
        self._writes = [(sources.index(before), after.number) for before, after in program.writes.items()]
        self._given = frozenset(donated if not self._writes else ())  # With writes, a call may run twice.
        self._one = len(outputs) == 1 and tree is None
        held = [o.value for o in outputs if o.value is not None]
        self._copied = {v.number for v in held if v in sources}
        self._shared = {v.number for v in held} | {
            n for k, (_, n) in enumerate(self._writes) if n in [m for _, m in self._writes[:k]] or n in self._numbers
        }

    @cached_property
    def laid_out(self) -> Program:
        """The program that moves the fewest bytes. Where all devices share one memory, it is inferred for calls whose
        transfers are recorded or guarded: nothing moves there, and the program that runs is that of other calls.
        """
        if self._setting.moves:
            return self.program
        return rewritten(self.traced, dataclasses.replace(self._setting, moves=True))

    @cached_property
    def is_common(self) -> bool:
        """Whether processes compare the calls: whether some values are on devices of several processes."""
        return len(processes_of(tuple({d for kind in self.program.avals() for d in kind.sharding.mesh.flat}))) > 1

    @cached_property
    def _described(self) -> str:
        """What processes compare of the program: the functions that they trace may differ."""
        return f"{self.name}, program {self.traced.checksum():08x}, executor={self.executor!r}"

    @cached_property
    def _inference(self) -> tuple[Sequence[Node], Sequence[Step], int]:
        """The nodes, the steps and the number of values of an inference of the program that moves the fewest bytes,
        which leaves out what is recorded as it runs.
        """
        steps = inference_of(self.laid_out)
        return [(e,) for e in self.laid_out.equations], steps, self.laid_out.next_number() + 1

    def _with_segments(self, steps: Sequence[Step]) -> tuple[Sequence[Node], Sequence[Step]]:
        """Returns the nodes and the steps of a call, where a segment is one."""
        nodes, new_steps = list(self.nodes), list(steps)
        for segment in reversed(self.segments):
            part = slice(segment.begin, segment.last + 1)
            new_steps[part] = [segment.step([node[-1] for node in nodes[part]], new_steps[part])]
            nodes[part] = [[equation for node in nodes[part] for equation in node]]
        return nodes, new_steps

    def __call__(self, units: Sequence[Any]) -> Any:
        """Runs the program on the inputs, commits its writes, and returns the result."""
        if self._waits:
            self._compile_in_background()
        sources = [*units, *self.captured]
        entry: list[Any] = [sources]
        READS[id(entry)] = entry
        try:
            values = self._written(sources) if self._writes else outermost().run(self, self._inputs(sources))
            result = self._result(values, sources)
        finally:
            READS.pop(id(entry), None)
        if self.is_common:  # After the calls of its operators, which an error of a difference in them names.
            since = connected("jit").count
            identities = [f"#{identity_of(x)}" for x in sources if type(x) is ShardedTensor]
            note(f"jit({self._described}, {', '.join(identities)})")
            identify(result, "jit", (), since)
        for k in self.donated:
            if type(units[k]) is ShardedTensor and not units[k].is_donated:
                mark_donated(units[k], "jit")
        return result

    def _inputs(self, sources: Sequence[Any]) -> list[Any]:
        """Returns new handles on the values of the sources, which writes of other threads do not change; donated ones
        as they are.
        """
        given, inputs = self._given, []
        is_plain = not in_job()
        for k, x in enumerate(sources):
            if type(x) is not ShardedTensor or k in given:
                inputs.append(x)
            elif is_plain and type(storage := x._storage) is Storage and x._aval.ndim:  # the common case
                inputs.append(tensor(x._aval, storage))
            else:
                inputs.append(_snapshot(x))
        return inputs

    def _written(self, sources: Sequence[Any]) -> Values:
        """Runs the program until no other thread writes what it writes, commits its writes, and returns the values."""
        while True:
            versions = [write_state_of(_base(sources[k])).version for k, _ in self._writes]
            values: Values = outermost().run(self, self._inputs(sources))
            if self._commit(sources, values, versions):
                return values

    # -- compilation ---------------------------------------------------------------------------------

    def compile(self) -> None:
        """Waits until the kernels are compiled, unless the executor is NumPy or there is no compiler."""
        if self.executor is None and self._in_c():
            self._waits = False
            try:
                self._compile()
            except BackendError as error:
                _log(self.name, error)

    @property
    def runs_on(self) -> str:
        """What runs the kernels now: ``"numpy"``, or ``"c"`` or ``"cuda"`` if it runs at least one."""
        languages = {fused.language for fused in self.kernels if fused.compiled is not None}
        return min(languages, default="numpy")

    def _in_c(self) -> list[Fused]:
        """Returns the kernels that are compiled as C. By default, those of several processes are not: each process
        would have other bits from another call on.
        """
        return [f for f in self.kernels if f.language == "c" and (self.executor == "c" or not f.spans)]

    def _compile(self) -> None:
        self._use(compile_kernels([fused.kernel for fused in self._in_c()]))

    def _compile_in_background(self) -> None:
        self._waits = False
        submit([fused.kernel for fused in self._in_c()]).add_done_callback(self._compiled)

    def _compiled(self, future: Future[Compiled]) -> None:
        error = future.exception()
        if error is None:
            self._use(future.result())
        else:
            _log(self.name, error)

    def _use(self, compiled: Compiled) -> None:
        for fused in self._in_c():
            fused.compiled = compiled.get(fused.kernel)

    # -- calls ---------------------------------------------------------------------------------------

    def execute(self, inputs: list[Any]) -> Values:
        """Runs the steps of a call, and returns the values by number.

        Donated inputs give their memory to the values, of which the last step that reads it frees it.
        """
        for k in self._given:
            if type(x := inputs[k]) is ShardedTensor:
                inputs[k] = _snapshot(x)
                mark_donated(x, "jit")
        return self._walk(self._nodes, self._steps, self._size, inputs)

    def infer(self, inputs: Sequence[Any]) -> None:
        """Records the transfers of a call, by an inference of the program that moves the fewest bytes."""
        known: dict[int, ShardedTensor] = {}
        self._walk(*self._inference, [stand_in(x, known) for x in inputs])

    def _walk(self, nodes: Sequence[Node], steps: Sequence[Step], size: int, inputs: list[Any]) -> Values:
        """Runs steps, and returns the values by number; the errors name the line of the operator."""
        values: Values = [None] * size
        for number, x in zip(self._numbers, inputs, strict=True):
            values[number] = x
        for k in self._given:
            if type(x := inputs[k]) is ShardedTensor:
                inputs[k] = without_elements(x._aval)  # Only the values may hold it.
        x = None
        done = 0
        try:
            for step in steps:
                step(values)
                done += 1
        except BaseException as error:  # Raised again: other processes may not have raised it.
            equation = nodes[done][-1] if values[-1] is None else values[-1]
            if JOB.agreement is not None:
                note_error(equation.op.error_name, inputs, error)
            try:
                if not isinstance(error, NAMED):
                    raise
                raise_named(equation.op, error)
            except Exception as named:
                named.add_note(f"jit: in {self.name}, at {equation.source}")
                raise
        return values

    # -- writes --------------------------------------------------------------------------------------

    def _commit(self, sources: Sequence[Any], values: Values, versions: Sequence[int]) -> bool:
        """Binds the written tensors to their new values, all or none; returns whether no other thread has written one
        of them in the meantime.
        """
        new_values = [
            values[number] if number not in self._shared else _copy(values[number]) for _, number in self._writes
        ]
        written = [sources[k] for k, _ in self._writes]
        bases = [_base(x) for x in written]
        with contextlib.ExitStack() as locks:
            for state in sorted({id(s): s for s in map(write_state_of, bases)}.values(), key=id):
                locks.enter_context(state.lock)
            if any(write_state_of(b).version != v for b, v in zip(bases, versions, strict=True)):
                return False
            for x, base, new in zip(written, bases, new_values, strict=True):
                if base is not x:
                    outermost().write(x, OPS["setitem"], (x, new, ...), ())
                    continue
                state = write_state_of(base)
                state.forget()
                state.version += 1
                if (storage := storage_of(base)) is not None:
                    keep_while_read(base, storage)
                base._storage = new._storage
        return True

    # -- the result ----------------------------------------------------------------------------------

    def _result(self, values: Values, sources: Sequence[Any]) -> Any:
        for number in self._copied:  # Once, so that several views of a donated argument are views of one tensor.
            values[number] = _copy(values[number])
        if self._one:
            return self._leaf(self.outputs[0], values, sources)
        results = [self._leaf(output, values, sources) for output in self.outputs]
        return replaced(self.tree, results)

    def _leaf(self, output: Output, values: Values, sources: Sequence[Any]) -> Any:
        if output.constant is not None:
            return output.constant()
        x = sources[output.source] if output.value is None else values[output.value.number]
        if output.makes is not None:
            return output.makes(x)
        return x if output.view_spec is None else view_of(x, output.view_spec, output.aval)


_LARGE = 1 << 20
"""The number of elements that the functions of a kernel compute from which on it is compiled by default."""


def has_cuda_kernels(program: Program) -> bool:
    """Returns whether a program has tensors on GPUs for which kernels are written in CUDA."""
    return any(language_of(kind) == "cuda" for kind in program.avals())


def _log(name: str, error: BaseException) -> None:
    """Logs that a function runs on NumPy."""
    logger().info("jit: the kernels of %s run on NumPy: %s", name, error)


def _base(x: Any) -> Any:
    return getattr(x._storage, "base", x)


def _snapshot(x: ShardedTensor) -> ShardedTensor:
    """Returns a new handle on the value of a tensor, which is an array if the tensor is one."""
    storage = x._storage
    handle = tensor(x._aval, storage) if type(storage) is Storage else snapshot(x)
    if in_job():
        with_identity(handle, x)
    return handle if x._aval.ndim or x._is_scalar else mark_array(handle)


def _copy(x: Any) -> Any:
    """Returns an independent tensor with the value of a value of the program; other objects are returned unchanged."""
    if type(x) is not ShardedTensor:
        return x
    copy = EAGER.apply(OPS["copy"], (x,), ())
    return copy if x._is_scalar else mark_array(copy)
