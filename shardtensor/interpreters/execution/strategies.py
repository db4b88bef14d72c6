"""The strategies that execute one operator on operands of known avals.

An operator runs once over whole buffers, in passes over blocks, or once per shard; partial results are then combined
along the mesh axes that split a reduced dimension.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.functions import function_of
from shardtensor.backend.registry import backend_of, is_remote, shared_memory
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.all_reduce import Group, ReduceOps, Tree, all_reduce, combine, flat_tree
from shardtensor.communication.offload import offloaded
from shardtensor.communication.schedules import Schedule
from shardtensor.communication.transfer import OperandTransfer, send, whole_array
from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import Op, Operands
from shardtensor.functions.monoids import MONOIDS, Monoid, sample_state
from shardtensor.host.blockwise import elementwise
from shardtensor.host.memory_pool import POOLED_FROM
from shardtensor.interpreters.execution.blocked_reduction import BlockedReduction, Share, is_long
from shardtensor.interpreters.execution.combination import reduction_groups
from shardtensor.sharding.layout import Grid
from shardtensor.sharding.rules import Rule, name_sizes, reduced_axes
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.storage import Storage, of_shards
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval, whole_of

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
        schedules: returns the schedules of the messages that combine partial results.
    """

    def __init__(
        self,
        op: Op,
        value: Aval,
        params: Named,
        moves: Moves,
        contexts: Sequence[ShardContext],
        schedules: Callable[[], Sequence[Schedule]] = tuple,
    ) -> None:
        self.op = op
        self.name = op.name
        self.value = value
        self.backend = value.backend
        self.devices = value.sharding.mesh.flat
        self.params = params
        self.moves = moves
        self.contexts = contexts
        self.schedules = schedules
        self.given = op.kernel
        self.indices: list[list[tuple[slice, ...]]] = []
        if value.memory is not None:
            self.indices = [[tuple([slice(*ends) for ends in p.boxes[i]]) for p in contexts] for i in range(len(moves))]
        self.kernel: Callable[..., Any] = op.kernel or self._from_namespace

    def _from_namespace(self, xp: Any, context: ShardContext, *arrays: Any, **params: Any) -> Any:
        return self._function(*arrays, **params)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        """The operator in the backend's namespace. It is looked up at first use, since a backend may lack it."""
        return function_of(self.backend, self.name)

    def whole(self) -> Run:
        """Returns the plan that runs the operator once over whole buffers, where devices share a memory."""
        name, value, moves, is_ufunc = self.name, self.value, self.moves, self.op.is_ufunc and self.backend.on_host
        run = self._on_whole() if self.backend.on_host else self._on_one_device()
        everything_stays = all(m is None or m.stays for m in moves)

        def run_plan(operands: Operands) -> ShardedTensor:
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
            storage = Storage(whole_of(run(*arrays), value))
            if is_ufunc:  # NumPy's ufuncs return new arrays.
                storage.leases = ([],)
            return tensor(value, storage)

        return run_plan

    def _on_whole(self) -> Callable[..., Any]:
        """Returns the operator as a function of whole buffers, which computes large elementwise results in blocks."""
        value, op = self.value, self.op
        if value.nbytes >= POOLED_FROM and (op.is_ufunc or op.blockwise or op.composed) and not op.combine:
            function = op.blockwise or self._function
            return lambda *arrays: elementwise(function, arrays, value.shape, value.dtype, self.params)
        run = self.given or self._function
        if self.given:
            context = ShardContext.everywhere(value.shape, self.contexts[0].shapes, value.dtype)
            run = functools.partial(run, self.backend.xp, context)
        return functools.partial(run, **self.params) if self.params else run

    def _on_one_device(self) -> Callable[..., Any]:
        """Returns the operator as a function of whole buffers in the memory of the first device, which computes it."""
        value, backend, device, kernel = self.value, self.backend, self.devices[0], self.kernel
        context = ShardContext.everywhere(value.shape, self.contexts[0].shapes, value.dtype)

        def run(*arrays: Any) -> Any:
            with backend.on(device):
                return whole_of(kernel(backend.xp, context, *arrays, **self.params), value)

        return run

    def in_blocks(self, rule: Rule, partial_axes: tuple[str, ...]) -> Run | None:
        """Returns the plan that runs a long reduction or product block by block, for arrays on the host.

        None for other operators, short operands, scalar operands and empty results.

        Args:
            rule: names the dimensions of the operands and of the result.
            partial_axes: the mesh axes along which partial results are combined.
        """
        op, value, moves, contexts, name = self.op, self.value, self.moves, self.contexts, self.name
        combine = op.combine
        if combine is None or None in moves or not op.blocks:
            return None
        sizes = name_sizes(rule, contexts[0].shapes)
        if not value.size or not is_long(combine, rule, sizes):
            return None
        shares: list[Share] | None = None
        if partial_axes and value.dtype.kind not in MONOIDS[combine].exact:
            groups = {contexts[g.members[0]].box: g for g in reduction_groups(value, moves, partial_axes)}
            shares = [([contexts[k] for k in g.contributors], g.tree) for g in groups.values()]
        kernel, ufunc = op.blockwise or self.kernel, "reduce" if len(moves) == 1 else op.ufunc
        reduction = BlockedReduction(ufunc, combine, rule, sizes, value, contexts[0], kernel, self.params, shares)

        def run_plan(operands: Operands) -> ShardedTensor:
            wholes = [m.whole(x, name) for x, m in zip(operands, moves, strict=True)]  # type: ignore[union-attr]
            self.announce()
            return tensor(value, Storage(whole_of(reduction(*wholes), value)))

        return run_plan

    def per_shard(self) -> Run:
        """Returns the plan that runs the operator once per shard, each on its own device."""
        own = next((d for d in self.devices if not is_remote(d)), None)
        # NumPy's ufuncs return new arrays.
        new = self.value.spans and self.op.is_ufunc and own is not None and backend_of(own).on_host

        def run_plan(operands: Operands) -> ShardedTensor:
            arrays = [self.run(self.kernel, k, row) for k, row in enumerate(self.rows(operands))]
            if new:
                return tensor(self.value, of_shards(arrays, tuple([[] for _ in arrays])))
            return tensor(self.value, offloaded(self.value, arrays))

        return run_plan

    def reduce(self, monoid: Monoid, partial_axes: tuple[str, ...]) -> Run:
        """Returns the plan that runs the operator once per shard and combines the partial results along their tree.

        Where devices share a memory, replicas are computed once, and groups that hold the same parts share one result.

        Args:
            monoid: how partial results are computed, merged and finished.
            partial_axes: the mesh axes along which partial results are combined.
        """
        value, groups = self.value, reduction_groups(self.value, self.moves, partial_axes)
        partial, positions = monoid.partial or self.kernel, range(len(self.devices))
        first = dict(zip(self._parts_at(reversed(positions)), reversed(positions), strict=True))
        owner = [k if value.memory is None else first[part] for k, part in enumerate(self._parts_at(positions))]
        computing = sorted({owner[k] for group in groups for k in group.contributors})
        combine_group = self._combination(monoid)

        def across(operands: Operands) -> ShardedTensor:
            from shardtensor.communication.across import all_reduce_across  # Programs of one process do not need it.

            rows = self.rows(operands)
            computed = {k: self.run(partial, k, rows[k]) for k in computing}
            self.announce()
            made = all_reduce_across(groups, computed, ops, self.devices, value.dtype, self.name)
            return tensor(
                value, of_shards([made[k] if k in made else self.state_of(self.kernel, k) for k in positions])
            )

        if value.spans:
            ops = self.reduce_ops(monoid)
            return across

        def run_plan(operands: Operands) -> ShardedTensor:
            rows = self.rows(operands)
            computed = {k: self.run(partial, k, rows[k]) for k in computing}
            self.announce()
            combined: dict[Any, Any] = {}
            results: dict[int, Any] = {}
            for group in groups:
                states = {k: computed[owner[k]] for k in group.contributors}
                if value.memory is None:
                    results |= combine_group(group, states)
                    continue
                key = tuple([owner[k] for k in group.contributors])
                if key not in combined:
                    combined[key] = combine_group(group, states)
                results |= dict.fromkeys(group.members, combined[key])
            if len(combined) == 1:
                return tensor(value, Storage(results[0]))
            return tensor(value, offloaded(value, [results[k] for k in positions]))

        return run_plan

    def _parts_at(self, positions: Iterable[int]) -> list[Any]:
        """Returns what identifies the parts of the operands at these positions."""
        return [self.contexts[k].boxes for k in positions]

    def _combination(self, monoid: Monoid) -> Callable[[Group, Mapping[int, Any]], Any]:
        """Returns the function that combines the states of a group: to one result where devices share a memory,
        otherwise to the result of each device, by position.
        """
        value, backend, devices, ops = self.value, self.backend, self.devices, self.reduce_ops(monoid)
        exact = monoid.reduces if value.dtype.kind in "iu" and not monoid.partial else ""

        def combine_shared(group: Group, states: Mapping[int, Any]) -> Any:
            contributors = group.contributors
            total = combine(
                group.tree, lambda rank: states[contributors[rank]], functools.partial(ops.merge, contributors[0])
            )
            return ops.finish(contributors[0], total)

        def combine_separate(group: Group, states: Mapping[int, Any]) -> dict[int, Any]:
            members = group.members
            if exact and len(group.contributors) == len(members) > 1:
                together = backend.all_reduce([states[k] for k in members], [devices[k] for k in members], exact)
                if together is not None:
                    return dict(zip(members, together, strict=True))
            return all_reduce(group, states, ops)

        return combine_separate if value.memory is None else combine_shared

    def reduce_in_one_pass(self, monoid: Monoid, partial_axes: tuple[str, ...], general: Run) -> Run:
        """Returns the plan that computes the partial results of all shards by one call of a ufunc, or the ``general``
        plan where that is not possible: for products, other dtypes than float32 and float64, and other layouts.

        A C-contiguous array that is split only along its first dimension is reshaped to (parts, rows of a part, other
        dimensions). Reducing the second dimension gives the partial results of all shards in one or two calls of NumPy
        (part sizes differ by at most one). NumPy reduces each part by the same inner loop as a separate array, and the
        parts are combined along their tree, so the result has the same bits as that of the general plan.
        """
        move, value, params, name = self.moves[0], self.value, self.params, self.name
        if (
            len(self.moves) > 1
            or not monoid.reduces
            or move is None
            or not move.stays
            or move.source.dtype not in ("f4", "f8")
        ):
            return general  # Complex products are rounded differently in vectorized loops than one by one.
        source = move.source
        assert isinstance(source, Aval)  # Only a tensor can stay in its layout.
        grid, gone = source.grid, reduced_axes(params.get("axis"), source.ndim)
        by_rows = 0 in gone and all(count == 1 for count in grid.counts[1:]) and _in_order(grid)
        if not by_rows or params.get("dtype") not in (None, source.dtype):
            return general
        ufunc, keepdims, rest = getattr(np, monoid.reduces), params["keepdims"], source.shape[1:]
        runs, axes = _runs(grid.offsets[0].tolist()), tuple([a + 1 for a in gone])
        count = source.size // max(value.size, 1) if monoid.partial else 0  # of a mean, whose states are sums
        tree = reduction_groups(value, self.moves, partial_axes)[0].tree
        together = functools.partial(_by_pairs if tree == flat_tree(len(tree)) else _along, ufunc, tree)

        def run_plan(operands: Operands) -> ShardedTensor:
            whole = operands[0]._storage.array
            if whole is None:
                whole = whole_array(operands[0], name)
            if not whole.flags.c_contiguous:
                return general(operands)  # type: ignore[no-any-return]
            sums = [ufunc.reduce(whole[a:b].reshape(n, -1, *rest), axis=axes, keepdims=keepdims) for a, b, n in runs]
            total = together(sums[0] if len(sums) == 1 else np.concatenate(sums))
            if keepdims:
                total = total.reshape(value.shape)
            return tensor(value, Storage(whole_of(total / count if count else total, value)))

        return run_plan

    def announce(self) -> None:
        """Records the messages that combine partial results, if a log is active."""
        if is_recording():
            for schedule in self.schedules():
                schedule.announce(copied=self.value.memory is None)

    def reduce_ops(self, monoid: Monoid) -> ReduceOps:
        """Returns the operations of an all-reduce on the states of a monoid."""
        value, backend, contexts, devices, params = self.value, self.backend, self.contexts, self.devices, self.params
        xp = backend.xp

        def carry(state: Any, source: int, destination: int) -> Any:
            if shared_memory((devices[source], devices[destination])) is not None:
                return state
            return each_array(lambda array: send(array, devices[source], devices[destination]), state)

        def merge(k: int, earlier: Any, later: Any) -> Any:
            with backend.on(devices[k]):
                return monoid.merge(xp, earlier, later)

        def finish(k: int, state: Any) -> Any:
            with backend.on(devices[k]):
                result = whole_of(monoid.finish(xp, contexts[k], state, **params), value)
                # The other devices receive a contiguous copy, and all of them must have the same memory layout.
                return backend.contiguous(result)

        def cut(k: int, state: Any, begin: int, end: int) -> Any:
            with backend.on(devices[k]):
                return each_array(lambda array: backend.view(xp.reshape(array, (-1,)), slice(begin, end)), state)

        def join(k: int, parts: list[Any]) -> Any:
            with backend.on(devices[k]):
                return xp.reshape(xp.concat(parts), contexts[k].local_shape)

        return ReduceOps(carry, merge, finish, cut, join)

    def rows(self, operands: Operands) -> Sequence[Sequence[Any]]:
        """Returns for each device its arrays of the operands, which are views where devices share a memory; a scalar
        itself.
        """
        columns: list[Sequence[Any]] = []
        for i, (x, move) in enumerate(zip(operands, self.moves, strict=True)):
            if move is None:
                columns.append([x] * len(self.devices))
            elif self.value.memory is None:
                columns.append(move.shards(x, self.name))
            else:
                whole = move.whole(x, self.name)
                with self.backend.on(self.devices[0]):
                    columns.append([self.backend.view(whole, index) for index in self.indices[i]])
        return list(zip(*columns, strict=True)) if columns else [()] * len(self.devices)

    def run(self, kernel: Callable[..., Any], k: int, arrays: Sequence[Any]) -> Any:
        """Runs a kernel on the device at position ``k`` and returns its result.

        The result of the operator's own kernel is converted to the dtype of the aval; the state of a monoid that has
        its own ``partial`` is not.
        """
        if self.value.spans:
            if is_remote(self.devices[k]):
                return self.state_of(kernel, k)
            backend = backend_of(self.devices[k])
        else:
            backend = self.backend
        with backend.on(self.devices[k]):
            result = kernel(backend.xp, self.contexts[k], *arrays, **self.params)
            return whole_of(result, self.value) if kernel is self.kernel else result

    def state_of(self, kernel: Callable[..., Any], k: int) -> Any:
        """Returns the shapes and dtypes of what a kernel computes on a device of another process."""
        shape = self.contexts[k].local_shape
        if kernel is self.kernel:
            return RemoteArray(shape, self.value.dtype)
        return each_array(lambda array: RemoteArray(shape, array.dtype), self._sample)

    @functools.cached_property
    def _sample(self) -> Any:
        """The state that the monoid of the operator computes from operands with one element."""
        combine, sources = self.op.combine, [m.source for m in self.moves if m is not None]
        assert combine is not None
        return sample_state(combine, self.value, sources, self.params)


