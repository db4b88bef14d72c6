"""What kernels can compute on arrays that are not NumPy's: equations of which every device has what it needs.

A kernel runs once for each buffer, in the memory that holds it: once on the logical devices of a GPU, which share
buffers. So the operands of an equation have to be split as its result is. Where all tensors are in one memory, they are
one buffer, and the split is of no importance, as on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentTypeError
from shardtensor.interpreters.jit.cuda.cuda_source import has_cuda
from shardtensor.interpreters.jit.grouping.window_writes import function_operands, is_whole
from shardtensor.interpreters.jit.kernels.expressions import C_TYPES, has_c
from shardtensor.interpreters.jit.kernels.kernel import KernelBuilder, dtype_name
from shardtensor.interpreters.programs.program import Equation, Var, kind_of, vars_of
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.value import Aval


def language_of(value: Aval) -> str | None:
    """Returns the language of the kernels on the memories of a value; None for NumPy's arrays of this process, or if
    there are none.
    """
    backend = value.backend
    return None if value.offloaded or backend.simulated else backend.kernel_language


def has_operands(equation: Equation, value: Aval) -> bool:
    """Returns whether the operands of an equation are numbers and tensors that are split as its result is."""
    language = language_of(value)
    if language is None or any(isinstance(kind_of(x), HostAval) for x in equation.operands):
        return False
    if equation.writes and not is_whole(equation) and (value.memory is None or language != "cuda"):
        return False
    kinds = [v.kind for v in vars_of(equation.operands) if isinstance(v.kind, Aval)]
    if any(language_of(k) != language or k.unreduced or k.backend is not value.backend for k in (*kinds, value)):
        return False
    if any(_c_type(k.dtype) is None for k in (*kinds, value)):
        return False
    # The devices that hold a number may be others than those of its layout.
    return value.memory is not None or all(k.ndim for k in kinds)


def _c_type(dtype: np.dtype[Any]) -> str | None:
    try:
        return C_TYPES.get(dtype_name(dtype))
    except ArgumentTypeError:
        return None


def has_expression(name: str, equation: Equation) -> bool:
    """Returns whether a function has an expression in the language of the memory of an equation's result."""
    kinds = []
    for x in function_operands(equation):
        kind = x.kind if type(x) is Var else type(x)
        kinds.append(kind if isinstance(kind, type) else kind.dtype.str)
    return name == "astype" or _is_written(name, tuple(kinds), language_of(equation.results.kind) == "cuda")


@functools.lru_cache(1 << 10)
def _is_written(name: str, kinds: tuple[Any, ...], cuda: bool) -> bool:
    builder = KernelBuilder(1)
    builder.output(builder.call(name, *[builder.input(kind) for kind in kinds]))
    return (has_cuda if cuda else has_c)(builder.build())


def are_split_alike(values: Sequence[Aval], like: Aval, row_ndim: int, flat: bool) -> bool:
    """Returns whether values can be operands and results of one loop.

    Args:
        values: values that broadcast to the loop.
        like: a value of the shape of the loop.
        row_ndim: the number of trailing dimensions that make a row.
        flat: whether the values lack the dimensions of a row.
    """
    return all(_is_split_alike(x, like, row_ndim if flat else 0) for x in values)


@functools.lru_cache(1 << 10)
def _is_split_alike(x: Aval, like: Aval, missing: int) -> bool:
    if x.memory is not None and like.memory is not None:
        return bool(x.memory == like.memory)
    shape = like.shape[: like.ndim - missing]
    if x.ndim > len(shape) or x.cells.grid.devices != like.cells.grid.devices:
        return False
    for k in range(len(like.cells.grid.devices)):
        boxes = zip(x.cells.grid.box(k), like.cells.grid.box(k)[len(shape) - x.ndim : len(shape)], strict=True)
        for (mine, its), n, m in zip(boxes, x.shape, shape[len(shape) - x.ndim :], strict=True):
            if mine != (its if n == m else (0, 1)):
                return False
    return True
