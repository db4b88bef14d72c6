"""How a distributed algorithm becomes the algorithm and the inference of an operator; see the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from shardtensor.backend.registry import processes_of
from shardtensor.communication.abstract_communicator import AbstractCommunicator
from shardtensor.communication.communicators import communicator
from shardtensor.communication.processes import described, note
from shardtensor.communication.transfer import announce_reading, operand_transfer, whole_array
from shardtensor.core import OPS, Op, implements
from shardtensor.errors import ArgumentTypeError, type_text
from shardtensor.functions.algorithms.one_memory import may_run_on_first
from shardtensor.functions.algorithms.shards import AbstractShards, MeshCommunicator, Shards, shards_of
from shardtensor.functions.placement import infer_transfer, transfer_to
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


_Small: TypeAlias = tuple[Aval, Callable[[Any, Any], Any]]
"""The aval of a result, and the function of a namespace and of the array of all elements that computes it."""


def distributed(
    function: Callable[..., Any],
    *,
    moves: bool = False,
    whole: Callable[..., Any] | None = None,
    result: Callable[..., Any] | None = None,
    layout: Callable[..., Sequence[NamedSharding]] | None = None,
    data_dependent: bool = False,
    small: Callable[..., _Small | None] | None = None,
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
            of the algorithm where devices share a memory.
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
        data_dependent: whether the messages follow from elements: where transfers are recorded, the algorithm runs, and
            neither ``whole`` nor ``small``. The inference takes elements in random order.
    """

    def attach(body: Callable[..., Any]) -> Callable[..., Any]:
        algorithm = _Algorithm(
            OPS[function.__name__],
            body,
            moves=moves,
            whole=whole,
            result=result,
            layout=layout,
            small=small,
            few=few,
        )
        implements(function, "algorithm")(algorithm.run)
        implements(function, "infer")(algorithm.infer)
        if data_dependent:
            implements(function, "announcing")(algorithm.announcing)
        return body

    return attach


def check_hashable(params: dict[str, Any]) -> None:
    """Checks that the parameters of an operator are hashable, as numbers, tuples of them and dtypes are.

    Raises:
        ArgumentTypeError: one is not.
    """
    for name, value in params.items():
        try:
            hash(value)
        except TypeError:
            kind = type_text(value)
            raise ArgumentTypeError(f"{name} is {value!r:.60}, {kind}; wanted a single value") from None


