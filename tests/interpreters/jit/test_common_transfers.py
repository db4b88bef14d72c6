"""Common transfers: a tensor that several operators need in the same other layout is transferred once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.interpreters.jit.random_programs import run_seeds
from tests.layouts import array, everywhere, mesh_of


@everywhere
def test_a_value_is_transferred_once(backend: str) -> None:
    mesh = mesh_of((4,), backend)
    x = st.device_put(array((10, 6), "float32", 1), st.NamedSharding(mesh, st.P("x")))
    y = st.device_put(array((10, 6), "float32", 2), st.NamedSharding(mesh, st.P(None, "x")))

    def f(x: Any, y: Any) -> Any:
        return x + y, st.exp(x) * y, x - y

    traced = st.jit(f, executor="numpy")
    with st.transfers() as eager:
        wanted = f(x, y)
    with st.transfers() as sent:
        found = traced(x, y)
    assert sent.bytes == traced.lower(x, y).cost().bytes == eager.bytes // 3 > 0
    assert not any(t.explicit for t in sent)
    for a, b, c in zip(found, wanted, traced(x, y), strict=True):
        assert a.sharding == b.sharding == c.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        np.testing.assert_array_equal(np.asarray(c), np.asarray(b))
    with st.transfer_guard("disallow"), pytest.raises(st.TransferError):
        traced(x, y)


def test_common_transfers_are_priced_on_devices_that_do_not_exist() -> None:
    mesh = st.AbstractMesh((4,), ("x",))
    x, y = (st.zeros((10, 6), device=st.NamedSharding(mesh, spec)) for spec in (st.P("x"), st.P(None, "x")))
    f = lambda x, y: (x + y, x * y)  # noqa: E731
    once, twice = (sum(o.bytes for o in st.simulate(g, x, y).operators) for g in (st.jit(f), f))
    assert 2 * once == twice > 0


def test_a_transfer_that_would_lengthen_sums_is_made_for_each_equation() -> None:
    run_seeds(None, 9424, 1, every=1)
