"""What devices do together along mesh axes. Reductions combine in mesh order, not in order of arrival, and in the same
order for every element, however they travel: the same mesh gives the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtensor.sharding.layout import offsets

CHUNKED_FROM = 1 << 18
"""Bytes of a result from which every device combines a chunk of it. Below, one device combines all: fewer messages."""

Message = tuple[int, int, int]
"""Position of the sender, position of the receiver, bytes."""


@dataclass(frozen=True, slots=True)
class ReduceOps:
    """What an all-reduce does with the states of devices, which are named by their positions.

    Attributes:
        send: ``send(state, source, destination)``: the state on another device.
        merge: ``merge(position, earlier, later)``, on the device at that position.
        finish: ``finish(position, state)``: the result.
        cut: ``cut(position, state, begin, end)``: those elements of a state, in one dimension.
        join: ``join(position, parts)``: the result from all its parts.
    """

    send: Callable[[Any, int, int], Any]
    merge: Callable[[int, Any, Any], Any]
    finish: Callable[[int, Any], Any]
    cut: Callable[[int, Any, int, int], Any]
    join: Callable[[int, list[Any]], Any]


def all_reduce(
    group: Sequence[int], contributors: Sequence[int], states: Sequence[Any], ways: ReduceOps, size: int, chunked: bool
) -> dict[int, Any]:
    """The combined result on every device of a group.

    Args:
        group: the positions of its devices.
        speakers: of those that have something to say, in mesh order.
        states: each position's own state.
        ways: see `ReduceOps`.
        size: elements of the result.
        scattered: whether every speaker combines a chunk (a reduce-scatter and an all-gather: each link carries
            2 (n - 1) / n of the result), or the first one all of it, which then goes round along a binomial tree.
    """
    if not chunked:
        leader = contributors[0]
        state = states[leader]
        for position in contributors[1:]:
            state = ways.merge(leader, state, ways.send(states[position], position, leader))
        results = {leader: ways.finish(leader, state)}
        for source, destination in binomial_tree(leader, group):
            results[destination] = ways.send(results[source], source, destination)
        return results
    bounds = offsets(size, (len(contributors),)).tolist()
    chunks = []
    for owner, (begin, end) in zip(contributors, itertools.pairwise(bounds), strict=True):
        parts = [ways.send(ways.cut(k, states[k], begin, end), k, owner) for k in contributors]
        state = parts[0]
        for part in parts[1:]:
            state = ways.merge(owner, state, part)
        chunks.append(ways.finish(owner, state))
    return {
        k: ways.join(k, [ways.send(chunk, owner, k) for owner, chunk in zip(contributors, chunks, strict=True)])
        for k in group
    }


def messages(
    group: Sequence[int], contributors: Sequence[int], state: int, result: int, chunked: bool
) -> list[Message]:
    """What `all_reduce` sends, given the bytes of a state and of the result: equally many bytes either way."""
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
    """Who hands a value on to whom until all have it, each round twice as many: a binomial tree."""
    members = [root, *[k for k in group if k != root]]
    edges, known = [], 1
    while known < len(members):
        edges += list(zip(members[:known], members[known : 2 * known], strict=False))
        known *= 2
    return edges
