"""Reads and writes through an index: views for basic indices, queued operations for advanced ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import launch, memory
from . import world as w

_shapes: dict[Any, tuple[int, ...]] = {}


def _advanced(index: tuple[Any, ...]) -> bool:
    return any(isinstance(i, (list, tuple, np.ndarray, launch._array, bool, np.bool_)) for i in index)


def _expand(index: tuple[Any, ...]) -> list[Any]:
    """Converts lists to host arrays, so that every index is basic or has a dtype."""
    made = []
    for i in index:
        if isinstance(i, (list, tuple, bool, np.bool_, np.ndarray)):
            i = np.array(i)  # a copy, because the program may change the array afterwards
            if not i.size and i.dtype.kind == "f":
                i = i.astype(np.intp)
        made.append(i)
    return made


def _is_mask(i: Any) -> bool:
    return getattr(i, "dtype", None) == np.bool_


def _prepare(array: Any, index: tuple[Any, ...]) -> tuple[list[Any], list[Any], bool]:
    """Returns the index with NumPy's views in place of device arrays, these arrays, and whether there are masks."""
    device = w.world.current()
    launch.check(array, device)
    reads, raws = [], []
    for i in _expand(index):
        if isinstance(i, launch._array):
            launch.check(i, device)
            reads.append(i)
            i = i._a
        raws.append(i)
    for i in raws:
        if isinstance(i, np.ndarray) and i.dtype.kind not in "biu":
            raise IndexError("arrays used as indices must be of integer (or boolean) type")
    return raws, reads, any(_is_mask(i) for i in raws)


def _wrapped(raws: list[Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns the index with integers out of bounds wrapped around, which CuPy does instead of raising an error."""
    used = sum(i.ndim if _is_mask(i) else 1 for i in raws if i is not None and i is not Ellipsis)
    axis, made = 0, []
    for i in raws:
        if i is Ellipsis:
            axis += len(shape) - used
        elif i is not None:
            if isinstance(i, np.ndarray) and not _is_mask(i) and shape[axis]:
                i = np.remainder(i.astype(np.int64), shape[axis])
            axis += i.ndim if _is_mask(i) else 1
        made.append(i)
    return tuple(made)


def get_item(array: Any, index: Any) -> Any:
    """Returns a view for integers, slices, None and Ellipsis, otherwise a new array. For a mask the host waits."""
    if not isinstance(index, tuple):
        index = (index,)
    if not _advanced(index):
        index = tuple(int(i) if isinstance(i, np.integer) else i for i in index)
        raw = array._a[index if any(i is Ellipsis for i in index) else (*index, ...)]
        made = launch.view(array, raw)
        if made.data is array.data:
            made.data = memory.MemoryPointer(array.data.mem, array.data.ptr - array.data.mem.ptr)
        return made
    raws, reads, masked = _prepare(array, index)
    source = array._a
    if masked:
        box: list[Any] = []
        s = w.world.launch("getitem", lambda: box.append(_taken(source, raws)), (array, *reads), ())
        for i in raws:  # checked here, because otherwise the error would be reported at the synchronization
            if _is_mask(i):
                _check_mask(source.shape, raws)
        w.world.synchronize(s)
        return launch.from_host(box[0])
    made = launch.empty(_shape(source, raws), source.dtype)
    to = made._a
    w.world.launch("getitem", lambda: np.copyto(to, _taken(source, raws)), (array, *reads), (made,))
    return made


def _taken(source: Any, raws: list[Any]) -> Any:
    return np.array(source[_wrapped(raws, source.shape)])


def _check_mask(shape: tuple[int, ...], raws: list[Any]) -> None:
    axis = 0
    for i in raws:
        if i is Ellipsis:
            return
        if _is_mask(i):
            if i.shape != shape[axis : axis + i.ndim]:
                raise IndexError(f"boolean index of shape {i.shape} did not match indexed array of shape {shape}")
            axis += i.ndim
        elif i is not None:
            axis += 1


def _shape(source: Any, raws: list[Any]) -> tuple[int, ...]:
    """Returns the shape of a result, which an index of zeros has on an array without memory."""
    key = (source.shape, *(_key(i) for i in raws))
    shape = _shapes.get(key)
    if shape is None:
        stand_in = np.broadcast_to(np.zeros((), np.bool_), source.shape)
        zeros = tuple(np.zeros(i.shape, i.dtype) if isinstance(i, np.ndarray) else i for i in raws)
        if len(_shapes) > 20000:
            _shapes.clear()
        shape = _shapes[key] = stand_in[zeros].shape
    return shape


def _key(i: Any) -> Any:
    if isinstance(i, slice):
        return slice, i.start, i.stop, i.step
    return (i.shape, i.dtype) if isinstance(i, np.ndarray) else i


def set_item(array: Any, index: Any, value: Any) -> None:
    """Queues a write of a device array or a scalar; as in CuPy, host arrays are rejected."""
    if not isinstance(index, tuple):
        index = (index,)
    reads: list[Any] = []
    if isinstance(value, launch._array):
        launch.check(value, w.world.current())
        reads.append(value)
        while value.ndim and value.shape[0] == 1:  # leading axes of one element are dropped, as in CuPy
            value = launch.view(value, value._a[0, ...])
        raw_value = value._a
    else:
        raw_value = np.asarray(value, array.dtype)
        if raw_value.shape != ():
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        raw_value = np.array(raw_value)
    if raw_value.dtype.kind == "c" and array.dtype.kind not in "cb":
        raw_value = raw_value.real
    if not _advanced(index):
        launch.check(array, w.world.current())
        target = array._a[index if any(i is Ellipsis for i in index) else (*index, ...)]
        np.broadcast_to(raw_value, target.shape)  # raises an error here instead of when the write runs
        w.world.launch("setitem", lambda: np.copyto(target, raw_value, casting="unsafe"), reads, (array,))
        return
    raws, used, masked = _prepare(array, index)
    target = array._a
    if masked:
        _check_mask(target.shape, raws)
    else:
        np.broadcast_to(raw_value, _shape(target, raws))

    def run() -> None:
        target[_wrapped(raws, target.shape)] = raw_value

    s = w.world.launch("setitem", run, (*reads, *used), (array,))
    if masked:  # CuPy counts the selected elements and reads their number.
        w.world.synchronize(s)