class _Algorithm:
    """The algorithm of an operator, and what runs in its place; see `distributed` for the arguments."""

    def __init__(
        self,
        op: Op,
        body: Callable[..., Any],
        *,
        moves: bool,
        whole: Callable[..., Any] | None,
        result: Callable[..., Any] | None,
        layout: Callable[..., Sequence[NamedSharding]] | None,
        small: Callable[..., _Small | None] | None,
        few: Callable[..., bool],
    ) -> None:
        self.op, self.name, self.body = op, op.name, body
        self.moves, self.whole, self.result, self.layout = moves, whole, result, layout
        self.small, self.few = small, few
        self.count = len(op.operands)
        cached = functools.lru_cache(1024, typed=True)  # Parameters that are equal, such as 1 and True, differ in type.
        self._shardings = cached(self._shardings_of)
        self._avals = cached(self._avals_of)
        self._runs_on_one = cached(self._may_run_on_one)
        self._in_one_buffer = cached(self._small_in_one_buffer)
        self._on_first = cached(self._small_on_first)

    # -- what follows from avals and parameters, which these methods take one after the other ------

    def _named(self, params: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.op.params, params, strict=True))

    def _shardings_of(self, *avals_and_params: Any) -> Sequence[NamedSharding]:
        """Returns the sharding that the algorithm needs of each operand."""
        avals, params = avals_and_params[: self.count], avals_and_params[self.count :]
        return [avals[0].sharding] * self.count if self.layout is None else self.layout(*avals, **self._named(params))

    def _avals_of(self, *avals_and_params: Any) -> Any:
        """Returns the aval of the result, or those of several results."""
        assert self.result is not None
        avals, params = avals_and_params[: self.count], avals_and_params[self.count :]
        return self.result(*avals, **self._named(params))

    def _may_run_on_one(self, *avals_and_params: Any) -> bool:
        """Returns whether the first device computes for the others."""
        avals, params = avals_and_params[: self.count], avals_and_params[self.count :]
        return may_run_on_first(avals[0]) and self.few(*avals, **self._named(params))

    def _small_in_one_buffer(self, value: Aval, *params: Any) -> _Small | None:
        """Returns what computes the result of a small operand in one buffer from all elements, if anything does."""
        most = _FEW_BYTES if value.backend.on_host else _FEW_ON_DEVICES
        if self.small is None or value.memory is None or value.offloaded or value.nbytes > most:
            return None
        return self.small(value, **self._named(params))

    def _small_on_first(self, value: Aval, *params: Any) -> _Small | None:
        """Returns what computes the result on the first device from all elements, if anything does."""
        if self.small is None or not self._runs_on_one(value, *params):
            return None
        return self.small(value, **self._named(params))

    # -- calls -------------------------------------------------------------------------------------

    def run(self, x: Any, *others_and_params: Any) -> Any:
        """The algorithm of the operator."""
        others, params = others_and_params[: self.count - 1], others_and_params[self.count - 1 :]
        x = self._placed(x)
        operands, value = (x, *others), x._aval
        try:
            small = self._in_one_buffer(value, *params)
        except TypeError:  # What was found for these parameters is kept by their values.
            check_hashable(self._named(params))
            raise
        if small:
            return self._run_small(operands, params, *small)
        if self.whole is not None and value.memory is not None:
            if value.backend.on_host:
                return self._run_whole(operands, params)
            if value.sharding.mesh.size > 1 and not value.offloaded:
                return self._run_in_one_memory(operands, params)
        return self._run(operands, params)

    def _placed(self, x: Any) -> ShardedTensor:
        if isinstance(x, ShardedTensor):
            return x
        return transfer_to(x, as_sharding(default_mesh(), np.ndim(x), self.name), self.name, committed=False)

    def announcing(self, x: Any, *others_and_params: Any) -> Any:
        """The algorithm on every device, whose messages follow from elements."""
        return self._run((self._placed(x), *others_and_params[: self.count - 1]), others_and_params[self.count - 1 :])

    def _run(self, operands: Sequence[Any], params: Sequence[Any]) -> Any:
        with FloatingPointErrors(self.op.ufunc):  # Devices and blocks report together, as one call of NumPy does.
            return _each_of(lambda made: made.tensor(), self._distribute(operands, params))

    def infer(self, x: Any, *others_and_params: Any) -> Any:
        """The inference of the operator."""
        others, params = others_and_params[: self.count - 1], others_and_params[self.count - 1 :]
        if not isinstance(x, ShardedTensor):
            target = as_sharding(default_mesh(), np.ndim(x), self.name)
            x = without_elements(infer_transfer(x, target, self.name, committed=False))
        return _each_of(lambda made: made.value, self._distribute((x, *others), params))

    # -- in place of the algorithm, where devices share a memory -----------------------------------

    def _run_small(
        self, operands: Sequence[Any], params: Sequence[Any], made: Aval, compute: Callable[[Any, Any], Any]
    ) -> ShardedTensor:
        """Returns the result that one function computes of the buffer of the first operand."""
        value = operands[0]._aval
        with FloatingPointErrors(self.op.ufunc), value.backend.on(value.sharding.mesh.flat[0]):
            array = whole_of(compute(value.backend.xp, whole_array(operands[0], self.name)), made)
        return tensor(made, Storage((array,), ([],)))

    def _run_whole(self, operands: Sequence[Any], params: Sequence[Any]) -> Any:
        """Returns the result that a function of whole host arrays computes."""
        assert self.whole is not None
        shardings = self._shardings(*map(_kind_of, operands), *params)
        moves = [operand_transfer(_kind_of(y), target) for y, target in zip(operands, shardings, strict=True)]
        avals = self._avals(*map(_laid_out, operands, shardings), *params)
        arrays = [move.buffers(y, self.name)[0] for move, y in zip(moves, operands, strict=True)]
        made = self.whole(*arrays, **self._named(params))
        return _each_of(lambda v, a: tensor(v, Storage((whole_of(a, v),))), avals, made)

    def _run_in_one_memory(self, operands: Sequence[Any], params: Sequence[Any]) -> Any:
        """Returns the result of the algorithm on the first of devices that share a memory."""
        shardings = self._shardings(*map(_kind_of, operands), *params)
        avals = self._avals(*map(_laid_out, operands, shardings), *params)
        shards = []
        for y, target in zip(operands, shardings, strict=True):
            move = operand_transfer(_kind_of(y), target)
            value = _laid_out(y, as_sharding(target.mesh.flat[0], y.ndim, self.name))
            shards.append(shards_of(value, move.buffers(y, self.name)))
        made = self._call_body(shards, communicator, params)
        return _each_of(lambda v, s: tensor(v, Storage(s.tensor()._storage.buffers)), avals, made)

    # -- the algorithm -----------------------------------------------------------------------------

    def _distribute(self, operands: Sequence[Any], params: Sequence[Any]) -> Any:
        """Returns the `Shards` of the result, or those of several results."""
        x = operands[0]
        try:
            small = self._on_first(x._aval, *params)
        except TypeError:
            check_hashable(self._named(params))
            raise
        if small:
            return self._divided(x, *small)
        kinds = [_kind_of(y) for y in operands]
        needed = shardings = self._shardings(*kinds, *params)
        value = _laid_out(x, shardings[0])
        on_one = self.result is not None and self._runs_on_one(*kinds, *params)
        if on_one:
            shardings = [as_sharding(value.sharding.mesh.flat[0], y.ndim, self.name) for y in operands]
        kind: Callable[..., Any] = communicator
        make: Callable[..., Shards] = _operand
        if any(map(lacks_elements, operands)):
            kind, make = AbstractCommunicator, _abstract_operand
        elif len(processes_of(value.sharding.mesh.flat)) > 1:
            note(f"{self.name}({', '.join(map(described, (*operands, *params)))})")
        shards = [make(y, target, self.name) for y, target in zip(operands, shardings, strict=True)]
        made = self._call_body(shards, kind, params)
        if not on_one:
            return made
        avals = self._avals(*map(_laid_out, operands, needed), *params)
        return _each_of(lambda value, part: part.divided(value, self.name), avals, made)

    def _call_body(self, shards: Sequence[Shards], kind: Callable[..., Any], params: Sequence[Any]) -> Any:
        """Calls the function with communicators of a kind."""
        along = functools.partial(MeshCommunicator, self.name, shards[0].value, kind=kind, explicit=not self.moves)
        return self.body(*shards, along, **self._named(params))

    def _divided(self, x: ShardedTensor, made: Aval, compute: Callable[[Any, Any], Any]) -> Shards:
        """Returns the shards of a result of x's shape that the first device computes of all elements."""
        first = as_sharding(made.sharding.mesh.flat[0], x.ndim, self.name)
        shards = (_abstract_operand if lacks_elements(x) else _operand)(x, first, self.name)
        alone = aval(made.shape, made.dtype, first, made.committed)
        found = shards.map(compute, shape=lambda shape: shape, dtype=made.dtype).assembled(alone)
        return found.divided(made, self.name)


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
    announce_reading(y)
    move.infer(caller)
    grid = value.grid
    return AbstractShards(value, [host_aval(grid.shape(k), value.dtype) for k in range(len(grid.devices))])


def _each_of(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Applies a function to the items of tuples, and returns one of the first's type; else, to the arguments."""
    if not isinstance(first, tuple):
        return function(first, *others)
    made = [function(*items) for items in zip(first, *others, strict=True)]
    return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
