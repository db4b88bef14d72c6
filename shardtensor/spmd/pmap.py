"""`pmap`: a function on every device at once."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, ShardingError, ShardTensorError
from shardtensor.functions.placement import ensure_sharding
from shardtensor.functions.shard_lists import device_row, split_over
from shardtensor.sharding.layout import NamedSharding, offsets
from shardtensor.sharding.mesh import Mesh, default_mesh, mesh_of, places_along, shares
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.spec import P
from shardtensor.spmd import nesting
from shardtensor.spmd.launch import MappedArgument, Unmapped, run_mapped
from shardtensor.spmd.nesting import Call, Cut, Levels, grid_of, named
from shardtensor.spmd.outputs import check_array, joined_leaf, same_forms
from shardtensor.spmd.program import current, listed
from shardtensor.tensor.operands import as_operand
from shardtensor.tensor.pytree import items_of, leaves, paths, replaced, spread
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, shard_arrays, tensor
from shardtensor.tensor.value import aval

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

    Nested: maps inside of a call use the devices that the call owns. A map of a map, ``pmap(pmap(fn))``, takes one
    device for each call of the innermost one, and gives each call of the outer one a row of these. Where ``devices`` is
    a grid, or an item is itself a tensor over several devices (or a list of tensors), each call owns those. In all of
    these cases slices and items reach the inner map as they are; raw arrays come at the innermost level. Any other call
    runs on one device. Without ``devices`` and without tensors in the lists, the devices that are left are shared out:
    of n calls, call i owns the devices i, i + n, i + 2 n, …, which are the default mesh for the maps in it.

    Inside, ``fn`` has the backend's own arrays, not to be written to, on the current device; `st` functions on them
    run there, too, and collectives (`st.psum`, …) along ``axis_name``. It may be any Python function. In what order and
    how many calls at once is not promised. Arrays that it returns become tensors on the device; other leaves stay what
    they are.

    Several calls share a thread, which switches between them in collectives and inner maps. Context variables and
    `numpy.errstate` belong to a call, thread-local data and the owner of a `threading.RLock` to the thread. A call must
    not hold a lock while it calls a collective or a map: another call of the same thread that acquires it blocks both,
    without an error. See docs/programs.md, also for asyncio, signals and forks.

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
            along its first axis. Each call then owns its device, or its row, and no other.
        donate: gives the memory of the tensors in lists to ``fn``, for writing; they cannot be used after.

    Raises:
        ShapeError: lists of different lengths, axes of different sizes, or of another size than ``devices``.
        ShardingError: more slices than devices (in a map: than the call around it owns); ``axis_name`` is bound by a
            map around this one.
        ArgumentError: axes that do not have the form of what they speak of; nothing is mapped.
        AxisError: an array or a result has no such axis.
        CollectiveError: devices that wait for one another in vain.
        RecursionError: maps that call one another without end: the frames of all of them count.
        Exception: what ``fn`` raises, with a note of the shard and the device; of several, the first shard's. Shards
            that were not started then are not run.

    >>> parts = st.shard(np.arange(6.0), devices=st.devices()[:3])
    >>> squares = st.pmap(lambda x: x * x, parts)
    >>> st.pmap(lambda x, y: (x + y).sum(), squares, parts)[2].item()
    50.0
    >>> st.pmap(lambda x: x / st.psum(x, "i"), np.array([1.0, 3.0]), axis_name="i").tolist()
    [0.25, 0.75]
    >>> st.pmap(st.pmap(lambda x: x * 2), np.ones((2, 3))).sharding.mesh.axis_sizes
    (2, 3)
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
        self._name = axis_name
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
        call = Call([*args, *kwargs.values()], len(args), self._static)
        fn = self._fn if not kwargs else _with_keywords(self._fn, len(args), tuple(kwargs))
        return self._over_lists(fn, call) if call.lists else self._over_arrays(fn, call)

    # -- lists -------------------------------------------------------------------------------------

    def _over_lists(self, fn: Callable[..., Any], call: Call) -> list[Any]:
        self._check_axes_of_lists(call.given, call.static)
        count = _length(call.lists)
        columns = []
        for i, argument in enumerate(call.given):
            if i in call.static:
                columns.append(MappedArgument(Unmapped(argument), False))
            else:
                mapped = type(argument) is list
                columns.append(MappedArgument(argument, mapped, self._donate and mapped))
        places, owned = self._places(call, count)
        return run_mapped(fn, columns, places, "pmap", names=self._names, sizes=(count,), owned=owned)

    def _places(self, call: Call, count: int) -> tuple[Sequence[Mesh], Sequence[Mesh]]:
        """Where each item runs, and the devices that each call owns."""
        homes = [None if self._devices is not None else _home_of(items) for items in zip(*call.lists, strict=True)]
        rows = [] if homes and all(homes) else _rows(_grid_of(self._devices))
        if self._devices is None and not any(homes):
            row = tuple([place.flat[0] for place in rows])
            if self._inner is not None:
                groups = nesting.groups(row, self._demands(call))
                return groups, groups
            if count <= len(row):
                return rows[:count], shares(row, count)
        ends = offsets(count, (max(len(rows), 1),))[1:].tolist()
        dealt = [k for k, (a, b) in enumerate(itertools.pairwise([0, *ends])) for _ in range(b - a)]
        places = [home or rows[k] for home, k in zip(homes, dealt, strict=True)]
        return places, places

    def _demands(self, call: Call) -> list[int]:
        """How many devices each call of a map over lists asks for: one for each call of the innermost map."""
        count, inner = _length(call.lists), self._inner
        if inner is None:
            return [1] * count
        with _noted():
            return [inner._demand(call.item(i, inner._static)) for i in range(count)]

    def _demand(self, call: Call) -> int:
        """How many devices a call of this map asks for."""
        return sum(self._demands(call)) if call.lists else math.prod(self._levels(call).sizes)

    @property
    def _inner(self) -> _Pmap | None:
        """The mapped function that this one maps directly, if that takes the devices of the call around it."""
        return self._fn if type(self._fn) is _Pmap and self._fn._devices is None else None

    def _check_axes_of_lists(self, given: Sequence[Any], static: frozenset[int]) -> None:
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

    def _over_arrays(self, fn: Callable[..., Any], call: Call) -> Any:
        levels = self._levels(call)
        count = levels.sizes[0]
        grid, owned = self._grid(levels)
        columns = []
        for i, (argument, cuts) in enumerate(zip(call.given, levels.cuts, strict=True)):
            if i in call.static:
                columns.append(MappedArgument(Unmapped(argument), False))
            elif all(cut.axes[0] is None for cut in cuts):
                columns.append(MappedArgument(argument, False))
            else:
                columns.append(MappedArgument(_slices(argument, cuts, grid, count), True))
        results = run_mapped(fn, columns, _rows(grid), "pmap", names=self._names, sizes=(count,), owned=owned)
        return _stacked(results, self._out_axes, grid, owned)

    def _levels(self, call: Call) -> Levels:
        """What this map cuts, and what the maps cut that it maps directly."""
        cuts = self._cuts(call)
        sizes = {
            f"{cut.path} of shape {cut.array.shape} along axis {cut.axes[0]}": cut.array.shape[cut.axes[0]]
            for argument in cuts for cut in argument if cut.axes[0] is not None
        }  # fmt: skip
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
        inner = self._inner
        if inner is None:
            return Levels((count,), (self._name,), cuts)
        with _noted():
            sliced = call.sliced(cuts, inner._static)
            if sliced.lists:
                return Levels((count, inner._demand(sliced)), (self._name, None), cuts)
            within: Levels = inner._levels(sliced)
        return within.around(count, self._name, cuts)

    def _cuts(self, call: Call) -> list[list[Cut]]:
        """How each leaf of each argument is cut."""
        cuts: list[list[Cut]] = []
        for i, (argument, entry) in enumerate(zip(call.given, self._axes_of(call), strict=True)):
            found = []
            if entry is not None:
                for leaf, axis, path in zip(leaves(argument), entry, paths(argument, f"argument {i}"), strict=True):
                    array = leaf if axis is None else _array(leaf, path)
                    found.append(Cut(array, (axis if axis is None else _normal(axis, array.ndim, path),), path))
            cuts.append(found)
        return cuts

    def _axes_of(self, call: Call) -> list[Any]:
        """For each argument the axis of each leaf; None for one that is static."""
        given, static, positional = call.given, call.static, call.positional
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

    def _grid(self, levels: Levels) -> tuple[Mesh, Sequence[Mesh]]:
        """The devices as a grid, along whose first axis the calls are, and the devices that each call owns."""
        count = levels.sizes[0]
        if self._devices is not None:
            grid = named(_grid_of(self._devices), self._name)
            if grid.axis_sizes[0] != count:
                raise ShapeError(f"pmap: {count} slices for {grid.axis_sizes[0]} devices; wanted one for each")
            return grid, _rows(grid)
        wanted = math.prod(levels.sizes)
        row = default_mesh().flat
        cuts = [cut for cuts in levels.cuts for cut in cuts if cut.axes[0] is not None]
        there = (cut for cut in cuts if isinstance(cut.array, ShardedTensor) and cut.array.committed)
        placed = next((cut.home() for cut in there if cut.array.sharding.mesh.size == wanted), None)
        if placed is None and wanted > len(row):
            raise ShardingError(_too_many(levels.sizes, row))
        grid = grid_of(placed or row[:wanted], levels.sizes, levels.names)  # computation follows data
        shared = placed is None and len(levels.sizes) == 1
        return grid, shares(row, count) if shared else _rows(grid)


def _too_many(sizes: Sequence[int], row: Sequence[Device]) -> str:
    """What to do about more slices than devices."""
    slices, devices = " x ".join(map(str, sizes)), f"{len(row)} device{'s' * (len(row) != 1)}"
    if current() is not None:
        devices = f"the {devices} that the call around this map owns ({listed([str(d) for d in row], 3)})"
    return (
        f"pmap: {slices} slices for {devices}; one device takes one slice: split a larger axis with st.smap, or into a "
        "list with st.shard"
    )


# -- results ---------------------------------------------------------------------------------------


def _stacked(results: Sequence[Any], out_axes: Any, grid: Mesh, owned: Sequence[Mesh]) -> Any:
    """The results of calls along the grid's first axis as one tensor each."""
    same_forms(results, "pmap")
    along = grid.axis_names[0]
    axes = spread(out_axes, results[0], "pmap: out_axes", "the result")
    whole = []
    for column, axis, path in zip(
        zip(*map(leaves, results), strict=True), axes, paths(results[0], "the result"), strict=True
    ):
        _check_axis(axis, "out_axes")
        for leaf in column:
            check_array(leaf, f"pmap: {path}")
        spec, parts = P(), list(column)
        if axis is not None:
            at = _normal(axis, np.ndim(column[0]) + 1, path)
            spec, parts = P(*[None] * at, along), [_with_axis(leaf, at) for leaf in column]
        whole.append(joined_leaf(parts, spec, _grid_under(parts, grid, owned), (along,), f"pmap: {path}"))
    return replaced(results[0], whole)


