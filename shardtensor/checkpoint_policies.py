"""Policies of `st.remat`, with the names of `jax.checkpoint_policies`: which values the first call saves.

A policy is a function of a call of an operator, ``policy(op, *operands, **params)``, that returns True if the result is
saved, False if the second call computes it again, or an `Offloadable` if it is saved in another memory:

* ``op`` is the operator; ``op.name`` is its name, such as ``"matmul"``.
* ``operands`` have a shape and a dtype, and a sharding if they are tensors; Python scalars are given as they are.
* ``params`` are the other arguments.

Compositions of operators, such as `st.einsum`, are seen as the operators that they call.

>>> f = st.remat(lambda x, w: st.tanh(x @ w), policy=st.checkpoint_policies.dots_saveable)
>>> st.grad(lambda w: f(st.ones((2, 3)), w).sum())(st.zeros((3, 1))).tolist()
[[2.0], [2.0], [2.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardtensor.backend.device import MEMORY_KINDS
from shardtensor.core import Op
from shardtensor.errors import ArgumentError, ArgumentTypeError, type_text
from shardtensor.functions.derivatives import derivative_of
from shardtensor.functions.derivatives.of_products import Product, rule_of

__all__ = [
    "Offloadable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_only_these_names",
]

Policy = Callable[..., Any]


class Offloadable(NamedTuple):
    """What a policy returns for a value that is saved in another memory.

    >>> st.checkpoint_policies.Offloadable("device", "pinned_host").dst
    'pinned_host'

    Attributes:
        src: the memory kind in which the value is computed.
        dst: that in which it is saved.
    """

    src: str
    dst: str


def everything_saveable(op: Op, *operands: Any, **params: Any) -> bool:
    """Saves all results.

    >>> st.checkpoint_policies.everything_saveable(st.OPS["tanh"], st.ones(3))
    True
    """
    return True


def nothing_saveable(op: Op, *operands: Any, **params: Any) -> bool:
    """Saves nothing but the arguments of the function, as `st.remat` does without a policy.

    >>> st.checkpoint_policies.nothing_saveable(st.OPS["tanh"], st.ones(3))
    False
    """
    return False


def dots_saveable(op: Op, *operands: Any, **params: Any) -> bool:
    """Saves the results of sums of products, such as `st.matmul`, `st.tensordot` and `st.einsum`.

    >>> st.checkpoint_policies.dots_saveable(st.OPS["matmul"], st.ones((2, 3)), st.ones((3, 2)))
    True
    """
    return isinstance(derivative_of(op), Product)


def dots_with_no_batch_dims_saveable(op: Op, *operands: Any, **params: Any) -> bool:
    """Saves the results of sums of products of which no dimension is one of both factors and of the result.

    >>> x, w, y = st.ones((5, 2, 3)), st.ones((3, 4)), st.ones((5, 3, 4))
    >>> policy = st.checkpoint_policies.dots_with_no_batch_dims_saveable
    >>> policy(st.OPS["matmul"], x, w), policy(st.OPS["matmul"], x, y)
    (True, False)
    """
    if not dots_saveable(op):
        return False
    rule = rule_of(op, params, [tuple(x.shape) for x in operands])
    return not set(rule.result).intersection(*rule.operands)


checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def _named(op: Op, params: dict[str, Any], names: Sequence[str]) -> bool | None:
    """Whether the call gives a value one of the names; None if it gives it none."""
    return params["name"] in names if op.name == "name" else None


def save_only_these_names(*names_which_can_be_saved: str) -> Policy:
    """Returns the policy that saves values with these names (see `st.checkpoint_name`).

    >>> policy = st.checkpoint_policies.save_only_these_names("a", "b")
    >>> policy(st.OPS["name"], st.ones(3), name="a"), policy(st.OPS["tanh"], st.ones(3))
    (True, False)
    """
    return lambda op, *_, **params: bool(_named(op, params, names_which_can_be_saved))


def save_any_names_but_these(*names_not_to_save: str) -> Policy:
    """Returns the policy that saves values with other names than these.

    >>> policy = st.checkpoint_policies.save_any_names_but_these("a")
    >>> policy(st.OPS["name"], st.ones(3), name="a"), policy(st.OPS["name"], st.ones(3), name="b")
    (False, True)
    """
    return lambda op, *_, **params: _named(op, params, names_not_to_save) is False


def save_anything_except_these_names(*names_not_to_save: str) -> Policy:
    """Returns the policy that saves all results except values with these names.

    >>> policy = st.checkpoint_policies.save_anything_except_these_names("a")
    >>> policy(st.OPS["name"], st.ones(3), name="a"), policy(st.OPS["tanh"], st.ones(3))
    (False, True)
    """
    return lambda op, *_, **params: not _named(op, params, names_not_to_save)


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Policy:
    """Returns the policy that saves what one of two policies saves.

    >>> policies = st.checkpoint_policies
    >>> both = policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("a"))
    >>> both(st.OPS["name"], st.ones(3), name="a"), both(st.OPS["tanh"], st.ones(3))
    (True, False)
    """
    return lambda op, *operands, **params: policy_1(op, *operands, **params) or policy_2(op, *operands, **params)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str,
    offload_dst: str,
) -> Policy:
    """Returns the policy that saves values with some names, and offloads those with others.

    >>> policy = st.checkpoint_policies.save_and_offload_only_these_names(
    ...     names_which_can_be_saved=["a"], names_which_can_be_offloaded=["b"],
    ...     offload_src="device", offload_dst="pinned_host")
    >>> policy(st.OPS["name"], st.ones(3), name="b")
    Offloadable(src='device', dst='pinned_host')

    Args:
        names_which_can_be_saved: the names of values that stay in the memory of the devices.
        names_which_can_be_offloaded: the names of values that are offloaded; they are copied back when they are needed.
        offload_src, offload_dst: the memory kinds: ``"device"`` and ``"pinned_host"``.
    """
    saved, offloaded = set(names_which_can_be_saved), set(names_which_can_be_offloaded)
    if saved & offloaded:
        raise ArgumentError(
            f"save_and_offload_only_these_names: {sorted(saved & offloaded)} are in both lists; wanted each name in one"
        )
    there = _offloadable("save_and_offload_only_these_names", offload_src, offload_dst)

    def policy(op: Op, *operands: Any, **params: Any) -> Any:
        return there if _named(op, params, offloaded) else bool(_named(op, params, saved))  # type: ignore[arg-type]

    return policy


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """Returns the policy that offloads what `dots_with_no_batch_dims_saveable` saves.

    >>> policy = st.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    >>> policy(st.OPS["matmul"], st.ones((2, 3)), st.ones((3, 2))).dst
    'pinned_host'
    """
    there = _offloadable("offload_dot_with_no_batch_dims", offload_src, offload_dst)
    return lambda op, *operands, **params: there if dots_with_no_batch_dims_saveable(op, *operands, **params) else False


def _offloadable(caller: str, source: str, destination: str) -> Offloadable:
    for argument, kind in (("offload_src", source), ("offload_dst", destination)):
        if kind not in MEMORY_KINDS:
            what = repr(kind) if isinstance(kind, str) else type_text(kind)
            raise ArgumentTypeError(f"{caller}: {argument} is {what}; wanted one of {MEMORY_KINDS}")
    return Offloadable(source, destination)
