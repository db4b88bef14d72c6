"""`smap`: arrays are split, a function of the user's is mapped over the parts, and the results are one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend import Device
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.joining import assemble
from shardtensor.functions.lists import device_row, split
from shardtensor.functions.placement import put
from shardtensor.mesh import Mesh
from shardtensor.operands import admit
from shardtensor.rules import normalize_axes
from shardtensor.sharding import NamedSharding, P, as_sharding
from shardtensor.spmd import run_mapped
from shardtensor.tensor import ShardedTensor
from shardtensor.trees import leaves, map_leaves

Entry = tuple["int | None", ...]
"""For each grid axis the array axis that it splits, or None."""


def smap(
    fn: Callable[..., Any],
    *args: Any,
    axes: Any,
    out_axes: Any = None,
    devices: Sequence[Device] | Mesh | None = None,
    **kwargs: Any,
) -> Any:
    """Splits the arguments, runs ``fn`` on every part, and puts the results together: one sharded tensor.

    ===============================  ===================================================================================
    `jax.smap`                       here
    ===============================  ===================================================================================
    needs a mesh that is set, and    takes all devices, or ``devices=``, and splits by itself, uneven sizes too
    sizes that it divides
    one mesh axis at a time          an axis for each argument, or a tuple of them for a grid of devices
    traces ``fn``; axes ≥ 0          calls ``fn``, any Python function; negative axes count from the end
    ===============================  ===================================================================================

    Args:
        fn: the function; it gets the backend's arrays (see `pmap`), and ``kwargs``.
        *args: tensors, host arrays, or (with axis None) anything.
        axes: one entry for each argument: the axis that is split (``axes=[2, 0]``: the first one's axis 2, the second
            one's axis 0), None for an argument that goes whole to every device, or a tuple for a grid of devices,
            whose entry k is the array axis that grid axis k splits (None: not split by it). For a single array a flat
            list of several axes means the grid.
        out_axes: where the results are put together, in the same forms; without it, where the first split argument
            was split. Results of no dimensions are stacked. Where a tuple says None, the results along that grid axis
            must be equal.
        devices: which ones; without it, the default mesh's. They form the grid as evenly as can be, larger factor
            first. A dimension with fewer elements than parts takes fewer devices, so that ``fn`` sees no empty part
            of what is not empty.

    Raises:
        ArgumentError: not one entry for each argument, no argument split, or tuples of different lengths.
        AxisError: an argument has no such axis.
        ShapeError: arguments that are split over one grid axis differ in size; a result has no such axis, or does not
            fit the others.
        Exception: what ``fn`` raises, with a note of the shard and the device.

    >>> x, y = np.ones((2, 3, 8)), np.arange(8.0)
    >>> st.smap(lambda x, y: x * y, x, y, axes=[2, 0]).shape
    (2, 3, 8)
    """
    entries, rank = _entries(args, axes)
    sizes: list[int | None] = [None] * rank
    arrays: list[Any] = []
    for number, (argument, entry) in enumerate(zip(args, entries, strict=True)):
        if all(axis is None for axis in entry):
            arrays.append(argument)
            continue
        array = admit(
            np.asarray(argument) if isinstance(argument, (list, tuple, int, float, complex)) else argument, "smap"
        )
        arrays.append(array)
        for k, axis in enumerate(entry):
            if axis is None:
                continue
            (at,) = _axis(axis, array.ndim, f"argument {number}")
            entry = (*entry[:k], at, *entry[k + 1 :])
            if sizes[k] not in (None, array.shape[at]):
                raise ShapeError(
                    f"smap: argument {number} has {array.shape[at]} elements along axis {axis}, and grid axis {k} "
                    f"splits {sizes[k]} of an argument before it; wanted equal sizes"
                )
            sizes[k] = array.shape[at]
        entries[number] = entry
    mesh = _grid_mesh(device_row(devices, "smap"), sizes)
    columns: list[tuple[Any, bool]] = []
    for array, entry in zip(arrays, entries, strict=True):
        if all(axis is None for axis in entry):
            columns.append((array, False))
        else:
            spec = [
                tuple(n for n, axis in zip(mesh.axis_names, entry, strict=True) if axis == d) for d in range(array.ndim)
            ]
            columns.append((split(put(array, NamedSharding(mesh, P(*spec)), "smap")), True))
    results = run_mapped(lambda *parts: fn(*parts, **kwargs), columns, mesh.flat, False, "smap")
    first = next(e for e in entries if any(axis is not None for axis in e))
    out = first if out_axes is None else _entry(out_axes, rank)
    return _together(results, out, out_axes is None, mesh)


def _entries(args: Sequence[Any], axes: Any) -> tuple[list[Entry], int]:
    """One entry for each argument, and the rank of the grid."""
    if not args:
        raise ArgumentError("smap: there is no argument to split; give at least one array")
    if axes is None or isinstance(axes, int):
        axes = [axes]
    if not isinstance(axes, (list, tuple)):
        raise ArgumentTypeError(
            f"smap: axes is a {type(axes).__name__}; wanted a list with one entry for each argument"
        )
    flat = all(a is None or isinstance(a, int) for a in axes)
    given = [tuple(axes)] if len(args) == 1 and len(axes) > 1 and flat else list(axes)
    if len(given) != len(args):
        raise ArgumentError(
            f"smap: axes has {len(given)} entries for {len(args)} arguments; give one for each, None for a whole one"
        )
    rank = max((len(a) for a in given if isinstance(a, tuple)), default=1)
    entries = [_entry(a, rank) for a in given]
    if all(axis is None for entry in entries for axis in entry):
        raise ArgumentError("smap: no argument is split; give an axis for at least one")
    return entries, rank


def _entry(given: Any, rank: int) -> Entry:
    if given is None:
        return (None,) * rank
    entry = (given,) if isinstance(given, int) and rank == 1 else given
    if not isinstance(entry, tuple) or not all(a is None or isinstance(a, int) for a in entry):
        raise ArgumentError(
            f"smap: {given!r} is no entry of axes for a grid of {rank} axes; wanted an axis, None, or a tuple of {rank}"
        )
    if len(entry) != rank:
        raise ArgumentError(
            f"smap: {given!r} has {len(entry)} entries and another argument {rank}; each names every grid axis"
        )
    return entry


def _axis(axis: int, ndim: int, what: str) -> tuple[int, ...]:
    try:
        return normalize_axes(axis, ndim)
    except ValueError as error:
        raise type(error)(f"smap: {what}: {error}") from None


def _grid_mesh(row: Mesh, sizes: Sequence[int | None]) -> Mesh:
    """The devices as a grid for dimensions of these sizes."""
    counts = [min(n, max(size or 1, 1)) for n, size in zip(even_factors(row.size, len(sizes)), sizes, strict=True)]
    grid = np.empty(math.prod(counts), object)
    grid[:] = row.flat[: len(grid)]
    return Mesh(grid.reshape(counts), [f"g{k}" for k in range(len(counts))])


def even_factors(number: int, count: int) -> tuple[int, ...]:
    """``number`` as a product of ``count`` factors, as near to one another as can be, the larger ones first.

    >>> from shardtensor.split_map import even_factors
    >>> even_factors(8, 2), even_factors(12, 2), even_factors(7, 2), even_factors(8, 3)
    ((4, 2), (4, 3), (7, 1), (2, 2, 2))
    """
    if count == 1:
        return (number,)
    choices = []
    for factor in range(1, number + 1):
        if number % factor == 0:
            choices.append(tuple(sorted((factor, *even_factors(number // factor, count - 1)), reverse=True)))
    return min(choices, key=lambda c: (c[0], [-f for f in reversed(c)]))


def _together(results: Sequence[Any], out: Entry, default: bool, mesh: Mesh) -> Any:
    """The calls' results as one: leaf by leaf, if they are pytrees."""
    columns = [leaves(tree) for tree in results]
    if len({len(c) for c in columns}) > 1:
        raise ShapeError("smap: the calls' results are pytrees of different forms; return the same one from each")
    joined = iter([_join(parts, out, default, mesh) for parts in zip(*columns, strict=True)])
    return map_leaves(lambda leaf: next(joined), results[0])


def _join(parts: Sequence[Any], out: Entry, default: bool, mesh: Mesh) -> ShardedTensor:
    blocks = [
        p if isinstance(p, ShardedTensor) else put(admit(p, "smap"), as_sharding(d, np.ndim(p), "smap"), "smap")
        for p, d in zip(parts, mesh.flat, strict=True)
    ]
    ndim = blocks[0].ndim
    if ndim == 0 and default:
        axes: Entry = tuple(None if a is None else k for k, a in enumerate(out))
        order = sorted(a for a in axes if a is not None)
        axes = tuple(None if a is None else order.index(a) for a in axes)
        blocks = [b.reshape((1,) * len(order)) for b in blocks]
    else:
        axes = tuple(None if a is None else _out_axis(a, blocks[0]) for a in out)
    _check_equal(blocks, axes, mesh)
    return assemble(blocks, mesh, axes)


def _out_axis(axis: int, block: ShardedTensor) -> int:
    if not -block.ndim <= axis < block.ndim:
        raise ShapeError(
            f"smap: fn's result has shape {block.shape} and no axis {axis} along which to put the results together; "
            "give out_axes, one of its axes for each grid axis (or None, where the results are equal)"
        )
    return axis % block.ndim


def _check_equal(blocks: Sequence[ShardedTensor], axes: Entry, mesh: Mesh) -> None:
    """That results which differ in grid axes with None alone are equal."""
    same = [k for k, axis in enumerate(axes) if axis is None]
    if not same or math.prod(mesh.axis_sizes[k] for k in same) == 1:
        return
    seen: dict[Any, ShardedTensor] = {}
    for block, at in zip(blocks, mesh.coordinates.tolist(), strict=True):
        first = seen.setdefault(tuple(c for k, c in enumerate(at) if k not in same), block)
        if first is not block and np.asarray(first).tobytes() != np.asarray(block).tobytes():
            raise ShapeError(
                f"smap: out_axes says that the results along grid axis {same[0]} are equal, and they differ; "
                "give the axis along which to put them together"
            )
