"""Every operator under jit: results, layouts, writes and transfers are those of eager mode."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as some

import shardtensor as st
from shardtensor.core import OPS
from shardtensor.tensor.pytree import leaves
from tests import draws
from tests.cases import CASES, sharded_somehow
from tests.interpreters.recording import jacobi, write_views
from tests.interpreters.test_infer import DATA_DEPENDENT, examples, layouts, some_backend, split, step, totals
from tests.interpreters.test_recording import COLLECTIVES, MAPS, drawn, others, steps
from tests.layouts import array, everywhere, mesh_of

ESCAPES = {name for name, op in OPS.items() if "escapes" in op.tags}


def copied(args: Any) -> list[Any]:
    return [x.copy() if isinstance(x, st.ShardedTensor) else x for x in args]


def assert_same_trees(found: Any, wanted: Any) -> None:
    """Compares results to the bit, with their layouts."""
    assert layouts(found) == layouts(wanted)
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        if isinstance(b, (st.ShardedTensor, np.ndarray)):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def agrees(fn: Callable[..., Any], *args: Any, times: int = 2) -> Callable[..., Any]:
    """Compares what jit of a function returns and writes with what the function does."""
    on_gpu = any(x.sharding.mesh.flat[0].backend == "cupy" for x in args if isinstance(x, st.ShardedTensor))
    traced = st.jit(fn, executor="numpy" if on_gpu else None)  # Functions in CUDA have other bits on the double.
    for _ in range(times):
        mine, its = copied(args), copied(args)
        assert_same_trees(traced(*its), fn(*mine))
        assert_same_trees(its, mine)
    return traced


@pytest.mark.parametrize("name", sorted(set(CASES) - ESCAPES))
def test_every_operator(name: str) -> None:
    @examples(name, 20)
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        operands = sharded_somehow(data, made, some_backend(data))

        def call(*xs: Any) -> Any:
            return made.run(OPS[name].dispatch, list(xs))

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                call(*copied(operands))
            except st.ShardTensorError as error:
                with pytest.raises(type(error)):
                    st.jit(call)(*operands)
                return
            agrees(call, *operands)

    run()


@everywhere
def test_programs_with_views_and_writes(backend: str) -> None:
    agrees(lambda x, w: {**step(x, w), "text": 0}, split(backend), split(backend, (6, 4)))


@everywhere
def test_numpys_jacobi_in_place(backend: str) -> None:
    agrees(functools.partial(jacobi, 20), split(backend, (9, 7), "float64"))


@everywhere
def test_an_argument_and_its_views_are_written(backend: str) -> None:
    agrees(write_views, split(backend, (6, 5), "complex64"))


@everywhere
def test_other_operators(backend: str) -> None:
    x = st.device_put(np.ones((6, 2)), st.devices(backend)[0])
    agrees(steps, x)
    agrees(functools.partial(drawn, st.random.key(1)), x)
    if backend == "numpy":
        agrees(others, x)


@everywhere
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_collectives_in_shard_map(name: str, backend: str) -> None:
    mesh = mesh_of((4,), backend)
    f = st.shard_map(lambda b: COLLECTIVES[name](b * 2) + 1, mesh=mesh, in_specs=st.P("x"), out_specs=st.P("x"))
    agrees(f, st.device_put(array((16, 8), "float32", 1), st.NamedSharding(mesh, st.P("x"))))


@everywhere
@pytest.mark.parametrize("name", list(MAPS))
def test_maps(name: str, backend: str) -> None:
    f = functools.partial(MAPS[name], d=st.devices(backend))
    x = split(backend, (6, 6))
    if name == "an equal result":
        x = st.device_put(np.asarray(x), st.devices(backend)[0])
    with st.use_mesh(st.make_mesh((8,), ("i",), devices=st.devices(backend)[:8])):
        agrees(f, x)


@pytest.mark.parametrize("name", sorted(set(CASES) - ESCAPES)[::3])
def test_transfers_are_those_of_eager_mode_and_of_the_costs(name: str) -> None:
    @hypothesis.seed(zlib.crc32(name.encode()))
    @hypothesis.settings(max_examples=draws.drawn(8))
    @hypothesis.given(data=some.data())
    def run(data: Any) -> None:
        made = CASES[name](data)
        operands = copied(sharded_somehow(data, made, some_backend(data)))  # Views are read in either mode at its time.
        call = lambda *xs: made.run(OPS[name].dispatch, list(xs))  # noqa: E731
        traced = st.jit(call)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                lowered = traced.lower(*operands)
                with st.transfers() as eager:
                    call(*operands)
            except st.ShardTensorError:
                return
            with st.transfers() as sent:
                traced(*operands)
        if all(isinstance(x, st.ShardedTensor) for x in operands):
            assert totals(sent) == totals(eager)
        if name not in DATA_DEPENDENT:
            assert lowered.cost().bytes == sent.bytes

    run()
