"""Random programs: chains of operators on the same values in NumPy and on several backends, of shared and of separate
memories.

After every step the values are equal, and all backends have the same layouts and transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from tests.cases import indices
from tests.conftest import NO_TORCH
from tests.draws import drawn
from tests.layouts import MESHES, NAMES, array, on_host, shapes, specs

NEEDS_TORCH = [pytest.mark.full, pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH)]
Step = Callable[[Any, Any], Any]


sets = pytest.mark.parametrize(
    "backends",
    [
        ("numpy", "checked"),
        ("checked", "grouped"),
        ("checked", "cupy"),
        pytest.param(("numpy", "torch"), marks=NEEDS_TORCH),
    ],
    ids="-".join,
)
"""Which backends run a program in lockstep: the first one's layouts and moves are what the others' must be."""


def twin(device: Any, backend: str = "checked") -> Any:
    """Returns the corresponding device, mesh or sharding of another backend."""
    if isinstance(device, st.Device):
        return st.devices(backend)[device.id]
    if isinstance(device, st.Mesh):
        grid = np.empty(device.size, object)
        grid[:] = [twin(d, backend) for d in device.flat]
        return st.Mesh(grid.reshape(device.axis_sizes), device.axis_names)
    return st.NamedSharding(twin(device.mesh, backend), device.spec, memory_kind=device.memory_kind)


def some_sharding(data: Any, ndim: int) -> st.NamedSharding:
    shape = data.draw(some.sampled_from(MESHES))
    devices = st.devices("numpy")[data.draw(some.integers(0, 8 - int(np.prod(shape)))) :]
    mesh = st.make_mesh(shape, NAMES[: len(shape)], devices=devices)
    return st.NamedSharding(mesh, data.draw(specs(mesh, ndim)))


def some_step(data: Any, x: np.ndarray, others: list[np.ndarray]) -> tuple[str, Step]:
    """Draws an operator for x: ``step(namespace, tensors)``, where the last tensor is x, and the others come before."""
    steps: dict[str, Step] = {
        "tanh": lambda xp, t: xp.tanh(t[-1]),
        "double": lambda xp, t: t[-1] * 2 + 1,
        "where": lambda xp, t: xp.where(t[-1] > 0, t[-1], 0.5),
        "sum": lambda xp, t: xp.sum(t[-1]),
        "flat": lambda xp, t: xp.reshape(t[-1], (-1,)),
        "turn": lambda xp, t: xp.flip(t[-1]),
        "twice": lambda xp, t: xp.stack([t[-1], t[-1] + 1]),
        "signs": lambda xp, t: (t[-1] > 0).astype("float64") - 0.5,
    }
    if x.ndim:
        axis = data.draw(some.integers(0, x.ndim - 1))
        shift = data.draw(some.integers(-5, 5))
        index = data.draw(indices(x.shape))
        steps |= {
            "mean": lambda xp, t: xp.sum(t[-1], axis=axis, keepdims=True) / 3,
            "argmin": lambda xp, t: (
                xp.argmin(xp.concat([t[-1], t[-1]], axis=axis), axis=axis) * 1.0 if x.size else t[-1]
            ),
            "var": lambda xp, t: xp.var(t[-1], axis=axis) if x.size else t[-1],
            "transpose": lambda xp, t: t[-1].T,
            "roll": lambda xp, t: xp.roll(t[-1], shift, axis=axis),
            "index": lambda xp, t: t[-1][index],
            "concat": lambda xp, t: xp.concat([t[-1], t[-1]], axis=axis),
            "gram": lambda xp, t: xp.tensordot(t[-1], t[-1], axes=((axis,), (axis,))) if x.ndim < 3 else t[-1],
        }
    for k, other in enumerate(others):
        try:
            np.broadcast_shapes(x.shape, other.shape)
        except ValueError:
            continue
        steps[f"add {k}"] = lambda xp, t, k=k: t[k] + t[-1]
    name = data.draw(some.sampled_from(sorted(steps)))
    return name, steps[name]


def agree(result: st.ShardedTensor, answer: np.ndarray) -> None:
    """Asserts equality up to the rounding of a chain of operators, and that each device holds its part of the whole."""
    assert (result.shape, result.dtype) == (answer.shape, answer.dtype)
    whole = np.asarray(result)
    limit = 1e-9 * (1 + np.abs(answer).max(initial=0))
    np.testing.assert_allclose(whole, answer, rtol=1e-7, atol=limit)
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(on_host(shard.data, shard.device), whole[shard.index])


def run_programs(examples: int, length: int, backends: tuple[str, ...], part: int = 0) -> None:
    @hypothesis.seed(part)
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        plain: list[np.ndarray] = []
        tensors: dict[str, list[st.ShardedTensor]] = {backend: [] for backend in backends}
        for seed in range(2):
            value = array(data.draw(shapes(0, 2)), "float64", seed)
            sharding = some_sharding(data, value.ndim)
            plain.append(value)
            for backend, mine in tensors.items():
                mine.append(st.device_put(value, twin(sharding, backend)))
        for _ in range(length):
            name, step = some_step(data, plain[-1], plain[:-1])
            move = some_sharding(data, plain[-1].ndim) if data.draw(some.integers(0, 3)) == 0 else None
            with np.errstate(all="ignore"):
                answer = np.asarray(step(np, plain))
            if answer.size > 3000 or answer.ndim > 4 or np.abs(answer).max(initial=0) > 1e9:
                continue
            records = {}
            for backend, mine in tensors.items():
                if move is not None:
                    mine[-1] = st.reshard(mine[-1], twin(move, backend))
                with st.transfers() as log, np.errstate(all="ignore"):
                    result = step(st, mine)
                agree(result, answer)
                mine.append(result)
                records[backend] = sorted(
                    (r.operator, r.bytes, r.source.id, r.destination.id, r.explicit) for r in log if r.bytes
                )
            for backend, mine in tensors.items():
                assert twin(tensors[backends[0]][-1].sharding, backend) == mine[-1].sharding, name
                assert records[backend] == records[backends[0]], name
            plain.append(answer)

    run()


@pytest.mark.slow
@sets
def test_programs(backends: tuple[str, ...]) -> None:
    run_programs(drawn(120, fast=30) if backends == ("numpy", "checked") else drawn(15, fast=6), 6, backends)


@pytest.mark.full
@pytest.mark.parametrize("part", range(1, 21))
@sets
def test_long_programs(backends: tuple[str, ...], part: int) -> None:
    run_programs(150 if backends == ("numpy", "checked") else 50, 12, backends, part)
