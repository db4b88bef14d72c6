"""The values of a batcher: the storages of tensors that differ from one example of a batch to another."""

from __future__ import annotations

from typing import Any, NoReturn

from shardtensor.core import call
from shardtensor.errors import ConcretizationError
from shardtensor.sharding.index import Index
from shardtensor.sharding.view_spec import ViewSpec, part_steps
from shardtensor.tensor.storage import NoElements
from shardtensor.tensor.tensor import ShardedTensor

LEAVES = (
    "and a function that vmap calls once for all examples depends on them; use st.where or st.cond for conditions, or "
    "call the function for each example: st.stack([f(row) for row in x]), or st.smap for the parts of split arrays"
)
LEFT = (
    "a tensor left a function that vmap has called, by a global variable, a container or an object, and is used after "
    "that; return it from the function"
)


class Batched(NoElements):
    """The storage of a value that differs from one example to another.

    Attributes:
        batcher: the batcher.
        primal: the values of all examples as the interpreter around the batcher has them: a tensor with one more
            dimension, the first one.
        differs: True, by which an index knows that it cannot read a scalar.
    """

    differs = True

    __slots__ = ("batcher", "primal")

    def __init__(self, batcher: Any, primal: ShardedTensor) -> None:
        self.batcher = batcher
        self.primal = primal

    def stored(self) -> NoReturn:
        """Raises ConcretizationError: elements are read through operators, which the batcher sees."""
        raise ConcretizationError(LEFT if self.batcher.ended else f"the elements of one example are read, {LEAVES}")

    def is_lacking(self) -> bool:
        """Whether the elements are unknown: one example has none.

        Raises:
            ConcretizationError: the tensor has left the function.
        """
        if self.batcher.ended:
            raise ConcretizationError(LEFT)
        return True

    def settle(self) -> None:
        """Waits until the elements are computed."""
        self.primal.block_until_ready()


def viewed(x: ShardedTensor, view_spec: ViewSpec) -> Any:
    """Returns the view of all examples, given the view spec of one: the same boxes behind the first dimension."""
    n = x.shape[0]
    for number, box in enumerate(view_spec.boxes):
        if number:
            x = call("reshape", x, (n, *box.over))
        if box.is_whole:
            continue
        if box.in_order:
            x = call("getitem", x, Index(((0, n, 1), *box.index)))
            continue
        x = call("getitem", x, Index(((0, n, 1), *box.entries)))
        x = call("permute_dims", x, (0, *[axis + 1 for axis in box.axes]))
        if None in box.order:
            x = call("getitem", x, Index(((0, n, 1), *box.new)))
    for step in part_steps(view_spec.part):
        x = call(step, x) if isinstance(step, str) else call("bitcast", x, step)
    return x
