"""HTML for notebooks: which device holds which part of an array as SVG, and tables of facts and figures.

Pictures are legible on light and on dark pages: parts have light colors and dark text, everything else has the text
color of the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shardtensor.host.units import counted, readable
from shardtensor.pictures.parts import Part, color, empty_devices, parts_of, rows_and_columns, slices
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.spec import P


def tensor_html(x: Any, elements: str = "") -> str:
    """Returns an HTML fragment: a tensor's attributes, a picture of which device holds which part, and elements; for a
    tensor without dimensions, its element and one line.

    Args:
        x: a tensor. Its elements are not read, so it may have been donated.
        elements: the elements to show, as text.

    >>> from shardtensor.pictures.html import tensor_html
    >>> "(5, 3)" in tensor_html(st.zeros((5, 3)))
    True
    """
    sharding: NamedSharding = x.sharding
    kind = "" if sharding.memory_kind == "device" else f", {sharding.memory_kind}"
    if not x.shape:
        where = f"{x.dtype}, {sharding.spec} on {sharding.mesh}{kind}{', donated' if x.is_donated else ''}"
        return f"<div>{text_html(elements) if elements else ''}{_note(where)}</div>"
    facts = {
        "shape": f"{x.shape}{', donated' if x.is_donated else ''}",
        "dtype": str(x.dtype),
        "sharding": f"{sharding.spec} on {sharding.mesh}{kind}",
        "bytes in all": readable(x.nbytes),
        "bytes per device": f"{readable(math.prod(sharding.shard_shape(x.shape)) * x.itemsize)} at most",
    }
    return _side_by_side(_facts(facts) + (text_html(elements) if elements else ""), picture(x.shape, sharding))


def mesh_html(mesh: Mesh) -> str:
    """Returns an HTML fragment: the axes of a mesh, and a picture of the grid of its devices."""
    axes = [f"{name}={size}" for name, size in mesh.shape.items()]
    one_each = NamedSharding(mesh, P(*mesh.axis_names))
    return _side_by_side(_facts({"mesh": repr(mesh)}), picture(mesh.axis_sizes, one_each, axes))


def sharding_html(sharding: NamedSharding) -> str:
    """Returns an HTML fragment: the attributes of a sharding, and a picture of how it splits an array with one element
    for each part.
    """
    chains, sizes = sharding.spec.chains, sharding.mesh.shape
    shape = tuple([math.prod(sizes[axis] for axis in chain) for chain in chains])
    facts = {"spec": repr(sharding.spec), "mesh": repr(sharding.mesh), "memory kind": sharding.memory_kind}
    return _side_by_side(_facts(facts), picture(shape, sharding, [" ".join(chain) for chain in chains]))


def text_html(text: str) -> str:
    """Returns text as HTML in a monospaced font, whatever the font of the page."""
    return f'<pre style="font-family: monospace; line-height: 1.2">{escape(text)}</pre>'


def table_html(rows: Sequence[Sequence[str]]) -> str:
    """Returns an HTML table: the first row has the titles, the last one the totals; numbers are aligned right."""
    titles, *lines, total = rows
    cells = [_row("th", titles), *[_row("td", line) for line in lines], _row("th", total)]
    return f"<table>{''.join(cells)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    """Returns a row of a table."""
    sides = ["right" if cell[:1].isdigit() else "left" for cell in cells]
    elements = [f'<{tag} style="text-align: {s}">{escape(c)}</{tag}>' for s, c in zip(sides, cells, strict=True)]
    return f"<tr>{''.join(elements)}</tr>"


_ROW = "display: flex; flex-wrap: wrap; gap: 1em"
"""The style of an element whose children are side by side."""


def _facts(facts: Mapping[str, str]) -> str:
    left = 'style="text-align: left"'
    rows = "".join(f"<tr><th {left}>{name}</th><td {left}>{escape(fact)}</td></tr>" for name, fact in facts.items())
    return f"<table>{rows}</table>"


def _side_by_side(*fragments: str) -> str:
    """Returns fragments side by side, or below each other where the page is too narrow."""
    cells = "".join(f"<div>{fragment}</div>" for fragment in fragments)
    return f'<div style="{_ROW}; align-items: flex-start; overflow-x: auto">{cells}</div>'


# -- pictures --------------------------------------------------------------------------------------

_SIDE = 240
"""The longer side of a picture in pixels, unless labels need more."""

_LEAST_SIDE = 80
"""The same for each block of an array of many blocks."""

_CHARACTER = 7
"""The width of one character of a label in pixels."""

_BLOCKS = 64
"""The most blocks that are drawn."""


def picture(shape: Shape, sharding: NamedSharding, axes: Sequence[str] = ()) -> str:
    """Returns a picture of which device holds which part of an array, as SVG.

    An array of more than two dimensions is drawn as a cuboid for each block of the dimensions before the last two, so
    that all parts are visible; its depth is that of the dimension before the last two.

    Args:
        shape: the shape of the array.
        sharding: the sharding of the array.
        axes: a label for each dimension; by default, its size.
    """
    grid = sharding.grid(shape)
    parts = parts_of(grid)
    blocks = [list(members) for _, members in itertools.groupby(parts, lambda part: part.block)]
    labels = list(axes) or [str(n) for n in shape]
    if len(blocks) > 1:
        labels = labels[-2:]  # The titles of the blocks name their extents in the other dimensions.
    side = max(_SIDE / math.sqrt(len(blocks)), _LEAST_SIDE) if blocks else _SIDE
    figures = []
    for block in blocks[:_BLOCKS]:
        title = slices([*block[0].block, *((0, n) for n in shape[-2:])], shape) if len(blocks) > 1 else ""
        figures.append(f"<div>{_svg(block, shape, labels, side)}{_note(title)}</div>")
    hidden = len(blocks) - len(figures)
    notes = [counted(hidden, "more block") if hidden else "", empty_devices(grid)]
    return f'<div><div style="{_ROW}">{"".join(figures)}</div>{"".join(map(_note, notes))}</div>'


def _note(text: str) -> str:
    return f"<div>{escape(text)}</div>" if text else ""


def _svg(parts: Sequence[Part], shape: Shape, labels: Sequence[str], side: float) -> str:
    """Returns the parts of one block as SVG, each with an area in proportion to its size."""
    rows, columns = rows_and_columns(parts)
    tall, wide = rows[-1][1], columns[-1][1]
    named = len({device.backend for part in parts for device in part.devices}) > 1
    room = 1 + max(min(len(part.label(named=named)), max(len(part.label(0, named=named)), 11)) for part in parts)
    unit = side / max(tall, wide)
    right = max(unit, room * _CHARACTER / min(end - begin for begin, end in columns))
    down = max(unit if len(shape) > 1 else 0, 3 * _CHARACTER / min(end - begin for begin, end in rows))
    deep = _depth(parts[0], shape, min(right, down), side)
    width, height = wide * right, tall * down
    cells = [_rectangle(part, right, down, deep, named) for part in parts]
    faces = [face for part in parts for face in _faces(part, right, down, deep, wide)] if deep else []
    texts = _labels(labels, width, height, deep)
    # The labels of the dimensions are left and below.
    left = _CHARACTER * (len(labels[-2]) + 1) if len(labels) > 1 else 0
    below = 14 if labels else 0
    box = f"{-left - 1:g} -1 {width + deep + left + 2:.0f} {height + deep + below + 2:.0f}"
    size = f'width="{width + deep + left + 2:.0f}" height="{height + deep + below + 2:.0f}" viewBox="{box}"'
    look = 'font-family="monospace" font-size="11" text-anchor="middle"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{"".join([*faces, *cells, *texts])}</svg>'


def _depth(part: Part, shape: Shape, unit: float, side: float) -> float:
    """Returns how far the cuboid of a block extends to the back, in pixels; 0 for an array of one or two dimensions."""
    if len(shape) < 3:
        return 0
    begin, end = part.block[-1]
    whole = min(max(0.35 * unit * shape[-3], 24), 0.4 * side)
    return max(whole * (end - begin) / shape[-3], 6)


def _rectangle(part: Part, right: float, down: float, deep: float, named: bool) -> str:
    (top, bottom), (begin, end) = part.extent
    x, y, width, height = begin * right, deep + top * down, (end - begin) * right, (bottom - top) * down
    label = part.label(int(width / _CHARACTER), named=named)
    return (
        f"<g><title>{escape(part.caption(': '))}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color(part.devices[0])}" '
        f'stroke="#777"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + height / 2:.1f}" dy="0.35em" fill="#000">{escape(label)}</text></g>'
    )


def _faces(part: Part, right: float, down: float, deep: float, wide: int) -> list[str]:
    """Returns the upper and the right face of a part, if it is at that edge of its block."""
    (top, bottom), (begin, end) = part.extent
    faces = []
    if top == 0:
        near, far = begin * right, end * right
        faces.append((0.92, [(near, deep), (far, deep), (far + deep, 0), (near + deep, 0)]))
    if end == wide:
        x, high, low = end * right, deep + top * down, deep + bottom * down
        faces.append((0.84, [(x, high), (x + deep, high - deep), (x + deep, low - deep), (x, low)]))
    return [
        f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" '
        f'fill="{color(part.devices[0], shade)}" stroke="#777"/>'
        for shade, points in faces
    ]


def _labels(labels: Sequence[str], width: float, height: float, deep: float) -> list[str]:
    """Returns the labels of the last three dimensions: below the front, left of it, and along its depth."""
    below = (width / 2, deep + height + 11, "middle")
    beside = (-4, deep + height / 2 + 4, "end")
    along = (deep / 2 - 6, deep / 2 + 2, "end")
    return [
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{escape(label)}</text>'
        for (x, y, anchor), label in zip((below, beside, along), labels[::-1], strict=False)
    ]
