"""Generates the page `docs/gpu_calls.md`: the numbers of CUDA operations in one call of each function.

    python -m tests.gpu_table --counter MODULE --gpus VARIABLE

writes the page. The module is imported before CuPy and makes CuPy count operations; no GPU is needed. Its function
``count()`` returns a context manager whose value has, on exit, the numbers of ``launches``, ``copies``, ``events``
(recorded) and ``waits`` (synchronizations of the host). The environment variable holds the number of GPUs. Where the
counted operations do not compute, the numbers that the host reads have to be 1, so that every call can go on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tests.numpy_calls import FFT, LINALG, MAIN, METHODS, Call, Operands

PAGE = Path(__file__).parents[1] / "docs" / "gpu_calls.md"

SETTINGS = {"1 × 1": (1, 1), "1 × 8": (1, 8), "2 × 4": (2, 8)}
"""The numbers of GPUs and of devices, by title: GPUs × logical devices on each of them."""

COUNTED = ("launches", "copies", "events", "waits")

BARE = "CuPy"

Key: TypeAlias = tuple[str, str]
"""The title of a chapter of the page, and the name of a call."""

Found: TypeAlias = dict[str, dict[str, dict[str, list[int] | str]]]
"""By setting, chapter and call: the counts in the order of `COUNTED`, or the name of the error that the call raised."""


def _st() -> Any:
    return importlib.import_module("shardtensor")


def _columns(x: Any) -> Any:
    return _st().reshard(x, x.sharding.with_spec(_st().P(None, *x.sharding.spec)))


def _item(o: Any) -> None:
    o.y[o.y > 0] = 0


def _increment(o: Any) -> None:
    o.y += 1


def _row(o: Any) -> None:
    o.y[3] = 0


def _part(o: Any) -> None:
    o.y[2:9] = o.x[2:9]


def _slots(o: Any) -> None:
    o.y[[1, 5]] = 0


OPERATORS: dict[str, Call] = {
    "x + 1": lambda o: o.x + 1,
    "x @ x.T": lambda o: o.x @ o.x.T,
    "x.T @ x": lambda o: o.x.T @ o.x,
    "x.sum()": lambda o: o.x.sum(),
    "x.sum(axis=1)": lambda o: o.x.sum(axis=1),
    "n.sum()": lambda o: o.n.sum(),
    "x.max()": lambda o: o.x.max(),
    "x.argmax()": lambda o: o.x.argmax(),
    "float(x.sum())": lambda o: float(o.x.sum()),
    "x += 1": _increment,
    "x[x > 0] = 0": _item,
    "x[3] = 0": _row,
    "x[2:9] = y[2:9]": _part,
    "x[[1, 5]] = 0": _slots,
    "x[1:]": lambda o: o.x[1:],
    "x[1:] - x[:-1]": lambda o: o.x[1:] - o.x[:-1],
    "x[[1, 5]]": lambda o: o.x[[1, 5]],
    "x[k]": lambda o: o.x[o.k],
    "x[x > 0]": lambda o: o.x[o.x > 0],
    "float(x[3, 2])": lambda o: float(o.x[3, 2]),
}
"""Operators and indexing; x and y are (384, 6) of float64, n integers, k an array of 384 rows."""

OWN: dict[str, Call] = {
    "reshard(x, P(None, 'd'))": lambda o: _columns(o.x),
    "shard(x)": lambda o: _st().shard(o.x),
    "pmap(a + 1)": lambda o: _st().pmap(lambda a: a + 1, o.shards),
    "pmap(psum(a))": lambda o: _st().pmap(lambda a: _st().psum(a, "i"), o.shards, axis_name="i"),
    "pmap(all_gather(a))": lambda o: _st().pmap(lambda a: _st().all_gather(a, "i"), o.shards, axis_name="i"),
}
"""Functions of shardtensor that have no counterpart in CuPy."""

METHOD_NAMES = (
    "all any argmax argmin astype clip compress conj copy cumprod cumsum diagonal dot flatten item max mean min nonzero "
    "prod ravel repeat reshape round squeeze std sum take trace transpose var argsort searchsorted"
)

CHAPTERS: dict[str, dict[str, Call]] = {
    "Operators, indexing and writes": OPERATORS,
    "Maps and layouts": OWN,
    "Functions": MAIN,
    "Methods": {name: METHODS[name] for name in METHOD_NAMES.split()},
    "Linear algebra": LINALG,
    "Fourier transforms": FFT,
}


class Shards(Operands):
    """Operands that are placed once, and the shards of ``x``."""

    def __getattr__(self, name: str) -> Any:
        return self.used[name] if name in self.used else super().__getattr__(name)

    @property
    def shards(self) -> Any:
        """The shards of ``x``; the same list each time."""
        if "shards" not in self.used:
            self.used["shards"] = _st().shard(self.x)
        return self.used["shards"]


def measured(call: Call, place: Callable[[Any], Any], count: Callable[[], Any]) -> list[int] | str:
    """Returns the counts of a call in the order of `COUNTED`, or the name of the error that it raises.

    The second of two calls is counted: the first one compiles kernels and fills the memory pool.
    """
    operands = Shards(place)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            call(operands)
            with count() as counted:
                call(operands)
        except Exception as error:
            return type(error).__name__
    return [getattr(counted, name) for name in COUNTED]


def measure(setting: str, count: Callable[[], Any]) -> dict[str, dict[str, list[int] | str]]:
    """Measures every call on the devices of a setting, or on bare CuPy."""
    if setting == BARE:
        place: Callable[[Any], Any] = importlib.import_module("cupy").asarray
    else:
        st = _st()
        mesh = st.Mesh(st.devices("cupy"), "d")
        assert mesh.size == SETTINGS[setting][1]

        def place(x: Any) -> Any:
            return st.device_put(x, st.NamedSharding(mesh, st.P("d")))

    return {
        title: {name: measured(call, place, count) for name, call in calls.items()} for title, calls in CHAPTERS.items()
    }


def _cells(title: str, name: str, found: Found) -> str:
    """Returns the text of a row's columns; nothing if no setting has a number."""
    bare, *rest = [found[setting][title][name] for setting in (BARE, *SETTINGS)]
    if all(isinstance(counts, str) for counts in rest):
        return ""
    first = "–" if isinstance(bare, str) else f"{bare[0]} / {bare[3]}"
    return " | ".join([first, *[c if isinstance(c, str) else " / ".join(map(str, c)) for c in rest]])


