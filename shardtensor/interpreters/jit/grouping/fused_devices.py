"""Groups of equations that run as one kernel for each buffer, on arrays that are not NumPy's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardtensor.backend.registry import is_remote
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.between_processes.processes import note
from shardtensor.communication.transfer import buffers_of
from shardtensor.host import memory_pool
from shardtensor.interpreters.jit.cuda.cuda_executor import PARTS, CudaKernel, fits
from shardtensor.interpreters.jit.cuda.graphs import Arrays, Buffer, Part, Targets
from shardtensor.interpreters.jit.grouping.device_groups import language_of
from shardtensor.interpreters.jit.grouping.fused import Fused, is_row_major, reports_errors
from shardtensor.interpreters.jit.grouping.kernel_reductions import is_reduction
from shardtensor.interpreters.jit.grouping.window_writes import WindowWrite, is_writable
from shardtensor.interpreters.jit.kernels import numpy_executor
from shardtensor.interpreters.programs.program import Equation, Var
from shardtensor.interpreters.programs.replay import plan_of
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval, spans_hosts

_EMPTY: Mapping[Var, WindowWrite] = MappingProxyType({})


def fused_of(equations: Sequence[Equation], kept: Sequence[Var], writes: Mapping[Var, WindowWrite]) -> Fused:
    """Returns a group with its kernel; see `Fused` for the arguments."""
    value: Aval = equations[0].results.kind
    if value.backend.on_host:
        return Fused(equations, kept, writes)
    return (FusedInProcesses if value.spans else FusedOnDevices)(equations, kept, writes)


class FusedOnDevices(Fused):
    """A group with its kernel, which only compiled code runs. Without it, the equations run one by one.

    On the host (PyTorch), the code is the C that NumPy's arrays have, too.

    Attributes:
        memories: a device and the memory of each buffer of this process, by the number of the buffer.
    """

    def __init__(
        self, equations: Sequence[Equation], kept: Sequence[Var], writes: Mapping[Var, WindowWrite] = _EMPTY
    ) -> None:
        super().__init__(equations, kept, writes)
        reductions = [e for e in equations if is_reduction(e)]
        like: Aval = reductions[0].operands[0].kind if reductions else equations[0].results.kind
        self.language = language_of(like) or ""
        self._backend = like.backend
        grid = like.cells.grid
        numbers = range(len(grid.devices))
        # The one buffer of a memory is whole. A window that is written has another shape than what has it.
        self._shapes = [self.shape] if len(numbers) == 1 else [grid.shape(k) for k in numbers]
        self._result_shapes = [[kind.cells.grid.shape(k) for _, kind, _ in self._kept] for k in numbers]
        self._here = [k for k in numbers if not is_remote(grid.devices[k])]
        self._launch = self._backend.launcher([grid.devices[k] for k in self._here])
        self.memories = {k: (grid.devices[k], self._backend.memory_space(grid.devices[k])) for k in self._here}
        if self.language == "cuda" and fits(self.kernel):
            self.compiled = CudaKernel(self.kernel, self._backend)

    def __call__(self, values: Any) -> bool:
        """Computes the group; returns whether it did."""
        if self.compiled is None:
            return False
        self._launch_all(self._operands(values), values)
        return True

    # -- as a part of a segment --------------------------------------------------------------------

    def part(self) -> Part | None:
        """Returns what a segment needs of it; None if it cannot be a part of one."""
        if not isinstance(self.compiled, CudaKernel):
            return None
        launches = {k: 0 if 0 in self._shapes[k] else self.compiled.launches(self._shapes[k]) for k in self._here}
        buffers = [
            Buffer((v.number, k), v, self.memories[k][1], self._result_shapes[k][n], kind.dtype)
            for n, (v, kind, _) in enumerate(self._kept)
            for k in self._here
            if v not in self._writes
        ]
        buffers += [buffer for k in self._here for buffer in self._scratch(k)]
        memories, reads, writes = self.memories, self.reads(), self._writes
        last, backend = self.equations[-1], self._backend
        return Part(last, backend, memories, launches, reads, buffers, writes, self.targets, self.prepare, self.spans)

    def _scratch(self, k: int) -> list[Buffer]:
        """Returns the arrays that a call needs besides for the k-th buffer."""
        sizes = self.compiled.memory(self._shapes[k]) if isinstance(self.compiled, CudaKernel) else ()
        return [Buffer((id(self), k, n), None, self.memories[k][1], (size,), PARTS) for n, size in enumerate(sizes)]

    def targets(self, v: Var, base: ShardedTensor, operands: Sequence[Any]) -> list[Storage]:
        """Returns the storage of the result of a write of a tensor: that of the tensor, where nothing else holds its
        memory and no operand has it, or of a copy. Its device is current.
        """
        backend, (array,) = self._backend, buffers_of(base, "setitem")
        if self._writes[v].in_place and is_writable(base, array):
            memory = backend.memory_of(array)
            if not any(backend.memory_of(x) == memory for x in operands if backend.is_array(x)):
                return [base._storage]
        return [Storage((backend.contiguous(backend.xp.asarray(array, copy=True)),), ([],))]

    def prepare(self, values: Any, arrays: Arrays, targets: Targets) -> list[tuple[Hashable, Callable[[], None]]]:
        """Adds the results to the values. Returns what launches the kernel, and the memory on whose device."""
        buffers: dict[int, list[Any]] = {}
        launches: list[tuple[Hashable, Callable[[], None]]] = []
        for k, operands in zip(self._here, self._operands(values), strict=True):
            buffers[k] = [targets[v][0] if v in self._writes else arrays[v.number, k] for v, _, _ in self._kept]
            memory = [arrays[buffer.name] for buffer in self._scratch(k)]
            launches.append((self.memories[k][1], functools.partial(self._compute, k, operands, buffers[k], memory)))
        self._bind(buffers, values)
        return launches

    # -- the call ----------------------------------------------------------------------------------

    def buffer_of(self, x: ShardedTensor, caller: str) -> Any:
        """See `Fused`; the tensor is in one memory."""
        (buffer,) = buffers_of(x, caller)
        return buffer

    def launch(self, function: Callable[[], Any]) -> Any:
        """Calls a function on the device of a group of tensors in one memory."""
        (result,) = self._launch([function], [()])
        return result

    def _operands(self, values: Any) -> list[tuple[Any, ...]]:
        """Returns what the kernel reads for each buffer of this process."""
        columns = []
        for number, constant, _ in self._inputs:
            x = constant if number < 0 else values[number]
            columns.append(buffers_of(x, "jit") if type(x) is ShardedTensor else (x,) * len(self._shapes))
        return [tuple([column[k] for column in columns]) for k in self._here]

    def _launch_all(self, operands: Sequence[tuple[Any, ...]], values: Any) -> None:
        """Computes the results from what the kernel reads for each buffer of this process."""
        rows = [(k, own, values) for k, own in zip(self._here, operands, strict=True)]
        self._bind(dict(zip(self._here, self._launch([self._run] * len(rows), rows), strict=True)), values)

    def _bind(self, buffers: Mapping[int, Sequence[Any]], values: Any) -> None:
        """Adds the results to the values; see `_run`."""
        for n, (v, kind, _) in enumerate(self._kept):
            shapes = enumerate([shapes[n] for shapes in self._result_shapes])
            arrays = tuple([buffers[k][n] if k in buffers else RemoteArray(shape, kind.dtype) for k, shape in shapes])
            storage = arrays[0] if v in self._writes else Storage(arrays, tuple([[] for _ in arrays]))
            values[v.number] = tensor(kind, storage)

    def _run(self, k: int, operands: Sequence[Any], values: Any) -> list[Any]:
        """Computes the k-th buffer of each result on its device, which is current. Returns the buffers, and in place of
        that of a tensor which is written into, the storage.
        """
        buffers = []
        for (v, kind, _), shape in zip(self._kept, self._result_shapes[k], strict=True):
            write = self._writes.get(v)
            if write is None:
                buffers.append(self._new(shape, kind.dtype))
            else:
                buffers.append(self.targets(v, values[write.equation.operands[0].number], operands)[0])
        self._compute(k, operands, buffers)
        return buffers

    def _in_loop(self, operands: Sequence[Any]) -> list[Any]:
        """Returns operands with the dimensions of the loop."""
        return [x if i is None else x[i] for x, (_, _, i) in zip(operands, self._inputs, strict=True)]

    def _new(self, shape: Shape, dtype: Any) -> Any:
        """Returns new memory on the current device."""
        return self._backend.xp.empty(shape, dtype=dtype)

    def _compute(
        self, k: int, operands: Sequence[Any], buffers: Sequence[Any], memory: Sequence[Any] | None = None
    ) -> None:
        """Computes the k-th buffer of each result on the current device; see `_run`, and `CudaKernel.run`."""
        targets = []
        for (v, _, index), out in zip(self._kept, buffers, strict=True):
            if v in self._writes:
                view_spec = self._writes[v].equation.into
                assert view_spec is not None
                targets.append(view_spec.of(self._backend, out.buffers[0]))
            else:
                targets.append(out if index is None else out[index])
        self._compute_into(self._shapes[k], self._in_loop(operands), targets, memory)

    def _compute_into(
        self, shape: Shape, inputs: Sequence[Any], targets: Sequence[Any], memory: Sequence[Any] | None
    ) -> None:
        """Computes arrays from others, which have the dimensions of the loop."""
        backend = self._backend
        if isinstance(self.compiled, CudaKernel):
            self.compiled.run(shape, inputs, targets, memory)
            return
        inputs = [backend.host_view(x) if backend.is_array(x) else x for x in inputs]
        targets = [backend.host_view(out) for out in targets]
        self.compiled.run(shape, inputs, targets)  # type: ignore[union-attr]


class FusedInProcesses(FusedOnDevices):
    """A group of operators on tensors that span processes, which exchange nothing: each process runs the kernel on its
    own buffers. NumPy's arrays need no compiled code; without it, the bits are those of eager mode.

    The processes compare the calls of the operators as in eager mode: those on devices of several processes. In the
    other processes, operators on devices of one process compute nothing.
    """

    spans = True

    def __init__(
        self, equations: Sequence[Equation], kept: Sequence[Var], writes: Mapping[Var, WindowWrite] = _EMPTY
    ) -> None:
        super().__init__(equations, kept, writes)
        self._on_numpy = spans_hosts(equations[0].results.kind)
        plans = [(plan_of(e), e) for e in equations]
        self._calls = [(plan.text, e.operands, e.results) for plan, e in plans if plan is not None and plan.text]

    def __call__(self, values: Any) -> bool:
        """Computes the group; returns whether it did: not where the bits would not be those of eager mode."""
        operands = self._operands(values)
        if self.compiled is None and not (self._on_numpy and self._is_exact(operands)):
            return False
        identities = self._note(values)
        self._launch_all(operands, values)
        self._identify(identities, values)
        return True

    def prepare(self, values: Any, arrays: Arrays, targets: Targets) -> list[tuple[Hashable, Callable[[], None]]]:
        """See `FusedOnDevices`."""
        identities = self._note(values)
        launches = super().prepare(values, arrays, targets)
        self._identify(identities, values)
        return launches

    def _note(self, values: Any) -> dict[int, int]:
        """Notes the calls of the operators. Returns the identities of the results, of which only those that are kept
        become tensors.
        """
        identities: dict[int, int] = {}
        for text, operands, result in self._calls:
            named = [identities.get(x.number) or values[x.number] if type(x) is Var else x for x in operands]
            identities[result.number] = note(text(tuple(named)))
        return identities

    def _identify(self, identities: Mapping[int, int], values: Any) -> None:
        for v, _, _ in self._kept:
            if v.number in identities:
                values[v.number]._identity = identities[v.number]

    def _is_exact(self, operands: Sequence[Sequence[Any]]) -> bool:
        """Whether NumPy's functions on blocks of the buffers have the bits, and the memory order, of eager mode."""
        shapes = [self._shapes[k] for k in self._here]
        arrays = list(map(self._in_loop, operands))
        ordered = all(
            numpy_executor.is_exact(self.kernel, shape, inputs) for shape, inputs in zip(shapes, arrays, strict=True)
        )
        return ordered and all(is_row_major(x) for inputs in arrays for x in inputs)

    def _new(self, shape: Shape, dtype: Any) -> Any:
        return memory_pool.empty(shape, dtype) if self._on_numpy else super()._new(shape, dtype)

    def _compute_into(
        self, shape: Shape, inputs: Sequence[Any], targets: Sequence[Any], memory: Sequence[Any] | None
    ) -> None:
        if not self._on_numpy:
            super()._compute_into(shape, inputs, targets, memory)
        elif self.compiled is not None and not reports_errors():
            self.compiled.run(shape, inputs, targets)
        else:
            numpy_executor.run(self.kernel, shape, inputs, targets)
