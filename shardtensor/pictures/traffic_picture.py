"""Pictures of traffic: the bytes from each device to each other device, as a heat map or as text."""

from __future__ import annotations

import functools
import importlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HOST, Device
from shardtensor.host.units import power_of_1024, readable
from shardtensor.pictures.html import text_html

Ints = npt.NDArray[np.int64]


class Moved:
    """The bytes that devices sent to each other.

    >>> from shardtensor.pictures.traffic_picture import Moved
    >>> a, b = st.devices("numpy")[:2]
    >>> Moved([b, a], np.array([0]), np.array([1]), np.array([8])).sent_and_received()
    {Device('numpy:0'): (0, 8), Device('numpy:1'): (8, 0)}

    Args:
        devices: the devices, including any that sent and received nothing.
        sources, destinations: for each message, the positions of its ends in ``devices``.
        sizes: the bytes of each message; those of 0 bytes do not count.

    Attributes:
        devices: the devices that sent or received, in order, the host last.
    """

    def __init__(self, devices: Sequence[Device], sources: Ints, destinations: Ints, sizes: Ints) -> None:
        real = sizes > 0
        ends = np.array((sources[real], destinations[real]), np.int64)
        used = np.flatnonzero(np.bincount(ends.ravel(), minlength=len(devices))).tolist()
        there = sorted(used, key=lambda k: (devices[k] == HOST, devices[k]))
        positions = np.zeros(len(devices), np.int64)
        positions[there] = np.arange(len(there))
        self.devices = [devices[k] for k in there]
        self._ends: Ints = positions[ends]
        self._sizes = sizes[real]

    @property
    def total(self) -> int:
        """The bytes of all messages."""
        return int(self._sizes.sum())

    def grid(self, groups: Ints) -> Ints:
        """Returns the bytes from group to group of devices; ``groups`` has the number of each device's group."""
        count = int(groups.max(initial=-1)) + 1
        table = np.zeros((count, count), np.int64)
        sources, destinations = groups[self._ends]
        np.add.at(table.reshape(-1), sources * count + destinations, self._sizes)
        return table

    def sent_and_received(self) -> dict[Device, tuple[int, int]]:
        """Returns the bytes that each device sent and received."""
        sums = np.zeros((2, len(self.devices)), np.int64)
        for row, end in zip(sums, self._ends, strict=True):
            np.add.at(row, end, self._sizes)
        return dict(zip(self.devices, zip(*sums.tolist(), strict=True), strict=True))


_NUMBERS = 12
"""The most devices whose bytes are written as numbers; for more, text uses shades, and a figure uses colors only."""

_WIDTH = 120
"""The most characters in a line of a table of numbers."""

_ROWS = 64
"""The most rows of text, the host's excluded; if there are more devices, several share a row and a column."""

_PIXELS = 128
"""The most rows of a figure, likewise."""

_NAMES = 24
"""The most rows of a figure that have a name; the last row always has one."""

_SHADES = "░▒▓█"
_NONE = "·"


class TextPicture:
    """A picture that is text: printing it and displaying it in a notebook show the text.

    >>> from shardtensor.pictures.traffic_picture import TextPicture
    >>> TextPicture("a > b")
    a > b
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Returns the text as HTML in a monospaced font, for notebooks."""
        return text_html(self._text)


def traffic_picture(moved: Moved, *, text: bool = False) -> Any:
    """Draws the bytes from each device to each other device.

    Args:
        moved: the bytes that devices sent to each other.
        text: whether to return text even if matplotlib is installed.

    Returns:
        A ``matplotlib.figure.Figure``, which pyplot does not know; or a `TextPicture`.

    >>> from shardtensor.pictures.traffic_picture import Moved, traffic_picture
    >>> devices = st.devices("numpy")[:3]
    >>> moved = Moved(devices, np.array([0, 1, 2]), np.array([1, 2, 1]), np.array([4096, 1536, 7]))
    >>> traffic_picture(moved, text=True)
    5.51 KiB from rows to columns
                   0        1        2      sent  received
    numpy:0        ·    4 KiB        ·     4 KiB       0 B
    numpy:1        ·        ·  1.5 KiB   1.5 KiB  4.01 KiB
    numpy:2        ·      7 B        ·       7 B   1.5 KiB
    """
    try:
        figure = None if text else _matplotlib_figure()
    except ImportError:
        figure = None
    return TextPicture(_text(moved)) if figure is None else _figure(figure, moved)


# -- as text ---------------------------------------------------------------------------------------


