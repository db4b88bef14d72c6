"""Operators that need whole operands of few bytes: the first device computes the result, and sends it to the others.

Every device would otherwise receive all operands and compute the same. The bits are the same: the kernel has the same
arrays. The messages are those of a gather to the first device, and of the parts of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import operand_transfer
from shardtensor.core import Operands
from shardtensor.functions.algorithms.one_memory import may_run_on_first
from shardtensor.functions.algorithms.sample_sort import GATHERED
from shardtensor.interpreters.execution.strategies import Moves, Run
from shardtensor.sharding.layout import as_sharding
from shardtensor.tensor.tensor import ShardedTensor, tensor
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


def on_first(
    caller: str,
    value: Aval,
    kept: Aval,
    moves: Moves,
    strategy: Callable[[Aval, Moves], Run],
    everywhere: Callable[[], Run],
) -> dict[str, Any]:
    """Returns the transfers, the schedules, the execution and the copied bytes of the plan of an operator that the
    first device runs.

    Args:
        caller: the name of the operator.
        value: the aval of its result on all devices.
        kept: the aval of the result of the plan, which may be split.
        moves: the transfer of each operand to all devices.
        strategy: returns the plan on the devices of an aval, to which the operands are transferred.
        everywhere: returns the plan on all devices, which runs where they share a memory.
    """
    device = value.sharding.mesh.flat[0]
    alone = aval(value.shape, value.dtype, as_sharding(device, value.ndim, caller), value.committed)
    gathers = [m and operand_transfer(m.source, as_sharding(device, len(m.source.shape), caller)) for m in moves]
    back = operand_transfer(alone, kept.sharding)

    def execution() -> tuple[str, Run]:
        if value.memory is not None:
            return "whole", everywhere()
        compute = strategy(alone, gathers)

        def run(operands: Operands) -> ShardedTensor:
            return tensor(kept, offloaded(kept, back.buffers(compute(operands), caller)))

        return "first", run

    return {
        "transfers": tuple(gathers),
        "schedules": lambda: (back.schedule(caller),),
        "execution": execution,
        "copied": lambda: back.copied,
    }
