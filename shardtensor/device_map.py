"""`pmap`: a function on every device at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.collectives import places_along
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, ShardingError
from shardtensor.functions.lists import device_row, split_over
from shardtensor.functions.placement import laid_out
from shardtensor.mesh import Mesh, default_mesh, mesh_of
from shardtensor.operands import admit
from shardtensor.outcomes import check_array, joined, same_forms
from shardtensor.plugins import backend_of
from shardtensor.rules import normalize_axis
from shardtensor.sharding import Chain, NamedSharding, P, offsets
from shardtensor.spmd import Column, Whole, run_mapped
from shardtensor.tensor import ShardedTensor, shard_arrays, tensor
from shardtensor.trees import items_of, leaves, paths, replaced, spread
from shardtensor.value import Storage, aval

Devices = Sequence[Any] | Mesh | None


def pmap(
    fn: Callable[..., Any],
    *args: Any,
    axis_name: str | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_argnums: int | Sequence[int] = (),
    devices: Devices = None,
    donate: bool = False,
) -> Any:
    """Runs ``fn`` on every device at once. Results stay on their devices, so that maps chain without gathering.

    ``pmap(fn)`` alone gives the mapped function. What the call is, its arguments say:

    ==================  =================================  =================================================
    ..                  a Python list among the arguments  arrays alone, or pytrees of them
    ==================  =================================  =================================================
    it is               Nx's pmap: a list of shards        JAX's pmap: an array with an axis of devices
    a list              call i gets item i                 (there is none)
    anything else       goes whole to every call           is cut along its axis of ``in_axes``; None: goes whole
    ``fn`` sees         each shard, its rank kept          each slice, without that axis
    how many calls      as many as the lists have items    the size of that axis, one for each device
    what comes back     a list of results                  one tensor, stacked along ``out_axes``
    ==================  =================================  =================================================

    Lists: a tensor in an item runs where it lives; where lists differ, the first one's device counts, and the others
    come to it. Items without a tensor are dealt out in blocks by the split rule (10 over 4 devices: 3, 3, 2, 2), so
    that `stack` of the results moves nothing. Items and results may be pytrees; shapes and dtypes may differ from shard
    to shard.

    Arrays: those that lie so already move nothing; others are brought. ``out_axes=None`` promises that results are
    equal, which is checked, and gives them once.

    Nested: an item that is itself a list, or a tensor over several devices, reaches ``fn`` as it is, and so do slices
    where ``devices`` is a grid: there each call owns a row of devices, which is the default mesh for the maps in it.
    Raw arrays come at the innermost level.

    Inside, ``fn`` has the backend's own arrays, not to be written to, on the current device; `st` functions on them
    run there, too, and collectives (`st.psum`, …) along ``axis_name``. It may be any Python function. In what order and
    how many calls at once is not promised. Arrays that it returns become tensors on the device; other leaves stay what
    they are.

    Args:
        fn: the function.
        *args: see above. (The mapped function takes keywords, too; they are cut along axis 0.)
        axis_name: a name for the calls' axis, by which collectives know it.
        in_axes: for arrays, the axis that is cut: an int for all, or one for each argument, ints and None in the form
            of the arguments' pytrees, or of their beginnings; negative counts from the end.
        out_axes: the same for results; None for one that is equal on all devices.
        static_argnums: the numbers of arguments that ``fn`` gets as they are, whatever they are.
        devices: where to run, in order: a list deals all items out over these, wherever their tensors live; arrays take
            as many as they need without it, and all of them with it. A grid, such as a mesh of several axes, is mapped
            along its first axis.
        donate: gives the memory of the tensors in lists to ``fn``, for writing; they cannot be used after.

    Raises:
        ShapeError: lists of different lengths, axes of different sizes, or of another size than ``devices``.
        ShardingError: more slices than devices; ``axis_name`` is bound by a map around this one.
        ArgumentError: axes that do not have the form of what they speak of; nothing is mapped.
        AxisError: an array or a result has no such axis.
        CollectiveError: devices that wait for one another in vain.
        Exception: what ``fn`` raises, with a note of the shard and the device; of several, the first shard's. Shards
            that were not started then are not run.

    >>> parts = st.shard(np.arange(6.0), devices=st.devices()[:3])
    >>> squares = st.pmap(lambda x: x * x, parts)
    >>> st.pmap(lambda x, y: (x + y).sum(), squares, parts)[2].item()
    50.0
    >>> st.pmap(lambda x: x / st.psum(x, "i"), np.array([1.0, 3.0]), axis_name="i").tolist()
    [0.25, 0.75]
    """
    if not callable(fn):
        raise ArgumentTypeError(f"pmap: fn is a {type(fn).__name__}; wanted a function")
    if axis_name is not None and (not isinstance(axis_name, str) or not axis_name):
        raise ArgumentTypeError(f"pmap: axis_name is {axis_name!r:.60}; wanted a name, such as 'i'")
    mapped = _Pmap(fn, axis_name, in_axes, out_axes, static_argnums, devices, donate)
    return mapped(*args) if args else functools.update_wrapper(mapped, fn, updated=())


class _Pmap:
    """A mapped function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        axis_name: str | None,
        in_axes: Any,
        out_axes: Any,
        static_argnums: int | Sequence[int],
        devices: Devices,
        donate: bool,
    ) -> None:
        self._fn = fn
        self._names = () if axis_name is None else (axis_name,)
        self._in_axes = in_axes
        self._out_axes = out_axes
        self._static = static_argnums
        self._devices = devices
        self._donate = donate

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method, it is bound like a function."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Maps it over arguments; see `pmap`."""
        if not args and not kwargs:
            raise ArgumentError(
                "pmap: the mapped function was called without arguments; wanted lists or arrays to map over"
            )
        static = _static(self._static, len(args))
        given = [*args, *kwargs.values()]
        keys = tuple(kwargs)
        fn = self._fn if not keys else _with_keywords(self._fn, len(args), keys)
        if any(type(a) is list for i, a in enumerate(given) if i not in static):
            return self._over_lists(fn, given, static)
        return self._over_arrays(fn, given, static, len(args))

    # -- lists -------------------------------------------------------------------------------------

    def _over_lists(self, fn: Callable[..., Any], given: list[Any], static: frozenset[int]) -> list[Any]:
        self._check_axes_of_lists(given, static)
        lists = [a for i, a in enumerate(given) if type(a) is list and i not in static]
        count = len(lists[0])
        for other in lists:
            if len(other) != count:
                raise ShapeError(f"pmap: lists of {count} and of {len(other)} shards; wanted as many of each")
        columns = []
        for i, argument in enumerate(given):
            if i in static:
                columns.append(Column(Whole(argument), False))
            else:
                mapped = type(argument) is list
                columns.append(Column(argument, mapped, self._donate and mapped))
        places = _places(lists, count, self._devices)
        return run_mapped(fn, columns, places, "pmap", names=self._names, sizes=(count,))

    def _check_axes_of_lists(self, given: list[Any], static: frozenset[int]) -> None:
        """That ``in_axes`` says of lists what they are: mapped, and all else whole."""
        if self._out_axes != 0:
            raise ArgumentError(
                f"pmap: out_axes is {self._out_axes!r}, and of a list of shards comes a list of results; join it with "
                "st.stack or st.unshard"
            )
        if self._in_axes == 0:
            return
        said = list(self._in_axes) if isinstance(self._in_axes, (tuple, list)) else [self._in_axes] * len(given)
        for i, argument in enumerate(given):
            wanted = 0 if type(argument) is list else None
            if i not in static and (i >= len(said) or said[i] != wanted):
                raise ArgumentError(
                    f"pmap: in_axes is {self._in_axes!r}; where lists of shards are given, it says 0 for each list and "
                    "None for everything else"
                )

    # -- arrays ------------------------------------------------------------------------------------

    def _over_arrays(self, fn: Callable[..., Any], given: list[Any], static: frozenset[int], positional: int) -> Any:
        axes = self._axes_of(given, static, positional)
        trees: list[Any] = []
        sizes: dict[str, int] = {}
        for i, (argument, entry) in enumerate(zip(given, axes, strict=True)):
            if i in static or entry is None:
                trees.append(None)
                continue
            found = []
            for leaf, axis, path in zip(leaves(argument), entry, paths(argument, f"argument {i}"), strict=True):
                array = None
                if axis is not None:
                    array = _array(leaf, path)
                    axis = _normal(axis, array.ndim, path)
                    sizes[f"{path} of shape {array.shape} along axis {axis}"] = array.shape[axis]
                found.append((array, axis))
            trees.append(found)
        if not sizes:
            raise ArgumentError(
                "pmap: in_axes maps no argument; give the axis of at least one array (or a list of shards)"
            )
        (first, count), *others = sizes.items()
        if not count:
            raise ShapeError(f"pmap: {first} has no elements; wanted at least one slice")
        for what, size in others:
            if size != count:
                raise ShapeError(f"pmap: {first} has {count} elements, and {what} has {size}; wanted as many of each")
        grid = self._grid(count, [a for found in trees if found for a, _ in found if a is not None])
        columns = []
        for i, (argument, found) in enumerate(zip(given, trees, strict=True)):
            if i in static:
                columns.append(Column(Whole(argument), False))
            elif found is None or all(array is None for array, _ in found):
                columns.append(Column(argument, False))
            else:
                columns.append(Column(_slices(argument, found, grid, count), True))
        places = _rows(grid)
        results = run_mapped(fn, columns, places, "pmap", names=self._names, sizes=(count,))
        return _stacked(results, self._out_axes, grid)

    def _axes_of(self, given: list[Any], static: frozenset[int], positional: int) -> list[Any]:
        """For each argument the axis of each leaf; None for one that is whole."""
        said = self._in_axes
        if isinstance(said, list):
            said = tuple(said)
        if not isinstance(said, tuple):
            said = (said,) * positional
        if len(said) != positional:
            raise ArgumentError(
                f"pmap: in_axes has {len(said)} entries for {positional} arguments; wanted one for each, or one for all"
            )
        said = (*said, *[0] * (len(given) - positional))
        axes: list[Any] = []
        for i, (argument, entry) in enumerate(zip(given, said, strict=True)):
            if i in static:
                axes.append(None)
                continue
            spreaded = spread(entry, argument, f"pmap: in_axes[{i}]", f"argument {i}")
            for axis in spreaded:
                _check_axis(axis, f"in_axes[{i}]")
            axes.append(spreaded)
        return axes

    def _grid(self, count: int, arrays: Sequence[Any]) -> Mesh:
        """The devices: one for each slice, or one row of a grid."""
        if self._devices is None:
            for array in arrays:  # computation follows data
                if isinstance(array, ShardedTensor) and array.committed and array.sharding.mesh.size == count:
                    return _named(mesh_of(array.sharding.mesh.flat), self._names)
            row = default_mesh().flat
            if count > len(row):
                raise ShardingError(
                    f"pmap: {count} slices for {len(row)} devices; one device takes one slice: split a larger axis "
                    "with st.smap, or into a list with st.shard"
                )
            return _named(mesh_of(row[:count]), self._names)
        grid = _grid_of(self._devices)
        if grid.axis_sizes[0] != count:
            raise ShapeError(f"pmap: {count} slices for {grid.axis_sizes[0]} devices; wanted one for each")
        return _named(grid, self._names)


