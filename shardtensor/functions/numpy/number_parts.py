"""NumPy's ufuncs of several results: `divmod`, `modf` and `frexp`."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.errors import ArgumentTypeError
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.tensor.operands import dtype_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor


@operator(operands=("x1", "x2"))
def divmod(x1: ArrayLike, x2: ArrayLike, /) -> tuple[ShardedTensor, ShardedTensor]:
    """Returns quotient and remainder of each pair: ``(x1 // x2, x1 % x2)``. Sharding and errors are those of
    `floor_divide`.

    >>> [part.tolist() for part in st.divmod(st.asarray([7, -7]), 2)]
    [[3, -4], [1, 1]]
    """


@implements(divmod, "composite")
def _divmod(x1: Any, x2: Any) -> Any:
    return call("floor_divide", x1, x2), call("remainder", x1, x2)


@operator()
def modf(x: ArrayLike, /) -> tuple[ShardedTensor, ShardedTensor]:
    """Returns the fractional and the integral part of each real element, both with its sign, as floats.

    >>> [part.tolist() for part in st.modf(st.asarray([2.5, -1.25]))]
    [[0.5, -0.25], [2.0, -1.0]]
    """


@implements(modf, "composite")
def _modf(x: Any) -> Any:
    x = _as_floats(x, np.modf)
    whole = call("trunc", x)
    part = call("where", call("isinf", x), 0.0, call("subtract", x, call("where", call("isinf", x), 0.0, whole)))
    return call("copysign", part, x), whole


implements(modf, "small")(np.modf)


@operator()
def frexp(x: ArrayLike, /) -> tuple[ShardedTensor, ShardedTensor]:
    """Returns the mantissa of each real element, of an absolute value from 0.5 to 1, and its exponent to base 2, an
    int32: ``x == mantissa * 2**exponent``.

    >>> [part.tolist() for part in st.frexp(st.asarray([8.0, -0.75]))]
    [[0.5, -0.75], [4, 0]]
    """


@implements(frexp, "composite")
def _frexp(x: Any) -> Any:
    x = _as_floats(x, np.frexp)
    return mantissa(x), exponent(x)


def _as_floats(x: Any, ufunc: np.ufunc) -> Any:
    """Returns x in the dtype in which NumPy computes the parts.

    Raises:
        ArgumentTypeError: NumPy has no parts of that dtype.
    """
    try:
        dtype = ufunc(np.ones(1, dtype_of(x)))[0].dtype
    except TypeError as error:
        raise ArgumentTypeError(str(error)) from None
    return call("astype", x, dtype, copy=False)


@operator("... -> ...", dtype=lambda x: x)
def mantissa(x: ArrayLike, /) -> ShardedTensor:
    """Returns the mantissa of each float: see `frexp`.

    >>> from shardtensor.functions.numpy.number_parts import mantissa
    >>> mantissa(st.asarray([8.0])).tolist()
    [0.5]
    """


@operator("... -> ...", dtype=np.dtype("int32"))
def exponent(x: ArrayLike, /) -> ShardedTensor:
    """Returns the exponent of each float: see `frexp`.

    >>> from shardtensor.functions.numpy.number_parts import exponent
    >>> exponent(st.asarray([8.0])).tolist()
    [4]
    """


@implements(mantissa, "kernel")
def _mantissa(xp: Any, context: ShardContext | None, x: Any) -> Any:
    return xp.frexp(x)[0]


@implements(exponent, "kernel")
def _exponent(xp: Any, context: ShardContext | None, x: Any) -> Any:
    return xp.frexp(x)[1]
