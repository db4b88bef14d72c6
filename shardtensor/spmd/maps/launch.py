"""Launches mapped functions: prepares the arguments of each call, runs the calls as programs, adopts their results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend, call_beside_by
from shardtensor.backend.registry import backend_of, in_job, is_remote
from shardtensor.communication.abstract_communicator import AbstractCommunicator, array_without_elements, on_device
from shardtensor.communication.transfer import array_on
from shardtensor.communication.transfer_log import record_copy
from shardtensor.core import Interpreter, implements, innermost, interpret_by, interpreting, operator
from shardtensor.errors import ArgumentTypeError, AxisError, ShardingError, type_text
from shardtensor.functions.random.random_keys import Key
from shardtensor.host.blockwise import copied as copied_array
from shardtensor.interpreters.infer import INFER
from shardtensor.sharding.mesh import Mesh, settle_on
from shardtensor.sharding.rules import normalize_axis
from shardtensor.spmd.manual_types import WithSpecs
from shardtensor.spmd.maps.adoption import adopt, adopt_leaves
from shardtensor.spmd.maps.call_places import Places, places_of
from shardtensor.spmd.scheduling.device_context import DeviceContext, modes_of
from shardtensor.spmd.scheduling.mapped_program import ExecutionContext, Failed, Program, around
from shardtensor.spmd.scheduling.scheduler import run
from shardtensor.tensor.operands import as_operand, is_data, located
from shardtensor.tensor.ownership import READS, Lent, export, lend_storages
from shardtensor.tensor.pytree import leaves, map_leaves
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import (
    ShardedTensor,
    are_tensors,
    check_not_donated,
    lacks_elements,
    mark_donated,
    without_elements,
)

Onto = Callable[[Any, Device, str, bool, list[Lent]], Any]
"""``onto(x, device, caller, donated, lent)`` returns a tensor or a host array on a device, and adds the array of a
tensor, which nothing writes to, to the list ``lent``.
"""

DERIVATIVES = "shardtensor.spmd.derivatives"
BATCHING = "shardtensor.spmd.map_batching"
"""The module of the derivatives of maps and collectives, which is loaded on use."""

# -- mapped calls ----------------------------------------------------------------------------------


class MappedArgument(NamedTuple):
    """One argument of a mapped function, for all calls.

    Attributes:
        items: if ``each``, a sequence with the argument of each call; otherwise the argument that all calls share (an
            `Unmapped` is passed unchanged).
        each: whether every call gets an item of its own.
        donated: whether the memory of tensors is donated to the function, for writing.
    """

    items: Any
    each: bool
    donated: bool = False


class Unmapped:
    """Holds an argument that is passed to calls unchanged: no map looks for arrays in it.

    Attributes:
        value: the argument.
        same: the numbers in it that are declared to be the same for all calls.
    """

    __slots__ = ("same", "value")

    def __init__(self, value: Any, same: Sequence[Any] = ()) -> None:
        self.value = value
        self.same = same


def argument_array(leaf: Any, what: str, otherwise: str) -> Any:
    """Returns a leaf of a mapped argument as a tensor or a host array.

    Raises:
        ArgumentTypeError: the leaf is None, a string or a Key. The message calls the leaf ``what``, and says how to
            pass it.
    """
    if isinstance(leaf, Key):
        raise key_is_not_split(what, otherwise)
    if leaf is None or isinstance(leaf, (str, bytes)):
        raise ArgumentTypeError(f"{what} is {type_text(leaf)}; wanted an array, or {otherwise}")
    array = np.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
    return as_operand(array, what.partition(":")[0])


def key_is_not_split(what: str, otherwise: str) -> ArgumentTypeError:
    """Returns the error for a Key where an array is to be split; see `argument_array`."""
    return ArgumentTypeError(
        f"{what} is a Key, which has no elements to split. st.random.fold_in(key, st.axis_index(name)) in the function "
        "makes the key of each call from one that all calls have (the function may close over it); or map over a list "
        f"of keys by st.pmap(f, st.random.split(key, n)); or give {otherwise}"
    )


def checked_axis(axis: int, ndim: int, what: str) -> int:
    """Returns an axis counted from the start. Errors begin with ``what``; see `normalize_axis`."""
    try:
        return normalize_axis(axis, ndim)
    except (ArgumentTypeError, AxisError) as error:
        raise type(error)(f"{what}: {error}") from None


_READ_ONLY = (
    "The arrays that a mapped function is given, also those of collectives, are read-only. Write to a copy "
    "(x = x.copy()); st.pmap(..., donate=True) gives the function the memory of the tensors in lists, for writing."
)
"""The note of an error of NumPy about a write to such an array."""


def _code_of(fn: Any) -> Any:
    """Returns the code of a function, or the function itself if it is not written in Python."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", fn)


