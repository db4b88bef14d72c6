"""Devices that do not exist, for what is planned and never run: their meshes, their backend, and its arrays.

A simulated tensor has shape, dtype and sharding, and no elements. It is planned as any other: what would move is
counted, and nothing does.
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
"""The backend of devices that do not exist."""


def no_elements() -> NoReturn:
    """Raises ArgumentTypeError: somebody wants to read a simulated tensor."""
    raise ArgumentTypeError(
        "simulated tensors have no elements; what depends on them (float(x), if x > 0, x[mask], np.asarray(x)) cannot "
        "be simulated: give such values as Python scalars or host arrays"
    )


def phantom(number: int) -> Device:
    """The simulated device of that number."""
    return Device(NAME, number, 0, NAME)


class AbstractArray:
    """What stands for an array without elements: a shape and a dtype. Nothing can be read of it."""

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
        """The bytes that its elements would take."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def real(self) -> AbstractArray:
        """The real part."""
        return AbstractArray(self.shape, np.empty(0, self.dtype).real.dtype)

    @property
    def imag(self) -> AbstractArray:
        """The imaginary part."""
        return self.real

    def __getitem__(self, index: Any) -> AbstractArray:
        return AbstractArray(np.broadcast_to(_NOTHING, self.shape)[index].shape, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        no_elements()


_NOTHING = np.zeros((), bool)


class _Namespace:
    """What is done with arrays without elements: what views and single elements ask for."""

    @staticmethod
    def reshape(x: AbstractArray, shape: tuple[int, ...]) -> AbstractArray:
        """In another shape, of as many elements."""
        return AbstractArray(tuple(shape), x.dtype)

    @staticmethod
    def permute_dims(x: AbstractArray, axes: Sequence[int]) -> AbstractArray:
        """With its dimensions in another order."""
        return AbstractArray(tuple([x.shape[a] for a in axes]), x.dtype)

    @staticmethod
    def asarray(x: Any, *, dtype: Any = None, copy: bool | None = None) -> AbstractArray:
        """In another dtype."""
        return AbstractArray(tuple(x.shape), np.dtype(x.dtype if dtype is None else dtype))

    def __getattr__(self, name: str) -> Callable[..., AbstractArray]:
        if not isinstance(getattr(np, name, None), np.ufunc):
            raise AttributeError(name)
        return lambda *xs: next(
            x for x in xs if isinstance(x, AbstractArray)
        )  # single elements; the caller knows the dtype


class AbstractBackend(Backend):
    """Devices that do not exist."""

    name = NAME
    simulated = True
    shared_memory = True  # a tensor is one thing, and plans are the short ones
    helper_delay = math.inf  # its programs only plan: threads would be in each other's way
    xp = _Namespace()

    def devices(self) -> Sequence[Device]:
        """The first of as many as one likes."""
        return (phantom(0),)

    def is_array(self, x: object) -> bool:
        """Whether it is a `AbstractArray`."""
        return isinstance(x, AbstractArray)

    def to_device(self, array: Any, source: Device, destination: Device) -> Any:
        """The same: there is nothing to copy."""
        return array

    def from_host(self, array: HostArray, device: Device) -> Any:
        """Its shape and dtype."""
        return AbstractArray(array.shape, array.dtype)

    def to_host(self, array: Any, device: Device) -> NoReturn:
        """Raises ArgumentTypeError."""
        no_elements()

    def to_dlpack(self, array: Any) -> NoReturn:
        """Raises ArgumentTypeError."""
        no_elements()

    def export(self, array: Any) -> NoReturn:
        """Raises ArgumentTypeError."""
        no_elements()


_backend = AbstractBackend()
