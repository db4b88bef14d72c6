"""What a person looks at: which device holds which part of an array, as text, in a terminal's colors, or as HTML."""

from __future__ import annotations

import colorsys
import io
import itertools
import math
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from shardtensor.backend import Device
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.sharding import Grid, NamedSharding, Shape
from shardtensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from rich.align import Align
    from rich.console import Console
    from rich.text import Text

Range: TypeAlias = tuple[int, int]
"""Begin and end in one dimension."""


def visualize_sharding(
    x: ShardedTensor | Sequence[int],
    sharding: NamedSharding | None = None,
    *,
    file: TextIO | None = None,
    use_color: bool | None = None,
) -> None:
    """Prints which device holds which part of an array.

    One dimension is a row of cells, two are a table, and more are a table of the last two for each block of the others.
    Cells are as wide and as high as their parts are large.

    Args:
        x: a tensor, of which no element is read; or a shape, together with ``sharding``.
        sharding: where an array of that shape would lie.
        file: where to print; without it, ``sys.stdout``.
        use_color: whether each part has a background color; without it, they have if ``file`` is a terminal with colors.

    Raises:
        ArgumentTypeError: x is neither a tensor nor a shape, or a shape comes without a sharding.
        ArgumentError: a tensor, which has a sharding of its own, comes with another.
        ShapeError: a size is negative.
        ShardingError: the sharding's spec is longer than the shape.

    >>> mesh = st.make_mesh((2, 2), ("x", "y"), devices=st.devices("numpy"))
    >>> st.visualize_sharding((3, 8), st.NamedSharding(mesh, st.P("x")))
    """
    shape, sharding = _checked("visualize_sharding", "x", x, sharding)
    _print(_console(sys.stdout if file is None else file, use_color), shape, sharding)


def text(shape: Sequence[int], sharding: NamedSharding) -> str:
    """What `visualize_sharding` prints into a file: plain text, at most 80 characters wide.

    Args:
        shape: the shape of an array.
        sharding: where it lies.

    Raises:
        ArgumentTypeError, ShapeError, ShardingError: as in `visualize_sharding`.

    >>> from shardtensor.visualize import text
    """
    out = io.StringIO()
    _print(_console(out, use_color=False), *_checked("text", "shape", shape, sharding))
    return out.getvalue()


def html(x: ShardedTensor) -> str:
    """A tensor as a fragment of HTML, for notebooks: what it is, and a picture of which device holds which part.

    Args:
        x: a tensor. No element of it is read, so that it may have been donated.

    Raises:
        ArgumentTypeError: x is something else.

    >>> from shardtensor.visualize import html
    >>> "(5, 3)" in html(st.zeros((5, 3)))
    True
    """
    if not isinstance(x, ShardedTensor):
        raise ArgumentTypeError(f"html: x is of type {type(x).__name__}; wanted a ShardedTensor, such as st.asarray(x)")
    sharding = x.sharding
    kind = "" if sharding.memory_kind == "device" else f", {sharding.memory_kind}"
    facts = {
        "shape": f"{x.shape}{', donated' if x.is_donated else ''}",
        "dtype": str(x.dtype),
        "sharding": f"{sharding.spec} on {sharding.mesh}{kind}",
        "bytes": _bytes(x.nbytes),
        "per device": f"{_bytes(math.prod(sharding.shard_shape(x.shape)) * x.itemsize)} at most",
    }
    left = 'style="text-align: left"'
    rows = "".join(f"<tr><th {left}>{name}</th><td {left}>{escape(fact)}</td></tr>" for name, fact in facts.items())
    picture = _picture(x.shape, sharding.grid(x.shape))
    return f'<div style="overflow-x: auto"><table>{rows}</table>{picture}</div>'


