"""How many Python functions maps call: these calls take most of the time of a small map."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import shardtensor_numpy

import shardtensor as st
from shardtensor.host import threads
from tests.calls import calls_of


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper threads, which only maps that take long have, would change the numbers, and so would small floats."""
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    monkeypatch.setattr(shardtensor_numpy.NumPyBackend, "helper_delay", math.inf)
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)


def test_a_map_of_a_list() -> None:
    shards = st.shard(np.arange(64.0), devices=st.devices("numpy")[:8])
    assert len(shards) == 8
    assert calls_of(lambda: st.pmap(lambda x: x + 1, shards)) <= 154
    # What a map costs besides its programs.
    assert calls_of(lambda: st.pmap(lambda x: x + 1, shards[:1])) <= 97


def test_a_collective() -> None:
    mesh = st.make_mesh((8,), ("x",), devices=st.devices("numpy")[:8])
    x = st.device_put(np.arange(64.0), st.NamedSharding(mesh, st.P("x")))

    def mapped(count: int) -> Callable[[], Any]:
        def fn(block: Any) -> Any:
            for _ in range(count):
                block = st.psum(block, "x")
            return block

        made = st.shard_map(fn, mesh=mesh, in_specs=st.P("x"), out_specs=st.P())
        return lambda: made(x)

    one, two = calls_of(mapped(1)), calls_of(mapped(2))
    assert one <= 564 + 5 * 8  # Workers that wait since earlier maps end when calls are counted: a step each, and more.
    assert two - one <= 8 * 29
