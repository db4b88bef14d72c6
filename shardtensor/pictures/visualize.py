"""Pictures of shardings: which device holds which part, as plain or colored text, and in notebooks as SVG."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Literal, Protocol, runtime_checkable

from rich.box import SQUARE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.pictures.html import picture
from shardtensor.pictures.parts import Part, Range, color, empty_devices, parts_of, rows_and_columns, slices
from shardtensor.sharding.layout import NamedSharding, Shape, checked_shape, with_mesh


@runtime_checkable
class Sharded(Protocol):
    """An object with a shape and a sharding, such as a `ShardedTensor`; a picture needs nothing else."""

    @property
    def shape(self) -> Shape:
        """The shape of the array."""

    @property
    def sharding(self) -> NamedSharding:
        """The placement of its elements on devices."""


def visualize_sharding(
    x: Sharded | Sequence[int],
    sharding: NamedSharding | None = None,
    *,
    file: IO[str] | None = None,
    use_color: bool | None = None,
) -> None:
    """Prints which device holds which part of an array; in a Jupyter notebook, shows it as a picture.

    A one-dimensional array is printed as a row of cells, a two-dimensional array as a table, and an array of more
    dimensions as a table of the last two for each block of the others. The sizes of cells are proportional to the sizes
    of their parts. A device has the same color in all pictures.

    Args:
        x: a tensor, whose elements are not read; or a shape, together with ``sharding``.
        sharding: the sharding of an array of that shape; not given with a tensor.
        file: the text file to print to; default: ``sys.stdout``, or the output of the notebook's cell.
        use_color: whether each part has a background color; default: if ``file`` is a terminal with colors. In a
            notebook, True and False print text.

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
                f"visualize_sharding: x is {type_text(x)}; wanted a ShardedTensor, or a shape and a sharding; "
                "st.asarray converts an array to a tensor"
            )
        shape = checked_shape(x, "visualize_sharding")
        sharding = with_mesh(sharding, "visualize_sharding")
        if not isinstance(sharding, NamedSharding):
            came = "missing" if sharding is None else f"{type_text(sharding)}"
            raise ArgumentTypeError(
                f"visualize_sharding: sharding is {came}; wanted a NamedSharding, because x is a shape: "
                "pass one, such as st.NamedSharding(mesh, st.P('x')), or pass a tensor"
            )
        sharding.check_rank(len(shape), "visualize_sharding")
    if file is None and use_color is None and _is_notebook(sys.stdout):
        importlib.import_module("IPython.display").display(_Picture(shape, sharding))
    else:
        _print(_console(sys.stdout if file is None else file, use_color), shape, sharding)


def _is_notebook(out: object) -> bool:
    """Whether a text file is the standard output of a Jupyter kernel.

    Its consoles show colors as a terminal with 16 colors does, in which devices are hard to tell apart.
    """
    return type(out).__module__ == "ipykernel.iostream"


class _Picture:
    """A picture in a notebook; programs that show no HTML show it as text."""

    def __init__(self, shape: Shape, sharding: NamedSharding) -> None:
        self._shape = shape
        self._sharding = sharding

    def _repr_html_(self) -> str:
        return picture(self._shape, self._sharding)

    def __repr__(self) -> str:
        out = io.StringIO()
        _print(_console(out, False), self._shape, self._sharding)
        return out.getvalue().rstrip("\n")


# -- as text ---------------------------------------------------------------------------------------

_LINES = 10
"""The maximal height in lines that a table gets from its proportions; only captions make it higher."""

_CELL = 24
"""The width in characters of cells with wide captions where columns continue in another table."""


def _console(file: IO[str], use_color: bool | None) -> Console:
    colors: Literal["auto", "256"] | None = "auto" if use_color is None else "256" if use_color else None
    console = Console(file=file, color_system=colors, no_color=False if use_color else None, force_jupyter=False)
    console.width = min(max(console.width, _CELL + 2), 120) if getattr(file, "isatty", bool)() else 80
    return console


def _print(console: Console, shape: Shape, sharding: NamedSharding) -> None:
    grid = sharding.grid(shape)
    if parts := parts_of(grid):
        cells, bands = _layout(parts, len(shape), console.width)
        for block, members in itertools.groupby(parts, lambda part: part.block):
            block_parts = list(members)
            looks = _looks(console, block_parts, sum(map(len, bands)))
            for band in bands:
                if len(shape) > 2 or len(bands) > 1:
                    rows = [(0, size) for size in shape[-2:-1]]
                    title = slices([*block, *rows, (band[0][0], band[-1][1])], shape)
                    console.print(_text(console, title), soft_wrap=True)
                _print_table(console, [part for part in block_parts if part.extent[1] in band], cells, looks)
    if line := empty_devices(grid, console.width):
        console.print(_text(console, line), soft_wrap=True)


