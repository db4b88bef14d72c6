"""How a call of an operator runs: propagate, move, run, wrap. A plan is a closure that takes the operands.

Where devices share one memory, an operator whose meaning does not depend on the split runs once on the whole buffer;
elsewhere, and where partial results are owed, it runs once per shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend import Backend, Device, function_of
from shardtensor.blocks import partial_sums
from shardtensor.collectives import SCATTERED_FROM, Ways, all_reduce, groups_along, messages
from shardtensor.core import Op, Operands, Params
from shardtensor.errors import ArgumentTypeError
from shardtensor.folds import Fold, is_long, matmul
from shardtensor.imagined import imagined_plan
from shardtensor.log import Transfer, account, logger, watched
from shardtensor.mesh import Mesh, default_mesh
from shardtensor.monoids import MONOIDS, Monoid, Place, element_bytes, state_bytes
from shardtensor.operands import HostAval, host_aval, sharded_dtype
from shardtensor.parking import apart
from shardtensor.passes import FUNCTIONS, elementwise
from shardtensor.phantom import Ghost
from shardtensor.plugins import backend_of
from shardtensor.pool import POOLED_FROM, reserve
from shardtensor.protocols import is_scalar
from shardtensor.rules import Rule, name_sizes, parse, propagate
from shardtensor.schedules import Move
from shardtensor.sharding import NamedSharding, P, Shape, as_sharding
from shardtensor.tensor import SCALARS, ShardedTensor, own, tensor, whole_array
from shardtensor.transfer import Arrival, Moved, Movement, arrival, as_dtype, gather, imagined, pieces_of, send
from shardtensor.value import Aval, Storage, aval, memory_kind, whole_of

Plan = Callable[[Operands], Any]
Kind = Aval | HostAval | type | None
"""What a plan depends on of an operand: its aval, or the type of a Python scalar; None where it was not given."""

Named = dict[str, Any]
Moves = Sequence[Arrival | None]


def make_plan(op: Op, kinds: Sequence[Kind], params: Params) -> Plan:
    """What to do with operands of these kinds.

    Raises:
        ShardTensorError: shapes, dtypes or parameters do not fit.
    """
    named = dict(zip(op.params, params, strict=True))
    if not op.variadic:
        for name, kind in zip(op.operands, kinds, strict=True):
            if kind is None and name not in op.optional:
                raise ArgumentTypeError(f"{op.name}: {name} is None; wanted a tensor, an array or a scalar")
    if op.operands and all(isinstance(k, type) for k in kinds if k is not None) and not op.creates:
        kinds = [k if k is None else _as_array(k) for k in kinds]  # scalars alone make a 0-d tensor
    if op.creates:
        return _creation_plan(op, kinds, named)
    tensors = [k for k in kinds if isinstance(k, Aval)]
    if len({k.backend.simulated for k in tensors}) > 1:
        raise ArgumentTypeError(
            f"{op.name}: a simulated tensor beside one with elements; give st.empty_like(x, device=...) of that one on "
            "the AbstractMesh"
        )
    mesh = home(tensors).sharding.mesh if tensors else default_mesh()
    plan = (_mover_plan if op.mover else _rule_plan)(op, kinds, named, mesh)
    return _as_array_plan(plan) if op.name in _ARRAYS else plan


_ARRAYS = ("astype", "broadcast_to", "reshape", "where")
"""Operators that give arrays in NumPy also where there are no dimensions; of scalars `astype` gives one."""


def _as_array_plan(plan: Plan) -> Plan:
    def run(operands: Operands) -> ShardedTensor:
        result: ShardedTensor = plan(operands)
        if not result.ndim and not all(isinstance(x, ShardedTensor) and is_scalar(x) for x in operands):
            own(result)
        return result

    return run


def _as_array(kind: Kind) -> HostAval:
    """What a Python scalar is as a host array."""
    assert isinstance(kind, type)
    return host_aval((), np.asarray(kind(1)).dtype)


def home(tensors: Sequence[Aval]) -> Aval:
    """The operand to which the others come: what was placed before what was not, then the one that costs most to
    move.
    """
    return max(tensors, key=lambda a: (a.committed, a.nbytes))


# -- operators with a rule -------------------------------------------------------------------------


def _rule_plan(op: Op, kinds: Sequence[Kind], params: Named, mesh: Mesh) -> Plan:
    shapes = [k.shape if isinstance(k, (Aval, HostAval)) else () for k in kinds]
    said = op.rule(shapes, **params) if callable(op.rule) else op.rule
    text, given_shape = (said, None) if isinstance(said, str) else said
    tensors = [k for k in kinds if isinstance(k, Aval)]
    committed = any(k.committed for k in tensors)
    layouts = [
        k.sharding.spec.chains_of(k.ndim) if isinstance(k, Aval) and k.sharding.mesh == mesh else None for k in kinds
    ]
    weights = [k.nbytes if isinstance(k, Aval) and k.committed == committed else 0 for k in kinds]
    if not tensors:  # the largest host array is split as creation functions would split it
        big = max(range(len(kinds)), key=lambda i: getattr(kinds[i], "nbytes", -1))
        layouts[big] = as_sharding(mesh, len(shapes[big]), op.name).spec.chains_of(len(shapes[big]))
    nothing = any(0 in shape for shape in shapes)  # is on every device, and need not be combined
    rule = parse(text, tuple(map(len, shapes)), op.operands)
    laid = propagate(
        rule,
        shapes,
        layouts,
        weights,
        mesh.shape,
        combines=op.combine is not None and not nothing,
    )
    memory = memory_kind(tensors)
    targets = [
        NamedSharding(mesh, P(*chains), memory_kind=memory) if isinstance(k, (Aval, HostAval)) else None
        for k, chains in zip(kinds, laid.operands, strict=True)
    ]
    sharding = NamedSharding(mesh, P(*laid.result), memory_kind=memory)
    shape = laid.shape if given_shape is None else given_shape
    value = aval(shape, result_dtype(op, kinds, params), sharding, committed)
    moves = [
        arrival(k, t) if isinstance(k, (Aval, HostAval)) and t else None for k, t in zip(kinds, targets, strict=True)
    ]
    if value.backend.simulated:
        return imagined_plan(op, value, params, moves, laid.owed)
    places = _places(value, targets, shapes)
    work = Work(op, value, params, moves, places)
    if value.backend.one_memory and (plan := work.in_blocks(rule, laid.owed)):
        return plan
    if not laid.owed or not op.combine:
        return work.once() if value.backend.one_memory else work.per_shard()
    monoid = MONOIDS[op.combine]
    combined = work.combined(monoid, laid.owed)
    if not value.backend.one_memory:
        return combined
    # Unless somebody counts the bytes of the partial results, nobody needs each of them.
    exact = value.dtype.kind in monoid.exact
    fast = work.once() if exact else partial_sums(op.name, value, params, moves[0], combined)
    return lambda operands: (combined if watched() else fast)(operands)


def result_dtype(op: Op, kinds: Sequence[Kind], params: Named) -> np.dtype[Any]:
    """The dtype of the result: what NumPy makes of arrays of those dtypes with one element.

    Raises:
        ArgumentTypeError: the operator does not take them.
    """
    if op.kernel:
        if params.get("dtype") is not None:
            return sharded_dtype(params["dtype"])
        return next(k.dtype for k in kinds if isinstance(k, (Aval, HostAval)))
    samples = [k if k is None else k(1) if isinstance(k, type) else np.ones((1,) * k.ndim, k.dtype) for k in kinds]
    harmless = {name: value for name, value in params.items() if name != "correction"}  # which of one element warns
    try:
        with np.errstate(all="ignore"):
            return np.dtype(np.asarray(getattr(np, op.name)(*samples, **harmless)).dtype)
    except (TypeError, ValueError) as error:
        dtypes = " and ".join(k.__name__ if isinstance(k, type) else str(k.dtype) for k in kinds if k is not None)
        raise ArgumentTypeError(f"{op.name}: does not take {dtypes} ({error})") from None


def _places(value: Aval, targets: Sequence[NamedSharding | None], shapes: Sequence[Shape]) -> list[Place]:
    grids = [None if t is None else t.grid(s) for t, s in zip(targets, shapes, strict=True)]
    grid = value.grid
    return [
        Place(
            grid.box(k), tuple([() if g is None else g.box(k) for g in grids]), value.shape, tuple(shapes), value.dtype
        )
        for k in range(len(grid.devices))
    ]


class _Group(NamedTuple):
    """Devices whose partial results become one.

    Attributes:
        members: their positions, in mesh order.
        speakers: of those that have something to say.
        size: elements of the result.
        scattered: whether each combines a chunk of it (see `shardtensor.collectives.all_reduce`).
    """

    members: list[int]
    speakers: list[int]
    size: int
    scattered: bool


class Work:
    """One operator on operands of known kinds, and the ways to run it. Each way is a method that gives a plan."""

    def __init__(self, op: Op, value: Aval, params: Named, moves: Moves, places: Sequence[Place]) -> None:
        self.op = op
        self.name = op.name
        self.value = value
        self.backend = value.backend
        self.devices = value.sharding.mesh.flat
        self.params = params
        self.moves = moves
        self.places = places
        self.given = op.kernel
        self.indices: list[list[tuple[slice, ...]]] = []
        if self.backend.one_memory:
            self.indices = [[tuple([slice(*ends) for ends in p.boxes[i]]) for p in places] for i in range(len(moves))]
        self.kernel: Callable[..., Any] = op.kernel or self._from_namespace

    def _from_namespace(self, xp: Any, place: Place, *arrays: Any, **params: Any) -> Any:
        return self._function(*arrays, **params)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        """The operator in the backend's namespace; asked for when it is wanted, since a backend may lack it."""
        return function_of(self.backend, self.name)

    def once(self) -> Plan:
        """Once over whole buffers, for a backend with one memory."""
        name, value, moves, run = self.name, self.value, self.moves, self._on_wholes()
        everything_stays = all(m is None or m.stays for m in moves)

        def plan(operands: Operands) -> ShardedTensor:
            if everything_stays:
                arrays = []
                for x in operands:
                    if type(x) is ShardedTensor:
                        array = x._storage.array
                        arrays.append(whole_array(x, name) if array is None else array)
                    else:
                        arrays.append(x)
            else:
                arrays = [x if m is None else m.whole(x, name) for x, m in zip(operands, moves, strict=True)]
            return tensor(value, Storage(whole_of(run(*arrays), value)))

        return plan

    def _on_wholes(self) -> Callable[..., Any]:
        """The operator on whole buffers: in passes over blocks, where the result is large."""
        value, op = self.value, self.op
        if value.nbytes >= POOLED_FROM and (op.is_ufunc or self.name in FUNCTIONS):
            function = FUNCTIONS.get(self.name) or self._function
            return lambda *arrays: elementwise(function, arrays, value.shape, value.dtype)
        run = self.given or self._function
        if self.given:
            place = Place.everywhere(value.shape, self.places[0].shapes, value.dtype)
            run = functools.partial(run, self.backend.xp, place)
        return functools.partial(run, **self.params) if self.params else run

    def in_blocks(self, rule: Rule, owed: tuple[str, ...]) -> Plan | None:
        """In passes over blocks, for a backend with one memory: a long reduction or product; None for others."""
        op, value, moves, places, name = self.op, self.value, self.moves, self.places, self.name
        combine = op.combine
        if combine is None or None in moves or value.backend.simulated:
            return None
        sizes = name_sizes(rule, places[0].shapes)
        if not value.size or not is_long(combine, rule, sizes):
            return None
        groups = self._groups(owed)
        shares: list[list[Place]] | None = None  # the whole, which may be cut anywhere
        if owed and value.dtype.kind not in MONOIDS[combine].exact:
            shares = list({places[g.members[0]].box: [places[k] for k in g.speakers] for g in groups}.values())
        kernel = matmul if name == "matmul" else self.kernel
        said = "reduce" if len(moves) == 1 else "dot" if name == "tensordot" else name
        fold = Fold(said, combine, rule, sizes, value, places[0], kernel, self.params, shares)
        state = element_bytes(combine, value, moves[0].source, self.params)  # type: ignore[union-attr]

        def plan(operands: Operands) -> ShardedTensor:
            wholes = [m.whole(x, name) for x, m in zip(operands, moves, strict=True)]  # type: ignore[union-attr]
            if owed and watched():
                account(name, 0, True, lambda: self._records(groups, state))
            return tensor(value, Storage(whole_of(fold(*wholes), value)))

        return plan

    def per_shard(self) -> Plan:
        """Once per shard, each on its own device."""
        positions = range(len(self.devices))

        def plan(operands: Operands) -> ShardedTensor:
            columns = self._columns(operands)
            arrays = [self._run(self.kernel, k, operands, columns) for k in positions]
            return tensor(self.value, apart(self.value, arrays))

        return plan

    def combined(self, monoid: Monoid, owed: tuple[str, ...]) -> Plan:
        """Once per shard; then the partial results along the owed axes become one, in mesh order."""
        value, backend, places, devices = self.value, self.backend, self.places, self.devices
        one_memory = backend.one_memory
        partial = monoid.partial or self.kernel
        groups = self._groups(owed)
        # Where memory is shared, of the devices that hold the same part one computes for all.
        twin: Sequence[int] = range(len(devices))
        if one_memory:
            first: dict[Any, int] = {}
            twin = [first.setdefault(place.boxes, k) for k, place in enumerate(places)]
        computing = sorted({twin[k] for group in groups for k in group.speakers})
        ways = self._ways(monoid)
        exact = monoid.reduces if value.dtype.kind in "iu" else ""

        def combine(group: _Group, states: Sequence[Any]) -> dict[int, Any]:
            members = group.members
            if exact and len(group.speakers) == len(members) > 1:
                together = backend.all_reduce([states[k] for k in members], [devices[k] for k in members], exact)
                if together is not None:
                    return dict(zip(members, together, strict=True))
            return all_reduce(members, group.speakers, states, ways, group.size, group.scattered and not one_memory)

        def plan(operands: Operands) -> ShardedTensor:
            columns = self._columns(operands)
            own = {k: self._run(partial, k, operands, columns) for k in computing}
            states = [own.get(t) for t in twin]
            if watched():
                first = groups[0]
                state = state_bytes(states[first.speakers[0]]) // first.size
                account(self.name, 0, True, lambda: self._records(groups, state))
            results: dict[int, Any] = {}
            for group in groups:
                results |= combine(group, states)
            if not one_memory:
                return tensor(value, apart(value, [results[k] for k in range(len(devices))]))
            if len(groups) == 1:
                return tensor(value, Storage(whole_of(results[0], value)))
            return tensor(value, Storage(arrays=tuple([whole_of(results[k], value) for k in range(len(devices))])))

        return plan

    def _groups(self, owed: tuple[str, ...]) -> list[_Group]:
        """The devices that combine their partial results, along the owed axes."""
        places, groups = self.places, []
        for members in groups_along(self.value.sharding.mesh, owed) if owed else []:
            # A shard without elements has nothing to say; where all are empty, the first says what the operator says
            # of nothing.
            full = [k for k in members if all(end > begin for box in places[k].boxes for begin, end in box)]
            speakers, size = full or members[:1], math.prod(places[members[0]].local_shape)
            scattered = size * self.value.dtype.itemsize >= SCATTERED_FROM and len(speakers) > 2
            groups.append(_Group(members, speakers, size, scattered))
        return groups

    def _records(self, groups: Sequence[_Group], state: int) -> Iterator[Transfer]:
        """What they send one another, of states of so many bytes for each element of the result."""
        devices, itemsize, one_memory = self.devices, self.value.dtype.itemsize, self.backend.one_memory
        for g in groups:
            sent = messages(g.members, g.speakers, g.size * state, g.size * itemsize, g.scattered)
            for source, destination, size in sent:
                yield Transfer(size, 0 if one_memory else size, devices[source], devices[destination], self.name, True)

    def _ways(self, monoid: Monoid) -> Ways:
        """What devices do with partial results."""
        value, backend, places, devices, params = self.value, self.backend, self.places, self.devices, self.params
        one_memory, xp = backend.one_memory, backend.xp

        def carry(state: Any, source: int, destination: int) -> Any:
            if one_memory or source == destination:
                return state
            return _each_array(lambda array: send(array, devices[source], devices[destination]), state)

        def merge(k: int, earlier: Any, later: Any) -> Any:
            with backend.on(devices[k]):
                return monoid.merge(xp, earlier, later)

        def finish(k: int, state: Any) -> Any:
            with backend.on(devices[k]):
                result = _typed(backend, monoid.finish(xp, places[k], state, **params), value)
                return result if one_memory else backend.contiguous(result)  # like what the others are sent

        def cut(k: int, state: Any, begin: int, end: int) -> Any:
            with backend.on(devices[k]):
                return _each_array(lambda array: backend.view(xp.reshape(array, (-1,)), slice(begin, end)), state)

        def join(k: int, parts: list[Any]) -> Any:
            with backend.on(devices[k]):
                return xp.reshape(xp.concat(parts), places[k].local_shape)

        return Ways(carry, merge, finish, cut, join)

    def _columns(self, operands: Operands) -> list[Sequence[Any] | None]:
        """For each operand one array per device (where memory is shared, views of the whole); None for scalars."""
        columns: list[Sequence[Any] | None] = []
        for i, (x, move) in enumerate(zip(operands, self.moves, strict=True)):
            if move is None:
                columns.append(None)
            elif self.backend.one_memory:
                whole = move.whole(x, self.name)
                columns.append([whole[index] for index in self.indices[i]])
            else:
                columns.append(move.shards(x, self.name))
        return columns

    def _run(
        self, kernel: Callable[..., Any], k: int, operands: Operands, columns: Sequence[Sequence[Any] | None]
    ) -> Any:
        """What a kernel gives on the device at position ``k``: in the dtype that was promised, where it is the result
        itself.
        """
        xp = self.backend.xp
        with self.backend.on(self.devices[k]):
            arrays = [x if column is None else column[k] for x, column in zip(operands, columns, strict=True)]
            result = kernel(xp, self.places[k], *arrays, **self.params)
            return _typed(self.backend, result, self.value) if kernel is self.kernel else result


