"""The interpreter inside of a mapped function on a device that does not exist."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.backend.abstract import AbstractArray
from shardtensor.backend.device import Device
from shardtensor.communication.abstract_communicator import as_tensor
from shardtensor.communication.transfer import abstract_operand
from shardtensor.core import Op, Operands, Params
from shardtensor.interpreters.eager import apply
from shardtensor.interpreters.eager import into as write_into
from shardtensor.tensor.operands import is_data
from shardtensor.tensor.storage import Donated
from shardtensor.tensor.tensor import ShardedTensor

_made: dict[Any, AbstractArray] = {}
"""What operators have made of operands of these kinds."""

_KEPT = 4096


class AbstractDeviceInterpreter:
    """The interpreter inside of a mapped function on a simulated device: there are tensors alone."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Plans ``op``. What one device has planned holds for the others."""
        if op.name == "asarray" and params[2] is None and not isinstance(params[0], ShardedTensor):
            return as_tensor(
                abstract_operand(np.asarray(params[0], params[1])), self.device
            )  # it comes from nowhere else
        operands = self._here(operands)
        key: Any = None
        if op.rule and not (op.window or op.composite or op.algorithm or op.creates):
            kinds = [self._kind(x) for x in operands]
            key = None if None in kinds else (op, params, *map(type, params), *kinds)
            try:
                found = _made.get(key)
            except TypeError:  # a parameter that cannot be hashed
                key = found = None
            if found is not None:
                return as_tensor(found, self.device)
        result = apply(op, operands, params)
        if key is not None and result.ndim and result.device == self.device:
            _made[key] = AbstractArray(result.shape, result.dtype)
            if len(_made) > _KEPT:
                _made.pop(next(iter(_made)))
        return result

    def _kind(self, x: Any) -> Any:
        """What a plan depends on of an operand; None if it is not plainly here."""
        if type(x) is not ShardedTensor:
            return type(x)
        plain = x.ndim and x.device == self.device and type(x._storage) is not Donated
        return (x.shape, x.dtype) if plain else None

    def into(self, out: Any, op: Op, operands: Operands, params: Params) -> None:
        """Plans a write."""
        write_into(out, op, self._here(operands), params)

    def _here(self, operands: Operands) -> Operands:
        """Host arrays beside what is on the device: they are there, as arrays in mapped functions are."""
        if not any(isinstance(x, (np.ndarray, np.generic)) for x in operands):
            return operands
        if not all(x.device == self.device for x in operands if type(x) is ShardedTensor):
            return operands
        return tuple([as_tensor(AbstractArray(x.shape, x.dtype), self.device) if is_data(x) else x for x in operands])
