"""`shard_jit`: runs a compiled function of whole arrays on lists that have the shards of each device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from shardtensor.core import hinted
from shardtensor.errors import ArgumentError, ArgumentTypeError, AxisError, ShardingError, type_text
from shardtensor.functions.placement.shard_lists import split_over
from shardtensor.functions.placement.transfers import transfer_to
from shardtensor.hints import similar
from shardtensor.host.units import counted
from shardtensor.interpreters.jit.jit import jit
from shardtensor.sharding.layout import NamedSharding
from shardtensor.sharding.mesh import Mesh, use_mesh
from shardtensor.sharding.rules import normalize_axis
from shardtensor.sharding.spec import Chain, P, PartitionSpec
from shardtensor.spmd.maps.outputs import joined_leaf
from shardtensor.tensor.pytree import flattened, form_of, leaves, paths, replaced, spread
from shardtensor.tensor.tensor import SCALARS, ShardedTensor

Result = TypeVar("Result")

Split = Mapping[int, Chain]
"""The mesh axes that split the dimensions of an array, by dimension; negative ones count from the end."""


@hinted
def shard_jit(
    fn: Callable[..., Result], mesh: Mesh, *, input_shardings: Sequence[Any]
) -> Callable[[Sequence[Sequence[Any]]], list[Result]]:
    """Returns a function that runs `jit` of ``fn`` on lists of shards: one list of arguments for each device of a mesh.

    It corresponds to `Nx.Defn.shard_jit`. ``fn`` receives whole arrays, of which the arguments in the lists are the
    shards, and is traced once for all devices: layouts follow from the operators, which also transfer what they need.
    (A function that receives the shards themselves is mapped by `pmap`.)

    The function that is returned takes a list of argument lists, in mesh order, and returns a list of results: item k
    has the shards on device k, so that it can be an argument of the next call, which transfers nothing. Arguments and
    results may be pytrees. Shards on other devices, and arrays of the host, are transferred; sizes may be uneven: those
    by the split rule stay where they are, others are rebalanced. Results that are not arrays are in each item.

    Args:
        fn: a function that `jit` can trace. Arrays that it creates are on ``mesh``.
        mesh: the devices.
        input_shardings: for each argument of ``fn`` a dict, whose keys are the dimensions that are split, and whose
            values are the mesh axes that split them: names or numbers, in a list if there are several, major first.
            ``{}`` is a replicated argument. A pytree may have one dict for all of its arrays, or a pytree of dicts in
            its form or in that of a prefix of it. Devices that differ only along mesh axes that a dict does not name
            need equal shards, which are not compared.

    Raises:
        ArgumentTypeError: ``fn`` is not a function, ``mesh`` is not a `Mesh`, or an entry is neither a dict nor a
            pytree of dicts; at a call: the argument is not a list of lists.
        ShardingError: an entry names an axis that the mesh does not have, or one twice.
        ArgumentError: at a call: the number of lists is not that of the devices, that of arguments is not that of
            entries, or the pytrees of an argument differ.
        AxisError: at a call: an argument does not have a dimension that its entry names.
        ShapeError: at a call: the shapes of shards do not fit together.

    >>> mesh = st.make_mesh((2, 2))
    >>> total = st.shard_jit(lambda x, y: x + y.sum(), mesh, input_shardings=[{0: [0], 1: [1]}, {}])
    >>> parts = total([[np.full((1, 2), k), np.arange(3)] for k in range(4)])
    >>> [part.tolist() for part in parts], parts[2].device
    ([[[3, 3]], [[4, 4]], [[5, 5]], [[6, 6]]], Device('numpy:2'))
    >>> [part.shape for part in total([[part, np.arange(3)] for part in parts])]
    [(1, 2), (1, 2), (1, 2), (1, 2)]
    """
    if not callable(fn):
        raise ArgumentTypeError(f"shard_jit: fn is {type_text(fn)}; wanted a function")
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError(f"shard_jit: mesh is {type_text(mesh)}; wanted a Mesh (see st.make_mesh)")
    if not isinstance(input_shardings, (list, tuple)):
        raise ArgumentTypeError(
            f"shard_jit: input_shardings is {type_text(input_shardings)}; wanted a list with a dict for each argument, "
            "such as [{0: ['x']}, {}]"
        )
    entries = [_splits(entry, mesh, f"shard_jit: input_shardings[{i}]") for i, entry in enumerate(input_shardings)]
    compiled = jit(fn)

    def sharded(args: Sequence[Sequence[Any]], /) -> list[Result]:
        columns = _columns(args, mesh, len(entries))
        with use_mesh(mesh):
            result = compiled(*[_whole(column, entries[i], mesh, i) for i, column in enumerate(columns)])
            parts = [_parts(leaf, mesh) for leaf in leaves(result)]
        return [replaced(result, [part[k] for part in parts]) for k in range(mesh.size)]

    return sharded


# -- arguments -------------------------------------------------------------------------------------


def _columns(args: Any, mesh: Mesh, count: int) -> list[tuple[Any, ...]]:
    """Returns for each argument its shards on all devices."""
    form = f"a list of {mesh.size} lists, one for each device of the mesh, of {counted(count, 'argument')} each"
    if not isinstance(args, (list, tuple)):
        raise ArgumentTypeError(f"shard_jit: the argument is {type_text(args)}; wanted {form}")
    if len(args) != mesh.size:
        raise ArgumentError(f"shard_jit: the argument is a list of {len(args)}; wanted {form}")
    for k, row in enumerate(args):
        if not isinstance(row, (list, tuple)):
            raise ArgumentTypeError(f"shard_jit: item {k} is {type_text(row)}; wanted {form}")
        if len(row) != count:
            raise ArgumentError(
                f"shard_jit: item {k} has {counted(len(row), 'argument')}, and input_shardings has "
                f"{counted(count, 'entry', 'entries')}; wanted one for each"
            )
    return list(zip(*args, strict=True))


def _whole(column: Sequence[Any], entry: Any, mesh: Mesh, number: int) -> Any:
    """Returns an argument as tensors on the mesh, of which the items of ``column`` have the shards."""
    name, first = f"argument {number}", column[0]
    for k, other in enumerate(column):
        if form_of(other) != form_of(first):
            raise ArgumentError(
                f"shard_jit: {name} is a pytree of the form {form_of(first)} in item 0, and {form_of(other)} in item "
                f"{k}; wanted one form"
            )
    splits = spread(entry, first, f"shard_jit: input_shardings[{number}]", name)
    rows = zip(*[leaves(tree) for tree in column], strict=True)
    tensors = []
    for row, split, path in zip(rows, splits, paths(first, name), strict=True):
        what = f"shard_jit: {path}"
        if type(row[0]) in SCALARS and not split:  # It stays weakly typed.
            tensors.append(row[0])
            continue
        tensors.append(joined_leaf(row, _spec(split, np.ndim(row[0]), what), mesh, mesh.axis_names, what, check=False))
    return replaced(first, tensors)


def _spec(split: Split, ndim: int, what: str) -> PartitionSpec:
    """Returns the partition spec that splits an array of ``ndim`` dimensions."""
    chains: list[Chain] = [()] * ndim
    for dimension, chain in split.items():
        try:
            d = normalize_axis(dimension, ndim)
        except AxisError as error:
            raise AxisError(f"{what}: input_shardings splits dimension {dimension}; {error}") from None
        if chains[d]:
            raise ShardingError(f"{what}: input_shardings has dimension {d} twice, as {d} and {d - ndim}")
        chains[d] = chain
    return P(*chains)


# -- input_shardings -------------------------------------------------------------------------------


def _splits(entry: Any, mesh: Mesh, what: str) -> Any:
    """Returns an entry of ``input_shardings``, a dict of dimensions or a pytree of these, with a `Split` for each."""
    dicts, structure = flattened(entry, _is_split, none_is_leaf=True)
    return structure.unflatten([_split(one, mesh, what) for one in dicts])


def _is_split(entry: object) -> bool:
    """Whether part of a pytree is a dict of dimensions: its keys are integers, those of trees of arrays are names."""
    return isinstance(entry, dict) and all(isinstance(key, int) for key in entry)


def _split(entry: Any, mesh: Mesh, what: str) -> Split:
    """Returns the names of the mesh axes that split each dimension; as no dict, so that it is a leaf of a pytree."""
    if not _is_split(entry):
        raise ArgumentTypeError(
            f"{what} has {type_text(entry)} in it, {entry!r:.60}; wanted a dict from the numbers of dimensions to mesh "
            "axes, such as {0: ['x']}"
        )
    chains = {
        dimension: tuple([_axis(axis, mesh, what) for axis in (axes if isinstance(axes, (list, tuple)) else [axes])])
        for dimension, axes in entry.items()
    }
    named = [axis for chain in chains.values() for axis in chain]
    if twice := [axis for axis in named if named.count(axis) > 1]:
        raise ShardingError(f"{what} has axis {twice[0]!r} twice; an axis splits one dimension at most")
    return MappingProxyType(chains)


def _axis(axis: Any, mesh: Mesh, what: str) -> str:
    """Returns the name of a mesh axis, which may be given by its number."""
    if isinstance(axis, int) and not isinstance(axis, bool):
        if 0 <= axis < len(mesh.axis_names):
            return mesh.axis_names[axis]
    elif axis in mesh.axis_names:
        return str(axis)
    known = f"the mesh has the axes {mesh.axis_names}, or by number 0 to {len(mesh.axis_names) - 1}"
    close = similar(axis, mesh.axis_names) if isinstance(axis, str) else ""
    raise ShardingError(f"{what} names mesh axis {axis!r:.60}; {known}{close}")


# -- results ---------------------------------------------------------------------------------------


def _parts(leaf: Any, mesh: Mesh) -> list[Any]:
    """Returns the shards of an array of the result in mesh order; any other object for each device."""
    if not isinstance(leaf, (ShardedTensor, np.ndarray)):
        return [leaf] * mesh.size
    if not isinstance(leaf, ShardedTensor) or leaf.sharding.mesh.flat != mesh.flat:
        leaf = transfer_to(leaf, NamedSharding(mesh, P()), "shard_jit")
    return split_over(leaf, leaf.sharding.mesh.axis_names)
