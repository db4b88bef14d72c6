"""Operators that need whole operands of few bytes: the first device computes the result, and sends it to the others.

Every device would otherwise receive all operands and compute the same. The bits are the same: the kernel has the same
arrays. The messages are those of a gather to the first device, and of the parts of the result.
"""

from __future__ import annotations

from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import OperandTransfer, operand_transfer
from shardtensor.functions.algorithms.one_memory import may_run_on_first
from shardtensor.functions.algorithms.sample_sort import GATHERED
from shardtensor.interpreters.execution.strategies import Moves, Run
from shardtensor.sharding.layout import as_sharding
from shardtensor.tensor.tensor import tensor
from shardtensor.tensor.value import Aval, aval


def runs_on_first(value: Aval, moves: Moves) -> bool:
    """Whether the first device computes a result for the others: all devices need the same operands, which are split
    and have few bytes, and so does the result.

    Args:
        value: the aval of the result.
        moves: the transfer of each operand into the layout that the operator needs; None for a scalar.
    """
    if not may_run_on_first(value) or _is_split(value) or value.nbytes > GATHERED:
        return False
    given = [move for move in moves if move is not None]
    if any(max(move.target.grid(move.source.shape).counts, default=1) > 1 for move in given):
        return False
    gathered = any(isinstance(move.source, Aval) and _is_split(move.source) for move in given)
    return gathered and sum([move.source.nbytes for move in given]) <= GATHERED


def _is_split(value: Aval) -> bool:
    return max(value.grid.counts, default=1) > 1


def moves_to_first(value: Aval, moves: Moves, caller: str) -> list[OperandTransfer | None]:
    """Returns the transfers of operands to the first device of a result."""
    device = value.sharding.mesh.flat[0]
    return [m and operand_transfer(m.source, as_sharding(device, len(m.source.shape), caller)) for m in moves]


def on_first(value: Aval, caller: str) -> Aval:
    """Returns the aval of a result while only its first device has it."""
    first = as_sharding(value.sharding.mesh.flat[0], value.ndim, caller)
    return aval(value.shape, value.dtype, first, value.committed)


def sent_from_first(run: Run, made: OperandTransfer, value: Aval, caller: str) -> Run:
    """Returns the plan that sends the result of a plan of one device to the devices of the given aval."""
    return lambda operands: tensor(value, offloaded(value, made.buffers(run(operands), caller)))
