"""The array-API namespace of PyTorch tensors: PyTorch's functions with NumPy's semantics.

Elementwise functions come from `shardtensor_torch.elementwise`, and functions that are not defined here from
`array_api_compat.torch`. Importing this module imports torch.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardtensor.backend import is_small_float
from shardtensor.errors import ArgumentError, ArgumentTypeError
from shardtensor_torch.elementwise import (
    COMPOSED,
    KERNELS,
    NUMPY,
    PLAIN,
    as_tensor,
    axes_of,
    cast,
    dtype_of,
    elementwise,
    host,
    is_int,
    loop,
    resolved,
    store,
    to_torch,
    torch,
)
from shardtensor_torch.extensions import FFT, Linalg
from shardtensor_torch.ordering import Ordering

__all__ = ["Namespace"]

compat: Any = importlib.import_module("array_api_compat.torch")


class Namespace(Ordering):
    """The array-API namespace; its functions run on the current device of type ``device`` (``cpu`` or ``cuda``)."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.linalg = Linalg()
        self.fft = FFT()

    def __getattr__(self, name: str) -> Any:
        if name in COMPOSED:
            raise AttributeError(name)
        ufunc, function = getattr(np, name, None), KERNELS.get(name, getattr(torch, name, None))
        if isinstance(ufunc, np.ufunc) and ufunc.signature is None and ufunc.nout == 1 and function is not None:
            kernel: Any = elementwise(name, function, self._scalar)
        else:
            kernel = getattr(compat, name)
            if callable(kernel) and not isinstance(kernel, type):
                kernel = functools.partial(_with_dtypes, kernel)
        setattr(self, name, kernel)
        return kernel

    def _scalar(self, value: Any, dtype: Any) -> Any:
        """Returns a Python number as a 0-d tensor. NumPy converts it, so that range checks and overflow are NumPy's."""
        if type(value) is not float or dtype is not torch.float64:
            with np.errstate(over="ignore"):
                value = NUMPY[dtype].type(value).item()
        return torch.full((), value, dtype=dtype, device=self._device)

    # -- creation ----------------------------------------------------------------------------------

    def asarray(self, x: Any, /, *, dtype: Any = None, copy: bool | None = None) -> Any:
        """Converts a tensor, a host array, a number or nested lists of numbers to a tensor."""
        if not isinstance(x, torch.Tensor):
            known: Any = getattr(x, "dtype", None)
            if is_small_float(known):  # PyTorch does not take such arrays of NumPy, but their bits.
                tensor = torch.tensor(host(x.view(f"i{known.itemsize}")), device=self._device).view(to_torch(known))
            else:
                tensor = torch.tensor(host(x), device=self._device)
            return tensor if dtype is None else cast(tensor, to_torch(dtype))
        tensor = resolved(x)
        if dtype is not None:
            tensor = cast(tensor, to_torch(dtype))
        return tensor.clone() if copy and tensor.dtype is x.dtype else tensor

    def astype(self, x: Any, dtype: Any, /, *, copy: bool = True) -> Any:
        """See NumPy."""
        return self.asarray(x, dtype=dtype, copy=copy)

    def _new(self, function: Any, shape: Any, dtype: Any, *values: Any) -> Any:
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        dtype = torch.float64 if dtype is None else to_torch(dtype)
        return function(shape, *values, dtype=dtype, device=self._device)

    def empty(self, shape: Any, *, dtype: Any = None) -> Any:
        """See NumPy."""
        return self._new(torch.empty, shape, dtype)

    def zeros(self, shape: Any, *, dtype: Any = None) -> Any:
        """See NumPy."""
        return self._new(torch.zeros, shape, dtype)

    def ones(self, shape: Any, *, dtype: Any = None) -> Any:
        """See NumPy."""
        return self._new(torch.ones, shape, dtype)

    def full(self, shape: Any, fill_value: Any, *, dtype: Any = None) -> Any:
        """See NumPy."""
        if isinstance(fill_value, torch.Tensor):
            tensor = self._new(torch.empty, shape, fill_value.dtype if dtype is None else dtype)
            return store(tensor, fill_value)
        dtype = np.asarray(fill_value).dtype if dtype is None else NUMPY[to_torch(dtype)]
        return self._new(torch.full, shape, dtype, np.full((), fill_value, dtype).item())

    def full_like(self, x: Any, /, fill_value: Any, *, dtype: Any = None) -> Any:
        """See NumPy."""
        return self.full(tuple(x.shape), fill_value, dtype=x.dtype if dtype is None else dtype)

    def arange(self, start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None) -> Any:
        """See NumPy."""
        first, last = (0, start) if stop is None else (start, stop)
        dtype = to_torch(np.result_type(*map(np.asarray, (first, last, step))) if dtype is None else dtype)
        exact = torch.int64 if all(isinstance(v, int) for v in (first, last, step)) else torch.float64
        return cast(compat.arange(first, last, step, dtype=exact, device=self._device), dtype)

    def eye(self, n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None) -> Any:
        """See NumPy."""
        tensor = self.zeros((n_rows, n_rows if n_cols is None else n_cols), dtype=dtype)
        if -tensor.shape[0] < k < tensor.shape[1]:
            tensor.diagonal(k).fill_(1)
        return tensor

    # -- dtypes ------------------------------------------------------------------------------------

    def result_type(self, *arrays_and_dtypes: Any) -> Any:
        """See NumPy. The result is a torch dtype."""
        return to_torch(np.result_type(*map(_known, arrays_and_dtypes)))

    def can_cast(self, from_: Any, to: Any, /) -> bool:
        """See NumPy."""
        return np.can_cast(_known(from_), _known(to))

    def isdtype(self, dtype: Any, kind: Any) -> bool:
        """See NumPy."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        return np.isdtype(_known(dtype), tuple([k if isinstance(k, str) else _known(k) for k in kinds]))

    def finfo(self, type: Any, /) -> Any:
        """See NumPy."""
        return np.finfo(_known(type))

    def iinfo(self, type: Any, /) -> Any:
        """See NumPy."""
        return np.iinfo(_known(type))

    # -- elementwise functions that are not ufuncs in NumPy ----------------------------------------

    def _together(self, *args: Any, wrap: bool = False) -> list[Any]:
        """Converts the operands to tensors of NumPy's promoted dtype. With ``wrap``, integers out of range wrap."""
        args = tuple(
            [x if type(x) in PLAIN or isinstance(x, torch.Tensor) else as_tensor(x, self._scalar) for x in args]
        )
        dtype = self.result_type(*args)
        if wrap and NUMPY[dtype].kind in "iu":
            args = tuple([np.asarray(x).astype(NUMPY[dtype]).item() if type(x) is int else x for x in args])
        return [self._scalar(x, dtype) if type(x) in PLAIN else cast(x, dtype) for x in args]

    def where(self, condition: Any, x1: Any, x2: Any, /) -> Any:
        """See NumPy. Integers out of range wrap around."""
        return torch.where(self.asarray(condition, dtype=bool), *self._together(x1, x2, wrap=True))

    def clip(self, x: Any, /, min: Any = None, max: Any = None, *, out: Any = None) -> Any:
        """See NumPy."""
        if is_int(x) and x.dtype is not torch.bool:  # A bound outside the range of the dtype has no effect.
            known = torch.iinfo(x.dtype)
            min = None if type(min) is int and min <= known.min else min
            max = None if type(max) is int and max >= known.max else max
        limits = [bound for bound in (min, max) if bound is not None]
        result, *bounds = self._together(x, *limits)
        if min is not None:
            result = self.maximum(result, bounds[0])
        if max is not None:
            result = self.minimum(result, bounds[-1])
        result = result if limits else result.clone()
        return result if out is None else store(out, result)

    def real(self, x: Any, /) -> Any:
        """See NumPy. The result is a view."""
        return x.real if x.dtype.is_complex else x

    def imag(self, x: Any, /) -> Any:
        """See NumPy. The result is a view of a complex tensor, and new zeros otherwise."""
        return resolved(x).imag if x.dtype.is_complex else torch.zeros_like(x)

    def round(self, x: Any, /, *, decimals: int = 0, out: Any = None) -> Any:
        """See NumPy."""
        decimals = int(decimals)
        if x.dtype.is_complex:
            result = torch.complex(torch.round(x.real, decimals=decimals), torch.round(x.imag, decimals=decimals))
        elif x.dtype is torch.bool:
            result = x.half()
        else:
            result = _rounded(x, decimals)
        return result if out is None else store(out, result)

    # -- reductions --------------------------------------------------------------------------------

    def _reduced(self, function: Any, x: Any, axis: Any, keepdims: bool) -> Any:
        """Reduces over several axes with a function that reduces over the last dimension only.

        The axes are moved to the end and merged into one dimension, which may copy the tensor.
        """
        axes = axes_of(axis, x.ndim)
        kept = [d for d in range(x.ndim) if d not in axes]
        size = math.prod(x.shape[d] for d in axes)
        result = function(torch.permute(x, (*kept, *axes)).reshape((*[x.shape[d] for d in kept], size)))
        return result.reshape([1 if d in axes else n for d, n in enumerate(x.shape)]) if keepdims else result

    def _terms(self, name: str, x: Any, dtype: Any) -> Any:
        """Returns the terms of a sum or the factors of a product in the dtype of the result."""
        if dtype is None and is_int(x):
            if x.dtype is torch.uint8:
                raise ArgumentTypeError(f"{name}: uint8 gives uint64, which PyTorch does not support; pass dtype=")
            dtype = torch.int64
        return x if dtype is None else cast(x, to_torch(dtype))

    def _total(self, name: str, x: Any, axis: Any, dtype: Any, keepdims: bool) -> Any:
        x = self._terms(name, x, dtype)
        if x.dtype is torch.bool:
            return (self.any if name == "sum" else self.all)(x, axis=axis, keepdims=keepdims)
        if name == "prod":
            wide = x.float() if x.dtype is torch.float16 else x
            return cast(self._reduced(lambda a: torch.prod(a, -1, dtype=wide.dtype), wide, axis, keepdims), x.dtype)
        axes = axes_of(axis, x.ndim)
        return torch.sum(x, axes, keepdim=keepdims, dtype=x.dtype) if axes else x.clone()

    def sum(self, x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._total("sum", x, axis, dtype, keepdims)

    def prod(self, x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._total("prod", x, axis, dtype, keepdims)

    def cumsum(self, x: Any, /, *, axis: int, dtype: Any = None) -> Any:
        """See NumPy."""
        terms = self._terms("cumsum", x, dtype)
        sums = torch.cumsum(terms, axis)
        on_host = terms.is_floating_point() and terms.numel() and terms.ndim and terms.device.type == "cpu"
        if on_host and bool(_negative_zeros(terms.select(axis, 0)).any()):
            # PyTorch adds to 0.0, which loses the sign of sums of -0.0 alone. They begin with the first terms.
            sums.detach()[torch.cummin(_negative_zeros(terms).to(torch.uint8), axis).values.bool()] = -0.0
        return sums

    def cumprod(self, x: Any, /, *, axis: int, dtype: Any = None) -> Any:
        """See NumPy."""
        return torch.cumprod(self._terms("cumprod", x, dtype), axis)

    def any(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        x = cast(x, torch.bool)
        axes = axes_of(axis, x.ndim)
        return torch.any(x, axes, keepdim=keepdims) if axes else x.clone()

    def all(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        x = cast(x, torch.bool)
        axes = axes_of(axis, x.ndim)
        return torch.all(x, axes, keepdim=keepdims) if axes else x.clone()

    def mean(self, x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        wide = _wide(x) if dtype is None else cast(x, to_torch(dtype))
        result = self.sum(wide, axis=axis, dtype=dtype, keepdims=keepdims) / self._count(x, axis)
        if dtype is not None:
            return cast(result, wide.dtype)
        return result if is_int(x) else cast(result, x.dtype)

    def var(self, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
        """See NumPy."""
        wide = _wide(x)
        far = wide - self.mean(wide, axis=axis, keepdims=True)
        square = far.real**2 + far.imag**2 if far.dtype.is_complex else far * far
        result = self.sum(square, axis=axis, keepdims=keepdims) / max(self._count(x, axis) - correction, 0)
        return cast(result, x.dtype) if x.dtype is torch.float16 else result

    def std(self, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self.sqrt(self.var(x, axis=axis, correction=correction, keepdims=keepdims))

    def _count(self, x: Any, axis: Any) -> int:
        return math.prod(x.shape[d] for d in axes_of(axis, x.ndim))

    def _extremum(self, best: str, x: Any, axis: Any, keepdims: bool) -> Any:
        axes = axes_of(axis, x.ndim)
        if not axes:
            return x.clone()
        if not self._count(x, axis):
            raise ArgumentError(f"{best}: no elements along axis {axis} of shape {tuple(x.shape)}")
        if not x.dtype.is_complex:
            return getattr(torch, f"a{best}")(x, axes, keepdim=keepdims)
        return self._reduced(
            lambda a: torch.take_along_dim(a, _first(best, a).unsqueeze(-1), -1).squeeze(-1), x, axis, keepdims
        )

    def max(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._extremum("max", x, axis, keepdims)

    def min(self, x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._extremum("min", x, axis, keepdims)

    def _arg_extremum(self, best: str, x: Any, axis: Any, keepdims: bool) -> Any:
        if not self._count(x, axis):
            raise ArgumentError(f"arg{best}: no elements along axis {axis} of shape {tuple(x.shape)}")
        return self._reduced(functools.partial(_first, best), x, axis, keepdims)

    def argmax(self, x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._arg_extremum("max", x, axis, keepdims)

    def argmin(self, x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
        """See NumPy."""
        return self._arg_extremum("min", x, axis, keepdims)

    # -- linear algebra ----------------------------------------------------------------------------

    def matmul(self, x1: Any, x2: Any, /, *, out: Any = None) -> Any:
        """See NumPy."""
        dtypes, _ = loop("matmul", (x1.dtype, x2.dtype))
        product = _product(cast(x1, dtypes[0]), cast(x2, dtypes[1]))
        return product if out is None else store(out, product)

    def tensordot(self, x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
        """See NumPy."""
        n, m = x1.ndim, x2.ndim
        axes_pair = (range(n - axes, n), range(axes)) if isinstance(axes, int) else axes
        left, right = [axes_of([a] if isinstance(a, int) else [*a], d) for a, d in zip(axes_pair, (n, m), strict=True)]
        rows, columns = [d for d in range(n) if d not in left], [d for d in range(m) if d not in right]
        x1, x2 = torch.permute(x1, (*rows, *left)), torch.permute(x2, (*right, *columns))
        shape = (*x1.shape[: len(rows)], *x2.shape[len(right) :])
        inner = [math.prod(s) for s in (x1.shape[len(rows) :], x2.shape[: len(right)])]
        if inner[0] != inner[1]:
            raise ArgumentError(
                f"tensordot: the contracted sizes of x1 and x2 are {inner[0]} and {inner[1]}; wanted equal"
            )
        sizes = math.prod(shape[: len(rows)]), math.prod(shape[len(rows) :])
        return self.matmul(x1.reshape(sizes[0], inner[0]), x2.reshape(inner[1], sizes[1])).reshape(shape)

    def vecdot(self, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
        """See NumPy."""
        dtypes, result = loop("vecdot", (x1.dtype, x2.dtype))
        left, right = [torch.movedim(cast(x, d), axis, -1) for x, d in zip((x1, x2), dtypes, strict=True)]
        if left.shape[-1] != right.shape[-1]:
            raise ArgumentError(f"vecdot: x1 has size {left.shape[-1]} along axis {axis}, and x2 has {right.shape[-1]}")
        if result is torch.bool:
            return (left & right).any(-1)
        wide = torch.float32 if result is torch.float16 else result
        return cast(torch.sum(torch.conj_physical(left.to(wide)) * right.to(wide), -1, dtype=wide), result)

    def added_rows(self, at: Any, values: Any, size: int) -> Any:
        """Returns zeros, ``size`` of them along the first dimension, to which rows are added at places, in their order.
        None on a GPU, where PyTorch adds in any order.
        """
        if values.device.type != "cpu":
            return None
        return torch.zeros((size, *values.shape[1:]), dtype=values.dtype).index_add_(0, at, values)

    # -- shapes ------------------------------------------------------------------------------------

    def reshape(self, x: Any, /, shape: Any, *, copy: bool | None = None) -> Any:
        """See NumPy."""
        return compat.reshape(x, shape if isinstance(shape, (tuple, list)) else (shape,), copy=copy)

    def permute_dims(self, x: Any, /, axes: Sequence[int]) -> Any:
        """See NumPy."""
        return torch.permute(x, tuple(axes))

    def matrix_transpose(self, x: Any, /) -> Any:
        """See NumPy."""
        if x.ndim < 2:
            raise ArgumentError(f"matrix_transpose: x.ndim is {x.ndim}; wanted at least 2")
        return x.mT

    def moveaxis(self, x: Any, source: Any, destination: Any, /) -> Any:
        """See NumPy."""
        return torch.movedim(x, source, destination)

    def flip(self, x: Any, /, *, axis: Any = None) -> Any:
        """See NumPy. The result is a copy."""
        return torch.flip(x, axes_of(axis, x.ndim))

    def concat(self, arrays: Sequence[Any], /, *, axis: int | None = 0) -> Any:
        """See NumPy."""
        arrays = self._together(*arrays)
        return torch.cat([a.reshape(-1) for a in arrays]) if axis is None else torch.cat(arrays, axis)

    def stack(self, arrays: Sequence[Any], /, *, axis: int = 0) -> Any:
        """See NumPy."""
        return torch.stack(self._together(*arrays), axis)


def _known(x: Any) -> Any:
    """Returns the NumPy dtype of a tensor or torch dtype, and any other object unchanged."""
    if isinstance(x, torch.Tensor):
        return dtype_of(x)
    return NUMPY.get(x, x) if isinstance(x, torch.dtype) else x


def _with_dtypes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of array_api_compat, converting its ``dtype`` to a torch dtype."""
    if kwargs.get("dtype") is not None:
        kwargs["dtype"] = to_torch(kwargs["dtype"])
    return function(*args, **kwargs)


def _negative_zeros(x: Any) -> Any:
    """Returns where a real tensor is -0.0."""
    return (x == 0) & torch.signbit(x)


def _wide(x: Any) -> Any:
    """Casts a tensor to the dtype in which NumPy computes its mean."""
    return x.double() if is_int(x) else x.float() if x.dtype is torch.float16 else x


def _rounded(x: Any, decimals: int) -> Any:
    """Returns real numbers rounded, as a new tensor; as NumPy does, integers in float64, and float16 in each step."""
    if is_int(x) and decimals >= 0:
        return x.clone()
    if not is_int(x) and x.dtype is not torch.float16:
        return torch.round(x, decimals=decimals)
    size = abs(decimals)
    wide = x.double() if is_int(x) else x
    power = torch.tensor(10.0**size if size < 309 else math.inf, dtype=torch.float64).to(wide.dtype)
    if decimals < 0:
        return (torch.round(wide / power) * power).to(x.dtype)
    return torch.round(wide * power) / power


def _first(best: str, x: Any) -> Any:
    """Returns the index of the first extremum along the last dimension (``best``: "max" or "min"); NaN wins."""
    if not x.dtype.is_complex:
        return getattr(torch, f"arg{best}")(x.to(torch.uint8) if x.dtype is torch.bool else x, -1)
    extremum = getattr(torch, f"a{best}")
    ties = x.real == extremum(x.real, -1, keepdim=True)
    imag = torch.where(ties, x.imag, -math.inf if best == "max" else math.inf)
    chosen, nan = ties & (imag == extremum(imag, -1, keepdim=True)), torch.isnan(x)
    return torch.argmax(torch.where(nan.any(-1, keepdim=True), nan, chosen).to(torch.uint8), -1)


def _product(a: Any, b: Any) -> Any:
    """Returns the matrix product of tensors of equal dtype, with NumPy's rounding."""
    if a.dtype is torch.bool:
        return torch.matmul(a.float(), b.float()) != 0  # The product counts the pairs that are both true.
    if a.dtype is torch.float16 and a.device.type == "cpu":
        return torch.matmul(a.float(), b.float()).half()
    if is_int(a) and a.device.type != "cpu":
        return integer_product(a, b)
    return torch.matmul(a, b)


def integer_product(a: Any, b: Any, most: int = 1 << 24) -> Any:
    """Returns the matrix product of integer tensors, for devices on which PyTorch has no integer matmul.

    Computes sums of elementwise products, about ``most`` products at a time, which bounds the temporary memory.
    """
    left, right = a if a.ndim > 1 else a[None, :], b if b.ndim > 1 else b[:, None]
    shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    total = torch.zeros(shape, dtype=a.dtype, device=a.device)
    step = max(most // max(total.numel(), 1), 1)
    for k in range(0, left.shape[-1], step):
        pairs = left[..., :, k : k + step, None] * right[..., None, k : k + step, :]
        total += pairs.sum(-2, dtype=a.dtype)
    if b.ndim == 1:
        total = total[..., 0]
    return total if a.ndim > 1 else total.select(-1 if b.ndim == 1 else -2, 0)
