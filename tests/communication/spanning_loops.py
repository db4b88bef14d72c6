"""Runs random loops and branches on tensors that span processes: ``spanning_loops.py FILE COUNT``.

Process 0 writes a line to FILE for each program, eager and under jit: a hash of the bits of its results, or the error.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import shardtensor as st
from shardtensor import distributed
from shardtensor.backend import registry
from shardtensor.testing.checked import CheckedBackend
from tests.interpreters.loops import Ours, draw_program


def digest(results: Any) -> str:
    made = hashlib.sha256()
    for x in st.tree.leaves(results):
        array = x if x.is_fully_addressable else distributed.process_allgather(x)
        made.update(f"{x.shape}{x.dtype}{x.sharding.spec}".encode() + np.asarray(array).tobytes())
    return made.hexdigest()[:16]


def by_elements(x: Any) -> Any:
    """Conditions, indices and bounds that are elements, which some of the processes hold."""
    return (
        st.while_loop(lambda c: (c[-1] < 99) | (c[0] < 99), lambda c: c * 2 + 1, x),
        st.cond(x[0] > 1, st.sin, st.cos, x),
        st.switch(st.astype(x[-1], int) - 6, [st.sin, st.cos], x),
        st.fori_loop(st.astype(x[0], int), st.astype(x[-1], int), lambda i, x: x + i, x),
    )


def summed(program: Any, ns: Any, c: Any, xs: Any) -> Any:
    """The sum of all results, which is differentiated."""
    found = [y for y in st.tree.leaves(program(ns, c, xs)) if y.dtype in (np.float32, np.float64)]
    return sum([st.sum(y * y) for y in found])


def main(path: str, count: str) -> None:
    alone = os.environ.get("SHARDTENSOR_ALONE")
    if alone:
        registry.install(CheckedBackend(sharing=int(alone)))
    distributed.initialize(engine="local" if alone else None, timeout=20)
    mesh = st.make_mesh((len(st.devices()) // 2, 2), ("x", "y"))
    lines = []
    for seed in range(int(count)):
        program, (c, xs) = draw_program(seed)
        ns = Ours(mesh, [st.P("x"), st.P(), st.P(("x", "y"))][seed % 3])
        traced = st.jit(functools.partial(program, ns), executor="numpy")
        gradient = st.grad(functools.partial(summed, program, ns), argnums=(0, 1))
        more = ("gradient", gradient), ("jit-gradient", st.jit(gradient, executor="numpy"))
        is_last = seed % 4 == 3 and program.__name__ != "loop"  # A `while_loop` has no gradient.
        for how, f in (("eager", functools.partial(program, ns)), ("jit", traced), *(more if is_last else ())):
            try:
                line = digest(f(ns.put(c), ns.put(xs, rows=True)))
            except st.ShardTensorError as error:
                line = f"{type(error).__name__}: {error}".replace("\n", " ")
            lines.append(f"{seed}-{how} {line}")
    x = st.device_put(np.arange(8.0), st.NamedSharding(mesh, st.P("x")))
    for how, f in (("eager", by_elements), ("jit", st.jit(by_elements))):
        lines.append(f"elements-{how} {digest(f(x))}")
    if distributed.process_index() == 0:
        Path(path).write_text("\n".join(lines) + "\n")
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
