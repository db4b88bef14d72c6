"""The strategies that execute one operator on operands of known avals.

An operator runs once over whole buffers, in passes over blocks, or once per cell (see `shardtensor.sharding.cells`);
or once per shard, and the partial results are then combined along the mesh axes that split a reduced dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.functions import function_of
from shardtensor.backend.registry import backend_of, is_remote
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.all_reduce import Group, ReduceOps, all_reduce, handed_on
from shardtensor.communication.array_communicator import each_array, reduce_ops
from shardtensor.communication.merging import merged
from shardtensor.communication.messages import bring
from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import OperandTransfer, buffers_of, whole_array
from shardtensor.core import Op, Operands
from shardtensor.functions.building.monoids import MONOIDS, Monoid, sample_state
from shardtensor.host.blockwise import BYTE, LONG, elementwise
from shardtensor.host.fork import cached_property
from shardtensor.host.fp_errors import FloatingPointErrors
from shardtensor.host.memory_pool import POOLED_FROM
from shardtensor.host.threads import each
from shardtensor.interpreters.execution.blocked_reduction import BlockedReduction, Share, in_one_array, is_long
from shardtensor.interpreters.execution.combination import reduction_groups
from shardtensor.sharding.cells import Part
from shardtensor.sharding.rules import Rule, name_sizes
from shardtensor.sharding.shard_context import Box, ShardContext
from shardtensor.tensor.tensor import ShardedTensor, tensor, tensor_of
from shardtensor.tensor.value import Aval, memories_of, views, whole_of

Run = Callable[[Operands], Any]
"""The function of a plan: takes the operands and returns the result."""
Named = dict[str, Any]
Moves = Sequence[OperandTransfer | None]


class Strategies:
    """The strategies for one operator on operands of known avals. Each strategy is a method that returns a plan.

    Args:
        op: the operator.
        value: the aval of the result.
        params: the operator's parameters by name.
        moves: the transfer of each operand into the layout that the rule requires; None for a scalar.
        contexts: the position of each device's shards within the operands and the result, in mesh order.

    Attributes:
        of_buffers: where the plan that was made last computes the result from whole buffers of the host: the function
            that does, of the buffers in place of tensors. It returns a buffer, or None where another strategy has to
            run. Otherwise None.
    """

    def __init__(
        self,
        op: Op,
        value: Aval,
        params: Named,
        moves: Moves,
        contexts: Sequence[ShardContext],
    ) -> None:
        self.op = op
        self.name = op.name
        self.value = value
        self.backend = value.backend
        self.devices = value.sharding.mesh.flat
        self.params = params
        self.moves = moves
        self.contexts = contexts
        self.own_kernel = op.parts.kernel
        self.of_buffers: Callable[..., Any] | None = None
        self.kernel: Callable[..., Any] = op.parts.kernel or self._from_namespace
        # Whether the bits of a reduction depend on how its elements are grouped.
        self._is_grouped = op.combine is not None and value.dtype.kind not in MONOIDS[op.combine].exact
        self._blocks: Callable[[ShardContext], BlockedReduction] | None = None

    def _from_namespace(self, xp: Any, context: ShardContext, *arrays: Any, **params: Any) -> Any:
        return self._function(*arrays, **params)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        """The operator in the backend's namespace. It is looked up at first use, since a backend may lack it."""
        return function_of(self.backend, self.name)

    def whole(self) -> Run:
        """Returns the plan that runs the operator once over whole buffers of the host."""
        name, value, moves, is_ufunc, run = self.name, self.value, self.moves, self.op.is_ufunc, self._on_whole()
        everything_stays, dtype = all(m is None or m.stays for m in moves), value.dtype

        def of_buffers(*arrays: Any) -> Any:
            result = run(*arrays)
            return result if type(result) is np.ndarray and result.dtype is dtype else whole_of(result, value)

        if everything_stays or all(m is None or m.keeps_buffers for m in moves):
            self.of_buffers = of_buffers

        def run_plan(operands: Operands) -> ShardedTensor:
            if everything_stays:
                arrays = []
                for x in operands:
                    if type(x) is ShardedTensor:
                        buffers = x._storage.buffers
                        arrays.append(buffers[0] if len(buffers) == 1 else whole_array(x, name))
                    else:
                        arrays.append(x)
            else:
                arrays = [x if m is None else m.whole(x, name) for x, m in zip(operands, moves, strict=True)]
            whole = run(*arrays)
            if type(whole) is not np.ndarray or whole.dtype is not dtype:
                whole = whole_of(whole, value)
            return tensor_of(value, (whole,), ([],) if is_ufunc else ())  # NumPy's ufuncs return new arrays.

        return run_plan

    def _on_whole(self) -> Callable[..., Any]:
        """Returns the operator as a function of whole buffers, which computes large elementwise results in blocks."""
        value, op = self.value, self.op
        if value.nbytes >= POOLED_FROM and (op.is_ufunc or op.parts.blockwise or op.parts.composed) and not op.combine:
            function = op.parts.blockwise or self._function
            return lambda *arrays: elementwise(function, arrays, value.shape, value.dtype, self.params)
        run = self.own_kernel or self._function
        if self.own_kernel:
            context = ShardContext.everywhere(value.shape, self.contexts[0].shapes, value.dtype)
            run = functools.partial(run, self.backend.xp, context)
        return functools.partial(run, **self.params) if self.params else run

    def in_blocks(self, rule: Rule, partial_axes: tuple[str, ...]) -> Run | None:
        """Returns the plan that runs a long reduction or product block by block, for arrays on the host.

        None for other operators, short operands, scalar operands and empty results.

        Args:
            rule: names the dimensions of the operands and of the result.
            partial_axes: the mesh axes along which partial results are combined.
        """
        value, moves, name = self.value, self.moves, self.name
        if not self._is_long(rule):
            return None
        shares: list[Share] | None = None
        if partial_axes and self._is_grouped:
            contexts = self.contexts
            groups = {contexts[g.members[0]].box: g for g in reduction_groups(value, moves, partial_axes)}
            shares = [([contexts[k] for k in g.contributors], g.tree) for g in groups.values()]
        reduction = self._blocked(rule, shares)

        def run_plan(operands: Operands) -> ShardedTensor:
            wholes = [m.whole(x, name) for x, m in zip(operands, moves, strict=True)]  # type: ignore[union-attr]
            return tensor_of(value, (whole_of(reduction(*wholes), value),))

        return run_plan

    def divide(self, rule: Rule) -> None:
        """Lets `run` compute a long reduction or product of processes' host arrays in the blocks of `in_blocks`."""
        if self._is_long(rule):
            self._blocks = functools.cache(lambda held: self._blocked(rule, None, held))

    def _is_long(self, rule: Rule) -> bool:
        combine, moves = self.op.combine, self.moves
        if combine is None or None in moves or "unblocked" in self.op.tags or not self.value.size:
            return False
        return is_long(combine, rule, name_sizes(rule, self.contexts[0].shapes))

    def _blocked(
        self, rule: Rule, shares: Sequence[Share] | None, held: ShardContext | None = None
    ) -> BlockedReduction:
        op, context = self.op, self.contexts[0]
        kernel, ufunc = op.parts.blockwise or self.kernel, "reduce" if len(self.moves) == 1 else op.ufunc
        sizes, combine = name_sizes(rule, context.shapes), op.combine or ""
        return BlockedReduction(ufunc, combine, rule, sizes, self.value, context, kernel, self.params, shares, held)

    def per_cell(self) -> Run:
        """Returns the plan that runs the operator once per cell of the result, on the first of its devices; or once per
        shard, if the parts of an operand that belong to a cell of the result are not in one cell of the operand.
        """
        value, backend, name, moves = self.value, self.backend, self.name, self.moves
        if value.spans and (in_own_cell := self._in_own_cell()):
            return in_own_cell
        groups = value.cells.positions
        if any(move is not None and move.cells.parts(groups) is None for move in moves):
            groups = [[k] for k in range(len(self.devices))]
        devices, contexts = [self.devices[group[0]] for group in groups], [self._around(group) for group in groups]
        parts = [() if move is None else move.cells.parts(groups) or () for move in moves]
        if value.spans:
            return self._per_cell_across(groups, devices, contexts, parts)
        whole = [all(part == (n, None) for n, part in enumerate(there)) for there in parts]
        launch = backend.launcher(devices)
        everything_stays = all(move is None or move.stays for move in moves)
        new = self.own_kernel is None and not value.offloaded and backend.allocates(name)
        calls = functools.cache(
            lambda: [self._function if new and not self.params else self._call(c) for c in contexts]
        )

        def operand(x: Any, move: OperandTransfer | None, there: Sequence[Part], in_order: bool) -> Iterable[Any]:
            if move is None:
                return itertools.repeat(x, len(devices))
            if in_order and everything_stays and len(buffers := x._storage.buffers) == len(devices):
                return buffers  # type: ignore[no-any-return]
            buffers = move.buffers(x, name)
            return buffers if in_order else views(backend, devices, buffers, there)

        def run_plan(operands: Operands) -> ShardedTensor:
            columns = list(map(operand, operands, moves, parts, whole))
            results = launch(calls(), zip(*columns, strict=True) if columns else [()] * len(devices))
            if not new:
                return tensor(value, offloaded(value, results))
            if results[0].dtype is not value.dtype:  # It is the same dtype on all devices.
                results = launch([functools.partial(whole_of, value=value)] * len(results), zip(results, strict=True))
            return tensor_of(value, tuple(results), tuple([[] for _ in results]))

        return run_plan

    def _per_cell_across(
        self,
        groups: Sequence[Sequence[int]],
        devices: Sequence[Device],
        contexts: Sequence[ShardContext],
        parts: Sequence[Sequence[Part]],
    ) -> Run:
        """Returns the plan of `per_cell` for devices of several processes."""
        value, backend, kernel, name, moves = self.value, self.backend, self.kernel, self.name, self.moves
        own = next((d for d in self.devices if not is_remote(d)), None)
        # NumPy's ufuncs return new arrays.
        new = self.op.is_ufunc and own is not None and backend_of(own).on_host

        def run_plan(operands: Operands) -> ShardedTensor:
            columns = [
                [x] * len(groups) if move is None else views(backend, devices, move.buffers(x, name), there)
                for x, move, there in zip(operands, moves, parts, strict=True)
            ]
            rows = zip(*columns, strict=True) if columns else [()] * len(groups)
            results = [
                self.run(kernel, group[0], row, context)
                for group, row, context in zip(groups, rows, contexts, strict=True)
            ]
            if new:
                return tensor_of(value, tuple(results), tuple([[] for _ in results]))
            return tensor(value, offloaded(value, results))

        return run_plan

    def _call(self, context: ShardContext) -> Callable[..., Any]:
        """Returns the operator as a function of the arrays of one device, which is current when it is called."""
        value, dtype, params = self.value, self.value.dtype, self.params
        function = functools.partial(self.own_kernel, self.backend.xp, context) if self.own_kernel else self._function

        def call(*arrays: Any) -> Any:
            result = function(*arrays, **params)
            return result if getattr(result, "dtype", None) is dtype else whole_of(result, value)

        return call

    def _in_own_cell(self) -> Run | None:
        """Returns the plan of an operator that moves nothing, where this process has one cell of the result, and of the
        operands; otherwise None.
        """
        value, moves, name, is_ufunc = self.value, self.moves, self.name, self.op.is_ufunc
        groups = value.cells.positions
        here = [n for n, group in enumerate(groups) if not is_remote(self.devices[group[0]])]
        whole = [(n, None) for n in range(len(groups))]
        if len(here) != 1 or any(m is not None and not (m.stays and m.cells.parts(groups) == whole) for m in moves):
            return None
        (n,) = here
        device, context = self.devices[groups[n][0]], self._around(groups[n])
        backend = backend_of(device)
        function: Callable[..., Any]
        if backend.on_host and (self._blocks or self._is_grouped):
            function = lambda *arrays: self._on_host(self.kernel, context, arrays)  # noqa: E731
        elif self.own_kernel:
            function = functools.partial(self.own_kernel, backend.xp, context, **self.params)
        else:
            function = functools.partial(function_of(backend, name), **self.params)
        remote = [RemoteArray(value.cells.grid.shape(k), value.dtype) for k in range(len(groups))]
        before, after = tuple(remote[:n]), tuple(remote[n + 1 :])
        count, on_host = len(groups), backend.on_host

        def run_plan(operands: Operands) -> ShardedTensor:
            arrays = []
            for x in operands:
                if type(x) is ShardedTensor:
                    buffers = x._storage.buffers
                    arrays.append((buffers if len(buffers) == count else buffers_of(x, name))[n])
                else:
                    arrays.append(x)
            if on_host:
                result = function(*arrays)
                if type(result) is not np.ndarray or result.dtype is not value.dtype:
                    result = whole_of(result, value)
                if is_ufunc:  # NumPy's ufuncs return new arrays.
                    return tensor_of(value, (*before, result, *after), tuple([[] for _ in remote]))
                return tensor_of(value, (*before, result, *after))
            with backend.on(device):
                result = whole_of(function(*arrays), value)
            return tensor(value, offloaded(value, (*before, result, *after)))

        return run_plan

    @property
    def _nbytes(self) -> int:
        """The bytes of all operands that are arrays."""
        sources = [move.source for move in self.moves if move is not None]
        return sum([math.prod(source.shape) * source.dtype.itemsize for source in sources])

    def _around(self, group: Sequence[int]) -> ShardContext:
        """Returns the context of the boxes that the shards of a group of devices tile."""
        some = [self.contexts[k] for k in group]
        boxes = [_around([c.boxes[i] for c in some]) for i in range(len(self.moves))]
        return dataclasses.replace(some[0], box=_around([c.box for c in some]), boxes=tuple(boxes))

    def reduce(self, monoid: Monoid, partial_axes: tuple[str, ...]) -> Run:
        """Returns the plan that runs the operator once per shard and combines the partial results along their tree.

        Of replicas in one memory one is computed, and groups that hold the same parts in the same memories share one
        result. Where the grouping of elements does not change a result, the shards in one memory are one.

        Args:
            monoid: how partial results are computed, merged and finished.
            partial_axes: the mesh axes along which partial results are combined.
        """
        value = self.value
        groups: Sequence[Group] = reduction_groups(value, self.moves, partial_axes)
        partial, memories, first = monoid.partial or self.kernel, memories_of(value.sharding), dict[Any, int]()
        tiles: dict[int, Sequence[int]] = {}
        if value.dtype.kind in monoid.exact and not value.spans and value.memory is None:
            groups, tiles = self._by_memory(groups, memories)
        contexts = [self._around(tiles[k]) if k in tiles else c for k, c in enumerate(self.contexts)]
        held = [(memory, context.boxes) for memory, context in zip(memories, contexts, strict=True)]
        owner = [first.setdefault(parts, k) for k, parts in enumerate(held)]
        computing = sorted({owner[k] for group in groups for k in group.contributors})
        tiled = [tiles.get(k, [k]) for k in computing]
        there = [() if move is None else move.cells.parts(tiled) or () for move in self.moves] if tiles else []
        cells = value.cells
        whole = all(index is None for _, index in cells.shards)
        kept = [group[0] for group in cells.positions] if whole else range(len(self.devices))
        combine_group = self._combination(monoid, frozenset(kept))

        def across(operands: Operands) -> ShardedTensor:
            rows = self.rows(operands)
            computed = elsewhere | {k: self.run(partial, k, rows[k]) for k in here}
            results = reduced({k: computed[source] for k, source in sources})
            buffers = tuple([results.get(first, other) for first, other in places])
            return tensor_of(value, buffers, tuple([[] for _ in buffers]))  # Reductions return new arrays.

        if value.spans:
            # Few programs need it.
            from shardtensor.communication.between_processes.short_all_reduce import AllReduceAcross

            ops = self.reduce_ops(monoid)
            # Of groups with the same states in the same memories, one combines them.
            known: dict[Any, Group] = {}
            same: dict[int, int] = {}
            for group in groups:
                key = tuple([owner[k] for k in group.contributors]), tuple([memories[k] for k in group.members])
                same |= zip(group.members, known.setdefault(key, group).members, strict=True)
            distinct = list(known.values())
            reduced = AllReduceAcross(distinct, ops, self.devices, value.dtype, self.name)
            here = [k for k in computing if not is_remote(self.devices[k])]
            elsewhere = {k: self.state_of(partial, k) for k in computing if is_remote(self.devices[k])}
            sources = [(k, owner[k]) for group in distinct for k in group.contributors]
            places = [(same[k], self.state_of(self.kernel, k)) for k in kept]
            return across

        def rows_of(operands: Operands) -> Mapping[int, Sequence[Any]]:
            if not tiles:
                return dict(enumerate(self.rows(operands)))
            places = [self.devices[k] for k in computing]
            columns = [
                [x] * len(places) if move is None else views(self.backend, places, move.buffers(x, self.name), parts)
                for x, move, parts in zip(operands, self.moves, there, strict=True)
            ]
            return dict(zip(computing, zip(*columns, strict=True), strict=True))

        # Other operators are computed in blocks, or by BLAS, which has threads of its own.
        in_threads = self.backend.on_host and "unblocked" in self.op.tags and BYTE * self._nbytes > LONG

        def run_plan(operands: Operands) -> ShardedTensor:
            rows, computed = rows_of(operands), dict[int, Any]()

            def compute(n: int) -> None:
                k = computing[n]
                computed[k] = self.run(partial, k, rows[k], contexts[k])

            if in_threads:
                with FloatingPointErrors(self.name):
                    each(compute, len(computing))
            else:
                for n in range(len(computing)):
                    compute(n)
            combined: dict[Any, Any] = {}
            results: dict[int, Any] = {}
            for group in groups:
                members, contributors = group.members, group.contributors
                key = tuple([owner[k] for k in contributors]), tuple([memories[k] for k in members])
                if key not in combined:
                    arrays = combine_group(group, {k: computed[owner[k]] for k in contributors})
                    combined[key] = [arrays.get(k) for k in members]
                results |= zip(members, combined[key], strict=True)
            return tensor(value, offloaded(value, [results[k] for k in kept]))

        return run_plan

    def _by_memory(
        self, groups: Sequence[Group], memories: Sequence[Any]
    ) -> tuple[Sequence[Group], dict[int, Sequence[int]]]:
        """Returns the groups with one contributor in each memory, and the positions of the shards for which each of
        them stands; nothing of the latter if the shards do not tile a box of one buffer in each memory.
        """
        tiles: dict[int, Sequence[int]] = {}
        per_memory = []
        for group in groups:
            here: dict[Any, list[int]] = {}
            for k in group.contributors:
                here.setdefault(memories[k], []).append(k)
            tiles |= {tile[0]: tile for tile in here.values()}
            firsts = {tile[0] for tile in here.values()}
            per_memory.append(group._replace(contributes=tuple([k in firsts for k in group.members])))
        if any(move is not None and move.cells.parts(list(tiles.values())) is None for move in self.moves):
            return groups, {}
        return per_memory, tiles

    def _combination(
        self, monoid: Monoid, kept: frozenset[int]
    ) -> Callable[[Group, Mapping[int, Any]], Mapping[int, Any]]:
        """Returns the function that combines the states of a group to the result of each device in ``kept``, by
        position.
        """
        value, backend, devices, ops = self.value, self.backend, self.devices, self.reduce_ops(monoid)
        apart, kind = value.memory is None, value.dtype.kind
        exact = monoid.reduces if apart and kind in "iu" and not monoid.partial else ""
        together = monoid.together if apart and kind in monoid.exact and not value.offloaded else None
        ufunc = "" if apart or monoid.partial else monoid.reduces

        def combine_group(group: Group, states: Mapping[int, Any]) -> Mapping[int, Any]:
            contributors, receivers = group.contributors, [k for k in group.members if k in kept]
            if exact and contributors == receivers and len(receivers) > 1:
                results = backend.all_reduce([states[k] for k in receivers], [devices[k] for k in receivers], exact)
                if results is not None:
                    return dict(zip(receivers, results, strict=True))
            few, leader = len(contributors) < (2 if monoid.partial else 3), contributors[0]  # Two arrays are one merge.
            if ufunc:
                with backend.on(devices[leader]):
                    state = merged(backend, ufunc, group.tree, [states[k] for k in contributors])
                return dict.fromkeys(receivers, ops.finish(leader, state))
            if together is None or few or group.chunked:
                return all_reduce(group if apart else group._replace(chunked=False), states, ops, receivers)
            state = self._collected(together, [states[k] for k in contributors], [devices[k] for k in contributors])
            return handed_on({leader: ops.finish(leader, state)}, leader, receivers, ops)

        return combine_group

    def _collected(self, together: Callable[..., Any], states: Sequence[Any], devices: Sequence[Device]) -> Any:
        """Combines the states of several devices at once, on the first of them."""
        backend = self.backend
        xp, dtype = backend.xp, self.value.dtype

        def row(array: Any) -> Any:
            return xp.reshape(backend.contiguous(array), (1, *array.shape))

        columns = list(zip(*states, strict=True)) if isinstance(states[0], tuple) else [states]
        rows = [backend.launcher(devices)([row] * len(devices), [(array,) for array in column]) for column in columns]
        with backend.on(devices[0]):
            return together(xp, *[backend.collect(arrays, devices, devices[0]) for arrays in rows], dtype=dtype)

    def reduce_ops(self, monoid: Monoid) -> ReduceOps:
        """Returns the operations of an all-reduce on the states of a monoid."""
        value, backend, contexts, devices, params = self.value, self.backend, self.contexts, self.devices, self.params
        # Only the process of a device merges on it.
        spaces = [(backend_of(d) if value.spans and not is_remote(d) else backend).xp for d in devices]

        def carry(array: Any, source: int, destination: int) -> Any:
            return bring(array, devices[source], devices[destination])

        def merge(k: int, earlier: Any, later: Any) -> Any:
            return monoid.merge(spaces[k], earlier, later)

        def finish(k: int, state: Any) -> Any:
            # The other devices receive a contiguous copy, and all of them must have the same memory layout.
            return backend.contiguous(whole_of(monoid.finish(spaces[k], contexts[k], state, **params), value))

        return reduce_ops(devices, carry, merge, finish, lambda k: contexts[k].local_shape)

    def rows(self, operands: Operands) -> Sequence[Sequence[Any]]:
        """Returns for each device its arrays of the operands, which are views of buffers of cells; a scalar itself."""
        columns: list[Sequence[Any]] = []
        for x, move in zip(operands, self.moves, strict=True):
            columns.append([x] * len(self.devices) if move is None else move.shards(x, self.name))
        return list(zip(*columns, strict=True)) if columns else [()] * len(self.devices)

    def run(
        self, kernel: Callable[..., Any], k: int, arrays: Sequence[Any], context: ShardContext | None = None
    ) -> Any:
        """Runs a kernel on the device at position ``k``, on its shards or on those of ``context``, and returns the
        result.

        The result of the operator's own kernel is converted to the dtype of the aval; the state of a monoid that has
        its own ``partial`` is not.
        """
        if self.value.spans:
            if is_remote(self.devices[k]):
                return self.state_of(kernel, k, context)
            backend = backend_of(self.devices[k])
        else:
            backend = self.backend
        context = context or self.contexts[k]
        with backend.on(self.devices[k]):
            if backend.on_host:
                result = self._on_host(kernel, context, arrays)
            else:
                result = kernel(backend.xp, context, *arrays, **self.params)
            return whole_of(result, self.value) if kernel is self.kernel else result

    def _on_host(self, kernel: Callable[..., Any], context: ShardContext, arrays: Sequence[Any]) -> Any:
        """Runs a kernel on host arrays, with the bits that it has in one process."""
        if self._blocks and all(array.size for array in arrays):
            reduction = self._blocks(context)
            return reduction(*arrays) if kernel is self.kernel else reduction.state(*arrays)
        if self._is_grouped:
            return in_one_array(kernel, context, arrays, self.params)
        return kernel(np, context, *arrays, **self.params)

    def state_of(self, kernel: Callable[..., Any], k: int, context: ShardContext | None = None) -> Any:
        """Returns the shapes and dtypes of what a kernel computes on a device of another process."""
        shape = (context or self.contexts[k]).local_shape
        if kernel is self.kernel:
            return RemoteArray(shape, self.value.dtype)
        return each_array(lambda array: RemoteArray(shape, array.dtype), self._sample)

    @cached_property
    def _sample(self) -> Any:
        """The state that the monoid of the operator computes from operands with one element."""
        combine, sources = self.op.combine, [m.source for m in self.moves if m is not None]
        assert combine is not None
        return sample_state(combine, self.value, sources, self.params)


def _around(boxes: Sequence[Box]) -> Box:
    """Returns the smallest box that contains boxes."""
    return tuple([(min(begin for begin, _ in ends), max(end for _, end in ends)) for ends in zip(*boxes, strict=True)])
