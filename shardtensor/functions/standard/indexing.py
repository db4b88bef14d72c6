"""Declarations of the indexing operators ``x[index]`` and ``x[index] = value``, and of the indexing functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.backend.protocol import Backend, current_device
from shardtensor.backend.registry import array_backend, backend_of
from shardtensor.core import OPS, bind, call, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, IndexingError
from shardtensor.functions.building.data_movement import DataMovement
from shardtensor.functions.standard.manipulation import layout_of, reshape
from shardtensor.host import blockwise
from shardtensor.sharding.index import Index, canonical, has_ellipsis, region_of, to_numpy
from shardtensor.sharding.layout import Shape
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import P
from shardtensor.sharding.view_spec import ViewSpec
from shardtensor.tensor.nested_lists import check_indices_fit, converted, from_lists
from shardtensor.tensor.operands import HostAval, dtype_of, shape_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor, mark_array
from shardtensor.tensor.value import Aval

_DERIVATIVES = "of_indexing"


@operator(tags=("any dtype", "array views", "internal"))
def getitem(x: ArrayLike, index: Any, /) -> ShardedTensor:
    """Returns ``x[index]``, with NumPy's semantics and x's dtype.

    Basic indexing (integers, slices of any step, ``...`` and None) returns a view, except that integers for all
    dimensions return a scalar, which is a copy. Advanced indexing (integer arrays and masks, also mixed with basic
    indices) returns an independent tensor. Index arrays may be nested lists, host arrays or tensors on any devices. The
    host reads them, unless one GPU has them and x, or a single tensor of integers indexes a dimension that each device
    has whole: then their bounds only.

    A sliced dimension remains sharded, by the split rule for its new size, so that only elements at the boundaries
    between devices are transferred. An integer removes its dimension, and the result is replicated along the mesh axes
    that shard it. The dimensions that index arrays produce are sharded like the tensors of integers among these, or
    else the first one like the dimensions that they index.

    Args:
        x: a tensor or a host array.
        index: an integer, a slice, ``...``, None, an array or a list of integers or bools, or a tuple of these.

    Raises:
        IndexingError: an index is out of bounds or of another type, or index arrays do not fit x or one another.
        ArgumentError: a slice has step 0.
        ArgumentTypeError: a slice has a bound or a step that is not an integer.

    >>> x = st.arange(8, device=st.make_mesh((4,), ("x",)))
    >>> x[::-2].tolist(), x[3].item(), x[None, 2:].shape
    ([7, 5, 3, 1], 3, (1, 6))
    >>> x[[5, 0, 5]].tolist(), x[x > 4].tolist()
    ([5, 0, 5], [5, 6, 7])
    """


@implements(getitem, "view_spec")
def _getitem_view(view_spec: ViewSpec, index: Any) -> ViewSpec | None:
    if type(index) is Index:
        return view_spec.at(index)
    entries = None if type(index) is np.ndarray else canonical(index, view_spec.shape)
    if entries is None:
        return None
    # An ellipsis is one entry more: NumPy then never returns a scalar.
    count = len(index) if isinstance(index, tuple) else 1
    return view_spec.at(entries, scalar=count == len(entries) and _INTEGERS.issuperset(map(type, entries)))


_INTEGERS = frozenset((int,))


@implements(getitem, "composite")
def _canonical_getitem(x: Any, index: Any) -> Any:
    if type(index) is Index:
        return NotImplemented
    entries = None if type(index) is np.ndarray else canonical(index, shape_of(x))
    if entries is not None:
        return getitem(x, entries)
    result = bind(OPS["gather"], (x, index), ()) if type(index) is np.ndarray else _selected(x, index)
    # In NumPy a 0-d result is a scalar, unless the index has an Ellipsis.
    is_array = isinstance(result, ShardedTensor) and not result._aval.ndim and has_ellipsis(index)
    return mark_array(result) if is_array else result


@implements(getitem, "kernel")
def _getitem_on_device(xp: Any, context: ShardContext, x: Any, *, index: Index) -> Any:
    return x[to_numpy(index)]


@implements(getitem, "movement")
def _getitem(operands: Sequence[Aval | HostAval], mesh: Mesh, *, index: Index) -> DataMovement:
    (x,) = operands
    sharding = layout_of(x, mesh)
    region = region_of(index)
    chains = sharding.spec.chains_of(x.ndim)
    spec = P(*[() if line.source is None else chains[line.source] for line in region.lines])
    shape = tuple(line.end for line in region.lines)
    at = to_numpy(index)
    return DataMovement(shape, sharding.with_spec(spec), (region,), lambda array: array[at])


@operator(operands=("x", "index"), trees=("index",), error_name="getitem", tags=("internal",))
def gather(x: ArrayLike, index: Any, /) -> ShardedTensor:
    """Returns ``x[index]`` for an index that contains arrays or lists, as an independent tensor: see `getitem`.

    >>> from shardtensor.functions.standard.indexing import gather
    >>> gather(st.arange(12).reshape(3, 4), ([2, 0], slice(1, 3))).tolist()
    [[9, 10], [1, 2]]
    """


@implements(gather, "kernel")
def _gather_on_device(xp: Any, context: None, x: Any, index: Any) -> Any:
    return x[index]


def _selected(x: Any, index: Any) -> Any:
    """Returns ``x[index]`` for an index that contains arrays. Each device selects elements of its own, where all have
    the whole of the dimension that one tensor of integers indexes.
    """
    rows = _rows_in(x, index)
    if rows is None:
        return bind(OPS["gather"], (x, index), ())
    return take_rows(x, rows[0], axis=rows[1])


def _rows_in(x: Any, index: Any) -> tuple[ShardedTensor, int] | None:
    """Returns the indices and the dimension that they index, if an index consists of one tensor of integers and of
    whole dimensions, and the dimension is not split.
    """
    axis, indices = 0, index
    if type(index) is tuple:
        for axis, indices in enumerate(index):  # noqa: B007 - up to the first entry that is not a whole dimension
            if type(indices) is not slice or indices != _WHOLE:
                break
        if any(type(entry) is not slice or entry != _WHOLE for entry in index[axis + 1 :]):
            return None
    if type(indices) is not ShardedTensor or type(x) is not ShardedTensor or axis >= x.ndim:
        return None
    value, index_value = x._aval, indices._aval
    if len(value.grid.offsets[axis]) != 2 or not index_value.ndim or index_value.dtype.kind not in "iu":
        return None
    here, there = value.sharding, index_value.sharding
    if here.mesh != there.mesh or here.memory_kind != there.memory_kind or not value.size or not index_value.size:
        return None
    return indices, axis


_WHOLE = slice(None)


def _rows_rule(shapes: Sequence[Shape], *, axis: int) -> str:
    x, indices = [[f"{letter}{d}" for d in range(len(shape))] for letter, shape in zip("dn", shapes, strict=True)]
    rows = [*x[:axis], f"{x[axis]}!", *x[axis + 1 :]]
    return f"{' '.join(rows)}, {' '.join(indices)} -> {' '.join([*x[:axis], *indices, *x[axis + 1 :]])}"


@operator(_rows_rule, operands=("x", "indices"), error_name="getitem", tags=("internal", "keeps arrays"))
def take_rows(x: ArrayLike, indices: ArrayLike, /, *, axis: int) -> ShardedTensor:
    """Returns the elements of x at ``indices`` along ``axis``, of which each device has the whole: x and ``indices``
    stay split as they are.

    >>> from shardtensor.functions.standard.indexing import take_rows
    >>> take_rows(st.asarray([[1, 2], [3, 4]]), st.asarray([1, 1, -2]), axis=0).tolist()
    [[3, 4], [3, 4], [1, 2]]
    """


@implements(take_rows, "kernel")
def _rows_on_device(xp: Any, context: ShardContext | None, x: Any, indices: Any, *, axis: int) -> Any:
    before = [slice(None)] * axis
    if xp is not np:
        from shardtensor.functions.algorithms.requests import check_bounds  # NumPy checks bounds itself.

        check_bounds(xp, indices, axis, x.shape[axis])
        return x[(*before, xp.asarray(indices, dtype=np.dtype("int64")))]
    try:
        return blockwise.select(x, (*before, indices))
    except IndexError as error:
        raise IndexingError(str(error)) from None


@operator(
    operands=("x", "value", "index"),
    trees=("index",),
    tags=("any dtype", "assigns", "internal", "keeps arrays", "takes partial sums"),
)
def setitem(x: ArrayLike, value: ArrayLike, /, index: Any) -> ShardedTensor:
    """Returns a copy of x in which ``value`` replaces ``x[index]``: the functional form of ``x[index] = value``.

    The result has x's shape, dtype and sharding. Elements of ``value`` are transferred only to the devices that hold
    the elements which they replace.

    Args:
        x: a tensor or a host array.
        value: a tensor, an array, nested lists or a scalar; broadcast to the shape of ``x[index]`` and converted to
            x's dtype.
        index: as for `getitem`. If it selects an element several times, the last value is written.

    Raises:
        IndexingError: an index is out of bounds or of another type, or index arrays do not fit x or one another.
        ShapeError: ``value`` does not broadcast to the shape of ``x[index]``.
        ArgumentTypeError: ``value`` cannot be converted to x's dtype.

    >>> from shardtensor.functions.standard.indexing import setitem
    >>> setitem(st.zeros(4), 7, slice(1, 3)).tolist()
    [0.0, 7.0, 7.0, 0.0]
    """


@implements(setitem, "composite")
def _setitem_of_lists(x: Any, value: Any, index: Any) -> Any:
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return setitem(x, converted(value, dtype), index) if isinstance(value, (list, tuple)) else NotImplemented


@implements(setitem, "kernel")
def _setitem_on_device(xp: Any, context: None, x: Any, value: Any, index: Any) -> Any:
    new = xp.asarray(x, copy=True)
    new[index] = value
    return new


@operator(error_name="getitem", tags=("any dtype", "exact", "internal", "keeps arrays"))
def view(x: ArrayLike, /, view_spec: ViewSpec) -> ShardedTensor:
    """Returns the elements of x that a view spec selects, as an independent tensor.

    >>> from shardtensor.functions.standard.indexing import view
    >>> _, view_spec = st.zeros((3, 2))[1]._base_and_view()
    >>> view(st.asarray([[0, 1], [2, 3], [4, 5]]), view_spec).tolist()
    [2, 3]
    """


@implements(view, "kernel")
def _view_on_device(xp: Any, context: None, x: Any, *, view_spec: ViewSpec) -> Any:
    return view_spec.of(_current_backend(), x)


def _current_backend() -> Backend:
    """Returns the backend of the current device of a mapped function."""
    device = current_device()
    assert device is not None
    return backend_of(device)


@operator(
    operands=("x", "value"), error_name="setitem", tags=("any dtype", "internal", "keeps arrays", "takes partial sums")
)
def put(x: ArrayLike, value: ArrayLike, /, view_spec: ViewSpec) -> ShardedTensor:
    """Returns a copy of x in which ``value`` replaces the elements that a view spec selects.

    The result has x's shape, dtype and sharding. ``value`` has the shape of the view spec, and is converted to x's
    dtype if that is of the same kind.

    >>> from shardtensor.functions.standard.indexing import put
    >>> _, view_spec = st.zeros(3)[:1]._base_and_view()
    >>> put(st.zeros(3), st.ones(1), view_spec).tolist()
    [1.0, 0.0, 0.0]
    """


@implements(put, "kernel")
def _put_on_device(xp: Any, context: None, x: Any, value: Any, *, view_spec: ViewSpec) -> Any:
    backend = _current_backend()
    new = backend.contiguous(xp.asarray(x, copy=True))
    view_spec.of(backend, new)[...] = value
    return new


# -- indexing functions ----------------------------------------------------------------------------


@operator(operands=("x", "indices"))
def take(x: ArrayLike, indices: Any, /, *, axis: int | None = None, mode: str = "raise") -> ShardedTensor:
    """Returns the elements of x at ``indices`` along ``axis``, as an independent tensor of x's dtype.

    The result has the dimensions of ``indices`` instead of ``axis``. Layouts are those of ``x[..., indices]``: the new
    dimensions are split as ``indices``, or else the first one by the mesh axes that split ``axis``, and the other
    dimensions of x keep their sharding. Only the selected elements are sent, by the devices that hold them: none if
    ``axis`` is not split. Up to 64 KiB of x and of the result, the first device receives x and selects them.

    Args:
        x: a tensor or a host array.
        indices: integers: a tensor, an array, nested lists or a number; negative ones count from the end. Bools are 0
            and 1, as in NumPy.
        axis: the dimension; None takes elements of the flattened array, as in NumPy.
        mode: for indices out of bounds: "raise" raises an error, "wrap" takes them modulo the size, and "clip" replaces
            them by the first or last index, negative ones by 0.

    Raises:
        AxisError: x has no such axis.
        IndexingError: an index is out of bounds.
        RangeError: an index is beyond the range of int64.
        ArgumentTypeError: ``indices`` are not integers.
        ArgumentError: ``mode`` is unknown.

    >>> st.take(st.asarray([[1, 2, 3], [4, 5, 6]]), st.asarray([2, 0]), axis=1).tolist()
    [[3, 1], [6, 4]]
    """


implements(take, "small")(lambda x, indices, axis, mode: np.take(x, indices, axis=axis, mode=mode))


@implements(take, "composite")
def _take(x: Any, indices: Any, axis: int | None, mode: str) -> Any:
    if axis is None:
        x, axis = x if len(shape_of(x)) == 1 else reshape(x, (-1,)), 0
    along = normalize_axis(axis, len(shape_of(x)))
    if not hasattr(indices, "dtype"):
        listed = isinstance(indices, (list, tuple))
        # Also of a number, because an integer as an index would give a view.
        indices = from_lists(indices, "take") if listed else np.asarray(indices)
    if type(indices) is np.ndarray:
        check_indices_fit(indices, "take")
    if dtype_of(indices).kind == "b" or 0 in shape_of(indices):  # An empty list has no dtype of its own.
        indices = call("astype", indices, np.int64)
    check_integers(indices)
    before, size, after = shape_of(x)[:along], shape_of(x)[along], shape_of(x)[along + 1 :]
    if not size and 0 not in (*before, *shape_of(indices), *after):
        raise IndexingError(f"x of shape {shape_of(x)} has no elements along axis {along}; wanted no indices")
    if mode == "wrap":
        indices = call("remainder", indices, shape_of(x)[along])
    elif mode == "clip":
        indices = call("clip", indices, 0, max(shape_of(x)[along] - 1, 0))
    elif mode != "raise":
        raise ArgumentError(f"mode is {mode!r}; wanted 'raise', 'wrap' or 'clip'")
    return _selected(x, (slice(None),) * along + (indices,))


def check_integers(indices: Any) -> None:
    """Raises ArgumentTypeError if an array has another dtype than integers."""
    backend = array_backend(indices)
    dtype = backend.dtype_of(indices) if backend else indices.dtype
    if dtype.kind not in "iu":
        raise ArgumentTypeError(f"indices have dtype {dtype}; wanted integers")
