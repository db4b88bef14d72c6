"""Runs operators by cached plans, one plan for each combination of operator, parameters and avals.

See `shardtensor.interpreters.execution.planning` for the plans.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import OPS, Op, Operands, Params
from shardtensor.errors import ArgumentTypeError, ShardTensorError, type_text
from shardtensor.hints import of_call
from shardtensor.interpreters.execution.plan import Kind, Plan
from shardtensor.interpreters.execution.planning import make_plan
from shardtensor.sharding.layout import with_mesh
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.sharding.spec import PartitionSpec
from shardtensor.tensor.operands import as_operand, host_aval
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements
from shardtensor.tensor.value import Aval, summed


def run(op: Op, operands: Operands, params: Params) -> Any:
    """Runs an operator that has a plan and returns its result, an independent value and never a view; a tensor without
    elements if an operand is one.

    Args:
        op: the operator.
        operands: tensors, host arrays, scalars, or None for an optional operand.
        params: the values of its other parameters, in the order of ``op.params``.

    Raises:
        ShardTensorError: the operator does not accept the operands or parameters.
    """
    plan, operands = planned(op, operands, params)
    return (plan.infer if any(map(lacks_elements, operands)) else plan.run)(operands)


def planned(op: Op, operands: Operands, params: Params) -> tuple[Plan, Operands]:
    """Returns the plan of an operator that has no algorithm of its own, and the operands in the form that plans take.

    No element of a tensor is read.
    """
    kinds: list[Kind] = []
    placed = False
    for x in operands:
        kind = type(x)
        if kind is ShardedTensor:
            kinds.append(x._aval)
            placed = True
        elif kind in SCALARS:
            kinds.append(kind)
        elif kind is np.ndarray:
            kinds.append(host_aval(x.shape, x.dtype))
        elif x is None:
            kinds.append(None)
        else:
            return planned(op, tuple([as_operand(x, op.error_name) for x in operands]), params)
    if op.params[-1:] == ("layout",):
        params = (*params[:-1], with_mesh(params[-1], op.error_name))
    if op.creates:  # Only a prototype and ``device=`` give the layout; a fill value that is a tensor does not.
        if type(params[-1]) is PartitionSpec:  # The mesh in use, to which a bare spec refers, can change between calls.
            params = (*params[:-1], with_mesh(params[-1], op.name))
        placed = params[-1] is not None or ("prototype" in op.tags and type(operands[0]) is ShardedTensor)
        if any(isinstance(p, (float, np.floating)) and p == 0 and np.signbit(p) for p in params):
            return _plan(op, kinds, params), operands  # -0.0 equals 0.0, whose plan would be taken.
    # Otherwise the result's layout is that of the default mesh, which can change between calls.
    mesh = None if placed else default_mesh()
    try:
        return _cached_plan(op, mesh, *params, *kinds), operands
    except ShardTensorError:
        raise
    except TypeError:
        if _is_hashable(params):
            raise
        return planned(op, operands, tuple([_hashable(op, n, p) for n, p in zip(op.params, params, strict=True)]))


@functools.lru_cache(4096, typed=True)  # Parameters that are equal, such as 1 and True, may differ in type.
def _cached_plan(op: Op, mesh: Mesh | None, *params_and_kinds: Any) -> Plan:
    """Returns the plan of an operator; plans that have not been used for a long time are dropped. ``mesh`` is the
    default mesh if the plan depends on it, otherwise None.
    """
    count = len(op.params)
    params, kinds = params_and_kinds[:count], params_and_kinds[count:]
    if any(isinstance(k, Aval) and k.unreduced for k in kinds):
        from shardtensor.interpreters.execution.linear import linear_plan  # Few programs have unreduced tensors.

        return linear_plan(op, kinds, params) or _plan(op, [_of_sum(k) for k in kinds], params)
    return _plan(op, kinds, params)


def _plan(op: Op, kinds: Sequence[Kind], params: Params) -> Plan:
    if "ml_dtypes" in sys.modules:
        from shardtensor.interpreters.execution.small_float_calls import small_float_plan  # Few programs import it.

        return small_float_plan(op, kinds, params) or make_plan(op, kinds, params)
    return make_plan(op, kinds, params)


def plan_for(op: Op, kinds: Sequence[Kind], params: Params) -> Plan:
    """Returns the plan of an operator for operands of these kinds, of which one is that of a tensor."""
    try:
        return _cached_plan(op, None, *params, *kinds)
    except ShardTensorError:
        raise
    except TypeError:
        if _is_hashable(params):
            raise
        hashable = [_hashable(op, n, p) for n, p in zip(op.params, params, strict=True)]
        return _cached_plan(op, None, *hashable, *kinds)


def _of_sum(kind: Kind) -> Kind:
    """Returns the kind of an unreduced operand once its partial sums are added, which reading its storage does."""
    return summed(kind) if isinstance(kind, Aval) and kind.unreduced else kind


def value_of(name: str, x: ShardedTensor, *params: Any) -> ShardedTensor:
    """Runs the operator called ``name`` on a tensor and returns the result, never a view."""
    return run(OPS[name], (x,), params)  # type: ignore[no-any-return]


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _hashable(op: Op, name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple([v if type(v) is int else _hashable(op, name, v) for v in value])
    if isinstance(value, (np.ndarray, ShardedTensor)) and value.ndim == 0:
        return value.item()
    if not _is_hashable(value):
        raise ArgumentTypeError(
            f"{op.error_name}: {name} is {type_text(value)}; wanted a Python value, such as a number"
            f"{of_call(op.error_name)}"
        )
    return value
