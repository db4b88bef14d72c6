"""Declarations of the manipulation functions (a chapter of the array API standard).

They only move elements, and transfer exactly those that the result's sharding requires on a device which does not hold
them. The result has x's dtype. Where NumPy returns a view of a C-contiguous array, so do they, except for
`broadcast_to`, whose result is independent; writing to a view writes to x.

Raises:
    AxisError: x has no such axis, or an axis occurs twice.
    ArgumentTypeError: an axis or a size is not an integer.
    ShapeError: shapes do not fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, implements, named, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.building.data_movement import DataMovement
from shardtensor.host.blockwise import copied
from shardtensor.host.units import counted
from shardtensor.sequences import check_no_iterator
from shardtensor.sharding.copy_plan import Line, Region, identity
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Grid, NamedSharding, Shape, Where, as_sharding, checked_shape
from shardtensor.sharding.mesh import Mesh, integers
from shardtensor.sharding.rules import normalize_axes, normalize_axis, reduced_axes
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.view_spec import ViewSpec, reshape_groups, reshaped_chains, reshaped_strides
from shardtensor.tensor.operands import HostAval, shape_of, truth_of
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval

_DERIVATIVES = "of_movement"

Operand = Aval | HostAval


# -- order and number of dimensions ----------------------------------------------------------------


def _permute_rule(shapes: Sequence[Shape], *, axes: tuple[int, ...]) -> str:
    ndim = len(shapes[0])
    return f"{_names(ndim)} -> {' '.join(f'd{a}' for a in _order_of(axes, ndim))}"


def _names(ndim: int) -> str:
    return " ".join(f"d{i}" for i in range(ndim))


@operator(_permute_rule, tags=("any dtype", "exact"))
def permute_dims(x: ArrayLike, /, axes: tuple[int, ...]) -> ShardedTensor:
    """Permutes the dimensions of x: dimension i of the result is dimension ``axes[i]`` of x. A view.

    Each dimension keeps its sharding; no data moves.

    Args:
        x: a tensor or a host array.
        axes: the dimensions of x in their new order; negative ones count from the end.

    Raises:
        AxisError: x has no such axis, or an axis occurs twice.
        ShapeError: ``axes`` does not name all dimensions.

    >>> x = st.zeros((4, 2, 3), device=st.make_mesh((4,), ("x",)))
    >>> st.permute_dims(x, (2, 0, 1)).sharding.spec
    P(None, 'x')
    """


@implements(permute_dims, "view_spec")
def _permute_view(view_spec: ViewSpec, axes: tuple[int, ...]) -> ViewSpec:
    return view_spec.permuted(_order_of(axes, len(view_spec.shape)))


def _order_of(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Returns ``axes`` as nonnegative numbers.

    Raises:
        AxisError: there is no such axis, or an axis occurs twice.
        ShapeError: ``axes`` does not name all dimensions.
    """
    order = normalize_axes(axes, ndim)
    if len(order) != ndim:
        raise ShapeError(f"axes={axes} names {len(order)} of x's {counted(ndim, 'dimension')}; name each once")
    return order


@named
def transpose(a: ArrayLike, axes: Sequence[int] | None = None) -> ShardedTensor:
    """Permutes the dimensions of ``a``, or reverses their order: `permute_dims` with NumPy's name and default. A view.

    Args:
        a: a tensor or a host array.
        axes: the dimensions of ``a`` in their new order; by default the reverse order.

    Raises:
        AxisError: ``a`` has no such axis, or an axis occurs twice.
        ShapeError: ``axes`` does not name all dimensions.

    >>> st.transpose(st.zeros((4, 2, 3))).shape
    (3, 2, 4)
    """
    return permute_dims(a, tuple(range(len(shape_of(a))))[::-1] if axes is None else _listed(axes))


def _listed(axes: Any) -> tuple[Any, ...]:
    """Returns an axis, or a sequence of axes, as a tuple."""
    check_no_iterator(axes, "axes")
    return tuple(axes) if np.iterable(axes) else (axes,)


@operator("... i j -> ... j i", tags=("any dtype", "exact"))
def matrix_transpose(x: ArrayLike, /) -> ShardedTensor:
    """Transposes the last two dimensions of x, which has at least two. A view.

    Each dimension keeps its sharding; no data moves.

    Raises:
        ShapeError: x has fewer than two dimensions.

    >>> st.matrix_transpose(st.asarray([[1, 2], [3, 4]])).tolist()
    [[1, 3], [2, 4]]
    """


