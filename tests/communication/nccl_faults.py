"""Programs on the engine over NCCL with a fault in the last process: ``nccl_faults.py FAULT``."""

from __future__ import annotations

import sys
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

if FAULT == "no_library":
    nccl.available = False
elif FAULT == "does_not_start":

    def refuse() -> Any:
        raise nccl.NcclError(1)

    nccl.get_unique_id = refuse
elif FAULT == "does_not_connect":

    class Refuse:
        def __init__(self, count: int, unique: Any, rank: int) -> None:
            if rank:
                raise nccl.NcclError(1)
            time.sleep(30)

    nccl.NcclCommunicator = Refuse

distributed.initialize(engine="nccl", timeout=TIMEOUT)
is_last = distributed.process_index() == distributed.process_count() - 1
x = st.asarray(np.arange(10.0), device=st.make_mesh((st.device_count(),), ("x",)))
assert float((x + 1).sum()) == 55
if is_last:
    communicator: Any = nccl.NcclCommunicator
    if FAULT == "sends_nothing":
        communicator.send = lambda *_: None
    elif FAULT == "sends_less":
        send = communicator.send
        communicator.send = lambda self, pointer, count, *rest: send(self, pointer, count - 1, *rest)
    elif FAULT == "disconnects":
        distributed.JOB.agreement.engine._link._communicator.links.close(abort=True)  # type: ignore[union-attr, attr-defined]
begin = time.monotonic()
y = st.reshard(x * 2, st.NamedSharding(x.sharding.mesh, st.P()))
queued = time.monotonic() - begin
try:
    print("read", np.asarray(y).sum())
except st.DistributedError as error:
    assert queued < TIMEOUT / 2, "the host has waited for another process"
    assert time.monotonic() - begin < TIMEOUT + 1.5
    print("refused", error)
    raise
if FAULT.startswith("sends"):
    time.sleep(TIMEOUT)  # Else this process would be the first that finds the other one late.
distributed.shutdown()
