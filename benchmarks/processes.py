"""The cost of two processes, compared with one process, with mpi4py called by hand, and with JAX over gloo.

``python benchmarks/processes.py [--quick] [--out DIR] [--label LABEL]``; README.md says how to read the table. The
cases of the first three columns are interleaved in the same two processes, which shardtensor's launcher starts on MPI;
JAX has two processes of its own, on the Python of the peers. By hand, the sum is an Iallgather of a header and an
Allreduce. The reshard is from rows to columns, both of uneven sizes. The start is measured without the time of ``import
numpy``.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import machine
import peers
import tables
from harness import PROJECT, NotMeasured
from tables import Cell, Row, Table, Target

TITLE = "Two processes on one host, one device each, over MPI"
BY_HAND, ALONE, JAX = "mpi4py", "1 process", "JAX (gloo)"
MIB = 1 << 20

JAX_LIMIT = 300.0
"""The seconds after which the processes of JAX are killed."""

ROWS = (
    Row("add", "x + x, local", (Target(1.0, ALONE, 1e-6),)),
    Row("sum", "sum of 8 bytes", (Target(1.0, BY_HAND, 50e-6),)),
    Row("all-reduce", "all-reduce, 64 MiB", (Target(1.3, BY_HAND), Target(1.0, JAX))),
    Row("reshard", "reshard, 125 MiB", (Target(1.3, BY_HAND),)),
    Row("step", "data-parallel step", (Target(1.1, BY_HAND),)),
    Row("start", "start, 4 processes", (Target(1.0),)),
)


@dataclass(frozen=True)
class Effort:
    """The number of samples of each case."""

    rounds: int = 9


QUICK = Effort(rounds=2)


# -- in the processes ------------------------------------------------------------------------------


def shardtensor_and_mpi(rounds: int) -> dict[str, list[float]]:
    """Measures shardtensor and mpi4py in one of the two processes; returns the seconds by row and column."""
    import numpy as np
    from mpi4py import MPI

    import shardtensor as st

    st.distributed.initialize()
    world, rank, count = MPI.COMM_WORLD.Dup(), st.distributed.process_index(), st.distributed.process_count()
    mesh, rows = st.make_mesh((count,), ("d",)), st.P("d")
    split = st.NamedSharding(mesh, rows)
    own = st.make_mesh((1,), ("d",), devices=st.local_devices())
    tiny, here = st.ones(count * 8, device=split), st.ones(8, device=own)
    record, records = np.zeros(40, np.uint8), np.zeros((count, 40), np.uint8)
    one, total = np.zeros(1), np.zeros(1)
    long = np.full(64 * MIB // 8, float(rank))
    stacked = st.distributed.make_array_from_process_local_data(split, long[None], (count, long.size))
    summed = np.empty_like(long)
    reduced = st.shard_map(lambda a: st.psum(a, "d"), mesh=mesh, in_specs=rows, out_specs=st.P())
    wide = st.ones((4001, 4099), device=split)
    columns = st.NamedSharding(mesh, st.P(None, "d"))
    part = np.ones((4001 * (rank + 1) // count - 4001 * rank // count, 4099))
    data, weights = np.random.default_rng(rank).normal(size=(20_000, 64)), np.zeros((64, 10))
    x = st.distributed.make_array_from_process_local_data(split, data)
    target = st.distributed.make_array_from_process_local_data(split, data[:, :10].copy())
    w = st.device_put(weights, st.NamedSharding(mesh, st.P()))
    train = st.shard_map(
        lambda w, x, y: w - 1e-6 * st.psum(x.T @ (x @ w - y), "d"),
        mesh=mesh,
        in_specs=(st.P(), rows, rows),
        out_specs=st.P(),
    )

    def by_hand_sum() -> None:
        world.Iallgather(record, records).Wait()
        world.Allreduce(one, total)

    def by_hand_step() -> None:
        gradient, summed_gradient = data.T @ (data @ weights - data[:, :10]), np.empty((64, 10))
        world.Allreduce(gradient, summed_gradient)
        weights - 1e-6 * summed_gradient

    cases: dict[str, tuple[Callable[[], Any], int]] = {
        f"add {PROJECT}": (lambda: tiny + tiny, 500),
        f"add {ALONE}": (lambda: here + here, 500),
        f"sum {PROJECT}": (lambda: tiny.sum(), 100),
        f"sum {BY_HAND}": (by_hand_sum, 100),
        f"all-reduce {PROJECT}": (lambda: reduced(stacked), 1),
        f"all-reduce {BY_HAND}": (lambda: world.Allreduce(long, summed), 1),
        f"reshard {PROJECT}": (lambda: st.reshard(wide, columns), 1),
        f"reshard {BY_HAND}": (lambda: _by_alltoallv(world, part, np), 1),
        f"step {PROJECT}": (lambda: train(w, x, target), 5),
        f"step {BY_HAND}": (by_hand_step, 5),
    }
    samples: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, (call, times) in cases.items():
            st.distributed.sync_global_devices(name)
            begin = time.perf_counter()
            for _ in range(times):
                call()
            if turn:  # The first turn makes plans and allocates memory, and is not counted.
                samples.setdefault(name, []).append((time.perf_counter() - begin) / times)
    st.distributed.shutdown()
    return samples


def _by_alltoallv(world: Any, part: Any, np: Any) -> Any:
    """Reshards rows to columns with one all-to-all of blocks that are packed by hand."""
    count, (rows, width) = world.Get_size(), part.shape
    cuts = [width * k // count for k in range(count + 1)]
    mine = cuts[world.Get_rank() + 1] - cuts[world.Get_rank()]
    heights = np.array(world.allgather(rows))
    packed = np.concatenate([part[:, a:b].ravel() for a, b in itertools.pairwise(cuts)])
    out = np.empty((int(heights.sum()), mine))
    sent = [rows * (b - a) for a, b in itertools.pairwise(cuts)]
    world.Alltoallv([packed, sent], [out, (heights * mine).tolist()])
    return out


def jax_cases(rounds: int, address: str, rank: int) -> dict[str, list[float]]:
    """Measures the all-reduce of JAX in one of two processes; returns seconds by row and column."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    mesh = jax.make_mesh((2,), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.make_array_from_process_local_data(sharding, np.ones((1, 16 * MIB), np.float32))
    total = jax.jit(
        lambda a: jnp.sum(a, axis=0), out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        total(x).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return {f"all-reduce {JAX}": seconds[1:]}


# -- the run ---------------------------------------------------------------------------------------


def measure(effort: Effort) -> Table:
    """Measures the whole table."""
    samples, problem = _measure_launched(effort.rounds), tables.NOT_APPLICABLE
    try:
        samples |= _measure_jax(effort.rounds)
    except NotMeasured as reason:
        problem = str(reason)
    samples[f"start {PROJECT}"] = [_start_seconds() for _ in range(effort.rounds)]
    cells = {("all-reduce", JAX): Cell(problem=problem)}
    for row in ROWS:
        for column in (PROJECT, BY_HAND, ALONE, JAX):
            if seconds := samples.get(f"{row.name} {column}"):
                cells[row.name, column] = Cell(tuple(seconds))
    environment = machine.describe_environment(("numpy", "mpi4py", "mpich", "jax", "shardtensor"))
    environment["rounds"] = str(effort.rounds)
    return Table(TITLE, environment, (PROJECT, BY_HAND, ALONE, JAX), ROWS, cells, (ALONE,))


def _measure_launched(rounds: int) -> dict[str, list[float]]:
    """Runs `shardtensor_and_mpi` in two processes and returns the samples of process 0."""
    from shardtensor import launcher

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        lines: list[str] = []
        command = [sys.executable, __file__, "--inside", str(rounds), str(path)]
        environ = {"SHARDTENSOR_NUM_DEVICES": "1", "OMP_NUM_THREADS": "1"}
        status = launcher.launch(command, 2, "mpi", timeout=600, environ=environ, output=lines.append)
        if status:
            raise RuntimeError("\n".join(lines))
        return dict(json.loads(path.read_text()))


def _measure_jax(rounds: int) -> dict[str, list[float]]:
    """Runs `jax_cases` in two processes on the Python of the peers and returns the samples of process 0.

    Raises:
        NotMeasured: JAX is not installed there, or a process has failed, which is printed.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"

    def run(rank: int) -> None:
        arguments = [__file__, "--jax", str(rounds), str(path), address, str(rank)]
        peers.run(peers.python(), arguments, limit=JAX_LIMIT)

    try:
        if not peers.is_installed("jax"):
            raise NotMeasured(peers.MISSING)
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
            path = Path(folder) / "samples.json"
            list(pool.map(run, range(2)))
            return dict(json.loads(path.read_text()))
    except peers.PeerError as error:
        print(error, file=sys.stderr)
        raise NotMeasured("failed") from error


def _start_seconds() -> float:
    """Returns the seconds of a job of four processes that connect and end, minus those of ``import numpy`` in one."""
    from shardtensor import launcher

    program = "import shardtensor as st; st.distributed.initialize(); st.distributed.shutdown()"
    begin = time.perf_counter()
    launcher.launch([sys.executable, "-c", program], 4, "mpi", environ={"SHARDTENSOR_NUM_DEVICES": "1"})
    middle = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy"], check=True)
    return middle - begin - (time.perf_counter() - middle)


def _run_process(arguments: list[str]) -> None:
    """Runs the program of a process that measures; process 0 writes its samples to a file."""
    kind, rounds, path, *others = arguments
    samples = (
        shardtensor_and_mpi(int(rounds)) if kind == "--inside" else jax_cases(int(rounds), others[0], int(others[1]))
    )
    rank = int(others[1]) if others else int(os.environ["PMI_RANK"])
    if rank == 0:
        Path(path).write_text(json.dumps(samples))
        print({name: statistics.median(seconds) for name, seconds in samples.items()}, file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] in (["--inside"], ["--jax"]):
        _run_process(sys.argv[1:])
    else:
        harness.run("processes", "The cost of two processes.", measure, Effort(), QUICK)
