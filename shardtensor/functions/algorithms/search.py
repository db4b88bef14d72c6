"""Search of elements that are split among elements in order that are split: each element is sent once.

The devices exchange the last element of their parts of the ordered elements, which determine the part in which an
element is found. Each device sends its elements to the devices that hold these parts, and those reply. Besides P * (P -
1) elements, a device sends and receives ``itemsize + n`` bytes for each element that is found on another device, where
replies have n bytes. They are sent in rounds, see `shardtensor.functions.algorithms.requests`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.functions.algorithms.requests import in_rounds, piece_of, replies_to
from shardtensor.functions.algorithms.shards import MeshCommunicator, Shards
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.spec import P
from shardtensor.tensor.value import Aval, aval

_INT = np.dtype("int64")

Reply = Callable[[Any, Any, Any, int], Any]
"""``reply(xp, part, elements, begin)`` returns the results for elements, given the part of the ordered elements in
which they are found and where it begins.
"""


def layout_of_both(x: Aval, ordered: Any, **params: Any) -> list[NamedSharding]:
    """Returns the layouts that `search` needs: the elements in order are split by all axes that split the others."""
    axes = tuple([axis for chain in x.sharding.spec.chains_of(x.ndim) for axis in chain])
    return [x.sharding, x.sharding.with_spec(P(axes))]


def search(
    x: Shards,
    ordered: Shards,
    along: Callable[[Sequence[int]], MeshCommunicator],
    side: str,
    reply: Reply,
    dtype: Any,
) -> Shards:
    """Returns what ``reply`` returns for each element of x, in x's layout.

    Args:
        x: the elements to be found.
        ordered: the elements in order, of one dimension, in the layout of `layout_of_both`.
        along: makes the communicator of dimensions of x.
        side: "left" if the part of an element is the first one that ends with it or a greater one, "right" if with a
            greater one.
        reply: see `Reply`.
        dtype: the dtype of its results.
    """
    comm, common = along(range(x.value.ndim)), np.result_type(x.value.dtype, ordered.value.dtype)
    bounds, value = ordered.value.grid.offsets[0].tolist(), x.value
    result = aval(value.shape, np.dtype(dtype), value.sharding, value.committed)
    filled = [k for k, (a, b) in enumerate(itertools.pairwise(bounds)) if a < b]
    gaps = filled != list(range(len(filled)))  # Fewer elements than parts of several axes lie in the first of each.
    parts = ordered.map(lambda xp, a: xp.asarray(a, dtype=common), shape=lambda shape: shape, dtype=common)
    lasts = comm.all_gather(parts.map(_last, shape=lambda _: (1,), dtype=common), 0)
    begins = [bounds[k] for k in comm.index]

    def owners(xp: Any, elements: Any, ends: Any) -> Any:
        if not filled:
            return xp.zeros(elements.shape, dtype=_INT)
        numbers = xp.asarray(filled, dtype=_INT) if gaps else None
        known = xp.take(ends, numbers, axis=0) if gaps else ends[: len(filled)]
        places = xp.clip(xp.asarray(xp.searchsorted(known, elements, side=side), dtype=_INT), 0, len(filled) - 1)
        return xp.take(numbers, places, axis=0) if gaps else places

    def answer(xp: Any, elements: Any, part: Any, begin: int) -> Any:
        return xp.asarray(reply(xp, part, elements, begin), dtype=result.dtype)

    def found_of(some: slice) -> Shards:
        def piece(xp: Any, a: Any) -> Any:
            return xp.asarray(xp.reshape(a, (-1,))[some], dtype=common)

        requests = x.map(piece, shape=lambda shape: piece_of(shape, some), dtype=common)
        owned = requests.map(owners, lasts, shape=lambda shape: shape, dtype=_INT)
        return replies_to(requests, owned, comm, answer, [parts.arrays, begins], (common, result.dtype))

    answers = in_rounds(x, comm.size, found_of, result.dtype)
    shapes = [value.grid.shape(k) for k in range(len(comm.index))]
    return answers.map(
        lambda xp, a, shape: xp.reshape(a, shape), shapes, shape=lambda shape: shape, dtype=result.dtype
    ).assembled(result)  # fmt: skip


def _last(xp: Any, part: Any) -> Any:
    return part[-1:] if part.shape[0] else xp.zeros((1,), dtype=part.dtype)