def _stacked(results: Sequence[Any], out_axes: Any, grid: Mesh) -> Any:
    """The results of calls along the grid's first axis as one tensor each."""
    same_forms(results, "pmap")
    along = grid.axis_names[0]
    axes = spread(out_axes, results[0], "pmap: out_axes", "the result")
    specs = []
    columns: list[Sequence[Any]] = []
    for column, axis, path in zip(
        zip(*map(leaves, results), strict=True), axes, paths(results[0], "the result"), strict=True
    ):
        _check_axis(axis, "out_axes")
        for leaf in column:
            check_array(leaf, f"pmap: {path}")
        if axis is None:
            specs.append(P())
            columns.append(column)
            continue
        at = _normal(axis, np.ndim(column[0]) + 1, path)
        specs.append(P(*[None] * at, along))
        columns.append([_with_axis(leaf, at) for leaf in column])
    trees = [replaced(results[0], parts) for parts in zip(*columns, strict=True)] if columns else list(results)
    return joined(trees, lambda _: specs, grid, (along,), "pmap")


def _with_axis(leaf: Any, at: int) -> Any:
    """A call's result with one more dimension, along which the results are stacked."""
    index = (slice(None),) * at + (None,)
    if not isinstance(leaf, ShardedTensor):
        return None if leaf is None else np.asarray(leaf)[index]
    sharding = leaf.sharding
    if sharding.spec.chains:
        chains = list(sharding.spec.chains_of(leaf.ndim))
        chains.insert(at, ())
        sharding = NamedSharding(sharding.mesh, P(*chains))
    arrays = []
    for array, device in zip(shard_arrays(leaf), sharding.mesh.flat, strict=True):
        backend = backend_of(device)
        with backend.on(device):
            arrays.append(backend.view(array, index))
    value = aval((*leaf.shape[:at], 1, *leaf.shape[at:]), leaf.dtype, sharding, True)
    alone = len(arrays) == 1 and value.backend.one_memory
    return tensor(value, Storage(arrays[0]) if alone else Storage(arrays=tuple(arrays)))


