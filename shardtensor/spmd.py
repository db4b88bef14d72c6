"""`pmap`: a function of the user's, run once for each device on what that device holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor import team
from shardtensor.backend import Backend, Device, function_of
from shardtensor.core import Op, Operands, Params, interpreting
from shardtensor.eager import apply
from shardtensor.errors import ArgumentTypeError, ShapeError, ShardingError
from shardtensor.functions.lists import device_row
from shardtensor.log import note_copy
from shardtensor.mesh import Mesh
from shardtensor.monoids import Place
from shardtensor.operands import admit, host_aval
from shardtensor.plans import result_dtype
from shardtensor.plugins import backend_of, owner_of
from shardtensor.sharding import as_sharding, offsets
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
        note_copy(who, int(mine.nbytes), device)
    return mine


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
        note_copy(who, int(array.nbytes), device)
    shape = tuple(array.shape)
    value = aval(shape, backend_of(device).dtype_of(array), as_sharding(device, len(shape), who), True)
    return tensor(value, Storage(array) if value.backend.one_memory else Storage(arrays=(array,)))
