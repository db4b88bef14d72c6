"""The array: its attributes, indexing, operators, and copies between device and host."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np

from . import cuda, graphs, launch, memory
from . import world as w
from .dlpack import export
from .indexing import get_item, set_item

_SCALARS = (bool, int, float, complex, np.generic)


class Flags:
    """The memory layout, with CuPy's names."""

    __slots__ = ("c_contiguous", "f_contiguous", "owndata")

    def __init__(self, c_contiguous: bool, f_contiguous: bool, owndata: bool) -> None:
        self.c_contiguous, self.f_contiguous, self.owndata = c_contiguous, f_contiguous, owndata

    def __getitem__(self, name: str) -> bool:
        return getattr(self, name.lower())

    @property
    def forc(self) -> bool:
        return self.c_contiguous or self.f_contiguous

    @property
    def fnc(self) -> bool:
        return self.f_contiguous and not self.c_contiguous

    def __repr__(self) -> str:
        return f"  C_CONTIGUOUS : {self.c_contiguous}\n  F_CONTIGUOUS : {self.f_contiguous}\n  OWNDATA : {self.owndata}"


def _property(name: str) -> property:
    return property(lambda self: getattr(self._a, name))


def _method(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return namespace[name](self, *args, **kwargs)

    method.__name__ = name
    return method


def _defers(x: Any, y: Any) -> bool:
    """Whether an operator defers to the other operand: by NEP 13, then by priorities, as in CuPy."""
    protocol = getattr(y, "__array_ufunc__", _SCALARS)
    if protocol is not _SCALARS:
        return protocol is None
    return getattr(x, "__array_priority__", 0) < getattr(y, "__array_priority__", 0)


def _operators(name: str) -> tuple[Any, Any, Any]:
    """Returns the methods of an operator: with the array on the left, on the right, and in place."""
    numpy_ufunc = getattr(np, name)
    ufunc = launch.Ufunc(numpy_ufunc)

    def forward(self: Any, other: Any) -> Any:
        if isinstance(other, ndarray) or type(other) in _FAST:
            return ufunc(self, other)
        return NotImplemented if _defers(self, other) else numpy_ufunc(self, other)

    def mirrored(self: Any, other: Any) -> Any:
        if type(other) in _FAST:
            return ufunc(other, self)
        return NotImplemented if _defers(self, other) else numpy_ufunc(other, self)

    def in_place(self: Any, other: Any) -> Any:
        return ufunc(self, other, out=self)

    return forward, mirrored, in_place


_FAST = {bool, int, float, complex, np.float32, np.float64, np.int64, np.int32, np.bool_, np.complex128}

namespace: dict[str, Any] = {}
"""The functions of the module ``cupy`` by name; filled when the module is built."""


class ndarray:  # noqa: N801 - CuPy's name
    """An array on a device. Its memory is a NumPy buffer, and `_a` is the view of it that queued work uses."""

    __module__ = "cupy"
    __slots__ = ("__weakref__", "_a", "base", "data")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __new__(
        cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str | None = "C"
    ) -> Any:
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if any(n < 0 for n in shape):
            raise ValueError("Negative dimensions are not allowed")
        if memptr is None:
            return launch.empty(shape, supported(dtype), order or "C", cls)
        made = object.__new__(cls)
        block = memptr.mem.block
        start = memptr.ptr - block.ptr if block else 0
        made._a = np.ndarray(shape, dtype, block.raw if block else None, start, strides, order or "C")
        made.data, made.base = memptr, None
        return made

    ndim, size, nbytes, itemsize, dtype, strides = map(
        _property, ("ndim", "size", "nbytes", "itemsize", "dtype", "strides")
    )

    @property
    def shape(self) -> tuple[int, ...]:
        return self._a.shape

    @shape.setter
    def shape(self, shape: Any) -> None:
        raw = self._a.reshape(shape)
        if raw.size and not np.may_share_memory(raw, self._a):
            raise AttributeError("Incompatible shape for in-place modification. Use `.reshape()`")
        self._a = raw

    @property
    def flags(self) -> Flags:
        flags = self._a.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, self.base is None)

    @property
    def device(self) -> cuda.Device:
        return cuda.Device(self.data.device_id)

    @property
    def T(self) -> Any:
        return self if self.ndim < 2 else launch.view(self, self._a.T)

    @property
    def mT(self) -> Any:
        if self.ndim < 2:
            raise ValueError("matrix transpose with ndim < 2 is undefined")
        return launch.view(self, self._a.mT)

    @property
    def real(self) -> Any:
        return launch.view(self, self._a.real) if self.dtype.kind == "c" else self

    @real.setter
    def real(self, value: Any) -> None:
        self.real[...] = value

    @property
    def imag(self) -> Any:
        if self.dtype.kind == "c":
            return launch.view(self, self._a.imag)
        return namespace["zeros"](self.shape, self.dtype)

    @imag.setter
    def imag(self, value: Any) -> None:
        if self.dtype.kind != "c":
            raise TypeError("cupy.ndarray does not have imaginary part to set")
        self.imag[...] = value

    def describe(self) -> str:
        """Returns a description for error messages."""
        return f"an array of shape {self.shape} and dtype {self.dtype}"

    # -- shape ---------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> Any:
        if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)):
            (shape,) = shape
        if copy is True:
            return self.copy().reshape(shape, order=order)
        raw = self._a.reshape(shape, order=order)
        if raw.size and not np.may_share_memory(raw, self._a):  # NumPy copied, perhaps before queued work has run
            if copy is False:
                raise ValueError("Unable to avoid creating a copy while reshaping.")
            return launch.call("reshape", np.reshape, (self, raw.shape), {"order": order})
        return launch.view(self, raw)

    def transpose(self, *axes: Any) -> Any:
        return launch.view(self, self._a.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        return launch.view(self, self._a.swapaxes(axis1, axis2))

    def ravel(self, order: str = "C") -> Any:
        return self.reshape(-1, order="F" if order == "F" else "C")

    def flatten(self, order: str = "C") -> Any:
        return launch.call("flatten", np.ravel, (self,), {"order": order})

    def view(self, dtype: Any = None, type: Any = None) -> Any:
        raw = self._a.view() if dtype is None else self._a.view(dtype)
        return launch.view(self, raw, cls=type)

    # -- copies --------------------------------------------------------------------------------------

    def astype(self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True) -> Any:
        to = supported(dtype)
        order = _layout(self._a, order)
        fits = {"C": self._a.flags.c_contiguous, "F": self._a.flags.f_contiguous, "K": True}[order]
        if not copy and to == self.dtype and fits:
            return self
        launch.check(self, w.world.current())
        if self.dtype.kind == "c" and to.kind not in "cb":
            warnings.warn("Casting complex values to real discards the imaginary part", _COMPLEX_WARNING, stacklevel=2)
            return self.real.astype(to, order)
        made = launch.empty(self.shape, to, "F" if order == "F" else "C")
        target, values = made._a, self._a
        w.world.launch("astype", lambda: np.copyto(target, values, casting="unsafe"), (self,), (made,))
        return made

    def copy(self, order: str = "C") -> Any:
        """Returns a copy on the current device. A copy from another device is not ordered after that device's work."""
        if self.data.device_id == w.world.current():
            return self.astype(self.dtype, order=order)
        with self.device:
            source = self.astype(self.dtype, order=order, copy=False)
        flags = source._a.flags
        if not flags.forc:
            raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
        made = launch.empty(self.shape, self.dtype, "C" if flags.c_contiguous else "F")
        made.data.copy_from_device_async(source.data, source.nbytes)
        return made

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> Any:
        with self.device:
            return self.copy()

    def __reduce__(self) -> Any:
        return namespace["array"], (self.get(),)

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        """Copies to the host. A copy to pinned memory may remain queued; for other memory the host waits."""
        if stream is None:
            stream = cuda.get_current_stream()
        if out is None:
            if order == "A":
                order = "F" if self._a.flags.f_contiguous else "C"
            out = np.empty(self.shape, self.dtype, order)
        elif not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained fromcupy.ndarray")
        elif self.dtype != out.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        elif self.shape != out.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        elif not out.flags.forc:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        if not self.size:
            return out
        with self.device:
            direct = out.flags.c_contiguous and self._a.flags.c_contiguous
            if not direct and not (out.flags.f_contiguous and self._a.flags.f_contiguous):
                cuda._match(stream.device_id)  # because a contiguous copy is made on that stream first
            place, pinned = memory.host_bytes(out.__array_interface__["data"][0], out.nbytes)
            to, values = np.ndarray(out.shape, out.dtype, place, 0, out.strides), self._a
            s = memory._resolve(stream)
            graphs.check_copy(s, "D2H")
            w.world.launch("get", lambda: np.copyto(to, values), (self,), (), s)
            if blocking or not pinned:
                w.world.synchronize(s)
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        """Copies from a host array: pinned memory is read when the copy runs, other memory at once."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self._a.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        if not self.size:
            return
        arr = np.ascontiguousarray(arr) if self._a.flags.c_contiguous else np.asfortranarray(arr)
        if stream is None:
            stream = cuda.get_current_stream()
        with self.device:
            source = memory.host_bytes(arr.__array_interface__["data"][0], self.nbytes)
            self.data.take_host(source, memory._resolve(stream))

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes(order)

    def fill(self, value: Any) -> None:
        self[...] = value

    # -- conversion ----------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __bool__(self) -> bool:
        if self.size > 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()"
            )
        return bool(self.get()) if self.size else False

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Any:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, index: Any) -> Any:
        return get_item(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        set_item(self, index, value)

    # -- other libraries -----------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": cuda.get_current_stream().ptr or 1,
            "version": 3,
            "strides": None if self._a.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        return export(self, stream, max_version, dl_device, copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        if out:
            if len(out) != 1:
                raise ValueError("The 'out' parameter must have exactly one array value")
            kwargs["out"] = out[0]
        function = namespace.get(ufunc.__name__)
        if method != "__call__":
            function = getattr(function, method, None)
        if function is None:
            return NotImplemented
        for x in inputs + tuple(out):
            if not isinstance(x, (*_SCALARS, ndarray, np.ndarray)):
                return NotImplemented
        return function(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            module = functools.reduce(getattr, func.__module__.split(".")[1:], namespace["cupy"])
            function = getattr(module, func.__name__)
        except AttributeError:
            return NotImplemented
        if function is func or not all(issubclass(t, (ndarray, np.ndarray)) for t in types):
            return NotImplemented
        return function(*args, **kwargs)

    # -- operators -----------------------------------------------------------------------------------

    __add__, __radd__, __iadd__ = _operators("add")
    __sub__, __rsub__, __isub__ = _operators("subtract")
    __mul__, __rmul__, __imul__ = _operators("multiply")
    __truediv__, __rtruediv__, __itruediv__ = _operators("true_divide")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _operators("floor_divide")
    __mod__, __rmod__, __imod__ = _operators("remainder")
    __pow__, __rpow__, __ipow__ = _operators("power")
    __lshift__, __rlshift__, __ilshift__ = _operators("left_shift")
    __rshift__, __rrshift__, __irshift__ = _operators("right_shift")
    __and__, __rand__, __iand__ = _operators("bitwise_and")
    __or__, __ror__, __ior__ = _operators("bitwise_or")
    __xor__, __rxor__, __ixor__ = _operators("bitwise_xor")
    __matmul__, __rmatmul__, _ = _operators("matmul")
    __divmod__, __rdivmod__, _ = _operators("divmod")
    __lt__, _, _ = _operators("less")
    __le__, _, _ = _operators("less_equal")
    __gt__, _, _ = _operators("greater")
    __ge__, _, _ = _operators("greater_equal")
    _eq, _, _ = _operators("equal")
    _ne, _, _ = _operators("not_equal")

    def __eq__(self, other: object) -> Any:
        if other is None or (not isinstance(other, ndarray) and type(other).__eq__ is object.__eq__):
            return namespace["zeros"](self.shape, bool)
        return self._eq(other)

    def __ne__(self, other: object) -> Any:
        if other is None or (not isinstance(other, ndarray) and type(other).__ne__ is object.__ne__):
            return namespace["ones"](self.shape, bool)
        return self._ne(other)

    def __neg__(self) -> Any:
        return namespace["negative"](self)

    def __pos__(self) -> Any:
        return namespace["positive"](self)

    def __abs__(self) -> Any:
        return namespace["absolute"](self)

    def __invert__(self) -> Any:
        return namespace["invert"](self)

    def sort(self, axis: int = -1, kind: Any = None) -> None:
        raw = self._a
        w.world.launch("sort", lambda: raw.sort(axis=axis, kind=kind), (), (self,))

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> Any:
        return namespace["clip"](self, min, max, out=out)

    def round(self, decimals: int = 0, out: Any = None) -> Any:
        return namespace["around"](self, decimals, out=out)

    sum, prod, mean, std, var, max, min, ptp = map(_method, ("sum", "prod", "mean", "std", "var", "max", "min", "ptp"))
    argmax, argmin, any, all, cumsum, cumprod = map(_method, ("argmax", "argmin", "any", "all", "cumsum", "cumprod"))
    dot, take, repeat, trace, searchsorted, argsort, argpartition = map(
        _method, ("dot", "take", "repeat", "trace", "searchsorted", "argsort", "argpartition")
    )
    choose, conj, conjugate, nonzero, compress, diagonal, squeeze, put = map(
        _method, ("choose", "conj", "conjugate", "nonzero", "compress", "diagonal", "squeeze", "put")
    )


_COMPLEX_WARNING = np.exceptions.ComplexWarning


def supported(dtype: Any) -> np.dtype[Any]:
    """Returns a dtype in native byte order.

    Raises:
        ValueError: CuPy does not have the dtype.
    """
    made = np.dtype(dtype)
    if made.name != "bfloat16" and (made.kind not in "biufc" or made.char in "gG" or made.num >= 256):
        raise ValueError(f"Unsupported dtype {made}")
    return made.newbyteorder("=")


def _layout(raw: Any, order: str | None) -> str:
    """Returns the order of a copy: C, F, or K for a layout that is kept and is neither."""
    if order in ("K", "A", None):
        if raw.flags.c_contiguous:
            return "C"
        return "F" if raw.flags.f_contiguous else ("C" if order == "A" else "K")
    return order


launch.bind(ndarray)
