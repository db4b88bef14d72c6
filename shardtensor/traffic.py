"""Pictures of traffic: how many bytes went from which device to which, as a heat map or as text."""

from __future__ import annotations

import functools
import importlib
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from shardtensor.backend import HOST, Device
from shardtensor.host import power_of_1024, readable

Moved = Mapping[tuple[Device, Device], int]
"""Bytes by (source, destination)."""

_NUMBERS = 12
"""As many devices have their bytes written out; where there are more, text has shades for them, a figure colors."""

_WIDTH = 120
"""How wide a table of numbers may be."""

_ROWS = 64
"""As many rows text has at most, the host's aside; where there are more devices, several share a row, and a column."""

_PIXELS = 128
"""The same of a figure."""

_NAMES = 24
"""As many rows of a figure have a name, at most; and the last one."""

_SHADES = "░▒▓█"
_NONE = "·"


class TextPicture:
    """A picture that is text: it prints as it looks, and notebooks show it so.

    >>> from shardtensor.traffic import TextPicture
    >>> TextPicture("a > b")
    a > b
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same for notebooks, in letters of one width."""
        return f'<pre style="line-height: 1.2">{escape(self._text)}</pre>'


def picture(moved: Moved, *, text: bool = False) -> Any:
    """Who sent how much to whom.

    Args:
        moved: bytes by (source, destination).
        text: whether it shall be text even if matplotlib is installed.

    Returns:
        A ``matplotlib.figure.Figure``, which pyplot does not know; or a `TextPicture`.

    >>> from shardtensor.traffic import picture
    >>> a, b, c = st.devices("numpy")[:3]
    >>> picture({(a, b): 4096, (b, c): 1536, (c, b): 7}, text=True)
    5.51 KiB from rows to columns
                   0        1        2      sent  received
    numpy:0        ·    4 KiB        ·     4 KiB       0 B
    numpy:1        ·        ·  1.5 KiB   1.5 KiB  4.01 KiB
    numpy:2        ·      7 B        ·       7 B   1.5 KiB
    """
    moved = {pair: n for pair, n in moved.items() if n}
    devices = sorted({device for pair in moved for device in pair}, key=lambda d: (d == HOST, d))
    figure = None if text else _figure_class()
    return TextPicture(_text(moved, devices)) if figure is None else _figure(figure, moved, devices)


def sent_and_received(moved: Moved) -> dict[Device, tuple[int, int]]:
    """How many bytes each device sent and received; those that took part, in order, the host last.

    >>> from shardtensor.traffic import sent_and_received
    >>> a, b = st.devices("numpy")[:2]
    >>> sent_and_received({(b, a): 8})
    {Device('numpy:0'): (0, 8), Device('numpy:1'): (8, 0)}
    """
    sums: dict[Device, list[int]] = {}
    for pair, nbytes in moved.items():
        for way, device in enumerate(pair):
            sums.setdefault(device, [0, 0])[way] += nbytes
    return {device: (sums[device][0], sums[device][1]) for device in sorted(sums, key=lambda d: (d == HOST, d))}


# -- as text ---------------------------------------------------------------------------------------


def _text(moved: Moved, devices: Sequence[Device]) -> str:
    if not moved:
        return "no bytes moved"
    numbers = _numbers(moved, devices) if len(devices) <= _NUMBERS else ()
    return "\n".join(numbers if numbers and max(map(len, numbers)) <= _WIDTH else _shades(moved, devices))


def _numbers(moved: Moved, devices: Sequence[Device]) -> list[str]:
    """A table of bytes."""
    head = ["", *_short(devices), "sent", "received"]
    sums = sent_and_received(moved)
    rows = [head]
    for source in devices:
        cells = [readable(moved[source, d]) if (source, d) in moved else _NONE for d in devices]
        rows.append([str(source), *cells, *map(readable, sums[source])])
    return [f"{readable(sum(moved.values()))} from rows to columns", *_aligned(rows)]


def _short(devices: Sequence[Device]) -> list[str]:
    """Names without the backend, where it is the same for all."""
    several = len({d.backend for d in devices if d != HOST}) > 1
    return [str(d) if several or d == HOST else str(d.id) for d in devices]