@implements(matrix_transpose, "view_spec")
def _matrix_transpose_view(view_spec: ViewSpec) -> ViewSpec | None:
    ndim = len(view_spec.shape)
    return None if ndim < 2 else view_spec.permuted((*range(ndim - 2), ndim - 1, ndim - 2))


@operator(tags=("any dtype",))
def moveaxis(x: ArrayLike, source: int | Iterable[int], destination: int | Iterable[int], /) -> ShardedTensor:
    """Moves the dimensions ``source`` of x to the positions ``destination``; the others remain in order. A view.

    Each dimension keeps its sharding; no data moves.

    Raises:
        AxisError: x has no such axis, or an axis occurs twice.
        ArgumentError: ``source`` and ``destination`` have different lengths.

    >>> st.moveaxis(st.zeros((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """


@implements(moveaxis, "composite")
def _moveaxis(x: Any, source: Any, destination: Any) -> Any:
    ndim = len(shape_of(x))
    origin, to = normalize_axes(source, ndim), normalize_axes(destination, ndim)
    if len(origin) != len(to):
        raise ArgumentError(
            f"moveaxis: source has {counted(len(origin), 'axis', 'axes')} and destination {len(to)}; wanted as many of "
            "each"
        )
    order = [a for a in range(ndim) if a not in origin]
    for at, axis in sorted(zip(to, origin, strict=True)):
        order.insert(at, axis)
    return permute_dims(x, tuple(order))


def _squeezed(shape: Shape, axis: int | tuple[int, ...] | None) -> Sequence[int]:
    """Returns the dimensions that `squeeze` removes.

    Raises:
        AxisError: there is no such axis, or an axis occurs twice.
        ShapeError: a dimension in ``axis`` has another size than 1.
    """
    gone = [a for a, n in enumerate(shape) if n == 1] if axis is None else normalize_axes(axis, len(shape))
    for a in gone:
        if shape[a] != 1:
            raise ShapeError(
                f"dimension {a} of x has size {shape[a]}, shape {shape}; only dimensions of size 1 can be removed"
            )
    return gone


def _squeeze_rule(shapes: Sequence[Shape], *, axis: int | tuple[int, ...] | None = None) -> str:
    shape = shapes[0]
    gone = _squeezed(shape, axis)
    left = [f"d{a}!" if a in gone else f"d{a}" for a in range(len(shape))]
    return f"{' '.join(left)} -> {' '.join(name for name in left if not name.endswith('!'))}"


@operator(_squeeze_rule, tags=("any dtype",))
def squeeze(x: ArrayLike, /, axis: int | tuple[int, ...] | None = None) -> ShardedTensor:
    """Removes the dimensions ``axis``, which must have size 1; None removes all dimensions of size 1. A view.

    The remaining dimensions keep their sharding; the result is replicated along mesh axes that shard a removed one.

    Raises:
        AxisError: x has no such axis, or an axis occurs twice.
        ShapeError: a dimension in ``axis`` has another size than 1.

    >>> st.squeeze(st.zeros((1, 3)), 0).shape
    (3,)
    """


@implements(squeeze, "view_spec")
def _squeeze_view(view_spec: ViewSpec, axis: int | tuple[int, ...] | None) -> ViewSpec:
    gone = _squeezed(view_spec.shape, axis)
    return view_spec.at(Index([0 if a in gone else (0, n, 1) for a, n in enumerate(view_spec.shape)]))


@implements(squeeze, "kernel")
def _squeeze_kernel(xp: Any, context: ShardContext, x: Any, *, axis: int | tuple[int, ...] | None) -> Any:
    """Removes dimensions that have size 1 in the whole array; a shard may have size 1 along others, too."""
    gone = _squeezed(context.shapes[0], axis)
    return xp.reshape(x, tuple(n for a, n in enumerate(x.shape) if a not in gone))


def _expand_rule(shapes: Sequence[Shape], *, axis: int | tuple[int, ...] = 0) -> str:
    names = _names(len(shapes[0]))
    rest = iter(names.split())
    return f"{names} -> {' '.join('1' if new else next(rest) for new in _is_new(len(shapes[0]), axis))}"


def _is_new(ndim: int, axis: int | tuple[int, ...]) -> list[bool]:
    """Returns for each dimension of the result of `expand_dims` whether it is new."""
    ndim += len(axis) if isinstance(axis, (tuple, list)) else 1
    new = normalize_axes(axis, ndim)
    return [d in new for d in range(ndim)]


