"""`Methods`: the methods of `numpy.ndarray` that call the operators of their names, and those that return views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardtensor.core import OPS, bind_into, call
from shardtensor.errors import ArgumentTypeError
from shardtensor.tensor.conversions import is_column_major
from shardtensor.tensor.flat import Flat
from shardtensor.tensor.numpy_protocols import Operators, as_numpy, from_lists, with_out

if TYPE_CHECKING:
    from shardtensor.tensor.tensor import ShardedTensor


def _method(name: str) -> Callable[..., ShardedTensor]:
    function = getattr(np, name)

    def method(self: Any, *args: Any, **params: Any) -> ShardedTensor:
        if not args and not params:  # The common case, where there is nothing to translate.
            return OPS[name].dispatch(self)  # type: ignore[no-any-return]
        return as_numpy(function, OPS[name], (self, *args), params)  # type: ignore[no-any-return]

    method.__name__ = name
    method.__doc__ = f"``st.{name}`` of this tensor."
    return method


def _cumulative(name: str, x: Any, axis: int | None, dtype: Any) -> Any:
    return call(name, call("reshape", x, shape=(-1,)) if axis is None else x, axis=axis or 0, dtype=dtype)


class Methods(Operators):
    """The base class of tensors that has the methods of NumPy's arrays."""

    __slots__ = ()

    # -- elements and views ------------------------------------------------------------------------

    def __len__(self) -> int:
        if not self.ndim:
            raise ArgumentTypeError("len: the tensor has no dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[ShardedTensor]:
        if not self.ndim:
            raise ArgumentTypeError("iter: the tensor has no dimensions")
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, index: Any) -> ShardedTensor:
        return call("getitem", self, index)  # type: ignore[no-any-return]

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
        """Writes a scalar to every element."""
        self[...] = value

    @property
    def T(self) -> ShardedTensor:  # noqa: N802 - the standard's name
        """The transpose, with all dimensions in reverse order, as a view."""
        return call("permute_dims", self, tuple(range(self.ndim))[::-1])  # type: ignore[no-any-return]

    @property
    def mT(self) -> ShardedTensor:  # noqa: N802 - the standard's name
        """The transpose of the last two dimensions, as a view."""
        return call("matrix_transpose", self)  # type: ignore[no-any-return]

    def transpose(self, *axes: Any) -> ShardedTensor:
        """Returns a view with the dimensions in the order ``axes``; in reverse order if none are given."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], SupportsIndex) else axes
        return self.T if order is None or not len(order) else call("permute_dims", self, tuple(order))

    def swapaxes(self, axis1: int, axis2: int, /) -> ShardedTensor:
        """Returns a view with two dimensions exchanged: see `st.swapaxes`."""
        return call("swapaxes", self, axis1, axis2)  # type: ignore[no-any-return]

    def ravel(self, order: str = "C") -> ShardedTensor:
        """Returns the elements in one dimension: a view if they are contiguous in that order, otherwise a copy. See
        `st.ravel`.
        """
        x = self.T if is_column_major(order, "ravel") else self
        flat = call("reshape", x, shape=(-1,))
        view_spec = getattr(flat._storage, "view_spec", None)
        straight = view_spec is None or flat.size == 1 or (view_spec.strides == (1,) and not view_spec.part)
        return flat if straight else x.flatten()

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
        given = from_lists(value, "flat") if isinstance(value, (list, tuple)) else value
        self[...] = call("resize", given, self.shape)

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ShardedTensor:
        """Returns the elements in another shape, read and placed in row-major order, or in column-major order for
        ``order="F"``: see `st.reshape`.
        """
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], SupportsIndex) else shape
        if is_column_major(order, "reshape"):
            return call("reshape", self.T, shape=tuple(sizes)[::-1], copy=copy).T  # type: ignore[no-any-return]
        return call("reshape", self, shape=sizes, copy=copy)  # type: ignore[no-any-return]

    def astype(self, dtype: npt.DTypeLike, order: str = "K", *, copy: bool = True) -> ShardedTensor:
        """Returns the elements in another dtype: see `st.astype`. ``order``, the layout in memory, has no effect."""
        is_column_major(order, "astype")
        return call("astype", self, dtype, copy=copy)  # type: ignore[no-any-return]

    # -- operators -----------------------------------------------------------------------------------

    sum, prod, mean = map(_method, ("sum", "prod", "mean"))
    max, min, var, std = map(_method, ("max", "min", "var", "std"))
    any, all, argmax, argmin = map(_method, ("any", "all", "argmax", "argmin"))
    clip, squeeze, round = map(_method, ("clip", "squeeze", "round"))
    argsort, nonzero, searchsorted, take = map(_method, ("argsort", "nonzero", "searchsorted", "take"))

    def sort(self, axis: int | None = -1, *, stable: bool | None = None) -> None:
        """Sorts the elements along ``axis`` in place: see `st.sort`."""
        bind_into(self, OPS["sort"], (self,), (axis, False, bool(stable)))

    def repeat(self, repeats: Any, axis: int | None = None) -> Any:
        """``st.repeat`` of this tensor."""
        return call("repeat", self, repeats, axis=axis)

    def cumsum(self, axis: int | None = None, dtype: Any = None) -> Any:
        """The cumulative sum along an axis; of the flattened tensor by default. See `st.cumulative_sum`."""
        return _cumulative("cumulative_sum", self, axis, dtype)

    def cumprod(self, axis: int | None = None, dtype: Any = None) -> Any:
        """The cumulative product along an axis; of the flattened tensor by default. See `st.cumulative_prod`."""
        return _cumulative("cumulative_prod", self, axis, dtype)

    def conj(self, out: Any = None) -> ShardedTensor:
        """``st.conj`` of this tensor."""
        return with_out(OPS["conj"], (self,), {"out": out})  # type: ignore[no-any-return]

    def conjugate(self, out: Any = None) -> ShardedTensor:
        """``st.conj`` of this tensor."""
        return self.conj(out)
