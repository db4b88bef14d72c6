"""Draws the pictures of the README and of the pages: `python docs/pictures/draw.py` writes them beside this file.

Colours and lines are legible on light and on dark pages.
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LINE = "#808080"


def svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """A picture of the given size."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    head += ' font-family="ui-sans-serif, system-ui, sans-serif" text-anchor="middle">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>\n"])


def rectangle(x: float, y: float, width: float, height: float, fill: str, radius: float = 2) -> str:
    """A filled rectangle."""
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="{radius:g}" fill="{fill}" stroke="{LINE}"/>'


def text(x: float, y: float, words: str, size: float = 13, **options: str) -> str:
    """A line of text, of which (x, y) is the middle; black unless ``fill`` is given."""
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in options.items())
    return f'<text x="{x:g}" y="{y:g}" dy="0.35em" font-size="{size:g}"{given}>{escape(words)}</text>'


# -- the layouts of the README's first block -------------------------------------------------------

CELL = 24
"""The width and the height of an element."""


def color(devices: list[int]) -> str:
    """The colour of a part: a hue for each row of the mesh, a lightness for each of its two columns."""
    rows, columns = {d // 2 for d in devices}, {d % 2 for d in devices}
    lightness = 0.78 if len(columns) == 2 else 0.85 if columns == {0} else 0.7
    saturation = 0.65 if len(rows) == 1 else 0.0
    red, green, blue = colorsys.hls_to_rgb(0.58 + 0.21 * min(rows), lightness, saturation)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def matrix(x: Any, left: float, top: float) -> Iterator[str]:
    """The parts of a matrix, each with the numbers of the devices that hold it."""
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        box = tuple(s.indices(n)[:2] for s, n in zip(index, x.shape, strict=True))
        holders.setdefault(box, []).append(device.id)
    for ((up, down), (start, end)), devices in holders.items():
        width, height = CELL * (end - start), CELL * (down - up)
        yield rectangle(left + CELL * start, top + CELL * up, width, height, color(devices))
        words = [str(d) for d in sorted(devices)]
        lines = [", ".join(words)] if 20 * len(words) < width else words
        for k, line in enumerate(lines):
            middle = top + CELL * up + height / 2 + 18 * (k - (len(lines) - 1) / 2)
            yield text(left + CELL * start + width / 2, middle, line)


def layouts() -> str:
    """The operands and the result of the product in the README's first block, which is executed."""
    (block, *_) = re.findall(r"```python\n(.*?)```", (HERE.parents[1] / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"print": lambda *args: None}
    exec(block, names)
    parts, left, height = [], 10.0, 10 * CELL
    for name, sign in (("x", "@"), ("w", "→"), ("y", "")):
        x = names[name]
        width, top = CELL * x.shape[1], 34 + (height - CELL * x.shape[0]) / 2
        parts += [text(left + width / 2, top - 16, f"{name}: {x.sharding.spec}", fill=LINE), *matrix(x, left, top)]
        left += width + 64
        parts += [text(left - 32, 34 + height / 2, sign, 22, fill=LINE)] if sign else []
    return svg(left - 54, height + 44, "The layouts of x, w and y", parts)


# -- the architecture ------------------------------------------------------------------------------

LAYERS = [
    ("shardtensor", "the public names", "#cfe3f7"),
    ("data", "batches · order of rows · sources · reading ahead", "#c9e8e4"),
    ("optim", "optimizers: chains of transformations · schedules", "#cfeaf2"),
    ("checkpoint", "trees · manifests · one folder for each step", "#cbe9dd"),
    ("files", "formats · checksums · writes that are durable and whole", "#d3eef0"),
    ("pictures", "layouts · traffic · printed tensors", "#e4e4f4"),
    ("spmd", "pmap · smap · shard_map · collectives · scheduler of programs", "#d8d2f3"),
    ("interpreters", "eager · device · infer · plans and strategies · views and writes", "#f3d2ea"),
    ("functions", "declared operators: signature, docstring, rule · distributed algorithms", "#f7d6d0"),
    ("communication", "communicator · transfers · log · memory kinds · simulation", "#f9e3c4"),
    ("tensor", "handle · aval · storage · NumPy's protocols · pytrees", "#f2efbf"),
    ("sharding", "mesh · spec · split rule · sharding rules · copy plans", "#dcefc4"),
    ("backend", "devices · protocol and registry of plugins", "#c8ecd2"),
    ("core, host, hint_tables, errors", "dispatch · threads, memory pool, BLAS · hints · exceptions", "#dddddd"),
]
"""The packages, from the highest to the lowest, with their main nouns."""

STEPS = [
    (0, "st.tanh(x)"),
    (7, "the interpreter infers the layout, and plans"),
    (9, "elements that are missing are transferred"),
    (12, "the plugin computes on each device"),
]
"""The path of a call: the layer of each step, and what happens there."""

ROW, WIDTH = 50, 560


def architecture() -> str:
    """The packages, and the path of a call through them."""
    parts = []
    for row, (name, nouns, fill) in enumerate(LAYERS):
        y = 10 + ROW * row
        parts += [rectangle(10, y, WIDTH, ROW - 8, fill, 6), text(10 + WIDTH / 2, y + 13, name, 14, font_weight="bold")]
        parts += [text(10 + WIDTH / 2, y + 31, nouns, 12)]
    bottom, fourth = 10 + ROW * len(LAYERS), (WIDTH - 24) / 4
    for column, plugin in enumerate(("NumPy", "CuPy", "PyTorch", "your own")):
        x = 10 + column * (fourth + 8)
        parts += [rectangle(x, bottom, fourth, 30, "#ffffff", 6), text(x + fourth / 2, bottom + 15, plugin)]
    line = WIDTH + 30
    ends = [10 + ROW * layer + (ROW - 8) / 2 for layer, _ in STEPS]
    parts += [f'<path d="M{line} {ends[0]:g}V{ends[-1]:g}" stroke="{LINE}" stroke-width="2"/>']
    for y, (_, words) in zip(ends, STEPS, strict=True):
        parts += [f'<circle cx="{line}" cy="{y:g}" r="5" fill="{LINE}"/>']
        parts += [text(line + 14, y, words, fill=LINE, text_anchor="start")]
    return svg(WIDTH + 320, bottom + 40, "The packages, and the path of a call through them", parts)


PICTURES = {"layouts": layouts, "architecture": architecture}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw())
