"""Loops and branches that are called once for all examples of a batch.

A function of a loop is called with values of the batcher, and takes and returns those of all examples. Which leaves of
a carry differ between examples is inferred: one that does in some trip is that of all examples from the first one on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardtensor.core import OPS, Op, Operands, bind_by, call
from shardtensor.errors import ArgumentError
from shardtensor.interpreters.batching.batcher import Batcher, for_all, special
from shardtensor.interpreters.control_flow.operators import Function, converted, kind_of, text_of
from shardtensor.interpreters.infer import inferring
from shardtensor.interpreters.views.views import stand_in
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import ShardedTensor, without_elements
from shardtensor.tensor.value import Aval, aval

Flags = list[bool]
"""For each leaf of a tree, whether it differs from one example to another."""


class _Function:
    """A function of one example as one of all of them.

    Args:
        batcher: the batcher, by which its operators are called.
        function: the function.
        arg_flags: for the leaves of each of its arguments, whether they differ between examples.

    Attributes:
        others: for the leaves of the last result behind the carry, whether they differ between examples.
    """

    def __init__(self, batcher: Batcher, function: Function, arg_flags: Sequence[Flags]) -> None:
        self._batcher = batcher
        self._function = function
        self._arg_flags = arg_flags
        self.others: Flags = []

    def __call__(self, *args: Any) -> tuple[Any, Flags]:
        """Returns the result of all examples, and which of its leaves differ between them."""
        batcher = self._batcher
        with batcher.inside():
            boxed = [batcher.boxed(tree, flags) for tree, flags in zip(args, self._arg_flags, strict=True)]
            result = self._function(*boxed)
            flags = list(map(batcher.differs, leaves(result)))
        return map_leaves(batcher.examples, result), flags

    def inferred(self, *args: Any) -> tuple[Any, Flags]:
        """Infers the result, without elements."""
        known: dict[int, Any] = {}
        with inferring():
            return self(*map_leaves(functools.partial(stand_in, known=known), args))

    def with_flags(self, targets: Flags, like: Aval | None) -> Function:
        """Returns the function, of whose result the leaves that are ``targets`` are those of all examples."""

        def function(*args: Any) -> Any:
            return _spread(self._batcher, *self(*args), targets, like)

        return function

    def with_carry(self, carry: Flags, like: Aval | None) -> Function:
        """Returns the function, of whose result the first leaves, the carry, are those of all examples where these
        flags say so. The others may be more than those that were inferred: they are what derivatives have saved.
        """

        def function(*args: Any) -> Any:
            result, flags = self(*args)
            self.others = flags[len(carry) :]
            return _spread(self._batcher, result, flags, carry + self.others, like)

        return function


def _spread(batcher: Batcher, tree: Any, flags: Flags, targets: Flags, like: Aval | None) -> Any:
    """Returns a tree of which the leaves that are ``targets`` are those of all examples, in the layout of others."""
    new_leaves = []
    for x, is_given, is_wanted in zip(leaves(tree), flags, targets, strict=True):
        if is_wanted and not is_given:
            assert like is not None
            x = for_all(converted(x), batcher.size, like, "vmap")
        new_leaves.append(x)
    return replaced(tree, new_leaves)


def _examples(batcher: Batcher, tree: Any) -> tuple[Any, Flags]:
    return map_leaves(batcher.examples, tree), list(map(batcher.differs, leaves(tree)))


def _like(tree: Any, flags: Flags) -> Aval | None:
    """Returns the aval of a leaf that differs between examples."""
    return next((x._aval for x, f in zip(leaves(tree), flags, strict=True) if f and type(x) is ShardedTensor), None)


def _counted(batcher: Batcher, init: Any, xs: Any, bounds: Any, body: Function, reverse: bool, caller: str) -> Any:
    if any(map(batcher.differs, leaves(bounds))):
        raise ArgumentError(
            f"{caller}: the number of trips differs from one example to another; take the greatest number, and "
            "st.where in the function"
        )
    (carry, flags), (xs, x_flags) = _examples(batcher, init), _examples(batcher, xs)
    slices = [call("moveaxis", x, 1, 0) if f else x for x, f in zip(leaves(xs), x_flags, strict=True)]
    xs, first = replaced(xs, slices), replaced(xs, list(map(_first, slices)))
    like, count = _like((carry, first), flags + x_flags), len(flags)
    while True:
        function = _Function(batcher, body, [[False], flags, x_flags])
        result, result_flags = function.inferred(0, carry, first)
        like = like or _like(result, result_flags)
        grown = [a or b for a, b in zip(flags, result_flags, strict=False)]
        if grown == flags or len(grown) != count:  # A carry that changes its structure is an error of the loop.
            break
        carry, flags = _spread(batcher, carry, flags, grown, like), grown
    operands, function.others = (carry, xs, bounds), result_flags[count:]
    params = function.with_carry(flags, like), reverse, caller
    last, ys = bind_by(batcher.outer, OPS["counted_loop"], operands, params)
    stacked = zip(leaves(ys), function.others, strict=True)
    ys = replaced(ys, [call("moveaxis", y, 1, 0) if f else y for y, f in stacked])
    return batcher.boxed(last, flags), batcher.boxed(ys, function.others)


def _first(x: Any) -> Any:
    """Returns a slice of an array of which the elements do not matter."""
    if x is None:
        return None
    if x.shape[0]:
        return x[0]
    return without_elements(aval((1, *x.shape[1:]), x.dtype, x.sharding, x.committed))[0]


def _conditional(batcher: Batcher, init: Any, cond: Function, body: Function, caller: str) -> Any:
    carry, flags = _examples(batcher, init)
    like, is_each = _like(carry, flags), False
    while True:
        function, condition = _Function(batcher, body, [flags]), _Function(batcher, cond, [flags])
        result, result_flags = function.inferred(carry)
        choice, (is_each,) = condition.inferred(carry)
        like = like or _like(result, result_flags) or _like(choice, [is_each])
        grown = [a or b or is_each for a, b in zip(flags, result_flags, strict=False)]
        if grown == flags or len(grown) != len(flags):
            break
        carry, flags = _spread(batcher, carry, flags, grown, like), grown
    following = function.with_flags(flags, like)
    if is_each:  # As long as one example goes on, those that have ended keep their carry.
        cond, body = _some(condition), _of_those(batcher, condition, following)
    else:
        cond, body = condition.with_flags([False], like), following
    last = bind_by(batcher.outer, OPS["conditional_loop"], (carry,), (cond, body, caller))
    return batcher.boxed(last, flags)


def _some(condition: _Function) -> Function:
    return lambda carry: call("any", condition(carry)[0])


def _of_those(batcher: Batcher, condition: _Function, following: Function) -> Function:
    """Returns the function that replaces the carry of those examples for which a condition is true."""

    def function(carry: Any) -> Any:
        goes_on, after = condition(carry)[0], following(carry)
        pairs = zip(leaves(carry), leaves(after), strict=True)
        return replaced(carry, [_chosen(goes_on, new, old) for old, new in pairs])

    return function


def _chosen(condition: Any, x: Any, y: Any) -> Any:
    """Returns the elements of x of those examples for which the condition is true, and those of y of others."""
    if not hasattr(x, "ndim"):
        return x
    return call("where", call("reshape", condition, (*condition.shape, *[1] * (x.ndim - 1))), x, y)


def _branch(batcher: Batcher, index: Any, operands: Any, branches: Sequence[Function], caller: str) -> Any:
    if batcher.differs(index):
        with batcher.inside():
            return _selected(index, [map_leaves(converted, f(*operands)) for f in branches], caller)
    inputs, flags = [], []
    for tree in operands:
        primals, each = _examples(batcher, tree)
        inputs.append(primals)
        flags.append(each)
    functions = [_Function(batcher, f, flags) for f in branches]
    results = [f.inferred(*inputs) for f in functions]
    result_flags = [any(each) for each in zip(*[flags for _, flags in results], strict=False)]
    like = next((a for tree, each in results if (a := _like(tree, each)) is not None), None)
    chosen = [
        f.with_flags(result_flags if len(each) == len(result_flags) else each, like)
        for f, (_, each) in zip(functions, results, strict=True)
    ]
    result = bind_by(batcher.outer, OPS["branch"], (index, inputs), (tuple(chosen), caller))
    return batcher.boxed(result, result_flags)


def _selected(index: Any, results: Sequence[Any], caller: str) -> Any:
    """Returns for each example the result of its branch: all of them are called."""
    names = ("false_fun", "true_fun") if caller == "cond" else [f"branches[{k}]" for k in range(len(results))]
    result = results[0]
    if caller != "cond":
        index = call("clip", index, 0, len(results) - 1)
    for k, other in enumerate(results[1:], 1):
        pairs = list(zip(leaves(result), leaves(other), strict=False))
        alike = len(leaves(result)) == len(leaves(other)) and all(kind_of(a)[:2] == kind_of(b)[:2] for a, b in pairs)
        if not alike:
            raise ArgumentError(
                f"{caller}: {names[0]} returns {', '.join(map(text_of, leaves(result)))}, and {names[k]} "
                f"{', '.join(map(text_of, leaves(other)))}; wanted the same structure, shapes and dtypes, since the "
                "condition differs from one example of vmap to another"
            )
        is_this = index if caller == "cond" else index == k
        is_this = call("astype", is_this, "bool")
        result = replaced(result, [call("where", is_this, b, a) if hasattr(a, "shape") else a for a, b in pairs])
    return result


def _rule(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(batcher: Batcher, op: Op, operands: Operands, params: dict[str, Any]) -> Any:
        return function(batcher, *operands, **params)

    return called


special(counted_loop=_rule(_counted), conditional_loop=_rule(_conditional), branch=_rule(_branch))
