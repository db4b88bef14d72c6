"""`AbstractMesh`: a mesh of devices that do not exist, for `shardtensor.simulate`."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend import registry
from shardtensor.backend.abstract import _backend, abstract_device
from shardtensor.errors import ArgumentTypeError, ShardingError
from shardtensor.sharding.mesh import Mesh


class AbstractMesh(Mesh):
    """A mesh of any number of devices that do not exist; the name is JAX's.

    Tensors on it have a shape, a dtype and a sharding, but no elements. Operators on them are planned like any others,
    but not executed; `st.simulate` reports the transfers that they would make. The device at position k in mesh order
    has the id k, so that two meshes of equal size contain the same devices.

    Args:
        axis_sizes: the size of each axis.
        axis_names: the name of each axis.

    Raises:
        ArgumentTypeError: a size is not an integer.
        ShardingError: a size is below 1, or the numbers of sizes and names differ.

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
        registry.install(_backend)
        grid = np.empty(math.prod(sizes), object)
        grid[:] = [abstract_device(k) for k in range(len(grid))]
        super().__init__(grid.reshape(sizes), axis_names)

    def __reduce__(self) -> tuple[Any, ...]:
        return AbstractMesh, (self.axis_sizes, self.axis_names)

    def __repr__(self) -> str:
        return f"AbstractMesh({', '.join(f'{name}={size}' for name, size in self.shape.items())})"