Cell = tuple[str, int, int]
"""The caption of a cell, and its width and height in characters."""


def _layout(parts: Sequence[Part], ndim: int, width: int) -> tuple[dict[Part, Cell], list[list[Range]]]:
    """Returns the cell of each part, and the columns in bands that fit side by side."""
    rows, columns = rows_and_columns(parts)
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
    return {part: (caption, *size) for part, caption, size in zip(parts, captions, sizes, strict=True)}, bands


_NAMED = ("bright_green", "bright_magenta", "bright_yellow", "bright_cyan", "bright_red", "bright_white", "bright_blue")
"""Background colors for dark text in terminals with 16 colors, where similar shades of `color` would be equal."""

_PATTERNS = " /."
"""The characters around captions in terminals with 16 colors: adjacent cells of the same color have different ones."""

Look = tuple[str, str]
"""The colors of a cell, and the character around its caption."""


def _looks(console: Console, parts: Sequence[Part], columns: int) -> dict[Part, Look]:
    """Returns the look of each part of a table with ``columns`` columns."""
    devices = [part.devices[0] for part in parts]
    if console.color_system not in ("standard", "windows"):
        return {part: (f"#000000 on {color(device)}", " ") for part, device in zip(parts, devices, strict=True)}
    looks: list[Look] = []
    for k, device in enumerate(devices):
        style = f"black on {_NAMED[device.id % len(_NAMED)]}"
        touching = [*looks[max(0, k - columns) : k - columns + 1], *looks[k - 1 if k % columns else k : k]]
        looks.append((style, next(pattern for pattern in _PATTERNS if (style, pattern) not in touching)))
    return dict(zip(parts, looks, strict=True))


def _least_width(parts: Sequence[Part], separator: str, room: int) -> int:
    """Returns the least width of a cell for its caption: at most ``room`` unless not even one device fits into it."""
    longest = max(_width(part.caption(separator)) for part in parts) + 2
    shortest = max(len(part.label(0)) for part in parts)
    return min(longest, room if room >= shortest else max(shortest, _CELL))


def _captions(parts: Sequence[Part], separator: str, widths: dict[Range, int]) -> list[str]:
    """Returns the captions of cells in columns of these widths: the devices, and the indices if all indices fit."""
    spaces = {part: widths[part.extent[1]] for part in parts}
    captions = {part: part.caption(separator, space) for part, space in spaces.items()}
    if all(_width(captions[part]) <= space for part, space in spaces.items()):
        return list(captions.values())
    return [part.label(space) for part, space in spaces.items()]


def _lengths(ranges: Sequence[Range], least: int, target: int, most: int) -> dict[Range, int]:
    """Returns lengths in proportion to the sizes of ranges.

    Their sum is ``target``, or larger if the smallest range needs it for the length ``least``, but at most ``most``.
    Ranges that would still be shorter than ``least`` get that length.
    """
    sizes = {r: r[1] - r[0] for r in ranges}
    total = min(most, max(target, math.ceil(least * sum(sizes.values()) / min(sizes.values()))))
    short: set[Range] = set()
    while True:
        rest = total - least * len(short)
        whole = sum(sizes[r] for r in sizes.keys() - short)
        shorter = {r for r in sizes.keys() - short if rest * sizes[r] < least * whole}
        if not shorter:
            return {r: least if r in short else rest * size // whole for r, size in sizes.items()}
        short |= shorter


def _width(caption: str) -> int:
    return max(map(len, caption.split("\n")))


def _centered(caption: str, width: int, height: int, pattern: str) -> str:
    """Returns the caption centered in a rectangle that is filled with a pattern."""
    lines = [line if pattern == " " or len(line) + 4 > width else f" {line} " for line in caption.split("\n")]
    above = (height - len(lines)) // 2
    below = height - len(lines) - above
    return "\n".join([f"{line:{pattern}^{width}}" for line in [""] * above + lines + [""] * below])


def _print_table(
    console: Console, parts: Sequence[Part], cells: Mapping[Part, Cell], looks: Mapping[Part, Look]
) -> None:
    table = Table(box=SQUARE, show_header=False, show_lines=True, padding=0, pad_edge=False)
    for _, row in itertools.groupby(parts, lambda part: part.extent[0]):
        table.add_row(*[_text(console, _centered(*cells[part], looks[part][1]), looks[part][0]) for part in row])
    console.print(table)


def _text(console: Console, line: str, style: str = "") -> Text:
    """Returns the line in characters that the encoding of the console's file supports."""
    return Text(line.replace("…", "+") if console.options.ascii_only else line, style)
