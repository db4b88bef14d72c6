"""The collectives of a group of devices of several processes, of which each process executes its part.

The arrays for other processes are sent in one exchange per collective; all-reduces take two if the arrays are long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import is_remote
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.all_reduce import Group
from shardtensor.communication.array_communicator import ArrayCommunicator, parts_along
from shardtensor.communication.between_processes.processes import cross, process_of
from shardtensor.communication.between_processes.sums_across_processes import all_reduce_across, reduce_scatter_across
from shardtensor.communication.communicator import Rows
from shardtensor.communication.messages import copied


class SpanningCommunicator(ArrayCommunicator):
    """One collective among devices of several processes; see `Communicator`."""

    def __init__(self, caller: str, axis: str, devices: Sequence[Device], sizes: Sequence[int] = ()) -> None:
        super().__init__(caller, axis, devices, sizes)
        self._here = [k for k, device in enumerate(devices) if not is_remote(device)]
        first = {process_of(device): k for k, device in reversed(list(enumerate(devices)))}
        self._first = [first[process_of(device)] for device in devices]
        # The backend of arrays of several processes.
        self._spanning = next(b for b, d in zip(self.backends, devices, strict=True) if is_remote(d))

    def dtype_of(self, array: Any) -> np.dtype[Any]:
        """See `Communicator`."""
        return self._spanning.dtype_of(array)

    def _all_reduce(self, arrays: Sequence[Any], ufunc: str, mean: bool, group: Group) -> list[Any]:
        known = self._spanning
        dtype = known.dtype_of(arrays[0])
        if mean:
            dtype = np.true_divide(np.ones(1, dtype), len(arrays)).dtype
        states = dict(enumerate(arrays))
        totals = all_reduce_across(
            [group], states, self._reduce_ops(arrays, ufunc, mean), self.devices, dtype, self.caller
        )
        shape = tuple(arrays[0].shape)
        return [self._deliver(k, totals[k]) if k in totals else RemoteArray(shape, dtype) for k in range(len(arrays))]

    def _all_gather(self, arrays: Sequence[Any], axis: int, tiled: bool) -> list[Any]:
        processes = sorted(set(self._first))
        sent = [(i, k) for i in range(len(arrays)) for k in processes]
        arrived = dict(zip(sent, self._carried([(arrays[i], i, k) for i, k in sent]), strict=True))
        return [
            self._put_together(
                k, [(arrived[i, self._first[k]], self._first[k]) for i in range(len(arrays))], axis, tiled
            )
            for k in range(len(arrays))
        ]

    def _reduce_scatter(self, arrays: Sequence[Any], ufunc: str, dimension: int, tiled: bool) -> list[Any]:
        cuts = parts_along(arrays[0].ndim, dimension, arrays[0].shape[dimension], len(arrays), tiled)
        n = len(arrays)
        group = Group(range(n), (True,) * n, self.sizes, math.prod(arrays[0].shape), False)

        def part(array: Any, j: int, k: int) -> Any:
            with self.backends[j].on(self.devices[j]):
                return self.backends[j].view(array, cuts[k])

        ops = self._reduce_ops(arrays, ufunc, False)
        parts = reduce_scatter_across([group], dict(enumerate(arrays)), part, ops, self.devices, self.caller)
        return [self._deliver(k, parts[k]) if k in parts else part(arrays[k], k, k) for k in range(n)]

    def _all_to_all(self, arrays: Sequence[Any], split_axis: int, concat_axis: int, tiled: bool) -> list[Any]:
        cuts = [parts_along(a.ndim, split_axis, a.shape[split_axis], len(arrays), tiled) for a in arrays]
        return self._exchanged(arrays, cuts, concat_axis, tiled)

    def _exchanged(self, arrays: Sequence[Any], cuts: Sequence[Sequence[Any]], axis: int, tiled: bool) -> list[Any]:
        columns = self._columns(arrays, cuts)
        return [self._put_together(k, [(a, k) for a in column], axis, tiled) for k, column in enumerate(columns)]

    def _send_rows(self, arrays: Sequence[Any], into: Sequence[Any], rows: Sequence[Rows], adds: bool) -> list[Any]:
        arrived = self._carried([(self._part(arrays, row), row.source, row.destination) for row in rows])
        results = [copied(a, self.devices[k]) if k in self._here else a for k, a in enumerate(into)]
        here = [(row, a) for row, a in zip(rows, arrived, strict=True) if row.destination in self._here]
        self._place(results, [row for row, _ in here], [a for _, a in here], adds)
        return [self._deliver(k, a) if k in self._here else a for k, a in enumerate(results)]

    def _permute(self, arrays: Sequence[Any], sources: Sequence[int | None], zeros: bool) -> list[Any]:
        pairs = [(arrays[i], i, k) for k, i in enumerate(sources) if i is not None]
        arrived = iter(self._carried(pairs))
        results: list[Any] = []
        for k, i in enumerate(sources):
            if i is None and not zeros:
                results.append(None)
                continue
            with self.backends[k].on(self.devices[k]):
                xp = self.backends[k].xp
                array = xp.zeros_like(arrays[k]) if i is None else xp.asarray(next(arrived), copy=True)
                results.append(self._deliver(k, array) if k in self._here else array)
        return results

    def _broadcast(self, arrays: Sequence[Any], source: int) -> list[Any]:
        processes = sorted(set(self._first))
        arrived = dict(zip(processes, self._carried([(arrays[source], source, k) for k in processes]), strict=True))
        results = []
        for k in range(len(arrays)):
            array = self._bring(arrived[self._first[k]], self._first[k], k)
            with self.backends[k].on(self.devices[k]):
                copy = self.backends[k].xp.asarray(array, copy=True)
            results.append(self._deliver(k, copy) if k in self._here else copy)
        return results

    # -- helpers -----------------------------------------------------------------------------------

    def _carried(self, messages: Sequence[tuple[Any, int, int]]) -> list[Any]:
        """Sends arrays from one device to another, given by their positions; those in this process as by `_bring`."""
        crossed = cross([(array, self.devices[i], self.devices[k]) for array, i, k in messages], self.caller)
        return [
            self._bring(array, i, k) if self._first[i] == self._first[k] else array
            for array, (_, i, k) in zip(crossed, messages, strict=True)
        ]

    def _bring(self, array: Any, source: int, destination: int) -> Any:
        if type(array) is RemoteArray:
            return array
        return super()._bring(array, source, destination)

    def _columns(self, arrays: Sequence[Any], cuts: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Returns for each device k the k-th part of every array, on that device."""
        pieces = self._pieces(arrays, cuts)
        arrived = iter(
            self._carried([(piece, i, k) for k, column in enumerate(pieces) for i, piece in enumerate(column)])
        )
        return [list(itertools.islice(arrived, len(column))) for column in pieces]

    def _put_together(self, k: int, arrays: Sequence[tuple[Any, int]], axis: int, tiled: bool) -> Any:
        """Returns arrays on devices of the process of the k-th device, concatenated or stacked on that device."""
        backend = self.backends[k]
        with backend.on(self.devices[k]):
            here = [self._bring(array, i, k) for array, i in arrays]
            join: Callable[..., Any] = backend.xp.concat if tiled else backend.xp.stack
            whole = join(here, axis=axis)
        return self._deliver(k, whole) if k in self._here else whole