def _typed(backend: Backend, array: Any, value: Aval) -> Any:
    """A kernel's result as an array of the dtype that was promised: libraries differ in what they promote to."""
    if isinstance(array, np.generic) or not hasattr(array, "dtype"):
        return backend.xp.asarray(array, dtype=value.dtype)
    return as_dtype(backend, array, value.dtype)


def _each_array(function: Callable[[Any], Any], state: Any) -> Any:
    """A state with another array in the place of each of its own; counts stay what they are."""
    if isinstance(state, tuple):
        return tuple([_each_array(function, part) for part in state])
    return state if type(state) in (int, float) else function(state)  # np.float64 is a float, too


# -- operators that only move ----------------------------------------------------------------------


def _mover_plan(op: Op, kinds: Sequence[Kind], params: Named, mesh: Mesh) -> Plan:
    assert op.mover is not None
    arrays = [k if isinstance(k, (Aval, HostAval)) else _as_array(k) for k in kinds]
    moved: Moved = op.mover(arrays, mesh, **params)
    dtype = np.result_type(*[k.dtype for k in arrays])
    value = aval(moved.shape, dtype, moved.sharding, any(k.committed for k in arrays if isinstance(k, Aval)))
    first = arrival(arrays[0], moved.target) if moved.target else None
    sources, result = ([a.grid for a in arrays], value.grid) if moved.flat is None else ([moved.flat[0]], moved.flat[1])
    movement = functools.cache(lambda: Movement(moved.regions, sources, result))

    def announce(copied: bool) -> None:
        if moved.note and movement().size:
            logger.info(moved.note)
        if watched():
            n, said = dtype.itemsize, moved.explicit
            account(op.name, movement().size * n, said, lambda: movement().records(n, copied, op.name, said))

    at_home = moved.as_pieces or {d for grid in (*sources, result) for d in grid.devices[:2]} == {result.devices[0]}

    imagined_move = Move(moved.regions, sources, result, dtype.itemsize, op.name, moved.explicit)

    def imagine(operands: Operands) -> ShardedTensor:
        for x in operands:
            first.whole(x, op.name) if first else imagined(x)
        if not at_home and watched():
            imagined_move.announce()
        return tensor(value, Storage(Ghost(value.shape, value.dtype)))

    if value.backend.simulated:
        return imagine

    def once(operands: Operands) -> ShardedTensor:
        wholes = [first.whole(operands[0], op.name)] if first else [gather(x, op.name) for x in operands]
        if moved.as_pieces:  # nothing moves; they are joined when somebody wants the whole
            return tensor(value, Storage(arrays=tuple([moved.as_pieces(whole) for whole in wholes])))
        announce(moved.copies)
        return tensor(value, Storage(whole_of(moved.whole(*wholes), value)))

    def per_shard(operands: Operands) -> ShardedTensor:
        columns = [first.shards(operands[0], op.name)] if first else [pieces_of(x) for x in operands]
        if moved.as_pieces:
            pieces = [_as_piece(moved, c[0], d) for c, d in zip(columns, value.grid.devices, strict=True)]
            return tensor(value, apart(value, pieces))
        announce(True)
        if moved.flat:
            columns = [_reshaped(columns[0], sources[0].devices, sources[0].shape)]
        results = movement().run(columns, dtype)
        if moved.flat:
            results = _reshaped(results, result.devices, value.grid.shape)
        return tensor(value, apart(value, results))

    return once if value.backend.one_memory else per_shard


