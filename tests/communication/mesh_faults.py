"""A program in which processes 0 and 1 send each other tensors, and the last one, which has none of their devices, behaves
differently: ``mesh_faults.py EVENT``.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor import distributed

LIMIT = 3.0


def mesh_of(*processes: int) -> st.Mesh:
    devices = [d for d in st.devices() if d.process_index in processes]
    return st.make_mesh((len(devices),), ("x",), devices=devices)


def sent(x: Any, *processes: int) -> Any:
    return st.device_put(x, st.NamedSharding(mesh_of(*processes), st.P("x")))


def raises(x: Any) -> None:
    raise ValueError("no such file")


def exits(x: Any) -> None:
    sys.exit(0)


def skips(x: Any) -> None:
    """The process leaves out a transfer that does not concern its devices."""
    sent(sent(x, 0), 1)


def sends_elsewhere(x: Any) -> None:
    sent(x, 2)


def computes_something_else(x: Any) -> None:
    sent(x * 2, 1)


def reads(x: Any) -> None:
    float(x.sum())


def stopped(x: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def killed(x: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def only_where_the_devices_are(x: Any) -> None:
    """The first process raises an error that depends on elements, and no other process has them."""
    if distributed.process_index() == 0:
        with np.errstate(all="raise"):
            x / 0
    sent(x, 1)


def closes_over_what_is_differentiated(x: Any) -> None:
    """The last process runs no program of the map, so that it does not know what the function takes from around it."""
    mesh = x.sharding.mesh

    def loss(w: Any) -> Any:
        return st.shard_map(lambda r: st.psum((r * w).sum(), "x"), mesh=mesh, in_specs=st.P("x"), out_specs=st.P())(x)

    st.grad(loss)(3.0)
    sent(x, 1)


class Registered:
    def __init__(self, a: Any) -> None:
        self.a = a


def returns_an_object(x: Any) -> None:
    """The last process cannot make objects of a class that is registered as a pytree."""
    st.register_pytree_node(Registered, lambda r: ((r.a,), None), lambda _, children: Registered(*children))
    st.shard_map(Registered, mesh=x.sharding.mesh, in_specs=st.P("x"), out_specs=st.P("x"))(x)


TOGETHER = ("only_where_the_devices_are", "closes_over_what_is_differentiated", "returns_an_object")
"""Events in which all processes make the same calls."""

if __name__ == "__main__":
    event = sys.argv[1]
    distributed.initialize(timeout=LIMIT)
    start = sent(np.arange(1.0, 1000.0), 0, 1)
    is_last = distributed.process_index() == distributed.process_count() - 1
    if is_last or event in TOGETHER:
        globals()[event](start)
    else:
        y = sent(sent(start, 1), 0)
        sent(y, 1)
    print("done")
