"""Pictures of shardings: which device holds which part of an array, as plain or colored text or as HTML."""

from __future__ import annotations

import colorsys
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from shardtensor.backend.device import Device
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.host.units import readable
from shardtensor.sharding.layout import Grid, NamedSharding, Shape, checked_shape, with_mesh

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@runtime_checkable
class Sharded(Protocol):
    """An object with a shape and a sharding, such as a `ShardedTensor`; a picture needs nothing else."""

    @property
    def shape(self) -> Shape:
        """The shape of the array."""

    @property
    def sharding(self) -> NamedSharding:
        """The placement of its elements on devices."""


Range: TypeAlias = tuple[int, int]
"""Begin and end of a part in one dimension."""


def visualize_sharding(
    x: Sharded | Sequence[int],
    sharding: NamedSharding | None = None,
    *,
    file: IO[str] | None = None,
    use_color: bool | None = None,
) -> None:
    """Prints which device holds which part of an array.

    A one-dimensional array is printed as a row of cells, a two-dimensional array as a table, and an array of more
    dimensions as a table of the last two for each block of the others. The sizes of cells are proportional to the sizes
    of their parts.

    Args:
        x: a tensor, whose elements are not read; or a shape, together with ``sharding``.
        sharding: the sharding of an array of that shape; not given with a tensor.
        file: the text file to print to; default: ``sys.stdout``.
        use_color: whether each part has a background color; default: if ``file`` is a terminal with colors.

    Raises:
        ArgumentTypeError: x is neither a tensor nor a shape, or it is a shape and ``sharding`` is missing.
        ArgumentError: x is a tensor, which has its own sharding, and ``sharding`` is given.
        ShapeError: a size is negative.
        ShardingError: the sharding's spec has more dimensions than the shape.

    >>> mesh = st.make_mesh((3, 2), ("x", "y"), devices=st.devices("numpy"))
    >>> st.visualize_sharding((5,), st.NamedSharding(mesh, st.P("x")))
    ┌──────────────────────────────┬──────────────────────────────┬───────────────┐
    │          NUMPY 0,1           │          NUMPY 2,3           │   NUMPY 4,5   │
    │             0:2              │             2:4              │      4:5      │
    └──────────────────────────────┴──────────────────────────────┴───────────────┘
    """
    if isinstance(x, Sharded):
        if sharding is not None:
            raise ArgumentError(
                "visualize_sharding: sharding is given, and x is a tensor, which has one; leave it out, or pass x.shape"
            )
        shape, sharding = x.shape, x.sharding
    else:
        if not isinstance(x, (tuple, list)):
            raise ArgumentTypeError(
                f"visualize_sharding: x is a {type(x).__name__}; wanted a ShardedTensor, or a shape and a sharding; "
                "st.asarray converts an array to a tensor"
            )
        shape = checked_shape(x, "visualize_sharding")
        sharding = with_mesh(sharding, "visualize_sharding")
        if not isinstance(sharding, NamedSharding):
            came = "missing" if sharding is None else f"a {type(sharding).__name__}"
            raise ArgumentTypeError(
                f"visualize_sharding: sharding is {came}; wanted a NamedSharding, because x is a shape: "
                "pass one, such as st.NamedSharding(mesh, st.P('x')), or pass a tensor"
            )
        sharding.check_rank(len(shape), "visualize_sharding")
    _print(_console(sys.stdout if file is None else file, use_color), shape, sharding)


