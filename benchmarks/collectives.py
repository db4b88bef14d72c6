"""What mapped functions and their collectives cost: tiny psums, moves of 64 MiB, a training step, many in a row.

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
from harness import DEVICES, NUMPY, PROJECT, Case, Row, Table, Target, Worker

TITLE = (
    f"Collectives: float32 over {DEVICES} logical devices of one host, inside of shard_map; JAX: {DEVICES} CPU devices"
)
JIT, EAGER = "JAX jit", "JAX eager"
FEATURES, HIDDEN, CLASSES = 784, 512, 10
RATE = 0.1
SIZES = "BENCHMARK_SIZES"


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        side: of the square array that is moved; a multiple of 64.
        batch: how many examples a step sees.
        row: how many collectives there are in a row.
        queued: how many calls nobody waits for.
    """

    side: int = 4096
    batch: int = 4096
    row: int = 100_000
    queued: int = 10_000

    @classmethod
    def told(cls) -> Sizes:
        """Those that this process was started with."""
        return cls(**json.loads(os.environ.get(SIZES, "{}")))


SMALL = (
    Row("scalars", "psum of 8 scalars", (Target(0.2, EAGER), Target(2, JIT))),
    Row("ten", "10 of them in one map"),
    Row("fresh", "meeting; 8 new threads", (Target(1, NUMPY),)),
    Row("kept", "meeting; 8 kept threads", (Target(1, NUMPY),)),
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
    Row("psum_scatter", "psum_scatter", (Target(1.3, NUMPY),)),
)
STEPS = (
    Row("step", "step, update follows", (Target(1.1, JIT), Target(1.05, NUMPY))),
    Row("step inside", "step, update in the map", (Target(1.1, JIT), Target(1.05, NUMPY))),
)
IN_A_ROW, GROWTH = Row("row", "100 000 psum in one map"), Row("growth", "… growth of memory", (Target(1.0),), "MiB")
QUEUED = Row("queued", "10 000 calls queued")
ROWS = (*SMALL, *MOVES, *STEPS, IN_A_ROW, GROWTH, QUEUED)


# -- what all libraries run ------------------------------------------------------------------------


def mapped(
    lib: Any, shard_map: Callable[..., Any], p: Any, mesh: Any, xp: Any, sizes: Sizes, gathers: Any
) -> dict[str, Any]:
    """The functions that are measured, in the one text that shardtensor and JAX share.

    Args:
        lib: what has the collectives.
        shard_map: the library's.
        p: its partition spec.
        mesh: the devices, along an axis ``x``.
        xp: NumPy's namespace on the arrays that blocks are.
        sizes: how large everything is.
        gathers: what `shard_map` has to be told for all_gather, whose result JAX does not know to be equal everywhere.
    """
    rows, columns, whole = p("x"), p(None, "x"), p()

    def over(f: Callable[..., Any], into: Any, **said: Any) -> Any:
        return shard_map(f, mesh=mesh, in_specs=rows, out_specs=into, **said)

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
        return loss, updated(params, grads)

    batch = {"mesh": mesh, "in_specs": (whole, rows, rows), "out_specs": whole}
    summed, stepped = shard_map(gradients, **batch), shard_map(inside, **batch)

    def step(params: Any, x: Any, t: Any) -> Any:
        loss, grads = summed(params, x, t)
        return loss, updated(params, grads)

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
    """The loss (softmax, cross-entropy) of a net with one hidden layer, as a mean over ``batch`` examples of which x
    and t (one-hot) are some, and its gradients.
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


def updated(params: Mapping[str, Any], grads: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters after a step of gradient descent."""
    return {name: params[name] - RATE * grads[name] for name in params}


def operands(np: Any, sizes: Sizes) -> tuple[Any, Any, tuple[dict[str, Any], Any, Any]]:
    """The same for all: eight numbers, the array that moves, and parameters, examples and labels of a step."""
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


def answers(np: Any, cases: Mapping[str, Case]) -> dict[str, float]:
    """One number from the result of each case, by which the libraries can be compared."""
    found = {}
    for name, case in cases.items():
        loss, params = case() if "step" in name else (case(), {})
        first, others = np.asarray(loss, dtype=np.float64), [np.asarray(params[k], np.float64) for k in sorted(params)]
        # Weights, so that elements at wrong places show.
        found[name] = float(sum(np.sum(a * np.cos(np.arange(a.size)).reshape(a.shape)) for a in (first, *others)))
    return found


# -- the cases, each function in a process of its own ----------------------------------------------


