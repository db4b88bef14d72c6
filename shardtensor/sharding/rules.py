"""The rule language for sharding propagation, and `propagate`, which derives a result's sharding from its operands'.

A rule gives a name to every dimension of every operand and of the result, as in einsum::

    ... -> ...                         exp                   a name on both sides may stay split
    d0 d1 -> d1                        sum(axis=0)           a split name without a result dimension: partial results
    d0 d1 -> 1 d1                      sum(axis=0, keepdims=True)
    ... i k, ... k j -> ... i j        matmul
    d0 d1! -> d0 d1!                   fft(axis=1)           ``!``: must not be split
    d0 d1! -> d0 d1                    sort(axis=1)          likewise, but the devices may keep parts of the result
    ... -> new0 ...                    broadcast_to          a name only in the result is not split

``...`` represents all unnamed dimensions, aligned from the right, and broadcasts; ``1`` is a new dimension of size 1.
All functions here are pure: they take names and integers, not arrays. `propagate` treats each mesh axis separately: an
axis splits at most one name, in every operand that has this name.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShapeError, type_text
from shardtensor.host.units import counted
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.spec import Chain

Chains = tuple[Chain, ...]


class Rule(NamedTuple):
    """A parsed rule with ``...`` expanded to one name for each dimension.

    Attributes:
        operands: the names of each operand's dimensions.
        result: the names of the result's dimensions.
        whole: the names of dimensions that must not be split.
        kept: those of them that the result may split: each device computes them whole and keeps its part.
        names: the names of the operands, for error messages.
    """

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    whole: frozenset[str]
    names: tuple[str, ...]
    kept: frozenset[str] = frozenset()


@functools.lru_cache(4096)
def parse(text: str, ndims: tuple[int, ...], names: tuple[str, ...] = ()) -> Rule:
    """Parses a rule for operands of the given numbers of dimensions.

    Args:
        text: the rule.
        ndims: the number of dimensions of each operand.
        names: the names of the operands in error messages; default: ``operand 0`` and so on.

    Raises:
        ShapeError: an operand has too few or too many dimensions for the rule; the message names the operand.
    """
    names = names or tuple(f"operand {i}" for i in range(len(ndims)))
    left, _, right = text.partition("->")
    terms = [term.split() for term in left.split(",")] if left.strip() or ndims else []
    whole = frozenset(name[:-1] for term in (*terms, right.split()) for name in term if name.endswith("!"))
    kept = whole.intersection(right.split())
    rest = 0
    operands = []
    for position, (term, ndim) in enumerate(zip(terms, ndims, strict=True)):
        spare = ndim - sum(name != "..." for name in term)
        if spare < 0 or (spare > 0 and "..." not in term):
            raise ShapeError(f"{names[position]} has {counted(ndim, 'dimension')}; wanted {' '.join(term) or 'none'}")
        rest = max(rest, spare)
        operands.append(_expanded(term, spare))
    return Rule(tuple(operands), _expanded(right.split(), rest), whole, names, kept)


def _expanded(term: Sequence[str], rest: int) -> tuple[str, ...]:
    dots = [f"...{i}" for i in range(rest, 0, -1)]
    return tuple([n for name in term for n in (dots if name == "..." else [name.removesuffix("!")])])


class Propagated(NamedTuple):
    """The shardings of an operator's operands and result, as derived by `propagate`.

    Attributes:
        operands: the mesh axes that must split each dimension of each operand.
        result: the mesh axes that split each dimension of the result.
        shape: the shape of the result; names that occur only in the result have size 0, since only the operator knows
            their size.
        partial_axes: the mesh axes along which the devices hold partial results, which are yet to be combined.
        kept: the mesh axes that split each dimension of the result once each device keeps only its part.
    """

    operands: tuple[Chains, ...]
    result: Chains
    shape: Shape
    partial_axes: Chain
    kept: Chains


def propagate(
    rule: Rule,
    shapes: Sequence[Shape],
    layouts: Sequence[Chains | None],
    weights: Sequence[int],
    axis_sizes: Mapping[str, int],
    *,
    combines: bool,
) -> Propagated:
    """Chooses the mesh axes that split each name, so that the operands that are most expensive to move stay in place.

    Operands are considered in order of decreasing weight, and from left to right if weights are equal; a mesh axis that
    one operand has used is not available to later ones. If an axis splits a name that must not be split, it splits the
    largest unsplit dimension of the result instead (an all-to-all rather than an all-gather), if there is one, or that
    to which another axis of the same name has moved, if its parts are larger.
    Otherwise it splits the same name of the result after the computation, if the rule permits that.

    Args:
        rule: from `parse`.
        shapes: the shapes of the operands.
        layouts: the mesh axes that split each dimension of each operand now, or None for operands whose sharding is
            ignored (scalars, host arrays, tensors on other devices).
        weights: the cost of moving each operand, in bytes.
        axis_sizes: the size of each mesh axis.
        combines: whether the operator has a monoid; without one, names that the result lacks must not be split.

    Raises:
        ShapeError: dimensions of one name have different sizes.
    """
    sizes = name_sizes(rule, shapes)
    whole = set(rule.whole)
    if not combines:
        whole |= {name for names in rule.operands for name in names if name not in rule.result}
    chosen: dict[str, list[str]] = {name: [] for name in sizes}
    seen: set[str] = set()
    displaced: list[tuple[str, str]] = []
    for i in sorted(range(len(shapes)), key=lambda i: -weights[i]):
        layout = layouts[i]
        if layout is None:
            continue
        for name, size, chain in zip(rule.operands[i], shapes[i], layout, strict=True):
            for axis in chain:
                if axis in seen:
                    continue
                seen.add(axis)
                if name in whole or size != sizes[name]:
                    displaced.append((axis, name))
                else:
                    chosen[name].append(axis)
    again: dict[str, list[str]] = {}
    moved: dict[str, list[str]] = {}
    for axis, origin in displaced:
        free = [n for n in rule.result if n in chosen and n not in whole and not chosen[n]]
        # Several axes of one dimension may share another one, so that the parts are as small as before.
        lengths = {
            n: sizes[n] // math.prod([axis_sizes[a] for a in chosen[n]]) for n in (*free, *moved.get(origin, ()))
        }
        target = max(lengths, key=lengths.__getitem__, default="")
        if target and lengths[target] > 1 and axis_sizes[axis] > 1:
            chosen[target].append(axis)
            moved.setdefault(origin, []).append(target)
        elif origin in rule.kept:
            again.setdefault(origin, []).append(axis)
    chains = {name: tuple(axes) for name, axes in chosen.items()}
    operands = tuple(
        tuple(chains[n] if size == sizes[n] else () for n, size in zip(names, shape, strict=True))
        for names, shape in zip(rule.operands, shapes, strict=True)
    )
    partial_axes = tuple(
        axis for name, axes in chains.items() if name not in rule.result for axis in axes if axis_sizes[axis] > 1
    )
    result = tuple(chains.get(n, ()) for n in rule.result)
    shape = tuple(1 if n == "1" else sizes.get(n, 0) for n in rule.result)
    kept = tuple([tuple(again.get(n, chain)) for n, chain in zip(rule.result, result, strict=True)])
    return Propagated(operands, result, shape, partial_axes, kept)


def name_sizes(rule: Rule, shapes: Sequence[Shape]) -> dict[str, int]:
    """Returns the size of every name. Dimensions of ``...`` broadcast from size 1; others must have equal sizes.

    Raises:
        ShapeError: sizes differ; the message gives both sizes, their operands and their dimensions.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, tuple[int, int]] = {}
    for i, (names, shape) in enumerate(zip(rule.operands, shapes, strict=True)):
        for d, (name, size) in enumerate(zip(names, shape, strict=True)):
            known = sizes.setdefault(name, size)
            where = origin.setdefault(name, (i, d))
            if known == size:
                continue
            if name.startswith("...") and 1 in (known, size):
                if known == 1:
                    sizes[name], origin[name] = size, (i, d)
                continue
            first = rule.names[where[0]]
            raise ShapeError(
                f"{first} has shape {shapes[where[0]]} and {rule.names[i]} has shape {shape}, which do not fit: "
                f"size {known} in dimension {where[1]} of {first}, {size} in dimension {d} of {rule.names[i]}"
            )
    return sizes


