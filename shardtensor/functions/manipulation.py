"""Manipulation functions (a chapter of the standard), declared. They only move elements, and only those that must: where the layout
of the result puts an element on a device that has it already, nothing is sent.

Errors: AxisError for an axis that is not there or occurs twice, ShapeError for shapes that do not fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, ShapeError
from shardtensor.log import logger
from shardtensor.monoids import Place
from shardtensor.operands import HostAval
from shardtensor.planner import Line, Region, identity
from shardtensor.rules import normalize_axes, parse, propagate
from shardtensor.sharding import Chain, Grid, Mesh, NamedSharding, P, Shape, mesh_of, offsets
from shardtensor.tensor import ArrayLike, Aval, ShardedTensor
from shardtensor.transfer import Moved

Operand = Aval | HostAval


# -- dimensions that change their place or their number -----------------------------------------------------------------


def _permute_rule(shapes: Sequence[Shape], *, axes: tuple[int, ...]) -> str:
    ndim = len(shapes[0])
    order = normalize_axes(axes, ndim)
    if len(order) != ndim:
        raise ShapeError(f"axes={axes} names {len(order)} of x's {ndim} dimensions; name each once")
    return f"{_names(ndim)} -> {' '.join(f'd{a}' for a in order)}"


def _names(ndim: int) -> str:
    return " ".join(f"d{i}" for i in range(ndim))


@operator(_permute_rule)
def permute_dims(x: ArrayLike, /, axes: tuple[int, ...]) -> ShardedTensor:
    """The dimensions in the order ``axes``; each takes its split along, and nothing moves.

    >>> x = st.zeros((4, 2, 3), device=st.make_mesh((4,), ("x",)))
    >>> st.permute_dims(x, (2, 0, 1)).sharding.spec
    P(None, 'x')
    """


@operator("... i j -> ... j i")
def matrix_transpose(x: ArrayLike, /) -> ShardedTensor:
    """The last two dimensions exchanged; each takes its split along, and nothing moves.

    >>> st.matrix_transpose(st.asarray([[1, 2], [3, 4]])).tolist()
    [[1, 3], [2, 4]]
    """


@operator()
def moveaxis(x: ArrayLike, source: int | tuple[int, ...], destination: int | tuple[int, ...], /) -> ShardedTensor:
    """The dimensions ``source`` at the positions ``destination``, the others in their order; nothing moves between devices.

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


def _squeeze_rule(shapes: Sequence[Shape], *, axis: int | tuple[int, ...] | None = None) -> str:
    shape = shapes[0]
    gone = [a for a, n in enumerate(shape) if n == 1] if axis is None else normalize_axes(axis, len(shape))
    for a in gone:
        if shape[a] != 1:
            raise ShapeError(f"dimension {a} of x has size {shape[a]}, shape {shape}; only dimensions of size 1 can go")
    names = [f"d{i}" for i in range(len(shape))]
    left = [f"{name}!" if a in gone else name for a, name in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(name for a, name in enumerate(names) if a not in gone)}"


@operator(_squeeze_rule)
def squeeze(x: ArrayLike, /, axis: int | tuple[int, ...] | None = None) -> ShardedTensor:
    """Without the dimensions ``axis`` of size 1 (all of size 1 for None). Splits of the others stay.

    >>> st.squeeze(st.zeros((1, 3)), 0).shape
    (3,)
    """


