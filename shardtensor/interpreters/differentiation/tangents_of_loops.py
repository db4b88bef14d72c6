"""Loops and branches in forward mode: the function of a trip is called once, for values and tangents together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.core import Op, Operands, Params, bind_by, call
from shardtensor.functions.derivatives.cotangents import is_inexact, zeros_of
from shardtensor.interpreters.differentiation.inner import root_of
from shardtensor.tensor.operands import dtype_of
from shardtensor.tensor.pytree import leaves, replaced
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import SCALARS, ShardedTensor
from shardtensor.tensor.value import summed

Forward = Any
"""A `shardtensor.interpreters.differentiation.tangents.Forward`, of which the module imports this one."""

Pair = tuple[Any, list[Any]]
"""A tree, and the tangents of its leaves; None for those that have none."""


def with_tangents(forward: Forward, op: Op, operands: Operands, params: Params) -> Any:
    """Executes a loop or a branch on values and tangents, and returns its results as those of forward mode."""
    named = dict(zip(op.params, params, strict=True))
    if op.name == "branch":
        named["branches"] = tuple([_on_pairs(forward, one) for one in named["branches"]])
        args: Operands = forward.constants(operands[0]), [_pair(forward, x) for x in operands[1]]
    elif op.name == "conditional_loop":
        named["cond"] = _on_pairs(forward, named["cond"], has_tangents=False)
        named["body"] = _on_pairs(forward, named["body"])
        args = (_pair(forward, operands[0], with_zeros=True),)
    else:
        named["body"] = _of_trip(forward, named["body"])
        init, xs, bounds = operands
        args = _pair(forward, init, with_zeros=True), _pair(forward, xs), forward.constants(bounds)
    results = bind_by(forward.outer, op, args, tuple(named.values()))
    return tuple([_joined(forward, x) for x in results]) if op.name == "counted_loop" else _joined(forward, results)


def _on_pairs(forward: Forward, function: Callable[..., Any], *, has_tangents: bool = True) -> Callable[..., Any]:
    """Returns a function of pairs, which returns a pair, or only values."""
    root = root_of(forward)

    def called(*pairs: Pair) -> Any:
        with forward.within(root):
            result = function(*[_joined(forward, pair) for pair in pairs])
            return _pair(forward, result, with_zeros=True) if has_tangents else forward.constants(result)

    return called


def _of_trip(forward: Forward, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a counted loop as one of pairs."""
    root = root_of(forward)

    def called(i: Any, carry: Pair, x: Pair) -> tuple[Pair, Pair]:
        with forward.within(root):
            after, y = function(i, _joined(forward, carry), _joined(forward, x))
            return _pair(forward, after, with_zeros=True), _pair(forward, y, with_zeros=True)

    return called


def _joined(forward: Forward, pair: Pair) -> Any:
    """Returns the values as those of forward mode."""
    tree, tangents = pair
    return replaced(tree, [forward.dual(x, _tensor(t, x)) for x, t in zip(leaves(tree), tangents, strict=True)])


def _tensor(t: Any, x: Any) -> Any:
    """Returns the tangent of a value as a tensor; None for that of an integer."""
    if t is None or not is_inexact(dtype_of(x)):
        return None
    return call("asarray", t) if type(t) in SCALARS else t


def _pair(forward: Forward, tree: Any, *, with_zeros: bool = False) -> Pair:
    """Returns values and tangents as the interpreter around forward mode takes them.

    Args:
        forward: the interpreter.
        tree: the values.
        with_zeros: whether each number that may have a tangent gets one, since those of a carry have it after a trip,
            and those of other branches. An integer may become such a number in the first trip.
    """
    values, tangents = [], []
    with forward.outside():
        for x in leaves(tree):
            t, value = forward.tangent(x), forward.constant(x)
            if with_zeros and isinstance(value, (np.ndarray, np.generic)):
                value = call("asarray", value)
            if type(value) in SCALARS:
                t = _weak(value, t, with_zeros)
            elif t is None and with_zeros and type(value) is ShardedTensor:
                t = _zeros(value) if is_inexact(value.dtype) else None if value.ndim else 0.0
            values.append(value)
            tangents.append(t)
    return replaced(tree, values), tangents


def _weak(value: Any, t: Any, with_zeros: bool) -> Any:
    """Returns the tangent of a Python number: a number, too, where it is known, which determines no dtype."""
    if t is None:
        return (type(value)(0) if is_inexact(dtype_of(value)) else 0.0) if with_zeros else None
    if type(t) is ShardedTensor and type(t._storage) is Storage:
        return t.item()
    return t


def _zeros(x: ShardedTensor) -> Any:
    zeros = zeros_of(x._aval)
    return zeros if x.committed else call("transfer_to", zeros, summed(x._aval).sharding, "jvp", committed=False)