def _text(moved: Moved) -> str:
    if not moved.devices:
        return "no bytes moved"
    numbers = _numbers(moved) if len(moved.devices) <= _NUMBERS else ()
    return "\n".join(numbers if numbers and max(map(len, numbers)) <= _WIDTH else _shades(moved))


def _numbers(moved: Moved) -> list[str]:
    """Returns the lines of a table of bytes."""
    rows = [["", *_short(moved.devices), "sent", "received"]]
    grid = moved.grid(np.arange(len(moved.devices)))
    for (device, ends), row in zip(moved.sent_and_received().items(), grid.tolist(), strict=True):
        rows.append([str(device), *[readable(n) if n else _NONE for n in row], *map(readable, ends)])
    return [f"{readable(moved.total)} from rows to columns", *_aligned(rows)]


def _short(devices: Sequence[Device]) -> list[str]:
    """Returns the names of devices, without the backend if it is the same for all."""
    several = len({d.backend for d in devices if d != HOST}) > 1
    return [str(d) if several or d == HOST else str(d.id) for d in devices]


def _shades(moved: Moved) -> list[str]:
    """Returns the lines of a table with one character for each pair of rows."""
    names, grid, shared = _rows(moved, _ROWS)
    most = int(grid.max())
    levels = [f"{shade} to {readable(most * (k + 1) / len(_SHADES))}" for k, shade in enumerate(_SHADES)]
    lines = [["", "", "sent", "received"]]
    for k, (name, row) in enumerate(zip(names, grid.tolist(), strict=True)):
        cells = "".join([_SHADES[-(-n * len(_SHADES) // most) - 1] if n else _NONE for n in row])
        lines.append([name, cells, readable(sum(row)), readable(int(grid[:, k].sum()))])
    total = f"{readable(moved.total)} from rows to columns{shared}"
    return [total, f"{_NONE} none  {'  '.join(levels)}", *_aligned(lines)]


def _rows(moved: Moved, most: int) -> tuple[list[str], Ints, str]:
    """Returns the names of rows, the bytes from row to row, and a note for the title if devices share rows.

    There is one row for each device, or for several neighbouring devices if there would be more than ``most`` rows; and
    one row for the host.
    """
    devices = moved.devices
    others = [device for device in devices if device != HOST]
    share = math.ceil(len(others) / most) or 1
    groups = [others[k : k + share] for k in range(0, len(others), share)]
    groups += [[HOST]] * (HOST in devices)
    grid = moved.grid(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    short = dict(zip(devices, _short(devices), strict=True))
    names = [f"{group[0]}..{short[group[-1]]}" if len(group) > 1 else str(group[0]) for group in groups]
    return names, grid, f", {share} devices to each" * (share > 1)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of cells as lines: the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


# -- as a figure -----------------------------------------------------------------------------------


@functools.cache
def _matplotlib_figure() -> Any:
    """Returns a class of figures that notebooks display although pyplot does not know them."""
    figure = importlib.import_module("matplotlib.figure").Figure
    return type("Picture", (figure,), {"__module__": __name__, "_repr_png_": _png})


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _figure(figure_class: Any, moved: Moved) -> Any:
    ticker = importlib.import_module("matplotlib.ticker")
    names, grid, shared = _rows(moved, _PIXELS)
    size = min(max(3.5, 0.55 * len(names)), 8)
    figure = figure_class(figsize=(size + 1.7, size + 0.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="to", ylabel="from")
    if not moved.devices:
        axes.set(title="no bytes moved", xticks=[], yticks=[])
        return figure
    axes.set_title(f"{readable(moved.total)} moved{shared}")
    most = float(grid.max())
    image = axes.imshow(np.ma.masked_equal(grid, 0), cmap="viridis_r", vmin=0, vmax=most)  # zeros stay blank
    step = math.ceil(len(names) / _NAMES)
    shown = [*range(0, len(names) - step, step), len(names) - 1]
    axes.set_xticks(shown, [names[k] for k in shown], rotation=90)
    axes.set_yticks(shown, [names[k] for k in shown])
    unit = 1024 ** power_of_1024(most)
    locator = ticker.MaxNLocator(5, steps=[1, 2.5, 5, 10], integer=unit == 1)  # a quarter is 256 of the smaller unit
    ticks = [tick for tick in locator.tick_values(0, most / unit) * unit if tick <= most]
    figure.colorbar(image, ticks=ticks, format=lambda n, _: readable(n), label="bytes")
    if len(names) <= _NUMBERS:
        for source, destination in np.argwhere(grid).tolist():
            nbytes = int(grid[source, destination])
            color = "white" if nbytes > most / 2 else "black"
            axes.text(destination, source, readable(nbytes), ha="center", va="center", color=color, fontsize=7)
    return figure
