"""`Methods`: the methods of `numpy.ndarray` that call the operators of their names, and those that return views."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.small_floats import is_element
from shardtensor.core import ABOVE, OPS, bind, bind_into, call, hinted, named
from shardtensor.errors import ArgumentError, ArgumentTypeError, IndexingError, ShapeError, type_text
from shardtensor.host.blockwise import repeated
from shardtensor.host.units import counted
from shardtensor.sequences import check_no_iterator
from shardtensor.tensor.conversions import is_column_major
from shardtensor.tensor.flat import Flat
from shardtensor.tensor.nested_lists import check_indices_fit, converted, from_lists
from shardtensor.tensor.numpy_protocols import Operators
from shardtensor.tensor.ownership import storage_of

if TYPE_CHECKING:
    from shardtensor.tensor.flags import Flags
    from shardtensor.tensor.tensor import ShardedTensor


def _method(name: str) -> Callable[..., ShardedTensor]:
    function = getattr(np, name)

    def method(self: Any, *args: Any, **params: Any) -> ShardedTensor:
        if not args and not params and name in OPS:  # The common case, where there is nothing to translate.
            return OPS[name].dispatch(self)  # type: ignore[no-any-return]
        return ABOVE["call_numpy"](function, (self, *args), params)  # type: ignore[no-any-return]

    method.__name__ = name
    method.__doc__ = f"``numpy.{name}`` of this tensor."
    return method


def cumulative(name: str, x: Any, axis: int | None, dtype: Any, out: Any) -> Any:
    """Returns `numpy.cumsum` or `numpy.cumprod` of an array, by the operator ``name``."""
    x = call("reshape", x, shape=(-1,)) if axis is None else x
    return ABOVE["with_out"](OPS[name], (x,), {"axis": axis or 0, "dtype": dtype, "out": out})


def _integers(arguments: tuple[Any, ...]) -> Any:
    """Returns sizes or axes that a method takes one by one or as one sequence."""
    if len(arguments) != 1 or (hasattr(arguments[0], "__index__") and not getattr(arguments[0], "ndim", 0)):
        return arguments
    return tuple(arguments[0]) if getattr(arguments[0], "ndim", 0) else arguments[0]


class Methods(Operators):
    """The base class of tensors that has the methods of NumPy's arrays."""

    __slots__ = ()

    __array_priority__ = 100.0
    """How libraries that do not know `__array_ufunc__` choose between the operands of an operator."""

    def __contains__(self, value: Any) -> bool:
        return bool(call("any", call("equal", self, value)))

    # -- memory ------------------------------------------------------------------------------------

    @property
    def base(self) -> ShardedTensor | None:
        """The tensor to which writes to this one go: None if it is not a view."""
        return getattr(self._storage, "base", None)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in bytes. Where the devices share the memory of the host, they are those of ``np.asarray(x)``, as
        programs need that compute addresses of them; elsewhere those that the array would have in NumPy. See
        ``x.addressable_shards`` for the shards.
        """
        storage, view_spec = storage_of(self), getattr(self._storage, "view_spec", None)
        if storage is not None and self._aval.backend.on_host and len(storage.buffers) == 1:
            (whole,) = storage.buffers
            if view_spec is None:
                return whole.strides  # type: ignore[no-any-return]
            if len(view_spec.boxes) == 1:  # The buffer of a reshaped view is made contiguous when it is read.
                return view_spec.of(self._aval.backend, whole).strides  # type: ignore[no-any-return]
        return self._numpys_strides

    @property
    def _numpys_strides(self) -> tuple[int, ...]:
        """The strides that the array would have in NumPy, in bytes."""
        itemsize = (self if self.base is None else self.base).dtype.itemsize
        return tuple([n * itemsize for n in self._element_strides])

    @property
    def _element_strides(self) -> tuple[int, ...]:
        view_spec = getattr(self._storage, "view_spec", None)
        if view_spec is not None:
            return view_spec.strides  # type: ignore[no-any-return]
        return tuple([math.prod(self.shape[d + 1 :]) for d in range(self.ndim)])

    @property
    def flags(self) -> Flags:
        """The flags of a NumPy array with the same views: see `Flags`."""
        from shardtensor.tensor.flags import flags_of  # Few programs read them.

        # The strides of x.real are two elements or more.
        strides = tuple([n // self.dtype.itemsize for n in self._numpys_strides])
        return flags_of(self.shape, strides, self.base is None, not self._is_scalar)

    def setflags(self, write: bool | None = None, align: bool | None = None, uic: bool | None = None) -> None:
        """Accepts only the flags that the tensor has.

        Raises:
            ArgumentError: another flag is to be set.
        """
        flags = self.flags
        if write not in (None, flags.writeable) or align not in (None, True) or uic:
            raise ArgumentError(
                f"setflags: write={write}, align={align}, uic={uic}; the flags of a tensor cannot change (writeable is "
                f"{flags.writeable}); x.copy() can be written without effect on x"
            )

    # -- elements and views ------------------------------------------------------------------------

    def __len__(self) -> int:
        if not self.ndim:
            raise ArgumentTypeError("len: the tensor has no dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[ShardedTensor]:
        if not self.ndim:
            raise ArgumentTypeError("iter: the tensor has no dimensions")
        if self.ndim == 1 and self.base is None:
            return ABOVE["elements_of"](self)  # type: ignore[no-any-return]
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, index: Any) -> ShardedTensor:
        return bind(OPS["getitem"], (self,), (index,))  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        bind_into(self, OPS["setitem"], (self, value, index), ())

    @property
    def real(self) -> ShardedTensor:
        """The real part, as a view."""
        return call("real", self)  # type: ignore[no-any-return]

    @real.setter
    def real(self, value: Any) -> None:
        (self if self.dtype.kind != "c" or self._is_scalar else self.real)[...] = value

    @property
    def imag(self) -> ShardedTensor:
        """The imaginary part; a view if the dtype is complex."""
        return call("imag", self)  # type: ignore[no-any-return]

    @imag.setter
    def imag(self, value: Any) -> None:
        if self.dtype.kind != "c":
            raise ArgumentTypeError(f"imag: a tensor of {self.dtype} has no imaginary part to write to")
        (self if self._is_scalar else self.imag)[...] = value

    def fill(self, value: Any) -> None:
        """Writes a scalar to every element.

        Raises:
            ShapeError: ``value`` has dimensions.
        """
        if isinstance(value, (list, tuple)) or getattr(value, "ndim", False):
            raise ShapeError(f"fill: value is {type_text(value)} with dimensions; wanted a scalar")
        self[...] = value

    @property
    def T(self) -> ShardedTensor:  # noqa: N802 - the standard's name
        """The transpose, with all dimensions in reverse order, as a view."""
        return call("permute_dims", self, tuple(range(self.ndim))[::-1])  # type: ignore[no-any-return]

    @property
    def mT(self) -> ShardedTensor:  # noqa: N802 - the standard's name
        """The transpose of the last two dimensions, as a view."""
        return call("matrix_transpose", self)  # type: ignore[no-any-return]

    @named
    def transpose(self, *axes: Any) -> ShardedTensor:
        """Returns a view with the dimensions in the order ``axes``; in reverse order if none are given."""
        order = _integers(axes)
        check_no_iterator(order, "transpose: axes")
        return self.T if order is None or not len(order) else call("permute_dims", self, tuple(order))

    def swapaxes(self, axis1: int, axis2: int, /) -> ShardedTensor:
        """Returns a view with two dimensions exchanged: see `st.swapaxes`."""
        return call("swapaxes", self, axis1, axis2)  # type: ignore[no-any-return]

    def ravel(self, order: str = "C") -> ShardedTensor:
        """Returns the elements in one dimension: a view if they are contiguous in that order, otherwise a copy. See
        `st.ravel`.
        """
        return call("ravel", self, order)  # type: ignore[no-any-return]

    def flatten(self, order: str = "C") -> ShardedTensor:
        """Returns a copy of the elements in one dimension, in row-major order or, for ``order="F"``, column-major."""
        x = self.T if is_column_major(order, "flatten") else self
        return call("reshape", x, shape=(-1,), copy=True)  # type: ignore[no-any-return]

    @property
    def flat(self) -> Flat:
        """The elements in row-major order, to iterate over and to index; ``x.flat[i] = v`` writes to the tensor."""
        return Flat(self)

    @flat.setter
    def flat(self, value: Any) -> None:
        elements = from_lists(value, "flat") if isinstance(value, (list, tuple)) else value
        self[...] = call("resize", elements, self.shape)

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ShardedTensor:
        """Returns the elements in another shape, read and placed in row-major order, or in column-major order for
        ``order="F"``: see `st.reshape`.
        """
        sizes = _integers(shape)
        if is_column_major(order, "reshape"):
            return call("reshape", self.T, shape=tuple(sizes)[::-1], copy=copy).T  # type: ignore[no-any-return]
        return call("reshape", self, shape=sizes, copy=copy)  # type: ignore[no-any-return]

    def astype(
        self, dtype: npt.DTypeLike, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
    ) -> ShardedTensor:
        """Returns the elements in another dtype: see `st.astype`. ``order``, the layout in memory, has no effect, and
        neither has ``subok``.

        Raises:
            ArgumentTypeError: ``casting`` does not allow the dtypes.
        """
        is_column_major(order, "astype")
        if casting != "unsafe" and not np.can_cast(self.dtype, dtype, casting):  # type: ignore[arg-type]
            raise ArgumentTypeError(f"astype: {self.dtype} to {np.dtype(dtype)} is not allowed by casting={casting!r}")
        return call("astype", self, dtype, copy=copy)  # type: ignore[no-any-return]

    def view(self, dtype: Any = None, type: Any = None) -> ShardedTensor:
        """Returns a view of all elements: of their bits as elements of ``dtype``, if that is given.

        Args:
            dtype: a dtype of the same size. ``type``, in its place or by name, is a class of which x is an instance.

        Raises:
            ArgumentTypeError: the dtype has another size, tensors cannot have it, or x is of another class.
        """
        if isinstance(dtype, int) or (isinstance(dtype, tuple) and all(isinstance(n, int) for n in dtype)):
            raise ArgumentTypeError("view: a shape is given; x.reshape(shape) returns a view of that shape")
        if isinstance(dtype, builtins.type) and not issubclass(dtype, np.generic) and issubclass(dtype, Methods):
            dtype, type = None, dtype
        if type is not None and not isinstance(self, type):
            raise ArgumentTypeError(f"view: type is {type.__name__}; wanted {builtins.type(self).__name__}")
        if dtype is None:
            return self[...]
        new_dtype: np.dtype[Any] = np.dtype(dtype)
        if new_dtype.itemsize != self.itemsize or not is_element(new_dtype):
            raise ArgumentTypeError(
                f"view: {new_dtype} for elements of {self.dtype}; wanted a number, bool or time of "
                f"{counted(self.itemsize, 'byte')} (np.asarray(x).view(dtype) views a host array; st.stack([x.real, "
                "x.imag], -1) splits complex numbers)"
            )
        return call("bitcast", self, new_dtype)  # type: ignore[no-any-return]

    # -- operators -----------------------------------------------------------------------------------

    sum, prod, mean = map(_method, ("sum", "prod", "mean"))
    max, min, var, std = map(_method, ("max", "min", "var", "std"))
    any, all, argmax, argmin = map(_method, ("any", "all", "argmax", "argmin"))
    clip, squeeze, round = map(_method, ("clip", "squeeze", "round"))
    argsort, nonzero, searchsorted, take = map(_method, ("argsort", "nonzero", "searchsorted", "take"))
    argpartition, choose, diagonal = map(_method, ("argpartition", "choose", "diagonal"))
    dot, trace = map(_method, ("dot", "trace"))

    @hinted
    def sort(
        self, axis: int | None = -1, kind: str | None = None, order: None = None, *, stable: bool | None = None
    ) -> None:
        """Sorts the elements along ``axis`` in place: see `st.sort`. Elements have no fields, so ``order`` is None."""
        if kind not in (None, "quicksort", "heapsort", "mergesort", "stable") or order is not None:
            raise ArgumentError(f"sort: kind={kind!r} and order={order!r}; wanted one of NumPy's kinds, and no order")
        bind_into(self, OPS["sort"], (self,), (axis, False, bool(stable) or kind in ("mergesort", "stable")))

    @hinted
    def partition(self, kth: Any, axis: int = -1) -> None:
        """Partitions the elements along ``axis`` in place: see `st.partition`."""
        self[...] = call("partition", self, kth, axis=axis)

    def compress(self, condition: Any, axis: int | None = None, out: Any = None) -> ShardedTensor:
        """``numpy.compress`` of this tensor."""
        return np.compress(condition, self, axis=axis, out=out)  # type: ignore[call-overload, no-any-return]

    @named
    def put(self, indices: Any, values: Any, mode: str = "raise") -> None:
        """Writes values to the elements at positions in row-major order. The values are repeated; where a position
        occurs twice, the last one counts. Positions are read on the host.

        Args:
            indices: integers; floats are truncated.
            values: values of any shape.
            mode: what is done with positions out of bounds: "raise", "wrap" or "clip".

        Raises:
            IndexingError: a position is out of bounds.
            RangeError: a position is beyond the range of int64.
            ArgumentTypeError: positions are not numbers.
            ArgumentError: there is no such mode.
        """
        linear, size = np.asarray(indices).ravel(), self.size
        if linear.dtype.kind not in "biuf":
            raise ArgumentTypeError(f"put: indices have dtype {linear.dtype}; wanted integers")
        check_indices_fit(linear, "put")
        linear = linear.astype(np.intp, copy=False)  # NumPy truncates floats here, and only here.
        if mode not in ("raise", "wrap", "clip"):
            raise ArgumentError(f"put: mode is {mode!r}; wanted 'raise', 'wrap' or 'clip'")
        if not linear.size or not np.size(values):
            return
        if not self.ndim:
            self.reshape(1).put(linear, values, mode)
            return
        if (linear.size and not size) or (mode == "raise" and ((linear < -size) | (linear >= size)).any()):
            wrong = linear[(linear < -size) | (linear >= size)]
            raise IndexingError(f"put: index {wrong[0]} is out of bounds for {counted(size, 'element')}")
        linear = np.clip(linear, 0, size - 1) if mode == "clip" else linear % size
        places = np.unravel_index(linear, self.shape)
        if isinstance(values, (bool, int, float, complex)):
            self[places] = values
            return
        elements = converted(values, self.dtype, "values") if isinstance(values, (list, tuple)) else values
        if type(elements) is np.ndarray and elements.size and elements.dtype.kind in "biufc":
            self[places] = repeated(elements, linear.size).reshape(linear.shape).astype(self.dtype, copy=False)
        else:
            self[places] = call("resize", elements, linear.shape)

    @hinted
    def repeat(self, repeats: Any, axis: int | None = None) -> Any:
        """``st.repeat`` of this tensor."""
        return call("repeat", self, repeats, axis=axis)

    @hinted
    def cumsum(self, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        """The cumulative sum along an axis; of the flattened tensor by default. See `st.cumulative_sum`."""
        return cumulative("cumulative_sum", self, axis, dtype, out)

    @hinted
    def cumprod(self, axis: int | None = None, dtype: Any = None, out: Any = None) -> Any:
        """The cumulative product along an axis; of the flattened tensor by default. See `st.cumulative_prod`."""
        return cumulative("cumulative_prod", self, axis, dtype, out)

    def conj(self, out: Any = None) -> ShardedTensor:
        """``st.conj`` of this tensor; the tensor itself if it is not complex, as in NumPy."""
        if out is None and self.dtype.kind in "biuf":
            return self  # type: ignore[return-value]
        return ABOVE["with_out"](OPS["conj"], (self,), {"out": out})  # type: ignore[no-any-return]

    def conjugate(self, out: Any = None) -> ShardedTensor:
        """``x.conj`` by NumPy's other name."""
        return self.conj(out)
