"""Small products on devices that share memories: one batched product in each, for its parts of a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardtensor.backend.device import Device
from shardtensor.communication.all_reduce import Tree, flat_tree
from shardtensor.communication.between_memories import COLLECTED
from shardtensor.communication.merging import merged
from shardtensor.communication.transfer import OperandTransfer
from shardtensor.core import Operands
from shardtensor.functions.numpy.products import contracted
from shardtensor.interpreters.execution.cell_reduction import in_every_cell
from shardtensor.interpreters.execution.combination import reduction_groups
from shardtensor.interpreters.execution.strategies import Run, Strategies
from shardtensor.sharding.equal_parts import equal_runs
from shardtensor.sharding.rules import Rule, name_sizes
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval, whole_of

_MOST_BYTES = 1 << 20
"""The size of operands and of all partial results up to which launches take longer than a copy of an operand, which a
batched product may need.
"""


def product_by_cells(strategies: Strategies, rule: Rule, partial_axes: tuple[str, ...], general: Run) -> Run:
    """Returns the plan that multiplies all parts of a contracted dimension in one memory by one batched product, and
    combines the partial results along their tree by one kernel; those of several memories are then collected on one
    device. Returns the ``general`` plan where that is not possible: for parts of different sizes, integers, and large
    operands.

    Which plan runs depends on shapes, dtypes, layouts and memories only.

    Args:
        strategies: the operator, a product, and its operands.
        rule: names the dimensions of the operands and of the result.
        partial_axes: the mesh axes along which partial results are combined.
        general: see `Strategies.reduce`.
    """
    value, backend, (first, second) = strategies.value, strategies.backend, strategies.moves
    if first is None or second is None or value.spans or value.offloaded:
        return general
    if value.dtype.kind not in "fc" or value.dtype.itemsize < 4:
        return general
    if {first.source.dtype, second.source.dtype} != {value.dtype}:
        return general
    moves = first, second
    axes = _split_axes(rule, moves)
    parts = _parts_in_memories(value, moves, axes, partial_axes) if axes else None
    if not axes or parts is None or not _is_outer(rule, moves):
        return general
    holders, count, tree = parts
    if max(first.source.nbytes + second.source.nbytes, len(holders) * count * value.nbytes) > _MOST_BYTES:
        return general
    terms = [" ".join([*names[:axis], "#", *names[axis:]]) for names, axis in zip(rule.operands, axes, strict=True)]
    text = f"{', '.join(terms)} -> {' '.join(['#', *rule.result])}"
    launch, launch_one = backend.launcher(holders), backend.launcher(holders[:1])

    def combined(rows: Any, subtree: Tree) -> Any:
        if len(subtree) == 1:
            return rows
        return merged(backend, "add", subtree, [backend.view(rows, slice(k, k + 1)) for k in range(len(subtree))])

    def compute(*arrays: Any) -> Any:
        """Returns the sum of the products of the parts in one memory."""
        divided = [
            backend.xp.reshape(x, (*x.shape[:axis], count, -1, *x.shape[axis + 1 :]))
            for x, axis in zip(arrays, axes, strict=True)
        ]
        return backend.contiguous(combined(contracted(backend.xp, None, *divided, rule=text), tree))

    def finished(*sums: Any) -> Any:
        """Returns the result, given the sums of the memories."""
        rows = sums[0]
        if len(holders) > 1:
            rows = combined(backend.collect(sums, holders, holders[0]), flat_tree(len(holders)))
        return whole_of(backend.xp.reshape(rows, value.shape), value)

    def run_plan(operands: Operands) -> ShardedTensor:
        columns = [move.buffers(x, strategies.name) for move, x in zip(moves, operands, strict=True)]
        sums = launch([compute] * len(holders), zip(*columns, strict=True))
        (total,) = launch_one([finished], [sums])
        return in_every_cell(value, total, holders[0])

    return run_plan


def _split_axes(rule: Rule, moves: Sequence[OperandTransfer]) -> tuple[int, ...] | None:
    """Returns where the operands have the one contracted dimension that is split; None if there is not one."""
    counts = moves[0].target.grid(moves[0].source.shape).counts
    first, second = rule.operands
    split = [n for n in first if n not in rule.result and n in second and counts[first.index(n)] > 1]
    return tuple([names.index(split[0]) for names in rule.operands]) if len(split) == 1 else None


class _Parts(NamedTuple):
    """The parts of the contracted dimension.

    Attributes:
        holders: the first device of each memory, in the order of their parts.
        number: how many parts each of them has.
        tree: the tree along which the partial results of one memory are combined.
    """

    holders: Sequence[Device]
    number: int
    tree: Tree


def _parts_in_memories(
    value: Aval, moves: Sequence[OperandTransfer], axes: Sequence[int], partial_axes: tuple[str, ...]
) -> _Parts | None:
    """Returns the parts of a dimension, at the position ``axes`` of the operands; None if they differ in size, or if
    the tree of the partial results is not one of the sums of memories.
    """
    runs, others = [
        equal_runs(move.target.grid(move.source.shape), axis) for move, axis in zip(moves, axes, strict=True)
    ]
    groups = reduction_groups(value, moves, partial_axes)
    tree = groups[0].tree
    if runs is None or runs != others or len(runs) != 1 or runs[0][2] != len(tree):
        return None
    if value.memory is not None:
        return _Parts(value.cells.grid.devices[:1], len(tree), tree)
    held, same = [_cells_along(move, axis) for move, axis in zip(moves, axes, strict=True)]
    if len(groups) > 1 or held is None or held != same or len(tree) * value.nbytes > COLLECTED:
        return None
    holders, boxes = held
    count = len(tree) // len(boxes)
    # Each memory has a subtree of its own where all of them have the same power of two of parts.
    if len({end - begin for begin, end in boxes}) > 1 or count & (count - 1) or tree != flat_tree(len(tree)):
        return None
    return _Parts(holders, count, flat_tree(count))


def _is_outer(rule: Rule, moves: Sequence[OperandTransfer]) -> bool:
    """Whether no operand is broadcast, and the result has the dimensions that both have, then those that only the
    first operand has, then those of the second.
    """
    shapes = [move.source.shape for move in moves]
    sizes = name_sizes(rule, shapes)
    if any(tuple([sizes[name] for name in names]) != shape for names, shape in zip(rule.operands, shapes, strict=True)):
        return False
    ordered = [
        name
        for where in ((True, True), (True, False), (False, True))
        for name in rule.result
        if (name in rule.operands[0], name in rule.operands[1]) == where
    ]
    return tuple(ordered) == rule.result


def _cells_along(move: OperandTransfer, axis: int) -> tuple[Sequence[Device], list[tuple[int, int]]] | None:
    """Returns the devices of an operand's cells and their bounds along the dimension that is split, in order; None if
    they are not boxes in this order, or every device has one of its own.
    """
    if move.cells.apart:
        return None
    grid = move.cells.grid
    boxes = [grid.box(n)[axis] for n in range(len(grid.devices))]
    return (grid.devices, boxes) if [b for _, b in boxes[:-1]] == [a for a, _ in boxes[1:]] else None
