"""Descriptions of collective calls, which the calls of all programs must match, and the numbers that programs give."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardtensor.backend.device import Device
from shardtensor.communication.between_processes.freight import host_copies
from shardtensor.tensor.tensor import ShardedTensor

Work = Callable[[list[Any]], Sequence[Any]]


class Across(NamedTuple):
    """The programs of a collective, some of which run in other processes.

    Attributes:
        numbers: their numbers, in order of their indices.
        here: how many of them run in this process.
    """

    numbers: tuple[int, ...]
    here: int


class HostNumbers:
    """Arrays of integers that a program gives to a collective, such as offsets, which the host has to know.

    They are read when all programs have arrived: until then, the devices compute at the same time.

    Attributes:
        arrays: arrays on the device; once they are read, host arrays. Tensors without elements stay what they are.
        device: the device.
    """

    __slots__ = ("arrays", "device")

    def __init__(self, arrays: Sequence[Any], device: Device) -> None:
        self.arrays = arrays
        self.device = device


def read_all(numbers: Sequence[HostNumbers]) -> None:
    """Reads the numbers of several programs, together."""
    unread = [one for one in numbers if not any(type(array) is ShardedTensor for array in one.arrays)]
    copies = iter(host_copies([(array, one.device, None) for one in unread for array in one.arrays]))
    for one in unread:
        one.arrays = [next(copies) for _ in one.arrays]


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """A collective call of a program. The descriptions and details of the calls of one rendezvous must be equal.

    Attributes:
        description: the call for error messages, such as ``psum over 'x'``.
        key: identifies the rendezvous.
        size: the number of programs that meet.
        work: computes the results of all programs from their contributions. The last program to arrive calls it.
        details: everything else in which calls may differ: pairs of a name and a value.
        key_at: the key of the program at a given position, for error messages.
        across: the programs, if some of them run in other processes.
    """

    description: str
    key: Hashable
    size: int
    work: Work
    details: tuple[tuple[str, Any], ...] = ()
    key_at: Callable[[tuple[int, ...]], Any] | None = None
    across: Across | None = None

    def beside(self, other: CollectiveCall) -> tuple[str, str, str]:
        """Describes both calls by the first property in which they differ, and what all devices have to do instead."""
        if self.description != other.description:
            return self.description, other.description, _SAME_CALLS
        (name, mine), (_, theirs) = next((a, b) for a, b in zip(self.details, other.details, strict=True) if a != b)
        rule = _SAME_ARRAYS if name == "x" else _SAME_CALLS
        return f"{self.description} with {name} = {mine}", f"{other.description} with {name} = {theirs}", rule


_SAME_CALLS = "make the same calls in the same order"
_SAME_ARRAYS = (
    "pass arrays of the same dtype and shape; if a split is uneven, reduce each block first (x.sum()), or join the "
    "blocks by all_gather with tiled=True"
)
