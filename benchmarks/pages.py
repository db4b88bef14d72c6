"""The page of a table, as text, and the progress bar. The only module of this folder that needs Rich."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

import rich.progress
from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text
from tables import VERDICTS, Row, Table, digits, quantity, target_text

PAGE_WIDTH = 1000
"""The width of a page in characters. No table is as wide, so that none is cut."""

_STYLES = {True: "green", False: "bold red", None: "yellow"}


def track(rounds: int, description: str) -> Iterable[int]:
    """Returns the numbers of the rounds, with a progress bar if the standard error is a terminal."""
    console = Console(stderr=True)
    return rich.progress.track(
        range(rounds), description, console=console, transient=True, disable=not console.is_terminal
    )


def show(table: Table) -> None:
    """Prints a table."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the encoding of redirected output may lack ≤ and ×
    Console(width=PAGE_WIDTH).print(render(table))


def page(table: Table) -> str:
    """Returns the text of a table."""
    text = io.StringIO()
    Console(file=text, width=PAGE_WIDTH, no_color=True, force_terminal=False).print(render(table))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def render(table: Table) -> Group:
    """Returns a table for Rich."""
    grid = RichTable("", *table.columns, "target", "", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in grid.columns:
        column.no_wrap = True
    for column in grid.columns[1 : 1 + len(table.columns)]:
        column.justify = "right"
    for row in table.rows:
        figures = [_figure(table, row, column) for column in table.columns]
        targets = "\n".join(target_text(target, row.unit) for target in row.targets)
        verdicts = Text("\n").join(_verdict_text(table.meets(row, target)) for target in row.targets)
        grid.add_row(Text(row.title), *figures, targets, verdicts)
    facts = "\n".join(f"{name}: {value}" for name, value in table.environment.items())
    notes = [f"n×: this figure over {table.columns[0]}'s. –: does not apply."]
    if (spread := table.spread()) is not None:
        notes.append(f"The middle half of a cell's samples typically spans {spread:.0%} of its median.")
    parts = [Text(table.title, "bold"), Text(facts), grid, Text("\n".join(notes)), Text(table.summary(), "bold")]
    return Group(*(Padding(part, (0, 0, 1, 0), expand=False) for part in parts[:-1]), parts[-1])


def _figure(table: Table, row: Row, column: str) -> str:
    cell, ours = table.cell(row, column), table.cell(row, table.columns[0]).median
    if cell.median is None:
        return cell.problem
    figure = quantity(cell.median, row.unit)
    if column == table.columns[0] or row.unit != "s" or not ours:
        return figure
    return f"{figure} {digits(cell.median / ours):>5}×"


def _verdict_text(verdict: bool | None) -> Text:
    return Text(VERDICTS[verdict], _STYLES[verdict])
