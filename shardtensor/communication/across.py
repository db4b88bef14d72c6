"""All-reduce over devices of several processes, with the bits of one process.

States are combined along the same tree as in one process (see `shardtensor.communication.all_reduce`). A process
combines the subtrees whose leaves are all its own, and sends only their states: at most 2 log2(n) of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import process_index
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.all_reduce import CHUNKED_FROM, Group, ReduceOps, Tree
from shardtensor.communication.processes import cross
from shardtensor.sharding.layout import offsets


class Subtree(NamedTuple):
    """The combination of a contributor's state with those of its first subtrees.

    Attributes:
        rank: the number of the contributor.
        others: how many of its subtrees are combined with its state.
    """

    rank: int
    others: int


class Subtrees:
    """The largest subtrees of a tree whose leaves belong to one process each.

    Args:
        tree: the tree.
        processes: the process of each contributor.

    Attributes:
        owners: the process of each such subtree.
    """

    def __init__(self, tree: Tree, processes: Sequence[int]) -> None:
        self._tree = tree
        self._processes = processes
        self.root = self.whole(0)
        self.owners = dict(self._largest(self.root))

    def whole(self, rank: int) -> Subtree:
        """Returns the subtree of a contributor."""
        return Subtree(rank, len(self._tree[rank]))

    def halves(self, tree: Subtree) -> tuple[Subtree, Subtree]:
        """Returns the two subtrees that are merged last."""
        rank, count = tree
        return Subtree(rank, count - 1), self.whole(self._tree[rank][count - 1])

    def _leaves(self, tree: Subtree) -> set[int]:
        found = {self._processes[tree.rank]}
        for other in self._tree[tree.rank][: tree.others]:
            found |= self._leaves(self.whole(other))
        return found

    def _largest(self, tree: Subtree) -> Iterator[tuple[Subtree, int]]:
        leaves = self._leaves(tree)
        if len(leaves) == 1:
            yield tree, leaves.pop()
        else:
            for half in self.halves(tree):
                yield from self._largest(half)

    def combined(self, tree: Subtree, states: Any, merge: Any, known: Mapping[Subtree, Any]) -> Any:
        """Returns the state of a subtree: that in ``known``, else that of a leaf, else its halves' states merged."""
        if tree in known:
            return known[tree]
        if not tree.others:
            return states(tree.rank)
        left, right = self.halves(tree)
        return merge(self.combined(left, states, merge, known), self.combined(right, states, merge, known))


@functools.lru_cache(1024)
def subtrees(tree: Tree, processes: tuple[int, ...]) -> Subtrees:
    """Returns the subtrees of a tree."""
    return Subtrees(tree, processes)


class States:
    """The states of devices, of which those of other processes are shapes and dtypes.

    A state is an array, a number, or a tuple of states.

    Args:
        devices: the devices, in mesh order.
        caller: the name of the operator.
    """

    def __init__(self, devices: Sequence[Device], caller: str) -> None:
        self.devices = devices
        self.caller = caller

    def cross(self, messages: Sequence[tuple[Any, int, int]]) -> list[Any]:
        """Sends states between devices in one exchange.

        Args:
            messages: a state, and the positions of its device and of the device that receives it.
        """
        leaves = [(leaf, self.devices[i], self.devices[j]) for state, i, j in messages for leaf in _arrays(state)]
        arrived = iter(cross(leaves, self.caller))
        return [_rebuilt(state, arrived) for state, _, _ in messages]


def _arrays(state: Any) -> Iterator[Any]:
    """Yields the arrays of a state; numbers as arrays."""
    if isinstance(state, tuple):
        for part in state:
            yield from _arrays(part)
    else:
        yield np.asarray(state) if type(state) in (int, float) else state


def _rebuilt(state: Any, arrays: Iterator[Any]) -> Any:
    """Returns a state with other arrays; numbers of other processes stay what they are here."""
    if isinstance(state, tuple):
        return tuple([_rebuilt(part, arrays) for part in state])
    array = next(arrays)
    if type(state) not in (int, float):
        return array
    return state if type(array) is RemoteArray else array.item()


