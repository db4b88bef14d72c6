"""Functions that create arrays on the current device: constants, and copies from the host and from other devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cuda, graphs, launch, memory
from . import world as w
from .array import ndarray, supported
from .dlpack import from_dlpack


def _shape(shape: Any) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(_shape(shape), dtype, order=order)


def _filled(shape: Any, dtype: Any, order: str, value: Any) -> ndarray:
    made = empty(shape, dtype, order)
    made[...] = value
    return made


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return _filled(shape, dtype, order, 0)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return _filled(shape, dtype, order, 1)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    if dtype is None:
        dtype = fill_value.dtype if isinstance(fill_value, ndarray) else np.array(fill_value).dtype
    return _filled(shape, dtype, order, fill_value)


def _like(a: Any, dtype: Any, order: str, shape: Any) -> ndarray:
    if order in ("K", "A"):
        order = "F" if a._a.flags.fnc and shape is None else "C"
    return empty(a.shape if shape is None else shape, a.dtype if dtype is None else dtype, order)


def empty_like(prototype: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    return _like(prototype, dtype, order, shape)


def zeros_like(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    made = _like(a, dtype, order, shape)
    made[...] = 0
    return made


def ones_like(a: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    made = _like(a, dtype, order, shape)
    made[...] = 1
    return made


def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    made = _like(a, dtype, order, shape)
    made[...] = fill_value
    return made


def on_host(name: str) -> Any:
    """Returns a creation function that creates the array on the host and copies it."""
    function = getattr(np, name)

    def create(*args: Any, **kwargs: Any) -> ndarray:
        made = np.asarray(function(*_scalars(args), **kwargs))
        return launch.from_host(made.astype(supported(made.dtype), copy=False))

    create.__name__ = name
    return create


def _scalars(args: Any) -> list[Any]:
    return [a.item() if isinstance(a, ndarray) else a for a in args]


def linspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, retstep: bool = False, dtype: Any = None, axis: int = 0
) -> Any:
    values, step = np.linspace(*_scalars((start, stop)), num, endpoint, True, dtype, axis)
    made = launch.from_host(values)
    return (made, step) if retstep else made


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool | None = True,
    order: str | None = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    """Creates an array on the current device from an array of any device or from host values."""
    if isinstance(obj, ndarray):
        made = _from_array(obj, dtype, copy, order)
    elif isinstance(obj, (list, tuple)) and _has_arrays(obj):
        made = launch.call("stack", np.stack, ([array(x, dtype) for x in obj],), {})
    elif hasattr(obj, "__cuda_array_interface__"):
        made = _from_interface(obj)
    else:
        made = _from_host(obj, dtype, order, blocking)
    if made.ndim < ndmin:
        made = made.reshape((1,) * (ndmin - made.ndim) + made.shape)
    return made


def _from_array(obj: ndarray, dtype: Any, copy: bool | None, order: str | None) -> ndarray:
    dtype = obj.dtype if dtype is None else supported(dtype)
    if obj.data.device_id != w.world.current():
        return obj.copy(order=order or "K").astype(dtype, copy=False)
    made = obj.astype(dtype, order=order or "K", copy=bool(copy))
    if copy is False and made is not obj:
        raise ValueError("Unable to avoid copy while creating an array as requested.")
    return made


def _has_arrays(obj: Any) -> bool:
    return any(isinstance(x, ndarray) or (isinstance(x, (list, tuple)) and _has_arrays(x)) for x in obj)


def _from_interface(obj: Any) -> ndarray:
    """Creates an array that shares the memory of another library's array."""
    given = obj.__cuda_array_interface__
    if given.get("stream") is not None:
        cuda.stream_synchronize(given["stream"])
    size = int(np.prod(given["shape"], dtype=np.int64))
    memptr = memory.MemoryPointer(memory.UnownedMemory(given["data"][0], size, obj), 0)
    return ndarray(given["shape"], given["typestr"], memptr, given.get("strides"))


