"""The abstract backend: devices that do not exist and arrays without elements, for planning without execution.

A tensor on abstract devices has a shape, a dtype and a sharding, but no elements. Operators on it are planned like any
others: the transfers that they would need are counted, and none is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from shardtensor.backend.device import Device, HostArray
from shardtensor.backend.protocol import Backend
from shardtensor.errors import ArgumentTypeError

NAME = "simulated"
"""The name of the abstract backend."""


def no_elements() -> NoReturn:
    """Raises the ArgumentTypeError for an attempt to read elements of an abstract array."""
    raise ArgumentTypeError(
        "simulated tensors have no elements; operations that read elements (float(x), if x > 0, x[mask], "
        "np.asarray(x)) cannot be simulated: pass such values as Python scalars or host arrays"
    )


def abstract_device(number: int) -> Device:
    """Returns the abstract device with this id."""
    return Device(NAME, number, 0, NAME)


class AbstractArray:
    """An array without elements: a shape and a dtype. Reading its elements raises ArgumentTypeError.

    Basic indexing and the parts of complex arrays give abstract arrays of the resulting shape and dtype.

    Attributes:
        shape: the shape.
        dtype: the NumPy dtype.
    """

    __slots__ = ("dtype", "shape")

    flags = SimpleNamespace(c_contiguous=True)

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes that the elements would take."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def real(self) -> AbstractArray:
        """The real part, without elements."""
        return AbstractArray(self.shape, np.empty(0, self.dtype).real.dtype)

    @property
    def imag(self) -> AbstractArray:
        """The imaginary part, without elements."""
        return self.real

    def __getitem__(self, index: Any) -> AbstractArray:
        return AbstractArray(np.broadcast_to(_NOTHING, self.shape)[index].shape, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        no_elements()


_NOTHING = np.zeros((), bool)


class _Namespace:
    """The array-API namespace of the abstract backend: the functions that views and single elements need."""

    @staticmethod
    def reshape(x: AbstractArray, shape: tuple[int, ...]) -> AbstractArray:
        """Returns the abstract array of another shape with the same number of elements."""
        return AbstractArray(tuple(shape), x.dtype)

    @staticmethod
    def permute_dims(x: AbstractArray, axes: Sequence[int]) -> AbstractArray:
        """Returns the abstract array with its dimensions permuted."""
        return AbstractArray(tuple([x.shape[a] for a in axes]), x.dtype)

    @staticmethod
    def asarray(x: Any, *, dtype: Any = None, copy: bool | None = None) -> AbstractArray:
        """Returns the abstract array of another dtype; `copy` has no effect."""
        return AbstractArray(tuple(x.shape), np.dtype(x.dtype if dtype is None else dtype))

    def __getattr__(self, name: str) -> Callable[..., AbstractArray]:
        if not isinstance(getattr(np, name, None), np.ufunc):
            raise AttributeError(name)
        # The results are single elements, whose dtype the caller knows.
        return lambda *operands: next(x for x in operands if isinstance(x, AbstractArray))


class AbstractBackend(Backend):
    """The backend of devices that do not exist: it plans, and executes nothing."""

    name = NAME
    simulated = True
    shared_memory = True  # One abstract array then represents all shards, and plans are the shorter ones.
    helper_delay = math.inf  # Programs only plan here, so helper threads would only compete for the interpreter.
    xp = _Namespace()

    def devices(self) -> Sequence[Device]:
        """The first device; any id is valid, see `abstract_device`."""
        return (abstract_device(0),)

    def is_array(self, x: object) -> bool:
        """Whether ``x`` is an `AbstractArray`."""
        return isinstance(x, AbstractArray)

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """Returns ``array`` itself: it has no elements to copy."""
        return array

    def from_host(self, array: HostArray, device: Device) -> Any:
        """Returns the abstract array of the same shape and dtype."""
        return AbstractArray(array.shape, array.dtype)

    def to_host(self, array: Any, device: Device | None = None) -> NoReturn:
        """Raises ArgumentTypeError: there are no elements."""
        no_elements()

    to_dlpack = export = to_host


_backend = AbstractBackend()
