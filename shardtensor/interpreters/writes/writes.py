"""Writes: ``x[i] = v``, ``x += y`` and ``out=``.

A write binds the handle to a new value, which reuses the memory of the old one if its ownership is exclusive.

It first takes the value out of the handle, so that no reader can obtain a reference to it during the write, and then
checks whether other references exist; if so, the buffers or shards to be written are copied first. Everything that can
fail is done before the first element changes: shapes, dtypes and indices are checked, transfers are complete, and
copies are made. Then one device of each cell writes the cell from elements in its own memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import current_device
from shardtensor.backend.small_floats import is_element, is_small_float
from shardtensor.communication.exported_storage import Exported
from shardtensor.communication.offload import offloaded
from shardtensor.communication.transfer import announce_reading
from shardtensor.core import OPS, Op, Operands, Params, call, execute, implements
from shardtensor.errors import ArgumentTypeError, ShapeError
from shardtensor.functions.standard.indexing import put, setitem
from shardtensor.host import blockwise
from shardtensor.host.signals import Interrupts
from shardtensor.host.units import counted
from shardtensor.interpreters.execution.plan import Kind, result_dtype
from shardtensor.interpreters.execution.plan_cache import run
from shardtensor.interpreters.execution.planning import check_integers, kind_of
from shardtensor.interpreters.views.advanced_indexing import inferred_index
from shardtensor.interpreters.views.device_indices import indices_on_device, shape_of_index
from shardtensor.interpreters.views.index_entries import AdvancedIndex
from shardtensor.interpreters.writes.scattered_on_device import ScatteredOnDevice
from shardtensor.interpreters.writes.write_ops import Elementwise, Masked, Scattered, WriteOp, is_view
from shardtensor.interpreters.writes.write_transaction import WriteTransaction
from shardtensor.sharding.index import canonical, has_ellipsis
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.view_spec import ViewSpec, part_dtype
from shardtensor.tensor.nested_lists import converted
from shardtensor.tensor.operands import as_operand
from shardtensor.tensor.ownership import exclusive_arrays
from shardtensor.tensor.storage import DeferredStorage, PendingWrite, Storage
from shardtensor.tensor.tensor import (
    SCALARS,
    ShardedTensor,
    current_storage,
    lacks_elements,
    mark_array,
    tensor,
    tensor_of,
    without_elements,
    write_state_of,
)
from shardtensor.tensor.value import Aval

Apply = Callable[[Op, Operands, Params], Any]


def write(out: ShardedTensor, op: Op, operands: Operands, params: Params, apply: Apply) -> None:
    """Writes the result of ``op`` into a tensor, with its shape and cast to its dtype.

    Assignments and ufuncs are computed in place; the results of other operators are computed by ``apply`` and then
    written.

    Args:
        out: the tensor; if it is a view, its base is written.
        op: the operator.
        operands: the operands of ``op``.
        params: the values of the other parameters of ``op``.
        apply: the function that executes an operator that is not computed in place.

    Raises:
        ShapeError, ArgumentTypeError, IndexingError: NumPy would not write the result either; ``out`` is unchanged.
    """
    out._make_writable()
    if "assigns" in op.tags and _write_directly(out, operands[1], operands[2]):
        return
    base, view_spec = out._base_and_view()
    if "assigns" in op.tags:
        _, value, index = operands
        _assign_at(base, view_spec, value, inferred_index(index), out.dtype)
    elif op.is_ufunc and not _may_fail_late(op, out.dtype) and not _is_in_float32((out, *operands)):
        operands = _checked_update(op, operands, out)
        if out.size:
            _write(base, view_spec, Elementwise(op.name, op.name, operands, out.dtype))
    else:
        result = apply(op, operands, params)
        check_result(op.name, result, out.shape, out.dtype)
        if result.size:
            _write(base, view_spec, Elementwise(op.name, None, (result,), out.dtype))


def _may_fail_late(op: Op, dtype: np.dtype[Any]) -> bool:
    return "fails late" in op.tags and dtype.kind in "iu"


def check_result(name: str, result: ShardedTensor, shape: Shape, dtype: np.dtype[Any]) -> None:
    """Raises ShapeError or ArgumentTypeError if a result cannot be written into elements of that shape and dtype."""
    if result.shape != shape:
        raise ShapeError(f"out has shape {shape} and the result {result.shape}; wanted equal shapes")
    _check_cast(name, result.dtype, dtype)


def _assign_at(base: ShardedTensor, view_spec: ViewSpec, value: Any, index: Any, dtype: np.dtype[Any]) -> None:
    """Writes ``view[index] = value``, where the view is the part ``view_spec`` of ``base``."""
    assignment = _assignment(base, view_spec, value, index, dtype)
    if assignment is None:
        return
    target, write_op = assignment
    # Python ends ``x[i] += v`` with ``x[i] = x[i]``, which needs no write.
    if not (type(write_op) is Elementwise and is_view(value, base, target)):
        _write(base, target, write_op)


def _assignment(
    base: ShardedTensor, view_spec: ViewSpec, value: Any, index: Any, dtype: np.dtype[Any]
) -> tuple[ViewSpec, WriteOp] | None:
    """Returns the part that ``view[index] = value`` writes and the write op, after all checks; None if it is empty."""
    at = canonical(index, view_spec.shape)
    if at is None:
        one = _is_scalar(value) or (type(value) is ShardedTensor and not value.ndim)
        if one and _is_mask(index, view_spec.shape):
            value, mask = _checked_value(value, dtype, ()), as_operand(index, "setitem")
            return (view_spec, Masked(mask, len(view_spec.shape), value, dtype)) if view_spec.size else None
        on_host = lacks_elements(base) or _is_aliased(base, index)
        indices = None if on_host else indices_on_device(base._aval, view_spec.shape, index)
        if indices is None:
            chosen = AdvancedIndex(index, view_spec.shape)
        else:
            chosen = shape_of_index(base._aval.backend, indices, view_spec.shape)
        one_mask = (chosen.is_mask or _is_mask(index, view_spec.shape)) and not chosen.rest
        value = _checked_value(value, dtype, chosen.shape, one_mask=one_mask)
        if 0 not in chosen.shape and indices is not None:
            return view_spec, ScatteredOnDevice(base._aval, indices, chosen, value, dtype)
        if 0 not in chosen.shape:
            return view_spec, Scattered("setitem", None, chosen, [value], dtype)
        chosen.check()
        return None
    target = view_spec.at(at)
    one_element = not target.shape and not has_ellipsis(index)
    value = _checked_value(value, dtype, target.shape, basic=True, one_element=one_element)
    return (target, Elementwise("setitem", None, (value,), dtype)) if target.size else None


@implements(setitem, "algorithm", "infer")
def _setitem(x: Any, value: Any, index: Any) -> ShardedTensor:
    new = _duplicate(x if isinstance(x, ShardedTensor) else call("asarray", x))
    write(new, OPS["setitem"], (new, value, index), (), run)
    return new


@implements(put, "algorithm", "infer")
def _put(x: Any, value: Any, view_spec: ViewSpec) -> ShardedTensor:
    if not isinstance(x, ShardedTensor):  # An array of a device, in a map of a program that a jit has traced.
        x = execute(OPS["asarray"], (x,), (None, current_device(), None))
    new = _duplicate(x)
    dtype = part_dtype(new.dtype, view_spec.part)
    check_result("setitem", value, view_spec.shape, dtype)
    if view_spec.size:
        _write(new, view_spec, Elementwise("setitem", None, (value,), dtype))
    return new


def _duplicate(x: ShardedTensor) -> ShardedTensor:
    """Returns an array with the value of ``x``, of which a write copies the memory that it shares with ``x``."""
    storage = x._storage
    if lacks_elements(x):
        return mark_array(without_elements(x._aval))
    return mark_array(tensor_of(x._aval, storage.buffers))


def _is_mask(index: Any, shape: Shape) -> bool:
    """Whether an index is a single mask of the first dimensions of ``shape``."""
    if not isinstance(index, (ShardedTensor, np.ndarray)) or index.dtype.kind != "b":
        return False
    return 0 < index.ndim <= len(shape) and index.shape == shape[: index.ndim]


def _is_aliased(base: ShardedTensor, index: Any) -> bool:
    """Whether an array of an index has elements of the tensor that is written: it must not change while it is read."""
    entries = index if isinstance(index, tuple) else (index,)
    return any(isinstance(e, ShardedTensor) and e._base_and_view()[0] is base for e in entries)


def _is_scalar(value: Any) -> bool:
    return type(value) in SCALARS or (isinstance(value, (np.generic, np.ndarray)) and not value.ndim)


def _checked_value(
    value: Any,
    dtype: np.dtype[Any],
    shape: Shape,
    *,
    basic: bool = False,
    one_element: bool = False,
    one_mask: bool = False,
) -> Any:
    """Converts a value to a tensor, a host array or a scalar of ``dtype`` that can be written to elements of ``shape``.

    Args:
        value: the value.
        dtype: the dtype of the elements that are written.
        shape: the shape of the elements that are written.
        basic: whether they are selected by integers and slices: NumPy then takes no deeper lists.
        one_element: whether they are one element by an index that gives a scalar.
        one_mask: whether they are selected by one mask of all dimensions.

    Raises:
        ShapeError: the value does not broadcast to ``shape``.
        ArgumentTypeError, ArgumentError, OverflowError: NumPy would not convert the value to ``dtype``.
    """
    listed = isinstance(value, (list, tuple))
    if type(value) is ShardedTensor:
        if value.dtype == dtype and value.shape == shape:
            return value
    else:
        if type(value) in SCALARS or not hasattr(value, "dtype") or _is_scalar(value):
            value = converted(value, dtype)
            if not np.ndim(value):
                return value
        else:
            value = as_operand(value, "setitem")
    if not is_element(value.dtype) or not np.can_cast(value.dtype, dtype, "unsafe"):
        raise ArgumentTypeError(f"value is an array of {value.dtype}, of which elements of {dtype} cannot be made")
    if value.shape == shape or not value.ndim:
        return value
    if one_element:
        if math.prod(value.shape) != 1 or listed:
            raise ShapeError(f"value has shape {value.shape}, and one element is written; give a scalar")
        return value.reshape(())  # NumPy accepted arrays of one element here up to version 2.3.
    if basic and listed and value.ndim > len(shape):
        advice = "wanted a list of at most as many dimensions" if shape else "give a scalar"
        raise ShapeError(f"value is a list of shape {value.shape}, for elements of shape {shape}; {advice}")
    if one_mask and value.ndim > 1:
        raise ArgumentTypeError(
            f"value has {counted(value.ndim, 'dimension')}; for a mask of all wanted a scalar or one dimension"
        )
    lead = max(value.ndim - len(shape), 0)
    inner = value.shape[lead:]
    fits = all(n in (1, m) for n, m in zip(inner, shape[len(shape) - len(inner) :], strict=True))
    if not fits or any(n != 1 for n in value.shape[:lead]):
        raise ShapeError(f"a value of shape {value.shape} does not broadcast to the {shape} that is written")
    return value


def _checked_update(op: Op, operands: Operands, out: ShardedTensor) -> Operands:
    """Returns the operands of a ufunc in the form that plans take.

    Raises:
        ShapeError, ArgumentTypeError, OverflowError: NumPy would not write the ufunc's result into ``out``.
    """
    operands = tuple([as_operand(x, op.name) for x in operands])
    if any(x is None for x in operands):
        raise ArgumentTypeError("an operand is None; wanted a tensor, an array or a scalar")
    _check_update(op, tuple(map(kind_of, operands)), out._aval)
    check_integers(op, operands)
    return operands


@functools.lru_cache(1024)
def _check_update(op: Op, kinds: tuple[Kind, ...], out: Aval) -> None:
    """Checks that a ufunc of operands of these kinds has a result that can be written into ``out``.

    Raises:
        ShapeError: the operands do not broadcast to the shape of ``out``.
        ArgumentTypeError: the dtype of the result cannot be cast to that of ``out`` by NumPy's rule ``same_kind``.
    """
    shapes = [k.shape for k in kinds if k is not None and not isinstance(k, type)]
    try:
        together = np.broadcast_shapes(out.shape, *shapes)
    except ValueError:
        together = None
    if together != out.shape:
        raise ShapeError(
            f"operands of shapes {', '.join(map(str, shapes))} do not broadcast to the {out.shape} that is written"
        )
    _check_cast(op.name, result_dtype(op, kinds, {}), out.dtype)


def _check_cast(name: str, dtype: Any, target: Any) -> None:
    if not np.can_cast(dtype, target, "same_kind"):
        raise ArgumentTypeError(
            f"{name}: the result has dtype {dtype}, which is not of the same kind as the {target} that is written; "
            "convert it with astype"
        )


# -- writing ---------------------------------------------------------------------------------------


def _write_directly(x: ShardedTensor, value: Any, index: Any) -> bool:
    """Writes a scalar, or an array in host memory that needs no conversion, to the elements of a buffer of the host
    that integers, slices and short host arrays select, if the buffer is written in place.

    This does what `_write` does, without a view spec and a write op: these take longer than the write of one element.

    Returns:
        Whether it was written. If not, nothing has changed, and `_write` raises the error if there is one.

    Raises:
        ArgumentTypeError, ArgumentError, OverflowError: NumPy would not convert the value to the dtype.
    """
    storage, backend, dtype = x._storage, x._aval.backend, x._aval.dtype
    at = index if type(index) is tuple else () if index is Ellipsis else (index,)
    if type(storage) is not Storage or len(storage.buffers) > 1 or not backend.on_host:
        return False
    advanced = False
    for entry in at:
        if type(entry) is np.ndarray and entry.size <= _FEW and entry.dtype.kind in "iub":
            advanced = True
        elif type(entry) is not int and type(entry) is not slice:
            return False
    try:
        shape = storage.buffers[0][at].shape
    except (IndexError, TypeError, ValueError):
        return False
    if _is_scalar(value):
        value = converted(value, dtype)
    elif value is x or (value := _buffer_of(value, shape, dtype)) is None:  # `x[::-1] = x` copies x.
        return False
    if 0 in shape:  # What views have copied stays valid.
        return True
    write_state = write_state_of(x)
    with write_state.lock:
        storage = x._storage
        if type(storage) is not Storage:  # Another thread has replaced it.
            return False
        writing = PendingWrite(write_state)
        try:
            x._storage = writing
            free = exclusive_arrays(x, storage)
            if len(free) != 1 or not free[0] or not backend.begin_write(array := storage.buffers[0]):
                writing.bind(x, storage)
                return False
            write_state.forget()
            if advanced:
                array[at] = value
            else:
                blockwise.copy_into(array[(*at, Ellipsis)], value)
            writing.bind(x, storage)
        except BaseException:  # See `_write`.
            writing.bind(x, storage)
            raise
    return True


_FEW = 1 << 10
"""The greatest number of elements of an index array that selects elements twice: to check the index, and to write."""


def _buffer_of(value: Any, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Returns a host array, or the one buffer of a tensor in host memory, of this shape and dtype; None for others."""
    if type(value) is ShardedTensor and value._aval.backend.on_host and not value._aval.unreduced:
        storage = value._storage
        value = storage.buffers[0] if type(storage) is Storage and len(storage.buffers) == 1 else None
    return value if type(value) is np.ndarray and value.shape == shape and value.dtype == dtype else None


