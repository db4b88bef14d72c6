"""Operations of the rows of derivatives on cotangents: sizes, dtypes, and contributions to a part of a value.

A cotangent has the dimensions of its value. It may have size 1 along dimensions along which it is constant, so that the
transpose of a sum computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.small_floats import is_small_float
from shardtensor.core import OPS, Op, bind, call
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.pytree import leaves, replaced
from shardtensor.tensor.tensor import SCALARS, ShardedTensor
from shardtensor.tensor.value import Aval, summed

FLOAT0 = np.dtype([("float0", np.void, 0)])
"""The dtype of the gradients of integers, as in JAX."""


class Call:
    """One call of an operator, in the form that its derivative receives.

    Attributes:
        op: the operator.
        params: the values of its parameters, by name.
        active: for each leaf of the operands, whether its cotangent is wanted.
        kinds: for each leaf of the operands its aval; for one that is not a tensor, the object itself.
        results: likewise for each leaf of the result.
        saved: the values that the derivative has asked for, by name.
        tree: the operands with ``kinds`` in place of their leaves, if some of them are trees; otherwise None.
    """

    __slots__ = ("active", "kinds", "op", "params", "results", "saved", "tree")

    op: Op
    params: dict[str, Any]
    active: Sequence[bool]
    kinds: Sequence[Any]
    results: Sequence[Any]
    saved: dict[str, Any]
    tree: Sequence[Any] | None

    def again(self, *operands: Any) -> Any:
        """Returns the result of the operator with other operands and the same parameters; nothing is donated."""
        return bind(self.op, operands, tuple([n != "donate" and v for n, v in self.params.items()]))

    def applied(self, tangents: Sequence[Any]) -> Any:
        """Returns the result of the operator, with the operands that are saved, and tangents for the leaves of the
        others, where None stands for zeros.
        """
        pairs, operands = iter(zip(tangents, self.kinds, strict=True)), []
        for k, operand in enumerate(self.kinds if self.tree is None else self.tree):
            mine = [next(pairs) for _ in leaves(operand)]
            name = self.op.operands[0 if self.op.signature.variadic else k]
            if name in self.saved:
                operands.append(self.saved[name])
            else:
                operands.append(replaced(operand, [_zeros(kind) if t is None else t for t, kind in mine]))
        return self.again(*operands)

    def add_up(self, number: int, name: str, *operands: Any, **params: Any) -> Any:
        """Returns the result of a sum or a product, the operator ``name``, which is the cotangent of one operand.

        Partial sums are added directly into the layout of the argument, if the result is all of its gradient, and are
        left as they are, if they are to be added to others first.

        Args:
            number: the number of the operand, or -1 for a result in another shape than that of the operand.
            name, operands, params: the call.
        """
        return OPS[name].dispatch(*operands, **params)


class Into:
    """A contribution to the elements of a cotangent that a view spec selects: it is added to them in place.

    Many slices of one value therefore cost the sum of their sizes, and not as many times the size of the value.

    Attributes:
        g: the contribution, in the shape of the view.
        view_spec: the view spec.
    """

    __slots__ = ("g", "view_spec")

    def __init__(self, g: Any, view_spec: ViewSpec) -> None:
        self.g = g
        self.view_spec = view_spec


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Whether values of a dtype have derivatives."""
    return dtype.kind in "fc" or is_small_float(dtype)


def is_number(x: Any) -> bool:
    """Whether an object is an array or a number, or the aval of one."""
    return isinstance(x, Aval) or hasattr(x, "dtype") or type(x) in (bool, int, float, complex)


def is_unreduced(g: Any) -> bool:
    """Whether a cotangent consists of partial sums, which are yet to be added."""
    return type(g) is ShardedTensor and bool(g._aval.unreduced)


def zeros_of(kind: Any, dtype: Any = None) -> Any:
    """Returns zeros in the shape and layout of a value, given its aval, or a scalar that stands for itself."""
    if isinstance(kind, Aval):
        return call("zeros", kind.shape, dtype=dtype or kind.dtype, device=summed(kind).sharding)
    return call("zeros", shape_of(kind), dtype=dtype or dtype_of(kind))


def _zeros(kind: Any) -> Any:
    """Returns the tangent of an operand that does not change."""
    if isinstance(kind, Aval):
        return zeros_of(kind)
    return type(kind)(0) if type(kind) in SCALARS or isinstance(kind, np.generic) else kind


def whole(g: Any, kind: Any) -> Any:
    """Returns a cotangent in the shape of its value, given the aval of that, and in its layout if it was smaller."""
    shape = shape_of(kind)
    if g.shape == shape:
        return g
    if is_unreduced(g) or not isinstance(kind, Aval):
        return call("broadcast_to", g, shape)
    return call("add", zeros_of(kind, g.dtype), g)


def cast_to(g: Any, kind: Any) -> Any:
    """Returns a cotangent in the dtype of its value: the real part, if that is real."""
    dtype = dtype_of(kind)
    if g.dtype == dtype or not is_inexact(dtype):
        return g
    if g.dtype.kind == "c" and dtype.kind != "c":
        g = call("real", g)
    return g if g.dtype == dtype else call("astype", g, dtype)


def unbroadcast(g: Any, recorded: Call, number: int, result: Any = None) -> Any:
    """Returns the cotangent of an operand that was broadcast to the shape of the result: the sum over the dimensions
    that it lacks, or of which it has only one index.

    Args:
        g: the cotangent in the dimensions of the result.
        recorded: the call.
        number: the number of the operand.
        result: the shape to which the operand was broadcast; by default that of the first result.
    """
    kind = recorded.kinds[number]
    shape = shape_of(kind)
    over = shape_of(recorded.results[0]) if result is None else result
    if shape == over:
        return g
    more = len(over) - len(shape)
    gone = [d for d, n in enumerate(over) if d < more or (shape[d - more] == 1 and n != 1)]
    # Along dimensions of size 1 the cotangent is constant, so that the sum is a multiple.
    count = math.prod([over[d] for d in gone if g.shape[d] == 1])
    axes = tuple([d for d in gone if g.shape[d] != 1])
    if axes and tuple(range(more)) == axes:
        g = recorded.add_up(number, "sum", g, axis=axes)
        more = 0
    elif axes:
        g = recorded.add_up(number if not more else -1, "sum", g, axis=axes, keepdims=True)
    if more:
        g = call("squeeze", g, axis=tuple(range(more)))
    return g if count == 1 else g * count


def without_rows(g: Any, rows: Any, begins: Any, sizes: Any) -> Any:
    """Returns a cotangent with zeros in some slices of its first dimension, which may be empty.

    Args:
        g: the cotangent.
        rows: the indices of its first dimension.
        begins: where each slice begins.
        sizes: its size.
    """
    ends = call("add", begins, sizes)
    begun, ended = (call("searchsorted", call("sort", at), rows, side="right") for at in (begins, ends))
    return call("where", call("reshape", call("greater", begun, ended), (-1, *[1] * (g.ndim - 1))), 0, g)
