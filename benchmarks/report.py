"""The page of all figures, for people: of each table a picture, the rows that are behind, and those that are ahead.

``python benchmarks/report.py [DIR]`` writes it from the tables in a folder, as `run.py` does after each benchmark.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import NOT_IDLE
from tables import NOT_APPLICABLE, digits, quantity

PAGE = "README.md"
"""The name of the page: that which GitHub shows for a folder."""

LEVEL = 1.05
"""The factor within which two figures count as equal: runs differ by about as much."""

SHORT = 1e-3
"""The seconds below which a row measures the cost of a call rather than that of its work."""

FARTHEST = 5
"""The number of rows that the first screen names, of those below and above `SHORT`."""

WIDEST = 100.0
"""The ratio at which bars end, in both directions."""

FASTER, SLOWER = "#2a7f62", "#c44536"


@dataclass(frozen=True)
class Line:
    """A row of a table, with the best figure of the other libraries.

    Attributes:
        title: the text of the row.
        unit: the unit of its figures.
        ours: shardtensor's figure.
        best: the least figure of another library, and this library; None if there is none.
        targets: the texts of the targets, and whether each is met.
        earlier: the figure of the earlier commit that was measured beside this one.
        is_clear: whether the samples of both commits hardly overlap.
    """

    title: str
    unit: str
    ours: float
    best: tuple[float, str] | None
    targets: tuple[tuple[str, bool | None], ...]
    earlier: float | None
    is_clear: bool

    @property
    def ratio(self) -> float | None:
        """shardtensor's figure divided by the best other one; None if there is none, or if it is 0."""
        return self.ours / self.best[0] if self.best and self.best[0] > 0 else None

    @property
    def is_behind(self) -> bool:
        """Whether another library has a smaller figure, or a target is missed."""
        return (self.ratio or 0.0) > LEVEL or any(met is False for _, met in self.targets)

    @property
    def change(self) -> float | None:
        """The figure divided by that of the earlier commit; None if they are equal within the noise."""
        if not self.earlier or not self.is_clear or 1 / LEVEL < self.ours / self.earlier < LEVEL:
            return None
        return self.ours / self.earlier


@dataclass(frozen=True)
class Result:
    """A table that has been saved.

    Attributes:
        name: the name of its files.
        title: its headline.
        facts: its environment.
        lines: the rows in which shardtensor has a figure.
    """

    name: str
    title: str
    facts: dict[str, str]
    lines: tuple[Line, ...]

    def targets(self, *verdicts: bool | None) -> int:
        """Returns the number of targets with one of these verdicts; of all targets without arguments."""
        found = [met for line in self.lines for _, met in line.targets]
        return sum(met in verdicts for met in found) if verdicts else len(found)


