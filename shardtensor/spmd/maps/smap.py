"""`smap`: splits arrays, maps a function over the parts, and joins the results into one tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, type_text
from shardtensor.functions.placement.shard_lists import device_row, split_over
from shardtensor.functions.placement.transfers import ensure_sharding
from shardtensor.functions.random.random_keys import Key
from shardtensor.functions.standard.manipulation import reshape
from shardtensor.host.units import counted
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.mesh import Mesh, default_mesh, mesh_of, shares
from shardtensor.sharding.spec import P, PartitionSpec
from shardtensor.spmd.maps.launch import MappedArgument, checked_axis, key_is_not_split, map_shards
from shardtensor.spmd.maps.outputs import check_array, joined, same_forms
from shardtensor.tensor.operands import host_array
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from shardtensor.spmd.maps.map_types import Anything, Array, Unknown
    from shardtensor.tensor.tensor import ShardedTensor

_AS_JAX = (
    "where jax.smap(f, in_axes=0, out_axes=0, axis_name='x') returns a function, st.smap(f, x, axes=0, out_axes=0, "
    "axis_name='x') maps at once, and st.shard_map(f, in_specs=st.P('x'), out_specs=st.P('x'), axis_names={'x'}) "
    "returns one that maps over an axis of the mesh in use"
)
"""What to write in place of a call of `jax.smap`."""

Entry = tuple["int | None", ...]
"""For each grid axis the array axis that it splits, or None."""


@overload
def smap(
    fn: Callable[..., Array],
    *args: Any,
    axes: Any = 0,
    out_axes: Any = None,
    devices: Sequence[Device] | Mesh | None = None,
    axis_name: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> ShardedTensor: ...


@overload
def smap(fn: Callable[..., Unknown], *args: Any, axes: Any = 0, **kwargs: Any) -> Any: ...


@overload
def smap(fn: Callable[..., Anything], *args: Any, axes: Any = 0, **kwargs: Any) -> Any: ...


@hinted
def smap(
    fn: Callable[..., Any] | None = None,
    *args: Any,
    axes: Any = 0,
    out_axes: Any = None,
    devices: Sequence[Device] | Mesh | None = None,
    axis_name: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Splits the arguments, calls ``fn`` with the parts concurrently, and joins the results to one sharded tensor.

    This is not `jax.smap`, which returns a mapped function: ``jax.smap(f, in_axes=0, out_axes=0, axis_name="x")(a)``
    is ``st.smap(f, a, axes=0, out_axes=0, axis_name="x")``, or, over an axis of the mesh in use,
    ``st.shard_map(f, in_specs=st.P("x"), out_specs=st.P("x"), axis_names={"x"})(a)``.

    ===============================  ===================================================================================
    `jax.smap`                       here
    ===============================  ===================================================================================
    returns a function               maps at once
    requires a current mesh, and     uses all devices, or ``devices=``, and splits by itself; sizes may be uneven
    sizes divisible by it
    maps one mesh axis               maps an axis of each argument, or a tuple of axes over a grid of devices
    traces ``fn``; axes ≥ 0          calls ``fn``, any Python function; negative axes count from the end
    ===============================  ===================================================================================

    Args:
        fn: the function; it receives the backend's arrays (see `pmap`), and ``kwargs``.
        *args: tensors, host arrays, or (with axis None) anything.
        axes: the axis of each argument that is split, by default the first; or one entry for each argument: the axis
            that is split (``axes=[2, 0]``: axis 2 of the first argument, axis 0 of the second), None for an argument
            that is replicated, or a tuple for a grid of devices, whose entry k is the array axis that grid axis k
            splits (None: none). For a single array, a flat list of several axes describes the grid.
        out_axes: the axes along which the results are joined, in the same forms; by default, the axes along which the
            first split argument was split. Results without dimensions are stacked: into one dimension for each of these
            axes, in their order. Where a tuple contains None, the results along that
            grid axis must be equal.
        devices: the devices; by default, the default mesh's. They form a grid as even as possible, larger factor first.
            A dimension with fewer elements than parts takes fewer devices, so that ``fn`` receives an empty part only
            of an empty array. Without ``devices``, each call owns a share of all of them, for the maps in it (see
            `pmap`).
        axis_name: a name for each grid axis (a string, if there is one axis), for collectives.
        **kwargs: keyword arguments of ``fn``, passed unchanged.

    Returns:
        A tensor, or a pytree of tensors in the form of the results, sharded over the grid along ``out_axes``.

    Raises:
        ArgumentError: the entries do not match the arguments, no argument is split, or tuples have different lengths.
        ArgumentTypeError: ``fn`` is not a function, or ``in_axes`` of `jax.smap` is given; ``axes`` is of the wrong
            type; a result is not an array.
        AxisError: an argument has no such axis.
        ShapeError: arguments that are split over one grid axis differ in size; a result has no such axis, or does not
            fit the others.
        Exception: an error that ``fn`` raises, with a note of the shard and the device.

    >>> st.smap(lambda x, y: x + y, np.arange(3), np.arange(3)).tolist()
    [0, 2, 4]
    >>> x, y = np.ones((2, 3, 8)), np.arange(8.0)
    >>> st.smap(lambda x, y: x * y, x, y, axes=[2, 0]).shape
    (2, 3, 8)
    """
    if fn is None or "in_axes" in kwargs:
        problem = "missing the argument fn" if fn is None else "in_axes is an argument of jax.smap"
        raise ArgumentTypeError(f"smap: {problem}; {_AS_JAX}")
    if not callable(fn):
        raise ArgumentTypeError(f"smap: fn is {type_text(fn)}; wanted a function")
    entries, rank = _entries(args, axes)
    names = _names(axis_name, rank)
    arrays, entries, sizes = _measured(args, entries, rank)
    across = devices is None and any(isinstance(x, ShardedTensor) and not x.is_fully_addressable for x in arrays)
    row = mesh_of(default_mesh().flat) if across else device_row(devices, "smap")
    mesh = _grid_mesh(row, sizes, names or [f"g{k}" for k in range(rank)])
    columns = []
    for array, entry in zip(arrays, entries, strict=True):
        if all(axis is None for axis in entry):
            columns.append(MappedArgument(array, False))
        else:
            sharding = NamedSharding(mesh, _spec(entry, array.ndim, mesh))
            columns.append(MappedArgument(split_over(ensure_sharding(array, sharding, "smap"), mesh.axis_names), True))
    submeshes = [mesh_of((device,)) for device in mesh.flat]
    function = functools.partial(fn, **kwargs)
    owned = shares(row.flat, mesh.size) if devices is None and not across else submeshes
    results = map_shards(columns, function, submeshes, owned, "smap", names, mesh.axis_sizes)
    out = next(entry for entry in entries if set(entry) != {None}) if out_axes is None else _entry(out_axes, rank)
    same_forms(results, "smap")
    # 0-d results get a dimension for each axis along which results are joined, and are stacked.
    order = sorted({a for a in out if a is not None})
    stacked = tuple([None if a is None else order.index(a) for a in out]) if order else out
    specs = [_spec_of(leaf, out if np.ndim(leaf) else stacked, len(order), mesh) for leaf in leaves(results[0])]
    results = [map_leaves(lambda leaf: _with_dimensions(leaf, len(order)), tree) for tree in results]
    return joined(results, lambda _: specs, mesh, mesh.axis_names, "smap")


