"""The ``checked`` backend: N simulated devices with separate memories on the host, which detect invalid accesses.

Its arrays are NumPy arrays tagged with the device memory that holds them. These accesses raise an error that names the
function called and, where devices are involved, the devices:

* using an array while a device of another memory, or none, is current, which includes mixing arrays of two devices;
* mixing host arrays with device arrays;
* copying an array from another device without an event that orders the copy after the last write to the array;
* an operation that reads and writes overlapping elements of one array, unless it is element by element.

Programs can therefore be tested for these errors on machines without GPUs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardtensor.backend import (
    Backend,
    Device,
    HostArray,
    current_device,
    lend,
    logical_device_count,
    memory_of,
    references,
)
from shardtensor.errors import ArgumentTypeError, BackendError
from shardtensor.host import fork
from shardtensor.tensor.tensor import ShardedTensor

__all__ = ["CheckedArray", "CheckedBackend"]

_current: ContextVar[Device | None] = ContextVar("shardtensor_checked", default=None)


class _Memory:
    """The device of an array and the time of the last write to it, shared by the array and all its views."""

    __slots__ = ("__weakref__", "device", "written")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.written = _clocks.tick(device)


def _method(name: str) -> Callable[..., Any]:
    """Wraps a method of `numpy.ndarray` that dispatches to neither `__array_ufunc__` nor `__array_function__`."""

    def method(self: CheckedArray, *args: Any, **kwargs: Any) -> Any:
        result = getattr(_bare(self, name), name)(*_bare(args, name), **_bare(kwargs, name))
        if name in ("fill", "partition", "put", "sort"):
            _wrote(self)
        return _tagged(result, (self,))

    return method


class CheckedArray(np.ndarray):
    """An array in the memory of a checked device. It can be accessed only while that device is current."""

    _memory: _Memory | None

    def __array_finalize__(self, parent: Any) -> None:
        self._memory = parent._memory if type(parent) is CheckedArray else None

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        if any(isinstance(x, ShardedTensor) for x in inputs):
            return NotImplemented  # The tensor's own method gets this array with its memory.
        caller = ufunc.__name__
        bare = _bare(kwargs, caller)
        if out:
            bare["out"] = _bare(out, caller)
            for array in out:
                _not_read(array, inputs, caller)
        result = getattr(ufunc, method)(*_bare(inputs, caller), **bare)
        if not out:
            return _tagged(result)
        _wrote(*out)
        return out[0] if len(out) == 1 else out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _called(func, args, kwargs)

    def __getitem__(self, index: Any) -> Any:
        return _tagged(_bare(self, "getitem")[_bare(index, "getitem")], (self,))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not _is_basic(index):
            _not_read(self, (index if isinstance(index, tuple) else (index,)), "setitem")
            _not_read(self, (value,), "setitem")
        elif type(value) is CheckedArray and value._memory is self._memory:
            _not_read(self[index], (value,), "setitem")
        _bare(self, "setitem")[_bare(index, "setitem")] = _bare(value, "setitem")
        _wrote(self)

    argmax, argmin, argpartition, argsort = map(_method, ("argmax", "argmin", "argpartition", "argsort"))
    astype, choose, clip, compress, conj, copy = map(_method, ("astype", "choose", "clip", "compress", "conj", "copy"))
    cumprod, cumsum, diagonal, dot, fill = map(_method, ("cumprod", "cumsum", "diagonal", "dot", "fill"))
    flatten, nonzero, partition, put, repeat = map(_method, ("flatten", "nonzero", "partition", "put", "repeat"))
    round, searchsorted, sort, take, trace = map(_method, ("round", "searchsorted", "sort", "take", "trace"))

    def __repr__(self) -> str:
        return f"CheckedArray({np.asarray(self)!r}, memory={self._memory and self._memory.device})"

    def __str__(self) -> str:
        return str(np.asarray(self))


def _device(caller: str) -> Device:
    device = _current.get()
    if device is None:
        raise BackendError(f"{caller}: no checked device is current; wrap the call in `with backend.on(device)`")
    return device


def _memory_of(array: CheckedArray, caller: str) -> _Memory:
    if array._memory is None:
        raise BackendError(f"{caller}: the array is in no device's memory; create it with the backend's functions")
    return array._memory


def _bare(x: Any, caller: str) -> Any:
    """Converts checked arrays in an argument (also within lists, tuples and dicts) to NumPy arrays.

    Raises:
        BackendError: an array is not in the memory of the current device.
        ArgumentTypeError: the argument contains a host array.
    """
    kind = type(x)
    if kind is CheckedArray:
        device = _memory_of(x, caller).device
        if device is not _current.get() and device != _device(caller):
            raise BackendError(
                f"{caller}: an array in the memory of {device} is accessed while {_device(caller)} is current"
            )
        return x.view(np.ndarray)
    if kind in _SCALARS:  # The most frequent arguments of all: no call for what they contain.
        return x
    if kind is np.ndarray:
        raise ArgumentTypeError(f"{caller}: a host array beside arrays of {_device(caller)}; transfer it there first")
    if kind is list or kind is tuple:
        return kind([item if type(item) in _SCALARS else _bare(item, caller) for item in x])
    if kind is dict:
        return {key: _bare(value, caller) for key, value in x.items()} if x else x
    return x


_SCALARS = frozenset({int, float, bool, str, slice, type(None), type(Ellipsis)})
"""Types of arguments that contain no arrays."""


def _tagged(result: Any, parents: Sequence[Any] = ()) -> Any:
    """Converts results of NumPy to checked arrays: in a parent's memory if they are views of it, else in new memory."""
    if type(result) is np.ndarray:
        return _tagged_array(result, parents)
    if isinstance(result, (list, tuple)):
        items = [_tagged(r, parents) for r in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    if not isinstance(result, (np.ndarray, np.generic)):
        return result
    return _tagged_array(np.asarray(result), parents)


def _tagged_array(result: HostArray, parents: Sequence[Any]) -> CheckedArray:
    array = result.view(CheckedArray)
    array._memory = (parents and _memory_of_views(result, parents)) or _Memory(_device("result"))
    return array


def _memory_of_views(array: HostArray, parents: Sequence[Any]) -> _Memory | None:
    """Returns the memory of the first of the parents of which an array is a view; None if there is none."""
    owner = _owner(array)
    for parent in parents:
        if type(parent) is CheckedArray and _owner(parent) is owner:
            return parent._memory
    return None


def _owner(array: HostArray) -> HostArray:
    """Returns the array that owns the memory of an array or view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _wrote(*arrays: CheckedArray) -> None:
    """Records that the device of each array has written to it now."""
    for array in arrays:
        memory = _memory_of(array, "write")
        memory.written = _clocks.tick(memory.device)


def _not_read(out: Any, inputs: Sequence[Any], caller: str) -> None:
    """Checks that no input overlaps ``out``, unless both have the same elements in the same order.

    Devices read and write in parallel, so the result of other overlaps is undefined.

    Raises:
        BackendError: an input overlaps ``out``.
    """
    for x in inputs:
        if type(x) is not CheckedArray or type(out) is not CheckedArray or x._memory is not out._memory:
            continue
        if not _is_same_view(x, out) and _overlap(x, out):
            raise BackendError(f"{caller}: reads elements of an array that it writes at the same time; copy them first")


def _is_same_view(a: HostArray, b: HostArray) -> bool:
    return a.shape == b.shape and a.strides == b.strides and a.ctypes.data == b.ctypes.data


def _overlap(a: HostArray, b: HostArray) -> bool:
    effort: Any = 10_000  # NumPy's stubs differ in what they permit.
    try:
        return np.shares_memory(a.view(np.ndarray), b.view(np.ndarray), max_work=effort)
    except np.exceptions.TooHardError:  # The overlap is too expensive to determine, so it is not reported.
        return False


def _is_basic(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return all(e is None or e is Ellipsis or isinstance(e, (int, slice, np.integer)) for e in entries)


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a NumPy function with arrays of the current device."""
    caller = function.__name__
    _device(caller)
    if kwargs.get("out") is not None:
        _not_read(kwargs["out"], args, caller)
    result = function(*_bare(args, caller), **_bare(kwargs, caller))
    written = args[0] if function is np.copyto else kwargs.get("out")
    if type(written) is CheckedArray:
        _wrote(written)
        return written
    return _tagged(result, [a for a in args if type(a) is CheckedArray])


class _Namespace:
    """The array-API namespace: NumPy's functions for checked arrays."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(np, name)
        if isinstance(attribute, type) or not callable(attribute):
            return attribute
        wrapped = functools.partial(_function, attribute)
        setattr(self, name, wrapped)
        return wrapped

    def asarray(self, x: Any, /, *, dtype: Any = None, copy: bool | None = None) -> Any:
        """See NumPy. This is the only function of the namespace that accepts host arrays, as in CuPy."""
        bare = np.array(x) if type(x) is np.ndarray else _bare(x, "asarray")
        return _tagged(np.array(bare, dtype=dtype) if copy else np.asarray(bare, dtype=dtype))


def _function(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return _called(function, args, kwargs)


class _Clocks:
    """The vector clocks of all devices.

    Each device has its own logical time, and a row, which is not modified: for every other device the time up to which
    it is ordered after that device. A device, its time and its row are the token of an event.
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._rows: dict[int, npt.NDArray[np.int64]] = {}
        self._lock = fork.lock()

    def tick(self, device: Device) -> int:
        """Advances the clock of a device, and returns its new time."""
        with self._lock:
            time = self._times[device.id] = self._times.get(device.id, 0) + 1
            return time

    def known(self, device: Device, other: Device) -> int:
        """Returns the time of ``other`` up to which ``device`` is ordered after it."""
        return self._known(device.id, other.id)

    def token(self, device: Device) -> _Token:
        """Returns the token of an event after all that a device has done so far."""
        k = device.id
        with self._lock:
            return k, self._times.get(k, 0), self._rows.get(k, _NO_TIME)

    def learn(self, device: Device, token: _Token) -> None:
        """Orders the device after an event: takes the elementwise maximum of its row and that of the token."""
        other, time, theirs = token
        k = device.id
        with self._lock:
            if self._known(k, other) >= time:  # Then it is ordered after all that the other was ordered after, too.
                return
            self._times[k] = self._times.get(k, 0) + 1  # Tokens of one time have one row.
            row, length = self._rows.get(k, _NO_TIME), other + 1
            if len(row) != len(theirs) or len(row) < length:
                length = max(length, len(row), len(theirs))
                row, theirs = [np.append(r, np.zeros(length - len(r), np.int64)) for r in (row, theirs)]
            clock = np.maximum(row, theirs)
            clock[other] = time
            self._rows[k] = clock

    def _known(self, k: int, other: int) -> int:
        if k == other:
            return self._times.get(k, 0)
        row = self._rows.get(k, _NO_TIME)
        return int(row[other]) if other < len(row) else 0


_Token: TypeAlias = tuple[int, int, npt.NDArray[np.int64]]
_NO_TIME = np.zeros(0, np.int64)
_clocks = _Clocks()


class _On:
    """A context manager in which a device is current."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = _current.get()
        _current.set(self._device)

    def __exit__(self, *error: object) -> None:
        _current.set(self._before)  # reset(token) fails in another context, in which coroutines may leave the block.


class CheckedBackend(Backend):
    """Simulated devices (see `st.set_num_devices`) with separate memories, which detect invalid accesses.

    A subclass can give each memory to several devices, as many as ``sharing``: the first of them is the device of all
    their arrays.

    ``SHARDTENSOR_BACKEND=checked`` makes it the default backend.

    >>> x = st.ones((4,), device=st.make_mesh((2,), ("x",), devices=st.devices("checked")[:2]))
    >>> a, b = [s.data for s in x.addressable_shards]
    >>> a + b
    Traceback (most recent call last):
    shardtensor.errors.BackendError: add: no checked device is current; ...
    """

    name = "checked"
    priority = -1
    pinned_host = True

    def __init__(self, sharing: int = 1) -> None:
        self._devices = tuple(Device(self.name, i) for i in range(logical_device_count()))
        self._sharing = sharing
        self._xp = _Namespace()

    def devices(self) -> Sequence[Device]:
        """All simulated devices, in order of their ids."""
        return self._devices

    @property
    def xp(self) -> Any:
        """The array-API namespace: NumPy's functions with checks."""
        return self._xp

    def memory_space(self, device: Device) -> Device:
        """Returns the first of the devices that share the memory of ``device``."""
        ahead = device.id % self._sharing if self._sharing > 1 else 0
        return self._devices[device.id - ahead] if ahead else device

    def on(self, device: Device) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager in which only the memory of ``device`` can be accessed."""
        return _On(self.memory_space(device))

    def is_array(self, x: object) -> bool:
        """Whether ``x`` is a `CheckedArray` of one of these devices."""
        return type(x) is CheckedArray and (x._memory is None or x._memory.device.backend == self.name)

    def contiguous(self, array: Any) -> Any:
        """Returns the array if it is in row-major order, else a copy that is."""
        bare = _bare(array, "contiguous")
        return array if bare.flags.c_contiguous else _tagged(np.array(bare, order="C"))

    def view(self, array: Any, index: Any) -> Any:
        """Returns the view of an array at a basic index, in the memory of the array."""
        part = _bare(array, "getitem")[index]
        if type(part) is not np.ndarray:
            return _tagged(part)
        view = part.view(CheckedArray)
        view._memory = array._memory
        return view

    def device_of(self, array: Any) -> Device:
        """Returns the device whose memory holds the array: if several share it, the current one or the first."""
        first, here = _memory_of(array, "device_of").device, current_device()
        return here if here in self._devices and self.memory_space(here) == first else first

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """Copies an array to another device.

        Raises:
            BackendError: the array is not on ``source``, ``destination`` is not current, or no event orders it after
                the last write to the array.
        """
        self._check_copy(array, source, destination)
        return _tagged(np.array(array.view(np.ndarray), order="C"))

    def place(self, arrays: Sequence[Any], sources: Sequence[Device], outs: Sequence[Any], destination: Device) -> None:
        """Copies arrays into views of arrays on another device; see `to_device`."""
        for array, source, out in zip(arrays, sources, outs, strict=True):
            self._check_copy(array, source, destination)
            np.copyto(_bare(out, "place"), array.view(np.ndarray), casting="unsafe")
            _wrote(out)

    def _check_copy(self, array: Any, source: Device, destination: Device) -> None:
        """Raises the errors of `to_device`."""
        self._owned(array, source, "to_device")
        memory, current = _memory_of(array, "to_device"), _device("to_device")
        destination = self.memory_space(destination)
        if current is not destination and current != destination:
            raise BackendError(f"to_device: {current} is current and the copy goes to {destination}")
        source = memory.device
        if source.id != destination.id and _clocks.known(destination, source) < memory.written:
            raise BackendError(
                f"to_device: no event orders {destination} after the last write of {source} to the array; call "
                "`record` and `wait`"
            )

    def from_host(self, array: HostArray, device: Device) -> Any:
        """Copies a host array to ``device``, which must be current."""
        if _device("from_host") != self.memory_space(device):
            raise BackendError(f"from_host: {_device('from_host')} is current and the copy goes to {device}")
        return _tagged(np.array(array, order="C"))

    def to_host(self, array: Any, device: Device) -> HostArray:
        """Copies an array of ``device`` to the host."""
        self._owned(array, device, "to_host")
        return np.array(array.view(np.ndarray))

    def export(self, array: Any) -> Any:
        """Returns a read-only view of the array."""
        return self.lend(array)[0]

    def lend(self, array: Any) -> tuple[Any, Callable[[], object] | None]:
        """Returns a read-only view of the array, and its lease."""
        view, its_lease = lend(array.view(np.ndarray))
        exported = view.view(CheckedArray)
        exported._memory = array._memory
        return exported, its_lease

    def adopt(self, held: list[Any], shards: Sequence[Any]) -> tuple[Any, bool]:
        """Returns a copy, after checking that the array is on the current device."""
        return _tagged(np.array(_bare(held[0], "result"))), True

    def is_exclusive(self, held: list[Any], others: int = 0) -> bool:
        """Whether only the list and the ``others`` refer to the array and its memory, and the array is contiguous."""
        memory, owner = [_memory_of(held[0], "is_exclusive")], [_owner(held[0])]
        if references(held) > 1 + others or references(memory) > 2 or references(owner) > 2:
            return False
        return self.memory_of(held[0]) is not None and self.begin_write(held[0])

    def is_whole(self, view: Any, array: Any) -> bool:
        """See `Backend`."""
        return (view.shape, view.strides, view.dtype) == (array.shape, array.strides, array.dtype)

    def memory_of(self, array: Any) -> int | None:
        """Identifies the memory of an array; None if NumPy did not allocate it."""
        return memory_of(_owner(array).view(np.ndarray))

    def begin_write(self, array: Any) -> bool:
        """Whether an array is contiguous and writable."""
        return bool(array.flags.forc) and bool(array.flags.writeable)

    def record(self, device: Device) -> Any:
        """Returns the clocks of ``device`` as the token of an event."""
        return _clocks.token(self.memory_space(device))

    def wait(self, device: Device, token: Any) -> None:
        """Orders later work on ``device`` after the event ``token``."""
        _clocks.learn(self.memory_space(device), token)

    def _owned(self, array: Any, device: Device, caller: str) -> None:
        owner, memory = _memory_of(array, caller).device, self.memory_space(device)
        if owner is not memory and owner != memory:
            raise BackendError(f"{caller}: the array is in the memory of {owner}, not of {device}")
