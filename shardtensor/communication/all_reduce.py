"""All-reduce along mesh axes, as a sequence of sends and merges.

Partial results are combined along a fixed binary tree over the positions of each mesh axis, never in arrival order, and
along the same tree for every element, whichever messages transport them: the same mesh gives the same bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.sharding.layout import offsets

CHUNKED_FROM = 1 << 18
"""Bytes of a result from which every contributor combines one chunk of it.

Below this size the states are combined on the way to the first contributor, which takes fewer messages.
"""

Rounds = tuple[tuple[tuple[int, int], ...], ...]
"""The merges of a tree: in each round, pairs of the positions of two states, of which the first one gets the result."""


@functools.lru_cache(1024)
def reduction_tree(contributes: tuple[bool, ...], sizes: tuple[int, ...]) -> Rounds:
    """Returns the binary tree along which the states of a group of devices are combined.

    Along each axis, the last one first, neighbours merge, then neighbouring pairs, and so on: the left subtree of n
    positions has the largest power of two below n. Positions that do not contribute are skipped. The last merge gives
    its result to the first position that contributes.

    Args:
        contributes: for each position, row-major along the axes, whether it contributes.
        sizes: the sizes of the axes.

    >>> from shardtensor.communication.all_reduce import reduction_tree
    >>> reduction_tree((True,) * 5, (5,))
    (((0, 1), (2, 3)), ((0, 2),), ((0, 4),))
    """
    holders = [k if contributing else None for k, contributing in enumerate(contributes)]
    rounds, step = [], 1
    for size in reversed(sizes):
        for distance in (1 << n for n in range((size - 1).bit_length())):
            merges = []
            for line in range(0, len(holders), step * size):
                for i in range(0, size - distance, 2 * distance):
                    left, right = line + i * step, line + (i + distance) * step
                    mine, its = holders[left], holders[right]
                    if mine is None:
                        holders[left] = its
                    elif its is not None:
                        merges.append((mine, its))
            rounds.append(tuple(merges))
        step *= size
    return tuple(filter(None, rounds))


Tree = tuple[tuple[int, ...], ...]
"""A tree by contributors: for each one those whose combined states are merged into its own, in order. The first
contributor is the root.
"""


@functools.lru_cache(1024)
def tree_of(contributes: tuple[bool, ...], sizes: tuple[int, ...]) -> Tree:
    """Returns the tree of `reduction_tree`, with contributors numbered from 0.

    >>> from shardtensor.communication.all_reduce import tree_of
    >>> tree_of((True, True, False, True), (4,))
    ((1, 2), (), ())
    """
    ranks = {k: rank for rank, k in enumerate(itertools.compress(itertools.count(), contributes))}
    others: list[list[int]] = [[] for _ in ranks]
    for left, right in itertools.chain.from_iterable(reduction_tree(contributes, sizes)):
        others[ranks[left]].append(ranks[right])
    return tuple(map(tuple, others))


@functools.lru_cache(1024)
def flat_tree(count: int) -> Tree:
    """Returns the tree of this number of contributors along one axis."""
    return tree_of((True,) * count, (count,))


def combine(tree: Tree, state: Callable[[int], Any], merge: Callable[[Any, Any], Any], k: int = 0) -> Any:
    """Combines states along a tree, depth first, so that few of them exist at a time.

    Args:
        tree: the tree.
        state: returns the state of a contributor.
        merge: ``merge(earlier, later)`` returns two states combined.
        k: the root of the subtree that is combined.
    """
    total = state(k)
    for other in tree[k]:
        total = merge(total, combine(tree, state, merge, other))
    return total


def combine_rows(tree: Tree, rows: Any, merge: Callable[[Any, Any], Any]) -> Any:
    """Combines the rows of an array along a tree, and returns an array with one row.

    Along the tree of one axis, all pairs of neighbours are merged at once, then all pairs of the results.
    """
    if tree != flat_tree(len(tree)):
        return combine(tree, lambda k: rows[k : k + 1], merge)
    while (count := rows.shape[0]) > 1:
        pairs = merge(rows[: count - 1 : 2], rows[1::2])
        rows = np.concatenate([pairs, rows[count - 1 :]]) if count % 2 else pairs
    return rows


class ReduceOps(NamedTuple):
    """The operations of an all-reduce on the states of devices, which are identified by their positions.

    Attributes:
        send: ``send(state, source, destination)``: the state on another device.
        merge: ``merge(position, earlier, later)``: two states combined, on the device at that position.
        finish: ``finish(position, state)``: the result of a combined state.
        cut: ``cut(position, state, begin, end)``: those elements of a state, in one dimension.
        join: ``join(position, parts)``: the result from all its parts.
    """

    send: Callable[[Any, int, int], Any]
    merge: Callable[[int, Any, Any], Any]
    finish: Callable[[int, Any], Any]
    cut: Callable[[int, Any, int, int], Any]
    join: Callable[[int, list[Any]], Any]


class Group(NamedTuple):
    """A group of devices whose states are combined into one result.

    Attributes:
        members: the positions of the devices, row-major along the axes.
        contributes: for each member, whether it contributes to the result; at least one does.
        axes: the sizes of the axes.
        size: the number of elements of the result on each device.
        chunked: whether every contributor combines a chunk (a reduce-scatter and an all-gather: each link carries 2 (n
            - 1) / n of the result), or the states are combined on the way to the first contributor, whose result is
            then broadcast along a binomial tree.
    """

    members: Sequence[int]
    contributes: tuple[bool, ...]
    axes: tuple[int, ...]
    size: int
    chunked: bool

    @property
    def contributors(self) -> list[int]:
        """The positions of the devices that contribute."""
        return list(itertools.compress(self.members, self.contributes))

    @property
    def tree(self) -> Tree:
        """The tree along which the states of the contributors are combined."""
        return tree_of(self.contributes, self.axes)


def all_reduce(group: Group, states: Any, ops: ReduceOps, receivers: Sequence[int] | None = None) -> dict[int, Any]:
    """Combines the states of devices, and returns the result for every device of a group, by position.

    Args:
        group: the devices.
        states: the state of each position.
        ops: the operations on states; see `ReduceOps`.
        receivers: the positions that get the result, if not all members do; that of the first contributor always does.
    """
    members, contributors = group.members, group.contributors
    receivers = members if receivers is None else receivers
    leader = contributors[0]
    if not group.chunked:
        held = {k: states[k] for k in contributors}
        for left, right in itertools.chain.from_iterable(reduction_tree(group.contributes, group.axes)):
            k, source = members[left], members[right]
            held[k] = ops.merge(k, held[k], ops.send(held.pop(source), source, k))
        results = {leader: ops.finish(leader, held[leader])}
        return handed_on(results, leader, receivers, ops)
    bounds = offsets(group.size, (len(contributors),)).tolist()
    chunks = []
    for owner, (begin, end) in zip(contributors, itertools.pairwise(bounds), strict=True):
        parts = [ops.send(ops.cut(k, states[k], begin, end), k, owner) for k in contributors]
        total = combine(group.tree, parts.__getitem__, functools.partial(ops.merge, owner))
        chunks.append(ops.finish(owner, total))
    return {
        k: ops.join(k, [ops.send(chunk, owner, k) for owner, chunk in zip(contributors, chunks, strict=True)])
        for k in receivers
    }


def handed_on(results: dict[int, Any], leader: int, receivers: Sequence[int], ops: ReduceOps) -> dict[int, Any]:
    """Sends the result of the leader to the other receivers along a binomial tree, and returns that of each."""
    for source, destination in binomial_tree(leader, receivers):
        results[destination] = ops.send(results[source], source, destination)
    return results


def binomial_tree(root: int, group: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the messages of a broadcast as (source, destination) pairs, along a binomial tree.

    In each round every device that has the value sends it to one that lacks it, so that their number doubles.
    """
    members = [root, *[k for k in group if k != root]]
    edges, known = [], 1
    while known < len(members):
        edges += list(zip(members[:known], members[known : 2 * known], strict=False))
        known *= 2
    return edges