def read(path: Path) -> Result | None:
    """Reads a table; None if there is none."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except OSError:
        return None
    if "peers" not in table:  # written before this page existed
        return None
    ours = table["columns"][0]
    earlier = next((column for column in table["columns"] if column.startswith("at ")), "")
    lines = [_line(row, ours, earlier, table["peers"]) for row in table["rows"] if "median" in row["cells"][ours]]
    return Result(path.stem, table["title"], table["environment"], tuple(lines))


def _line(row: dict[str, Any], ours: str, earlier: str, peers: Sequence[str]) -> Line:
    cells = row["cells"]
    figures = [(cells[peer]["median"], peer) for peer in peers if "median" in cells[peer]]
    before = cells.get(earlier, {})
    mine, theirs = cells[ours].get("quartiles"), before.get("quartiles")
    return Line(
        row["title"],
        row["unit"],
        cells[ours]["median"],
        min(figures, default=None),
        tuple([(target["target"], target["met"]) for target in row["targets"]]),
        before.get("median"),
        bool(mine and theirs) and (mine[0] > theirs[1] or theirs[0] > mine[1]),
    )


# -- the page ----------------------------------------------------------------------------------------------------------


def write(folder: Path, names: Iterable[str]) -> None:
    """Writes the page of the tables with these names that a folder has, and their pictures."""
    names = tuple(names)
    results = [result for name in names if (result := read(folder / f"{name}.json"))]
    missing = [name for name in names if name not in {result.name for result in results}]
    pictures = {}
    for result in results:
        own = [f"{result.name}.svg"] if draw(result, folder / f"{result.name}.svg") else []
        pictures[result.name] = own + sorted(path.name for path in folder.glob(f"{result.name}-curves.svg"))
    (folder / PAGE).write_text("\n".join(_page(results, pictures, missing)) + "\n", "utf-8")


def _page(results: Sequence[Result], pictures: Mapping[str, Sequence[str]], missing: Sequence[str]) -> list[str]:
    text = [
        "# Figures",
        "",
        "Each table measures shardtensor and other libraries side by side, in one run. Compare the figures of one row;",
        "absolute times depend on the machine. [How the tables are measured and read](../README.md).",
        "",
        *_summary(results),
        *([f"* **Not measured yet for this page:** {', '.join(missing)}."] if missing else []),
        "",
    ]
    behind = [(line, result) for result in results for line in result.lines if (line.ratio or 0.0) > LEVEL]
    short = [(line, result) for line, result in behind if line.unit == "s" and line.ours < SHORT]
    text += _farthest("Farthest behind: a millisecond and more", [pair for pair in behind if pair not in short])
    text += _farthest("Farthest behind: short calls", short)
    text += _changes(results)
    for result in results:
        text += _section(result, pictures[result.name])
    return text[:-1]


def _summary(results: Sequence[Result]) -> list[str]:
    met, missed = (sum(result.targets(verdict) for result in results) for verdict in (True, False))
    share = f" ({met / (met + missed):.0%})" if met + missed else ""
    commits = {result.facts.get("commit", "unknown") for result in results}
    several = " The tables are not of one commit." if len(commits) > 1 else ""
    busy = [result.name for result in results if NOT_IDLE in result.facts.get("other processes", "")]
    idle = f"the machine was not idle during {', '.join(busy)}" if busy else "the machine was idle during all tables"
    return [
        f"* **Targets:** {met} of {met + missed} are met{share}.",
        f"* **Commit:** {', '.join(sorted(commits))}.{several}",
        f"* **Machine:** {_common(results, 'CPU')}; {_common(results, 'memory')}; {idle}.",
    ]


def _common(results: Sequence[Result], fact: str) -> str:
    return " and ".join(sorted({result.facts[fact] for result in results if fact in result.facts}))


def _farthest(title: str, pairs: Sequence[tuple[Line, Result]]) -> list[str]:
    rows = sorted(pairs, key=lambda pair: -(pair[0].ratio or 0.0))[:FARTHEST]
    cells = [(_link(line, result), *_figures(line), f"**{digits(line.ratio or 0.0)}×**") for line, result in rows]
    return [f"## {title}", "", *_grid(("row", "shardtensor", "best other", "ratio"), cells)]


def _link(line: Line, result: Result) -> str:
    return f"[{line.title}](#{result.name})"


def _changes(results: Sequence[Result]) -> list[str]:
    before = next((result.facts["against"] for result in results if "against" in result.facts), None)
    if before is None:
        return []
    changed = [(line, result) for result in results for line in result.lines if line.change]
    cells = [
        (
            _link(line, result),
            quantity(line.earlier or 0.0, line.unit),
            quantity(line.ours, line.unit),
            f"{digits(line.change or 0.0)}×",
        )
        for line, result in sorted(changed, key=lambda pair: -(pair[0].change or 0.0))
    ]
    return [
        f"## Changes since {before}",
        "",
        "Both commits were measured in one run. These rows differ by more than the noise.",
        "",
        *_grid(("row", "before", "now", "now / before"), cells),
    ]


def _section(result: Result, pictures: Sequence[str]) -> list[str]:
    behind = [line for line in result.lines if line.is_behind]
    others = [line for line in result.lines if not line.is_behind]
    text = [f"## {result.name}", "", result.title + ".", ""]
    for picture in pictures:
        text += [f"![{result.title}]({picture})", ""]
    text += _lines("Behind", sorted(behind, key=lambda line: -(line.ratio or 0.0)))
    text += _lines("Ahead, level, or without a figure of another library", sorted(others, key=lambda x: x.ratio or 0.0))
    facts = [f"{name} {value}" for name, value in result.facts.items() if name not in ("CPU", "memory")]
    return [*text, f"[All figures]({result.name}.txt). {'; '.join(facts)}.", ""]


def _lines(title: str, lines: Sequence[Line]) -> list[str]:
    if not lines:
        return []
    cells = [
        (
            line.title,
            *_figures(line),
            NOT_APPLICABLE if line.ratio is None else f"{digits(line.ratio)}×",
            _targets(line),
        )
        for line in lines
    ]
    return [f"**{title}**", "", *_grid(("row", "shardtensor", "best other", "ratio", "target"), cells)]


def _figures(line: Line) -> tuple[str, str]:
    best = f"{quantity(line.best[0], line.unit)} ({line.best[1]})" if line.best else NOT_APPLICABLE
    return quantity(line.ours, line.unit), best


def _targets(line: Line) -> str:
    verdicts = {True: "met", False: "**missed**", None: "not checked"}
    return "; ".join(f"{text} {verdicts[met]}" for text, met in line.targets)


def _grid(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown, and an empty line."""
    lines = [titles, ["---", *["--:"] * (len(titles) - 1)], *rows]
    return [*(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines), ""]


# -- the pictures ------------------------------------------------------------------------------------------------------


def draw(result: Result, path: Path) -> bool:
    """Draws a bar for each row: shardtensor's figure over the best other one. Returns whether there is a picture."""
    lines = sorted((line for line in result.lines if line.ratio), key=lambda line: -(line.ratio or 0.0))
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return path.exists()
    if not lines:
        return False
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(lines)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", subs=[])
    for y, line in enumerate(lines):
        _bar(axes, y, line.ratio or 1.0, line.best[1] if line.best else "")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.3)
    axes.set_yticks(range(len(lines)), [line.title for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel("shardtensor's figure over the best other one: left of 1, shardtensor's is smaller")
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": result.name}):  # equal figures give equal files
        figure.savefig(path, metadata={"Date": None})
    return True


def _bar(axes: Any, y: int, ratio: float, peer: str) -> None:
    end = min(max(ratio, 1 / WIDEST), WIDEST)
    text = f"{ratio:.2g}" if end == ratio else f"{'<' if ratio < end else '>'} {end:g}"
    is_faster = ratio <= 1
    axes.barh(y, end - 1, left=1, color=FASTER if is_faster else SLOWER)
    axes.annotate(
        f"{text} × {peer}", (end, y), (-4 if is_faster else 4, 0), textcoords="offset points",
        ha="right" if is_faster else "left", va="center", fontsize=8,
    )  # fmt: skip


if __name__ == "__main__":
    from run import TABLES

    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results", TABLES)
