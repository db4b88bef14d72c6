"""Groups: the equations that one kernel computes, in one pass over memory.

A group consists of elementwise operators over one loop, and of reductions of its rows along trailing dimensions. With
NumPy, these are not all dimensions, and they are not split. Its operands and results are whole buffers of host memory,
so that the split of the loop over devices is of no importance. An equation joins the group of its operands as long as
nothing else has read a value of the group. A write to a part of a tensor ends the group that computes the elements.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST_MEMORY
from shardtensor.backend.small_floats import is_small_float
from shardtensor.core import OPS
from shardtensor.errors import ArgumentTypeError
from shardtensor.interpreters.jit.grouping import device_groups
from shardtensor.interpreters.jit.grouping.kernel_reductions import is_reduction, is_wide, outer_shape, reduces_rows
from shardtensor.interpreters.jit.grouping.window_writes import (
    computed_aval,
    function_operands,
    has_function,
    is_whole,
    without_copies,
)
from shardtensor.interpreters.jit.kernels.expressions import EXPENSIVE
from shardtensor.interpreters.jit.kernels.kernel import KernelBuilder
from shardtensor.interpreters.programs.program import Equation, Program, Var, kind_of, shape_of, vars_of
from shardtensor.interpreters.programs.replay import plan_of
from shardtensor.sharding.layout import Shape
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.tensor import SCALARS
from shardtensor.tensor.value import Aval, spans_hosts

LEAST = 1 << 14
"""The minimum number of elements of a loop on NumPy's arrays: on fewer, calls of NumPy's functions take less time than
a kernel. Functions of devices never do.
"""

_MOST = 64
"""The maximum number of equations of a group: the compiler's time grows faster than the number."""


class Group:
    """Equations that one kernel computes.

    Attributes:
        shape: the shape of the loop.
        like: a value of that shape that is split as the loop is; None on the host, where the split is of no importance.
        equations: the equations, in order.
        row_ndim: the number of trailing dimensions that make a row; 0 as long as nothing is reduced.
    """

    def __init__(self, shape: Shape, like: Aval | None = None) -> None:
        self.shape = shape
        self.like = like
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


def grouped(
    program: Program,
    wide: bool = False,
    may_join: Callable[[Equation], bool] = lambda _: True,
    repeated: bool = False,
) -> list[Sequence[Equation]]:
    """Returns the equations of a program in an order in which those of a group follow one another, as nodes: a node is
    an equation, or a group.

    Args:
        program: the program.
        wide: whether reductions of all dimensions and of split ones join groups, for which C is needed.
        may_join: returns whether an equation may be one of a group.
        repeated: whether C repeats the program, so that short loops have kernels, too.
    """
    return _Grouping(program, wide, may_join, repeated).nodes()


def is_kernel(node: Sequence[Equation], wide: bool, repeated: bool = False) -> bool:
    """Returns whether a node is computed by a kernel: several equations, or one for which NumPy takes longer than the
    memory traffic, if C is possible; if C repeats the program, any one.
    """
    (first, *others) = node
    if others or not wide or not _is_local(first, wide, repeated):
        return bool(others)
    if repeated:
        return not (first.writes and "assigns" in first.op.tags)
    if _split_as(first) is None:
        return is_reduction(first) or first.op.name in EXPENSIVE
    # Libraries of devices are as fast as kernels, but combine what logical devices have in further launches.
    return is_reduction(first) and is_wide(first)


