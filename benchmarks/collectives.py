"""The cost of mapped functions and their collectives: tiny psums, transfers of 64 MiB, a training step, long loops.

``python benchmarks/collectives.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
import timeit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import harness
import machine
import tables
from harness import DEVICES, NUMPY, PROJECT, Case, Worker
from tables import Row, Table, Target

TITLE = (
    f"Collectives: float32 over {DEVICES} logical devices of one host, inside of shard_map; JAX: {DEVICES} CPU devices"
)
JIT, EAGER = "JAX jit", "JAX eager"
FEATURES, HIDDEN, CLASSES = 784, 512, 10
RATE = 0.1
SIZES = "BENCHMARK_SIZES"


@dataclass(frozen=True)
class Sizes:
    """The sizes of operands and loops; the tests use smaller ones.

    Attributes:
        side: the side of the square array that collectives transfer; a multiple of 64.
        batch: the number of examples of a training step.
        row: the number of successive collectives in one mapped function.
        queued: the number of calls that are queued before the program waits for the last one.
    """

    side: int = 4096
    batch: int = 4096
    row: int = 100_000
    queued: int = 10_000

    @classmethod
    def from_environment(cls) -> Sizes:
        """Returns the sizes that the parent process passed in the environment."""
        return cls(**json.loads(os.environ.get(SIZES, "{}")))


SMALL = (
    Row("scalars", "psum of 8 scalars", (Target(0.2, EAGER), Target(0.8, JIT))),
    Row("ten", "10 psum in one map"),
    Row("fresh", "barrier; 8 new threads", (Target(1, NUMPY),)),
    Row("kept", "barrier; 8 kept threads", (Target(1, NUMPY),)),
)
COPY_WARM, COPY_NEW = Row("warm", "copy into used memory"), Row("new", "copy into new memory")
MOVES = (
    COPY_WARM,
    COPY_NEW,
    Row("all_gather", "all_gather", (Target(1.3, NUMPY),)),
    Row("psum", "psum", (Target(1.3, NUMPY),)),
    Row("own", "psum of separate arrays", (Target(1.3, NUMPY),)),
    Row("each", "psum, P('x') returned", (Target(1.3, NUMPY),)),
    Row("all_to_all", "all_to_all", (Target(1.3, NUMPY),)),
    Row("psum_scatter", "psum_scatter", (Target(1.3, NUMPY), Target(1.0, JIT))),
)
STEPS = (
    Row("step", "step, update follows", (Target(1.1, JIT), Target(1.05, NUMPY))),
    Row("step inside", "step, update in the map", (Target(1.1, JIT), Target(1.05, NUMPY))),
)
IN_A_ROW, GROWTH = Row("row", "100 000 psum in one map"), Row("growth", "… growth of memory", (Target(1.0),), "MiB")
QUEUED = Row("queued", "10 000 calls queued")
ROWS = (*SMALL, *MOVES, *STEPS, IN_A_ROW, GROWTH, QUEUED)


# -- what all libraries run ------------------------------------------------------------------------


def mapped_functions(
    lib: Any, shard_map: Callable[..., Any], p: Any, mesh: Any, xp: Any, sizes: Sizes, gathers: Any
) -> dict[str, Any]:
    """Returns the measured functions by case; shardtensor and JAX run the same source code.

    Args:
        lib: the namespace with the library's collectives.
        shard_map: the library's `shard_map`.
        p: the library's partition spec.
        mesh: the devices, along one axis ``x``.
        xp: the NumPy-like namespace for the library's blocks.
        sizes: the sizes of operands and loops.
        gathers: keyword arguments of `shard_map` for all_gather: JAX cannot infer that its result is replicated.
    """
    rows, columns, whole = p("x"), p(None, "x"), p()

    def over(f: Callable[..., Any], out_specs: Any, **options: Any) -> Any:
        return shard_map(f, mesh=mesh, in_specs=rows, out_specs=out_specs, **options)

    def psum(b: Any) -> Any:
        return lib.psum(b, "x")

    def ten(b: Any) -> Any:
        for _ in range(10):
            b = lib.psum(b, "x")
        return b

    def gradients(params: Any, x: Any, t: Any) -> Any:
        return lib.psum(backward(xp, params, x, t, sizes.batch), "x")

    def inside(params: Any, x: Any, t: Any) -> Any:
        loss, grads = gradients(params, x, t)
        return loss, descend(params, grads)

    batch = {"mesh": mesh, "in_specs": (whole, rows, rows), "out_specs": whole}
    summed, stepped = shard_map(gradients, **batch), shard_map(inside, **batch)

    def step(params: Any, x: Any, t: Any) -> Any:
        loss, grads = summed(params, x, t)
        return loss, descend(params, grads)

    return {
        "scalars": over(psum, whole),
        "ten": over(ten, whole),
        "all_gather": over(lambda b: lib.all_gather(b, "x", tiled=True), whole, **gathers),
        "psum": over(psum, whole),
        "own": over(psum, whole),
        "each": over(psum, rows),
        "all_to_all": over(lambda b: lib.all_to_all(b, "x", 1, 0, tiled=True), columns),
        "psum_scatter": over(lambda b: lib.psum_scatter(b, "x", tiled=True), rows),
        "step": step,
        "step inside": stepped,
    }


def backward(xp: Any, params: Mapping[str, Any], x: Any, t: Any, batch: int) -> tuple[Any, dict[str, Any]]:
    """Returns the loss of a network with one hidden layer (softmax, cross-entropy) and its gradients.

    Both are the contributions of the examples ``x`` and one-hot labels ``t`` to the mean over ``batch`` examples.
    """
    hidden = xp.maximum(x @ params["w1"] + params["b1"], 0)
    z = hidden @ params["w2"] + params["b2"]
    z = z - z.max(axis=1, keepdims=True)
    powers = xp.exp(z)
    total = powers.sum(axis=1, keepdims=True)
    loss = (xp.log(total) - (z * t).sum(axis=1, keepdims=True)).sum() / batch
    dz = (powers / total - t) / batch
    dh = (dz @ params["w2"].T) * (hidden > 0)
    return loss, {"w1": x.T @ dh, "b1": dh.sum(axis=0), "w2": hidden.T @ dz, "b2": dz.sum(axis=0)}


def descend(params: Mapping[str, Any], grads: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters after a step of gradient descent."""
    return {name: params[name] - RATE * grads[name] for name in params}


