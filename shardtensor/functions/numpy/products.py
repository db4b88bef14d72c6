"""NumPy's products and diagonals in the main namespace. `einsum` is in `shardtensor.functions.numpy.einsum`.

Operands of different shardings are transferred to the operand that is most expensive to move, as in all products; sums
over a sharded dimension are partial sums, which are added along a fixed tree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import composition, hinted, implements, operator
from shardtensor.errors import AxisError, ShapeError
from shardtensor.functions.building.monoids import diagonal_partial, trace_partial
from shardtensor.functions.building.own_kernels import own_kernel
from shardtensor.functions.placement.partial_sum_operators import placed
from shardtensor.functions.standard.elementwise import multiply
from shardtensor.functions.standard.linear_algebra import matmul, tensordot
from shardtensor.functions.standard.manipulation import expand_dims, reshape
from shardtensor.functions.standard.statistical import sum as sum_over
from shardtensor.sharding.layout import Shape, Where
from shardtensor.sharding.rules import normalize_axis, tensordot_rule
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.nested_lists import from_lists
from shardtensor.tensor.operands import integer_of, shape_of
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor

_DERIVATIVES = "of_products"

SMALL = 1 << 15
"""The number of elements up to which products without a contraction are one operator; larger ones use `multiply`, which
computes in blocks.
"""


def _rank(x: Any) -> int:
    return len(shape_of(x))


def _array(x: Any) -> Any:
    """Returns an operand with a host array in place of nested lists, and of a scalar, which promotes as an array does
    in NumPy's products.
    """
    return np.asarray(x) if type(x) in SCALARS else from_lists(x, "asarray") if isinstance(x, (list, tuple)) else x


# -- the contraction of two operands ---------------------------------------------------------------


def _contraction_rule(shapes: Sequence[Shape], *, rule: str) -> str:
    return rule


def _product_dtype(x1: Any, x2: Any, **params: Any) -> Any:
    product = np.matmul if _groups(params["rule"])[0][2] else np.multiply
    return product(np.ravel(x1), np.ravel(x2))  # NumPy raises TypeError for sums of products of times.


@operator(
    _contraction_rule,
    operands=("x1", "x2"),
    combine="sum",
    error_name="einsum",
    ufunc="einsum",
    dtype=_product_dtype,
    tags=("internal", "linear in each", "product"),
)
def contract(x1: ArrayLike, x2: ArrayLike, /, *, rule: str, out_sharding: Where | None = None) -> ShardedTensor:
    """Computes the sum of products of two operands.

    Args:
        x1, x2: tensors or arrays.
        rule: names the dimensions of x1, x2 and of the result, such as ``"b i k, k b j -> b i j"``. Names of both that
            the result lacks are contracted; if there are some, the result has first the other names of both operands,
            then those of x1, then those of x2.
    """


@functools.lru_cache(1024)
def _groups(rule: str) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Returns the dimensions of x1 and those of x2 in groups: of both in the result, own ones, contracted ones."""
    left, _, result = rule.partition("->")
    a, b = [term.split() for term in left.split(",")]
    names = result.split()
    batch, gone = [n for n in names if n in a and n in b], [n for n in a if n not in names]

    def groups(term: list[str]) -> tuple[tuple[int, ...], ...]:
        own = [n for n in names if n in term and n not in batch]
        return tuple([tuple([term.index(n) for n in group]) for group in (batch, own, gone)])

    return groups(a), groups(b)


