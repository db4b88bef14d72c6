"""Runs operators by cached plans, one plan for each combination of operator, parameters and avals.

See `shardtensor.interpreters.execution.planning` for the plans.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.core import OPS, Op, Operands, Params
from shardtensor.errors import ArgumentTypeError
from shardtensor.interpreters.execution.planning import Kind, make_plan
from shardtensor.interpreters.execution.strategies import Plan
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.operands import as_operand, host_aval
from shardtensor.tensor.tensor import SCALARS, ShardedTensor

_plans: dict[tuple[Any, ...], Plan] = {}
_PLANS_KEPT = 4096


def run(op: Op, operands: Operands, params: Params) -> Any:
    """Runs an operator that is not composite and returns its result, an independent value and never a view.

    Args:
        op: the operator.
        operands: tensors, host arrays, scalars, nested lists, or None for an optional operand.
        params: the values of its other parameters, in the order of ``op.params``.

    Raises:
        ShardTensorError: the operator does not accept the operands or parameters.
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
            return run(op, tuple([as_operand(x, op.name) for x in operands]), params)
    if op.algorithm:
        return op.algorithm(*operands, *params)
    key: tuple[Any, ...] = (op, params, *map(type, params), *kinds)
    if not placed and not (op.creates and params[-1] is not None):
        # The result's layout is that of the default mesh, which can change between calls.
        key = (*key, default_mesh())
    try:
        plan = _plans.get(key)
    except TypeError:  # A parameter is not hashable, such as a list of axes.
        return run(op, operands, tuple(_hashable(op, n, p) for n, p in zip(op.params, params, strict=True)))
    if plan is None:
        plan = _keep(key, make_plan(op, kinds, params))
    return plan(operands)


def value_of(name: str, x: ShardedTensor, *params: Any) -> ShardedTensor:
    """Runs the operator called ``name`` on a tensor and returns the result, never a view."""
    return run(OPS[name], (x,), params)  # type: ignore[no-any-return]


def _keep(key: tuple[Any, ...], plan: Plan) -> Plan:
    """Caches a plan and returns it; the oldest plans are removed beyond ``_PLANS_KEPT``."""
    while len(_plans) >= _PLANS_KEPT:
        _plans.pop(next(iter(_plans)), None)
    _plans[key] = plan
    return plan


def _hashable(op: Op, name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(op, name, v) for v in value)
    if isinstance(value, (np.ndarray, ShardedTensor)) and value.ndim == 0:
        return value.item()
    try:
        hash(value)
    except TypeError:
        raise ArgumentTypeError(f"{op.name}: {name} is a {type(value).__name__}, which it does not take") from None
    return value
