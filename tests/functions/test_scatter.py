"""The operator that adds rows at given places."""

from __future__ import annotations

import numpy as np
import pytest

import shardtensor as st
from shardtensor.functions.scatter import scatter_add
from tests.layouts import assert_close, everywhere, put


@everywhere
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_rows_are_added(shape: tuple[int, ...], backend: str) -> None:
    rng = np.random.default_rng(0)
    at, values = rng.integers(0, 6, (5, 2)), rng.standard_normal((5, 2, *shape))
    wanted = np.zeros((6, *shape))
    np.add.at(wanted, at, values)
    for spec in (st.P("x"), st.P()):
        assert_close(scatter_add(put(at, backend, spec=spec), put(values, backend), size=6), wanted, exact=False)


def test_the_layout_of_the_sum_can_be_chosen() -> None:
    at, values = put(np.array([0, 3, 3, 1]), "numpy"), put(np.eye(4), "numpy")
    split = scatter_add(at, values, size=4, out_sharding=values.sharding)
    assert split.sharding == values.sharding
    assert np.asarray(split)[3].tolist() == [0, 1, 1, 0]
