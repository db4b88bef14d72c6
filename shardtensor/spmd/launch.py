"""Launches mapped functions: prepares the arguments of each call, runs the calls as programs, adopts their results."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import backend_of
from shardtensor.communication.abstract_communicator import AbstractCommunicator, array_without_elements
from shardtensor.communication.communicator import received
from shardtensor.communication.transfer import array_on
from shardtensor.communication.transfer_log import record_copy
from shardtensor.core import Interpreter, implements, innermost, interpret_by, interpreting, operator
from shardtensor.errors import ArgumentTypeError, BackendError, ShardingError
from shardtensor.interpreters.device import DeviceInterpreter, NoContext, on_submesh
from shardtensor.interpreters.infer import INFER
from shardtensor.sharding.mesh import Mesh, settle_on
from shardtensor.sharding.rules import normalize_axis
from shardtensor.spmd.program import Failed, Program, around
from shardtensor.spmd.scheduler import run
from shardtensor.tensor.operands import as_operand, is_data, located
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import (
    ShardedTensor,
    check_not_donated,
    lacks_elements,
    mark_donated,
    tensor,
    without_elements,
)
from shardtensor.tensor.value import aval

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
    """Holds an argument that is passed to calls unchanged: no map looks for arrays in it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def argument_array(leaf: Any, what: str, otherwise: str) -> Any:
    """Returns a leaf of a mapped argument as a tensor or a host array.

    Raises:
        ArgumentTypeError: the leaf is None or a string. The message calls the leaf ``what``, and says how to pass it.
    """
    if leaf is None or isinstance(leaf, (str, bytes)):
        raise ArgumentTypeError(f"{what} is a {type(leaf).__name__}; wanted an array, or {otherwise}")
    array = np.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
    return as_operand(array, what.partition(":")[0])


def checked_axis(axis: int, ndim: int, what: str) -> int:
    """Returns an axis counted from the start. Errors begin with ``what``; see `normalize_axis`."""
    try:
        return normalize_axis(axis, ndim)
    except ValueError as error:
        raise type(error)(f"{what}: {error}") from None


def _code_of(fn: Any) -> Any:
    """Returns the code of a function, or the function itself if it is not written in Python."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", fn)


def run_mapped(
    fn: Callable[..., Any],
    columns: Sequence[MappedArgument],
    submeshes: Sequence[Mesh],
    caller: str,
    *,
    names: Sequence[str] = (),
    sizes: Sequence[int] = (),
    owned: Sequence[Mesh] | None = None,
) -> list[Any]:
    """Calls `map_shards` after checking the names of the axes.

    Raises:
        ShardingError: a name is bound by an enclosing map.
    """
    program = around()
    for name in names:
        if program and name in program.run.axes:
            raise ShardingError(f"{caller}: axis {name!r} is bound by a map around this one; choose another name")
    return map_shards(columns, fn, submeshes, owned or submeshes, caller, tuple(names), tuple(sizes))


@operator(operands=("columns",), trees=("columns",), spmd=True)
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
        Exception: an error that ``fn`` raises, with a note of the shard and the device.

    >>> from shardtensor.spmd.launch import MappedArgument, map_shards
    >>> submeshes = [part.sharding.mesh for part in st.shard(np.arange(4), devices=st.devices()[:2])]
    >>> map_shards([MappedArgument([1, 2], True)], lambda x: x + 1, submeshes, submeshes, "pmap")
    [2, 3]
    """


@implements(map_shards, "algorithm")
def _map_shards(
    columns: Sequence[MappedArgument],
    fn: Callable[..., Any],
    submeshes: Sequence[Mesh],
    owned: Sequence[Mesh],
    caller: str,
    names: Sequence[str],
    sizes: Sequence[int],
) -> list[Any]:
    used = {submesh.flat[0].backend: submesh for submesh in submeshes}
    backends = [backend_of(submesh.flat[0]) for submesh in used.values()]
    if any(backend.simulated for backend in backends):
        with interpreting(INFER):
            return _infer_map(columns, fn, submeshes, owned, caller, names, sizes)
    modes = {backend.name: mode for backend in backends if (mode := _modes_of(backend))}
    wholes: dict[tuple[int, Mesh], tuple[Any, list[Any]]] = {}

    def task(i: int, submesh: Mesh) -> Callable[[Program], Any]:
        """Returns the task of one call. Afterwards only the task holds the arguments, so that donated arrays are
        exclusive.
        """
        arguments: list[Any] = []
        shards: list[Any] = []
        arrays: Sequence[Any]
        for c, column in enumerate(columns):
            if type(column.items) is Unmapped:
                argument, arrays = column.items.value, ()
            elif submesh.size > 1:
                argument, arrays = _unheld(column.items[i]) if column.each else column.items, ()
            elif column.each:
                argument, arrays = _onto(column.items[i], submesh.flat[0], caller, column.donated)
            else:
                if (c, submesh) not in wholes:
                    wholes[c, submesh] = _onto(column.items, submesh.flat[0], caller, False)
                argument, arrays = wholes[c, submesh]
            arguments.append(argument)
            shards += arrays
        mode = modes.get(submesh.flat[0].backend)
        return functools.partial(_call_on, fn, arguments, shards, submesh, owned[i], mode, caller)

    tasks = [task(i, submesh) for i, submesh in enumerate(submeshes)]
    queues = [
        (backend_of(device), device) for device in dict.fromkeys(d for submesh in submeshes for d in submesh.flat)
    ]
    for backend, device in queues:
        # The function may read arrays outside of its arguments, which the caller's stream may still be computing.
        backend.wait_for_caller(device)
    try:
        helper_delay = max([backend.helper_delay for backend in backends], default=0.0)
        return _run(fn, tasks, submeshes, helper_delay, caller, names, sizes)
    finally:
        for backend, device in queues:
            backend.make_caller_wait(device)


