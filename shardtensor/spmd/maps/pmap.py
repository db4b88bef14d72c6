"""`pmap`: runs a function on every device concurrently."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import is_spanning, own_devices
from shardtensor.core import hinted
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisError,
    ShapeError,
    ShardingError,
    ShardTensorError,
    type_text,
)
from shardtensor.functions.placement.shard_lists import device_row, split_over, unsqueeze_each
from shardtensor.functions.placement.transfers import check_donated, ensure_sharding
from shardtensor.host.units import counted, listed
from shardtensor.sharding.layout import NamedSharding, offsets
from shardtensor.sharding.mesh import Mesh, default_mesh, mesh_in_use, mesh_of, shares, submeshes_along
from shardtensor.sharding.spec import P
from shardtensor.spmd.maps import nesting
from shardtensor.spmd.maps.launch import MappedArgument, Unmapped, argument_array, checked_axis, map_shards
from shardtensor.spmd.maps.nesting import Call, Cut, Levels, grid_of, named
from shardtensor.spmd.maps.outputs import check_array, joined_leaf, same_forms
from shardtensor.spmd.scheduling.mapped_program import current
from shardtensor.tensor.pytree import children_of, leaves, paths, replaced, spread
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, are_tensors

if TYPE_CHECKING:
    from shardtensor.spmd.maps.map_types import Anything, Array, Given, PmapOptions, Pmapped, Tree, Unknown

Devices = Sequence[Any] | Mesh | None


@overload
def pmap(
    fn: Callable[..., Array], shards: list[Any], /, *args: Any, **options: Unpack[PmapOptions]
) -> list[ShardedTensor]: ...


@overload
def pmap(
    fn: Callable[..., Array], array: Given, /, *args: ArrayLike, **options: Unpack[PmapOptions]
) -> ShardedTensor: ...


@overload
def pmap(fn: Callable[..., Array], /, **options: Unpack[PmapOptions]) -> Pmapped: ...


@overload
def pmap(fn: Callable[..., Unknown], /, *args: Any, **options: Unpack[PmapOptions]) -> Any: ...


@overload
def pmap(fn: Callable[..., Anything], tree: Tree, /, *args: Any, **options: Unpack[PmapOptions]) -> Any: ...


@overload
def pmap(fn: Callable[..., Anything], /, **options: Unpack[PmapOptions]) -> Callable[..., Any]: ...


@hinted
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
    """Calls ``fn`` for every device, concurrently. Results stay on their devices, where the next map finds them.

    ``pmap(fn)`` without arguments returns the mapped function. The arguments of a call determine its semantics:

    ==================  =================================  =================================================
    ..                  a Python list among the arguments  only arrays, or pytrees of arrays
    ==================  =================================  =================================================
    semantics           Nx's pmap: a list of shards        JAX's pmap: an array with an axis of devices
    a list              call i gets item i                 (not applicable)
    any other argument  is replicated to every call        is sliced along its axis of ``in_axes``, or is
                                                           replicated where that is None
    ``fn`` receives     each shard, its rank kept          each slice, without that axis
    number of calls     the length of the lists            the size of that axis, one call for each device
    result              a list of results                  one tensor, stacked along ``out_axes``
    ==================  =================================  =================================================

    Lists: a call runs on the device of the tensor in its item. Where lists differ, the first list with a tensor
    determines the device, and the other items are transferred to it. Items without a tensor are distributed over the
    devices in blocks, by the split rule (10 over 4 devices are split as 3, 3, 2, 2), so that `stack` of the results
    transfers nothing. Items and results may be pytrees. Shapes and dtypes may differ from shard to shard.

    Arrays: an array whose sharding already matches the slices is not transferred; other arrays are resharded.
    ``out_axes=None`` declares that the results of all calls are equal. This is checked, and the result is one tensor
    that is replicated over the calls.

    Nested: maps inside of a call use the devices that the call owns. A map of a map, ``pmap(pmap(fn))``, takes one
    device for each call of the innermost one, and gives each call of the outer one a row of these. Where ``devices`` is
    a grid, or an item is itself a tensor over several devices (or a list of tensors), each call owns those. In all of
    these cases slices and items are passed to the inner map unchanged, and ``fn`` receives the backend's arrays at the
    innermost level. Any other call runs on one device. Without ``devices`` and without tensors in the lists, the calls
    divide all devices: of n calls, call i owns the devices i, i + n, i + 2 n, …, which are the default mesh for the
    maps in it.

    ``fn`` may be any Python function. It receives the backend's own arrays, and must not write to them. Their device is
    current, and `st` functions run on it. Collectives (`st.psum`, …) run along ``axis_name``. The order of the calls,
    and the number of calls that run at the same time, are unspecified. Arrays that ``fn`` returns become tensors on the
    device; other leaves are returned unchanged.

    Several calls share a thread, which switches between them in collectives and inner maps. Context variables and
    `numpy.errstate` belong to a call, thread-local data and the owner of a `threading.RLock` to the thread. A call must
    not hold a lock while it calls a collective or a map: if another call of the same thread acquires the lock, both are
    blocked, without an error. See docs/programs.md, also for asyncio, signals and forks.

    Args:
        fn: the function.
        *args: see above. (The mapped function takes keywords, too; arrays among them are sliced along axis 0.)
        axis_name: a name for the axis of the calls, for collectives.
        in_axes: for arrays, the axis that is sliced: an int for all arguments, or one entry for each argument, ints and
            None in the form of the arguments' pytrees, or of prefixes of these; negative counts from the end.
        out_axes: the same for results; None for a result that is equal on all devices.
        static_argnums: the numbers of arguments that ``fn`` receives unchanged, whatever they are.
        devices: the devices, in order. Items of lists are distributed over these, wherever their tensors are; arrays
            must have one slice for each of them (by default, as many devices are used as there are slices). A grid,
            such as a mesh of several axes, is mapped along its first axis. Each call then owns its device, or its row,
            and no other.
        donate: donates the memory of the tensors in lists to ``fn``, for writing; they cannot be used afterwards. The
            lists must not contain host arrays.

    Returns:
        A list of results for lists, a pytree of tensors for arrays; without arguments, the mapped function.

    Raises:
        ShapeError: lists of different lengths, axes of different sizes, or of another size than ``devices``.
        ShardingError: more slices than devices (in a map: than the enclosing call owns); ``axis_name`` is bound by an
            enclosing map; in a job of several processes, neither ``devices`` nor a tensor says in which processes the
            devices are.
        ArgumentTypeError: ``fn`` is not a function; an axis, an axis name or a leaf is of the wrong type.
        ArgumentError: ``in_axes`` or ``out_axes`` do not match the form of the arguments or results; no argument is
            mapped; ``donate`` without lists, or with host arrays in them.
        AxisError: an array or a result has no such axis.
        CollectiveError: a deadlock: the message names each device and the call in which it waits.
        RecursionError: maps that call each other without end: the frames of all of them count.
        Exception: an error that ``fn`` raises, with a note of the shard and the device; of several, the first shard's.
            Shards that were not started then are not run.

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
        raise ArgumentTypeError(f"pmap: fn is {type_text(fn)}; wanted a function")
    if axis_name is not None and (not isinstance(axis_name, str) or not axis_name):
        raise ArgumentTypeError(f"pmap: axis_name is {axis_name!r:.60}; wanted a name, such as 'i'")
    mapped = _Pmap(fn, axis_name, in_axes, out_axes, static_argnums, devices, donate)
    return mapped(*args) if args else functools.update_wrapper(mapped, fn, updated=())


