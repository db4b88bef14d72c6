"""Declarations of the linear algebra functions in the core of the array API standard.

The dtype of a result is that to which the operands are promoted. Where a contracted dimension is sharded, each device
computes partial sums over its part, and these are added along a fixed tree. If the operands are sharded differently,
those that are cheapest to move are transferred.

``out_sharding`` is the sharding of the result: a NamedSharding, or a P on the mesh in use (see `st.set_mesh`). Where a
contracted dimension is sharded, it chooses the collective that adds the partial sums: an all-reduce for a replicated
result, a reduce-scatter for one that the same mesh axes split, and none for one that is unreduced along them. Other
layouts are reached by a further transfer, which is explicit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, AxisError, ShapeError
from shardtensor.sharding.layout import Shape, Where
from shardtensor.sharding.rules import normalize_axes, normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_Axes: TypeAlias = int | tuple[Sequence[int], Sequence[int]]
"""The dimensions that `tensordot` contracts."""

_Where: TypeAlias = Where | None


def _matmul_rule(shapes: Sequence[Shape]) -> str:
    for name, shape in zip(("x1", "x2"), shapes, strict=True):
        if not shape:
            raise ShapeError(f"{name} has no dimensions; wanted at least one (multiply by a scalar with *)")
    rows, columns = len(shapes[0]) > 1, len(shapes[1]) > 1
    left, right = "... i k" if rows else "k", "... k j" if columns else "k"
    return f"{left}, {right} -> {'... ' * (rows or columns)}{'i ' * rows}{'j' * columns}"


@operator(
    _matmul_rule,
    operands=("x1", "x2"),
    combine="sum",
    product=True,
    gathers="the smaller operand is gathered where both are split along the same dimension",
)
def matmul(x1: ArrayLike, x2: ArrayLike, /, *, out_sharding: _Where = None) -> ShardedTensor:
    """Computes the matrix product of x1, of shape (..., n, k), and x2, of shape (..., k, m): shape (..., n, m).

    The leading dimensions broadcast. A 1-d operand is treated as one row (x1) or one column (x2), and the result lacks
    that dimension. The rows of x1, the columns of x2 and the leading dimensions keep their sharding. Where the
    contracted dimension is sharded, each device multiplies its parts, and partial sums are added along a fixed tree.
    Where several mesh axes split both operands, and an axis splits the rows or columns of one of them and the
    contracted dimension of the other, the layout is taken that transfers the fewest bytes: either operand moves, or
    both do, panel by panel (SUMMA), and the result is split as the rows of x1 and the columns of x2.

    Raises:
        ShapeError: the contracted sizes differ, the leading dimensions do not broadcast, or an operand is 0-d.

    >>> x = st.ones((4, 3), device=st.make_mesh((4,), ("x",)))
    >>> y = x @ st.asarray([1.0, 2.0, 3.0])
    >>> y.tolist(), y.sharding.spec
    ([6.0, 6.0, 6.0, 6.0], P('x'))
    """


def _contracted(n: int, m: int, axes: _Axes) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the dimensions of x1 and of x2 that `tensordot` contracts, for operands with n and m dimensions.

    Raises:
        AxisError, ArgumentError: as `tensordot`.
    """
    if isinstance(axes, int):
        if not 0 <= axes <= min(n, m):
            raise AxisError(f"axes={axes} dimensions cannot be contracted of operands with {n} and {m}")
        return range(n - axes, n), range(axes)
    if not isinstance(axes, tuple) or len(axes) != 2:
        raise ArgumentError(f"axes is {axes!r}; wanted an integer, or a pair of sequences of the same length")
    left, right = [(a,) if isinstance(a, int) else tuple(a) for a in axes]
    if len(left) != len(right):
        raise ArgumentError(f"axes has {len(left)} axes of x1 and {len(right)} of x2; wanted as many of each")
    return normalize_axes(left, n), normalize_axes(right, m)


