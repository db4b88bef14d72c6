"""Sums of products in Einstein's notation.

`einsum` contracts two operands at a time, in an order of few multiplications. Each contraction is one operator whose
rule consists of the labels, so that every dimension keeps its sharding, and sums over sharded dimensions are partial
sums.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.small_floats import is_small_float
from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.numpy.products import SMALL, contract, diagonal
from shardtensor.functions.placement.partial_sum_operators import placed
from shardtensor.functions.standard.data_types import astype, result_type
from shardtensor.functions.standard.elementwise import multiply
from shardtensor.functions.standard.manipulation import expand_dims, permute_dims, squeeze
from shardtensor.functions.standard.statistical import sum as sum_over
from shardtensor.host.units import counted
from shardtensor.sharding.layout import NamedSharding, Shape, Where, with_mesh
from shardtensor.tensor.operands import dtype_of
from shardtensor.tensor.tensor import ShardedTensor

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

Term = tuple[str, ...]
"""The label of each dimension."""


@hinted
def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    dtype: Any = None,
    optimize: bool | str | Sequence[Any] | None = None,
    out_sharding: Where | None = None,
) -> ShardedTensor:
    """Evaluates a sum of products in Einstein's notation, as `numpy.einsum` does.

    Two operands are contracted at a time, in the order that opt_einsum proposes if it is installed, and otherwise that
    of `numpy.einsum_path`. A dimension keeps its sharding unless another operand uses the same mesh axis for another
    dimension. Sums over sharded dimensions are partial sums, which are added along a fixed tree. A diagonal of an
    operand is a copy here, not a view.

    Args:
        subscripts: the labels of the operands' dimensions and, after ``->``, of the result, such as ``"ij,jk->ik"``; an
            ellipsis stands for dimensions that broadcast. Or the first operand, if the operands alternate with lists of
            integers as labels, and a list for the result may follow them.
        *operands: tensors and arrays.
        dtype: the dtype of computation and result; by default that to which the operands are promoted.
        optimize: the strategy of `numpy.einsum_path`, or its path; True is the best order found, as by default, and
            False contracts from left to right. As in NumPy, where it is given and not False, the dimensions of an
            ellipsis that the result lacks are summed; otherwise, that is an error.
        out_sharding: the sharding of the result: see `matmul`.

    Raises:
        ArgumentError: the subscripts are malformed, or do not fit the number of operands.
        ShapeError: the subscripts do not fit the operands' dimensions, or dimensions with one label differ in size.
        ArgumentTypeError: an operand has no numbers.

    >>> a, b = st.ones((2, 3)), st.ones((3, 4))
    >>> st.einsum("ij,jk->k", a, b).tolist()
    [6.0, 6.0, 6.0, 6.0]
    """
    text, arrays = (subscripts, operands) if isinstance(subscripts, str) else _interleaved((subscripts, *operands))
    values: list[Any] = [x if hasattr(x, "shape") else np.asarray(x) for x in arrays]
    kinds = tuple([(tuple(x.shape), dtype_of(x)) for x in values])
    key = optimize if optimize is None or isinstance(optimize, (bool, str)) else tuple(map(str, optimize))
    steps = _program(text, kinds, None if dtype is None else np.dtype(dtype), key)
    for step, (function, positions, args, params) in enumerate(steps):
        if out_sharding is not None and function in _CONTRACTIONS:
            where = _where_made(out_sharding, steps[step + 1 :])
            params = params if where is None else params | {"out_sharding": where}
        values.append(function(*[values[i] for i in positions], *args, **params))
    result: ShardedTensor = values[-1]
    return result if out_sharding is None else placed(result, out_sharding, "einsum")


_CONTRACTIONS = (contract, sum_over)
"""The steps that can leave partial sums."""


def _where_made(sharding: Where, following: Sequence[Step]) -> NamedSharding | None:
    """Returns the layout of a contraction from which the result gets the sharding without a transfer, if the steps that
    follow at most permute its dimensions; otherwise None.
    """
    target = with_mesh(sharding, "einsum")
    if not isinstance(target, NamedSharding) or len(following) > 1:
        return None
    if not following:
        return target
    function, _, args, _ = following[0]
    if function is not permute_dims:
        return None
    chains = dict(zip(args[0], target.spec.chains_of(len(args[0])), strict=True))
    return target.with_spec(target.spec.with_chains([chains[d] for d in range(len(chains))]))


Step = tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""An operator, the positions of its operands among the values so far, and its other arguments."""

