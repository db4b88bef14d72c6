"""Cumulative sums and products, and differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtensor.backend.registry import array_backend
from shardtensor.core import call as _call
from shardtensor.core import hinted, implements, operator
from shardtensor.errors import AxisError, ShapeError
from shardtensor.functions.algorithms.distributed import Whole as _Whole
from shardtensor.functions.algorithms.distributed import distributed
from shardtensor.functions.algorithms.scan import scan as _scan
from shardtensor.functions.algorithms.scan import scan_of_whole as _scan_of_whole
from shardtensor.functions.algorithms.shards import MeshCommunicator as _MeshCommunicator
from shardtensor.functions.algorithms.shards import Shards as _Shards
from shardtensor.functions.numpy.comparisons import array_like as _array_like
from shardtensor.functions.standard.creation import ones as _ones
from shardtensor.functions.standard.creation import zeros as _zeros
from shardtensor.functions.standard.elementwise import not_equal as _not_equal
from shardtensor.functions.standard.elementwise import subtract as _subtract
from shardtensor.functions.standard.joining import concat as _concat
from shardtensor.functions.standard.manipulation import broadcast_to as _broadcast_to
from shardtensor.functions.standard.manipulation import reshape as _reshape
from shardtensor.functions.ufunc_protocol.ufunc_methods import running as _running
from shardtensor.host.units import counted
from shardtensor.sharding.rules import normalize_axis
from shardtensor.tensor.methods import cumulative as _cumulative
from shardtensor.tensor.operands import dtype_of, integer_from, shape_of, sharded_dtype, truth_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval

_DERIVATIVES = "of_ordering"


@operator(ufunc="accumulate")
def cumulative_sum(
    x: ArrayLike, /, *, axis: int | None = None, dtype: npt.DTypeLike | None = None, include_initial: bool = False
) -> ShardedTensor:
    """Computes the cumulative sum of elements along an axis: element i of the result is the sum of elements 0 to i.

    The result has x's shape and sharding. Each device computes the cumulative sums of its shard. If the axis is
    sharded, the totals of the shards are gathered along it, and each device adds the total of the shards before its
    own: P devices send P (P - 1) sums of each line. For x of up to 64 KiB, the first device of a process receives all
    elements, computes the same bits, and sends the other devices their parts (but not if another dimension is split,
    too, and the elements are not integers). The rounding of floating-point sums depends only on the mesh.

    Args:
        x: a tensor or an array.
        axis: the dimension; it may be None if x has one dimension, and negative ones count from the end.
        dtype: the dtype of the result; by default that of `sum`.
        include_initial: whether a zero precedes the sums, so that the dimension is one longer.

    Raises:
        AxisError: x has no such axis, or ``axis`` is None and x does not have one dimension.

    >>> st.cumulative_sum(st.arange(1, 6)).tolist()
    [1, 3, 6, 10, 15]
    >>> st.cumulative_sum(st.ones((2, 3)), axis=1, include_initial=True).tolist()
    [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    """


@operator(ufunc="accumulate")
def cumulative_prod(
    x: ArrayLike, /, *, axis: int | None = None, dtype: npt.DTypeLike | None = None, include_initial: bool = False
) -> ShardedTensor:
    """Computes the cumulative product of elements along an axis: element i of the result is the product of elements 0
    to i.

    Shape, sharding and errors are those of `cumulative_sum`.

    Args:
        x: a tensor or an array.
        axis, dtype: see `cumulative_sum`; the default dtype is that of `prod`.
        include_initial: whether a one precedes the products, so that the dimension is one longer.

    >>> st.cumulative_prod(st.arange(1, 6)).tolist()
    [1, 2, 6, 24, 120]
    """


class _Cumulative(NamedTuple):
    """A cumulative function.

    Attributes:
        function: the operator.
        reduction: the name of its reduction, which is that of the cumulative function without "cum".
        ufunc: the ufunc that it applies.
        initial: makes the array of what precedes the first elements: `zeros` or `ones`.
    """

    function: Callable[..., Any]
    reduction: str
    ufunc: np.ufunc
    initial: Callable[..., Any]

    def of(self, xp: Any) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """The reduction, the cumulative function and the ufunc of a namespace; NumPy's are methods of the ufunc."""
        if xp is np:
            return self.ufunc.reduce, self.ufunc.accumulate, self.ufunc
        return getattr(xp, self.reduction), getattr(xp, f"cum{self.reduction}"), getattr(xp, self.ufunc.__name__)

    def dtype(self, value: Aval, dtype: Any) -> np.dtype[Any]:
        """Returns the dtype of the result."""
        if dtype is not None:
            return sharded_dtype(dtype)
        return getattr(np, self.reduction)(np.ones(1, value.dtype)).dtype  # type: ignore[no-any-return]

    def composed(self, x: Any, axis: int | None, dtype: Any, include_initial: bool) -> Any:
        """Converts operands for which NumPy has no loop, and joins what precedes the first elements to the result."""
        if axis is None and not shape_of(x):  # NumPy takes a scalar for one element.
            return self.function(_reshape(x, (1,)), axis=0, dtype=dtype, include_initial=include_initial)
        source, target = dtype_of(x).kind, None if dtype is None else sharded_dtype(dtype).kind
        if target and source != target and (target == "b" or source == "m"):
            x = _call("astype", x, dtype)  # NumPy's loops of bools take no numbers, and those of numbers no durations.
            return self.function(x, axis=axis, dtype=dtype, include_initial=include_initial)
        if not truth_of(include_initial, "include_initial"):
            return NotImplemented
        sums = self.function(x, axis=axis, dtype=dtype)
        along = _axis(axis, sums.ndim)
        first = (*sums.shape[:along], 1, *sums.shape[along + 1 :])
        if isinstance(sums, ShardedTensor):
            before = self.initial(first, dtype=sums.dtype, device=sums.sharding if sums.committed else None)
        else:  # In a mapped function, arrays are those of the backend.
            backend = array_backend(sums)
            before = self.initial(first, dtype=backend.dtype_of(sums) if backend else sums.dtype)
        return _concat([before, sums], axis=along)

    def on_device(self, xp: Any, context: None, x: Any, *, axis: int | None, dtype: Any, include_initial: bool) -> Any:
        """Computes the cumulative function in a mapped function."""
        return getattr(xp, f"cum{self.reduction}")(x, axis=_axis(axis, x.ndim), dtype=dtype)

    def of_whole(self, value: Aval, *, axis: int | None, dtype: Any, include_initial: bool) -> _Whole | None:
        """Returns what one device computes; see `distributed`."""
        result_dtype = self.dtype(value, dtype)
        return _scan_of_whole(
            value, _axis(axis, value.ndim), self.of, dtype=result_dtype, exact="iu", loop=_loop(result_dtype)
        )

    def of_parts(
        self,
        x: _Shards,
        along: Callable[[int], _MeshCommunicator],
        *,
        axis: int | None,
        dtype: Any,
        include_initial: bool,
    ) -> _Shards:
        """The algorithm; see `shardtensor.functions.algorithms.scan`."""
        d, result = _axis(axis, x.value.ndim), self.dtype(x.value, dtype)
        return _scan(x, along(d), d, self.of, dtype=result, loop=_loop(result))


def _declare(cumulative: _Cumulative) -> None:
    implements(cumulative.function, "composite")(cumulative.composed)
    implements(cumulative.function, "kernel")(cumulative.on_device)
    distributed(cumulative.function, whole=cumulative.of_whole)(cumulative.of_parts)


def _axis(axis: int | None, ndim: int) -> int:
    if axis is None and ndim != 1:
        raise AxisError(f"axis is None, and x has {counted(ndim, 'dimension')}; wanted an axis")
    return normalize_axis(0 if axis is None else axis, ndim)


def _loop(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Returns the dtype that selects NumPy's loop; None for durations, whose unit a loop does not have."""
    return None if dtype.kind == "m" else dtype


@hinted
def cumsum(
    a: ArrayLike, axis: int | None = None, dtype: npt.DTypeLike | None = None, out: ShardedTensor | None = None
) -> ShardedTensor:
    """Computes the cumulative sum along an axis; of the flattened array by default. See `cumulative_sum`.

    >>> st.cumsum(st.ones((2, 2))).tolist(), st.cumsum(st.ones((2, 2)), 0).tolist()
    ([1.0, 2.0, 3.0, 4.0], [[1.0, 1.0], [2.0, 2.0]])
    """
    return _cumulative("cumulative_sum", _array_like(a, "cumsum"), axis, dtype, out)  # type: ignore[no-any-return]


@hinted
def cumprod(
    a: ArrayLike, axis: int | None = None, dtype: npt.DTypeLike | None = None, out: ShardedTensor | None = None
) -> ShardedTensor:
    """Computes the cumulative product along an axis; of the flattened array by default. See `cumulative_prod`.

    >>> st.cumprod(st.asarray([[1, 2], [3, 4]])).tolist()
    [1, 2, 6, 24]
    """
    return _cumulative("cumulative_prod", _array_like(a, "cumprod"), axis, dtype, out)  # type: ignore[no-any-return]


_declare(_Cumulative(cumulative_sum, "sum", np.add, _zeros))
_declare(_Cumulative(cumulative_prod, "prod", np.multiply, _ones))


@hinted
def logcumsumexp(x: ArrayLike, /, *, axis: int | None = None) -> ShardedTensor:
    """Computes the logarithm of the cumulative sum of exponentials along an axis, without overflow: element i of the
    result is ``log(exp(x[0]) + ... + exp(x[i]))``.

    Shape, sharding, messages and errors are those of `cumulative_sum`; integers become floating-point numbers. The
    function is ``np.logaddexp.accumulate``, and PyTorch's of the same name.

    Args:
        x: a tensor or an array of real numbers.
        axis: the dimension; it may be None if x has one dimension, and negative ones count from the end.

    Raises:
        AxisError: x has no such axis, or ``axis`` is None and x does not have one dimension.
        ArgumentTypeError: x has complex elements.

    >>> st.logcumsumexp(st.asarray([1000.0, 1000.0, -np.inf])).round(4).tolist()
    [1000.0, 1000.6931, 1000.6931]
    """
    x = _array_like(x, "logcumsumexp")
    if axis is None and not shape_of(x):
        x = _reshape(x, (1,))
    return _running(x, ufunc="logaddexp", axis=_axis(axis, len(shape_of(x))))


# -- differences -----------------------------------------------------------------------------------


@operator(operands=("x", "prepend", "append"))
def diff(
    x: ArrayLike, /, n: int = 1, axis: int = -1, *, prepend: ArrayLike | None = None, append: ArrayLike | None = None
) -> ShardedTensor:
    """Computes the ``n``-th differences along an axis: the first ones are ``x[i + 1] - x[i]``, for bools whether they
    differ.

    The result has x's dtype, and the size of ``axis`` is ``n`` less. It is sharded as x; along a sharded ``axis``, each
    device receives the elements at the boundary of its shard.

    Args:
        x: a tensor or an array of at least one dimension.
        n: how often differences are taken; with 0, x is returned. As in NumPy, programs give it by position, too.
        axis: the dimension.
        prepend: values that precede x along ``axis``: a scalar, or an array of x's shape in the other dimensions.
        append: values that follow x, likewise.

    Raises:
        AxisError: x has no such axis.
        ArgumentError: ``n`` is negative.
        ShapeError: x is 0-d, or ``prepend`` or ``append`` does not fit.

    >>> st.diff(st.asarray([1, 4, 9, 16])).tolist(), st.diff(st.asarray([1, 4, 9, 16]), n=2, prepend=0).tolist()
    ([3, 5, 7], [2, 2, 2])
    """


@implements(diff, "composite")
def _diff(x: Any, prepend: Any, append: Any, n: int, axis: int) -> Any:
    n = integer_from(0, n, "n")
    shape = shape_of(x)
    if not shape:
        raise ShapeError("x is 0-d; wanted at least one dimension")
    along = normalize_axis(axis, len(shape))
    if not n:
        return x
    line = (*shape[:along], 1, *shape[along + 1 :])
    ends = [y if y is None or len(shape_of(y)) else _broadcast_to(np.asarray(y), line) for y in (prepend, append)]
    if prepend is not None or append is not None:
        x = _concat([y for y in (ends[0], x, ends[1]) if y is not None], axis=along)
    before = (slice(None),) * along
    for _ in range(min(n, shape_of(x)[along])):  # Then nothing is left.
        later, earlier = [_call("getitem", x, (*before, part)) for part in (slice(1, None), slice(None, -1))]
        x = (_not_equal if str(x.dtype).endswith("bool") else _subtract)(later, earlier)
    return x


@implements(diff, "small")
def _small_diff(x: Any, prepend: Any, append: Any, n: int, axis: int) -> Any:
    ends = {name: end for name, end in (("prepend", prepend), ("append", append)) if end is not None}
    most = np.size(x) + sum(np.size(end) or 1 for end in ends.values())  # Then nothing is left.
    return np.diff(x, min(n, most), axis, **ends) if n else np.array(x)