class _Grouping:
    def __init__(self, program: Program, wide: bool, may_join: Callable[[Equation], bool], repeated: bool) -> None:
        self._program = program
        self._wide = wide
        self._repeated = repeated
        self._may_join = may_join
        self._open: dict[int, Group] = {}  # by the number of a value that the group computes
        self._all: list[Group] = []

    def nodes(self) -> list[Sequence[Equation]]:
        """See `grouped`."""
        alone: list[tuple[int, Equation]] = []
        program = _live(without_copies(self._program), self._wide, self._repeated)
        for k, equation in enumerate(map(_simpler_power, program.equations) if self._wide else program.equations):
            reads = equation.reads()
            is_long = any(v.number in self._open for v in reads) or _is_long(equation, self._repeated)
            joins = self._may_join(equation) and is_long and _is_possible(equation, self._wide, self._repeated)
            group = self._joined(equation) if joins else None
            outside = [v for v in reads if self._open.get(v.number) is not group]
            for v in outside:
                self._close(v)
            if group is None:
                alone.append((k, equation))
                continue
            group.equations.append((k, equation))
            if equation.writes and not is_whole(equation):  # Its result has another shape.
                self._end(group)
            else:
                self._open[equation.results.number] = group
        nodes: list[tuple[int, Sequence[Equation]]] = [(k, (e,)) for k, e in alone]
        for group in self._all:
            if group.equations:
                nodes.append((group.equations[-1][0], [e for _, e in group.equations]))
        return [node for _, node in sorted(nodes, key=lambda pair: pair[0])]

    def _close(self, v: Var) -> None:
        """Ends the group that computes a value: something outside of it reads the value."""
        group = self._open.get(v.number)
        if group is not None:
            self._end(group)

    def _end(self, group: Group) -> None:
        for _, equation in group.equations:
            self._open.pop(equation.results.number, None)

    def _joined(self, equation: Equation) -> Group | None:
        """Returns the group of an equation that a kernel can compute: that of its operands, or a new one.

        None for equations with which no group begins: an assignment of a value that no group computes, and few
        elements. The few elements that a group computes from its reductions (the square roots of a variance of each
        row) are computed by it: its loop ended otherwise, and another one read its operands again.
        """
        reduces = is_reduction(equation)
        operands = vars_of(function_operands(equation))
        shape = _loop_of(equation)
        rows = len(shape) - len(outer_shape(equation, shape)) if reduces else 0
        base = self._open.get(equation.operands[0].number) if equation.writes and not is_whole(equation) else None
        groups = []
        for v in operands:
            group = self._open.get(v.number)
            fits = group is not None and group is not base and group not in groups
            if group is not None and fits and self._fits(group, equation, shape, rows):
                groups.append(group)
        assigns = equation.writes and "assigns" in equation.op.tags
        if not groups and (assigns or not _is_long(equation, self._repeated)):
            return None
        target = groups[0] if groups else Group(shape, _split_as(equation))
        if not groups:
            self._all.append(target)
        target.row_ndim = target.row_ndim or rows
        for other in groups[1:]:
            together = len(other.equations) + len(target.equations) < _MOST
            lengths = {target.row_ndim, other.row_ndim} - {0}
            alike = _is_split_as(other, target) and self._ignores(other, target.equations[0][1])
            if other.shape == target.shape and len(lengths) < 2 and together and alike:
                self._merge(target, other)
        return target

    def _merge(self, group: Group, other: Group) -> None:
        group.row_ndim = group.row_ndim or other.row_ndim
        group.equations = sorted(group.equations + other.equations, key=lambda pair: pair[0])
        for _, equation in other.equations:
            if equation.results.number in self._open:
                self._open[equation.results.number] = group
        other.equations = []

    def _ignores(self, group: Group, equation: Equation) -> bool:
        """Whether a group ignores the floating-point errors that an equation ignores; kernels in C report none."""
        return self._wide or group.equations[0][1].ignored == equation.ignored

    def _fits(self, group: Group, equation: Equation, shape: Shape, rows: int) -> bool:
        if len(group.equations) >= _MOST or not _has_parts(group, equation, shape, rows):
            return False
        if not self._ignores(group, equation):
            return False
        if rows:
            return group.shape == shape and group.row_ndim in (0, rows)
        role = group.role(shape)
        if equation.writes and role != "full":
            return False
        if role in ("full", "row"):  # A value without the reduced dimensions broadcasts along other ones.
            inside = [v for v in vars_of(equation.operands) if self._open.get(v.number) is group]
            return all(not shape_of(v) or group.role(shape_of(v)) != "flat" for v in inside)
        if role != "flat":
            return False
        return all(getattr(kind, "shape", ()) in (shape, ()) for kind in map(kind_of, equation.operands))


def _live(program: Program, wide: bool, repeated: bool) -> Program:
    """Returns a program without those equations of kernels, copies and views whose results nothing uses."""
    used = {*program.outputs, *program.writes.values()}
    kept: list[Equation] = []
    for equation in reversed(program.equations):
        op = equation.op
        copies = "same elements" in op.tags and op.name != "transfer_to"  # A transfer is what the program asks for.
        if used.isdisjoint(equation.makes()) and (op.name == "view" or copies or _is_local(equation, wide, repeated)):
            continue
        used.update(equation.reads())
        kept.append(equation)
    return program if len(kept) == len(program.equations) else dataclasses.replace(program, equations=kept[::-1])


