"""Reductions and products over a split dimension where devices share the host's memory: the partial results of all
shards in one or two calls of NumPy.

The dimension is divided into two, parts and elements of a part, which makes a view. NumPy computes each part by the
same inner loop as a separate array, and the parts are combined along their tree, so the result has the same bits as
that of the general plan, which runs the operator once per shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.communication.all_reduce import Group, Tree, combine_rows, flat_tree, reduction_tree
from shardtensor.communication.transfer import whole_array
from shardtensor.core import Operands
from shardtensor.functions.building.monoids import Monoid, sum_of_squares, var_partial
from shardtensor.functions.standard.linear_algebra import matmul, tensordot
from shardtensor.interpreters.execution.combination import reduction_groups
from shardtensor.interpreters.execution.strategies import Run, Strategies
from shardtensor.sharding.equal_parts import Runs, equal_runs
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import reduced_axes, tensordot_rule
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ShardedTensor, tensor_of
from shardtensor.tensor.value import Aval, whole_of

_FEW_BYTES = 1 << 17
"""The size of operands up to which the calls for single shards take longer than the elements, so that products and
variances, of which intermediate results have several times as many elements, are computed at once.
"""

Array = np.ndarray[Any, Any]


def in_one_pass(strategies: Strategies, monoid: Monoid, partial_axes: tuple[str, ...], general: Run) -> Run:
    """Returns the plan that computes the partial results of all shards at once, or the ``general`` plan where that is
    not possible: for other operators, dtypes and layouts.
    """
    group = reduction_groups(strategies.value, strategies.moves, partial_axes)[0]
    if strategies.op.name == "scatter_add":
        return _scattered(strategies, group)
    tree = group.tree
    if len(strategies.moves) == 2:
        return _products(strategies, tree) or general
    laid = _source_of(strategies)
    if laid is None:
        return general
    source, parts = laid
    value, partials, reordered = strategies.value, None, False
    if monoid.reduces:
        partials = _sums(strategies, monoid, source, parts, tree)
        reordered = len(reduced_axes(strategies.params.get("axis"), source.ndim)) == 1
    elif monoid.several and monoid.partial is var_partial:
        partials = _variances(strategies, monoid, source, parts, tree)
    if partials is None:
        return general
    result: Callable[[Array], Any] = partials
    return _of_source(strategies, source, result, value, general, reordered)


def partials_in_one_pass(strategies: Strategies, monoid: Monoid, partials: Aval, general: Run) -> Run:
    """Returns the plan that computes the partial sums of all shards at once, in the order of the mesh, or the
    ``general`` plan where that is not possible.

    Args:
        strategies: the operator and its operands.
        monoid: how partial results are computed.
        partials: the aval of the partial sums, stacked along the first dimension.
        general: the plan that computes one after the other.
    """
    count = partials.shape[0]
    if len(strategies.moves) == 2:
        products = _parts_of_products(strategies, count)
        if products is None:
            return general
        (first, second), (rows_of, _) = strategies.moves, products
        assert first is not None
        assert second is not None
        name = strategies.name

        def multiplied(operands: Operands) -> ShardedTensor:
            rows = rows_of(first.whole(operands[0], name), second.whole(operands[1], name))
            return tensor_of(partials, (whole_of(rows.reshape(partials.shape), partials),), ([],))

        return multiplied
    laid = _source_of(strategies)
    if laid is None or not monoid.reduces or monoid.partial or laid[1].count != count:
        return general
    source, parts = laid
    sums = _sums(strategies, monoid, source, parts, None)
    if sums is None:
        return general
    rows: Callable[[Array], Array] = sums
    return _of_source(strategies, source, lambda whole: rows(whole).reshape(partials.shape), partials, general)


def _source_of(strategies: Strategies) -> tuple[Aval, _Parts] | None:
    """Returns the aval of the only operand, and how it is divided along the dimension that is split; None if it has to
    be moved, or its layout does not allow that.
    """
    moves = strategies.moves
    if len(moves) > 1 or moves[0] is None or not moves[0].stays:
        return None
    source = moves[0].source
    assert isinstance(source, Aval)  # Only a tensor can stay in its layout.
    gone = reduced_axes(strategies.params.get("axis"), source.ndim)
    split = next((d for d in gone if source.grid.counts[d] > 1), gone[0] if gone else 0)
    runs = equal_runs(source.grid, split) if gone else None
    if runs is None or (split and len(gone) > 1):
        return None
    return source, _Parts(source.shape, split, runs)


def _of_source(
    strategies: Strategies,
    source: Aval,
    result: Callable[[Array], Any],
    value: Aval,
    general: Run,
    reordered: bool = False,
) -> Run:
    """Returns the plan that computes the buffer of a result from that of the only operand.

    Args:
        strategies, source, result, value, general: see `in_one_pass`.
        reordered: whether the bits are those of the general plan also for a buffer whose dimensions have another order
            in memory, such as that of a transposed array. They are where elements are added along one dimension only:
            the dimension of the parts is next to it in memory, outside of it, and so changes no loop over elements of a
            part.
    """
    name = strategies.name
    # In which order NumPy's loops add depends on the strides of all dimensions, of those of size 1, too.
    strides = _dense_strides(source.shape, source.dtype.itemsize)

    def of_buffer(whole: Array) -> Any:
        if whole.strides == strides:
            return whole_of(result(whole), value)
        if reordered and _are_dense(whole.strides, source.shape, source.dtype.itemsize):
            return whole_of(np.asarray(result(whole), order="C"), value)
        return None

    def run_plan(operands: Operands) -> ShardedTensor:
        buffers = operands[0]._storage.buffers
        buffer = of_buffer(buffers[0] if len(buffers) == 1 else whole_array(operands[0], name))
        if buffer is None:
            return general(operands)  # type: ignore[no-any-return]
        return tensor_of(value, (buffer,), ([],))  # NumPy's ufuncs return new arrays.

    if value is strategies.value:
        strategies.of_buffers = of_buffer
    return run_plan


def _dense_strides(shape: Shape, itemsize: int) -> tuple[int, ...]:
    """Returns the strides of an array in row-major order without gaps."""
    return tuple([itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))])


@functools.lru_cache(4096)
def _are_dense(strides: tuple[int, ...], shape: Shape, itemsize: int) -> bool:
    """Whether strides are those of an array without gaps whose dimensions are in some order in memory."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] == 1))
    return tuple([strides[d] for d in order]) == _dense_strides(tuple([shape[d] for d in order]), itemsize)


