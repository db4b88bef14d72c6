"""Data type functions (a chapter of the array API standard)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardtensor.backend.registry import array_backend
from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentTypeError
from shardtensor.host import blockwise
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import sharded_dtype
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


@operator("... -> ...", keeps_arrays=True)
def astype(x: ArrayLike, dtype: npt.DTypeLike, /, *, copy: bool = True) -> ShardedTensor:
    """Casts x to ``dtype`` element by element, by NumPy's unsafe casting: floats are truncated towards zero when cast
    to integers, and complex numbers lose their imaginary part when cast to real ones.

    The result has x's shape and sharding; no data moves. It is an independent tensor, except that ``copy=False``
    returns x itself if it is a tensor of that dtype already.

    Args:
        x: a tensor or a host array of any shape and dtype.
        dtype: the dtype of the result, in any form that `numpy.dtype` accepts.
        copy: whether the result must be a new tensor even if x has the dtype already.

    Raises:
        ArgumentTypeError: ``dtype`` is not a NumPy dtype, or one that tensors cannot have (objects, text, records).

    >>> st.astype(st.asarray([1.7, -1.7]), "int32").tolist()
    [1, -1]
    """


@implements(astype, "composite")
def _astype_itself(x: Any, dtype: Any, copy: bool) -> Any:
    return x if not copy and isinstance(x, ShardedTensor) and x.dtype == sharded_dtype(dtype) else NotImplemented


@implements(astype, "kernel")
def _astype(xp: Any, context: ShardContext, x: Any, *, dtype: Any, copy: bool) -> Any:
    return xp.asarray(x, dtype=context.dtype)


implements(astype, "blockwise")(blockwise.cast)


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
        return np.result_type(*known)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"result_type: {error}") from None