def operands(np: Any, sizes: Sizes) -> tuple[Any, Any, tuple[dict[str, Any], Any, Any]]:
    """Returns the operands, equal for all libraries: one number per device, the array that collectives transfer, and
    the parameters, examples and labels of a training step.
    """
    random = np.random.default_rng(0)
    n = np.float32
    large = random.random((sizes.side, sizes.side), dtype=n)
    params = {
        "w1": random.standard_normal((FEATURES, HIDDEN), dtype=n) / 28,
        "b1": np.zeros(HIDDEN, n),
        "w2": random.standard_normal((HIDDEN, CLASSES), dtype=n) / 23,
        "b2": np.zeros(CLASSES, n),
    }
    examples = random.random((sizes.batch, FEATURES), dtype=n)
    labels = np.eye(CLASSES, dtype=n)[random.integers(0, CLASSES, sizes.batch)]
    return np.arange(DEVICES, dtype=n), large, (params, examples, labels)


def checksums(np: Any, cases: Mapping[str, Case]) -> dict[str, float]:
    """Returns a checksum of the result of each case, by which the libraries are compared."""
    sums = {}
    for name, case in cases.items():
        loss, params = case() if "step" in name else (case(), {})
        first, others = np.asarray(loss, dtype=np.float64), [np.asarray(params[k], np.float64) for k in sorted(params)]
        # Elements have different weights, so that elements in the wrong place change the sum.
        sums[name] = float(sum(np.sum(a * np.cos(np.arange(a.size)).reshape(a.shape)) for a in (first, *others)))
    return sums


# -- the cases, each function in a process of its own ----------------------------------------------