_POWERS = {2: "square", 0.5: "sqrt", -1: "reciprocal"}
"""The functions by which NumPy computes powers with these numbers as exponents, to the bit."""


def _simpler_power(equation: Equation) -> Equation:
    """Returns an equation; for a power of floats with an exponent of `_POWERS`, that of the function. In C, powers take
    ten times as long.
    """
    if equation.op is not OPS["pow"]:
        return equation
    x, exponent = equation.operands[-2:]
    kind = kind_of(x)
    if type(exponent) not in (int, float) or not isinstance(kind, (Aval, HostAval)) or kind.dtype.kind != "f":
        return equation
    name, value = _POWERS.get(exponent), equation.results.kind
    if name is None or not isinstance(value, Aval) or device_groups.language_of(value) == "cuda":
        return equation
    if value.spans:  # Processes compare calls, and one of them may have no compiler.
        return equation
    return dataclasses.replace(equation, op=OPS[name], operands=equation.operands[:-1])


# -- what a kernel can compute ---------------------------------------------------------------------


def _is_local(equation: Equation, wide: bool, repeated: bool) -> bool:
    """Whether a kernel can compute an equation, and takes less time than NumPy's functions."""
    return _has_loop(equation) and _is_long(equation, repeated) and _is_possible(equation, wide, repeated)


def _has_loop(equation: Equation) -> bool:
    """Whether an equation computes one tensor, so that it may have a loop."""
    return type(equation.results) is Var and isinstance(equation.results.kind, Aval)


def _is_long(equation: Equation, repeated: bool) -> bool:
    """Whether a loop has the elements for which a kernel is worth its call."""
    if not _has_loop(equation):
        return False
    return repeated or not is_on_host(equation.results.kind) or math.prod(_loop_of(equation)) >= LEAST


def _loop_of(equation: Equation) -> Shape:
    """Returns the shape of the loop of an equation."""
    if is_reduction(equation):
        shape: Shape = getattr(kind_of(equation.operands[0]), "shape", ())
        return shape
    return computed_aval(equation).shape


def _is_possible(equation: Equation, wide: bool, repeated: bool) -> bool:
    """Whether a kernel can compute an equation, from whole buffers of host memory or from the parts of devices."""
    if not _has_loop(equation):
        return False
    if equation.writes and not has_function(equation):
        return False
    if "in kernels" in equation.op.tags and equation.op.name != "where" and not repeated:
        return False
    value = equation.results.kind
    kinds = [x.kind if type(x) is Var else x for x in equation.operands]
    avals = [k for k in kinds if isinstance(k, Aval)]
    if not avals and (not repeated or is_reduction(equation) or not is_on_host(value)):
        return False
    if not all(is_on_host(k) for k in (*avals, value)):
        return (wide or spans_hosts(value)) and _is_local_on_devices(equation, avals[0], value)
    if is_reduction(equation):
        return avals[0].size > 0 and reduces_rows(equation, avals[0]) and (wide or not is_wide(equation))
    return (len(_loop_of(equation)) > 0 or repeated) and function_of(equation) is not None


# -- on devices ------------------------------------------------------------------------------------


def _is_local_on_devices(equation: Equation, x: Aval, value: Aval) -> bool:
    """Whether compiled kernels can compute an equation from the arrays of devices."""
    if not device_groups.has_operands(equation, value):
        return False
    shape = _loop_of(equation)
    if not shape or not _has_parts(None, equation, shape, 0):
        return False
    if value.spans and not _is_local_in_processes(equation, shape):
        return False
    if is_reduction(equation):
        in_one = value.memory is not None and device_groups.language_of(value) == "cuda"
        return reduces_rows(equation, x) and (in_one or not is_wide(equation))
    name = function_of(equation)
    return name is not None and device_groups.has_expression(name, equation)


def _is_local_in_processes(equation: Equation, shape: Shape) -> bool:
    """Whether an operator on tensors that span processes exchanges nothing, and loops are not short."""
    if equation.writes:  # Its first operand is the base, which the operator's plan does not contain.
        return False
    plan, value = plan_of(equation), equation.results.kind
    if plan is None or any(t is not None and not t.stays for t in plan.transfers):
        return False
    return not spans_hosts(value) or math.prod(shape) >= LEAST * len(value.cells.positions)


def _split_as(equation: Equation) -> Aval | None:
    """Returns a value that is split as the loop of an equation on devices; None on the host."""
    value: Aval = equation.operands[0].kind if is_reduction(equation) else equation.results.kind
    return None if is_on_host(value) else value


