"""Small results of composed operators where devices share a memory: one call of NumPy on whole buffers.

A composition takes several times as long as NumPy on a small array, because it calls several operators. What it would
return is inferred once for each combination of operator, parameters and avals; then only the elements are computed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardtensor.communication.transfer import whole_array
from shardtensor.communication.transfer_log import is_recording, recorded_by
from shardtensor.core import Op, Operands, Params, interpreting
from shardtensor.errors import ShardTensorError
from shardtensor.host.memory_pool import POOLED_FROM
from shardtensor.interpreters.execution.planning import kind_of
from shardtensor.interpreters.infer import INFER
from shardtensor.sharding.mesh import Mesh, default_mesh
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, tensor, without_elements
from shardtensor.tensor.value import Aval, whole_of


def small_result(op: Op, operands: Operands, params: Params) -> ShardedTensor | None:
    """Returns the result of an operator that has the implementation ``small``; None where its composition has to run.

    That is the case for large results, which it computes in blocks, for other backends and other operands, while
    transfers are recorded, and for every error, so that the composition raises it.
    """
    if is_recording() or not all(type(x) in _KNOWN for x in operands):
        return None
    try:
        value = _layout(op, default_mesh(), *params, *map(kind_of, operands))
    except (ShardTensorError, TypeError, OverflowError):  # A TypeError also for a parameter that is not hashable.
        return None
    if value is None:
        return None
    wholes = [_buffer(x, op.name) for x in operands]
    assert op.small is not None
    return tensor(value, Storage((whole_of(op.small(*wholes, *params), value),)))


def is_small(op: Op, operands: Operands, params: Params) -> bool:
    """Whether `small_result` computes the result for operands of these kinds, or of the kinds of these operands."""
    kinds = [x if isinstance(x, (Aval, HostAval, type)) else kind_of(x) for x in operands]
    try:
        return _layout(op, default_mesh(), *params, *kinds) is not None
    except (ShardTensorError, TypeError, OverflowError):
        return False


_KNOWN = frozenset((ShardedTensor, np.ndarray, bool, int, float, complex, type(None)))


@functools.lru_cache(4096, typed=True)
def _layout(op: Op, mesh: Mesh, *params_and_kinds: Any) -> Aval | None:
    """Returns the aval of the result; None if ``op.small`` does not apply. ``mesh`` is the default mesh."""
    count = len(op.params)
    params, kinds = params_and_kinds[:count], params_and_kinds[count:]
    tensors = [kind for kind in kinds if isinstance(kind, Aval)]
    if not tensors or not all(kind.backend.on_host and not kind.offloaded for kind in tensors):
        return None
    assert op.composite is not None
    with interpreting(INFER), recorded_by():
        value: Aval = op.composite(*map(_without_elements, kinds), *params)._aval
    return value if value.ndim and value.nbytes < POOLED_FROM and value.backend.on_host else None


def _without_elements(kind: Any) -> Any:
    if isinstance(kind, Aval):
        return without_elements(kind)
    if kind is None:  # An optional operand that is not given.
        return None
    return kind(1) if isinstance(kind, type) else np.empty(kind.shape, kind.dtype)


def _buffer(x: Any, caller: str) -> Any:
    if type(x) is not ShardedTensor:
        return x
    return whole_array(x, caller)
