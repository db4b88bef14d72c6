"""The cost of writes: single elements, slices, exports, in-place operators, masks, index arrays, a Jacobi step.

``python benchmarks/writes.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import harness
import machine
import tables
from harness import DEVICES, NUMPY, PROJECT, Case
from tables import Row, Table, Target

TITLE = f"Writes: float32 arrays, rows over {DEVICES} logical devices of one host; JAX (n): n virtual CPU devices"
SIDE = 64
GRID = 4096
PART = slice(2000, 2256)  # 1 MiB of 64 MiB, in parts of two shards
WRITES = 100_000

SMALL = (
    Row("read", "x[i, j]", (Target(5e-6),)),
    Row("float", "float(x[i, j])"),
    Row("write", "x[i, j] = v", (Target(8e-6), Target(110, NUMPY))),
    Row("slice", "x[a:b] = v, 1 MiB", (Target(1.3, NUMPY, more=5e-6), Target(1.5, NUMPY))),
)
EXPORTS = (
    Row("asarray", "np.asarray(x)", (Target(2.5e-6),)),
    Row("export", "one export of 1 MiB, 10 writes"),
)
COPIES = Row("copies", "… copies", (Target(1.0),), "copies")
LARGE = (
    Row("add", "x += y, 128 MiB", (Target(1.15, NUMPY),)),
    Row("mask", "x[mask] = 0, 16 M", (Target(1.2, NUMPY),)),
    Row("gather", "x[idx], 1 M"),
    Row("scatter", "x[idx] = v, 1 M"),
    Row("jacobi", "Jacobi step, 4096²", (Target(1.3, NUMPY),)),
)
HALO = Row("halo", "… halo rows sent", unit="rows")
GROWTH = Row("growth", "growth, 100 000 writes", (Target(1.0),), "MiB")


# -- the cases, each function in a process of its own ----------------------------------------------


def shardtensor_cases() -> dict[str, Case]:
    """Returns the cases of shardtensor, eager, on the numpy backend."""
    import numpy as np

    import shardtensor as st

    rows = st.NamedSharding(st.make_mesh((DEVICES,), ("d",)), st.P("d"))
    operands = {name: st.device_put(array, rows) for name, array in _operands(np)}

    def halo() -> dict[str, float]:
        with st.transfers() as log:
            jacobi(operands["grid"])
        return {HALO.name: log.bytes / (GRID * operands["grid"].dtype.itemsize)}

    statements = _statements(np.asarray, **operands)

    def copies() -> dict[str, float]:
        with st.transfers() as log:
            statements["export"]()
        return {COPIES.name: sum(record.copied for record in log) / operands["part"].nbytes}

    return {**statements, HALO.name: halo, COPIES.name: copies}


def numpy_cases() -> dict[str, Case]:
    """Returns the cases of NumPy: lower bounds for any library that is built on it."""
    import numpy as np

    return _statements(np.array, **dict(_operands(np)))


def _statements(
    snapshot: Any,
    small: Any,
    large: Any,
    part: Any,
    long: Any,
    tiny: Any,
    x: Any,
    mask: Any,
    idx: Any,
    v: Any,
    grid: Any,
) -> dict[str, Case]:
    """Returns the cases whose source code is the same for NumPy and shardtensor.

    Args:
        snapshot: returns a host array of an operand that later writes do not change.
        small, large, part, long, tiny, x, mask, idx, v, grid: the operands, see `_operands`.
    """
    positions = _positions()

    def write() -> None:
        small[next(positions)] = 1.5

    def write_slice() -> None:
        large[PART] = part

    def export() -> None:
        held = snapshot(part)
        for k in range(10):
            part[k, k] = 2
        del held

    def add() -> None:
        nonlocal long
        long += tiny

    def write_mask() -> None:
        x[mask] = 0

    def scatter() -> None:
        x[idx] = v

    return {
        "read": lambda: small[next(positions)],
        "float": lambda: float(small[next(positions)]),
        "write": write,
        "slice": write_slice,
        "asarray": lambda: snapshot(small),
        "export": export,
        "add": add,
        "mask": write_mask,
        "gather": lambda: x[idx],
        "scatter": scatter,
        "jacobi": lambda: jacobi(grid),
        GROWTH.name: lambda: growth(write),
    }


def jacobi(u: Any) -> None:
    """Runs a step of Jacobi's method for Laplace's equation with fixed values on the border, in place."""
    u[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])


def jax_cases() -> dict[str, Case]:
    """Returns the cases of JAX on the virtual CPU devices that its flags set.

    A write creates a new array from a donated one. Every case waits for its result.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rows = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    held = {name: jax.device_put(array, rows) for name, array in _operands(np)}
    positions = _positions()
    ready = jax.block_until_ready
    read = jax.jit(lambda x, idx: x[idx], out_shardings=rows)

    def step(u: Any) -> Any:
        inside = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
        return u.at[1:-1, 1:-1].set(inside)

    def write() -> None:
        held["small"] = ready(held["small"].at[next(positions)].set(1.5))

    def donated(function: Any, name: str, *others: str) -> Case:
        compiled = jax.jit(function, donate_argnums=0, out_shardings=rows)

        def case() -> None:
            held[name] = ready(compiled(held[name], *[held[other] for other in others]))

        return case

    return {
        "read": lambda: ready(held["small"][next(positions)]),
        "float": lambda: float(held["small"][next(positions)]),
        "write": write,
        "slice": donated(lambda x, v: x.at[PART].set(v), "large", "part"),
        "add": donated(lambda x, y: x + y, "long", "tiny"),
        "mask": donated(lambda x, mask: jax.numpy.where(mask, 0, x), "x", "mask"),
        "gather": lambda: ready(read(held["x"], held["idx"])),
        "scatter": donated(lambda x, idx, v: x.at[idx].set(v), "x", "idx", "v"),
        "jacobi": donated(step, "grid"),
        GROWTH.name: lambda: growth(write),
    }


