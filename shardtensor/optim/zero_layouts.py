"""ZeRO: the layouts in which the devices of a mesh axis divide parameters, gradients and the state of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShardingError
from shardtensor.hints import similar
from shardtensor.optim.parameter_trees import kind_text
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import P
from shardtensor.tensor import pytree


class ZeroShardings(NamedTuple):
    """The layouts of one level of ZeRO, as `zero` returns them.

    Attributes:
        params: the shardings of the parameters, a tree like them.
        grads: those of their gradients, likewise.
        state: those of their moments, likewise: ``init`` of an optimizer makes a state in the layouts of the parameters
            that it gets, so that ``optimizer.init(st.reshard(params, layouts.state))`` is one that no device has whole.
    """

    params: Any
    grads: Any
    state: Any


@hinted
def zero(params: Any, axis: str | Sequence[str] = "data", level: int = 1) -> ZeroShardings:
    """Returns layouts in which the devices of a mesh axis, which would else hold the same elements, divide them.

    S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020. Level 1 divides
    the state of the optimizer, level 2 also the gradients, level 3 also the parameters. A tensor is split along the
    dimension of which a device has the most elements, in addition to the axes that split it already, so that the
    parameters of a 2-d mesh may be divided for tensor parallelism before. Sizes need not divide.

    The step of a program of `shardtensor.jit` is ``grads = st.reshard(grads, layouts.grads)``, then ``update`` and
    `apply_updates`, which keep the layouts of the state and of the parameters. With n devices along the axis and
    parameters of G bytes on each of them, that sends

    * without ZeRO 2 (n − 1) G bytes, an all-reduce;
    * at level 1 and 2 the same, a reduce-scatter of the gradients and an all-gather of the parameters. At level 1, a
      function that needs whole gradients, such as `clip_by_global_norm`, makes the first of them an all-reduce, and
      the sum 3 (n − 1) G;
    * at level 3 at most 3 (n − 1) G: a loss that gathers a parameter, ``st.reshard(w, P())``, where it is used, gathers
      it again for its gradient, which is reduce-scattered.

    Eager mode adds up gradients in the layouts of the parameters, at level 1 and 2 by an all-reduce.

    Args:
        params: the parameters: a pytree of tensors.
        axis: the mesh axis, or several.
        level: 1, 2 or 3.

    Raises:
        ArgumentError: ``level`` is none of these.
        ArgumentTypeError: a parameter is no tensor.
        ShardingError: the mesh of a parameter has no such axis.

    >>> mesh = st.make_mesh((4,), ("data",))
    >>> params = {"w": st.ones((8, 3), device=st.NamedSharding(mesh, st.P()))}
    >>> layouts = st.optim.zero(params, level=2)
    >>> layouts.params["w"].spec, layouts.grads["w"].spec
    (P(), P('data'))
    >>> state = st.optim.adamw(1e-3).init(st.reshard(params, layouts.state))
    >>> state[0].mu["w"].sharding.spec, state[0].count.sharding.spec
    (P('data'), P())
    """
    if level not in (1, 2, 3) or isinstance(level, bool):
        raise ArgumentError(
            f"optim.zero: level is {level!r}; wanted 1 (state), 2 (and gradients) or 3 (and parameters)"
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    leaves, paths = pytree.leaves(params), pytree.paths(params)
    for path, x in zip(paths, leaves, strict=True):
        _check(f"params{path}", x, axes)
    split = [None if x is None else _split(x, axes) for x in leaves]
    given = pytree.map_leaves(lambda x: None if x is None else x.sharding, params)
    divided = pytree.replaced(params, split)
    return ZeroShardings(params=divided if level == 3 else given, grads=given if level == 1 else divided, state=divided)


def _check(name: str, x: Any, axes: Sequence[str]) -> None:
    if x is None:
        return
    if not isinstance(getattr(x, "sharding", None), NamedSharding):
        raise ArgumentTypeError(f"optim.zero: {name} is {kind_text(x)}; wanted a tensor, as st.device_put returns it")
    for axis in axes:
        if axis not in x.sharding.mesh.shape:
            raise ShardingError(
                f"optim.zero: axis is {axis!r}, and the mesh of {name} has the axes "
                f"{', '.join(map(repr, x.sharding.mesh.shape))}; wanted one of them"
                f"{similar(axis, x.sharding.mesh.shape)}"
            )


def _split(x: Any, axes: Sequence[str]) -> NamedSharding:
    """Returns the layout of a tensor that mesh axes split, too, along the dimension that is longest on a device."""
    sharding: NamedSharding = x.sharding
    mesh, spec = sharding.mesh, sharding.spec
    new = [axis for axis in axes if axis in spec.reduced or axis not in spec.axes]
    chains = list(spec.chains_of(x.ndim))
    if not new or not chains:
        return sharding
    lengths = [
        size / np.prod([mesh.shape[a] for a in chain], dtype=int) for size, chain in zip(x.shape, chains, strict=True)
    ]
    longest = lengths.index(max(lengths))
    chains[longest] = (*chains[longest], *new)
    return sharding.with_spec(P(*chains, unreduced=spec.unreduced, reduced=spec.reduced.difference(new)))