@implements(squeeze, "kernel")
def _squeeze_kernel(xp: Any, place: Place, x: Any, *, axis: int | tuple[int, ...] | None) -> Any:
    """The whole array says which dimensions have size 1: a part of it may have more of them."""
    shape = place.shapes[0]
    gone = [a for a, n in enumerate(shape) if n == 1] if axis is None else normalize_axes(axis, len(shape))
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
    """x repeated to ``shape``: new dimensions in front, dimensions of size 1 widened. What is repeated is whole on every device.

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


# -- reshape ------------------------------------------------------------------------------------------------------------


@operator()
def reshape(x: ArrayLike, /, shape: Shape, *, copy: bool | None = None) -> ShardedTensor:
    """The same elements, in row-major order, in another shape; one size may be -1 and is worked out.

    Dimensions that merge or part give their split to the first of what they become. Where the boundaries between devices fall
    differently then, the elements between the old and the new ones move, and no others.

    Raises:
        ShapeError: the sizes do not multiply to x's.
        ArgumentError: ``copy=False`` (a tensor is a value: whether memory is shared never shows, so there is nothing to forbid).

    >>> x = st.arange(12, device=st.make_mesh((4,), ("x",)))
    >>> with st.transfers() as log:
    ...     y = st.reshape(x, (4, -1))
    >>> y.shape, y.sharding.spec, log.bytes
    ((4, 3), P('x'), 0)
    """


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


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Which dimensions become which: runs of old and new dimensions with equal products, as short as can be. Dimensions of size 1
    belong to none."""
    olds, news = ([d for d, n in enumerate(s) if n != 1] for s in (old, new))
    groups = []
    while olds or news:
        left, right = [olds.pop(0)], [news.pop(0)]
        a, b = old[left[0]], new[right[0]]
        while a != b:
            if a < b:
                left.append(olds.pop(0))
                a *= old[left[-1]]
            else:
                right.append(news.pop(0))
                b *= new[right[-1]]
        groups.append((left, right))
    return groups


@implements(reshape, "mover")
def _reshape(operands: Sequence[Operand], mesh: Mesh, *, shape: Any, copy: bool | None = None) -> Moved:
    if copy is False:
        raise ArgumentError("copy=False: a tensor is a value, and whether memory is shared never shows; leave copy out")
    (x,) = operands
    old, new = x.shape, _whole_size(shape, math.prod(x.shape))
    sharding = layout_of(x, mesh)
    chains = sharding.spec.chains_of(len(old))
    if 0 in old:
        result = sharding.with_spec(P())
        return Moved(new, result, (), lambda a: a.reshape(new), target=result, flat=_flat(result, result, old, new, [([*range(len(old))], [*range(len(new))])]))
    groups = _groups(old, new)
    before: list[Chain] = [()] * len(old)
    after: list[Chain] = [()] * len(new)
    for left, right in groups:
        before[left[0]] = after[right[0]] = tuple(itertools.chain.from_iterable(chains[d] for d in left))
    target, result = sharding.with_spec(P(*before)), sharding.with_spec(P(*after))
    flat = _flat(target, result, old, new, groups)
    merged = tuple(math.prod(old[d] for d in left) for left, _ in groups)
    return Moved(new, result, (identity(merged),), lambda a: a.reshape(new), target=target, flat=flat)


def _flat(
    target: NamedSharding, result: NamedSharding, old: Shape, new: Shape, groups: Sequence[tuple[list[int], list[int]]]
) -> tuple[Grid, Grid]:
    """Both grids with each group merged into one dimension, of which only the first member is split."""

    def merge(grid: Grid, shape: Shape, members: Sequence[list[int]]) -> Grid:
        bounds = tuple(grid.offsets[m[0]] * math.prod(shape[d] for d in m[1:]) if m else np.array([0, 1]) for m in members)
        parts = np.stack([grid.parts[:, m[0]] for m in members], axis=1) if members else grid.parts[:, :0]
        return Grid(grid.devices, bounds, parts)

    return (
        merge(target.grid(old), old, [left for left, _ in groups]),
        merge(result.grid(new), new, [right for _, right in groups]),
    )


def layout_of(x: Operand, mesh: Mesh) -> NamedSharding:
    """The sharding of an operand; for a host array, the mesh's first device holds all of it until the rule says otherwise."""
    if isinstance(x, Aval):
        return x.sharding
    return NamedSharding(mesh, P(mesh.axis_names) if x.ndim else P())


# -- flip and roll --------------------------------------------------------------------------------------------------------


@operator()
def flip(x: ArrayLike, /, *, axis: int | tuple[int, ...] | None = None) -> ShardedTensor:
    """The elements in reverse order along ``axis`` (all axes for None). The layout stays; shards exchange their elements.

    >>> st.flip(st.arange(4)).tolist()
    [3, 2, 1, 0]
    """


