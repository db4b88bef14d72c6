"""The `Communicator`: the collectives of a group of devices, on one local array for each device.

Each collective records the schedule of its messages, which follows from the shapes of the arrays, and then executes
them: `shardtensor.communication.array_communicator` on arrays, and `shardtensor.communication.abstract_communicator` on
tensors without elements, of which it returns the shapes and dtypes only.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.communication.all_reduce import CHUNKED_FROM, Group
from shardtensor.communication.schedules import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Permute,
    ReduceScatter,
    ids_of,
)
from shardtensor.communication.transfer_log import is_recording
from shardtensor.sharding.layout import Ints, Shape, offsets
from shardtensor.tensor.ownership import Lent
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval


class Rows(NamedTuple):
    """Rows that a device sends to another one, or to itself: a part of the first dimension of its array.

    Attributes:
        source, destination: the positions of the devices.
        begin: the first row.
        at: the index in the destination's array of the place for the first row.
        size: the number of rows.
    """

    source: int
    destination: int
    begin: int
    at: int
    size: int


class Communicator(abc.ABC):
    """One collective among devices.

    Args:
        caller: the name of the collective, for the log and in errors.
        axis: the names of the mesh axes that it runs along, for the log.
        devices: the device of each array, in order; a device may occur more than once.
        sizes: the sizes of the axes, along which reductions combine; by default, there is one axis.

    Attributes:
        lent: for each device, the arrays that were lent to its program.
        copies: whether arrays are copied in order to send them; None if they have no elements.
        explicit: whether the transfers count as requested by the call (see `Transfer`).
    """

    lent: Sequence[Sequence[Lent]] = ()
    copies: bool | None = None
    explicit = True

    def __init__(self, caller: str, axis: str, devices: Sequence[Device], sizes: Sequence[int] = ()) -> None:
        self.caller = caller
        self.axis = axis
        self.devices = devices
        self.sizes = tuple(sizes) or (len(devices),)

    # -- operands and results ----------------------------------------------------------------------

    @abc.abstractmethod
    def shards(self, x: ShardedTensor) -> Sequence[Any]:
        """Returns the array of each device of a tensor, in mesh order."""

    @abc.abstractmethod
    def assembled(self, value: Aval, arrays: Sequence[Any]) -> ShardedTensor:
        """Returns the tensor with this aval that consists of an array for each device."""

    @abc.abstractmethod
    def result(self, array: Any, device: Device) -> Any:
        """Returns the result of a program on one device."""

    @abc.abstractmethod
    def dtype_of(self, array: Any) -> np.dtype[Any]:
        """Returns the NumPy dtype of an array."""

    @abc.abstractmethod
    def cast(self, arrays: Sequence[Any], kinds: str, dtype: str) -> Sequence[Any]:
        """Converts arrays whose dtype is of one of ``kinds`` (NumPy's letters) to ``dtype``; keeps others."""

    def settle(self) -> None:  # noqa: B027 - only transfers between separate memories are in progress
        """Orders the sources' later work after the transfers that were started.

        A mapped function may write to its contribution as soon as the transfers that read it are complete.
        """

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, arrays: Sequence[Any], ufunc: str, *, mean: bool = False) -> list[Any]:
        """Combines the arrays elementwise by a binary ufunc on every device; ``mean`` divides by their number."""
        n, nbytes, size = len(arrays), self._nbytes(arrays[0]), math.prod(arrays[0].shape)
        group = Group(range(n), (True,) * n, self.sizes, size, nbytes >= CHUNKED_FROM and n > 2)
        messages = group.contributes, group.axes, group.chunked, nbytes, nbytes
        self._announce(functools.partial(AllReduce, elements=size), lambda: messages)
        return self._all_reduce(arrays, ufunc, mean, group)

    def all_gather(self, arrays: Sequence[Any], axis: int, tiled: bool) -> list[Any]:
        """Concatenates all arrays along ``axis`` (tiled), or stacks them along a new axis there, on every device."""
        n = len(arrays)
        self._announce(AllGather, lambda: _exchange([*map(self._nbytes, arrays)], [np.ones(n, np.int64)], [0] * n))
        return self._all_gather(arrays, axis, tiled)

    def reduce_scatter(self, arrays: Sequence[Any], ufunc: str, dimension: int, tiled: bool) -> list[Any]:
        """Combines the arrays elementwise by a binary ufunc, and splits the result along ``dimension``.

        Device k receives the k-th part by the split rule (tiled), or the elements at index k, without that dimension.
        """
        n, first = len(arrays), arrays[0]

        def messages() -> tuple[Ints, Ints, Ints]:
            return _exchange([self._row(first, dimension)] * n, [_shares(first.shape[dimension], n, tiled)], [0] * n)

        self._announce(functools.partial(ReduceScatter, contributes=(True,) * n, axes=self.sizes), messages)
        return self._reduce_scatter(arrays, ufunc, dimension, tiled)

    def all_to_all(self, arrays: Sequence[Any], split_axis: int, concat_axis: int, tiled: bool) -> list[Any]:
        """Sends device k the k-th part along ``split_axis`` of every array, joined along ``concat_axis``.

        Parts follow the split rule and are concatenated (tiled), or are single indices and are stacked along a new
        dimension.
        """

        def messages() -> tuple[Ints, Ints, Ints]:
            lengths = [a.shape[split_axis] for a in arrays]
            shares = {length: _shares(length, len(arrays), tiled) for length in set(lengths)}
            which = {length: k for k, length in enumerate(shares)}
            rows = [self._row(a, split_axis) for a in arrays]
            return _exchange(rows, list(shares.values()), [which[length] for length in lengths])

        self._announce(AllToAll, messages)
        return self._all_to_all(arrays, split_axis, concat_axis, tiled)

    def ragged_all_to_all(
        self, arrays: Sequence[Any], bounds: Sequence[Ints], split_axis: int, concat_axis: int
    ) -> list[Any]:
        """Sends device k the indices from ``bounds[i][k]`` to ``bounds[i][k + 1]`` along ``split_axis`` of array i, for
        every i, joined along ``concat_axis``.
        """

        def messages() -> tuple[Ints, Ints, Ints]:
            rows = [self._row(a, split_axis) for a in arrays]
            return _exchange(rows, [np.diff(ends) for ends in bounds], range(len(arrays)))

        self._announce(AllToAll, messages)
        return self._ragged_all_to_all(arrays, bounds, split_axis, concat_axis)

    def send_rows(self, arrays: Sequence[Any], into: Sequence[Any], rows: Sequence[Rows], adds: bool) -> list[Any]:
        """Returns copies of the arrays ``into``, in which rows that other devices send are in the places of others, or
        are added to them, in the order of ``rows``.
        """

        def messages() -> tuple[Ints, Ints, Ints]:
            counts = np.zeros((len(arrays), len(arrays)), np.int64)
            for row in rows:
                counts[row.source, row.destination] += row.size
            return _exchange([self._row(a, 0) for a in arrays], list(counts), range(len(arrays)))

        self._announce(AllToAll, messages)
        return self._send_rows(arrays, into, rows, adds)

    def send_unknown_rows(self, arrays: Sequence[Any], into: Sequence[Any], slices: int, returns: bool) -> list[Any]:
        """Infers `send_rows` where the numbers of rows are not known: each device receives as many as its array has
        places, from all others alike, or all that they can send.

        Args:
            arrays, into: see `send_rows`.
            slices: how many parts of its array each device sends to each other.
            returns: whether the rows of such an exchange are sent back.
        """

        def messages() -> tuple[Ints, Ints, Ints]:
            senders, receivers = (into, arrays) if returns else (arrays, into)
            sent = np.array([slices * a.shape[0] for a in senders])
            places = np.array([a.shape[0] for a in receivers])
            sizes, which, counts = np.unique(sent, return_inverse=True, return_counts=True)
            most = np.minimum(sizes[:, None], places)  # rows from a device with so many to each destination
            of_others = np.maximum(counts @ most - np.minimum(sent, places), 1)
            shares = -(-most * np.minimum(places, of_others) // of_others)
            if returns:
                columns, back = np.unique(shares, axis=1, return_inverse=True)
                shares, which = columns[which].T, back
            return _exchange([self._row(a, 0) for a in arrays], list(shares), which.tolist())

        self._announce(AllToAll, messages)
        return self._send_rows(arrays, into, (), False)

    def permute(self, arrays: Sequence[Any], sources: Sequence[int | None], zeros: bool = True) -> list[Any]:
        """Sends device k the array of device ``sources[k]``; where that is None, device k receives zeros, or without
        ``zeros`` nothing: its item is then None, or any other array.
        """

        def messages() -> Ints:
            pairs = [(i, k, self._nbytes(arrays[i])) for k, i in enumerate(sources) if i is not None]
            return np.array(pairs, np.int64).reshape(-1, 3).T

        self._announce(Permute, messages)
        return self._permute(arrays, sources, zeros)

    def broadcast(self, arrays: Sequence[Any], source: int) -> list[Any]:
        """Sends the array of the device at position ``source`` to every device."""
        self._announce(Broadcast, lambda: (source, self._nbytes(arrays[source])))
        return self._broadcast(arrays, source)

    # -- execution ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def _all_reduce(self, arrays: Sequence[Any], ufunc: str, mean: bool, group: Group) -> list[Any]: ...

    @abc.abstractmethod
    def _all_gather(self, arrays: Sequence[Any], axis: int, tiled: bool) -> list[Any]: ...

    @abc.abstractmethod
    def _reduce_scatter(self, arrays: Sequence[Any], ufunc: str, dimension: int, tiled: bool) -> list[Any]: ...

    @abc.abstractmethod
    def _all_to_all(self, arrays: Sequence[Any], split_axis: int, concat_axis: int, tiled: bool) -> list[Any]: ...

    @abc.abstractmethod
    def _ragged_all_to_all(
        self, arrays: Sequence[Any], bounds: Sequence[Ints], split_axis: int, concat_axis: int
    ) -> list[Any]: ...

    @abc.abstractmethod
    def _send_rows(self, arrays: Sequence[Any], into: Sequence[Any], rows: Sequence[Rows], adds: bool) -> list[Any]: ...

    @abc.abstractmethod
    def _permute(self, arrays: Sequence[Any], sources: Sequence[int | None], zeros: bool) -> list[Any]: ...

    @abc.abstractmethod
    def _broadcast(self, arrays: Sequence[Any], source: int) -> list[Any]: ...

    # -- messages ----------------------------------------------------------------------------------

    def _announce(self, kind: Callable[..., Collective], messages: Callable[[], Iterable[Any]]) -> None:
        """Records the schedule of a collective, if a log or a guard is active.

        Args:
            kind: the schedule.
            messages: returns its arguments between those of every schedule: the devices before, and the names after.
        """
        if is_recording():
            schedule = kind(ids_of(self.devices), *messages(), self.caller, self.axis)
            schedule.explicit = self.explicit
            schedule.announce(self.copies)

    def _nbytes(self, array: Any) -> int:
        return int(math.prod(array.shape)) * self.dtype_of(array).itemsize

    def _row(self, array: Any, dimension: int) -> int:
        """Returns the bytes at one index of a dimension."""
        shape: Shape = array.shape
        return math.prod([n for d, n in enumerate(shape) if d != dimension]) * self.dtype_of(array).itemsize


def _exchange(rows: list[int], shares: list[Ints], which: Sequence[int]) -> tuple[Ints, Ints, Ints]:
    """Returns the messages from each device to each other device; see `AllToAll`."""
    return np.array(rows, np.int64), np.array(shares), np.array(which)


def _shares(size: int, count: int, tiled: bool) -> Ints:
    """Returns how many indices of a dimension each device receives."""
    return np.diff(offsets(size, (count,))) if tiled else np.ones(count, np.int64)
