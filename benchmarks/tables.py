"""The tables of the benchmarks: figures, rows with their targets, and what of them is saved."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

NOT_APPLICABLE = "–"


@dataclass(frozen=True)
class Cell:
    """The measurement for one row and one column.

    Attributes:
        samples: the measured values, in seconds or in the unit of the row; empty if nothing could be measured.
        problem: the reason why there are no samples.
    """

    samples: tuple[float, ...] = ()
    problem: str = NOT_APPLICABLE

    @property
    def median(self) -> float | None:
        """The median of the samples, which the table shows; None without samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The first and third quartile of the samples; None for fewer than four samples."""
        if len(self.samples) < 4:
            return None
        low, _, high = statistics.quantiles(self.samples, method="inclusive")
        return low, high


Cells: TypeAlias = dict[tuple[str, str], Cell]
"""Cells by the names of their row and column."""


@dataclass(frozen=True)
class Best:
    """The smallest figure of a row in several columns; columns without a figure are ignored."""

    title: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True)
class Target:
    """An upper limit for shardtensor's figure.

    Attributes:
        at_most: the limit in the unit of the row, or, if ``of`` is given, a factor.
        of: the column, or the best of several columns, whose figure times ``at_most`` is the limit.
        more: seconds added to the limit.
    """

    at_most: float
    of: str | Best | None = None
    more: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: the name of the case.
        title: the text in the table.
        targets: the limits for shardtensor's figure.
        unit: the unit of the figures: ``"s"``, which is scaled for printing, or another one, which is not.
    """

    name: str
    title: str
    targets: tuple[Target, ...] = ()
    unit: str = "s"


@dataclass(frozen=True)
class Table:
    """All measurements of one run.

    Attributes:
        title: the headline.
        environment: the facts on which the figures depend, by name.
        columns: the columns; the first one is shardtensor's, with which the others are compared.
        rows: the lines of the table.
        cells: the measurements; a missing cell does not apply.
        references: the columns that are no other library: limits of the machine, and other ways of shardtensor.
    """

    title: str
    environment: Mapping[str, str]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    cells: Cells
    references: tuple[str, ...] = ()

    @property
    def peers(self) -> tuple[str, ...]:
        """The columns of other libraries."""
        return tuple([column for column in self.columns[1:] if column not in self.references])

    def with_earlier(self, column: str) -> Table:
        """Returns the table with the column of an earlier shardtensor after the first; unchanged if it has no cells."""
        if not any(measured == column for _, measured in self.cells):
            return self
        ours, *others = [title for title in self.columns if title != column]
        columns = (ours, column, *others)
        return dataclasses.replace(self, columns=columns, references=(*self.references, column))

    def cell(self, row: Row, column: str) -> Cell:
        """Returns the measurement of a row and a column."""
        return self.cells.get((row.name, column), Cell())

    def least(self, row: Row, columns: Iterable[str]) -> tuple[float, str] | None:
        """Returns the smallest figure of a row in some columns, and its column; None if none has a figure."""
        figures = [(median, column) for column in columns if (median := self.cell(row, column).median) is not None]
        return min(figures, default=None)

    def limit(self, row: Row, target: Target) -> float | None:
        """Returns the limit that a target is for shardtensor's figure; None if no figure that it refers to exists."""
        if target.of is None:
            return target.at_most
        best = self.least(row, target.of.columns if isinstance(target.of, Best) else (target.of,))
        return None if best is None else target.at_most * best[0] + target.more

    def meets(self, row: Row, target: Target) -> bool | None:
        """Whether shardtensor's figure meets a target; None if a figure that is needed to decide it is missing."""
        figure, limit = self.cell(row, self.columns[0]).median, self.limit(row, target)
        return None if figure is None or limit is None else figure <= limit

    def verdicts(self) -> list[bool | None]:
        """Returns `meets` for each target of each row."""
        return [self.meets(row, target) for row in self.rows for target in row.targets]

    def summary(self) -> str:
        """Returns a sentence with the numbers of targets that are met, missed and not checked."""
        verdicts = self.verdicts()
        if not verdicts:
            return "No targets."
        counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in VERDICTS.items()]
        return f"{len(verdicts)} targets: {', '.join(counts)}."

    def spread(self) -> float | None:
        """Returns the typical spread of the samples of a cell; None if no cell has enough of them.

        It is the interquartile range divided by the median, of which the median over all cells is taken.
        """
        cells = [cell for cell in self.cells.values() if cell.quartiles and cell.median]
        shares = [(cell.quartiles[1] - cell.quartiles[0]) / cell.median for cell in cells]
        return statistics.median(shares) if shares else None

    def as_json(self) -> dict[str, Any]:
        """Returns all figures and their quartiles, in seconds or the unit of the row, for JSON."""
        return {
            "title": self.title,
            "environment": dict(self.environment),
            "columns": self.columns,
            "peers": self.peers,
            "rows": [
                {
                    "name": row.name,
                    "title": row.title,
                    "unit": row.unit,
                    "cells": {column: _cell_json(self.cell(row, column)) for column in self.columns},
                    "targets": [
                        {"target": target_text(t, row.unit), "limit": self.limit(row, t), "met": self.meets(row, t)}
                        for t in row.targets
                    ],
                }
                for row in self.rows
            ],
            "spread": self.spread(),
            "summary": self.summary(),
        }


VERDICTS = {True: "met", False: "missed", None: "not checked"}


def _cell_json(cell: Cell) -> dict[str, Any]:
    if cell.median is None:
        return {"problem": cell.problem}
    return {"median": cell.median, "quartiles": cell.quartiles, "samples": len(cell.samples)}


def target_text(target: Target, unit: str) -> str:
    """Returns the text of a target for a row with figures of this unit."""
    if not target.of:
        return "≤ {:g} {}".format(*_scaled(target.at_most, unit))
    more = " + {:g} {}".format(*_scaled(target.more, unit)) if target.more else ""
    return f"≤ {target.at_most:g} × {target.of}{more}"


def quantity(value: float, unit: str) -> str:
    """Returns a value with three digits and a unit of suitable size."""
    number, unit = _scaled(value, unit)
    return f"{digits(number)} {unit}"


def _scaled(value: float, unit: str) -> tuple[float, str]:
    if unit != "s":
        return value, unit
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if value >= scale:
            return value / scale, name
    return value / 1e-12, "ps"


def digits(number: float) -> str:
    """Returns a number rounded to three digits (99.95 to 100), never with an exponent."""
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"
