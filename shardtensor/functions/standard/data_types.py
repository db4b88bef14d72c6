"""Data type functions (a chapter of the array API standard)."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.registry import array_backend
from shardtensor.backend.small_floats import SMALL_FLOATS, is_small_float, promoted
from shardtensor.core import call, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor.host import blockwise
from shardtensor.sharding.layout import Where
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.view_spec import ViewSpec, part_of
from shardtensor.tensor.operands import sharded_dtype, truth_of
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor

_DERIVATIVES = "of_elementwise"


@operator("... -> ...", tags=("any dtype", "in kernels", "keeps arrays", "linear"))
def astype(x: ArrayLike, dtype: npt.DTypeLike, /, *, copy: bool = True, device: Where | None = None) -> ShardedTensor:
    """Casts x to ``dtype`` element by element, by NumPy's unsafe casting: floats are truncated towards zero when cast
    to integers, and complex numbers lose their imaginary part when cast to real ones.

    The result has x's shape and sharding; no data moves. It is an independent tensor, except that ``copy=False``
    returns x itself if it is a tensor of that dtype already.

    Args:
        x: a tensor or a host array of any shape and dtype.
        dtype: the dtype of the result, in any form that `numpy.dtype` accepts.
        copy: whether the result must be a new tensor even if x has the dtype already.
        device: a Device, Mesh or NamedSharding to which the result is transferred; x's sharding by default.

    Raises:
        ArgumentTypeError: ``dtype`` is not a NumPy dtype, or one that tensors cannot have (objects, text, records).

    >>> st.astype(st.asarray([1.7, -1.7]), "int32").tolist()
    [1, -1]
    """


@implements(astype, "composite")
def _astype_itself(x: Any, dtype: Any, copy: bool, device: Where | None) -> Any:
    if device is not None:
        return call("reshard", astype(x, dtype, copy=copy), sharding=device)
    copies = truth_of(copy, "copy")
    return x if not copies and isinstance(x, ShardedTensor) and x.dtype == sharded_dtype(dtype) else NotImplemented


@implements(astype, "kernel")
def _astype(xp: Any, context: ShardContext, x: Any, *, dtype: Any, copy: bool, device: None = None) -> Any:
    return xp.asarray(x, dtype=context.dtype)


implements(astype, "blockwise")(blockwise.cast)


def _bitcast_dtype(x: Any, *, dtype: np.dtype[Any]) -> Any:
    return np.empty(1, dtype)


@operator("... -> ...", dtype=_bitcast_dtype, error_name="view", tags=("any dtype", "internal"))
def bitcast(x: ArrayLike, /, dtype: np.dtype[Any]) -> ShardedTensor:
    """Returns the bits of the elements as elements of another dtype of the same size: a view, as `numpy.ndarray.view`.

    >>> from shardtensor.functions.standard.data_types import bitcast
    >>> bitcast(st.asarray([1.0]), np.dtype("int64")).tolist() == [1023 << 52]
    True
    """


@implements(bitcast, "kernel")
def _bitcast(xp: Any, context: ShardContext | None, x: Any, *, dtype: np.dtype[Any]) -> Any:
    return xp.asarray(part_of(x, dtype), copy=True)


@implements(bitcast, "view_spec")
def _bitcast_view(view_spec: ViewSpec, dtype: np.dtype[Any]) -> ViewSpec:
    return view_spec.bits(dtype)


def _dtype_of(x: Any) -> Any:
    if isinstance(x, ShardedTensor):
        return x.dtype
    owner = array_backend(x)
    return owner.dtype_of(x) if owner else x


def result_type(*arrays_and_dtypes: ArrayLike | npt.DTypeLike) -> np.dtype[Any]:
    """Returns the dtype to which an operator promotes operands of these dtypes, by NumPy's rules (`numpy.result_type`).

    Python scalars are weak: they take the dtype of the arrays if its kind can represent them. No elements are read.

    Args:
        *arrays_and_dtypes: tensors, host or backend arrays, Python scalars and dtypes, in any mixture.

    Raises:
        ArgumentTypeError: the dtypes have no common dtype, or an argument is neither an array nor a dtype.

    >>> st.result_type(st.zeros(2, dtype="float32"), 1.0)
    dtype('float32')
    """
    known = [_dtype_of(a) for a in arrays_and_dtypes]
    try:
        return _result_type([x.dtype if isinstance(x, (np.ndarray, np.generic)) else x for x in known])
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"result_type: {error}") from None


def _result_type(known: list[Any]) -> np.dtype[Any]:
    named = [sharded_dtype(x) if type(x) is str or isinstance(x, type) else x for x in known]
    if any(map(is_small_float, named)):
        operands = [type(x) if type(x) in SCALARS else x for x in named]
        if (result := promoted(operands, "result_type")) is not None:
            return result
        named = [np.dtype(np.float32) if is_small_float(x) else x for x in named]
    return np.result_type(*named)


_Kind = str | npt.DTypeLike


def isdtype(dtype: npt.DTypeLike, kind: _Kind | tuple[_Kind, ...]) -> bool:
    """Tests whether a dtype is of a kind.

    Args:
        dtype: the dtype, in any form that `numpy.dtype` accepts.
        kind: a dtype; or ``"bool"``, ``"signed integer"``, ``"unsigned integer"``, ``"integral"``, ``"real floating"``,
            ``"complex floating"`` or ``"numeric"``; or a tuple of these, of which one has to match.

    Raises:
        ArgumentTypeError: ``dtype`` is not a dtype that tensors can have, or ``kind`` is neither a dtype nor text.
        ArgumentError: ``kind`` is another text.

    >>> st.isdtype(st.float32, "real floating"), st.isdtype("int8", (st.bool, "integral"))
    (True, True)
    """
    known = sharded_dtype(dtype)
    try:
        if is_small_float(known):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            return any(_is_of_kind(known, k) for k in kinds)
        return bool(np.isdtype(known, kind))
    except (TypeError, ValueError) as error:
        raise (ArgumentTypeError if isinstance(error, TypeError) else ArgumentError)(f"isdtype: {error}") from None


def _is_of_kind(small: np.dtype[Any], kind: _Kind) -> bool:
    """Tests whether a floating-point dtype that NumPy lacks is of a kind."""
    if isinstance(kind, str) and kind not in SMALL_FLOATS:
        return bool(np.isdtype(np.dtype(np.float32), kind))
    return sharded_dtype(kind) == small


def can_cast(from_: npt.DTypeLike | ArrayLike, to: npt.DTypeLike, /, casting: str = "safe") -> bool:
    """Tests whether a dtype, or the dtype of an array, can be cast to another one. No elements are read.

    Args:
        from_: a dtype, a tensor or an array.
        to: the other dtype.
        casting: the casts that are permitted: ``"no"``, ``"equiv"``, ``"safe"`` (those that preserve every value),
            ``"same_kind"`` or ``"unsafe"``.

    Raises:
        ArgumentTypeError: ``from_`` is a Python scalar, which has no dtype, or an argument is not a dtype.
        ArgumentError: ``casting`` is another text.

    >>> st.can_cast(st.float32, st.float64), st.can_cast(st.zeros(2), st.float32)
    (True, False)
    """
    try:
        return bool(np.can_cast(_dtype_of(from_), to, casting))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise (ArgumentTypeError if isinstance(error, TypeError) else ArgumentError)(f"can_cast: {error}") from None


class IntInfo:
    """The limits of an integer dtype, as Python integers: see `iinfo`.

    Attributes:
        bits: the number of bits of an element.
        max, min: the largest and the smallest number.
        dtype: the dtype.
    """

    __slots__ = ("bits", "dtype", "max", "min")

    def __init__(self, limits: Any) -> None:
        self.bits = int(limits.bits)
        self.max = int(limits.max)
        self.min = int(limits.min)
        self.dtype: np.dtype[Any] = np.dtype(limits.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in self.__slots__)})"


class FloatInfo:
    """The limits of a real floating-point dtype, as Python numbers: see `finfo`.

    Attributes:
        bits: the number of bits of an element.
        eps: the difference between 1 and the next larger number.
        max, min: the largest and the smallest finite number.
        smallest_normal, tiny: the smallest positive number of full precision.
        dtype: the dtype.
    """

    __slots__ = ("bits", "dtype", "eps", "max", "min", "smallest_normal", "tiny")

    def __init__(self, limits: Any) -> None:
        self.bits = int(limits.bits)
        self.eps = float(limits.eps)
        self.max = float(limits.max)
        self.min = float(limits.min)
        self.smallest_normal = self.tiny = float(limits.smallest_normal)
        self.dtype: np.dtype[Any] = np.dtype(limits.dtype)

    __repr__ = IntInfo.__repr__


def finfo(type: npt.DTypeLike | ArrayLike, /) -> FloatInfo:
    """Returns the limits of a floating-point dtype.

    Args:
        type: a dtype or an array; if it is complex, the limits are those of the real and imaginary parts.

    Returns:
        An object with the attributes ``bits``, ``eps``, ``max``, ``min``, ``smallest_normal`` (Python numbers) and
        ``dtype``.

    Raises:
        ArgumentTypeError: it is not a floating-point dtype, nor an array of one.

    >>> st.finfo(st.float32).bits, st.finfo("complex128").eps
    (32, 2.220446049250313e-16)
    """
    known = _limited("finfo", type, "fc", "a real or complex floating-point dtype")
    return FloatInfo(importlib.import_module("ml_dtypes").finfo(known) if is_small_float(known) else np.finfo(known))


def iinfo(type: npt.DTypeLike | ArrayLike, /) -> IntInfo:
    """Returns the limits of an integer dtype.

    Args:
        type: a dtype or an array.

    Returns:
        An object with the attributes ``bits``, ``max``, ``min`` (Python integers) and ``dtype``.

    Raises:
        ArgumentTypeError: it is not an integer dtype, nor an array of one.

    >>> st.iinfo(st.int8).min, st.iinfo(st.zeros(2, dtype="uint8")).max
    (-128, 255)
    """
    return IntInfo(np.iinfo(_limited("iinfo", type, "iu", "an integer dtype")))


def _limited(caller: str, argument: Any, kinds: str, wanted: str) -> np.dtype[Any]:
    """Returns the dtype of an argument of `finfo` or `iinfo`, whose kind must be one of ``kinds``."""
    dtype = _dtype_of(argument)
    try:
        known = sharded_dtype(dtype.dtype if isinstance(dtype, (np.ndarray, np.generic)) else dtype)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{caller}: {error}") from None
    if ("f" if is_small_float(known) else known.kind) not in kinds:
        raise ArgumentTypeError(f"{caller}: {known} has no such limits; wanted {wanted}")
    return known
