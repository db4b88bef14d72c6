"""Small products on devices that share memories: one batched product in each, for its parts of a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.backend.device import Device
from shardtensor.communication.all_reduce import Tree, flat_tree
from shardtensor.communication.between_memories import COLLECTED
from shardtensor.communication.merging import merged
from shardtensor.communication.transfer import OperandTransfer
from shardtensor.core import Operands
from shardtensor.functions.products import contracted
from shardtensor.interpreters.execution.cell_reduction import in_every_cell
from shardtensor.interpreters.execution.combination import reduction_groups
from shardtensor.interpreters.execution.strategies import Run, Strategies
from shardtensor.sharding.equal_parts import equal_runs
from shardtensor.sharding.rules import Rule, name_sizes
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import whole_of

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
    value, backend, moves = strategies.value, strategies.backend, strategies.moves
    first, second = moves
    if first is None or second is None or value.spans or value.offloaded:
        return general
    if (
        value.dtype.kind not in "fc"
        or value.dtype.itemsize < 4
        or {first.source.dtype, second.source.dtype} != {value.dtype}
    ):
        return general
    grids = [move.target.grid(move.source.shape) for move in (first, second)]
    gone = [name for name in rule.operands[0] if name not in rule.result]
    split = [n for n in gone if n in rule.operands[1] and grids[0].counts[rule.operands[0].index(n)] > 1]
    if len(split) != 1:
        return general
    axes = [names.index(split[0]) for names in rule.operands]
    runs, others = [equal_runs(grid, axis) for grid, axis in zip(grids, axes, strict=True)]
    groups = reduction_groups(value, moves, partial_axes)
    tree = groups[0].tree
    if runs is None or runs != others or len(runs) != 1 or runs[0][2] != len(tree):
        return general
    count = len(tree)
    holders: Sequence[Device] = value.cells.grid.devices[:1]
    if value.memory is None:
        held = [_cells_along(move, axis) for move, axis in zip((first, second), axes, strict=True)]
        if len(groups) > 1 or held[0] is None or held[0] != held[1] or count * value.nbytes > COLLECTED:
            return general
        holders, boxes = held[0]
        count //= len(boxes)
        # Each memory has a subtree of its own where all of them have the same power of two of parts.
        if len({end - begin for begin, end in boxes}) > 1 or count & (count - 1) or tree != flat_tree(len(tree)):
            return general
    most = max(first.source.nbytes + second.source.nbytes, len(tree) * value.nbytes)
    sizes = name_sizes(rule, [first.source.shape, second.source.shape])
    broadcasts = any(
        sizes[name] != n
        for names, move in zip(rule.operands, (first, second), strict=True)
        for name, n in zip(names, move.source.shape, strict=True)
    )
    in_both, *own = [
        [n for n in rule.result if (n in rule.operands[0], n in rule.operands[1]) == where]
        for where in ((True, True), (True, False), (False, True))
    ]
    if most > _MOST_BYTES or broadcasts or (*in_both, *own[0], *own[1]) != rule.result:
        return general
    terms = [[*names[:axis], "#", *names[axis:]] for names, axis in zip(rule.operands, axes, strict=True)]
    text = f"{' '.join(terms[0])}, {' '.join(terms[1])} -> {' '.join(['#', *rule.result])}"
    launch, launch_one = backend.launcher(holders), backend.launcher(holders[:1])
    last = flat_tree(len(holders)) if len(holders) > 1 else ()

    def combined(rows: Any, subtree: Tree) -> Any:
        if len(subtree) == 1:
            return rows
        return merged(backend, "add", subtree, [backend.view(rows, slice(k, k + 1)) for k in range(len(subtree))])

    def compute(*arrays: Any) -> Any:
        parts = [
            backend.xp.reshape(x, (*x.shape[:axis], count, -1, *x.shape[axis + 1 :]))
            for x, axis in zip(arrays, axes, strict=True)
        ]
        rows = contracted(backend.xp, None, *parts, rule=text)
        return backend.contiguous(combined(rows, flat_tree(count) if last else tree))

    def finished(*parts: Any) -> Any:
        rows = combined(backend.collect(parts, holders, holders[0]), last) if last else parts[0]
        return whole_of(backend.xp.reshape(rows, value.shape), value)

    def run_plan(operands: Operands) -> ShardedTensor:
        columns = [move.buffers(x, strategies.name) for move, x in zip((first, second), operands, strict=True)]
        strategies.announce()
        parts = launch([compute] * len(holders), zip(*columns, strict=True))
        (total,) = launch_one([finished], [parts])
        return in_every_cell(value, total, holders[0])

    return run_plan


def _cells_along(move: OperandTransfer, axis: int) -> tuple[Sequence[Device], list[tuple[int, int]]] | None:
    """Returns the devices of an operand's cells and their bounds along the dimension that is split, in order; None if
    they are not boxes in this order, or every device has one of its own.
    """
    if move.cells.apart:
        return None
    grid = move.cells.grid
    boxes = [grid.box(n)[axis] for n in range(len(grid.devices))]
    return (grid.devices, boxes) if [b for _, b in boxes[:-1]] == [a for a, _ in boxes[1:]] else None
