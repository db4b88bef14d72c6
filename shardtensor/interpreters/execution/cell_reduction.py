"""Reductions of rows on devices other than the host: one kernel for each buffer, then few kernels for all of them.

The partial results of the shards in one buffer are the rows of one array, which one call computes. Those of all buffers
are collected on one device, combined there along their tree, pairs of neighbours at once, and handed on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.backend.device import Device
from shardtensor.backend.functions import function_of
from shardtensor.backend.protocol import Backend
from shardtensor.communication.all_reduce import Tree, combine, flat_tree
from shardtensor.communication.array_communicator import each_array
from shardtensor.communication.between_memories import COLLECTED
from shardtensor.communication.merging import MERGED_AT_ONCE, merged
from shardtensor.core import Operands
from shardtensor.functions.building.monoids import Monoid, var_partial
from shardtensor.host.fork import cached_property
from shardtensor.interpreters.execution.combination import reduction_groups
from shardtensor.interpreters.execution.strategies import Run, Strategies
from shardtensor.sharding.equal_parts import Runs, equal_runs, runs_between
from shardtensor.sharding.rules import reduced_axes
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ShardedTensor, tensor_of
from shardtensor.tensor.value import Aval, whole_of

_REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
"""The reductions by the names of their ufuncs."""

_TERMS = 1 << 14
"""The most terms of an element of a partial result where one block of threads adds them. More would leave the rest of a
GPU idle: then there is a kernel for each shard, which all blocks share.
"""


def reduce_by_cells(strategies: Strategies, monoid: Monoid, partial_axes: tuple[str, ...], general: Run) -> Run:
    """Returns the plan that computes the partial results of all shards in a buffer by one call of a reduction, or the
    ``general`` plan where that is not possible: for other layouts and dtypes, and long shards.

    Which plan runs depends on shapes, layouts and memories only, and both combine along the same tree.

    Args:
        strategies: the operator and its operand.
        monoid: how partial results are computed and merged.
        partial_axes: the mesh axes along which partial results are combined.
        general: see `Strategies.reduce`.
    """
    value, params, move = strategies.value, strategies.params, strategies.moves[0]
    moments = monoid.partial is var_partial
    if len(strategies.moves) > 1 or not (monoid.reduces or moments) or move is None or not move.stays or value.spans:
        return general
    source = move.source
    assert isinstance(source, Aval)  # Only a tensor can stay in its layout.
    dtype, shards = source.dtype, source.grid
    if dtype.kind not in "fc" or dtype.itemsize < 4 or dtype != value.dtype or source.offloaded or not source.size:
        return general
    gone = reduced_axes(params.get("axis"), source.ndim)
    groups = reduction_groups(value, strategies.moves, partial_axes)
    split = next((axis for axis in gone if equal_runs(shards, axis) is not None), None)
    if split is None or (len(groups) > 1 and value.memory is None):
        return general
    bounds = shards.offsets[split].tolist()
    boxes = [source.cells.grid.box(n)[split] for n in range(len(source.cells.positions))]
    if [end for _, end in boxes[:-1]] != [begin for begin, _ in boxes[1:]]:
        return general
    lengths = {end - begin for begin, end in itertools.pairwise(bounds) if end > begin}
    longest = max(lengths) * source.size // source.shape[split]
    everywhere = (moments or monoid.reduces == "add") and all(
        strategies.backend.adds_everywhere((*source.shape[:split], n, *source.shape[split + 1 :]), gone, dtype)
        for n in lengths
    )
    tree, long = groups[0].tree, longest > _TERMS * max(value.size, 1)
    if (long and not everywhere) or (len(boxes) > 1 and len(tree) * value.nbytes > COLLECTED):
        return general
    cells = [runs_in_box(bounds, *box) for box in boxes]
    plan = (_Moments if moments else _Reduction)(strategies, monoid, source, split, gone, cells, tree, everywhere)
    return general if moments and len(cells) > 1 and not plan.apart else plan.run


def _as_rows(backend: Backend, split: int, piece: Any, number: int, as_view: bool) -> Any:
    """Returns the shards of equal size in a piece of a buffer as the rows of one array.

    The elements of a shard keep their order, on which the bits of a sum depend: the rows are in row-major order, or,
    with ``as_view``, views whose elements along the last dimension are adjacent.
    """
    before, after = piece.shape[:split], piece.shape[split + 1 :]
    rows = backend.xp.reshape(piece, (*before, number, piece.shape[split] // number, *after))
    if split:
        rows = backend.xp.permute_dims(rows, (split, *[axis for axis in range(rows.ndim) if axis != split]))
    return rows if as_view and rows.shape[-1] > 1 else backend.contiguous(rows)


def _cut(backend: Backend, split: int, buffer: Any, begin: int, end: int) -> Any:
    """Returns the elements of some shards in a buffer."""
    return backend.view(buffer, (*[slice(None)] * split, slice(begin, end)))


def runs_in_box(bounds: Sequence[int], begin: int, end: int) -> Runs:
    """Returns the runs of shards of equal size in the rows of a cell, relative to its first row."""
    return runs_between([bound - begin for bound in bounds if begin <= bound <= end])


def in_every_cell(value: Aval, total: Any, leader: Device) -> ShardedTensor:
    """Returns a tensor that is the same in all of its cells, given its array on one of their devices."""
    backend, devices = value.backend, value.cells.grid.devices
    here = backend.memory_space(leader)
    others = [device for device in devices if backend.memory_space(device) != here]
    copies = dict(zip(others, backend.spread(total, leader, others), strict=True)) if others else {}
    buffers = tuple([copies.get(device, total) for device in devices])
    return tensor_of(value, buffers, tuple([[] for _ in buffers]))


class _Reduction:
    """The plan of `reduce_by_cells`.

    Args:
        strategies, monoid: see `reduce_by_cells`.
        source: the aval of the operand.
        split: its dimension that is split.
        gone: its dimensions that are reduced.
        cells: the runs of shards of equal size in each of its cells.
        tree: the tree along which the partial results of the shards are combined.
        in_views: whether strides of shards do not change the order in which their elements are added.

    Attributes:
        apart: whether each of several cells has a subtree of its own.
    """

    def __init__(
        self,
        strategies: Strategies,
        monoid: Monoid,
        source: Aval,
        split: int,
        gone: Sequence[int],
        cells: Sequence[Runs],
        tree: Tree,
        in_views: bool,
    ) -> None:
        self._in_views = in_views
        self._strategies, self._value, self._monoid = strategies, strategies.value, monoid
        self._backend = backend = strategies.backend
        self._runs, self._split = [runs for runs in cells if runs], split
        self._numbers = [n for n, runs in enumerate(cells) if runs]
        self._axis = tuple([axis + 1 for axis in gone])
        self._count = source.size // max(self._value.size, 1) if monoid.partial else 0  # of a mean: its states are sums
        self._name = monoid.reduces
        counts = [sum(n for _, _, n in runs) for runs in self._runs]
        flat = tree == flat_tree(len(tree))
        # That is so where all of them have the same power of two of shards.
        self.apart = len(counts) > 1 and flat and len(set(counts)) == 1 and not counts[0] & (counts[0] - 1)
        self._tree = flat_tree(len(counts)) if self.apart else tree
        devices = source.cells.grid.devices
        self._holders = [devices[n] for n in self._numbers]
        self._leader = self._holders[0]
        self._launch, self._launch_one = backend.launcher(self._holders), backend.launcher([self._leader])

    @cached_property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The reduction and the ufunc of the backend, looked up at first use."""
        return function_of(self._backend, _REDUCTIONS[self._name]), function_of(self._backend, self._name)

    def run(self, operands: Operands) -> ShardedTensor:
        """Runs the plan."""
        strategies, value = self._strategies, self._value
        move = strategies.moves[0]
        assert move is not None
        buffers = move.buffers(operands[0], strategies.name)
        mine = [buffers[n] for n in self._numbers]
        parts = self._launch([self._partials] * len(mine), zip(mine, self._runs, strict=True))
        (total,) = self._launch_one([self._total], [(parts,)])
        return in_every_cell(value, total, self._leader)

    def _partials(self, buffer: Any, runs: Runs) -> Any:
        """Returns the partial results of the shards in a buffer, or all of them combined, as rows of one array."""
        backend, reduction, split = self._backend, self._functions[0], self._split
        pieces = [buffer] if len(runs) == 1 else [_cut(backend, split, buffer, a, b) for a, b, _ in runs]
        # Where shards are copied they are short, so that this takes less time than a kernel for each of them.
        params = {"axis": self._axis, "keepdims": self._strategies.params["keepdims"]}
        sums = [
            reduction(_as_rows(backend, split, piece, n, self._in_views), **params)
            for piece, (_, _, n) in zip(pieces, runs, strict=True)
        ]
        rows = sums[0] if len(sums) == 1 else backend.xp.concat(sums)
        return self._combined(rows, flat_tree(rows.shape[0])) if self.apart else rows

    def _total(self, parts: Sequence[Any]) -> Any:
        """Returns the result on the first device, from the rows of all cells."""
        backend, value = self._backend, self._value
        rows = parts[0] if len(parts) == 1 else backend.collect(parts, self._holders, self._leader)
        total = backend.xp.reshape(self._combined(rows, self._tree), value.shape)
        return whole_of(backend.xp.divide(total, self._count) if self._count else total, value)

    def _combined(self, rows: Any, tree: Tree) -> Any:
        """Combines rows along a tree; returns an array with one row."""
        backend, ufunc, view = self._backend, self._functions[1], self._backend.view
        while tree == flat_tree(count := rows.shape[0]) and count > MERGED_AT_ONCE:
            pairs = ufunc(view(rows, slice(0, count - 1, 2)), view(rows, slice(1, None, 2)))
            rows = backend.xp.concat([pairs, view(rows, slice(count - 1, None))]) if count % 2 else pairs
            tree = flat_tree(rows.shape[0])
        if rows.shape[0] == 1:
            return rows
        return merged(backend, self._name, tree, [view(rows, slice(k, k + 1)) for k in range(rows.shape[0])])