@operator(_expand_rule, tags=("any dtype",))
def expand_dims(x: ArrayLike, /, axis: int | tuple[int, ...] = 0) -> ShardedTensor:
    """Inserts dimensions of size 1 at the positions ``axis`` of the result. A view.

    The dimensions of x keep their sharding; the new ones are not sharded. No data moves.

    Raises:
        AxisError: the result has no such axis, or an axis occurs twice.

    >>> st.expand_dims(st.zeros((2, 3)), axis=1).shape
    (2, 1, 3)
    """


@implements(expand_dims, "view_spec")
def _expand_view(view_spec: ViewSpec, axis: int | tuple[int, ...]) -> ViewSpec:
    sizes = iter(view_spec.shape)
    return view_spec.at(Index([None if new else (0, next(sizes), 1) for new in _is_new(len(view_spec.shape), axis)]))


def _broadcast_rule(shapes: Sequence[Shape], *, shape: Shape) -> tuple[str, Shape]:
    (old,) = shapes
    new = checked_shape(shape)
    extra = len(new) - len(old)
    if extra < 0 or any(n not in (1, m) for n, m in zip(old, new[max(extra, 0) :], strict=True)):
        raise ShapeError(f"x has shape {old}, which does not broadcast to {new}")
    left = [f"d{d}" if n == new[extra + d] else f"one{d}!" for d, n in enumerate(old)]
    right = [f"new{d}" for d in range(extra)] + [n if n.startswith("d") else f"wide{d}" for d, n in enumerate(left)]
    return f"{' '.join(left)} -> {' '.join(right)}", new


@operator(_broadcast_rule, tags=("any dtype", "exact", "keeps arrays", "linear"))
def broadcast_to(x: ArrayLike, /, shape: int | Iterable[int]) -> ShardedTensor:
    """Broadcasts x to ``shape``: adds leading dimensions and repeats dimensions of size 1.

    The result is an independent tensor. Dimensions that are not repeated keep their sharding; the new and the repeated
    ones are not sharded.

    Raises:
        ArgumentTypeError: ``shape`` is neither an integer nor a sequence of integers.
        ShapeError: x does not broadcast to ``shape``.

    >>> st.broadcast_to(st.asarray([1, 2]), (2, 2)).tolist()
    [[1, 2], [1, 2]]
    """


@implements(broadcast_to, "kernel")
def _broadcast_kernel(xp: Any, context: ShardContext, x: Any, *, shape: Shape) -> Any:
    return xp.broadcast_to(x, context.local_shape)


@operator(tags=("any dtype",))
def unstack(x: ArrayLike, /, axis: int = 0) -> tuple[ShardedTensor, ...]:
    """Returns a tuple of the slices of x along ``axis``, one for each index, each without that dimension: views.

    Slice i is ``x[i]`` for ``axis=0``, and is sharded like it (see `shardtensor.functions.standard.indexing.getitem`).

    Raises:
        AxisError: x has no such axis.
        ShapeError: x is 0-d.

    >>> [row.tolist() for row in st.unstack(st.asarray([[1, 2], [3, 4]]))]
    [[1, 2], [3, 4]]
    """


@implements(unstack, "composite")
def _unstack(x: Any, axis: int) -> tuple[Any, ...]:
    if not shape_of(x):
        raise ShapeError("x has no dimensions to unstack; wanted at least one")
    along = normalize_axis(axis, len(shape_of(x)))
    return tuple([call("getitem", x, (slice(None),) * along + (i,)) for i in range(shape_of(x)[along])])


# -- reshape ---------------------------------------------------------------------------------------