@implements(flip, "mover")
def _flip(operands: Sequence[Operand], mesh: Mesh, *, axis: int | tuple[int, ...] | None = None) -> Moved:
    (x,) = operands
    turned = normalize_axes(axis, x.ndim)
    lines = tuple(Line(0, n, d, n - 1, -1) if d in turned else Line(0, n, d) for d, n in enumerate(x.shape))
    return Moved(x.shape, layout_of(x, mesh), (Region(0, lines),), lambda a: np.flip(a, turned))


@operator()
def roll(
    x: ArrayLike, /, shift: int | tuple[int, ...], *, axis: int | tuple[int, ...] | None = None
) -> ShardedTensor:
    """The elements shifted by ``shift`` positions along ``axis``, those that leave at the end coming in at the beginning.

    Without an axis, the array is flattened, rolled and given its shape again. The layout stays.

    Raises:
        ArgumentError: several shifts, and not as many axes.

    >>> st.roll(st.arange(5), 2).tolist()
    [3, 4, 0, 1, 2]
    """


@implements(roll, "composite")
def _roll_flat(x: Any, shift: Any, axis: Any) -> Any:
    return NotImplemented if axis is not None else reshape(roll(reshape(x, (-1,)), shift, axis=0), np.shape(x))


@implements(roll, "mover")
def _roll(operands: Sequence[Operand], mesh: Mesh, *, shift: Any, axis: Any) -> Moved:
    (x,) = operands
    axes = axis if isinstance(axis, tuple) else (axis,)
    shifts = shift if isinstance(shift, tuple) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ArgumentError(f"{len(shifts)} shifts for {len(axes)} axes; give one for all, or one for each")
    total = [0] * x.ndim
    for a, s in zip(axes, shifts, strict=True):
        total[normalize_axes(a, x.ndim)[0]] += int(s)
    runs = [_turned(d, n, total[d]) for d, n in enumerate(x.shape)]
    regions = tuple(Region(0, lines) for lines in itertools.product(*runs))
    return Moved(x.shape, layout_of(x, mesh), regions, lambda a: np.roll(a, total, tuple(range(x.ndim))), copies=True)


def _turned(dimension: int, size: int, shift: int) -> list[Line]:
    """The one or two runs in which a rolled dimension is read."""
    s = shift % size if size else 0
    lines = [Line(s, size, dimension)]
    return [Line(0, s, dimension, size - s), *lines] if s else lines


# -- joining -------------------------------------------------------------------------------------------------------------


@operator()
def concat(arrays: Sequence[ArrayLike], /, *, axis: int | None = 0) -> ShardedTensor:
    """One array from several, end to end along ``axis`` (None: flattened first).

    Where each lives on a device of its own (a list that `shard` or `pmap` made), the result is split along ``axis`` over those
    devices, and moves nothing where the sizes follow the split rule. Else the layout is that of the operand that would cost most to move.

    Raises:
        ShapeError: nothing to join, or shapes that differ in another dimension.

    >>> parts = st.shard(st.arange(10), devices=st.devices()[:4])
    >>> with st.transfers() as log:
    ...     x = st.concat(parts)
    >>> x.tolist(), log.bytes
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 0)
    """


@implements(concat, "composite")
def _concat_flat(arrays: Sequence[Any], axis: int | None) -> Any:
    return NotImplemented if axis is not None else concat([reshape(a, (-1,)) for a in arrays])


@implements(concat, "mover")
def _concat(operands: Sequence[Operand], mesh: Mesh, *, axis: int) -> Moved:
    if not operands:
        raise ShapeError("there is nothing to join; give at least one array")
    first = operands[0]
    if not first.ndim:
        raise ShapeError("array 0 has no dimensions to join along; use stack")
    (along,) = normalize_axes(axis, first.ndim)
    for i, x in enumerate(operands):
        if x.ndim != first.ndim or any(a != b for d, (a, b) in enumerate(zip(x.shape, first.shape, strict=True)) if d != along):
            raise ShapeError(f"array {i} has shape {x.shape} and array 0 {first.shape}; they may differ along axis {along} only")
    shape = tuple(sum(x.shape[d] for x in operands) if d == along else n for d, n in enumerate(first.shape))
    sharding = _joined(operands, mesh, shape, along)
    regions, at = [], 0
    for i, x in enumerate(operands):
        regions.append(identity(x.shape, i, [at if d == along else 0 for d in range(x.ndim)]))
        at += x.shape[along]
    sizes = [x.shape[along] for x in operands]
    whole_shards = _one_each(operands, sharding, shape[along], sizes)
    return Moved(
        shape, sharding, regions, lambda *arrays: np.concatenate(arrays, axis=along), copies=True,
        as_pieces=(lambda array: array) if whole_shards else None,
    )  # fmt: skip