def _names(axis_name: Any, rank: int) -> tuple[str, ...]:
    """Returns the names of the grid's axes; an empty tuple where none are given."""
    if axis_name is None:
        return ()
    names = tuple(axis_name) if isinstance(axis_name, (list, tuple)) else (axis_name,)
    if len(names) != rank or not all(isinstance(n, str) and n for n in names):
        raise ArgumentError(
            f"smap: axis_name is {axis_name!r:.60}; wanted a name for each of {counted(rank, 'grid axis', 'grid axes')}"
        )
    return names


def _measured(
    args: Sequence[Any], entries: Sequence[Entry], rank: int
) -> tuple[list[Any], list[Entry], list[int | None]]:
    """Returns the arguments, of which those that are split are converted to arrays; their entries, with axes counted
    from the start; and for each grid axis the size of the dimensions that it splits.
    """
    sizes: list[int | None] = [None] * rank
    arrays, new_entries = [], []
    for number, (argument, entry) in enumerate(zip(args, entries, strict=True)):
        if all(axis is None for axis in entry):
            arrays.append(argument)
            new_entries.append(entry)
            continue
        if isinstance(argument[0] if type(argument) in (list, tuple) and argument else argument, Key):
            raise key_is_not_split(f"smap: argument {number}", "None for it in axes")
        array = host_array(argument, "smap")
        arrays.append(array)
        if not array.ndim:
            raise ShapeError(
                f"smap: argument {number} has no dimension to split; give None for it in axes, a list with an entry "
                "for each argument"
            )
        at = tuple([a if a is None else checked_axis(a, array.ndim, f"smap: argument {number}") for a in entry])
        for k, axis in enumerate(at):
            if axis is not None and sizes[k] not in (None, array.shape[axis]):
                raise ShapeError(
                    f"smap: argument {number} has {counted(array.shape[axis], 'element')} along axis {entry[k]}, and "
                    f"grid axis {k} splits {sizes[k]} of an argument before it; wanted equal sizes"
                )
            sizes[k] = sizes[k] if axis is None else array.shape[axis]
        new_entries.append(at)
    return arrays, new_entries, sizes