def _operands(np: Any) -> Iterator[tuple[str, Any]]:
    """Yields the operands by name, equal for all libraries. No repetition of a case makes their elements subnormal."""
    random = np.random.default_rng(0)
    many, some, n = 2**24, 10**6, np.float32
    yield "small", np.arange(SIDE * SIDE, dtype=n).reshape(SIDE, SIDE)
    yield "large", np.ones((many // 1024, 1024), n)
    yield "part", np.full((PART.stop - PART.start, 1024), 2, n)
    yield "long", np.ones(2 * many, n)
    yield "tiny", np.full(2 * many, 1e-9, n)  # 1 + 1e-9 is 1
    yield "x", np.ones(many, n)
    yield "mask", random.random(many) < 0.5
    yield "idx", random.integers(0, many, some)
    yield "v", np.full(some, 3, n)
    yield "grid", random.uniform(1, 2, (GRID, GRID)).astype(n)


def _positions() -> Iterator[tuple[int, int]]:
    """Yields the indices of all elements of the small array in random order, repeatedly."""
    import numpy as np

    order = np.random.default_rng(1).permutation(SIDE * SIDE)
    return itertools.cycle([divmod(int(k), SIDE) for k in order])


def growth(write: Case) -> dict[str, float | None]:
    """Returns the largest growth of the process in MiB while elements are written."""
    return {GROWTH.name: harness.repeat_call(write, WRITES, lambda last: None)[1]}


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """The number of rounds for each kind of row, and the time limit in seconds of the row ``growth``."""

    small: int = 150
    large: int = 25
    time_limit: float = 90.0


QUICK = Effort(small=20, large=3, time_limit=15.0)


def measure(effort: Effort) -> Table:
    """Measures the whole table."""
    with harness.start_default_workers("writes") as workers:
        environment = machine.describe_environment(("numpy", "jax", "shardtensor")) | {
            "rounds": f"the first six rows {effort.small}, the others {effort.large}, sent, copies and growth 1",
        }
        cells: tables.Cells = {}
        for rows, columns, rounds, description in (
            (SMALL, workers, effort.small, "elements, slices"),
            (EXPORTS, {c: workers[c] for c in (PROJECT, NUMPY)}, effort.small, "exports"),
            (LARGE, workers, effort.large, "large arrays"),
        ):
            cells |= harness.sample_cases([row.name for row in rows], columns, rounds, description)
        for row in (HALO, COPIES):
            cells |= harness.call_once(workers[PROJECT], PROJECT, row.name, (row.name,))
        for column, worker in workers.items():
            cells |= harness.call_once(worker, column, GROWTH.name, (GROWTH.name,), effort.time_limit)
    return Table(TITLE, environment, tuple(workers), (*SMALL, *EXPORTS, COPIES, *LARGE, HALO, GROWTH), cells)


if __name__ == "__main__":
    harness.run("writes", "The cost of writes.", measure, Effort(), QUICK)