# -- arguments -------------------------------------------------------------------------------------


def _with_keywords(fn: Callable[..., Any], positional: int, keys: tuple[str, ...]) -> Callable[..., Any]:
    return lambda *parts: fn(*parts[:positional], **dict(zip(keys, parts[positional:], strict=True)))


def _static(given: int | Sequence[int], count: int) -> frozenset[int]:
    try:
        numbers = [given] if isinstance(given, int) else [n.__index__() for n in given]
    except (TypeError, AttributeError):
        raise ArgumentTypeError(
            f"pmap: static_argnums is {given!r:.60}; wanted an integer, or a sequence of them"
        ) from None
    for n in numbers:
        if not -count <= n < count:
            raise ArgumentError(f"pmap: static_argnums names argument {n}, and there are {count}")
    return frozenset(n % count for n in numbers)


def _check_axis(axis: Any, what: str) -> None:
    if axis is not None and (isinstance(axis, bool) or not hasattr(axis, "__index__")):
        raise ArgumentTypeError(f"pmap: {what} is {axis!r:.60}; wanted an integer or None")


def _array(leaf: Any, path: str) -> Any:
    if leaf is None or isinstance(leaf, (str, bytes)):
        raise ArgumentTypeError(f"pmap: {path} is a {type(leaf).__name__}; wanted an array, or None for it in in_axes")
    return admit(np.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf, "pmap")


