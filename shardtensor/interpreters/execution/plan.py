"""Plans: how an operator runs on operands of known kinds, as data that can be compared and printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST
from shardtensor.backend.functions import function_of
from shardtensor.backend.registry import backend_of
from shardtensor.communication.schedules import Schedule
from shardtensor.communication.transfer import OperandTransfer, announce_reading
from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import Op, Operands
from shardtensor.errors import ArgumentTypeError
from shardtensor.host.memory_pool import check_addressable, is_addressable
from shardtensor.host.units import counted
from shardtensor.interpreters.execution.strategies import Named, Run
from shardtensor.sharding.layout import NamedSharding, Shape
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import Chain
from shardtensor.tensor.operands import HostAval, sharded_dtype
from shardtensor.tensor.tensor import ShardedTensor, check_not_donated, mark_array, without_elements
from shardtensor.tensor.value import Aval

Kind = Aval | HostAval | type | None
"""An operand as plans see it: its aval, or the type of a Python scalar; None for an optional operand that is absent."""

Execution = Callable[[], tuple[str, Run]]
"""Selects the strategy of a plan, and makes its function."""


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Plan:
    """How one operator runs on operands of known kinds. Plans are compared by everything but their functions.

    Attributes:
        op: the operator.
        result: the aval of the result.
        partial_axes: the mesh axes along which partial results are combined.
        transfers: the transfer of each operand to the layout that the operator needs, None for a scalar; none for a
            strategy that reads the operands where they are.
        schedules: returns the schedules of the messages that follow those of the operands: the combination of partial
            results, or the movement of the elements.
        strategy: ``"whole"`` (once on the whole buffer), ``"blocks"`` (block by block), ``"per shard"`` (once on each
            shard, or on each buffer that several devices share), ``"first"`` (once on the first device, which sends the
            result to the others), ``"reduce"`` (per shard, then combined), ``"panels"``
            (see `shardtensor.interpreters.execution.product_layouts`), ``"move"`` (a `DataMovement`), ``"create"`` or
            ``"abstract"`` (without elements).
        run: executes the plan: takes the operands and returns the result.
        of_buffers: returns the function that computes the buffer of the result from those of the operands, where they
            are whole in the memory of the host (see `shardtensor.interpreters.execution.strategies.Strategies`), or
            None.
        copied: returns what of these messages is copied here (see `Schedule.announce`); by default all, unless the
            devices share a memory.
        text: returns the text of a call, from the operands or their identities, by which processes compare it; None if
            it concerns one process.
    """

    op: Op
    result: Aval
    partial_axes: Chain
    transfers: tuple[OperandTransfer | None, ...]
    schedules: Callable[[], Sequence[Schedule]] = dataclasses.field(compare=False, repr=False)
    execution: dataclasses.InitVar[Execution]
    of_buffers: Callable[[], Callable[..., Any] | None] = dataclasses.field(
        default=lambda: None, compare=False, repr=False
    )
    copied: Callable[[], bool | int] | None = dataclasses.field(default=None, compare=False, repr=False)
    text: Callable[[Operands], str] | None = dataclasses.field(default=None, init=False, compare=False, repr=False)
    strategy: str = dataclasses.field(init=False)
    run: Run = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self, execution: Execution) -> None:
        if self.result.backend.simulated:
            self.strategy, self.run = "abstract", self.infer
        else:
            self.strategy, run = execution()
            if not is_addressable(self.result.shape, self.result.dtype):  # The plan can still be inferred.
                run = self._refused
            marks = "keeps arrays" in self.op.tags or self.op.creates
            self.run = (lambda operands: self._marked(run(operands), operands)) if marks else run

    def _refused(self, operands: Operands) -> Any:
        check_addressable(self.result.shape, self.result.dtype)

    def announce(self) -> None:
        """Records the messages of the plan, if a log is active, without sending them."""
        for transfer in self.transfers:
            if transfer is not None:
                transfer.infer(self.op.name)
        for schedule in self.schedules():
            schedule.announce(self._copied())

    def _copied(self) -> bool | int | None:
        if self.result.backend.simulated:
            return None
        return self.result.memory is None if self.copied is None else self.copied()

    def infer(self, operands: Operands) -> ShardedTensor:
        """Returns the result without elements, and records the messages if a log is active."""
        read = operands[1:] if "prototype" in self.op.tags else operands
        check_not_donated(*read)
        if is_recording():
            for x in read:
                announce_reading(x)
            self.announce()
        return self._marked(without_elements(self.result), operands)

    def _marked(self, result: ShardedTensor, operands: Operands) -> ShardedTensor:
        """Marks a 0-d result as an array, if it is created or the operator keeps arrays and some operand is one."""
        op = self.op
        kept = "keeps arrays" in op.tags and not all(isinstance(x, ShardedTensor) and x._is_scalar for x in operands)
        return mark_array(result) if op.creates or kept else result

    @property
    def runs(self) -> str:
        """How the operator runs, and on which devices."""
        count, single = self.result.sharding.mesh.size, self.result.sharding.mesh.flat[0]
        each = f"on {single}" if count == 1 else f"on each of {count} devices"
        if self.strategy == "first":
            return f"runs on {single}, which sends the result to {counted(count - 1, 'device')}"
        if self.strategy in ("whole", "blocks"):
            where = f"on {single}" if count == 1 else f"on the buffer that {count} devices share"
            return f"runs {'once' if self.strategy == 'whole' else 'block by block'} {where}"
        if self.strategy == "per shard" and not self.result.unreduced and not (cells := self.result.cells).apart:
            number = len(cells.positions)
            return f"runs on {'the buffer' if number == 1 else f'each of {number} buffers'} that {count} devices share"
        return "moves elements" if self.strategy == "move" else f"runs {each}"

    def messages(self) -> Iterator[str]:
        """Yields a description of each operand that is transferred, and of the messages that follow."""
        for name, transfer in zip(self.op.operands * len(self.transfers), self.transfers, strict=False):
            if transfer is not None and not transfer.stays:
                source = transfer.source.sharding.spec if isinstance(transfer.source, Aval) else "the host"
                if nbytes := transfer.schedule(self.op.name).bytes:
                    yield f"transfers {name} from {source} to {transfer.target.spec}: {counted(nbytes, 'byte')}"
        for schedule in self.schedules():
            done = (
                f"combines partial results along {', '.join(self.partial_axes)}" if self.partial_axes else "transfers"
            )
            yield f"{done}: {counted(schedule.bytes, 'byte')}"

    def __str__(self) -> str:
        """The operator and the result's layout on the first line, then how it runs, and what it transfers."""
        value = self.result
        head = f"{self.op.name} -> {value.dtype}{list(value.shape)} {value.sharding.spec}"
        return "\n    ".join([head, self.runs, *self.messages()])


