"""Partial sums: their addition, and the layout of results that callers of operators choose (``out_sharding=``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardtensor.communication.transfer import operand_transfer
from shardtensor.core import OPS, Op, Operands, Params, bind, call, execute, implements, operator
from shardtensor.errors import ArgumentTypeError, ShardingError
from shardtensor.sharding.layout import NamedSharding, Where, as_sharding, chosen, with_mesh
from shardtensor.sharding.mesh import Mesh, groups_along
from shardtensor.sharding.rules import reduction
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import HostAval, host_aval, shape_of
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, shard_arrays, tensor, tensor_of, without_elements
from shardtensor.tensor.value import Aval, aval, new_buffers, stacked

_DERIVATIVES = "of_movement"


@operator(reduction, combine="sum", error_name="reshard", dtype=lambda x, **params: x, tags=("internal", "unblocked"))
def add_partials(
    x: ArrayLike, /, *, explicit: bool, axis: int = 0, keepdims: bool = False, layout: Where | None = None
) -> ShardedTensor:
    """Adds partial sums along a mesh axis, in their dtype; see `shardtensor.tensor.partial_sum_storage`.

    Args:
        x: the partial sums, along the first dimension.
        explicit: whether the transfers are explicit ones.
        axis, keepdims: as of other reductions.
        layout: the layout of the result: None for an all-reduce; one that splits a dimension along the axes that split
            the first dimension of x is reached by a reduce-scatter.
    """


@implements(add_partials, "kernel")
def _add_partials(xp: Any, context: ShardContext, x: Any, *, explicit: bool, axis: int, keepdims: bool) -> Any:
    if xp.isdtype(x.dtype, "bool"):  # The sum of bools is the logical or, as in NumPy.
        return xp.any(x, axis=axis, keepdims=keepdims)
    return xp.sum(x, axis=axis, dtype=x.dtype, keepdims=keepdims)


@operator(tags=("any dtype", "internal", "takes partial sums"))
def partial_sums(x: ArrayLike, /) -> ShardedTensor:
    """Returns the partial sums of an unreduced tensor as a tensor of one more dimension, the first; see
    `shardtensor.tensor.partial_sum_storage`.
    """


# -- layouts of results ----------------------------------------------------------------------------


@operator(operands=("operands",), trees=("operands",), tags=("any dtype", "internal"))
def place_result(operands: Operands, /, *, op: Op, params: Params, sharding: Where) -> ShardedTensor:
    """Calls an operator with ``out_sharding=``.

    The operator combines partial results directly into the layout where it can: by an all-reduce, a reduce-scatter or,
    for an unreduced layout, not at all. Otherwise the result is transferred, explicitly.

    Args:
        operands: the operands of the operator.
        op: the operator.
        params: the values of its other parameters.
        sharding: the sharding of the result.

    Raises:
        ShardingError: the sharding has more dimensions than the result, or it is unreduced along an axis along which
            the operator leaves no partial sums.
        ArgumentError: the operator creates an array, and ``device`` is given, too.
    """


@implements(place_result, "composite")
def _place_result(operands: Operands, op: Op, params: Params, sharding: Where) -> Any:
    where = with_mesh(sharding, op.error_name)
    if op.creates:
        at = op.params.index("device")
        return bind(op, operands, (*params[:at], chosen(params[at], where, op.error_name), *params[at + 1 :]))
    result = bind(op.placed, operands, (*params, where)) if op.placed else bind(op, operands, params)
    empty = any(0 in shape_of(x) for x in operands)  # There are no partial sums of nothing, whichever axis splits it.
    return placed(result, where, op.error_name, nothing=empty)


def placed(result: Any, sharding: Where, caller: str, *, nothing: bool = False) -> ShardedTensor:
    """Returns the result of the function ``caller`` in the sharding that its argument ``out_sharding`` gives.

    If it is the result of ``nothing``, or if the unreduced axes have one device each, it becomes unreduced by a
    transfer.

    Raises:
        ShardingError: the result is the array of a device inside of a map, the sharding has more dimensions than the
            result, or it is unreduced otherwise than the result.
    """
    if not isinstance(result, ShardedTensor):
        raise ShardingError(
            f"{caller}: out_sharding is given inside of a map, where arrays are on one device; use a collective, such "
            "as st.psum_scatter"
        )
    target = as_sharding(sharding, result.ndim, caller)
    sums = {axis for axis in target.spec.unreduced if target.mesh.shape[axis] > 1}
    if sums and not nothing and sums != result.sharding.spec.unreduced:
        raise ShardingError(
            f"{caller}: out_sharding is {target.spec}, and the result has the layout {result.sharding.spec}; only sums "
            "of products and sums along a dimension that the axis splits, and linear functions of unreduced tensors, "
            "leave partial sums (st.reshard makes any tensor unreduced)"
        )
    if result.sharding == target and result.committed:
        return result
    return call("transfer_to", result, target, caller)  # type: ignore[no-any-return]


# -- reshards of unreduced tensors, and to unreduced ones -------------------------------------------


def partial_sums_to(
    x: Any, target: NamedSharding, caller: str, committed: bool, place: Callable[..., ShardedTensor]
) -> ShardedTensor:
    """Returns a tensor or a host array in another sharding, where the one that it has or the other one is unreduced.

    Partial sums along the same axes move to the other layout; others are added, by a reduce-scatter where the target
    splits a dimension along their axes, and by an all-reduce otherwise.

    Args:
        x, target, caller, committed: see `transfer_to`.
        place: `unreduced`, or `infer_unreduced` for a tensor without elements.
    """
    value = aval(x.shape, x.dtype, target, committed)
    if value.unreduced and value.dtype.kind not in "biufc":
        raise ArgumentTypeError(f"{caller}: x has dtype {value.dtype}, which cannot be unreduced; wanted numbers")
    sums = x._aval.unreduced if isinstance(x, ShardedTensor) else ()
    if sums and sums == value.unreduced and x.sharding.mesh == target.mesh:
        moved = execute(
            OPS["transfer_to"], (call("partial_sums", x),), (stacked(value).sharding, caller, committed, False, None)
        )
        return tensor(value, PartialSums(moved))
    if sums:
        x = execute(
            OPS["add_partials"], (call("partial_sums", x),), (True, 0, False, None if value.unreduced else target)
        )
    if value.unreduced:
        return tensor(value, PartialSums(place(x, value, caller)))
    return execute(OPS["transfer_to"], (x,), (target, caller, committed, False, None))  # type: ignore[no-any-return]


def first_of(sharding: NamedSharding) -> tuple[NamedSharding, list[int]]:
    """Returns the sharding on the devices that hold the value of a tensor that becomes unreduced, the first ones along
    the unreduced axes, and their positions in the mesh. The others hold zeros.
    """
    mesh, sums = sharding.mesh, sharding.spec.unreduced
    positions = sorted(group[0] for group in groups_along(mesh, tuple(sums)))
    names = [name for name in mesh.axis_names if name not in sums] or mesh.axis_names[:1]
    sizes = [mesh.shape[name] if name not in sums else 1 for name in names]
    devices = np.array([mesh.flat[k] for k in positions], object).reshape(sizes)
    return NamedSharding(Mesh(devices, names), P(*sharding.spec.chains)), positions


def unreduced(x: Any, value: Aval, caller: str) -> ShardedTensor:
    """Returns the partial sums of an unreduced tensor with the elements of a tensor or a host array ``x``, which is
    transferred to the first devices along the unreduced axes: the others hold zeros.

    Args:
        x: the tensor or host array.
        value: the aval of the unreduced tensor.
        caller: the function that the log names.
    """
    target, positions = first_of(value.sharding)
    kind = x._aval if isinstance(x, ShardedTensor) else host_aval(x.shape, x.dtype)
    move = operand_transfer(kind, target)
    arrays = dict(zip(positions, move.shards(x, caller, explicit=True), strict=True))
    return _on_each_device(arrays, value)


def infer_unreduced(x: Any, value: Aval, caller: str) -> ShardedTensor:
    """Returns the partial sums of `unreduced` without elements, and records the transfers if a log is active."""
    kind: Aval | HostAval = x._aval if isinstance(x, ShardedTensor) else host_aval(x.shape, x.dtype)
    move = operand_transfer(kind, first_of(value.sharding)[0])
    move.infer(caller, explicit=True)
    return without_elements(stacked(value))


def held_by_first(x: ShardedTensor) -> ShardedTensor:
    """Returns the partial sums of an unreduced tensor that was written: every device holds the value, so the first ones
    along the unreduced axes keep it, and the others hold zeros. Nothing is transferred.
    """
    value = x._aval
    arrays, positions = shard_arrays(x), first_of(value.sharding)[1]
    return _on_each_device({k: arrays[k] for k in positions}, value)


def _on_each_device(arrays: dict[int, Any], value: Aval) -> ShardedTensor:
    stack_aval, backend = stacked(value), value.backend
    buffers, shards = new_buffers(stack_aval)
    for k, device in enumerate(stack_aval.grid.devices):
        with backend.on(device):
            shards[k][...] = backend.xp.reshape(arrays[k], stack_aval.grid.shape(k)) if k in arrays else 0
    return tensor_of(stack_aval, buffers)