def each_array(function: Callable[[Any], Any], state: Any) -> Any:
    """Applies ``function`` to every array of a state and returns the new state; counts are kept."""
    if isinstance(state, tuple):
        return tuple([each_array(function, part) for part in state])
    # An exact type test, because np.float64 is a subclass of float but counts as an array here.
    return state if type(state) in (int, float) else function(state)


def _by_pairs(ufunc: np.ufunc, _: Tree, parts: np.ndarray[Any, Any]) -> Any:
    """Combines ``parts`` along their first dimension, along the tree of one mesh axis: all pairs of neighbours at once,
    then all pairs of the results.
    """
    while (count := len(parts)) > 1:
        pairs = ufunc(parts[: count - 1 : 2], parts[1::2])
        parts = np.concatenate([pairs, parts[-1:]]) if count % 2 else pairs
    return parts[0]


def _along(ufunc: np.ufunc, tree: Tree, parts: np.ndarray[Any, Any]) -> Any:
    """Combines ``parts`` along their first dimension, along any tree."""
    return combine(tree, parts.__getitem__, ufunc)


def _in_order(grid: Grid) -> bool:
    """Whether mesh order, in which partial results are numbered, is the order of the parts of the first dimension."""
    return bool(np.all(np.diff(grid.parts[grid.owners(), 0]) > 0))


def _runs(bounds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns (begin, end, number of parts) for each run of consecutive non-empty parts of equal size."""
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    runs, begin = [], 0
    for size, group in itertools.groupby(sizes):
        number = len(list(group))
        if size:
            runs.append((begin, begin + size * number, number))
        begin += size * number
    return runs
