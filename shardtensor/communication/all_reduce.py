"""All-reduce along mesh axes, as a sequence of sends and merges.

Contributions are combined in mesh order, never in arrival order, and in the same order for every element, whichever
messages transport them: the same mesh gives the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.sharding.layout import offsets

CHUNKED_FROM = 1 << 18
"""Bytes of a result from which every contributor combines one chunk of it.

Below this size the first contributor combines the whole result, which takes fewer messages.
"""

Message = tuple[int, int, int]
"""Position of the sender, position of the receiver, and bytes."""


@dataclass(frozen=True, slots=True)
class ReduceOps:
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


def all_reduce(
    group: Sequence[int], contributors: Sequence[int], states: Any, ops: ReduceOps, size: int, chunked: bool
) -> dict[int, Any]:
    """Combines the states of devices, and returns the result for every device of a group, by position.

    Args:
        group: the positions of the group's devices.
        contributors: those of them that contribute to the result, in mesh order.
        states: the state of each position.
        ops: the operations on states; see `ReduceOps`.
        size: the number of elements of the result.
        chunked: whether every contributor combines a chunk (a reduce-scatter and an all-gather: each link carries 2 (n
            - 1) / n of the result), or the first one the whole result, which is then broadcast along a binomial tree.
    """
    if not chunked:
        leader = contributors[0]
        state = states[leader]
        for position in contributors[1:]:
            state = ops.merge(leader, state, ops.send(states[position], position, leader))
        results = {leader: ops.finish(leader, state)}
        for source, destination in binomial_tree(leader, group):
            results[destination] = ops.send(results[source], source, destination)
        return results
    bounds = offsets(size, (len(contributors),)).tolist()
    chunks = []
    for owner, (begin, end) in zip(contributors, itertools.pairwise(bounds), strict=True):
        parts = [ops.send(ops.cut(k, states[k], begin, end), k, owner) for k in contributors]
        state = parts[0]
        for part in parts[1:]:
            state = ops.merge(owner, state, part)
        chunks.append(ops.finish(owner, state))
    return {
        k: ops.join(k, [ops.send(chunk, owner, k) for owner, chunk in zip(contributors, chunks, strict=True)])
        for k in group
    }


def messages(
    group: Sequence[int], contributors: Sequence[int], state: int, result: int, chunked: bool
) -> list[Message]:
    """Returns the messages of `all_reduce`, given the bytes of a state and of the result.

    Both variants send the same number of bytes.
    """
    if not chunked:
        leader = contributors[0]
        there = [(k, leader, state) for k in contributors[1:]]
        return there + [(a, b, result) for a, b in binomial_tree(leader, group)]
    shares = [np.diff(offsets(n, (len(contributors),))).tolist() for n in (state, result)]
    there = [
        (k, owner, n) for owner, n in zip(contributors, shares[0], strict=True) for k in contributors if k != owner
    ]
    back = [(owner, k, n) for owner, n in zip(contributors, shares[1], strict=True) for k in group if k != owner]
    return there + back


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
