"""Operators with one operand and several results, which each device computes from its own part.

The last dimensions of the operand, those of the matrices, are not split: a split moves to another dimension. All others
keep their sharding in each result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.registry import array_backend, backend_of, is_remote
from shardtensor.backend.remote import RemoteArray
from shardtensor.communication.messages import as_dtype
from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import OperandTransfer, announce_reading, operand_transfer
from shardtensor.core import OPS, implements
from shardtensor.sharding.layout import NamedSharding, Shape, as_sharding
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.sharding.rules import parse, propagate
from shardtensor.sharding.spec import P
from shardtensor.tensor.operands import HostAval, host_aval
from shardtensor.tensor.tensor import ShardedTensor, check_not_donated, tensor, tensor_of
from shardtensor.tensor.value import Aval, aval, memory_kind, whole_of

Result = tuple[Shape, np.dtype[Any]]
"""The last dimensions of a result, and its dtype."""


_Layout = tuple[OperandTransfer, Sequence[Aval]]
"""The transfer of the operand, and the avals of the results."""


def several_results(
    function: Callable[..., Any], form: Callable[..., Any], results: Callable[..., Sequence[Result]]
) -> Callable[[Callable[..., Sequence[Any]]], Callable[..., Sequence[Any]]]:
    """Attaches the decorated function, ``kernel(xp, context, array, **params)``, to a declared operator.

    Args:
        function: the function that the declaration returned.
        form: makes the result of the tensors, which are its arguments.
        results: ``results(shape, dtype, **params)`` returns a `Result` for each of them, and raises a ShardTensorError
            for operands that the operator does not take.
    """
    op = OPS[function.__name__]

    @functools.lru_cache(1024)
    def layout(value: Aval | HostAval, mesh: Mesh, params: tuple[Any, ...]) -> _Layout:
        items = results(value.shape, value.dtype, **dict(zip(op.params, params, strict=True)))
        placed = isinstance(value, Aval)
        sharding = value.sharding if isinstance(value, Aval) else as_sharding(mesh, value.ndim, op.name)
        rule = parse("... i! j! -> ...", (value.ndim,), op.operands)
        plan = propagate(
            rule, [value.shape], [sharding.spec.chains_of(value.ndim)], [value.nbytes], mesh.shape, combines=False
        )
        memory = memory_kind([value] if isinstance(value, Aval) else ())
        target = NamedSharding(mesh, P(*plan.operands[0]), memory_kind=memory)
        avals = [
            aval(
                (*plan.shape, *shape),
                dtype,
                NamedSharding(mesh, P(*plan.result), memory_kind=memory),
                placed and value.committed,  # type: ignore[union-attr]
            )
            for shape, dtype in items
        ]
        return operand_transfer(value, target), avals

    def layout_of(x: Any, params: tuple[Any, ...]) -> _Layout:
        if type(x) is ShardedTensor:
            return layout(x._aval, x._aval.sharding.mesh, params)
        return layout(host_aval(x.shape, x.dtype), default_mesh(), params)

    def algorithm(x: Any, *params: Any) -> Any:
        x = x if type(x) is ShardedTensor else np.asarray(x)
        transfer, avals = layout_of(x, params)
        named = dict(zip(op.params, params, strict=True))
        backend, (kernel,) = avals[0].backend, bodies
        if backend.on_host:
            arrays = kernel(backend.xp, None, transfer.whole(x, op.name), **named)
            return form(*[tensor_of(v, (whole_of(a, v),)) for a, v in zip(arrays, avals, strict=True)])
        rows = []
        for device, shard in zip(avals[0].sharding.mesh.flat, transfer.shards(x, op.name), strict=True):
            stack = tuple(shard.shape[:-2])
            shapes = [(*stack, *v.shape[len(stack) :]) for v in avals]
            if is_remote(device):
                rows.append([RemoteArray(shape, v.dtype) for shape, v in zip(shapes, avals, strict=True)])
                continue
            backend = backend_of(device)
            with backend.on(device):
                if all(0 in shape for shape in shapes):  # Not every library takes stacks of no matrices.
                    pairs = zip(shapes, avals, strict=True)
                    rows.append([backend.xp.empty(shape, dtype=v.dtype) for shape, v in pairs])
                else:
                    outputs = kernel(backend.xp, None, shard, **named)
                    rows.append([as_dtype(backend, a, v.dtype) for a, v in zip(outputs, avals, strict=True)])
        return form(
            *[tensor(v, offloaded(v, column)) for v, column in zip(avals, zip(*rows, strict=True), strict=True)]
        )

    def infer(x: Any, *params: Any) -> Any:
        x = x if type(x) is ShardedTensor else np.asarray(x)
        check_not_donated(x)
        transfer, avals = layout_of(x, params)
        announce_reading(x)
        transfer.infer(op.name)
        return form(*avals)

    def attach(body: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        bodies.append(body)

        @implements(function, "kernel")
        def on_device(xp: Any, context: None, x: Any, **params: Any) -> Any:
            """Runs in a mapped function, where arrays are those of the backend."""
            backend = array_backend(x)
            results(tuple(x.shape), backend.dtype_of(x) if backend else x.dtype, **params)
            return form(*body(xp, None, x, **params))

        return body

    bodies: list[Callable[..., Sequence[Any]]] = []
    implements(function, "algorithm")(algorithm)
    implements(function, "infer")(infer)
    return attach