def _tensordot_rule(shapes: Sequence[Shape], *, axes: _Axes = 2) -> str:
    n, m = map(len, shapes)
    pairs = list(zip(*_contracted(n, m, axes), strict=True))
    names1 = [f"a{i}" for i in range(n)]
    names2 = [f"b{i}" for i in range(m)]
    for number, (i, j) in enumerate(pairs):
        names1[i] = names2[j] = f"k{number}"
    result = [name for name in names1 + names2 if not name.startswith("k")]
    return f"{' '.join(names1)}, {' '.join(names2)} -> {' '.join(result)}"


@operator(_tensordot_rule, operands=("x1", "x2"), combine="sum", product=True, ufunc="dot")
def tensordot(x1: ArrayLike, x2: ArrayLike, /, *, axes: _Axes = 2, out_sharding: _Where = None) -> ShardedTensor:
    """Computes the sum of products of x1 and x2 over pairs of contracted dimensions.

    The result has the remaining dimensions of x1, then those of x2. They keep their sharding. Partial sums over a
    sharded contracted dimension are added as in `matmul`.

    Args:
        x1: a tensor or an array.
        x2: likewise.
        axes: an integer n contracts the last n dimensions of x1 with the first n of x2, in order; a pair of sequences
            of equal length names the dimensions of x1 and those of x2.

    Raises:
        AxisError: an operand has no such axis, or an axis occurs twice.
        ArgumentError: ``axes`` is neither an integer nor a pair of sequences of equal length.
        ShapeError: the sizes of a contracted pair differ.

    >>> st.tensordot(st.ones((2, 3)), st.ones((3, 4)), axes=1).shape
    (2, 4)
    """


@implements(tensordot, "kernel")
def _tensordot(xp: Any, context: ShardContext, x1: Any, x2: Any, *, axes: _Axes) -> Any:
    """Computes the product by ``matmul`` if an operand has one element. For such operands, of floats or complex
    numbers, `numpy.dot`, `numpy.inner` and `numpy.tensordot` call BLAS's axpy, which skips a factor of zero: zero times
    NaN or infinity would be zero on a shard that small and NaN on others. `numpy.matmul`, `numpy.vecdot` and
    `numpy.einsum` skip nothing.
    """
    if context.dtype.kind in "fc" and 1 in (math.prod(x1.shape), math.prod(x2.shape)):
        left, right = _contracted(x1.ndim, x2.ndim, axes)
        if all(x1.shape[d] == 1 for d in left) and all(x2.shape[d] == 1 for d in right):
            shape = [n for d, n in enumerate(x1.shape) if d not in left]
            shape += [n for d, n in enumerate(x2.shape) if d not in right]
            return xp.reshape(xp.matmul(xp.reshape(x1, (-1, 1)), xp.reshape(x2, (1, -1))), tuple(shape))
    return xp.tensordot(x1, x2, axes=axes)


def _vecdot_rule(shapes: Sequence[Shape], *, axis: int = -1) -> str:
    terms = []
    for shape in shapes:
        if not shape:
            raise ShapeError("an operand has no dimensions; wanted at least one")
        along = normalize_axis(axis, len(shape))
        others = [f"...{i}" for i in range(len(shape) - 1, 0, -1)]
        terms.append([*others[:along], "k", *others[along:]])
    longest = max(terms, key=len)
    return f"{' '.join(terms[0])}, {' '.join(terms[1])} -> {' '.join(n for n in longest if n != 'k')}"


@operator(_vecdot_rule, operands=("x1", "x2"), combine="sum")
def vecdot(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1, out_sharding: _Where = None) -> ShardedTensor:
    """Computes the dot product of vectors along ``axis``, with the elements of a complex x1 conjugated.

    The other dimensions broadcast, form the result, and keep their sharding. Partial sums over a sharded ``axis`` are
    added as in `matmul`.

    Args:
        x1: a tensor or an array of at least one dimension.
        x2: likewise.
        axis: the dimension of the vectors in each operand, before broadcasting.

    Raises:
        AxisError: an operand has no such axis.
        ShapeError: the sizes along ``axis`` differ, the other dimensions do not broadcast, or an operand is 0-d.

    >>> st.vecdot(st.asarray([[1.0, 2.0], [3.0, 4.0]]), st.asarray([1.0, 10.0])).tolist()
    [21.0, 43.0]
    """
