"""Arguments of rules with ``symbolic_zeros=True``, with the names of `jax.custom_derivatives`: they show which
arguments of a function with `st.custom_vjp` or `st.custom_jvp` are differentiated, and which of its results are used.

>>> @st.custom_vjp
... def scaled(x, scale):
...     return x * scale
>>> def fwd(x, scale):  # Each argument is a `CustomVJPPrimal`.
...     return x.value * scale.value, (x.value if scale.perturbed else None, scale.value)
>>> def bwd(saved, g):
...     x, scale = saved
...     return g * scale, None if x is None else (g * x).sum()
>>> scaled.defvjp(fwd, bwd, symbolic_zeros=True)
>>> st.grad(lambda x: scaled(x, 3.0).sum())(st.ones(2)).tolist()
[3.0, 3.0]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.functions.derivatives.cotangents import FLOAT0, is_inexact, is_number, zeros_of
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.tensor.array_type import ArrayType, typeof
from shardtensor.tensor.operands import dtype_of, shape_of
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval, summed

__all__ = ["CustomVJPPrimal", "SymbolicZero", "zero_from_primal"]


class CustomVJPPrimal:
    """A leaf of the arguments as the rule ``fwd`` of `st.custom_vjp` gets it with ``symbolic_zeros=True``.

    Attributes:
        value: the leaf.
        perturbed: whether it is differentiated, so that its cotangent is needed.

    >>> st.custom_derivatives.CustomVJPPrimal(2.0, True)
    CustomVJPPrimal(value=2.0, perturbed=True)
    """

    __slots__ = ("perturbed", "value")

    def __init__(self, value: Any, perturbed: bool) -> None:
        self.value = value
        self.perturbed = perturbed

    def __repr__(self) -> str:
        return f"CustomVJPPrimal(value={self.value!r}, perturbed={self.perturbed})"


class SymbolicZero:
    """A tangent or a cotangent that is zero, in place of an array of zeros. Operators do not take it.

    Attributes:
        aval: its type, as `st.typeof` returns it.
        shape: the size of each dimension.
        dtype: the dtype: that of the value, or float0 for the tangent of an integer.
        sharding: the sharding of the value; None for objects that are not tensors.
        ndim: the number of dimensions.

    >>> st.custom_derivatives.SymbolicZero(st.typeof(np.ones(3)))
    SymbolicZero(float64[3])
    """

    __slots__ = ("aval",)

    def __init__(self, aval: ArrayType) -> None:
        self.aval = aval

    @property
    def shape(self) -> Shape:
        """The size of each dimension."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype: that of the value, or float0 for the tangent of an integer."""
        return self.aval.dtype

    @property
    def sharding(self) -> NamedSharding | None:
        """The sharding of the value; None for objects that are not tensors."""
        return self.aval.sharding

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.aval.ndim

    def __repr__(self) -> str:
        return f"SymbolicZero({self.aval})".replace(str(FLOAT0), "float0")

    @staticmethod
    def from_primal_value(val: Any) -> SymbolicZero:
        """Returns the tangent of a value that is not differentiated.

        Args:
            val: an array or a number.

        >>> st.custom_derivatives.SymbolicZero.from_primal_value(np.arange(3))
        SymbolicZero(float0[3])
        """
        kind = typeof(summed(val) if isinstance(val, Aval) else val)
        return SymbolicZero(kind if is_inexact(kind.dtype) else ArrayType(kind.shape, FLOAT0, kind.sharding))


def zero_from_primal(val: Any, symbolic_zeros: bool = False) -> Any:
    """Returns the tangents of values that are not differentiated.

    Args:
        val: a pytree of arrays and numbers.
        symbolic_zeros: whether they are `SymbolicZero` objects, or arrays of zeros.

    Returns:
        A pytree of the same structure. The tangents of integers have the dtype float0; those of other objects, which
        have no derivative, are None.

    >>> st.custom_derivatives.zero_from_primal({"w": st.ones(2)})["w"].tolist()
    [0.0, 0.0]
    >>> st.custom_derivatives.zero_from_primal([np.ones(2), 3.0], symbolic_zeros=True)
    [SymbolicZero(float64[2]), SymbolicZero(float64[])]
    """
    return map_leaves(lambda x: zero_of(x, symbolic_zeros), val)


def zero_of(x: Any, symbolic_zeros: bool = False) -> Any:
    """Returns the tangent of a leaf that is not differentiated, or its cotangent; None unless it is a number.

    Args:
        x: the leaf, or the aval of a tensor.
        symbolic_zeros: whether it is a `SymbolicZero`, or an array.
    """
    kind = x._aval if type(x) is ShardedTensor else x
    if not is_number(kind):
        return None
    if symbolic_zeros:
        return SymbolicZero.from_primal_value(kind)
    return zeros_of(kind) if is_inexact(dtype_of(kind)) else np.zeros(shape_of(kind), FLOAT0)


def is_zero(t: Any) -> bool:
    """Whether a tangent is known to be zero: a `SymbolicZero`, that of an integer, or that of a non-number."""
    return t is None or type(t) is SymbolicZero or getattr(t, "dtype", None) == FLOAT0