def shardtensor_cases(sizes: Sizes | None = None) -> dict[str, Case]:
    """Returns the cases of shardtensor, on the numpy backend."""
    import numpy as np

    import shardtensor as st

    sizes = sizes or Sizes.from_environment()
    mesh = st.make_mesh((DEVICES,), ("x",))
    rows, whole = st.NamedSharding(mesh, st.P("x")), st.NamedSharding(mesh, st.P())
    few, many, (params, *examples) = operands(np, sizes)
    eight, large = st.device_put(few, rows), st.device_put(many, rows)
    batch = (st.device_put(params, whole), *[st.device_put(a, rows) for a in examples])
    own = st.shard_map(lambda b: b.copy(), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(large)
    given = {"scalars": (eight,), "ten": (eight,), "own": (own,), "step": batch, "step inside": batch}
    functions = mapped_functions(st, st.shard_map, st.P, mesh, np, sizes, {})
    cases = {name: functools.partial(f, *given.get(name, (large,))) for name, f in functions.items()}
    return {
        **cases,
        "checksums": lambda: checksums(np, cases),
        "fresh": scheduler_rendezvous(),
        "kept": scheduler_rendezvous(),
        IN_A_ROW.name: lambda: in_a_row(st, mesh, np.zeros(DEVICES, np.float32), sizes.row),
        QUEUED.name: lambda: {QUEUED.name: harness.repeat_call(cases["scalars"], sizes.queued, np.asarray)[0]},
    }


def scheduler_rendezvous() -> Case:
    """Returns a case that runs only the scheduler: one program per device, and one rendezvous that adds a number of
    each.
    """
    from shardtensor.spmd.collective_call import CollectiveCall
    from shardtensor.spmd.scheduling.scheduler import run

    def add(contributions: Sequence[float]) -> list[float]:
        return [sum(contributions)] * DEVICES

    call = CollectiveCall("rendezvous", "key", DEVICES, add)

    def task(program: Any) -> Any:
        return program.meet(call, program.number, 1.0)

    tasks, labels = [task] * DEVICES, [str(k) for k in range(DEVICES)]
    return lambda: run(tasks, labels)


def in_a_row(st: Any, mesh: Any, x: Any, times: int) -> dict[str, float | None]:
    """Runs ``times`` collectives in one mapped function.

    Returns:
        The seconds, and the largest growth of the process meanwhile in MiB (None if it cannot be measured), by row.
    """
    resident: list[int] = []

    def chain(b: Any, times: int) -> Any:
        for i in range(times):
            b = st.psum(b, "x")
            if not i % 1000:
                resident.append(harness.resident_bytes() or 0)
        return b

    call = st.shard_map(chain, mesh=mesh, in_specs=(st.P("x"), None), out_specs=st.P())
    call(x, 1000)
    before = harness.resident_bytes()
    resident.clear()
    seconds = timeit.timeit(lambda: call(x, times), number=1)
    return {IN_A_ROW.name: seconds, GROWTH.name: None if before is None else max(0, max(resident) - before) / 2**20}


def numpy_cases(sizes: Sizes | None = None) -> dict[str, Case]:
    """Returns the cases of NumPy on one array; for a transfer, one pass that copies the bytes that have to be moved."""
    import numpy as np

    sizes = sizes or Sizes.from_environment()
    few, large, batch = operands(np, sizes)
    warm = np.ones_like(large)
    # A reduction reads the whole array and writes an eighth of it into new memory. A copy that reads and writes as many
    # bytes in total copies 9/16 of the array: 2/16 into new memory, the rest into memory that has been used before.
    used, new = slice(0, sizes.side * 7 // 16), slice(sizes.side * 7 // 16, sizes.side * 9 // 16)

    def reduction() -> Any:
        np.copyto(warm[used], large[used])
        return np.array(large[new])

    def step() -> Any:
        params, *examples = batch
        loss, grads = backward(np, params, *examples, sizes.batch)
        return loss, descend(params, grads)

    def by_hand() -> dict[str, Any]:
        total = large.reshape(DEVICES, -1, sizes.side).sum(axis=0)
        return {
            "scalars": few.sum(keepdims=True),
            "ten": few.sum(keepdims=True) * DEVICES**9,
            "all_gather": large,
            "psum": total,
            "own": total,
            "each": np.tile(total, (DEVICES, 1)),
            "all_to_all": large,
            "psum_scatter": total,
        }

    copied = functools.partial(np.array, large)
    reductions = dict.fromkeys(("psum", "own", "each", "psum_scatter"), reduction)
    steps = {"step": step, "step inside": step}
    return {
        "scalars": lambda: few.sum(keepdims=True),
        "fresh": fresh_threads(),
        "kept": kept_threads(),
        COPY_WARM.name: lambda: np.copyto(warm, large),
        COPY_NEW.name: copied,
        "all_gather": copied,
        "all_to_all": copied,
        **reductions,
        **steps,
        "checksums": lambda: checksums(np, {k: lambda v=v: v for k, v in by_hand().items()} | steps),
        "blas": machine.blas_kernel,
    }


def fresh_threads() -> Case:
    """Returns a case that starts one thread per device for one `ThreadRendezvous` and waits until they have ended."""

    def meet() -> list[float]:
        rendezvous = ThreadRendezvous()
        threads = [threading.Thread(target=rendezvous.add, args=(k,)) for k in range(DEVICES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return rendezvous.results

    return meet


def kept_threads() -> Case:
    """Returns a case that runs one `ThreadRendezvous` in the threads of a pool, one per device."""
    pool = ThreadPoolExecutor(DEVICES)

    def meet() -> list[float]:
        rendezvous = ThreadRendezvous()
        for done in [pool.submit(rendezvous.add, k) for k in range(DEVICES)]:
            done.result()
        return rendezvous.results

    return meet


class ThreadRendezvous:
    """One rendezvous of a thread per device, at which the sum of a number of each is computed."""

    def __init__(self) -> None:
        self.contributions = [0.0] * DEVICES
        self.results = [0.0] * DEVICES
        self.total = 0.0
        self.barrier = threading.Barrier(DEVICES, self.reduce)

    def reduce(self) -> None:
        """Computes the sum, in the last thread that arrives."""
        self.total = sum(self.contributions)

    def add(self, k: int) -> None:
        """Contributes a number and receives the sum, in the thread of device ``k``."""
        self.contributions[k] = 1.0
        self.barrier.wait()
        self.results[k] = self.total


def jit_cases(sizes: Sizes | None = None) -> dict[str, Case]:
    """Returns the cases of JAX, compiled. Every case waits for its result."""
    import jax

    return jax_cases(sizes or Sizes.from_environment(), jax.jit)


def eager_cases(sizes: Sizes | None = None) -> dict[str, Case]:
    """Returns the cases of JAX without jit. Every case waits for its result."""
    return jax_cases(sizes or Sizes.from_environment(), lambda f: f)


def jax_cases(sizes: Sizes, compiled: Callable[[Any], Any]) -> dict[str, Case]:
    """Returns the cases of JAX on virtual CPU devices, each function passed through ``compiled``."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    few, many, (params, *examples) = operands(np, sizes)
    eight, large = jax.device_put(few, rows), jax.device_put(many, rows)
    batch = (jax.device_put(params, whole), *[jax.device_put(a, rows) for a in examples])
    given = {"scalars": (eight,), "ten": (eight,), "step": batch, "step inside": batch}
    # JAX infers that the results of collectives are replicated, except that of all_gather.
    functions = mapped_functions(jax.lax, jax.shard_map, PartitionSpec, mesh, jax.numpy, sizes, {"check_vma": False})
    called = {name: functools.partial(compiled(f), *given.get(name, (large,))) for name, f in functions.items()}

    def blocking(call: Case) -> Case:
        return lambda: jax.block_until_ready(call())

    cases = {name: blocking(call) for name, call in called.items()}
    if compiled is not jax.jit:  # an eager training step takes seconds
        cases = {name: case for name, case in cases.items() if "step" not in name}
    all_cases: dict[str, Case] = {**cases, "checksums": lambda: checksums(np, cases)}
    if compiled is jax.jit:

        def chain(b: Any) -> Any:
            return jax.lax.fori_loop(0, sizes.row, lambda i, b: jax.lax.psum(b, "x"), b)

        once = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=rows.spec, out_specs=whole.spec, check_vma=False))
        zeros = jax.device_put(np.zeros(DEVICES, np.float32), rows)
        ready = once.lower(zeros).compile()
        all_cases[IN_A_ROW.name] = lambda: {
            IN_A_ROW.name: timeit.timeit(lambda: ready(zeros).block_until_ready(), number=1), GROWTH.name: None
        }  # fmt: skip
        all_cases[QUEUED.name] = lambda: {
            QUEUED.name: harness.repeat_call(called["scalars"], sizes.queued, jax.block_until_ready)[0]
        }
    return all_cases


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """The number of rounds for each kind of row, and the time limit in seconds of the rows that are measured once."""

    small: int = 40
    moves: int = 25
    steps: int = 25
    time_limit: float = 90.0


QUICK = Effort(small=10, moves=7, steps=5, time_limit=30.0)


class Measurer(Protocol):
    """A `Worker`, or its replacement in a test."""

    def sample(self, case: str) -> float:
        """Returns the seconds per call of a case."""

    def call(self, case: str, limit: float = ...) -> Any:
        """Calls a case once and returns its result."""


def start_workers(sizes: Sizes) -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts the worker of each column, with operands of these sizes; a context manager that ends them."""
    shared = {SIZES: json.dumps(dataclasses.asdict(sizes))}
    jax = shared | harness.virtual_devices(DEVICES)
    return harness.start_workers(
        {
            PROJECT: ("shardtensor", "collectives:shardtensor_cases", shared | harness.logical_devices(DEVICES)),
            NUMPY: ("numpy", "collectives:numpy_cases", shared),
            JIT: ("jax", "collectives:jit_cases", jax),
            EAGER: ("jax", "collectives:eager_cases", jax),
        }
    )


def measure(effort: Effort, sizes: Sizes = Sizes()) -> Table:
    """Measures the whole table."""
    with start_workers(sizes) as workers:
        return measure_with(effort, workers)


def measure_with(effort: Effort, workers: Mapping[str, Measurer]) -> Table:
    """Measures the whole table with these workers, after checking that their results are equal."""
    environment = machine.describe_environment(("numpy", "jax", "greenlet", "shardtensor")) | {
        "BLAS": workers[NUMPY].call("blas"),
        "rounds": f"small {effort.small}, moves {effort.moves}, steps {effort.steps}, the last three rows 1",
    }
    check_equal(checksums_of(workers))
    cells: tables.Cells = {}
    groups = (SMALL, effort.small, "psum, barriers"), (MOVES, effort.moves, "64 MiB"), (STEPS, effort.steps, "steps")
    for rows, rounds, description in groups:
        cells |= harness.sample_cases([row.name for row in rows], workers, rounds, description)
    for rows, case in (((IN_A_ROW, GROWTH), IN_A_ROW.name), ((QUEUED,), QUEUED.name)):
        for column, worker in workers.items():  # queued calls come last: JAX's virtual devices may deadlock in them
            cells |= harness.call_once(worker, column, case, [row.name for row in rows], effort.time_limit)
    return Table(TITLE, environment, tuple(workers), ROWS, cells)


def checksums_of(workers: Mapping[str, Measurer]) -> dict[str, dict[str, float]]:
    """Returns the `checksums` of each column; columns without them, such as missing libraries, are left out."""
    by_column = {}
    for column, worker in workers.items():
        with contextlib.suppress(harness.NotMeasured):
            by_column[column] = worker.call("checksums")
    return by_column


def check_equal(by_column: Mapping[str, Mapping[str, float]]) -> None:
    """Checks that the checksums of all columns equal NumPy's.

    Raises:
        ValueError: a checksum differs; names the case and the column.
    """
    for column, sums in by_column.items():
        for name, checksum in sums.items():
            expected = by_column[NUMPY][name]
            if not abs(checksum - expected) <= 1e-3 * max(1.0, abs(expected)):
                raise ValueError(f"{name}: the result of {column} has the checksum {checksum}, {NUMPY}'s {expected}")


if __name__ == "__main__":
    harness.run("collectives", "The cost of mapped functions and their collectives.", measure, Effort(), QUICK)
