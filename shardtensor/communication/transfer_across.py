"""Transfer plans between devices of several processes: the pieces for other processes are sent in one exchange.

A piece that several devices of a process receive is sent to the first of them, and copied from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardtensor.backend.device import HOST
from shardtensor.backend.registry import backend_of, is_remote, processes_of
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.processes import cross, described, note, process_of
from shardtensor.sharding.copy_plan import Piece

if TYPE_CHECKING:  # It imports this module when a plan spans processes.
    from shardtensor.communication.transfer import TransferPlan


def run_across(
    plan: TransferPlan, operands: Sequence[Sequence[Any]], dtype: Any, as_they_lie: bool, fill: Any
) -> tuple[Any, ...]:
    """Executes a plan; see `TransferPlan.run`."""
    for grid, arrays in zip(plan.sources, operands, strict=True):
        # Each process has the whole array, and takes its own elements of it. Where the result is in one process, that
        # one runs the plan as one of its own, and notes nothing; so do the others.
        if grid.devices == (HOST,) and len(processes_of(plan.result.devices)) > 1:
            note(described(arrays[0]))
    devices = plan.result.devices
    made = [None if is_remote(d) or plan.is_one_piece(k) else plan.new(k, dtype, fill) for k, d in enumerate(devices)]
    crossing = _crossing(plan)
    sent = [plan.message(piece, operands, devices[piece.k]) for piece in crossing.values()]
    into = [_place(plan, piece, made[piece.k]) for piece in crossing.values()]
    arrived = dict(zip(crossing, cross(sent, "transfer", into), strict=True))
    results = []
    for k, device in enumerate(devices):
        if is_remote(device):
            results.append(RemoteArray(plan.result.shape(k), dtype))
            continue
        pieces, messages = list[Piece](), []
        for piece in plan.incoming[k]:
            first = crossing.get(_key(plan, piece))
            if first is not None and first.k == k and made[k] is not None:
                continue  # It is in its place already.
            message = plan.message(piece, operands, device)
            if first is not None:
                message = message._replace(array=arrived[_key(plan, piece)], source=devices[first.k])
            pieces.append(piece)
            messages.append(message)
        results.append(plan.receive(k, pieces, messages, dtype, as_they_lie, fill, made[k]))
    return tuple(results)


def _place(plan: TransferPlan, piece: Piece, out: Any) -> Any:
    """Returns the part of the result of a device that a piece is copied to; None if there is no memory for it yet."""
    if out is None:
        return None
    device = plan.result.devices[piece.k]
    with backend_of(device).on(device):
        return backend_of(device).view(out, piece.to)


def _crossing(plan: TransferPlan) -> dict[Any, Piece]:
    """Returns the pieces that are sent to another process, each for its first receiver there."""
    found: dict[Any, Piece] = {}
    for pieces in plan.incoming:
        for piece in pieces:
            source = plan.sources[plan.regions[piece.region].operand].devices[piece.j]
            if source != HOST and process_of(source) != process_of(plan.result.devices[piece.k]):
                found.setdefault(_key(plan, piece), piece)
    return found


def _key(plan: TransferPlan, piece: Piece) -> Any:
    """Identifies the elements of a piece, and the process that receives them."""
    index = tuple([(i.start, i.stop, i.step) if isinstance(i, slice) else i for i in piece.index])
    return piece.region, piece.j, index, process_of(plan.result.devices[piece.k])
