"""A program of several processes that compares the batches of every layout with those that one process has."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import distributed
from shardtensor.data.order import shuffled
from shardtensor.errors import ArgumentError, DistributedError

KEY = st.random.key(5)
ROWS, BATCH = 61, 13
X = np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 6)


class Items:
    """Items, which know the rows that this process has read, and some of which raise errors."""

    def __init__(self, *failing: int) -> None:
        self.asked, self.failing = set[int](), failing

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, n: int) -> Any:
        if n in self.failing:
            raise OSError(5, "broken disk")
        self.asked.add(n)
        return X[n]


def rows_of(step: int) -> Any:
    epoch, k = divmod(step, -(-ROWS // BATCH))
    return shuffled(np.arange(ROWS), ROWS, KEY.seed, epoch)[k * BATCH : (k + 1) * BATCH]


def layouts() -> list[st.NamedSharding]:
    devices = np.array(st.devices())
    meshes = [st.Mesh(devices, ("x",))]
    if len(devices) % 2 == 0:
        meshes += [st.Mesh(devices.reshape(-1, 2), ("x", "y")), st.Mesh(devices.reshape(2, -1).T.copy(), ("x", "y"))]
    specs = [st.P("x"), st.P(), st.P("y", "x"), st.P(None, "x"), st.P(("y", "x"))]
    return [st.NamedSharding(m, s) for m in meshes for s in specs if all(a in m.shape for a in s.axes)]


def check(batch: Any, step: int) -> set[int]:
    """Compares the shards of this process, and returns the rows that they have."""
    rows, own = rows_of(step), set[int]()
    assert batch.shape == (len(rows), 6)
    for shard in batch.addressable_shards:
        index = shard.index
        assert np.array_equal(np.asarray(shard.data), X[rows][index]), (step, index)
        if np.asarray(shard.data).size:
            own |= {*rows[index[0]].tolist()}
    return own


def alike(path: str, stride: int) -> None:
    if distributed.process_index() == 0:
        np.save(path, X)
    distributed.sync_global_devices("written")
    for sharding in layouts()[::stride]:
        items, own = Items(), {0}
        source = {"array": X, "file": path, "items": items, "tensor": st.device_put(X, sharding)}
        with st.data.Batches(source, BATCH, key=KEY, epochs=2, sharding=sharding) as batches:
            for step, batch in enumerate(batches):
                for x in batch.values():
                    own |= check(x, step)
                if step == 1:
                    assert items.asked < {*range(ROWS)}
                assert float(batch["array"].sum()) == float(X[rows_of(step)].sum())
        assert items.asked == own, sharding  # This process has read the rows of its own devices only.
        with st.data.Batches(source, BATCH, key=KEY, epochs=2, sharding=sharding) as batches:
            batches.restore({**batches.state, "step": 7})
            check(next(batches)["items"], 7)


def fails() -> None:
    """The source of one process raises an error, of which all processes know at the same step."""
    here = distributed.process_index()
    sharding = layouts()[0]
    bad = int(rows_of(2)[0])  # The first device has it.
    batches = st.data.Batches(Items(bad) if here == 0 else Items(), BATCH, key=KEY, sharding=sharding)
    for step in range(2):
        assert float(next(batches).sum()) == float(X[rows_of(step)].sum())
    with pytest.raises((ArgumentError, DistributedError), match=r"at step 2, (?s:.)*broken disk") as caught:
        float(next(batches).sum())
    assert (caught.type is ArgumentError) == (here == 0)
    print("passed", flush=True)
    batches.close()


if __name__ == "__main__":
    distributed.initialize(timeout=20)
    if sys.argv[1] == "alike":
        alike(sys.argv[2], int(sys.argv[3]))
        print("passed", flush=True)
    else:
        fails()
    assert not [thread for thread in threading.enumerate() if thread.name == "shardtensor-batches"]
