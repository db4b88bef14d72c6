"""The derivatives of the functions that split a tensor into a list, with one item for each device."""

from __future__ import annotations

from typing import Any

from shardtensor.core import call
from shardtensor.functions.derivatives.cotangents import Call, whole, zeros_of
from shardtensor.functions.derivatives.forms import linear, rows
from shardtensor.sharding.mesh import submeshes_along
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import shape_of
from shardtensor.tensor.value import Aval


def _joined(parts: Any, recorded: Call) -> Any:
    """Returns the cotangent of a tensor that was split: the parts side by side, or their sum where they were equal.

    The parts of devices that held the same elements are partial sums, which are combined once.
    """
    kind: Aval = recorded.kinds[0]
    axes, drop = recorded.params["axes"], recorded.params["drop"]
    mesh, chains = kind.sharding.mesh, kind.sharding.spec.chains_of(kind.ndim)
    split = {axis for chain in chains for axis in chain}
    silent = tuple([a for a in mesh.axis_names if a in axes and a not in split and mesh.shape[a] > 1])
    rest = tuple([a for a in mesh.axis_names if a not in axes])
    gs: list[Any] = []
    for g, part in zip(parts if type(parts) is list else [parts], recorded.results, strict=True):
        g = zeros_of(part) if g is None else whole(g, part)
        if g.sharding != part.sharding:
            g = call("transfer_to", g, part.sharding, "grad", committed=True)
        g = g if drop is None else call("unsqueeze", g, axis=drop)
        gs.append(call("unsqueeze", g, axis=0) if silent else g)
    if rest:  # Each part is over several devices.
        held: dict[int, Any] = {}
        for g, (group, _) in zip(gs, submeshes_along(mesh, rest), strict=True):
            held.update(zip(group, call("split_over", g, g.sharding.mesh.axis_names), strict=True))
        gs = [held[k] for k in range(mesh.size)]
    if not silent:
        return call("assemble", gs, mesh, P(*chains))
    return recorded.add_up(0, "sum", call("assemble", gs, mesh, P(silent, *chains)), axis=0)


def shards_of(g: Any, recorded: Call, drop: int | None = None) -> list[Any] | None:
    """Returns the shards of the cotangent of joined arrays, if each of these was one shard of the result, on the device
    of that; otherwise None.

    Args:
        g: the cotangent.
        recorded: the call.
        drop: the dimension that the arrays do not have.
    """
    value, kinds = recorded.results[0], recorded.kinds
    if not isinstance(value, Aval) or value.sharding.mesh.size == 1:
        return None
    if [k.sharding.mesh.flat if isinstance(k, Aval) else () for k in kinds] != [(d,) for d in value.sharding.mesh.flat]:
        return None
    for k, kind in enumerate(kinds):
        shape = value.grid.shape(k)
        if kind.shape != (shape if drop is None else (*shape[:drop], *shape[drop + 1 :])):
            return None
    g = g if g.sharding == value.sharding else call("reshard", g, value.sharding)
    parts = call("split_over", g, value.sharding.mesh.axis_names, drop=drop)
    return [part if is_active else None for part, is_active in zip(parts, recorded.active, strict=True)]


def _squeezed(g: Any, recorded: Call) -> Any:
    return call("reshape", whole(g, recorded.results[0]), shape_of(recorded.kinds[0]))


rows(split_over=linear(_joined), unsqueeze=linear(_squeezed))
