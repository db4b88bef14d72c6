"""The derivatives of operators that move elements: reshapes, joins, transfers, and arrays made of others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, unbroadcast, whole, zeros_of
from shardtensor.functions.derivatives.forms import Refused, linear, rows, zero
from shardtensor.functions.derivatives.of_lists import shards_of
from shardtensor.sharding.mesh import groups_along
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.value import Aval, summed


def _reshaped(g: Any, recorded: Call) -> Any:
    return call("reshape", whole(g, recorded.results[0]), shape_of(recorded.kinds[0]))


def _same(g: Any, recorded: Call) -> Any:
    return g


def _moved_back(g: Any, recorded: Call) -> Any:
    """Returns the cotangent as it is, since sums take it to the layout in which it is needed, unless it is on other
    devices.
    """
    kind = recorded.kinds[0]
    if not isinstance(kind, Aval):
        return g
    here, there = g.sharding, summed(kind).sharding
    if here.mesh == there.mesh and here.memory_kind == there.memory_kind:
        return g
    g = whole(g, recorded.results[0])
    return call("transfer_to", g, there, "grad", committed=kind.committed)


def _parts(g: Any, recorded: Call) -> list[Any]:
    """Returns the parts of a cotangent that belong to the joined arrays."""
    axis = normalize_axis(recorded.params["axis"], g.ndim)
    g, parts, begin = whole(g, recorded.results[0]), [], 0
    if (shards := shards_of(g, recorded)) is not None:
        return shards
    for is_active, kind in zip(recorded.active, recorded.kinds, strict=True):
        end = begin + shape_of(kind)[axis]
        parts.append(g[(slice(None),) * axis + (slice(begin, end),)] if is_active else None)
        begin = end
    return parts


def _items(g: Any, recorded: Call) -> list[Any]:
    axis = normalize_axis(recorded.params["axis"], g.ndim)
    g = whole(g, recorded.results[0])
    if (shards := shards_of(g, recorded, drop=axis)) is not None:
        return shards
    return [g[(slice(None),) * axis + (k, ...)] if a else None for k, a in enumerate(recorded.active)]


def _rolled_back(g: Any, recorded: Call) -> Any:
    shift = recorded.params["shift"]
    back = tuple([-s for s in shift]) if np.ndim(shift) else -shift
    return call("roll", whole(g, recorded.results[0]), back, axis=recorded.params["axis"])


def _triangle(name: str) -> Any:
    return lambda g, recorded: call(name, whole(g, recorded.results[0]), k=recorded.params["k"])


def _inner(g: Any, recorded: Call) -> Any:
    """Returns the part of the cotangent of a padded array that belongs to the array."""
    ends = zip(recorded.params["widths"], shape_of(recorded.kinds[0]), strict=True)
    return whole(g, recorded.results[0])[tuple([slice(before, before + n) for (before, _), n in ends])]


def _padded_by_zeros(tangents: Sequence[Any], recorded: Call) -> Any:
    zero = bytes(len(recorded.params["value"]))
    return call("padded", tangents[0], widths=recorded.params["widths"], value=zero)


def _total(g: Any, recorded: Call) -> Any:
    """Returns the cotangent of the number with which an array is filled."""
    number = len(recorded.kinds) - 1
    cotangents: list[Any] = [None] * len(recorded.kinds)
    cotangents[number] = unbroadcast(g, recorded, number)
    return cotangents


def _of_nothing(g: Any, recorded: Call) -> Any:
    return zeros_of(recorded.kinds[0])


def _along_grid(g: Any, recorded: Call) -> list[Any]:
    """Returns the cotangent of one of the arrays that span a grid."""
    which, axes = recorded.params["which"], recorded.params["axes"]
    cotangents: list[Any] = [None] * len(recorded.kinds)
    over = shape_of(recorded.results[0])
    gone = tuple([d for d in range(len(over)) if d != axes[which]])
    count = math.prod([over[d] for d in gone if g.shape[d] == 1])
    cotangents[which] = call("sum", g, axis=gone) * count
    return cotangents


def _of_the_sum(g: Any, recorded: Call) -> Any:
    """Returns the cotangent of an unreduced tensor, which is that of each of its partial sums: a function of their sum
    gives all of them the same one.
    """
    kind: Aval = recorded.kinds[0]
    g, mesh = whole(g, recorded.results[0]), kind.sharding.mesh
    if g.sharding != recorded.results[0].sharding:
        g = call("reshard", g, recorded.results[0].sharding)
    blocks = call("split_over", g, mesh.axis_names, drop=0)
    pairs = [(blocks[group[0]], blocks[k]) for group in groups_along(mesh, kind.unreduced) for k in group[1:]]
    call("check_equal", pairs, "grad: the cotangent of the partial sums of an array is that of their sum", "grad")
    return call("assemble", blocks, mesh, P(*kind.sharding.spec.chains))


def _pushed_partial_sums(tangents: Sequence[Any], recorded: Call) -> Any:
    return call("partial_sums", call("reshard", tangents[0], recorded.kinds[0].sharding))


rows(
    reshape=linear(_reshaped, partial_sums=True),
    expand_dims=linear(_reshaped, partial_sums=True),
    squeeze=linear(_reshaped, partial_sums=True),
    # Of these, only copies of arrays without elements are recorded: others are views.
    permute_dims=linear(_of_nothing),
    matrix_transpose=linear(_of_nothing),
    flip=linear(lambda g, recorded: call("flip", whole(g, recorded.results[0]), axis=recorded.params["axis"])),
    broadcast_to=linear(lambda g, recorded: unbroadcast(g, recorded, 0)),
    roll=linear(_rolled_back, after_composition=True),
    concat=linear(_parts, after_composition=True),
    stack=linear(_items),
    unshard=linear(_parts),
    tril=linear(_triangle("tril"), after_composition=True),
    triu=linear(_triangle("triu"), after_composition=True),
    padded=linear(_inner, pushed=_padded_by_zeros),
    spanned=linear(_along_grid),
    transfer_to=linear(_moved_back, partial_sums=True),
    copy=linear(_same, partial_sums=True),
    name=linear(_same, partial_sums=True),
    asarray=linear(_same, after_composition=True),
    full=linear(_total),
    full_like=linear(_total),
    partial_sums=linear(_of_the_sum, pushed=_pushed_partial_sums),
    bitcast=Refused("bits are no numbers"),
    to_dlpack=Refused("the memory leaves the library"),
)
zero("zeros_like ones_like empty_like dlpack_device")