def normalize_axis(axis: Any, ndim: int) -> int:
    """Converts an axis, which may be negative, to a number from 0 to ``ndim - 1``.

    Raises:
        ArgumentTypeError: the axis is not an integer; None, bools and tuples are not accepted.
        AxisError: the axis is out of range.
    """
    try:
        number = operator.index(axis)
    except TypeError:
        raise ArgumentTypeError(f"axis {axis!r} is {type_text(axis)}; wanted an integer") from None
    if isinstance(axis, bool):  # A bool is an integer in Python, but NumPy rejects it as an axis, too.
        raise ArgumentTypeError(f"axis {axis!r} is a bool; wanted an integer")
    if not -ndim <= number < ndim:
        bounds = (
            f"{counted(ndim, 'dimension')}; wanted {-ndim} to {ndim - 1}" if ndim else "an array without dimensions"
        )
        raise AxisError(f"axis {number} is out of range for {bounds}")
    return number % ndim


def normalize_axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Converts one axis or several to numbers from 0 to ``ndim - 1``, in the given order.

    Raises:
        ArgumentTypeError: an axis is not an integer.
        AxisError: an axis is out of range or occurs twice.
    """
    entries = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple([normalize_axis(a, ndim) for a in entries])
    for k, number in enumerate(axes):
        if number in axes[:k]:
            raise AxisError(f"axis {entries[k]} occurs twice in {axis}")
    return axes


def reduced_axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Like `normalize_axes`, and None gives all axes."""
    return tuple(range(ndim)) if axis is None else normalize_axes(axis, ndim)


