"""Maps over devices of several processes: each process runs the programs of its devices.

A collective of programs of several processes is executed when all programs of this process wait in such collectives.
The processes then exchange which calls their programs make, with the shapes and dtypes, and execute all of them in the
same order.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.registry import (
    array_backend,
    backend_of,
    in_other_process,
    is_remote,
    is_spanning,
    processes_of,
)
from shardtensor.backend.remote import RemoteArray
from shardtensor.backend.small_floats import text_of
from shardtensor.communication.between_processes.difference import numbers_text, processes_text
from shardtensor.communication.between_processes.processes import (
    compared,
    connected,
    described_array,
    elsewhere,
    gather_texts,
    leaves_out,
    note,
)
from shardtensor.errors import BackendError, CollectiveError, ShapeError, type_text
from shardtensor.host.units import counted
from shardtensor.places import calling_from, user_place
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.spec import P
from shardtensor.spmd.axes import AxisPosition
from shardtensor.spmd.collective_call import Across, CollectiveCall, HostNumbers, read_all
from shardtensor.spmd.scheduling.mapped_program import MapRun, Program, Rendezvous, current
from shardtensor.tensor.pytree import form_of, keys_of, leaves, replaced
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, lacks_elements, shard_arrays, tensor_of
from shardtensor.tensor.value import aval, new_buffers

Devices = tuple[Device, ...]
"""The devices of one program."""


def devices_across(submeshes: Sequence[Mesh], caller: str) -> tuple[Devices, ...]:
    """Returns the devices of each program of a map, if some of them are in other processes; otherwise nothing.

    A program runs in the processes of its devices: in one of them, or in all. Processes without a device run none, and
    learn from the others which results there are.

    Raises:
        BackendError: a program has devices of several processes, but not of all.
        NotAddressableError: all devices are in one other process, whose maps do not concern this one.
    """
    devices = tuple([mesh.flat for mesh in submeshes])
    every = tuple(itertools.chain.from_iterable(devices))
    if not is_spanning(every):
        return ()
    if in_other_process(every):
        raise elsewhere(every, caller)
    count = connected(caller).engine.process_count
    of_each = {len(processes_of(own)) for own in devices}
    if of_each not in ({1}, {count}):
        raise BackendError(
            f"{caller}: a call of the function has devices of {max(of_each)} of "
            f"{counted(count, 'process', 'processes')}; wanted those of one process for each call, or those of all"
        )
    return devices


def is_elsewhere(devices: Devices) -> bool:
    """Whether a program on these devices does not run in this process."""
    return all(map(is_remote, devices))


def programs_across(program: Program, at: AxisPosition, caller: str) -> Across | None:
    """Returns the programs of a collective if some of them are in other processes; otherwise None. Programs of inner
    maps are numbered over all calls of the outermost map.

    Raises:
        BackendError: the program runs on other devices of the call of the outermost map than those that other processes
            expect.
    """
    run = program.run
    if not _outermost(run).devices:
        return None
    number, numbers = _number_of(run.extents, program.coordinates), _members(run.extents, at)
    devices = [_devices_of(run, n) for n in numbers]
    if not is_spanning(tuple(itertools.chain.from_iterable(devices))):
        return None
    if program.devices != (expected := _devices_of(run, number)):
        raise BackendError(
            f"{caller}: {program} is call {number} of maps over several processes, and other processes expect it on "
            f"{', '.join(map(str, expected))}; give the inner maps all devices of the outer call, in its order"
        )
    return Across(numbers, sum(not is_elsewhere(own) for own in devices))


def _number_of(extents: tuple[int, ...], coordinates: tuple[int, ...]) -> int:
    """Returns the number of a program, row-major along the axes of all maps around it."""
    return int(np.ravel_multi_index(coordinates, extents))


def _members(extents: tuple[int, ...], at: AxisPosition) -> tuple[int, ...]:
    """Returns the numbers of the programs of a collective, given the position of one of them."""
    every = enumerate(itertools.product(*map(range, extents)))
    members = [(there.index, n) for n, coordinates in every if (there := at.at(coordinates)).key == at.key]
    return tuple([n for _, n in sorted(members)])


def _outermost(run: MapRun) -> MapRun:
    while run.parent is not None:
        run = run.parent.run
    return run


def _devices_of(run: MapRun, number: int) -> Devices:
    """Returns the devices of a program, given its number (see `programs_across`): the inner maps divide the devices of
    a call of the outermost one in order, or have several programs on each.
    """
    outermost = _outermost(run)
    inner = math.prod(run.extents[len(outermost.axes) :])
    call, k = divmod(number, inner)
    devices = outermost.devices[call]
    first = k * len(devices) // inner
    return devices[first : first + max(len(devices) // inner, 1)]


def met(pending: Sequence[Rendezvous]) -> list[tuple[Rendezvous, Sequence[Any]]]:
    """Executes the collectives of programs of several processes in which all programs have arrived, and returns the
    results of each for all programs. The others go on waiting.

    Raises:
        CollectiveError: in none of them all programs have arrived, so that no program can continue.
    """
    waiting = next((program for r in pending for program in r.arrived), None)
    with calling_from(_frame_of(waiting)):  # The thread that runs this may have no frame of the user's program.
        rows = _exchanged([_described(r) for r in pending])
    return _executed(rows, pending)


def _exchanged(record: Any) -> list[Any]:
    """Returns what the programs of each process do: the collectives in which they wait, or their results."""
    import json  # Programs of one process do not need it.

    return list(map(_parsed, gather_texts("collectives of a map", json.dumps(record))))


@functools.lru_cache(256)
def _parsed(text: str) -> Any:
    """Returns what a text describes, which is only read: loops send the same texts again and again."""
    import json  # See above.

    return json.loads(text)


def _executed(rows: Sequence[Any], pending: Sequence[Rendezvous]) -> list[tuple[Rendezvous, Sequence[Any]]]:
    """Executes the collectives that the processes can; see `met`.

    Args:
        rows: what the programs of each process do.
        pending: the collectives in which those of this process wait.
    """
    own = {rendezvous.numbers: rendezvous for rendezvous in pending}
    groups: dict[tuple[int, ...], _Collective] = {}
    waiting = [row for row in rows if isinstance(row, list)]
    known = [{call for _, call, _ in row} for row in waiting]
    for numbers, call, members in itertools.chain.from_iterable(waiting):
        group = groups.setdefault(tuple(numbers), _Collective(set(), {}))
        group.calls.add(call)
        group.kinds.update({int(k): kinds for k, kinds in members.items()})
    ready = sorted(n for n, group in groups.items() if len(group.calls) == 1 and len(group.kinds) == len(n))
    if not ready:
        raise _apart(groups, pending)
    results = []
    for numbers in ready:
        (call,), kinds = groups[numbers]
        mine, job = own.get(numbers), connected("a collective of a map")
        like = mine or next((r for r in pending if _call_of(r) == call), None)
        if like is None:
            job.accompany(call)
            continue
        run, contributions = like.arrived[0].run, []
        for k, n in enumerate(numbers):
            here = mine.contributions[k] if mine else None
            devices = _devices_of(run, n)
            contributions.append(here or (devices, [_decoded(x, devices) for x in kinds[k]], ()))
        all_know = len(waiting) == len(rows) and all(call in calls for calls in known)
        with job.settled(call) if all_know else job.accompanied(call):
            outputs = like.call.work(contributions)
        if mine is not None:
            results.append((mine, outputs))
    return results


def _apart(groups: dict[tuple[int, ...], _Collective], pending: Sequence[Rendezvous]) -> CollectiveError:
    """Returns the error of collectives in none of which all programs have arrived, the same in all processes: all of
    them raise it.
    """
    own = {(_place_of(program), r.call.description, _call_of(r)) for r in pending for program in r.arrived}
    rows = _exchanged_places(sorted(own))
    shown = 2 if len({call for row in rows for _, call, _ in row}) == 1 else 1  # Only the operands differ.
    entries: dict[str, list[int]] = {}
    for k, row in enumerate(rows):
        for entry in dict.fromkeys(f"{at[0]} {at[shown]}".strip() for at in row) or ["no collective"]:
            entries.setdefault(entry, []).append(k)
    arrived = sorted(number for n, group in groups.items() for k, number in enumerate(n) if k in group.kinds)
    problem = "make different collectives, or some make none"
    if shown == 2 and all(rows):
        problem = "make the same collective with different arguments"
    return CollectiveError(
        f"the calls of a map {problem}: "
        + "; ".join(f"{processes_text(entries[e])}: {e}" for e in sorted(entries, key=lambda e: len(entries[e])))
        + f" (calls of the function that wait in a collective: {numbers_text(arrived)})"
    )


def _exchanged_places(own: Any) -> list[Any]:
    import json  # See above.

    return [json.loads(text) for text in gather_texts("places of collectives", json.dumps(own))]


def _place_of(program: Program) -> str:
    """Returns where a program is suspended, in the program of the user."""
    place = user_place(_frame_of(program))
    return str(place) if place else ""


def _frame_of(program: Program | None) -> FrameType | None:
    """Returns the frame in which a program is suspended."""
    frame: FrameType | None = getattr(program and program.suspended, "gr_frame", None)
    return frame


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
    run = rendezvous.arrived[0].run
    inside = f" in maps over {run.axes}{run.extents}" if run.parent else ""
    details = ", ".join([f"{name} = {value!r}" for name, value in rendezvous.call.details if value is not None])
    return f"{rendezvous.call.description} with {details}{inside}"


def _described(rendezvous: Rendezvous) -> tuple[Any, ...]:
    """Returns the numbers of the programs of a rendezvous, its call, and what the programs of this process give."""
    members = {
        k: [_encoded(leaf, contribution[0]) for leaf in contribution[1]]
        for k, contribution in enumerate(rendezvous.contributions)
        if contribution is not None
    }
    return rendezvous.numbers, _call_of(rendezvous), members


# -- values as texts -------------------------------------------------------------------------------


def _encoded(leaf: Any, devices: Devices) -> Any:
    """Returns what other processes know of a value of a program on these devices, as JSON has it: of an array, dtype
    and shape; of a tensor over several devices, the layout, too; of numbers for the host, the elements; a Python scalar
    or None itself.

    Raises:
        BackendError: it is another object, or a tensor on other devices.
    """
    if type(leaf) is _Text:
        return {"text": leaf}
    if type(leaf) is HostNumbers:
        read_all([leaf])
        return {
            "numbers": [(text_of(a.dtype), a.shape, a.tolist() if a.dtype.kind in "iu" else 0) for a in leaf.arrays]
        }
    if leaf is None or type(leaf) in SCALARS:
        return {"complex": [leaf.real, leaf.imag]} if type(leaf) is complex else leaf
    if not isinstance(leaf, ShardedTensor):
        if array_backend(leaf) is None and not isinstance(leaf, (np.ndarray, np.generic)):
            raise BackendError(f"{leaf!r:.60} is {type_text(leaf)}; wanted arrays and numbers")
        return text_of(backend_of(devices[0]).dtype_of(leaf)), list(leaf.shape)
    kind = text_of(leaf.dtype), list(leaf.shape)
    mesh = leaf.sharding.mesh
    if leaf.sharding == as_sharding(devices[0], leaf.ndim, "join"):
        return kind
    if leaf.sharding.spec.unreduced or not {*mesh.flat} <= {*devices}:
        raise BackendError(
            f"a tensor has {leaf.sharding.spec} on {mesh}; wanted tensors on devices of the call, without partial sums"
        )
    places = [devices.index(device) for device in mesh.flat]
    return *kind, leaf.sharding.spec.chains_of(leaf.ndim), mesh.axis_names, mesh.axis_sizes, places


def _decoded(kind: Any, devices: Devices) -> Any:
    """Returns what stands for a value of a program on these devices, of other processes: arrays without elements."""
    if isinstance(kind, dict):
        if "numbers" in kind:
            arrays = [np.full(shape, values, np.dtype(dtype)) for dtype, shape, values in kind["numbers"]]
            return HostNumbers(arrays, devices[0])
        return complex(*kind["complex"]) if "complex" in kind else _Text(kind["text"])
    if not isinstance(kind, list):
        return kind
    dtype, shape, *layout = kind
    if not layout:
        return RemoteArray(shape, np.dtype(dtype))
    chains, names, sizes, places = layout
    mesh = Mesh(np.asarray([devices[i] for i in places], object).reshape(sizes), tuple(names))
    sharding = NamedSharding(mesh, P(*[tuple(chain) or None for chain in chains]))
    value = aval(tuple(shape), np.dtype(dtype), sharding, True)
    return tensor_of(value, new_buffers(value)[0])


# -- results ---------------------------------------------------------------------------------------


def results_across(results: Sequence[Any], across: Sequence[Devices], caller: str) -> list[Any]:
    """Returns the results of all programs: those of other processes as tensors without elements here.

    Raises:
        ShapeError: programs return pytrees of different forms.
        BackendError: a program returns something else than tensors and numbers; or the map leaves out processes, and
            a program returns another pytree than lists, tuples and dicts.
    """
    own = {n: x for n, x in enumerate(results) if not is_elsewhere(across[n])}
    all_know = not leaves_out(tuple(itertools.chain.from_iterable(across)))
    if len(own) == len(results) and all_know:
        return list(results)
    record = {
        n: (str(form_of(x)) if all_know else _structure(x, caller), _result_kinds(x, across[n], caller))
        for n, x in own.items()
    }
    rows = list(itertools.chain.from_iterable(row.items() for row in _ended(record, caller)))
    all_results, (_, (first, _)) = list(results), rows[0]
    for key, (form, kinds) in rows:
        if form != first:
            raise ShapeError(f"{caller}: calls return pytrees of different forms, {form} and {first}")
        if int(key) not in own:
            values = [_elsewhere(kind, across[int(key)], caller) for kind in kinds]
            all_results[int(key)] = replaced(next(iter(own.values())), values) if own else _tree(form, iter(values))
    return all_results


def _structure(tree: Any, caller: str) -> Any:
    """Returns the structure of a result, as JSON has it, from which processes without a call make such a pytree.

    Raises:
        BackendError: they cannot.
    """
    if (entries := keys_of(tree)) is None:
        return None
    kind = type(tree)
    name = [kind.__module__, kind.__qualname__]
    is_known = kind in (list, tuple, dict) or (issubclass(kind, tuple) and _class_of(name) is kind)
    if not is_known or not all(type(key) in (str, int) for key, _ in entries):
        raise BackendError(
            f"{caller}: a call returns {type_text(tree)}, and the map leaves out processes, which cannot make one; "
            "wanted lists, tuples, named tuples of a module, and dicts with keys that are strings or integers"
        )
    return [name, [[key, _structure(child, caller)] for key, child in entries]]


def _class_of(name: Sequence[str]) -> Any:
    """Returns the class of that module and name; None if there is none."""
    module, qualified = name
    return functools.reduce(lambda x, part: getattr(x, part, None), qualified.split("."), sys.modules.get(module))


def _tree(structure: Any, values: Iterator[Any]) -> Any:
    """Returns a pytree with these leaves; see `_structure`."""
    if structure is None:
        return next(values)
    kind = _class_of(structure[0])
    children = {key: _tree(child, values) for key, child in structure[1]}
    if kind is dict:
        return children
    return kind(children.values()) if kind in (list, tuple) else kind(*children.values())


def _ended(record: Any, caller: str) -> Sequence[Any]:
    """Returns the results of the programs of each process, as texts have them, once all of them have ended."""
    program = current()
    if program is None:
        rows = _exchanged(record)
        while any(isinstance(row, list) for row in rows):  # Programs elsewhere still run.
            _executed(rows, ())
            rows = _exchanged(record)
        return rows
    # Maps that programs of all processes call end in another order in each process, so that these programs meet.
    import json  # Programs of one process do not need it.

    engine, run = connected(caller).engine, program.run
    count = engine.process_count
    numbers = (_number_of(run.extents, program.coordinates),) * count
    key = "end", run.axes, program.coordinates
    call = CollectiveCall(f"the end of {caller}", key, count, _rows_of, across=Across(numbers, 1))
    results: Sequence[Any] = program.meet(call, engine.process_index, ((), [_Text(json.dumps(record))], ()))
    return results


def _rows_of(contributions: Sequence[Any]) -> Sequence[Any]:
    rows = [_parsed(str(text)) for _, (text,), _ in contributions]
    return [rows] * len(rows)


class _Text(str):
    """A text that programs of several processes exchange."""

    __slots__ = ()


def _result_kinds(result: Any, devices: Devices, caller: str) -> list[Any]:
    try:
        return [_encoded(leaf, devices) for leaf in leaves(result)]
    except BackendError as error:
        raise BackendError(f"{caller}: a call returns what a map over several processes cannot join: {error}") from None


def _elsewhere(kind: Any, devices: Devices, caller: str) -> Any:
    """Returns what stands for a result of a program of another process: for an array, a tensor."""
    result = _decoded(kind, devices)
    if type(result) is not RemoteArray:
        return result
    value = aval(result.shape, result.dtype, as_sharding(devices[0], result.ndim, caller), True)
    return tensor_of(value, (result,))


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
        devices = [blocks[k].sharding.mesh.flat for k in members]
        own = [k for k, there in zip(members, devices, strict=True) if not is_elsewhere(there)]
        pairs += [(own[0], k) for k in own[1:]]
        in_one = all(len(processes_of(there)) == 1 for there in devices)
        count = len(processes_of(tuple(itertools.chain.from_iterable(devices))))
        if in_one and count == connected("shard_map").engine.process_count:
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
            # In a differentiated function the tape would take this for a use of the elements.
            x = x._storage.shown(x) if hasattr(x._storage, "shown") else x
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
