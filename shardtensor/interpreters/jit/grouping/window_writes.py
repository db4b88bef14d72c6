"""Writes of kernels into windows: of a base that a program writes, a kernel computes the written elements only.

The new value of the base has the memory of the old one where the program does not read the old value any more,
nothing else holds its memory, and the kernel reads no element of it at another place. Otherwise it has new
memory, into which only the elements outside of the window are copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.communication.transfer import whole_array
from shardtensor.host import blockwise, memory_pool
from shardtensor.host.summation_order import empty_like
from shardtensor.interpreters.programs.program import Equation, Program, Var
from shardtensor.sharding.index import Index, to_numpy
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.ownership import exclusive_arrays
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor, tensor_of
from shardtensor.tensor.value import Aval

# -- writes that kernels can compute ---------------------------------------------------------------


def function_operands(equation: Equation) -> Sequence[Any]:
    """Returns the operands of the function that an equation computes: of a write, those without the base."""
    if not equation.writes:
        return equation.operands
    return equation.operands[1:2] if "assigns" in equation.op.tags else equation.operands[1:]


def is_whole(equation: Equation) -> bool:
    """Whether an equation is a write of all elements of its base, in order."""
    view_spec = equation.into
    return bool(
        equation.writes
        and view_spec is not None
        and view_spec.part is None
        and len(view_spec.boxes) == 1
        and view_spec.boxes[0].is_whole
    )


def computed_aval(equation: Equation) -> Aval | HostAval:
    """Returns the aval of the elements that an equation computes: of a write, the written ones."""
    if equation.writes:
        assert equation.window is not None
        return equation.window
    kind = equation.results.kind
    assert isinstance(kind, Aval)
    return kind


def has_function(equation: Equation) -> bool:
    """Whether a write is one of a function of arrays of the shape of the window, or of one such array."""
    view_spec = equation.into
    if view_spec is None or view_spec.part is not None or (len(view_spec.boxes) > 1 and not view_spec.size):
        return False
    if "assigns" not in equation.op.tags:
        return equation.op.is_ufunc
    value, index = equation.operands[1:]
    return index is Ellipsis and type(value) is Var and getattr(value.kind, "shape", None) == view_spec.shape


def without_copies(program: Program) -> Program:
    """Returns a program without the copies of which all that is used is the value that a write makes of them. Values of
    programs never change, so that the write can be one to the operand of the copy.
    """
    uses: dict[Var, int] = dict.fromkeys([*program.outputs, *program.writes.values()], 2)
    for v in [v for equation in program.equations for v in equation.reads()]:
        uses[v] = uses.get(v, 0) + 1
    is_changed = False
    equations: dict[int, Equation] = dict(enumerate(program.equations))
    views = {e.results for e in program.equations if e.op.name == "view"}  # They have no memory of their own.
    makers = {e.results: k for k, e in equations.items() if e.op.name == "copy" and type(e.results) is Var}
    for k, equation in enumerate(program.equations):
        base = equation.operands[0] if equation.writes and not equation.programs else None
        at = makers.get(base) if type(base) is Var else None
        if type(base) is not Var or at is None or uses[base] != 1:
            continue
        (source,) = program.equations[at].operands
        if type(source) is Var and source not in views and source.kind == base.kind:
            is_changed = True
            operands = tuple([source if type(x) is Var and x == base else x for x in equation.operands])
            equations[k] = dataclasses.replace(equation, operands=operands)
            del equations[at]
    return dataclasses.replace(program, equations=list(equations.values())) if is_changed else program


# -- in a call ---------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class WindowWrite:
    """A write of a kernel into a window.

    Attributes:
        equation: the write.
        in_place: whether the program reads the base no more.
    """

    equation: Equation
    in_place: bool

    def target(self, values: Any, inputs: Sequence[Any]) -> tuple[ShardedTensor, HostArray]:
        """Returns the new value of the base, whose elements in the window are to be written, and the window.

        Args:
            values: the values of the program by number.
            inputs: the arrays that the kernel reads.
        """
        base, view_spec, kind = values[self.equation.operands[0].number], self.equation.into, self.equation.results.kind
        assert view_spec is not None
        array, backend = whole_array(base, "setitem"), kind.backend
        if self.in_place and is_writable(base, array):
            out = view_spec.of(backend, array)
            if not any(_interferes(x, out, array) for x in inputs):
                return tensor(kind, base._storage), out
        # Like eager mode, on whose order in memory the bits of later sums depend.
        copy = empty_like(array) if len(view_spec.boxes) == 1 else memory_pool.empty(kind.shape, kind.dtype)
        copy_rest(copy, array, view_spec)
        return tensor_of(kind, (copy,), ([],)), view_spec.of(backend, copy)


def is_writable(base: ShardedTensor, array: Any) -> bool:
    """Whether a kernel may write into the one array of a tensor, whose device is current."""
    storage, backend = base._storage, base._aval.backend
    if type(storage) is not Storage or not backend.is_contiguous(array) or not backend.begin_write(array):
        return False
    free = exclusive_arrays(base, storage)
    return len(free) == 1 and free[0]


def _interferes(x: Any, out: HostArray, array: HostArray) -> bool:
    """Whether an operand of a kernel has elements of the array of a base at another place than the window."""
    if not isinstance(x, np.ndarray) or not np.may_share_memory(x, array):
        return False
    if x.shape != out.shape or x.strides != out.strides:
        return True
    return bool(x.__array_interface__["data"][0] != out.__array_interface__["data"][0])


def copy_rest(out: HostArray, array: HostArray, view_spec: ViewSpec) -> None:
    """Copies the elements outside of a view, or all where these are not a few boxes."""
    (*outer, box) = view_spec.boxes
    if outer or any(type(e) is tuple and e[2] != 1 and e[1] > 1 for e in box.entries):
        blockwise.copy_into(out, array)
        return
    bounds = [(e, e + 1) if type(e) is int else (e[0], e[0] + e[1]) for e in box.entries]  # type: ignore[index]
    before: list[tuple[int, int, int]] = []
    for (begin, end), n in zip(bounds, array.shape, strict=True):
        for first, last in ((0, begin), (end, n)):
            if first < last:
                part = to_numpy(Index([*before, (first, last - first, 1)]))
                blockwise.copy_into(out[part], array[part])
        before.append((begin, end - begin, 1))
