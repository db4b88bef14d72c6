"""Declarations of the functions that join several arrays into one.

If each operand is exactly one shard of the result, on the device of that shard, no data moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardtensor.core import call, composition, implements, operator
from shardtensor.errors import ArgumentTypeError, ShapeError
from shardtensor.functions.building.data_movement import DataMovement
from shardtensor.functions.standard.manipulation import layout_of, reshape
from shardtensor.host import memory_pool
from shardtensor.host.blockwise import copy_into
from shardtensor.sharding.copy_plan import Line, Region, identity
from shardtensor.sharding.layout import NamedSharding, Shape, offsets
from shardtensor.sharding.mesh import Mesh, mesh_of
from shardtensor.sharding.rules import normalize_axis, parse, propagate
from shardtensor.sharding.shard_context import ShardContext
from shardtensor.sharding.spec import P, PartitionSpec
from shardtensor.tensor.operands import HostAval, shape_of
from shardtensor.tensor.partial_sum_storage import PartialSums
from shardtensor.tensor.tensor import SCALARS, ArrayLike, ShardedTensor, tensor
from shardtensor.tensor.value import Aval, aval, common_reduced, memory_kind

_DERIVATIVES = "of_movement"

Operand = Aval | HostAval


@operator(variadic=True, tags=("linear",))
def concat(arrays: Sequence[ArrayLike], /, axis: int | None = 0) -> ShardedTensor:
    """Concatenates arrays along an existing dimension.

    If each array is a tensor on a single device, and these are several devices of one backend (as in a list that
    `shard` or `pmap` returned), the result is sharded along ``axis`` over them. If, moreover, the devices are distinct
    and the sizes follow the split rule, no data moves. For any other arrays, the result has the sharding of the operand
    that would be most expensive to move. The dtype is that to which the arrays are promoted.

    Args:
        arrays: a sequence of tensors or host arrays, or of scalars for ``axis=None``; an array is the sequence of its
            rows, as in NumPy.
        axis: the dimension along which the sizes may differ and are added; None flattens each array first.

    Raises:
        ArgumentTypeError: ``arrays`` is not a sequence.
        AxisError: the arrays have no such axis.
        ShapeError: ``arrays`` is empty or has a 0-d array, or shapes differ in another dimension than ``axis``.

    >>> parts = st.shard(st.arange(10), devices=st.devices()[:4])
    >>> with st.transfers() as log:
    ...     x = st.concat(parts)
    >>> x.tolist(), log.bytes
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 0)
    """


@implements(concat, "composite")
def _concat_flat(arrays: Sequence[Any], axis: int | None) -> Any:
    return NotImplemented if axis is not None else concat([reshape_operand(a, (-1,)) for a in arrays])


def reshape_operand(x: Any, shape: Shape) -> Any:
    """Reshapes an operand. A host array remains one, so that it is transferred directly into the result's sharding."""
    return np.reshape(x, shape) if is_on_host(x) else reshape(x, shape)


def is_on_host(x: Any) -> bool:
    """Whether an operand is a host array or a scalar."""
    return type(x) in SCALARS or isinstance(x, (np.ndarray, np.generic))


@implements(concat, "movement")
def _concat(operands: Sequence[Operand], mesh: Mesh, *, axis: int) -> DataMovement:
    first = _first(operands)
    if not first.ndim:
        raise ShapeError("array 0 has no dimensions to join along; use stack")
    along = normalize_axis(axis, first.ndim)
    before, after = first.shape[:along], first.shape[along + 1 :]
    for i, x in enumerate(operands):
        if x.ndim != first.ndim or (x.shape[:along], x.shape[along + 1 :]) != (before, after):
            raise ShapeError(
                f"array {i} has shape {x.shape} and array 0 {first.shape}; they may differ along axis {along} only"
            )
    begins = np.cumsum([0, *[x.shape[along] for x in operands]]).tolist()
    shape = (*before, begins[-1], *after)
    sharding = _joined(operands, mesh, shape, along)
    regions = [
        identity(x.shape, i, [begin if d == along else 0 for d in range(x.ndim)])
        for i, (x, begin) in enumerate(zip(operands, begins, strict=False))
    ]
    by_rule = np.array_equal(begins, offsets(begins[-1], (len(operands),)))
    return DataMovement(
        shape, sharding, regions, lambda *arrays: np.concatenate(arrays, axis=along, out=_new(shape, arrays)),
        copies=True, as_pieces=(lambda array: array) if by_rule and _are_shards(operands, sharding) else None,
    )  # fmt: skip


