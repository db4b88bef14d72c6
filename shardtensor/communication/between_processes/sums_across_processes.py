"""All-reduce and reduce-scatter over devices of several processes, with the bits of one process.

States are combined along the same tree as in one process (see `shardtensor.communication.all_reduce`). A process
combines the subtrees whose leaves are all its own, and sends only their states: at most 2 log2(n) of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of, process_index
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.all_reduce import CHUNKED_FROM, Group, ReduceOps, Tree
from shardtensor.communication.between_processes.processes import cross
from shardtensor.host import memory_pool
from shardtensor.sharding.layout import offsets

_BLOCK = 1 << 23
"""Bytes of a long result that are combined at a time."""


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
        processes = {self._processes[tree.rank]}
        for other in self._tree[tree.rank][: tree.others]:
            processes |= self._leaves(self.whole(other))
        return processes

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

    def cross(self, messages: Sequence[tuple[Any, int, int]], into: Sequence[Any] | None = None) -> list[Any]:
        """Sends states between devices in one exchange.

        Args:
            messages: a state, and the positions of its device and of the device that receives it.
            into: for each state, which is an array, the array that receives its elements.
        """
        leaves = [(leaf, self.devices[i], self.devices[j]) for state, i, j in messages for leaf in _arrays(state)]
        arrived = iter(cross(leaves, self.caller, into))
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


def divided(size: int, nbytes: int, processes: int) -> list[list[tuple[int, int]]]:
    """Returns how the processes of a group divide a result.

    Args:
        size: the number of elements of the result.
        nbytes: the bytes of a state.
        processes: the number of processes.

    Returns:
        Of a long result, for each block the bounds of the part that each process combines; of others one block without
        parts, since each process combines all of it.
    """
    if nbytes < CHUNKED_FROM or processes == 1:
        return [[]]
    blocks = []
    for begin, end in itertools.pairwise(offsets(size, (-(-nbytes // _BLOCK),)).tolist()):
        ends = (offsets(end - begin, (processes,)) + begin).tolist()
        blocks.append(list(itertools.pairwise(ends)))
    return blocks


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
    process combines a part, block by block, so that few bytes are in messages at a time.

    Args:
        groups: the groups of devices.
        states: the state of each device, by position; those of other processes have the same structure.
        ops: the operations on states.
        devices: the devices, in mesh order.
        dtype: the dtype of the result.
        caller: the name of the operator.
    """
    carrier = States(devices, caller)
    jobs = [_GroupAcross(group, states, ops, devices, dtype) for group in groups]
    for number in range(max(len(job.blocks) for job in jobs)):
        some = [job for job in jobs if number < len(job.blocks)]
        messages = [job.messages(number) for job in some]
        arrived = iter(carrier.cross(list(itertools.chain.from_iterable(messages))))
        for job, sent in zip(some, messages, strict=True):
            job.combine(number, list(itertools.islice(arrived, len(sent))))
        if parts := [part for job in some for part in job.shares(number)]:
            carrier.cross([part[:3] for part in parts], [part[3] for part in parts])
    results: dict[int, Any] = {}
    for job in jobs:
        results |= job.results()
    return results


def reduce_scatter_across(
    groups: Sequence[Group],
    states: Mapping[int, Any],
    part: Callable[[Any, int, int], Any],
    ops: ReduceOps,
    devices: Sequence[Device],
    caller: str,
) -> dict[int, Any]:
    """Combines for each device of this process its part of the states of its group, in one exchange; returns the states
    of these parts by position.

    Args:
        groups, states, ops, devices, caller: see `all_reduce_across`.
        part: ``part(state, j, k)`` returns the part of a state on device j that device k combines.
    """
    shares = [
        _Share(k, trees, tree, group.contributors)
        for group in groups
        for trees in [subtrees(group.tree, tuple([devices[j].process_index for j in group.contributors]))]
        for k, tree in itertools.product(group.members, trees.owners)
    ]

    def is_here(k: int) -> bool:
        return devices[k].process_index == process_index()

    def combined(share: _Share) -> Any:
        """Returns the state that a share's holder sends: of one in another process, the structure of it."""

        def leaf(rank: int) -> Any:
            j = share.contributors[rank]
            own = part(states[j], j, share.receiver)
            return own if j == share.holder else ops.send(own, j, share.holder)

        if not is_here(share.holder):
            return leaf(share.tree.rank)
        return share.trees.combined(share.tree, leaf, functools.partial(ops.merge, share.holder), {})

    arrived = States(devices, caller).cross([(combined(share), share.holder, share.receiver) for share in shares])
    received: dict[int, tuple[Subtrees, dict[Subtree, Any]]] = {}
    for share, state in zip(shares, arrived, strict=True):
        k = share.receiver
        if is_here(k):
            moves = is_here(share.holder) and share.holder != k  # An array from another process is on its device.
            held = received.setdefault(k, (share.trees, {}))[1]
            held[share.tree] = ops.send(state, share.holder, k) if moves else state
    return {
        k: trees.combined(trees.root, None, functools.partial(ops.merge, k), held)
        for k, (trees, held) in received.items()
    }


