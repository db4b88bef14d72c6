"""A program in which the last process behaves differently from the others: it fails, stops, or makes other calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.communication.between_processes.agreement import Agreement
from shardtensor.communication.between_processes.processes import JOB
from shardtensor.errors import DistributedError

LIMIT = 2.0


def before() -> None:
    distributed.sync_global_devices("start")
    gathered = distributed.process_allgather(np.array([distributed.process_index()]), tiled=True)
    assert gathered.tolist() == list(range(distributed.process_count()))


def after() -> None:
    distributed.process_allgather(np.zeros(3))


def raises() -> None:
    raise ValueError("no such file\nnor another one")  # Two lines, because a report prints a message on one line.


def exits() -> None:
    sys.exit(0)


def other_order() -> None:
    distributed.sync_global_devices("b")
    distributed.sync_global_devices("a")


def other_shape() -> None:
    distributed.process_allgather(np.zeros(4))


def other_dtype() -> None:
    distributed.process_allgather(np.zeros(3, np.float32))


def extra_call() -> None:
    distributed.assert_equal(np.zeros(3))
    after()


def missing_call() -> None:
    """The process ends without the last call."""


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_soon() -> None:
    """The process is killed while it makes the same calls as the others, or while all are idle, or compute."""
    threading.Timer(0.3, killed).start()
    others(EVENT)


def others(event: str) -> None:
    """What the other processes do while one of them is killed."""
    if event == "killed_in_a_collective":
        while True:
            after()
    begin = time.monotonic()
    while time.monotonic() < begin + 1 + distributed.process_index() / 4:
        if event == "killed_while_computing":
            np.ones((200, 200)) @ np.ones((200, 200))
        else:
            time.sleep(0.05)
    after()


killed_in_a_collective = killed_while_idle = killed_while_computing = killed_soon


def reads_an_element() -> None:
    """It is in process 0, and no read communicates, so that only this process raises an error."""
    mesh = st.make_mesh((st.device_count(),), ("x",))
    float(st.device_put(np.arange(2.0 * st.device_count()), st.NamedSharding(mesh, st.P("x")))[0])


def reads_all_elements() -> None:
    """The sum is not what the others call next."""
    mesh = st.make_mesh((st.device_count(),), ("x",))
    x = st.device_put(np.arange(2.0 * st.device_count()), st.NamedSharding(mesh, st.P("x")))
    if bool((x > 3).any()):
        after()


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupted() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(10)


def unread() -> None:
    """Stops the process that reads this one's output, its parent under MPI, while this process ends."""
    reader = os.getppid()
    subprocess.Popen(["sh", "-c", f"kill -STOP {reader}; sleep 1; kill -CONT {reader}"], start_new_session=True)
    time.sleep(0.3)
    sys.exit(0)


def late() -> None:
    time.sleep(LIMIT + 4)
    after()


def error_is_handled() -> None:
    try:
        raises()
    except ValueError:
        distributed.sync_global_devices("after the error")


def many_calls() -> None:
    for _ in range(100):  # The reports keep fewer calls.
        distributed.sync_global_devices("again")


def prints_much() -> None:
    print("x" * (1 << 20))
    after()


def two_threads() -> None:
    other = threading.Thread(target=after)
    other.start()
    other.join(0.2)
    after()


DIFFERENT = ("other_shape", "other_dtype", "extra_call", "error_is_handled", "many_calls")
"""Events in which the last process makes other calls."""


def catch_each() -> None:
    """Prints the error of each event in which calls differ: all in one job, each with a history of calls of its own."""
    engine = JOB.agreement.engine
    for event in DIFFERENT:
        JOB.agreement = Agreement(engine, LIMIT)
        before()
        try:
            (globals()[event] if last else after)()
        except DistributedError as error:
            print(f"{event}: {error}")
    JOB.agreement = Agreement(engine, LIMIT)


if __name__ == "__main__":
    EVENT = sys.argv[1]
    distributed.initialize(timeout=LIMIT)
    before()
    last = distributed.process_index() == distributed.process_count() - 1
    if EVENT == "catch_each":
        catch_each()
    elif last:
        globals()[EVENT]()
    elif EVENT == "other_order":
        distributed.sync_global_devices("a")
        distributed.sync_global_devices("b")
    elif EVENT.startswith("killed_"):
        others(EVENT)
    elif EVENT.startswith("reads_"):
        mesh = st.make_mesh((st.device_count(),), ("x",))
        st.device_put(np.arange(2.0 * st.device_count()), st.NamedSharding(mesh, st.P("x"))).sum()
    elif EVENT == "two_threads":
        time.sleep(0.5)
        after()
    else:
        after()
    print("done")
