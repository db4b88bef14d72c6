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

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shardtensor.core import operator
from shardtensor.errors import ShapeError
from shardtensor.sharding.layout import Shape, Where
from shardtensor.sharding.rules import normalize_axis, tensordot_rule
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

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
    tags=("product",),
    gathers="on meshes of several axes, an operand is gathered along one if partial sums are added along another",
)
def matmul(x1: ArrayLike, x2: ArrayLike, /, *, out_sharding: _Where = None) -> ShardedTensor:
    """Computes the matrix product of x1, of shape (..., n, k), and x2, of shape (..., k, m): shape (..., n, m).

    The leading dimensions broadcast. A 1-d operand is treated as one row (x1) or one column (x2), and the result does
    not have that dimension. The rows of x1, the columns of x2 and the leading dimensions keep their sharding. If the
    contracted dimension is sharded, each device multiplies its parts, and the partial sums are added along a fixed
    tree. If a mesh axis splits the rows or columns of one operand and the contracted dimension of the other one, the
    layout that transfers the fewest bytes is used: one operand moves, or both move panel by panel (SUMMA), and the
    result is split like the rows of x1 and the columns of x2. An operand that every device has to read as a whole moves
    part by part around a ring (see `shardtensor.functions.linalg.ring_product`), unless it is small.

    Raises:
        ShapeError: the contracted sizes differ, the leading dimensions do not broadcast, or an operand is 0-d.

    >>> x = st.ones((4, 3), device=st.make_mesh((4,), ("x",)))
    >>> y = x @ st.asarray([1.0, 2.0, 3.0])
    >>> y.tolist(), y.sharding.spec
    ([6.0, 6.0, 6.0, 6.0], P('x'))
    """


@operator(tensordot_rule, operands=("x1", "x2"), combine="sum", tags=("product",), ufunc="dot")
def tensordot(
    x1: ArrayLike, x2: ArrayLike, /, *, axes: int | Iterable[Sequence[int]] = 2, out_sharding: _Where = None
) -> ShardedTensor:
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