def result_dtype(op: Op, kinds: Sequence[Kind], params: Named) -> np.dtype[Any]:
    """Returns the dtype of the result, inferred by NumPy's function of that name, or by the composition that stands for
    it, from arrays with one element.

    An operator can declare its dtype. Otherwise, that of an operator with its own kernel and no combination is its
    ``dtype`` parameter, or that of its first array.

    Raises:
        ArgumentTypeError: the operator does not accept the dtypes.
    """
    dtype = None if params.get("dtype") is None else sharded_dtype(params["dtype"])
    if op.dtype is not None and not callable(op.dtype):
        declared: np.dtype[Any] = np.dtype(op.dtype)
        return declared
    if op.parts.kernel and op.combine is None and op.dtype is None:
        if dtype is not None:
            return dtype
        return next(k.dtype for k in kinds if isinstance(k, (Aval, HostAval)))
    samples = [k if k is None else k(1) if isinstance(k, type) else np.ones((1,) * k.ndim, k.dtype) for k in kinds]
    # NumPy warns about a `correction` of 1 or more for one element.
    harmless = {name: value for name, value in params.items() if name != "correction"}
    try:
        with np.errstate(all="ignore"):
            return np.dtype(
                np.asarray((op.dtype or function_of(backend_of(HOST), op.name))(*samples, **harmless)).dtype
            )
    except (TypeError, ValueError) as error:
        dtypes = " and ".join(k.__name__ if isinstance(k, type) else str(k.dtype) for k in kinds if k is not None)
        raise ArgumentTypeError(f"{op.name}: does not take {dtypes} ({error})") from None


def contexts_of(value: Aval, targets: Sequence[NamedSharding | None], shapes: Sequence[Shape]) -> list[ShardContext]:
    """Returns the position of each device's shards within the operands and the result, in mesh order.

    Args:
        value: the aval of the result.
        targets: the sharding of each operand; None for a scalar.
        shapes: the shape of each operand.
    """
    grids = [None if t is None else t.grid(s) for t, s in zip(targets, shapes, strict=True)]
    grid = value.grid
    return [
        ShardContext(
            grid.box(k), tuple([() if g is None else g.box(k) for g in grids]), value.shape, tuple(shapes), value.dtype
        )
        for k in range(len(grid.devices))
    ]
