"""Conversion of arrays of any library, scalars and nested lists to tensors and to host arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.registry import array_backend
from shardtensor.core import implements, operator
from shardtensor.errors import ShapeError, type_text
from shardtensor.functions.placement.transfers import infer_transfer, reshard_to, transfer_to
from shardtensor.functions.standard.joining import stack
from shardtensor.sharding.layout import Where, as_sharding
from shardtensor.sharding.mesh import default_mesh
from shardtensor.tensor.nested_lists import tensors_in
from shardtensor.tensor.operands import host_array, no_array, sharded_dtype, truth_of
from shardtensor.tensor.tensor import (
    ShardedTensor,
    mark_array,
)
from shardtensor.tensor.value import Aval, aval

_DERIVATIVES = "of_movement"


@operator(
    operands=("obj",), trees=("obj",), tags=("any dtype", "keeps arrays", "reads no host arrays", "takes partial sums")
)
def asarray(
    obj: Any,
    /,
    dtype: npt.DTypeLike | None = None,
    *,
    device: Where | None = None,
    copy: bool | None = None,
    out_sharding: Where | None = None,
) -> ShardedTensor:
    """Converts an array, a scalar or nested lists of scalars or of arrays to a tensor.

    Lists of tensors are stacked on the devices of the tensors, as by `shardtensor.stack`. (`shardtensor.unshard` joins
    the list of shards that a map returns.) Tensors without dimensions in a list are read, and count as scalars.

    Args:
        obj: a tensor, a host or backend array, a scalar, nested lists of scalars, tensors and host arrays, or an object
            that NumPy's ``__array__`` converts to a host array: one of pandas, xarray, Pillow or another library.
        dtype: the dtype of the result; that of ``obj`` by default.
        device, out_sharding: a Device, Mesh, NamedSharding or P (see `shardtensor.functions.standard.creation`). By
            default a tensor keeps its sharding, and stacked ones have that of `shardtensor.stack`; anything else is
            sharded over the default mesh and uncommitted, so that operators transfer it to the devices of operands that
            were placed explicitly.
        copy: None and True copy a host array; False shares its memory, or raises where that is impossible. Do not write
            to the host array then: the writes would be visible in the tensor. Without ``device``, a tensor that has
            the dtype is returned itself, unless ``copy=True``, which returns an independent one.

    Raises:
        ArgumentTypeError: ``obj`` is not an array, a scalar or nested lists of scalars and arrays, or cannot be
            converted to ``dtype``.
        RangeError: ``obj`` contains an integer that ``dtype`` cannot represent (an OverflowError).
        ShapeError: nested lists have different lengths, arrays in a list differ in shape, or ``copy=False`` and memory
            cannot be shared.
        ShardingError: the spec of ``device`` has more dimensions than ``obj``.

    >>> st.asarray([[1, 2], [3, 4]], dtype="float32").dtype
    dtype('float32')
    >>> x = st.ones(3)
    >>> st.asarray([x, 2 * x]).tolist()
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """


@implements(asarray, "composite")
def _asarray_in_place(obj: Any, dtype: Any, device: Where | None, copy: bool | None) -> Any:
    if _has_arrays(obj) and copy is not False:
        joined = _stacked(obj, None if dtype is None else sharded_dtype(dtype))
        return joined if device is None else asarray(joined, device=device)
    if not isinstance(obj, ShardedTensor) or device is not None:
        return NotImplemented
    if dtype is None or obj.dtype == sharded_dtype(dtype):
        return mark_array(obj.copy()) if copy is not None and truth_of(copy, "copy") else obj
    _check_dtype(obj, sharded_dtype(dtype), copy)
    return obj.astype(dtype)


def _has_arrays(obj: Any) -> bool:
    """Whether an object is nested lists that contain tensors with dimensions; others in lists are read as scalars."""
    return isinstance(obj, (list, tuple)) and any(x.ndim for x in tensors_in(obj))


def _stacked(obj: Any, dtype: np.dtype[Any] | None) -> Any:
    """Returns nested lists that contain tensors with dimensions as one tensor, and another object as a tensor or a host
    array.

    Elements are converted to ``dtype`` before they are stacked, as by `host_array`. Host arrays are put where the first
    tensor beside them is.
    """
    if _has_arrays(obj):
        items = [_stacked(item, dtype) for item in obj]
        first = next(x for x in items if isinstance(x, ShardedTensor))
        return stack([_put_beside(first, x) for x in items])
    x = obj if isinstance(obj, ShardedTensor) else host_array(_by_protocol(obj, None), "asarray", dtype)
    return x if dtype is None or x.dtype == dtype else x.astype(dtype)


def _put_beside(first: ShardedTensor, x: Any) -> Any:
    if isinstance(x, ShardedTensor) or x.shape != first.shape:  # `stack` reports other shapes.
        return x
    return transfer_to(x, first.sharding, "asarray", committed=first.committed)


def _check_dtype(x: Any, dtype: np.dtype[Any], copy: bool | None) -> None:
    if copy is False and x.dtype != dtype:
        raise ShapeError(f"asarray: copy=False, and dtype {dtype} of an array of {x.dtype} needs a copy")


def _array_and_aval(obj: Any, dtype: Any, device: Where | None, copy: bool | None) -> tuple[Any, Aval]:
    """Returns ``obj`` as a tensor or a host array, of its own dtype, and the aval of the result, after all checks."""
    result_dtype = None if dtype is None else sharded_dtype(dtype)
    if copy is False and isinstance(obj, (list, tuple, bool, int, float, complex)):
        raise ShapeError(f"asarray: copy=False, and {type_text(obj)} has no memory to share; wanted an array")
    if copy is False and not isinstance(obj, ShardedTensor) and (backend := array_backend(obj)):
        raise ShapeError(
            f"asarray: copy=False, and an array of the backend {backend.name!r} is copied; st.from_dlpack(x, "
            "copy=False) shares its memory where that is possible"
        )
    x = obj if isinstance(obj, ShardedTensor) else host_array(_by_protocol(obj, copy), "asarray", result_dtype)
    result_dtype = x.dtype if result_dtype is None else result_dtype
    _check_dtype(x, result_dtype, copy)
    if isinstance(x, ShardedTensor) and device is None:
        return x, aval(x.shape, result_dtype, x.sharding, x.committed)
    target = as_sharding(default_mesh() if device is None else device, x.ndim, "asarray")
    value = aval(x.shape, result_dtype, target, device is not None)
    if copy is False and not isinstance(x, ShardedTensor) and not value.backend.on_host:
        raise ShapeError(f"asarray: copy=False, and {target.mesh!r} does not share the host's memory")
    return x, value


def _by_protocol(obj: Any, copy: bool | None) -> Any:
    """Returns the host array of an object that is an array by `__array__` only, such as one of pandas."""
    if isinstance(obj, (np.ndarray, np.generic)) or not hasattr(type(obj), "__array__") or array_backend(obj):
        return obj
    try:
        return np.asarray(obj, copy=False if copy is False else None)
    except ValueError as error:
        raise ShapeError(f"asarray: {error}") from None


@implements(asarray, "infer")
def _infer_asarray(obj: Any, dtype: Any, device: Where | None, copy: bool | None) -> Aval:
    x, value = _array_and_aval(obj, dtype, device, copy)
    if device is not None or not isinstance(x, ShardedTensor):
        infer_transfer(x, value.sharding, "asarray", value.committed, False, None)
    return value


@implements(asarray, "algorithm")
def _asarray(obj: Any, dtype: Any, device: Where | None, copy: bool | None) -> ShardedTensor:
    x, value = _array_and_aval(obj, dtype, device, copy)
    x = x if x.dtype == value.dtype else x.astype(value.dtype)
    if not isinstance(x, ShardedTensor):
        return reshard_to(x, value.sharding, "asarray", committed=value.committed, may_alias=copy is False)
    return mark_array(x) if device is None else reshard_to(x, value.sharding, "asarray")


@implements(asarray, "kernel")
def _asarray_on_device(xp: Any, context: None, obj: Any, *, dtype: Any, copy: bool | None) -> Any:
    if obj is None:
        raise no_array("asarray")
    return xp.asarray(obj, dtype=dtype, copy=copy)