def _spec(entry: Entry, ndim: int, mesh: Mesh) -> PartitionSpec:
    """Returns the partition spec in which the grid axes split the dimensions that the entry names."""
    return P(*[tuple([n for n, a in zip(mesh.axis_names, entry, strict=True) if a == d]) for d in range(ndim)])


def _entries(args: Sequence[Any], axes: Any) -> tuple[list[Entry], int]:
    """Returns one entry for each argument, and the rank of the grid."""
    if not args:
        raise ArgumentError(f"smap: there is no argument to split; give at least one array: {_AS_JAX}")
    if axes is None or isinstance(axes, int):
        axes = [axes] * len(args)
    if not isinstance(axes, (list, tuple)):
        raise ArgumentTypeError(f"smap: axes is {type_text(axes)}; wanted a list with one entry for each argument")
    flat = all(a is None or isinstance(a, int) for a in axes)
    rows = [tuple(axes)] if len(args) == 1 and len(axes) > 1 and flat else list(axes)
    if len(rows) != len(args):
        raise ArgumentError(
            f"smap: axes has {counted(len(rows), 'entry', 'entries')} for {counted(len(args), 'argument')}; give one "
            "for each, None for a whole one"
        )
    rank = max((len(a) for a in rows if isinstance(a, tuple)), default=1)
    entries = [_entry(a, rank) for a in rows]
    if all(axis is None for entry in entries for axis in entry):
        raise ArgumentError("smap: no argument is split; give an axis for at least one")
    return entries, rank


def _entry(axes: Any, rank: int) -> Entry:
    if axes is None:
        return (None,) * rank
    entry = (axes,) if isinstance(axes, int) and rank == 1 else axes
    if not isinstance(entry, tuple) or not all(a is None or isinstance(a, int) for a in entry):
        raise ArgumentError(
            f"smap: {axes!r} is not an entry of axes for a grid of {counted(rank, 'axis', 'axes')}; wanted an axis, "
            f"None, or a tuple of {rank}"
        )
    if len(entry) != rank:
        raise ArgumentError(
            f"smap: {axes!r} has {counted(len(entry), 'entry', 'entries')} and another argument {rank}; each names "
            "every grid axis"
        )
    return entry


def _grid_mesh(row: Mesh, sizes: Sequence[int | None], names: Sequence[str]) -> Mesh:
    """Returns the devices as a grid for dimensions of these sizes."""
    counts = [min(n, max(size or 1, 1)) for n, size in zip(even_factors(row.size, len(sizes)), sizes, strict=True)]
    grid = np.empty(math.prod(counts), object)
    grid[:] = row.flat[: len(grid)]
    return Mesh(grid.reshape(counts), names)


def even_factors(number: int, count: int) -> tuple[int, ...]:
    """Returns ``number`` as a product of ``count`` factors as even as possible, the larger ones first.

    >>> from shardtensor.spmd.maps.smap import even_factors
    >>> even_factors(8, 2), even_factors(12, 2), even_factors(7, 2), even_factors(8, 3)
    ((4, 2), (4, 3), (7, 1), (2, 2, 2))
    """
    if count == 1:
        return (number,)
    divisors = [factor for factor in range(1, number + 1) if number % factor == 0]
    choices = [tuple(sorted((f, *even_factors(number // f, count - 1)), reverse=True)) for f in divisors]
    return min(choices, key=lambda c: (c[0], [-f for f in reversed(c)]))


def _spec_of(leaf: Any, entry: Entry, count: int, mesh: Mesh) -> PartitionSpec:
    """Returns the partition spec that names the dimensions along which the parts of a result are concatenated; if the
    result is 0-d, it gets ``count`` dimensions.
    """
    ndim = np.ndim(leaf) or count
    for axis in entry:
        if axis is not None and not -ndim <= axis < ndim:
            raise ShapeError(
                f"smap: fn's result has shape {np.shape(leaf)} and no axis {axis} along which to join the results; "
                "give out_axes, one of its axes for each grid axis (or None, where the results are equal)"
            )
    return _spec(tuple([None if a is None else a % ndim for a in entry]), ndim, mesh)


def _with_dimensions(x: Any, count: int) -> Any:
    check_array(x, "smap: the result")
    return x if x is None or np.ndim(x) else reshape(x, (1,) * count)
