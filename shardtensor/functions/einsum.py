"""Sums of products in Einstein's notation.

`einsum` contracts two operands at a time, in an order of few multiplications. Each contraction is one operator whose
rule consists of the labels, so that every dimension keeps its sharding, and sums over sharded dimensions are partial
sums.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.data_types import astype
from shardtensor.functions.elementwise import multiply
from shardtensor.functions.manipulation import expand_dims, permute_dims, squeeze
from shardtensor.functions.products import diagonal
from shardtensor.functions.statistical import sum as sum_over
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor

Term = tuple[str, ...]
"""The label of each dimension."""


def einsum(
    subscripts: Any, /, *operands: Any, dtype: Any = None, optimize: bool | str | Sequence[Any] = True
) -> ShardedTensor:
    """Evaluates a sum of products in Einstein's notation, as `numpy.einsum` does.

    Two operands are contracted at a time, in the order that opt_einsum proposes if it is installed, and else
    `numpy.einsum_path`. All dimensions keep their sharding where no other operand uses the same mesh axis for another
    one; sums over sharded dimensions are partial sums, which are added along a fixed tree. A diagonal of an operand is
    a copy here, not a view.

    Args:
        subscripts: the labels of the operands' dimensions and, after ``->``, of the result, such as ``"ij,jk->ik"``; an
            ellipsis stands for dimensions that broadcast. Or the first operand, if the operands alternate with lists of
            integers as labels, and a list for the result may follow them.
        *operands: tensors and arrays.
        dtype: the dtype of computation and result; by default that to which the operands are promoted.
        optimize: the strategy of `numpy.einsum_path`, or its path; True is the best order found, False contracts from
            left to right.

    Raises:
        ArgumentError: the subscripts are malformed, or do not fit the number of operands.
        ShapeError: the subscripts do not fit the operands' dimensions, or dimensions with one label differ in size.
        ArgumentTypeError: an operand has no numbers.

    >>> a, b = st.ones((2, 3)), st.ones((3, 4))
    >>> st.einsum("ij,jk->k", a, b).tolist()
    [6.0, 6.0, 6.0, 6.0]
    """
    text, arrays = (subscripts, operands) if isinstance(subscripts, str) else _interleaved((subscripts, *operands))
    arrays = tuple([x if hasattr(x, "shape") else np.asarray(x) for x in arrays])
    shapes = tuple([tuple(x.shape) for x in arrays])
    terms, result = _parsed(text, tuple(map(len, shapes)))
    sizes = _sizes(terms, shapes)
    arrays = _of_one_dtype(arrays, dtype)
    pairs = [_simplified(x, term, sizes) for x, term in zip(arrays, terms, strict=True)]
    key = optimize if isinstance(optimize, (bool, str)) else tuple(map(str, optimize))
    order = _order(tuple(term for _, term in pairs), result, tuple(sizes.items()), key)
    for positions in order:
        taken = [pairs[i] for i in positions]
        pairs = [pair for i, pair in enumerate(pairs) if i not in positions]
        pairs.append(_contracted(taken, {*result}.union(*[term for _, term in pairs])))
    ((value, term),) = pairs
    return permute_dims(value, tuple([term.index(label) for label in result]))


def _interleaved(arguments: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """Converts the form ``einsum(x, [0, 1], y, [1, 2], [0, 2])`` to subscripts and operands.

    Raises:
        ArgumentError: a label is not an integer from 0 to 51 or an ellipsis.
    """

    def text(labels: Any) -> str:
        try:
            return "".join(["..." if n is Ellipsis else string.ascii_letters[n] for n in labels])
        except (TypeError, IndexError):
            raise ArgumentError(f"einsum: {labels!r:.60} is no list of labels; wanted integers from 0 to 51") from None

    count = len(arguments) // 2
    left = ",".join([text(labels) for labels in arguments[1 : 2 * count : 2]])
    return left + ("->" + text(arguments[-1]) if len(arguments) % 2 else ""), tuple(arguments[: 2 * count : 2])


def _of_one_dtype(arrays: Sequence[Any], dtype: Any) -> tuple[Any, ...]:
    """Casts the operands to the dtype of the computation.

    Raises:
        ArgumentTypeError: an operand is not of numbers or bools.
    """
    kinds = [_dtype_of(x) for x in arrays]
    for kind in kinds:
        if kind.kind not in "biufc":
            raise ArgumentTypeError(f"einsum: an operand has dtype {kind}; wanted numbers")
    common = np.result_type(*kinds) if dtype is None else np.dtype(dtype)
    return tuple([x if kind == common else astype(x, common) for x, kind in zip(arrays, kinds, strict=True)])


def _dtype_of(x: Any) -> np.dtype[Any]:
    backend = array_backend(x)  # In a mapped function, arrays are those of the backend.
    return backend.dtype_of(x) if backend else x.dtype


@functools.lru_cache(1024)
def _parsed(text: str, ndims: tuple[int, ...]) -> tuple[tuple[Term, ...], Term]:
    """Returns the labels of each operand and of the result, with a label for each dimension of an ellipsis.

    Raises:
        ArgumentError: the subscripts are malformed.
        ShapeError: they do not fit the numbers of dimensions.
    """
    left, arrow, right = text.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ndims):
        raise ArgumentError(f"einsum: subscripts {text!r} are of {len(parts)} operands, and {len(ndims)} are given")
    terms = tuple([_labels(part, n, text) for part, n in zip(parts, ndims, strict=True)])
    counts = Counter(label for term in terms for label in term)
    dots = [label for label in max(terms, key=lambda t: sum(len(n) > 1 for n in t), default=()) if len(label) > 1]
    if arrow:
        spare = len(dots) if "..." in right else 0
        result = _labels(right, len(right.replace("...", "")) + spare, text)
    else:
        result = (*dots, *sorted(n for n, count in counts.items() if count == 1 and len(n) == 1))
    if unknown := [n for n in result if n not in counts] or [n for n in result if result.count(n) > 1]:
        raise ArgumentError(f"einsum: {text!r} has {unknown[0]!r} in the result; wanted a label of an operand, once")
    return terms, result


def _labels(part: str, ndim: int, text: str) -> Term:
    head, dots, tail = part.partition("...")
    if not all(c in string.ascii_letters for c in head + tail):
        raise ArgumentError(f"einsum: subscripts {text!r} are malformed; wanted letters, commas, ellipses and one ->")
    spare = ndim - len(head) - len(tail)
    if spare < 0 or (spare and not dots):
        raise ShapeError(f"einsum: an operand of {ndim} dimensions has the subscripts {part!r}; wanted one for each")
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


Labelled = tuple[Any, Term]
"""An array and the labels of its dimensions."""


def _simplified(x: Any, term: Term, sizes: dict[str, int]) -> Labelled:
    """Takes the diagonals of dimensions with the same label, and removes those of size 1 that broadcast."""
    shape = tuple(x.shape)
    gone = tuple([d for d, (label, n) in enumerate(zip(term, shape, strict=True)) if n != sizes[label]])
    if gone:
        x, term = squeeze(x, gone), tuple([label for d, label in enumerate(term) if d not in gone])
    while repeated := [label for label in term if term.count(label) > 1]:
        first = term.index(repeated[0])
        second = term.index(repeated[0], first + 1)
        x = diagonal(x, 0, first, second)
        term = (*[label for d, label in enumerate(term) if d not in (first, second)], repeated[0])
    return x, term


def _summed(pair: Labelled, needed: set[str]) -> Labelled:
    """Sums over the dimensions that neither the result nor another operand has, in the dtype of the array."""
    x, term = pair
    gone = tuple([d for d, label in enumerate(term) if label not in needed])
    if not gone:
        return pair
    return sum_over(x, axis=gone, dtype=_dtype_of(x)), tuple([label for label in term if label in needed])


def _contracted(taken: Sequence[Labelled], kept: set[str]) -> Labelled:
    """Multiplies operands from left to right, and sums over the labels that are not kept as soon as possible."""
    done, *rest = taken
    done = _summed(done, kept.union(*[term for _, term in rest]))
    for i, pair in enumerate(rest):
        needed = kept.union(*[term for _, term in rest[i + 1 :]])
        done = _product(done, _summed(pair, needed.union(done[1])), needed)
    return done


def _product(left: Labelled, right: Labelled, needed: set[str]) -> Labelled:
    """Multiplies two operands, and sums over the labels of both that are not needed."""
    (x1, a), (x2, b) = left, right
    both = [label for label in a if label in b]
    batch, gone = [n for n in both if n in needed], [n for n in both if n not in needed]
    mine, theirs = [n for n in a if n not in both], [n for n in b if n not in both]
    result = (*batch, *mine, *theirs)
    if gone:
        names = {label: string.ascii_letters[i] for i, label in enumerate([*result, *gone])}
        rule = [" ".join([names[label] for label in term]) for term in (a, b, result)]
        return contract(x1, x2, rule=f"{rule[0]}, {rule[1]} -> {rule[2]}"), result
    x1 = permute_dims(x1, tuple([a.index(n) for n in (*batch, *mine)])) if a != (*batch, *mine) else x1
    x2 = permute_dims(x2, tuple([b.index(n) for n in (*batch, *theirs)])) if b != (*batch, *theirs) else x2
    if theirs and mine:
        x1 = expand_dims(x1, axis=tuple(range(len(a), len(a) + len(theirs))))
        x2 = expand_dims(x2, axis=tuple(range(len(batch), len(batch) + len(mine))))
    elif mine and batch:
        x2 = expand_dims(x2, axis=tuple(range(len(batch), len(a))))
    elif theirs and batch:
        x1 = expand_dims(x1, axis=tuple(range(len(batch), len(b))))
    return multiply(x1, x2), result


# -- the order of contractions ---------------------------------------------------------------------


@functools.lru_cache(1024)
def _order(
    terms: tuple[Term, ...], result: Term, sizes: tuple[tuple[str, int], ...], optimize: bool | str | tuple[str, ...]
) -> list[tuple[int, ...]]:
    """Returns for each contraction the positions of its operands in the list of those that are left; what it makes is
    appended to the list.
    """
    known = dict(sizes)
    if len(terms) == 1:
        return [(0,)]
    if len(terms) == 2 or optimize is False or len(known) > len(string.ascii_letters):
        return [(0, 1), *[(n - 1, 0) for n in range(len(terms) - 1, 1, -1)]]
    names = dict(zip(known, string.ascii_letters, strict=False))
    text = ",".join(["".join([names[n] for n in term]) for term in terms]) + "->" + "".join([names[n] for n in result])
    shapes = [tuple([known[n] for n in term]) for term in terms]
    if isinstance(optimize, tuple):
        path: Any = [step for step in map(_step, optimize) if step]
    elif optimize is True and importlib.util.find_spec("opt_einsum"):
        path = importlib.import_module("opt_einsum").contract_path(text, *shapes, shapes=True, optimize="auto")[0]
    else:
        name = "optimal" if optimize is True and len(terms) < 6 else "greedy" if optimize is True else optimize
        empty = [np.broadcast_to(np.empty(()), shape) for shape in shapes]
        path = np.einsum_path(text, *empty, optimize=name)[0][1:]
    return [tuple(sorted(step)) for step in path]


def _step(text: str) -> tuple[int, ...]:
    """Returns a step of a path, such as ``(0, 1)``; the empty tuple for the name that NumPy's paths begin with."""
    return tuple(map(int, text.strip("()").replace(",", " ").split())) if text.startswith("(") else ()