def _first(operands: Sequence[Operand]) -> Operand:
    """Returns the first operand.

    Raises:
        ShapeError: there are no operands.
    """
    if not operands:
        raise ShapeError("there is nothing to join; give at least one array")
    return operands[0]


def _new(shape: Shape, arrays: Sequence[Any]) -> Any:
    """Returns the uninitialized host array into which ``arrays`` are joined, of the dtype to which they promote."""
    return memory_pool.empty(shape, np.result_type(*[a.dtype for a in arrays]))


def _are_shards(operands: Sequence[Operand], sharding: NamedSharding) -> bool:
    """Returns whether operand k is a tensor on device k of the mesh only, for all k, and their dtypes are equal."""
    submeshes = [x.sharding.mesh.flat if isinstance(x, Aval) else () for x in operands]  # () for a host array.
    return submeshes == [(device,) for device in sharding.mesh.flat] and len({x.dtype for x in operands}) == 1


@operator(variadic=True, tags=("any dtype", "lists only"))
def unshard(arrays: Sequence[ArrayLike], axis: int = 0) -> ShardedTensor:
    """Joins a list that `shard` returned, or that `pmap` returned for it, into one tensor: the inverse of `shard`.

    The result is sharded along ``axis`` over the devices of the list, by the rules of `concat`. If the sizes follow the
    split rule, no data moves; otherwise the elements are rebalanced, by a transfer that is counted as explicit and
    logged.

    Args:
        arrays: a list of tensors or host arrays.
        axis: the dimension along which they are joined.

    Raises:
        ArgumentTypeError: ``arrays`` is not a sequence, or is one array, whose rows are not shards.
        ShapeError: ``arrays`` is empty or has a 0-d array, or shapes differ in another dimension than ``axis``.

    >>> st.unshard(st.shard(np.arange(5))).tolist()
    [0, 1, 2, 3, 4]
    """


@implements(unshard, "kernel")
def _unshard_on_device(xp: Any, context: ShardContext, *arrays: Any, axis: int) -> Any:
    return xp.concat(list(arrays), axis=axis)


@implements(unshard, "movement")
def _unshard(operands: Sequence[Operand], mesh: Mesh, *, axis: int) -> DataMovement:
    moved = _concat(operands, mesh, axis=axis)
    sizes = [x.shape[axis] for x in operands]
    note = f"unshard: sizes {sizes} along axis {axis} do not follow the split rule; they are rebalanced"
    return replace(moved, explicit=True, note=note)


@operator(variadic=True, tags=("exact", "linear"))
def stack(arrays: Sequence[ArrayLike], /, axis: int = 0) -> ShardedTensor:
    """Stacks arrays of equal shape along a new dimension.

    If each array is a tensor on a single device, and these are several devices of one backend, the new dimension is
    sharded over them. Otherwise the new dimension is not sharded, and the other dimensions have the sharding of the
    operand that would be most expensive to move. The dtype is that to which the arrays are promoted.

    Args:
        arrays: a sequence of tensors, host arrays or scalars; an array is the sequence of its rows, as in NumPy.
        axis: the position of the new dimension in the result; negative ones count from the end.

    Raises:
        ArgumentTypeError: ``arrays`` is not a sequence.
        AxisError: the result has no such axis.
        ShapeError: ``arrays`` is empty, or the shapes differ.

    >>> st.stack([st.arange(2), st.arange(2)], axis=1).tolist()
    [[0, 0], [1, 1]]
    """


