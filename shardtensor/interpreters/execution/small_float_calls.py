"""Operators on bfloat16 and the float8 kinds: computed in float32, and cast back where the result has such a dtype.

No array library has all operators in these dtypes, and those that they have add up in too few bits. float32 represents
every value of them, so that operators that only move or compare elements are exact, and computed results are
rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend
from shardtensor.backend.small_floats import is_small_float, promoted
from shardtensor.core import OPS, Op, Operands, Params
from shardtensor.interpreters.execution.plan import Kind, Plan
from shardtensor.interpreters.execution.planning import make_plan
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import HostAval, as_operand, host_aval, sharded_dtype
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import Aval

_WIDE = np.dtype(np.float32)


def small_float_plan(op: Op, kinds: Sequence[Kind], params: Params) -> Plan | None:
    """Returns the plan of an operator on such operands, or with such a ``dtype``; None for one that needs no cast."""
    dtype, wide_params = _result(op, kinds, params)
    if wide_params is None:
        return None
    if dtype is not None and _is_large_product(op, kinds, dtype):
        return _product_plan(op, kinds, dtype)
    # The prototype of an operator that creates arrays is not read.
    casts = [_cast(k, _WIDE) if _is_small(k) and "prototype" not in op.tags else None for k in kinds]
    wide: list[Kind] = [
        k if cast is None else host_aval(k.shape, _WIDE) if isinstance(k, HostAval) else cast.result
        for k, cast in zip(kinds, casts, strict=True)
    ]
    plan = make_plan(op, wide, wide_params)
    result = plan.result
    return SmallFloatPlan(
        op, casts, plan, _cast(result, dtype) if dtype is not None and result.dtype.kind == "f" else None
    )


_LARGE = 1 << 20
"""The bytes of the operands of a product from which on it is computed by the backend's function for bfloat16."""


def _is_large_product(op: Op, kinds: Sequence[Kind], dtype: np.dtype[Any]) -> bool:
    """Whether an operator is a product of matrices of bfloat16 that `_product_plan` computes."""
    if op.name != "matmul" or op.params or dtype.name != "bfloat16":
        return False
    tensors = [k for k in kinds if isinstance(k, Aval) and k.dtype == dtype and k.ndim > 1]
    return (
        len(tensors) == len(kinds)
        and len({k.backend for k in tensors}) == 1
        and tensors[0].backend.multiplies_bfloat16
        and sum([k.nbytes for k in tensors]) >= _LARGE
    )


def _product_plan(op: Op, kinds: Sequence[Kind], dtype: np.dtype[Any]) -> Plan:
    """Returns the plan of a product that reads bfloat16. Where partial results are added, they are float32."""
    plan = make_plan(_product_of(op, dtype), kinds, ())
    if plan.strategy in ("whole", "per shard"):
        return plan
    plan = make_plan(_product_of(op, _WIDE), kinds, ())
    return SmallFloatPlan(op, [None] * len(kinds), plan, _cast(plan.result, dtype))


@functools.cache
def _product_of(op: Op, dtype: np.dtype[Any]) -> Op:
    """Returns `matmul` by the function of the operands' backend, with results of a dtype."""
    kernel = functools.partial(_product, dtype)
    parts = op.parts.changed(composite=None, small=None, kernel=kernel)
    return op.changed(signature=op.signature.changed(placeable=False), dtype=dtype, parts=parts)


def _product(dtype: np.dtype[Any], xp: Any, context: ShardContext, x1: Any, x2: Any) -> Any:
    backend = array_backend(x1)
    assert backend is not None
    return backend.product_of_bfloat16(x1, x2, dtype)


