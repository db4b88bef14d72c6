"""Errors of collectives: calls that differ, deadlocks, and work that failed."""

from __future__ import annotations

from collections.abc import Sequence

from shardtensor.errors import CollectiveError, ShardTensorError, message_of
from shardtensor.host.units import counted, listed
from shardtensor.spmd.collective_call import CollectiveCall
from shardtensor.spmd.scheduling.mapped_program import MapRun, Program, Rendezvous


def disagreement(program: Program, call: CollectiveCall, rendezvous: Rendezvous) -> str:
    """Returns the message for a program whose call differs from those that have arrived."""
    there = listed([str(member) for member in rendezvous.arrived])
    mine, theirs, rule = call.beside(rendezvous.call)
    others = rendezvous.missing - 1
    late = f" ({counted(others, 'other')} had not called yet)" if others else ""
    return (
        f"{call.description}: {program} called {mine}, and {there} called {theirs}{late}; all devices along an axis "
        f"must {rule}"
    )


def error_for(error: BaseException, call: CollectiveCall, program: Program) -> BaseException:
    """Returns a copy of an error for another program, since an exception that is raised twice gets both tracebacks."""
    if isinstance(error, ShardTensorError):
        return type(error)(str(error))
    text = f"{call.description}: it failed on {program}: {message_of(error)}"
    return RecursionError(text) if isinstance(error, RecursionError) else CollectiveError(text)


def deadlock(pending: Sequence[Rendezvous], runs: Sequence[MapRun]) -> str:
    """Returns the message for programs that wait for each other: it names each device and the call in which it waits.

    Args:
        pending: every rendezvous, in order.
        runs: all maps.
    """
    waiting: dict[str, list[str]] = {}
    for rendezvous in pending:
        waiting.setdefault(rendezvous.call.description, []).extend(map(str, rendezvous.arrived))
    gone = list(dict.fromkeys(label for rendezvous in pending for label in _returned(rendezvous, runs)))
    reports = [f"{listed(labels)} called {call}" for call, labels in waiting.items()]
    reports += [f"{listed(gone)} returned without such a call"] * bool(gone)
    return (
        "; ".join(reports)
        + ": no two of these calls match; all devices along an axis must make the same calls in the same order"
    )


def _returned(rendezvous: Rendezvous, runs: Sequence[MapRun]) -> list[str]:
    """Returns the labels of the programs that are missing in a rendezvous because they have returned, or because they
    have called the maps in which others were to arrive and have returned. The other missing programs wait in another
    call, or belong to maps that have not been called.
    """
    key_at = rendezvous.call.key_at
    axes = rendezvous.arrived[0].run.axes
    labels = []
    for run in runs:
        depth = len(run.axes)
        if run.axes == axes[:depth]:
            inner = {member.coordinates[depth:] for member in rendezvous.arrived}
            labels += [
                run.labels[number]
                for number in range(len(run.tasks))
                if number not in run.live
                and (key_at is None or any(key_at(run.coordinates(number) + at) == rendezvous.call.key for at in inner))
            ]
    return labels
