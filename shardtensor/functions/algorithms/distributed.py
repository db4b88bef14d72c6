"""How a distributed algorithm becomes the algorithm and the inference of an operator; see the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import processes_of
from shardtensor.communication.abstract_communicator import AbstractCommunicator
from shardtensor.communication.communicators import communicator
from shardtensor.communication.processes import described, note
from shardtensor.communication.transfer import announce_reading, operand_transfer, whole_array
from shardtensor.communication.transfer_log import is_recording
from shardtensor.core import OPS, implements
from shardtensor.functions.algorithms.one_memory import may_run_on_first
from shardtensor.functions.algorithms.shards import AbstractShards, MeshCommunicator, Shards, shards_of
from shardtensor.functions.placement import infer_transfer, reshard_to
from shardtensor.host.fp_errors import FloatingPointErrors
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, tensor, without_elements
from shardtensor.tensor.value import Aval, aval, whole_of

_FEW_BYTES = 1 << 14
"""The size of operands up to which the calls for single shards take longer than the elements."""

_FEW_ON_DEVICES = 1 << 20
"""The same for devices other than the host, where each call is a launch."""


def distributed(
    function: Callable[..., Any],
    *,
    moves: bool = False,
    whole: Callable[..., Any] | None = None,
    result: Callable[..., Any] | None = None,
    layout: Callable[..., Sequence[NamedSharding]] | None = None,
    known_messages: bool = False,
    small: Callable[..., tuple[Aval, Callable[[Any, Any], Any]] | None] | None = None,
    few: Callable[..., bool] = lambda *avals, **params: False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Attaches the decorated function to a declared operator as its algorithm and its inference; see the package.

    Operators may have further operands: the function receives the `Shards` of all of them. The operands are transferred
    to the sharding of the first one, or to the layout that the algorithm needs.

    Args:
        function: the function that the declaration returned.
        moves: whether the algorithm moves elements of the operand, so that the transfer guard applies to its messages,
            and not only combines partial results.
        whole: ``whole(*arrays, **params)`` computes the result from all elements, as a new host array. It runs instead
            of the algorithm where devices share a memory, unless transfers are recorded: then the algorithm runs,
            because its messages depend on the elements.
        result: ``result(*avals, **params)`` returns the aval of the result, if ``whole`` is given. Operators with
            several results have a tuple of avals, and of arrays or `Shards`.
        layout: ``layout(*avals, **params)`` returns the sharding that the algorithm needs of each operand.
        small: ``small(aval, **params)`` returns the aval of the result and the function of a namespace and an array
            that computes it, with the algorithm's bits, from the whole buffer of a small operand on devices that share
            a memory, as a new array; or None. The messages of the algorithm follow from the shapes. With ``few``, the
            first device computes it in place of the algorithm.
        few: ``few(*avals, **params)`` returns whether the operands are so few bytes that the messages of the algorithm
            take longer than the elements: then they are sent to the first device, which runs the algorithm and sends
            the parts of the result to the others, if all are in one process. ``result`` or ``small`` is given.
        known_messages: whether the messages follow from the shapes. Then ``whole`` runs where transfers are recorded,
            too, so that a log does not change the result.
    """
    op = OPS[function.__name__]
    further = len(op.operands) - 1

    @functools.lru_cache(1024, typed=True)
    def targets(*avals_and_params: Any) -> Sequence[NamedSharding]:
        if layout is None:
            return [avals_and_params[0].sharding] * (1 + further)
        params = zip(op.params, avals_and_params[1 + further :], strict=True)
        return layout(*avals_and_params[: 1 + further], **dict(params))

    @functools.lru_cache(1024, typed=True)  # Parameters that are equal, such as 1 and True, may differ in type.
    def known(*avals_and_params: Any) -> Any:
        assert result is not None
        params = zip(op.params, avals_and_params[1 + further :], strict=True)
        return result(*avals_and_params[: 1 + further], **dict(params))

    @functools.lru_cache(1024, typed=True)
    def runs_on_one(*avals_and_params: Any) -> bool:
        avals, params = avals_and_params[: 1 + further], avals_and_params[1 + further :]
        return may_run_on_first(avals[0]) and few(*avals, **dict(zip(op.params, params, strict=True)))

    @functools.lru_cache(1024, typed=True)
    def prepared(value: Aval, *params: Any) -> tuple[Aval, Callable[[Any, Any], Any]] | None:
        most = _FEW_BYTES if value.backend.on_host else _FEW_ON_DEVICES
        if small is None or value.memory is None or value.offloaded or value.nbytes > most:
            return None
        return small(value, **dict(zip(op.params, params, strict=True)))

    @functools.lru_cache(1024, typed=True)
    def prepared_on_first(value: Aval, *params: Any) -> tuple[Aval, Callable[[Any, Any], Any]] | None:
        if small is None or not runs_on_one(value, *params):
            return None
        return small(value, **dict(zip(op.params, params, strict=True)))

    def divided(x: ShardedTensor, made: Aval, compute: Callable[[Any, Any], Any]) -> Shards:
        """Returns the shards of a result of x's shape that the first device computes of all elements."""
        first = as_sharding(made.sharding.mesh.flat[0], x.ndim, op.name)
        shards = (_abstract_operand if lacks_elements(x) else _operand)(x, first, op.name)
        alone = aval(made.shape, made.dtype, first, made.committed)
        found = shards.map(compute, shape=lambda shape: shape, dtype=made.dtype).assembled(alone)
        return found.divided(made, op.name)

    def at_once(operands: Sequence[Any], params: tuple[Any, ...]) -> Any:
        assert whole is not None
        shardings = targets(*map(_kind_of, operands), *params)
        moves = [operand_transfer(_kind_of(y), target) for y, target in zip(operands, shardings, strict=True)]
        avals = known(*map(_laid_out, operands, shardings), *params)
        arrays = [move.unrecorded(y, op.name)[0] for move, y in zip(moves, operands, strict=True)]
        made = whole(*arrays, **dict(zip(op.params, params, strict=True)))
        return _each_of(lambda v, a: tensor(v, Storage((whole_of(a, v),))), avals, made)

    def on_first(body: Callable[..., Any], operands: Sequence[Any], params: tuple[Any, ...]) -> Any:
        """Returns the result of the algorithm on the first of devices that share a memory."""
        shardings = targets(*map(_kind_of, operands), *params)
        avals = known(*map(_laid_out, operands, shardings), *params)
        shards = []
        for y, target in zip(operands, shardings, strict=True):
            move = operand_transfer(_kind_of(y), target)
            value = _laid_out(y, as_sharding(target.mesh.flat[0], y.ndim, op.name))
            shards.append(shards_of(value, move.unrecorded(y, op.name)))
        along = functools.partial(MeshCommunicator, op.name, shards[0].value, kind=communicator, explicit=not moves)
        made = body(*shards, along, **dict(zip(op.params, params, strict=True)))
        return _each_of(lambda v, s: tensor(v, Storage(s.tensor()._storage.buffers)), avals, made)

    def attach(body: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: ShardedTensor, others: Sequence[Any], params: tuple[Any, ...]) -> Any:
            if ready := prepared_on_first(x._aval, *params):
                return divided(x, *ready)
            operands = (x, *others)
            shardings = targets(*map(_kind_of, operands), *params)
            value = _laid_out(x, shardings[0])
            on_one = result is not None and runs_on_one(*map(_kind_of, operands), *params)
            if on_one:
                needed, device = shardings, value.sharding.mesh.flat[0]
                shardings = [as_sharding(device, y.ndim, op.name) for y in operands]
            if any(map(lacks_elements, operands)):
                kind: Callable[..., Any] = AbstractCommunicator
                shards = [_abstract_operand(y, target, op.name) for y, target in zip(operands, shardings, strict=True)]
            else:
                kind = communicator
                if len(processes_of(value.sharding.mesh.flat)) > 1:
                    note(f"{op.name}({', '.join(map(described, (*operands, *params)))})")
                shards = [_operand(y, target, op.name) for y, target in zip(operands, shardings, strict=True)]
            along = functools.partial(MeshCommunicator, op.name, shards[0].value, kind=kind, explicit=not moves)
            made = body(*shards, along, **dict(zip(op.params, params, strict=True)))
            if not on_one:
                return made
            avals = known(*map(_laid_out, operands, needed), *params)
            return _each_of(lambda value, part: part.divided(value, op.name), avals, made)

        def algorithm(x: Any, *others_and_params: Any) -> Any:
            others, params = others_and_params[:further], others_and_params[further:]
            if not isinstance(x, ShardedTensor):
                x = reshard_to(x, as_sharding(default_mesh(), np.ndim(x), op.name), op.name, committed=False)
            value = x._aval
            if ready := prepared(value, *params):
                if is_recording():
                    run(without_elements(value), others, params)
                backend, made = value.backend, ready[0]
                with FloatingPointErrors(op.ufunc), backend.on(value.sharding.mesh.flat[0]):
                    array = whole_of(ready[1](backend.xp, whole_array(x, op.name)), made)
                return tensor(made, Storage((array,), ([],)))
            if whole is not None and value.memory is not None and (known_messages or not is_recording()):
                if is_recording():
                    run(without_elements(value), others, params)
                if value.backend.on_host:
                    return at_once((x, *others), params)
                if value.sharding.mesh.size > 1 and not value.offloaded:
                    return on_first(body, (x, *others), params)
            with FloatingPointErrors(op.ufunc):  # Devices and blocks report together, as one call of NumPy does.
                return _each_of(lambda made: made.tensor(), run(x, others, params))

        def infer(x: Any, *others_and_params: Any) -> Any:
            if not isinstance(x, ShardedTensor):
                target = as_sharding(default_mesh(), np.ndim(x), op.name)
                x = without_elements(infer_transfer(x, target, op.name, committed=False))
            found = run(x, others_and_params[:further], others_and_params[further:])
            return _each_of(lambda made: made.value, found)

        implements(function, "algorithm")(algorithm)
        implements(function, "infer")(infer)
        return body

    return attach