@implements(stack, "movement")
def _stack(operands: Sequence[Operand], mesh: Mesh, *, axis: int = 0) -> DataMovement:
    first = _first(operands).shape
    for i, x in enumerate(operands):
        if x.shape != first:
            raise ShapeError(f"array {i} has shape {x.shape} and array 0 {first}; wanted equal shapes")
    along = normalize_axis(axis, len(first) + 1)
    shape = (*first[:along], len(operands), *first[along:])
    sharding = _joined(operands, mesh, shape, along, new=True)
    regions = []
    for i in range(len(operands)):
        lines = [Line(0, n, d) for d, n in enumerate(first)]
        lines.insert(along, Line(i, i + 1, None))
        regions.append(Region(i, tuple(lines)))
    return DataMovement(
        shape, sharding, regions, lambda *arrays: np.stack(arrays, axis=along, out=_new(shape, arrays)), copies=True,
        as_pieces=(lambda array: array[(slice(None),) * along + (None,)]) if _are_shards(operands, sharding) else None,
    )  # fmt: skip


@composition()
def block(arrays: Any) -> ShardedTensor:
    """Joins the blocks of an array, which nested lists arrange: those of the innermost lists along the last dimension.

    The result is sharded as by `concat`.

    Args:
        arrays: nested lists of tensors, arrays and scalars. Arrays with fewer dimensions than the lists are deep get
            leading ones.

    Raises:
        ShapeError: a list is empty, lists differ in depth, or blocks do not fit together.

    >>> x = st.ones((2, 2), dtype=int)
    >>> st.block([[x, 2 * x], [3 * x, 4 * x]]).tolist()
    [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]
    """
    depth, ndim = _depth(arrays)
    ndim = max(depth, ndim)

    def joined(part: Any, level: int) -> Any:
        if isinstance(part, list):
            return concat([joined(item, level - 1) for item in part], axis=-level)
        shape = tuple(part.shape) if hasattr(part, "shape") else shape_of(part)
        return reshape_operand(part, (1,) * (ndim - len(shape)) + shape)

    return joined(arrays, depth) if depth else reshape(arrays, shape_of(arrays), copy=True)


def _depth(part: Any) -> tuple[int, int]:
    """Returns how deep nested lists are, and the greatest number of dimensions of an array in them."""
    if isinstance(part, tuple):
        raise ArgumentTypeError("block: arrays has a tuple; wanted lists, to tell them from arrays")
    if not isinstance(part, list):
        return 0, len(shape_of(part))
    if not part:
        raise ShapeError("block: arrays has an empty list; wanted at least one block")
    depths, dims = zip(*map(_depth, part), strict=True)
    if len(set(depths)) > 1:
        raise ShapeError(f"block: lists are nested {min(depths)} and {max(depths)} deep; wanted the same depth")
    return depths[0] + 1, max(dims)


def _joined(operands: Sequence[Operand], mesh: Mesh, shape: Shape, along: int, *, new: bool = False) -> NamedSharding:
    """Returns the sharding of joined operands: see `concat`."""
    submeshes = [x.sharding.mesh.flat for x in operands if isinstance(x, Aval)]
    devices = tuple(dict.fromkeys(group[0] for group in submeshes))
    single = len(submeshes) == len(operands) and all(len(group) == 1 for group in submeshes)
    # Operands of several backends go to the backend of the one that is most expensive to move.
    if single and len(devices) > 1 and len({device.backend for device in devices}) == 1:
        return NamedSharding(mesh_of(devices), P(*[None] * along, "d"))
    inner = tuple([n for d, n in enumerate(shape) if not (new and d == along)])
    layouts = [
        layout_of(x, mesh).spec.chains_of(len(inner))
        if not submeshes or (isinstance(x, Aval) and x.sharding.mesh == mesh)
        else None
        for x in operands
    ]
    rule = parse(f"{', '.join(['...'] * len(operands))} -> ...", (len(inner),) * len(operands))
    weights = [x.nbytes for x in operands]
    chains = list(propagate(rule, [inner] * len(operands), layouts, weights, mesh.shape, combines=False).result)
    if new:
        chains.insert(along, ())
    tensors = [x for x in operands if isinstance(x, Aval)]
    return NamedSharding(mesh, P(*chains, reduced=common_reduced(tensors, mesh)), memory_kind=memory_kind(tensors))


