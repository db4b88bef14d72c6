"""Groups of equations that run as one kernel for each buffer, on arrays that are not NumPy's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import is_remote
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.processes import note
from shardtensor.communication.transfer import buffers_of
from shardtensor.host import memory_pool
from shardtensor.interpreters.jit import blocked
from shardtensor.interpreters.jit.cuda_executor import PARTS, CudaKernel, fits
from shardtensor.interpreters.jit.device_groups import language_of
from shardtensor.interpreters.jit.fused import Fused, is_row_major, reports_errors
from shardtensor.interpreters.jit.launches import AddLaunches, Waiting, call_all
from shardtensor.interpreters.jit.one_launch import Buffer
from shardtensor.interpreters.jit.reductions import is_reduction
from shardtensor.interpreters.jit.window_writes import WindowWrite, is_writable
from shardtensor.interpreters.mutation.views import computes
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
        self._made_shapes = [[kind.cells.grid.shape(k) for _, kind, _ in self._kept] for k in numbers]
        self._here = [k for k in numbers if not is_remote(grid.devices[k])]
        self._launch = self._backend.launcher([grid.devices[k] for k in self._here])
        self.memories = {k: (grid.devices[k], self._backend.memory_space(grid.devices[k])) for k in self._here}
        if self.language == "cuda" and fits(self.kernel):
            self.compiled = CudaKernel(self.kernel, self._backend)
        self._scratch = {k: self._scratch_of(k) for k in self._here}

    def __call__(self, values: Any) -> bool:
        """Computes the group; returns whether it did."""
        if self.compiled is None:
            return False
        self._launch_all(self._operands(values), values)
        return True

    # -- launches that wait ------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        """The backend of its arrays."""
        return self._backend

    @property
    def launches(self) -> int:
        """The number of launches of a call on one buffer; 0 if they cannot wait."""
        if not isinstance(self.compiled, CudaKernel):
            return 0
        return max([self.compiled.launches(shape) for shape in self._shapes], default=1)

    @property
    def only_launches(self) -> bool:
        """Whether a call launches and does nothing else, into arrays that it allocates."""
        return self.launches > 0 and not self._writes and not self.spans

    def is_idle(self, k: int) -> bool:
        """Whether a call launches nothing on the k-th buffer."""
        return 0 in self._shapes[k]

    def allocated(self) -> list[Buffer]:
        """Returns the buffers that a call allocates for values."""
        kept = [(n, v, kind) for n, (v, kind, _) in enumerate(self._kept) if not self._writes_in_place(v)]
        return [
            Buffer(v, k, self.memories[k][1], self._made_shapes[k][n], kind.dtype)
            for n, v, kind in kept
            for k in self._here
        ]

    def scratch(self) -> list[tuple[Hashable, Hashable, Shape, np.dtype[Any]]]:
        """Returns the name, the memory, the shape and the dtype of what a call allocates besides."""
        return [(name, self.memories[k][1], (size,), PARTS) for k in self._here for name, size in self._scratch[k]]

    def _scratch_of(self, k: int) -> list[tuple[Hashable, int]]:
        """Returns the names and the numbers of elements of the arrays that the k-th buffer needs besides."""
        sizes = self.compiled.memory(self._shapes[k]) if isinstance(self.compiled, CudaKernel) else ()
        return [((id(self), k, n), size) for n, size in enumerate(sizes)]

    def _writes_in_place(self, v: Var) -> bool:
        write = self._writes.get(v)
        return write is not None and write.in_place

    def waiting(self, values: Any) -> Waiting | None:
        """Returns the launches of this call that wait; None if launches do not wait."""
        return None if self.slot is None else values[self.slot]

    def queue(self, values: Any, k: int = 0) -> AddLaunches | None:
        """Returns what adds to the launches on the k-th buffer that wait; None likewise."""
        waiting = self.waiting(values)
        if waiting is None:
            return None
        return functools.partial(waiting.queue(*self.memories[k]).add, self.equations[-1])

    def flush(self, values: Any) -> None:
        """Launches what waits, before something else is launched that needs it."""
        waiting = self.waiting(values)
        if waiting is not None:
            waiting.flush()

    # -- the call ----------------------------------------------------------------------------------

    def buffer_of(self, x: ShardedTensor, caller: str) -> Any:
        """See `Fused`; the tensor is in one memory."""
        (buffer,) = buffers_of(x, caller)
        return buffer

    def launch(self, function: Callable[[], Any]) -> Any:
        """Calls a function on the device of a group of tensors in one memory."""
        (made,) = self._launch([function], [()])
        return made

    def _operands(self, values: Any) -> list[tuple[Any, ...]]:
        """Returns what the kernel reads for each buffer of this process."""
        columns, waiting = [], self.waiting(values)
        for number, constant, _ in self._inputs:
            x = constant if number < 0 else values[number]
            if waiting is not None and type(x) is ShardedTensor and computes(x):
                waiting.flush()
            columns.append(buffers_of(x, "jit") if type(x) is ShardedTensor else (x,) * len(self._shapes))
        return [tuple([column[k] for column in columns]) for k in self._here]

    def _launch_all(self, operands: Sequence[tuple[Any, ...]], values: Any) -> None:
        """Computes the results from what the kernel reads for each buffer of this process."""
        rows = [(k, given, values) for k, given in zip(self._here, operands, strict=True)]
        waiting = self.waiting(values)
        launch = call_all if waiting is not None and waiting.is_current else self._launch
        made = dict(zip(self._here, launch([self._run] * len(rows), rows), strict=True))
        for n, (v, kind, _) in enumerate(self._kept):
            shapes = enumerate([shapes[n] for shapes in self._made_shapes])
            arrays = tuple([made[k][n] if k in made else RemoteArray(shape, kind.dtype) for k, shape in shapes])
            storage = arrays[0] if v in self._writes else Storage(arrays, tuple([[] for _ in arrays]))
            values[v.number] = tensor(kind, storage)

    def _run(self, k: int, operands: Sequence[Any], values: Any) -> list[Any]:
        """Computes the k-th buffer of each result on its device, which is current. Returns the buffers, and in place of
        that of a tensor which is written into, the storage.
        """
        made, targets, waiting = [], [], self.waiting(values)
        for (v, kind, index), shape in zip(self._kept, self._made_shapes[k], strict=True):
            write = self._writes.get(v)
            if write is not None:
                storage, out = self._window(write, operands, values)
                made.append(storage)
            else:
                out = None if waiting is None else waiting.array((v.number, k))
                out = self._new(shape, kind.dtype) if out is None else out
                made.append(out)
                out = out if index is None else out[index]
            targets.append(out)
        memory = None
        if waiting is not None:
            memory = [waiting.array(name) for name, _ in self._scratch[k]]
        self._compute(self._shapes[k], self._in_loop(operands), targets, self.queue(values, k), memory)
        return made

    def _in_loop(self, operands: Sequence[Any]) -> list[Any]:
        """Returns operands with the dimensions of the loop."""
        return [x if i is None else x[i] for x, (_, _, i) in zip(operands, self._inputs, strict=True)]

    def _new(self, shape: Shape, dtype: Any) -> Any:
        """Returns new memory on the current device."""
        return self._backend.xp.empty(shape, dtype=dtype)

    def _compute(
        self,
        shape: Shape,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        queue: AddLaunches | None = None,
        memory: Sequence[Any] | None = None,
    ) -> None:
        """Computes the results on the current device."""
        backend = self._backend
        if isinstance(self.compiled, CudaKernel):
            self.compiled.run(shape, inputs, targets, queue, memory)
            return
        inputs = [backend.host_view(x) if backend.is_array(x) else x for x in inputs]
        targets = [backend.host_view(out) for out in targets]
        self.compiled.run(shape, inputs, targets)  # type: ignore[union-attr]

    def _window(self, write: WindowWrite, operands: Sequence[Any], values: Any) -> tuple[Storage, Any]:
        """Returns the storage of a tensor that is written into, and the array of the elements that are written."""
        backend, view_spec = self._backend, write.equation.into
        assert view_spec is not None
        base = values[write.equation.operands[0].number]
        (array,) = buffers_of(base, "setitem")
        if write.in_place and is_writable(base, array):
            memory = backend.memory_of(array)
            if not any(backend.memory_of(x) == memory for x in operands if backend.is_array(x)):
                return base._storage, view_spec.of(backend, array)
        self.flush(values)
        made = backend.contiguous(backend.xp.asarray(array, copy=True))
        return Storage((made,), ([],)), view_spec.of(backend, made)


class FusedInProcesses(FusedOnDevices):
    """A group of operators on tensors that span processes, which exchange nothing: each process runs the kernel on its
    own buffers. NumPy's arrays need no compiled code; without it, the bits are those of eager mode.

    The processes compare the calls of the operators as in eager mode.
    """

    spans = True

    def __init__(
        self, equations: Sequence[Equation], kept: Sequence[Var], writes: Mapping[Var, WindowWrite] = _EMPTY
    ) -> None:
        super().__init__(equations, kept, writes)
        self._on_numpy = spans_hosts(equations[0].results.kind)
        self._calls = [(plan_of(e), e.operands, e.results) for e in equations]

    def __call__(self, values: Any) -> bool:
        """Computes the group; returns whether it did: not where the bits would not be those of eager mode."""
        operands = self._operands(values)
        if self.compiled is None and not (self._on_numpy and self._is_exact(operands)):
            return False
        made: dict[int, int] = {}  # The identities of the results, of which only those that are kept become tensors.
        for plan, given, result in self._calls:
            assert plan is not None
            assert plan.text is not None
            named = [made.get(x.number) or values[x.number] if type(x) is Var else x for x in given]
            made[result.number] = note(plan.text(tuple(named)))
        self._launch_all(operands, values)
        for v, _, _ in self._kept:
            values[v.number]._identity = made[v.number]
        return True

    def _is_exact(self, operands: Sequence[Sequence[Any]]) -> bool:
        """Whether NumPy's functions on blocks of the buffers have the bits, and the memory order, of eager mode."""
        shapes = [self._shapes[k] for k in self._here]
        arrays = list(map(self._in_loop, operands))
        ordered = all(blocked.is_exact(self.kernel, shape, given) for shape, given in zip(shapes, arrays, strict=True))
        return ordered and all(is_row_major(x) for given in arrays for x in given)

    def _new(self, shape: Shape, dtype: Any) -> Any:
        return memory_pool.empty(shape, dtype) if self._on_numpy else super()._new(shape, dtype)

    def _compute(
        self,
        shape: Shape,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        queue: AddLaunches | None = None,
        memory: Sequence[Any] | None = None,
    ) -> None:
        if not self._on_numpy:
            super()._compute(shape, inputs, targets, queue, memory)
        elif self.compiled is not None and not reports_errors():
            self.compiled.run(shape, inputs, targets)
        else:
            blocked.run(self.kernel, shape, inputs, targets)
