"""Maps over devices of several processes: each process runs the programs of its devices.

A collective of programs of several processes is executed when all programs of this process wait in such collectives.
The processes then exchange which calls their programs make, with the shapes and dtypes, and execute all of them in the
same order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.registry import backend_of, is_remote, is_spanning, processes_of
from shardtensor.backend.remote import RemoteArray
from shardtensor.backend.small_floats import text_of
from shardtensor.communication.processes import compared, connected, described_array, gather_texts, note
from shardtensor.errors import BackendError, CollectiveError, ShapeError
from shardtensor.sharding.layout import as_sharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.spmd.axes import AxisPosition
from shardtensor.spmd.program import Program, Rendezvous
from shardtensor.tensor.pytree import form_of, leaves, replaced
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements, shard_arrays, tensor
from shardtensor.tensor.value import aval


def devices_across(submeshes: Sequence[Mesh], caller: str) -> tuple[Device, ...]:
    """Returns the device of each program of a map, if some of them are in other processes; otherwise nothing.

    Raises:
        BackendError: a program has devices of several processes, or a process has no program.
    """
    devices = tuple([device for mesh in submeshes for device in mesh.flat])
    if not is_spanning(devices):
        return ()
    if any(len(processes_of(mesh.flat)) > 1 for mesh in submeshes):
        raise BackendError(f"{caller}: a call of the function has devices of several processes; map over more axes")
    count = connected(caller).engine.process_count
    if len(processes_of(devices)) < count:
        raise BackendError(
            f"{caller}: the devices are in {len(processes_of(devices))} of {count} processes; wanted all"
        )
    return tuple([mesh.flat[0] for mesh in submeshes])


def programs_across(program: Program, at: AxisPosition, caller: str) -> tuple[int, ...]:
    """Returns the numbers of the programs of a collective, in order of their indices, if some of them are in other
    processes; otherwise nothing.

    Raises:
        BackendError: the collective is called in a map inside of a map over several processes, along axes of that one.
    """
    run = program.run
    around = run.parent
    while around is not None:
        if around.run.across:
            inner = len(run.axes) - len(around.run.axes)
            own = {coordinates[-inner:] for coordinates in map(run.coordinates, range(len(run.tasks)))}
            if at.size > len(own):
                raise BackendError(
                    f"{caller}: a collective along axes of a map over several processes does not work in a map inside "
                    "of it"
                )
            return ()
        around = around.run.parent
    if not run.across:
        return ()
    every = {n: run.coordinates(n) for n in range(len(run.tasks))}
    found = ((at.at(c), n) for n, c in every.items())
    members = sorted((there.index, n) for there, n in found if there.key == at.key)
    numbers = tuple([n for _, n in members])
    return numbers if len(processes_of(tuple([run.across[n] for n in numbers]))) > 1 else ()


def met(found: Sequence[Rendezvous]) -> list[tuple[Rendezvous, Sequence[Any]]]:
    """Executes the collectives of programs of several processes in which all programs have arrived, and returns the
    results of each for all programs. The others go on waiting.

    Raises:
        CollectiveError: in none of them all programs have arrived, so that no program can continue.
    """
    return _executed(_exchanged([_described(r) for r in found]), found)


def _exchanged(record: Any) -> list[Any]:
    """Returns what the programs of each process do: the collectives in which they wait, or their results."""
    import json  # Programs of one process do not need it.

    return list(map(_parsed, gather_texts("collectives of a map", json.dumps(record))))


@functools.lru_cache(256)
def _parsed(text: str) -> Any:
    """Returns what a text describes, which is only read: loops send the same texts again and again."""
    import json  # See above.

    return json.loads(text)


def _executed(rows: Sequence[Any], found: Sequence[Rendezvous]) -> list[tuple[Rendezvous, Sequence[Any]]]:
    """Executes the collectives that the processes can; see `met`.

    Args:
        rows: what the programs of each process do.
        found: the collectives in which those of this process wait.
    """
    own = {rendezvous.numbers: rendezvous for rendezvous in found}
    groups: dict[tuple[int, ...], _Collective] = {}
    waiting = [row for row in rows if isinstance(row, list)]
    known = [{call for _, call, _ in row} for row in waiting]
    for numbers, call, members in itertools.chain.from_iterable(waiting):
        group = groups.setdefault(tuple(numbers), _Collective(set(), {}))
        group.calls.add(call)
        group.kinds.update({int(k): kinds for k, kinds in members.items()})
    ready = sorted(n for n, group in groups.items() if len(group.calls) == 1 and len(group.kinds) == len(n))
    if not ready:
        raise _apart(groups, found)
    results = []
    for numbers in ready:
        (call,), kinds = groups[numbers]
        mine, job = own.get(numbers), connected("a collective of a map")
        like = mine or next((r for r in found if _call_of(r) == call), None)
        if like is None or like.work is None:
            job.accompany(call)
            continue
        across = like.arrived[0].run.across
        contributions = []
        for k, n in enumerate(numbers):
            here = mine is not None and not is_remote(across[n])
            given = mine.contributions[k] if mine and here else ((across[n],), [_remote(x) for x in kinds[k]], ())
            contributions.append(given)
        all_know = len(waiting) == len(rows) and all(call in calls for calls in known)
        with job.settled() if all_know else job.accompanied(call):
            made = like.work(contributions)
        if mine is not None:
            results.append((mine, made))
    return results


def _apart(groups: dict[tuple[int, ...], _Collective], found: Sequence[Rendezvous]) -> CollectiveError:
    """Returns the error of collectives in none of which all programs have arrived."""
    calls = sorted(set.union(*[group.calls for group in groups.values()]))
    arrived = sorted(number for n, group in groups.items() for k, number in enumerate(n) if k in group.kinds)
    caller = found[0].call.description if found else calls[0]
    return CollectiveError(
        f"{caller}: programs in other processes make another call, or none: {calls}, by the programs {arrived}"
    )


class _Collective(NamedTuple):
    """The state of one collective, which is the same in all processes.

    Attributes:
        calls: the calls that programs make in it; one, unless they disagree.
        kinds: what each program that has arrived gives, by its position.
    """

    calls: set[str]
    kinds: dict[int, Any]


def _call_of(rendezvous: Rendezvous) -> str:
    """Returns a text of a call, the same for calls that can meet."""
    return f"{rendezvous.call.description} with {rendezvous.call.details!r}"


def _described(rendezvous: Rendezvous) -> tuple[Any, ...]:
    """Returns the numbers of the programs of a rendezvous, its call, and what the programs of this process give."""
    members = {
        k: [_kind(leaf, contribution[0][0]) for leaf in contribution[1]]
        for k, contribution in enumerate(rendezvous.contributions)
        if contribution is not None
    }
    return rendezvous.numbers, _call_of(rendezvous), members


def _kind(leaf: Any, device: Device) -> Any:
    """Returns what other processes know of an array, or a Python scalar itself."""
    if leaf is None or type(leaf) in SCALARS:
        return _encoded(leaf)
    if isinstance(leaf, ShardedTensor):
        raise BackendError("collectives across processes take arrays on single devices, and scalars")
    return text_of(backend_of(device).dtype_of(leaf)), list(leaf.shape)


def _remote(kind: Any) -> Any:
    return RemoteArray(kind[1], np.dtype(kind[0])) if isinstance(kind, list) else _decoded(kind)


def _encoded(scalar: Any) -> Any:
    """Returns a Python scalar or None as JSON has it, which has no complex numbers."""
    return {"complex": [scalar.real, scalar.imag]} if type(scalar) is complex else scalar


def _decoded(scalar: Any) -> Any:
    return complex(*scalar["complex"]) if isinstance(scalar, dict) else scalar


# -- results ---------------------------------------------------------------------------------------


def results_across(results: Sequence[Any], across: Sequence[Device], caller: str) -> list[Any]:
    """Returns the results of all programs: those of other processes as tensors without elements here.

    Raises:
        ShapeError: programs return pytrees of different forms.
        BackendError: a program returns something else than tensors and numbers.
    """
    own = {n: x for n, x in enumerate(results) if not is_remote(across[n])}
    first = next(iter(own.values()))
    record = {n: (str(form_of(x)), [_result_kind(leaf, caller) for leaf in leaves(x)]) for n, x in own.items()}
    made = list(results)
    rows = _exchanged(record)
    while any(isinstance(row, list) for row in rows):  # Programs elsewhere still run.
        _executed(rows, ())
        rows = _exchanged(record)
    for key, (form, kinds) in itertools.chain.from_iterable(row.items() for row in rows):
        if form != str(form_of(first)):
            raise ShapeError(f"{caller}: calls return pytrees of different forms, {form} and {form_of(first)}")
        if int(key) not in own:
            device = across[int(key)]
            made[int(key)] = replaced(first, [_elsewhere(kind, device, caller) for kind in kinds])
    return made


def _result_kind(leaf: Any, caller: str) -> Any:
    if isinstance(leaf, ShardedTensor) and leaf.sharding.mesh.size == 1:
        return text_of(leaf.dtype), list(leaf.shape)
    if leaf is None or type(leaf) in SCALARS:
        return _encoded(leaf)
    raise BackendError(
        f"{caller}: a call returns {leaf!r:.60}, a {type(leaf).__name__}; over several processes, functions return "
        "arrays on single devices and numbers"
    )


def twins_here(
    twins: Sequence[tuple[int, int]], blocks: Sequence[ShardedTensor]
) -> tuple[list[ShardedTensor], list[tuple[int, int]]]:
    """Returns which results of calls must be equal.

    Args:
        twins: the pairs of calls of all processes whose results must be equal: the first of several, and each other.
        blocks: the results of the calls.

    Returns:
        Of each group of results that all processes have some of, the first one of this process, and the pairs of calls
        of this process.
    """
    groups: dict[int, list[int]] = {}
    for first, other in twins:
        groups.setdefault(first, [first]).append(other)
    firsts, pairs = list[ShardedTensor](), list[tuple[int, int]]()
    for members in groups.values():
        devices = tuple([blocks[k].sharding.mesh.flat[0] for k in members])
        own = [k for k, device in zip(members, devices, strict=True) if not is_remote(device)]
        pairs += [(own[0], k) for k in own[1:]]
        if len(processes_of(devices)) == connected("shard_map").engine.process_count:
            firsts.append(blocks[own[0]])
    return firsts, pairs


def note_equal(results: Sequence[ShardedTensor], what: str) -> None:
    """Lets the next exchange compare results between processes, by a checksum.

    Args:
        results: see `twins_here`.
        what: their name.
    """
    for x in results:
        if not lacks_elements(x):
            note(f"{what}, declared to be equal: {', '.join(map(_digest, _on_hosts(x)))}")


def _on_hosts(x: ShardedTensor) -> list[HostArray]:
    arrays = []
    for array, device in zip(shard_arrays(x), x.sharding.mesh.flat, strict=True):
        backend = backend_of(device)
        with backend.on(device):
            arrays.append(np.asarray(backend.to_host(array, device)))
    return arrays


def _digest(array: HostArray) -> str:
    """Returns a text that is equal for equal arrays; zeros of both signs are equal, and so are all NaNs."""
    elements = compared(array)
    if array.dtype.kind in "fc":
        elements = np.where(np.isnan(elements), np.asarray(np.nan, array.dtype), elements + np.asarray(0, array.dtype))
    return described_array(array, elements)


def _elsewhere(kind: Any, device: Device, caller: str) -> Any:
    if not isinstance(kind, list):
        return _decoded(kind)
    shape, dtype = tuple(kind[1]), np.dtype(kind[0])
    value = aval(shape, dtype, as_sharding(device, len(shape), caller), True)
    return tensor(value, Storage((RemoteArray(shape, dtype),)))
