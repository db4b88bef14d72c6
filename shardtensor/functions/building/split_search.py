"""`searchsorted` and `isin` of two operands that the same mesh axis splits: neither is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.core import operator
from shardtensor.functions.algorithms.distributed import with_host_function
from shardtensor.functions.algorithms.first_device import GATHERED
from shardtensor.functions.algorithms.search import layout_of_both, search
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.host import host_searching
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval, aval

_DERIVATIVES = "of_ordering"


def are_split_alike(x1: Any, x2: Any) -> bool:
    """Returns whether the same mesh axis splits two large tensors of real numbers, so that an operator whose rule lets
    only one of them be split would gather the other one.
    """
    if not (isinstance(x1, ShardedTensor) and isinstance(x2, ShardedTensor)):
        return False
    if min(x1._aval.nbytes, x2._aval.nbytes) <= GATHERED or not {x1.dtype.kind, x2.dtype.kind} <= set("iuf"):
        return False
    first, second = [{axis for c in x.sharding.spec.chains_of(x.ndim) for axis in c} for x in (x1, x2)]
    return x1.sharding.mesh == x2.sharding.mesh and not first.isdisjoint(second)


@operator(operands=("x", "ordered"), error_name="searchsorted", tags=("internal",))
def searchsorted_split(x: ArrayLike, ordered: ArrayLike, /, *, side: str) -> ShardedTensor:
    """Returns ``searchsorted(ordered, x)`` of two tensors that are split, in x's layout.

    >>> from shardtensor.functions.building.split_search import searchsorted_split
    >>> searchsorted_split(st.asarray([0, 3, 9]), st.asarray([1, 3, 3, 5]), side="left").tolist()
    [0, 1, 4]
    """


def _found_aval(x: Aval, ordered: Aval, *, side: str) -> Aval:
    return aval(x.shape, np.dtype("int64"), x.sharding, x.committed)


def _found_in_whole(x: Any, ordered: Any, *, side: str) -> Any:
    return host_searching.searchsorted(ordered, x, side)


@with_host_function(searchsorted_split, _found_in_whole, _found_aval, layout_of_both, "by elements")
def _searchsorted_split(x: Shards, ordered: Shards, along: Callable[..., MeshCommunicator], *, side: str) -> Shards:
    def position(xp: Any, part: Any, elements: Any, begin: int) -> Any:
        return xp.add(xp.searchsorted(part, elements, side=side), begin)

    return search(x, ordered, along, side, position, np.dtype("int64"))


@operator(operands=("x", "ordered"), error_name="isin", tags=("internal",))
def isin_sorted(x: ArrayLike, ordered: ArrayLike, /) -> ShardedTensor:
    """Tests for each element of x whether it is equal to any element of ``ordered``, which is in order unless
    `shardtensor.functions.algorithms.first_device.runs_whole` is true of x.

    >>> from shardtensor.functions.building.split_search import isin_sorted
    >>> isin_sorted(st.asarray([1, 2, 3]), st.asarray([1, 3])).tolist()
    [True, False, True]
    """


def _membership(x: Aval, ordered: Aval) -> Aval:
    return aval(x.shape, np.dtype("bool"), x.sharding, x.committed)


@with_host_function(isin_sorted, np.isin, _membership, layout_of_both, "by elements")
def _isin_sorted(x: Shards, ordered: Shards, along: Callable[..., MeshCommunicator]) -> Shards:
    return search(x, ordered, along, "left", _is_in, np.dtype("bool"))


def _is_in(xp: Any, part: Any, elements: Any, begin: int) -> Any:
    if not part.shape[0]:
        return xp.zeros(elements.shape, dtype=np.dtype("bool"))
    at = xp.clip(xp.searchsorted(part, elements, side="left"), 0, part.shape[0] - 1)
    return xp.equal(part[at], elements)
