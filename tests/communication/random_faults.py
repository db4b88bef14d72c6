"""A program with one random fault in one of its processes: ``random_faults.py SEED``. The seed determines the kind of the
fault, the process, and the point of a small program of operators, writes, collectives, reshards and gathers.

`Fault.drawn` returns the fault of a seed, for the test that knows what has to be printed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import shardtensor as st
from shardtensor import distributed
from tests.communication import faults

LIMIT = 3.0
"""Seconds that each exchange waits."""

MESSAGE = "of the fault"
"""What the exceptions of faults say."""

RAISED = (
    "outside",
    "memory",
    "inside",
    "handler_timeout",
    "handler_connection",
    "handler_runtime",
    "in_map",
    "callback",
)
"""Kinds in which an exception with `MESSAGE` ends the process."""

KILLED = {"os_exit": "exit status 7", "sigkill": "signal 9", "sigterm": "signal 15"}
"""Kinds in which the process ends without a line of its own, and how the launcher names the end."""

DIFFERENT = ("left_out", "other_call", "other_order", "early_end", "sys_exit")
"""Kinds in which the calls of the process are other ones."""

STUCK = ("sigstop", "stalled")
"""Kinds in which the process does not come."""

OPERANDS = ("other_operand", "other_target", "other_executor")
"""Kinds in which tensors or executors are other ones, with the same shapes."""

KINDS = (*RAISED, *KILLED, *DIFFERENT, *STUCK, "sigint", *OPERANDS)


class Fault(NamedTuple):
    """A fault.

    Attributes:
        kind: what happens; one of `KINDS`.
        engine: the engine.
        processes: the number of processes.
        rank: the process in which it happens.
        step: the number of the step of the program before which it happens.
    """

    kind: str
    engine: str
    processes: int
    rank: int
    step: int

    @staticmethod
    def drawn(seed: int) -> Fault:
        """Returns the fault of a seed; successive seeds have all kinds in turn."""
        dice = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        processes = dice.choice((2, 3))
        engine = ("mpi", "gloo")[seed // len(KINDS) % 2]
        return Fault(kind, engine, processes, dice.randrange(processes), dice.randrange(len(STEPS)))


class State:
    """The tensors of the program, all of one shape and layout."""

    def __init__(self) -> None:
        n = len(st.devices())
        self.mesh = st.make_mesh((n,), ("d",))
        self.rows = st.NamedSharding(self.mesh, st.P("d"))
        self.x, self.y = (st.device_put(np.arange(4.0 * n).reshape(2 * n, 2) + k, self.rows) for k in range(2))


def add(s: State) -> None:
    s.x = s.x + s.y


def write(s: State) -> None:
    s.x[1:-1] = 0.5 * s.y[1:-1]


def collective(s: State) -> None:
    f = st.shard_map(lambda b: b - st.pmean(b, "d"), mesh=s.mesh, in_specs=st.P("d"), out_specs=st.P("d"))
    s.y = f(s.x)


def reshard(s: State) -> None:
    s.y = st.reshard(st.reshard(s.y, st.NamedSharding(s.mesh, st.P(None, "d"))), s.rows)


def gather(s: State) -> None:
    distributed.process_allgather(np.arange(3.0))


def whole(s: State) -> None:
    distributed.process_allgather(s.x)


def total(s: State) -> None:
    float(s.x.sum())


STEPS: tuple[Callable[[State], None], ...] = (add, write, collective, reshard, gather, whole, total, write, gather)


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    """A function, or a signal handler, that raises an exception."""

    def function(*_: object) -> Any:
        raise kind(MESSAGE)

    return function


def in_a_wait(kind: type[BaseException]) -> None:
    """Raises an exception in a handler while this process waits for the others, which come later."""
    signal.signal(signal.SIGALRM, raising(kind))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    distributed.sync_global_devices("the others come later")


def in_map(s: State) -> None:
    st.shard_map(raising(ValueError), mesh=s.mesh, in_specs=st.P("d"), out_specs=st.P("d"))(s.x)


def callback(s: State) -> None:
    distributed.make_array_from_callback(s.x.shape, s.rows, raising(FileNotFoundError))


def other_order(s: State) -> None:
    distributed.sync_global_devices("b")
    distributed.sync_global_devices("a")


def stalled(s: State) -> None:
    while True:
        time.sleep(0.01)


HANDLED: dict[str, type[BaseException]] = {
    "inside": ValueError, "handler_timeout": TimeoutError, "handler_connection": ConnectionError,
    "handler_runtime": RuntimeError,
}  # fmt: skip

HERE: dict[str, Callable[[State], Any]] = {
    "outside": raising(ValueError),
    "memory": raising(MemoryError),
    **{name: (lambda s, kind=kind: in_a_wait(kind)) for name, kind in HANDLED.items()},
    "in_map": in_map,
    "callback": callback,
    "os_exit": lambda s: os._exit(7),
    "sigkill": lambda s: faults.killed(),
    "sigterm": lambda s: os.kill(os.getpid(), signal.SIGTERM),
    "sigint": lambda s: faults.interrupted(),
    "sigstop": lambda s: faults.stopped(),
    "stalled": stalled,
    "left_out": lambda s: None,
    "other_call": lambda s: distributed.sync_global_devices("another call"),
    "other_order": other_order,
    "early_end": lambda s: sys.exit(0),
    "sys_exit": lambda s: sys.exit(5),
    "other_operand": lambda s: s.y - s.x,
    "other_target": lambda s: s.y.__setitem__(slice(0, 2), 1.0),
    "other_executor": lambda s: st.jit(lambda x: st.exp(x) + 1, executor="numpy")(s.x),
}
"""What the process with the fault does."""

ELSEWHERE: dict[str, Callable[[State], Any]] = {
    **dict.fromkeys(HANDLED, lambda s: time.sleep(1.5)),
    "in_map": lambda s: st.shard_map(lambda b: b, mesh=s.mesh, in_specs=st.P("d"), out_specs=st.P("d"))(s.x),
    "callback": lambda s: distributed.make_array_from_callback(
        s.x.shape, s.rows, lambda index: np.zeros(s.x.shape)[index]
    ),
    "left_out": lambda s: distributed.sync_global_devices("a call"),
    "other_call": lambda s: distributed.sync_global_devices("a call"),
    "other_order": lambda s: [distributed.sync_global_devices(name) for name in "ab"],
    "other_operand": lambda s: s.x - s.y,
    "other_target": lambda s: s.x.__setitem__(slice(0, 2), 1.0),
    "other_executor": lambda s: st.jit(lambda x: st.exp(x) + 1)(s.x),
}
"""What the others do at the same point."""


def main(seed: int) -> None:
    """Runs the program with the fault of a seed."""
    fault = Fault.drawn(seed)
    distributed.initialize(timeout=LIMIT)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    assert all(line.endswith("(deleted)") for line in mapped), mapped  # Memory with a name would outlive the job.
    state = State()
    for number, step in enumerate(STEPS):
        if number == fault.step:
            does = HERE if distributed.process_index() == fault.rank else ELSEWHERE
            does.get(fault.kind, lambda s: None)(state)
        step(state)
    distributed.shutdown()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]))
