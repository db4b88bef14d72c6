"""Trees that the tests of faults save, and their comparison bit by bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import shardtensor as st


def small(step: int) -> dict[str, Any]:
    """A tree of few files whose every element depends on the step."""
    mesh = st.make_mesh((2,), ("x",))
    w = st.device_put(np.arange(6.0) + step, st.NamedSharding(mesh, st.P("x")))
    return {"a": {"w": w}, "b": np.full(3, step, np.int32), "step": step}


def every_kind() -> dict[str, Any]:
    """A tree with each kind of leaf and container."""
    mesh = st.make_mesh((2, 2), ("x", "y"))
    return {
        "w": st.device_put(np.arange(12.0).reshape(4, 3), st.NamedSharding(mesh, st.P("x"))),
        "deep": [{"b": st.arange(5)}, (st.ones(()), 2)],
        "empty": st.zeros((0, 3)),
        "host": np.arange(3, dtype="m8[s]"),
        "values": [None, True, 7, -1.5, float("nan"), 2j, "text", b"\0", np.float32(3), st.random.key(5)],
        "generators": [np.random.Generator(getattr(np.random, name)(3)) for name in ("PCG64", "Philox", "SFC64")],
        "twister": np.random.Generator(np.random.MT19937(3)),
        "old": np.random.RandomState(3),
        "python": random.Random(3),
    }


def bits(tree: Any) -> Any:
    """A tree as values that `==` compares bit by bit."""
    if isinstance(tree, dict):
        return {key: bits(child) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [bits(child) for child in tree]
    if isinstance(tree, (st.ShardedTensor, np.ndarray)):
        array = np.asarray(tree)
        return str(array.dtype), array.shape, array.tobytes()
    if isinstance(tree, np.random.Generator):
        return repr(tree.bit_generator.state)
    if isinstance(tree, np.random.RandomState):
        return repr(tree.get_state(legacy=False))
    if isinstance(tree, random.Random):
        return repr(tree.getstate())
    return type(tree).__name__, repr(tree)