def _checked(who: str, name: str, x: object, sharding: object) -> tuple[Shape, NamedSharding]:
    """The shape and the sharding that ``who`` was asked to draw; ``name`` is what it calls its first argument."""
    if isinstance(x, ShardedTensor):
        if sharding is not None:
            raise ArgumentError(
                f"{who}: sharding is given, and {name} is a tensor, which has one; wanted one of them: "
                f"leave it out, or pass {name}.shape"
            )
        return x.shape, x.sharding
    if not isinstance(x, (tuple, list)) or not all(hasattr(size, "__index__") for size in x):
        came = repr(x) if isinstance(x, (tuple, list)) else f"of type {type(x).__name__}"
        raise ArgumentTypeError(
            f"{who}: {name} is {came}; wanted a ShardedTensor, or a shape (a tuple of ints) and a sharding; "
            f"st.asarray makes a tensor of an array"
        )
    shape = tuple(map(operator.index, x))
    if any(size < 0 for size in shape):
        raise ShapeError(f"{who}: {name} is the shape {shape}; wanted sizes from 0 on, so give no negative one")
    if not isinstance(sharding, NamedSharding):
        came = "missing" if sharding is None else f"of type {type(sharding).__name__}"
        raise ArgumentTypeError(
            f"{who}: sharding is {came}; wanted a NamedSharding, because {name} is a shape: "
            f"pass one, such as st.NamedSharding(mesh, st.P('x')), or pass a tensor"
        )
    sharding.check_rank(len(shape), f"{who}: sharding")
    return shape, sharding


# -- what there is to draw ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Elements that the same devices hold, and their number among the parts that have any."""

    box: tuple[Range, ...]
    devices: list[Device]
    number: int

    @property
    def block(self) -> tuple[Range, ...]:
        """Where it lies in the dimensions before the last two."""
        return self.box[:-2]

    @property
    def place(self) -> tuple[Range, Range]:
        """Where it lies in the last two; a dimension that the array lacks is one of size 1."""
        rows, columns = ((0, 1), (0, 1), *self.box)[-2:]
        return rows, columns

    @property
    def index(self) -> str:
        """Its index in the last two dimensions."""
        return ", ".join(f"{begin}:{end}" for begin, end in self.box[-2:])

    def label(self, room: int | None = None, *, named: bool = True) -> str:
        """``NUMPY 0,1``: as many devices as fit into ``room`` characters; their ids alone if not ``named``."""
        before = ["", *(device.backend for device in self.devices)]
        names = [
            f"{device.backend.upper()} {device.id}" if named and device.backend != last else str(device.id)
            for last, device in zip(before, self.devices, strict=False)
        ]
        return _shortened(names, ",", room, "…")


def _parts(grid: Grid) -> list[_Part]:
    """The parts that have elements, in the order of their indices."""
    numbers = grid.linear_parts().tolist()
    holders: dict[int, list[Device]] = {}
    for device, number in zip(grid.devices, numbers, strict=True):
        holders.setdefault(number, []).append(device)
    boxes = sorted((grid.box(k), numbers[k]) for k in grid.owners() if 0 not in grid.shape(k))
    return [_Part(box, holders[number], order) for order, (box, number) in enumerate(boxes)]


def _ranges(parts: Sequence[_Part], axis: int) -> list[Range]:
    """The rows (axis 0) or the columns (axis 1) of the picture, in order."""
    return sorted({part.place[axis] for part in parts})


def _several_backends(grid: Grid) -> bool:
    """Whether ids alone do not tell the devices apart."""
    return len({device.backend for device in grid.devices}) > 1


def _empty(grid: Grid, room: int | None = None) -> str:
    """The line that names the devices without elements; no text if there are none."""
    names = [str(device) for k, device in enumerate(grid.devices) if 0 in grid.shape(k)]
    return _shortened([f"empty on {names[0]}", *names[1:]], ", ", room, f"… ({len(names)} devices)") if names else ""


def _shortened(names: Sequence[str], separator: str, room: int | None, more: str) -> str:
    """As many names as fit into ``room`` characters, one at least, and ``more`` in place of the others."""
    line, kept = separator.join(names), len(names)
    while room is not None and len(line) > room and kept > 1:
        kept -= 1
        line = separator.join([*names[:kept], more])
    return line