def html(x: Any) -> str:
    """Returns an HTML fragment for notebooks: a tensor's attributes, and a picture of which device holds which part.

    Args:
        x: a tensor. Its elements are not read, so it may have been donated.

    >>> from shardtensor.sharding.visualize import html
    >>> "(5, 3)" in html(st.zeros((5, 3)))
    True
    """
    sharding: NamedSharding = x.sharding
    kind = "" if sharding.memory_kind == "device" else f", {sharding.memory_kind}"
    facts = {
        "shape": f"{x.shape}{', donated' if x.is_donated else ''}",
        "dtype": str(x.dtype),
        "sharding": f"{sharding.spec} on {sharding.mesh}{kind}",
        "bytes in all": readable(x.nbytes),
        "bytes per device": f"{readable(math.prod(sharding.shard_shape(x.shape)) * x.itemsize)} at most",
    }
    left = 'style="text-align: left"'
    rows = "".join(f"<tr><th {left}>{name}</th><td {left}>{escape(fact)}</td></tr>" for name, fact in facts.items())
    return f'<div style="overflow-x: auto"><table>{rows}</table>{_picture(x.shape, sharding.grid(x.shape))}</div>'


# -- the parts of a picture ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A part of an array that has elements and is held by the same devices.

    Attributes:
        box: begin and end of the part in each dimension.
        devices: the devices that hold it.
        number: its number among the parts that have elements.
    """

    box: tuple[Range, ...]
    devices: tuple[Device, ...]
    number: int

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


def _parts(grid: Grid) -> list[_Part]:
    """Returns the parts that have elements, in the order of their indices."""
    numbers = grid.linear_parts().tolist()
    holders: dict[int, list[Device]] = {}
    for device, number in zip(grid.devices, numbers, strict=True):
        holders.setdefault(number, []).append(device)
    boxes = sorted((grid.box(k), numbers[k]) for k in grid.owners() if 0 not in grid.shape(k))
    return [_Part(box, tuple(holders[number]), order) for order, (box, number) in enumerate(boxes)]


def _rows_and_columns(parts: Sequence[_Part]) -> tuple[list[Range], list[Range]]:
    rows, columns = zip(*(part.extent for part in parts), strict=True)
    return sorted(set(rows)), sorted(set(columns))


def _empty(grid: Grid, room: int | None = None) -> str:
    """Returns a line that lists the devices without elements; an empty string if there are none."""
    names = [str(device) for k, device in enumerate(grid.devices) if 0 in grid.shape(k)]
    return _shortened([f"empty on {names[0]}", *names[1:]], ", ", room, f"… ({len(names)} devices)") if names else ""


def _shortened(names: Sequence[str], separator: str, room: int | None, more: str) -> str:
    """Joins as many names as fit into ``room`` characters, at least one, and replaces the others by ``more``."""
    line, kept = separator.join(names), len(names)
    while room is not None and len(line) > room and kept > 1:
        kept -= 1
        line = separator.join([*names[:kept], more])
    return line


def _slices(box: Sequence[Range], shape: Shape) -> str:
    """Returns the index of a box in an array of that shape, such as ``[0:3, :]``."""
    return f"[{', '.join(':' if (b, e) == (0, n) else f'{b}:{e}' for (b, e), n in zip(box, shape, strict=True))}]"


def _color(number: int) -> str:
    """Returns the background color of a part for dark text, as ``#rrggbb``.

    With these steps of hue and lightness, neighbors in a row differ, and so do neighbors in a column of tables with at
    most 16 columns. The first 25 colors differ also in terminals with 256 colors.
    """
    rgb = colorsys.hls_to_rgb(0.379 * number % 1, (0.72, 0.85, 0.65)[number % 3], 0.7)
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


_NAMED = ("bright_green", "bright_magenta", "bright_yellow", "bright_cyan", "bright_red", "bright_white", "bright_blue")
"""Background colors for dark text in terminals with 16 colors, where similar shades of `_color` would be equal."""


def _style(console: Console, number: int, columns: int) -> str:
    """Returns the text and background color of a part in a table with ``columns`` columns.

    With 16 colors, the number of backgrounds used in turn does not divide the number of columns, so that neighbors in
    rows and in columns differ.
    """
    if console.color_system not in ("standard", "windows"):
        return f"#000000 on {_color(number)}"
    count = next((n for n in (7, 6, 5) if columns % n), 7)
    return f"black on {_NAMED[number % count]}"


# -- as text ---------------------------------------------------------------------------------------

_LINES = 10
"""The maximal height in lines that a table gets from its proportions; only captions make it higher."""

_CELL = 24
"""The width in characters of cells with wide captions where columns continue in another table."""


def _console(file: IO[str], use_color: bool | None) -> Console:
    from rich.console import Console

    colors: Literal["auto", "256"] | None = "auto" if use_color is None else "256" if use_color else None
    console = Console(file=file, color_system=colors, no_color=False if use_color else None, force_jupyter=False)
    console.width = min(max(console.width, _CELL + 2), 120) if getattr(file, "isatty", bool)() else 80
    return console


def _print(console: Console, shape: Shape, sharding: NamedSharding) -> None:
    grid = sharding.grid(shape)
    if parts := _parts(grid):
        cells, bands = _layout(parts, len(shape), console.width)
        columns = sum(map(len, bands))
        for block, members in itertools.groupby(parts, lambda part: part.block):
            block_parts = list(members)
            for band in bands:
                if len(shape) > 2 or len(bands) > 1:
                    rows = [(0, size) for size in shape[-2:-1]]
                    title = _slices([*block, *rows, (band[0][0], band[-1][1])], shape)
                    console.print(_text(console, title), soft_wrap=True)
                _print_table(console, [part for part in block_parts if part.extent[1] in band], cells, columns)
    if line := _empty(grid, console.width):
        console.print(_text(console, line), soft_wrap=True)


def _layout(parts: Sequence[_Part], ndim: int, width: int) -> tuple[list[str], list[list[Range]]]:
    """Returns the text of each part's cell, padded to its size, and the columns in bands that fit side by side."""
    rows, columns = [sorted(set(ranges)) for ranges in zip(*[part.extent for part in parts], strict=True)]
    tall, wide = rows[-1][1], columns[-1][1]
    separator = "\n" if len(rows) <= _LINES // 2 else "  "
    least = _least_width(parts, separator, (width - 1) // len(columns) - 1)
    at_once = max(1, (width - 1) // (least + 1))
    bands = [columns[first : first + at_once] for first in range(0, len(columns), at_once)]
    widths = _lengths(columns, least, 2 * _LINES * wide // tall, width - 1 - len(columns))
    captions = _captions(parts, separator, widths)
    lines = max(caption.count("\n") + 1 for caption in captions)
    flat = ndim < 2 or len(bands) > 1
    heights = _lengths(rows, lines, 0 if flat else sum(widths.values()) * tall // (2 * wide), _LINES)
    sizes = [(widths[part.extent[1]], heights[part.extent[0]]) for part in parts]
    return [_centered(caption, *size) for caption, size in zip(captions, sizes, strict=True)], bands


def _least_width(parts: Sequence[_Part], separator: str, room: int) -> int:
    """Returns the least width of a cell for its caption: at most ``room`` unless not even one device fits into it."""
    longest = max(_width(_caption(part, separator)) for part in parts) + 2
    shortest = max(len(part.label(0)) for part in parts)
    return min(longest, room if room >= shortest else max(shortest, _CELL))


def _captions(parts: Sequence[_Part], separator: str, widths: dict[Range, int]) -> list[str]:
    """Returns the captions of cells in columns of these widths: the devices, and the indices if all indices fit."""
    spaces = {part: widths[part.extent[1]] for part in parts}
    captions = {part: _caption(part, separator, space) for part, space in spaces.items()}
    if all(_width(captions[part]) <= space for part, space in spaces.items()):
        return list(captions.values())
    return [part.label(space) for part, space in spaces.items()]


def _lengths(ranges: Sequence[Range], least: int, wanted: int, most: int) -> dict[Range, int]:
    """Returns lengths in proportion to the sizes of ranges.

    Their sum is ``wanted``, or larger if the smallest range needs it for the length ``least``, but at most ``most``.
    Ranges that would still be shorter than ``least`` get that length.
    """
    sizes = {r: r[1] - r[0] for r in ranges}
    total = min(most, max(wanted, math.ceil(least * sum(sizes.values()) / min(sizes.values()))))
    short: set[Range] = set()
    while True:
        rest = total - least * len(short)
        whole = sum(sizes[r] for r in sizes.keys() - short)
        found = {r for r in sizes.keys() - short if rest * sizes[r] < least * whole}
        if not found:
            return {r: least if r in short else rest * size // whole for r, size in sizes.items()}
        short |= found


def _caption(part: _Part, separator: str, room: int | None = None) -> str:
    return f"{part.label(room)}{separator}{part.index}" if part.index else part.label(room)


def _width(caption: str) -> int:
    return max(map(len, caption.split("\n")))


def _centered(caption: str, width: int, height: int) -> str:
    """Returns the caption centered in a rectangle of spaces."""
    lines = [f"{line:^{width}}" for line in caption.split("\n")]
    above = (height - len(lines)) // 2
    below = height - len(lines) - above
    return "\n".join([" " * width] * above + lines + [" " * width] * below)


def _print_table(console: Console, parts: Sequence[_Part], cells: Sequence[str], columns: int) -> None:
    from rich.box import SQUARE
    from rich.table import Table

    table = Table(box=SQUARE, show_header=False, show_lines=True, padding=0, pad_edge=False)
    for _, row in itertools.groupby(parts, lambda part: part.extent[0]):
        table.add_row(*[_text(console, cells[part.number], _style(console, part.number, columns)) for part in row])
    console.print(table)


def _text(console: Console, line: str, style: str = "") -> Text:
    """Returns the line in characters that the encoding of the console's file supports."""
    from rich.text import Text

    return Text(line.replace("…", "+") if console.options.ascii_only else line, style)


# -- as HTML ---------------------------------------------------------------------------------------

_SIDE = 240
"""The longer side of a picture in pixels, unless labels need more."""

_CHARACTER = 7
"""The width of one character of a label in pixels."""


def _picture(shape: Shape, grid: Grid) -> str:
    """Returns the first block as SVG, and lines with the index of that block and the devices without elements."""
    parts, notes, svg = _parts(grid), [_empty(grid)], ""
    if parts:
        svg = _svg([part for part in parts if part.block == parts[0].block], len(shape))
    if parts and len(shape) > 2:
        box = [*parts[0].block, *((0, size) for size in shape[-2:])]
        notes.insert(0, f"{_slices(box, shape)}, block 1 of {len({part.block for part in parts})}")
    return svg + "".join(f"<div>{escape(note)}</div>" for note in notes if note)


def _svg(parts: Sequence[_Part], ndim: int) -> str:
    """Returns the parts of one block as SVG, each with an area in proportion to its size."""
    rows, columns = _rows_and_columns(parts)
    tall, wide = rows[-1][1], columns[-1][1]
    named = len({device.backend for part in parts for device in part.devices}) > 1
    room = 1 + max(min(len(part.label(named=named)), max(len(part.label(0, named=named)), 11)) for part in parts)
    unit = _SIDE / max(tall, wide)
    right = max(unit, room * _CHARACTER / min(end - begin for begin, end in columns))
    down = max(unit if ndim > 1 else 0, 3 * _CHARACTER / min(end - begin for begin, end in rows))
    size = f'width="{wide * right + 2:.2f}" height="{tall * down + 2:.2f}"'
    look = 'font-family="monospace" font-size="11" text-anchor="middle"'
    cells = "".join(_rectangle(part, right, down, named) for part in parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{cells}</svg>'


def _rectangle(part: _Part, right: float, down: float, named: bool) -> str:
    (top, bottom), (begin, end) = part.extent
    x, y, width, height = 1 + begin * right, 1 + top * down, (end - begin) * right, (bottom - top) * down
    label = part.label(int(width / _CHARACTER), named=named)
    return (
        f"<g><title>{escape(_caption(part, ': '))}</title>"
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{_color(part.number)}" '
        f'stroke="#777"/>'
        f'<text x="{x + width / 2:.2f}" y="{y + height / 2:.2f}" dy="0.35em" fill="#000">{escape(label)}</text></g>'
    )
