"""The interpreter inside mapped functions on a simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.backend.abstract import AbstractArray
from shardtensor.backend.device import Device
from shardtensor.communication.abstract_communicator import as_tensor
from shardtensor.communication.transfer import abstract_operand
from shardtensor.core import Interpreter, Op, Operands, Params
from shardtensor.interpreters.eager import EAGER
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.storage import Donated
from shardtensor.tensor.tensor import ShardedTensor

_made: dict[Any, AbstractArray] = {}
"""Results of operators, as abstract arrays, by operator, parameters and operand kinds. All devices share them."""

_KEPT = 4096


class AbstractDeviceInterpreter(Interpreter):
    """The interpreter inside a mapped function on a simulated device, where every array is a `ShardedTensor`.

    Args:
        device: the simulated device on which the function is mapped.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Plans ``op`` and returns its result, a tensor without elements. The devices share the cached results."""
        if op.name == "asarray" and params[2] is None and not isinstance(params[0], ShardedTensor):
            # The array is created on this device, so no transfer is recorded.
            return as_tensor(abstract_operand(np.asarray(params[0], params[1])), self.device)
        operands = self._here(operands)
        key: Any = None
        if op.rule and not (op.view_spec or op.composite or op.algorithm or op.creates):
            kinds = [self._kind(x) for x in operands]
            key = None if None in kinds else (op, params, *map(type, params), *kinds)
            try:
                found = _made.get(key)
            except TypeError:  # A parameter is not hashable.
                key = found = None
            if found is not None:
                return as_tensor(found, self.device)
        result = EAGER.apply(op, operands, params)
        if key is not None and result.ndim and result.device == self.device:
            _made[key] = AbstractArray(result.shape, result.dtype)
            if len(_made) > _KEPT:
                _made.pop(next(iter(_made)))
        return result

    def _kind(self, x: Any) -> Any:
        """Returns the part of the cache key for one operand: shape and dtype of a tensor, otherwise the type.

        None for a tensor that is 0-d, donated or on other devices, whose plan is not cached.
        """
        if type(x) is not ShardedTensor:
            return type(x)
        plain = x.ndim and x.device == self.device and type(x._storage) is not Donated
        return (x.shape, x.dtype) if plain else None

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Plans a write of the result of ``op`` into ``out``."""
        EAGER.write(out, op, self._here(operands), params)

    def _here(self, operands: Operands) -> Operands:
        """Replaces host arrays by tensors on this device, as a real device converts them; no transfer is recorded.

        The operands are returned unchanged if a tensor among them is on other devices.
        """
        if not any(isinstance(x, (np.ndarray, np.generic)) for x in operands):
            return operands
        if not all(x.device == self.device for x in operands if type(x) is ShardedTensor):
            return operands
        return tuple([as_tensor(AbstractArray(x.shape, x.dtype), self.device) if is_data(x) else x for x in operands])
