"""The derivatives of collectives, and of what joins the results of a map.

In a map of which all programs do the same, a value has a type: the axes along which it may differ. The result of a sum
over an axis is one value of all programs along it, so that its cotangent, which is that of all of them, is also the one
of each summand, and nothing is transferred. In other maps, and in a gradient that a program takes itself, the results
of all programs count as different values, of which the cotangents are added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import Function, Op, Operands, Params, call, implements
from shardtensor.errors import ArgumentError
from shardtensor.functions.derivatives.cotangents import Call, is_inexact, whole, without_rows, zeros_of
from shardtensor.functions.derivatives.forms import ZERO, Recording, linear
from shardtensor.functions.standard.joining import assemble, assemble_sums
from shardtensor.interpreters.differentiation.tape import Tape
from shardtensor.interpreters.program_arrays import tensor_here
from shardtensor.sharding.layout import offsets
from shardtensor.spmd import collectives, type_casts
from shardtensor.spmd.axes import axis_position, axis_size, batcher_of
from shardtensor.spmd.map_gradients import MapDerivative
from shardtensor.spmd.maps.launch import map_shards
from shardtensor.spmd.maps.outputs import check_equal
from shardtensor.spmd.ragged_exchange import NUMBERS, ragged_all_to_all, ragged_return
from shardtensor.spmd.rendezvous import rendezvous
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval, summed

Transpose = Callable[[Any, Call, int, bool], Any]
"""``transpose(g, call, k, typed)`` returns the cotangent of leaf k of the operand, given that of the result."""


class Collective(Recording):
    """The derivative of a collective.

    Attributes:
        transpose: the transpose for one leaf.
        joins: whether the result is one value of all programs along the axis.
        typed: whether the types of values are known, so that the cotangent is that of one value.
        meets: whether other programs may wait for this one, whether it has a cotangent or not.
    """

    def __init__(self, transpose: Transpose, saved: Sequence[str] = (), *, joins: bool = False) -> None:
        self.transpose = transpose
        self.joins = joins
        self.meets = True
        self.saved = saved
        self.typed = False

    def with_types(self, typed: bool) -> Collective:
        """Returns the derivative of a call in a map of which all programs do the same."""
        collective = copy.copy(self)
        collective.meets, collective.typed = False, typed
        return collective

    def saves(self, op: Op, active: Sequence[bool]) -> Sequence[str]:
        """The names that the transpose needs."""
        return self.saved

    def record(self, tape: Tape, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes and records a call, if the operand of any program depends on a differentiated argument."""
        inputs = leaves(operands)
        for x in inputs:
            tape.make_tensor(x)
        depends = any(map(tape.active, inputs))
        if _is_batched(params[op.params.index("axis_name")]):
            return tape.recorded(op, operands, params, self.with_types(typed=False))
        if any(_has_gradient(tape.adopted(x)) for x in inputs):
            named = dict(zip(op.params, params, strict=True))
            depends = _in_any_program(op.name, depends, named["axis_name"], named.get("axis_index_groups"))
        return tape.recorded(op, operands, params, self, depends=depends)

    def transposed(self, g: Any, call: Call) -> list[Any]:
        """Returns the cotangents of the leaves of the operand."""
        gs = g if type(g) is list else [g]
        cotangents: list[Any] = []
        for k, (g, kind) in enumerate(zip(gs, call.results, strict=True)):
            if not isinstance(kind, Aval) or not is_inexact(kind.dtype):
                cotangents.append(None)
                continue
            g = zeros_of(kind) if g is None else whole(g, kind)
            cotangents.append(tensor_here(self.transpose(g, call, k, self.typed)))
        return cotangents