@dataclass(eq=False)
class _Pmap:
    """A mapped function, as `pmap` returns it; the attributes are the arguments of `pmap`."""

    _fn: Callable[..., Any]
    _name: str | None
    _in_axes: Any
    _out_axes: Any
    _static: int | Sequence[int]
    _devices: Devices
    _donate: bool

    def __repr__(self) -> str:
        name = None if type(self._fn) is _Pmap else getattr(self._fn, "__name__", None)
        return f"<pmap of {name or repr(self._fn)}>"

    @property
    def _names(self) -> tuple[str, ...]:
        """The name of the axis, if it has one."""
        return () if self._name is None else (self._name,)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds the mapped function as a method, like a function."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Maps the function over arguments; see `pmap`."""
        if not args and not kwargs:
            raise ArgumentError(
                "pmap: the mapped function was called without arguments; wanted lists or arrays to map over"
            )
        call = Call([*args, *kwargs.values()], len(args), self._static)
        fn = self._fn if not kwargs else _with_keywords(self._fn, len(args), tuple(kwargs))
        return self._over_lists(fn, call) if call.lists else self._over_arrays(fn, call)

    # -- lists -------------------------------------------------------------------------------------

    def _over_lists(self, fn: Callable[..., Any], call: Call) -> list[Any]:
        if (self._in_axes, self._out_axes) != (0, 0):
            self._check_axes_of_lists(call.arguments, call.static)
        if self._donate:
            others = [x for i, x in enumerate(call.arguments) if type(x) is not list and i not in call.static]
            check_donated(call.lists, "pmap", "lists", others)
        count = _length(call.lists)
        columns = []
        for i, argument in enumerate(call.arguments):
            mapped = type(argument) is list and i not in call.static
            item = Unmapped(argument) if i in call.static else argument
            columns.append(MappedArgument(item, mapped, self._donate and mapped))
        submeshes, owned = self._submeshes(call, count)
        return map_shards(columns, fn, submeshes, owned, "pmap", self._names)

    def _submeshes(self, call: Call, count: int) -> tuple[Sequence[Mesh], Sequence[Mesh]]:
        """Returns the devices on which each call runs, and the devices that each call owns."""
        if self._devices is None and are_tensors(call.lists[0]):  # The first list is decisive.
            there = [item._aval.sharding.mesh for item in call.lists[0]]
            return there, there
        meshes: list[Mesh | None] = [None] * count
        for column in call.lists if self._devices is None else ():
            meshes = [
                mesh or (item._aval.sharding.mesh if type(item) is ShardedTensor else _submesh_of(item))
                for mesh, item in zip(meshes, column, strict=True)
            ]
        if meshes and all(meshes):
            submeshes: list[Mesh] = meshes  # type: ignore[assignment]
            return submeshes, submeshes
        rows = _rows(_grid_of(self._devices))
        if self._devices is None and not any(meshes):
            row = tuple([submesh.flat[0] for submesh in rows])
            if self._inner is not None:
                mine = nesting.assigned(row, self._demands(call))
                return mine, mine
            if count <= len(row):
                return rows[:count], shares(row, count)
        ends = offsets(count, (len(rows),)).tolist()
        numbers = [k for k, (a, b) in enumerate(itertools.pairwise(ends)) for _ in range(b - a)]
        submeshes = [mesh or rows[k] for mesh, k in zip(meshes, numbers, strict=True)]
        return submeshes, submeshes

    def _demands(self, call: Call) -> list[int]:
        """Returns the number of devices that each call over lists requires: one for each call of the innermost map."""
        count, inner = _length(call.lists), self._inner
        if inner is None:
            return [1] * count
        with _noted():
            return [inner._demand(call.item(i, inner._static)) for i in range(count)]

    def _demand(self, call: Call) -> int:
        """Returns the number of devices that a call of this map requires."""
        return sum(self._demands(call)) if call.lists else math.prod(self._levels(call).sizes)

    @property
    def _inner(self) -> _Pmap | None:
        """The mapped function that this one maps directly, if its devices are those of the enclosing call."""
        return self._fn if type(self._fn) is _Pmap and self._fn._devices is None else None

    def _check_axes_of_lists(self, arguments: Sequence[Any], static: frozenset[int]) -> None:
        """Checks that ``in_axes`` is 0 for lists and None for other arguments, and that ``out_axes`` is the default;
        raises ArgumentError otherwise.
        """
        if self._out_axes != 0:
            raise ArgumentError(
                f"pmap: out_axes is {self._out_axes!r}, and a map over lists returns a list; join it with st.stack or "
                "st.unshard"
            )
        in_axes = list(self._in_axes) if isinstance(self._in_axes, (tuple, list)) else [self._in_axes] * len(arguments)
        for i, argument in enumerate(arguments):
            axis = 0 if type(argument) is list else None
            if i not in static and (i >= len(in_axes) or in_axes[i] != axis):
                raise ArgumentError(
                    f"pmap: in_axes is {self._in_axes!r}; where lists of shards are given, wanted 0 for each list and "
                    "None for any other argument"
                )

    # -- arrays ------------------------------------------------------------------------------------

    def _over_arrays(self, fn: Callable[..., Any], call: Call) -> Any:
        if self._donate:
            raise ArgumentError(
                "pmap: donate=True gives away the memory of the tensors in lists, and no argument is a list; give "
                "st.shard(x), or leave out donate"
            )
        levels = self._levels(call)
        count = levels.sizes[0]
        grid, owned = self._grid(levels)
        columns = []
        for i, (argument, cuts) in enumerate(zip(call.arguments, levels.cuts, strict=True)):
            mapped = any(cut.axes[0] is not None for cut in cuts)
            items = Unmapped(argument) if i in call.static else argument
            columns.append(MappedArgument(_slices(argument, cuts, grid, count) if mapped else items, mapped))
        results = map_shards(columns, fn, _rows(grid), owned, "pmap", self._names)
        return _stacked(results, self._out_axes, grid, owned)

    def _levels(self, call: Call) -> Levels:
        """Returns the sizes and cuts of this map and of the maps nested directly in it."""
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
                raise ShapeError(
                    f"pmap: {first} has {counted(count, 'element')}, and {what} has {size}; wanted as many of each"
                )
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
        """Returns for each argument how its leaves are sliced; for a static argument an empty list."""
        positional = call.positional
        in_axes = self._in_axes if isinstance(self._in_axes, (list, tuple)) else [self._in_axes] * positional
        if len(in_axes) != positional:
            raise ArgumentError(
                f"pmap: in_axes has {counted(len(in_axes), 'entry', 'entries')} for {counted(positional, 'argument')}; "
                "wanted one for each, or one for all"
            )
        cuts: list[list[Cut]] = [[] for _ in call.arguments]
        for i, argument in enumerate(call.arguments):
            if i in call.static:
                continue
            entry = in_axes[i] if i < positional else 0
            axes = spread(entry, argument, f"pmap: in_axes[{i}]", f"argument {i}")
            for leaf, axis, path in zip(leaves(argument), axes, paths(argument, f"argument {i}"), strict=True):
                _check_axis(axis, f"in_axes[{i}]")
                advice = "None for it in in_axes"
                if isinstance(leaf, str):
                    advice += f", or axis_name={leaf!r} if it is the name of the axis"
                array = leaf if axis is None else argument_array(leaf, f"pmap: {path}", advice)
                if axis is not None:
                    if not array.ndim:
                        raise _no_axis_to_map(path, axis, i, positional)
                    axis = checked_axis(axis, array.ndim, f"pmap: {path}")
                cuts[i].append(Cut(array, (axis,), path))
        return cuts

    def _grid(self, levels: Levels) -> tuple[Mesh, Sequence[Mesh]]:
        """Returns the grid of devices, along whose first axis the calls are, and the devices that each call owns."""
        count = levels.sizes[0]
        if self._devices is not None:
            grid = named(_grid_of(self._devices), self._name)
            if grid.axis_sizes[0] != count:
                raise ShapeError(
                    f"pmap: {counted(count, 'slice')} for {counted(grid.axis_sizes[0], 'device')}; wanted one for each"
                )
            return grid, _rows(grid)
        total = math.prod(levels.sizes)
        mesh = default_mesh().flat
        cuts = [cut for cuts in levels.cuts for cut in cuts if cut.axes[0] is not None]
        there = [cut for cut in cuts if isinstance(cut.array, ShardedTensor) and _is_placed(cut.array)]
        placed = next((cut.devices() for cut in there if cut.array.sharding.mesh.size == total), None)
        if placed is None and is_spanning(mesh) and current() is None:
            raise ShardingError(_ambiguous(levels.sizes, mesh))
        row = own_devices(mesh)
        if placed is None and total > len(row):
            raise ShardingError(_too_many(levels.sizes, row))
        # Computation follows data: the devices of a committed tensor take precedence over the default mesh.
        grid = grid_of(placed or row[:total], levels.sizes, levels.names)
        shared = placed is None and len(levels.sizes) == 1
        return grid, shares(row, count) if shared else _rows(grid)