def _slices(box: Sequence[Range], shape: Shape) -> str:
    """``[0:3, :]``: that box of an array of that shape."""
    return f"[{', '.join(':' if (b, e) == (0, n) else f'{b}:{e}' for (b, e), n in zip(box, shape, strict=True))}]"


def _color(number: int) -> str:
    """A background for dark text. Steps of √2 and the cycle of three keep neighbors in rows and in columns apart."""
    rgb = colorsys.hls_to_rgb(number * math.sqrt(2) % 1, (0.78, 0.86, 0.7)[number % 3], 0.7)
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


# -- as text -----------------------------------------------------------------------------------------------------------

_LINES = 12
"""How high a table becomes by its proportions; only its captions make it higher."""


@dataclass(frozen=True)
class _Layout:
    """How a picture is set in characters.

    Attributes:
        widths, heights: of each column and of each row, without the lines between them.
        captions: the text of each part, by its number.
        named: whether the captions name the backend.
    """

    widths: dict[Range, int]
    heights: dict[Range, int]
    captions: list[str]
    named: bool

    def bands(self, width: int) -> Iterator[list[Range]]:
        """The columns, as many at a time as stand side by side in that width."""
        band: list[Range] = []
        for column in self.widths:
            if band and 1 + sum(self.widths[c] + 1 for c in [*band, column]) > width:
                yield band
                band = []
            band.append(column)
        yield band


