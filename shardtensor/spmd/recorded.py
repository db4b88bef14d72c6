"""Collectives of arrays whose gradients the array library records, as PyTorch does: their transposes.

The library records a collective as one function, whose derivative is another collective. In a backward pass, all
programs compute the gradient of the sum of what they differentiate, each with respect to its own arrays: `psum` is its
own transpose. (`st.grad` of a map has rules of its own, since its arguments have one gradient for all programs.)
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtensor.backend.protocol import Backend
from shardtensor.core import Op, call
from shardtensor.errors import ArgumentTypeError, ShapeError
from shardtensor.functions.derivatives.cotangents import without_rows
from shardtensor.sharding.layout import Shape, offsets
from shardtensor.sharding.rules import normalize_axis
from shardtensor.spmd.axes import axis_position
from shardtensor.spmd.scheduling.mapped_program import current
from shardtensor.tensor.pytree import leaves, replaced

Arrays = Mapping[Any, Any]
"""Arrays by the numbers of the leaves to which they belong."""


@dataclass(frozen=True)
class Recorded:
    """A collective call that was recorded.

    Attributes:
        op: the collective.
        backend: the backend of the arrays.
        params: its parameters, by name.
        index, size: the position of the program among those that meet, and how many they are.
        tag: names the call. All calls in its transpose have trees of it, so that programs whose backward passes call
            the collectives in different orders get an error.
        shapes: the shapes of the arrays of x, by number.
        x, y: the arrays and the results, by number, if the transpose needs their elements.
    """

    op: Op
    backend: Backend
    params: dict[str, Any]
    index: int
    size: int
    tag: str
    shapes: Mapping[int, Shape]
    x: Arrays
    y: Arrays

    def along(self, name: str, arrays: Arrays, /, **changed: Any) -> dict[int, Any]:
        """Calls a collective along the same axes, on arrays by number."""
        params: dict[str, Any] = {n: self.params[n] for n in _SHARED if n in self.params} | changed
        results = call(name, {f"{self.tag}, leaf {k}": array for k, array in arrays.items()}, **params)
        return {k: results[f"{self.tag}, leaf {k}"] for k in arrays}


_SHARED = ("axis_name", "axis_index_groups")

Transpose = Callable[[dict[int, Any], Recorded], Mapping[int, Any]]
"""A function of cotangents of results that returns those of the arrays, both by number."""


TRANSPOSES: dict[str, tuple[Transpose, bool, bool]] = {}
"""The transposes of collectives by name, with the arguments of `transposes`."""


def transposes(*names: str, saves: bool = False, in_mesh_order: bool = False) -> Callable[[Transpose], Transpose]:
    """Declares that the decorated function is the transpose of collectives.

    Args:
        *names: their names.
        saves: whether it needs the elements of the arrays and of the results.
        in_mesh_order: whether the collectives number the programs in the order of the mesh (see `axis_position`).
    """

    def declare(transpose: Transpose) -> Transpose:
        TRANSPOSES.update(dict.fromkeys(names, (transpose, saves, in_mesh_order)))
        return transpose

    return declare


def record(op: Op, backend: Backend, *arguments: Any) -> Any:
    """Calls a collective, and has the library record it.

    Raises:
        ArgumentTypeError: the collective has no transpose.
    """
    if op.name not in TRANSPOSES:
        raise ArgumentTypeError(
            f"{op.name}: x requires a gradient, and {op.name} has no transpose; apply it to x.detach(), which has no "
            "gradient, or declare one by shardtensor.spmd.recorded.transposes"
        )
    assert op.parts.algorithm is not None
    if len(op.operands) > 1:
        return _record_joined(op, backend, *arguments)
    algorithm, (x, *params) = op.parts.algorithm, arguments
    named = dict(zip(op.params, params, strict=True))
    results = _record(op, backend, named, lambda *xs: leaves([algorithm(replaced(x, list(xs)), *params)]), leaves(x))
    return replaced(x, list(results))


def _record_joined(op: Op, backend: Backend, operand: Any, output: Any, *others: Any) -> Any:
    """Calls a collective of two arrays, which the library records as a function of one: of the rows of both."""
    algorithm: Any = op.parts.algorithm
    fits = all(map(backend.is_array, (operand, output))) and operand.ndim == output.ndim > 0
    if not fits or operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:]:
        return algorithm(operand, output, *others)  # It raises the error.
    count, named = operand.shape[0], dict(zip((*op.operands[2:], *op.params), others, strict=True))
    rows = backend.xp.concat([operand, output])
    (result,) = _record(op, backend, named, lambda xs: [algorithm(xs[:count], xs[count:], *others)], [rows])
    return result


def _record(
    op: Op, backend: Backend, named: dict[str, Any], function: Callable[..., Sequence[Any]], arrays: Sequence[Any]
) -> Sequence[Any]:
    """Has the library record a function of arrays, which calls a collective with parameters, given by name."""
    transpose, saves, in_mesh_order = TRANSPOSES[op.name]
    at = axis_position(op.name, named["axis_name"], named.get("axis_index_groups"), in_mesh_order=in_mesh_order)
    program = current()
    assert program is not None  # `axis_position` raises outside of programs.
    if program.recorded_along is None:
        program.recorded_along = {}
    number = program.recorded_along[at.key] = program.recorded_along.get(at.key, 0) + 1
    program.recorded += 1
    tag = f"gradient of {op.name} {number}"

    def transposed(cotangents: dict[int, Any], shapes: Mapping[int, Shape], xs: Arrays, ys: Arrays) -> Any:
        return transpose(cotangents, Recorded(op, backend, named, at.index, at.size, tag, shapes, xs, ys))

    return backend.record_call(function, transposed, arrays, number=program.recorded - 1, saves=saves)


# -- reductions ------------------------------------------------------------------------------------


@transposes("pcast")
def _of_cast(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    return g if recorded.params["to"] == "unreduced" else recorded.along("psum", g)


@transposes("psum", "pmean")
def _same(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    return recorded.along(recorded.op.name, g)


@transposes("pmax", "pmin", saves=True)
def _of_extremum(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    """Equal extremes share the cotangent, as those of `st.max` do."""
    dtype_of = recorded.backend.dtype_of
    chosen = {k: call("astype", recorded.x[k] == recorded.y[k], dtype_of(g[k])) for k in g}
    totals, counts = recorded.along("psum", g), recorded.along("psum", chosen)
    return {k: totals[k] / counts[k] * chosen[k] for k in g}


@transposes("pprod", saves=True)
def _of_product(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    totals = recorded.along("psum", g)
    factors = recorded.along("all_gather", {k: recorded.x[k] for k in g})
    cotangents = {}
    for k, total in totals.items():
        others = [factors[k][i] for i in range(recorded.size) if i != recorded.index]
        cotangents[k] = functools.reduce(operator.mul, [other.conj() for other in others], total)
    return cotangents


@transposes("psum_scatter")
def _of_scatter(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    params = recorded.params
    return recorded.along("all_gather", g, axis=params["scatter_dimension"], tiled=params["tiled"])


# -- data movement ---------------------------------------------------------------------------------


@transposes("all_gather")
def _of_gather(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    axis, tiled = recorded.params["axis"], recorded.params["tiled"]
    if not tiled or _follow_the_split_rule(recorded, {k: (array.shape, axis) for k, array in g.items()}):
        return recorded.along("psum_scatter", g, scatter_dimension=axis, tiled=tiled)
    totals, cotangents = recorded.along("psum", g), {}
    for k, total in totals.items():
        at = normalize_axis(axis, total.ndim)
        sizes = [size for (size,) in _of_all(recorded, f"sizes of leaf {k}", (recorded.shapes[k][at],))]
        begin = sum(sizes[: recorded.index])
        cotangents[k] = total[(slice(None),) * at + (slice(begin, begin + sizes[recorded.index]),)]
    return cotangents


@transposes("all_to_all")
def _of_exchange(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    cut, join, tiled = (recorded.params[name] for name in ("split_axis", "concat_axis", "tiled"))
    if tiled:
        fits = _follow_the_split_rule(recorded, {k: (array.shape, join) for k, array in g.items()})
        if not fits:
            raise ShapeError(
                "all_to_all: a gradient of x is recorded, and the sizes along concat_axis are not those into which the "
                "split rule splits their sum; wanted the blocks of a split dimension, or blocks of equal size"
            )
    return recorded.along("all_to_all", g, split_axis=join, concat_axis=cut, tiled=tiled)


@transposes("pswapaxes")
def _of_swap(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    return recorded.along("pswapaxes", g, axis=recorded.params["axis"])


@transposes("ppermute", in_mesh_order=True)
def _of_permute(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    perm = [(b, a) for a, b in recorded.params["perm"]]
    cotangents = recorded.along("ppermute", g, perm=perm)
    if recorded.index not in [b for _, b in perm]:  # Nothing has received the array.
        return {k: _zeros(recorded, k, cotangents[k]) for k in cotangents}
    return cotangents


@transposes("pshuffle", in_mesh_order=True)
def _of_shuffle(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    perm = [int(i) for i in recorded.params["perm"]]
    return recorded.along("pshuffle", g, perm=sorted(range(len(perm)), key=perm.__getitem__))


@transposes("pbroadcast")
def _of_broadcast(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    totals = recorded.along("psum", g)
    if recorded.index == int(recorded.params["source"]):
        return totals
    return {k: _zeros(recorded, k, totals[k]) for k in totals}


@transposes("ragged_all_to_all", "ragged_return")
def _of_rows(g: dict[int, Any], recorded: Recorded) -> Mapping[int, Any]:
    """The cotangents of the rows of both arrays; see `_record_joined`."""
    (k,) = g
    returns = recorded.op.name == "ragged_return"
    numbers = {name: recorded.params[name] for name in (*recorded.op.operands[2:], *_SHARED)}
    offsets = {k: call("asarray", numbers["output_offsets"])}
    begins = recorded.along("all_to_all", offsets, split_axis=0, concat_axis=0, tiled=True)[k]
    count = recorded.shapes[k][0] - g[k].shape[0]
    zeros = call("zeros", (count, *g[k].shape[1:]), dtype=recorded.backend.dtype_of(g[k]))
    back = call("ragged_all_to_all" if returns else "ragged_return", g[k], zeros, **numbers)
    sizes, rows = call("asarray", numbers["recv_sizes"]), call("arange", g[k].shape[0])
    kept = g[k] if returns else without_rows(g[k], rows, begins, sizes)
    return {k: call("concat", [back, kept])}


# -- shapes ----------------------------------------------------------------------------------------


def _zeros(recorded: Recorded, number: int, like: Any) -> Any:
    """Returns zeros in the shape of an array of x, which depend on an array: a second backward pass calls the transpose
    of the collective that has returned it, in all programs.
    """
    nothing = like.reshape(-1)[:0].sum()
    return call("zeros", recorded.shapes[number], dtype=recorded.backend.dtype_of(like)) + nothing


def _follow_the_split_rule(recorded: Recorded, joined: Mapping[int, tuple[Shape, int]]) -> bool:
    """Whether in all programs the sizes of the arrays along the axis along which they were joined are those into which
    the split rule splits the size of the result.

    Args:
        recorded: the call.
        joined: the shape of each result, and the axis.
    """
    fits = True
    for k, (shape, axis) in joined.items():
        at = normalize_axis(axis, len(shape))
        fits = fits and _size(shape[at], recorded) == recorded.shapes[k][at]
    return all(itertools.chain.from_iterable(_of_all(recorded, "split", (fits,))))


def _size(whole: int, recorded: Recorded) -> int:
    """Returns the size of the part that the split rule gives to this program."""
    ends = offsets(whole, (recorded.size,)).tolist()
    return int(ends[recorded.index + 1] - ends[recorded.index])


def _of_all(recorded: Recorded, what: str, mine: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns what each program gives: a tuple of integers below 2**30."""
    params = {n: recorded.params[n] for n in _SHARED if n in recorded.params}
    rows = [[0] * len(mine) for _ in range(recorded.size)]
    rows[recorded.index] = list(mine)
    totals = call("psum", {f"{recorded.tag}, {what}": rows}, **params)
    return [tuple(row) for row in totals[f"{recorded.tag}, {what}"]]