def shardtensor_cases(sizes: Sizes | None = None) -> dict[str, Case]:
    """The library itself, on the numpy backend."""
    import numpy as np

    import shardtensor as st

    sizes = sizes or Sizes.told()
    mesh = st.make_mesh((DEVICES,), ("x",))
    rows, whole = st.NamedSharding(mesh, st.P("x")), st.NamedSharding(mesh, st.P())
    few, many, (params, *examples) = operands(np, sizes)
    eight, large = st.device_put(few, rows), st.device_put(many, rows)
    batch = (st.device_put(params, whole), *[st.device_put(a, rows) for a in examples])
    own = st.shard_map(lambda b: b.copy(), mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))(large)
    given = {"scalars": (eight,), "ten": (eight,), "own": (own,), "step": batch, "step inside": batch}
    functions = mapped(st, st.shard_map, st.P, mesh, np, sizes, {})
    cases = {name: functools.partial(f, *given.get(name, (large,))) for name, f in functions.items()}
    return {
        **cases,
        "answers": lambda: answers(np, cases),
        "fresh": meeting(),
        "kept": meeting(),
        IN_A_ROW.name: lambda: in_a_row(st, mesh, np.zeros(DEVICES, np.float32), sizes.row),
        QUEUED.name: lambda: {QUEUED.name: harness.repeated(cases["scalars"], sizes.queued, np.asarray)[0]},
    }


def meeting() -> Case:
    """The engine alone: as many programs as devices, that meet once to add a number each."""
    from shardtensor.spmd.program import CollectiveCall
    from shardtensor.spmd.scheduler import run

    call = CollectiveCall("meeting")

    def add(offers: Sequence[float]) -> list[float]:
        return [sum(offers)] * DEVICES

    def task(program: Any) -> Any:
        return program.meet("here", call, DEVICES, program.number, 1.0, add)

    tasks, labels = [task] * DEVICES, [str(k) for k in range(DEVICES)]
    return lambda: run(tasks, labels)


def in_a_row(st: Any, mesh: Any, x: Any, times: int) -> dict[str, float | None]:
    """Seconds for so many collectives in one mapped function, and by how much the process grows at most meanwhile."""
    most: list[int] = []

    def chain(b: Any, times: int) -> Any:
        for i in range(times):
            b = st.psum(b, "x")
            if not i % 1000:
                most.append(harness.resident_bytes() or 0)
        return b

    call = st.shard_map(chain, mesh=mesh, in_specs=(st.P("x"), None), out_specs=st.P())
    call(x, 1000)
    before = harness.resident_bytes()
    most.clear()
    seconds = timeit.timeit(lambda: call(x, times), number=1)
    return {IN_A_ROW.name: seconds, GROWTH.name: None if before is None else max(0, max(most) - before) / 2**20}


def numpy_cases(sizes: Sizes | None = None) -> dict[str, Case]:
    """What can be done by hand on one plain array: for the moves, one copy pass over the bytes that must move."""
    import numpy as np

    sizes = sizes or Sizes.told()
    few, large, batch = operands(np, sizes)
    warm = np.ones_like(large)
    # A reduction reads everything, and writes an eighth into new memory. A copy that reads and writes as much together
    # copies 9/16 of the array: 2/16 into new memory, the others into used.
    used, new = slice(0, sizes.side * 7 // 16), slice(sizes.side * 7 // 16, sizes.side * 9 // 16)

    def reduction() -> Any:
        np.copyto(warm[used], large[used])
        return np.array(large[new])

    def step() -> Any:
        params, *examples = batch
        loss, grads = backward(np, params, *examples, sizes.batch)
        return loss, updated(params, grads)

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
        "answers": lambda: answers(np, {k: lambda v=v: v for k, v in by_hand().items()} | steps),
        "blas": harness.blas_kernel,
    }


