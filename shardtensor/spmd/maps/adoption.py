"""Adoption: the arrays that mapped functions return become tensors, without a copy where nothing else writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.communication.array_communicator import received
from shardtensor.communication.transfer_log import record_copy
from shardtensor.interpreters.on_device import DeviceInterpreter
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.ownership import Lent
from shardtensor.tensor.pytree import map_leaves
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import tensor, tensor_of


def adopt_leaves(held: list[Any], here: DeviceInterpreter, caller: str, lent: Sequence[Lent]) -> Any:
    """Returns the pytree that a call returned, the only item of a list, with tensors in place of arrays."""
    results: list[Any] = []
    tree = map_leaves(lambda leaf: results.append(leaf) or len(results) - 1, held.pop())  # type: ignore[func-returns-value]
    for n in range(len(results)):
        if here.backend.is_array(results[n]):
            leaf = [results[n]]
            results[n] = None
            results[n] = adopt(leaf, here, caller, lent)
        elif is_data(results[n]):  # The remaining arrays are on the host.
            array = here.backend.from_host(np.asarray(results[n]), here.device)
            record_copy(caller, int(array.nbytes), here.device)
            value = here.aval_of(array)
            assert value is not None
            results[n] = tensor_of(value, (array,), ([],))
    return map_leaves(results.__getitem__, tree)


def adopt(held: list[Any], here: DeviceInterpreter, caller: str, lent: Sequence[Lent]) -> Any:
    """Returns an array that a call returned, the only item of a list, as a tensor, if tensors can hold it."""
    backend = here.backend
    value = here.avals.get((held[0].shape, held[0].dtype)) or here.aval_of(held[0])
    if value is None:
        return held[0]
    if type(held[0]) is not np.ndarray:
        held[0] = backend.asarray(held[0])
    # Lent arrays, and results of collectives, are views.
    own = held[0].base is None if backend.on_host else backend.owns(held[0])
    if not own:
        for one in lent:
            # The function may have changed the shape of the view that it received.
            if one.exported is held[0] and backend.is_whole(held[0], one.array):
                return tensor(value, one.storage_of(one.array))
        result = received(backend, held[0])
        if result is not None:
            # The result of a collective is never written in place, since all programs may hold it.
            return tensor_of(value, (result,), (None,))
    array, copied = backend.adopt(held, () if own else [one.array for one in lent])
    held.clear()
    if copied:
        record_copy(caller, int(array.nbytes), here.device)
    if copied or own:
        return tensor_of(value, (array,), ([],))
    memory = backend.memory_of(array)
    holder = next((one for one in lent if memory is not None and backend.memory_of(one.array) == memory), None)
    if memory is not None and holder is None:
        return tensor_of(value, (array,), ([],))
    mine = backend.view(array, ...)  # The function may have kept the array, and can set its shape later.
    return tensor(value, holder.storage_of(mine) if holder else Storage((mine,), (None,)))
