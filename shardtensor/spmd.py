"""`pmap` and `smap`: a function of the user's, run once for each device on what that device holds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor import team
from shardtensor.backend import Backend, Device, function_of
from shardtensor.core import Op, Operands, Params, interpreting
from shardtensor.eager import apply
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError, ShardingError
from shardtensor.functions.joining import assemble
from shardtensor.functions.lists import device_row, split
from shardtensor.functions.placement import put
from shardtensor.log import Transfer, account
from shardtensor.mesh import Mesh
from shardtensor.monoids import Place
from shardtensor.operands import admit, host_aval
from shardtensor.plans import result_dtype
from shardtensor.plugins import backend_of, owner_of
from shardtensor.rules import normalize_axes
from shardtensor.sharding import NamedSharding, P, as_sharding, offsets
from shardtensor.tensor import SCALARS, ShardedTensor, give_away, tensor
from shardtensor.transfer import arrival
from shardtensor.trees import leaves, map_leaves
from shardtensor.value import Storage, aval


class OnDevice:
    """The interpreter inside of a mapped function: operators on the backend's arrays run on the current device and
    return its arrays. Tensors that the function finds outside of it, and ``device=``, mean what they mean everywhere.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.backend: Backend = backend_of(device)

    def __call__(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Runs ``op`` here."""
        named = dict(zip(op.params, params, strict=True))
        elsewhere = named.pop("device", None) is not None or (op.algorithm and not op.kernel)
        if elsewhere or any(type(x) is ShardedTensor for x in (*operands, *params)):
            return apply(op, operands, params)
        if op.composite:
            result = op.composite(*(operands if not op.variadic else (operands,)), *params)
            if result is not NotImplemented:
                return result
        scalars_alone = all(x is None or type(x) in SCALARS for x in operands)
        arrays = [self._array(x, op.name, scalars_alone) for x in operands]
        return self._run(op, arrays, named)

    def _array(self, x: Any, who: str, also_scalars: bool) -> Any:
        if x is None or (type(x) in SCALARS and not also_scalars) or self.backend.is_array(x):
            return x
        host = admit(x, who)
        return self.backend.from_host(np.asarray(host), self.device)

    def _run(self, op: Op, arrays: Sequence[Any], named: dict[str, Any]) -> Any:
        xp = self.backend.xp
        if op.kernel is None:
            function = function_of(self.backend, op.name)
            return function(list(arrays), **named) if op.variadic else function(*arrays, **named)
        kinds: list[Any] = [
            x if x is None else type(x) if type(x) in SCALARS else host_aval(tuple(x.shape), self.backend.dtype_of(x))
            for x in arrays
        ]
        shapes = [k.shape if hasattr(k, "shape") else () for k in kinds]
        if op.algorithm:
            return op.kernel(xp, None, *arrays, **named)
        if op.creates:
            shape, dtype = op.rule(kinds, **named)
        else:
            said = op.rule(shapes, **named) if callable(op.rule) else op.rule
            shape = said[1] if isinstance(said, tuple) else shapes[0] if shapes else ()
            dtype = result_dtype(op, kinds, named) if shapes else None
        return op.kernel(xp, Place.everywhere(shape, shapes, dtype), *arrays, **named)


_on_device = functools.cache(OnDevice)


# -- pmap ------------------------------------------------------------------------------------------


def pmap(
    fn: Callable[..., Any], *args: Any, devices: Sequence[Device] | Mesh | None = None, donate: bool = False
) -> Any:
    """Runs ``fn`` on every device at once, and gives the list of its results, which stay on their devices.

    ``pmap(g, pmap(f, shards))`` moves nothing. ``pmap(fn)`` alone gives the mapped function.

    ==================================  ================================================================================
    an argument that is                 is to ``fn``
    ==================================  ================================================================================
    a Python list                       a list of shards: call i gets item i; all lists have the same length
    anything else                       one thing, which every call gets whole: one copy for each device
    ==================================  ================================================================================

    A tensor in an item runs where it lives; where lists differ, the first one's device counts, and the others come to
    it. Items without a tensor are dealt out in blocks by the split rule (10 over 4 devices: 3, 3, 2, 2), so that
    `stack` of the results moves nothing. Items and results may be pytrees; shapes and dtypes may differ from shard to
    shard.

    Inside, ``fn`` has the backend's own arrays, not to be written to, on the current device; `st` functions on them
    run there, too. It may be any Python function. In what order and how many calls at once is not promised. Arrays
    that it returns become tensors on the device (without dimensions, they stand for scalars: ``+=`` gives another
    one); other leaves stay what they are.

    Args:
        fn: the function.
        *args: see above.
        devices: deals all items out over these, wherever their tensors live.
        donate: gives the memory of the tensors in lists to ``fn``, for writing; they cannot be used after.

    Raises:
        ShapeError: lists of different lengths.
        ShardingError: a tensor in an item lives on several devices.
        ArgumentTypeError: no argument is a list.
        Exception: what ``fn`` raises, with a note of the shard and the device; of several, the first shard's. Shards
            that were not started then are not run.

    >>> parts = st.shard(np.arange(6.0), devices=st.devices()[:3])
    >>> squares = st.pmap(lambda x: x * x, parts)
    >>> st.pmap(lambda x, y: (x + y).sum(), squares, parts)[2].item()
    50.0
    """
    if not callable(fn):
        raise ArgumentTypeError(f"pmap: fn is a {type(fn).__name__}; wanted a function")
    if not args:
        return functools.wraps(fn)(functools.partial(pmap, fn, devices=devices, donate=donate))
    lists = [a for a in args if type(a) is list]
    if not lists:
        raise ArgumentTypeError(
            "pmap: no argument is a list of shards; make one with st.shard(x), or map over [item, item, …]"
        )
    count = len(lists[0])
    for other in lists:
        if len(other) != count:
            raise ShapeError(f"pmap: lists of {count} and of {len(other)} shards; wanted as many of each")
    return run_mapped(fn, [(a, type(a) is list) for a in args], _places(lists, count, devices), donate, "pmap")


def _places(lists: Sequence[list[Any]], count: int, devices: Any) -> list[Device]:
    """The device of each item."""
    places: list[Device | None] = [None] * count
    if devices is None:
        for i, items in enumerate(zip(*lists, strict=True)):
            for leaf in items if type(items[0]) is ShardedTensor else leaves(items):
                if type(leaf) is not ShardedTensor:
                    continue
                home = leaf._aval.sharding.mesh.flat
                if len(home) > 1:
                    raise ShardingError(
                        f"pmap: item {i} holds a tensor that lives on {len(home)} devices; a shard lives on one: "
                        "split it with st.shard(x), or pass it outside of the list, whole for every device"
                    )
                places[i] = home[0]
                break
    if None not in places:
        return places  # type: ignore[return-value]
    row = device_row(devices, "pmap").flat
    ends = offsets(count, (len(row),))[1:].tolist()
    dealt = [row[k] for k, (a, b) in enumerate(itertools.pairwise([0, *ends])) for _ in range(b - a)]
    return [here or there for here, there in zip(places, dealt, strict=True)]


def run_mapped(
    fn: Callable[..., Any], columns: Sequence[tuple[Any, bool]], places: Sequence[Device], donate: bool, who: str
) -> list[Any]:
    """Calls ``fn`` once for each place. A column is (list of items, True), or (one thing for all, False)."""
    wholes: dict[tuple[int, Device], tuple[Any, list[Any]]] = {}

    def task(i: int, device: Device) -> Callable[[], Any]:
        """One call. Nothing but the task holds its arguments afterwards, so that what is donated is alone."""
        arguments: list[Any] = []
        shards: list[Any] = []
        for c, (column, is_list) in enumerate(columns):
            if is_list:
                argument, arrays = _onto(column[i], device, who, donate)
            else:
                if (c, device) not in wholes:
                    wholes[c, device] = _onto(column, device, who, False)
                argument, arrays = wholes[c, device]
            arguments.append(argument)
            shards += arrays
        return functools.partial(_call, fn, arguments, shards, device, who)

    tasks = [task(i, device) for i, device in enumerate(places)]
    homes = {device: backend_of(device) for device in places}
    for device, backend in homes.items():
        backend.enter(device)  # what the function finds outside of it is the caller's
    try:
        return team.run_all(tasks, patience=max([backend.patience for backend in homes.values()], default=0.0))
    except team.Failed as failure:
        number, error = failure.number, failure.error
    finally:
        for device, backend in homes.items():
            backend.leave(device)
    error.add_note(f"{who}: raised for shard {number} on {places[number]}")
    try:
        raise error
    finally:
        del error  # else it and this frame would keep each other, and the shards, alive


def _onto(tree: Any, device: Device, who: str, donate: bool) -> tuple[Any, list[Any]]:
    """A pytree with its arrays on ``device``, and those of them that are tensors' memory."""
    shards: list[Any] = []
    if type(tree) is ShardedTensor:  # the common case
        return _leaf_onto(tree, device, who, donate, shards), shards
    return map_leaves(lambda leaf: _leaf_onto(leaf, device, who, donate, shards), tree), shards


def _leaf_onto(leaf: Any, device: Device, who: str, donate: bool, shards: list[Any]) -> Any:
    backend = backend_of(device)
    if type(leaf) is not ShardedTensor:
        if not _is_data(leaf):
            return leaf
        return backend.export(_array_on(admit(leaf, who), device, backend, who))
    if donate:
        return _released(leaf, device, backend, who)
    array = _array_on(leaf, device, backend, who)
    shards.append(array)
    return backend.export(array)


def _array_on(x: Any, device: Device, backend: Backend, who: str) -> Any:
    """The array of a tensor or host array, whole, on one device."""
    if type(x) is ShardedTensor and x.sharding.mesh.flat == (device,):
        storage = x._storage
        arrays = storage.arrays
        return storage.array if arrays is None else arrays[0]
    source = x._aval if type(x) is ShardedTensor else host_aval(x.shape, x.dtype)
    move = arrival(source, as_sharding(device, x.ndim, who))
    return move.whole(x, who) if backend.one_memory else move.shards(x, who)[0]


def _released(x: ShardedTensor, device: Device, backend: Backend, who: str) -> Any:
    """The memory of a tensor that is given away, for writing."""
    array = _array_on(x, device, backend, who)
    give_away(x, who)  # now this call alone holds the array, unless another tensor shares its memory
    with backend.on(device):
        mine, copied = backend.release(array)
    if copied:
        _note_copy(mine, device, who)
    return mine


def _note_copy(array: Any, device: Device, who: str) -> None:
    account(who, 0, True, lambda: [Transfer(0, int(array.nbytes), device, device, who, True)])


def _call(fn: Callable[..., Any], arguments: list[Any], shards: Sequence[Any], device: Device, who: str) -> Any:
    """One call of a mapped function: what it returns, with its arrays as tensors on the device."""
    interpreter = _on_device(device)
    backend = interpreter.backend
    with backend.on(device), interpreting(interpreter):
        result = fn(*arguments)
        arguments.clear()
        if backend.is_array(result) and _is_data(result):  # the common case
            result, copied = backend.adopt(backend.asarray(result), shards)
            return _on_one(result, copied, device, who)
        found: list[Any] = []
        tree = map_leaves(lambda leaf: found.append(leaf) or len(found) - 1, result)  # type: ignore[func-returns-value]
        del result
        for i in range(len(found)):
            # One reference alone, so that the backend can see whether somebody else has one.
            array, found[i] = found[i], None
            if not _is_data(array):
                found[i] = array
            elif backend.is_array(array):
                array, copied = backend.adopt(backend.asarray(array), shards)
                found[i] = _on_one(array, copied, device, who)
            else:  # it is on the host
                found[i] = _on_one(backend.from_host(np.asarray(array), device), True, device, who)
    return map_leaves(found.__getitem__, tree)


def _is_data(x: Any) -> bool:
    """Whether a leaf is an array that tensors can have; arrays of text and of objects are like any other leaf."""
    return (isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "biufcmM") or owner_of(x) is not None


def _on_one(array: Any, copied: bool, device: Device, who: str) -> ShardedTensor:
    """A tensor on one device, of an array that nobody else holds."""
    if copied:
        _note_copy(array, device, who)
    shape = tuple(array.shape)
    value = aval(shape, backend_of(device).dtype_of(array), as_sharding(device, len(shape), who), True)
    return tensor(value, Storage(array) if value.backend.one_memory else Storage(arrays=(array,)))


# -- smap ------------------------------------------------------------------------------------------

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

    >>> from shardtensor.spmd import even_factors
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
