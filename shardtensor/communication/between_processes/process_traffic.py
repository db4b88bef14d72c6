"""The bytes that processes send each other in order to execute a schedule, as they and their engine count them.

Devices of one process share its memory. Processes therefore send elements that several devices of a process lack once,
and combine partial results by other messages than devices do (see
`shardtensor.communication.between_processes.sums_across_processes`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardtensor.backend.device import HOST
from shardtensor.communication.all_reduce import tree_of
from shardtensor.communication.between_processes.processes import process_of
from shardtensor.communication.between_processes.sums_across_processes import divided, subtrees
from shardtensor.communication.gather_scatter import GatherPlan
from shardtensor.communication.schedules import (
    AllGather,
    AllReduce,
    Beside,
    Broadcast,
    HostCopies,
    InTurn,
    Listed,
    Move,
    ReduceScatter,
    Schedule,
)
from shardtensor.communication.transfer_plan import TransferPlan
from shardtensor.sharding.cells import cells
from shardtensor.sharding.copy_plan import Region
from shardtensor.sharding.layout import Grid, Ints

ProcessesOf = Callable[[Ints], Ints]
"""Returns the process of each device, given by its number (see `ids_of`); -1 for the host and devices that exist."""

Sent = Iterator[tuple[int, int, int]]
"""Messages: the process that sends, the one that receives, and the bytes."""

_NUMBER = 8
"""The bytes of a number in a state."""


def between_processes(schedule: Schedule, processes_of: ProcessesOf, count: int) -> Ints:
    """Returns the bytes that each process sends to each other one: an array of shape (count, count).

    Args:
        schedule: the messages between devices.
        processes_of: see `ProcessesOf`.
        count: the number of processes.
    """
    table = np.zeros((count, count), np.int64)
    for source, destination, size in _sent(schedule, processes_of):
        if source != destination:
            table[source, destination] += size
    return table


@functools.singledispatch
def _sent(schedule: Schedule, processes_of: ProcessesOf) -> Sent:
    """Yields the messages that processes send; those from one to itself do not count."""
    return _of_devices(schedule, processes_of)


def _of_devices(schedule: Schedule, processes_of: ProcessesOf) -> Sent:
    """Yields the messages that devices send to devices of other processes."""
    for block in itertools.chain.from_iterable(schedule.phases()):
        ends = processes_of(block.sources), processes_of(block.destinations)
        sources, destinations, sizes = np.broadcast_arrays(*ends, block.sizes)
        away = (sources != destinations) & (sources >= 0) & (destinations >= 0)
        yield from zip(sources[away].tolist(), destinations[away].tolist(), sizes[away].tolist(), strict=True)


@_sent.register
def _(schedule: Beside, processes_of: ProcessesOf) -> Sent:
    known = set()
    for part, content in zip(schedule.parts(), schedule.contents, strict=True):
        key = content, processes_of(part.members).tobytes() if isinstance(part, AllReduce) else id(part)
        if key not in known:  # Groups that hold the same elements in the same processes share one result.
            known.add(key)
            yield from _sent(part, processes_of)


@_sent.register
def _(schedule: InTurn, processes_of: ProcessesOf) -> Sent:
    for step in schedule.steps:
        yield from _sent(step, processes_of)


@_sent.register
def _(schedule: Move, processes_of: ProcessesOf) -> Sent:
    return _between_cells(schedule.regions, schedule.sources, schedule.result, schedule.itemsizes)


def _between_cells(regions: Sequence[Region], sources: Sequence[Grid], result: Grid, itemsizes: Sequence[int]) -> Sent:
    """Yields the messages of a plan of copies between the buffers that processes have of the arrays."""
    if HOST in result.devices:
        return
    plan = TransferPlan(regions, [_in_processes(grid) for grid in sources], _in_processes(result))
    for piece in plan.crossing.values():
        region = plan.regions[piece.region]
        # Along a new dimension, elements repeat at the destination.
        sizes = [to.stop - to.start for line, to in zip(region.lines, piece.to, strict=True) if line.source is not None]
        source, destination = plan.sources[region.operand].devices[piece.j], plan.result.devices[piece.k]
        yield process_of(source), process_of(destination), math.prod(sizes) * itemsizes[region.operand]


@_sent.register
def _(schedule: Listed, processes_of: ProcessesOf) -> Sent:
    planned = schedule.planned
    if planned is not None and isinstance(planned.plan, TransferPlan):
        regions, sources, result = planned.plan.regions, planned.plan.sources, planned.plan.result
        return _between_cells(regions, sources, result, [planned.itemsize] * len(sources))
    if planned is not None and isinstance(planned.plan, GatherPlan):
        return ((source, to, size * planned.itemsize) for source, to, size in planned.plan.between_processes())
    return _of_devices(schedule, processes_of)


@_sent.register
def _(schedule: HostCopies, processes_of: ProcessesOf) -> Sent:
    processes = processes_of(schedule.ids).tolist()
    for source, size in zip(processes, schedule.sizes, strict=True):
        for destination in set(processes):
            yield source, destination, size


@_sent.register
def _(schedule: AllGather, processes_of: ProcessesOf) -> Sent:
    processes = processes_of(schedule.members).tolist()
    for source, size in zip(processes, schedule.rows.tolist(), strict=True):
        for destination in set(processes):
            yield source, destination, size


@_sent.register
def _(schedule: Broadcast, processes_of: ProcessesOf) -> Sent:
    processes = processes_of(schedule.members).tolist()
    for destination in set(processes):
        yield processes[schedule.root], destination, schedule.size


@_sent.register
def _(schedule: AllReduce, processes_of: ProcessesOf) -> Sent:
    processes = processes_of(schedule.members).tolist()
    order, contributors = sorted(set(processes)), tuple(itertools.compress(processes, schedule.contributes))
    owners = subtrees(tree_of(schedule.contributes, schedule.axes), contributors).owners.values()
    blocks = divided(schedule.elements, schedule.state, len(order))
    for bounds in blocks:
        shares = [end - begin for begin, end in bounds] or [schedule.elements] * len(order)
        for process, share in zip(order, shares, strict=True):
            for owner in owners:
                state = share * (schedule.state // max(schedule.elements, 1))
                yield owner, process, state + schedule.numbers * _NUMBER
            for other in order if bounds else ():
                yield process, other, share * (schedule.result // schedule.elements)


@_sent.register
def _(schedule: ReduceScatter, processes_of: ProcessesOf) -> Sent:
    processes = processes_of(schedule.members).tolist()
    contributors = tuple(itertools.compress(processes, schedule.contributes))
    owners = subtrees(tree_of(schedule.contributes, schedule.axes), contributors).owners.values()
    states = (int(schedule.rows.max()) * schedule.shares[0]).tolist()
    for (process, state), owner in itertools.product(zip(processes, states, strict=True), owners):
        yield owner, process, state + schedule.numbers * _NUMBER


def _in_processes(grid: Grid) -> Grid:
    """Returns the grid of the buffers that processes have of an array."""
    return cells(grid, tuple(map(process_of, grid.devices))).grid