@implements(map_shards, "infer")
def _infer_map(
    columns: Sequence[MappedArgument],
    fn: Callable[..., Any],
    submeshes: Sequence[Mesh],
    owned: Sequence[Mesh],
    caller: str,
    names: Sequence[str],
    sizes: Sequence[int],
) -> list[Any]:
    interpreter = innermost()
    assert interpreter is not None

    def task(i: int, submesh: Mesh) -> Callable[[Program], Any]:
        arguments = []
        for column in columns:
            item = column.items[i] if column.each else column.items
            arguments.append(
                item.value if type(item) is Unmapped
                else _unheld(item) if submesh.size > 1
                else map_leaves(functools.partial(_without_elements, submesh.flat[0], caller, column.donated), item)
            )  # fmt: skip
        return functools.partial(_infer_on, fn, arguments, submesh, owned[i], interpreter.mapped(submesh), caller)

    tasks = [task(i, submesh) for i, submesh in enumerate(submeshes)]
    # The programs only plan, so helper threads would only compete for the interpreter.
    return _run(fn, tasks, submeshes, math.inf, caller, names, sizes)


def _without_elements(device: Device, caller: str, donate: bool, leaf: Any) -> Any:
    """Returns a leaf of an argument on a device: a tensor or a host array as a tensor without elements."""
    if type(leaf) is Unmapped:
        return leaf.value
    if not isinstance(leaf, ShardedTensor) and not is_data(leaf):
        return leaf
    check_not_donated(leaf)
    array = array_without_elements(as_operand(leaf, caller), device, caller)
    if donate and lacks_elements(leaf):
        mark_donated(leaf, caller)
    return array


def _infer_on(
    fn: Callable[..., Any],
    arguments: list[Any],
    submesh: Mesh,
    owned: Mesh,
    interpreter: Interpreter,
    caller: str,
    program: Program,
) -> Any:
    """Runs one call of a mapped function on tensors without elements, and returns its result."""
    device = submesh.flat[0]
    program.execution_context = NoContext(submesh.flat)
    program.communicator = AbstractCommunicator
    settle_on(owned)
    interpret_by(interpreter)
    result = program.call(fn, arguments)
    return result if submesh.size > 1 else map_leaves(functools.partial(_adopted, device, caller), result)


def _adopted(device: Device, caller: str, leaf: Any) -> Any:
    """Returns a leaf of a result: tensors that stand for arrays on the device, and host arrays, as independent tensors
    without elements.
    """
    if lacks_elements(leaf) and leaf.device == device:
        return without_elements(leaf._aval)
    return AbstractCommunicator.result(as_operand(leaf, caller), device) if is_data(leaf) else leaf


def _run(
    fn: Callable[..., Any],
    tasks: Sequence[Callable[[Program], Any]],
    submeshes: Sequence[Mesh],
    helper_delay: float,
    caller: str,
    names: Sequence[str],
    sizes: Sequence[int],
) -> list[Any]:
    """Runs the tasks of all calls, and returns their results; an error gets a note of the shard and the device."""
    try:
        code = id(_code_of(fn))
        return run(tasks, _Labels(submeshes), names=names, sizes=sizes, helper_delay=helper_delay, code=code)
    except Failed as failure:
        number, error = failure.number, failure.error
    if number >= 0:
        note = f"{caller}: raised for shard {number} on {_described(submeshes[number])}"
        if note not in getattr(error, "__notes__", ()):  # A RecursionError may pass through a hundred maps.
            error.add_note(note)
    try:
        raise error
    finally:
        del error  # A cycle of the error and this frame would keep both, and the shards, alive.


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