def _normal(axis: int, ndim: int, path: str) -> int:
    try:
        return normalize_axis(axis, ndim)
    except ValueError as error:
        raise type(error)(f"pmap: {path}: {error}") from None


def _slices(argument: Any, found: Sequence[tuple[Any, int | None]], grid: Mesh, count: int) -> list[Any]:
    """What each call gets of an argument."""
    rows = []
    for leaf, (array, axis) in zip(leaves(argument), found, strict=True):
        if axis is None:
            rows.append([leaf] * count)
            continue
        first, *rest = grid.axis_names
        chains: list[Chain] = [()] * array.ndim
        chains[axis] = (first,)
        others = [d for d in range(array.ndim) if d != axis]
        if rest and others:
            chains[others[0]] = tuple(rest)
        whole = laid_out(array, NamedSharding(grid, P(*chains)), "pmap")
        rows.append(split_over(whole, (first,), drop=axis))
    return [replaced(argument, parts) for parts in zip(*rows, strict=True)]


# -- places ----------------------------------------------------------------------------------------


def _grid_of(devices: Any) -> Mesh:
    """Devices as a mesh whose first axis is mapped."""
    if isinstance(devices, Mesh):
        return devices
    grid = np.asarray(devices, dtype=object) if isinstance(devices, (list, tuple, np.ndarray)) else None
    if grid is None or grid.ndim < 2:
        return device_row(devices, "pmap")
    return Mesh(grid, [f"d{k}" for k in range(grid.ndim)])


@functools.lru_cache(256)
def _named(grid: Mesh, names: tuple[str, ...]) -> Mesh:
    """The grid with the map's axis name for its first axis, so that results show it."""
    if not names or names[0] in grid.axis_names:
        return grid
    return Mesh(grid.devices, (*names, *grid.axis_names[1:]))


def _rows(grid: Mesh) -> list[Mesh]:
    """The devices of each call."""
    return [place for _, place in places_along(grid, grid.axis_names[1:])]


def _places(lists: Sequence[list[Any]], count: int, devices: Any) -> list[Mesh]:
    """Where each item runs."""
    homes: list[Mesh | None] = [None] * count
    if devices is None:
        for i, items in enumerate(zip(*lists, strict=True)):
            homes[i] = next(filter(None, map(_home, items)), None)
    if None not in homes:
        return homes  # type: ignore[return-value]
    rows = _rows(_grid_of(devices) if devices is not None else device_row(None, "pmap"))
    ends = offsets(count, (len(rows),))[1:].tolist()
    dealt = [rows[k] for k, (a, b) in enumerate(itertools.pairwise([0, *ends])) for _ in range(b - a)]
    return [here or there for here, there in zip(homes, dealt, strict=True)]


def _home(item: Any) -> Mesh | None:
    """Where an item of a list lives; None, if there is no tensor in it. A list in it lives where all of its items do,
    any other pytree where its first tensor does.
    """
    if type(item) is ShardedTensor:
        return item._aval.sharding.mesh
    inside = items_of(item)
    if inside is None:
        return None
    homes = filter(None, (_home(inner) for _, inner in inside))
    if type(item) is not list:
        return next(homes, None)
    devices = tuple(dict.fromkeys(device for home in homes for device in home.flat))
    return mesh_of(devices) if devices else None