class _Share(NamedTuple):
    """The combined states of the leaves of one subtree, which are all in one process, for the part of one device.

    Attributes:
        receiver: the position of the device that combines the shares of its part.
        trees, tree: the subtrees of the group, and that of this share.
        contributors: the positions of the leaves of the group's tree.
    """

    receiver: int
    trees: Subtrees
    tree: Subtree
    contributors: Sequence[int]

    @property
    def holder(self) -> int:
        """The device on which the states are combined: the first of the subtree's leaves."""
        return self.contributors[self.tree.rank]


class _GroupAcross:
    """The all-reduce of one group; see `all_reduce_across`.

    Attributes:
        blocks: see `divided`.
    """

    def __init__(
        self,
        group: Group,
        states: Mapping[int, Any],
        ops: ReduceOps,
        devices: Sequence[Device],
        dtype: np.dtype[Any],
    ) -> None:
        self._dtype = dtype
        self._ops = ops
        processes = [devices[k].process_index for k in group.members]
        self._contributors = group.contributors
        # In each process that has a member, its first one combines the states.
        self._first = {p: k for k, p in zip(reversed(group.members), reversed(processes), strict=True)}
        self._order = sorted(self._first)
        self._trees = subtrees(group.tree, tuple([devices[k].process_index for k in self._contributors]))
        self._here = process_index()
        self._own = [k for k, p in zip(group.members, processes, strict=True) if p == self._here]
        self._states = {k: states[k] for k in self._contributors}
        itemsizes = [array.dtype.itemsize for array in _arrays(states[self._contributors[0]]) if array.shape]
        self.blocks = divided(group.size, group.size * sum(itemsizes), len(self._order))
        self._total: Any = None
        if self.blocks[0]:
            self._states = {k: ops.cut(k, state, 0, group.size) for k, state in self._states.items()}
            if self._own:
                self._device = devices[self._own[0]]
                backend = backend_of(self._device)
                with backend.on(self._device):
                    empty = memory_pool.empty if backend.on_host else backend.xp.empty
                    self._total = empty((group.size,), dtype=dtype)

    def _merge(self, k: int) -> Any:
        return functools.partial(self._ops.merge, k)

    def _state(self, tree: Subtree, owner: int, bounds: tuple[int, int] | None) -> Any:
        """Returns the state of a subtree whose leaves are all in one process, or a part of it, on the device of its
        first leaf.
        """
        k = self._contributors[tree.rank]

        def state(rank: int) -> Any:
            source = self._contributors[rank]
            own = self._states[source]
            part = self._ops.cut(source, own, *bounds) if bounds else own
            return part if source == k else self._ops.send(part, source, k)

        return self._trees.combined(tree, state, self._merge(k), {}) if owner == self._here else state(tree.rank)

    def messages(self, number: int) -> list[tuple[Any, int, int]]:
        """Returns the states that the processes send to each other, and to their own first members."""
        sent = []
        bounds: Sequence[tuple[int, int] | None] = self.blocks[number] or [None] * len(self._order)
        for tree, owner in self._trees.owners.items():
            whole = None if self.blocks[number] else self._state(tree, owner, None)
            for p, ends in zip(self._order, bounds, strict=True):
                state = self._state(tree, owner, ends) if ends else whole
                sent.append((state, self._contributors[tree.rank], self._first[p]))
        return sent

    def combine(self, number: int, arrived: Sequence[Any]) -> None:
        """Combines the states that this process has received to the result, or to the part that it has of a block."""
        if not self._own:
            return
        leader, place = self._own[0], self._order.index(self._here)
        known = {}
        for (tree, owner), state in zip(self._trees.owners.items(), arrived[place :: len(self._order)], strict=True):
            k = self._contributors[tree.rank]
            known[tree] = self._ops.send(state, k, leader) if owner == self._here and k != leader else state
        total = self._ops.finish(leader, self._trees.combined(self._trees.root, None, self._merge(leader), known))
        if self.blocks[number]:
            with backend_of(self._device).on(self._device):
                self._total[slice(*self.blocks[number][place])] = total
        else:
            self._total = total

    def shares(self, number: int) -> list[tuple[Any, int, int, Any]]:
        """Returns the messages with the parts of a block of a long result, from each process to each, and where they
        are received.
        """
        sent = []
        for (begin, end), source in zip(self.blocks[number], self._order, strict=False):
            away = RemoteArray((end - begin,), self._dtype)
            mine = self._ops.cut(self._own[0], self._total, begin, end) if self._own else away
            sent += [
                (mine if source == self._here else away, self._first[source], self._first[p], mine)
                for p in self._order
                if p != source
            ]
        return sent

    def results(self) -> dict[int, Any]:
        """Returns the result on each member in this process, by position."""
        if not self._own:
            return {}
        leader, total = self._own[0], self._total
        if self.blocks[0]:
            total = self._ops.join(leader, [total])
        return {k: total if k == leader else self._ops.send(total, leader, k) for k in self._own}
