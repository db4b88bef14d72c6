"""The interpreter that runs operators now. What a call comes to is decided once for each combination of operator,
parameters and
avals, and kept as a plan: see `shardtensor.plans`."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.core import Op, Operands, Params, in_the_name_of, set_default_interpreter
from shardtensor.errors import ArgumentTypeError, ShardTensorError
from shardtensor.mesh import default_mesh
from shardtensor.operands import admit, host_aval
from shardtensor.plans import Kind, Plan, make_plan
from shardtensor.tensor import SCALARS, ShardedTensor

_plans: dict[tuple[Any, ...], Plan] = {}
_PLANS_KEPT = 4096


def apply(op: Op, operands: Operands, params: Params) -> Any:
    """Runs one operator: the default interpreter.

    Raises:
        ShardTensorError: with the operator's name, or that of the function within it that raised.
    """
    try:
        return _apply(op, operands, params)
    except ShardTensorError as error:
        named = in_the_name_of(op, error)
        if named is error:
            raise
        raise named from None


def _apply(op: Op, operands: Operands, params: Params) -> Any:
    if op.composite:
        result = op.composite(*(operands if not op.variadic else (operands,)), *params)
        if result is not NotImplemented:
            return result
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
            return _apply(op, tuple([admit(x, op.name) for x in operands]), params)
    if op.algorithm:
        return op.algorithm(*operands, *params)
    key: tuple[Any, ...] = (op, params, *map(type, params), *kinds)
    if not placed and not (op.creates and params[-1] is not None):  # nobody says where: the default mesh does
        key = (*key, default_mesh())
    try:
        plan = _plans.get(key)
    except TypeError:  # a parameter that cannot be hashed, such as a list of axes
        return _apply(op, operands, tuple(_hashable(op, n, p) for n, p in zip(op.params, params, strict=True)))
    if plan is None:
        plan = _keep(key, make_plan(op, kinds, params))
    return plan(operands)


def _keep(key: tuple[Any, ...], plan: Plan) -> Plan:
    """Files a plan; the oldest ones go when there are too many."""
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


set_default_interpreter(apply)
