"""Operands of operators: tensors, host arrays, arrays of backends and Python scalars; and the aval of a host array."""

from __future__ import annotations

import operator as python
from functools import lru_cache
from typing import Any

import numpy as np

from shardtensor.backend.device import HOST_MEMORY, Device
from shardtensor.backend.exclusive_memory import read_only
from shardtensor.backend.protocol import current_device
from shardtensor.backend.registry import array_backend, backend_of
from shardtensor.backend.small_floats import SMALL_FLOATS, is_element, small_float
from shardtensor.errors import ArgumentError, ArgumentTypeError, ConcretizationError, ShardTensorError, type_text
from shardtensor.hints import of_value
from shardtensor.sharding.cells import Cells, cells
from shardtensor.sharding.copy_plan import host_grid
from shardtensor.sharding.layout import Grid, Shape, as_sharding
from shardtensor.tensor.nested_lists import check_leaves, converted, from_lists
from shardtensor.tensor.pytree import hint_to_register
from shardtensor.tensor.tensor import SCALARS, ShardedTensor, tensor_of
from shardtensor.tensor.value import aval


def shape_of(x: Any) -> Shape:
    """Returns the shape of a tensor, an array of any library, or a scalar."""
    if type(x) is ShardedTensor:
        return x._aval.shape
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def dtype_of(x: Any) -> np.dtype[Any]:
    """Returns the dtype of a tensor, an array of any library, or a scalar."""
    if type(x) is ShardedTensor:
        return x._aval.dtype
    backend = None if isinstance(x, np.ndarray) else array_backend(x)
    if backend is not None:
        return backend.dtype_of(x)
    dtype: np.dtype[Any] = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return dtype


def integer_from(least: int, value: Any, name: str, where: str = "", wanted: str = "an integer") -> int:
    """Returns the argument ``name`` of a function as an integer.

    Args:
        least: the least integer that is accepted.
        value: the argument.
        name: its name.
        where: what the message adds to the value of an integer that is too small.
        wanted: what the message says of an argument that is not an integer.

    Raises:
        ArgumentTypeError: it is not an integer.
        ArgumentError: it is less than ``least``.
    """
    number = integer_of(value, name, wanted)
    if number < least:
        raise ArgumentError(f"{name} is {number}{where}; wanted at least {least}")
    return number


def truth_of(value: Any, name: str) -> bool:
    """Returns whether the argument ``name`` of a function is true.

    Raises:
        ArgumentTypeError: it is an array without elements or with several.
    """
    try:
        return bool(value)
    except ValueError as error:
        if isinstance(error, ShardTensorError):
            raise
        raise ArgumentTypeError(f"{name} is {value!r:.60}; wanted a single truth value") from None


def integer_of(value: Any, name: str, wanted: str = "an integer") -> int:
    """Returns the argument ``name`` of a function, an integer of any size, as one of Python.

    Raises:
        ArgumentTypeError: it is not an integer.
    """
    try:
        return python.index(value)
    except ConcretizationError:
        raise  # It is a TypeError, too, and says what to do.
    except TypeError:
        raise ArgumentTypeError(f"{name} is {value!r:.60}, {type_text(value)}; wanted {wanted}") from None