def _shades(moved: Moved, devices: Sequence[Device]) -> list[str]:
    """A character for each pair of rows."""
    names, grid, shared = _rows(moved, devices, _ROWS)
    most = int(grid.max())
    levels = [f"{shade} to {readable(most * (k + 1) / len(_SHADES))}" for k, shade in enumerate(_SHADES)]
    lines = [["", "", "sent", "received"]]
    for k, (name, row) in enumerate(zip(names, grid.tolist(), strict=True)):
        cells = "".join([_SHADES[-(-n * len(_SHADES) // most) - 1] if n else _NONE for n in row])
        lines.append([name, cells, readable(sum(row)), readable(int(grid[:, k].sum()))])
    total = f"{readable(sum(moved.values()))} from rows to columns{shared}"
    return [total, f"{_NONE} none  {'  '.join(levels)}", *_aligned(lines)]


def _rows(moved: Moved, devices: Sequence[Device], most: int) -> tuple[list[str], Any, str]:
    """Names of rows, the bytes from row to row, and how to say that rows are shared.

    There is a row for each device, or for as many neighbours as must share one lest there be more than ``most``; and
    one for the host.
    """
    others = [device for device in devices if device != HOST]
    share = math.ceil(len(others) / most) or 1
    groups = [others[k : k + share] for k in range(0, len(others), share)]
    groups += [[HOST]] * (HOST in devices)
    row_of = {device: k for k, group in enumerate(groups) for device in group}
    grid = np.zeros((len(groups), len(groups)), dtype=np.int64)
    for (source, destination), nbytes in moved.items():
        grid[row_of[source], row_of[destination]] += nbytes
    short = dict(zip(devices, _short(devices), strict=True))
    names = [f"{group[0]}..{short[group[-1]]}" if len(group) > 1 else str(group[0]) for group in groups]
    return names, grid, f", {share} devices to each" * (share > 1)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells: the first column begins, and the others end, at one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


# -- as a figure -----------------------------------------------------------------------------------


@functools.cache
def _matplotlib_figure() -> Any:
    """A figure that notebooks show although pyplot does not know it."""
    figure = importlib.import_module("matplotlib.figure").Figure
    return type("Picture", (figure,), {"__module__": __name__, "_repr_png_": _png})


def _figure_class() -> Any:
    """That class; None where matplotlib is not installed."""
    try:
        return _matplotlib_figure()
    except ImportError:
        return None


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _figure(figure_class: Any, moved: Moved, devices: Sequence[Device]) -> Any:
    ticker = importlib.import_module("matplotlib.ticker")
    names, grid, shared = _rows(moved, devices, _PIXELS)
    size = min(max(3.5, 0.55 * len(names)), 8)
    figure = figure_class(figsize=(size + 1.7, size + 0.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="to", ylabel="from")
    if not moved:
        axes.set(title="no bytes moved", xticks=[], yticks=[])
        return figure
    axes.set_title(f"{readable(sum(moved.values()))} moved{shared}")
    most = float(grid.max())
    image = axes.imshow(np.ma.masked_equal(grid, 0), cmap="viridis_r", vmin=0, vmax=most)  # nothing sent: blank
    step = math.ceil(len(names) / _NAMES)
    shown = [*range(0, len(names) - step, step), len(names) - 1]
    axes.set_xticks(shown, [names[k] for k in shown], rotation=90)
    axes.set_yticks(shown, [names[k] for k in shown])
    unit = 1024 ** power_of_1024(most)
    locator = ticker.MaxNLocator(5, steps=[1, 2.5, 5, 10], integer=unit == 1)  # quarters of a unit are 256 of the next
    ticks = [tick for tick in locator.tick_values(0, most / unit) * unit if tick <= most]
    figure.colorbar(image, ticks=ticks, format=lambda n, _: readable(n), label="bytes")
    if len(names) <= _NUMBERS:
        for source, destination in np.argwhere(grid).tolist():
            nbytes = int(grid[source, destination])
            color = "white" if nbytes > most / 2 else "black"
            axes.text(destination, source, readable(nbytes), ha="center", va="center", color=color, fontsize=7)
    return figure