@implements(contract, "kernel")
def contracted(xp: Any, context: ShardContext | None, x1: Any, x2: Any, *, rule: str) -> Any:
    """Computes the product by ``matmul`` of arrays with one dimension for each group."""
    (batch, rows, inner), (batch2, columns, inner2) = _groups(rule)
    if not inner:
        return xp.multiply(*[_spread(xp, x, *term) for x, term in zip((x1, x2), _orders(rule), strict=True)])
    if xp is np and not rows and not columns and not all(_ends_in(x, d) for x, d in ((x1, inner), (x2, inner2))):
        # Products along other dimensions than the fastest would be read element by element from distant memory.
        return np.einsum(x1, _labels(batch, inner), x2, _labels(batch2, inner2), range(len(batch)))
    shape = (*[x1.shape[d] for d in (*batch, *rows)], *[x2.shape[d] for d in columns])
    left = _grouped(xp, x1, (batch, rows, inner))
    right = _grouped(xp, x2, (batch2, inner2, columns))
    return xp.reshape(xp.matmul(left, right), shape)


def _ends_in(x: Any, dimensions: Sequence[int]) -> bool:
    """Whether one of the dimensions of a host array has its smallest stride."""
    sizes = [d for d in range(x.ndim) if x.shape[d] > 1]
    return not sizes or min(sizes, key=lambda d: abs(x.strides[d])) in dimensions


def _labels(batch: Sequence[int], inner: Sequence[int]) -> list[int]:
    """Returns the number of each dimension in `numpy.einsum`: those of the result are numbered first."""
    order = (*batch, *inner)
    return [order.index(d) for d in range(len(order))]


@implements(tensordot, "kernel")
def _tensordot(xp: Any, context: ShardContext, x1: Any, x2: Any, *, axes: Any) -> Any:
    """Computes the product as `contract`. BLAS's axpy, which `numpy.tensordot` calls for some shapes, skips factors of
    zero: zero times NaN or infinity would be zero on some shards and NaN on others. `numpy.matmul` skips nothing.
    """
    return contracted(xp, context, x1, x2, rule=tensordot_rule((x1.shape, x2.shape), axes=axes))


def matrices(rule: str, x1: Any, x2: Any) -> tuple[Any, Any] | None:
    """Returns views of the two operands of a `contract` of which it is the matrix product, apart from dimensions of
    size 1; None if several dimensions are contracted, or have to be merged.
    """
    (batch, rows, inner), (batch2, columns, inner2) = _groups(rule)
    if len(inner) != 1 or max(len(batch), len(rows), len(columns)) > 1:
        return None
    return _grouped(np, x1, (batch, rows, inner)), _grouped(np, x2, (batch2, inner2, columns))


def _grouped(xp: Any, x: Any, groups: tuple[tuple[int, ...], ...]) -> Any:
    """Permutes the dimensions of an array, and merges each group; an empty first group has no dimension."""
    order, shape = _arrangement(tuple(x.shape), groups)
    x = x if order is None else xp.permute_dims(x, order)
    return x if shape is None else xp.reshape(x, shape)


@functools.lru_cache(1024)
def _arrangement(shape: Shape, groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...] | None, Shape | None]:
    """Returns the permutation and then the shape of `_grouped`; None for one that changes nothing."""
    order = tuple([d for group in groups for d in group])
    merged = tuple([math.prod([shape[d] for d in group]) for group in (groups if groups[0] else groups[1:])])
    permuted = tuple([shape[d] for d in order])
    return None if order == tuple(range(len(shape))) else order, None if merged == permuted else merged


