"""`accumulate`: gradients of large batches, computed from one microbatch after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.derivatives.cotangents import is_inexact
from shardtensor.host.units import counted
from shardtensor.interpreters.differentiation.grad import argument_numbers, check_function
from shardtensor.interpreters.differentiation.left_sums import LeftSums, added_up, leaving_sums
from shardtensor.interpreters.programs.trace import adding_gradients
from shardtensor.tensor.operands import dtype_of, is_data
from shardtensor.tensor.pytree import form_of, leaves, map_leaves, paths, replaced
from shardtensor.tensor.tensor import ShardedTensor


@hinted
def accumulate(
    grad_fun: Callable[..., Any], n: int, *, batch_argnums: int | Sequence[int] | None = None
) -> Callable[..., Any]:
    """Returns a function that calls ``grad_fun`` for n parts of a batch, one after the other, and returns the mean.

    The memory for what derivatives save is that of one part. The partial sums of gradients are added up for all parts,
    and then reduced once, in eager mode and in a program of `jit`: the bytes are those of one call with the whole
    batch.

    Products of bfloat16 and float8 are added in float32 at once, before they are rounded: their gradients have a
    reduction for each part.

    Args:
        grad_fun: a function as `grad` and `value_and_grad` return it, of a loss that is a mean over the batch.
        n: the number of parts.
        batch_argnums: the positional arguments that are batches, of which all arrays with dimensions are split along
            dimension 0. By default, all but the first one. Other arguments, and those given by name, are passed on.
            So are keys: all parts draw the same numbers, unless the function folds a number of its batch into them.

    Returns:
        A function of the arguments of ``grad_fun`` with the same results. Floating-point results are means, weighted
        by the rows of the parts; integers, such as counts, are sums. Part k has the rows k, k + n, k + 2 n, …, so that
        a batch that is split over devices is on all of them in each part. The sizes of the parts differ by one at
        most. Gradients have the layouts of their arguments.

    Raises:
        ArgumentError: a batch has fewer than n rows, or arrays of a batch differ in their numbers of rows.
        ArgumentTypeError: n is not a positive integer, or a result is neither an array nor a number.

    >>> def loss(w, x):
    ...     return ((x @ w) ** 2).mean()
    >>> w, x = st.ones(3), st.ones((8, 3))
    >>> st.accumulate(st.grad(loss), 4)(w, x).tolist() == st.grad(loss)(w, x).tolist()
    True
    """
    check_function("accumulate", grad_fun)
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 1:
        raise ArgumentTypeError(f"accumulate: n is {n!r}; wanted the number of parts of the batch, 1 or more")

    @functools.wraps(grad_fun)
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        numbers = (
            tuple(range(1, len(args)))
            if batch_argnums is None
            else argument_numbers("accumulate", batch_argnums, len(args))
        )
        rows = _rows(args, numbers, n)
        total = None
        for k in range(n):
            part = [
                map_leaves(functools.partial(_part, k=k, n=n), x) if i in numbers else x for i, x in enumerate(args)
            ]
            weight = len(range(k, rows, n)) / rows
            with leaving_sums() as left:
                result = grad_fun(*part, **kwargs)
            if total is None:
                total = _Total(result, left, weight)
            else:
                total.add(result, weight)
            del left, result  # The memory of the gradients is free while the next part is computed.
        assert total is not None
        return total.reduced()

    return accumulated


def _has_rows(x: Any) -> bool:
    return (isinstance(x, (ShardedTensor, np.ndarray)) or is_data(x)) and np.ndim(x) > 0


def _part(x: Any, k: int, n: int) -> Any:
    return x[k::n] if _has_rows(x) else x


def _rows(args: Sequence[Any], numbers: Sequence[int], n: int) -> int:
    """Returns the number of rows of the batches."""
    known: tuple[str, int] | None = None
    for i in numbers:
        for path, x in zip(paths(args[i], f"argument {i}"), leaves(args[i]), strict=True):
            if not _has_rows(x):
                continue
            if known is not None and len(x) != known[1]:
                raise ArgumentError(
                    f"accumulate: {path} has {counted(len(x), 'row')}, and {known[0]} has {known[1]}; wanted batches "
                    "of the same number of rows (batch_argnums= chooses the arguments that are split)"
                )
            known = known or (path, len(x))
    if known is None:
        raise ArgumentError(
            f"accumulate: no argument among {list(numbers)} is an array with dimensions; wanted a batch to be split "
            "(batch_argnums= chooses the arguments)"
        )
    if known[1] < n:
        raise ArgumentError(
            f"accumulate: {known[0]} has {counted(known[1], 'row')}; wanted at least one for each of "
            f"{counted(n, 'part')}"
        )
    return known[1]


class _Total:
    """The weighted sum of the results of parts.

    Results are multiplied by their weights before they are added, while gradients are partial sums, so that the
    reduction comes last, and can be one into the layout to which a program transfers the gradient.

    Args:
        result: the result of the first part.
        left: the gradients in it that are partial sums.
        weight: the weight of inexact numbers; integers are counts.
    """

    def __init__(self, result: Any, left: LeftSums, weight: float) -> None:
        for path, x in zip(paths(result, "the result"), leaves(result), strict=True):
            if x is not None and not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex)):
                raise ArgumentTypeError(
                    f"accumulate: {path} of the function is {type_text(x)}; wanted arrays and numbers, of which the "
                    "mean is returned"
                )
        self._form = form_of(result)
        self._layouts = list(map(left.layout, leaves(result)))
        self._sum = map_leaves(functools.partial(_weighted, weight=weight), result)

    def add(self, result: Any, weight: float) -> None:
        """Adds the result of another part."""
        if form_of(result) != self._form:
            raise ArgumentError("accumulate: the results of the function differ in structure from part to part")
        with adding_gradients():
            sums = [
                None if total is None else total + _weighted(x, weight)
                for total, x in zip(leaves(self._sum), leaves(result), strict=True)
            ]
        self._sum = replaced(self._sum, sums)

    def reduced(self) -> Any:
        """Returns the sum without partial sums."""
        pairs = zip(leaves(self._sum), self._layouts, strict=True)
        return replaced(self._sum, [x if layout is None else added_up(x, layout) for x, layout in pairs])


def _weighted(x: Any, weight: float) -> Any:
    if x is None or weight == 1 or not is_inexact(dtype_of(x)):
        return x
    with adding_gradients():
        return x * weight