def _is_in_float32(operands: Sequence[Any]) -> bool:
    """Whether a ufunc of some operands is computed in float32 and then cast."""
    return any(is_small_float(getattr(x, "dtype", None)) for x in operands)


def _is_spanning(x: Any) -> bool:
    """Whether an operand has devices of other processes, which send only what a write needs."""
    return type(x) is ShardedTensor and x._aval.spans


def _write(base: ShardedTensor, view_spec: ViewSpec, write_op: WriteOp) -> None:
    """Binds ``base`` to a new value in which ``write_op`` has replaced the elements of ``view_spec``.

    The write is atomic: it is done completely or not at all, and concurrent readers see the old value or the new one.
    """
    write_op.settle(base)
    write_state = write_state_of(base)
    with write_state.lock:
        storage = current_storage(base)
        if lacks_elements(base):
            announce_reading(base)
            if any(write_op.inside):
                write_op.enter(base, view_spec, tensor(base._aval, storage))
            base._storage = without_elements(base._aval)._storage
            write_state.forget()
            write_state.version += 1
            if isinstance(write_op, Scattered):
                write_op.chosen.check()
            WriteTransaction(base, view_spec, base._storage).infer(write_op)
            return
        before = storage if base._aval.offloaded else None
        exported = type(storage) is Exported
        exported_storage = storage
        if exported:  # The memory is written in place if the consumer has released it, and copied otherwise.
            storage = storage.exported
        elif isinstance(storage, DeferredStorage):  # A donated storage raises an error here.
            storage = storage.stored()
        new: Any = None
        writing = PendingWrite(write_state)
        try:
            base._storage = writing
            free = exclusive_arrays(base, storage)
            if exported and not exported_storage.is_released():
                free = ()
            write_state.forget()
            taken = WriteTransaction(base, view_spec, storage, free)
            if base._aval.backend.on_host and not any(map(_is_spanning, write_op.operands)):
                new = taken.on_host(write_op)
            else:
                written = taken.on_devices(write_op)
                with Interrupts():  # A signal handler raises after all devices have written.
                    new = written()
                del written
            # Otherwise the error's traceback and the transaction would form a cycle that keeps the memory alive.
            error, taken.error = taken.error, None
            del taken
            if before is not None:
                new = offloaded(base._aval, new.buffers)
            writing.bind(base, new)
        except BaseException:  # Not `finally`, in which a signal handler that raises would leave the write pending.
            writing.bind(base, new or before or (exported_storage if exported else storage))
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # Breaks the cycle of the error and this frame, which would keep the memory alive.
