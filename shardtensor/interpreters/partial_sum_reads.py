"""The partial sums of unreduced tensors and of views of them, and the plan that adds them."""

from __future__ import annotations

from shardtensor.core import OPS, execute, implements
from shardtensor.functions.placement import partial_sum_operators as declared
from shardtensor.interpreters.execution.plan_cache import run, value_of
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Where
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.tensor import ShardedTensor
from shardtensor.tensor.value import stacked


@implements(declared.add_partials, "algorithm", "infer")
def add_partials(x: ShardedTensor, explicit: bool, axis: int, keepdims: bool, layout: Where | None) -> ShardedTensor:
    """Adds partial sums."""
    result: ShardedTensor = run(OPS["add_partials"], (x,), (explicit, axis, keepdims, layout))
    return result


@implements(declared.partial_sums, "algorithm", "infer")
def partial_sums(x: ShardedTensor) -> ShardedTensor:
    """Returns the partial sums of an unreduced tensor, which may be a view of another one."""
    if type(x._storage) is PartialSums:
        return x._storage.partials  # type: ignore[no-any-return]
    base, view_spec = x._base_and_view()
    if base is x:
        return declared.held_by_first(x)
    partials, target = _viewed(partial_sums(base), view_spec), stacked(x._aval).sharding
    if partials.sharding == target:
        return partials
    return execute(OPS["transfer_to"], (partials,), (target, "reshard", partials.committed, False, None))  # type: ignore[no-any-return]


def _viewed(x: ShardedTensor, view_spec: ViewSpec) -> ShardedTensor:
    """Returns the elements of the partial sums that the view of an unreduced tensor selects."""
    n = x.shape[0]
    for number, box in enumerate(view_spec.boxes):
        if number:
            x = value_of("reshape", x, (n, *box.over), None)
        if box.is_whole:
            continue
        if box.in_order:
            x = value_of("getitem", x, Index(((0, n, 1), *box.index)))
            continue
        x = value_of("getitem", x, Index(((0, n, 1), *box.entries)))
        x = value_of("permute_dims", x, (0, *[axis + 1 for axis in box.axes]))
        if None in box.order:
            x = value_of("getitem", x, Index(((0, n, 1), *box.new)))
    return value_of(str(view_spec.part), x) if view_spec.part else x
