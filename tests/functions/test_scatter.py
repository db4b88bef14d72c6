"""The operator that adds rows at given places."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from shardtensor.communication.all_reduce import reduction_tree
from shardtensor.functions.building.scatter import added_on_host, rows_at, scatter_add, scatter_add_each
from tests.layouts import assert_close, everywhere, mesh_of, put


@everywhere
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int32"])
def test_rows_are_added(shape: tuple[int, ...], dtype: str, backend: str) -> None:
    rng = np.random.default_rng(0)
    at, values = rng.integers(0, 6, (9, 2)).astype("int8"), (8 * rng.standard_normal((9, 2, *shape))).astype(dtype)
    wanted = np.zeros((6, *shape), dtype)
    np.add.at(wanted, at, values)
    for spec in (st.P("x"), st.P(None, "x"), st.P()):
        made = scatter_add(put(at, backend, spec=spec), put(values, backend), size=6)
        assert made.dtype == dtype
        assert_close(made, wanted, exact=dtype == "int32")
    assert_close(scatter_add(put(at[:0], backend), put(values[:0], backend), size=6), np.zeros_like(wanted), exact=True)


def test_the_layout_of_the_sum_can_be_chosen() -> None:
    at, values = put(np.array([0, 3, 3, 1]), "numpy"), put(np.eye(4), "numpy")
    split = scatter_add(at, values, size=4, out_sharding=values.sharding)
    assert split.sharding == values.sharding
    assert np.asarray(split)[3].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("shape", [(), (5,)])
@pytest.mark.parametrize(("mesh", "spec"), [((8,), st.P("x")), ((2, 3), st.P(("x", "y"))), ((2, 3), st.P("x", "y"))])
def test_the_mesh_determines_the_bits(mesh: tuple[int, ...], spec: st.P, shape: tuple[int, ...]) -> None:
    """Where memory is shared, the rows of all devices are added at once, with the bits of sums on each device."""
    rng = np.random.default_rng(1)
    at, values = rng.integers(0, 7, (61, 3)), rng.standard_normal((61, 3, *shape)).astype("float32")
    values[at == 2] = -0.0
    at[:, 0] = 3  # The other devices have no row of the place 4 and 5.
    at[at == 4], at[20:, :][at[20:, :] == 5] = 3, 3
    sharding = st.NamedSharding(mesh_of(mesh, "numpy"), spec)
    x, y = st.device_put(at, sharding), st.device_put(values, sharding)
    parts = [
        added_on_host(np.asarray(a.data).reshape(-1), np.asarray(v.data).reshape(-1, *shape), 7)
        for a, v in zip(x.addressable_shards, y.addressable_shards, strict=True)
    ]
    tree = reduction_tree((True,) * len(parts), mesh)
    for left, right in itertools.chain.from_iterable(tree):
        parts[left] = parts[left] + parts[right]
    assert np.asarray(scatter_add(x, y, size=7)).tobytes() == parts[0].tobytes()


def test_time_is_in_proportion_to_the_rows_on_shared_memory(monkeypatch: Any) -> None:
    sizes = []
    made = np.zeros
    monkeypatch.setattr(np, "zeros", lambda shape, *rest: (sizes.append(shape), made(shape, *rest))[1])
    x = st.ones((16, 4), device=mesh_of((8,), "numpy"))
    scatter_add(put(np.arange(16) % 3, "numpy"), x, size=1000)
    assert [shape for shape in sizes if np.prod(shape) >= 1000] == [(1000, 4)]


@everywhere
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
@pytest.mark.parametrize("count", [0, 4])
def test_lines_have_rows_of_their_own(count: int, shape: tuple[int, ...], backend: str) -> None:
    rng = np.random.default_rng(0)
    at, values = rng.integers(0, 6, (7, count, 2)), rng.standard_normal((7, count, 2, *shape))
    wanted = np.zeros((7, 6, *shape))
    for n in range(7):
        np.add.at(wanted[n], at[n], values[n])
    places = put(at, backend)
    added = scatter_add_each(places, put(values, backend), size=6)
    assert_close(added, wanted, exact=False)
    selected = rows_at(added, places - 6, lines=1)
    assert_close(selected, np.stack([wanted[n][at[n]] for n in range(7)]), exact=False)
    assert added.sharding.spec == selected.sharding.spec == st.P("x")


@everywhere
def test_rows_are_selected_where_their_numbers_are(backend: str) -> None:
    x, at = np.random.default_rng(0).standard_normal((5, 3)), np.array([[1, -5], [4, 0], [0, 0]])
    table, places = put(x, backend, spec=st.P()), put(at, backend)
    with st.transfers() as log:
        found = rows_at(table, places)
    assert_close(found, x[at], exact=True)
    assert (found.sharding.spec, log.bytes) == (st.P("x"), 0)
    for k in (5, -6):
        with pytest.raises(st.IndexingError, match=f"index {k} is out of bounds for axis 0 with size 5"):
            rows_at(table, np.array([0, k]))
    g = st.grad(lambda x: (rows_at(x, at) ** 2).sum())(table)
    wanted = np.zeros((5, 3))
    np.add.at(wanted, at, 2 * x[at])
    assert_close(g, wanted, exact=False)
