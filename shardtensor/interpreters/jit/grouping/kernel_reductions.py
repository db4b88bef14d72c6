"""Reductions of tensors as steps of kernels: what a kernel can reduce, and the steps that compute it.

A row of a kernel consists of the trailing dimensions that are reduced. In C, these may be all dimensions, and they may
be split over devices that share a memory: partial results are combined in an order that depends on the size of the row
only. NumPy's order is that of eager mode where whole rows are on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardtensor.interpreters.jit.kernels.expressions import C_TYPES
from shardtensor.interpreters.jit.kernels.kernel import KernelBuilder, Value, dtype_name
from shardtensor.interpreters.programs.program import Equation
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import reduced_axes
from shardtensor.tensor.value import Aval

_PARAMS = frozenset(("axis", "dtype", "keepdims", "correction"))


def is_reduction(equation: Equation) -> bool:
    """Returns whether an equation is a reduction that kernels know."""
    return equation.op.name in _STEPS and equation.op.combine is not None


def axes_of(equation: Equation) -> Sequence[int]:
    """Returns the dimensions that a reduction reduces, in order."""
    return sorted(reduced_axes(_named(equation)["axis"], equation.operands[0].kind.ndim))


def outer_shape(equation: Equation, shape: Shape) -> Shape:
    """Returns the dimensions of the operand of a reduction before those that it reduces."""
    return shape[: len(shape) - len(reduced_axes(_named(equation)["axis"], len(shape)))]


def reduces_rows(equation: Equation, x: Aval) -> bool:
    """Returns whether an equation reduces trailing dimensions, in dtypes that its steps have."""
    if not reduces_some(equation, x):
        return False
    axes = reduced_axes(_named(equation)["axis"], x.ndim)
    return sorted(axes) == list(range(x.ndim - len(axes), x.ndim))


def reduces_some(equation: Equation, x: Aval) -> bool:
    """Returns whether an equation reduces dimensions, in dtypes that its steps have."""
    named, value = _named(equation), equation.results.kind
    if set(named) - _PARAMS or named.get("dtype") is not None or not x.ndim:
        return False
    axes = reduced_axes(named["axis"], x.ndim)
    if not axes or any(x.shape[d] < 2 for d in axes):
        return False
    if is_wide(equation) and any(dtype_name(y.dtype) not in C_TYPES for y in (x, value)):
        return False
    return _STEPS[equation.op.name].takes(x.dtype, value.dtype)


def is_wide(equation: Equation) -> bool:
    """Returns whether a reduction is one that NumPy on blocks does not compute: eager mode divides it by devices or
    threads.
    """
    x = equation.operands[0].kind
    axes = reduced_axes(_named(equation)["axis"], x.ndim)
    return len(axes) == x.ndim or any(x.sharding.spec.chains_of(x.ndim)[d] for d in axes)


def add_reduction(
    builder: KernelBuilder, equation: Equation, x: Value, one: Value | None = None, *, in_blocks: bool = True
) -> Value:
    """Adds the steps of a reduction, which are those of eager mode, and returns the number of the result.

    Args:
        builder: the kernel.
        equation: the reduction.
        x: the value that it reduces.
        one: the input with `divisor`, where there is one.
        in_blocks: whether eager mode computes it in blocks. Otherwise it calls NumPy's variance, which adds the squares
            in another order.
    """
    steps, dtype = _STEPS[equation.op.name], equation.results.kind.dtype
    if not steps.averages:
        return builder.reduce(equation.op.name, builder.astype(x, dtype) if steps.casts else x)
    x = builder.astype(x, _precision(builder.dtype(x)))
    mean = builder.reduce("mean", x)
    if not steps.spreads:
        return builder.astype(mean, dtype)
    assert one is not None
    deviation = builder.call("subtract", x, mean)
    if in_blocks:
        spread = builder.reduce("sum_of_squares", deviation)
    else:
        spread = builder.reduce("sum", builder.call("multiply", deviation, deviation))
    variance = builder.astype(builder.call("divide", spread, one), dtype)
    return builder.call("sqrt", variance) if steps.root else variance


def divisor(equation: Equation) -> float | None:
    """Returns the number by which a variance divides the sum of squares; None for other reductions."""
    if not _STEPS[equation.op.name].spreads:
        return None
    shape = equation.operands[0].kind.shape
    count = math.prod([shape[d] for d in axes_of(equation)])
    return float(max(count - _named(equation)["correction"], 0.0))


def _precision(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which NumPy computes means: float64 for integers, at least float32 for others."""
    return np.dtype("f8") if dtype.kind in "biu" else np.result_type(dtype, "f4")


def _named(equation: Equation) -> dict[str, Any]:
    return dict(zip(equation.op.params, equation.params, strict=True))


# -- what a kernel knows of each reduction ---------------------------------------------------------

DType: TypeAlias = np.dtype[Any]


class _Steps(NamedTuple):
    """The steps of a reduction.

    Attributes:
        takes: returns whether kernels reduce elements of one dtype to another with the bits of eager mode.
        casts: whether the elements are cast to the dtype of the result before.
        averages: whether their mean is computed.
        spreads: whether the squares of their deviations from it are added.
        root: whether the square root of the result is taken.
    """

    takes: Callable[[DType, DType], bool]
    casts: bool = False
    averages: bool = False
    spreads: bool = False
    root: bool = False


def _alike(dtype: DType, result: DType) -> bool:
    return dtype == result


def _added(dtype: DType, result: DType) -> bool:
    return dtype == result or (dtype.kind in "biu" and result.kind in "iu")


def _spread(dtype: DType, result: DType) -> bool:
    return dtype.kind in "biuf" and dtype != np.float16


_STEPS: dict[str, _Steps] = {
    "max": _Steps(_alike),
    "min": _Steps(_alike),
    "any": _Steps(lambda dtype, result: True),
    "all": _Steps(lambda dtype, result: True),
    "sum": _Steps(_added, casts=True),
    "prod": _Steps(_added, casts=True),
    "mean": _Steps(lambda dtype, result: dtype.kind != "c", averages=True),
    "var": _Steps(_spread, averages=True, spreads=True),
    "std": _Steps(_spread, averages=True, spreads=True, root=True),
}