def _kind_of(y: Any) -> Aval | HostAval:
    return y._aval if isinstance(y, ShardedTensor) else host_aval(y.shape, y.dtype)


def _laid_out(y: Any, sharding: NamedSharding) -> Aval:
    """Returns the aval of an operand in the sharding that the algorithm needs."""
    return aval(y.shape, y.dtype, sharding, isinstance(y, ShardedTensor) and y._aval.committed)


def _operand(y: Any, sharding: NamedSharding, caller: str) -> Shards:
    """Returns the shards of an operand in the sharding that the algorithm needs."""
    move, value = operand_transfer(_kind_of(y), sharding), _laid_out(y, sharding)
    return shards_of(value, move.shards(y, caller))


def _abstract_operand(y: Any, sharding: NamedSharding, caller: str) -> Shards:
    """Returns those of an operand without elements, and records the transfer if a log is active."""
    move, value = operand_transfer(_kind_of(y), sharding), _laid_out(y, sharding)
    if is_recording():
        announce_reading(y)
        if not move.stays:
            move.schedule(caller).announce()
    grid = value.grid
    return AbstractShards(value, [host_aval(grid.shape(k), value.dtype) for k in range(len(grid.devices))])


def _each_of(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Applies a function to the items of tuples, and returns one of the first's type; else, to the arguments."""
    if not isinstance(first, tuple):
        return function(first, *others)
    made = [function(*items) for items in zip(first, *others, strict=True)]
    return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