class SmallFloatPlan(Plan):
    """The plan of an operator in float32: the plans that cast the operands, that of the operator, and the one that
    casts its result.

    Args:
        op: the operator.
        casts: for each operand the plan of its cast, or None.
        plan: the plan of the operator.
        back: the plan of the cast of the result, or None.
    """

    __slots__ = ("_back", "_casts", "_plan")

    def __init__(self, op: Op, casts: Sequence[Plan | None], plan: Plan, back: Plan | None) -> None:
        self._casts, self._plan, self._back = casts, plan, back
        execution = (plan.strategy, lambda operands: self._with("run", operands))
        result = back.result if back else plan.result
        super().__init__(op, result, plan.partial_axes, plan.transfers, plan.schedules, lambda: execution)

    def infer(self, operands: Operands) -> ShardedTensor:
        """See `Plan`."""
        return self._with("infer", operands)

    def _with(self, method: str, operands: Operands) -> ShardedTensor:
        """Returns the result of the plans by their method ``run`` or ``infer``."""
        values = [
            x if cast is None else getattr(cast, method)((x,)) if type(x) is ShardedTensor else x.astype(_WIDE)
            for x, cast in zip(operands, self._casts, strict=True)
        ]
        result = getattr(self._plan, method)(tuple(values))
        return getattr(self._back, method)((result,)) if self._back else result  # type: ignore[no-any-return]


def has_small_floats(op: Op, operands: Operands, params: Params) -> bool:
    """Whether an operator that is composed of others, or has an algorithm, is computed in float32."""
    return not _is_native(op, operands) and (
        any(_is_small(x) for x in operands) or ("dtype" in op.params and _is_named(params[op.params.index("dtype")]))
    )


def in_wide(apply: Callable[[Op, Operands, Params], Any], op: Op, operands: Operands, params: Params) -> Any:
    """Returns the result of an operator that is composed of others, or has an algorithm, computed in float32.

    Args:
        apply: executes or infers one operator.
        op, operands, params: the call.
    """
    values = [as_operand(x, op.error_name) if hasattr(x, "dtype") else x for x in operands]
    dtype, wide_params = _result(op, [_kind(x) for x in values], params)

    def to(x: Any, target: np.dtype[Any]) -> Any:
        return apply(OPS["astype"], (x,), (target, True, None))

    wide = tuple(
        [x if not _is_small(x) else x.astype(_WIDE) if isinstance(x, np.ndarray) else to(x, _WIDE) for x in values]
    )
    result = apply(op, wide, params if wide_params is None else wide_params)

    def back(x: Any) -> Any:
        return to(x, dtype) if dtype is not None and type(x) is ShardedTensor and x.dtype.kind == "f" else x

    return map_leaves(back, result)


def _is_native(op: Op, operands: Sequence[Any]) -> bool:
    """Whether an operator takes elements of any dtype, unless it would have to promote them."""
    moves = op.parts.movement is not None and len({str(_dtype_of(x)) for x in operands}) == 1
    return "spmd" in op.tags or "any dtype" in op.tags or moves


def _dtype_of(x: Any) -> Any:
    return getattr(x, "dtype", None)


def _kind(x: Any) -> Any:
    if type(x) is ShardedTensor:
        return x._aval
    return host_aval(x.shape, x.dtype) if isinstance(x, np.ndarray) else type(x)


def _is_small(x: Any) -> bool:
    return is_small_float(_dtype_of(x))


def _is_named(dtype: Any) -> bool:
    """Whether an argument ``dtype=`` is one of these dtypes."""
    return dtype is not None and is_small_float(sharded_dtype(dtype))


def _cast(kind: Any, dtype: np.dtype[Any]) -> Plan:
    return make_plan(OPS["astype"], [kind], (dtype, True, None))


def _result(op: Op, kinds: Sequence[Any], params: Params) -> tuple[np.dtype[Any] | None, Params | None]:
    """Returns the dtype to which a floating-point result is cast, or None; and the parameters of the operator in
    float32, or None for an operator that needs no cast.
    """
    small = {k.dtype for k in kinds if _is_small(k)}
    at = op.params.index("dtype") if "dtype" in op.params else -1
    named = params[at] if at >= 0 else None
    if _is_native(op, kinds):
        return None, None
    if "prototype" in op.tags and named is None and small:
        (named,) = small
    if named is not None:
        dtype = sharded_dtype(named)
        if not is_small_float(dtype):
            return None, params if small else None
        return dtype, (*params[:at], _WIDE, *params[at + 1 :])
    if not small:
        return None, None
    return promoted([getattr(k, "dtype", k) for k in kinds if k is not None], op.error_name), params