def page(found: Found) -> str:
    """Returns the text of the page for the counts of all settings."""
    parts, missing = [_INTRODUCTION], []
    for title, calls in CHAPTERS.items():
        columns = (BARE, *SETTINGS)
        parts.append(f"\n## {title}\n\n| calls | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}")
        rows: dict[str, list[str]] = {}
        for name in calls:
            rows.setdefault(_cells(title, name, found), []).append(f"`{name}`")
        missing += rows.pop("", [])
        parts += [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    words = textwrap.fill(", ".join(missing), 118)
    parts.append(f"\n## Not counted\n\nThese raise an error here, or need a library that was not there:\n\n{words}")
    return "\n".join(parts) + "\n"


def waits_of(text: str) -> dict[Key, list[int | None]]:
    """Returns the host synchronizations of each call on a page: with bare CuPy, then by setting; None if unknown."""
    waits: dict[Key, list[int | None]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| `"):
            names, *cells = line.strip("| ").split(" | ")
            row = [int(cell.split(" / ")[-1]) if " / " in cell else None for cell in cells]
            waits |= {(title, name): row for name in re.findall("`(.*?)`", names)}
    return waits


_INTRODUCTION = f"""\
# GPU: kernels and copies of each function

The numbers of one call of each function, counted on CuPy 14 without a GPU: the C libraries beneath it are replaced by ones
that do nothing but count. They are exact for these operands, which are split by their first dimension; they say nothing
about time on a GPU.

Each cell has **{" / ".join(COUNTED[:-1])} / synchronizations**: kernels and calls of CUDA's libraries; copies between devices and to the host;
events recorded; and synchronizations, in which the host waits for a GPU. The column {BARE} has the launches and the synchronizations of
the same call with arrays of bare CuPy. The other columns are GPUs × logical devices of each.

Where the operands have several devices on one GPU, they are one buffer of it: most calls are then the launches of one
device. The host synchronizes where it does with bare CuPy: where the shape of a result depends on values, and where a
value is read.

`python -m tests.gpu_table` writes this page; a test compares the synchronizations with those of a simulated
CuPy."""


def main() -> None:
    """Measures all settings, each in a process of its own, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counter", required=True, help="the module that makes CuPy count")
    parser.add_argument("--gpus", required=True, help="the environment variable with the number of GPUs")
    parser.add_argument("--setting", choices=[BARE, *SETTINGS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.setting:
        count = importlib.import_module(given.counter).count
        print(json.dumps(measure(given.setting, count)))
        return
    found = {}
    for setting in (BARE, *SETTINGS):
        gpus, devices = SETTINGS.get(setting, (1, 1))
        environment = os.environ | {given.gpus: str(gpus), "SHARDTENSOR_NUM_DEVICES": str(devices)}
        arguments = [sys.executable, "-m", "tests.gpu_table", *sys.argv[1:], "--setting", setting]
        made = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        found[setting] = json.loads(made.stdout.splitlines()[-1])
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