class _DeviceContext:
    """Makes the device of a program current, if it has only one, and sets the modes of its library, which are the
    caller's at first; see `shardtensor.spmd.program.ExecutionContext`.
    """

    __slots__ = ("_backend", "_before", "_modes", "_on", "devices")

    def __init__(self, backend: Backend, submesh: Mesh, modes: Callable[[], None] | None) -> None:
        self.devices = submesh.flat
        self._backend = backend
        self._modes = modes

    def __enter__(self) -> None:
        self._on = self._backend.on(self.devices[0]) if len(self.devices) == 1 else contextlib.nullcontext()
        self._before = _modes_of(self._backend)
        self._on.__enter__()
        if self._modes:
            self._modes()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        if self._before:
            self._before()
        return self._on.__exit__(kind, error, trace)

    def suspend(self) -> None:
        """Saves the modes of the program, and restores the device and the modes that the thread had before."""
        self._modes = self._backend.capture_modes()
        self.__exit__(None, None, None)

    def resume(self) -> None:
        """Makes the device current again, and restores the modes of the program."""
        self.__enter__()


def _modes_of(backend: Backend) -> Callable[[], None] | None:
    """Returns a function that restores the current modes of the library, or None where that is not possible."""
    try:
        return backend.capture_modes()
    except BackendError:  # The caller's block of modes cannot be suspended, and need not be: it stays entered.
        return None


def _onto(tree: Any, device: Device, caller: str, donate: bool) -> tuple[Any, list[Any]]:
    """Returns a pytree with its arrays on ``device``, and the list of those arrays that are memory of tensors."""
    shards: list[Any] = []
    if type(tree) is ShardedTensor:  # The common case takes no traversal.
        return _leaf_onto(tree, device, caller, donate, shards), shards
    return map_leaves(lambda leaf: _leaf_onto(leaf, device, caller, donate, shards), tree), shards


def _leaf_onto(leaf: Any, device: Device, caller: str, donate: bool, shards: list[Any]) -> Any:
    backend = backend_of(device)
    if type(leaf) is not ShardedTensor:
        if type(leaf) is Unmapped:
            return leaf.value
        if not is_data(leaf):
            return leaf
        return backend.export(array_on(located(as_operand(leaf, caller)), device, caller))
    if donate:
        return _released(leaf, device, backend, caller)
    array = array_on(leaf, device, caller)
    shards.append(array)
    return backend.export(array)


def _released(x: ShardedTensor, device: Device, backend: Backend, caller: str) -> Any:
    """Returns the memory of a donated tensor, for writing."""
    array = array_on(x, device, caller)
    mark_donated(x, caller)  # From here on only this call holds the array, unless another tensor shares its memory.
    with backend.on(device):
        mine, copied = backend.release(array)
    if copied:
        record_copy(caller, int(mine.nbytes), device)
    return mine


def _call_on(
    fn: Callable[..., Any],
    arguments: list[Any],
    shards: Sequence[Any],
    submesh: Mesh,
    owned: Mesh,
    mode: Callable[[], None] | None,
    caller: str,
    program: Program,
) -> Any:
    """Runs one call of a mapped function, and returns its result; arrays of a call on one device become tensors."""
    device = submesh.flat[0]
    backend = backend_of(device)
    here = None if submesh.size > 1 else on_submesh(submesh)
    execution_context = (here and here.no_context) or _DeviceContext(backend, submesh, mode)
    program.execution_context = execution_context
    program.given = shards
    settle_on(owned)  # It need not be restored, since the program has a context of its own.
    interpret_by(here)
    with execution_context:
        result = program.call(fn, arguments)
        if here is None:
            return result
        arguments.clear()
        if backend.is_array(result) and is_data(result):  # The common case takes no traversal.
            result, copied = backend.adopt(backend.asarray(result), _kept(backend, result, shards))
            return _on_one(result, copied, here, caller)
        found: list[Any] = []
        tree = map_leaves(lambda leaf: found.append(leaf) or len(found) - 1, result)  # type: ignore[func-returns-value]
        del result
        for i in range(len(found)):
            # Only one reference is kept here, so that the backend can tell whether user code holds another.
            array, found[i] = found[i], None
            if not is_data(array):
                found[i] = array
            elif backend.is_array(array):
                array, copied = backend.adopt(backend.asarray(array), _kept(backend, array, shards))
                found[i] = _on_one(array, copied, here, caller)
            else:  # The remaining arrays are on the host.
                found[i] = _on_one(backend.from_host(np.asarray(array), here.device), True, here, caller)
    return map_leaves(found.__getitem__, tree)


def _kept(backend: Backend, array: Any, shards: Sequence[Any]) -> Sequence[Any]:
    """Returns the arrays that nothing writes to and of which ``array`` may be a view."""
    return (*shards, *received(array)) if backend.shared_memory else shards


def _on_one(array: Any, copied: bool, here: DeviceInterpreter, caller: str) -> ShardedTensor:
    """Returns a tensor on one device, of an array that nothing else holds."""
    if copied:
        record_copy(caller, int(array.nbytes), here.device)
    value = aval(tuple(array.shape), here.backend.dtype_of(array), here.sharding, True)
    return tensor(value, Storage(array) if here.backend.shared_memory else Storage(arrays=(array,)))
