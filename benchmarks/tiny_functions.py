"""The cost of each function of NumPy on tiny arrays, beyond NumPy's own time.

``python benchmarks/tiny_functions.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import machine
from harness import DEVICES, NUMPY, PROJECT, Case
from tables import Cell, Row, Table, Target

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the calls, which the tests share; tests are not installed

from tests.numpy_calls import FFT, LINALG, MAIN, NO_ARRAYS, Operands

MORE = 20e-6
"""The seconds over NumPy's time from which a function is in the table."""

TITLE = (
    f"Functions of NumPy on arrays of 16 rows over {DEVICES} logical devices: those that take {MORE * 1e6:g} µs more "
    "than NumPy's"
)
COUNT = Row("count", f"functions that take {MORE * 1e6:g} µs more", (Target(10),), "functions")
"""The row of the number of the others."""

CALLS = {
    f"{module}{name}": call
    for module, calls in (("", MAIN), ("linalg.", LINALG), ("fft.", FFT))
    for name, call in calls.items()
    if name not in NO_ARRAYS
}


# -- the cases, each function in a process of its own ----------------------------------------------


def shardtensor_cases() -> dict[str, Case]:
    """Returns the cases of shardtensor, eager, on the numpy backend. Operands are split by their first dimension."""
    import shardtensor as st

    split = st.NamedSharding(st.make_mesh((DEVICES,), ("d",)), st.P("d"))
    return _cases(lambda x: st.device_put(x, split))


def numpy_cases() -> dict[str, Case]:
    """Returns the cases of NumPy."""
    return _cases(lambda x: x)


def _cases(place: Callable[[Any], Any]) -> dict[str, Case]:
    warnings.simplefilter("ignore")
    operands = Operands(rows=16, columns=6)
    placed = type("Placed", (), {name: place(x) for name, x in operands._arrays.items()})
    cases = {name: functools.partial(call, placed) for name, call in CALLS.items()}
    return {name: case for name, case in cases.items() if _is_accepted(case)}


def _is_accepted(case: Case) -> bool:
    try:
        case()
    except (AttributeError, TypeError, ValueError):  # shardtensor rejects it: docs/numpy_functions.md gives the reason
        return False
    return True


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """The number of rounds."""

    rounds: int = 15


QUICK = Effort(rounds=1)


def measure(effort: Effort) -> Table:
    """Measures the whole table."""
    columns: dict[str, harness.Library] = {
        PROJECT: ("shardtensor", "tiny_functions:shardtensor_cases", harness.logical_devices(DEVICES)),
        NUMPY: ("numpy", "tiny_functions:numpy_cases", {}),
    }
    with harness.start_workers(columns) as workers:
        return measure_with(effort, workers)


def measure_with(effort: Effort, workers: Mapping[str, Any]) -> Table:
    """Measures all functions with these workers and returns the table of those that take `MORE` seconds more."""
    cells = harness.sample_cases(CALLS, workers, effort.rounds, "functions")
    table = Table(TITLE, {}, tuple(workers), tuple([Row(name, name) for name in CALLS]), cells)
    overheads = {row: _overhead(table, row) for row in table.rows}
    measured = [row for row, seconds in overheads.items() if seconds is not None]
    slow = sorted([row for row in measured if overheads[row] > MORE], key=lambda row: -overheads[row])
    environment = machine.describe_environment(("numpy", "shardtensor")) | {
        "rounds": str(effort.rounds),
        "functions": f"{len(measured)} measured",
    }
    cells[COUNT.name, PROJECT] = Cell((float(len(slow)),))
    return dataclasses.replace(table, environment=environment, rows=(COUNT, *slow))


def _overhead(table: Table, row: Row) -> Any:
    """Returns the seconds by which a call takes longer than NumPy's; None if either has no figure."""
    ours, numpys = table.cell(row, PROJECT).median, table.cell(row, NUMPY).median
    return None if ours is None or numpys is None else ours - numpys


if __name__ == "__main__":
    harness.run("tiny_functions", "The cost of functions of NumPy on tiny arrays.", measure, Effort(), QUICK)
