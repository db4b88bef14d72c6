"""What runs on a GPU: overhead, overlap, bandwidth, transfers and memory, beside bare CuPy, PyTorch and JAX.

``python benchmarks/gpu.py [--logical 1,2,8] [--quick] [--out DIR] [--label LABEL]``; docs/gpus.md says how to read it.

`CuPy` in the table is the same work by CuPy alone, which no library on top of it can undercut.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import harness
from gpu_cases import FULL, MIB, ONCE, Sizes
from harness import PROJECT, RESULTS, NoFigure, Row, Table, Target, Worker

TITLE = "On a GPU: {} logical devices, float32 where nothing else is said; moves of {}, matrices of {}²"
CUPY, TORCH, JAX = "CuPy", "PyTorch", "JAX"


# -- the rows --------------------------------------------------------------------------------------


def rows_of(logical: Sequence[int], sizes: Sizes = FULL) -> tuple[Row, ...]:
    """The lines of the table, for these numbers of logical devices."""
    ends, rows = sorted({min(logical), max(logical)}), []
    for n in logical:
        rows.append(Row(f"dispatch@{n}", f"x + y, tiny, on {n}", (Target(1, CUPY, 15e-6) if n == 1 else _near(1.2),)))
    rows.append(Row("jitted@1", "the same, compiled"))
    rows += [Row(f"spin@{n}", f"a long kernel, on {n}", (_near(1.2),)) for n in logical]
    for b in sizes.arrays:
        rows += [Row(f"add{b}@{n}", f"x + y, {_size(b)}, on {n}", (_near(1.11),)) for n in ends]
        rows += [Row(f"sum{b}@{n}", f"x.sum(), {_size(b)}, on {n}", (_near(1.11),)) for n in ends]
    for dtype in ("float32", "float16"):
        rows += [Row(f"matmul{dtype}@{n}", f"a @ b, {dtype}, on {n}", (_near(1.05),)) for n in ends]
    rows += [
        Row("copy", "to another device", (_near(1.11),)),
        Row("peer", "to another GPU", (_near(1.11),)),
        Row("offload", "to pinned_host", (_near(1.11),)),
        Row("onload", "from pinned_host", (_near(1.11),)),
        Row("beside", "to it, beside a @ b", (_near(1.11),)),
        Row(f"reshard@{ends[-1]}", f"rows → columns, on {ends[-1]}"),
        Row("used", "growth, in use", (Target(1),), "MiB"),
        Row("total", "growth of the pool", (Target(1),), "MiB"),
    ]
    return tuple(rows)


def _near(times: float) -> Target:
    """At most so many times what bare CuPy takes: 1.11 is nine tenths of its rate."""
    return Target(times, CUPY)


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB"


# -- the run ---------------------------------------------------------------------------------------


class Measurer(Protocol):
    """A `Worker`, or what stands in for one in a test."""

    def call(self, case: str, limit: float = ...) -> Any:
        """What a case gives."""


def asked(worker: Measurer, name: str, limit: float = harness.ANSWER_LIMIT) -> Any:
    """What a case gives; its traceback is shown where it fails.

    Raises:
        NoFigure: it gives nothing.
    """
    found = worker.call(name, limit)
    if isinstance(found, str):
        print(found, file=sys.stderr)
        raise NoFigure("failed")
    return found


@dataclass(frozen=True)
class Effort:
    """How many rounds there are."""

    rounds: int = 25


QUICK = Effort(3)


def gpu_workers(logical: Sequence[int]) -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts, for each column, a worker with the cases of a library."""
    shared = {"BENCHMARK_LOGICAL": ",".join(map(str, logical)), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return harness.started(
        {
            PROJECT: (
                "shardtensor",
                "gpu_cases:shardtensor_cases",
                shared | harness.logical_devices(max(logical), "cupy"),
            ),
            CUPY: ("cupy", "gpu_cases:cupy_cases", shared),
            TORCH: ("torch", "gpu_cases:torch_cases", shared),
            JAX: ("jax", "gpu_cases:jax_cases", shared),
        }
    )


def measure(
    effort: Effort, logical: Sequence[int], workers: Mapping[str, Measurer], sizes: Sizes = FULL
) -> harness.Table:
    """Measures everything once through."""
    rows = rows_of(logical, sizes)
    ours = workers[PROJECT]
    environment = harness.describe_environment(("shardtensor", "numpy", "torch", "jax")) | {
        **asked(ours, "machine"),
        "rounds": f"{effort.rounds}, growth 1",
    }
    samplers = {
        (row.name, column): functools.partial(asked, worker, row.name)
        for row in rows
        for column, worker in workers.items()
        if row.name not in ONCE
    }
    cells = harness.interleave(samplers, effort.rounds, "on the GPU")
    try:
        cells |= {(name, PROJECT): harness.Cell((mib,)) for name, mib in asked(ours, "growth", 600).items()}
    except NoFigure as reason:
        cells |= {(name, PROJECT): harness.Cell(problem=str(reason)) for name in ONCE}
    return Table(_title(logical, sizes), environment, tuple(workers), rows, cells)


def _title(logical: Sequence[int], sizes: Sizes) -> str:
    return TITLE.format(" or ".join(map(str, logical)), _size(sizes.moved), sizes.side)


def numbers(text: str) -> tuple[int, ...]:
    """What ``--logical`` names: numbers of devices, in order."""
    found = sorted({int(n) for n in text.split(",")})
    if found[0] < 1:
        raise ValueError(text)
    return tuple(found)


def main(argv: Sequence[str] | None = None) -> None:
    """The program: measures where there is a GPU, and says so where there is none."""
    parser = argparse.ArgumentParser(description="What runs on a GPU.")
    parser.add_argument("--logical", type=numbers, default=(1, 2, 8), metavar="N,N", help="how many logical devices")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs, not to quote")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the results go")
    parser.add_argument("--label", metavar="LABEL", help="saved as gpu-LABEL: what kind of machine, not which one")
    options = parser.parse_args(argv)
    from shardtensor_cupy.discovery import usable_cupy

    from shardtensor.errors import BackendError

    try:
        usable_cupy()
    except BackendError as error:
        sys.exit(f"gpu.py: nothing to measure here: {error}")
    try:
        with gpu_workers(options.logical) as workers:
            table = measure(QUICK if options.quick else Effort(), options.logical, workers)
    except NoFigure as reason:
        sys.exit(f"gpu.py: {PROJECT} on the GPU: {reason}")
    harness.report(table, options.out, f"gpu-{options.label}" if options.label else "gpu")


if __name__ == "__main__":
    main()
