"""Ways in which the tests of ownership hold tensors and their arrays, and read their elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import shardtensor as st
from tests.layouts import place_of, values_of

VALUE = np.arange(24.0).reshape(8, 3)

LEAKED: list[Any] = []


def places(x: st.ShardedTensor) -> list[int]:
    """Returns the addresses of the shards. Holds none of the arrays."""
    return [place_of(shard.data) for shard in x.addressable_shards]


def shard_data(x: st.ShardedTensor) -> list[Any]:
    return [shard.data for shard in x.addressable_shards]


def leak(x: Any, take: Callable[[Any], Any] = lambda p: p) -> list[Any]:
    """Returns the arguments of mapped functions, or the results of ``take`` for them, after the map has ended."""
    st.pmap(lambda p: LEAKED.append(take(p)) or 0, st.shard(x, devices=x.sharding.mesh), axis_name="i")
    kept = LEAKED[:]
    LEAKED.clear()
    return kept


def seen(held: Any) -> Any:
    """Returns the elements that a holder of arrays reads, as host arrays."""
    if isinstance(held, (list, tuple)):
        return [seen(part) for part in held]
    if isinstance(held, (np.ndarray, st.ShardedTensor)):
        return np.array(held)
    return values_of(held)