@operator(tags=("any dtype", "array views", "exact", "keeps arrays", "linear", "view if straight"))
def reshape(
    x: ArrayLike, /, shape: Shape, *, copy: bool | None = None, out_sharding: Where | None = None
) -> ShardedTensor:
    """Reshapes x to ``shape``, with the elements in row-major order.

    Dimensions that do not change keep their sharding. Where dimensions are merged or divided, the first of the new
    dimensions takes over the sharding. If the boundaries between devices change, only the elements between the old and
    the new boundaries are transferred.

    Args:
        x: a tensor or a host array.
        shape: the new shape; one size may be -1 and is inferred from the others.
        copy: None returns a view where NumPy would, otherwise an independent tensor; True always returns an independent
            tensor; False always returns a view or raises.
        out_sharding: the sharding of the result, to which it is transferred: a NamedSharding, or a P on the
            mesh in use.

    Raises:
        ArgumentTypeError: ``shape`` is neither an integer nor a sequence of integers.
        ShapeError: the product of the sizes is not x's number of elements, or ``copy=False`` and a copy is required.

    >>> x = st.arange(12, device=st.make_mesh((4,), ("x",)))
    >>> with st.transfers() as log:
    ...     y = st.reshape(x, (4, -1))
    >>> y.shape, y.sharding.spec, log.bytes
    ((4, 3), P('x'), 0)
    """


@implements(reshape, "view_spec")
def _reshape_view(view_spec: ViewSpec, shape: Shape, copy: bool | None) -> ViewSpec | None:
    return None if truth_of(copy, "copy") else view_spec.reshaped(_whole_size(shape, view_spec.size))


@implements(reshape, "kernel")
def _reshape_on_device(xp: Any, context: ShardContext, x: Any, *, shape: Shape, copy: bool | None) -> Any:
    return xp.reshape(x, _whole_size(shape, math.prod(x.shape)))


def _whole_size(shape: Any, size: int) -> Shape:
    check_no_iterator(shape, "shape")
    sizes = integers(shape, "shape")
    if sizes.count(-1) > 1:
        raise ShapeError(f"shape {tuple(sizes)} has -1 more than once; wanted it once, since one size can be inferred")
    if -1 in sizes:
        rest = math.prod(n for n in sizes if n != -1)
        if rest == 0 or size % rest:
            raise ShapeError(f"x has {counted(size, 'element')}, which leaves no whole size for -1 in {tuple(sizes)}")
        sizes[sizes.index(-1)] = size // rest
    new = checked_shape(sizes)
    if math.prod(new) != size:
        raise ShapeError(f"x has {counted(size, 'element')} and shape {new} needs {math.prod(new)}")
    return new


@implements(reshape, "movement")
def _reshape(operands: Sequence[Operand], mesh: Mesh, *, shape: Any, copy: bool | None = None) -> DataMovement:
    (x,) = operands
    if copy is False and 0 not in x.shape:
        raise ShapeError(f"copy=False: x of shape {x.shape} must be copied for the shape {shape}, as in NumPy")
    old, new = x.shape, _whole_size(shape, math.prod(x.shape))
    sharding = layout_of(x, mesh)
    chains = sharding.spec.chains_of(len(old))
    target, result = [
        sharding.with_spec(sharding.spec.with_chains(parts)) for parts in reshaped_chains(old, new, chains)
    ]
    groups = reshape_groups(old, new)
    merged = identity(tuple([math.prod(old[d] for d in left) for left, _ in groups]))
    # Only the first dimension of a group is sharded, so that its elements are moved as if it were one dimension.
    source = _merged(target.grid(old), old, [left for left, _ in groups])
    flat = (source, _merged(result.grid(new), new, [right for _, right in groups]))
    return DataMovement(new, result, (merged,), lambda a: _reshaped(a, new), target=target, flat=flat)