def _is_placed(x: ShardedTensor) -> bool:
    """Whether a tensor determines the devices of a map."""
    return x.committed or x._aval.spans


def _ambiguous(sizes: Sequence[int], mesh: Sequence[Device]) -> str:
    """Returns the error message for arrays that do not tell whether their slices are for the devices of one process."""
    slices, own = " x ".join(map(str, sizes)), len(own_devices(tuple(mesh)))
    return (
        f"pmap: {slices} slices in a job of several processes, which has {counted(len(mesh), 'device')}, {own} of them "
        "in this process; for one slice on each device of the job give a tensor that spans them "
        "(st.distributed.make_array_from_process_local_data makes it of the slices of each process), or "
        "devices=st.devices() with the same array in all processes; for a map of this process only give "
        "devices=st.local_devices()"
    )


def _too_many(sizes: Sequence[int], row: Sequence[Device]) -> str:
    """Returns the error message for more slices than devices."""
    slices, devices = " x ".join(map(str, sizes)), counted(len(row), "device")
    more = ""
    if mesh_in_use() is None:
        more = f", or call st.set_num_devices({math.prod(sizes)}) at the start of the program (logical devices)"
    if current() is not None:
        devices = f"the {devices} that the call around this map owns ({listed([str(d) for d in row], 3)})"
    return (
        f"pmap: {slices} slices for {devices}; one device takes one slice: split a larger axis with st.smap, or into a "
        f"list with st.shard{more}"
    )


