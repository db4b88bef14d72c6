"""`Conversions`: what Python, NumPy and DLPack convert tensors to."""

from __future__ import annotations

import math
import operator as python
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shardtensor.backend.device import HostArray
from shardtensor.core import ABOVE, OPS, bind, call
from shardtensor.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConcretizationError,
    DonatedError,
    IndexingError,
    NotAddressableError,
    ShapeError,
)
from shardtensor.host.units import counted
from shardtensor.tensor.handle import Handle


class Conversions(Handle):
    """The base class of tensors that converts them to host arrays, bytes, Python scalars, text and DLPack capsules."""

    __slots__ = ()

    # -- host arrays and DLPack --------------------------------------------------------------------

    def __array__(self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None) -> HostArray:
        array: HostArray = bind(OPS["to_host"], (self,), (None,))
        if dtype is None or array.dtype == np.dtype(dtype):
            # NumPy makes a new array of a scalar, which programs such as metrics of scikit-learn write to.
            return array.copy() if copy or (not array.ndim and copy is None and self._is_scalar) else array
        if copy is False:
            raise ShapeError(
                f"np.asarray: copy=False and dtype={np.dtype(dtype)} of a {self.dtype} tensor needs a copy"
            )
        return array.astype(dtype)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        return ABOVE["to_dlpack"](self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return ABOVE["dlpack_device"](self)  # type: ignore[no-any-return]

    # -- Python's objects --------------------------------------------------------------------------

    def tobytes(self, order: str = "C") -> bytes:
        """Returns the bytes of the elements, in row-major order or, for ``order="F"``, in column-major order."""
        return np.asarray(self).tobytes("F" if is_column_major(order, "tobytes") else "C")

    def to_numpy(self) -> HostArray:
        """Returns the whole tensor as a host array: `numpy.asarray` as a method, which matplotlib calls."""
        return np.asarray(self)

    def tolist(self) -> Any:
        """Returns the elements as nested Python lists; of a 0-d tensor, a Python scalar."""
        return self._on_host("tolist").tolist()

    def item(self, *index: Any) -> Any:
        """Returns an element as a Python scalar: the only one, that at a position in row-major order, or at an index of
        all dimensions.

        Raises:
            ShapeError: no index is given, and the tensor does not have exactly one element.
            IndexingError: the index is out of bounds.
            ArgumentError: it is not of all dimensions.
        """
        if not index:
            return self._only_element("item").item()
        at = index[0] if len(index) == 1 and isinstance(index[0], tuple) else index
        if len(at) == 1 and self.ndim != 1:
            position, size = python.index(at[0]), self.size
            if not -size <= position < size:
                raise IndexingError(f"item: position {position} is out of bounds for {counted(size, 'element')}")
            at = np.unravel_index(position % size, self.shape)
        if len(at) != self.ndim:
            raise ArgumentError(
                f"item: {counted(len(at), 'index', 'indices')} for {counted(self.ndim, 'dimension')}; wanted one for "
                "each"
            )
        return call("getitem", self, tuple(at)).item()

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:
        """Writes the elements in row-major order to a file, as `numpy.ndarray.tofile`: their bytes, one block of rows
        after the other, or with ``sep``, a text that separates them, as text in that format.

        Args:
            fid: a path, or a file that is open for writing bytes.
        """
        if sep:
            np.asarray(self).tofile(fid, sep, format)
            return
        ABOVE["write_elements"](fid, self)

    def __bool__(self) -> bool:
        hint = " (x.any() and x.all() are true or false)"
        return bool(self._only_element("bool", hint).reshape(())[()])

    def _only_element(self, caller: str, hint: str = "") -> HostArray:
        if self.size != 1:
            raise ShapeError(
                f"{caller}: the tensor has {counted(self.size, 'element')}, shape {self.shape}; wanted exactly "
                f"one{hint}"
            )
        return self._on_host(caller)

    def _on_host(self, caller: str) -> HostArray:
        """Returns the elements as a host array. Errors name ``caller``, since the call may be an `if`."""
        try:
            return bind(OPS["to_host"], (self,), (None,))  # type: ignore[no-any-return]
        except ConcretizationError as error:
            message = error.message_for(caller) if error.message_for else f"{caller}: {str(error).partition(': ')[2]}"
            raise ConcretizationError(message) from None
        except (DonatedError, NotAddressableError) as error:
            raise type(error)(f"{caller}: {str(error).partition(': ')[2]}") from None

    def __int__(self) -> int:
        return int(self._real_scalar("int"))

    def __float__(self) -> float:
        return float(self._real_scalar("float"))

    def _real_scalar(self, caller: str) -> Any:
        if self._aval.dtype.kind == "c":
            raise ArgumentTypeError(f"{caller}: the tensor has dtype {self.dtype}; wanted real numbers, such as x.real")
        return self._scalar(caller)

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    @overload
    def __round__(self) -> int: ...

    @overload
    def __round__(self, ndigits: int) -> float: ...

    def __round__(self, ndigits: int | None = None) -> float:
        number: float = round(self._scalar("round").item(), ndigits)
        return number

    def __trunc__(self) -> int:
        number: int = math.trunc(self._scalar("trunc").item())
        return number

    def __floor__(self) -> int:
        number: int = math.floor(self._scalar("floor").item())
        return number

    def __ceil__(self) -> int:
        number: int = math.ceil(self._scalar("ceil").item())
        return number

    def __index__(self) -> int:
        if self.ndim or self.dtype.kind not in "iu":
            description = f"a tensor of shape {self.shape} and dtype {self.dtype}"
            raise ArgumentTypeError(f"index: {description} is not an index; wanted an integer one without dimensions")
        return int(self._scalar("index"))

    def _scalar(self, caller: str) -> Any:
        """Returns the element of a 0-d tensor. Other tensors raise an error, as in NumPy and the array API standard."""
        if self._aval.ndim:
            raise ArgumentTypeError(
                f"{caller}: the tensor has shape {self.shape}; wanted one without dimensions (x.item() converts the "
                "only element of any shape)"
            )
        return self._on_host(caller)[()]

    def __format__(self, spec: str) -> str:
        """Formats the element of a 0-d tensor as a Python scalar: ``f"{loss:.3f}"``.

        Raises:
            ArgumentTypeError: a format is given, and the tensor has dimensions.
        """
        if not spec:
            return str(self)
        if self.ndim:
            raise ArgumentTypeError(
                f"format: {spec!r} of a tensor of shape {self.shape}; a format is for one element, such as x.item(), "
                "or for a tensor without dimensions"
            )
        return format(self.item(), spec)

    # -- display -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return ABOVE["described"](self)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return ABOVE["printed"](self)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        return ABOVE["tensor_html"](self, ABOVE["few_values"](self))  # type: ignore[no-any-return]


def is_column_major(order: str, caller: str) -> bool:
    """Whether an ``order=`` argument means column-major order.

    Raises:
        ArgumentError: it is none of NumPy's orders.
    """
    if order not in ("C", "F", "A", "K"):
        raise ArgumentError(f"{caller}: order is {order!r}; wanted 'C', 'F', 'A' or 'K'")
    return order == "F"
