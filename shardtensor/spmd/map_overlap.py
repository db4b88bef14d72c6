"""`map_overlap`: runs a function on each device's shard together with the elements around it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.errors import ArgumentError, ArgumentTypeError, RangeError, ShapeError, ShardTensorError
from shardtensor.functions.halos import BOUNDARIES, with_halos
from shardtensor.functions.placement import ensure_sharding, host_array, transfer_to
from shardtensor.sharding.layout import Shape, as_sharding
from shardtensor.sharding.mesh import default_mesh, mesh_of
from shardtensor.spmd.launch import MappedArgument, map_shards
from shardtensor.spmd.outputs import check_array, joined, same_forms
from shardtensor.tensor.operands import converted
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor


def map_overlap(
    fn: Callable[..., Any], x: ArrayLike, *more: ArrayLike, depth: int | Sequence[int], boundary: str | complex
) -> Any:
    """Runs ``fn`` on every device, on its shard of x with a halo: the elements around the shard, which other devices
    hold.

    It is the map of stencils: filters, finite differences, cellular automata. Only the halos are transferred, corners
    included, from all devices that hold a part of them. The result is the same on every mesh if each of its elements
    depends on at most ``depth`` elements around it.

    Args:
        fn: the function. It receives an array of the backend with ``2 * depth`` elements more than the shard in each
            dimension, and returns an array of that shape, whose halo is removed, or an array of the shard's shape; or
            a pytree of such arrays. It may call collectives along the axes of x's mesh.
        x: a tensor, or a host array, which is sharded over the default mesh.
        *more: further arguments of ``fn``, arrays of x's shape; they are transferred to x's sharding.
        depth: the elements of the halo before and behind the shard, for all dimensions or one number for each; at most
            the size of the dimension.
        boundary: the elements outside of x: ``"periodic"`` (those of the opposite end: d a b c d a), ``"reflect"``
            (mirrored, with the edge repeated, as in scipy.ndimage: a a b c d d), ``"nearest"`` (the edge), or a number.

    Returns:
        A tensor of x's shape and sharding, of the dtype of fn's results, or a pytree of them.

    Raises:
        ArgumentError: ``depth`` is negative, or has another length than x has dimensions; ``boundary`` is unknown.
        ArgumentTypeError: ``fn`` is no function, ``depth`` no integer, or x no array.
        ShapeError: ``depth`` is larger than the dimension, arrays differ in shape, or a result has another shape.
        RangeError: ``boundary`` is a number that x's dtype cannot represent.
        Exception: an error that ``fn`` raises, with a note of the shard and the device.

    >>> x = st.arange(8, device=st.make_mesh((4,), ("x",)))
    >>> st.map_overlap(lambda block: block[:-2] + block[2:], x, depth=1, boundary="periodic").tolist()
    [8, 2, 4, 6, 8, 10, 12, 6]
    """
    if not callable(fn):
        raise ArgumentTypeError(f"map_overlap: fn is a {type(fn).__name__}; wanted a function")
    first, *others = [host_array(a, "map_overlap") for a in (x, *more)]
    for number, other in enumerate(others, 1):
        if other.shape != first.shape:
            raise ShapeError(f"map_overlap: array {number} has shape {other.shape}; wanted {first.shape}, as x has")
    halo = _depths(depth, first.shape)
    edges = [_boundary(boundary, a.dtype) for a in (first, *others)]
    if not isinstance(first, ShardedTensor):
        target = as_sharding(default_mesh(), first.ndim, "map_overlap")
        first = transfer_to(first, target, "map_overlap", committed=False)
    mesh, spec = first.sharding.mesh, first.sharding.spec
    arrays = [first, *[ensure_sharding(other, first.sharding, "map_overlap") for other in others]]
    columns = [MappedArgument(with_halos(a, halo, edge), True) for a, edge in zip(arrays, edges, strict=True)]
    function, submeshes = functools.partial(_on_blocks, fn, halo), [mesh_of((device,)) for device in mesh.flat]
    results = map_shards(columns, function, submeshes, submeshes, "map_overlap", mesh.axis_names, mesh.axis_sizes)
    same_forms(results, "map_overlap")
    count = len(leaves(results[0]))
    return joined(results, lambda _: [spec] * count, mesh, mesh.axis_names, "map_overlap", check=False)


def _on_blocks(fn: Callable[..., Any], depth: Shape, *blocks: Any) -> Any:
    """Calls ``fn`` on the blocks of one device, and removes the halos of its results."""
    given = tuple(blocks[0].shape)
    inner = tuple([n - 2 * d for n, d in zip(given, depth, strict=True)])
    index = tuple([slice(d, d + n) for n, d in zip(inner, depth, strict=True)])

    def without_halo(leaf: Any) -> Any:
        check_array(leaf, "map_overlap: the result")
        shape = tuple(np.shape(leaf))
        if shape not in (given, inner):
            raise ShapeError(
                f"map_overlap: fn returned an array of shape {shape}; wanted {given} or, without halo, {inner}"
            )
        return leaf if shape == inner else leaf[index]

    return map_leaves(without_halo, fn(*blocks))


def _depths(depth: Any, shape: Shape) -> Shape:
    try:
        each = [operator.index(n) for n in (depth if np.iterable(depth) else [depth] * len(shape))]
    except TypeError:
        raise ArgumentTypeError(
            f"map_overlap: depth is {depth!r:.60}; wanted an integer, or one for each axis"
        ) from None
    if len(each) != len(shape):
        raise ArgumentError(f"map_overlap: depth has {len(each)} entries, and x has {len(shape)} dimensions")
    for d, (n, size) in enumerate(zip(each, shape, strict=True)):
        if n < 0:
            raise ArgumentError(f"map_overlap: depth {n} in dimension {d} is negative")
        if n > size:
            raise ShapeError(f"map_overlap: depth {n} is larger than dimension {d}, which has size {size}")
    return tuple(each)


def _boundary(boundary: Any, dtype: Any) -> Any:
    """Returns a boundary, of which a number is converted to a Python number that the dtype can represent."""
    if isinstance(boundary, str) and boundary in BOUNDARIES:
        return boundary
    if type(boundary) not in SCALARS and not isinstance(boundary, np.generic):
        raise ArgumentError(f"map_overlap: boundary is {boundary!r:.60}; wanted one of {BOUNDARIES} or a number")
    try:
        return converted(boundary, dtype, "boundary").item()
    except OverflowError as error:
        raise RangeError(f"map_overlap: boundary: {error}") from None
    except ShardTensorError as error:
        raise type(error)(f"map_overlap: {error}") from None