def _is_batched(axis_name: Any) -> bool:
    """Whether an axis is that of `vmap`, whose examples are in one program."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    return any(batcher_of(name) is not None for name in names)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, (ShardedTensor, np.ndarray, np.generic)) and is_inexact(x.dtype)


def _in_any_program(caller: str, depends: bool, axis_name: Any, groups: Any) -> bool:
    """Tells the programs that meet in a collective whether one of them has a gradient there: all record it then."""
    at = axis_position(caller, axis_name, groups)

    def body(_: Any, values: Sequence[Any]) -> Sequence[Any]:
        return [any(values)] * len(values)

    return bool(rendezvous(f"{caller} of a gradient", at, depends, (), body, scalars=True))


def _met(name: str, x: Any, recorded: Call, **params: Any) -> Any:
    """Returns the result of a collective of the programs of a recorded one."""
    recorded_params = recorded.params
    if recorded_params.get("axis_index_groups") is not None:
        params["axis_index_groups"] = recorded_params["axis_index_groups"]
    return tensor_here(call(name, x, axis_name=recorded_params["axis_name"], **params))


def _total(g: Any, recorded: Call, typed: bool) -> Any:
    """Returns the cotangent of a result that all programs have in common."""
    return g if typed else _met("psum", g, recorded)


def _position(recorded: Call) -> Any:
    params = recorded.params
    return axis_position(recorded.op.name, params["axis_name"], params.get("axis_index_groups"))


def _of_sum(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    return _total(g, recorded, typed)


def _of_mean(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    groups, name = recorded.params.get("axis_index_groups"), recorded.params["axis_name"]
    size = axis_size(name) if groups is None else _position(recorded).size
    return _total(g, recorded, typed) / size


def _of_extremum(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    """Equal extremes share the cotangent."""
    x, y = _leaf(recorded, "x", k), _leaf(recorded, "y", k)
    chosen = call("astype", call("equal", x, y), g.dtype)
    return _total(g, recorded, typed) * chosen / _met("psum", chosen, recorded)


def _of_product(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    """The product of the elements of the other programs, which is not a quotient where elements are zero."""
    x, at = _leaf(recorded, "x", k), _position(recorded)
    every = _met("all_gather", x, recorded, axis=0, tiled=False)
    product = _total(g, recorded, typed)
    for n in range(at.size):
        product = product if n == at.index else product * every[n]
    return product


def _leaf(recorded: Call, name: str, k: int) -> Any:
    return tensor_here(leaves(recorded.saved[name])[k])


def _of_broadcast(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    g = _total(g, recorded, typed)
    return g if _position(recorded).index == recorded.params["source"] else zeros_of(recorded.kinds[k])


def _of_cast(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    return g if typed or recorded.params["to"] == "unreduced" else _met("psum", g, recorded)


def _of_scatter(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    p = recorded.params
    return _met("all_gather", g, recorded, axis=p["scatter_dimension"], tiled=p["tiled"])


def _of_gather(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    p = recorded.params
    if p["tiled"] and not _is_batched(p["axis_name"]):
        _check_split(recorded, k, p["axis"], recorded.kinds[k], g)
    return _met("psum_scatter", g, recorded, scatter_dimension=p["axis"], tiled=p["tiled"])


def _check_split(recorded: Call, k: int, axis: int, part: Any, joined: Any) -> None:
    """Checks that the parts that were joined are those into which the split rule splits the whole."""
    at = _position(recorded)
    begins = offsets(joined.shape[axis], (at.size,))
    size = begins[at.index + 1] - begins[at.index]
    if part.shape[axis] != size:
        raise ArgumentError(
            f"{recorded.op.name}: it has no derivative for parts of other sizes than those of the split rule: part "
            f"{at.index} of {at.size} has {part.shape[axis]} along axis {axis}, and the rule gives {size} of "
            f"{joined.shape[axis]}; st.stop_gradient(x) gives x without a gradient"
        )


def _of_exchange(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    p = recorded.params
    split, concat = (p["axis"], p["axis"]) if "axis" in p else (p["split_axis"], p["concat_axis"])
    cotangent = _met("all_to_all", g, recorded, split_axis=concat, concat_axis=split, tiled=p.get("tiled", False))
    if cotangent.shape != recorded.kinds[k].shape:
        raise ArgumentError(
            f"{recorded.op.name}: it has no derivative for blocks of other sizes than those of the split rule, as one "
            f"of shape {recorded.kinds[k].shape}; st.stop_gradient(x) gives x without a gradient"
        )
    return cotangent


def _of_permutation(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    pairs = [(b, a) for a, b in recorded.params["perm"]]
    return _moved(g, recorded, pairs, k)


def _of_shuffle(g: Any, recorded: Call, k: int, typed: bool) -> Any:
    return _moved(g, recorded, list(enumerate(recorded.params["perm"])), k)


def _moved(g: Any, recorded: Call, pairs: Sequence[tuple[int, int]], k: int) -> Any:
    cotangent = _met("ppermute", g, recorded, perm=pairs)
    # A program that is not a source has sent nothing, and its array may have another shape.
    return cotangent if cotangent.shape == recorded.kinds[k].shape else zeros_of(recorded.kinds[k])


class RaggedExchange(Collective):
    """The derivative of `ragged_all_to_all` (of which the rows that are received are in the places of others), and of
    its transpose, which adds them.
    """

    def __init__(self, *, adds: bool) -> None:
        super().__init__(self._of_operand, NUMBERS)
        self.adds = adds

    def transposed(self, g: Any, call: Call) -> list[Any]:
        """Returns the cotangents of the operand and of the output."""
        kind, cotangents = call.results[0], list[Any]()
        g = zeros_of(kind) if g is None else whole(g, kind)
        for k, transpose in enumerate((self._of_operand, self._of_output)):
            cotangents.append(tensor_here(transpose(g, call, k, self.typed)) if self.meets or call.active[k] else None)
        return [*cotangents, *[None] * len(NUMBERS)]

    def _of_operand(self, g: Any, recorded: Call, k: int, typed: bool) -> Any:
        """Sends the cotangents of rows back to the programs that have sent these."""
        name = "ragged_all_to_all" if self.adds else "ragged_return"
        return _met(name, g, recorded, output=zeros_of(recorded.kinds[k], g.dtype), **recorded.saved)

    def _of_output(self, g: Any, recorded: Call, k: int, typed: bool) -> Any:
        """The rows that were received do not depend on the output."""
        if self.adds:
            return g
        offsets, sizes = (recorded.saved[name] for name in ("output_offsets", "recv_sizes"))
        begins = _met("all_to_all", offsets, recorded, split_axis=0, concat_axis=0, tiled=True)
        return without_rows(g, tensor_here(call("arange", g.shape[0])), begins, tensor_here(sizes))


class _Assembly(Recording):
    """The derivative of `assemble`. Of equal blocks only the first is used, so that the others get nothing, unless all
    of them are known to be one value: each then gets the cotangent of that.
    """

    def record(self, tape: Tape, op: Op, operands: Operands, params: Params, /) -> Any:
        """Executes and records a call."""
        mesh, spec = params
        named = {*spec.axes} - spec.reduced
        silent = frozenset([axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in named])
        states = list(map(tape.active, operands))
        one = [tape.one_value.get(s.number) if s is not None else None for s in states]
        if silent and all(x is not None and x[1] == silent for x in one):
            step = len(tape.steps)
            result = tape.recorded(op, operands, params, EQUAL_BLOCKS)
            for recorded in tape.steps[step:]:
                recorded.inputs = [x[0] for x in one if x is not None]
            return result
        return tape.recorded(op, operands, params, FIRST_BLOCKS)


def _blocks(g: Any, recorded: Call, *, equal: bool) -> list[Any]:
    value: Aval = recorded.results[0]
    g = whole(g, value)
    if g.sharding != summed(value).sharding:
        g = call("reshard", g, summed(value).sharding)
    parts = call("split_over", g, recorded.params["mesh"].axis_names)
    grid, seen, cotangents = value.grid, set(), list[Any]()
    begins, mesh = _begins(recorded), value.sharding.mesh
    along = [mesh.axis_names.index(axis) for axis in recorded.params["spec"].unreduced]
    for k, (part, kind, active) in enumerate(zip(parts, recorded.kinds, recorded.active, strict=True)):
        at, number = tuple(grid.parts[k].tolist()), tuple(mesh.coordinates[k, along].tolist())
        if not active or ((at, number) in seen and not equal):
            cotangents.append(None)
        elif part.shape == kind.shape and all(b == o for b, (o, _) in zip(begins[at], grid.box(k), strict=True)):
            cotangents.append(part)
        else:  # The blocks were rebalanced.
            at_index = tuple([slice(b, b + n) for b, n in zip(begins[at], kind.shape, strict=True)])
            cotangents.append(call("transfer_to", g[at_index], kind.sharding, "grad", committed=True))
        seen.add((at, number))
    return cotangents


def _begins(recorded: Call) -> dict[tuple[int, ...], list[int]]:
    """Returns where each block begins, by its position along each dimension."""
    parts = list(map(tuple, recorded.results[0].grid.parts.tolist()))
    sizes: list[dict[int, int]] = [{} for _ in recorded.results[0].shape]
    for kind, at in zip(recorded.kinds, parts, strict=True):
        for d, p in enumerate(at):
            sizes[d][p] = kind.shape[d]
    return {at: [sum(sizes[d][q] for q in range(p)) for d, p in enumerate(at)] for at in parts}


EQUAL_BLOCKS = linear(lambda g, recorded: _blocks(g, recorded, equal=True))
FIRST_BLOCKS = linear(lambda g, recorded: _blocks(g, recorded, equal=False))


_ROWS: tuple[tuple[Function, Any], ...] = (
    (collectives.psum, Collective(_of_sum, joins=True)),
    (collectives.pmean, Collective(_of_mean, joins=True)),
    (collectives.pmax, Collective(_of_extremum, ("x", "y"), joins=True)),
    (collectives.pmin, Collective(_of_extremum, ("x", "y"), joins=True)),
    (collectives.pprod, Collective(_of_product, ("x",), joins=True)),
    (collectives.pbroadcast, Collective(_of_broadcast, joins=True)),
    (type_casts.pcast, Collective(_of_cast)),
    (collectives.psum_scatter, Collective(_of_scatter)),
    (collectives.all_gather, Collective(_of_gather)),
    (collectives.all_to_all, Collective(_of_exchange)),
    (collectives.pswapaxes, Collective(_of_exchange)),
    (collectives.ppermute, Collective(_of_permutation)),
    (collectives.pshuffle, Collective(_of_shuffle)),
    (ragged_all_to_all, RaggedExchange(adds=False)),
    (ragged_return, RaggedExchange(adds=True)),
    (map_shards, MapDerivative()),
    (assemble, _Assembly()),
    (assemble_sums, _Assembly()),
    (check_equal, ZERO),
)
for _function, _derivative in _ROWS:
    implements(_function, "derivative")(_derivative)
