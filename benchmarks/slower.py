"""What is slower than in NumPy, and what the same work costs when it is written in another way.

``python benchmarks/slower.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table, and
docs/performance.md shows it. ``python benchmarks/slower.py --page`` prints the table of that page.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import harness
import machine
import tables
from harness import DEVICES, NUMPY, PROJECT, RESULTS, Case, Worker
from tables import Row, Table, quantity

TITLE = f"What is slower than in NumPy: float64 arrays over {DEVICES} logical devices of one host"
INSTEAD = "instead"
"""The column of the other ways, which are shardtensor's, too, or NumPy's on what `np.asarray` returns."""

SMALL = (
    Row("reads", "read 1000 elements: float(x[i, 0])"),
    Row("writes", "write 1000 elements: x[i, 0] = v"),
    Row("rows", "for row in x: row.sum(), 1000 rows"),
    Row("tiny", "x + y, 64 elements"),
    Row("chain", "x * 0.5 + 1, a hundred times, 64 elements"),
    Row("mask", "x[x > 0], 64 elements"),
    Row("draws", "100 draws of 10 normal numbers"),
    Row("lstsq", "least squares, 20 × 3"),
    Row("solves", "100 systems of 5 equations, one by one"),
)
CROSSING = tuple(Row(f"add {n}", f"x + y, {n}") for n in ("1 Ki", "32 Ki", "1 Mi", "16 Mi"))
LARGE = (
    Row("uniform", "uniform numbers, 4 M"),
    Row("integers", "random integers, 4 M"),
    Row("gamma", "gamma distribution, 256 Ki"),
    Row("permutation", "permutation of 256 Ki"),
    Row("argsort", "argsort, 4 M"),
    Row("cumsum", "cumsum, 4 M"),
    Row("scatter", "np.add.at(sums, groups, w), 1 M"),
    Row("groups", "[w[groups == k].mean() for k in range(20)], 1 M"),
    Row("rolling", "sliding_window_view(w, 20).mean(axis=1), 256 Ki"),
    Row("blur", "mean of 3 × 3 pixels by nine slices, 1000 × 1000"),
)
GROUPS, WINDOW = 20, 20
"""The number of groups of `scatter` and `groups`, and the number of elements in each window of `rolling`."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of rows that are read one by one, of draws, and of elements of large arrays.

    Attributes:
        crossing: the numbers of elements of the rows `CROSSING`.
        grouped: the number of elements in all groups.
        side: the number of rows and columns of the image.
    """

    rows: int = 1000
    draws: int = 100
    large: int = 1 << 22
    medium: int = 1 << 18
    crossing: tuple[int, ...] = (1 << 10, 1 << 15, 1 << 20, 1 << 24)
    grouped: int = 1 << 20
    side: int = 1000


SIZES = Sizes()


# -- the cases, each column in a process of its own ------------------------------------------------


def _operands(sizes: Sizes) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    systems = rng.normal(size=(sizes.draws, 5, 5)) + 5 * np.eye(5)
    return {
        "x": rng.normal(size=(sizes.rows, 100)),
        "t": rng.normal(size=64),
        "a": rng.normal(size=(20, 3)),
        "b": rng.normal(size=20),
        "s": systems,
        "r": rng.normal(size=(sizes.draws, 5)),
        "l": rng.normal(size=sizes.large),
        "m": rng.normal(size=sizes.medium),
        "w": rng.normal(size=sizes.grouped),
        "g": rng.permutation(np.arange(sizes.grouped) % GROUPS),
        "i": rng.normal(size=(sizes.side, sizes.side)),
        **{row.name: rng.normal(size=n) for row, n in zip(CROSSING, sizes.crossing, strict=True)},
    }


def _blurred(image: Any) -> Any:
    """Returns the mean of each pixel and its eight neighbours."""
    rows, columns = (size - 2 for size in image.shape)
    total = 0
    for i in range(3):
        for j in range(3):
            total = total + image[i : i + rows, j : j + columns]
    return total / 9


def _same(xp: Any, o: Mapping[str, Any]) -> dict[str, Case]:
    """The cases that shardtensor and NumPy run from the same source code."""
    x, t = o["x"], o["t"]

    def writes() -> Any:
        for i in range(len(x)):
            x[i, 0] = i
        return x

    def chain() -> Any:
        y = t
        for _ in range(100):
            y = y * 0.5 + 1
        return y

    def scatter() -> Any:
        sums = xp.zeros_like(o["w"][:GROUPS])
        xp.add.at(sums, o["g"], o["w"])
        return sums

    return {
        "scatter": scatter,
        "groups": lambda: [float(o["w"][o["g"] == k].mean()) for k in range(GROUPS)],
        "rolling": lambda: xp.lib.stride_tricks.sliding_window_view(o["m"], WINDOW).mean(axis=1),
        "blur": lambda: _blurred(o["i"]),
        "reads": lambda: [float(x[i, 0]) for i in range(len(x))],
        "writes": writes,
        "rows": lambda: [float(row.sum()) for row in x],
        "tiny": lambda: t + t,
        "chain": chain,
        "mask": lambda: t[t > 0],
        "lstsq": lambda: xp.linalg.lstsq(o["a"], o["b"])[0],
        "solves": lambda: [xp.linalg.solve(s, r) for s, r in zip(o["s"], o["r"], strict=True)],
        "argsort": lambda: xp.argsort(o["l"]),
        "cumsum": lambda: xp.cumsum(o["l"]),
        **{row.name: lambda x=o[row.name]: x + x for row in CROSSING},
    }


def shardtensor_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of shardtensor, eager, on the numpy backend. Operands are split by their first dimension."""
    import numpy as np

    import shardtensor as st

    draw, key = st.random, st.random.key(0)
    operands = {name: st.asarray(x) for name, x in _operands(sizes).items()}
    operands |= {name: [st.asarray(m) for m in np.asarray(operands[name])] for name in "sr"}
    return _same(np, operands) | {
        "draws": lambda: [draw.normal(draw.fold_in(key, i), (10,)) for i in range(sizes.draws)],
        "uniform": lambda: draw.uniform(key, (sizes.large,)),
        "integers": lambda: draw.integers(key, 0, 1000, (sizes.large,)),
        "gamma": lambda: draw.gamma(key, 2.5, (sizes.medium,)),
        "permutation": lambda: draw.permutation(key, sizes.medium),
    }