# -- the contraction of two operands ---------------------------------------------------------------


def _contraction_rule(shapes: Sequence[Shape], *, rule: str) -> str:
    return rule


@operator(
    _contraction_rule,
    operands=("x1", "x2"),
    combine="sum",
    error_name="einsum",
    ufunc="einsum",
    dtype=lambda x1, x2, **params: np.result_type(x1, x2),
)
def contract(x1: ArrayLike, x2: ArrayLike, /, *, rule: str) -> ShardedTensor:
    """Computes the sum of products of two operands of one dtype.

    Args:
        x1, x2: tensors or arrays.
        rule: names the dimensions of x1, x2 and of the result, such as ``"b i k, k b j -> b i j"``: first those of both
            operands, then those of x1, then those of x2. Names of both that the result lacks are contracted.
    """


@functools.lru_cache(1024)
def _groups(rule: str) -> tuple[tuple[list[int], ...], tuple[list[int], ...]]:
    """Returns the dimensions of x1 and those of x2 in groups: of both in the result, own ones, contracted ones."""
    left, _, result = rule.partition("->")
    a, b = [term.split() for term in left.split(",")]
    names = result.split()
    batch, gone = [n for n in names if n in a and n in b], [n for n in a if n not in names]

    def groups(term: list[str]) -> tuple[list[int], ...]:
        own = [n for n in names if n in term and n not in batch]
        return tuple([[term.index(n) for n in group] for group in (batch, own, gone)])

    return groups(a), groups(b)


@implements(contract, "kernel")
def _contract(xp: Any, context: ShardContext, x1: Any, x2: Any, *, rule: str) -> Any:
    """Computes the product by ``matmul`` of arrays with one dimension for each group."""
    (batch, rows, inner), (batch2, columns, inner2) = _groups(rule)
    shape = (*[x1.shape[d] for d in (*batch, *rows)], *[x2.shape[d] for d in columns])
    left = _grouped(xp, x1, (batch, rows, inner))
    right = _grouped(xp, x2, (batch2, inner2, columns))
    return xp.reshape(xp.matmul(left, right), shape)


def _grouped(xp: Any, x: Any, groups: Sequence[Sequence[int]]) -> Any:
    """Permutes the dimensions of an array, and merges each group; an empty first group has no dimension."""
    order = tuple([d for group in groups for d in group])
    shape = tuple([math.prod([x.shape[d] for d in group]) for group in (groups if groups[0] else groups[1:])])
    x = x if order == tuple(range(x.ndim)) else xp.permute_dims(x, order)
    return x if tuple(x.shape) == shape else xp.reshape(x, shape)
