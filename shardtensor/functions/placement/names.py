"""Names of values, by which the policies of `st.remat` know them."""

from __future__ import annotations

from typing import Any

from shardtensor.core import implements, named, operator
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

_DERIVATIVES = "of_movement"


@operator(error_name="checkpoint_name", tags=("internal",))
def name(x: ArrayLike, /, *, name: str) -> ShardedTensor:
    """Returns x, of which policies of `st.remat` see the name."""


@implements(name, "composite")
def _same(x: Any, name: str) -> Any:
    return x.copy()


@named
def checkpoint_name(x: Any, name: str) -> Any:
    """Returns x, which has a name for the policies of `st.remat`, such as
    ``st.checkpoint_policies.save_only_these_names``.

    Args:
        x: a pytree. Leaves that are not tensors are returned as they are.
        name: the name.

    >>> def f(x):
    ...     return st.sin(st.checkpoint_name(st.sin(x), "inner"))
    >>> only_inner = st.checkpoint_policies.save_only_these_names("inner")
    >>> st.grad(lambda x: st.remat(f, policy=only_inner)(x).sum())(st.zeros(2)).tolist()
    [1.0, 1.0]
    """
    return map_leaves(lambda leaf: _name(leaf, name=name) if type(leaf) is ShardedTensor else leaf, x)


_name = name