def _from_host(obj: Any, dtype: Any, order: str | None, blocking: bool) -> ndarray:
    """Copies host values. Pinned arrays are kept alive and read when the copy runs, others are read at once."""
    fortran = order == "F" or (order in ("K", "A", None) and isinstance(obj, np.ndarray) and obj.flags.fnc)
    values = np.asarray(obj, dtype, "F" if fortran else "C")
    values = values.astype(supported(values.dtype), copy=False)
    made = empty(values.shape, values.dtype, "F" if fortran else "C")
    pinned = values.size and memory.host_bytes(values.__array_interface__["data"][0], values.nbytes)[1]
    if not pinned:
        values = values.copy(order="K")
    to = made._a
    graphs.check_copy(w.world.stream(), "H2D")
    s = w.world.launch("copy from host", lambda: np.copyto(to, values), (), (made,))
    if blocking:
        w.world.synchronize(s)
    return made


def asarray(
    a: Any, dtype: Any = None, order: str | None = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    return array(a, dtype, copy, order, blocking=blocking)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, None, "C", ndmin=1)


def asfortranarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, None, "F", ndmin=1)


def copy(a: ndarray, order: str = "K") -> ndarray:
    return a.copy(order=order)


def astype(x: ndarray, dtype: Any, copy: bool = True) -> ndarray:
    return x.astype(dtype, copy=copy)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    """Returns a host array with the elements of a device array or of host values."""
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    made = np.asarray(a, order=order)
    if out is None:
        return made
    np.copyto(out, made)
    return out


def copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    """Copies ``src`` to ``dst``. Copies between devices of equal shape and dtype use the current device's stream."""
    if not isinstance(src, ndarray):
        if isinstance(src, np.ndarray) and src.size != 1:
            raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
        np.copyto(np.empty((), dst.dtype), np.squeeze(src)[()] if isinstance(src, np.ndarray) else src, casting)
        src = np.squeeze(src)[()] if isinstance(src, np.ndarray) else src
    elif not np.can_cast(src.dtype, dst.dtype, casting):
        raise TypeError(f"Cannot cast {src.dtype} to {dst.dtype} in {casting} casting mode")
    if where is not None:
        launch.call_in_place("copyto", np.copyto, (dst, src), {"where": where, "casting": casting})
    elif isinstance(src, ndarray) and _same_layout(dst, src):
        dst.data.copy_from_device_async(src.data, src.nbytes)
    elif isinstance(src, ndarray) and src.data.device_id != dst.data.device_id:
        with dst.device:
            dst[...] = src.copy()
    else:
        dst[...] = src


def _same_layout(dst: ndarray, src: ndarray) -> bool:
    here, there = dst._a.flags, src._a.flags
    both = (here.c_contiguous and there.c_contiguous) or (here.f_contiguous and there.f_contiguous)
    return dst.dtype == src.dtype and dst.shape == src.shape and both


def take(a: ndarray, indices: Any, axis: int | None = None, out: Any = None) -> ndarray:
    """Takes elements; indices out of bounds wrap around, as in CuPy."""
    return launch.call("take", np.take, (a, indices, axis), {"mode": "wrap", "out": out})


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None and y is None:
        return launch.call_now("nonzero", np.nonzero, (condition,), {})
    if x is None or y is None:
        raise ValueError("Must provide both 'x' and 'y' or neither.")
    return launch.where(condition.astype(bool, copy=False), x, y)


def meshgrid(*xi: Any, indexing: str = "xy", sparse: bool = False, copy: bool = True) -> Any:
    kwargs = {"indexing": indexing, "sparse": sparse, "copy": True}
    return launch.call("meshgrid", np.meshgrid, xi, kwargs)


def result_type(*args: Any) -> np.dtype[Any]:
    return np.result_type(*(a.dtype if isinstance(a, ndarray) else a for a in args))


def can_cast(from_: Any, to: Any, casting: str = "safe") -> bool:
    return np.can_cast(from_.dtype if isinstance(from_, ndarray) else from_, to, casting)


def get_array_module(*args: Any) -> Any:
    from .array import namespace

    return namespace["cupy"] if any(isinstance(a, ndarray) for a in args) else np


NAMES = {
    f.__name__: f
    for f in (
        *(empty, zeros, ones, full, empty_like, zeros_like, ones_like, full_like, linspace, array, asarray),
        *(ascontiguousarray, asfortranarray, copy, astype, asnumpy, copyto, from_dlpack, where, meshgrid, take),
        *(result_type, can_cast, get_array_module),
    )
}