# -- results ---------------------------------------------------------------------------------------


def _stacked(results: Sequence[Any], out_axes: Any, grid: Mesh, owned: Sequence[Mesh]) -> Any:
    """Joins the results of the calls along the grid's first axis, leaf by leaf, into one tensor each."""
    same_forms(results, "pmap")
    along = grid.axis_names[0]
    axes = spread(out_axes, results[0], "pmap: out_axes", "the result")
    whole = []
    columns = zip(*map(leaves, results), strict=True)
    for column, axis, path in zip(columns, axes, paths(results[0], "the result"), strict=True):
        _check_axis(axis, "out_axes")
        for leaf in column:
            check_array(leaf, f"pmap: {path}")
        spec, parts = P(), list(column)
        if axis is not None:
            at = checked_axis(axis, np.ndim(column[0]) + 1, f"pmap: {path}")
            spec, parts = P(*[None] * at, along), _with_axis(column, at)
        whole.append(joined_leaf(parts, spec, _grid_under(parts, grid, owned), (along,), f"pmap: {path}"))
    return replaced(results[0], whole)


def _grid_under(column: Sequence[Any], grid: Mesh, owned: Sequence[Mesh]) -> Mesh:
    """Returns the grid of devices that hold the results: the map's grid, or, where maps inside of the calls have
    distributed them over several of the devices that each call owns, all of these.
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


def _with_axis(column: Sequence[Any], at: int) -> list[Any]:
    """Returns the results of all calls with a new dimension, along which they are stacked."""
    index = (slice(None),) * at + (None,)
    tensors = iter(unsqueeze_each([leaf for leaf in column if isinstance(leaf, ShardedTensor)], at))
    return [
        next(tensors) if isinstance(leaf, ShardedTensor) else None if leaf is None else np.asarray(leaf)[index]
        for leaf in column
    ]


# -- arguments -------------------------------------------------------------------------------------


def _with_keywords(fn: Callable[..., Any], positional: int, keys: tuple[str, ...]) -> Callable[..., Any]:
    return lambda *parts: fn(*parts[:positional], **dict(zip(keys, parts[positional:], strict=True)))


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Adds a note to errors of an inner map that its arguments are slices or items of the arguments of the map around
    it.
    """
    try:
        yield
    except ShardTensorError as error:
        error.add_note("pmap: raised for a map of a map, whose arguments are slices or items of the outer map's")
        raise


