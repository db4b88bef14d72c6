"""Collectives among devices of one backend that have several memories: few events and copies for all arrays of a call.

Every source packs all that it sends before the first copy, so that a destination waits once for each source, and each
array is copied to its place in the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend, Launch
from shardtensor.backend.registry import shared_memory
from shardtensor.communication.all_reduce import Tree
from shardtensor.communication.merging import merged

COLLECTED = 1 << 16
"""The most bytes of partial results that are collected on one device; more of them are combined on several devices."""


class Outgoing:
    """Arrays that are sent to other memories.

    Args:
        backend: the backend of all devices.
        arrays: the arrays, those of one device one after the other.
        sources: the device of each.
        packs: for each array a function that returns what is sent of it, in row-major order; all of it, by default.
        launch: ``backend.launcher(sources)``, if the caller has it.

    Attributes:
        packed: the arrays in row-major order.
    """

    def __init__(
        self,
        backend: Backend,
        arrays: Sequence[Any],
        sources: Sequence[Device],
        packs: Sequence[Callable[[Any], Any]] | None = None,
        launch: Launch | None = None,
    ) -> None:
        self._backend = backend
        self._sources = sources
        packs = packs or [backend.contiguous] * len(arrays)
        self.packed = (launch or backend.launcher(sources))(packs, zip(arrays, strict=True))
        self._tokens = list[Any]()  # of each array that of its source, since looking devices up takes longer
        before = token = None
        for source in sources:
            if source is not before:
                before, token = source, backend.record(source)
            self._tokens.append(token)

    def wait(self, destination: Device, numbers: Iterable[int]) -> None:
        """Orders a device after the packing of arrays of other devices, given by their numbers: one of each device."""
        wait, tokens = self._backend.wait, self._tokens
        for number in numbers:
            wait(destination, tokens[number])  # safeguard: exchanged arrays are awaited

    def place(self, numbers: Sequence[int], outs: Sequence[Any], destination: Device) -> None:
        """Copies some of the arrays, given by their numbers, into views of arrays on another device, which is current.

        An array of the destination's memory is copied there.
        """
        backend, away = self._backend, list[tuple[int, Any]]()
        for number, out in zip(numbers, outs, strict=True):
            if shared_memory((self._sources[number], destination)) is None:
                away.append((number, out))
            else:
                out[...] = self.packed[number]
        self.wait(destination, {self._sources[number]: number for number, _ in away}.values())
        if away:
            arrays, sources = zip(*[(self.packed[number], self._sources[number]) for number, _ in away], strict=True)
            backend.place(arrays, sources, [out for _, out in away], destination)


def joined(
    backend: Backend, devices: Sequence[Device], columns: Sequence[Sequence[Any]], axis: int, tiled: bool
) -> list[Any]:
    """Returns on each device the arrays of its column, one from each device, concatenated or stacked along an axis.

    Columns that are one list on devices that share a memory have one result.
    """
    numbers: dict[tuple[int, int], int] = {}
    arrays, sources = list[Any](), list[Device]()
    for i, source in enumerate(devices):
        for column in columns:
            if (i, id(column[i])) not in numbers:
                numbers[i, id(column[i])] = len(arrays)
                arrays.append(column[i])
                sources.append(source)
    outgoing = Outgoing(backend, arrays, sources)
    outputs: dict[Any, Any] = {}
    results = []
    for device, column in zip(devices, columns, strict=True):
        key = id(column), backend.memory_space(device)
        if key not in outputs:
            with backend.on(device):
                out, places = _room(backend, column, axis, tiled)
                outgoing.place([numbers[i, id(array)] for i, array in enumerate(column)], places, device)
            outputs[key] = out
        results.append(outputs[key])
    return results


def _room(backend: Backend, column: Sequence[Any], axis: int, tiled: bool) -> tuple[Any, list[Any]]:
    """Returns new memory for arrays that are joined, and the view of it for each of them."""
    shape, before = list(column[0].shape), (slice(None),) * axis
    if tiled:
        ends = list(itertools.accumulate([array.shape[axis] for array in column], initial=0))
        shape[axis] = ends[-1]
        places: list[Any] = [(*before, slice(*pair)) for pair in itertools.pairwise(ends)]
    else:
        shape.insert(axis, len(column))
        places = [(*before, k, ...) for k in range(len(column))]
    out = backend.xp.empty(tuple(shape), dtype=column[0].dtype)
    return out, [backend.view(out, place) for place in places]


def combined(
    backend: Backend, devices: Sequence[Device], arrays: Sequence[Any], ufunc: str, tree: Tree, count: int
) -> list[Any]:
    """Returns small arrays of all devices combined along a tree on the first device, and sent to the others.

    Args:
        backend: the backend.
        devices: the device of each array.
        arrays: the arrays, of one shape and dtype.
        ufunc: the binary ufunc that combines them.
        tree: the tree.
        count: the number by which the result is divided; 1 for none.
    """
    leader = devices[0]

    def row(array: Any) -> Any:
        return backend.xp.reshape(backend.contiguous(array), (1, *array.shape))

    rows = backend.launcher(devices)([row] * len(devices), zip(arrays, strict=True))
    with backend.on(leader):
        whole = backend.collect(rows, devices, leader)
        total = merged(backend, ufunc, tree, [backend.view(whole, slice(k, k + 1)) for k in range(len(devices))])
        total = backend.contiguous(backend.xp.reshape(total, arrays[0].shape))
        if count > 1:
            total = backend.xp.divide(total, count)
    firsts: dict[Any, Device] = {}
    for device in devices:
        firsts.setdefault(backend.memory_space(device), device)
    totals = {backend.memory_space(leader): total}
    others = [device for space, device in firsts.items() if space not in totals]
    copies = backend.spread(total, leader, others)
    totals |= {backend.memory_space(device): copy for device, copy in zip(others, copies, strict=True)}
    return [totals[backend.memory_space(device)] for device in devices]
