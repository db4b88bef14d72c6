"""`ragged_all_to_all`: rows of any number that each device sends to each other, as the tokens of a batch to experts.

Which rows are sent depends on elements. The host reads the offsets and sizes of all programs when the last one has
arrived, checks that they fit together, and lists the messages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import Device
from shardtensor.communication.communicator import Communicator, Rows
from shardtensor.core import OPS, implements, operator
from shardtensor.errors import ArgumentTypeError, CollectiveError, ShapeError
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Ints
from shardtensor.spmd.axes import AxisName, AxisPosition, axis_position
from shardtensor.spmd.collectives import Groups, recorded_by_library
from shardtensor.spmd.maps.launch import BATCHING, DERIVATIVES
from shardtensor.spmd.maps.map_types import Tree
from shardtensor.spmd.rendezvous import Arrays, joint_rendezvous
from shardtensor.tensor.tensor import ArrayLike

_CALLER = "ragged_all_to_all"

ARRAYS = ("operand", "output")
NUMBERS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@operator(operands=(*ARRAYS, *NUMBERS), tags=("spmd",))
def ragged_all_to_all(
    operand: ArrayLike,
    output: Tree,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
) -> Tree:
    """Sends slices of rows, of any sizes, from each device along a named axis to each other one: an `all_to_all` of
    parts of unequal sizes.

    Each device gives the offsets and the sizes of the slices of its operand, K in all: of n devices, the first K / n
    slices go to the first device, and so on. The result is a copy of ``output`` in which the slices that the device
    receives are in the places of others.

    The host reads the offsets and sizes, so that the call waits for their computation. A slice of size 0 is not sent,
    and its offsets mean nothing. Slices of one operand may overlap, and their gradients are added. Without elements, as
    in `simulate`, the sizes are not known, and the messages are an upper bound: each device receives as many rows as
    its output has, from all others alike, or all that they can send.

    Args:
        operand: an array of shape (N, ...) with the rows to be sent; N may differ from device to device.
        output: an array of shape (M, ...), of the same dtype; M may differ, too. It is not written.
        input_offsets: K integers: where each slice begins in ``operand``. K is a multiple of the number of devices.
        send_sizes: K integers: the number of rows of each slice.
        output_offsets: K integers: where each slice begins in the result of the device that receives it.
        recv_sizes: K integers: the sizes of the slices that this device receives, by sender:
            ``all_to_all(send_sizes, axis_name, 0, 0, tiled=True)``.
        axis_name: the name of an axis of an enclosing map, or a tuple of names.
        axis_index_groups: lists of indices along the axis, each of which exchanges separately; every index must occur
            once.

    Raises:
        ShapeError: the shapes do not fit together.
        ArgumentTypeError: an argument is not an array, the offsets or sizes are not integers, or the dtypes differ.
        ShardingError: no enclosing map has such an axis.
        CollectiveError: a slice is not within its array, the sender and the receiver give different sizes, slices
            overlap where they are received, or the programs along the axis do not all make this call.

    >>> def exchange(x, sizes):
    ...     received = st.all_to_all(sizes, "i", 0, 0, tiled=True)
    ...     places = st.all_to_all(st.cumsum(received) - received, "i", 0, 0, tiled=True)
    ...     output = st.zeros(4, dtype=x.dtype)
    ...     return st.ragged_all_to_all(x, output, st.cumsum(sizes) - sizes, sizes, places, received, axis_name="i")
    >>> f = st.shard_map(exchange, mesh=st.make_mesh((2,), ("i",)), in_specs=st.P("i"), out_specs=st.P("i"))
    >>> f(np.array([1, 2, 2, 3, 4, 0]), np.array([1, 2, 1, 1])).tolist()
    [1, 3, 0, 0, 2, 2, 4, 0]
    """


@operator(operands=(*ARRAYS, *NUMBERS), error_name=_CALLER, tags=("internal", "spmd"))
def ragged_return(
    operand: ArrayLike,
    output: Tree,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
) -> Tree:
    """The transpose of `ragged_all_to_all` with the same offsets and sizes: sends each slice back from where it was
    received, and adds it to the rows of ``output`` from which it was sent.

    Args:
        operand: an array in the shape of the output of that call.
        output: an array in the shape of its operand.
        input_offsets, send_sizes, output_offsets, recv_sizes, axis_name, axis_index_groups: those of that call.

    Raises:
        ShardTensorError: see `ragged_all_to_all`.

    >>> from shardtensor.spmd.ragged_exchange import ragged_return
    >>> one = np.array([1])
    >>> f = lambda x: ragged_return(x, np.ones(2), 0 * one, one, one, one, axis_name="i")
    >>> st.pmap(f, np.array([[3.0, 4.0]]), axis_name="i", devices=st.devices()[:1]).tolist()
    [[5.0, 1.0]]
    """


def _exchanged(returns: bool, *arguments: Any) -> Any:
    *operands, axis_name, axis_index_groups = arguments
    at = axis_position(_CALLER, axis_name, axis_index_groups)
    named = dict(zip((*ARRAYS, *NUMBERS), operands, strict=True))
    arrays, numbers = ({name: named[name] for name in names} for names in (ARRAYS, NUMBERS))

    def body(communicator: Communicator, contributions: Arrays) -> Sequence[Any]:
        sources, into, given = zip(*contributions, strict=True)
        columns = dict(zip(NUMBERS, zip(*[one.arrays for one in given], strict=True), strict=True))
        _check_arrays(communicator, sources, into)
        count = _check_numbers(communicator.devices, columns, at)
        if not all(isinstance(x, np.ndarray) for column in columns.values() for x in column):
            return communicator.send_unknown_rows(sources, into, count // len(sources), returns)
        slices = _Slices(
            communicator.devices, *[np.stack([x.astype(np.int64) for x in columns[name]]) for name in NUMBERS]
        )
        senders, receivers = (into, sources) if returns else (sources, into)
        rows = slices.checked([x.shape[0] for x in senders], [x.shape[0] for x in receivers])
        if returns:
            rows = [Rows(row.destination, row.source, row.at, row.begin, row.size) for row in rows]
        return communicator.send_rows(sources, into, rows, adds=returns)

    return joint_rendezvous(_CALLER, at, arrays, numbers, (("returns", returns),), body)


for _function, _returns in ((ragged_all_to_all, False), (ragged_return, True)):
    implements(_function, "algorithm", "announcing", "infer")(functools.partial(_exchanged, _returns))
    implements(_function, "recorded")(functools.partial(recorded_by_library, OPS[_function.__name__]))
    implements(_function, "derivative")(DERIVATIVES)
    implements(_function, "batching")(BATCHING)


# -- checks ----------------------------------------------------------------------------------------


def _check_arrays(communicator: Communicator, operands: Arrays, outputs: Arrays) -> None:
    """Checks that the rows of all arrays are of one shape and dtype."""
    first = communicator.devices[0]
    rows, dtype = tuple(operands[0].shape[1:]), communicator.dtype_of(operands[0])
    for name, arrays in zip(ARRAYS, (operands, outputs), strict=True):
        for device, array in zip(communicator.devices, arrays, strict=True):
            if not len(array.shape):
                raise ShapeError(f"{_CALLER}: {name} of {device} has no dimension; wanted an array of rows")
            if tuple(array.shape[1:]) != rows:
                raise ShapeError(
                    f"{_CALLER}: {name} of {device} has shape {tuple(array.shape)}, and operand of {first} "
                    f"{tuple(operands[0].shape)}; wanted shapes that differ in the first dimension only"
                )
            if (found := communicator.dtype_of(array)) != dtype:
                raise ArgumentTypeError(
                    f"{_CALLER}: {name} of {device} is an array of {found}, and operand of {first} one of {dtype}; "
                    "wanted one dtype: convert one of them by st.astype"
                )


def _check_numbers(devices: Sequence[Device], columns: Mapping[str, Arrays], at: AxisPosition) -> int:
    """Checks that the offsets and sizes of all devices are as many integers, and returns their number."""
    first = columns["input_offsets"][0]
    for name, arrays in columns.items():
        for device, array in zip(devices, arrays, strict=True):
            if array.dtype.kind not in "iu":
                raise ArgumentTypeError(f"{_CALLER}: {name} of {device} has dtype {array.dtype}; wanted integers")
            if len(array.shape) != 1 or not array.shape[0] or array.shape[0] % len(devices):
                raise ShapeError(
                    f"{_CALLER}: {name} of {device} has shape {tuple(array.shape)}; wanted one dimension, of a "
                    f"multiple of {len(devices)}, the number of devices along axis {at.description}"
                )
            if array.shape != first.shape:
                raise ShapeError(
                    f"{_CALLER}: {name} of {device} has shape {tuple(array.shape)}, and input_offsets of {devices[0]} "
                    f"{tuple(first.shape)}; wanted equal shapes"
                )
    return int(first.shape[0])


class _Slices:
    """The slices that devices send to each other; each argument has a row for each sender, and a column for each slice.

    Attributes:
        begins, counts, places: where each slice begins, its size, and where it begins in the array of its receiver.
        expected: for each receiver the sizes of the slices that it receives, by sender.
    """

    def __init__(self, devices: Sequence[Device], begins: Ints, counts: Ints, places: Ints, expected: Ints) -> None:
        self._devices = devices
        self._each = int(begins.shape[1]) // len(devices)
        self.begins, self.counts, self.places, self.expected = begins, counts, places, expected

    def _receiver(self, number: int) -> int:
        return number // self._each

    def _number_there(self, sender: int, number: int) -> int:
        """Returns the number that the receiver of a slice gives it."""
        return sender * self._each + number % self._each

    def checked(self, sent_from: Sequence[int], received_in: Sequence[int]) -> list[Rows]:
        """Checks that the slices are within the arrays of senders and receivers, of which these are the numbers of
        rows, that both give the same sizes, and that no slices overlap where they are received. Returns those that are
        not empty, by receiver.

        Raises:
            CollectiveError: they do not.
        """
        for name, sizes in (("send_sizes", self.counts), ("recv_sizes", self.expected)):
            for i, j in _first(sizes < 0):
                raise CollectiveError(
                    f"{_CALLER}: {name}[{j}] of {self._devices[i]} is {sizes[i, j]}; wanted 0 or more"
                )
        n, is_sent = len(self._devices), self.counts > 0
        by_sender = self.expected.reshape(n, n, self._each).transpose(1, 0, 2).reshape(n, -1)
        for i, j in _first(by_sender != self.counts):
            k, there = self._receiver(j), self._number_there(i, j)
            raise CollectiveError(
                f"{_CALLER}: send_sizes[{j}] of {self._devices[i]} is {self.counts[i, j]}, and recv_sizes[{there}] of "
                f"{self._devices[k]}, which receives it, is {self.expected[k, there]}; wanted equal sizes: recv_sizes "
                "is all_to_all(send_sizes, axis_name, 0, 0, tiled=True)"
            )
        room = np.array(sent_from)[:, None]
        for i, j in _first(is_sent & ((self.begins < 0) | (self.begins > room - self.counts))):
            raise CollectiveError(
                f"{_CALLER}: input_offsets[{j}] of {self._devices[i]} is {self.begins[i, j]}, send_sizes[{j}] is "
                f"{self.counts[i, j]}, and operand has {counted(sent_from[i], 'row')}; wanted slices within operand"
            )
        room = np.repeat(np.array(received_in), self._each)
        for i, j in _first(is_sent & ((self.places < 0) | (self.places > room - self.counts))):
            k = self._receiver(j)
            raise CollectiveError(
                f"{_CALLER}: output_offsets[{j}] of {self._devices[i]} is {self.places[i, j]}, send_sizes[{j}] is "
                f"{self.counts[i, j]}, and output of {self._devices[k]}, which receives it, has "
                f"{counted(received_in[k], 'row')}; wanted slices within output, or a longer output"
            )
        messages = list[Rows]()
        for k in range(n):
            rows = self._rows_to(k)
            self._check_overlap(rows)
            messages += rows
        return messages

    def _rows_to(self, k: int) -> list[Rows]:
        part = slice(k * self._each, (k + 1) * self._each)
        table = np.stack([array[:, part] for array in (self.begins, self.places, self.counts)], -1).tolist()
        return [Rows(i, k, begin, at, n) for i, slices in enumerate(table) for begin, at, n in slices if n]

    def _check_overlap(self, rows: Sequence[Rows]) -> None:
        """Checks that the slices that a device receives do not overlap."""
        for a, b in itertools.pairwise(sorted(rows, key=lambda row: row.at)):
            if b.at < a.at + a.size:
                (first, second), there = (self._devices[row.source] for row in (a, b)), self._devices[a.destination]
                raise CollectiveError(
                    f"{_CALLER}: {there} receives rows {a.at} to {a.at + a.size - 1} of its output from {first}, and "
                    f"rows {b.at} to {b.at + b.size - 1} from {second}; wanted output_offsets of slices that do not "
                    "overlap"
                )


def _first(wrong: npt.NDArray[np.bool]) -> Iterator[tuple[int, int]]:
    """Yields the position of the first slice that is wrong; none, if all are right."""
    yield from np.argwhere(wrong)[:1].tolist()