def fresh_threads() -> Case:
    """A thread for each device, that ends when all have met."""

    def meet() -> list[float]:
        met = Met()
        threads = [threading.Thread(target=met.add, args=(k,)) for k in range(DEVICES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return met.results

    return meet


def kept_threads() -> Case:
    """The same of threads that wait for work."""
    pool = ThreadPoolExecutor(DEVICES)

    def meet() -> list[float]:
        met = Met()
        for done in [pool.submit(met.add, k) for k in range(DEVICES)]:
            done.result()
        return met.results

    return meet


class Met:
    """Threads that meet once to add a number each."""

    def __init__(self) -> None:
        self.offers = [0.0] * DEVICES
        self.results = [0.0] * DEVICES
        self.total = 0.0
        self.barrier = threading.Barrier(DEVICES, self.reduce)

    def reduce(self) -> None:
        """What the last one does for all."""
        self.total = sum(self.offers)

    def add(self, k: int) -> None:
        """What each one does."""
        self.offers[k] = 1.0
        self.barrier.wait()
        self.results[k] = self.total


def jit_cases(sizes: Sizes | None = None) -> dict[str, Case]:
    """JAX, compiled. Every case waits for its result."""
    import jax

    return jax_cases(sizes or Sizes.told(), jax.jit)


def eager_cases(sizes: Sizes | None = None) -> dict[str, Case]:
    """JAX as it runs without jit. Every case waits for its result."""
    return jax_cases(sizes or Sizes.told(), lambda f: f)


def jax_cases(sizes: Sizes, compiled: Callable[[Any], Any]) -> dict[str, Case]:
    """JAX on virtual CPU devices."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    few, many, (params, *examples) = operands(np, sizes)
    eight, large = jax.device_put(few, rows), jax.device_put(many, rows)
    batch = (jax.device_put(params, whole), *[jax.device_put(a, rows) for a in examples])
    given = {"scalars": (eight,), "ten": (eight,), "step": batch, "step inside": batch}
    # A collective's result is known to be equal everywhere, but for all_gather's.
    functions = mapped(jax.lax, jax.shard_map, PartitionSpec, mesh, jax.numpy, sizes, {"check_vma": False})
    called = {name: functools.partial(compiled(f), *given.get(name, (large,))) for name, f in functions.items()}

    def waited(call: Case) -> Case:
        return lambda: jax.block_until_ready(call())

    cases = {name: waited(call) for name, call in called.items()}
    if compiled is not jax.jit:  # a step takes seconds
        cases = {name: case for name, case in cases.items() if "step" not in name}
    found: dict[str, Case] = {**cases, "answers": lambda: answers(np, cases)}
    if compiled is jax.jit:

        def chain(b: Any) -> Any:
            return jax.lax.fori_loop(0, sizes.row, lambda i, b: jax.lax.psum(b, "x"), b)

        once = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=rows.spec, out_specs=whole.spec, check_vma=False))
        zeros = jax.device_put(np.zeros(DEVICES, np.float32), rows)
        ready = once.lower(zeros).compile()
        found[IN_A_ROW.name] = lambda: {
            IN_A_ROW.name: timeit.timeit(lambda: ready(zeros).block_until_ready(), number=1), GROWTH.name: None
        }  # fmt: skip
        found[QUEUED.name] = lambda: {
            QUEUED.name: harness.repeated(called["scalars"], sizes.queued, jax.block_until_ready)[0]
        }
    return found


# -- the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """How many rounds each kind of row gets, and for how many seconds the long rows are waited for."""

    small: int = 40
    moves: int = 25
    steps: int = 25
    helper_delay: float = 90.0


QUICK = Effort(small=10, moves=7, steps=5, helper_delay=30.0)


class Measurer(Protocol):
    """A `Worker`, or what stands in for one in a test."""

    def sample(self, case: str) -> float:
        """Seconds per call of a case."""

    def call(self, case: str, limit: float = ...) -> Any:
        """What a case gives."""


def workers(sizes: Sizes) -> contextlib.AbstractContextManager[dict[str, Worker]]:
    """Starts, for each column, a worker with the cases of a library."""
    told = {SIZES: json.dumps(dataclasses.asdict(sizes))}
    jax = told | harness.virtual_devices(DEVICES)
    return harness.started(
        {
            PROJECT: ("shardtensor", "collectives:shardtensor_cases", told | harness.logical_devices(DEVICES)),
            NUMPY: ("numpy", "collectives:numpy_cases", told),
            JIT: ("jax", "collectives:jit_cases", jax),
            EAGER: ("jax", "collectives:eager_cases", jax),
        }
    )


def measure(effort: Effort, sizes: Sizes = Sizes()) -> Table:
    """Measures everything once through."""
    with workers(sizes) as found:
        return measured(effort, found)


def measured(effort: Effort, found: Mapping[str, Measurer]) -> Table:
    """Measures everything with these workers, once they have shown that they compute the same."""
    environment = harness.describe_environment(("numpy", "jax", "greenlet", "shardtensor")) | {
        "BLAS": found[NUMPY].call("blas"),
        "rounds": f"small {effort.small}, moves {effort.moves}, steps {effort.steps}, the last three rows 1",
    }
    agree({column: told for column, worker in found.items() if (told := known(worker))})
    cells: harness.Cells = {}
    groups = (SMALL, effort.small, "psum, meetings"), (MOVES, effort.moves, "64 MiB"), (STEPS, effort.steps, "steps")
    for rows, rounds, what in groups:
        cells |= harness.sample_cases([row.name for row in rows], found, rounds, what)
    for rows, case in (((IN_A_ROW, GROWTH), IN_A_ROW.name), ((QUEUED,), QUEUED.name)):
        for column, worker in found.items():  # queues come last: JAX's virtual devices may deadlock in theirs
            cells |= harness.call_once(worker, column, case, [row.name for row in rows], effort.helper_delay)
    return Table(TITLE, environment, tuple(found), ROWS, cells)


def known(worker: Measurer) -> dict[str, float]:
    """A worker's `answers`; none where its library is not installed."""
    with contextlib.suppress(harness.NoFigure):
        found: dict[str, float] = worker.call("answers")
        return found
    return {}


def agree(told: Mapping[str, Mapping[str, float]]) -> None:
    """That all libraries have computed the same.

    Raises:
        ValueError: they have not.
    """
    for column, found in told.items():
        for name, figure in found.items():
            expected = told[NUMPY][name]
            if not abs(figure - expected) <= 1e-3 * max(1.0, abs(expected)):
                raise ValueError(f"{name}: {column} has {figure}, {NUMPY} {expected}")


if __name__ == "__main__":
    harness.run("collectives", "What mapped functions and their collectives cost.", measure, Effort(), QUICK)
