"""Groups of equations that run as one kernel for each buffer, on arrays that are not NumPy's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardtensor.communication.transfer import buffers_of
from shardtensor.interpreters.jit.cuda_executor import CudaKernel, fits
from shardtensor.interpreters.jit.device_groups import language_of
from shardtensor.interpreters.jit.fused import Fused
from shardtensor.interpreters.jit.program import Equation, Var
from shardtensor.interpreters.jit.reductions import is_reduction
from shardtensor.interpreters.jit.window_writes import WindowWrite, is_writable
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval

_EMPTY: Mapping[Var, WindowWrite] = MappingProxyType({})


def is_for_host(equations: Sequence[Equation]) -> bool:
    """Returns whether a group has NumPy's arrays."""
    return bool(equations[0].results.kind.backend.on_host)


class FusedOnDevices(Fused):
    """A group with its kernel, which only compiled code runs. Without it, the equations run one by one.

    On the host (PyTorch), the code is the C that NumPy's arrays have, too.
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
        self._devices = grid.devices
        numbers = range(len(grid.devices))
        # The one buffer of a memory is whole. A window that is written has another shape than what has it.
        self._shapes = [self.shape] if len(numbers) == 1 else [grid.shape(k) for k in numbers]
        self._made_shapes = [[kind.cells.grid.shape(k) for _, kind, _ in self._kept] for k in numbers]
        self._launch = self._backend.launcher(self._devices)
        if self.language == "cuda" and fits(self.kernel):
            self.compiled = CudaKernel(self.kernel, self._backend)

    def __call__(self, values: Any) -> bool:
        """Computes the group; returns whether it did."""
        if self.compiled is None:
            return False
        count = len(self._devices)
        columns = []
        for number, constant, _ in self._inputs:
            x = constant if number < 0 else values[number]
            columns.append(buffers_of(x, "jit") if type(x) is ShardedTensor else (x,) * count)
        inputs = zip(*columns, strict=True) if columns else itertools.repeat((), count)
        rows = [(k, operands, values) for k, operands in zip(range(count), inputs, strict=True)]
        made = self._launch([self._run] * count, rows)
        for (v, kind, _), arrays in zip(self._kept, zip(*made, strict=True), strict=True):
            storage = arrays[0] if v in self._writes else Storage(arrays, tuple([[] for _ in arrays]))
            values[v.number] = tensor(kind, storage)
        return True

    def _run(self, k: int, operands: Sequence[Any], values: Any) -> list[Any]:
        """Computes the k-th buffer of each result on its device, which is current. Returns the buffers, and in place of
        that of a tensor which is written into, the storage.
        """
        backend, made, targets = self._backend, [], []
        for (v, kind, index), shape in zip(self._kept, self._made_shapes[k], strict=True):
            write = self._writes.get(v)
            if write is not None:
                storage, out = self._window(write, operands, values)
                made.append(storage)
            else:
                out = backend.xp.empty(shape, dtype=kind.dtype)
                made.append(out)
                out = out if index is None else out[index]
            targets.append(out)
        inputs = [x if i is None else x[i] for x, (_, _, i) in zip(operands, self._inputs, strict=True)]
        if self.language == "c":
            inputs = [backend.host_view(x) if backend.is_array(x) else x for x in inputs]
            targets = [backend.host_view(out) for out in targets]
        self.compiled.run(self._shapes[k], inputs, targets)  # type: ignore[union-attr]
        return made

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
        made = backend.contiguous(backend.xp.asarray(array, copy=True))
        return Storage((made,), ([],)), view_spec.of(backend, made)
