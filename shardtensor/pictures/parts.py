"""The parts of an array in pictures of its sharding: their places, their labels, and the colors of their devices."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardtensor.backend.device import Device
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Grid, Shape

Range: TypeAlias = tuple[int, int]
"""Begin and end of a part in one dimension."""


@dataclass(frozen=True)
class Part:
    """A part of an array that has elements and is held by the same devices.

    Attributes:
        box: begin and end of the part in each dimension.
        devices: the devices that hold it.
    """

    box: tuple[Range, ...]
    devices: tuple[Device, ...]

    @property
    def block(self) -> tuple[Range, ...]:
        """Begin and end of the part in the dimensions before the last two."""
        return self.box[:-2]

    @property
    def extent(self) -> tuple[Range, ...]:
        """The ranges of rows and columns of the picture that the part covers; missing dimensions count as size 1."""
        return ((0, 1), (0, 1), *self.box)[-2:]

    @property
    def index(self) -> str:
        """The index of the part in the last two dimensions, as text."""
        return ", ".join(f"{begin}:{end}" for begin, end in self.box[-2:])

    def label(self, room: int | None = None, *, named: bool = True) -> str:
        """Returns a label such as ``NUMPY 0,1`` with as many devices as fit into ``room`` characters, at least one.

        If ``named`` is false, the names of backends are left out.
        """
        before = ["", *(device.backend for device in self.devices)]
        names = [
            f"{device.backend.upper()} {device.id}" if named and device.backend != last else str(device.id)
            for last, device in zip(before, self.devices, strict=False)
        ]
        return _shortened(names, ",", room, "…")

    def caption(self, separator: str, room: int | None = None) -> str:
        """Returns the label in ``room`` characters and the index, if the part has dimensions."""
        return f"{self.label(room)}{separator}{self.index}" if self.index else self.label(room)


def parts_of(grid: Grid) -> list[Part]:
    """Returns the parts that have elements, in the order of their indices."""
    numbers = grid.linear_parts().tolist()
    holders: dict[int, list[Device]] = {}
    for device, number in zip(grid.devices, numbers, strict=True):
        holders.setdefault(number, []).append(device)
    boxes = sorted((grid.box(k), numbers[k]) for k in grid.owners() if 0 not in grid.shape(k))
    return [Part(box, tuple(holders[number])) for box, number in boxes]


def rows_and_columns(parts: Sequence[Part]) -> tuple[list[Range], list[Range]]:
    """Returns the ranges of the rows and of the columns of a picture, in order."""
    rows, columns = zip(*(part.extent for part in parts), strict=True)
    return sorted(set(rows)), sorted(set(columns))


def empty_devices(grid: Grid, room: int | None = None) -> str:
    """Returns a line that lists the devices without elements; an empty string if there are none."""
    names = [str(device) for k, device in enumerate(grid.devices) if 0 in grid.shape(k)]
    if not names:
        return ""
    return _shortened([f"empty on {names[0]}", *names[1:]], ", ", room, f"… ({counted(len(names), 'device')})")


def _shortened(names: Sequence[str], separator: str, room: int | None, more: str) -> str:
    """Joins as many names as fit into ``room`` characters, at least one, and replaces the others by ``more``."""
    line, kept = separator.join(names), len(names)
    while room is not None and len(line) > room and kept > 1:
        kept -= 1
        line = separator.join([*names[:kept], more])
    return line


def slices(box: Sequence[Range], shape: Shape) -> str:
    """Returns the index of a box in an array of that shape, such as ``[0:3, :]``."""
    return f"[{', '.join(':' if (b, e) == (0, n) else f'{b}:{e}' for (b, e), n in zip(box, shape, strict=True))}]"


def color(device: Device, shade: float = 1) -> str:
    """Returns the background color of a device for dark text, as ``#rrggbb``, with its lightness times ``shade``.

    It is the same in each picture. A part that several devices hold has the color of the first one.

    With these steps of hue and lightness, neighbors in a row differ, and so do neighbors in a column of tables with at
    most 16 columns. The first 25 colors differ also in terminals with 256 colors.
    """
    k = device.id
    rgb = colorsys.hls_to_rgb(0.379 * k % 1, (0.72, 0.85, 0.65)[k % 3] * shade, 0.7)
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)
