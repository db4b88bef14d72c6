"""How many Python functions small calls of operators call."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import shardtensor as st
from tests.calls import calls_of, hops_of


def test_indexing_sorts_and_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)  # Where it is imported, dtypes are looked at.
    mesh = st.make_mesh((8,), ("x",), devices=st.devices("numpy")[:8])
    x = st.arange(64.0, device=mesh)
    m, index = st.reshape(x, (8, 8)), np.array([3, 1, 60, 7])
    for fn, calls, hops in (
        (lambda: x[index], 34, 19),
        (lambda: float(m[0, 0]), 35, 24),
        (lambda: st.sort(x), 42, 18),
        (lambda: st.cumulative_sum(x), 46, 23),
    ):
        assert calls_of(fn) <= calls
        assert hops_of(fn) <= hops


def test_recording_a_call_for_a_gradient() -> None:
    x = st.arange(64.0, device=st.make_mesh((8,), ("x",), devices=st.devices("numpy")[:8]))

    def calls(count: int) -> int:
        def chain(x: Any) -> Any:
            for _ in range(count):
                x = x * 1.01
            return x

        st.vjp(chain, x)
        return calls_of(lambda: st.vjp(chain, x))

    assert calls(21) - calls(1) <= 20 * 50
