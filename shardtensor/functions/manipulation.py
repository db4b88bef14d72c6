"""Manipulation functions (a chapter of the standard), declared. They only move elements, and only those that must:
where the layout of the result puts an element on a device that has it already, nothing is sent.

Errors: AxisError for an axis that is not there or occurs twice, ShapeError for shapes that do not fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import call, implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.functions.data_movement import DataMovement
from shardtensor.host.blockwise import copied
from shardtensor.sharding.copy_plan import Line, Region, identity
from shardtensor.sharding.index import Index
from shardtensor.sharding.layout import Grid, NamedSharding, Shape, as_sharding
from shardtensor.sharding.mesh import Mesh
from shardtensor.sharding.rules import normalize_axes, normalize_axis, reduced_axes
from shardtensor.sharding.shard_context import Place
from shardtensor.sharding.spec import P
from shardtensor.sharding.view_spec import ViewSpec, reshape_groups, reshaped_chains, reshaped_strides
from shardtensor.tensor.operands import HostAval
from shardtensor.tensor.tensor import ArrayLike, ShardedTensor
from shardtensor.tensor.value import Aval

Operand = Aval | HostAval


# -- dimensions that change their place or their number --------------------------------------------


def _permute_rule(shapes: Sequence[Shape], *, axes: tuple[int, ...]) -> str:
    ndim = len(shapes[0])
    return f"{_names(ndim)} -> {' '.join(f'd{a}' for a in _order_of(axes, ndim))}"


def _names(ndim: int) -> str:
    return " ".join(f"d{i}" for i in range(ndim))


@operator(_permute_rule)
def permute_dims(x: ArrayLike, /, axes: tuple[int, ...]) -> ShardedTensor:
    """The dimensions in the order ``axes``; each takes its split along, and nothing moves.

    >>> x = st.zeros((4, 2, 3), device=st.make_mesh((4,), ("x",)))
    >>> st.permute_dims(x, (2, 0, 1)).sharding.spec
    P(None, 'x')
    """


@implements(permute_dims, "window")
def _permute_window(window: ViewSpec, axes: tuple[int, ...]) -> ViewSpec:
    return window.permuted(_order_of(axes, len(window.shape)))


def _order_of(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """The axes as numbers from 0: each once."""
    order = normalize_axes(axes, ndim)
    if len(order) != ndim:
        raise ShapeError(f"axes={axes} names {len(order)} of x's {ndim} dimensions; name each once")
    return order


@operator("... i j -> ... j i")
def matrix_transpose(x: ArrayLike, /) -> ShardedTensor:
    """The last two dimensions exchanged; each takes its split along, and nothing moves.

    >>> st.matrix_transpose(st.asarray([[1, 2], [3, 4]])).tolist()
    [[1, 3], [2, 4]]
    """


@implements(matrix_transpose, "window")
def _matrix_transpose_window(window: ViewSpec) -> ViewSpec | None:
    ndim = len(window.shape)
    return None if ndim < 2 else window.permuted((*range(ndim - 2), ndim - 1, ndim - 2))


@operator()
def moveaxis(x: ArrayLike, source: int | tuple[int, ...], destination: int | tuple[int, ...], /) -> ShardedTensor:
    """The dimensions ``source`` at the positions ``destination``, the others in their order; nothing moves between
    devices.

    >>> st.moveaxis(st.zeros((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """


@implements(moveaxis, "composite")
def _moveaxis(x: Any, source: Any, destination: Any) -> Any:
    ndim = np.ndim(x)
    fro, to = normalize_axes(source, ndim), normalize_axes(destination, ndim)
    if len(fro) != len(to):
        raise ArgumentError(f"moveaxis: source has {len(fro)} axes and destination {len(to)}; wanted as many of each")
    order = [a for a in range(ndim) if a not in fro]
    for at, axis in sorted(zip(to, fro, strict=True)):
        order.insert(at, axis)
    return permute_dims(x, tuple(order))


def _squeezed(shape: Shape, axis: int | tuple[int, ...] | None) -> Sequence[int]:
    """The dimensions that go."""
    gone = [a for a, n in enumerate(shape) if n == 1] if axis is None else normalize_axes(axis, len(shape))
    for a in gone:
        if shape[a] != 1:
            raise ShapeError(f"dimension {a} of x has size {shape[a]}, shape {shape}; only dimensions of size 1 can go")
    return gone


def _squeeze_rule(shapes: Sequence[Shape], *, axis: int | tuple[int, ...] | None = None) -> str:
    shape = shapes[0]
    gone = _squeezed(shape, axis)
    names = [f"d{i}" for i in range(len(shape))]
    left = [f"{name}!" if a in gone else name for a, name in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(name for a, name in enumerate(names) if a not in gone)}"


@operator(_squeeze_rule)
def squeeze(x: ArrayLike, /, axis: int | tuple[int, ...] | None = None) -> ShardedTensor:
    """Without the dimensions ``axis`` of size 1 (all of size 1 for None). Splits of the others stay.

    >>> st.squeeze(st.zeros((1, 3)), 0).shape
    (3,)
    """


@implements(squeeze, "window")
def _squeeze_window(window: ViewSpec, axis: int | tuple[int, ...] | None) -> ViewSpec:
    gone = _squeezed(window.shape, axis)
    return window.at(Index([0 if a in gone else (0, n, 1) for a, n in enumerate(window.shape)]))


@implements(squeeze, "kernel")
def _squeeze_kernel(xp: Any, place: Place, x: Any, *, axis: int | tuple[int, ...] | None) -> Any:
    """The whole array says which dimensions have size 1: a part of it may have more of them."""
    gone = _squeezed(place.shapes[0], axis)
    return xp.reshape(x, tuple(n for a, n in enumerate(x.shape) if a not in gone))


def _expand_rule(shapes: Sequence[Shape], *, axis: int | tuple[int, ...] = 0) -> str:
    ndim = len(shapes[0]) + (1 if not isinstance(axis, tuple) else len(axis))
    new = normalize_axes(axis, ndim)
    rest = iter(_names(len(shapes[0])).split())
    return f"{_names(len(shapes[0]))} -> {' '.join('1' if d in new else next(rest) for d in range(ndim))}"


@operator(_expand_rule)
def expand_dims(x: ArrayLike, /, *, axis: int | tuple[int, ...] = 0) -> ShardedTensor:
    """With new dimensions of size 1 at the positions ``axis`` of the result. Splits stay with their dimensions.

    >>> st.expand_dims(st.zeros((2, 3)), axis=1).shape
    (2, 1, 3)
    """


@implements(expand_dims, "window")
def _expand_window(window: ViewSpec, axis: int | tuple[int, ...]) -> ViewSpec:
    ndim = len(window.shape) + (1 if not isinstance(axis, tuple) else len(axis))
    new, sizes = normalize_axes(axis, ndim), iter(window.shape)
    return window.at(Index([None if d in new else (0, next(sizes), 1) for d in range(ndim)]))


def _broadcast_rule(shapes: Sequence[Shape], *, shape: Shape) -> tuple[str, Shape]:
    (old,) = shapes
    new = checked_shape(shape)
    extra = len(new) - len(old)
    if extra < 0 or any(n not in (1, m) for n, m in zip(old, new[max(extra, 0) :], strict=True)):
        raise ShapeError(f"x has shape {old}, which does not broadcast to {new}")
    left = [f"d{d}" if n == new[extra + d] else f"one{d}!" for d, n in enumerate(old)]
    right = [f"new{d}" for d in range(extra)] + [n if n.startswith("d") else f"wide{d}" for d, n in enumerate(left)]
    return f"{' '.join(left)} -> {' '.join(right)}", new


@operator(_broadcast_rule)
def broadcast_to(x: ArrayLike, /, shape: Shape) -> ShardedTensor:
    """x repeated to ``shape``: new dimensions in front, dimensions of size 1 widened. What is repeated is whole on
    every device.

    >>> st.broadcast_to(st.asarray([1, 2]), (2, 2)).tolist()
    [[1, 2], [1, 2]]
    """


@implements(broadcast_to, "kernel")
def _broadcast_kernel(xp: Any, place: Place, x: Any, *, shape: Shape) -> Any:
    return xp.broadcast_to(x, place.local_shape)


def checked_shape(shape: Any) -> Shape:
    """A shape from what users write for one: an integer, or a sequence of them.

    Raises:
        ArgumentTypeError: it is something else.
        ShapeError: a size is negative.
    """
    try:
        sizes = tuple(int(n.__index__()) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    except AttributeError:
        raise ArgumentTypeError(f"shape is {shape!r}; wanted an integer or a sequence of integers") from None
    if any(n < 0 for n in sizes):
        raise ShapeError(f"shape {sizes} has a negative size")
    return sizes


@operator()
def unstack(x: ArrayLike, /, *, axis: int = 0) -> tuple[ShardedTensor, ...]:
    """The parts of x along ``axis``, one for each index, without that dimension: views, as of ``x[i]``.

    >>> [row.tolist() for row in st.unstack(st.asarray([[1, 2], [3, 4]]))]
    [[1, 2], [3, 4]]
    """


@implements(unstack, "composite")
def _unstack(x: Any, axis: int) -> tuple[Any, ...]:
    if not np.ndim(x):
        raise ShapeError("x has no dimensions to take apart")
    along = normalize_axis(axis, np.ndim(x))
    return tuple([call("getitem", x, (slice(None),) * along + (i,)) for i in range(np.shape(x)[along])])


# -- reshape ---------------------------------------------------------------------------------------


@operator()
def reshape(x: ArrayLike, /, shape: Shape, *, copy: bool | None = None) -> ShardedTensor:
    """The same elements, in row-major order, in another shape; one size may be -1 and is worked out.

    Dimensions that merge or part give their split to the first of what they become. Where the boundaries between
    devices fall differently then, the elements between the old and the new ones move, and no others.

    Raises:
        ShapeError: the sizes do not multiply to x's.
        ShapeError: ``copy=False`` where the result is no view (``copy=True`` makes sure that it is none).

    >>> x = st.arange(12, device=st.make_mesh((4,), ("x",)))
    >>> with st.transfers() as log:
    ...     y = st.reshape(x, (4, -1))
    >>> y.shape, y.sharding.spec, log.bytes
    ((4, 3), P('x'), 0)
    """


@implements(reshape, "window")
def _reshape_window(window: ViewSpec, shape: Shape, copy: bool | None) -> ViewSpec | None:
    return None if copy else window.reshaped(_whole_size(shape, window.size))


@implements(reshape, "kernel")
def _reshape_on_device(xp: Any, place: Place, x: Any, *, shape: Shape, copy: bool | None) -> Any:
    return xp.reshape(x, _whole_size(shape, math.prod(x.shape)))


def _whole_size(shape: Any, size: int) -> Shape:
    sizes = list(shape) if isinstance(shape, (tuple, list)) else [shape]
    if sizes.count(-1) == 1:
        rest = math.prod(n for n in sizes if n != -1)
        if rest == 0 or size % rest:
            raise ShapeError(f"x has {size} elements, which leaves no whole size for -1 in {tuple(sizes)}")
        sizes[sizes.index(-1)] = size // rest
    new = checked_shape(sizes)
    if math.prod(new) != size:
        raise ShapeError(f"x has {size} elements and shape {new} wants {math.prod(new)}")
    return new


@implements(reshape, "movement")
def _reshape(operands: Sequence[Operand], mesh: Mesh, *, shape: Any, copy: bool | None = None) -> DataMovement:
    (x,) = operands
    if copy is False and 0 not in x.shape:
        raise ShapeError(f"copy=False: x of shape {x.shape} has to be copied for the shape {shape}, here as in NumPy")
    old, new = x.shape, _whole_size(shape, math.prod(x.shape))
    sharding = layout_of(x, mesh)
    chains = sharding.spec.chains_of(len(old))
    groups = reshape_groups(old, new)
    before, after = reshaped_chains(old, new, chains)
    target, result = sharding.with_spec(P(*before)), sharding.with_spec(P(*after))
    flat = _flat(target, result, old, new, groups)
    merged = tuple(math.prod(old[d] for d in left) for left, _ in groups)
    return DataMovement(new, result, (identity(merged),), lambda a: _reshaped(a, new), target=target, flat=flat)


def _reshaped(array: Any, shape: Shape) -> Any:
    """An array in another shape: a view where that can be."""
    if not array.flags.c_contiguous:
        strides = tuple([stride // array.itemsize for stride in array.strides])
        if reshaped_strides(array.shape, strides, shape) is None:
            array = copied(array)
    return array.reshape(shape)


def _flat(
    target: NamedSharding, result: NamedSharding, old: Shape, new: Shape, groups: Sequence[tuple[list[int], list[int]]]
) -> tuple[Grid, Grid]:
    """Both grids with each group merged into one dimension, of which only the first member is split."""

    def merge(grid: Grid, shape: Shape, members: Sequence[list[int]]) -> Grid:
        bounds = tuple(grid.offsets[m[0]] * math.prod(shape[d] for d in m[1:]) for m in members)
        parts = np.stack([grid.parts[:, m[0]] for m in members], axis=1) if members else grid.parts[:, :0]
        return Grid(grid.devices, bounds, parts)

    return (
        merge(target.grid(old), old, [left for left, _ in groups]),
        merge(result.grid(new), new, [right for _, right in groups]),
    )


def layout_of(x: Operand, mesh: Mesh) -> NamedSharding:
    """The sharding of an operand; a host array is taken to lie as creation functions would lay it out."""
    return x.sharding if isinstance(x, Aval) else as_sharding(mesh, x.ndim, "host array")


# -- flip and roll ---------------------------------------------------------------------------------


@operator()
def flip(x: ArrayLike, /, *, axis: int | tuple[int, ...] | None = None) -> ShardedTensor:
    """The elements in reverse order along ``axis`` (all axes for None). The layout stays; shards exchange their
    elements.

    >>> st.flip(st.arange(4)).tolist()
    [3, 2, 1, 0]
    """


@implements(flip, "window")
def _flip_window(window: ViewSpec, axis: int | tuple[int, ...] | None) -> ViewSpec:
    turned = reduced_axes(axis, len(window.shape))
    index = Index([(n - 1, n, -1) if d in turned else (0, n, 1) for d, n in enumerate(window.shape)])
    return window.at(index, scalar=not index)  # of no dimensions NumPy gives a scalar


@implements(flip, "movement")
def _flip(operands: Sequence[Operand], mesh: Mesh, *, axis: int | tuple[int, ...] | None = None) -> DataMovement:
    (x,) = operands
    turned = reduced_axes(axis, x.ndim)
    lines = tuple(Line(0, n, d, n - 1, -1) if d in turned else Line(0, n, d) for d, n in enumerate(x.shape))
    return DataMovement(x.shape, layout_of(x, mesh), (Region(0, lines),), lambda a: np.flip(a, turned))


@operator()
def roll(x: ArrayLike, /, shift: int | tuple[int, ...], *, axis: int | tuple[int, ...] | None = None) -> ShardedTensor:
    """The elements shifted by ``shift`` positions along ``axis``, those that leave at the end coming in at the
    beginning.

    Without an axis, the array is flattened, rolled and given its shape again. The layout stays.

    Raises:
        ArgumentError: several shifts, and not as many axes.

    >>> st.roll(st.arange(5), 2).tolist()
    [3, 4, 0, 1, 2]
    """


@implements(roll, "composite")
def _roll_flat(x: Any, shift: Any, axis: Any) -> Any:
    if axis is not None:
        return NotImplemented
    rolled = roll(reshape(x, (-1,)), shift, axis=0)
    return reshape(rolled, np.shape(x), copy=True)  # a view would keep a base that no name stands for


@implements(roll, "movement")
def _roll(operands: Sequence[Operand], mesh: Mesh, *, shift: Any, axis: Any) -> DataMovement:
    (x,) = operands
    axes = axis if isinstance(axis, tuple) else (axis,)
    shifts = shift if isinstance(shift, tuple) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ArgumentError(f"{len(shifts)} shifts for {len(axes)} axes; give one for all, or one for each")
    total = [0] * x.ndim
    for a, s in zip(axes, shifts, strict=True):
        total[normalize_axis(a, x.ndim)] += int(s)
    runs = [_turned(d, n, total[d]) for d, n in enumerate(x.shape)]
    regions = tuple(Region(0, lines) for lines in itertools.product(*runs))
    return DataMovement(
        x.shape, layout_of(x, mesh), regions, lambda a: np.roll(a, total, tuple(range(x.ndim))), copies=True
    )


def _turned(dimension: int, size: int, shift: int) -> list[Line]:
    """The one or two runs in which a rolled dimension is read."""
    s = shift % size if size else 0
    lines = [Line(s, size, dimension)]
    return [Line(0, s, dimension, size - s), *lines] if s else lines