def sharded_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns a dtype as the `numpy.dtype` that a tensor can have: bool, numeric or time.

    Raises:
        ArgumentTypeError: it is not a dtype, or it is one of Python objects, text or records.
    """
    if type(dtype) is str and dtype in SMALL_FLOATS:
        return small_float(dtype)
    try:
        known: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        hint = "; a shape of several sizes is one tuple, such as (3, 4)" if type(dtype) is int else ""
        raise ArgumentTypeError(f"dtype is {dtype!r}; wanted a NumPy dtype, such as 'float32'{hint}") from None
    if not is_element(known):
        raise ArgumentTypeError(f"dtype {known} cannot be sharded; wanted bool, numbers or times")
    return known


class HostAval:
    """The shape and dtype of a host array. As for `Aval`, equal values are the same object (see `host_aval`).

    Raises:
        ArgumentTypeError: tensors cannot have that dtype.
    """

    __slots__ = ("dtype", "nbytes", "ndim", "shape")

    memory = HOST_MEMORY

    def __init__(self, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = sharded_dtype(dtype)
        self.ndim = len(shape)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    @property
    def grid(self) -> Grid:
        """The grid of the array: one part, on the host."""
        return host_grid(self.shape)

    @property
    def cells(self) -> Cells:
        """The only cell of the array."""
        return cells(self.grid, (HOST_MEMORY,))


host_aval = lru_cache(4096)(HostAval)


def as_operand(x: Any, caller: str) -> Any:
    """Returns an operand in a form that plans take: a tensor, a host array, a Python scalar or None.

    An array of a backend is copied into a tensor on its device. A tensor from an array on the current device of a
    mapped function is not committed: like a host array there, it is transferred to the operands that were placed
    explicitly.

    Raises:
        ArgumentTypeError: the object is none of these.
    """
    if x is None or type(x) is ShardedTensor or type(x) in SCALARS:
        return x
    if backend := array_backend(x):
        device = backend.device_of(x)
        backend.wait_for_caller(device)
        with backend.on(device):
            mine = backend.xp.asarray(backend.asarray(x), copy=True)
        backend.make_caller_wait(device)  # the caller may overwrite x after this call
        return on_one_device(mine, backend.dtype_of(mine), device, device != current_device())
    if isinstance(x, (np.ndarray, np.generic, bool, int, float, complex)):  # includes subclasses of Python's numbers
        return np.asarray(x)
    if hint := of_value(x):
        raise ArgumentTypeError(f"{caller}: an operand is {hint}")
    raise ArgumentTypeError(
        f"{caller}: {x!r:.60} is {type_text(x)}; wanted a tensor, an array or a scalar "
        f"(st.asarray converts nested lists to a tensor){hint_to_register(x)}"
    )


def on_one_device(array: Any, dtype: np.dtype[Any], device: Device, committed: bool = True) -> ShardedTensor:
    """Returns the tensor of that dtype whose only shard is ``array``, which it shares, on ``device``."""
    value = aval(tuple(array.shape), dtype, as_sharding(device, array.ndim, "device"), committed)
    return tensor_of(value, (array,))


def located(x: Any) -> Any:
    """Wraps a host array as a tensor on the current device, if that device shares the host's memory.

    In a mapped function on such devices, host arrays are arrays of the device of the call, so that a transfer starts
    there. Any other operand is returned unchanged.
    """
    if not isinstance(x, np.ndarray) or (device := current_device()) is None or not backend_of(device).on_host:
        return x
    return on_one_device(read_only(x), x.dtype, device, committed=False)


def is_data(x: Any) -> bool:
    """Whether a leaf is an array that tensors can hold; arrays of text and of objects are leaves like any other."""
    return (isinstance(x, (np.ndarray, np.generic)) and is_element(x.dtype)) or array_backend(x) is not None


def fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Returns the NumPy scalar that `numpy.full` writes to arrays of that dtype.

    Python integers must fit the dtype; floats, and numbers that have a dtype, are cast.

    Raises:
        OverflowError: an integer does not fit.
        ArgumentTypeError: NumPy has no such cast.
    """
    element = np.empty((), dtype)
    try:
        np.copyto(element, value, casting="unsafe")
    except TypeError as error:
        raise ArgumentTypeError(f"fill_value {value!r:.60} for elements of {dtype}: {error}") from None
    return element[()]


def host_array(obj: Any, caller: str, dtype: np.dtype[Any] | None = None) -> Any:
    """Returns ``obj`` as a host array; a tensor or a backend's array as a tensor; nested lists of scalars as one array.

    Python scalars, also in lists, are converted to ``dtype`` directly: an intermediate dtype would round numbers that
    it cannot represent, or wrap them around.

    Raises:
        ArgumentTypeError: ``obj`` is not an array, a scalar or nested lists of scalars.
        ShapeError: nested lists have different lengths.
    """
    if obj is None:
        raise no_array(caller)
    if isinstance(obj, (list, tuple)):
        if dtype is None:
            return from_lists(obj, caller)
        check_leaves(obj, caller)
        return converted(obj, dtype, "obj")
    if type(obj) in SCALARS:
        obj = np.asarray(obj if dtype is None else converted(obj, dtype, "obj"))
    return as_operand(obj, caller)


def no_array(caller: str) -> ArgumentTypeError:
    """Returns the error for None where an array is wanted."""
    return ArgumentTypeError(f"{caller}: None is not an array; wanted a tensor, an array, a scalar or lists of scalars")
