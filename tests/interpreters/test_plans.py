"""Plans as data, their cache, and the stack of interpreters."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.core import OPS, Interpreter, Op, innermost, interpreting
from shardtensor.functions.statistics.histograms import counts_between
from shardtensor.interpreters.eager import EAGER
from shardtensor.interpreters.execution import plan_cache
from shardtensor.interpreters.execution.plan_cache import planned
from tests.layouts import everywhere, mesh_of


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of plans of its own."""
    cache = functools.lru_cache(4096, typed=True)(plan_cache._cached_plan.__wrapped__)
    monkeypatch.setattr(plan_cache, "_cached_plan", cache)


def split(backend: str, spec: st.P, shape: tuple[int, ...] = (8, 6)) -> st.ShardedTensor:
    return st.device_put(np.ones(shape, "f4"), st.NamedSharding(mesh_of((2,), backend), spec))


def plan(name: str, operands: tuple[Any, ...], *params: Any) -> Any:
    return planned(OPS[name], operands, params)[0]


def test_plans_are_compared_by_value(backend: str) -> None:
    x, y = split(backend, st.P("x")), split(backend, st.P(None, "x"))
    one, again = (plan("add", (x, y)) for _ in range(2))
    assert one is again
    plan_cache._cached_plan.cache_clear()
    later = plan("add", (x, y))
    assert later is not one
    assert later == one
    assert len({one, later, plan("add", (y, x)), plan("add", (x, x)), plan("multiply", (x, y))}) == 4


def test_plans_are_printed() -> None:
    x, y = split("checked", st.P("x")), split("checked", st.P(None, "x"))
    assert str(plan("add", (x, y))).splitlines() == [
        "add -> float32[8, 6] P('x')",
        "    runs on each of 2 devices",
        "    transfers x2 from P(None, 'x') to P('x'): 96 bytes",
    ]
    total = plan("sum", (x,), None, None, False)
    assert str(total).endswith("\n    combines partial results along x: 8 bytes")
    assert (total.partial_axes, total.result.unreduced) == (("x",), ())
    assert "run=" not in repr(total)


@pytest.mark.parametrize(
    ("backend", "name", "wanted"),
    [
        ("numpy", "add", "whole"), ("checked", "add", "per shard"), ("numpy", "sum", "reduce"), ("numpy", "long sum", "blocks"),
        ("numpy", "flip", "move"), ("numpy", "zeros", "create"), ("abstract", "add", "abstract"),
    ],
)  # fmt: skip
def test_strategies(backend: str, name: str, wanted: str) -> None:
    mesh = st.AbstractMesh((2,), ("x",)) if backend == "abstract" else mesh_of((2,), backend)
    shape = (1 << 20, 2) if name == "long sum" else (8, 6)
    x = st.zeros(shape, device=st.NamedSharding(mesh, st.P("x")))
    found = {
        "add": lambda: plan("add", (x, x)),
        "sum": lambda: plan("sum", (x,), None, None, False),
        "long sum": lambda: plan("sum", (x,), None, None, False),
        "flip": lambda: plan("flip", (x,), 0),
        "zeros": lambda: plan("zeros", (), (3,), None, mesh),
    }[name]()
    assert (found.strategy, found.op.name) == (wanted, name.removeprefix("long "))


@pytest.mark.parametrize(
    ("name", "params", "call", "shape"),
    [
        ("median", (None, False), st.median, (6, 8)), ("fft", (None, -1, "backward"), st.fft.fft, (8,)),
        ("det", (), st.linalg.det, (4, 4)), ("inv", (), st.linalg.inv, (4, 4)),
    ],
)  # fmt: skip
def test_few_bytes_that_are_gathered_are_computed_on_the_first_device(
    backend: str, name: str, params: tuple[Any, ...], call: Any, shape: tuple[int, ...]
) -> None:
    """The first device receives what it lacks, and sends the others what they have of the result; the log, the
    simulation and the plan agree.
    """
    host = np.random.default_rng(0).random(shape)
    spec = st.P(*[None] * (len(shape) - 1), "x")
    x = st.device_put(host, st.NamedSharding(mesh_of((4,), backend), spec))
    with st.transfers() as log:
        result = call(x)
    with st.transfers() as simulated:
        call(st.empty_like(x, device=st.NamedSharding(st.AbstractMesh((4,), ("x",)), spec)))
    np.testing.assert_array_equal(result, call(st.device_put(host, x.sharding.mesh.flat[0])), strict=True)
    shares = 3 if result.sharding.spec == st.P() else 0.75
    assert log.bytes == simulated.bytes == 0.75 * x.nbytes + shares * result.nbytes
    assert len(log) == 6
    found = plan(name, (x,), *params)
    assert found.strategy == ("first" if x._aval.memory is None else "whole")  # Logical devices of one GPU share it.
    assert [schedule.bytes for schedule in found.schedules()] == [shares * result.nbytes]