Labelled = tuple[int, Term]
"""The position of a value, and the labels of its dimensions."""


class _Program:
    """The operators that evaluate a sum of products. The operands are the first values; each step appends one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.steps: list[Step] = []

    def add(self, function: Callable[..., Any], positions: tuple[int, ...], *args: Any, **params: Any) -> int:
        """Adds a step, and returns the position of its value."""
        self.steps.append((function, positions, args, params))
        return self.count + len(self.steps) - 1


@functools.lru_cache(1024)
def _program(
    text: str, kinds: tuple[tuple[Shape, np.dtype[Any]], ...], dtype: np.dtype[Any] | None, optimize: Any
) -> list[Step]:
    """Returns the steps that evaluate the subscripts for operands of these shapes and dtypes.

    Raises:
        ArgumentError, ShapeError, ArgumentTypeError: as `einsum`.
    """
    shapes = tuple([shape for shape, _ in kinds])
    terms, result = _parsed(text, tuple(map(len, shapes)), bool(optimize))
    sizes = _sizes(terms, shapes)
    for _, kind in kinds:
        if kind.kind not in "biufc" and not is_small_float(kind):
            raise ArgumentTypeError(f"einsum: an operand has dtype {kind}; wanted numbers")
    common = result_type(*[kind for _, kind in kinds]) if dtype is None else dtype
    program, pairs = _Program(len(kinds)), []
    for i, (term, (shape, kind)) in enumerate(zip(terms, kinds, strict=True)):
        at = i if kind == common else program.add(astype, (i,), common)
        pairs.append(_simplified(program, at, term, shape, sizes))
    for positions in _order(tuple([term for _, term in pairs]), result, sizes, optimize):
        taken = [pairs[i] for i in positions]
        pairs = [pair for i, pair in enumerate(pairs) if i not in positions]
        pairs.append(_contracted(program, taken, {*result}.union(*[term for _, term in pairs]), sizes, common))
    ((last, term),) = pairs
    if term != result or last < len(kinds):
        program.add(permute_dims, (last,), tuple([term.index(label) for label in result]))
    return program.steps


def _interleaved(arguments: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """Converts the form ``einsum(x, [0, 1], y, [1, 2], [0, 2])`` to subscripts and operands.

    Raises:
        ArgumentError: a label is not an integer from 0 to 51 or an ellipsis.
    """

    def text(labels: Any) -> str:
        try:
            return "".join(["..." if n is Ellipsis else _LETTERS[n] for n in labels])
        except (TypeError, IndexError):
            raise ArgumentError(
                f"einsum: {labels!r:.60} is not a list of labels; wanted integers from 0 to 51"
            ) from None

    count = len(arguments) // 2
    left = ",".join([text(labels) for labels in arguments[1 : 2 * count : 2]])
    return left + ("->" + text(arguments[-1]) if len(arguments) % 2 else ""), tuple(arguments[: 2 * count : 2])


def _parsed(text: str, ndims: tuple[int, ...], sums_ellipsis: bool) -> tuple[tuple[Term, ...], Term]:
    """Returns the labels of each operand and of the result, with a label for each dimension of an ellipsis, which the
    result may lack if ``sums_ellipsis``.

    Raises:
        ArgumentError: the subscripts are malformed.
        ShapeError: they do not fit the numbers of dimensions.
    """
    left, arrow, right = text.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ndims):
        raise ArgumentError(
            f"einsum: subscripts {text!r} are for {counted(len(parts), 'operand')}, and {len(ndims)} are given"
        )
    terms = tuple([_labels(part, n, text) for part, n in zip(parts, ndims, strict=True)])
    counts = Counter(label for term in terms for label in term)
    dots = [label for label in max(terms, key=lambda t: sum(len(n) > 1 for n in t), default=()) if len(label) > 1]
    if arrow:
        spare = len(dots) if "..." in right else 0
        result = _labels(right, len(right.replace("...", "")) + spare, text)
    else:
        result = (*dots, *sorted(n for n, count in counts.items() if count == 1 and len(n) == 1))
    if dots and arrow and "..." not in right and not sums_ellipsis:
        raise ArgumentError(
            f"einsum: {text!r} lacks an ellipsis in the result; wanted the one of the operands, or optimize=True, by "
            "which its dimensions are summed"
        )
    if unknown := [n for n in result if n not in counts] or [n for n in result if result.count(n) > 1]:
        raise ArgumentError(f"einsum: {text!r} has {unknown[0]!r} in the result; wanted a label of an operand, once")
    return terms, result


def _labels(part: str, ndim: int, text: str) -> Term:
    head, dots, tail = part.partition("...")
    if not all(c in _LETTERS for c in head + tail):
        raise ArgumentError(f"einsum: subscripts {text!r} are malformed; wanted letters, commas, ellipses and one ->")
    spare = ndim - len(head) - len(tail)
    if spare < 0 or (spare and not dots):
        raise ShapeError(
            f"einsum: an operand of {counted(ndim, 'dimension')} has the subscripts {part!r}; wanted one for each"
        )
    return (*head, *[f"...{i}" for i in range(spare, 0, -1)], *tail)


def _sizes(terms: Sequence[Term], shapes: Sequence[Shape]) -> dict[str, int]:
    """Returns the size of every label; size 1 broadcasts.

    Raises:
        ShapeError: sizes differ.
    """
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, n in zip(term, shape, strict=True):
            if 1 not in (n, sizes.setdefault(label, n)) and sizes[label] != n:
                raise ShapeError(f"einsum: dimensions {label!r} have sizes {sizes[label]} and {n}; wanted equal ones")
            sizes[label] = n if sizes[label] == 1 else sizes[label]
    return sizes


def _simplified(program: _Program, at: int, term: Term, shape: Shape, sizes: dict[str, int]) -> Labelled:
    """Takes the diagonals of dimensions with the same label, and removes those of size 1 that broadcast."""
    gone = tuple([d for d, (label, n) in enumerate(zip(term, shape, strict=True)) if n != sizes[label]])
    if gone:
        at = program.add(squeeze, (at,), gone)
        term = tuple([label for d, label in enumerate(term) if d not in gone])
    while repeated := [label for label in term if term.count(label) > 1]:
        first = term.index(repeated[0])
        second = term.index(repeated[0], first + 1)
        at = program.add(diagonal, (at,), 0, first, second)
        term = (*[label for d, label in enumerate(term) if d not in (first, second)], repeated[0])
    return at, term


def _summed(program: _Program, pair: Labelled, needed: set[str], dtype: np.dtype[Any]) -> Labelled:
    """Sums over the dimensions that neither the result nor another operand has, in the dtype of the array."""
    at, term = pair
    gone = tuple([d for d, label in enumerate(term) if label not in needed])
    if not gone:
        return pair
    return program.add(sum_over, (at,), axis=gone, dtype=dtype), tuple([n for n in term if n in needed])


def _contracted(
    program: _Program, taken: Sequence[Labelled], kept: set[str], sizes: dict[str, int], dtype: np.dtype[Any]
) -> Labelled:
    """Multiplies operands from left to right, and sums over the labels that are not kept as soon as possible."""
    done, *rest = taken
    done = _summed(program, done, kept.union(*[term for _, term in rest]), dtype)
    for i, pair in enumerate(rest):
        needed = kept.union(*[term for _, term in rest[i + 1 :]])
        done = _product(program, done, _summed(program, pair, needed.union(done[1]), dtype), needed, sizes)
    return done


def _product(program: _Program, left: Labelled, right: Labelled, needed: set[str], sizes: dict[str, int]) -> Labelled:
    """Multiplies two operands, and sums over the labels of both that are not needed."""
    (x1, a), (x2, b) = left, right
    both = [label for label in a if label in b]
    batch, gone = [n for n in both if n in needed], [n for n in both if n not in needed]
    mine, theirs = [n for n in a if n not in both], [n for n in b if n not in both]
    result = (*batch, *mine, *theirs)
    if gone or math.prod([sizes[n] for n in result]) <= SMALL:
        names = {label: f"d{i}" for i, label in enumerate([*result, *gone])}
        rule = [" ".join([names[label] for label in term]) for term in (a, b, result)]
        return program.add(contract, (x1, x2), rule=f"{rule[0]}, {rule[1]} -> {rule[2]}"), result
    operands = []
    for at, term, before, width in ((x1, a, len(a), len(theirs)), (x2, b, len(batch), len(mine))):
        order = tuple([term.index(n) for n in result if n in term])
        at = at if order == tuple(range(len(term))) else program.add(permute_dims, (at,), order)
        added = tuple(range(before, before + width))
        operands.append(program.add(expand_dims, (at,), axis=added) if added else at)
    return program.add(multiply, tuple(operands)), result


# -- the order of contractions ---------------------------------------------------------------------


def _order(
    terms: tuple[Term, ...], result: Term, known: dict[str, int], optimize: bool | str | tuple[str, ...]
) -> list[tuple[int, ...]]:
    """Returns for each contraction the positions of its operands in the list of those that are left; its result is
    appended to the list.
    """
    if len(terms) == 1:
        return [(0,)]
    if len(terms) == 2 or optimize is False or len(known) > len(_LETTERS):
        return [(0, 1), *[(n - 1, 0) for n in range(len(terms) - 1, 1, -1)]]
    names = dict(zip(known, _LETTERS, strict=False))
    text = ",".join(["".join([names[n] for n in term]) for term in terms]) + "->" + "".join([names[n] for n in result])
    shapes = [tuple([known[n] for n in term]) for term in terms]
    if isinstance(optimize, tuple):
        path: Any = [step for step in map(_step, optimize) if step]
    else:
        path = _best_path(text, shapes, optimize)
    # Of operands of equal size the first one stays where it is: an earlier result, whose layout was chosen for it.
    steps, count = [], len(terms)
    for step in path:
        steps.append(tuple(sorted(step, key=lambda at: (at < count, at))))
        count -= len([at for at in step if at < count])
    return steps


def _best_path(text: str, shapes: Sequence[Shape], optimize: bool | str) -> Sequence[tuple[int, ...]]:
    """Returns the path of opt_einsum, if it is installed and no strategy of NumPy is given, or else of NumPy."""
    if optimize is True:
        try:
            opt_einsum = importlib.import_module("opt_einsum")
        except ImportError:
            optimize = "optimal" if len(shapes) < 6 else "greedy"
        else:
            return opt_einsum.contract_path(text, *shapes, shapes=True, optimize="auto")[0]  # type: ignore[no-any-return]
    empty = [np.broadcast_to(np.empty(()), shape) for shape in shapes]
    return np.einsum_path(text, *empty, optimize=optimize)[0][1:]


def _step(text: str) -> tuple[int, ...]:
    """Returns a step of a path, such as ``(0, 1)``; the empty tuple for the name that NumPy's paths begin with."""
    return tuple(map(int, text.strip("()").replace(",", " ").split())) if text.startswith("(") else ()
