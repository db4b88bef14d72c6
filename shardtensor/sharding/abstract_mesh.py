"""A mesh of devices that do not exist, for `shardtensor.simulate`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend import registry as plugins
from shardtensor.backend.abstract import _backend, phantom
from shardtensor.errors import ArgumentTypeError, ShardingError
from shardtensor.sharding.mesh import Mesh


class AbstractMesh(Mesh):
    """A mesh of devices that do not exist, in any number. JAX's name.

    Tensors on it have shape, dtype and sharding, and no elements. Operators on them are planned as on any others, and
    run nothing; `st.simulate` reports what they would send. Device k in mesh order has the id k, so that two meshes of
    one size are two views of the same devices.

    Args:
        axis_sizes: the size of each axis.
        axis_names: the name of each axis.

    Raises:
        ShardingError: sizes below 1, or sizes and names that do not fit each other.

    >>> mesh = st.AbstractMesh((64, 64), ("data", "model"))
    >>> x = st.zeros((2**20, 2**20), device=st.NamedSharding(mesh, st.P("data", "model")))
    >>> (x @ x.T).sharding.spec
    P('data')
    """

    __slots__ = ()

    def __init__(self, axis_sizes: Sequence[int], axis_names: str | Sequence[str]) -> None:
        try:
            sizes = [operator.index(n) for n in ((axis_sizes,) if isinstance(axis_sizes, int) else axis_sizes)]
        except TypeError:
            raise ArgumentTypeError(
                f"AbstractMesh: axis_sizes is {axis_sizes!r:.60}; wanted a sequence of integers"
            ) from None
        if any(n < 1 for n in sizes):
            raise ShardingError(f"AbstractMesh: axis_sizes={tuple(sizes)} must be positive")
        plugins.install(_backend)
        grid = np.empty(math.prod(sizes), object)
        grid[:] = [phantom(k) for k in range(len(grid))]
        super().__init__(grid.reshape(sizes), axis_names)

    def __reduce__(self) -> tuple[Any, ...]:
        return AbstractMesh, (self.axis_sizes, self.axis_names)

    def __repr__(self) -> str:
        return f"AbstractMesh({', '.join(f'{name}={size}' for name, size in self.shape.items())})"