def _length(lists: Sequence[list[Any]]) -> int:
    """Returns the common length of lists of shards; raises ShapeError if they differ."""
    count = len(lists[0])
    for other in lists:
        if len(other) != count:
            raise ShapeError(f"pmap: lists of {count} and of {counted(len(other), 'shard')}; wanted as many of each")
    return count


def _no_axis_to_map(path: str, axis: int, number: int, count: int) -> AxisError:
    """Returns the error for a scalar in argument ``number`` of ``count`` positional ones, which is to be sliced."""
    if path != f"argument {number}" or number >= count:
        fix = "; None for it in in_axes passes it whole, if it is given by position"
    elif count == 1:
        fix = "; wanted an array or a list to map over"
    else:
        fix = f"; in_axes=({', '.join(['None' if k == number else '0' for k in range(count)])}) passes it whole"
    return AxisError(f"pmap: {path}: axis {axis} is out of range for an array without dimensions{fix}")


def _check_axis(axis: Any, what: str) -> None:
    if axis is not None and (isinstance(axis, bool) or not hasattr(axis, "__index__")):
        raise ArgumentTypeError(f"pmap: {what} is {axis!r:.60}; wanted an integer or None")


def _slices(argument: Any, cuts: Sequence[Cut], grid: Mesh, count: int) -> list[Any]:
    """Returns the slice of an argument for each call."""
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