@functools.lru_cache(1024)
def _orders(rule: str) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Returns for each operand the order in which the result has its dimensions, and for each dimension of the result
    whether the operand has it.
    """
    left, _, result = rule.partition("->")
    names = result.split()
    terms = [term.split() for term in left.split(",")]
    return [(tuple([t.index(n) for n in names if n in t]), tuple([n in t for n in names])) for t in terms]


def _spread(xp: Any, x: Any, order: tuple[int, ...], present: Sequence[bool]) -> Any:
    """Permutes the dimensions of an array, and inserts those of size 1 of the result that it lacks."""
    x = x if order == tuple(range(x.ndim)) else xp.permute_dims(x, order)
    return x[tuple([slice(None) if there else None for there in present])] if not all(present) else x


# -- products --------------------------------------------------------------------------------------


@hinted
def dot(a: ArrayLike, b: ArrayLike, /, *, out_sharding: Where | None = None) -> ShardedTensor:
    """Computes NumPy's dot product: the sum of products over the last dimension of a and the last but one of b.

    It is `matmul` for operands of one or two dimensions, and `multiply` if one of them has none. The other dimensions
    keep their sharding; ``out_sharding`` is that of the result, as in `matmul`.

    Raises:
        ShapeError: the sizes of the contracted dimensions differ.

    >>> st.dot(st.asarray([[1.0, 2.0], [3.0, 4.0]]), st.asarray([1.0, 10.0])).tolist()
    [21.0, 43.0]
    """
    a, b = _array(a), _array(b)
    n, m = _rank(a), _rank(b)
    if not n or not m:
        product = multiply(a, b)
        return product if out_sharding is None else placed(product, out_sharding, "dot")
    if m == 1 or max(n, m) == 2:
        return matmul(a, b, out_sharding=out_sharding)
    return tensordot(a, b, axes=((-1,), (-2,)), out_sharding=out_sharding)


@hinted
def inner(a: ArrayLike, b: ArrayLike, /) -> ShardedTensor:
    """Computes the sum of products over the last dimensions of a and b; their product, if one of them is 0-d.

    The other dimensions, those of a before those of b, keep their sharding.

    Raises:
        ShapeError: the sizes of the last dimensions differ.

    >>> st.inner(st.asarray([1.0, 2.0]), st.asarray([[3.0, 4.0], [5.0, 6.0]])).tolist()
    [11.0, 17.0]
    """
    a, b = _array(a), _array(b)
    left, right = shape_of(a), shape_of(b)
    if not left or not right:
        return multiply(a, b)
    if left[-1] != right[-1]:
        raise ShapeError(f"inner: a has shape {left} and b has shape {right}; wanted equal last sizes")
    return contract(a, b, rule=_inner_rule(len(left), len(right)))


@functools.lru_cache(64)
def _inner_rule(n: int, m: int) -> str:
    mine, theirs = [" ".join([f"{name}{d}" for d in range(ndim - 1)]) for name, ndim in (("a", n), ("b", m))]
    return f"{mine} k, {theirs} k -> {mine} {theirs}"


@composition()
def outer(a: ArrayLike, b: ArrayLike, /) -> ShardedTensor:
    """Computes the products of all elements of a with all elements of b: shape (a.size, b.size).

    Both are flattened, and keep their sharding.

    >>> st.outer(st.asarray([1, 2]), st.asarray([10, 20, 30])).tolist()
    [[10, 20, 30], [20, 40, 60]]
    """
    x, y = [x if _rank(x) == 1 else reshape(_array(x), (-1,)) for x in (a, b)]
    if shape_of(x)[0] * shape_of(y)[0] <= SMALL:
        return contract(x, y, rule="a, b -> a b")
    return multiply(expand_dims(x, axis=1), expand_dims(y, axis=0))


@composition()
def kron(a: ArrayLike, b: ArrayLike, /) -> ShardedTensor:
    """Computes the Kronecker product: blocks of b, each multiplied by one element of a.

    The operand with fewer dimensions is preceded by dimensions of size 1. Each dimension of the result has the sharding
    of that of a, where a is split along it.

    >>> st.kron(st.asarray([1, 10]), st.asarray([1, 2, 3])).tolist()
    [1, 2, 3, 10, 20, 30]
    """
    a, b, n = _array(a), _array(b), max(_rank(a), _rank(b))
    left, right = [expand_dims(x, axis=tuple(range(n - _rank(x)))) if _rank(x) < n else x for x in (a, b)]
    shape = tuple([p * q for p, q in zip(shape_of(left), shape_of(right), strict=True)])
    if math.prod(shape) <= SMALL:
        return reshape(contract(left, right, rule=_kron_rule(n)), shape)
    left = expand_dims(left, axis=tuple(range(1, 2 * n, 2)))
    right = expand_dims(right, axis=tuple(range(0, 2 * n, 2)))
    return reshape(multiply(left, right), shape)


@functools.lru_cache(64)
def _kron_rule(n: int) -> str:
    mine, theirs = [[f"{name}{d}" for d in range(n)] for name in "ab"]
    pairs = [f"{p} {q}" for p, q in zip(mine, theirs, strict=True)]
    return f"{' '.join(mine)}, {' '.join(theirs)} -> {' '.join(pairs)}"


def _cross_axes(ndims: Sequence[int], axisa: int, axisb: int, axisc: int, axis: int | None) -> tuple[int, int, int]:
    """Returns the dimension of the vectors in a, in b and in the result.

    Raises:
        AxisError: there is no such dimension.
    """
    axes = (axisa, axisb, axisc) if axis is None else (axis, axis, axis)
    return tuple([normalize_axis(a, n) for a, n in zip(axes, (*ndims, max(ndims)), strict=True)])  # type: ignore[return-value]


def _cross_rule(
    shapes: Sequence[Shape], *, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> str:
    for name, shape in zip("ab", shapes, strict=True):
        if not shape:
            raise ShapeError(f"{name} has no dimensions; wanted vectors of 3 elements")
    *along, at = _cross_axes([len(s) for s in shapes], axisa, axisb, axisc, axis)
    terms = []
    for name, shape, k in zip("ab", shapes, along, strict=True):
        if shape[k] != 3:
            raise ShapeError(f"{name} has shape {shape}, with size {shape[k]} in dimension {k}; wanted 3")
        others = [f"...{i}" for i in range(len(shape) - 1, 0, -1)]
        terms.append([*others[:k], "k!", *others[k:]])
    rest = [n for n in max(terms, key=len) if n != "k!"]
    return f"{' '.join(terms[0])}, {' '.join(terms[1])} -> {' '.join([*rest[:at], 'k', *rest[at:]])}"


def _cross_dtype(a: Any, b: Any, **params: Any) -> Any:
    return np.subtract(np.multiply(a, b), np.multiply(a, b))  # NumPy does not subtract bools.


@operator(_cross_rule, operands=("a", "b"), dtype=_cross_dtype)
def cross(
    a: ArrayLike, b: ArrayLike, /, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> ShardedTensor:
    """Computes the cross products of vectors of three elements.

    The other dimensions broadcast and keep their sharding. The dimension of the vectors is not split: a split moves to
    another dimension.

    Args:
        a: a tensor or an array.
        b: likewise.
        axisa, axisb: the dimension of the vectors in each operand, before broadcasting.
        axisc: the dimension of the vectors in the result.
        axis: the dimension in a, b and the result, instead of the other three.

    Raises:
        AxisError: an operand has no such dimension.
        ShapeError: vectors do not have three elements, or the other dimensions do not broadcast.
        ArgumentTypeError: the elements are bools.

    >>> st.cross(st.asarray([1, 2, 3]), st.asarray([4, 5, 6])).tolist()
    [-3, 6, -3]
    """


@implements(cross, "kernel")
def _cross(
    xp: Any, context: ShardContext, a: Any, b: Any, *, axisa: int, axisb: int, axisc: int, axis: int | None
) -> Any:
    along_a, along_b, along = _cross_axes((a.ndim, b.ndim), axisa, axisb, axisc, axis)
    a1, a2, a3 = [a[(slice(None),) * along_a + (i, ...)] for i in range(3)]
    b1, b2, b3 = [b[(slice(None),) * along_b + (i, ...)] for i in range(3)]
    if (result := own_kernel(xp, "cross_products", (a1, a2, a3), (b1, b2, b3), along, context.dtype)) is not None:
        return result
    pairs = ((a2, b3, a3, b2), (a3, b1, a1, b3), (a1, b2, a2, b1))
    return xp.stack([xp.subtract(xp.multiply(p, q), xp.multiply(r, s)) for p, q, r, s in pairs], axis=along)


# -- diagonals -------------------------------------------------------------------------------------


def _diagonal_axes(shape: Shape, axis1: int, axis2: int) -> tuple[int, int]:
    """Returns the two dimensions of a matrix.

    Raises:
        ShapeError: x has fewer than two dimensions.
        AxisError: x has no such dimension, or both are the same.
    """
    if len(shape) < 2:
        raise ShapeError(f"x has shape {shape}; wanted at least two dimensions")
    first, second = normalize_axis(axis1, len(shape)), normalize_axis(axis2, len(shape))
    if first == second:
        raise AxisError(f"axis1={axis1} and axis2={axis2} are the same dimension; wanted two")
    return first, second


def _diagonal_rule(shapes: Sequence[Shape], *, offset: int = 0, axis1: int = 0, axis2: int = 1) -> tuple[str, Shape]:
    shape = shapes[0]
    first, second = _diagonal_axes(shape, axis1, axis2)
    others = [d for d in range(len(shape)) if d not in (first, second)]
    offset = integer_of(offset, "offset")
    length = max(min(shape[first] - max(-offset, 0), shape[second] - max(offset, 0)), 0)
    names = " ".join(f"d{d}" for d in range(len(shape)))
    return f"{names} -> {' '.join(f'd{d}' for d in others)} diagonal", (*[shape[d] for d in others], length)


@operator(_diagonal_rule, combine="diagonal", tags=("unblocked",))
def diagonal(x: ArrayLike, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> ShardedTensor:
    """Returns the diagonals of matrices as the last dimension of the result. An independent tensor, not a view.

    The other dimensions keep their sharding; the diagonal is not split. Where the dimensions of the matrices are split,
    the devices send each other the elements of the diagonal only.

    Args:
        x: a tensor or an array of at least two dimensions.
        offset: the diagonal: 0 is the main one, positive ones are above it, and negative ones below.
        axis1, axis2: the dimensions of the rows and of the columns of the matrices.

    Raises:
        ShapeError: x has fewer than two dimensions.
        AxisError: x has no such dimension, or both are the same.

    >>> st.diagonal(st.asarray([[1, 2, 3], [4, 5, 6]]), offset=1).tolist()
    [2, 6]
    """


implements(diagonal, "kernel")(diagonal_partial)


def _trace_rule(shapes: Sequence[Shape], *, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> str:
    rule, _ = _diagonal_rule(shapes, offset=offset, axis1=axis1, axis2=axis2)
    return rule.removesuffix("diagonal")


@operator(_trace_rule, combine="trace")
def trace(x: ArrayLike, /, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> ShardedTensor:
    """Computes the sum of each diagonal of matrices.

    The other dimensions keep their sharding. Where the dimensions of the matrices are split, each device adds its part
    of the diagonal, and the partial sums are added along a fixed tree.

    Args:
        x: a tensor or an array of at least two dimensions.
        offset, axis1, axis2: see `diagonal`.
        dtype: the dtype of the result; by default that of `sum`.

    Raises:
        ShapeError: x has fewer than two dimensions.
        AxisError: x has no such dimension, or both are the same.

    >>> st.trace(st.asarray([[1, 2], [3, 4]])).item()
    5
    """


implements(trace, "kernel")(trace_partial)


@implements(trace, "composite")
def _short_trace(x: Any, offset: int, axis1: int, axis2: int, dtype: Any) -> Any:
    """Sums the diagonal, which is one array, where that takes less time than a partial sum of each device."""
    if not isinstance(x, ShardedTensor) or x.size > _FEW or x.sharding.mesh.size == 1:
        return NotImplemented
    _diagonal_axes(x.shape, axis1, axis2)
    return sum_over(diagonal(x, offset, axis1, axis2), axis=-1, dtype=dtype)


_FEW = 1 << 12
"""The number of elements up to which `trace` sums the diagonal."""
