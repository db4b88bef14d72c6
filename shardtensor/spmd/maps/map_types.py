"""The types of maps and collectives, for type checkers.

A mapped function is annotated with the arrays that it receives and returns, those of the backend, and its map with
tensors. Where a function returns anything else than one array, such as a tuple, the type of the map's result is Any,
because no annotation expresses that the arrays in it become tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, Required, TypedDict, TypeVar, overload

import numpy as np

from shardtensor.backend.device import HostArray
from shardtensor.sharding.mesh import Mesh
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

Arguments = ParamSpec("Arguments")

Array = TypeVar("Array", ShardedTensor, HostArray, np.generic, ShardedTensor | HostArray | np.generic)
"""What a mapped function returns: one array, or one of NumPy's scalars."""

Anything = TypeVar("Anything")
"""What any other mapped function returns.

Overloads have ``Callable[..., Array]`` and ``Callable[..., Anything]`` in the same place, since mypy takes none of them
where a type that contains Any, such as `numpy.ndarray` without its dtype, matches different types in two of them. It
does not tell type variables apart there.
"""


class Unknown:
    """What no function returns. With its overload, mypy does not take a result of Any for an array."""


Given = TypeVar("Given", ShardedTensor, HostArray, ArrayLike)
"""The first array to which a map is applied."""

Tree = TypeVar("Tree")
"""Any other argument of a map, in the place of `Given`; and what a collective receives and returns."""


class PmapOptions(TypedDict, total=False):
    """The keyword arguments of `pmap`."""

    axis_name: str | None
    in_axes: Any
    out_axes: Any
    static_argnums: int | Sequence[int]
    devices: Sequence[Any] | Mesh | None
    donate: bool


class Pmapped(Protocol):
    """What `pmap` returns for a function that returns one array."""

    @overload
    def __call__(self, array: Given, /, *args: ArrayLike, **kwargs: ArrayLike) -> ShardedTensor: ...

    @overload
    def __call__(self, shards: list[Any], /, *args: Any, **kwargs: Any) -> list[ShardedTensor]: ...

    @overload
    def __call__(self, tree: Tree, /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def __call__(self, **kwargs: Any) -> Any: ...


class ShardMapOptions(TypedDict, total=False):
    """The keyword arguments of `shard_map`."""

    mesh: Mesh | None
    in_specs: Any
    out_specs: Required[Any]
    axis_names: Sequence[str] | set[str] | frozenset[str] | None
    check_vma: bool


class ShardMapDecorator(Protocol):
    """What `shard_map` returns where the function is not given yet."""

    @overload
    def __call__(self, f: Callable[Arguments, ShardedTensor], /) -> Callable[Arguments, ShardedTensor]: ...

    @overload
    def __call__(self, f: Callable[..., Array], /) -> Callable[..., ShardedTensor]: ...

    @overload
    def __call__(self, f: Callable[..., Anything], /) -> Callable[..., Any]: ...


class Collective(Protocol[Arguments]):
    """A collective: the result has the form of ``x``. The dtype and the shape of an array may change."""

    __name__: str

    @overload
    def __call__(self, x: HostArray, *args: Arguments.args, **kwargs: Arguments.kwargs) -> HostArray: ...

    @overload
    def __call__(self, x: Tree, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Tree: ...
