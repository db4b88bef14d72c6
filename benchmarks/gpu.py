"""Operators on a GPU: overhead, overlap, bandwidth, transfers and memory, compared with bare CuPy, PyTorch and JAX.

``python benchmarks/gpu.py [--logical 1,2,8] [--quick] [--rounds N] [--out DIR] [--label LABEL]``; docs/gpus.md says how
to read it.

The column `CuPy` is the same work with CuPy only. The column `copy` is the physical limit: the time in which the GPU's
own copy of memory reads and writes as many bytes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import harness
import machine
import tables
from gpu_cases import FULL, MIB, ONCE, Sizes
from harness import PROJECT, NotMeasured, Worker
from tables import Row, Table, Target

TITLE = "On a GPU: {} logical devices, float32 unless a dtype is given; transfers of {}, matrices of {}²"
CUPY, TORCH, JAX, COPY = "CuPy", "PyTorch", "JAX", "copy"


# -- the rows --------------------------------------------------------------------------------------


def make_rows(logical: Sequence[int], sizes: Sizes = FULL) -> tuple[Row, ...]:
    """Returns the rows of the table for these numbers of logical devices."""
    ends, rows = sorted({min(logical), max(logical)}), []
    for n in logical:
        rows.append(Row(f"dispatch@{n}", f"x + y, tiny, on {n}", (_near(1.2),)))
    rows.append(Row("jitted@1", "the same, compiled"))
    rows += [Row(f"spin@{n}", f"a long kernel, on {n}", (_near(1.2),)) for n in logical]
    for b in sizes.arrays:
        rows += [Row(f"add{b}@{n}", f"x + y, {_size(b)}, on {n}", (_near(1.05), BANDWIDTH)) for n in ends]
        rows += [Row(f"sum{b}@{n}", f"x.sum(), {_size(b)}, on {n}", (_near(1.05), BANDWIDTH)) for n in ends]
    for dtype in ("float32", "float16"):
        rows += [Row(f"matmul{dtype}@{n}", f"a @ b, {dtype}, on {n}", (_near(1.05),)) for n in ends]
    rows += [Row("matmultf32@1", "a @ b, TF32"), Row("matmulbfloat16@1", "a @ b, bfloat16")]
    for n in ends:
        for b in sizes.arrays[:1]:
            rows += [
                Row(f"sort{b}@{n}", f"sort, {_size(b)}, on {n}", (_near(1.05),) if n == 1 else ()),
                Row(f"random{b}@{n}", f"uniform numbers, {_size(b)}, on {n}"),
                Row(f"fft{b}@{n}", f"FFT of rows, {_size(b)}, on {n}", (_near(1.05),)),
                Row(f"fused{b}@{n}", f"ten functions, compiled, {_size(b)}, on {n}", (Target(1.05, JAX), BANDWIDTH)),
            ]
        rows += [
            Row(f"chain@{n}", f"three pmaps of a + 1, tiny, on {n}"),
            Row(f"psum@{n}", f"psum in pmap, tiny, on {n}"),
            Row(f"train@{n}", f"a training step, compiled, on {n}", (Target(1.05, JAX),) if n == 1 else ()),
            Row(f"trainsingly@{n}", f"the same without CUDA graphs, on {n}"),
            Row(f"views@{n}", f"six kernels with views between, tiny, compiled, on {n}"),
            Row(f"viewssingly@{n}", f"the same without CUDA graphs, on {n}"),
        ]
    rows += [
        Row("upload", "from pageable host memory", (_near(1.05),)),
        Row("download", "x + 0 to pageable host memory", (_near(1.05),)),
        Row("copy", "to another device", (_near(1.05),)),
        Row("peer", "to another GPU", (_near(1.05),)),
        Row("offload", "to pinned_host", (_near(1.05),)),
        Row("onload", "from pinned_host", (_near(1.05),)),
        Row("beside", "to pinned_host during a @ b", (_near(1.05),)),
        Row(f"reshard@{ends[-1]}", f"rows → columns, on {ends[-1]}"),
        Row("used", "growth of memory in use", (Target(1),), "MiB"),
        Row("total", "growth of the pool", (Target(1),), "MiB"),
    ]
    return tuple(rows)


BANDWIDTH = Target(1.18, COPY)
"""At least 0.85 of the bandwidth of the GPU's own copy."""


