"""The schedule of a kernel with reductions: what each pass over a row computes. The languages render it.

A row is computed in stages. Each goes over its elements and needs the reductions of the stages before; the last one
writes the results. A softmax has three: the maximum, the sum, the results. Values that several stages need are computed
in each of them, except for expensive functions where the language has memory to store them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from shardtensor.interpreters.jit.kernels.expressions import EXPENSIVE
from shardtensor.interpreters.jit.kernels.kernel import Kernel, Node, Value


class Stage(NamedTuple):
    """A pass over a row.

    Attributes:
        known: the values that are one number for each row and become known before it, in order: in the first stage
            inputs and what follows from them, later the reductions of the stage before and what follows from these.
        needs: the values that are read or computed for each element, in order.
        loads: those of them that are read: inputs, and values that an earlier stage stores.
        reductions: the reductions that it computes, in order.
    """

    known: tuple[Value, ...]
    needs: tuple[Value, ...]
    loads: frozenset[Value]
    reductions: tuple[Value, ...]


class RowSchedule(NamedTuple):
    """How the rows of a kernel are computed.

    Attributes:
        stages: the passes over a row.
        totals: all reductions, in order.
        stored: the values that are stored for each element, in order: the first stage that computes one stores it.
        moments: the sums of squares of ``x - mean(x)`` that are computed in the stage of the mean, with the mean: a
            variance then reads x once.
    """

    stages: tuple[Stage, ...]
    totals: tuple[Value, ...]
    stored: tuple[Value, ...]
    moments: Mapping[Value, Value]

    def known(self, stage: int) -> list[Value]:
        """Returns the values that are one number for each row and that a stage knows, in order."""
        return sorted([v for s in self.stages[: stage + 1] for v in s.known])


@functools.lru_cache(1 << 8)
def row_schedule(kernel: Kernel, *, stores: bool) -> RowSchedule:
    """Returns the schedule of a kernel with rows.

    Args:
        kernel: the kernel.
        stores: whether expensive values are stored for later stages. The squares of deviations of such a value are then
            added in a stage of their own, which reads it.
    """
    nodes = dict(enumerate(kernel.nodes, len(kernel.inputs)))
    totals = tuple([v for v, node in nodes.items() if node.reduces])
    expensive = {v for v, node in nodes.items() if stores and node.name in EXPENSIVE}
    moments = {v: mean for v in totals if (mean := _mean_of(kernel, nodes[v])) is not None}
    moments = {v: mean for v, mean in moments.items() if expensive.isdisjoint(needs(kernel, nodes[mean].operands))}
    first = [0] * len(kernel.inputs)  # The first stage in which each value can be computed.
    for v, node in nodes.items():
        after = max([first[u] for u in node.operands]) + node.reduces
        first.append(first[moments[v]] if v in moments else after)
    stages: list[Stage] = []
    available: set[Value] = set()
    for s in range(max(first) + 1):
        reductions = tuple([v for v in totals if first[v] == s + 1])
        targets = [nodes[v].operands[0] for v in reductions if v not in moments]
        if s == max(first):
            targets = [out.value for out in kernel.outputs if not out.per_row]
        needed = needs(kernel, targets, available)
        known = tuple([v for v in range(kernel.values) if first[v] == s and kernel.is_row(v)])
        stages.append(
            Stage(known, needed, frozenset([v for v in needed if v not in nodes or v in available]), reductions)
        )
        available |= expensive.intersection(needed)
    stored = tuple(sorted({v for stage in stages for v in stage.loads if v in nodes}))
    return RowSchedule(tuple(stages), totals, stored, moments)


def needs(kernel: Kernel, targets: Iterable[Value], available: Set[Value] = frozenset()) -> tuple[Value, ...]:
    """Returns the values that differ within a row and from which some are computed, these included, in order.

    Args:
        kernel: the kernel.
        targets: the values that are computed.
        available: values that need not be computed.
    """
    seen: set[Value] = set()
    left = list(targets)
    while left:
        v = left.pop()
        if v not in seen and not kernel.is_row(v):
            seen.add(v)
            node = kernel.node(v)
            left += node.operands if node is not None and v not in available else ()
    return tuple(sorted(seen))


def _mean_of(kernel: Kernel, node: Node) -> Value | None:
    """Returns the mean of x where a node is the sum of the squares of ``x - mean(x)``."""
    difference = kernel.node(node.operands[0])
    if node.name != "sum_of_squares" or difference is None or difference.name != "subtract":
        return None
    x, mean = difference.operands
    mean_node = kernel.node(mean)
    return (
        mean
        if mean_node is not None and mean_node.reduces and (mean_node.name, mean_node.operands) == ("mean", (x,))
        else None
    )