def _layout(parts: Sequence[_Part], ndim: int, width: int, *, named: bool) -> _Layout:
    """The layout for a page of that width; ``named`` says that labels must name the backend, as they do where they can."""
    rows, columns = _ranges(parts, 0), _ranges(parts, 1)
    tall, wide = rows[-1][1], columns[-1][1]
    room = (width - 1) // len(columns) - 1
    named = named or all(len(part.label(0)) <= room for part in parts)
    shortest = max(len(part.label(0, named=named)) for part in parts)
    longest = max(max(len(part.label(named=named)), len(part.index)) for part in parts) + 2
    least = min(longest, room if room >= shortest else max(shortest, 11))
    widths = _lengths(columns, least, min(width - 1 - len(columns), 2 * _LINES * wide // tall))
    separator = "\n" if len(rows) <= _LINES // 2 else "  "
    captions = [_caption(part, widths[part.place[1]], named, separator) for part in parts]
    lines = max(caption.count("\n") + 1 for caption in captions)
    total = min(_LINES, sum(widths.values()) * tall // (2 * wide)) if ndim > 1 else lines
    return _Layout(widths, _lengths(rows, lines, total), captions, named)


def _lengths(ranges: Sequence[Range], least: int, total: int) -> dict[Range, int]:
    """Lengths in proportion to the sizes of ranges: ``total`` together, or little less, but each at least ``least``."""
    sizes = {r: r[1] - r[0] for r in ranges}
    small: set[Range] = set()
    while True:
        rest = total - least * len(small)
        whole = sum(sizes[r] for r in sizes.keys() - small)
        short = {r for r in sizes.keys() - small if rest * sizes[r] < least * whole}
        if not short:
            return {r: least if r in small else rest * size // whole for r, size in sizes.items()}
        small |= short


def _caption(part: _Part, width: int, named: bool, separator: str) -> str:
    """The devices of a part, and its index if there is room."""
    label = part.label(width, named=named)
    lines = f"{label}{separator}{part.index}" if part.index else label
    return lines if all(len(line) <= width for line in lines.split("\n")) else label


def _console(file: TextIO, use_color: bool | None) -> Console:
    from rich.console import Console

    colors: Literal["auto", "256"] | None = "auto" if use_color is None else "256" if use_color else None
    console = Console(file=file, color_system=colors, force_terminal=use_color or None, force_jupyter=False)
    console.width = min(max(console.width, 20), 120) if getattr(file, "isatty", bool)() else 80
    return console


def _print(console: Console, shape: Shape, sharding: NamedSharding) -> None:
    grid = sharding.grid(shape)
    if parts := _parts(grid):
        layout = _layout(parts, len(shape), console.width, named=_several_backends(grid))
        for _, block in itertools.groupby(parts, lambda part: part.block):
            _print_block(console, shape, list(block), layout)
        if not layout.named:
            _print_line(console, f"numbers are ids of {grid.devices[0].backend} devices")
    if line := _empty(grid, console.width):
        _print_line(console, line)


def _print_block(console: Console, shape: Shape, parts: Sequence[_Part], layout: _Layout) -> None:
    from rich.box import SQUARE
    from rich.table import Table

    bands = list(layout.bands(console.width))
    for band in bands:
        if len(shape) > 2 or len(bands) > 1:
            rows = [(0, size) for size in shape[-2:-1]]
            _print_line(console, _slices([*parts[0].block, *rows, (band[0][0], band[-1][1])], shape))
        table = Table(box=SQUARE, show_header=False, show_lines=True, padding=0, pad_edge=False)
        for column in band:
            table.add_column(width=layout.widths[column])
        for row, height in layout.heights.items():
            cells = [part.number for part in parts if part.place[0] == row and part.place[1] in band]
            table.add_row(*[_cell(_text(console, layout.captions[k]), height, _color(k)) for k in cells])
        console.print(table)


def _cell(caption: Text, height: int, color: str) -> Align:
    from rich.align import Align
    from rich.style import Style

    return Align.center(caption, Style(color="#000000", bgcolor=color), vertical="middle", height=height)


def _print_line(console: Console, line: str) -> None:
    console.print(_text(console, line), soft_wrap=True)


def _text(console: Console, line: str) -> Text:
    """The line in characters that the file's encoding has."""
    from rich.text import Text

    return Text(line.replace("…", "+") if console.options.ascii_only else line, justify="center")


# -- as HTML -----------------------------------------------------------------------------------------------------------

_SIDE = 240
"""The longer side of a picture in pixels, unless its labels need more."""

_CHARACTER = 7
"""The width of a label's character in pixels."""


def _picture(shape: Shape, grid: Grid) -> str:
    """The first block as SVG, and lines that say which block it is and which devices have nothing."""
    parts, notes = _parts(grid), [_empty(grid)]
    svg = ""
    if parts:
        svg = _svg([part for part in parts if part.block == parts[0].block], len(shape), _several_backends(grid))
    if parts and len(shape) > 2:
        box = [*parts[0].block, *((0, size) for size in shape[-2:])]
        notes.insert(0, f"{_slices(box, shape)}, block 1 of {len({part.block for part in parts})}")
    return svg + "".join(f"<div>{escape(note)}</div>" for note in notes if note)


def _svg(parts: Sequence[_Part], ndim: int, named: bool) -> str:
    """The parts of one block, as large as their shares of it."""
    rows, columns = _ranges(parts, 0), _ranges(parts, 1)
    tall, wide = rows[-1][1], columns[-1][1]
    room = 1 + max(min(len(part.label(named=named)), max(len(part.label(0, named=named)), 11)) for part in parts)
    unit = _SIDE / max(tall, wide)
    right = max(unit, room * _CHARACTER / min(end - begin for begin, end in columns))
    down = max(unit if ndim > 1 else 0, 3 * _CHARACTER / min(end - begin for begin, end in rows))
    size = f'width="{wide * right + 2:.2f}" height="{tall * down + 2:.2f}"'
    look = 'font-family="monospace" font-size="11" text-anchor="middle"'
    cells = "".join(_rectangle(part, right, down, named) for part in parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {look}>{cells}</svg>'


def _rectangle(part: _Part, right: float, down: float, named: bool) -> str:
    (top, bottom), (begin, end) = part.place
    x, y, width, height = 1 + begin * right, 1 + top * down, (end - begin) * right, (bottom - top) * down
    whole = f"{part.label()}: {part.index}" if part.index else part.label()
    label = part.label(int(width / _CHARACTER), named=named)
    return (
        f'<g><title>{escape(whole)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{_color(part.number)}" stroke="#777"/>'
        f'<text x="{x + width / 2:.2f}" y="{y + height / 2:.2f}" dy="0.35em" fill="#111">{escape(label)}</text></g>'
    )