def _grid_under(column: Sequence[Any], grid: Mesh, owned: Sequence[Mesh]) -> Mesh:
    """The grid of devices on which results lie: the map's, or, where maps inside of the calls have spread them over
    several of the devices that each call owns, all of these.
    """
    if grid.size > len(column) or not all(isinstance(leaf, ShardedTensor) for leaf in column):
        return grid
    meshes = [leaf.sharding.mesh for leaf in column]
    alike = all(mesh.axis_sizes == meshes[0].axis_sizes for mesh in meshes)
    inside = all(set(mesh.flat) <= set(mine.flat) for mesh, mine in zip(meshes, owned, strict=True))
    if meshes[0].size == 1 or not alike or not inside:
        return grid
    devices = tuple([device for mesh in meshes for device in mesh.flat])
    return grid_of(devices, (len(meshes), *meshes[0].axis_sizes), (grid.axis_names[0], *meshes[0].axis_names))


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
    alone = len(arrays) == 1 and value.backend.shared_memory
    return tensor(value, Storage(arrays[0]) if alone else Storage(arrays=tuple(arrays)))


# -- arguments -------------------------------------------------------------------------------------


def _with_keywords(fn: Callable[..., Any], positional: int, keys: tuple[str, ...]) -> Callable[..., Any]:
    return lambda *parts: fn(*parts[:positional], **dict(zip(keys, parts[positional:], strict=True)))


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Notes at errors that they are those of a map inside: its arguments are slices or items of the map around it."""
    try:
        yield
    except ShardTensorError as error:
        error.add_note("pmap: raised for a map of a map, whose arguments are what the map around it gives each call")
        raise


def _length(lists: Sequence[list[Any]]) -> int:
    """The length of lists of shards, which must be equal."""
    count = len(lists[0])
    for other in lists:
        if len(other) != count:
            raise ShapeError(f"pmap: lists of {count} and of {len(other)} shards; wanted as many of each")
    return count


def _check_axis(axis: Any, what: str) -> None:
    if axis is not None and (isinstance(axis, bool) or not hasattr(axis, "__index__")):
        raise ArgumentTypeError(f"pmap: {what} is {axis!r:.60}; wanted an integer or None")


def _array(leaf: Any, path: str) -> Any:
    if leaf is None or isinstance(leaf, (str, bytes)):
        raise ArgumentTypeError(f"pmap: {path} is a {type(leaf).__name__}; wanted an array, or None for it in in_axes")
    return as_operand(np.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf, "pmap")


def _normal(axis: int, ndim: int, path: str) -> int:
    try:
        return normalize_axis(axis, ndim)
    except ValueError as error:
        raise type(error)(f"pmap: {path}: {error}") from None


def _slices(argument: Any, cuts: Sequence[Cut], grid: Mesh, count: int) -> list[Any]:
    """What each call gets of an argument."""
    rows = []
    first = grid.axis_names[0]
    for leaf, cut in zip(leaves(argument), cuts, strict=True):
        axis = cut.axes[0]
        if axis is None:
            rows.append([leaf] * count)
            continue
        whole = ensure_sharding(cut.array, NamedSharding(grid, cut.spec(grid.axis_names)), "pmap")
        rows.append(split_over(whole, (first,), drop=axis))
    return [replaced(argument, parts) for parts in zip(*rows, strict=True)]


# -- places ----------------------------------------------------------------------------------------


def _grid_of(devices: Any) -> Mesh:
    """Devices as a mesh whose first axis is mapped; those of the default mesh in a row for None."""
    if isinstance(devices, Mesh):
        return devices
    grid = np.asarray(devices, dtype=object) if isinstance(devices, (list, tuple, np.ndarray)) else None
    if grid is None or grid.ndim < 2:
        return device_row(devices, "pmap")
    return Mesh(grid, [f"d{k}" for k in range(grid.ndim)])


def _rows(grid: Mesh) -> list[Mesh]:
    """The devices of each call."""
    return [place for _, place in places_along(grid, grid.axis_names[1:])]


def _home_of(items: Sequence[Any]) -> Mesh | None:
    """Where a call runs that gets these items of lists; None, if there is no tensor in them."""
    return next(filter(None, map(_home, items)), None)


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
