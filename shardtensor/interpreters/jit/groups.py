"""Groups: the equations that one kernel computes, in one pass over memory.

A group consists of elementwise operators over one loop, and of reductions of its rows along trailing dimensions that
are not split. Its operands and results are whole buffers of host memory, so that the split of the loop over devices is
of no importance. An equation joins the group of its operands as long as nothing else has read a value of the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST_MEMORY
from shardtensor.backend.small_floats import is_small_float
from shardtensor.communication.transfer import whole_array
from shardtensor.errors import ArgumentTypeError
from shardtensor.host import memory_pool
from shardtensor.interpreters.execution.plan_cache import plan_for
from shardtensor.interpreters.execution.planning import Plan
from shardtensor.interpreters.jit import blocked
from shardtensor.interpreters.jit.c_executor import CompiledKernel
from shardtensor.interpreters.jit.kernel import Kernel, KernelBuilder
from shardtensor.interpreters.jit.program import Equation, Program, Var, shape_of, vars_of
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import reduced_axes
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, tensor
from shardtensor.tensor.value import Aval

_REDUCTIONS = frozenset(("sum", "prod", "max", "min", "any", "all", "mean"))

LEAST = 1 << 14
"""The minimum number of elements of a loop: on fewer, calls of NumPy's functions take less time than a kernel."""

_MOST = 64
"""The maximum number of equations of a group: the compiler's time grows faster than the number."""


def plan_of(equation: Equation) -> Plan | None:
    """Returns the plan of an equation whose plan depends on nothing but the kinds of its operands; else None."""
    op = equation.op
    if op.view_spec or op.composite or op.algorithm or op.creates or type(equation.results) is not Var:
        return None
    kinds: list[Any] = []
    tensors = 0
    for x in equation.operands:
        if type(x) is Var:
            tensors += isinstance(x.kind, Aval)
            # A scalar may be an element of another tensor, with which devices that own the element compute.
            if isinstance(x.kind, Aval) and (not x.kind.ndim or x.kind.unreduced):
                return None
            kinds.append(x.kind)
        elif x is None or type(x) in SCALARS:
            kinds.append(None if x is None else type(x))
        elif isinstance(x, (np.ndarray, np.generic)):
            kinds.append(host_aval(x.shape, x.dtype))
        else:
            return None
    return plan_for(op, kinds, equation.params) if tensors and op.params[-1:] != ("layout",) else None


