"""Linear operators on unreduced tensors: they compute with the partial sums, and the result is unreduced, too.

Each of them is a plan of an operator on the tensors of the partial sums (see `shardtensor.tensor.partial_sum_storage`),
with its dimensions shifted by one, so that the partial sums keep their layout and nothing is added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.core import OPS, Op, Operands, Params, execute
from shardtensor.interpreters.execution.plan import Kind, Plan
from shardtensor.interpreters.execution.planning import make_plan
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.rules import normalize_axis, reduced_axes
from shardtensor.sharding.spec import P
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.tensor import ShardedTensor, tensor
from shardtensor.tensor.value import Aval, aval, reduced, stacked


class Call(NamedTuple):
    """The operator on the partial sums that a linear operator stands for.

    Attributes:
        params: the values of its parameters.
        shapes: for each operand that is unreduced, the shape to which its partial sums are reshaped; None for others.
        first: the dimension of the result along which the partial sums are.
        name: the name of the operator; empty for the linear operator itself.
    """

    params: Params
    shapes: Sequence[Shape | None]
    first: int = 0
    name: str = ""


Rule = Callable[[Sequence[Any], dict[str, Any]], Call | None]
"""``rule(kinds, params)`` returns the call for operands of these kinds, of which some are unreduced; None if the
operator is not linear in these operands.
"""


def linear_plan(op: Op, kinds: Sequence[Kind], params: Params) -> Plan | None:
    """Returns the plan of an operator that is linear in its unreduced operands; None if it is not.

    The operator is linear only if its result has the dtype of the partial sums, or is inexact: sums of integers could
    overflow in the smaller dtype.
    """
    rule = _RULES.get(op.name)
    named = dict(zip(op.params, params, strict=True))
    layout = named.pop("layout", None)
    if rule is None or (layout is not None and not getattr(layout, "spec", P()).unreduced):
        return None
    tensors = [k for k in kinds if isinstance(k, Aval)]
    sums = [k for k in tensors if k.unreduced]
    mesh, axes = sums[0].sharding.mesh, sums[0].unreduced
    alike = all(k.sharding.mesh == mesh for k in tensors) and all(k.unreduced == axes for k in sums)
    if not alike or any(set(axes).intersection(c) for k in tensors for c in k.sharding.spec.chains):
        return None
    found = rule(kinds, named)
    if found is None:
        return None
    reshapes = [
        make_plan(OPS["reshape"], [stacked(k)], (shape, None))
        if isinstance(k, Aval) and shape is not None and shape != stacked(k).shape
        else None
        for k, shape in zip(kinds, found.shapes, strict=True)
    ]
    inner_kinds: list[Kind] = [
        plan.result if plan else stacked(k) if isinstance(k, Aval) and shape is not None else k
        for k, shape, plan in zip(kinds, found.shapes, reshapes, strict=True)
    ]
    steps = [make_plan(OPS[found.name or op.name], inner_kinds, found.params)]
    if first := found.first:
        order = (first, *range(first), *range(first + 1, steps[0].result.ndim))
        steps.append(make_plan(OPS["permute_dims"], [steps[0].result], (order,)))
    made = steps[-1].result
    chains = made.sharding.spec.chains_of(made.ndim)
    if chains[0] != axes or made.sharding.mesh != mesh:
        return None
    if made.dtype.kind not in "fc" and any(k.dtype != made.dtype for k in sums):
        return None
    result = aval(made.shape[1:], made.dtype, made.sharding.with_spec(P(*chains[1:], unreduced=axes)), made.committed)
    return LinearPlan(op, [shape is not None for shape in found.shapes], reshapes, steps, result)


class LinearPlan(Plan):
    """The plan of a linear operator on unreduced tensors: those of operators on their partial sums.

    Args:
        op: the operator.
        sums: for each operand whether it is unreduced.
        reshapes: for each of these, the plan that reshapes its partial sums, or None.
        steps: the plan of the operator on the partial sums, and one that permutes the dimensions of its result, if the
            partial sums are not along the first one.
        result: the aval of the result, which is unreduced.
    """

    __slots__ = ("_reshapes", "_steps", "_sums")

    def __init__(
        self, op: Op, sums: Sequence[bool], reshapes: Sequence[Plan | None], steps: Sequence[Plan], result: Aval
    ) -> None:
        self._sums = sums
        self._reshapes = reshapes
        self._steps = steps
        first = steps[0]
        execution = (first.strategy, lambda operands: self._with("run", operands))
        super().__init__(op, result, (), first.transfers, first.schedules, lambda: execution)

    def infer(self, operands: Operands) -> ShardedTensor:
        """See `Plan`."""
        return self._with("infer", operands)

    def _with(self, method: str, operands: Operands) -> ShardedTensor:
        """Returns the result of the plans by their method ``run`` or ``infer``."""
        taken = []
        for x, unreduced, reshaped in zip(operands, self._sums, self._reshapes, strict=True):
            part = execute(OPS["partial_sums"], (x,), ()) if unreduced else x
            taken.append(getattr(reshaped, method)((part,)) if reshaped else part)
        made = getattr(self._steps[0], method)(tuple(taken))
        for step in self._steps[1:]:
            made = getattr(step, method)((made,))
        return tensor(self.result, PartialSums(made))


# -- the linear operators --------------------------------------------------------------------------


def _sums(kinds: Sequence[Any]) -> list[bool]:
    return [isinstance(k, Aval) and bool(k.unreduced) for k in kinds]


def _wide(kind: Any, ndim: int) -> Shape:
    """Returns the shape of partial sums with dimensions of size 1 inserted after the first one, so that they broadcast
    like operands of ``ndim`` dimensions.
    """
    made = stacked(kind).shape
    return (made[0], *[1] * (ndim - kind.ndim), *made[1:])


def _alone(kinds: Sequence[Any], params: dict[str, Any]) -> Call:
    return Call(tuple(params.values()), [stacked(kinds[0]).shape])


def _both(kinds: Sequence[Any], params: dict[str, Any]) -> Call | None:
    if not all(_sums(kinds)):
        return None
    ndim = max(k.ndim for k in kinds)
    return Call((), [_wide(k, ndim) for k in kinds])


def _one_of(kinds: Sequence[Any], params: dict[str, Any]) -> Call | None:
    sums = _sums(kinds)
    return None if all(sums) else _wide_call(kinds, ())


def _wide_call(kinds: Sequence[Any], params: Params) -> Call:
    """Returns the call in which the partial sums broadcast with operands that are not unreduced."""
    ndim = max(getattr(k, "ndim", 0) for k in kinds)
    sums = zip(kinds, _sums(kinds), strict=True)
    return Call(params, [_wide(k, ndim) if unreduced else None for k, unreduced in sums])


def _numerator(kinds: Sequence[Any], params: dict[str, Any]) -> Call | None:
    return _one_of(kinds, params) if _sums(kinds) == [True, False] else None


def _in_shape(kinds: Sequence[Any], params: dict[str, Any]) -> Call:
    shape = make_plan(OPS["reshape"], [reduced(kinds[0])], tuple(params.values())).result.shape
    partials = stacked(kinds[0]).shape
    return Call(((partials[0], *shape), params["copy"]), [partials])


def _wider(kinds: Sequence[Any], params: dict[str, Any]) -> Call | None:
    """Casts the partial sums to a dtype that represents them exactly."""
    dtype = np.dtype(params["dtype"])
    if params["device"] is not None or kinds[0].dtype.kind not in "fc" or not np.can_cast(kinds[0].dtype, dtype):
        return None
    return Call(tuple(params.values()), [stacked(kinds[0]).shape])


def _broadcast(kinds: Sequence[Any], params: dict[str, Any]) -> Call:
    shape = make_plan(OPS["broadcast_to"], [reduced(kinds[0])], tuple(params.values())).result.shape
    partials = _wide(kinds[0], len(shape))
    return Call(((partials[0], *shape),), [partials])


def _chosen(kinds: Sequence[Any], params: dict[str, Any]) -> Call | None:
    return _wide_call(kinds, ()) if _sums(kinds) == [False, True, True] else None


def _vectors(kinds: Sequence[Any], params: dict[str, Any]) -> Call | None:
    axis, ndims = params["axis"], {k.ndim for k in kinds}
    if all(_sums(kinds)) or (axis >= 0 and len(ndims) > 1):
        return None
    return _wide_call(kinds, (axis if axis < 0 else axis - max(ndims),))


def _joined(kinds: Sequence[Any], params: dict[str, Any], new: int = 0) -> Call | None:
    if not all(_sums(kinds)):
        return None
    axis = normalize_axis(params["axis"], kinds[0].ndim + new)
    return Call((axis + 1,), [stacked(k).shape for k in kinds])


def _over_axes(kinds: Sequence[Any], params: dict[str, Any]) -> Call | None:
    axes = tuple([axis + 1 for axis in reduced_axes(params["axis"], kinds[0].ndim)])
    return Call(tuple((params | {"axis": axes}).values()), [stacked(kinds[0]).shape]) if axes else None


def _matrices(kinds: Sequence[Any], params: dict[str, Any]) -> Call | None:
    ndims = [k.ndim for k in kinds]
    if max(ndims) <= 2:
        return _contraction(kinds, params, "matmul")
    return None if 1 in ndims else _one_of(kinds, params)  # A vector has no dimension for the partial sums.


def _contraction(kinds: Sequence[Any], params: dict[str, Any], name: str) -> Call | None:
    """Names the partial sums in the rule of a product, before the other dimensions that only their operand has."""
    sums = _sums(kinds)
    if all(sums):
        return None
    from shardtensor.functions.numpy.products import contract  # noqa: F401 - declares the operator

    rule = OPS[name].rule([k.shape for k in kinds], **params)
    left, _, right = rule.partition("->")
    terms = [term.replace("...", "").split() for term in left.split(",")]  # Two matrices have no other dimensions.
    names = right.replace("...", "").split()
    mine = sums.index(True)
    first = len([n for n in names if n in terms[0] and (mine or n in terms[1])])
    terms[mine].insert(0, "partials")
    names.insert(first, "partials")
    shapes = [stacked(k).shape if unreduced else None for k, unreduced in zip(kinds, sums, strict=True)]
    return Call((f"{' '.join(terms[0])}, {' '.join(terms[1])} -> {' '.join(names)}",), shapes, first, "contract")


_RULES: dict[str, Rule] = {
    "negative": _alone,
    "positive": _alone,
    "conj": _alone,
    "add": _both,
    "subtract": _both,
    "multiply": _one_of,
    "divide": _numerator,
    "sum": _over_axes,
    "mean": _over_axes,
    "reshape": _in_shape,
    "matmul": _matrices,
    "tensordot": functools.partial(_contraction, name="tensordot"),
    "contract": functools.partial(_contraction, name="contract"),
    "vecdot": _vectors,
    "astype": _wider,
    "broadcast_to": _broadcast,
    "where": _chosen,
    "concat": _joined,
    "stack": functools.partial(_joined, new=1),
}
"""The linear operators. Views of unreduced tensors are unreduced, too: see `infer_view`."""
