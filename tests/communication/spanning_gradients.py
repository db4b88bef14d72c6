"""Gradients of programs on tensors that span processes: ``spanning_gradients.py FILE``.

Process 0 writes a line to FILE for each gradient, eager and under jit: a hash of its bits, and the bytes of its transfers.
Jobs with the same number of devices in other numbers of processes must write the same lines.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.functions.algorithms import first_device
from tests.communication.spanning_loops import digest

BATCH, WIDTH = 22, 6  # Shards differ in size.
WIDE = 600  # Of few bytes, the first device selects rows, if all devices are in one process.


def perceptron(params: Any, x: Any, ids: Any) -> Any:
    for w, b in params["layers"]:
        x = st.tanh(x @ w + b)
    return (x * x).mean()


def gathered(params: Any, x: Any, ids: Any) -> Any:
    """Parameters are split, and gathered where they are used."""
    whole = st.NamedSharding(x.sharding.mesh, st.P())
    return perceptron({"layers": [[st.reshard(p, whole) for p in layer] for layer in params["layers"]]}, x, ids)


def embedded(params: Any, x: Any, ids: Any) -> Any:
    y = params["table"][ids].mean(axis=1) * x
    y[np.array([1, 4])] = y[:2] * 3
    return st.log(st.exp(y).sum(axis=1)).sum()


def main(path: str) -> None:
    distributed.initialize(engine="local" if os.environ.get("SHARDTENSOR_ALONE") else None, timeout=20)
    mesh = st.make_mesh((len(st.devices()),), ("data",))
    rng = np.random.default_rng(0)

    def put(shape: tuple[int, ...], spec: st.P) -> Any:
        return st.device_put(rng.standard_normal(shape), st.NamedSharding(mesh, spec))

    narrow, wide = put((BATCH, WIDTH), st.P("data")), put((BATCH, WIDE), st.P("data"))
    assert wide.nbytes > first_device.GATHERED
    ids = st.device_put(rng.integers(0, 9, (BATCH, 3)), st.NamedSharding(mesh, st.P("data")))
    lines = []
    for fn, spec, x in ((perceptron, st.P(), narrow), (gathered, st.P("data"), narrow), (embedded, st.P(), wide)):
        layers = [[put((WIDTH, WIDTH), spec), put((WIDTH,), st.P())] for _ in range(3)]
        params = {"layers": layers, "table": put((9, WIDE), spec)}
        eager = st.value_and_grad(fn)
        for how, computed in (("eager", eager), ("jit", st.jit(eager, executor="numpy"))):
            for _ in range(2):
                with st.transfers() as log:
                    found = computed(params, x, ids)
                lines.append(f"{fn.__name__}-{how}-{len(lines) % 2} {digest(found)} {log.bytes}")
    if distributed.process_index() == 0:
        Path(path).write_text("\n".join(lines) + "\n")
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