def _reshaped(array: Any, shape: Shape) -> Any:
    """Reshapes an array: to a view where the strides allow one, otherwise to a copy."""
    if not array.flags.c_contiguous:
        strides = tuple([stride // array.itemsize for stride in array.strides])
        if reshaped_strides(array.shape, strides, shape) is None:
            array = copied(array)
    return array.reshape(shape)


def _merged(grid: Grid, shape: Shape, groups: Sequence[list[int]]) -> Grid:
    """Returns a grid with each group of dimensions merged into one; only the first dimension of a group is sharded."""
    bounds = tuple([grid.offsets[group[0]] * math.prod(shape[d] for d in group[1:]) for group in groups])
    return Grid(grid.devices, bounds, grid.parts[:, [group[0] for group in groups]])


def layout_of(x: Operand, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an operand; for a host array, the one that ``device=mesh`` means."""
    return x.sharding if isinstance(x, Aval) else as_sharding(mesh, x.ndim, "host array")


# -- flip and roll ---------------------------------------------------------------------------------


@operator(tags=("exact",))
def flip(x: ArrayLike, /, axis: int | Iterable[int] | None = None) -> ShardedTensor:
    """Reverses the order of the elements along ``axis``, an integer or a tuple; None reverses all dimensions. A view.

    The result has x's sharding, so that reading it transfers elements between devices along a sharded ``axis``.

    Raises:
        AxisError: x has no such axis, or an axis occurs twice.

    >>> st.flip(st.arange(4)).tolist()
    [3, 2, 1, 0]
    """


@implements(flip, "view_spec")
def _flip_view(view_spec: ViewSpec, axis: int | tuple[int, ...] | None) -> ViewSpec:
    turned = reduced_axes(axis, len(view_spec.shape))
    index = Index([(n - 1, n, -1) if d in turned else (0, n, 1) for d, n in enumerate(view_spec.shape)])
    return view_spec.at(index, scalar=not index)  # NumPy returns a scalar for a 0-d array.


@implements(flip, "movement")
def _flip(operands: Sequence[Operand], mesh: Mesh, *, axis: int | tuple[int, ...] | None = None) -> DataMovement:
    (x,) = operands
    turned = reduced_axes(axis, x.ndim)
    lines = tuple(Line(0, n, d, n - 1, -1) if d in turned else Line(0, n, d) for d, n in enumerate(x.shape))
    return DataMovement(x.shape, layout_of(x, mesh), (Region(0, lines),), lambda a: np.flip(a, turned))


@operator()
def roll(x: ArrayLike, /, shift: int | tuple[int, ...], axis: int | Iterable[int] | None = None) -> ShardedTensor:
    """Rolls the elements along ``axis`` by ``shift`` positions; those beyond the last position reappear at the first.

    The result is an independent tensor with x's shape and sharding. Along a sharded ``axis``, the elements that change
    their device are transferred.

    Args:
        x: a tensor or a host array.
        shift: the number of positions; a tuple has one for each axis, or several for one axis, which are added.
            Negative ones shift towards the first position.
        axis: the dimension or dimensions to roll; shifts of an axis that occurs twice are added. None rolls the
            flattened array and restores its shape.

    Raises:
        AxisError: x has no such axis.
        ArgumentError: ``shift`` is a tuple that has neither one number nor one for each axis.

    >>> st.roll(st.arange(5), 2).tolist()
    [3, 4, 0, 1, 2]
    """


@implements(roll, "composite")
def _roll_flat(x: Any, shift: Any, axis: Any) -> Any:
    if axis is not None:
        return NotImplemented
    if len(shape_of(x)) == 1:
        return roll(x, shift, axis=0)
    rolled = roll(reshape(x, (-1,)), shift, axis=0)
    return reshape(rolled, shape_of(x), copy=True)  # A view would keep the temporary as its base.


@implements(roll, "movement")
def _roll(operands: Sequence[Operand], mesh: Mesh, *, shift: Any, axis: Any) -> DataMovement:
    (x,) = operands
    try:
        pairs = np.broadcast(shift, axis)
    except ValueError:
        shifts, axes = [len(x) if isinstance(x, (list, tuple)) else 1 for x in (shift, axis)]
        counts = f"{counted(shifts, 'shift')} for {counted(axes, 'axis', 'axes')}"
        raise ArgumentError(f"{counts}; give one for all, or one for each") from None
    total = [0] * x.ndim
    for s, a in pairs:
        total[normalize_axis(_python_number(a), x.ndim)] += _shift(_python_number(s))
    runs = [_turned(d, n, total[d]) for d, n in enumerate(x.shape)]
    regions = tuple(Region(0, lines) for lines in itertools.product(*runs))
    return DataMovement(
        x.shape, layout_of(x, mesh), regions, lambda a: np.roll(a, total, tuple(range(x.ndim))), copies=True
    )


def _python_number(x: Any) -> Any:
    """Returns an item of an array that NumPy has made of numbers as it was given."""
    return x.item() if isinstance(x, np.generic) else x


def _shift(shift: Any) -> int:
    """Returns a shift as an integer, truncated as by NumPy.

    Raises:
        ArgumentTypeError: it is not a finite number.
    """
    if isinstance(shift, (int, float)) and math.isfinite(shift):
        return int(shift)
    raise ArgumentTypeError(f"shift is {shift!r:.60}; wanted an integer")


def _turned(dimension: int, size: int, shift: int) -> list[Line]:
    """Returns the one or two lines (runs of indices) of a rolled dimension."""
    s = shift % size if size else 0
    lines = [Line(s, size, dimension)]
    return [Line(0, s, dimension, size - s), *lines] if s else lines
