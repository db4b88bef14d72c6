"""Gradients of programs over the devices of all processes: prints a line for each, the same in every process.

The lines have the bits of the gradients, which are those of one process with as many devices. An argument is the number
of the processes whose devices the maps have, if these are not all.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor import distributed

if __name__ == "__main__":
    distributed.initialize(timeout=60)  # The statements below use the devices of the job.

import shardtensor as st

DEVICES = [d for d in st.devices() if d.process_index < int([*sys.argv, "1000"][1])]
MESH = st.make_mesh((len(DEVICES),), ("i",), devices=DEVICES)
RNG = np.random.default_rng(0)


def placed(shape: tuple[int, ...], *spec: Any) -> st.ShardedTensor:
    return st.device_put(RNG.standard_normal(shape), st.NamedSharding(MESH, st.P(*spec)))


X, W, SPLIT = placed((8, 3), "i"), placed((3, 3)), placed((8, 3), "i")


def mapped(*specs: Any) -> Callable[..., Any]:
    return st.shard_map(mesh=MESH, in_specs=specs, out_specs=st.P())


def data_parallel(w: Any, x: Any) -> Any:
    return (st.tanh(x @ w) ** 2).mean()


@mapped(st.P(), st.P("i"))
def data_parallel_map(w: Any, x: Any) -> Any:
    return st.pmean((st.tanh(x @ w) ** 2).mean(), "i")


@mapped(st.P(), st.P("i"))
def activations(w: Any, x: Any) -> Any:
    y = st.psum(x, "i") @ w
    if float(y[0, 0]) < 1e9:  # Python's control flow may depend on values.
        y = st.sin(y) + w[0]
    return (y * y).sum() + st.pmax(x @ w, "i").sum()


@mapped(st.P("i"), st.P("i"))
def gathered(w: Any, x: Any) -> Any:
    whole = st.all_gather(w, "i", tiled=True)
    return st.psum((st.tanh(x @ whole[:3]) * whole[3:5].sum()).sum(), "i") ** 2


@mapped(st.P(), st.P("i"))
def exchanged(w: Any, x: Any) -> Any:
    """Rows of a result are sent to any devices, in slices that overlap."""
    n, k = st.axis_size("i"), st.axis_index("i")
    sizes = np.array([[(i + 2 * j) % (len(x) + 1) for j in range(n)] for i in range(n)])
    places = np.cumsum(sizes, axis=0) - sizes
    output = st.concat([st.sin(x)] * (2 * n)) @ w
    begins = np.zeros(n, int)
    y = st.ragged_all_to_all(x @ w, output, begins, sizes[k], places[k], sizes[:, k], axis_name="i")
    return st.psum((st.tanh(y) * (k + 1)).sum(), "i")


@mapped(st.P(), st.P("i"))
def different(w: Any, x: Any) -> Any:
    y = st.sin(x @ w) if st.axis_index("i") % 2 else x
    return st.psum((y * y).sum(), "i")


def results_that_differ(w: Any, x: Any) -> Any:
    parts = st.shard(x, devices=MESH.flat)
    made = st.pmap(lambda a: st.sin(a) if st.axis_index("i") % 3 else np.ones(a.shape), parts, axis_name="i")
    return (st.unshard(made) ** 2).sum() + (w * w).sum()


def inside(w: Any, x: Any) -> Any:
    gradient = st.grad(lambda w: (st.tanh(x @ w) ** 2).mean())(w)
    return (st.pmean(gradient, "i"),)


REDUCED, WHOLE = [st.NamedSharding(MESH, spec) for spec in (st.P(reduced={"i"}), st.P())]


@st.shard_map(mesh=MESH, in_specs=(st.P("i"), REDUCED.spec), out_specs=st.P("i"))
def layer(x: Any, w: Any) -> Any:
    return st.tanh(x @ st.pvary(w, "i"))


def reduced_weights(w: Any, x: Any) -> Any:
    gradient = st.grad(lambda w: (layer(x, w) ** 2).sum())(st.reshard(w, REDUCED))
    assert st.typeof(gradient).sharding.spec == st.P(unreduced={"i"})
    return (st.reshard(gradient, WHOLE),)


@st.shard_map(mesh=MESH, in_specs=(st.P(), st.P("i")), out_specs=st.P(unreduced={"i"}))
def product(w: Any, x: Any) -> Any:
    return x.T @ (x @ w)


@mapped(st.P(unreduced={"i"}))
def total(parts: Any) -> Any:
    return st.psum(parts, "i")


def partial_sums(w: Any, x: Any) -> Any:
    return (st.sin(total(product(w, x))) * st.reshard(product(w, x), WHOLE)).sum()


def check(name: str, fn: Callable[..., Any], *args: Any) -> None:
    arrays = [distributed.process_allgather(g) for g in fn(*args)]
    # Zeros of both signs are equal.
    print(name, *[zlib.crc32(a + 0.0) for a in arrays], flush=True)


def main() -> None:
    for f, w in [
        (data_parallel, W),
        (data_parallel_map, W),
        (activations, W),
        (gathered, SPLIT),
        (exchanged, W),
        (different, W),
        (results_that_differ, W),
    ]:
        check(f.__name__, st.grad(f, argnums=(0, 1)), w, X)
        if f not in (activations, different, results_that_differ):  # What different programs save differs, too.
            check(f"{f.__name__} under jit", st.jit(st.grad(f, argnums=(0, 1))), w, X)
    check("inside", mapped(st.P(), st.P("i"))(inside), W, X)
    for name, f in (("reduced weights", reduced_weights), ("partial sums", st.grad(partial_sums, (0, 1)))):
        check(name, f, W, X)
        check(f"{name} under jit", st.jit(f, executor="numpy"), W, X)  # Kernels may add two sums in another order.


if __name__ == "__main__":
    main()
    distributed.shutdown()
