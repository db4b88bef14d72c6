"""A program that compares the bytes that its processes send each other with those that a simulation of as many processes
computes, for operators and for collectives in maps: ``spanning_traffic.py FILE EXAMPLES [NAME...]``.

Process 0 writes a line for each operator to the file: its name, and how many calls were compared, or what differs.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as some
from hypothesis.control import BuildContext
from hypothesis.internal.conjecture.data import ConjectureData

import shardtensor as st
from shardtensor import distributed
from shardtensor.communication.between_processes.processes import JOB
from shardtensor.core import OPS
from shardtensor.testing.layouts import NAMES as AXES
from shardtensor.testing.layouts import specs
from tests.cases import CASES
from tests.communication.spanning_operators import EXAMPLES, NAMES, PATH, Provider

BY_ELEMENTS = {"isin_sorted", "nan_quantiles", "searchsorted_split", "take_along_axis", "take_along_split"}
"""Operators whose messages depend on the elements: which of them devices request of each other, or where NaN is. The
simulation assumes that they request as many of each other device.
"""


def shapes(count: int) -> list[tuple[int, ...]]:
    """The shapes of meshes of that many devices."""
    found = [(count,), (1, count), (count, 1)]
    return [*found, (2, count // 2), (count // 2, 2), (2, 2, count // 4)] if count % 4 == 0 else found


def counted(call: Callable[[], object]) -> list[list[int]]:
    """The bytes that each process sends to each other one while it makes a call."""
    job = JOB.agreement
    assert job is not None
    count, before = distributed.process_count(), job.sent.copy()
    call()
    row = [job.sent[k] - before[k] for k in range(count)]
    return [np.frombuffer(r, np.int64).tolist() for r in job.gather("the bytes", np.array(row, np.int64).tobytes())]


def program(name: str, example: int) -> Callable[[Callable[..., st.Mesh]], tuple[st.Mesh, Any, list[Any]]]:
    """A call of an operator: a function that makes the mesh by the function that is given, and returns it with the call
    and its operands.
    """
    data = ConjectureData(random=Random(f"{name} {example}"), provider=Provider)
    with BuildContext(data, wrapped_test=program):
        made = CASES[name](data)
        shape = data.draw(some.sampled_from(shapes(st.device_count())))
        layouts = [data.draw(specs(st.AbstractMesh(shape, AXES[: len(shape)]), x.ndim)) for x in made.operands]
        placed = [not k or data.draw(some.integers(0, 4)) > 0 for k in range(len(layouts))]
        target = data.draw(specs(st.AbstractMesh(shape, AXES[: len(shape)]), made.operands[0].ndim))

    def on(mesh_of: Callable[..., st.Mesh]) -> tuple[st.Mesh, Any, list[Any]]:
        mesh = mesh_of(shape, AXES[: len(shape)])
        put = st.empty_like if isinstance(mesh, st.AbstractMesh) else st.asarray
        operands = [
            put(x, device=st.NamedSharding(mesh, spec)) if there else x
            for x, spec, there in zip(made.operands, layouts, placed, strict=True)
        ]
        if name == "reshard":  # The layout of the case is of devices that exist.
            return mesh, lambda x: st.reshard(x, st.NamedSharding(mesh, target)), operands[:1]
        return mesh, lambda *xs: made.run(OPS[name].dispatch, list(xs)), operands

    return on


COLLECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "psum": st.psum,
    "psum of a long array": lambda b, axes: st.psum(st.broadcast_to(b.reshape(-1)[:1], (1 << 17,)), axes),
    "pmean": st.pmean,
    "all_gather": lambda b, axes: st.all_gather(b, axes, tiled=True),
    "psum_scatter": lambda b, axes: st.psum_scatter(b, axes, scatter_dimension=0, tiled=True),
    "all_to_all": lambda b, axes: st.all_to_all(b, axes, split_axis=0, concat_axis=1, tiled=True),
    "ppermute": lambda b, axes: st.ppermute(b, axes, [(0, st.psum(1, axes) - 1)]),
    "pbroadcast": lambda b, axes: st.pbroadcast(b, axes, 0),
}
"""Calls of collectives on a block, along some axes of the mesh."""


def collective(name: str, example: int) -> Callable[[Callable[..., st.Mesh]], tuple[st.Mesh, Any, list[Any]]]:
    """A map with a call of a collective; see `program`."""
    known = shapes(st.device_count())
    shape = known[example % len(known)]
    axes = AXES[: len(shape)]
    along = axes if example % 2 else axes[-1 - example // 2 % len(axes)]

    def on(mesh_of: Callable[..., st.Mesh]) -> tuple[st.Mesh, Any, list[Any]]:
        mesh, spec = mesh_of(shape, axes), st.P(axes)
        mapped = st.shard_map(
            lambda b: COLLECTIVES[name](b, along), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return mesh, mapped, [st.empty((st.device_count() * (2 + example % 3), 5), device=st.NamedSharding(mesh, spec))]

    return on


def outcome(name: str) -> str:
    """Returns how many calls were compared, or the first that sends other bytes than its simulation."""
    compared, processes, make = 0, distributed.process_count(), collective if name in COLLECTIVES else program
    for example in range(int(EXAMPLES)):
        on = make(name, example)
        mesh, call, operands = on(lambda *given: st.AbstractMesh(*given, processes=processes))
        try:
            simulated = st.simulate(call, *operands, mesh=mesh).process_bytes().tolist()
        except st.ConcretizationError:  # The messages depend on the elements.
            continue
        mesh, call, operands = on(st.make_mesh)
        found = counted(functools.partial(call, *operands))
        compared += 1
        if found != simulated:
            layouts = [getattr(x, "sharding", None) and x.sharding.spec for x in operands]
            return f"example {example} {mesh} {layouts} sends {found}, and simulated {simulated}"
    return str(compared)


def main() -> None:
    distributed.initialize(timeout=20)
    with Path(PATH if distributed.process_index() == 0 else os.devnull).open("a") as file:
        for name in NAMES or [*sorted(set(CASES) - BY_ELEMENTS), *COLLECTIVES]:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                print(name, outcome(name), file=file, flush=True)
    distributed.shutdown()


if __name__ == "__main__":
    main()
