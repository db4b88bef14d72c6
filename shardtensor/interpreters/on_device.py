"""The interpreter inside mapped functions: operators run on the current device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.functions import function_of
from shardtensor.backend.protocol import Backend
from shardtensor.backend.registry import backend_of
from shardtensor.backend.small_floats import is_element
from shardtensor.core import Interpreter, Op, Operands, Params, execute, outermost
from shardtensor.errors import ArgumentTypeError
from shardtensor.host.memory_pool import check_addressable
from shardtensor.interpreters.calls import composed
from shardtensor.interpreters.execution.plan import result_dtype
from shardtensor.sharding.layout import Shape, as_sharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.rules import name_sizes, parse
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import as_operand, host_aval
from shardtensor.tensor.pytree import leaves
from shardtensor.tensor.tensor import SCALARS, ShardedTensor
from shardtensor.tensor.value import Aval, aval

_AVALS = 1024
"""The maximum number of avals that an interpreter keeps."""


class DeviceInterpreter(Interpreter):
    """The interpreter inside a mapped function: operators on arrays of the backend return arrays of the device.

    Calls with a `ShardedTensor`, such as one that the function closes over, and calls with ``device=`` are executed by
    the eager interpreter.

    Attributes:
        device: the current device.
        backend: the backend of the device.
        sharding: the sharding of a 0-d array on the device.
        avals: the avals of arrays of the device, by shape and dtype; see `aval_of`.
        stateless: whether the backend has neither a current device nor modes.
        records: the class of the backend's arrays, if its library records gradients.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.backend: Backend = backend_of(device)
        self.sharding = as_sharding(device, 0, "map")
        backend_type = type(self.backend)
        self.stateless = backend_type.on is Backend.on and backend_type.capture_modes is Backend.capture_modes
        self.records = self.backend.records
        self.avals: dict[Any, Aval] = {}

    def aval_of(self, array: Any) -> Aval | None:
        """Returns the aval of a tensor that consists of an array of the device; None if tensors cannot hold the array,
        one of NumPy's of text or objects.
        """
        key = array.shape, array.dtype  # The dtype of the array library: its hash takes no conversion.
        value = self.avals.get(key)
        if value is None:
            if self.backend.on_host and not is_element(array.dtype):
                return None
            if len(self.avals) >= _AVALS:
                self.avals.clear()
            value = self.avals[key] = aval(tuple(array.shape), self.backend.dtype_of(array), self.sharding, True)
        return value

    def apply(self, op: Op, operands: Operands, params: Params, /) -> Any:
        """Runs ``op`` on the device and returns an array of its backend."""
        if "spmd" in op.tags:
            if self.records is not None and op.parts.recorded is not None:
                arrays = operands if type(operands[0]) is self.records else leaves(operands)
                if self.backend.is_recorded(arrays):
                    return op.parts.recorded(self.backend, *operands, *params)
            return op.parts.algorithm(*operands, *params) if op.parts.algorithm else composed(op, operands, params)
        named = dict(zip(op.params, params, strict=True))
        named.pop("layout", None)  # An array of one device has no layout, and `place_result` then raises an error.
        elsewhere = named.pop("device", None) is not None or (op.parts.algorithm and not op.parts.kernel)
        if elsewhere or any(type(x) is ShardedTensor for x in (*operands, *params)):
            return execute(op, operands, params)
        if op.parts.composite:
            result = composed(op, operands, params)
            if result is not NotImplemented:
                return result
        scalars_alone = not op.creates and all(x is None or type(x) in SCALARS for x in operands)
        names = op.operands * len(operands) if op.signature.variadic else op.operands
        arrays = [
            x if name in op.signature.trees else self._array(x, op, name, scalars_alone)
            for name, x in zip(names, operands, strict=False)
        ]
        return self._run(op, arrays, named)

    def write(self, out: Any, op: Op, operands: Operands, params: Params, /) -> None:
        """Writes into a `ShardedTensor`, such as one that the function closes over, as the eager interpreter does."""
        outermost().write(out, op, operands, params)

    def _array(self, x: Any, op: Op, name: str, also_scalars: bool) -> Any:
        if (type(x) in SCALARS and not also_scalars) or self.backend.is_array(x):
            return x
        if x is None:
            if name not in op.signature.optional:
                raise ArgumentTypeError(f"{op.name}: {name} is None; wanted a tensor, an array or a scalar")
            return x
        host = as_operand(x, op.name)
        return self.backend.from_host(np.asarray(host), self.device)

    def _run(self, op: Op, arrays: Sequence[Any], named: dict[str, Any]) -> Any:
        xp = self.backend.xp
        if op.parts.kernel is None:
            function = function_of(self.backend, op.name)
            return function(list(arrays), **named) if op.signature.variadic else function(*arrays, **named)
        if op.parts.algorithm:
            return op.parts.kernel(xp, None, *arrays, **named)
        kinds: list[Any] = [
            x if x is None else type(x) if type(x) in SCALARS else host_aval(tuple(x.shape), self.backend.dtype_of(x))
            for x in arrays
        ]
        shapes = [k.shape if hasattr(k, "shape") else () for k in kinds]
        if op.creates:
            shape, dtype = op.rule(kinds, **named)
            check_addressable(shape, dtype, op.error_name)
        else:
            rule = op.rule(shapes, **named) if callable(op.rule) else op.rule
            shape = rule[1] if isinstance(rule, tuple) else _shape_by(rule, op, shapes)
            dtype = result_dtype(op, kinds, named) if shapes else None
            if isinstance(rule, tuple) and dtype is not None:
                check_addressable(shape, dtype, op.error_name)
        return op.parts.kernel(xp, ShardContext.everywhere(shape, shapes, dtype), *arrays, **named)


def _shape_by(rule: Any, op: Op, shapes: Sequence[Shape]) -> Shape:
    """Returns the shape of the result that the rule of an operator gives."""
    if not isinstance(rule, str):
        return shapes[0] if shapes else ()
    parsed = parse(rule, tuple(map(len, shapes)), op.operands)
    sizes = name_sizes(parsed, shapes)
    return tuple([1 if name == "1" else sizes.get(name, 0) for name in parsed.result])


@functools.cache
def on_submesh(submesh: Mesh) -> DeviceInterpreter:
    """Returns the interpreter of a mesh of one device."""
    return DeviceInterpreter(submesh.flat[0])
