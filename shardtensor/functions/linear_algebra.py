"""Linear algebra functions of the standard's core, declared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, AxisError, ShapeError
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axes, normalize_axis
from shardtensor.sharding.shard_context import Place
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

Axes: TypeAlias = int | tuple[Sequence[int], Sequence[int]]
"""The dimensions that `tensordot` contracts."""


def _matmul_rule(shapes: Sequence[Shape]) -> str:
    for name, shape in zip(("x1", "x2"), shapes, strict=True):
        if not shape:
            raise ShapeError(f"{name} has no dimensions; matmul wants at least one (multiply by a scalar with *)")
    rows, columns = len(shapes[0]) > 1, len(shapes[1]) > 1
    left, right = "... i k" if rows else "k", "... k j" if columns else "k"
    return f"{left}, {right} -> {'... ' * (rows or columns)}{'i ' * rows}{'j' * columns}"


@operator(_matmul_rule, combine="sum")
def matmul(x1: ArrayLike, x2: ArrayLike, /) -> ShardedTensor:
    """The matrix product over the last two dimensions; those before them broadcast. A 1-d operand is a row or a
    column, and is gone after.

    Rows of x1 and columns of x2 stay split as they are. Where the contracted dimension is split, each device
    multiplies what it has, and the products are added in mesh order.

    Raises:
        ShapeError: the contracted sizes differ, or an operand is 0-d.

    >>> x = st.ones((4, 3), device=st.make_mesh((4,), ("x",)))
    >>> y = x @ st.asarray([1.0, 2.0, 3.0])
    >>> y.tolist(), y.sharding.spec
    ([6.0, 6.0, 6.0, 6.0], P('x'))
    """


def _contracted(n: int, m: int, axes: Axes) -> tuple[Sequence[int], Sequence[int]]:
    """The dimensions that a `tensordot` of operands with n and m dimensions contracts, of each of them.

    Raises:
        AxisError, ArgumentError: as `tensordot` does.
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


def _tensordot_rule(shapes: Sequence[Shape], *, axes: Axes = 2) -> str:
    n, m = map(len, shapes)
    pairs = list(zip(*_contracted(n, m, axes), strict=True))
    names1 = [f"a{i}" for i in range(n)]
    names2 = [f"b{i}" for i in range(m)]
    for number, (i, j) in enumerate(pairs):
        names1[i] = names2[j] = f"k{number}"
    result = [name for name in names1 + names2 if not name.startswith("k")]
    return f"{' '.join(names1)}, {' '.join(names2)} -> {' '.join(result)}"


@operator(_tensordot_rule, combine="sum")
def tensordot(x1: ArrayLike, x2: ArrayLike, /, *, axes: Axes = 2) -> ShardedTensor:
    """The sum of products over pairs of axes: the last ``axes`` of x1 with the first of x2, or those that a pair of
    sequences names.

    The other dimensions stay split as they are; see `matmul` for a contracted dimension that is split.

    Raises:
        AxisError: an axis that is not there, or named twice.
        ArgumentError: axes is of another form.
        ShapeError: the sizes of a pair differ.

    >>> st.tensordot(st.ones((2, 3)), st.ones((3, 4)), axes=1).shape
    (2, 4)
    """


@implements(tensordot, "kernel")
def _tensordot(xp: Any, place: Place, x1: Any, x2: Any, *, axes: Axes) -> Any:
    """By `matmul` where an operand is one element. NumPy multiplies by it with BLAS's axpy there (in `numpy.dot`,
    `numpy.inner` and `numpy.tensordot`, of floats and complex numbers), which skips a factor of zero: zero times NaN,
    and zero times infinity, would be zero where a shard is that small, and NaN elsewhere. `numpy.matmul`,
    `numpy.vecdot` and `numpy.einsum` skip nothing.
    """
    if place.dtype.kind in "fc" and 1 in (math.prod(x1.shape), math.prod(x2.shape)):
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


@operator(_vecdot_rule, combine="sum")
def vecdot(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1) -> ShardedTensor:
    """The dot product of vectors along ``axis``, x1 conjugated; the other dimensions broadcast and stay split as they
    are.

    Raises:
        AxisError: an operand has no such axis.
        ShapeError: the sizes along it differ, or the others do not broadcast.

    >>> st.vecdot(st.asarray([[1.0, 2.0], [3.0, 4.0]]), st.asarray([1.0, 10.0])).tolist()
    [21.0, 43.0]
    """
