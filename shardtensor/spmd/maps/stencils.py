"""Stencils: `map_overlap`, which runs a function on each shard and the elements around it, and convolutions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from shardtensor.core import composition, hinted, implements
from shardtensor.errors import ArgumentError, ArgumentTypeError, RangeError, ShapeError, ShardTensorError, type_text
from shardtensor.functions.building.halos import BOUNDARIES, Windows, parts_of_windows, with_halos, with_windows
from shardtensor.functions.building.unsplit_lines import are_whole
from shardtensor.functions.numpy.differences import convolve_part, convolved, same_dtype, windows_of_convolution
from shardtensor.functions.placement.transfers import ensure_sharding, transfer_to
from shardtensor.functions.standard.elementwise import conj
from shardtensor.functions.standard.manipulation import flip
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape, as_sharding
from shardtensor.sharding.mesh import default_mesh, mesh_of
from shardtensor.sharding.spec import P, PartitionSpec
from shardtensor.spmd.maps.launch import MappedArgument, Unmapped, map_shards
from shardtensor.spmd.maps.outputs import check_array, joined, same_forms
from shardtensor.tensor.nested_lists import converted
from shardtensor.tensor.operands import host_array
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor

if TYPE_CHECKING:
    from shardtensor.spmd.maps.map_types import Anything, Array, Unknown


@overload
def map_overlap(
    fn: Callable[..., Array], x: ArrayLike, *more: ArrayLike, depth: int | Sequence[int], boundary: str | complex
) -> ShardedTensor: ...


@overload
def map_overlap(
    fn: Callable[..., Unknown], x: ArrayLike, *more: ArrayLike, depth: int | Sequence[int], boundary: str | complex
) -> Any: ...


@overload
def map_overlap(
    fn: Callable[..., Anything], x: ArrayLike, *more: ArrayLike, depth: int | Sequence[int], boundary: str | complex
) -> Any: ...


@hinted
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
        ArgumentTypeError: ``fn`` is not a function, ``depth`` not an integer, or x not an array.
        ShapeError: ``depth`` is larger than the dimension, arrays differ in shape, or a result has another shape.
        RangeError: ``boundary`` is a number that x's dtype cannot represent.
        Exception: an error that ``fn`` raises, with a note of the shard and the device.

    >>> x = st.arange(8, device=st.make_mesh((4,), ("x",)))
    >>> st.map_overlap(lambda block: block[:-2] + block[2:], x, depth=1, boundary="periodic").tolist()
    [8, 2, 4, 6, 8, 10, 12, 6]
    """
    if not callable(fn):
        raise ArgumentTypeError(f"map_overlap: fn is {type_text(fn)}; wanted a function")
    first, *others = [host_array(a, "map_overlap") for a in (x, *more)]
    for number, other in enumerate(others, 1):
        if other.shape != first.shape:
            raise ShapeError(f"map_overlap: array {number} has shape {other.shape}; wanted {first.shape}, as x has")
    halo = _depths(depth, first.shape)
    edges = [_boundary(boundary, a.dtype) for a in (first, *others)]
    if not isinstance(first, ShardedTensor):
        target = as_sharding(default_mesh(), first.ndim, "map_overlap")
        first = transfer_to(first, target, "map_overlap", committed=False)
    mesh, spec = first.sharding.mesh, _read_spec(first)
    arrays = [first, *[ensure_sharding(other, first.sharding, "map_overlap") for other in others]]
    columns = [MappedArgument(with_halos(a, halo, edge), True) for a, edge in zip(arrays, edges, strict=True)]
    function, submeshes = functools.partial(_on_blocks, fn, halo), [mesh_of((device,)) for device in mesh.flat]
    results = map_shards(columns, function, submeshes, submeshes, "map_overlap", mesh.axis_names, mesh.axis_sizes)
    same_forms(results, "map_overlap")
    count = len(leaves(results[0]))
    return joined(results, lambda _: [spec] * count, mesh, mesh.axis_names, "map_overlap", check=False)


def _read_spec(x: ShardedTensor) -> PartitionSpec:
    """Returns the spec of a tensor after it was read, which adds partial sums."""
    return P(*x.sharding.spec.chains)


