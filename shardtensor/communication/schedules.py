"""Schedules: the messages of reshards and collectives, as arrays of sources, destinations and sizes.

Schedules are pure arithmetic and lazy, so that they work for any number of devices: of the 16 million messages among
4096 devices, a few hundred thousand exist at a time.

A schedule is a sequence of phases. The messages of one phase are independent of each other; those of the next phase
begin when it is over. They are the messages of `shardtensor.sharding.copy_plan`, `shardtensor.communication.all_reduce`
and `shardtensor.communication.communicator`, which the backends execute.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.backend.abstract import NAME, abstract_device
from shardtensor.backend.device import HOST, Device
from shardtensor.communication.all_reduce import Group, reduction_tree
from shardtensor.communication.transfer_log import (
    Transfer,
    TransferBatch,
    TransferRecords,
    guarded,
    is_recording,
    record_transfer,
)
from shardtensor.host import fork
from shardtensor.host.fork import cached_property
from shardtensor.sharding.copy_plan import Region, RegionCopies, pieces_in
from shardtensor.sharding.layout import Grid, Ints, offsets

HOST_ID = -1
_AT_A_TIME = 1 << 19


class Block(NamedTuple):
    """Messages of one phase, as arrays that broadcast together.

    Messages from a device to itself, and those of 0 bytes, do not count.

    Attributes:
        sources, destinations: ids of devices (see `ids_of`); `HOST_ID` for the host.
        sizes: the bytes of each message.
    """

    sources: Ints
    destinations: Ints
    sizes: Ints


Phase = Iterator[Block]


def flat(blocks: Iterable[Block]) -> Block:
    """Returns the messages of flat blocks as one block."""
    nothing = Block(*[np.zeros(0, np.int64)] * 3)
    return Block(*map(np.concatenate, zip(nothing, *blocks, strict=True)))


def ids_of(devices: Sequence[Device]) -> Ints:
    """Returns numbers that identify devices: the ids of simulated devices of process 0, `HOST_ID`, and less for others.

    Those of other processes have the same ids in meshes with other numbers of processes.
    """
    return np.array([d.id if d.backend == NAME and not d.process_index else _number_of(d) for d in devices], np.int64)


def device_of(number: int) -> Device:
    """Returns the device that a number identifies; see `ids_of`."""
    return _known[number] if number < 0 else abstract_device(number)


def by_id(devices: Sequence[Device], values: npt.ArrayLike) -> Callable[[Ints], Ints]:
    """Returns the function that returns the values of devices, each given by its number (see `ids_of`); -1 for others.

    Args:
        devices: the devices.
        values: the value of each.
    """
    numbers = ids_of(devices)
    least, count = int(numbers.min()), int(np.ptp(numbers)) + 1
    table = np.full(count + 1, -1)  # The last one is for other devices.
    table[numbers - least] = values
    return lambda ids: table[np.where((ids >= least) & (ids < least + count), ids - least, count)]


def _number_of(device: Device) -> int:
    if device not in _numbers:
        with _numbering:  # Without a GIL, two threads may get the same number from a counter.
            if device not in _numbers:
                number = HOST_ID - len(_known)
                _known[number] = device
                _numbers[device] = number
    return _numbers[device]


_numbers = {HOST: HOST_ID}
_known = {HOST_ID: HOST}
_numbering = fork.lock()
"""It is reentrant, since finalizers may call the library."""


_ids_of_mesh: Callable[[tuple[Device, ...]], Ints] = functools.lru_cache(64)(ids_of)


class Schedule(abc.ABC):
    """The messages of one operator. No device sends two messages to the same device in one phase.

    Attributes:
        operator, explicit, axis: see `shardtensor.communication.transfer_log.Transfer`.
    """

    operator: str
    explicit: bool
    axis = ""

    @abc.abstractmethod
    def phases(self) -> Iterator[Phase]:
        """Yields the phases, each an iterator of blocks."""

    def parts(self) -> Sequence[Schedule]:
        """Returns the schedules that it consists of, which are independent and run at the same time."""
        return (self,)

    @property
    def key(self) -> Any:
        """A hashable key; schedules with equal keys have the same messages."""
        return id(self)

    @cached_property
    def bytes(self) -> int:
        """The bytes of all messages."""
        return sum(int(b.sizes.sum()) for phase in self.phases() for b in map(sent, phase))

    def __call__(self, copied: bool | int = False) -> TransferBatch:
        """Returns the transfers for the log; see `announce`."""
        sources, destinations, sizes = flat(sent(block) for phase in self.phases() for block in phase)
        least = min(int(sources.min(initial=0)), int(destinations.min(initial=0)))
        batch = TransferBatch(
            sources - least, destinations - least, sizes, lambda number: device_of(number + least),
            operator=self.operator, explicit=self.explicit, axis=self.axis, copied=copied is True,
        )  # fmt: skip
        return batch if isinstance(copied, bool) else batch.copying(copied)

    def announce(self, copied: bool | int | None = None) -> None:
        """Checks the messages against the guard and records them, if a log or a guard is active.

        See `shardtensor.communication.transfer_log.record_transfer`.

        Args:
            copied: whether the bytes are copied here, or how many of them; None if the messages are only planned.
        """
        if is_recording():
            nbytes = self.bytes if guarded() and not self.explicit else 0
            records = self if copied is None else functools.partial(self, copied)
            record_transfer(self.operator, nbytes, self.explicit, records)


def sent(block: Block) -> Block:
    """Returns the messages of a block as flat arrays, without those that do not count."""
    sources, destinations, sizes = np.broadcast_arrays(*block)
    count = (sources != destinations) & (sizes > 0)
    return Block(sources[count], destinations[count], sizes[count])


def one_for_each_pair(block: Block) -> Block:
    """Returns flat messages with those from one device to the same other one as one message."""
    if not len(block.sizes):
        return block
    least = min(int(block.sources.min()), int(block.destinations.min()))
    width = int(block.destinations.max()) - least + 1
    pairs, inverse = np.unique((block.sources - least) * width + block.destinations - least, return_inverse=True)
    totals = np.zeros(len(pairs), np.int64)
    np.add.at(totals, inverse, block.sizes)
    return Block(pairs // width + least, pairs % width + least, totals)


class Beside(Schedule):
    """Schedules of disjoint groups of devices, which run at the same time.

    Args:
        parts: the schedules.
        contents: for each of them a value that is equal for groups whose devices have the same elements, in order.
    """

    def __init__(self, parts: Sequence[Schedule], contents: Sequence[Any] = ()) -> None:
        self.operator, self.explicit, self.axis = parts[0].operator, parts[0].explicit, parts[0].axis
        self.contents = contents or range(len(parts))
        self._parts = parts

    def parts(self) -> Sequence[Schedule]:
        """See `Schedule`."""
        return self._parts

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""
        for part in self._parts:
            yield from part.phases()


class InTurn(Schedule):
    """Schedules that follow one another, as one."""

    explicit = False

    def __init__(self, steps: Sequence[Schedule], operator: str) -> None:
        self.operator = operator
        self.steps = steps

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""
        for step in self.steps:
            yield from step.phases()


# -- reshards --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Move(Schedule):
    """The messages of a `shardtensor.communication.transfer_plan.TransferPlan`, all in one phase.

    Attributes:
        regions, sources, result: see `TransferPlan`.
        itemsizes: the bytes of one element of each operand. Elements are converted where they arrive.
        operator, explicit: see `Schedule`.
    """

    regions: Sequence[Region]
    sources: Sequence[Grid]
    result: Grid
    itemsizes: Sequence[int]
    operator: str
    explicit: bool

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""
        if len(self.regions) == 1:
            yield self._blocks(self.regions[0])
        elif self.regions:
            yield self._joined()

    def _blocks(self, region: Region) -> Phase:
        source, result = self.sources[region.operand], self.result
        here, there = _ids_of_mesh(source.devices), _ids_of_mesh(result.devices)
        pieces, receivers = pieces_in(region, source, result)
        step = max(_AT_A_TIME // max(receivers, 1), 1)
        for begin in range(0, pieces, step):
            copies = RegionCopies(region, 0, source, result, (begin, min(begin + step, pieces)))
            sizes = copies.sizes * self.itemsizes[region.operand]
            yield Block(here[copies.source], there[copies.destination], sizes)

    def _joined(self) -> Phase:
        """Yields one block in which the pieces that several regions send from one device to another are one message."""
        yield one_for_each_pair(flat(sent(block) for region in self.regions for block in self._blocks(region)))


class HostCopies(Schedule):
    """Arrays of a few integers, of which the host needs those of all devices. Only processes send them to each other.

    Args:
        devices: the device of each array.
        sizes: the bytes of each array.
    """

    operator, explicit = "to_host", True

    def __init__(self, devices: Sequence[Device], sizes: Sequence[int]) -> None:
        self.ids = ids_of(devices)
        self.sizes = sizes

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""
        return iter(())


class Listed(Schedule):
    """The transfers of a log, as one phase.

    Args:
        records: the transfers.
        planned: the plan that they are of, if there is one.
    """

    def __init__(self, records: Sequence[Transfer], planned: TransferRecords | None = None) -> None:
        self.planned = planned
        self.operator, self.explicit, self.axis = records[0].operator, records[0].explicit, records[0].axis
        self._records = records

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""
        ends = [ids_of([getattr(r, end) for r in self._records]) for end in ("source", "destination")]
        yield iter([Block(ends[0], ends[1], np.array([r.bytes for r in self._records], np.int64))])


# -- collectives -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Collective(Schedule):
    """The messages of a collective within one group of devices.

    Attributes:
        members: the ids of the group's devices, in order.
        operator, axis: see `Schedule`.
    """

    explicit = True
    members: Ints

    @property
    def key(self) -> Any:
        """See `Schedule`."""
        values = [getattr(self, attribute.name) for attribute in fields(self)]
        return type(self), *[value.tobytes() if isinstance(value, np.ndarray) else value for value in values]


@dataclass(eq=False)
class AllReduce(Collective):
    """The messages of `shardtensor.communication.all_reduce.all_reduce`.

    Attributes:
        contributes, axes, chunked: see `shardtensor.communication.all_reduce.Group`.
        state, result: bytes of a state and of the result.
        elements: the number of elements of the result.
        numbers: how many numbers there are in a state beside its arrays. Only processes send them to each other.
    """

    contributes: tuple[bool, ...]
    axes: tuple[int, ...]
    chunked: bool
    state: int
    result: int
    operator: str
    axis: str = ""
    elements: int = 0
    numbers: int = 0

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""
        members, positions = self.members, np.flatnonzero(self.contributes)
        contributors = members[positions]
        if not self.chunked:
            for merges in reduction_tree(self.contributes, self.axes):
                left, right = np.array(merges).T
                yield iter([Block(members[right], members[left], np.array([self.state]))])
            yield from _broadcast(members, int(positions[0]), self.result)
            return
        states, results = (np.diff(offsets(n, (len(contributors),))) for n in (self.state, self.result))
        yield _all_to_all(contributors, contributors, lambda rows: states[None, :])
        yield _all_to_all(contributors, members, lambda rows: results[rows, None])


def _broadcast(members: Ints, root: int, size: int) -> Iterator[Phase]:
    """Yields the phases of a broadcast; see `shardtensor.communication.all_reduce.binomial_tree`."""
    order = np.concatenate([members[root : root + 1], np.delete(members, root)])
    known = 1
    while known < len(order):
        new = order[known : 2 * known]
        yield iter([Block(order[: len(new)], new, np.array([size]))])
        known *= 2


def _all_to_all(sources: Ints, destinations: Ints, sizes: Callable[[slice], Ints]) -> Phase:
    """Yields the messages from each source to each destination; ``sizes(rows)`` returns those of a slice of sources."""
    step = max(_AT_A_TIME // max(len(destinations), 1), 1)
    for begin in range(0, len(sources), step):
        rows = slice(begin, begin + step)
        yield Block(sources[rows, None], destinations[None, :], sizes(rows))


@dataclass(eq=False)
class AllToAll(Collective):
    """The messages of a collective in which each member sends to each other member.

    Attributes:
        rows: for each member the bytes of a row.
        shares: divisions of rows: each has the number of rows that each member receives.
        which: for each member, the position in ``shares`` of the division of its rows.
    """

    rows: Ints
    shares: Ints
    which: Ints
    operator: str
    axis: str

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""

        def sizes(some: slice) -> Ints:
            shares = self.shares if len(self.shares) == 1 else self.shares[self.which[some]]
            return self.rows[some, None] * shares

        yield _all_to_all(self.members, self.members, sizes)


@dataclass(eq=False)
class ReduceScatter(AllToAll):
    """The messages of a reduce-scatter: each member that contributes sends every other one its part of a state.

    Attributes:
        contributes, axes: see `shardtensor.communication.all_reduce.Group`.
        numbers: see `AllReduce`.
    """

    contributes: tuple[bool, ...] = ()
    axes: tuple[int, ...] = ()
    numbers: int = 0


class AllGather(AllToAll):
    """The messages of a collective in which each member sends every other member the same row."""


@dataclass(eq=False)
class Permute(Collective):
    """The messages of a permutation: some members send to one member each.

    Attributes:
        sources, destinations: the positions of the ends of each message.
        sizes: the bytes of each message.
    """

    sources: Ints
    destinations: Ints
    sizes: Ints
    operator: str
    axis: str

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""
        yield iter([Block(self.members[self.sources], self.members[self.destinations], self.sizes)])


@dataclass(eq=False)
class Broadcast(Collective):
    """The messages that send the array of the member at position ``root`` to all members, along a binomial tree."""

    root: int
    size: int
    operator: str
    axis: str

    def phases(self) -> Iterator[Phase]:
        """See `Schedule`."""
        return _broadcast(self.members, self.root, self.size)


# -- reductions of operators -----------------------------------------------------------------------


def combination(
    operator: str,
    devices: tuple[Device, ...],
    groups: Sequence[Group],
    contents: Sequence[Any],
    state: int,
    result: int,
    numbers: int,
) -> Schedule:
    """Returns the schedule that combines the partial results of an operator's reduction in each group of devices.

    Args:
        operator: the name of the operator.
        devices: the devices, in mesh order.
        groups: the groups of positions.
        contents: see `Beside`.
        state, result: bytes of one element of a partial result, and of the result.
        numbers: see `AllReduce`.
    """
    ids = _ids_of_mesh(devices)
    parts = [
        AllReduce(
            ids[np.asarray(g.members)], g.contributes, g.axes, g.chunked, g.size * state, g.size * result, operator,
            elements=g.size, numbers=numbers,
        )
        for g in groups
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else Beside(parts, contents)


def scattered_combination(
    operator: str, devices: tuple[Device, ...], groups: Sequence[Group], state: int, sizes: Sequence[int], numbers: int
) -> Schedule:
    """Returns the schedule of a reduce-scatter in each group of devices; see `ReduceScatter`.

    Args:
        operator, devices, groups, state, numbers: see `combination`.
        sizes: the number of elements of each device's part of the result.
    """
    ids, parts = _ids_of_mesh(devices), []
    for group in groups:
        members = np.asarray(group.members)
        rows, shares = np.array(group.contributes, np.int64) * state, np.array(sizes, np.int64)[members]
        which = np.zeros(len(members), np.int64)
        kind = functools.partial(ReduceScatter, contributes=group.contributes, axes=group.axes, numbers=numbers)
        parts.append(kind(ids[members], rows, shares[None, :], which, operator, ""))
    return parts[0] if len(parts) == 1 else Beside(parts)
