"""How a distributed algorithm becomes the algorithm and the inference of an operator; see the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from shardtensor.backend.registry import in_other_process, processes_of
from shardtensor.communication.abstract_communicator import AbstractCommunicator
from shardtensor.communication.between_processes.processes import described, elsewhere, note
from shardtensor.communication.communicators import communicator
from shardtensor.communication.transfer import announce_reading, operand_transfer
from shardtensor.communication.transfer_log import announced
from shardtensor.core import OPS, Op, implements
from shardtensor.errors import ArgumentTypeError, ConcretizationError, type_text
from shardtensor.functions.algorithms.first_device import FirstDevice, alone, each_of, is_few
from shardtensor.functions.algorithms.shards import AbstractShards, MeshCommunicator, Shards, shards_of
from shardtensor.functions.placement.transfers import infer_transfer, transfer_to
from shardtensor.host.fp_errors import FloatingPointErrors
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.tensor import ShardedTensor, lacks_elements, without_elements
from shardtensor.tensor.value import Aval, aval


class Whole(NamedTuple):
    """The computation of all elements on one device, with the bits of the algorithm.

    Attributes:
        results: the aval of the result, or a tuple of those of several results.
        compute: ``compute(xp, *arrays)`` returns the result, or a tuple of several results, as new arrays.
        axes: the dimensions of the first operand along which the devices exchange elements. Where it is split along one
            of them, and the operands have few bytes, the first device computes the result and sends the others their
            parts, if all are in one process.
    """

    results: Any
    compute: Callable[..., Any]
    axes: Sequence[int] = ()


Messages: TypeAlias = Literal["combine", "move", "by elements"]
"""The purpose of the messages of an algorithm: they combine partial results, as the call requests; they move elements,
so that the transfer guard applies to them; or they move elements, and follow from them.
"""


def distributed(
    function: Callable[..., Any],
    *,
    whole: Callable[..., Whole | None] = lambda *avals, **params: None,
    layout: Callable[..., Sequence[NamedSharding]] | None = None,
    messages: Messages = "combine",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Attaches the decorated function to a declared operator as its algorithm and its inference; see the package.

    Operators may have further operands: the function receives the `Shards` of all of them. The operands are transferred
    to the sharding of the first one, or to the layout that the algorithm needs.

    Args:
        function: the function that the declaration returned.
        whole: ``whole(*avals, **params)`` returns the `Whole` that runs instead of the algorithm where the devices
            share a memory; None where the algorithm runs.
        layout: ``layout(*avals, **params)`` returns the sharding that the algorithm needs of each operand.
        messages: see `Messages`. Where they follow from elements, the algorithm runs where transfers are recorded, and
            the inference takes elements in random order.
    """

    def attach(body: Callable[..., Any]) -> Callable[..., Any]:
        algorithm = _Algorithm(OPS[function.__name__], body, whole, layout, messages != "combine")
        implements(function, "algorithm")(algorithm.run)
        implements(function, "infer")(algorithm.infer)
        if messages == "by elements":
            implements(function, "announcing")(algorithm.announcing)
        return body

    return attach


