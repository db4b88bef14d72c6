"""A program on the engine over NCCL with a fault, often of the last process: ``nccl_faults.py FAULT``."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor import distributed
from tests import fakecupy

FAULT = sys.argv[1]
TIMEOUT = 2.0

cupy = fakecupy.install(devices=4 if FAULT == "several" else 2)
import cupy.cuda.nccl as nccl  # noqa: E402 - after the double is installed


class HandlerError(TimeoutError):
    """The error of a signal handler."""


def raises(error: BaseException) -> Any:
    def function(*_: Any) -> Any:
        raise error

    return function


class Communicator(nccl.NcclCommunicator):  # type: ignore[misc]
    def __init__(self, count: int, unique: tuple[int, ...], rank: int) -> None:
        if FAULT == "does_not_connect":
            raises(nccl.NcclError(1))() if rank else time.sleep(30)
        if FAULT == "connects_late":
            time.sleep(1.5 * TIMEOUT)
        if FAULT == "unsigned" and min(unique) < 0:
            raise OverflowError("can't convert negative value to char")
        super().__init__(count, unique, rank)

    def send(self, pointer: int, count: int, *rest: Any) -> None:
        if FAULT in SILENT and is_faulty:
            return
        super().send(pointer, count - (FAULT == "sends_less" and is_faulty), *rest)

    def abort(self) -> None:
        aborted.set()
        if FAULT == "abort_hangs":
            time.sleep(30)
        super().abort()


class LateEvent(cupy.cuda.Event):  # type: ignore[misc]
    """An event of a GPU that computes for longer than the limit before it comes to the exchange."""

    def synchronize(self) -> None:
        if begin and (FAULT.startswith("busy") or (FAULT == "lags" and not is_last)):
            time.sleep(max(begin + 2 * TIMEOUT - time.monotonic(), 0))
        super().synchronize()


SILENT = {"sends_nothing", "abort_hangs", "tells_while_another_reads", "is_not_read", "group_hangs"}
aborted, begin = threading.Event(), 0.0
is_last = False
is_faulty = False  # whether this process is the last one, and the fault begins
nccl.NcclCommunicator = Communicator
cupy.cuda.Event = LateEvent
if FAULT == "no_library":
    nccl.available = False
elif FAULT == "old_library":
    nccl.get_version = lambda: 21805
elif FAULT == "does_not_start":
    nccl.get_unique_id = raises(KeyError(6))

distributed.initialize(engine="nccl", timeout=TIMEOUT, initialization_timeout=5)
is_last = distributed.process_index() == distributed.process_count() - 1
x = st.asarray(np.arange(10.0), device=st.make_mesh((st.device_count(),), ("x",)))
whole = st.NamedSharding(x.sharding.mesh, st.P())
arrived = st.reshard(x * 3, whole)
assert np.asarray(arrived).sum() == 135
here = st.arange(3.0, device=st.local_devices()[0])
if FAULT.startswith("disconnects") and is_last:
    distributed.JOB.agreement.engine._link._communicator.links.close(abort=True)  # type: ignore[union-attr, attr-defined]
elif FAULT == "group_fails" and is_last:
    nccl.groupEnd = raises(nccl.NcclError(1))
elif FAULT == "interrupted" and is_last:
    nccl.groupEnd = raises(HandlerError("of the handler"))
elif FAULT == "stays_away" and is_last:
    time.sleep(2 * TIMEOUT)
is_faulty, begin = is_last, time.monotonic()
try:
    y = st.reshard(x * 2, whole)
    queued = time.monotonic() - begin
    if FAULT == "disconnects_before_an_exchange":
        time.sleep(TIMEOUT / 2)
        distributed.sync_global_devices("later")
    if FAULT == "lags":
        if is_last:
            time.sleep(3 * TIMEOUT)
        distributed.sync_global_devices("later")
    if FAULT == "group_hangs":
        end = nccl.groupEnd
        if not is_last:
            nccl.groupEnd = lambda: (aborted.wait(), end())
        st.reshard(x * 5, whole)
    if FAULT == "tells_while_another_reads" and is_last:
        time.sleep(TIMEOUT / 4)
        job = distributed.JOB.agreement
        assert job
        job._interrupted(MemoryError("no memory"))
        raise MemoryError
    if FAULT in {"is_not_read", "busy_at_the_end"}:
        distributed.shutdown()
    print("read", np.asarray(y).sum())
except st.DistributedError as error:
    assert FAULT in {"group_fails", "interrupted", "stays_away", "group_hangs"} or queued < TIMEOUT / 2, (
        "the host has waited"
    )
    assert time.monotonic() - begin < (TIMEOUT if FAULT == "tells_while_another_reads" else 2 * TIMEOUT + 1.5)
    print("refused", error)
    with contextlib.suppress(st.DistributedError, NameError):
        print("still here", np.asarray(here).sum(), np.asarray(arrived).sum())
        print("came later", np.asarray(y).sum())
    raise
if FAULT.startswith("sends"):
    time.sleep(TIMEOUT)  # Else this process would be the first that finds the other one late.
distributed.shutdown()