class _Parts:
    """The parts of the arrays of one shape along a split dimension.

    Attributes:
        count: the number of parts.
        shapes: for each run of parts of equal size the shape of their array, whose first dimension is that of parts.
    """

    def __init__(self, shape: Shape, split: int, runs: Runs) -> None:
        self._split, ndim = split, len(shape)
        self.count = sum([n for *_, n in runs])
        self._order = (split, *[d for d in range(ndim + 1) if d != split])
        self._runs = [
            (
                None if b - a == shape[split] else (*[slice(None)] * split, slice(a, b)),
                (*shape[:split], n, (b - a) // n, *shape[split + 1 :]),
            )
            for a, b, n in runs
        ]
        self.shapes = [tuple([divided[d] for d in self._order]) for _, divided in self._runs]

    def of(self, x: Array) -> list[Array]:
        """Returns a view for each run of parts of equal size."""
        views = [(x if index is None else x[index]).reshape(divided) for index, divided in self._runs]
        return [part.transpose(self._order) for part in views] if self._split else views


def _sums(
    strategies: Strategies, monoid: Monoid, source: Aval, parts: _Parts, tree: Tree | None
) -> Callable[[Array], Any] | None:
    """Returns the function that reduces a whole buffer by the ufunc of a monoid, or without a tree each part of it;
    None for other dtypes than float32 and float64, since complex products are rounded differently in vectorized loops
    than one by one.
    """
    params, value = strategies.params, strategies.value
    if source.dtype not in ("f4", "f8") or params.get("dtype") not in (None, source.dtype):
        return None
    ufunc, keepdims = getattr(np, monoid.reduces), params["keepdims"]
    axes = tuple([a + 1 for a in reduced_axes(params.get("axis"), source.ndim)])
    count = source.size // max(value.size, 1) if monoid.partial else 0  # of a mean, whose states are sums

    def result(whole: Array) -> Any:
        sums = [ufunc.reduce(part, axis=axes, keepdims=keepdims) for part in parts.of(whole)]
        rows = sums[0] if len(sums) == 1 else np.concatenate(sums)
        if tree is None:
            return rows
        total = combine_rows(tree, rows, ufunc)[0]
        if keepdims:
            total = total.reshape(value.shape)
        return total / count if count else total

    return result


def _scattered(strategies: Strategies, group: Group) -> Run:
    """Returns the plan that adds the rows of all shards at once (see `added_by_parts`)."""
    from shardtensor.functions.building.scatter import added_by_parts  # Few programs need the chapter.

    value, name, size = strategies.value, strategies.name, strategies.params["size"]
    moves = [move for move in strategies.moves if move is not None]
    assert len(moves) == 2
    ndim = len(moves[0].source.shape)
    boxes = [strategies.contexts[k].boxes[0] for k in group.members]
    merges = reduction_tree(group.contributes, group.axes)

    def run_plan(operands: Operands) -> ShardedTensor:
        at, values = [move.whole(x, name) for move, x in zip(moves, operands, strict=True)]
        part = np.zeros(at.shape, np.intp)
        for number, box in enumerate(boxes):
            part[tuple([slice(*ends) for ends in box])] = number
        rows = values.reshape(at.size, *values.shape[ndim:])
        return tensor_of(value, (added_by_parts(at.reshape(-1), rows, part.reshape(-1), merges, size),), ([],))

    return run_plan


# -- variances -------------------------------------------------------------------------------------


def _variances(
    strategies: Strategies, monoid: Monoid, source: Aval, parts: _Parts, tree: Tree
) -> Callable[[Array], Any] | None:
    """Returns the function that computes variances or standard deviations of a whole buffer; None for large or complex
    operands, and for several mesh axes.

    The numbers of elements are known, and so are the factors by which the differences of means are weighted.
    """
    if (
        source.dtype.kind not in "fiub"
        or source.nbytes > _FEW_BYTES
        or tree != flat_tree(len(tree))
        or not parts.shapes
    ):
        return None
    params, value = strategies.params, strategies.value
    axes = tuple([a + 1 for a in reduced_axes(params["axis"], source.ndim)])
    sizes = [int(np.prod([shape[a] for a in axes])) for shape in parts.shapes]
    counts = [size for size, shape in zip(sizes, parts.shapes, strict=True) for _ in range(shape[0])]
    precision = np.dtype("f4" if source.dtype in ("f2", "f4") else "f8")
    factors = _factors(counts, precision, source.ndim)
    finish = functools.partial(monoid.finish, np, ShardContext.everywhere(value.shape, (), value.dtype), **params)

    def result(whole: Array) -> Any:
        states = [_state(part, axes, size, precision) for part, size in zip(parts.of(whole), sizes, strict=True)]
        means, spreads = states[0]
        if len(states) > 1:
            means, spreads = [np.concatenate([state[k] for state in states]) for k in (0, 1)]
        for by_later, by_both in factors:
            count, end = len(means), 2 * len(by_later)
            earlier, pairs = means[:end:2], spreads[:end:2] + spreads[1::2]
            delta = means[1::2] - earlier
            merged = earlier + delta * by_later if count > 2 else earlier  # The last mean is not needed.
            delta *= delta
            delta *= by_both
            pairs += delta
            if count > end:  # The last state has no partner.
                merged, pairs = np.concatenate([merged, means[end:]]), np.concatenate([pairs, spreads[end:]])
            means, spreads = merged, pairs
        return finish((sum(counts), None, spreads.reshape(value.shape)))

    return result


def _state(x: Array, axes: tuple[int, ...], count: int, precision: np.dtype[Any]) -> tuple[Array, Array]:
    """Returns the means and the sums of squared deviations that `var_partial` computes of each part."""
    x = x if x.dtype == precision else x.astype(precision)
    means = np.add.reduce(x, axis=axes, keepdims=True)
    means /= count
    return means, sum_of_squares(np.subtract(x, means, order="C"), axes)


def _factors(counts: Sequence[int], dtype: np.dtype[Any], ndim: int) -> list[tuple[Array, Array]]:
    """Returns for each round of merges the factors of `shardtensor.functions.building.monoids`, one for each pair of
    states: those of the difference of the means, and of its square.

    Args:
        counts: the number of elements of each state.
        dtype: the dtype of the means, to which Python numbers are rounded.
        ndim: the number of dimensions of the operand, which the states of all shards have after their first one.
    """
    rounds = []
    while len(counts) > 1:
        pairs = list(zip(counts[::2], counts[1::2], strict=False))
        shape = (len(pairs), *[1] * ndim)
        later, both = [b / (a + b) for a, b in pairs], [a * b / (a + b) for a, b in pairs]
        rounds.append((np.array(later, dtype).reshape(shape), np.array(both, dtype).reshape(shape)))
        counts = [a + b for a, b in pairs] + list(counts[2 * len(pairs) :])
    return rounds


# -- products --------------------------------------------------------------------------------------


def _products(strategies: Strategies, tree: Tree) -> Run | None:
    """Returns the plan that multiplies the parts of small operands at once; see `_parts_of_products`."""
    products = _parts_of_products(strategies, len(tree))
    if products is None:
        return None
    (first, second), value, name = strategies.moves, strategies.value, strategies.name
    assert first is not None
    assert second is not None
    (rows_of, are_tensors), shape = products, value.shape

    def of_buffers(x1: Array, x2: Array) -> Any:
        return whole_of(combine_rows(tree, rows_of(x1, x2), np.add)[0].reshape(shape), value)

    def run_plan(operands: Operands) -> ShardedTensor:
        buffer = of_buffers(first.whole(operands[0], name), second.whole(operands[1], name))
        return tensor_of(value, (buffer,), ([],))

    if are_tensors:
        strategies.of_buffers = of_buffers
    return run_plan


def _parts_of_products(strategies: Strategies, count: int) -> tuple[Callable[[Array, Array], Array], bool] | None:
    """Returns the function that multiplies the parts of small operands, and whether both are tensors; None for other
    operators than matrix products and contractions of one dimension, for other dtypes, layouts and numbers of
    dimensions, and if there are not as many parts.
    """
    (first, second), value = strategies.moves, strategies.value
    if first is None or second is None:
        return None
    x1, x2 = first.source, second.source
    if {x1.dtype, x2.dtype} != {value.dtype} or value.dtype.kind not in "fc" or x1.nbytes + x2.nbytes > _FEW_BYTES:
        return None
    as_matrices, inner = _as_matrices(strategies, x1.shape, x2.shape)
    if as_matrices is None:
        return None
    left_shape, right_shape = [x.shape for x in as_matrices(np.empty(x1.shape, bool), np.empty(x2.shape, bool))]
    runs = equal_runs(first.target.grid(x1.shape), inner)
    if not runs or max(value.grid.counts, default=1) > 1 or sum(n for *_, n in runs) != count:
        return None
    columns, rows = _Parts(left_shape, len(left_shape) - 1, runs), _Parts(right_shape, len(right_shape) - 2, runs)

    def rows_of(x1: Array, x2: Array) -> Array:
        left, right = as_matrices(x1, x2)
        sums = [np.matmul(x, y) for x, y in zip(columns.of(left), rows.of(right), strict=True)]
        return sums[0] if len(sums) == 1 else np.concatenate(sums)

    return rows_of, isinstance(x1, Aval) and isinstance(x2, Aval)


def _as_matrices(strategies: Strategies, left: Shape, right: Shape) -> tuple[Callable[..., Any] | None, int]:
    """Returns the function that returns views of the operands as matrices, and the dimension of the first operand that
    is contracted; None instead of a function if there are no such views.
    """
    op = strategies.op
    if op.dispatch is matmul:
        # Leading dimensions of different numbers would have to be aligned.
        return (_vectors_as_matrices if len(left) == len(right) or len(left) + len(right) < 4 else None), len(left) - 1
    if "product" not in op.tags:
        return None, 0
    from shardtensor.functions.numpy.products import matrices  # Programs without such products do not need the chapter.

    params = strategies.params
    rule = tensordot_rule((left, right), **params) if op.dispatch is tensordot else params["rule"]
    if matrices(rule, np.empty(left, np.bool_), np.empty(right, np.bool_)) is None:
        return None, 0
    names, _, result = rule.partition("->")
    inner = [name in result.split() for name in names.split(",")[0].split()].index(False)
    return functools.partial(matrices, rule), inner


def _vectors_as_matrices(left: Array, right: Array) -> tuple[Array, Array]:
    return left if left.ndim > 1 else left[np.newaxis], right if right.ndim > 1 else right[:, np.newaxis]