def numpy_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the cases of NumPy."""
    import numpy as np

    draw = np.random.default_rng(0)
    return _same(np, _operands(sizes)) | {
        "draws": lambda: [draw.normal(size=10) for _ in range(sizes.draws)],
        "uniform": lambda: draw.random(sizes.large),
        "integers": lambda: draw.integers(0, 1000, sizes.large),
        "gamma": lambda: draw.gamma(2.5, size=sizes.medium),
        "permutation": lambda: draw.permutation(sizes.medium),
    }


INSTEAD_TEXTS = {
    "reads": "`np.asarray(x)` once, then read from it",
    "writes": "one write: `x[:, 0] = values`",
    "rows": "one call: `x.sum(axis=1)`",
    "tiny": "keep small arrays in NumPy",
    "chain": "`st.jit`",
    "mask": "`st.where(x > 0, x, 0)`, of which the shape is known",
    "draws": "one draw of shape (100, 10)",
    "lstsq": "NumPy's function of `np.asarray(x)`",
    "solves": "one call for the stack of systems",
    "uniform": '`dtype="float32"`',
    "integers": "NumPy's generator: `st.asarray(array, copy=False)`",
    "gamma": "NumPy's generator: `st.asarray(array, copy=False)`",
    "permutation": "NumPy's generator: `st.asarray(array, copy=False)`",
    "argsort": "`st.sort`, if the values are enough",
    "cumsum": "",  # no other way
    "scatter": "`np.bincount(groups, weights=w)`",
    "groups": "two calls of `np.bincount`: sums and counts",
    "rolling": "differences of `np.cumsum(w)`",
    "blur": "`st.jit`",
}
"""What to write instead of each case, for the page."""


def instead_cases(sizes: Sizes = SIZES) -> dict[str, Case]:
    """Returns the other ways: where nothing else is faster, there is no case."""
    import numpy as np

    import shardtensor as st

    key, draw = st.random.key(0), np.random.default_rng(0)
    host = _operands(sizes)
    o = {name: st.asarray(x) for name, x in host.items()}
    x, t, plain = o["x"], o["t"], host["t"]

    def reads() -> Any:
        whole = np.asarray(x)
        return [float(whole[i, 0]) for i in range(len(whole))]

    def writes() -> Any:
        x[:, 0] = np.arange(float(len(x)))
        return x

    @st.jit
    def chain(y: Any) -> Any:
        for _ in range(100):
            y = y * 0.5 + 1
        return y

    def rolling() -> Any:
        sums = np.cumsum(o["m"])
        means = sums[WINDOW - 1 :].copy()
        means[1:] -= sums[:-WINDOW]
        return means / WINDOW

    blurred, w, g = st.jit(_blurred), o["w"], o["g"]
    return {
        "scatter": lambda: np.bincount(g, weights=w),
        "groups": lambda: np.bincount(g, weights=w) / np.bincount(g),
        "rolling": rolling,
        "blur": lambda: blurred(o["i"]),
        "reads": reads,
        "writes": writes,
        "rows": lambda: x.sum(axis=1),
        "tiny": lambda: plain + plain,
        "chain": lambda: chain(t),
        "mask": lambda: st.where(t > 0, t, 0),
        "draws": lambda: st.random.normal(key, (sizes.draws, 10)),
        "lstsq": lambda: np.linalg.lstsq(np.asarray(o["a"]), np.asarray(o["b"]))[0],
        "solves": lambda: np.linalg.solve(o["s"], o["r"][..., None])[..., 0],
        "uniform": lambda: st.random.uniform(key, (sizes.large,), dtype="float32"),
        "integers": lambda: st.asarray(draw.integers(0, 1000, sizes.large), copy=False),
        "gamma": lambda: st.asarray(draw.gamma(2.5, size=sizes.medium), copy=False),
        "permutation": lambda: st.asarray(draw.permutation(sizes.medium), copy=False),
        "argsort": lambda: st.sort(o["l"]),
    }


# -- the run ---------------------------------------------------------------------------------------


def start_workers() -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts the worker of each column; a context manager that ends them."""
    environment = harness.logical_devices(DEVICES)
    return harness.start_workers(
        {
            PROJECT: ("shardtensor", "slower:shardtensor_cases", environment),
            NUMPY: ("numpy", "slower:numpy_cases", {}),
            INSTEAD: ("shardtensor", "slower:instead_cases", environment),
        },
        harness.WARM_UP,
    )


