"""A program of several processes that saves or restores a tree, in layouts that follow from numbers of devices."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest

import shardtensor as st
from shardtensor.backend.small_floats import SMALL_FLOATS
from shardtensor.errors import DistributedError
from shardtensor.files.chunk_grids import size_of
from shardtensor.files.zarr import ZarrArray

DTYPES = ("bool", "int8", "uint64", "float16", "float32", "float64", "complex64", "complex128", "M8[s]", *SMALL_FLOATS)


def values() -> dict[str, Any]:
    """The elements that are saved, by the names of the leaves."""
    rng, tree = np.random.default_rng(0), {}
    for name in DTYPES:
        dtype = np.dtype(getattr(st, name, name))
        bits = rng.random((13, 5)) < 0.5 if name == "bool" else np.frombuffer(rng.bytes(65 * dtype.itemsize), dtype)
        tree[name.replace("[", "").replace("]", "")] = bits.reshape(13, 5)
    tree["long"] = rng.integers(0, 9, 1_000_003).astype("i4")
    tree["wide"] = rng.normal(size=(3, 400_001)).astype("f4")
    tree["none"] = np.empty((0, 4))
    tree["one"] = np.array(3.5)
    return tree


def layouts(count: int) -> list[st.NamedSharding]:
    """Layouts of tensors of two dimensions on so many devices."""
    devices = np.array(st.devices()[:count])
    meshes = [st.Mesh(devices, ("x",))]
    if count % 2 == 0:
        meshes.append(st.Mesh(devices.reshape(-1, 2), ("x", "y")))
        meshes.append(st.Mesh(devices.reshape(-1, 2)[::-1].T.copy(), ("y", "x")))
    specs = [st.P("x"), st.P(None, "x"), st.P(), st.P("x", "y"), st.P("y"), st.P(None, ("y", "x"))]
    return [st.NamedSharding(m, s) for m in meshes for s in specs if all(a in m.shape for a in s.axes)]


def fitting(sharding: st.NamedSharding, x: Any) -> st.NamedSharding:
    return st.NamedSharding(sharding.mesh, st.P(*tuple(sharding.spec)[: x.ndim]))


def check(found: Any, wanted: Any, name: str) -> None:
    """Compares the shards of this process, to the bit."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    for shard in found.addressable_shards:
        here = np.asarray(shard.data)
        assert here.tobytes() == np.ascontiguousarray(wanted[shard.index]).tobytes(), (name, shard.index)


def tree_of(number: int) -> dict[str, Any]:
    """The tree, of which each leaf has another layout than in the tree of another number."""
    known = layouts(len(st.devices()))
    return {
        name: st.device_put(x, fitting(known[(number + k) % len(known)], x))
        for k, (name, x) in enumerate(values().items())
    }


def save(path: str) -> None:
    for number in range(3):
        st.checkpoint.save(
            os.path.join(path, str(number)), {"tree": tree_of(number), "step": number, "host": np.arange(4)}
        )
    here = st.process_index()
    local = st.asarray(np.arange(3.0), device=st.local_devices()[0])
    st.checkpoint.save(os.path.join(path, "local"), {"local": local, "key": st.random.key(1)}, wait=False)
    found = st.checkpoint.restore(os.path.join(path, "0"), {"tree": None, "step": 0, "host": None})
    st.checkpoint.wait()
    for name, x in values().items():
        check(found["tree"][name], x, name)
    found = st.checkpoint.restore(os.path.join(path, "local"), {"local": local, "key": st.random.key(0)})
    assert found["local"].device == st.local_devices()[0]
    for leaf, text in (
        ({"a": [here]}, "the leaf a/0"),
        ({"h": np.arange(3) + here}, "the leaf h"),
        (local + here, "value"),
    ):
        with pytest.raises(DistributedError, match=text):
            st.checkpoint.save(os.path.join(path, "other"), leaf)
    with pytest.raises(DistributedError, match="the path"):
        st.checkpoint.save(os.path.join(path, f"other{here}"), 1)


def restore(path: str) -> None:
    known = layouts(len(st.devices()))
    for number in range(3):
        for sharding in known[number::3]:
            like = {"tree": {name: fitting(sharding, x) for name, x in values().items()}, "step": 0, "host": None}
            found = st.checkpoint.restore(os.path.join(path, str(number)), like)
            for name, x in values().items():
                check(found["tree"][name], x, name)
                assert found["tree"][name].sharding == fitting(sharding, x)
            assert (found["step"], found["host"].tolist()) == (number, [0, 1, 2, 3])
    if (count := st.process_count()) > 1:  # What all need is read once by all together, and sent.
        like = st.NamedSharding(known[0].mesh, st.P())
        with mock.patch.object(ZarrArray, "read", autospec=True, side_effect=ZarrArray.read) as read:
            wide = st.checkpoint.restore(os.path.join(path, "0"), device=like, only="tree/wide")["tree"]["wide"]
        check(wide, values()["wide"], "wide")
        boxes = [call.args[1] for call in read.call_args_list]
        assert 0 < sum(map(size_of, boxes)) <= 1.1 * wide.size / count, boxes
    found = st.checkpoint.restore(os.path.join(path, "0"))
    for name, x in values().items():
        check(found["tree"][name], x, name)
    total = (found["tree"]["float64"] == found["tree"]["float64"]).sum()  # A tensor of all processes.
    assert int(total) <= 65


if __name__ == "__main__":
    if len(sys.argv) < 4:
        st.distributed.initialize()
    else:
        st.set_num_devices(int(sys.argv[3]))
    {"save": save, "restore": restore}[sys.argv[1]](sys.argv[2])
    print("passed")