def _is_split_as(other: Group, target: Group) -> bool:
    return target.like is None or (
        other.like is not None and device_groups.are_split_alike([other.like], target.like, 0, False)
    )


def _has_parts(group: Group | None, equation: Equation, shape: Shape, rows: int) -> bool:
    """Whether each device has those parts of operands and result that belong to its part of the loop of a group; None
    stands for a group of only the equation.
    """
    like = group.like if group else _split_as(equation)
    if like is None:
        return True
    kinds = [v.kind for v in (*vars_of(function_operands(equation)), equation.results)]
    values = [k for k in kinds if isinstance(k, Aval)]
    if is_reduction(equation):
        before = rows or len(shape) - len(outer_shape(equation, shape))
        kept = equation.results.kind.ndim == len(shape)
        return device_groups.are_split_alike(values[:1], like, before, False) and (
            device_groups.are_split_alike(values[1:], like, before, not kept)
        )
    flat = group is not None and group.role(shape) == "flat" and len(group.shape) > 1
    return device_groups.are_split_alike(values, like, group.row_ndim if group else 0, flat)


def is_on_host(value: Aval) -> bool:
    """Returns whether a value is an array of NumPy, of which kernels compute the elements."""
    return (
        value.memory == HOST_MEMORY
        and value.backend.on_host
        and not value.unreduced
        and not value.backend.simulated
        and _is_computed(value.dtype)
    )


def _is_computed(dtype: np.dtype[Any]) -> bool:
    """Whether kernels compute elements of a dtype. They have no long double, and no other byte order."""
    return (
        dtype.kind in "biufc"
        and not is_small_float(dtype)
        and dtype.isnative
        and dtype.itemsize <= 16
        and dtype != np.dtype(np.longdouble)
    )


def _cast_of(equation: Equation) -> str | None:
    """Returns ``"astype"`` for a cast to another dtype that keeps the kind or widens it; C leaves others undefined."""
    kind, dtype = kind_of(equation.operands[0]), equation.results.kind.dtype
    if not isinstance(kind, (Aval, HostAval)) or not _is_computed(kind.dtype) or kind.dtype == dtype:
        return None
    return "astype" if np.can_cast(kind.dtype, dtype, "same_kind") else None


def function_of(equation: Equation) -> str | None:
    """Returns the name of the elementwise function that an equation is in a kernel; None if it is not one.

    An assignment is the cast ``astype``.
    """
    op = equation.op
    dtype = equation.results.kind.dtype
    if equation.writes and "assigns" in op.tags:
        return "astype" if np.can_cast(equation.operands[1].kind.dtype, dtype, "same_kind") else None
    if op.name == "astype":
        return _cast_of(equation)
    is_plain = op.is_ufunc and not op.params and op.parts.kernel is None and op.parts.composite is None
    if is_plain or "in kernels" in op.tags:
        name = op.name
    else:
        return None
    kinds: list[Any] = []
    if op.name == "clip" and any(x is None for x in equation.operands):
        return None
    for kind in map(kind_of, function_operands(equation)):
        if isinstance(kind, (Aval, HostAval)) and _is_computed(kind.dtype):
            kinds.append(kind.dtype)
        elif isinstance(kind, type) and kind in SCALARS:
            kinds.append(kind)
        else:
            return None
    # A Python integer that does not fit the dtype of the others is an error of eager mode.
    dtypes = [k for k in kinds if isinstance(k, np.dtype)]
    if int in kinds and dtypes and not any(k.kind in "fc" or k == np.int64 for k in dtypes):
        return None
    # A dtype is equal to the Python type of the same numbers, which is weak; its text is not.
    result = _computed_dtype(name, tuple([k if isinstance(k, type) else k.str for k in kinds]))
    if result is None:
        return None
    fits = np.can_cast(result, dtype, "same_kind") if equation.writes else result == dtype
    return name if fits else None


@functools.lru_cache(1 << 10)
def _computed_dtype(name: str, kinds: tuple[str | type, ...]) -> np.dtype[Any] | None:
    """Returns the dtype of a function in a kernel, of operands of some dtypes or Python types; None if it has none."""
    builder = KernelBuilder(1)
    try:
        return builder.dtype(builder.call(name, *[builder.input(kind) for kind in kinds]))
    except ArgumentTypeError:
        return None