@dataclass(frozen=True)
class Effort:
    """The number of rounds for each kind of row."""

    small: int = 25
    large: int = 7


QUICK = Effort(small=3, large=2)


def measure(effort: Effort) -> Table:
    """Measures the whole table."""
    with start_workers() as workers:
        return measure_with(effort, workers)


def measure_with(effort: Effort, workers: Mapping[str, Any]) -> Table:
    """Measures the whole table with these workers."""
    environment = machine.describe_environment(("numpy", "shardtensor")) | {
        "BLAS": machine.blas_kernel(),
        "rounds": f"small calls {effort.small}, large arrays {effort.large}",
    }
    groups = (SMALL, effort.small, "small calls"), ((*CROSSING, *LARGE), effort.large, "large arrays")
    cells: tables.Cells = {}
    for rows, rounds, description in groups:
        cells |= harness.sample_cases([row.name for row in rows], workers, rounds, description)
    return Table(TITLE, environment, tuple(workers), (*SMALL, *CROSSING, *LARGE), cells, (INSTEAD,))


def page_tables(found: Mapping[str, Any]) -> list[str]:
    """Returns the tables of docs/performance.md, from the JSON of a run: of small calls, sizes, and large arrays."""
    rows = {row["name"]: row for row in found["rows"]}
    pages = []
    for group in (SMALL, CROSSING, LARGE):
        others = any(row.name in INSTEAD_TEXTS for row in group)
        more = (" instead | then, × NumPy |", "---|--:|") if others else ("", "")
        lines = [f"| | NumPy | here, × NumPy |{more[0]}", f"|---|--:|--:|{more[1]}"]
        for row in group:
            cells = rows[row.name]["cells"]
            mine, numpys, other = (cells[column].get("median") for column in (PROJECT, NUMPY, INSTEAD))
            line = f"| {_code(row.title)} | {quantity(numpys, 's')} | {_ratio(mine / numpys)} |"
            if others:
                line += f" {INSTEAD_TEXTS[row.name]} | {_ratio(other / numpys) if other else ''} |"
            lines.append(line)
        pages.append("\n".join(lines))
    return pages


def _ratio(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}" if number >= 0.1 else f"{number:.2f}"


def _code(title: str) -> str:
    """Returns a title with its expression in code quotes: what is left or right of a description."""
    for text in (
        "float(x[i, 0])", "x[i, 0] = v", "for row in x: row.sum()", "x + y", "x * 0.5 + 1", "x[x > 0]",
        "np.add.at(sums, groups, w)", "[w[groups == k].mean() for k in range(20)]",
        "sliding_window_view(w, 20).mean(axis=1)",
    ):  # fmt: skip
        title = title.replace(text, f"`{text}`")
    return title


if __name__ == "__main__":
    if "--page" in sys.argv:
        print(*page_tables(json.loads((RESULTS / "slower.json").read_text("utf-8"))), sep="\n\n")
    else:
        harness.run("slower", "What is slower than in NumPy.", measure, Effort(), QUICK)