# -- devices ---------------------------------------------------------------------------------------


def _grid_of(devices: Any) -> Mesh:
    """Returns devices as a mesh whose first axis is mapped; for None, a one-dimensional mesh of the default mesh's
    devices.
    """
    if isinstance(devices, Mesh):
        return devices
    grid = np.asarray(devices, dtype=object) if isinstance(devices, (list, tuple, np.ndarray)) else None
    if grid is None or grid.ndim < 2:
        return device_row(devices, "pmap")
    return Mesh(grid, [f"d{k}" for k in range(grid.ndim)])


def _rows(grid: Mesh) -> list[Mesh]:
    """Returns the devices of each call as a mesh: the rows of the grid."""
    return [submesh for _, submesh in submeshes_along(grid, grid.axis_names[1:])]


def _submesh_of(item: Any) -> Mesh | None:
    """Returns the mesh of the tensors in a pytree; None if it contains no tensor. A list has the devices of all of its
    items, any other container those of its first tensor.
    """
    if type(item) is ShardedTensor:
        return item._aval.sharding.mesh
    inside = children_of(item)
    if inside is None:
        return None
    submeshes = filter(None, map(_submesh_of, inside))
    if type(item) is not list:
        return next(submeshes, None)
    devices = tuple(dict.fromkeys(device for mesh in submeshes for device in mesh.flat))
    return mesh_of(devices) if devices else None
