"""`AbstractMesh`: a mesh of devices that do not exist, for `shardtensor.simulate`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend import registry
from shardtensor.backend.abstract import _backend, abstract_device
from shardtensor.core import hinted
from shardtensor.errors import ShardingError
from shardtensor.host.units import counted
from shardtensor.sharding.mesh import Mesh, integers


class AbstractMesh(Mesh):
    """A mesh of any number of devices that do not exist; the name is JAX's.

    Tensors on it have a shape, a dtype and a sharding, but no elements. Operators on them are planned like any others,
    but not executed; `st.simulate` reports the transfers that they would make. The device at position k in mesh order
    has the id k, so that two meshes of equal size contain the same devices.

    Args:
        axis_sizes: the size of each axis.
        axis_names: the name of each axis.
        processes: the number of processes that the devices belong to: the first of them to the first process, and so
            on, as many to each. The devices of a process share its memory.

    Raises:
        ArgumentTypeError: a size is not an integer.
        ShardingError: a size is below 1, the numbers of sizes and names differ, or the devices cannot be divided among
            the processes.

    >>> mesh = st.AbstractMesh((64, 64), ("data", "model"))
    >>> x = st.zeros((2**20, 2**20), device=st.NamedSharding(mesh, st.P("data", "model")))
    >>> (x @ x.T).sharding.spec
    P('data')
    """

    __slots__ = ()

    @hinted
    def __init__(self, axis_sizes: Sequence[int], axis_names: str | Sequence[str], *, processes: int = 1) -> None:
        sizes = integers(axis_sizes, "AbstractMesh: axis_sizes")
        if any(n < 1 for n in sizes):
            raise ShardingError(f"AbstractMesh: axis_sizes={tuple(sizes)} must be positive")
        registry.install(_backend)
        (count,), size = integers(processes, "AbstractMesh: processes"), math.prod(sizes)
        if count < 1 or size % count:
            raise ShardingError(f"AbstractMesh: processes={count}; wanted a divisor of the {counted(size, 'device')}")
        devices = [abstract_device(k, k * count // size) for k in range(size)]
        super().__init__(np.array(devices, dtype=object).reshape(sizes), axis_names)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(AbstractMesh, processes=self._processes), (self.axis_sizes, self.axis_names)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"AbstractMesh({axes}{f'; {self._processes} processes' if self._processes > 1 else ''})"

    @property
    def _processes(self) -> int:
        return self.flat[-1].process_index + 1