@everywhere
def test_few_elements_are_counted_on_the_first_device(backend: str) -> None:
    """Its kernels take longer than its messages, which are those of all elements; of more, counts are combined."""
    mesh, edges = mesh_of((4,), backend), np.linspace(0, 1, 6)
    for size, few in ((8186, True), (8187, False)):  # beside six edges
        x = st.device_put(np.random.default_rng(0).random(size), mesh)
        found = plan("counts_between", (x, edges, None), None, None)
        assert bool(found.partial_axes) is not few
        with st.transfers() as log:
            counts = counts_between(x, edges)
        np.testing.assert_array_equal(counts, np.histogram(x, edges)[0])
        to_first = (size - -(-size // 4)) * 8 + edges.nbytes
        assert log.bytes == (to_first + 3 * counts.nbytes if few else 4 * edges.nbytes + 6 * counts.nbytes)
        assert log.bytes == st.explain(counts_between, x, edges).bytes
    for size, few in ((8191, True), (8192, False)):  # beside one element
        x = st.device_put(np.arange(float(size)), mesh)
        assert bool(plan("isin", (np.asarray([3.0]), x), False).partial_axes) is not few
        assert st.isin(np.asarray([3.0]), x).tolist() == [True]
    weights = st.ones((8,), device=mesh)
    assert plan("counts_between", (weights, edges, weights), None, None).partial_axes  # Sums depend on the grouping.


def test_many_bytes_are_gathered_on_every_device() -> None:
    for size, wanted in ((1 << 13, "first"), ((1 << 13) + 8, "per shard")):
        x = st.zeros((size,), device=mesh_of((4,), "checked"))
        assert plan("median", (x,), None, False).strategy == wanted


def test_plans_that_are_used_stay(fresh: None) -> None:
    x = st.ones((4,))
    x + x
    for n in range(5000):
        st.zeros((n % 4999,))
        if not n % 1000:
            x + x
    before = plan_cache._cached_plan.cache_info()
    assert before.currsize == 4096
    x + x
    assert plan_cache._cached_plan.cache_info().misses == before.misses


class Recorder(Interpreter):
    """Records the names of operators, and executes them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def apply(self, op: Op, operands: Any, params: Any, /) -> Any:
        self.calls.append(op.name)
        return EAGER.apply(op, operands, params)

    def write(self, out: Any, op: Op, operands: Any, params: Any, /) -> None:
        self.calls.append(f"into {op.name}")
        EAGER.write(out, op, operands, params)


def test_interpreters_form_a_stack(backend: str) -> None:
    x, outer, inner = split(backend, st.P("x")), Recorder(), Recorder()

    def fails(y: Any) -> None:
        with interpreting(inner):
            y *= 2
            np.add(y, 1, out=y)
            assert innermost() is inner
            raise KeyError

    with interpreting(outer):
        y = x + 1
        y[0] = 5
        with pytest.raises(KeyError):
            fails(y)
        assert innermost() is outer
        total = float(y.sum())
    assert innermost() is None
    assert total == 7 * 6 * 5 + 6 * 11
    assert inner.calls == ["into multiply", "into add"]
    assert outer.calls == ["add", "into setitem", "sum", "to_host"]


def test_writes_are_seen_by_interpreters_that_define_only_apply(backend: str) -> None:
    calls: list[str] = []

    class Half(Interpreter):
        def apply(self, op: Op, operands: Any, params: Any, /) -> Any:
            calls.append(op.name)
            return EAGER.apply(op, operands, params)

    x = split(backend, st.P("x"))
    rows = x[2:]
    with interpreting(Half()):
        x[:2] = 5
        rows += 1
        np.multiply(rows, 2, out=rows[::-1])
    assert calls == ["setitem", "put", "add", "put", "getitem", "multiply", "put"]
    np.testing.assert_array_equal(x, [[5] * 6] * 2 + [[4] * 6] * 6)
    with interpreting(Half()), pytest.raises(st.ArgumentTypeError, match="not of the same kind"):
        st.arange(3).__iadd__(0.5)


def test_writes_of_threads_to_one_base_lose_no_update(backend: str) -> None:
    """By an interpreter that defines only `apply`."""
    start = threading.Barrier(2)

    class Slow(Interpreter):
        def apply(self, op: Op, operands: Any, params: Any, /) -> Any:
            result = EAGER.apply(op, operands, params)
            if op.name == "put":
                time.sleep(0.1)
            return result

    x = split(backend, st.P("x"))

    def write(rows: slice) -> None:
        with interpreting(Slow()):
            start.wait()
            x[rows] = 5

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, (slice(4), slice(4, 8))))
    np.testing.assert_array_equal(x, 5)