class _Group:
    """Equations that one kernel computes.

    Attributes:
        shape: the shape of the loop.
        equations: the equations, in order.
        row_ndim: the number of trailing dimensions that make a row; 0 as long as nothing is reduced.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.equations: list[tuple[int, Equation]] = []
        self.row_ndim = 0

    def role(self, shape: Shape) -> str:
        """Returns what a value of that shape is: ``"full"``, one element of the loop; ``"row"``, one for each row, with
        the reduced dimensions; ``"flat"``, without them; empty if it is neither.
        """
        if shape == self.shape:
            return "full"
        outer = self.shape[: len(self.shape) - self.row_ndim]
        if not self.row_ndim:
            return ""
        return "row" if shape == outer + (1,) * self.row_ndim else "flat" if shape == outer else ""


def grouped(program: Program) -> list[Sequence[Equation]]:
    """Returns the equations of a program in an order in which those of a group follow one another, as nodes: a node is
    an equation, or a group of several.
    """
    return _Grouping(program).nodes()


class _Grouping:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._open: dict[int, _Group] = {}  # by the number of a value that the group computes
        self._all: list[_Group] = []

    def nodes(self) -> list[Sequence[Equation]]:
        """See `grouped`."""
        alone: list[tuple[int, Equation]] = []
        for k, equation in enumerate(self._program.equations):
            group = self._joined(equation) if _is_local(equation) else None
            outside = [v for v in equation.reads() if self._open.get(v.number) is not group]
            for v in outside:
                self._close(v)
            if group is None:
                alone.append((k, equation))
                continue
            group.equations.append((k, equation))
            self._open[equation.results.number] = group
        found: list[tuple[int, Sequence[Equation]]] = [(k, (e,)) for k, e in alone]
        for group in self._all:
            if group.equations:
                found.append((group.equations[-1][0], [e for _, e in group.equations]))
        return [node for _, node in sorted(found, key=lambda pair: pair[0])]

    def _close(self, v: Var) -> None:
        """Ends the group that computes a value: something outside of it reads the value."""
        group = self._open.get(v.number)
        if group is not None:
            for _, equation in group.equations:
                self._open.pop(equation.results.number, None)

    def _joined(self, equation: Equation) -> _Group | None:
        """Returns the group of an equation that a kernel can compute: that of its operands, or a new one."""
        reduces = equation.op.name in _REDUCTIONS and equation.op.combine is not None
        operand_shapes = [v.kind.shape for v in vars_of(equation.operands) if not isinstance(v.kind, type)]
        shape = operand_shapes[0] if reduces else equation.results.kind.shape
        rows = len(shape) - len(_outer(equation, shape)) if reduces else 0
        groups = []
        for v in vars_of(equation.operands):
            group = self._open.get(v.number)
            if group is not None and group not in groups and self._fits(group, equation, shape, rows):
                groups.append(group)
        made = groups[0] if groups else _Group(shape)
        if not groups:
            self._all.append(made)
        made.row_ndim = made.row_ndim or rows
        for other in groups[1:]:
            together = len(other.equations) + len(made.equations) < _MOST
            lengths = {made.row_ndim, other.row_ndim} - {0}
            if other.shape == made.shape and len(lengths) < 2 and together:
                self._merge(made, other)
        return made

    def _merge(self, group: _Group, other: _Group) -> None:
        group.row_ndim = group.row_ndim or other.row_ndim
        group.equations = sorted(group.equations + other.equations, key=lambda pair: pair[0])
        for _, equation in other.equations:
            if equation.results.number in self._open:
                self._open[equation.results.number] = group
        other.equations = []

    def _fits(self, group: _Group, equation: Equation, shape: Shape, rows: int) -> bool:
        if len(group.equations) >= _MOST:
            return False
        if rows:
            return group.shape == shape and group.row_ndim in (0, rows)
        role = group.role(shape)
        if role in ("full", "row"):  # A value without the reduced dimensions broadcasts along other ones.
            inside = [v for v in vars_of(equation.operands) if self._open.get(v.number) is group]
            return all(group.role(shape_of(v)) != "flat" for v in inside) or role == ""
        if role != "flat":
            return False
        return all(isinstance(v.kind, type) or v.kind.shape in (shape, ()) for v in vars_of(equation.operands))


def _outer(equation: Equation, shape: Shape) -> Shape:
    """Returns the dimensions of the operand of a reduction before those that it reduces."""
    axis = dict(zip(equation.op.params, equation.params, strict=True))["axis"]
    return shape[: len(shape) - len(reduced_axes(axis, len(shape)))]


# -- what a kernel can compute ---------------------------------------------------------------------


def _is_local(equation: Equation) -> bool:
    """Whether a kernel can compute an equation from whole buffers of host memory."""
    if equation.writes or type(equation.results) is not Var or not isinstance(equation.results.kind, Aval):
        return False
    op, value = equation.op, equation.results.kind
    kinds = [x.kind if type(x) is Var else x for x in equation.operands]
    avals = [k for k in kinds if isinstance(k, Aval)]
    if not avals or not all(_is_on_host(k) for k in (*avals, value)):
        return False
    if op.name in _REDUCTIONS and op.combine:
        return _reduces_rows(equation, avals[0])
    return bool(value.ndim and value.size >= LEAST) and _function_of(equation) is not None


def _is_on_host(value: Aval) -> bool:
    return (
        value.memory == HOST_MEMORY
        and value.backend.on_host
        and not value.unreduced
        and not value.backend.simulated
        and value.dtype.kind in "biufc"
        and not is_small_float(value.dtype)
        and value.dtype.isnative
        and value.dtype.itemsize <= 16
        and value.dtype != np.dtype(np.longdouble)
    )


def _reduces_rows(equation: Equation, x: Aval) -> bool:
    """Whether a reduction is one of rows, along trailing dimensions that are not split, in the dtype of its operand."""
    named = dict(zip(equation.op.params, equation.params, strict=True))
    value = equation.results.kind
    if set(named) - {"axis", "dtype", "keepdims"} or named.get("dtype") is not None or x.size < max(LEAST, 1):
        return False
    if x.dtype != value.dtype or x.ndim < 2:
        return False
    axes = reduced_axes(named["axis"], x.ndim)
    if not axes or sorted(axes) != list(range(x.ndim - len(axes), x.ndim)) or len(axes) == x.ndim:
        return False
    return not any(x.sharding.spec.chains_of(x.ndim)[d] or x.shape[d] == 1 for d in axes)


def _function_of(equation: Equation) -> str | None:
    """Returns the name of the elementwise function that an equation is in a kernel; None if it is none."""
    op = equation.op
    if op.name == "where":
        name = "where"
    elif op.is_ufunc and not op.params and op.kernel is None and op.composite is None:
        name = op.name
    else:
        return None
    kinds: list[Any] = []
    for x in equation.operands:
        kind = x.kind if type(x) is Var else x
        if isinstance(kind, (Aval, HostAval)):
            kinds.append(kind.dtype)
        elif isinstance(kind, type):
            kinds.append(kind)
        elif type(kind) in SCALARS:
            kinds.append(type(kind))
        else:
            return None
    if any(isinstance(k, np.dtype) and (k.kind not in "biufc" or is_small_float(k)) for k in kinds):
        return None
    # A Python integer that does not fit the dtype of the others is an error of eager mode.
    if int in kinds and not any(k.kind in "fc" or k == np.int64 for k in kinds if isinstance(k, np.dtype)):
        return None
    builder = KernelBuilder(1)
    try:
        # A dtype is equal to the Python type of the same numbers, which is weak; its text is not.
        values = [builder.input(k if isinstance(k, type) else k.str) for k in kinds]
        made = builder.dtype(builder.call(name, *values))
    except ArgumentTypeError:
        return None
    return name if made == equation.results.kind.dtype else None


# -- kernels ---------------------------------------------------------------------------------------


class Fused:
    """A group with its kernel.

    Args:
        equations: the equations, in order.
        kept: their results that are used outside of the group.

    Attributes:
        kernel: what computes the group.
        shape: the shape of its loop.
        compiled: the kernel as compiled code, once there is one.
    """

    def __init__(self, equations: Sequence[Equation], kept: Sequence[Var]) -> None:
        reductions = [e for e in equations if e.op.name in _REDUCTIONS and e.op.combine]
        self.equations = equations
        self.compiled: CompiledKernel | None = None
        if reductions:
            self.shape: Shape = reductions[0].operands[0].kind.shape
            row_ndim = len(self.shape) - len(_outer(reductions[0], self.shape))
        else:
            self.shape, row_ndim = equations[0].results.kind.shape, 0
        self._group = _Group(self.shape)
        self._group.row_ndim = row_ndim
        self._builder = KernelBuilder(len(self.shape), row_ndim)
        self._inputs: list[tuple[int, Any, Any]] = []
        self._values: dict[Any, int] = {}
        self._add_inputs()
        for equation in equations:
            self._add(equation)
        self._kept = [(v.number, v.kind, self._add_output(v)) for v in kept if isinstance(v.kind, Aval)]
        self.kernel: Kernel = self._builder.build()
        self._ordered = bool(row_ndim)

    def _add_inputs(self) -> None:
        """Adds the operands that the group does not compute. An input is a number of a value, or -1 for a constant; the
        constant; and the index that gives it the dimensions of the loop.
        """
        made = {e.results for e in self.equations}
        for equation in self.equations:
            flat = self._group.role(equation.results.kind.shape) == "flat" and len(self.shape) > 1
            for x in equation.operands:
                key = (x, flat) if type(x) is Var else (type(x), x)
                if x in made or key in self._values:
                    continue
                if type(x) is not Var:
                    self._values[key] = self._builder.input(type(x))
                    self._inputs.append((-1, x, None))
                elif isinstance(x.kind, type):
                    self._values[key] = self._builder.input(x.kind)
                    self._inputs.append((x.number, None, None))
                else:
                    after = self._group.row_ndim * flat
                    own = self.shape[len(self.shape) - after - len(x.kind.shape) : len(self.shape) - after]
                    varies = [n == m for n, m in zip(x.kind.shape, own, strict=True)] + [False] * after
                    varies = [False] * (len(self.shape) - len(varies)) + varies
                    index = None if len(x.kind.shape) in (0, len(self.shape)) else _expanding(x.kind.shape, self, flat)
                    self._values[key] = self._builder.input(x.kind.dtype.str, varies)
                    self._inputs.append((x.number, None, index))

    def _add(self, equation: Equation) -> None:
        flat = self._group.role(equation.results.kind.shape) == "flat" and len(self.shape) > 1
        taken = []
        for x in equation.operands:
            found = self._values.get(x) if type(x) is Var else None
            taken.append(found if found is not None else self._values[(x, flat) if type(x) is Var else (type(x), x)])
        if equation.op.name in _REDUCTIONS and equation.op.combine:
            made = self._builder.reduce(equation.op.name, taken[0])
        else:
            made = self._builder.call(_function_of(equation) or "", *taken)
        self._values[equation.results] = made

    def _add_output(self, v: Var) -> Any:
        """Makes a value a result; returns the index that gives its array the dimensions of the loop."""
        role = self._group.role(shape_of(v))
        self._builder.output(self._values[v], per_row=role in ("row", "flat"))
        return (..., *(0,) * self._group.row_ndim) if role == "row" else None

    def __call__(self, values: Any) -> bool:
        """Computes the group; returns whether it did: not where the bits would not be those of eager mode."""
        inputs = []
        for number, constant, index in self._inputs:
            x = constant if number < 0 else values[number]
            if type(x) is ShardedTensor:
                x = whole_array(x, "jit")
            inputs.append(x if index is None else x[index])
        if self._ordered and self.compiled is None and not blocked.is_exact(self.kernel, self.shape, inputs):
            return False
        if self.compiled is None and not all(map(_is_row_major, inputs)):
            return False  # NumPy's results have the order of their operands, on which the bits of later sums depend.
        outputs = [memory_pool.empty(kind.shape, kind.dtype) for _, kind, _ in self._kept]
        targets = [out if index is None else out[index] for out, (_, _, index) in zip(outputs, self._kept, strict=True)]
        if self.compiled is not None and not _reports_errors():
            self.compiled.run(self.shape, inputs, targets)
        else:
            blocked.run(self.kernel, self.shape, inputs, targets)
        for out, (number, kind, _) in zip(outputs, self._kept, strict=True):
            values[number] = tensor(kind, Storage((out,), ([],)))
        return True


def _expanding(shape: Shape, fused: Fused, flat: bool) -> Any:
    """Returns the index that gives an array of that shape the dimensions of the loop."""
    after = (None,) * fused._group.row_ndim if flat else ()
    return ((None,) * (len(fused.shape) - len(shape) - len(after)) + (...,) + after) if shape else None


def _is_row_major(x: Any) -> bool:
    """Whether NumPy gives results of an operand row-major order: its strides decrease."""
    if not isinstance(x, np.ndarray) or x.ndim < 2 or x.flags.c_contiguous:
        return True
    strides = [abs(step) for step, n in zip(x.strides, x.shape, strict=True) if n > 1 and step]
    return strides == sorted(strides, reverse=True)


def _reports_errors() -> bool:
    """Whether floating-point errors raise or call a function, which compiled code does not."""
    return any(what in ("raise", "call") for what in np.geterr().values())


def work_of(fused: Fused) -> int:
    """Returns the number of elements that the functions of a group compute."""
    return math.prod(fused.shape) * len(fused.equations)
