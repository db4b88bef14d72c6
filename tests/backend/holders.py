"""What the tests of ownership hold of tensors, and how they look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import shardtensor as st
from tests.layouts import mesh_of, place_of, values_of

VALUE = np.arange(24.0).reshape(8, 3)

LEAKED: list[Any] = []


def put(value: Any, backend: str, mesh: tuple[int, ...] = (4,)) -> st.ShardedTensor:
    return st.device_put(np.asarray(value), st.NamedSharding(mesh_of(mesh, backend), st.P("x")))


def places(x: st.ShardedTensor) -> list[int]:
    """Where the shards lie. Keeps none of them."""
    return [place_of(shard.data) for shard in x.addressable_shards]


def shard_data(x: st.ShardedTensor) -> list[Any]:
    return [shard.data for shard in x.addressable_shards]


def leak(x: Any, take: Callable[[Any], Any] = lambda p: p) -> list[Any]:
    """The arguments of mapped functions, or what they take of them."""
    st.pmap(lambda p: LEAKED.append(take(p)) or 0, st.shard(x, devices=x.sharding.mesh), axis_name="i")
    kept = LEAKED[:]
    LEAKED.clear()
    return kept


def seen(held: Any) -> Any:
    """The elements that a holder sees, as host arrays."""
    if isinstance(held, (list, tuple)):
        return [seen(part) for part in held]
    if isinstance(held, (np.ndarray, st.ShardedTensor)):
        return np.array(held)
    return values_of(held)
