"""The batching rules of operators that are not elementwise."""

from __future__ import annotations

from typing import Any

from shardtensor.core import call
from shardtensor.errors import ArgumentTypeError
from shardtensor.functions.batching.forms import Call, along, over_axes, product, rows, stacks
from shardtensor.sharding.rules import normalize_axes, normalize_axis, reduced_axes
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import shape_of


def _matmul(recorded: Call) -> Any:
    if min(recorded.ndim(0), recorded.ndim(1)) < 2 or not all(recorded.batched):
        return product(recorded) if max(recorded.ndim(0), recorded.ndim(1)) <= 2 else _stacked_product(recorded)
    return stacks(2, 2)(recorded)


def _stacked_product(recorded: Call) -> Any:
    """A product with stacks of matrices, of which a vector gets a dimension of size 1."""
    n0, n1 = recorded.ndim(0), recorded.ndim(1)
    loops = max(n0, n1, 2) - 2
    x1 = call("expand_dims", recorded.whole(0), axis=-2) if n0 == 1 else recorded.leaves[0]
    x2 = call("expand_dims", recorded.whole(1), axis=-1) if n1 == 1 else recorded.leaves[1]
    given = []
    for x, is_batched, n in (
        (x1, recorded.batched[0] or n0 == 1, max(n0, 2)),
        (x2, recorded.batched[1] or n1 == 1, max(n1, 2)),
    ):
        more = loops - (n - 2)
        given.append(call("reshape", x, (x.shape[0], *[1] * more, *x.shape[1:])) if is_batched and more else x)
    made = recorded.again(*given)
    gone = tuple([-2] * (n0 == 1) + [-1] * (n1 == 1))
    return call("squeeze", made, axis=gone) if gone else made


def _reshape(recorded: Call) -> Any:
    shape = recorded.params["shape"]
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if -1 in shape and recorded.size == 0 or (-1 in shape and 0 in shape):
        pass
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
    index = recorded.params["index"]
    entries = index if isinstance(index, tuple) else (index,)
    return recorded.again(*recorded.operands, index=(slice(None), *entries))


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
        flat = recorded.again(call("reshape", x, (recorded.size, -1)), axis=1)
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
    """The examples stay on the devices where they are, along the mesh axes that the layout of one example leaves."""
    x, sharding = recorded.operands[0], recorded.params["sharding"]
    here, chains = x.sharding, sharding.spec.chains_of(recorded.ndim())
    used = {a for chain in chains for a in chain} | set(sharding.spec.unreduced)
    kept = here.spec.chains_of(x.ndim)[0] if here.mesh == sharding.mesh else ()
    spec = P(tuple([a for a in kept if a not in used]), *chains, unreduced=sharding.spec.unreduced)
    return recorded.again(x, sharding=sharding.with_spec(spec))


def _padded(recorded: Call) -> Any:
    return recorded.again(*recorded.operands, widths=((0, 0), *recorded.params["widths"]))


def _quantiles(recorded: Call) -> Any:
    """The dimensions of the probabilities are in front, which are the same for all examples."""
    if recorded.batched[1]:
        raise ArgumentTypeError(
            f"{recorded.op.error_name}: q differs from one example to another; wanted the same for all"
        )
    axes = tuple([a + 1 for a in reduced_axes(recorded.params["axis"], recorded.ndim())])
    made = recorded.again(*recorded.operands, axis=axes)
    ndim = len(shape_of(recorded.operands[1]))
    return call("moveaxis", made, ndim, 0) if ndim else made


def _crossed(recorded: Call) -> Any:
    p, ndims = recorded.params, (recorded.ndim(0), recorded.ndim(1))
    axes = [p["axisa"], p["axisb"], p["axisc"]] if p["axis"] is None else [p["axis"]] * 3
    given = []
    for k in range(2):
        x = recorded.whole(k)
        x = call("moveaxis", x, normalize_axis(axes[k], ndims[k]) + 1, -1)
        more = max(ndims) - ndims[k]
        given.append(call("reshape", x, (recorded.size, *[1] * more, *x.shape[1:])) if more else x)
    made = recorded.again(*given, axisa=-1, axisb=-1, axisc=-1, axis=None)
    if made.ndim - 1 < max(ndims):  # Vectors of two elements give numbers.
        return made
    return call("moveaxis", made, -1, normalize_axis(axes[2], made.ndim - 1) + 1)


def _filled(recorded: Call) -> Any:
    """Arrays that are filled with a number of each example."""
    shape = recorded.params["shape"]
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    made = call(
        "full", 0, shape, dtype=recorded.params["dtype"] or recorded.operands[0].dtype, device=recorded.params["device"]
    )
    return call("add", call("reshape", recorded.operands[0], (recorded.size, *[1] * len(shape))), made)


def _filled_like(recorded: Call) -> Any:
    ndim = recorded.ndim(0)
    like = recorded.again(recorded.whole(0), 0)
    if not recorded.batched[1]:
        return recorded.again(recorded.whole(0), recorded.operands[1])
    value = call("reshape", recorded.operands[1], (recorded.size, *[1] * ndim))
    return call("astype", call("broadcast_to", value, like.shape), like.dtype) + like


def _copied(recorded: Call) -> Any:
    return recorded.again(*recorded.operands)


rows(
    # Reductions.
    sum=over_axes, mean=over_axes, prod=over_axes, max=over_axes, min=over_axes, all=over_axes, any=over_axes,
    var=over_axes, std=over_axes, nanmax=over_axes, nanmin=over_axes, count_nonzero=over_axes, vector_norm=over_axes,
    median=over_axes, nanmedian=over_axes, argmax=along(), argmin=along(),
    # Products.
    matmul=_matmul, tensordot=product, contract=product, vecdot=product,
    # Movement.
    reshape=_reshape, broadcast_to=_broadcast_to, permute_dims=_permuted, squeeze=_squeezed, expand_dims=_expanded,
    getitem=_indexed, concat=along(), stack=along(of_result=1), copy=_copied, asarray=_copied,
    roll=_rolled, diagonal=_two_axes, trace=_two_axes, transfer_to=_transferred, padded=_padded, tril=_triangle,
    triu=_triangle, flip=_flipped, solve=_solve,
    matrix_transpose=_copied, zeros_like=_copied, ones_like=_copied, empty_like=_copied, full_like=_filled_like,
    full=_filled, unshard=along(),
    # Ufunc methods, lines and counts.
    accumulated=along(), running=along(), fold=over_axes, segments=along(), mapped_lines=_copied, packed=_copied,
    unpacked=_copied, quantile=_quantiles, nanquantile=_quantiles, cross=_crossed, central_differences=along(),
    # Sorts and scans.
    sort=along(), argsort=along(), cumulative_sum=along(default=0), cumulative_prod=along(default=0),
    take_along_axis=along(), partition=along(), argpartition=along(), topk=along(),
    # Linear algebra and Fourier transforms.
    cholesky=stacks(2), inv=stacks(2), det=stacks(2), slogdet=stacks(2), pinv=stacks(2, 0), matrix_rank=stacks(2, 0), qr=stacks(2), svd=stacks(2),
    svdvals=stacks(2), eig=stacks(2), eigh=stacks(2), eigvals=stacks(2), eigvalsh=stacks(2), cond=stacks(2),
    fft=along(), ifft=along(), rfft=along(), irfft=along(), hfft=along(), ihfft=along(),
)  # fmt: skip
