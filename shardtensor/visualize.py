"""What a person looks at: which device holds which part of an array, drawn as text, in a terminal's colors, or as HTML."""

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
from typing import TYPE_CHECKING, TextIO, TypeAlias

from shardtensor.backend import Device
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.sharding import Grid, NamedSharding, Shape
from shardtensor.tensor import ShardedTensor

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Range: TypeAlias = tuple[int, int]


def visualize_sharding(
    x: ShardedTensor | Sequence[int],
    sharding: NamedSharding | None = None,
    *,
    file: TextIO | None = None,
    use_color: bool | None = None,
) -> None:
    """Prints which device holds which part of an array.

    One dimension is a row of cells, two are a table, and more are a table of the last two for each block of the others.
    Cells are as wide and high as their parts are large.

    Args:
        x: a tensor, of which no element is read; or a shape, together with ``sharding``.
        sharding: where an array of that shape would lie.
        file: where to print; without it, ``sys.stdout``.
        use_color: whether each part has a background color of its own; without it, where ``file`` is a terminal with colors.

    Raises:
        ArgumentTypeError: x is neither a tensor nor a shape, or a shape comes without a sharding.
        ArgumentError: a tensor, which has a sharding of its own, comes with one.
        ShapeError: a size is negative.
        ShardingError: the sharding's spec is longer than the shape.

    >>> st.visualize_sharding((3, 4), st.NamedSharding(st.make_mesh((2, 2), ("x", "y")), st.P("x")))
    """
    shape, sharding = _layout("visualize_sharding", "x", x, sharding)
    _print(_console(sys.stdout if file is None else file, use_color), shape, sharding)


def text(shape: Sequence[int], sharding: NamedSharding) -> str:
    """What `visualize_sharding` prints to a file: plain text, at most 80 characters wide.

    Args:
        shape: the shape of an array.
        sharding: where it lies.

    Raises:
        ArgumentTypeError, ShapeError, ShardingError: as in `visualize_sharding`.

    >>> from shardtensor.visualize import text
    >>> text((), st.SingleDeviceSharding(st.devices("numpy")[3])).splitlines()
    """
    out = io.StringIO()
    _print(_console(out, use_color=False), *_layout("text", "shape", shape, sharding))
    return out.getvalue()


def html(x: ShardedTensor) -> str:
    """A tensor as a fragment of HTML, for notebooks: what it is, and a picture of which device holds which part.

    Args:
        x: a tensor. No element of it is read, so that it may have been donated.

    Raises:
        ArgumentTypeError: x is something else.

    >>> from shardtensor.visualize import html
    >>> "<td>(5, 3)</td>" in html(st.zeros((5, 3)))
    True
    """
    if not isinstance(x, ShardedTensor):
        raise ArgumentTypeError(f"html: x is of type {type(x).__name__}; wanted a ShardedTensor, such as st.asarray(x)")
    sharding = x.sharding
    kind = "" if sharding.memory_kind == "device" else f", {sharding.memory_kind}"
    facts = {
        "shape": f"{x.shape}{' (donated)' if x.is_donated else ''}",
        "dtype": x.dtype,
        "sharding": f"{sharding.spec} on {sharding.mesh}{kind}",
        "size": _bytes(x.nbytes),
        "per device": f"{_bytes(math.prod(sharding.shard_shape(x.shape)) * x.itemsize)} at most",
    }
    rows = "".join(
        f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{escape(str(fact))}</td></tr>'
        for name, fact in facts.items()
    )
    return f'<div style="overflow-x:auto"><table>{rows}</table>{_picture(x.shape, sharding.grid(x.shape))}</div>'


