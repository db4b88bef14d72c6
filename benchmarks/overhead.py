"""The cost of a call before any work is done: tiny arrays, imports, planning, queueing.

``python benchmarks/overhead.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import dataclass
from typing import Any

import harness
import machine
from harness import DEVICES, JAX_8, NUMPY, PROJECT, Case
from tables import Row, Table, Target

TITLE = f"Overhead: tiny float32 arrays over {DEVICES} logical devices of one host; JAX (n): n virtual CPU devices"
QUEUED = 100_000
PLANNED_DEVICES = 1024

CALLS = (
    Row("add", "x + y", (Target(8e-6), Target(0.1, JAX_8))),
    Row("add compiled", "x + y (JAX: jit)"),
    Row("sum", "x.sum()", (Target(15e-6),)),
    Row("slice", "x[1:3]", (Target(15e-6),)),
    Row("transpose", "m.T", (Target(15e-6),)),
    Row("matmul", "m @ w", (Target(15e-6),)),
    Row("pmap", "pmap of x + 1", (Target(75e-6), Target(0.4, JAX_8))),
    Row("stack", "stack of the shards"),
    Row("reshard", "rows → columns"),
    Row("reshard copied", "rows → columns, copied"),
)
PLAN = Row("plan", "plan 1024 × 1024", (Target(1.0),))
IMPORT = Row("import", "import", (Target(2.0, NUMPY),))
QUEUE = Row("queue", "100 000 x.sum() queued", (Target(60.0),))
GROWTH = Row("growth", "… growth of memory", (Target(1.0),), "MiB")


# -- the cases, each function in a process of its own ----------------------------------------------


def shardtensor_cases() -> dict[str, Case]:
    """Returns the cases of shardtensor, eager, on the numpy backend."""
    import numpy as np

    import shardtensor as st
    from shardtensor.backend import Device
    from shardtensor.sharding.copy_plan import plan_reshard

    mesh = st.make_mesh((DEVICES,), ("d",))
    rows, columns, everywhere = (st.NamedSharding(mesh, spec) for spec in (st.P("d"), st.P(None, "d"), st.P()))
    x, y, m, w, square = (
        st.device_put(array, everywhere if name == "w" else rows) for name, array in _operands(np).items()
    )
    shards = st.shard(np.arange(32, dtype=np.float32))
    first_id = itertools.count()

    def plan() -> Any:
        # Each call has other devices, so that no cache of the library is hit.
        first = next(first_id)
        fake = [Device("numpy", first + i) for i in range(PLANNED_DEVICES)]
        mesh = st.make_mesh((PLANNED_DEVICES,), ("d",), devices=fake)
        ends = st.NamedSharding(mesh, st.P("d")), st.NamedSharding(mesh, st.P(None, "d"))
        return plan_reshard.__wrapped__(*ends, (4 * PLANNED_DEVICES, 4 * PLANNED_DEVICES))

    return {
        **_expressions(x, y, m, w),
        "pmap": lambda: st.pmap(_add_one, shards),
        "stack": lambda: st.stack(shards),
        "reshard": lambda: st.reshard(square, columns),
        "reshard copied": lambda: st.reshard(square, columns, may_alias=False),
        "plan": plan,
    }


def _expressions(x: Any, y: Any, m: Any, w: Any) -> dict[str, Case]:
    """Returns the cases whose source code is the same for NumPy and shardtensor; neither has a compile step."""
    return {
        "add": lambda: x + y,
        "add compiled": lambda: x + y,
        "sum": lambda: x.sum(),
        "slice": lambda: x[1:3],
        "transpose": lambda: m.T,
        "matmul": lambda: m @ w,
        "queue": lambda: queue(lambda: x.sum()),
    }


def numpy_cases() -> dict[str, Case]:
    """Returns the cases of NumPy: lower bounds for any library that is built on it."""
    import numpy as np

    x, y, m, w, square = _operands(np).values()
    shards = np.split(np.arange(32, dtype=np.float32), DEVICES)
    return {
        **_expressions(x, y, m, w),
        "pmap": lambda: [_add_one(shard) for shard in shards],
        "stack": lambda: np.stack(shards),
        "reshard copied": lambda: square.copy(),
        "blas": machine.blas_kernel,
    }


def jax_cases() -> dict[str, Case]:
    """Returns the cases of JAX on the virtual CPU devices that its flags set. Every case waits for its result."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("d",))
    rows, columns, everywhere = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec("d"), PartitionSpec(None, "d"), PartitionSpec())
    )
    x, y, m, w, square = (
        jax.device_put(array, everywhere if name == "w" else rows) for name, array in _operands(np).items()
    )
    add = jax.jit(jax.numpy.add)
    add_one = jax.pmap(_add_one)
    mapped = add_one(np.arange(32, dtype=np.float32).reshape(len(devices), -1))  # has the sharding of pmap's arguments
    # JAX stacks without copying if the shards already have the new dimension.
    shards = [jax.device_put(np.ones((1, 32 // len(devices)), np.float32), device) for device in devices]
    stacked = (len(devices), 32 // len(devices))
    ready = jax.block_until_ready
    return {
        "add": lambda: ready(x + y),
        "add compiled": lambda: ready(add(x, y)),
        "sum": lambda: ready(x.sum()),
        "slice": lambda: ready(x[1:3]),
        "transpose": lambda: ready(m.T),
        "matmul": lambda: ready(m @ w),
        "pmap": lambda: ready(add_one(mapped)),
        "stack": lambda: ready(jax.make_array_from_single_device_arrays(stacked, rows, shards)),
        "reshard": lambda: ready(jax.device_put(square, columns)),
        "reshard copied": lambda: ready(jax.device_put(square, columns)),
        "queue": lambda: queue(lambda: x.sum()),
    }


def _operands(np: Any) -> dict[str, Any]:
    """Returns the tiny operands, equal for all libraries."""
    shapes = {"x": (32,), "y": (32,), "m": (32, 4), "w": (4, 4), "square": (32, 32)}
    return {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}


def _add_one(x: Any) -> Any:
    return x + 1


def queue(reduce: Case) -> dict[str, float | None]:
    """Queues many reductions and waits for the last one; returns the seconds and the growth of the process in MiB."""
    seconds, growth = harness.repeat_call(reduce, QUEUED, float)
    return {QUEUE.name: seconds, GROWTH.name: growth}


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """The number of rounds for each kind of row, and the time limit in seconds of the queued reductions."""

    calls: int = 150
    plans: int = 9
    imports: int = 15
    time_limit: float = 90.0


QUICK = Effort(calls=20, plans=3, imports=7, time_limit=15.0)


def measure(effort: Effort) -> Table:
    """Measures the whole table."""
    with harness.start_default_workers("overhead") as workers, tempfile.TemporaryDirectory() as bytecode:
        environment = machine.describe_environment(("numpy", "jax", "shardtensor")) | {
            "BLAS": workers[NUMPY].call("blas"),
            "rounds": f"calls {effort.calls}, planning {effort.plans}, imports {effort.imports}, queue 1",
        }
        cells = harness.sample_cases([row.name for row in CALLS], workers, effort.calls, "calls")
        cells |= harness.sample_cases((PLAN.name,), {PROJECT: workers[PROJECT]}, effort.plans, "planning")
        packages = {PROJECT: "shardtensor", NUMPY: "numpy", JAX_8: "jax"}
        load = functools.partial(harness.import_seconds, bytecode=bytecode)
        imports = {(IMPORT.name, column): functools.partial(load, package) for column, package in packages.items()}
        harness.interleave(imports, 1, "compiling")
        cells |= harness.interleave(imports, effort.imports, "imports")
        # These rows come last: JAX's virtual devices may deadlock in them, and then their process is killed.
        for column, worker in workers.items():
            cells |= harness.call_once(worker, column, QUEUE.name, (QUEUE.name, GROWTH.name), effort.time_limit)
    return Table(TITLE, environment, tuple(workers), (*CALLS, PLAN, IMPORT, QUEUE, GROWTH), cells)


if __name__ == "__main__":
    harness.run("overhead", "The cost of a call before any work is done.", measure, Effort(), QUICK)