def with_host_function(
    function: Callable[..., Any],
    host: Callable[..., Any],
    result: Callable[..., Any],
    layout: Callable[..., Sequence[NamedSharding]] | None = None,
    messages: Messages = "move",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Attaches an algorithm, as `distributed` does, for which ``host(*arrays, **params)`` computes the result of whole
    host arrays. On other devices that share a memory, the first one runs the algorithm. ``result(*avals, **params)``
    returns the aval of the result, or a tuple of avals.
    """

    def attach(body: Callable[..., Any]) -> Callable[..., Any]:
        def whole(*avals: Aval, **params: Any) -> Whole:
            compute = (
                host if avals[0].backend.on_host else functools.partial(_on_one_device, function.__name__, body, avals)
            )
            return Whole(result(*avals, **params), lambda xp, *arrays: compute(*arrays, **params))

        return distributed(function, whole=whole, layout=layout, messages=messages)(body)

    return attach


def _on_one_device(caller: str, body: Callable[..., Any], values: Sequence[Aval], *arrays: Any, **params: Any) -> Any:
    """Runs an algorithm on the first device, which has the arrays of the operands with the given avals."""
    shards = [shards_of(alone(value, caller), (array,)) for value, array in zip(values, arrays, strict=True)]
    along = functools.partial(MeshCommunicator, caller, shards[0].value, kind=communicator)
    return each_of(lambda part: part.tensor()._storage.buffers[0], body(*shards, along, **params))


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
        whole: Callable[..., Whole | None],
        layout: Callable[..., Sequence[NamedSharding]] | None,
        moves: bool,
    ) -> None:
        self.op, self.name, self.body, self.whole, self.layout, self.moves = op, op.name, body, whole, layout, moves
        self.count = len(op.operands)
        # Parameters that are equal, such as 1 and True, differ in type.
        self._shardings = functools.lru_cache(1024, typed=True)(self._shardings_of)
        self._on_first = functools.lru_cache(1024, typed=True)(self._calls_on_first)

    # -- what follows from avals and parameters, which these methods take one after the other ------

    def _split(self, avals_and_params: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        names, count = self.op.params, self.count
        return avals_and_params[:count], dict(zip(names, avals_and_params[count:], strict=True))

    def _shardings_of(self, *avals_and_params: Any) -> Sequence[NamedSharding]:
        """Returns the sharding that the algorithm needs of each operand."""
        avals, params = self._split(avals_and_params)
        return [avals[0].sharding] * self.count if self.layout is None else self.layout(*avals, **params)

    def _calls_on_first(self, *avals_and_params: Any) -> tuple[FirstDevice | None, FirstDevice | None]:
        """Returns the call that the first device computes, and the one that also sends messages; None for those that
        the algorithm computes.
        """
        kinds, params = self._split(avals_and_params)
        few, shardings = is_few(*kinds), self._shardings(*avals_and_params)
        # Of operands of several processes, all processes choose alike, also the one that has all of the first.
        shares = kinds[0].memory is not None and not any(isinstance(k, Aval) and k.spans for k in kinds)
        if not shares and not few:
            return None, None
        whole = self.whole(*map(_laid_out, kinds, shardings), **params)
        if whole is None:
            return None, None
        first = functools.partial(FirstDevice, self.name, kinds, whole.results, whole.compute)
        sends = first() if few and any(kinds[0].grid.counts[d] > 1 for d in whole.axes) else None
        return (first(shardings) if shares else sends), sends

    # -- calls -------------------------------------------------------------------------------------

    def run(self, *args: Any) -> Any:
        """The algorithm of the operator."""
        operands, params, (here, _) = self._call(args, transfer_to)
        return self._run(operands, params) if here is None else here.run(operands)

    def announcing(self, *args: Any) -> Any:
        """The algorithm on every device, whose messages follow from elements."""
        operands, params, (_, few) = self._call(args, transfer_to)
        return self._run(operands, params) if few is None else few.run(operands)

    def infer(self, *args: Any) -> Any:
        """The inference of the operator."""
        operands, params, (_, few) = self._call(args, _inferred_transfer)
        if few is not None:
            return few.infer(operands)
        return each_of(lambda shards: shards.value, self._distribute(operands, params))

    def _call(self, args: Sequence[Any], place: Callable[..., ShardedTensor]) -> Any:
        """Returns the operands, of which the first one is a tensor, the parameters, and what runs on the first device.

        Raises:
            ArgumentTypeError: a parameter is not hashable.
        """
        if not isinstance(args[0], ShardedTensor):
            target = as_sharding(default_mesh(), np.ndim(args[0]), self.name)
            args = (place(args[0], target, self.name, committed=False), *args[1:])
        operands, params = args[: self.count], args[self.count :]
        try:
            return operands, params, self._on_first(operands[0]._aval, *map(_kind_of, operands[1:]), *params)
        except TypeError:  # What was found for these parameters is kept by their values.
            check_hashable(dict(zip(self.op.params, params, strict=True)))
            raise

    def _run(self, operands: Sequence[Any], params: Sequence[Any]) -> Any:
        with FloatingPointErrors(self.op.ufunc):  # Devices and blocks report together, as one call of NumPy does.
            return each_of(lambda shards: shards.tensor(), self._distribute(operands, params))

    def _distribute(self, operands: Sequence[Any], params: Sequence[Any]) -> Any:
        """Returns the `Shards` of the result, or those of several results."""
        shardings = self._shardings(*map(_kind_of, operands), *params)
        lacking = any(map(lacks_elements, operands))
        if not lacking and len(processes_of(shardings[0].mesh.flat)) > 1:
            note(f"{self.name}({', '.join(map(described, (*operands, *params)))})")
        shards = [_shards(y, target, self.name, lacking) for y, target in zip(operands, shardings, strict=True)]
        devices = shardings[0].mesh.flat
        if lacking or not in_other_process(devices):
            return self._by_messages(shards, AbstractCommunicator if lacking else communicator, params)
        try:
            with announced():
                return self._by_messages([_inferred_shards(x.value) for x in shards], AbstractCommunicator, params)
        except ConcretizationError:
            raise elsewhere(devices) from None

    def _by_messages(self, shards: Sequence[Shards], kind: Callable[..., Any], params: Sequence[Any]) -> Any:
        along = functools.partial(MeshCommunicator, self.name, shards[0].value, kind=kind, explicit=not self.moves)
        return self.body(*shards, along, **dict(zip(self.op.params, params, strict=True)))


def _inferred_transfer(x: Any, sharding: NamedSharding, caller: str, committed: bool) -> ShardedTensor:
    return without_elements(infer_transfer(x, sharding, caller, committed=committed))


def _kind_of(y: Any) -> Aval | HostAval:
    return y._aval if isinstance(y, ShardedTensor) else host_aval(y.shape, y.dtype)


def _laid_out(kind: Aval | HostAval, sharding: NamedSharding) -> Aval:
    """Returns the aval of an operand in the sharding that the algorithm needs."""
    return aval(kind.shape, kind.dtype, sharding, isinstance(kind, Aval) and kind.committed)


def _shards(y: Any, sharding: NamedSharding, caller: str, lacking: bool) -> Shards:
    """Returns the shards of an operand in the sharding that the algorithm needs; if elements are ``lacking``, their
    shapes and dtypes, and records the transfer if a log is active.
    """
    kind = _kind_of(y)
    value, move = _laid_out(kind, sharding), operand_transfer(kind, sharding)
    if not lacking:
        return shards_of(value, move.shards(y, caller))
    announce_reading(y)
    move.infer(caller)
    return _inferred_shards(value)


def _inferred_shards(value: Aval) -> Shards:
    grid = value.grid
    return AbstractShards(value, [host_aval(grid.shape(k), value.dtype) for k in range(len(grid.devices))])