def _near(factor: float) -> Target:
    """Returns the target of at most ``factor`` times bare CuPy's time."""
    return Target(factor, CUPY)


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB"


# -- the run ---------------------------------------------------------------------------------------


class Measurer(Protocol):
    """A `Worker`, or its replacement in a test."""

    def call(self, case: str, limit: float = ...) -> Any:
        """Calls a case once and returns its result."""


def call_case(worker: Measurer, name: str, limit: float = harness.ANSWER_LIMIT) -> Any:
    """Calls a case once and returns its result; prints the traceback of a case that failed.

    Raises:
        NotMeasured: the case failed, or there is none of this name.
    """
    result = worker.call(name, limit)
    if isinstance(result, str):
        print(result, file=sys.stderr)
        raise NotMeasured("failed")
    return result


@dataclass(frozen=True)
class Effort:
    """The number of rounds."""

    rounds: int = 25


QUICK = Effort(3)


def start_workers(logical: Sequence[int]) -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts the worker of each column, for these numbers of logical devices; a context manager that ends them."""
    shared = {"BENCHMARK_LOGICAL": ",".join(map(str, logical)), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return harness.start_workers(
        {
            PROJECT: (
                "shardtensor",
                "gpu_cases:shardtensor_cases",
                shared | harness.logical_devices(max(logical), "cupy"),
            ),
            CUPY: ("cupy", "gpu_cases:cupy_cases", shared),
            TORCH: ("torch", "gpu_cases:torch_cases", shared),
            JAX: ("jax", "gpu_cases:jax_cases", shared),
            COPY: ("cupy", "gpu_cases:copy_cases", shared),
        }
    )


def measure(
    effort: Effort, logical: Sequence[int], workers: Mapping[str, Measurer], sizes: Sizes = FULL
) -> tables.Table:
    """Measures the whole table."""
    rows = make_rows(logical, sizes)
    ours = workers[PROJECT]
    environment = machine.describe_environment(("shardtensor", "numpy", "torch", "jax")) | {
        **call_case(ours, "machine"),
        "rounds": f"{effort.rounds}, growth 1",
    }
    samplers = {
        (row.name, column): functools.partial(call_case, worker, row.name)
        for row in rows
        for column, worker in workers.items()
        if row.name not in ONCE
    }
    cells = harness.interleave(samplers, effort.rounds, "on the GPU")
    try:
        cells |= {(name, PROJECT): tables.Cell((mib,)) for name, mib in call_case(ours, "growth", 600).items()}
    except (NotMeasured, KeyboardInterrupt) as reason:  # Of a run that is stopped here, all times are measured.
        cells |= {(name, PROJECT): tables.Cell(problem=str(reason) or "stopped") for name in ONCE}
    return Table(_title(logical, sizes), environment, tuple(workers), rows, cells, (COPY,))


def _title(logical: Sequence[int], sizes: Sizes) -> str:
    return TITLE.format(" or ".join(map(str, logical)), _size(sizes.moved), sizes.side)


def device_counts(text: str) -> tuple[int, ...]:
    """Returns the numbers of devices in the value of ``--logical``, sorted.

    Raises:
        ValueError: a number is not a positive integer.
    """
    counts = sorted({int(n) for n in text.split(",")})
    if counts[0] < 1:
        raise ValueError(text)
    return tuple(counts)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program: measures if there is a GPU, and otherwise exits with a message."""
    parser = harness.make_parser("gpu", "The cost of operators on a GPU.")
    parser.add_argument("--logical", type=device_counts, default=(1, 2, 8), metavar="N,N", help="logical devices")
    parser.add_argument("--rounds", type=int, default=Effort().rounds, metavar="N", help="samples of each figure")
    options = harness.parse(parser, argv)
    from shardtensor_cupy.discovery import usable_cupy

    from shardtensor.errors import BackendError

    try:
        usable_cupy()
    except BackendError as error:
        sys.exit(f"gpu.py: there is no usable GPU: {error}")
    try:
        with start_workers(options.logical) as workers:
            table = measure(QUICK if options.quick else Effort(options.rounds), options.logical, workers)
    except NotMeasured as reason:
        sys.exit(f"gpu.py: the worker of {PROJECT}: {reason}")
    harness.report(table, options.out, harness.labelled("gpu", options.label))


if __name__ == "__main__":
    main()
