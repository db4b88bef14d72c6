"""The derivatives of halos: the cotangents of halos are added to those of the elements of which they are copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.core import call
from shardtensor.functions.building.halos import lines_of_halos
from shardtensor.functions.derivatives.cotangents import Call, whole, zeros_of
from shardtensor.functions.derivatives.forms import linear, rows, vjp
from shardtensor.sharding.copy_plan import Line
from shardtensor.sharding.spec import P
from shardtensor.tensor.value import summed


def _of_halos(g: Any, recorded: Call) -> Any:
    """Adds the halos along one dimension after another: so the corners reach their places, too."""
    kind = summed(recorded.kinds[0])
    result = _joined(g if isinstance(g, list) else [g], recorded)
    for axis, depth in enumerate(recorded.params["depth"]):
        if not depth:
            continue
        lines = lines_of_halos(kind, depth, recorded.params["boundary"], axis)
        shape = (*result.shape[:axis], kind.shape[axis], *result.shape[axis + 1 :])
        result = _added(result, call("zeros", shape, dtype=result.dtype, device=result.sharding), axis, lines)
    return result


def _added(g: Any, zeros: Any, axis: int, lines: Sequence[Line]) -> Any:
    """Returns the sums of the cotangents of copies for each element, in the shape and layout of ``zeros``."""
    total = None
    for layer in _layers(_turned(lines, axis)):
        part = call("lines_copied", (g, zeros), axis, layer)
        total = part if total is None else call("add", total, part)
    return zeros if total is None else total


def _joined(parts: Sequence[Any], recorded: Call) -> Any:
    """Returns the parts of all devices as one tensor, in which they follow one another: they have the sizes of its
    shards. Devices that have copies of the same part get cotangents of their own, which are added.
    """
    kind = summed(recorded.kinds[0])
    mesh, chains = kind.sharding.mesh, kind.sharding.spec.chains_of(kind.ndim)
    wholes = [
        zeros_of(result) if g is None else whole(g, result) for g, result in zip(parts, recorded.results, strict=True)
    ]
    named = {name for chain in chains for name in chain}
    copied = tuple([name for name in mesh.axis_names if name not in named and mesh.shape[name] > 1])
    if not copied:
        return call("assemble", wholes, mesh=mesh, spec=P(*chains))
    stacked = call("assemble", [call("expand_dims", g, axis=0) for g in wholes], mesh=mesh, spec=P(copied, *chains))
    return call("sum", stacked, axis=0)


def _turned(lines: Sequence[Line], axis: int) -> list[Line]:
    """Returns lines from the copies to the elements that were copied, in the order of these."""
    result: list[Line] = []
    for line in lines:
        count = line.end - line.begin
        if line.source is None:  # One element was copied several times.
            result += [Line(line.start, line.start + 1, axis, line.begin + k) for k in range(count)]
        elif line.step < 0:
            result.append(Line(line.start - count + 1, line.start + 1, axis, line.end - 1, -1))
        else:
            result.append(Line(line.start, line.start + count, axis, line.begin))
    return sorted(result)


def _layers(lines: Sequence[Line]) -> list[tuple[Line, ...]]:
    """Returns lines in groups of which none overlap, as few as possible."""
    layers: list[list[Line]] = []
    for line in lines:
        layer = next((layer for layer in layers if layer[-1].end <= line.begin), None)
        if layer is None:
            layers.append(layer := [])
        layer.append(line)
    return [tuple(layer) for layer in layers]


def _of_copied_lines(g: Any, recorded: Call) -> list[Any]:
    axis, lines = recorded.params["axis"], recorded.params["lines"]
    cotangents: list[Any] = [None, None]
    g = whole(g, recorded.results[0])
    zeros = [zeros_of(kind, g.dtype) for kind in recorded.kinds]
    if recorded.active[0]:
        cotangents[0] = _added(g, zeros[0], axis, lines)
    if recorded.active[1]:
        here = tuple([Line(line.begin, line.end, axis, line.begin) for line in lines])
        cotangents[1] = call("lines_copied", (zeros[1], g), axis, here)
    return cotangents


rows(
    with_halos=vjp(_of_halos),  # It is not linear: elements outside of the array can be a number.
    lines_copied=linear(_of_copied_lines),
)