def _layout(who: str, name: str, x: object, sharding: object) -> tuple[Shape, NamedSharding]:
    """The checked arguments of ``who``, whose first one is called ``name``."""
    if isinstance(x, ShardedTensor):
        if sharding is not None:
            raise ArgumentError(f"{who}: {name} is a tensor, which has a sharding; wanted no second one, or {name}.shape with it")
        return x.shape, x.sharding
    if not isinstance(x, (tuple, list)) or not all(hasattr(size, "__index__") for size in x):
        what = repr(x) if isinstance(x, (tuple, list)) else f"of type {type(x).__name__}"
        raise ArgumentTypeError(
            f"{who}: {name} is {what}; wanted a ShardedTensor, or a shape (a tuple of ints) with a sharding; "
            f"st.asarray makes a tensor of an array"
        )
    shape = tuple(map(operator.index, x))
    if any(size < 0 for size in shape):
        raise ShapeError(f"{who}: {name} is the shape {shape}; wanted sizes of 0 or more, so leave out the negative one")
    if not isinstance(sharding, NamedSharding):
        what = "missing" if sharding is None else f"of type {type(sharding).__name__}"
        raise ArgumentTypeError(
            f"{who}: sharding is {what}; a shape wants a NamedSharding along with it: pass one, "
            f"such as st.NamedSharding(mesh, st.P('x')), or pass a tensor"
        )
    sharding.check_rank(len(shape), f"{who}: sharding")
    return shape, sharding


# -- what there is to draw ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Elements that the same devices hold, and their number among the parts that have any."""

    box: tuple[Range, ...]
    devices: list[Device]
    number: int

    @property
    def block(self) -> tuple[Range, ...]:
        """Where it is in the dimensions before the last two."""
        return self.box[:-2]

    @property
    def place(self) -> tuple[Range, Range]:
        """Which rows and columns it has in the picture; a dimension that the array lacks counts as one of size 1."""
        rows, columns = ((0, 1), (0, 1), *self.box)[-2:]
        return rows, columns

    @property
    def index(self) -> str:
        """Its index in the picture's dimensions."""
        return ", ".join(f"{begin}:{end}" for begin, end in self.box[-2:])

    def label(self, room: int | None = None, *, named: bool = True, more: str = "…") -> str:
        """``NUMPY 0,1``: as many devices as fit, or the first one if none does."""
        backends = ["", *(d.backend for d in self.devices)]
        names = [
            f"{d.backend.upper()} {d.id}" if named and d.backend != before else str(d.id)
            for before, d in zip(backends, self.devices, strict=False)
        ]
        return _shortened(names, ",", room, more)


def _parts(grid: Grid) -> list[_Part]:
    """The parts that have elements, in the order of their indices."""
    holders: dict[int, list[Device]] = {}
    for device, number in zip(grid.devices, grid.linear_parts().tolist(), strict=True):
        holders.setdefault(number, []).append(device)
    numbers = grid.linear_parts()
    boxes = sorted((grid.box(k), holders[int(numbers[k])]) for k in grid.owners() if 0 not in grid.shape(k))
    return [_Part(box, devices, number) for number, (box, devices) in enumerate(boxes)]


def _ranges(parts: Sequence[_Part]) -> tuple[list[Range], list[Range]]:
    """The rows and the columns of the picture, from the parts of one block or of all."""
    rows, columns = zip(*(part.place for part in parts), strict=True)
    return sorted(set(rows)), sorted(set(columns))


def _empty(grid: Grid) -> list[str]:
    return [str(device) for k, device in enumerate(grid.devices) if 0 in grid.shape(k)]


def _shortened(names: Sequence[str], separator: str, room: int | None, more: str) -> str:
    """As many names as fit into that many characters, but one at least; and a sign if there are more."""
    for kept in range(len(names), 0, -1):
        line = separator.join([*names[:kept], *([more] if kept < len(names) else [])])
        if room is None or len(line) <= room:
            break
    return line


def _slices(box: Sequence[Range], shape: Shape) -> str:
    """``[0:3, :]``: a box of an array of that shape."""
    return f"[{', '.join(':' if (b, e) == (0, n) else f'{b}:{e}' for (b, e), n in zip(box, shape, strict=True))}]"


def _color(number: int) -> str:
    """A light color for black text, in both themes. Multiples of √2 keep neighbors in a row and in a column apart in hue."""
    rgb = colorsys.hls_to_rgb(number * math.sqrt(2) % 1, (0.78, 0.86, 0.7)[number % 3], 0.7)
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