@operator(variadic=True, tags=("internal",))
def assemble(blocks: Sequence[ArrayLike], /, mesh: Mesh, spec: PartitionSpec) -> ShardedTensor:
    """Assembles one tensor with the sharding ``NamedSharding(mesh, spec)`` from one block for each device.

    If the sizes follow the split rule and each block is on its device, no data moves; otherwise the elements are
    rebalanced, by a transfer that is counted as explicit.

    Args:
        blocks: the blocks of the devices of ``mesh``, in mesh order, with equal numbers of dimensions. Of the blocks
            of devices that differ only along mesh axes which ``spec`` does not name, only the first is used.
        mesh: the mesh of the result.
        spec: the partition spec of the result.

    Raises:
        ShapeError: blocks differ in their numbers of dimensions, or those at the same position along a dimension differ
            in size there.

    >>> from shardtensor.functions.standard.joining import assemble
    >>> mesh = st.make_mesh((2,), ("x",))
    >>> blocks = [st.device_put(np.full((2,), i), d) for i, d in enumerate(mesh.flat)]
    >>> assemble(blocks, mesh, st.P("x")).tolist()
    [0, 0, 1, 1]
    """


@implements(assemble, "movement")
def _assemble(operands: Sequence[Operand], _: Mesh, *, mesh: Mesh, spec: PartitionSpec) -> DataMovement:
    ndim = operands[0].ndim
    chains = spec.chains_of(ndim)
    sharding = NamedSharding(mesh, spec)
    counts = [tuple(mesh.shape[name] for name in chain) for chain in chains]
    parts = sharding.grid((0,) * ndim).parts.tolist()
    firsts: list[dict[int, Operand]] = [{} for _ in chains]  # For each dimension the first block at each position.
    for x, part in zip(operands, parts, strict=True):
        for d, p in enumerate(part):
            first = firsts[d].setdefault(p, x) if x.ndim == ndim else operands[0]
            if x.ndim != ndim or first.shape[d] != x.shape[d]:
                raise ShapeError(f"blocks of shapes {first.shape} and {x.shape} do not fit together along axis {d}")
    begins = [np.cumsum([0, *[at[p].shape[d] for p in sorted(at)]]).tolist() for d, at in enumerate(firsts)]
    shape = tuple([b[-1] for b in begins])
    fresh: dict[tuple[int, ...], Region] = {}
    for i, (x, part) in enumerate(zip(operands, parts, strict=True)):
        fresh.setdefault(tuple(part), identity(x.shape, i, [begins[d][p] for d, p in enumerate(part)]))

    def whole(*arrays: Any) -> Any:
        out = _new(shape, arrays)
        for region in fresh.values():
            part = out[tuple(slice(line.begin, line.end) for line in region.lines)]
            copy_into(part, arrays[region.operand], breaks=True)
        return out

    by_rule = all(np.array_equal(b, offsets(n, c)) for b, n, c in zip(begins, shape, counts, strict=True))
    as_pieces = (lambda array: array) if by_rule and _are_shards(operands, sharding) else None
    return DataMovement(shape, sharding, tuple(fresh.values()), whole, copies=True, explicit=True, as_pieces=as_pieces)


@operator(variadic=True, tags=("internal",))
def assemble_sums(blocks: Sequence[ArrayLike], /, mesh: Mesh, spec: PartitionSpec) -> ShardedTensor:
    """Assembles an unreduced tensor with the sharding ``NamedSharding(mesh, spec)`` from one block for each device, the
    partial sums; see `assemble`.
    """


@implements(assemble_sums, "algorithm", "infer")
def _assemble_sums(*arguments: Any) -> ShardedTensor:
    *blocks, mesh, spec = arguments
    axes = tuple([axis for axis in mesh.axis_names if axis in spec.unreduced])
    items = [call("unsqueeze", block, 0) for block in blocks]
    parts = assemble(items, mesh, P(axes, *spec.chains))
    return tensor(aval(parts.shape[1:], parts.dtype, NamedSharding(mesh, spec), True), PartialSums(parts))
