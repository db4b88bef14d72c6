"""Every utility of a job of several processes, which this library and JAX run: two processes of two devices each.

This module imports nothing of shardtensor: JAX may be on another Python. Run as a program, it is one process of a job of
this library, and writes what it finds to the folder that its argument names, in a file for each process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def utilities(lib: Any) -> Iterator[tuple[str, Any]]:
    """Yields the host arrays that this process gets from each utility.

    Args:
        lib: the functions of this library or of JAX, by the names of JAX.
    """
    own, count, spec = lib.process_index(), lib.process_count(), lib.P
    yield "processes", [own, count, len(lib.devices()), len(lib.local_devices())]
    yield "devices", [d.process_index for d in lib.devices()]
    line, plane = lib.mesh((4,), ("x",)), lib.mesh((2, 2), ("host", "dev"))

    tree = {"w": np.arange(6.0).reshape(2, 3) * (own + 1), "b": [np.float64(own), np.arange(2) + own]}
    yield "broadcast", lib.broadcast_one_to_all(tree)
    yield "broadcast from the last", lib.broadcast_one_to_all(tree, is_source=own == count - 1)
    lib.sync_global_devices("a place in the program")
    yield "gathered", lib.process_allgather(tree)
    yield "gathered along the first dimension", lib.process_allgather(tree["w"], tiled=True)

    lib.assert_equal({"same": np.arange(3), "also": [2.0]}, "the trees differ")
    for name, unequal in (("a number", own), ("a leaf", {"a": np.arange(3), "b": np.arange(3) + (own == 1)})):
        try:
            lib.assert_equal(unequal, f"{name} differs")
        except AssertionError as error:
            yield f"unequal: {name}", str(error).startswith(f"{name} differs")

    part = np.arange(4.0) * own + own
    for name, mesh, at in (
        ("split over devices", line, spec("x")),
        ("split over hosts", plane, spec("host")),
        ("split over both", plane, spec(("host", "dev"))),
        ("split over the devices of a host", plane, spec(None, "dev")),
    ):
        local = np.stack([part, part + 10]) if len(at) > 1 else part
        x = lib.host_local_array_to_global_array(local, mesh, at)
        yield name, [x.shape, x.is_fully_addressable, *[[s.index_text, s.data] for s in lib.shards(x)]]
        if len(at) == 1:
            yield f"{name}: all of it", lib.process_allgather(x, tiled=True)
        yield f"{name}: of this host", lib.global_array_to_host_local_array(x, mesh, at)
    equal = lib.host_local_array_to_global_array(np.arange(4.0), line, spec())
    yield "equal everywhere", [equal.shape, equal.is_fully_replicated, np.asarray(equal)]
    pair = lib.host_local_array_to_global_array({"a": part, "b": np.arange(3.0)}, line, {"a": spec("x"), "b": spec()})
    yield "trees of specs", [pair["a"].shape, pair["b"].shape]

    rows = lib.NamedSharding(line, spec("x"))
    made = lib.make_array_from_process_local_data(rows, np.arange(12.0).reshape(4, 3) + 100 * own)
    yield "of local data", lib.process_allgather(made, tiled=True)
    whole = np.arange(24.0).reshape(8, 3)
    yield (
        "of a callback",
        lib.process_allgather(lib.make_array_from_callback((8, 3), rows, whole.__getitem__), tiled=True),
    )
    double = lib.jit(lambda x: x * 2 + x.sum())
    yield "computed", lib.process_allgather(double(made), tiled=True)
    yield "a sum in every process", float(lib.jit(lambda x: x.sum())(made))
    yield "a map of local slices", lib.pmap_local(lambda v: v + lib.psum(v, "i"), np.arange(2.0) + 2 * own)


def as_json(x: Any) -> Any:
    """Returns lists and numbers for arrays in trees."""
    if isinstance(x, dict):
        return {key: as_json(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [as_json(value) for value in x]
    return x if isinstance(x, (str, bool, int, float)) else np.asarray(x).tolist()


def ours() -> None:
    import shardtensor as st  # JAX's Python need not have it.

    d = st.distributed
    d.initialize(timeout=60)

    def pmap_local(f: Any, slices: Any) -> Any:
        """As the page says: a tensor of the slices of all processes determines the devices."""
        mesh = st.Mesh(st.devices(), ("i",))
        at = st.NamedSharding(mesh, st.P("i"))
        made = st.pmap(f, axis_name="i")(d.make_array_from_process_local_data(at, slices))
        return d.global_array_to_host_local_array(made, mesh, st.P("i"))

    lib = SimpleNamespace(
        **{name: getattr(d, name) for name in d.__all__}, P=st.P, jit=st.jit, devices=st.devices, psum=st.psum,
        NamedSharding=st.NamedSharding, mesh=st.make_mesh, pmap_local=pmap_local, shards=shards,
    )  # fmt: skip
    found = {name: as_json(value) for name, value in utilities(lib)}
    (Path(sys.argv[1]) / f"{d.process_index()}.json").write_text(json.dumps(found))
    d.shutdown()


def shards(x: Any) -> list[Any]:
    """The shards of this process: where they are, and their elements."""
    return [
        SimpleNamespace(
            index_text=str([s.indices(n)[:2] for s, n in zip(shard.index, x.shape, strict=True)]),
            data=np.asarray(shard.data),
        )
        for shard in x.addressable_shards
    ]


if __name__ == "__main__":
    ours()