# -- rules that several operators share ------------------------------------------------------------


def arg_extremum(shapes: Sequence[Shape], *, axis: int | None = None, keepdims: bool = False) -> str:
    """Returns the rule of argmax and argmin along one axis, or over all elements if ``axis`` is None."""
    if axis is not None:
        normalize_axis(axis, len(shapes[0]))
    return extremum(shapes, axis=axis, keepdims=keepdims)


def reduction(
    shapes: Sequence[Shape], *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, **params: Any
) -> str:
    """Returns the rule of a reduction: ``d0 d1 -> d1``, or ``d0 d1 -> 1 d1`` with ``keepdims``."""
    ndim = len(shapes[0])
    gone = reduced_axes(axis, ndim)
    names = [f"d{i}" for i in range(ndim)]
    stay = ["1" if i in gone else name for i, name in enumerate(names) if keepdims or i not in gone]
    return f"{' '.join(names)} -> {' '.join(stay)}"


def extremum(
    shapes: Sequence[Shape], *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, **params: Any
) -> str:
    """Returns the rule of a reduction that is undefined for zero elements.

    Raises:
        ShapeError: the array has size 0 along a reduced axis.
    """
    shape = shapes[0]
    if any(shape[a] == 0 for a in reduced_axes(axis, len(shape))):
        along = "" if axis is None else f" along axis {axis}"
        raise ShapeError(f"x has shape {shape}, with no elements{along}, where the result is undefined")
    return reduction(shapes, axis=axis, keepdims=keepdims)


Axes: TypeAlias = int | tuple[Sequence[int], Sequence[int]]
"""The dimensions that `tensordot` contracts."""


def _contracted(n: int, m: int, axes: Axes) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the dimensions of x1 and of x2 that `tensordot` contracts, for operands with n and m dimensions.

    Raises:
        AxisError, ArgumentError: as `tensordot`.
        ArgumentTypeError: ``axes`` has an iterator.
    """
    if isinstance(axes, int):
        if not 0 <= axes <= min(n, m):
            raise AxisError(f"axes={axes} dimensions cannot be contracted of operands with {n} and {m}")
        return range(n - axes, n), range(axes)
    if not isinstance(axes, (tuple, list)) or len(axes) != 2:
        raise ArgumentError(f"axes is {axes!r}; wanted an integer, or a pair of sequences of the same length")
    if any(hasattr(a, "__next__") for a in axes):
        raise ArgumentTypeError("axes has an iterator, which can be read only once; wanted a pair of lists or tuples")
    left, right = [(a,) if isinstance(a, int) else tuple(a) for a in axes]
    if len(left) != len(right):
        raise ArgumentError(
            f"axes has {counted(len(left), 'axis', 'axes')} of x1 and {len(right)} of x2; wanted as many of each"
        )
    return normalize_axes(left, n), normalize_axes(right, m)


def tensordot_rule(shapes: Sequence[Shape], *, axes: Axes = 2) -> str:
    """Returns the rule of `tensordot` of arrays with these shapes."""
    n, m = map(len, shapes)
    pairs = list(zip(*_contracted(n, m, axes), strict=True))
    names1 = [f"a{i}" for i in range(n)]
    names2 = [f"b{i}" for i in range(m)]
    for number, (i, j) in enumerate(pairs):
        names1[i] = names2[j] = f"k{number}"
    result = [name for name in names1 + names2 if not name.startswith("k")]
    return f"{' '.join(names1)}, {' '.join(names2)} -> {' '.join(result)}"
