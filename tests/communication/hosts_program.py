"""A program on two hosts, which exchanges arrays and uses a tensor that spans them.

It then ends (``core``) or continues until the connection is lost (``down``). Its arguments are one of these words, the
folder for the output of each process, the number of processes, and, without a launcher, the address of process 0 and the
number of the process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import shardtensor as st
from shardtensor import distributed

EVENT, FOLDER, PROCESSES, *REST = sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
ADDRESS, NUMBER = (REST[0], int(REST[1])) if REST else (None, None)
LIMIT = 3.0 if EVENT == "down" else 60.0


def exchange() -> None:
    own, count = distributed.process_index(), distributed.process_count()
    assert count == PROCESSES
    distributed.sync_global_devices("start")
    rows = distributed.process_allgather(np.full((own + 1, 3), own), tiled=True)
    np.testing.assert_array_equal(rows[:, 0], np.repeat(np.arange(count), np.arange(1, count + 1)))
    large = np.random.default_rng(own).random(1 << 20)  # 8 MiB: more than a buffer of a connection holds.
    received = distributed.process_allgather(large)
    np.testing.assert_array_equal(received, [np.random.default_rng(k).random(1 << 20) for k in range(count)])
    for root in range(count):
        sent = distributed.broadcast_one_to_all({"w": large[:1000] + own}, own == root)
        np.testing.assert_array_equal(sent["w"], received[root][:1000] + root)
    distributed.assert_equal(received)


def span() -> None:
    """Uses a tensor that spans the hosts."""
    mesh = st.make_mesh((st.device_count(),), ("x",))
    assert {d.process_index for d in mesh.flat} == set(range(PROCESSES))
    rows, columns = (st.NamedSharding(mesh, spec) for spec in (st.P("x"), st.P(None, "x")))
    whole = np.arange(35.0).reshape(7, 5)
    x = distributed.make_array_from_callback(whole.shape, rows, whole.__getitem__)
    assert float(x.sum()) == whole.sum()
    np.testing.assert_array_equal(distributed.process_allgather(x @ whole.T), whole @ whole.T)
    np.testing.assert_array_equal(distributed.process_allgather(x.T @ x), whole.T @ whole)
    y = st.reshard(x, columns)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
    for root in range(PROCESSES):
        found = distributed.gather_to(y, root)
        assert (found is None) == (distributed.process_index() != root)
        assert found is None or np.array_equal(found, whole)


if __name__ == "__main__":
    distributed.initialize(ADDRESS, PROCESSES if ADDRESS else None, NUMBER, timeout=LIMIT)
    # A launcher would send the output over the connection, which may be lost.
    sys.stdout = sys.stderr = (Path(FOLDER) / f"{distributed.process_index()}.txt").open("w", buffering=1)
    exchange()
    span()
    print(f"exchanged from {os.listdir('/sys/class/net')}")
    if EVENT == "down":
        while True:  # Ends with an error when the test takes the connection down.
            distributed.sync_global_devices("again")
            time.sleep(0.05)
    print("done")