def _on_blocks(fn: Callable[..., Any], depth: Shape, *blocks: Any) -> Any:
    """Calls ``fn`` on the blocks of one device, and removes the halos of its results."""
    outer = tuple(blocks[0].shape)
    inner = tuple([n - 2 * d for n, d in zip(outer, depth, strict=True)])
    index = tuple([slice(d, d + n) for n, d in zip(inner, depth, strict=True)])

    def without_halo(leaf: Any) -> Any:
        check_array(leaf, "map_overlap: the result")
        shape = tuple(np.shape(leaf))
        if shape not in (outer, inner):
            raise ShapeError(
                f"map_overlap: fn returned an array of shape {shape}; wanted {outer} or, without halo, {inner}"
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
        raise ArgumentError(
            f"map_overlap: depth has {counted(len(each), 'entry', 'entries')}, and x has "
            f"{counted(len(shape), 'dimension')}"
        )
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


# -- convolutions ----------------------------------------------------------------------------------


def _on_host(a: Any, v: Any, mode: str, caller: str) -> Any:
    """Computes `convolve` or `correlate` of whole host arrays."""
    return getattr(np, caller)(*[np.asarray(x) for x in _signals(a, v, mode, caller)], mode)


@composition(lambda a, v, mode="full": _on_host(a, v, mode, "convolve"))
def convolve(a: ArrayLike, v: ArrayLike, mode: str = "full") -> ShardedTensor:
    """Computes the discrete linear convolution of two arrays of one dimension.

    Element n of the full result is the sum of ``a[m] * v[n - m]``. The longer array stays distributed: each device
    receives a halo of the length of the shorter one, of which every device gets a copy. The result has the dtype to
    which both are promoted, and is sharded like the longer array.

    Args:
        a, v: arrays of one dimension, with at least one element.
        mode: ``"full"``: n + m - 1 elements; ``"same"``: as many as the longer array, those in the middle; ``"valid"``:
            those where the arrays overlap completely.

    Raises:
        ArgumentError: ``mode`` is unknown.
        ShapeError: an array is empty, or does not have one dimension.

    >>> st.convolve(st.asarray([1, 2, 3]), [1, 1]).tolist()
    [1, 3, 5, 3]
    """
    first, second = _signals(a, v, mode, "convolve")
    return convolved(first, second, mode) if len(first) >= len(second) else convolved(second, first, mode)


@composition(lambda a, v, mode="valid": _on_host(a, v, mode, "correlate"))
def correlate(a: ArrayLike, v: ArrayLike, mode: str = "valid") -> ShardedTensor:
    """Computes the cross-correlation of two arrays of one dimension: sums of ``a[n + k] * conj(v[n])``.

    Arguments, dtype, sharding and errors are those of `convolve`. If ``v`` is longer than ``a``, the result is that of
    the swapped arrays in reversed order, conjugated, as in NumPy.

    >>> st.correlate(st.asarray([1, 2, 3]), [0, 1]).tolist()
    [2, 3]
    """
    first, second = _signals(a, v, mode, "correlate")
    second = conj(second) if second.dtype.kind == "c" else second
    if len(second) > len(first):  # The factors are those of NumPy, and with them the signs of zeros.
        return flip(convolved(second, flip(first), mode))
    return convolved(first, flip(second), mode)


def _signals(a: Any, v: Any, mode: str, caller: str) -> tuple[Any, Any]:
    """Returns the operands of a convolution as arrays of one dtype, after all checks."""
    if mode not in ("full", "same", "valid"):
        raise ArgumentError(f"{caller}: mode is {mode!r:.60}; wanted 'full', 'same' or 'valid'")
    arrays = [host_array(x, caller) for x in (a, v)]
    for name, x in zip("av", arrays, strict=True):
        if x.ndim != 1 or not x.size:
            raise ShapeError(f"{caller}: {name} has shape {x.shape}; wanted one dimension with at least one element")
    return same_dtype(*arrays)


@implements(convolved, "composite")
def _convolved(a: Any, v: Any, mode: str) -> ShardedTensor:
    n, m = len(a), len(v)
    if not isinstance(a, ShardedTensor):
        a = transfer_to(a, as_sharding(default_mesh(), 1, "convolve"), "convolve", committed=False)
    count, before = windows_of_convolution(n, m, mode)
    if are_whole(a, (0,)):
        return convolve_part(a, v, before=before, behind=count + m - 1 - before - n)
    windows = Windows(count, m, before)
    mesh, spec = a.sharding.mesh, _read_spec(a)
    ends = [Unmapped((part.before, part.behind)) for part in parts_of_windows(a._aval, windows)]

    def on_device(block: Any, absent: tuple[int, int]) -> Any:
        return convolve_part(block, v, before=absent[0], behind=absent[1]) if len(block) else block

    columns = [MappedArgument(with_windows(a, windows), True), MappedArgument(ends, True)]
    submeshes = [mesh_of((device,)) for device in mesh.flat]
    results = map_shards(columns, on_device, submeshes, submeshes, "convolve", mesh.axis_names, mesh.axis_sizes)
    result: ShardedTensor = joined(results, lambda _: [spec], mesh, mesh.axis_names, "convolve", check=False)
    return result
