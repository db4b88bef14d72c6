"""Arrays of other processes: their shapes and dtypes, and the functions of array libraries on them.

Every process runs the same program on all shards of a tensor that spans processes. The shards of other processes have
no elements here: a function of arrays returns their shape and dtype, and a write to one does nothing.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.errors import BackendError

Shape = tuple[int, ...]


class RemoteArray:
    """An array that another process holds.

    Attributes:
        shape, dtype: those of the array.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.shape: Shape = tuple(shape)
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def real(self) -> RemoteArray:
        """The real parts of the elements."""
        return RemoteArray(self.shape, np.empty(0, self.dtype).real.dtype)

    imag = real

    def __getitem__(self, index: Any) -> RemoteArray:
        whole = np.broadcast_to(np.False_, self.shape)
        return RemoteArray(whole[_stand_in(index)].shape, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Does nothing: the process that holds the array writes to it."""

    def __repr__(self) -> str:
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype})"


def _stand_in(index: Any) -> Any:
    """Returns an index in which arrays of other processes are replaced by zeros, which select as many elements."""
    if isinstance(index, tuple):
        return tuple(map(_stand_in, index))
    return np.zeros(index.shape, np.int64) if isinstance(index, RemoteArray) else index


# -- where functions run ---------------------------------------------------------------------------


class _Here(threading.local):
    """Whether the current device of this thread belongs to another process."""

    remote = 0


_here = _Here()


class Elsewhere:
    """The context in which a device of another process is current: functions that create arrays return their shapes."""

    def __enter__(self) -> None:
        _here.remote += 1

    def __exit__(self, *_: object) -> None:
        _here.remote -= 1


class _Local:
    """The context in which a device of this process is current again."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before, _here.remote = _here.remote, 0
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        _here.remote = self._before
        self._context.__exit__(*error)


ELSEWHERE = Elsewhere()


def local(context: Any) -> Any:
    """Returns a context that makes a device of this process current, as ``context`` does."""
    return _Local(context) if _here.remote else context


# -- functions -------------------------------------------------------------------------------------


class RemoteNamespace:
    """The namespace of a library, whose functions also take arrays of other processes.

    Args:
        xp: the namespace of the library.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def __getattr__(self, name: str) -> Any:
        if name == "fuse":
            raise AttributeError("no kernel takes arrays of other processes")
        attribute = getattr(self._xp, name)
        if not callable(attribute) or isinstance(attribute, type):
            return attribute

        @functools.wraps(attribute)
        def function(*args: Any, **params: Any) -> Any:
            if not _here.remote and not any(map(_is_remote, args)):
                return attribute(*args, **params)
            if name in _CREATES and not any(map(_is_remote, args)):
                return _CREATES[name](*args, **params)
            if name in _SHAPES:
                return _SHAPES[name](*args, **params)
            if isinstance(ufunc := getattr(np, name, None), np.ufunc):
                return _elementwise(ufunc, *args)
            if _here.remote and not any(map(_is_remote, args)):
                return attribute(*args, **params)
            raise BackendError(f"{name} does not work on arrays of other processes yet")

        self.__dict__[name] = function
        return function


def _is_remote(x: Any) -> bool:
    return type(x) is RemoteArray or (type(x) in (list, tuple) and any(map(_is_remote, x)))


def _elementwise(ufunc: np.ufunc, *args: Any) -> RemoteArray:
    """Returns the result of a ufunc, whose dtype is found on one element."""
    samples = [np.ones((), x.dtype) if type(x) is RemoteArray else x for x in args]
    with np.errstate(all="ignore"):
        dtype = np.asarray(ufunc(*samples)).dtype
    return RemoteArray(np.broadcast_shapes(*[np.shape(x) for x in args]), dtype)


def _where(condition: Any, x: Any, y: Any) -> RemoteArray:
    shape = np.broadcast_shapes(*map(np.shape, (condition, x, y)))
    return RemoteArray(shape, np.result_type(*[a.dtype if hasattr(a, "dtype") else a for a in (x, y)]))


def _as_array(x: Any, dtype: Any = None, copy: bool | None = None, **_: Any) -> RemoteArray:
    known = x if type(x) is RemoteArray else np.asarray(x)
    return RemoteArray(known.shape, np.dtype(dtype) if dtype is not None else known.dtype)


def _reshape(x: Any, shape: Any, **_: Any) -> RemoteArray:
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.size // max(-math.prod(sizes), 1)
    return RemoteArray(sizes, x.dtype)


def _concat(arrays: Any, axis: int = 0, **_: Any) -> RemoteArray:
    first, dtype = arrays[0], np.result_type(*[a.dtype for a in arrays])
    sizes = list(first.shape)
    sizes[axis] = sum(a.shape[axis] for a in arrays)
    return RemoteArray(sizes, dtype)


def _stack(arrays: Any, axis: int = 0, **_: Any) -> RemoteArray:
    sizes = list(arrays[0].shape)
    sizes.insert(axis if axis >= 0 else axis + len(sizes) + 1, len(arrays))
    return RemoteArray(sizes, np.result_type(*[a.dtype for a in arrays]))


def _moved(name: str) -> Callable[..., RemoteArray]:
    """Returns a function that only rearranges or repeats elements, which NumPy does without a copy."""

    def function(x: Any, *args: Any, **params: Any) -> RemoteArray:
        return RemoteArray(getattr(np, name)(np.broadcast_to(np.False_, x.shape), *args, **params).shape, x.dtype)

    return function


def _like(x: Any, *_: Any, dtype: Any = None, **__: Any) -> RemoteArray:
    return RemoteArray(x.shape, x.dtype if dtype is None else np.dtype(dtype))


def _new(shape: Any, *_: Any, dtype: Any = None, **__: Any) -> RemoteArray:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    return RemoteArray(sizes, np.dtype(float if dtype is None else dtype))


_CREATES: dict[str, Callable[..., RemoteArray]] = {"empty": _new, "zeros": _new, "ones": _new, "full": _new}
_SHAPES: dict[str, Callable[..., Any]] = {
    "asarray": _as_array, "astype": _as_array, "reshape": _reshape, "concat": _concat, "stack": _stack, "where": _where,
    "empty_like": _like, "zeros_like": _like, "ones_like": _like, "full_like": _like,
    **{name: _moved(name) for name in (
        "permute_dims", "matrix_transpose", "expand_dims", "squeeze", "broadcast_to", "flip", "moveaxis", "roll",
    )},
}  # fmt: skip


def is_local(device: Device, process: int) -> bool:
    """Whether a device, or the host, belongs to the process of that number."""
    return device.process_index == process or device.backend == "host"
