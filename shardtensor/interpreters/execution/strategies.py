"""One operator on operands of known kinds, and the ways to run it: once over whole buffers, in passes over blocks, or
once per shard, with the partial results then combined where any are owed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.protocol import Backend, function_of
from shardtensor.communication.all_reduce import CHUNKED_FROM, ReduceOps, all_reduce, messages
from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import OperandTransfer, as_dtype, send, whole_array
from shardtensor.communication.transfer_log import TransferBatch, is_recording, record_transfer
from shardtensor.core import Op, Operands
from shardtensor.functions.monoids import MONOIDS, Monoid, element_bytes, state_bytes
from shardtensor.host.blockwise import FUNCTIONS, elementwise
from shardtensor.host.memory_pool import POOLED_FROM
from shardtensor.interpreters.execution.blocked_reduction import BlockedReduction, is_long, matmul
from shardtensor.sharding.mesh import groups_along
from shardtensor.sharding.rules import Rule, name_sizes
from shardtensor.sharding.shard_context import Place
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval, whole_of

Plan = Callable[[Operands], Any]
Named = dict[str, Any]
Moves = Sequence[OperandTransfer | None]


class _Group(NamedTuple):
    """Devices whose partial results become one.

    Attributes:
        members: their positions, in mesh order.
        speakers: of those that have something to say.
        size: elements of the result.
        scattered: whether each combines a chunk of it (see `shardtensor.communication.all_reduce.all_reduce`).
    """

    members: list[int]
    contributors: list[int]
    size: int
    chunked: bool


class Strategies:
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
        if self.backend.shared_memory:
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
            shares = list({places[g.members[0]].box: [places[k] for k in g.contributors] for g in groups}.values())
        kernel = matmul if name == "matmul" else self.kernel
        said = "reduce" if len(moves) == 1 else "dot" if name == "tensordot" else name
        fold = BlockedReduction(said, combine, rule, sizes, value, places[0], kernel, self.params, shares)
        state = element_bytes(combine, value, moves[0].source, self.params)  # type: ignore[union-attr]

        def plan(operands: Operands) -> ShardedTensor:
            wholes = [m.whole(x, name) for x, m in zip(operands, moves, strict=True)]  # type: ignore[union-attr]
            if owed and is_recording():
                record_transfer(name, 0, True, lambda: self._records(groups, state))
            return tensor(value, Storage(whole_of(fold(*wholes), value)))

        return plan

    def per_shard(self) -> Plan:
        """Once per shard, each on its own device."""
        positions = range(len(self.devices))

        def plan(operands: Operands) -> ShardedTensor:
            columns = self._columns(operands)
            arrays = [self._run(self.kernel, k, operands, columns) for k in positions]
            return tensor(self.value, offloaded(self.value, arrays))

        return plan

    def combined(self, monoid: Monoid, owed: tuple[str, ...]) -> Plan:
        """Once per shard; then the partial results along the owed axes become one, in mesh order."""
        value, backend, places, devices = self.value, self.backend, self.places, self.devices
        shared_memory = backend.shared_memory
        partial = monoid.partial or self.kernel
        groups = self._groups(owed)
        # Where memory is shared, of the devices that hold the same part one computes for all.
        twin: Sequence[int] = range(len(devices))
        if shared_memory:
            first: dict[Any, int] = {}
            twin = [first.setdefault(place.boxes, k) for k, place in enumerate(places)]
        computing = sorted({twin[k] for group in groups for k in group.contributors})
        ways = self._ways(monoid)
        exact = monoid.reduces if value.dtype.kind in "iu" else ""

        def combine(group: _Group, states: Sequence[Any]) -> dict[int, Any]:
            members = group.members
            if exact and len(group.contributors) == len(members) > 1:
                together = backend.all_reduce([states[k] for k in members], [devices[k] for k in members], exact)
                if together is not None:
                    return dict(zip(members, together, strict=True))
            return all_reduce(
                members, group.contributors, states, ways, group.size, group.chunked and not shared_memory
            )

        def plan(operands: Operands) -> ShardedTensor:
            columns = self._columns(operands)
            own = {k: self._run(partial, k, operands, columns) for k in computing}
            states = [own.get(t) for t in twin]
            if is_recording():
                first = groups[0]
                state = state_bytes(states[first.contributors[0]]) // first.size
                record_transfer(self.name, 0, True, lambda: self._records(groups, state))
            results: dict[int, Any] = {}
            for group in groups:
                results |= combine(group, states)
            if not shared_memory:
                return tensor(value, offloaded(value, [results[k] for k in range(len(devices))]))
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
            contributors, size = full or members[:1], math.prod(places[members[0]].local_shape)
            chunked = size * self.value.dtype.itemsize >= CHUNKED_FROM and len(contributors) > 2
            groups.append(_Group(members, contributors, size, chunked))
        return groups

    def _records(self, groups: Sequence[_Group], state: int) -> TransferBatch:
        """What they send one another, of states of so many bytes for each element of the result."""
        itemsize = self.value.dtype.itemsize
        sent = [messages(g.members, g.contributors, g.size * state, g.size * itemsize, g.chunked) for g in groups]
        sources, destinations, sizes = np.array(list(itertools.chain(*sent)), np.int64).reshape(-1, 3).T
        return TransferBatch(
            sources, destinations, sizes, self.devices.__getitem__,
            operator=self.name, explicit=True, copied=not self.backend.shared_memory,
        )  # fmt: skip

    def _ways(self, monoid: Monoid) -> ReduceOps:
        """What devices do with partial results."""
        value, backend, places, devices, params = self.value, self.backend, self.places, self.devices, self.params
        shared_memory, xp = backend.shared_memory, backend.xp

        def carry(state: Any, source: int, destination: int) -> Any:
            if shared_memory or source == destination:
                return state
            return _each_array(lambda array: send(array, devices[source], devices[destination]), state)

        def merge(k: int, earlier: Any, later: Any) -> Any:
            with backend.on(devices[k]):
                return monoid.merge(xp, earlier, later)

        def finish(k: int, state: Any) -> Any:
            with backend.on(devices[k]):
                result = _typed(backend, monoid.finish(xp, places[k], state, **params), value)
                return result if shared_memory else backend.contiguous(result)  # like what the others are sent

        def cut(k: int, state: Any, begin: int, end: int) -> Any:
            with backend.on(devices[k]):
                return _each_array(lambda array: backend.view(xp.reshape(array, (-1,)), slice(begin, end)), state)

        def join(k: int, parts: list[Any]) -> Any:
            with backend.on(devices[k]):
                return xp.reshape(xp.concat(parts), places[k].local_shape)

        return ReduceOps(carry, merge, finish, cut, join)

    def _columns(self, operands: Operands) -> list[Sequence[Any] | None]:
        """For each operand one array per device (where memory is shared, views of the whole); None for scalars."""
        columns: list[Sequence[Any] | None] = []
        for i, (x, move) in enumerate(zip(operands, self.moves, strict=True)):
            if move is None:
                columns.append(None)
            elif self.backend.shared_memory:
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