def all_reduce_across(
    groups: Sequence[Group],
    states: Mapping[int, Any],
    ops: ReduceOps,
    devices: Sequence[Device],
    dtype: np.dtype[Any],
    caller: str,
) -> dict[int, Any]:
    """Combines the states of devices of several processes, and returns the result of each device of this process.

    The states of short results are sent to all processes of a group, each of which combines them. Of long ones each
    process combines a part.

    Args:
        groups: the groups of devices.
        states: the state of each device, by position; those of other processes have the same structure.
        ops: the operations on states.
        devices: the devices, in mesh order.
        dtype: the dtype of the result.
        caller: the name of the operator.
    """
    here, carrier = process_index(), States(devices, caller)
    jobs = [_GroupAcross(group, states, ops, devices, dtype) for group in groups]
    messages = [job.messages() for job in jobs]
    arrived = iter(carrier.cross(list(itertools.chain.from_iterable(messages))))
    totals = []
    for job, sent in zip(jobs, messages, strict=True):
        totals.append(job.total(list(itertools.islice(arrived, len(sent))), here))
    shared = [job.shares(total) for job, total in zip(jobs, totals, strict=True)]
    parts = iter(carrier.cross(list(itertools.chain.from_iterable(shared))))
    results: dict[int, Any] = {}
    for job, total, sent in zip(jobs, totals, shared, strict=True):
        results |= job.results(total, list(itertools.islice(parts, len(sent))), here)
    return results


class _GroupAcross:
    """The all-reduce of one group; see `all_reduce_across`."""

    def __init__(
        self,
        group: Group,
        states: Mapping[int, Any],
        ops: ReduceOps,
        devices: Sequence[Device],
        dtype: np.dtype[Any],
    ) -> None:
        self.dtype = dtype
        self.group = group
        self.states = states
        self.ops = ops
        self.processes = [devices[k].process_index for k in group.members]
        self.contributors = group.contributors
        # In each process that has a member, its first one combines the states.
        self.first = {p: k for k, p in zip(reversed(group.members), reversed(self.processes), strict=True)}
        self.order = sorted(self.first)
        self.trees = subtrees(group.tree, tuple([devices[k].process_index for k in self.contributors]))
        state = states[self.contributors[0]]
        nbytes = sum(group.size * array.dtype.itemsize for array in _arrays(state))
        self.sliced = nbytes >= CHUNKED_FROM and len(self.order) > 1
        counts = (len(self.order),) if self.sliced else ()
        self.bounds = list(itertools.pairwise(offsets(group.size, counts).tolist()))

    def _merge(self, k: int) -> Any:
        return functools.partial(self.ops.merge, k)

    def _own(self, tree: Subtree, owner: int) -> Any:
        """Returns the state of a subtree whose leaves are all in one process, on the device of its first leaf."""
        k = self.contributors[tree.rank]
        if owner != process_index():
            return self.states[k]

        def state(rank: int) -> Any:
            source = self.contributors[rank]
            return self.states[source] if source == k else self.ops.send(self.states[source], source, k)

        return self.trees.combined(tree, state, self._merge(k), {})

    def messages(self) -> list[tuple[Any, int, int]]:
        """Returns the states that the processes send to each other, and to their own first members."""
        sent = []
        for tree, owner in self.trees.owners.items():
            k, state = self.contributors[tree.rank], self._own(tree, owner)
            for number, p in enumerate(self.order):
                part = self.ops.cut(k, state, *self.bounds[number]) if self.sliced else state
                sent.append((part, k, self.first[p]))
        return sent

    def total(self, arrived: Sequence[Any], here: int) -> Any:
        """Returns the result, or the part of it that this process combines; None in a process without a member."""
        if here not in self.first:
            return None
        leader, number = self.first[here], self.order.index(here)
        mine = arrived[number :: len(self.order)]
        known = {}
        for (tree, owner), state in zip(self.trees.owners.items(), mine, strict=True):
            k = self.contributors[tree.rank]
            known[tree] = self.ops.send(state, k, leader) if owner == here and k != leader else state
        total = self.trees.combined(self.trees.root, None, self._merge(leader), known)
        return self.ops.finish(leader, total)

    def shares(self, total: Any) -> list[tuple[Any, int, int]]:
        """Returns the messages with the parts of a long result, from each process to each."""
        if not self.sliced:
            return []
        here, sent = process_index(), []
        for (begin, end), source in zip(self.bounds, self.order, strict=True):
            part = total if source == here else RemoteArray((end - begin,), self.dtype)
            sent += [(part, self.first[source], self.first[p]) for p in self.order]
        return sent

    def results(self, total: Any, arrived: Sequence[Any], here: int) -> dict[int, Any]:
        """Returns the result on each member in this process, by position."""
        if here not in self.first:
            return {}
        leader = self.first[here]
        if self.sliced:
            total = self.ops.join(leader, list(arrived[self.order.index(here) :: len(self.order)]))
        members = [k for k, p in zip(self.group.members, self.processes, strict=True) if p == here]
        return {k: total if k == leader else self.ops.send(total, leader, k) for k in members}
