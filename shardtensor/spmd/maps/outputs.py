"""Outputs of mapped functions: joins the results of all calls into tensors, and checks that results declared as equal
are equal.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardtensor.backend.device import Device
from shardtensor.backend.registry import array_backend, backend_of, in_job, is_remote, is_spanning
from shardtensor.backend.small_floats import is_element
from shardtensor.communication.messages import bring
from shardtensor.communication.transfer_log import Transfer, record_transfer
from shardtensor.core import implements, operator
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShapeError, type_text
from shardtensor.functions.placement.shard_lists import split_over
from shardtensor.functions.placement.transfers import ensure_sharding, transfer_to
from shardtensor.functions.standard.joining import assemble, assemble_sums
from shardtensor.host.units import counted
from shardtensor.sharding.layout import NamedSharding, as_sharding
from shardtensor.sharding.mesh import Mesh, submeshes_along
from shardtensor.sharding.spec import Chain, P, PartitionSpec
from shardtensor.spmd.maps.launch import BATCHING, DERIVATIVES
from shardtensor.tensor.operands import as_operand
from shardtensor.tensor.pytree import form_of, hint_to_register, leaves, paths, replaced
from shardtensor.tensor.storage import Storage
from shardtensor.tensor.tensor import ShardedTensor, are_tensors, lacks_elements, shard_arrays

Specs = Callable[[Any], Sequence[PartitionSpec | None]]


def joined(results: Sequence[Any], specs: Specs, mesh: Mesh, mapped: Chain, caller: str, *, check: bool = True) -> Any:
    """Joins the results of all calls, pytrees of one form, into one pytree of tensors.

    Args:
        results: one for each call, in mesh order of the mapped axes; of the same form (see `same_forms`).
        specs: ``specs(result)`` returns for each leaf the partition spec that names the dimensions along which the
            arrays of the calls are concatenated.
        mesh: all devices; devices that differ only along unmapped axes belong to one call.
        mapped: the mapped axes.
        caller: the map, for error messages.
        check: whether to check that arrays are equal across the mapped axes that a spec does not name.

    Raises:
        ShapeError: the shapes do not fit together, or arrays that must be equal differ.
        AxisError: a spec has more dimensions than the arrays.
        ArgumentError: the spec of a leaf is None, and the leaf is not.
        ArgumentTypeError: a leaf is not an array.
    """
    whole = []
    columns = [results] if are_tensors(results) else zip(*[leaves(tree) for tree in results], strict=True)
    for column, spec, path in zip(columns, specs(results[0]), paths(results[0], "the result"), strict=True):
        whole.append(joined_leaf(column, spec, mesh, mapped, f"{caller}: {path}", check=check))
    return replaced(results[0], whole)


def same_forms(results: Sequence[Any], caller: str) -> None:
    """Checks that all calls returned pytrees of one form.

    Raises:
        ShapeError: two calls returned pytrees of different forms.
    """
    if are_tensors(results):
        return
    form = form_of(results[0])
    for k, other in enumerate(results):
        if form_of(other) != form:
            raise ShapeError(
                f"{caller}: calls 0 and {k} return pytrees of different forms, {form} and {form_of(other)}; return the "
                "same one from each"
            )


def check_array(leaf: Any, what: str) -> None:
    """Checks that a leaf of a result is None or can become part of a tensor.

    Raises:
        ArgumentTypeError: the leaf is neither None, nor a scalar, nor an array of numbers.
    """
    if leaf is None or isinstance(leaf, (ShardedTensor, bool, int, float, complex)) or array_backend(leaf) is not None:
        return
    if not isinstance(leaf, (np.ndarray, np.generic)) or not is_element(leaf.dtype):
        kind = f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"{type_text(leaf)}"
        raise ArgumentTypeError(
            f"{what} is {kind}; wanted an array of numbers, or a pytree of them{hint_to_register(leaf)}"
        )


_AXIS_FOR_SCALARS = (
    "; st.psum and st.P() in out_specs make one result of those of all calls; to join them, return an axis "
    "(keepdims=True, or st.expand_dims)"
)


def joined_leaf(
    column: Sequence[Any], spec: PartitionSpec | None, mesh: Mesh, mapped: Chain, what: str, *, check: bool = True
) -> Any:
    """Joins one leaf of all results into one tensor (see `joined`); ``what`` is the name of map and leaf in errors."""
    if column[0] is None and all(leaf is None for leaf in column):
        return None
    if spec is None:
        raise ArgumentError(f"{what} is {type_text(column[0])}, and out_specs says None for it; wanted a P")
    caller = what.partition(":")[0]
    rest = tuple([name for name in mesh.axis_names if name not in mapped])
    submeshes = submeshes_along(mesh, rest)
    blocks: list[ShardedTensor] = [
        leaf
        if type(leaf) is ShardedTensor and leaf._aval.sharding.mesh is submesh
        else _block(leaf, submesh, what, caller)
        for leaf, (_, submesh) in zip(column, submeshes, strict=True)
    ]
    first, dimensions = blocks[0], [len(block._aval.shape) for block in blocks]
    if len(spec) > first.ndim:
        fix = "" if first.ndim else _AXIS_FOR_SCALARS
        raise AxisError(
            f"{what} has shape {first.shape}, and {spec} has entries for {counted(len(spec), 'dimension')}{fix}"
        )
    for block, ndim in zip(blocks, dimensions, strict=True):
        if ndim != dimensions[0]:
            raise ShapeError(f"{what} has shapes {first.shape} and {block.shape} on {first.device} and {block.device}")
    if check:
        _check_equal(blocks, spec, mesh, mapped, what, caller)
    if rest:
        inner = first.sharding.spec
        blocks = [ensure_sharding(b, NamedSharding(b.sharding.mesh, inner), caller) for b in blocks]
        pairs = zip(spec.chains_of(first.ndim), inner.chains_of(first.ndim), strict=True)
        spec = spec.with_chains([outer + within for outer, within in pairs])
        held = {
            k: x
            for b, (group, _) in zip(blocks, submeshes, strict=True)
            for k, x in zip(group, split_over(b, b.sharding.mesh.axis_names), strict=True)
        }
        blocks = [held[k] for k in range(mesh.size)]
    try:
        return (assemble_sums if spec.unreduced else assemble)(blocks, mesh, spec)
    except ShapeError as error:
        there = {block.shape: block.device for block in reversed(blocks)}
        listing = ", ".join([f"{shape} on {device}" for shape, device in reversed(list(there.items())[-4:])])
        raise ShapeError(f"{what}: {str(error).removeprefix('assemble: ')}; there are {listing}") from None


def _block(leaf: Any, submesh: Mesh, what: str, caller: str) -> ShardedTensor:
    """Returns the result of one call as a tensor on the devices of that call."""
    if isinstance(leaf, ShardedTensor):
        there = leaf.sharding.mesh
        if there == submesh:
            return leaf
        if (there.flat, there.axis_sizes) != (submesh.flat, submesh.axis_sizes):
            return transfer_to(leaf, as_sharding(submesh, leaf.ndim, "join"), caller)
        names = dict(zip(there.axis_names, submesh.axis_names, strict=True))
        chains = [tuple([names[a] for a in chain]) for chain in leaf.sharding.spec.chains_of(leaf.ndim)]
        return transfer_to(leaf, NamedSharding(submesh, P(*chains)), caller)
    if leaf is None:
        raise ArgumentTypeError(f"{what} is a NoneType on {submesh.flat[0]}; wanted an array on every device")
    check_array(leaf, what)
    array = np.asarray(as_operand(leaf, "join"))
    return transfer_to(array, as_sharding(submesh, array.ndim, "join"), caller)


def _check_equal(
    blocks: Sequence[ShardedTensor], spec: PartitionSpec, mesh: Mesh, mapped: Chain, what: str, caller: str
) -> None:
    """Checks that calls that differ only along axes that the spec does not name returned equal arrays; raises
    ShapeError otherwise.
    """
    twins = _twins(spec, mesh, mapped)
    if not twins:
        return
    spans = in_job() and is_spanning(mesh.flat)
    if spans:
        from shardtensor.spmd.maps.maps_across_processes import (  # Programs of one process do not need it.
            note_equal,
            twins_here,
        )

        firsts, twins = twins_here(twins, blocks)
    pairs: list[tuple[ShardedTensor, ShardedTensor]] = []
    same: list[tuple[ShardedTensor, ShardedTensor]] = []
    for first, other in twins:
        a, b = blocks[first], blocks[other]
        if _are_one(a, b):
            same.append((a, b))
            continue
        if a.sharding.spec != b.sharding.spec and a.shape == b.shape:
            b = transfer_to(b, NamedSharding(b.sharding.mesh, a.sharding.spec), caller)
        pairs.append((a, b))
    _announce(same, caller)
    if pairs:
        silent = ", ".join([repr(axis) for axis in mapped if axis not in _named(spec)])
        check_equal(pairs, f"{what} is declared to be equal along {silent}, which {spec} does not name", caller)
    if spans:
        note_equal(firsts, what)


@operator(operands=("pairs",), trees=("pairs",), tags=("internal", "spmd"))
def check_equal(pairs: Sequence[tuple[ShardedTensor, ShardedTensor]], /, declared: str, caller: str) -> None:
    """Checks that pairs of tensors of the same layout have the same elements, for the map ``caller``.

    Raises:
        ShapeError: two tensors differ. The message begins with ``declared``.

    >>> from shardtensor.spmd.maps.outputs import check_equal
    >>> check_equal([(st.zeros(3), st.zeros(3))], "shard_map: the result is declared to be equal", "shard_map")
    """


for _function in (assemble, assemble_sums, check_equal):
    implements(_function, "derivative")(DERIVATIVES)
implements(check_equal, "batching")(BATCHING)


@implements(check_equal, "algorithm")
def _check_elements(pairs: Sequence[tuple[ShardedTensor, ShardedTensor]], declared: str, caller: str) -> None:
    _infer_check_equal(pairs, declared, caller)
    for a, b in pairs:
        _check_pair(a, b, lacks_elements(a) or _same(a, b), declared)


@implements(check_equal, "infer")
def _infer_check_equal(pairs: Sequence[tuple[ShardedTensor, ShardedTensor]], declared: str, caller: str) -> None:
    _announce(pairs, caller)
    for a, b in pairs:
        _check_pair(a, b, (a.shape, a.dtype) == (b.shape, b.dtype), declared)


def _announce(pairs: Sequence[tuple[ShardedTensor, ShardedTensor]], caller: str) -> None:
    """Records the transfers of comparisons by `_same`, if a log is active."""
    if pairs:
        record_transfer(caller, 0, True, lambda: [record for a, b in pairs for record in _transfers(a, b, caller)])


def _check_pair(a: ShardedTensor, b: ShardedTensor, same: bool, declared: str) -> None:
    if not same:
        raise ShapeError(
            f"{declared}, and on {a.device} and {b.device} it differs; combine it first (st.psum, st.pmean, …), or "
            "name the axis"
        )


def _are_one(a: ShardedTensor, b: ShardedTensor) -> bool:
    """Whether the elements of two tensors are one array, or views of the host of the same elements, as a collective
    returns them to its programs.
    """
    mine, other = a._storage, b._storage
    if type(mine) is not Storage or type(other) is not Storage or len(mine.buffers) != 1:
        return False
    x, y = mine.buffers[0], other.buffers[0]
    return x is y or (type(x) is np.ndarray is type(y) and _elements_of(x) == _elements_of(y))


def _elements_of(array: np.ndarray) -> Any:
    """Identifies the elements of a host array, as long as it exists."""
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype


def _named(spec: PartitionSpec) -> set[str]:
    """Returns the axes along which results may differ."""
    return {axis for axis in spec.axes if axis not in spec.reduced}


@functools.lru_cache(1024)
def _twins(spec: PartitionSpec, mesh: Mesh, mapped: Chain) -> list[tuple[int, int]]:
    """Returns the pairs of calls whose results must be equal: each call, and the first call that it must agree with."""
    order = [axis for axis in mesh.axis_names if axis in mapped]
    calls = np.arange(math.prod(mesh.shape[axis] for axis in order)).reshape([mesh.shape[axis] for axis in order])
    first = calls[tuple([slice(None) if axis in _named(spec) else slice(1) for axis in order])]
    pairs = zip(np.broadcast_to(first, calls.shape).ravel().tolist(), calls.ravel().tolist(), strict=True)
    return [(twin, k) for twin, k in pairs if twin != k]


def _transfers(a: ShardedTensor, b: ShardedTensor, caller: str) -> Iterator[Transfer]:
    """Yields the records of a comparison: separate memories send the shards of ``b`` to the devices of ``a``."""
    copies, grid = not a._aval.backend.on_host, b._aval.grid
    for k, (here, there) in enumerate(zip(a.sharding.mesh.flat, b.sharding.mesh.flat, strict=True)):
        nbytes = math.prod(grid.shape(k)) * b.itemsize
        yield Transfer(nbytes, nbytes * copies, there, here, caller, True)


def _same(a: ShardedTensor, b: ShardedTensor) -> bool:
    """Whether two tensors of the same shape and dtype have the same elements. NaN counts as equal to NaN."""
    pairs = zip(shard_arrays(a), shard_arrays(b), a.sharding.mesh.flat, b.sharding.mesh.flat, strict=True)
    return all(itertools.starmap(_alike, pairs))


def _alike(x: Any, y: Any, here: Device, there: Device) -> bool:
    """Whether two arrays on the devices ``here`` and ``there`` have the same elements; ``y`` is sent to the device of
    ``x``. Arrays of different processes are not compared.
    """
    if x is y or is_remote(here) or is_remote(there):
        return True
    backend = backend_of(here)
    other = bring(y, there, here)
    with backend.on(here):
        xp, same = backend.xp, backend.xp.equal(x, other)
        if bool(backend.to_host(backend.asarray(xp.all(same)), here)):
            return True
        if backend.dtype_of(x).kind not in "fcmM":
            return False
        same = xp.logical_or(same, xp.logical_and(xp.isnan(x), xp.isnan(other)))
        return bool(backend.to_host(backend.asarray(xp.all(same)), here))