@operator(operands=("columns",), trees=("columns",), tags=("internal", "spmd"))
def map_shards(
    columns: Sequence[MappedArgument],
    /,
    fn: Callable[..., Any],
    submeshes: Sequence[Mesh],
    owned: Sequence[Mesh],
    caller: str,
    names: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> list[Any]:
    """Calls ``fn`` once for each mesh in ``submeshes``, concurrently, with one argument from each column: the operator
    of which `pmap`, `smap` and `shard_map` are composed.

    A call on one device receives the backend's arrays, and arrays that it returns become tensors on that device. A call
    on several devices receives and returns tensors unchanged: maps inside of it run on single devices. Where arguments
    have no elements, every array is a tensor without elements.

    Args:
        columns: the arguments of ``fn``.
        fn: the function.
        submeshes: the devices of each call.
        owned: the devices that each call owns, which are the default mesh inside of it.
        caller: the map, for error messages and the transfer log.
        names: the axes along which the calls are numbered, row-major; collectives refer to them.
        sizes: the sizes of those axes.

    Returns:
        The list of results, one for each call.

    Raises:
        ShardingError: a name is bound by an enclosing map.
        Exception: an error that ``fn`` raises, with a note of the shard and the device.

    >>> from shardtensor.spmd.maps.launch import MappedArgument, map_shards
    >>> submeshes = [part.sharding.mesh for part in st.shard(np.arange(4), devices=st.devices()[:2])]
    >>> map_shards([MappedArgument([1, 2], True)], lambda x: x + 1, submeshes, submeshes, "pmap")
    [2, 3]
    """


implements(map_shards, "derivative")(DERIVATIVES)
implements(map_shards, "batching")(BATCHING)


@dataclass(eq=False)
class _Map:
    """One call of `map_shards`, with its arguments.

    Attributes:
        rows: the arguments of each program, and the arrays of tensors among them. Nothing else refers to the arguments
            of programs that have not started, so that donated arrays are exclusive.
        places: what follows from the devices.
        modes: the functions that restore the caller's modes of libraries, by backend.
        specs: for each argument the specs of its leaves, if the arguments are blocks.
    """

    columns: Sequence[MappedArgument]
    fn: Callable[..., Any]
    submeshes: Sequence[Mesh]
    owned: Sequence[Mesh]
    caller: str
    names: Sequence[str]
    sizes: Sequence[int]
    rows: list[Any] = field(init=False)
    places: Places = field(init=False)
    modes: dict[Backend, Callable[[], None]] = field(init=False)
    specs: Sequence[Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        fn = self.fn
        if type(fn) is WithSpecs:  # No interpreter changes its arguments.
            self.fn, self.specs = fn.func, fn.specs
        for name in self.names:
            program = around()
            if program and name in program.run.axes:
                raise ShardingError(
                    f"{self.caller}: axis {name!r} is bound by a map around this one; choose another name"
                )

    def arguments(self, onto: Onto) -> list[tuple[list[Any], list[Lent]]]:
        """Returns the arguments of each program, and the list of the arrays of tensors among them."""
        rows: list[tuple[list[Any], list[Lent]]] = [([], []) for _ in self.submeshes]
        for items, each, donated in self.columns:
            if each and not donated and onto is _array_onto and (ones := _lent_shards(items, self.submeshes)):
                for (arguments, lent), one in zip(rows, ones, strict=True):
                    arguments.append(one.exported)
                    lent.append(one)
                continue
            # A shared argument is transferred once to each device.
            shared: dict[Mesh, tuple[Any, list[Lent]]] = {}
            for i, (submesh, (arguments, lent)) in enumerate(zip(self.submeshes, rows, strict=True)):
                if type(items) is Unmapped:
                    argument = items.value
                elif submesh.size > 1:
                    argument = _unheld(items[i]) if each else items
                elif not each:
                    if submesh not in shared:
                        shared_lent: list[Lent] = []
                        shared[submesh] = (
                            _onto(onto, items, submesh.flat[0], self.caller, False, shared_lent),
                            shared_lent,
                        )
                    argument, arrays = shared[submesh]
                    lent += arrays
                elif type(item := items[i]) is ShardedTensor:  # It takes no traversal.
                    argument = onto(item, submesh.flat[0], self.caller, donated, lent)
                else:
                    argument = _onto(onto, item, submesh.flat[0], self.caller, donated, lent)
                arguments.append(argument)
        return rows

    def call(self, program: Program) -> Any:
        """Runs one call of the function: the task of every program. Returns its result; arrays of a call on one device
        become tensors.
        """
        i, thread, places = program.number, program.thread, self.places
        here = places.interpreters[i]
        arguments, program.lent = self.rows[i]
        if self.specs is not None:
            program.arguments = self.specs, arguments
        self.rows[i] = None
        program.devices = places.devices[i]
        # Neither has to be restored, since the program has a context of its own.
        settle_on(self.owned[i])
        interpret_by(places.applies[i])
        context: ExecutionContext | None = None
        if here is None or not here.stateless:
            context = program.execution_context = places.blocks[i] or self._device_context(i)
            context.enter(thread)
        elif thread.block is not None:
            thread.leave_block()
        try:
            thread.inside = True
            try:
                held = [self.fn(*arguments)]  # The backend can tell only from a list whether user code holds an array.
            finally:
                thread.inside = False
            arguments.clear()
            if here is None:
                result = held[0]
            elif (here.backend.on_host and type(held[0]) is np.ndarray) or here.backend.is_array(held[0]):
                # The common case takes no traversal.
                result = adopt(held, here, self.caller, program.lent)
            else:
                result = adopt_leaves(held, here, self.caller, program.lent)
        except BaseException as error:
            if context is not None:
                context.fail(thread, error)
            raise
        if context is not None:
            context.leave(thread)
        return result

    def _device_context(self, number: int) -> DeviceContext:
        submesh = self.submeshes[number]
        backend = backend_of(submesh.flat[0])
        return DeviceContext(backend, submesh, self.modes.get(backend))

    def run(
        self,
        tasks: Sequence[Callable[[Program], Any]],
        helper_delay: float,
        devices: tuple[tuple[Device, ...], ...] = (),
    ) -> list[Any]:
        """Runs the tasks of all calls, and returns their results; an error gets a note of the shard and the device."""
        labels, code = _Labels(self.submeshes), id(_code_of(self.fn))
        try:
            return run(
                tasks, labels, names=self.names, sizes=self.sizes, helper_delay=helper_delay, code=code, devices=devices
            )
        except Failed as failure:
            number, error = failure.number, failure.error
        if number >= 0:
            note = f"{self.caller}: raised for shard {number} on {_described(self.submeshes[number])}"
            notes = getattr(error, "__notes__", ())
            if note not in notes:  # A RecursionError may pass through a hundred maps.
                error.add_note(note)
            if type(error) is ValueError and "read-only" in str(error) and _READ_ONLY not in notes:
                error.add_note(_READ_ONLY)
        try:
            raise error
        finally:
            del error  # A cycle of the error and this frame would keep both, and the shards, alive.


@implements(map_shards, "algorithm")
def _map_shards(*arguments: Any) -> list[Any]:
    called = _Map(*arguments)
    places = places_of(called.submeshes)
    if places.simulated:
        with interpreting(INFER):
            return _infer_map(*arguments)
    entry: list[Any] = [called.columns]
    try:  # Not by `reading`, in whose __exit__ Ctrl-C could be raised before the entry is removed.
        READS[id(entry)] = entry  # The interpreter of mapped functions publishes no operands.
        return _execute_map(called, places)
    finally:
        READS.pop(id(entry), None)


def _execute_map(called: _Map, places: Places) -> list[Any]:
    called.places = places
    called.modes = {}
    for backend in places.stateful:
        if mode := modes_of(backend):
            called.modes[backend] = mode
    across: tuple[tuple[Device, ...], ...] = ()
    if in_job():  # Programs of one process do not need these modules.
        from shardtensor.spmd.maps.captured import note_map
        from shardtensor.spmd.maps.maps_across_processes import devices_across, results_across

        if across := devices_across(called.submeshes, called.caller):
            note_map(called.caller, called.fn, [(column.items, _shared_leaves(column)) for column in called.columns])
    called.rows = called.arguments(_array_onto)
    tasks: list[Callable[[Program], Any]] = [called.call] * len(called.submeshes)
    if across:
        tasks = [_nothing if all(map(is_remote, devices)) else called.call for devices in across]
    for backend, device in places.queues:
        # The function may read arrays outside of its arguments, which the caller's stream may still be computing.
        backend.wait_for_caller(device)
    try:
        helper_delay = max(map(_helper_delay, places.backends), default=0.0)
        results = called.run(tasks, helper_delay, across)
        return results_across(results, across, called.caller) if across else results
    finally:
        for backend, device in places.queues:
            backend.make_caller_wait(device)


_helper_delay = attrgetter("helper_delay")


def _shared_leaves(column: MappedArgument) -> list[Any]:
    """Returns the leaves of an argument that are declared to be the same for all calls."""
    shared: list[Any] = []
    if column.each and type(column.items) is list and are_tensors(column.items):
        return shared  # The common case.
    for leaf in leaves(column.items):
        if type(leaf) is Unmapped:
            shared += leaf.same
        elif not column.each:
            shared.append(leaf)
    return shared


def _nothing(program: Program) -> None:
    """The task of a program that runs in another process."""


@implements(map_shards, "infer")
def _infer_map(*arguments: Any) -> list[Any]:
    called, interpreter = _Map(*arguments), innermost()
    assert interpreter is not None
    tasks = [
        functools.partial(_infer_on, called, i, args, interpreter.mapped(called.submeshes[i]))
        for i, (args, _) in enumerate(called.arguments(_abstract_onto))
    ]
    # The programs only plan, so helper threads would only compete for the interpreter.
    return called.run(tasks, math.inf)


def _onto(onto: Onto, tree: Any, device: Device, caller: str, donated: bool, lent: list[Lent]) -> Any:
    """Returns a pytree with its arrays on a device, by the function ``onto``."""

    def one(leaf: Any) -> Any:
        if type(leaf) is ShardedTensor:
            return onto(leaf, device, caller, donated, lent)
        if type(leaf) is Unmapped:
            return leaf.value
        return onto(as_operand(leaf, caller), device, caller, False, []) if is_data(leaf) else leaf

    return map_leaves(one, tree)


def _lent_shards(items: Sequence[Any], submeshes: Sequence[Mesh]) -> Sequence[Lent]:
    """Hands out the arrays of all items at once; none if one of them is not a tensor that is on its device already."""
    storages: list[Storage] = []
    backend: Backend | None = None
    for x, submesh in zip(items, submeshes, strict=True):
        if type(x) is not ShardedTensor or x._aval.sharding.mesh is not submesh or submesh.size > 1:
            return ()
        storage, own = x._storage, x._aval.backend  # Only once, since another thread may replace the storage.
        if type(storage) is not Storage or own is not (backend or own):
            return ()
        storages.append(storage)
        backend = own
    return lend_storages(storages, backend) if backend is not None else ()


def _array_onto(x: Any, device: Device, caller: str, donated: bool, lent: list[Lent]) -> Any:
    """Returns a tensor or a host array as an array on a device, for writing if it is donated."""
    if not donated and type(x) is ShardedTensor and x._aval.sharding.mesh.flat == (device,):
        storage = x._storage  # Only once, since another thread may replace it.
        if type(storage) is Storage:
            lent += lend_storages([storage], x._aval.backend)
            return lent[-1].exported
    backend = backend_of(device)
    x = located(x)
    held = [array_on(x, device, caller)]
    if not donated:
        shares = type(x) is ShardedTensor and x._aval.backend is backend
        exported = export(x, held[0]) if shares else backend.export(held[0])
        lent.append(Lent(exported, backend.export(exported)))
        return exported
    mark_donated(x, caller)  # From here on only the list holds the array, unless another tensor shares its memory.
    with backend.on(device):
        if backend.is_exclusive(held) and backend.begin_write(held[0]):
            return held[0]
        mine = copied_array(held[0]) if backend.on_host else backend.contiguous(backend.xp.asarray(held[0], copy=True))
    record_copy(caller, int(mine.nbytes), device)
    return mine


def _abstract_onto(x: Any, device: Device, caller: str, donated: bool, lent: list[Lent]) -> Any:
    """Returns a tensor or a host array as a tensor on a device without elements."""
    check_not_donated(x)
    value = array_without_elements(x, device, caller)
    if donated and lacks_elements(x):
        mark_donated(x, caller)
    return value


def _infer_on(called: _Map, i: int, arguments: list[Any], interpreter: Interpreter, program: Program) -> Any:
    """Runs one call of a mapped function on tensors without elements, and returns its result."""
    submesh = called.submeshes[i]
    if called.specs is not None:
        program.arguments = called.specs, arguments
    program.devices = submesh.flat
    program.communicator = AbstractCommunicator
    settle_on(called.owned[i])
    interpret_by(interpreter.apply)
    program.thread.inside = True
    try:
        result = called.fn(*arguments)
    finally:
        program.thread.inside = False
    if submesh.size > 1:
        return result
    return map_leaves(functools.partial(_adopted, submesh.flat[0], called.caller), result)


def _adopted(device: Device, caller: str, leaf: Any) -> Any:
    """Returns a leaf of a result: tensors that stand for arrays on the device, and host arrays, as independent tensors
    without elements.
    """
    if lacks_elements(leaf) and leaf.device == device:
        return without_elements(leaf._aval)
    return on_device(as_operand(leaf, caller), device) if is_data(leaf) else leaf


def _call_beside(function: Callable[[], Any]) -> Any:
    from shardtensor.spmd.scheduling.assistant import call_beside  # Few programs need it.

    return call_beside(function)


call_beside_by(_call_beside)


def _unheld(tree: Any) -> Any:
    """Returns the pytree with every `Unmapped` leaf replaced by its value."""
    if type(tree) is ShardedTensor:
        return tree
    return map_leaves(lambda leaf: leaf.value if type(leaf) is Unmapped else leaf, tree)


class _Labels(Sequence[str]):
    """The names of programs in errors: their devices, preceded by their numbers where a device has several programs."""

    def __init__(self, submeshes: Sequence[Mesh]) -> None:
        self._submeshes = submeshes

    def __len__(self) -> int:
        return len(self._submeshes)

    def __getitem__(self, number: Any) -> Any:
        submesh = self._submeshes[number]
        shared = self._submeshes.count(submesh) > 1
        return f"shard {number} on {_described(submesh)}" if shared else _described(submesh)


def _described(submesh: Mesh) -> str:
    return str(submesh.flat[0]) if submesh.size == 1 else f"{submesh.flat[0]}..{submesh.flat[-1]}"
