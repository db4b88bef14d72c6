"""Data type functions (a chapter of the standard)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.registry import owner_of
from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentTypeError
from shardtensor.sharding.shard_context import Place
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


@operator("... -> ...")
def astype(x: ArrayLike, dtype: npt.DTypeLike, /, *, copy: bool = True) -> ShardedTensor:
    """x in another dtype, as NumPy casts (floats are cut towards zero, complex lose their imaginary part). The layout
    stays.

    With ``copy=False`` a tensor that has the dtype already is given back itself; else the result is one of its own.

    Raises:
        TypeError: dtype is none, or one that cannot be sharded.

    >>> st.astype(st.asarray([1.7, -1.7]), "int32").tolist()
    [1, -1]
    """


@implements(astype, "composite")
def _astype_itself(x: Any, dtype: Any, copy: bool) -> Any:
    return x if not copy and isinstance(x, ShardedTensor) and x.dtype == sharded_dtype(dtype) else NotImplemented


@implements(astype, "kernel")
def _astype(xp: Any, place: Place, x: Any, *, dtype: Any, copy: bool) -> Any:
    return xp.asarray(x, dtype=place.dtype)


def _dtype_of(x: Any) -> Any:
    if isinstance(x, ShardedTensor):
        return x.dtype
    owner = owner_of(x)
    return owner.dtype_of(x) if owner else x


def result_type(*arrays_and_dtypes: ArrayLike | npt.DTypeLike) -> np.dtype[Any]:
    """The dtype that an operator makes of operands of these dtypes: NumPy's promotion, in which Python scalars are
    weak.

    Raises:
        ArgumentTypeError: there is none, or an argument has no dtype.

    >>> st.result_type(st.zeros(2, dtype="float32"), 1.0)
    dtype('float32')
    """
    known = [_dtype_of(a) for a in arrays_and_dtypes]
    try:
        return np.result_type(*known)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"result_type: {error}") from None
