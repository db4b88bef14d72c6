"""All-reduces of few bytes across processes, which are prepared once: a call takes one exchange, that of the header."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import backend_of, process_index
from shardtensor.communication.all_reduce import Group, ReduceOps
from shardtensor.communication.between_processes.agreement import SHORT
from shardtensor.communication.between_processes.processes import connected
from shardtensor.communication.between_processes.rounds import Parcel, rounds
from shardtensor.communication.between_processes.sums_across_processes import (
    Subtree,
    Subtrees,
    all_reduce_across,
    divided,
    subtrees,
)


class _Leaf(NamedTuple):
    """An array or a number in a state, and where it is in the record of the process that sends it."""

    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    number: type | None

    def read(self, record: bytes) -> Any:
        """Returns the array or the number in a record."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        # A copy, since records cannot be written to, and may not be aligned.
        array = np.frombuffer(record, np.uint8, nbytes, self.begin).copy().view(self.dtype)
        return array.reshape(self.shape) if self.number is None else self.number(array[0])


class _Part(NamedTuple):
    """A subtree of a group, whose leaves are all in one process.

    Attributes:
        tree: the subtree.
        owner: the process.
        leaves: the arrays and numbers of its state.
        is_tuple: whether the state is a tuple of them.
    """

    tree: Subtree
    owner: int
    leaves: Sequence[_Leaf]
    is_tuple: bool


class _Prepared(NamedTuple):
    """What is known of a group before the call.

    Attributes:
        group: the group.
        trees: its subtrees.
        parts: those that are sent.
        own: the members in this process.
    """

    group: Group
    trees: Subtrees
    parts: Sequence[_Part]
    own: Sequence[int]


class AllReduceAcross:
    """The all-reduces of an operator's plan over devices of several processes, of states of the same shapes and dtypes.

    Args:
        groups, ops, devices, dtype, caller: see `all_reduce_across`, which executes those of other devices than the
            host's, and of more bytes.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        ops: ReduceOps,
        devices: Sequence[Device],
        dtype: np.dtype[Any],
        caller: str,
    ) -> None:
        self._groups, self._ops, self._devices, self._dtype, self._caller = groups, ops, devices, dtype, caller
        self._merges = {k: functools.partial(ops.merge, k) for group in groups for k in group.members}
        self._prepared: list[_Prepared] | None = None
        self._is_short: bool | None = None
        self._call, self._sent = "", dict[int, int]()

    def __call__(self, states: Mapping[int, Any]) -> dict[int, Any]:
        """Combines the states of the devices; see `all_reduce_across`."""
        if self._is_short is None:
            self._prepare(states)
        job = connected(self._caller)
        if not self._is_short or not job.sends_short:
            return all_reduce_across(self._groups, states, self._ops, self._devices, self._dtype, self._caller)
        assert self._prepared is not None
        here, known, pieces = process_index(), dict[Any, Any](), list[bytes]()
        for number, (group, trees, parts, _) in enumerate(self._prepared):
            contributors = group.contributors
            for part in parts:
                if part.owner == here:
                    state = self._combined(trees, contributors, part.tree, states)
                    known[number, part.tree] = state
                    pieces += [np.asarray(leaf).tobytes() for leaf in (state if part.is_tuple else (state,))]
        for receiver, nbytes in self._sent.items():
            job.sent[receiver] += nbytes
        records = job.gather(self._call, b"".join(pieces).ljust(SHORT, b"\0"))
        results: dict[int, Any] = {}
        for number, (_, trees, parts, own) in enumerate(self._prepared):
            if not own:
                continue
            arrived = {}
            for part in parts:
                state = known.get((number, part.tree))
                if state is None:
                    leaves = tuple([leaf.read(records[part.owner]) for leaf in part.leaves])
                    state = leaves if part.is_tuple else leaves[0]
                arrived[part.tree] = state
            leader = own[0]
            total = self._ops.finish(leader, trees.combined(trees.root, None, self._merges[leader], arrived))
            for k in own:
                results[k] = total if k == leader else self._ops.send(total, leader, k)
        return results

    def _combined(self, trees: Subtrees, contributors: Sequence[int], tree: Subtree, states: Mapping[int, Any]) -> Any:
        """Returns the state of a subtree of this process, on the device of its first leaf."""
        k, send = contributors[tree.rank], self._ops.send

        def state(rank: int) -> Any:
            source = contributors[rank]
            return states[source] if source == k else send(states[source], source, k)

        return trees.combined(tree, state, self._merges[k], {})

    def _prepare(self, states: Mapping[int, Any]) -> None:
        """Finds out which messages there are, and whether they are short."""
        here, prepared, parcels, ends = process_index(), list[_Prepared](), list[Parcel](), dict[int, int]()
        known = [device for device in self._devices if device.process_index == here]
        on_host = all(backend_of(device).on_host for device in known)
        for group in self._groups:
            processes = [self._devices[k].process_index for k in group.members]
            order, contributors = sorted(set(processes)), group.contributors
            trees = subtrees(group.tree, tuple([self._devices[k].process_index for k in contributors]))
            parts = []
            for tree, owner in trees.owners.items():
                state, begin = states[contributors[tree.rank]], ends.get(owner, 0)
                leaves = list(_leaves(state, begin))
                ends[owner] = begin + sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
                parts.append(_Part(tree, owner, leaves, isinstance(state, tuple)))
                parcels += [
                    Parcel(owner, p, leaf.shape, leaf.dtype)
                    for leaf, p in itertools.product(leaves, order)
                    if p != owner
                ]
            arrays = [leaf for leaf in parts[0].leaves if leaf.number is None]
            nbytes = sum(group.size * leaf.dtype.itemsize for leaf in arrays)
            on_host = on_host and not divided(group.size, nbytes, len(order))[0]
            prepared.append(_Prepared(group, trees, parts, [k for k in group.members if self._devices[k] in known]))
        self._is_short = bool(parcels) and on_host and max(ends.values()) <= SHORT
        if self._is_short:
            self._prepared, self._call = prepared, f"{self._caller}: {rounds(tuple(parcels), SHORT).text}"
            for sender, receiver, shape, dtype in parcels:
                if sender == here:
                    self._sent[receiver] = self._sent.get(receiver, 0) + math.prod(shape) * dtype.itemsize


def _leaves(state: Any, begin: int) -> Iterator[_Leaf]:
    """Yields the arrays and numbers of a state, which are in a record from ``begin`` on."""
    for part in state if isinstance(state, tuple) else (state,):
        if type(part) in (int, float):
            leaf = _Leaf(begin, (), np.asarray(part).dtype, type(part))
        else:
            leaf = _Leaf(begin, tuple(part.shape), part.dtype, None)
        begin += math.prod(leaf.shape) * leaf.dtype.itemsize
        yield leaf