def _one_each(operands: Sequence[Operand], sharding: NamedSharding, size: int, sizes: Sequence[int]) -> bool:
    """Whether every operand is just the shard of one device of the result, in mesh order."""
    devices = sharding.mesh.flat
    homes = [x.sharding.mesh.flat for x in operands if isinstance(x, Aval)]
    same_dtype = len({x.dtype for x in operands}) == 1
    return (
        same_dtype
        and len(devices) > 1
        and homes == [(device,) for device in devices]
        and np.array_equal(np.cumsum(sizes), offsets(size, (len(devices),))[1:])
    )


@operator()
def unshard(arrays: Sequence[ArrayLike], axis: int = 0) -> ShardedTensor:
    """One tensor from the list that `shard` made, or that `pmap` made of it: its inverse.

    The result is split along ``axis`` over the devices of the list. Where the sizes follow the split rule, nothing moves; else the rows are
    rebalanced, which is counted, and said in the log.

    Raises:
        ShapeError: an empty list, or shapes that differ in another dimension.

    >>> st.unshard(st.shard(np.arange(5))).tolist()
    [0, 1, 2, 3, 4]
    """


@implements(unshard, "kernel")
def _unshard_on_device(xp: Any, place: Place, *arrays: Any, axis: int) -> Any:
    return xp.concat(list(arrays), axis=axis)


@implements(unshard, "mover")
def _unshard(operands: Sequence[Operand], mesh: Mesh, *, axis: int) -> Moved:
    moved = _concat(operands, mesh, axis=axis)
    moved.explicit = True
    if not moved.as_pieces and len(operands) > 1:
        sizes = [x.shape[axis] for x in operands]
        logger.info("unshard: %s rows along axis %d do not follow the split rule; they are rebalanced", sizes, axis)
    return moved


@operator()
def stack(arrays: Sequence[ArrayLike], /, *, axis: int = 0) -> ShardedTensor:
    """One array from several of the same shape, along a new dimension at the position ``axis`` of the result.

    Where each lives on a device of its own, the new dimension is split over those devices: see `concat`.

    Raises:
        ShapeError: nothing to join, or shapes that differ.

    >>> st.stack([st.arange(2), st.arange(2)], axis=1).tolist()
    [[0, 0], [1, 1]]
    """


@implements(stack, "mover")
def _stack(operands: Sequence[Operand], mesh: Mesh, *, axis: int = 0) -> Moved:
    if not operands:
        raise ShapeError("there is nothing to join; give at least one array")
    first = operands[0].shape
    for i, x in enumerate(operands):
        if x.shape != first:
            raise ShapeError(f"array {i} has shape {x.shape} and array 0 {first}; wanted equal shapes")
    (along,) = normalize_axes(axis, len(first) + 1)
    shape = (*first[:along], len(operands), *first[along:])
    sharding = _joined(operands, mesh, shape, along, new=True)
    regions = []
    for i in range(len(operands)):
        lines = [Line(0, n, d) for d, n in enumerate(first)]
        lines.insert(along, Line(i, i + 1, None))
        regions.append(Region(i, tuple(lines)))
    whole_shards = _one_each(operands, sharding, len(operands), [1] * len(operands))
    return Moved(
        shape, sharding, regions, lambda *arrays: np.stack(arrays, axis=along), copies=True,
        as_pieces=(lambda array: array[(slice(None),) * along + (None,)]) if whole_shards else None,
    )  # fmt: skip


