"""Small products on devices that share a memory: one batched product for all shards of the contracted dimension."""

from __future__ import annotations

from typing import Any

from shardtensor.communication.merging import merged
from shardtensor.core import Operands
from shardtensor.functions.products import contracted
from shardtensor.interpreters.execution.combination import reduction_groups
from shardtensor.interpreters.execution.strategies import Run, Strategies
from shardtensor.sharding.equal_parts import equal_runs
from shardtensor.sharding.rules import Rule, name_sizes
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import whole_of

_MOST_BYTES = 1 << 20
"""The size of operands and of all partial results up to which launches take longer than a copy of an operand, which a
batched product may need.
"""


def product_by_cells(strategies: Strategies, rule: Rule, partial_axes: tuple[str, ...], general: Run) -> Run:
    """Returns the plan that multiplies all parts of a contracted dimension by one batched product, and combines the
    partial results along their tree by one kernel; or the ``general`` plan where that is not possible: for several
    memories, parts of different sizes, integers, and large operands.

    Which plan runs depends on shapes, dtypes, layouts and memories only.

    Args:
        strategies: the operator, a product, and its operands.
        rule: names the dimensions of the operands and of the result.
        partial_axes: the mesh axes along which partial results are combined.
        general: see `Strategies.reduce`.
    """
    value, backend, moves = strategies.value, strategies.backend, strategies.moves
    first, second = moves
    if first is None or second is None or value.memory is None or value.spans or value.offloaded:
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
    tree = reduction_groups(value, moves, partial_axes)[0].tree
    if runs is None or runs != others or len(runs) != 1 or runs[0][2] != len(tree):
        return general
    count = len(tree)
    most = max(first.source.nbytes + second.source.nbytes, count * value.nbytes)
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
    launch = backend.launcher([value.cells.grid.devices[0]])

    def compute(*arrays: Any) -> Any:
        parts = [
            backend.xp.reshape(x, (*x.shape[:axis], count, -1, *x.shape[axis + 1 :]))
            for x, axis in zip(arrays, axes, strict=True)
        ]
        rows = contracted(backend.xp, None, *parts, rule=text)
        total = merged(backend, "add", tree, [backend.view(rows, slice(k, k + 1)) for k in range(count)])
        return whole_of(backend.xp.reshape(total, value.shape), value)

    def run_plan(operands: Operands) -> ShardedTensor:
        arrays = [move.whole(x, strategies.name) for move, x in zip((first, second), operands, strict=True)]
        strategies.announce()
        return tensor(value, Storage(tuple(launch([compute], [arrays])), ([],)))

    return run_plan
