"""Products whose operands need one mesh axis for different dimensions: values, bytes, and what a device holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor import P
from shardtensor.core import OPS
from shardtensor.interpreters.execution import plan_cache, product_layouts
from shardtensor.interpreters.execution.plan_cache import planned
from tests.functions.test_memory import Meter, meter, share
from tests.layouts import array, everywhere, mesh_of

__all__ = ["meter"]

LAYOUTS: dict[str, tuple[P, P, tuple[int, int, int], int]] = {
    "rows, contracted": (P("x"), P("x"), (40, 42, 38), 1),
    "contracted, columns": (P(None, "x"), P(None, "x"), (38, 42, 40), 0),
    "rows, columns": (P("x"), P(None, "x"), (42, 40, 38), 1),
    "rows, columns; x moves": (P("x"), P(None, "x"), (38, 40, 42), 0),
    "uneven": (P("x"), P("x"), (37, 43, 35), 1),
    "empty shards of rows": (P("x"), P("x"), (7, 100, 7), 1),
    "empty parts that move": (P("x"), P("x"), (7, 7, 7), 1),
}


@pytest.fixture(autouse=True)
def small_operands_move_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_layouts, "GATHERED", 0)
    plan_cache._cached_plan.cache_clear()


def split(value: Any, mesh: st.Mesh, spec: P) -> st.ShardedTensor:
    return st.device_put(value, st.NamedSharding(mesh, spec))


def strategy(x: st.ShardedTensor, y: st.ShardedTensor) -> str:
    return str(planned(OPS["matmul"], (x, y), ())[0].strategy)


@everywhere
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_part_is_sent_to_all_other_devices(name: str, backend: str) -> None:
    left, right, (n, k, m), moving = LAYOUTS[name]
    mesh = mesh_of((8,), backend)
    a, b = array((n, k), "float64", 0), array((k, m), "float64", 1)
    x, y = split(a, mesh, left), split(b, mesh, right)
    with st.transfers() as log:
        product = x @ y
    assert strategy(x, y) == ("whole" if backend == "numpy" else "panels")
    assert log.bytes == 7 * (a, b)[moving].nbytes
    assert not any(t.explicit for t in log)
    np.testing.assert_allclose(np.asarray(product), a @ b)
    inferred = st.explain(lambda x, y: x @ y, x, y)
    assert (inferred.bytes, inferred.result.sharding) == (log.bytes, product.sharding)
    compiled = st.jit(lambda x, y: x @ y)
    with st.transfers() as again:
        np.testing.assert_array_equal(np.asarray(compiled(x, y)), np.asarray(product))
    assert again.bytes >= log.bytes
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError, match="matmul"):
        x @ y


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "complex128", "int64", "bool"])
def test_stacks_and_other_products(dtype: str, backend: str) -> None:
    mesh = mesh_of((4, 2), backend)
    a, b, c = array((3, 32, 34), dtype, 0), array((34, 30), dtype, 1), array((3, 34, 30), dtype, 2)
    x, y, z = split(a, mesh, P(None, "x")), split(b, mesh, P("x")), split(c, mesh, P(None, None, "x"))
    for found, wanted in ((x @ y, a @ b), (x @ z, a @ c), (z.mT @ x.mT, c.mT @ a.mT)):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-4, atol=1e-4)
    if dtype != "bool":
        found = st.einsum("bik,bkj->bji", x, z)
        np.testing.assert_allclose(np.asarray(found), np.einsum("bik,bkj->bji", a, c), rtol=1e-4, atol=1e-4)
        found = st.tensordot(x, y, axes=1)
        np.testing.assert_allclose(np.asarray(found), np.tensordot(a, b, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_bytes_of_any_number_of_devices(count: int) -> None:
    mesh = mesh_of((count,), "checked")
    a, b = array((48, 48), "float64", 0), array((48, 47), "float64", 1)
    for spec in (P("x"), P(None, "x")):
        x, y = split(a, mesh, P("x")), split(b, mesh, spec)
        with st.transfers() as log:
            product = x @ y
        np.testing.assert_allclose(np.asarray(product), a @ b)
        assert log.bytes == (count - 1) * b.nbytes
        assert st.explain(lambda x, y: x @ y, x, y).bytes == log.bytes


def test_1024_simulated_devices_send_what_the_formula_says() -> None:
    mesh = st.AbstractMesh((1024,), ("x",))
    n, k, m = 20_011, 10_007, 5_003
    x = st.zeros((n, k), dtype="float32", device=st.NamedSharding(mesh, P("x")))
    for spec in (P("x"), P(None, "x")):
        y = st.zeros((k, m), dtype="float32", device=st.NamedSharding(mesh, spec))
        assert st.simulate(lambda x, y: x @ y, x, y).bytes == 1023 * 4 * k * m


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_device_holds_three_times_its_share(name: str, meter: Meter) -> None:
    left, right, sizes, _ = LAYOUTS[name]
    mesh = mesh_of((8,), "checked")

    def held(scale: int) -> tuple[int, int]:
        n, k, m = (scale * size for size in sizes)
        x, y = split(array((n, k), "float64", 0), mesh, left), split(array((k, m), "float64", 1), mesh, right)
        most, product = meter.during(lambda: x @ y)
        operands = share(x) + share(y)
        return most + operands, operands + share(product)

    few, many = held(4), held(8)
    assert (many[0] - few[0]) / (many[1] - few[1]) <= 3.05


def test_small_operands_move_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message takes longer than their elements; and twice a share leaves the rest of the share for the result."""
    monkeypatch.setattr(product_layouts, "GATHERED", 1 << 20)
    make: Callable[..., Any] = array
    for count, size, wanted in ((8, 64, "per shard"), (2, 512, "per shard"), (8, 512, "panels")):
        mesh = mesh_of((count,), "checked")
        x, y = (
            split(make((size, size), "float64", 0), mesh, P("x")),
            split(make((size, size), "float64", 1), mesh, P("x")),
        )
        assert strategy(x, y) == wanted
