"""The batching rules of operators that are not elementwise."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.functions.batching.batching_forms import Call, along, each, over_axes, product, rows, stacks
from shardtensor.functions.numpy.differences import windows_of_convolution
from shardtensor.sharding.index import Index
from shardtensor.sharding.rules import normalize_axes, normalize_axis, reduced_axes
from shardtensor.sharding.spec import P
from shardtensor.tensor.tensor import mark_array


def _matmul(recorded: Call) -> Any:
    """A contraction, or a product of stacks of matrices, of which a vector gets a dimension of size 1."""
    ndims = recorded.ndim(0), recorded.ndim(1)
    is_stacked = all(recorded.batched) and min(ndims) >= 2
    if max(ndims) <= 2 and not is_stacked:
        return product(recorded)
    operands = []
    for k, (n, axis) in enumerate(zip(ndims, (-2, -1), strict=True)):
        x = call("expand_dims", recorded.whole(k), axis=axis) if n == 1 else recorded.leaves[k]
        more = max(ndims) - max(n, 2)
        is_batched = recorded.batched[k] or n == 1
        operands.append(call("reshape", x, (x.shape[0], *[1] * more, *x.shape[1:])) if is_batched and more else x)
    gone = tuple([axis for n, axis in zip(ndims, (-2, -1), strict=True) if n == 1])
    result = recorded.again(*operands)
    return call("squeeze", result, axis=gone) if gone else result


def _reshape(recorded: Call) -> Any:
    shape = recorded.params["shape"]
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if -1 in shape:  # Of no examples, the size of one would be unknown.
        rest = math.prod([n for n in shape if n != -1])
        shape = tuple([math.prod(recorded.shape(0)) // (rest or 1) if n == -1 else n for n in shape])
    return recorded.again(*recorded.operands, shape=(recorded.size, *shape))


def _broadcast_to(recorded: Call) -> Any:
    shape = tuple(recorded.params["shape"])
    return recorded.again(recorded.wide(0, len(shape)), shape=(recorded.size, *shape))


def _permuted(recorded: Call) -> Any:
    axes = recorded.params["axes"]
    axes = range(recorded.ndim())[::-1] if axes is None else axes
    order = [normalize_axis(a, recorded.ndim()) + 1 for a in axes]
    return recorded.again(*recorded.operands, axes=(0, *order))


def _squeezed(recorded: Call) -> Any:
    axis = recorded.params["axis"]
    if axis is None:
        axes = tuple([d for d, n in enumerate(recorded.shape(0)) if n == 1])
    else:
        axes = normalize_axes(axis, recorded.ndim())
    return recorded.again(*recorded.operands, axis=tuple([a + 1 for a in axes]))


def _expanded(recorded: Call) -> Any:
    axis = recorded.params["axis"]
    count = len(axis) if isinstance(axis, tuple) else 1
    axes = normalize_axes(axis, recorded.ndim() + count)
    return recorded.again(*recorded.operands, axis=tuple([a + 1 for a in axes]))


def _indexed(recorded: Call) -> Any:
    return recorded.again(*recorded.operands, index=Index(((0, recorded.size, 1), *recorded.params["index"])))


def _solve(recorded: Call) -> Any:
    if recorded.ndim(1) != 1:
        return stacks(2, 2)(recorded)
    vector = call("expand_dims", recorded.whole(1), axis=-1)
    x1 = recorded.leaves[0]
    more = recorded.ndim(0) - 2
    vector = call("reshape", vector, (recorded.size, *[1] * more, *vector.shape[1:])) if more else vector
    return call("squeeze", recorded.again(x1, vector), axis=-1)


def _rolled(recorded: Call) -> Any:
    shift, axis = recorded.params["shift"], recorded.params["axis"]
    x = recorded.operands[0]
    if axis is None:
        flat = recorded.again(call("reshape", x, (recorded.size, math.prod(recorded.shape(0)))), axis=1)
        return call("reshape", flat, x.shape)
    axes = tuple([normalize_axis(a, recorded.ndim()) + 1 for a in (axis if isinstance(axis, tuple) else (axis,))])
    return recorded.again(x, shift=shift, axis=axes if isinstance(axis, tuple) else axes[0])


def _triangle(recorded: Call) -> Any:
    x = recorded.operands[0]
    if recorded.ndim() == 1:  # A vector is each row of a matrix.
        n = x.shape[1]
        x = call("broadcast_to", call("expand_dims", x, axis=1), (recorded.size, n, n))
    return recorded.again(x)


def _flipped(recorded: Call) -> Any:
    axes = reduced_axes(recorded.params["axis"], recorded.ndim())
    return recorded.again(*recorded.operands, axis=tuple([a + 1 for a in axes]))


def _two_axes(recorded: Call) -> Any:
    axes = {name: normalize_axis(recorded.params[name], recorded.ndim()) + 1 for name in ("axis1", "axis2")}
    return recorded.again(*recorded.operands, **axes)


def _transferred(recorded: Call) -> Any:
    return recorded.again(*recorded.operands, sharding=recorded.layout(recorded.params["sharding"], recorded.ndim()))


def _padded(recorded: Call) -> Any:
    return recorded.again(*recorded.operands, widths=((0, 0), *recorded.params["widths"]))


def _quantiles(recorded: Call) -> Any:
    """The dimensions of the probabilities are in front."""
    axes = tuple([a + 1 for a in reduced_axes(recorded.params["axis"], recorded.ndim())])
    q, shape = recorded.operands[1], recorded.shape(1)
    if not recorded.batched[1]:
        result = recorded.again(recorded.whole(0), q, axis=axes)
        return call("moveaxis", result, len(shape), 0) if shape else result
    x = recorded.whole(0)
    if recorded.op.name == "quantile" and x.dtype.kind in "iuf" and all(x.shape[a] for a in axes):
        return _quantiles_of_each(recorded, x, axes)
    # Each example gets the quantiles of all, and keeps its own.
    n = math.prod(shape)
    every = recorded.again(x, call("reshape", q, (recorded.size * n,)), axis=axes)  # (examples * n, examples, ...)
    every = call("reshape", every, (recorded.size, n, *every.shape[1:]))
    own = call("diagonal", every, axis1=0, axis2=2)  # (n, ..., examples)
    return call("reshape", call("moveaxis", own, -1, 0), (recorded.size, *shape, *own.shape[1:-1]))


_ELEMENTS = ("lower", "higher", "nearest", "inverted_cdf", "closest_observation")
"""The methods of quantiles that are elements, between which nothing is interpolated."""


def _quantiles_of_each(recorded: Call, x: Any, axes: tuple[int, ...]) -> Any:
    """Returns quantiles of which the probabilities differ: between the sorted elements before and behind the quantile
    of the ranks.
    """
    q, shape, method = recorded.operands[1], recorded.shape(1), recorded.params["method"]
    kept = [a for a in range(1, x.ndim) if a not in axes]
    rest, n = [x.shape[a] for a in kept], math.prod([x.shape[a] for a in axes])
    lines = call("reshape", call("permute_dims", x, (0, *kept, *axes)), (recorded.size, *rest, n))
    ordered = call("sort", lines, axis=-1)
    count = math.prod(shape)
    at = call("quantile", call("arange", float(n)), call("reshape", q, (recorded.size * count,)), method=method)
    at = recorded.kept(call("reshape", at, (recorded.size, *[1] * len(rest), count)))
    before = call("floor", at)
    ranks = [call("astype", k, "int64") for k in (before, call("minimum", before + 1, n - 1))]
    dtype = np.quantile(np.ones(1, x.dtype), np.zeros(1, q.dtype), method=method).dtype
    a, b = [call("astype", call("take_along_axis", ordered, k, axis=-1), dtype) for k in ranks]
    weight = call("astype", at - before, dtype)
    result = a
    if method not in _ELEMENTS:
        result = call("where", weight >= 0.5, b - (b - a) * (1 - weight), a + (b - a) * weight)
    if x.dtype.kind == "f":
        result = call("where", call("isnan", ordered[..., -1:]), np.nan, result)
    result = call("moveaxis", result, -1, 1)
    if recorded.params["keepdims"]:
        rest = [1 if a in axes else x.shape[a] for a in range(1, x.ndim)]
    return call("reshape", result, (recorded.size, *shape, *rest))


def _crossed(recorded: Call) -> Any:
    p, ndims = recorded.params, (recorded.ndim(0), recorded.ndim(1))
    axes = [p["axisa"], p["axisb"], p["axisc"]] if p["axis"] is None else [p["axis"]] * 3
    operands = []
    for k in range(2):
        x = recorded.whole(k)
        x = call("moveaxis", x, normalize_axis(axes[k], ndims[k]) + 1, -1)
        more = max(ndims) - ndims[k]
        operands.append(call("reshape", x, (recorded.size, *[1] * more, *x.shape[1:])) if more else x)
    result = recorded.again(*operands, axisa=-1, axisb=-1, axisc=-1, axis=None)
    if result.ndim - 1 < max(ndims):  # Vectors of two elements give numbers.
        return result
    return call("moveaxis", result, -1, normalize_axis(axes[2], result.ndim - 1) + 1)


def _filled(recorded: Call) -> Any:
    """An array that is filled with the number of its example."""
    shape, number = recorded.params["shape"], recorded.operands[0]
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype, device = recorded.params["dtype"] or number.dtype, recorded.params["device"]
    wide = call("reshape", number, (recorded.size, *[1] * len(shape)))
    result = call("broadcast_to", call("astype", wide, dtype), (recorded.size, *shape))
    return result if device is None else call("reshard", result, recorded.layout(device, len(shape)))


def _filled_like(recorded: Call) -> Any:
    like, number = recorded.again(recorded.whole(0), 0), recorded.operands[1]
    if not recorded.batched[1]:
        return recorded.again(recorded.whole(0), number)
    value = call("reshape", number, (recorded.size, *[1] * recorded.ndim()))
    return call("add", like, call("astype", value, like.dtype))


def _repeated(recorded: Call) -> Any:
    """One of the arrays that span a grid, repeated over it."""
    which, axes, dtype = [recorded.params[name] for name in ("which", "axes", "dtype")]
    sizes = [recorded.shape(axes.index(d))[0] for d in range(len(axes))]
    line = [n if d == axes[which] else 1 for d, n in enumerate(sizes)]
    wide = call("reshape", recorded.whole(which), (recorded.size, *line))
    return call("astype", call("broadcast_to", wide, (recorded.size, *sizes)), dtype)


def _part_of_convolution(recorded: Call) -> Any:
    p = recorded.params
    return _convolved(recorded.whole(0), recorded.whole(1), recorded.beside(), p["before"], p["behind"])


def _convolved(a: Any, v: Any, where: Any, before: int, behind: int) -> Any:
    """Returns the sum over the elements of v of their products with a part of a, as `convolve_part` computes it."""
    n, m = a.shape[1], v.shape[1]
    count = before + n + behind - m + 1
    total = mark_array(call("zeros", (a.shape[0], max(count, 0)), dtype=a.dtype, device=where))
    for k in range(m if count > 0 else 0):
        first = m - 1 - k - before
        begin, end = max(-first, 0), min(n - first, count)
        if begin < end:
            part, products = total[:, begin:end], a[:, begin + first : end + first] * v[:, k : k + 1]
            if a.dtype.kind == "b":
                part |= products
            else:
                part += products
    return total


def _together(x: Any, axes: Any) -> Any:
    """Returns the values of all examples so that these are not split along the given mesh axes."""
    chains = x.sharding.spec.chains_of(x.ndim)
    kept = tuple([a for a in chains[0] if a not in axes])
    return x if kept == chains[0] else call("reshard", x, x.sharding.with_spec(P(kept, *chains[1:])))


def _split_over(recorded: Call) -> Any:
    """The shards of all examples, which are not split along the axes of the shards themselves."""
    axes, drop = recorded.params["axes"], recorded.params["drop"]
    return recorded.again(_together(recorded.operands[0], axes), drop=None if drop is None else drop + 1)


def _assembled(recorded: Call) -> Any:
    spec = recorded.params["spec"]
    blocks = [recorded.whole(k) for k in range(len(recorded.leaves))]
    return recorded.again(*blocks, spec=spec.with_chains(((), *spec.chains_of(recorded.ndim()))))


def _partial_sums(recorded: Call) -> Any:
    """The partial sums of all examples: those are along the first dimension, and the examples behind it."""
    return call("copy", call("moveaxis", recorded.again(*recorded.operands), 1, 0))


def _unsqueezed(recorded: Call) -> Any:
    return recorded.again(*recorded.operands, axis=recorded.params["axis"] + 1)


def _with_halos(recorded: Call) -> Any:
    x = recorded.operands[0]
    return recorded.again(_together(x, x.sharding.mesh.axis_names), depth=(0, *recorded.params["depth"]))


def _along_lines(recorded: Call) -> Any:
    return recorded.again(*recorded.operands, along=recorded.params["along"] + 1)


def _convolution(recorded: Call) -> Any:
    (n,), (m,) = recorded.shape(0), recorded.shape(1)
    count, before = windows_of_convolution(n, m, recorded.params["mode"])
    a, v, behind = recorded.whole(0), recorded.whole(1), count + m - 1 - before - n
    return _convolved(a, v, recorded.beside(), before, behind)


def _diagonal_matrix(recorded: Call) -> Any:
    """The k-th diagonal of a matrix, or the matrix that has one, of each example."""
    k = operator.index(recorded.params["k"])
    if recorded.ndim() != 1:
        return call("copy", call("diagonal", recorded.operands[0], k, 1, 2))
    count = recorded.shape(0)[0]
    size, top = count + abs(k), max(-k, 0)
    rows_of = call("pad", recorded.operands[0], ((0, 0), (top, size - count - top)))
    is_there = np.eye(size, k=k, dtype=bool)
    return call("where", is_there, call("expand_dims", rows_of, axis=-1), np.zeros((), rows_of.dtype))


def _copied(recorded: Call) -> Any:
    return recorded.again(*recorded.operands)


def _as_array(recorded: Call) -> Any:
    """Nested lists are stacked behind the examples."""
    numbers = iter(range(len(recorded.leaves)))

    def stacked(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return call("stack", list(map(stacked, x)), axis=1)
        return recorded.whole(next(numbers))

    result = call("asarray", stacked(recorded.operands[0]), recorded.params["dtype"], copy=recorded.params["copy"])
    device = recorded.params["device"]
    return result if device is None else call("reshard", result, recorded.layout(device, result.ndim - 1))


rows(
    # Reductions.
    **each(
        "sum mean prod max min all any var std nanmax nanmin count_nonzero vector_norm median nanmedian fold",
        over_axes,
    ),
    argmax=along(),
    argmin=along(),
    quantile=_quantiles,
    nanquantile=_quantiles,
    # Products.
    matmul=_matmul,
    tensordot=product,
    contract=product,
    vecdot=product,
    cross=_crossed,
    # Movement and creation.
    **each("copy matrix_transpose zeros_like ones_like empty_like", _copied),
    asarray=_as_array,
    reshape=_reshape,
    broadcast_to=_broadcast_to,
    permute_dims=_permuted,
    squeeze=_squeezed,
    expand_dims=_expanded,
    flip=_flipped,
    getitem=_indexed,
    concat=along(),
    unshard=along(),
    stack=along(of_result=1),
    roll=_rolled,
    padded=_padded,
    diagonal=_two_axes,
    trace=_two_axes,
    spanned=_repeated,
    partial_sums=_partial_sums,
    split_over=_split_over,
    **each("assemble assemble_sums", _assembled),
    unsqueeze=_unsqueezed,
    with_halos=_with_halos,
    lines_applied=_along_lines,
    convolve_part=_part_of_convolution,
    convolved=_convolution,
    diag=_diagonal_matrix,
    tril=_triangle,
    triu=_triangle,
    transfer_to=_transferred,
    full=_filled,
    full_like=_filled_like,
    # Sorts, scans and lines.
    **each("sort argsort partition argpartition topk take_along_axis", along()),
    **each("accumulated running segments central_differences", along()),
    cumulative_sum=along(default=0),
    cumulative_prod=along(default=0),
    **each("mapped_lines packed unpacked", _copied),
    # Linear algebra and Fourier transforms.
    **each(
        "cholesky inv det slogdet qr svd svdvals eig eigh eigvals eigvalsh cond",
        stacks(2),
    ),
    solve=_solve,
    pinv=stacks(2, 0),
    matrix_rank=stacks(2, 0),
    **each("fft ifft rfft irfft hfft ihfft", along()),
)