class _Moments(_Reduction):
    """The plan of `reduce_by_cells` for a variance, whose states take several kernels each."""

    def _merge(self, earlier: Any, later: Any) -> Any:
        return self._monoid.merge(self._backend.xp, earlier, later)

    def _partials(self, buffer: Any, runs: Runs) -> Any:
        """Returns the states of the shards in a buffer combined, as the state of one row."""
        backend, split, params, xp = self._backend, self._split, self._strategies.params, self._backend.xp
        states = []
        for begin, end, number in runs:
            parts = _as_rows(backend, split, _cut(backend, split, buffer, begin, end), number, self._in_views)
            context = ShardContext.everywhere(self._value.shape, [parts.shape], self._value.dtype)
            states.append(self._monoid.partial(xp, context, parts, **{**params, "axis": self._axis}))  # type: ignore[misc]
        numbers = [number for _, _, number in runs]
        tree = flat_tree(sum(numbers)) if self.apart else self._tree
        if len(states) == 1 and tree == flat_tree(numbers[0]):
            state = self._folded(states[0], numbers[0])
        else:
            rows = [self._some(state, k, k + 1) for state, n in zip(states, numbers, strict=True) for k in range(n)]
            state = combine(tree, rows.__getitem__, self._merge)
        return each_array(backend.contiguous, state) if self.apart else state  # to be sent

    def _total(self, parts: Sequence[Any]) -> Any:
        """Returns the result on the first device, from the states of all cells."""
        backend, value, strategies = self._backend, self._value, self._strategies
        state = parts[0]
        if len(parts) > 1:
            counts, *columns = zip(*parts, strict=True)
            rows = [backend.collect(column, self._holders, self._leader) for column in columns]
            if len(set(counts)) == 1:
                state = self._folded((counts[0], *rows), len(parts))
            else:
                states = [(count, *self._some(tuple(rows), k, k + 1)) for k, count in enumerate(counts)]
                state = combine(self._tree, states.__getitem__, self._merge)
        result = self._monoid.finish(backend.xp, strategies.contexts[0], state, **strategies.params)
        return whole_of(backend.xp.reshape(result, value.shape), value)

    def _folded(self, states: Any, number: int) -> Any:
        """Combines the states of shards of one size along a flat tree, all pairs of neighbours at once."""
        if number & (number - 1):
            left, some = 1 << (number.bit_length() - 1), self._some
            return self._merge(
                self._folded(some(states, 0, left), left), self._folded(some(states, left, None), number - left)
            )
        while number > 1:
            states = self._merge(self._some(states, None, None, 2), self._some(states, 1, None, 2))
            number //= 2
        return states

    def _some(self, states: Any, *part: int | None) -> Any:
        return each_array(lambda array: self._backend.view(array, slice(*part)), states)