def _joined(operands: Sequence[Operand], mesh: Mesh, shape: Shape, along: int, *, new: bool = False) -> NamedSharding:
    """The layout of joined operands: see `concat`."""
    homes = [x.sharding.mesh.flat for x in operands if isinstance(x, Aval)]
    devices = tuple(dict.fromkeys(home[0] for home in homes))
    if len(homes) == len(operands) and len(devices) > 1 and all(len(home) == 1 for home in homes):
        return NamedSharding(mesh_of(devices), P(*[None] * along, "d"))
    inner = [n for d, n in enumerate(shape) if not (new and d == along)]
    layouts = [
        layout_of(x, mesh).spec.chains_of(len(inner)) if not homes or (isinstance(x, Aval) and x.sharding.mesh == mesh) else None
        for x in operands
    ]
    rule = parse(f"{', '.join([_names(len(inner))] * len(operands))} -> {_names(len(inner))}", (len(inner),) * len(operands))
    weights = [x.nbytes for x in operands]
    chains = list(propagate(rule, [tuple(inner)] * len(operands), layouts, weights, mesh.shape, combines=False).result)
    if new:
        chains.insert(along, ())
    memory = next((x.sharding.memory_kind for x in operands if isinstance(x, Aval) and x.sharding.mesh == mesh), None)
    return NamedSharding(mesh, P(*chains), memory_kind=memory)


@operator()
def assemble(blocks: Sequence[ArrayLike], /, mesh: Mesh, axes: tuple[int | None, ...]) -> ShardedTensor:
    """One tensor from the blocks that the devices of a mesh hold, in mesh order: along mesh axis k they follow one another along
    the array axis ``axes[k]``; where that is None, they are the same.

    Raises:
        ShapeError: blocks whose sizes do not fit together.

    >>> from shardtensor.functions.manipulation import assemble
    >>> mesh = st.make_mesh((2,), ("x",))
    >>> blocks = [st.device_put(np.full((2,), i), d) for i, d in enumerate(mesh.flat)]
    >>> assemble(blocks, mesh, (0,)).tolist()
    [0, 0, 1, 1]
    """


@implements(assemble, "mover")
def _assemble(operands: Sequence[Operand], _: Mesh, *, mesh: Mesh, axes: tuple[int | None, ...]) -> Moved:
    ndim = operands[0].ndim
    chains = [tuple(n for n, axis in zip(mesh.axis_names, axes, strict=True) if axis == d) for d in range(ndim)]
    sharding = NamedSharding(mesh, P(*chains))
    counts = [tuple(mesh.shape[name] for name in chain) for chain in chains]
    parts = sharding.grid((0,) * ndim).parts.tolist()
    sizes: list[list[int | None]] = [[None] * math.prod(c) for c in counts]
    for x, part in zip(operands, parts, strict=True):
        for d, p in enumerate(part):
            n = x.shape[d] if x.ndim == ndim else None
            if n is None or sizes[d][p] not in (None, n):
                raise ShapeError(f"smap: results of shapes {operands[0].shape} and {x.shape} do not fit together along axis {d}")
            sizes[d][p] = n
    begins = [np.concatenate([[0], np.cumsum(np.array(s, np.int64))]).tolist() for s in sizes]
    shape = tuple(b[-1] for b in begins)
    fresh: dict[tuple[int, ...], Region] = {}
    for i, (x, part) in enumerate(zip(operands, parts, strict=True)):
        fresh.setdefault(tuple(part), identity(x.shape, i, [begins[d][p] for d, p in enumerate(part)]))

    def whole(*arrays: Any) -> Any:
        out = np.empty(shape, np.result_type(*[a.dtype for a in arrays]))
        for region in fresh.values():
            out[tuple(slice(line.begin, line.end) for line in region.lines)] = arrays[region.operand]
        return out

    by_rule = all(np.array_equal(b, offsets(n, c)) for b, n, c in zip(begins, shape, counts, strict=True))
    at_home = [x.sharding.mesh.flat for x in operands if isinstance(x, Aval)] == [(d,) for d in mesh.flat]
    as_pieces = (lambda array: array) if by_rule and at_home and len({x.dtype for x in operands}) == 1 else None
    return Moved(shape, sharding, tuple(fresh.values()), whole, copies=True, explicit=True, as_pieces=as_pieces)