def _as_piece(moved: Moved, array: Any, device: Device) -> Any:
    assert moved.as_pieces is not None
    with backend_of(device).on(device):
        return moved.as_pieces(array)


def _reshaped(arrays: Sequence[Any], devices: Sequence[Device], shape: Callable[[int], Shape]) -> tuple[Any, ...]:
    out = []
    for k, (array, device) in enumerate(zip(arrays, devices, strict=True)):
        backend = backend_of(device)
        with backend.on(device):
            out.append(backend.xp.reshape(array, shape(k)))
    return tuple(out)


# -- operators that create -------------------------------------------------------------------------


def _creation_plan(op: Op, kinds: Sequence[Kind], params: Named) -> Plan:
    assert op.kernel is not None
    device = params.pop("device")
    shape, dtype = op.rule(kinds, **params)
    prototype = op.name.endswith("_like")  # the first operand then says shape, dtype and layout, and no more
    committed = device is not None
    if prototype and device is None and isinstance(kinds[0], Aval):
        device, committed = kinds[0].sharding, kinds[0].committed
    sharding = as_sharding(default_mesh() if device is None else device, len(shape), op.name)
    value = aval(shape, dtype, sharding, committed)
    if value.backend.simulated:
        return lambda operands: own(tensor(value, Storage(Ghost(value.shape, value.dtype))))
    work = Work(op, value, params, [None] * len(kinds), _places(value, [None] * len(kinds), [()] * len(kinds)))
    run = work.once() if value.backend.one_memory else work.per_shard()
    hosted = value.nbytes if value.backend.one_memory else 0

    def plan(operands: Operands) -> ShardedTensor:
        reserve(hosted)
        fills = operands[1:] if prototype else operands
        values = tuple([x if type(x) in SCALARS else gather(x, op.name)[()] for x in fills])
        return own(run((None, *values) if prototype else values))

    return plan
