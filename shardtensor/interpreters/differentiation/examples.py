"""Functions with rules of their own that `vmap` calls for all examples of a batch, in a differentiated function.

There, the function of all examples has a rule, too: its rule calls that of one example by a batcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, interpreting
from shardtensor.custom_derivatives import CustomVJPPrimal, SymbolicZero, is_zero
from shardtensor.functions.derivatives.cotangents import FLOAT0
from shardtensor.interpreters.batching.batcher import Batcher
from shardtensor.interpreters.program_arrays import tensor_here
from shardtensor.sharding.spec import P
from shardtensor.tensor.array_type import ArrayType
from shardtensor.tensor.pytree import leaves, map_leaves, replaced
from shardtensor.tensor.tensor import ShardedTensor


class Examples:
    """One call of a function of one example, which is called for all of them.

    Attributes:
        batcher: the batcher of the call, which has ended when the backward rule is called.
        size, axis_name: the number of examples, and the name of their dimension.
        args: the arguments, with flags in place of their leaves, which say whether these differ between examples.
        statics, primals: those of ``nondiff_argnums``, and the others.
        results: the flags of the leaves of the result.
    """

    def __init__(self, batcher: Batcher, args: tuple[Any, ...], nondiff_argnums: Sequence[int]) -> None:
        self.batcher = batcher
        self.size, self.axis_name = batcher.size, batcher.axis_name
        self.args: tuple[Any, ...] = map_leaves(lambda x: batcher.batched(x) is not None, args)
        self.statics = tuple([self.args[k] for k in nondiff_argnums])
        self.primals = tuple([x for k, x in enumerate(self.args) if k not in nondiff_argnums])
        self.results: list[bool] = []

    def of_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of one example as one of all of them."""

        def called(*args: Any) -> Any:
            with self.batcher.inside():
                result = function(*boxed(self.batcher, args, self.args))
                self.results = _flags(self.batcher, result)
            return map_leaves(self.batcher.examples, result)

        return called

    def of_vjp(
        self, fwd: Callable[..., tuple[Any, Any]], bwd: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Returns the rules of `custom_vjp` for all examples.

        Args:
            fwd: the forward rule.
            bwd: the backward rule; it returns a list of cotangents, one for each leaf of the arguments.
        """
        residual_flags: list[bool] = []

        def forward(*args: Any) -> Any:
            with self.batcher.inside():
                value, residuals = fwd(*boxed(self.batcher, args, self.args))
                self.results, residual_flags[:] = _flags(self.batcher, value), _flags(self.batcher, residuals)
            return map_leaves(self.batcher.examples, value), map_leaves(self.batcher.examples, residuals)

        def backward(*args: Any) -> Any:
            *statics, residuals, g = args
            batcher = Batcher(self.size, self.axis_name)
            with interpreting(batcher):
                known = boxed(batcher, tuple(statics), self.statics)
                cotangents = bwd(
                    *known, boxed(batcher, residuals, residual_flags), boxed(batcher, g, self.results), self.primals
                )
                flags = _flags(batcher, cotangents)
            pairs = zip(map(batcher.examples, cotangents), flags, leaves(self.primals), strict=True)
            gradients = [self._cotangent(g, is_given, is_wanted) for g, is_given, is_wanted in pairs]
            batcher.ended = True
            return replaced(self.primals, gradients)

        return forward, backward

    def of_jvp(self, rule: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        """Returns the rule of `custom_jvp` for all examples."""

        def called(*args: Any) -> Any:
            *statics, primals, tangents = args
            batcher = self.batcher
            with batcher.inside():
                known = boxed(batcher, tuple(statics), self.statics)
                flags = self.primals
                value, tangent = rule(*known, boxed(batcher, primals, flags), boxed(batcher, tangents, flags))
                before, others = _flags(batcher, value), _flags(batcher, tangent)
            self.results = [a or b for a, b in zip(before, others, strict=True)]
            value = self._spread(map_leaves(batcher.examples, value), before)
            return value, self._spread(map_leaves(batcher.examples, tangent), others)

        return called

    def _cotangent(self, g: Any, is_given: bool, is_wanted: bool) -> Any:
        """Returns the cotangent of an argument; of one that all examples share, it is the sum of theirs."""
        if is_zero(g) or is_given == is_wanted:
            return None if type(g) is SymbolicZero else g
        return self._for_all(g) if is_wanted else call("sum", g, axis=0)

    def _spread(self, tree: Any, flags: Sequence[bool]) -> Any:
        """Returns a tree of which the leaves that differ in the result or in its tangent are those of all examples."""
        values = [
            self._for_all(x) if is_wanted and not is_given else x
            for x, is_given, is_wanted in zip(leaves(tree), flags, self.results, strict=True)
        ]
        return replaced(tree, values)

    def _for_all(self, x: Any) -> Any:
        """Returns a value that is the same for all examples once for each of them; zeros stay zeros."""
        if is_zero(x):
            return None
        x = tensor_here(x)
        x = x if type(x) is ShardedTensor else call("asarray", x)
        return call("broadcast_to", x, (self.size, *x.shape))


def _flags(batcher: Batcher, tree: Any) -> list[bool]:
    """Returns for each leaf whether it differs from one example to another."""
    return [batcher.batched(x) is not None for x in leaves(tree)]


def boxed(batcher: Batcher, tree: Any, flags: Any) -> Any:
    """Returns a tree of values of all examples as values of one, where the flags are true."""
    return replaced(tree, [_one(batcher, x) if f else x for x, f in zip(leaves(tree), leaves(flags), strict=True)])


def _one(batcher: Batcher, x: Any) -> Any:
    """Returns one example of a leaf, for all of them."""
    if type(x) is CustomVJPPrimal:
        return CustomVJPPrimal(_one(batcher, x.value), x.perturbed)
    if type(x) is SymbolicZero:
        sharding = x.sharding
        if sharding is not None:
            sharding = sharding.with_spec(P(*sharding.spec.chains_of(x.ndim)[1:]))
        return SymbolicZero(ArrayType(x.shape[1:], x.dtype, sharding))
    if is_zero(x):
        return None if x is None else np.zeros(x.shape[1:], FLOAT0)
    with batcher.outside():
        return batcher.value(tensor_here(x))
